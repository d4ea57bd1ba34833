"""
Text in, batches out: what the models are trained on, and how it is made from files.

    files -> documents -> token ids of train, val, test -> rows of T tokens -> micro-batches

The sections of this file follow the arrows backwards, from batches to files. For reading the
models the first three are enough; to see how a text is prepared, start with `load`.

    what a model gets           Split, Batch
    micro-batches               Batches; its subclasses Grid (with pack), Pairs and Needles
    a corpus                    Corpus: three splits and their tokenizer
    progress                    progress_bar, for all long work
    tokenizers                  Tokenizer: bytes, byte-pair encoding, GPT-2's, words
    documents in files          read_documents: .txt, .json, .jsonl, .tsv, .parquet
    the files of a text         find_text: what --data names; downloads
    train, val and test         plan_splits: which document is in which split
    preparation                 load: from files to a corpus on disk, on first use
    other kinds of text         random tokens; files that are not UTF-8; killed preparations
    the command                 python data.py

    $ python data.py my_texts/              prepares a corpus, prints what is in it and some rows

    corpus = load('my_texts/')
    batches = corpus.batches(corpus.train, 'segments', block_size=256, micro_batch=8, seed=0)
    batches[0].tokens                       # (8, 256)

A corpus is a folder:

    corpora/code-bpe4096-5f0c21ab/
        train.bin  val.bin  test.bin    token ids of all documents, one document after the other
        train.idx  val.idx  test.idx    where each document starts and the last one ends, int64
        meta.json                       the tokenizer, counts, hashes

Its name ends with a hash of its source files (names, paths, sizes, times), of VERSION and, with the
tokenizer of another text, of its tokens: if one of them changes, another folder is made. Every
document ends with <|endoftext|>, except with the tokenizer `word`. Counts and hashes are of the
text as it is read: without a byte order mark, and with LF for the line ends CR LF and CR.

A batch is a pure function of (split, arguments of Corpus.batches, number of the batch). So a run
resumes from its step alone.

Letters used in the shape comments
    B   rows of a micro-batch           T   tokens of a row
    N   chunks of a row of needles      S   tokens of a chunk
    g   number of a micro-batch         r   number of a row         n   any number
"""
import argparse, codecs, contextlib, functools, gzip, hashlib, heapq, io, json, math, os, platform
import re, shutil, sys, sysconfig, time
from array import array
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import regex                # tiktoken depends on it
import tiktoken
import torch

from bm25 import BM25, best_documents

try:
    import fcntl
except ImportError:         # on Windows
    fcntl = None

SPLITS = 'train', 'val', 'test'


# --------------------------------------------------------------------------------------------------
# what a model gets
class Split(NamedTuple):
    """The documents of train, val or test, one after the other. Here are two, 'abcdef.' and 'xyz.'
    (bytes are token ids, and . stands for <|endoftext|>):

    >>> split = Split('train', np.frombuffer(b'abcdef.xyz.', np.uint8), np.array([0, 7, 11]))
    >>> split.doc_of([0, 6, 7])
    array([0, 0, 1])"""
    name: str
    tokens: np.ndarray      # (n_tokens,) uint16 or uint32, a memmap
    offsets: np.ndarray     # (n_docs + 1,) int64: document i is tokens[offsets[i]:offsets[i + 1]]
    n_bytes: int = 0        # of the text, in UTF-8
    n_words: int = 0        # of the text, between blanks

    def doc_of(self, positions):
        """Positions of tokens -> numbers of their documents, of the same shape; -1 -> -1"""
        return np.searchsorted(self.offsets, positions, 'right') - 1


class Batch(NamedTuple):
    """What a model is trained on: B rows of T tokens, and for each token the next one.

    The same two documents in rows of T = 4 tokens; _ is padding, or no target:

    >>> split = Split('train', np.frombuffer(b'abcdef.xyz.', np.uint8), np.array([0, 7, 11]))
    >>> print_batch(Grid(split, 'segments', block_size=4, micro_batch=3, seed=0).in_order(0))
    tokens   a b c d | e f . x | y z _ _
    targets  b c d e | f . x y | z . _ _
    doc      0 0 0 0 | 0 0 0 1 | 1 1 _ _
    >>> print_batch(Grid(split, 'documents', block_size=4, micro_batch=3, seed=0).in_order(0))
    tokens   a b c d | x y z . | e f . _
    targets  b c d e | y z . _ | f . _ _
    doc      0 0 0 0 | 1 1 1 1 | 0 0 0 _

    `consecutive` and `packed` have the rows of `segments`, and choose which rows are in one batch.
    Pairs and Needles below have pictures, too."""
    tokens: torch.Tensor    # (B, T) int64   token ids; 0 at padding
    targets: torch.Tensor   # (B, T) int64   the token after each; -1 where none is predicted
    doc: torch.Tensor       # (B, T) int64   number of each token's document; -1 at padding
    seed: int               # of all random draws of the model; different for each batch


# --------------------------------------------------------------------------------------------------
# micro-batches
@functools.lru_cache(maxsize=4)                 # an epoch is shuffled once, not for each batch
def shuffled(n, *seed):
    """A random permutation of 0 to n - 1, (n,), read-only. seed: some ints"""
    order = np.random.default_rng(seed).permutation(n)
    order.setflags(write=False)
    return order


class Batches:
    """The micro-batches of a split: batches[g] is number g, a Batch. An epoch has len(batches).

    A subclass, Grid, Pairs or Needles, defines rows 0 to n_rows - 1, each of T tokens. Every epoch
    has all rows, B in each micro-batch, shuffled. Rows that have to be in the same micro-batch form
    a group: the list `order` of all rows is cut after each `group` of them, and the groups are
    shuffled. With the order 4 1 0 3 2 and group = 2, the groups are (4 1), (0 3) and (2).

    split, seed     the Split; a seed of the shuffling and of each Batch's seed
    T, B            tokens of a row, rows of a micro-batch
    n_rows          rows of an epoch
    order, group    (n_rows,) numbers of rows; rows of a group
    is_spread       should in_order take the rows of a micro-batch from all of the text?"""
    is_spread = False

    def __init__(self, split, block_size, micro_batch, seed):
        if split is None:                       # val; load refuses a corpus without train
            raise SystemExit('there is no text to validate on: --data needs more text, or a file '
                             'named val that is not empty')
        self.split, self.seed = split, seed
        self.T, self.B = block_size, micro_batch

    def set_rows(self, n_rows, group=1, order=None):
        """Sets the number of rows, their groups and their order."""
        self.n_rows, self.group = n_rows, group
        self.order = np.arange(n_rows) if order is None else order

    def __len__(self):
        return math.ceil(self.n_rows / self.B)

    def __getitem__(self, g):
        """Micro-batch g, a Batch; from len(batches) on, of the next epoch"""
        sha = hashlib.sha256(f'{self.seed} {g}'.encode()).digest()
        seed = int.from_bytes(sha[:8], 'little') >> 1           # 63 bits, an int64
        return self.take(self.rows(g), seed)

    def in_order(self, i):
        """Micro-batch i of an epoch in the order of the text, a Batch with the seed i: for
        validation. If is_spread, its rows are len(batches) apart, so that a few of these
        micro-batches are a sample of many documents."""
        rows = range(self.n_rows)[i * self.B:(i + 1) * self.B]
        if self.is_spread:
            rows = range(self.n_rows)[i::len(self)]
        return self.take(rows, seed=i)

    def rows(self, g):
        """Numbers of the rows of micro-batch g: (B,); fewer at the end of an epoch, and where the
        incomplete group is"""
        epoch, i = divmod(g, len(self))
        groups = shuffled(math.ceil(self.n_rows / self.group), self.seed, epoch)
        n = self.B // self.group                                # groups of a micro-batch
        groups = groups[i * n:(i + 1) * n]
        if self.group > 1:
            # The last group can be incomplete. It has to be the last of its micro-batch, so that
            # group i of the micro-batch begins at row i * self.group
            groups = np.sort(groups)
        starts = self.group * groups
        return np.concatenate([self.order[start:start + self.group] for start in starts])

    def take(self, rows, seed):
        """The Batch of these rows, numbers (n,); with fewer than B, the other rows are padding"""
        split = self.split
        position, has_target = self.positions(np.array(rows))   # (n, T) both
        missing = (0, self.B - len(rows)), (0, 0)
        position = np.pad(position, missing, constant_values=-1)                # (B, T)
        has_target = np.pad(has_target, missing, constant_values=False)         # (B, T)

        # padding, at position -1, is read at position 0 and then overwritten
        padding = position < 0
        tokens = split.tokens[position.clip(0)].astype(np.int64)
        tokens[padding] = 0
        targets = np.full_like(tokens, -1)
        targets[has_target] = split.tokens[position[has_target] + 1]
        doc = split.doc_of(position)                            # -1 at padding
        tokens, targets, doc = map(torch.from_numpy, (tokens, targets, doc))
        return Batch(tokens, targets, doc, seed)

    def positions(self, rows):
        """Rows, numbers (n,) -> two arrays (n, T): the position of each token in the split, -1 at
        padding; and whether it has a target, the token after it"""
        raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# micro-batches: segments, and documents
class Grid(Batches):
    """Rows that divide a split: each token is in one row, except that the last one of the split is
    a target only (with `documents` it is in one, too). kind:

    segments     segments of T tokens, shuffled
    consecutive  the same, but `consecutive` segments (0: all of a micro-batch) follow each other
    packed       the same, but if bm25 is True, the segments of a micro-batch are similar (see
                 pack); if other_documents, they are similar to segments of other documents
    documents    T tokens of one document; the ends of documents, shorter than T, are joined

    An epoch predicts each token of the split except the first; with `documents`, except the first
    of each document. SystemExit if the split has no more than T tokens"""
    def __init__(self, split, kind, block_size, micro_batch, seed, other_documents=True,
                 consecutive=0, bm25=True):
        super().__init__(split, block_size, micro_batch, seed)
        check_length(split, block_size)
        self.kind = kind

        # all positions that are in rows, in one sequence; row r is its part r T to r T + T - 1
        if kind == 'documents':
            self.stream = Stream(*whole_rows_then_ends(split.offsets, block_size))
            self.is_spread = True
        else:
            last = len(split.tokens) - 1                        # the last token is a target only
            self.stream = Stream(np.array([0]), np.array([last]))
        n_rows = math.ceil(len(self.stream) / block_size)

        # groups of rows that stay together
        group, order = 1, None
        if kind == 'consecutive':
            group = group_size(consecutive, micro_batch)
        if kind == 'packed' and bm25:
            group, order = micro_batch, self.packed_order(other_documents)
        self.set_rows(n_rows, group, order)

    def positions(self, rows):
        index = rows[:, None] * self.T + np.arange(self.T)      # (n, T) in the stream
        position = self.stream[index]                           # (n, T) in the split
        has_target = position >= 0
        if self.kind == 'documents':
            # the last token of a document has no target
            doc_of = self.split.doc_of
            has_target &= doc_of(position) == doc_of(position + 1)
        return position, has_target

    def packed_order(self, other_documents):
        """The order of segments in which similar ones follow each other; if other_documents,
        segments of one document do not count as similar"""
        tokens, T = self.split.tokens[:-1], self.T
        starts = np.arange(0, len(tokens), T)
        segments = np.split(tokens, starts[1:])
        first_doc = last_doc = np.arange(len(segments))         # as if each were a document
        if other_documents:
            first_doc = self.split.doc_of(starts)
            # the last segment can be shorter. Its end is then beyond the text and has the number
            # after that of the last document: no segment begins there, so nothing changes
            last_doc = self.split.doc_of(starts + T - 1)
        return pack(similar_segments(segments, first_doc, last_doc), self.seed)


class Stream:
    """Ranges of positions, one after the other, as one sequence. start, stop: (n,) of each range

    >>> stream = Stream(np.array([0, 10]), np.array([3, 12]))       # 0, 1, 2, 10, 11
    >>> len(stream), stream[np.array([2, 3, 5])].tolist()
    (5, [2, 10, -1])"""
    def __init__(self, start, stop):
        self.end = np.cumsum(stop - start)      # (n,) index after each range's last position
        self.shift = stop - self.end            # (n,) position minus index, in each range

    def __len__(self):
        return int(self.end[-1])

    def __getitem__(self, index):
        """Indices, an array of any shape -> positions, of this shape; -1 beyond the end"""
        inside = index < len(self)
        position = np.full_like(index, -1)
        i = index[inside]                                       # (n,)
        number = np.searchsorted(self.end, i, 'right')          # (n,) the range of each
        position[inside] = i + self.shift[number]
        return position


def whole_rows_then_ends(offsets, T):
    """Ranges for rows of documents: first all whole rows of each document, then the rest of each.
    Only the rows of these rests have tokens of several documents. -> start, stop

    >>> start, stop = whole_rows_then_ends(np.array([0, 10, 16]), T=4)      # of 10 and 6 tokens
    >>> [*zip(start.tolist(), stop.tolist())]
    [(0, 8), (10, 14), (8, 10), (14, 16)]"""
    start, stop = offsets[:-1], offsets[1:]
    cut = stop - (stop - start) % T             # whole rows end here
    return np.append(start, cut), np.append(cut, stop)


def group_size(consecutive, micro_batch):
    """How many consecutive segments are a group. SystemExit if groups do not fill a micro-batch"""
    size = consecutive or micro_batch
    if micro_batch % size:
        raise SystemExit(f'--micro-batch {micro_batch} is not a multiple of --n-consecutive {size}')
    return size


def check_length(split, block_size, multiple_of=1, least=1):
    """SystemExit if a split is too short for a row and the token after it. The message names the
    largest block_size that it has tokens for, a multiple of multiple_of, unless that is below
    `least`."""
    n = len(split.tokens)
    if n > block_size:
        return
    largest = (n - 1) // multiple_of * multiple_of
    hint = f', or use --block-size {largest}' if largest >= least else ''
    raise SystemExit(f'{split.name} has {n:,} tokens, too few for a sequence of --block-size '
                     f'{block_size}: add text, or files named {split.name}{hint}')


# --------------------------------------------------------------------------------------------------
# micro-batches: similar segments (TRIME, Algorithm 1)
N_SIMILAR = 20          # k of Algorithm 1


def pack(similar, seed):
    """An order of n segments in which similar ones follow each other (TRIME, Algorithm 1): after a
    segment comes the most similar one that is not yet in the order, or, if there is none, a random
    one.

    similar  n lists, of each segment: the numbers of similar segments, the most similar first
    returns  (n,) numbers of the segments

    >>> pack([[2], [0], [3, 1], [2]], seed=0).tolist()      # 2, 3; then, at random, 0; and 1
    [2, 3, 0, 1]"""
    order = {}                                  # its keys are a set that keeps its order
    for segment in shuffled(len(similar), seed).tolist():
        # a path from a random segment, along the most similar ones
        while segment not in order:
            order[segment] = True
            segment = next((i for i in similar[segment] if i not in order), segment)
    return np.fromiter(order, int)


def similar_segments(segments, first_doc, last_doc):
    """SimSeg of Algorithm 1: for each of n segments the N_SIMILAR others that BM25 scores highest,
    without those that share a document with it (§1: "segments from other documents"; Algorithm 1
    and the official code have no such test). SystemExit if each shares a document with all others

    segments             n arrays of token ids
    first_doc, last_doc  (n,) the documents in which each segment begins and ends; they ascend
    returns              n lists of up to N_SIMILAR numbers of segments, the most similar first"""
    # Segment i shares a document with segments low[i] to high[i] - 1, and i is one of them: those
    # that do not end before the first document of i, and do not begin after its last one.
    n = len(segments)
    low = np.searchsorted(last_doc, first_doc)
    high = np.searchsorted(first_doc, last_doc, 'right')
    if n > 1 and (high - low).min() == n:
        raise SystemExit('each segment shares a document with all others: use --no-same-document '
                         'or, if the text has several documents, a smaller --block-size')

    # each segment is a query; the index takes a second for 4M tokens, the queries minutes
    index = BM25(segments)
    similar = []
    all_scores = progress_bar(index.scores(segments), 'packing by BM25', n)     # n arrays (n,)
    for i, scores in enumerate(all_scores):
        scores[low[i]:high[i]] = 0              # best_documents leaves out scores of 0
        similar.append(best_documents(scores, N_SIMILAR).tolist())
    return similar


# --------------------------------------------------------------------------------------------------
# micro-batches: pairs
class Pairs(Batches):
    """A row is the first T tokens of a document "source TAB target <|endoftext|>": a model reads
    the source, and predicts what follows TAB. Here > stands for TAB:

    >>> split = Split('train', np.frombuffer(b'ab>cd.e>f.', np.uint8), np.array([0, 6, 10]))
    >>> print_batch(Pairs(split, ord('>'), 'documents', 6, 2, seed=0).in_order(0))
    tokens   a b > c d . | e > f . _ _
    targets  _ _ c d . _ | _ f . _ _ _
    doc      0 0 0 0 0 0 | 1 1 1 1 _ _

    A pair is left out if its source and TAB have more than T tokens; n_left_out counts these pairs.
    Rows are shuffled; if kind is packed and bm25 is True, a micro-batch has pairs of similar
    targets (TRIME, App. C). tab: the id of TAB. SystemExit if all pairs are left out"""
    is_spread = True

    def __init__(self, split, tab, kind, block_size, micro_batch, seed, bm25=True):
        super().__init__(split, block_size, micro_batch, seed)
        tabs = np.flatnonzero(split.tokens == tab)              # positions, one in each document
        start, stop = split.offsets[:-1], split.offsets[1:]

        # the pairs that have a row
        n_source = tabs - start + 1                             # tokens of source and TAB
        has_row = n_source <= block_size
        n_rows = int(has_row.sum())
        self.n_left_out = len(tabs) - n_rows
        if n_rows == 0:
            raise SystemExit(f'no pair of {split.name} has a target within --block-size '
                             f'{block_size}: use {n_source.min()} or more')
        self.start, self.tabs, self.stop = (x[has_row] for x in (start, tabs, stop))    # (n_rows,)

        # the order of rows
        self.set_rows(n_rows)
        if kind == 'packed' and bm25:
            bounds = zip(self.tabs + 1, self.stop)
            targets = [split.tokens[first:last] for first, last in bounds]
            doc = np.arange(n_rows)
            self.set_rows(n_rows, micro_batch, pack(similar_segments(targets, doc, doc), seed))

    def positions(self, rows):
        start, tab, stop = (x[rows, None] for x in (self.start, self.tabs, self.stop))  # (n, 1)
        position = start + np.arange(self.T)                    # (n, T)
        has_target = (position >= tab) & (position + 1 < stop)
        position[position >= stop] = -1
        return position, has_target


# --------------------------------------------------------------------------------------------------
# micro-batches: needles in a haystack
NAME_WORDS = 4          # words of a name
LEAST_WORDS = 16        # words of the tokenizer: they make 16 * 15 * 14 * 13 = 43,680 names
PREDICTED = 0.1         # share of the other tokens that is predicted; with all of them, answers
                        # would be a small part of the loss


class Sentence(NamedTuple):
    """The parts of the sentence "\\nKey A opens B.\\n", lists of token ids"""
    question: list          # "\nKey A"
    opens: list             # " opens"
    answer: list            # " B", or " B, C"
    end: list               # ".\n"


class Needles(Batches):
    r"""Needles are sentences "Key A opens B." in a text; a question "Key A" has its answer after it
    (RULER, Hsieh et al. 2024; DRT, A.4). A and B are names of four random words.

    A row is a part of the text in chunks of S tokens: needles in its first half, questions in its
    second half. A question ends a chunk, which retrieves for the next one, where the answer is:

        chunk 1                                   chunk 6               chunk 7
        ... the old \nKey A opens B.\n house ...  ... she wrote \nKey A |  opens B.\n while ...

    With 2 hops, A opens B, B opens C, and the answer is "B, C". The question then ends chunk 5,
    too: what chunk 5 retrieves can help chunk 6 to retrieve. The targets are the answers, and
    random tokens, PREDICTED of all.

    chunk  S, tokens of a chunk
    grow   a number of micro-batches: rows have T / 8 tokens in the first quarter of them, then
           T / 4, T / 2 and T, each rounded down to whole chunks
    SystemExit if the text, T or chunk is too short, or if the tokenizer has too few words"""
    def __init__(self, split, tokenizer, hops, block_size, micro_batch, seed, chunk=32, grow=0):
        super().__init__(split, block_size, micro_batch, seed)
        self.hops, self.chunk, self.grow = hops, chunk, grow
        # there are any number of random rows; an epoch, for validation, has as many as a Grid
        self.set_rows(math.ceil((len(split.tokens) - 1) / block_size))

        # the blank before a word is a part of its token, as in ' the'; `bytes` has no words, so
        # names consist of capital letters; `word` has no blanks
        blank, word = '', ' [a-z]{3,}'
        if tokenizer.name == 'bytes':
            blank, word = ' ', '[A-Z]'
        if tokenizer.name == 'word':
            word = '[a-z]{3,}'

        # the ids of a sentence without its names, and of the words of names
        texts = f'\nKey{blank}', f' opens{blank}', f',{blank}', '.\n'
        self.parts = [tokenizer.encode(text).tolist() for text in texts]
        self.words = [i for i, token in enumerate(tokenizer.tokens) if re.fullmatch(word, token)]
        self.check()

    def check(self):
        """SystemExit if a chunk is too short for a sentence, or a row for questions and answers."""
        T, S = self.T, self.chunk
        # a row has 8 chunks or more; with grow, the shortest rows, of T / 8 tokens, have 4 for each
        # hop
        least_T = 8 * S
        if self.grow:
            least_T = 32 * self.hops * S
        check_length(self.split, T, multiple_of=S, least=least_T)
        if len(self.words) < LEAST_WORDS:
            raise SystemExit(f'niah needs a tokenizer with {LEAST_WORDS} words for names, this one '
                             f'has {len(self.words)}; bytes has enough')

        longest = sum(map(len, self.sentence(np.zeros((self.hops + 1, NAME_WORDS)))))
        if S < longest:
            raise SystemExit(f'niah needs chunks of {longest} tokens or more, for a sentence; '
                             f'these have {S}')
        if T % S or T < least_T:
            fits = max(least_T, T // S * S)
            raise SystemExit(f'niah: --block-size {T} has to be a multiple of {S}, the tokens of a '
                             f'chunk, and at least {least_T}: use {fits}')

    def rows(self, g):
        """B rows; with grow, the first micro-batches have more and shorter rows, with about as many
        tokens"""
        n = self.B
        if g < self.grow:
            n *= 2 ** (3 - 4 * g // self.grow)                  # 8 B, 4 B, 2 B or B
        return np.arange(g * n, (g + 1) * n)

    def take(self, rows, seed):
        """The Batch of these rows, numbers (n,): up to B rows of T tokens, or 2 B, 4 B or 8 B
        shorter rows of whole chunks, with B T tokens in all at most"""
        times = max(1, len(rows) // self.B)                     # 1, 2, 4 or 8
        N = self.T // (times * self.chunk)
        ids, targets = zip(*(self.row(r, N) for r in rows))
        tokens = torch.from_numpy(np.stack(ids))                # (n, N S)
        targets = torch.from_numpy(np.stack(targets))           # (n, N S)
        doc = torch.tensor(rows)[:, None].expand_as(tokens)     # (n, N S) each row is a document
        return Batch(tokens, targets, doc, seed)

    def row(self, r, N):
        """Row r, of N chunks: half with needles, then half with questions -> ids, targets (N S,)"""
        S, half, text = self.chunk, N // 2, self.split.tokens
        # train and val have different numbers of tokens, so their draws differ
        rng = np.random.default_rng([self.seed, r, N, len(text)])

        # a part of the text, one token longer: the last one is a target only
        start = rng.integers(len(text) - N * S)
        ids = text[start:start + N * S + 1].astype(int)         # (N S + 1,)
        predicted = rng.random(len(ids)) < PREDICTED            # (N S + 1,)

        # needles, each in its chunk of the first half
        n_chains = rng.integers(1, half // self.hops + 1)
        chains = self.chains(rng, n_chains, ids)
        needles = [pair for names in chains for pair in pairwise(names)]
        self.hide(rng, ids, zip(rng.permutation(half), needles))

        # answers, each after the " opens" that begins a chunk of the second half, `hops` chunks
        # apart: as many chunks before an answer end with its question. The last chains may find no
        # place: these needles are never asked for
        answers = rng.permutation(np.arange(half + self.hops, N, self.hops))
        for chunk, names in zip(answers, chains):
            self.ask(ids, predicted, chunk, names)
        targets = np.where(predicted, ids, -1)
        return ids[:-1], targets[1:]

    def chains(self, rng, n, ids):
        """n chains of names, as A opens B opens C: (n, hops + 1, 4) ids of words. All names differ,
        and none is in the text ids."""
        # as bytes, names can be searched for in a text, and be keys of a dict
        names, text = {}, ids.tobytes()
        while len(names) < n * (self.hops + 1):
            name = rng.choice(self.words, NAME_WORDS, replace=False).tobytes()
            if name not in text:
                names[name] = True
        return np.frombuffer(b''.join(names), ids.dtype).reshape(n, -1, NAME_WORDS)

    def hide(self, rng, ids, needles):
        """Writes needles (chunk, names A and B) over the text ids, anywhere within their chunks."""
        for chunk, names in needles:
            needle = np.concatenate(self.sentence(names))
            start = chunk * self.chunk + rng.integers(self.chunk - len(needle) + 1)
            ids[start:start + len(needle)] = needle

    def ask(self, ids, predicted, chunk, names):
        """Writes a question and its answer over the text ids. " opens" begins the chunk, the answer
        follows and is predicted; the question ends the chunk before it, with 2 hops each of the 2
        before it."""
        S, sentence = self.chunk, self.sentence(names)
        start = chunk * S

        # the question, once for each hop
        for hop in range(self.hops):
            stop = start - hop * S
            ids[stop - len(sentence.question):stop] = sentence.question

        # the rest of the sentence, of which the answer is predicted
        after = sentence.opens + sentence.answer + sentence.end
        ids[start:start + len(after)] = after
        start += len(sentence.opens)
        predicted[start:start + len(sentence.answer)] = True

    def sentence(self, names):
        """The Sentence of a chain of names, (hops + 1, 4) or, of a needle, (2, 4)"""
        key, opens, comma, end = self.parts
        answer = [*names[1]]
        for name in names[2:]:
            answer += [*comma, *name]
        return Sentence([*key, *names[0]], opens, answer, end)


# --------------------------------------------------------------------------------------------------
# a corpus
ENOUGH = 1000           # tokens of a text on which a few constants can be tuned


class Corpus:
    """A folder that `prepare` made

    train, val, test    Splits, or None
    name                what --data names, without its folder
    tokenizer           the Tokenizer of its ids
    fingerprint         hashes of the text and of the tokenizer: it differs if either has changed
    about               {title: line} for the screen
    hops                1 or 2: batches are of Needles; else 0
    tab                 the id of TAB if documents are pairs, "source TAB target", and batches are
                        of Pairs; else -1
    quiet               print nothing about batches
    Raises an exception, of any type, if the folder is damaged."""
    def __init__(self, folder, name, hops=0, quiet=False):
        self.folder, self.name, self.hops, self.quiet = folder, name, hops, quiet
        meta = json.loads((folder / 'meta.json').read_text())
        self.tokenizer = Tokenizer(**meta['tokenizer'])
        self.about = meta['about']
        self.tab = -1
        if meta['pairs'] and not hops:
            self.tab = self.tokenizer.ids['\t']

        # the files of each split, and whether they fit together
        self.train = self.val = self.test = None
        hashes = []
        for split, counts in meta['splits'].items():
            tokens = np.memmap(folder / f'{split}.bin', self.tokenizer.dtype, 'r')
            offsets = np.fromfile(folder / f'{split}.idx', np.int64)
            n_tokens = len(tokens), offsets[-1], counts['tokens']
            if len({*n_tokens}) > 1:
                raise ValueError(f'{split}: {n_tokens} tokens')
            if offsets[0] != 0 or np.diff(offsets).min() <= 0:
                raise ValueError(f'{split}.idx: {offsets[:99]}')
            largest = tokens[:2 ** 26].max()        # takes time: of the first 67M tokens only
            n_vocab = self.tokenizer.n_vocab
            if largest >= n_vocab:
                raise ValueError(f'{split}.bin: id {largest} of {n_vocab}')
            setattr(self, split, Split(split, tokens, offsets, counts['bytes'], counts['words']))
            hashes.append(counts['sha256'])
        self.fingerprint = f'{digest(hashes)[:8]}-{digest(meta["tokenizer"])[:8]}'

    def batches(self, split, kind, block_size, micro_batch, seed, chunk=32, grow=0,
                other_documents=True, consecutive=0, bm25=True):
        """The Batches of a split: Needles, if the corpus has hops; Pairs, if it has a tab; or a
        Grid. chunk and grow are arguments of Needles, other_documents and consecutive of Grid, bm25
        of Grid and Pairs."""
        if self.hops:
            return Needles(split, self.tokenizer, self.hops, block_size, micro_batch, seed, chunk,
                           grow)
        if grow:
            raise SystemExit('--grow-context is for --data niah or niah2')
        if self.tab < 0:
            return Grid(split, kind, block_size, micro_batch, seed, other_documents, consecutive,
                        bm25)

        pairs = Pairs(split, self.tab, kind, block_size, micro_batch, seed, bm25)
        n = pairs.n_left_out
        if n and not self.quiet:
            print(f'{split.name}: {n:,} of {n + pairs.n_rows:,} pairs are left out: their source '
                  f'and TAB have more than --block-size {block_size} tokens')
        return pairs

    def tuning_split(self, scored):
        """The split on which constants are tuned, before the split named `scored` is scored with
        them: val or test, not the scored one, if it has ENOUGH tokens. If there is none, it is the
        scored one, with a warning."""
        for split in (self.val, self.test):
            if split and split.name != scored and len(split.tokens) >= ENOUGH:
                return split
        print(f'warning: constants are tuned on {scored}, the text that is scored: no other split '
              f'but train has {ENOUGH:,} tokens')
        return getattr(self, scored)


def digest(*values):
    """A hash of values that JSON can hold, 64 hexadecimal digits"""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


# --------------------------------------------------------------------------------------------------
# progress
def progress_bar(items, desc, total=None, quiet=False, size=lambda item: 1):
    """Yields the items. Between items, every ten seconds, it prints to stderr how much is done, and
    the time left at this speed: `desc: 1,234 of 5,678, 2.1 min left`.

    size(item)  the item's part of the total, about proportional to its time
    total       None: the sum over the items, which then cannot be an iterator"""
    if total is None:
        total = sum(map(size, items))
    start = printed = time.monotonic()
    done = 0
    for item in items:
        clock = time.monotonic()
        if done and not quiet and clock - printed > 10:
            minutes = (clock - start) / 60 / done * (total - done)
            print(f'{desc}: {done:,.0f} of {total:,.0f}, {minutes:.1f} min left', file=sys.stderr)
            printed = clock
        yield item
        done += size(item)


# --------------------------------------------------------------------------------------------------
# tokenizers
# A token of bytes is kept as a str with one character per byte (Latin-1): such strings can be
# joined, counted and stored as JSON.
TOKENIZERS = 'bytes', 'bpe', 'gpt2', 'word'
BYTES = tuple(map(chr, range(256)))
SMALLEST_BPE = 257              # ids: the 256 bytes and <|endoftext|>
FIXED_SIZES = dict(bytes=257, gpt2=50_257)      # {tokenizer: ids}, whatever --vocab-size is
LARGEST_VOCAB = 2 ** 20         # learn_bpe writes token i as chr(i), which ends at 1,114,111
LEARN_FROM = 2 ** 26            # characters of a text that bpe learns from, counted in a minute

# Regular expressions of the words within which bpe joins tokens. A word is the first of these that
# is possible: the end of a contraction ('s, 'll); letters; numbers; punctuation, with one blank
# before them or none; blanks up to the last one before a word; other blanks.
# "it's 12 cats!" -> it, 's, _12, _cats, !  (_ is a blank)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# the same, except that marks count as letters, because Hindi and Thai write most vowels as marks;
# so do the two joiners within words of Persian and Hindi, which have no width
BPE_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}\u200c\u200d]+| ?\p{N}+"
               r"| ?[^\s\p{L}\p{M}\u200c\u200d\p{N}]+|\s+(?!\S)|\s+")


class Tokenizer:
    """bytes   the 256 bytes and <|endoftext|>
    bpe     the 256 bytes, tokens learned from the corpus, and <|endoftext|>
    gpt2    GPT-2's 50,257 tokens, from files that tiktoken downloads; TIKTOKEN_CACHE_DIR keeps them
    word    WikiText's: words between blanks, <eos> for each line end, <unk>; most frequent first

    tokens   str by id; byte strings, except of `word`
    ids      {token: id}
    eot      the id of <|endoftext|>, the last one, or None
    n_vocab  the number of ids
    dtype    of ids on disk
    Raises ValueError for another name, and if tokens lacks one that every text may need.

    >>> tokenizer = Tokenizer('bpe', [*BYTES, 'th', 'the'])
    >>> tokenizer.encode('the cat').tolist()
    [257, 32, 99, 97, 116]
    >>> tokenizer.decode([257, 32, 258])
    'the <|endoftext|>'"""
    def __init__(self, name, tokens=BYTES, pattern=GPT2_PATTERN):
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
        self.dtype = np.uint16 if self.n_vocab <= 2 ** 16 else np.uint32

    @classmethod
    def train(cls, name, texts=(), vocab_size=4096, pattern=BPE_PATTERN):
        """A tokenizer made from texts, an iterable of str; bytes and gpt2 need none.
        vocab_size, pattern: of bpe"""
        if name == 'bytes':
            return cls(name)
        if name == 'gpt2':
            return cls(name, *gpt2_tokens())
        if name == 'word':
            return cls(name, word_tokens(texts))
        return cls(name, bpe_tokens(texts, vocab_size, pattern), pattern)

    def encode(self, text):
        """str -> (n,) uint32. <|endoftext|> within the text is ordinary text."""
        if self.name == 'word':
            unknown = self.ids['<unk>']
            ids = (self.ids.get(word, unknown) for word in words_of(text))
            return np.fromiter(ids, np.uint32)
        text = text.encode('utf-8', 'replace').decode()         # '?' for a lone surrogate
        parts = map(self.bpe.encode_to_numpy, short_words(text, self.pattern))
        return np.concatenate([*parts])

    def decode(self, ids):
        """Ids (n,) -> str; U+FFFD for what is not UTF-8"""
        if hasattr(ids, 'tolist'):
            ids = ids.tolist()          # the elements of an array are slow one by one
        tokens = map(self.tokens.__getitem__, ids)
        if self.name == 'word':
            return ' '.join(tokens).replace('<eos>', '\n')
        return ''.join(tokens).encode('latin-1').decode(errors='replace')

    def to_dict(self):
        """The arguments of Tokenizer, for JSON and checkpoints"""
        return dict(name=self.name, tokens=self.tokens[:self.eot], pattern=self.pattern)


def unix(text):
    """A text without byte order mark, with LF for the line ends CR LF and CR"""
    return text.removeprefix('\ufeff').replace('\r\n', '\n').replace('\r', '\n')


def words_of(text):
    """The words that WikiText's papers count: between blanks, and <eos> for each line end.

    >>> words_of('a bc\\nd')
    ['a', 'bc', '<eos>', 'd']"""
    return unix(text).replace('\n', ' <eos> ').split()


def word_tokens(texts):
    """All words of texts, an iterable of str, and <unk> and <eos>; the most frequent first"""
    counts = Counter(chain.from_iterable(map(words_of, texts)))
    words = counts.keys() | {'<unk>', '<eos>'}
    return sorted(words, key=lambda word: (-counts[word], word))


def gpt2_tokens():
    """GPT-2's tokens, str by id, and the pattern of its words"""
    try:
        gpt2 = tiktoken.get_encoding('gpt2')
    except Exception:                                   # of requests, of tiktoken, OSError
        raise SystemExit('gpt2 cannot be downloaded. Set TIKTOKEN_CACHE_DIR to a folder with its '
                         'vocab.bpe, renamed 6d1cbeee0f20b3d9449abfede4726ed8212e3aee, and its '
                         'encoder.json, renamed 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6')
    tokens = map(gpt2.decode_single_token_bytes, range(gpt2.eot_token))
    return [token.decode('latin-1') for token in tokens], gpt2._pat_str


# --------------------------------------------------------------------------------------------------
# byte-pair encoding
def bpe_tokens(texts, vocab_size, pattern):
    """The 256 bytes and tokens learned from the first LEARN_FROM characters of texts, an iterable
    of str; with <|endoftext|> they are vocab_size, or fewer if no pair of tokens is left."""
    check_vocab_size(vocab_size)
    counts = Counter()                                  # {word: its frequency}
    n_characters = 0
    for text in texts:
        for piece in short_words(text, pattern):
            counts.update(regex.findall(pattern, piece))
        n_characters += len(text)
        if n_characters > LEARN_FROM:
            break
    return learn_bpe(pieces_to_learn(counts), vocab_size - SMALLEST_BPE)


def check_vocab_size(vocab_size, smallest=SMALLEST_BPE, why='the 256 bytes and <|endoftext|>'):
    """SystemExit if bpe, or random tokens, cannot have so many ids"""
    if vocab_size < smallest:
        raise SystemExit(f'--vocab-size {vocab_size:,} is too small: at least {smallest} ({why})')
    if vocab_size > LARGEST_VOCAB:
        raise SystemExit(f'--vocab-size {vocab_size:,} is too large: at most {LARGEST_VOCAB:,}')


def learn_bpe(counts, n_merges):
    """Byte-pair encoding (Sennrich et al. 2016): n_merges times, the most frequent pair of adjacent
    tokens becomes a token; of equally frequent ones that of smaller ids.

    counts: {word, a byte string: its frequency} -> tokens, str by id

    >>> learn_bpe({'low': 5, 'lower': 2, 'slow': 1}, 3)[256:]       # lo and ow are equally frequent
    ['lo', 'low', 'er']"""
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

        # only words that have or had the pair are counted again; without it, nothing changes
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


# Long words. Texts without blanks have words of any length, for which bpe would take too long.
LONG_WORD = 256         # characters: longer words are cut after each 256
LEARN_WORD = 128        # bytes: bpe learns from longer words in pieces of LEARN_PIECE bytes,
LEARN_PIECE = 32        # because nearly every merge would change a long word
LEARN_WORDS = 2 ** 18   # words and pieces that bpe learns from, the most frequent ones


def pieces_to_learn(counts):
    """{word: its frequency} -> the same for learn_bpe: byte strings, long ones in pieces, and only
    the most frequent LEARN_WORDS or a few more"""
    frequencies = Counter()
    for word, n in counts.most_common():
        word = byte_string(word)
        size = LEARN_PIECE if len(word) > LEARN_WORD else LEARN_WORD
        for i in range(0, len(word), size):
            frequencies[word[i:i + size]] += n
        if len(frequencies) > LEARN_WORDS:
            break
    return frequencies


def byte_string(text):
    """The UTF-8 bytes of a text as a str, one character per byte: 'é' -> 'Ã©'"""
    return text.encode().decode('latin-1')


def short_words(text, pattern):
    """A text in pieces that have no long word of a pattern. tiktoken fails at 1,000,000 blanks in a
    row, and what bpe learns should not depend on the length of lines in a text without blanks."""
    # a quick search: few texts have 256 characters in a row that are no blanks, or that are blanks
    # (for re, unlike regex, \x1c to \x1f are blanks)
    if re.search(rf'[\S\x1c-\x1f]{{{LONG_WORD}}}|\s{{{LONG_WORD}}}', text):
        return long_word(pattern).findall(text)
    return [text]


@functools.lru_cache
def long_word(pattern):
    """A compiled regular expression that cuts a text after each LONG_WORD characters of a long word
    of a pattern. The last of many blanks is not cut off, because it belongs to the next word.

    >>> [len(part) for part in long_word(GPT2_PATTERN).findall('It is ' + 'x' * 600)]
    [262, 256, 88]"""
    # what words consist of: letters, numbers, other characters (punctuation), blanks
    letter, other = r'\p{L}', r'[^\s\p{L}\p{N}]'
    if r'\p{M}' in pattern:                             # BPE_PATTERN: marks and joiners are letters
        letter, other = r'[\p{L}\p{M}\u200c\u200d]', r'[^\s\p{L}\p{M}\u200c\u200d\p{N}]'
    n = f'{{{LONG_WORD}}}'
    long = rf'{letter}{n}|\p{{N}}{n}|{other}{n}|\s{n}(?=\s)'
    # a part is the shortest text that ends with `long`, or else all of the rest; (?s): . is any
    # character, a line feed too
    return regex.compile(rf'(?s).*?(?:{long})|.+')


# --------------------------------------------------------------------------------------------------
# documents in files
KINDS = {'json': 'json', 'jsonl': 'json', 'jsonlines': 'json', 'ndjson': 'json', 'tsv': 'pairs',
         'parquet': 'parquet'}                  # {end of a file's name: kind}; of others: text
UNPACKED = {'txt', 'md', 'tex', 'tsv', 'json', 'jsonl', 'jsonlines', 'ndjson'}  # if .gz follows


class Document(NamedTuple):
    """A line or row of a file, which is one document; or all of a file of text, which
    split_documents cuts into one or more"""
    text: str
    n_read: float           # about so many bytes of the file were read for it


def read_documents(path):
    """Yields the Documents of a file. SystemExit if it cannot be read; raises UnicodeDecodeError if
    it is not UTF-8"""
    readers = dict(text=text_documents, json=json_documents, pairs=pair_documents,
                   parquet=parquet_documents)
    try:
        yield from readers[kind_of(path)](path)
    except (UnicodeDecodeError, MemoryError):
        raise
    except Exception as error:                          # OSError; of gzip, zlib and pyarrow
        raise SystemExit(f'{str(path)!a} cannot be read: {error!r:.200}')


def kind_of(path):
    """How documents are stored in a file: one in each line or row (json, pairs, parquet), or all of
    the file is a text, which is one document or has articles of WikiText.

    >>> [kind_of(Path(name)) for name in ('a.JSONL', 'a.json.gz', 'a.tsv', 'a.py')]
    ['json', 'json', 'pairs', 'text']"""
    return KINDS.get(ending(path), 'text')


def ending(path):
    """The end of a file's name: 'jsonl' for a.jsonl, A.JSONL and a.jsonl.gz"""
    return path.name.lower().removesuffix('.gz').rpartition('.')[2]


def text_documents(path):
    """Yields all of a file as one Document."""
    yield Document(read_text(path), path.stat().st_size)


def read_text(path):
    """The text of a file, as `opened` changes it"""
    with opened(path) as (file, _):
        return file.read()


def lines_of(path):
    """Yields the lines of a text file, as Documents."""
    position = 0
    with opened(path) as (file, raw):
        for line in file:
            yield Document(line, raw.tell() - position)
            position = raw.tell()


@contextlib.contextmanager
def opened(path):
    """Opens a text file -> the text file, and the binary file from which it is read. Line ends
    become LF, a byte order mark is left out. Raises UnicodeDecodeError, here or while the file is
    read, if it is not UTF-8, or if many of its first bytes are zero, as in UTF-16."""
    with path.open('rb') as raw:
        file = unpacked(path, raw)
        head = file.peek(1000)[:1000]
        if head.count(0) > len(head) / 4:       # UTF-16 has a zero in each letter of a to z
            i = head.index(0)
            raise UnicodeDecodeError('utf-8', head, i, i + 1, 'zero bytes')
        yield io.TextIOWrapper(file, 'utf-8-sig'), raw


def unpacked(path, raw):
    """A binary file with the content of raw, an opened file: unpacked if .gz follows an ending of
    UNPACKED, as in x.txt.gz"""
    is_packed = path.name.lower().endswith('.gz') and ending(path) in UNPACKED
    return gzip.open(raw) if is_packed else raw


def pair_documents(path):
    """Yields the documents of a .tsv file, "source TAB target", from lines with these two columns;
    further columns are left out."""
    for i, line in enumerate(lines_of(path), 1):
        if line.text.strip():
            # without blanks around them, because tokenizers join a blank and the TAB
            columns = [column.strip() for column in line.text.split('\t')]
            if len(columns) < 2:
                refuse(path, f'line {i}', line.text.rstrip('\n'), 'source TAB target')
            yield Document(f'{columns[0]}\t{columns[1]}', line.n_read)


def json_documents(path):
    """Yields the documents of a JSON file, objects {"text": ...}: one per line, or the items of an
    array, or a single object."""
    # the first line that is not blank is an object, or an array or object begins there
    lines = (line.text for line in lines_of(path) if line.text.strip())
    first = next(lines, '')
    second = next(lines, '')
    try:
        has_lines = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        has_lines = False
    if ending(path) == 'json' and not second:           # a single object in a line
        has_lines = False
    return json_lines(path) if has_lines else json_array(path)


def json_lines(path):
    for i, line in enumerate(lines_of(path), 1):
        if line.text.strip():
            try:
                item = json.loads(line.text)
            except (ValueError, RecursionError):
                refuse(path, f'line {i}', line.text, '{"text": "..."}')
            yield json_document(path, f'line {i}', item, line.n_read)


def json_array(path):
    text = read_text(path)
    if not text.strip():
        return
    other = OtherJson if ending(path) == 'json' else SystemExit     # if there are no documents
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        if '"text"' in text:                            # documents, damaged
            other = SystemExit
        lines = text.rstrip().split('\n')               # something can be missing after the last
        line = min(getattr(error, 'lineno', 1), len(lines))             # of a JSONDecodeError
        what = lines[line - 1] or text.lstrip()
        refuse(path, f'line {line}', what, '{"text": "..."}', other)
    if not isinstance(items, list):
        items = [items]
    if not any(isinstance(item, dict) and 'text' in item for item in items):
        refuse(path, 'item 1', json.dumps(items[:1])[1:-1], '{"text": "..."}', other)
    n_read = path.stat().st_size / max(1, len(items))
    for i, item in enumerate(items, 1):
        yield json_document(path, f'item {i}', item, n_read)


def json_document(path, where, item, n_read):
    """The Document of an object of JSON, which is at this place in a file"""
    try:
        text = item['text'].encode('utf-8', 'replace').decode()         # '?' for a lone surrogate
    except (TypeError, KeyError, AttributeError):
        refuse(path, where, json.dumps(item), '{"text": "..."}')
    return Document(unix(text), n_read)


class OtherJson(SystemExit):
    """A .json file has no documents: it is another value, as package.json, or no JSON, as a
    tsconfig.json with comments. In a folder it is left out, alone it ends the program. (One with
    several lines of objects is refused in a folder, too.)"""


def refuse(path, where, what, expected, error=SystemExit):
    """Ends the program: `what`, at this place in a file, is not as expected."""
    raise error(f'{str(path)!a}, {where}: {what[:60]!r} is not {expected}: correct it or move the '
                'file away')


def parquet_documents(path):
    """Yields the documents of a .parquet file: one column of its rows. A file of any size takes
    little memory: with a buffer, and no pre_buffer, pages of a row group are read one by one."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise SystemExit(f'{str(path)!a} needs pyarrow: pip install pyarrow')
    with ParquetFile(path, buffer_size=2 ** 20, pre_buffer=False) as file:
        column = text_column(path, file.schema_arrow)
        n_read = path.stat().st_size / max(1, file.metadata.num_rows)
        for rows in file.iter_batches(64, columns=[column]):
            for text in rows.column(0).to_pylist():
                yield Document(unix(text or ''), n_read)        # None: an empty cell


def text_column(path, schema):
    """The name of a .parquet file's column of strings: `text`, or the only one"""
    # string, large_string, string_view, dictionary<values=string, ...>; no list<item: string>
    strings = [field.name for field in schema
               if re.match(r'(dictionary<values=)?(large_)?string', str(field.type))]
    if 'text' in schema.names:
        strings = [name for name in strings if name == 'text']
    if len(strings) != 1:
        raise SystemExit(f'{str(path)!a}: the column of the text has to be named text, or be the '
                         f'only one of strings; there are {strings}')
    return strings[0]


# --------------------------------------------------------------------------------------------------
# the files of a text
GITHUB = 'https://raw.githubusercontent.com/'
WIKITEXT2 = f'{GITHUB}pytorch/examples/main/word_language_model/data/wikitext-2/'
DOWNLOADS = {                                   # {name: {URL: first digits of its sha256, or ''}}
    'shakespeare': {f'{GITHUB}karpathy/char-rnn/master/data/tinyshakespeare/input.txt': '86c4e6aa'},
    'wikitext2': {f'{WIKITEXT2}train.txt': '9e9fa1ad', f'{WIKITEXT2}valid.txt': 'f0737ed3',
                  f'{WIKITEXT2}test.txt': 'd790b833'},
    'wikitext103': {'https://wikitext.smerity.com/wikitext-103-v1.zip': ''},
    'enwik8': {'http://mattmahoney.net/dc/enwik8.zip': ''},
    'pg19': {}}                                 # too many files to download them one by one
NAMES = 'code', 'random', *DOWNLOADS            # values of --data that are not paths; see HOPS, too
NOT_CODE = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', 'encodings',
            'pydoc_data'}                       # folders that `code` leaves out


class Text(NamedTuple):
    """The files that --data names"""
    data: str               # what the user wrote
    name: str               # of the corpus
    files: dict             # {name: Path}, sorted by name
    left_out: dict          # {reason: [names of files and folders]}
    is_code: bool = False   # a document is a module or a package of the standard library


def find_text(data, root):
    """The Text that `data` names: code, a download, a file or a folder. root: of the corpora.
    SystemExit if there is none"""
    # where it is
    path = Path(data)
    if data == 'code':
        path = Path(sysconfig.get_path('stdlib'))
    elif data in DOWNLOADS:
        path = root / 'downloads' / data
        if not path.exists():
            download(data, path)

    # its files
    try:
        if data == 'code':
            files, _ = list_files(path, why_not_code)
            return Text(data, data, files, {}, is_code=True)
        name = path.resolve().stem
        if data and path.is_file():
            return Text(data, name, {path.name: path}, {})
        if data and path.is_dir():
            reason = why_no_text(path.resolve(), root)
            if reason in ('corpora', 'a run of train.py'):
                raise SystemExit(f'{data!a} is no text: it has {reason}')
            files, left_out = list_files(path, lambda path: why_no_text(path, root))
            return Text(data, name, files, left_out)
    except (OSError, RuntimeError, ValueError) as error:        # a link to itself, NUL in a path
        raise SystemExit(f'--data {data!a}: {error}')
    raise SystemExit(f'--data {data!a}: there is no such file or folder; names are '
                     f'{", ".join([*NAMES, *HOPS])}')


def download(name, folder):
    """Downloads the files of a named corpus into a folder."""
    if not DOWNLOADS[name]:
        raise SystemExit(f'{name} is not downloaded here: put its files into {folder}')
    with new_folder(folder) as incomplete:
        for url, sha256 in DOWNLOADS[name].items():
            file = incomplete / Path(url).name
            try:
                torch.hub.download_url_to_file(url, file, sha256)
                if file.suffix == '.zip':
                    shutil.unpack_archive(file, incomplete)
                    file.unlink()
            except Exception as error:                  # of urllib, of torch, OSError, a bad zip
                raise SystemExit(f'{url}: {error!r}; put its files, unpacked, into {folder}')


def list_files(top, why_not):
    """All files in a folder, at any depth -> {name: path}, sorted by name, and what is left out,
    {reason: [names]}. Links to folders are followed. Each file comes once, under a name without
    links if it has one.

    why_not(path): the reason why a file or folder is left out, or None"""
    # links to folders are read last: a file that is also in a folder has a name without links
    files, left_out = [], defaultdict(list)
    folders, links, visited = [top], [], set()
    while folders or links:
        folder = (folders or links).pop()
        real = os.path.realpath(folder)
        if real in visited:
            continue
        visited.add(real)
        for path in sorted(folder.iterdir()):
            reason = why_not(path)
            if reason:
                left_out[reason].append(path.relative_to(top).as_posix())
            elif not path.is_dir():
                files.append(path)
            elif path.is_symlink():
                links.append(path)
            else:
                folders.append(path)

    # of a file and links to it, the file
    names = {}
    for path in sorted(files, key=lambda path: (path.is_symlink(), path)):
        name = path.relative_to(top).as_posix()
        names.setdefault(os.path.realpath(path), (name, path))
    return dict(sorted(names.values())), dict(left_out)


def why_not_code(path):
    """The reason why `code` leaves out a part of the standard library, or None: it is no module, it
    tests others, it is mostly tables or help texts (encodings, pydoc_data), or installers wrote it,
    such as config-3.11-x86_64-linux-gnu/."""
    is_code = path.suffix == '.py' and path.is_file() and not path.name.startswith('_sysconfigdata')
    if path.is_dir():
        is_code = path.name not in NOT_CODE and not path.name.startswith('config-')
        is_code = is_code and not path.is_symlink()
    if path.name.startswith('.') or not is_code:
        return 'not code'


def why_no_text(path, root):
    """The reason why a file or folder in a user's folder is left out, or None.
    root: of the corpora"""
    if path.name.startswith('.'):
        return 'hidden'
    is_corpus = (path / 'meta.json').exists() and (path / 'train.idx').exists()
    if os.path.realpath(path) == os.path.realpath(root) or is_corpus:
        return 'corpora'
    # a new run has a lock of train.py only
    is_run = (path / 'ckpt.pt').exists() and (path / 'config.json').exists()
    if is_run or (path / 'train.lock').exists():
        return 'a run of train.py'
    if not path.is_dir() and not path.is_file():
        return 'a broken link or a device'


# --------------------------------------------------------------------------------------------------
# train, val and test
HELD_OUT = 5                # percent of a text for val, and as many for test
CUT = 'cut'                 # in place of the split of a file whose parts are in several splits
SPLIT_WORDS = {             # words in the path of a file that name its split
    'train': 'train', 'training': 'train', 'trainset': 'train',
    'val': 'val', 'valid': 'val', 'validation': 'val', 'dev': 'val', 'valset': 'val',
    'devset': 'val',
    'test': 'test', 'testing': 'test', 'eval': 'test', 'evaluation': 'test', 'testset': 'test'}
PROGRAMS = {                # ends of files whose names name no split, as test.py
    'py', 'pyi', 'ipynb', 'sh', 'bat', 'js', 'ts', 'c', 'h', 'cc', 'cpp', 'hpp', 'cu', 'java', 'go',
    'rs', 'rb', 'pl', 'r', 'lua', 'jl', 'php', 'cs', 'kt', 'swift', 'yml', 'yaml', 'toml'}


class Source(NamedTuple):
    """A file, or all files of a package of `code`, which are one document"""
    name: str               # of the file or package
    paths: list
    hashes: np.ndarray      # (n,) uint64   of its n Documents (a package has one for each module)
    sizes: np.ndarray       # (n,) int64    their bytes, in UTF-8

    @property
    def n_bytes(self):
        return int(self.sizes.sum())

    @property
    def has_lines(self):
        """Are its documents lines or rows?"""
        return kind_of(self.paths[0]) != 'text'


class Plan(NamedTuple):
    """Which document is in which split"""
    split_of: dict          # {name of a Source: train, val, test or CUT}
    rule: str               # how this was decided, for the screen
    limits: dict            # of what is CUT: {val, test: a limit}, see split_of_hash; else {}


def plan_splits(sources, named, is_code):
    """The Plan for sources. named: {name: split} of files whose names have one; if val is not among
    them, it is taken from train. {}: all is divided, files by a hash of their names, or if that is
    not usable, each file is cut."""
    if is_code:
        rule = f'{HELD_OUT}% val, {HELD_OUT}% test: packages by a hash of their names'
        return Plan(split_code(sources), rule, {})
    if 'val' in named.values():
        return Plan(named, 'by the names of files', {})

    # what is divided, into which splits
    divided, held_out, why = sources, ('val', 'test'), ''
    if named:
        divided = [source for source in sources if named[source.name] == 'train']
        held_out, why = ('val',), '; from train, because no file is named val'
    percent = ', '.join(f'{HELD_OUT}% {split}' for split in held_out)

    # whole files
    split_of = split_by_names(divided, held_out)
    if is_usable(split_of, divided):
        return Plan(named | split_of, f'{percent}: files by a hash of their names{why}', {})

    # parts of each
    split_of = {source.name: CUT for source in divided}
    lines = [source for source in divided if source.has_lines]
    limits, how = usual_limits(held_out), 'the end of each file'
    if lines:
        limits = limits_of_lines(lines, held_out)
        how = 'lines and rows by a hash of their text, of other files the end'
    return Plan(named | split_of, f'{percent}: {how}{why}', limits)


def split_documents(source, plan):
    """Yields (split, text) for all documents of a Source: lines and rows, articles, or all"""
    split = plan.split_of[source.name]
    if source.has_lines:
        for document in read_documents(source.paths[0]):
            of_document = split
            if split == CUT:
                n = hash64(document.text.encode())
                of_document = split_of_hash(n, plan.limits)
            yield of_document, document.text
        return

    text = joined_text(source.paths)
    article = article_start(text)
    parts = cut_text(text, [*plan.limits]) if split == CUT else [(split, text)]
    for split, part in parts:
        for document in regex.split(article, part):
            yield split, document


def joined_text(paths):
    """The text of files, one after the other; each begins a line."""
    text = ''
    for path in paths:
        if text and not text.endswith('\n'):
            text += '\n'
        text += read_text(path)
    return text


# which files are in the text: each is read once before it is divided
def examine_all(files, is_code):
    """Reads files {name: path} -> their Sources, and which are no text, {reason: [names]}"""
    sources, no_text = [], defaultdict(list)
    for name, path in progress_bar(files.items(), 'bytes read',
                                   size=lambda item: item[1].stat().st_size):
        try:
            sources.append(Source(name, [path], *examine(path)))
        except UnicodeDecodeError:
            reason, where = why_not_utf8(path)
            no_text[reason].append(f'{name}: {where}')
        except OtherJson:
            if len(files) == 1:
                raise
            no_text['JSON without {"text": "..."}'].append(name)
    if is_code:
        sources = packages_of(sources)
    return sources, no_text


def examine(path):
    """Reads a file -> hashes and sizes of its documents, see Source. Raises UnicodeDecodeError"""
    documents = progress_bar(read_documents(path), f'{path.name}, bytes read', path.stat().st_size,
                             size=lambda document: document.n_read)
    hashes = array('Q')
    sizes = array('q')
    for document in documents:
        utf8 = document.text.encode()
        hashes.append(hash64(utf8))
        sizes.append(len(utf8))
    return np.array(hashes, np.uint64), np.array(sizes, int)


def packages_of(modules):
    """Sources of modules -> Sources of packages; the module a/b/c.py is in the package a"""
    parts = defaultdict(list)
    for module in modules:
        parts[module.name.split('/')[0]].append(module)
    packages = []
    for name, modules in parts.items():
        _, paths, hashes, sizes = zip(*modules)
        packages.append(Source(name, sum(paths, []), np.concatenate(hashes), np.concatenate(sizes)))
    return packages


# splits that the names of files name
def named_splits(names):
    """{name: split} of the files whose names name one, if train and another split are among them;
    else {}"""
    split_of = {name: named_split(name) for name in names}
    splits = set(split_of.values()) - {None}
    if 'train' not in splits or len(splits) == 1:
        return {}
    return {name: split for name, split in split_of.items() if split}


def named_split(name):
    """The split that the path of a file names by the last of its words that is in SPLIT_WORDS, or
    None

    >>> [named_split(x) for x in ('Train01.txt', 'train/myTest.txt', 'trainer.txt', 'test.py')]
    ['train', 'test', None, None]"""
    *parts, file = name.split('/')
    if file.lower().rpartition('.')[2] not in PROGRAMS:
        parts.append(file)
    # a word: capital letters after which no small one comes, TEST; or small letters, before which
    # there may be a capital one, myTestSet is my, Test, Set
    words = regex.findall(r'\p{Lu}+(?!\p{Ll})|\p{Lu}?\p{Ll}+', ' '.join(parts))
    for word in reversed(words):
        if word.lower() in SPLIT_WORDS:
            return SPLIT_WORDS[word.lower()]


# splits by hashes
def hash64(content):
    """A hash of bytes, 0 to 2^64 - 1"""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], 'big')


def split_of_hash(n, limits):
    """The split of a line or file with the hash n: the first with a larger limit, else train

    >>> [split_of_hash(n, dict(val=5, test=10)) for n in (4, 5, 10)]
    ['val', 'test', 'train']"""
    return next((split for split, limit in limits.items() if n < limit), 'train')


def usual_limits(held_out):
    """{split: limit} with which each of the splits held_out has HELD_OUT percent of all hashes"""
    return {split: 2 ** 64 * HELD_OUT * i // 100 for i, split in enumerate(held_out, 1)}


def split_code(sources):
    """{name: split}: in the order of sha256(name), each source goes to val if val still has room
    for it, else to test if test has room, else to train. val and test have room for HELD_OUT
    percent of all bytes each."""
    total = sum(source.n_bytes for source in sources)
    room = dict(val=total * HELD_OUT // 100, test=total * HELD_OUT // 100, train=total)
    split_of = {}
    for source in sorted(sources, key=lambda x: hashlib.sha256(os.fsencode(x.name)).digest()):
        split = next(split for split in room if source.n_bytes <= room[split])
        room[split] -= source.n_bytes
        split_of[source.name] = split
    return split_of


def split_by_names(sources, held_out):
    """{name: split} by a hash of the names alone: a file stays in its split when others are added.
    Exception: files of equal text are all in train if one of them is, else all in val if one is."""
    limits = usual_limits(held_out)
    split_of = {source.name: split_of_hash(hash64(os.fsencode(source.name)), limits)
                for source in sources}
    for split in 'train', 'val':
        texts = {source.hashes.tobytes() for source in sources if split_of[source.name] == split}
        for source in sources:
            if source.hashes.tobytes() in texts:
                split_of[source.name] = split
    return split_of


def is_usable(split_of, sources):
    """Does val have at least 2.5% of the bytes, and do val and test have at most 25% each?"""
    n_bytes = Counter()
    for source in sources:
        n_bytes[split_of[source.name]] += source.n_bytes
    total = n_bytes.total()
    return total / 40 <= n_bytes['val'] <= total / 4 and n_bytes['test'] <= total / 4


def limits_of_lines(sources, held_out):
    """{split: limit} for the lines or rows of all sources: the usual limits, if they give val 1% of
    the bytes or more. Else there are few lines, and the limits follow from them: in the order of
    their hashes, each split gets lines until it has HELD_OUT percent of the bytes, at least one.
    Equal lines have the same hash, so they are in the same split."""
    limits = usual_limits(held_out)
    hashes = np.concatenate([source.hashes for source in sources])
    sizes = np.concatenate([source.sizes for source in sources])
    total = sizes.sum()
    if sizes[hashes < limits['val']].sum() >= total / 100:
        return limits

    # the bytes of all lines up to each hash; n of the hashes are below a limit
    distinct, which = np.unique(hashes, return_inverse=True)
    n_bytes = np.bincount(which, sizes).cumsum()
    n = 0
    for i, split in enumerate(held_out, 1):
        enough = 1 + np.searchsorted(n_bytes, total * HELD_OUT * i / 100)
        n = min(max(n + 1, enough), len(distinct) - 1)          # one is left for train
        limits[split] = int(distinct[n])
    return limits


# a text that is cut, and its articles
def cut_text(text, held_out):
    """Yields (split, its part of a text): first train's, then HELD_OUT percent for each split of
    held_out, as ['val', 'test']"""
    first = 100 - HELD_OUT * len(held_out)
    yield 'train', text[:cut_position(text, first)]
    for split in held_out:
        yield split, text[cut_position(text, first):cut_position(text, first + HELD_OUT)]
        first += HELD_OUT


def cut_position(text, percent):
    """About the position of `percent` percent of a text: the end of the next blanks or, if there
    are none in the next 2.5% of the text, the end of these 2.5%"""
    start = max(1, len(text) * percent // 100)          # at least one character is before it
    after_blanks = re.compile(r'(?<=\s)(?!\s)|\Z')      # or where the search ends
    return after_blanks.search(text, start, start + len(text) // 40).start()


def article_start(text):
    """A regular expression that matches where an article of WikiText begins, after some text:
    before ' = Title = ' between blank lines, but not before ' = = Part = = '. If a
    text has no such place, because other tools left out blank lines, fewer of them are required.

    >>> text = ' = A = \\n \\n = = Part = = \\n x \\n \\n = B = \\n \\n y'
    >>> regex.split(article_start(text), text)
    [' = A = \\n \\n = = Part = = \\n x \\n \\n', ' = B = \\n \\n y']"""
    # ' = A = ' or ' = A =', not ' = = A = = ': no = follows the first one or precedes the last one
    title = r' = (?!= ).*(?<! =) = ?'
    # (?m)^ the start of a line; (?=) after it come a title and a blank line; (?<=) before it come
    # something that is not blank, and a blank line
    article = rf'(?m)^(?={title}\n *$)(?<=\S\s*\n *\n)'
    if regex.search(article, text):
        return article
    blank_line = r'\n *$' if re.search(r'\n *\n', text) else '$'
    return rf'(?m)^(?={title}{blank_line})(?<=\S\s*)'


# --------------------------------------------------------------------------------------------------
# preparation
VERSION = 4             # of the rules by which a corpus is prepared: others make another folder
HOPS = {'niah': 1, 'niah2': 2}                  # --data: needles in a haystack, see Needles
PIECE = 2 ** 14         # characters, about: a long document is encoded in pieces, in threads


def load(data='code', tokenizer='bpe', vocab_size=4096, root='corpora', quiet=False):
    """The Corpus of `data`, prepared on first use. SystemExit with one line if that is impossible

    data        code, random, the name of a download, a file or a folder; niah, niah2, niah:books/,
                ...: needles with one or two hops in `code` or in books/
    tokenizer   a name, or a Tokenizer, for example of a checkpoint
    vocab_size  for bpe, the number of ids to learn; if data is random, the number of ids, for bpe
                and word
    root        the folder of all corpora
    quiet       print nothing"""
    root = Path(root)
    remove_abandoned(root)

    # the text; of needles, the text that they are in
    data = str(data)
    if data in [*NAMES, *HOPS] and os.path.exists(data) and not quiet:
        print(f'--data {data} is the text of this name; the file or folder is ./{data}')
    task, _, haystack = data.partition(':')
    hops = HOPS.get(task, 0)
    if hops:
        data = haystack or 'code'
        if data == 'random':
            raise SystemExit('niah needs a text with words: random has none')
    if data == 'random':
        text = Text('random', 'random', {}, {})
        if isinstance(tokenizer, str):
            tokenizer = random_tokenizer(tokenizer, vocab_size)
    else:
        if tokenizer == 'bpe':
            check_vocab_size(vocab_size)                # before a download, and hours of reading
        text = find_text(data, root)

    # its corpus, if it is on disk; else it is prepared
    folders = corpus_folders(text, tokenizer, vocab_size, root)
    corpora = (open_corpus(folder, tokenizer, text.name, hops, quiet) for folder in folders)
    corpus = next(filter(None, corpora), None)
    if corpus is None:
        folder = folders[-1]
        if data == 'random':
            prepare_random(folder, tokenizer)
        else:
            prepare(folder, text, tokenizer, vocab_size)
        corpus = Corpus(folder, text.name, hops, quiet)

    # the first lines of a run
    if not quiet:
        python = sys.version.split()[0]
        print(f'{corpus.folder}: fingerprint {corpus.fingerprint}, Python {python}')
        for title, line in corpus.about.items():
            print(f'{title}: {line}')
    return corpus


def corpus_folders(text, tokenizer, vocab_size, root):
    """The folders in which the corpus of a Text can be. The first is named by a hash of the text:
    its tokenizer was trained on this text. A given Tokenizer may be that one; if it was trained on
    other text, its corpus is in a second folder, named by a hash of text and tokens"""
    # with names, because a name, also that of a link, tells the split and the format
    stamp = [(name, str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
             for name, path in text.files.items()]
    hashes = [digest(VERSION, stamp)]
    kind = tokenizer
    if isinstance(tokenizer, Tokenizer):
        kind, vocab_size = tokenizer.name, tokenizer.n_vocab
        hashes.append(digest(VERSION, stamp, tokenizer.to_dict()))
    if kind == 'bpe':
        kind = f'bpe{vocab_size}'
    name = os.fsencode(text.name)[:150].decode(errors='ignore')     # file systems: 255 bytes
    return [root / f'{name}-{kind}-{sha256[:8]}' for sha256 in hashes]


def open_corpus(folder, tokenizer, name, hops, quiet):
    """The Corpus in a folder, if there is one with this tokenizer, a name or a Tokenizer; or None.
    A damaged one gets another name."""
    if not folder.exists():
        return None
    try:
        corpus = Corpus(folder, name, hops, quiet)
    except Exception as error:                          # see Corpus
        print(f'{folder} is damaged ({error!r:.99}) and prepared again', file=sys.stderr)
        with contextlib.suppress(FileNotFoundError):    # another process was faster
            folder.rename(f'{folder}-damaged-{time.time_ns()}')
        return None
    if isinstance(tokenizer, str) or tokenizer.to_dict() == corpus.tokenizer.to_dict():
        return corpus
    return None


def prepare(folder, text, tokenizer, vocab_size):
    """Makes the corpus of a Text. tokenizer: a name or a Tokenizer. SystemExit if the text cannot
    be used. Files are read twice: for the plan of the splits, and to be encoded; a third time for a
    tokenizer that is learned."""
    # which files are used: all, or those whose names have splits
    files, left_out = text.files, dict(text.left_out)
    named = {} if text.is_code else named_splits(files)
    if named:
        files = {name: files[name] for name in named}
        left_out['no split in the name'] = [name for name in text.files if name not in named]

    # what is in them, and which of it is in which split
    sources, no_text = examine_all(files, text.is_code)
    plan = plan_splits(sources, named, text.is_code)
    about = about_files(sources, plan, {**left_out, **no_text})
    pairs = are_pairs(sources, text.data, getattr(tokenizer, 'name', tokenizer))

    # its tokens
    with new_folder(folder) as temporary:
        if isinstance(tokenizer, str):
            # the ids of `code` remain those of earlier versions
            pattern = GPT2_PATTERN if text.is_code else BPE_PATTERN
            tokenizer = train_tokenizer(tokenizer, sources, plan, vocab_size, pattern)
        writers = {split: SplitWriter(temporary / split, tokenizer) for split in SPLITS}
        write_documents(sources, plan, writers, tokenizer)
        if writers['train'].n_tokens == 0:
            lines = '; '.join(f'{title}: {line}' for title, line in about.items()
                              if title == 'train' or title.startswith('not used'))
            raise SystemExit(f'no text for training in {text.data!a}; {lines}')
        write_meta(temporary, tokenizer, writers, about, pairs)


def are_pairs(sources, data, tokenizer):
    """Are the documents of all Sources pairs? SystemExit if only some are, or if the tokenizer, a
    name, has no TAB"""
    kinds = {kind_of(source.paths[0]) for source in sources}
    if 'pairs' in kinds and (len(kinds) > 1 or tokenizer == 'word'):
        raise SystemExit(f'--data {data!a}: .tsv files cannot be used with other files, or with '
                         'the tokenizer word, which has no TAB')
    return 'pairs' in kinds


def train_tokenizer(name, sources, plan, vocab_size, pattern):
    """The Tokenizer with this name, made from the train split"""
    sources = [source for source in sources if plan.split_of[source.name] in ('train', CUT)]
    texts = (piece.text for piece in pieces_of(sources, plan) if piece.split == 'train')
    n_characters = sum(source.n_bytes for source in sources)            # or fewer
    if name == 'bpe':
        n_characters = min(n_characters, LEARN_FROM)
    texts = progress_bar(texts, 'characters counted', n_characters, size=len)
    return Tokenizer.train(name, texts, vocab_size, pattern)


# documents are encoded in pieces
class Piece(NamedTuple):
    """A part of a document, see in_pieces"""
    split: str
    text: str
    is_last: bool           # of its document


def pieces_of(sources, plan):
    """Yields the Pieces of all documents."""
    for source in sources:
        for split, document in split_documents(source, plan):
            texts = in_pieces(document)                 # none of an empty document
            for i, text in enumerate(texts, 1):
                yield Piece(split, text, i == len(texts))


def in_pieces(text):
    """A text in pieces of about PIECE characters. They end where every tokenizer ends a token: at a
    line feed between characters that are not blank, as in 'a\\nb'."""
    # so many characters, then as few as possible up to such a line feed, but not one before a byte
    # order mark, which `unix` would remove; or all of the rest
    return re.findall(rf'(?s).{{{PIECE}}}.*?(?<=\S)\n(?=[^\s\ufeff])|.+', text)


def write_documents(sources, plan, writers, tokenizer):
    """Encodes all documents and adds them to {split: SplitWriter}."""
    n_bytes = sum(source.n_bytes for source in sources)
    pieces = progress_bar(pieces_of(sources, plan), 'bytes encoded', n_bytes,
                          size=lambda piece: len(piece.text.encode()))
    for piece, ids in encoded(pieces, tokenizer):
        writers[piece.split].add(ids, piece)


def encoded(pieces, tokenizer):
    """Yields (piece, ids (n,)) for Pieces, in their order; a document ends with <|endoftext|>.
    Threads encode lists of 32 pieces, because tiktoken works outside Python's lock; 16 lists at a
    time, because a text can be larger than the memory."""
    def encode_list(piece_list):
        id_list = []
        for piece in piece_list:
            ids = tokenizer.encode(piece.text)
            if piece.is_last and tokenizer.eot is not None:
                ids = np.append(ids, tokenizer.eot)
            id_list.append(ids)
        return id_list

    with ThreadPoolExecutor() as pool:
        for piece_lists in in_lists(in_lists(pieces, 32), 16):
            id_lists = pool.map(encode_list, piece_lists)
            for piece_list, id_list in zip(piece_lists, id_lists):
                yield from zip(piece_list, id_list)


def in_lists(items, n):
    """Yields lists of n items, the last one can be shorter."""
    items = iter(items)
    return iter(lambda: list(islice(items, n)), [])


# what is written
class SplitWriter:
    """Writes the documents of a split to path.bin; `finish` writes path.idx."""
    def __init__(self, path, tokenizer):
        self.path, self.dtype = path, tokenizer.dtype
        self.file = open(f'{path}.bin', 'wb')
        self.offsets = array('q', [0])
        self.n_bytes = self.n_words = 0
        self.n_tokens = 0
        self.sha256 = hashlib.sha256()                  # of all documents
        self.hashes = array('Q')                        # of each document, 64 bits
        self.document = hashlib.sha256()                # of the current one

    def add(self, ids, piece):
        """Adds a Piece, ids (n,)."""
        self.file.write(ids.astype(self.dtype))
        utf8 = piece.text.encode()
        self.n_tokens += len(ids)
        self.n_bytes += len(utf8)
        self.n_words += len(piece.text.split())
        self.sha256.update(utf8)
        self.document.update(utf8)
        if piece.is_last:
            self.sha256.update(b'\0')
            if self.n_tokens > self.offsets[-1]:        # else a document without tokens: none
                self.offsets.append(self.n_tokens)
                self.hashes.append(int.from_bytes(self.document.digest()[:8], 'big'))
            self.document = hashlib.sha256()

    def finish(self):
        """-> the counts of the split for meta.json"""
        self.file.close()
        np.array(self.offsets, np.int64).tofile(f'{self.path}.idx')
        return dict(tokens=self.n_tokens, documents=len(self.hashes), bytes=self.n_bytes,
                    words=self.n_words, sha256=self.sha256.hexdigest())


def write_meta(folder, tokenizer, writers, about, pairs=False):
    """Finishes {split: SplitWriter} and writes meta.json. The lines of `about` get the counts of
    each split, and how many documents of val and test are copies of documents of train."""
    about, splits = dict(about), {}
    in_train = np.array(writers['train'].hashes)
    for split, writer in writers.items():
        counts = writer.finish()
        if counts['documents']:
            splits[split] = counts
            about[split] += f', {counts["documents"]:,} documents, {counts["tokens"]:,} tokens'
        n_copies = np.isin(np.array(writer.hashes), in_train).sum()
        if split != 'train' and n_copies:
            about[split] += f', documents that are also in train: {n_copies:,}'
    meta = dict(tokenizer=tokenizer.to_dict(), splits=splits, about=about, pairs=pairs)
    (folder / 'meta.json').write_text(json.dumps(meta))


def about_files(sources, plan, left_out):
    """{title: line} for the screen: how the files were divided, which are in each split, and what
    is left out, {reason: [names]}"""
    about = {'splits': plan.rule}
    for split in SPLITS:
        places = [split]
        if split in ('train', *plan.limits):
            places.append(CUT)
        names = [source.name for source in sources if plan.split_of[source.name] in places]
        about[split] = list_names(names)
    for reason, names in left_out.items():
        if names:
            about[f'not used ({reason})'] = list_names(names)
    return about


def list_names(names):
    """'5 files, [the first three names]', for the screen"""
    return f'{len(names):,} files, {names[:3]!a}'


# --------------------------------------------------------------------------------------------------
# random tokens
RANDOM_DOCUMENTS = dict(train=64, val=2, test=2)        # of RANDOM_LENGTH tokens
RANDOM_LENGTH = 2 ** 16


def random_tokenizer(name, vocab_size):
    """A Tokenizer of words w2, w3, ..., with as many ids as the tokenizer with this name"""
    n_vocab = FIXED_SIZES.get(name, vocab_size)
    check_vocab_size(n_vocab, 2, '<unk> and <eos>')
    return Tokenizer('word', ['<unk>', '<eos>', *(f'w{i}' for i in range(2, n_vocab))])


def prepare_random(folder, tokenizer):
    """Makes a corpus of independent, equally frequent ids: no model's loss falls below ln n_vocab
    on its val, except by chance."""
    with new_folder(folder) as temporary:
        writers = {split: SplitWriter(temporary / split, tokenizer) for split in SPLITS}
        for i, (split, n_documents) in enumerate(RANDOM_DOCUMENTS.items()):
            rng = np.random.default_rng([tokenizer.n_vocab, i])
            for _ in range(n_documents):
                ids = rng.integers(tokenizer.n_vocab, size=RANDOM_LENGTH)
                writers[split].add(ids, Piece(split, tokenizer.decode(ids), is_last=True))
        write_meta(temporary, tokenizer, writers, dict.fromkeys(SPLITS, 'random tokens'))


# --------------------------------------------------------------------------------------------------
# files that are not UTF-8
BYTE_ORDER_MARKS = {                            # the first bytes of other encodings; longer first
    codecs.BOM_UTF32_LE: 'utf-32', codecs.BOM_UTF32_BE: 'utf-32',
    codecs.BOM_UTF16_LE: 'utf-16', codecs.BOM_UTF16_BE: 'utf-16'}


def why_not_utf8(path):
    """For the screen: what a file that is not UTF-8 may be, with the command that converts it; and
    which byte is wrong"""
    if kind_of(path) == 'parquet':
        return 'not UTF-8', 'a string'
    with path.open('rb') as raw:
        file = unpacked(path, raw)
        head = file.read(1000)
        file.seek(0)
        position, value = wrong_byte(file) or (head.index(0), 0)
    reason = ('not UTF-8; Latin-1 (iconv -f latin1 -t utf-8), another encoding (iconv -l), or '
              'UTF-8 with wrong bytes (iconv -c -f utf-8 -t utf-8)')
    if head.startswith(b'\x1f\x8b'):                     # gzip's first bytes
        reason = 'not UTF-8; packed by gzip; only files with names like x.txt.gz are unpacked'
    elif 0 in head:                                     # of UTF-16: the upper bytes of letters
        order = 'be' if head[::2].count(0) > head[1::2].count(0) else 'le'
        reason = f'not UTF-8; binary, or UTF-16 (iconv -f utf-16{order} -t utf-8)'
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            reason = f'not UTF-8; {encoding} (iconv -f {encoding} -t utf-8)'
            break
    return reason, f'byte {position:,} is 0x{value:02x}'


def wrong_byte(file):
    """The first byte of a binary file that is not UTF-8: its position and its value; or None"""
    decoder = codecs.getincrementaldecoder('utf-8')()
    blocks = iter(functools.partial(file.read, 2 ** 20), b'')
    n_read = 0
    for block in chain(blocks, [b'']):                  # the last one, empty, is the end of a text
        n_read += len(block)
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            return n_read - len(error.object) + error.start, error.object[error.start]
    return None                                         # it is UTF-8, with many zero bytes


# --------------------------------------------------------------------------------------------------
# preparations that are killed
@contextlib.contextmanager
def new_folder(folder):
    """A temporary folder, which gets the name of `folder` at the end: an incomplete corpus,
    download or datastore is never opened. It is removed after an error; if the process is killed,
    the next new folder in the same place, or the next `load`, removes it."""
    remove_abandoned(folder.parent)
    temporary = folder.with_name(f'{folder.name}.{os.urandom(4).hex()}.tmp')
    temporary.mkdir(parents=True)
    lock = open(temporary / 'lock', 'w')
    try:
        if fcntl:
            with contextlib.suppress(OSError):          # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
                lock.write(platform.node())             # last: whoever reads it relies on the lock
                lock.flush()
        else:
            lock.close()                                # Windows renames no open file
        yield temporary
        with contextlib.suppress(OSError):              # another process was faster
            temporary.rename(folder)
            (folder / 'lock').unlink()
    finally:
        lock.close()
        shutil.rmtree(temporary, ignore_errors=True)


def remove_abandoned(root):
    """Removes the temporary folders of processes that were killed."""
    for folder in root.glob(f'*.{8 * "[0-9a-f]"}.tmp'):      # the names of new_folder
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_abandoned(folder):
    """Has the process ended that wrote this temporary folder? On this machine it holds a lock on
    the file `lock`, which has the machine's name, until it ends. A folder of another machine, which
    a lock may not reach, is abandoned if nothing in it has changed for a week. A folder without a
    lock is another program's."""
    lock = folder / 'lock'
    try:
        machine = lock.read_text()
        if fcntl and machine == platform.node():
            with open(lock, 'r+') as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        return time.time() - changed > 7 * 86_400
    except OSError:             # there is no lock, it is held, or the folder has just been renamed
        return False


# --------------------------------------------------------------------------------------------------
# the command
def print_batch(batch, text_of=chr):
    """Prints a Batch: for each position the token, its target and the number of its document; _ is
    padding, or no target. text_of: token id -> text"""
    tokens = batch.tokens.masked_fill(batch.doc < 0, -1)
    lines = dict(tokens=texts_of(tokens, text_of), targets=texts_of(batch.targets, text_of),
                 doc=texts_of(batch.doc, str))                  # lists (B, T) of str
    width = np.char.str_len([*lines.values()]).max(0)           # (B, T) of each column
    for name, rows in lines.items():
        rows = [' '.join(map(str.ljust, texts, widths))
                for texts, widths in zip(rows, width.tolist())]
        print(f'{name:8}', ' | '.join(rows).rstrip())


def texts_of(ids, text_of):
    """Ids (B, T), or -1 -> their texts, a list of lists of str"""
    return [[text_of(i) if i >= 0 else '_' for i in row] for row in ids.tolist()]


def main():
    """Prepares the corpus of a text, prints what is in it, and some rows: tokens, targets and
    documents, or a whole text with needles."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument('data', nargs='?', default='code', help='as --data of train.py')
    parser.add_argument('tokenizer', nargs='?', default='bpe', choices=TOKENIZERS)
    parser.add_argument('vocab_size', nargs='?', default=4096, type=int,
                        help='of bpe, and of word for random')
    arguments = parser.parse_args()
    is_used = (arguments.tokenizer == 'bpe'
               or arguments.data == 'random' and arguments.tokenizer == 'word')
    if arguments.vocab_size != 4096 and not is_used:
        parser.error(f'vocab_size is for bpe; {arguments.tokenizer} has ids of its own')
    if hasattr(sys.stdout, 'reconfigure'):              # not in a notebook
        sys.stdout.reconfigure(errors='replace')        # characters that a console lacks
    corpus = load(**vars(arguments))
    tokenizer = corpus.tokenizer

    # tokens of a row: a line on the screen; most of a pair; 8 chunks, the least for needles
    T = max(1, min(12, len(corpus.train.tokens) - 1))
    if corpus.tab >= 0:                                 # at least the shortest source
        tabs = np.flatnonzero(corpus.train.tokens == corpus.tab)
        T = max(36, (tabs - corpus.train.offsets[:-1]).min().item() + 2)
    if corpus.hops:
        T = 256
    batch = corpus.batches(corpus.train, 'documents', T, micro_batch=4, seed=0)[0]
    if corpus.hops:
        print(tokenizer.decode(batch.tokens[0]))
        return

    # row by row, 12 columns at a time
    for r in range(4):
        print(f'row {r}')
        for start in range(0, T, 12):
            part = [x[r:r + 1, start:start + 12] for x in batch[:3]]
            print_batch(Batch(*part, batch.seed), lambda i: ascii(tokenizer.decode([i])))


if __name__ == '__main__':
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:                             # without a reader, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, KeyboardInterrupt) as error:
        raise SystemExit(f'data.py: {str(error) or "stopped"}')
