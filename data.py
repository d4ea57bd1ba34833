"""
Text in, batches out: tokenizers, corpora on disk, and four ways to cut a corpus into batches.

A corpus is a folder that `load` makes on first use:

    corpora/code-bpe4096-5f0c21ab/
        train.bin  val.bin  test.bin    token ids of all documents, one document after the other
        train.idx  val.idx  test.idx    where each document starts and the last one ends, int64
        meta.json                       the tokenizer, counts, hashes

Its name ends with a hash of its source files (paths, sizes, times): if one changes, another folder
is made. Every document ends with <|endoftext|>, except with `word`. A batch is a pure function of
(split, arguments of Batches, number): a run resumes from its step alone.
"""
import contextlib, functools, hashlib, heapq, json, os, re, shutil, sys, sysconfig, time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import filterfalse, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import regex                # tiktoken depends on it
import tiktoken
import torch

from bm25 import BM25

SPLITS = 'train', 'val', 'test'


def digest(*values):
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def progress(items, desc, total=None, quiet=False):
    """Yields the items; every ten seconds it prints how many are done."""
    total, printed = total or len(items), time.time()
    for n, item in enumerate(items):
        if not quiet and time.time() - printed > 10:
            print(f'{desc}: {n:,} of {total:,}', file=sys.stderr)
            printed = time.time()
        yield item


# --------------------------------------------------------------------------------------------------
# tokenizers
# GPT-2's words for bpe: contractions, letters, numbers, punctuation, blanks
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def words_of(text):
    """The words that WikiText's papers count: between blanks, and <eos> for each line end."""
    return text.replace('\n', ' <eos> ').split()


def learn_bpe(counts, n_merges):
    """Byte-pair encoding: n_merges times, the most frequent pair of adjacent tokens becomes a
    token; ties go to smaller ids. counts: {word, as one character per byte: its frequency}"""
    tokens = [chr(i) for i in range(256)]
    words, frequency = list(counts), list(counts.values())      # character i is token i
    total = Counter()                                           # frequency of each pair
    where = defaultdict(set)                                    # words that have it, or had it

    def add(w, sign):
        for pair in pairwise(words[w]):
            total[pair] += sign * frequency[w]
            where[pair].add(w)

    for w in range(len(words)):
        add(w, 1)
    heap = sorted((-n, pair) for pair, n in total.items())      # a sorted list is a heap
    for new in progress(range(256, 256 + n_merges), 'learning bpe'):
        while heap and -heap[0][0] != total[pair := heap[0][1]]:    # it has become rarer
            heapq.heapreplace(heap, (-total[pair], pair))
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
    """bytes   the 256 bytes and <|endoftext|>
    bpe     the 256 bytes, tokens learned from the corpus, and <|endoftext|>
    gpt2    GPT-2's 50,257 tokens, from files that tiktoken downloads; TIKTOKEN_CACHE_DIR keeps them
    word    WikiText's: words between blanks, <eos> for each line end, <unk>; most frequent first
    tokens: str by id, one character per byte (not for word). eot: id of <|endoftext|>, or None"""
    def __init__(self, name, tokens=(), pattern=PATTERN):
        self.name, self.pattern, self.eot = name, pattern, None
        self.tokens = tokens = list(tokens) or [chr(i) for i in range(256)]
        self.ids = {token: i for i, token in enumerate(tokens)}
        if name != 'word':
            ranks = {token.encode('latin-1'): i for token, i in self.ids.items()}
            self.bpe = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                         special_tokens={})
            self.eot = len(tokens)
            tokens.append('<|endoftext|>')
        self.n_vocab = len(tokens)
        self.dtype = np.uint16 if self.n_vocab <= 1 << 16 else np.uint32    # on disk

    @classmethod
    def train(cls, name, texts=(), vocab_size=4096):
        """A tokenizer made from texts, an iterable of str; bytes and gpt2 need none."""
        if name == 'bytes': return cls(name)
        if name == 'gpt2':
            try:
                gpt2 = tiktoken.get_encoding('gpt2')
            except Exception:                                   # of several packages
                raise SystemExit(
                    'gpt2 cannot be downloaded: TIKTOKEN_CACHE_DIR may have its vocab.bpe, named '
                    '6d1cbeee0f20b3d9449abfede4726ed8212e3aee, and its encoder.json, named '
                    '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6')
            tokens = map(gpt2.decode_single_token_bytes, range(gpt2.eot_token))
            return cls(name, [token.decode('latin-1') for token in tokens], gpt2._pat_str)
        counts, n = Counter(), 0
        for text in texts:
            counts.update(words_of(text) if name == 'word' else regex.findall(PATTERN, text))
            n += len(text)
            if name == 'bpe' and n > 1 << 26: break                 # characters, enough
        if name == 'word':
            words = counts.keys() | {'<unk>', '<eos>'}
            return cls(name, sorted(words, key=lambda word: (-counts[word], word)))
        # the first 128 bytes of a long word are enough, and faster
        counts = {word.encode()[:128].decode('latin-1'): n for word, n in counts.items()}
        return cls(name, learn_bpe(counts, vocab_size - 257))

    def encode(self, text):
        """str -> (n,) uint32. <|endoftext|> within the text is ordinary text."""
        if self.name == 'word':
            ids = (self.ids.get(word, self.ids['<unk>']) for word in words_of(text))
            return np.fromiter(ids, np.uint32)
        text = text.encode('utf-8', 'replace').decode()         # '?' for a lone surrogate
        return self.bpe.encode_to_numpy(text)

    def decode(self, ids):
        """Ids (n,) -> str; U+FFFD for what is not UTF-8"""
        tokens = [self.tokens[i] for i in ids]
        if self.name == 'word':
            return ' '.join(tokens).replace('<eos>', '\n')
        return ''.join(tokens).encode('latin-1').decode(errors='replace')

    def to_dict(self):
        return dict(name=self.name, tokens=self.tokens[:self.eot], pattern=self.pattern)


# --------------------------------------------------------------------------------------------------
# corpora: their files, splits and documents; on disk
GITHUB = 'https://raw.githubusercontent.com/'
WIKITEXT2 = GITHUB + 'pytorch/examples/main/word_language_model/data/wikitext-2/'
DOWNLOADS = {                                   # {URL: begin of its sha256, where it is known}
    'shakespeare': {GITHUB + 'karpathy/char-rnn/master/data/tinyshakespeare/input.txt': '86c4e6aa'},
    'wikitext2': {WIKITEXT2 + 'train.txt': '9e9fa1ad', WIKITEXT2 + 'valid.txt': 'f0737ed3',
                  WIKITEXT2 + 'test.txt': 'd790b833'},
    'wikitext103': {'https://wikitext.smerity.com/wikitext-103-v1.zip': ''},
    'enwik8': {'http://mattmahoney.net/dc/enwik8.zip': ''},
    'pg19': {'gs://deepmind-gutenberg/': ''},   # never downloads: the error names the folder
}
HIDDEN = '[.].*|.*[.]zip|corpora|out'          # names of files and folders that are omitted
NOT_CODE = (HIDDEN + '|site-packages|dist-packages|test|tests|idle_test|encodings|pydoc_data|'
            'config-.*|_sysconfigdata.*')       # the last two are written by installers
SPLIT_NAME = re.compile(r'(?:.*[._-])?(train|val|test)(?:id|idation)?(?!\.py$)(?:[.].*|[-_]\d.*)?')
# where an article of WikiText begins: ' = Title = ' between blank lines, after some text
ARTICLE = regex.compile(r'(?m)^(?= = (?!= ).*(?<! =) = ?\n *$)(?<=\S\s*\n *\n)')


def fetch(name, folder):
    """Downloads the files of a named corpus into a folder."""
    part = folder.with_suffix('.part')
    part.mkdir(parents=True, exist_ok=True)
    for url, sha256 in DOWNLOADS[name].items():
        file = part / Path(url).name
        try:
            torch.hub.download_url_to_file(url, file, sha256)
        except Exception as error:                              # of several packages
            raise SystemExit(f'{url}: {error!r}; put its files, unpacked, into {folder}')
        if file.suffix == '.zip':
            shutil.unpack_archive(file, part)
            for path in part.glob('*/*'):
                path.replace(part / path.name)
    part.rename(folder)


def list_files(where, code):
    """The files of a folder, or one file, none of them empty -> {name: path}, sorted"""
    if where.is_file():
        return {where.name: where}
    omit, files = re.compile(NOT_CODE if code else HIDDEN).fullmatch, {}
    for folder, folders, names in os.walk(where, followlinks=not code):
        folders[:] = filterfalse(omit, folders)
        for name in filterfalse(omit, names):
            path = Path(folder, name)
            if path.is_file() and path.stat().st_size and (path.suffix == '.py' or not code):
                files[path.relative_to(where).as_posix()] = path
    return dict(sorted(files.items()))


def split_files(files, code):
    """{name: path} -> {split: [(paths, part)]}, of a file or all files of a package of `code`. If a
    file or folder is named train, only those named train, val, test are used. Else they go, by
    sha256(name), to val, else test, at most 5% each, else train; if val has < 2.5%, all are cut."""
    groups, sizes = defaultdict(list), Counter()
    for name, path in files.items():
        text = path.read_bytes()
        if text.decode(errors='ignore').encode() != text:
            print(f'skipped, not UTF-8: {str(path)!a}')
            continue
        name = name.split('/')[0] if code else name
        groups[name].append(path)
        sizes[name] += len(text)
    split_of = {name: match[1] for name in files                # those that were skipped too
                if (match := SPLIT_NAME.fullmatch(name.split('/')[0]))}
    if 'train' not in split_of.values():
        n_bytes = sizes.total()
        room = dict(val=n_bytes // 20, test=n_bytes // 20, train=n_bytes)
        for name in sorted(groups, key=lambda name: hashlib.sha256(os.fsencode(name)).hexdigest()):
            split_of[name] = next(split for split in room if sizes[name] <= room[split])
            room[split_of[name]] -= sizes[name]
        if room['val'] > n_bytes // 40:                         # val has less than 2.5%
            return {split: [(paths, split) for paths in groups.values()] for split in SPLITS}
    return {split: [(groups[name], 'all') for name in groups if split_of.get(name) == split]
            for split in SPLITS}


def documents(paths, part):
    """The text of files -> its documents: lines of a .jsonl, articles of WikiText, or all as one.
    part: all; train: past blanks (.jsonl: a line end) at 90%; val: then to 95%; test: the rest"""
    *first, last = (path.read_bytes() for path in paths)
    text = b'\n'.join([*(text.removesuffix(b'\n') for text in first), last])
    if part != 'all':
        n, end = len(text), re.compile(rb'\n' if paths[0].suffix == '.jsonl' else rb'\s+')
        a, b = (end.search(text + b'\n', n * percent // 100 - 1).end() for percent in (90, 95))
        text = dict(train=text[:a], val=text[a:b], test=text[b:])[part]
    if paths[0].suffix == '.jsonl':
        for line in filter(bytes.strip, text.split(b'\n')):
            try:
                yield json.loads(line)['text'].encode('utf-8', 'replace').decode()
            except Exception:
                raise SystemExit(f'{paths[0]}: {line[:60]!r} is not {{"text": "..."}}')
    else:
        yield from ARTICLE.split(text.decode())


def pieces(text, size=1 << 14):
    """A text in pieces of about `size` characters, cut where every tokenizer cuts"""
    start = 0
    while cut := regex.search(r'(?<=\S)\n(?=\S)', text, pos=start + size):
        yield text[start:cut.end()]
        start = cut.end()
    yield text[start:]


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
    """A folder that `prepare` made. train, val, test: Splits or None; fingerprint: hashes of the
    text and of the tokenizer; hops 1 or 2: batches are of Needles"""
    train = val = test = None

    def __init__(self, name, folder, hops=0):
        self.name, self.folder, self.hops = name, folder, hops
        try:
            meta = json.loads((folder / 'meta.json').read_text())
            self.tokenizer = Tokenizer(**meta['tokenizer'])
            for split, m in meta['splits'].items():
                tokens = np.memmap(folder / f'{split}.bin', self.tokenizer.dtype, 'r')
                offsets = np.fromfile(folder / f'{split}.idx', np.int64)
                assert len(tokens) == offsets[-1] == m['tokens'], f'the size of {split}.bin'
                assert np.diff(offsets).min() > 0, f'{split}.idx'
                assert tokens[:1 << 26].max() < self.tokenizer.n_vocab, f'an id of {split}.bin'
                setattr(self, split, Split(split, tokens, offsets, m['bytes'], m['words']))
        except Exception as error:
            raise SystemExit(f'{folder} is damaged ({error}): delete it to prepare it again')
        text = digest([m['sha256'] for m in meta['splits'].values()])
        self.fingerprint = f'{text[:8]}-{digest(meta["tokenizer"])[:8]}'

    def batches(self, split, chunk=32, grow=0, **how):
        """Of a split, see Batches; with hops see Needles"""
        if self.hops:
            return Needles(split, self.tokenizer, self.hops, chunk=chunk, grow=grow, **how)
        if grow:
            raise SystemExit('--grow-context is for --data niah or niah2')
        return Batches(split, **how)


def write_split(path, sources, tokenizer):
    """Encodes a split into path.bin and path.idx -> its part of meta.json"""
    offsets, n_bytes, n_words, sha = [0], 0, 0, hashlib.sha256()
    eot = [] if tokenizer.eot is None else [tokenizer.eot]
    with open(f'{path}.bin', 'wb') as f, ThreadPoolExecutor() as pool:
        for paths, part in progress(sources, f'encoding {path.name}'):
            for text in filter(None, documents(paths, part)):
                ids = [*pool.map(tokenizer.encode, pieces(text)), eot]
                ids = np.concatenate(ids).astype(tokenizer.dtype)
                f.write(ids)
                offsets.append(offsets[-1] + len(ids))
                n_bytes += len(text.encode())
                n_words += len(text.split())
                sha.update(text.encode() + b'\0')
    np.unique(offsets).tofile(f'{path}.idx')                    # without documents that are empty
    return dict(tokens=offsets[-1], bytes=n_bytes, words=n_words, sha256=sha.hexdigest())


def prepare(folder, sources, tokenizer, vocab_size):
    """Writes a corpus to a temporary folder and renames it: an incomplete one is never opened."""
    if not isinstance(tokenizer, Tokenizer):
        texts = (piece for source in sources['train'] for text in documents(*source)
                 for piece in pieces(text))
        tokenizer = Tokenizer.train(tokenizer, texts, vocab_size)
    new = folder.with_name(f'{folder.name}-{os.getpid()}')
    new.mkdir(parents=True, exist_ok=True)
    try:
        splits = {split: write_split(new / split, sources[split], tokenizer) for split in SPLITS}
        splits = {split: m for split, m in splits.items() if m['tokens']}
        meta = dict(tokenizer=tokenizer.to_dict(), splits=splits)
        (new / 'meta.json').write_text(json.dumps(meta))
        with contextlib.suppress(OSError):                      # if another process was faster
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def load(data='code', tokenizer='bpe', vocab_size=4096, root='corpora', quiet=False):
    """The corpus `data` (code, the name of a download, a file or a folder), prepared on first use.
    niah, niah2, niah:books/, ...: needles with one or two hops in `code` or in books/.
    tokenizer: a name or a Tokenizer, for example of a checkpoint"""
    root, given = Path(root), isinstance(tokenizer, Tokenizer)
    task, _, text = str(data).partition(':')
    hops = {'niah': 1, 'niah2': 2}.get(task, 0)
    data = (text or 'code') if hops else str(data)
    kind = tokenizer.name if given else tokenizer
    code = data == 'code'
    where = Path(sysconfig.get_path('stdlib') if code else data)
    if data in DOWNLOADS:
        where = root / 'downloads' / data
        if not where.exists(): fetch(data, where)
    name = data if code else where.resolve().stem
    files = list_files(where, code) if data else {}
    stamp = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files.values()]
    if kind == 'bpe': kind += str(tokenizer.n_vocab if given else vocab_size)
    folder = root / f'{name}-{kind}-{digest(stamp)[:8]}'
    if given and not (folder.exists() and Corpus(name, folder).tokenizer.ids == tokenizer.ids):
        folder = root / f'{name}-{kind}-{digest(stamp, tokenizer.tokens)[:8]}'
    if not folder.exists():
        sources = split_files(files, code)
        if not sources['train']:
            raise SystemExit(f'no text in {where}: --data is a path, code, {", ".join(DOWNLOADS)}')
        prepare(folder, sources, tokenizer, vocab_size)
    corpus = Corpus(name, folder, hops)
    if not quiet:
        splits = [split for split in (corpus.train, corpus.val, corpus.test) if split]
        print(f'{folder}: {sum(len(s.offsets) - 1 for s in splits)} documents,',
              ', '.join(f'{s.name} {len(s.tokens):,}' for s in splits),
              f'tokens, fingerprint {corpus.fingerprint}, Python {sys.version.split()[0]}')
    return corpus


# --------------------------------------------------------------------------------------------------
# batches
class Batch(NamedTuple):
    tokens: torch.Tensor    # (B, T) int64; 0 at padding
    targets: torch.Tensor   # (B, T) int64, the next tokens; -1 where there is none to predict
    doc: torch.Tensor       # (B, T) int64, each token's document (niah: sequence); -1 at padding
    seed: int               # different for each batch: the only source of the model's randomness


def pack(split, T, same_document, seed, k=20):
    """Orders segments (TRIME, Algorithm 1): next comes the first that is not yet taken, of the k
    most similar to the last by BM25, else a random one. same_document: of other documents (§4.3)"""
    starts = np.arange(0, len(split.tokens) - 1, T)
    segments, n = np.split(split.tokens[:-1], starts[1:]), len(starts)
    first = last = np.arange(n)                                 # (n,) documents of each segment
    if same_document:
        first = split.doc_of(starts)
        last = split.doc_of(starts + T - 1)
    low = np.searchsorted(last, first)                          # low to high - 1 share a document
    high = np.searchsorted(first, last, side='right')           # with the segment
    if (high - low).min() == n > 1:
        raise SystemExit('all segments are of one document: --no-same-document packs them')
    index, neighbors = BM25(segments), []
    for i in progress(range(0, n, 256), 'packing by BM25'):
        a, b = low[i:i + 256, None], high[i:i + 256, None]
        ids, _ = index.search_many(segments[i:i + 256], k + (b - a).max())
        allowed = (ids >= 0) & ((ids < a) | (ids >= b))
        neighbors += [row[ok][:k].tolist() for row, ok in zip(ids, allowed)]    # best first
    order = {}                                                  # segments taken, as keys
    for c in np.random.default_rng(seed).permutation(n).tolist():
        while c not in order:
            order[c] = True
            c = next((i for i in neighbors[c] if i not in order), c)        # c: none is left
    return np.array(list(order))


@functools.lru_cache
def shuffled(n, *seed):
    return np.random.default_rng(seed).permutation(n)


class Batches:
    """The micro-batches of a split: batches[g], with len(batches) of them in an epoch.
    segments     a grid of segments of T tokens over the split, in another order in every epoch
    consecutive  the same, but `consecutive` segments (0: all of a micro-batch) follow each other
    packed       the same, but the segments of a micro-batch are similar (pack), if bm25 is True
    documents    sequences of one document; the ends of documents, shorter than T, are joined
    An epoch predicts each token of the split but the first; documents: but the first of each."""
    def __init__(self, split, kind, block_size, micro_batch, seed, same_document=True,
                 consecutive=0, bm25=True):
        n_tokens = len(split.tokens) if split else 0
        if n_tokens <= block_size:
            name = split.name if split else 'val (files named val, or 5% of all)'
            raise SystemExit(f'{name} has {n_tokens} tokens, --block-size {block_size} needs more')
        T, B = self.T, self.B = block_size, micro_batch
        self.split, self.kind, self.seed = split, kind, seed
        # ranges of the split, joined, are a stream; sequence r is its places r T to r T + T - 1
        begins, ends = np.array([[0], [n_tokens - 1]])
        if kind == 'documents':             # the documents without their ends, then the ends
            cuts = split.offsets[1:] - np.diff(split.offsets) % T
            begins, ends = np.append(split.offsets[:-1], cuts), np.append(cuts, split.offsets[1:])
        self.stops = np.cumsum(ends - begins)                   # where each ends in the stream
        self.shift = ends - self.stops                          # position in the split - place
        self.n_rows = -(-self.stops[-1] // T)
        self.order, self.group = np.arange(self.n_rows), 1      # groups of sequences are shuffled
        if kind == 'consecutive':
            self.group = consecutive or B
        if kind == 'packed' and bm25:
            self.group, self.order = B, pack(split, T, same_document, seed)
        if B % self.group:
            raise SystemExit(f'--micro-batch {B} is not a multiple of m = {self.group}')

    def __len__(self):
        return -(-self.n_rows // self.B)

    def rows(self, g):
        """Numbers of the sequences in micro-batch g, (at most B,)"""
        m, n = self.group, self.B // self.group                 # n groups of m sequences
        epoch, i = divmod(g, len(self))
        groups = shuffled(-(-self.n_rows // m), self.seed, epoch)[i * n:][:n]
        groups = np.sort(groups) if m > 1 else groups           # an incomplete one comes last
        return np.concatenate([self.order[j * m:][:m] for j in groups])

    def __getitem__(self, g):
        sha = hashlib.sha256(f'{self.seed} {g}'.encode()).digest()
        return self.take(self.rows(g), int.from_bytes(sha[:8], 'little') >> 1)

    def take(self, rows, seed):
        """The micro-batch of the sequences with these numbers, (at most B,), padded to B rows"""
        rows = np.pad(rows, (0, self.B - len(rows)), constant_values=self.n_rows)
        place = rows[:, None] * self.T + np.arange(self.T)                          # (B, T)
        real = predicted = place < self.stops[-1]                                   # not padding
        place *= real
        p = place + self.shift[np.searchsorted(self.stops, place, side='right')]    # in the split
        doc = self.split.doc_of(p)
        if self.kind == 'documents':
            predicted = real & (self.split.doc_of(p + 1) == doc)
        tokens = self.split.tokens[p].astype(int) * real
        after = self.split.tokens[p + predicted].astype(int)        # the next one, if predicted
        arrays = tokens, np.where(predicted, after, -1), np.where(real, doc, -1)
        return Batch(*map(torch.from_numpy, arrays), seed)


class Needles(Batches):
    """Sentences "Key A opens B." in a text, and questions "Key A", each followed by its answer
    (RULER, Hsieh et al. 2024; DRT, A.4). A and B are names of four random words; with 2 hops also B
    opens C, and the answer is "B, C". A question stands at the end of a chunk, which then retrieves
    for the answer; with 2 hops the chunk before ends with it too, and what that one retrieves can
    help this one. A tenth of all other tokens is predicted too. grow: a number of micro-batches;
    sequences have T / 8 tokens in the first quarter of them, then T / 4, T / 2 and T."""
    def __init__(self, split, tokenizer, hops, block_size, micro_batch, seed, chunk=32,
                 grow=0, **_):
        super().__init__(split, 'segments', block_size, micro_batch, seed)
        self.hops, self.chunk, self.grow = hops, chunk, grow
        blank = ' ' if tokenizer.name == 'bytes' else ''        # other words begin with theirs
        texts = '\nKey' + blank, ' opens' + blank, ',' + blank, '.\n'
        self.parts = [tokenizer.encode(text).tolist() for text in texts]        # of a sentence
        word = dict(bytes='[A-Z]', word='[a-z]{3,}').get(tokenizer.name, ' [a-z]{3,}')
        self.words = [i for i, token in enumerate(tokenizer.tokens) if re.fullmatch(word, token)]
        longest = sum(map(len, self.sentence(np.zeros((hops + 1, 4)))))
        least = chunk * (32 * hops if grow else 8)
        if self.T % chunk or self.T < least or chunk < longest or len(self.words) < 16:
            raise SystemExit(f'niah needs --block-size a multiple of {chunk} (a chunk), at least '
                             f'{least}; chunks of {longest} tokens or more; 16 words or letters')

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
        c, half, n_tokens = self.chunk, n // 2, len(self.split.tokens)
        rng = np.random.default_rng([self.seed, r, n, n_tokens])    # others in val than in train
        start = rng.integers(n_tokens - n * c)
        ids = self.split.tokens[start:start + n * c + 1].astype(int)
        scored = rng.random(len(ids)) < 0.1                         # tokens that are predicted
        chains = self.chains(rng, rng.integers(1, half // self.hops + 1), ids)
        pairs = [pair for names in chains for pair in pairwise(names)]
        self.hide(rng, ids, zip(rng.permutation(half), pairs))
        answers = rng.permutation(np.arange(half + self.hops, n, self.hops)) * c
        for at, names in zip(answers, chains):
            question, opens, answer, end = self.sentence(names)
            ids[:at].reshape(-1, c)[-self.hops:, -len(question):] = question    # of hops chunks
            text = opens + answer + end
            ids[at:at + len(text)] = text
            scored[at + len(opens):][:len(answer)] = True
        return ids[:-1], np.where(scored, ids, -1)[1:]

    def chains(self, rng, n, ids):
        """(n, hops + 1, 4) words of names; all names differ, and none is in ids"""
        names, text = {}, ids.tobytes()                         # bytes are compared fast
        while len(names) < n * (self.hops + 1):
            name = rng.choice(self.words, 4, replace=False)
            if name.tobytes() not in text:
                names[name.tobytes()] = name
        return np.reshape([*names.values()], (n, self.hops + 1, 4))

    def hide(self, rng, ids, needles):
        """Writes a sentence into each of these chunks of ids; needles: (chunk, names)"""
        for at, names in needles:
            needle = np.concatenate(self.sentence(names))
            at = at * self.chunk + rng.integers(self.chunk - len(needle) + 1)
            ids[at:at + len(needle)] = needle

    def sentence(self, names):
        """Ids of "Key A opens B, C.": of the question, of " opens", of the answer, of the end"""
        key, opens, comma, end = self.parts
        answer = [i for name in names[1:] for i in (*comma, *name)][len(comma):]
        return [*key, *names[0]], opens, answer, end
