"""eval.py: its numbers by hand, its commands with a stand-in model, three models in one table."""
import gzip, html, io, itertools, json, math, os, pickle, re, shutil, subprocess, sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import approx, fixture, mark

import data, train, trime
import eval as evaluation
from compared import cache
import test_drt, test_trime
from helpers import flags, log_p, one_line, random_tokens, write, write_splits

TEXTS = ['The first text has\nsome words.\n', 'third\n' * 800, 'A text of two lines,\nénd this.\n']
WAYS = {'on': 1.0, 'shuffled': -1.0, 'off': 0.0}        # of the stand-in: signs of its strength


# --------------------------------------------------------------------------------------------------
# a stand-in for the models; this file is its model file
@dataclass
class BIGRAMConfig:
    vocab_size: int = 257           # ids
    block_size: int = 8             # tokens
    micro_batch: int = 2            # sequences
    width: int = 4                  # of the matrix that only `speed` uses
    groups: int = 1                 # of layers, for `trace`
    chunk: int = 31                 # tokens that are retrieved together


@dataclass
class EvalConfig:
    strength: float = 1.0           # of the way `on`


class BIGRAM(torch.nn.Module):
    """P(next | token) = softmax(strength * table). Its state is the number of tokens so far."""
    made, PIECE = [], 512           # all models; tokens that one call of stream gets

    def __init__(self, config):
        super().__init__()
        self.config, self.way, self.on = config, 'on', 1.0
        self.streamed, self.read_tokens = [], 0                 # what the calls got
        generator, V = torch.Generator().manual_seed(0), config.vocab_size
        self.table = torch.nn.Parameter(torch.randn(V, V, generator=generator, device='cpu'))
        self.matrix = torch.nn.Parameter(torch.ones(config.width, config.width))
        BIGRAM.made.append(self)

    def stream(self, tokens, state=None):
        state = state or 0
        strength = WAYS[self.way] * self.on
        self.streamed.append((strength, state, tokens[0].tolist()))
        log_probs = (strength * self.table[tokens]).log_softmax(-1)
        return log_probs, state + tokens.size(1)

    def read(self, tokens, state=None):
        self.read_tokens += tokens.numel()
        return (state or 0) + tokens.size(1)

    def forward(self, batch, progress):
        q = batch.tokens[:, None, :, None] * torch.ones(self.config.width) @ self.matrix
        return F.scaled_dot_product_attention(q, q, q).mean() + 0 * self.table.sum(), {}

    def ways(self):
        return tuple(WAYS)

    def trace(self, tokens, t, state=None, group=0):
        """The last tokens up to t, and four of another text; nothing at the beginning"""
        assert state in (None, t)                       # the state is that of the tokens before t
        if t < 2:
            return []
        datastore = np.frombuffer(b'a datastore', np.uint8)
        text = 0.75 - 0.25 * group, tokens, max(0, t - 150), t + 1
        return [text, (0.25, datastore, 2, 6)]


def batches(config):
    return dict(chunk=config.chunk)


def prepare_eval(model, corpus, external, args, path):
    model.on = args.strength
    print('prepared')
    model.prepared = corpus.name, external.name, path


def count(runs, args):
    """The tokens of the split -> their number"""
    return len(runs[0].split.tokens)


TASKS = dict(count=count)


@fixture
def run(tmp_path, monkeypatch):
    """A folder with a corpus and the run `a` of the stand-in; a function that makes more"""
    monkeypatch.chdir(tmp_path)
    write_splits(tmp_path / 'texts', TEXTS, TEXTS)
    monkeypatch.setattr(BIGRAM, '__module__', 'bigram')
    monkeypatch.setitem(sys.modules, 'bigram', sys.modules[__name__])
    monkeypatch.setattr(train, 'MODELS', {'bigram': 'bigram'})
    monkeypatch.setattr(train, 'find_model', lambda name: sys.modules[__name__].BIGRAM)

    def make(path='a/best.pt', texts='texts', tokenizer='bytes', **more):
        corpus = data.load(texts, tokenizer, vocab_size=270, quiet=True)
        config = BIGRAMConfig(corpus.tokenizer.n_vocab, **more)
        Path(path).parent.mkdir(exist_ok=True, parents=True)
        torch.save(dict(
            model_name='bigram', config=asdict(config), model=BIGRAM(config).state_dict(), step=3,
            tokens=1234, best=1.0, data=train.source(texts), tokenizer=corpus.tokenizer.to_dict(),
            corpus=corpus.fingerprint), path)

    make()
    return make


def evaluate(command, *more):
    """-> what --json FILE has"""
    evaluation.main([*command.split(), *more, '--json', 'out.json'])
    return json.loads(Path('out.json').read_text())


def log_p_by_hand(strength):
    """Of the tokens of each text but the first; texts end with <|endoftext|>, 256."""
    log_p = (strength * BIGRAM(BIGRAMConfig()).table.detach().double()).log_softmax(1)
    texts = [[*text.encode(), 256] for text in TEXTS]
    return [log_p[ids[:-1], ids[1:]].numpy() for ids in texts]


# --------------------------------------------------------------------------------------------------
# the table
def test_each_token_is_scored_once_in_each_way(run):
    """In pieces of 512; the way `off` is first, because all gains are over it."""
    torch.set_float32_matmul_precision('medium')            # as after training in bf16
    evaluate('a --task table --strength 0.5')
    assert torch.get_float32_matmul_precision() == 'highest'
    texts = [[*text.encode()] for text in TEXTS]
    expected = [(strength, start, ids[start:start + 512])
                for strength in (0.0, 0.5, -0.5)
                for ids in texts for start in range(0, len(ids), 512)]
    assert BIGRAM.made[-1].streamed == expected


def test_the_table_of_a_text(run):
    result = evaluate('a --task table')
    text = ''.join(TEXTS)
    n = len(text.encode())
    # <|endoftext|> is scored, the first token is not
    assert result['bytes'] == result['rows'][0]['scored'] == n
    assert (result['documents'], result['words']) == (3, len(text.split()))
    for row, (way, strength) in zip(result['rows'], WAYS.items(), strict=True):
        assert (row['run'], row['way'], row['trained on']) == ('a', way, 1234)
        loss = -np.concatenate(log_p_by_hand(strength)).mean()
        assert row['loss'] == approx(loss, rel=1e-5)
        for name, first, stop in (('<512', 1, 512), ('<1,024', 512, 1024), ('4,096+', 4096, 9999)):
            part = np.concatenate([x[first - 1:stop - 1] for x in log_p_by_hand(strength)])
            assert row[name] == approx(-part.mean(), rel=1e-5)


def test_the_metrics_by_hand():
    """The tokens of two documents gain 1, 2 and 0: 1 on average. D - gain n is 1 and -1."""
    log_p = [np.array([-1.0, -2.0]), np.array([-3.0])]
    log_p_off = [np.array([-2.0, -4.0]), np.array([-3.0])]
    row = evaluation.metrics(log_p, log_p_off, SimpleNamespace(n_bytes=4, n_words=3))
    assert row['loss'] == 2
    assert row['ppl'] == row['word ppl'] == approx(math.e ** 2)
    assert row['bits/byte'] == approx(1.5 / math.log(2))
    assert row['gain over off'] == 1
    assert row['±'] == approx(math.sqrt(2 / 1 * (1 + 1)) / 3)


@mark.parametrize('tokenizer, n_bytes', [('bytes', 2 + 4 + 2), ('word', 0 + 3 + 3)])
def test_bits_per_byte_are_of_the_bytes_that_are_scored(run, tokenizer, n_bytes):
    """A first token is half of é, or a word; an unknown word counts as none."""
    write_splits(Path('short'), ['éa bb cc', 'd'], ['éa', 'bb cc', 'x d'])
    run('c/best.pt', texts='short', tokenizer=tokenizer)
    result = evaluate('c --task table')
    row = result['rows'][0]
    nats = row['loss'] * row['scored']
    assert row['bits/byte'] == approx(nats / math.log(2) / n_bytes)


@mark.parametrize('task', ['table', 'frequency', 'repeats'])
def test_the_split_is_scored_and_not_the_text_of_training(run, task):
    """With another text in train all numbers of val are the same."""
    write_splits(Path('other'), ['the text of training ' * 9], TEXTS)
    run('b/best.pt', texts='other')
    names = dict(run='', data='', text='')
    [[a, *_], [b, *_]] = (evaluate(f'{name} --task {task}')['rows'] for name in 'ab')
    assert a | names == b | names


def test_perplexity_by_frequency(run, monkeypatch):
    """Of tokens that occur at most three times, as 256 does; of none (TRIME, Table 14)"""
    monkeypatch.setattr(evaluation, 'FREQUENCIES', dict(a=3, b=3))
    row, *_ = evaluate('a --task frequency')['rows']
    n = [*''.join(TEXTS).encode()].count
    scored = [w for text in TEXTS for w in [*text.encode()[1:], 256]]
    log_p = np.concatenate(log_p_by_hand(1.0))
    losses = [-x for w, x in zip(scored, log_p) if n(w) <= 3]
    assert row['a'] == approx(math.exp(np.mean(losses)), rel=1e-4)
    assert [row['n a'], row['b']] == [len(losses), None]


def test_losses_of_tokens_that_occurred_before(run, drawn):
    """A token is repeated if it is among those before it in its document. A dot for each way"""
    rows = evaluate('a --task repeats')['rows']
    documents = [[*text.encode(), 256] for text in TEXTS]
    repeated = np.array([ids[i] in ids[:i] for ids in documents for i in range(1, len(ids))])
    for row, (way, strength) in zip(rows, WAYS.items(), strict=True):
        losses = -np.concatenate(log_p_by_hand(strength))
        assert row['way'] == way
        assert row['repeated'] == approx(losses[repeated].mean(), rel=1e-4)
        assert row['new'] == approx(losses[~repeated].mean(), rel=1e-4)
        assert (row['n repeated'], row['n new']) == (repeated.sum(), (~repeated).sum())
    dots = [[line.get_xdata()[0] for line in axes.lines] for axes in drawn[0].axes]
    assert dots == [[row[name] for row in rows] for name in ('loss', 'repeated', 'new')]


def test_a_short_document(run, capsys):
    Path('short.jsonl').write_text('{"text": "one short document"}')
    row = evaluate('a --task table --data short.jsonl --split train')['rows'][0]
    assert row['±'] is row['<1,024'] is None
    assert 'from 1 documents' in capsys.readouterr().out
    Path('short.jsonl').write_text('{"text": "abc"}')
    row = evaluate('a --task repeats --data short.jsonl --split train')['rows'][0]
    assert row['repeated'] is row['gain, repeated'] is None and row['new'] == row['loss']
    run('c/best.pt', tokenizer='word')
    Path('short.jsonl').write_text('{"text": "short"}')
    assert 'has two tokens' in one_line(evaluate, 'c --data short.jsonl --split train')
    lines = [f'{{"text": "word{i}"}}\n{{"text": "two {i}"}}\n' for i in range(9)]
    Path('short.jsonl').write_text(''.join(lines))
    assert 'documents of one word' in one_line(evaluate, 'a c --data short.jsonl --split train')


def test_other_texts_are_refused_and_other_tokenizers_are_not(run, capsys):
    others = [text.replace('third', 'forth') for text in TEXTS]
    write_splits(Path('b/texts'), others, others)                   # same name, bytes, words
    run('b/best.pt', texts='b/texts')
    run('c/best.pt', tokenizer='bpe')
    assert 'different texts' in one_line(evaluate, 'a b')
    evaluate('a b --task table --data texts')
    assert 'different tokenizers' not in capsys.readouterr().err
    rows = evaluate('a c --task table')['rows']
    assert 'different tokenizers: only bits/byte and word ppl' in capsys.readouterr().err
    assert rows[5]['bits/byte'] < rows[2]['bits/byte']                # fewer tokens
    Path('texts/train.jsonl').write_text('{"text": "new"}')
    for more in ('', ' --data texts'):
        evaluate(f'a --task table{more}')
        assert 'another version' in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# runs and flags
def test_retrieve_from_reaches_each_model_that_can_use_it(run, monkeypatch):
    write_splits(Path('more'), TEXTS, TEXTS)
    evaluate('a --task count --retrieve-from more')
    assert BIGRAM.made[-1].prepared == ('texts', 'more', Path('a/best.pt'))
    monkeypatch.delattr(sys.modules[__name__], 'prepare_eval')
    assert 'a retrieves' in one_line(evaluate, 'a --retrieve-from more')


def test_a_run_is_its_best_weights_else_its_last(run):
    run('a/ckpt.pt', width=5)
    run('c/ckpt.pt', width=6)
    for path, width in (('a', 4), ('a/best.pt', 4), ('a/ckpt.pt', 5), ('c', 6)):
        model, tokenizer = evaluation.load(path)
        assert model.config.width == width and not model.training
        assert tokenizer.n_vocab == 257
        assert evaluate(f'{path} --task table')['rows'][0]['run'] == path


def test_what_is_no_checkpoint_is_one_line(run):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, ('hostile',)

    Path('hostile.pt').write_bytes(pickle.dumps(Hostile(), protocol=2))
    for path in ('hostile.pt', 'texts/val.jsonl'):
        assert f'{path} is not a checkpoint' in one_line(evaluation.load, path)
    assert not os.path.exists('hostile')
    missing = 'nothing: there is no such file or folder; train.py makes runs'
    assert one_line(evaluation.load, 'nothing') == missing
    no_weights = 'texts: the folder has neither best.pt nor ckpt.pt; train.py makes runs'
    assert one_line(evaluation.load, 'texts') == no_weights


@mark.parametrize('flags, words', [
    ('a --temprature 1', 'the nearest is --temperature'), ('a --task ranks', 'niah, count'),
    ('a --split test', 'split test'), ('a --task examples --prompt x', 'two tokens'),
    ('a --json a/best.pt/x', 'pt/x'), ('a --html texts', 'texts'), ('a --json pipe', 'pipe'),
    ('a --json=', "'' cannot be written"), ('a --json a/best.pt', 'is a file of a run'),
    ('a --json a/config.json', 'is a file of a run'), ('a --json ' + 255 * 'a', 'too long'),
    ('a --task examples --json x --html ./x', '/x: each needs'),
    ('a --task examples --json x --html y --prompt-file y', '/y: each needs'),
    ('a --task niah --lengths 1kk', '1kk'), ('a --task niah --lengths 999999999m', 'shorter'),
    ('a --task speed --lengths 0', '--lengths 0'), ('a\0', 'no such'),
    ('a --task niah --lengths 64', '64'), ('a --task niah --lengths 512 --depths 0,1', '0,1'),
    ('a --task niah --depths 101', '--depths'), ('a --task niah --depths 5,05', '--depths')])
def test_a_wrong_flag_is_one_line(run, flags, words):
    os.mkfifo('pipe')
    BIGRAM.made.clear()
    assert words in one_line(evaluation.main, flags.split())
    assert not any(model.streamed for model in BIGRAM.made)


@mark.parametrize('flags, words', [
    ('--task table --html x', '--html is for --task examples: --task table does not use it'),
    ('--task niah --prompt=x', '--prompt is for --task examples or generate or translate'),
    ('--task repeats --prompt-file x', '--prompt-file is for --task examples or generate'),
    ('--task examples --output x', '--output is for --task translate'),
    ('--task generate --beam 4', '--beam is for --task pairs or translate'),
    ('--lines 3', '--lines is for --task pairs: --task report does not use it'),
    ('--data pairs --html x', '--html is for --task examples: --task report does not use it'),
    ('--task generate --prompt x --prompt-file y', 'only one of them is possible'),
    ('--task table run2', 'run2: no flag takes this value; runs come before flags'),
    ('--prompt-file nothing', '--prompt-file nothing: No such file'),
    ('--prompt-file texts', '--prompt-file texts: Is a directory'),
    ('--task table --retrieve-from nothing', '--retrieve-from nothing: there is no such file'),
    ('--task table --data nothing', '--data nothing: there is no such file'),
    ('--cache 9 --retrieve-from texts', '--cache and --retrieve-from cannot be used'),
    ('--cache 9 --task count', '--cache is not for --task count'),
    ('--data pairs --task table', '--task pairs'), ('--data pairs --beam 0', '1 or more'),
    ('--data pairs --task translate --prompt x --max-tokens 0', '1 or more'),
    ('--data short.jsonl --task niah', 'val has 16 tokens, more than 248 are needed'),
    ('--task niah --lengths 512 --depths 0,1', '--lengths 3193 works'),
    ('b', 'different texts')])
def test_what_is_wrong_is_known_before_models_are_prepared(run, flags, words):
    """TRIME's datastore takes minutes. Each error names the flag, and what works."""
    write(Path('pairs'), train_tsv='a\tb', val_tsv='a\tb')
    Path('short.jsonl').write_text('{"text": "a short document"}')
    write_splits(Path('other'), TEXTS, ['another text'])
    run('b/best.pt', texts='other')
    BIGRAM.made.clear()
    if 'short.jsonl' in flags:
        flags += ' --split train'
        words = words.replace('val', 'train').replace('16', '17')
    assert words in one_line(evaluation.main, ['a', *flags.split()])
    assert not any(hasattr(model, 'prepared') for model in BIGRAM.made)


def test_a_task_of_a_model_can_use_each_flag(run):
    assert evaluate('a --task count --lengths 5 --html x.html') > 1000


@mark.parametrize('error, words', [
    (RuntimeError('unexpected pos 704 vs 598'), 'disk full'),               # torch's
    (RuntimeError('write error in x: 1 != 2 (No space)'), 'disk full'),     # faiss's
    (MemoryError(), 'out of memory'), (OSError('No space left'), 'No space'),
    (KeyboardInterrupt(), 'stopped')])
def test_files_are_written_after_the_work_or_not_at_all(run, monkeypatch, error, words):
    def stream(self, tokens, state):
        raise error

    # a name that is too long with .tmp
    assert 'too long' in one_line(evaluation.main, ['a', '--json', 252 * 'x'])
    Path('out.json').write_text('earlier')
    files = os.listdir()
    monkeypatch.setattr(BIGRAM, 'stream', stream)
    assert words in one_line(evaluate, 'a --task examples --html page.html')
    assert os.listdir() == files and Path('out.json').read_text() == 'earlier'


# --------------------------------------------------------------------------------------------------
# examples
def test_examples_are_where_the_gain_is_largest(run):
    """The token of each document with the largest gain, and what was retrieved to predict it."""
    result = evaluate('a --task examples')
    gains = [on - off for on, off in zip(log_p_by_hand(1.0), log_p_by_hand(0.0))]
    order = sorted(range(3), key=lambda d: -gains[d].max())
    assert [x['document'] for x in result] == order
    x, d = result[0], order[0]
    gains, text = gains[d], TEXTS[d] + '<|endoftext|>'
    t = gains.argmax()
    start = max(0, t - 150)
    assert x['gain'] == approx(gains[t], abs=1e-4)
    assert (x['token'], x['before']) == (t + 1, text[:t + 1][-32:])
    assert text[t + 1:].startswith(x['next']) and len(x['next']) >= 13
    first, second = x['retrieved']
    assert first == dict(group=0, weight=0.75, start=start, end=t + 1, ago=1,
                         text=text[start:t + 1][15:47])
    assert (second['weight'], second['start'], second['ago']) == (0.25, 2, None)


def test_a_prompt_from_a_file(run, monkeypatch):
    """Of any length, where a shell refuses an argument of 128 KB; or from standard input"""
    text = 'some text of a file\n' * 9000
    Path('notes.txt').write_text(text)
    x, = evaluate('a --task examples --prompt-file notes.txt')
    assert text.endswith(x['before'])
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(text.encode())))
    assert [x] == evaluate('a --task examples --prompt-file -')
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO('café'.encode('latin1'))))
    message = one_line(evaluate, 'a --task examples --prompt-file -')
    assert 'standard input is not UTF-8, at byte 3' in message


def test_an_empty_prompt_is_a_prompt(run, monkeypatch):
    """A text is generated from the beginning of a document; with words, from that of a line."""
    Path('empty.txt').write_text('')
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO()))
    first = {'a': 256}
    run('c/best.pt', tokenizer='word')
    _, words = evaluation.load('c')
    first['c'] = words.ids['<eos>']
    for more in (['--prompt', ''], ['--prompt-file', 'empty.txt'], ['--prompt-file', '-']):
        for name in ('a', 'c'):
            rows = evaluate(f'{name} --task generate --max-tokens 3', *more)
            assert [row['way'] for row in rows] == ['on', 'off']
            assert BIGRAM.made[-1].streamed[0][2] == [first[name]]
    assert 'two tokens' in one_line(evaluate, 'a --task examples --prompt-file empty.txt')
    Path('cut.txt.gz').write_bytes(gzip.compress(b'a text')[:-9])
    assert 'cut.txt.gz: ' in one_line(evaluate, 'a --task generate --prompt-file cut.txt.gz')


@mark.parametrize('name, prompt, shown', [
    ('a', 'some tex', "before    'some tex'\n\n"),
    ('a', 15 * 'y' + 32 * 'x' + 9 * 'z', f" '{32 * 'x'}'"), ('a', 20 * 'x', f" '{5 * 'x'}'"),
    ('c', 'some tex', " 'some te' -> 'x'"), ('c', 'some tex', " 'dat' -> 'a'"),
    ('a', 'xy', 'nothing is retrieved: these 2 tokens')])
def test_what_the_example_of_a_prompt_shows(run, capsys, name, prompt, shown):
    """The run `c` retrieves memories: a context and a value."""
    run('c/best.pt', chunk=1)
    x, = evaluate(f'{name} --task examples --prompt', prompt)
    assert shown in capsys.readouterr().out
    assert prompt.endswith(x['before']) and x['next'] == ''


# --------------------------------------------------------------------------------------------------
# the page
HOSTILE = '</script><script>throw 1</script> "é" <b>\u2028\n' * 9


def page_of(names, *flags):
    """-> the data of the runs in a page"""
    evaluate(f'{names} --task examples --html page.html', *flags)
    page = Path('page.html').read_text('utf-8')
    return json.loads(re.search('id="data">(.*?)</script>', page)[1])


def test_the_data_of_a_page(run):
    """Of the document that gains most; what is retrieved for each chunk but the first"""
    page, = page_of('a')
    on = log_p_by_hand(1.0)
    off = log_p_by_hand(0.0)
    d = np.argmax([sum(x - y) for x, y in zip(on, off)])
    assert (page['run'], page['chunk'], page['tokenizer']['name']) == ('a', 31, 'bytes')
    assert page['tokens'] == [*TEXTS[d].encode(), 256]
    for losses, x in zip(page['losses'], (off, on), strict=True):
        assert losses == approx(-x[d], abs=1e-3)
    assert len(page['traces']) == len(page['tokens']) // 31
    first, second = page['traces'][0][0]
    assert first == [0.75, 0, 32, []]
    assert second == [0.25, 2, 6, [*b'data']]               # of another text


def test_a_page_of_groups_and_tokens(run):
    """Its text is read once, and once for the example on the screen."""
    run('c</script>/best.pt', groups=2, chunk=1)            # a name that could end the script
    _, page = page_of('a c</script>', '--prompt', HOSTILE)
    assert page['run'] == 'c</script>'
    n_read = BIGRAM.made[-1].read_tokens
    assert len(page['traces']) == n_read / 2 == len(page['tokens']) - 1     # for each token
    assert [reads[0][0] for reads in page['traces'][5]] == [0.75, 0.5]


def test_a_page_shows_the_beginning_of_a_long_document(run, monkeypatch):
    monkeypatch.setattr(evaluation, 'PAGE_TOKENS', 20)
    page, = page_of('a')
    assert len(page['tokens']) == 20


CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')
BROWSER = '''--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
--disable-component-update --disable-sync --user-data-dir=browser --virtual-time-budget=5000
--enable-logging=stderr --dump-dom'''
PROBE = '''<script>
const panels = []
const key = name => document.dispatchEvent(new KeyboardEvent('keydown', {key: name}))
const note = () => panels.push(document.getElementById('panel').textContent)
const coloured = [...text.querySelectorAll('.row.chosen span')].filter(x => x.style.backgroundColor)
key('Home'), note(), key('ArrowDown'), note(), key('ArrowDown'), note(), key('ArrowUp'), note()
rows[3].click(), note()
tabs.lastChild.click(), note(), key('ArrowRight'), note()
add(document.body, 'output', JSON.stringify(
  {panels, coloured: coloured.length, text: rows.map(row => row.textContent).join('')}))
</script>'''


@mark.slow
@mark.skipif(CHROMIUM is None, reason='there is no Chromium')
def test_the_page_in_a_browser(run):
    run('c/best.pt', chunk=1)
    page_of('a c', '--prompt', HOSTILE)
    with open('page.html', 'a', encoding='utf-8') as file:
        file.write(PROBE)
    command = [CHROMIUM, *BROWSER.split(), Path('page.html').resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'CONSOLE' not in done.stderr                             # no error
    output = re.search('<output>(.*?)</output>', done.stdout, re.S)[1]
    result = json.loads(html.unescape(output))
    assert result['text'] == HOSTILE and result['coloured'] > 9
    first, second, third, again, fourth, token, next_token = result['panels']
    assert 'Chunk 0' in first and 'Nothing is retrieved' in first
    assert 'Chunk 1' in second and 'weight 0.750' in second and 'data' in second
    assert 'Chunk 2' in third and again == second and 'Chunk 3' in fourth
    assert 'Token 93' in token and '75.0%' in token and '→ a' in token      # 3 x 31: the same place
    assert 'Token 94' in next_token


# --------------------------------------------------------------------------------------------------
# the report and samples
@fixture
def drawn(monkeypatch):
    """The figures that are saved"""
    figures, matplotlib = [], pytest.importorskip('matplotlib.figure')
    monkeypatch.setattr(matplotlib.Figure, 'savefig', lambda self, *_, **__: figures.append(self))
    return figures


def test_the_report(run, capsys):
    """The JSON file has every number of the screen; what is scored once is not scored again."""
    run('c/best.pt')
    result = evaluate('a c --max-tokens 5')
    screen = capsys.readouterr().out
    assert [row['run'] for row in result['table']['rows']] == [*'aaaccc']
    for row in result['table']['rows']:
        assert f'{row["loss"]:#.5g}' in screen
    scored = [start for _, start, tokens in BIGRAM.made[-1].streamed if len(tokens) > 1]
    assert scored.count(0) == 9


@mark.parametrize('name', ['_a', 'b$x^{$', '__$_', '$$'])
def test_names_of_runs_in_a_picture(run, drawn, name):
    """matplotlib hides labels with _ first, and reads $ as mathematics."""
    log = '\n'.join(json.dumps(dict(tokens=i, loss=1.0)) for i in range(30))
    run(f'{name}/best.pt')
    Path(name, 'log.jsonl').write_text(log)
    evaluation.main([name, '--max-tokens', '1'])
    axes = drawn[0].axes[1]
    label = evaluation.label_of(name)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [label]
    drawn[0].canvas.draw()


def test_a_picture_without_positions(run, drawn):
    """No position has 1,000 tokens: panels without lines"""
    Path('short.jsonl').write_text('{"text": "one short document"}')
    evaluate('a --data short.jsonl --split train --max-tokens 1')
    assert [axes.lines[:] for axes in drawn[0].axes] == [[]]


def test_the_share_of_repeated_8_grams():
    """Of texts without an 8-gram, with one, with five of which two are the first again"""
    share = evaluation.share_of_repeated_8_grams
    assert share([]) == share([1] * 7) == share(range(8)) == 0
    assert share([1] * 9) == 0.5
    assert share([*range(8), *range(8), 0]) == approx(2 / 10)


def test_without_a_picture(run, monkeypatch, capsys):
    os.mkdir('a/loss.png')
    assert evaluate('a --max-tokens 1')['samples']
    Path('a/log.jsonl').write_text('{"torn')
    evaluate('a --max-tokens 1')
    assert capsys.readouterr().err.count('no picture') == 2
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    evaluate('a --max-tokens 1')
    assert 'matplotlib' in capsys.readouterr().err


def test_samples_continue_the_middle_of_the_longest_document(run):
    text, on, off = evaluate('a --task generate --max-tokens 17')
    assert [x['way'] for x in (text, on, off)] == ['the document', 'on', 'off']
    assert text['text'] == TEXTS[1][2400:2417]
    assert text['repeated'] == approx(4 / 10)               # of 8-grams
    assert on['prompt'] == off['prompt'] == TEXTS[1][1376:2400]
    assert on['text'] != off['text']


@fixture
def model():
    """Its next token is a, b, c or d with probability 0.4 to 0.1."""
    model = BIGRAM(BIGRAMConfig())
    model.table.data[:] = -math.inf
    model.table.data[:, 97:101] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    return model


def generate(model, prompt='x', n=400, **options):
    args = evaluation.EvalConfig(max_tokens=n, **options)
    return evaluation.generate(model, data.Tokenizer('bytes'), prompt, args)


def test_generate_draws_from_the_probabilities(model):
    assert generate(model, temperature=0) == 400 * 'a'
    for temperature, n_a in ((1.0, 160), (0.5, 213)):                       # p^(1/temperature)
        text = generate(model, temperature=temperature)
        assert text.count('a') == approx(n_a, abs=40)                # four sigma
    assert generate(model, seed=1) == generate(model, seed=1) != generate(model, seed=2)


@mark.parametrize('top_k, top_p, kept', [
    (0, 0.0, 'a'), (0, 0.69, 'ab'), (0, 0.75, 'abc'),
    (3, 1.0, 'abc'), (3, 0.45, 'ab')])
def test_generate_draws_from_the_likeliest(model, top_k, top_p, kept):
    assert {*generate(model, temperature=1.0, top_k=top_k, top_p=top_p)} == {*kept}


def test_generate_reads_the_prompt_and_ends(model):
    ids = [*'né 你!'.encode(), 256]                         # ends with <|endoftext|>
    model.table.data[[ord('b'), *ids[:-1]], ids] = 99.0
    assert generate(model, 'ab', 50, temperature=0) == 'né 你!'
    streamed = [tokens[0] for *_, tokens in model.streamed]
    assert streamed == [ord('b'), *ids[:-1]] and model.read_tokens == 1
    model.table.data[256, 97] = 99.0
    assert generate(model, '', 1, temperature=0) == 'a' and model.streamed[-1][2] == [256]


# --------------------------------------------------------------------------------------------------
# pairs
def small_vocabulary(model, seed):
    """Each token is followed by a, b, c or <|endoftext|>, with random probabilities -> their ids"""
    ids = [97, 98, 99, 256]
    torch.manual_seed(seed)
    model.table.data[:] = -math.inf
    model.table.data[:, ids] = 2 * torch.randn(257, 4)
    return ids


def hypothesis_score(model, text, last):
    """log P / length^0.6 of a text, a list of ids, after a token"""
    log_p = model.table.log_softmax(-1)[[last, *text[:-1]], text]
    return log_p.sum().item() / len(text) ** 0.6


def found_by(model, prompts, beam, n):
    args = evaluation.EvalConfig(beam=beam, max_tokens=n)
    return evaluation.beam_search(model, torch.tensor(prompts), 256, args)


@mark.parametrize('seed', range(12))
def test_beam_search(model, seed, n=4):
    """With many hypotheses the best of all texts of up to n tokens is found, also where a shorter
    one that has ended leads for a while; with one it is greedy decoding."""
    ids = small_vocabulary(model, seed)
    texts = {text[:[*text, 256].index(256) + 1] for text in itertools.product(ids, repeat=n)}
    best = max(texts, key=lambda text: hypothesis_score(model, text, 120))
    assert found_by(model, [[1, 2, 120]], 256, n) == [list(best)]

    greedy = generate(model, 'x', n, temperature=0)
    [one], [four] = (found_by(model, [[120]], beam, n) for beam in (1, 4))
    assert bytes(token for token in one if token < 256).decode() == greedy
    assert hypothesis_score(model, four, 120) >= hypothesis_score(model, one, 120)


def test_beam_search_of_several_prompts(model):
    """Each has the text that it has alone; they end after different numbers of steps."""
    small_vocabulary(model, 3)
    prompts = [[1, last] for last in range(100, 140)]
    together = found_by(model, prompts, 3, 7)
    assert together == [found_by(model, [prompt], 3, 7)[0] for prompt in prompts]
    assert len({*map(len, together)}) > 2


@mark.parametrize('small', [test_trime.small, test_drt.small])
def test_beam_search_continues_the_state_of_each_hypothesis(small, n=3):
    """With enough hypotheses: the best of all texts, by log P of prompt and text read together"""
    model = small(vocab_size=4).eval()
    texts = set()
    for text in itertools.product(range(4), repeat=n):          # 3 ends a text
        texts.add(text[:[*text, 3].index(3) + 1])

    def score(text):
        of_text = log_p(model, torch.tensor([*prompt, *text]))[-len(text):]
        return of_text.sum().item() / len(text) ** 0.6
    prompts = random_tokens(4, 9, vocab=3)
    best = []
    for prompt in prompts.tolist():
        best.append([*max(texts, key=score)])
    args = SimpleNamespace(beam=4 ** n, max_tokens=n)
    assert evaluation.beam_search(model, prompts, 3, args) == best


PERFECT = {                 # a right translation -> is BLEU a number?
    'the sun is up, too': True, 'Всё счастливые семьи похожи друг на друга': True,
    '我们明天早上去北京看朋友': True, '明日の朝、友達に会いに行きます': True,
    'พรุ่งนี้เราจะไปหาเพื่อน': True, '내일 아침에 우리는 친구를 만나러 갑니다': True,
    'कल सुबह हम अपने दोस्त से मिलेंगे': True, 'go on': False, '안녕하세요': False, '...': False}


@mark.parametrize('text, has_bleu', PERFECT.items())
def test_a_right_translation_is_worth_100_in_any_script(text, has_bleu):
    """A number that means nothing is None: BLEU of fewer than four tokens, ROUGE of no word,
    ROUGE-2 of one word."""
    pytest.importorskip('sacrebleu')
    values, signatures = evaluation.text_metrics([text, text], [text, text])
    has_rouge = text != '...'
    wanted = [100 if has_bleu else None, 100, *3 * [100 if has_rouge else None]]
    assert list(values)[:2] == ['BLEU', 'chrF']
    if text == '안녕하세요':
        wanted[3] = None
    assert list(values.values()) == approx(wanted)
    unspaced = text[0] in '我明พ'
    assert signatures['ROUGE'].startswith('characters' if unspaced else 'words')
    tokenizer = {'我': 'zh', '明': 'char', 'พ': 'char'}.get(text[0], '13a')
    assert f'tok:{tokenizer}|' in signatures['BLEU']
    worse, _ = evaluation.text_metrics([text + text], [text])
    assert not has_rouge or worse['rouge1'] < 99


LINES = [['ab', 'the sun is up, too'], ['', 'it is a very good day'], ['c', 'd']]


@fixture
def answers(run, monkeypatch):
    """Pairs, of which beam search answers each source with its target"""
    text = '\n'.join(map('\t'.join, LINES))
    write(Path('pairs'), train_tsv=text, val_tsv=text)
    targets = {tuple(f'{source}\t'.encode()): [*target.encode(), 256] for source, target in LINES}
    monkeypatch.setattr(evaluation, 'beam_search', lambda model, prompts, eot, args: [
        targets[tuple(prompt)] for prompt in prompts.tolist()])


def test_the_scores_of_pairs(answers, monkeypatch, capsys):
    """Two lines of three; a right translation is worth 100."""
    pytest.importorskip('sacrebleu')
    result = evaluate('a --data pairs --task pairs --lines 2')
    scores = list(result['rows'][0].values())
    assert scores == ['a', 'on', 2, *5 * [approx(100)]]
    assert result['texts']['a, off'] == [[*line, line[1]] for line in LINES[:2]]
    assert 'tok:13a' in result['signatures']['BLEU']
    screen = capsys.readouterr().out
    assert re.search('ab +the sun is up, too +the sun', screen)
    assert result['signatures']['BLEU'] in screen

    # what is refused
    assert '.tsv' in one_line(evaluate, 'a --task pairs')
    monkeypatch.setitem(sys.modules, 'sacrebleu', None)
    assert 'pip install sacrebleu rouge-score' in one_line(evaluate, 'a --data pairs --task pairs')


def test_a_file_is_translated(answers, capsys, monkeypatch):
    """Line by line, into a file or to the screen; also from standard input"""
    command = 'a --data pairs --task translate --prompt-file'
    Path('sources.txt').write_text(' c \n\nab\r\n')
    wanted = ['d', '', 'the sun is up, too']
    assert evaluate(f'{command} sources.txt --output out/targets.txt') == wanted
    assert Path('out/targets.txt').read_text() == '\n'.join(wanted) + '\n'
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'ab')))
    capsys.readouterr()
    evaluate(f'{command} -')
    screen = capsys.readouterr()
    assert screen.out == 'the sun is up, too\n' and 'prepared' in screen.err
    assert '--prompt-file FILE' in one_line(evaluate, 'a --data pairs --task translate')
    Path('empty.txt').write_text('')
    assert evaluate(f'{command} empty.txt') == []
    Path('latin.txt').write_bytes('é'.encode('latin-1'))
    assert 'latin.txt: not UTF-8' in one_line(evaluate, f'{command} latin.txt')


def test_long_sources_are_counted(answers, capsys):
    """A training sequence has 8 tokens: the source `it is` and its TAB fit, `a source` does not."""
    text = 'it is\tx\na source\ty\n1234567\tz\n12345678\tz'
    write(Path('long'), train_tsv=text, val_tsv=text)
    pytest.importorskip('sacrebleu')
    with pytest.raises(KeyError):                           # beam search of `answers` has others
        evaluate('a --data long --task pairs')
    message = 'a: 2 of 4 sources have more than 8 tokens (--block-size)'
    assert message in capsys.readouterr().err
    Path('sources.txt').write_text('ab\nc\n')
    evaluate('a --data pairs --task translate --prompt-file sources.txt')
    assert 'sources' not in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# pictures
def test_the_plot_has_the_losses_by_position(run, drawn):
    """A line for each way, of means over 1,000 tokens or more; no panel without a log"""
    evaluate('a --max-tokens 1')
    positions, = drawn[0].axes
    for line, strength in zip(positions.lines, WAYS.values(), strict=True):
        start, stop, *_ = line.get_xdata()
        losses = -np.concatenate([x[start - 1:stop - 1] for x in log_p_by_hand(strength)])
        assert start == 64 and len(losses) >= 1000
        assert line.get_ydata()[0] == approx(losses.mean(), rel=1e-5)


def test_the_plot_has_smooth_training_losses(run, drawn):
    log = [dict(tokens=10_000 * i, loss=i) for i in range(1, 61)]
    Path('a/log.jsonl').write_text('\n'.join(map(json.dumps, log)))
    evaluate('a --max-tokens 1')
    line, = drawn[0].axes[1].lines
    assert line.get_xdata()[-1] == 0.6                              # millions
    assert line.get_ydata() == approx(np.arange(7.5, 60))    # means over 2 of steps 7 to 60


# --------------------------------------------------------------------------------------------------
# speed
def test_the_speed_of_training(run):
    """MACs of a (w, w) matrix and of attention"""
    run('c/best.pt', width=16, block_size=32)
    *_, first, second = evaluate('a c --task speed --lengths 1')
    # matrix: 2 times w², as its input has no gradient; attention: 3 times 2 T w
    macs = 2 * 4 * 4 + 3 * 2 * 8 * 4, 2 * 16 * 16 + 3 * 2 * 32 * 16
    assert (first['MACs/token'], second['MACs/token']) == macs
    assert second['MACs ratio'] == macs[1] / macs[0]
    assert second['time ratio'] == second['s/token'] / first['s/token'] > 0


def test_the_speed_of_reading(run, monkeypatch):
    """A text of each length is read, 32 tokens are streamed after it: the median of three times,
    after one that is not counted"""
    first_call, slow = [0, 9, 99], [0, 5120, 9999]
    times = iter(first_call + [0, 512, 576] + slow + [0, 512, 576] + 3 * [0, 4096, 4097])
    monkeypatch.setattr(evaluation, 'clock', lambda tokens: next(times))
    monkeypatch.setattr(evaluation, 'training_speed', lambda runs, device: [])
    first, second = evaluate('a --task speed --lengths 512,2k')
    assert (first['reading s/token'], second['reading s/token']) == (1, 2)
    assert (first['generating s/token'], second['generating s/token']) == (2, 1 / 32)
    streamed = [start for _, start, _ in BIGRAM.made[-1].streamed]
    assert streamed == [*range(1, 33)] + 3 * [*range(512, 544)] + 3 * [*range(2048, 2080)]


# --------------------------------------------------------------------------------------------------
# needles
class Copier(BIGRAM):
    """Predicts the byte that followed the last 11 bytes in the first `limit` bytes of the text."""
    limit = None

    def read(self, tokens, state=None):
        return tokens

    def stream(self, tokens, state):
        text = bytes(torch.cat([state, tokens], dim=1)[0].clamp(max=255).tolist())
        ids = []
        for end in range(state.numel() + 1, len(text) + 1):
            place = text[:self.limit].find(text[end - 11:end])
            ids.append(text[place + 11])
        return F.one_hot(torch.tensor([ids]), 257).float().log(), None


@mark.parametrize('limit, right', [
    (None, [1, 1, 1]), (31, [1, 0, 0])])
def test_needles_of_a_model_that_copies(run, monkeypatch, drawn, limit, right):
    monkeypatch.setattr(sys.modules[__name__], 'BIGRAM', Copier)
    monkeypatch.setattr(Copier, 'limit', limit)
    rows = evaluate('a --task niah --lengths 512,1k --depths 0,50,100')
    assert [row['tokens'] for row in rows] == ['512', '1k']
    for row in rows:
        assert row['needles'] == 30
        assert [row['0%'], row['50%'], row['100%']] == right
        assert row['right'] == approx(sum(right) / 3)
        assert row['low'] < row['right'] <= row['high']
    heat_map = drawn[0].axes[0]
    assert heat_map.images[0].get_array().tolist() == [right, right]
    assert [x.get_text() for x in heat_map.get_yticklabels()] == ['a, 512', 'a, 1k']


def test_how_often_a_split_is_repeated_among_needles(run, drawn):
    n_tokens = len(data.load('texts', 'bytes', quiet=True).val.tokens)
    [short, long] = evaluate('a --task niah --lengths 1k,16k --depths 50')
    assert short['repeated'] == 0
    assert long['repeated'] == 2 ** 14 / n_tokens - 1 > 0


def test_the_interval_of_a_share():
    """Wilson's, of 8 of 10 and of 10 of 10, from a table"""
    assert evaluation.wilson_interval(8, 10) == approx((0.490, 0.943), abs=0.001)
    assert evaluation.wilson_interval(10, 10) == approx((0.722, 1.0), abs=0.001)


def test_the_text_of_two_hops(run, monkeypatch):
    """Of five chains A, B, C the text has "Key A opens B." and "Key B opens C."."""
    texts = []
    monkeypatch.setattr(BIGRAM, 'read', lambda self, tokens, state: texts.append(tokens[0]))
    evaluate('a --task niah --lengths 1k --data niah2:texts')
    for ids in texts:
        text = bytes(ids.clamp(max=255).tolist()).decode('latin-1')
        opens = dict(re.findall(r'Key (\w{4}) opens (\w{4})\.', text))
        assert len(opens) == 10
        assert sum(B in opens for B in opens.values()) == 5


# --------------------------------------------------------------------------------------------------
# the models
@fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with a run of each model on short texts"""
    folder = tmp_path_factory.mktemp('trained')
    text = 'abc def\n' * 20 + 'the end\n' * 20
    texts = [text[i:] + text for i in (0, 1, 120, 317)]
    write_splits(folder / 'texts', texts, texts)
    write_splits(folder / 'more', texts[:1], texts[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train.main(flags('trime', '--block-size 64 --tokens-per-step 256'))     # fewer windows
        train.main(flags('rpt'))
        train.main(flags('drt'))
        train.main(flags('drt', '--groups 0 --out out/base'))
    return folder


def few_values(monkeypatch):
    """Tuning, of TRIME and of a cache, takes less time."""
    for module in trime, cache:
        monkeypatch.setattr(module, 'TAUS', module.TAUS[2::6])
        monkeypatch.setattr(module, 'LAMBDAS', module.LAMBDAS[::5])


@fixture
def models(trained, monkeypatch):
    monkeypatch.chdir(trained)
    few_values(monkeypatch)
    monkeypatch.setattr(evaluation, 'PAGE_TOKENS', 60)
    return 'out/trime out/rpt out/drt'


def test_the_three_models_in_one_table(models):
    result = evaluate(f'{models} --max-tokens 3 --html page.html')
    names = models.split()
    rows = [(row['run'], row['way']) for row in result['table']['rows']]
    assert rows == [*itertools.product(names, WAYS)]
    assert [x['run'] for x in result['examples'] if x['retrieved']] == names
    assert 'these runs together' in one_line(evaluate, 'out/rpt out/drt --task ranks')
    assert '--beam is for --task pairs' in one_line(evaluate, 'out/rpt --task ranks --beam 9')
    assert 'none of these runs' in one_line(evaluate, 'out/base --retrieve-from more')


@mark.parametrize('model', ['trime --memory ext --p 1', 'rpt', 'drt'])
def test_pairs_for_the_three_models(models, model):
    """Some pairs have several chunks, some no target within --block-size."""
    pytest.importorskip('sacrebleu')
    text = ''.join(f'{i * "ab "}\t{i * "cd "}\n' for i in range(30))
    write(Path('pairs'), train_tsv=text, val_tsv=text)
    name, *more = model.split()
    train.main([*flags(name), '--data', 'pairs', '--out', f'out/pairs-{name}', *more])
    result = evaluate(f'out/pairs-{name} --lines 2 --max-tokens 9')
    texts = result['texts']
    ways = WAYS
    if name == 'trime':                                 # external memory alone (TRIME, §5.4)
        ways = ['on', 'off']
        constants = result['constants'][f'out/pairs-{name}']
        assert not constants['local'] and constants['long'] == 0 and constants['n_neighbors']
    assert [*texts] == [f'out/pairs-{name}, {way}' for way in ways]
    assert 'targets only' in one_line(evaluate, f'out/pairs-{name} --task table')


def test_a_flag_of_another_model_names_it(models):
    message = one_line(evaluate, 'out/drt out/rpt --memory local')
    assert message == 'eval.py: --memory is a flag of trime: none of these runs is of that model'
    assert '--offload is a flag of drt' in one_line(evaluate, 'out/trime --offload=.')
    assert 'more than the block size' in one_line(evaluate, 'out/trime --stride 2000')
    for flag in ('--n-layer', '--max-steps'):
        assert f'{flag} is a flag of train.py' in one_line(evaluate, f'out/drt {flag} 3')
    assert 'the nearest is --offload' in one_line(evaluate, 'out/drt --offlaod .')


def test_the_names_of_memories():
    """Their order is free. An error has all values."""
    parser = evaluation.parser_of([train.find_model('trime')])
    values = {text: evaluation.parse(parser, ['--memory', text]).memory
              for text in ('none', 'ext', 'long,local', 'ext,local,long', '')}
    assert [*values.values()] == ['none', 'ext', 'local,long', 'local,long,ext', '']
    for text in ('long', 'locl', 'local,', 'none,ext'):
        message = one_line(evaluation.parse, parser, ['--memory', text])
        assert f'{text} is not one of: none; local; local,long; ext;' in message


def test_a_cache_of_each_model(models, capsys):
    """Its constants are printed with what they are tuned on. The page and the speed work, too."""
    result = evaluate('out/drt out/base --cache 64 --task table')
    assert {*result['constants']['out/drt']} == {'on', 'off'}
    assert {*result['constants']['out/base']['off']} == {'size', 'tau', 'lam'}
    ways = [row['way'] for row in result['rows']]
    assert ways == ['on+cache', 'on', 'off+cache', 'off', 'off+cache', 'off']
    screen = capsys.readouterr().out
    assert screen.count('tokens of test') + screen.count('tokens of val') == 3
    assert 'way on+cache: CacheConstants(size=' in screen
    page, = page_of('out/drt', '--cache', '64')                 # of retrieval, without the cache
    assert page['losses'] == page_of('out/drt')[0]['losses']
    assert evaluate('out/base --cache 64 --task examples') == []
    assert page['traces'][-1]
    rows = evaluate('out/drt --task speed --lengths 64', '--cache', '64')
    assert rows[1]['MACs/token'] == evaluate('out/drt --task speed --lengths 64')[1]['MACs/token']
    message = one_line(evaluate, 'out/trime --cache 64 --task table')       # and no tuning
    assert message == ('eval.py: --cache is for models without a memory of single tokens, which '
                       'out/trime has: leave --cache out, or add --memory none')
    evaluate('out/trime --cache 64 --memory none --task table')


def test_the_bytes_of_a_state():
    """Of all its tensors, each 2 x 3: fp32, fp16, and the first one again"""
    x = torch.zeros(2, 3)
    assert evaluation.n_bytes(([None, (x, x.half())], x, 7)) == 24 + 12 + 24


def test_the_memory_of_a_state(models):
    """With --offload the keys and values of DRT are in files."""
    sizes = [evaluate('out/drt --task speed --lengths 1k', *more)[0]['state MB']
             for more in ((), ('--offload', '.'))]
    assert sizes[0] > 2 * sizes[1] > 0


def test_retrieval_from_a_corpus(models):
    """TRIME's Table 5, DRT's Table 4"""
    command = 'out/trime out/drt out/base --retrieve-from more --task'
    rows = evaluate(command, 'table')['rows']
    ways = ' '.join(row['way'] for row in rows)
    assert ways == 'on shuffled off on corpus both shuffled off off'
    for x in evaluate(command, 'examples'):
        assert x['run'] != 'out/base'                       # it retrieves nothing
        assert None in [read['ago'] for read in x['retrieved']]


@mark.parametrize('name', ['trime', 'rpt', 'drt'])
def test_the_header_has_all_tasks(name, capsys):
    """With an example of each; --help has them, too."""
    Model = train.find_model(name)
    _, header = evaluation.__doc__.split(' Tasks:')
    with pytest.raises(SystemExit):
        evaluation.parse(evaluation.parser_of([Model]), ['--help'])
    screen = capsys.readouterr().out
    for task in evaluation.tasks_of([Model]):
        assert re.search(rf'^    {task} +\w.+\n +\$ python eval.py out/', header, re.M), task
        assert re.search(rf'^  {task} +\w', screen, re.M), task
    with pytest.raises(SystemExit):
        evaluation.main(['--help'])
    assert 'those of a model, with its flags: eval.py RUN --help' in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# trained weights
@fixture
def weights(tmp_path, monkeypatch):
    """A copy of assets, as eval.py writes next to weights; texts: the first part of drt.py"""
    monkeypatch.chdir(tmp_path)
    folder = Path(evaluation.__file__).parent
    shutil.copytree(folder / 'assets', 'assets')
    few_values(monkeypatch)
    text = (folder / 'drt.py').read_text()[:18_000]
    write_splits(tmp_path / 'texts', [text], [text])


@mark.parametrize('name', ['trime', 'rpt', 'drt'])
def test_the_trained_weights_gain_by_what_they_read(weights, name):
    on, shuffled, _ = evaluate(f'assets/{name}.pt --data texts --task table')['rows']
    assert on['gain over off'] > 0.06 and on['loss'] < shuffled['loss'] - 0.02


def test_the_trained_weights_find_needles(weights):
    rows = evaluate('assets/drt-niah.pt --data texts --task niah --lengths 4k')
    assert rows[0]['needles'] == 50 and rows[0]['right'] > 0.9


def test_translation_scores():
    """BLEU and chrF fall with what is missing; ROUGE-1 is the F1 of 4 of 4 and 4 of 5 words."""
    pytest.importorskip('sacrebleu')
    short, long = 'the sun is up', 'the sun is up now'
    values, _ = evaluation.text_metrics([long], [short])
    assert values['BLEU'] == approx(100 * math.exp(1 - 5 / 4))      # the brevity penalty alone
    assert values['rouge1'] == approx(100 * 2 * 0.8 / 1.8)
    too_long, _ = evaluation.text_metrics([short], [long])
    assert values['chrF'] < too_long['chrF']                        # recall counts more


def test_texts_of_needles_differ(run, monkeypatch):
    """Ten for each --seed, each from another place of the split"""
    texts = []
    monkeypatch.setattr(BIGRAM, 'read', lambda self, tokens, state: texts.append(tokens[0]))
    for seed in (0, 1):
        evaluate(f'a --task niah --lengths 1k --seed {seed}')
    assert len({tuple(text.tolist()) for text in texts}) == 20
    assert len({tuple(text[31:62].tolist()) for text in texts}) > 3         # without a needle


def test_answers_so_far_are_in_the_lines_of_progress(run, monkeypatch):
    """A text of 16m tokens can take an hour."""
    lines = []

    def recorded(items, desc, **_):
        lines.append(desc)
        return items
    monkeypatch.setattr(evaluation, 'progress_bar', recorded)
    monkeypatch.setattr(sys.modules[__name__], 'BIGRAM', Copier)
    monkeypatch.setattr(Copier, 'limit', 31)                    # of two needles it finds one
    evaluate('a --task niah --lengths 512 --depths 0,50')
    _, *of_texts = lines
    assert of_texts == [f'a, {i} of {2 * i} right so far; tokens of a text read'
                        for i in range(10)]


def test_an_answer_with_a_wrong_token_is_wrong(run, monkeypatch):
    class Forgetful(Copier):
        def stream(self, tokens, state):
            log_probs, _ = super().stream(tokens, state)
            log_probs[0, -4] = 0                                    # the first of four
            return log_probs, None
    monkeypatch.setattr(sys.modules[__name__], 'BIGRAM', Forgetful)
    row, = evaluate('a --task niah --lengths 512 --depths 0,50')
    assert row['right'] == 0


def test_the_way_of_each_row_of_pairs(answers, monkeypatch):
    pytest.importorskip('sacrebleu')
    ways, search = [], evaluation.beam_search

    def recorded(model, *args):
        ways.append(model.way)
        return search(model, *args)
    monkeypatch.setattr(evaluation, 'beam_search', recorded)
    evaluate('a --data pairs --task pairs --lines 1')
    assert ways == [*WAYS]


def test_tuned_on_the_split_for_tuning(models, monkeypatch, capsys):
    """Not on the scored one: of a cache, and of TRIME"""
    monkeypatch.setattr(data.Corpus, 'tuning_split', lambda corpus, scored: corpus.train)
    evaluate('out/base --cache 9 --task table')
    evaluate('out/trime --task table')
    assert len(re.findall('tuned on .*train$', capsys.readouterr().out, re.M)) == 2
