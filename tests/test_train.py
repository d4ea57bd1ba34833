"""The training loop: resuming, any number of processes, what a user can get wrong."""
import dataclasses, json, math, os, random, re, signal, subprocess, sys, time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import data, train, trime
from helpers import FLAGS, flags, log_p, one_line, write_splits

FILE, GPU, CPU = Path(train.__file__), torch.device('cuda', 0), torch.device('cpu')
run = train.main
signal.signal(signal.SIGINT, signal.default_int_handler)    # shells' background jobs ignore it


@pytest.fixture(scope='session')
def texts(tmp_path_factory):
    """48 documents of made-up sentences in which words repeat."""
    rng = random.Random(0)
    words = ['cat', 'dog', 'tree', 'river', 'stone', 'sees', 'finds', 'the', 'a', 'old']
    texts = [' '.join(rng.choices(words, k=20 + i % 40)) for i in range(48)]
    return write_splits(tmp_path_factory.mktemp('texts'), texts[:40], texts[40:])


@pytest.fixture
def here(tmp_path, texts, monkeypatch):
    """An empty working folder with the corpus linked into it."""
    (tmp_path / 'texts').symlink_to(texts)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    torch.set_num_threads(1)
    precision = torch.get_float32_matmul_precision()
    yield tmp_path
    torch.set_float32_matmul_precision(precision)


def log_of(run):
    return [json.loads(line) for line in Path(run, 'log.jsonl').read_text().splitlines()]


def outcome(run):
    """What a run has computed: weights, optimizers' moments, and the log without its timings."""
    checkpoint = torch.load(f'{run}/ckpt.pt', weights_only=True)
    moments = [x for x in tree_leaves(checkpoint['optimizers']) if torch.is_tensor(x)]
    assert len(moments) > len(checkpoint['model'])          # one or two of each weight
    log = [{k: v for k, v in x.items() if k != 'tokens_per_s'} for x in log_of(run)]
    return list(checkpoint['model'].values()), moments, log


def same(a, b):
    (p, m, log_p), (q, n, log_q) = outcome(a), outcome(b)
    return log_p == log_q and all(map(torch.equal, p + m, q + n))


def at_step(monkeypatch, step, action):
    """Calls action() at the beginning of a step of the run in the folder `run`."""
    learning_rate = train.learning_rate

    def patched(now, config):
        if (now, config.out) == (step, 'run'):
            action()
        return learning_rate(now, config)
    monkeypatch.setattr(train, 'learning_rate', patched)


@pytest.mark.parametrize('model', FLAGS)
def test_an_interrupted_run_equals_another_one(here, capsys, model):
    """Ctrl-C in step 3; two in step 6; half a line in the log; in the last validation."""
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
    run(flags(model, '--out straight'))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        at_step(patch, 2, interrupt)
        run(flags(model, '--out run'))
    assert 'stopped at step 3' in stopped.value.code
    assert torch.load('run/ckpt.pt', weights_only=True)['step'] == len(log_of('run')) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match='stopped$'):
        at_step(patch, 5, lambda: (interrupt(), interrupt()))
        run(flags(model, '--out run'))
    assert len(log_of('run')) == 5
    with open('run/log.jsonl', 'a') as f: f.write('{"step": 6, "lo')
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match='stopped; run'):
        validate = train.validate                           # the last one has four arguments
        patch.setattr(train, 'validate', lambda *a: (len(a) == 4 and interrupt(), validate(*a))[1])
        run(flags(model, '--out run'))
    assert 'run from step 4' in capsys.readouterr().out and same('straight', 'run')
    assert model != 'rpt' or same('straight-reference', 'run-reference')
    run(flags(model, '--out other --seed 1'))
    assert not same('straight', 'other')


def test_kill_9(here):
    """At any moment; checkpoints are written to another file first, so the last one is whole."""
    more = '--max-steps 100 --eval-every 20 --out '
    run(flags('trime', more + 'straight'))
    process = subprocess.Popen([sys.executable, str(FILE), *flags('trime', more + 'run')],
                               stdout=subprocess.DEVNULL)
    while not Path('run/ckpt.pt').exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill(), process.wait()
    assert torch.load('run/ckpt.pt', weights_only=True)['step'] < 100
    run(flags('trime', more + 'run'))
    assert same('straight', 'run')


@pytest.mark.dist
@pytest.mark.parametrize('model', FLAGS)
def test_two_processes_take_the_same_steps_as_one(here, model):
    """Two micro-batches, of one process or one of each of two: only the order of sums differs."""
    run(flags(model, '--out one'))
    torchrun = '-m torch.distributed.run --standalone --nproc_per_node=2'.split()
    subprocess.run([sys.executable, *torchrun, FILE, *flags(model, '--out two')], check=True)
    (one, _, log_one), (two, _, log_two) = outcome('one'), outcome('two')
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, two, strict=True))
    for a, b in zip(log_one, log_two, strict=True):
        assert [a[k] for k in a] == pytest.approx([b[k] for k in a], rel=1e-4)


def test_a_run_learns_and_leaves_four_files(here):
    run(flags('trime', '--lr 1e-2 --max-steps 60 --eval-every 20 --grad-clip 0'))
    log, out = log_of('out/trime'), Path('out/trime')
    assert [x['step'] for x in log] == list(range(1, 61)) and log[-1]['tokens'] == 60 * 64
    assert [x['step'] for x in log if 'val_loss' in x] == [20, 40, 60]
    assert log[-1]['val_loss'] < log[0]['loss'] - 1
    cosine = [0.0055 + 0.0045 * math.cos(math.pi * s / 57) for s in range(57)]     # to a tenth
    assert [x['lr'] for x in log] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01] + cosine)
    assert {p.name for p in out.iterdir()} == {'config.json', 'log.jsonl', 'best.pt', 'ckpt.pt'}
    about = json.loads((out / 'config.json').read_text())
    assert (about['lr'], about['memory'], about['torch']) == (1e-2, 'local', torch.__version__)
    best, last = (torch.load(out / f'{p}.pt', weights_only=True) for p in ('best', 'ckpt'))
    assert best['best'] == min(x.get('val_loss', 9) for x in log)
    assert (last['step'], last['tokens'], last['model_name']) == (60, 3840, 'trime')
    assert data.Tokenizer(**last['tokenizer']).n_vocab == 257
    for out in ('ext', 'random --no-bm25'):                 # validated with another memory
        run(flags('trime', f'--memory ext --out {out}'))
        assert [path.name for path in Path(out.split()[0]).glob('*.pt')] == ['ckpt.pt']


def test_nothing_is_overwritten(here, capsys):
    run(flags())
    Path('out/other').mkdir(), Path('out/other/thesis.txt').write_text('mine')
    before = {p: p.read_bytes() for p in Path('out').rglob('*') if p.is_file()}
    for more, message in (('--lr 1e-4', 'lr; try --out out/trime-2'), ('--dropout 0', 'dropout'),
                          ('--resume no', '--out out/trime-2'), ('--out out/other', 'other-2')):
        assert message in one_line(run, flags('trime', more))
    run(flags('trime', '--kernel torch'))                   # finished; --kernel may differ
    assert 'finished' in capsys.readouterr().out
    assert {p: p.read_bytes() for p in Path('out').rglob('*') if p.is_file()} == before


@pytest.mark.parametrize('case, message', [
    ('training', 'step 4.* --lr'), ('validation', 'step 4.* --lr'), ('disk', 'cannot be written')])
def test_a_failure_harms_no_checkpoint(here, case, message):
    """A loss that is not finite, in training or in validation, or a full disk, after step 2."""
    def breaks(model, batch, progress, forward=trime.TRIME.forward):
        loss, more = forward(model, batch, progress)
        now = 'training' if model.training else 'validation'
        return loss * (math.nan if progress >= 3 / 6 and now == case else 1), more

    full = Mock(side_effect=RuntimeError('unexpected pos 64 vs 0'))     # torch's, of a full disk
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match=message):
        patch.setattr(trime.TRIME, 'forward', breaks)
        at_step(patch, 2, lambda: case != 'disk' or patch.setattr(torch, 'save', full))
        run(flags('trime', '--out run'))
    for name in ('best', 'ckpt'):
        assert torch.load(f'run/{name}.pt', weights_only=True)['step'] == 2
    run(flags('trime', '--out run'))
    run(flags('trime', '--out straight'))
    assert same('run', 'straight')


@pytest.mark.parametrize('B, hint, error', [
    (4, '--micro-batch 2', torch.OutOfMemoryError('Tried to allocate 9 GiB')),
    (1, '--block-size 8', RuntimeError("can't allocate memory")),
    (4, '--micro-batch 2', MemoryError('Unable to allocate 9 GiB'))])
def test_out_of_memory_names_the_next_smaller_size(here, monkeypatch, B, hint, error):
    monkeypatch.setattr(trime.TRIME, 'forward', Mock(side_effect=error))
    assert hint in one_line(run, flags('trime', f'--micro-batch {B}'))


def test_a_kernel_that_cannot_run_is_one_line(here, monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    assert "kernel='triton' cannot run" in one_line(run, flags('drt', '--kernel triton'))


def test_init_starts_from_other_weights_and_their_tokenizer(here):
    Path('other.txt').write_text('the dog finds the cat\n' * 999)
    retro, more = flags('rpt', '--retriever bm25'), '--init first/ckpt.pt --lr 1e-12 --max-steps 1'
    second = [*retro, '--out=second', '--data=other.txt', *more.split()]
    run([*retro, *'--out first --tokenizer bpe --vocab-size 300'.split()])
    run(second)
    old, new = (torch.load(f'{x}/ckpt.pt', weights_only=True) for x in ('first', 'second'))
    assert old['tokenizer'] == new['tokenizer'] and new['tokens'] == 280 * 7
    assert '"tokenizer": "bpe"' in Path('second/config.json').read_text()
    for name, x in old['model'].items():
        assert torch.allclose(x, new['model'][name], atol=1e-6) == (name != 'idf')
    Path('first/ckpt.pt').unlink()
    run(second)                                         # the file is no longer needed
    for more, found in ('ckpt.pt --n-embd 32', 'ckpt.pt .*n_embd.: 16'), ('log.jsonl', 'jsonl '):
        assert re.search(found, one_line(run, [*retro, *f'--out x --init second/{more}'.split()]))


@pytest.mark.parametrize('more, message', [
    ('--learning-rate 1', 'nearest is --'), ('--device cuda', '--device cpu'), ('--lr nan', 'nan'),
    ('--tokens-per-step 100', '100: no multiple of 1 x 2 x 16'), ('--memory lokal', 'lokal'),
    ('--block-size 999999 --tokens-per-step 1999998', 'block-size'), ('--data no/such', 'such'),
    ('--model drt --groups -1', '-1 is not a number from 0 on'), ('--seed 1.5', '1.5'),
    ('--lr -1', '--lr: -1 is not a number from 0 on'), (f'--seed {2 ** 64}', 'from 0 on'),
    ('--micro-batch 0', '0 is not a number from 1 on'), ('--weight-decay inf', 'inf'),
    ('--model rpt --window 96', 'window'), ('--out texts/val.jsonl', 'val.jsonl'),
    ('--memory long --m 1', 'only one'), ('--memory ext --micro-batch 1', 'only one'),
    ('--model rpt --n-candidates 1', 'n_candidates'), ('--dropout 1.5', 'at most 1'),
    ('--cutoffs 0', '0:'), ('--model rpt --n-cca 2 --n-layer 2', 'n_cca'), ('--model gpt', 'drt')])
def test_what_a_user_gets_wrong_ends_in_one_line(here, monkeypatch, more, message):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert message in one_line(run, flags('trime', more))
    assert not Path('out').exists()


@pytest.mark.parametrize('model', FLAGS)
def test_every_preset_is_a_command_line(capsys, model):
    for preset, values in __import__(model).PRESETS.items():
        _, model_config, config = train.parse(['--model', model, '--preset', preset, '--seed', '3'])
        given = dataclasses.asdict(model_config) | dataclasses.asdict(config)
        assert given == given | values | dict(seed=3)
        assert config.tokens_per_step % (model_config.micro_batch * model_config.block_size) == 0
    assert train.parse('--model drt --n-encoder 0'.split())[1].n_encoder == 0       # by "0:"
    with pytest.raises(SystemExit): train.parse(['--model', model, '--help'])
    screen = capsys.readouterr().out
    assert all('--' + name.replace('_', '-') in screen for name in given)


def test_validation_is_fixed_and_complete(here):
    """All tokens but the first, by hand; a subset is always the same."""
    corpus = data.load('texts', 'bytes', quiet=True)
    batches = data.Batches(corpus.val, 'segments', 16, 3, seed=0)
    torch.manual_seed(0)
    model = trime.TRIME(trime.TRIMEConfig(257, 16, 3, n_layer=1, n_head=2, n_embd=16))
    state = torch.get_rng_state()
    loss, n = train.validate(model, model, batches, 1.0)
    some = [train.validate(model, model, batches, 1.0, 200) for _ in range(2)]
    assert n == len(corpus.val.tokens) - 1 and some[0] == some[1] and some[0][1] <= 200
    assert model.training and torch.equal(torch.get_rng_state(), state)
    model.eval()
    text = torch.from_numpy(corpus.val.tokens[:].astype('int64'))
    total = sum(log_p(model, text[i:i + 17]).sum().item() for i in range(0, n, 16))
    assert loss == pytest.approx(-total / n, rel=1e-5)


@pytest.mark.parametrize('shape', [(8, 8), (5, 40), (40, 5), (1, 12)])
def test_orthogonalize_makes_singular_values_equal(shape):
    """The singular vectors stay; the values, here from 0.1 to 1, come to between 0.6 and 1.3."""
    torch.manual_seed(0)
    u, s, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    y = u.mT @ train.orthogonalize((u * torch.linspace(7, 0.7, len(s)) @ v)[None])[0] @ v.mT
    assert torch.allclose(y, y.diagonal().diag(), atol=1e-4)
    assert 0.6 < y.diagonal().min() and y.diagonal().max() < 1.3


def test_momentum_of_muon():
    """Of two gradients: m is their running mean, and Nesterov's step looks ahead."""
    (p, q), (g, h) = map(torch.nn.Parameter, torch.zeros(2, 6, 8)), torch.randn(2, 6, 8)
    muon = train.Muon([p, q, torch.nn.Parameter(torch.ones(2, 2))], dict(weight_decay=0.0))
    for p.grad, muon.param_groups[0]['lr'] in ((g, 0.0), (h, 1.0)):
        q.grad = p.grad.flip(0)
        muon.step()
    update = train.orthogonalize((0.05 * h + 0.95 * (0.95 * 0.05 * g + 0.05 * h))[None])
    assert torch.allclose(torch.stack([p, q.flip(0)]), -update * 0.2 * 8 ** 0.5, atol=1e-4)


@pytest.mark.parametrize('optimizer', ['muon', 'adamw'])
def test_a_step_by_hand(here, optimizer):
    """One step: the mean gradient of two micro-batches, a norm of at most grad_clip, decay, lr."""
    by = f'--optimizer {optimizer} --dropout 0 --max-steps '
    run(flags('trime', by + '1 --grad-clip 0.01 --weight-decay 0.5 --lr 0.1'))
    module, model_config, config = train.parse(flags('trime', '--dropout 0'))
    corpus = data.load('texts', 'bytes', quiet=True)
    batches = data.Batches(corpus.train, 'segments', 16, 2, seed=0)
    torch.manual_seed(0)
    model = module.TRIME(dataclasses.replace(model_config, vocab_size=257))
    sum(model(batches[g], 0.0)[0] / 2 for g in (0, 1)).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    after = torch.load('out/trime/ckpt.pt', weights_only=True)['model']
    assert log_of('out/trime')[0]['grad_norm'] == pytest.approx(norm.item(), rel=1e-4)
    for name, p in model.named_parameters():
        g = p.grad * 0.01 / (norm + 1e-6)
        update = g / (g.abs() + 1e-8)                       # Adam's first step
        if optimizer == 'muon' and p.dim() > 1 and 'embedding' not in name:
            update = train.orthogonalize(g[None])[0] * 0.2 * math.sqrt(max(p.shape))
        by_hand = p * (1 - 0.1 * 0.5 * (p.dim() > 1)) - 0.1 * update
        assert torch.allclose(after[name], by_hand, atol=2e-4), name
    run(flags('trime', by + '3 --lr 1e-12 --out run'))
    last = sum(model(batches[g], 2 / 3)[0].item() / 2 for g in (4, 5))      # of other micro-batches
    assert log_of('run')[2]['loss'] == pytest.approx(last, rel=1e-5)


class PretendedGPU(TorchFunctionMode):
    """Tensors that would be on a GPU are marked; computing with one of each place is an error."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, owner, kwargs = func.__name__, getattr(func, '__self__', None), dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        place = lambda t: t.__dict__.get('place')
        if owner in (torch.Tensor.device, torch.Tensor.is_cuda):
            device = place(args[0]) or CPU
            return device == GPU if owner is torch.Tensor.is_cuda else device
        named = [x for x in [kwargs.get('device'), *args[1:2] * (name == 'to')]
                 if isinstance(x, (str, torch.device))]
        where = None
        if named or name == 'cpu' or not tensors:
            where = GPU if named and 'cuda' in str(named[0]) else CPU
        if 'device' in kwargs:
            kwargs['device'] = 'cpu'
        elif named:
            args = (args[0], 'cpu', *args[2:])
        places = {place(t) for t in tensors if t.dim()} - {None}
        indexed = 'item__' in name and place(args[0]) == GPU
        if where is None and (name in ('copy_', '__set__', 'to') or indexed):
            where = place(tensors[-1] if name == 'to' else args[0])
        elif where is None and len(places) > 1 or name == 'numpy' and GPU in places:
            raise RuntimeError(f'{name}: {[(place(t), tuple(t.shape)) for t in tensors]}')
        elif where is None:
            where = next(iter(places or {place(t) for t in tensors} - {None}), None)
        out = func(*args, **kwargs)
        if name in ('to', 'cpu') and out is args[0] and place(out) != where:
            out = out.view_as(out)
        if owner is torch.Tensor.data and name == '__set__':            # Module.to
            args[0].place = place(args[1])
        for t in tree_leaves(out) if where is not None else ():
            if torch.is_tensor(t):
                t.place = where
        return out


@pytest.mark.parametrize('model, more', [
    ('trime', ''), ('trime', '--memory long'), ('trime', '--memory ext'), ('drt', ''), ('rpt', ''),
    ('drt', '--encoder lower --sink'), ('drt', '--groups 0')])
def test_no_tensor_stays_on_the_cpu(here, monkeypatch, model, more):
    """A run on a pretended H200, whose log has the share of its peak (MFU)."""
    autocast = lambda self, _, *args, base=torch.autocast, **kw: base.__init__(self, 'cpu', **kw)
    generator = lambda cls, *_, base=torch.Generator: base.__new__(cls)
    monkeypatch.setattr(torch, 'autocast', type('A', (torch.autocast,), dict(__init__=autocast)))
    monkeypatch.setattr(torch, 'Generator', type('G', (torch.Generator,), dict(__new__=generator)))
    for name, value in dict(is_available=True, is_initialized=True, get_device_name='NVIDIA H200',
                            get_device_capability=(9, 0), max_memory_allocated=2 ** 30,
                            is_current_stream_capturing=False).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.accelerator, 'current_accelerator', lambda *_, **__: None)
    with PretendedGPU():
        pytest.raises(RuntimeError, lambda: torch.ones(3, device='cuda') + torch.ones(3))
        run(flags(model, more + ' --device cuda --kernel torch --compile off --dtype bf16 --out g'))
    run(flags(model, more + ' --dtype bf16 --out cpu'))
    losses = [[x['loss'] for x in log_of(out)] for out in ('g', 'cpu')]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)      # bf16 or TF32 in fp32 products
    entry, weights = log_of('g')[-1], outcome('g')[0]
    flops = entry['mfu'] * 989e12 / entry['tokens_per_s']               # of a token
    assert 0.7 < flops / 6 / sum(p.numel() for p in weights if p.dim() > 1) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize('model, more', [
    ('trime', '--memory none'), ('trime', '--memory local'), ('trime', '--memory long'),
    ('trime', '--memory ext'), ('drt', ''), ('rpt', ''), ('rpt', '--retriever bm25')])
def test_random_tokens_cannot_be_predicted(here, model, more):
    """A target that leaks anywhere brings the loss on fresh text below ln 16 at once."""
    rng = random.Random(0)
    texts = [''.join(rng.choices('abcdefghijklmnop', k=2000)) for _ in range(50)]
    write_splits(here / 'random', texts[:25], texts[25:])
    run(flags(model, f'{more} --data random --max-steps 300 --eval-every 300 --out run'))
    assert log_of('run')[-1]['val_loss_all'] > math.log(16) - 0.01      # 4 standard errors


def test_imports():
    """None is heavy; AdamW's own comes before a process group, whose threads it would keep."""
    script = ('import os, sys, train, trime, rpt, drt; print(*map(os.environ.get, sys.argv[1:]), '
              '{"faiss", "triton", "torch._dynamo", "torch.distributed.nn"} & set(sys.modules))')
    names = 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'
    command = ['env', '-u', names[0], '-u', names[1], sys.executable, '-c', script, *names]
    screen = subprocess.run(command, capture_output=True, text=True, cwd=FILE.parent).stdout
    assert screen == "PASSIVE 1000 {'torch.distributed.nn'}\n"
