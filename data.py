"""
Text in, batches out: the tokenizers, the corpora on disk, and the four ways of cutting a corpus into batches.

A corpus is a folder that `load` makes on first use and checks on every later one:

    corpora/code-bpe4096/train.bin  val.bin  test.bin    token ids, uint16 (uint32 above 65,535 ids), all documents in a row
                         train.idx  val.idx  test.idx    where each document starts, int64, and at last where the last one ends
                         meta.json                       the whole tokenizer, counts, sha256 of the sources

Every document ends with <|endoftext|>, except with the `word` tokenizer, whose counts are those of the WikiText papers.
A batch is a pure function of (split, kind, block_size, micro_batch, seed, number): no iterator has a state, so a run
resumes from its step alone, and the micro-batches of a step are the same on any number of processes.

The way of a text, in the order of this file
    list_files, list_code       which files
    split_sources               which file, or part of one, is in which split: a Source
    lines, pieces               a Source's text, in pieces that can be encoded one by one
    write_split, prepare        the pieces' token ids, on disk
    open_corpus                 what is on disk, checked: a Corpus of three Splits
    load                        all of the above, or only open_corpus when nothing has changed: begin to read here
    Batches                     which tokens make sequence r (positions), which sequences micro-batch g (rows), as tensors (take)

Where a paper is in this file
    TRIME (Zhong, Lei & Chen 2022) §4.1 segments, §4.2 consecutive segments     Batches 'segments', 'consecutive'
    §4.3, Algorithm 1: packing segments by BM25                                 pack, pack_order

Letters used in the shape comments
    B sequences in a micro-batch    T tokens in a sequence

    $ python data.py --data code --tokenizer bpe --vocab-size 4096      prepare a corpus and look at it
    $ python data.py --data my_texts/                                   a folder or a file of one's own
"""
import argparse, codecs, difflib, hashlib, heapq, io, itertools, json, os, re, shutil, sys, sysconfig, tempfile, time
import urllib.request, zipfile
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

VERSION = 1                     # of the files on disk
SPLITS = ('train', 'val', 'test')
EOT = '<|endoftext|>'
PIECE = 1 << 18                 # texts are encoded in pieces of about this many characters
BPE_SAMPLE = 64 << 20           # bpe is learned from at most about this many bytes, spread evenly over the training split
N_NEIGHBORS = 20                # k of TRIME's Algorithm 1


class DataError(SystemExit):
    """What is wrong and what would work, in one line: a script dies with it, a notebook can catch it."""


def one_of(kind, name, names):
    """DataError unless name is one of names; it proposes the nearest."""
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        raise DataError(f'unknown {kind} {name!r}: choose from {", ".join(names)}' + (f' (did you mean {near[0]}?)' if near else ''))


def progress(items, desc, total=None, quiet=False):
    """items, with a bar that shows how far we are; without tqdm, or into a file, with a line every ten seconds."""
    if total is None and hasattr(items, '__len__'):
        total = len(items)

    def spoken():
        told = time.time()
        for n, item in enumerate(items):
            if time.time() - told > 10 and not quiet:
                told = time.time()
                print(f'{desc}: {n:,} of {total or "?"}', file=sys.stderr, flush=True)
            yield item

    try:
        from tqdm import tqdm
    except ImportError:
        return spoken()
    return tqdm(items, desc, total, leave=False) if sys.stderr.isatty() and not quiet else spoken()


# ----------------------------------------------------------------------------------------------------------------------
# tokenizers

# GPT-2's way of cutting text before bpe: contractions, words, numbers, punctuation, each with a blank before it, and blanks
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def well_formed(text):
    """text with lone surrogates, which UTF-8 cannot hold, replaced (jsonl can bring them in)."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def words_of(text):
    """The words of a text as WikiText's papers count them: what stands between blanks, and <eos> for each line end."""
    return text.replace('\n', ' <eos> ').split()


def learn_bpe(counts, n_merges, quiet=True):
    """
    Byte-pair encoding: again and again, the most frequent pair of neighboring tokens becomes a token of its own.

    counts      {pre-token, as bytes: how often it occurs}
    returns     the 256 bytes and the tokens learned, as bytes, in the order learned; fewer if no pair is left
    A tie goes to the pair of the smaller ids, so the result depends on the counts alone.
    Only the words that hold a merged pair are touched: `where` finds them, `total` counts each pair over all words.
    """
    tokens = [bytes([i]) for i in range(256)]
    words, number = [list(word) for word in counts], list(counts.values())
    total, where = defaultdict(int), defaultdict(set)
    for w, word in enumerate(words):
        for pair in zip(word, word[1:]):
            total[pair] += number[w]
            where[pair].add(w)
    heap = [(-n, pair) for pair, n in total.items()]
    heapq.heapify(heap)

    for new in progress(range(256, 256 + n_merges), 'learning bpe', n_merges, quiet):
        while heap and -heap[0][0] != total[heap[0][1]]:        # this pair has become rarer since it was pushed
            _, pair = heapq.heappop(heap)
            if total[pair]:
                heapq.heappush(heap, (-total[pair], pair))
        if not heap:
            break
        _, pair = heapq.heappop(heap)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        born = set()
        for w in where.pop(pair):
            for p in zip(words[w], words[w][1:]):
                total[p] -= number[w]
            words[w] = merge(words[w], pair, new)
            for p in zip(words[w], words[w][1:]):
                total[p] += number[w]
                if new in p:
                    where[p].add(w)
                    born.add(p)
        for p in born:
            heapq.heappush(heap, (-total[p], p))
    return tokens


def merge(word, pair, new):
    """word, a list of ids, with `new` in place of each `pair`, from the left."""
    out = []
    for token in word:
        if out and out[-1] == pair[0] and token == pair[1]:
            out[-1] = new
        else:
            out.append(token)
    return out


class Tokenizer:
    """
    bytes   the 256 bytes and <|endoftext|>
    bpe     the 256 bytes, merges learned here, and <|endoftext|>; tiktoken does the encoding
    gpt2    GPT-2's 50,257; tiktoken fetches them once
    word    WikiText's: words between blanks, <eos> for each line end, <unk> for words unseen in training; the commonest first

    .name, .n_vocab (all ids, <|endoftext|> included), .eot (its id, the last; None for word)
    """
    NAMES = ('bytes', 'bpe', 'gpt2', 'word')

    def __init__(self, name, tokens=(), pattern=None):
        """tokens: for bpe and gpt2 a list of bytes, for word of str, in the order of their ids."""
        one_of('tokenizer', name, self.NAMES)
        self.name, self.pattern, self.eot = name, pattern, None
        self.tokens = [bytes([i]) for i in range(256)] if name == 'bytes' else list(tokens)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if name != 'word':
            self.eot = len(self.tokens)
            self.tokens.append(EOT.encode())
        if name in ('bpe', 'gpt2'):
            import tiktoken
            self.tiktoken = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=self.ids, special_tokens={EOT: self.eot})
        self.n_vocab = len(self.tokens)
        self.dtype = np.dtype(np.uint16 if self.n_vocab <= 1 << 16 else np.uint32)      # of ids on disk

    @classmethod
    def train(cls, name, texts=(), vocab_size=None, quiet=True):
        """A tokenizer made from texts, an iterable of str (bytes and gpt2 need none); vocab_size is for bpe alone."""
        if name == 'bpe':
            import regex                                # tiktoken depends on it
            if not vocab_size or vocab_size < 257:
                raise DataError(f'--vocab-size {vocab_size} is too small for bpe: 257 (256 bytes and {EOT}) is the least')
            counts = Counter()
            for text in texts:
                counts.update(regex.findall(PATTERN, well_formed(text)))
            parts = Counter()                           # a word of a megabyte would be slow to learn from: cut it
            for word, n in counts.items():
                word = word.encode()
                for i in range(0, len(word), 128):
                    parts[word[i:i + 128]] += n
            tokens = learn_bpe(parts, vocab_size - 257, quiet)
            if len(tokens) + 1 < vocab_size and not quiet:
                print(f'bpe: {len(tokens) + 1:,} ids instead of {vocab_size:,}, the text has no more pairs to merge')
            return cls('bpe', tokens, PATTERN)
        if name == 'word':
            counts = Counter({'<unk>': 0, '<eos>': 0})
            for text in texts:
                counts.update(words_of(text))
            return cls('word', sorted(counts, key=lambda word: (-counts[word], word)))
        if name == 'gpt2':
            import tiktoken
            try:
                gpt2 = tiktoken.get_encoding('gpt2')
            except Exception as error:                  # requests', blobfile's, the system's or tiktoken's own
                raise DataError(
                    f"gpt2's files cannot be fetched ({type(error).__name__}): without a network, set TIKTOKEN_CACHE_DIR to a "
                    'folder that holds vocab.bpe under the name 6d1cbeee0f20b3d9449abfede4726ed8212e3aee and encoder.json '
                    'under 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 (the sha1 of their URLs)') from None
            return cls('gpt2', [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)], gpt2._pat_str)
        return cls(name)

    def encode(self, text):
        """str -> (n,) uint32. <|endoftext|> within the text is ordinary text."""
        if self.name == 'word':
            unk = self.ids['<unk>']
            return np.array([self.ids.get(word, unk) for word in words_of(text)], dtype=np.uint32)
        text = well_formed(text)
        if self.name == 'bytes':
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
        return self.tiktoken.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids):
        """Ids of any shape -> str, <|endoftext|> written out, U+FFFD for what is not UTF-8. ValueError for an id that is none."""
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.n_vocab:
            raise ValueError(f'ids from {ids.min()} to {ids.max()}: the {self.name} tokenizer has 0 to {self.n_vocab - 1}')
        tokens = [self.tokens[i] for i in ids.tolist()]
        if self.name == 'word':
            return ' '.join('\n' if word == '<eos>' else word for word in tokens)
        return b''.join(tokens).decode(errors='replace')

    def to_dict(self):
        """All of the tokenizer in plain types, for meta.json and checkpoints; latin-1 makes one character of each byte."""
        if self.name == 'bytes':
            return {'name': self.name}
        if self.name == 'word':
            return {'name': self.name, 'tokens': self.tokens}
        return {'name': self.name, 'tokens': [token.decode('latin-1') for token in self.tokens[:-1]], 'pattern': self.pattern}

    @classmethod
    def from_dict(cls, d):
        """The tokenizer that to_dict wrote. It needs no file and no network, gpt2 neither."""
        tokens = d.get('tokens', ())
        return cls(d['name'], tokens if d['name'] == 'word' else [token.encode('latin-1') for token in tokens], d.get('pattern'))


# ----------------------------------------------------------------------------------------------------------------------
# sources: which files a corpus is made of, and how they are split

MIRROR = 'https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/'
SMERITY = 'https://wikitext.smerity.com/wikitext-103-v1.zip'
DOWNLOADS = {           # name: (file, URL of it or of a zip that holds it, bytes, sha256); None where we cannot vouch for one
    'shakespeare': [('input.txt', 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
                     1115394, '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')],
    'wikitext2': [('train.txt', MIRROR + 'train.txt', 10797148, '9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f'),
                  ('valid.txt', MIRROR + 'valid.txt', 1121681, 'f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8'),
                  ('test.txt', MIRROR + 'test.txt', 1256449, 'd790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0')],
    'enwik8': [('enwik8', 'http://mattmahoney.net/dc/enwik8.zip', 100_000_000, None)],
    'wikitext103': [(f'wiki.{split}.tokens', SMERITY, None, None) for split in ('train', 'valid', 'test')],
    'pg19': [(split, f'gs://deepmind-gutenberg/{split}', None, None) for split in ('train', 'validation', 'test')],   # by hand
}
NOT_CODE = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', 'encodings', 'pydoc_data', '__pycache__'}
SPLIT_NAME = re.compile(r'(?:.*[._-])?(train|valid|val|validation|test)(?!\.py$)(?:\..*)?')     # train.txt, wiki.valid.tokens, test/; no program
HEADING = re.compile(r' = (?!= ).*(?<! =) = ?\n')                                  # WikiText's ' = Title = ', not ' = = Part = = '


class Source(NamedTuple):
    """A stretch of text that belongs to one split: some files in a row (one document), or one file from start to stop."""
    name: str
    paths: tuple
    start: int = 0
    stop: int = None

    def size(self):
        return (self.stop or sum(p.stat().st_size for p in self.paths)) - self.start


def download(url, path, quiet):
    """Fetches url to path, which appears only when it is complete."""
    part = path.with_name('.part-' + path.name)
    request = urllib.request.Request(url, headers={'User-Agent': 'Mozilla/5.0 (nanoRLM)'})     # one mirror refuses nameless ones
    with urllib.request.urlopen(request, timeout=60) as response, open(part, 'wb') as f:
        size = int(response.headers.get('Content-Length') or 0)
        for block in progress(iter(lambda: response.read(1 << 20), b''), f'fetching {path.name}, MB', -(-size >> 20), quiet):
            f.write(block)
        if size and f.tell() != size:
            raise OSError(f'{f.tell():,} of {size:,} bytes came')
    os.replace(part, path)


def fetch(name, folder, quiet):
    """Sees to it that `folder` holds the files of a named corpus, complete and, where we know it, with the right sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, url, size, sha in DOWNLOADS[name]:
        path = folder / file
        try:
            if not path.exists() and url.endswith('.zip'):
                archive = folder / ('.' + url.rsplit('/', 1)[1])
                if not archive.exists():
                    download(url, archive, quiet)
                with zipfile.ZipFile(archive) as z:
                    member = next(m for m in z.namelist() if m.rsplit('/', 1)[-1] == file)
                    os.replace(z.extract(member, folder / '.unpacked'), path)
            elif not path.exists():
                download(url, path, quiet)
        except (OSError, zipfile.BadZipFile, StopIteration) as error:
            if isinstance(error, zipfile.BadZipFile):
                archive.unlink()
            missing = ' and '.join(f for f, *_ in DOWNLOADS[name] if not (folder / f).exists())
            raise DataError(f'{url} could not be fetched ({type(error).__name__}: {error}): put {missing} into {folder} by hand, '
                            'then run this again') from None
        if size is not None and path.stat().st_size != size:
            raise DataError(f'{path} has {path.stat().st_size:,} bytes instead of {size:,}: delete it to fetch it again')
        if sha is not None and scan(path)[0] != sha:
            raise DataError(f'{path} is not the known file (its sha256 is not {sha[:12]}...): delete it to fetch it again')
        if sha is None and not quiet:
            print(f'{path}: not verified, no sha256 of it is known here')


def list_files(where, omit):
    """[(name relative to `where`, path)] in path order, without hidden ones and the folders in `omit`, names or whole paths."""
    if where.is_file():
        return [(where.name, where)]
    files = []
    for folder, folders, names in os.walk(where):
        folders[:] = [d for d in folders if d[0] != '.' and d not in omit and Path(folder, d).resolve() not in omit]
        files += [Path(folder, name) for name in names if name[0] != '.']
    return sorted((path.relative_to(where).as_posix(), path) for path in files if path.is_file())


def list_code():
    """The standard library's own sources, without what was written when this Python was built (_sysconfigdata*, config-*)."""
    files = list_files(Path(sysconfig.get_paths()['stdlib']), NOT_CODE)
    return [(name, path) for name, path in files if name.endswith('.py') and not name.startswith(('_sysconfigdata', 'config-'))]


def stamp(files):
    """A digest of names, sizes and times: equal as long as nobody touched the files, and cheap."""
    seen = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in files]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def scan(path):
    """(sha256, None), or (sha256, why the file is skipped)."""
    sha, utf8, why = hashlib.sha256(), codecs.getincrementaldecoder('utf-8')(), None
    with open(path, 'rb') as f:
        while True:
            block = f.read(1 << 20)
            sha.update(block)
            try:
                if why is None and '\0' in utf8.decode(block, final=not block):
                    why = 'binary'
            except UnicodeDecodeError:
                why = 'not UTF-8'
            if not block:
                return sha.hexdigest(), why


def by_hash(sizes):
    """{name: bytes} -> {name: split}: in order of sha256(name), to val, else to test, while that stays within 5% of all bytes."""
    split, held, room = {}, {'val': 0, 'test': 0}, sum(sizes.values()) // 20
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        split[name] = next((s for s in held if held[s] + sizes[name] <= room), 'train')
        if split[name] != 'train':
            held[split[name]] += sizes[name]
    return split


def split_sources(files, code):
    """
    Reads all files once and gives each to a split.

    files       [(name, path)]
    returns     {split: [Source]}, sha256 of all that, {why: [name of a skipped file]}

    code                                        a document is a top-level package or module; split by the hash of its name
    files (or folders) named train, val, test   these splits; unless one is named train, the names mean nothing
    other files                                 split by the hash of their names
    files so few that none is 5% of the text    of each the first 90% for train, 5% for val, 5% for test, cut at line ends
    """
    shas, skipped, texts, sources = {}, defaultdict(list), [], {split: [] for split in SPLITS}
    for name, path in files:
        shas[path], why = scan(path)
        if why:
            skipped[why].append(name)
        elif path.stat().st_size:
            texts.append((name, path))
    named = {name: match[1] for name, _ in texts if (match := SPLIT_NAME.fullmatch(name.split('/')[0]))}
    if not code and 'train' in named.values():
        for name, path in texts:
            if name in named:
                split = 'val' if named[name].startswith('val') else named[name]
                sources[split].append(Source(name, (path,)))
            else:
                skipped['not named train, val or test'].append(name)
    else:
        groups = defaultdict(list)
        for name, path in texts:
            groups[name.split('/')[0] if code else name].append(path)
        documents = [Source(name, tuple(paths)) for name, paths in groups.items()]
        split_of = by_hash({source.name: source.size() for source in documents})
        whole = code or 'val' in split_of.values()
        for source in documents:
            if whole:
                sources[split_of[source.name]].append(source)
                continue
            path, cuts = source.paths[0], [0]
            with open(path, 'rb') as f:
                for percent in (90, 95, 100):
                    f.seek(max(path.stat().st_size * percent // 100 - 1, 0))
                    f.readline()
                    cuts.append(f.tell())
            for split, start, stop in zip(SPLITS, cuts, cuts[1:]):
                if start < stop:
                    sources[split].append(Source(source.name, source.paths, start, stop))
    facts = [[split, s.name, s.start, s.stop, [shas[p] for p in s.paths]] for split in SPLITS for s in sources[split]]
    return sources, hashlib.sha256(json.dumps(facts).encode()).hexdigest(), skipped


def lines(source):
    """Yields (whether a document begins here, line) for all lines of a source."""
    def read(path):
        with open(path, 'rb') as f:
            f.seek(source.start)
            for line in f:
                yield line.decode()
                if source.stop is not None and f.tell() >= source.stop:
                    return

    path = source.paths[0]
    if path.suffix == '.jsonl':                         # a document per line
        for number, line in enumerate(read(path), 1):
            if line.strip():
                try:
                    document = io.StringIO(well_formed(json.loads(line)['text'] or ''))
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise DataError(f'{path}, line {number} after byte {source.start:,}: not an object with a text in '
                                    'the field "text"') from None
                for n, line in enumerate(document):
                    yield n == 0, line
        return
    begins, blank, before, line = True, True, '', ''    # blank: this document has no text yet
    for path in source.paths:
        if line and not line.endswith('\n'):
            line = '\n'                                 # files of one document: each starts a line
            yield False, line
        for line, after in itertools.pairwise(itertools.chain(read(path), [''])):
            if path.suffix != '.py' and HEADING.fullmatch(line) and not before.strip() and not after.strip() and not blank:
                begins = blank = True
            yield begins, line
            begins, before, blank = False, line, blank and not line.strip()


def pieces(source):
    """
    Yields (text, whether a document ends with it), documents cut into pieces of about PIECE characters.

    The cuts are after a line end that stands between two characters that are not blank: there every pattern cuts too,
    so that the pieces' tokens in a row are the document's tokens.
    """
    held, size, last = [], 0, ''
    for begins, line in lines(source):
        safe = last[-2:-1].strip() and line[0].strip()
        if held and (begins or size > PIECE and safe or size > 64 * PIECE):     # a text without such a place is cut all the same
            yield ''.join(held), begins
            held, size = [], 0
        held.append(line)
        size, last = size + len(line), line
    if held:
        yield ''.join(held), True


# ----------------------------------------------------------------------------------------------------------------------
# corpora on disk

@dataclass
class Split:
    """Documents in a row. n_bytes and n_words (between blanks) are those of the text, before the tokenizer."""
    name: str
    tokens: np.ndarray      # (n_tokens,) uint16 or uint32, usually a memmap
    offsets: np.ndarray     # (n_docs + 1,) int64
    n_bytes: int = 0
    n_words: int = 0

    def doc_of(self, positions):
        """Token positions -> numbers of the documents they lie in, same shape."""
        return np.searchsorted(self.offsets, positions, side='right') - 1


@dataclass
class Corpus:
    name: str
    folder: Path
    meta: dict              # what meta.json holds
    tokenizer: Tokenizer
    train: Split            # each is None where the corpus has no such split
    val: Split
    test: Split
    fingerprint: str        # of the sources and the tokenizer


def sample_of(tokens):
    """(largest id, sha256) of up to 1,024 stretches of tokens, spread evenly: of all tokens, if there are no more than 64M."""
    sha, top, length = hashlib.sha256(), 0, 1 << 16
    for start in range(0, len(tokens), max(length, len(tokens) // 1024)):
        block = np.ascontiguousarray(tokens[start:start + length])
        sha.update(block)
        top = max(top, int(block.max()))
    return top, sha.hexdigest()


def encode_bundle(tokenizer, bundle):
    """[(text, whether a document ends)] -> tokens, their number up to each document's end, [bytes, words, line ends]."""
    lists, n, ends, counts = [], 0, [], np.zeros(3, dtype=np.int64)
    for text, ends_here in bundle:
        ids = tokenizer.encode(text)
        if ends_here and tokenizer.eot is not None:
            ids = np.append(ids, np.uint32(tokenizer.eot))
        lists.append(ids)
        n += len(ids)
        if ends_here:
            ends.append(n)
        counts += len(text.encode()), len(text.split()), text.count('\n')
    return np.concatenate(lists), ends, counts


def write_split(folder, split, sources, tokenizer, quiet):
    """Encodes the sources into folder/split.bin and .idx, a few pieces per core at a time; returns the split's part of meta.json."""
    def encoded(pool, ahead):
        bundle, size, waiting = [], 0, deque()
        for piece in itertools.chain.from_iterable(map(pieces, sources)):
            bundle.append(piece)
            size += len(piece[0])
            if size >= 4 * PIECE:
                waiting.append(pool.submit(encode_bundle, tokenizer, bundle))
                bundle, size = [], 0
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)
        if bundle:
            yield encode_bundle(tokenizer, bundle)

    offsets, n, counts = [0], 0, np.zeros(3, dtype=np.int64)
    workers = os.cpu_count() or 1                       # threads serve: tiktoken lets go of the interpreter's lock
    with open(folder / f'{split}.bin', 'wb') as f, ThreadPoolExecutor(workers) as pool:
        for tokens, ends, sizes in progress(encoded(pool, workers + 2), f'encoding {split}', sum(s.size() for s in sources) // (4 * PIECE), quiet):
            tokens.astype(tokenizer.dtype).tofile(f)
            offsets += [n + end for end in ends]
            n += len(tokens)
            counts += sizes
    if n == 0:
        raise DataError(f'the files of the {split} split have no text')
    offsets = np.unique(np.array(offsets, dtype=np.int64))                  # a text in which the tokenizer finds nothing is no document
    offsets.tofile(folder / f'{split}.idx')
    keys = dict(zip(('bytes', 'words', 'lines'), counts.tolist()))          # words + lines: WikiText's count, <eos> included
    return {'tokens': n, 'docs': len(offsets) - 1, **keys, 'bin_sample': sample_of(np.memmap(folder / f'{split}.bin', tokenizer.dtype, 'r'))[1],
            'idx_sha256': hashlib.sha256(offsets).hexdigest()}


def prepare(folder, name, sources, sha, facts, tokenizer, vocab_size, quiet):
    """Makes a corpus in a folder beside `folder` and renames it at the end, so that no half-made one is ever found."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f'{folder.name}.tmp-*'):      # left by a run that was killed
        try:
            if all(time.time() - p.stat().st_mtime > 3600 for p in [old, *old.iterdir()]):
                shutil.rmtree(old, ignore_errors=True)
        except FileNotFoundError:                               # renamed meanwhile, by a run that is ready
            pass
    temporary = Path(tempfile.mkdtemp(prefix=folder.name + '.tmp-', dir=folder.parent))
    try:
        if not isinstance(tokenizer, Tokenizer):
            size = sum(s.size() for s in sources['train'])
            every = -(-size // BPE_SAMPLE) if tokenizer == 'bpe' else 1
            texts = (text for text, _ in itertools.chain.from_iterable(map(pieces, sources['train'])))
            tokenizer = Tokenizer.train(tokenizer, itertools.islice(texts, 0, None, every), vocab_size, quiet)
        splits = {split: write_split(temporary, split, sources[split], tokenizer, quiet) for split in SPLITS if sources[split]}
        tok = tokenizer.to_dict()
        meta = {'version': VERSION, 'name': name, **facts, 'sha256': sha, 'n_vocab': tokenizer.n_vocab,
                'fingerprint': hashlib.sha256(json.dumps([sha, tok]).encode()).hexdigest()[:16], 'splits': splits, 'tokenizer': tok}
        (temporary / 'meta.json').write_text(json.dumps(meta))
        os.chmod(temporary, 0o755)                              # mkdtemp's are for the owner alone
        try:
            os.rename(temporary, folder)
        except OSError:                                         # there is one already
            if json.loads((folder / 'meta.json').read_text())['fingerprint'] == meta['fingerprint']:
                return                                          # another process was faster, with the same result
            os.rename(folder, temporary / 'old')
            os.rename(temporary, folder)
            shutil.rmtree(folder / 'old', ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_corpus(folder):
    """The corpus in a folder, checked; DataError with the file's name when something is wrong."""
    def check(fine, file, what):
        if not fine:
            raise DataError(f'{folder / file}: {what}; delete the folder {folder} to prepare it again') from None

    check((folder / 'meta.json').is_file(), 'meta.json', 'missing')
    try:
        meta = json.loads((folder / 'meta.json').read_text())
        check(meta['version'] == VERSION, 'meta.json', f'format {meta["version"]}, this program reads format {VERSION}')
        tokenizer, splits = Tokenizer.from_dict(meta['tokenizer']), dict.fromkeys(SPLITS)
        check(tokenizer.n_vocab == meta['n_vocab'], 'meta.json', f'{tokenizer.n_vocab} ids instead of {meta["n_vocab"]}')
        for name, m in meta['splits'].items():
            bin_file, idx_file = f'{name}.bin', f'{name}.idx'
            for file, want in (bin_file, m['tokens'] * tokenizer.dtype.itemsize), (idx_file, 8 * (m['docs'] + 1)):
                check((folder / file).is_file(), file, 'missing')
                size = (folder / file).stat().st_size
                check(size == want, file, f'{size:,} bytes instead of {want:,}')
            offsets = np.fromfile(folder / idx_file, dtype=np.int64)
            good = offsets[0] == 0 and offsets[-1] == m['tokens'] and (np.diff(offsets) > 0).all()
            check(good, idx_file, f'the offsets do not rise from 0 to {m["tokens"]:,}')
            sha = hashlib.sha256(offsets).hexdigest()
            check(sha == m['idx_sha256'], idx_file, 'not the offsets that were written with this meta.json')
            tokens = np.memmap(folder / bin_file, tokenizer.dtype, 'r')
            top, sha = sample_of(tokens)
            check(top < tokenizer.n_vocab, bin_file, f'id {top:,} is out of range, the tokenizer has {tokenizer.n_vocab:,} ids')
            check(sha == m['bin_sample'], bin_file, 'not the tokens that were written with this meta.json')
            splits[name] = Split(name, tokens, offsets, m['bytes'], m['words'])
        return Corpus(meta['name'], folder, meta, tokenizer, *(splits[s] for s in SPLITS), meta['fingerprint'])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        check(False, 'meta.json', f'not readable ({type(error).__name__}: {error})')


def load(data='code', tokenizer='bpe', vocab_size=4096, root='corpora', quiet=False):
    """
    The corpus `data` (code, a named download, or a path), prepared on first use and prepared anew when its sources have changed.

    tokenizer   a name, or a Tokenizer, a checkpoint's for instance: then the text is encoded with that very one

    Prints one line: which text, how much, and the sha256 of the sources, by which results may be compared.
    """
    given, tokenizer = (tokenizer, tokenizer.name) if isinstance(tokenizer, Tokenizer) else (None, tokenizer)
    vocab_size = given.n_vocab if given else vocab_size
    one_of('tokenizer', tokenizer, Tokenizer.NAMES)
    say = (lambda *a: None) if quiet else print
    known = ['code', *DOWNLOADS]
    data, root, where = str(data), Path(root), Path(data)
    if data in DOWNLOADS:
        where = root / 'downloads' / data
    elif data != 'code' and not where.exists():
        one_of('corpus (and no file or folder has that name)', data, known)
    name = data if data in known else where.resolve().stem if where.is_file() else where.resolve().name
    folder = root / f'{name}-{tokenizer}{vocab_size if tokenizer == "bpe" else ""}'
    corpus = open_corpus(folder) if folder.exists() else None
    if given and (corpus is None or corpus.tokenizer.to_dict() != given.to_dict()):     # the usual folder has another one
        folder = root / f'{folder.name}-{hashlib.sha256(json.dumps(given.to_dict()).encode()).hexdigest()[:8]}'
        corpus = open_corpus(folder) if folder.exists() else None
    if data in DOWNLOADS and corpus is None:
        fetch(data, where, quiet)
    files = list_code() if data == 'code' else list_files(where, {root.resolve()}) if where.exists() else []
    if data in DOWNLOADS:                           # what lies beside them is none of them; one that is prepared does not need them
        wanted = {file for file, *_ in DOWNLOADS[data]}
        files = [(n, p) for n, p in files if n.split('/')[0] in wanted]
        files = [] if corpus and len({n.split('/')[0] for n, _ in files}) < len(wanted) else files
    if corpus is None or files and stamp(files) != corpus.meta['stamp']:
        sources, sha, skipped = split_sources(files, data == 'code')
        for why, names in sorted(skipped.items()):
            say(f'skipped, {why}: {", ".join(names[:5])}' + (f' and {len(names) - 5} more' if len(names) > 5 else ''))
        if not sources['train']:
            raise DataError(f'{where}: no text to train on in {len(files):,} files (UTF-8 text, not hidden, not empty, is what counts)')
        if corpus is not None and corpus.meta['sha256'] != sha:
            say(f'{folder}: the sources have changed since it was prepared (sha256 {corpus.meta["sha256"][:12]}, now {sha[:12]}): preparing it anew')
            corpus = None
        if corpus is None:
            facts = {'python': sys.version.split()[0]} if data == 'code' else {'source': str(where)}
            prepare(folder, name, sources, sha, {**facts, 'stamp': stamp(files)}, given or tokenizer, vocab_size, quiet)
            corpus = open_corpus(folder)
    splits = corpus.meta['splits']
    python = f' (Python {corpus.meta["python"]})' if 'python' in corpus.meta else ''
    say(f'{name}{python}: {sum(s["docs"] for s in splits.values()):,} documents, '
        + ', '.join(f'{s} {m["tokens"]:,}' for s, m in splits.items())
        + f' tokens ({tokenizer}, {corpus.tokenizer.n_vocab:,} ids), sha256 {corpus.meta["sha256"][:12]}')
    return corpus


# ----------------------------------------------------------------------------------------------------------------------
# batches

class Batch(NamedTuple):
    tokens: torch.Tensor    # (B, T) int64; 0 at padding
    targets: torch.Tensor   # (B, T) int64, the next tokens; -1 where there is none to predict
    doc: torch.Tensor       # (B, T) int64, number of the document that each of the tokens is in; -1 at padding
    seed: int               # 63 bits, another for every batch: the only source of the model's randomness
    candidates: torch.Tensor = None         # RPT in training: (B, N, J) int64 and their scores (B, N, J), from rpt.Supervision
    target_scores: torch.Tensor = None


def pack_order(neighbors, rng):
    """
    TRIME's Algorithm 1: a permutation of the segments in which each is followed by a similar one, where one is left.

    neighbors   for each segment, the most similar other ones, best first
    """
    n = len(neighbors)
    used, order, lottery, c = np.zeros(n, dtype=bool), [], iter(rng.permutation(n)), None
    for _ in range(n):
        if c is None:
            c = next(i for i in lottery if not used[i])                 # random_sample(S)
        order.append(c)
        used[c] = True                                                  # S.remove(c)
        c = next((i for i in neighbors[c] if not used[i]), None)        # the first of SimSeg(I, c, k) that is still in S
    return np.array(order, dtype=np.int64)


def pack(segments, first, last, seed, cache):
    """
    segments        list of token id arrays
    first, last     the first and the last document of each, (n,), rising; segments that share one are not packed after each
                    other (TRIME §4.3: m = 1). If each segment has a number of its own, only it and itself are not
    returns         their order in batches, (n,) int64; kept in the folder `cache`, in a file named by all that it depends on
    """
    n = len(segments)
    lo, hi = np.searchsorted(last, first), np.searchsorted(first, last, side='right')       # lo..hi-1 share one with it
    if n > 1 and (hi - lo).min() == n:
        raise DataError('all segments are of one document, so memory ext, which is of other documents, would be empty; '
                        '--no-same-document lets segments of one document see each other')
    key = hashlib.sha256(f'bm25 lucene 1.2 0.75, k = {N_NEIGHBORS}, seed = {seed}'.encode() + lo.tobytes() + hi.tobytes())
    for segment in segments:
        key.update(len(segment).to_bytes(8, 'little') + segment.astype(np.uint32).tobytes())
    path = cache and Path(cache) / f'packed-{key.hexdigest()[:16]}.npy'
    if path and path.exists():
        try:
            return np.load(path)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f'{path}: not readable ({error}); delete it to pack anew') from None
    from bm25 import BM25
    index, neighbors = BM25(segments), []
    for i in progress(range(0, n, 256), 'packing by BM25'):
        k = N_NEIGHBORS + int((hi - lo)[i:i + 256].max())
        ids, _ = index.search_many(segments[i:i + 256], k)              # (256, k), the segment itself included
        neighbors += [row[(row >= 0) & ((row < a) | (row >= b))][:N_NEIGHBORS].tolist() for row, a, b in zip(ids, lo[i:], hi[i:])]
    order = pack_order(neighbors, np.random.default_rng(seed))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f'.{os.getpid()}.npy')
        np.save(temporary, order)
        os.replace(temporary, path)
    return order


class Batches:
    """
    The micro-batches of a split, by number: batches[g], g = 0, 1, 2, ..., with len(batches) of them in an epoch.

    segments        a grid of segments of T tokens over the whole split, in another order in every epoch
    consecutive     the same segments; those of a micro-batch follow each other in the text. The micro-batches are shuffled
    packed          the same segments; those of a micro-batch are similar (pack), each to the one before it, which is of another
                    document (documents=True). The micro-batches are shuffled
    documents       sequences of one document, T tokens each. What is left of the documents, shorter than T, is joined one
                    after the other (short='join'; `doc` tells them apart) or left out (short='drop')

    In the first three each token of the split but the first is predicted exactly once per epoch; in `documents`, each token
    but a document's first, if short tails are joined. The last sequences are padded, so shapes never change.
    Nothing but g and the arguments, `cache` excepted, has an influence on batches[g]. With fold 0 or 1, `documents` has only
    those whose number is even or odd.
    """
    KINDS = ('segments', 'consecutive', 'packed', 'documents')

    def __init__(self, split, kind, block_size, micro_batch, seed, short='join', cache=None, documents=True, fold=-1):
        one_of('kind of batches', kind, self.KINDS)
        one_of('treatment of short documents', short, ('join', 'drop'))
        if split is None:
            raise DataError('this corpus has no such split: give --data a folder with files named train, val and test')
        self.split, self.kind, self.T, self.B, self.seed, self.fold = split, kind, block_size, micro_batch, seed, fold
        self.epoch = None, None                         # the latest epoch and its order, remembered
        if min(block_size, micro_batch) < 1:
            raise DataError(f'--block-size {block_size} and --micro-batch {micro_batch} must be 1 or more')
        if fold >= 0 and kind != 'documents':
            raise DataError(f'--fold {fold} chooses documents, and batches of the kind {kind} have none to choose')
        # stretches of the split are put in a row, and sequence r is places r * T to r * T + T - 1 of that row
        T, longest = block_size, ''
        if kind == 'documents':         # first all documents, each without its tail, so that no sequence has two; then all tails
            lengths = np.diff(split.offsets)
            if fold >= 0:
                lengths[np.arange(len(lengths)) % 2 != fold] = 0
            tails = lengths % T
            begins = np.concatenate([split.offsets[:-1], split.offsets[1:] - tails])
            sizes = np.concatenate([lengths - tails, tails])
            if short == 'drop':
                begins, sizes, longest = split.offsets[:-1], lengths - tails, f', the longest document {lengths.max():,}'
        else:                           # all but the last token, which is only ever a target
            begins, sizes = np.array([0]), np.array([len(split.tokens) - 1])
        self.ends, n = np.cumsum(sizes), int(sizes.sum())           # where each stretch ends in the row
        self.shift = begins - (self.ends - sizes)                   # position in the split minus place in the row, for each stretch
        if n < T:
            raise DataError(f'{split.name} has {len(split.tokens):,} tokens{longest}: not enough for one sequence of --block-size {T:,}')
        self.n_rows = -(-n // T)
        self.base = np.arange(self.n_rows)                          # `rows` cuts it into micro-batches, unless it shuffles sequences
        if kind == 'packed':
            starts = self.base * T
            ends = np.minimum(starts + T, n)
            docs = (split.doc_of(starts), split.doc_of(ends - 1)) if documents else (self.base, self.base)
            self.base = pack([np.asarray(split.tokens[a:b]) for a, b in zip(starts, ends)], *docs, seed, cache)

    def __len__(self):
        return -(-self.n_rows // self.B)

    def __iter__(self):
        """The first epoch."""
        return map(self.__getitem__, range(len(self)))

    def rows(self, g):
        """Numbers of the sequences in micro-batch g, (at most B,)."""
        epoch, i = divmod(g, len(self))
        whole = self.kind in ('consecutive', 'packed')      # micro-batches are shuffled whole
        if self.epoch[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self.epoch = epoch, rng.permutation(len(self) if whole else self.n_rows)
        order = self.epoch[1]
        if whole:
            order, i = self.base, order[i]
        return order[i * self.B:][:self.B]

    def positions(self, rows):
        """Where in the split the tokens of some sequences are: (len(rows), T) int64, -1 at padding."""
        place = rows[:, None] * self.T + np.arange(self.T)
        inside = place < self.ends[-1]
        stretch = np.searchsorted(self.ends, np.where(inside, place, 0), side='right')
        return np.where(inside, place + self.shift[stretch], -1)

    def __getitem__(self, g):
        if g < 0:
            raise IndexError(f'micro-batch {g}: they are numbered from 0')
        seed = int.from_bytes(hashlib.sha256(f'{self.seed} {g}'.encode()).digest()[:8], 'little') >> 1
        return self.take(self.rows(g), seed)

    def take(self, rows, seed):
        """The micro-batch of sequences chosen by number, rows (at most B,); they are numbered 0 to n_rows - 1 in stream order."""
        split, p = self.split, np.full((self.B, self.T), -1, dtype=np.int64)                  # (B, T)
        p[:len(rows)] = self.positions(rows)
        doc = split.doc_of(p)                                           # (B, T) and -1 for position -1
        real = predicted = p >= 0
        if self.kind == 'documents':
            predicted = p + 1 < split.offsets[doc + 1]                  # the next token is the document's own; False at padding
        tokens = np.where(real, split.tokens[np.maximum(p, 0)].astype(np.int64), 0)
        targets = np.where(predicted, split.tokens[np.minimum(p + 1, len(split.tokens) - 1)].astype(np.int64), -1)
        return Batch(*map(torch.from_numpy, (tokens, targets, doc)), seed)


# ----------------------------------------------------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description='Prepare a corpus and look at it.')
    parser.add_argument('--data', default='code', help=f'code, {", ".join(DOWNLOADS)}, or a file or folder')
    parser.add_argument('--tokenizer', default='bpe', help=', '.join(Tokenizer.NAMES))
    parser.add_argument('--vocab-size', type=int, default=4096, help='ids of the bpe tokenizer')
    parser.add_argument('--root', default='corpora', help='where corpora are kept')
    args = parser.parse_args()
    corpus = load(args.data, args.tokenizer, args.vocab_size, args.root)
    for split in filter(None, (corpus.train, corpus.val, corpus.test)):
        n = len(split.tokens)
        print(f'{split.name:5} {len(split.offsets) - 1:9,} documents {n:13,} tokens {split.n_bytes:13,} bytes '
              f'{split.n_words:12,} words {split.n_bytes / n:5.2f} bytes a token')
    batch = Batches(corpus.train, 'segments', min(128, len(corpus.train.tokens) - 1), 1, seed=0)[0]
    print(f'a segment of {corpus.folder}, from document {batch.doc[0, 0]}:\n{corpus.tokenizer.decode(batch.tokens[0])}')


if __name__ == '__main__':
    main()
