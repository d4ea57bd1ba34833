"""RPT against its definitions, with loops in fp64."""
import itertools, math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from pytest import approx, fixture, mark

import data, rpt, train
from helpers import (assert_causal, assert_ties, batch_of, close, formula, learn, one_line,
                     random_tokens, ranking, rope, streamed, write_splits)
from rpt import (RPT, Forced, RPTConfig, TaughtBatch, bm25_candidates, ranking_loss,
                 target_scores)

V, CHUNK, WINDOW, K = 23, 4, 2, 2               # ids, m, chunks of a window, neighbors
N, B = 11, 2                                    # chunks, sequences
T, EPS = N * CHUNK, 1e-9
START = WINDOW * CHUNK + CHUNK - 1              # the first token that may use a neighbor
SETTINGS = [{}, dict(retriever='lex'), dict(retriever='bm25'), dict(retriever='none'),
            dict(gate=False), dict(n_neighbors=1), dict(n_cca=1, n_neighbors=3),
            dict(window=4 * CHUNK, n_layer=3), dict(chunk_size=1, window=4),
            dict(eta=0.5, n_neighbors=4), dict(retriever='bm25', gate=False, dropout=0.5),
            dict(shift_values=False)]
CONFIG = train.TrainConfig(tokens_per_step=4 * 48, max_steps=3, dtype='fp32')


@fixture(autouse=True)
def fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --------------------------------------------------------------------------------------------------
# models and texts
def small(Model=RPT, Config=RPTConfig, **more):
    """A model far from its initial state, where all chunks look alike and all gates are 1/2."""
    torch.manual_seed(0)
    config = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=4, n_head=2, n_embd=16,
                  window=WINDOW * CHUNK, chunk_size=CHUNK, n_neighbors=K, n_candidates=4, n_cca=0,
                  score_every=1, reference_steps=600)
    model = Model(Config(**config | more)).eval()
    for name, p in model.named_parameters():
        p.data += 0.3 * torch.randn_like(p)
        if name.endswith('.gate.weight'):
            p.data *= 30
        if name.endswith('.gate.bias'):
            p.data -= 48                                # some gates are below eta
    if model.config.retriever == 'bm25':
        model.idf[:V] = IDF
    return model


def generator(seed):
    return torch.Generator().manual_seed(seed)


def tokens_of(seed=0, t=T, b=B):
    return random_tokens(b, t, seed=seed)


def docs_of(*lengths, padding=0):
    """Documents 0, 1, ... of these lengths in a sequence (1, T), then padding"""
    doc = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return F.pad(doc, (0, padding), value=-1)[None]


def corpus_idf(tokens, V):
    """By the equation in bm25.py, of all whole chunks"""
    chunks = [set(tokens[i:i + CHUNK]) for i in range(0, len(tokens) - CHUNK + 1, CHUNK)]
    df = [sum(a in chunk for chunk in chunks) for a in range(V)]
    idf = [math.log(1 + (len(chunks) - n + 0.5) / (n + 0.5)) for n in df]
    return torch.tensor(idf, dtype=torch.float64)


IDF = corpus_idf(tokens_of(9, 400)[0].tolist(), V)


def taught(tokens, J=4):
    """A batch with random scores of BM25's candidates; every third chunk has no positive."""
    chunks = tokens.unflatten(1, (-1, CHUNK))
    doc = torch.zeros(chunks.shape[:2])
    candidates = bm25_candidates(chunks, doc, WINDOW, J, IDF) > 0
    scores = torch.randn(candidates.shape, generator=generator(1))
    scores[:, 2::3] = -scores[:, 2::3].abs()
    scores = scores.where(candidates, 0)
    ranked = (scores > 0).any(2).sum().item()
    return TaughtBatch(**vars(batch_of(tokens, target_scores=scores, ranked=ranked)))


# --------------------------------------------------------------------------------------------------
# §3 of the paper, for one sequence, token by token and chunk by chunk
def attention(module, x, y, x_positions=None, y_positions=None, mask=None):
    """Token a of x (t, C) attends to the tokens b of y (s, C) where mask[a][b]. Positions are
    0, 1, ... unless given."""
    if hasattr(module, 'qkv'):
        weight = module.qkv.weight
    else:
        weight = torch.cat([module.query.weight, module.kv.weight])
    W_q, W_k, W_v = weight.chunk(3)
    q, k, v = x @ W_q.T, y @ W_k.T, y @ W_v.T
    if getattr(module, 'shift', False):                 # in each text of n tokens, the next value
        n = y_positions[-1] + 1
        v = v.unflatten(0, (-1, n)).roll(-1, 1).flatten(0, 1)

    # softmax(q kᵀ / sqrt(D)) v in each head
    q, k, v = (z.unflatten(1, (module.n_head, -1)) for z in (q, k, v))  # (t or s, H, D)
    q = rope(q, x_positions or range(len(q)))
    k = rope(k, y_positions or range(len(k)))
    scores = torch.einsum('ahd,bhd->hab', q, k) / q.size(2) ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~torch.tensor(mask), -math.inf)
    y = torch.einsum('hab,bhd->ahd', scores.softmax(2), v)
    return y.flatten(1) @ module.proj.weight.T


def self_attention(block, x, window):
    """§3.4: a token attends to its block of half a window, and to the block before."""
    half, t = window // 2, range(len(x))
    mask = [[(a // half - 1) * half <= b <= a for b in t] for a in t]
    y = block.norm1(x)
    return attention(block.attention, y, y, mask=mask)


def mlp(block, x):
    hidden = F.gelu(block.norm2(x) @ block.mlp.fc.weight.T)
    return hidden @ block.mlp.proj.weight.T


def rank_chunks(model, chunks, tokens, permitted):
    """§3.1, s_q. -> of each chunk, its states (m, C) to be retrieved, and the chunks that it may
    retrieve, the best first"""
    n = len(chunks)
    if model.config.retriever == 'none':
        return chunks, [[]] * n
    if model.config.retriever == 'bm25':                                # RETRO: a term in common
        texts = tokens.unfold(0, len(chunks[0]), len(chunks[0])).tolist()
        order = []
        for i in range(n):
            scores = formula(texts, texts[i], b=0, idf=model.idf.tolist())
            order.append([j for j in ranking(scores) if j in permitted[i]])
        return chunks, order

    # the mean of the tokens of a chunk, after attention to each other; those of a DenseRetriever
    # (compared/dense.py) are its own embeddings
    r = model.retriever
    C = model.config.n_embd
    states, encoded = [], chunks
    is_dense = hasattr(r, 'embedding')
    if is_dense:
        encoded = r.embedding.weight[tokens].split(len(chunks[0]))[:n]
        r = r.retriever
    for x in encoded:
        y = r.norm(x)
        states.append(x + attention(r.attention, y, y))
    query = [r.query(r.norm_q(x.mean(0))) for x in states]
    key = [r.key(r.norm_k(x.mean(0))) for x in states]
    if is_dense:
        states = chunks
    order = []
    for i in range(n):
        s_q = {j: (query[i] @ key[j] / C ** 0.5).item() for j in permitted[i]}
        order.append(sorted(s_q, key=lambda j: -round(256 * s_q[j])))
    return states, order


def neighbor(encoder, x, chunk):
    """§3.1: a retrieved chunk and the next one, (2m, C), for the chunk (m, C) that retrieves it"""
    y = encoder.norm1(x)
    x = x + attention(encoder.attention, y, y)
    return x + attention(encoder.cross, encoder.norm2(x), encoder.norm_query(chunk))


def gates_of(model, neighbors, chunk_doc):
    """§3.1: max(η, σ(w_ng ĉ / C)) of each neighbor of each chunk. ĉ has attended to neighbors of
    higher rank of its chunk, and to those of the w - 1 chunks before it, of its document."""
    config, encoder = model.config, model.neighbor_encoder
    w, K = config.window_chunks, config.n_neighbors
    slots = [(i, rank) for i in range(len(neighbors)) for rank in range(len(neighbors[i]))]
    if not slots or not config.gate:
        return [[1.0] * len(x) for x in neighbors]
    mean = torch.stack([neighbors[i][rank].mean(0) for i, rank in slots])
    positions = [i * K + rank for i, rank in slots]
    mask = [[b <= a and i - j < w and chunk_doc[i] == chunk_doc[j]
             for b, (j, _) in enumerate(slots)] for a, (i, _) in enumerate(slots)]
    y = encoder.norm3(mean)
    mean = mean + attention(encoder.gate_attention, y, y, positions, positions, mask)
    logits = encoder.gate(encoder.norm_gate(mean)) / config.n_embd
    gates = [[] for _ in neighbors]
    for (i, _), logit in zip(slots, logits):
        gates[i].append(max(config.eta, logit.sigmoid().item()))
    return gates


def cross_attention(cca, x, neighbors, chunk_doc, doc):
    """§3.1: each token of x (t, C) attends to the neighbors of the last chunk that ends with it or
    before it, if it is of the same document. Its position is that from the chunk's beginning."""
    m, y = cca.m, torch.zeros_like(x)
    for p in range(m - 1, len(x)):
        i = (p + 1) // m - 1
        if neighbors[i] and chunk_doc[i] == doc[p]:
            q = cca.norm(x[p:p + 1])
            kv = torch.cat(neighbors[i])                                # (K 2m, C)
            positions = [*range(2 * m)] * len(neighbors[i])
            y[p] = attention(cca.attention, q, kv, [p - i * m], positions)[0]
    return y


@torch.no_grad()
def by_definition(model, tokens, doc):
    """tokens, doc (t,) -> log P (t, V); of each chunk, the chunks it retrieves and their gates"""
    config = model.config
    m, w = config.chunk_size, config.window_chunks
    n = len(tokens) // m

    # the lower layers
    x = model.embedding.weight[tokens]
    for block in model.lower:
        x = x + self_attention(block, x, config.window)
        x = x + mlp(block, x)
    chunks = [x[i * m:(i + 1) * m] for i in range(n)]

    # chunk i retrieves from chunks 0 to i - w of its document
    docs = [set(doc[i * m:(i + 1) * m]) for i in range(n)]
    chunk_doc = [min(x) if len(x) == 1 else -1 for x in docs]
    permitted = [[j for j in range(i - w + 1) if chunk_doc[i] == chunk_doc[j] >= 0]
                 for i in range(n)]
    states, order = rank_chunks(model, chunks, tokens, permitted)
    retrieved = [chosen[:config.n_neighbors] for chosen in order]

    # neighbors and their gates
    neighbors = []
    for i in range(n):
        pairs = [torch.cat([states[j], states[j + 1]]) for j in retrieved[i]]
        neighbors.append([neighbor(model.neighbor_encoder, pair, chunks[i]) for pair in pairs])
    gates = gates_of(model, neighbors, chunk_doc)
    gated = [[gate * x for gate, x in zip(gates[i], neighbors[i])] for i in range(n)]

    # the upper layers
    first_cca = len(model.upper) - (config.n_cca or len(model.upper))
    for layer, block in enumerate(model.upper):
        x = x + self_attention(block, x, config.window)
        if config.retriever != 'none' and layer >= first_cca:
            x = x + cross_attention(block.cca, x, gated, chunk_doc, doc)
        x = x + mlp(block, x)
    log_p = (model.norm(x) @ model.embedding.weight.T).log_softmax(1)
    return log_p, retrieved, gates


def retrieved_by(model, tokens, doc=None):
    """For each chunk of a text (1, t): the chunks that it retrieves, the best first"""
    neighbors = model.encode(tokens, doc).state.memory.neighbors
    chosen = neighbors.chosen[0, model.config.window_chunks:].tolist()  # before these: none
    return [[j for j in row if j >= 0] for row in chosen]


def test_the_norm():
    x = torch.randn(3, 16, generator=generator(0))
    rms = (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
    close(rpt.RMSNorm(16)(x), x / rms)


@mark.parametrize('doc', [docs_of(T - 3), docs_of(14, 17, 1, 22, 18, 3, padding=25)])
@mark.parametrize('more', SETTINGS)
def test_the_model_is_the_papers(more, doc):
    """Chunks of two documents or padding are not retrieved; a group is of its chunk's document."""
    model = small(**more)
    tokens = tokens_of(t=doc.size(1), b=1)
    log_p, wanted, _ = by_definition(model, tokens[0], doc[0].tolist())
    assert any(wanted) == (model.config.retriever != 'none')
    if any(wanted):
        chosen = retrieved_by(model, tokens, doc)
        assert chosen == wanted, 'what each chunk retrieves, by the model and by the definition'
    f = model.encode(tokens, doc)[0]
    close(model.logits(f)[0].log_softmax(-1), log_p)


def assert_rows_are_independent(model):
    """In a batch each row has documents of its own: it is encoded as if it were alone."""
    tokens = tokens_of(b=3)
    doc = torch.cat([docs_of(T), docs_of(14, 27, padding=3), docs_of(24, 20)])
    f = model.encode(tokens, doc).f
    for b in range(3):
        close(f[b:b + 1], model.encode(tokens[b:b + 1], doc[b:b + 1]).f)


@mark.parametrize('retriever', ['sem', 'bm25'])
def test_rows_are_independent(retriever):
    assert_rows_are_independent(small(retriever=retriever))


@mark.parametrize('more', SETTINGS)
def test_trace_is_what_was_retrieved(more):
    """With gates, the largest first; from a state of the tokens before, or read in pieces."""
    model = small(**more)
    model.PIECE = 3 * CHUNK - 1
    tokens = tokens_of(b=1)
    text = tokens[0]
    _, retrieved, gates = by_definition(model, text, [0] * T)
    m = model.config.chunk_size
    for t in range(m - 1, T, 7):
        trace = model.trace(text, t, model.read(tokens[:, :t]))
        assert trace == model.trace(text, t)
        traced = {}
        for weight, _, start, end in trace:
            assert end == start + 2 * m                                 # a chunk and the next one
            traced[start // m] = weight
        assert list(traced.values()) == sorted(traced.values(), reverse=True)
        i = (t + 1) // m - 1                                            # the last whole chunk
        assert traced == approx(dict(zip(retrieved[i], gates[i])), abs=EPS)


@mark.parametrize('more', SETTINGS)
def test_the_future_is_invisible(more):
    assert_causal(small(**more), tokens_of(t=T - 3, b=1))


def test_the_loss_in_eval_mode():
    """Without a teacher; some targets are not scored. test_drt.py has the gradient of the loss."""
    model = small()
    batch = taught(tokens_of())
    batch.targets[:, ::3] = -1
    logits = model.logits(model.encode(batch.tokens)[0])
    loss, _ = model(batch, 0.5)
    close(loss, F.cross_entropy(logits.mT, batch.targets, ignore_index=-1))


def test_without_neighbors_cross_attention_is_zero():
    """Exactly: as with an empty choice of a teacher"""
    model = small()
    nothing = torch.full((B, N, K), -1)
    all_chunks = torch.ones(B, N, 1, dtype=torch.bool)
    empty = model.encode(tokens_of(), forced=Forced(nothing, all_chunks)).f
    model.way = 'off'
    assert torch.equal(empty, model.encode(tokens_of()).f)


def assert_streams(model, t=12 * CHUNK + 3):
    """In pieces that end anywhere; of a token; of a chunk, shifted; after a text read in pieces"""
    model.PIECE = 3 * CHUNK - 1
    tokens = tokens_of(t=t)
    anywhere = [5, 1, 9, 4, 7, 13, 12]
    shifted = [CHUNK - 1] + 12 * [CHUNK]
    first, second, rest = tokens.tensor_split([START + 3, 8 * CHUNK + 2], 1)
    for way in model.ways():
        model.way = way
        full = model.log_probs(tokens)
        for sizes in (anywhere, shifted, 1):
            close(streamed(model, tokens, sizes)[0], full)
        state = model.read(second, model.read(first, model.read(tokens[:, :0])))
        close(model.stream(rest, state)[0], full[:, -rest.size(1):])


@mark.parametrize('more', SETTINGS)
def test_streaming_equals_the_full_pass(more):
    assert_streams(small(**more))


def test_a_text_that_recurs_is_a_tie():
    """Copies of 24 tokens, which is beyond the windows of the lower layers"""
    model = small().float()
    torch.set_default_dtype(torch.float32)
    others = tokens_of(t=2 * CHUNK, b=20)
    assert_ties(model, tokens_of(t=24, b=1), others)


def test_far_positions_equal_near_ones():
    """In fp32, without retrieval, log P depends on the last windows alone, however far they are."""
    torch.set_default_dtype(torch.float32)
    model = small(n_layer=2)
    tokens = tokens_of(t=2 ** 14, b=1)
    model.way = 'off'
    far, _ = streamed(model, tokens, 2 ** 14 - 64)
    near, _ = streamed(model, tokens[:, -1024:], 960)
    close(far[:, -64:], near[:, -64:], atol=1e-4)


@mark.parametrize('retriever', ['sem', 'bm25'])
def test_shuffled_draws_permitted_chunks(retriever, n=40):
    """As many as are retrieved, at random: chunks draw different ones."""
    model = small(retriever=retriever)
    tokens = tokens_of(t=n * CHUNK, b=1)
    retrieved = retrieved_by(model, tokens)
    model.way = 'shuffled'
    drawn = retrieved_by(model, tokens)
    for i in range(n):
        assert len(set(drawn[i])) == len(drawn[i]) == len(retrieved[i])
        assert set(drawn[i]) <= set(range(i - WINDOW + 1))
    assert len(set(map(tuple, drawn))) > n * 0.8
    # neither the first nor the latest ones: on average from the middle of what is permitted
    places = [j / (i - WINDOW) for i in range(n // 2, n) for j in drawn[i]]
    assert np.mean(places) == approx(0.5, abs=0.2)


def test_attention_in_bf16():
    """On a CPU bf16 has its own formula: softmax(q kᵀ / sqrt(D) + bias) v, with the mask."""
    q, k, v = torch.randn(3, 2, 11, 2, 8, generator=generator(0))
    slopes = torch.tensor([0.5, 0.1]).view(1, 2, 1, 1)
    exact = rpt.window_attention(q[:, 3:], k, v, 4, slopes)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    close(rpt.window_attention(q[:, 3:], k, v, 4, slopes).double(), exact, 0.05)


def test_rotary_embeddings_are_the_same_when_compiled():
    """Compiled layers have a formula without complex numbers."""
    x = torch.randn(2, 9, 2, 8, generator=generator(0))
    with mock.patch.object(torch.compiler, 'is_compiling', return_value=True):
        compiled = rpt.rotate(x, 5)
    close(compiled, rpt.rotate(x, 5))


def test_scores_and_logits_are_fp32_under_autocast():
    torch.set_default_dtype(torch.float32)
    model = small()
    E = model.embedding.weight
    with torch.autocast('cpu', torch.bfloat16):
        f, _, scores = model.encode(tokens_of())
        logits = model.logits(f)
        # 64 targets: their mean rounds nothing, so a gradient rounded to bf16 would show below
        targets = tokens_of().where(torch.arange(T) < 32, -1)
        loss = rpt.cross_entropy(f.detach().requires_grad_(), E, targets)
        neighbors = torch.randn(1, 9, 3, 2 * CHUNK, 16)
        gates = model.neighbor_encoder.gates(neighbors, torch.ones(1, 9, 3))
    gradient, = torch.autograd.grad(loss, E)
    for x in (scores[scores > -math.inf], logits, gates, gradient):
        assert x.dtype == torch.float32
        assert (x.bfloat16() != x).any()


def test_gradients_are_the_same_bits_each_time():
    """Chunks that are retrieved several times: their gradients are added in one order."""
    torch.set_default_dtype(torch.float32)
    model = RPT(RPTConfig())
    tokens = torch.randint(4096, (1, 1024))                 # one sequence, which threads share
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    grads = []
    for _ in range(4):
        f = model.encode(tokens)[0]
        grads += torch.autograd.grad(f.square().sum(), model.embedding.weight)
    torch.set_num_threads(n_threads)
    for grad in grads[1:]:
        assert torch.equal(grad, grads[0])


# --------------------------------------------------------------------------------------------------
# the ranking loss, its labels and schedules
def dcg(order, s_t, cut=None):
    gains = [2 ** max(s_t[j], 0) - 1 for j in order]
    return sum(gain / math.log2(2 + i) for i, gain in enumerate(gains[:cut]))


def ranking_by_loops(s_q, s_t, tau):
    """§3.3 of one chunk: λ by a swap in the ranking -> the loss, NDCG@20"""
    s_t = s_t.tolist()
    order = [j for j in range(len(s_q)) if s_q[j] > -math.inf]
    order.sort(key=lambda j: -s_q[j].item())
    ideal = sorted(order, key=lambda j: -s_t[j])
    loss = s_q.new_zeros(())
    for l in order:
        for j in order:
            if s_t[l] > max(0, s_t[j]):
                swapped = [{l: j, j: l}.get(x, x) for x in order]
                lam = abs(dcg(swapped, s_t) - dcg(order, s_t)) / dcg(ideal, s_t)
                loss = loss + lam * (tau - (s_q[l] - s_q[j])).clamp(min=0)
    ndcg = dcg(order, s_t, 20) / max(1e-9, dcg(ideal, s_t, 20))
    return loss, ndcg


@mark.parametrize('n, J, tau', [
    (9, 4, 4.0), (9, 20, 0.5), (28, 26, 2.0)])
def test_ranking_loss(n, J, tau):
    """Of each chunk, and its gradient; every third chunk has no positive."""
    s_t = taught(tokens_of(t=n * CHUNK), J).target_scores
    i = torch.arange(n)
    s_q = 2 * torch.randn(B, n, n, generator=generator(2))
    s_q = s_q.masked_fill(i > i[:, None] - WINDOW, -math.inf).requires_grad_()
    loss = ranking_loss(s_q, s_t, tau)
    rows = zip(s_q.flatten(0, 1), s_t.flatten(0, 1))
    wanted_loss, wanted_ndcg = zip(*(ranking_by_loops(*row, tau) for row in rows))
    close(loss.flatten(), torch.stack(wanted_loss))
    close(rpt.ndcg(s_q, s_t).flatten(), torch.tensor(wanted_ndcg))
    grad, = torch.autograd.grad(loss.sum(), s_q)
    wanted_grad, = torch.autograd.grad(sum(wanted_loss), s_q)
    close(grad, wanted_grad)
    assert grad.any()


def prompt_log_p(reference, chunks, j, i, cache):
    """Mean of log P(c_{i+1} | c_j, c_{j+1}, c_i) over tokens, of a mixture with a cache"""
    prompt = torch.cat([chunks[j], chunks[j + 1], chunks[i], chunks[i + 1]])
    f = reference.encode(prompt[None])[0][0]                            # (4m, C)
    nats = []
    for t in range(3 * CHUNK - 1, 4 * CHUNK - 1):                       # predicts token t + 1
        scores = [f[t] @ f[u] / f.size(1) ** 0.5 for u in range(t)]
        weights = torch.stack(scores).softmax(0)
        p_cache = sum(weights[u] for u in range(t) if prompt[u + 1] == prompt[t + 1])
        p = reference.logits(f[t]).softmax(0)[prompt[t + 1]]
        nats.append(((1 - cache) * p + cache * p_cache).log())
    return torch.stack(nats).mean()


@mark.parametrize('cache', [0.0, 0.3])
def test_target_scores_by_reading_each_prompt(cache):
    reference = small(retriever='none', window=4 * CHUNK)
    chunks = (tokens_of() % 9)[0].view(N, CHUNK)                        # tokens return
    candidates = bm25_candidates(chunks, torch.zeros(N), WINDOW, 4, IDF) > 0
    candidates[5, 3] = True                                             # the baseline itself
    scores = target_scores(reference, chunks, candidates, cache)
    for i, j in candidates.nonzero().tolist():
        wanted = prompt_log_p(reference, chunks, j, i, cache)
        wanted = wanted - prompt_log_p(reference, chunks, i - 2, i, cache)
        assert scores[i, j].item() == approx(wanted.item(), abs=EPS)
    assert candidates.sum() > 15
    assert not scores[~candidates].any()
    reference.norm.weight.data *= 1e5                                   # some P are 0 in fp64
    assert target_scores(reference, chunks, candidates, cache).isfinite().all()


def test_bm25(J=3, n=24):
    """The candidates of chunk and target, out of the chunk's window; by_definition has RETRO's."""
    chunks = tokens_of(3, n * CHUNK)[0].view(n, CHUNK)
    doc = torch.tensor([4] * 13 + [-1] * 2 + [0] * 9)
    candidates = bm25_candidates(chunks, doc, WINDOW, J, IDF)
    for i in range(n):
        query = chunks[i:i + 2].flatten().tolist()
        scores = formula(chunks.tolist(), query, b=0, idf=IDF.tolist())

        # the best that are out of the window and of the document, which has the target, too
        permitted = [j for j in range(i - WINDOW + 1) if doc[i] == doc[j] >= 0]
        best = [j for j in ranking(scores) if j in permitted][:J]
        if i == n - 1 or doc[i + 1] != doc[i]:
            best = []
        wanted = [1 - best.index(j) / J if j in best else 0 for j in range(n)]
        assert candidates[i].tolist() == approx(wanted)


def test_bm25_vectors():
    """<query, key> is BM25 in which each chunk has the mean length."""
    chunks = tokens_of(3, 10 * CHUNK)[0].view(10, CHUNK)
    tf, keys = rpt.bm25_vectors(chunks, IDF)
    scores = tf @ keys.T
    for query, row in zip(chunks.tolist(), scores):
        wanted = formula(chunks.tolist(), query, b=0, idf=IDF.tolist())
        assert row.tolist() == approx(wanted, abs=0.01)                 # keys are rounded


@mark.parametrize('teacher, retriever, chances', [
    ('annealed', 'sem', (1, 0.97, 0.75, 0)),
    ('always', 'lex', (1, 1, 1, 1)),
    ('never', 'sem', (0, 0, 0, 0)),
    ('never', 'bm25', (1, 1, 1, 1))])
def test_scheduled_sampling(teacher, retriever, chances, b=60):
    """§3.4: the share of chunks that read what helps most; others read what they retrieve."""
    model = small(teacher=teacher, retriever=retriever)
    batch = taught(tokens_of(b=b))
    s_t, best = batch.target_scores.topk(K)
    best = best.where(s_t > 0, -1)                                      # (b, N, K)
    encode, chosen = model.encode, []

    def recorded(*args, **kwargs):
        encoded = encode(*args, **kwargs)
        chosen.append(encoded.state.memory.neighbors.chosen[:, WINDOW:])    # (b, N, K)
        return encoded
    model.encode = recorded
    model.train().encode(batch.tokens)
    retrieved = chosen[0]
    differ = (best != retrieved).any(2)
    for progress, chance in zip((0, 0.1, 0.3, 0.9), chances):
        model(batch, progress)
        of_teacher = (chosen[-1] == best).all(2)                        # (b, N)
        assert torch.equal(chosen[-1][~of_teacher], retrieved[~of_teacher])
        share = of_teacher[differ].double().mean().item()
        tolerance = 0.08 if 0 < chance < 1 else 0
        assert share == approx(chance, abs=tolerance)


def test_scheduled_sampling_is_drawn_by_the_seed_of_the_batch():
    model = small().train()
    batch = taught(tokens_of(b=20))
    losses = [model(batch._replace(seed=seed), 0.45)[0].item() for seed in (5, 5, 6)]
    assert losses[0] == losses[1] != losses[2]


@mark.parametrize('eta_gradient', [False, True])
def test_the_gradient_of_a_gate_at_its_lower_bound(eta_gradient):
    """It is 0, as that of max; with eta_gradient that of the sigmoid, and the gates are equal."""
    model = small(eta_gradient=eta_gradient)
    encoder = model.neighbor_encoder
    neighbors = torch.randn(1, 6, 2, 2 * CHUNK, 16, generator=generator(0))
    chosen = torch.zeros(1, 6, 2).long()
    gates = encoder.gates(neighbors, chosen)
    close(gates, small().neighbor_encoder.gates(neighbors, chosen))
    low = gates == model.config.eta
    assert low.any() and not low.all()
    gradient, = torch.autograd.grad(gates[low].sum(), encoder.gate.bias)
    assert bool(gradient > 0) == eta_gradient


def test_a_share_of_the_sequences_reads_nothing(b=40):
    """With p_off; which ones is drawn by the batch's seed. The retriever learns from all."""
    model = small(p_off=0.5).train()
    batch = taught(tokens_of(b=b))
    with mock.patch.object(model, 'encode', wraps=model.encode) as encode:
        _, log = model(batch, 0.5)
    call = encode.call_args
    forced, = (x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Forced))
    off = ((forced.chosen == -1) & forced.mask).all(2).all(1)
    assert 10 < off.sum() < 30
    model.config.p_off = 1.0
    loss, log_off = model(batch, 0.5)
    close(log_off['ret_loss'], log['ret_loss'])
    model.way = 'off'
    close(log_off['lm_loss'], model.eval()(batch, 0.5)[0])


def test_the_loss_in_training():
    """§3.3: L_LM + α L_ret, the schedules of α and τ, what is logged; W_Q learns by L_ret alone."""
    model = small(n_layer=2, alpha=0.5, tau=3.0).train()
    batch = taught(tokens_of(4))
    n_positive = batch.ranked
    batch = batch._replace(ranked=2.5 * n_positive)                     # a mean over micro-batches
    _, _, s_q = model.encode(batch.tokens)
    for progress in (0, 0.1, 0.3, 0.9):
        loss, log = model(batch, progress)
        ret_loss = ranking_loss(s_q, batch.target_scores, tau=1 + 2 * progress)
        alpha = 0.5 * min(1, progress / 0.2)
        close(log['ret_loss'], ret_loss.sum() / batch.ranked)
        close(log['ndcg'], rpt.ndcg(s_q, batch.target_scores).sum() / batch.ranked)
        close(loss, log['lm_loss'] + alpha * log['ret_loss'])
        assert log['ranked'] == n_positive
        grad, = torch.autograd.grad(loss, model.retriever.query.weight)
        assert grad.any() == (progress > 0)


def test_a_step_without_positives():
    """L_ret is 0, not 0 / 0."""
    teacher = SimpleNamespace(per_step=2, cached_scores_of=lambda number: torch.zeros(B, N, N))
    batch = data.Batch(**vars(batch_of(tokens_of(4))))
    loss, log = small().train()(rpt.Teacher.attach(teacher, batch, 0), 0.5)
    assert log['ret_loss'] == 0 and loss == log['lm_loss']


# --------------------------------------------------------------------------------------------------
# setup: the reference LM and the scores on disk
@fixture
def start(tmp_path):
    """-> function of settings: the first n taught micro-batches, corpus, model, the reference LM"""
    rng = np.random.default_rng(0)
    words = 'ab cde fg hi jkl mno pqr stu vwx yz'.split()
    texts = [' '.join(rng.choice(words, n_words)) for n_words in (150, 100, 90, 40)]
    write_splits(tmp_path, texts[:3], texts[3:])
    corpus = data.load(tmp_path, 'bytes', root=tmp_path / 'corpora', quiet=True)

    def run(train_config=CONFIG, shift=0.0, n=2, setup=None, hops=0, **more):
        corpus.hops = hops
        model = small(**dict(vocab_size=257, block_size=48, window=4 * CHUNK) | more)
        window = max(model.config.window, 4 * model.config.chunk_size)      # the chunks of s_t
        of_reference = dict(retriever='none', n_layer=2, n_cca=0, reference='', p_off=0.0,
                            window=window)
        reference = small(**vars(model.config) | of_reference)
        reference.norm.weight.data += shift

        def load_reference(path, Model, reference_config, config):
            assert (Model, reference_config.retriever, reference_config.n_layer) == (RPT, 'none', 2)
            assert (reference_config.window, config.init) == (window, '')
            assert config.max_steps == min(model.config.reference_steps, train_config.max_steps)
            return reference, corpus.tokenizer
        batches = data.Grid(corpus.train, 'documents', model.config.block_size,
                            model.config.micro_batch, seed=0)
        training = SimpleNamespace(
            config=train_config, corpus=corpus, batches=batches, load_reference=load_reference,
            bf16=train_config.dtype == 'bf16',
            autocast=partial(torch.autocast, 'cpu', enabled=False), rank=0, world=1,
            progress_bar=data.progress_bar)
        attach = (setup or rpt.setup)(model, training)
        taught = [attach(batches[g], g) if attach else batches[g] for g in range(n)]
        return taught, corpus, model, reference
    return run


def test_the_reference_scores_a_chunk(start):
    """Chunks 4 to 10 of 12 retrieve and have a target."""
    start(score_every=10)
    start(window=2 * CHUNK, train_config=replace(CONFIG, init='weights'))
    message = one_line(start, score_every=11)
    assert '--score-every 11: ' in message and message.endswith('--score-every 4 works')


@mark.parametrize('retriever', ['sem', 'lex', 'bm25'])
def test_setup_scores_the_candidates(start, capsys, retriever):
    """The reference LM scores every n-th chunk; the others have the ranks of their candidates. It
    has no p_off, because it retrieves nothing."""
    settings = dict(retriever=retriever, score_every=2, p_off=0.5)
    taught, corpus, model, reference = start(**settings, n=8)
    screen = capsys.readouterr().out
    assert 'scores of 12 sequences' in screen
    assert ('first the reference LM, whose predictions show which chunks help: 3 steps' in screen
            ) == (retriever == 'sem')
    idf, n_scored = corpus_idf(corpus.train.tokens.tolist(), 257), 0
    if retriever == 'bm25':
        close(model.idf, idf)
    for batch in taught:
        sequences = batch.tokens.unflatten(1, (-1, CHUNK))
        docs = rpt.doc_of_chunks(batch.doc, CHUNK)
        for chunks, doc, s_t in zip(sequences, docs, batch.target_scores):
            wanted = bm25_candidates(chunks, doc, 4, 4, idf).double()
            if retriever == 'sem':
                candidates = wanted > 0
                candidates[1::2] = False
                by_reference = target_scores(reference, chunks, candidates, 0.2)
                wanted[::2] = by_reference[::2].double()
                n_scored += candidates.sum()
            close(s_t.double(), wanted, 1e-6)
    assert any((batch.doc < 0).any() for batch in taught)
    assert (n_scored > 10) == (retriever == 'sem')

    # `ranked` is a mean over the two micro-batches of a step
    for step in zip(taught[::2], taught[1::2]):
        n_positive = [(batch.target_scores > 0).any(2).sum().item() for batch in step]
        for batch in step:
            assert batch.ranked == sum(n_positive) / 2
    model.train()(batch, 0.5)[0].backward()


@fixture
def count(start):
    """-> function of settings: of how many sequences `start` computes the scores"""
    def run(**more):
        with mock.patch('rpt.bm25_candidates', wraps=bm25_candidates) as computed:
            start(**more)
        return computed.call_count
    return run


def test_scores_are_computed_once(count, monkeypatch, capsys):
    """Resumed, and reused by a run that differs in nothing they depend on."""
    assert count(train_config=replace(CONFIG, max_steps=1)) == 4
    assert count() == 8
    assert count() == 0
    assert count(eta=0.3, tau=1.0, reference_steps=2) == 0
    assert count(micro_batch=4, n=1, n_cca=2) == 0
    assert count(reference_cache=0.0) > 0
    for more in (dict(score_every=3), dict(n_candidates=5), dict(window=6 * CHUNK),
                 dict(shift=0.1), dict(retriever='lex'), dict(block_size=44),
                 dict(chunk_size=2, window=8),
                 dict(train_config=replace(CONFIG, dtype='bf16'))):
        assert count(**more) > 0, more
    seed_1 = replace(CONFIG, seed=1)
    assert count(train_config=seed_1) == 0                              # a text has the same rows
    assert count(hops=1) > 0 and count(hops=1) == 0
    assert count(hops=1, train_config=seed_1) > 0                       # needles are others
    monkeypatch.setattr(rpt, 'VERSION', 0)
    assert count() > 0


def test_broken_scores_are_computed_again(count, tmp_path):
    """Files that are cut short, empty or of another format, or have a nan"""
    assert count(retriever='lex') == 12
    paths = sorted(tmp_path.glob('corpora/*/scores-*/*.npy'))
    wanted = [np.load(path) for path in paths]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    paths[1].write_bytes(b'')
    paths[2].write_bytes(b'no scores')
    np.save(paths[3], math.nan * wanted[3])
    assert count(retriever='lex') == 4
    assert all(np.array_equal(np.load(path), x) for path, x in zip(paths, wanted))


@mark.parametrize('n_chunks, warns', [(100, False), (200, True)])
def test_documents_too_short_for_retrieval(start, capsys, n_chunks, warns):
    """They have up to 542 tokens."""
    start(retriever='lex', window=n_chunks * CHUNK, block_size=(n_chunks + 2) * CHUNK, n=0)
    assert ('nothing can be taught' in capsys.readouterr().out) == warns


# --------------------------------------------------------------------------------------------------
# Table 3
def measures_by_loops(s_q, s_t, permitted):
    """Of each chunk with a positive: precision@2, recall@10, NDCG@20"""
    rows = []
    s_q = s_q.clamp(min=-1e9).masked_fill(~permitted, -math.inf)        # -1e9: no common term
    for i in range(len(s_q)):
        order = permitted[i].nonzero()[:, 0].tolist()
        order.sort(key=lambda j: -s_q[i, j].item())
        helps = [s_t[i, j].item() > 0 for j in order]
        if any(helps):
            _, ndcg = ranking_by_loops(s_q[i], s_t[i], 1)
            recall = sum(helps[:10]) / sum(helps)
            rows.append([sum(helps[:2]) / 2, recall, ndcg])
    return rows


def run_of(name, documents, fingerprint='', **more):
    """What `ranks` needs of a run; documents (n, t)"""
    split = SimpleNamespace(tokens=documents.flatten().numpy())
    corpus = SimpleNamespace(fingerprint=fingerprint, train=split)
    return SimpleNamespace(name=name, model=small(**more), corpus=corpus, documents=[*documents])


def losses_of_reading(model, tokens, chosen):
    """The mean loss of the target of each chunk but the last, if chunks retrieve `chosen` (n, K)"""
    every = torch.ones(1, len(chosen), 1, dtype=torch.bool)
    f = model.encode(tokens[None], forced=Forced(chosen[None], every)).f
    loss = F.cross_entropy(model.logits(f)[0, CHUNK - 1:-1], tokens[CHUNK:], reduction='none')
    return loss.view(-1, CHUNK).mean(1)


def first_by(scores, permitted):
    """The first 4 chunks, (n, 4), by scores (n, n), the first of equal ones; -1: none"""
    s = scores.masked_fill(~permitted, -math.inf)
    values, order = s.sort(dim=1, descending=True, stable=True)
    return order.where(values > -math.inf, -1)[:, :4]


def rows_of_reading(model, text, best, s_t, window):
    """Table 2, Figures 4 and 6 for chunks `window` to n - 2 of a text, which read the first K of
    best (n, 4)"""
    n = len(best)
    losses = [losses_of_reading(model, text, best[:, :K]) for K in (2, 3, 4)]
    gain = losses_of_reading(model, text, torch.full((n, 1), -1)) - losses[0]
    ids = F.one_hot(text.view(n, CHUNK), V).amax(1)                     # (n, V)
    rows = []
    for i in range(window, n - 1):
        first_two = best[i, :2][best[i, :2] >= 0]
        helps = (s_t[i, first_two] > 0).any()
        gains = (gain[i], math.nan) if helps else (math.nan, gain[i])
        shared = [0, 0]
        if best[i, 0] >= 0:
            shared = [ids[best[i, 0]] @ ids[query] for query in (i, i + 1)]
        rows.append([*(loss[i] for loss in losses), *gains, *shared])
    return rows


@torch.no_grad()
def test_ranks_by_loops(n=26, window=4):
    """Of two documents, for chunks `window` to n - 2, of the larger window of the runs. The
    reference LM scores all permitted chunks. In RETRO chunk 9 of the first one retrieves nothing.
    """
    tokens = tokens_of(5, n * CHUNK, 2)
    tokens[tokens == V - 1] = 0
    tokens[0, 9 * CHUNK:10 * CHUNK] = V - 1                             # a term of its own
    runs = [run_of('retro', tokens, retriever='bm25', block_size=n * CHUNK),
            run_of('x', tokens, window=window * CHUNK),
            run_of('r', tokens, retriever='none', window=4 * CHUNK)]
    no_progress = lambda items, *_: items
    result = rpt.TASKS['ranks'](runs, SimpleNamespace(seed=0, progress_bar=no_progress))
    idf = corpus_idf(tokens.flatten().tolist(), V)

    i = torch.arange(n)
    permitted = (i <= i[:, None] - window) & (i[:, None] < n - 1)
    rows = defaultdict(list)                                            # of all chunks, by column
    for text in tokens:
        # s_t and the rankings
        chunks = text.view(n, CHUNK)
        s_t = target_scores(runs[2].model, chunks, permitted, 0.2)
        tf, keys = rpt.bm25_vectors(chunks, idf)
        scores = {'BM25': tf @ keys.T, 'latest first': i.expand(n, n).double()}
        for run in runs[:2]:
            scores[run.name] = run.model.encode(text[None]).s_q[0]
        scores['x'] = (256 * scores['x']).round()                       # as `choose` has them

        # Table 3
        for name, s in scores.items():
            rows[name] += measures_by_loops(s, s_t, permitted)

        # Figure 5: of the candidates, by BM25 of chunk and target
        candidates = bm25_candidates(chunks, torch.zeros(n), window, n, idf)
        for row, s in zip(candidates, s_t):
            best = sorted(row.nonzero()[:, 0].tolist(), key=lambda j: -row[j])
            if best:
                new = [s[best[:k]].max() for k in (1, 2, 5, 20)]
                rows['best s_t'].append(new)

        # Table 2, Figures 4 and 6: each run reads the first K chunks of each ranking; -1: none
        scores['oracle'] = s_t
        for run, (name, s) in itertools.product(runs[:2], scores.items()):
            best = first_by(s, permitted)
            rows[f'{run.name} reads {name}'] += rows_of_reading(
                run.model, text, best, s_t, window)

        # of its own ranking x reads what it retrieves
        chosen = runs[1].model.encode(text[None]).state.memory.neighbors.chosen[0, window:]
        assert torch.equal(first_by(scores['x'], permitted)[:-1, :K], chosen[:-1])

    columns = {'x': ['precision@2', 'recall@10', 'ndcg@20'],
               'best s_t': ['of 1', 'of 2', 'of 5', 'of 20']}
    for name, expected in columns.items():
        assert list(result[name]) == expected
    for name, expected in rows.items():
        assert list(result[name].values()) == approx(np.nanmean(expected, 0).tolist()), name


def test_ranks_refuses_runs_that_do_not_fit():
    """Each with a line of its own"""
    tokens = tokens_of(5, b=1)
    run = run_of('x', tokens)
    near = run_of('r', tokens, retriever='none')
    far = run_of('r', tokens, retriever='none', window=4 * CHUNK)
    other = run_of('r', tokens, 'z', retriever='none', window=4 * CHUNK)
    chunks = run_of('y', tokens, chunk_size=2)
    long = run_of('x', tokens, block_size=T + CHUNK)
    wide = run_of('w', tokens, block_size=T + CHUNK, window=(N - 1) * CHUNK)
    for runs, message in [
            ([far], 'one run only'), ([far, far], 'r retrieves no chunks'),
            ([run, run], 'the last run, x, retrieves chunks'), ([run, near], 'shorter than the 4'),
            ([run, other], 'differ in text or tokenizer'),
            ([run, chunks, far], 'chunks of 2 tokens'), ([long, far], 'no document has'),
            ([run, wide, far], 'use 48 or more')]:
        line = one_line(rpt.TASKS['ranks'], runs, None)
        assert message in line and line.startswith('ranks: ')


@mark.slow
def test_retrieval_is_learned():
    """Twelve chunks, noise, the twelve chunks again: only retrieval knows them then."""
    random = generator(0)
    s_t = (torch.arange(27) == torch.arange(27)[:, None] - 15).double()

    def copies(n, seed=0):
        text = torch.randint(0, 16, (n, 12 * CHUNK), generator=random)
        noise = torch.randint(16, 24, (n, 3 * CHUNK), generator=random)
        batch = batch_of(torch.cat([text, noise, text], 1), seed=seed, ranked=n * 12,
                         target_scores=s_t.expand(n, -1, -1))
        # the first chunk of the copy is the query; the others are predicted
        batch.targets[:, :16 * CHUNK - 1] = -1
        return TaughtBatch(**vars(batch))
    torch.manual_seed(0)
    model = RPT(RPTConfig(vocab_size=24, block_size=27 * CHUNK, n_layer=2, n_embd=64,
                          window=WINDOW * CHUNK, chunk_size=CHUNK, n_neighbors=1, n_candidates=27))
    learn(model, 300, partial(copies, 16))
    batch, nll = copies(64), {}
    for way in model.ways():
        model.way = way
        nll[way] = model(batch, 1)[0].item()
    assert nll['on'] < 0.3
    assert min(nll['off'], nll['shuffled']) > 2.3                       # at random: ln 16 = 2.77


def test_the_reference_scores_without_dropout():
    reference = small(retriever='none', window=4 * CHUNK, dropout=0.5).train()
    tokenizer = SimpleNamespace(ids={})
    run = SimpleNamespace(config=CONFIG, corpus=SimpleNamespace(tokenizer=tokenizer),
                          load_reference=lambda *_: (reference, tokenizer))
    assert not rpt.reference_lm(small(dropout=0.5).config, run).training


def test_initial_weights():
    """GPT-2's, for the width and the depth. What two models share begins equal, and no two matrices
    do."""
    matrices = {}
    for retriever in ('sem', 'none'):
        torch.manual_seed(0)
        model = RPT(RPTConfig(retriever=retriever, n_embd=96, n_layer=8))
        matrices[retriever] = {key: p for key, p in model.named_parameters() if p.dim() == 2}
    of_sem = matrices['sem']
    assert all(p.equal(of_sem[key]) for key, p in matrices['none'].items())
    assert len({p[0, 0].item() for p in of_sem.values()}) == len(of_sem)
    for name, scale in (('embedding', 1), ('retriever.query', 1), ('lower.0.mlp.proj', 0.25)):
        std = scale * 0.02 * (768 / 96) ** 0.5
        assert of_sem[name + '.weight'].std().item() == approx(std, rel=0.05), name


@mark.parametrize('part', ['attention', 'cca', 'mlp'])
def test_dropout_is_on_all_that_a_layer_adds(part):
    layer = rpt.Block(replace(small().config, dropout=0.5), cross_attends=True)
    for name, weight in layer.named_parameters():
        if name.endswith('proj.weight') and not name.startswith(part):
            weight.data.zero_()                         # the other parts add 0
    G = N + 1
    retrieved = rpt.Retrieved(states=torch.randn(1, G, K, 2 * CHUNK, 16),
                              mask=torch.ones(1, G, K, dtype=torch.bool),
                              in_document=torch.ones(1, T, 1))
    x = torch.randn(1, T, 16)
    added = layer(x, None, retrieved)[0] - x
    assert (added == 0).double().mean() == approx(0.5, abs=0.1)


def test_the_teacher_is_drawn_for_each_chunk():
    mask = small().scheduled_sampling(torch.rand(8, N, N, generator=generator(0)), 0.5).mask
    assert (mask.any(1) & ~mask.all(1)).all()
