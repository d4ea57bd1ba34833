"""
data.py: tokenizers, corpora on disk, batches.

    PYTHONPATH=. python -m pytest tests/test_data.py -q
    NANORLM_TEXTS=FOLDER                 a folder with wikitext-2/ and gpt2-bpe/; without it the tests that want them are skipped
"""
import dataclasses
import hashlib, http.server, io, json, os, random, re, shutil, signal, subprocess, sys, threading, zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import Batches, DataError, Split, Tokenizer, load

TEXTS = Path(os.environ.get('NANORLM_TEXTS', '/nowhere'))
PROSE = ("The cat's tail isn't 123456 long; it's  red.\n\n\tWhat'll they say?\r\n  naïve café, Žižek, 日本語のテキスト 🎉 <|endoftext|>\n"
         '    def f(self, x):\n        return x ** 2  # aaa aaaa aaaaaaa\n')


def words(n, vocabulary, seed):
    """n words with very unequal frequencies, in lines."""
    rng = random.Random(seed)
    return ''.join(rng.choice(vocabulary[:rng.randint(1, len(vocabulary))]) + rng.choice('    \n') for _ in range(n))


VOCABULARY = [''.join(random.Random(i).choices('abcdeéßñ日', k=1 + i % 7)) for i in range(60)]


@pytest.fixture(scope='module')
def bpe():
    return Tokenizer.train('bpe', [words(3000, VOCABULARY, 0), PROSE], 500)


def tokenizer(name, bpe):
    return bpe if name == 'bpe' else Tokenizer(name)


def one_line(error):
    """The message of an error for users: one line, and not a traceback."""
    message = str(error.value)
    assert isinstance(error.value, SystemExit) and '\n' not in message and len(message) > 20
    return message


# ----------------------------------------------------------------------------------------------------------------------
# tokenizers

def unicode_strings():
    rng = random.Random(1)
    yield from ['', ' ', '\n', '\r\n', 'a', '<|endoftext|>', 'x<|endoftext|>y <|fim_prefix|>', PROSE, '\0', '\ufeff', 'a' * 3000, ' ' * 999]
    for _ in range(100):
        top = rng.choice([0x7f, 0x7ff, 0xd7ff, 0x10ffff])
        points = [rng.randrange(top + 1) for _ in range(rng.randrange(60))]
        yield ''.join(chr(p) for p in points if not 0xd800 <= p < 0xe000)


@pytest.mark.parametrize('name', ['bytes', 'bpe'])
def test_what_is_encoded_comes_back(name, bpe):
    t = tokenizer(name, bpe)
    assert t.n_vocab == {'bytes': 257, 'bpe': 500}[name] and t.eot == t.n_vocab - 1
    for text in unicode_strings():
        ids = t.encode(text)
        assert t.decode(ids) == text
        assert isinstance(ids, np.ndarray) and ids.dtype.kind in 'iu' and t.eot not in ids      # special strings are ordinary text
        assert len(ids) == 0 or ids.max() < t.n_vocab


@pytest.mark.parametrize('name', ['bytes', 'bpe'])
def test_all_bytes_and_strange_text(name, bpe):
    t = tokenizer(name, bpe)
    assert b''.join(t.tokens[:256]) == bytes(range(256)) and t.decode(range(128)) == bytes(range(128)).decode()
    assert t.decode([0xe6, 0x97]) == '\ufffd' and t.decode([t.eot]) == '<|endoftext|>'          # half a character; the end of a text
    assert t.decode(t.encode('a\ud800b')) == 'a\ufffdb'                                         # a lone surrogate
    assert t.decode(torch.tensor([[104], [105]])) == 'hi'
    for ids in ([t.n_vocab], [-1]):
        with pytest.raises(ValueError, match='has 0 to'):
            t.decode(ids)


@pytest.mark.parametrize('name', ['bytes', 'bpe', 'word'])
def test_a_tokenizer_survives_json(name, bpe):
    t = Tokenizer.train('word', ['a b\nb <unk>']) if name == 'word' else tokenizer(name, bpe)
    copy = Tokenizer.from_dict(json.loads(json.dumps(t.to_dict())))
    assert (copy.name, copy.n_vocab, copy.eot, copy.tokens) == (t.name, t.n_vocab, t.eot, t.tokens)
    assert copy.encode(PROSE).tolist() == t.encode(PROSE).tolist()


def naive_bpe(counts, n_merges):
    """All pairs counted anew for each merge, from the definition."""
    words, tokens = {w: [w[i:i + 1] for i in range(len(w))] for w in counts}, [bytes([i]) for i in range(256)]
    while len(tokens) < 256 + n_merges:
        pairs = Counter()
        for w, parts in words.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += counts[w]
        if not pairs:
            break
        best = max(pairs, key=lambda p: (pairs[p], -tokens.index(p[0]), -tokens.index(p[1])))
        tokens.append(best[0] + best[1])
        for w, parts in words.items():
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i:i + 2] = [best[0] + best[1]]
                i += 1
    return tokens, words


@pytest.mark.parametrize('seed', range(6))
def test_bpe_equals_the_naive_one_and_tiktoken_agrees(seed):
    """Few letters and many repetitions, so that ties and overlapping pairs (aaa) are frequent."""
    rng = random.Random(seed)
    counts = Counter(''.join(rng.choices('ab' if seed % 2 else 'abcé', k=rng.randint(1, 12))).encode() for _ in range(300))
    tokens, naive_words = naive_bpe(counts, 120)
    assert data.learn_bpe(counts, 120) == tokens
    assert len(set(tokens)) == len(tokens)                      # tiktoken finds tokens by their bytes
    t = Tokenizer('bpe', tokens, data.PATTERN)
    for w, parts in naive_words.items():                        # tiktoken merges in the order of ids what training merged
        assert [t.tokens[i] for i in t.encode(w.decode())] == parts
    shuffled = list(counts.items())
    rng.shuffle(shuffled)
    assert data.learn_bpe(dict(shuffled), 120) == tokens        # the order of the text does not matter


def test_bpe_sizes(capsys):
    assert Tokenizer.train('bpe', [PROSE], 300).n_vocab == 300
    assert Tokenizer.train('bpe', ['ab ab'], 257).n_vocab == 257
    t = Tokenizer.train('bpe', ['ab ab'], 1000, quiet=False)                 # ab, " ab" and no more
    assert t.n_vocab == 259 and '259 ids instead of 1,000' in capsys.readouterr().out
    with pytest.raises(DataError) as error:
        Tokenizer.train('bpe', [PROSE], 256)
    assert '257' in one_line(error)
    with pytest.raises(DataError) as error:
        Tokenizer('gtp2')
    assert 'did you mean gpt2' in one_line(error)
    t = Tokenizer.train('bpe', ['x' * 5000 + ' '] * 3, 300)     # words beyond all measure are cut before learning
    assert max(map(len, t.tokens)) <= 128 and t.decode(t.encode('x' * 5000)) == 'x' * 5000


def test_words():
    t = Tokenizer.train('word', [' \n = A b = \n', 'b c\n\nb'])
    assert t.tokens[:2] == ['<eos>', 'b'] and t.n_vocab == 6 and t.eot is None     # <eos> 4, b 3, = 2, <unk> 0, A, c
    ids = t.encode('b zebra\nc\n')
    assert [t.tokens[i] for i in ids] == ['b', '<unk>', '<eos>', 'c', '<eos>'] and t.decode(ids) == 'b <unk> \n c \n'
    assert t.encode(t.decode(ids)).tolist() == ids.tolist() and len(t.encode('')) == 0 and len(t.encode('b')) == 1


@pytest.mark.skipif(not (TEXTS / 'gpt2-bpe').exists(), reason='NANORLM_TEXTS has no gpt2-bpe/')
def test_gpt2(tmp_path, monkeypatch):
    url = 'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/'
    for file in ('vocab.bpe', 'encoder.json'):
        path = next((TEXTS / 'gpt2-bpe').rglob(file))
        shutil.copy(path, tmp_path / hashlib.sha1((url + file).encode()).hexdigest())
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    import tiktoken.registry
    tiktoken.registry.ENCODINGS.pop('gpt2', None)
    t = Tokenizer.train('gpt2')
    assert t.n_vocab == 50257 and t.eot == 50256 and t.encode('hello world').tolist() == [31373, 995]
    for text in unicode_strings():
        assert t.decode(t.encode(text)) == text
    assert Tokenizer.from_dict(t.to_dict()).encode(PROSE).tolist() == t.encode(PROSE).tolist()


def test_gpt2_without_its_files(tmp_path, monkeypatch):
    import tiktoken, tiktoken.load
    tiktoken.registry.ENCODINGS.pop('gpt2', None)
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))

    def no_network(path):
        raise OSError('no network')
    monkeypatch.setattr(tiktoken.load, 'read_file', no_network)
    with pytest.raises(DataError) as error:
        Tokenizer.train('gpt2')
    message = one_line(error)
    assert 'TIKTOKEN_CACHE_DIR' in message
    for file in ('vocab.bpe', 'encoder.json'):
        url = 'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/' + file
        assert hashlib.sha1(url.encode()).hexdigest() in message


# ----------------------------------------------------------------------------------------------------------------------
# corpora

def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name.replace('__', '/').replace('_', '.', 1)
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def documents(corpus, split):
    s = getattr(corpus, split)
    if s is None:
        return []
    texts = [corpus.tokenizer.decode(s.tokens[a:b]) for a, b in zip(s.offsets, s.offsets[1:])]
    assert all(text.endswith('<|endoftext|>') for text in texts)
    return [text.removesuffix('<|endoftext|>') for text in texts]


def test_a_folder_with_named_files(tmp_path, capsys):
    where = write(tmp_path / 'my', train_txt='one two\nthree', valid_txt='four\n', test_txt='five ß\n', notes_txt='no')
    corpus = load(where, 'bytes', root=tmp_path / 'c')
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and 'notes.txt' in out[0]                      # what is left out is said; then the one start line
    assert re.fullmatch(r'my: 3 documents, train 14, val 6, test 9 tokens \(bytes, 257 ids\), sha256 [0-9a-f]{12}', out[1])
    assert [documents(corpus, s) for s in data.SPLITS] == [['one two\nthree'], ['four\n'], ['five ß\n']]
    assert (corpus.train.n_words, corpus.train.n_bytes, corpus.test.n_bytes) == (3, 13, 8) and corpus.val.name == 'val'
    assert corpus.train.tokens.dtype == np.uint16 and corpus.train.offsets.dtype == np.int64
    assert str(corpus.folder) == str(tmp_path / 'c' / 'my-bytes') and corpus.meta['splits']['train']['lines'] == 1
    again = load(where, 'bytes', root=tmp_path / 'c', quiet=True)
    assert again.fingerprint == corpus.fingerprint and capsys.readouterr().out == ''
    assert load(where, 'word', root=tmp_path / 'c', quiet=True).fingerprint != corpus.fingerprint
    write(tmp_path / 'my', valid_txt='')                                # an empty file is none
    assert load(where, 'bytes', root=tmp_path / 'c', quiet=True).val is None
    assert load(str(tmp_path / 'my' / 'train.txt'), 'bytes', root=tmp_path / 'c', quiet=True).val is None


def test_a_few_files_are_cut(tmp_path):
    """Where none is small enough to be held out whole, the end of each is: nothing is in two splits, nothing is lost. And train.py is a program."""
    texts = {name: ''.join(f'{name} {i}\n' for i in range(200)) for name in ('a_txt', 'b_txt', 'train_py')}
    corpus = load(write(tmp_path / 'few', **texts), 'bytes', root=tmp_path / 'c', quiet=True)
    assert len(corpus.train.offsets) == len(corpus.val.offsets) == len(corpus.test.offsets) == 4
    for text, *parts in zip(sorted(texts.values()), *(documents(corpus, s) for s in data.SPLITS)):
        assert ''.join(parts) == text and all(part.endswith('\n') for part in parts) and 0.88 < len(parts[0]) / len(text) < 0.92


def test_folders_named_as_splits(tmp_path):
    where = write(tmp_path / 'pg', train__1_txt='a', train__2_txt='b', validation__3_txt='c', test__4_txt='d')
    corpus = load(where, 'bytes', root=tmp_path / 'c', quiet=True)
    assert [documents(corpus, s) for s in data.SPLITS] == [['a', 'b'], ['c'], ['d']]


def test_jsonl(tmp_path):
    texts = ['first\nwith lines\n\n', 'second \u2028 <|endoftext|>', '', 'third']
    good = ''.join(json.dumps({'text': t, 'id': 1}) + '\n' for t in texts)
    corpus = load(write(tmp_path / 'j', train_jsonl=good + '\n'), 'bytes', root=tmp_path / 'c', quiet=True)
    assert documents(corpus, 'train') == [t for t in texts if t] and corpus.val is None and corpus.test is None
    for bad in ('{"txt": "x"}', 'nonsense', '{"text": 3}', '["text"]'):
        with pytest.raises(DataError) as error:
            load(write(tmp_path / 'k', train_jsonl=good + bad), 'bytes', root=tmp_path / 'c', quiet=True)
        assert 'line 5' in one_line(error) and '"text"' in one_line(error)
    with pytest.raises(DataError) as error:
        load(write(tmp_path / 'l', train_jsonl=good, val_jsonl='{"text": ""}'), 'bytes', root=tmp_path / 'c', quiet=True)
    assert 'val split' in one_line(error)
    assert sorted(p.name for p in (tmp_path / 'c').iterdir()) == ['j-bytes']        # nothing of the failed ones


def test_words_of_strange_documents(tmp_path):
    """A document without a word has no tokens and is none (it made a corpus that nobody could open); a lone surrogate is a word like others."""
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in ('one two', ' ', 'three \ud800'))
    corpus = load(write(tmp_path / 'j', train_jsonl=lines), 'word', root=tmp_path / 'c', quiet=True)
    assert corpus.train.offsets.tolist() == [0, 2, 4] and corpus.tokenizer.decode(corpus.train.tokens) == 'one two three \ufffd'


def test_headings_start_documents(tmp_path):
    text = ' \n = A = \n \n aa \n \n = = Part = = \n \n x \n = not one = \n \n = nor this = \n y \n = nor = \n y \n \n = B ( c ) = \n \n bb = b = \n'
    corpus = load(write(tmp_path / 'w', train_txt=text), 'bytes', root=tmp_path / 'c', quiet=True)
    a, b = documents(corpus, 'train')
    assert a + b == text and b.startswith(' = B')
    corpus = load(write(tmp_path / 'w2', train__a_py=text), 'bytes', root=tmp_path / 'c', quiet=True)
    assert documents(corpus, 'train') == [text]


def test_one_file_is_cut_at_line_ends(tmp_path):
    text = ''.join(f'line {i} of the file\n' for i in range(1000))
    path = write(tmp_path / 'one', file_txt=text) + '/file.txt'
    corpus = load(path, 'bytes', root=tmp_path / 'c', quiet=True)
    parts = [''.join(documents(corpus, s)) for s in data.SPLITS]
    assert corpus.name == 'file' and ''.join(parts) == text and all(p.endswith('\n') for p in parts)
    assert [round(100 * len(p) / len(text)) for p in parts] == [90, 5, 5]
    assert documents(load(write(tmp_path / 'tiny', file_txt='x'), 'bytes', root=tmp_path / 'c', quiet=True), 'train') == ['x']


def test_other_files_are_split_by_hash(tmp_path):
    files = {f'd{i % 3}__f{i}_txt': f'{i:3} ' * 50 for i in range(100)}
    corpus = load(write(tmp_path / 'many', **files), 'bytes', root=tmp_path / 'c', quiet=True)
    names = sorted((f'd{i % 3}/f{i}.txt' for i in range(100)), key=lambda n: hashlib.sha256(n.encode()).hexdigest())
    number = {name: re.search(r'f(\d+)', name)[1] for name in names}
    want = [{number[n] for n in names[:5]}, {number[n] for n in names[5:10]}, {number[n] for n in names[10:]}]
    assert [{text.split()[0] for text in documents(corpus, s)} for s in ('val', 'test', 'train')] == want


def test_by_hash_goes_on_after_a_large_one():
    """A document too large for what is left goes to train, and a smaller one later still fits."""
    sizes = {str(i): 1 + 40 * (i % 7 == 0) for i in range(300)}
    split = data.by_hash(sizes)
    held = Counter({s: sum(sizes[n] for n in sizes if split[n] == s) for s in data.SPLITS})
    room = sum(sizes.values()) // 20
    assert held['val'] == held['test'] == room
    left = {'val': room, 'test': room}
    for name in sorted(sizes, key=lambda n: hashlib.sha256(n.encode()).hexdigest()):
        want = 'val' if sizes[name] <= left['val'] else 'test' if sizes[name] <= left['test'] else 'train'
        assert split[name] == want
        if want in left:
            left[want] -= sizes[name]


def test_what_is_no_text_is_skipped_by_name(tmp_path, capsys):
    where = write(tmp_path / 'mix', a_txt='fine\n' * 9, b_txt='café\n'.encode('latin-1'), c_bin=b'ab\0cd', _hidden=b'x', e_txt=b'',
                  d_txt=b'cut \xe6\x97', z_txt='fine ☃' * 400000, **{'.git__x_txt': 'no', 'c__y_txt': 'no'})
    corpus = load(where, 'bytes', root=tmp_path / 'mix' / 'c')           # nor is where corpora are kept a part of one
    out = capsys.readouterr().out.splitlines()
    assert out[0] == 'skipped, binary: c.bin' and out[1] == 'skipped, not UTF-8: b.txt, d.txt' and len(out) == 3
    assert [d[:4] for split in data.SPLITS for d in documents(corpus, split)] == ['fine', 'fine']
    with pytest.raises(DataError) as error:
        load(write(tmp_path / 'none', b_txt=b'\xff'), 'bytes', root=tmp_path / 'c')
    assert 'no text' in one_line(error)


def test_names_nobody_knows(tmp_path):
    with pytest.raises(DataError) as error:
        load('wikitxt2', root=tmp_path / 'c')
    assert 'did you mean wikitext2' in one_line(error) and 'shakespeare' in one_line(error)
    with pytest.raises(DataError) as error:
        load(tmp_path / 'nope', root=tmp_path / 'c')                        # a Path is as good as a str
    assert 'nope' in one_line(error)
    with pytest.raises(DataError) as error:
        load('code', 'word2', root=tmp_path / 'c')
    one_line(error)
    assert not (tmp_path / 'c').exists()


def test_pieces_change_nothing(tmp_path, monkeypatch, bpe):
    """A document is encoded in pieces, and its tokens are those of the whole."""
    monkeypatch.setattr(data, 'PIECE', 50)
    text = ''.join(random.Random(5).choices(['a', 'bc', ' ', '  ', '\n', '\n\n', '\r\n', '.', "'s", '12', 'é', ' x'], k=20000))
    path = Path(write(tmp_path / 'p', t_txt=text)) / 't.txt'
    parts = list(data.pieces(data.Source('t', (path,))))
    assert len(parts) > 200 and ''.join(t for t, _ in parts) == text and [end for _, end in parts] == [False] * (len(parts) - 1) + [True]
    assert np.concatenate([bpe.encode(t) for t, _ in parts]).tolist() == bpe.encode(text).tolist()
    word = Tokenizer.train('word', [text])
    assert np.concatenate([word.encode(t) for t, _ in parts]).tolist() == word.encode(text).tolist()


def test_files_of_one_document_each_start_a_line(tmp_path):
    write(tmp_path, a_py='x = 1', b_py='', c_py='y = 2\n', d_py='z')
    source = data.Source('package', tuple(tmp_path / f'{name}.py' for name in 'abcd'))
    assert list(data.pieces(source)) == [('x = 1\ny = 2\nz', True)]


def test_many_pieces_keep_their_order(tmp_path, monkeypatch):
    """Many small bundles, so that several threads are at work."""
    monkeypatch.setattr(data, 'PIECE', 500)
    texts = [f'{i} ' * (i % 77) + '\n' for i in range(3000)]
    corpus = load(write(tmp_path / 'big', train_jsonl=''.join(json.dumps({'text': t}) + '\n' for t in texts)),
                  'bpe', 300, root=tmp_path / 'c', quiet=True)
    assert documents(corpus, 'train') == texts
    assert corpus.train.n_bytes == sum(map(len, texts)) and corpus.train.n_words == sum(len(t.split()) for t in texts)


@pytest.fixture(scope='module')
def code(tmp_path_factory):
    return load('code', 'bytes', root=tmp_path_factory.mktemp('code'), quiet=True)


def test_code_is_the_standard_library(code, capsys):
    lib = Path(os.__file__).parent
    by_start = {text[:3000]: split for split in data.SPLITS for text in documents(code, split)}
    asyncio = ''.join(p.read_text() for p in sorted((lib / 'asyncio').rglob('*.py'), key=lambda p: p.as_posix()))
    assert asyncio[:3000] in by_start and (lib / 'heapq.py').read_text()[:3000] in by_start
    assert (lib / 'pickle.py').read_text() in documents(code, by_start[(lib / 'pickle.py').read_text()[:3000]])
    sizes = [s.n_bytes for s in (code.train, code.val, code.test)]
    assert 5e6 < sum(sizes) < 25e6 and all(0.03 < size / sum(sizes) <= 0.05 for size in sizes[1:])
    assert code.meta['python'] == sys.version.split()[0]
    assert len(code.train.tokens) == code.train.n_bytes + len(code.train.offsets) - 1
    names = [name for name, _ in data.list_code()]
    assert names == sorted(names) and not any(re.search(r'(^|/)(tests?|site-packages|encodings|pydoc_data|idle_test)/', n) for n in names)
    load('code', 'bytes', root=code.folder.parent)
    out = capsys.readouterr().out
    assert out.count('\n') == 1 and f'Python {sys.version.split()[0]}' in out and code.meta['sha256'][:12] in out


@pytest.mark.skipif(not (TEXTS / 'wikitext-2' / 'train.txt').exists(), reason='NANORLM_TEXTS has no wikitext-2/train.txt')
def test_wikitext_2_has_the_published_counts(tmp_path):
    corpus = load(str(TEXTS / 'wikitext-2'), 'word', root=tmp_path, quiet=True)
    splits = corpus.train, corpus.val, corpus.test
    assert [len(s.tokens) for s in splits] == [2088628, 217646, 245569] and corpus.tokenizer.n_vocab == 33278
    assert [len(s.offsets) - 1 for s in splits] == [600, 60, 60]
    assert [s.n_words + corpus.meta['splits'][s.name]['lines'] for s in splits] == [2088628, 217646, 245569]
    for file, _, size, sha in data.DOWNLOADS['wikitext2']:
        assert data.scan(TEXTS / 'wikitext-2' / file) == (sha, None) and (TEXTS / 'wikitext-2' / file).stat().st_size == size


# ----------------------------------------------------------------------------------------------------------------------
# what goes wrong on disk

@pytest.fixture
def small(tmp_path):
    where = write(tmp_path / 'src', train_jsonl=''.join(json.dumps({'text': words(40, VOCABULARY, i)}) + '\n' for i in range(20)),
                  val_txt=words(50, VOCABULARY, 99))
    return where, load(where, 'bytes', root=tmp_path / 'c', quiet=True).folder


def damage_meta(**changes):
    def damage(folder):
        meta = json.loads((folder / 'meta.json').read_text())
        (folder / 'meta.json').write_text(json.dumps({**meta, **changes}))
    return damage


def rewrite(file, dtype, change):
    def damage(folder):
        change(np.fromfile(folder / file, dtype=dtype)).tofile(folder / file)
    return damage


def put(i, value):
    def change(a):
        a[i] = value
        return a
    return change


@pytest.mark.parametrize('file, damage, says', [
    ('train.bin', lambda f: (f / 'train.bin').unlink(), 'missing'),
    ('val.idx', lambda f: (f / 'val.idx').unlink(), 'missing'),
    ('meta.json', lambda f: (f / 'meta.json').unlink(), 'missing'),
    ('meta.json', lambda f: (f / 'meta.json').write_text('{"version": 1'), 'not readable'),
    ('meta.json', lambda f: (f / 'meta.json').write_bytes(b'\xff\xfe'), 'not readable'),
    ('meta.json', lambda f: (f / 'meta.json').write_text('[]'), 'not readable'),
    ('meta.json', lambda f: (f / 'meta.json').write_text('{"version": 1}'), 'not readable'),
    ('meta.json', damage_meta(version=99), 'format 99'),
    ('meta.json', damage_meta(n_vocab=300), '257 ids instead of 300'),
    ('train.bin', lambda f: os.truncate(f / 'train.bin', 1001), '1,001 bytes instead of'),
    ('train.bin', lambda f: os.truncate(f / 'train.bin', 0), '0 bytes instead of'),
    ('val.idx', lambda f: os.truncate(f / 'val.idx', 0), '0 bytes instead of'),
    ('train.bin', rewrite('train.bin', np.uint16, lambda a: a.astype(np.uint32)), 'bytes instead of'),
    ('train.bin', rewrite('train.bin', np.uint16, put(77, 257)), 'out of range'),
    ('val.bin', rewrite('val.bin', np.uint16, put(0, 1)), 'not the tokens'),
    ('train.idx', rewrite('train.idx', np.int64, put(3, 0)), 'do not rise'),
    ('train.idx', rewrite('train.idx', np.int64, put(0, 1)), 'do not rise'),
    ('train.idx', rewrite('train.idx', np.int64, put(-1, 10 ** 9)), 'do not rise'),
    ('train.idx', rewrite('train.idx', np.int64, lambda a: np.r_[0, a[1] + 1, a[2:]]), 'not the offsets'),
    ('train.bin', lambda f: shutil.copy(f / 'val.bin', f / 'train.bin'), 'bytes instead of'),
])
def test_a_damaged_corpus_is_named_in_one_line(small, file, damage, says):
    where, folder = small
    damage(folder)
    with pytest.raises(DataError) as error:
        load(where, 'bytes', root=folder.parent, quiet=True)
    message = one_line(error)
    assert str(folder / file) in message and says in message and f'delete the folder {folder} to prepare it again' in message
    shutil.rmtree(folder)                                           # and that helps
    load(where, 'bytes', root=folder.parent, quiet=True)


def test_tokens_of_another_corpus(tmp_path):
    """The same sizes, another text: only a checksum knows."""
    a = load(write(tmp_path / 'a', train_txt='one text'), 'bytes', root=tmp_path / 'c', quiet=True).folder
    b = load(write(tmp_path / 'b', train_txt='two text'), 'bytes', root=tmp_path / 'c', quiet=True).folder
    shutil.copy(b / 'train.bin', a / 'train.bin')
    with pytest.raises(DataError) as error:
        load(str(tmp_path / 'a'), 'bytes', root=tmp_path / 'c')
    assert 'not the tokens' in one_line(error)


def test_a_sample_reaches_into_every_part():
    tokens = np.zeros(70_000_000, dtype=np.uint8)
    sums = {data.sample_of(tokens)[1]}
    for i in (0, 35_000_000, 69_999_999 - 40_000):
        tokens[i] = 9
        top, sha = data.sample_of(tokens)
        assert top == 9 and sha not in sums
        sums.add(sha)
        tokens[i] = 0


def test_changed_sources_are_prepared_anew(small, capsys):
    where, folder = small
    old = load(where, 'bytes', root=folder.parent, quiet=True)
    os.utime(Path(where) / 'val.txt')                               # touched, the same text
    assert load(where, 'bytes', root=folder.parent).fingerprint == old.fingerprint and 'changed' not in capsys.readouterr().out
    (Path(where) / 'val.txt').write_text('something else')
    new = load(where, 'bytes', root=folder.parent)
    assert 'have changed' in capsys.readouterr().out.splitlines()[0]
    assert documents(new, 'val') == ['something else'] and new.fingerprint != old.fingerprint
    assert [p.name for p in folder.parent.iterdir()] == ['src-bytes'] and not (folder / 'old').exists()
    assert len(old.train.tokens) == len(old.train.tokens.tolist())  # whoever has the old one open can still read it
    shutil.copytree(folder, folder.parent / 'kept')


def in_another_process(work):
    """The process id of a copy of this process that does work() and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def die_at(when):
    """Arranges for this process to be killed, as by kill -9, when data.py is in the middle of it."""
    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)
    if when == 'rename':
        data.os.rename = die
    elif when == 'meta':
        dumps = data.json.dumps
        data.json.dumps = lambda d: die() if 'splits' in d else dumps(d)
    else:
        calls, encode = iter(range(99)), data.encode_bundle
        data.encode_bundle = lambda *args: die() if next(calls) == when else encode(*args)


@pytest.mark.parametrize('when', [0, 1, 'meta', 'rename'])
def test_a_killed_preparation_leaves_no_corpus(tmp_path, when):
    where = write(tmp_path / 'src', train_txt=words(300_000, VOCABULARY, 1), val_txt='v', test_txt='t')
    pid = in_another_process(lambda: die_at(when) or load(where, 'bytes', root=tmp_path / 'c', quiet=True))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    left, = (tmp_path / 'c').iterdir()
    assert left.name.startswith('src-bytes.tmp-')                   # half a corpus, under a name that nobody reads
    for path in [*left.iterdir(), left]:
        os.utime(path, (0, 0))                                      # an hour later
    corpus = load(where, 'bytes', root=tmp_path / 'c', quiet=True)
    assert len(documents(corpus, 'train')) == 1
    assert [p.name for p in (tmp_path / 'c').iterdir()] == ['src-bytes']


def test_an_error_while_preparing_leaves_the_old_corpus(small, monkeypatch):
    where, folder = small
    (Path(where) / 'val.txt').write_text('something else')

    def full(*args):
        raise OSError('no space left')
    monkeypatch.setattr(data, 'write_split', full)
    with pytest.raises(OSError, match='no space'):
        load(where, 'bytes', root=folder.parent, quiet=True)
    assert [p.name for p in folder.parent.iterdir()] == ['src-bytes']


def test_two_processes_prepare_at_once(tmp_path):
    where = write(tmp_path / 'src', train_txt=words(200_000, VOCABULARY, 1))
    pids = [in_another_process(lambda: load(where, 'bytes', root=tmp_path / 'c', quiet=True)) for _ in range(3)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert [p.name for p in (tmp_path / 'c').iterdir()] == ['src-bytes']


def test_the_faster_process_wins(tmp_path, monkeypatch):
    """While we prepare, another process finishes the same corpus: it stays, someone may already be reading it."""
    where, write_split, inodes = write(tmp_path / 'src', train_txt='text'), data.write_split, []

    def slow(*args):
        monkeypatch.setattr(data, 'write_split', write_split)
        inodes.append(load(where, 'bytes', root=tmp_path / 'c', quiet=True).folder.stat().st_ino)
        return write_split(*args)
    monkeypatch.setattr(data, 'write_split', slow)
    assert load(where, 'bytes', root=tmp_path / 'c', quiet=True).folder.stat().st_ino == inodes[0]
    assert [p.name for p in (tmp_path / 'c').iterdir()] == ['src-bytes']


# ----------------------------------------------------------------------------------------------------------------------
# downloads

@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of tmp_path/www on this machine, and the known corpora found there."""
    (tmp_path / 'www').mkdir()
    handler = lambda *a: http.server.SimpleHTTPRequestHandler(*a, directory=str(tmp_path / 'www'))      # noqa: E731
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, 'log_message', lambda *a: None)
    httpd = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield tmp_path / 'www', f'http://127.0.0.1:{httpd.server_port}/'
    httpd.shutdown()
    httpd.server_close()


def test_a_download(server, tmp_path, monkeypatch, capsys):
    www, url = server
    text = 'to be\nor not to be\n' * 50
    (www / 'input.txt').write_text(text)
    good = ('input.txt', url + 'input.txt', len(text), hashlib.sha256(text.encode()).hexdigest())
    monkeypatch.setitem(data.DOWNLOADS, 'shakespeare', [good])
    corpus = load('shakespeare', 'bytes', root=tmp_path / 'c')
    assert 'not verified' not in capsys.readouterr().out
    assert ''.join(''.join(documents(corpus, s)) for s in data.SPLITS) == text and corpus.val.n_bytes
    shutil.rmtree(tmp_path / 'c' / 'downloads')
    (www / 'input.txt').rename(www / 'gone.txt')                    # a prepared corpus needs its sources no more
    assert load('shakespeare', 'bytes', root=tmp_path / 'c', quiet=True).fingerprint == corpus.fingerprint
    (www / 'gone.txt').rename(www / 'input.txt')

    for size, sha, says in ((len(text), 'f' * 64, 'is not the known file'), (7, None, 'bytes instead of 7')):
        monkeypatch.setitem(data.DOWNLOADS, 'shakespeare', [('input.txt', url + 'input.txt', size, sha)])
        with pytest.raises(DataError) as error:
            load('shakespeare', 'bytes', root=tmp_path / 'd', quiet=True)
        assert says in one_line(error) and str(tmp_path / 'd' / 'downloads' / 'shakespeare' / 'input.txt') in one_line(error)
    assert not (tmp_path / 'd' / 'shakespeare-bytes').exists()


def test_a_download_that_breaks_off(tmp_path, monkeypatch):
    class Response(io.BytesIO):
        headers = {'Content-Length': '99'}
    monkeypatch.setattr(data.urllib.request, 'urlopen', lambda *a, **k: Response(b'only this'))
    with pytest.raises(DataError) as error:
        load('shakespeare', 'bytes', root=tmp_path / 'c', quiet=True)
    assert '9 of 99 bytes' in one_line(error) and not (tmp_path / 'c' / 'downloads' / 'shakespeare' / 'input.txt').exists()


def test_a_download_of_a_zip(server, tmp_path, monkeypatch, capsys):
    www, url = server
    with zipfile.ZipFile(www / 'w.zip', 'w') as z:
        for split in ('train', 'valid', 'test'):
            z.writestr(f'wikitext-103/wiki.{split}.tokens', f' \n = {split} = \n \n text \n')
    monkeypatch.setitem(data.DOWNLOADS, 'wikitext103', [(f'wiki.{s}.tokens', url + 'w.zip', None, None) for s in ('train', 'valid', 'test')])
    corpus = load('wikitext103', 'bytes', root=tmp_path / 'c')
    assert capsys.readouterr().out.count('not verified') == 3
    assert 'valid' in documents(corpus, 'val')[0] and 'train' in documents(corpus, 'train')[0] and 'test' in documents(corpus, 'test')[0]
    folder = tmp_path / 'c' / 'downloads' / 'wikitext103'
    (folder / 'wiki.train.tokens').unlink()                                 # once prepared, the files are not needed; the others became the corpus
    (folder / 'notes.txt').write_text('mine')
    again = load('wikitext103', 'bytes', root=tmp_path / 'c')
    assert again.fingerprint == corpus.fingerprint and documents(again, 'train') == documents(corpus, 'train')
    (folder / 'wiki.train.tokens').write_text(' \n = new = \n \n text \n')      # all are there: what has changed counts
    assert 'new' in documents(load('wikitext103', 'bytes', root=tmp_path / 'c', quiet=True), 'train')[0]


def test_a_login_page_in_the_place_of_a_zip(server, tmp_path, monkeypatch):
    """The bad archive stayed, hidden, and no later run got past it."""
    www, url = server
    (www / 'e.zip').write_text('<html>log in to the network</html>')
    monkeypatch.setitem(data.DOWNLOADS, 'enwik8', [('enwik8', url + 'e.zip', None, None)])
    with pytest.raises(DataError):
        load('enwik8', 'bytes', root=tmp_path / 'c', quiet=True)
    with zipfile.ZipFile(www / 'e.zip', 'w') as z:
        z.writestr('enwik8', 'text\n' * 100)
    assert load('enwik8', 'bytes', root=tmp_path / 'c', quiet=True).name == 'enwik8'


@pytest.mark.parametrize('url, name, file', [('http://127.0.0.1:9/x', 'shakespeare', 'input.txt'), ('{}nothing.txt', 'enwik8', 'enwik8'),
                                             (None, 'pg19', 'train'), ('{}bad.zip', 'enwik8', 'enwik8')])
def test_a_failed_download_says_what_to_do(server, tmp_path, monkeypatch, url, name, file):
    www, here = server
    (www / 'bad.zip').write_bytes(b'no zip at all')
    if url:
        monkeypatch.setitem(data.DOWNLOADS, name, [(file, url.format(here), None, None)])
    with pytest.raises(DataError) as error:
        load(name, 'bytes', root=tmp_path / 'c', quiet=True)
    folder = tmp_path / 'c' / 'downloads' / name
    assert f'put {file}' in one_line(error) and f'into {folder} by hand' in one_line(error)
    monkeypatch.setitem(data.DOWNLOADS, name, [(file, 'http://127.0.0.1:9/x', None, None)])
    (folder / file).write_text('by hand\n' * 100)                   # and that helps
    assert ''.join(documents(load(name, 'bytes', root=tmp_path / 'c', quiet=True), 'train'))[:8] == 'by hand\n'


# ----------------------------------------------------------------------------------------------------------------------
# batches

def make_split(lengths=(5, 40, 1, 17, 33, 64, 2), seed=0):
    """Documents of these many tokens. Every token is another, so a token's id says where it is."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Split('train', 1000 + np.arange(offsets[-1]).astype(np.uint16), offsets)


def places(batch):
    """Positions in the split of the tokens and of the targets of a batch, from a split whose ids say where they are."""
    return batch.tokens[batch.doc >= 0] - 1000, batch.targets[batch.targets >= 0] - 1000


def same(a, b):
    return a.seed == b.seed and all(torch.equal(x, y) for x, y in zip(a[:3], b[:3]))


def similar_split(n_topics=6, n_docs=30, length=64):
    """Documents of n_topics topics, one after the other in turn: neighbors in the text never have the same topic."""
    rng = np.random.default_rng(0)
    docs = [rng.integers(100 * (d % n_topics), 100 * (d % n_topics) + 30, length) for d in range(n_docs)]
    return Split('train', np.concatenate(docs).astype(np.uint16), np.arange(n_docs + 1) * length)


@pytest.mark.parametrize('kind', Batches.KINDS)
@pytest.mark.parametrize('T, B', [(16, 4), (1, 7), (7, 1), (161, 3), (8, 100)])
def test_every_token_is_predicted_once(kind, T, B):
    split = make_split()
    batches = Batches(split, kind, T, B, seed=3)
    n = len(split.tokens)
    first = split.offsets[:-1] if kind == 'documents' else [0]
    for epoch in range(2):
        inputs, predicted = [], []
        for g in range(epoch * len(batches), (epoch + 1) * len(batches)):
            tokens, targets, doc, seed, *_ = batch = batches[g]
            for t in (tokens, targets, doc):
                assert t.dtype == torch.int64 and t.shape == (B, T)
            i, o = places(batch)
            inputs += i.tolist()
            predicted += o.tolist()
            real = doc >= 0
            assert (tokens[~real] == 0).all() and (targets[~real] == -1).all()
            assert (doc[real].numpy() == split.doc_of(i.numpy())).all()
            has = targets >= 0
            assert (targets[has] == tokens[has] + 1).all()                      # the next token of the text
        assert sorted(predicted) == [p for p in range(n) if p not in first]
        assert len(set(inputs)) == len(inputs) == (n if kind == 'documents' else n - 1)


@pytest.mark.parametrize('T', [7, 16])
def test_folds_share_no_document(T):
    """Even documents in the one, odd ones in the other, every token of theirs but the first is predicted."""
    split = make_split()
    for fold in (0, 1):
        batches, predicted = Batches(split, 'documents', T, 2, seed=3, fold=fold), []
        for batch in batches:
            assert set((batch.doc[batch.doc >= 0] % 2).tolist()) <= {fold}
            predicted += places(batch)[1].tolist()
        assert sorted(predicted) == [p for d in range(fold, 7, 2) for p in range(split.offsets[d] + 1, split.offsets[d + 1])]
    with pytest.raises(data.DataError, match='chooses documents'):
        Batches(split, 'segments', T, 2, seed=3, fold=0)


@pytest.mark.parametrize('kind', Batches.KINDS)
def test_a_batch_is_a_pure_function_of_its_number(kind, tmp_path):
    split = similar_split()
    make = lambda: Batches(split, kind, 16, 4, seed=5, cache=tmp_path)          # noqa: E731
    batches = make()
    n = len(batches)
    wanted = [0, 1, n - 1, n, 2 * n + 1, 5 * n]
    once = {g: batches[g] for g in wanted}
    for g in reversed(wanted):
        assert same(batches[g], once[g]) and same(make()[g], once[g])
    assert len({batches[g].seed for g in range(4 * n)}) == 4 * n and all(0 <= batches[g].seed < 2 ** 63 for g in range(n))
    other = Batches(split, kind, 16, 4, seed=6, cache=tmp_path)
    assert other[0].seed != once[0].seed
    orders = [[b[e * n + i].tokens[0].tolist() for i in range(n)] for b, e in ((batches, 0), (batches, 1), (other, 0))]
    assert orders[0] != orders[1] and orders[0] != orders[2]                    # another order in each epoch and for each seed
    assert all(same(a, batches[g]) for g, a in enumerate(batches)) and len(list(batches)) == n


@pytest.mark.parametrize('kind', Batches.KINDS)
def test_processes_share_a_step(kind):
    """Micro-batch g = step * n_micro + a * world + rank: a step is the same set on 1, 2 and 4 processes."""
    split, n_micro = similar_split(), 4
    steps = {}
    for world in (1, 2, 4):
        ranks = [Batches(split, kind, 16, 4, seed=5) for _ in range(world)]
        steps[world] = [[ranks[rank][step * n_micro + a * world + rank] for a in range(n_micro // world) for rank in range(world)]
                        for step in range(9)]
    for world in (2, 4):
        assert all(same(a, b) for one, more in zip(steps[1], steps[world]) for a, b in zip(one, more))


def test_segments_and_consecutive():
    split = make_split()
    starts = lambda batch: [row[0].item() - 1000 for row, doc in zip(batch.tokens, batch.doc) if doc[0] >= 0]     # noqa: E731
    a, b = Batches(split, 'segments', 16, 3, 0), Batches(split, 'consecutive', 16, 3, 0)
    grid = [i * 16 for i in range(11)]                                          # 162 tokens: ten full segments, and one of one
    assert sorted(s for batch in a for s in starts(batch)) == grid == sorted(s for batch in b for s in starts(batch))
    assert len(a) == len(b) == 4
    for batch in b:
        first, *rest = starts(batch)
        assert first % 48 == 0 and rest == [first + 16 * i for i in range(1, len(rest) + 1)]
    short, = (batch for batch in b if starts(batch)[0] == 144)                  # 2 segments of 3; of the last one, a token
    assert short.doc[1].tolist() == [5] + [-1] * 15 or short.doc[1, 0] == split.doc_of(160)
    assert (short.doc[1, 1:] == -1).all() and (short.doc[2] == -1).all() and (short.targets[2] == -1).all()
    shuffled = [starts(batch) for batch in a]
    assert any(s[1] != s[0] + 16 for s in shuffled if len(s) > 1)


@pytest.mark.parametrize('short', ['join', 'drop'])
def test_documents_are_not_crossed(short):
    lengths = (5, 40, 1, 17, 33, 64, 2)
    split, T = make_split(lengths), 16
    batches = Batches(split, 'documents', T, 2, 0, short)
    last = split.offsets[1:] - 1
    rows = 0
    for batch in batches:
        for tokens, targets, doc in zip(*batch[:3]):
            real = doc >= 0
            rows += bool(real.any())
            p = (tokens[real] - 1000).numpy()
            assert ((targets[real] == -1).numpy() == np.isin(p, last)).all()    # only a document's last token predicts nothing
            for d in doc[real].unique():
                part = p[(doc[real] == d).numpy()]
                assert (np.diff(part) == 1).all()                               # a stretch of one document, in order
            if short == 'drop' and real.any():
                assert real.all() and len(doc.unique()) == 1
                assert (p[0] - split.offsets[doc[0]]) % T == 0
    full, left = sum(n // T for n in lengths), sum(n % T for n in lengths)
    assert rows == full + (-(-left // T) if short == 'join' else 0)


def test_packed_order_follows_algorithm_1():
    """Worked by hand: 0's best neighbor that is left is 2, 2's is 1, 1 has none left, so one of 3, 4 is drawn."""
    neighbors = [[2, 1], [0, 2], [0, 1], [4], [3]]
    for seed in range(20):
        order = data.pack_order(neighbors, np.random.default_rng(seed)).tolist()
        start = {0: [0, 2, 1], 1: [1, 0, 2], 2: [2, 0, 1], 3: [3, 4], 4: [4, 3]}
        head = start[order[0]]
        assert order[:len(head)] == head and order[len(head):] == start[order[len(head)]]
        assert order == data.pack_order(neighbors, np.random.default_rng(seed)).tolist()
    assert len({tuple(data.pack_order(neighbors, np.random.default_rng(s))) for s in range(20)}) > 3


def similarity(batches):
    """Mean share of the ids of a segment that another segment of its micro-batch has too."""
    shares = []
    for batch in batches:
        bags = [set(row.tolist()) for row, doc in zip(batch.tokens, batch.doc) if doc[0] >= 0]
        shares += [len(a & b) / len(a) for i, a in enumerate(bags) for j, b in enumerate(bags) if i != j]
    return np.mean(shares)


def test_packed(tmp_path, monkeypatch):
    split = similar_split()
    packed = Batches(split, 'packed', 32, 5, 0, cache=tmp_path / 'cache')
    assert sorted(packed.base.tolist()) == list(range(60))
    assert similarity(packed) > 3 * similarity(Batches(split, 'segments', 32, 5, 0))
    assert (packed.base != Batches(split, 'packed', 32, 5, 1).base).any()
    assert (packed.base == Batches(split, 'packed', 32, 5, 0).base).all()
    groups = lambda epoch: sorted(sorted(packed.rows(epoch * 12 + i)) for i in range(12))      # noqa: E731
    assert groups(0) == groups(1)                                               # the groups are shuffled, not their members
    assert len(list((tmp_path / 'cache').iterdir())) == 1

    def never(*args):
        raise AssertionError('computed again')
    import bm25
    monkeypatch.setattr(bm25, 'BM25', never)
    assert (Batches(split, 'packed', 32, 5, 0, cache=tmp_path / 'cache').base == packed.base).all()
    one_token = similar_split()
    one_token.tokens[100] += 1
    for other in (dict(block_size=16), dict(seed=1), dict(split=one_token)):            # all that the order depends on
        with pytest.raises(AssertionError, match='computed again'):
            Batches(**{**dict(split=split, kind='packed', block_size=32, micro_batch=5, seed=0, cache=tmp_path / 'cache'), **other})


def test_a_segment_is_never_its_own_neighbor(monkeypatch):
    seen = {}
    monkeypatch.setattr(data, 'pack_order', lambda neighbors, rng: seen.update(n=neighbors) or np.arange(len(neighbors)))
    split = similar_split(n_topics=1, n_docs=40, length=32)
    split.tokens[:64] = np.tile(split.tokens[:32], 2)                           # segments 0 and 1 are equal
    Batches(split, 'packed', 32, 5, 0)
    assert all(n not in row and len(row) == len(set(row)) == 20 for n, row in enumerate(seen['n']) if n < 39)
    assert seen['n'][0][0] == 1 and seen['n'][1][0] == 0
    monkeypatch.setattr(data, 'pack', lambda segments, *args: seen.update(s=segments) or np.arange(len(segments)))
    Batches(make_split(), 'packed', 32, 5, 0)                                   # the segments are those of the grid
    assert [s.tolist() for s in seen['s']] == [list(range(1000 + i, 1000 + min(i + 32, 161))) for i in range(0, 161, 32)]


def test_neighbors_are_of_other_documents(monkeypatch):
    """
    TRIME §4.3, m = 1. Twelve documents of two topics, five segments each and one border inside a segment: the nearest segments
    are all of the own document, and none of them may be chosen, however many they are. documents=False takes them.
    """
    seen = {}
    monkeypatch.setattr(data, 'pack_order', lambda neighbors, rng: seen.update(n=neighbors) or np.arange(len(neighbors)))
    rng = np.random.default_rng(0)
    docs = [np.concatenate([rng.integers(100 * (d % 2), 100 * (d % 2) + 30, 80), np.full(84, 300 + d)]) for d in range(12)]
    split = Split('train', np.concatenate(docs).astype(np.uint16), np.arange(13) * 164)
    batches = Batches(split, 'packed', 32, 5, 0)
    of = [set(split.doc_of(np.arange(n * 32, min(n * 32 + 32, len(split.tokens) - 1))).tolist()) for n in range(batches.n_rows)]
    assert sum(map(bool, seen['n'])) > 30 and not any(of[n] & of[j] for n, row in enumerate(seen['n']) for j in row)
    Batches(split, 'packed', 32, 5, 0, documents=False)
    assert sum(bool(of[n] & of[j]) for n, row in enumerate(seen['n']) for j in row[:2]) > 60
    with pytest.raises(data.DataError, match='--no-same-document'):
        Batches(dataclasses.replace(split, offsets=np.array([0, len(split.tokens)])), 'packed', 32, 5, 0)


@pytest.mark.parametrize('kind', Batches.KINDS)
def test_sequences_by_number(kind):
    """take: the sequences in stream order, whatever the epoch's order is."""
    split = make_split((64, 96, 32)) if kind == 'documents' else similar_split()
    batches = Batches(split, kind, 32, 4, seed=0)
    rows = torch.cat([batches.take(np.arange(i, min(i + 4, batches.n_rows)), seed=i).tokens for i in range(0, batches.n_rows, 4)])
    n = batches.n_rows * 32 - (kind != 'documents')
    assert rows.flatten()[:n].tolist() == split.tokens[:n].tolist() and batches.take(np.array([0]), seed=7).seed == 7


def test_what_cannot_be_batched():
    split = make_split()
    for kind, T, short, says in [('segments', 162, 'join', '162 tokens'), ('documents', 65, 'drop', 'longest document 64'),
                                 ('documents', 163, 'join', '162 tokens'), ('segments', 0, 'join', 'must be 1 or more')]:
        with pytest.raises(DataError) as error:
            Batches(split, kind, T, 2, 0, short)
        assert says in one_line(error)
    for make, says in [(lambda: Batches(None, 'segments', 4, 2, 0), 'no such split'), (lambda: Batches(split, 'segment', 4, 2, 0), 'segments'),
                       (lambda: Batches(split, 'documents', 4, 2, 0, 'joined'), 'join')]:
        with pytest.raises(DataError) as error:
            make()
        assert says in one_line(error)
    with pytest.raises(IndexError):
        Batches(split, 'segments', 16, 2, 0)[-1]


def test_ids_above_65535(tmp_path):
    text = ' '.join(map(str, range(70000)))
    corpus = load(write(tmp_path / 'many', train_txt=text), 'word', root=tmp_path / 'c', quiet=True)
    assert corpus.train.tokens.dtype == np.uint32 and corpus.tokenizer.decode(corpus.train.tokens) == text


def test_the_command_line(tmp_path, monkeypatch, capsys):
    where = write(tmp_path / 'src', train_txt=words(3000, VOCABULARY, 1), val_txt=words(300, VOCABULARY, 2))
    flags = ['--data', where, '--root', str(tmp_path / 'c'), '--vocab-size']
    monkeypatch.setattr(sys, 'argv', ['data.py', *flags, '300'])
    data.main()
    out = capsys.readouterr().out
    assert 'bytes a token' in out and 'src: 2 documents' in out and str(tmp_path / 'c' / 'src-bpe300') in out
    run = subprocess.run([sys.executable, data.__file__, *flags, '30'], capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.count('\n') == 1 and '257' in run.stderr


@pytest.mark.parametrize('without', ('tqdm', 'a terminal'))
def test_progress_in_lines(monkeypatch, capsys, without):
    """A bar in a log file is a line a thousand columns wide."""
    if without == 'tqdm':
        monkeypatch.setitem(sys.modules, 'tqdm', None)
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: without == 'tqdm', raising=False)
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(data.time, 'time', lambda: next(clock))
    assert list(data.progress(range(5), 'working')) == list(range(5))
    assert capsys.readouterr().err.splitlines() == ['working: 1 of 5', 'working: 3 of 5']


def test_a_text_is_encoded_with_the_tokenizer_of_a_checkpoint(tmp_path):
    """Another corpus, or the same one prepared elsewhere with other merges: ids must mean what the model learned."""
    for name, words in (('one', 'the cat sat on the mat '), ('two', 'a stone in the river ')):
        (tmp_path / name).mkdir()
        for split in ('train', 'val'):
            (tmp_path / name / f'{split}.txt').write_text(words * 40)
    one = load(tmp_path / 'one', 'bpe', 262, root=tmp_path / 'c', quiet=True)
    two = load(tmp_path / 'two', 'bpe', 262, root=tmp_path / 'c', quiet=True)
    again = load(tmp_path / 'two', one.tokenizer, root=tmp_path / 'c', quiet=True)
    assert again.folder != two.folder and again.tokenizer.to_dict() == one.tokenizer.to_dict() != two.tokenizer.to_dict()
    assert again.tokenizer.decode(again.train.tokens[:-1]) == 'a stone in the river ' * 40
    assert load(tmp_path / 'one', one.tokenizer, root=tmp_path / 'c', quiet=True).folder == one.folder
    assert load(tmp_path / 'two', one.tokenizer, root=tmp_path / 'c', quiet=True).folder == again.folder
