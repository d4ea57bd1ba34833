"""TRIME against its definitions, by loops in fp64."""
import itertools, math, platform, re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pytest import approx, fixture, mark, raises

import trime
from data import Pairs, Split, new_folder
from helpers import assert_causal, batch_of, close, learn, log_p, one_line, random_tokens
from trime import TRIME, Datastore, EvalConfig, LinearInference, TRIMEConfig, TrimeInference

V, T, B, C = 23, 8, 4, 16
ADAPTIVE = dict(cutoffs='6,14,99', div_value=2)     # clusters of 6, 8, 9 ids and 16, 8, 4 numbers
FAISS = 1e-4                                        # it computes in fp32


# --------------------------------------------------------------------------------------------------
# models and texts
def small(memory='local', Model=TRIME, Config=TRIMEConfig, **settings):
    """A model in fp64, far from its initial weights; all gains are 1."""
    sizes = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=2, n_head=2, n_embd=C,
                 stride=3, ce_warmup=0.0)
    torch.manual_seed(0)
    model = Model(Config(memory=memory, **sizes | settings)).double()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data += 0.3 * torch.randn_like(weight)
        else:
            weight.data.fill_(1.0)
    return model


def random_batch(seed=0):
    """Documents of 11 tokens end within segments of 8, whose last tokens have no target."""
    doc = torch.arange(B * T).view(B, T) // 11
    return batch_of(random_tokens(B, T), doc, seed)


def no_progress(items, *_, **__):
    return items


@mark.parametrize('n_past', [0, 3])
def test_attention_in_bf16(n_past):
    """On a CPU bf16 has its own formula, with the mask."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 2, 8).double()
    exact = trime.causal_attention(q, k, v)[:, n_past:]
    q, k, v = (x.bfloat16() for x in (q, k, v))
    close(trime.causal_attention(q[:, n_past:], k, v).double(), exact, 0.05)


# --------------------------------------------------------------------------------------------------
# training
def word_vectors(embedding):
    """Of the words of the head, then of each cluster, by its projection"""
    tables = getattr(embedding, 'tables', [])
    head = embedding.weight
    vectors = [head[:len(head) - len(tables)]]
    for table, proj in zip(tables, getattr(embedding, 'tail_proj', [])):
        vectors.append(table @ proj.weight.T)
    return vectors


def word_logits(embedding, f):
    """Eq. 1; with clusters, log of P_head(w) or P_head(cluster) P_cluster(w), times the sum."""
    words, *clusters = word_vectors(embedding)
    rows = embedding.weight[len(words):]
    logits = [f @ words.T]
    for row, vectors in zip(rows, clusters):
        logits.append((f @ row)[:, None] + (f @ vectors.T).log_softmax(1))
    return torch.cat(logits, 1)


def has_memory(mode, i, j, doc, local=True, same_document=True, n_consecutive=0, **_):
    """Eq. 2, Eq. 3 for groups of m segments, §4.3: whether query i has memory j."""
    if i // T == j // T:
        return mode != 'none' and local and j < i
    if mode == 'ext':
        return not same_document or doc[i] != doc[j]
    m = n_consecutive or B
    same_group = i // T // m == j // T // m
    fits = not same_document or doc[i] == doc[j]
    return mode == 'long' and j < i and same_group and fits


def eq5(model, batch, mode, **settings):
    """Eq. 5 by loops over queries i and memories j, for autograd -> the loss, the probability on
    memories, the loss without memories, each a mean over the queries with a target"""
    f, g, _ = model.encode(batch.tokens)
    f, g, targets = (x.flatten(0, 1) for x in (f, g, batch.targets))
    doc = batch.doc.flatten().tolist()
    key = g if model.config.memory_grad else g.detach()
    logits = word_logits(model.embedding, f)
    rows = []
    for i, w in enumerate(targets.tolist()):
        if w < 0:
            continue
        of_words = logits[i].exp().sum()                                # all terms of words
        of_w = logits[i, w].exp()                                       # the term of w
        of_memories = of_w_in_memory = 0.0
        for j, x_j in enumerate(targets.tolist()):
            if x_j >= 0 and has_memory(mode, i, j, doc, **settings):
                term = (g[i] @ key[j] / C ** 0.5).exp()
                of_memories = of_memories + term
                if x_j == w:
                    of_w_in_memory = of_w_in_memory + term
        total = of_words + of_memories
        loss = (total / (of_w + of_w_in_memory)).log()
        rows.append([loss, of_memories / total, (of_words / of_w).log()])
    return [torch.stack([torch.as_tensor(x) for x in column]).mean() for column in zip(*rows)]


@mark.parametrize('training', [True, False])
@mark.parametrize('sizes, kernel, block', [
    ({}, 'auto', 512), (ADAPTIVE, 'auto', 5), (ADAPTIVE, 'torch', 5)])  # blocks end within segments
@mark.parametrize('mode, settings', [
    ('none', {}),
    ('local', {}),
    ('local', dict(memory_grad=False)),
    ('long', {}),
    ('long', dict(n_consecutive=2)),
    ('long', dict(n_consecutive=3, same_document=False)),
    ('ext', dict(p=0.0)),
    ('ext', dict(p=1.0)),
    ('ext', dict(p=1.0, same_document=False))])
def test_forward_is_eq5(mode, settings, sizes, kernel, block, training, monkeypatch):
    """The loss and its gradient, by blocks and by trime_loss_reference. In eval mode ext is causal:
    it has local memory alone, or none."""
    monkeypatch.setattr(trime, 'BLOCK', block)
    model = small(mode, **settings, **sizes).train(training)
    model.kernel = kernel
    batch = random_batch()
    local = settings.get('p') != 1.0
    if mode == 'ext' and not training:
        mode, local = 'local' if local else 'none', True
    loss, log = model(batch, 1.0)
    expected, memory_prob, word_loss = eq5(model, batch, mode, local=local, **settings)
    assert abs(loss - expected) < 1e-9, (
        f'memory {mode}: the loss is {loss:.4f}, by Eq. 5 it is {expected:.4f}. If it is too low, '
        'a query has a memory that holds its answer; that of query i is memory i')
    close(log['memory_prob'], memory_prob.detach())
    close(log['loss_without_memory'], word_loss.detach())

    names, weights = zip(*model.named_parameters())
    gradients = torch.autograd.grad(3 * loss, weights)
    by_autograd = torch.autograd.grad(3 * expected, weights)
    for name, x, y in zip(names, gradients, by_autograd):
        assert torch.allclose(x, y, atol=1e-9), name
        assert y.abs().max() > 0, name


@mark.parametrize('memory, p, local', [
    ('none', 0.9, False), ('local', 0.9, True), ('long', 0.9, True), ('ext', 0.9, True),
    ('ext', 1.0, False)])
def test_a_model_has_the_local_memory_of_its_training(memory, p, local):
    """Before prepare_eval: for a notebook"""
    assert small(memory, p=p).inference.local == local


@mark.parametrize('memory', ['local', 'long', 'ext'])
def test_the_first_steps_are_without_memory(memory):
    """§5.2: 5% of the steps"""
    model = small(memory, ce_warmup=0.05)
    batch = random_batch()
    loss, log = model(batch, 0.049)
    close(loss, log['loss_without_memory'])
    _, log = model(batch, 0.05)
    assert log['memory_prob'] > 0


def test_extreme_similarities():
    """fp32 has neither e^200 nor e^-110, by which similarities differ here."""
    model = small('long')
    model.blocks[-1].norm2.weight.data *= 12
    batch = batch_of(random_tokens(B, T, vocab=5))
    expected, memory_prob, _ = eq5(model, batch, 'long')
    by_autograd, = torch.autograd.grad(expected, model.embedding.weight)
    loss, log = model.float()(batch, 1.0)
    gradient, = torch.autograd.grad(loss, model.embedding.weight)
    assert loss > 50
    close(loss.double(), expected, 5e-4)
    close(log['memory_prob'].double(), memory_prob, 1e-4)
    close(gradient.double(), by_autograd, 1e-3 * by_autograd.abs().max().item())


@mark.parametrize('sizes', [{}, ADAPTIVE])
@mark.parametrize('kernel', ['auto', 'torch'])
def test_the_loss_is_fp32_under_autocast(kernel, sizes):
    """Of states in bf16 it has no other rounding than without autocast, nor have gradients."""
    model = small('long', **sizes).float()
    model.kernel = kernel
    batch = random_batch()
    f, g, _ = model.encode(batch.tokens)
    f = f.detach().bfloat16()
    g = g.detach().bfloat16()
    model.encode = lambda tokens: (f, g, None)

    weights = [*model.embedding.parameters()]
    results = []
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            loss, log = model(batch, 1.0)
        results.append([loss, *log.values(), *torch.autograd.grad(loss, weights)])
    for expected, x in zip(*results):
        assert torch.equal(x, expected)


@mark.parametrize('sizes', [{}, ADAPTIVE])
def test_the_embedding(sizes):
    embedding = small(**sizes).embedding
    close(embedding(torch.arange(V)[None])[0], torch.cat(word_vectors(embedding)))


def test_initial_weights():
    """Of a width of 128: 0.02 sqrt(768 / 128) = 0.049. What layers add is divided by
    sqrt(2 n_layer); W_aᵀ of the adaptive embedding keeps the norm of f."""
    torch.manual_seed(0)
    cutoffs = dict(cutoffs='1000', div_value=2)
    weights = TRIME(TRIMEConfig(3000, T, n_layer=8, **cutoffs)).state_dict()
    for name, std in (('blocks.0.attention.qkv', 0.049), ('blocks.7.mlp.proj', 0.049 / 4),
                      ('blocks.3.attention.proj', 0.049 / 4), ('embedding.tail_proj.0', 1 / 8)):
        assert weights[name + '.weight'].std().item() == approx(std, rel=0.05), name


def test_f_and_g():
    """§3: g is the input of the last MLP. With memory ext similarities are at most 1 at first."""
    model = small(n_layer=1)
    tokens = random_tokens(2, T)
    block, x = model.blocks[0], model.embedding(tokens)
    y, _ = block.attention(block.norm1(x), None)
    f, g, _ = model.encode(tokens)
    assert torch.equal(g, block.norm2(x + y))
    assert torch.equal(f, model.norm(x + y + block.mlp(g)))
    _, g, _ = TRIME(TRIMEConfig(V, T, memory='ext')).encode(tokens)
    close(g.norm(dim=2), torch.full((2, T), 128 ** 0.25), 0.05)


def losses(model, seeds):
    return [model(random_batch(seed), 1.0)[0].item() for seed in seeds]


def test_local_memory_is_disabled_at_random():
    """§4.3: in 0.9 of the micro-batches of ext, all tokens of one alike, by its seed"""
    [off], [on] = (losses(small('ext', p=p), [0]) for p in (1.0, 0.0))
    mixed = losses(small('ext'), range(300))
    assert mixed[:30] == losses(small('ext'), range(30))
    assert {*mixed} == {off, on}
    standard_error = (0.9 * 0.1 / 300) ** 0.5
    assert abs(mixed.count(off) / 300 - 0.9) < 4 * standard_error


# --------------------------------------------------------------------------------------------------
# evaluation
INFERENCES = dict(
    off=TrimeInference(),
    local=TrimeInference(True, tau=1.3),
    long=TrimeInference(True, 10, tau=0.8),
    ext=TrimeInference(n_neighbors=6),
    all=TrimeInference(True, 10, 6, tau=1.2, tau_ext=0.5, lam_ext=0.4),
    cache=LinearInference(True, 10, tau=0.7, lam=0.3),
    knn_lm=LinearInference(True, 0, 6, tau=0.7, lam=0.3, tau_ext=2.0, lam_ext=0.25))
TOKENS = random_tokens(6 * T + 3)
TEXT = random_tokens(2001, seed=9).numpy().astype(np.uint16)        # of the datastore


def window_start(t, stride):
    """App. D: the window of t starts at 0, or at the first multiple of the stride after t - T."""
    start = max(0, t + 1 - T)
    return start + -start % stride


def contexts(model, tokens):
    for t in range(len(tokens)):
        start = window_start(t, model.config.stride)
        f, g, _ = model.encode(tokens[None, start:t + 1])
        yield start, f[0], g[0]


def keys_of(model, tokens):
    """The last g of each of `contexts` (n, C), windows of one length at once"""
    t = torch.arange(len(tokens))
    length = torch.tensor([i + 1 - window_start(i, model.config.stride) for i in t.tolist()])
    keys = torch.empty(len(tokens), C, dtype=torch.float64)
    for n in length.unique().tolist():
        windows = t[length == n, None] + torch.arange(1 - n, 1)             # (windows, n)
        keys[length == n] = model.encode(tokens[windows])[1][:, -1]
    return keys


def memories_of_each(model, tokens):
    """For each token E_w · f (V,), then (similarity, value, j) of memories of the text, of TEXT"""
    x, new, first = model.inference, [], 0
    if model.eval_memory.tab >= 0:                                              # source TAB target
        first = tokens.tolist().index(model.eval_memory.tab)
    for t, (start, f, g) in enumerate(contexts(model, tokens)):
        new.append(g[-1])                                           # g as it was when t was new
        past, ext = [], []
        if x.local:
            for j in range(max(first, start - x.long), t):
                key = new[j] if j < start else g[j - start]
                past.append((g[-1] @ key, tokens[j + 1], j))
        if x.n_neighbors:
            sims = model.keys @ g[-1]
            if isinstance(x, LinearInference):
                sims = -(model.keys - g[-1]).pow(2).sum(1) / 2
            for j in sims.topk(x.n_neighbors).indices.tolist():
                ext.append((sims[j], TEXT[j + 1], j))
        yield word_logits(model.embedding, f[-1:])[0], past, ext


def terms(memories, tau):
    """Σ exp(sim / tau) of the memories of each word"""
    total = torch.zeros(V).double()
    for sim, value, _ in memories:
        total[int(value)] += (sim / C ** 0.5 / tau).exp()
    return total


def equations_6_to_9(x, logits, past, ext):
    """P (V,) with the constants of an Inference x"""
    P = logits.exp()                                                # Eq. 1
    if isinstance(x, LinearInference):                              # continuous cache, kNN-LM
        parts = [(past, x.tau, x.lam), (ext, x.tau_ext, x.lam_ext)]
    else:
        P += terms(past + ext, x.tau)                               # Eq. 6
        parts = [(past + ext, x.tau_ext, x.lam_ext)]
    P /= P.sum()
    for memories, tau, lam in parts:
        if memories and lam > 0:
            P_memory = terms(memories, tau)                         # Eq. 8
            P = (1 - lam) * P + lam * P_memory / P_memory.sum()     # Eq. 9
    return P


@fixture(scope='module')
@torch.no_grad()
def stores(tmp_path_factory):
    """A datastore of 2,000 entries in 2 lists, built of three shards, moved, then opened twice"""
    folder = tmp_path_factory.mktemp('store')

    def store(name, memory, progress_bar=None):
        model = small(memory, **ADAPTIVE)
        return Datastore(folder / name, model, TEXT, dict(checkpoint=''), 16, new_folder,
                         progress_bar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Datastore, 'SHARD', 800 * (2 * C + 8))
        store('a', 'local', no_progress)
    (folder / 'a').rename(folder / 'b')
    model = small(**ADAPTIVE)
    text = torch.from_numpy(TEXT[:-1].astype(int))
    keys = keys_of(model, text)
    for key, (_, _, g) in zip(keys, contexts(model, text[:40])):
        close(key, g[-1])
    keys = keys.half().double()
    return SimpleNamespace(inner=store('b', 'local'), l2=store('b', 'none'), keys=keys)


def with_memories(name, stores, stride=3):
    model = small(stride=stride, **ADAPTIVE).eval()
    model.keys = stores.keys
    memory = model.eval_memory
    memory.inference = INFERENCES[name]
    memory.store = stores.inner
    if isinstance(memory.inference, LinearInference):
        memory.store = stores.l2
    return model


def probabilities(model, tokens):
    """P (n, V) of what follows each of the tokens (n,)"""
    return model.log_probs(tokens[None])[0].exp()


EACH = mark.parametrize('name', INFERENCES)
STRIDES = mark.parametrize('stride', [3, T])


N_SOURCE = mark.parametrize('n_source', [0, T + 3])


def a_pair(model, n_source):
    """51 tokens: n_source, TAB, the target; of no pair if n_source is 0"""
    tokens = random_tokens(51, vocab=V - 1)
    if n_source:
        model.eval_memory.tab = tokens[n_source] = V - 1
    return tokens


@N_SOURCE
@STRIDES
@EACH
@torch.no_grad()
def test_probabilities_at_test_time(name, stride, n_source, stores):
    """Several windows, each token in memory once; the source of a pair is no memory, also when the
    state does not have the TAB any more."""
    model = with_memories(name, stores, stride)
    tokens = a_pair(model, n_source)
    P = probabilities(model, tokens)
    atol = FAISS if model.inference.n_neighbors else 1e-7           # λ is fp32
    each = zip(P, memories_of_each(model, tokens), strict=True)
    for p, memories in [*each][n_source:]:
        close(p, equations_6_to_9(model.inference, *memories), atol)


@mark.parametrize('cuts', ['0' + 51 * ' 1', '5 1 16 3 26', '8 2 41', '19 32'])
@STRIDES
@EACH
def test_streaming_equals_log_probs(name, stride, cuts, stores):
    """Read, then stream, in any pieces; the state does not grow."""
    model = with_memories(name, stores, stride)
    first, *pieces = TOKENS[None].split([*map(int, cuts.split())], 1)
    state, parts, sizes = model.read(first), [], []
    for piece in pieces:
        part, state = model.stream(piece, state)
        parts.append(part)
        sizes.append(state.keys.numel())
    P = probabilities(model, TOKENS)[first.size(1):]
    close(torch.cat(parts, 1)[0].exp(), P, FAISS)
    assert max(sizes) == max(sizes[:4 * T])


@N_SOURCE
@EACH
def test_what_sizes_are_tuned_on(name, n_source, stores):
    """Every token, of a pair those of the target, with more memories than are used."""
    model = with_memories(name, stores)
    tokens, x = a_pair(model, n_source), model.inference
    split = Split('val', tokens.numpy(), [0, 51])
    windows = trime.collect(model, split, 51, no_progress)
    x = replace(x, long=x.long // 3, n_neighbors=x.n_neighbors // 3)
    scored = torch.cat([x.log_p(window) for window in windows])

    model.eval_memory.inference = x
    close(scored[:, 0], log_p(model, tokens)[n_source:], FAISS)


@mark.parametrize('length', [3, 5, 11, 17])
def test_queries_of_all_positions(length):
    """Also where each 4th token would be the first of a document, which alone has no memory"""
    split = Split('val', random_tokens(1200).numpy(), [*range(0, 1200, length)])
    windows = trime.collect(small(), split, 300, no_progress)
    has_memory = torch.cat([(window.sim > trime.MASKED).any(1) for window in windows])
    assert 150 < len(has_memory) < 330
    share = has_memory.double().mean().item()
    assert share == approx(1 - 1 / (length - 1), rel=0.15)


@N_SOURCE
@mark.parametrize('way', ['on', 'shuffled'])
@EACH
def test_causality(name, way, n_source, stores):
    model = with_memories(name, stores)
    model.way = way
    assert_causal(model, a_pair(model, n_source)[None, :3 * T])


WITH_MEMORIES = mark.parametrize('name', ['long', 'ext', 'all', 'cache', 'knn_lm'])


def test_trace_has_the_hundred_most_probable():
    torch.manual_seed(0)
    model = TRIME(TRIMEConfig(V, block_size=150, n_layer=1, n_head=2, n_embd=16)).eval()
    tokens = random_tokens(1, 150)[0]
    f, g, state = next(model.windows(tokens[None, :149]))
    _, log_words = model.embedding.logits(f[0, -1:])
    sim = model.memories(g, state).sim[-1:]
    P, _ = model.inference.probabilities(log_words, sim)
    best = P[0].sort(descending=True, stable=True).indices[:100]
    assert [row.end - 2 for row in model.trace(tokens, 148)] == best.tolist()


@WITH_MEMORIES
@mark.parametrize('t', [1, T - 1, T, 3 * T])
def test_trace(name, t, stores):
    """P is that of the memories and, by Eq. 1, of words; the same after `read`."""
    model = with_memories(name, stores)
    rows = model.trace(TOKENS, t)
    P = torch.zeros(V).double()
    for weight, ids, _, end in rows:
        P[ids[end - 1]] += weight
    words = probabilities(with_memories('off', stores), TOKENS)
    P += (1 - P.sum()) * words[t]
    close(P, probabilities(model, TOKENS)[t], FAISS)

    # which they are, the most probable first
    _, past, ext = [*memories_of_each(model, TOKENS[:t + 2])][t]
    expected = {(True, j) for *_, j in past} | {(False, j) for *_, j in ext}
    assert expected == {(ids is TOKENS, end - 2) for _, ids, _, end in rows}
    assert all(start == max(0, end - 13) for *_, start, end in rows)    # 12 tokens of c_j, then x_j
    assert rows == sorted(rows, key=lambda row: -row[0])
    state = model.read(TOKENS[None, :t])
    model.read = None                                               # it is not read again
    assert rows == model.trace(TOKENS, t, state)


@WITH_MEMORIES
def test_shuffled_memories_have_other_values(name, stores):
    """The words have the same part of P, and so have all memories together."""
    model = with_memories(name, stores)
    off = probabilities(with_memories('off', stores), TOKENS)[-1]
    of_memories = sum(row[0] for row in model.trace(TOKENS, len(TOKENS) - 1))
    P = probabilities(model, TOKENS)[-1]
    model.way = 'shuffled'
    shuffled = probabilities(model, TOKENS)[-1]
    assert not torch.allclose(shuffled, P, atol=0.01)
    rest = shuffled - (1 - of_memories) * off
    assert rest.min() > -FAISS
    assert rest.sum().item() == approx(of_memories)


# --------------------------------------------------------------------------------------------------
# the datastore
@fixture
def build(tmp_path, monkeypatch):
    """A function that opens a store of 94 entries, or builds it of three shards"""
    monkeypatch.setattr(Datastore, 'SHARD', 40 * (2 * C + 8))

    def build(progress_bar=no_progress, checkpoint='weights'):
        about = dict(checkpoint=checkpoint)
        text = TEXT[:95]
        return Datastore(tmp_path, small(), text, about, 16, new_folder, progress_bar)
    return build


@mark.parametrize('stop', [0, 12, 30])
def test_an_interrupted_build_begins_again(stop, build, tmp_path):
    """After some windows, or all 30 of them"""
    def interrupted(windows, *_):
        yield from itertools.islice(windows, stop)
        raise KeyboardInterrupt

    with raises(KeyboardInterrupt):
        build(interrupted)
    assert [*tmp_path.parent.glob('*.tmp')] == []
    killed = tmp_path.with_name('datastore.0123abcd.tmp')           # as of a kill; of no process
    killed.mkdir()
    (killed / 'lock').write_text(platform.node())
    assert build().index.ntotal == 94
    assert len([*tmp_path.iterdir()]) == 3 and not killed.exists()  # no shard or lock is left
    assert 'delete it' in one_line(build, checkpoint='other weights')


@torch.no_grad()
def test_a_search_for_more_than_all_entries(build):
    """It returns the 94, once each, the most similar first; then none."""
    text = torch.from_numpy(TEXT[None, :94].astype('int64'))
    _, keys, _ = small().encode(text)
    query = keys[0, :5]
    sim, entries = build().search(query, 97)
    assert (sim[:, 94:] < 0.99 * trime.MASKED).all()
    assert (entries[:, 94:] == -1).all()
    assert all(sorted(row) == [*range(94)] for row in entries[:, :94].tolist())
    assert (sim.diff() <= 0).all()


@torch.no_grad()
def test_the_datastore_of_pairs_has_their_targets(tmp_path):
    """Each of 20 pairs is encoded alone; the entries of its 8 tokens are from TAB, the fourth, to
    the last but one."""
    tokens = random_tokens(20, 8, vocab=V - 1)
    tokens[:, 3] = V - 1
    split = Split('train', tokens.flatten().numpy(), np.arange(0, 161, 8))
    pairs = Pairs(split, V - 1, 'documents', T, B, seed=0)
    model = small()
    store = Datastore(tmp_path, model, split.tokens, dict(checkpoint=''), 0, new_folder,
                      no_progress, pairs)
    _, g, _ = model.encode(tokens[:, :-1])
    sim, entries = store.search(g[0, 5:6], store.index.ntotal)
    entries, order = entries[0].sort()
    assert torch.equal(entries, torch.arange(160).view(20, 8)[:, 3:7].flatten())
    expected = g[:, 3:] @ g[0, 5] / C ** 0.5                        # of keys that are not fp16
    close(sim[0, order], expected.flatten(), 0.02)

    # values of other entries would be tokens of sources, too
    model.eval_memory.store = store
    model.eval_memory.inference = INFERENCES['ext']
    assert model.ways() == ('on', 'off')


@mark.parametrize('name', ['about.json', 'keys.faiss', 'keys.ivfdata'])
@mark.parametrize('change', [lambda x: b'[]', lambda x: x[:-1], lambda x: b'\xff'])
def test_a_bad_file_is_made_again(name, change, build, tmp_path, capsys):
    """Without a check a search in a short keys.ivfdata ends the process (SIGBUS)."""
    build()
    file = tmp_path / name
    content = file.read_bytes()
    file.write_bytes(change(content))
    build()
    assert 'is damaged' in capsys.readouterr().out
    # keys.faiss has the name of the temporary folder, of which eight digits are random
    before, after = (re.sub(rb'[0-9a-f]{8}[.]tmp', b'', x) for x in (content, file.read_bytes()))
    assert before == after


def test_what_faiss_prints_is_no_result(build, capfd):
    """It prints in C, when a store is built and when it is opened."""
    for word in 'resizing', 'IO_FLAG_ONDISK_SAME_DIR':
        build()
        out, err = capfd.readouterr()
        assert word in err and word not in out


@mark.parametrize('name', ['keys.faiss', 'keys.ivfdata'])
def test_a_missing_file_is_made_again(name, build, tmp_path, capsys):
    build()
    (tmp_path / name).unlink()
    build()
    assert 'is damaged' in capsys.readouterr().out
    assert (tmp_path / name).exists()


@mark.parametrize('error', [
    OSError(24, 'Too many open files'), MemoryError(),
    RuntimeError('Error: mmapped_ptr != MAP_FAILED: could not mmap a/keys.faiss'),
    RuntimeError('Error: could not open a/keys.faiss for reading: Too many open files')])
def test_a_store_that_cannot_be_opened_now_is_kept(error, build, tmp_path, monkeypatch):
    import faiss
    build()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(faiss, 'read_index', Mock(side_effect=error))
        assert 'cannot be opened' in one_line(build)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Datastore, 'build', Mock(side_effect=AssertionError))
        build()


# --------------------------------------------------------------------------------------------------
# prepare_eval
def phrases(name, seed):
    """Documents of phrases, each one of 3 phrases of 6 words; the last document is empty."""
    order = random_tokens(48, seed=seed, vocab=3)
    tokens = random_tokens(3, 6)[order].flatten().numpy().astype(np.uint16)
    return SimpleNamespace(name=name, tokens=tokens, offsets=[0, 96, 192, 288, 288])


CORPUS = SimpleNamespace(folder=Path('a'), fingerprint='1', train=phrases('train', 0),
                         val=phrases('val', 1), test=None, tab=-1,
                         tuning_split=lambda scored: CORPUS.val)
DOCUMENTS = torch.from_numpy(CORPUS.val.tokens.astype(int)).split(96)


def prepared(trained, folder, external=CORPUS, **flags):
    """A model trained with a memory, after prepare_eval with these flags"""
    defaults = vars(EvalConfig()) | dict(split='val', retrieve_from='', long=60,
                                         new_folder=new_folder, progress_bar=no_progress)
    args = SimpleNamespace(**defaults | flags)
    model = small(trained, block_size=16, stride=8).eval()
    (folder / 'best.pt').write_bytes(b'a')
    trime.prepare_eval(model, CORPUS, external, args, folder / 'best.pt')
    return model


@fixture
def few_values(monkeypatch):
    """For tests that do not check constants: `tune` tries few of them."""
    monkeypatch.setattr(trime, 'TAUS', [0.3, 1.0])
    monkeypatch.setattr(trime, 'LAMBDAS', [0.0, 0.25])


def perplexity(model, way='on'):
    model.way = way
    log_probs = torch.cat([log_p(model, tokens) for tokens in DOCUMENTS])
    return math.exp(-log_probs.mean())


@mark.parametrize('trained, names', [
    ('local', ''), ('long', ''), ('none', 'local,long'), ('none', 'ext'), ('ext', 'local,ext'),
    ('ext', '')])
def test_tuning(trained, names, tmp_path, capsys, monkeypatch):
    """On val tuned temperatures are better than others, memories than shuffled ones and none."""
    monkeypatch.setattr(trime, 'TAUS', trime.TAUS[::2])
    model = prepared(trained, tmp_path, memory=names)
    x = model.inference
    on, shuffled, off = (perplexity(model, way) for way in model.ways())
    assert on < 0.98 * shuffled
    assert on < 0.9 * off
    for factor in (0.1, 10.0):
        model.eval_memory.inference = replace(x, tau=factor * x.tau, tau_ext=factor * x.tau_ext)
        assert on < perplexity(model), x
    is_used = dict(lam=trained == 'none' and x.local, lam_ext=x.n_neighbors > 0)
    for name in filter(is_used.get, is_used):
        for lam in (getattr(x, name) - 0.05, getattr(x, name) + 0.05):
            if 0 <= lam < 1:
                model.eval_memory.inference = replace(x, **{name: lam})
                assert on <= perplexity(model) * (1 + 1e-4), (x, name, lam)

    # these memories, which are printed; the default is Table 1
    assert f'{x}, tuned on val' in capsys.readouterr().out
    default = dict(local='local', long='local,long', ext='local,long,ext')
    names = names or default[trained]
    for name, present in dict(local=x.local, long=x.long, ext=x.n_neighbors).items():
        assert bool(present) == (name in names)
    assert isinstance(x, LinearInference) == (trained == 'none')


def test_flags(tmp_path, few_values):
    assert prepared('ext', tmp_path, memory='local', stride=5).eval_memory.stride == 5
    assert 'find itself' in one_line(prepared, 'ext', tmp_path, split='train')
    assert prepared('none', tmp_path).ways() == ('off',)


def test_more_long_memory_is_better(tmp_path, few_values):
    """Figure 3"""
    few = prepared('long', tmp_path, long=0)
    many = prepared('long', tmp_path)
    assert perplexity(many) < perplexity(few)


def test_another_corpus(tmp_path, few_values):
    """Table 5: local and long memory, and a datastore of that text"""
    corpus = SimpleNamespace(folder=Path('b'), train=CORPUS.val, fingerprint='2', tab=-1)
    flags = dict(external=corpus, retrieve_from='b', split='train')
    model = prepared('local', tmp_path, **flags)
    assert model.inference.local and model.inference.long == 60
    assert model.eval_memory.store.text.tolist() == corpus.train.tokens.tolist()


def test_memories_of_pairs_are_targets(tmp_path, few_values, monkeypatch):
    """In the datastore and in the text. A datastore of the same corpus as a text is another one."""
    tokens = random_tokens(4, 16, vocab=V - 1)
    tokens[:, 5] = V - 1                                            # TAB; 10 entries follow
    split = Split('train', tokens.flatten().numpy(), np.arange(0, 65, 16))
    pairs = SimpleNamespace(folder=Path('p'), train=split, fingerprint='3', tab=V - 1,
                            batches=lambda split, **sizes: Pairs(split, V - 1, **sizes))
    flags = dict(external=pairs, retrieve_from='p')
    model = prepared('local', tmp_path, **flags)
    assert model.eval_memory.store.index.ntotal == 40
    assert model.ways() == ('on', 'off')
    assert model.eval_memory.tab == -1
    pairs.tab = -1
    assert 'delete it' in one_line(prepared, 'local', tmp_path, **flags)

    monkeypatch.setattr(CORPUS, 'tab', V - 1)
    assert prepared('local', tmp_path).eval_memory.tab == V - 1


@torch.no_grad()
def test_the_accuracy_and_recall_of_the_datastore(stores, monkeypatch):
    """Table 13 by a loop"""
    model = with_memories('ext', stores)
    split = Split('val', TOKENS.numpy(), [0, len(TOKENS)])
    runs = [SimpleNamespace(name='a', model=model, split=split)]
    args = SimpleNamespace(progress_bar=no_progress)
    shares = trime.datastore_accuracy(runs, args)['a']
    for K in 1, 8:
        model.eval_memory.inference = TrimeInference(n_neighbors=K)
        each = memories_of_each(model, TOKENS[:-1])
        right = [w in [value for _, value, _ in ext]
                 for (*_, ext), w in zip(each, TOKENS[1:])]
        assert shares[f'top-{K}'] == approx(np.mean(right))

    # recall: the share of the 1,024 entries with the highest products that a search finds, for each
    # 32nd token
    store = model.eval_memory.store
    monkeypatch.setattr(store, 'nprobe', 0)
    assert trime.datastore_accuracy(runs, args)['a']['recall'] == 1
    monkeypatch.setattr(store, 'nprobe', 1)
    found = []
    for _, _, g in [*contexts(model, TOKENS)][::32]:
        best = (model.keys @ g[-1]).topk(1024).indices
        _, entries = store.search(g[-1:], 1024)
        found.append(torch.isin(best, entries[0]).double().mean())
    # with nprobe 1 a list can have fewer than 1,024 entries: those that it lacks, -1, are right
    # for no token
    monkeypatch.setattr(store, 'text', V * torch.arange(2001))
    shares = trime.datastore_accuracy(runs, args)['a']
    assert shares['top-1024'] == 0
    assert shares['recall'] == approx(np.mean(found)) and shares['recall'] < 0.99


def test_a_store_needs_twice_its_size_on_the_disk(build, tmp_path, monkeypatch):
    monkeypatch.setattr(trime.shutil, 'disk_usage',
                        lambda folder: SimpleNamespace(free=2 * 94 * (2 * C + 8) - 1))
    message = one_line(build)
    assert message == f'{tmp_path.parent}: a datastore needs 0.00 GB of free disk space'


# --------------------------------------------------------------------------------------------------
# whole models
def function_batch(step):
    """A random function f and pairs a, f(a) in all 8 segments; f(a) is scored."""
    f = random_tokens(16, seed=step, vocab=16)
    a = random_tokens(8, 8, seed=-step, vocab=16)
    tokens = torch.stack([a, f[a]], 2).flatten(1)                   # (8, 16)
    doc = torch.arange(8)[:, None].expand(8, 16)
    batch = batch_of(tokens, doc, seed=step)
    batch.targets[:, 1::2] = -1
    return batch


@mark.slow
@mark.parametrize('memory, p, low, high', [
    ('ext', 0.9, 0.0, 0.5), ('ext', 0.0, 0.0, 0.5), ('none', 0.9, 2.5, 3.0)])
def test_what_only_other_segments_know_is_learned(memory, p, low, high):
    """Without memory the loss is ln 16 = 2.77."""
    config = small(memory, block_size=16, n_embd=32, vocab_size=16, p=p).config
    model = learn(TRIME(config), 250, function_batch).train()
    test = [model(function_batch(step), 1.0)[0].item() for step in range(250, 300)]
    assert low < np.mean(test) < high


def test_a_store_of_other_weights_or_stride_is_refused(tmp_path, few_values):
    model = prepared('local', tmp_path, memory='ext')
    path = tmp_path / 'best.pt'
    args = SimpleNamespace(split='val', nprobe=16, new_folder=new_folder, progress_bar=no_progress)
    stride = model.eval_memory.stride
    model.eval_memory.stride = 5
    assert 'delete it' in one_line(trime.open_store, model, CORPUS, CORPUS, args, path)
    model.eval_memory.stride = stride
    path.write_bytes(b'trained further')
    assert 'delete it' in one_line(trime.open_store, model, CORPUS, CORPUS, args, path)
