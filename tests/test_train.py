"""The training loop: resuming, any number of processes, what a user can get wrong."""
import contextlib, dataclasses, functools, importlib, io, json, math, os, random, re, shutil
import signal, socket, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.run import parse_args
from torch.utils._pytree import tree_leaves
from pytest import approx, fixture, mark

import data, train, trime
from helpers import (COMMON, FLAGS, batch_of, close, flags, log_p, one_line, streamed, write,
                     write_splits)

FILE = Path(train.__file__)
WORDS = 'cat dog tree river stone sees finds the a old'.split()
run = train.main
signal.signal(signal.SIGINT, signal.default_int_handler)    # shells' background jobs ignore it


@fixture(scope='session')
def texts(tmp_path_factory):
    """48 documents of made-up sentences in which words repeat."""
    rng = random.Random(0)
    texts = [' '.join(rng.choices(WORDS, k=20 + i % 40)) for i in range(48)]
    return write_splits(tmp_path_factory.mktemp('texts'), texts[:40], texts[40:])


@fixture
def here(tmp_path, texts, monkeypatch):
    """An empty working folder with the corpus linked into it."""
    (tmp_path / 'texts').symlink_to(texts)
    monkeypatch.chdir(tmp_path)
    precision = torch.get_float32_matmul_precision()
    yield tmp_path
    torch.set_float32_matmul_precision(precision)


def log_of(run):
    return [json.loads(line) for line in Path(run, 'log.jsonl').read_text().splitlines()]


def config_of(run):
    return json.loads(Path(run, 'config.json').read_text())


def load(path):
    return torch.load(path, weights_only=True)


def step_of(path):
    return load(path)['step']


def outcome(run):
    """What a run has computed: weights and optimizers' moments; the log without its timings."""
    checkpoint = load(f'{run}/ckpt.pt')
    moments = [x for x in tree_leaves(checkpoint['optimizers']) if torch.is_tensor(x)]
    assert len(moments) > len(checkpoint['model'])          # one or two of each weight
    log = log_of(run)
    for entry in log:
        del entry['tokens_per_s']
    return [*checkpoint['model'].values(), *moments], log


def same(run, straight):
    """Whether two runs are equal, bit for bit."""
    tensors, log = outcome(run)
    expected, expected_log = outcome(straight)
    pairs = zip(tensors, expected, strict=True)
    return log == expected_log and all(torch.equal(x, y) for x, y in pairs)


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob('*') if path.is_file()}


def launch(more='', model='trime'):
    """Trains a small model with these flags, too."""
    run(flags(model, more))


# --------------------------------------------------------------------------------------------------
# interruptions
def interrupt():
    signal.raise_signal(signal.SIGINT)


def hang_up():
    signal.raise_signal(signal.SIGHUP)


def before(name, condition, *actions, owner=train.Run):
    """Calls actions before each call of a method of Run whose arguments meet a condition."""
    original = getattr(owner, name)

    def patched(*args):
        if condition(*args):
            for action in actions:
                action()
        return original(*args)

    return mock.patch.object(owner, name, patched)


def at_step(step, *actions, out='run'):
    """Calls actions at the beginning of a step of the run in this folder; the first step is 1."""
    return before('step', lambda run, done, _: (done + 1, str(run.out)) == (step, out), *actions)


@mark.parametrize('model', FLAGS)
def test_an_interrupted_run_equals_another_one(here, capsys, model):
    launch('--out straight', model)
    with at_step(3, interrupt):
        assert 'stopped at step 3' in one_line(launch, '--out run', model)
    assert step_of('run/ckpt.pt') == len(log_of('run')) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    launch('--out run', model)
    assert 'step 3 of 6' in capsys.readouterr().out
    assert same('run', 'straight')
    launch('--out other --seed 1', model)
    assert not same('run', 'other')


def test_interruptions_at_other_moments(here):
    """Two signals in step 6: it has no checkpoint. One in the last validation: all is written."""
    launch('--out straight')
    with at_step(6, interrupt, interrupt):
        assert one_line(launch, '--out run') == 'train.py: stopped'
    assert len(log_of('run')) == 5 and step_of('run/ckpt.pt') == 4
    with open('run/log.jsonl', 'a') as f:
        f.write('{"step": 6, "lo')                          # as after a kill
    outside = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, and so pytest, ignores it
    with before('validate', lambda *args: len(args) == 2, hang_up):         # of all tokens
        assert 'run it again' in one_line(launch, '--out run')
    signal.signal(signal.SIGHUP, outside)
    assert same('run', 'straight')


def test_nohup(here, monkeypatch):
    """A SIGHUP that is ignored outside does not end a run."""
    outside = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with at_step(3, hang_up):
        launch('--out run')
    assert signal.signal(signal.SIGHUP, outside) == signal.SIG_IGN
    assert step_of('run/ckpt.pt') == 6


def test_without_a_reader(here):
    """What is printed is dropped."""
    train_py = [FILE, *flags('trime', '--out run')]
    eval_py = [FILE.with_name('eval.py'), *'run --task table --memory none --json x.json'.split()]
    for command in (train_py, eval_py):
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE)
        process.stdout.close()
        assert process.wait() == 0
    assert step_of('run/ckpt.pt') == 6 and Path('x.json').exists()


def test_a_finished_run_compiles_nothing(here):
    with mock.patch('train.compile_layers') as compiled:
        launch('--compile on --out run')
        assert compiled.call_count == 1
        launch('--compile on --out run')
        assert compiled.call_count == 1


class Scores(torch.nn.Module):
    def forward(self, x):
        with torch.autocast('cpu', enabled=False):
            return (x @ x.T).softmax(1)


def test_compiled_layers_have_the_same_gradients_under_autocast(monkeypatch):
    """Of products in fp32: they are not rounded to bf16."""
    if not hasattr(importlib.import_module('torch._functorch.config'), 'backward_pass_autocast'):
        pytest.skip('of later versions of torch')
    compiled = functools.partialmethod(torch.nn.Module.compile, backend='aot_eager')
    monkeypatch.setattr(torch.nn.Module, 'compile', compiled)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def gradient(layer):
        with torch.autocast('cpu', torch.bfloat16):
            loss = layer(x).square().sum()
        return torch.autograd.grad(loss, x)[0]

    layer = Scores()
    expected = gradient(layer)
    train.compile_layers(layer, Scores)
    close(gradient(layer), expected, atol=1e-6)


def test_a_coarse_clock(here, monkeypatch):
    monkeypatch.setattr(time, 'perf_counter', lambda: 7.0)
    launch()


def test_an_interrupted_reference(here, capsys):
    launch('--out straight', 'rpt')
    with at_step(3, interrupt, out='run-reference'):
        one_line(launch, '--out run', 'rpt')
    assert not contents('run')
    launch('--out run', 'rpt')
    assert same('run-reference', 'straight-reference') and same('run', 'straight')
    assert 'ret_loss' in log_of('run')[0]                   # the scores reach the model
    screen = capsys.readouterr().out
    assert 'min left in this stage' in screen and 'finished: python eval.py run\n' in screen
    assert 'eval.py run-reference' not in screen
    assert re.search(r'ndcg 0\.\d+ \| ranked \d+ \|', screen)


def test_fewer_steps_than_those_of_the_reference(here):
    """A run that was stopped goes on with its reference LM as it is."""
    with at_step(1, interrupt, out='run'), contextlib.suppress(SystemExit):
        launch('--out run --max-steps 6 --reference-steps 5', 'rpt')
    launch('--out run --max-steps 3 --reference-steps 5', 'rpt')
    assert step_of('run/ckpt.pt') == 3 and step_of('run-reference/ckpt.pt') == 5


def test_a_reference_of_another_run(here):
    """Its folder is given; what retrieves, has another tokenizer or a short window is refused."""
    launch('--out run', 'rpt')
    with mock.patch('rpt.bm25_candidates') as computed:
        launch('--out same --reference run-reference', 'rpt')
    assert not computed.called                              # the stored scores are found
    assert same('run', 'same')
    launch('--out bpe --retriever none --tokenizer bpe', 'rpt')
    launch('--out trime')
    for more in ('run', 'bpe', 'trime', 'run-reference --chunk-size 8'):
        assert 'no RPT of' in one_line(launch, '--out other --reference ' + more, 'rpt')


def test_kill_9(here):
    """At any moment; checkpoints are written to another file first, so the last one is whole."""
    more = '--max-steps 60 --eval-every 20 --out '
    launch(more + 'straight')
    command = [sys.executable, FILE, *flags('trime', more + 'run')]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not Path('run/ckpt.pt').exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert step_of('run/ckpt.pt') < 60
    Path('run/best.pt.123.tmp').touch()                     # as of a kill while it is written
    Path('run/datastore.123.tmp').mkdir()                   # that eval.py builds
    launch(more + 'run')
    assert same('run', 'straight')
    assert [*Path('run').glob('*.tmp')] == [Path('run/datastore.123.tmp')]


def test_a_folder_has_one_run_at_a_time(here):
    """The folder of the reference LM, too"""
    for model, folder in (('trime', 'run'), ('rpt', 'run-reference')):
        with train.locked(Path(folder)):
            assert f'{folder} is in use' in one_line(launch, '--out run', model)
    assert not Path('run').exists()


@mark.parametrize('stop', [3, 99])
def test_more_steps(here, capsys, stop):
    """A run of 6 steps, stopped at step 3 or finished, then --max-steps 9: the batches are those
    of 9 steps. With a rate of nearly 0 weights stay, so equal losses mean equal batches."""
    more = '--lr 1e-12 --memory none --dropout 0 --max-steps '
    launch(more + '9 --out straight')
    with at_step(stop, interrupt), contextlib.suppress(SystemExit):
        launch(more + '6 --out run')
    log = Path('run/log.jsonl').read_text()
    launch(more + '9 --out run')
    assert '--max-steps was 6' in capsys.readouterr().out
    assert config_of('run')['max_steps'] == 9
    assert Path('run/log.jsonl').read_text().startswith(log)

    for x, y in zip(log_of('run'), log_of('straight'), strict=True):
        assert x['loss'] == approx(y['loss'])
        assert (x['step'], x['tokens']) == (y['step'], y['tokens'])
        assert x['lr'] == y['lr'] or x['step'] <= 6
    assert 'run has 9 steps; a larger' in one_line(launch, more + '8 --out run')


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return str(s.getsockname()[1])


@mark.dist
def test_two_processes_take_the_same_steps_as_one(here, monkeypatch):
    """Two or four micro-batches, of one process or one or two of each of two: only the order of
    sums differs. A signal to one of the processes ends both after the same step."""
    # one start for all runs, because starting takes most of the time. The first has the store of
    # torchrun, the others their own: a second group in one store can fail (torch 2.6)
    more = dict(trime='', drt='--micro-batch 1', rpt='')
    runs = [(flags(model, f'{more[model]} --out two-{model}'), free_port())
            for model in ('trime', *FLAGS)]
    Path('all.py').write_text(f"""
import os, signal, train
step = train.Run.step

def step_with_a_signal(run, done, signals):
    if (str(run.out), done, train.RANK) == ('two-trime', 2, 1):
        signal.raise_signal(signal.SIGINT)
    return step(run, done, signals)

train.Run.step = step_with_a_signal
for argv, next_port in {runs}:
    try:
        train.main(argv)
    except SystemExit as end:
        print(end)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE='False', MASTER_PORT=next_port)""")
    monkeypatch.setenv('PYTHONPATH', str(FILE.parent))
    torchrun = '-m torch.distributed.run --standalone --nproc_per_node=2'.split()
    ended = subprocess.run([sys.executable, *torchrun, 'all.py'], check=True, text=True,
                           stdout=subprocess.PIPE, timeout=300)
    assert ', step 3 of 6' in ended.stdout, ended.stdout        # where the run was resumed
    for model in FLAGS:
        launch(f'{more[model]} --out one', model)
        tensors, log = outcome('one')
        tensors_2, log_2 = outcome(f'two-{model}')
        close(tensors, tensors_2, atol=1e-6)
        for x, y in zip(log, log_2, strict=True):
            assert x == approx(y, rel=1e-4)
        shutil.rmtree('one')


def two_machines(*runs):
    """Two processes, each in a folder of its own, which start once for several runs, given by their
    flags -> for each run, how it ended in both"""
    argvs = [(flags('trime', more), free_port()) for more in runs]
    Path('all.py').write_text(f"""
import os, sys, train

for argv, port in {argvs}:
    os.environ['MASTER_PORT'] = port
    end = 'finished'
    try:
        train.main(argv)
    except SystemExit as error:
        end = error
    print('end:', end, file=sys.stderr)""")
    processes = []
    for rank, folder in enumerate(('a', 'b')):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK='0', WORLD_SIZE='2',
                   MASTER_ADDR='127.0.0.1', PYTHONPATH=str(FILE.parent))
        processes.append(subprocess.Popen([sys.executable, '../all.py'], cwd=folder, env=env,
                                          text=True, stdout=subprocess.DEVNULL,
                                          stderr=subprocess.PIPE))
    screens = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], screens
    return [*zip(*(re.findall('^end: (.*)$', screen, re.M) for screen in screens), strict=True)]


@mark.dist
def test_machines_that_share_no_disk(here, texts):
    """A run that only the first machine has is refused by both, in one line; with a copy it is
    resumed, and equals a run of one process. So is a text that only one of them has."""
    launch('--out straight')
    with at_step(3, interrupt):
        one_line(launch, '--out run')
    for folder in ('a', 'b'):
        Path(folder).mkdir()
        Path(folder, 'texts').symlink_to(texts)
        shutil.copytree('run', f'{folder}/copied')
    shutil.copytree('run', 'a/run')
    Path('a/more').symlink_to(texts)
    of_one, of_both, of_text = two_machines('--out run', '--out copied', '--out new --data more')

    assert 'process 1 has another value of the step of ckpt.pt than process 0 (0, 3)' in of_one[0]
    assert 'another value' in of_one[1]
    assert step_of('a/run/ckpt.pt') == 3 and not Path('b/run').exists()

    assert of_both == ('finished', 'finished')
    close(outcome('a/copied')[0], outcome('straight')[0], atol=1e-6)

    first, last = of_text
    assert 'process 1: ' in last and 'each machine needs the text' in last
    assert re.fullmatch('train.py: process 0: another process has ended, and its message has the '
                        r'reason, or the processes cannot reach each other: \w+Error\(.+', first)


def test_processes_with_another_precision(monkeypatch):
    """auto is bf16 on one machine, fp32 on another one."""
    def all_gather_object(values, local_values):
        values[:] = local_values, local_values | {'the precision (--dtype sets it)': 'bf16'}

    monkeypatch.setattr(train, 'WORLD', 2)
    monkeypatch.setattr(train.dist, 'all_gather_object', all_gather_object)
    run = SimpleNamespace(state=dict(step=0), corpus=SimpleNamespace(fingerprint='1'), bf16=False,
                          settings={}, model=torch.nn.Linear(1, 1))
    message = one_line(train.check_processes, run)
    assert 'value of the precision (--dtype sets it) than process 0 (bf16, fp32)' in message


# --------------------------------------------------------------------------------------------------
# what a run leaves
def test_a_run_learns(here, capsys):
    launch('--lr 1e-2 --max-steps 60 --eval-every 20 --grad-clip 0')
    out = Path('out/trime')
    log = log_of(out)
    assert [x['step'] for x in log] == list(range(1, 61))
    assert [x['step'] for x in log if 'val_loss' in x] == [20, 40, 60]
    assert log[-1]['val_loss'] < log[0]['loss'] - 1
    cosine = [0.0055 + 0.0045 * math.cos(math.pi * s / 57) for s in range(57)]     # to a tenth
    assert [x['lr'] for x in log] == approx([0.01 / 3, 0.02 / 3, 0.01] + cosine)
    screen = capsys.readouterr().out
    assert f'step     60/60 | loss {log[-1]["loss"]:.4f} | memory_prob ' in screen
    assert 'settings other than the defaults: vocab_size=257 block_size=16 ' in screen

    # its files
    assert {p.name for p in out.iterdir()} == {'config.json', 'log.jsonl', 'best.pt', 'ckpt.pt'}
    config = config_of(out)
    assert (config['lr'], config['memory'], config['torch']) == (1e-2, 'local', torch.__version__)
    assert load(out / 'best.pt')['best'] == min(x.get('val_loss', 9) for x in log)
    last = load(out / 'ckpt.pt')
    assert (last['step'], last['tokens'], last['model_name']) == (60, 60 * 64, 'trime')


def test_gains_in_the_log(here):
    """What retrieval gains in a validation is the difference of two validations' losses."""
    launch('--gains --out run', 'drt')
    log = log_of('run')
    gains = [x for x in log if 'gain_over_off' in x]
    assert [x['step'] for x in gains] == [2, 4, 6]

    # by the weights of the end, on the same part of val
    Model, model_config, config = train.parse(flags('drt', '--out run'))
    training = train.Run(Model, model_config, config)
    training.load_data()
    training.make_batches()
    _, training.model, _ = train.read_checkpoint('run')
    loss = {}
    for way in training.model.ways():
        training.model.way = way
        loss[way], _ = training.validate(1.0, config.val_tokens)
    for way in ('shuffled', 'off'):
        gain = log[-1][f'gain_over_{way}']
        assert gain == approx(loss[way] - loss['on'], abs=1e-6) and abs(gain) > 1e-5
    launch('--out straight', 'drt')
    assert log_of('straight')[-1]['val_loss'] == log[-1]['val_loss']        # the way on, again
    assert 'retrieve chunks' in one_line(launch, '--gains')
    assert 'retrieves nothing' in one_line(launch, '--gains --groups 0', 'drt')


def test_gains_of_rpt(here):
    """Its reference LM retrieves nothing, and is trained without --gains."""
    launch('--gains --out run', 'rpt')
    assert 'gain_over_off' in log_of('run')[-1]
    assert 'gain_over_off' not in log_of('run-reference')[-1]


@mark.parametrize('more', ['', '--no-bm25'])
def test_ext_has_no_best(here, more):
    """It is validated with another memory."""
    launch(f'--memory ext {more}')
    assert [path.name for path in Path('out/trime').glob('*.pt')] == ['ckpt.pt']


# --------------------------------------------------------------------------------------------------
# what can go wrong
def test_nothing_is_overwritten(here, capsys):
    launch()
    folder = Path('out/other')
    folder.mkdir()
    for name in 'thesis.txt', 'thesis.txt.tmp', 'lock':
        (folder / name).write_text('mine')
    before = contents('out')
    messages = {'--lr 1e-4': 'has a run with lr=0.008, the command has lr=0.0001; try --out '
                             'out/trime-2', '--dropout 0': 'dropout=0.0',
                '--resume no': '--out out/trime-2',
                '--out out/other': 'no run to resume: lock, thesis.txt, thesis.txt.tmp; try --out'}
    for more, message in messages.items():
        assert message in one_line(launch, more)
    launch('--kernel torch')                   # finished; --kernel may differ
    screen = capsys.readouterr().out
    assert 'another --out begins a new one' in screen and 'finished' in screen
    assert contents('out') == before

    # without ckpt.pt there are weights and a log of a run, but none that resumes
    (folder.parent / 'trime/ckpt.pt').unlink()
    assert '(with --init out/trime/best.pt it begins with these weights)' in one_line(launch)
    assert contents('out').items() < before.items()


def test_a_folder_of_another_model(here):
    """Its weights are no beginning of this one."""
    launch('--out run')
    message = one_line(launch, '--out run', 'drt')
    assert 'try --out run-2' in message and '--init' not in message


def test_names_of_a_path(here, monkeypatch):
    """A run resumes by its text, not by its name; eval.py finds the text from another folder."""
    monkeypatch.setenv('HOME', str(here))
    launch('--out=~/run')
    Path('link').symlink_to('texts')
    for name in ('./texts/', '~/texts', 'link'):
        launch(f'--out run --data={name}')
    assert load('run/ckpt.pt')['data'] == str(here / 'texts')
    assert 'a run with hops=' in one_line(run, flags('trime', '--out run --data niah:texts '
                                                     '--block-size 256 --tokens-per-step 512'))
    Path('niah').mkdir()                                    # a folder, as of --out niah
    assert train.source('niah') == 'niah' and train.source('niah:run') == f'niah:{here}/run'


def test_a_notebook_has_no_stream_to_configure(monkeypatch):
    monkeypatch.setattr(sys, 'stdout', io.StringIO())
    train.keep_printing()
    print('x')
    assert sys.stdout.getvalue() == 'x\n'


BROKEN = {'config.json': [b'[]', b'\xff', b'{"torn', b''], 'ckpt.pt': [b'', b'torn', b'PK']}


@mark.parametrize('name', BROKEN)
def test_a_broken_file_of_a_run(here, name):
    launch('--out run')
    for content in BROKEN[name]:
        Path('run', name).write_bytes(content)
        before = contents('run')
        assert f'run/{name} is ' in one_line(launch, '--out run')
        assert contents('run') == before


@mark.parametrize('training', [True, False])
def test_a_loss_that_is_not_finite(here, monkeypatch, training):
    """In training or in validation from step 4 on. The checkpoint of step 2 remains."""
    forward = trime.TRIME.forward

    def breaks(model, batch, progress):
        loss, more = forward(model, batch, progress)
        if progress >= 3 / 6 and model.training == training:
            loss = loss * math.nan
        return loss, more

    monkeypatch.setattr(trime.TRIME, 'forward', breaks)
    message = one_line(launch, '--out run')
    assert 'step 4 has a number' in message and '--lr' in message
    assert step_of('run/best.pt') == step_of('run/ckpt.pt') == 2


def test_a_full_disk(here, monkeypatch):
    """While the checkpoint of step 4 is written. The one of step 2 remains."""
    save = torch.save

    def full(content, f):
        if content['step'] == 4:
            Path(f).write_bytes(b'PK')                      # a part of it
            raise RuntimeError('unexpected pos 64 vs 0')    # torch's
        save(content, f)

    monkeypatch.setattr(torch, 'save', full)
    assert 'cannot be written' in one_line(launch, '--out run')
    monkeypatch.setattr(torch, 'save', save)
    assert step_of('run/best.pt') == step_of('run/ckpt.pt') == 2
    launch('--out run')
    launch('--out straight')
    assert same('run', 'straight')


@mark.parametrize('B, hint, error', [
    (4, '--micro-batch 2: the run is then resumed', torch.OutOfMemoryError('Tried to allocate 9')),
    (1, '--block-size 8 and another --out', RuntimeError("can't allocate memory")),
    (4, '--micro-batch 2: the run is then resumed', MemoryError('Unable to allocate 9 GiB')),
    (4, '--micro-batch 2: the run is then resumed', RuntimeError('CUDA error: out of memory')),
    ('4 --memory long', '--micro-batch 2, which changes the model', MemoryError()),
    ('4 --memory long --n-consecutive 4', '--block-size 8', MemoryError()),
    ('4 --tokens-per-step 192', '--micro-batch 3: the run is then resumed', MemoryError())])
def test_out_of_memory_names_the_next_smaller_size(here, monkeypatch, B, hint, error):
    def forward(*_):
        raise error

    monkeypatch.setattr(trime.TRIME, 'forward', forward)
    assert hint in one_line(launch, f'--micro-batch {B}')


def test_a_smaller_micro_batch_resumes_the_run(here):
    """With equal tokens per step, after running out of memory: the same sequences, one at a time.
    TRIME's long memory is that of a micro-batch: there it is another model."""
    launch('--out straight --dropout 0')
    with at_step(3, interrupt):
        one_line(launch, '--out run --dropout 0')
    launch('--out run --dropout 0 --micro-batch 1')
    assert config_of('run')['micro_batch'] == 1
    tensors, _ = outcome('run')
    expected, _ = outcome('straight')
    close(tensors, expected, atol=1e-6)
    launch('--out long --memory long')
    assert 'has a run with micro_batch=2' in one_line(launch, '--out long --memory long '
                                                             '--micro-batch 4')


def test_a_kernel_that_cannot_run_is_one_line(here, monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    assert "kernel='triton' cannot run" in one_line(launch, '--kernel triton', 'drt')


# command line: message
WRONG = {
    '--learning-rate 1': 'no flag here; --help lists all', '--max-step 1': 'nearest is --max-steps',
    '--m 2': 'no flag here', '--data my text': 'text: no flag takes this value; one with blanks',
    '--memory lokal': 'lokal',
    '--gains 1': '--gains takes no value, but 1 follows', '--groups 2': 'a flag of drt, landmark,',
    'rpt': 'rpt without a flag: --model rpt', 'my.py': 'my.py without a flag: --model my.py',
    'texts': 'texts without a flag: --data texts',
    '--init no.pt': 'no.pt: there is no such file',
    '--model gpt': 'nor a file .py', '--lr -1': '--lr -1.0 cannot be negative', '--lr nan': 'nan',
    '--seed 1.5': '1.5', f'--seed {2 ** 64}': '2^63 - 1',
    '--model drt --groups -1': '--groups -1 cannot be negative',
    '--max-steps 0': '1 or more', '--tokens-per-step 0': '1 or more', '--eval-every 0': '1 or more',
    '--val-tokens 0': '1 or more', '--micro-batch 0': 'micro_batch must be 1',
    '--model rpt --n-head 0': 'n_head must be 1', '--model drt --n-layer 0': 'n_layer must be 1',
    '--tokens-per-step 1500': '1 x 2 x 512 = 1024; the nearest one is 1024',
    '--data no/such': 'such', '--warmup 2': 'at most 1', '--data a\0b': '--data',
    '--block-size 999999 --tokens-per-step 1999998': 'val has ',      # the shortest split
    '--device cuda': '--device cpu', '--out texts/val.jsonl': 'val.jsonl is a file',
    '--out texts/val.jsonl/x': 'x is a file, or lies below one',
    '--memory long --n-consecutive 1': 'two segments or more: a larger n_consecutive',
    '--memory ext --micro-batch 1': 'two segments or more: a larger micro_batch',
    '--cutoffs 0': 'cutoffs', '--cutoffs 9,5': 'rise', '--cutoffs 5,': 'rise',
    '--dropout 1.5': 'at most 1', '--model rpt --window 96': 'window',
    '--model rpt --n-candidates 1': 'n_candidates', '--model rpt --n-cca 2 --n-layer 2': 'n_cca',
    '--model rpt --reference x --retriever lex': 'sem',
    '--model drt --n-head 3': 'n_head',
    '--model drt --n-layer 1': 'n_layer', '--model drt --groups 4': 'groups',
    '--model drt --chunk-size 1': 'chunk_size', '--model drt --slope 0': 'slope',
    '--model drt --mlm 1.5': 'mlm', '--model drt --block-size 62': 'block_size',
    '--model drt --encoder tokens --n-encoder 0 --no-compare-means': 'landmarks are equal',
    '--tokenizer bytes --vocab-size 5000': 'the tokenizer bytes has 257 ids',
    '--tokenizer word --vocab-size 99': 'word has all words of the text'}


@mark.parametrize('more, message', WRONG.items())
def test_what_a_user_gets_wrong_ends_in_one_line(here, monkeypatch, more, message):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert message in one_line(run, [*COMMON, *more.split()])
    assert not [*Path('out').glob('*')]


def test_a_text_without_such_memories(here):
    write_splits(here / 'one', ['a b c ' * 60], ['a b c ' * 60])
    write(here / 'pairs', train_tsv='a\tb\n' * 9, val_tsv='c\td\n' * 9)
    of_one = one_line(launch, '--data one --memory ext --no-bm25 --out x')
    assert 'of one document' in of_one and '--no-same-document' in of_one
    assert 'each pair is a text' in one_line(launch, '--data pairs --memory long --out x')
    write_splits(here / 'words', 40 * ['a'], ['a a a a ' * 20])
    of_words = '--data words --tokenizer word --out x'
    message = one_line(launch, of_words, 'drt')
    assert 'train has no token to predict' in message and '--val-tokens' not in message
    write_splits(here / 'few', ['a a a a ' * 20], [*400 * ['a'], 'a a'])        # in val's last row
    few = '--data few --tokenizer word --micro-batch 1 --val-tokens 35 --out x'
    message = one_line(launch, few, 'drt')
    assert 'val has no token to predict' in message and 'larger --val-tokens' in message
    run(flags('trime', '--data niah:one --memory ext --block-size 256 --tokens-per-step 512 '
              '--max-steps 1 --out needles'))
    assert not Path('x').exists()


# --------------------------------------------------------------------------------------------------
# flags
def parsed(*argv):
    """The values of all flags but --model and --preset"""
    _, model_config, config = train.parse(argv)
    return vars(model_config) | vars(config)


@mark.parametrize('model', train.MODELS)
def test_every_preset_is_a_command_line(model):
    for preset, values in train.part_of(train.find_model(model), 'PRESETS').items():
        settings = parsed('--model', model, '--preset', preset, '--seed', '3')
        assert settings == settings | values | dict(seed=3)
        micro_batch = settings['micro_batch'] * settings['block_size']
        assert settings['tokens_per_step'] % micro_batch == 0

        # a sequence has whole chunks
        Model, model_config, _ = train.parse(['--model', model, '--preset', preset])
        chunk = train.part_of(Model, 'batches')(model_config).get('chunk', 1)
        assert settings['block_size'] % chunk == 0


@mark.parametrize('model', train.MODELS)
def test_help_has_every_field_its_comment_and_default(capsys, model):
    with pytest.raises(SystemExit):
        train.parse(['--model', model, '--help'])
    screen = capsys.readouterr().out
    for name in parsed('--model', model):
        flag = ['--' + name.replace('_', '-'), '2']
        assert flag[0] in screen
        assert parse_args(['train.py', *flag]).training_script_args == flag     # not torchrun's
    screen = ' '.join(screen.split())
    assert 'try 4e-3 at width 256, 2e-3 (adamw), 1e-3 (--init) (default: 0.008)' in screen


def test_the_commands_of_readme(here):
    """Their flags exist, and their values fit."""
    Path('assets').symlink_to(FILE.parent / 'assets')
    text = FILE.with_name('README.md').read_text().replace('\\\n', ' ')
    commands = re.findall(r'^ {4}.*?train\.py ?([^#;&|\n]*)', text, re.M)
    assert len(commands) >= 20
    for command in commands:
        if 'decay.py' not in command:                       # test_compared.py has it
            train.parse(command.replace('$m', 'local').split())


@fixture
def first(here):
    """Flags of a run, and those of one on another text that starts from its weights"""
    Path('other.txt').write_text('the dog finds the cat\n' * 999)
    first = '--model rpt --retriever bm25 --out first --tokenizer bpe --vocab-size 300'
    launch(first, 'rpt')
    run_of_first = '--model rpt --data other.txt --device cpu --dtype fp32 --tokens-per-step 280'
    return f'{run_of_first} --init first --max-steps 1 --out second'.split()


def test_init_starts_from_weights_and_their_tokenizer(first, capsys):
    """And from the settings of the model, except those on the command line."""
    argv = [*first, '--lr', '1e-12', '--eta', '0.2', '--tokenizer', 'bpe']
    run(argv)
    before = load('first/ckpt.pt')
    after = load('second/ckpt.pt')
    assert before['tokenizer'] == after['tokenizer'] and after['tokens'] == 280 * 7
    assert after['config'] == dict(before['config'], eta=0.2)
    assert config_of('second')['tokenizer'] == 'bpe'
    for name, x in before['model'].items():
        assert torch.allclose(x, after['model'][name], atol=1e-6) == (name != 'idf')

    # a run that has begun needs the file no longer
    Path('first/ckpt.pt').unlink()
    run(argv)
    assert 'step 1 of 1' in capsys.readouterr().out


def test_a_text_that_was_moved(here):
    """A resumed run keeps the new path."""
    launch('--max-steps 1')
    Path('texts').rename('moved')
    launch('--max-steps 2 --data moved')
    for name in 'ckpt.pt', 'best.pt':
        assert load(f'out/trime/{name}')['data'] == os.path.abspath('moved')


def test_an_error_of_a_model_file_is_shown():
    """With its place, as all errors without a message"""
    with pytest.raises(NotImplementedError), train.short_errors('train.py', ''):
        raise NotImplementedError


def test_cutoffs_beyond_the_vocabulary_are_named(here, capsys):
    launch('--cutoffs 100,9999 --max-steps 1')
    assert 'has 257 tokens: cutoffs [9999] are not used' in capsys.readouterr().out


NOT_FITTING = {'--n-embd 32': "Its settings that differ: {'n_embd': 16}",
               '--tokenizer bytes': 'need theirs, bpe', '--model trime': '--model rpt',
               '--init other.txt': 'other.txt is not a checkpoint',
               '--preset paper': '--preset paper has another block_size than first'}


def test_init_names_what_does_not_fit(first):
    for more, message in NOT_FITTING.items():
        assert message in one_line(run, [*first, *more.split()])


@mark.parametrize('model', FLAGS)
def test_init_from_the_weights_in_assets(here, model):
    """With the flags of README only"""
    path = FILE.parent / 'assets' / f'{model}.pt'
    argv = ['--model', model, '--init', str(path), '--lr', '1e-3']
    _, model_config, config = train.parse(argv)
    state, *_ = train.read_checkpoint(path)             # whose weights fit its config
    assert vars(model_config) == state['config']
    assert config.tokens_per_step % (model_config.micro_batch * model_config.block_size) == 0


def test_init_has_the_micro_batch_of_the_preset(here, monkeypatch):
    launch('--micro-batch 1')
    argv = '--init out/trime --preset {} --out new'
    monkeypatch.setitem(trime.PRESETS, 'small', dict(micro_batch=2))
    monkeypatch.setitem(trime.PRESETS, 'other', {})
    monkeypatch.setitem(trime.PRESETS, 'tiny', dict(micro_batch=2))
    for preset, B in (('small', 2), ('other', 1), ('tiny', 1)):
        assert train.parse(argv.format(preset).split())[1].micro_batch == B


def test_a_config_of_another_program_is_kept(here):
    """One of this program, of a run that was killed before its first ckpt.pt, is not."""
    config = Path('out/trime/config.json')
    config.parent.mkdir(parents=True)
    config.write_text('{"architectures": ["GPT2"]}')
    assert 'is not empty' in one_line(launch)
    assert 'GPT2' in config.read_text()
    launch('--out other')
    Path('other/config.json').replace(config)
    launch()


def test_a_resumed_run_has_its_own_settings_in_its_config(here, monkeypatch):
    launch('--max-steps 2')
    monkeypatch.setattr(sys, 'argv', ['train.py', 'another command'])
    launch('--max-steps 4 --kernel torch')
    config = config_of('out/trime')
    assert config['kernel'] == 'torch'
    [before] = config['earlier']
    assert {*before} == {'command', 'commit', 'ran_on', 'python', 'torch'}
    launch('--max-steps 4 --kernel auto')               # finished: no step, so no change
    assert config_of('out/trime')['kernel'] == 'torch'


def test_a_checkpoint_that_is_not_of_this_program(here):
    """What a checkpoint has, replaced by what does not fit"""
    launch()
    path = 'out/trime/ckpt.pt'
    config = dict(n_embd=32, n_head=0, unknown=1)
    tokenizer = [('name', '/../../zz'), ('tokens', [0] * 256)]
    weights = [math.nan * torch.ones(16), torch.ones(17), None]
    whole = ('config', 'tokenizer', 'model', 'model_name')
    broken = dict(config=config.items(), tokenizer=tokenizer,
                  model=[('norm.weight', x) for x in weights],
                  none=[('model_name', '../this'), *((key, None) for key in whole)])
    for part, items in broken.items():
        for key, value in items:
            state = load(path)
            state.get(part, state)[key] = value
            torch.save(state, 'broken.pt')
            assert 'is not a checkpoint of' in one_line(train.read_checkpoint, 'broken.pt'), key
    for foreign in (dict(epoch=3), [1], torch.ones(2)):
        torch.save(foreign, 'broken.pt')
        assert 'it names no model' in one_line(train.read_checkpoint, 'broken.pt')
    Path('broken.pt').write_bytes(Path(path).read_bytes()[:20_000])
    assert 'or it is damaged' in one_line(train.read_checkpoint, 'broken.pt')
    state = load(path)
    torch.save(dict(state, model_name='this'), 'broken.pt')     # no file is imported for it
    assert '--model PATH/this.py' in one_line(train.read_checkpoint, 'broken.pt')
    assert 'this' not in sys.modules
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        with mock.patch('torch.load', side_effect=error):
            message = one_line(train.read_checkpoint, path)
            assert message == f'{path} cannot be read: out of memory'

    # weights alone, without what else a resumed run needs
    Path('out/trime/best.pt').replace(path)
    assert 'cannot be resumed' in one_line(launch, '--max-steps 7')


# --------------------------------------------------------------------------------------------------
# validation and optimizers
def test_validation_is_fixed_and_complete(here):
    """All tokens but the first, by hand; a subset is always the same."""
    argv = flags('trime', '--block-size 16 --micro-batch 3 --tokens-per-step 48')
    Model, model_config, config = train.parse(argv)
    training = train.Run(Model, model_config, config)
    training.load_data()
    training.make_batches()
    model = training.model = make(argv, vocab_size=257)
    val = training.corpus.val
    state = torch.get_rng_state()
    loss, n = training.validate(1.0)
    some, again = (training.validate(1.0, 200) for _ in range(2))
    assert n == len(val.tokens) - 1 and some == again and some[1] <= 200
    assert model.training and torch.equal(torch.get_rng_state(), state)
    training.val_batches = data.Grid(val, 'documents', 16, 3, seed=0)
    assert training.validate(1.0)[1] == n + 1 - 8                       # but 8 first tokens

    model.eval()
    text = torch.from_numpy(val.tokens[:].astype('int64'))
    segments = [text[i:i + 17] for i in range(0, n, 16)]
    total = sum(log_p(model, segment).sum().item() for segment in segments)
    assert loss == approx(-total / n, rel=1e-5)


@mark.parametrize('shape', [(8, 8), (5, 40), (40, 5), (1, 12)])
def test_orthogonalize_makes_singular_values_equal(shape):
    """The singular vectors stay; the values, here from 0.1 to 1, come to between 0.6 and 1.3."""
    torch.manual_seed(0)
    u, s, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    x = u * torch.linspace(7, 0.7, len(s)) @ v
    y = u.mT @ train.orthogonalize(x[None])[0] @ v.mT       # U and V removed
    close(y, y.diagonal().diag(), atol=1e-4)
    assert 0.6 < y.diagonal().min() and y.diagonal().max() < 1.3


def test_momentum_of_muon():
    """Of two gradients: m is their running mean, and Nesterov's step looks ahead."""
    p, q, without_grad = (torch.nn.Parameter(torch.zeros(6, 8)) for _ in range(3))
    g, h = torch.randn(2, 6, 8)
    muon = train.Muon([p, q, without_grad], dict(weight_decay=0.0))
    for grad, lr in ((g, 0.0), (h, 1.0)):
        p.grad, q.grad = grad, grad.flip(0)
        muon.param_groups[0]['lr'] = lr
        muon.step()
    m = 0.95 * 0.05 * g + 0.05 * h
    update = train.orthogonalize((0.05 * h + 0.95 * m)[None])[0] * 0.2 * 8 ** 0.5
    close(p, -update, atol=1e-4)
    close(q.flip(0), -update, atol=1e-4)


def test_beta2():
    """Of AdamW: gradients 1, then 0; only the second step has a rate."""
    layer = torch.nn.Linear(1, 1, bias=False)
    before = layer.weight.detach().clone()
    config = train.TrainConfig(optimizer='adamw', beta2=0.5, weight_decay=0.0)
    adamw = train.optimizers_of(layer, config)[0]
    for g, lr in ((1.0, 0.0), (0.0, 1.0)):
        layer.weight.grad = torch.full((1, 1), g)
        for group in adamw.param_groups:
            group['lr'] = lr
        adamw.step()
    step = 0.09 / 0.19 / (0.25 / 0.75) ** 0.5               # m and v without their bias
    close(before - layer.weight, torch.full((1, 1), step), 1e-5)


@mark.parametrize('name', ['trime', 'rpt'])
def test_initial_weights_and_dropout(name):
    """GPT-2's, for width C; dropout on embeddings and on what each layer adds, twice."""
    more = '--retriever none' if name == 'rpt' else ''
    lm = make(f'--model {name} {more} --n-embd 96 --n-layer 8 --dropout 0.1'.split())
    first = lm.blocks[0] if name == 'trime' else lm.lower[0]
    for weight, scale in ((lm.embedding.weight, 1), (first.attention.qkv.weight, 1),
                          (first.attention.proj.weight, 1 / 4), (first.mlp.proj.weight, 1 / 4)):
        assert weight.std().item() == approx(scale * 0.02 * 8 ** 0.5, rel=0.05)
    dropout = torch.nn.functional.dropout
    with mock.patch('torch.nn.functional.dropout', wraps=dropout) as recorded:
        lm(batch_of(torch.zeros(1, 64).long()), 0.5)
    assert [call.args[1] for call in recorded.call_args_list] == [0.1] * (1 + 2 * 8)


def test_sequences_of_needles_grow_in_the_first_half(here):
    """--grow-context, 6 steps of two micro-batches; validation has whole sequences."""
    texts = [' '.join(random.Random(i).choices(WORDS, k=600)) for i in range(8)]
    write_splits(here / 'long', texts[:4], texts[4:])
    Model, model_config, config = train.parse(flags(
        'trime', '--data niah:long --block-size 1024 --tokens-per-step 4096 --grow-context'))
    training = train.Run(Model, model_config, config)
    training.load_data()
    training.make_batches()
    n_rows = [len(training.batches[g].tokens) for g in range(12)]
    assert n_rows == [16, 16, 8, 4, 4, 2] + 6 * [2]
    assert len(training.val_batches[0].tokens) == 2


def make(argv, **more):
    """The model that these flags describe, with its initial weights"""
    Model, config, _ = train.parse(argv)
    torch.manual_seed(1)
    return Model(dataclasses.replace(config, **more))


def initial():
    """The model of a run without dropout, with seed 1, before its first step; its micro-batches"""
    corpus = data.load('texts', 'bytes', quiet=True)
    model = make(flags('trime', '--dropout 0'), vocab_size=257)
    return model, data.Grid(corpus.train, 'segments', 16, 2, seed=1)


@mark.parametrize('optimizer', ['muon', 'adamw'])
def test_a_step_by_hand(here, optimizer):
    """The mean gradient of two micro-batches, a norm of at most grad_clip, decay, lr."""
    more = f'--optimizer {optimizer} --seed 1 --dropout 0 --max-steps 1 '
    launch(more + '--grad-clip 0.01 --weight-decay 0.5 --lr 0.1')
    after = load('out/trime/ckpt.pt')['model']
    model, batches = initial()
    for g in (0, 1):
        loss, _ = model(batches[g], 0.0)
        (loss / 2).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert log_of('out/trime')[0]['grad_norm'] == approx(norm.item(), rel=1e-4)

    for name, p in model.named_parameters():
        g = p.grad * 0.01 / (norm + 1e-6)
        update = g / (g.abs() + 1e-8)                       # Adam's first step
        if optimizer == 'muon' and p.dim() > 1 and 'embedding' not in name:
            update = train.orthogonalize(g[None])[0] * 0.2 * math.sqrt(max(p.shape))
        decay = 0.1 * 0.5 if p.dim() > 1 else 0
        close(after[name], p * (1 - decay) - 0.1 * update, atol=2e-4)


def test_each_step_has_other_micro_batches(here):
    """Micro-batches 4 and 5 in step 3; without a rate the weights are the initial ones."""
    launch('--seed 1 --dropout 0 --max-steps 3 --lr 1e-12')
    model, batches = initial()
    losses = [model(batches[g], 2 / 3)[0].item() for g in (4, 5)]
    assert log_of('out/trime')[2]['loss'] == approx(sum(losses) / 2, rel=1e-5)


# --------------------------------------------------------------------------------------------------
# what holds for all models
RPT = 'rpt --preset paper --tokenizer bpe --vocab-size 50277'
PAPERS = [
    ('trime --preset 7m', 7.08, 'segments'),
    ('trime --preset 150m --memory long', 148.44, 'consecutive'),
    ('trime --preset 247m --memory ext', 245.71, 'packed'),
    ('trime --preset enwik8 --memory long', 37.89, 'consecutive'),
    ('sru --preset enwik8 --memory long --n-consecutive 2', 42.07, 'consecutive'),
    (RPT, 242.37, 'documents'),
    (RPT + ' --retriever bm25', 236.07, 'documents'),
    (RPT + ' --retriever none', 202.50, 'documents'),
    (RPT + ' --retriever none --n-layer 14', 227.67, 'documents'),
    (RPT.replace('rpt', 'griffin'), 239.31, 'documents'),
    (RPT.replace('rpt', 'block_recurrent'), 213.52, 'documents'),
    ('drt --preset 124m', 145.98, 'documents'),
    ('drt --preset 124m --groups 0', 123.55, 'documents'),
    ('landmark --preset 124m', 123.55, 'documents'),
    ('drt --preset 124m --groups 0 --n-layer 14', 137.71, 'documents')]


@mark.parametrize('command, millions, kind', PAPERS)
def test_models_have_the_papers_sizes(command, millions, kind):
    """TRIME, Table 9: 7M, 150M, 247M, 38M (with biases); Table 4: SRU++ 42M. RPT, Table 2: RPT
    242M, RETRO 236M, Transformer-XL 202M, with two more layers 228M, Griffin 240M, Block-Recurrent
    212M. DRT, Table 1: DRT 133M and its encoder 14M, base LM 124M, with two more layers 138M, and
    its landmarks. Then the kind of batches"""
    with torch.device('meta'):
        model = make(['--model', *command.split()])
    n_weights = sum(p.numel() for p in model.parameters())
    assert n_weights / 1e6 == approx(millions, abs=0.006)
    assert train.part_of(type(model), 'batches')(model.config)['kind'] == kind


@mark.parametrize('model, baseline', [
    ('rpt', '--retriever bm25'), ('rpt', '--retriever none'), ('drt', '--groups 0')])
def test_a_model_begins_as_its_baseline(model, baseline):
    """Weights are seeded by name, so what the two share is equal."""
    weights = dict(make(flags(model)).named_parameters())
    for name, p in make(flags(model, baseline)).named_parameters():
        assert torch.equal(p, weights[name][:len(p)]), name         # DRT has ids beyond the text's
    assert not weights['lower.0.mlp.fc.weight'].equal(weights['upper.0.mlp.fc.weight'])


@mark.parametrize('model, more', [('trime', ''), ('rpt', '--retriever none'), ('drt', '')])
def test_draws_are_of_the_batchs_seed_and_of_training_only(model, more):
    """Dropout, in DRT Gumbel noise"""
    lm = make(flags(model, more), vocab_size=257)
    tokens = torch.arange(2 * lm.config.block_size).view(2, -1)

    def loss(seed):
        return lm(batch_of(tokens, seed=seed), 0.9)[0].item()

    assert loss(0) == loss(0) != loss(1)
    lm.eval()
    assert loss(0) == loss(1)


# --------------------------------------------------------------------------------------------------
# longer checks
SETTINGS = {'trime': ('memory', 'none local long ext'), 'rpt': ('retriever', 'sem lex bm25 none'),
            'drt': ('n-layer 4 --groups', '0 1 2')}


@mark.slow
@mark.parametrize('model, more', [
    (model, f'--{name} {x}') for model, (name, xs) in SETTINGS.items() for x in xs.split()])
def test_every_model_compiles(here, model, more):
    """torch.compile, on a CPU here: an error in it would end each run on a GPU."""
    torch.compiler.reset()              # what is compiled, and counted, is of this run only
    launch(f'{more} --compile on --max-steps 3 --out x', model)


# cuts of the papers' presets, and the defaults, without draws, which differ between devices
ON_A_GPU = [
    ('trime', '--preset 247m --cutoffs 20,100 --block-size 96 --micro-batch 4 '
              '--tokens-per-step 384 --stride 48 --dropout 0 --n-layer 2 --n-head 2 --n-embd 64'),
    ('rpt', '--preset paper --block-size 1024 --tokens-per-step 1024 --n-layer 4 '
            '--n-cca 1 --n-head 2 --n-embd 64 --window 256 --dropout 0 --teacher always '
            '--reference-steps 2'),
    ('drt', '--preset 124m --block-size 1071 --tokens-per-step 1071 --n-layer 4 '
            '--micro-batch 1 --n-head 2 --n-embd 64 --window 64 --no-gumbel'),
    ('trime', ''), ('trime', '--memory long'), ('trime', '--memory ext'), ('drt', ''),
    ('drt', '--encoder tokens --mlm 0'), ('drt', '--groups 0'),
    ('rpt', '--teacher always --reference-steps 2')]


def test_each_process_has_a_gpu(monkeypatch):
    """Number LOCAL_RANK, or the only one that it sees if its launcher sets RANK alone"""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setenv('RANK', '3')
    assert train.hardware('cuda') == torch.device('cuda:0')
    monkeypatch.setenv('LOCAL_RANK', '1')
    assert train.hardware('cuda') == torch.device('cuda:1')
    monkeypatch.setenv('LOCAL_RANK', '2')
    assert 'process 2 of this machine has no GPU' in one_line(train.hardware, 'cuda')


def test_the_peak_of_a_gpu(monkeypatch):
    """An A100 has 312 TFLOP/s in bf16; a token takes 6 FLOPs for each of 10 parameters."""
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA A100-SXM4-80GB')
    gpu = torch.device('cuda')
    assert train.peak_tokens_per_s(gpu, True, 10) == 312e12 / 60
    assert train.peak_tokens_per_s(gpu, False, 10) is None
    assert train.peak_tokens_per_s(torch.device('cpu'), True, 10) is None


@mark.gpu
@mark.parametrize('dtype, error', [('fp32', 1e-3), ('bf16', 2e-2)])
@mark.parametrize('model, more', ON_A_GPU)
def test_on_a_gpu(here, capsys, model, more, dtype, error):
    """Five compiled steps have the losses of a CPU in fp32. The run resumes; its model streams."""
    texts = [' '.join(random.Random(i).choices(WORDS, k=600)) for i in range(60)]
    write_splits(here / 'long', texts[:40], texts[40:])
    argv = f'--model {model} {more} --data long --tokenizer bytes'.split()
    run([*argv, *'--max-steps 5 --device cpu --dtype fp32 --out cpu'.split()])
    for steps in '5', '6':                              # the second command resumes
        on_gpu = f'--device cuda --compile on --dtype {dtype} --out gpu --max-steps {steps}'
        run([*argv, *on_gpu.split()])
    losses = [x['loss'] for x in log_of('cpu')]
    entries = log_of('gpu')
    assert [x['loss'] for x in entries[:5]] == approx(losses, abs=error)
    assert [x['step'] for x in entries] == list(range(1, 7))
    assert all(0 <= x.get('mfu', 0) < 1 and x['gb'] > 0 for x in entries)

    tokens = torch.randint(200, (1, 150), device='cuda')
    evaluation = importlib.import_module('eval')
    lm = evaluation.load('gpu')[0].cuda()
    close(streamed(lm, tokens, 70)[0], lm.log_probs(tokens), atol=1e-3)
    evaluation.main('gpu gpu --task speed --lengths 1k'.split())
    assert float(capsys.readouterr().out.split()[-1]) > 0       # of its own time


@mark.slow
@mark.parametrize('model, more', [
    ('trime', '--memory none'), ('trime', '--memory local'), ('trime', '--memory long'),
    ('trime', '--memory ext'), ('drt', ''), ('rpt', ''), ('rpt', '--retriever bm25')])
def test_random_tokens_cannot_be_predicted(here, model, more):
    """A target that leaks anywhere brings the loss on fresh text below ln 16 at once."""
    rng = random.Random(0)
    texts = [''.join(rng.choices('abcdefghijklmnop', k=2000)) for _ in range(50)]
    write_splits(here / 'random', texts[:25], texts[25:])
    launch(f'{more} --data random --max-steps 300 --eval-every 300 --out run', model)
    assert log_of('run')[-1]['val_loss_all'] > math.log(16) - 0.01      # 4 standard errors


def test_imports():
    """None is heavy, but torch.distributed.nn: if AdamW imports it after a process group is made,
    its threads remain. Idle threads sleep."""
    script = ('import os, sys, train, trime, rpt, drt; print(*map(os.environ.get, sys.argv[1:]), '
              '{"faiss", "triton", "torch._dynamo", "torch.distributed.nn"} & set(sys.modules))')
    command = [sys.executable, '-c', script, 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT']
    screen = subprocess.check_output(command, env={}, text=True, cwd=FILE.parent)
    assert screen == "PASSIVE 1000 {'torch.distributed.nn'}\n"


def test_best_is_the_lowest_validation(here, monkeypatch):
    """Not the last one"""
    losses = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(train.Run, 'validations', lambda *_: dict(val_loss=next(losses)))
    launch('--out run')
    assert step_of('run/best.pt') == 4 and step_of('run/ckpt.pt') == 6


def prepared_run(argv):
    """A Run with its data, before its model is made"""
    training = train.Run(*train.parse(argv))
    training.load_data()
    training.make_batches()
    return training


def test_a_validation_is_spread_evenly(here, monkeypatch):
    argv = flags('trime')
    training = prepared_run(argv)
    training.model = make(argv, vocab_size=257)
    batches, numbers = training.val_batches, []
    in_order = batches.in_order
    monkeypatch.setattr(batches, 'in_order', lambda i: numbers.append(i) or in_order(i))
    training.validate(1.0, 3 * 2 * 16)
    last = len(batches) - 1
    assert numbers == [0, round(last / 2), last]


def test_flags_of_memory_reach_the_batches(here):
    """Each changes the rows of the micro-batches; ext without BM25 has those of other memories."""
    def rows(more):
        batches = prepared_run(flags('trime', f'--micro-batch 4 --memory {more}')).batches
        return [batches.rows(g).tolist() for g in range(4)]
    assert rows('long --n-consecutive 2') != rows('long')
    assert rows('ext --no-bm25') == rows('none') != rows('ext')
    assert rows('ext --no-same-document') != rows('ext')


def test_needles_have_the_chunks_of_the_model(here):
    """Of DRT 27 tokens and a landmark: a question ends such a chunk."""
    texts = [' '.join(random.Random(i).choices(WORDS, k=600)) for i in range(8)]
    write_splits(here / 'long', texts[:4], texts[4:])
    argv = flags('drt', '--data niah:long --chunk-size 28 --block-size 432 --tokens-per-step 864')
    tokens = prepared_run(argv).batches[0].tokens
    chunks = tokens.view(-1, 27)
    opens = (chunks[:, :7] == torch.tensor([*b' opens '])).all(1)
    questions = chunks[opens.roll(-1)]
    assert opens.any() and (questions[:, -9:-4] == torch.tensor([*b'\nKey '])).all()


def test_muon_has_no_part_of_the_embedding():
    """Nor the tables of an adaptive one"""
    model = make('--model trime --cutoffs 100,1000'.split())
    _, muon = train.optimizers_of(model, train.TrainConfig())
    of_muon = {id(p) for group in muon.param_groups for p in group['params']}
    assert not of_muon & {id(p) for p in model.embedding.parameters()}

    # a user's model can give it another name, and share its weight with the output layer
    model = torch.nn.ModuleDict(dict(wte=torch.nn.Embedding(9, 4), head=torch.nn.Linear(4, 9),
                                     proj=torch.nn.Linear(4, 4)))
    model.head.weight = model.wte.weight
    _, muon = train.optimizers_of(model, train.TrainConfig())
    assert muon.param_groups[0]['params'] == [model.proj.weight]

    # a fixed one remains where earlier runs have it
    model.wte.weight.requires_grad_(False)
    _, muon = train.optimizers_of(model, train.TrainConfig())
    assert len(muon.param_groups[0]['params']) == 2
