"""
Trains any model of this repository: on a laptop's CPU, on one GPU, or on many under torchrun.

    $ python train.py --model trime --memory none --out out/vanilla
    $ torchrun --standalone --nproc_per_node=8 train.py --model rpt --tokens-per-step 16384

The folder of a run, out/<model> or --out, gets config.json, log.jsonl, best.pt (the weights with
the lowest validation loss; not with TRIME's memory ext) and ckpt.pt, from which the same command
resumes: on a CPU bit for bit as without interruption. More processes change the order of sums only.
A folder with other files but no ckpt.pt is left as it is. One program at a time trains in a folder.

What train.py and eval.py use of a model file x.py, for B sequences of T or t tokens, V ids:

    XConfig                 a dataclass; each field is a flag
    PRESETS                 {name: values of some fields, of this config and of TrainConfig}
    COMPILED                classes of layers, for torch.compile
    batches(config)         arguments of data.Corpus.batches: what a micro-batch consists of
    setup(model, corpus, batches, config, autocast, load_reference, progress)
                            optional, before training: computes what a teacher knows; returns None
                            or attach(batch, g), which adds that to micro-batch g, a data.Batch
    X(config)               the model
    .forward(batch, progress)   loss () and a dict of numbers () to log; batch: tokens, targets, doc
                            (B, T), and a seed of all its random draws; progress: step / max_steps
    .stream(tokens, state)  log P (B, t, V) of the token after each of tokens (B, t), which continue
                            the text of state or begin one (None); the new state
    .PIECE                  the largest t of a call of stream
    .log_probs(tokens)      log P alone, of whole texts
    .read(tokens, state)    the new state alone, for any t
    .ways()                 {'on': ..., 'shuffled': ..., 'off': ...}: attributes of the model to set
    .trace(tokens, t, state)    what is retrieved to predict token t + 1 of tokens (n,), by the
                            state of tokens[:t]: [(weight, ids, start, end)], largest first
    .prepare_eval(...)      optional: computes what an evaluation needs
    EvalConfig, TASKS       optional: flags and tasks of eval.py for this model only
"""
import os       # before torch: waiting threads spin for some 10 µs (GNU OpenMP), then sleep
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
os.environ.setdefault('GOMP_SPINCOUNT', '1000')
import argparse, collections, contextlib, ctypes, datetime, difflib, functools, importlib, inspect
import json, math, platform, re, shlex, signal, subprocess, sys, time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.distributed.nn     # if AdamW imports it later, threads remain at exit
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
import data

try:
    import fcntl
except ImportError:                 # on Windows
    fcntl = None

MODELS = 'trime', 'rpt', 'drt'
NOT_COMPARED = 'data', 'out', 'resume', 'device', 'compile', 'kernel', 'max_steps'  # when resumed
NOT_SHOWN = 'step', 'tokens', 'lr', 'grad_norm', 'tokens_per_s', 'val_tokens'
LOCK = 'lock'                                   # a file in the folder of a run while it trains
PEAK_FLOPS = {'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12}  # dense bf16
WORLD = int(os.getenv('WORLD_SIZE', 1))         # processes
RANK = int(os.getenv('RANK', 0))                # number of this one


# --------------------------------------------------------------------------------------------------
# flags, each from a field of a config
path = os.path.expanduser       # the type of a flag: a shell does not expand the ~ of --out=~/x


def source(text):
    """The type of --data: the name of a corpus, or a path, which becomes absolute, because eval.py
    may run in another folder; also after niah: and niah2:"""
    task = re.match('(niah2?:)?', text)[0]
    name = path(text.removeprefix(task))
    if os.path.exists(name) and name not in ('code', *data.DOWNLOADS):
        name = os.path.abspath(name)
    return task + name


@dataclass
class TrainConfig:
    data: source = 'code'           # code, shakespeare, ..., folder or file; niah, niah2, niah:TEXT
    tokenizer: Literal['bpe', 'bytes', 'gpt2', 'word'] = 'bpe'      # bpe is learned from the text
    seed: int = 0                   # of the weights, the order of the data, the model's randomness
    max_steps: int = 600            # optimizer steps; a larger number resumes a finished run
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
    init: path = ''     # a .pt file, or a run's last one: its weights, tokenizer, model's settings
    out: path = ''                  # folder of the run
    resume: Literal['auto', 'no'] = 'auto'              # auto: the run in the folder is resumed
    device: Literal['auto', 'cuda', 'cpu', 'mps'] = 'auto'      # auto: cuda if present, else cpu
    compile: Literal['auto', 'on', 'off'] = 'auto'      # torch.compile; auto: cuda on Linux
    kernel: Literal['auto', 'triton', 'torch'] = 'auto'     # of drt; auto: triton with cuda

    def __post_init__(self):
        if min(self.max_steps, self.tokens_per_step, self.eval_every, self.val_tokens) < 1:
            raise ValueError('max_steps, tokens_per_step, eval_every, val_tokens are 1 or more')
        if self.warmup > 1 or self.beta2 >= 1:
            raise ValueError('warmup is a share of the steps, at most 1; beta2 is below 1')


def add_flags(parser, Config):
    """A flag for each field of a config. Its help is the comment after the field: the text of the
    class has it, as `    lr: float = 8e-3     # peak rate`."""
    text = inspect.getsource(Config).replace('%', '%%')         # % is special in a help
    comments = dict(re.findall(r'^ +(\w+):[^#\n]*# *(.+)$', text, re.M))
    group = parser.add_argument_group(Config.__name__)
    for f in fields(Config):
        choices = get_args(f.type)                      # of a Literal
        kind = dict(type=f.type)
        if choices:
            kind = dict(choices=choices)
        if f.type is bool:
            kind = dict(action=argparse.BooleanOptionalAction)
        group.add_argument(f'--{f.name.replace("_", "-")}', default=f.default,
                           help=f'{comments[f.name]} (default: %(default)r)', **kind)


def parse_flags(parser, argv):
    """The values of all flags. An unknown one is an error that names the nearest. What has to be 1
    or more is checked by the configs."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0], parser._option_string_actions, cutoff=0)
        parser.error(f'{unknown[0]} is no flag here; the nearest is {near[0]}')
    for name, x in vars(args).items():
        if isinstance(x, int | float) and not 0 <= x < 2 ** 63:         # or nan
            parser.error(f'--{name.replace("_", "-")} {x} is not a number from 0 on')
    return args


def parse(argv=None):
    """-> module of the model, its config, TrainConfig. SystemExit with one line for a bad flag."""
    # the model has flags, with defaults, and presets, which replace some of the defaults
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda message: sys.exit(f'train.py: {message}')
    parser.add_argument('--model', default='trime', choices=MODELS, help='default: trime')
    name = parser.parse_known_args(argv)[0].model
    module = importlib.import_module(name)
    parser.add_argument('--preset', default='tiny', choices=module.PRESETS, help='default: tiny')
    configs = getattr(module, f'{name.upper()}Config'), TrainConfig
    for Config in configs:
        add_flags(parser, Config)
    parser.set_defaults(out=f'out/{name}')
    args, _ = parser.parse_known_args(argv)
    parser.set_defaults(**module.PRESETS[args.preset])

    # the file of --init replaces those of the model's fields, and the tokenizer
    if args.init:
        file = start_of(args)
        state, _, tokenizer = read_checkpoint(file)
        if state['model_name'] != name:
            parser.error(f'{file} has weights of another model: --model {state["model_name"]}')
        parser.set_defaults(**state['config'], tokenizer=tokenizer)

    # what is on the command line comes before all defaults
    parser.add_argument('-h', '--help', action='help')
    values = vars(parse_flags(parser, argv))
    try:
        return module, *(C(**{f.name: values[f.name] for f in fields(C)}) for C in configs)
    except ValueError as e:                             # fields that do not fit together
        parser.error(e)


# --------------------------------------------------------------------------------------------------
# hardware
def hardware(device):
    """The torch.device that --device names; on a CPU, glibc then keeps freed memory, up to 2 GB."""
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if not torch.get_device_module(device).is_available():
        raise SystemExit(f'PyTorch finds no {device}: --device cpu works')
    if device == 'cpu' and platform.libc_ver()[0] == 'glibc':
        mallopt = ctypes.CDLL(None).mallopt             # else pages are freed and cleared each step
        mallopt(-3, 2 ** 25)                            # M_MMAP_THRESHOLD
        mallopt(-1, 2 ** 31 - 1)                        # M_TRIM_THRESHOLD
    if device == 'cuda':
        device = f'cuda:{os.getenv("LOCAL_RANK", 0)}'
        torch.cuda.set_device(device)
    return torch.device(device)


def precision(device, dtype):
    """-> whether the forward pass is in bf16, and a function that returns its autocast context"""
    if device.type == 'cuda':
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:               # AMX or AMD's AVX512-BF16; with Intel's, bf16 takes twice the time of fp32
        cpu = Path('/proc/cpuinfo').read_text() if sys.platform == 'linux' else ''
        fast = 'amx_bf16' in cpu or 'avx512_bf16' in cpu and 'AuthenticAMD' in cpu
    bf16 = dtype == 'bf16' or dtype == 'auto' and fast
    rounded = 'medium' if device.type == 'cpu' else 'high'      # fp32 products may be bf16, or TF32
    torch.set_float32_matmul_precision(rounded if bf16 else 'highest')
    torch.set_flush_denormal(True)
    return bf16, lambda: torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def peak_tokens_per_s(device, bf16, n_params):
    """What mfu (model FLOPs utilization) is a share of: a token takes 6 FLOPs for each parameter.
    None if the peak of the hardware is not known"""
    if bf16 and device.type == 'cuda':
        for name, flops in PEAK_FLOPS.items():
            if name in torch.cuda.get_device_name(device):
                return WORLD * flops / (6 * n_params)


# --------------------------------------------------------------------------------------------------
# optimizers
def learning_rate(step, config):
    """Linear rise to config.lr, then a cosine down to a tenth of it."""
    rise = max(1, round(config.warmup * config.max_steps))
    done = max(0, step - rise) / max(1, config.max_steps - rise)
    cosine = 0.55 + 0.45 * math.cos(math.pi * done)         # from 1 to 0.1
    return config.lr * min(1, (step + 1) / rise) * cosine


def orthogonalize(x):
    """Roughly U Vᵀ of each matrix x = U S Vᵀ: five Newton-Schulz steps with Jordan's coefficients,
    x <- a x + b (x xᵀ) x + c (x xᵀ)² x, bring all singular values near 1. x (k, n, m) -> as x"""
    if x.size(1) > x.size(2): return orthogonalize(x.mT).mT         # so x xᵀ is the smaller product
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)              # singular values up to 1
    if torch.get_float32_matmul_precision() != 'highest':
        x = x.bfloat16()                                            # fast here, see precision
    for _ in range(5):
        A = x @ x.mT                                                # (k, n, n)
        B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)      # b A + c A²
        x = torch.baddbmm(x, B, x, beta=3.4445)                     # a x + B x
    return x


class Muon(torch.optim.Optimizer):
    """Each matrix p (n, m) moves along its momentum, orthogonalized (Jordan et al. 2024) and scaled
    to the size of AdamW's updates (arXiv 2502.16982):

        M <- 0.95 M + 0.05 G        p <- (1 - lr λ) p - 0.2 sqrt(max(n, m)) lr U Vᵀ

    G is the gradient, λ the weight decay; U Vᵀ is of Nesterov's 0.95 M + 0.05 G, with the new M."""
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            # matrices of a shape are stacked, as fewer products are faster
            params = [p for p in group['params'] if p.grad is not None]
            for shape in {p.shape for p in params}:
                alike = [p for p in params if p.shape == shape]
                ahead = []
                for p in alike:
                    momentum = self.state[p].setdefault('momentum', torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.05)
                    ahead.append(p.grad.lerp(momentum, 0.95))       # Nesterov's
                updates = orthogonalize(torch.stack(ahead))         # (k, n, m)
                for p, update in zip(alike, updates):
                    p.mul_(1 - group['lr'] * group['weight_decay'])
                    p.sub_(update, alpha=0.2 * max(shape) ** 0.5 * group['lr'])


def optimizers_of(model, config):
    """AdamW and Muon; with --optimizer muon, Muon has all matrices except the embedding's. Vectors
    (norms, biases) do not decay. `loop` sets the rates."""
    matrices, others, vectors = [], [], []
    for name, p in model.named_parameters():
        group = others
        if p.dim() < 2:
            group = vectors
        elif config.optimizer == 'muon' and p.dim() == 2 and not name.startswith('embedding'):
            group = matrices
        group.append(p)

    groups = [dict(params=others), dict(params=vectors, weight_decay=0)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, config.beta2), fused=True,
                              weight_decay=config.weight_decay)
    return adamw, Muon([dict(params=matrices)], dict(weight_decay=config.weight_decay))


# --------------------------------------------------------------------------------------------------
# files of a run, and its processes
def barrier():
    """Waits until all processes are here."""
    if WORLD > 1:
        dist.barrier()


def write(path, content):
    """Writes text, or other content by torch.save, to a temporary file, then renames it: whenever
    the program is killed, there is no incomplete file of this name."""
    temporary = Path(f'{path}.{os.getpid()}.tmp')
    try:
        if isinstance(content, str):
            temporary.write_text(content, 'utf-8')
        else:
            torch.save(content, temporary)
        temporary.replace(path)
    except RuntimeError as e:                           # torch.save hides a full disk
        raise OSError(f'{path} cannot be written: {e}')
    finally:
        temporary.unlink(missing_ok=True)               # after a failure, as of a full disk


def save(out, state, optimizers):
    """Writes ckpt.pt."""
    write(out / 'ckpt.pt', dict(state, optimizers=[x.state_dict() for x in optimizers]))


def start_of(config):
    """The file that a run starts from: its last checkpoint, else that of --init, else none, ''"""
    file = Path(config.out, 'ckpt.pt')
    return file if file.exists() else config.init


def read_checkpoint(path):
    """A file that `loop` wrote here or elsewhere, or ckpt.pt in a folder -> its state, the model in
    fp32, the Tokenizer"""
    try:
        path = Path(path).expanduser()
        if path.is_dir():
            path /= 'ckpt.pt'
        state = torch.load(path, 'cpu', weights_only=True)
        name, config = state['model_name'], state['config']
        assert name in MODELS, name
        module = importlib.import_module(name)
        Config = getattr(module, f'{name.upper()}Config')
        config = state['config'] = vars(Config()) | config          # newer fields: the defaults
        tokenizer = data.Tokenizer(**state['tokenizer'])
        model = getattr(module, name.upper())(Config(**config))
        model.load_state_dict(state['model'])
        for key, x in model.state_dict().items():
            assert x.isfinite().all(), key
        return state, model, tokenizer
    except Exception as e:                              # a broken file can raise anything
        raise SystemExit(f'{path} is not a checkpoint of this version: {e!r:.200}')


@contextlib.contextmanager
def locked(out):
    """Makes the folder of a run, and keeps other programs from training in it. The lock ends with
    the process, by kill -9 too. If the folder remains empty, it is removed."""
    out.mkdir(parents=True, exist_ok=True)
    if RANK > 0:                                        # the first process has the lock
        yield
        return

    file = open(out / LOCK, 'a')
    try:
        if fcntl:                                       # on Windows there is none, and no lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert os.path.samestat(os.fstat(file.fileno()), os.stat(out / LOCK))
    except (BlockingIOError, FileNotFoundError, AssertionError):    # or its program has just ended
        raise SystemExit(f'{out} is in use by another program; try another --out')
    except OSError:                                     # of a file system without locks
        pass

    try:
        for incomplete in out.glob('*.*.tmp'):          # of a killed program
            incomplete.unlink(missing_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):      # it has files; Windows removes no open file
            (out / LOCK).unlink(missing_ok=True)
            file.close()
            out.rmdir()


def check_folder(out, about, state):
    """SystemExit, unless the folder is empty or has the run that is resumed: no file is lost.
    about: config.json as it will be; state: what the run starts from, its checkpoint if it has one
    -> --max-steps of the run until now, None if it is new"""
    files = sorted({*os.listdir(out)} - {LOCK, 'config.json'})      # that of a run killed at once
    saved, trouble = {}, ''
    if 'ckpt.pt' in files:
        try:
            saved = saved | json.loads((out / 'config.json').read_text('utf-8'))
        except Exception as e:                          # a broken file can raise anything
            raise SystemExit(f'{out}/config.json is damaged ({e!r:.200}): --init {out}/ckpt.pt '
                             'with another --out starts from its weights')
        saved |= dict(state['config'], corpus=state['corpus'], model=state['model_name'])
        differ = [key for key in about if key not in NOT_COMPARED and saved.get(key) != about[key]]
        if differ or about['resume'] == 'no':
            trouble = f'has another {", ".join(differ[:4]) or "run"}'
        elif state['step'] > about['max_steps']:
            trouble = f'has {state["step"]} steps; a larger --max-steps resumes it'
    elif files:
        trouble = f'is not empty and has no run to resume: {", ".join(files[:4])}'
    barrier()                                           # before the first process writes

    # the message has a name that is free
    if trouble:
        run, i = str(out).removesuffix('-reference'), 2     # not a reference LM's, but its run's
        while Path(f'{run}-{i}').exists():
            i += 1
        message = f'{out} {trouble}; try --out {run}-{i}'
        if 'best.pt' in files:
            message += f'; --init {out}/best.pt has its weights'
        raise SystemExit(message)
    return saved.get('max_steps')


def write_config(out, about, ran_on):
    """Writes config.json: all settings, and what is needed to repeat the run."""
    git = f'git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty'
    ran = dict(command=shlex.join(sys.argv), commit=subprocess.getoutput(f'{git} 2>/dev/null'),
               ran_on=ran_on, python=sys.version, torch=torch.__version__)
    write(out / 'config.json', json.dumps(about | ran, indent=1))


# --------------------------------------------------------------------------------------------------
# training
@contextlib.contextmanager
def caught_signals():
    """A list, to which a SIGINT, SIGTERM or SIGHUP is appended: `loop` then ends after its step, so
    that it can write a checkpoint. A second signal has the effect that it has outside."""
    caught, outside = [], {}

    def receive(number, frame):
        caught.append(number)
        signal.signal(number, outside[number])

    for number in {1, 2, 15} & signal.valid_signals():  # SIGHUP (not on Windows), SIGINT, SIGTERM
        if signal.getsignal(number) != signal.SIG_IGN:          # nohup ignores SIGHUP
            outside[number] = signal.signal(number, receive)
    try:
        yield caught
    finally:
        for number, handler in outside.items():
            signal.signal(number, handler)


@torch.no_grad()
def validate(model, forward, batches, progress, at_most=sys.maxsize):
    """The loss without memory of later tokens, of all micro-batches or of evenly spread ones with
    at most these tokens -> nats per token, the number of tokens"""
    # n of N micro-batches; each process has its share of them
    N, B = len(batches), batches.B
    n = min(N, max(1, at_most // (B * batches.T)))
    chosen = torch.linspace(0, N - 1, n).round().int().tolist()[RANK::WORLD]

    # nats and tokens, added up
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for i in data.progress(chosen, 'validation', quiet=RANK > 0 or n < N):
        rows = range(batches.n_rows)[i * B:i * B + B]   # in text order
        if batches.kind == 'documents':
            rows = range(i, batches.n_rows, N)          # of B documents: a sample has more of them
        batch = batches.take(rows, seed=i)
        scored = (batch.targets >= 0).sum().item()
        loss, _ = forward(batch, progress)
        total += torch.tensor([loss.item() * scored, scored])
    model.train()

    # the sums over all processes
    if WORLD > 1:
        total = total.to(next(model.parameters()).device)
        dist.all_reduce(total)
    nats, n_tokens = total.tolist()
    return nats / n_tokens, int(n_tokens)


def average(tensors):
    """Replaces tensors by their means over the processes. They are sent in messages of 16 MB, as
    each message takes time, and as large ones take longer."""
    flat = parameters_to_vector(tensors).div_(WORLD)
    for message in flat.split(2 ** 22):
        dist.all_reduce(message)
    vector_to_parameters(flat, tensors)


def compile_layers(model, classes):
    """Applies torch.compile to the layers, not to the whole model: layers of a class share their
    machine code, so that many compile as quickly as one."""
    torch.compiler.reset()                              # a reference LM's are not needed any more
    torch._dynamo.config.cache_size_limit = 64          # kinds of layers, lengths of --grow-context
    layers = [layer for layer in model.modules() if isinstance(layer, classes)]
    print(f'the first step compiles {len(layers)} layers; many take minutes (--compile off)')
    for layer in layers:
        layer.compile(dynamic=False)


def show(entry, max_steps, left):
    """Prints the metrics of a step in a line: losses with four decimals, the rest with four digits,
    so that a count has no decimals."""
    columns = [f'step {entry["step"]:6d}/{max_steps}']
    for key, x in entry.items():
        if key not in NOT_SHOWN:
            digits = '.4f' if 'loss' in key else '.4g'
            columns.append(f'{key} {x:{digits}}')
    print(*columns, f'{entry["tokens_per_s"]:,.0f} tokens/s', left, sep=' | ')


def loop(out, config, state, model, optimizers, gradient, check, signals, peak, stage):
    """Steps, validations and checkpoints, until the last step or a signal.

    state: what a checkpoint has, but the optimizers    gradient(done): sets .grad -> metrics
    check(progress, at_most): validates    signals: see caught_signals    peak: in tokens/s"""
    began, first, max_steps = time.perf_counter(), state['step'], config.max_steps
    if RANK == 0:                       # the log may have steps after the checkpoint: remove them
        with open(out / 'log.jsonl', 'a') as f:
            f.truncate(min(f.tell(), state['log_size']))

    for done in range(first, max_steps):
        # one step of training
        start, step, progress = time.perf_counter(), done + 1, done / max_steps
        lr = learning_rate(done, config)
        metrics = gradient(done)
        # a signal may reach one process only; as a metric it stops all at the same step
        metrics['stopped'] = torch.full_like(metrics['loss'], len(signals))
        if WORLD > 1:       # gradients and metrics become their means over the processes
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            average([*grads, *metrics.values()])
        norm = clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group['lr'] = lr
            optimizer.step()
        model.zero_grad()
        metrics = {key: x.item() for key, x in metrics.items()}     # waits for the GPU
        stopped = metrics.pop('stopped') > 0
        speed = config.tokens_per_step / max(1e-9, time.perf_counter() - start)     # a coarse clock

        # its entry in the log, with a validation if it is due
        last = step == max_steps
        due = last or step % config.eval_every == 0
        state['step'] = step
        state['tokens'] += config.tokens_per_step
        entry = dict(step=step, tokens=state['tokens'], **metrics, lr=lr,
                     grad_norm=norm.item(), tokens_per_s=speed)
        if peak:
            entry['mfu'] = speed / peak
        if torch.cuda.is_initialized():
            entry['gb'] = torch.cuda.max_memory_allocated() / 2 ** 30
        if due:
            entry['val_loss'], entry['val_tokens'] = check(progress, config.val_tokens)
        if last:
            entry['val_loss_all'], _ = check(progress)
        if not all(map(math.isfinite, entry.values())):
            raise SystemExit(f'step {step} has a number that is not finite; try a lower --lr and '
                             f'another --out: {entry}')

        # the log and checkpoints, then a line on the console
        if RANK == 0:
            with open(out / 'log.jsonl', 'a') as f:
                f.write(json.dumps(entry) + '\n')
                state['log_size'] = f.tell()
            if due and entry['val_loss'] < state['best']:
                state['best'] = entry['val_loss']
                write(out / 'best.pt', state)
            if due or stopped:
                save(out, state, optimizers)
            left = (time.perf_counter() - began) / 60 / (step - first) * (max_steps - step)
            if done == first:
                print(f'the first step took {config.tokens_per_step / speed:.1f} s')
            if step == 10 and left > 5:
                few = 4 * (max_steps - step) / left
                print(f'{left:.0f} min left; with --max-steps {few:.0f} about 4')
            if due or step == 1 or step % max(1, max_steps // 30) == 0:
                show(entry, max_steps, f'{left:.1f} min left{stage}')
        if stopped or last and signals:
            raise SystemExit(f'stopped at step {step}; run it again to resume')
    barrier()                           # until ckpt.pt is written


def train(module, model_config, config, corpus=None, stage=''):
    """A run, from its configuration to its folder. With a corpus it is a stage of another run, as
    RPT's reference LM is; `stage` ends the lines of its steps."""
    # where it runs, and how many micro-batches a process has in a step
    name, out, max_steps = module.__name__, Path(config.out), config.max_steps
    device = hardware(config.device)
    bf16, autocast = precision(device, config.dtype)
    ran_on = f'{WORLD} x {device}, {"bf16" if bf16 else "fp32"}'
    B, T = model_config.micro_batch, model_config.block_size
    passes, rest = divmod(config.tokens_per_step, WORLD * B * T)
    if rest:
        raise SystemExit(f'--tokens-per-step {config.tokens_per_step}: no multiple of processes x '
                         f'micro_batch x block_size = {WORLD} x {B} x {T} = {WORLD * B * T}')

    # what it starts from: its last checkpoint, the file of --init, or new weights
    file = start_of(config)
    resumes = file != config.init
    state = read_checkpoint(file)[0] if file else {}

    # the data; the first process prepares the corpus on disk, then the others open it
    if RANK > 0:
        barrier()
    corpus = corpus or data.load(config.data, config.tokenizer, model_config.vocab_size)
    if RANK == 0:
        barrier()
    sizes = dict(block_size=T, micro_batch=B, **module.batches(model_config))
    # grow: the micro-batches of the first half of the run
    grow = config.grow_context * max_steps * passes * WORLD // 2
    batches = corpus.batches(corpus.train, seed=config.seed, grow=grow, **sizes)
    val_batches = corpus.batches(corpus.val, seed=0, **dict(sizes, bm25=False))     # not packed

    # the folder of the run
    config.tokenizer = corpus.tokenizer.name
    model_config.vocab_size = corpus.tokenizer.n_vocab
    about = dict(model=name, corpus=corpus.fingerprint, hops=corpus.hops,
                 **vars(model_config), **vars(config))
    planned = check_folder(out, about, state)

    # the model, and the state of the run: what a checkpoint has
    torch.manual_seed(config.seed)
    model = getattr(module, name.upper())(model_config).to(device)
    if file:
        try:
            model.load_state_dict(state['model'])
        except RuntimeError:                            # of other shapes
            differ = dict(state['config'].items() - about.items())
            raise SystemExit(f'{file} has weights for other settings: {differ}')
    if not resumes:     # no loss is below nan: a packed run, validated otherwise, has no best.pt
        state = dict(
            model_name=name, config=vars(model_config), data=config.data, step=0, log_size=0,
            corpus=corpus.fingerprint, tokenizer=corpus.tokenizer.to_dict(),
            tokens=state.get('tokens', 0), best=math.nan if sizes['kind'] == 'packed' else math.inf)
    state['model'] = model.state_dict()                 # the same tensors: steps change them, too

    # what the console shows of it
    n_params = sum(map(torch.numel, model.parameters()))
    defaults = vars(type(model_config)) | vars(TrainConfig) | module.PRESETS['tiny']
    changed = [f'{key}={x}' for key, x in about.items() if x != defaults.get(key, x)]
    print(f'{out}: {name}, {n_params:,} parameters, {ran_on}, step {state["step"]} of {max_steps}\n'
          'settings other than the defaults:', *changed)

    # what has to be known before the first step: in RPT, scores by a reference LM
    def load_reference(path, reference_config, config):
        """What read_checkpoint returns of a run or file; path '': of a run that is trained here"""
        if not path:
            path = config.out
            with locked(Path(path)):
                train(module, reference_config, config, corpus, ' in this stage')
        return read_checkpoint(path)

    setup = getattr(module, 'setup', lambda *_: None)
    attach = setup(model, corpus, batches, config, autocast, load_reference, data.progress)

    # a forward pass; the gradient of a step
    def forward(batch, progress):
        batch = batch._make(x.to(device) if torch.is_tensor(x) else x for x in batch)
        with autocast():
            return model(batch, progress)

    def gradient(done):
        """Sets .grad to that of the mean loss of this process's micro-batches. -> metrics"""
        metrics = collections.Counter()
        for i in range(passes):
            g = (done * passes + i) * WORLD + RANK      # its number for any WORLD
            batch = attach(batches[g], g) if attach else batches[g]
            loss, more = forward(batch, done / max_steps)
            (loss / passes).backward()      # micro-batches count alike, also those with padding
            for key, value in {'loss': loss, **more}.items():
                metrics[key] += value.detach() / passes
        return metrics

    # the optimizers; the moments of a checkpoint are theirs
    optimizers = optimizers_of(model, config)
    if resumes:
        try:
            for optimizer, moments in zip(optimizers, state.pop('optimizers'), strict=True):
                optimizer.load_state_dict(moments)
        except (KeyError, ValueError) as e:             # a copy of best.pt has no moments
            raise SystemExit(f'{file} cannot be resumed: {e!r:.99}; --init {file} has its weights')
        if planned != max_steps:
            print(f'--max-steps was {planned}: the learning rate is now that of {max_steps} steps')

    # the first files, compilation, and all steps
    if RANK == 0:
        if planned != max_steps:
            write_config(out, about, ran_on)
        if not resumes:
            save(out, state, optimizers)                # a run that is killed early can be resumed
    model.kernel = config.kernel
    compiles = device.type == 'cuda' and sys.platform == 'linux'
    if config.compile == 'on' or config.compile == 'auto' and compiles:
        compile_layers(model, module.COMPILED)
    peak = peak_tokens_per_s(device, bf16, n_params)
    with caught_signals() as signals:
        loop(out, config, state, model, optimizers, gradient,
             functools.partial(validate, model, forward, val_batches), signals, peak, stage)


@contextlib.contextmanager
def short_errors(program, smaller):
    """Errors of files and memory, and Ctrl-C, end the program with one line."""
    try:
        yield
    except (OSError, NotImplementedError, KeyboardInterrupt) as e:
        raise SystemExit(f'{program}: {str(e) or "stopped"}')
    except (RuntimeError, MemoryError) as e:
        if re.search('allocate|overflowed|MemoryError', repr(e)):
            raise SystemExit(f'out of memory; try {smaller}')
        if re.search('unexpected pos|write error|truncate', str(e)):       # of torch, of faiss
            raise SystemExit(f'{program}: is the disk full? {e!r:.200}')
        raise


def keep_printing():
    """Without a reader, as after `| head`, what is printed is dropped, and the program continues.
    Characters that a console lacks are replaced."""
    def write_or_drop(stream, write, text):
        try:
            write(text)
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    for stream in filter(None, (sys.stdout, sys.stderr)):       # None: it is closed
        stream.reconfigure(errors='replace')
        stream.write = functools.partial(write_or_drop, stream, stream.write)


def main(argv=None):
    module, model_config, config = parse(argv)
    if RANK > 0:
        sys.stdout = open(os.devnull, 'w')              # the first process prints
    smaller = f'--micro-batch {model_config.micro_batch // 2}'
    if model_config.micro_batch == 1:
        smaller = f'--block-size {model_config.block_size // 2}'
    with short_errors('train.py', f'{smaller} and another --out'), locked(Path(config.out)):
        if WORLD > 1:       # after the lock: the processes wait here, and end if it is refused
            backend = 'nccl' if hardware(config.device).type == 'cuda' else 'gloo'
            dist.init_process_group(backend, timeout=datetime.timedelta(hours=6))
        train(module, model_config, config)
    print(f'finished: python eval.py {config.out}')
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == '__main__':
    keep_printing()
    main()
