"""data.py: tokenizers, corpora on disk, batches; against brute force and definitions."""
import hashlib, io, itertools, json, os, random, re, shutil, signal, zipfile
from collections import Counter
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import Batches, Split, Tokenizer, load
from helpers import formula, jsonl, one_line, ranking, write, write_splits

PROSE = ("The cat's tail isn't 123456 long; it's  red.\n\n\tWhat'll it do?\r\n  naïve 日本語 🎉\n"
         '<|endoftext|>\n    def f(self, x):\n        return x ** 2  # aaa aaaa aaaaaaa\n')
ALL = [chr(i) for i in range(0xd800)]           # characters
KINDS = ('segments', 'consecutive', 'packed', 'documents')


def words(n, seed, letters='aabcéß  x\n'):
    return ''.join(random.Random(seed).choices(letters, k=4 * n))


@pytest.mark.parametrize('name, n', [('bytes', 257), ('bpe', 500)])
def test_decoding_inverts_encoding(name, n):
    saved = json.dumps(Tokenizer.train(name, [words(3000, 0), PROSE], 500).to_dict())
    t = Tokenizer(**json.loads(saved))
    assert (t.name, t.n_vocab, t.eot) == (name, n, n - 1)
    for text in ('', ' ', '\r\n', PROSE, '\0\ufeff', 'a' * 3000, ' ' * 999, words(999, 1, ALL)):
        ids = t.encode(text)
        assert t.decode(ids) == text and t.eot not in ids
    assert t.decode(torch.tensor([0xe6, 0x97, t.eot])) == '\ufffd<|endoftext|>'


def naive_bpe(words, n_merges):
    """Counts all pairs again for each merge -> all tokens, the tokens of each word"""
    tokens, cut = [chr(i) for i in range(256)], [list(word) for word in words]
    for _ in range(n_merges):
        pairs = Counter(pair for parts in cut for pair in zip(parts, parts[1:]))
        a, b = max(pairs, key=lambda p: (pairs[p], -tokens.index(p[0]), -tokens.index(p[1])))
        tokens.append(a + b)
        for parts in cut:
            for i in range(len(parts)):
                if parts[i:i + 2] == [a, b]:
                    parts[i:i + 2] = [a + b]
    return tokens, cut


@pytest.mark.parametrize('seed', range(6))
def test_bpe_equals_the_naive_loop_and_tiktoken(seed):
    """Few letters and many repetitions: ties and overlapping pairs (aaa) are frequent."""
    rng = random.Random(seed)
    letters = 'ab' if seed % 2 else 'abcz'
    words = [''.join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(300)]
    tokens, cut = naive_bpe(words, 120)
    assert data.learn_bpe({'abc': 2}, 9)[256:] == ['ab', 'abc']               # no pair is left
    assert data.learn_bpe(Counter(sorted(words)), 120) == tokens            # in any order
    t = Tokenizer('bpe', tokens)
    for word, parts in zip(words, cut):
        assert [t.tokens[i] for i in t.encode(word)] == parts


def test_words(tmp_path):
    t = Tokenizer.train('word', [' \n = A b = \n', 'b c\n\nb'])     # <eos> 4, b 3, = 2, A, c, <unk>
    assert t.tokens == ['<eos>', 'b', '=', 'A', 'c', '<unk>']
    assert t.encode('b zebra\nc\n').tolist() == [1, 5, 0, 4, 0]
    assert t.decode([1, 5, 0, 4, 0]) == 'b <unk> \n c \n'
    assert Tokenizer('word', map(str, range(65_537))).dtype == np.uint32
    where = write_splits(tmp_path / 'src', ['one two', ' ', 'three'], [])       # ' ' is no document
    assert prepared(where, 'word').train.offsets.tolist() == [0, 2, 3]


def prepared(where, tokenizer='bytes', *args):
    return load(where, tokenizer, *args, root=where.parent / 'corpora', quiet=True)


def documents(corpus):
    """The texts of the documents of train, val and test"""
    for split in (corpus.train, corpus.val, corpus.test):
        ids = np.split(split.tokens, split.offsets[1:-1]) if split else []
        texts = [corpus.tokenizer.decode(document) for document in ids]
        assert all(text.endswith('<|endoftext|>') for text in texts)
        yield [text.removesuffix('<|endoftext|>') for text in texts]


A = (' \n = A = \n \n aa \n \n = = Part = = \n \n x \n = not = \n \n = nor this = \n y \n'
     ' = nor = \n y \n \n')
B = ' = B ( c ) = \n \n bb = b = \n'
TEXTS = ['first\nwith lines\n\n', 'second \u2028 <|endoftext|>', 'third']
FILES = {                               # files, their documents in train, val and test
    'named splits': ({'train_txt': '1 2\n3', 'a-valid-00-of-01_txt': '4\n', 'test__5_txt': '5 ß\n',
                      'test__6_txt': '6', 'notes_txt': 'no', 'notes__test_txt': 'no'},
                     ['1 2\n3'], ['4\n'], ['5 ß\n', '6']),
    'articles of WikiText': (dict(train_txt=A + B), [A, B], [], []),
    'jsonl': (dict(train_jsonl=jsonl([*TEXTS, '', '\ud800']) + '\n', val_jsonl=jsonl([''])),
              [*TEXTS, '?'], [], []),
    'files that are no text': (dict(train_txt='a', b_txt=b'caf\xe9', val_txt=b'\xff', _test='x',
                                    test_txt=b'cut \xe6', corpora__val_txt='x'), ['a'], [], [])}


@pytest.mark.parametrize('name', FILES)
def test_documents_of_files(tmp_path, name):
    files, *expected = FILES[name]
    where = write(tmp_path / 'src', **files)
    first, _, again = (load(where, 'bytes', root=where / x) for x in ('out', 'corpora', 'out'))
    assert list(documents(again)) == expected and first.folder == again.folder


def test_other_files_are_split_by_the_hash_of_their_names(tmp_path):
    """In order of sha256(name) to val, else to test, while these have at most 5%, else to train."""
    texts = {f'f{i}.txt': f'{i:4} ' * (40 + 520 * (i % 9 == 0)) for i in range(90)}
    n = sum(map(len, texts.values()))
    room, expected = dict(val=n // 20, test=n // 20, train=n), dict(train=[], val=[], test=[])
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        split = next(split for split in room if len(texts[name]) <= room[split])
        room[split] -= len(texts[name])
        expected[split].append(texts[name])
    found = documents(prepared(write(tmp_path / 'many', **texts)))
    assert list(map(sorted, found)) == list(map(sorted, expected.values()))


@pytest.mark.parametrize('n', [1, 3, 4])
def test_few_files_are_cut_at_blanks(tmp_path, n):
    """Where 2.5% cannot be held out, the end of each file is; train.py is a program, d.py small."""
    texts = {f'{x}_py': ''.join(f'{x}-{i}{blank}' for i in range(50 if x == 'd' else 999))
             for x, blank in zip(('train', 'b', 'c', 'd')[:n], '\n \t ')}
    splits = documents(prepared(write(tmp_path / 'few', **texts)))
    for text, *parts in zip(sorted(texts.values()), *splits, strict=True):
        assert ''.join(parts) == text and all(part[-1] == text[-1] for part in parts)
        assert [100 * len(part) / len(text) for part in parts] == pytest.approx([90, 5, 5], abs=2)


@pytest.mark.parametrize('name', ['bpe', 'word'])
def test_pieces_change_nothing(tmp_path, monkeypatch, name):
    """Threads encode a document in many pieces: the ids are those of the whole, in order."""
    symbols = ['a', 'bc', ' ', '  ', '\n', '\n\n', '\r\n', '.', "'s", '12', 'é', ' x']
    texts = [words(2000, i, symbols) for i in range(9)]
    monkeypatch.setattr(data.pieces, '__defaults__', (50,))
    corpus = prepared(write_splits(tmp_path / 'p', texts, []), name, 300)
    found = np.split(corpus.train.tokens, corpus.train.offsets[1:-1])
    for ids, text in zip(found, texts, strict=True):
        assert ids.tolist() == corpus.tokenizer.encode(text).tolist() + [299] * (name == 'bpe')


def test_code_is_the_standard_library(tmp_path):
    """A document is a top-level module, or a package: its files in order of their paths."""
    corpus = load('code', 'bytes', root=tmp_path)
    found, library = sum(documents(corpus), []), Path(os.__file__).parent
    paths = sorted((library / 'asyncio').rglob('*.py'), key=Path.as_posix)
    assert ''.join(map(Path.read_text, paths)) in found
    assert (library / 'heapq.py').read_text() in found
    assert (library / 'encodings/utf_8.py').read_text() not in ''.join(found)


def test_a_changed_source_makes_another_folder(tmp_path):
    where = write(tmp_path / 'src', train_txt=words(90, 1), val_txt='old')
    first, same, changed = prepared(where), prepared(where), prepared(write(where, val_txt='new'))
    assert first.folder == same.folder != changed.folder
    copy = prepared(shutil.copytree(where, tmp_path / 'x/src'))         # equal names, sizes, times
    assert copy.fingerprint == changed.fingerprint != first.fingerprint
    assert copy.folder.name != changed.folder.name
    (where / 'train').symlink_to(write(tmp_path / 'more', a_txt='in a linked folder'))
    assert 'in a linked folder' in next(documents(prepared(where)))


def test_a_given_tokenizer_encodes(tmp_path):
    one = prepared(write(tmp_path / 'one', train_txt='a stone in the river ' * 40), 'bpe', 262)
    two = write(tmp_path / 'two', train_txt='the moon and the stars ' * 40)
    trained, given = prepared(two, 'bpe', 262), prepared(two, one.tokenizer)
    assert given.tokenizer.tokens == one.tokenizer.tokens != trained.tokenizer.tokens
    assert list(documents(given)) == list(documents(trained))
    text, tokenizer = given.fingerprint.split('-')
    assert trained.fingerprint.startswith(text) and one.fingerprint.endswith(tokenizer)


@pytest.mark.parametrize('owner, name', [(np, 'unique'), (Path, 'write_text'), (Path, 'rename')])
def test_a_killed_preparation_leaves_no_corpus(tmp_path, monkeypatch, owner, name):
    """After it, three processes prepare the corpus at once."""
    where, fork = write(tmp_path / 'src', train_txt=words(30_000, 1)), get_context('fork')
    with monkeypatch.context() as m, ProcessPoolExecutor(1, fork) as pool:
        m.setattr(owner, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(BrokenProcessPool): pool.submit(prepared, where).result()
    with ProcessPoolExecutor(3, fork) as pool:
        corpora = list(pool.map(prepared, [where] * 3))
    assert [len(corpus.train.tokens) for corpus in corpora] == [1 + corpora[0].train.n_bytes] * 3


@pytest.mark.parametrize('bad', ['{"txt": "x"}', 'nonsense', '{"text": 3}', '["text"]'])
def test_bad_lines_of_jsonl(tmp_path, bad):
    where = write(tmp_path / 'src', train_jsonl=jsonl(['a']) + bad)
    (where / 'link').symlink_to('nowhere')
    assert bad in one_line(prepared, where) and not list(tmp_path.glob('corpora/*'))
    assert Tokenizer('bytes').encode('\udcff').tolist() == [ord('?')]


@pytest.mark.parametrize('file, damage', [
    ('meta.json', lambda b: b[:40]), ('train.idx', lambda b: b[:8] + b[:8] + b[16:]),
    ('train.bin', lambda b: b[:90]), ('train.bin', lambda b: b'\1\1' + b[2:])])        # the id 257
def test_a_damaged_corpus_is_named(tmp_path, file, damage):
    where = write(tmp_path / 'src', a_jsonl=jsonl(words(40, i) for i in range(20)))     # is cut
    folder = prepared(where).folder
    (folder / file).write_bytes(damage((folder / file).read_bytes()))
    assert str(folder) in one_line(prepared, where)


def test_downloads(tmp_path, monkeypatch):
    """Once each, files or a zip of them; a failure names the folder for them."""
    with zipfile.ZipFile(archive := io.BytesIO(), 'w') as z:
        z.writestr('wikitext-103/wiki.train.tokens', ' train\n' * 100)
    web = {'wikitext-103-v1.zip': archive.getvalue(), 'input.txt': b'line\n' * 100}
    with monkeypatch.context() as m:
        url = write(tmp_path, input_txt='line\n').joinpath('input.txt').as_uri()
        m.setitem(data.DOWNLOADS, 'shakespeare', {url: 'abcdef'})       # of another file
        assert 'hash' in one_line(load, 'shakespeare', root=tmp_path)
    download = lambda url, file, sha256: file.write_bytes(web.pop(Path(url).name))
    monkeypatch.setattr(torch.hub, 'download_url_to_file', download)
    for kind in ('bytes', 'word'):                              # twice from one download
        assert load('shakespeare', kind, root=tmp_path).train.n_words == 90
        assert load('wikitext103', kind, root=tmp_path).train.n_words == 100
    assert str(tmp_path / 'downloads/wikitext2') in one_line(load, 'wikitext2', root=tmp_path)


def make_split(lengths=(5, 40, 1, 17, 33, 64, 2)):
    offsets = np.cumsum([0, *lengths])
    return Split('train', 1000 + np.arange(offsets[-1], dtype=np.uint16), offsets)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('T, B', [(16, 4), (1, 7), (7, 1), (41, 3), (8, 100)])
def test_batches_equal_their_definition(kind, T, B):
    """An epoch has each row of T tokens once: of the grid, or of documents and of their ends."""
    split, n, doc = make_split(), 162, np.repeat(np.arange(7), [5, 40, 1, 17, 33, 64, 2])
    place, after = np.arange(n - 1), set(range(1, n))           # positions; those predicted
    if kind == 'documents':
        docs = np.split(np.arange(n), split.offsets[1:-1])
        docs = [np.split(d, [len(d) // T * T]) for d in docs]
        place = np.concatenate([whole for whole, _ in docs] + [end for _, end in docs])
        after = {i for d in docs for i in np.concatenate(d)[1:]}

    def row(places):
        rest = T - len(places)
        tokens = [1000 + i for i in places] + [0] * rest
        targets = [1001 + i if i + 1 in after else -1 for i in places] + [-1] * rest
        return tokens, targets, doc[places].tolist() + [-1] * rest

    batches = Batches(split, kind, T, B, seed=3)
    n, expected = len(batches), [row(place[i:i + T]) for i in range(0, len(place), T)]
    expected += [row(place[:0])] * (n * B - len(expected))      # padding
    assert len(expected) < len(place) / T + B
    for epoch in range(2):
        found = (zip(*(x.tolist() for x in batches[epoch * n + g][:3])) for g in range(n))
        assert sorted(itertools.chain(*found)) == sorted(expected)


@pytest.mark.parametrize('kind', KINDS)
def test_a_batch_is_a_pure_function_of_its_number(kind):
    split = make_split(range(20, 60))
    batches = Batches(split, kind, 16, 4, seed=5)
    n = len(batches)
    a, b, c = ([Batches(split, kind, 16, 4, seed)[g] for g in range(first, first + n)]
               for seed, first in ((5, 0), (5, n), (6, 0)))
    for g in (0, 1, n - 1, n, n - 1, 1, 0):
        assert batches[g].seed == (a + b)[g].seed and batches[g].tokens.equal((a + b)[g].tokens)
    assert len({batch.seed for batch in a + b + c}) == 3 * n
    one, two, three = (torch.cat([batch.tokens for batch in epoch]) for epoch in (a, b, c))
    assert not one.equal(two) and not one.equal(three)


@pytest.mark.parametrize('m', [0, 1, 2, 4])
def test_consecutive_segments(m):
    """A micro-batch has groups of m segments that follow each other; the groups are shuffled."""
    batches, n = Batches(make_split(), 'consecutive', 15, 4, 0, consecutive=m), m or 4
    groups = []
    for rows in (batches.rows(g).tolist() for g in range(len(batches))):
        groups += [rows[i:i + n] for i in range(0, len(rows), n)]
    assert sorted(groups) == [[*range(11)][i:i + n] for i in range(0, 11, n)] != groups


def algorithm_1(segments, docs, k=20):
    """TRIME's packing (§4.3) by its definition; docs: the documents of each segment, as sets"""
    drawn, order = np.random.default_rng(0).permutation(len(segments)).tolist(), []
    while len(order) < len(segments):
        near = []
        if order:
            last = order[-1]
            similar = ranking(formula(segments, segments[last]))
            near = [i for i in similar if not docs[last] & docs[i]][:k]
        order.append(next(i for i in near + drawn if i not in order))
    return order


@pytest.mark.parametrize('same_document', [True, False])
def test_packed(same_document):
    rng = np.random.default_rng(0)
    texts = [rng.integers(90 * (d // 6), 90 * (d // 6) + 40, 74) for d in range(12)]
    split = Split('train', np.concatenate(texts).astype(np.uint16), np.arange(13) * 74)
    spans = [np.arange(i, min(i + 3, 887)) for i in range(0, 887, 3)]       # 296 segments
    docs = [set(split.doc_of(p)) if same_document else {p[0]} for p in spans]
    order = algorithm_1([split.tokens[p].tolist() for p in spans], docs)
    assert Batches(split, 'packed', 3, 296, 0, same_document).rows(0).tolist() == order
    two = Batches(make_split([444, 444]), 'packed', 443, 56, 0, same_document)
    assert sorted(two.rows(0).tolist()) == [0, 1, 2]            # one of both shares with all
    random, alone = (Batches(split, kind, 16, 8, 0, bm25=False) for kind in ('packed', 'segments'))
    assert [*map(list, map(random.rows, range(7)))] == [*map(list, map(alone.rows, range(7)))]


def test_what_cannot_be_loaded_or_batched(tmp_path):
    one_line(prepared, write(tmp_path / 'none', train_txt=b'\xff', val_txt='no training text'))
    split = make_split()
    for what, kind, T in ((split, 'segments', 162), (split, 'documents', 162), (None, 'packed', 4)):
        one_line(Batches, what, kind, T, 2, seed=0)
    one_line(Batches, split, 'consecutive', 4, 6, seed=0, consecutive=4)
    one_line(Batches, make_split([99]), 'packed', 9, 2, seed=0)         # a single document
    for T, chunk in ((256, 8), (255, 32), (224, 32)):
        one_line(data.Needles, make_split([999]), Tokenizer('bytes'), 1, T, 2, 0, chunk)


@pytest.mark.parametrize('name', ['bytes', 'bpe'])
@pytest.mark.parametrize('hops, grow', [(1, 0), (1, 8), (2, 0)])
def test_needles(name, hops, grow):
    """Names differ; an answer begins with a chunk, follows from the sentences, and is predicted."""
    vocabulary = [a + 'o' + b for a in 'bcdfg' for b in 'klmnp']
    text = ' '.join(random.Random(0).choices(vocabulary, k=9999))
    tokenizer = Tokenizer.train(name, [text], 330)
    split = Split('train', tokenizer.encode(text), np.array([0, len(tokenizer.encode(text))]))
    make = lambda seed, split=split: data.Needles(split, tokenizer, hops, 992, 2, seed, 31, grow)
    names = lambda needles: {*re.findall(' opens(.*)[.]', tokenizer.decode(needles.row(0, 32)[0]))}
    assert not names(make(0)) & names(make(0, Split('val', split.tokens[9:], split.offsets)))
    assert make(0).rows(9).tolist() == [18, 19]
    for g, parts in enumerate([8, 8, 4, 4, 2, 2, 1, 1, 1]):
        tokens, targets, _, seed = make(0)[g]
        assert tokens.equal(make(0)[g].tokens) and not tokens.equal(make(1)[g].tokens)
        n = tokens.size(1) // 31
        assert tokens.shape == ((2 * parts, 992 // parts) if grow else (2, 992))
        for row, target in zip(tokens.numpy(), targets.numpy()):
            sentences = tokenizer.decode(row[:n // 2 * 31]).split('\nKey')[1:]
            opens = dict(sentence.split('.\n')[0].split(' opens') for sentence in sentences)
            names = {*opens, *opens.values()}
            assert len(names) == len(opens) * (hops + 1) // hops
            assert max(tokenizer.decode(row).count(x) for x in names) <= hops + 1   # not in text
            scored, asked = target >= 0, 0
            assert (target == np.append(row[1:], target[-1]))[scored].all()
            for i in range(31, len(row), 31):
                before, after = tokenizer.decode(row[:i]), tokenizer.decode(row[i:])
                if after.startswith(' opens'):
                    key, answer = before.split('\nKey')[-1], after[6:].split('.\n')[0].split(',')
                    assert answer == [opens[key]] + [opens.get(opens[key])] * (hops - 1)
                    assert tokenizer.decode(row[:i - (hops - 1) * 31]).endswith('\nKey' + key)
                    end = i - 1 + len(tokenizer.encode(' opens' + ','.join(answer)))
                    assert scored[end - (5 * hops - 1):end].all()       # four words, a comma
                    asked += 1
            assert 0 < asked <= len(opens) // hops and scored.mean() < 0.35


def test_names_differ_and_are_not_in_the_text():
    """Of the 24 orders of four words, a text has 18: the six names are the others."""
    names = [' '.join(p) for p in itertools.permutations(['aaa', 'bbb', 'ccc', 'ddd'])]
    text = '\n'.join(names[:18] * 4)
    tokenizer = Tokenizer.train('word', [text, ' '.join(3 * a for a in 'efghijklmnopq')])
    ids = tokenizer.encode(text).astype(int)
    needles = data.Needles(Split('train', ids, np.array([0, len(ids)])), tokenizer, 1, 256, 2, 0)
    needles.words = tokenizer.encode('aaa bbb ccc ddd').astype(int)
    found = needles.chains(np.random.default_rng(0), 3, ids).reshape(6, 4)
    assert sorted(map(tokenizer.decode, found)) == names[18:]
