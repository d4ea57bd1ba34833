"""
bm25.py against its formula in Python's floats, by hand, and against the package bm25s.

    $ python -m pytest tests/test_bm25.py
"""
from collections import Counter
from math import inf, log

import numpy as np
import pytest

import bm25
from bm25 import BM25, count


def formula(docs, query, k1=1.2, b=0.75, idf=None):
    """The score of each document, term by term from the equations in the header."""
    docs = [Counter(np.asarray(doc).tolist()) for doc in docs]
    N, mean = len(docs), sum(doc.total() for doc in docs) / len(docs)

    def weight(t, doc):
        df = sum(t in other for other in docs)
        idf_t = log(1 + (N - df + 0.5) / (df + 0.5)) if idf is None else (*idf, *[0] * 9999)[t]
        return idf_t * doc[t] / (doc[t] + k1 * (1 - b + b * doc.total() / mean))

    return [sum(weight(t, doc) for t in np.asarray(query).tolist()) for doc in docs]


def ranking(scores, k, limit=None):
    """Ids of the k largest scores above 0, the lower id first among equals."""
    found = [i for i in range(len(scores))[:limit] if scores[i] > 1e-12]
    return sorted(found, key=lambda i: (-round(scores[i], 9), i))[:k]


def corpus(N, length, V, seed=0):
    """Zipf-distributed terms: some are frequent (dense matrix), most are rare (postings)."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, V + 1)
    return [rng.choice(V, rng.integers(0, 2 * length), p=p / p.sum()) for _ in range(N)]


@pytest.mark.parametrize('frequent', [0.0, 0.07, 1.0])
@pytest.mark.parametrize('N, length, V', [(1, 5, 4), (7, 6, 12), (60, 30, 600)])
def test_equals_the_formula(N, length, V, frequent, monkeypatch):
    """Whether all terms are in the dense matrix, some or none; limits and lists of queries too."""
    monkeypatch.setattr(bm25, 'FREQUENT', frequent)
    monkeypatch.setattr(bm25, 'BLOCK', 4)                           # 7 queries in two blocks
    docs, queries = corpus(N, length, V), corpus(6, 8, V, seed=1) + [[V + 9, 0, 10 ** 6]]
    index, limit = BM25(docs, 1.5, 0.6), np.arange(7) * N // 6
    ids, scores = index.search_many(queries, 10)
    below, _ = index.search_many(queries, 10, limit)
    assert ids.shape == scores.shape == (7, 10) and scores.dtype == np.float32
    for i, query in enumerate(queries):
        expected = formula(docs, query, 1.5, 0.6)
        best, n = ranking(expected, 10), (ids[i] >= 0).sum()
        assert ids[i].tolist() == best + [-1] * (10 - len(best))
        np.testing.assert_allclose(scores[i, :n], [expected[j] for j in best], rtol=1e-6)
        assert (scores[i, n:] == -inf).all()
        assert [j for j in below[i] if j >= 0] == ranking(expected, 10, limit[i])
        one, one_scores = index.search(query, 10)
        assert one.tolist() == best and one_scores.tolist() == scores[i, :n].tolist()


def test_three_documents_by_hand():
    """
    0: the cat sat    1: the cat the cat    2: dog     N = 3, lengths 3, 4, 1, mean 8/3, k1 = b = 1
    cat is in 2 of 3: idf = ln(1 + 1.5/2.5) = ln 1.6; 1 - b + b len/mean = 9/8 and 12/8
    0 has ln 1.6 · 1/(1 + 9/8) = 0.221178, 1 has ln 1.6 · 2/(2 + 12/8) = 0.268573.
    """
    the, cat, sat, dog = range(4)
    index = BM25([[the, cat, sat], [the, cat, the, cat], [dog]], k1=1, b=1)
    assert index.search([cat], 3)[0].tolist() == [1, 0]
    np.testing.assert_allclose(index.search([cat], 3)[1], [0.268573, 0.221178], atol=1e-6)
    np.testing.assert_allclose(index.search([cat, cat, 99], 1)[1], 2 * 0.268573, atol=2e-6)


def test_idf_of_another_corpus():
    """Terms beyond the array count 0; a document that shares only such terms is not found."""
    docs, idf = corpus(40, 20, 200), np.random.default_rng(2).permutation(np.linspace(0.1, 5, 90))
    for query in [*corpus(4, 9, 200, seed=1), np.array([90, 150, 199])]:
        expected = formula(docs, query, idf=idf)
        ids, scores = BM25(docs, idf=idf).search(query, 40)
        assert ids.tolist() == ranking(expected, 40)
        np.testing.assert_allclose(scores, [expected[j] for j in ids], rtol=1e-6)


def test_equal_scores_are_in_order_of_id():
    """Also where k cuts through them, and where equal documents have their terms in any order."""
    rng = np.random.default_rng(0)
    a, b, query = rng.integers(0, 300, (3, 200))
    docs = [rng.permutation(a if i % 3 else b) for i in range(100)]
    expected = formula(docs, query)
    for k in (1, 2, 40, 80, 100, 150):
        assert BM25(docs).search(query, k)[0].tolist() == ranking(expected, k)


def test_equals_bm25s():
    bm25s = pytest.importorskip('bm25s')
    docs = [doc for doc in corpus(200, 60, 1000) if len(doc)]
    query = np.concatenate(docs[:3])                                # bm25s refuses unknown terms
    theirs = bm25s.BM25(method='lucene', k1=1.2, b=0.75)
    theirs.index(([d.tolist() for d in docs], {t: t for t in range(1000)}), show_progress=False)
    scores = theirs.get_scores_from_ids(query.tolist())
    ids, found = BM25(docs).search(query, 20)
    np.testing.assert_allclose(found, scores[ids], rtol=1e-5)       # bm25s sums in fp32
    np.testing.assert_allclose(found, np.sort(scores)[::-1][:20], rtol=1e-5)


@pytest.mark.parametrize('docs', [[], [[], []], [[1], [2, 3]]])
def test_nothing_to_find(docs):
    ids, scores = BM25(docs).search_many([[7, 8], []], 3)
    assert (ids == -1).all() and (scores == -inf).all() and ids.shape == (2, 3)
    assert len(BM25(docs).search_many([], 3)[0]) == BM25(docs).search_many([[1]], 0)[0].size == 0


@pytest.mark.parametrize('bad', [[[1, 2], [0.5]], [['a']], [[1], [2, -3]], [[True]]])
def test_ids_are_integers_from_0(bad):
    for call in (BM25, BM25([[1, 2]]).scores, count):
        with pytest.raises(ValueError, match=f'text {len(bad) - 1}'):
            call(bad)
