"""The systems that the papers compare with: their equations by loops, streams, causality,
documents; flags that do not fit; README's own model."""
import json, math, re, sys, textwrap
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from pytest import approx, fixture, mark

import train                        # before eval and torch
import rpt, test_drt, test_rpt, test_trime, trime
import eval as evaluation
from compared.block_recurrent import BlockRecurrent, BlockRecurrentConfig
from compared.cache import (LAMBDAS, TAUS, Cache, CacheConstants, best_constants, cached_log_p)
from compared.dense import Dense, DenseConfig, contrast, setup
from compared.griffin import Griffin, GriffinConfig
from compared.landmark import Landmark, LandmarkConfig
from compared.memorizing import Memorizing, MemorizingConfig, nearest
from compared.sru import SRU, SRUConfig
from data import Split
from helpers import (assert_causal, assert_ties, batch_of, close, flags, one_line, streamed,
                     write_splits)
from test_rpt import start as start_fixture
from test_rpt import CHUNK, T, V, corpus_idf, docs_of, generator, mlp, self_attention, tokens_of

start = start_fixture                           # of a run of RPT


@fixture
def fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --------------------------------------------------------------------------------------------------
# from rpt.py: layers with a memory
def griffin_by_loops(layer, x, begins):
    """De et al. 2024, token by token: x (t, C) -> (t, C)"""
    gate, inputs = layer.inputs(layer.norm(x)).chunk(2, 1)              # 2 x (t, R)
    inputs = F.pad(inputs, (0, 0, 2, 0)).T                              # (R, 2 + t)
    h, states = 0, []
    for t in range(len(x)):
        u = layer.conv(inputs[:, t:t + 3])                              # (R, 1)
        r, i = layer.gates(u).sigmoid().view(-1, 2).unbind(1)
        a = (1 + layer.decay.exp()) ** (-8 * r)
        if begins[t]:
            h = 0
        h = a * h + (1 - a ** 2).sqrt() * i * u[:, 0]
        states.append(h)
    return x + layer.proj(F.gelu(gate) * torch.stack(states))


def memorizing_by_loops(layer, x, begins):
    """Wu et al. 2022, token by token and head by head: x (t, C) -> (t, C)"""
    module, block = layer.attention, layer.attention.block
    shift = module.config.shift_values                                  # 0 or 1
    doc = begins.cumsum(0)
    qkv = module.qkv(layer.norm1(x))
    q, k, v = qkv.unflatten(1, (3, 2, -1)).unbind(1)
    if shift:
        q = k
    module.proj.weight.data = torch.eye(16)                             # y of the heads
    y = self_attention(layer, x, 2 * block).unflatten(1, (2, -1))       # (t, H, D)
    for i in range(len(x)):
        left = (i // block - 1) * block                                 # those before it
        tokens = range(max(0, left - 10), left)
        tokens = [j for j in tokens if doc[i] == doc[j]]
        for h, b in enumerate(module.gate.flatten()):
            cosine = [F.cosine_similarity(q[i, h], k[j, h], 0).item() for j in tokens]
            best = sorted(zip(cosine, tokens))[-3:]
            if best:
                p = torch.tensor(best)[:, 0] * module.scale[h]
                memory = p.softmax(0) @ v[[j + shift for _, j in best], h]
                y[i, h] += b.sigmoid() * (memory - y[i, h])
    x = x + y.flatten(1)
    return x + mlp(layer, x)


def states_by_loops(layer, x, begins):
    """Hutchins et al. 2022, block by block: x (t, C) -> (t, C)"""
    def attend(*qkv):                                                   # 3 x (n, H, D)
        return rpt.softmax_attention(*(z[None] for z in qkv))[0]
    H, block = layer.attention.n_head, layer.attention.block
    tokens = layer.tokens(layer.norm1(x))
    k, v, q = tokens.unflatten(1, (3, H, -1)).unbind(1)
    initial = s = layer.initial[0]
    reads, g = [], layer.gate.sigmoid()
    for first in range(0, len(x), block):
        rows = slice(first, first + block)
        if any(begins[rows]):
            s = initial
        states = layer.states(layer.norm(s) + initial)
        k_s, v_s, q_s, q_t = states.unflatten(1, (4, H, -1)).unbind(1)
        read = attend(q[rows], k_s, v_s)
        reads.append(read.flatten(1))
        of_states = attend(q_s, k_s, v_s)
        both = [of_states, attend(q_t, k[rows], v[rows])]
        z = layer.mix(torch.cat(both, 2).flatten(1))
        if not any(begins[rows]):
            s = g * s + (1 - g) * z
    y = self_attention(layer, x, 2 * block) + layer.state_proj(torch.cat(reads))
    return x + y + mlp(layer, x + y)


def with_memory(name, **others):
    """A small model in fp64"""
    Model, Config, more = {
        'griffin': (Griffin, GriffinConfig, dict(n_recurrent=2)),
        'block_recurrent': (BlockRecurrent, BlockRecurrentConfig, dict(n_states=3)),
        'memorizing': (Memorizing, MemorizingConfig, dict(memory_size=10, n_nearest=3))}[name]
    return test_rpt.small(Model, Config, retriever='none', **more, **others)


BY_LOOPS = {'griffin': griffin_by_loops, 'block_recurrent': states_by_loops,
            'memorizing': memorizing_by_loops}
MEMORIES = mark.parametrize('name', BY_LOOPS)


@mark.parametrize('name, more', [
    *((name, {}) for name in BY_LOOPS), ('memorizing', dict(shift_values=False))])
def test_a_layer_with_a_memory(name, more, fp64):
    """By its equations, token by token"""
    layer = with_memory(name, **more).upper[-1]
    x = torch.randn(1, T, 16, generator=generator(0))
    begins = torch.arange(T) % 9 == 8
    wanted = BY_LOOPS[name](layer, x[0], begins)
    close(layer(x, None, begins[None])[0][0], wanted)


@MEMORIES
def test_memories_stream(name, fp64):
    test_rpt.assert_streams(with_memory(name))


def test_tokens_that_do_not_read_the_memory(fp64):
    """The way off of memorizing.py: as if each token were a document of its own"""
    layer = with_memory('memorizing').upper[-1]
    x = torch.randn(1, T, 16, generator=generator(0))
    alone, _ = layer(x, None, torch.ones(1, T, dtype=torch.bool))
    assert torch.equal(layer(x, None, None)[0], alone)
    assert not torch.equal(layer(x, None, torch.zeros(1, T, dtype=torch.bool))[0], alone)


def test_a_text_that_recurs_is_a_tie_of_memories():
    """In fp32, in pieces and in one pass: one token 600 times, 60 random ones, the token again.
    Exactly n_nearest tokens are read."""
    model = test_rpt.small(Memorizing, MemorizingConfig, retriever='none', window=2 * CHUNK,
                           memory_size=2000, n_nearest=5).float()
    same = torch.full((1, 600), 7)
    tokens = torch.cat([same, tokens_of(t=60, b=1), same[:, :400]], 1)
    full = model.log_probs(tokens)
    for size in (64, 100):
        close(streamed(model, tokens, size)[0], full, 1e-3)
    scores = torch.tensor([[1.0, 2.0, 1.0, 1.001, 0.5]])
    assert nearest(scores, 3).tolist() == [[True, True, True, False, False]]


def test_nearest_tokens_are_chosen_in_fp32_under_autocast():
    """The nearest of all earlier tokens by scores of up to 20, which bf16 would round to 1/8"""
    model = test_rpt.small(Memorizing, MemorizingConfig, retriever='none', memory_size=200,
                           n_nearest=1).float()
    attention = model.upper[-1].attention
    attention.scale.data.fill_(20)
    q = torch.randn(1, 200, 2, 8)
    kv = torch.randn(1, 200, 2, 2, 8)
    begins = torch.zeros(1, 200, dtype=torch.bool)
    expected, _ = attention.read_memory(q, kv, begins)
    with torch.autocast('cpu', torch.bfloat16):
        memory, _ = attention.read_memory(q, kv, begins)
    close(memory.float(), expected, 0.02)                               # values are bf16


@MEMORIES
def test_memories_are_causal(name, fp64):
    assert_causal(with_memory(name), tokens_of(t=T - 3, b=1))


@MEMORIES
def test_rows_of_memories_are_independent(name, fp64):
    test_rpt.assert_rows_are_independent(with_memory(name))


@MEMORIES
def test_a_memory_is_of_one_document(name, fp64):
    """That of the second document changes what follows from its first token on."""
    model = with_memory(name)
    tokens = tokens_of(b=1)
    difference = model.encode(tokens)[0] - model.encode(tokens, docs_of(8, 36))[0]
    assert difference[0].any(1).nonzero()[0] == 8


def test_no_gradient_reaches_the_memory(fp64):
    """That of the Memorizing Transformer: only the window of two blocks learns."""
    layer = with_memory('memorizing').upper[-1]
    x = torch.randn(1, T, 16, generator=generator(0)).requires_grad_()
    y, _ = layer(x, None, torch.zeros(1, T, dtype=torch.bool))
    gradient, = torch.autograd.grad(y[0, -1].sum(), x)
    left = ((T - 1) // CHUNK - 1) * CHUNK                               # a block has CHUNK tokens
    assert not gradient[0, :left].any() and gradient[0, left:].any()


@mark.parametrize('name, part', [
    ('memorizing', 'attention'), ('memorizing', 'mlp'), ('block_recurrent', 'attention'),
    ('block_recurrent', 'state'), ('block_recurrent', 'mlp')])
def test_dropout_is_on_all_that_a_layer_with_a_memory_adds(name, part):
    layer = with_memory(name, dropout=0.5).upper[-1].train()
    for key, weight in layer.named_parameters():
        if key.endswith('proj.weight') and not key.startswith(part):
            weight.data.zero_()                         # the other parts add 0
    x = torch.randn(1, T, 16, generator=generator(0))
    added = layer(x, None, torch.zeros(1, T, dtype=torch.bool))[0] - x
    assert (added == 0).float().mean() == approx(0.5, abs=0.1)


def test_the_gradient_of_channels_that_keep_their_state():
    """For r_t = 0, a_t = 1: the derivative of sqrt(1 - a_t²) is infinite."""
    layer = Griffin(GriffinConfig(n_embd=16, n_head=2)).upper[-1]
    layer.gates.bias.data[::2] = -30                    # of r_t
    x = torch.randn(1, 40, 16, generator=generator(0))
    y, _ = layer(x, None, torch.zeros(1, 40, dtype=torch.bool))
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


# --------------------------------------------------------------------------------------------------
# from rpt.py: retrievers that are trained first
DENSE = mark.parametrize('retriever', ['dpr', 'contriever'])


@DENSE
def test_rpt_with_a_dense_retriever_is_the_papers(retriever, fp64):
    """RPT by its definition; its streams, traces and causality are those of RPT."""
    model = test_rpt.small(Dense, DenseConfig, retriever=retriever)
    tokens = tokens_of(b=1)
    log_p, wanted, _ = test_rpt.by_definition(model, tokens[0], [0] * T)
    assert any(wanted) and test_rpt.retrieved_by(model, tokens) == wanted
    close(model.log_probs(tokens)[0], log_p)
    test_rpt.assert_streams(model)
    assert_causal(model, tokens[:, :-3])


@DENSE
def test_dense_retrievers_are_trained_by_contrast(start, retriever, capsys, fp64):
    """The loss by loops: dpr's positives are BM25's first, contriever's the chunks before"""
    other = dict(dpr='contriever', contriever='dpr')[retriever]

    def setup_of_both(model, run):
        """A retriever that has been trained, as after --init, is trained again for other chunks.
        Each training lowers the loss."""
        batch = run.batches[0]
        chunks = batch.tokens.unflatten(1, (-1, CHUNK))
        doc = rpt.doc_of_chunks(batch.doc, CHUNK)
        idf = corpus_idf(run.corpus.train.tokens.tolist(), 257)
        for model.config.retriever, trains in ((other, True), (other, False), (retriever, True)):
            before = contrast(model.retriever, chunks, doc, model.config, idf)
            setup(model, run)
            after = contrast(model.retriever, chunks, doc, model.config, idf)
            assert (after < before) == trains

    (batch, _), corpus, model, _ = start(
        Model=Dense, Config=DenseConfig, setup=setup_of_both, retriever=retriever,
        reference_steps=2)
    assert capsys.readouterr().out.count('first the retriever, 2 steps') == 2
    dense, n = model.retriever, 12                                      # chunks of a sequence
    assert dense.is_trained and not any(p.requires_grad for p in dense.parameters())
    assert not any(p.grad is not None for p in dense.parameters())      # no optimizer moves it
    idf = corpus_idf(corpus.train.tokens.tolist(), 257)
    chunks = batch.tokens.unflatten(1, (-1, CHUNK))
    doc = rpt.doc_of_chunks(batch.doc, CHUNK)
    query, key = (x.flatten(0, 1) for x in dense(chunks))
    losses = []
    for i in range(2 * n):
        b, row = divmod(i, n)
        if retriever == 'dpr':
            best = rpt.bm25_candidates(chunks[b], doc[b], 4, 1, idf)[row].nonzero()
        else:
            best = [row - 1] if row and doc[b, row - 1] == doc[b, row] >= 0 else []
        if len(best):
            s_q = key @ query[i] / 4
            s_q[i] = -math.inf
            losses.append(-s_q.log_softmax(0)[b * n + int(best[0])])
    loss = contrast(dense, chunks, doc, model.config, idf)
    close(loss, torch.stack(losses).mean())


def test_the_retriever_of_the_first_process_is_sent_to_the_others(start, monkeypatch, fp64):
    """They do not train it."""
    sent = []
    monkeypatch.setattr(torch.distributed, 'broadcast', lambda *x: sent.append(x))

    def setup_of_the_second(model, run):
        run.rank, run.world = 1, 2
        setup(model, run)

    _, _, model, _ = start(Model=Dense, Config=DenseConfig, setup=setup_of_the_second,
                           retriever='dpr', reference_steps=2)
    assert not model.retriever.is_trained
    weights = model.retriever.state_dict().values()
    assert [(x.data_ptr(), rank) for x, rank in sent] == [(x.data_ptr(), 0) for x in weights]


# --------------------------------------------------------------------------------------------------
# from drt.py: Landmark Attention
S, K = test_drt.S, test_drt.K


def landmark_model(**more):
    """A small model in fp64"""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, block_size=20, micro_batch=2, n_layer=4, n_head=2, n_embd=16,
                 chunk_size=S, n_neighbors=K)
    model = Landmark(LandmarkConfig(**sizes | more)).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model


def turned(x, p):
    """Rotary embeddings of vectors (n, D) at positions p (n,): pairs are complex numbers"""
    n, D = x.shape
    angle = p[:, None] * 10000 ** (-torch.arange(0, D, 2).double() / D)
    pairs = torch.view_as_complex(x.reshape(n, -1, 2))
    return torch.view_as_real(pairs * torch.exp(1j * angle)).flatten(1)


def landmark_attention(block, x):
    """The formula of LandmarkAttention for each position i and head. A chunk that is too far away
    moves towards i as a whole. Its landmark then has the largest distance of training: that of the
    last position of a sequence of 20 tokens and their landmarks to the first landmark."""
    config = block.attention.config
    j = torch.arange(len(x))
    farthest = 20 + 20 // (S - 1) - 1 - (S - 1)
    q, k, v = test_drt.heads(block.norm1(x), block.attention.qkv.weight, 3)
    o = torch.zeros_like(q)
    for i in range(len(x)):
        for h, slope in enumerate((4, 2 ** -8)):
            excess = i - farthest - (j // S * S + S - 1)
            age = i - j - excess.clamp(min=0) * config.limit_distance
            if config.positions == 'rotary':
                query = turned(q[i:i + 1, h], j[i:i + 1])
                scores = turned(k[:, h], i - age) @ query[0] / 8 ** 0.5
            else:
                scores = k[:, h] @ q[i, h] / 8 ** 0.5 - slope * age
            z = scores.exp()
            r = scores[S - 1::S]                                        # of landmarks
            n = i // S                                                  # its chunk
            best = sorted(range(n), key=lambda m: (round(256 * r[m].item()), m))
            w = torch.zeros_like(z)                                     # their sum is not yet 1
            for m in (*best[-K:], n):
                tokens = slice(m * S, min(i + 1, m * S + S - 1))
                w[tokens] = z[tokens]
                if m < n:
                    w[tokens] *= r[m].exp() / z[tokens].sum()
            o[i, h] = w @ v[:, h] / w.sum()
    return o.flatten(1) @ block.attention.proj.weight.T


@mark.parametrize('positions', ['alibi', 'rotary'])
@mark.parametrize('limit_distance', [True, False])
def test_landmark_attention_is_its_formula(positions, limit_distance):
    model = landmark_model(positions=positions, limit_distance=limit_distance)
    tokens = tokens_of(t=36)
    ids = model.insert(tokens, V)[0]
    x = model.embedding.weight[ids]
    for block in (*model.lower, *model.upper):
        x = x + landmark_attention(block, x)
        x = x + test_drt.mlp(block, x)
    logits = model.norm(x)[ids < V] @ model.embedding.weight[:V].T
    close(model.log_probs(tokens)[0], logits.log_softmax(-1))


@mark.parametrize('positions', ['alibi', 'rotary'])
def test_training_of_landmark_attention_reads_all_chunks(positions):
    batch = batch_of(tokens_of(t=36))
    loss, _ = landmark_model(n_neighbors=1, positions=positions).train()(batch, 0)
    expected, _ = landmark_model(n_neighbors=11, positions=positions)(batch, 0)
    close(loss, expected)


def test_no_distance_of_training_is_limited():
    model = landmark_model()
    attention = model.lower[0].attention
    last = model.insert(tokens_of(t=20), V).size(1) - 1
    assert attention.farthest == last - (S - 1)
    assert attention.excess(torch.tensor([last - (S - 1), last])).tolist() == [0, S - 1]


@mark.parametrize('positions', ['alibi', 'rotary'])
def test_scores_of_landmarks_and_tokens_are_fp32_under_autocast(positions):
    attention = landmark_model(positions=positions).float().lower[0].attention
    q = 5 * torch.randn(1, 2, 12, 8)
    k = 5 * torch.randn(1, 12, 2, 8)
    v = torch.randn(1, 12, 2, 8)
    expected, chunk = attention.train().score_chunks(q, k, None)
    expected_o = attention.read_chunks(q, k, v, expected, chunk)
    with torch.autocast('cpu', torch.bfloat16):
        r, _ = attention.score_chunks(q, k, None)
        o = attention.read_chunks(q, k, v, r, chunk)
    close(r, expected, atol=0)
    close(o.float(), expected_o, atol=0.03)                             # the output itself is bf16


def test_landmarks_are_of_one_document():
    """The second document, from token 16 on, which begins in chunk 5, reads no chunk of the first:
    from the next chunk on nothing of its loss depends on it. Chunk 0 is read within its own."""
    docs = (torch.arange(36) >= 16).long().expand(2, 36)
    for training in (True, False):
        model = landmark_model(n_neighbors=20).train(training)
        a = tokens_of(t=36)
        b = tokens_of(1, t=36)
        b[:, 12:] = a[:, 12:]                                           # chunks 0 to 3 differ
        losses = []
        for tokens in (a, b):
            batch = batch_of(tokens, docs)
            batch.targets[:, :18] = -1                                  # of the second document
            losses.append(model(batch, 0)[0])
            batch.targets[:, 12:15] = tokens[:, 13:16]                  # and of chunk 4
            losses.append(model(batch, 0)[0])
        close(losses[0], losses[2])
        assert (losses[1] - losses[3]).abs() > 1e-4


@mark.parametrize('positions', ['alibi', 'rotary'])
def test_landmark_attention_streams(monkeypatch, positions):
    monkeypatch.setattr(Landmark, 'PIECE', 20)
    model = landmark_model(positions=positions)
    tokens = tokens_of(t=120)
    full = model.log_probs(tokens)
    for n in (0, 7, 20, 85, 95):
        state = model.read(tokens[:, :0], model.read(tokens[:, :n]))
        log_probs, _ = model.stream(tokens[:, n:], state)
        close(log_probs, full[:, n:])
    for sizes in (1, 3, [7, 31, 82]):
        close(streamed(model, tokens, sizes)[0], full)


def test_the_preset_of_landmark_attention_is_rotary():
    """Its slope is ALiBi's; nobody has set it for rotary positions."""
    _, config, _ = train.parse('--model landmark --preset 124m'.split())
    assert config.positions == 'rotary'


@mark.parametrize('positions', ['alibi', 'rotary'])
def test_landmark_attention_is_causal(positions):
    assert_causal(landmark_model(positions=positions), tokens_of(t=36), exact=True)


def test_a_chunk_that_recurs_is_a_tie_of_landmarks():
    model = landmark_model(n_neighbors=3, n_embd=32).float()
    assert_ties(model, tokens_of(t=3, b=1), tokens_of(t=3, b=20))


# --------------------------------------------------------------------------------------------------
# from trime.py: SRU++
def sru_model(**more):
    return test_trime.small(Model=SRU, Config=SRUConfig, n_head=1, **more)


def test_sru_is_its_equations():
    """Token by token"""
    C = 16
    block = sru_model().blocks[0]
    x = torch.randn(8, C).double()
    q = block.query(x)
    k, v = block.kv(q).split(C // 4, 1)
    expected, c = [], torch.zeros(C)
    for t in range(8):
        weight = (k[:t + 1] @ q[t] / 2).softmax(0)
        z = q[t] + block.alpha * weight @ v[:t + 1]
        u, f, r = block.out(block.norm1(z)).split(C)
        f = (f + block.v_f * c).sigmoid()
        r = (r + block.v_r * c).sigmoid()
        c = f * c + (1 - f) * u
        expected.append(r * c + (1 - r) * x[t])
    close(block(x[None], None)[0][0], torch.stack(expected))


@mark.parametrize('stride', [3, 8])
def test_sru_with_memory_streams(stride):
    """As TRIME: the strided evaluation, with local memory"""
    model = sru_model(stride=stride).eval()
    model.eval_memory.inference = trime.TrimeInference(True)
    tokens = test_trime.TOKENS
    full = model.log_probs(tokens[None])
    each = zip(full[0].exp(), test_trime.memories_of_each(model, tokens), strict=True)
    for p, memories in each:
        close(p, test_trime.equations_6_to_9(model.inference, *memories), 1e-7)
    for sizes in (1, 7, [5, 1, 16, 29]):
        close(streamed(model, tokens[None], sizes)[0], full)
    assert_causal(model, tokens[None, :24])


# --------------------------------------------------------------------------------------------------
# a cache for every model
def cached_model(name):
    """A model with a cache of 9 tokens, read in pieces of 8"""
    model = {'drt': test_drt.small, 'trime': lambda: test_trime.small('none').eval()}[name]()
    model = Cache(model, 9)
    for way in model.constants:
        model.constants[way] = CacheConstants(9, 0.4, 0.3)
    model.PIECE = 8
    return model


def cache_by_loops(model, tokens):
    """The formula in the header of compared/cache.py, for each token of (n,) -> P (n, V)"""
    f = model.model.states(tokens[None])[0][0]
    P = model.model.logits(f).softmax(1)
    for i in range(1, len(tokens)):
        j = range(max(0, i - 9), i)
        weights = torch.stack([f[i] @ f[k] for k in j]) / f.size(1) ** 0.5 / 0.4
        P[i] *= 0.7
        for k, p in zip(j, weights.softmax(0)):
            P[i, tokens[k + 1]] += 0.3 * p
    return P


@mark.parametrize('name', ['drt', 'trime'])
def test_a_cache_is_its_formula(name):
    """And its streams; without the cache the model is unchanged."""
    model = cached_model(name)
    tokens = tokens_of(t=40)
    full = model.log_probs(tokens)
    for row, log_probs in zip(tokens, full):
        close(log_probs.exp(), cache_by_loops(model, row), 1e-7)            # λ is fp32
    for sizes in (1, 3, [7, 2, 8, 8, 8, 7]):
        close(streamed(model, tokens, sizes)[0], full)
    state = model.read(tokens[:, :21])
    close(model.stream(tokens[:, 21:29], state)[0], full[:, 21:29])
    assert_causal(model, tokens)
    model.way = model.ways()[1]
    close(model.log_probs(tokens), model.model.log_probs(tokens))


def test_the_constants_of_a_cache_are_tuned():
    """What tuning computes of a token is what the stream predicts, for each size."""
    model = cached_model('drt')
    assert model.ways() == ('on+cache', 'on', 'off+cache', 'off')
    tokens = tokens_of(t=90, b=1)[0] % 7                                # tokens return
    split = Split('test', tokens.numpy(), [0, 50, 90])
    queries = model.collect(split, -1, 90, lambda items, *_, **__: items)
    for size in (9, 4, 1):
        model.constants['on'] = constants = CacheConstants(size, 0.4, 0.3)
        expected = []
        for document in tokens.split([50, 40]):
            log_probs = model.log_probs(document[None])[0]
            expected.append(log_probs[:-1].gather(1, document[1:, None])[:, 0])
        found = torch.cat([cached_log_p(x, constants) for x in queries])
        close(found, torch.cat(expected))

    best = best_constants(queries, CacheConstants(9))

    def total(**change):
        return sum(cached_log_p(x, replace(best, **change)).sum().item() for x in queries)
    for name, values in dict(tau=TAUS, lam=LAMBDAS).items():
        assert total() == max(total(**{name: value}) for value in values), name

    # of pairs, by targets alone
    tab = tokens[30].item()
    split = Split('test', tokens[:50].numpy(), [0, 50])
    first = (tokens == tab).nonzero()[0, 0].item()                      # targets begin after it
    of_pairs, = model.collect(split, tab, 50, lambda items, *_, **__: items)
    assert len(of_pairs.log_p) == 49 - first > 0


# --------------------------------------------------------------------------------------------------
# flags
@mark.parametrize('flags, message', [
    ('--model rpt --memory local', '--memory is a flag of trime, sru, not of this model'),
    ('--model GRIFFIN', 'the nearest is griffin'), ('--model rpt --retriever dpr', "choose from"),
    ('--model griffin --retriever sem', "choose from"),
    ('--model dense --p-off 0.5', 'p_off is for retriever sem'),
    ('--model landmark --n-layer 6 --p-off 0.5', 'p_off is for models with groups'),
    ('--model drt --retriever none --p-off 0.5', 'p_off is for models with groups and a retr'),
    ('--model memorizing --chunk-size 32', 'half of window'),
    ('--model memorizing --window 64', 'chunk_size 64 must be half of window 64: change one of'),
    ('--model block_recurrent --chunk-size 16', 'half of window'),
    ('--model landmark --positions rotary --slope 1', 'slope is for positions alibi'),
    ('--model landmark --window 64', 'no window'), ('--model landmark --groups 1', 'groups'),
    ('--model sru --n-head 2', 'one head'), ('--model memorizing --n-nearest 0', 'n_nearest'),
    ('--model memorizing --memory-size 0', 'memory_size'), ('--model griffen', 'griffin')])
def test_what_does_not_fit_is_one_line(flags, message):
    assert message in one_line(train.parse, flags.split())


# --------------------------------------------------------------------------------------------------
# README's own model
@fixture
def mine(tmp_path, monkeypatch):
    """decay.py as README has it, in a folder like that of train.py, where it can be imported; a
    text"""
    readme = Path(train.__file__).with_name('README.md').read_text()
    code = re.search(r'^    """DRT with decay.*?\n(?=\S)', readme, re.M | re.S)[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path('decay.py').write_text(textwrap.dedent(code))
    texts = [f'{i} the cat sees the old dog and a river ' * 40 for i in range(6)]
    write_splits(tmp_path / 'texts', texts[:4], texts[4:])
    sizes = '--max-steps 4 --chunk-size 32 --block-size 124 --tokens-per-step 496'
    yield flags('drt', f'{sizes} --out')
    sys.modules.pop('decay', None)


def test_your_own_model(mine, capsys):
    """It trains, is resumed and evaluated like ours: table, page, speed, needles."""
    argv = [*mine, 'out/decay', '--model', 'decay.py', '--decay', '0.5']
    train.main([*argv, '--max-steps', '2'])
    train.main(argv)
    screen = capsys.readouterr().out
    assert 'step 2 of 4' in screen
    path = Path('decay.py').resolve()
    assert f'finished: python eval.py out/decay --model {path}\n' in screen
    train.main([*mine, 'out/drt'])
    command = 'out/drt out/decay --model decay.py --json x.json'
    evaluation.main(f'{command} --max-tokens 3 --html page.html'.split())
    rows = json.loads(Path('x.json').read_text())['table']['rows']
    assert [row['run'] for row in rows] == 3 * ['out/drt'] + 3 * ['out/decay']
    assert rows[0]['loss'] != rows[3]['loss']
    evaluation.main(f'{command} --task speed --lengths 1k'.split())
    evaluation.main(f'{command} --task niah --lengths 512 --depths 0,50'.split())

    # its streams and causality are those of DRT
    model, _ = evaluation.load('out/decay', 'decay.py')
    assert model.config.decay == 0.5 and model.decay != 0.5             # the parameter is trained
    tokens = tokens_of(t=60)
    full = model.double().log_probs(tokens)
    close(streamed(model, tokens, 7)[0], full)
    assert_causal(model, tokens[:, :36], exact=True)

    # weights never import a file
    assert '--model PATH/decay.py' in one_line(evaluation.main, ['out/decay'])
    argv = [*mine, 'out/x', '--init', 'out/decay']
    assert '--model PATH/decay.py' in one_line(train.main, argv)
    argv = [*mine, 'out/x', '--init', 'out/drt', '--model', 'decay.py']
    assert 'weights of another model: --model drt' in one_line(train.main, argv)


def test_your_own_model_can_have_annotations_that_are_strings(mine):
    path = Path('decay.py')
    path.write_text('from __future__ import annotations\n' + path.read_text())
    _, config, _ = train.parse(['--model', 'decay.py', '--decay', '0.5', '--no-sink'])
    assert config.decay == 0.5 and config.sink is False


def test_files_of_models(mine):
    """A file of yours can import those of its folder; a file of this repository is its model."""
    Path('neighbor.py').write_text('from drt import DRT, DRTConfig')
    Path('near.py').write_text('from neighbor import *\nclass Near(DRT): pass')
    assert train.find_model('near.py').__base__ is train.find_model('drt')
    assert train.find_model(sys.modules['rpt'].__file__) is train.find_model('rpt')
    message = one_line(train.parse, ['--model', 'near'])
    assert 'nor a file .py; the file is --model near.py' in message
    for name in 'near', 'neighbor':
        sys.modules.pop(name)


FIELD = ('from dataclasses import field\nfrom drt import *\n@dataclass\n'
         'class FieldsConfig(DRTConfig):\n    {}\nclass Fields(DRT): pass')


@mark.parametrize('name, text, message', [
    ('none.py', None, 'no such file'), ('rpt.py', '', 'rename the file'),
    ('json.py', '', 'rename the file'), ('mine.v2.py', '', 'no class can be named mine.v2'),
    ('my model.py', '', 'named my model'), ('7.py', '', 'named 7'),
    ('empty.py', '', 'has no class Empty'),
    ('bare.py', 'class Bare: pass', 'Bare has to be an nn.Module'),
    ('my-model.py', 'from drt import PRESETS, COMPILED, batches, nn\n'
                    'class MyModel(nn.Module): pass', 'MyModelConfig'),
    ('other.py', 'from drt import *\nclass MyConfig(DRTConfig): pass\nclass Other(DRT): pass',
     'MyConfig has to be OtherConfig'),
    ('plain.py', 'from drt import *\nclass PlainConfig(DRTConfig): pass\nclass Plain(DRT): pass',
     'PlainConfig needs @dataclass'),
    ('parts.py', 'import torch\nclass Parts(torch.nn.Module): pass', 'PRESETS is not defined'),
    ('fields.py', FIELD.format('new: int = 1'), 'FieldsConfig.new needs a comment'),
    ('fields.py', FIELD.format('new: tuple = (1, 2)  # sizes'), 'new needs a default, and has'),
    ('fields.py', FIELD.format('new: int | None = None  # size'), 'new needs a default, and has'),
    ('fields.py', FIELD.format('seed: int = 3  # of x'), '--seed is two flags'),
    ('fields.py', FIELD.format('new: int = field(default_factory=int)  # x'), 'needs a default')])
def test_a_file_that_is_no_model_is_one_line(mine, name, text, message):
    folder = Path('own')
    folder.mkdir()
    if text is not None:
        (folder / name).write_text(text)
    assert message in one_line(train.parse, ['--model', f'own/{name}'])
    if text or name == 'empty.py':
        sys.modules.pop(name[:-3])


def test_a_model_without_a_part_is_one_line(mine):
    Path('half.py').write_text('from drt import *\nclass Half(DRT):\n    ways = property()')
    message = one_line(train.main, [*mine, 'x', '--model', 'half.py'])
    assert 'half.py: ways is not defined' in message
    sys.modules.pop('half')
    assert not Path('x').exists()


def test_the_initial_decay_of_griffin():
    """a_t from 0.9 to 0.999 where r_t = 1, with log(1 - a_t) evenly spaced"""
    a = torch.exp(-8 * F.softplus(Griffin(GriffinConfig()).upper[-1].decay))
    close(a[[0, -1]], torch.tensor([0.9, 0.999]), 0.003)
    steps = (1 - a).log().diff()
    close(steps, steps.mean().expand_as(steps), 0.01)


def test_dropout_in_a_recurrent_layer():
    layer = Griffin(GriffinConfig(n_embd=16, n_head=2, dropout=0.5)).upper[-1]
    x = torch.randn(1, 40, 16)
    added = layer(x, None, torch.zeros(1, 40, dtype=torch.bool))[0] - x
    assert (added == 0).float().mean() == approx(0.5, abs=0.1)


@mark.parametrize('name', ['memorizing', 'block_recurrent'])
def test_the_tenth_of_twelve_layers_has_the_memory(name):
    Model = type(with_memory(name))
    config = replace(with_memory(name).config, n_layer=12)
    usual = type(Model(config).lower[0])
    is_usual = [type(layer) is usual for layer in Model(config).upper]
    assert is_usual == [True, True, True, False, True, True]


@mark.parametrize('shift_values', [True, False])
def test_the_query_of_the_memory(shift_values, fp64):
    """With --shift-values a token's key, else its query"""
    model = test_rpt.small(Memorizing, MemorizingConfig, retriever='none', memory_size=10,
                           n_nearest=3, shift_values=shift_values)
    attention = model.upper[-1].attention
    q, other = torch.randn(2, 1, T, 2, 8, generator=generator(0))
    kv = torch.randn(1, T, 2, 2, 8, generator=generator(1))
    begins = torch.zeros(1, T, dtype=torch.bool)
    a, b = (attention.read_memory(x, kv, begins)[0] for x in (q, other))
    assert torch.equal(a.nan_to_num(), b.nan_to_num()) == shift_values


def test_each_way_of_a_cache_is_tuned_as_such(monkeypatch):
    model, ways = cached_model('drt'), []
    monkeypatch.setattr(model, 'collect', lambda *_: ways.append(model.way) or [])
    model.tune(Split('test', [], [0]), -1, None)
    assert ways == ['on+cache', 'off+cache']


def test_the_bias_of_sru():
    """b is 0, of r -2."""
    u, f, r = SRU(SRUConfig()).blocks[0].out.bias.chunk(3)
    assert not u.any() and not f.any() and (r == -2).all()
