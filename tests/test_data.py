"""data.py: tokenizers, corpora on disk, batches; against brute force and definitions."""
import codecs, doctest, gzip, hashlib, itertools, json, os, platform, random, re, shutil, signal
import sys, textwrap, time, zipfile
from collections import Counter
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import regex
import tiktoken
import torch
from pytest import approx, fixture, importorskip, mark, raises

import data
from data import Grid, Needles, Pairs, Split, Tokenizer, load
from helpers import formula, jsonl, one_line, ranking, write, write_splits

PROSE = ("The cat's tail isn't 123456 long; it's  red.\n\n\tWhat'll it do?\r\n  naïve 日本語 🎉\n"
         '<|endoftext|>\n    def f(self, x):\n        return x ** 2  # aaa aaaa aaaaaaa\n')


def random_text(n, seed, symbols='aabcéß  x\n'):
    return ''.join(random.Random(seed).choices(symbols, k=n))


# --------------------------------------------------------------------------------------------------
# examples, progress
def test_examples_in_docstrings():
    assert doctest.testmod(data).failed == 0


@mark.parametrize('items, options, lines', [
    ([30, 6, 24, 12], dict(size=lambda seconds: 100 * seconds),
     ['x: 3,000 of 7,200, 0.7 min left', 'x: 6,000 of 7,200, 0.2 min left']),
    (iter([30, 30]), dict(total=5), ['x: 1 of 5, 2.0 min left']),
    ([30, 30], dict(quiet=True), [])])
def test_progress_bar(monkeypatch, capsys, items, options, lines):
    """The items are the seconds that they take."""
    spent = [100.0]
    monkeypatch.setattr(data.time, 'monotonic', lambda: sum(spent))
    for seconds in data.progress_bar(items, 'x', **options):
        spent.append(seconds)
    assert capsys.readouterr().err.splitlines() == lines


def test_all_long_work_has_a_progress_bar(src, monkeypatch, capsys):
    """Each look at the clock is ten seconds later than the one before."""
    seconds = itertools.count(0, 11)
    monkeypatch.setattr(data.time, 'monotonic', lambda: next(seconds))
    corpus = prepared(src(a_jsonl=jsonl(map(str, range(99))), b_txt='a b ' * 99), 'bpe', 300)
    corpus.batches(corpus.train, 'packed', 4, 2, 0)
    works = re.findall(r'^(.+): [\d,]+ of [\d,]+, [\d.]+ min left$', capsys.readouterr().err, re.M)
    assert set(works) == {'a.jsonl, bytes read', 'bytes read', 'characters counted',
                          'learning bpe', 'bytes encoded', 'packing by BM25'}


# --------------------------------------------------------------------------------------------------
# tokenizers
@mark.parametrize('name, n_vocab', [('bytes', 257), ('bpe', 500)])
def test_decoding_inverts_encoding(name, n_vocab):
    trained = Tokenizer.train(name, [random_text(12_000, 0), PROSE], 500)
    tokenizer = Tokenizer(**json.loads(json.dumps(trained.to_dict())))
    eot = n_vocab - 1
    assert (tokenizer.n_vocab, tokenizer.eot) == (n_vocab, eot)
    unicode = random_text(4000, 1, list(map(chr, range(0xd800))))
    for text in ('', '\r\n', PROSE, '\0\ufeff', 'a' * 3000, ' ' * 999, unicode):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert eot not in ids
    assert tokenizer.decode(torch.tensor([0xe6, 0x97, eot])) == '\ufffd<|endoftext|>'
    assert tokenizer.encode('\udcff').tolist() == [ord('?')]


@mark.parametrize('run', [' ', '\r\n', '\u3000', 'é'])
def test_a_million_in_a_row(run):
    """Runs of blanks end where the last one belongs to the next word, as shorter ones do."""
    text = 'a' + run * 10 ** 6 + ' word'
    for tokenizer in (Tokenizer('bytes'), Tokenizer('bpe', [*data.BYTES, ' w', '  '])):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids[-4:].tolist() == tokenizer.encode(' word')[-4:].tolist()


@mark.parametrize('kind, training, text', [
    ('bpe', '!\x1c' * 100, '?' + '!\x1c' * 9000 + '!\n' + 'y' * 300),
    ('word', 'x\n\ufeffb c', 'x' * 20000 + '\n\ufeffb c')])
def test_pieces_change_nothing_in_odd_texts(kind, training, text):
    """Control characters that re regards as blanks; a byte order mark that begins a line"""
    tokenizer = data.Tokenizer.train(kind, [training], 270)
    pieces = [tokenizer.encode(piece) for piece in data.in_pieces(text)]
    assert np.array_equal(np.concatenate(pieces), tokenizer.encode(text))


@mark.parametrize('pattern', [data.GPT2_PATTERN, data.BPE_PATTERN])
@mark.parametrize('run', ['é', 'กิ', '7', '-', ' ', 'a\u0301-'])
def test_no_word_is_long(pattern, run):
    """Not even in a text without blanks, or of blanks alone"""
    text = f'a{1000 * run} b'
    pieces = data.short_words(text, pattern)
    assert ''.join(pieces) == text
    words = [word for piece in pieces for word in regex.findall(pattern, piece)]
    assert max(map(len, words)) <= 257


def test_bpe_learns_all_of_a_long_word():
    """Words without blanks between them, in lines of 60 letters or in one: as many tokens"""
    words = [random_text(5, i, 'abcdefghijkl') for i in range(300)]
    letters = ''.join(random.Random(0).choices(words, k=2000))
    n_tokens = []
    for width in (60, 10_000):
        tokenizer = Tokenizer.train('bpe', [textwrap.fill(letters, width)], 500)
        n_tokens.append(len(tokenizer.encode(letters)))
    assert n_tokens[1] == approx(n_tokens[0], rel=0.05)


@mark.parametrize('words', [
    'नमस्ते दुनिया हिन्दी में', 'สวัสดี ชาวโลก ที่นี่', 'مُحَمَّد كِتَابٌ',
    'cafe\u0301 nai\u0308ve', 'עִבְרִית שָׁלוֹם', 'தமிழ் மொழி', 'می\u200cروم خانه\u200cها',
    'क\u200dष द'])
def test_marks_are_letters(words):
    """In Hindi, Thai, ..., vowels are marks. A word is one word, and becomes one token."""
    first, *others = words.split()
    assert regex.findall(data.BPE_PATTERN, words) == [first, *(f' {word}' for word in others)]
    tokenizer = Tokenizer.train('bpe', [f' {words}' * 9], 4096)
    assert len(tokenizer.encode(f' {words}')) == 1 + len(others)
    assert tokenizer.decode(tokenizer.encode(words)) == words


def test_earlier_tokenizers_keep_their_words(tmp_path):
    """Those of checkpoints, which have their pattern, and that of `code`; also within a corpus that
    another one has prepared. Without marks as letters é, which is e and an accent, is two words."""
    tokens = [*data.BYTES, '\xcc\x81', 'e\xcc\x81']
    path = write_splits(tmp_path / 'x', ['e\u0301' * 9], ['e\u0301'])
    for pattern, n_tokens in ((data.BPE_PATTERN, 10), (data.GPT2_PATTERN, 19)):
        corpus = prepared(path, Tokenizer('bpe', tokens, pattern))
        assert len(corpus.train.tokens) == n_tokens
    learned = prepared(path, 'bpe', 258).tokenizer
    old = Tokenizer('bpe', learned.tokens[:-1])
    assert prepared(path, old).tokenizer.pattern == data.GPT2_PATTERN != learned.pattern
    assert Tokenizer('bytes').pattern == data.GPT2_PATTERN


def naive_bpe(words, n_merges):
    """Counts all pairs again for each merge -> all tokens, the tokens of each word"""
    tokens = list(data.BYTES)
    cut = list(map(list, words))
    for _ in range(n_merges):
        pairs = Counter()
        for parts in cut:
            pairs.update(zip(parts, parts[1:]))
        a, b = min(pairs, key=lambda pair: (-pairs[pair], *map(tokens.index, pair)))
        tokens.append(a + b)
        for parts in cut:
            for i in range(len(parts)):
                if parts[i:i + 2] == [a, b]:
                    parts[i:i + 2] = [a + b]
    return tokens, cut


@mark.parametrize('seed', range(6))
def test_bpe_equals_the_naive_loop_and_tiktoken(seed):
    """Few letters and many repetitions: ties and overlapping pairs (aaa) are frequent."""
    rng = random.Random(seed)
    letters = 'ab' if seed % 2 else 'abcz'
    words = [''.join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(300)]
    tokens, cut = naive_bpe(words, 120)
    assert data.learn_bpe(Counter(words), 120) == tokens
    tokenizer = Tokenizer('bpe', tokens)
    for word, parts in zip(words, cut):
        assert [tokenizer.tokens[i] for i in tokenizer.encode(word)] == parts
    assert data.learn_bpe({'abc': 2}, 9)[256:] == ['ab', 'abc']     # then no pair is left


def test_words():
    """<eos> occurs 4 times, b 3 times, = twice, A and c once, <unk> never."""
    tokenizer = Tokenizer.train('word', [' \n = A b = \n', 'b c\n\nb'])
    assert tokenizer.tokens == ['<eos>', 'b', '=', 'A', 'c', '<unk>']
    assert tokenizer.encode('b zebra\nc\n').tolist() == [1, 5, 0, 4, 0]
    assert tokenizer.decode([1, 5, 0, 4, 0]) == 'b <unk> \n c \n'
    assert Tokenizer('word', ['<unk>', '<eos>', *map(str, range(65_535))]).dtype == np.uint32


def test_a_document_of_blanks_has_no_words(tmp_path):
    corpus = prepared(write_splits(tmp_path / 'src', ['a b', ' ', 'c'], []), 'word')
    assert corpus.train.offsets.tolist() == [0, 2, 3]


# --------------------------------------------------------------------------------------------------
# corpora: their documents and splits
@fixture
def src(tmp_path):
    """A function that writes files to the folder src. -> its path"""
    return partial(write, tmp_path / 'src')


def prepared(path, tokenizer='bytes', *args):
    return load(path, tokenizer, *args, root=path.parent / 'corpora')


def texts_of(corpus):
    """The texts of the documents of train, val and test, three lists"""
    splits = []
    for split in (corpus.train, corpus.val, corpus.test):
        documents = np.split(split.tokens, split.offsets[1:-1]) if split else []
        texts = [corpus.tokenizer.decode(document) for document in documents]
        splits.append([text.removesuffix('<|endoftext|>') for text in texts])
    return splits


ARTICLE_A = (' \n = A = \n \n aa \n \n = = Part = = \n \n x \n = not = \n \n = nor this = \n y \n'
             ' = nor = \n y \n \n')
ARTICLE_B = ' = B ( c ) = \n \n bb = b = \n'
LINES = ['first\nwith lines\n\n', 'second \u2028 <|endoftext|>', 'third']
FILES = {                               # files, and the documents of train, val and test
    'named splits': (
        {'train_txt': '1 2\n3', 'a-valid-00-of-01_txt': '4\n', 'test__5_txt': '5 ß\n',
         'test__6_txt': '6', 'notes_txt': 'no', 'notes__protest_txt': 'no', 'eval_py': 'no'},
        ['1 2\n3'], ['4\n'], ['5 ß\n', '6']),
    'names of splits': (
        {'a__Train__1_txt': '1', 'a__Train__DEV2_TXT': '2', 'myTrainingData_txt': '3',
         'x__train__test__validation-01_txt': '4', 'Test__EvalSet_txt': '5', 'traın_txt': 'no'},
        ['1', '3'], ['2', '4'], ['5']),
    'articles of WikiText': (
        dict(train_txt=ARTICLE_A + ARTICLE_B, val_txt=''),
        [ARTICLE_A, ARTICLE_B], [], []),
    'jsonl': (
        dict(train_jsonl=jsonl([*LINES, '', '\ud800']) + '\n', val_jsonl=jsonl([''])),
        [*LINES, '?'], [], []),
    'files that are no text': (
        dict(train_txt='a', b_txt=b'caf\xe9', val_txt=b'\xff', _test='x', test_txt=b'cut \xe6'),
        ['a'], [], []),
    'folders of any name': (
        dict(out__train_txt='1', site_packages__test__a_txt='2', test__x__train_py='3',
             corpora__val_txt='4', tests__val_txt='5'),
        ['1'], ['4', '5'], ['2', '3'])}


@mark.parametrize('name', FILES)
def test_documents_of_files(src, name):
    files, *expected = FILES[name]
    path = src(**files)
    # a folder of corpora within the text is no source
    corpus, again = (load(path, 'bytes', root=path / 'test/mine') for _ in range(2))
    assert texts_of(again) == expected
    assert again.folder == corpus.folder


def lines_of_screen(capsys):
    """{title: line} of what load prints"""
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(': ', 1) for line in lines)


def test_one_name_alone_is_no_split(src, capsys):
    """Nor are names of programs."""
    files = {f'novel{i}_txt': f'novel {i} ' * 9 for i in range(40)}
    corpus = prepared(src(a__TrainOfThought_txt='x' * 99, test_py='x' * 99, **files))
    assert sum(map(len, texts_of(corpus))) == 42
    assert corpus.val and corpus.test
    assert not [title for title in lines_of_screen(capsys) if title.startswith('not used')]


def test_the_screen_names_the_files_of_each_split(src, capsys):
    """And all that is not used, with the reason. A file that is not used can be no JSON."""
    path = src(**{f'train_{i}_txt': 'a' for i in range(4)}, dev_txt='bb', x__dev__b_txt='a',
               notes_json='c', x__notes_txt='c', eval_txt=b'a\xff', _git__a='', _b='',
               my__run__ckpt_pt='', my__run__config_json='', my__run__train_txt='')
    (path / 'x/link').symlink_to('nowhere')
    os.mkfifo(path / 'pipe')
    prepared(path)
    lines = lines_of_screen(capsys)
    del lines[next(iter(lines))]                                # the folder
    assert lines == {
        'splits': 'by the names of files',
        'train': "4 files, ['train.0.txt', 'train.1.txt', 'train.2.txt'], 4 documents, 8 tokens",
        'val': "2 files, ['dev.txt', 'x/dev/b.txt'], 2 documents, 5 tokens, "
               'documents that are also in train: 1',
        'test': '0 files, []',
        'not used (hidden)': "2 files, ['.b', '.git']",
        'not used (a run of train.py)': "1 files, ['my/run']",
        'not used (a broken link or a device)': "2 files, ['pipe', 'x/link']",
        'not used (no split in the name)': "2 files, ['notes.json', 'x/notes.txt']",
        'not used (not UTF-8; Latin-1 (iconv -f latin1 -t utf-8), another encoding (iconv -l), or '
        'UTF-8 with wrong bytes (iconv -c -f utf-8 -t utf-8))':
            "1 files, ['eval.txt: byte 1 is 0xff']"}


@mark.parametrize('tokenizer', ['bytes', 'word'])
def test_line_ends_and_bom(tmp_path, src, tokenizer):
    """The same documents, counts and fingerprint as with line feeds and no byte order mark"""
    files = dict(train_txt=ARTICLE_A + ARTICLE_B, val_jsonl=jsonl(['x\ny', 'z']), test_txt='1\n2')
    expected = prepared(src(**files), tokenizer)
    for i, end in enumerate(['\r\n', '\r', '\n']):
        changed = {name: '\ufeff' + text.replace('\n', end) for name, text in files.items()}
        changed['val_jsonl'] = changed['val_jsonl'].replace('\\n', '\\r\\n')
        corpus = prepared(write(tmp_path / f'{i}', **changed), tokenizer)
        assert corpus.fingerprint == expected.fingerprint
        assert texts_of(corpus) == texts_of(expected)
        assert corpus.train[3:] == expected.train[3:]
    word = Tokenizer('word', ['<unk>', '<eos>', 'a'])
    assert word.encode('a\r\na\ra').tolist() == [2, 1, 2, 1, 2]


@mark.parametrize('before, after', [('', ' \n'), ('', ''), ('\n', '\n')])
def test_titles_without_blank_lines(src, before, after):
    """Before titles, or anywhere"""
    articles = [f' = A {j} = \n{after} = = Part = = \n{after} x = y\n{before}' for j in range(30)]
    train, val, test = texts_of(prepared(src(a_txt=''.join(articles))))
    assert train[:26] == articles[:26]
    assert ''.join(train + val + test) == ''.join(articles)


JSON_TEXTS = ['one', 'two\nlines', 'three']
ITEMS = [dict(text=text, n=1) for text in JSON_TEXTS]


@mark.parametrize('name, content', [
    ('train.JSONL', jsonl(JSON_TEXTS)), ('train.ndjson', jsonl(JSON_TEXTS)),
    ('train.jsonlines.gz', jsonl(JSON_TEXTS)), ('train.json', jsonl(JSON_TEXTS)),
    ('TRAIN.Json', json.dumps(ITEMS, indent=1)), ('TRAIN.json.GZ', json.dumps(ITEMS))])
def test_json(src, name, content):
    test = gzip.compress(b'\xef\xbb\xbfa\r\nb')
    binary = gzip.compress(b'PK\0\xff')
    content = content.encode()
    if name.lower().endswith('.gz'):
        content = gzip.compress(content)
    corpus = prepared(src(test_MD_gz=test, train_tar_gz=binary, **{
        name: content, 'val.json': json.dumps(dict(text='v'), indent=1)}))
    assert texts_of(corpus) == [JSON_TEXTS, ['v'], ['a\nb']]
    [reason] = corpus.about.keys() - {'splits', *data.SPLITS}
    assert 'packed by gzip' in reason
    assert corpus.about[reason] == "1 files, ['train.tar.gz: byte 1 is 0x8b']"


def test_files_of_pairs(src):
    """Blanks around fields, further columns and empty lines are left out."""
    path = src(train_tsv=' a  b \t c \r\n\n d\te\tf\n', val_tsv='\tx')
    assert texts_of(prepared(path))[:2] == [['a  b\tc', 'd\te'], ['\tx']]
    assert 'word' in one_line(prepared, path, 'word')
    assert "train.tsv', line 2: 'a b'" in one_line(prepared, write(path, train_tsv='a\tb\na b'))
    mixed = write(path, train_tsv='a\tb', test_txt='a')
    assert 'other files' in one_line(prepared, mixed)


def test_a_file_without_a_split_does_not_mix_with_pairs(src):
    """As about.txt, next to train.tsv and valid.tsv"""
    corpus = prepared(src(train_tsv='a\tb', valid_tsv='c\td', about_txt='sentences from ...'))
    assert texts_of(corpus) == [['a\tb'], ['c\td'], []]
    assert corpus.tab == 9


@fixture
def parquet(src):
    """A function that writes columns to a .parquet file. -> the folder"""
    pyarrow = importorskip('pyarrow')
    module = importorskip('pyarrow.parquet')

    def write_columns(name, types=None, **columns):
        path = src(**{name: ''})
        table = pyarrow.table(columns)
        for column, dtype in (types or {}).items():
            table = table.set_column(table.column_names.index(column), column,
                                     table[column].cast(dtype))
        module.write_table(table, path / name, row_group_size=2)
        return path
    return write_columns


def test_parquet(parquet):
    """In row groups of two; a cell without a text is no document."""
    texts = ['one', 'two\r\nlines', None, '', 'three']
    parquet('train-00000-of-00002.parquet', text=texts, url=['x'] * 5)
    parquet('train-00001-of-00002.parquet', dict(words='large_string'), words=['4'], n=[1])
    parquet('validation-00000-of-00001.PARQUET', n=[1, 2], text=['v', 'w'])
    path = parquet('test-00000-of-00001.parquet', text=['t'])
    assert texts_of(prepared(path)) == [['one', 'two\nlines', 'three', '4'], ['v', 'w'], ['t']]


def test_rows_of_parquet_are_split_by_the_hash_of_their_text(parquet):
    texts = 3 * [f'{i}' for i in range(200)]
    assert sorted_texts(parquet('a.parquet', content=texts)) == by_split(texts, texts)


@mark.parametrize('columns', [
    dict(a=['x'], b=['y']), dict(n=[1]), dict(text=[1]),
    dict(text=[['x']], title=['y'])])
def test_parquet_without_a_column_of_text(parquet, columns):
    message = one_line(prepared, parquet('a.parquet', **columns))
    assert 'a.parquet' in message and 'named text' in message


def test_parquet_that_cannot_be_read(src, monkeypatch):
    """It is damaged, or pyarrow is not installed."""
    importorskip('pyarrow.parquet')
    path = src(a_parquet='nonsense')
    assert 'cannot be read' in one_line(prepared, path)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    assert 'pip install pyarrow' in one_line(prepared, path)


def share(text):
    """A hash as a number from 0 to 1, by which a name or a line goes to val, test or train"""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2 ** 64


def split_of(text):
    return 'val' if share(text) < 0.05 else 'test' if share(text) < 0.1 else 'train'


def by_split(texts, keys):
    """The texts of train, val and test, if the keys decide, sorted"""
    return [sorted(text for text, key in zip(texts, keys) if split_of(key) == split)
            for split in data.SPLITS]


def sorted_texts(path):
    return list(map(sorted, texts_of(prepared(path))))


def test_files_are_split_by_the_hash_of_their_names_alone(src, capsys):
    """Files that are added later move none, whatever their sizes."""
    rng = random.Random(0)
    files = {f'f{i}_txt': f'{i:4} ' * rng.randint(1, 40) for i in range(200)}
    for n in (90, 110, 200):
        texts = dict(islice(files.items(), n))
        names = [name.replace('_', '.') for name in texts]
        assert sorted_texts(src(**texts)) == by_split(texts.values(), names)
    assert 'a hash of their names' in lines_of_screen(capsys)['splits']


@mark.parametrize('split', ['val', 'test'])
def test_files_are_cut_if_a_large_one_is_held_out(src, split):
    """More than a quarter of the text is not for val or test: each file is cut."""
    names = [f'f{i}.txt' for i in range(200)]
    large = next(name for name in names if split_of(name) == split)
    files = {name: f'{name} ' * (9000 if name == large else 30) for name in names}
    train, val, test = texts_of(prepared(src(**files)))
    assert len(train) == len(val) == len(test) == 200
    assert sum(map(len, train)) == approx(0.9 * sum(map(len, files.values())), rel=0.02)


def test_a_copy_of_a_file_of_train_is_in_train(src):
    texts = {f'f{i}_txt': f'{i:4} ' * 40 for i in range(120)}
    names = {split_of(name.replace('_', '.')): name for name in texts}
    for split in ('val', 'test'):
        texts[names[split]] = texts[names['train']].replace('\n', '\r\n')
    splits = texts_of(prepared(src(**texts)))
    assert splits[0].count(texts[names['train']]) == 3


def test_a_copy_of_a_file_of_val_is_in_val(src):
    texts = {f'f{i}_txt': f'{i:4} ' * 40 for i in range(120)}
    names = {split_of(name.replace('_', '.')): name for name in texts}
    texts[names['test']] = texts[names['val']]
    splits = texts_of(prepared(src(**texts)))
    assert [split.count(texts[names['val']]) for split in splits] == [0, 2, 0]


@mark.parametrize('name, line', [
    ('a.jsonl', '{{"text": "{}"}}'), ('b.tsv', '{}\tx'), ('train.json.gz', '{{"text": "{}"}}')])
def test_lines_are_split_by_the_hash_of_their_text(src, name, line):
    """Equal lines are in one split, and lines that are added later move none."""
    texts = [random_text(9, i, 'abc') for i in range(400)]
    for n in (300, 400):
        lines = random.Random(n).choices(texts[:n], k=2 * n)
        content = '\n'.join(map(line.format, lines)).encode()
        if name.endswith('.gz'):
            content = gzip.compress(content)
        documents = [text + '\tx' if name == 'b.tsv' else text for text in lines]
        assert sorted_texts(src(**{name: content})) == by_split(documents, documents)


@mark.parametrize('n', [2, 3, 5, 15, 40])
def test_few_lines(src, n):
    """Where no line would be in val, the smallest hashes are in val, the next ones in test."""
    n_held_out = max(1, n // 20)
    texts = [f'{i:9}' for i in range(999) if share(f'{i:9}') > 0.05][:n]
    hashed = sorted(texts, key=share)
    expected = [hashed[2 * n_held_out:], hashed[:n_held_out], hashed[n_held_out:2 * n_held_out]]
    if n == 2:
        expected = [hashed[1:], hashed[:1], []]
    assert sorted_texts(src(a_jsonl=jsonl(texts * 2))) == [sorted(texts * 2) for texts in expected]


def test_one_line_is_in_train(src):
    corpus = prepared(src(a_jsonl=jsonl(9 * ['a b'])))
    message = one_line(corpus.batches, corpus.val, 'segments', 4, 2, seed=0)
    assert 'val' in message and not re.search('[0-9]', message)


@mark.parametrize('files, n_copies', [
    (dict(train_jsonl=jsonl('aabc'), val_jsonl=jsonl('adda'), test_jsonl=jsonl('cx')), (2, 1)),
    (dict(train_tsv='a\tb\nc\td', val_tsv='a\tb\nc\te'), (1, 0)),
    (dict(train_txt=' = A = \n x\n = B = \n y\n', val_txt=' = B = \n y\n = C = \n z\n'), (1, 0)),
    ({f'f{i}.txt': 'a' for i in range(99)}, (0, 0))])
def test_copies_that_cannot_be_moved_are_counted(src, capsys, files, n_copies):
    """In splits that the user named, and articles"""
    prepared(src(**files))
    lines = lines_of_screen(capsys)
    for split, n in zip(('val', 'test'), n_copies):
        _, _, shown = lines[split].partition(', documents that are also in train: ')
        assert shown == (str(n) if n else '')


def test_val_is_taken_from_train_if_only_train_and_test_are_named(src, tmp_path, capsys):
    """Files by their names, a file by its end, or lines by their hashes"""
    names = [f'train__{i}_txt' for i in range(200)]
    files = {name: f'{name} ' * 9 for name in names}
    keys = [name.replace('__', '/').replace('_', '.') for name in names]
    train, val, test = map(sorted, texts_of(prepared(src(**files, test_txt='t'))))
    assert val == by_split(files.values(), keys)[1]
    assert (sorted(train + val), test) == (sorted(files.values()), ['t'])

    words = ''.join(f'{i} ' for i in range(999))
    train, val, test = texts_of(prepared(write(tmp_path / 'a', train_txt=words, test_txt='t')))
    assert (train[0] + val[0], test) == (words, ['t'])
    assert len(val[0]) / len(words) == approx(0.05, abs=0.01)

    lines = [f'a{i}\tb' for i in range(200)]
    tsv = write(tmp_path / 'b', train_tsv='\n'.join(lines), test_tsv='t\tt', notes_txt='no')
    train, val, test = texts_of(prepared(tsv))
    assert val == [line for line in lines if share(line) < 0.05]
    assert (sorted(train + val), test) == (sorted(lines), ['t\tt'])
    assert capsys.readouterr().out.count('from train, because no file is named val') == 3


def test_val_is_not_among_the_files(src, capsys):
    """It is empty, or cannot be read: no part of train is used in its place."""
    for i, val in enumerate(('', b'\xff')):
        corpus = prepared(src(train_txt=random_text(99, i), val_txt=val))
        assert len(corpus.train.tokens) > 99 and not corpus.val
        assert 'file named val' in one_line(corpus.batches, corpus.val, 'segments', 4, 2, 0)


@mark.parametrize('n_files', [1, 3, 4])
def test_few_files_are_cut_at_blanks(src, n_files):
    """Where 2.5% cannot be held out, the end of each file is; train.py is a program, d.py small."""
    texts = {}
    for name, blank in zip(('train', 'b', 'c', 'd')[:n_files], '\n \t '):
        n_words = 50 if name == 'd' else 999
        texts[f'{name}_py'] = ''.join(f'{name}-{i}{blank}' for i in range(n_words))
    splits = texts_of(prepared(src(**texts)))
    for text, *parts in zip(sorted(texts.values()), *splits, strict=True):
        assert ''.join(parts) == text
        assert {part[-1] for part in parts} == {text[-1]}
        shares = [100 * len(part) / len(text) for part in parts]
        assert shares == approx([90, 5, 5], abs=2)


@mark.parametrize('name, end', [('bpe', [299]), ('word', [])])
def test_pieces_change_nothing(tmp_path, name, end):
    """Threads encode a long document in many pieces: the ids are those of the whole, in order."""
    texts = [random_text(100_000, seed, "abs'12é.  \n\n") for seed in range(3)]
    corpus = prepared(write_splits(tmp_path / 'p', texts, []), name, 300)
    documents = np.split(corpus.train.tokens, corpus.train.offsets[1:-1])
    for ids, text in zip(documents, texts, strict=True):
        assert ids.tolist() == corpus.tokenizer.encode(text).tolist() + end


def test_code_is_the_standard_library(tmp_path):
    """A document is a top-level module, or a package: its files in order of their paths."""
    documents = sum(texts_of(load('code', 'bytes', root=tmp_path)), [])
    library = Path(os.__file__).parent
    paths = sorted((library / 'asyncio').rglob('*.py'), key=Path.as_posix)
    assert ''.join(map(Path.read_text, paths)) in documents
    assert (library / 'heapq.py').read_text() in documents
    assert (library / 'encodings/utf_8.py').read_text() not in ''.join(documents)


def test_gpt2_tokens(monkeypatch):
    """In the order of their ids, bytes as characters; without its files, the message names them"""
    ranks = {bytes([255 - i]): i for i in range(256)}
    tiny = tiktoken.Encoding('tiny', pat_str='.', mergeable_ranks={**ranks, b'ab': 256},
                             special_tokens={'<|endoftext|>': 257})
    monkeypatch.setattr(tiktoken, 'get_encoding', {'gpt2': tiny}.get)
    tokens, pattern = data.gpt2_tokens()
    assert (tokens[0], tokens[255:], pattern) == ('\xff', ['\0', 'ab'], '.')
    monkeypatch.setattr(tiktoken, 'get_encoding', {}.__getitem__)
    assert 'TIKTOKEN_CACHE_DIR' in one_line(data.gpt2_tokens)


def test_bpe_learns_from_the_first_texts_and_the_most_frequent_words(monkeypatch):
    monkeypatch.setattr(data, 'LEARN_FROM', 4)
    tokens = data.bpe_tokens(['ab ' * 9, 'cd ' * 9], 300, data.BPE_PATTERN)
    assert 'ab' in tokens and 'cd' not in tokens
    monkeypatch.setattr(data, 'LEARN_WORDS', 1)
    counts = Counter({'a': 9, 'b': 8, 'c': 7})
    assert data.pieces_to_learn(counts).keys() == {'a', 'b'}


def test_the_words_of_code_are_those_of_gpt2(src, monkeypatch):
    """As in earlier versions. Tests, and what is no module, are left out."""
    library = src(**{f'm{i}_py': f'm{i} ' * 9 for i in range(90)}, p__b_py='b', p__a_py='a\n',
                  test__c_py='c', p__tests__d_py='d', README_txt='e', config_3__f_py='f', _g_py='g')
    (library / 'config.3').rename(library / 'config-3')
    monkeypatch.setattr(data.sysconfig, 'get_path', lambda name: library)
    corpus = load('code', 'bpe', 300, root=library.parent)
    assert corpus.tokenizer.pattern == data.GPT2_PATTERN
    documents = sum(texts_of(corpus), [])
    assert sorted(documents) == sorted(['a\nb', *(f'm{i} ' * 9 for i in range(90))])


def test_how_code_is_split():
    """In order of sha256(name) to val, else to test, while these have at most 5%, else to train"""
    sizes = {f'f{i}': 2800 if i % 9 == 0 else 200 for i in range(90)}
    n = sum(sizes.values())
    room = dict(val=n // 20, test=n // 20, train=n)
    expected = {}
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        expected[name] = next(split for split in room if sizes[name] <= room[split])
        room[expected[name]] -= sizes[name]
    sources = [data.Source(name, [], [], np.array([sizes[name] - 9, 9])) for name in sizes]
    assert data.split_code(sources) == expected


# --------------------------------------------------------------------------------------------------
# corpora: their folders
def test_a_changed_source_makes_another_folder(tmp_path, src, monkeypatch):
    path = src(train_txt=random_text(360, 1), val_txt='a')
    corpus = prepared(path)
    assert prepared(path).folder == corpus.folder
    changed = prepared(src(val_txt='b'))
    assert changed.folder != corpus.folder
    copy = prepared(shutil.copytree(path, tmp_path / 'x/src'))  # equal names, sizes, times
    assert copy.fingerprint == changed.fingerprint != corpus.fingerprint
    assert copy.folder.name != changed.folder.name
    monkeypatch.setattr(data, 'VERSION', 0)
    assert prepared(path).folder != changed.folder


def test_a_renamed_link_makes_another_folder(tmp_path, src):
    """Names, those of links too, tell the splits."""
    path = src(a_train_txt=random_text(360, 1))
    files = write(tmp_path / 'more', b_txt='b', c_txt='c')
    links = [path / 'b_val.txt', path / 'c_test.txt']
    for link, file in zip(links, ('b.txt', 'c.txt')):
        link.symlink_to(files / file)
    assert texts_of(prepared(path))[1:] == [['b'], ['c']]
    links[0].rename(path / 'b_test.txt')
    links[1].rename(path / 'c_val.txt')
    assert texts_of(prepared(path))[1:] == [['c'], ['b']]


def test_runs_and_corpora_within_the_text_are_left_out(src, monkeypatch):
    """A run that has just begun, which has only a lock, and a corpus of another root"""
    path = src(a_txt=random_text(360, 1), out__run__train_lock='')
    monkeypatch.chdir(path)
    load('a.txt', 'bytes', quiet=True)
    assert list(prepared(path).about['train'].split("'")[1::2]) == ['a.txt']


def test_a_long_name(src):
    path = src(**{240 * 'x' + '_txt': random_text(360, 1)})
    assert prepared(next(path.iterdir())).train


def test_links_to_folders_are_followed(tmp_path, src):
    path = src(train__a_txt='a')
    (path / 'train/link').symlink_to(write(tmp_path / 'more', b_txt='b'))
    (path / 'train/broken').symlink_to('nowhere')
    (path / 'val').symlink_to(path / 'train')                   # train comes first
    (path / 'a_link').symlink_to('train/a.txt')
    (path / 'all').symlink_to('..')
    (tmp_path / 'val.txt').write_text('c')
    assert texts_of(prepared(path)) == [['a', 'b'], ['c'], []]


def test_the_tokenizer_of_another_corpus(tmp_path):
    stone = prepared(write(tmp_path / 'a', train_txt='a stone in the river ' * 40), 'bpe', 262)
    path = write(tmp_path / 'b', train_txt='the moon and the stars ' * 40)
    moon = prepared(path, 'bpe', 262)
    mixed = prepared(path, stone.tokenizer)
    assert mixed.tokenizer.tokens == stone.tokenizer.tokens != moon.tokenizer.tokens
    assert texts_of(mixed) == texts_of(moon)
    text, tokenizer = mixed.fingerprint.split('-')
    assert moon.fingerprint.startswith(text)
    assert stone.fingerprint.endswith(tokenizer)
    assert prepared(path, moon.tokenizer).folder == moon.folder


def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)


@mark.parametrize('owner, name', [(data, 'learn_bpe'), (data.SplitWriter, 'finish'),
                                  (Path, 'write_text'), (Path, 'rename')])
def test_a_killed_preparation_leaves_no_corpus(src, monkeypatch, owner, name):
    """The process is killed when it calls owner.name. Then three prepare the corpus at once. The
    folder of the first one is removed."""
    path = src(train_txt=random_text(120_000, 1))
    fork = get_context('fork')
    with monkeypatch.context() as patch, ProcessPoolExecutor(1, fork) as pool:
        patch.setattr(owner, name, kill)
        with raises(BrokenProcessPool):
            pool.submit(prepared, path, 'bpe', 270).result()
    [folder] = path.parent.glob('corpora/*')
    assert folder.suffix == '.tmp'
    with ProcessPoolExecutor(3, fork) as pool:
        for corpus in pool.map(prepared, [path] * 3, ['bpe'] * 3, [270] * 3):
            assert corpus.train.n_bytes > 120_000
    assert list(path.parent.glob('corpora/*')) == [corpus.folder]


def test_the_folder_of_a_running_preparation_stays(src, monkeypatch):
    """Here, and on another machine, unless nothing has changed in it for a week"""
    path = src(train_txt='a')
    corpora = path.parent / 'corpora'
    here, there = corpora / 'here', corpora / 'there'
    with data.new_folder(here) as mine:
        with monkeypatch.context() as patch:
            patch.setattr(platform, 'node', lambda: 'another')
            with raises(KeyboardInterrupt), data.new_folder(there) as theirs:
                shutil.copytree(theirs, corpora / 'killed.0123abcd.tmp')
                raise KeyboardInterrupt
        assert list(corpora.glob('there*')) == []
        week = 7 * 86_400
        others = corpora / 'video.tmp', corpora / 'video.0123abcd.tmp'     # of another program
        for folder in others:
            folder.mkdir()
        for file in (mine / 'lock', mine, *others):
            os.utime(file, 2 * (time.time() - 2 * week,))
        prepared(path)
        assert {mine, corpora / 'killed.0123abcd.tmp', *others} <= {*corpora.iterdir()}

        for file in (corpora / 'killed.0123abcd.tmp/lock', corpora / 'killed.0123abcd.tmp'):
            os.utime(file, 2 * (time.time() - week - 60,))
        prepared(path)
        assert mine.exists() and not (corpora / 'killed.0123abcd.tmp').exists()
    assert here.exists() and not mine.exists()


@mark.parametrize('name, content, place', [
    ('a.jsonl', jsonl('ab' * 99) + '\n{}\n', 'line 200'),
    ('a.json', '[{"text": "x"}, 3]', 'item 2'), ('a.json', '{"text": "x"}\n{}', 'line 2'),
    ('a.json', '{}\n{"text": "x"}', 'line 1'), ('a.json', '[{}, {"text": "x"}]', 'item 1'),
    ('a.json', '[{"text": "x"', "line 1: '[{\"text"),
    ('a.json', '[\n{"text": "x"}\n5]', "line 3: '5]"),
    ('a.json', '\n[\n{"text": "x"}\n5]', "line 4: '5]"),
    ('a.json', '[{"text": "x"},\n\n', "line 1: '[{"),
    ('a.json', '\n\n[{"text": "a", "n": ' + 5000 * '1' + '}]', "line 1: '[{"),
    ('a.txt.gz', 'no gzip', 'cannot be read'), ('train.jsonl', 'nonsense', 'nonsense'),
    ('train.jsonl', '{"text": 3}', '{"text": 3}')])
def test_files_that_are_refused(tmp_path, src, name, content, place):
    path = src(val_txt='a')
    (path / name).write_text(content)
    message = one_line(prepared, path)
    assert place in message and name in message
    assert not list(tmp_path.glob('corpora/*'))


@mark.parametrize('content', [
    '5', '\n{"name": "app"}', '[\n{"name": "app"}]', '{\n"a": {}}', '{"a": 1,}', '{\n// x\n}'])
def test_other_json(src, content):
    """Left out of a folder of texts, refused alone"""
    path = src(train_txt='a', val_txt='b', train_package_json=content)
    corpus = prepared(path)
    assert texts_of(corpus)[:2] == [['a'], ['b']]
    left_out = corpus.about['not used (JSON without {"text": "..."})']
    assert left_out == "1 files, ['train.package.json']"
    assert 'is not {"text": "..."}' in one_line(prepared, path / 'train.package.json')


@mark.parametrize('name', ['ckpt.pt', 'meta.json'])
def test_a_run_or_a_corpus_is_no_text(src, name):
    files = {name: '', 'config.json': '', 'train.idx': ''}
    assert 'is no text' in one_line(prepared, src(**files))


@mark.parametrize('files', [
    dict(train_txt=b'\xff', val_txt='a'), dict(train_txt='', val_txt='a'), dict(a_txt=''),
    dict(a_jsonl=''), dict(_a='x')])
def test_no_training_text(src, files):
    assert 'no text' in one_line(prepared, src(**files))


@mark.parametrize('path', ['', 'no/such', 'a\0b', 'niah:no/such'])
def test_no_such_file(path):
    assert '--data' in one_line(load, path) and 'code, random' in one_line(load, 'no/such')
    assert 'pg19, niah, niah2' in one_line(load, 'niah3')


@mark.parametrize('content, encoding, where', [
    ('abc café'.encode('latin-1'), 'latin1', 'byte 7 is 0xe9'),
    ('日本'.encode() + b'\xff', 'utf-8 -t utf-8', 'byte 6 is 0xff'),
    (b'a' * 3_000_000 + 'é'.encode()[:1], 'utf-8 -t utf-8', 'byte 3,000,000 is 0xc3'),
    (b'a' * (2 ** 20 - 1) + 'é'.encode() + b'\xc0', 'utf-8 -t utf-8', 'byte 1,048,577 is 0xc0'),
    ('abc'.encode('utf-16'), 'utf-16', 'byte 0 is 0xff'),
    (codecs.BOM_UTF16_BE + 'abc'.encode('utf-16be'), 'utf-16', 'byte 0 is 0xfe'),
    ('abc'.encode('utf-16le'), 'utf-16le', 'byte 1 is 0x00'),
    ('abé'.encode('utf-16be'), 'utf-16be', 'byte 5 is 0xe9'),
    ('abc'.encode('utf-32'), 'utf-32', 'byte 0 is 0xff')])
@mark.parametrize('name', ['a.txt', 'a.jsonl', 'a.txt.gz'])
def test_the_encoding_of_a_file(src, capsys, name, content, encoding, where):
    """Alone, the file is an error that names what to do; next to another file it is left out."""
    if name.endswith('.gz'):
        content = gzip.compress(content)
    message = one_line(prepared, src(**{name: content}))
    assert f'{name}: {where}' in message and f'-f {encoding}' in message
    corpus = prepared(src(b_txt='abc ' * 99))
    assert ''.join(sum(texts_of(corpus), [])) == 'abc ' * 99
    shown = capsys.readouterr().out
    assert f'{name}: {where}' in shown and f'-f {encoding}' in shown


def test_a_text_without_blanks_is_cut_anywhere(src):
    train, val, test = texts_of(prepared(src(a_txt='日' * 1000)))
    assert [len(texts[0]) for texts in (train, val, test)] == [925, 50, 25]


@mark.parametrize('file, start, stop, new', [
    ('meta.json', 40, None, b''), ('meta.json', 0, None, b'[]'),
    ('meta.json', 0, None, b'{"tokenizer": {"name": "bytes"}}'),
    ('train.idx', 8, 16, bytes(8)),                                             # an empty document
    ('train.bin', 90, None, b''),
    ('train.bin', 0, 2, b'\1\1')])                                              # the id 257
def test_a_damaged_corpus_is_prepared_again(src, file, start, stop, new, capsys):
    path = src(a_jsonl=jsonl(39 * ['a b']))     # is cut at line ends
    file = prepared(path).folder / file
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[start:stop] = new
    file.write_bytes(damaged)
    assert prepared(path).folder == file.parent
    assert file.read_bytes() == content
    assert str(file.parent) in capsys.readouterr().err


def test_what_is_no_tokenizer():
    for arguments in (('/../../zz',), ([],), ('bpe', data.BYTES[:255]), ('word', ['a'])):
        with raises(ValueError, match='tokenizer'):
            Tokenizer(*arguments)


def test_downloads(tmp_path, monkeypatch):
    """Files or a zip of them are downloaded once for all tokenizers."""
    web = write(tmp_path / 'web', input_txt='line\n' * 100)
    with zipfile.ZipFile(web / 'wikitext-103-v1.zip', 'w') as archive:
        for split in ('train', 'valid'):
            archive.writestr(f'wikitext-103/wiki.{split}.tokens', ' word\n' * 100)

    def download_once(url, file, sha256):
        (web / Path(url).name).rename(file)

    monkeypatch.setattr(torch.hub, 'download_url_to_file', download_once)
    for tokenizer in ('bytes', 'word'):
        assert load('shakespeare', tokenizer, root=tmp_path).train.n_words == 90
        assert load('wikitext103', tokenizer, root=tmp_path).train.n_words == 100


def test_two_downloads_at_once(tmp_path, monkeypatch):
    def download(url, file, sha256):
        file.write_text('line\n' * 100)

    def slowly(url, file, sha256):
        monkeypatch.setattr(torch.hub, 'download_url_to_file', download)
        load('shakespeare', 'bytes', root=tmp_path)             # another process is faster
        download(url, file, sha256)

    monkeypatch.setattr(torch.hub, 'download_url_to_file', slowly)
    assert load('shakespeare', 'bytes', root=tmp_path).train.n_words == 90
    assert os.listdir(tmp_path / 'downloads') == ['shakespeare']


def test_a_failed_download(tmp_path, monkeypatch):
    """The message has the reason, or the folder for the files."""
    another = write(tmp_path, input_txt='line\n') / 'input.txt'
    monkeypatch.setitem(data.DOWNLOADS, 'shakespeare', {another.as_uri(): 'abcdef'})
    assert 'hash' in one_line(load, 'shakespeare', root=tmp_path)
    assert str(tmp_path / 'downloads/pg19') in one_line(load, 'pg19', root=tmp_path)


# --------------------------------------------------------------------------------------------------
# batches
KINDS = ('segments', 'consecutive', 'packed', 'documents')
LENGTHS = [5, 40, 1, 17, 33, 64, 2]


def make_split(lengths=LENGTHS):
    """Documents of these lengths; the token at position i is 1000 + i."""
    offsets = np.cumsum([0, *lengths])
    return Split('train', 1000 + np.arange(offsets[-1], dtype=np.uint16), offsets)


def rows_by_definition(T, B, of_documents):
    """The rows of an epoch: of a grid; or whole rows of each document, then of their joined ends.
    Micro-batches of B rows are filled with padding: its position is -1, the end of these arrays."""
    stream = np.arange(sum(LENGTHS))
    tokens = np.append(1000 + stream, 0)
    targets = np.append(1001 + stream, -1)
    doc = np.append(np.repeat(range(len(LENGTHS)), LENGTHS), -1)
    if of_documents:
        stops = np.cumsum(LENGTHS)
        targets[stops - 1] = -1
        docs = np.split(stream, stops)
        whole = [positions[:len(positions) // T * T] for positions in docs]
        ends = [positions[len(positions) // T * T:] for positions in docs]
        stream = np.concatenate(whole + ends)
    else:
        stream = stream[:-1]                                    # the last token is a target only

    n_padding = -len(stream) % (B * T)
    rows = np.append(stream, n_padding * [-1]).astype(int).reshape(-1, T)
    return [*zip(tokens[rows].tolist(), targets[rows].tolist(), doc[rows].tolist())]


@mark.parametrize('kind', KINDS)
@mark.parametrize('T, B', [(16, 4), (1, 7), (41, 1), (8, 100)])
def test_batches_equal_their_definition(kind, T, B):
    batches = Grid(make_split(), kind, T, B, seed=3)
    n = len(batches)
    expected = rows_by_definition(T, B, kind == 'documents')
    for epoch in range(2):
        rows = []
        for g in range(epoch * n, epoch * n + n):
            tokens, targets, doc, _ = batches[g]
            rows += zip(tokens.tolist(), targets.tolist(), doc.tolist())
        assert sorted(rows) == sorted(expected)


@mark.parametrize('kind', KINDS)
def test_a_batch_is_a_pure_function_of_its_number(kind):
    """The order of calls is irrelevant; epochs and seeds differ."""
    split = make_split(range(20, 60))
    batches, again, different = (Grid(split, kind, 16, 4, seed) for seed in (5, 5, 6))
    n = len(batches)
    in_order = [batches[g] for g in range(2 * n)]
    for g in (n, 1, 0):
        assert again[g].seed == in_order[g].seed
        assert again[g].tokens.equal(in_order[g].tokens)

    assert len({batch.seed for batch in [*in_order, different[0]]}) == 2 * n + 1
    for batch in (in_order[n], different[0]):
        assert not in_order[0].tokens.equal(batch.tokens)


@mark.parametrize('kind', KINDS)
def test_batches_in_the_order_of_the_text(kind):
    """Micro-batch i of n has rows i B to i B + B - 1; of documents, rows i, i + n, i + 2 n, ...
    In what order training takes the rows does not matter."""
    T, B = 16, 4
    batches = Grid(make_split(), kind, T, B, seed=3)
    n = len(batches)
    of_documents = kind == 'documents'
    rows = rows_by_definition(T, B, of_documents)
    for i in range(n):
        expected = rows[i::n] if of_documents else rows[i * B:i * B + B]
        tokens, targets, doc, seed = batches.in_order(i)
        assert [*zip(tokens.tolist(), targets.tolist(), doc.tolist())] == expected
        assert seed == i


def test_an_order_is_read_only():
    """It is kept for later calls."""
    with raises(ValueError):
        data.shuffled(9, 0)[0] = 1


@mark.parametrize('m', [0, 1, 2, 4])
def test_consecutive_segments(m):
    """A micro-batch has groups of m segments that follow each other; the groups are shuffled."""
    batches = Grid(make_split(), 'consecutive', 15, 4, 0, consecutive=m)
    size = m or 4

    def in_groups(rows):
        return [rows[i:i + size] for i in range(0, len(rows), size)]

    groups = []
    for g in range(len(batches)):
        groups += in_groups(batches.rows(g).tolist())
    assert sorted(groups) == in_groups([*range(11)]) != groups


def algorithm_1(segments, docs, k=20):
    """TRIME's packing (§4.3) by its definition; docs: the documents of each segment, as sets"""
    drawn = np.random.default_rng(0).permutation(len(segments)).tolist()
    order = []
    while len(order) < len(segments):
        near = []
        if order:
            last = order[-1]
            similar = ranking(formula(segments, segments[last]))
            near = [i for i in similar if not docs[last] & docs[i]][:k]
        order.append(next(i for i in near + drawn if i not in order))
    return order


@mark.parametrize('other_documents', [True, False])
def test_packed_is_algorithm_1(other_documents):
    """296 segments of 3 tokens; documents 0 to 5 have words in common, and documents 6 to 11"""
    rng = np.random.default_rng(0)
    tokens = np.append(rng.integers(0, 40, 444), rng.integers(90, 130, 444))
    split = Split('train', tokens, np.arange(0, 889, 74))
    positions = [np.arange(i, min(i + 3, 887)) for i in range(0, 887, 3)]
    docs = [{i} for i in range(296)]                            # excluded: the segment itself
    if other_documents:
        docs = [set(split.doc_of(p)) for p in positions]
    order = algorithm_1([split.tokens[p].tolist() for p in positions], docs)
    assert Grid(split, 'packed', 3, 296, 0, other_documents).rows(0).tolist() == order


def test_packed_without_bm25_is_segments():
    packed = Grid(make_split(), 'packed', 16, 8, 0, bm25=False)
    segments = Grid(make_split(), 'segments', 16, 8, 0)
    assert packed[3].tokens.equal(segments[3].tokens)


def test_what_cannot_be_loaded_or_batched(src, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, 'RANDOM_DOCUMENTS', dict(train=1, val=1, test=1))
    Path('random').mkdir()
    assert 'random has none' in one_line(load, 'niah:random')
    corpus = prepared(src(train_txt='ab' * 99, val_txt='x'))
    message = one_line(corpus.batches, corpus.train, 'segments', 4, 2, 0, grow=4)
    assert message == '--grow-context is for --data niah or niah2'
    no_words = make_split([999]), Tokenizer('bpe')
    assert 'bytes has enough' in one_line(Needles, *no_words, 1, 256, 2, seed=0)
    load('random', 'bytes', root='corpora')
    assert 'the file or folder is ./random' in capsys.readouterr().out
    Path('niah').mkdir()
    one_line(load, 'niah', 'bpe', 1)
    assert 'the file or folder is ./niah' in capsys.readouterr().out


def test_what_cannot_be_batched():
    split = make_split()
    assert 'use --block-size 161' in one_line(Grid, split, 'segments', 162, 2, seed=0)
    Grid(split, 'segments', 161, 2, seed=0)
    assert 'named val' in one_line(Grid, None, 'segments', 4, 2, seed=0)
    assert 'consecutive 4' in one_line(Grid, split, 'consecutive', 4, 6, seed=0, consecutive=4)
    assert 'document' in one_line(Grid, make_split([99]), 'packed', 9, 2, seed=0)
    Grid(make_split([99, 99]), 'packed', 98, 2, seed=0)      # one segment is of both documents
    message = one_line(Grid, make_split([99, 99]), 'packed', 120, 2, seed=0)
    assert 'each segment shares a document with all others' in message


@mark.parametrize('kind', KINDS)
def test_val_is_shorter_than_a_row(src, kind):
    """The message names the largest --block-size that works, if there is one."""
    corpus = prepared(src(train_txt='a b ' * 99, val_txt='abcdef'))
    message = one_line(corpus.batches, corpus.val, kind, 7, 2, 0)
    assert message.startswith('val has 7 tokens')
    assert 'add text, or files named val, or use --block-size 6' in message
    assert corpus.batches(corpus.val, 'segments', 6, 2, 0)[0].tokens.shape == (2, 6)
    one_token = make_split([1])
    assert '7: add text, or files named train' in one_line(Grid, one_token, kind, 7, 2, 0)


@mark.parametrize('n_tokens, T, chunk, grow, hint', [
    (999, 256, 8, 0, 'chunks of'),                              # the sentence is longer
    (999, 300, 32, 0, 'use 288'), (999, 224, 32, 0, 'use 256'),
    (9999, 256, 32, 8, 'use 1024'),                             # rows of 1024 / 8 have 4 chunks
    (300, 320, 32, 0, 'use --block-size 288'), (200, 256, 32, 0, '256: add text')])
def test_what_has_no_room_for_needles(n_tokens, T, chunk, grow, hint):
    arguments = make_split([n_tokens]), Tokenizer('bytes'), 1
    assert hint in one_line(Needles, *arguments, T, 2, 0, chunk, grow)
    if hint.startswith('use'):
        Needles(*arguments, int(hint.split()[-1]), 2, 0, chunk, grow)


# --------------------------------------------------------------------------------------------------
# random tokens
@mark.parametrize('name, vocab_size, n_vocab', [
    ('bytes', 4096, 257), ('bpe', 4096, 4096), ('gpt2', 4096, 50_257), ('word', 267_744, 267_744)])
def test_random_tokens(tmp_path, name, vocab_size, n_vocab):
    """All ids are equally frequent; documents are long."""
    corpus = load('random', name, vocab_size, tmp_path, quiet=True)
    assert (corpus.tokenizer.n_vocab, corpus.name, corpus.tab) == (n_vocab, 'random', -1)
    for split in (corpus.train, corpus.val, corpus.test):
        tokens = np.array(split.tokens)
        n = len(tokens)
        assert set(np.diff(split.offsets)) == {2 ** 16} and tokens.max() < n_vocab
        # the number of ids in each of 200 parts of the vocabulary, and of equal neighbors
        counts = np.bincount(tokens.astype(int) * 200 // n_vocab, minlength=200)
        assert abs(counts / n - 1 / 200).max() < 6 / np.sqrt(200 * n) + 1 / n_vocab
        assert (tokens[1:] == tokens[:-1]).sum() < n / n_vocab + 6 * np.sqrt(n / n_vocab)
    assert len(corpus.train.tokens) == 2 ** 22
    assert not np.array_equal(corpus.val.tokens, corpus.test.tokens)

    # a checkpoint's tokenizer finds the corpus again
    tokenizer = Tokenizer(**json.loads(json.dumps(corpus.tokenizer.to_dict())))
    assert load('random', tokenizer, root=tmp_path, quiet=True).folder == corpus.folder
    assert tokenizer.decode(corpus.val.tokens[:99]).replace('\n', '').isprintable()
    for kind in KINDS:
        rows = corpus.batches(corpus.val, kind, 16_384, 2, seed=0)[0].tokens
        assert rows.shape == (2, 16_384) and rows.max() < n_vocab


def test_random_tokens_of_a_tokenizer(tmp_path, monkeypatch):
    """That of a trained model; in another folder the tokens are the same."""
    monkeypatch.setattr(data, 'RANDOM_DOCUMENTS', dict(train=2, val=1, test=1))
    tokenizer = Tokenizer('bpe', [*data.BYTES, 'th', 'the'])
    corpus, again = (load('random', tokenizer, root=tmp_path / name) for name in 'ab')
    assert corpus.tokenizer.to_dict() == tokenizer.to_dict()
    assert set(corpus.train.tokens) == set(range(259))
    assert corpus.fingerprint == again.fingerprint
    assert np.array_equal(corpus.train.tokens, again.train.tokens)


def test_a_text_of_one_token(tmp_path, monkeypatch):
    path = write(tmp_path, a_txt='hello') / 'a.txt'
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['data.py', str(path), 'word'])
    assert 'train has 1 tokens, too few' in one_line(data.main)


@mark.parametrize('name, files, tokenizer, shown', [
    ('text', dict(train_txt='hello there ' * 9, val_txt='x'), 'word', "'hello"),
    ('pairs', dict(train_tsv='ab\tcd\n' * 9, val_tsv='x\ty'), 'bytes', r"'\t'"),
    ('niah:needles', dict(train_txt='a b c ' * 99, val_txt='x'), 'bytes', '\nKey ')])
def test_the_rows_that_the_command_prints(
        tmp_path, monkeypatch, capsys, name, files, tokenizer, shown):
    write(tmp_path / name.removeprefix('niah:'), **files)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['data.py', name, tokenizer])
    data.main()
    screen = capsys.readouterr().out
    assert shown in screen and ('row 3\ntokens   ' in screen) == ('niah' not in name)


def test_a_vocabulary_size_of_random_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, 'RANDOM_DOCUMENTS', dict(train=1, val=1, test=1))
    monkeypatch.setattr(sys, 'argv', ['data.py', 'random', 'word', '5000'])
    data.main()
    [folder] = Path('corpora').iterdir()
    assert len(json.loads((folder / 'meta.json').read_text())['tokenizer']['tokens']) == 5000


@mark.parametrize('arguments', [
    'code bytes 9999', 'code gpt2 4000', 'code word 5000', 'random gpt2 9999'])
def test_a_vocabulary_size_that_is_not_used(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['data.py', *arguments.split()])
    with raises(SystemExit):
        data.main()
    assert 'has ids of its own' in capsys.readouterr().err


@mark.parametrize('name, tokenizer, smallest', [
    ('random', 'bpe', 2), ('random', 'word', 2), ('x', 'bpe', 257), ('enwik8', 'bpe', 257)])
def test_a_vocabulary_that_is_too_small_or_too_large(tmp_path, name, tokenizer, smallest):
    """The message names the limit. Nothing is downloaded or written before."""
    path = name
    if name == 'x':
        path = write_splits(tmp_path / 'x', ['a'], ['b'])
    root = tmp_path / 'corpora'
    assert f'at least {smallest}' in one_line(load, path, tokenizer, smallest - 1, root)
    assert 'at most 1,048,576' in one_line(load, path, tokenizer, 2_000_000, root)
    assert not root.exists()


def test_the_smallest_vocabulary(tmp_path, src):
    """The tokens of bpe without any merge are those of bytes."""
    corpus = prepared(src(train_txt='a b ' * 9, val_txt='a'), 'bpe', 257)
    assert corpus.tokenizer.tokens == Tokenizer('bytes').tokens


# --------------------------------------------------------------------------------------------------
# pairs
def shown(rows):
    return [''.join('.' if x < 0 else chr(x) for x in row) for row in rows.tolist()]


def test_rows_of_pairs(src):
    """8 tokens at most; what follows TAB is predicted, to <|endoftext|>, which is Ā here. The
    second pair has no target within 8 tokens."""
    path = src(train_tsv='ab\tcd\nabcdefgh\ti\n\tabcdefghi\n', val_tsv='\tx')
    corpus = prepared(path)
    batches = corpus.batches(corpus.train, kind='documents', block_size=8, micro_batch=4, seed=0)
    tokens, targets, doc, _ = batches.take([0, 1], 0)
    assert shown(tokens) == ['ab\tcdĀ\0\0', '\tabcdefg', *2 * [8 * '\0']]
    assert shown(targets) == ['..cdĀ...', 'abcdefgh', *2 * [8 * '.']]
    assert shown(doc) == ['\0\0\0\0\0\0..', 8 * '\2', *2 * [8 * '.']]
    assert sorted(batches.rows(0)) == [0, 1]
    assert 'within --block-size 0' in one_line(Pairs, corpus.train, 9, 'documents', 0, 1, 0)


def test_pairs_that_are_left_out_are_counted(src, capsys):
    """Source and TAB of one of three pairs in train have more than 8 tokens, and of none in val."""
    path = src(train_tsv='ab\tcd\nabcdefgh\ti\nabcdefg\tx\n', val_tsv='x\tx')
    corpus = prepared(path)
    capsys.readouterr()
    sizes = dict(kind='documents', block_size=8, micro_batch=4, seed=0)
    batches = corpus.batches(corpus.train, **sizes)
    assert (batches.n_rows, batches.n_left_out) == (2, 1)
    assert capsys.readouterr().out == ('train: 1 of 3 pairs are left out: their source and TAB '
                                       'have more than --block-size 8 tokens\n')
    corpus.batches(corpus.val, **sizes)
    quiet = load(path, 'bytes', root=path.parent / 'corpora', quiet=True)
    assert quiet.batches(quiet.train, **sizes).n_left_out == 1
    assert capsys.readouterr().out == ''

    message = one_line(corpus.batches, corpus.train, **sizes | dict(block_size=2))
    assert 'use 3 or more' in message
    assert corpus.batches(corpus.train, **sizes | dict(block_size=3)).n_rows == 1


def test_pairs_are_packed_by_their_targets():
    """App. C; 8 is TAB."""
    rng = np.random.default_rng(0)
    targets = [[*rng.integers(10, 40, 5), 9] for _ in range(90)]
    pairs = [[rng.integers(40, 45), 8, *target] for target in targets]
    split = Split('train', np.concatenate(pairs), np.arange(0, 721, 8))
    rows = Pairs(split, 8, 'packed', 16, 90, seed=0).rows(0)
    assert rows.tolist() == algorithm_1(targets, [{r} for r in range(90)])
    shuffled = Pairs(split, 8, 'packed', 16, 90, seed=0, bm25=False).rows(0)
    assert sorted(shuffled) == sorted(rows)
    assert shuffled.tolist() != rows.tolist()

    # a micro-batch in order is of all of the text
    in_order = Pairs(split, 8, 'documents', 16, 9, seed=0).in_order(1)
    assert in_order.doc[:, 0].tolist() == [*range(1, 90, 10)]


# --------------------------------------------------------------------------------------------------
# needles
CHUNK = 31
T = 32 * CHUNK


def make_needles(name, hops, grow=0, seed=0, first=0):
    """Micro-batches of 2 T tokens of a text of 25 words, from token `first` on"""
    words = [a + 'o' + b for a in 'bcdfg' for b in 'klmnp']
    text = ' '.join(random.Random(0).choices(words, k=9999))
    tokenizer = Tokenizer.train(name, [text], 330)
    ids = tokenizer.encode(text)[first:]
    split = Split('train', ids, np.array([0, len(ids)]))
    return tokenizer, Needles(split, tokenizer, hops, T, 2, seed, CHUNK, grow)


def hidden(tokenizer, row):
    """{A: B} of the needles in chunks of the first half of a row"""
    opens = {}
    for chunk in row[:len(row) // 2].reshape(-1, CHUNK):
        opens.update(re.findall(r'\nKey (.+) opens (.+)\.\n', tokenizer.decode(chunk)))
    return opens


def test_needles_are_a_pure_function_of_the_number():
    """Names are different for another seed and for another split."""
    tokenizer, needles = make_needles('bpe', 1)
    tokens = needles[0].tokens
    assert needles.rows(1).tolist() == [2, 3]
    assert tokens.equal(needles[0].tokens)
    names = hidden(tokenizer, tokens[0]).keys()
    for options in (dict(seed=1), dict(first=9)):
        _, different = make_needles('bpe', 1, **options)
        assert not names & hidden(tokenizer, different[0].tokens[0]).keys()


def test_needles_grow():
    """The rows have T / 8 tokens in the first quarter of 8 micro-batches, then T / 4, T / 2, T."""
    _, needles = make_needles('bytes', 1, grow=8)
    tokens = [needles[g].tokens for g in range(9)]
    assert [len(rows) for rows in tokens] == [16, 16, 8, 8, 4, 4, 2, 2, 2]
    assert {rows.numel() for rows in tokens} == {2 * T}

    # 33 chunks are rounded down; an epoch has as many rows as a Grid
    uneven = Needles(needles.split, Tokenizer('bytes'), 1, T + CHUNK, 2, 0, CHUNK, grow=8)
    lengths = [uneven[g].tokens.size(1) for g in (0, 2, 4, 6)]
    assert lengths == [4 * CHUNK, 8 * CHUNK, 16 * CHUNK, 33 * CHUNK]
    assert uneven.n_rows == Grid(needles.split, 'segments', T + CHUNK, 2, 0).n_rows


def check_answers(tokenizer, row, opens, scored, hops, of_opens):
    """The answers of a row follow from its needles, and are predicted. of_opens: a list, gets
    whether " opens" is predicted, too -> the number of answers"""
    n_answers = 0
    for start in range(CHUNK, len(row), CHUNK):
        answer = re.match(r' opens (.+)\.\n', tokenizer.decode(row[start:]))
        if not answer:
            continue
        n_answers += 1

        # the chunk before ends with the question; with 2 hops the chunk before that, too
        key = tokenizer.decode(row[:start]).split('\nKey ')[-1]
        expected = [opens[key]]
        if hops == 2:
            assert tokenizer.decode(row[:start - CHUNK]).endswith('\nKey ' + key)
            expected.append(opens[opens[key]])
        assert answer[1].split(', ') == expected

        # a name has 4 tokens, a comma at least one; token i is predicted at i - 1
        stop = start + len(tokenizer.encode(' opens ' + answer[1]))
        assert scored[stop - 5 * hops:stop - 1].all()
        of_opens.append(scored[start - 1:start + 1].mean())
    return n_answers


@mark.parametrize('name', ['bytes', 'bpe'])
@mark.parametrize('hops, grow', [(1, 0), (1, 8), (2, 0)])
def test_answers_follow_from_the_needles(name, hops, grow):
    tokenizer, needles = make_needles(name, hops, grow)
    of_opens = []
    for g in range(9):
        tokens, targets, _, _ = needles[g]
        for row, target in zip(tokens.numpy(), targets.numpy()):
            scored = target[:-1] >= 0
            assert (target[:-1] == row[1:])[scored].all()
            assert scored.mean() < 0.35
            opens = hidden(tokenizer, row)
            n_answers = check_answers(tokenizer, row, opens, scored, hops, of_opens)
            assert 0 < n_answers <= len(opens) // hops, 'answers that begin a chunk'
    assert np.mean(of_opens) == approx(data.PREDICTED, abs=0.06)        # as other tokens


def test_names_differ_and_are_not_in_the_text():
    """The text has nearly all of the 43,680 names of four of 16 words."""
    tokenizer = Tokenizer.train('word', [' '.join(3 * letter for letter in 'abcdefghijklmnop')])
    words = [i for i, word in enumerate(tokenizer.tokens) if len(word) == 3]
    rng = np.random.default_rng(0)
    ids = rng.choice(words, 200_000)
    needles = Needles(Split('train', ids, np.array([0, len(ids)])), tokenizer, 1, 256, 2, 0)
    names = set(map(tuple, needles.chains(rng, 60, ids).reshape(120, 4)))
    assert len(names) == 120 and {len(set(name)) for name in names} == {4}
    in_text = set(zip(ids, ids[1:], ids[2:], ids[3:]))
    assert not names & in_text


@mark.parametrize('scored, val, test, tuned_on', [
    ('val', 1000, 999, 'val'), ('train', 9, 1000, 'test'), ('test', 1000, 9, 'val')])
def test_the_split_for_tuning(scored, val, test, tuned_on, capsys):
    """Another than the scored one, if it is large enough"""
    sizes = dict(train=9, val=val, test=test)
    splits = {x: SimpleNamespace(name=x, tokens=range(n)) for x, n in sizes.items()}
    split = data.Corpus.tuning_split(SimpleNamespace(**splits), scored)
    assert split.name == tuned_on
    assert ('warning' in capsys.readouterr().out) == (tuned_on == scored)


def test_the_words_of_val_and_test_are_not_learned(src):
    """Of a text that is cut: its last tenth has words of its own."""
    corpus = prepared(src(a_txt='a b ' * 900 + 'c d ' * 100), 'word')
    assert {*corpus.tokenizer.tokens} == {'a', 'b', '<unk>', '<eos>'}
    assert {*corpus.val.tokens} == {*corpus.test.tokens} == {corpus.tokenizer.ids['<unk>']}


def test_needles_are_anywhere():
    """In each place of each chunk of the first half, in any part of the text; questions in any
    order. A tenth of the other tokens is predicted."""
    tokenizer, needles = make_needles('bytes', 1)
    rows = [needles.row(r, 32) for r in range(60)]
    half = 16 * CHUNK
    starts = set()
    numbers = set()
    parts = set()
    first = in_front = 0
    for ids, _ in rows:
        text = tokenizer.decode(ids)
        needle = r'\nKey (\w{4}) opens (\w{4})\.\n'
        found = [match.start() for match in re.finditer(needle, text[:half])]
        starts |= {*found}
        numbers.add(len(found))
        first += [start // CHUNK for start in found] == [*range(len(found))]
        parts.add(text[half:half + 9])                              # no needle, no answer
        answers = [i for i in range(17, 32) if text[i * CHUNK:].startswith(' opens ')]
        in_front += answers == [*range(17, 17 + len(answers))]
    assert {start // CHUNK for start in starts} == {*range(16)}
    assert {start % CHUNK for start in starts} == {*range(CHUNK - 22 + 1)}
    assert len(numbers) > 8 and len(parts) > 30
    assert first < 20 and in_front < 20
    assert np.mean([targets[:half] >= 0 for _, targets in rows]) == approx(0.1, abs=0.02)


def test_rows_of_needles_are_documents():
    _, needles = make_needles('bytes', 1)
    assert needles[3].doc.unique(dim=1).tolist() == [[6], [7]]
