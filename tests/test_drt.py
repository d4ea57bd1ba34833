"""
DRT against its definitions, by loops in fp64.

    $ python -m pytest -q tests/test_drt.py
"""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from drt import DRT, DRTConfig
from test_train import learn

torch.set_num_threads(1)                        # the models are tiny
V, S, W, K = 23, 4, 5, 2
T, B = 36, 2                                    # 12 chunks of 3 tokens and a landmark
EPS = 1e-9                                      # fp64 through a few layers


def small(**settings):
    """A model in fp64, far from its initial weights."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=4, n_head=2, n_embd=16,
                 window=W, chunk_size=S, n_neighbors=K, groups=2)
    model = DRT(DRTConfig(**{**sizes, **settings})).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model


def random_tokens(seed=0, t=T, b=B):
    return torch.randint(V, (b, t), generator=torch.Generator().manual_seed(seed))


def batch_of(tokens, doc=None, seed=0):
    targets = F.pad(tokens[:, 1:], (0, 1), value=-1)
    doc = torch.zeros_like(tokens) if doc is None else doc
    return SimpleNamespace(tokens=tokens, targets=targets, doc=doc, seed=seed)


def changed(tokens, t):
    """The tokens with another one in place t."""
    tokens = tokens.clone()
    tokens[:, t] = (tokens[:, t] + 1) % V
    return tokens


# the definition

def mlp(module, x):
    gate, y = (x @ module.fc.weight.T).chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * y) @ module.proj.weight.T


def heads(x, weight, n):
    return (x @ weight.T).view(len(x), n, 2, 8).unbind(1)       # H = 2, D = 8


def attention(q, k, v, bias=0):
    """Of one query. q (H, D), k and v (J, H, D), bias (H, J)"""
    p = (torch.einsum('hd, jhd -> hj', q, k) / 8 ** 0.5 + bias).softmax(1)
    return torch.einsum('hj, jhd -> hd', p, v)


def self_attention(block, x, window):
    q, k, v = heads(block.norm1(x), block.attention.qkv.weight, 3)
    y, slopes = torch.zeros_like(q), torch.tensor([2 ** -4, 2 ** -8])[:, None]
    for i in range(len(x)):
        j = torch.arange(max(0, i - window + 1), i + 1)
        y[i] = attention(q[i], k[j], v[j], -slopes * (i - j))
    return y.flatten(1) @ block.attention.proj.weight.T


def rotated(x):
    """RoPE by complex numbers, x (S, H, D)"""
    angle = torch.arange(S)[:, None, None] * 10000 ** (-torch.arange(0, 8, 2).double() / 8)
    z = torch.view_as_complex(x.unflatten(2, (-1, 2)))
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(2)


def encoded(encoder, x):
    """C_k of one chunk, x (S, C)"""
    if len(encoder.blocks):
        x = encoder.norm_in(x)
    for block in encoder.blocks:
        q, k, v = heads(block.norm1(x), block.qkv.weight, 3)
        y = torch.stack([attention(q_i, rotated(k), v) for q_i in rotated(q)])
        x = x + y.flatten(1) @ block.proj.weight.T
        x = x + mlp(block.mlp, block.norm2(x))
    return encoder.norm(x)


def by_definition(model, tokens):
    """log P (T, V) of one text (T,) by the paper's equations, with loops."""
    c, ids, text = model.config, [], []
    for i, token in enumerate(tokens.tolist()):                 # a landmark after S - 1 tokens
        text.append(len(ids))
        ids += [token] + [V] * (c.groups > 0 and i % (S - 1) == S - 2)
    x = embedded = model.embedding.weight[torch.tensor(ids)]    # (L, C)
    for block in [*model.lower, *(() if c.groups else model.upper)]:
        x = x + self_attention(block, x, c.window)
        x = x + mlp(block.mlp, block.norm2(x))
    below, n_chunks = embedded if c.encoder == 'tokens' else x, c.groups and len(ids) // S
    chunks = [encoded(model.encoder, below[S * n:S * n + S]) for n in range(n_chunks)]
    for g in range(c.groups):
        reads = {}                                              # of each chunk: [(w_k, k)]
        for t in range(n_chunks):                               # Eq. 1
            h = model.landmark_norms[g](x[S * t + S - 1])
            r = [((h @ chunks[k][-1]).item() / 4, k) for k in range(t)]         # sqrt(C) = 4
            r = sorted(r, reverse=True)[:c.n_neighbors]
            total = sum(math.exp(score) for score, _ in r)
            reads[t + 1] = [(math.exp(score) / total, k) for score, k in r]
        size = len(model.upper) // c.groups
        for block in model.upper[g * size:g * size + size]:
            a = x + self_attention(block, x, c.window)
            q, = heads(block.gca.norm(a), block.gca.query.weight, 1)
            o = torch.zeros_like(q)
            for i in range(len(ids)):
                for w, k in reads.get(i // S, []):              # Eq. 2 and 3
                    kv = heads(chunks[k][:-1], model.encoder.kv.weight, 2)
                    o[i] += w * attention(q[i], *(F.pad(y, (0, 0, 0, 0, 0, c.sink)) for y in kv))
            o = o.flatten(1) @ block.gca.proj.weight.T
            x = a + mlp(block.mlp, block.norm2(a + o))
    logits = model.norm(x)[text] @ model.embedding.weight[:V].T
    return logits.log_softmax(-1)


@pytest.mark.parametrize('settings', [
    {}, dict(groups=1), dict(groups=0), dict(encoder='tokens'), dict(encoder='none'),
    dict(sink=True), dict(n_neighbors=5), dict(n_neighbors=1)], ids=str)
def test_the_model_is_the_papers(settings):
    """Landmarks, window, ALiBi, encoder, Eq. 1 to 3; groups = 0 is the base LM."""
    model, tokens = small(**settings), random_tokens()
    with torch.no_grad():                                       # angles of RoPE are in fp32: 1e-6
        expected = by_definition(model, tokens[0])
    torch.testing.assert_close(model.log_probs(tokens)[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize('settings', [
    {}, dict(encoder='tokens'), dict(encoder='none', n_neighbors=9), dict(retriever='random'),
    dict(retriever='off'), dict(groups=0)], ids=str)
def test_the_future_is_invisible(settings):
    """Changing token t changes no log P before it, bit for bit, and the one after it."""
    model, a = small(**settings), random_tokens()
    before = model.log_probs(a)
    for t in range(T):
        after = model.log_probs(changed(a, t))
        assert torch.equal(after[:, :t], before[:, :t]), t
        assert not torch.equal(after[:, t], before[:, t]), t


@pytest.mark.parametrize('groups', [1, 2])
def test_nothing_is_late(groups):
    """Chunk 0 is read from the first token after the landmark of chunk 1 on."""
    model, a = small(groups=groups, window=2, n_neighbors=9, chunk_size=8), random_tokens(t=28)
    differ = (model.log_probs(a) != model.log_probs(changed(a, 0))).any(2).any(0)
    assert differ[:5].all() and not differ[5:14].any() and differ[14:].all()    # 4 layers, window 2


def test_documents_are_respected():
    """The second, from token 16, in chunk 5, does not depend on the first, beyond the window."""
    model, a = small(window=2, n_neighbors=9), random_tokens()
    doc = (torch.arange(T) >= 16).long().expand(B, T)
    b = torch.cat([random_tokens(1)[:, :13], a[:, 13:]], dim=1)
    (f, _, reads), g = model.encode(a, doc=doc), model.encode(b, doc=doc)[0]
    assert torch.equal(f[:, 18:], g[:, 18:]) and not torch.equal(f[:, :16], g[:, :16])
    for _, idx in reads:                        # row n: what chunk n reads; none reads chunk 5
        assert set(idx[:, :6].unique().tolist()) == {-1, 0, 1, 2, 3}
        assert (idx[:, 6] == -1).all() and set(idx[:, 7:].unique().tolist()) == {-1, *range(6, 11)}
    assert model(batch_of(a, doc), 0)[0] != model(batch_of(a), 0)[0]            # in training too
    for block in model.upper:                   # without attention, tokens show what they read
        block.attention.proj.weight.data.zero_()
    f = model.encode(a, doc=doc)[0]
    model.retriever = 'off'
    same = (f == model.encode(a, doc=doc)[0]).all(2).all(0)
    assert same[:6].all() and not same[6:16].any()              # token 16 is of the second
    assert same[16:24].all() and not same[24:].any()            # chunk 8 is the first to read


# streaming

@pytest.mark.parametrize('settings', [
    {}, dict(groups=1), dict(groups=0), dict(encoder='tokens'), dict(encoder='none'),
    dict(sink=True), dict(retriever='random'), dict(retriever='off'), dict(n_neighbors=20),
    dict(offload=True)], ids=str)
def test_streaming_equals_one_pass(settings):
    """Pieces of any size: the same log P and the same chunks, bit for bit, of up to 38."""
    offload = settings.pop('offload', False)
    model, tokens = small(**settings), random_tokens(t=120)
    full = model.log_probs(tokens)
    _, _, reads = model.encode(tokens)
    model.offload = offload
    generator = torch.Generator().manual_seed(1)
    random_sizes = torch.randint(1, 30, (120,), generator=generator).tolist()
    for sizes in ([1] * 120, [3] * 40, [4] * 30, [7, 50, 1, 62], random_sizes):
        state, parts, rest = None, [], tokens
        for size in sizes:
            if rest.size(1):
                log_probs, state = model.stream(rest[:, :size], state)
                parts.append(log_probs)
                rest = rest[:, size:]
        torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=EPS)
        for (w, idx), (w_stream, idx_stream) in zip(reads, state.reads):
            assert torch.equal(idx, idx_stream)
            torch.testing.assert_close(w, w_stream)


def test_long_texts_are_streamed_in_pieces(monkeypatch):
    model, tokens = small(), random_tokens(t=120)
    full, lengths, encode = model.log_probs(tokens), [], model.encode
    monkeypatch.setattr(DRT, 'PIECE', 50)
    monkeypatch.setattr(model, 'encode', lambda x, *a: lengths.append(x.size(1)) or encode(x, *a))
    torch.testing.assert_close(model.stream(tokens)[0], full, rtol=0, atol=EPS)
    log_p = full[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(model.log_p(tokens[0]), log_p, rtol=0, atol=EPS)
    assert max(lengths) == 50 and len(lengths) == 6


def test_the_state_is_bounded():
    """§3.3: only landmarks, keys and values, and what was read, grow with the text."""
    def storages(x):
        if isinstance(x, torch.Tensor):
            return {x.data_ptr(): x.untyped_storage().nbytes()}
        items = x if isinstance(x, (list, tuple)) else []
        return {key: n for item in items for key, n in storages(item).items()}

    model, sizes = small(), []
    for t in (100, 190):
        parts = vars(model.stream(random_tokens(t=t))[1])
        sizes.append({name: sum(storages(x).values()) for name, x in parts.items()
                      if name not in ('landmarks', 'kv', 'reads')})
    assert sizes[0] == sizes[1] and sum(sizes[0].values()) < 8 * B * 16 * (2 * 4 * W + S)


def test_trace():
    """The chunks of Eq. 1 with their weights, of both groups."""
    model, tokens = small(), random_tokens(t=120)[0]
    for t in (5, 6, 50, 118):
        expected = [(w, 3 * i, 3 * i + 3) for ws, idx in model.encode(tokens[None])[2]
                    for w, i in zip(ws[0, t // 3].tolist(), idx[0, t // 3].tolist()) if i >= 0]
        found = [(w, a, b) for w, where, a, b in model.trace(tokens, t) if where is tokens]
        assert found == [pytest.approx(x) for x in sorted(expected, reverse=True)]
    model.retriever = 'off'
    assert model.trace(tokens, 50) == [] == small(groups=0).trace(tokens, 50)


def test_ways():
    model, tokens, log_probs = small(), random_tokens(), []
    for way in model.ways().values():
        model.retriever = way['retriever']
        log_probs.append(model.log_probs(tokens))
    assert list(model.ways()) == ['on', 'shuffled', 'off'] and way.keys() == {'retriever'}
    for expected, retriever in zip(log_probs, ('learned', 'random', 'off')):
        assert torch.equal(small(retriever=retriever).log_probs(tokens), expected)
    assert (log_probs[0] - log_probs[1]).abs().max() > 0.01 < (log_probs[0] - log_probs[2]).max()
    assert small(groups=0).ways() == small(retriever='off').ways() == {'off': {}}
    model.prepare_eval(None, SimpleNamespace(retriever='random', offload=True), None, None)
    assert model.offload and model.ways()['on'] == {'retriever': 'random'}


def test_gumbel_top_k_samples_from_the_softmax():
    """§3.2: without replacement, in proportion to exp(r); noise enters no weight."""
    model, n, noise = small(n_neighbors=2, groups=1, block_size=12), 6000, []
    encode = model.encode
    model.encode = lambda *args: noise.append(args[3]) or encode(*args)
    model.train()(batch_of(random_tokens(t=12, b=n // 4)), 0)               # (1, n / 4, 4, 4)
    h, landmarks = torch.randn(1, 1, 16).double(), 2 * torch.randn(1, 4, 16).double()
    scores = (h @ landmarks.mT / 4).flatten()
    w, idx = model.retrieve(h.expand(1, n, 16), landmarks, torch.ones(1, n, 4, dtype=torch.bool),
                            noise[0].view(1, n, 4))
    count = (idx[0, :, 0] * 4 + idx[0, :, 1]).long().bincount(minlength=16).view(4, 4) / n
    p = scores.softmax(0)
    expected = p[:, None] * p / (1 - p[:, None]) * (1 - torch.eye(4))
    torch.testing.assert_close(count.double(), expected, rtol=0, atol=0.03)     # over 4 sd
    torch.testing.assert_close(w, scores[idx.long()].softmax(-1))


def test_the_random_retriever_ignores_the_text():
    """A vector for each chunk's number and group, of variance 1, in any piece of any text."""
    model, other, states = small(retriever='random'), random_tokens(1), []
    retrieve = model.retrieve
    model.retrieve = lambda h, *args: states.append(h) or retrieve(h, *args)
    model.log_probs(random_tokens())
    model.stream(other[:, 20:], model.stream(other[:, :20])[1])
    a, b, a_0, _, a_1, _ = states                               # (B, 12, C) of two groups
    assert torch.equal(a[0], a[1]) and torch.equal(torch.cat([a_0, a_1], dim=1), a)
    values = torch.cat([a[0], b[0]])
    assert len(values.unique(dim=0)) == 24 and abs(values.std() - 1) < 0.1 > abs(values.mean()) / 2


@torch.no_grad()
def test_noise_is_for_training_and_comes_from_the_batch():
    model, batch = small(), batch_of(random_tokens())
    quiet = model(batch, 0)[0]
    noisy = model.train()(batch, 0)[0]
    torch.manual_seed(5)
    assert torch.equal(model(batch, 0)[0], noisy) and not torch.equal(noisy, quiet)
    batch.seed = 2
    assert not torch.equal(model(batch, 0)[0], noisy)
    model.config.gumbel = False
    assert torch.equal(model(batch, 0)[0], quiet)
    noise = torch.zeros(2, B, 12, 12)
    noise[1] = 10 * torch.randn(B, 12, 12)                      # each group has its noise
    f, g = (model.encode(batch.tokens, noise=x)[0] for x in (noise, 0 * noise))
    assert not torch.equal(f, g)


def test_the_loss_reaches_the_scores():
    """The gradient of what enters only the scores is that of finite differences."""
    model, batch = small(groups=1), batch_of(random_tokens())
    model(batch, 0)[0].backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 1e-7 for p in model.parameters())
    gain, losses = model.landmark_norms[0].gain, []
    for step in (1e-6, -2e-6):
        gain.data[7] += step
        losses.append(model(batch, 0)[0].item())
    slope = (losses[0] - losses[1]) / 2e-6
    assert slope == pytest.approx(gain.grad[7].item(), rel=1e-4, abs=1e-8)


def test_a_useful_chunk_is_scored_higher():
    """Chunk 3 reads chunks 0 and 1; a gradient step adds weight to the one that lowers the loss."""
    model, batch, losses, weights = small(groups=1), batch_of(random_tokens(t=12, b=1)), [], []
    for block in model.upper:                   # a small effect, so that the loss is linear in it
        block.gca.proj.weight.data *= 1e-3
    retrieve, gain = model.retrieve, model.landmark_norms[0].gain
    for chunk in (0, 1):
        alone = torch.ones(1, 4, 4, dtype=torch.bool)
        alone[0, 2, 1 - chunk] = False
        model.retrieve = lambda h, k, allowed, _, alone=alone: retrieve(h, k, allowed & alone, 0)
        losses.append(model(batch, 0)[0].item())
    model.retrieve = retrieve
    for _ in range(2):
        w, idx = model.encode(batch.tokens)[2][0]
        weights.append(w[0, 3][idx[0, 3] == losses.index(min(losses))].item())
        gradient, = torch.autograd.grad(model(batch, 0)[0], gain)
        gain.data -= 0.01 * gradient / gradient.norm()
    assert weights[1] > weights[0]


def test_the_loss_scores_each_target_once():
    """In slices of 256 tokens; targets are shifted before landmarks, which predict nothing."""
    model, batch = small(), batch_of(random_tokens(t=350))
    batch.targets[0, 7:21] = -1
    logits = model.encode(batch.tokens)[0] @ model.embedding.weight[:V].T
    losses = model(batch, 0)[0], F.cross_entropy(logits.mT, batch.targets, ignore_index=-1)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(x, list(model.parameters())) for x in losses))


def test_mlm():
    """§3.2: in the first half the encoder predicts masked tokens; the decoder sees them."""
    model, masks = small(encoder='tokens', mlm=0.3, gumbel=False).train(), []
    encode, batch = model.encode, batch_of(random_tokens(t=35))
    model.encode = lambda *args: masks.append(args[4]) or encode(*args)
    loss, log = model(batch, 0.49)
    masked = masks[0].view(B, 12, S)
    assert not masked[..., -1].any() and not masked[:, -1, 1:].any()        # landmarks, padding
    assert 0.15 < masked[..., :-1].float().mean() < 0.45
    ids = model.insert(F.pad(batch.tokens, (0, 1)), V).view(B, 12, S)
    chunks = model.encoder(model.embedding(ids.masked_fill(masked, V + 1)))[0]
    mlm = F.cross_entropy(chunks[masked] @ model.embedding.weight[:V].T, ids[masked])
    torch.testing.assert_close((log['mlm_loss'], loss), (mlm, log['lm_loss'] + mlm))
    model.retriever = 'off'                                     # then the decoder's input is equal
    losses = model(batch, 0.49)[1]['lm_loss'], model(batch, 0.5)[0], model.eval()(batch, 0.4)[0]
    assert max(losses) - min(losses) < EPS and masks[-1] is masks[-2] is None


def test_scores_are_fp32_under_autocast():
    model = small(n_neighbors=3).float()
    h, landmarks = torch.randn(1, 6, 16).bfloat16(), 8 * torch.randn(1, 40, 16).bfloat16()
    with torch.autocast('cpu', torch.bfloat16):
        w, idx = model.retrieve(h, landmarks, torch.ones(1, 6, 40, dtype=torch.bool), 0)
        log_probs = model.log_probs(random_tokens())
    top = (h.double() @ landmarks.double().mT).topk(3).indices
    assert w.dtype == log_probs.dtype == torch.float32 and torch.equal(idx.long(), top)


def test_initial_weights():
    """By name, so that what the base LM and DRT share is equal; GCA's last matrices are large."""
    states = []
    for groups in (0, 2):
        torch.manual_seed(0)
        states.append(DRT(DRTConfig(n_embd=96, n_layer=8, groups=groups)).state_dict())
    assert all(p.equal(states[1][name][:len(p)]) for name, p in states[0].items())
    first, second = (states[1][f'lower.{i}.mlp.fc.weight'] for i in (0, 1))
    assert not first.equal(second)
    for name, scale in (('embedding', 1), ('upper.3.gca.query', 1), ('lower.0.mlp.proj', 0.25),
                        ('encoder.blocks.1.proj', 0.25), ('upper.3.gca.proj', 1)):
        std = scale * 0.02 * (768 / 96) ** 0.5
        assert abs(states[1][name + '.weight'].std() / std - 1) < 0.05, name


@pytest.mark.parametrize('settings', [
    dict(groups=3), dict(n_layer=3), dict(window=1), dict(chunk_size=1), dict(n_embd=18),
    dict(n_neighbors=0), dict(n_inner=-5), dict(groups=-1)], ids=str)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DRTConfig(**settings)


@pytest.mark.slow
def test_random_tokens_cannot_be_predicted():
    torch.manual_seed(0)
    model = DRT(DRTConfig(vocab_size=V, n_layer=2, n_head=2, n_embd=32, window=8, chunk_size=4))
    learn(model, 150, lambda step: batch_of(torch.randint(V, (8, 60)), seed=step))
    log_probs = [model.log_p(torch.randint(V, (60,))) for _ in range(160)]
    assert -torch.cat(log_probs).mean() > math.log(V) - 0.02                # 4 standard deviations


def facts(n, generator, n_alike=0):
    """
    n texts of 17 chunks: five facts (a key, its value), four chunks of noise, then four times a key
    and, first in the next chunk, its value. A window of 8 does not reach the facts. -> tokens, the
    values where they are predicted (else -1), the facts' numbers. In the first n_alike texts all
    facts have one value.
    """
    keys = torch.rand(n, 16, generator=generator).argsort(1)[:, :5]
    values = torch.randint(16, 32, (n, 5), generator=generator)
    values[:n_alike] = values[:n_alike, :1]
    fact = torch.rand(n, 5, generator=generator).argsort(1)[:, :4]
    x = torch.randint(34, 40, (n, 17, 7), generator=generator)
    x[:, :5, :3], x[:, :5, 3:] = keys[..., None], values[..., None]
    x[:, 9::2] = keys.gather(1, fact)[..., None]
    x[:, 10::2, 0], x[:, 10::2, 1:4] = 33, values.gather(1, fact)[..., None]
    answers = torch.full_like(x, -1)
    answers[:, 10::2, 0] = values.gather(1, fact)
    return x.flatten(1), answers.flatten(1), fact


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(4))
def test_retrieval_is_learned_from_the_loss_alone(seed):
    """Of facts beyond the window, the right one is retrieved and predicted, from every seed."""
    torch.manual_seed(seed)
    model = DRT(DRTConfig(40, n_layer=2, n_embd=64, window=8, chunk_size=8, n_neighbors=2))
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def evaluate():
        tokens, answers, fact = facts(128, generator)
        right = {}
        for model.retriever in ('random', 'off', 'learned'):
            f, _, reads = model.eval().encode(tokens)
            predicted = (f @ model.embedding.weight[:40].T).argmax(2)
            right[model.retriever] = (predicted == answers)[answers >= 0].float().mean().item()
        w, idx = (x[:, 10:-1:2] for x in reads[0])
        return right, (w * (idx == fact[..., None])).sum(2).mean().item()

    before = evaluate()
    learn(model, 200, lambda step: batch_of(facts(24, generator, 12)[0], seed=step))
    right, weight = evaluate()
    assert right['learned'] > 0.9 and right['random'] < 0.4 and right['off'] < 0.2, right
    assert before[0]['learned'] < 0.2 and weight > before[1], (before, weight)
