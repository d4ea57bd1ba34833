"""eval.py: its numbers by hand, its commands with a stand-in model, three models in one table."""
import http.server, itertools, json, math, os, pickle, queue, shutil, subprocess, sys, threading
import types, urllib.parse
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data, train
import eval as evaluation
from test_data import one_line, write, write_splits
from test_train import FLAGS, flags, log_p

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
        self.config, self.strength, self.streamed, self.lengths_read = config, 1.0, [], []
        generator, V = torch.Generator().manual_seed(0), config.vocab_size
        self.table = torch.nn.Parameter(torch.randn(V, V, generator=generator))
        self.matrix = torch.nn.Parameter(torch.ones(config.width, config.width))
        BIGRAM.made.append(self)

    def stream(self, tokens, state=None):
        start = 0 if state is None else state
        self.streamed.append((self.strength, start, tokens[0].tolist()))
        return (self.strength * self.table[tokens]).log_softmax(-1), self.read(tokens, state)

    def read(self, tokens, state=None):
        self.lengths_read.append(tokens.numel())
        return (state or 0) + tokens.numel()

    def forward(self, batch, progress):
        q = batch.tokens[:, None, :, None] * torch.ones(self.config.width) @ self.matrix
        return F.scaled_dot_product_attention(q, q, q).mean() + 0 * self.table.sum(), {}

    def prepare_eval(self, corpus, external, args, path, progress):
        self.on = args.strength

    def ways(self):
        return {'on': dict(strength=self.on), 'shuffled': dict(strength=-self.on),
                'off': dict(strength=0.0)}

    def trace(self, tokens, t):
        return [(0.75 * self.strength, tokens, t - 1, t + 1),
                (0.25, np.frombuffer(b'a datastore', np.uint8), 2, 6)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with two corpora and the run `a` of the stand-in; a function that makes more."""
    monkeypatch.chdir(tmp_path)
    others = [text.replace('third', 'forth') for text in TEXTS]
    for folder, texts in (('texts', TEXTS), ('b/texts', others)):
        write_splits(tmp_path / folder, texts, texts)
    for name in ('bigram', 'bigram2', 'unknown'):
        module = types.ModuleType(name)
        tasks = dict(count=lambda runs, args: dict(tokens=len(runs[0].split.tokens)))
        vars(module).update({name.upper(): BIGRAM, name.upper() + 'Config': BIGRAMConfig,
                             'EvalConfig': EvalConfig, 'TASKS': tasks,
                             'batches': lambda config: dict(chunk=5)})
        monkeypatch.setitem(sys.modules, name, module)
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
    result = evaluate('a', '--task', 'table', '--strength', '0.5')
    assert BIGRAM.made[-1].streamed == [                    # each once, in pieces of 512
        (x, start, [*text.encode()][start:start + 512]) for x in (0.5, -0.5, 0.0)
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
    run('b/best.pt', texts='b/texts', model_name='bigram2')         # same name, bytes, words
    run('c/best.pt', tokenizer='bpe')
    assert 'different texts' in one_line(evaluation.main, ['a', 'b'])
    evaluation.main(['a', 'b', '--task', 'table', '--data', 'texts'])
    assert 'tokenizers' not in capsys.readouterr().out
    result = evaluate('a', 'c', '--task', 'table')
    assert 'tokenizers differ' in capsys.readouterr().out
    assert result['rows'][5]['bits/byte'] < result['rows'][2]['bits/byte']  # fewer tokens
    Path('texts/train.jsonl').write_text('{"text": "new"}')
    evaluation.main(['a', '--task', 'table'])
    assert 'another version' in capsys.readouterr().err


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
    for name, content in other.items():
        torch.save(content, name)
    Path('hostile.pt').write_bytes(pickle.dumps(Hostile(), protocol=2))
    for path in (*other, 'hostile.pt', 'texts/val.jsonl', 'nothing'):
        assert path in one_line(evaluation.load, path)
    assert not os.path.exists('hostile')


@pytest.mark.parametrize('flags, words', [
    ('a --temprature 1', 'the nearest is --temperature'), ('--task table', 'RUN'),
    ('a c --task count', 'examples'), ('a --split test', 'split test'), ('a --json no/x', 'no/x'),
    ('a --html .', '. cannot'), ('a --task table --html x', 'examples'),
    ('a --context a/best.pt', '--context a/best.pt'), ('a --lengths 511', '512'),
    ('a --lengths 1kk', '512'), ('a --depths 101', '%')])
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
    assert (x['text'], x['retrieved'][0]['text']) == ('some tex', 'ex')


def page_of(path):
    """What --html wrote into the template, and that it wrote nothing else"""
    template = Path(evaluation.__file__).with_name('assets') / 'trace.html'
    before, after = template.read_text('utf-8').split('{{runs}}')
    page = Path(path).read_text('utf-8')
    assert page.startswith(before) and page.endswith(after)
    assert '<' not in page[len(before):-len(after)]                 # neither </script> nor <!--
    return json.loads(page[len(before):-len(after)])


def test_the_page_shows_a_document(run, monkeypatch):
    """The chunks whose loss differs most, each traced at its token that differs most."""
    text = '</script><script>alert(1)</script> <b>né</b> <!-- {{runs}} "\\u2028 end'
    ids = [*text.encode()]
    monkeypatch.setattr(evaluation, 'REREAD', 6 * len(ids))                         # six traces
    evaluate('a', '--task', 'examples', '--prompt', text, '--html', 'p.html')
    page, = page_of('p.html')
    assert ''.join(page['tokens']) == text and len(page['tokens']) == len(ids)
    loss = -BIGRAM(BIGRAMConfig()).table.detach().log_softmax(-1)[ids[:-1], ids[1:]]
    assert page['on'] == pytest.approx([0, *loss.tolist()], abs=1e-3)
    assert page['off'] == pytest.approx([0] + [math.log(257)] * len(loss), abs=1e-3)
    gain = np.array(page['off']) - page['on']
    chunks = sorted(range(0, len(ids), 5), key=lambda i: -abs(gain[i:i + 5].sum()))[:6]
    assert {int(i): trace for i, trace in page['traces'].items()} == {
        i: [dict(weight=0.75, start=i - 2, end=i, ago=1,
                 text=text.encode()[i - 2:i].decode(errors='replace')),
            dict(weight=0.25, start=2, end=6, ago=None, text='data')]
        for i in (int(a + abs(gain[a:a + 5]).argmax()) for a in chunks)}
    page = '--task', 'examples', '--html', 'p.html'
    assert 'two tokens' in one_line(evaluate, 'a', *page, '--prompt', 'x')
    evaluate('a', *page)
    assert ''.join(page_of('p.html')[0]['tokens']) == TEXTS[1] + '<|endoftext|>'    # the longest


def test_the_default_tasks_and_those_of_a_model(run, monkeypatch, capsys):
    """The JSON file has every number of the screen; what is scored once is not scored again."""
    run('c/best.pt')
    result = evaluate('a', 'c', '--max-tokens', '5')
    screen = capsys.readouterr().out
    assert [row['run'] for row in result['table']['rows']] == [*'aaaccc']
    assert all(f'{row["loss"]:#.5g}' in screen for row in result['table']['rows'])
    assert [x['run'] for x in result['examples']] == ['a', 'c']
    for x in result['samples']:                 # without memory it is another text
        assert list(x['texts']) == ['text', 'on', 'off'] and x['texts']['on'] != x['texts']['off']
        assert all(text in screen for text in x['texts'].values())
    scored = [start for _, start, tokens in BIGRAM.made[-1].streamed if len(tokens) > 1]
    assert scored.count(0) == 9 and os.path.exists('a/loss.png')
    assert max(map(len, screen.splitlines())) <= 160
    assert evaluate('a', 'c', '--task', 'count') == dict(tokens=len(''.join(TEXTS).encode()) + 3)
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    evaluation.main(['a', '--max-tokens', '1'])
    assert 'matplotlib' in capsys.readouterr().err


def test_generate():
    """Temperature 0: the likeliest; top_k; top_p: the fewest of that mass; the seed decides."""
    model, tokenizer = BIGRAM(BIGRAMConfig()), data.Tokenizer('bytes')
    table, draw = model.table.data, lambda *args, **more: evaluation.generate(
        model, tokenizer, *args, **more)
    table[:] = -math.inf
    table[:, 97:101] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert draw('x', 400, temperature=0) == 400 * 'a'
    for top_k, top_p, kept in ((0, 0.0, 'a'), (0, 0.35, 'a'), (0, 0.45, 'ab'), (0, 0.69, 'ab'),
                               (0, 0.75, 'abc'), (2, 1.0, 'ab'), (2, 0.57, 'a')):   # a: 4/7 of ab
        assert set(draw('x', 400, temperature=1.0, top_k=top_k, top_p=top_p)) == set(kept)
    assert draw('x', 400, temperature=1.0).count('a') == pytest.approx(160, abs=40)     # four sigma
    half = draw('x', 400, temperature=0.5).count('a')
    assert half == pytest.approx(400 * 0.16 / 0.30, abs=40)                     # p^2
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    ids = [*'né 你!'.encode(), 256]                         # ends with <|endoftext|>
    table[[ord('b'), *ids[:-1]], ids] = 99.0
    model.streamed.clear()
    assert draw('ab', 50, temperature=0) == 'né 你!'
    assert [tokens for *_, tokens in model.streamed] == [[x] for x in [ord('b'), *ids[:-1]]]
    table[256, 97] = 99.0
    assert draw('', 1, 0) == 'a' and model.streamed[-1][2] == [256]
    assert evaluation.repeated([1, 2, 3, 1, 2, 3, 1], n=2) == 0.5       # of 12 23 31 12 23 31
    assert evaluation.repeated([1, 2, 3], n=8) == evaluation.repeated([1, 2, 3, 4], n=2) == 0


def test_the_context_comes_before_the_prompt(run, capsys):
    """The same as a longer prompt; rates are those of the new tokens, 8 in all, over the time."""
    Path('book').write_text('Ein Büchlein. ')
    flags = 'a --task generate --max-tokens 8 --prompt'.split()
    whole = evaluate(*flags, 'Ein Büchlein. né')
    assert evaluate(*flags, 'né', '--context', 'book') == whole
    assert capsys.readouterr().out.count(' tokens/s') == 4
    x, = evaluate('a', '--task', 'examples', '--context', 'book', '--prompt', 'x')
    assert x['retrieved'][0]['text'] == ' x'


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
        for b, (x, y) in enumerate(line.get_xydata()):
            part = [-p for doc in log_p for i, p in enumerate(doc, 1) if 2**b <= i < 2**(b + 1)]
            assert 2 ** b <= x <= 2 ** (b + 1) and y == pytest.approx(np.mean(part), rel=1e-5)
        assert 2 ** b <= max(map(len, log_p)) < 2 ** (b + 1)            # the longest is in the last
    assert list(curves.lines[0].get_ydata()) == [5.0, 4.0]


def test_speed(run, monkeypatch):
    """Reading: the second half of a text, then 32 tokens. MACs: a (w, w) matrix, and attention."""
    run('c/best.pt', width=16, block_size=32)
    times = [10, 12, 15, 20, 24, 30, 30, 33, 34, 40, 42, 43]            # before, between, after
    times = itertools.chain(times, itertools.count(0, 3))
    monkeypatch.setattr(evaluation, 'clock', lambda tensor: next(times))
    result = evaluate('a', 'c', '--task', 'speed', '--lengths', '1k,2050')
    expected = [(2 / 512, 3 / 32), (4 / 1025, 6 / 32), (3 / 512, 1 / 32), (2 / 1025, 1 / 32)]
    for x, name, text, (read, step) in zip(result['reading'], 'aacc', ('1k', '2050') * 2, expected):
        assert (x['run'], x['text']) == (name, text) and 50 < x['peak MB'] < 100_000
        assert [x['read µs'], x['step µs']] == pytest.approx([1e6 * read, 1e6 * step])
    for model in BIGRAM.made[-2:]:
        assert model.lengths_read == [512, 512] + 32 * [1] + [1025, 1025] + 32 * [1]
    rows = result['training']
    for row, w, T in zip(rows, (4, 16), (8, 32)):
        matrix, attention = w * w, 2 * T * w                    # 2 and 3 times, with gradients
        assert row['MACs/token'] == 2 * matrix + 3 * attention and row['s/token'] == 1.5 / T
    assert rows[1]['MACs ratio'] == rows[1]['MACs/token'] / rows[0]['MACs/token']
    assert rows[1]['time ratio'] == 0.25


def test_the_three_models_in_one_table(run, monkeypatch):
    """The same tokens for all; log_p is log_probs of the whole document; a page with traces."""
    monkeypatch.setattr(train, 'MODELS', tuple(FLAGS))
    monkeypatch.setattr(evaluation, 'REREAD', 16_000)                   # ten traces of each
    text = 'abc def\n' * 50 + 'the end\n' * 50
    texts = [text[i:] + text for i in (0, 1, 300, 797)]
    write_splits(Path('texts'), texts, texts)
    for name in FLAGS:
        train.main(flags(name))
    names = [f'out/{name}' for name in FLAGS]
    result = evaluate(*names, '--max-tokens', '3', '--html', 'p.html')
    assert [(row['run'], row['way']) for row in result['table']['rows']] == [
        (name, way) for name in names for way in ('on', 'shuffled', 'off')]
    assert [x['run'] for x in result['examples'] if x['retrieved']] == names
    train.main(flags('drt', '--groups 0 --out out/base'))
    shutil.copytree('texts', 'more')
    corpus = '--task', 'table', '--retrieve-from', 'more'
    first, again = (evaluate(*names[1:], 'out/base', *corpus)['rows'] for _ in 'ab')
    ways = ['on', 'corpus', 'both', 'shuffled', 'off']
    assert first == again and [x['way'] for x in first] == [*ways, *ways, 'off']
    found = evaluate(*names[1:], '--task', 'examples', *corpus[2:])
    assert {x['run'] for x in found for y in x['retrieved'] if y['ago'] is None} == {*names[1:]}
    texts = evaluate('out/rpt', '--task', 'generate', '--max-tokens', '2', *corpus[2:])[0]['texts']
    assert list(texts) == ['text', 'both', 'off']
    Path('tiny.txt').write_text('ab')
    for more, message in (('--split train', 'find itself'), ('--retrieve-from tiny.txt', 'chunk'),
                          ('--task speed', 'table, examples')):
        assert message in one_line(evaluate, 'out/rpt', *corpus, *more.split())
    os.truncate(next(Path('out/drt').glob('best-index-more-*')), 999)
    weights = Path('out/rpt/best.pt').read_bytes()
    Path('out/rpt/best.pt').write_bytes(Path('out/rpt/ckpt.pt').read_bytes())
    for name in names[1:]:                                      # of another checkpoint; damaged
        assert 'delete it' in one_line(evaluate, name, *corpus)
    Path('out/rpt/best.pt').write_bytes(weights)
    pages = page_of('p.html')
    assert [(page['run'], page['size']) for page in pages] == list(zip(names, (1, 7, 4)))
    for r, page in zip(map(evaluation.Run, names), pages):
        args, _ = evaluation.parse([], [r])
        r.open_text(args, 'cpu')
        if r.name == 'out/trime':
            r.model.prepare_eval(r.corpus, r.corpus, args, r.path, data.progress)
        r.ways = r.model.ways()
        for way in ('off', 'on'):
            r.set_way(way)
            tokens = r.documents[1]
            torch.testing.assert_close(r.log_p(tokens), log_p(r.model, tokens), atol=2e-4, rtol=0)
            for n in (1, 99):                       # read all but the last, as of a prompt
                last, _ = r.model.stream(tokens[None, n - 1:n], r.model.read(tokens[None, :n - 1]))
                expected = r.model.log_probs(tokens[None, :n])[:, -1:]
                torch.testing.assert_close(last, expected, atol=2e-4, rtol=0)
            tokens = max(r.documents, key=len)
            assert page[way][1:] == pytest.approx((-r.log_p(tokens)).tolist(), abs=2e-3)
        for i, found in list(page['traces'].items())[:5]:       # as trained: the last way was on
            expected = [(w, a, b) for w, _, a, b in r.model.trace(tokens, int(i) - 1)]
            assert [(x['weight'], x['start'], x['end']) for x in found] == [
                (pytest.approx(w, abs=1e-4), a, b) for w, a, b in expected[:32]]


def test_needles_are_found_by_a_model_that_copies(run, monkeypatch):
    """It predicts what followed the last 15 bytes, "Key ABCD opens ", when they first occurred."""
    def stream(self, tokens, state=None):
        text = tokens if state is None else torch.cat([state, tokens], dim=1)
        text_bytes = text[0].numpy().astype(np.uint8).tobytes()
        following = text_bytes[text_bytes.find(text_bytes[-15:], 0, end) + 15:][:1] or b'?'
        return F.one_hot(torch.tensor([list(following)]), 257).float().log(), text

    monkeypatch.setattr(BIGRAM, 'read', lambda self, x, state=None: x, False)
    monkeypatch.setattr(sys.modules['bigram'], 'batches', lambda config: dict(chunk=31))
    flags, end = ['a', '--task', 'niah', '--lengths', '512,1k', '--depths', '0,50,100'], None
    assert evaluate(*flags)[0]['right'] == 0
    monkeypatch.setattr(BIGRAM, 'stream', stream)
    rows = evaluate(*flags)
    assert [(row['tokens'], row['needles']) for row in rows] == [('512', 30), ('1k', 30)]
    assert all(row[depth] == row['right'] == 1 for row in rows for depth in ('0%', '100%'))
    assert all(row['right'] == 0 for row in evaluate(*flags, '--data', 'niah2:texts'))
    end = 99                                                    # it sees the first needle alone
    assert [(row['0%'], row['50%'], row['100%']) for row in evaluate(*flags)] == [(1, 0, 0)] * 2


@pytest.mark.parametrize('flag', ['--json', '--html'])
def test_what_cannot_be_written_is_one_line(run, monkeypatch, flag):
    monkeypatch.setattr(train, 'write', lambda *_: os.write(-1, b''))           # OSError
    assert 'descriptor' in one_line(evaluate, 'a', '--task', 'examples', flag, 'x')


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


@pytest.mark.slow
def test_the_page_in_a_browser(run):
    """A headless Chromium of the PATH opens the page, presses keys, and reports what is shown."""
    browser = next(filter(shutil.which, ('chromium', 'chromium-browser', 'google-chrome')), None)
    if not browser:
        pytest.skip('no Chromium')
    evaluate('a', '--task', 'examples', '--html', 'p.html')
    page, = page_of('p.html')
    errors = '<script>const errors = []; onerror = (...what) => errors.push(String(what))</script>'
    script = """<script>
        const shown = [panel.innerText]
        for (const key of ['Escape', 'Home', 'ArrowRight', 'End', 'ArrowDown', 'ArrowUp']) {
          const on = key === 'Escape' ? document : document.activeElement
          on.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))
          shown.push(panel.innerText)
        }
        panel.querySelector('li button').click()
        shown.push([...document.querySelectorAll('.source')].map(x => x.textContent).join(''))
        fetch('/?' + encodeURIComponent(JSON.stringify([errors, shown])))</script>"""
    Path('p.html').write_text(errors + Path('p.html').read_text('utf-8') + script, 'utf-8')
    asked = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):        # serves this folder
        def do_GET(self):
            asked.put(urllib.parse.unquote(self.path))
            super().do_GET()

    server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}/p.html'
    options = '--headless', '--no-sandbox', '--no-zygote', '--disable-gpu', '--user-data-dir=.'
    process = subprocess.Popen([browser, *options, url])
    try:
        reports = (path[2:] for path in iter(lambda: asked.get(timeout=60), None) if path[1] == '?')
        errors, (*shown, source) = json.loads(next(reports))
    finally:
        process.kill()
        process.wait()
        server.shutdown()
    traced = sorted(map(int, page['traces']))
    best = max(traced, key=lambda i: page['off'][i] - page['on'][i])
    chosen = best, best, *traced[:2], traced[-1], traced[-1], traced[-2]
    assert errors == [] and source == page['traces'][str(traced[-2])][0]['text']    # "Go to it"
    for i, panel in zip(chosen, shown, strict=True):
        assert panel.startswith(f'Token {i:,}: ') and 'weight 0.7500, 1 tokens ago' in panel
