"""bm25.py against its formula in Python's floats."""
import doctest, sys
from math import inf

import numpy as np
import pytest
from pytest import approx, mark

import bm25
from bm25 import BM25, best_documents
from helpers import formula, one_line, ranking


def corpus(N, length, V, seed=0):
    """N texts of 0 to 2 length - 1 terms, Zipf-distributed: some terms are frequent (dense matrix),
    most are rare (postings)."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, V + 1)
    p /= p.sum()
    return [rng.choice(V, n, p=p) for n in rng.integers(0, 2 * length, N)]


def assert_ranks(ids, scores, expected, k, limit=None):
    """A row of search_many equals the k best of the expected scores."""
    best = ranking(expected, k, limit)
    n = len(best)
    assert ids[:n].tolist() == best
    assert scores[:n] == approx([expected[j] for j in best], rel=6.1e-8)     # rounded to fp32
    assert set(ids[n:]) <= {-1}
    assert set(scores[n:]) <= {-inf}


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
    limited = index.search_many(queries, 10, limit)
    assert scores.shape == (7, 10)
    assert scores.dtype == np.float32

    for i, query in enumerate(queries):
        expected = formula(docs, query, 1.5, 0.6, idf)
        assert_ranks(ids[i], scores[i], expected, 10)
        assert_ranks(limited[0][i], limited[1][i], expected, 10, limit[i])
        single_ids, single_scores = index.search(query, 10)
        n = len(single_ids)
        assert n == len(ranking(expected, 10))
        assert single_ids.tolist() == ids[i, :n].tolist()
        assert single_scores.tolist() == scores[i, :n].tolist()


@mark.parametrize('idf', [None, np.linspace(5, 0.1, 300)])
@mark.parametrize('N, length, V', [(1500, 4, 400), (50, 300, 3000)])
def test_short_and_long_documents(N, length, V, idf):
    """Many short documents, of which many have equal scores, and a few long ones. They search each
    other. Terms repeat, and some texts are empty."""
    docs = corpus(N, length, V)
    docs[5] = np.full(length, 3)                                    # one term
    docs[-1] = docs[2] = docs[9][::-1]                              # equal, in another order
    numbers = [2, 5, 9, 30, N - 1]
    numbers += [i for i in range(N) if len(docs[i]) == 0][:1]
    queries = [docs[i] for i in numbers]
    index = BM25(docs, idf=idf)
    limit = np.arange(len(numbers)) * N // 4

    expected = [formula(docs, query, idf=idf) for query in queries]
    for k in (1, 20, N // 3, 2 * N):
        ids, scores = index.search_many(queries, k)
        limited = index.search_many(queries, k, limit)
        for i in range(len(queries)):
            assert_ranks(ids[i], scores[i], expected[i], k)
            assert_ranks(limited[0][i], limited[1][i], expected[i], k, limit[i])


@mark.parametrize('N', [0, 1, 2, 19, 320, 5000])
@mark.parametrize('values', ['distinct', 'tied', 'equal', 'zeros', 'one is not 0', 'last are best'])
def test_the_best_documents(N, values):
    """Against Python's stable sort. The k best are found from a lower bound of the k-th score, also
    where many scores equal it, and where few or no scores are above 0."""
    scores = np.random.default_rng(0).permutation(N).astype(np.float32)
    if values == 'tied':
        scores %= 3
    if values == 'equal':
        scores[:] = 7
    if values in ('zeros', 'one is not 0'):
        scores[:] = 0
    if values == 'one is not 0':
        scores[-1:] = 0.5
    if values == 'last are best':
        scores.sort()
    ordered = sorted(range(N), key=lambda i: -scores[i])
    positive = [i for i in ordered if scores[i] > 0]
    for k in (0, 1, 7, 20, N - 1, N, N + 5):
        if k >= 0:
            assert best_documents(scores, k).tolist() == positive[:k]


def test_a_bound_leaves_few_documents_to_sort():
    """Sorting all scores, or partitioning them where many are 0, took most of the time."""
    scores = np.random.default_rng(0).random(80_000)
    bound = bm25.lower_bound(scores, 20)
    assert 20 <= (scores >= bound).sum() <= 30


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


def test_scores_are_new_arrays(monkeypatch):
    """A caller may keep them, or change them before it takes the next one, as search_many does."""
    monkeypatch.setattr(bm25, 'BLOCK', 3)
    docs = corpus(60, 5, 40)
    index = BM25(docs)
    kept = list(index.scores(docs))
    for doc, scores in zip(docs, kept):
        assert scores == approx(formula(docs, doc), rel=1e-6)
    changed = []
    for scores in index.scores(docs):
        changed.append(scores.copy())
        scores[:] = -1
    assert np.array_equal(changed, kept)


@mark.parametrize('ids', [[3, -1], [10 ** 10], [2 ** 64 - 1], [0.5]])
def test_what_is_no_token_id(ids):
    """In documents or in queries"""
    for call in (BM25([[0], [3, 3]]).search_many, BM25):
        with pytest.raises((ValueError, TypeError), match='^.*$'):  # one line
            call([[0], ids], 1)


@mark.parametrize('dtype', [np.uint8, np.uint64])
def test_integers_of_every_type(dtype):
    """Next to int64 and to empty lists, too: numpy joins uint64 and int64 to floats."""
    array = np.array([1, 0, 1], dtype)
    docs = [array, array[:1], np.array([2]), []]
    assert BM25(docs).search(array, 3)[0].tolist() == [0, 1]
    ids, _ = BM25(docs).search_many([[], [2], array], 1)
    assert ids.tolist() == [[-1], [2], [0]]


@mark.parametrize('docs', [[], [[], []], [[1], [2, 3]]])
def test_nothing_to_find(docs):
    index = BM25(docs)
    ids, scores = index.search_many([[7, 8], []], 3)
    assert ids.tolist() == [[-1] * 3] * 2
    assert (scores == -inf).all()
    assert index.search_many([], 3)[0].shape == (0, 3)
    assert index.search_many([[1]], 0)[0].shape == (1, 0)


def test_without_bm25s(monkeypatch):
    monkeypatch.setitem(sys.modules, 'bm25s', None)
    assert one_line(bm25.compare, 9, 9) == 'bm25.py is compared with bm25s: pip install bm25s'


def test_the_examples_in_docstrings():
    results = doctest.testmod(bm25)
    assert results.attempted == 2
    assert results.failed == 0
