"""
BM25: which documents share the most, and the rarest, terms with a query? Nothing is learned.

    Robertson et al., "Okapi at TREC-3", 1994, in Lucene's form: Kamphuis, de Vries, Boytsov and
    Lin, "Which BM25 Do You Mean?", ECIR 2020, Table 1

    score(q, d)  = Σ_{t in q} weight(t, d)                  once for each occurrence of t in q
    weight(t, d) = idf(t) · tf / (tf + k1 · (1 - b + b · len(d) / mean len))
    idf(t)       = log(1 + (N - df + 0.5) / (df + 0.5))

Document d contains the term t tf times; df of the N documents contain it. Sums are in fp64 and
rounded to fp32 at the end, so their order changes no rank. Equal scores are ranked by id.

The scores of Q queries are a product of two matrices: the counts (Q, V) of their terms and the
weights (V, N). A few terms occur in many documents; their rows of the weights are a dense matrix,
for BLAS. All other rows are mostly 0; they are stored as postings, a list of (document, weight).

Letters used in the shape comments
    N documents    Q queries    V terms    F frequent terms
    P pairs (text, term) of a document or a query and a term that occurs in it: see TermCounts

    $ pip install bm25s
    $ OMP_NUM_THREADS=1 python bm25.py      compares it with bm25s, on one thread
"""
from time import perf_counter
from typing import NamedTuple

import numpy as np

FREQUENT = 0.07         # terms in a larger share of the documents are in the dense matrix
BLOCK = 128             # queries in one product of matrices
MAX_IDS = 10 ** 8         # token ids are smaller: an index has arrays as long as the largest id


def idf_lucene(N, df):
    """idf (V,) of terms that df (V,) of N documents contain"""
    return np.log(1 + (N - df + 0.5) / (df + 0.5))


# --------------------------------------------------------------------------------------------------
# texts
class TermCounts(NamedTuple):
    """How often each term occurs in each text that has it, sorted by text, then by term"""
    text: np.ndarray                                                # (P,) number of the text
    term: np.ndarray                                                # (P,) token id
    tf: np.ndarray                                                  # (P,) how often it occurs there

    def select(self, part):
        """Some of the P pairs, by a mask (P,) or a slice"""
        return TermCounts(self.text[part], self.term[part], self.tf[part])


def count(texts):
    """Counts the terms of texts, arrays of token ids -> TermCounts
    Raises ValueError for an id below 0 or from MAX_IDS on, TypeError for one that is no integer.

    >>> [x.tolist() for x in count([[7, 5, 7], [], [5]])]
    [[0, 0, 2], [5, 7, 5], [1, 2, 1]]"""
    # the tokens of all texts, each text sorted; numpy regards an empty list as one of floats
    tokens = [np.empty(0, np.int64)]
    tokens += [np.sort(text) for text in texts if len(text)]
    tokens = np.concatenate(tokens, dtype=np.int64)                 # TypeError for floats
    if len(tokens):
        smallest = tokens.min()
        largest = tokens.max()
        if smallest < 0 or largest >= MAX_IDS:
            raise ValueError(f'token ids must be 0 to {MAX_IDS - 1}, but these are {smallest} to '
                             f'{largest}')

    # a pair begins where the text or the token differs from the one before
    text = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    is_new_text = np.diff(text, prepend=-1) != 0
    is_new_token = np.diff(tokens, prepend=-1) != 0
    begin = np.flatnonzero(is_new_text | is_new_token)              # (P,)
    tf = np.diff(begin, append=len(tokens))
    return TermCounts(text[begin], tokens[begin], tf)


# --------------------------------------------------------------------------------------------------
# the best documents
def lower_bound(scores, k):
    """A score that at least k of scores (N,) reach, without a sort of all scores: the k-th largest
    of the maxima of some 16 · k groups, since maxima are scores of different documents. Two of the
    k best are seldom in one group, so not many more than k documents reach it."""
    size = max(1, len(scores) // (16 * k))                          # of a group
    groups = len(scores) // size
    maxima = scores[:size * groups].reshape(size, groups).max(0)    # (groups,)
    return np.sort(maxima)[-k]


def best_documents(scores, k):
    """The ids (n,) of the k highest scores (N,), best first; fewer if fewer are above 0"""
    is_candidate = scores > 0                                       # (N,)
    if 0 < k <= len(scores):
        is_candidate &= scores >= lower_bound(scores, k)
    ids = np.flatnonzero(is_candidate)
    order = np.argsort(-scores[ids], kind='stable')                 # equal scores stay by id
    return ids[order[:k]]


# --------------------------------------------------------------------------------------------------
# the index
def join_ranges(first, size):
    """All ranges first[i], ..., first[i] + size[i] - 1 in one array.

    >>> join_ranges(np.array([5, 20]), np.array([2, 3])).tolist()
    [5, 6, 20, 21, 22]"""
    # range i begins at position begin[i] of the result: a number is first[i] + position - begin[i]
    begin = size.cumsum() - size
    return np.repeat(first - begin, size) + np.arange(size.sum())


class BM25:
    """An index of N documents, arrays of token ids.
    idf: by token id, of another corpus; terms beyond it count 0. None: of these documents."""
    def __init__(self, docs, k1=1.2, b=0.75, idf=None):
        # the weight of each pair (document, term)
        N = self.N = len(docs)
        doc, term, tf = count(docs)                                 # (P,)
        df = self.df = np.bincount(term)                            # (V,)
        if idf is None:
            idf = idf_lucene(N, df)
        idf = np.pad(idf, (0, len(df)))                             # zeros for terms beyond it
        length = np.bincount(doc, weights=tf, minlength=N)          # (N,)
        norm = k1 * (1 - b + b * length * N / max(1, length.sum()))
        weight = idf[term] * tf / (tf + norm[doc])                  # (P,)

        # frequent terms: a dense matrix
        self.is_frequent = df > FREQUENT * N                        # (V,)
        self.row = self.is_frequent.cumsum() - 1                    # (V,) right for frequent ones
        self.dense = np.zeros((self.is_frequent.sum(), N))          # (F, N)
        in_matrix = self.is_frequent[term]                          # (P,)
        row = self.row[term[in_matrix]]
        self.dense[row, doc[in_matrix]] = weight[in_matrix]

        # Postings, sorted by term: those of term t are numbers first[t] to first[t] + df[t] - 1.
        # Frequent terms keep unused postings, so that first is a plain cumsum of df.
        order = term.argsort(kind='stable')
        self.doc, self.weight = doc[order], weight[order]           # (P,)
        self.first = df.cumsum() - df                               # (V,)

    def search(self, query, k):
        """The k documents with the highest scores, fewer if fewer share a term with the query.
        query: an array of token ids -> ids (n,), scores (n,) fp32, best first"""
        [scores] = self.scores([query])
        ids = best_documents(scores, k)
        return ids, scores[ids]

    def search_many(self, queries, k, limit=None):
        """The same for Q queries. limit (Q,): query i searches documents 0 to limit[i] - 1 only.
        -> ids (Q, k), scores (Q, k) fp32; -1 and -inf where a query has fewer than k documents"""
        ids = np.full((len(queries), k), -1)
        scores = np.full(ids.shape, -np.inf, np.float32)
        for i, all_scores in enumerate(self.scores(queries)):       # (N,)
            if limit is not None:
                all_scores[limit[i]:] = 0
            best = best_documents(all_scores, k)
            ids[i, :len(best)] = best
            scores[i, :len(best)] = all_scores[best]
        return ids, scores

    def scores(self, queries):
        """Yields the scores of all documents, (N,) fp32, for each query; 0: no term is shared.
        Each array is a new one: the caller may change it."""
        frequent_scores = np.empty((BLOCK, self.N))                 # allocated once for all blocks
        for start in range(0, len(queries), BLOCK):
            block = queries[start:start + BLOCK]                    # Q queries
            counts = count(block)
            counts = counts.select(counts.term < len(self.df))      # of terms in the index
            is_frequent = self.is_frequent[counts.term]             # (P,)

            # frequent terms of the block: a product of matrices
            query, term, tf = counts.select(is_frequent)
            matrix = np.zeros((len(block), len(self.dense)))        # (Q, F)
            matrix[query, self.row[term]] = tf
            np.matmul(matrix, self.dense, out=frequent_scores[:len(block)])

            # rare terms, by postings: those of query i are pairs bounds[i] to bounds[i + 1] - 1
            rare = counts.select(~is_frequent)
            bounds = np.searchsorted(rare.text, np.arange(len(block) + 1))
            for i in range(len(block)):
                of_query = rare.select(slice(bounds[i], bounds[i + 1]))
                scores = frequent_scores[i] + self.rare_scores(of_query)
                yield scores.astype(np.float32)

    def rare_scores(self, counts):
        """The part (N,) of a query's scores that its rare terms contribute. counts: TermCounts of
        these terms"""
        df = self.df[counts.term]
        postings = join_ranges(self.first[counts.term], df)         # numbers of all their postings

        # a term's weights count once for each of its occurrences in the query
        weight = self.weight[postings] * np.repeat(counts.tf, df)
        return np.bincount(self.doc[postings], weight, self.N)


# --------------------------------------------------------------------------------------------------
# comparison with bm25s
def timed(function, *args, **kwargs):
    """-> what function returns, and its time in seconds"""
    start = perf_counter()
    result = function(*args, **kwargs)
    return result, perf_counter() - start


def print_times(name, index_s, search_s, Q):
    """Prints the time of an index, in seconds, and of one of Q queries, in ms."""
    ms = 1000 * search_s / Q
    print(f'{name:8} index {index_s:5.2f} s    a query {ms:6.2f} ms')


def compare(N, length, Q=500):
    """Prints times of this file and of bm25s for N random documents, with frequencies as in a text
    (Zipf's law: 1 / rank). The first Q search their 20 nearest."""
    try:
        import bm25s
    except ImportError:
        raise SystemExit('bm25.py is compared with bm25s: pip install bm25s')
    docs = 50_000 ** np.random.default_rng(0).random((N, length))
    docs = docs.astype(int)                                         # 1 to 49,999
    lists = docs.tolist()
    vocabulary = {term: term for term in range(50_000)}             # term -> its id in bm25s

    index, index_s = timed(BM25, docs)
    (ids, scores), search_s = timed(index.search_many, docs[:Q], 20)
    print(f'\n{N:,} documents of {length:,} terms')
    print_times('bm25.py', index_s, search_s, Q)

    library = bm25s.BM25(method='lucene', k1=1.2, b=0.75)
    _, index_s = timed(library.index, (lists, vocabulary), show_progress=False)
    results, search_s = timed(library.retrieve, lists[:Q], k=20, show_progress=False)
    print_times('bm25s', index_s, search_s, Q)

    # bm25s sums in fp32 and ranks equal scores in any order, so some ids differ, but no score does
    equal_ids = (ids == results.documents).mean()
    equal_scores = np.isclose(scores, results.scores, rtol=1e-4).mean()
    print(f'equal: {equal_ids:.2%} of the ids, {equal_scores:.2%} of the scores')


if __name__ == '__main__':
    compare(2300, 3072)
    compare(80_000, 16)
