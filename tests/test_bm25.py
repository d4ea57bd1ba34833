"""bm25.py against its formula in Python's floats."""
from math import inf

import numpy as np
import pytest
from pytest import approx, mark

import bm25
from bm25 import BM25
from helpers import formula, ranking


def corpus(N, length, V, seed=0):
    """Zipf-distributed terms: some are frequent (dense matrix), most are rare (postings)."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, V + 1)
    p /= p.sum()
    return [rng.choice(V, n, p=p) for n in rng.integers(0, 2 * length, N)]


@mark.parametrize('idf', [None, np.linspace(5, 0.1, 90)])
@mark.parametrize('frequent', [0.0, 0.07, 1.0])
@mark.parametrize('N, length, V', [(1, 5, 4), (7, 6, 12), (60, 30, 600)])
def test_equals_the_formula(N, length, V, frequent, idf, monkeypatch):
    """All terms in the dense matrix, some or none; with the idf of another corpus; limits."""
    monkeypatch.setattr(bm25, 'FREQUENT', frequent)
    monkeypatch.setattr(bm25, 'BLOCK', 3)                           # 7 queries in three blocks
    docs = corpus(N, length, V)
    queries = corpus(6, 8, V, seed=1)
    queries.append([max(np.hstack(docs)) + 1, 0, 10 ** 6])          # unknown terms and term 0

    index = BM25(docs, 1.5, 0.6, idf)
    ids, scores = index.search_many(queries, 10)
    limit = np.arange(7) * N // 6
    limited, _ = index.search_many(queries, 10, limit)
    assert scores.shape == (7, 10)
    assert scores.dtype == np.float32

    for i, query in enumerate(queries):
        expected = formula(docs, query, 1.5, 0.6, idf)
        best = ranking(expected, 10)
        n = len(best)
        assert ids[i, :n].tolist() == best
        assert scores[i, :n] == approx([expected[j] for j in best], rel=1e-6)
        assert set(ids[i, n:]) <= {-1}
        assert set(scores[i, n:]) <= {-inf}

        below = [j for j in limited[i] if j >= 0]
        assert below == ranking(expected, 10, limit[i])
        single_ids, single_scores = index.search(query, 10)
        assert single_ids.tolist() == best
        assert single_scores.tolist() == scores[i, :n].tolist()


def test_equal_scores_are_in_order_of_id():
    """Where k cuts through them, and where equal documents have their terms in another order."""
    a, b, query = np.random.default_rng(0).integers(0, 300, (3, 200))
    docs = [np.roll(a, i) for i in range(100)]
    for i in range(0, 100, 3):
        docs[i] = np.roll(b[:150], i)
    expected = formula(docs, query)
    for k in (1, 40, 80, 150):
        ids, scores = BM25(docs).search(query, k)                   # k1 and b as by default
        assert ids.tolist() == ranking(expected, k)
        assert np.allclose(scores, [expected[i] for i in ids])


@mark.parametrize('ids', [[3, -1], [10 ** 10], [2 ** 64 - 1], [0.5]])
def test_what_is_no_token_id(ids):
    """In documents or in queries"""
    for call in (BM25([[0], [3, 3]]).search_many, BM25):
        with pytest.raises((ValueError, TypeError), match='^.*$'):  # one line
            call([[0], ids], 1)


@mark.parametrize('dtype', [np.uint8, np.uint64])
def test_integers_of_every_type(dtype):
    array = np.array([1, 0, 1], dtype)
    assert BM25([array, array[:1]]).search(array, 2)[0].tolist() == [0, 1]


@mark.parametrize('docs', [[], [[], []], [[1], [2, 3]]])
def test_nothing_to_find(docs):
    index = BM25(docs)
    ids, scores = index.search_many([[7, 8], []], 3)
    assert ids.tolist() == [[-1] * 3] * 2
    assert (scores == -inf).all()
    assert index.search_many([], 3)[0].shape == (0, 3)
    assert index.search_many([[1]], 0)[0].shape == (1, 0)
