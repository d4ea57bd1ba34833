"""
BM25: which documents share the most, and the rarest, terms with a query? Nothing is learned.

    Robertson et al., "Okapi at TREC-3", 1994, in Lucene's form: Kamphuis, de Vries, Boytsov and
    Lin, "Which BM25 Do You Mean?", ECIR 2020, Table 1

    score(q, d)  = Σ_{t in q} weight(t, d)                      once for each occurrence of t in q
    weight(t, d) = idf(t) · tf / (tf + k1 · (1 - b + b · len(d) / mean len))
    idf(t)       = log(1 + (N - df + 0.5) / (df + 0.5))

Document d has the term t tf times; df of the N documents have it. A search multiplies counts (Q, V)
by weights (V, N). The weights of the H terms that many documents have are a dense matrix, for BLAS;
other terms have postings: a list of (document, weight). P counts the pairs (text, term) of a list
of texts. Sums are in fp64 and rounded to fp32 at the end, so that their order changes no rank. Of
equal scores, the lower id comes first.

    $ python bm25.py        segments of the .py files in Python's lib folder search each other
"""
import re, sysconfig, time
from pathlib import Path

import numpy as np

FREQUENT = 0.07         # terms in a larger share of the documents are in the dense matrix
BLOCK = 256             # queries in one product of matrices


def idf_lucene(N, df):
    return np.log(1 + (N - df + 0.5) / (df + 0.5))


def count(texts):
    """How often each text has each term.
    texts: arrays (len,) of token ids -> (3, P): text, term, tf, sorted by text, then by term"""
    found = [np.array(np.unique(text, return_counts=True)) for text in texts]   # (2, its terms)
    assert all(x.dtype.kind == 'i' or not x.size for x in found), 'ids are integers'
    text = np.repeat(np.arange(len(texts)), [x.shape[1] for x in found])
    return np.vstack([text, np.hstack([np.zeros((2, 0)), *found])]).astype(int)


class BM25:
    """An index of N documents, arrays (len,) of token ids.
    idf: (V,) by token id, of another corpus; terms beyond it count 0. None: of these documents."""
    def __init__(self, docs, k1=1.2, b=0.75, idf=None):
        N = self.N = len(docs)
        doc, term, tf = count(docs)                                 # (P,)
        df = np.bincount(term)                                      # (V,)
        if idf is None:
            idf = idf_lucene(N, df)
        idf = np.pad(idf, (0, len(df)))
        length = np.bincount(doc, tf, N)                            # (N,)
        norm = k1 * (1 - b + b * length * N / max(1, length.sum()))
        weight = idf[term] * tf / (tf + norm[doc])                  # (P,)

        frequent = df > FREQUENT * N                                # (V,)
        self.row = np.where(frequent, frequent.cumsum() - 1, -1)    # (V,) in the dense part, or -1
        dense = frequent[term]                                      # (P,)
        self.dense = np.zeros((frequent.sum(), N))                  # (H, N)
        self.dense[self.row[term[dense]], doc[dense]] = weight[dense]
        order = term.argsort(kind='stable')                         # by term, then by document
        self.doc, self.weight = doc[order], weight[order]           # postings, frequent terms too
        self.first, self.df = df.cumsum() - df, df                  # (V,) where they begin

    def search(self, query, k):
        """The k documents that score highest, fewer if fewer share a term with the query.
        query (len,) -> ids (n,), scores (n,) fp32, best first"""
        (ids,), (scores,) = self.search_many([query], k)
        return ids[ids >= 0], scores[ids >= 0]

    def search_many(self, queries, k, limit=None):
        """The same for Q queries. limit (Q,): query i searches documents 0 to limit[i] - 1 only.
        -> ids (Q, k), scores (Q, k) fp32; where a row has fewer than k documents, -1 and -inf"""
        Q, top = len(queries), min(k, self.N)
        ids, scores = np.full((Q, k), -1), np.full((Q, k), -np.inf, np.float32)
        for i in range(0, Q if top else 0, BLOCK):
            for q, s in enumerate(self.scores(queries[i:i + BLOCK]), i):        # s (N,)
                if limit is not None:
                    s[limit[q]:] = 0
                kth = np.partition(s, -top)[-top]                   # the k-th best score
                best = np.flatnonzero((s >= kth) & (s > 0))         # by id, with all equal to kth
                best = best[np.argsort(-s[best], kind='stable')][:k]
                ids[q, :len(best)] = best
                scores[q, :len(best)] = s[best]
        return ids, scores

    def scores(self, queries):
        """The scores of all documents, (Q, N) fp32; 0 where no term is shared."""
        pairs = count(queries)                                      # (3, P)
        pairs = pairs[:, pairs[1] < len(self.row)]                  # of known terms
        rare = self.row[pairs[1]] < 0
        query, term, tf = pairs[:, ~rare]
        counts = np.zeros((len(queries), len(self.dense)))          # (Q, H)
        counts[query, self.row[term]] = tf
        scores = counts @ self.dense                                # (Q, N)

        query, term, tf = pairs[:, rare]
        for i in np.unique(query):
            own = slice(*np.searchsorted(query, [i, i + 1]))        # the terms of query i
            n, first = self.df[term[own]], self.first[term[own]]
            at = np.repeat(first - n.cumsum() + n, n) + np.arange(n.sum())  # of their postings
            weight = self.weight[at] * np.repeat(tf[own], n)
            scores[i] += np.bincount(self.doc[at], weight, self.N)
        return scores.astype(np.float32)


def benchmark():
    """Each segment of the words of Python's lib folder searches its 20 nearest; bm25s too."""
    try:
        import bm25s
    except ImportError:
        raise SystemExit('bm25.py is compared with bm25s: pip install bm25s')
    number, tokens = {}, []
    for path in sorted(Path(sysconfig.get_path('stdlib')).rglob('*.py')):
        words = re.findall(r'\w+|[^\w\s]', path.read_text('utf-8', 'replace'))
        tokens += [number.setdefault(word, len(number)) for word in words]
        if len(tokens) > 2300 * 3072:
            break
    docs = np.array(tokens[:len(tokens) // 3072 * 3072]).reshape(-1, 3072)
    lists, start = docs.tolist(), time.perf_counter()
    ids, _ = BM25(docs).search_many(docs, 20)
    done = time.perf_counter()
    other = bm25s.BM25(method='lucene', k1=1.2, b=0.75, backend='numpy')
    other.index((lists, {t: t for t in range(len(number))}), show_progress=False)
    other_ids, _ = other.retrieve(lists, k=20, show_progress=False)
    print(f'{len(docs):,} segments: {done - start:.2f} s, bm25s {time.perf_counter() - done:.2f}'
          f' s, {(ids == other_ids).mean():.2%} of the ids are equal')


if __name__ == '__main__':
    benchmark()
