"""
BM25: which documents share the most, and the rarest, terms with a query? Nothing is learned.

    Robertson et al., "Okapi at TREC-3", 1994, in Lucene's form: Kamphuis, de Vries, Boytsov and
    Lin, "Which BM25 Do You Mean?", ECIR 2020, Table 1

    score(q, d)  = Σ_{t in q} weight(t, d)                      once for each occurrence of t in q
    weight(t, d) = idf(t) · tf / (tf + k1 · (1 - b + b · len(d) / mean len))
    idf(t)       = log(1 + (N - df + 0.5) / (df + 0.5))

Document d has the term t tf times; df of the N documents have it; there are V terms. The search of
a block of Q queries is a product of their counts (Q, V) and the weights (V, N). The weights of the
H terms that many documents have are a dense matrix, for BLAS. Other terms have postings: a list of
(document, weight). P counts the pairs (text, term) of a list of texts. Sums are in fp64 and rounded
to fp32 at the end, so that their order changes no rank. Of equal scores, the lower id comes first.

    $ pip install bm25s
    $ python bm25.py        random documents search each other, here and with bm25s; it prints
                            after half a minute
"""
from time import perf_counter

import numpy as np

FREQUENT = 0.07         # terms in a larger share of the documents are in the dense matrix
BLOCK = 256             # queries in one product of matrices
LIMIT = 10 ** 8         # of token ids: an index has arrays of as many numbers as the largest id


def idf_lucene(N, df):
    """idf (V,) of terms that df (V,) of N documents have"""
    return np.log(1 + (N - df + 0.5) / (df + 0.5))


def count(texts):
    """The terms of each text, and tf, the number of times that each occurs in it.
    texts: arrays (len,) of token ids -> (3, P): text, term, tf, sorted by text, then by term
    Raises ValueError for an id below 0 or from LIMIT on, TypeError for one that is no integer."""
    pairs = [np.zeros((3, 0), int)]                                 # if all texts are empty
    for i, text in enumerate(texts):
        if len(text):
            terms, tf = np.unique(text, return_counts=True)
            if not 0 <= terms[0] <= terms[-1] < LIMIT:
                raise ValueError(f'token ids {terms[0]} to {terms[-1]}: 0 to {LIMIT - 1} can be')
            rows = np.broadcast_arrays(i, terms, tf)
            pairs.append(np.stack(rows, dtype=int))                 # of uint64 too, not of floats
    return np.hstack(pairs)


def join_ranges(first, size):
    """All ranges first[i], ..., first[i] + size[i] - 1 in one array.

    >>> join_ranges(np.array([5, 20]), np.array([2, 3]))
    array([ 5,  6, 20, 21, 22])"""
    # range i begins at position begin[i] of the result: a number is first[i] + position - begin[i]
    begin = size.cumsum() - size
    return np.repeat(first - begin, size) + np.arange(size.sum())


def best_documents(scores, k):
    """The ids (n,) of the k highest scores (N,), best first; fewer if fewer are above 0"""
    ids = np.flatnonzero(scores > 0)
    if k < len(ids):
        kth = np.partition(scores, -k)[-k]                          # the k-th best score
        ids = np.flatnonzero(scores >= kth)                         # all that equal it, too
    order = np.argsort(-scores[ids], kind='stable')                 # of equal scores by id
    return ids[order[:k]]


class BM25:
    """An index of N documents, arrays (len,) of token ids.
    idf: (V,) by token id, of another corpus; terms beyond it count 0. None: of these documents."""
    def __init__(self, docs, k1=1.2, b=0.75, idf=None):
        # the weight of each pair (document, term)
        N = self.N = len(docs)
        doc, term, tf = count(docs)                                 # (P,)
        df = self.df = np.bincount(term)                            # (V,)
        if idf is None:
            idf = idf_lucene(N, df)
        idf = np.pad(idf, (0, len(df)))                             # 0 for terms beyond idf
        length = np.bincount(doc, weights=tf, minlength=N)          # (N,)
        norm = k1 * (1 - b + b * length * N / max(1, length.sum()))
        weight = idf[term] * tf / (tf + norm[doc])                  # (P,)

        # the dense matrix of frequent terms
        frequent = self.frequent = df > FREQUENT * N                # (V,)
        self.row = frequent.cumsum() - 1                            # (V,) of these in the matrix
        self.dense = np.zeros((frequent.sum(), N))                  # (H, N)
        in_matrix = frequent[term]                                  # (P,)
        self.dense[self.row[term[in_matrix]], doc[in_matrix]] = weight[in_matrix]

        # postings: documents and weights by term, then by document. Those of term t are at first[t]
        # to first[t] + df[t] - 1. Frequent terms have postings, too: `first` needs only df then.
        order = term.argsort(kind='stable')
        self.doc, self.weight = doc[order], weight[order]
        self.first = df.cumsum() - df                               # (V,)

    def search(self, query, k):
        """The k documents that score highest, fewer if fewer share a term with the query.
        query (len,) -> ids (n,), scores (n,) fp32, best first"""
        [scores] = self.scores([query])
        ids = best_documents(scores, k)
        return ids, scores[ids]

    def search_many(self, queries, k, limit=None):
        """The same for Q queries. limit (Q,): query i searches documents 0 to limit[i] - 1 only.
        -> ids (Q, k), scores (Q, k) fp32; where a row has fewer than k documents, -1 and -inf"""
        ids = np.full((len(queries), k), -1)
        scores = np.full(ids.shape, -np.inf, np.float32)
        for i, s in enumerate(self.scores(queries)):                # s (N,)
            if limit is not None:
                s[limit[i]:] = 0
            best = best_documents(s, k)
            ids[i, :len(best)] = best
            scores[i, :len(best)] = s[best]
        return ids, scores

    def scores(self, queries):
        """Yields the scores of all documents, (N,) fp32, for each query; 0: no term is shared."""
        for start in range(0, len(queries), BLOCK):
            block = queries[start:start + BLOCK]                    # Q queries
            pairs = count(block)                                    # (3, P)
            pairs = pairs[:, pairs[1] < len(self.row)]              # of known terms
            frequent = self.frequent[pairs[1]]

            # frequent terms: a product of matrices
            query, term, tf = pairs[:, frequent]
            counts = np.zeros((len(block), len(self.dense)))        # (Q, H)
            counts[query, self.row[term]] = tf
            scores = counts @ self.dense                            # (Q, N)

            # rare terms: for each query, the postings of its terms
            rare = pairs[:, ~frequent]
            bounds = np.searchsorted(rare[0], range(1, len(block)))
            for i, (_, term, tf) in enumerate(np.split(rare, bounds, axis=1)):
                df = self.df[term]
                postings = join_ranges(self.first[term], df)
                weight = self.weight[postings] * np.repeat(tf, df)
                scores[i] += np.bincount(self.doc[postings], weight, self.N)
            scores = scores.astype(np.float32)
            yield from scores


def benchmark():
    """2,300 documents of 3,072 terms, with frequencies as in a text (Zipf's law), search their 20
    nearest, here and with bm25s."""
    import bm25s
    docs = np.random.default_rng(0).zipf(1.3, (2300, 3072)) % 50_000
    lists = docs.tolist()
    vocabulary = dict(enumerate(range(docs.max() + 1)))

    start = perf_counter()
    ids, _ = BM25(docs).search_many(docs, 20)
    done = perf_counter()
    library = bm25s.BM25(method='lucene', k1=1.2, b=0.75)
    library.index((lists, vocabulary), show_progress=False)
    library_ids, _ = library.retrieve(lists, k=20, show_progress=False)
    library_done = perf_counter()

    print(f'2,300 documents, each searches its 20 nearest: {done - start:.2f} s, bm25s '
          f'{library_done - done:.2f} s; {(ids == library_ids).mean():.2%} of the ids are equal')


if __name__ == '__main__':
    benchmark()
