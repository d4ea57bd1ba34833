"""TRIME against its definitions. Run: pytest tests/test_trime.py"""
import dataclasses
import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import trime
from trime import (PRESETS, TRIME, Datastore, EvalConfig, Inference, TRIMEConfig, TrimeLoss,
                   rotary)

torch.set_num_threads(1)                        # the models are tiny
V, T, B, C = 23, 8, 3, 16
EPS = 1e-11                                     # fp64 sums of some hundred terms of size 1
ADAPTIVE = dict(cutoffs='6,14', div_value=2)    # 6 words, clusters of 8 and 9; widths 16, 8, 4


def small(memory='local', dtype=torch.float64, **more):
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=2, n_head=2, n_embd=C)
    model = TRIME(TRIMEConfig(memory=memory, **{**sizes, 'ce_warmup': 0.0, **more})).to(dtype)
    model.blocks[-1].norm2.gain.data.fill_(1)   # ext starts smaller; here all are alike
    for p in model.parameters():                # far from the initial state
        p.data += 0.3 * torch.randn_like(p) * (p.dim() == 2)
    return model


def random_tokens(n, seed=0, vocab=V):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed))


def random_batch(data_seed=0, b=B, seed=0, vocab=V):
    tokens = random_tokens(b * (T + 1), data_seed, vocab).view(b, T + 1)
    doc = torch.arange(b * T).view(b, T) // 11                      # a boundary inside a segment
    return SimpleNamespace(tokens=tokens[:, :-1], targets=tokens[:, 1:].clone(), doc=doc, seed=seed)


def seed_for(local, p=0.9):
    """A seed that enables or disables local memory in ext."""
    return next(s for s in range(10 ** 4) if (random.Random(s).random() >= p) == local)


def word_logits(model, f):
    """E_w · f of each word for one f (C,), by the definition of the adaptive softmax."""
    embedding = model.embedding
    head = [row @ f for row in embedding.tables[0]]
    n = len(head) - len(embedding.tail_proj)
    logits = head[:n]
    for i, (table, proj) in enumerate(zip(embedding.tables[1:], embedding.tail_proj)):
        scores = torch.stack([(proj.weight @ row) @ f for row in table])
        logits += list(head[n + i] + scores.log_softmax(0))
    return torch.stack(logits)


def may_use(mode, i, j, doc, local=True, m=0, same_document=True):
    """Eq. 2, 3 and section 4.3 in words."""
    segment, document = i // T == j // T, doc[i] == doc[j]
    if mode == 'ext' and not segment:
        return not document or not same_document
    if segment:
        return j < i and (local or mode != 'ext')
    group = not m or i // (m * T) == j // (m * T)
    return mode == 'long' and j < i and group and (document or not same_document)


def by_definition(model, batch, mode, memory_grad=True, **options):
    """The mean of -log P by Eq. 5: loops over queries and memories, differentiable."""
    f, g = (x.flatten(0, 1) for x in model.encode(batch.tokens)[:2])
    y, doc, losses = batch.targets.flatten().tolist(), batch.doc.flatten().tolist(), []
    for i in (i for i in range(len(y)) if y[i] >= 0):
        logits = word_logits(model, f[i])
        memories = [j for j in range(len(y)) if mode != 'none' and y[j] >= 0
                    and may_use(mode, i, j, doc, **options)]
        sims = [g[i] @ (g[j] if memory_grad else g[j].detach()) / C ** 0.5 for j in memories]
        match = [s for s, j in zip(sims, memories) if y[j] == y[i]]
        total = torch.stack([*logits, *sims]).logsumexp(0)
        losses.append(total - torch.stack([logits[y[i]], *match]).logsumexp(0))
    return torch.stack(losses).mean()


# --------------------------------------------------------------------------------------------------
# training

MODES = [('none', {}), ('local', {}), ('local', dict(memory_grad=False)), ('long', {}),
         ('long', dict(same_document=False)),
         ('long', dict(m=2)), ('ext', dict(local=True)), ('ext', dict(local=False)),
         ('ext', dict(local=False, same_document=False))]


@pytest.mark.parametrize('R, sizes', [(5, {}), (512, {}), (5, ADAPTIVE), (512, dict(cutoffs='4'))])
@pytest.mark.parametrize('mode, options', MODES)
def test_loss_and_gradients_are_those_of_eq5(mode, options, R, sizes, monkeypatch):
    """Blocks of 5 rows begin anywhere in a segment of 8. Padding is neither query nor memory."""
    monkeypatch.setattr(TrimeLoss, 'R', R)
    settings = {key: value for key, value in options.items() if key != 'local'}
    model = small(mode, **sizes, **settings)
    batch = random_batch(b=4, seed=seed_for(options.get('local', True)))
    batch.targets[1, 4:] = -1
    batch.targets[3] = 5                                            # many matches
    loss, log = model(batch, 1.0)
    expected = by_definition(model, batch, mode, **options)
    assert abs(loss - expected) < EPS
    assert abs(log['loss_without_memory'] - by_definition(model, batch, 'none')) < EPS
    grads = torch.autograd.grad(3 * loss, list(model.parameters()))
    for a, b in zip(grads, torch.autograd.grad(expected, list(model.parameters()))):
        assert torch.allclose(a, 3 * b, atol=1e-10) and b.abs().max() > 0


def trime_loss(f, E, query, key, y, memory_y, mask):
    """TrimeLoss with an output embedding E (V, C) and a mask (N, M)."""
    embedding = SimpleNamespace(head_index_and_tail_logprob=lambda f, w: (w[:, None], 0 * f[:, :1]))
    rows = lambda rows: (0, mask.size(1), mask[rows])
    return TrimeLoss.apply(f, query, key, y, memory_y, rows, embedding, True, E)


@pytest.mark.parametrize('share', [0.5, 0.0])
def test_gradcheck_and_cross_entropy(share, monkeypatch):
    """Also with queries without memories; without any memory it is cross entropy."""
    monkeypatch.setattr(TrimeLoss, 'R', 3)
    torch.manual_seed(0)
    f, E, query, key = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True)
                        for n in (7, 9, 7, 11))
    y, memory_y, mask = random_tokens(7, 1, 4), random_tokens(11, 2, 4), torch.rand(7, 11) < share
    mask[4] = False
    run = lambda *x: trime_loss(*x, y, memory_y, mask)[0]
    assert torch.autograd.gradcheck(run, (f, E, query, key))
    expected = F.cross_entropy(f @ E.T, y)
    assert (abs(run(f, E, query, key) - expected) < EPS) == (share == 0)
    assert abs(run(f, E, None, None) - expected) < EPS


def test_extreme_similarities():
    """
    In fp32: a memory 200 nats above the words predicts another word; then a match is 110 nats below
    the best memory and 90 above the words, and is all that predicts w.
    """
    f, E = torch.zeros(1, 4, requires_grad=True), torch.zeros(V, 4, requires_grad=True)
    query, mask = torch.tensor([[2.0, 0, 0, 0]]), torch.ones(1, 2, dtype=torch.bool)
    for values, expected in (([3, 4], 200), ([3, 1], 110)):
        key = torch.tensor([[200.0, 0, 0, 0], [90.0, 0, 0, 0]], requires_grad=True)
        loss, _, _ = trime_loss(f, E, query, key, torch.tensor([1]), torch.tensor(values), mask)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        assert all(x.grad.isfinite().all() for x in (f, E, key))
    assert torch.allclose(key.grad[:, 0], torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize('mode', ['local', 'long', 'ext'])
def test_validation_is_causal(mode):
    """In eval mode ext has local memory: all memories are earlier than the queries."""
    model, batch = small(mode).eval(), random_batch()
    expected = by_definition(model, batch, 'local' if mode == 'ext' else mode)
    assert abs(model(batch, 1.0)[0] - expected) < EPS


def test_warm_up_and_disabled_memories():
    """Section 5.2: Eq. 1 at first. ext without other segments and local memory is Eq. 1."""
    batch, vanilla = random_batch(), small('none')
    model = small(ce_warmup=0.25)
    assert model(batch, 0.24)[0] == vanilla(batch, 0.24)[0] != model(batch, 0.25)[0]
    batch = random_batch(b=1, seed=seed_for(False))
    assert abs(small('ext')(batch, 1.0)[0] - vanilla(batch, 1.0)[0]) < EPS
    assert abs(small('ext', p=0.0)(batch, 1.0)[0] - small('local')(batch, 1.0)[0]) < EPS


def test_f_and_g():
    """g is the input of the last MLP, f the final norm of the last block's output (section 3)."""
    model, tokens, hooked = small(**ADAPTIVE), torch.arange(V)[None], {}
    model.blocks[-1].mlp.register_forward_hook(lambda _, x, y: hooked.update(g=x[0]))
    f, g, _ = model.encode(tokens)
    tables, proj = model.embedding.tables, model.embedding.tail_proj
    rows = [tables[0][:6], tables[1] @ proj[0].weight.T, tables[2] @ proj[1].weight.T]
    x = torch.cat(rows)[None]                                       # the adaptive input
    for block in model.blocks:
        x, _ = block(x, rotary(torch.arange(V), C // 2))
    assert torch.equal(g, hooked['g']) and torch.allclose(f, model.norm(x), atol=EPS)


def test_randomness_comes_from_the_seed():
    """Traced for torch.compile too."""
    model, compiled = small('ext', dropout=0.5), small('ext', dropout=0.5)
    compiled.encode = torch.compile(compiled.encode, backend='eager')
    loss = lambda model, seed: model(random_batch(seed=seed), 1.0)[0].item()
    assert loss(model, 7) == loss(model, 7) != loss(model, 8)
    assert all(abs(loss(model, seed) - loss(compiled, seed)) < EPS for seed in range(3))
    assert loss(model.eval(), 7) == loss(model, 8)


@pytest.mark.parametrize('preset, millions', [('7m', 7), ('150m', 150), ('247m', 247),
                                              ('enwik8', 38)])
def test_presets_have_the_papers_sizes(preset, millions):
    fields = {f.name for f in dataclasses.fields(TRIMEConfig)}
    config = TRIMEConfig(**{k: v for k, v in PRESETS[preset].items() if k in fields})
    with torch.device('meta'):
        n = sum(p.numel() for p in TRIME(config).parameters())
    assert n / 1e6 == pytest.approx(millions, rel=0.02)             # no biases here
    assert PRESETS[preset]['tokens_per_step'] % (config.block_size * config.micro_batch) == 0


def test_configurations():
    for bad in (dict(n_embd=30), dict(stride=600), dict(cutoffs='14,6'), dict(cutoffs='6,6'),
                dict(cutoffs='6,x'), dict(cutoffs='2,3,4', n_embd=32), dict(p=1.5), dict(m=-1)):
        with pytest.raises(ValueError):
            TRIMEConfig(**bad)
    kinds = dict(none='segments', local='segments', long='consecutive', ext='packed')
    for memory, kind in kinds.items():
        arguments = trime.batches(TRIMEConfig(memory=memory, m=2))
        assert (arguments['kind'], arguments['consecutive']) == (kind, 2)
    assert len(small(cutoffs='6,23', div_value=2).embedding.tables) == 2    # a small vocabulary


def train(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in batches:
        loss, log = model(batch, 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), log['loss_without_memory'].item()


@pytest.mark.parametrize('mode', ['none', 'local', 'long', 'ext'])
def test_random_tokens_cannot_be_predicted(mode):
    """Trained on uniformly random tokens, no loss on others is below ln V: a leak would show."""
    model = small(mode, vocab_size=8, p=0.5, dtype=torch.float32)
    list(train(model, (random_batch(step, seed=step, vocab=8) for step in range(150))))
    with torch.no_grad():
        batches = [random_batch(10 ** 6 + s, seed=s, vocab=8) for s in range(100)]
        losses = torch.tensor([model(batch, 1.0)[0] for batch in batches])
        log_p = model.eval().log_p(random_tokens(2000, 7, vocab=8))
    for x in (losses, -log_p):
        assert x.mean() > math.log(8) - 4 * x.std() / len(x) ** 0.5


def gathered(rank, folder):
    dist.init_process_group('gloo', f'file://{folder}/rendezvous', rank=rank, world_size=2)
    half = slice(2 * rank, 2 * rank + 2)
    for mode in ('long', 'ext'):
        model, batch = small(mode, gather_memory=True, m=3), random_batch(b=4, seed=seed_for(True))
        for name in ('tokens', 'targets', 'doc'):
            setattr(batch, name, getattr(batch, name)[half])
        model(batch, 1.0)[0].backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        torch.save([p.grad / 2 for p in model.parameters()], f'{folder}/{mode}-{rank}.pt')
    dist.destroy_process_group()


@pytest.mark.dist
def test_two_processes_that_gather_are_one(tmp_path):
    """The gradient reaches the memories of the other process."""
    torch.multiprocessing.spawn(gathered, (str(tmp_path),), nprocs=2)
    for mode, rank in itertools.product(('long', 'ext'), (0, 1)):
        model = small(mode, m=3)
        model(random_batch(b=4, seed=seed_for(True)), 1.0)[0].backward()
        for a, p in zip(torch.load(tmp_path / f'{mode}-{rank}.pt'), model.parameters()):
            assert torch.allclose(a, p.grad, atol=EPS)


# --------------------------------------------------------------------------------------------------
# test time

class Store:
    """A datastore in memory, searched by definition: entry j has key j and value text[j + 1]."""

    def __init__(self, n=40):
        self.keys = torch.randn(n, C, generator=torch.Generator().manual_seed(5)).double()
        self.text = random_tokens(n + 1, 6).numpy()

    def search(self, query, K, l2=False):
        sim = query @ self.keys.T if not l2 else -torch.cdist(query, self.keys) ** 2 / 2
        return (sim / C ** 0.5).topk(K)


ALL = 'local', 'long', 'ext'
INFERENCES = dict(
    vanilla=Inference(), local=Inference(('local',), tau=1.3),
    long=Inference(('local', 'long'), long=10, tau=0.8),
    ext=Inference(ALL, long=10, n_neighbors=6, tau=1.2, tau_ext=0.5, lam_ext=0.4),
    cache=Inference(('local', 'long'), True, long=10, tau=0.7, lam=0.3),
    both=Inference(ALL, True, 10, 6, 0.7, 0.3, 2.0, 0.25))          # kNN-LM and the cache
each_inference = pytest.mark.parametrize('name', INFERENCES)


def with_memories(name, **more):
    model = small(**more).eval()
    model.inference, model.store = INFERENCES[name], Store()
    return model


def distribution(memories, tau, start=(0.0,) * V):
    p = torch.tensor(start, dtype=torch.float64)
    for sim, value in memories:
        p[value] += math.exp(sim / tau)
    return p / p.sum() if p.sum() else p


@each_inference
@pytest.mark.parametrize('stride', [3, T])
def test_inference_is_eq_6_to_9(name, stride):
    """
    Memory by memory, over several windows: which contexts are local, which long, each once, and
    with which state. Every row sums to one.
    """
    model, tokens = with_memories(name, stride=stride, **ADAPTIVE), random_tokens(26, 3)
    log_probs, x, first_g = model.log_probs(tokens[None])[0], model.inference, {}
    text = tokens.tolist()
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(26).double())
    for t in range(26):
        start = 0 if t < T else -(-(t + 1 - T) // stride) * stride  # the first window with t
        f, g, _ = model.encode(tokens[None, start:t + 1])
        first_g[t], sim = g[0, -1], lambda k: (g[0, -1] @ k).item() / C ** 0.5
        entries = zip(*(y[0].tolist() for y in model.store.search(g[0, -1:], 6, x.linear)))
        found = dict(
            local=[(sim(g[0, j - start]), text[j + 1]) for j in range(start, t)],
            long=[(sim(first_g[j]), text[j + 1]) for j in range(max(0, start - x.long), start)],
            ext=[(s, int(model.store.text[j + 1])) for s, j in entries])
        used = lambda names: [memory for name in names for memory in found[name]]
        words = word_logits(model, f[0, -1]).exp().tolist()
        P = distribution(() if x.linear else used(x.memories), x.tau, words)        # Eq. 1, 6
        cache = [name for name in x.memories if name != 'ext'], x.tau, x.lam
        ext = ['ext'] if x.linear else x.memories, x.tau_ext, x.lam_ext
        for names, tau, lam in (cache, ext):
            if lam and used(names):
                P = (1 - lam) * P + lam * distribution(used(names), tau)            # Eq. 8, 9
        assert torch.allclose(log_probs[t].exp(), P, atol=1e-10), t


@each_inference
@pytest.mark.parametrize('stride, shuffle', [(1, False), (3, True), (T, False)])
def test_streaming_equals_full_equals_log_p(name, stride, shuffle, monkeypatch):
    """Token by token = any pieces = one piece = log P of the next tokens; the state is bounded."""
    monkeypatch.setattr(TRIME, 'TOKENS', 3 * T)                     # three windows at once
    model = with_memories(name, stride=stride)
    model.shuffle, tokens = shuffle, random_tokens(2 * 51, 4).view(2, 51)
    full = model.log_probs(tokens)
    for sizes in ([1] * 51, [5, 1, 30, 15], [8, 8, 35]):
        state, parts = None, []
        for piece in tokens.split(sizes, dim=1):
            log_probs, state = model.stream(piece, state)
            parts.append(log_probs)
            assert all(x.size(1) <= T + model.inference.long for x in state[:3])
        assert torch.allclose(torch.cat(parts, dim=1), full, atol=1e-9), sizes
    expected = full[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    for row in (0, 1):
        assert torch.allclose(model.log_p(tokens[row]), expected[row], atol=1e-9)


@each_inference
def test_the_future_is_invisible(name):
    """A change of token t changes no distribution before it, but that at t."""
    model, a = with_memories(name, stride=3), random_tokens(3 * T, 5)[None]
    full = model.log_probs(a)
    for t in range(3 * T):
        b = a.clone()
        b[0, t] = (b[0, t] + 1) % V
        changed = model.log_probs(b)
        assert torch.allclose(changed[:, :t], full[:, :t], atol=1e-11), t
        assert not torch.allclose(changed[:, t], full[:, t], atol=1e-6)


def test_the_answer_is_not_in_the_memory():
    """The training loss of each target that the last token could have is -log P at test time."""
    model, batch = small().eval(), random_batch(b=1)
    log_probs = model.log_probs(batch.tokens)[0]
    for w in range(V):
        batch.targets[0, :-1], batch.targets[0, -1] = batch.tokens[0, 1:], w
        expected = log_probs.gather(1, batch.targets[0, :, None]).mean()
        assert abs(model(batch, 1.0)[0] + expected) < EPS


def test_shuffled_memories():
    """Each keeps its similarity and has the value of another memory that its query may use."""
    model = with_memories('ext', stride=3)
    *_, (_, g, state) = model.windows(random_tokens(26, 3)[None])
    before = model.memories(g, state)
    model.shuffle = True
    for name, (sim, _, j) in model.memories(g, state).items():
        assert torch.equal(sim, before[name][0])
        rows = [x.reshape(-1, x.size(-1)).expand(*sim.shape) for x in (before[name][2], j)]
        for a, b, used in zip(*rows, sim > -math.inf):
            assert (a[used] != b[used]).all()
            assert name == 'ext' or sorted(a[used].tolist()) == sorted(b[used].tolist())
    assert list(model.ways()) == ['on', 'shuffled', 'off']
    assert list(small('none').ways()) == ['off']


@each_inference
def test_trace(name):
    """The parts of memories with value w, and of the word itself, make P(w)."""
    model, tokens, x = with_memories(name, stride=3), random_tokens(40, 8), INFERENCES[name]
    for t in (0, 5, T, 38):
        found, parts = model.trace(tokens, t), torch.zeros(V).double()
        assert found == sorted(found, key=lambda memory: -memory[0])
        for part, ids, start, end in found:
            assert 2 <= end - start <= 13 and (ids is model.store.text or end <= t + 1)
            parts[int(ids[end - 1])] += part
        words = model.log_probs(tokens[None, :t + 1])[0, -1].exp() - parts
        start = 0 if t < T else -(-(t + 1 - T) // 3) * 3
        logits = word_logits(model, model.encode(tokens[None, start:t + 1])[0][0, -1])
        assert torch.allclose(words, logits.softmax(0) * (1 - parts.sum()), atol=1e-9)
        assert (parts.sum() > 0) == (bool(x.memories) and (t > 0 or 'ext' in x.memories))


# --------------------------------------------------------------------------------------------------
# the datastore, tuning

def split_of(n, seed):
    """Two documents in which one token predicts the next well."""
    tokens = torch.cumsum(random_tokens(n, seed, 3) + 2, 0) % V
    tokens = tokens.numpy().astype(np.uint16)
    return SimpleNamespace(tokens=tokens, offsets=np.array([0, n // 3, n]))


@pytest.mark.parametrize('stop', [0, 40])
def test_datastore(tmp_path, monkeypatch, stop):
    """
    All lists searched: the nearest entries by definition over the fp16 keys, for both metrics. A
    build that is interrupted in a shard is resumed; a store of something else is refused.
    """
    monkeypatch.setattr(Datastore, 'SHARD', 700 * (2 * C + 8))
    n, model, built = 2400, small(dtype=torch.float32).eval(), []
    text, folder = split_of(n + 1, 1).tokens, tmp_path / 's'
    ids = torch.from_numpy(text.astype(np.int64))

    def stops(items, name, *_):
        built.append(name)
        for i, item in enumerate(items):
            if len(built) == 3 and i >= stop:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        Datastore(folder, model, text, dict(a=1), 9, stops)
    with pytest.raises(SystemExit):
        Datastore(folder, model, text, dict(a=2), 9, stops)
    Datastore(folder, model, text, dict(a=1), 9, stops)
    assert built == ['shard-0', 'shard-700', 'shard-1400', 'shard-1400', 'shard-2100']
    store = Datastore(folder, None, text, dict(a=1), 1, None)       # is there: nothing is built
    with torch.no_grad():                                           # T tokens of context
        starts = [(start, max(0, start - T)) for start in range(0, n, 700)]
        parts = [torch.cat([g[0] for _, g, _ in model.windows(ids[None, a:min(n, start + 700)])])
                 [start - a:] for start, a in starts]
    keys, query = torch.cat(parts).half().double(), torch.randn(9, C)
    for l2, K in itertools.product((False, True), (7, 3000)):
        exact = query.double() @ keys.T if not l2 else -torch.cdist(query.double(), keys) ** 2 / 2
        best = (exact / C ** 0.5).topk(min(K, n)).values
        sim, j = store.search(query, K, l2, nprobe=2)
        assert torch.allclose(sim[:, :n].double(), best, atol=5e-3)  # fp16 has steps of 1e-3
        assert torch.allclose((exact / C ** 0.5).gather(1, j[:, :n]), best, atol=5e-3)
        assert (j[:, n:] == -1).all() and (sim[:, n:] == -math.inf).all()
    assert not torch.equal(store.search(query, 99)[1], store.search(query, 99, nprobe=2)[1])


@pytest.mark.parametrize('name', ['ext', 'cache'])
def test_tuning(name, monkeypatch):
    """No other value of one parameter is better on val; the tuned ones are better than given."""
    monkeypatch.setattr(trime, 'TAUS', [0.5, 1.0, 3.0])
    monkeypatch.setattr(trime, 'LAMBDAS', [0.0, 0.3, 0.6])
    model, x = with_memories(name), INFERENCES[name]
    windows = trime.collect(model, split_of(300, 3), x)
    mean = lambda x: torch.cat([x.log_p(*window) for window in windows]).mean()
    tuned = trime.tune(windows, x)
    assert mean(tuned) > mean(x)
    for key, value in itertools.product(('tau', 'tau_ext'), trime.TAUS):
        assert mean(dataclasses.replace(tuned, **{key: value})) <= mean(tuned) + 1e-9
    assert trime.tune(windows, x, 'tau').tau == x.tau != tuned.tau


@pytest.mark.parametrize('trained, memory, used', [
    ('local', '', 'local'), ('long', '', 'local,long'), ('ext', '', 'local,long,ext'),
    ('none', 'local,ext', 'local,ext'), ('none', '', '')])
def test_prepare_eval(tmp_path, monkeypatch, trained, memory, used, capsys):
    """
    Memories are those of Table 1, the baselines linear; what is tuned is kept for this checkpoint
    and these settings.
    """
    corpus = SimpleNamespace(name='toy', fingerprint='abc', train=split_of(1500, 1),
                             val=split_of(200, 2))
    monkeypatch.setattr(trime, 'TAUS', [0.5, 1.0])
    more = dict(memory=memory, long=300, n_neighbors=20, nprobe=99, recall=True, split='val')
    args = SimpleNamespace(**{**vars(EvalConfig()), **more, 'at_most': 0})
    quiet = lambda items, *_: items
    prepare = lambda name: model.prepare_eval(corpus, args, tmp_path / name, quiet)
    model = small(trained, dtype=torch.float32).eval()
    prepare('ckpt.pt')
    x, recall = model.inference, 'recall of the 20 nearest entries: 100.0%'
    assert x.linear == (trained == 'none') and 0 <= x.long <= 300
    assert list(x.memories) == [name for name in used.split(',') if name]
    assert (recall in capsys.readouterr().out) == ('ext' in used)
    with monkeypatch.context() as patch:
        patch.setattr(trime, 'tune', None)                          # it is not tuned again
        prepare('best.pt')
        assert model.inference == x
        model.blocks[0].mlp.fc.weight.data += 1                     # another checkpoint
        args.split = 'train'                                        # a token would find itself
        with pytest.raises(SystemExit if 'ext' in used else TypeError):
            prepare('ckpt.pt')
    if trained == 'long':
        run = SimpleNamespace(name='a', model=model)
        result = trime.sweep([run], corpus, corpus.val, args)
        assert list(result) == ['a 0', 'a 256', 'a 300']
