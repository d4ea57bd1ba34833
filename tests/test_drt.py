"""drt.py against the paper's equations by loops (by_definition), and what must always hold."""
import doctest, inspect, io, math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from pytest import approx, mark

import drt
from drt import DRT, Candidates, DRTConfig, prepare_eval, setup
from helpers import (assert_causal, assert_ties, batch_of, close, learn, one_line, random_tokens,
                     rope, streamed)

V, S, W, K, T, B = 23, 4, 5, 2, 36, 2           # T: 12 chunks of 3 tokens and a landmark


def small(**settings):
    """A model in fp64, far from its initial weights"""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=4, n_head=2, n_embd=16,
                 window=W, chunk_size=S, n_neighbors=K, groups=2)
    model = DRT(DRTConfig(**sizes | settings)).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model


def tokens_of(seed=0, t=T, b=B):
    return random_tokens(b, t, seed=seed)


def positions_that_differ(a, b):
    """a, b (B, T, n) -> (T,) bool: is any number at this position different?"""
    return (a != b).any(2).any(0)


# --------------------------------------------------------------------------------------------------
# the paper, by loops over positions and chunks
def heads(x, weight, n):
    """x (J, C), weight (n C, C) -> n tensors (J, H, D), D = 8"""
    return (x @ weight.T).view(len(x), n, -1, 8).unbind(1)


def attention(q, k, v, bias=0):
    """Of one query q (H, D) to J keys k, v (J, H, D), bias (H, J) -> (H, D)"""
    scores = torch.einsum('hd, jhd -> hj', q, k) / 8 ** 0.5
    p = (scores + bias).softmax(1)
    return torch.einsum('hj, jhd -> hd', p, v)


def mlp(block, x):
    gate, y = (block.norm2(x) @ block.mlp.fc.weight.T).chunk(2, dim=-1)
    silu = gate / (1 + (-gate).exp())
    return (silu * y) @ block.mlp.proj.weight.T


def self_attention(block, x, window):
    """Position i attends to the last `window` ones, itself included, with ALiBi."""
    q, k, v = heads(block.norm1(x), block.attention.qkv.weight, 3)
    slopes = 4 * 2 ** torch.linspace(0, -10, q.size(1))[:, None]        # (H, 1)
    y = torch.zeros_like(q)
    for i in range(len(x)):
        j = torch.arange(max(0, i - window + 1), i + 1)
        y[i] = attention(q[i], k[j], v[j], -slopes * (i - j))
    return y.flatten(1) @ block.attention.proj.weight.T


def encoded(encoder, x):
    """C_k of one chunk: x (S, C) -> (S, C)"""
    if len(encoder.blocks) > 0:
        x = encoder.norm_in(x)
    for block in encoder.blocks:
        q, k, v = heads(block.norm1(x), block.qkv.weight, 3)
        q = rope(q, range(S))
        k = rope(k, range(S))
        y = torch.stack([attention(q_i, k, v) for q_i in q])
        x = x + y.flatten(1) @ block.proj.weight.T
        x = x + mlp(block, x)
    return encoder.norm(x)


def retrieved(model, h, chunks, its_chunk):
    """Eq. 1: what the landmark of `its_chunk`, with state h (C,), retrieves of chunks {k: C_k}
    -> [(w_k, k)], the largest weight first"""
    C = len(h)
    landmarks = {k: chunk[-1] for k, chunk in chunks.items()}
    if model.config.compare_means:
        landmarks = {k: chunk.mean(0) for k, chunk in chunks.items()}
        difference = its_chunk.mean(0) - sum(landmarks.values()) / max(1, len(chunks))
        h = h + difference / (difference.square().mean() + 1e-6) ** 0.5
    r = {k: (h @ l_k).item() / C ** 0.5 for k, l_k in landmarks.items()}
    best = sorted(r, key=lambda k: -round(256 * r[k]))[:model.config.n_neighbors]
    total = sum(math.exp(r[k]) for k in best)
    return [(math.exp(r[k]) / total, k) for k in best]


def cross_attention(model, block, x, chunks, retrieved_for):
    """Eq. 2 and 3. retrieved_for: of each chunk of the text, [(w_k, k)]"""
    config = model.config
    q, = heads(block.gca.norm(x), block.gca.query.weight, 1)
    o = torch.zeros_like(q)
    for i in range(len(q)):
        pairs = retrieved_for[i // S]
        if config.next_chunk:                               # also the one after it, w_k / 2 each
            pairs = [(w / 2, k + j) for w, k in pairs for j in (0, 1)]
        for w, k in pairs:
            keys, values = heads(chunks[k], model.encoder.kv.weight, 2)
            if config.shift_values:                         # a token has the value of the next
                values = values[1:]
            keys, values = keys[:S - 1], values[:S - 1]     # without the landmark's
            if config.sink:                                 # one more key and value of zeros
                keys, values = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (keys, values))
            o[i] += w * attention(q[i], keys, values)
    return o.flatten(1) @ block.gca.proj.weight.T


def lower_layers(model, tokens):
    """tokens (T,) -> states x (L, C), positions of the tokens in it, of the landmarks, and C_k"""
    config = model.config
    ids, text, landmarks = [], [], []
    for i, token in enumerate(tokens.tolist()):
        text.append(len(ids))
        ids.append(token)
        if config.groups > 0 and i % (S - 1) == S - 2:      # a landmark after S - 1 tokens
            landmarks.append(len(ids))
            ids.append(V)
    embedded = x = model.embedding.weight[torch.tensor(ids)]
    for block in model.lower:
        x = x + self_attention(block, x, config.window)
        x = x + mlp(block, x)
    below = embedded if config.encoder == 'tokens' else x
    chunks = [encoded(model.encoder, below[end + 1 - S:end + 1]) for end in landmarks]
    return x, text, landmarks, chunks


@torch.no_grad()
def by_definition(model, tokens, corpus=(), from_text=True):
    """
    One text (T,) by the paper's equations, with loops -> log P (T, V), and for each group what
    each chunk reads, [[(w_k, k)]]. Chunks of a corpus have the first numbers; with from_text=False
    only they are retrieved.
    """
    config = model.config
    x, text, landmarks, chunks = lower_layers(model, tokens)
    of_corpus = []
    if len(corpus) > 0:
        *_, of_corpus = lower_layers(model, corpus)
    M = len(of_corpus)
    every = of_corpus + chunks

    # landmark n retrieves chunks before its own; the last one of a corpus has no next chunk
    permitted = []
    for n in range(len(chunks)):
        of_text = range(M, M + n) if from_text else ()
        permitted.append([*range(M - config.next_chunk), *of_text])

    groups = []
    for j, block in enumerate(model.upper):
        if config.groups > 0 and j % (len(model.upper) // config.groups) == 0:
            h = model.landmark_norms[len(groups)](x)        # a group begins
            groups.append([[]])                             # nothing is retrieved for chunk 0
            for n, end in enumerate(landmarks):
                candidates = {k: every[k] for k in permitted[n]}
                groups[-1].append(retrieved(model, h[end], candidates, chunks[n]))
        x = x + self_attention(block, x, config.window)
        if config.groups > 0:
            x = x + cross_attention(model, block, x, every, groups[-1])
        x = x + mlp(block, x)
    logits = model.norm(x)[text] @ model.embedding.weight[:V].T
    return logits.log_softmax(-1), groups


SETTINGS = [{}, dict(groups=1), dict(groups=0), dict(encoder='tokens'),
            dict(n_encoder=0), dict(sink=False), dict(compare_means=False),
            dict(n_neighbors=1), dict(n_neighbors=20), dict(shift_values=False),
            dict(n_head=4, n_embd=32), dict(next_chunk=False)]
EVERY = SETTINGS + [dict(retriever='random'), dict(retriever='none')]


@mark.parametrize('settings', SETTINGS, ids=str)
def test_the_model_is_the_papers(settings):
    """Landmarks, window, ALiBi, encoder, Eq. 1 to 3; groups = 0 is the base LM."""
    model = small(**settings)
    tokens = tokens_of()
    expected, _ = by_definition(model, tokens[0])
    close(model.log_probs(tokens)[0], expected, atol=1e-6)              # RoPE's angles are fp32


# --------------------------------------------------------------------------------------------------
# what must always hold
@mark.parametrize('settings', EVERY, ids=str)
def test_the_future_is_invisible(settings):
    assert_causal(small(**settings), tokens_of(), exact=True)


@mark.parametrize('groups', [1, 2])
def test_nothing_is_late(groups):
    """Chunk 0 is read from the first token after the landmark of chunk 1 on."""
    model = small(groups=groups, window=2, n_neighbors=9, chunk_size=8)
    tokens = tokens_of(t=28)
    changed = (tokens + F.one_hot(torch.tensor(0), 28)) % V             # the first one
    differ = positions_that_differ(model.log_probs(tokens), model.log_probs(changed))
    assert differ[:5].all() and not differ[5:14].any()                  # 4 layers, window 2
    assert differ[14:].all(), 'the tokens after the landmark of chunk 1 do not read chunk 0'


def f_of_tokens(model, batch):
    """The states (B, T, C) from which forward predicts the targets of a batch"""
    states = []
    hook = model.norm.register_forward_hook(lambda module, inputs, f: states.append(f))
    model(batch, 0)
    hook.remove()
    ids = model.insert(batch.tokens, V)
    return states[0][:, ids[0] < V]


TWO_DOCUMENTS = (torch.arange(T) >= 16).long().expand(B, T)


def test_documents_are_respected():
    """The second, from token 16, in chunk 5, depends on the first only through the window."""
    model = small(window=2, n_neighbors=9)
    a = tokens_of()
    b = torch.cat([tokens_of(1)[:, :16], a[:, 16:]], dim=1)
    f, g = (f_of_tokens(model, batch_of(x, TWO_DOCUMENTS)) for x in (a, b))
    assert torch.equal(f[:, 21:], g[:, 21:])                            # 4 layers, window 2

    # without self-attention, tokens show that they read: those of a chunk whose landmark before is
    # of their document, and has a chunk before it
    for block in model.upper:
        block.attention.proj.weight.data.zero_()
    on = f_of_tokens(model, batch_of(a, TWO_DOCUMENTS))
    model.way = 'off'
    off = f_of_tokens(model, batch_of(a, TWO_DOCUMENTS))
    reads = positions_that_differ(on, off).tolist()
    assert reads == [False] * 6 + [True] * 10 + [False] * 8 + [True] * 12       # from chunk 8 on


@mark.parametrize('settings', EVERY, ids=str)
def test_streaming_equals_one_pass(settings, tmp_path, monkeypatch):
    """After read, which omits the upper layers of what later positions do not need, from a state
    that never changes; in pieces of any size, with --offload"""
    monkeypatch.setattr(DRT, 'PIECE', 20)
    model = small(**settings)
    tokens = tokens_of(t=120)
    full = model.log_probs(tokens)
    for n in (0, 7, 20, 85, 95):
        state = model.read(tokens[:, :n])
        model.stream(tokens[:, n:].flip(1), state)
        log_probs, _ = model.stream(tokens[:, n:], state)
        close(log_probs, full[:, n:])

    model.offload = str(tmp_path)
    sizes = [*20 * [1], *5 * [3], 31, *10 * [1], 44]
    close(streamed(model, tokens, sizes)[0], full)


@mark.parametrize('settings, n', [(dict(encoder='tokens'), 3), (dict(window=2), 24)])
def test_a_chunk_that_recurs_is_a_tie(settings, n):
    model = small(n_neighbors=3, n_embd=32, **settings).float()
    assert_ties(model, tokens_of(t=n, b=1), tokens_of(t=3, b=20))


def test_the_first_of_equal_chunks_is_chosen():
    """In evaluation, with scores that are equal when they are rounded to 1/256"""
    r = torch.tensor([[[1.0, 3.0, 3.001, 3.0, 5.0]]]).double()
    _, idx = small(n_neighbors=3).choose(r, torch.ones_like(r, dtype=torch.bool))
    assert idx.tolist() == [[[4, 1, 2]]]


def test_read_keeps_landmarks_not_all_states(monkeypatch):
    """While the upper layers do not run: then all landmarks become one tensor."""
    monkeypatch.setattr(DRT, 'PIECE', 4 * S)
    monkeypatch.setattr(DRT, 'encode_upper', lambda self, x, start, state: (None, state))
    state = small(compare_means=False).read(tokens_of(t=60 * S))
    assert len(state.l_k) > 10
    for l_k in state.l_k:
        assert l_k.untyped_storage().nbytes() == l_k.numel() * l_k.element_size()


def test_the_state_is_bounded():
    """§3.3: only landmarks, keys and values grow with the text."""
    model, sizes = small(), []
    for t in (100, 190):
        _, state = model.stream(tokens_of(t=1), model.read(tokens_of(t=t)))
        file = io.BytesIO()
        torch.save(state._replace(l_k=[], kv=[]), file)
        sizes.append(file.tell())
    assert sizes[0] == sizes[1] < 20_000


# --------------------------------------------------------------------------------------------------
# ways of retrieval
def test_ways_are_models_of_these_settings():
    model = small()
    tokens = tokens_of()
    assert model.ways() == ('on', 'shuffled', 'off')
    results = []
    for way, retriever in zip(model.ways(), ('learned', 'random', 'none')):
        model.way = way
        results.append(model.log_probs(tokens))
        assert torch.equal(results[-1], small(retriever=retriever).log_probs(tokens)), way
        assert all((x - results[-1]).abs().max() > 0.01 for x in results[:-1]), way
    for settings in (dict(groups=0), dict(retriever='none')):
        model = small(**settings)
        assert model.ways() == ('off',)
        assert model.trace(tokens[0], T - 1) == []


def test_random_queries_ignore_the_text():
    """App. A.5: many chunks are chosen, whatever the landmarks that retrieve are."""
    model = small(retriever='random')
    tokens = tokens_of(t=120)
    log_probs, state = model.stream(tokens)
    _, idx = state.chosen[0]
    assert len(idx.unique()) > 20
    vectors = model.random_query(0, torch.zeros(1, 999, 16), 999)
    assert vectors.mean().item() == approx(0, abs=0.05)
    assert vectors.std().item() == approx(1, abs=0.05)
    for norm in model.landmark_norms:
        norm.weight.data.zero_()
    assert torch.equal(model.log_probs(tokens), log_probs)


def test_random_scores_teach_nothing():
    """In training: with fixed vectors, or a gradient, chunks learn to be chosen."""
    model = small(retriever='random').train()
    x = torch.zeros(1, 9, 16, dtype=torch.float64)
    first, second = (model.random_query(0, x, 9) for _ in range(2))
    assert (first - second).abs().max() > 0.5
    l_k = torch.ones_like(x, requires_grad=True)
    permitted = torch.ones(1, 9, 9, dtype=torch.bool)
    w, _ = model.retrieve(0, x, Candidates(l_k, None, permitted, 0, None))
    assert not w.requires_grad
    model = small(retriever='learned').train()
    w, _ = model.retrieve(0, x, Candidates(l_k, None, permitted, 0, None))
    assert w.requires_grad


def prepare(model, corpus, text='text', **args):
    """prepare_eval with --retrieve-from, a text `text` and the corpus (n,)"""
    train = SimpleNamespace(tokens=corpus.numpy().astype('uint16'))
    external = SimpleNamespace(fingerprint='books', train=train)
    flags = dict(retrieve_from='books', split='val', offload='',
                 progress_bar=lambda items, desc: items) | args
    corpus = SimpleNamespace(fingerprint=text)
    prepare_eval(model, corpus, external, SimpleNamespace(**flags), '')


def test_what_a_corpus_must_be():
    """Another text than the one that is scored, two chunks long; only --retrieve-from reads it."""
    model = small()
    corpus = tokens_of(t=40)[0]
    assert 'find itself' in one_line(prepare, model, corpus, text='books', split='train')
    assert 'two chunks' in one_line(prepare, model, corpus[:2 * S - 3])
    prepare(model, corpus, retrieve_from='')
    assert 'corpus' not in model.ways()
    assert 'no such folder' in one_line(prepare, model, corpus, offload='nowhere')


CORPUS = tokens_of(1, t=40)[0]              # 13 chunks and a token


@mark.parametrize('autocast, dtype', [(False, torch.float16), (True, torch.bfloat16)])
def test_streams_keep_keys_and_values_in_16_bits(autocast, dtype, tmp_path):
    """In files, too"""
    model = small().float()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        expected, state = model.stream(tokens_of())
        model.offload = str(tmp_path)
        log_probs, offloaded = model.stream(tokens_of())
    assert state.kv[0].dtype == offloaded.kv[0].dtype == dtype
    close(log_probs, expected, 0)


@mark.parametrize('settings', [dict(n_layer=8, window=7), dict(window=2, chunk_size=16)], ids=str)
def test_read_runs_the_upper_layers_far_enough(settings, monkeypatch):
    """Four upper layers, or chunks longer than windows; pieces of one position, so that what `read`
    omits alone decides. No state is lost if it then reads nothing."""
    monkeypatch.setattr(DRT, 'PIECE', 1)
    model = small(**settings)
    tokens = tokens_of(t=130)
    state = model.read(tokens[:, 100:100], model.read(tokens[:, :100]))
    log_probs, _ = model.stream(tokens[:, 100:], state)
    close(log_probs, model.log_probs(tokens)[:, 100:])


@mark.parametrize('way', ['on', 'corpus', 'both'])
@mark.parametrize('settings', [{}, dict(n_neighbors=30), dict(encoder='tokens'),
                                      dict(next_chunk=False)], ids=str)
def test_retrieval_from_a_corpus(settings, way, monkeypatch):
    """Table 4: a corpus is a text before, outside of the window. trace has what Eq. 1 retrieves."""
    model = small(**settings)
    monkeypatch.setattr(DRT, 'PIECE', 1)            # the corpus in pieces of 16 positions
    prepare(model, CORPUS)
    monkeypatch.setattr(DRT, 'PIECE', 20)
    text = tokens_of(b=1)[0]
    assert model.ways() == ('on', 'corpus', 'both', 'shuffled', 'off')
    model.way = way
    corpus = CORPUS[:0] if way == 'on' else CORPUS
    expected, groups = by_definition(model, text, corpus, from_text=way != 'corpus')
    close(model.log_probs(text[None])[0], expected, atol=1e-6)

    n, n_corpus = S - 1, len(corpus) // (S - 1)
    for t in range(0, T, 7):
        state, of_groups = model.read(text[None, :t]), []
        for g, retrieved_for in enumerate(groups):
            rows = model.trace(text, t, state, g)
            of_groups += rows
            pairs = sorted(retrieved_for[t // n], reverse=True)
            for (weight, ids, start, end), (w, k) in zip(rows, pairs, strict=True):
                number = start // n if ids is not text else start // n + n_corpus
                assert (weight, number) == (approx(w), k), (way, t)
                assert end - start == n * (1 + model.config.next_chunk)
        assert model.trace(text, t) == sorted(of_groups, key=lambda row: -row[0])


def test_the_examples_in_docstrings():
    results = doctest.testmod(drt)
    assert results.attempted == 3
    assert results.failed == 0

    model = small()                                             # S = 4, as in DRT.insert
    tokens = torch.arange(1, 13)[None]
    state = model.read(tokens[:, :8])
    first, later = tokens.split([8, 4], 1)
    for inserted, expected in [(model.insert(first, 0), '1 2 3 0 4 5 6 0 7 8'),
                               (model.insert(later, 0, state), '9 0 10 11 12 0'),
                               (model.insert(first, None), '1 2 3 3 4 5 6 6 7 8')]:
        assert ' '.join(map(str, inserted[0].tolist())) == expected


# --------------------------------------------------------------------------------------------------
# training
def retrieve(model, x, l_k, permitted):
    return model.retrieve(0, x, Candidates(l_k, None, permitted, 0, None))


def test_gumbel_top_k_samples_from_the_softmax(n=6000):
    """§3.2: a chunk is the first in proportion to exp(r). Noise is in no weight."""
    model = small(compare_means=False, groups=1, gumbel=True, n_neighbors=2).train()
    torch.manual_seed(1)
    h = torch.ones(1, 1, 16).double()
    landmarks = torch.tensor([0.0, 0.7, 1.4, 2.1]).double()[:, None].expand(1, 4, 16) / 4
    r = (model.landmark_norms[0](h) @ landmarks.mT / 4).flatten()
    mask = torch.ones(1, n, 4, dtype=torch.bool)
    w, idx = retrieve(model, h.expand(1, n, 16), landmarks, mask)
    close(w, r[idx.long()].softmax(-1))
    first = idx[0, :, 0].bincount(minlength=4) / n
    close(first.double(), r.softmax(0), atol=0.03)                      # over 4 sd


def test_the_loss_reaches_the_scores():
    """The gradient of what enters scores, h and l, is that of finite differences."""
    model = small(groups=1)
    batch = batch_of(tokens_of())
    model(batch, 0)[0].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, f'{name} has no gradient'
        assert 1e-7 < p.grad.abs().max() < 1e9, name
    for gain in (model.landmark_norms[0].weight, model.encoder.norm.weight):
        losses = []
        for step in (1e-6, -2e-6, 1e-6):
            gain.data[7] += step
            losses.append(model(batch, 0)[0].item())
        slope = (losses[0] - losses[1]) / 2e-6
        assert slope == approx(gain.grad[7].item(), rel=1e-4, abs=1e-8)


def test_a_share_of_the_sequences_retrieves_nothing():
    """With p_off, in training; their loss is that of the way off."""
    batch = batch_of(tokens_of(b=40))
    model = small(p_off=0.5).train()
    _, _, chosen = model.encode_batch(batch.tokens, batch.doc, batch.tokens)
    weights = chosen[0][0].sum((1, 2))                                  # (40,)
    assert 10 < (weights == 0).sum() < 30
    model.config.p_off = 1.0
    loss, _ = model(batch, 0)
    model.config.p_off = 0.0
    model.way = 'off'
    close(loss, model(batch, 0)[0])

    # and not in evaluation
    model.config.p_off, model.way = 1.0, 'on'
    assert model.eval()(batch, 0)[1]['top_weight'] > 0


@mark.parametrize('kernel', ['auto', 'torch'])
def test_the_loss_scores_each_target_once(kernel):
    """In slices of 1,024 tokens; targets are shifted before landmarks, which predict nothing."""
    model = small()
    model.kernel = kernel
    batch = batch_of(tokens_of(t=1101))
    batch.targets[0, 7:21] = batch.targets[-1] = batch.doc[-1] = -1     # the last row is padding
    loss, log = model(batch, 0)
    logits = f_of_tokens(model, batch) @ model.embedding.weight[:V].T
    expected = F.cross_entropy(logits.mT, batch.targets, ignore_index=-1)
    close(loss, expected)
    weights = list(model.parameters())
    close(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights))
    _, state = model.stream(batch.tokens[:-1])
    w, _ = state.chosen[-1]
    close(log['top_weight'], w[:, 2:-1].amax(2).mean())     # chunks 0 and 1 have nothing to read

    # --kernel torch computes the definition, whatever a reader makes of it
    with mock.patch('drt.cross_entropy_reference', return_value=0 * loss + 7):
        assert (model(batch, 0)[0] == 7) == (kernel == 'torch')


@mark.parametrize('t, n_chunks', [(15, 5), (16, 6)])
def test_top_weight_is_of_each_chunk_that_reads(t, n_chunks):
    """Also of the unfinished one, if it has a token"""
    model = small()
    batch = batch_of(tokens_of(t=t))
    _, state = model.stream(batch.tokens)
    w, _ = state.chosen[-1]
    close(model(batch, 0)[1]['top_weight'], w[:, 2:n_chunks].amax(2).mean())


def test_mlm_predicts_the_tokens_that_the_encoder_does_not_see():
    """§3.2, in the first half of training; no landmark is masked."""
    model = small(encoder='tokens', mlm=0.3).train()
    batch = batch_of(tokens_of(t=35))                               # 11 chunks and two tokens
    batch.targets[0] = -1                                       # as in needles: MLM has them too
    with mock.patch.object(model, 'encode_batch', wraps=model.encode_batch) as encode:
        loss, log = model(batch, 0.49)
    call = encode.call_args
    arguments = inspect.signature(DRT.encode_batch).bind(model, *call.args, **call.kwargs).arguments
    encoder_ids = arguments['encoder_ids']
    masked = encoder_ids[:, :11 * S].view(B, 11, S) == V + 1
    assert not masked[..., -1].any()                                    # landmarks
    assert all(0.15 < share < 0.45 for share in masked[..., :-1].float().mean((1, 2)))
    ids = model.insert(batch.tokens, V)[:, :11 * S].view(B, 11, S)
    chunks, _ = model.encoder(model.embedding(ids.masked_fill(masked, V + 1)))
    mlm_loss = F.cross_entropy(chunks[masked] @ model.embedding.weight[:V].T, ids[masked])
    close(log['mlm_loss'], mlm_loss)
    close(loss, log['lm_loss'] + mlm_loss)

    # nothing is hidden from the decoder: without retrieval its loss is that of the second half
    model.way = 'off'
    _, log = model(batch, 0.49)
    second_half, _ = model(batch, 0.5)
    close(log['lm_loss'], second_half)


def test_scores_are_fp32_under_autocast():
    model = small(n_neighbors=3).float()
    mask = torch.ones(1, 6, 40, dtype=torch.bool)
    h = torch.randn(1, 6, 16).bfloat16()
    landmarks = 8 * torch.randn(1, 40, 16).bfloat16()
    with torch.autocast('cpu', torch.bfloat16):
        w, idx = retrieve(model, h, landmarks, mask)
        assert w.dtype == model.log_probs(tokens_of()).dtype == torch.float32
    h = h.double()
    landmarks = landmarks.double()
    exact_w, exact_idx = retrieve(model.double(), h, landmarks, mask)
    close(w.double(), exact_w, 1e-5)
    assert torch.equal(idx, exact_idx)

    # of equal scores the first
    _, idx = retrieve(model, h, 0 * landmarks, mask)
    assert (idx == torch.arange(3)).all()


# --------------------------------------------------------------------------------------------------
# configurations and initial weights
def test_initial_weights():
    """GCA begins by copying what followed a similar token, h begins at 0."""
    torch.manual_seed(0)
    weights = DRT(DRTConfig(n_embd=96, n_layer=8, groups=2)).state_dict()
    assert not weights['landmark_norms.0.weight'].any()
    k, v = weights['encoder.kv.weight'].chunk(2)
    assert weights['upper.3.gca.query.weight'].equal(k)                 # W_Q = W_K
    assert weights['upper.3.gca.proj.weight'].equal(v.T)                # W_O = W_Vᵀ
    for name, scale in (('embedding', 1), ('encoder.kv', 1), ('lower.0.mlp.proj', 0.25)):
        std = scale * 0.02 * (768 / 96) ** 0.5
        assert weights[name + '.weight'].std().item() == approx(std, rel=0.05), name


@mark.parametrize('groups, end, warns', [(1, 14, True), (1, 15, False), (0, 14, False)])
def test_documents_too_short_for_retrieval(groups, end, warns, capsys):
    """Two chunks of three tokens precede a token that reads the first, and the target of this one.
    """
    split = SimpleNamespace(offsets=np.array([0, 6, end - 1, end]))
    corpus = SimpleNamespace(train=split, hops=0)
    setup(small(groups=groups), SimpleNamespace(corpus=corpus))
    assert ('nothing can be retrieved' in capsys.readouterr().out) == warns


# --------------------------------------------------------------------------------------------------
# learning
def facts(n, generator, n_alike=0):
    """n texts of 17 chunks: five facts (a key, its value), four of noise, four times a key and,
    first in the next chunk, its value. A window of 8 does not reach the facts. -> tokens, the
    values where they are predicted, else -1. Facts of the first n_alike texts have one value."""
    keys = torch.rand(n, 16, generator=generator).argsort(1)[:, :5]
    values = torch.randint(16, 32, (n, 5), generator=generator)
    values[:n_alike] = values[:n_alike, :1]
    chosen = torch.rand(n, 5, generator=generator).argsort(1)[:, :4]    # facts that are recalled
    recalled = values.gather(1, chosen)
    x = torch.randint(34, 40, (n, 17, 7), generator=generator)          # noise
    answers = torch.full_like(x, -1)
    x[:, :5, :3] = keys[..., None]
    x[:, :5, 3:] = values[..., None]
    x[:, 9::2] = keys.gather(1, chosen)[..., None]
    x[:, 10::2, 0] = 33                                                 # "the value is"
    x[:, 10::2, 1:4] = recalled[..., None]
    answers[:, 10::2, 0] = recalled
    return x.flatten(1), answers.flatten(1)


@mark.slow
@mark.parametrize('seed', range(4))
def test_retrieval_is_learned_from_the_loss_alone(seed):
    """Of facts beyond the window, the right one is retrieved and predicted, from every seed."""
    torch.manual_seed(seed)
    model = DRT(DRTConfig(40, n_layer=2, n_embd=64, window=8, chunk_size=8, n_neighbors=2))
    generator = torch.Generator().manual_seed(0)

    def make_batch(step):
        tokens, _ = facts(24, generator, n_alike=12)
        return batch_of(tokens, seed=step)
    learn(model, 200, make_batch)

    tokens, answers = facts(128, generator)
    right = {}
    for way in model.ways():
        model.way = way
        predicted = model.log_probs(tokens).argmax(2)
        right[way] = (predicted == answers)[answers >= 0].float().mean().item()
    assert right['on'] > 0.9 and right['shuffled'] < 0.4 and right['off'] < 0.2, right


def test_the_slopes_of_alibi():
    """From `slope` to 2^-8"""
    attention = small(slope=0.5, n_head=4, n_embd=32).lower[0].attention
    close(attention.slopes('cpu').flatten().log2(), torch.linspace(-1, -8, 4), 1e-6)


def test_initial_weights_of_the_paper():
    """Without what we change: norms of 1, random W_Q and W_O, the latter not divided"""
    torch.manual_seed(0)
    weights = DRT(DRTConfig(n_embd=96, n_layer=8, copy_start=False, compare_means=False))
    weights = weights.state_dict()
    assert (weights['landmark_norms.0.weight'] == 1).all()
    k, _ = weights['encoder.kv.weight'].chunk(2)
    assert not weights['upper.3.gca.query.weight'].equal(k)
    std = weights['upper.3.gca.proj.weight'].std().item()
    assert std == approx(0.02 * (768 / 96) ** 0.5, rel=0.05)


def test_padding_is_not_masked_for_mlm():
    model = small(encoder='tokens', mlm=1.0)
    docs = torch.tensor([[0, 0, 0, 0, -1, -1, -1, -1]])
    masked = model.masked_for_mlm(torch.tensor([[1, 2, 3, V, 0, 0, 0, V]]), docs)
    assert masked.tolist() == [[True] * 3 + [False] * 5]
