"""
Evaluates trained models: any mixture of them in one table, on the same text.

    $ python eval.py RUN [RUN ...] [--task TASK] [flags]
    $ python eval.py out/mine --model mine.py       a run of your own model file
    $ python eval.py out/trime --help               all tasks and flags, those of its model too

A run is a .pt file, or a folder: its best.pt is used, or ckpt.pt if there is none. Tasks:

    report      the table, examples, samples of text and loss.png; for pairs, the task `pairs`
                $ python eval.py out/trime out/rpt out/drt
    table       losses, perplexities, bits per byte, and what retrieval gains
                $ python eval.py out/trime out/drt --task table --split test --json table.json
    frequency   perplexities of rare and of frequent tokens (TRIME, Table 14)
                $ python eval.py out/none out/local --task frequency
    repeats     losses of tokens that occur earlier in their document, and of new ones; a picture
                $ python eval.py out/none out/local --task repeats
    examples    what is retrieved where it helps most, or at the end of a prompt; a page of it
                $ python eval.py out/drt --task examples --html out/page.html
    generate    text that continues a prompt
                $ python eval.py out/drt --task generate --prompt 'def main' --temperature 0.5
    pairs       BLEU, chrF and ROUGE of translations or summaries, after --data x.tsv
                $ python eval.py out/mt --memory ext --split test --task pairs
    translate   translations of the lines of a file
                $ python eval.py out/mt --task translate --prompt-file de.txt --output en.txt
    speed       seconds of reading, generating and training; memory of the state of a text
                $ python eval.py out/base out/drt --task speed --lengths 16k,64k
    niah        needles in a haystack: answers by length and depth (DRT, Table 2)
                $ python eval.py out/niah --task niah --lengths 1k,64k,1m
    datastore   of TRIME alone: is the next token among the most similar entries? (Table 13)
                $ python eval.py out/none --memory ext --task datastore
    ranks       of RPT alone: are the chunks that help ranked first? (Tables 2 and 3)
                $ python eval.py out/rpt out/rpt-reference --task ranks

Each token of a document except the first is scored once, in fp32; the document is read from its
beginning. A model is evaluated in several ways, values of its attribute `way`:

    on              the model retrieves, or has the memories of --memory
    shuffled        it retrieves random chunks, or memories with exchanged values
    off             it retrieves nothing
    corpus, both    with --retrieve-from: it retrieves from that corpus; from corpus and text
    on+cache, ...   with --cache: the same with a continuous cache (compared/cache.py)

The sections of this file; what a function calls is often further down
    flags, runs                 EvalConfig; EvalRun: a model and its text, log P of all tokens
    losses                      loss_table, metrics, frequency, repeats
    tasks                       examples, samples, pairs, needles, speed
    pictures, a page            plot_losses, page_of
    the command                 TASKS, parse, main

Letters in the shape comments
    B texts    t tokens of a call    n tokens of a document; in beam search, hypotheses
    N documents                      V vocabulary
"""
import train    # before torch: it sets how torch's idle threads wait
import argparse, contextlib, heapq, importlib.util, itertools, json, os, re, sys, tempfile
import time, zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import regex                # tiktoken depends on it
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

import data
from data import new_folder, progress_bar


# --------------------------------------------------------------------------------------------------
# flags: what they are, and which task uses them
UNITS = {'k': 2 ** 10, 'm': 2 ** 20}


def numbers(text):
    """The type of a flag: '1k,16k,2m' -> {'1k': 1024, '16k': 16384, '2m': 2097152}"""
    if not re.fullmatch('[0-9]{1,9}[km]?(,[0-9]{1,9}[km]?)*', text):
        raise argparse.ArgumentTypeError(f'{text!r} is not like 0,16,1k,2m')
    values = {}
    for name in text.split(','):
        unit = UNITS.get(name[-1], 1)
        values[name] = int(name.rstrip('km')) * unit
    return values


def new_file(text):
    """The type of a flag: a path, at which train.write can write a file after the work. Its folder
    is made."""
    name = train.expanded_path(text)
    path = Path(os.path.realpath(name))                 # not a link, but its file
    reason = ''
    of_run = path.name in ('config.json', 'log.jsonl') and any(path.parent.glob('*.pt'))
    if of_run or path.suffix == '.pt':
        reason = 'it is a file of a run'
    elif any(os.path.exists(x) and not os.path.isfile(x) for x in (name, path)):
        reason = 'it is a folder, a device or a pipe'
    else:
        temporary = dict(prefix=f'{path.name}.', suffix='.tmp', dir=path.parent)  # as train.write's
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(**temporary):
                pass
        except OSError as error:
            reason = error.strerror                     # 'File name too long', for example
    if reason:
        raise argparse.ArgumentTypeError(f'{text!r} cannot be written: {reason}')
    return path


@dataclass
class EvalConfig:
    """Each field is a flag, and the comment after it is its help. Where the comment begins with
    names of tasks and a colon, other tasks refuse the flag; a report accepts what its parts do."""
    task: str = 'report'        # what is done; the last lines of --help have all
    model: str = ''             # your model file, as for train.py; several: a.py,b.py
    data: train.source = ''     # another corpus than the one of training
    retrieve_from: train.source = ''    # trime, drt: retrieve from the train split of this corpus
    cache: int = 0              # adds a continuous cache of at most this many tokens to every model
    split: Literal['train', 'val', 'test'] = 'val'              # which part of the corpus
    prompt: str = None          # examples, generate, translate: a text in place of the split's
    prompt_file: train.expanded_path = None     # examples, generate, translate: its file; -: stdin
    html: new_file = None       # examples: a file for a page, a document and what is retrieved
    max_tokens: int = 200       # generate, pairs, translate: new tokens, at most
    temperature: float = 0.8    # generate: 0 takes the likeliest token
    top_k: int = 0              # generate: draws from this many of the likeliest tokens; 0: all
    top_p: float = 0.95         # generate: from the likeliest tokens with this sum of probability
    seed: int = 0               # generate, niah, ranks: of the random draws
    beam: int = 4               # pairs, translate: hypotheses (TRIME: 4); 1: the likeliest token
    lines: int = 200            # pairs: the first lines of the split; 0: all
    output: new_file = None     # translate: a file for the targets, one per line
    lengths: numbers = '1k,4k,16k'      # niah, speed: tokens of the text; k is 2^10, m is 2^20
    depths: numbers = '0,25,50,75,100'  # niah: places of the needles, in %
    json: new_file = None       # a file for the numbers and texts of the task
    device: Literal['auto', 'cuda', 'cpu', 'mps'] = 'auto'      # auto: cuda if present, else cpu


# --------------------------------------------------------------------------------------------------
# runs: a trained model, the text that it is evaluated on, and log P of its tokens
def file_of_weights(name):
    """The file of a run, which is a folder or a .pt file. SystemExit if there is none"""
    for path in Path(name, 'best.pt'), Path(name, 'ckpt.pt'), Path(name):
        if path.is_file():
            return path
    reason = 'there is no such file or folder'
    if os.path.isdir(name):
        reason = 'the folder has neither best.pt nor ckpt.pt'
    raise SystemExit(f'{name}: {reason}; train.py makes runs')


class Trained(NamedTuple):
    """A run as train.py left it"""
    name: str                   # on the command line
    path: Path                  # the file of its weights
    checkpoint: dict            # what this file holds
    model: torch.nn.Module      # in eval mode
    tokenizer: data.Tokenizer


def read_run(name, model_files=''):
    """The Trained of a run. model_files: those of --model, of which one can be that of the run"""
    path = file_of_weights(name)
    Models = [train.find_model(file) for file in model_files.split(',') if file]
    checkpoint, model, tokenizer = train.read_checkpoint(path, Models)
    return Trained(name, path, checkpoint, model.eval(), tokenizer)


def load(name, model_file=''):
    """For a notebook: a run's folder or .pt file -> (model in eval mode, tokenizer). model_file: of
    your own model"""
    trained = read_run(name, model_file)
    return trained.model, trained.tokenizer


def load_text(source, tokenizer, named_by):
    """The data.Corpus of a text. SystemExit if there is none; named_by: begins the message"""
    try:
        return data.load(source, tokenizer, quiet=True)
    except SystemExit as error:         # its message can begin with --data, whatever the flag is
        reason = str(error).removeprefix(f'--data {source!a}: ')
        raise SystemExit(f'{named_by} {source}: {reason}')


def bytes_of_first_tokens(split, tokenizer):
    """The UTF-8 bytes of the first tokens of all documents; unknown words count as none, because
    their lengths are not known"""
    first_ids = split.tokens[split.offsets[:-1]]
    text = ''.join(tokenizer.tokens[i] for i in first_ids)
    if tokenizer.name == 'word':
        text = text.replace('<eos>', '\n').replace('<unk>', '')
        return len(text.encode())
    return len(text)                    # tokens of the others have a character for each byte


class EvalRun:
    """A trained model, the text that it is evaluated on, and log P of the tokens of this text

    name            of the run, as on the command line
    path            the file of its weights
    checkpoint      what this file holds, a dict
    Model           the class of the model
    model           in eval mode; with --cache, a Cache around it
    tokenizer       a data.Tokenizer
    chunk           tokens that are retrieved together; 1: single ones, TRIME's memories
    source          the name or path of the text
    corpus          its data.Corpus
    external        the Corpus of --retrieve-from; without the flag the same as corpus
    split           the data.Split that is evaluated; its n_bytes are those of the scored tokens:
                    all but the first of each document
    documents       the documents of the split that have a scored token, each (n,) int64
    about_text      name, fingerprint and sizes of the text: equal for all runs of a table
    log_p_of        {way: log P of the scored tokens of each document, (n - 1,) fp64}; `evaluate`
                    adds a way
    constants       {name: what was tuned}, for --json; set by prepare"""
    def __init__(self, trained, args):
        """Reads the text. args: the values of all flags; device is a torch.device"""
        # the model
        name = trained.name
        self.name = name
        self.path = trained.path
        self.checkpoint = trained.checkpoint
        self.tokenizer = trained.tokenizer
        self.Model = type(trained.model)
        self.model = trained.model.to(args.device)
        batches = train.part_of(self.Model, 'batches')
        self.chunk = batches(self.model.config).get('chunk', 1)
        self.log_p_of = {}

        # the text, and that of --retrieve-from
        self.source = args.data or self.checkpoint['data']
        named_by = '--data'
        if not args.data:
            named_by = f'--data takes another text: {name} was trained on'
        self.corpus = load_text(self.source, self.tokenizer, named_by)
        is_training_text = self.source == self.checkpoint['data']
        if is_training_text and self.corpus.fingerprint != self.checkpoint['corpus']:
            print(f'{name} was trained on another version of {self.source}: what is now in val and '
                  'test can have been in its training', file=sys.stderr)
        self.external = self.corpus
        if args.retrieve_from:
            if not train.part_of(self.Model, 'prepare_eval'):
                raise SystemExit(f'{name} retrieves from its text alone: evaluate it without '
                                 '--retrieve-from')
            self.external = load_text(args.retrieve_from, self.tokenizer, '--retrieve-from')

        # the split, and what is scored of it
        split = getattr(self.corpus, args.split)
        if split is None:
            raise SystemExit(f'{self.source} has no split {args.split}: choose another --split')
        self.about_text = dict(data=self.corpus.name, text=self.corpus.fingerprint[:8],
                               split=args.split, bytes=split.n_bytes, words=split.n_words)
        n_bytes = split.n_bytes - bytes_of_first_tokens(split, self.tokenizer)
        self.split = split._replace(n_bytes=n_bytes)
        tokens = torch.tensor(split.tokens.astype(int), device=args.device)
        documents = tokens.tensor_split(split.offsets[1:-1].tolist())
        self.documents = [document for document in documents if len(document) > 1]
        if not self.documents:
            raise SystemExit(f'{self.source}: no {args.split} document has two tokens; another '
                             '--split or --data may have some')

    def prepare(self, args):
        """Prepares the model for the text: what it retrieves from and, for TRIME and a cache, the
        constants that are tuned on another split. This can take minutes."""
        self.constants = {}
        prepare_eval = train.part_of(self.Model, 'prepare_eval')
        if prepare_eval:
            tuned = prepare_eval(self.model, self.corpus, self.external, args, self.path)
            self.constants = tuned or {}
        if args.cache:
            self.model = cached_model(self, args)
            self.constants = {way: vars(x) for way, x in self.model.constants.items()}

    @property
    def of_pairs(self):
        """Has the text pairs, "source TAB target"?"""
        return self.corpus.tab >= 0

    @property
    def ways(self):
        """Names of the ways of evaluation; the way `off`, the last one, retrieves nothing"""
        return self.model.ways()

    @property
    def on(self):
        """The way that retrieves most"""
        return 'both' if 'both' in self.ways else self.ways[0]

    @property
    def retrieving(self):
        """The same without --cache, whose memories `trace` does not show"""
        return self.on.removesuffix('+cache')

    def log_p(self, way, tokens):
        """log P of every token of a document except the first: tokens (n,) -> (n - 1,) fp64"""
        self.model.way = way
        parts, state = [], None
        inputs = tokens[:-1].split(self.model.PIECE)
        targets = tokens[1:].split(self.model.PIECE)
        for x, y in zip(inputs, targets):                                   # (t,), (t,)
            log_probs, state = self.model.stream(x[None], state)            # (1, t, V)
            parts.append(log_probs[0].gather(1, y[:, None]))                # (t, 1)
        return torch.cat(parts).flatten().cpu().double().numpy()

    def evaluate(self, way):
        """Sets log_p_of of a way, and that of `off`, with which all are compared; each once."""
        for each in ('off', way):
            if each not in self.log_p_of:
                desc = f'{self.name}, {each}: tokens scored'
                documents = progress_bar(self.documents, desc, size=len)
                self.log_p_of[each] = [self.log_p(each, tokens) for tokens in documents]

    def gains(self):
        """What retrieval gains for each scored token of each document, in nats, (n - 1,)"""
        return [on - off for on, off in zip(self.log_p_of[self.retrieving], self.log_p_of['off'])]


def check_cache(run, args):
    """SystemExit if --cache is for a model that has memories of single tokens. Called before the
    model is prepared, which can take minutes."""
    if not args.cache or run.chunk > 1:
        return
    has_memories = run.ways != ('off',)
    advice = 'leave --cache out'
    if hasattr(args, 'memory') and hasattr(run.model.config, 'memory'):
        # TRIME: only `prepare` sets its ways
        memory = args.memory or run.model.config.memory
        has_memories = memory != 'none' or args.retrieve_from
        advice += ', or add --memory none'
    if has_memories:
        raise SystemExit('eval.py: --cache is for models without a memory of single tokens, which '
                         f'{run.name} has: {advice}')


def cached_model(run, args):
    """The model of a run with a continuous cache (compared/cache.py), tuned on another split"""
    from compared.cache import Cache
    model = Cache(run.model, args.cache).eval()
    split = run.corpus.tuning_split(args.split)
    n_tokens = model.tune(split, run.corpus.tab, args.progress_bar)
    for way, constants in model.constants.items():
        print(f'{run.path}, way {way}+cache: {constants}, tuned on the first {n_tokens:,} tokens '
              f'of {split.name}')
    return model


def constants_of(runs):
    """The constants of memories and caches, which were tuned: {name of a run: them}"""
    return {run.name: run.constants for run in runs}


def ways_of(runs):
    """All pairs of a run and one of its ways"""
    return [(run, way) for run in runs for way in run.ways]


# --------------------------------------------------------------------------------------------------
# the table of losses, and what else is computed from log P of all tokens

# columns of the table: mean losses of the tokens before this position of their document, from that
# of the column to the left on
POSITIONS = {'<512': 512, '<1,024': 1024, '<2,048': 2048, '<4,096': 4096, '4,096+': sys.maxsize}
# columns of Table 14 of TRIME: tokens that occur up to this number of times in the split, and more
# often than those of the column to the left
FREQUENCIES = {'<=10': 10, '10-100': 100, '100-1k': 1000, '1k-10k': 10_000, '>10k': sys.maxsize}


def by_position(log_p, edges):
    """Mean losses of tokens edges[i] to edges[i + 1] - 1 of a document; None where there is none.
    log_p: [(n - 1,)] of the scored tokens of each document, which begin with token 1"""
    losses = []
    for first, stop in itertools.pairwise(edges):
        part = np.concatenate([x[first - 1:stop - 1] for x in log_p])
        losses.append(-part.mean() if len(part) else None)
    return losses


def metrics(log_p, log_p_off, split):
    """The columns of a row

    split               its n_bytes are those of the scored tokens, its n_words of the whole text
    log_p, log_p_off    log P in this way and in the way off, [(n_d,)] of each document d

    Tokens of a document depend on each other, so N documents are the sample. D_d: sum of log_p -
    log_p_off over the n_d tokens of d
        gain = Σ D_d / Σ n_d        error = sqrt(N) std(D_d - gain n_d) / Σ n_d
    The error is the standard error of a ratio of sums."""
    # losses, per token, byte and word
    N = len(log_p)
    n = np.array([len(x) for x in log_p])                                   # (N,)
    total = n.sum()
    nats = -np.concatenate(log_p).sum()
    loss = nats / total
    word_ppl = None
    if nats < 700 * split.n_words:              # else it is infinite: a text without blanks
        word_ppl = np.exp(nats / split.n_words)
    bits_per_byte = None
    if split.n_bytes:                           # 0: each document has a single byte
        bits_per_byte = nats / np.log(2) / split.n_bytes

    # the gain; its error is not known from a single document
    D = np.array([(x - off).sum() for x, off in zip(log_p, log_p_off)])     # (N,)
    gain = D.sum() / total
    error = None
    if N > 1:
        error = np.sqrt(N) * np.std(D - gain * n, ddof=1) / total

    losses = by_position(log_p, [1, *POSITIONS.values()])
    return {'loss': loss,
            'ppl': np.exp(loss),
            'bits/byte': bits_per_byte,
            'word ppl': word_ppl,
            **dict(zip(POSITIONS, losses)),
            'gain over off': gain,
            '±': error}


def cell(x):
    """A value as the tables show it"""
    if x is None:
        return '-'
    if isinstance(x, float):
        return f'{x:,.0f}' if 1e4 <= x < 1e9 else f'{x:#.5g}'
    if isinstance(x, int):
        return f'{x:,}'
    return x


class Table:
    """A table that is printed row by row. A row is a dict; all have the same keys, the columns. A
    column is as wide as its name and its first value need, and at least 8 or as in LEAST."""
    LEAST = {'run': 15, 'way': 9, 'word ppl': 10, 'weight': 10}

    def __init__(self):
        self.rows = []
        self.formats = []                   # of the columns: text is aligned left

    def add(self, row):
        """Prints a row, and keeps it in rows; before the first one, the names of the columns."""
        self.rows.append(row)
        cells = [cell(x) for x in row.values()]
        if len(self.rows) == 1:
            for (name, x), shown in zip(row.items(), cells):
                width = max(self.LEAST.get(name, 8), len(name), len(shown))
                alignment = '<' if isinstance(x, str) else '>'
                self.formats.append(f'{alignment}{width}')
            print()
            print(*map(format, row, self.formats))
        print(*map(format, cells, self.formats))


def loss_table(runs, args):
    """Losses and gains of each run and way, on the same tokens -> all numbers"""
    documents = runs[0].documents
    N = len(documents)
    about = dict(runs[0].about_text, documents=N)
    Table().add(about)
    print('\non: retrieval or memory; shuffled: wrong ones; off: none; corpus, both: '
          '--retrieve-from\n'
          'word ppl: exp(nats / words between blanks); first words count, but are not scored\n'
          f'±: standard error of the gain, from {N} documents (below 5 it means little)')
    table = Table()
    for run, way in ways_of(runs):
        run.evaluate(way)
        table.add({
            'run': run.name,
            'way': way,
            'params': sum(map(torch.numel, run.model.parameters())),
            'trained on': run.checkpoint['tokens'],
            'scored': sum(map(len, run.log_p_of[way])),
            **metrics(run.log_p_of[way], run.log_p_of['off'], run.split)})
    return dict(about, rows=table.rows, constants=constants_of(runs))


def report(runs, args):
    """The table, examples, samples and loss.png; of pairs, the task `pairs`"""
    if runs[0].of_pairs:
        return evaluate_pairs(runs, args)
    result = dict(table=loss_table(runs, args),
                  examples=examples(runs, args, n=1),
                  samples=samples(runs, args))
    save_picture(runs, 'loss.png', plot_losses, runs)
    return result


def frequency(runs, args):
    """Perplexities of rare and of frequent tokens (TRIME, Table 14): a token is in the column of
    the number of times that it occurs in the split; n is how many are scored there -> the rows and
    the constants"""
    table = Table()
    for run, way in ways_of(runs):
        # of each scored token: its frequency, its loss
        run.evaluate(way)
        losses = -np.concatenate(run.log_p_of[way])
        occurrences = np.bincount(run.split.tokens)                         # (V,)
        scored = np.delete(run.split.tokens, run.split.offsets[:-1])        # not the first tokens
        n = occurrences[scored]

        # the perplexities
        row = {'run': run.name, 'way': way, 'all': np.exp(losses.mean())}
        low = 0
        for name, high in FREQUENCIES.items():
            chosen = losses[(n > low) & (n <= high)]
            row[name] = np.exp(chosen.mean()) if len(chosen) else None
            row[f'n {name}'] = len(chosen)
            low = high
        table.add(row)
    return dict(rows=table.rows, constants=constants_of(runs))


def is_repeated(ids):
    """Which tokens of a document (n,) but the first occur earlier in it -> (n - 1,) bool"""
    _, first_places = np.unique(ids, return_index=True)
    repeated = np.ones(len(ids), bool)
    repeated[first_places] = False
    return repeated[1:]


def repeats(runs, args):
    """Losses of tokens that occur earlier in their document, and of new ones, as a table and as
    repeats.png -> the rows and the constants"""
    table = Table()
    for run, way in ways_of(runs):
        run.evaluate(way)
        losses = -np.concatenate(run.log_p_of[way])
        gains = np.concatenate(run.log_p_of[way]) - np.concatenate(run.log_p_of['off'])
        repeated = np.concatenate([is_repeated(ids.cpu().numpy()) for ids in run.documents])
        row = {'run': run.name, 'way': way, 'loss': losses.mean()}
        for name, chosen in ('repeated', repeated), ('new', ~repeated):
            row[name] = losses[chosen].mean() if chosen.any() else None
            row[f'gain, {name}'] = gains[chosen].mean() if chosen.any() else None
            row[f'n {name}'] = int(chosen.sum())
        table.add(row)
    save_picture(runs, 'repeats.png', plot_repeats, table.rows)
    return dict(rows=table.rows, constants=constants_of(runs))


# --------------------------------------------------------------------------------------------------
# examples of retrieval: what is read to predict a token
PAGE_TOKENS = 8192              # tokens of a document that the page of --html shows, at most


def check_prompt(runs, args):
    """SystemExit if the prompt is too short for an example"""
    for run in runs:
        if args.prompt is not None and len(run.tokenizer.encode(args.prompt)) < 2:
            raise SystemExit(f'eval.py: the prompt has fewer than two tokens of {run.name}, too '
                             'few for examples; --task generate works')


def trace_groups(run, tokens, t, state=None):
    """What each group of layers reads to predict token t + 1 of tokens (n,) -> [[Traced]]; a model
    without groups has one. state: of run.model.read(tokens[None, :t]), computed if None"""
    if state is None:
        state = run.model.read(tokens[None, :t])
    n_groups = getattr(run.model.config, 'groups', 0)
    options = [dict(group=group) for group in range(n_groups)] or [{}]
    return [run.model.trace(tokens, t, state, **option) for option in options]


def show_example(run, tokens, t, **facts):
    """Prints what is retrieved to predict token t + 1 of tokens (n,), at most 4 chunks or memories
    of each group of layers. facts: {name: value}, printed too -> all of it as a dict"""
    # the place
    decode = run.tokenizer.decode
    facts['before'] = decode(tokens[:t + 1][-32:])
    facts['next'] = decode(tokens[t + 1:][:16])
    print(f'\n{run.name} retrieves this to predict the token after `before`:')
    for key, value in facts.items():
        if value != '':
            print(f'{key:9} {value!r}')

    # the chunks or memories of largest weight; of chunks, 32 tokens around the end of the first one
    run.model.way = run.retrieving
    first = max(0, run.chunk - 16)
    retrieved = []
    table = Table()
    for group, traced in enumerate(trace_groups(run, tokens, t)):
        for weight, ids, start, end in traced[:4]:
            ids_read = ids[start:end]
            text = decode(ids_read[first:first + 32])
            shown = repr(text)
            if run.chunk == 1:                                  # a memory: context -> value
                shown = f'{decode(ids_read[:-1])!r} -> {decode(ids_read[-1:])!r}'
            ago = None                                          # of another text
            if ids is tokens:
                ago = t + 2 - end
            row = dict(group=group, weight=weight, start=start, end=end, ago=ago, text=text)
            retrieved.append(row)
            table.add(dict(row, text=shown))
    if not retrieved:
        print(f'\nnothing is retrieved: these {t + 1} tokens have no chunk or memory to read yet, '
              'or the model has no trace')
    return dict(run=run.name, **facts, retrieved=retrieved)


def best_examples(run, n):
    """Examples of n documents, those with the largest gains, each of the token that gains most"""
    gains = run.gains()
    order = sorted(range(len(gains)), key=lambda d: -gains[d].max())
    results = []
    for d in order[:n]:
        t = int(gains[d].argmax())                              # gains[d][t] is of token t + 1
        gain = round(float(gains[d][t]), 4)
        results.append(show_example(run, run.documents[d], t, document=d, token=t + 1, gain=gain))
    return results


def examples(runs, args, n=3):
    """What is retrieved at the end of the prompt, or in the documents where a token gains most.
    --html: a page for the prompt, or for the document that gains most in the first run"""
    for run in runs:
        if run.retrieving == 'off':
            print(f'\n{run.name} retrieves nothing: there is nothing to show')
    runs = [run for run in runs if run.retrieving != 'off']
    if not runs:
        if args.html:
            print(f'{args.html} is not written')
        return []
    print('\ngain: in nats; start, end: tokens of the document; ago: tokens from the last of them '
          'to the predicted one\ntext: of chunks, 32 tokens around the end of the first one')

    # the examples; texts: of each run, for the page
    results, texts = [], []
    if args.prompt is not None:
        for run in runs:
            ids = run.tokenizer.encode(args.prompt)
            tokens = run.documents[0].new_tensor(ids)
            results.append(show_example(run, tokens, len(tokens) - 1))
            texts.append(tokens)
    else:
        for run in runs:
            run.evaluate(run.retrieving)
        for run in runs:
            results += best_examples(run, n)
        gains = [gain[:PAGE_TOKENS].sum() for gain in runs[0].gains()]      # of the documents
        d = np.argmax(gains)
        texts = [run.documents[d][:PAGE_TOKENS] for run in runs]

    if args.html:
        write_page(args.html, [page_of(run, tokens) for run, tokens in zip(runs, texts)])
    return results


# --------------------------------------------------------------------------------------------------
# samples: text that a model generates after a prompt
def draw_token(log_p, args, generator):
    """A token drawn from P^(1/temperature) (0: the likeliest), among the top_k likeliest tokens (0:
    all) that are also among the fewest with a sum of top_p (Holtzman et al. 2020). log_p (V,)"""
    logits = log_p / max(args.temperature, 1e-9)
    p, tokens = logits.softmax(-1).sort(descending=True)
    p[p.cumsum(0) - p > args.top_p] = 0         # tokens after the first ones with a sum of top_p
    if args.top_k:
        p[args.top_k:] = 0
    return tokens[torch.multinomial(p, 1, generator=generator)].item()


def generate(model, tokenizer, prompt, args=None):
    """-> text that continues the prompt, to <|endoftext|> or max_tokens; an empty prompt is the
    beginning of a document. args: max_tokens, temperature, top_k, top_p and seed of EvalConfig"""
    args = args or EvalConfig()

    # a document begins after <|endoftext|>, or, with words, after the end of a line
    ids = tokenizer.encode(prompt).tolist()
    if not ids:
        ids = [tokenizer.ids['<eos>'] if tokenizer.eot is None else tokenizer.eot]

    # all tokens of the prompt except the last are read; the last one is the loop's first input
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([ids], device=next(model.parameters()).device)        # (1, t)
    state = read_long(model, tokens[:, :-1], 'tokens of the prompt read')

    generated = []
    last = tokens[:, -1:]                                                       # (1, 1)
    for _ in progress_bar(range(args.max_tokens), 'tokens generated'):
        log_probs, state = model.stream(last, state)                            # (1, 1, V)
        token = draw_token(log_probs[0, -1].cpu().double(), args, generator)
        if token == tokenizer.eot:
            break
        generated.append(token)
        last = tokens.new_tensor([[token]])
    return tokenizer.decode(generated)


def read_long(model, tokens, desc):
    """model.read with a line of progress: tokens (B, t) -> the state"""
    state = None
    pieces = tokens.split(2 ** 16, 1)
    for piece in progress_bar(pieces, desc, size=lambda piece: piece.size(1)):
        state = model.read(piece, state)
    return state


def share_of_repeated_8_grams(ids):
    """The share of the 8-grams of ids (n,) that occur earlier in it; 0 if there is none"""
    grams = [tuple(ids[i:i + 8]) for i in range(len(ids) - 7)]
    if not grams:
        return 0
    return 1 - len(set(grams)) / len(grams)


def samples(runs, args):
    """Continues the prompt, or 1,024 tokens up to the middle of the longest document; on and off"""
    rows = []
    for run in runs:
        # the prompt; without one, what comes before and after the middle of a document
        texts = {}
        prompt = args.prompt
        if prompt is None:
            document = max(run.documents, key=len)
            before, after = document.tensor_split([len(document) // 2])
            prompt = run.tokenizer.decode(before[-1024:]).strip('\ufffd')       # cut characters
            texts['the document'] = run.tokenizer.decode(after[:args.max_tokens])

        # its continuation in both ways, which are one if the model retrieves nothing
        for way in dict.fromkeys([run.on, 'off']):
            run.model.way = way
            texts[way] = generate(run.model, run.tokenizer, prompt, args)

        print(f'\n{run.name} continues\n\n{prompt[-300:]}')
        for way, text in texts.items():
            ids = run.tokenizer.encode(text.replace('\ufffd', '')).tolist()
            share = share_of_repeated_8_grams(ids)
            print(f'\n[{way}: {share:.0%} of the 8-grams are repeated]\n{text}')
            rows.append(dict(run=run.name, way=way, prompt=prompt, text=text, repeated=share))
    return rows


# --------------------------------------------------------------------------------------------------
# pairs: translations and summaries by beam search
SOURCES_AT_ONCE = 64            # sources that are continued together, at most


class Hypothesis(NamedTuple):
    """A text that beam search may continue, or that has ended"""
    prompt: int         # the number of the prompt that it continues
    log_p: float        # log P of the text
    ids: list           # the last id of the prompt, then those of the text
    row: int            # the row of the model's state that has read all of them except the last

    def normalized_log_p(self, length=None):
        """log P / length^0.6 (ours; with log P alone short texts win), by which hypotheses are
        compared. length: None, the tokens of the text; with a larger one, a bound for all of its
        continuations of up to this length, because log P only falls"""
        length = length or len(self.ids) - 1
        return self.log_p / length ** 0.6


def rows_of_state(state, rows):
    """A state of some of its texts, in any order: the texts are the first axis of each tensor in
    it. rows (n,)"""
    def select(x):
        if not torch.is_tensor(x):
            return x
        if len(x) == 1 or x.stride(0) == 0:             # the same for all rows: it is not copied
            return x[:1].expand(len(rows), *x.shape[1:])
        return x[rows.to(x.device)]                     # with --offload some are on the CPU
    return tree_map(select, state)


def continuations(model, state, hypotheses, beam):
    """Each of n hypotheses with each of its `beam` likeliest next tokens -> n * beam hypotheses;
    the new state, of n rows. state: see Hypothesis.row"""
    device = next(model.parameters()).device
    rows = torch.tensor([x.row for x in hypotheses], device=device)             # (n,)
    last = torch.tensor([x.ids[-1:] for x in hypotheses], device=device)        # (n, 1)
    log_probs, state = model.stream(last, rows_of_state(state, rows))           # (n, 1, V)
    log_p, tokens = log_probs[:, -1].topk(min(beam, log_probs.size(2)))         # (n, beam)
    longer = []
    for row, x in enumerate(hypotheses):
        for next_log_p, token in zip(log_p[row].tolist(), tokens[row].tolist()):
            longer.append(Hypothesis(x.prompt, x.log_p + next_log_p, [*x.ids, token], row))
    return longer, state


def beam_search(model, prompts, eot, args):
    """Searches the text of largest normalized log P after each of B prompts: prompts (B, t) -> B
    lists of ids. A text ends with <|endoftext|> (eot), or after max_tokens, or after as many tokens
    as a training sequence has. Each step keeps the args.beam best continuations of a prompt. Of
    those that have ended the best is kept; those that cannot become better than it are dropped."""
    n = min(args.max_tokens, model.config.block_size)
    state = model.read(prompts[:, :-1])
    hypotheses = [Hypothesis(i, 0.0, [token], row=i)
                  for i, token in enumerate(prompts[:, -1].tolist())]
    best = [None] * len(prompts)                                # of those that have ended
    for length in range(1, n + 1):
        # continuations of all prompts at once
        if not hypotheses:
            break
        longer, state = continuations(model, state, hypotheses, args.beam)
        of_prompt = defaultdict(list)
        for x in longer:
            of_prompt[x.prompt].append(x)

        # the best ones of each prompt
        hypotheses = []
        for i, candidates in of_prompt.items():
            unfinished = []
            for x in heapq.nlargest(args.beam, candidates, key=Hypothesis.normalized_log_p):
                if x.ids[-1] != eot and length < n:
                    unfinished.append(x)
                elif best[i] is None or x.normalized_log_p() > best[i].normalized_log_p():
                    best[i] = x

            # log P only falls, so the value of a longer text is at most log P / n^0.6
            if best[i]:
                least = best[i].normalized_log_p()
                unfinished = [x for x in unfinished if x.normalized_log_p(n) > least]
            hypotheses += unfinished
    return [x.ids[1:] for x in best]


def continue_sources(run, sources, args, desc):
    """Beam search after each of some sources, (t,) tensors that end with TAB. Those of equal length
    are continued together, because then nothing is padded -> texts, in the same order"""
    # batches of numbers of sources
    of_length = defaultdict(list)
    for i, source in enumerate(sources):
        of_length[len(source)].append(i)
    batches = []
    for numbers_of_length in of_length.values():
        for start in range(0, len(numbers_of_length), SOURCES_AT_ONCE):
            batches.append(numbers_of_length[start:start + SOURCES_AT_ONCE])

    texts = [''] * len(sources)
    for batch in progress_bar(batches, desc, size=len):
        prompts = torch.stack([sources[i] for i in batch])                      # (B, t)
        for i, ids in zip(batch, beam_search(run.model, prompts, run.tokenizer.eot, args)):
            texts[i] = text_of(run, ids)
    return texts


def text_of(run, ids):
    """The text of ids, without <|endoftext|>"""
    return run.tokenizer.decode(ids).removesuffix('<|endoftext|>')


def show_long_sources(run, sources):
    """Prints how many of some sources, with their TAB, no training sequence can have."""
    T = run.model.config.block_size
    n_long = sum(len(source) > T for source in sources)
    if n_long:
        print(f'{run.name}: {n_long:,} of {len(sources):,} sources have more than {T} tokens '
              '(--block-size). Training leaves such pairs out; here they are continued, too',
              file=sys.stderr)


UNSPACED = r'[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]'


def is_unspaced(text):
    """Are most of the letters of a text of a script that has no blanks between words?"""
    letters = regex.findall(r'\p{L}', text)
    unspaced = regex.findall(UNSPACED, text)
    return 2 * len(unspaced) > len(letters)


def bleu_tokenizer(text):
    """The name of sacrebleu's tokenizer for a text: 13a (words), zh (Chinese) or char (of other
    scripts without blanks between words)"""
    if not is_unspaced(text):
        return '13a'
    is_japanese = regex.search(r'[\p{Hiragana}\p{Katakana}]', text)
    is_chinese = regex.search(r'\p{Han}', text) and not is_japanese
    return 'zh' if is_chinese else 'char'


class RougeTokens:
    """The tokens of ROUGE: the words of a text in small letters, letters and digits of any script
    (rouge-score drops all but a-z and 0-9); of a script without blanks, its characters"""
    def __init__(self, unspaced):
        self.pattern = r'[\p{L}\p{N}]\p{M}*' if unspaced else r'[\p{L}\p{N}\p{M}]+'
        self.name = 'characters' if unspaced else 'words'

    def tokenize(self, text):
        return regex.findall(self.pattern, text.lower())


def text_metrics(references, hypotheses):
    """BLEU and chrF of all lines, means of the F1 of ROUGE, in percent; None where a number means
    nothing: BLEU without a reference of four tokens, ROUGE without one of a token (ROUGE-2: of two)
    -> {name: value}, {name: how its texts are tokenized}"""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU, CHRF
    text = ''.join(references)
    bleu = BLEU(tokenize=bleu_tokenizer(text))
    chrf = CHRF()
    values = {'BLEU': bleu.corpus_score(hypotheses, [references]).score,
              'chrF': chrf.corpus_score(hypotheses, [references]).score}
    n_tokens = [len(bleu.tokenizer(reference).split()) for reference in references]
    if max(n_tokens) < 4:
        values['BLEU'] = None

    # ROUGE, of the lines whose reference has enough tokens
    tokens = RougeTokens(is_unspaced(text))
    n_tokens = [len(tokens.tokenize(reference)) for reference in references]
    for name, enough in dict(rouge1=1, rouge2=2, rougeL=1).items():
        scorer = RougeScorer([name], tokenizer=tokens)
        f1 = [scorer.score(reference, hypothesis)[name].fmeasure
              for reference, hypothesis, n in zip(references, hypotheses, n_tokens) if n >= enough]
        values[name] = 100 * float(np.mean(f1)) if f1 else None
    return values, {'BLEU': str(bleu.get_signature()), 'chrF': str(chrf.get_signature()),
                    'ROUGE': f'{tokens.name} in small letters'}


def check_beam(runs, args):
    """SystemExit unless the runs' text has pairs, and beam search has something to do"""
    if not runs[0].of_pairs:
        raise SystemExit(f'eval.py: --task {args.task} needs runs on .tsv files, source TAB target')
    if min(args.beam, args.max_tokens) < 1:
        raise SystemExit('eval.py: --beam and --max-tokens have to be 1 or more')


def check_pairs(runs, args):
    """SystemExit unless beam search has something to do, and the packages of BLEU and ROUGE are
    installed"""
    check_beam(runs, args)
    if not all(map(importlib.util.find_spec, ['rouge_score', 'sacrebleu'])):
        raise SystemExit('eval.py: --task pairs needs: pip install sacrebleu rouge-score')


def evaluate_pairs(runs, args):
    """Translations or summaries of lines of a split (TRIME, Table 6; DRT, Table 2): BLEU, chrF and
    ROUGE of all lines; the first lines -> the rows; the constants; how texts are tokenized; source,
    reference and hypothesis of each line"""
    table = Table()
    texts, signatures = {}, {}
    for run in runs:
        # sources end with TAB, references with <|endoftext|>
        sources, references = [], []
        for ids in run.documents[:args.lines or None]:
            n = 1 + ids.tolist().index(run.corpus.tab)
            sources.append(ids[:n])
            references.append(text_of(run, ids[n:]))
        show_long_sources(run, sources)

        for way in run.ways:
            run.model.way = way
            hypotheses = continue_sources(run, sources, args, f'{run.name}, {way}: lines')
            values, signatures = text_metrics(references, hypotheses)
            table.add({'run': run.name, 'way': way, 'lines': len(sources), **values})
            texts[f'{run.name}, {way}'] = [
                [text_of(run, source[:-1]), reference, hypothesis]
                for source, reference, hypothesis in zip(sources, references, hypotheses)]

    # how texts are tokenized, and the first lines
    print()
    for name, signature in signatures.items():
        print(f'{name}: {signature}')
    for name, lines in texts.items():
        print(f'\n{name}')
        for line in [('source', 'reference', 'hypothesis'), *lines[:3]]:
            print(*(f'{" ".join(text.split()):40.40}' for text in line))
    return dict(rows=table.rows, constants=constants_of(runs), signatures=signatures, texts=texts)


def check_translate(runs, args):
    """SystemExit unless there are sources for one run, and beam search has something to do"""
    if len(runs) > 1:
        raise SystemExit('eval.py: --task translate is for one run: leave the others out')
    if args.prompt is None:
        raise SystemExit('eval.py: --task translate needs --prompt-file FILE, one source per '
                         'line')
    check_beam(runs, args)


def translate(runs, args):
    """Translations of the lines of --prompt-file: prints them, or writes them to --output, one per
    line; in the way that retrieves most -> [target]"""
    run = runs[0]
    run.model.way = run.on
    lines = args.prompt.removesuffix('\n').split('\n') if args.prompt else []

    # blanks at the ends are not a part of a source, as in training; an empty line remains
    sources = {}                                                # {number of a line: ids}
    for i, line in enumerate(lines):
        source = line.replace('\t', ' ').strip()
        if source:
            ids = run.tokenizer.encode(f'{source}\t')
            sources[i] = run.documents[0].new_tensor(ids)
    show_long_sources(run, sources.values())

    targets = [''] * len(lines)
    texts = continue_sources(run, [*sources.values()], args, f'{run.name}: lines')
    for i, text in zip(sources, texts):
        targets[i] = ' '.join(text.split())
    text = ''.join(f'{target}\n' for target in targets)
    if args.output:
        train.write(args.output, text)
        print(f'{len(targets)} lines: {args.output}')
    else:
        print(text, end='')
    return targets


# --------------------------------------------------------------------------------------------------
# needles in a haystack: sentences hidden in a long text, and questions after it
def needles_of(run):
    """The data.Needles for the text of a run: with two hops if its --data is niah2, else one; in
    chunks of the model, or of 32 tokens. SystemExit if the text or the tokenizer has too little"""
    chunk = run.chunk if run.chunk > 1 else 32
    least = 8 * chunk                   # of a row of Needles; no row is drawn here
    if len(run.split.tokens) <= least:
        raise SystemExit(f'eval.py: --task niah: {run.split.name} has {len(run.split.tokens):,} '
                         f'tokens, more than {least} are needed: another --split or --data')
    return data.Needles(run.split, run.tokenizer, run.corpus.hops or 1, block_size=least,
                        micro_batch=1, seed=0, chunk=chunk)


def chunks_of_depths(depths, n_chunks, hops):
    """The chunks for needles at these depths, in %, of a text of n_chunks; its last two are kept
    for the question, which takes one for each hop. None if there are not enough: each needle has
    its own, and one more with two hops"""
    last = n_chunks - 3
    chunks = [depth * last // 100 for depth in depths]
    if len(set(chunks)) < len(chunks) or hops * len(chunks) > last + 1:
        return None
    return chunks


def check_niah(runs, args):
    """SystemExit unless each text has a chunk for each needle"""
    depths = [*args.depths.values()]
    if max(depths) > 100 or len(set(depths)) < len(depths):
        raise SystemExit(f'eval.py: --depths {",".join(args.depths)}: they have to differ, and to '
                         'be at most 100')
    for run in runs:
        needles = needles_of(run)
        for name, length in args.lengths.items():
            n_chunks = length // needles.chunk
            enough = n_chunks
            while chunks_of_depths(depths, enough, needles.hops) is None:
                enough += 1
            if enough > n_chunks:
                raise SystemExit(
                    f'eval.py: --lengths {name}, --depths {",".join(args.depths)}: no chunk for '
                    f'each needle; --lengths {enough * needles.chunk} works')


def answers(run, needles, n_chunks, chunks, seed, desc):
    """Hides a needle in each of `chunks` of a text of n_chunks. Yields for each needle whether
    greedy decoding answers its question: each token of the answer is the likeliest. desc: begins
    the lines of progress"""
    # a text of whole chunks, from a random position of the split on
    rng = np.random.default_rng(seed)
    chunk, hops = needles.chunk, needles.hops
    tokens = run.split.tokens
    ids = np.roll(tokens, -rng.integers(len(tokens))).astype(int)
    ids = np.resize(ids, n_chunks * chunk)                  # a short text is repeated

    # the first sentences are in `chunks`; with two hops, the second ones are in random chunks
    chains = needles.chains(rng, len(chunks), ids)          # (needles, hops + 1, 4) words of names
    places = chunks
    for hop in range(hops):
        needles.hide(rng, ids, zip(places, chains[:, hop:hop + 2]))
        places = [i for i in rng.permutation(n_chunks - 2) if i not in chunks]

    # the text is read once; its last chunks, one for each hop, are overwritten by each question
    text, last = run.documents[0].new_tensor(ids).tensor_split([-hops * chunk])
    state = read_long(run.model, text[None], f'{desc}; tokens of a text read')
    for names in chains:
        question, opens, answer, _ = map(last.new_tensor, needles.sentence(names))
        last.view(hops, chunk)[:, -len(question):] = question
        prompt = torch.cat([last, opens, answer[:-1]])
        log_probs, _ = run.model.stream(prompt[None], state)
        predicted = log_probs[0, -len(answer):].argmax(-1)
        yield torch.equal(predicted, answer)


def wilson_interval(right, n):
    """The 95% confidence interval of a share p = right / n (Wilson 1927) -> low, high
        (p + z² / 2n ± z sqrt(p (1 - p) / n + z² / 4n²)) / (1 + z² / n),  z = 1.96"""
    p = right / n
    z2 = 1.96 ** 2 / n                                      # z² / n
    center = (p + z2 / 2) / (1 + z2)
    width = (z2 * (p * (1 - p) + z2 / 4)) ** 0.5 / (1 + z2)
    return max(0.0, center - width), min(1.0, center + width)


def niah(runs, args):
    """Needles in a haystack (DRT, Table 2): the share of right answers by length of the text and
    depth in it, as a table and as niah.png. 10 texts of each length; of more than 400k tokens
    fewer, at least 5. low and high: a 95% interval of right; repeated: how often the split is
    repeated in a text"""
    table = Table()
    for run, (name, length) in itertools.product(runs, args.lengths.items()):
        needles = needles_of(run)
        n_chunks = length // needles.chunk
        chunks = chunks_of_depths(args.depths.values(), n_chunks, needles.hops)

        # right answers
        run.model.way = run.on
        began = time.perf_counter()
        n_texts = max(5, min(10, 2 ** 22 // length))        # 2^22 tokens in all, about
        right = []
        for i in progress_bar(range(n_texts), f'{run.name}, texts of {name} tokens'):
            desc = f'{run.name}, {np.sum(right):.0f} of {np.size(right)} right so far'
            seed = [args.seed, length, i]
            right.append([*answers(run, needles, n_chunks, chunks, seed, desc)])
        right = np.array(right)                             # (texts, depths)
        low, high = wilson_interval(right.sum(), right.size)
        shares = {f'{depth}%': share for depth, share in zip(args.depths.values(), right.mean(0))}
        table.add({
            'run': run.name,
            'tokens': name,
            'repeated': max(0.0, length / len(run.split.tokens) - 1),
            'needles': right.size,
            'right': right.mean(),
            'low': low,
            'high': high,
            **shares,
            's/needle': (time.perf_counter() - began) / right.size})
    save_picture(runs, 'niah.png', plot_needles, table.rows)
    return table.rows


# --------------------------------------------------------------------------------------------------
# speed: of reading and generating, then of training
def clock(tokens):
    """The time in seconds, when the device of the tokens has finished its work"""
    tokens[0, 0].item()
    return time.perf_counter()


def n_bytes(state):
    """The memory of all tensors in nested tuples and lists, except those in mapped files"""
    tensors = filter(torch.is_tensor, tree_leaves(state))
    return sum(x.nbytes for x in tensors if not x.untyped_storage().filename)


def reading_seconds(run, length, device):
    """Reads random tokens, then more of them one per call, as in generating -> seconds per token of
    both, MB of the state"""
    n_generated = 32
    run.model.way = run.on
    shape = 1, length + n_generated
    tokens = torch.randint(run.model.config.vocab_size, shape, device=device)
    began = clock(tokens)
    state = read_long(run.model, tokens[:, :length], f'{run.name}, tokens read')
    has_read = clock(tokens)
    for token in tokens[0, length:]:
        _, state = run.model.stream(token[None, None], state)
    end = clock(tokens)
    return (has_read - began) / length, (end - has_read) / n_generated, n_bytes(state) / 2 ** 20


def speed(runs, args):
    """Seconds of reading, generating and training, memory of a text's state (DRT, Table 3). Runs
    are interleaved, and the seconds are medians -> the rows of both tables"""
    for run in runs:                                    # the first call of all is slower
        reading_seconds(run, 1, args.device)
    table = Table()
    for name, length in args.lengths.items():
        times = [[reading_seconds(run, length, args.device) for run in runs] for _ in range(3)]
        for run, (reading, generating, size) in zip(runs, np.median(times, axis=0)):
            table.add({'run': run.name,
                       'tokens': name,
                       'reading s/token': reading,
                       'generating s/token': generating,
                       'state MB': size})
    return table.rows + training_speed(runs, args.device)


def training_seconds(model, device):
    """Seconds of a forward and a backward pass, per token of a random micro-batch"""
    shape = model.config.micro_batch, model.config.block_size
    tokens = torch.randint(model.config.vocab_size, shape, device=device)
    batch = data.Batch(tokens, tokens, torch.zeros_like(tokens), 0)
    _, autocast = train.precision(device, 'auto')
    model.train()
    began = clock(tokens)
    with torch.enable_grad(), autocast():
        loss, _ = model(batch, 1.0)
    loss.backward()
    seconds = max(1e-9, clock(tokens) - began)          # a clock can be coarse
    model.eval().zero_grad()
    return seconds / tokens.numel()


def training_macs(run, device):
    """MACs of a forward and a backward pass, per token: half of torch's FLOPs. They are counted
    with SDPA in plain PyTorch, because torch does not count all of its fused kernels."""
    from torch.utils.flop_counter import FlopCounterMode            # imports Triton
    flops = train.part_of(run.Model, 'FLOPS', {})
    counter = FlopCounterMode(display=False, custom_mapping=flops)
    with sdpa_kernel(SDPBackend.MATH), counter:
        training_seconds(run.model, device)
    n_tokens = run.model.config.micro_batch * run.model.config.block_size
    return counter.get_total_flops() // 2 // n_tokens


def training_speed(runs, device):
    """Prints MACs and seconds of forward and backward, per token; of RPT without the ranking loss.
    Runs are interleaved, and the seconds are medians. -> the rows"""
    macs = [training_macs(run, device) for run in runs]
    times = []
    for _ in progress_bar(range(5), 'training steps of each run'):
        times.append([training_seconds(run.model, device) for run in runs])
    times = np.median(times, axis=0)                                # (runs,)
    table = Table()
    for run, n, seconds in zip(runs, macs, times):
        table.add({'run': run.name,
                   'MACs/token': n,
                   's/token': seconds,
                   'MACs ratio': n / macs[0],
                   'time ratio': seconds / times[0]})
    return table.rows


# --------------------------------------------------------------------------------------------------
# pictures: losses by position, in training, and of repeated tokens; answers about needles
def save_picture(runs, name, plot, shown):
    """Saves what plot(figure, shown) draws next to the weights of the first run, if it can."""
    try:
        from matplotlib.figure import Figure            # pyplot would need a screen
        figure = Figure(layout='constrained')
        plot(figure, shown)
        path = runs[0].path.with_name(name)
        figure.savefig(path, bbox_inches='tight')
        print(f'\n{path}')
    except Exception as e:      # there is no matplotlib, nothing to draw, or a broken log
        print(f'no picture: {e!r}', file=sys.stderr)


def label_of(name):
    """The name of a run as a label. matplotlib reads $ as mathematics and hides a name after _."""
    name = name.replace('$', r'\$')
    return f' {name}' if name.startswith('_') else name


def plot_positions(axes, run):
    """Losses by position in the document, from 64 on (DRT, Fig. 3b, c). Each point is the mean over
    1,000 tokens or more, from its position to that of the next point."""
    # positions with enough tokens between each and the next
    edges = [64]
    for edge in np.geomspace(64, 2 ** 30, 97).astype(int):              # four in an octave
        n_tokens = sum(len(tokens[edges[-1]:edge]) for tokens in run.documents)
        if n_tokens >= 1000:
            edges.append(edge)

    # a line for each way, the gain between two of them
    starts = edges[:-1]
    if not starts:
        return
    losses = {}
    for way in run.ways:
        losses[way] = by_position(run.log_p_of[way], edges)
        axes.plot(starts, losses[way], label=way)
    axes.fill_between(starts, losses[run.on], losses['off'], alpha=0.15, label='gain')
    axes.set(title=label_of(run.name), xlabel='position in the document (tokens)', xscale='log')
    axes.xaxis.set_major_formatter('{x:,.0f}')
    axes.legend()


def plot_training(axes, runs):
    """Training losses of runs that have a log: means over a thirtieth of the steps"""
    for run in runs:
        path = run.path.with_name('log.jsonl')
        if not path.is_file() or path.stat().st_size == 0:
            continue

        # the first tenth of the losses is too high for the axis
        log = [json.loads(line) for line in path.read_text().splitlines()]
        log = log[len(log) // 10:]
        n = 1 + len(log) // 30
        losses = [entry['loss'] for entry in log]
        means = np.convolve(losses, np.ones(n) / n, 'valid')
        millions = [entry['tokens'] / 1e6 for entry in log]
        axes.plot(millions[n - 1:], means, label=label_of(run.name))
    axes.set(title='training', xlabel='tokens (millions)')
    if axes.lines:
        axes.legend()
    else:                                               # .pt files alone have no log
        axes.remove()


def plot_losses(figure, runs):
    """A panel for each run, then one for the training of all"""
    n_panels = len(runs) + 1
    figure.set_size_inches(4.5 * n_panels, 4)
    figure.supylabel('loss (nats per token)')
    *panels, training = figure.subplots(1, n_panels, sharey=True)
    for axes, run in zip(panels, runs):
        plot_positions(axes, run)
    plot_training(training, runs)


def plot_repeats(figure, rows):
    """Dots: the losses of each run, one in each way; all tokens, repeated ones, new ones"""
    names = list(dict.fromkeys(row['run'] for row in rows))
    ways = dict.fromkeys(row['way'] for row in rows)
    figure.set_size_inches(12, 1.5 + 0.4 * len(names))
    figure.supxlabel('loss (nats per token)')
    panels = figure.subplots(1, 3, sharey=True)
    titles = {'loss': 'all tokens', 'repeated': 'occurred before', 'new': 'new'}
    for axes, (column, title) in zip(panels, titles.items()):
        for way in ways:
            of_way = [row for row in rows if row['way'] == way]
            places = [names.index(row['run']) for row in of_way]
            axes.plot([row[column] for row in of_way], places, 'o', label=way)
        axes.set_title(title)
        axes.grid(axis='y', alpha=0.3)
    panels[0].set_yticks(range(len(names)), map(label_of, names))
    panels[0].invert_yaxis()                                # the first run on top
    panels[0].legend()


def plot_needles(figure, rows):
    """A heat map: lengths of the text by depths of the needle"""
    axes = figure.subplots()
    depths = [name for name in rows[0] if name.endswith('%')]
    right = [[row[depth] for depth in depths] for row in rows]
    figure.colorbar(axes.imshow(right, vmin=0, vmax=1, aspect='auto'))
    axes.set_xticks(range(len(depths)), depths)
    axes.set_yticks(range(len(rows)), [f'{label_of(row["run"])}, {row["tokens"]}' for row in rows])
    axes.set(title='share of right answers', xlabel='depth in the text', ylabel='tokens')


# --------------------------------------------------------------------------------------------------
# a page that shows a document and what is retrieved, in a browser
def traces_of(run, tokens):
    """What is retrieved to predict tokens (n,) -> traces[i][group], a list of what is retrieved for
    chunk i + 1 (TRIME: for token i + 2), at most 8 [weight, start, end, other_text]. other_text:
    its tokens, if it is of another text, else []. A model without groups of layers has one group
    """
    run.model.way = run.retrieving
    traces, state = [], None
    starts = range(run.chunk, len(tokens), run.chunk)
    for t in progress_bar(starts, f'{run.name}, chunks traced'):
        # each chunk is read once, whatever the number of groups
        state = run.model.read(tokens[None, t - run.chunk:t], state)
        by_group = []
        for traced in trace_groups(run, tokens, t, state):
            retrieved = []
            for weight, ids, start, end in traced[:8]:
                other_text = [] if ids is tokens else ids[start:end].tolist()
                retrieved.append([round(weight, 4), start, end, other_text])
            by_group.append(retrieved)
        traces.append(by_group)
    return traces


def page_of(run, tokens):
    """What a page shows of a run and a text (n,). losses: of the ways off and on, of n - 1 tokens
    """
    losses = [-run.log_p(way, tokens) for way in ('off', run.retrieving)]
    return dict(run=run.name, chunk=run.chunk, traces=traces_of(run, tokens),
                tokens=tokens.tolist(), losses=np.round(losses, 3).tolist(),
                tokenizer=run.tokenizer.to_dict())


def write_page(path, pages):
    """Writes a page: the template assets/trace.html with the data of the runs in it"""
    script = json.dumps(pages).replace('<', '\\u003c')          # no text ends the script
    page = (Path(__file__).parent / 'assets/trace.html').read_text('utf-8')
    train.write(path, page.replace('{{runs}}', script))
    print(f'\n{path}')


# --------------------------------------------------------------------------------------------------
# the command: tasks, flags, what is checked before the work, the work

# tasks: name -> function(runs, args), which returns what --json writes
TASKS = {'report': report, 'table': loss_table, 'frequency': frequency, 'repeats': repeats,
         'examples': examples, 'generate': samples, 'pairs': evaluate_pairs,
         'translate': translate, 'speed': speed, 'niah': niah}
# what raises SystemExit if a task cannot be done, before anything that takes minutes
CHECKS = {'examples': check_prompt, 'pairs': check_pairs, 'translate': check_translate,
          'niah': check_niah}
FOR_PAIRS = 'pairs', 'translate', 'generate', 'speed'       # others score all tokens
COUNT_TOKENS = 'table', 'frequency', 'repeats', 'speed', 'niah'     # numbers per token


def tasks_of(Models):
    """The tasks of eval.py, and those that all these models have"""
    tasks = dict(TASKS)
    if Models:
        first, *others = [train.part_of(Model, 'TASKS', {}) for Model in Models]
        for name, task in first.items():
            if all(name in other for other in others):
                tasks[name] = task
    return tasks


def subtasks_of(task, of_pairs):
    """The tasks that a task consists of. of_pairs: whether the text has pairs"""
    if task != 'report':
        return [task]
    return ['pairs'] if of_pairs else ['table', 'examples', 'generate']


def parser_of(Models):
    """The flags of eval.py, and of the models; --help ends with the tasks"""
    summaries = []
    for name, task in tasks_of(Models).items():
        docstring = ' '.join(task.__doc__.split())
        summary = re.split('[.:] | -> ', docstring)[0]              # the beginning of it
        summaries.append(f'  {name:12}{summary}'.replace('%', '%%'))    # % is special in a help
    if not Models:
        summaries.append('and those of a model, with its flags: eval.py RUN --help')
    parser = argparse.ArgumentParser(
        usage='eval.py RUN [RUN ...] [flags]', allow_abbrev=False,
        epilog='tasks:\n' + '\n'.join(summaries),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(f'eval.py: {message}')
    Configs = [EvalConfig, *(train.part_of(Model, 'EvalConfig') for Model in Models)]
    for Config in dict.fromkeys(filter(None, Configs)):             # each once
        train.add_flags(parser, Config)
    return parser


def model_files_of(flags):
    """The value of --model, before the parser is known"""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda message: sys.exit(f'eval.py: {message}')
    parser.add_argument('--model', default='')
    args, _ = parser.parse_known_args(flags)
    return args.model


def explain_flag(parser, flag):
    """Ends with one line if the flag is one of another model, or of train.py alone, or is a run."""
    if not flag.startswith('-'):
        parser.error(f'{flag}: no flag takes this value; runs come before flags')
    Models = [train.find_model(name) for name in train.MODELS]
    for Config in [train.part_of(Model, 'EvalConfig') for Model in Models]:
        if train.has_flag(Config, flag):
            parser.error(f'{flag} is a flag of {Config.__module__}: none of these runs is of that '
                         'model')
    for Config in [train.TrainConfig, *map(train.config_of, Models)]:
        if train.has_flag(Config, flag):
            parser.error(f'{flag} is a flag of train.py: a trained model keeps its value')


def parse(parser, flags):
    """The values of all flags. An unknown one is an error that tells where it belongs."""
    _, unknown = parser.parse_known_args(flags)
    if unknown:
        explain_flag(parser, unknown[0].split('=')[0])
    return train.parse_flags(parser, flags)


def refuse_unused_flags(parser, flags, task, subtasks):
    """Ends with one line for a flag that a task does not use. subtasks: what it consists of"""
    if task not in (*TASKS, 'datastore', 'ranks'):      # of a user's model: nothing is known of it
        return
    used = {word.split('=')[0] for word in flags}
    for field, text in train.comments_of(EvalConfig).items():
        flag = train.flag_of(field)
        users = text.split(':')[0].split(', ')          # tasks, if the comment begins with them
        if flag in used and users[0] in TASKS and not {*users} & {*subtasks}:
            parser.error(f'{flag} is for --task {" or ".join(users)}: --task {task} does not use '
                         'it')


def check_values(parser, args):
    """Ends with one line if values of flags do not fit together, or cannot be used."""
    if args.prompt is not None and args.prompt_file is not None:
        parser.error('--prompt and --prompt-file are two prompts: only one of them is possible')
    files = [args.json, args.html, args.output]
    if args.prompt_file not in (None, '-'):
        files.append(Path(os.path.realpath(args.prompt_file)))
    twice = [path for path in files if path and files.count(path) > 1]
    if twice:
        parser.error(f'two flags name {twice[0]}: each needs a file of its own')
    if args.cache and args.retrieve_from:
        parser.error('--cache and --retrieve-from cannot be used together')
    if args.cache and args.task not in TASKS:
        parser.error(f'--cache is not for --task {args.task}')
    if 0 in args.lengths.values():
        parser.error('--lengths 0: there is nothing to read; 1 or more works')


def read_prompt(parser, args):
    """The text of --prompt, of --prompt-file or of standard input; None without these flags. An
    empty text is a prompt."""
    if args.prompt_file is None:
        return args.prompt
    if args.prompt_file == '-':
        try:
            return data.unix(sys.stdin.buffer.read().decode())
        except UnicodeDecodeError as error:
            parser.error(f'--prompt-file -: standard input is not UTF-8, at byte {error.start:,}')
    path = Path(args.prompt_file)
    try:
        return data.read_text(path)
    except UnicodeDecodeError:
        reason, where = data.why_not_utf8(path)
        parser.error(f'--prompt-file {path}: {reason}; {where}')
    except (OSError, EOFError, zlib.error) as error:    # no such file, a folder, a damaged .gz
        reason = getattr(error, 'strerror', None) or error
        parser.error(f'--prompt-file {path}: {reason}')


def check_runs(parser, runs, args):
    """Ends with one line unless all runs have the same text, and the task can be done with them."""
    of_pairs = runs[0].of_pairs
    for run in runs:
        if run.about_text != runs[0].about_text:
            parser.error(f'different texts, {runs[0].about_text} and {run.about_text}: use --data')
        if len(run.documents) != len(runs[0].documents):
            parser.error('documents of one word, which have nothing to score with the tokenizer '
                         f'word: evaluate {run.name} alone')
        check_cache(run, args)
    have_same_tokens = all(run.tokenizer.tokens == runs[0].tokenizer.tokens for run in runs)
    if args.retrieve_from and all(run.chunk > 1 and run.ways == ('off',) for run in runs):
        parser.error('--retrieve-from: none of these runs retrieves')
    for task in subtasks_of(args.task, of_pairs):
        if of_pairs and task not in FOR_PAIRS:
            parser.error(f'--task {task} scores all tokens, but a model of pairs predicts targets '
                         'only: use --task pairs')
        if task in CHECKS:
            CHECKS[task](runs, args)
        if task in COUNT_TOKENS and not have_same_tokens:
            print('the runs have different tokenizers: only bits/byte and word ppl can be '
                  'compared, and not those of the tokenizer word', file=sys.stderr)


@torch.no_grad()
def main(argv):
    # runs come before flags; their models have flags and tasks, too
    argv = argv or ['--help']
    names = list(itertools.takewhile(lambda word: not word.startswith('-'), argv))
    flags = argv[len(names):]
    if not names and '--help' not in flags and '-h' not in flags:
        raise SystemExit('eval.py: runs come before flags: eval.py RUN [RUN ...] [flags], or '
                         'eval.py --help')
    with train.short_errors('eval.py', '--device cpu'):
        trained = [read_run(name, model_files_of(flags)) for name in names]
    Models = [type(run.model) for run in trained]
    parser = parser_of(Models)
    args = parse(parser, flags)
    tasks = tasks_of(Models)
    if args.task not in tasks:
        parser.error(f'--task {args.task}: these runs together have {", ".join(tasks)}; datastore '
                     'is for TRIME alone, ranks for RPT')

    # what is wrong with the flags alone
    check_values(parser, args)
    possible = subtasks_of(args.task, of_pairs=False) + subtasks_of(args.task, of_pairs=True)
    refuse_unused_flags(parser, flags, args.task, possible)
    args.prompt = read_prompt(parser, args)

    args.device = train.hardware(args.device)
    args.progress_bar = progress_bar                # for the functions of model files
    args.new_folder = new_folder
    train.precision(args.device, 'fp32')            # after training in a notebook
    with train.short_errors('eval.py', 'shorter --lengths, a smaller --data or --device cpu'):
        # the texts, and what is wrong with the flags for these texts
        runs = [EvalRun(run, args) for run in trained]
        refuse_unused_flags(parser, flags, args.task, subtasks_of(args.task, runs[0].of_pairs))
        check_runs(parser, runs, args)

        # the work; on standard output --task translate prints translations only
        messages = sys.stderr if args.task == 'translate' else sys.stdout
        with contextlib.redirect_stdout(messages):
            for run in runs:
                run.prepare(args)
        result = tasks[args.task](runs, args)
        if args.json:
            train.write(args.json, json.dumps(result, indent=1))


if __name__ == '__main__':
    train.keep_printing()
    main(sys.argv[1:])
