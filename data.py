"""
Text in, batches out: tokenizers, corpora on disk, and several ways to cut a corpus into batches.

A corpus is a folder that `load` makes on first use:

    corpora/code-bpe4096-5f0c21ab/
        train.bin  val.bin  test.bin    token ids of all documents, one document after the other
        train.idx  val.idx  test.idx    where each document starts and the last one ends, int64
        meta.json                       the tokenizer, counts, hashes

Its name ends with a hash of its source files (paths, sizes, times) and of VERSION: if one changes,
another folder is made. Every document ends with <|endoftext|>, except with `word`. What is counted
and hashed is the text as it is read: without BOM, with LF for the line ends CR LF and CR. A batch
is a pure function of (split, arguments of Batches, number): a run resumes from its step alone.

Letters: a micro-batch has B rows of T tokens; g is the number of a micro-batch, r that of a row.
A row of niah has N chunks of S tokens.
"""
import contextlib, functools, gzip, hashlib, heapq, json, math, os, re, shutil, sys, sysconfig
import time
from collections import Counter, defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, filterfalse, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import regex                # tiktoken depends on it
import tiktoken
import torch

from bm25 import BM25, best_documents

SPLITS = dict(train=(0, 90), val=(90, 95), test=(95, 100))      # percent of a text that is cut
VERSION = 3             # of the rules by which a corpus is prepared: others make another folder


def digest(*values):
    """A hash of values that JSON can hold, 64 hexadecimal digits"""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def progress_bar(items, desc, total=None, quiet=False, size=lambda item: 1):
    """Yields the items. Between items it prints to stderr, when ten seconds have passed, what is
    done and the time left at this speed: `desc: 1,234 of 5,678, 2.1 min left`.

    size(item): the item's part of the total, about proportional to its time.
    total: None: the sum over the items, which then cannot be an iterator."""
    if total is None:
        total = sum(map(size, items))
    start = printed = time.monotonic()
    done = 0
    for item in items:
        clock = time.monotonic()
        if done and not quiet and clock - printed > 10:
            minutes = (clock - start) / 60 / done * (total - done)
            print(f'{desc}: {done:,} of {total:,}, {minutes:.1f} min left', file=sys.stderr)
            printed = clock
        yield item
        done += size(item)


# --------------------------------------------------------------------------------------------------
# tokenizers
# GPT-2's words for bpe: contractions, letters, numbers, punctuation, blanks
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TOKENIZERS = 'bytes', 'bpe', 'gpt2', 'word'
BYTES = tuple(map(chr, range(256)))         # a token of bytes is a str, one character per byte
# a piece of a text has at most 256 characters of a long word; runs of blanks end before a blank
RUN = re.compile(r'\S{256}|\s{256}')        # only a text with this can have a long word
PIECE = regex.compile(r'(?s).*?(?:\p{L}{256}|\p{N}{256}|[^\s\p{L}\p{N}]{256}|\s{256}(?=\s))|.+')


def unix(text):
    """A text without BOM, with LF for the line ends CR LF and CR"""
    return text.removeprefix('\ufeff').replace('\r\n', '\n').replace('\r', '\n')


def words_of(text):
    """The words that WikiText's papers count: between blanks, and <eos> for each line end."""
    return unix(text).replace('\n', ' <eos> ').split()


def short_words(text):
    """A text in pieces that have no long word. tiktoken fails at 1,000,000 blanks in a row, and
    what bpe learns should not depend on the length of lines in a text without blanks."""
    if RUN.search(text):
        return PIECE.findall(text)
    return [text]


def pieces_to_learn(counts):
    """{word: its frequency} -> the same for bpe, one character per byte: the most frequent words,
    in up to 262,144 pieces, more would take too long. A word of more than 128 bytes is in pieces of
    32, as a merge changes most long words."""
    pieces = Counter()
    for word, n in counts.most_common():
        word = word.encode().decode('latin-1')
        size = 32 if len(word) > 128 else 128
        for i in range(0, len(word), size):
            pieces[word[i:i + size]] += n
        if len(pieces) > 2 ** 18:
            break
    return pieces


def learn_bpe(counts, n_merges):
    """Byte-pair encoding (Sennrich et al. 2016): n_merges times, the most frequent pair of adjacent
    tokens becomes a token; of equally frequent ones that of smaller ids.

    counts: {word, as one character per byte: its frequency} -> tokens, str by id"""
    # In words and pairs, the character chr(i) is the token with id i. Word number w is words[w].
    tokens = list(BYTES)
    words = list(counts)
    frequency = list(counts.values())
    total = Counter()                           # {pair: its frequency in all words}
    words_with = defaultdict(set)               # {pair: numbers of the words that have or had it}

    def count_pairs(w, sign):
        for pair in pairwise(words[w]):
            total[pair] += sign * frequency[w]
            words_with[pair].add(w)

    # count the pairs of all words
    for w in range(len(words)):
        count_pairs(w, 1)
    # a sorted list is a heap; its last entry stands for: no pair is left
    heap = sorted((-n, pair) for pair, n in total.items()) + [(0, ())]

    # the most frequent pair (a, b) becomes token i
    for i in progress_bar(range(256, 256 + n_merges), 'learning bpe'):
        # some frequencies in the heap are out of date, too high: the top is corrected
        n, pair = heap[0]
        while -n != total[pair]:
            heapq.heapreplace(heap, (-total[pair], pair))
            n, pair = heap[0]
        if n == 0:
            break
        a, b = pair
        tokens.append(tokens[ord(a)] + tokens[ord(b)])

        # only the words that have the pair are changed and counted again
        changed = words_with.pop(pair)
        for w in changed:
            count_pairs(w, -1)
            words[w] = words[w].replace(a + b, chr(i))
            count_pairs(w, 1)

        # pairs with token i are new; the others are at most as frequent as before
        new_pairs = {pair for w in changed for pair in pairwise(words[w]) if chr(i) in pair}
        for pair in new_pairs:
            heapq.heappush(heap, (-total[pair], pair))
    return tokens


class Tokenizer:
    """bytes   the 256 bytes and <|endoftext|>
    bpe     the 256 bytes, tokens learned from the corpus, and <|endoftext|>
    gpt2    GPT-2's 50,257 tokens, from files that tiktoken downloads; TIKTOKEN_CACHE_DIR keeps them
    word    WikiText's: words between blanks, <eos> for each line end, <unk>; most frequent first

    tokens: str by id, one character per byte (not for word). eot: id of <|endoftext|>, or None.
    Raises ValueError for another name, and where tokens are missing that every text may need."""
    def __init__(self, name, tokens=BYTES, pattern=PATTERN):
        tokens = self.tokens = list(tokens)
        needed = {'<unk>', '<eos>'} if name == 'word' else BYTES
        if name not in TOKENIZERS or not set(tokens).issuperset(needed):
            raise ValueError(f'{name!r} with {len(tokens)} tokens is not a tokenizer')
        self.name, self.pattern, self.eot = name, pattern, None
        self.ids = {token: i for i, token in enumerate(tokens)}
        if name != 'word':
            ranks = {token.encode('latin-1'): i for i, token in enumerate(tokens)}
            self.bpe = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                         special_tokens={})
            self.eot = len(tokens)
            tokens.append('<|endoftext|>')
        self.n_vocab = len(tokens)
        self.dtype = np.uint16 if self.n_vocab <= 2 ** 16 else np.uint32    # on disk

    @classmethod
    def train(cls, name, texts=(), vocab_size=4096):
        """A tokenizer made from texts, an iterable of str; bytes and gpt2 need none."""
        if name == 'bytes':
            return cls(name)
        if name == 'gpt2':
            try:
                gpt2 = tiktoken.get_encoding(name)
            except Exception:                                   # of several packages
                raise SystemExit('gpt2 cannot be downloaded: TIKTOKEN_CACHE_DIR may have its '
                                 'vocab.bpe, named 6d1cbeee0f20b3d9449abfede4726ed8212e3aee, and '
                                 'encoder.json, named 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6')
            tokens = map(gpt2.decode_single_token_bytes, range(gpt2.eot_token))
            return cls(name, [token.decode('latin-1') for token in tokens], gpt2._pat_str)

        if name == 'word':
            counts = Counter(chain.from_iterable(map(words_of, texts)))
            words = counts.keys() | {'<unk>', '<eos>'}
            return cls(name, sorted(words, key=lambda word: (-counts[word], word)))

        # bpe; vocab_size counts the 256 bytes and <|endoftext|>, too
        counts, n_characters = Counter(), 0
        for text in texts:
            for piece in short_words(text):
                counts.update(regex.findall(PATTERN, piece))
            n_characters += len(text)
            if n_characters > 2 ** 26:                          # enough to learn from
                break
        return cls(name, learn_bpe(pieces_to_learn(counts), vocab_size - 257))

    def encode(self, text):
        """str -> (n,) uint32. <|endoftext|> within the text is ordinary text."""
        if self.name == 'word':
            ids = (self.ids.get(word, self.ids['<unk>']) for word in words_of(text))
            return np.fromiter(ids, np.uint32)
        text = text.encode('utf-8', 'replace').decode()         # '?' for a lone surrogate
        return np.concatenate([self.bpe.encode_to_numpy(piece) for piece in short_words(text)])

    def decode(self, ids):
        """Ids (n,) -> str; U+FFFD for what is not UTF-8"""
        tokens = [self.tokens[i] for i in ids]
        if self.name == 'word':
            return ' '.join(tokens).replace('<eos>', '\n')
        return ''.join(tokens).encode('latin-1').decode(errors='replace')

    def to_dict(self):
        """The arguments of Tokenizer, for JSON and checkpoints"""
        return dict(name=self.name, tokens=self.tokens[:self.eot], pattern=self.pattern)


# --------------------------------------------------------------------------------------------------
# source files: downloads, splits, documents
GITHUB = 'https://raw.githubusercontent.com/'
WIKITEXT2 = f'{GITHUB}pytorch/examples/main/word_language_model/data/wikitext-2/'
DOWNLOADS = {                                   # {URL: begin of its sha256, where it is known}
    'shakespeare': {f'{GITHUB}karpathy/char-rnn/master/data/tinyshakespeare/input.txt': '86c4e6aa'},
    'wikitext2': {f'{WIKITEXT2}train.txt': '9e9fa1ad', f'{WIKITEXT2}valid.txt': 'f0737ed3',
                  f'{WIKITEXT2}test.txt': 'd790b833'},
    'wikitext103': {'https://wikitext.smerity.com/wikitext-103-v1.zip': ''},
    'enwik8': {'http://mattmahoney.net/dc/enwik8.zip': ''},
    'pg19': {'gs://deepmind-gutenberg/': ''},   # never downloads: the error names the folder
}
HOPS = {'niah': 1, 'niah2': 2}                  # --data: needles in a haystack, see Needles
HIDDEN = '[.].*|.*[.]zip|corpora|out'           # names of files and folders that are omitted
NOT_CODE = (f'{HIDDEN}|site-packages|dist-packages|test|tests|idle_test|encodings|pydoc_data|'
            'config-.*|_sysconfigdata.*')       # the last two are written by installers
# words of paths that name a split: TRAIN, or Train of myTrain01; but for names of programs
SPLIT_WORD = re.compile('(?ai)(?P<train>train|training|trainset)|'
                        '(?P<val>val|valid|validation|dev|valset|devset)|'
                        '(?P<test>test|testing|eval|evaluation|testset)')
WORD = regex.compile(
    r'(?:\p{Lu}+(?!\p{Ll})|\p{Lu}?\p{Ll}+)(?![^/]*[.](?i:py|pyi|ipynb|sh|bat|js|ts|c|h|cc|cpp|hpp|'
    r'cu|java|go|rs|rb|pl|r|lua|jl|php|cs|kt|swift|ya?ml|toml)$)')
JSON = re.compile('(?i).*[.](json|jsonl|jsonlines|ndjson)([.]gz)?')
PAIRS = re.compile('(?i).*[.]tsv([.]gz)?')      # lines "source TAB target", see Pairs
PACKED = re.compile('(?i).*[.](txt|tsv|json|jsonl|jsonlines|ndjson)[.]gz')
# Where an article of WikiText begins, after some text: ' = Title = ' between blank lines. {} are
# what follows and precedes the title's line; files of others lack some blank lines, see documents.
ARTICLE = r'(?m)^(?= = (?!= ).*(?<! =) = ?{})(?<=\S\s*{})'


def fetch(name, folder):
    """Downloads the files of a named corpus into a folder."""
    incomplete = folder.with_suffix('.part')
    incomplete.mkdir(parents=True, exist_ok=True)
    for url, sha256 in DOWNLOADS[name].items():
        file = incomplete / Path(url).name
        try:
            torch.hub.download_url_to_file(url, file, sha256)
        except Exception as error:              # of several packages
            raise SystemExit(f'{url}: {error!r}; put its files, unpacked, into {folder}')
        if file.suffix == '.zip':
            shutil.unpack_archive(file, incomplete)
    incomplete.rename(folder)


def list_files(path, code):
    """The files of a folder, or one file -> {name: path}, sorted by name. Links to folders are
    followed; each file comes once, under a name without links if it has one.
    code: only .py files, none that NOT_CODE omits, and no links to folders"""
    if path.is_file():
        return {path.name: path}
    omitted = re.compile(NOT_CODE if code else HIDDEN).fullmatch

    # os.walk follows no links. They are visited later, as all folders are roots, too.
    paths, visited, roots = [], set(), [path]
    while roots:
        for folder, folders, names in os.walk(roots.pop()):
            folders[:] = filterfalse(omitted, sorted(folders))  # os.walk visits those that remain
            real = os.path.realpath(folder)
            if real in visited:
                folders.clear()
                continue
            visited.add(real)
            paths += [Path(folder, name) for name in filterfalse(omitted, names)]
            roots += [Path(folder, name) for name in folders if not code]

    # of a file and links to it, the file
    files = {}
    for file in sorted(sorted(paths), key=Path.is_symlink):
        if file.is_file() and (file.suffix == '.py' or not code):
            name = file.relative_to(path).as_posix()
            files.setdefault(os.path.realpath(file), (name, file))
    return dict(sorted(files.values()))


def read_text(path):
    """The text of a file, as `unix` makes it; None if it is not UTF-8"""
    try:
        content = path.read_bytes()
        if PACKED.fullmatch(path.name):
            content = gzip.decompress(content)
        return unix(content.decode())
    except UnicodeDecodeError:
        return None
    except Exception as error:                                  # of gzip, several
        raise SystemExit(f'{str(path)!a} cannot be read: {error}')


def named_split(name):
    """The split that the path of a file names with its last SPLIT_WORD, or "not used"."""
    for match in map(SPLIT_WORD.fullmatch, reversed(WORD.findall(name))):
        if match:
            return match.lastgroup
    return 'not used'


def split_by_hash(sizes):
    """{name: bytes} -> {name: split}. In order of sha256(name) each goes to val, else to test,
    while that has at most 5% of all bytes, else to train. {} if val has less than 2.5%."""
    total = sizes.total()
    limit = total // 20
    room = dict(val=limit, test=limit, train=total)
    split_of = {}
    for name in sorted(sizes, key=lambda name: hashlib.sha256(os.fsencode(name)).digest()):
        split = split_of[name] = next(x for x in room if sizes[name] <= room[x])
        room[split] -= sizes[name]
    if room['val'] > limit // 2:
        return {}
    return split_of


def split_files(files, code):
    """{name: path} -> {split: [(paths, part)]}; paths: of a file, or all of a package of `code`;
    and {split: its files, for the screen}; files that are not used are under "not used".

    If files are named train, and others val or test, only those named so are read. Else all are
    split by hash; if val has too little then, each is cut. part: see cut."""
    # the paths and bytes of each document, by its name: that of its file or package
    paths_of = defaultdict(list)
    sizes = Counter()
    names_of = {split: [] for split in (*SPLITS, 'not used')}
    for name, path in files.items():
        text = read_text(path)
        if text is None:
            names_of['not used'].append(name)
            continue
        if code:
            name = name.split('/')[0]
        paths_of[name].append(path)
        sizes[name] += len(text.encode())

    # the split of each name; a file that is skipped counts as named, too
    split_of = {name: named_split(name) for name in files}
    if not {'train'} < set(split_of.values()) - {'not used'}:       # train and another one
        split_of = split_by_hash(sizes)

    # the names and documents of each split
    sources = defaultdict(list)
    for name, paths in paths_of.items():
        parts = {split_of[name]: (0, 100)} if split_of else SPLITS
        for split, part in parts.items():
            names_of[split].append(name)
            sources[split].append((paths, part))
    about = {split: f'{len(names)} files, {names[:3]!a}' for split, names in names_of.items()}
    return sources, about


def cut(text, part, of_lines):
    """Yields where a part of a text begins and ends, about at the percents of `part`: after a line
    of JSON or of a pair, or after blanks, if the next 2.5% of the text have any."""
    end, length = r'(?<=\s)(?!\s)', len(text) // 40
    if of_lines:
        end, length = r'(?<=\n)', len(text)
    for percent in part:
        start = len(text) * percent // 100 or min(1, percent)
        yield re.compile(rf'\A|{end}|\Z').search(text, start, start + length).start()


def documents(paths, part):
    """Yields the documents of files, str: lines or items of JSON, lines of pairs, articles of
    WikiText, or all as one. part: where it is in the text in percent, as (0, 90)"""
    text = ''
    for path in paths:
        if text and not text.endswith('\n'):
            text += '\n'
        text += read_text(path)

    # an array of JSON, or an object in several lines, becomes lines
    is_json = JSON.fullmatch(paths[0].name)
    if is_json:
        with contextlib.suppress(Exception):                    # lines, or no JSON
            items = json.loads(text)
            if not isinstance(items, list):
                items = [items]
            text = '\n'.join(map(json.dumps, items))

    # how an article of WikiText begins in this text
    article = ARTICLE.format(r'\n *$', r'\n *\n')
    if not regex.search(article, text):
        blank = r'\n *$' if re.search(r'\n *\n', text) else '$'
        article = ARTICLE.format(blank, '')

    # the part, and the number of its first line
    is_pairs = PAIRS.fullmatch(paths[0].name)
    of_lines = is_json or is_pairs
    start, stop = cut(text, part, of_lines)
    first = text.count('\n', 0, start) + 1
    text = text[start:stop]

    if not of_lines:
        yield from regex.split(article, text)
        return
    for number, line in enumerate(text.split('\n'), first):
        if not line.strip():
            continue
        try:
            if is_pairs:    # without blanks, which tokenizers join with TAB, and further columns
                source, target, *_ = map(str.strip, line.split('\t'))
                yield f'{source}\t{target}'
            else:
                yield unix(json.loads(line)['text'].encode('utf-8', 'replace').decode())
        except Exception:
            raise SystemExit(f'{str(paths[0])!a}, line {number}: {line[:60]!r} is neither '
                             '{"text": "..."} nor source TAB target (.tsv): mend it or move the '
                             'file away')


def pieces(text):
    """A text in pieces of about 16,384 characters, cut where every tokenizer cuts"""
    return re.findall(r'(?s).{16384}.*?(?<=\S)\n(?=\S)|.+', text)


# --------------------------------------------------------------------------------------------------
# corpora on disk
class Split(NamedTuple):
    """Documents, one after the other. n_bytes and n_words (between blanks) count their text."""
    name: str
    tokens: np.ndarray      # (n_tokens,) uint16 or uint32, a memmap
    offsets: np.ndarray     # (n_docs + 1,) int64
    n_bytes: int = 0
    n_words: int = 0

    def doc_of(self, positions):
        """Positions of tokens -> numbers of their documents, of the same shape"""
        return np.searchsorted(self.offsets, positions, 'right') - 1


class Corpus:
    """A folder that `prepare` made. train, val, test: Splits or None; fingerprint: hashes of the
    text and of the tokenizer; hops 1 or 2: batches are of Needles; tab: the id of TAB if they are
    of Pairs, else -1. `load` sets name, hops and tab.
    A damaged folder raises an exception of any type."""
    train = val = test = None
    tab = -1

    def __init__(self, folder):
        self.folder = folder
        meta = json.loads((folder / 'meta.json').read_text())
        self.tokenizer = Tokenizer(**meta['tokenizer'])
        self.about, hashes = meta['about'], []

        # the files of each split, and whether they fit together
        for split, counts in meta['splits'].items():
            tokens = np.memmap(folder / f'{split}.bin', self.tokenizer.dtype, 'r')
            offsets = np.fromfile(folder / f'{split}.idx', np.int64)
            assert len(tokens) == offsets[-1] == counts['tokens']
            assert offsets[0] == 0 and np.diff(offsets).min() > 0
            # the maximum takes time: of the first 67M tokens only
            assert tokens[:2 ** 26].max() < self.tokenizer.n_vocab
            setattr(self, split, Split(split, tokens, offsets, counts['bytes'], counts['words']))
            hashes.append(counts['sha256'])
        self.fingerprint = f'{digest(hashes)[:8]}-{digest(meta["tokenizer"])[:8]}'

    def batches(self, split, chunk=32, grow=0, **options):
        """Batches of a split, Needles or Pairs; options: arguments of Batches"""
        if self.hops:
            return Needles(split, self.tokenizer, self.hops, chunk=chunk, grow=grow, **options)
        if grow:
            raise SystemExit('--grow-context is for --data niah or niah2')
        if self.tab >= 0:
            return Pairs(split, self.tab, **options)
        return Batches(split, **options)


def write_split(path, sources, tokenizer):
    """Encodes a split into path.bin and path.idx -> its counts in meta.json. Threads encode the
    pieces of a document; tiktoken works outside Python's lock."""
    counts = Counter()
    offsets, sha = [0], hashlib.sha256()
    eot = [] if tokenizer.eot is None else [tokenizer.eot]

    # one document after the other: its ids and <|endoftext|>, its bytes and words
    with open(f'{path}.bin', 'wb') as file, ThreadPoolExecutor() as pool:
        for source in progress_bar(sources, f'encoding {path.name}'):
            for text in filter(None, documents(*source)):
                encoded = pool.map(tokenizer.encode, pieces(text))
                ids = np.concatenate([*encoded, eot]).astype(tokenizer.dtype)
                file.write(ids)
                utf8 = text.encode()
                counts.update(tokens=len(ids), documents=min(1, len(ids)), bytes=len(utf8),
                              words=len(text.split()))
                offsets.append(counts['tokens'])
                sha.update(utf8 + b'\0')
    np.unique(offsets).tofile(f'{path}.idx')                    # without documents of no token
    counts['sha256'] = sha.hexdigest()
    return counts


def prepare(folder, path, sources, about, tokenizer, vocab_size):
    """Writes a corpus to a temporary folder and renames it: an incomplete one is never opened."""
    if isinstance(tokenizer, str):
        texts = (piece for source in sources['train'] for text in documents(*source)
                 for piece in pieces(text))
        tokenizer = Tokenizer.train(tokenizer, texts, vocab_size)

    # only a complete folder gets the name
    temporary = folder.with_name(f'{folder.name}-{os.getpid()}')
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        splits = {}
        for split in SPLITS:
            counts = write_split(temporary / split, sources[split], tokenizer)
            if counts['tokens']:
                splits[split] = counts
                about[split] += f', {counts["documents"]} documents, {counts["tokens"]:,} tokens'
        if 'train' not in splits:
            raise SystemExit(f'no text for training in {str(path)!a} ({about["train"]}): --data is '
                             f'a path, code, {", ".join(DOWNLOADS)}')
        meta = dict(tokenizer=tokenizer.to_dict(), splits=splits, about=about)
        (temporary / 'meta.json').write_text(json.dumps(meta))
        with contextlib.suppress(OSError):                      # if another process was faster
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_corpus(folder):
    """The Corpus in a folder, or None if there is none; a damaged one gets another name."""
    if folder.exists():
        try:
            return Corpus(folder)
        except Exception as error:
            print(f'{folder} is damaged ({error!r:.99}) and prepared again', file=sys.stderr)
            folder.rename(f'{folder}-damaged-{time.time_ns()}')


def load(data='code', tokenizer='bpe', vocab_size=4096, root='corpora', quiet=False):
    """The corpus `data` (code, the name of a download, a file or a folder), prepared on first use.
    niah, niah2, niah:books/, ...: needles with one or two hops in `code` or in books/.
    tokenizer: a name or a Tokenizer, for example of a checkpoint"""
    # the text of needles
    root = Path(root)
    data = str(data)
    task, _, text = data.partition(':')
    hops = HOPS.get(task, 0)
    if hops:
        data = text or 'code'

    # the source files
    code = data == 'code'
    path = Path(sysconfig.get_path('stdlib') if code else data)
    if data in DOWNLOADS:
        path = root / 'downloads' / data
        if not path.exists():
            fetch(data, path)
    try:
        name = data if code else path.resolve().stem
        files = list_files(path, code) if data else {}          # '' is not the current folder
    except Exception as error:                                  # a link to itself, NUL in a path
        raise SystemExit(f'--data {data!a}: {error}')

    # pairs: all files are .tsv, and the tokenizer has a token for the TAB
    pairs = list(filter(PAIRS.fullmatch, files))
    kind = getattr(tokenizer, 'name', tokenizer)
    if pairs and (kind == 'word' or len(pairs) < len(files)):
        raise SystemExit(f'--data {data!a}: .tsv files cannot be used with other files, or with '
                         'the tokenizer word, which has no TAB')

    # the folder of these files and of the tokenizer that is trained on them
    if kind == 'bpe':
        vocab_size = getattr(tokenizer, 'n_vocab', vocab_size)
        kind = f'bpe{vocab_size}'
    stamp = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
             for path in files.values()]
    folder = root / f'{name}-{kind}-{digest(VERSION, stamp)[:8]}'
    corpus = open_corpus(folder)

    # that of a Tokenizer which was trained on different files
    if isinstance(tokenizer, Tokenizer) and (not corpus or corpus.tokenizer.ids != tokenizer.ids):
        folder = root / f'{name}-{kind}-{digest(VERSION, stamp, tokenizer.tokens)[:8]}'
        corpus = open_corpus(folder)

    # prepared on first use
    if not corpus:
        prepare(folder, path, *split_files(files, code), tokenizer, vocab_size)
        corpus = Corpus(folder)
    corpus.name, corpus.hops = name, hops
    if pairs and not hops:
        corpus.tab = corpus.tokenizer.ids['\t']
    if not quiet:
        print(f'{folder}: fingerprint {corpus.fingerprint}, Python {sys.version.split()[0]}')
        for split, about in corpus.about.items():
            print(f'{split}: {about}')
    return corpus


# --------------------------------------------------------------------------------------------------
# batches
# What a model is trained on
#     tokens   (B, T) int64     0 at padding
#     targets  (B, T) int64     the next tokens; -1 where there is none to predict
#     doc      (B, T) int64     each token's document (niah: row); -1 at padding
#     seed     int              of all random draws of the model, different for each batch
Batch = namedtuple('Batch', 'tokens targets doc seed')


@functools.lru_cache                            # an epoch is shuffled once, not for each batch
def shuffled(n, *seed):
    return np.random.default_rng(seed).permutation(n)


def pack(segments, first_doc, last_doc, seed):
    """An order of n segments in which similar ones follow each other (TRIME, Algorithm 1): after a
    segment comes the most similar of its 20 neighbors that is not yet in the order, else a random
    segment. Neighbors are of other documents (§4.3); first_doc, last_doc (n,): the documents in
    which segments begin and end -> (n,) numbers of the segments"""
    # segment i shares a document with segments low[i], ..., high[i] - 1 (i is one): they are
    # excluded. The first and the last documents of segments ascend, so a binary search has them.
    n = len(segments)
    low = np.searchsorted(last_doc, first_doc)
    high = np.searchsorted(first_doc, last_doc, 'right')
    if n > 1 and (high - low).min() == n:
        raise SystemExit('all segments are of one document: --no-same-document packs them')

    # the 20 segments that are most similar to each segment by BM25, best first
    neighbors = []
    rows = progress_bar(BM25(segments).scores(segments), 'packing by BM25', n)      # n of (n,)
    for i, scores in enumerate(rows):
        scores[low[i]:high[i]] = 0
        neighbors.append(best_documents(scores, 20).tolist())

    # from a random segment on to the nearest that is left, until none of its neighbors is left
    order = {}                                                  # its keys keep their order
    for segment in shuffled(n, seed).tolist():
        while segment not in order:
            order[segment] = True
            segment = next((i for i in neighbors[segment] if i not in order), segment)
    return np.fromiter(order, int)


class Batches:
    """The micro-batches of a split: batches[g], with len(batches) of them in an epoch. Their rows:
    segments     a grid of segments of T tokens over the split, in another order in every epoch
    consecutive  the same, but `consecutive` segments (0: all of a micro-batch) follow each other
    packed       the same, but the segments of a micro-batch are similar (pack), if bm25 is True
    documents    T tokens of one document; the ends of documents, shorter than T, are joined
    An epoch predicts each token of the split but the first; documents: but the first of each."""
    def __init__(self, split, kind, block_size, micro_batch, seed, same_document=True,
                 consecutive=0, bm25=True):
        n_tokens = len(split.tokens) if split else 0
        if n_tokens <= block_size:
            name = split.name if split else 'val'               # a corpus always has train
            raise SystemExit(f'{name} has {n_tokens} tokens, --block-size {block_size} needs more: '
                             'give it more text, or files named val')
        self.T, self.B = block_size, micro_batch
        self.split, self.kind, self.seed = split, kind, seed

        # A stream is some ranges of the split, one after the other; row r is its tokens r T to
        # r T + T - 1. For documents, the ranges are first all whole rows of each document, then
        # what is left at the end of each: only rows of such ends have tokens of several documents.
        # T = 4, documents of 10 and 6 tokens: the ranges are tokens 0-7 and 10-13, which are three
        # rows, then 8-9 and 14-15, which are joined in the fourth.
        length = stop = np.array([n_tokens - 1])                # the last token predicts nothing
        if kind == 'documents':
            doc_length, doc_stop = np.diff(split.offsets), split.offsets[1:]
            end = doc_length % block_size
            length = np.append(doc_length - end, end)
            stop = np.append(doc_stop - end, doc_stop)
        self.range_stop = np.cumsum(length)                     # where ranges end in the stream
        self.shift = stop - self.range_stop     # position in the split - position in the stream
        self.n_rows = math.ceil(self.range_stop[-1] / block_size)

        # An epoch shuffles groups of rows. Group j is rows order[j * group] to
        # order[(j + 1) * group - 1].
        self.order, self.group = np.arange(self.n_rows), 1
        if kind == 'consecutive':
            self.group = consecutive or micro_batch
        if kind == 'packed' and bm25:
            self.group = micro_batch
            starts = np.arange(0, n_tokens - 1, block_size)
            first_doc = last_doc = self.order                   # as if each segment is a document
            if same_document:
                first_doc = split.doc_of(starts)
                last_doc = split.doc_of(starts + block_size - 1)
            segments = np.split(split.tokens[:-1], starts[1:])
            self.order = pack(segments, first_doc, last_doc, seed)
        if micro_batch % self.group:
            raise SystemExit(f'--micro-batch {micro_batch} is not a multiple of --n-consecutive '
                             f'{self.group}')

    def __len__(self):
        return math.ceil(self.n_rows / self.B)

    def rows(self, g):
        """Numbers of the rows of micro-batch g: (B,), fewer at the end of an epoch"""
        size = self.group                                       # rows of a group
        n = self.B // size                                      # groups of a micro-batch
        epoch, i = divmod(g, len(self))
        groups = shuffled(math.ceil(self.n_rows / size), self.seed, epoch)
        groups = groups[i * n:(i + 1) * n]
        if size > 1:
            # the last group, which can be incomplete, comes last: padding ends the micro-batch
            groups = np.sort(groups)
        return np.concatenate([self.order[j * size:(j + 1) * size] for j in groups])

    def positions(self, row, column):
        """Tokens of rows, both of a shape that broadcasts -> their positions in the split; whether
        they are padding, (B, T) each"""
        streamed = row * self.T + column                        # positions in the stream
        padding = streamed >= self.range_stop[-1]
        streamed[padding] = 0
        ranges = np.searchsorted(self.range_stop, streamed, 'right')
        return streamed + self.shift[ranges], padding

    def __getitem__(self, g):
        """Micro-batch g, a Batch; from len(batches) on, of the next epoch"""
        sha = hashlib.sha256(f'{self.seed} {g}'.encode()).digest()
        seed = int.from_bytes(sha[:8], 'little') >> 1           # 63 bits, an int64
        return self.take(self.rows(g), seed)

    def in_order(self, i):
        N = len(self)
        rows = range(self.n_rows)[i * self.B:i * self.B + self.B]
        if self.kind == 'documents':
            rows = range(i, self.n_rows, N)
        return self.take(rows, seed=i)

    def take(self, rows, seed):
        """The Batch of these rows, at most B numbers, and of rows of padding if there are fewer"""
        # rows of padding are beyond the end of the stream
        rows = np.pad(rows, (0, self.B - len(rows)), constant_values=self.n_rows)   # (B,)
        position, padding = self.positions(rows[:, None], np.arange(self.T))        # (B, T)
        split = self.split
        doc = split.doc_of(position)
        doc[padding] = -1

        # which tokens predict the next one: all, but of `documents` not the last of a document
        following = position + 1
        predicted = ~padding
        if self.kind == 'documents':
            predicted = split.doc_of(following) == doc
        following[~predicted] = 0                               # it may be beyond the split

        tokens = split.tokens[position].astype(int)
        tokens[padding] = 0
        targets = split.tokens[following].astype(int)
        targets[~predicted] = -1
        return Batch(*map(torch.from_numpy, (tokens, targets, doc)), seed)


class Pairs(Batches):
    """A row is a document, "source TAB target <|endoftext|>": a decoder alone reads the source and
    predicts what follows TAB, as far as it is within T tokens; other pairs have no row. A
    micro-batch has random rows; packed, with bm25: those of similar targets (TRIME, App. C)."""
    def __init__(self, split, tab, kind, block_size, micro_batch, seed, bm25=True, **_):
        super().__init__(split, 'documents', 1, micro_batch, seed)
        tabs = np.flatnonzero(split.tokens == tab)              # one in each document
        has_row = tabs < split.offsets[:-1] + block_size
        self.start = split.offsets[:-1][has_row]
        self.stop = split.offsets[1:][has_row]
        self.T, self.tab, self.n_rows = block_size, tab, len(self.start)
        if self.n_rows == 0:
            raise SystemExit(f'no pair of {split.name} has a target within --block-size '
                             f'{block_size}')
        self.order = np.arange(self.n_rows)
        if kind == 'packed' and bm25:
            self.group = micro_batch
            bounds = zip(tabs[has_row] + 1, self.stop)
            targets = [split.tokens[start:stop] for start, stop in bounds]
            self.order = pack(targets, self.order, self.order, seed)

    def positions(self, row, column):
        position = np.append(self.start, 0)[row] + column
        padding = position >= np.append(self.stop, 0)[row]      # also all of a row of padding
        position[padding] = 0
        return position, padding

    def take(self, rows, seed):
        batch = super().take(rows, seed)
        is_source = (batch.tokens == self.tab).cumsum(1) == 0
        batch.targets[is_source] = -1
        return batch


class Needles(Batches):
    """Needles are sentences "Key A opens B." in a text; questions "Key A" have an answer after them
    (RULER, Hsieh et al. 2024; DRT, A.4). A and B are names of four random words; with 2 hops also B
    opens C, and the answer is "B, C". A question stands at the end of a chunk, which then retrieves
    for the answer; with 2 hops the chunk before ends with it too, and what that one retrieves can
    help this one. A tenth of all other tokens is predicted too. grow: a number of micro-batches;
    rows have T / 8 tokens in the first quarter of them, then T / 4, T / 2 and T."""
    def __init__(self, split, tokenizer, hops, block_size, micro_batch, seed, chunk=32,
                 grow=0, **_):
        super().__init__(split, 'segments', block_size, micro_batch, seed)
        self.hops, self.chunk, self.grow = hops, chunk, grow

        # ids of a sentence's parts, and of the words of names; most tokenizers' words begin with
        # a blank, that of bytes is a token
        word, blank = ' [a-z]{3,}', ''
        if tokenizer.name == 'bytes':
            word, blank = '[A-Z]', ' '
        if tokenizer.name == 'word':
            word = '[a-z]{3,}'
        self.parts = [tokenizer.encode(text).tolist()
                      for text in (f'\nKey{blank}', f' opens{blank}', f',{blank}', '.\n')]
        self.words = [i for i, token in enumerate(tokenizer.tokens) if re.fullmatch(word, token)]

        # a sentence fits into a chunk; the shortest rows have chunks for a chain and its answer
        longest = sum(map(len, self.sentence(np.zeros((hops + 1, 4)))))
        T_least = 32 * hops * chunk if grow else 8 * chunk      # grow: the shortest have T / 8
        if self.T % chunk or self.T < T_least or chunk < longest or len(self.words) < 16:
            raise SystemExit(f'niah needs a --block-size of {T_least} or more that is a multiple '
                             f'of {chunk}, the tokens of a chunk; {longest} tokens or more in a '
                             'chunk; and a tokenizer with 16 words or letters for names')

    def rows(self, g):
        """B rows; with grow, the first micro-batches have more and shorter rows, as many tokens"""
        n = self.B
        if g < self.grow:
            n *= 2 ** (3 - 4 * g // self.grow)                  # 8 B, 4 B, 2 B or B
        return np.arange(g * n, (g + 1) * n)

    def take(self, rows, seed):
        """The Batch of these rows: B of T tokens, or more and shorter ones (see rows)"""
        N = self.T // self.chunk // max(1, len(rows) // self.B)
        arrays = np.stack([self.row(r, N) for r in rows], 1)
        tokens, targets = torch.from_numpy(arrays)              # (len(rows), N S) each
        doc = torch.tensor(rows)[:, None].expand_as(tokens)
        return Batch(tokens, targets, doc, seed)

    def row(self, r, N):
        """Row r, of N chunks: half with needles, then half with questions -> ids, targets (N S,)"""
        S, half, text = self.chunk, N // 2, self.split.tokens
        # the length makes val's draws differ from those of train
        rng = np.random.default_rng([self.seed, r, N, len(text)])

        # a text of the split, one token longer: the last one is a target only
        start = rng.integers(len(text) - N * S)
        ids = text[start:start + N * S + 1].astype(int)
        scored = rng.random(len(ids)) < 0.1                     # tokens that are predicted

        # needles, each in its chunk of the first half
        n_chains = rng.integers(1, half // self.hops + 1)
        chains = self.chains(rng, n_chains, ids)
        pairs = [pair for names in chains for pair in pairwise(names)]
        self.hide(rng, ids, zip(rng.permutation(half), pairs))

        # an answer begins a chunk; its question ends the chunk before it, with 2 hops the 2 before
        answers = rng.permutation(np.arange(half + self.hops, N, self.hops))
        for chunk, names in zip(answers, chains):
            question, opens, answer, end = self.sentence(names)
            start = chunk * S
            for hop in range(self.hops):
                stop = start - hop * S
                ids[stop - len(question):stop] = question
            sentence = opens + answer + end
            ids[start:start + len(sentence)] = sentence
            start += len(opens)
            scored[start:start + len(answer)] = True
        targets = np.where(scored, ids, -1)
        return ids[:-1], targets[1:]

    def chains(self, rng, n, ids):
        """n chains of names, as A opens B opens C: (n, hops + 1, 4) ids of words. All names differ,
        and none is in the text ids."""
        names, text = {}, ids.tobytes()                         # bytes are compared fast
        while len(names) < n * (self.hops + 1):
            name = rng.choice(self.words, 4, replace=False).tobytes()
            if name not in text:
                names[name] = True
        return np.frombuffer(b''.join(names), ids.dtype).reshape(n, -1, 4)

    def hide(self, rng, ids, needles):
        """Writes needles (chunk, names A and B) over the text ids, anywhere within their chunks."""
        for chunk, names in needles:
            needle = np.concatenate(self.sentence(names))
            start = chunk * self.chunk + rng.integers(self.chunk - len(needle) + 1)
            ids[start:start + len(needle)] = needle

    def sentence(self, names):
        """Ids of "Key A opens B, C.", lists: the question, " opens", the answer, the end"""
        key, opens, comma, end = self.parts
        answer = [*names[1]]
        for name in names[2:]:
            answer += [*comma, *name]
        return [*key, *names[0]], opens, answer, end
