"""data.py: tokenizers, corpora on disk, batches; against brute force and definitions."""
import gzip, hashlib, json, os, random, re, shutil, signal, textwrap, zipfile
from collections import Counter
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from pytest import approx, fixture, mark, raises

import data
from data import Batches, Needles, Pairs, Split, Tokenizer, load
from helpers import formula, jsonl, one_line, ranking, write, write_splits

PROSE = ("The cat's tail isn't 123456 long; it's  red.\n\n\tWhat'll it do?\r\n  naïve 日本語 🎉\n"
         '<|endoftext|>\n    def f(self, x):\n        return x ** 2  # aaa aaaa aaaaaaa\n')


def random_text(n, seed, symbols='aabcéß  x\n'):
    return ''.join(random.Random(seed).choices(symbols, k=n))


# --------------------------------------------------------------------------------------------------
# progress
@mark.parametrize('items, options, lines', [
    ([30, 6, 24, 12], dict(size=lambda seconds: 100 * seconds),
     ['x: 3,000 of 7,200, 0.7 min left', 'x: 6,000 of 7,200, 0.2 min left']),
    (iter([30, 30]), dict(total=5), ['x: 1 of 5, 2.0 min left']),
    ([30, 30], dict(quiet=True), [])])
def test_progress(monkeypatch, capsys, items, options, lines):
    """The items are the seconds that they take."""
    spent = [100.0]
    monkeypatch.setattr(data.time, 'monotonic', lambda: sum(spent))
    for seconds in data.progress_bar(items, 'x', **options):
        spent.append(seconds)
    assert capsys.readouterr().err.splitlines() == lines


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


def test_bpe_learns_all_of_a_long_word():
    """Words without blanks between them, in lines of 60 letters or in one: as many tokens"""
    words = [random_text(5, i, 'abcdefghijkl') for i in range(300)]
    letters = ''.join(random.Random(0).choices(words, k=2000))
    n_tokens = []
    for width in (60, 10_000):
        tokenizer = Tokenizer.train('bpe', [textwrap.fill(letters, width)], 500)
        n_tokens.append(len(tokenizer.encode(letters)))
    assert n_tokens[1] == approx(n_tokens[0], rel=0.05)


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
        dict(train_txt='a', b_txt=b'caf\xe9', val_txt=b'\xff', _test='x', test_txt=b'cut \xe6',
             corpora__val_txt='x'),
        ['a'], [], [])}


@mark.parametrize('name', FILES)
def test_documents_of_files(src, name):
    files, *expected = FILES[name]
    path = src(**files)
    # folders of these names are for corpora, they have no sources
    corpus, _, again = (load(path, 'bytes', root=path / root) for root in ('out', 'corpora', 'out'))
    assert texts_of(again) == expected
    assert again.folder == corpus.folder


def test_one_name_alone_is_no_split(src, capsys):
    """Nor are names of programs."""
    files = {f'novel{i}_txt': f'novel {i} ' * 9 for i in range(40)}
    corpus = prepared(src(a__TrainOfThought_txt='x' * 99, test_py='x' * 99, **files))
    assert sum(map(len, texts_of(corpus))) == 42
    assert corpus.val and corpus.test
    assert capsys.readouterr().out.endswith('not used: 0 files, []\n')


def test_the_screen_names_the_files_of_each_split(src, capsys):
    prepared(src(**{f'train_{i}_txt': 'a' for i in range(4)}, dev_txt='bb', notes_txt='c',
                 eval_txt=b'\xff'))
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "train: 4 files, ['train.0.txt', 'train.1.txt', 'train.2.txt'], 4 documents, 8 tokens",
        "val: 1 files, ['dev.txt'], 1 documents, 3 tokens", 'test: 0 files, []',
        "not used: 2 files, ['eval.txt', 'notes.txt']"]


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
    content = content.encode()
    if name.lower().endswith('.gz'):
        content = gzip.compress(content)
    corpus = prepared(src(test_TXT_gz=test, train_csv_gz=test, **{
        name: content, 'val.json': json.dumps(dict(text='v'), indent=1)}))
    assert texts_of(corpus) == [JSON_TEXTS, ['v'], ['a\nb']]
    assert corpus.about['not used'] == "1 files, ['train.csv.gz']"


def test_files_of_pairs(src):
    """Blanks around fields, further columns and empty lines are left out."""
    path = src(train_tsv=' a  b \t c \r\n\n d\te\tf\n', val_tsv='\tx')
    assert texts_of(prepared(path))[:2] == [['a  b\tc', 'd\te'], ['\tx']]
    assert 'word' in one_line(prepared, path, 'word')
    assert "train.tsv', line 2: 'a b'" in one_line(prepared, write(path, train_tsv='a\tb\na b'))
    mixed = write(path, train_tsv='a\tb', test_txt='a')
    assert 'other files' in one_line(prepared, mixed)


def test_other_files_are_split_by_the_hash_of_their_names(src):
    """In order of sha256(name) to val, else to test, while these have at most 5%, else to train."""
    texts = {f'f{i}.txt': f'{i:4} ' * (560 if i % 9 == 0 else 40) for i in range(90)}
    n = sum(map(len, texts.values()))
    room = dict(val=n // 20, test=n // 20, train=n)
    expected = dict(train=[], val=[], test=[])
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        split = next(split for split in room if len(texts[name]) <= room[split])
        room[split] -= len(texts[name])
        expected[split].append(texts[name])

    splits = texts_of(prepared(src(**texts)))
    assert list(map(sorted, splits)) == list(map(sorted, expected.values()))


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


@mark.parametrize('owner, name', [(np, 'unique'), (Path, 'write_text'), (Path, 'rename')])
def test_a_killed_preparation_leaves_no_corpus(src, monkeypatch, owner, name):
    """The process is killed when it calls owner.name. Then three prepare the corpus at once."""
    path = src(train_txt=random_text(120_000, 1))
    fork = get_context('fork')
    with monkeypatch.context() as patch, ProcessPoolExecutor(1, fork) as pool:
        patch.setattr(owner, name, kill)
        with raises(BrokenProcessPool):
            pool.submit(prepared, path).result()
    with ProcessPoolExecutor(3, fork) as pool:
        for corpus in pool.map(prepared, [path] * 3):
            assert len(corpus.train.tokens) == corpus.train.n_bytes + 1


@mark.parametrize('name, content, place', [
    ('a.jsonl', jsonl('ab' * 99) + '\n{}\n', 'line 200'), ('a.json', '5', 'line 1'),
    ('a.json', '[{"text": "x"}, 3]', 'line 2'), ('a.json', '{"a": {"text": "x"}}', 'line 1'),
    ('a.txt.gz', 'no gzip', 'cannot be read'), ('train.jsonl', 'nonsense', 'nonsense'),
    ('train.jsonl', '{"text": 3}', '{"text": 3}')])
def test_files_that_are_refused(tmp_path, src, name, content, place):
    path = src(val_txt='a')
    (path / name).write_text(content)
    message = one_line(prepared, path)
    assert place in message and name in message
    assert not list(tmp_path.glob('corpora/*'))


@mark.parametrize('files', [
    {}, dict(train_txt=b'\xff', val_txt='a'), dict(train_txt='', val_txt='a'), dict(a_txt='')])
def test_no_training_text(src, files):
    assert 'no text' in one_line(prepared, src(**files))


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
    batches = Batches(make_split(), kind, T, B, seed=3)
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
    batches, again, different = (Batches(split, kind, 16, 4, seed) for seed in (5, 5, 6))
    n = len(batches)
    in_order = [batches[g] for g in range(2 * n)]
    for g in (n, 1, 0):
        assert again[g].seed == in_order[g].seed
        assert again[g].tokens.equal(in_order[g].tokens)

    assert len({batch.seed for batch in [*in_order, different[0]]}) == 2 * n + 1
    for batch in (in_order[n], different[0]):
        assert not in_order[0].tokens.equal(batch.tokens)


@mark.parametrize('m', [0, 1, 2, 4])
def test_consecutive_segments(m):
    """A micro-batch has groups of m segments that follow each other; the groups are shuffled."""
    batches = Batches(make_split(), 'consecutive', 15, 4, 0, consecutive=m)
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


@mark.parametrize('same_document', [True, False])
def test_packed_is_algorithm_1(same_document):
    """296 segments of 3 tokens; documents 0 to 5 have words in common, and documents 6 to 11"""
    rng = np.random.default_rng(0)
    tokens = np.append(rng.integers(0, 40, 444), rng.integers(90, 130, 444))
    split = Split('train', tokens, np.arange(0, 889, 74))
    positions = [np.arange(i, min(i + 3, 887)) for i in range(0, 887, 3)]
    docs = [{i} for i in range(296)]                            # excluded: the segment itself
    if same_document:
        docs = [set(split.doc_of(p)) for p in positions]
    order = algorithm_1([split.tokens[p].tolist() for p in positions], docs)
    assert Batches(split, 'packed', 3, 296, 0, same_document).rows(0).tolist() == order


def test_packed_without_bm25_is_segments():
    packed = Batches(make_split(), 'packed', 16, 8, 0, bm25=False)
    segments = Batches(make_split(), 'segments', 16, 8, 0)
    assert packed[3].tokens.equal(segments[3].tokens)


def test_what_cannot_be_batched():
    split = make_split()
    assert '162' in one_line(Batches, split, 'segments', 162, 2, seed=0)
    assert 'val' in one_line(Batches, None, 'segments', 4, 2, seed=0)
    assert 'consecutive 4' in one_line(Batches, split, 'consecutive', 4, 6, seed=0, consecutive=4)
    assert 'document' in one_line(Batches, make_split([99]), 'packed', 9, 2, seed=0)
    Batches(make_split([99, 99]), 'packed', 98, 2, seed=0)      # one segment is of both documents
    for T, chunk in ((256, 8), (300, 32), (224, 32)):
        one_line(Needles, make_split([999]), Tokenizer('bytes'), 1, T, 2, 0, chunk)


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
    message = one_line(Pairs, corpus.train, 9, 'documents', block_size=0, micro_batch=1, seed=0)
    assert 'within --block-size 0' in message


def test_pairs_are_packed_by_their_targets():
    """App. C; 8 is TAB."""
    rng = np.random.default_rng(0)
    targets = [[*rng.integers(10, 40, 5), 9] for _ in range(90)]
    pairs = [[rng.integers(40, 45), 8, *target] for target in targets]
    split = Split('train', np.concatenate(pairs), np.arange(0, 721, 8))
    rows = Pairs(split, 8, 'packed', 16, 90, seed=0).rows(0)
    assert rows.tolist() == algorithm_1(targets, [{r} for r in range(90)])


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


def check_answers(tokenizer, row, opens, scored, hops):
    """The answers of a row follow from its needles, and are predicted. -> the number of answers"""
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
    return n_answers


@mark.parametrize('name', ['bytes', 'bpe'])
@mark.parametrize('hops, grow', [(1, 0), (1, 8), (2, 0)])
def test_answers_follow_from_the_needles(name, hops, grow):
    tokenizer, needles = make_needles(name, hops, grow)
    for g in range(9):
        tokens, targets, _, _ = needles[g]
        for row, target in zip(tokens.numpy(), targets.numpy()):
            scored = target[:-1] >= 0
            assert (target[:-1] == row[1:])[scored].all()
            assert scored.mean() < 0.35
            opens = hidden(tokenizer, row)
            n_answers = check_answers(tokenizer, row, opens, scored, hops)
            assert 0 < n_answers <= len(opens) // hops, 'answers that begin a chunk'


def test_names_differ_and_are_not_in_the_text():
    """The text has nearly all of the 43,680 names of four of 16 words."""
    tokenizer = Tokenizer.train('word', [' '.join(3 * letter for letter in 'abcdefghijklmnop')])
    words = [i for i, word in enumerate(tokenizer.tokens) if len(word) == 3]
    rng = np.random.default_rng(0)
    ids = rng.choice(words, 200_000)
    needles = Needles(Split('train', ids, np.array([0, len(ids)])), tokenizer, 1, 256, 2, 0)
    names = set(map(tuple, needles.chains(rng, 60, ids).reshape(120, 4)))
    assert len(names) == 120
    in_text = set(zip(ids, ids[1:], ids[2:], ids[3:]))
    assert not names & in_text
