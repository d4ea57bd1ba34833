"""
bm25.py against its definition, by hand, and against the package bm25s.

    $ python -m pytest tests/test_bm25.py
"""

from collections import Counter
from math import inf, log

import numpy as np
import pytest

import bm25
from bm25 import BM25

VARIANTS = ['lucene', 'robertson', 'atire', 'bm25l', 'bm25+']

def by_definition(docs, query, k1=1.2, b=0.75, variant='lucene'):
    """Every document's score, and that of a document without any term of the query, term by term in Python's floats."""
    docs = [Counter(np.asarray(d).tolist()) for d in docs]
    N, mean = len(docs), sum(d.total() for d in docs) / len(docs)

    def weight(t, d):
        df, tf = sum(t in e for e in docs), d[t]
        norm = 1 - b + b * d.total() / mean
        if df == 0:
            return 0
        if variant == 'lucene':
            return log(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 * norm)
        if variant == 'robertson':
            return max(0, log((N - df + 0.5) / (df + 0.5))) * tf / (tf + k1 * norm)
        if variant == 'atire':
            return log(N / df) * (k1 + 1) * tf / (tf + k1 * norm)
        if variant == 'bm25+':
            return log((N + 1) / df) * ((k1 + 1) * tf / (tf + k1 * norm) + 1)
        c = tf / norm if tf else 0
        return log((N + 1) / (df + 0.5)) * (k1 + 1) * (c + 0.5) / (k1 + c + 0.5)

    query = Counter(np.asarray(query).tolist())
    score = lambda d: sum(n * weight(t, d) for t, n in query.items())
    return np.array([score(d) for d in docs]), score(Counter())

def ranking(scores, floor, k):
    """What a search should find: above the floor, best first, the lower id first among equals."""
    best = sorted((i for i in range(len(scores)) if scores[i] > floor + 1e-12), key=lambda i: (-round(scores[i], 9), i))[:k]
    return best, scores[best]

def corpus(N, length, V, seed=0, ragged=True):
    """Zipf-distributed words, so that some are frequent (dense matrix) and most are rare (postings)."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, V + 1)
    return [rng.choice(V, rng.integers(0, 2 * length) if ragged else length, p=p / p.sum()) for _ in range(N)]

# ----------------------------------------------------------------------------------------------------------------------
# What it should compute

@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('N, length, V', [(1, 5, 4), (7, 6, 12), (90, 40, 900)])
def test_equals_the_definition(N, length, V, variant):
    """Short queries: the formula in floats of twice the precision, to within a few roundings of fp32."""
    docs = corpus(N, length, V)
    index = BM25(docs, 1.5, 0.6, variant)
    assert N < 90 or 0 < index.H < len(index.df)                # some terms in the matrix and some in the postings
    for query in corpus(5, 8, V, seed=1):
        scores, floor = by_definition(docs, query, 1.5, 0.6, variant)
        best, best_scores = ranking(scores, floor, 10)
        ids, found = index.search(query, 10)
        assert ids.tolist() == best
        assert ids.dtype == np.int64 and found.dtype == np.float32
        np.testing.assert_allclose(found, best_scores, rtol=1e-6)

def test_whole_segments_equal_the_definition():
    """TRIME's queries: a segment of 3,072 tokens with more than a thousand distinct terms, itself one of the documents."""
    docs = corpus(30, 3072, 20000, ragged=False)
    ids, found = BM25(docs).search_many(docs[:2], 21)
    assert len(np.unique(docs[0])) > 1000
    df = Counter(t for d in docs for t in set(d.tolist()))
    tfs = [Counter(d.tolist()) for d in docs]
    for i in range(2):
        scores = np.array([sum(n * log(1 + (30 - df[t] + 0.5) / (df[t] + 0.5)) * d[t] / (d[t] + 1.2)
                               for t, n in tfs[i].items()) for d in tfs])
        best, best_scores = ranking(scores, 0, 21)
        assert ids[i].tolist() == best and best[0] == i
        np.testing.assert_allclose(found[i], best_scores, rtol=1e-6)

def test_three_documents_by_hand():
    """
    0: the cat sat    1: the cat the cat    2: dog            N = 3, lengths 3, 4, 1, mean 8/3; k1 = 1, b = 1
    cat is in 2 of 3: idf = ln(1 + 1.5/2.5) = ln 1.6. norm = 9/8 and 12/8.
    cat scores ln 1.6 · 1/(1 + 9/8) = 0.221178 in 0 and ln 1.6 · 2/(2 + 12/8) = 0.268573 in 1.
    """
    the, cat, sat, dog = range(4)
    index = BM25([[the, cat, sat], [the, cat, the, cat], [dog]], k1=1, b=1)
    ids, scores = index.search([cat], 3)
    assert ids.tolist() == [1, 0]
    np.testing.assert_allclose(scores, [0.268573, 0.221178], atol=1e-6)
    assert index.search([dog], 3)[0].tolist() == [2]

@pytest.mark.parametrize('variant', VARIANTS)
def test_equals_bm25s(variant):
    bm25s = pytest.importorskip('bm25s')
    docs, V = corpus(200, 60, 1000, ragged=False), 1000
    query = corpus(1, 40, V, seed=3)[0]
    query = query[np.isin(query, np.concatenate(docs))]          # it refuses unknown ids
    theirs = bm25s.BM25(method=variant, k1=1.2, b=0.75, delta=bm25.DELTA_L if variant == 'bm25l' else bm25.DELTA_PLUS)
    theirs.index(([d.tolist() for d in docs], {t: t for t in range(V)}), show_progress=False)
    scores = theirs.get_scores_from_ids(query.tolist())
    ids, found = BM25(docs, variant=variant).search(query, 20)
    np.testing.assert_allclose(found, scores[ids], rtol=1e-5)    # it sums in fp32
    np.testing.assert_allclose(found, np.sort(scores)[::-1][:20], rtol=1e-5)

def test_a_repeated_term_counts_each_time():
    docs = corpus(50, 20, 100)
    index = BM25(docs)
    once, thrice = index.search([3, 60], 50), index.search([3, 60, 3, 60, 3, 60], 50)
    assert once[0].tolist() == thrice[0].tolist() and len(once[0]) > 3
    np.testing.assert_allclose(thrice[1], 3 * once[1], rtol=1e-6)

def test_robertson_holds_idf_at_zero():
    """A term in more than half of the documents would count against them; here it counts nothing, so it finds nothing."""
    docs = [[0, 1], [0, 2], [0, 3], [4, 5]]
    index = BM25(docs, variant='robertson')
    assert index.search([0], 4)[0].tolist() == []
    assert index.search([0, 2], 4)[0].tolist() == [1]

# ----------------------------------------------------------------------------------------------------------------------
# Laws

@pytest.mark.parametrize('variant', VARIANTS)
def test_search_equals_search_many(variant):
    """Bit for bit, whatever the other queries are and however many: a single query takes other roads through the code."""
    docs = corpus(400, 50, 3000)
    index = BM25(docs, variant=variant)
    queries = docs + [[], [10 ** 15]]
    ids, scores = index.search_many(queries, 7)
    assert ids.shape == scores.shape == (402, 7) and len(queries) > bm25.QUERIES
    for i in list(range(0, 400, 13)) + [400, 401]:
        one, one_scores = index.search(queries[i], 7)
        assert ids[i].tolist() == one.tolist() + [-1] * (7 - len(one))
        assert scores[i].tolist() == one_scores.tolist() + [-inf] * (7 - len(one))

@pytest.mark.parametrize('dense', [0.0, 0.02, 0.3, 1.0])
def test_the_dense_matrix_changes_nothing(dense, monkeypatch):
    """All terms in the matrix, none, or some: the same documents and bit for bit the same scores."""
    docs = corpus(300, 60, 2000)
    expected = BM25(docs).search_many(docs, 9)
    monkeypatch.setattr(bm25, 'DENSE', dense)
    index = BM25(docs)
    assert {0.0: index.H == len(index.df), 1.0: index.H == 0}.get(dense, 0 < index.H < len(index.df))
    for a, b in zip(expected, index.search_many(docs, 9)):
        assert np.array_equal(a, b)

def test_small_scratch_changes_nothing(monkeypatch):
    """Texts counted, multiplied and scored again a few at a time, as large corpora are."""
    docs = corpus(120, 30, 400)
    expected = BM25(docs).search_many(docs, 9)
    for name, value in dict(TEXTS=7, SCORES=600, TABLE=900, DOCS=3, DENSE_MAX=600).items():
        monkeypatch.setattr(bm25, name, value)
    index = BM25(docs)
    assert index.H == 5
    for a, b in zip(expected, index.search_many(docs, 9)):
        assert np.array_equal(a, b)

def test_ties_go_to_the_lower_id():
    """Also where k cuts through them, also when BLAS adds up equal documents in different orders."""
    rng = np.random.default_rng(0)
    a, b, query = rng.integers(0, 300, 200), rng.integers(0, 300, 200), rng.integers(0, 300, 250)
    docs = [rng.permutation(a if i % 3 else b) for i in range(100)]
    best = [i for i in range(100) if i % 3] + [i for i in range(100) if not i % 3]
    index = BM25(docs)
    if index.search(query, 1)[0][0] % 3 == 0:
        best = best[66:] + best[:66]
    hundred = index.search_many([query], 100)[1][0]
    assert len(set(hundred.tolist())) <= 2
    for k in (1, 2, 40, 80, 99, 100):
        assert index.search(query, k)[0].tolist() == best[:k]

def test_scores_that_fp32_cannot_tell_apart_are_ties():
    """A term asked for a million times drowns the other, whose weight grows from document to document."""
    docs = [[0] + [1] * (i + 1) for i in range(20)] + [[2]] * 100
    ids, scores = BM25(docs, b=0).search([0] * 10 ** 6 + [1], 12)
    assert len(set(scores.tolist())) < 12
    assert (np.diff(ids)[np.diff(scores) == 0] > 0).all()

def test_rounding_decides_nothing():
    """Another BLAS may round the fp32 sums elsewhere, here each weight by half a bit: the same documents, bit for bit."""
    docs = corpus(200, 60, 800) + [np.arange(0, 800, 7)] * 40
    index = BM25(docs)
    expected = [index.search_many(docs, k) for k in (3, 17)]
    rng = np.random.default_rng(0)
    index.dense *= rng.uniform(1 - 1e-7, 1 + 1e-7, index.dense.shape)
    index.post_weight *= rng.uniform(1 - 1e-7, 1 + 1e-7, index.post_weight.shape)
    for k, (ids, scores) in zip((3, 17), expected):
        again, again_scores = index.search_many(docs, k)
        assert np.array_equal(ids, again) and np.array_equal(scores, again_scores)

def test_permuting_the_documents_permutes_the_results():
    docs = corpus(150, 40, 500)
    docs += docs[:20]                                           # ties, which the order of ids decides
    order = np.random.default_rng(1).permutation(170)
    ids, scores = BM25(docs).search_many(docs[:40], 170)
    moved, moved_scores = BM25([docs[i] for i in order]).search_many(docs[:40], 170)
    assert np.array_equal(scores, moved_scores)
    for i in range(40):
        n = (ids[i] >= 0).sum()
        assert (moved[i, n:] == -1).all()
        assert set(ids[i, :n]) == set(order[moved[i, :n]])
        score = dict(zip(ids[i].tolist(), scores[i].tolist()))
        assert [score[j] for j in order[moved[i, :n]].tolist()] == moved_scores[i, :n].tolist()
        ties = moved_scores[i, :n - 1] == moved_scores[i, 1:n]
        assert (np.diff(moved[i, :n])[ties] > 0).all()

@pytest.mark.parametrize('variant', VARIANTS)
def test_unknown_terms_change_nothing(variant):
    """Ids beyond the corpus, however large, and ids inside its range that no document has."""
    docs = [2 * d for d in corpus(60, 30, 200)]
    index = BM25(docs, variant=variant)
    query = docs[5]
    noise = np.concatenate([query, [1, 3, max(map(max, filter(len, docs))) + 1, 10 ** 6, 2 ** 62, 2 ** 63 - 1]])
    for a, b in zip(index.search(query, 9), index.search(noise, 9)):
        assert np.array_equal(a, b)
    assert len(index.search([1, 10 ** 9], 9)[0]) == 0

# ----------------------------------------------------------------------------------------------------------------------
# Limits, exclusion and the edges

def test_limit():
    docs = corpus(80, 40, 300)
    index = BM25(docs)
    everything = index.search_many(docs, 80)[0]
    limit = np.arange(80)
    limit[-1] = 10 ** 6
    ids, scores = index.search_many(docs, 5, limit=limit)
    for i in range(80):
        allowed = [j for j in everything[i].tolist() if 0 <= j < limit[i]][:5]
        assert ids[i].tolist() == allowed + [-1] * (5 - len(allowed))
        assert (scores[i, len(allowed):] == -inf).all()
    assert (ids[0] == -1).all()

def test_exclude():
    docs = corpus(80, 40, 300, ragged=False)
    index = BM25(docs)
    ids, scores = index.search(docs[4], 80)
    assert ids[0] == 4
    kept = ~np.isin(ids, [4, ids[3]])
    without, without_scores = index.search(docs[4], 6, exclude=[4, ids[3], 80, -1, 4])
    assert without.tolist() == ids[kept][:6].tolist() and without_scores.tolist() == scores[kept][:6].tolist()
    assert len(index.search(docs[4], 6, exclude=range(80))[0]) == 0

@pytest.mark.parametrize('variant', VARIANTS)
def test_only_documents_that_share_a_term_are_found(variant):
    docs = [[0, 1, 1], [2], [], [3, 4], [0, 5, 6, 7]]
    ids, scores = BM25(docs, variant=variant).search([0, 0, 9], 5)
    assert sorted(ids.tolist()) == [0, 4] and (scores > 0).all()

@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.filterwarnings('error')
def test_nothing_in_nothing_out(variant):
    docs = corpus(10, 20, 50)
    for index, queries, n in [(BM25([], variant=variant), [[1, 2], []], 2), (BM25([[], []], variant=variant), [[1, 2], []], 2),
                              (BM25(docs, variant=variant), [[], np.zeros(0, np.int32)], 2), (BM25(docs, variant=variant), [], 0)]:
        ids, scores = index.search_many(queries, 3)
        assert ids.shape == scores.shape == (n, 3) and (ids == -1).all() and (scores == -inf).all()
        assert ids.dtype == np.int64 and scores.dtype == np.float32
        assert [len(x) for x in index.search([], 3)] == [0, 0]

def test_k():
    docs = corpus(10, 20, 50, ragged=False)
    index = BM25(docs)
    ids, scores = index.search_many(docs, 25)
    assert ids.shape == (10, 25) and (ids[:, 10:] == -1).all() and (scores[:, 10:] == -inf).all()
    assert len(index.search(docs[0], 10 ** 15)[0]) == 10
    assert index.search_many(docs, 0)[0].shape == (10, 0) and len(index.search(docs[0], 0)[0]) == 0
    for k in (-1, 2.0, None):
        with pytest.raises(ValueError, match='k is'):
            index.search(docs[0], k)

@pytest.mark.parametrize('bad, says', [([[1, 2], [0.5]], 'document 1 has dtype float64'), ([['a']], 'document 0 has dtype'),
                                       ([[1], [2, -3]], 'document 1 has the token id -3'), ([[[1], [2]]], 'shape (2, 1)'),
                                       ([1, 2], 'document 0 has dtype int64 and shape ()'), ([[1]] * 2000 + [[0.5]], 'document 2000 has dtype float64'),
                                       ([[2 ** 40]], 'is not below')])
def test_documents_that_are_not_token_ids(bad, says):
    with pytest.raises(ValueError) as error:
        BM25(bad)
    assert says in str(error.value) and '\n' not in str(error.value)

def test_other_input_that_is_not_right():
    index = BM25([[1, 2], [3]])
    for call, says in [(lambda: index.search([1.5], 2), 'query 0 has dtype float64'), (lambda: index.search([-1], 2), 'token id -1'),
                       (lambda: index.search_many([[1]] * 300 + [[-7]], 2), 'query 300 has the token id -7'),
                       (lambda: index.search([True], 2), 'query 0 has dtype bool'),
                       (lambda: index.search_many([[1]], 2, limit=[1, 2]), 'limit has'),
                       (lambda: index.search_many([[1]], 2, limit=[-1]), 'limit has'),
                       (lambda: index.search_many([[1]], 2, limit=[0.5]), 'limit has'),
                       (lambda: index.search([1], 2, exclude=[0.5]), 'exclude has'),
                       (lambda: BM25([[1]], variant='okapi'), 'lucene, robertson'), (lambda: BM25([[1]], k1=0), 'k1 = 0'),
                       (lambda: BM25([[1]], b=1.5), 'b = 1.5')]:
        with pytest.raises(ValueError) as error:
            call()
        assert says in str(error.value), str(error.value)

# ----------------------------------------------------------------------------------------------------------------------
# idf of another text

def test_the_idf_of_the_own_documents_changes_nothing():
    """Handed back by token id, longer than the vocabulary or not: bit for bit the same documents and scores."""
    docs = [d + 3 for d in corpus(90, 40, 500)]                 # ids 0 to 2 are in none
    df = Counter(t for d in docs for t in set(d.tolist()))
    idf = np.array([log(1 + (90 - df[t] + 0.5) / (df[t] + 0.5)) for t in range(max(df) + 1)])
    expected = BM25(docs).search_many(docs, 9)
    for own in (idf, np.concatenate([idf, [7.0] * 50]), idf.tolist()):
        for a, b in zip(expected, BM25(docs, idf=own).search_many(docs, 9)):
            assert np.array_equal(a, b)

@pytest.mark.parametrize('known', [30, 500, 1000])
def test_another_idf(known):
    """Against loops; terms beyond the array count 0, and a document that shares only such terms is not found."""
    docs, queries = corpus(80, 30, 500), corpus(6, 12, 500, seed=1)
    idf = np.random.default_rng(2).permutation(np.linspace(0.1, 5, known))          # unlike the own one: frequent terms may count most
    index, mean = BM25(docs, 1.5, 0.6, idf=idf), sum(map(len, docs)) / 80
    assert 0 < index.H < len(index.df)                          # some terms in the matrix and some in the postings
    for query in [*queries, np.array([known, known + 1, 499])]:
        scores = np.zeros(80)
        for i, d in enumerate(docs):
            for t in query.tolist():
                tf = d.tolist().count(t)
                scores[i] += (idf[t] if t < known else 0) * tf / (tf + 1.5 * (0.4 + 0.6 * len(d) / mean))
        best, best_scores = ranking(scores, 0, 10)
        ids, found = index.search(query, 10)
        assert ids.tolist() == best
        np.testing.assert_allclose(found, best_scores, rtol=1e-6)
    assert len(BM25(docs, idf=[]).search(queries[0], 10)[0]) == 0
