"""TRIME against its definitions, by loops in fp64."""
import dataclasses, itertools, math, re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import trime
from helpers import learn, log_p, one_line
from trime import PRESETS, TRIME, Datastore, EvalConfig, Inference, TRIMEConfig, TrimeLoss

torch.set_num_threads(1)                        # the models are tiny
V, T, B, C = 23, 8, 4, 16
ADAPTIVE = dict(cutoffs='14,6,6,99', div_value=2)   # clusters of 6, 8, 9 ids and 16, 8, 4 numbers
EPS = 1e-9                                      # fp64 through a few layers


def small(memory='local', **settings):
    """A model in fp64, far from its initial weights; all gains are 1."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, block_size=T, micro_batch=B, n_layer=2, n_head=2, n_embd=C, stride=3)
    model = TRIME(TRIMEConfig(memory=memory, **{**sizes, 'ce_warmup': 0.0, **settings})).double()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p) if p.dim() == 2 else 1 - p.data
    return model


def random_tokens(*shape, seed=0, vocab=V):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def random_batch(seed=0, b=B):
    """Documents of 11 tokens end within segments of 8. Some targets are missing."""
    tokens, doc = random_tokens(b, T + 1, seed=seed), torch.arange(b * T) // 11
    targets = tokens[:, 1:].clone()
    targets[1:2, 4:] = targets[3:, :4] = -1
    return SimpleNamespace(tokens=tokens[:, :-1], targets=targets, doc=doc.view(b, T), seed=seed)


def word_logits(embedding, f):
    """Eq. 1; with clusters, log of P_head(w) or P_head(cluster) P_cluster(w), times the sum."""
    head, n = f @ embedding.tables[0].T, len(embedding.tables) - 1
    logits = [head[:, :head.size(1) - n]]
    for i, (table, proj) in enumerate(zip(embedding.tables[1:], embedding.tail_proj)):
        logits.append(head[:, [i - n]] + (f @ (table @ proj.weight.T).T).log_softmax(1))
    return torch.cat(logits, dim=1)


def may_use(mode, i, j, doc, local=True, same_document=True, m=0, **_):
    """Eq. 2, Eq. 3 for groups of m segments, §4.3: whether query i has memory j."""
    if i // T == j // T:
        return mode != 'none' and local and j < i
    if mode == 'ext':
        return not same_document or doc[i] != doc[j]
    group = not m or i // T // m == j // T // m
    return mode == 'long' and j < i and group and (not same_document or doc[i] == doc[j])


def eq5(model, batch, mode, **settings):
    """Loss, probability on memories, loss without memory of a micro-batch, for autograd."""
    f, g = (x.flatten(0, 1) for x in model.encode(batch.tokens)[:2])
    w, doc = batch.targets.flatten(), batch.doc.flatten().tolist()
    mask = torch.tensor([[may_use(mode, i, j, doc, **settings) and w[j] >= 0
                          for j in range(len(w))] for i in range(len(w))])
    key, z = g if model.config.memory_grad else g.detach(), word_logits(model.embedding, f)
    sim = (g @ key.T / C ** 0.5).masked_fill(~mask, -math.inf)
    match = sim.masked_fill(w != w[:, None], -math.inf)
    z_w, total = z.gather(1, w.clamp(min=0)[:, None]), torch.cat([z, sim], dim=1).logsumexp(1)
    nll = total - torch.cat([z_w, match], dim=1).logsumexp(1)
    memory_prob = (sim - total[:, None]).exp().sum(1)
    return nll[w >= 0].mean(), memory_prob[w >= 0].mean(), F.cross_entropy(z, w, ignore_index=-1)


def contexts(model, tokens):
    """App. D: the window of t starts at 0, or at the first multiple of the stride after t - T."""
    for t in range(len(tokens)):
        start = 0 if t < T else -(-(t + 1 - T) // model.config.stride) * model.config.stride
        f, g = model.encode(tokens[None, start:t + 1])[:2]
        yield start, f[0], g[0]


def read(model, tokens, x, store):
    """P (n, V) at test time, and for each token its memories: name -> [(similarity, value, j)]"""
    scored, found, words = [], [], tokens.tolist()
    for t, (start, f, g) in enumerate(contexts(model, tokens)):
        scored.append(g[-1])                                        # the states when they were new
        keys = {j: scored[j] for j in range(max(0, start - x.long), start)}
        keys.update({j: g[j - start] for j in range(start, t)})
        past = [((g[-1] @ k).item() / C ** 0.5, words[j + 1], j) for j, k in keys.items()]
        found.append(dict(past=past * x.local, ext=[],
                          words=word_logits(model.embedding, f[-1:])[0]))
        if x.n_neighbors:
            sims = -(store.keys - g[-1]).pow(2).sum(1) / 2 if x.linear else store.keys @ g[-1]
            top, j = (sims / C ** 0.5).topk(x.n_neighbors)
            found[-1]['ext'] = [(s, TEXT[i + 1], i) for s, i in zip(top.tolist(), j.tolist())]
    return torch.stack([equations_6_to_9(x, **memories) for memories in found]).detach(), found


def equations_6_to_9(x, words, past, ext):
    def terms(memories, tau):
        total = torch.zeros(V).double()
        for sim, value, _ in memories:
            total[value] += math.exp(sim / tau)
        return total

    P = words.exp() + (0 if x.linear else terms(past + ext, x.tau))                 # Eq. 1, 6
    P = P / P.sum()
    cache_and_knn_lm = [(past, x.tau, x.lam), (ext, x.tau_ext, x.lam_ext)]
    eq8 = [(past + ext, x.tau_ext, x.lam_ext)]
    for memories, tau, lam in cache_and_knn_lm if x.linear else eq8:
        memory = terms(memories, tau) if lam else torch.zeros(1)
        if memory.sum() > 0:
            P = (1 - lam) * P + lam * memory / memory.sum()                         # Eq. 8, 9
    return P


@pytest.mark.parametrize('sizes', [{}, ADAPTIVE])
def test_f_and_g(sizes):
    """§3: g is the input of the last MLP, f its output, after the norm; ext: small g; memory."""
    model, tokens, seen, shapes = small(**sizes), random_tokens(2, T), {}, []
    tables, proj = model.embedding.tables, model.embedding.tail_proj
    words = [tables[0][:6 if sizes else V]] + [t @ p.weight.T for t, p in zip(tables[1:], proj)]
    assert torch.allclose(model.embedding(torch.arange(V)[None])[0], torch.cat(words))
    last = model.blocks[-1]
    last.norm2.register_forward_hook(lambda _, inputs, g: seen.update(x=inputs[0], g=g))
    f, g = model.encode(tokens)[:2]
    assert torch.equal(g, seen['g']) and torch.equal(f, model.norm(seen['x'] + last.mlp(g)))
    g = TRIME(dataclasses.replace(model.config, memory='ext')).encode(tokens)[1]
    assert (g.norm(dim=2) - C ** 0.25).abs().max() < 0.05           # similarities are 1 at most
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, id):
        assert model.embedding.word(f[0], torch.arange(V)[-T:])[1].shape == (T, 1)
    assert all(9 not in shape for shape in shapes)                  # saved: no log P of 9 words


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('sizes, R', [({}, 512), (ADAPTIVE, 5)])    # blocks end within segments
@pytest.mark.parametrize('mode, settings', [
    ('none', {}), ('local', {}), ('local', dict(memory_grad=False)), ('long', {}),
    ('long', dict(m=2)), ('long', dict(m=3, same_document=False)),
    ('ext', dict(p=0.0)), ('ext', dict(p=1.0)), ('ext', dict(p=1.0, same_document=False))])
def test_forward_is_eq5(mode, settings, sizes, R, training, monkeypatch):
    """Loss, gradients; causal in eval mode, ext too. §5.2: 5% of the steps are without memory."""
    monkeypatch.setattr(TrimeLoss, 'R', R)
    model, batch = small(mode, **settings, **sizes).train(training), random_batch()
    loss, log = model(batch, 1.0)
    want = eq5(model, batch, 'local' if mode == 'ext' and not training else mode,
               local=settings.get('p') != 1.0 or not training, **settings)
    for got, value in zip((loss, log['memory_prob'], log['loss_without_memory']), want):
        assert abs(got - value) < EPS
    grads = [torch.autograd.grad(x, [*model.parameters()]) for x in (3 * loss, 3 * want[0])]
    for (name, _), got, value in zip(model.named_parameters(), *grads):
        assert torch.allclose(got, value, atol=EPS) and value.abs().max() > 0, name
    model.config.ce_warmup = 0.05
    assert abs(model(batch, 0.049)[0] - want[2]) < EPS and model(batch, 0.05)[0] == loss


def test_extreme_similarities():
    """fp32 has neither e^200 nor e^-110: the match of query 0 is 110 nats below its maximum."""
    f, query, key = (torch.zeros(3, C) for _ in range(3))
    query[0, 0], key[0, 0], key[1, 0] = C ** 0.5, 90.0, 200.0
    mask = lambda rows: (slice(3), torch.tensor([[True, True, False], [False] * 3, [False] * 3]))
    targets, head, zeros = torch.tensor([3, 1, -1]), torch.randn(V, C), torch.zeros(3, 1)
    f.requires_grad = key.requires_grad = True
    got = TrimeLoss.apply(f, query, key, head, zeros, targets.abs()[:, None], targets, mask)
    got[0].backward()
    want = [(110 + math.log(V)) / 2, 0.5, math.log(V)]
    assert [x.item() for x in got] == pytest.approx(want)
    assert torch.allclose(key.grad[:, 0], torch.tensor([-0.5, 0.5, 0]))


def test_randomness_comes_from_the_seed():
    """§4.3: p = 0.9 of the micro-batches of ext have no local memory, all tokens of one alike."""
    batch, losses = random_batch(b=2), []
    off, on, model = (small('ext', p=p, n_layer=1) for p in (1.0, 0.0, 0.9))
    off, on = off(batch, 1.0)[0].item(), on(batch, 1.0)[0].item()
    for batch.seed in range(300): losses.append(model(batch, 1.0)[0].item())
    assert {*losses} == {off, on} and off != on
    assert abs(losses.count(off) / 300 - 0.9) < 4 * (0.9 * 0.1 / 300) ** 0.5    # 4 standard errors
    model, losses = small(dropout=0.5), []
    for batch.seed in (7, 7, 8):
        losses += [model.train(mode)(batch, 1.0)[0].item() for mode in (True, False)]
    assert losses[0] == losses[2] != losses[4] and len({*losses[1::2]}) == 1


INFERENCES = dict(
    off=Inference(), local=Inference(True, tau=1.3), long=Inference(True, 10, tau=0.8),
    ext=Inference(n_neighbors=6), all=Inference(True, 10, 6, False, 1.2, 0.0, 0.5, 0.4),
    cache=Inference(True, 10, linear=True, tau=0.7, lam=0.3),
    knn_lm=Inference(True, 0, 6, True, 0.7, 0.3, 2.0, 0.25))
TEXT = random_tokens(2001, seed=9).numpy().astype(np.uint16)        # of the datastore
no_progress = lambda items, *_: items


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    """A datastore of 2,000 entries in 2 lists, moved after it was built; its keys by definition."""
    folder, model = tmp_path_factory.mktemp('store'), small(**ADAPTIVE)
    with torch.no_grad():
        Datastore(folder / 'a', model, TEXT, {'a': 1}, no_progress)
        (folder / 'a').rename(folder / 'b')
        store = Datastore(folder / 'b', model, TEXT, {'a': 1}, None)     # it is not built again
        tokens = torch.from_numpy(TEXT[:-1].astype(int))
        keys = torch.stack([g[-1] for _, _, g in contexts(model, tokens)])
    return SimpleNamespace(store=store, keys=keys.half().double())


def with_memories(name, store, stride=3):
    model = small(stride=stride, **ADAPTIVE).eval()
    model.inference, model.store = INFERENCES[name], store.store
    return model


@pytest.mark.parametrize('stride', [3, T])
@pytest.mark.parametrize('name', INFERENCES)
def test_probabilities_at_test_time(name, stride, store):
    """Several windows, each token in memory once: log_probs = read, then stream, in any pieces."""
    model, n = with_memories(name, store, stride=stride), 6 * T + 3
    tokens, sizes = random_tokens(1, n), []
    eps = 1e-4 if model.inference.n_neighbors else EPS        # faiss computes in fp32
    P, log_probs = read(model, tokens[0], model.inference, store)[0], model.log_probs(tokens)
    assert torch.allclose(log_probs.exp().sum(2), torch.ones(1, n).double())
    assert torch.allclose(log_probs[0].exp(), P, atol=eps)
    for cuts in ([0] + [1] * n, [5, 1, 2 * T, 3, n - 25], [T, 2, n - 10], [19, n - 19]):
        first, *pieces = tokens.split(cuts, dim=1)
        state, parts = model.read(first), []
        for piece in pieces:
            part, state = model.stream(piece, state)
            parts.append(part)
            sizes.append(sum(x.numel() for x in state if torch.is_tensor(x)))
        assert torch.allclose(torch.cat(parts, dim=1), log_probs[:, cuts[0]:], atol=eps)
    assert max(sizes) == max(sizes[:4 * T])


@pytest.mark.parametrize('name, n', [*((name, 6 * T + 3) for name in INFERENCES), ('long', 4099)])
def test_what_sizes_are_tuned_on(name, n, store):
    """Every token, of a longer text every second, with more memories than are used."""
    model, tokens, every = with_memories(name, store), random_tokens(n), 1 + (n > 4096)
    split, x = SimpleNamespace(tokens=tokens.numpy(), offsets=[0, len(tokens)]), model.inference
    windows = trime.collect(model, split, x, no_progress)
    sizes = [f.size(1) for f, _, _ in model.windows(tokens[None, :-1])]
    fewer = dataclasses.replace(x, long=x.long // 3, n_neighbors=x.n_neighbors // 3)
    got, model.inference = torch.cat([fewer.log_p(*window)[:, 0] for window in windows]), fewer
    i = np.concatenate([np.arange(n - q, n, every) for n, q in zip(np.cumsum(sizes), sizes)])
    assert torch.allclose(got, log_p(model, tokens)[i], atol=1e-4)


@pytest.mark.parametrize('shuffle', [False, True])
@pytest.mark.parametrize('name', INFERENCES)
def test_causality(name, shuffle, store):
    """Changing token t changes no probability before it, and it changes those at t."""
    model, a = with_memories(name, store), random_tokens(1, 3 * T)
    model.shuffle = shuffle
    before = model.log_probs(a)
    for t in range(shuffle, 3 * T, 1 + 6 * shuffle):
        after = model.log_probs(torch.cat([a[:, :t], (a[:, t:] + 1) % V], dim=1))
        assert torch.allclose(after[:, :t], before[:, :t], atol=EPS), t
        assert not torch.allclose(after[:, t], before[:, t], atol=EPS), t


@pytest.mark.parametrize('name', ['long', 'ext', 'all', 'cache', 'knn_lm'])
def test_trace(name, store):
    """P(w): the memories of w, and the rest by Eq. 1. Shuffled memories have other values."""
    model, tokens = with_memories(name, store), random_tokens(3 * T + 2)
    P, memories = read(model, tokens, model.inference, store)
    words, model.shuffle = with_memories('off', store).log_probs(tokens[None])[0].exp(), True
    shuffled, model.shuffle = model.log_probs(tokens[None])[0].exp(), False
    assert not torch.allclose(shuffled, P, atol=0.01)
    for t in (1, T - 1, T, 3 * T):
        found, of_words = model.trace(tokens, t), torch.zeros(V).double()
        for weight, ids, _, end in found:
            of_words[int(ids[end - 1])] += weight
        rest = (1 - of_words.sum()) * words[t]
        assert torch.allclose(of_words + rest, P[t], atol=1e-4)
        assert found == sorted(found, key=lambda memory: -memory[0])
        want = {(kind == 'past', j) for kind in ('past', 'ext') for _, _, j in memories[t][kind]}
        assert want == {(ids is tokens, end - 2) for _, ids, _, end in found}
        assert abs((shuffled[t] - rest).clamp(min=0).sum() - of_words.sum()) < 1e-4


@pytest.mark.parametrize('stop', [0, 12, 30])
@torch.no_grad()
def test_datastore(stop, tmp_path, monkeypatch):
    """Three shards; interrupted after some windows, or all 30 of them, it is built again."""
    monkeypatch.setattr(Datastore, 'SHARD', 40 * (2 * C + 8))
    model, text = small(), TEXT[:95]
    def interrupted(windows, *_):
        yield from itertools.islice(windows, stop)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        Datastore(tmp_path, model, text, {'weights': 1}, interrupted)
    store = Datastore(tmp_path, model, text, {'weights': 1}, no_progress)
    assert len([*tmp_path.iterdir()]) == 3                          # no shard remains
    keys = [g[-1] for _, _, g in contexts(model, torch.from_numpy(text[:-1].astype(int)))]
    query, keys = torch.randn(5, 1, C).double(), torch.stack(keys).half().double()
    for l2, want in ((False, (query * keys).sum(2)), (True, -(query - keys).pow(2).sum(2) / 2)):
        sim, j = store.search(query[:, 0], 95, l2)
        assert torch.equal(j[:, :-1].sort(1).values, torch.arange(94).expand(5, -1))
        assert torch.allclose(sim[:, :-1], want.gather(1, j[:, :-1]) / C ** 0.5, atol=1e-4)
        assert (sim.diff(dim=1) <= 0).all() and sim[:, -1].max() <= trime.MASKED
    one_line(Datastore, tmp_path, model, text, {'weights': 2}, no_progress)


def phrases(seed):
    """Documents of phrases, each one of 3 phrases of 6 words; the last document is empty."""
    tokens = random_tokens(3, 6)[random_tokens(48, seed=seed, vocab=3)].flatten()
    tokens, offsets = tokens.numpy().astype(np.uint16), np.array([0, 96, 192, 288, 288])
    return SimpleNamespace(tokens=tokens, offsets=offsets)


CORPUS = SimpleNamespace(folder=Path('text'), fingerprint='1', train=phrases(0), val=phrases(1))
DOCUMENTS = torch.from_numpy(CORPUS.val.tokens.astype(int)).split(96)


def prepared(model_memory, folder, progress=no_progress, external=CORPUS, **flags):
    more = dict(split='val', long=60, retrieve_from='' if external is CORPUS else 'x')
    args = SimpleNamespace(**{**vars(EvalConfig()), **more, **flags})
    model = small(model_memory, block_size=16, stride=8).eval()
    (folder / 'best.pt').write_bytes(b'a')
    model.prepare_eval(CORPUS, external, args, folder / 'best.pt', progress)
    return model, args


def perplexity(model, **attributes):
    vars(model).update(attributes)
    return math.exp(-torch.cat([log_p(model, tokens) for tokens in DOCUMENTS]).mean())


@pytest.mark.parametrize('memory, flags', [
    ('local', {}), ('long', {}), ('none', dict(memory='local,long')), ('none', dict(memory='ext')),
    ('ext', dict(memory='local,ext'))])
def test_tuning(memory, flags, tmp_path):
    """On val tuned temperatures are better than others, memories than shuffled ones and none."""
    model, _ = prepared(memory, tmp_path, **flags)
    ways, x = model.ways(), model.ways()['on']['inference']
    assert [*ways] == ['on', 'shuffled', 'off'] and x.linear == (memory == 'none')
    names = flags.get('memory', {'long': 'local,long'}.get(memory, memory))
    used = dict(local=x.local, long=x.long > 0, ext=x.n_neighbors > 0)
    assert used == {name: name in names for name in used}
    on, shuffled, off = (perplexity(model, **way) for way in ways.values())
    assert on < 0.98 * shuffled and on < 0.9 * off, (on, shuffled, off)
    for factor in (0.1, 10.0):
        other = dataclasses.replace(x, tau=factor * x.tau, tau_ext=factor * x.tau_ext)
        assert on < perplexity(model, shuffle=False, inference=other), x
    assert prepared(memory, tmp_path, None, **flags)[0].inference == x  # nothing to build or tune


def test_flags(tmp_path, store, monkeypatch, capsys):
    assert prepared('ext', tmp_path, memory='local', stride=5)[0].stride == 5
    assert 'find itself' in one_line(prepared, 'ext', tmp_path, split='train')
    assert [*prepared('ext', tmp_path, memory='none')[0].ways()] == ['off']
    assert [*prepared('none', tmp_path)[0].ways()] == ['off']
    other = SimpleNamespace(folder=Path('o'), train=CORPUS.val, fingerprint='o')    # Table 5
    model, _ = prepared('local', tmp_path, external=other, split='train')
    assert (model.store.text.numpy() == CORPUS.val.tokens).all() and model.inference.n_neighbors > 0
    other.fingerprint = 'another text'
    assert 'delete it' in one_line(prepared, 'local', tmp_path, external=other)
    models = (prepared('long', tmp_path, long=n)[0] for n in (60, 0))              # Figure 3
    at_60, at_0 = (perplexity(model, **model.ways()['on']) for model in models)
    assert at_60 < at_0
    monkeypatch.setattr(trime, 'Datastore', lambda *_: store.store)
    for store.store.nprobe, found in ((1, ' [2-9].[.]'), (2, ' 100.0')):            # of two lists
        prepared('none', tmp_path, memory='ext', recall=True)
        assert re.search(f'recall{found}', capsys.readouterr().out)


@pytest.mark.parametrize('preset, millions, memory, kind', [
    ('7m', 7, 'local', 'segments'), ('150m', 150, 'long', 'consecutive'),
    ('247m', 247, 'ext', 'packed'), ('enwik8', 38, 'long', 'consecutive')])
def test_presets(preset, millions, memory, kind):
    """Table 9, within 2%: there are no biases here."""
    fields, values = vars(TRIMEConfig()), PRESETS[preset]
    config = TRIMEConfig(**{k: v for k, v in values.items() if k in fields}, memory=memory)
    with torch.device('meta'):
        n = sum(p.numel() for p in TRIME(config).parameters())
    assert n == pytest.approx(millions * 1e6, rel=0.02) and trime.batches(config)['kind'] == kind


@pytest.mark.slow
@pytest.mark.parametrize('memory, p', [('ext', 0.9), ('ext', 0.0), ('none', 0.9)])
def test_what_only_other_segments_know_is_learned(memory, p):
    """Each micro-batch has a random function and pairs a, f(a) in all segments; f(a) is scored."""
    def make_batch(step):
        f, a = random_tokens(16, seed=step, vocab=16), random_tokens(8, 8, seed=-step, vocab=16)
        tokens = torch.stack([a, f[a]], dim=2).flatten(1)                           # (8, 16)
        targets = torch.stack([f[a], torch.full_like(a, -1)], dim=2).flatten(1)
        doc = torch.arange(8)[:, None].expand(8, 16)
        return SimpleNamespace(tokens=tokens, targets=targets, doc=doc, seed=step)
    config = small(memory, block_size=16, n_embd=32, vocab_size=16, p=p).config
    model = learn(TRIME(config), 250, make_batch).train()
    loss = np.mean([model(make_batch(step), 1.0)[0].item() for step in range(250, 300)])
    assert loss < 0.5 if memory == 'ext' else loss > 2.5                # ln 16 is 2.77
