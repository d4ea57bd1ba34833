"""
Trains any model of this repository: on a laptop's CPU, on one GPU, or on many under torchrun.

    $ python train.py --model trime --memory none --out out/vanilla
    $ torchrun --standalone --nproc_per_node=8 train.py --model rpt --tokens-per-step 16384

The folder of a run, out/<model> or --out, gets config.json, log.jsonl, best.pt (the weights with
the lowest validation loss; not with TRIME's memory ext) and ckpt.pt, from which the same command
resumes: on a CPU bit for bit as without interruption. More processes change the order of sums only.
"""
import os       # before torch: waiting threads spin for some 10 µs (GNU OpenMP), then sleep
os.environ |= {'OMP_WAIT_POLICY': 'PASSIVE', 'GOMP_SPINCOUNT': '1000'} | os.environ
import argparse, ctypes, datetime, difflib, importlib, inspect, json, math, platform, re, signal
import shlex, subprocess, sys, time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.distributed.nn     # if AdamW imports it later, threads remain at exit
import data

MODELS = ('trime', 'rpt', 'drt')
NOT_COMPARED = ('out', 'resume', 'device', 'compile', 'kernel')     # may differ when resuming
NOT_SHOWN = ('step', 'tokens', 'lr', 'grad_norm', 'tokens_per_s', 'val_tokens')
PEAK_FLOPS = {'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12}  # dense bf16
WORLD, RANK = int(os.environ.get('WORLD_SIZE', 1)), int(os.environ.get('RANK', 0))


@dataclass
class TrainConfig:
    data: str = 'code'              # code, shakespeare, ..., folder or file; niah, niah2, niah:TEXT
    tokenizer: Literal['bpe', 'bytes', 'gpt2', 'word'] = 'bpe'      # bpe is learned from the text
    seed: int = 0                   # of the weights, the order of the data, the model's randomness
    max_steps: int = 600            # optimizer steps
    tokens_per_step: int = 2048     # over all processes; micro-batches are accumulated to reach it
    optimizer: Literal['muon', 'adamw'] = 'muon'        # muon: for matrices; AdamW for others
    lr: float = 8e-3                # peak rate; width 256: 4e-3; AdamW: 2e-3; after --init: 1e-3
    warmup: float = 0.05            # share of the steps with rising rate; then a cosine to a tenth
    weight_decay: float = 0.1       # on matrices only
    beta2: float = 0.95             # AdamW, mean of the squared gradients
    grad_clip: float = 1.0          # largest norm of the gradient; 0: no limit
    eval_every: int = 100           # steps between validations and checkpoints
    val_tokens: int = 32768         # tokens of a validation, evenly spread; at the end it has all
    dtype: Literal['auto', 'bf16', 'fp32'] = 'auto'     # auto: bf16 where hardware is fast with it
    grow_context: bool = False      # niah: sequences grow to block_size in the first half
    init: str = ''                  # start from the weights of this .pt file, with its tokenizer
    out: str = ''                   # folder of the run; default out/<model>
    resume: Literal['auto', 'no'] = 'auto'              # auto: an unfinished run is resumed
    device: Literal['auto', 'cuda', 'cpu', 'mps'] = 'auto'      # auto: cuda if present, else cpu
    compile: Literal['auto', 'on', 'off'] = 'auto'      # torch.compile; auto: cuda on Linux
    kernel: Literal['auto', 'triton', 'torch'] = 'auto'     # of drt; auto: triton with cuda

    def __post_init__(self):
        if self.warmup > 1 or self.beta2 >= 1:
            raise ValueError('warmup is a share of the steps, at most 1; beta2 is below 1')


def numbers(least, kind):
    """The type of a flag: text -> int or float, finite and not below `least`"""
    def number(text):
        if least <= kind(text) < 2 ** 63: return kind(text)         # nan and inf are not
        raise argparse.ArgumentTypeError(f'{text} is not a number from {least} on')
    return number


def add_flags(parser, Config):
    """A flag for each field; its comment is the help. An int with default 0, or "0:", may be 0"""
    comments = dict(re.findall(r'^ +(\w+):[^#\n]*# *(.+)$', inspect.getsource(Config), re.M))
    group = parser.add_argument_group(Config.__name__)
    for f in fields(Config):
        text = comments[f.name].replace('%', '%%') + ' (default: %(default)r)'
        kind = dict(choices=c, metavar='|'.join(c)) if (c := get_args(f.type)) else {}
        if f.type is bool: kind = dict(action=argparse.BooleanOptionalAction)
        if f.type is float: kind = dict(type=numbers(0, float))
        if f.type is int: kind = dict(type=numbers(1 if f.default and '0:' not in text else 0, int))
        group.add_argument('--' + f.name.replace('_', '-'), default=f.default, help=text, **kind)


def parse_flags(parser, argv):
    """The values of all flags; an unknown one is an error that names the nearest."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near, = difflib.get_close_matches(unknown[0], parser._option_string_actions, 1, cutoff=0)
        parser.error(f'{unknown[0]} is no flag here; the nearest is {near}')
    return args


def parse(argv=None):
    """-> module of the model, its config, TrainConfig. SystemExit with one line for a bad flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda message: sys.exit(f'train.py: {message}')
    parser.add_argument('--model', default='trime', choices=MODELS, help='default: trime')
    module = importlib.import_module(parser.parse_known_args(argv)[0].model)
    parser.add_argument('--preset', default='tiny', choices=module.PRESETS, help='default: tiny')
    preset = module.PRESETS[parser.parse_known_args(argv)[0].preset]
    parser.add_argument('-h', '--help', action='help')
    configs = getattr(module, module.__name__.upper() + 'Config'), TrainConfig
    for Config in configs: add_flags(parser, Config)
    parser.set_defaults(**preset)
    args = vars(parse_flags(parser, argv))
    try:
        return module, *(C(**{f.name: args[f.name] for f in fields(C)}) for C in configs)
    except ValueError as e: parser.error(e)             # fields that do not fit together


def hardware(device):
    """The torch.device that --device names; on a CPU, glibc then keeps freed memory, up to 2 GB."""
    present = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    if device == 'auto': device = 'cuda' if present['cuda'] else 'cpu'
    if not present[device]: raise SystemExit(f'PyTorch finds no {device}: --device cpu works')
    if device == 'cpu' and platform.libc_ver()[0] == 'glibc':
        mallopt = ctypes.CDLL(None).mallopt             # else pages are freed and cleared each step
        mallopt(-3, 2 ** 25), mallopt(-1, 2 ** 31 - 1)              # M_MMAP_, M_TRIM_THRESHOLD
    return torch.device(f'cuda:{os.environ.get("LOCAL_RANK", 0)}' if device == 'cuda' else device)


def precision(device, dtype):
    """-> whether the forward pass is in bf16, and a function that returns its autocast context"""
    if device.type == 'cuda': fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:               # AMX or AMD's AVX512-BF16; with Intel's, bf16 takes twice the time of fp32
        cpu = Path('/proc/cpuinfo').read_text() if sys.platform == 'linux' else ''
        fast = 'amx_bf16' in cpu or 'avx512_bf16' in cpu and 'AuthenticAMD' in cpu
    bf16 = dtype == 'bf16' or dtype == 'auto' and fast
    rounded = 'medium' if device.type == 'cpu' else 'high'      # fp32 products may be bf16, or TF32
    torch.set_float32_matmul_precision(rounded if bf16 else 'highest')
    torch.set_flush_denormal(True)
    return bf16, lambda: torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def learning_rate(step, config):
    """Linear rise to config.lr, then a cosine down to a tenth of it."""
    rise = max(1, round(config.warmup * config.max_steps))
    done = max(0, step - rise) / max(1, config.max_steps - rise)
    cosine = 0.55 + 0.45 * math.cos(math.pi * done)         # from 1 to 0.1
    return config.lr * min(1, (step + 1) / rise) * cosine


def orthogonalize(x):
    """Roughly U Vᵀ of each x = U S Vᵀ (k, n, m): five Newton-Schulz steps, Jordan's coefficients"""
    if x.size(1) > x.size(2): return orthogonalize(x.mT).mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)
    if torch.get_float32_matmul_precision() != 'highest': x = x.bfloat16()      # see precision
    for _ in range(5):
        A = x @ x.mT                                                # (k, n, n)
        B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, B, x, beta=3.4445)                     # 3.4445 x + B x
    return x


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum (Jordan et al. 2024), scaled as AdamW's updates (arXiv 2502.16982)"""
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (params := [p for p in group['params'] if p.grad is not None]):
                self.state[p].setdefault('momentum', torch.zeros_like(p)).lerp_(p.grad, 0.05)
            for shape in {p.shape for p in params}:                 # stacked: fewer products
                alike = [p for p in params if p.shape == shape]
                ahead = [p.grad.lerp(self.state[p]['momentum'], 0.95) for p in alike]   # Nesterov's
                for p, update in zip(alike, orthogonalize(torch.stack(ahead))):
                    p.mul_(1 - group['lr'] * group['weight_decay'])
                    p.sub_(update, alpha=0.2 * max(shape) ** 0.5 * group['lr'])


def optimizers_of(model, config):
    """AdamW and Muon; with --optimizer muon, Muon has all matrices except the embedding's"""
    matrices, others, vectors = [], [], []
    for name, p in model.named_parameters():
        muon = config.optimizer == 'muon' and not name.startswith('embedding')
        (vectors if p.dim() < 2 else matrices if muon else others).append(p)
    decay = dict(weight_decay=config.weight_decay)                  # loop sets lr
    groups = [dict(params=others), dict(params=vectors, weight_decay=0)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, config.beta2), fused=True, **decay)
    return adamw, Muon([dict(params=matrices)], decay)


def write(path, content):
    """Writes text, or by torch.save, then renames: a reader finds the old file or the new one."""
    temporary = Path(f'{path}.tmp')
    try:
        with open(temporary, 'wb') as f:
            f.write(content.encode()) if isinstance(content, str) else torch.save(content, f)
        temporary.replace(path)
    except RuntimeError as e:                           # torch.save hides a full disk
        raise OSError(f'{path} cannot be written: {e}')
    finally:
        temporary.unlink(missing_ok=True)               # after a failure, as of a full disk


def check_folder(out, about, resume):
    """Makes the folder of the run; SystemExit if it has another run, whose files would be lost."""
    out.mkdir(parents=True, exist_ok=True)
    files = os.listdir(out)
    saved = json.loads((out / 'config.json').read_text()) if 'config.json' in files else {}
    differ = [key for key in about if key not in NOT_COMPARED and saved.get(key) != about[key]]
    if WORLD > 1: dist.barrier()                        # before the first process writes
    if files and (differ or resume == 'no'):
        run = str(out).removesuffix('-reference')       # a reference LM's: the run that it is for
        n = next(n for n in range(2, 10 ** 6) if not Path(f'{run}-{n}').exists())
        raise SystemExit(f'{out} has another {", ".join(differ[:4]) or "run"}; try --out {run}-{n}')


@torch.no_grad()
def validate(model, forward, batches, progress, at_most=sys.maxsize):
    """-> causal loss in nats per token of all or evenly spread micro-batches, number of tokens"""
    N, B, every = len(batches), batches.B, range(batches.n_rows)
    n = min(N, max(1, at_most // (B * batches.T)))
    chosen = torch.linspace(0, N - 1, n).round().int().tolist()[RANK::WORLD]
    total = torch.zeros(2, dtype=torch.float64)         # of the losses, of the tokens
    model.eval()
    for i in data.progress(chosen, 'validation', quiet=RANK > 0 or n < N):
        rows = every[i::N] if batches.kind == 'documents' else every[i * B:i * B + B]
        batch = batches.take(rows, seed=i)              # rows far apart; else in text order
        scored = (batch.targets >= 0).sum().item()
        total += torch.tensor([forward(batch, progress)[0].item() * scored, scored])
    model.train()
    if WORLD > 1: dist.all_reduce(total := total.to(next(model.parameters()).device))
    return (total[0] / total[1]).item(), int(total[1])


def loop(out, config, state, model, optimizers, gradient, check, peak):
    """Steps, validations and checkpoints, until the last step or a signal; peak: in tokens/s"""
    began, first = time.time(), state['step']
    if RANK == 0:                                       # the log up to the checkpoint
        with open(out / 'log.jsonl', 'a') as f: f.truncate(min(f.tell(), state['log_size']))
    for done in range(first, config.max_steps):
        start, step, progress = time.time(), done + 1, done / config.max_steps
        lr = learning_rate(done, config)
        metrics = gradient(done)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        for optimizer in optimizers:
            for group in optimizer.param_groups: group['lr'] = lr
            optimizer.step()
        model.zero_grad()
        metrics = {key: x.item() for key, x in metrics.items()}     # waits for the GPU
        speed = config.tokens_per_step / (time.time() - start)
        stopped, last = metrics.pop('stopped') > 0, step == config.max_steps
        due = last or step % config.eval_every == 0
        entry = dict(step=step, tokens=state['tokens'] + config.tokens_per_step, **metrics, lr=lr,
                     grad_norm=norm.item(), tokens_per_s=speed)
        if peak: entry['mfu'] = speed / peak
        if torch.cuda.is_initialized(): entry['gb'] = torch.cuda.max_memory_allocated() / 2 ** 30
        if due: entry['val_loss'], entry['val_tokens'] = check(progress, config.val_tokens)
        if last: entry['val_loss_all'], _ = check(progress)
        if not all(map(math.isfinite, entry.values())):
            raise SystemExit(f'step {step} is not finite; try a lower --lr, another --out: {entry}')
        if RANK == 0:
            left = (time.time() - began) / (step - first) * (config.max_steps - step) / 60
            if step == 10 and left > 5:
                print(f'{left:.0f} min; --max-steps {4 * config.max_steps / left:.0f} takes 4 min')
            if due or step == 1 or step % max(1, config.max_steps // 30) == 0:
                shown = [f'{key} {x:.4f}' for key, x in entry.items() if key not in NOT_SHOWN]
                shown += [f'{speed:,.0f} tokens/s', f'{left:.1f} min left']
                print(f'step {step:6d}/{config.max_steps}', *shown, sep=' | ', flush=True)
            with open(out / 'log.jsonl', 'a') as f:
                f.write(json.dumps(entry) + '\n')
                state.update(step=step, tokens=entry['tokens'], log_size=f.tell())
            if due and entry['val_loss'] < state['best']:
                state['best'] = entry['val_loss']
                write(out / 'best.pt', state)
            if due or stopped:
                write(out / 'ckpt.pt', dict(state, optimizers=[x.state_dict() for x in optimizers]))
        if stopped: raise SystemExit(f'stopped at step {step}; run it again to resume')


def train(module, model_config, config, corpus=None):
    """One run, from its configuration to its folder. -> the path of ckpt.pt"""
    name, out = module.__name__, Path(config.out or f'out/{module.__name__}')
    bf16, autocast = precision(device := hardware(config.device), config.dtype)
    B, T = model_config.micro_batch, model_config.block_size
    passes, rest = divmod(n := config.tokens_per_step, WORLD * B * T)
    if rest: raise SystemExit(f'--tokens-per-step {n}: no multiple of {WORLD} x {B} x {T} tokens')
    resumes = (out / 'ckpt.pt').exists()
    path = out / 'ckpt.pt' if resumes else config.init              # '': new weights
    try:
        state = torch.load(path, 'cpu', weights_only=True) if path else {}
        tokenizer = data.Tokenizer(**state['tokenizer']) if config.init else config.tokenizer
    except Exception as e: raise SystemExit(f'{path} is no checkpoint: {e!r:.200}')
    if RANK > 0: dist.barrier()                         # the first process prepares the data
    corpus = corpus or data.load(config.data, tokenizer, model_config.vocab_size)
    if RANK == 0 and WORLD > 1: dist.barrier()
    sizes = dict(block_size=T, micro_batch=B, **module.batches(model_config))
    grow = config.max_steps * passes * WORLD // 2 * config.grow_context
    batches = corpus.batches(corpus.train, seed=config.seed, grow=grow, **sizes)
    val_batches = corpus.batches(corpus.val, seed=0, **dict(sizes, bm25=False))
    config.tokenizer, model_config.vocab_size = corpus.tokenizer.name, corpus.tokenizer.n_vocab
    about = dict(model=name, corpus=corpus.fingerprint, **asdict(model_config), **asdict(config))
    check_folder(out, about, config.resume)
    torch.manual_seed(config.seed)
    model = getattr(module, name.upper())(model_config).to(device)
    if path:
        try: model.load_state_dict(state['model'])
        except Exception:
            other = {key: x for key, x in state['config'].items() if about.get(key) != x}
            raise SystemExit(f'{path} has weights of {state["model_name"]} with {other}')
    train_reference = lambda c, config: train(
        module, c, replace(config, out=f'{out}-reference', resume='auto'), corpus)
    setup = getattr(module, 'setup', lambda *_: lambda batch, g: batch)
    attach = setup(model, corpus, batches, config, autocast, train_reference, data.progress)
    optimizers = optimizers_of(model, config)
    if resumes:
        for optimizer, saved in zip(optimizers, state.pop('optimizers')):
            optimizer.load_state_dict(saved)
    else:           # a packed run has no best.pt, as it is validated with another memory
        state = dict(
            model_name=name, config=asdict(model_config), data=config.data, step=0, log_size=0,
            corpus=corpus.fingerprint, tokenizer=corpus.tokenizer.to_dict(),
            tokens=state.get('tokens', 0), best=math.nan if batches.kind == 'packed' else math.inf)
    state['model'] = model.state_dict()                 # of the live weights
    n_weights = sum(p.numel() for p in model.parameters())
    ran_on = f'{WORLD} x {device}, {"bf16" if bf16 else "fp32"}'
    print(*(f'{key}={value}' for key, value in about.items()))
    print(f'{out} from step {state["step"]}/{config.max_steps}: {n_weights:,} weights, {ran_on}')
    if RANK == 0 and not resumes:
        git = f'git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty'
        ran = dict(command=shlex.join(sys.argv), commit=subprocess.getoutput(git + ' 2>/dev/null'),
                   ran_on=ran_on, python=sys.version, torch=torch.__version__)
        write(out / 'config.json', json.dumps(about | ran, indent=1))

    def forward(batch, progress):
        batch = batch._make(x.to(device) if torch.is_tensor(x) else x for x in batch)
        with autocast(): return model(batch, progress)

    def gradient(step):
        """Sets .grad to that of the mean loss of the micro-batches of a step. -> metrics"""
        metrics = {}
        for i in range(passes):
            g = (step * passes + i) * WORLD + RANK      # its number for any WORLD
            loss, more = forward(attach(batches[g], g), step / config.max_steps)
            (loss / passes).backward()                  # with padding not the mean over tokens
            for key, value in {'loss': loss, **more}.items():
                metrics[key] = metrics.get(key, 0) + value.detach() / passes
        metrics['stopped'] = torch.full_like(metrics['loss'], len(signals))
        if WORLD > 1:                                   # the means over all
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            for x in [*grads, *metrics.values()]: dist.all_reduce(x.div_(WORLD))
        return metrics

    model.kernel = config.kernel
    on = dict(on=True, auto=device.type == 'cuda' and sys.platform == 'linux').get(config.compile)
    if on: model.encode = torch.compile(model.encode, dynamic=False)
    gpu = torch.cuda.get_device_name(device) if bf16 and device.type == 'cuda' else ''
    flops = WORLD * next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), 0)
    check = lambda *args: validate(model, forward, val_batches, *args)
    signals = []        # the first one ends the loop after its step; a second one acts as outside
    receive = lambda s, _: (signals.append(s), signal.signal(s, outside[s]))
    outside = {s: signal.signal(s, receive) for s in (signal.SIGINT, signal.SIGTERM)}
    try: loop(out, config, state, model, optimizers, gradient, check, peak=flops / (6 * n_weights))
    finally:
        for s in outside: signal.signal(s, outside[s])
    if signals: raise SystemExit('stopped; run it again to resume')
    print(f'finished: python eval.py {out}')
    if WORLD > 1: dist.barrier()                        # all find ckpt.pt
    return out / 'ckpt.pt'


def main(argv=None):
    module, model_config, config = parse(argv)
    if WORLD > 1:
        cuda = hardware(config.device).type == 'cuda'
        if cuda: torch.cuda.set_device(hardware(config.device))
        dist.init_process_group('nccl' if cuda else 'gloo', timeout=datetime.timedelta(hours=6))
    if RANK > 0: sys.stdout = open(os.devnull, 'w')     # the first process prints
    try: train(module, model_config, config)
    except (OSError, NotImplementedError, KeyboardInterrupt, json.JSONDecodeError) as e:
        raise SystemExit(f'train.py: {str(e) or "stopped"}')
    except (RuntimeError, MemoryError) as e:
        if 'allocate' not in str(e): raise
        B, T = model_config.micro_batch, model_config.block_size
        smaller = f'--micro-batch {B // 2}' if B > 1 else f'--block-size {T // 2}'
        raise SystemExit(f'out of memory; try {smaller} and another --out')
    if WORLD > 1: dist.destroy_process_group()


if __name__ == '__main__':
    sys.stdout.reconfigure(errors='replace')            # a console may lack some characters
    main()
