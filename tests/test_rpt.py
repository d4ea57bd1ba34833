"""RPT against its definitions: pytest tests/test_rpt.py; it learns: pytest -m slow ..."""
import math
from collections import Counter, namedtuple
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rpt
from rpt import PRESETS, RPT, RPTConfig, TaughtBatch, bm25_candidates, corpus_idf, doc_of_chunks
from rpt import ranking_loss, target_scores

torch.set_num_threads(1)                        # the models are tiny
V, M, W, K = 23, 4, 2, 2                        # vocabulary, tokens of a chunk, chunks of a window
N, B = 11, 2                                    # chunks, sequences
T = N * M
EPS = 1e-9                                      # fp64 through a few layers
Batch = namedtuple('Batch', 'tokens targets doc seed')

@pytest.fixture(autouse=True)
def fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)

def small(**more):
    """A model far from its initial values, where everything is alike and all gates are 1/2."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=4, n_head=2, n_embd=16,
                 window=W * M, chunk_size=M, n_neighbors=K, n_candidates=4)
    model = RPT(RPTConfig(**{**sizes, **more})).eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    if model.neighbor_encoder and model.config.gate:
        model.neighbor_encoder.gate.weight.data *= 30                       # some below eta
    if model.idf is not None:
        model.idf.copy_(torch.from_numpy(corpus_idf(tokens_of(9, 400)[0].numpy(), M, V)))
    return model

def tokens_of(seed=0, t=T, b=B):
    return torch.randint(V, (b, t), generator=torch.Generator().manual_seed(seed))

def docs_of(*lengths, b=B):
    """Documents 0, 1, ... one after the other; a negative length is padding."""
    docs = [torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(lengths)]
    return torch.cat(docs).expand(b, -1)

def supervised(doc, J=4, seed=0):
    """A batch with BM25's candidates and scores of either sign; every third chunk has none."""
    tokens, generator = tokens_of(b=len(doc), t=doc.size(1)), torch.Generator().manual_seed(seed)
    chunks, chunk_doc = tokens.unflatten(1, (-1, M)).numpy(), doc_of_chunks(doc, M).numpy()
    candidates = np.stack([bm25_candidates(c, d, W, J) for c, d in zip(chunks, chunk_doc)])
    candidates = torch.from_numpy(candidates)
    scores = torch.randn(candidates.shape, generator=generator)
    scores[:, 2::3] = math.nan
    scores[candidates < 0] = math.nan
    targets = F.pad(tokens[:, 1:], (0, 1), value=-1)
    return TaughtBatch(tokens, targets, doc, seed, candidates, scores, 1.0)

def neighbors_of(model, tokens, *args):
    """What each chunk retrieves, (B, N, K)"""
    return model.encode(tokens, *args)[1].chosen[:, model.w - 1:]

# --------------------------------------------------------------------------------------------------
# the definition, position by position

@lru_cache(maxsize=None)
def rotation(p, D):
    """RoPE as a matrix (D, D): pair d rotates by the angle p 10000^(-2d/D)."""
    R = torch.zeros(D, D, dtype=torch.float64)
    for d in range(0, D, 2):
        a = p * 10000 ** (-d / D)
        R[d, d], R[d, d + 1], R[d + 1, d], R[d + 1, d + 1] = (
            math.cos(a), -math.sin(a), math.sin(a), math.cos(a))
    return R

def by_definition(model, tokens):
    """log P (t, V) of one text (t,) in loops over positions, heads, chunks; and the neighbors"""
    c, C, H, K = model.config, model.config.n_embd, model.config.n_head, model.n_neighbors
    D, m, w, t = C // H, c.chunk_size, c.window // c.chunk_size, len(tokens)
    n = t // m
    norm = lambda module, x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * module.gain
    mlp = lambda module, x: F.gelu(x @ module.fc.weight.T) @ module.proj.weight.T
    weights = lambda module: (module.query.weight, *module.kv.weight.split(C), module.proj.weight)
    everything = lambda y: lambda i: list(range(len(y)))

    def attention(parts, x, px, y, py, visible):
        """Tokens x at positions px attend to y at py: token i to the list visible(i)."""
        query, key, value, out = parts
        q, k, v = ((z @ W.T).view(-1, H, D) for z, W in ((x, query), (y, key), (y, value)))
        k, rows = torch.stack([k[j] @ rotation(p, D).T for j, p in enumerate(py)]), []
        for i, p in enumerate(px):
            js = visible(i)
            rows.append(torch.cat([(k[js, h] @ (rotation(p, D) @ q[i, h]) / D ** 0.5).softmax(0)
                                   @ v[js, h] for h in range(H)]))
        return torch.stack(rows) @ out.T

    def self_attention(block, x):
        b, y = c.window // 2, norm(block.norm1, x)
        parts = (*block.attention.qkv.weight.split(C), block.attention.proj.weight)
        visible = lambda i: list(range(max(0, (i // b - 1) * b), i + 1))
        return attention(parts, y, range(t), y, range(t), visible)

    x = model.embedding.weight[tokens]                                      # (t, C)
    for block in model.lower:
        x = x + self_attention(block, x)
        x = x + mlp(block.mlp, norm(block.norm2, x))
    chunks = [x[i * m:(i + 1) * m] for i in range(n)]
    E, found = chunks, [[] for _ in range(n)]
    if model.retriever:
        r, E, q, k = model.retriever, [], [], []
        for chunk in chunks:
            y, p = norm(r.norm, chunk), range(m)
            E.append(chunk + attention(weights(r.attention), y, p, y, p, everything(y)))
            mean = sum(E[-1]) / m
            q.append(r.query.weight @ norm(r.norm_q, mean) + r.query.bias)
            k.append(r.key.weight @ norm(r.norm_k, mean) + r.key.bias)
        for i in range(n):
            found[i] = sorted(range(i - w + 1), key=lambda j: -(q[i] @ k[j]).item())[:K]
    elif c.retriever == 'bm25':
        for i in range(n):
            score = {}
            for j in range(i - w + 1):
                tf = Counter(tokens[j * m:(j + 1) * m].tolist())
                query = [a for a in tokens[i * m:(i + 1) * m].tolist() if tf[a]]
                score[j] = sum(round(1024 * model.idf[a].item() * tf[a] / (tf[a] + 1.2))
                               for a in query)
            found[i] = sorted((j for j in score if score[j]), key=lambda j: (-score[j], j))[:K]

    used, means = [[] for _ in range(n)], []                                # (chunk, rank, mean)
    for i in range(n):
        for rank, j in enumerate(found[i]):
            e, y = model.neighbor_encoder, torch.cat([E[j], E[j + 1]])      # (2m, C)
            z = norm(e.norm1, y)
            y = y + attention(weights(e.attention), z, range(2 * m), z, range(2 * m), everything(z))
            y = y + attention(weights(e.cross), norm(e.norm2, y), range(2 * m),
                              norm(e.norm_query, chunks[i]), range(m), everything(chunks[i]))
            means.append((i, rank, sum(y) / (2 * m)))
            used[i].append(y)
    if c.gate and means:
        e, y = model.neighbor_encoder, torch.stack([mean for _, _, mean in means])
        places = [i * K + rank for i, rank, _ in means]
        visible = lambda a: [b for b in range(a + 1) if means[b][0] > means[a][0] - w]
        z = norm(e.norm3, y)
        y = y + attention(weights(e.gate_attention), z, places, z, places, visible)
        for (i, rank, _), z in zip(means, y):
            z = (e.gate.weight[0] @ norm(e.norm_gate, z) + e.gate.bias[0]) / C
            used[i][rank] = used[i][rank] * max(c.eta, z.sigmoid())
    for l, block in enumerate(model.upper):
        x = x + self_attention(block, x)
        if c.retriever != 'none' and l >= len(model.upper) - (c.n_cca or len(model.upper)):
            y = torch.zeros_like(x)
            for p in range(t):
                i = (p + 1) // m - 1                                        # the last whole chunk
                if i >= 0 and used[i]:
                    places, keys = list(range(2 * m)) * len(used[i]), torch.cat(used[i])
                    y[p] = attention(weights(block.cca.attention), norm(block.cca.norm, x[p:p + 1]),
                                     [p - i * m], keys, places, everything(keys))[0]
            x = x + y
        x = x + mlp(block.mlp, norm(block.norm2, x))
    return (norm(model.norm, x) @ model.embedding.weight.T).log_softmax(-1), found

SETTINGS = [{}, dict(retriever='lex', n_neighbors=3), dict(retriever='bm25'), dict(n_neighbors=1),
            dict(retriever='none'), dict(gate=False, n_cca=1), dict(window=4 * M, n_layer=3),
            dict(chunk_size=1, window=4), dict(eta=0.5, n_neighbors=4)]

@pytest.mark.parametrize('more', SETTINGS)
def test_the_model_is_the_papers(more):
    """Windows, retrieval, neighbors, gate, cross-attention; in one pass and in pieces, anywhere."""
    model, tokens = small(**more), tokens_of(t=20 * M + 3, b=1)
    model.piece = 3 * model.config.chunk_size
    with torch.no_grad():
        wanted, found = by_definition(model, tokens[0])
        torch.testing.assert_close(model.log_probs(tokens)[0], wanted, rtol=0, atol=EPS)
        if model.config.retriever != 'none':
            padded = [chunks + [-1] * (model.n_neighbors - len(chunks)) for chunks in found]
            assert neighbors_of(model, tokens)[0].tolist() == padded
    sizes = torch.randint(1, 12, (83,), generator=torch.Generator().manual_seed(1)).tolist()
    for sizes in ([1] * 83, sizes, [83], [M - 1] + [M] * 20):
        state, parts, rest = None, [], tokens
        for size in sizes:
            if rest.size(1):
                log_probs, state = model.stream(rest[:, :size], state)
                parts, rest = parts + [log_probs], rest[:, size:]
        torch.testing.assert_close(torch.cat(parts, dim=1)[0], wanted, rtol=0, atol=EPS)
    own = wanted[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(model.log_p(tokens[0]), own, rtol=0, atol=EPS)
    for way in ('shuffled', 'off') if len(model.ways()) > 1 else ():
        model.retrieval = way
        full = model.log_probs(tokens)
        torch.testing.assert_close(model.stream(tokens)[0], full, rtol=0, atol=EPS)
        assert (full[0] - wanted).abs().max() > 0.1

# --------------------------------------------------------------------------------------------------
# causality, and that the present is not late

@pytest.mark.parametrize('more', SETTINGS)
@pytest.mark.parametrize('way', ['on', 'shuffled'])
def test_the_future_is_invisible(more, way):
    """Changing a token moves no log P before it, bit for bit, and does move its own."""
    model, a = small(**more), tokens_of(t=T - 3)
    if way in model.ways():
        model.retrieval = way
    before = model.log_probs(a)
    for i in range(T - 3):
        b = a.clone()
        b[:, i] = (b[:, i] + 1) % V
        after = model.log_probs(b)
        assert torch.equal(after[:, :i], before[:, :i])
        assert not torch.equal(after[:, i], before[:, i])

@pytest.mark.parametrize('gate', [False, True])
def test_the_present_is_not_late(gate):
    """
    What chunk i retrieves is used from its last token on, by m tokens; through the gate, also by
    those of the next w - 1 chunks. (An offset of m in place of m - 1 would be causal too.)
    """
    model, tokens = small(gate=gate, eta=0.0, n_layer=2, window=4 * M), tokens_of(t=30 * M)
    teacher = neighbors_of(model, tokens)
    for i in range(6, 25):
        other = teacher.clone()
        other[:, i] = torch.tensor([0, -1]).where(teacher[:, i, :1] > 0, torch.tensor([1, -1]))
        f, g = (model.encode(tokens, None, x)[0] for x in (teacher, other))
        reached = list(range(i * M + M - 1, (i + (4 if gate else 1)) * M + M - 1))
        assert (f != g).any(2)[0].nonzero()[:, 0].tolist() == reached

@pytest.mark.parametrize('retriever', ['sem', 'bm25', 'lex'])
@pytest.mark.parametrize('t', [1, M - 1, M, W * M + M - 1, W * M + M, 5 * M + 1])
def test_few_tokens(retriever, t):
    """Before chunk w is complete nothing can be retrieved: exactly the model without retrieval."""
    model, tokens, start = small(retriever=retriever, n_neighbors=3), tokens_of(t=t), W * M + M - 1
    on = model.log_probs(tokens)
    model.retrieval = 'off'
    off = model.log_probs(tokens)
    assert on.isfinite().all() and torch.equal(on[:, :start], off[:, :start])
    assert retriever == 'bm25' or t <= start or not torch.equal(on[:, start], off[:, start])

def test_positions_are_relative():
    """fp32: a text at token 40,000 as at the start, once the layers see no token before it."""
    torch.set_default_dtype(torch.float32)
    model, text = small(retriever='none', n_layer=2), tokens_of(2, 96, 1)
    noise = tokens_of(1, 40_000, 1)
    far, near = (model.stream(x)[0][:, -64:] for x in (torch.cat([noise, text], dim=1), text))
    torch.testing.assert_close(far, near, rtol=0, atol=2e-5)

# --------------------------------------------------------------------------------------------------
# documents, random neighbors

DOC = docs_of(14, 17, 1, 22, 18, 3, -5)         # 20 chunks, some of two or three documents

def permitted_by_hand(doc, w):
    """Chunk i, k <= i - w: all tokens of both chunks are of one document."""
    n = len(doc) // M
    docs = [set(doc[i * M:(i + 1) * M].tolist()) for i in range(n)]
    return torch.tensor([[k <= i - w and len(docs[i] | docs[k]) == 1 and -1 not in docs[i]
                          for k in range(n)] for i in range(n)])

@pytest.mark.parametrize('way', ['on', 'shuffled'])
@pytest.mark.parametrize('retriever', ['sem', 'bm25'])
@pytest.mark.parametrize('doc', [DOC, docs_of(80), docs_of(-80), docs_of(*[7] * 11, 3)])
def test_what_may_be_retrieved(doc, retriever, way):
    """Against brute force; the best of these or random ones; all where there are less than K."""
    model, tokens = small(n_neighbors=3, retriever=retriever), tokens_of(t=80)
    may = permitted_by_hand(doc[0], W)
    model.retrieval = way
    _, state, scores = model.encode(tokens, doc)
    if retriever == 'sem':
        assert torch.equal(scores > -math.inf, may.expand(B, 20, 20))
    may = (scores > -math.inf) & may                                        # BM25: a term in common
    for b in range(B):
        for i in range(20):
            best = sorted(may[b, i].nonzero()[:, 0].tolist(), key=lambda k: -scores[b, i, k].item())
            chosen = [k for k in state.chosen[b, 1 + i].tolist() if k >= 0]
            assert chosen == best[:3] if way == 'on' else set(chosen) <= set(best)
            assert len(chosen) == len(set(chosen)) == min(3, len(best))

@pytest.mark.parametrize('retriever', ['sem', 'bm25'])
def test_documents_are_not_crossed(retriever):
    """Without self-attention, which crosses them, nothing passes from one document to another."""
    model, a = small(retriever=retriever, n_neighbors=3), tokens_of(t=80)
    for block in [*model.lower, *model.upper]:
        block.attention.proj.weight.data.zero_()
    before = model.encode(a, DOC)[0]
    for d in (0, 1, 3, 4, -1):
        after = model.encode(torch.where(DOC == d, tokens_of(5, 80), a), DOC)[0]
        assert torch.equal(after[DOC != d], before[DOC != d])
        assert not torch.equal(after[DOC == d], before[DOC == d])
    alone = model.encode(a[:, 32:54])[0]                                    # it begins with a chunk
    torch.testing.assert_close(alone, before[:, 32:54], rtol=0, atol=EPS)

def test_random_neighbors():
    """They are spread evenly over the permitted chunks."""
    model = small(n_neighbors=1)
    model.retrieval = 'shuffled'
    chosen = neighbors_of(model, tokens_of(t=200 * M, b=1))[0, 100:, 0]
    share = chosen / (torch.arange(100, 200) - W + 1)                       # uniform in [0, 1)
    assert abs(share.mean() - 0.5) < 0.09 and abs(share.std() - 12 ** -0.5) < 0.06

# --------------------------------------------------------------------------------------------------
# the ranking loss

def ranking_by_definition(scores, candidates, target_scores, tau):
    """§3.3 for one text, swapping places: L_ret and NDCG@20 of each chunk that has a positive."""
    losses, ndcgs = [], []
    for i in range(len(scores)):
        s_t = {k: s for k, s in zip(candidates[i].tolist(), target_scores[i].tolist())
               if k >= 0 and s == s}
        gain = lambda k: 2 ** max(s_t.get(k, 0), 0) - 1
        dcg = lambda order: sum(gain(k) / math.log2(2 + r) for r, k in enumerate(order))
        permitted = (scores[i] > -math.inf).nonzero()[:, 0].tolist()
        ranking = sorted(permitted, key=lambda k: -scores[i, k].item())
        best = sorted(ranking, key=lambda k: -gain(k))
        if not any(s > 0 for s in s_t.values()):
            continue
        loss = 0
        for a in [k for k in ranking if s_t.get(k, -1) > 0]:
            for b in [k for k in ranking if s_t.get(k, -math.inf) < s_t[a]]:
                swapped = [b if k == a else a if k == b else k for k in ranking]
                lam = abs(dcg(swapped) - dcg(ranking)) / dcg(best)
                loss = loss + lam * (tau - (scores[i, a] - scores[i, b])).clamp(min=0)
        losses.append(loss)
        ndcgs.append(dcg(ranking[:20]) / dcg(best[:20]))
    return losses, ndcgs

def ranking_case(n=9, J=4, w=2):
    """Scores, candidates, s_t of both signs, some not scored; chunks without positives."""
    generator = torch.Generator().manual_seed(0)
    candidates, s_t = torch.full((B, n, J), -1), torch.randn(B, n, J, generator=generator)
    for b, i in np.ndindex(B, n - 1 - w):
        some = torch.randperm(i + 1, generator=generator)[:J]
        candidates[b, i + w, :len(some)] = some
    s_t[:, 4], s_t[:, 5], s_t[:, n - 2] = -s_t[:, 4].abs(), math.nan, s_t[:, n - 2].abs()
    scores, i = 2 * torch.randn(B, n, n, generator=generator), torch.arange(n)
    scores = scores.masked_fill(i > i[:, None] - w, -math.inf)
    return scores, candidates, s_t.masked_fill(candidates < 0, math.nan)

@pytest.mark.parametrize('n, J, tau', [(9, 4, 4.0), (9, 20, 0.5), (30, 26, 2.0)])
def test_ranking_loss_is_the_papers(n, J, tau):
    """Against loops that swap places; λ is a constant in the gradient."""
    scores, candidates, s_t = case = ranking_case(n, J)
    loss, ndcg, ranked = ranking_loss(*case, tau)
    losses, ndcgs = zip(*(ranking_by_definition(*(x[b] for x in case), tau) for b in range(B)))
    losses, ndcgs = sum(losses, []), sum(ndcgs, [])
    assert ranked == len(losses) < B * (n - 3) and loss > 0
    assert loss.item() == pytest.approx(sum(losses).item(), abs=EPS)
    assert ndcg.item() == pytest.approx(sum(ndcgs), abs=EPS)
    if n == 9:
        finite = scores.masked_fill(scores == -math.inf, 0).requires_grad_()
        mask = lambda x: x.masked_fill(scores == -math.inf, -math.inf)
        f = lambda x: ranking_loss(mask(x), candidates, s_t, tau)[0]
        assert torch.autograd.gradcheck(f, finite, eps=1e-6)

def test_nothing_to_rank():
    """No positives, candidates or scores: 0, and no nan in the gradient. One at rank 2: 0.6309."""
    scores, candidates, s_t = ranking_case()
    scores.requires_grad_()
    for case in ((candidates, -s_t.abs()), (candidates, s_t * math.nan), (candidates * 0 - 1, s_t)):
        sums = ranking_loss(scores, *case, 3.0)
        grad, = torch.autograd.grad(sums[0], scores)
        assert [x.item() for x in sums] == [0, 0, 0] and (grad == 0).all()
    one = torch.full((1, 3, 3), -math.inf)
    one[0, 2, :2] = torch.tensor([1.0, 2.0])
    case = torch.tensor([[[-1], [-1], [0]]]), torch.tensor([[[math.nan], [math.nan], [0.7]]])
    assert ranking_loss(one, *case, 1.0)[1].item() == pytest.approx(1 / math.log2(3))

# --------------------------------------------------------------------------------------------------
# the teacher

@pytest.mark.parametrize('with_idf', [True, False])
@pytest.mark.parametrize('w', [2, 3])
def test_bm25_candidates(w, with_idf):
    """Against the formula in loops; the last chunk of a document has no target."""
    chunks, doc = tokens_of(3, 120)[0].numpy().reshape(-1, M), docs_of(34, 41, 2, 29, -14)[0]
    chunk_doc, text = doc_of_chunks(doc[None], M)[0].numpy(), tokens_of(4, 90)[0].numpy()
    rows = [set(row) for row in text[:88].reshape(-1, M).tolist()]
    log_idf = lambda n, df: math.log(1 + (n - df + 0.5) / (df + 0.5))
    idf = corpus_idf(text, M, V) if with_idf else None
    if with_idf:
        df = [sum(t in row for row in rows) for t in range(V)]
        assert idf == pytest.approx([log_idf(22, n) for n in df])
        vectors = rpt.bm25_vectors(torch.from_numpy(chunks)[None], torch.from_numpy(idf))
        q, k = (x[0] for x in vectors)
        tf = [Counter(chunk) for chunk in chunks.tolist()]
        exact = [[sum(idf[t] * y[t] / (y[t] + 1.2) for t in x) for y in tf]
                 for x in chunks.tolist()]
        torch.testing.assert_close(q @ k.T, torch.tensor(exact), rtol=0, atol=M / 2 ** 11)
    found, may = bm25_candidates(chunks, chunk_doc, w, 5, idf), permitted_by_hand(doc, w)
    for i in range(30):
        same = [k for k in range(30) if chunk_doc[k] == chunk_doc[i] >= 0]
        query, score = chunks[i:i + 2].ravel().tolist(), {}
        for k in may[i].nonzero()[:, 0].tolist() if i + 1 in same else []:
            tf = Counter(chunks[k].tolist())
            df = lambda t: sum(t in chunks[j] for j in same)
            weight = lambda t: idf[t] if with_idf else log_idf(len(same), df(t))
            score[k] = sum(weight(t) * tf[t] / (tf[t] + 1.2) for t in query if tf[t])
        best = sorted((k for k in score if score[k]), key=lambda k: (-round(score[k], 5), k))[:5]
        assert found[i].tolist() == best + [-1] * (5 - len(best)), i

def test_target_scores():
    """As if each (c_j, c_{j+1}, c_i, c_{i+1}) were a text; candidate i - 2 has exactly 0."""
    reference, chunks = small(retriever='none', n_layer=2), tokens_of(2)[0].view(N, M)
    candidates = torch.full((N, 3), -1)
    candidates[2:6] = torch.tensor([[0, -1, -1], [-1, 1, 0], [2, 0, 1], [-1, -1, -1]])
    candidates[8:10] = torch.tensor([[0, 4, 6], [7, 1, 3]])
    s_t = target_scores(reference, chunks, candidates)

    def log_p(i, j):
        text = torch.cat([chunks[j], chunks[j + 1], chunks[i], chunks[i + 1]])
        return reference.log_p(text)[-M:].mean().item()
    for i, slot in np.ndindex(N, 3):
        j = candidates[i, slot].item()
        wanted = log_p(i, j) - log_p(i, i - 2) if j >= 0 else math.nan
        assert s_t[i, slot].item() == pytest.approx(wanted, abs=EPS, nan_ok=True)
    assert (s_t[[2, 3, 4, 8, 9], [0, 1, 0, 2, 0]] == 0).all() and s_t.nan_to_num().abs().max() > 0.1
    assert target_scores(reference, chunks, candidates * 0 - 1).isnan().all()

class Batches:
    """In place of data.Batches: 7 sequences, two in a micro-batch; the last one is half padding."""
    B, T, n_rows = 2, T, 7

    def rows(self, g):
        return np.arange(7)[g % 4 * 2:][:2]

    def take(self, rows, seed):
        tokens, doc = torch.zeros(B, T, dtype=torch.long), torch.full((B, T), -1)
        for b, row in enumerate(rows.tolist()):
            tokens[b], doc[b] = tokens_of(100 + row, T, 1)[0], row % 2 + docs_of(T, b=1)[0]
        return Batch(tokens, F.pad(tokens[:, 1:], (0, 1), value=-1), doc, seed)

@dataclass
class TrainConfig:
    tokens_per_step: int = 4 * T
    max_steps: int = 2
    fold: int = -1
    init: str = ''
    dtype: str = 'fp32'

def run_setup(folder, retriever='sem', progress=lambda items, *_, **__: items, **more):
    """setup with stand-ins for data.py and train.py -> model, attach, the reference LM"""
    model = small(retriever=retriever, window=4 * M, **more)
    reference = small(retriever='none', n_layer=2, window=4 * M)
    train = SimpleNamespace(tokens=tokens_of(9, 400)[0].numpy(), offsets=np.arange(0, 500, 100))
    tokenizer = SimpleNamespace(to_dict=str)
    corpus = SimpleNamespace(folder=folder, fingerprint='f', tokenizer=tokenizer, train=train)

    def train_reference(model_config, train_config, suffix):
        assert (model_config.retriever, model_config.n_layer, train_config.fold) == ('none', 2, 0)
        torch.save(dict(config=vars(reference.config), model=reference.state_dict(), fold=0,
                        corpus='f', tokenizer=''), folder / 'ckpt.pt')
        return folder / 'ckpt.pt'
    autocast = lambda: torch.autocast('cpu', enabled=False)
    return model, rpt.setup(model, corpus, Batches(), TrainConfig(), autocast, train_reference,
                            progress), reference

def taught_batch(attach, g):
    return attach(Batches().take(Batches().rows(g), g), g)

def test_setup(tmp_path):
    """
    Attached is what bm25_candidates and target_scores return, of every second chunk of documents
    that the reference LM was not trained on. An interrupted run resumes.
    """
    def interrupted(items, *_, **__):
        yield from items[:2]
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        run_setup(tmp_path, progress=interrupted, score_every=2)
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.glob('teacher-*/*')}
    model, attach, reference = run_setup(tmp_path, score_every=2)
    assert len(stored) == 2 and all(path.stat().st_mtime_ns == t for path, t in stored.items())
    assert len(list(tmp_path.glob('teacher-*/*'))) == 7
    for g in range(4):
        batch = taught_batch(attach, g)
        for b, row in enumerate(Batches().rows(g).tolist()):
            chunks, doc = batch.tokens[b].view(N, M), doc_of_chunks(batch.doc, M)[b].numpy()
            candidates = torch.from_numpy(bm25_candidates(chunks.numpy(), doc, 4, 4))
            s_t = target_scores(reference, chunks, candidates)
            s_t[1::2] = math.nan
            s_t = s_t if row % 2 else s_t * math.nan                        # even: trained on it
            assert torch.equal(batch.candidates[b], candidates) and (candidates >= 0).any()
            torch.testing.assert_close(batch.target_scores[b].double(), s_t, rtol=1e-3, atol=1e-6,
                                       equal_nan=True)
    assert (batch.candidates[1] == -1).all() and batch.target_scores[1].isnan().all()

@pytest.mark.parametrize('retriever', ['sem', 'lex'])
def test_ranking_loss_over_micro_batches(tmp_path, retriever):
    """The mean of L_ret over the two micro-batches of a step is that of one big batch."""
    model, attach, _ = run_setup(tmp_path, retriever, teacher='always')
    parts, losses = [taught_batch(attach, g) for g in (2, 3)], []
    mean = sum(model.train()(batch, 0.5)[1]['ret_loss'] for batch in parts) / 2
    for batch in parts:
        scores = model.encode(batch.tokens, batch.doc)[2]
        for case in zip(scores, batch.candidates, batch.target_scores):
            losses += ranking_by_definition(*case, 2.5)[0]
    assert parts[0].ranked == parts[1].ranked == len(losses) / 2 > 0
    assert mean.item() == pytest.approx(sum(losses).item() / len(losses))

def test_setup_of_retro_and_of_transformer_xl(tmp_path):
    """RETRO: the corpus' idf at test time and for the candidates; none: nothing to do."""
    model, attach, _ = run_setup(tmp_path, 'bm25')
    idf = corpus_idf(tokens_of(9, 400)[0].numpy(), M, V)
    assert model.idf.numpy() == pytest.approx(idf)
    batch = taught_batch(attach, 0)
    wanted = bm25_candidates(batch.tokens[0].view(N, M).numpy(), np.zeros(N), 4, 4, idf)
    assert np.array_equal(batch.candidates[0], wanted)
    model.train()(batch, 0.5)[0].backward()
    plain, attach, _ = run_setup(tmp_path, 'none')
    assert attach(batch, 0) is batch and not [name for name in plain.state_dict() if 'cca' in name]

# --------------------------------------------------------------------------------------------------
# training

LONG = docs_of(61, 50, -9)                      # more candidates than K

def teacher_of(batch, K):
    """The K best positives of each chunk; without scores, BM25's first K."""
    wanted = torch.full((*batch.candidates.shape[:2], K), -1)
    for b, i in np.ndindex(*wanted.shape[:2]):
        pairs = [(k, s) for k, s in zip(batch.candidates[b, i].tolist(),
                                        batch.target_scores[b, i].tolist()) if k >= 0]
        if pairs and pairs[0][1] == pairs[0][1]:
            pairs = sorted(((k, s) for k, s in pairs if s > 0), key=lambda pair: -pair[1])
        wanted[b, i, :len(pairs[:K])] = torch.tensor([k for k, _ in pairs[:K]], dtype=torch.long)
    return wanted

@pytest.mark.parametrize('K', [1, 3])
def test_the_loss_in_training(K):
    """Cross entropy with the teacher's neighbors and α L_ret, values and gradients."""
    model, batch = small(teacher='always', alpha=0.7, tau=5.0, n_neighbors=K), supervised(LONG)
    ce = lambda f: F.cross_entropy(model.logits(f).flatten(0, 1), batch.targets.flatten(),
                                   ignore_index=-1)
    f, _, scores = model.encode(batch.tokens, batch.doc, teacher_of(batch, K))
    cases = [ranking_by_definition(*case, 1.4)                              # τ at a tenth
             for case in zip(scores, batch.candidates, batch.target_scores)]
    losses, ndcgs = (sum(x, []) for x in zip(*cases))
    wanted = ce(f) + 0.7 / 2 * sum(losses) / len(losses)                    # α at half
    loss, log = model.train()(batch._replace(ranked=len(losses)), 0.1)
    assert loss.item() == pytest.approx(wanted.item()) and log['ranked'] == len(losses)
    assert log['lm_loss'].item() == pytest.approx(ce(f).item())
    assert log['ndcg'].item() == pytest.approx(sum(ndcgs) / len(ndcgs))
    parameters = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(x, parameters, retain_graph=x is loss)
                      for x in (loss, wanted))):
        torch.testing.assert_close(a, b)
    loss, log = model.eval()(batch, 0.0)                                    # the model's neighbors
    own = model.encode(batch.tokens, batch.doc)[0]
    assert log == {} and loss.item() == pytest.approx(ce(own).item())

def test_schedules():
    """Each chunk gets the teacher's neighbors or its own; the draws come from the batch's seed."""
    model, batch, seen = small(alpha=0.5), supervised(docs_of(400, b=8)), []
    encode = model.encode
    def spy(*args):
        seen.append(encode(*args))
        return seen[-1]
    model.encode = spy
    for seed, noise, progress in ((0, 0, 0.3), (0, 1, 0.3), (1, 0, 0.3), (0, 0, 0.0), (0, 0, 0.9)):
        torch.manual_seed(noise)
        model.train()(batch._replace(seed=seed), progress)
    a, b, c, teacher, own = (state.chosen[:, W - 1:] for _, state, _ in seen)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(teacher, teacher_of(batch, K))
    assert torch.equal(own, neighbors_of(small(), batch.tokens))
    of_teacher, differ = (a == teacher).all(2), (teacher != own).any(2)
    assert (of_teacher | (a == own).all(2)).all()
    assert of_teacher[differ].double().mean().item() == pytest.approx(0.75, abs=0.06)
    chance, alpha, tau = zip(*(model.schedule(x) for x in (0, 0.1, 0.45, 0.9, 1)))
    assert chance == pytest.approx([1, 0.9698, 0.5, 0, 0], abs=1e-4)
    assert alpha == pytest.approx([0, 0.25, 0.5, 0.5, 0.5])
    assert tau == pytest.approx([1, 1.3, 2.35, 3.7, 4])

def test_which_loss_trains_what():
    """W_Q, W_K get a gradient from L_ret alone, off at first; all else from the LM loss."""
    model, batch = small().train(), supervised(LONG)

    def trained(progress):
        model.zero_grad()
        model(batch, progress)[0].backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert all(g.isfinite().all() for g in grads.values())
        return {name for name, g in grads.items() if g.abs().max() > 1e-9}
    names = {name for name, _ in model.named_parameters()}
    scoring = ('retriever.query', 'retriever.key', 'retriever.norm_')
    assert trained(0) == {name for name in names if not name.startswith(scoring)}
    assert trained(0.5) >= names - {'retriever.key.bias'}                   # moves all scores

def test_dropout_and_bf16():
    """All randomness comes from the seed. Under autocast scores and logits are fp32."""
    torch.set_default_dtype(torch.float32)
    model, batch, losses, vectors = small(dropout=0.5), supervised(docs_of(T)), [], []
    for noise, seed in ((0, 7), (1, 7), (0, 8)):
        torch.manual_seed(noise)
        losses.append(model.train()(batch._replace(seed=seed), 0.5)[0].item())
    assert losses[2] != losses[0] == losses[1]
    for linear in (model.eval().retriever.query, model.retriever.key):
        linear.register_forward_hook(lambda module, x, y: vectors.append(y))
    with torch.autocast('cpu', torch.bfloat16):
        f, _, scores = model.encode(batch.tokens)
        logits = model.logits(f)
    (q, k), permitted = vectors, scores > -math.inf
    exact = (q.double() @ k.double().transpose(1, 2) / 4).float()
    torch.testing.assert_close(scores[permitted], exact[permitted], rtol=1e-5, atol=1e-6)
    assert q.dtype == torch.bfloat16 and logits.dtype == torch.float32

# --------------------------------------------------------------------------------------------------
# sizes, settings, evaluation

@pytest.mark.parametrize('more, millions', [
    (dict(retriever='none'), 202.5), (dict(retriever='none', n_layer=14), 227.7),
    (dict(retriever='bm25'), 236.05), (dict(), 242.35)])
def test_parameter_counts_of_the_paper(more, millions):
    """Table 2: Transformer-XL 202M, with two more layers 228M, RETRO 236M, RPT 242M."""
    sizes = {k: v for k, v in PRESETS['paper'].items() if k in RPTConfig.__dataclass_fields__}
    with torch.device('meta'):
        model = RPT(RPTConfig(**{**sizes, 'vocab_size': 50_277, **more}))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)

def test_equal_seeds_give_equal_initial_weights():
    """What two settings share begins equal: else one seed would compare initial weights."""
    def start(**more):
        torch.manual_seed(0)
        return RPT(RPTConfig(n_embd=16, vocab_size=V, **more)).state_dict()
    plain = start(retriever='none')
    for more in (dict(), dict(retriever='bm25'), dict(n_cca=1)):
        weights = start(**more)
        assert all(p.equal(weights[name]) for name, p in plain.items())

@pytest.mark.parametrize('more', [
    dict(n_neighbors=0), dict(chunk_size=0), dict(n_embd=18), dict(window=96), dict(window=3),
    dict(block_size=191), dict(n_layer=1), dict(n_cca=3), dict(n_candidates=1), dict(eta=1.1),
    dict(dropout=1.0), dict(alpha=-1.0), dict(retriever='lex', reference='x'), dict(n_cca=-1)])
def test_bad_configurations_are_refused(more):
    with pytest.raises(ValueError):
        RPTConfig(**more)

def test_trace():
    """The neighbors and gates of the last chunk that is complete at t, in the document's tokens."""
    model, tokens = small(n_neighbors=3), tokens_of(t=90, b=1)[0]
    model.piece, chosen = 5 * M, neighbors_of(model, tokens[None])[0].tolist()
    gates = model.encode(tokens[None])[1].gates[0].tolist()
    for t in (3, 11, 42, 43, 44, 88):
        i = (t + 1) // M - 1
        wanted = sorted(((g, k * M, k * M + 2 * M) for g, k in zip(gates[i], chosen[i]) if k >= 0),
                        reverse=True)
        spans = model.trace(tokens, t)
        assert all(where is tokens for _, where, _, _ in spans)
        assert [(a, b) for _, _, a, b in spans] == [(a, b) for _, a, b in wanted]
        assert [g for g, *_ in spans] == pytest.approx([g for g, *_ in wanted])
    assert small(retriever='none').trace(tokens, 50) == []

def test_ranks():
    """Precision, recall, nDCG and gains of a run against loops."""
    model, reference = small(window=4 * M), small(retriever='none', n_layer=2, window=4 * M)
    runs = [SimpleNamespace(model=model, name='run'), SimpleNamespace(model=reference, name='xl')]
    text, offsets = tokens_of(3, 130, 1)[0].numpy(), np.array([0, 50, 60, 130])
    corpus = SimpleNamespace(train=SimpleNamespace(tokens=tokens_of(9, 400)[0].numpy()))
    split = SimpleNamespace(tokens=text, offsets=offsets)
    result = rpt.ranks(runs, corpus, split, SimpleNamespace(sequences=5))
    values = {name: [] for name in ('precision@2', 'recall@10', 'ndcg@20', 'gain+', 'gain-')}
    for start in (0, 60):
        tokens, k, log_p = torch.from_numpy(text[start:start + T]), torch.arange(N), {}
        candidates = k.where((k <= k[:, None] - 4) & (k[:, None] < N - 1), -1)
        s_t = target_scores(reference, tokens.view(N, M), candidates)
        _, state, (scores,) = model.encode(tokens[None])
        for model.retrieval in ('off', 'on'):
            log_p[model.retrieval] = model.log_p(tokens)
        for i in range(4, N - 1):
            s = s_t[i, sorted(range(i - 3), key=lambda k: -scores[i, k].item())]
            gain = (log_p['on'] - log_p['off'])[(i + 1) * M - 1:(i + 2) * M - 1].mean().item()
            hit = any(k >= 0 and s_t[i, k] > 0 for k in state.chosen[0, 3 + i].tolist())
            values['gain+' if hit else 'gain-'].append(gain)
            if (s > 0).any():
                gains = 2 ** s.clamp(min=0) - 1
                discount = 1 / torch.log2(2.0 + torch.arange(len(s)))
                best = gains.sort(descending=True).values
                values['precision@2'].append((s[:2] > 0).sum().item() / 2)
                values['recall@10'].append(((s[:10] > 0).sum() / (s > 0).sum()).item())
                values['ndcg@20'].append(((gains @ discount) / (best @ discount)).item())
    assert result['run'] == pytest.approx({name: np.mean(x) for name, x in values.items()})
    assert set(result) == {'chance', 'recency', 'BM25', 'run'}

# --------------------------------------------------------------------------------------------------
# it learns

def train(model, batch_of, steps, lr=3e-3):
    for p in model.parameters():
        p.data *= 3 if p.dim() == 2 else 1                                  # it learns sooner
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(steps):
        optimizer.param_groups[0]['lr'] = lr * min(1, (step + 1) / 30)
        model.train()(batch_of(step), step / steps)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()

@pytest.mark.slow
def test_random_tokens_cannot_be_predicted_with_larger_weights():
    """
    No leak: trained on random tokens with a teacher that knows the target, the loss with the
    model's neighbors stays at ln V; with the teacher's it falls below.
    """
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    V, m, n, i = 4, 2, 24, torch.arange(24)
    model = RPT(RPTConfig(
        vocab_size=V, block_size=n * m, n_layer=2, n_head=2, n_embd=32, window=4 * m, chunk_size=m,
        n_neighbors=1, n_candidates=1, teacher='always', alpha=0.1))

    def batch(seed):
        tokens = torch.randint(V, (16, n * m))
        word = tokens.view(16, n, m) @ torch.tensor([1, V])                 # (B, N)
        like = (word[:, 1:, None] == word[:, None, 1:]) & (i[:-1] <= i[:-1, None] - 4)
        best = torch.where(like, i[:-1], -1).max(2, keepdim=True).values
        best = F.pad(best, (0, 0, 0, 1), value=-1)
        return TaughtBatch(tokens, F.pad(tokens[:, 1:], (0, 1), value=-1), torch.zeros_like(tokens),
                           seed, best, torch.where(best >= 0, 1.0, math.nan), 100)
    train(model, batch, 90, 5e-3)
    with torch.no_grad():
        own = sum(model(batch(0), 1)[0].item() for _ in range(20)) / 20
        taught = sum(model.train()(batch(0), 1)[1]['lm_loss'].item() for _ in range(5)) / 5
    assert taught < math.log(V) - 0.15 and own > math.log(V) - 0.02         # 15,040 tokens

@pytest.mark.slow
def test_retrieval_is_learned_with_larger_weights():
    """
    Six facts, a chunk with a key and one with its value; later the keys again, each followed by its
    value, which only retrieval can know. The teacher's score is 1 for the key's first place.
    """
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    at, k = torch.arange(15, 27, 2), torch.arange(26)

    def batch(step, n=16):
        keys, values = torch.randint(16, (2, n, 6, M))
        order, x = torch.rand(n, 6).argsort(1), torch.randint(32, 40, (n, 28, M))
        x[:, 0:12:2], x[:, 1:12:2] = keys, values + 16
        x[:, at], x[:, at + 1] = x[:, 0:12:2], x[:, 1:12:2]
        for start in (at, at + 1):
            x[:, start] = x[:, start].gather(1, order[..., None].expand(-1, -1, M))
        targets = torch.full((n, 28, M), -1)
        targets[:, at + 1] = x[:, at + 1]
        targets = F.pad(targets.flatten(1)[:, 1:], (0, 1), value=-1)
        candidates = k.where(k <= torch.arange(28)[:, None] - W, -1).expand(n, 28, 26)
        s_t = torch.where(candidates >= 0, -1.0, math.nan)
        s_t[:, at] = s_t[:, at].scatter(2, 2 * order[..., None], 1.0)
        x = x.flatten(1)
        return TaughtBatch(x, targets, x * 0, step, candidates, s_t, 6 * n)
    model = train(RPT(RPTConfig(
        vocab_size=40, block_size=28 * M, n_layer=2, n_head=4, n_embd=64, window=W * M,
        chunk_size=M, n_neighbors=1, n_candidates=26)), batch, 150)
    test, nats = batch(0, 64), {}
    with torch.no_grad():
        for model.retrieval in ('off', 'shuffled', 'on'):
            nats[model.retrieval] = model(test, 1)[0].item()
    first = test.target_scores[:, at].nan_to_num(-1).argmax(2)
    right = (neighbors_of(model, test.tokens)[:, at, 0] == first).double().mean()
    assert right > 0.9 and nats['on'] < 0.3 and min(nats['off'], nats['shuffled']) > 2
