"""The datastore: searches against their definition, builds that are interrupted. Run: pytest tests/test_datastore.py"""
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trime import Datastore

torch.set_num_threads(1)                        # the stores are tiny: two threads would wait for each other
C = 16
FILES = {'header.json', 'entries.bin', 'blocks.bin'}
ABOUT = {'checkpoint': 'abc', 'stride': 4}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks, cells and buffers so small that a few hundred entries need many of each; no one pulls the plug here."""
    for name, value in dict(BLOCK=8, PROBE=4, CELL=40, BUFFER=4 * 51 * 5).items():
        monkeypatch.setattr(Datastore, name, value)
    monkeypatch.setattr(os, 'fsync', lambda f: None)


def clustered(n, width=C, seed=0, centres=30):
    g = torch.Generator().manual_seed(seed)
    centre = torch.randn(centres, width, generator=torch.Generator().manual_seed(99))
    x = centre[torch.randint(centres, (n,), generator=g)] + 0.5 * torch.randn(n, width, generator=g)
    return x / x.pow(2).mean(1, keepdim=True).sqrt()


def source(keys, stop=None, step=26):
    """entries(start) for build; raises KeyboardInterrupt at entry `stop`. Values are 7 j."""
    def entries(start):
        for a in range(start, len(keys), step):
            if stop is not None and a >= stop:
                raise KeyboardInterrupt
            yield keys[a:a + step], np.arange(a, min(a + step, len(keys))) * 7
    return entries


def build(folder, keys, stop=None, about=ABOUT, **more):
    return Datastore.build(str(folder), source(keys, stop), len(keys), keys.size(1), about, **more)


def contents(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def dense(query, keys, metric):
    """All similarities by the definition, in fp64, over the fp16 keys."""
    q, k = query.double()[:, None], keys.half().double()[None]
    return (q * k).sum(-1) / C ** 0.5 if metric == 'ip' else -(q - k).pow(2).sum(-1) / (2 * C ** 0.5)


@pytest.mark.parametrize('n', [1, 5, 8, 79, 80, 403, 600])      # 80: the fewest with two cells; 403: a short last block
def test_every_entry_is_stored_once(tmp_path, n):
    """Cells end where blocks do: a cell that is empty or shorter than half a block must lose nothing."""
    keys = clustered(n)
    store = build(tmp_path / 's', keys)
    assert len(store) == n and len(store.mean) == -(-n // 8)
    assert sorted(store.positions) == list(range(n))
    assert np.array_equal(store.keys, keys.half().numpy()[store.positions])
    assert np.array_equal(store.values, 7 * store.positions)
    assert set(os.listdir(tmp_path / 's')) == FILES


def test_said(tmp_path):
    store = build(tmp_path / 's', clustered(50))
    for shape in (2, 3, 4), (0, 5), ():
        rows = torch.randint(50, shape)
        said = store.said(rows)
        assert said.dtype == torch.int64 and said.shape == shape
        assert torch.equal(said.flatten(), torch.tensor([int(store.values[row]) for row in rows.flatten()]).long())
    assert store.said(torch.tensor([-1, 3])).shape == (2,)                  # -1: not found, its weight is 0


def test_blocks_are_described(tmp_path):
    """The last block has 3 entries; its mean is over 3."""
    store = build(tmp_path / 's', clustered(403))
    for b in range(len(store.mean)):
        k = torch.from_numpy(np.array(store.keys[8 * b:8 * b + 8])).double()
        assert torch.allclose(store.mean[b].double(), k.mean(0), atol=1e-5)
        assert abs(store.square[b].item() - k.pow(2).sum(1).mean().item()) < 1e-3
        assert abs(store.spread[b].item() - ((k - k.mean(0)).pow(2).sum() / len(k) / C).sqrt().item()) < 1e-3


@pytest.mark.parametrize('metric', ['ip', 'l2'])
@pytest.mark.parametrize('n, K', [(403, 20), (403, 60), (30, 40)])    # 60: more than PROBE blocks; 40: than there are
def test_probing_everything_is_exact(tmp_path, metric, n, K):
    """All blocks are read in rounds of PROBE: the best of earlier rounds must stay, the last round has fewer blocks."""
    keys, query = clustered(n), 1.5 * clustered(23, seed=1)
    store = build(tmp_path / 's', keys)
    sim, rows = store.search(query, K, metric, probe=10 ** 6)
    true = dense(query, keys, metric)
    best = true.topk(min(K, n)).values
    assert sim.shape == rows.shape == (23, K) and sim.dtype == torch.float32 and rows.dtype == torch.int64
    assert torch.allclose(sim[:, :n].double(), best, atol=1e-4)
    at = torch.from_numpy(store.positions[rows[:, :n].numpy()])
    assert torch.allclose(true.gather(1, at), best, atol=1e-4) and all(len(set(r)) == len(r) for r in at.tolist())
    assert (rows[:, n:] == -1).all() and (sim[:, n:] == float('-inf')).all()


@pytest.mark.parametrize('metric', ['ip', 'l2'])
@pytest.mark.parametrize('probe', [1, 3, 50])                               # of 51 blocks, the last one with 3 entries
def test_what_is_found_is_true(tmp_path, metric, probe):
    """The entries that the last block lacks must not be found, nor an entry twice."""
    keys, query = clustered(403), clustered(23, seed=1)
    store = build(tmp_path / 's', keys)
    sim, rows = store.search(query, 20, metric, probe)
    true = dense(query, keys, metric).gather(1, torch.from_numpy(store.positions[rows.numpy()]))
    there = rows >= 0
    assert (there.sum(1) >= min(20, 8 * probe - 5)).all() and (there == sim.isfinite()).all()
    assert torch.allclose(sim[there].double(), true[there], atol=1e-4)
    assert (sim[:, :-1] >= sim[:, 1:]).all()
    assert all(len(set(r) - {-1}) == sum(x >= 0 for x in r) for r in rows.tolist())


@pytest.mark.parametrize('metric', ['ip', 'l2'])
@pytest.mark.parametrize('probe', [3, 10 ** 6])
def test_sub_batches_do_not_matter(tmp_path, monkeypatch, probe, metric):
    """BUFFER holds a few queries at a time, then one, then all."""
    store, query = build(tmp_path / 's', clustered(403)), clustered(23, seed=1)
    sim, rows = store.search(query, 20, metric, probe)
    for buffer in 1, 10 ** 8:
        monkeypatch.setattr(Datastore, 'BUFFER', buffer)
        again, rows_again = store.search(query, 20, metric, probe)
        assert torch.allclose(sim, again, atol=1e-5)
        assert (rows != rows_again).float().mean() < 0.01                   # nearly equal ones may swap


def test_recall(tmp_path, monkeypatch):
    """50,000 entries in 391 blocks. Without `halve` in the cells, or with random blocks probed, much less is found."""
    for name, value in dict(BLOCK=128, PROBE=32, CELL=1024, BUFFER=2 ** 22).items():
        monkeypatch.setattr(Datastore, name, value)
    keys, query = clustered(50_000, 32, centres=1000), clustered(200, 32, seed=1, centres=1000)
    entries = lambda start: ((keys[a:a + 5000], np.arange(a, a + 5000)) for a in range(start, 50_000, 5000))
    store = Datastore.build(str(tmp_path / 's'), entries, 50_000, 32, ABOUT)
    for metric in 'ip', 'l2':
        share, mass = store.recall(query, 100, 32, metric)
        assert share > 0.8 and mass > 0.8
        assert store.recall(query[:20], 100, 391, metric) == (1, pytest.approx(1))
        true, found = (set(store.search(query[:1], 100, metric, p)[1][0].tolist()) for p in (391, 2))
        assert store.recall(query[:1], 100, 2, metric)[0] == pytest.approx(len(true & found) / 100)
    Datastore.build(str(tmp_path / 't'), entries, 50_000, 32, ABOUT)
    assert contents(tmp_path / 's') == contents(tmp_path / 't')             # deterministic


def test_recall_of_few(tmp_path):
    """More neighbors than entries: those that do not exist are neither found nor missed."""
    store = build(tmp_path / 's', clustered(30))
    assert store.recall(clustered(1, seed=1), 40, probe=1)[0] in (pytest.approx(8 / 30), pytest.approx(6 / 30))


@pytest.mark.parametrize('stop', [0, 26, 390])
def test_interrupted_while_storing(tmp_path, stop):
    """The rest of text.bin behind `done`, here more of it than there was, must not survive."""
    keys = clustered(403)
    build(tmp_path / 'straight', keys)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / 's', keys, stop)
    assert json.loads((tmp_path / 's' / 'header.json').read_text())['done'] == stop
    with pytest.raises(ValueError, match='not complete'):
        Datastore(str(tmp_path / 's'))
    with open(tmp_path / 's' / 'text.bin', 'ab') as f:
        f.write(b'torn' * 9)
    starts = []
    entries = lambda start: starts.append(start) or source(keys, step=17)(start)
    Datastore.build(str(tmp_path / 's'), entries, 403, C, ABOUT)
    assert starts == [stop] and contents(tmp_path / 's') == contents(tmp_path / 'straight')


def test_a_header_is_written_after_its_entries(tmp_path, monkeypatch):
    """At no time does the header say more than was made safe before, and it is never itself half written."""
    folder, synced = tmp_path / 's', [0]

    def fsync(f):
        name, = (path.name for path in folder.iterdir() if os.path.samestat(path.stat(), os.fstat(f)))
        assert name != 'header.json'                                        # it has another name until it is safe
        if (folder / 'header.json').exists():
            assert json.loads((folder / 'header.json').read_text())['done'] <= synced[-1]
        if 'text.bin' in name:
            synced.append(os.fstat(f).st_size // (2 * C + 12))

    monkeypatch.setattr(os, 'fsync', fsync)
    build(folder, clustered(100))
    assert synced == [0, 26, 52, 78, 100]


@pytest.mark.parametrize('when', ['halve', 'blocks.bin', 'complete'])
def test_interrupted_while_sorting(tmp_path, monkeypatch, when):
    """Amid and after the writing of the sorted files. No entry is asked for again, and nothing is lost."""
    keys = clustered(403)
    build(tmp_path / 'straight', keys)
    halve, write, calls = Datastore.halve, Datastore.write, []              # halve comes bound to the class

    def dies_in_halve(cls, *args):
        calls.append(args)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return halve(*args)

    def dies_in_write(path, start, data):
        if path.name == when or when == 'complete' and b'"complete": true' in data:
            raise KeyboardInterrupt
        write(path, start, data)

    with monkeypatch.context() as m:
        if when == 'halve':
            m.setattr(Datastore, 'halve', classmethod(dies_in_halve))
        else:
            m.setattr(Datastore, 'write', staticmethod(dies_in_write))
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / 's', keys)
    with pytest.raises(ValueError, match='not complete'):
        Datastore(str(tmp_path / 's'))
    Datastore.build(str(tmp_path / 's'), lambda start: 1 / 0, 403, C, ABOUT)
    assert contents(tmp_path / 's') == contents(tmp_path / 'straight')


def test_a_complete_store_is_just_opened(tmp_path):
    keys = clustered(403)
    build(tmp_path / 's', keys)
    before = contents(tmp_path / 's')
    (tmp_path / 's' / 'text.bin').write_bytes(b'left over')                 # killed before its removal
    store = Datastore.build(str(tmp_path / 's'), lambda start: 1 / 0, 403, C, ABOUT)
    assert len(store) == 403 and contents(tmp_path / 's') == before


@pytest.mark.parametrize('about, names', [
    ({'checkpoint': 'abd', 'stride': 4}, ['checkpoint']), ({'checkpoint': 'abc'}, ['stride']),
    ({'checkpoint': 1, 'stride': 5, 'more': 6}, ['checkpoint', 'stride', 'more'])])
@pytest.mark.parametrize('stop', [None, 156])
def test_another_store_is_refused(tmp_path, about, names, stop):
    """Complete or not: what differs is named, nothing else, and what is there stays untouched."""
    keys = clustered(403)
    try:
        build(tmp_path / 's', keys, stop)
    except KeyboardInterrupt:
        pass
    before = contents(tmp_path / 's')
    with pytest.raises(ValueError) as e:
        build(tmp_path / 's', keys, about=about)
    assert [name for name in ('checkpoint', 'stride', 'more') if f'{name} (' in str(e.value)] == names
    assert '\n' not in str(e.value)
    with pytest.raises(ValueError, match='entries'):
        build(tmp_path / 's', keys[1:])
    with pytest.raises(ValueError, match='width'):
        build(tmp_path / 's', keys[:, 1:])
    assert contents(tmp_path / 's') == before


def test_about_on_opening(tmp_path):
    """Tuples are JSON's lists."""
    build(tmp_path / 's', clustered(20), about=dict(ABOUT, layers=(1, 2)))
    assert build(tmp_path / 's', clustered(20), about=dict(ABOUT, layers=(1, 2))).about['checkpoint'] == 'abc'
    assert {'entries': 20, 'width': C}.items() <= Datastore(tmp_path / 's').about.items()


@pytest.mark.parametrize('name', ['entries.bin', 'blocks.bin'])
@pytest.mark.parametrize('harm', ['truncated', 'overlong', 'missing'])
def test_damaged_files_are_named(tmp_path, name, harm):
    build(tmp_path / 's', clustered(403))
    path = tmp_path / 's' / name
    size = path.stat().st_size
    if harm == 'missing':
        path.unlink()
    else:
        path.write_bytes((path.read_bytes() + b'x')[:size + 1 if harm == 'overlong' else size - 1])
    actual = {'missing': 0, 'truncated': size - 1, 'overlong': size + 1}[harm]
    with pytest.raises(ValueError, match=f'{name} has {actual:,} bytes .* {size:,};'):
        Datastore(str(tmp_path / 's'))


@pytest.mark.parametrize('header', [None, b'', b'\xff\x00', b'[]', b'{"entries": 403}', b'{"about": 3}'])
def test_a_damaged_header(tmp_path, header):
    build(tmp_path / 's', clustered(403))
    path = tmp_path / 's' / 'header.json'
    path.unlink() if header is None else path.write_bytes(header)
    for attempt in lambda: Datastore(str(tmp_path / 's')), lambda: build(tmp_path / 's', clustered(403)):
        with pytest.raises(ValueError, match='header.json cannot be read'):
            attempt()


def test_a_shortened_text_file(tmp_path):
    """Shorter than the header says: the missing entries are asked for again, and not filled with zeros."""
    keys, starts = clustered(403), []
    build(tmp_path / 'straight', keys)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / 's', keys, stop=156)
    os.truncate(tmp_path / 's' / 'text.bin', 100 * 44 + 5)
    entries = lambda start: starts.append(start) or source(keys)(start)
    Datastore.build(tmp_path / 's', entries, 403, C, ABOUT)
    assert starts == [100] and contents(tmp_path / 's') == contents(tmp_path / 'straight')


def test_no_space(tmp_path, monkeypatch, capsys):
    """403 records of 44 bytes twice, in text order and sorted, and 51 blocks of 68. One byte less does not do."""
    need = 2 * 403 * 44 + 51 * 68
    monkeypatch.setattr('shutil.disk_usage', lambda path: SimpleNamespace(free=need - 1))
    with pytest.raises(ValueError, match='403 entries .* Free some space'):
        build(tmp_path / 'deep' / 's', clustered(403))
    assert not (tmp_path / 'deep').exists()
    monkeypatch.setattr('shutil.disk_usage', lambda path: SimpleNamespace(free=need))
    with pytest.raises(KeyboardInterrupt):
        Datastore.build(str(tmp_path / 'deep' / 's'), source(clustered(403), 156), 403, C, ABOUT)
    line = capsys.readouterr().out
    assert line.count('\n') == 1 and '403 entries of width 16' in line
    monkeypatch.setattr('shutil.disk_usage', lambda path: SimpleNamespace(free=need - 156 * 44))
    build(tmp_path / 'deep' / 's', clustered(403))                          # what is there counts


@pytest.mark.parametrize('after', [1, 6, 38])                     # in the first header, while storing, while sorting
def test_the_disk_becomes_full(tmp_path, monkeypatch, after):
    keys, calls = clustered(403), []
    build(tmp_path / 'straight', keys)

    def full(f):
        calls.append(f)
        if len(calls) >= after:
            raise OSError(28, 'No space left on device')

    with monkeypatch.context() as m:
        m.setattr(os, 'fsync', full)
        with pytest.raises(ValueError, match='No space left on device; what was stored stays') as e:
            build(tmp_path / 's', keys)
        assert '\n' not in str(e.value)
    assert len(calls) == after
    build(tmp_path / 's', keys)
    assert contents(tmp_path / 's') == contents(tmp_path / 'straight')


def test_errors_of_the_entries_are_their_own(tmp_path):
    """An OSError of the text's file, say, must not be reported as one of the datastore's disk."""
    def entries(start):
        yield from source(clustered(20))(start)
        raise FileNotFoundError('text')
    with pytest.raises(FileNotFoundError, match='text'):
        Datastore.build(tmp_path / 's', entries, 30, C, ABOUT)


def test_entries_that_do_not_fit(tmp_path):
    keys = clustered(100)
    for bad, message in [(torch.cat([keys[:50], keys[:1] * 1e6, keys[51:]]), 'entries 26 to 51 .* not finite'),
                         (torch.cat([keys[:70], keys[:1] * float('nan'), keys[71:]]), 'entries 52 to 77 .* not finite'),
                         (keys[:90], 'ended after 90 of 100'), (keys.repeat(2, 1), 'entries 78 to 103 .* too many'),
                         (keys[:, :5], 'could not broadcast')]:
        with pytest.raises(ValueError, match=message):
            Datastore.build(str(tmp_path / message[-5:]), source(bad), 100, C, ABOUT)
    for n, width in (0, C), (10, 0):
        with pytest.raises(ValueError, match='1 or more'):
            Datastore.build(str(tmp_path / 'none'), source(keys), n, width, ABOUT)
    assert not (tmp_path / 'none').exists()


def test_searches_that_make_no_sense(tmp_path):
    store = build(tmp_path / 's', clustered(100))
    query = torch.zeros(3, C)
    for arguments in (query[:, 1:], 5), (query, 0), (query, 5, 'cosine'), (query, 5, 'ip', 0):
        with pytest.raises(ValueError, match='no search'):
            store.search(*arguments)
    for probe in 2, 99:
        assert store.search(torch.zeros(0, C), 5, probe=probe)[1].shape == (0, 5)


def test_progress(tmp_path):
    seen = []
    build(tmp_path / 's', clustered(403), progress=lambda *what: seen.append(what))
    assert ('store', 403, 403) in seen and seen[-1] == ('sort', 403, 403) and len(seen) > 6
