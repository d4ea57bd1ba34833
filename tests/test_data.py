"""
data.py: tokenizers, corpora on disk, batches; against brute force and definitions.

    $ python -m pytest tests/test_data.py
"""
import hashlib, io, json, multiprocessing, os, random, runpy, shutil, signal, sys, zipfile
from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest
import tiktoken.load
import torch

import data
from data import Batches, DataError, Split, Tokenizer, load

PROSE = ("The cat's tail isn't 123456 long; it's  red.\n\n\tWhat'll it do?\r\n  naïve 日本語 🎉\n"
         '<|endoftext|>\n    def f(self, x):\n        return x ** 2  # aaa aaaa aaaaaaa\n')
KINDS = ('segments', 'consecutive', 'packed', 'documents')


def words(n, seed):
    rng = random.Random(seed)
    return ''.join(rng.choice('aabcéß') * rng.randint(1, 4) + rng.choice('  x\n') for _ in range(n))


def one_line(function, *args, **kwargs):
    """The message of the error that a call ends with, one line"""
    with pytest.raises(DataError) as error:
        function(*args, **kwargs)
    assert '\n' not in str(error.value)
    return str(error.value)


# tokenizers
def strings():
    yield from ['', ' ', '\r\n', '<|endoftext|>', PROSE, '\0', '\ufeff', 'a' * 3000, ' ' * 999]
    for seed in range(60):
        yield ''.join(map(chr, random.Random(seed).choices(range((0x7f, 0xd7ff)[seed % 2]), k=50)))


@pytest.mark.parametrize('name, n', [('bytes', 257), ('bpe', 500)])
def test_decoding_inverts_encoding(name, n):
    t = Tokenizer.train(name, [words(3000, 0), PROSE], 500)
    t = Tokenizer.from_dict(json.loads(json.dumps(t.to_dict())))
    assert t.name == name and t.n_vocab == n and t.eot == n - 1
    for text in strings():
        ids = t.encode(text)
        assert t.decode(ids) == text and ids.dtype == np.uint32 and t.eot not in ids
    assert t.decode(torch.tensor([[0xe6], [0x97], [t.eot]])) == '\ufffd<|endoftext|>'
    assert t.decode(t.encode('a\ud800b')) == 'a?b'                  # UTF-8 has no lone surrogates


def naive_bpe(counts, n_merges):
    """Counts all pairs again for each merge -> tokens, {word: its tokens}"""
    cut, tokens = {w: list(w) for w in counts}, [chr(i) for i in range(256)]
    for _ in range(n_merges):
        words = [parts for w, parts in cut.items() for _ in range(counts[w])]
        pairs = Counter(pair for parts in words for pair in zip(parts, parts[1:]))
        best = max(pairs, key=lambda p: (pairs[p], -tokens.index(p[0]), -tokens.index(p[1])))
        tokens.append(''.join(best))
        for parts in cut.values():
            for i in range(len(parts)):
                if tuple(parts[i:i + 2]) == best:
                    parts[i:i + 2] = [''.join(best)]
    return tokens, cut


@pytest.mark.parametrize('seed', range(6))
def test_bpe_equals_the_naive_loop_and_tiktoken(seed):
    """Few letters and many repetitions: ties and overlapping pairs (aaa) are frequent."""
    rng = random.Random(seed)
    counts = Counter(''.join(rng.choices('ab' if seed % 2 else 'abcz', k=rng.randint(1, 12)))
                     for _ in range(300))
    tokens, cut = naive_bpe(counts, 120)
    assert data.learn_bpe(counts, 120) == tokens
    assert data.learn_bpe(dict(sorted(counts.items())), 120) == tokens      # in any order
    t = Tokenizer('bpe', tokens)
    for word, parts in cut.items():
        assert [t.tokens[i] for i in t.encode(word)] == parts


def test_bpe_of_a_long_word():
    t = Tokenizer.train('bpe', ['x' * 5000], 999)                   # cut into words of 128 bytes
    assert t.tokens[256:-1] == ['x' * 2 ** i for i in range(1, 8)]


def test_words():
    t = Tokenizer.train('word', [' \n = A b = \n', 'b c\n\nb'])     # <eos> 4, b 3, = 2, A, c, <unk>
    t = Tokenizer.from_dict(json.loads(json.dumps(t.to_dict())))
    assert t.tokens == ['<eos>', 'b', '=', 'A', 'c', '<unk>'] and t.eot is None
    ids = t.encode('b zebra\nc\n')
    assert ids.tolist() == [1, 5, 0, 4, 0] and t.decode(ids) == 'b <unk> \n c \n'


def test_gpt2_without_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    monkeypatch.setattr(tiktoken.load, 'read_file', lambda path: 1 / 0)     # no network
    tiktoken.registry.ENCODINGS.pop('gpt2', None)
    message = one_line(Tokenizer.train, 'gpt2')
    for file in ('vocab.bpe', 'encoder.json'):
        url = f'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{file}'
        assert file in message and hashlib.sha1(url.encode()).hexdigest() in message


# corpora
def write(folder, **files):
    """Files, from names such as train__a_txt for train/a.txt"""
    for name, text in files.items():
        path = folder / name.replace('__', '/').replace('_', '.')
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def prepared(where, *args):
    return load(where, *args or ['bytes'], root=where.parent / 'corpora', quiet=True)


def jsonl(texts):
    return ''.join(json.dumps(dict(text=text)) + '\n' for text in texts)


def documents(corpus):
    """The documents of train, val and test"""
    for split in (corpus.train, corpus.val, corpus.test):
        parts = np.split(split.tokens, split.offsets[1:-1]) if split else []
        yield [corpus.tokenizer.decode(part)[:-len(data.EOT)] for part in parts]


def test_named_splits(tmp_path):
    where = write(tmp_path / 'my', train_txt='one two\nthree', wiki_valid_txt='four\n',
                  test__5_txt='five ß\n', test__6_txt='six', notes_txt='no')
    corpus = prepared(where)
    assert list(documents(corpus)) == [['one two\nthree'], ['four\n'], ['five ß\n', 'six']]
    assert (corpus.train.n_words, corpus.train.n_bytes, corpus.test.n_bytes) == (3, 13, 11)


def test_other_files_are_split_by_the_hash_of_their_names(tmp_path):
    texts = {f'f{i}.txt': f'{i:4} ' * (40 + 520 * (i % 9 == 0)) for i in range(90)}
    room = dict.fromkeys(('val', 'test'), sum(map(len, texts.values())) // 20)
    split_of = {}
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        split_of[name] = next((s for s in room if len(texts[name]) <= room[s]), 'train')
        room[split_of[name]] = room.get(split_of[name], 0) - len(texts[name])
    expected = [[texts[n] for n in sorted(texts) if split_of[n] == s] for s in data.SPLITS]
    assert list(documents(prepared(write(tmp_path / 'many', **texts)))) == expected


@pytest.mark.parametrize('n', [1, 3])
def test_few_files_are_cut_at_line_ends(tmp_path, n):
    """Where no file is small enough to be held out, the end of each is; train.py is a program."""
    texts = {f'{x}_py': ''.join(f'{x} {i}\n' for i in range(999)) for x in ('train', 'b', 'c')[:n]}
    splits = list(documents(prepared(write(tmp_path / 'few', **texts))))
    for text, *parts in zip(sorted(texts.values()), *splits, strict=True):
        assert ''.join(parts) == text and all(part[-1] == '\n' for part in parts)
        assert [round(100 * len(part) / len(text)) for part in parts] == [90, 5, 5]


def test_what_is_no_text_is_skipped(tmp_path, capsys):
    where = write(tmp_path / 'mix', a_txt='fine\n' * 100, b_txt=b'caf\xe9', c_bin=b'a\0b',
                  d_txt=b'cut \xe6', e_txt='', _hidden='x', corpora__z_txt='no')
    corpus = load(where, 'bytes', root=where / 'corpora')
    *skipped, _ = capsys.readouterr().out.splitlines()
    assert [Path(line).name for line in skipped] == ['b.txt', 'c.bin', 'd.txt']
    assert sum(documents(corpus), []) == ['fine\n' * n for n in (90, 5, 5)]
    assert 'no text' in one_line(prepared, write(tmp_path / 'none', b_txt=b'\xff'))
    assert 'shakespeare' in one_line(load, tmp_path / 'nowhere', root=tmp_path)
    assert 'bytes' in one_line(load, where, 'byte')


def test_jsonl(tmp_path):
    texts = ['first\nwith lines\n\n', 'second \u2028 <|endoftext|>', '', 'third']
    corpus = prepared(write(tmp_path / 'j', train_jsonl=jsonl(texts) + '\n', val_jsonl=jsonl([''])))
    assert list(documents(corpus)) == [[t for t in texts if t], [], []] and corpus.val is None
    for bad in ('{"txt": "x"}', 'nonsense', '{"text": 3}', '["text"]'):
        where = write(tmp_path / 'k', train_jsonl=jsonl(texts) + bad)
        assert 'line 5' in one_line(prepared, where)
    assert [p.name[:2] for p in (tmp_path / 'corpora').iterdir()] == ['j-']     # nothing incomplete
    where = write(tmp_path / 'w', train_jsonl=jsonl(['one two', ' ', 'x \ud800']))
    assert prepared(where, 'word').train.offsets.tolist() == [0, 2, 4]          # ' ' has no words


def test_articles_of_wikitext(tmp_path):
    text = (' \n = A = \n \n aa \n \n = = Part = = \n \n x \n = not = \n \n = nor this = \n y \n'
            ' = nor = \n y \n \n = B ( c ) = \n \n bb = b = \n')
    train, _, _ = documents(prepared(write(tmp_path / 'w', train_txt=text)))
    assert ''.join(train) == text and [d[:5] for d in train] == [' \n = ', ' = B ']


@pytest.mark.parametrize('name', ['bpe', 'word'])
def test_pieces_change_nothing(tmp_path, monkeypatch, name):
    """Threads encode a document in many pieces: the ids are those of the whole, in order."""
    symbols = ['a', 'bc', ' ', '  ', '\n', '\n\n', '\r\n', '.', "'s", '12', 'é', ' x']
    texts = [''.join(random.Random(i).choices(symbols, k=9000)) for i in range(9)]
    monkeypatch.setattr(data, 'PIECE', 50)
    corpus = prepared(write(tmp_path / 'p', train_jsonl=jsonl(texts)), name, 300)
    t, parts = corpus.tokenizer, np.split(corpus.train.tokens, corpus.train.offsets[1:-1])
    for part, text in zip(parts, texts, strict=True):
        assert part.tolist() == t.encode(text).tolist() + [299] * (name == 'bpe')


def test_code_is_the_standard_library(tmp_path, capsys):
    """Top-level packages are documents; each of their files begins a line."""
    corpus = load('code', 'bytes', root=tmp_path)
    assert f'Python {sys.version.split()[0]}' in capsys.readouterr().out
    everything, library = set(sum(documents(corpus), [])), Path(os.__file__).parent
    paths = sorted((library / 'asyncio').rglob('*.py'), key=Path.as_posix)
    assert {''.join(map(Path.read_text, paths)), (library / 'heapq.py').read_text()} <= everything
    where = write(tmp_path, a_py='x', b_py='y\n', c_py='z')
    assert list(data.documents(sorted(where.glob('*.py')), 0, 9)) == ['x\ny\nz']
    assert (library / 'encodings/utf_8.py').read_text() not in ''.join(everything)


def test_a_changed_source_makes_another_folder(tmp_path):
    where = write(tmp_path / 'src', train_txt=words(90, 1), val_txt='old')
    first, same = prepared(where), prepared(where)
    changed = prepared(write(where, val_txt='new'))
    assert first.folder == same.folder != changed.folder
    assert [list(documents(c))[1] for c in (first, changed)] == [['old'], ['new']]
    copy = prepared(shutil.copytree(where, tmp_path / 'copy'))
    assert copy.fingerprint == changed.fingerprint != first.fingerprint


def test_a_given_tokenizer_encodes(tmp_path):
    one = prepared(write(tmp_path / 'one', train_txt='a stone in the river ' * 40), 'bpe', 262)
    two = write(tmp_path / 'two', train_txt='the moon and the stars ' * 40)
    trained, given = prepared(two, 'bpe', 262), prepared(two, one.tokenizer)
    assert given.tokenizer.tokens == one.tokenizer.tokens != trained.tokenizer.tokens
    assert list(documents(given)) == list(documents(trained))
    text, tokenizer = given.fingerprint.split('-')
    assert trained.fingerprint.startswith(text) and one.fingerprint.endswith(tokenizer)
    assert prepared(tmp_path / 'one', one.tokenizer).folder == one.folder       # not encoded again


@pytest.mark.parametrize('file, damage', [
    ('meta.json', lambda b: b[:40]), ('meta.json', lambda b: b'[]'), ('train.idx', lambda b: b''),
    ('train.bin', lambda b: b[:90]), ('train.bin', lambda b: b'\1\1' + b[2:]),         # the id 257
    ('train.bin', lambda b: b + b'\0'), ('train.idx', lambda b: b[:8] + b[:8] + b[16:])])
def test_a_damaged_corpus_is_named(tmp_path, file, damage):
    where = write(tmp_path / 'src', train_jsonl=jsonl(words(40, i) for i in range(20)))
    folder = prepared(where).folder
    (folder / file).write_bytes(damage((folder / file).read_bytes()))
    assert str(folder) in one_line(prepared, where)


def exit_codes(where, n):
    """Of n processes that prepare a corpus at once"""
    fork = multiprocessing.get_context('fork')
    processes = [fork.Process(target=prepared, args=[where]) for _ in range(n)]
    for process in processes:
        process.start()
    return [process.join() or process.exitcode for process in processes]


@pytest.mark.parametrize('owner, name', [(np, 'unique'), (Path, 'write_text'), (Path, 'rename')])
def test_a_killed_preparation_leaves_no_corpus(tmp_path, monkeypatch, owner, name):
    where = write(tmp_path / 'src', train_txt=words(30_000, 1))
    with monkeypatch.context() as m:
        m.setattr(owner, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        assert exit_codes(where, 1) == [-signal.SIGKILL]
    assert exit_codes(where, 3) == [0, 0, 0]
    assert len(next(documents(prepared(where)))) == 1


def test_downloads(tmp_path, monkeypatch):
    with zipfile.ZipFile(archive := io.BytesIO(), 'w') as z:
        for split in ('train', 'valid', 'test'):
            z.writestr(f'w/wiki.{split}.tokens', f'text of {split}\n')
    web = {'wikitext-103-v1.zip': archive.getvalue(), 'input.txt': b'x', 'enwik8.zip': b'no zip'}

    def urlopen(request, timeout):
        content = web.pop(Path(request.full_url).name, None)        # each is downloaded once
        return io.BytesIO(content) if content else open('/no/network')

    monkeypatch.setattr(data.urllib.request, 'urlopen', urlopen)
    corpus = load('wikitext103', 'bytes', root=tmp_path)
    assert sum(documents(corpus), []) == [f'text of {s}\n' for s in ('train', 'valid', 'test')]
    assert load('wikitext103', 'bytes', root=tmp_path).folder == corpus.folder
    assert 'input.txt has a wrong sha256' in one_line(load, 'shakespeare', root=tmp_path)
    for name, file in (('wikitext2', 'train.txt'), ('enwik8', 'enwik8'), ('pg19', 'validation')):
        folder = tmp_path / 'downloads' / name
        message = one_line(load, name, root=tmp_path)
        assert file in message.split('put')[1] and str(folder) in message
    write(folder, train__a_txt='a', validation__b_txt='b', test__c_txt='c')     # by hand
    assert sum(documents(load('pg19', 'bytes', root=tmp_path)), []) == ['a', 'b', 'c']


def test_the_command(tmp_path, monkeypatch, capsys):
    where = write(tmp_path / 'src', train_txt=words(300, 1), val_txt='x' * 30)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['data.py', '--data', str(where), '--tokenizer', 'bytes'])
    runpy.run_path(data.__file__, run_name='__main__')
    out = capsys.readouterr().out
    assert all(text in out for text in ('2 documents', 'val 31', '257 ids', 'corpora/src-bytes-'))


# batches
def make_split(lengths=(5, 40, 1, 17, 33, 64, 2)):
    offsets = np.cumsum([0, *lengths])
    return Split('train', 1000 + np.arange(offsets[-1], dtype=np.uint16), offsets)


@pytest.mark.parametrize('kind, fold', [*zip(KINDS, [-1] * 4), ('documents', 0), ('documents', 1)])
@pytest.mark.parametrize('T, B', [(16, 4), (1, 7), (7, 1), (41, 3), (8, 100)])
def test_batches_equal_their_definition(kind, fold, T, B):
    """In text order, the rows are the grid, or documents without their ends, then the ends."""
    split, place, after = make_split(), [*range(161)], range(1, 162)
    if kind == 'documents':
        docs = [[*range(a, b)] for a, b in zip(split.offsets, split.offsets[1:])]
        docs = docs[max(0, fold)::1 + (fold >= 0)]
        place = sum([d[:len(d) // T * T] for d in docs] + [d[len(d) // T * T:] for d in docs], [])
        after = sum([d[1:] for d in docs], [])
    batches = Batches(split, kind, T, B, seed=3, fold=fold)
    grid = np.full((batches.n_rows + 1, T), -1)                     # the last row is padding
    grid.flat[:len(place)] = place
    for epoch in range(2):
        numbers = []
        for g in range(epoch * len(batches), (epoch + 1) * len(batches)):
            rows = batches.rows(g).tolist()
            p = grid[rows + [-1] * (B - len(rows))]                 # (B, T) positions
            targets = np.where((p >= 0) & np.isin(p + 1, after), 1001 + p, -1)
            expected = np.where(p < 0, 0, 1000 + p), targets, np.where(p < 0, -1, split.doc_of(p))
            assert all((x.numpy() == y).all() for x, y in zip(batches[g], expected))
            numbers += rows
        assert sorted(numbers) == [*range(-(-len(place) // T))]


@pytest.mark.parametrize('kind', KINDS)
def test_a_batch_is_a_pure_function_of_its_number(kind):
    split = make_split(range(20, 60))
    batches, other = (Batches(split, kind, 16, 4, seed) for seed in (5, 6))
    n, seen = len(batches), {}
    for g in (0, 1, n - 1, n, 5 * n, n - 1, 1, 0):
        for batch in (batches[g], Batches(split, kind, 16, 4, 5)[g]):
            tokens, seed = seen.setdefault(g, (batch.tokens, batch.seed))
            assert batch.tokens.equal(tokens) and batch.seed == seed and 0 <= seed < 2 ** 63
    assert len({b[g].seed for b in (batches, other) for g in range(2 * n)}) == 4 * n
    first, second = ([batches.rows(e * n + i).tolist() for i in range(n)] for e in (0, 1))
    assert first not in (second, [other.rows(i).tolist() for i in range(n)])


@pytest.mark.parametrize('m', [0, 1, 2, 4])
def test_consecutive_segments(m):
    """A micro-batch has groups of m segments that follow each other; the groups are shuffled."""
    batches, n = Batches(make_split(), 'consecutive', 15, 4, 0, consecutive=m), m or 4
    groups = []
    for rows in (batches.rows(g).tolist() for g in range(len(batches))):
        groups += [rows[i:i + n] for i in range(0, len(rows), n)]
    assert sorted(groups) == [[*range(11)][i:i + n] for i in range(0, 11, n)] != groups


def algorithm_1(segments, docs, rng, k=20):
    """TRIME's packing by its definition: BM25 from its formula, S a list"""
    bags = [Counter(s.tolist()) for s in segments]
    N, mean, df = len(bags), np.mean([b.total() for b in bags]), Counter(t for b in bags for t in b)
    idf = {t: log(1 + (N - n + 0.5) / (n + 0.5)) for t, n in df.items()}

    def score(q, d):
        norm = 1.2 * (0.25 + 0.75 * d.total() / mean)
        return round(sum(n * idf[t] * d[t] / (d[t] + norm) for t, n in q.items()), 9)

    drawn, order, S, c = rng.permutation(N).tolist(), [], [*range(N)], None
    while S:
        c = next(i for i in drawn if i in S) if c is None else c
        order.append(c)
        S.remove(c)
        similar = sorted((-score(bags[c], bags[i]), i) for i in range(N) if not docs[c] & docs[i])
        c = next((i for s, i in similar[:k] if s < 0 and i in S), None)
    return order


@pytest.mark.parametrize('same_document', [True, False])
def test_packed(tmp_path, monkeypatch, same_document):
    rng = np.random.default_rng(0)
    texts = [rng.integers(90 * (d % 2), 90 * (d % 2) + 40, 74) for d in range(12)]
    split = Split('train', np.concatenate(texts).astype(np.uint16), np.arange(13) * 74)
    spans = [np.arange(i, min(i + 16, 887)) for i in range(0, 887, 16)]
    docs = [set(split.doc_of(p)) if same_document else {p[0]} for p in spans]
    order = algorithm_1([split.tokens[p] for p in spans], docs, np.random.default_rng(0))
    args = dict(micro_batch=56, seed=0, same_document=same_document, cache=tmp_path)
    for _ in range(2):
        assert Batches(split, 'packed', 16, **args).rows(0).tolist() == order
        monkeypatch.setattr(data, 'BM25', None)
    with pytest.raises(TypeError):
        Batches(split, 'packed', 17, **args)


def test_what_cannot_be_batched():
    split, one = make_split(), make_split([99])
    for args in [(split, 'segments', 162, 2), (split, 'documents', 163, 2), (one, 'packed', 9, 2),
                 (split, 'segments', 0, 2), (split, 'segments', 4, 0), (None, 'segments', 4, 2)]:
        one_line(Batches, *args, seed=0)
    one_line(Batches, split, 'segments', 4, 2, seed=0, fold=1)
    one_line(Batches, split, 'consecutive', 4, 6, seed=0, consecutive=4)
