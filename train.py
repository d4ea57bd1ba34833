"""
Trains any model of this repository: on a laptop's CPU, on one GPU, or on many under torchrun.

    $ python train.py --model trime --memory none --out out/vanilla
    $ torchrun --standalone --nproc_per_node=8 train.py --model rpt --tokens-per-step 16384

The folder of a run, out/<model> or --out, has config.json, log.jsonl (an object for each step),
best.pt (the weights with the lowest validation loss) and ckpt.pt, from which the same command
resumes. A micro-batch depends on its number and the configuration alone, all randomness of a model
on its micro-batch: an interrupted run equals another one (bit for bit on a CPU), and so does a run
on any number of processes that can divide the micro-batches of a step.
"""
import os
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')     # before torch: its idle threads sleep
import argparse, ctypes, datetime, difflib, importlib, inspect, json, math, platform, re, signal
import subprocess, sys, time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist

import data

MODELS = ('trime', 'rpt', 'drt')
NOT_COMPARED = ('out', 'resume', 'device', 'compile', 'kernel')     # may differ when resuming
NOT_SHOWN = ('step', 'tokens', 'lr', 'grad_norm', 'tokens_per_s', 'val_tokens', 'val_tokens_all')
PEAK_FLOPS = {'B200': 2250e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12,
              'A100': 312e12, 'L40S': 362e12, '4090': 165e12}       # dense bf16, by data sheet
WORLD, RANK = (int(os.environ.get(name, n)) for name, n in (('WORLD_SIZE', 1), ('RANK', 0)))
STOP = []                                                           # signals received


@dataclass
class TrainConfig:
    data: str = 'code'              # name (code, shakespeare, ...), folder, file; niah[2][:these]
    tokenizer: str = 'bpe'          # bytes, bpe (learned here), gpt2 or word
    seed: int = 0                   # of the weights, the order of the data, the model's randomness
    max_steps: int = 600            # optimizer steps
    tokens_per_step: int = 2048     # over all processes; micro-batches are accumulated to reach it
    optimizer: Literal['muon', 'adamw'] = 'muon'        # muon: AdamW for embedding and vectors
    lr: float = 8e-3                # peak learning rate; 2e-3 suits AdamW alone
    warmup: float = 0.05            # share of the steps with rising rate; then a cosine to a tenth
    weight_decay: float = 0.1       # on matrices only
    beta2: float = 0.95             # AdamW, mean of the squared gradients
    grad_clip: float = 1.0          # largest norm of the gradient; 0: no limit
    eval_every: int = 100           # steps between validations and checkpoints
    val_tokens: int = 32768         # evenly spread, for validation while training; all at the end
    dtype: Literal['auto', 'bf16', 'fp32'] = 'auto'     # auto: bf16 where hardware is fast with it
    grow_context: bool = False      # niah: sequences grow to block_size in the first half
    init: str = ''                  # start from the weights of this checkpoint
    out: str = ''                   # folder of the run; default out/<model>
    resume: Literal['auto', 'no'] = 'auto'              # auto: an unfinished run is resumed
    device: Literal['auto', 'cuda', 'cpu', 'mps'] = 'auto'      # auto: cuda if present, else cpu
    compile: Literal['auto', 'on', 'off'] = 'auto'      # torch.compile; auto: on with cuda
    kernel: Literal['auto', 'triton', 'torch'] = 'auto'     # of drt; auto: triton with cuda

    def __post_init__(self):
        low = dict(max_steps=1, tokens_per_step=1, eval_every=1, val_tokens=1, lr=1e-30)
        high = dict(warmup=1, beta2=1 - 1e-9)
        for name, value in vars(self).items():
            a, b = low.get(name, 0), high.get(name, 2 ** 63 - 1)
            if not isinstance(value, str) and not a <= value <= b:          # nan is not
                raise ValueError(f'{name} {value} is not from {a} to {b}')


def add_flags(parser, Config, preset=None):
    """A flag for each field, whose comment is its help; values of preset, a dict, are defaults."""
    comment = dict(re.findall(r'^ +(\w+):[^#\n]*# *(.+)$', inspect.getsource(Config), re.M))
    group = parser.add_argument_group(Config.__name__)
    for f in fields(Config):
        kind = dict(action=argparse.BooleanOptionalAction) if f.type is bool else dict(
            type=type(f.default), choices=get_args(f.type) or None)
        default = (preset or {}).get(f.name, f.default)
        text = comment[f.name].replace('%', '%%') + f' (default: {default})' * (default != '')
        group.add_argument('--' + f.name.replace('_', '-'), default=default, help=text, **kind)


def parse_flags(parser, argv):
    """The values of all flags; an unknown one is an error that names the nearest."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near, = difflib.get_close_matches(unknown[0], parser._option_string_actions, 1, cutoff=0)
        parser.error(f'there is no flag {unknown[0]}; the nearest is {near}')
    return args


def parse(argv=None):
    """-> module of the model, its config, TrainConfig. SystemExit with one line for a bad flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda message: sys.exit(f'train.py: {message}')
    parser.add_argument('--model', default='trime', choices=MODELS, help='default: trime')
    name = parser.parse_known_args(argv)[0].model
    module = importlib.import_module(name)
    parser.add_argument('--preset', default='tiny', choices=module.PRESETS, help='default: tiny')
    preset = module.PRESETS[parser.parse_known_args(argv)[0].preset]
    parser.add_argument('-h', '--help', action='help')
    configs = getattr(module, name.upper() + 'Config'), TrainConfig
    for Config in configs:
        add_flags(parser, Config, preset)
    args = vars(parse_flags(parser, argv))
    try:
        return module, *(C(**{f.name: args[f.name] for f in fields(C)}) for C in configs)
    except ValueError as e:
        parser.error(e)


def hardware(device):
    """The torch.device that --device names; on a CPU, glibc then keeps freed memory, up to 2 GB."""
    present = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    if device == 'auto':
        device = 'cuda' if present['cuda'] else 'cpu'
    if not present[device]:
        raise SystemExit(f'--device {device}: PyTorch finds none; --device cpu works')
    if device == 'cpu' and platform.libc_ver()[0] == 'glibc':
        for option in ((-3, 2 ** 25), (-1, 2 ** 31 - 1)):           # M_MMAP_, M_TRIM_THRESHOLD:
            ctypes.CDLL(None).mallopt(*option)          # else pages are freed and cleared each step
    return torch.device(f'cuda:{os.environ.get("LOCAL_RANK", 0)}' if device == 'cuda' else device)


def precision(device, dtype):
    """-> whether the forward pass is in bf16, and a function that returns its autocast context"""
    cpu, gpu = device.type == 'cpu', device.type == 'cuda'
    about = Path('/proc/cpuinfo').read_text() if cpu and sys.platform == 'linux' else ''
    # auto: sm_80 and later, AMX, AMD's AVX512-BF16; Intel's takes twice the time of fp32
    fast = 'amx_bf16' in about or 'avx512_bf16' in about and 'AuthenticAMD' in about
    fast = torch.cuda.get_device_capability(device) >= (8, 0) if gpu else fast
    bf16 = dtype == 'bf16' or dtype == 'auto' and fast
    # the fp32 products of the loss may then round their inputs, to bf16 on a CPU, else to TF32
    torch.set_float32_matmul_precision('highest' if not bf16 else 'medium' if cpu else 'high')
    torch.set_flush_denormal(True)
    return bf16, lambda: torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def learning_rate(step, config):
    """Linear rise to config.lr, then a cosine down to a tenth of it."""
    rise = max(1, round(config.warmup * config.max_steps))
    done = max(0, step - rise) / max(1, config.max_steps - rise)
    cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * min(1, (step + 1) / rise) * cosine


def orthogonalize(x):
    """
    U Vᵀ of x = U S Vᵀ (n, m), roughly: five Newton-Schulz steps, with Jordan's coefficients, take
    most singular values of x / |x| to between 0.7 and 1.2.
    """
    if x.size(0) > x.size(1):
        return orthogonalize(x.T).T
    x = x / (x.norm() + 1e-12)
    if torch.get_float32_matmul_precision() != 'highest':           # see precision
        x = x.bfloat16()
    for _ in range(5):
        A = x @ x.T                                                 # (n, n)
        B = torch.addmm(A, A, A, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, B, x, beta=3.4445)                       # 3.4445 x + B x
    return x


class Muon(torch.optim.Optimizer):
    """
    Momentum whose update has equal singular values (Jordan et al. 2024), for matrices but the
    embedding. The factor gives it the size of AdamW's, so that one rate serves both (Liu et al.
    2025, arXiv:2502.16982). Each process computes all updates, from equal gradients.
    """

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in [p for p in group['params'] if p.grad is not None]:
                m = self.state[p].setdefault('momentum', torch.zeros_like(p))
                m.lerp_(p.grad, 0.05)
                update = orthogonalize(p.grad.lerp(m, 0.95))        # Nesterov's
                p.mul_(1 - group['lr'] * group['weight_decay'])
                p.sub_(update, alpha=0.2 * max(p.shape) ** 0.5 * group['lr'])


def optimizers_of(model, config):
    """Muon for the matrices but the embedding and AdamW for the rest, or AdamW for all."""
    matrices, embedding, vectors = [], [], []
    for name, p in model.named_parameters():
        kind = vectors if p.dim() < 2 else embedding if name.startswith('embedding') else matrices
        kind.append(p)
    decays = dict(lr=0.0, weight_decay=config.weight_decay)
    muon = [Muon(matrices, decays)] if config.optimizer == 'muon' else []
    groups = [dict(params=embedding + matrices * (not muon)), dict(params=vectors, weight_decay=0)]
    adamw = dict(decays, betas=(0.9, config.beta2), fused=True)
    return [torch.optim.AdamW(groups, **adamw), *muon]


def write(path, content):
    """Text, or torch.save's objects, then a rename: readers find the previous file or this one."""
    try:
        with open(f'{path}.tmp', 'wb') as f:
            f.write(content.encode()) if isinstance(content, str) else torch.save(content, f)
    except (OSError, RuntimeError) as e:                # a full disk; torch.save hides what it is
        Path(f'{path}.tmp').unlink(missing_ok=True)
        raise OSError(f'{path} cannot be written: {e}')
    os.replace(f'{path}.tmp', path)


def find_run(out, about, resume):
    """The checkpoint to resume from, None for a new run; SystemExit where files would be lost."""
    out.mkdir(parents=True, exist_ok=True)
    files = os.listdir(out)
    previous = json.loads((out / 'config.json').read_text()) if 'config.json' in files else {}
    differ = [f'another {key}' for key, value in about.items()
              if key not in NOT_COMPARED and previous.get(key) != value]
    differ += ['--resume no'] * (resume == 'no' and RANK == 0)
    if files and differ:
        free = next(n for n in range(2, 10 ** 6) if not Path(f'{out}-{n}').exists())
        raise SystemExit(f'{out} is in use ({", ".join(differ[:4])}); free: --out {out}-{free}')
    if 'ckpt.pt' in files:
        return torch.load(out / 'ckpt.pt', map_location='cpu', weights_only=True)


@torch.no_grad()
def validate(model, forward, batches, progress, at_most=10 ** 18):
    """-> causal loss in nats per token of all or evenly spread micro-batches, number of tokens"""
    N, B = len(batches), batches.B
    n = min(N, max(1, at_most // (B * batches.T)))
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    numbers = torch.linspace(0, N - 1, n).round().long().tolist()[RANK::WORLD]
    for i in data.progress(numbers, 'validation', quiet=RANK > 0 or at_most < 10 ** 18):
        rows = torch.arange(batches.n_rows).numpy() # in text order, those of documents far apart
        rows = rows[i::N] if batches.kind == 'documents' else rows[i * B:][:B]
        batch = batches.take(rows, seed=i)
        scored = (batch.targets >= 0).sum().item()
        total += torch.tensor([forward(batch, progress)[0].item() * scored, scored])
    model.train()
    if WORLD > 1: dist.all_reduce(total := total.to(next(model.parameters()).device))
    return (total[0] / total[1]).item(), int(total[1])


def loop(out, config, state, model, optimizers, gradient, check, peak):
    """Steps, validations and checkpoints, until the last step or a signal. -> the last log entry"""
    parameters = list(model.parameters())
    n_weights = sum(p.numel() for p in parameters if p.dim() > 1)       # 6 FLOPs each for a token
    began, first = time.time(), state['step']
    while (step := state['step']) < config.max_steps:
        start, lr = time.time(), learning_rate(step, config)
        metrics = gradient(step)
        metrics['stopped'] = metrics['loss'].new_tensor(len(STOP))
        if WORLD > 1:                                   # the means over all, in one message
            tensors = [p.grad for p in parameters if p.grad is not None] + [*metrics.values()]
            means = torch.nn.utils.parameters_to_vector(tensors) / WORLD
            dist.all_reduce(means)
            torch.nn.utils.vector_to_parameters(means, tensors)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf)
        for optimizer in optimizers:
            for group in optimizer.param_groups: group['lr'] = lr
            optimizer.step()
        model.zero_grad(set_to_none=True)
        metrics = {key: x.item() for key, x in metrics.items()}         # waits for the GPU
        seconds, progress, step = time.time() - start, step / config.max_steps, step + 1
        state.update(step=step, tokens=step * config.tokens_per_step)
        stopped, last = metrics.pop('stopped'), step == config.max_steps
        entry = dict(step=step, tokens=state['tokens'], **metrics, lr=lr, grad_norm=norm.item(),
                     tokens_per_s=config.tokens_per_step / seconds)
        if peak: entry['mfu'] = 6 * n_weights * entry['tokens_per_s'] / peak
        if torch.cuda.is_initialized(): entry['gb'] = torch.cuda.max_memory_allocated() / 2 ** 30
        if due := last or step % config.eval_every == 0:
            entry['val_loss'], entry['val_tokens'] = check(progress, config.val_tokens)
        if last:
            entry['val_loss_all'], entry['val_tokens_all'] = check(progress)
        if not math.isfinite(entry['loss'] + entry['grad_norm'] + entry.get('val_loss', 0)):
            raise SystemExit(f'step {step} is not finite; a lower --lr usually helps: {entry}')
        if RANK == 0:
            left = (time.time() - began) / (step - first) * (config.max_steps - step) / 60
            if step == first + 10 and left > 5:
                n = max(20, 10 * round(config.max_steps * 0.4 / left))
                print(f'about {left:.0f} min left; for about 4, use --max-steps {n}, another --out')
            if due or step == 1 or step % max(1, config.max_steps // 30) == 0:
                shown = [f'{key} {x:.4f}' for key, x in entry.items() if key not in NOT_SHOWN]
                speed = f'{entry["tokens_per_s"]:,.0f} tokens/s | {left:.1f} min left'
                print(f'step {step:6d}/{config.max_steps}', *shown, speed, sep=' | ', flush=True)
            with open(out / 'log.jsonl', 'a') as f:
                f.write(json.dumps(entry) + '\n')
            if due and entry['val_loss'] < state['best']:
                state['best'] = entry['val_loss']
                write(out / 'best.pt', state)
            if due or stopped:
                write(out / 'ckpt.pt', dict(state, optimizers=[x.state_dict() for x in optimizers]))
        if stopped and not last:
            print(f'stopped at step {step}; the same command resumes from there')
            raise SystemExit(128 + (STOP or [signal.SIGTERM])[0])
    return entry


def train(module, model_config, config, corpus=None):
    """One run, from its configuration to its folder. -> the path of ckpt.pt"""
    name, out = module.__name__, Path(config.out or f'out/{module.__name__}')
    device = hardware(config.device)
    bf16, autocast = precision(device, config.dtype)
    B, T = model_config.micro_batch, model_config.block_size
    passes, rest = divmod(config.tokens_per_step, n := WORLD * B * T)
    if rest:
        raise SystemExit(f'--tokens-per-step: no multiple of {n} ({WORLD} processes x {B} x {T})')

    if RANK > 0: dist.barrier()                         # the first process prepares and packs
    corpus = corpus or data.load(config.data, config.tokenizer, model_config.vocab_size)
    sizes = dict(block_size=T, micro_batch=B, **module.batches(model_config))
    grow = config.max_steps * passes * WORLD // 2 * config.grow_context
    batches = corpus.batches(corpus.train, seed=config.seed, grow=grow, **sizes)
    sizes['kind'] = sizes['kind'].replace('packed', 'segments')
    val_batches = corpus.batches(corpus.val, seed=0, **sizes)
    if WORLD > 1 and RANK == 0: dist.barrier()
    model_config.vocab_size = corpus.tokenizer.n_vocab

    about = dict(model=name, corpus=corpus.fingerprint, **asdict(model_config), **asdict(config))
    checkpoint = find_run(out, about, config.resume)
    if checkpoint and checkpoint['step'] >= config.max_steps:
        print(f'{out} is finished, after {checkpoint["step"]} steps: python eval.py {out}')
        return out / 'ckpt.pt'

    def train_reference(model_config, train_config, suffix):
        train_config = replace(train_config, out=f'{out}-{suffix}', resume='auto')
        return train(module, model_config, train_config, corpus)

    torch.manual_seed(config.seed)
    model = getattr(module, name.upper())(model_config).to(device)
    setup = getattr(module, 'setup', lambda *_: lambda batch, g: batch)
    attach = setup(model, corpus, batches, config, autocast, train_reference, data.progress)
    optimizers = optimizers_of(model, config)
    # a packed run has no best.pt: it is validated with another memory than it is trained with
    state = checkpoint or dict(
        model_name=name, config=asdict(model_config), step=0, tokens=0, data=config.data,
        tokenizer=corpus.tokenizer.to_dict(), corpus=corpus.fingerprint,
        best=math.nan if batches.kind == 'packed' else math.inf)
    if checkpoint:
        print(f'resuming {out} from step {state["step"]}')
        model.load_state_dict(state['model'])
        for optimizer, saved in zip(optimizers, state.pop('optimizers')):
            optimizer.load_state_dict(saved)
    elif config.init:
        try:
            weights = torch.load(config.init, map_location='cpu', weights_only=True)['model']
            model.load_state_dict(weights)
        except Exception as e:                          # no such file, other names, other sizes
            raise SystemExit(f'{config.init} has no weights for this model: {str(e)[:200]!r}')
    state['model'] = model.state_dict()                 # of the live weights

    def forward(batch, progress):
        batch = batch._make(x.to(device) if torch.is_tensor(x) else x for x in batch)
        with autocast():
            return model(batch, progress)

    def gradient(step):
        """Adds that of the mean loss of this process's share of a step to .grad. -> metrics"""
        metrics = {}
        for n in range(step * passes, (step + 1) * passes):
            g = n * WORLD + RANK                        # its number in any division
            loss, more = forward(attach(batches[g], g), step / config.max_steps)
            (loss / passes).backward()                  # a mean of means: padding weighs a little
            for key, value in {'loss': loss, **more}.items():
                metrics[key] = metrics.get(key, 0) + value.detach() / passes
        return metrics

    model.kernel = config.kernel
    if config.compile == 'on' or config.compile == 'auto' and device.type == 'cuda':
        model.encode = torch.compile(model.encode)
    ran_on = f'{WORLD} x {device}, {"bf16" if bf16 else "fp32"}'
    if RANK == 0:                                       # config.json, the log up to the checkpoint
        git = subprocess.run('git describe --always --dirty', shell=True, capture_output=True,
                             cwd=Path(__file__).parent, text=True)
        ran = dict(about, command=' '.join(sys.argv), commit=git.stdout.strip(), ran_on=ran_on,
                   python=sys.version, torch=torch.__version__)
        write(out / 'config.json', json.dumps(ran, indent=1))
        kept = (out / 'log.jsonl').read_text().splitlines(True) if checkpoint else []
        write(out / 'log.jsonl', ''.join(kept[:state['step']]))
    print(f'{sum(p.numel() for p in model.parameters()):,} parameters, {passes} x {B} x {T} tokens '
          f'a step on {ran_on}, in {out}')
    print(' '.join(f'{key}={value}' for key, value in about.items()))
    check = lambda *args: validate(model, forward, val_batches, *args)
    gpu = torch.cuda.get_device_name(device) if bf16 and device.type == 'cuda' else ''
    peak = WORLD * next((flops for part, flops in PEAK_FLOPS.items() if part in gpu), 0)
    entry = loop(out, config, state, model, optimizers, gradient, check, peak)
    loss, n = entry['val_loss_all'], entry['val_tokens_all']
    bits = f', {loss / math.log(2) * n / corpus.val.n_bytes:.3f} bits per byte'
    print(f'\nvalidation, {n:,} tokens: loss {loss:.4f}, perplexity {math.exp(loss):.2f}'
          f'{bits * (not corpus.hops)}\npython eval.py {out}')
    if WORLD > 1: dist.barrier()                        # all find ckpt.pt
    return out / 'ckpt.pt'


def main(argv=None):
    module, model_config, config = parse(argv)
    if WORLD > 1:
        # AdamW imports this; after the group exists, it would keep the group's threads at exit
        importlib.import_module('torch.distributed.nn')
        cuda = hardware(config.device).type == 'cuda'
        if cuda: torch.cuda.set_device(hardware(config.device))
        dist.init_process_group('nccl' if cuda else 'gloo', timeout=datetime.timedelta(hours=6))
    if RANK > 0: sys.stdout = open(os.devnull, 'w')     # the first process prints
    for s in (signal.SIGINT, signal.SIGTERM):           # a second one ends the process at once
        signal.signal(s, lambda s, _: STOP.append(s) or signal.signal(s, signal.SIG_DFL))
    try:
        train(module, model_config, config)
    except OSError as e:
        raise SystemExit(f'train.py: {e}; with this mended, the same command resumes')
    except NotImplementedError as e:                    # of --kernel triton, or of a device
        raise SystemExit(f'train.py: {e}')
    except (RuntimeError, MemoryError) as e:
        if isinstance(e, RuntimeError) and 'allocate' not in str(e):
            raise
        B, T = model_config.micro_batch, model_config.block_size
        smaller = f'--micro-batch {B // 2}' if B > 1 else f'--block-size {T // 2}'
        raise SystemExit(f'out of memory; the next smaller size is {smaller}')
    if WORLD > 1: dist.destroy_process_group()


if __name__ == '__main__':
    main()
