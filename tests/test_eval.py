"""The evaluator against the model's own probabilities, and its commands. Run: pytest tests/test_eval.py"""
import dataclasses
import itertools
import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import drt
import eval as evaluation
import rpt
import train
import trime
from test_train import DRT, RPT, SMALL, here, texts  # noqa: F401  (fixtures)
from test_trime import RECIPES, Store
from trime import TRIME, Recipe, TRIMEConfig

T = 8


def small(**more):
    torch.manual_seed(0)
    model = TRIME(TRIMEConfig(**{**dict(vocab_size=20, block_size=T, n_layer=2, n_head=2, n_embd=16), **more})).eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p) * (p.dim() == 2)
    return model


@pytest.mark.parametrize('n', [2, T, T + 1, T + 2, 3 * T, 50])
@pytest.mark.parametrize('stride', [1, 3, T])
def test_each_token_is_scored_once(n, stride):
    scored = [t for _, first, end in evaluation.windows(n, T, stride) for t in range(first, end)]
    assert scored == list(range(n - 1))
    for start, first, end in evaluation.windows(n, T, stride):
        assert end - start <= T and (first - start >= T - stride or start == 0)


def text_of(n, seed=0):
    """A split of one document of n random tokens."""
    return data.Split('val', np.random.default_rng(seed).integers(0, 20, n).astype(np.uint16), np.array([0, n]), n, n)


def fp32_store(n=30):
    generator = torch.Generator().manual_seed(5)
    return Store(torch.randn(n, 16, generator=generator), torch.arange(n) % 20)


TAU = [0.5, 0.7, 0.8, 1.0, 1.2, 1.3, 2.0]
SIZES = {'local': [evaluation.EVERY], 'long': [4, 10], 'ext': [2, 6], 'knn': [2, 6]}
SIZE = {'local': evaluation.EVERY, 'long': 10, 'ext': 6, 'knn': 6}


@pytest.mark.parametrize('n', [3, T + 1, 4 * T, 4 * T + 3, 90])
@pytest.mark.parametrize('stride', [3, T])
@pytest.mark.parametrize('sizes', [{}, dict(cutoffs='5,12', band_factor=2)])
def test_one_pass_has_every_recipes_probabilities(n, stride, sizes):
    """Vanilla, cache, kNN-LM, Eq. 6 to 9, from one pass = the model's own log_probs = streaming, window edges included."""
    model, split = small(stride=stride, **sizes), text_of(n)
    model.store, model.long, model.n_neighbors = fp32_store(), 10, 6
    stats = evaluation.trime_stats(model, split, list(SIZES), TAU, SIZES, quiet=True)
    inputs, targets = torch.from_numpy(split.tokens[:-1].astype(np.int64))[None], torch.from_numpy(split.tokens[1:].astype(np.int64))
    for recipe in RECIPES:
        model.recipe = recipe
        want = model.log_probs(inputs)[0].gather(1, targets[:, None])[:, 0]
        assert torch.allclose(evaluation.log_p(stats, recipe, SIZE), want, atol=2e-4), recipe
    state, got = None, []
    for piece in inputs.split(5, dim=1):
        log_probs, state = model.stream(piece, state)
        got.append(log_probs[0])
    assert torch.allclose(evaluation.log_p(stats, recipe, SIZE), torch.cat(got).gather(1, targets[:, None])[:, 0], atol=2e-4)


def test_smaller_sizes_are_smaller_memories():
    """The long memory's latest 4 and the best 2 of the datastore: as if there were no more."""
    model, split, recipe = small(stride=3), text_of(50), RECIPES[7]
    model.store = fp32_store()
    whole = evaluation.trime_stats(model, split, list(SIZES), TAU, SIZES, quiet=True)
    less = evaluation.trime_stats(model, split, list(SIZES), TAU, {**SIZES, 'long': [4], 'ext': [2], 'knn': [2]}, quiet=True)
    size = {**SIZE, 'long': 4, 'ext': 2}
    assert torch.allclose(evaluation.log_p(whole, recipe, size), evaluation.log_p(less, recipe, size), atol=1e-5)
    assert not torch.allclose(evaluation.log_p(whole, recipe, size), evaluation.log_p(whole, recipe, SIZE), atol=1e-2)


@pytest.mark.parametrize('same_document', [True, False])
def test_long_memory_stops_at_the_document(same_document):
    """Another first document: the second one's tokens notice only in mode --no-same-document, or through a window that has both."""
    model, a, b = small(stride=T, same_document=same_document), text_of(8 * T + 1), text_of(8 * T + 1, seed=1)
    b.tokens[4 * T:] = a.tokens[4 * T:]
    scores = []
    for split in (a, b):
        split = dataclasses.replace(split, offsets=np.array([0, 4 * T, 8 * T + 1]))
        stats = evaluation.trime_stats(model, split, ['local', 'long'], [1.0], {**SIZES, 'long': [1000]}, quiet=True)
        scores.append(evaluation.log_p(stats, Recipe(('local', 'long')), {**SIZE, 'long': 1000})[4 * T:])
    assert torch.equal(*scores) == same_document
    ends = evaluation.trime_stats(model, split, ['long'], [1.0], {'long': [1000]}, quiet=True).masses['long'][0, :, 0, 0]
    assert (ends[4 * T:5 * T] == -np.inf).all() == same_document and (ends[5 * T:] > -np.inf).all()


def test_shuffled_keeps_the_weights_and_changes_the_words():
    """Each memory says the word of the memory that is half the text away: by a loop."""
    model, split = small(stride=T), text_of(3 * T + 1)
    stats = evaluation.trime_stats(model, split, ['local'], [1.0], SIZES, quiet=True)
    got, n, tokens = evaluation.log_p(stats, Recipe(('local',)), SIZE, shuffled=True), len(split.tokens), split.tokens.astype(int)
    for start in range(0, 3 * T, T):
        f, g, _ = model.encode(torch.from_numpy(tokens[None, start:start + T]))
        z = model.embedding.log_mass(f[0])
        for i in range(T):
            mass = z[i].exp().tolist()
            for j in range(i):
                mass[tokens[(start + j + 1 + n // 2) % n]] += (g[0, i] @ g[0, j] / 4).exp().item()
            assert got[start + i].item() == pytest.approx(np.log(mass[tokens[start + i + 1]] / sum(mass)), abs=1e-4)
    assert not torch.allclose(got, evaluation.log_p(stats, Recipe(('local',)), SIZE), atol=0.01)


def test_tuning_from_the_pass_is_tuning_by_full_evaluation(monkeypatch):
    """No value of any one parameter is better than the tuned one, and a new pass with just those gives the same figure."""
    model, split, names = small(), text_of(200), ('local', 'long', 'ext')
    model.store = fp32_store()
    stats = evaluation.trime_stats(model, split, list(names), evaluation.TAUS, SIZES, quiet=True)
    x = evaluation.tune(stats, names, False)
    mean = lambda stats, x: evaluation.log_p(stats, *evaluation.recipe_of(names, False, x)).mean().item()
    assert x.keys() == {'tau', "tau'", 'lambda', 'long', 'K'}
    for key, values in evaluation.grid(names, False, SIZES).items():
        assert mean(stats, x) >= max(mean(stats, {**x, key: value}) for value in values) - 1e-7
    alone = evaluation.trime_stats(model, split, list(names), sorted({x['tau'], x["tau'"]}), {'local': SIZES['local'], 'long': [x['long']], 'ext': [x['K']]}, quiet=True)
    assert mean(alone, x) == pytest.approx(mean(stats, x), abs=1e-6)
    assert evaluation.tune(stats, names, False, long=4)['long'] == 4
    few = stats._replace(taus=[0.1, 0.8, 3.0])                              # every combination of a small grid
    monkeypatch.setattr(evaluation, 'TAUS', few.taus)
    monkeypatch.setattr(evaluation, 'LAMBDAS', [0.0, 0.2, 0.6])
    few = few._replace(masses={name: m[..., [stats.taus.index(tau) for tau in few.taus]] for name, m in stats.masses.items()})
    values = evaluation.grid(names, False, SIZES)
    best = max(mean(few, dict(zip(values, x))) for x in itertools.product(*values.values()))
    assert mean(few, evaluation.tune(few, names, False)) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize('start', [0, 3, T, 20, 49])
@pytest.mark.parametrize('stride', [3, T])
def test_datastore_entries(start, stride):
    """Every context of a text once, from any one on, each with the word that followed and the state it had when that was scored."""
    model, tokens = small(stride=stride), text_of(51).tokens
    pieces = list(evaluation.trime_entries(model, tokens, start))
    keys, values = torch.cat([k for k, _ in pieces]), np.concatenate([v for _, v in pieces])
    assert np.array_equal(values, tokens[start + 1:]) and len(keys) == 50 - start
    for position in range(start, 50):
        s, _, _ = next(w for w in evaluation.windows(51, T, stride) if w[1] <= position < w[2])
        _, g, _ = model.encode(torch.from_numpy(tokens[None, s:position + 1].astype(np.int64)))
        assert torch.allclose(keys[position - start], g[0, -1], atol=1e-5)


@pytest.mark.parametrize('recipe', RECIPES[1:], ids=range(len(RECIPES) - 1))
def test_remembered_shares(recipe):
    """The word's own share and those of the memories that say it make its probability, for every word; nothing else has any."""
    model, tokens = small(stride=3), text_of(60).tokens
    model.store, model.long, model.n_neighbors = fp32_store(), 10, 6
    for t in (0, 5, T, 30, 58):
        off, on, found = evaluation.remembered(model, tokens, t, recipe, SIZE)
        model.recipe = recipe
        want = model.log_probs(torch.from_numpy(tokens[None, :t + 1].astype(np.int64)))[0, -1]
        assert torch.allclose(on, want, atol=1e-4)
        left = 1 - sum(share for share, *_ in found)
        by_word = torch.zeros(20).index_add_(0, torch.tensor([w for *_, w in found], dtype=torch.int64), torch.tensor([share for share, *_ in found]))
        assert torch.allclose(on.exp(), off.exp() * left + by_word, atol=1e-4)
        assert found == sorted(found, reverse=True)
        for _, name, place, word in found:
            assert word == (model.store.values[place] if name in ('ext', 'knn') else tokens[place + 1])
            assert name in recipe.names and (name != 'local' or place < t)


def test_figures():
    """Two tokens at 1/4 and 1/2 in a text of 3 bytes and 2 words: 3 bits."""
    split = data.Split('val', np.zeros(3, np.uint16), np.array([0, 3]), 3, 2)
    x = evaluation.figures(-np.log(0.25) - np.log(0.5), 2, split)
    assert x == pytest.approx(dict(tokens=2, loss=1.5 * np.log(2), ppl=2 ** 1.5, bits_per_byte=1.0, word_ppl=2 ** 1.5))


def test_the_ends_of_documents_are_no_text():
    """--at-most counts bytes and words as data.py does: an end of document, 13 bytes when decoded, made bits per byte too small."""
    tokenizer = data.Tokenizer.from_dict(dict(name='bytes'))
    tokens = np.array([*b'ab c', tokenizer.eot, *b'de', tokenizer.eot, *b'fg'], dtype=np.uint16)
    part = evaluation.first_tokens(data.Split('val', tokens, np.array([0, 5, 8, 10]), 8, 4), 9, tokenizer)
    assert (len(part.tokens), part.n_bytes, part.n_words, part.offsets.tolist()) == (9, 7, 4, [0, 5, 8, 9])


@pytest.mark.parametrize('settings, ways', [(dict(), ['learned', 'random', 'off']), (dict(retriever='random'), ['random', 'off']), (dict(retriever='off'), ['off']),
                                            (dict(groups=0), ['off'])])
def test_the_ways_of_reading(settings, ways):
    """One trained without retrieval has one way: trace told what random chunks `gain` for it."""
    model = drt.DRT(drt.DRTConfig(vocab_size=9, n_embd=16, **settings))
    assert list(evaluation.switch(model)) == ways and model.retriever == model.config.retriever


@pytest.fixture(scope='session')
def trained(tmp_path_factory, texts):       # noqa: F811
    """A folder with a trained run in it, out/trime, and its corpus."""
    folder, before = tmp_path_factory.mktemp('trained'), os.getcwd()
    (folder / 'texts').symlink_to(texts)
    os.chdir(folder)
    train.main(SMALL + ['--max-steps', '60', '--lr', '1e-2'])
    os.chdir(before)
    return folder


@pytest.fixture
def run(here, trained):      # noqa: F811
    """A copy of it in the current folder."""
    for name in ('out', 'corpora'):
        shutil.copytree(trained / name, here / name)
    return Path('out/trime')


def command(monkeypatch, *flags):
    monkeypatch.setattr(sys, 'argv', ['eval.py', *flags])
    evaluation.main()


def test_the_standard_table(run, monkeypatch, capsys):
    command(monkeypatch, 'out/trime', '--json', 'figures.json')
    screen, figures = capsys.readouterr().out, json.loads(Path('figures.json').read_text())['runs']['out/trime']
    rows = figures['memory']
    assert list(rows) == ['off', 'local', 'shuffled']
    n = len(data.load('texts', 'bytes', quiet=True).val.tokens)
    for x in rows.values():
        assert x['tokens'] == n - 1 and f'{x["ppl"]:.2f}' in screen and f'{x["bits_per_byte"]:.4f}' in screen
    assert rows['local']['loss'] != rows['shuffled']['loss']
    assert len(figures['helped']) == 3 and all(h['p_on'] > h['p_off'] and h['memories'] for h in figures['helped'])
    assert evaluation.load('out/trime')[0].recipe == Recipe(('local',), figures['tuned']['local']['tau'])


def test_parts_of_a_split(run, monkeypatch, capsys):
    """Fewer tokens than the tuning takes, and more: the figures are of the tokens asked for, and of no others."""
    model, tokenizer = evaluation.load('out/trime')
    tokens = data.load('texts', 'bytes', quiet=True).val.tokens
    for tune in (500, 10 ** 6):
        monkeypatch.setattr(evaluation, 'TUNE', tune)
        for n in (300, 0):
            command(monkeypatch, 'out/trime', '--at-most', str(n), '--json', 'a.json')
            x = json.loads(Path('a.json').read_text())['runs']['out/trime']
            text = tokenizer.decode(tokens[:n or None].tolist())
            assert x['memory']['off']['tokens'] == len(tokens[:n or None]) - 1 and x['words'] == len(text.split())
            model.recipe = Recipe()
            want = model.log_probs(torch.from_numpy(tokens[None, :300].astype(np.int64)))[0, :-1].gather(1, torch.from_numpy(tokens[1:300, None].astype(np.int64)))
            if n:
                assert x['memory']['off']['loss'] == pytest.approx(-want.mean().item(), abs=1e-4)


def test_all_memories_in_one_table(run, monkeypatch, capsys):
    """Each combination; the datastore is built once, found again, used by generate and neighbors, and refused for other weights."""
    train.main(SMALL + ['--max-steps', '5', '--memory', 'none', '--out', 'out/vanilla'])
    capsys.readouterr()
    flags = ['out/trime', 'out/vanilla', '--n-neighbors', '20', '--long', '300']
    command(monkeypatch, *flags, '--memory', 'all', '--split', 'test', '--json', 'a.json')
    screen, runs = capsys.readouterr().out, json.loads(Path('a.json').read_text())['runs']
    assert screen.count('datastore out/') == 2
    for run in runs.values():
        assert list(run['memory']) == ['off', 'local', 'local,long', 'ext', 'local,ext', 'local,long,ext']
        assert run['memory']['ext']['loss'] < run['memory']['off']['loss']
        assert run['tuned']['local,long,ext'].keys() == ({'tau_cache', 'lambda_cache', 'tau_knn', 'lambda_knn', 'long', 'K'} if run['linear']
                                                         else {'tau', "tau'", 'lambda', 'long', 'K'})
    command(monkeypatch, 'out/trime', '--task', 'neighbors', '--memory', 'ext', '--prompt', 'the old cat sees', '--json', 'b.json')
    screen, found = capsys.readouterr().out, json.loads(Path('b.json').read_text())['out/trime']
    assert ', document 0, token ' in screen and 'datastore out/' not in screen
    train_text = data.load('texts', 'bytes', quiet=True).train.tokens
    tokenizer = evaluation.load('out/trime')[1]
    for m in found['memories']:
        if m['memory'] == 'ext':
            assert tokenizer.decode(train_text[m['place'] + 1:m['place'] + 2].tolist()) == m['token']
            assert tokenizer.decode(train_text[max(0, m['place'] - 11):m['place'] + 1].tolist()) == m['context']
    command(monkeypatch, 'out/trime', '--task', 'generate', '--memory', 'local,ext', '--prompt', 'the old', '--max-tokens', '20')
    assert 'the old' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='not tuned yet. First: python eval.py out/trime --memory long'):
        command(monkeypatch, 'out/trime', '--task', 'neighbors', '--memory', 'long', '--prompt', 'the')
    for source in ([], ['--datastore-from', 'texts']):
        with pytest.raises(SystemExit, match='each token would find itself'):
            command(monkeypatch, 'out/trime', '--memory', 'ext', '--split', 'train', *source)


@pytest.mark.slow
def test_the_analyses(run, monkeypatch, capsys):
    """Frequency, retrieval, sweep: their numbers are the table's, cut another way."""
    flags = ['out/trime', '--n-neighbors', '20', '--long', '600', '--json', 'a.json']
    corpus, figures = data.load('texts', 'bytes', quiet=True), lambda: json.loads(Path('a.json').read_text())
    command(monkeypatch, *flags, '--memory', 'all')
    rows, tuned = figures()['runs']['out/trime']['memory'], figures()['runs']['out/trime']['tuned']
    command(monkeypatch, *flags, '--task', 'frequency', '--memory', 'all')
    for name, buckets in figures().items():
        buckets = [b for b in buckets.values() if b['tokens']]
        n = sum(b['tokens'] for b in buckets)
        assert n == len(corpus.val.tokens) - 1
        assert sum(b['tokens'] * np.log(b['ppl']) for b in buckets) / n == pytest.approx(rows[name.split()[1]]['loss'], abs=1e-5)
    command(monkeypatch, 'out/trime/best.pt', *flags[1:], '--task', 'sweep')     # a file: the picture goes beside it
    ppl = figures()['out/trime/best.pt']
    assert list(ppl) == ['0', '256', '512', '600'] and ppl['0'] == pytest.approx(rows['local']['ppl'], rel=1e-5)
    assert ppl[str(tuned['local,long']['long'])] == pytest.approx(rows['local,long']['ppl'], rel=1e-5)
    assert (run / 'sweep.png').stat().st_size > 1000
    command(monkeypatch, *flags, '--task', 'retrieval')
    top = figures()['out/trime']
    model, _ = evaluation.load('out/trime')
    store = trime.Datastore(next(run.glob('datastore-*')))
    tokens = np.asarray(corpus.val.tokens)
    keys = torch.cat([k for k, _ in evaluation.trime_entries(model, tokens, 0)])
    rows = (keys @ torch.from_numpy(np.array(store.keys)).float().T).topk(20).indices
    said = store.said(rows) == torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
    for K in (1, 8, 20):
        assert top[str(K)] == pytest.approx(said[:, :K].any(1).double().mean().item(), abs=0.01)       # the search is not exhaustive


def test_a_datastore_from_another_corpus(run, monkeypatch, capsys, tmp_path):
    """--datastore-from: the same weights, another text; what is retrieved is named by it."""
    other = tmp_path / 'other'
    other.mkdir()
    (other / 'train.txt').write_text('a stone sees the tree ' * 200)
    (other / 'val.txt').write_text('a stone sees the river ' * 20)
    command(monkeypatch, 'out/trime', '--memory', 'ext', '--datastore-from', str(other), '--n-neighbors', '10', '--data', str(other))
    screen = capsys.readouterr().out
    assert 'datastore-other' in screen and 'other, document 0' in screen
    assert not (run / 'tuned.json').exists()                            # tuned on another text: not this run's


def test_several_runs_make_one_table_and_one_plot(run, monkeypatch, capsys):
    train.main(SMALL + ['--max-steps', '5', '--memory', 'none', '--out', 'out/vanilla'])
    command(monkeypatch, 'out/trime', 'out/vanilla', '--split', 'test')
    screen = capsys.readouterr().out
    assert 'out/vanilla' in screen and Path('out/trime/compare.png').stat().st_size > 1000


def test_generation(run, monkeypatch, capsys):
    """The same seed, the same text; the prompt first; temperature 0 is greedy and equals arg max by full forward passes."""
    model, tokenizer = evaluation.load('out/trime')
    text = lambda **more: ''.join(evaluation.generate(model, tokenizer, 'the old', max_tokens=40, **more))
    assert text() == text() != text(seed=1) and text().startswith('the old')
    ids = tokenizer.encode('the old').tolist()
    for _ in range(40):
        ids.append(model.log_probs(torch.tensor([ids]))[0, -1].argmax().item())
        if ids[-1] == tokenizer.eot:
            break
    assert text(temperature=0) == tokenizer.decode([i for i in ids if i != tokenizer.eot])
    command(monkeypatch, 'out/trime', '--task', 'generate', '--prompt', 'the old', '--max-tokens', '40')
    assert text() in capsys.readouterr().out


def test_generation_stops_at_the_end_of_text_and_keeps_characters_whole():
    """A model that says é byte by byte, then the end."""
    tokenizer = data.Tokenizer.train('bytes')
    script = [*'né'.encode()] + [tokenizer.eot] + [65] * 9

    class Says(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def stream(self, tokens, state=None):
            said = state or 0
            return torch.full((1, 1, 257), -100.0).index_fill_(2, torch.tensor([script[said]]), 0.0), said + 1
    pieces = list(evaluation.generate(Says(), tokenizer, '', temperature=0))
    assert ''.join(pieces) == 'né' and not any('\ufffd' in p for p in pieces)


def test_bad_flags_get_one_line(run, monkeypatch):
    for flags, message in ((['--stride', '-5'], '--stride -5'), (['--stride', '99'], '--stride 99'), (['--tau', '0'], '--tau 0')):
        with pytest.raises(SystemExit, match=message):
            command(monkeypatch, 'out/trime', *flags)


def test_another_version_of_the_corpus_is_noticed(run, monkeypatch, capsys, tmp_path):
    checkpoint = torch.load('out/trime/best.pt', weights_only=True)
    checkpoint['corpus'] = 'another'
    torch.save(checkpoint, tmp_path / 'other.pt')
    command(monkeypatch, str(tmp_path / 'other.pt'), '--tau', '1')
    assert 'another version of texts' in capsys.readouterr().err


@pytest.mark.parametrize('path, message', [('nowhere', 'does not exist'), ('notes.pt', 'is no checkpoint')])
def test_bad_checkpoints_get_one_line(tmp_path, path, message):
    (tmp_path / 'notes.pt').write_bytes(b'not a checkpoint')
    with pytest.raises(SystemExit, match=message):
        evaluation.load(tmp_path / path)


@pytest.fixture(scope='session')
def trained_drt(tmp_path_factory, texts):       # noqa: F811
    """A folder with out/drt and its base LM, out/base."""
    folder, before = tmp_path_factory.mktemp('drt'), os.getcwd()
    (folder / 'texts').symlink_to(texts)
    os.chdir(folder)
    for name, groups in (('drt', '1'), ('base', '0')):
        train.main(DRT + ['--max-steps', '20', '--lr', '1e-2', '--groups', groups, '--out', f'out/{name}'])
    os.chdir(before)
    return folder


def test_drt_by_length(trained_drt, monkeypatch, capsys):
    """Every token but the first is scored at each length, retrieval on, random, off; at the training length `on` is train.py's own figure."""
    monkeypatch.chdir(trained_drt)
    command(monkeypatch, 'out/drt', 'out/base', '--json', 'figures.json')
    screen, runs = capsys.readouterr().out, json.loads(Path('figures.json').read_text())['runs']
    n = len(data.load('texts', 'bytes', quiet=True).val.tokens)
    assert list(runs['out/drt']['rows']) == [f'{name} {L}' for name in ('on', 'random', 'off') for L in (4, 35, 70, 140)]
    assert list(runs['out/base']['rows']) == [f'off {L}' for L in (4, 35, 70, 140)]
    for path, name in (('out/drt', 'on'), ('out/base', 'off')):
        rows = runs[path]['rows']
        assert all(x['tokens'] == n - 1 and f'{x["ppl"]:.2f}' in screen for x in rows.values())
        last = json.loads(Path(path, 'log.jsonl').read_text().splitlines()[-1])
        best = torch.load(f'{path}/best.pt', weights_only=True)['step'] == last['step']
        assert not best or rows[f'{name} 35']['loss'] == pytest.approx(last['val_loss_all'], abs=1e-5)
    assert runs['out/drt']['rows']['on 140']['loss'] != runs['out/drt']['rows']['off 140']['loss'] != runs['out/drt']['rows']['random 140']['loss']
    assert runs['out/drt']['rows']['on 4']['loss'] == runs['out/drt']['rows']['off 4']['loss']      # one chunk: nothing to fetch


def test_trace(trained_drt, monkeypatch, capsys):
    """What the screen says was fetched is what the model fetched, and the gain is that of its log P."""
    monkeypatch.chdir(trained_drt)
    command(monkeypatch, 'out/drt', '--task', 'trace', '--json', 'trace.json')
    screen, x = capsys.readouterr().out, json.loads(Path('trace.json').read_text())['out/drt']
    model, tokenizer = evaluation.load('out/drt')
    tokens = data.load('texts', 'bytes', quiet=True).val.tokens[:140]
    inputs, targets = torch.from_numpy(tokens.astype(np.int64))[None], torch.from_numpy(tokens[1:].astype(np.int64))
    on = model.log_probs(inputs)[0, :-1].gather(1, targets[:, None])[:, 0]
    _, _, [(w, idx)] = model.encode(inputs)
    model.retriever = 'off'
    gain = torch.cat([on - model.log_probs(inputs)[0, :-1].gather(1, targets[:, None])[:, 0], torch.zeros(1)])
    for about in x['chunks']:
        c = about['chunk']
        own = gain[7 * c:7 * c + 7]
        if c < 19:                                                          # the last token of the text has another one after it in the split
            assert about['gain'] == pytest.approx(own.sum().item(), abs=1e-4)
        assert about['text'] == tokenizer.decode(tokens[7 * c:7 * c + 7].tolist()) and repr(about['text']) in screen
        assert [(i, pytest.approx(p, abs=1e-5)) for i, p, _ in about['found'][0]] == [(i, p) for i, p in zip(idx[0, c].tolist(), w[0, c].tolist()) if i >= 0]
    with pytest.raises(SystemExit, match='without retrieval'):
        command(monkeypatch, 'out/base', '--task', 'trace')


def test_weights_of_another_version_get_one_line(trained_drt, tmp_path):
    checkpoint = torch.load(trained_drt / 'out/drt/ckpt.pt', weights_only=True)
    checkpoint['model']['upper.0.0.norm1.gain'] = checkpoint['model'].pop('upper.0.norm1.gain')
    torch.save(checkpoint, tmp_path / 'old.pt')
    with pytest.raises(SystemExit, match='old.pt has weights of another version of this house'):
        evaluation.load(tmp_path / 'old.pt')


def test_drt_generates_and_refuses_what_it_has_not(trained_drt, monkeypatch, capsys):
    monkeypatch.chdir(trained_drt)
    command(monkeypatch, 'out/drt', '--task', 'generate', '--prompt', 'the old ', '--max-tokens', '40', '--temperature', '0')
    on, seen = capsys.readouterr().out, []
    equip = evaluation.equip
    monkeypatch.setattr(evaluation, 'equip', lambda *a: seen.append(equip(*a)) or seen[-1])
    command(monkeypatch, 'out/drt', '--task', 'generate', '--prompt', 'the old ', '--max-tokens', '4', '--retriever', 'off', '--offload')
    assert on.startswith('the old ') and capsys.readouterr().out.startswith('the old ')
    assert (seen[0][0].retriever, seen[0][0].offload) == ('off', True)
    with pytest.raises(SystemExit, match='drt has table, generate, trace'):
        command(monkeypatch, 'out/drt', '--task', 'neighbors')
    with pytest.raises(SystemExit, match='a text has no figures'):
        command(monkeypatch, 'out/drt', '--task', 'generate', '--json', 'a.json')
    with pytest.raises(SystemExit, match='--memory says nothing to drt'):
        command(monkeypatch, 'out/drt', '--memory', 'local')


@pytest.fixture(scope='session')
def trained_rpt(tmp_path_factory, texts):       # noqa: F811
    """A folder with out/rpt, its reference LM, out/retro and out/plain, on documents."""
    folder, before = tmp_path_factory.mktemp('rpt'), os.getcwd()
    (folder / 'many').symlink_to(texts / 'many')
    os.chdir(folder)
    for name, retriever in (('rpt', 'sem'), ('retro', 'bm25'), ('plain', 'none')):
        train.main(RPT + ['--max-steps', '20', '--lr', '1e-2', '--dropout', '0', '--retriever', retriever, '--out', f'out/{name}'])
    os.chdir(before)
    return folder


def test_rpt_by_length(trained_rpt, monkeypatch, capsys):
    """Own neighbors, those of another sequence, none; the last is the model that never reads, on the same weights."""
    monkeypatch.chdir(trained_rpt)
    command(monkeypatch, 'out/rpt', 'out/retro', 'out/plain', '--json', 'figures.json')
    runs = json.loads(Path('figures.json').read_text())['runs']
    lengths = 8, 70, 140, 280, 'whole'
    assert list(runs['out/rpt']['rows']) == list(runs['out/retro']['rows']) == [f'{name} {L}' for name in ('on', 'shuffled', 'off') for L in lengths]
    assert list(runs['out/plain']['rows']) == [f'off {L}' for L in lengths]
    for path, name in (('out/rpt', 'on'), ('out/retro', 'on'), ('out/plain', 'off')):
        rows = runs[path]['rows']
        last = json.loads(Path(path, 'log.jsonl').read_text().splitlines()[-1])
        best = torch.load(f'{path}/best.pt', weights_only=True)['step'] == last['step']
        assert not best or rows[f'{name} 70']['loss'] == pytest.approx(last['val_loss_all'], abs=1e-5)
        if name == 'on':
            assert len({rows[f'{how} 70']['loss'] for how in ('on', 'shuffled', 'off')}) == 3
            assert rows['shuffled 280'] is None                             # some documents have no others without padding beside them
            assert rows['on 8']['loss'] == rows['off 8']['loss'] == pytest.approx(rows['shuffled 8']['loss'], abs=1e-5)     # two chunks: nothing to find
    model = evaluation.load('out/rpt')[0]                                    # shuffled: each beside another document's, which does not count
    corpus = data.load('many', 'bytes', quiet=True)
    pieces = data.Batches(corpus.val, 'documents', 70, 2, seed=0)
    beside = evaluation.BesideOthers(pieces)
    total = n = 0
    for row in range(len(beside)):
        batch, own = beside.take(np.array([row]), 0), pieces.take(np.array([row]), 0)
        assert torch.equal(batch.tokens[0], own.tokens[0]) and (batch.targets[1] == -1).all() and (batch.doc[1] >= 0).all()
        assert not set(batch.doc[0].tolist()) & set(batch.doc[1].tolist())
        model.reads = 'shuffled'
        log_probs = model.say(model.encode(batch.tokens, batch.doc)[0])[0]
        total, n = total - log_probs.gather(1, batch.targets[0].clamp(min=0)[:, None])[:, 0][batch.targets[0] >= 0].sum().item(), n + (batch.targets[0] >= 0).sum().item()
    assert runs['out/rpt']['rows']['shuffled 70']['loss'] == pytest.approx(total / n, abs=1e-4) and n == runs['out/rpt']['rows']['on 70']['tokens']
    with pytest.raises(ValueError, match='only one'):
        model.encode(batch.tokens[:1])
    total, n = {}, 0                                                        # whole documents, one by one; shuffled: the text after each
    offsets, tokens = corpus.val.offsets, torch.from_numpy(corpus.val.tokens.astype(np.int64))
    for a, b in zip(offsets, offsets[1:]):
        own, after = tokens[a:b], torch.cat([tokens, tokens])[b:b + b - a]
        for model.reads in ('own', 'shuffled', 'none'):
            f = model.encode(torch.stack([own, after]))[0][0, :-1]
            total[model.reads] = total.get(model.reads, 0) - model.say(f).gather(1, own[1:, None]).sum().item()
        n += len(own) - 1
    for name, how in (('on', 'own'), ('shuffled', 'shuffled'), ('off', 'none')):
        assert runs['out/rpt']['rows'][f'{name} whole']['tokens'] == n and runs['out/rpt']['rows'][f'{name} whole']['loss'] == pytest.approx(total[how] / n, abs=1e-4)
    more = runs['out/rpt']['rows']['on 280']['loss']
    command(monkeypatch, 'out/rpt', '--n-neighbors', '4', '--json', 'figures.json')
    assert json.loads(Path('figures.json').read_text())['runs']['out/rpt']['rows']['on 280']['loss'] != more
    command(monkeypatch, 'out/rpt', '--task', 'generate', '--prompt', 'the old cat sees the old tree ', '--max-tokens', '30', '--n-neighbors', '3')
    assert 'the old cat sees' in capsys.readouterr().out


def test_rpt_trace(trained_rpt, monkeypatch, capsys):
    monkeypatch.chdir(trained_rpt)
    command(monkeypatch, 'out/rpt', '--task', 'trace', '--json', 'trace.json')
    screen, x = capsys.readouterr().out, json.loads(Path('trace.json').read_text())['out/rpt']
    model, tokenizer = evaluation.load('out/rpt')
    split = data.load('many', 'bytes', quiet=True).val
    batch = data.Batches(split, 'documents', 280, 1, seed=0).take(np.array([0]), 0)
    f, _, found = model.encode(batch.tokens, batch.doc)
    model.reads = 'none'
    off = model.encode(batch.tokens, batch.doc)[0]
    log_p = [model.say(y)[0, :-1].gather(1, batch.tokens[0, 1:, None])[:, 0] for y in (f, off)]
    real = batch.targets[0, :-1] >= 0                                       # the ends of documents predict nothing
    assert not real.all() and x['gain'] == pytest.approx((log_p[0] - log_p[1])[real].sum().item() / (batch.targets >= 0).sum().item(), abs=1e-4)
    for about in x['chunks']:
        c = about['chunk']
        assert about['gain'] == pytest.approx((log_p[0] - log_p[1])[4 * c - 1:4 * c + 3].sum().item(), abs=1e-4)     # of the tokens of chunk c
        assert [i for i, *_ in about['found'][0]] == [k for k in found[0, c - 1].tolist() if k >= 0]
        assert about['found'][0][0][2] == tokenizer.decode(batch.tokens[0, 4 * about['found'][0][0][0]:][:8].tolist()) and repr(about['text']) in screen
    for flags, message in ((['out/plain'], 'without retrieval'), (['out/rpt', '--at-most', '4'], 'too few for one chunk'), (['out/rpt', '--at-most', '20'], 'too few')):
        with pytest.raises(SystemExit, match=message):
            command(monkeypatch, *flags, '--task', 'trace')
    with pytest.raises(SystemExit, match='4 tokens of val are fewer than an eighth of the training length, 8'):
        command(monkeypatch, 'out/rpt', '--at-most', '4')
    command(monkeypatch, 'out/rpt', '--at-most', '300', '--json', 'one.json')      # one document: it is the longest
    assert {row.split()[-1] for row in json.loads(Path('one.json').read_text())['runs']['out/rpt']['rows']} >= {'8', '70', '140'}


def test_ranks(trained_rpt, monkeypatch, capsys):
    """Every figure of the retrieval table once more, with loops, from every permitted chunk's score."""
    monkeypatch.chdir(trained_rpt)
    command(monkeypatch, 'out/rpt', 'out/retro', 'out/plain', 'out/plain/ckpt.pt', '--task', 'ranks', '--sequences', '3', '--chunks', '100', '--json', 'ranks.json')
    screen, x = capsys.readouterr().out, json.loads(Path('ranks.json').read_text())
    corpus = data.load('many', 'bytes', quiet=True)
    pieces = data.Batches(corpus.val, 'documents', 70, 1, seed=0)
    model, plain = evaluation.load('out/rpt')[0], evaluation.load('out/plain')[0]
    reference, _, fold, _ = rpt.open_reference('out/rpt-reference', evaluation.load('out/rpt')[1], 4)
    assert fold == 0
    P, R, G, gains, right, overlap, best, on_target, latest, by_chance = [], [], [], [], [], [], [], [], [], []
    for row in np.linspace(0, pieces.n_rows - 1, 3).round().astype(int):
        batch = pieces.take(np.array([row]), 0)
        chunks, docs = batch.tokens[0, :68].view(17, 4), batch.doc[0, :68].view(17, 4)
        own, none = (log_p(m, batch) for m in (model, plain))
        scores, found = model.encode(batch.tokens, batch.doc)[1:]
        for i in range(16):
            whole = lambda c: docs[c].unique().tolist() == [docs[i, -1].item()]
            allowed = [k for k in range(i - 3) if whole(i) and whole(k)]
            if not allowed or not whole(i + 1) or docs[i, -1] < 0:
                continue
            s_t = {}
            for k in [i - 2, *allowed]:
                prompt = torch.cat([chunks[k], chunks[k + 1], chunks[i], chunks[i + 1]])[None]
                s_t[k] = reference.log_probs(prompt)[0, 11:15].gather(1, chunks[i + 1, :, None]).mean().item()
            s_t = {k: s_t[k] - s_t[i - 2] for k in allowed}
            order = sorted(allowed, key=lambda k: -scores[0, i, k].item())
            positive = [k for k in allowed if s_t[k] > 0]
            gains.append((own - none)[4 * i + 3:4 * i + 7].mean().item())
            on_target.append(own[4 * i + 3:4 * i + 7].mean().item())
            right.append(any(k in positive for k in found[0, i].tolist()))
            overlap.append(len(set(chunks[order[0]].tolist()) & set(chunks[i + 1].tolist())))
            mined = rpt.mine(chunks.numpy(), np.zeros(17, int), 4, 20)[i] if whole(0) else None
            if positive:
                P.append(sum(k in positive for k in order[:2]) / 2)
                R.append(sum(k in positive for k in order[:10]) / len(positive))
                dcg = lambda ks: sum((2 ** max(0, s_t[k]) - 1) / math.log2(2 + r) for r, k in enumerate(ks[:20]))
                G.append(dcg(order) / dcg(sorted(allowed, key=lambda k: -s_t[k])))
                latest.append(dcg(sorted(allowed, reverse=True)) / dcg(sorted(allowed, key=lambda k: -s_t[k])))
                by_chance.append(len(positive) / len(allowed) * min(2, len(allowed)) / 2)
            if mined is not None:
                best.append(max(s_t[k] for k in mined if k >= 0) * 4 if (mined >= 0).any() else None)
    y = x['retrievers']['out/rpt']
    assert x['chunks'] == len(gains) > 5 and list(x['retrievers']) == ['chance', 'the latest first', 'BM25', 'out/rpt', 'out/retro']
    expected = dict(precision_2=np.mean(P), recall_10=np.mean(R), ndcg_20=np.mean(G), gain=np.mean(gains), overlap_target=np.mean(overlap), right=np.mean(right),
                    gain_right=np.mean([g for g, r in zip(gains, right) if r]), nll=-np.mean(on_target))
    for name, value in expected.items():
        assert y[name] == pytest.approx(value, abs=1e-3), name      # s_t is tiny here, in fp32
    assert x['retrievers']['the latest first']['ndcg_20'] == pytest.approx(np.mean(latest), abs=1e-3)
    assert x['retrievers']['chance']['precision_2'] == pytest.approx(np.mean(by_chance), abs=0.03) and 'overlap_query' not in x['retrievers']['chance']
    assert x['largest_by_k'] == sorted(x['largest_by_k']) and f'{len(gains)} chunks' in screen and f'{y["ndcg_20"]:.1%}' in screen
    assert x['retrievers']['BM25']['precision_2'] == x['retrievers']['out/retro']['precision_2'] and 'upper bound' in screen
    for flags in (['out/retro'], ['out/plain', 'out/retro']):
        with pytest.raises(SystemExit, match='--reference CKPT'):
            command(monkeypatch, *flags, '--task', 'ranks')
    command(monkeypatch, 'out/retro', '--task', 'ranks', '--reference', 'out/rpt-reference', '--sequences', '2', '--n-neighbors', '4', '--json', 'four.json')
    assert 'NaN' not in Path('four.json').read_text() + Path('ranks.json').read_text()
    other = torch.load('out/plain/ckpt.pt', weights_only=True)
    other['tokenizer'] = dict(name='word', tokens=['<unk>', '<eos>', *map(str, range(255))])       # as many ids, other words
    torch.save(other, 'other.pt')
    with pytest.raises(SystemExit, match='tokenizers: one table needs the same'):
        command(monkeypatch, 'out/rpt', 'other.pt', '--task', 'ranks')
    with pytest.raises(SystemExit, match='no such folder'):
        command(monkeypatch, 'out/rpt', '--json', 'nowhere/figures.json')
    with pytest.raises(SystemExit, match='--offload says nothing to rpt'):
        command(monkeypatch, 'out/rpt', '--offload')


def log_p(model, batch):
    return model.say(model.encode(batch.tokens, batch.doc)[0])[0].gather(1, batch.targets[0].clamp(min=0)[:, None])[:, 0].detach()
