"""RPT against its definitions, with loops in fp64."""
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data, rpt
from helpers import batch_of, close, formula, learn, one_line, ranking, rope, write_splits
from rpt import RPT, RPTConfig, bm25_candidates, ranking_loss, target_scores
from train import TrainConfig

V, M, W, K = 23, 4, 2, 2                        # ids, m, chunks of a window, neighbors
N, B = 11, 2                                    # chunks, sequences
T, EPS = N * M, 1e-9
START = W * M + M - 1                           # the first token that may use a neighbor
SETTINGS = [{}, dict(retriever='lex'), dict(retriever='bm25'), dict(retriever='none'),
            dict(gate=False), dict(n_neighbors=1), dict(n_cca=1, n_neighbors=3),
            dict(window=4 * M, n_layer=3), dict(chunk_size=1, window=4),
            dict(eta=0.5, n_neighbors=4), dict(retriever='bm25', gate=False, dropout=0.5),
            dict(shift_values=False)]
CONFIG = TrainConfig(tokens_per_step=4 * 48, max_steps=3, dtype='fp32')


@pytest.fixture(autouse=True)
def fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def small(**more):
    """A model far from its initial state, where all chunks look alike and all gates are 1/2."""
    torch.manual_seed(0)
    config = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=4, n_head=2, n_embd=16,
                  window=W * M, chunk_size=M, n_neighbors=K, n_candidates=4)
    model = RPT(RPTConfig(**{**config, **more})).eval()
    for name, p in model.named_parameters():
        p.data += 0.3 * torch.randn_like(p)
        p.data *= 30 if name.endswith('.gate.weight') else 1
        p.data -= 48 if name.endswith('.gate.bias') else 0              # some gates below eta
    if model.config.retriever == 'bm25': model.idf[:V] = IDF
    return model


def tokens_of(seed=0, t=T, b=B):
    return torch.randint(V, (b, t), generator=torch.Generator().manual_seed(seed))


def docs_of(*lengths):
    """Documents 0, 1, ... of these lengths in a sequence (1, T); a negative length is padding."""
    docs = [torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(lengths)]
    return torch.cat(docs)[None]


def corpus_idf(tokens, V):
    """By the equation in bm25.py, of all chunks (n, M)"""
    chunks = [set(tokens[i:i + M]) for i in range(0, len(tokens) - M + 1, M)]
    df, n = [sum(a in chunk for chunk in chunks) for a in range(V)], len(chunks)
    idf = [math.log(1 + (n - x + 0.5) / (x + 0.5)) for x in df]
    return torch.tensor(idf, dtype=torch.float64)


IDF = corpus_idf(tokens_of(9, 400)[0].tolist(), V)


def taught(tokens, J=4, **more):
    """Random scores of BM25's candidates; every third chunk has no positive."""
    chunks = tokens.view(len(tokens), -1, M)
    doc = torch.zeros(chunks.size(1))
    candidates = torch.stack([bm25_candidates(x, doc, W, J, IDF) for x in chunks]) > 0
    scores = torch.randn(candidates.shape, generator=torch.Generator().manual_seed(1))
    scores[:, 2::3] = -scores[:, 2::3].abs()
    scores = scores * candidates
    return batch_of(tokens, target_scores=scores, ranked=(scores > 0).any(2).sum().item(), **more)


def attention(module, x, x_positions, y, y_positions, visible=lambda i, j: True):
    """Token i of x attends to the tokens j of y that are visible(i, j)."""
    H, qkv = module.n_head, getattr(module, 'qkv', None)
    weight = qkv.weight if qkv else torch.cat([module.query.weight, module.kv.weight])
    q, k, v = (z @ w.T for z, w in zip((x, y, y), weight.split(x.size(1))))
    q, k, v = (z.unflatten(1, (H, -1)) for z in (q, k, v))              # (t or s, H, D)
    n = y_positions[-1] + 1                     # tokens of a text
    if getattr(module, 'shift', False):         # values of the next tokens
        v = torch.stack([v[i + 1 if (i + 1) % n else i + 1 - n] for i in range(len(v))])
    q, k = rope(q, x_positions), rope(k, y_positions)
    mask = torch.tensor([[visible(i, j) for j in range(len(y))] for i in range(len(x))])
    z = torch.einsum('thd,shd->hts', q, k) / q.size(2) ** 0.5
    p = z.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum('hts,shd->thd', p, v).flatten(1) @ module.proj.weight.T


@torch.no_grad()
def by_definition(model, tokens, doc):
    """§3 of a sequence (t,) -> log P (t, V), neighbors and gates of each chunk"""
    c, C, m, t = model.config, model.config.n_embd, model.config.chunk_size, len(tokens)
    w, n = c.window // m, t // m
    parts = [set(doc[i * m:(i + 1) * m]) for i in range(n)]
    of = [min(part) if len(part) == 1 else -1 for part in parts]        # documents of chunks

    def norm(module, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight

    def mlp(block, x):
        return F.gelu(norm(block.norm2, x) @ block.mlp.fc.weight.T) @ block.mlp.proj.weight.T

    def self_attention(block, x):
        y, b = norm(block.norm1, x), c.window // 2
        return attention(block.attention, y, range(len(x)), y, range(len(x)),
                         lambda i, j: max(0, (i // b - 1) * b) <= j <= i)

    def within(module, y, z=None):
        z = y if z is None else z
        return attention(module, y, range(len(y)), z, range(len(z)))

    x = model.embedding.weight[tokens]
    for block in model.lower:
        x = x + self_attention(block, x)
        x = x + mlp(block, x)
    E = chunks = [x[i * m:(i + 1) * m] for i in range(n)]
    permitted = [[k for k in range(i - w + 1) if of[i] == of[k] >= 0] for i in range(n)]
    found, gates = [[] for _ in range(n)], [[] for _ in range(n)]
    if c.retriever in ('sem', 'lex'):
        r = model.retriever
        E = [chunk + within(r.attention, norm(r.norm, chunk)) for chunk in E]
        q = [r.query(norm(r.norm_q, e.mean(0))) for e in E]
        k = [r.key(norm(r.norm_k, e.mean(0))) for e in E]
        found = [sorted(permitted[i], key=lambda j: -(q[i] @ k[j]).item()) for i in range(n)]
    elif c.retriever == 'bm25':
        texts = tokens[:n * m].view(n, m).tolist()
        for i in range(n):
            score = formula(texts, texts[i], b=0, idf=model.idf.tolist())
            found[i] = [j for j in ranking(score) if j in permitted[i]]
    found = [some[:c.n_neighbors] for some in found]

    pooled, read = [], [[] for _ in range(n)]                           # (chunk, rank, mean)
    for i in range(n):
        for rank, j in enumerate(found[i]):
            e, y = model.neighbor_encoder, torch.cat([E[j], E[j + 1]])  # (2m, C)
            y = y + within(e.attention, norm(e.norm1, y))
            y = y + within(e.cross, norm(e.norm2, y), norm(e.norm_query, chunks[i]))
            pooled.append((i, rank, y.mean(0)))
            read[i].append(y)
    if c.gate and pooled:
        e, y = model.neighbor_encoder, torch.stack([mean for _, _, mean in pooled])
        places, z = [i * c.n_neighbors + rank for i, rank, _ in pooled], norm(e.norm3, y)
        y = y + attention(e.gate_attention, z, places, z, places, lambda a, b: (
            b <= a and pooled[b][0] > pooled[a][0] - w and of[pooled[a][0]] == of[pooled[b][0]]))
        for (i, rank, _), z in zip(pooled, norm(e.norm_gate, y)):
            gates[i].append(max(c.eta, (e.gate(z)[0] / C).sigmoid()))
            read[i][rank] = read[i][rank] * gates[i][rank]
    for layer, block in enumerate(model.upper):
        x, y = x + self_attention(block, x), torch.zeros(t, C)
        cross = c.retriever != 'none' and layer >= len(model.upper) - (c.n_cca or c.n_layer)
        for p in range(m - 1, t if cross else 0):
            i = (p + 1) // m - 1                                        # the last whole chunk
            if read[i] and of[i] == doc[p]:
                keys, places = torch.cat(read[i]), list(range(2 * m)) * len(read[i])
                place = m - 1 + p - (i * m + m - 1)
                y[p] = attention(block.cca.attention, norm(block.cca.norm, x[p:p + 1]), [place],
                                 keys, places)[0]
        x = x + y
        x = x + mlp(block, x)
    return (norm(model.norm, x) @ model.embedding.weight.T).log_softmax(-1), found, gates


def found_in(trace, m=M):
    assert all(end == start + 2 * m for _, _, start, end in trace)
    return [start // m for _, _, start, _ in trace]


@pytest.mark.parametrize('more, doc', [(more, docs_of(T - 3)) for more in SETTINGS] + [
    (more, doc) for more in ({}, dict(retriever='bm25'))
    for doc in (docs_of(14, 17, 1, 22, 18, 3, -5), docs_of(40, -40))])
def test_the_model_is_the_papers(more, doc):
    """Chunks of two documents or padding are not retrieved; a group is of its chunk's document."""
    model, tokens, several = small(**more), tokens_of(t=doc.size(1), b=1), doc.unique().numel() > 1
    log_p, found, gates = by_definition(model, tokens[0], doc[0].tolist())
    f = model.encode(tokens, doc if several else None)[0]
    close(model.logits(f)[0].log_softmax(-1), log_p)
    if model.config.retriever == 'none':                                # Transformer-XL
        assert list(model.ways()) == ['off']
        return
    assert any(found)
    m = model.config.chunk_size
    for t in range(m - 1, 0 if several else T - 3, 3):
        i, trace = (t + 1) // m - 1, model.trace(tokens[0], t)
        assert sorted(found_in(trace, m)) == sorted(found[i])
        weights = [weight for weight, *_ in trace]
        assert weights == sorted(weights, reverse=True)
        if model.config.gate:
            wanted = {j: float(gate) for j, gate in zip(found[i], gates[i])}
            assert weights == pytest.approx([wanted[j] for j in found_in(trace, m)], abs=EPS)


@pytest.mark.parametrize('more', SETTINGS)
def test_the_future_is_invisible(more, t=T - 3):
    """A row of a batch for each changed token: log P changes from this token on, not before."""
    model, tokens = small(**more), tokens_of(t=t, b=1)
    changed = tokens.repeat(t, 1)
    changed[range(t), range(t)] += 1
    difference = (model.log_probs(changed % V) - model.log_probs(tokens)).abs().amax(2)
    assert difference.tril(-1).max() < EPS < difference.diag().min()
    if model.config.retriever == 'sem':                                 # it is felt later too
        assert difference.triu(START).max() > EPS


@pytest.mark.parametrize('more', SETTINGS[:4])
def test_the_loss_in_eval_mode(more):
    """Without a teacher; in slices, some targets not scored: value and gradients."""
    model, batch = small(**more), taught(tokens_of(b=40))
    batch.targets = batch.targets.where(torch.arange(T) % 3 > 0, -1)
    logits = model.logits(model.encode(batch.tokens)[0])
    wanted = F.cross_entropy(logits.mT, batch.targets, ignore_index=-1)
    loss, parameters = model(batch, 0.5)[0], list(model.parameters())
    close(loss, wanted)
    grads = (torch.autograd.grad(x, parameters, materialize_grads=True) for x in (loss, wanted))
    close(*grads)


@pytest.mark.parametrize('retriever', ['sem', 'lex', 'bm25'])
def test_without_neighbors_cross_attention_is_zero(retriever):
    """Exactly: chunks before chunk w, and all chunks with an empty choice of a teacher."""
    model, tokens = small(retriever=retriever), tokens_of()
    on = model.encode(tokens)[0]
    empty = model.encode(tokens, teacher=torch.full((B, N, K), -1))[0]
    model.retrieval = model.ways()['off']['retrieval']
    off = model.encode(tokens)[0]
    assert torch.equal(empty, off) and torch.equal(on[:, :START], off[:, :START])
    assert (on - off)[:, START:].abs().max() > EPS


@pytest.mark.parametrize('more', SETTINGS)
def test_streaming_equals_the_full_pass(more, t=12 * M + 3):
    """In pieces of any size, over several windows: stream, read, log_p and trace."""
    model, tokens = small(**more), tokens_of(t=t)
    cuts = torch.randperm(t - 1, generator=torch.Generator().manual_seed(1))[:12].sort().values + 1
    for n_cuts, attributes in zip((4, 1, 1), model.ways().values()):
        vars(model).update(attributes, PIECE=2048)
        full, trace = model.log_probs(tokens), model.trace(tokens[0], t - 1)
        model.PIECE = 3 * M - 1
        for ends in (cuts.tolist(), range(1, t), range(M - 1, t, M), [])[:n_cuts]:
            state, parts = None, []
            for piece in tokens.tensor_split(list(ends), dim=1):
                log_p, state = model.stream(piece, state)
                parts.append(log_p)
            close(torch.cat(parts, dim=1), full)
        first, second, rest = tokens.tensor_split([START + 3, 8 * M + 2], dim=1)
        state = model.read(second, model.read(first, model.read(tokens[:, :0])))
        close(model.stream(rest, state)[0], full[:, -rest.size(1):])
        for (weight, _, start, end), wanted in zip(model.trace(tokens[0], t - 1), trace):
            assert (start, end) == wanted[2:] and weight == pytest.approx(wanted[0])


def test_far_positions_equal_near_ones():
    """In fp32, without retrieval, log P depends on the last windows alone, however far they are."""
    torch.set_default_dtype(torch.float32)
    model, tokens, near = small(n_layer=2), tokens_of(t=2 ** 14, b=1), []
    model.retrieval = model.ways()['off']['retrieval']
    for text in (tokens, tokens[:, -1024:]):
        _, state = model.stream(text[:, :-64])
        near.append(model.stream(text[:, -64:], state)[0])
    close(*near, atol=1e-4)


@pytest.mark.parametrize('more', [{}, dict(retriever='bm25')])
def test_shuffled_draws_permitted_chunks(more, n=40):
    """Different ones, at random: none is preferred, and the choice differs from chunk to chunk."""
    model, tokens = small(**more), tokens_of(t=n * M)[0]
    own = [found_in(model.trace(tokens, i * M + M - 1)) for i in range(n)]
    model.retrieval = model.ways()['shuffled']['retrieval']
    drawn = [found_in(model.trace(tokens, i * M + M - 1)) for i in range(n)]
    for i in range(n):
        assert len(set(drawn[i])) == len(drawn[i]) == len(own[i])
        assert all(0 <= k <= i - W for k in drawn[i])
    same = [len(set(a) & set(b)) for a, b in zip(own, drawn)]
    places = [k / (i - W) for i in range(20, n) for k in drawn[i]]
    assert sum(same) < n / 2 and len(set(map(tuple, drawn))) > n * 0.8
    assert 0.4 < np.mean(places) < 0.6 and 0.2 < np.std(places) < 0.4  # uniform: 0.5, 0.29


def test_scores_and_logits_are_fp32_under_autocast():
    torch.set_default_dtype(torch.float32)
    model = small()
    with torch.autocast('cpu', torch.bfloat16):
        f, _, scores = model.encode(tokens_of())
        logits = model.logits(f)
        targets = tokens_of().where(torch.arange(T) < 32, -1)           # 64: 1 / 64 is exact
        loss = rpt.cross_entropy(f.detach(), model.embedding.weight, targets)
        neighbors, chosen = torch.randn(1, 9, 3, 2 * M, 16), torch.ones(1, 9, 3).long()
        gates = model.neighbor_encoder.gates(neighbors, chosen)
    gradient, = torch.autograd.grad(loss, model.embedding.weight)
    for x in (scores[scores > -math.inf], logits, gates, gradient):
        assert x.dtype == torch.float32 and (x.bfloat16() != x).any()


def test_gradients_do_not_depend_on_threads():
    """Chunks that are retrieved several times: their gradients are added in one order."""
    torch.set_default_dtype(torch.float32)
    model, tokens, n = RPT(RPTConfig()), torch.randint(4096, (2, 1024)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        grads = [torch.autograd.grad(model.encode(tokens)[0].square().sum(), model.embedding.weight)
                 for _ in range(4)]
    finally:
        torch.set_num_threads(n)
    assert all(torch.equal(grad, grads[0][0]) for grad, in grads)


def ranking_by_loops(s_q, s_t, tau):
    """§3.3 of one chunk: λ by a swap in the ranking -> the loss, NDCG@20"""
    order = [k for k in range(len(s_q)) if s_q[k] > -math.inf]
    order.sort(key=lambda k: -s_q[k].item())
    s_t, loss = s_t.tolist(), s_q.new_zeros(())
    ideal = sorted(order, key=lambda k: -s_t[k])
    def dcg(chunks, cut=None):
        return sum((2 ** max(s_t[k], 0) - 1) / math.log2(2 + i)
                   for i, k in enumerate(chunks[:cut]))
    for a in order:
        for b in order:
            if s_t[a] > max(0, s_t[b]):
                swapped = [{a: b, b: a}.get(k, k) for k in order]
                lam = abs(dcg(swapped) - dcg(order)) / dcg(ideal)
                loss = loss + lam * (tau - (s_q[a] - s_q[b])).clamp(min=0)
    return loss, dcg(order, 20) / max(1e-9, dcg(ideal, 20))


@pytest.mark.parametrize('n, J, tau', [(9, 4, 4.0), (9, 20, 0.5), (28, 26, 2.0)])
def test_ranking_loss(n, J, tau):
    """Of each chunk, and its gradient; 0 without positives."""
    s_t, k = taught(tokens_of(t=n * M), J).target_scores, torch.arange(n)
    s_q = 2 * torch.randn(B, n, n, generator=torch.Generator().manual_seed(2))
    s_q = s_q.masked_fill(k > k[:, None] - W, -math.inf).requires_grad_()
    loss, ndcg = ranking_loss(s_q, s_t, tau)
    pairs = [ranking_by_loops(s_q[b, i], s_t[b, i], tau) for b in range(B) for i in range(n)]
    wanted = torch.stack([pair[0] for pair in pairs]).view(B, n)
    close(loss, wanted)
    close(ndcg, torch.tensor([pair[1] for pair in pairs]).view(B, n))
    assert 0 < ndcg.sum() < (s_t > 0).any(2).sum()
    grads = [torch.autograd.grad(x.sum(), s_q)[0] for x in (loss, wanted)]
    close(*grads)
    assert grads[0].abs().sum() > 0
    for nothing in (-s_t.abs(), 0 * s_t):
        loss, ndcg = ranking_loss(s_q, nothing, tau)
        grad, = torch.autograd.grad(loss.sum(), s_q)
        assert not (loss.any() or ndcg.any() or grad.any())


@pytest.mark.parametrize('cache', [0.0, 0.3])
def test_target_scores_by_reading_each_prompt(cache):
    reference, chunks = small(retriever='none', window=4 * M), (tokens_of() % 9)[0].view(N, M)
    candidates = bm25_candidates(chunks, torch.zeros(N), W, 4, IDF) > 0     # tokens return
    candidates[5, 3] = True                                             # the baseline itself
    reference.config.reference_cache = cache
    scores = target_scores(reference, chunks, candidates)

    def log_p(j, i):
        prompt = torch.cat([chunks[j], chunks[j + 1], chunks[i], chunks[i + 1]])
        f, nats = reference.encode(prompt[None])[0][0], []
        for t in range(3 * M - 1, 4 * M - 1):                           # it predicts token t + 1
            weights = torch.stack([f[t] @ f[u] / f.size(1) ** 0.5 for u in range(t)]).softmax(0)
            copied = sum(w for u, w in enumerate(weights) if prompt[u + 1] == prompt[t + 1])
            p = reference.logits(f[t]).softmax(0)[prompt[t + 1]]
            nats.append(((1 - cache) * p + cache * copied).log())
        return torch.stack(nats).mean()
    for i in range(N):
        for j in range(N):
            wanted = log_p(j, i) - log_p(i - 2, i) if candidates[i, j] else 0
            assert abs(scores[i, j] - wanted) < EPS
    assert scores[5, 3].abs() < EPS and candidates.sum() > 15
    reference.norm.weight.data *= 1e5                                   # some P are 0 in fp64
    assert target_scores(reference, chunks, candidates).isfinite().all()


def test_bm25(J=3):
    """RETRO's scores, and the candidates of chunk and target, out of the chunk's window."""
    chunks, doc = tokens_of(3, 24 * M)[0].view(24, M), torch.tensor([4] * 13 + [-1] * 2 + [0] * 9)
    candidates = bm25_candidates(chunks, doc, W, J, IDF)
    q, keys = rpt.bm25_vectors(chunks, IDF)                             # rounded to 2^-10
    for i in range(24):
        permitted = [k for k in range(i - W + 1) if doc[i] == doc[k] >= 0]
        query = chunks[i:i + 2].flatten().tolist()
        scores = formula(chunks.tolist(), query, b=0, idf=IDF.tolist())
        close(keys @ q[i:i + 2].sum(0), torch.tensor(scores), 2 * M * 2 ** -11)
        if i == 23 or doc[i + 1] != doc[i]:                             # without a target
            scores = [0] * 24
        best = [k for k in ranking(scores, 24) if k in permitted][:J]
        wanted = [1 - best.index(k) / J if k in best else 0 for k in range(24)]
        assert candidates[i].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize('teacher, chances', [('annealed', (1, 0.97, 0.75, 0)),
                                              ('always', (1,) * 4), ('never', (0,) * 4)])
def test_schedules(teacher, chances, b=300):
    """§3.4: the share of chunks with the teacher's neighbors; §3.3: α and τ; gradients of each."""
    model = small(teacher=teacher, n_layer=2, gate=False, alpha=0.5, tau=3.0)
    batch = SimpleNamespace(**{name: x.expand(b, *x.shape[1:]) if torch.is_tensor(x) else x * b
                               for name, x in vars(taught(tokens_of(4, b=1))).items()})
    batch.ranked *= 2.5                                                 # of other micro-batches
    batch.targets = torch.full((b, T), -1)
    batch.targets[:, 8 * M - 1] = 5                                     # depends on chunk 7 alone
    s_t = batch.target_scores[0, 7].tolist()
    best = sorted([k for k in range(N) if s_t[k] > 0], key=lambda k: -s_t[k])[:K]
    given = torch.full((1, N, K), -1)
    given[0, 7, :len(best)] = torch.tensor(best)
    nll = [-model.logits(model.encode(batch.tokens[:1], teacher=t)[0]).log_softmax(-1)[
        0, 8 * M - 1, 5].item() for t in (given, None)]
    assert best and abs(nll[0] - nll[1]) > 1e-3
    scores = model.encode(batch.tokens[:1])[2]
    for progress, chance in zip((0, 0.1, 0.3, 0.9), chances):
        loss, log = model.train()(batch, progress)
        share = (log['lm_loss'].item() - nll[1]) / (nll[0] - nll[1])
        assert abs(share - chance) < (0.08 if 0 < chance < 1 else 1e-6)
        tau, alpha = 1 + 2 * progress, 0.5 * min(1, progress / 0.2)
        ranked = (batch.target_scores[:1] > 0).any(2)
        losses = torch.stack(ranking_loss(scores, batch.target_scores[:1], tau))[:, ranked]
        means = losses.mean(1) * log['ranked'] / batch.ranked           # over those of the step
        close(torch.stack([log['ret_loss'], log['ndcg']]), means)
        assert log['ranked'] == b * ranked.sum()
        close(loss, log['lm_loss'] + alpha * log['ret_loss'])
        grad, = torch.autograd.grad(loss, model.retriever.query.weight)
        assert (grad.abs().max() > 0) == (progress > 0)                 # W_Q: by L_ret alone


def test_training_is_determined_by_the_seed():
    model, batch, losses = small(dropout=0.2).train(), taught(tokens_of(), J=6), []
    for batch.seed in (1, 1, 2):
        losses.append(model(batch, 0.45)[0].item())
    assert losses[0] == losses[1] != losses[2]
    weights = []
    for retriever in ('sem', 'bm25', 'none'):
        torch.manual_seed(3)
        weights.append(dict(RPT(RPTConfig(retriever=retriever)).named_parameters()))
    assert all(torch.equal(w[name], weights[0][name]) for w in weights[1:] for name in w)


@pytest.fixture
def start(tmp_path):
    """-> function of settings: the first taught micro-batches, corpus, model, the reference LM"""
    rng, words = np.random.default_rng(0), 'ab cde fg hi jkl mno pqr stu vwx yz'.split()
    *texts, val = (' '.join(rng.choice(words, size)) for size in (150, 100, 90, 40))
    write_splits(tmp_path, texts, [val])
    corpus = data.load(tmp_path, 'bytes', root=tmp_path / 'corpora', quiet=True)
    def run(config=CONFIG, shift=0.0, n=2, **more):
        model = small(**{**dict(vocab_size=257, block_size=48, window=4 * M), **more})
        of_reference = dict(retriever='none', n_layer=2, n_cca=0, reference='')
        reference = small(**vars(model.config) | of_reference)
        reference.norm.weight.data += shift

        def train_reference(model_config, train_config):
            assert (model_config.retriever, model_config.n_layer) == ('none', 2)
            assert train_config.max_steps == min(model.config.reference_steps, config.max_steps)
            torch.save(dict(model=reference.state_dict(), config=asdict(reference.config),
                            model_name='rpt', tokenizer=corpus.tokenizer.to_dict()),
                       tmp_path / 'ckpt.pt')
            return tmp_path / 'ckpt.pt'
        batches = data.Batches(corpus.train, 'documents', model.config.block_size,
                               model.config.micro_batch, seed=0)
        autocast = lambda: torch.autocast('cpu', enabled=False)
        attach = rpt.setup(model, corpus, batches, config, autocast, train_reference,
                           lambda items, *_, **more: items)
        return [attach(batches[g], g) for g in range(n)], corpus, model, reference
    return run


@pytest.mark.parametrize('retriever', ['sem', 'lex', 'bm25'])
def test_setup_scores_the_candidates(start, retriever):
    """The reference LM scores every n-th chunk; the others have the ranks of their candidates."""
    taught, corpus, model, reference = start(retriever=retriever, score_every=2, n=9)
    idf, scored = corpus_idf(corpus.train.tokens.tolist(), 257), 0
    if retriever == 'bm25': close(model.idf, idf)
    for batch in taught:
        for b in range(B):
            chunks, doc = batch.tokens[b].view(-1, M), batch.doc[b].view(-1, M)
            doc = doc[:, 0].where((doc == doc[:, :1]).all(1), -1)
            wanted = bm25_candidates(chunks, doc, 4, 4, idf)
            rows = (torch.arange(len(doc)) % 2 == 0) & (retriever == 'sem')
            candidates = (wanted > 0) & rows[:, None]
            s_t = target_scores(reference, chunks, candidates)
            close(batch.target_scores[b].double(), s_t.where(rows[:, None], wanted.double()), 1e-6)
            scored += candidates.sum()
    assert any((x.doc < 0).any() for x in taught) and (scored > 10) == (retriever == 'sem')
    ranked = [(x.target_scores > 0).any(2).sum().item() for x in taught]
    for g, batch in enumerate(taught[:8]):                              # steps of two
        assert batch.ranked == sum(ranked[g // 2 * 2:][:2]) / 2
    model.train()(batch, 0.5)[0].backward()


def test_scores_are_computed_once(start, monkeypatch, capsys):
    """Resumed, and reused by a run that differs in nothing they depend on."""
    computed, original = [], bm25_candidates
    monkeypatch.setattr(rpt, 'bm25_candidates', lambda *a: computed.append(0) or original(*a))

    def count(*a, **more):
        computed.clear()
        start(*a, **more)
        return len(computed)
    assert count(replace(CONFIG, max_steps=1)) == 4 and count() == 8 and count() == 0
    assert count(eta=0.3, tau=1.0, reference_steps=2) == count(micro_batch=4, n=1, n_cca=2) == 0
    assert count(reference_cache=0.0) > 0 and capsys.readouterr().out.count('too little') == 1
    for more in (dict(score_every=3), dict(n_candidates=5), dict(window=6 * M), dict(shift=0.1),
                 dict(reference_cache=0.5), dict(retriever='lex'), dict(block_size=44),
                 dict(config=replace(CONFIG, dtype='bf16'))):
        assert count(**more) > 0, more
    monkeypatch.setattr(rpt, 'target_scores', lambda *a: target_scores(*a))
    assert count() > 0                                                  # the code is another
    assert 'window' in one_line(start, window=2 * M)                    # of the reference LM
    path = start()[1].folder.parent.parent / 'ckpt.pt'
    assert count(reference=str(path)) == 0
    with pytest.raises(ValueError, match='sem'): RPTConfig(reference='x', retriever='lex')
    torch.save({**torch.load(path), 'tokenizer': {}}, path)
    assert 'tokenizer' in one_line(start, reference=str(path))


@pytest.mark.parametrize('more, millions', [
    (dict(retriever='none'), 202.5), (dict(retriever='none', n_layer=14), 227.7),
    (dict(retriever='bm25'), 236.05), (dict(), 242.35)])
def test_parameter_counts_of_the_paper(more, millions):
    """Table 2: Transformer-XL 202M, with two more layers 228M, RETRO 236M, RPT 242M."""
    sizes = {k: v for k, v in rpt.PRESETS['paper'].items() if k in RPTConfig.__dataclass_fields__}
    with torch.device('meta'):
        model = RPT(RPTConfig(**{**sizes, 'vocab_size': 50_277, **more}))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_ranks_by_loops(n=26):
    """Table 3 by counting; the reference LM scores all permitted chunks."""
    reference = small(retriever='none', window=4 * M)
    tokens = tokens_of(5, n * M, 1)[0]
    models = dict(x=small(n_layer=2, block_size=n * M), y=small(retriever='bm25'), r=reference)
    corpus = SimpleNamespace(fingerprint='', train=SimpleNamespace(tokens=tokens.numpy()))
    runs = [SimpleNamespace(name=name, model=model, corpus=corpus, documents=[tokens])
            for name, model in models.items()]
    result = rpt.TASKS['ranks'](runs, SimpleNamespace(seed=0))
    k = torch.arange(n)
    permitted = (k <= k[:, None] - W) & (k[:, None] < n - 1)
    s_t = target_scores(reference, tokens.view(n, M), permitted)
    idf = corpus_idf(tokens.tolist(), models['x'].config.vocab_size)
    q, keys = rpt.bm25_vectors(tokens.view(n, M), idf)
    s_q = {'BM25': q @ keys.T, 'latest first': k.expand(n, n).double(),
           **{name: models[name].encode(tokens[None])[2][0] for name in 'xy'}}
    for name, scores in s_q.items():
        values = []
        scores = scores.clamp(min=-99).masked_fill(~permitted, -math.inf)       # no term in common
        for i in range(W, n - 1):
            order = sorted(range(i - W + 1), key=lambda j: -scores[i, j].item())
            helps = [s_t[i, j].item() > 0 for j in order]
            if any(helps):
                ndcg = ranking_by_loops(scores[i], s_t[i], 1)[1]
                values.append([sum(helps[:2]) / 2, sum(helps[:10]) / sum(helps), ndcg])
        assert list(result[name]) == ['precision@2', 'recall@10', 'ndcg@20']
        assert list(result[name].values()) == pytest.approx(np.mean(values, axis=0))
    other = SimpleNamespace(**{**vars(runs[2]), 'corpus': SimpleNamespace(fingerprint='z')})
    near = SimpleNamespace(**{**vars(runs[2]), 'model': small(retriever='none')})   # two chunks
    for bad in (runs[:1], [runs[2], runs[2]], [runs[0], other], [runs[0], near]):
        assert 'reference' in one_line(rpt.TASKS['ranks'], bad, None)


@pytest.mark.slow
def test_retrieval_is_learned():
    """Twelve chunks, noise, the twelve chunks again: only retrieval knows them then."""
    generator = torch.Generator().manual_seed(0)
    k, i = torch.arange(27), torch.arange(27)[:, None]

    def copies(n, seed=0):
        text, noise = (torch.randint(a, b, (n, t * M), generator=generator)
                       for a, b, t in ((0, 16, 12), (16, 24, 3)))
        s_t = (k == i - 15).double().expand(n, -1, -1)
        batch = batch_of(torch.cat([text, noise, text], dim=1), seed=seed, target_scores=s_t,
                         ranked=s_t.sum().item())
        batch.targets[:, :16 * M - 1] = -1                              # the first asks for it
        return batch
    torch.manual_seed(0)
    model = RPT(RPTConfig(vocab_size=24, block_size=27 * M, n_layer=2, n_embd=64, window=W * M,
                          chunk_size=M, n_neighbors=1, n_candidates=27))
    learn(model, 300, lambda step: copies(16, step))
    batch, nll = copies(64), {}
    for way, attributes in model.ways().items():
        vars(model).update(attributes)
        nll[way] = model(batch, 1)[0].item()
    assert nll['on'] < 0.3 and min(nll['off'], nll['shuffled']) > 2.3   # at random: ln 16 = 2.77
