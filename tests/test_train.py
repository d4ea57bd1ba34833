"""The training loop, by the commands a user would type. Run: pytest tests/test_train.py"""
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import drt
import rpt
import train
import trime
from trime import TRIME, TRIMEConfig

TRAIN = Path(train.__file__)
SMALL = ['--data', 'texts', '--tokenizer', 'bytes', '--block-size', '16', '--micro-batch', '2', '--tokens-per-step', '64',
         '--n-layer', '2', '--n-head', '2', '--n-embd', '16', '--device', 'cpu', '--dtype', 'fp32', '--dropout', '0.1']
DRT = ['--model', 'drt', '--data', 'texts', '--tokenizer', 'bytes', '--block-size', '35', '--micro-batch', '2', '--tokens-per-step', '140',
       '--n-layer', '2', '--n-head', '2', '--n-embd', '16', '--window', '8', '--chunk-size', '8', '--n-neighbors', '2', '--encoder', 'tokens',
       '--device', 'cpu', '--dtype', 'fp32']       # with Gumbel noise and masks, and two micro-batches a step
RPT = ['--model', 'rpt', '--data', 'many', '--tokenizer', 'bytes', '--block-size', '70', '--micro-batch', '2', '--tokens-per-step', '280',
       '--n-layer', '2', '--n-head', '2', '--n-embd', '16', '--window', '16', '--chunk-size', '4', '--n-candidates', '3', '--score-every', '1',
       '--dropout', '0.1', '--device', 'cpu', '--dtype', 'fp32']       # two micro-batches a step, some of whose sequences have several documents


@pytest.fixture(scope='session')
def texts(tmp_path_factory):
    """A folder with a small corpus: made-up sentences in which words repeat. In `many` beside it the same, in 40 documents."""
    folder, rng = tmp_path_factory.mktemp('texts'), random.Random(0)
    words = ['cat', 'dog', 'tree', 'river', 'stone', 'sees', 'finds', 'the', 'a', 'old']
    for name, n in (('train', 900), ('val', 60), ('test', 60)):
        (folder / f'{name}.txt').write_text('\n'.join(' '.join(rng.choices(words, k=8)) for _ in range(n)))
    many = tmp_path_factory.mktemp('many')
    for name, n in (('train', 40), ('val', 8)):
        (many / f'{name}.jsonl').write_text('\n'.join(json.dumps({'text': ' '.join(rng.choices(words, k=20 + i))}) for i in range(n)))
    (folder / 'many').symlink_to(many)
    return folder


@pytest.fixture
def here(tmp_path, texts, monkeypatch):
    """An empty working folder with the corpus linked into it; one thread, since the models are tiny."""
    (tmp_path / 'texts').symlink_to(texts)
    (tmp_path / 'many').symlink_to(texts / 'many')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


def start(*flags, small=SMALL, launcher=(), script=TRAIN):
    return subprocess.Popen([sys.executable, *launcher, str(script), *small, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))     # a shell's background ignores it


def outcome(folder):
    """What a run has computed: its weights, optimizer state, and log without the timings."""
    checkpoint = torch.load(f'{folder}/ckpt.pt', weights_only=True)
    log = [json.loads(line) for line in Path(folder, 'log.jsonl').read_text().splitlines()]
    moments = [m for s in checkpoint['optimizer']['state'].values() for m in (s['exp_avg'], s['exp_avg_sq'])]
    return list(checkpoint['model'].values()) + moments, [{k: v for k, v in x.items() if k != 'tokens_per_s'} for x in log]


def same(a, b):
    return a[1] == b[1] and all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


def wait_for(condition, process, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None and time.time() < end, process.stdout.read() if process.poll() is not None else 'too slow'
        time.sleep(0.005)


@pytest.mark.parametrize('how, small', [(signal.SIGKILL, SMALL), (signal.SIGINT, SMALL), (signal.SIGTERM, DRT), (signal.SIGTERM, RPT)])
def test_stopped_and_gone_on_is_not_stopped(here, how, small, capsys):
    """Killed in the middle, or asked to leave, and started again by the same command: the same weights, moments and log."""
    steps = 120 if small is SMALL else 60
    flags = ['--max-steps', str(steps), '--eval-every', '20']
    train.main(small + flags + ['--out', 'straight'])
    process = start(*flags, '--out', 'stopped', small=small)
    wait_for(lambda: Path('stopped/ckpt.pt').exists(), process)
    process.send_signal(how)
    printed = process.communicate(timeout=60)[0]
    stopped_at = torch.load('stopped/ckpt.pt', weights_only=True)['step']
    assert stopped_at < steps
    if how != signal.SIGKILL:
        assert process.returncode == 128 + how and f'stopped at step {stopped_at}' in printed
    with open('stopped/log.jsonl', 'a') as f:
        f.write('{"step": 11, "lo')                                     # a line that was cut short, as on a full disk
    Path('stopped/ckpt.pt.123.tmp').write_bytes(b'half a checkpoint')
    capsys.readouterr()
    train.main(small + flags + ['--out', 'stopped'])
    assert f'from step {stopped_at}' in capsys.readouterr().out
    assert same(outcome('straight'), outcome('stopped'))
    assert not list(Path('stopped').glob('*.tmp'))


@pytest.mark.dist
@pytest.mark.parametrize('small, sizes', [(SMALL, '2 processes x 1 x 2 x 16'), (DRT, '2 processes x 1 x 2 x 35'), (RPT, '2 processes x 1 x 2 x 70')],
                         ids=['trime', 'drt', 'rpt'])
def test_two_processes_are_one_with_two_accumulation_steps(here, small, sizes):
    """
    The same micro-batches, the same dropout, the same mean of gradients; only the order of additions differs.
    And no thread of the process group is left at the end: once in 30 runs such a thread met the interpreter's end and
    aborted a process that had done all its work.
    """
    flags = ['--max-steps', '5']
    train.main(small + flags + ['--out', 'one'])
    Path('main.py').write_text(f'import sys; sys.path.insert(0, {str(TRAIN.parent)!r}); import train, pathlib; train.main(); '
                               'print("threads", [p.read_text() for p in pathlib.Path("/proc/self/task").glob("*/comm")])')
    process = start(*flags, '--out', 'two', small=small, launcher=['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2'], script='main.py')
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and f'({sizes})' in printed, printed
    assert printed.count('threads [') == 2 and 'gloo' not in printed, printed
    (one, log_one), (two, log_two) = outcome('one'), outcome('two')
    weights = len(one) // 3
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one[:weights], two[:weights], strict=True))
    for a, b in zip(log_one, log_two, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize('memory', ['none', 'local', 'long', 'ext'])
def test_every_memory_trains(here, memory):
    train.main(SMALL + ['--max-steps', '40', '--memory', memory, '--lr', '1e-2', '--no-same-document'])     # it is one document
    log = [json.loads(line) for line in Path('out/trime/log.jsonl').read_text().splitlines()]
    assert [x['step'] for x in log] == list(range(1, 41)) and log[-1]['tokens'] == 40 * 64
    assert log[-1]['val_loss'] < log[0]['loss'] - 1
    assert (log[-1]['memory_share'] > 0) == (memory != 'none')
    assert log[-1]['val_tokens_all'] == len(data.load('texts', 'bytes', quiet=True).val.tokens) - 1
    config = json.loads(Path('out/trime/config.json').read_text())
    assert config['model_config']['memory'] == memory and config['torch'] == torch.__version__
    assert Path('out/trime/best.pt').exists()


def test_the_folder_of_another_run_is_left_alone(here, capsys):
    train.main(SMALL + ['--max-steps', '3'])
    before = {p: p.read_bytes() for p in Path('out/trime').iterdir()}
    with pytest.raises(SystemExit, match='lr differ.*--out out/trime-2'):
        train.main(SMALL + ['--max-steps', '3', '--lr', '1e-4'])
    with pytest.raises(SystemExit, match='--out out/trime-2'):
        train.main(SMALL + ['--max-steps', '3', '--resume', 'no'])
    train.main(SMALL + ['--max-steps', '3'])
    assert 'finished after 3 steps' in capsys.readouterr().out
    Path('out/other').mkdir()
    Path('out/other/thesis.txt').write_text('mine')
    with pytest.raises(SystemExit, match='no readable config.json'):
        train.main(SMALL + ['--out', 'out/other'])
    assert {p: p.read_bytes() for p in Path('out/trime').iterdir()} == before


def test_a_kernel_that_cannot_run(here, monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    with pytest.raises(SystemExit, match='--kernel triton cannot run: .* --kernel auto'):
        train.main(DRT + ['--kernel', 'triton', '--device', 'cpu', '--out', 'c'])
    assert not Path('c').exists()


def test_weights_of_another_version_are_left_alone(here):
    """A run that was begun when a layer had another name: one line instead of a traceback, and nothing is written."""
    train.main(SMALL + ['--max-steps', '4', '--out', 'a'])
    checkpoint = torch.load('a/ckpt.pt', weights_only=True)
    checkpoint['model']['old_name'], checkpoint['step'] = checkpoint['model'].pop('norm.gain'), 2
    torch.save(checkpoint, 'a/ckpt.pt')
    before = Path('a/ckpt.pt').read_bytes()
    with pytest.raises(SystemExit, match='a has weights of another version of this house: --out a-2 begins anew'):
        train.main(SMALL + ['--max-steps', '4', '--out', 'a'])
    assert Path('a/ckpt.pt').read_bytes() == before


def test_a_loss_that_is_not_finite_stops_the_run(here, monkeypatch):
    """In training or in validation; and the last checkpoint from before is still there, whole."""
    forward, calls = TRIME.forward, []

    def breaks(model, batch, progress):
        calls.append(model.training)
        loss, extra = forward(model, batch, progress)
        return (loss * math.nan if calls.count(True) > 20 and model.training == in_training else loss), extra
    monkeypatch.setattr(TRIME, 'forward', breaks)
    for in_training, what in ((True, 'loss is nan'), (False, 'validation loss is nan')):
        calls.clear()
        with pytest.raises(SystemExit, match=f'{what}.*the checkpoint in out/{in_training} is from before.*--lr'):
            train.main(SMALL + ['--max-steps', '50', '--eval-every', '8', '--out', f'out/{in_training}'])
        checkpoint = torch.load(f'out/{in_training}/ckpt.pt', weights_only=True)
        assert checkpoint['step'] == 8 and all(t.isfinite().all() for t in checkpoint['model'].values())


def test_a_full_disk_harms_nothing(tmp_path):
    path = tmp_path / 'ckpt.pt'
    train.write(path, lambda f: f.write(b'good'))

    def full(f):
        f.write(b'ba')
        raise OSError(28, 'No space left on device')
    with pytest.raises(SystemExit, match='No space left.*unharmed'):
        train.write(path, full)
    assert path.read_bytes() == b'good' and list(tmp_path.iterdir()) == [path]


def test_out_of_memory_names_the_next_smaller_size(here, monkeypatch):
    def too_much(*_):
        raise torch.OutOfMemoryError('CUDA out of memory')
    monkeypatch.setattr(TRIME, 'forward', too_much)
    with pytest.raises(SystemExit, match='--micro-batch 1 .*changes the model'):
        train.main(SMALL + ['--max-steps', '3'])


@pytest.mark.parametrize('flags, message', [
    (['--learning-rate', '1'], 'unknown argument --learning-rate'),
    (['--wieght-decay', '1'], 'did you mean --weight-decay'),
    (['--memory', 'lokal'], 'none, local, long, ext'),
    (['--preset', 'huge'], 'tiny'),
    (['--tokens-per-step', '100'], '--tokens-per-step 96'),
    (['--dtype', 'fp8'], 'auto, bf16, fp32'),
    (['--max-steps', '0'], '1 or more'),
    (['--micro-batch', '-3'], '1 or more'),
    (['--tokenizer', 'byte'], 'bytes'),
    (['--data', 'no/such/folder'], 'no/such/folder'),
    (['--block-size', '1000000', '--tokens-per-step', '2000000'], 'not enough'),
    (['--n-embd', '15'], 'n_embd'),
    (['--n-head', '0'], '1 or more'),
    (['--dropout', '2'], 'dropout'),
    (['--seed', '-1'], 'seed'),
    (['--lr', '-1'], 'lr'),
    (['--device', 'gpu'], 'cuda, cpu, mps'),
    (['--groups', '2'], 'belongs to --model drt, not to trime'),
    (['--no-gate'], 'belongs to --model rpt'),
    (['--reference', 'somewhere'], 'the teacher of --model rpt --retriever sem'),
    (['--device', 'cuda'], 'no GPU' if not torch.cuda.is_available() else ''),
])
def test_bad_flags_get_one_line(here, flags, message):
    if not message:
        pytest.skip('there is a GPU here')
    with pytest.raises(SystemExit) as e:
        train.main(SMALL + flags)
    assert message in str(e.value) and len(str(e.value).strip().splitlines()) == 1
    assert not Path('out').exists()


@pytest.mark.parametrize('flags', [['--lr', 'fast'], ['--n-layer', '2.5'], ['--model', 'gpt']])
def test_values_of_the_wrong_type(here, flags, capsys):
    with pytest.raises(SystemExit):
        train.main(SMALL + flags)
    assert flags[0] in capsys.readouterr().err and not Path('out').exists()


def test_imports_touch_nothing_heavy():
    """A decorator of torch.compile's at the top of a file imported Triton for everyone, and seconds with it."""
    script = ('import sys, bm25, data, drt, eval, gca_kernel, rpt, train, trime, torch\n'
              'print({"triton", "torch._dynamo", "faiss", "tiktoken", "matplotlib", "transformers"} & set(sys.modules), torch.cuda.is_initialized())')
    assert subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, cwd=Path(train.__file__).parent).stdout == 'set() False\n'


def test_help_is_the_comments(capsys):
    """Each field of each config is a flag, with the comment beside it as its help."""
    with pytest.raises(SystemExit):
        train.main(['--help'])
    screen = ' '.join(capsys.readouterr().out.split())
    for Config in (TRIMEConfig, train.TrainConfig, train.RunConfig):
        for f in dataclasses.fields(Config):
            assert '--' + f.name.replace('_', '-') in screen
            assert ' '.join(train.comments(Config)[f.name].split()[:3]) in screen


@pytest.mark.parametrize('about, faster', [('vendor_id : GenuineIntel\nflags : avx512_bf16 amx_bf16 amx_tile', True), ('vendor_id : AuthenticAMD\nflags : avx512_bf16', True),
                                           ('vendor_id : GenuineIntel\nflags : avx512_bf16', False), ('vendor_id : AuthenticAMD\nflags : avx2', False)])
def test_which_cpus_multiply_bf16(monkeypatch, about, faster):
    """An Intel with AVX512-BF16 and no AMX took 1.4 times as long in bf16, and auto chose it."""
    monkeypatch.setattr(Path, 'exists', lambda self: True)
    monkeypatch.setattr(Path, 'read_text', lambda self: about)
    assert train.multiplies_bf16(torch.device('cpu')) == faster and not train.multiplies_bf16(torch.device('mps'))


def test_learning_rate():
    """Linear from lr/rise to lr, a cosine to lr/10; never zero, never above."""
    config = train.TrainConfig(max_steps=100, warmup=0.1, lr=1.0)
    rates = [train.learning_rate(s, config) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) == max(rates)
    assert rates[55] == pytest.approx(0.55) and rates[99] == pytest.approx(0.1, abs=1e-3) and rates[10:] == sorted(rates[10:], reverse=True)


def test_validation_is_fixed_and_complete(here):
    """All tokens but the first, each once, and the same subset every time; training's randomness is not touched."""
    corpus = data.load('texts', 'bytes', quiet=True)
    batches = data.Batches(corpus.val, 'segments', 16, 3, seed=0)
    torch.manual_seed(0)
    model = TRIME(TRIMEConfig(vocab_size=257, block_size=16, micro_batch=3, n_layer=1, n_head=2, n_embd=16))
    run = lambda at_most=None: train.validate(model, batches, torch.device('cpu'), lambda: torch.autocast('cpu', enabled=False), 1.0, at_most)
    state = torch.get_rng_state()
    loss, n = run()
    assert n == len(corpus.val.tokens) - 1 and model.training and torch.equal(torch.get_rng_state(), state)
    assert run(500) == run(500) and run(500)[1] <= 500
    total = 0.0                                                         # by hand: segment by segment
    for i in range(batches.n_rows):
        piece = torch.from_numpy(corpus.val.tokens[16 * i:16 * i + 17].astype('int64'))
        log_p = model.eval().log_probs(piece[None, :-1])[0].gather(1, piece[1:, None])
        total -= log_p.sum().item()
    assert loss == pytest.approx(total / n, rel=1e-5)


def test_matrices_alone_decay(here, monkeypatch):
    seen = []
    AdamW = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, 'AdamW', lambda groups, **more: seen.extend(groups) or AdamW(groups, **more))
    train.main(SMALL + ['--max-steps', '1'])
    decayed, not_decayed = seen[0], seen[1]
    assert decayed['weight_decay'] == 0.1 and all(p.dim() == 2 for p in decayed['params'])
    assert not_decayed['weight_decay'] == 0 and all(p.dim() == 1 for p in not_decayed['params'])
    assert len(decayed['params']) + len(not_decayed['params']) == len(list(TRIME(TRIMEConfig(n_layer=2)).parameters()))


def test_init_starts_from_other_weights(here):
    train.main(SMALL + ['--max-steps', '20', '--out', 'first'])
    train.main(SMALL + ['--max-steps', '1', '--lr', '1e-12', '--init', 'first/ckpt.pt', '--out', 'second'])
    first, second = (torch.load(f'{run}/ckpt.pt', weights_only=True)['model'] for run in ('first', 'second'))
    assert all(torch.allclose(first[k], second[k], atol=1e-6) for k in first)


def test_init_needs_a_checkpoint_of_the_same_sizes(here):
    with pytest.raises(SystemExit, match='--init nowhere.pt: no checkpoint'):
        train.main(SMALL + ['--max-steps', '1', '--init', 'nowhere.pt'])


@pytest.mark.dist
@pytest.mark.parametrize('memory', ['long', 'ext'])
def test_two_processes_that_gather_are_one_with_twice_the_segments(here, memory):
    """The same micro-batches, in the same order, with the same coins: the whole run is that of one process of 2B."""
    flags = ['--max-steps', '4', '--memory', memory, '--dropout', '0', '--p', '0.5', '--no-same-document']
    train.main(SMALL + flags + ['--out', 'one', '--micro-batch', '4'])
    process = start(*flags, '--gather-memory', '--out', 'two', launcher=['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2'])
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0, printed
    (one, log_one), (two, log_two) = outcome('one'), outcome('two')
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one[:len(one) // 3], two[:len(two) // 3], strict=True))
    assert [x['loss'] for x in log_one] == pytest.approx([x['loss'] for x in log_two], rel=1e-5)


def test_accumulation_counts():
    assert train.accumulation(8, 512, 4096, 1) == 1 and train.accumulation(8, 512, 16384, 2) == 2
    with pytest.raises(SystemExit, match='--tokens-per-step 8192'):
        train.accumulation(8, 512, 9000, 2)


def test_a_run_logs_what_it_promises(here, capsys):
    train.main(SMALL + ['--max-steps', '12', '--eval-every', '6'])
    screen = capsys.readouterr().out
    assert 'tok/s' in screen and 'left' in screen and 'it writes' in screen and 'bits per byte' in screen
    log = [json.loads(line) for line in Path('out/trime/log.jsonl').read_text().splitlines()]
    assert all({'step', 'tokens', 'loss', 'lr', 'grad_norm', 'tokens_per_s'} <= x.keys() for x in log)
    assert [x['step'] for x in log if 'val_loss' in x] == [6, 12] and all(math.isfinite(x['loss']) for x in log)
    assert os.path.getsize('out/trime/loss.png') > 1000


@pytest.mark.parametrize('preset', trime.PRESETS)
@pytest.mark.parametrize('memory', ['none', 'ext'])
def test_presets_are_command_lines(preset, memory):
    """Every field of a preset is a field of the configurations; a flag beats it; a step is whole micro-batches."""
    module, model_config, config, _ = train.parse(['--preset', preset, '--memory', memory, '--seed', '3'])
    given = {**dataclasses.asdict(model_config), **dataclasses.asdict(config)}
    assert all(given[key] == value for key, value in module.PRESETS[preset].items())
    assert (given['memory'], given['seed']) == (memory, 3)
    assert train.accumulation(model_config.micro_batch, model_config.block_size, config.tokens_per_step, 1) >= 1


def test_drt_is_a_command_line(here, capsys):
    """The base LM, both encoders and the preset of the paper; a bad number of groups is one line."""
    for preset in drt.PRESETS:
        _, model_config, config, _ = train.parse(['--model', 'drt', '--preset', preset, '--groups', '2'])
        given = {**dataclasses.asdict(model_config), **dataclasses.asdict(config)}
        assert all(given[key] == value for key, value in drt.PRESETS[preset].items()) and given['groups'] == 2
        assert train.accumulation(model_config.micro_batch, model_config.block_size, config.tokens_per_step, 1) >= 1
    with pytest.raises(SystemExit, match='twice a multiple of groups 3'):
        train.parse(['--model', 'drt', '--groups', '3'])
    for groups in '01':
        train.main(DRT + ['--max-steps', '12', '--lr', '1e-2', '--groups', groups, '--out', groups])
        log = [json.loads(line) for line in Path(groups, 'log.jsonl').read_text().splitlines()]
        assert log[-1]['val_loss'] < log[0].get('lm_loss', log[0]['loss']) - 0.5 and ('top_weight' in log[-1]) == (groups == '1')
        assert groups == '0' or 'mlm_loss' in log[5] and 'mlm_loss' not in log[6]


def test_rpt_is_one_command(here, capsys):
    """Reference LM, scoring, RPT; what is there is not made again; only documents are scored that the reference LM has not seen."""
    flags = RPT + ['--max-steps', '30', '--lr', '1e-2', '--out', 'a']
    train.main(flags)
    screen = capsys.readouterr().out
    assert all(f'{n} of 3' in screen for n in '123') and 'M tokens for the reference LM' in screen
    log = [json.loads(line) for line in Path('a/log.jsonl').read_text().splitlines()]
    assert log[-1]['val_loss'] < log[0]['lm_loss'] - 0.5 and log[0]['loss'] == pytest.approx(log[0]['lm_loss'])     # α starts at 0
    assert log[9]['loss'] == pytest.approx(log[9]['lm_loss'] + 0.005 * log[9]['ret_loss'], rel=1e-4) and 0 < log[9]['ndcg'] <= 1
    reference = json.loads(Path('a-reference/config.json').read_text())
    assert (reference['model_config']['retriever'], reference['model_config']['n_layer'], reference['train_config']['fold']) == ('none', 1, 0)
    assert reference['train_config']['max_steps'] == 30

    corpus = data.load('many', 'bytes', quiet=True)
    (folder,) = corpus.folder.glob('candidates-*')
    done, candidates, scores = (np.load(folder / f'{name}.npy') for name in ('done', 'candidates', 'scores'))
    texts = data.Batches(corpus.train, 'documents', 70, 2, seed=0)
    visited = {row for g in range(60) for row in texts.rows(g)}
    assert {row for row in np.flatnonzero(done)} == visited and len(visited) <= texts.n_rows
    some = np.flatnonzero(done)
    doc = texts.take(some[:2], 0).doc.numpy()
    for row, documents in zip(some[:2], doc):
        owner = documents[:68].reshape(17, 4)[:, -1]                        # of each chunk
        there = (candidates[row] >= 0).any(1)
        assert (np.isnan(scores[row]).all(1) == ~(there & (owner % 2 == 1)))[there].all()
    assert np.isfinite(scores[some]).any() and (~np.isnan(scores[some]) <= (candidates[some] >= 0)).all()

    train.main(flags)                                                       # finished: nothing happens
    assert 'finished after 30 steps' in capsys.readouterr().out
    before = (folder / 'done.npy').stat().st_mtime_ns
    train.main(RPT + ['--max-steps', '30', '--lr', '1e-2', '--out', 'b', '--reference', 'a-reference'])       # the same by another way
    assert (folder / 'done.npy').stat().st_mtime_ns == before and not Path('b-reference').exists() and '1 of 3' not in capsys.readouterr().out
    assert same(outcome('a'), outcome('b'))
    train.main(RPT + ['--max-steps', '4', '--lr', '3e-3', '--out', 'a-reference-2'])                        # its own reference LM beside it
    train.main(RPT + ['--max-steps', '4', '--lr', '2e-3', '--out', 'a2', '--data', 'texts', '--tokenizer', 'bytes'])
    assert 'too few documents' in capsys.readouterr().out
    assert 'know by heart' not in capsys.readouterr().out
    with pytest.raises(SystemExit, match='retriever none'):
        train.main(flags + ['--reference', 'b', '--out', 'c'])
    Path('broken.pt').write_text('x')
    torch.save(dict(model_name='drt', config=dict(groups=1), fold=-1, corpus='', tokenizer={}), 'drt.pt')
    for reference, says in (('nothing', 'nothing does not exist'), ('broken.pt', 'no checkpoint of this house'), ('drt.pt', 'retriever none')):
        with pytest.raises(SystemExit, match=says):
            train.main(flags + ['--reference', reference, '--out', 'c'])
    assert not Path('c').exists()


def test_scoring_goes_on_where_it_was_killed(here, monkeypatch):
    flags = ['--max-steps', '20', '--eval-every', '10', '--n-candidates', '8']
    train.main(RPT + flags + ['--out', 'a'])
    (folder,) = Path('corpora').glob('many*/candidates-*')
    arrays = [np.load(folder / f'{name}.npy') for name in ('candidates', 'scores', 'done')]
    shutil.rmtree(folder)
    Path('slow.py').write_text(f'import sys, time; sys.path.insert(0, {str(TRAIN.parent)!r}); import train, rpt; real = rpt.target_scores\n'
                               'rpt.target_scores = lambda *a: (time.sleep(0.2), real(*a))[1]\ntrain.main()')
    process = start(*flags, '--out', 'b', '--reference', 'a-reference', small=RPT, script='slow.py')
    some = lambda: (folder / 'done.npy').exists() and np.load(folder / 'done.npy').sum() > 1
    wait_for(some, process)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and 'the same command goes on' in printed and 'Traceback' not in printed
    assert 1 < np.load(folder / 'done.npy').sum() < arrays[2].sum() and not Path('b').exists()
    train.main(RPT + flags + ['--out', 'b', '--reference', 'a-reference'])
    for name, array in zip(('candidates', 'scores', 'done'), arrays):
        np.testing.assert_array_equal(np.load(folder / f'{name}.npy'), array)
    assert same(outcome('a'), outcome('b'))


@pytest.mark.parametrize('retriever', ['none', 'bm25', 'lex'])
def test_rpts_other_retrievers_train(here, retriever):
    train.main(RPT + ['--max-steps', '30', '--lr', '1e-2', '--retriever', retriever, '--n-cca', '1' if retriever == 'lex' else '0'])
    log = [json.loads(line) for line in Path('out/rpt/log.jsonl').read_text().splitlines()]
    assert log[-1]['val_loss'] < log[0].get('lm_loss', log[0]['loss']) - 0.5 and ('ret_loss' in log[0]) == (retriever == 'lex')
    assert not Path('out/rpt-reference').exists()


@pytest.mark.parametrize('preset', rpt.PRESETS)
def test_rpts_presets_are_command_lines(preset):
    _, model_config, config, _ = train.parse(['--model', 'rpt', '--preset', preset, '--seed', '3'])
    given = {**dataclasses.asdict(model_config), **dataclasses.asdict(config)}
    assert all(given[key] == value for key, value in rpt.PRESETS[preset].items()) and given['seed'] == 3
    assert train.accumulation(model_config.micro_batch, model_config.block_size, config.tokens_per_step, 1) >= 1
    with pytest.raises(SystemExit, match='two chunks'):
        train.parse(['--model', 'rpt', '--preset', preset, '--window', '100'])


def test_rpts_reference_stays_the_same(here, capsys):
    """A run that is gone on with keeps its teacher, without being told which; another one is refused; folds stay apart."""
    flags = RPT + ['--max-steps', '12', '--eval-every', '4', '--lr', '1e-2']
    plain = flags + ['--retriever', 'none', '--n-layer', '1', '--fold', '1']
    train.main(plain + ['--out', 'one'])
    train.main(plain + ['--out', 'other', '--seed', '5'])
    train.main(flags + ['--out', 'straight', '--reference', 'one', '--fold', '0'])
    forward, calls = rpt.RPT.forward, []

    def stop_after_9_steps(self, *a):
        calls.append(self.training and self.config.retriever == 'sem')
        if sum(calls) == 18:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, *a)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(rpt.RPT, 'forward', stop_after_9_steps)
        train.main(flags + ['--out', 'stopped', '--reference', 'one', '--fold', '0'])
    assert stopped.value.code == 130
    with pytest.raises(SystemExit, match='another teacher, one.*--out stopped-2'):
        train.main(flags + ['--out', 'stopped', '--reference', 'other', '--fold', '0'])
    capsys.readouterr()
    train.main(flags + ['--out', 'stopped', '--fold', '0'])
    assert '1 of 3' not in capsys.readouterr().out and same(outcome('straight'), outcome('stopped'))

    before = {path.name for path in Path('corpora').glob('many*/candidates-*')}
    train.main(flags + ['--out', 'odd', '--fold', '1'])                     # its reference LM takes the even ones; row numbers are others
    assert json.loads(Path('odd-reference/config.json').read_text())['train_config']['fold'] == 0
    assert json.loads(Path('odd/config.json').read_text())['supervision'] not in before
    log = [json.loads(line) for line in Path('odd/log.jsonl').read_text().splitlines()]
    assert all(x['ranked'] > 0 for x in log)                                # every document of this run is held out
    train.main(flags + ['--retriever', 'none', '--out', 'all'])
    train.main(flags + ['--out', 'heart', '--reference', 'all', '--max-steps', '1'])
    assert 'know by heart' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='no chunk has a score'):
        train.main(flags + ['--out', 'nothing', '--reference', 'one', '--fold', '1'])
    with pytest.raises(SystemExit, match='--window 16'):
        train.main(flags + ['--out', 'nothing', '--window', '8'])
    with pytest.raises(SystemExit, match='left the window'):
        train.main(flags + ['--out', 'nothing', '--block-size', '16', '--tokens-per-step', '64'])
    assert not Path('nothing').exists() and not Path('nothing-reference').exists()
