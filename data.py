"""
Text in, batches out: tokenizers, corpora on disk, and four ways to cut a corpus into batches.

A corpus is a folder that `load` makes on first use:

    corpora/code-bpe4096-5f0c21ab/
        train.bin  val.bin  test.bin    token ids of all documents, one document after the other
        train.idx  val.idx  test.idx    where each document starts and the last one ends, int64
        meta.json                       the tokenizer, counts, hashes

Its name ends with a hash of its source files (names, sizes, times): if one changes, another folder
is made. Every document ends with <|endoftext|>, except with `word`. A batch is a pure function of
(split, kind, block_size, micro_batch, seed, number): a run resumes from its step alone.

    $ python data.py --data my_texts/ --tokenizer bpe --vocab-size 4096
"""
import argparse, contextlib, hashlib, heapq, importlib.util, json, os, re, shutil, sys, sysconfig
import tempfile, time, urllib.request, zipfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, pairwise, starmap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import regex                # tiktoken depends on it
import tiktoken
import torch

from bm25 import BM25

SPLITS = ('train', 'val', 'test')
EOT = '<|endoftext|>'
PIECE = 1 << 18         # characters that are encoded at once, about
BPE_SAMPLE = 64 << 20   # bytes that bpe is learned from, at most


def digest(*values):
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def progress(items, desc, total=None, quiet=False):
    """The items, with a bar (tqdm, on a terminal) or a line every ten seconds."""
    total, printed = total or getattr(items, '__len__', int)(), time.time()
    if sys.stderr.isatty() and importlib.util.find_spec('tqdm'):
        from tqdm import tqdm
        items, quiet = tqdm(items, desc, total or None, leave=False, disable=quiet), True
    for n, item in enumerate(items):
        if time.time() - printed > 10 and not quiet:
            printed = time.time()
            print(f'{desc}: {n:,} of {total or "?"}', file=sys.stderr, flush=True)
        yield item


# --------------------------------------------------------------------------------------------------
# tokenizers
# GPT-2's words for bpe: contractions, letters, numbers, punctuation, blanks
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NO_GPT2 = ('no access to gpt2: TIKTOKEN_CACHE_DIR may have its vocab.bpe and encoder.json, named '
           '6d1cbeee0f20b3d9449abfede4726ed8212e3aee and 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6')


def words_of(text):
    """The words that WikiText's papers count: between blanks, and <eos> for each line end."""
    return text.replace('\n', ' <eos> ').split()


def learn_bpe(counts, n_merges):
    """
    Byte-pair encoding: n_merges times, the most frequent pair of adjacent tokens becomes a token,
    of equally frequent pairs the one with the smaller ids. {word: frequency} -> tokens; words and
    tokens have a character per byte. While a word is merged, its character i is token i.
    """
    tokens = [chr(i) for i in range(256)]
    words, number = list(counts), list(counts.values())
    total, where = Counter(), defaultdict(set)

    def add(w, sign):
        for pair in pairwise(words[w]):
            total[pair] += sign * number[w]                     # frequency of the pair
            where[pair].add(w)                                  # words that contain it, or did

    for w in range(len(words)):
        add(w, 1)
    heap = [(-n, pair) for pair, n in total.items()]
    heapq.heapify(heap)
    for new in progress(range(256, 256 + n_merges), 'learning bpe'):
        while heap and -heap[0][0] != total[heap[0][1]]:        # it has become rarer
            heapq.heapreplace(heap, (-total[heap[0][1]], heap[0][1]))
        if not heap or heap[0][0] == 0:
            break
        a, b = heapq.heappop(heap)[1]
        tokens.append(tokens[ord(a)] + tokens[ord(b)])
        changed = where.pop((a, b))
        for w in changed:
            add(w, -1)
            words[w] = words[w].replace(a + b, chr(new))
            add(w, 1)
        for pair in {pair for w in changed for pair in pairwise(words[w]) if chr(new) in pair}:
            heapq.heappush(heap, (-total[pair], pair))
    return tokens


class Tokenizer:
    """
    bytes   the 256 bytes and <|endoftext|>
    bpe     the 256 bytes, tokens learned from the corpus, and <|endoftext|>; tiktoken encodes
    gpt2    GPT-2's 50,257 tokens, from files that tiktoken downloads once
    word    WikiText's: words between blanks, <eos> for each line end, <unk>; most frequent first

    tokens: str by id, except for word in latin-1, a character per byte. eot: the last id, or None
    """
    NAMES = ('bytes', 'bpe', 'gpt2', 'word')

    def __init__(self, name, tokens=(), pattern=PATTERN):
        self.name, self.pattern = name, pattern
        self.tokens = [chr(i) for i in range(256)] if name == 'bytes' else list(tokens)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.eot = None if name == 'word' else len(self.tokens)
        if name in ('bpe', 'gpt2'):
            ranks = {token.encode('latin-1'): i for token, i in self.ids.items()}
            self.tiktoken = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                              special_tokens={EOT: self.eot})
        self.tokens += [] if name == 'word' else [EOT]
        self.n_vocab = len(self.tokens)
        self.dtype = np.dtype(np.uint16 if self.n_vocab <= 1 << 16 else np.uint32)      # on disk

    @classmethod
    def train(cls, name, texts=(), vocab_size=4096):
        """A tokenizer made from texts, an iterable of str; bytes and gpt2 need none."""
        if name == 'word':
            counts = Counter(word for text in texts for word in words_of(text))
            words = counts.keys() | {'<unk>', '<eos>'}
            return cls(name, sorted(words, key=lambda word: (-counts[word], word)))
        if name == 'bpe':
            words = (word[0] for text in texts for word in regex.finditer(PATTERN, text))
            counts, parts = Counter(words), Counter()
            for word, n in counts.items():
                word = word.encode().decode('latin-1')
                for i in range(0, len(word), 128):              # learning is slow in long words
                    parts[word[i:i + 128]] += n
            return cls(name, learn_bpe(parts, vocab_size - 257))
        if name == 'gpt2':
            try:
                gpt2 = tiktoken.get_encoding('gpt2')
            except Exception:                                   # of several packages
                raise SystemExit(NO_GPT2)
            tokens = map(gpt2.decode_single_token_bytes, range(gpt2.eot_token))
            return cls(name, [token.decode('latin-1') for token in tokens], gpt2._pat_str)
        return cls(name)

    def encode(self, text):
        """str -> (n,) uint32. <|endoftext|> within the text is ordinary text."""
        if self.name == 'word':
            return np.array([self.ids.get(w, self.ids['<unk>']) for w in words_of(text)], np.uint32)
        utf8 = text.encode('utf-8', 'replace')                  # '?' for a lone surrogate
        if self.name == 'bytes':
            return np.frombuffer(utf8, np.uint8).astype(np.uint32)
        return self.tiktoken.encode_to_numpy(utf8.decode(), disallowed_special=())

    def decode(self, ids):
        """Ids of any shape -> str; U+FFFD for what is not UTF-8"""
        tokens = [self.tokens[i] for i in np.asarray(ids).ravel().tolist()]
        if self.name == 'word':
            return ' '.join('\n' if word == '<eos>' else word for word in tokens)
        return ''.join(tokens).encode('latin-1').decode(errors='replace')

    def to_dict(self):
        return dict(name=self.name, tokens=self.tokens[:self.eot], pattern=self.pattern)

    @classmethod
    def from_dict(cls, d):
        return cls(**d)


# --------------------------------------------------------------------------------------------------
# corpora: their files, splits and documents; on disk
GITHUB = 'https://raw.githubusercontent.com/'
DOWNLOADS = {                       # corpus: (URL, of files or a zip; {file: begin of its sha256})
    'shakespeare': (GITHUB + 'karpathy/char-rnn/master/data/tinyshakespeare/{}',
                    {'input.txt': '86c4e6aa'}),
    'wikitext2': (GITHUB + 'pytorch/examples/main/word_language_model/data/wikitext-2/{}',
                  {'train.txt': '9e9fa1ad', 'valid.txt': 'f0737ed3', 'test.txt': 'd790b833'}),
    'wikitext103': ('https://wikitext.smerity.com/wikitext-103-v1.zip',
                    {f'wiki.{split}.tokens': '' for split in ('train', 'valid', 'test')}),
    'enwik8': ('http://mattmahoney.net/dc/enwik8.zip', {'enwik8': ''}),
    'pg19': ('gs://deepmind-gutenberg/{}', dict.fromkeys(('train', 'validation', 'test'), '')),
}
NOT_CODE = ('site-packages|dist-packages|test|tests|idle_test|encodings|pydoc_data|'
            'config-.*|_sysconfigdata.*')                       # the last two: by an installer
SPLIT_NAME = re.compile(r'(?:.*[._-])?(train|val|test)((?<=val)id(ation)?)?(?!\.py$)(\..*)?')
SAFE = re.compile(r'(?<=\S)\n(?=\S)')       # every tokenizer cuts here
# where an article of WikiText begins: ' = Title = ' between blank lines, after some text
ARTICLE = regex.compile(r'(?m)^(?= = (?!= ).*(?<! =) = ?\n[^\S\n]*$)(?<=\S\s*\n[^\S\n]*\n)')


def fetch(name, folder):
    """Downloads the files of a named corpus that are not in the folder, and checks their sha256."""
    place, files = DOWNLOADS[name]
    parts = folder / '.parts'
    parts.mkdir(parents=True, exist_ok=True)
    for file, sha in files.items():
        url = place.format(file)
        request = urllib.request.Request(url, headers={'User-Agent': 'Mozilla/5.0'})
        try:
            if not (folder / file).exists():
                print(f'downloading {url}')
                part = parts / Path(url).name
                with urllib.request.urlopen(request, timeout=60) as response, open(part, 'wb') as f:
                    shutil.copyfileobj(response, f)
                if part.suffix == '.zip':
                    zipfile.ZipFile(part).extractall(parts)
                for path in [path for path in parts.rglob('*') if path.name in files]:
                    path.replace(folder / path.name)
        except (OSError, zipfile.BadZipFile) as error:
            raise SystemExit(f'{url}: {error!r}; put {", ".join(files)} into {folder}')
        if sha and not hashlib.sha256((folder / file).read_bytes()).hexdigest().startswith(sha):
            raise SystemExit(f'{folder / file} has a wrong sha256: delete it to download it again')
    return folder


def list_files(where, suffix, omit):
    """{name in the folder: path}, sorted; omit: regular expression of names, as those with a dot"""
    paths, omit = [where] if where.is_file() else [], re.compile(rf'[.].*|{omit}')
    for folder, folders, names in os.walk(where):
        folders[:] = [name for name in folders if not omit.fullmatch(name)]
        paths += [Path(folder, name) for name in names if not omit.fullmatch(name)]
    where = where.parent if where.is_file() else where
    return {path.relative_to(where).as_posix(): path for path in sorted(paths, key=Path.as_posix)
            if path.name.endswith(suffix) and path.is_file() and path.stat().st_size}


def split_files(files, code):
    """
    {name: path} -> {split: [(paths, start, stop)]}: bytes start to stop of a file, or of a package.
    Files or folders named train, val, test are these splits. Others (of `code`, packages) go in
    order of sha256(name) to val, else to test, up to 5% of the bytes, else to train. If all are too
    large, each is cut at line ends near 90% and 95%.
    """
    groups, sources = defaultdict(list), {split: [] for split in SPLITS}
    for name, path in files.items():
        text = path.read_bytes()
        if b'\0' in text or text.decode(errors='ignore').encode() != text:
            print(f'skipped, not UTF-8 text: {path}')
        else:
            groups[name.split('/')[0] if code else name].append(path)
    sizes = {name: sum(path.stat().st_size for path in paths) for name, paths in groups.items()}
    split_of = {name: m[1] for name in sizes if (m := SPLIT_NAME.fullmatch(name.split('/')[0]))}
    if code or 'train' not in split_of.values():
        n_bytes = sum(sizes.values())
        room = dict(val=n_bytes // 20, test=n_bytes // 20, train=n_bytes)
        for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
            split_of[name] = next(split for split in room if sizes[name] <= room[split])
            room[split_of[name]] -= sizes[name]
        if 'val' not in split_of.values():
            for paths in groups.values():
                text, start = paths[0].read_bytes(), 0
                for split, percent in zip(SPLITS, (90, 95, 100)):
                    stop = text.find(b'\n', len(text) * percent // 100 - 1) + 1 or len(text)
                    sources[split] += [(paths, start, stop)] * (start < stop)
                    start = stop
            return sources
    for name in filter(split_of.get, groups):                   # a line end may be added to a file
        sources[split_of[name]].append((groups[name], 0, sizes[name] + len(groups[name])))
    return sources


def documents(paths, start, stop):
    """Part of files -> their documents: lines of a .jsonl, articles of WikiText, or all as one"""
    texts = [path.read_bytes() for path in paths]
    texts = [text + b'\n' * (text[-1:] != b'\n') for text in texts[:-1]] + texts[-1:]
    text = b''.join(texts)[start:stop].decode()
    if paths[0].suffix != '.jsonl':
        yield from [text] if paths[0].suffix == '.py' else ARTICLE.split(text)
        return
    for n, line in enumerate(text.split('\n'), 1 + texts[0].count(b'\n', 0, start)):
        try:
            if line.strip() and (document := json.loads(line)['text']):
                yield document.encode('utf-8', 'replace').decode()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SystemExit(f'{paths[0]}, line {n}: no {{"text": "..."}}')


def pieces(sources):
    """(text, whether a document ends with it): documents in pieces of about PIECE characters"""
    for text in chain.from_iterable(starmap(documents, sources)):
        start = 0
        while end := SAFE.search(text, start + PIECE):
            yield text[start:end.end()], False
            start = end.end()
        yield text[start:], True


class Split(NamedTuple):
    """Documents, one after the other. n_bytes and n_words (between blanks) count their text."""
    name: str
    tokens: np.ndarray      # (n_tokens,) uint16 or uint32, a memmap
    offsets: np.ndarray     # (n_docs + 1,) int64
    n_bytes: int = 0
    n_words: int = 0

    def doc_of(self, positions):
        """Positions of tokens -> numbers of their documents"""
        return np.searchsorted(self.offsets, positions, side='right') - 1


class Corpus:
    """
    A folder that `prepare` made: name, folder, tokenizer, train, val, test, each a Split or None,
    and fingerprint, hashes of the text and of the tokenizer. hops 1 or 2: batches are of Needles
    """
    train = val = test = None

    def __init__(self, name, folder, hops=0):
        self.name, self.folder, self.hops = name, folder, hops
        try:
            meta = json.loads((folder / 'meta.json').read_text())
            self.tokenizer = Tokenizer.from_dict(meta['tokenizer'])
            for split, m in meta['splits'].items():
                tokens = np.memmap(folder / f'{split}.bin', self.tokenizer.dtype, 'r')
                offsets = np.fromfile(folder / f'{split}.idx', np.int64)
                if not m['tokens'] == len(tokens) == offsets[-1] or np.diff(offsets).min() < 1 \
                        or tokens[:1 << 26].max() >= self.tokenizer.n_vocab:
                    raise ValueError(f'{split}.bin or {split}.idx does not match meta.json')
                setattr(self, split, Split(split, tokens, offsets, m['bytes'], m['words']))
            text = digest([m['sha256'] for m in meta['splits'].values()])
            self.fingerprint = f'{text[:8]}-{digest(meta["tokenizer"])[:8]}'
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise SystemExit(f'{folder} is damaged ({error}): delete it to prepare it again')

    def batches(self, split, chunk=32, grow=0, **how):
        """Of a split, see Batches; Needles with hops"""
        if self.hops:
            sizes = how['block_size'], how['micro_batch'], how['seed']
            return Needles(split, self.tokenizer, self.hops, *sizes, chunk, grow)
        if grow:
            raise SystemExit('--grow-context is for --data niah or niah2')
        return Batches(split, cache=self.folder, **how)


def write_split(path, sources, tokenizer):
    """Encodes a split into path.bin and path.idx -> its part of meta.json"""
    offsets, counts, sha = [0], np.zeros(3, int), hashlib.sha256()
    eot = np.uint32([] if tokenizer.eot is None else [tokenizer.eot])
    queue = pieces(progress(sources, f'encoding {path.name}'))
    with open(f'{path}.bin', 'wb') as f, ThreadPoolExecutor() as pool:
        while rows := list(islice(queue, 64)):
            for (text, ends), ids in zip(rows, pool.map(tokenizer.encode, next(zip(*rows)))):
                ids = np.append(ids, eot) if ends else ids
                f.write(ids.astype(tokenizer.dtype))
                sha.update(text.encode() + b'\0' * ends)
                counts += len(ids), len(text.encode()), len(text.split())
                offsets += [counts[0]] if ends else []
    np.unique(offsets).tofile(f'{path}.idx')                    # without documents that are empty
    return dict(zip(('tokens', 'bytes', 'words'), counts.tolist()), sha256=sha.hexdigest())


def prepare(folder, sources, tokenizer, vocab_size):
    """Writes a corpus to a temporary folder and renames it: an incomplete one is never opened."""
    if not sources['train']:
        raise SystemExit(f'no text for {folder}: --data is a path, code or {", ".join(DOWNLOADS)}')
    if not isinstance(tokenizer, Tokenizer):
        size = sum(stop - start for _, start, stop in sources['train'])
        every = -(-size // BPE_SAMPLE) if tokenizer == 'bpe' else 1
        texts = islice((text for text, _ in pieces(sources['train'])), 0, None, every)
        tokenizer = Tokenizer.train(tokenizer, texts, vocab_size)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=folder.name, dir=folder.parent) as temporary:
        new = Path(temporary, 'new')
        new.mkdir()
        splits = {split: write_split(new / split, sources[split], tokenizer) for split in SPLITS}
        splits = {split: m for split, m in splits.items() if m['tokens']}
        meta = dict(tokenizer=tokenizer.to_dict(), splits=splits)
        (new / 'meta.json').write_text(json.dumps(meta))
        with contextlib.suppress(OSError):                      # if another process was faster
            new.rename(folder)


def load(data='code', tokenizer='bpe', vocab_size=4096, root='corpora', quiet=False):
    """
    The corpus `data` (code, the name of a download, a file or a folder), prepared on first use.
    tokenizer: a name or a Tokenizer, for example of a checkpoint
    """
    root, given = Path(root), isinstance(tokenizer, Tokenizer)
    task, _, rest = str(data).partition(':')                    # niah, niah2:books/, ...
    hops = {'niah': 1, 'niah2': 2}.get(task, 0)
    data = rest or 'code' if hops else str(data)
    kind, code = tokenizer.name if given else tokenizer, data == 'code'
    if kind not in Tokenizer.NAMES:
        raise SystemExit(f'--tokenizer {kind}: choose from {", ".join(Tokenizer.NAMES)}')
    where = Path(sysconfig.get_path('stdlib') if code else data)
    where = fetch(data, root / 'downloads' / data) if data in DOWNLOADS else where
    files = list_files(where, '.py' if code else '', NOT_CODE if code else re.escape(root.name))
    stamp = [(name, p.stat().st_size, p.stat().st_mtime_ns) for name, p in files.items()]
    name = 'code' if code else where.resolve().stem
    kind += str(tokenizer.n_vocab if given else vocab_size) if kind == 'bpe' else ''
    folder = root / f'{name}-{kind}-{digest(stamp)[:8]}'
    if given and not (folder.exists() and Corpus(name, folder).tokenizer.ids == tokenizer.ids):
        folder = root / f'{name}-{kind}-{digest(stamp, tokenizer.tokens)[:8]}'
    if not folder.exists():
        prepare(folder, split_files(files, code), tokenizer, vocab_size)
    corpus = Corpus(name, folder, hops)
    if not quiet:
        splits = [split for split in (corpus.train, corpus.val, corpus.test) if split]
        print(f'{folder}: {sum(len(s.offsets) - 1 for s in splits):,} documents,',
              ', '.join(f'{s.name} {len(s.tokens):,}' for s in splits), 'tokens,',
              f'{corpus.tokenizer.n_vocab:,} ids, fingerprint {corpus.fingerprint},',
              f'Python {sys.version.split()[0]}')
    return corpus


# --------------------------------------------------------------------------------------------------
# batches
class Batch(NamedTuple):
    tokens: torch.Tensor    # (B, T) int64; 0 at padding
    targets: torch.Tensor   # (B, T) int64, the next tokens; -1 where there is none to predict
    doc: torch.Tensor       # (B, T) int64, the number of each token's document; -1 at padding
    seed: int               # another for each batch: the only source of the model's randomness


def pack(split, T, same_document, seed, k=20):
    """
    Orders segments by BM25 (Algorithm 1 of TRIME): the one most similar to the last, of those not
    yet taken, comes next. same_document: only of other documents (§4.3)
    """
    starts = np.arange(0, len(split.tokens) - 1, T)
    stops = np.append(starts[1:], len(split.tokens) - 1)
    segments, n = np.split(split.tokens[:-1], starts[1:]), len(starts)
    doc_of = split.doc_of if same_document else lambda p: p // T
    first, last = doc_of(starts), doc_of(stops - 1)             # documents of each segment, (n,)
    low, high = np.searchsorted(last, first), np.searchsorted(first, last, side='right')
    if (high - low).min() == n > 1:                             # low to high - 1 share a document
        raise SystemExit('all segments are of one document: --no-same-document packs them')
    index, neighbors = BM25(segments), []
    for i in progress(range(0, n, 256), 'packing by BM25'):
        a, b = low[i:i + 256, None], high[i:i + 256, None]
        ids, _ = index.search_many(segments[i:i + 256], k + (b - a).max())
        allowed = (ids >= 0) & ((ids < a) | (ids >= b))
        neighbors += [row[ok][:k].tolist() for row, ok in zip(ids, allowed)]    # best first
    order = {}
    for c in np.random.default_rng(seed).permutation(n).tolist():
        while c is not None and c not in order:
            order[c] = True
            c = next((i for i in neighbors[c] if i not in order), None)
    return np.array(list(order))


class Batches:
    """
    The micro-batches of a split: batches[g], with len(batches) of them in an epoch.

    segments     a grid of segments of T tokens over the split, in another order in every epoch
    consecutive  the same, but `consecutive` segments (0: all of a micro-batch) follow each other
    packed       the same, but the segments of a micro-batch are similar; not without bm25 (pack)
    documents    sequences of one document; the ends of documents, shorter than T, are joined

    In an epoch, each token of the split but the first (documents: but each document's first) is
    predicted once. cache: a folder for pack's order
    """

    def __init__(self, split, kind, block_size, micro_batch, seed, same_document=True,
                 consecutive=0, bm25=True, cache=None):
        if split is None:
            raise SystemExit('no such split: name files in the folder train, val and test')
        T, B = self.T, self.B = block_size, micro_batch
        self.split, self.kind, self.seed, self.epoch = split, kind, seed, (None, None)
        m = self.group = dict(consecutive=consecutive or B, packed=B if bm25 else 1).get(kind, 1)
        if min(T, B, m) < 1 or B % m:
            raise SystemExit(f'--block-size {T}, --micro-batch {B}: 0, or no multiple of m = {m}')
        # ranges of the split form a row; sequence r is places r T to r T + T - 1 of the row
        begins, sizes = split.offsets[:1], np.array([len(split.tokens) - 1])
        if kind == 'documents':             # the documents without their ends, then the ends
            lengths = np.diff(split.offsets)
            ends = lengths % T
            begins = np.append(split.offsets[:-1], split.offsets[:-1] + lengths - ends)
            sizes = np.append(lengths - ends, ends)
        self.stops = np.cumsum(sizes)                           # of the ranges in the row
        self.shift = begins - self.stops + sizes                # position in the split minus place
        n = int(self.stops[-1])
        if n < T:
            raise SystemExit(f'{split.name} has {n:,} tokens, fewer than --block-size {T:,}')
        self.n_rows = -(-n // T)
        self.order = np.arange(self.n_rows)
        if kind == 'packed' and bm25:
            path = Path(cache or '', f'packed-{split.name}-{n}-{T}-{seed}-{same_document}.npy')
            saved = cache and path.exists()
            self.order = np.load(path) if saved else pack(split, T, same_document, seed)
            if cache and not saved:
                temporary = path.with_suffix(f'.{os.getpid()}.npy')
                np.save(temporary, self.order)
                temporary.replace(path)

    def __len__(self):
        return -(-self.n_rows // self.B)

    def rows(self, g):
        """Numbers of the sequences in micro-batch g, (at most B,)"""
        (epoch, i), n = divmod(g, len(self)), self.group
        if self.epoch[0] != epoch:
            n_groups = -(-self.n_rows // n)
            self.epoch = epoch, np.random.default_rng([self.seed, epoch]).permutation(n_groups)
        groups = self.epoch[1][i * self.B // n:(i + 1) * self.B // n]
        groups = np.sort(groups) if n > 1 else groups           # an incomplete group comes last
        return np.concatenate([self.order[i * n:(i + 1) * n] for i in groups])

    def __getitem__(self, g):
        sha = hashlib.sha256(f'{self.seed} {g}'.encode()).digest()
        return self.take(self.rows(g), int.from_bytes(sha[:8], 'little') >> 1)

    def take(self, rows, seed):
        """The micro-batch of the sequences with these numbers, (at most B,), padded to B rows"""
        split, place = self.split, np.full((self.B, self.T), self.stops[-1])
        place[:len(rows)] = np.asarray(rows)[:, None] * self.T + np.arange(self.T)
        real = place < self.stops[-1]                                           # (B, T)
        place = np.where(real, place, 0)
        p = place + self.shift[np.searchsorted(self.stops, place, side='right')]
        doc = split.doc_of(p)
        predicted = real & ((self.kind != 'documents') | (p + 1 < split.offsets[doc + 1]))
        tokens = np.where(real, split.tokens[p].astype(int), 0)
        targets = np.where(predicted, np.take(split.tokens, p + 1, mode='clip').astype(int), -1)
        return Batch(*map(torch.from_numpy, (tokens, targets, np.where(real, doc, -1))), seed)


class Needles(Batches):
    """
    Sentences "Key A opens B." in a text, and questions "Key A", each followed by its answer (RULER,
    Hsieh et al. 2024; DRT, A.4). A and B are names of four random words; with 2 hops also B opens
    C, and the answer is "B, C". A question ends with a chunk, so that this chunk can retrieve for
    the answer; with 2 hops the chunk before ends with it too, so that what that one retrieves can
    be part of what this one looks for. A tenth of all other tokens is predicted too.
    grow: of so many micro-batches, the first quarter has sequences of an eighth of T tokens, the
    next ones of a quarter, of a half and of T
    """

    def __init__(self, split, tokenizer, hops, block_size, micro_batch, seed, chunk=32, grow=0):
        super().__init__(split, 'segments', block_size, micro_batch, seed)
        self.hops, self.chunk, self.grow = hops, chunk, grow
        self.n_rows = len(split.tokens) // self.T               # of an epoch
        least = chunk * (32 * hops if grow else 8)
        if self.T % chunk or self.T < least:
            raise SystemExit(f'niah: --block-size {self.T}: no multiple of {chunk} from {least} on')
        blank = ' ' * (tokenizer.name == 'bytes')               # other words begin with theirs
        texts = '\nKey' + blank, ' opens' + blank, ',' + blank, '.\n'
        self.parts = [tokenizer.encode(text).astype(int) for text in texts]     # of a sentence
        word = dict(bytes='[A-Z]', word='[a-z]{3,}').get(tokenizer.name, ' [a-z]{3,}')
        self.words = [i for i, token in enumerate(tokenizer.tokens) if re.fullmatch(word, token)]
        longest = np.concatenate(self.sentence(np.zeros((hops + 1, 4), int)))
        if len(self.words) < 16 or len(longest) > chunk:
            raise SystemExit(f'needles: fewer than 16 words to choose from, or chunks of {chunk} '
                             'tokens are too short for a question and an answer')

    def rows(self, g):
        """With grow more and shorter sequences at first: as many tokens in each micro-batch"""
        n = self.B << max(0, 3 - 4 * g // self.grow) if self.grow else self.B
        return np.arange(g * n, (g + 1) * n)

    def take(self, rows, seed):
        n = self.T // self.chunk // max(1, len(rows) // self.B)             # chunks of a sequence
        tokens, targets = torch.tensor(np.stack([self.row(r, n) for r in rows], axis=1))
        return Batch(tokens, targets, torch.tensor(rows)[:, None].expand_as(tokens), seed)

    def row(self, r, n):
        """Sequence r, of n chunks: half with needles, then half with questions -> ids, targets"""
        seed, c, half = [self.seed, r, n, len(self.split.tokens)], self.chunk, n // 2
        rng = np.random.default_rng(seed)                       # others in val than in train
        start = rng.integers(len(self.split.tokens) - n * c)
        ids = self.split.tokens[start:start + n * c + 1].astype(int)
        scored = rng.random(len(ids)) < 0.1
        chains = self.chains(rng, rng.integers(1, half // self.hops + 1), ids)
        pairs = [pair for names in chains for pair in pairwise(names)]
        self.hide(rng, ids, zip(rng.permutation(half), pairs))
        answers = rng.permutation(np.arange(half + self.hops, n, self.hops)) * c
        for at, names in zip(answers, chains):
            question, opens, answer, end = self.sentence(names)
            ids[at - self.hops * c:at].reshape(-1, c)[:, -len(question):] = question
            text = np.concatenate([opens, answer, end])
            ids[at:at + len(text)] = text
            scored[at + len(opens):][:len(answer)] = True
        return ids[:-1], np.where(scored, ids, -1)[1:]

    def chains(self, rng, n, ids):
        """(n, hops + 1, 4) words of names; all names differ, and none is in ids"""
        names, text = {}, ids.tobytes()
        while len(names) < n * (self.hops + 1):
            name = rng.choice(self.words, 4, replace=False).tobytes()
            if name not in text:
                names[name] = True
        return np.frombuffer(b''.join(names), int).reshape(n, self.hops + 1, 4)

    def hide(self, rng, ids, needles):
        """Writes a sentence into each of these chunks of ids; needles: (chunk, names)"""
        for at, names in needles:
            needle = np.concatenate(self.sentence(names))
            at = at * self.chunk + rng.integers(max(1, self.chunk - len(needle)))
            ids[at:at + len(needle)] = needle

    def sentence(self, names):
        """Ids of "Key A opens B, C.": of the question, of " opens", of the answer, of the end"""
        key, opens, comma, end = self.parts
        answer = [ids for name in names[1:] for ids in (comma, name)]
        return np.append(key, names[0]), opens, np.concatenate(answer[1:]), end


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='Prepare a corpus and look at it.')
    parser.add_argument('--data', default='code', help=f'code, {", ".join(DOWNLOADS)}, or a path')
    parser.add_argument('--tokenizer', default='bpe', help=', '.join(Tokenizer.NAMES))
    parser.add_argument('--vocab-size', type=int, default=4096, help='ids of the bpe tokenizer')
    corpus = load(**vars(parser.parse_args()))
    print(corpus.tokenizer.decode(corpus.train.tokens[:200]))
