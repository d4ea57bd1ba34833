"""eval.py: its numbers by hand, its commands with a stand-in model, three models in one table."""
import json, math, os, pickle, re, sys, types
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data, drt, train, trime
import eval as evaluation
from helpers import FLAGS, flags, log_p, one_line, write, write_splits

TEXTS = ['The first text has\nsome words.\n', 'third\n' * 800, 'A text of two lines,\nénd this.\n']


@dataclass
class BIGRAMConfig:
    vocab_size: int = 257           # ids
    block_size: int = 8             # tokens
    micro_batch: int = 2            # sequences
    width: int = 4                  # of the matrix that only `speed` uses


@dataclass
class EvalConfig:
    strength: float = 1.0           # of the way `on`


class BIGRAM(torch.nn.Module):
    """P(next | token) = softmax(strength * table). off is uniform, shuffled the reverse of on."""
    made, PIECE = [], 512           # all models; tokens that one call of stream gets

    def __init__(self, config):
        super().__init__()
        self.config, self.strength, self.streamed, self.prepared = config, 1.0, [], None
        generator, V = torch.Generator().manual_seed(0), config.vocab_size
        self.table = torch.nn.Parameter(torch.randn(V, V, generator=generator))
        self.matrix = torch.nn.Parameter(torch.ones(config.width, config.width))
        BIGRAM.made.append(self)

    def stream(self, tokens, state=None):
        start = 0 if state is None else state
        self.streamed.append((self.strength, start, tokens[0].tolist()))
        return (self.strength * self.table[tokens]).log_softmax(-1), self.read(tokens, state)

    def read(self, tokens, state=None):
        return (state or 0) + tokens.numel()

    def forward(self, batch, progress):
        q = batch.tokens[:, None, :, None] * torch.ones(self.config.width) @ self.matrix
        return F.scaled_dot_product_attention(q, q, q).mean() + 0 * self.table.sum(), {}

    def prepare_eval(self, corpus, external, args, path, progress):
        self.on, self.prepared = args.strength, (corpus.name, external.name, path)

    def ways(self):
        return {'on': dict(strength=self.on), 'shuffled': dict(strength=-self.on),
                'off': dict(strength=0.0)}

    def trace(self, tokens, t):
        return [(0.75 * self.strength, tokens, t - 1, t + 1),
                (0.25, np.frombuffer(b'a datastore', np.uint8), 2, 6)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with two corpora and the run `a` of the stand-in; a function that makes more"""
    monkeypatch.chdir(tmp_path)
    others = [text.replace('third', 'forth') for text in TEXTS]
    for folder, texts in (('texts', TEXTS), ('b/texts', others)):
        write_splits(tmp_path / folder, texts, texts)
    for name in ('bigram', 'bigram2', 'unknown'):
        module = types.ModuleType(name)
        tasks = dict(count=lambda runs, args: dict(tokens=len(runs[0].split.tokens)))
        vars(module).update({name.upper(): BIGRAM, name.upper() + 'Config': BIGRAMConfig,
                             'TASKS': tasks, 'batches': lambda config: dict(chunk=31)})
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules['bigram'].EvalConfig = EvalConfig
    monkeypatch.setattr(train, 'MODELS', ('bigram', 'bigram2'))

    def make(path='a/best.pt', model_name='bigram', texts='texts', tokenizer='bytes', **more):
        corpus = data.load(texts, tokenizer, vocab_size=270, quiet=True)
        config = BIGRAMConfig(corpus.tokenizer.n_vocab, **more)
        os.makedirs(Path(path).parent, exist_ok=True)
        torch.save(dict(
            model_name=model_name, config=asdict(config), model=BIGRAM(config).state_dict(), step=3,
            tokens=1234, best=1.0, data=texts, tokenizer=corpus.tokenizer.to_dict(),
            corpus=corpus.fingerprint), path)
        log = [dict(step=1, tokens=8, loss=5.0), dict(step=2, tokens=16, loss=4.0, val_loss=4.5)]
        Path(path).with_name('log.jsonl').write_text('\n'.join(map(json.dumps, log)))

    make()
    return make


def evaluate(*flags):
    """-> what --json FILE has"""
    evaluation.main([*flags, '--json', 'out.json'])
    return json.loads(Path('out.json').read_text())


def log_p_by_hand(strength):
    """Of the tokens of each text but the first; texts end with <|endoftext|>, 256."""
    log_p = (strength * BIGRAM(BIGRAMConfig()).table.detach().double()).log_softmax(1)
    texts = [[*text.encode(), 256] for text in TEXTS]
    return [log_p[ids[:-1], ids[1:]].tolist() for ids in texts]


def test_the_table_by_hand(run):
    torch.set_float32_matmul_precision('medium')            # as after training in bf16
    result = evaluate('a', '--task', 'table', '--strength', '0.5')
    assert torch.get_float32_matmul_precision() == 'highest'
    assert BIGRAM.made[-1].streamed == [                    # each once, in pieces of 512
        (x, start, [*text.encode()][start:start + 512]) for x in (0.5, 0.0, -0.5)
        for text in TEXTS for start in range(0, len(text.encode()), 512)]
    n_bytes, n_words = len(''.join(TEXTS).encode()), len(' '.join(TEXTS).split())
    assert (result['bytes'], result['words'], result['documents']) == (n_bytes, n_words, 3)
    assert result['scored'] == n_bytes                  # <|endoftext|> is, the first one is not
    off, ways = log_p_by_hand(0.0), dict(on=0.5, shuffled=-0.5, off=0.0)
    for row, (way, strength) in zip(result['rows'], ways.items(), strict=True):
        total = -sum(map(sum, log_p := log_p_by_hand(strength)))
        expected = {'run': 'a', 'way': way, 'params': 257 ** 2 + 16, 'trained on': 1234,
            'loss': total / n_bytes, 'ppl': math.exp(total / n_bytes),
            'bits/byte': total / math.log(2) / n_bytes, 'word ppl': math.exp(total / n_words)}
        for key, value in expected.items():
            assert row[key] == value or row[key] == pytest.approx(value, rel=1e-4), key     # fp32
        for name, first, last in (('<512', 1, 511), ('<1,024', 512, 1023), ('<2,048', 1024, 2047),
                                  ('<4,096', 2048, 4095), ('4,096+', 4096, 9999)):
            part = [-x for doc in log_p for i, x in enumerate(doc, 1) if first <= i <= last]
            assert row[name] == pytest.approx(sum(part) / len(part), rel=1e-5), name
        differences = [(sum(a) - sum(b), len(a)) for a, b in zip(log_p, off)]
        mean = sum(D for D, _ in differences) / n_bytes
        squares = sum((D - mean * n) ** 2 for D, n in differences)
        assert row['gain over off'] == pytest.approx(mean, abs=1e-5)
        assert row['±'] == pytest.approx(math.sqrt(3 / 2 * squares) / n_bytes, rel=1e-3, abs=1e-6)
    Path('short.jsonl').write_text('{"text": "one short document"}')
    row = evaluate('a', '--task', 'table', '--data', 'short.jsonl', '--split', 'train')['rows'][0]
    assert row['±'] is None and row['<512'] > 0 and row['<1,024'] is None


def test_other_texts_are_refused_and_other_tokenizers_are_not(run, capsys):
    run('b/best.pt', texts='b/texts')                               # same name, bytes, words
    run('c/best.pt', tokenizer='bpe')
    assert 'different texts' in one_line(evaluation.main, ['a', 'b'])
    evaluation.main(['a', 'b', '--task', 'table', '--data', 'texts'])
    rows = evaluate('a', 'c', '--task', 'table')['rows']
    assert rows[5]['bits/byte'] < rows[2]['bits/byte'] and rows[5]['loss'] > 0      # fewer tokens
    Path('texts/train.jsonl').write_text('{"text": "new"}')
    evaluation.main(['a', '--task', 'table'])
    assert 'another version' in capsys.readouterr().err


def test_retrieve_from_reaches_each_model_that_can_use_it(run, monkeypatch):
    write_splits(Path('more'), TEXTS, TEXTS)
    evaluate('a', '--task', 'count', '--retrieve-from', 'more')
    assert BIGRAM.made[-1].prepared == ('texts', 'more', Path('a/best.pt'))
    evaluate('a', '--task', 'count')
    assert BIGRAM.made[-1].prepared == ('texts', 'texts', Path('a/best.pt'))
    monkeypatch.delattr(BIGRAM, 'prepare_eval')
    assert 'a retrieves' in one_line(evaluate, 'a', '--retrieve-from', 'more')


def test_a_run_is_its_best_weights_else_its_last(run):
    run('a/ckpt.pt', width=5)
    run('c/ckpt.pt', width=6)
    for path, width in (('a', 4), ('a/best.pt', 4), ('a/ckpt.pt', 5), ('c', 6)):
        model, tokenizer = evaluation.load(path)
        assert model.config.width == width and not model.training and tokenizer.n_vocab == 257
        assert evaluate(path, '--task', 'table')['rows'][0]['run'] == path


def test_what_is_no_checkpoint_is_one_line(run):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, ('hostile',)

    good = torch.load('a/best.pt', weights_only=True)
    other = dict(empty={}, unknown=dict(good, model_name='unknown'),
                 weights=dict(good, config=dict(good['config'], width=5)))
    for name, content in other.items(): torch.save(content, name)
    Path('hostile.pt').write_bytes(pickle.dumps(Hostile(), protocol=2))
    for path in (*other, 'hostile.pt', 'texts/val.jsonl', 'nothing'):
        assert path in one_line(evaluation.load, path)
    assert not os.path.exists('hostile')


@pytest.mark.parametrize('flags, words', [
    ('a --temprature 1', 'the nearest is --temperature'), ('--task table', 'RUN'),
    ('a c --task count', 'examples'), ('a --split test', 'split test'), ('a --json no/x', 'no/x'),
    ('a --json .', "'.'"), ('a --task niah --lengths 1kx', '--lengths'),
    ('a --task niah --lengths 64', '64'), ('a --task niah --lengths 512 --depths 0,1', '0,1'),
    ('a --task niah --depths 101', '--depths'), ('a --task niah --depths x', '--depths')])
def test_a_wrong_flag_is_one_line(run, flags, words):
    run('c/best.pt', model_name='bigram2')
    BIGRAM.made.clear()
    assert words in one_line(evaluation.main, flags.split())
    assert not any(model.streamed for model in BIGRAM.made)


def test_examples_are_where_the_gain_is_largest(run):
    """The token of each document with the largest gain, and what was read to predict it."""
    result = evaluate('a', '--task', 'examples')
    gains = [np.array(on) - off for on, off in zip(log_p_by_hand(1.0), log_p_by_hand(0.0))]
    expected = sorted(((x.max(), x.argmax(), d) for d, x in enumerate(gains)), reverse=True)
    for x, (gain, t, d) in zip(result, expected, strict=True):
        text = TEXTS[d].encode() + b'$'                                         # <|endoftext|>
        assert (x['document'], x['token'], x['gain']) == (d, t + 1, pytest.approx(gain, abs=1e-4))
        before, after = text[:t + 1][-32:].decode(), text[t + 1:][:16].decode()
        assert (x['before'], x['text'].replace('<|endoftext|>', '$')) == (before, after)
        assert x['retrieved'] == [
            dict(weight=0.75, start=t - 1, end=t + 1, ago=1, text=text[t - 1:t + 1].decode()),
            dict(weight=0.25, start=2, end=6, ago=None, text='data')]
    x, = evaluate('a', '--task', 'examples', '--prompt', 'some tex')
    assert (x['before'], x['retrieved'][0]['text']) == ('some tex', 'ex')


def test_the_default_tasks_and_those_of_a_model(run, monkeypatch, capsys):
    """The JSON file has every number of the screen; what is scored once is not scored again."""
    run('c/best.pt')
    result = evaluate('a', 'c', '--max-tokens', '5')
    screen = capsys.readouterr().out
    assert [row['run'] for row in result['table']['rows']] == [*'aaaccc']
    assert all(f'{row["loss"]:#.5g}' in screen for row in result['table']['rows'])
    assert [x['run'] for x in result['examples']] == ['a', 'c']
    for text, on, off in zip(*(result['samples'][i::3] for i in range(3)), strict=True):
        assert [x['way'] for x in (text, on, off)] == ['the document', 'on', 'off']
        assert text['text'] == TEXTS[1][2400:2405]
        assert on['prompt'] == off['prompt'] == TEXTS[1][1376:2400]         # up to its middle
        assert on['text'] != off['text'] and on['text'] in screen and off['text'] in screen
    scored = [start for _, start, tokens in BIGRAM.made[-1].streamed if len(tokens) > 1]
    assert scored.count(0) == 9 and os.path.exists('a/loss.png')
    assert max(map(len, screen.splitlines())) <= 160
    assert evaluate('a', 'c', '--task', 'count') == dict(tokens=len(''.join(TEXTS).encode()) + 3)
    Path('a/loss.png').unlink(), os.mkdir('a/loss.png')
    assert evaluate('a')['samples'] and 'no picture' in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    evaluation.main(['a', '--max-tokens', '1'])
    assert 'matplotlib' in capsys.readouterr().err
    monkeypatch.setattr(train, 'write', lambda *_: os.write(-1, b''))           # OSError
    assert 'descriptor' in one_line(evaluate, 'a', '--task', 'examples')


def test_generate():
    """Temperature 0: the likeliest; top_p: the fewest of that mass; the seed decides."""
    model, tokenizer = BIGRAM(BIGRAMConfig()), data.Tokenizer('bytes')
    table, draw = model.table.data, partial(evaluation.generate, model, tokenizer)
    table[:] = -math.inf
    table[:, 97:101] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert draw('x', 400, temperature=0) == 400 * 'a'
    for top_p, kept in ((0.0, 'a'), (0.35, 'a'), (0.45, 'ab'), (0.69, 'ab'), (0.75, 'abc')):
        assert set(draw('x', 400, temperature=1.0, top_p=top_p)) == set(kept)
    assert draw('x', 400, temperature=1.0).count('a') == pytest.approx(160, abs=40)     # four sigma
    assert draw('x', 400, temperature=0.5).count('a') == pytest.approx(213, abs=40)     # p^2
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    ids = [*'né 你!'.encode(), 256]                         # ends with <|endoftext|>
    table[[ord('b'), *ids[:-1]], ids] = 99.0
    model.streamed.clear()
    assert draw('ab', 50, temperature=0) == 'né 你!'
    assert [tokens for *_, tokens in model.streamed] == [[x] for x in [ord('b'), *ids[:-1]]]
    table[256, 97] = 99.0
    assert draw('', 1, 0) == 'a' and model.streamed[-1][2] == [256]


@pytest.mark.parametrize('text, share', [('abcdefgh' * 2, 1 / 9), ('abcdefgh', 0), ('abc', 0)])
def test_the_share_of_repeated_8_grams(run, monkeypatch, text, share):
    monkeypatch.setattr(evaluation, 'generate', lambda *_: text)
    rows = evaluate('a', '--task', 'generate')
    assert [row['way'] for row in rows] == ['the document', 'on', 'off']
    assert rows[1]['repeated'] == pytest.approx(share)
    assert rows[0]['text'] in ''.join(TEXTS) and rows[0]['repeated'] > 0.9      # 'third\n'


def test_the_plot_has_the_losses_by_position(run, monkeypatch):
    """A line for each way, of the table's log_p, in powers of two; block_size is a line."""
    figure, drawn = pytest.importorskip('matplotlib.figure'), []
    monkeypatch.setattr(figure.Figure, 'savefig', lambda self, *_, **__: drawn.append(self))
    evaluation.main(['a', '--max-tokens', '1'])
    curves, positions = drawn[0].axes
    block_size, *lines = positions.lines
    assert list(block_size.get_xdata()) == [8, 8]
    for line, strength in zip(lines, (1.0, -1.0, 0.0), strict=True):
        log_p = log_p_by_hand(strength)
        points = [(x, y) for x, y in line.get_xydata() if not math.isnan(y)]
        for b, (x, y) in enumerate(points):
            part = [-p for doc in log_p for i, p in enumerate(doc, 1) if 2**b <= i < 2**(b + 1)]
            assert 2 ** b <= x <= 2 ** (b + 1) and y == pytest.approx(np.mean(part), rel=1e-5)
        assert 2 ** b <= max(map(len, log_p)) < 2 ** (b + 1)            # the longest is in the last
    assert list(curves.lines[0].get_ydata()) == [5.0, 4.0]


def test_speed(run, monkeypatch):
    """MACs of a (w, w) matrix and of attention; medians of the times that the clock gives"""
    run('c/best.pt', width=16, block_size=32)
    times = [(9, 9), (1, 8), (4, 3), (2, 6), (9, 9), (3, 1)]    # the first while MACs are counted
    clock = iter([t for a, c in times for t in (0, a, 0, c)])           # medians 3 and 6
    monkeypatch.setattr(evaluation, 'time', SimpleNamespace(perf_counter=clock.__next__))
    rows = evaluate('a', 'c', '--task', 'speed')
    for row, w, T, seconds in zip(rows, (4, 16), (8, 32), (3, 6), strict=True):
        matrix, attention = w * w, 2 * T * w                    # 2 and 3 times, with gradients
        assert row['MACs/token'] == 2 * matrix + 3 * attention
        assert row['s/token'] == seconds / (2 * T)
    assert rows[1]['MACs ratio'] == rows[1]['MACs/token'] / rows[0]['MACs/token']
    assert rows[1]['time ratio'] == 0.5


def test_the_three_models_in_one_table(run, monkeypatch):
    """The same tokens for all; log_p is log_probs of the whole document; a prompt is read."""
    monkeypatch.setattr(train, 'MODELS', tuple(FLAGS))
    text = 'abc def\n' * 20 + 'the end\n' * 20
    texts = [text[i:] + text for i in (0, 1, 120, 317)]
    write_splits(Path('texts'), texts, texts)
    larger = {'trime': '--block-size 64 --tokens-per-step 256'}         # fewer windows
    for name in FLAGS: train.main(flags(name, larger.get(name, '')))
    names = [f'out/{name}' for name in FLAGS]
    result = evaluate(*names, '--max-tokens', '3')
    assert [(row['run'], row['way']) for row in result['table']['rows']] == [
        (name, way) for name in names for way in ('on', 'shuffled', 'off')]
    assert [x['run'] for x in result['examples'] if x['retrieved']] == names
    args = asdict(evaluation.EvalConfig()) | asdict(trime.EvalConfig()) | asdict(drt.EvalConfig())
    for r in map(evaluation.Run, names):
        r.prepare(SimpleNamespace(**args | dict(device='cpu')))
        for way in ('off', 'on'):
            vars(r.model).update(r.ways[way])
            tokens = r.documents[1]
            torch.testing.assert_close(r.log_p(tokens), log_p(r.model, tokens), atol=2e-4, rtol=0)
            for n in (1, 99):                       # read all but the last, as of a prompt
                last, _ = r.model.stream(tokens[None, n - 1:n], r.model.read(tokens[None, :n - 1]))
                expected = r.model.log_probs(tokens[None, :n])[:, -1:]
                torch.testing.assert_close(last, expected, atol=2e-4, rtol=0)
    train.main(flags('drt', '--groups 0 --out out/base'))               # from a corpus:
    write_splits(Path('more'), texts[:1], texts[1:])                    # TRIME's Table 5, DRT's 4
    names, corpus = ['out/trime', 'out/drt', 'out/base'], ('--retrieve-from', 'more')
    first, again = (Path('out/trime/tuned.json').write_text('{"torn') and
                    evaluate(*names, '--task', 'table', *corpus)['rows'] for _ in 'ab')
    assert first == again and ' '.join(row['way'] for row in first) == (
        'on shuffled off on corpus both shuffled off off')
    monkeypatch.setattr(trime, 'tune', lambda windows, x: replace(x, tau=9.0))      # other code
    evaluate('out/trime', '--task', 'table', *corpus)
    assert '"tau": 9' in Path('out/trime/tuned.json').read_text()
    found = evaluate(*names, '--task', 'examples', *corpus)
    assert {x['run'] for x in found for y in x['retrieved'] if y['ago'] is None} == {*names[:2]}
    rows = evaluate('out/drt', '--task', 'generate', '--max-tokens', '2', *corpus)
    assert [row['way'] for row in rows] == ['the document', 'both', 'off']


@pytest.mark.parametrize('task, hops', [('niah', 1), ('niah2', 2)])
def test_needles_are_found_by_a_model_that_reads_them(run, monkeypatch, task, hops):
    """It continues "Key A opens " by what `seen` bytes of the text have, over so many sentences."""
    def stream(self, tokens, state=None):
        text = bytes(torch.cat([state, tokens], dim=1)[0].clamp(max=255).tolist())
        ids = []
        for n in range(state.numel() + 1, len(text) + 1):
            question = re.search(rb'Key (\w{4}) opens ([\w, ]*)\Z', text[:n]) or 3 * [b'']
            names = [question[1]]
            for _ in range(known):
                names += re.findall(rb'Key %s opens (\w{4})\.' % names[-1], text[:seen])[:1]
            ids.append((b', '.join(names[1:]) + b'?' * 99)[len(question[2])])
        return F.one_hot(torch.tensor([ids]), 257).float().log(), None

    monkeypatch.setattr(BIGRAM, 'read', lambda self, x, state=None: x)
    monkeypatch.setattr(BIGRAM, 'stream', stream)
    flags = f'a --task niah --lengths 512,1k --depths 0,50,100 --data {task}:texts'.split()
    seen, known = None, hops
    rows = evaluate(*flags)
    assert [(row['tokens'], row['needles']) for row in rows] == [('512', 30), ('1k', 30)]
    assert all(row[key] == 1 for row in rows for key in ('right', '0%', '50%', '100%'))
    known = hops - 1                                            # a part of the answer
    assert [row['right'] for row in evaluate(*flags)] == [0, 0]
    seen, known = 31, 1                                         # the first needle alone
    if hops == 1:
        assert [(x['0%'], x['50%'], x['100%']) for x in evaluate(*flags)] == [(1, 0, 0)] * 2


@pytest.fixture
def weights(tmp_path, monkeypatch, request):
    """A copy of assets/NAME.pt, as eval.py writes beside it; drt.py as a corpus"""
    monkeypatch.chdir(tmp_path)
    folder = Path(evaluation.__file__).parent
    Path('copy.pt').write_bytes((folder / 'assets' / f'{request.param}.pt').read_bytes())
    source = (folder / 'drt.py').read_bytes()
    write(tmp_path, train_txt=source, val_txt=source)
    return 'copy.pt', '--data', '.'


@pytest.mark.parametrize('weights', ['trime', 'rpt', 'drt'], indirect=True)
def test_the_trained_weights_gain_by_what_they_read(weights):
    on, shuffled, _ = evaluate(*weights, '--task', 'table')['rows']
    assert on['gain over off'] > 0.06 and on['loss'] < shuffled['loss'] - 0.02


@pytest.mark.parametrize('weights', ['drt-niah'], indirect=True)
def test_the_trained_weights_find_needles(weights):
    rows = evaluate(*weights, '--task', 'niah', '--lengths', '4k')
    assert rows[0]['needles'] == 50 and rows[0]['right'] > 0.9, rows
