"""
Trains any model of this house, on whatever there is: a laptop's CPU, one GPU, or many under torchrun.

    $ python train.py                                                   TRIME, tiny, on `code`
    $ python train.py --memory none --out out/vanilla                   the language model that TRIME compares with
    $ python train.py --model rpt                                       RPT: its reference LM first, then the scoring, then itself
    $ python train.py --model drt                                       DRT; with --groups 0 its base LM
    $ python train.py --data my_texts/ --max-steps 2000                 a folder or a file of one's own
    $ torchrun --standalone --nproc_per_node=8 train.py --tokens-per-step 16384     eight processes

`python train.py --help` lists every field of the configuration. What a run leaves in its folder, out/<model> or --out:

    config.json   configuration, commit, versions, corpus            log.jsonl   one object for each step
    ckpt.pt       weights, optimizer, step: the same command goes on from there after any interruption
    best.pt       the weights with the lowest validation loss        loss.png    the curves (with matplotlib)

A batch is a pure function of (corpus, configuration, seed, step), and all randomness of the model comes from the batch,
so a run that was stopped and went on is the same run, bit for bit on a CPU, and any number of processes that can share
a step's micro-batches takes the same step. The order below: flags, then small functions, then one `main` that reads: where are we, data, model,
resume, loop, finish.
"""
import argparse
import dataclasses
import difflib
import importlib
import inspect
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import data

MODELS = ('trime', 'rpt', 'drt')


@dataclass
class TrainConfig:
    data: str = 'code'              # a corpus by name (code, shakespeare, wikitext2, ...), or a folder or a file of text
    tokenizer: str = 'bpe'          # bytes, bpe (learned here), gpt2 or word
    seed: int = 0                   # of the initial weights, the order of the data and the model's randomness
    max_steps: int = 500            # optimizer steps
    tokens_per_step: int = 2048     # over all processes; what a micro-batch does not hold is accumulated
    lr: float = 2e-3                # peak learning rate
    warmup: float = 0.05            # share of the steps in which it rises; then it falls to a tenth, by a cosine
    weight_decay: float = 0.1       # on matrices only
    beta1: float = 0.9              # AdamW, mean of the gradients
    beta2: float = 0.95             # AdamW, mean of their squares
    grad_clip: float = 1.0          # norm of the gradient, at most; 0: no limit
    eval_every: int = 100           # steps between validations and checkpoints
    val_tokens: int = 32768         # of the validation split, evenly spread, while training; at the end, all of it
    dtype: str = 'auto'             # bf16, fp32; auto is bf16 where the hardware multiplies it faster
    init: str = ''                  # start from the weights of this checkpoint
    fold: int = -1                  # rpt, drt: train on every second document, the even ones (0) or the odd ones (1); -1: all

    def __post_init__(self):
        if self.seed < 0 or self.lr <= 0 or not 0 <= self.warmup <= 1:
            raise ValueError(f'seed {self.seed} must not be negative, lr {self.lr} must be positive, warmup {self.warmup} from 0 to 1')
        if self.fold not in (-1, 0, 1):
            raise ValueError(f'fold {self.fold} is not -1, 0 or 1')


@dataclass
class RunConfig:
    out: str = ''                   # folder of the run; default out/<model>
    resume: str = 'auto'            # auto: an unfinished run of this configuration goes on; no: never
    device: str = 'auto'            # cuda, cpu or mps; auto is cuda if there is one, else cpu
    compile: str = 'auto'           # torch.compile: on, off; auto is on with cuda
    kernel: str = 'auto'            # drt's cross-attention: triton, torch; auto is triton with cuda
    reference: str = ''             # rpt: checkpoint of the reference LM; default: out/<run>-reference, trained first


# ----------------------------------------------------------------------------------------------------------------------
# flags

def comments(Config):
    """{field: the comment beside it}. It is the help text, so that the two cannot disagree."""
    return dict(re.findall(r'^ +(\w+):[^#\n]*# *(.+)$', inspect.getsource(Config), re.M))


def add_flags(parser, Config, title, preset=None):
    """One flag per field of a config class; a preset's values replace the defaults."""
    comment, group = comments(Config), parser.add_argument_group(title)
    for f in dataclasses.fields(Config):
        default = (preset or {}).get(f.name, f.default)
        kind = dict(action=argparse.BooleanOptionalAction) if f.type is bool else dict(type=f.type, metavar=f.type.__name__)
        text = comment[f.name].replace('%', '%%') + (f' (default: {default})' if default != '' else '')
        group.add_argument('--' + f.name.replace('_', '-'), default=default, help=text, **kind)


def parse(argv):
    """-> module of the model, its config, TrainConfig, RunConfig. Bad flags end the program with one line."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument('--model', default='trime', choices=MODELS, help='which model (default: trime)')
    first.add_argument('--preset', default='tiny', metavar='str', help='a set of sizes from the model file (default: tiny)')
    known, _ = first.parse_known_args(argv)
    module = importlib.import_module(known.model)
    Config = getattr(module, known.model.upper() + 'Config')
    if known.preset not in module.PRESETS:
        raise SystemExit(f'--preset {known.preset}: {known.model}.py has {", ".join(module.PRESETS)}')
    preset = module.PRESETS[known.preset]

    parser = argparse.ArgumentParser(prog='train.py', parents=[first], allow_abbrev=False,
                                     description='Trains a retrieval-pretrained language model.')
    add_flags(parser, TrainConfig, 'training', preset)
    add_flags(parser, RunConfig, 'this run')
    add_flags(parser, Config, f'model: {known.model}.py', preset)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        flag = unknown[0].split('=')[0]
        near, field = difflib.get_close_matches(flag, flags, 1), flag.removeprefix('--').removeprefix('no-').replace('-', '_')
        others = [name for name in MODELS if name != known.model and field in getattr(importlib.import_module(name), name.upper() + 'Config').__dataclass_fields__]
        raise SystemExit(f'train.py: unknown argument {unknown[0]}' + (f'; it belongs to --model {" or ".join(others)}, not to {known.model}' if others else
                                                                       f'; did you mean {near[0]}?' if near else ''))
    configs = []
    for C in (Config, TrainConfig, RunConfig):
        try:
            configs.append(C(**{f.name: getattr(args, f.name) for f in dataclasses.fields(C)}))
        except ValueError as e:
            raise SystemExit(f'train.py: {e}')
    for name, choices, given in (('resume', ('auto', 'no'), args.resume), ('compile', ('auto', 'on', 'off'), args.compile),
                                 ('kernel', ('auto', 'triton', 'torch'), args.kernel),
                                 ('dtype', ('auto', 'bf16', 'fp32'), args.dtype),
                                 ('device', ('auto', 'cuda', 'cpu', 'mps'), args.device)):
        if given not in choices:
            raise SystemExit(f'train.py: --{name} {given}: choose from {", ".join(choices)}')
    for name in ('max_steps', 'tokens_per_step', 'eval_every', 'micro_batch', 'block_size', 'val_tokens'):
        if getattr(args, name) < 1:
            raise SystemExit(f'train.py: --{name.replace("_", "-")} {getattr(args, name)} must be 1 or more')
    if args.reference and getattr(args, 'retriever', '') != 'sem':
        raise SystemExit('train.py: --reference is the teacher of --model rpt --retriever sem, and of nothing else')
    return module, *configs


# ----------------------------------------------------------------------------------------------------------------------
# small functions

def hardware(device):
    """The torch.device that --device names."""
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cuda' and not torch.cuda.is_available():
        raise SystemExit('--device cuda: PyTorch sees no GPU here; --device cpu works')
    if device == 'mps':
        print('--device mps: nobody has measured this house on it', file=sys.stderr)
    if device == 'cuda':
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
    return torch.device(device)


def multiplies_bf16(device):
    """
    Whether bf16 products are faster than fp32 ones: GPUs from sm_80, CPUs with AMX, AMD's with AVX512-BF16. Intel's without AMX, as some
    virtual machines have them, take twice the time of fp32 (measured: Sapphire Rapids, torch 2.13).
    """
    if device.type == 'cuda':
        return torch.cuda.get_device_capability(device) >= (8, 0)
    path = Path('/proc/cpuinfo')
    about = path.read_text() if device.type == 'cpu' and path.exists() else ''
    return 'amx_bf16' in about or 'avx512_bf16' in about and 'AuthenticAMD' in about


def learning_rate(step, config):
    """Linear rise to config.lr, then a cosine down to a tenth of it."""
    rise = max(1, round(config.warmup * config.max_steps))
    if step < rise:
        return config.lr * (step + 1) / rise
    done = (step - rise) / max(1, config.max_steps - rise)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def accumulation(micro_batch, block_size, tokens_per_step, world):
    """Micro-batches of one step in one process."""
    per_pass = micro_batch * block_size * world
    if tokens_per_step % per_pass:
        nearest = max(1, round(tokens_per_step / per_pass)) * per_pass
        raise SystemExit(
            f'--tokens-per-step {tokens_per_step:,} is not a multiple of {per_pass:,}, the tokens in one forward pass '
            f'({micro_batch} sequences x {block_size:,} tokens x {world} processes). '
            f'The nearest one that works is --tokens-per-step {nearest}.')
    return tokens_per_step // per_pass


def on(device, batch):
    return batch._replace(**{key: x.to(device) for key, x in batch._asdict().items() if torch.is_tensor(x)})


def average(tensors):
    """The mean over all processes, in place, in one message."""
    if dist.is_initialized():
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for t, mean in zip(tensors, (flat / dist.get_world_size()).split([t.numel() for t in tensors])):
            t.copy_(mean.view_as(t))


@torch.no_grad()
def validate(model, batches, device, autocast, progress, at_most=None):
    """
    The causal loss on a split, in nats per token: all micro-batches, or evenly spread ones with at most `at_most` tokens, always the
    same. Every process takes its share of them. Their sequences follow each other in the text, but those of the kind `documents` are
    far apart. -> (loss, tokens scored)
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    numbers = torch.arange(len(batches))
    if at_most is not None:
        n = min(len(numbers), max(1, at_most // (batches.B * batches.T)))
        numbers = numbers[torch.linspace(0, len(numbers) - 1, n).round().long()]
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for i in data.progress(numbers[rank::world].tolist(), 'validation', quiet=rank > 0 or at_most is not None):
        rows = np.arange(batches.n_rows)
        rows = rows[i::len(batches)] if batches.kind == 'documents' else rows[i * batches.B:][:batches.B]
        batch = on(device, batches.take(rows, seed=i))
        scored = (batch.targets >= 0).sum().item()
        with autocast():
            loss, _ = model(batch, progress)
        total += torch.tensor([loss.item() * scored, scored])
    model.train()
    if dist.is_initialized():
        total = total.to(device, torch.float32 if device.type == 'mps' else torch.float64)
        dist.all_reduce(total)
    return (total[0] / total[1]).item(), int(total[1])


def write(path, save):
    """save(temporary file), then rename: whoever looks at `path` finds the old file or the new one, whole."""
    temporary = path.with_name(path.name + f'.{os.getpid()}.tmp')
    try:
        with open(temporary, 'wb') as f:
            save(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:                            # torch.save wraps a full disk in a RuntimeError
        temporary.unlink(missing_ok=True)
        raise SystemExit(f'could not write {path}: {e}. What was there before is unharmed; the same command goes on from it.')


def commit():
    """Of this tree, if git is there to tell."""
    try:
        return subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=Path(__file__).parent,
                              capture_output=True, text=True).stdout.strip()
    except OSError:
        return ''


def free(out):
    """A folder beside `out` that is not there yet."""
    return next(f'{out}-{n}' for n in range(2, 10 ** 6) if not Path(f'{out}-{n}').exists())


def find_run(out, configuration, resume):
    """
    What is in the folder of the run: None if nothing is, or the checkpoint to go on from; any other case ends the
    program with one line that proposes a free --out. Nothing is ever overwritten.
    """
    if out.exists() and not out.is_dir():
        raise SystemExit(f'--out {out} is a file; a run needs a folder')
    if not out.exists() or not any(out.iterdir()):
        return None
    if resume == 'no':
        raise SystemExit(f'--resume no, and {out} is in use. To keep what is there: --out {free(out)}')
    try:
        there = json.loads((out / 'config.json').read_text())
    except (OSError, ValueError):
        raise SystemExit(f'{out} is in use and has no readable config.json. To leave it alone: --out {free(out)}')
    differ = [k for part in ('model_config', 'train_config') for k in configuration[part]
              if there.get(part, {}).get(k) != configuration[part][k]]
    differ += [k for k in ('model', 'corpus') if there.get(k) != configuration[k]]
    if differ:
        raise SystemExit(f'{out} holds another configuration ({", ".join(differ[:4])} differ). To keep both: --out {free(out)}')
    if not (out / 'ckpt.pt').exists():
        return None                                                 # stopped before its first checkpoint
    return torch.load(out / 'ckpt.pt', map_location='cpu', weights_only=True)


def peak_flops(device):
    """Dense bf16 FLOP/s of the GPU by its data sheet; None where we have no sheet."""
    if device.type != 'cuda':
        return None
    name = torch.cuda.get_device_name(device)
    sheet = {'B200': 2250e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12, '4090': 165e12}
    return next((peak for part, peak in sheet.items() if part in name), None)


def memory_in_use(device):
    """Peak GB of this process: on the GPU, else in RAM."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 2 ** 30
    try:
        import resource
    except ImportError:                                             # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss       # kilobytes, on macOS bytes
    return peak / 2 ** (30 if sys.platform == 'darwin' else 20)


def duration(seconds):
    return f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} min' if seconds < 6000 else f'{seconds / 3600:.1f} h'


# ----------------------------------------------------------------------------------------------------------------------
# the run

def main(argv=None):
    module, model_config, config, run = parse(sys.argv[1:] if argv is None else argv)
    device = hardware(run.device)
    accumulation(model_config.micro_batch, model_config.block_size, config.tokens_per_step, int(os.environ.get('WORLD_SIZE', 1)))
    if 'WORLD_SIZE' in os.environ:
        importlib.import_module('torch.distributed.nn')             # before the group exists: its functions have the group as a default
        if device.type == 'cuda':                                   # argument, and imported later (AdamW does) they would keep its
            torch.cuda.set_device(device)                           # threads alive past destroy_process_group: an abort at exit, at times
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo', timeout=timedelta(hours=6))
    train(module, model_config, config, run, device)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(module, model_config, config, run, device, corpus=None):
    """One run, from its flags to its folder; what was there is gone on from. RPT's calls it once more, with its corpus, for its reference LM."""
    name = module.__name__
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    accumulate = accumulation(model_config.micro_batch, model_config.block_size, config.tokens_per_step, world)
    say = print if rank == 0 else lambda *_, **__: None
    bf16 = config.dtype == 'bf16' or config.dtype == 'auto' and multiplies_bf16(device)
    # what stays in fp32, the loss above all, may multiply rounded inputs (TF32 on a GPU, bf16 on a CPU); sums stay in fp32
    torch.set_float32_matmul_precision('highest' if not bf16 else 'medium' if device.type == 'cpu' else 'high')
    torch.set_flush_denormal(True)
    autocast = lambda: torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    # data. The processes that gather their memories share one micro-batch of world x B sequences; else each has its own
    shared = world if getattr(model_config, 'gather_memory', False) else 1
    if world > 1 and rank > 0:
        dist.barrier()                                              # the first process prepares, and packs
    own = corpus is None
    corpus = corpus or data.load(config.data, config.tokenizer, model_config.vocab_size, quiet=rank > 0)
    kind = module.batches(model_config)
    train_batches = data.Batches(corpus.train, kind, model_config.block_size, shared * model_config.micro_batch, config.seed,
                                 cache=corpus.folder, documents=getattr(model_config, 'same_document', True), fold=config.fold)
    if world > 1 and rank == 0:
        dist.barrier()
    model_config.vocab_size = corpus.tokenizer.n_vocab
    val_batches = data.Batches(corpus.val, 'segments' if kind == 'packed' else kind, model_config.block_size, model_config.micro_batch, seed=0)

    # the folder
    out = Path(run.out or f'out/{name}')
    configuration = dict(model=name, model_config=dataclasses.asdict(model_config), train_config=dataclasses.asdict(config),
                         corpus=corpus.fingerprint)
    checkpoint = find_run(out, configuration, run.resume)
    if world > 1:
        dist.barrier()                                              # all have looked before the first one writes
    if checkpoint and checkpoint['step'] >= config.max_steps:
        say(f'{out} holds this run, finished after {checkpoint["step"]} steps. Look at it: python eval.py {out}. '
            f'To train it once more: --out {free(out)}')
        return
    supervision = reference = None
    if name == 'rpt' and model_config.retriever != 'none':
        supervision, reference = supervise(module, model_config, config, run, device, corpus, train_batches, out, accumulate, autocast)

    # model and optimizer
    torch.manual_seed(config.seed)
    model = getattr(module, name.upper())(model_config).to(device)
    model.kernel = run.kernel
    if name == 'drt' and model_config.groups and run.kernel == 'triton':
        from gca_kernel import why_not_triton
        q = torch.empty(1, 1, model_config.n_head, model_config.n_embd // model_config.n_head, dtype=torch.bfloat16 if bf16 else torch.float32, device=device)
        if why := why_not_triton(q, model_config.chunk_size):
            raise SystemExit(f'--kernel triton cannot run: {why}. --kernel auto takes PyTorch there')
    if getattr(model, 'idf', None) is not None:
        model.idf.copy_(torch.from_numpy(module.corpus_idf(corpus.train.tokens, model_config.chunk_size, model_config.vocab_size)))
    if config.init:
        try:
            model.load_state_dict(torch.load(config.init, map_location=device, weights_only=True)['model'])
        except Exception as e:
            raise SystemExit(f'--init {config.init}: no checkpoint of these sizes ({" ".join(str(e).split())[:200]})')
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=config.weight_decay), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=device.type != 'mps')
    parameters = matrices + others
    if run.compile == 'on' or run.compile == 'auto' and device.type == 'cuda':
        model.encode = torch.compile(model.encode)                  # the loss runs its own loop, and draws its coins

    # resume
    step, best, log_path = 0, math.inf, out / 'log.jsonl'
    if checkpoint:
        try:
            model.load_state_dict(checkpoint['model'])
        except RuntimeError as e:
            raise SystemExit(f'{out} has weights of another version of this house: --out {free(out)} begins anew ({" ".join(str(e).split())[:200]})')
        optimizer.load_state_dict(checkpoint['optimizer'])
        step, best = checkpoint['step'], checkpoint['best']
        say(f'going on in {out} from step {step}')
        if rank == 0:                                               # what was logged after the checkpoint happens again;
            lines = log_path.read_text().splitlines() if log_path.exists() else []      # a last line may be half written
            kept = [line for line in lines if line.endswith('}') and json.loads(line)['step'] <= step]
            write(log_path, lambda f: f.write(''.join(line + '\n' for line in kept).encode()))
            for path in out.glob('*.tmp'):                          # of a process that was killed while writing
                path.unlink()
    elif rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        about = dict(command=' '.join(sys.argv), commit=commit(), python=platform.python_version(),
                     torch=torch.__version__, device=str(device), dtype='bf16' if bf16 else 'fp32', processes=world, machine=platform.processor() or platform.machine(),
                     corpus_name=corpus.name, corpus_folder=str(corpus.folder))
        if supervision:
            about.update(supervision=supervision.folder.name, reference=reference)
        write(out / 'config.json', lambda f: f.write(json.dumps({**configuration, **about}, indent=1).encode()))
        log_path.unlink(missing_ok=True)
    n_params = sum(p.numel() for p in parameters)
    say(f'{name}: {n_params:,} parameters, {kind} batches, {config.tokens_per_step:,} tokens a step '
        f'({world} processes x {accumulate} x {model_config.micro_batch} x {model_config.block_size}), '
        f'{"bf16" if bf16 else "fp32"} on {device}, into {out}')
    for c in (model_config, config):
        say('  ' + ' '.join(f'{key}={value}' for key, value in dataclasses.asdict(c).items() if value != ''))

    def state(**more):
        return dict(model=model.state_dict(), model_name=name, config=dataclasses.asdict(model_config), step=step, best=best,
                    tokenizer=corpus.tokenizer.to_dict(), data=config.data, corpus=corpus.fingerprint, fold=config.fold, **more)

    def save():
        if rank == 0 and all(p.isfinite().all() for p in parameters):
            write(out / 'ckpt.pt', lambda f: torch.save(state(optimizer=optimizer.state_dict()), f))

    def diverged(what):
        kept = f'the checkpoint in {out} is from before' if (out / 'ckpt.pt').exists() else 'there is no checkpoint yet'
        raise SystemExit(f'step {step}: {what}; {kept}. A lower --lr than {config.lr:g} usually helps.')

    stop = []                                                       # a first signal saves and leaves, a second just leaves

    def on_signal(number, _):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        if rank == 0:
            os.write(2, b'\nstopping after this step and what belongs to it; a second time: at once, without saving\n')

    previous = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}

    # the loop: evaluate, save, step, log
    peak, began, began_at, entry, model_flops = peak_flops(device), time.time(), step, {}, 2 * model.multiply_adds()
    log = open(log_path, 'a') if rank == 0 else None
    model.train()
    try:
        while True:
            finished = step >= config.max_steps
            due = entry and (step % config.eval_every == 0 or finished)
            if due:
                check = lambda at_most: validate(model, val_batches, device, autocast, (step - 1) / config.max_steps, at_most)
                entry['val_loss'], entry['val_tokens'] = check(config.val_tokens)
                if finished:
                    entry['val_loss_all'], entry['val_tokens_all'] = check(None)
                if not math.isfinite(entry['val_loss']):
                    diverged(f'the validation loss is {entry["val_loss"]}')
                improved = entry['val_loss'] < best
                best = min(best, entry['val_loss'])
                if rank == 0 and improved:
                    write(out / 'best.pt', lambda f: torch.save(state(), f))
            if entry:
                show(entry, config, step - began_at, time.time() - began, device, say)
                if rank == 0:
                    log.write(json.dumps(entry) + '\n')
                    log.flush()
            if due:
                save()
            if finished:
                break
            leave = torch.tensor(float(bool(stop)), device=device)
            average([leave])
            if leave:
                save()
                say(f'stopped at step {step}; the same command goes on from here')
                raise SystemExit(128 + (stop or [signal.SIGTERM])[0])

            start, lr = time.time(), learning_rate(step, config)
            for group in optimizer.param_groups:
                group['lr'] = lr
            figures, first = {}, step * accumulate * world
            for a in range(accumulate):
                if shared > 1:
                    batch = train_batches[step * accumulate + a]
                    rows = slice(rank * model_config.micro_batch, (rank + 1) * model_config.micro_batch)
                    batch = batch._replace(tokens=batch.tokens[rows], targets=batch.targets[rows], doc=batch.doc[rows])
                else:
                    batch = train_batches[first + a * world + rank]
                    if supervision:
                        batch = supervision.attach(batch, train_batches.rows(first + a * world + rank))
                batch = on(device, batch)
                with autocast():
                    loss, extra = model(batch, step / config.max_steps)
                (loss / accumulate).backward()                      # a mean of means: padding weighs a little
                for key, value in {'loss': loss, **extra}.items():
                    figures[key] = figures.get(key, 0) + value.detach() / accumulate
            grads = [p.grad for p in parameters if p.grad is not None]
            average(grads + list(figures.values()))
            norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf)
            figures = {key: value.item() for key, value in figures.items()}
            if not math.isfinite(figures['loss'] + norm.item()):
                diverged(f'the loss is {figures["loss"]}, the norm of the gradient {norm.item()}')
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device.type == 'cuda':
                torch.cuda.synchronize()
            step += 1
            dt = time.time() - start
            entry = dict(step=step, tokens=step * config.tokens_per_step, **figures, lr=lr, grad_norm=norm.item(),
                         tokens_per_s=config.tokens_per_step / dt)
            if peak and bf16:
                entry['mfu'] = model_flops * config.tokens_per_step / dt / world / peak
    except (RuntimeError, MemoryError) as e:
        if not isinstance(e, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in str(e):
            raise
        B, T = model_config.micro_batch, model_config.block_size
        smaller = f'--micro-batch {B // 2}' if B > 1 else f'--block-size {T // 2}'
        raise SystemExit(f'out of memory on {device}: the next smaller size is {smaller}' +
                         (' (which changes the model: its memories are those of a micro-batch)' if name == 'trime' else ''))
    except OSError as e:
        raise SystemExit(f'could not write {log_path}: {e}. The same command goes on from the last checkpoint.')
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if log:
            log.close()

    # finish
    if rank == 0:
        import eval as evaluation
        loss, n = entry['val_loss_all'], entry['val_tokens_all']
        say(f'\nvalidation, all {n:,} tokens: loss {loss:.4f}, perplexity {math.exp(loss):.2f}, '
            f'{loss / math.log(2) * n / corpus.val.n_bytes:.3f} bits per byte')
        evaluation.plot([out], out / 'loss.png')
    if rank == 0 and own:
        model.eval()
        say('\nit writes:\n' + '-' * 80)
        for text in evaluation.generate(model, corpus.tokenizer, max_tokens=150):
            print(text, end='', flush=True)
        say('\n' + '-' * 80 + f'\n\nin {out}: ' + ', '.join(sorted(p.name for p in out.iterdir())) +
            f'\nlook at what it learned: python eval.py {out}')


def supervise(module, model_config, config, run, device, corpus, texts, out, accumulate, autocast):
    """
    What RPT's teacher knows about the sequences that this run will visit: a rpt.Supervision, and the reference LM's path. For retriever
    sem that is --reference, or that of the run that is gone on with, or it is trained first: half as deep, on every second document where
    there are enough, so that it scores only documents that it has never seen.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    say = print if rank == 0 else lambda *_, **__: None
    before = json.loads((out / 'config.json').read_text()) if (out / 'config.json').exists() else {}
    path, reference, key, held_out = run.reference or before.get('reference') or '', None, corpus.fingerprint, None
    if model_config.retriever == 'sem':
        if not path:
            module.must_hold(model_config.window, model_config.chunk_size)
            sizes = np.diff(corpus.train.offsets)
            fold = 1 - config.fold if config.fold >= 0 else 0 if 0.2 < sizes[::2].sum() / sizes.sum() < 0.8 else -1
            if fold < 0:
                say('too few documents to keep half of them from the reference LM: it scores what it was trained on')
            smaller = dataclasses.replace(model_config, retriever='none', n_layer=max(1, model_config.n_layer // 2))
            its_config = dataclasses.replace(config, fold=fold, init='')
            folder = next(folder for n in range(1, 10 ** 6) if fits(folder := Path(f'{out}-reference' + f'-{n}' * (n > 1)), smaller, its_config, corpus))
            say(f'\n1 of 3: the reference LM, in {folder}')
            train(module, smaller, its_config, dataclasses.replace(run, out=str(folder), resume='auto'), device, corpus)
            if world > 1:
                dist.barrier()                                      # the first process has written it
            path = str(folder / 'ckpt.pt')
        say(f'\n2 of 3: the reference LM, {path}, scores what BM25 found')
        reference, weights, fold, its_corpus = module.open_reference(path, corpus.tokenizer, model_config.chunk_size, device)
        if its_corpus == corpus.fingerprint and fold >= 0:
            held_out = lambda doc: doc % 2 != fold
        elif its_corpus == corpus.fingerprint and run.reference:
            say('it was trained on all documents of this corpus, and may know by heart what it scores; --fold 0 keeps half of them from it')
        key = [corpus.fingerprint, weights, fold]
    visited = (row for g in range(config.max_steps * accumulate * world) for row in texts.rows(g).tolist())
    try:
        supervision = module.prepare(model_config, corpus.folder, key, texts, visited, reference, held_out, autocast, device, rank, world,
                                     dist.barrier if world > 1 else lambda: None, data.progress, say)
    except KeyboardInterrupt:
        say('stopped; what was prepared is kept, and the same command goes on from there')
        raise SystemExit(128 + signal.SIGINT)
    if before.get('supervision', supervision.folder.name) != supervision.folder.name:
        raise SystemExit(f'{out} was trained with another teacher, {before["reference"] or "BM25"}. To keep both: --out {free(out)}')
    if reference:
        say('\n3 of 3: RPT')
    return supervision, path


def fits(out, model_config, config, corpus):
    """Whether a folder is free or holds this run of rpt.py."""
    try:
        there = json.loads((out / 'config.json').read_text())
    except (OSError, ValueError):
        return not out.exists()
    return [there.get(key) for key in ('model_config', 'train_config', 'corpus')] == [dataclasses.asdict(model_config), dataclasses.asdict(config), corpus.fingerprint]


def show(entry, config, done, seconds, device, say):
    """One line now and then; the columns keep their place. After ten steps of a long run, how long it will take."""
    step, steps = entry['step'], config.max_steps
    left = seconds / done * (steps - step)
    if done == 10 and left > 180:
        say(f'about {duration(left)} left; for about 4 min, use another --out and --max-steps {max(20, 10 * round(steps * 240 / (left + seconds) / 10))}')
    if step % max(1, steps // 30) and 'val_loss' not in entry and step > 1:
        return
    shown = {'step', 'tokens', 'loss', 'lr', 'grad_norm', 'tokens_per_s', 'mfu', 'val_loss', 'val_tokens', 'val_loss_all', 'val_tokens_all'}
    own = ''.join(f' | {key.replace("_", " ")} {value:.3f}' for key, value in entry.items() if key not in shown)
    val = f' | val {entry["val_loss"]:.4f}' if 'val_loss' in entry else ' ' * 13
    mfu = f' | mfu {100 * entry["mfu"]:4.1f}%' if 'mfu' in entry else ''
    say(f'step {step:6d}/{steps} | loss {entry["loss"]:7.4f}{val}{own} | {entry["tokens_per_s"]:9,.0f} tok/s{mfu} | '
        f'{memory_in_use(device):.1f} GB | {duration(left) if done >= 10 else "-"} left')


if __name__ == '__main__':
    main()
