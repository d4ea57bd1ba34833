"""RPT against its definitions. Run: pytest tests/test_rpt.py; it learns: pytest -m slow tests/test_rpt.py"""
import copy
import dataclasses
import inspect
import math
import threading
from collections import Counter, namedtuple
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import drt
import rpt
import trime
from rpt import PRESETS, RPT, ChunkedCrossAttention, RPTConfig, corpus_idf, doc_of_chunks, mine, prepare, ranking_loss, target_scores

torch.set_num_threads(1)                        # the models are tiny: two threads would wait for each other
V, M, W, K = 23, 4, 2, 2                        # words, tokens of a chunk, chunks of a window, neighbors
N, B = 11, 2                                    # chunks, sequences
T = N * M
EPS = 1e-9                                      # fp64 through a few layers
Batch = namedtuple('Batch', 'tokens targets doc seed candidates target_scores', defaults=(None, None))


@pytest.fixture
def fp64():
    """The turns of RoPE in fp64 too, so that a definition agrees to EPS."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def small(**more):
    """A model in fp64, far from the initial state, where everything is alike and all gates are 1/2."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=4, n_head=2, n_embd=16, window=W * M, chunk_size=M, n_neighbors=K, n_candidates=4)
    model = RPT(RPTConfig(**{**sizes, **more})).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    if model.neighbor_encoder and model.config.gate:
        model.neighbor_encoder.gate.weight.data *= 30                       # some below eta, some near 1
    if model.idf is not None:
        model.idf.copy_(torch.from_numpy(corpus_idf(tokens_of(9, 400)[0].numpy(), M, V)))
    return model


def tokens_of(seed=0, t=T, b=B):
    return torch.randint(V, (b, t), generator=torch.Generator().manual_seed(seed))


def docs_of(*lengths, b=B):
    """Documents 0, 1, ... one after the other; a negative length is padding."""
    return torch.cat([torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(lengths)]).expand(b, -1)


def batch_of(tokens, doc=None, seed=0, candidates=None, target_scores=None):
    targets = F.pad(tokens[:, 1:], (0, 1), value=-1)
    return Batch(tokens, targets, torch.zeros_like(tokens) if doc is None else doc, seed, candidates, target_scores)


def supervised(tokens, doc=None, J=4, seed=0):
    """A batch with candidates as BM25 finds them and scores of either sign; nothing is scored for every third chunk."""
    n, generator = tokens.size(1) // M, torch.Generator().manual_seed(seed)
    doc = torch.zeros_like(tokens) if doc is None else doc
    chunk_doc = doc_of_chunks(doc, M)
    candidates = torch.stack([torch.from_numpy(mine(t[:n * M].view(n, M).numpy(), d.numpy(), W, J)) for t, d in zip(tokens, chunk_doc)])
    scores = torch.randn(candidates.shape, generator=generator, dtype=torch.float64).masked_fill(candidates < 0, math.nan)
    scores[:, 2::3] = math.nan
    return batch_of(tokens, doc, seed, candidates, scores)


# ----------------------------------------------------------------------------------------------------------------------
# the definition, position by position

@lru_cache(maxsize=None)
def turn(p, D):
    """RoPE as a matrix (D, D): pair d turns by the angle p 10000^(-2d/D)."""
    R = torch.zeros(D, D, dtype=torch.float64)
    for d in range(0, D, 2):
        a = p * 10000 ** (-d / D)
        R[d, d], R[d, d + 1], R[d + 1, d], R[d + 1, d + 1] = math.cos(a), -math.sin(a), math.sin(a), math.cos(a)
    return R


def by_definition(model, tokens):
    """log P of one text (t,), written from the paper with loops over positions, heads, chunks and neighbors. -> (t, V), what chunks found"""
    c, C, H, K = model.config, model.config.n_embd, model.config.n_head, model.n_neighbors
    D, m, w, t = C // H, c.chunk_size, c.window // c.chunk_size, len(tokens)
    n = t // m                                                              # whole chunks; what is left is in none
    norm = lambda module, x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * module.gain
    mlp = lambda module, x: F.gelu(x @ module.fc.weight.T) @ module.proj.weight.T

    def attention(weights, x, px, y, py, sees):
        """Tokens x at positions px over those of y at py: token i over the list sees(i)."""
        query, key, value, out = weights
        q, k, v = (x @ query.T).view(-1, H, D), (y @ key.T).view(-1, H, D), (y @ value.T).view(-1, H, D)
        k = torch.stack([k[j] @ turn(p, D).T for j, p in enumerate(py)])
        rows = []
        for i, p in enumerate(px):
            js, row = sees(i), []
            for h in range(H):
                score = k[js, h] @ (turn(p, D) @ q[i, h]) / D ** 0.5
                row.append(score.softmax(0) @ v[js, h])
            rows.append(torch.cat(row))
        return torch.stack(rows) @ out.T

    weights = lambda module: (module.query.weight, *module.kv.weight.split(C), module.proj.weight)
    everything = lambda y: lambda i: list(range(len(y)))

    def self_attention(block, x):
        b, places = c.window // 2, range(t)
        parts = (*block.attention.qkv.weight.split(C), block.attention.proj.weight)
        y = norm(block.norm1, x)
        return attention(parts, y, places, y, places, lambda i: list(range(max(0, (i // b - 1) * b), i + 1)))

    x = model.embedding.weight[tokens]                                      # (t, C)
    for block in model.lower:
        x = x + self_attention(block, x)
        x = x + mlp(block.mlp, norm(block.norm2, x))
    chunks = [x[i * m:(i + 1) * m] for i in range(n)]

    E, found = chunks, [[] for _ in range(n)]                               # what is fetched, and which
    if model.retriever:
        r, E, q, k = model.retriever, [], [], []
        for chunk in chunks:
            y = norm(r.norm, chunk)
            E.append(chunk + attention(weights(r.attention), y, range(m), y, range(m), everything(y)))
            mean = sum(E[-1]) / m
            q.append(r.query.weight @ norm(r.norm_q, mean) + r.query.bias)
            k.append(r.key.weight @ norm(r.norm_k, mean) + r.key.bias)
        for i in range(n):
            scores = {j: (q[i] @ k[j] / C ** 0.5).item() for j in range(n) if j <= i - w}
            found[i] = sorted(scores, key=lambda j: -scores[j])[:K]
    elif c.retriever == 'bm25':
        for i in range(n):
            scores = {}
            for j in range(i - w + 1):
                tf = Counter(tokens[j * m:(j + 1) * m].tolist())
                scores[j] = sum(model.idf[a].item() * tf[a] / (tf[a] + 1.2) for a in tokens[i * m:(i + 1) * m].tolist())
            found[i] = sorted((j for j in scores if scores[j] > 0), key=lambda j: (-round(scores[j], 5), j))[:K]

    read, pooled = [[] for _ in range(n)], []                               # pooled: (chunk, rank, mean)
    for i in range(n):
        for rank, j in enumerate(found[i]):
            e, y = model.neighbor_encoder, torch.cat([E[j], E[j + 1]])      # (2m, C) and what follows it
            z = norm(e.norm1, y)
            y = y + attention(weights(e.attention), z, range(2 * m), z, range(2 * m), everything(z))
            y = y + attention(weights(e.cross), norm(e.norm2, y), range(2 * m), norm(e.norm_query, chunks[i]), range(m), everything(chunks[i]))
            pooled.append((i, rank, sum(y) / (2 * m)))
            read[i].append(y)
    if c.gate and pooled:
        e, y = model.neighbor_encoder, torch.stack([mean for _, _, mean in pooled])
        places = [i * K + rank for i, rank, _ in pooled]
        sees = lambda a: [b for b in range(a + 1) if pooled[b][0] > pooled[a][0] - w]
        y = y + attention(weights(e.gate_attention), norm(e.norm3, y), places, norm(e.norm3, y), places, sees)
        for (i, rank, _), z in zip(pooled, y):
            z = (e.gate.weight[0] @ norm(e.norm_gate, z) + e.gate.bias[0]) / C
            read[i][rank] = read[i][rank] * max(c.eta, z.sigmoid())

    for l, block in enumerate(model.upper):
        x = x + self_attention(block, x)
        if c.retriever != 'none' and l >= len(model.upper) - (c.n_cca or len(model.upper)):     # the last ones
            y = torch.zeros_like(x)
            for p in range(t):
                i = (p + 1) // m - 1                                        # the last chunk that is complete at p
                if i >= 0 and read[i]:
                    places = list(range(2 * m)) * len(read[i])
                    place, keys = m - 1 + p - (i * m + m - 1), torch.cat(read[i])
                    y[p] = attention(weights(block.cca.attention), norm(block.cca.norm, x[p:p + 1]), [place], keys, places, everything(keys))[0]
            x = x + y
        x = x + mlp(block.mlp, norm(block.norm2, x))
    return (norm(model.norm, x) @ model.embedding.weight.T).log_softmax(-1), found


SETTINGS = [{}, dict(retriever='lex'), dict(retriever='bm25'), dict(retriever='none'), dict(gate=False), dict(n_neighbors=1), dict(n_neighbors=3),
            dict(n_cca=1), dict(window=4 * M, n_layer=3), dict(chunk_size=1, window=4), dict(eta=0.5, n_neighbors=4), dict(retriever='bm25', gate=False)]


@pytest.mark.parametrize('more', SETTINGS)
def test_the_model_is_the_papers(more, fp64, t=T - 3):
    """Position by position, with loops: windows, retrieval, neighbors and what follows them, gate, cross-attention and its offset."""
    model, tokens = small(**more), tokens_of(t=t)[:1]
    with torch.no_grad():
        wanted, found = by_definition(model, tokens[0])
        torch.testing.assert_close(model.log_probs(tokens)[0], wanted, rtol=0, atol=EPS)
        if model.retriever:
            ours = model.encode(tokens)[2][0].tolist()
            assert ours == [some + [-1] * (model.n_neighbors - len(some)) for some in found]
        model.reads = 'none'
        read = (model.log_probs(tokens)[0] - wanted).abs().max()
        assert read < EPS if model.config.retriever == 'none' else read > 0.1


def test_shared_definitions_are_the_same_text():
    """A fix made in one model file and forgotten in another shows up here."""
    for name in ('RMSNorm', 'fp32', 'rope', 'rotate', 'softmax_attention', 'attend', 'MLP', 'Block'):
        assert inspect.getsource(getattr(rpt, name)) == inspect.getsource(getattr(trime, name)), name
    assert inspect.getsource(rpt.CrossEntropy) == inspect.getsource(drt.CrossEntropy)


# ----------------------------------------------------------------------------------------------------------------------
# causality, and that the present is not late

def leaks(model, t=T):
    """Positions t whose token, once changed, changes something before t; and that it changes t itself and something later."""
    a, broken = tokens_of(t=t), []
    before = model.log_probs(a)
    for i in range(t):
        b = a.clone()
        b[:, i] = (b[:, i] + 1) % V
        after = model.log_probs(b)
        assert not torch.equal(after[:, i], before[:, i])
        assert i == t - 1 or not torch.equal(after[:, i + 1:], before[:, i + 1:])
        if not torch.equal(after[:, :i], before[:, :i]):
            broken.append(i)
    return broken


@pytest.mark.parametrize('more', [{}, dict(n_neighbors=1), dict(n_neighbors=3), dict(retriever='lex'), dict(retriever='bm25'), dict(retriever='none'),
                                  dict(gate=False), dict(window=4 * M), dict(chunk_size=1, window=4)])
def test_the_future_is_invisible(more):
    """Change any token: no log P before it may move, bit for bit; and later ones do. The model finds its neighbors itself."""
    assert leaks(small(**more), T - 3) == []


def shifted(by):
    """Chunked cross-attention in which chunk i is read from i m + m - 1 + by on, by = -1 or 1."""
    right = ChunkedCrossAttention.forward

    def forward(self, x, neighbors, valid, reads):
        return right(self, F.pad(x, (0, 0, 1, 0)), neighbors, valid, reads)[:, 1:] if by < 0 else F.pad(right(self, x[:, 1:], neighbors, valid, reads), (0, 0, 1, 0))
    return forward


def test_one_token_earlier_is_a_leak(monkeypatch):
    """The offset m - 2 in place of m - 1: the token before the last of a chunk reads what the last one chose. The test above sees that."""
    monkeypatch.setattr(ChunkedCrossAttention, 'forward', shifted(-1))
    assert leaks(small()) == [i * M + M - 1 for i in range(W, N)]           # of all chunks that find something


def first_read(model, i):
    """Force other neighbors on chunk i: the first position where f differs."""
    tokens = tokens_of()
    given = model.encode(tokens)[2]
    other = given.clone()
    other[:, i] = torch.tensor([0, -1])
    assert given[:, i, 1].min() >= 0
    differ = (model.encode(tokens, given=given)[0] != model.encode(tokens, given=other)[0]).any(2)
    first, = {row.nonzero().min().item() for row in differ}                 # the same in all sequences
    return first


@pytest.mark.parametrize('i', range(W + 1, N))
def test_the_present_is_not_late(i, monkeypatch):
    """What chunk i has found is read from its last token on. With the offset m it comes one token late, which no test of causality sees."""
    assert first_read(small(), i) == i * M + M - 1
    monkeypatch.setattr(ChunkedCrossAttention, 'forward', shifted(1))
    if i < N - 1:
        assert first_read(small(), i) == i * M + M


@pytest.mark.parametrize('n_upper, gate', [(1, False), (1, True), (2, False), (2, True)])
def test_how_far_a_neighbor_reaches(n_upper, gate):
    """
    T3. Another neighbor of chunk i changes the m tokens that read it; by the gate, those that read the next w - 1 chunks; by
    the self-attention of the layers above the first that reads, those that see one of these. All of them, and no others.
    """
    model, tokens, i, n = small(n_layer=2 * n_upper, gate=gate, window=4 * M), tokens_of(t=30 * M), 9, 30
    given = model.encode(tokens)[2]
    other = given.clone()
    other[:, i] = torch.tensor([5, 2])
    assert not (given[:, i] == other[:, i]).all(1).any()
    differ = (model.encode(tokens, given=given)[0] != model.encode(tokens, given=other)[0]).any(2)
    reached = set(range(i * M + M - 1, (i + (4 if gate else 1)) * M + M - 1))
    for _ in range(n_upper - 1):
        reached |= {p for p in range(n * M) for q in reached if (p // (2 * M) - 1) * 2 * M <= q <= p}
    assert len(reached) < n * M - i * M and [set(row.nonzero()[:, 0].tolist()) for row in differ] == [reached, reached]


def test_a_chunk_is_read_only_where_it_was_found():
    """T3. With self-attention cut, a token changes its own position and those that read a chunk which found it or looks like it."""
    model, a = small(n_layer=2, gate=False, n_neighbors=1), tokens_of()
    for block in [*model.lower, *model.upper]:
        block.attention.proj.weight.data.zero_()
    given = torch.full((B, N, 1), -1)
    given[:, 5:, 0] = torch.tensor([3, 0, 0, 3, 4, 7])
    for t in range(T):
        b = a.clone()
        b[:, t] = (b[:, t] + 1) % V
        differ = (model.encode(a, given=given)[0] != model.encode(b, given=given)[0]).any(2)
        fetched = {i for i in range(5, N) if t // M in (i, given[0, i, 0], given[0, i, 0] + 1)}
        wanted = {t} | {p for i in fetched for p in range(i * M + M - 1, min(T, i * M + 2 * M - 1))}
        assert set(differ[0].nonzero()[:, 0].tolist()) == wanted, t


# ----------------------------------------------------------------------------------------------------------------------
# what may be found: documents, padding, few chunks

DOC = docs_of(14, 17, 1, 22, 18, 3, -5)         # 80 tokens, 20 chunks: some shared by two documents, one by three; padding
LONG = docs_of(61, 50, -9)                      # 120 tokens, 30 chunks: more candidates than the teacher gives


def allowed(doc, w):
    """By brute force, from the tokens: chunk i may find k <= i - w of which each token is of the document of each token of chunk i."""
    n = len(doc) // M
    part = lambda i: set(doc[i * M:(i + 1) * M].tolist())
    return torch.tensor([[k <= i - w and len(part(i) | part(k)) == 1 and -1 not in part(i) for k in range(n)] for i in range(n)])


@pytest.mark.parametrize('w', [2, 4])
@pytest.mark.parametrize('doc', [DOC, docs_of(80), docs_of(-80), docs_of(40, -40), docs_of(*[4] * 20), docs_of(*[7] * 11, 3)])
def test_what_may_be_found(w, doc):
    """T2. Against brute force; and what is found is what may be found and scores best, best first, all of it if there are fewer than K."""
    model, tokens = small(window=w * M, n_neighbors=3), tokens_of(t=80)
    may = allowed(doc[0], w)
    assert torch.equal(model.permitted(doc_of_chunks(doc, M)), may.expand(B, 20, 20))
    _, scores, found = model.encode(tokens, doc)
    for b in range(B):
        for i in range(20):
            wanted = sorted(may[i].nonzero()[:, 0].tolist(), key=lambda k: -scores[b, i, k].item())[:3]
            assert found[b, i].tolist() == wanted + [-1] * (3 - len(wanted))
            assert all(k + 1 <= i - w + 1 < i for k in wanted)


def test_what_may_not_be_found_changes_nothing(monkeypatch):
    """T2. Scores of forbidden chunks beyond all others, and vectors of huge norm in chunks that two documents share: bit for bit the same."""
    model, tokens = small(), tokens_of(t=80)
    may, right = allowed(DOC[0], W), model.encode(tokens, DOC)[0]
    scores, forward, shared = model.scores, model.retriever.forward, [i for i in range(20) if len(set(DOC[0, i * M:(i + 1) * M].tolist())) > 1]
    assert shared == [3, 7, 13, 18]
    monkeypatch.setattr(model, 'scores', lambda q, k: scores(q, k).masked_fill(~may, 1e9))
    monkeypatch.setattr(model.retriever, 'forward', lambda x: tuple(y.index_fill(1, torch.tensor(shared + [19]), 1e6) for y in forward(x)))
    assert torch.equal(model.encode(tokens, DOC)[0], right)
    monkeypatch.setattr(model, 'scores', lambda q, k: scores(q, k).masked_fill(may, 1e9))
    assert not torch.equal(model.encode(tokens, DOC)[0], right)


@pytest.mark.parametrize('retriever', ['sem', 'bm25'])
def test_documents_are_not_crossed(retriever, fp64):
    """
    With self-attention cut, which crosses documents by design, retrieval, gate and cross-attention are all that could carry anything
    from one document to another: they carry nothing. Within a document they do.
    """
    model, a = small(retriever=retriever, n_neighbors=3), tokens_of(t=80)
    for block in [*model.lower, *model.upper]:
        block.attention.proj.weight.data.zero_()
    encode = lambda tokens: model.encode(tokens, DOC, model.found_by_bm25(tokens, DOC) if retriever == 'bm25' else None)
    before, _, found = encode(a)
    for d in (0, 1, 3, 4, -1):
        b = torch.where(DOC == d, tokens_of(5, 80), a)
        after, _, again = encode(b)
        assert torch.equal(after[DOC != d], before[DOC != d]) and not torch.equal(after[DOC == d], before[DOC == d])
        others = doc_of_chunks(DOC, M) != d
        assert torch.equal(again[others], found[others])
    for start, n in ((0, 14), (32, 22)):                                    # those that begin with a chunk are read as they would be alone
        alone = a[:, start:start + n]
        given = model.found_by_bm25(alone, torch.zeros_like(alone)) if retriever == 'bm25' else None
        torch.testing.assert_close(model.encode(alone, given=given)[0], before[:, start:start + n], rtol=0, atol=EPS)


def test_a_new_document_does_not_read_what_the_old_one_found():
    """The tokens of document 1 that share a group with the last chunk of document 0: nothing, exactly; those of document 0 beside them read."""
    model, a, doc = small(), tokens_of(), docs_of(26, 18)                   # chunk 5 ends at 23 and is read by 23 to 26
    for block in [*model.lower, *model.upper]:
        block.attention.proj.weight.data.zero_()
    on = model.encode(a, doc)[0]
    model.reads = 'none'
    same = (on == model.encode(a, doc)[0]).all(2)                           # (B, T)
    first = 26 + 2 + W * M + M - 1                                          # document 1 has whole chunks from 28 on; the third of them finds one
    wanted = torch.tensor([not (W * M + M - 1 <= t < 26 or t >= first) for t in range(T)])
    assert torch.equal(same, wanted.expand(B, T))


def test_which_neighbors_the_gate_looks_at():
    """By brute force: itself; better ones of the chunk, those of the w - 1 chunks before, if they are there and of the same document."""
    model, generator = small(window=4 * M, n_neighbors=3), torch.Generator().manual_seed(0)
    found, doc = torch.randint(-1, 2, (B, 9, 3), generator=generator), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2]).expand(B, 9)
    mask = model.gate_mask(found, doc)
    for b in range(B):
        for i, r, j, s in np.ndindex(9, 3, 9, 3):
            earlier = (j, s) < (i, r) and j > i - 4 and found[b, j, s] >= 0 and doc[b, i] == doc[b, j]
            assert mask[b, i * 3 + r, j * 3 + s] == (earlier or (i, r) == (j, s))


@pytest.mark.parametrize('retriever', ['sem', 'bm25', 'lex'])
@pytest.mark.parametrize('t', [1, M - 1, M, W * M + M - 1, W * M + M, 3 * M + M - 1, 5 * M + 1])
def test_few_tokens(retriever, t):
    """T15. Finite; before chunk w is complete nothing can be found, and the model is exactly the same without reading, then no more."""
    model, tokens = small(retriever=retriever, n_neighbors=3), tokens_of(t=t)
    on = model.log_probs(tokens)
    loss, _ = model(batch_of(tokens), 1)
    assert on.isfinite().all() and loss.isfinite() and on.shape == (B, t, V)
    model.reads = 'none'
    off, start = model.log_probs(tokens), W * M + M - 1
    assert torch.equal(on[:, :start], off[:, :start])
    if retriever != 'bm25':                                                 # which may find nothing that shares a word
        assert t <= start or not torch.equal(on[:, start], off[:, start])


@pytest.mark.parametrize('more', [{}, dict(retriever='bm25'), dict(n_neighbors=3, gate=False)])
def test_sequences_of_a_batch_are_independent(more):
    model, tokens = small(**more), tokens_of(b=4)
    together = model.log_probs(tokens)
    for b in range(4):
        torch.testing.assert_close(model.log_probs(tokens[b:b + 1])[0], together[b], rtol=0, atol=EPS)


def test_reading_another_text():
    """shuffled: the choice is its own, what is fetched is of another sequence of the batch; the same sequence twice changes nothing."""
    model, tokens = small(), tokens_of()
    f, _, found = model.encode(tokens)
    model.reads = 'shuffled'
    g, _, again = model.encode(tokens)
    start = W * M + M - 1
    assert torch.equal(found, again) and torch.equal(f[:, :start], g[:, :start]) and not torch.equal(f[:, start], g[:, start])
    twice = tokens[:1].expand(2, T)
    shuffled = model.encode(twice)[0]
    model.reads = 'own'
    torch.testing.assert_close(model.encode(twice)[0], shuffled, rtol=0, atol=EPS)


# ----------------------------------------------------------------------------------------------------------------------
# streaming

def pieces(how, t):
    generator = torch.Generator().manual_seed(1)
    return {'ones': [1] * t, 'whole': [t], 'off by one': [M - 1] + [M] * t, 'random': torch.randint(1, 12, (t,), generator=generator).tolist()}[how]


@pytest.mark.parametrize('how', ['ones', 'random', 'whole', 'off by one'])
@pytest.mark.parametrize('more', SETTINGS)
def test_streaming_equals_full(more, how, fp64):
    """T4, T5. In pieces of any size, cut anywhere, a length that fills no chunk: the same log P, and the same chunks found."""
    model, tokens = small(**more), tokens_of(t=20 * M + 3)
    found, remember = [], model.remember
    model.remember = lambda state, chunk: remember(state, chunk) or found.append(state.found)
    state, parts, rest = None, [], tokens
    for size in pieces(how, tokens.size(1)):
        if rest.size(1):
            log_p, state = model.stream(rest[:, :size], state)
            parts.append(log_p)
            rest = rest[:, size:]
    torch.testing.assert_close(torch.cat(parts, dim=1), model.log_probs(tokens), rtol=0, atol=EPS)
    if found and model.config.gate:
        given = model.found_by_bm25(tokens, torch.zeros_like(tokens)) if model.idf is not None else None
        wanted = model.encode(tokens, given=given)[2]
        assert torch.equal(torch.stack([f[:, -1] for f in found], dim=1), wanted) and (wanted >= 0).any()


@pytest.mark.parametrize('retriever', ['sem', 'bm25'])
@pytest.mark.parametrize('n', [1, 2, 3, 4, 30])
def test_other_numbers_of_neighbors_at_test_time(retriever, n, fp64):
    """The model of K = 2 reads n: as one that was built for n does, in one pass and streaming."""
    model, built, tokens = small(retriever=retriever), small(retriever=retriever, n_neighbors=n, n_candidates=30), tokens_of(t=T + 2)
    model.n_neighbors = n
    full = model.log_probs(tokens)
    assert torch.equal(full, built.log_probs(tokens))
    torch.testing.assert_close(model.stream(tokens)[0], full, rtol=0, atol=EPS)
    assert n == K or not torch.equal(full, small(retriever=retriever).log_probs(tokens))


def test_streaming_without_reading():
    model, tokens = small(), tokens_of()
    full = model.log_probs(tokens)
    model.reads = 'none'
    off = model.log_probs(tokens)
    torch.testing.assert_close(model.stream(tokens)[0], off, rtol=0, atol=EPS)
    assert (off - full).abs().max() > 0.1


def test_a_state_is_continued_once():
    """A copy goes on by itself; the second time from the same one is refused, since lists are shared."""
    model, tokens = small(), tokens_of(t=60)
    _, state = model.stream(tokens[:, :21])
    kept = copy.deepcopy(state)
    first, _ = model.stream(tokens[:, 21:], state)
    torch.testing.assert_close(model.stream(tokens[:, 21:], kept)[0], first, rtol=0, atol=0)
    with pytest.raises(ValueError, match='continued before'):
        model.stream(tokens[:, 21:], state)


def test_the_state_is_bounded():
    """A window of keys and values for each layer, w chunks for the gate, K neighbors; the rest is one vector and one stored chunk for each chunk."""
    model = small()
    _, state = model.stream(tokens_of(t=30 * M + 2))
    assert len(state.past) == 4 and all(k.size(1) <= W * M + M and v.size(1) <= W * M + M for k, v in state.past)
    assert len(state.store) == 30 and state.keys.shape == (B, 32, 16) and state.chunk.size(1) == 2
    assert state.found.shape == (B, W, K) and state.pooled.shape == (B, W * K, 16)
    assert all(k.shape == (B, 2, K * 2 * M, 8) for (k, v), _ in state.reading)


def test_wrong_tokens_and_states_are_refused():
    model, tokens = small(), tokens_of(t=10)
    for call, message in ((lambda: model.log_probs(tokens[0]), r'\(B, t\) is needed'), (lambda: model.stream(tokens[:, :0]), r'\(B, t\) is needed'),
                          (lambda: model.log_probs(tokens + V), 'ids'), (lambda: model.stream(tokens - V), 'ids'),
                          (lambda: model.stream(tokens[:1], model.stream(tokens)[1]), 'a state of 2 texts'),
                          (lambda: model.train()(batch_of(tokens), 0), 'candidates')):
        with pytest.raises(ValueError, match=message):
            call()


# ----------------------------------------------------------------------------------------------------------------------
# the ranking loss

def ranking_by_definition(scores, permitted, candidates, target_scores, tau):
    """§3.3 for one text, in loops: λ by changing places in the ranking and computing the NDCG anew. -> the loss and the NDCG@20 of each chunk that has a positive"""
    losses, ndcgs = [], []
    for i in range(len(scores)):
        s_t = {k: s for k, s in zip(candidates[i].tolist(), target_scores[i].tolist()) if k >= 0 and s == s}
        gain = lambda k: 2 ** max(s_t.get(k, 0), 0) - 1
        ranking = sorted(permitted[i].nonzero()[:, 0].tolist(), key=lambda k: -scores[i, k].item())
        dcg = lambda order, cut=None: sum(gain(k) / math.log2(2 + place) for place, k in enumerate(order[:cut]))
        best = sorted(ranking, key=lambda k: -gain(k))
        if not any(s > 0 for s in s_t.values()):
            continue
        loss = 0
        for a in ranking:
            for b in ranking:
                if s_t.get(a, -math.inf) > max(0, s_t.get(b, -math.inf)) or s_t.get(a, -math.inf) > 0 > s_t.get(b, -math.inf):
                    swapped = [b if k == a else a if k == b else k for k in ranking]
                    lam = abs(dcg(swapped) - dcg(ranking)) / dcg(best)
                    loss = loss + lam * (tau - (scores[i, a] - scores[i, b])).clamp(min=0)
        losses.append(loss)
        ndcgs.append(dcg(ranking, 20) / dcg(best, 20))
    return losses, ndcgs


def ranking_case(seed=0, n=9, J=4, w=2, b=B):
    """Scores, what is permitted, candidates of that, s_t of both signs with some not scored; chunks without candidates or positives."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    permitted = (torch.arange(n)[None, :] <= torch.arange(n)[:, None] - w).expand(b, n, n)
    candidates = torch.full((b, n, J), -1)
    for r in range(b):
        for i in range(w, n - 1):
            some = torch.randperm(i - w + 1, generator=generator)[:J]
            candidates[r, i, :len(some)] = some
    s_t = draw(b, n, J).masked_fill(candidates < 0, math.nan)
    s_t[:, 4] = -s_t[:, 4].abs()
    s_t[:, 5] = math.nan
    s_t[:, n - 2] = s_t[:, n - 2].abs()                                     # for large n, more than 20 positives
    return 2 * draw(b, n, n), permitted, candidates, s_t


@pytest.mark.parametrize('n, J, tau', [(9, 4, 4.0), (9, 20, 0.5), (30, 26, 2.0)])
def test_ranking_loss_is_the_papers(n, J, tau):
    """T6, T7. Against loops that change places; J may exceed the number of chunks, and more than 20 of them be ranked."""
    scores, permitted, candidates, s_t = case = ranking_case(n=n, J=J)
    loss, ndcg, asked = ranking_loss(*case, tau)
    losses, ndcgs = zip(*(ranking_by_definition(scores[b], permitted[b], candidates[b], s_t[b], tau) for b in range(B)))
    losses, ndcgs = sum(losses, []), sum(ndcgs, [])
    assert asked == len(losses)
    assert loss.item() == pytest.approx((sum(losses) / len(losses)).item(), abs=EPS) and ndcg.item() == pytest.approx(sum(ndcgs) / len(ndcgs), abs=EPS)
    assert loss > 0 and 0 < ndcg < 1 and len(losses) < B * (n - 3)


def test_gradient_of_the_ranking_loss():
    """T6. λ is a constant: the gradient is that of the hinge alone, by finite differences, where no step changes a rank."""
    scores, permitted, candidates, s_t = ranking_case()
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: ranking_loss(s, permitted, candidates, s_t, 3.0)[0], scores, eps=1e-6)
    grad, = torch.autograd.grad(ranking_loss(scores, permitted, candidates, s_t, 3.0)[0], scores)
    assert (grad[~permitted] == 0).all() and grad[:, :2].abs().max() == 0 and grad.abs().max() > 0
    for b, i, l in ((candidates >= 0) & (s_t == s_t.nan_to_num(-9).max(2, keepdim=True).values) & (s_t > 0)).nonzero().tolist():
        assert grad[b, i, candidates[b, i, l]] <= 0                         # the best one never goes down


def test_a_met_margin_costs_nothing():
    """T6. Each pair in the right order and τ or more apart: exactly 0; a little less apart: more than 0. And NDCG is 1."""
    _, permitted, candidates, s_t = ranking_case()
    scores = torch.full((B, 9, 9), -50.0).double()
    known = s_t.nan_to_num(-math.inf)
    for b, i, j in (candidates >= 0).nonzero().tolist():
        scores[b, i, candidates[b, i, j]] = 3.0 * (known[b, i] < known[b, i, j]).sum()
    loss, ndcg, _ = ranking_loss(scores, permitted, candidates, s_t, 2.99)
    assert loss == 0 and ndcg.item() == pytest.approx(1)
    assert ranking_loss(scores, permitted, candidates, s_t, 3.01)[0] > 0


def test_numbering_the_chunks_anew_changes_nothing():
    """T6. The same chunks under other numbers, the candidates in another order: the same loss."""
    scores, permitted, candidates, s_t = case = ranking_case()
    new = torch.randperm(9, generator=torch.Generator().manual_seed(1))     # the chunk that is k now was new[k]
    renamed = torch.where(candidates >= 0, new.argsort()[candidates], -1)
    order = torch.tensor([2, 0, 3, 1])
    for a, b in zip(ranking_loss(*case, 3.0), ranking_loss(scores[..., new], permitted[..., new], renamed[..., order], s_t[..., order], 3.0)):
        assert a.item() == pytest.approx(b.item(), abs=EPS)


def test_nothing_to_rank():
    """No positives, no candidates, nothing scored, nothing permitted: 0 and no NaN, in the gradient neither; a chunk with none does not count."""
    scores, permitted, candidates, s_t = ranking_case()
    scores.requires_grad_()
    for some in ((permitted, candidates, -s_t.abs()), (permitted, candidates, s_t * math.nan), (permitted & False, candidates.clamp(max=-1), s_t),
                 (permitted, candidates.clamp(max=-1), s_t), (permitted, candidates, s_t * 0)):
        loss, ndcg, n = ranking_loss(scores, *some, 3.0)
        grad, = torch.autograd.grad(loss, scores)
        assert loss == 0 and ndcg == 0 and n == 0 and (grad == 0).all()
    alone = torch.where(torch.arange(9)[:, None] == 8 - 1, s_t, math.nan)
    losses, _ = zip(*(ranking_by_definition(scores[b], permitted[b], candidates[b], alone[b], 3.0) for b in range(B)))
    assert 0 < len(sum(losses, [])) <= B
    assert ranking_loss(scores, permitted, candidates, alone, 3.0)[0].item() == pytest.approx((sum(sum(losses, [])) / len(sum(losses, []))).item())


def test_ndcg_by_hand():
    """
    T7. One relevant chunk at rank 1, 2, 3 of 30: 1, 1 / log2(3) = 0.6309, 1 / log2(4) = 0.5; at rank 20 1 / log2(21), at rank 21
    nothing. Two with gains 3 and 1 (s_t = 2 and 1) in the wrong order: (1 + 3 · 0.6309) / (3 + 0.6309) = 0.7967.
    """
    def ndcg(*s_t):                                                         # chunk 30 of 31 ranks chunks 0, 1, 2, ... in this order
        scores, permitted = -torch.arange(31.0).expand(1, 31, 31), torch.ones(1, 31, 31, dtype=torch.bool).tril(-1)
        candidates, scored = torch.full((1, 31, 30), -1), torch.full((1, 31, 30), math.nan)
        candidates[0, 30] = torch.arange(30)
        scored[0, 30] = torch.tensor([*s_t] + [-1.0] * (30 - len(s_t)))
        return ranking_loss(scores, permitted, candidates, scored, 1.0)[1].item()

    at = [ndcg(*[-1.0] * rank, 0.7) for rank in range(30)]
    assert at[:3] == pytest.approx([1, 0.6309, 0.5], abs=1e-4) and at[19] == pytest.approx(1 / math.log2(21)) and at[20:] == [0] * 10
    assert at[:21] == sorted(at[:21], reverse=True) and len(set(at[:21])) == 21
    assert ndcg(1.0, 2.0) == pytest.approx(0.7967, abs=1e-4) and ndcg(2.0, 1.0) == pytest.approx(1)


# ----------------------------------------------------------------------------------------------------------------------
# supervision

@pytest.mark.parametrize('own', [True, False])
@pytest.mark.parametrize('target', [True, False])
@pytest.mark.parametrize('w', [2, 3])
def test_mine(w, target, own):
    """Against BM25 in loops: of each document alone, only what may be found, the last chunk of a document has no target."""
    tokens, doc = tokens_of(3, 120)[0].numpy(), docs_of(34, 41, 2, 29, -14)[0]
    chunks, may = tokens.reshape(-1, M), allowed(doc, w)
    chunk_doc = doc_of_chunks(doc[None], M)[0].numpy()
    idf = None if own else corpus_idf(tokens_of(4, 90)[0].numpy() % (V - 3), M, V - 3)           # the last three words are not in it: they count 0
    found = mine(chunks, chunk_doc, w, 5, target, idf)
    assert found.shape == (30, 5) and found.dtype == np.int64 and (found >= 0).any()
    for i in range(30):
        same = [k for k in range(30) if chunk_doc[k] == chunk_doc[i] >= 0]
        last = not same or i == same[-1]
        scores = {}
        for k in may[i].nonzero()[:, 0].tolist() if not (last and target) else []:
            tf = Counter(chunks[k].tolist())
            weight = lambda t: math.log(1 + (len(same) - sum(t in chunks[j] for j in same) + 0.5) / (sum(t in chunks[j] for j in same) + 0.5)) if own else (
                idf[t] if t < len(idf) else 0)
            scores[k] = sum(weight(t) * tf[t] / (tf[t] + 1.2) for t in chunks[i:i + 1 + target].ravel().tolist() if tf[t])
        wanted = sorted((k for k in scores if scores[k] > 0), key=lambda k: (-round(scores[k], 5), k))[:5]
        assert found[i].tolist() == wanted + [-1] * (5 - len(wanted)), i


def test_corpus_idf():
    """ln(1 + (n - df + 1/2) / (df + 1/2)) over all whole chunks of a split, by a loop; what is read in several pieces included."""
    tokens = np.random.default_rng(0).integers(0, V - 2, (2 ** 14 + 5) * 2 + 1)
    chunks = [set(tokens[i:i + 2].tolist()) for i in range(0, len(tokens) - 1, 2)]
    wanted = [math.log(1 + (len(chunks) - df + 0.5) / (df + 0.5)) for t in range(V) for df in [sum(t in c for c in chunks)]]
    np.testing.assert_allclose(corpus_idf(tokens, 2, V), wanted, rtol=1e-12)
    assert (corpus_idf(tokens[:1], 2, V) == math.log(2)).all()


@pytest.mark.parametrize('pairs', [64, 3])
def test_target_scores(pairs, fp64):
    """T9. Prefixes whose keys are kept, as if each (c_j, c_{j+1}, c_i, c_{i+1}) were read as a text of its own; candidate i - 2 is exactly 0."""
    reference, chunks = small(retriever='none', n_layer=2, window=2 * M), tokens_of(2)[0].view(N, M)
    candidates = torch.full((N, 3), -1)
    candidates[2:6] = torch.tensor([[0, -1, -1], [-1, 1, 0], [2, 0, 1], [-1, -1, -1]])
    candidates[8:10] = torch.tensor([[0, 4, 6], [7, 1, 3]])                 # 7 = i - 2
    s_t = target_scores(reference, chunks, candidates, pairs)
    log_p = lambda i, j: reference.say(reference.encode(torch.cat([chunks[j], chunks[j + 1], chunks[i], chunks[i + 1]])[None])[0])[0]
    said = lambda i, j: sum(log_p(i, j)[3 * M - 1 + n, chunks[i + 1, n]].item() for n in range(M)) / M
    with torch.no_grad():
        for i in range(N):
            for slot, j in enumerate(candidates[i].tolist()):
                if j < 0:
                    assert s_t[i, slot].isnan()
                else:
                    assert s_t[i, slot].item() == pytest.approx(said(i, j) - said(i, i - 2), abs=EPS)
    assert (s_t[[2, 3, 4, 8, 9], [0, 1, 0, 2, 0]] == 0).all() and s_t.nan_to_num().abs().max() > 0.1
    assert target_scores(reference, chunks, candidates.clamp(max=-1)).isnan().all()


class Texts:
    """Stands for data.Batches: sequences by number, two in a micro-batch, the second of it padding when one is taken."""
    n_rows, B, fold = 7, 2, -1

    def __init__(self):
        self.taken = []

    def take(self, rows, seed):
        self.taken += rows.tolist()
        tokens, doc = torch.zeros(self.B, T, dtype=torch.long), torch.full((self.B, T), -1)
        for b, row in enumerate(rows.tolist()):
            tokens[b] = tokens_of(100 + row, T, 1)[0]
            doc[b] = 10 * row + docs_of(26, 18)[0]
        doc[doc == 10 * (self.n_rows - 1) + 1] = -1                         # the last sequence is filled up
        return batch_of(tokens, doc, seed)


def prepared(folder, rows=(3, 0, 6, 3), retriever='sem', reference=None, texts=None, **more):
    config = RPTConfig(vocab_size=V, block_size=T, micro_batch=B, n_layer=2, n_head=2, n_embd=16, window=W * M, chunk_size=M, n_candidates=4,
                       retriever=retriever, score_every=more.pop('score_every', 1))
    return prepare(config, folder, 'key', texts or Texts(), rows, reference or small(retriever='none', n_layer=2, window=4 * M).float(), say=lambda line: None, **more)


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name == 'scores') for name in ('candidates', 'scores', 'done'))


def test_prepare(tmp_path):
    """Only the wanted sequences are made, once each; what is kept is what mine and target_scores say; a longer list adds to it."""
    texts, reference = Texts(), small(retriever='none', n_layer=2, window=4 * M).float()
    made = prepared(tmp_path, texts=texts)
    assert texts.taken == [3, 0, 6] and made.done.tolist() == [1, 0, 0, 1, 0, 0, 1]
    batch = texts.take(np.array([3]), 0)
    chunks, chunk_doc = batch.tokens[0].view(N, M), doc_of_chunks(batch.doc, M)[0]
    candidates = mine(chunks.numpy(), chunk_doc.numpy(), W, 4)
    assert np.array_equal(made.candidates[3], candidates) and (candidates >= 0).any()
    s_t = target_scores(reference, chunks, torch.from_numpy(candidates)).half()
    assert np.array_equal(made.scores[3], s_t.numpy(), equal_nan=True) and not np.isnan(made.scores[3][candidates >= 0]).any()
    texts.taken = []
    assert prepared(tmp_path, (0, 1, 2, 3, 6), texts=texts).done.tolist() == [1, 1, 1, 1, 0, 0, 1] and texts.taken == [1, 2]
    rounded = prepared(tmp_path, autocast=lambda: torch.autocast('cpu', torch.bfloat16))                # another precision is another teacher
    assert rounded.folder != made.folder and not np.array_equal(rounded.scores, made.scores, equal_nan=True)
    lex = prepared(tmp_path, retriever='lex')
    assert lex.folder != made.folder and np.array_equal(lex.candidates, np.where(lex.done[:, None, None], made.candidates, 0)) and lex.scores.shape == (1,)


def test_prepare_is_interrupted_and_goes_on(tmp_path):
    """Killed in the middle of a sequence: those before it are kept, it is made again, and all is as if nothing had happened."""
    whole, texts, reference = prepared(tmp_path / 'a'), Texts(), small(retriever='none', n_layer=2, window=4 * M).float()
    read, calls = reference.read, []

    def dies(*args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return read(*args)
    reference.read = dies
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / 'b', reference=reference, texts=texts)
    n = len(texts.taken)
    assert 0 < n - 1 < 3
    again = prepared(tmp_path / 'b', texts=texts)
    assert texts.taken[n:] == [3, 0, 6][n - 1:] and same(again, whole)
    with pytest.raises(ValueError):
        again.put(1, again.candidates[3], again.scores[3, :-1])             # a row that is not written in full is not marked
    assert again.done.tolist() == whole.done.tolist()


def test_two_processes_prepare_what_one_does(tmp_path):
    """Each does its share, both at once; neither begins before both know what there is to do."""
    whole, barrier, made = prepared(tmp_path / 'a', range(7)), threading.Barrier(2, timeout=60), {}
    texts, reference = [Texts(), Texts()], small(retriever='none', n_layer=2, window=4 * M).float()     # made once: threads share a generator

    def process(rank):
        begin = lambda items, *_, **__: (barrier.wait(), items)[1]
        made[rank] = prepared(tmp_path / 'b', range(7), reference=reference, texts=texts[rank], rank=rank, world=2, barrier=barrier.wait, progress=begin)
    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [t.taken for t in texts] == [[0, 2, 4, 6], [1, 3, 5]] and same(made[0], whole) and same(made[1], whole)


def test_what_is_not_scored(tmp_path):
    """Chunks of documents that the reference LM was trained on, and all but every n-th: candidates they have."""
    whole, some = prepared(tmp_path), prepared(tmp_path / 'some', held_out=lambda d: d % 2 == 1)
    half = prepared(tmp_path / 'half', score_every=2)
    assert np.array_equal(whole.candidates, some.candidates) and np.array_equal(whole.candidates, half.candidates)
    chunk_doc = doc_of_chunks(Texts().take(np.array([3]), 0).doc, M)[0].numpy()
    odd, every = (chunk_doc % 2 == 1)[:, None], (np.arange(N) % 2 == 0)[:, None]
    there = whole.candidates[3] >= 0
    assert (there & odd).any() and (there & ~odd & (chunk_doc >= 0)[:, None]).any() and (there & every).any()
    for other, asked in ((some, odd), (half, every)):
        assert np.array_equal(~np.isnan(other.scores[3]), there & asked)
        np.testing.assert_allclose(other.scores[3][there & asked], whole.scores[3][there & asked], rtol=2e-3, atol=1e-6)       # kept in fp16


def test_supervision_is_attached(tmp_path):
    """The sequences of a micro-batch, also of the last one, which is not full; sequences that are not there are named."""
    made, texts = prepared(tmp_path), Texts()
    batch = made.attach(texts.take(np.array([6, 3]), 5), np.array([6, 3]))
    assert batch.seed == 5 and batch.candidates.dtype == torch.int64 and batch.target_scores.dtype == torch.float32
    assert not np.array_equal(made.candidates[3], made.candidates[6])
    for b, row in enumerate((6, 3)):
        assert np.array_equal(batch.candidates[b], made.candidates[row]) and np.array_equal(batch.target_scores[b], made.scores[row], equal_nan=True)
    last = made.attach(texts.take(np.array([0]), 5), np.array([0]))
    assert last.candidates.shape == (2, N, 4) and (last.candidates[1] == -1).all() and last.target_scores[1].isnan().all()
    with pytest.raises(ValueError, match=r'\[2, 5\].*never prepared'):
        made.attach(texts.take(np.array([2, 5]), 5), [2, 5])
    lex = prepared(tmp_path, retriever='lex')
    assert lex.attach(texts.take(np.array([3]), 5), np.array([3])).target_scores.isnan().all()
    for config in (dict(retriever='sem'), dict(retriever='lex'), dict(retriever='bm25')):        # and it can be trained on
        assert small(**config).train()(batch if config['retriever'] == 'sem' else last, 0.5)[0].isfinite()


@pytest.mark.parametrize('name', ['candidates', 'scores', 'done'])
@pytest.mark.parametrize('damage', [lambda b: b'', lambda b: b[:100], lambda b: b'x' * len(b), lambda b: b.replace(b'(7,', b'(5,'),
                                    lambda b: b.replace(b"<i4'", b"<i8'").replace(b"<f2'", b"<f4'").replace(b"|u1'", b"|i1'")])
def test_a_damaged_file_is_refused(tmp_path, name, damage):
    """Half written, empty, of another size or kind: one line that names it and says what to do."""
    path = prepared(tmp_path).folder / f'{name}.npy'
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit) as error:
        prepared(tmp_path)
    assert str(path) in str(error.value) and 'delete' in str(error.value) and '\n' not in str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# training

def spied(model):
    """Keeps what encode is given and returns."""
    calls, encode = [], model.encode

    def spy(tokens, doc=None, given=None, use=None):
        out = encode(tokens, doc, given, use)
        calls.append((given, use, out[2]))
        return out
    model.encode = spy
    return calls


def teachers(batch, K, retriever='sem'):
    """What the teacher gives each chunk: its best positives, best first; of what was not scored, BM25's first ones."""
    wanted = torch.full((*batch.candidates.shape[:2], K), -1)
    for b, i in np.ndindex(*wanted.shape[:2]):
        pairs = [(k, s) for k, s in zip(batch.candidates[b, i].tolist(), batch.target_scores[b, i].tolist()) if k >= 0]
        if retriever == 'sem' and pairs and not math.isnan(pairs[0][1]):
            pairs = sorted(((k, s) for k, s in pairs if s > 0), key=lambda pair: -pair[1])
        wanted[b, i, :len(pairs[:K])] = torch.tensor([k for k, _ in pairs[:K]], dtype=torch.long)
    return wanted


@pytest.mark.parametrize('retriever', ['sem', 'lex'])
@pytest.mark.parametrize('K', [1, 2, 3])
def test_teacher_forcing(K, retriever):
    """always: the K best positives by s_t, best first, fewer if there are fewer. never: its own. Halfway: some of each, whole chunks."""
    batch, found = supervised(tokens_of(t=120), LONG), {}
    for teacher in ('always', 'never', 'annealed'):
        model = small(retriever=retriever, n_neighbors=K, teacher=teacher).train()
        calls = spied(model)
        model(batch, 0.45)
        found[teacher] = calls[0][2]
        own = model.eval().encode(batch.tokens, batch.doc)[2]
    wanted = teachers(batch, K, retriever)
    assert torch.equal(found['always'], wanted) and torch.equal(found['never'], own) and not torch.equal(own, wanted)
    number = {(found['annealed'][b, i] == wanted[b, i]).all().item() + 2 * (found['annealed'][b, i] == own[b, i]).all().item() for b, i in np.ndindex(B, 30)}
    assert number == {1, 2, 3}                                              # the teacher's alone, its own alone, both the same; nothing else
    if retriever == 'sem' and K > 1:                                        # some of each: with positives, without, with too few, not scored
        counts = {(batch.target_scores[b, i].isnan().all().item(), (wanted[b, i] >= 0).sum().item()) for b, i in np.ndindex(B, 30)}
        assert {(False, 0), (False, 1), (False, K), (True, K)} <= counts


def test_the_coin_is_tossed_for_each_chunk_and_comes_from_the_batch():
    """The same seed, the same neighbors, whatever else is random; another seed, others; the share of the teacher is p_ss."""
    model = small().train()
    calls = spied(model)
    long = supervised(tokens_of(t=400, b=8))
    for seed, noise, progress in ((0, 0, 0.3), (0, 1, 0.3), (1, 0, 0.3), (0, 0, 0.0), (0, 0, 0.9)):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        model(long._replace(seed=seed), progress)
        assert torch.equal(torch.get_rng_state(), state)
    a, b, c, start, end = (use for _, use, _ in calls)
    assert torch.equal(a, b) and not torch.equal(a, c) and start.all() and not end.any()
    assert a.shape == (8, 100) and a.float().mean().item() == pytest.approx(0.75, abs=0.06)       # cos(π / 3) = 1/2; 4 standard deviations
    assert len(a.unique(dim=0)) == 8 and len(a.unique(dim=1).T) > 8


def test_retro_reads_candidates_in_training_and_its_own_find_at_test_time():
    """bm25: in training found by (c_i, c_{i+1}), at test time by c_i alone, with the idf of the training corpus."""
    model, batch = small(retriever='bm25'), supervised(tokens_of(t=80), DOC)
    batch = batch._replace(target_scores=batch.target_scores * math.nan)
    calls = spied(model)
    model.train()(batch, 0.5)
    model.eval()(batch, 0.5)
    assert torch.equal(calls[0][2], batch.candidates[..., :K])
    for b in range(B):
        chunk_doc = doc_of_chunks(batch.doc, M)[b].numpy()
        wanted = mine(batch.tokens[b].view(20, M).numpy(), chunk_doc, W, K, target=False, idf=model.idf.numpy())
        assert np.array_equal(calls[1][2][b], wanted) and not np.array_equal(wanted, batch.candidates[b, :, :K])


@pytest.mark.parametrize('retriever', ['sem', 'lex', 'bm25', 'none'])
def test_evaluation_knows_nothing_of_the_teacher(retriever):
    """The loss in eval mode: the mean of -log P over real targets with its own neighbors, by document; whatever candidates the batch has."""
    model, batch = small(retriever=retriever), supervised(tokens_of(t=78), docs_of(40, 38))
    batch.targets[:, 39] = -1
    loss, log = model(batch, 0.0)
    assert log == {}
    for other in (batch._replace(candidates=None, target_scores=None), batch._replace(candidates=batch.candidates.flip(1), target_scores=-batch.target_scores)):
        assert torch.equal(model(other, 0.9)[0], loss)
    given = model.found_by_bm25(batch.tokens, batch.doc) if retriever == 'bm25' else None
    log_p = model.say(model.encode(batch.tokens, batch.doc, given)[0])
    wanted = [-log_p[b, t, batch.targets[b, t]].item() for b in range(B) for t in range(78) if batch.targets[b, t] >= 0]
    assert len(wanted) == 2 * 76 and loss.item() == pytest.approx(sum(wanted) / len(wanted), abs=EPS)


@pytest.mark.parametrize('retriever', ['sem', 'lex'])
def test_the_loss_in_training(retriever):
    """Cross entropy and α times the ranking loss, by loops over chunks; RPT-Lex: the r-th of J candidates is worth 1 - r / J."""
    model, batch, progress, J = small(retriever=retriever, teacher='always', alpha=0.7, tau=5.0).train(), supervised(tokens_of(t=120), LONG), 0.1, 4
    loss, log = model(batch, progress)
    f, scores, _ = model.encode(batch.tokens, batch.doc, teachers(batch, K, retriever))
    lm = F.cross_entropy(model.say(f).flatten(0, 1), batch.targets.flatten(), ignore_index=-1)
    s_t = batch.target_scores if retriever == 'sem' else (1 - torch.arange(J, dtype=torch.float64) / J).expand(B, 30, J)
    per_text = [ranking_by_definition(scores[b], allowed(LONG[b], W), batch.candidates[b], s_t[b], 1.4) for b in range(B)]
    losses, ndcgs = (sum(x, []) for x in zip(*per_text))
    ranking = sum(losses) / len(losses)
    assert log['lm_loss'].item() == pytest.approx(lm.item(), abs=EPS) and log['ret_loss'].item() == pytest.approx(ranking.item(), abs=EPS)
    assert log['ndcg'].item() == pytest.approx(sum(ndcgs) / len(ndcgs)) and loss.item() == pytest.approx((lm + 0.35 * ranking).item(), abs=EPS)


def test_schedules():
    """T14. p_ss falls along a cosine from 1 to 0 in 90% of the steps; α rises in the first fifth; τ rises from 1."""
    model = small(alpha=0.5, tau=4.0)
    p_ss, alpha, tau = zip(*(model.schedule(x) for x in (0, 0.25, 0.5, 0.75, 1)))
    assert p_ss == pytest.approx([1, 0.8214, 0.4132, 0.0670, 0], abs=1e-4) and tau == pytest.approx([1, 1.75, 2.5, 3.25, 4])
    assert alpha == pytest.approx([0, 0.5, 0.5, 0.5, 0.5]) and model.schedule(0.1)[1] == pytest.approx(0.25)
    assert model.schedule(0.9)[0] == pytest.approx(0) and model.schedule(0.45)[0] == pytest.approx(0.5)
    assert [small(teacher='always').schedule(x)[0] for x in (0, 1)] == [1, 1] and [small(teacher='never').schedule(x)[0] for x in (0, 1)] == [0, 0]


def test_the_gate():
    """T10. With η = 1 it is as if there were none; where all gates are at the floor, what is read is η times what is read without."""
    def read(model):
        neighbors, seen = model.neighbors, []
        model.neighbors = lambda *a: seen.append(neighbors(*a)) or seen[0]
        f = model.encode(tokens_of())[0]
        model.neighbors = neighbors
        return f, seen[0]

    f, neighbors = read(plain := small(gate=False))
    gated = small(eta=1.0)
    gated.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(read(gated)[0], f, rtol=0, atol=EPS)
    gated.config.eta = 0.2
    assert (read(gated)[0] - f).abs().max() > 0.1
    gated.neighbor_encoder.gate.weight.data.zero_()
    for bias, share in ((-9.0, 0.2), (1.0, 1 / (1 + math.exp(-1))), (9.0, 1 / (1 + math.exp(-9)))):
        gated.neighbor_encoder.gate.bias.data.fill_(16 * bias)              # it is divided by C
        g, weighed = read(gated)
        torch.testing.assert_close(weighed, share * neighbors, rtol=0, atol=EPS)
        assert share > 0.9 or (g - f).abs().max() > 0.1                     # nothing that comes after it takes it back


def test_which_loss_teaches_what():
    """T11. W_Q and W_K learn from the ranking loss alone, the upper half from the other alone, the lower half from both; α is 0 at first."""
    model, batch = small(), supervised(tokens_of(t=120), LONG)

    def taught(loss):
        model.zero_grad()
        loss.backward()
        return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-9}

    names = {name for name, _ in model.named_parameters()}
    scoring = {name for name in names if name.startswith(('retriever.query', 'retriever.key', 'retriever.norm_'))}
    upper = {name for name in names if name.startswith(('upper', 'neighbor_encoder', 'norm.'))}
    assert len(scoring) == 6 and taught(model(batch, 0.5)[0]) == taught(model.train()(batch, 0)[0]) == names - scoring
    _, scores, _ = model.encode(batch.tokens, batch.doc)
    ranking, _, _ = ranking_loss(scores, allowed(LONG[0], W).expand_as(scores), batch.candidates, batch.target_scores, 2.0)
    assert taught(ranking) == names - upper - {'retriever.key.bias'}        # which adds the same to all scores of a query
    assert taught(model(batch, 0.1)[0]) >= names - {'retriever.key.bias'}


def test_the_loss_reaches_what_was_retrieved():
    """T11. The tokens that read chunk i's neighbors send a gradient into the lower states of these, of what follows them and of i, and no others."""
    model, tokens, seen = small(gate=False, n_layer=2), tokens_of(), []
    forward = model.retriever.forward
    model.retriever.forward = lambda x: forward(seen.append(x) or x)
    f, _, found = model.encode(tokens)
    for b, i in np.ndindex(B, N):
        grad, = torch.autograd.grad(f[b, i * M + M - 1:(i + 1) * M + M - 1].pow(3).sum(), seen[0], retain_graph=True)
        some = [k for k in found[b, i].tolist() if k >= 0]
        wanted = {(b, k) for k in [*some, *[k + 1 for k in some], *[i] * bool(some)]}
        assert {tuple(x) for x in grad.abs().amax((2, 3)).nonzero().tolist()} == wanted


def test_gradients_are_finite():
    """In training, with chunks that find nothing, padding and documents of one token."""
    for retriever in ('sem', 'lex', 'bm25', 'none'):
        model = small(retriever=retriever).train()
        loss, log = model(supervised(tokens_of(t=80), DOC), 0.3)
        loss.backward()
        assert loss.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert set(log) == ({'lm_loss', 'ret_loss', 'ndcg', 'ranked'} if model.retriever else set())
    model = small().train()
    model(supervised(tokens_of(t=80), docs_of(-80)), 0.3)[0].backward()     # nothing but padding
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_random_tokens_cannot_be_predicted():
    """
    No leak: trained on random tokens, with a teacher who knows the next chunk and fetches one like it, the loss with own retrieval on
    fresh tokens stays at ln V. With the teacher's choice it falls below: the choice tells of the target, so such a loss is not the model's.
    """
    torch.manual_seed(0)
    V, m, n, steps = 4, 2, 24, 70
    model = RPT(RPTConfig(vocab_size=V, block_size=n * m, micro_batch=16, n_layer=2, n_head=2, n_embd=32, window=4 * m, chunk_size=m, n_neighbors=1,
                          n_candidates=1, teacher='always', alpha=0.1))
    for p in model.parameters():
        p.data *= 3 if p.dim() == 2 else 1                                  # it learns sooner
    optimizer, i = torch.optim.AdamW(model.parameters()), torch.arange(n)

    def batch(seed):
        tokens = torch.randint(V, (16, n * m))
        word = tokens.view(16, n, m) @ torch.tensor([1, V])                 # (B, N)
        like = (word[:, 1:, None] == word[:, None, 1:]) & (i[:-1] <= i[:-1, None] - 4)          # what follows chunk k is the target of chunk i
        best = F.pad(torch.where(like, i[:-1], -1).max(2, keepdim=True).values, (0, 0, 0, 1), value=-1)
        return batch_of(tokens, seed=seed, candidates=best, target_scores=torch.where(best >= 0, 1.0, math.nan))
    for step in range(steps):
        optimizer.param_groups[0]['lr'] = 5e-3 * min(1, (step + 1) / 20)
        model.train()(batch(step), step / steps)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        taught = sum(model(batch(0), 1)[1]['lm_loss'].item() for _ in range(5)) / 5
        own = sum(model.eval()(batch(0), 1)[0].item() for _ in range(20)) / 20
    assert taught < math.log(V) - 0.15
    assert own > math.log(V) - 0.02                                         # 15,040 tokens; sampling moves it by less than 0.01


def test_bf16_keeps_the_scores_in_fp32():
    """Under autocast s_q, what is chosen by it, and the last product are in fp32, on the same states; the losses are finite."""
    torch.manual_seed(0)
    model = RPT(RPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=2, n_embd=16, window=W * M, chunk_size=M, n_neighbors=3, n_candidates=4))
    batch, tokens = supervised(tokens_of()), tokens_of()
    batch = batch._replace(target_scores=batch.target_scores.float())
    kept, right = [], model.scores
    model.scores = lambda q, k: kept.append((q, k)) or right(q, k)
    with torch.autocast('cpu', torch.bfloat16):
        f, scores, found = model.eval().encode(tokens)
        log_p, (loss, _), stream = model.log_probs(tokens), model(batch, 1), model.stream(tokens)[0]
        trained, log = model.train()(batch, 0.5)
    q, k = kept[0]
    exact = q.double() @ k.double().transpose(1, 2) / 4
    assert q.dtype == torch.bfloat16 and scores.dtype == torch.float32
    torch.testing.assert_close(scores, exact.float(), rtol=1e-5, atol=1e-7)
    assert torch.equal(found, model.best(exact, model.permitted(torch.zeros(B, N).long())))
    logits = f.float() @ model.embedding.weight.T                           # bf16 would be off by 4e-3
    torch.testing.assert_close(log_p, logits.log_softmax(-1), rtol=0, atol=1e-5)
    assert loss.item() == pytest.approx(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item(), abs=1e-5)
    assert trained.isfinite() and trained.dtype == torch.float32 and all(v.isfinite() for v in log.values()) and stream.isfinite().all()
    trained.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# ----------------------------------------------------------------------------------------------------------------------
# sizes

@pytest.mark.parametrize('more, millions', [(dict(retriever='none'), 202.5), (dict(retriever='none', n_layer=14), 227.7), (dict(retriever='bm25'), 236.05),
                                            (dict(retriever='bm25', gate=False), 231.9), (dict(), 242.35), (dict(retriever='lex'), 242.35)])
def test_parameter_counts_of_the_paper(more, millions):
    """T12. Table 2: Transformer-XL 202M, with two more layers 228M, RETRO 236M, RPT 242M."""
    sizes = {k: v for k, v in PRESETS['paper'].items() if k in RPTConfig.__dataclass_fields__}
    with torch.device('meta'):
        model = RPT(RPTConfig(**{**sizes, 'vocab_size': 50_277, **more}))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
    assert more.get('retriever') == 'none' or sum(block.cca is not None for block in model.upper) == 5


def test_equal_seeds_give_equal_initial_weights():
    """What two settings share begins alike: else a comparison of one seed is one of initial weights, which move the loss by more than retrieval."""
    def start(seed, **more):
        torch.manual_seed(seed)
        return RPT(RPTConfig(n_embd=16, vocab_size=V, **more)).state_dict()

    plain = start(0, retriever='none')
    for more in (dict(), dict(retriever='bm25'), dict(retriever='lex', gate=False), dict(n_cca=1)):
        weights = start(0, **more)
        assert all(p.equal(weights[name]) for name, p in plain.items()) and len(weights) > len(plain)
    matrices = [p for p in [*plain.values(), *start(1, retriever='none').values()] if p.dim() == 2]
    assert not any(a.shape == b.shape and a.equal(b) for i, a in enumerate(matrices) for b in matrices[:i])


@pytest.mark.parametrize('more', [{}, dict(n_neighbors=3), dict(retriever='bm25'), dict(gate=False), dict(retriever='none'), dict(n_cca=1), dict(window=4 * M)])
def test_multiply_adds_count_every_matrix(more):
    """The matrices against what PyTorch counts in a forward pass; attention by the positions that see each other."""
    from torch.utils.flop_counter import FlopCounterMode
    C, w = 64, more.get('window', W * M) // M
    model = RPT(RPTConfig(**{**dict(vocab_size=V, block_size=12 * M, micro_batch=1, n_layer=4, n_head=2, n_embd=C, window=W * M, chunk_size=M), **more}))
    given = torch.zeros(1, 12, K, dtype=torch.long) if more.get('retriever') == 'bm25' else None
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.encode(tokens_of(b=1, t=12 * M), given=given)
    counts, k, b = counter.get_flop_counts()['Global'], model.n_neighbors, w * M // 2
    macs = sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)) / 2
    pairs = 4 * sum(p - max(0, (p // b - 1) * b) + 1 for p in range(12 * M))             # of positions that see each other: self-attention
    if model.neighbor_encoder:
        if model.retriever:
            pairs += 12 * M * M                                             # within chunks
        pairs += 12 * k * (2 * M * 2 * M + 2 * M * M)                       # within neighbors, of these to the chunk
        pairs += sum(block.cca is not None for block in model.upper) * 12 * M * k * 2 * M
        if model.config.gate:
            pairs += 12 * k * k * w
            macs -= 12 * k * C                                              # w · c is not worth counting
    assert model.multiply_adds() == pytest.approx(3 * ((macs + 2 * C * pairs) / (12 * M) + C * V), rel=1e-9)


@pytest.mark.parametrize('more, message', [
    (dict(n_neighbors=0), 'n_neighbors 0'), (dict(vocab_size=0), 'vocab_size 0'), (dict(chunk_size=0), 'chunk_size 0'), (dict(score_every=0), 'score_every 0'),
    (dict(n_embd=18, n_head=4), 'RoPE'), (dict(window=96), 'window 96 is not a multiple of two chunks'), (dict(window=32), 'window 32'),
    (dict(window=3, retriever='none'), 'window 3 is not two blocks'), (dict(block_size=191), 'block_size 191.*192 is the least'), (dict(retriever='dpr'), "'dpr' is not one of sem, lex, bm25, none"), (dict(teacher='ever'), "'ever' is not one of"),
    (dict(n_layer=1), 'upper half'), (dict(n_cca=3), 'n_cca 3'), (dict(n_cca=-1), 'n_cca -1'), (dict(n_candidates=1), 'n_candidates 1 are fewer'),
    (dict(eta=1.1), 'eta 1.1'), (dict(dropout=1.0), 'dropout 1.0'), (dict(n_inner=-5), 'n_inner -5'), (dict(alpha=-1.0), 'alpha -1'), (dict(tau=-1.0), 'tau -1')])
def test_bad_configurations_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        RPTConfig(**more)


def test_in_the_shortest_sequence_one_chunk_is_taught():
    """With a chunk less, which was accepted, the only chunk that finds something has no next one: nothing would teach the retriever."""
    config = RPTConfig(block_size=192)
    m, w = config.chunk_size, config.window // config.chunk_size
    found = lambda T: mine(np.random.default_rng(0).integers(0, 5, (T // m, m)), np.zeros(T // m, dtype=int), w, 2).max()
    assert found(config.block_size) >= 0 and found(config.block_size - m) == -1


@pytest.mark.parametrize('preset', PRESETS)
def test_presets_are_configurations(preset):
    RPTConfig(**{name: value for name, value in PRESETS[preset].items() if name in RPTConfig.__dataclass_fields__})


def test_a_plain_model_needs_no_chunks():
    """retriever none: any even window, any number of layers; and it has no parts of the other."""
    model = small(retriever='none', window=6, n_layer=1, n_cca=0)
    assert model.log_probs(tokens_of()).isfinite().all() and not any('cca' in name or 'neighbor' in name or 'retriever' in name for name in model.state_dict())
    trained, log = model.train()(batch_of(tokens_of()), 0)
    assert log == {} and trained.item() == pytest.approx(model.eval()(batch_of(tokens_of()), 0)[0].item())


def test_cross_entropy(monkeypatch):
    """In blocks: PyTorch's loss and gradients, words that do not count included."""
    monkeypatch.setattr(rpt.CrossEntropy, 'R', 7)
    model, targets = small(), tokens_of(5)
    f = torch.randn(B, T, 16, dtype=torch.float64, requires_grad=True)
    targets[:, 7:15] = -1
    theirs = F.cross_entropy((f @ model.embedding.weight.T).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction='sum')
    assert model.nll(f, targets).item() == pytest.approx(theirs.item(), abs=EPS)
    for a, b in zip(*(torch.autograd.grad(3 * loss, (f, model.embedding.weight)) for loss in (model.nll(f, targets), theirs))):
        torch.testing.assert_close(a, b)


def test_log_p(monkeypatch):
    """In blocks, the last one shorter; logits of tens of thousands do not overflow."""
    monkeypatch.setattr(rpt.CrossEntropy, 'R', 7)
    model, targets, f = small(), tokens_of(5), torch.randn(B, T, 16, dtype=torch.float64)
    for f in (f, 1e4 * f):
        exact = (f @ model.embedding.weight.T).log_softmax(-1).gather(2, targets[..., None])[..., 0]
        torch.testing.assert_close(model.log_p(f, targets), exact)


# ----------------------------------------------------------------------------------------------------------------------
# it learns to retrieve

def facts(n, generator):
    """
    n texts of 28 chunks: six facts, each a chunk with its key and one with its value; three chunks of noise; then, in another order,
    the keys again, each followed by its value; noise. Keys and values are random strings and a window reaches back one or two chunks:
    only retrieval can know the second values. -> tokens; where these values are; for each chunk the candidates and their scores: all that
    it may find, 1 for the first place of the key and -1 for others; what is asked for, and by which chunks
    """
    keys, values = (torch.randint(16, (n, 6, M), generator=generator) + first for first in (0, 16))
    asked, at = torch.rand(n, 6, generator=generator).argsort(1), torch.arange(15, 27, 2)
    x, known = torch.randint(32, 40, (n, 28, M), generator=generator), torch.zeros(n, 28, M, dtype=torch.bool)
    x[:, 0:12:2], x[:, 1:12:2], known[:, at + 1] = keys, values, True
    x[:, at], x[:, at + 1] = (y.gather(1, asked[..., None].expand(-1, -1, M)) for y in (keys, values))
    k = torch.arange(26).expand(n, 28, 26)
    candidates = torch.where(k <= torch.arange(28)[:, None] - W, k, -1)
    scores = torch.where(candidates >= 0, -1.0, math.nan)
    scores[:, at] = scores[:, at].scatter(2, 2 * asked[..., None], 1.0)
    return x.flatten(1), known.flatten(1), candidates, scores, asked, at


@pytest.mark.slow
def test_retrieval_is_learned_from_supervision():
    """T13. Facts that only retrieval can know: it finds the right chunk and says what followed it; by another text's chunks, or none, it cannot."""
    torch.manual_seed(0)
    model = RPT(RPTConfig(vocab_size=40, block_size=28 * M, micro_batch=16, n_layer=2, n_head=4, n_embd=64, window=W * M, chunk_size=M, n_neighbors=1,
                          n_candidates=26))
    for p in model.parameters():
        p.data *= 3 if p.dim() == 2 else 1                                  # it learns sooner
    optimizer, generator = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95)), torch.Generator().manual_seed(0)

    @torch.no_grad()
    def figures():
        """Nats of a token that only retrieval can know, by what is read; the share of keys that find their first place."""
        tokens, known, _, _, asked, at = facts(64, generator)
        nats = {}
        for model.reads in ('none', 'shuffled', 'own'):
            log_p = model.eval().log_probs(tokens)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
            nats[model.reads] = -log_p[known[:, 1:]].mean().item()
        return nats, (model.encode(tokens)[2][:, at, 0] == 2 * asked).float().mean().item()

    before = figures()
    for step in range(150):
        optimizer.param_groups[0]['lr'] = 3e-3 * min(1, (step + 1) / 30)
        tokens, known, candidates, scores, _, _ = facts(16, generator)
        batch = batch_of(tokens, seed=step, candidates=candidates, target_scores=scores)
        model.train()(batch._replace(targets=batch.targets.where(F.pad(known[:, 1:], (0, 1)), -1)), step / 150)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    nats, right = figures()
    assert right > 0.9 and before[1] < 0.2, (before, right)                 # chance is 1 of 14 to 24
    assert nats['own'] < 0.3 and min(nats['none'], nats['shuffled'], before[0]['own']) > 2.5, nats         # ln 16 = 2.77 is all that can be known


@pytest.mark.slow
def test_retrieval_is_learned_from_bm25_and_a_reference_lm():
    """The whole way of §3.2: nobody says which chunk holds the fact. BM25 proposes, a reference LM that has only learned to repeat scores."""
    torch.manual_seed(0)
    generator, sizes = torch.Generator().manual_seed(0), dict(vocab_size=40, n_layer=2, n_head=4, n_embd=64, chunk_size=M)
    reference = RPT(RPTConfig(**sizes, block_size=4 * M, window=4 * M, retriever='none'))

    def short_texts(n):
        """Four chunks each: a key, a value, and either both again or two others."""
        keys, values = (torch.randint(16, (n, 2, M), generator=generator) + first for first in (0, 16))
        again = torch.rand(n, generator=generator) < 0.5
        keys[again, 1], values[again, 1] = keys[again, 0], values[again, 0]
        return torch.stack([keys[:, 0], values[:, 0], keys[:, 1], values[:, 1]], dim=1).flatten(1)

    def train(model, step, steps, batch):
        optimizer.param_groups[0]['lr'] = 3e-3 * min(1, (step + 1) / 30)
        model.train()(batch, step / steps)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def start(model):
        for p in model.parameters():
            p.data *= 3 if p.dim() == 2 else 1                              # it learns sooner
        return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))

    optimizer = start(reference)
    for step in range(400):
        train(reference, step, 400, batch_of(short_texts(64), seed=step))
    reference.eval()

    def supervision(tokens, J=6):
        chunks = tokens.unflatten(1, (-1, M))
        candidates = torch.stack([torch.from_numpy(mine(text.numpy(), np.zeros(len(text), dtype=int), W, J)) for text in chunks])
        return candidates, torch.stack([target_scores(reference, text, some) for text, some in zip(chunks, candidates)])

    tokens, _, _, _, asked, at = facts(64, generator)
    candidates, s_t = (x[:, at] for x in supervision(tokens))
    best = candidates.gather(2, s_t.nan_to_num(-math.inf).argmax(2, keepdim=True))[..., 0]
    assert (best == 2 * asked).float().mean() > 0.9 > 0.7 > (candidates[..., 0] == 2 * asked).float().mean()       # BM25 alone is no such teacher

    model = RPT(RPTConfig(**sizes, block_size=28 * M, micro_batch=16, window=W * M, n_neighbors=1, n_candidates=6))
    optimizer = start(model)
    for step in range(300):
        tokens, known, _, _, _, _ = facts(16, generator)
        candidates, s_t = supervision(tokens)
        batch = batch_of(tokens, seed=step, candidates=candidates, target_scores=s_t)
        train(model, step, 300, batch._replace(targets=batch.targets.where(F.pad(known[:, 1:], (0, 1)), -1)))
    tokens, known, _, _, asked, at = facts(64, generator)
    nats = {}
    with torch.no_grad():
        for model.reads in ('none', 'shuffled', 'own'):
            log_p = model.eval().log_probs(tokens)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
            nats[model.reads] = -log_p[known[:, 1:]].mean().item()
        right = (model.encode(tokens)[2][:, at, 0] == 2 * asked).float().mean().item()
    assert right > 0.9 and nats['own'] < 0.5 and min(nats['none'], nats['shuffled']) > 2.5, (right, nats)


# ----------------------------------------------------------------------------------------------------------------------
# what a run relies on

def test_dropout_comes_from_the_seed():
    """All randomness comes from the batch, whatever was drawn before: a run that is stopped and gone on is the run that was not. None in evaluation."""
    model, batch, losses = small(dropout=0.5, teacher='always'), supervised(tokens_of()), []
    assert torch.equal(model(batch, 1)[0], small()(batch, 1)[0])
    for noise, seed in ((0, 7), (1, 7), (0, 8)):
        torch.manual_seed(noise)
        losses.append(model.train()(batch._replace(seed=seed), 0.5)[0].item())
    assert losses[2] != losses[0] == losses[1]


def test_sequences_shorter_than_a_chunk_are_refused():
    """--block-size below --chunk-size: no chunk, so nothing to rank and to read."""
    with pytest.raises(ValueError, match='block_size'):
        small(block_size=M - 1)


def test_one_process_may_be_faster_than_the_other(tmp_path):
    """Rank 0 is through before rank 1 looks: rank 1 still makes its own share."""
    whole = prepared(tmp_path / 'a', range(7))
    prepared(tmp_path / 'b', range(7), rank=0, world=2)
    assert same(prepared(tmp_path / 'b', range(7), rank=1, world=2), whole)


@pytest.mark.parametrize('name', ['candidates', 'scores', 'done'])
def test_a_file_that_ends_early_is_refused(tmp_path, name):
    """A full disk or a broken copy. NumPy would fill it up with zeros: all candidates chunk 0."""
    path = prepared(tmp_path).folder / f'{name}.npy'
    path.write_bytes(path.read_bytes()[:-len(path.read_bytes()) // 3 if name != 'done' else -1])
    with pytest.raises(SystemExit, match='delete'):
        prepared(tmp_path)


def test_a_reference_of_the_library_transformers(tmp_path):
    """A GPT-2 with random weights: the prefix once for all is the prompt from its start, for each candidate."""
    transformers = pytest.importorskip('transformers')
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50257, n_positions=64, n_embd=16, n_layer=2, n_head=2)).float().eval()
    for p in gpt2.parameters():
        p.data += 0.1 * torch.randn_like(p)
    gpt2.save_pretrained(tmp_path)
    reference, _, fold, _ = rpt.open_reference(tmp_path, SimpleNamespace(name='gpt2'), 4)
    chunks = torch.randint(50257, (12, 4), generator=torch.Generator().manual_seed(0))
    candidates = torch.full((12, 2), -1)
    candidates[5], candidates[8] = torch.tensor([0, 2]), torch.tensor([4, -1])
    s_t = rpt.target_scores(reference, chunks, candidates, pairs=2)

    def log_p(j, i):
        prompt = torch.cat([chunks[j], chunks[j + 1], chunks[i], chunks[i + 1]])[None]
        return gpt2(prompt).logits.log_softmax(-1)[0, 11:15].gather(1, chunks[i + 1][:, None]).mean().item()
    assert fold == -1 and [s_t[5, 0].item(), s_t[5, 1].item(), s_t[8, 0].item()] == pytest.approx(
        [log_p(0, 5) - log_p(3, 5), log_p(2, 5) - log_p(3, 5), log_p(4, 8) - log_p(6, 8)], abs=1e-5)
    assert s_t.isnan().sum() == 21


def test_a_reference_with_a_short_window_is_refused(tmp_path):
    """It would score the end of the target without having read the candidate."""
    model = small(retriever='none', window=2 * M)
    tokenizer = SimpleNamespace(name='bytes', to_dict=lambda: 'bytes')
    torch.save(dict(model=model.state_dict(), model_name='rpt', config=dataclasses.asdict(model.config), tokenizer='bytes', fold=0, corpus='c'), tmp_path / 'ckpt.pt')
    assert rpt.open_reference(tmp_path, tokenizer, M // 2)[2:] == (0, 'c')
    with pytest.raises(SystemExit, match=f'--window {4 * M}'):
        rpt.open_reference(tmp_path / 'ckpt.pt', tokenizer, M)
