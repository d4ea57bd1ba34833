"""
Trains any model of this repository, or your own: on a CPU, on one GPU, or on many under torchrun.

    $ python train.py --model trime --memory none --out out/vanilla
    $ python train.py --model griffin                   a file of compared/
    $ python train.py --model mine.py                   a file of yours, see README.md
    $ torchrun --standalone --nproc_per_node=8 train.py --model rpt --tokens-per-step 16384

The folder of a run, out/<model> or --out, gets config.json, log.jsonl, best.pt (the weights with
the lowest validation loss; not with TRIME's memory ext) and ckpt.pt, from which the same command
resumes: on a CPU bit for bit as without interruption. More processes change only the order of sums.
A folder with other files but no ckpt.pt is left as it is. One program at a time trains in a folder.

What train.py and eval.py use of a model file x.py, for B sequences of T or t tokens, V ids and
width C:

    X, XConfig              the model and its config, a dataclass in which each field is a flag; it
                            has vocab_size, block_size and micro_batch. Of block_recurrent.py:
                            BlockRecurrent and BlockRecurrentConfig
    PRESETS                 {name: values of some fields, of this config and of TrainConfig}; one
                            is named tiny, the default
    COMPILED                a tuple of classes of layers, for torch.compile
    batches(config)         arguments of data.Corpus.batches: what a micro-batch consists of
    setup(model, run)       optional, before training: checks the text, computes a teacher's
                            scores; run: see Run. Returns None or attach(batch, number), which adds
                            them to a micro-batch
    X(config)               the model, an nn.Module. Muon trains all matrices but those of
                            nn.Embedding and of parameters whose names begin with `embedding`
    .config                 its XConfig
    .forward(batch, progress)   loss () and a dict of tensors () to log, on the same device; in eval
                            mode the loss is the mean over all targets. batch: data.Batch; progress:
                            step / max_steps
    .stream(tokens, state)  log P (B, t, V) of the token after each of tokens (B, t), which continue
                            the text of state or begin one (None); the new state, nested tuples and
                            lists of tensors whose first axis is B. The old one is not changed
    .PIECE                  the largest t of a call of stream
    .log_probs(tokens)      log P alone, of whole texts (for notebooks and tests)
    .states(tokens, state)  states f (B, t, C), from which .logits computes logits without memories,
                            for eval.py --cache; the new state
    .logits(f)              states (..., C) -> logits (..., V)
    .read(tokens, state=None)   the new state alone, for any t
    .ways()                 a tuple of names of ways to read a text, the last one `off`, see eval.py
    .way                    the one of ways() that is set
    .kernel                 the value of --kernel
    .trace(tokens, t, state=None)   what is read to predict token t + 1 of tokens (n,): a list of
                            (weight, ids, start, end), ids[start:end] is read; the largest weight
                            first. ids is `tokens` itself or another text. state: that of
                            tokens[:t]; None: it is computed. With config.groups, also group: by
                            this group of layers
    prepare_eval(model, corpus, external, args, path)   optional: computes what an evaluation needs
                            -> None, or {name: what was tuned}, for --json. external: the Corpus of
                            --retrieve-from, or corpus; args: the flags of eval.py, progress_bar and
                            new_folder of data.py; path: of the weights
    EvalConfig, TASKS       optional: flags and tasks of eval.py for this model only
    FLOPS                   optional: operators that torch cannot count, for --task speed

What a file does not define is taken from the file of the class that X inherits from.

The sections of this file; what a function calls is often further down
    configuration, optimizers   TrainConfig; learning_rate, Muon
    training                    train; Run: its steps, log, validations, checkpoints
    model files, flags          find_model, part_of; parse
    files of a run              write, read_checkpoint, locked, check_folder
    processes, hardware         check_processes, caught_signals; precision, compile_layers
    the command                 short_errors, main
"""
import os       # before torch: waiting threads spin for some 10 µs (GNU OpenMP), then sleep
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
os.environ.setdefault('GOMP_SPINCOUNT', '1000')
import argparse, collections, contextlib, ctypes, datetime, difflib, functools, importlib
import importlib.util, inspect, json, math, platform, re, shlex, signal, subprocess, sys
import textwrap, time
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
import torch.distributed.nn     # if AdamW imports it later, threads remain at exit
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import data
from data import progress_bar

try:
    import fcntl
except ImportError:                 # on Windows
    fcntl = None

WORLD = int(os.getenv('WORLD_SIZE', 1))         # processes
RANK = int(os.getenv('RANK', 0))                # number of this one
LOCAL_RANK = int(os.getenv('LOCAL_RANK', RANK)) # its number on its machine


# --------------------------------------------------------------------------------------------------
# configuration
def expanded_path(text):
    """The type of a flag: a path, without / at its end. A shell does not expand the ~ of
    --out=~/x."""
    return text and str(Path(text).expanduser())


def source(text):
    """The type of --data: the name of a corpus, or a path, which becomes absolute, because eval.py
    may run in another folder; also after niah: and niah2:"""
    task = re.match('(niah2?:)?', text)[0]
    name = os.path.expanduser(text.removeprefix(task))      # ./code does not become the name code
    if os.path.exists(name) and name not in (*data.NAMES, *data.HOPS):
        name = os.path.abspath(name)
    return task + name


@dataclass
class TrainConfig:
    data: source = 'code'           # code, shakespeare, ..., folder or file; niah, niah2, niah:TEXT
    # with --init, tokenizer is a data.Tokenizer until Run.load_data
    tokenizer: Literal['bpe', 'bytes', 'gpt2', 'word'] = 'bpe'      # bpe is learned from the text
    seed: int = 0                   # of the weights, the order of the data, the model's randomness
    max_steps: int = 600            # optimizer steps; a larger number resumes a finished run
    tokens_per_step: int = 2048     # over all processes; micro-batches are accumulated to reach it
    optimizer: Literal['muon', 'adamw'] = 'muon'        # muon: for matrices; AdamW for others
    lr: float = 8e-3                # peak rate; try 4e-3 at width 256, 2e-3 (adamw), 1e-3 (--init)
    warmup: float = 0.05            # share of the steps with rising rate; then a cosine to a tenth
    weight_decay: float = 0.1       # not on vectors (norms, biases)
    beta2: float = 0.95             # AdamW, mean of the squared gradients
    grad_clip: float = 1.0          # largest norm of the gradient; 0: no limit
    eval_every: int = 100           # steps between validations and checkpoints
    val_tokens: int = 32768         # tokens of a validation, evenly spread; the last step adds all
    gains: bool = False             # rpt, drt: validates in all ways; logs what retrieval gains
    dtype: Literal['auto', 'bf16', 'fp32'] = 'auto'     # auto: bf16 where hardware is fast with it
    grow_context: bool = False      # niah: sequences grow to block_size in the first half
    init: expanded_path = ''        # a .pt file, or a run (its ckpt.pt): its weights and settings
    out: expanded_path = ''         # folder of the run
    resume: Literal['auto', 'no'] = 'auto'      # auto: resumes the run in --out; no: leaves it
    device: Literal['auto', 'cuda', 'cpu', 'mps'] = 'auto'      # auto: cuda if present, else cpu
    compile: Literal['auto', 'on', 'off'] = 'auto'      # torch.compile; auto: cuda on Linux
    kernel: Literal['auto', 'triton', 'torch'] = 'auto'     # triton: for drt; torch: definitions

    def __post_init__(self):
        if min(self.max_steps, self.tokens_per_step, self.eval_every, self.val_tokens) < 1:
            raise ValueError('max_steps, tokens_per_step, eval_every, val_tokens are 1 or more')
        if self.warmup > 1 or self.beta2 >= 1:
            raise ValueError('warmup is a share of the steps, at most 1; beta2 is below 1')


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
    x <- a x + b (x xᵀ) x + c (x xᵀ)² x, bring all singular values near 1.

    x (k, n, m) -> (k, n, m)"""
    if x.size(1) > x.size(2):
        return orthogonalize(x.mT).mT                               # so x xᵀ is the smaller product
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
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            # matrices of a shape are stacked, because fewer products are faster
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
    """AdamW and Muon; with --optimizer muon, Muon has all matrices except those of embeddings.
    Vectors (norms, biases) do not decay. Run.step sets the rates."""
    # a fixed embedding (the retriever's in compared/dense.py) has no gradient, so no optimizer
    # changes it. It is listed with Muon's matrices, as in checkpoints of earlier runs
    embeddings = {module.weight for module in model.modules()
                  if isinstance(module, torch.nn.Embedding) and module.weight.requires_grad}
    matrices, others, vectors = [], [], []
    for name, p in model.named_parameters():
        is_embedding = name.startswith('embedding') or p in embeddings
        group = others
        if p.dim() < 2:
            group = vectors
        elif config.optimizer == 'muon' and p.dim() == 2 and not is_embedding:
            group = matrices
        group.append(p)

    groups = [dict(params=others), dict(params=vectors, weight_decay=0)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, config.beta2), fused=True,
                              weight_decay=config.weight_decay)
    return adamw, Muon([dict(params=matrices)], dict(weight_decay=config.weight_decay))


# --------------------------------------------------------------------------------------------------
# training
NOT_SHOWN = 'step', 'tokens', 'lr', 'grad_norm', 'tokens_per_s', 'val_tokens'   # on the console


def train(Model, model_config, config, corpus=None, stage=''):
    """Trains a model; the arguments are those of Run."""
    # the data, and what the run starts from: its last checkpoint, the file of --init, or nothing
    run = Run(Model, model_config, config, corpus, stage)
    file = start_of(config)
    start = read_checkpoint(file, [Model])[0] if file else {}
    run.load_data()

    # the folder, the model, what has to be known before the first step
    saved = check_folder(run.out, run.settings, start, run.kind)
    run.make_batches()
    run.make_model(start)
    check_processes(run)
    run.show_settings()
    setup = part_of(Model, 'setup')
    if setup:
        run.attach = setup(run.model, run)
    run.make_optimizers()

    # what is changed in a resumed run
    changed = [key for key in ('max_steps', 'micro_batch')
               if run.resumes and saved.get(key) != run.settings[key]]
    if 'max_steps' in changed:
        print(f'--max-steps was {saved["max_steps"]}: the schedules, of the learning rate and of '
              f'the model, are now those of {config.max_steps} steps')
    if run.state['step'] == config.max_steps and not stage:
        print(f'{run.out} has all {config.max_steps} steps: a larger --max-steps lengthens it, '
              'another --out begins a new one')

    # the files of the run: if a new one is killed early, it can be resumed
    if RANK == 0 and (changed or run.state['step'] < config.max_steps or not run.resumes):
        write_config(run.out, run.settings, run.ran_on, saved)
    if RANK == 0 and not run.resumes:
        run.save_checkpoint()

    # compilation, then all steps
    compiles = run.device.type == 'cuda' and sys.platform == 'linux'
    has_steps = run.state['step'] < config.max_steps
    if has_steps and (config.compile == 'on' or (config.compile == 'auto' and compiles)):
        compile_layers(run.model, part_of(Model, 'COMPILED'))
    with caught_signals() as signals:
        run.loop(signals)


class Run:
    """A training, from its configuration to its folder. What setup of a model file can use:

    config          TrainConfig
    corpus          data.Corpus
    batches         micro-batches of corpus.train: batches[number], .rows(number), .B, .T
    autocast()      the context in which the model's forward pass runs
    bf16            is it in bf16?
    rank, world     number of this process, number of processes
    progress_bar    data.progress_bar
    load_reference  see there

    For the methods, also:

    Model, model_config, model, optimizers, device
    out, stage      folder; what ends the lines on the console
    kind            of the batches, see data.Corpus.batches
    ran_on          processes, device and dtype in words
    resumes         is the run resumed from its ckpt.pt?
    n_micro_batches in a step, of each process
    val_batches     micro-batches of corpus.val
    attach          what setup returns
    settings        all fields of the configs, and what is compared when the run is resumed
    state           what a checkpoint has, except the moments of the optimizers
    peak            tokens per second for mfu, or None"""
    rank, world = RANK, WORLD
    progress_bar = staticmethod(progress_bar)

    def __init__(self, Model, model_config, config, corpus=None, stage=''):
        """corpus: of the run of which this is a stage, as RPT's reference LM is; stage: ends the
        lines of its steps"""
        self.Model = Model
        self.model_config = model_config
        self.config = config
        self.corpus = corpus
        self.stage = stage
        self.out = Path(config.out)
        self.resumes = Path(self.out, 'ckpt.pt').exists()
        self.kind = part_of(Model, 'batches')(model_config)['kind']
        self.attach = None

        # where, in which precision
        self.device = hardware(config.device)
        self.bf16, self.autocast = precision(self.device, config.dtype)
        dtype = 'bf16' if self.bf16 else 'fp32'
        self.ran_on = f'{WORLD} x {self.device.type}, {dtype}'

        # the micro-batches of a step are shared among the processes
        B = model_config.micro_batch
        T = model_config.block_size
        n_tokens = WORLD * B * T
        self.n_micro_batches, rest = divmod(config.tokens_per_step, n_tokens)
        if rest:
            nearest = n_tokens * max(1, round(config.tokens_per_step / n_tokens))
            raise SystemExit(
                f'--tokens-per-step {config.tokens_per_step}: no multiple of processes x '
                f'micro_batch x block_size = {WORLD} x {B} x {T} = {n_tokens}; the nearest one '
                f'is {nearest}')
        if config.gains and self.kind != 'documents':
            raise SystemExit('--gains is for models that retrieve chunks: rpt, drt')

    # before the first step
    def load_data(self):
        """Opens the corpus, which the first process of each machine prepares."""
        config, model_config = self.config, self.model_config
        if LOCAL_RANK > 0:
            barrier()
        if self.corpus is None:
            self.corpus = load_corpus(config, model_config.vocab_size)
        if LOCAL_RANK == 0:
            barrier()
        corpus = self.corpus

        # from here on the tokenizer is a name (--init gives a Tokenizer), and vocab_size is the
        # number of its ids (bpe may learn fewer than --vocab-size)
        config.tokenizer = corpus.tokenizer.name
        model_config.vocab_size = corpus.tokenizer.n_vocab
        self.settings = dict(model=model_name(self.Model), corpus=corpus.fingerprint,
                             hops=corpus.hops, **vars(model_config), **vars(config))

    def make_batches(self):
        """The micro-batches of train and val. For TRIME's memory ext this can take hours."""
        config, model_config, corpus = self.config, self.model_config, self.corpus
        sizes = dict(block_size=model_config.block_size, micro_batch=model_config.micro_batch,
                     **part_of(self.Model, 'batches')(model_config))

        # with --grow-context the micro-batches of the first half of the run grow
        grow = 0
        if config.grow_context:
            grow = config.max_steps * self.n_micro_batches * WORLD // 2
        # val first: it is short, and so the first to be too short for block_size
        not_packed = dict(sizes, bm25=False)
        self.val_batches = corpus.batches(corpus.val, seed=0, **not_packed)
        self.batches = corpus.batches(corpus.train, seed=config.seed, grow=grow, **sizes)

        # a document of one token has no target
        numbers = dict(train=range(len(self.batches)), val=self.val_numbers(config.val_tokens))
        for name, batches in dict(train=self.batches, val=self.val_batches).items():
            in_order = map(batches.in_order, numbers[name])
            if not any((batch.targets >= 0).any() for batch in in_order):
                more = ', or a larger --val-tokens' if name == 'val' else ''
                raise SystemExit(f'{name} has no token to predict: its documents have one token '
                                 f'each; try another --data, --tokenizer bytes{more}')

    def val_numbers(self, at_most=sys.maxsize):
        """Numbers of micro-batches of val: of all, or of some, evenly spread, that have up to
        at_most tokens"""
        batches = self.val_batches
        N = len(batches)
        n = min(N, max(1, at_most // (batches.B * batches.T)))
        return torch.linspace(0, N - 1, n).round().int().tolist()

    def make_model(self, start):
        """The model, with the weights of `start`, a checkpoint or {}; the state of the run"""
        config, corpus = self.config, self.corpus

        # the model and its weights
        torch.manual_seed(config.seed)
        self.model = self.Model(self.model_config).to(self.device)
        check_parts(self.Model, self.model)
        if config.gains and self.model.ways() == ('off',):
            raise SystemExit('--gains: this model retrieves nothing')
        self.model.kernel = config.kernel
        if start:
            try:
                self.model.load_state_dict(start['model'])
            except RuntimeError:                            # of other shapes
                differ = dict(start['config'].items() - self.settings.items())
                raise SystemExit(f'{start_of(config)} has weights of other shapes. Its settings '
                                 f'that differ: {differ}; use those that change a shape, or no '
                                 '--init')

        # the state of the run: that of the checkpoint, or a new one
        self.state = start
        if not self.resumes:
            if start and start['data'] == config.data and start['corpus'] != corpus.fingerprint:
                print(f'{start_of(config)} was trained on another version of {config.data}: what '
                      'is now in val and test can have been in its training')
            self.state = dict(
                model_name=model_name(self.Model), data=config.data, corpus=corpus.fingerprint,
                tokenizer=corpus.tokenizer.to_dict(), step=0, tokens=start.get('tokens', 0),
                log_size=0, best=math.inf)
        self.state['data'] = config.data                    # the text can have been moved
        self.state['config'] = vars(self.model_config)
        self.state['model'] = self.model.state_dict()       # the same tensors: steps change them

    def show_settings(self):
        """Prints what is trained where, and which settings are not the defaults. Sets peak."""
        n_params = sum(map(torch.numel, self.model.parameters()))
        self.peak = peak_tokens_per_s(self.device, self.bf16, n_params)
        defaults = vars(config_of(self.Model)()) | vars(TrainConfig())
        defaults |= part_of(self.Model, 'PRESETS').get('tiny', {})
        changed = [f'{key}={x}' for key, x in self.settings.items() if x != defaults.get(key, x)]
        print(f'{self.out}: {self.settings["model"]}, {n_params:,} parameters, {self.ran_on}, step '
              f'{self.state["step"]} of {self.config.max_steps}\n'
              'settings other than the defaults:', *changed)

    def load_reference(self, path, Model, model_config, config):
        """For setup of RPT: the model and the tokenizer of a run or file; path '': of a run with
        these configs, which is trained now, on the same corpus"""
        if not path:
            path = config.out
            with locked(Path(path)):
                # a reference that has more steps than this run needs is used as it is
                if Path(path, 'ckpt.pt').exists():
                    state, _, _ = read_checkpoint(path)
                    config = replace(config, max_steps=max(config.max_steps, state['step']))
                train(Model, model_config, config, self.corpus, ' in this stage')
        _, model, tokenizer = read_checkpoint(path)
        return model, tokenizer

    def make_optimizers(self):
        """The optimizers, with the moments of the checkpoint that is resumed"""
        self.optimizers = optimizers_of(self.model, self.config)
        if not self.resumes:
            return
        try:
            moments = self.state.pop('optimizers')
            for optimizer, x in zip(self.optimizers, moments, strict=True):
                optimizer.load_state_dict(x)
        except (KeyError, ValueError) as e:                 # a copy of best.pt has no moments
            file = start_of(self.config)
            raise SystemExit(f'{file} cannot be resumed: {e!r:.99}; --init {file} with another '
                             '--out begins with its weights')

    # one step
    def forward(self, batch, progress):
        """The loss of a micro-batch, and what to log. progress: step / max_steps"""
        batch = batch._make(x.to(self.device) if torch.is_tensor(x) else x for x in batch)
        with self.autocast():
            return self.model(batch, progress)

    def gradient(self, done):
        """Sets .grad to that of the mean loss of this process's micro-batches, after `done` steps
        -> {name: metric ()}"""
        n = self.n_micro_batches
        metrics = collections.Counter()
        for i in range(n):
            # a step has the same numbers for any WORLD, because n WORLD is the same
            number = (done * n + i) * WORLD + RANK
            batch = self.batches[number]
            if self.attach:
                batch = self.attach(batch, number)
            loss, more = self.forward(batch, done / self.config.max_steps)
            (loss / n).backward()           # micro-batches count alike, also those with padding
            for key, value in {'loss': loss, **more}.items():
                metrics[key] += value.detach() / n
        return metrics

    def step(self, done, signals):
        """One step of training, after `done` steps -> {name: metric, float}, and whether any
        process has received a signal"""
        lr = learning_rate(done, self.config)
        metrics = self.gradient(done)

        # a signal may reach one process only; as a metric it stops all at the same step
        metrics['stopped'] = torch.full_like(metrics['loss'], len(signals))
        if WORLD > 1:                   # gradients and metrics become their means over processes
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            average([*grads, *metrics.values()])
        norm = clip_grad_norm_(self.model.parameters(), self.config.grad_clip or math.inf)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group['lr'] = lr
            optimizer.step()
        self.model.zero_grad()

        metrics = {key: x.item() for key, x in metrics.items()}     # waits for the GPU
        stopped = metrics.pop('stopped') > 0
        return dict(metrics, lr=lr, grad_norm=norm.item()), stopped

    # all steps
    def loop(self, signals):
        """Steps, validations and checkpoints, until the last step or a signal. signals: see
        caught_signals"""
        config, state = self.config, self.state
        first = state['step']
        if RANK == 0:                   # the log may have steps after the checkpoint: remove them
            with open(self.out / 'log.jsonl', 'a') as f:
                f.truncate(min(f.tell(), state['log_size']))

        for done in range(first, config.max_steps):
            # a step, and a validation if it is due
            start = time.perf_counter()
            metrics, stopped = self.step(done, signals)
            seconds = max(1e-9, time.perf_counter() - start)        # a clock can be coarse
            is_last = done + 1 == config.max_steps
            due = is_last or (done + 1) % config.eval_every == 0
            state['step'] = done + 1
            state['tokens'] += config.tokens_per_step
            entry = self.entry(metrics, seconds)
            if due:
                entry |= self.validations(is_last)
            if not all(map(math.isfinite, entry.values())):
                raise SystemExit(f'step {done + 1} has a number that is not finite; try a lower '
                                 f'--lr and another --out: {entry}')

            # save and log
            if RANK == 0:
                self.save(entry, due, due or stopped)
                n = done + 1 - first                    # steps of this process
                if n == 1:                              # in which layers are compiled
                    began = time.perf_counter()
                self.show(entry, seconds, n, time.perf_counter() - began, due)
            # a signal in the last validation ends the program, too: else RPT would start after its
            # reference LM
            if stopped or (is_last and signals):
                raise SystemExit(f'stopped at step {done + 1}; run it again to resume')
        barrier()                       # until ckpt.pt is written

    def entry(self, metrics, seconds):
        """The line of a step in the log, without validations: a dict"""
        speed = self.config.tokens_per_step / seconds
        entry = dict(step=self.state['step'], tokens=self.state['tokens'], **metrics,
                     tokens_per_s=speed)
        if self.peak:
            entry['mfu'] = speed / self.peak
        if torch.cuda.is_initialized():
            entry['gb'] = torch.cuda.max_memory_allocated() / 2 ** 30
        return entry

    def validations(self, is_last):
        """What a validation adds to the line of a step -> {name: number}"""
        config = self.config
        progress = (self.state['step'] - 1) / config.max_steps
        loss, n_tokens = self.validate(progress, config.val_tokens)
        entry = dict(val_loss=loss, val_tokens=n_tokens)
        if config.gains:
            entry |= self.gains(progress, loss)
        if is_last:
            entry['val_loss_all'], _ = self.validate(progress)
        return entry

    @torch.no_grad()
    def validate(self, progress, at_most=sys.maxsize):
        """The loss of micro-batches of val, see val_numbers -> nats per token, the number of
        tokens"""
        numbers = self.val_numbers(at_most)
        quiet = RANK > 0 or len(numbers) < len(self.val_batches)

        # the sums of nats and tokens; each process has its share of the micro-batches
        total = torch.zeros(2, dtype=torch.float64)
        self.model.eval()
        for number in progress_bar(numbers[RANK::WORLD], 'validation', quiet=quiet):
            batch = self.val_batches.in_order(number)
            scored = (batch.targets >= 0).sum().item()
            loss, _ = self.forward(batch, progress)
            total += torch.tensor([loss.item() * scored, scored])
        self.model.train()

        # over all processes
        if WORLD > 1:
            total = total.to(self.device)
            dist.all_reduce(total)
        nats, n_tokens = total.tolist()
        return nats / n_tokens, int(n_tokens)

    def gains(self, progress, loss):
        """What retrieval gains over the other ways of reading, as `off`, in a validation whose loss
        is `loss` -> {'gain_over_off': nats per token, ...}"""
        gains = {}
        for way in self.model.ways()[1:]:
            self.model.way = way
            loss_of_way, _ = self.validate(progress, self.config.val_tokens)
            gains[f'gain_over_{way}'] = loss_of_way - loss
        self.model.way = self.model.ways()[0]
        return gains

    def save(self, entry, due, checkpoint):
        """Appends the entry to the log; writes best.pt if its validation loss is the lowest, and
        ckpt.pt if `checkpoint` is True."""
        state = self.state
        with open(self.out / 'log.jsonl', 'a') as f:
            f.write(json.dumps(entry) + '\n')
            state['log_size'] = f.tell()
        is_validated_as_trained = self.kind != 'packed'             # TRIME's memory ext is not
        if due and is_validated_as_trained and entry['val_loss'] < state['best']:
            state['best'] = entry['val_loss']
            write(self.out / 'best.pt', state)
        if checkpoint:
            self.save_checkpoint()

    def save_checkpoint(self):
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        write(self.out / 'ckpt.pt', dict(self.state, optimizers=optimizers))

    def show(self, entry, seconds, n, seconds_since, due):
        """Prints the metrics of some of the steps in a line: losses with four decimals, others with
        four digits. seconds: time of this step, the n-th of this process; seconds_since: time since
        the end of the first one"""
        step, max_steps = entry['step'], self.config.max_steps
        left = seconds_since / max(1, n - 1) * (max_steps - step) / 60      # minutes
        if n == 1:
            print(f'the first step took {seconds:.1f} s')
        if n == 10 and left > 5:                        # with how many steps would it take 4?
            few = step + 4 * (max_steps - step) / left
            print(f'{left:.0f} min left; with --max-steps {few:.0f} it would be about 4 min')
        if not (due or step == 1 or step % max(1, max_steps // 30) == 0):
            return
        columns = [f'step {step:6d}/{max_steps}']
        for key, x in entry.items():
            if key not in NOT_SHOWN:
                digits = '.4f' if 'loss' in key else '.4g'
                columns.append(f'{key} {x:{digits}}')
        columns.append(f'{entry["tokens_per_s"]:,.0f} tokens/s')
        if n > 1:
            columns.append(f'{left:.1f} min left{self.stage}')
        print(*columns, sep=' | ')


# --------------------------------------------------------------------------------------------------
# model files
def list_models():
    """{name: module} of this repository's models"""
    models = {'trime': 'trime', 'rpt': 'rpt', 'drt': 'drt'}
    for path in sorted(Path(__file__).with_name('compared').glob('*.py')):
        if re.search(r'^class \w+Config\b', path.read_text('utf-8'), re.M):    # cache.py has none
            models[path.stem] = f'compared.{path.stem}'
    return models


MODELS = list_models()


def import_file(path):
    """Imports a user's model file, which can import files of its folder. SystemExit if there is
    none, or if its name is taken."""
    path = Path(expanded_path(path)).resolve()
    name = path.stem
    if name in MODELS and importlib.util.find_spec(MODELS[name]).origin == str(path):
        return importlib.import_module(MODELS[name])        # a file of this repository
    module = sys.modules.get(name)
    if module and getattr(module, '__file__', None) == str(path):
        return module
    if not path.is_file():
        raise SystemExit(f'--model {path}: there is no such file')
    if not name.replace('-', '_').isidentifier():
        raise SystemExit(f'--model {path}: no class can be named {name}; rename the file, with '
                         'letters, digits, _ and - only, a letter first')
    other = importlib.util.find_spec(name)          # the file itself, if it lies beside train.py
    if name in MODELS or (other and other.origin != str(path)):
        raise SystemExit(f'--model {path}: {name} is the name of another module; rename the file')
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def no_model(name):
    """What is wrong with a value of --model that is neither a name nor a file .py"""
    near = difflib.get_close_matches(name.lower(), MODELS, n=1)
    hint = f'; the nearest is {near[0]}' if near else ''
    if os.path.isfile(f'{name}.py'):
        hint = f'; the file is --model {name}.py'
    return f'is none of {", ".join(MODELS)}, nor a file .py{hint}'


def find_model(name):
    """The class X of --model: a name of MODELS, or a path that ends with .py. Its name is that of
    the file, in any case and without _ and -."""
    if name.endswith('.py'):
        module = import_file(name)
    elif name in MODELS:
        module = importlib.import_module(MODELS[name])
    else:
        raise SystemExit(f'--model {name} {no_model(name)}')
    wanted = re.sub('[_-]', '', Path(module.__file__).stem).lower()
    for attribute, value in vars(module).items():
        if attribute.lower() == wanted and inspect.isclass(value):
            if not issubclass(value, torch.nn.Module):
                raise SystemExit(f'--model {name}: {attribute} has to be an nn.Module')
            check_parts(value)
            return value
    raise SystemExit(f'--model {name}: the file has no class {wanted.capitalize()}')


def model_name(Model):
    """The name of its file, which a checkpoint holds"""
    return Model.__module__.split('.')[-1]


def part_of(Model, name, default=None):
    """What a model's file defines under a name; else what the file of its parent class defines,
    and so on"""
    for cls in Model.__mro__:
        module = sys.modules[cls.__module__]
        if hasattr(module, name) and issubclass(cls, torch.nn.Module):
            return getattr(module, name)
    return default


def check_parts(Model, model=None):
    """SystemExit unless the file of a model, or the model, defines what is needed first."""
    if model is None:
        names = 'PRESETS', 'COMPILED', 'batches'
        missing = [name for name in names if part_of(Model, name) is None]
    else:
        names = 'config', 'PIECE', 'stream', 'read', 'ways'
        missing = [name for name in names if not hasattr(model, name)]
    if missing:
        raise SystemExit(f'{sys.modules[Model.__module__].__file__}: {missing[0]} is not defined; '
                         'the beginning of train.py has what a model file needs')


def config_of(Model):
    """XConfig of a model X, or that of the class that it inherits from. SystemExit if the file of X
    extends it under another name, or without @dataclass: its fields would be no flags"""
    for cls in Model.__mro__:
        name = f'{cls.__name__}Config'
        Config = getattr(sys.modules[cls.__module__], name, None)
        if Config:
            break
    else:
        raise SystemExit(f'{Model.__module__}.py has no {Model.__name__}Config')
    if '__dataclass_fields__' not in vars(Config):
        raise SystemExit(f'{Model.__module__}.py: {Config.__name__} needs @dataclass')

    if cls is Model:
        return Config

    # an inherited config: the file of X must not extend it under another name than XConfig
    own = sys.modules[Model.__module__]
    for name, value in vars(own).items():
        is_own = getattr(value, '__module__', '') == Model.__module__ and isinstance(value, type)
        if is_own and issubclass(value, Config) and value is not Config:
            raise SystemExit(f'{own.__file__}: {name} has to be {Model.__name__}Config')
    return Config


# --------------------------------------------------------------------------------------------------
# flags, each from a field of a config
@functools.cache        # getsource parses a whole file
def comments_of(Config):
    """The comment after each field of a dataclass and of those that it inherits from, from their
    source, as `    lr: float = 8e-3     # peak rate` -> {field: comment}"""
    comments = {}
    for cls in reversed(Config.__mro__[:-1]):
        comments |= dict(re.findall(r'^ +(\w+):[^#\n]*# *(.+)$', inspect.getsource(cls), re.M))
    return comments


def flag_of(field):
    """The flag of a field of a config"""
    return f'--{field.replace("_", "-")}'


def has_flag(Config, flag):
    """Has this config, or None, a field for this flag?"""
    return Config is not None and flag in map(flag_of, Config.__dataclass_fields__)


def add_flags(parser, Config):
    """A flag for each field of a config. Its help is the comment after the field. SystemExit for a
    field that cannot be a flag."""
    comments = comments_of(Config)
    types = get_type_hints(Config)      # not f.type: with future annotations it is a string
    group = parser.add_argument_group(Config.__name__)
    for f in fields(Config):
        if f.name not in comments:
            raise SystemExit(f'{Config.__name__}.{f.name} needs a comment in its line: it is the '
                             'help of the flag')
        is_type = get_origin(types[f.name]) in (None, Literal)          # not list[int], int | None
        if not is_type or types[f.name] in (tuple, list, set, dict) or f.default is MISSING:
            raise SystemExit(f'{Config.__name__}.{f.name} needs a default, and has to be a bool, '
                             'int, float, str, Literal, or a function of the text of its flag')
        if flag_of(f.name) in parser._option_string_actions:
            raise SystemExit(f'{flag_of(f.name)} is two flags: rename the field {f.name} of the '
                             "model's config")
        choices = get_args(types[f.name])               # of a Literal
        kind = dict(type=types[f.name])
        if choices:
            kind = dict(choices=choices)
        if types[f.name] is bool:
            kind = dict(action=argparse.BooleanOptionalAction)
        text = comments[f.name].replace('%', '%%')      # % is special in a help
        group.add_argument(flag_of(f.name), default=f.default,
                           help=f'{text} (default: %(default)r)', **kind)


def trouble_of_flag(word, argv, parser):
    """What is wrong with a word of the command line that no flag takes, in a line"""
    for before, after in zip(argv, argv[1:]):
        action = parser._option_string_actions.get(before)
        if after == word and action and action.nargs == 0:
            return f'{before} takes no value, but {word} follows'
    if word in MODELS or word.endswith('.py'):
        return f'{word} without a flag: --model {word}'
    if os.path.exists(word):
        return f'{word} without a flag: --data {word}'
    flag = word.split('=')[0]
    owners = [name for name in MODELS if has_flag(config_of(find_model(name)), flag)]
    if owners:
        return f'{flag} is a flag of {", ".join(owners)}, not of this model'
    if not word.startswith('-'):
        return f'{word}: no flag takes this value; one with blanks needs quotes'
    near = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
    hint = f'the nearest is {near[0]}' if near else '--help lists all'
    return f'{flag} is no flag here; {hint}'


def parse_flags(parser, argv):
    """The values of all flags. An unknown one is an error that names what to do. Configs check
    which numbers have to be 1 or more."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(trouble_of_flag(unknown[0], argv, parser))
    for name, x in vars(args).items():
        if not isinstance(x, int | float):
            continue
        if x < 0:
            parser.error(f'{flag_of(name)} {x} cannot be negative')
        if not x < 2 ** 63:                                             # or nan
            parser.error(f'{flag_of(name)} {x} has to be a number up to 2^63 - 1')
    return args


def model_choice(text):
    """The type of --model"""
    if text not in MODELS and not text.endswith('.py'):
        raise argparse.ArgumentTypeError(f'{text} {no_model(text)}')
    return text


def parse(argv=None):
    """-> the model's class, its config, TrainConfig. SystemExit with one line for a bad flag."""
    argv = sys.argv[1:] if argv is None else argv

    # the model has flags, with defaults, and presets, which replace some of the defaults
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda message: sys.exit(f'train.py: {message}')
    parser.add_argument('--model', default='trime', type=model_choice, metavar='NAME',
                        help=f'{", ".join(MODELS)}, or a file .py (default: trime)')
    Model = find_model(parser.parse_known_args(argv)[0].model)
    name = model_name(Model)
    presets = part_of(Model, 'PRESETS')
    parser.add_argument('--preset', default='tiny', choices=presets, help='default: tiny')
    configs = config_of(Model), TrainConfig
    for Config in configs:
        add_flags(parser, Config)
    parser.set_defaults(out=f'out/{name}')
    args, _ = parser.parse_known_args(argv)
    parser.set_defaults(**presets[args.preset])

    # with --init, the settings of the file that the run starts from (its own ckpt.pt, if it is
    # resumed) replace the model's defaults, and the tokenizer
    if args.init:
        file = start_of(args)
        state, _, tokenizer = read_checkpoint(file, [Model])
        if state['model_name'] != name:
            parser.error(f'{file} has weights of another model: --model {state["model_name"]}')
        # the model of a preset would have no effect, except its micro-batch, which is set below
        of_file = state['config']
        differ = [key for key, x in presets[args.preset].items()
                  if x != of_file.get(key, x) and key not in ('vocab_size', 'micro_batch')]
        if args.preset != 'tiny' and differ:
            parser.error(f'--preset {args.preset} has another {differ[0]} than {file}: leave it '
                         'out with --init')
        parser.set_defaults(**of_file, tokenizer=tokenizer)
        if args.preset != 'tiny' and 'micro_batch' in presets[args.preset]:
            parser.set_defaults(micro_batch=presets[args.preset]['micro_batch'])

    # what is on the command line comes before all defaults
    parser.add_argument('-h', '--help', action='help')
    values = vars(parse_flags(parser, argv))
    if args.init and values['tokenizer'] is not tokenizer:      # --tokenizer NAME
        if values['tokenizer'] != tokenizer.name:
            parser.error(f'--tokenizer: the weights of --init need theirs, {tokenizer.name}')
        values['tokenizer'] = tokenizer
    refuse_vocab_size(parser, argv, values)
    try:
        model_config, config = (C(**{f.name: values[f.name] for f in fields(C)}) for C in configs)
    except ValueError as e:                             # fields that do not fit together
        parser.error(e)
    return Model, model_config, config


def refuse_vocab_size(parser, argv, values):
    """An error if --vocab-size is on the command line and the tokenizer has its own size."""
    tokenizer = values['tokenizer']
    given = any(re.match('--vocab-size(=|$)', arg) for arg in argv)
    name = getattr(tokenizer, 'name', tokenizer)
    n_vocab = getattr(tokenizer, 'n_vocab', data.FIXED_SIZES.get(name, values['vocab_size']))
    if given and n_vocab != values['vocab_size']:
        parser.error(f'--vocab-size {values["vocab_size"]}: the tokenizer {name} has {n_vocab} ids')
    if given and tokenizer == 'word' and values['data'] != 'random':
        parser.error('--vocab-size: the tokenizer word has all words of the text')


# --------------------------------------------------------------------------------------------------
# files of a run
LOCK = 'train.lock'                             # a file in the folder of a run while it trains
NOT_COMPARED = 'data', 'out', 'resume', 'device', 'compile', 'kernel', 'max_steps'  # when resumed


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


def start_of(config):
    """The file that a run starts from: its last checkpoint, else that of --init, else none, ''"""
    file = Path(config.out, 'ckpt.pt')
    return file if os.path.exists(file) else config.init    # False without permission


def unreadable(path, error, reason):
    """The SystemExit for an error while a checkpoint is read: a broken file, or one of other code,
    can raise anything."""
    if re.search('allocate|out of memory|MemoryError', repr(error)):
        reason = 'cannot be read: out of memory'
    return SystemExit(f'{path} {reason}')


def read_checkpoint(path, Models=()):
    """Reads a file that Run.save wrote here or elsewhere, or ckpt.pt in a folder. Models: classes
    of users' files, of which one can be that of the weights: a checkpoint holds only a name, and no
    checkpoint makes this program import a file -> its state, the model in fp32, the Tokenizer"""
    # the file
    path = Path(path).expanduser()
    if os.path.isdir(path):
        path /= 'ckpt.pt'
    if not os.path.exists(path):
        raise SystemExit(f'{path}: there is no such file, or no permission')
    try:
        state = torch.load(path, 'cpu', weights_only=True)
    except Exception as e:                              # torch's message can give bad advice
        reason = getattr(e, 'strerror', None) or type(e).__name__
        raise unreadable(path, e, f'is not a checkpoint, or it is damaged ({reason})')
    name = state.get('model_name') if isinstance(state, dict) else None
    if not isinstance(name, str) or not re.fullmatch(r'[\w-]+', name):
        raise SystemExit(f'{path} is not a checkpoint of train.py: it names no model')

    # the class of the model
    classes = {model_name(Model): Model for Model in Models}
    if name in MODELS:
        classes[name] = find_model(name)
    if name not in classes:
        raise SystemExit(f'{path} has weights of a model file of yours: --model PATH/{name}.py, or '
                         f"eval.load(RUN, 'PATH/{name}.py') in a notebook")
    Model = classes[name]

    # the model and the tokenizer
    try:
        Config = config_of(Model)
        config = state['config'] = vars(Config()) | state['config']     # newer fields: the defaults
        tokenizer = data.Tokenizer(**state['tokenizer'])
        model = Model(Config(**config))
        model.load_state_dict(state['model'])
        for key, x in model.state_dict().items():
            if not x.isfinite().all():
                raise ValueError(f'{key} is not finite')
        return state, model, tokenizer
    except Exception as e:
        reason = textwrap.shorten(f'{type(e).__name__}: {e}', 300, placeholder=' ...')
        raise unreadable(path, e, f'is not a checkpoint of this version: {reason}')


@contextlib.contextmanager
def locked(out):
    """Makes the folder of a run, and keeps other programs from training in it. The lock ends with
    the process, by kill -9 too. If the folder remains empty, it is removed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise SystemExit(f'--out {out} is a file, or lies below one: choose another folder')
    if RANK > 0:                                        # the first process has the lock
        try:
            yield
        finally:
            with contextlib.suppress(OSError):          # on another machine it is empty: remove it
                out.rmdir()
        return

    file = open(out / LOCK, 'a')
    try:
        if fcntl:                                       # on Windows there is none, and no lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # is it still the lock of this folder? A program that ends removes its own
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(out / LOCK)):
                raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError):        # or its program has just ended
        raise SystemExit(f'{out} is in use by another program; try another --out')
    except OSError:                                     # of a file system without locks
        pass

    try:
        for name in 'ckpt.pt', 'best.pt', 'config.json':
            for incomplete in out.glob(f'{name}.*.tmp'):        # of a killed program, see `write`
                incomplete.unlink(missing_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):      # it has files; Windows removes no open file
            (out / LOCK).unlink(missing_ok=True)
            file.close()
            out.rmdir()


def read_config(out, state):
    """The settings of the run in a folder: those of config.json and of its checkpoint"""
    try:
        saved = json.loads((out / 'config.json').read_text('utf-8'))
        return {**saved, **state['config'], 'corpus': state['corpus'],
                'model': state['model_name']}
    except Exception as e:                              # a broken file can raise anything
        raise SystemExit(f'{out}/config.json is damaged ({e!r:.200}): --init {out}/ckpt.pt '
                         'with another --out starts from its weights')


def in_words(settings):
    """{name: value} in a line"""
    return ', '.join(f'{name}={x}' for name, x in settings.items())


def trouble_of(files, saved, settings, state, kind):
    """Why a run cannot begin or be resumed in a folder with these files, else ''"""
    if 'ckpt.pt' not in files:
        if files:
            return f'is not empty and has no run to resume: {", ".join(files[:4])}'
        return ''

    # the micro-batch is a part of the model where memories are those of other segments
    ignored = {*NOT_COMPARED}
    if kind in ('segments', 'documents'):
        ignored.add('micro_batch')
    differ = [key for key in settings if key not in ignored and saved.get(key) != settings[key]]
    if differ:
        of_run, of_command = ({key: x.get(key) for key in differ[:4]} for x in (saved, settings))
        return f'has a run with {in_words(of_run)}, the command has {in_words(of_command)}'
    if settings['resume'] == 'no':
        return 'has a run, which --resume no leaves as it is'
    if state['step'] > settings['max_steps']:
        return f'has {state["step"]} steps; a larger --max-steps resumes it'
    return ''


def check_folder(out, settings, state, kind):
    """SystemExit, unless the folder is empty or has the run that is resumed: no file is lost.

    settings: config.json as it will be; state: what the run starts from; kind: of its batches
    -> the settings of the run that is resumed, {} if it is new"""
    # config.json alone, of this program, is of a run that was killed before its first ckpt.pt
    files = sorted({*os.listdir(out)} - {LOCK})
    if files == ['config.json'] and b'"ran_on"' in (out / 'config.json').read_bytes():
        files = []
    saved = read_config(out, state) if 'ckpt.pt' in files else {}
    trouble = trouble_of(files, saved, settings, state, kind)
    barrier()                                           # before the first process writes
    if not trouble:
        return saved

    # the message has a name that is free
    run, i = str(out).removesuffix('-reference'), 2     # of a stage of RPT: that of the whole run
    while Path(f'{run}-{i}').exists():
        i += 1
    message = f'{out} {trouble}; try --out {run}-{i}'
    of_same_model = saved.get('model', settings['model']) == settings['model']
    if 'best.pt' in files and of_same_model and not str(out).endswith('-reference'):
        message += f' (with --init {out}/best.pt it begins with these weights)'
    raise SystemExit(message)


def write_config(out, settings, ran_on, saved):
    """Writes config.json: all settings, and what is needed to repeat the run. saved: what is there
    before a run is resumed, else {}; `earlier` keeps how it was run before"""
    git = f'git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty'
    ran = dict(command=shlex.join(sys.argv), commit=subprocess.getoutput(f'{git} 2>/dev/null'),
               ran_on=ran_on, python=sys.version, torch=torch.__version__)
    earlier = saved.get('earlier', [])
    before = {key: saved[key] for key in ran if key in saved}
    if before and before != ran:
        earlier = [*earlier, before]
    if earlier:
        ran['earlier'] = earlier
    write(out / 'config.json', json.dumps(settings | ran, indent=1))


# --------------------------------------------------------------------------------------------------
# processes and signals
def barrier():
    """Waits until all processes are here."""
    if WORLD > 1:
        dist.barrier()


def average(tensors):
    """Replaces tensors by their means over the processes. They are sent in messages of 16 MB,
    because each message takes time, and large ones take longer."""
    flat = parameters_to_vector(tensors).div_(WORLD)
    for message in flat.split(2 ** 22):
        dist.all_reduce(message)
    vector_to_parameters(flat, tensors)


def fingerprint(tensors):
    """The sum of all absolute values, to 7 digits, as text: two sets of weights rarely share it"""
    sums = [x.detach().double().abs().sum().item() for x in tensors]
    return f'{math.fsum(sums):.6e}'


def check_processes(run):
    """Compares what the processes start from, before the first step. SystemExit in all of them if
    it differs, as on machines without a shared disk. The weights become those of the first one."""
    if WORLD == 1:
        return

    # what this process starts from
    local_values = {
        'the step of ckpt.pt': run.state['step'],
        'the text': run.corpus.fingerprint,
        'the precision (--dtype sets it)': 'bf16' if run.bf16 else 'fp32',
        'the version of torch': torch.__version__}
    for key, x in run.settings.items():
        if key not in ('data', 'out', 'corpus'):
            local_values[f'the setting {key}'] = x
    local_values['weights'] = fingerprint(run.model.parameters())

    # what all of them start from
    values = [None] * WORLD
    dist.all_gather_object(values, local_values)
    for name, of_first in values[0].items():
        for rank, other in enumerate(values):
            if other[name] != of_first:
                raise SystemExit(
                    f'process {rank} has another value of {name} than process 0 ({other[name]}, '
                    f'{of_first}): all machines need the same text, settings and --out, on a '
                    'shared disk or as copies')

    # the weights of the first one
    for x in run.model.state_dict().values():
        dist.broadcast(x, 0)


def load_corpus(config, vocab_size):
    """The corpus of --data. SystemExit, too, if only the first machine has it"""
    try:
        return data.load(config.data, config.tokenizer, vocab_size, quiet=RANK > 0)
    except SystemExit as e:
        if RANK > 0:
            raise SystemExit(f'process {RANK}: {e} (each machine needs the text)')
        raise


@contextlib.contextmanager
def caught_signals():
    """A list, to which a SIGINT, SIGTERM or SIGHUP is appended: Run.loop then ends after its step,
    and writes a checkpoint. A second signal of the same kind has the effect that it has outside."""
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


# --------------------------------------------------------------------------------------------------
# hardware
PEAK_FLOPS = {'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12}  # dense bf16


def hardware(device):
    """The torch.device that --device names; on a CPU, glibc then keeps freed memory, up to 2 GB."""
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if not torch.get_device_module(device).is_available():
        raise SystemExit(f'PyTorch finds no {device}: --device cpu works')
    if device == 'mps':
        print('--device mps: nothing was measured on one')
    if device == 'cpu' and platform.libc_ver()[0] == 'glibc':
        mallopt = ctypes.CDLL(None).mallopt             # else pages are freed and cleared each step
        mallopt(-3, 2 ** 25)                            # M_MMAP_THRESHOLD
        mallopt(-1, 2 ** 31 - 1)                        # M_TRIM_THRESHOLD
    if device == 'cuda':
        # 0 without LOCAL_RANK: a launcher that sets RANK alone is assumed to show each process one
        # GPU
        number = int(os.getenv('LOCAL_RANK', 0))
        n_devices = torch.cuda.device_count()
        if number >= n_devices:
            raise SystemExit(f'process {number} of this machine has no GPU of its own: there are '
                             f'{n_devices}; a smaller --nproc_per_node works')
        device = f'cuda:{number}'
        torch.cuda.set_device(device)
    return torch.device(device)


def is_bf16_fast(device):
    """Does the hardware multiply bf16 faster than fp32?"""
    if device.type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)

    # AMX or AMD's AVX512-BF16; with Intel's, bf16 takes twice the time of fp32
    cpu = Path('/proc/cpuinfo').read_text() if sys.platform == 'linux' else ''
    return 'amx_bf16' in cpu or ('avx512_bf16' in cpu and 'AuthenticAMD' in cpu)


def precision(device, dtype):
    """Sets how fp32 is multiplied, and that denormal numbers, with which CPUs are slow, become 0;
    dtype: as --dtype
    -> whether the forward pass is in bf16, a function that returns its autocast context"""
    bf16 = dtype == 'bf16' or (dtype == 'auto' and is_bf16_fast(device))
    rounded = 'medium' if device.type == 'cpu' else 'high'      # fp32 products may be bf16, or TF32
    torch.set_float32_matmul_precision(rounded if bf16 else 'highest')
    torch.backends.cudnn.allow_tf32 = bf16                      # of convolutions, as in Griffin
    torch.set_flush_denormal(True)
    return bf16, lambda: torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def compile_layers(model, classes):
    """Applies torch.compile to the layers, not to the whole model: layers of a class share their
    machine code, so many compile as quickly as one."""
    torch.compiler.reset()                              # a reference LM's are not needed any more
    torch._dynamo.config.cache_size_limit = 64          # kinds of layers, lengths of --grow-context
    # without autocast, as in eager mode: products in fp32, such as scores, have fp32 gradients
    if hasattr(torch._functorch.config, 'backward_pass_autocast'):      # in recent versions
        torch._functorch.config.backward_pass_autocast = 'off'
    layers = [layer for layer in model.modules() if isinstance(layer, classes)]
    print(f'the first step compiles {len(layers)} layers, which can take minutes; --compile off '
          'avoids it')
    for layer in layers:
        layer.compile(dynamic=False)


def peak_tokens_per_s(device, bf16, n_params):
    """What mfu (model FLOPs utilization) is a share of: a token takes 6 FLOPs for each parameter.
    None if the peak of the hardware is not known"""
    if bf16 and device.type == 'cuda':
        for name, flops in PEAK_FLOPS.items():
            if name in torch.cuda.get_device_name(device):
                return WORLD * flops / (6 * n_params)
    return None


# --------------------------------------------------------------------------------------------------
# the command
# parts of the messages of Python, NumPy, torch, CUDA and cuBLAS
OUT_OF_MEMORY = 'allocate|ALLOC_FAILED|out of memory|overflowed|MemoryError'


@contextlib.contextmanager
def short_errors(program, smaller):
    """Errors of files, memory and the Triton kernels, Ctrl-C, and the end of another process end
    the program with one line. smaller: what to try if memory is not enough"""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(f'{program}: stopped')
    except (OSError, NotImplementedError) as e:
        if not str(e):                                  # of a user's model file
            raise
        raise SystemExit(f'{program}: {e}')
    except (RuntimeError, MemoryError) as e:
        if re.search(OUT_OF_MEMORY, repr(e)):
            raise SystemExit(f'out of memory; try {smaller}')
        if re.search('unexpected pos|write error|truncate', str(e)):       # of torch, of faiss
            raise SystemExit(f'{program}: is the disk full? {e!r:.200}')
        if WORLD > 1 and re.search('gloo|NCCL|Connection', str(e)):
            raise SystemExit(f'{program}: process {RANK}: another process has ended, and its '
                             'message has the reason, or the processes cannot reach each other: '
                             f'{e!r:.200}')
        raise


def smaller_sizes(Model, model_config, config):
    """What to try when memory is not enough: the next smaller micro-batch that divides a step"""
    batches = part_of(Model, 'batches')(model_config)
    is_independent = batches['kind'] in ('segments', 'documents')
    least = 1 if is_independent else 2
    T = model_config.block_size
    sequences = config.tokens_per_step // (WORLD * T)               # of a step and a process
    group = batches.get('consecutive') or 1
    smaller = [B for B in range(least, model_config.micro_batch)
               if sequences % B == 0 and B % group == 0]
    if not smaller:
        return f'--block-size {T // 2} and another --out'
    if is_independent:
        return f'--micro-batch {smaller[-1]}: the run is then resumed'
    return f'--micro-batch {smaller[-1]}, which changes the model, and another --out'


def keep_printing():
    """Without a reader, as after `| head`, what is printed is dropped, and the program continues.
    Characters that a console lacks are replaced."""
    def write_or_drop(stream, write, text):
        try:
            write(text)
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, 'reconfigure'):              # not None, closed; not that of a notebook
            stream.reconfigure(errors='replace')
            stream.write = functools.partial(write_or_drop, stream, stream.write)


def main(argv=None):
    Model, model_config, config = parse(argv)
    if RANK > 0:
        sys.stdout = open(os.devnull, 'w')              # the first process prints
    smaller = smaller_sizes(Model, model_config, config)
    with short_errors('train.py', smaller), locked(Path(config.out)):
        if WORLD > 1:       # after the lock: the processes wait here, and end if it is refused
            backend = 'nccl' if hardware(config.device).type == 'cuda' else 'gloo'
            dist.init_process_group(backend, timeout=datetime.timedelta(hours=6))
        try:
            train(Model, model_config, config)
        except BaseException:
            # a process that exits with threads of gloo can abort. NCCL would wait here for
            # processes that have ended
            if WORLD > 1 and dist.get_backend() == 'gloo':
                dist.destroy_process_group()
            raise
    own_file = ''
    if model_name(Model) not in MODELS:
        own_file = f' --model {shlex.quote(sys.modules[Model.__module__].__file__)}'
    print(f'finished: python eval.py {shlex.quote(config.out)}{own_file}')
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == '__main__':
    keep_printing()
    main()
