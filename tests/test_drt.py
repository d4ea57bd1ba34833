"""DRT against its definitions, by loops in fp64."""
import io, math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from drt import DRT, PRESETS, DRTConfig, attend
from helpers import batch_of, close, learn, rope

torch.set_num_threads(1)                        # the models are tiny
V, S, W, K, T, B = 23, 4, 5, 2, 36, 2           # T: 12 chunks of 3 tokens and a landmark
EPS = 1e-9                                      # fp64 through a few layers


def small(**settings):
    """A model in fp64, far from its initial weights."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=4, n_head=2, n_embd=16,
                 window=W, chunk_size=S, n_neighbors=K, groups=2)
    model = DRT(DRTConfig(**{**sizes, **settings})).double().eval()
    for p in model.parameters(): p.data += 0.3 * torch.randn_like(p)
    return model


def random_tokens(seed=0, t=T, b=B):
    return torch.randint(V, (b, t), generator=torch.Generator().manual_seed(seed))


def changed(tokens, t):
    """The tokens with another one in place t."""
    return (tokens + F.one_hot(torch.tensor(t), tokens.size(1))) % V


@pytest.mark.parametrize('past, t, window', [(0, 11, 8), (2, 9, 4), (6, 9, 8), (7, 1, 8)])
def test_attend_by_loops(past, t, window):
    q, k, v = (torch.randn(1, n, 2, 6).double() for n in (t, past + t, past + t))
    slopes, o = torch.tensor([0.5, 0.1]).double(), torch.zeros_like(q)
    for i, h in [(i, h) for i in range(past, past + t) for h in (0, 1)]:
        j = [j for j in range(i + 1) if i - j < window and j // 4 >= i // 4 - 1]    # block: 4
        s = k[0, j, h] @ q[0, i - past, h] / 6 ** 0.5 - slopes[h] * (i - torch.tensor(j))
        o[0, i - past, h] = s.softmax(0) @ v[0, j, h]
    close(attend(q, k, v, 4, window, slopes.view(1, 2, 1, 1)), o)


def trained(model, batch):
    """The arguments that forward gives to `encode`, and f of the tokens"""
    calls, encode = [], model.encode
    model.encode = lambda *args: calls.extend([args, encode(*args)]) or calls[1]
    model(batch, 0)
    model.encode, ids = encode, calls[0][0]
    return calls[0], calls[1][0][:, ids[0] < V]


def mlp(module, x):
    gate, y = (x @ module.fc.weight.T).chunk(2, dim=-1)
    return (y * gate / (1 + (-gate).exp())) @ module.proj.weight.T


def heads(x, weight, n):
    return (x @ weight.T).view(len(x), n, -1, 8).unbind(1)      # D = 8


def attention(q, k, v, bias=0):
    """Of one query. q (H, D), k and v (J, H, D), bias (H, J)"""
    p = (torch.einsum('hd, jhd -> hj', q, k) / 8 ** 0.5 + bias).softmax(1)
    return torch.einsum('hj, jhd -> hd', p, v)


def self_attention(block, x, window):
    q, k, v = heads(block.norm1(x), block.attention.qkv.weight, 3)
    y, slopes = torch.zeros_like(q), 4 * 2 ** torch.linspace(0, -10, q.size(1))[:, None]    # ALiBi
    for i in range(len(x)):
        j = torch.arange(max(0, i - window + 1), i + 1)
        y[i] = attention(q[i], k[j], v[j], -slopes * (i - j))
    return y.flatten(1) @ block.attention.proj.weight.T


def encoded(encoder, x):
    """C_k of one chunk, x (S, C)"""
    if len(encoder.blocks): x = encoder.norm_in(x)
    for block in encoder.blocks:
        q, k, v = heads(block.norm1(x), block.qkv.weight, 3)
        y = torch.stack([attention(q_i, rope(k, range(S)), v) for q_i in rope(q, range(S))])
        x = x + y.flatten(1) @ block.proj.weight.T
        x = x + mlp(block.mlp, block.norm2(x))
    return encoder.norm(x)


def read(model, h, chunks, own):
    """Eq. 1: of chunks {k: C_k}, what h (C,), of the chunk `own`, retrieves, [(w_k, k)]"""
    l = [x.mean(0) if model.config.compare_means else x[-1] for x in [*chunks.values(), own]]
    if model.config.compare_means:
        d = l[-1] - sum(l[:-1]) / max(1, len(chunks))
        h = h + d / (d.square().mean() + 1e-6) ** 0.5
    scores = {k: (h @ l_k).item() / len(h) ** 0.5 for k, l_k in zip(chunks, l)}
    best = sorted(scores, key=lambda k: -scores[k])[:model.config.n_neighbors]
    total = sum(math.exp(scores[k]) for k in best)
    return [(math.exp(scores[k]) / total, k) for k in best]


def cross_attention(model, block, a, chunks, reads):
    """Eq. 2 and 3; reads: of each chunk, [(w_k, k)]; with next_chunk half of w_k is of k + 1"""
    q, = heads(block.gca.norm(a), block.gca.query.weight, 1)
    o, n = torch.zeros_like(q), 1 + model.config.next_chunk
    for i in range(len(q)):
        for w, k in [(w / n, k + j) for w, k in reads[i // S] for j in range(n)]:
            keys, values = heads(chunks[k], model.encoder.kv.weight, 2)
            shift, sink = int(model.config.shift_values), int(model.config.sink)
            kv = [keys[:-1], values[shift:S - 1 + shift]]                   # of the next token
            kv = [F.pad(x, (0, 0, 0, 0, 0, sink)) for x in kv]
            o[i] += w * attention(q[i], *kv)
    return o.flatten(1) @ block.gca.proj.weight.T


@torch.no_grad()
def by_definition(model, tokens, corpus=(), own=True):
    """
    One text (T,) by the paper's equations, with loops -> log P (T, V), of each group what its
    chunks read. The chunks of a corpus come before those of the text, which are read if own.
    """
    c = model.config

    def lower(tokens):
        ids, text = [], []
        for i, token in enumerate(tokens.tolist()):
            text.append(len(ids))
            ids.append(token)
            if c.groups and i % (S - 1) == S - 2:               # a landmark after S - 1 tokens
                ids.append(V)
        x = embedded = model.embedding.weight[torch.tensor(ids)]            # (L, C)
        for block in [*model.lower, *(() if c.groups else model.upper)]:
            x = x + self_attention(block, x, c.window)
            x = x + mlp(block.mlp, block.norm2(x))
        below = embedded if c.encoder == 'tokens' else x
        ends = range(S - 1, len(ids), S) if c.groups else []    # positions of landmarks
        return x, text, ends, [encoded(model.encoder, below[i + 1 - S:i + 1]) for i in ends]

    (x, text, ends, chunks), reads = lower(tokens), []
    first = lower(corpus)[-1] if len(corpus) else []
    every, M = first + chunks, len(first)           # a corpus's last chunk has no next one
    for g in range(c.groups):
        h = model.landmark_norms[g](x)
        allowed = [[*range(M - c.next_chunk), *range(M, M + own * n)] for n in range(len(ends))]
        reads.append([[]] + [read(model, h[end], {k: every[k] for k in ks}, chunk)
                             for end, ks, chunk in zip(ends, allowed, chunks)])
        size = len(model.upper) // c.groups
        for block in model.upper[g * size:g * size + size]:
            x = x + self_attention(block, x, c.window)
            x = x + cross_attention(model, block, x, every, reads[g])
            x = x + mlp(block.mlp, block.norm2(x))
    return (model.norm(x)[text] @ model.embedding.weight[:V].T).log_softmax(-1), reads


SETTINGS = [{}, dict(groups=1), dict(groups=0), dict(encoder='tokens'), dict(n_encoder=0),
            dict(sink=False), dict(compare_means=False), dict(n_neighbors=1), dict(n_neighbors=20),
            dict(shift_values=False), dict(n_head=4, n_embd=32), dict(next_chunk=False)]
NOT_LEARNED = [dict(retriever='random'), dict(retriever='off')]


@pytest.mark.parametrize('settings', SETTINGS, ids=str)
def test_the_model_is_the_papers(settings):
    """Landmarks, window, ALiBi, encoder, Eq. 1 to 3; groups = 0 is the base LM."""
    model, tokens = small(**settings), random_tokens()
    found, (expected, _) = model.log_probs(tokens)[0], by_definition(model, tokens[0])
    close(found, expected, atol=1e-6)                           # RoPE's angles are fp32


@pytest.mark.parametrize('settings', SETTINGS + NOT_LEARNED, ids=str)
def test_the_future_is_invisible(settings):
    """Changing token t changes no log P before it, bit for bit, and the one after it."""
    model, a = small(**settings), random_tokens()
    before = model.log_probs(a)
    for t in range(T):
        differ = (model.log_probs(changed(a, t)) != before).any(2).any(0)
        assert not differ[:t].any() and differ[t], t


@pytest.mark.parametrize('groups', [1, 2])
def test_nothing_is_late(groups):
    """Chunk 0 is read from the first token after the landmark of chunk 1 on."""
    model, a = small(groups=groups, window=2, n_neighbors=9, chunk_size=8), random_tokens(t=28)
    differ = (model.log_probs(a) != model.log_probs(changed(a, 0))).any(2).any(0)
    assert differ[:5].all() and not differ[5:14].any() and differ[14:].all()    # 4 layers, window 2


def test_documents_are_respected():
    """The second, from token 16, in chunk 5, depends on the first only through the window."""
    model, a = small(window=2, n_neighbors=9), random_tokens()
    doc = (torch.arange(T) >= 16).long().expand(B, T)
    b = torch.cat([random_tokens(1)[:, :16], a[:, 16:]], dim=1)
    f, g = (trained(model, batch_of(x, doc))[1] for x in (a, b))
    assert torch.equal(f[:, 21:], g[:, 21:])                    # 4 layers, window 2
    for block in model.upper:                   # without attention, tokens show what they read
        block.attention.proj.weight.data.zero_()
    f = trained(model, batch_of(a, doc))[1]
    model.retriever = 'off'
    reads = (f != trained(model, batch_of(a, doc))[1]).any(2).any(0).tolist()
    assert reads == [False] * 6 + [True] * 10 + [False] * 8 + [True] * 12       # from chunk 8 on


@pytest.mark.parametrize('settings', SETTINGS + NOT_LEARNED, ids=str)
def test_streaming_equals_one_pass(settings, monkeypatch, tmp_path):
    """Pieces of any size: the same log P and the same chunks, of up to 38; also after read."""
    model, tokens = small(**settings), random_tokens(t=120)
    full, after = model.stream(tokens)
    monkeypatch.setattr(DRT, 'PIECE', 20)                       # of read
    model.offload = str(tmp_path)
    for sizes in ([1] * 120, [3] * 40, [4] * 30, [7, 51, 1, 61], [120]):
        state, parts = None, []
        for piece in tokens.split(sizes, dim=1):
            log_probs, state = model.stream(piece, state)
            parts.append(log_probs)
        torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=EPS)
        for pair in zip(state.reads, after.reads):
            torch.testing.assert_close(*([x[:, -1] for x in read] for read in pair))
    for n in (0, 7, 20, 85, 95):
        state = model.read(tokens[:, :n])
        model.stream(tokens[:, n:].flip(1), state)              # a state is never changed
        close(model.stream(tokens[:, n:], state)[0], full[:, n:])


def test_the_state_is_bounded():
    """§3.3: only landmarks, keys and values grow with the text."""
    model, sizes = small(), []
    for t in (100, 190):
        state = model.stream(random_tokens(t=1), model.read(random_tokens(t=t)))[1]
        torch.save((state.past, state.unfinished, state.reads), file := io.BytesIO())
        sizes.append(file.tell())
    assert sizes[0] == sizes[1] < 20_000


def test_ways():
    """As trained, with random chunks, without: as a model of these settings has them."""
    model, tokens, log_probs = small(), random_tokens(), []
    assert list(model.ways()) == ['on', 'shuffled', 'off']
    for retriever, way in zip(('learned', 'random', 'off'), model.ways().values()):
        vars(model).update(way)
        log_probs.append(model.log_probs(tokens))
        assert torch.equal(small(retriever=retriever).log_probs(tokens), log_probs[-1])
    assert min((log_probs[0] - other).abs().max() for other in log_probs[1:]) > 0.01
    model.retriever = 'random'                                  # appendix A.5
    assert len(model.stream(random_tokens(t=120))[1].reads[0][1].unique()) > 20
    for norm in model.landmark_norms: norm.weight.data.zero_()  # it ignores the text
    assert torch.equal(model.log_probs(tokens), log_probs[1])
    assert small(groups=0).ways() == small(retriever='off').ways() == {'off': {}}


def prepare(model, corpus, text='text', **args):
    """prepare_eval with --retrieve-from, a text `text` and the corpus (n,)"""
    train = SimpleNamespace(tokens=corpus.numpy().astype('uint16'))
    external = SimpleNamespace(name='books', fingerprint='books', train=train)
    args = SimpleNamespace(**{**dict(retrieve_from='books', split='val', offload=''), **args})
    model.prepare_eval(SimpleNamespace(fingerprint=text), external, args, '', lambda x, _: x)


def test_what_a_corpus_must_be():
    """Another text than the one that is scored, two chunks long; only --retrieve-from reads it."""
    model, corpus = small(), random_tokens(t=40)[0]
    with pytest.raises(SystemExit, match='find itself'):
        prepare(model, corpus, text='books', split='train')
    with pytest.raises(SystemExit, match='two chunks'): prepare(model, corpus[:2 * S - 3])
    prepare(model, corpus, retrieve_from='')
    assert 'corpus' not in model.ways()


@pytest.mark.parametrize('settings', [{}, dict(n_neighbors=30), dict(encoder='tokens'),
                                      dict(next_chunk=False)], ids=str)
def test_retrieval_from_a_corpus(settings, monkeypatch):
    """Table 4: a corpus is a text before, outside of the window. trace has what Eq. 1 reads."""
    model, text, corpus = small(**settings), random_tokens(b=1)[0], random_tokens(1, t=40)[0]
    n = 3 * (1 + model.config.next_chunk)                       # tokens that are read together
    monkeypatch.setattr(DRT, 'PIECE', 1)                        # 13 chunks and a token, in pieces
    prepare(model, corpus)
    monkeypatch.setattr(DRT, 'PIECE', 20)
    assert list(model.ways()) == ['on', 'corpus', 'both', 'shuffled', 'off']
    for way, used in (('on', corpus[:0]), ('corpus', corpus), ('both', corpus)):
        vars(model).update(model.ways()[way])
        expected, reads = by_definition(model, text, used, own=way != 'corpus')
        close(model.log_probs(text[None])[0], expected, atol=1e-6)
        for t in range(T):
            found = [(w, a + 39 * (way == 'both' and where is text), b - a)
                     for w, where, a, b in model.trace(text, t)]
            wanted = sorted((w, 3 * k, n) for group in reads for w, k in group[t // 3])
            assert found == [pytest.approx(x) for x in reversed(wanted)], (way, t)
    vars(model).update(model.ways()['off'])
    assert model.trace(text, T - 1) == [] == small(groups=0).trace(text, T - 1)


def test_gumbel_top_k_samples_from_the_softmax():
    """§3.2: the first in proportion to exp(r). Noise is of the batch's seed, and in no weight."""
    model, n = small(compare_means=False, groups=1, gumbel=True, n_neighbors=2), 6000
    batches = [batch_of(random_tokens(), seed=seed) for seed in (0, 0, 1)]
    assert model(batches[0], 0)[0] == model(batches[2], 0)[0]               # in eval mode
    loss, same, other = (model.train()(batch, 0)[0] for batch in batches)
    assert loss == same != other
    h, r = torch.ones(1, 1, 16).double(), torch.tensor([0.0, 0.7, 1.4, 2.1]).double()
    landmarks = r[:, None].expand(1, 4, 16) / 4
    scores = (model.landmark_norms[0](h) @ landmarks.mT / 4).flatten()      # r, but for rounding
    w, idx = model.retrieve(0, h.expand(1, n, 16), landmarks, torch.ones(1, n, 4) > 0)
    torch.testing.assert_close(w, scores[idx.long()].softmax(-1))
    first = idx[0, :, 0].bincount(minlength=4) / n
    torch.testing.assert_close(first.double(), scores.softmax(0), rtol=0, atol=0.03)    # over 4 sd


def test_the_loss_reaches_the_scores():
    """The gradient of what enters scores, h and l, is that of finite differences."""
    model, batch = small(groups=1), batch_of(random_tokens())
    model(batch, 0)[0].backward()
    assert all(p.grad is not None and 1e-7 < p.grad.abs().max() < 1e9 for p in model.parameters())
    for gain in (model.landmark_norms[0].weight, model.encoder.norm.weight):
        losses = []
        for step in (1e-6, -2e-6, 1e-6):
            gain.data[7] += step
            losses.append(model(batch, 0)[0].item())
        slope = (losses[0] - losses[1]) / 2e-6
        assert slope == pytest.approx(gain.grad[7].item(), rel=1e-4, abs=1e-8)


def test_the_loss_scores_each_target_once():
    """In slices of 1,024 tokens; targets are shifted before landmarks, which predict nothing."""
    model, batch = small(), batch_of(random_tokens(t=1101))
    batch.targets[0, 7:21] = batch.targets[-1] = batch.doc[-1] = -1       # the last row is padding
    loss, log = model(batch, 0)
    logits = trained(model, batch)[1] @ model.embedding.weight[:V].T
    expected = F.cross_entropy(logits.mT, batch.targets, ignore_index=-1)
    torch.testing.assert_close(loss, expected)
    w, _ = model.stream(batch.tokens[:-1])[1].reads[-1]         # chunks 0 and 1 have none
    torch.testing.assert_close(log['top_weight'], w[:, 2:-1].amax(2).mean())
    gradients = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected))
    torch.testing.assert_close(*gradients)


def test_mlm():
    """§3.2: in the first half the encoder predicts masked tokens; the decoder sees them."""
    model = small(encoder='tokens', mlm=0.3).train()
    batch = batch_of(random_tokens(t=35))                       # 11 chunks and two tokens
    batch.targets[0] = -1                                       # as in needles: MLM has them too
    masked, (loss, log) = trained(model, batch)[0][3], model(batch, 0.49)
    masked = masked[:, :11 * S].view(B, 11, S)
    assert not masked[..., -1].any()                            # landmarks
    assert all(0.15 < share < 0.45 for share in masked[..., :-1].float().mean((1, 2)))
    ids = F.pad(batch.tokens[:, :33].view(B, 11, S - 1), (0, 1), value=V)
    chunks = model.encoder(model.embedding(ids.masked_fill(masked, V + 1)))[0]
    mlm = F.cross_entropy(chunks[masked] @ model.embedding.weight[:V].T, ids[masked])
    torch.testing.assert_close((log['mlm_loss'], loss), (mlm, log['lm_loss'] + mlm))
    model.retriever = 'off'                                     # then the decoder's input is equal
    losses = model(batch, 0.49)[1]['lm_loss'], model(batch, 0.5)[0], model.eval()(batch, 0.4)[0]
    assert max(losses) - min(losses) < EPS


def test_scores_are_fp32_under_autocast_and_ties_in_order():
    model, allowed = small(n_neighbors=3).float(), torch.ones(1, 6, 40, dtype=torch.bool)
    h, landmarks = torch.randn(1, 6, 16).bfloat16(), 8 * torch.randn(1, 40, 16).bfloat16()
    with torch.autocast('cpu', torch.bfloat16):
        w, idx = model.retrieve(0, h, landmarks, allowed)
        assert w.dtype == model.log_probs(random_tokens()).dtype == torch.float32
    assert (model.retrieve(0, h, 0 * landmarks, allowed)[1] == torch.arange(3)).all()       # ties
    wanted = model.double().retrieve(0, h.double(), landmarks.double(), allowed)
    torch.testing.assert_close((w.double(), idx), wanted, rtol=1e-4, atol=1e-5)


def test_initial_weights():
    """By name, so that what the base LM and DRT share is equal; GCA begins by copying, h at 0."""
    def weights(**more):
        torch.manual_seed(0)
        return DRT(DRTConfig(n_embd=96, n_layer=8, **more)).state_dict()
    base, drt = weights(groups=0), weights(groups=2)
    assert all(p.equal(drt[name][:len(p)]) for name, p in base.items())
    assert not drt['lower.0.mlp.fc.weight'].equal(drt['lower.1.mlp.fc.weight'])
    assert not drt['landmark_norms.0.weight'].any()
    k, v = drt['encoder.kv.weight'].chunk(2)                    # W_Q = W_K, W_O = W_Vᵀ
    assert drt['upper.3.gca.query.weight'].equal(k) and drt['upper.3.gca.proj.weight'].equal(v.T)
    for name, scale in (('embedding', 1), ('encoder.kv', 1), ('lower.0.mlp.proj', 0.25)):
        std = scale * 0.02 * (768 / 96) ** 0.5
        assert drt[name + '.weight'].std().item() == pytest.approx(std, rel=0.05), name


@pytest.mark.parametrize('more, millions', [
    (dict(groups=0), 123.6), (dict(groups=0, n_layer=14), 137.7), (dict(), 146.0)])
def test_the_preset_is_the_papers(more, millions):
    """Table 1: base LM 124M, with two more layers 138M, DRT 133M and its encoder 14M."""
    paper = {k: v for k, v in PRESETS['124m'].items() if k in vars(DRTConfig())}
    with torch.device('meta'): model = DRT(DRTConfig(**{**paper, **more}))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
    equal, flat = dict(encoder='tokens', n_encoder=0, compare_means=False), dict(slope=0)
    for bad in (dict(n_head=3), dict(n_layer=1), dict(groups=4), dict(chunk_size=1), flat, equal):
        pytest.raises(ValueError, DRTConfig, **bad)


def facts(n, generator, n_alike=0):
    """n texts of 17 chunks: five facts (a key, its value), four of noise, four times a key and,
    first in the next chunk, its value. A window of 8 does not reach the facts. -> tokens, the
    values where they are predicted, else -1. Facts of the first n_alike texts have one value."""
    keys = torch.rand(n, 16, generator=generator).argsort(1)[:, :5]
    values = torch.randint(16, 32, (n, 5), generator=generator)
    values[:n_alike] = values[:n_alike, :1]
    fact = torch.rand(n, 5, generator=generator).argsort(1)[:, :4]
    x = torch.randint(34, 40, (n, 17, 7), generator=generator)
    answers = torch.full_like(x, -1)
    x[:, :5, :3] = keys[..., None]
    x[:, :5, 3:] = values[..., None]
    x[:, 9::2] = keys.gather(1, fact)[..., None]
    x[:, 10::2, 0] = 33
    x[:, 10::2, 1:4] = values.gather(1, fact)[..., None]
    answers[:, 10::2, 0] = values.gather(1, fact)
    return x.flatten(1), answers.flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(4))
def test_retrieval_is_learned_from_the_loss_alone(seed):
    """Of facts beyond the window, the right one is retrieved and predicted, from every seed."""
    torch.manual_seed(seed)
    model = DRT(DRTConfig(40, n_layer=2, n_embd=64, window=8, chunk_size=8, n_neighbors=2))
    generator = torch.Generator().manual_seed(0)
    learn(model, 200, lambda step: batch_of(facts(24, generator, 12)[0], seed=step))
    (tokens, answers), right = facts(128, generator), {}
    for model.retriever in ('random', 'off', 'learned'):
        predicted = model.log_probs(tokens).argmax(2)
        right[model.retriever] = (predicted == answers)[answers >= 0].float().mean().item()
    assert right['learned'] > 0.9 and right['random'] < 0.4 and right['off'] < 0.2, right
