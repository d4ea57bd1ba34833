"""The evaluator against the model's own probabilities, and its commands. Run: pytest tests/test_eval.py"""
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import train
from test_train import SMALL, here, texts  # noqa: F401  (fixtures)
from trime import TRIME, TRIMEConfig

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


@pytest.mark.parametrize('n', [3, T + 1, 4 * T, 4 * T + 3, 90])
@pytest.mark.parametrize('stride', [3, T])
def test_scores_are_the_models_probabilities(n, stride):
    """on and off = log_probs with and without memory; one evaluation pass equals streaming, window edges included."""
    model, tokens = small(stride=stride), np.random.default_rng(0).integers(0, 20, n).astype(np.uint16)
    scores = evaluation.trime_scores(model, tokens, [1.0, 1.6], quiet=True)
    inputs, targets = torch.from_numpy(tokens[:-1].astype(np.int64))[None], torch.from_numpy(tokens[1:].astype(np.int64))
    for key, memory, tau in (('off', 'none', 1.0), (('on', 1.0), 'local', 1.0), (('on', 1.6), 'local', 1.6)):
        model.memory, model.tau = memory, tau
        want = model.log_probs(inputs)[0].gather(1, targets[:, None])[:, 0].numpy()
        assert np.allclose(scores[key], want, atol=1e-4)
        state, got = None, []
        for piece in inputs.split(5, dim=1):
            log_probs, state = model.stream(piece, state)
            got.append(log_probs[0])
        assert np.allclose(scores[key], torch.cat(got).gather(1, targets[:, None])[:, 0].numpy(), atol=1e-4)


def test_shuffled_reads_other_windows_only():
    """Changing the second half of a text changes the shuffled scores of the first, and no `on` score of it."""
    model, rng = small(stride=T), np.random.default_rng(0)
    a = rng.integers(0, 20, 8 * T + 1)
    b = np.concatenate([a[:4 * T + 1], rng.integers(0, 20, 4 * T)])
    a, b = (evaluation.trime_scores(model, x, [1.0], quiet=True) for x in (a, b))
    first = slice(0, 4 * T)
    assert np.array_equal(a['on', 1.0][first], b['on', 1.0][first])
    assert np.abs(a['shuffled', 1.0][first] - b['shuffled', 1.0][first]).max() > 0.01
    assert np.array_equal(a['off'][first], b['off'][first])


@pytest.mark.parametrize('n, possible', [(3, False), (T + 1, False), (3 * T, True), (7 * T + 3, True), (8 * T + 2, True), (11 * T, True), (19 * T, True)])
def test_shuffled_needs_a_text_long_enough(n, possible):
    """No partner may overlap: it would hold the query's own answer."""
    scores = evaluation.trime_scores(small(stride=T), np.random.default_rng(0).integers(0, 20, n), [1.0], quiet=True)
    assert not np.isnan(scores['on', 1.0]).any()
    assert np.isfinite(scores['shuffled', 1.0]).all() == possible


def test_figures():
    """Two tokens at 1/4 and 1/2 in a text of 3 bytes and 2 words: 3 bits."""
    split = data.Split('val', np.zeros(3, np.uint16), np.array([0, 3]), 3, 2)
    x = evaluation.figures(np.log(np.array([0.25, 0.5])), split)
    assert x == pytest.approx(dict(tokens=2, loss=1.5 * np.log(2), ppl=2 ** 1.5, bits_per_byte=1.0, word_ppl=2 ** 1.5))


@pytest.fixture
def run(here):      # noqa: F811
    """A trained run, out/trime, in the current folder."""
    train.main(SMALL + ['--max-steps', '60', '--lr', '1e-2'])
    return Path('out/trime')


def command(monkeypatch, *flags):
    monkeypatch.setattr(sys, 'argv', ['eval.py', *flags])
    evaluation.main()


def test_the_standard_table(run, monkeypatch, capsys):
    command(monkeypatch, 'out/trime', '--json', 'figures.json')
    screen, figures = capsys.readouterr().out, json.loads(Path('figures.json').read_text())
    rows = figures['runs']['out/trime']['memory']
    assert {'off', 'on, τ = 1', 'shuffled'} <= rows.keys()
    n = len(data.load('texts', 'bytes', quiet=True).val.tokens)
    for x in rows.values():
        assert x['tokens'] == n - 1 and f'{x["ppl"]:.2f}' in screen and f'{x["bits_per_byte"]:.4f}' in screen
    helped = figures['runs']['out/trime']['helped']
    assert len(helped) == 3 and all(h['p_on'] > h['p_off'] and h['memories'] for h in helped)
    assert json.loads((run / 'tuned.json').read_text())['tau'] == figures['runs']['out/trime']['tau']
    assert evaluation.load('out/trime')[0].tau == figures['runs']['out/trime']['tau']


def test_what_helped_is_true(run):
    """The probability on memories that say the token, plus its word's share, is the probability that the model gives."""
    model, tokenizer = evaluation.load('out/trime')
    split = data.load('texts', 'bytes', quiet=True).val
    scores = evaluation.trime_scores(model, np.asarray(split.tokens), [1.0], quiet=True)
    for x in evaluation.trime_helped(model, tokenizer, split, scores, 1.0, remembered=16):
        assert tokenizer.decode(split.tokens[x['position']:x['position'] + 1]) == x['token']
        assert sum(m['share'] for m in x['memories']) <= x['p_on'] + 1e-6
        assert x['p_on'] <= x['p_off'] + sum(m['share'] for m in x['memories']) + 1e-6
        assert all(0 < m['tokens_ago'] < 16 for m in x['memories'])


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
