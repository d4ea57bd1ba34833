"""
BM25: which documents share the most, and the rarest, words with a query? No training, no vectors, only counting.

    Robertson et al., "Okapi at TREC-3", 1994; the five variants as in Kamphuis, de Vries, Boytsov and Lin,
    "Which BM25 Do You Mean? A Large-Scale Reproducibility Study of Scoring Variants", ECIR 2020

A word counts for more the fewer documents have it (idf), and for more the more often a document has it, though with
diminishing returns (tf), less in a long document than in a short one (norm):

    score(q, d) = Σ_{t in q} idf(t) · tf(t, d)                                one summand per occurrence of t in q

The weight idf · tf depends on nothing in the query, so it is computed once per (term, document) when the index is
built. A search is then a product of the query's term counts with a matrix (terms, documents) that is nearly empty.
Nearly: a few thousand frequent terms stand in so many documents that a dense product by BLAS is the fastest way to
add them up, and the others so thinly that adding their postings one by one is. Both are done in fp32 for all documents;
the best few are then scored again in fp64, so that no rounding on the way decides an order or a tie.

Letters used in the shape comments
    N documents    Q queries of one block    V terms    H of them stored densely    P (term, document) pairs

    $ python bm25.py            segments of 3,072 words of Python's own library look each other up; bm25s beside it
    $ python bm25.py --big      the size of WikiText-103: 33,600 segments of 3,072 words, synthetic
"""

import argparse
import re
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np

# ----------------------------------------------------------------------------------------------------------------------
# The formulas: Table 1 of Kamphuis et al.
#     N documents, df of them have the term; the term occurs tf times in a document of len tokens
#     norm = 1 - b + b · len / (mean len)

DELTA_L, DELTA_PLUS = 0.5, 1.0      # what BM25L and BM25+ add to lift long documents (Lv and Zhai 2011)

def idf_lucene(N, df):
    return np.log(1 + (N - df + 0.5) / (df + 0.5))

def idf_robertson(N, df):           # below zero where a term is in more than half of the documents; held at zero there
    return np.maximum(0, np.log((N - df + 0.5) / (df + 0.5)))

def idf_atire(N, df):
    return np.log(N / df)

def idf_bm25l(N, df):
    return np.log((N + 1) / (df + 0.5))

def idf_bm25plus(N, df):
    return np.log((N + 1) / df)

def tf_robertson(tf, norm, k1):     # Lucene leaves out the factor k1 + 1 too: it changes no order
    return tf / (tf + k1 * norm)

def tf_atire(tf, norm, k1):
    return tf * (k1 + 1) / (tf + k1 * norm)

def tf_bm25l(tf, norm, k1):
    return (k1 + 1) * (tf / norm + DELTA_L) / (k1 + tf / norm + DELTA_L)

def tf_bm25plus(tf, norm, k1):
    return tf * (k1 + 1) / (tf + k1 * norm) + DELTA_PLUS

VARIANTS = {'lucene': (idf_lucene, tf_robertson), 'robertson': (idf_robertson, tf_robertson), 'atire': (idf_atire, tf_atire),
            'bm25l': (idf_bm25l, tf_bm25l), 'bm25+': (idf_bm25plus, tf_bm25plus)}

# ----------------------------------------------------------------------------------------------------------------------
# Counting

MAX_ID = 2 ** 26                # term ids index tables, so they should not be much more than there are terms
DENSE = 0.07                    # a term in a larger share of the documents has its row in the dense matrix (measured)
DENSE_MAX = 2 ** 28             # entries of that matrix: at most 1 GiB
TEXTS, QUERIES = 1024, 256      # texts counted at once, queries multiplied at once; these and the next bound the scratch memory
SCORES = 2 ** 26                # scores of all documents with the queries multiplied at once
TABLE, DOCS = 2 ** 17, 1024     # entries of the table of query counts, documents scored again at once
NONE = np.zeros(0, np.int64)

def flatten(texts, what, first=0):
    """A list of integer arrays as one int64 array (tokens,) and their lengths (texts,). ValueError for anything else."""
    texts = [np.asarray(text) for text in texts]
    for i, text in enumerate(texts, first):
        if text.ndim != 1 or (text.size and text.dtype.kind not in 'iu'):
            raise ValueError(f'{what} {i} has dtype {text.dtype} and shape {text.shape}; '
                             'it should be a flat array of integers, the token ids.')
    lengths = np.array([text.size for text in texts], dtype=np.int64)
    tokens = np.concatenate([np.zeros(0, np.int64), *texts], dtype=np.int64, casting='unsafe')
    if tokens.size and tokens.min() < 0:
        i = np.repeat(np.arange(len(texts)), lengths)[tokens.argmin()]
        raise ValueError(f'{what} {first + i} has the token id {tokens.min()}; ids run from 0 to 2^63 - 1.')
    return tokens, lengths

def count(tokens, lengths):
    """
    How often does each text have each term?
        tokens   (tokens,)   int64, the texts one after the other
        lengths  (texts,)    tokens of each
    Returns text, term, count, (P,) each: the pairs that occur, sorted by text and within it by term.
    """
    V = tokens.max(initial=0) + 1
    key = np.repeat(np.arange(len(lengths)) * V, lengths) + tokens
    key.sort()                                              # equal pairs become neighbors
    first = np.flatnonzero(np.diff(key, prepend=-1))
    text, term = np.divmod(key[first], V)
    return text, term, np.diff(first, append=len(key))

def ranges(start, length):
    """The numbers start[0] .. start[0] + length[0] - 1, then those from start[1], and so on: (length.sum(),) int64."""
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(length.sum())

# ----------------------------------------------------------------------------------------------------------------------
# The index

class BM25:
    """
    An index of documents that does not change: idf and the mean length come from all of them.

        docs      N integer arrays (len,), token ids from 0 to 2^26 - 1; empty ones are allowed, and N = 0 too
        k1        > 0, how slowly repetition saturates
        b         0 to 1, how much longer documents are held back
        variant   'lucene' (default), 'robertson', 'atire', 'bm25l', 'bm25+'
        idf       (V,) by token id, of another text; terms without one count as 0. None: from these documents
    Raises ValueError for anything else. Memory: 16 bytes per (document, term) pair and 4 N bytes per frequent term.

    A document is found when it scores above a document that shares no term with the query. That score is zero, but
    for BM25L and BM25+, where an absent term has a weight too: there it is added to all scores, and still not found.
    """

    def __init__(self, docs, k1=1.2, b=0.75, variant='lucene', idf=None):
        if variant not in VARIANTS:
            raise ValueError(f'variant {variant!r} is unknown; there are {", ".join(VARIANTS)}.')
        if not (k1 > 0 and 0 <= b <= 1):
            raise ValueError(f'k1 = {k1} and b = {b}; k1 should be above 0 and b from 0 to 1.')
        idf_of, tf_part = VARIANTS[variant]
        N = self.N = len(docs)

        blocks, lengths = [], []
        for i in range(0, max(N, 1), TEXTS):
            tokens, n = flatten(docs[i:i + TEXTS], 'document', i)
            if tokens.max(initial=0) >= MAX_ID:
                raise ValueError(f'token id {tokens.max()} in the documents is not below {MAX_ID}; '
                                 'number the terms anew, from 0 (np.unique can).')
            doc, term, tf = count(tokens, n)
            blocks.append([x.astype(np.int32) for x in (doc + i, term, tf)])
            lengths.append(n)
        doc, term, tf = (np.concatenate(x) for x in zip(*blocks))       # (P,) sorted by document
        lengths = np.concatenate(lengths)                               # (N,)
        del blocks

        # inside, terms are numbered by document frequency, the most frequent first; `rank` translates
        df = np.bincount(term)
        by_df = np.argsort(-df, kind='stable')
        self.rank = np.empty(len(df), np.int32)                         # (largest id + 1,)
        self.rank[by_df] = np.arange(len(df))
        df = df[by_df]
        df = df[df > 0]                                                 # (V,)
        term = self.rank[term]

        if idf is None:
            idf = idf_of(N, df)                                         # (V,) fp64
        else:                                                           # by rank, like everything here
            idf = np.pad(np.asarray(idf, dtype=np.float64), (0, max(0, len(by_df) - len(idf))))[by_df[:len(df)]]
        self.floor = idf * tf_part(0, 1, k1)                            # (V,) weight of a term that is absent
        norm = 1 - b + b * lengths / max(lengths.mean(), 1e-9) if N else lengths
        weight = np.empty(len(term), np.float32)                        # (P,) what the term adds to the floor; never below 0
        for i in range(0, len(term), 2 ** 20):                          # in pieces: the fp64 scratch stays small
            t, d = term[i:i + 2 ** 20], doc[i:i + 2 ** 20]
            weight[i:i + 2 ** 20] = idf[t] * tf_part(tf[i:i + 2 ** 20], norm[d], k1) - self.floor[t]
        del tf

        # the weights twice: by document, for the exact scores; by term, the frequent ones dense, the others as postings
        self.doc_start = np.searchsorted(doc, np.arange(N + 1))         # (N + 1,)
        self.term, self.weight = term, weight                           # (P,)
        self.H = min(int((df > DENSE * N).sum()), DENSE_MAX // max(N, 1))
        dense = term < self.H
        self.dense = np.zeros((self.H, N), np.float32)                  # (H, N)
        self.dense[term[dense], doc[dense]] = weight[dense]
        rare = np.flatnonzero(~dense)
        rare = rare[np.argsort(term[rare], kind='stable')]              # by term, within it by document
        self.post_doc, self.post_weight = doc[rare], weight[rare]       # one by one the postings of all rare terms
        self.df = df
        self.post_start = np.concatenate([np.zeros(self.H + 1, np.int64), np.cumsum(df[self.H:])])   # (V + 1,)

    def search(self, query, k, exclude=()):
        """
        The k best documents for one query.
            query     (T,) integers from 0; a repeated term counts once per occurrence, a term of no document not at all
            exclude   document ids that must not be found; ids of no document do no harm
        Returns ids (n,) int64 and scores (n,) float32, best first, n <= k: only documents that are found (see the class).
        At equal scores the lower id comes first, and stays when k cuts between them. ValueError for other input.
        """
        exclude = np.asarray(exclude)
        if exclude.ndim != 1 or (exclude.size and exclude.dtype.kind not in 'iu'):
            raise ValueError(f'exclude has dtype {exclude.dtype} and shape {exclude.shape}; '
                             'it should be a list of document ids.')
        exclude = exclude[(exclude >= 0) & (exclude < self.N)].astype(np.int64)
        ids, scores = self._search([query], min(check_k(k), self.N), [self.N], exclude)
        found = ids[0] >= 0
        return ids[0, found], scores[0, found]

    def search_many(self, queries, k, limit=None):
        """
        The k best documents for each of n queries.
            queries   n integer arrays, as in `search`
            limit     (n,) integers: query i finds only documents below limit[i]; None is no limit
        Returns ids (n, k) int64 and scores (n, k) float32, row by row what `search` returns, filled up with -1 and -inf.
        ValueError for other input.
        """
        n, k = len(queries), check_k(k)
        limit = np.full(n, self.N) if limit is None else np.asarray(limit)
        if limit.shape != (n,) or (n and (limit.dtype.kind not in 'iu' or limit.min() < 0)):
            raise ValueError(f'limit has dtype {limit.dtype} and shape {limit.shape}; '
                             f'it should be {n} integers from 0, one per query.')
        Q = max(1, min(QUERIES, SCORES // max(self.N, 1)))
        out = [self._search(queries[i:i + Q], k, limit[i:i + Q], first=i) for i in range(0, max(n, 1), Q)]
        return tuple(np.concatenate(x) for x in zip(*out))

    def _search(self, queries, k, limit, exclude=NONE, first=0):
        """One block of queries, numbered from `first`: ids (Q, k) and scores (Q, k), filled up with -1 and -inf."""
        Q, N, V, H = len(queries), self.N, len(self.df), self.H
        tokens, lengths = flatten(queries, 'query', first)
        query = np.repeat(np.arange(Q), lengths)
        known = tokens < len(self.rank)
        known[known] = self.rank[tokens[known]] < V                     # the other terms are in no document
        lengths = np.bincount(query[known], minlength=Q)
        query, term, tf = count(self.rank[tokens[known]], lengths)      # (P,)
        start = np.searchsorted(query, np.arange(Q + 1))                # (Q + 1,)

        # the frequent terms, by one product of matrices
        often = term < H
        counts = np.zeros((Q, H), np.float32)
        counts[query[often], term[often]] = tf[often]
        rows = np.unique(term[often])
        if len(rows) < H // 2:                                          # few or short queries: skip the other rows
            gains = counts[:, rows] @ self.dense[rows]                  # (Q, N)
        else:
            gains = counts @ self.dense                                 # (Q, N)

        # the rare ones, posting by posting
        rare = start[:-1] + np.bincount(query[often], minlength=Q)      # (Q,) where they begin: pairs are sorted by term
        for i in range(Q):
            t, c = term[rare[i]:start[i + 1]], tf[rare[i]:start[i + 1]]
            n = self.df[t]
            at = ranges(self.post_start[t], n)
            weight = self.post_weight[at] * np.repeat(c.astype(np.float32), n)
            np.add.at(gains[i], self.post_doc[at].astype(np.int64), weight)
            gains[i, limit[i]:] = 0
        gains[:, exclude] = 0

        # the candidates: an fp32 sum of n terms, none below zero, is off by a share of about n * 2^-24 at most, so the true
        # k best are all among the documents within twice that share of the k-th
        ids, scores = np.full((Q, k), -1, np.int64), np.full((Q, k), -np.inf, np.float32)
        step = max(1, TABLE // max(V, 1))
        table = np.zeros((min(step, Q), V))                             # counts of the queries at hand
        for i in range(0, Q if k else 0, step):
            gain = gains[i:i + step]
            z = i + len(gain)
            p = slice(start[i], start[z])
            least = np.zeros(len(gain), np.float32)                     # (queries,)
            if k < N:
                terms = start[i + 1:z + 1] - start[i:z]
                least = np.partition(gain, N - k, axis=1)[:, N - k] * (1 - (terms + 8) * 2.0 ** -23)
            q, d = np.divmod(np.flatnonzero((gain >= least[:, None]) & (gain > 0)), N)   # (candidates,)
            table[query[p] - i, term[p]] = tf[p]
            exact = [self._exact(table, q[j:j + DOCS], d[j:j + DOCS]) for j in range(0, max(len(d), 1), DOCS)]
            exact = np.concatenate(exact)                               # (candidates,) float32
            table[query[p] - i, term[p]] = 0

            order = np.lexsort((d, -exact, q))
            q, d, exact = q[order], d[order], exact[order]
            place = np.arange(len(q)) - np.searchsorted(q, q)           # 0 for the best of each query
            q, d, exact, place = (x[place < k] for x in (q, d, exact, place))
            floor = np.bincount(query[p] - i, tf[p] * self.floor[term[p]], len(gain))
            ids[i + q, place], scores[i + q, place] = d, exact + floor[q]
        return ids, scores

    def _exact(self, table, q, d):
        """What documents d (n,) score with queries q (n,), rows of `table` (queries, V), above the floor: (n,) float32."""
        n = self.doc_start[d + 1] - self.doc_start[d]
        at, pair = ranges(self.doc_start[d], n), np.repeat(np.arange(len(d)), n)
        return np.bincount(pair, table[q[pair], self.term[at]] * self.weight[at], len(d)).astype(np.float32)

def check_k(k):
    if not isinstance(k, (int, np.integer)) or k < 0:
        raise ValueError(f'k is {k!r}; it should be an integer from 0.')
    return int(k)

# ----------------------------------------------------------------------------------------------------------------------
# A benchmark

def library_segments(n, length):
    """Up to n segments (length,) int32 of the words and signs in the Python standard library's own sources."""
    root, number, tokens = Path(sysconfig.get_path('stdlib')), {}, []
    for path in sorted(root.rglob('*.py')):
        if not {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'} & set(path.relative_to(root).parts):
            words = re.findall(r'\w+|[^\w\s]', path.read_text('utf-8', errors='replace'))
            tokens += [number.setdefault(word, len(number)) for word in words]
        if len(tokens) >= n * length:
            break
    n = min(n, len(tokens) // length)
    return list(np.array(tokens[:n * length], np.int32).reshape(n, length))

def zipf_segments(n, length, V, exponent):
    """n segments (length,) int32 of independent words, the r-th most frequent in proportion to r^-exponent."""
    rng = np.random.default_rng(0)
    cumulative = np.cumsum(np.arange(1, V + 1) ** -exponent)
    return [np.searchsorted(cumulative, rng.random(length) * cumulative[-1]).astype(np.int32) for _ in range(n)]

def seconds(f):
    start = time.perf_counter()
    result = f()
    return time.perf_counter() - start, result

def compare(k=20, rounds=3):
    """Every segment asks for its k nearest, here and in bm25s (numpy, one thread), in turns."""
    docs = library_segments(2300, 3072)
    build, index = seconds(lambda: BM25(docs))
    print(f'{len(docs):,} segments of 3,072 words of the standard library, {len(index.df):,} distinct; index {build:.2f} s')
    try:
        import bm25s
    except ImportError:
        bm25s = None
    lists = [doc.tolist() for doc in docs]
    if bm25s:
        theirs = bm25s.BM25(method='lucene', k1=1.2, b=0.75, backend='numpy')
        vocabulary = {t: t for t in range(len(index.rank))}
        build, _ = seconds(lambda: theirs.index((lists, vocabulary), show_progress=False))
        print(f'bm25s {bm25s.__version__}: index {build:.2f} s')
    times = []
    for i in range(rounds):
        t, (ids, scores) = seconds(lambda: index.search_many(docs, k))
        times.append([t])
        line = f'round {i + 1}: search_many {t:6.2f} s'
        if bm25s:
            t, (their_ids, their_scores) = seconds(lambda: theirs.retrieve(lists, k=k, show_progress=False))
            times[-1].append(t)
            line += f'   bm25s {t:6.2f} s'
        print(line)
    median = [statistics.median(t) for t in zip(*times)]
    print(f'median: {median[0]:.2f} s, {1000 * median[0] / len(docs):.2f} ms a query')
    if bm25s:
        print(f'bm25s:  {median[1]:.2f} s, {median[1] / median[0]:.1f} times as long')
        worst = np.abs(scores / their_scores - 1).max()
        print(f'same documents in {(ids == their_ids).mean():.2%} of the places, scores within a share of {worst:.1e} of each other')
        if worst > 1e-4:
            raise SystemExit('The two disagree by more than rounding explains.')

def big(n, k=21):
    """The job that packs WikiText-103 for TRIME: every segment looks for its neighbors."""
    import resource                                         # not on Windows
    docs = zipf_segments(n, 3072, 268_000, 1.1)             # this exponent: about as many frequent words as WikiText has
    build, index = seconds(lambda: BM25(docs))
    print(f'{n:,} segments, {len(index.term) / n:,.0f} distinct words in each; index {build:.1f} s, {index.H:,} dense terms')
    search, (ids, _) = seconds(lambda: index.search_many(docs, k))
    if not (ids[:, 0] == np.arange(n)).all():
        raise SystemExit('A segment should be its own nearest.')
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 30 if sys.platform == 'darwin' else 2 ** 20)
    print(f'search_many {search:.1f} s, {1000 * search / n:.2f} ms a query; together {build + search:.1f} s; '
          f'peak memory {peak:.2f} GiB')

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='Time BM25 on whole segments as queries, beside bm25s where it is installed.')
    parser.add_argument('--big', type=int, metavar='N', nargs='?', const=33_600, help='instead: N synthetic segments (default: 33600)')
    args = parser.parse_args()
    big(args.big) if args.big else compare()
