"""
Evaluates trained models: any mixture of them in one table, on the same text.

    $ python eval.py out/trime out/rpt out/drt      the table, examples, samples, loss.png
    $ python eval.py out/pairs                      after --data x.tsv: translations, BLEU, ROUGE
    $ python eval.py out/drt --task examples        what is retrieved where it helps most
    $ python eval.py out/drt --task examples --html out/page.html       the same in a browser
    $ python eval.py out/mine --model mine.py       a run of your own model file
    $ python eval.py out/trime --help               all tasks and flags, those of its model too

A run is a folder, of which best.pt is used, else ckpt.pt, or it is a .pt file. Each token of a
document except the first is scored once, in fp32; the document is read from its beginning. A model
is evaluated in several ways, values of its attribute `way`:

    on              the model retrieves, as in training
    shuffled        it retrieves random chunks, or memories with exchanged values
    off             it retrieves nothing
    corpus, both    with --retrieve-from: it retrieves from that corpus; from corpus and text
"""
import train    # before torch: it sets how torch's idle threads wait
import argparse, itertools, json, os, re, sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import regex                # tiktoken depends on it
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

import data
from data import progress_bar

# columns of the table: losses of tokens up to these positions in their document
POSITIONS = {'<512': 512, '<1,024': 1024, '<2,048': 2048, '<4,096': 4096, '4,096+': sys.maxsize}
# columns of Table 14 of TRIME: tokens that occur at most so often, but not in the column before
FREQUENCIES = {'<=10': 10, '10-100': 100, '100-1k': 1000, '1k-10k': 10_000, '>10k': sys.maxsize}
UNITS = {'k': 1024, 'm': 1024 ** 2}
PAGE_TOKENS = 8192              # tokens of a document that a page shows, at most
LINES_AT_ONCE = 64              # sources of pairs that are continued together, at most


# --------------------------------------------------------------------------------------------------
# flags
def numbers(text):
    """The type of a flag: '1k,16k,2m' -> {'1k': 1024, '16k': 16384, '2m': 2097152}"""
    if not re.fullmatch('[0-9]{1,9}[km]?(,[0-9]{1,9}[km]?)*', text):
        raise argparse.ArgumentTypeError(f'{text!r} is not like 0,16,1k,2m')
    return {x: int(x.rstrip('km')) * UNITS.get(x[-1], 1) for x in text.split(',')}


def new_file(text):
    """The type of a flag: a path, at which train.write can write a file after the work. Its folder
    is made."""
    path = Path(os.path.realpath(train.expanded_path(text)))    # a link remains: its file changes
    taken = path.exists() and not path.is_file()                # by a folder or a device
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        taken = True
    if taken or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f'{text!r} cannot be written')
    return path


@dataclass
class EvalConfig:
    task: str = 'report'        # what is done; the last lines of --help have all
    model: str = ''             # your model file, as for train.py; several: a.py,b.py
    data: train.source = ''     # another corpus than the one of training
    retrieve_from: train.source = ''    # trime, drt: retrieve from the train split of this corpus
    cache: int = 0              # adds a continuous cache of up to so many tokens to every model
    split: Literal['train', 'val', 'test'] = 'val'              # which part of the corpus
    prompt: str = ''            # examples, generate: a text in place of the split's
    prompt_file: train.expanded_path = ''   # the same from a file; -: from standard input
    html: new_file = None       # examples: a file for a page, a document and what is retrieved
    max_tokens: int = 200       # generate, pairs, translate: new tokens, at most
    temperature: float = 0.8    # generate: 0 takes the likeliest token
    top_k: int = 0              # generate: from so many of the likeliest tokens; 0: from all
    top_p: float = 0.95         # generate: from the likeliest tokens with this sum of probability
    seed: int = 0               # generate, niah, ranks: of the random draws
    beam: int = 4               # pairs, translate: hypotheses (TRIME: 4); 1: the likeliest token
    lines: int = 200            # pairs: the first lines of the split; 0: all
    output: new_file = None     # translate: a file for the targets, a line each
    lengths: numbers = '1k,4k,16k'      # niah, speed: tokens of the text; k is 2^10, m is 2^20
    depths: numbers = '0,25,50,75,100'  # niah: places of the needles, in %
    json: new_file = None       # a file for the numbers and texts of the task
    device: Literal['auto', 'cuda', 'cpu', 'mps'] = 'auto'      # auto: cuda if present, else cpu


# --------------------------------------------------------------------------------------------------
# runs
def weights_of(name):
    """The file of a run, which is a folder or a .pt file. SystemExit if there is none"""
    for path in Path(name, 'best.pt'), Path(name, 'ckpt.pt'), Path(name):
        if path.is_file():
            return path
    raise SystemExit(f'no such run: {name} (train.py makes runs)')


def read_run(name, model_files=''):
    """The weights of a run. model_files: those of --model, of which one can be that of the run
    -> path, what the checkpoint holds, the model in eval mode, the Tokenizer"""
    path = weights_of(name)
    Models = [train.find_model(file) for file in model_files.split(',') if file]
    checkpoint, model, tokenizer = train.read_checkpoint(path, Models)
    return path, checkpoint, model.eval(), tokenizer


def load(name, model_file=''):
    """For a notebook: a run's folder or .pt file -> (model in eval mode, tokenizer). model_file: of
    your own model"""
    _, _, model, tokenizer = read_run(name, model_file)
    return model, tokenizer


def bytes_of_first_tokens(split, tokenizer):
    """The UTF-8 bytes of the first tokens of all documents; unknown words count as none, because
    their lengths are not known"""
    ids = split.tokens[split.offsets[:-1]]
    text = ''.join(tokenizer.tokens[i] for i in ids)
    if tokenizer.name == 'word':
        text = text.replace('<eos>', '\n').replace('<unk>', '').encode()
    return len(text)                            # of others, a character is a byte


class Run:
    """A trained model, and the text that it is evaluated on

    name, path          as on the command line; the file of the weights
    model, tokenizer
    checkpoint          what the file of the weights holds
    chunk               tokens that are retrieved together; 1: single ones, TRIME's memories
    corpus
    source              the name or path of the text
    about_text          fingerprint, size, ... of the text: runs of one table have the same
    split               n_bytes does not count the first tokens, which are not scored
    documents           of the split, each (n,) int64
    ways                names of the ways of evaluation; the way `off` retrieves nothing
    on                  the way that retrieves most
    scores              way -> log_p of each document, (n - 1,) fp64; set by `score`"""
    def __init__(self, name, weights, args):
        """Reads the text, and what the model needs for it. weights: see read_run"""
        self.name = name
        self.path, self.checkpoint, model, self.tokenizer = weights
        self.model = model.to(args.device)
        self.chunk = train.part_of(type(model), 'batches')(model.config).get('chunk', 1)
        self.load_text(args)

        # what the model retrieves from; TRIME tunes its temperatures, too
        prepare_eval = train.part_of(type(model), 'prepare_eval')
        if prepare_eval:
            external = data.load(args.retrieve_from or self.source, self.tokenizer, quiet=True)
            prepare_eval(model, self.corpus, external, args, self.path)
        elif args.retrieve_from:
            raise SystemExit(f'{name} retrieves from its text alone: no --retrieve-from')
        if args.cache:
            self.model = cached(self, args)
        self.ways = self.model.ways()
        self.on = 'both' if 'both' in self.ways else self.ways[0]
        self.scores = {}

    def load_text(self, args):
        """Sets corpus, about_text, split and documents."""
        name = self.source = args.data or self.checkpoint['data']
        corpus = self.corpus = data.load(name, self.tokenizer, quiet=True)
        split = getattr(corpus, args.split)
        if split is None:
            raise SystemExit(f'{name} has no split {args.split}')
        if not args.data and corpus.fingerprint != self.checkpoint['corpus']:
            print(f'{self.name} was trained on another version of {name}: what is now in val and '
                  'test can have been in its training', file=sys.stderr)
        self.about_text = dict(data=corpus.name, text=corpus.fingerprint[:8],
                               split=args.split, bytes=split.n_bytes, words=split.n_words)

        # the bytes of what is scored
        self.split = split._replace(
            n_bytes=split.n_bytes - bytes_of_first_tokens(split, self.tokenizer))

        # the documents in which there is a token to predict
        tokens = torch.tensor(split.tokens.astype(int), device=args.device)
        documents = tokens.tensor_split(split.offsets[1:-1].tolist())
        self.documents = [tokens for tokens in documents if len(tokens) > 1]
        if not self.documents:
            raise SystemExit(f'{name}: no {args.split} document has two tokens')

    def log_p(self, way, tokens):
        """log P of every token of a document except the first: tokens (n,) -> (n - 1,) fp64"""
        self.model.way = way
        parts, state = [], None
        for pairs in tokens.unfold(0, 2, 1).split(self.model.PIECE):    # (t, 2): token, next one
            log_probs, state = self.model.stream(pairs[None, :, 0], state)
            parts.append(log_probs[0].gather(1, pairs[:, 1:]))
        return torch.cat(parts).flatten().cpu().double().numpy()

    def score(self, way, part=''):
        """Sets scores[way], once. part: for the line of progress, as `, 2 of 9`"""
        if way not in self.scores:
            desc = f'{self.name}, {way}{part}: tokens scored'
            documents = progress_bar(self.documents, desc, size=len)
            self.scores[way] = [self.log_p(way, tokens) for tokens in documents]

    def gains(self):
        """What retrieval gains, in nats, for each token of a document except the first, (n - 1,)"""
        return [on - off for on, off in zip(self.scores[self.on], self.scores['off'])]


def cached(run, args):
    """The model of a run with a continuous cache (compared/cache.py), tuned on another split"""
    from compared.cache import Cache
    if run.model.ways() != ('off',) and run.chunk == 1:
        raise SystemExit(f'{run.name}: TRIME has memories of single tokens: no --cache')
    model = Cache(run.model, args.cache).eval()
    split = run.corpus.tuning_split(args.split)
    model.tune(split, args.progress_bar)
    print(f'{run.path}: {model.constants}, tuned on {split.name}')
    return model


def score(runs, all_ways=True):
    """Scores the documents in all ways of each run, or in `off` and run.on alone. Yields each pair
    (run, way) when it is known; `off` is scored first, because all are compared with it."""
    pairs = [(run, way) for run in runs for way in run.ways
             if all_ways or way in ('off', run.on)]
    for number, (run, way) in enumerate(pairs, 1):
        run.score('off', f', {number} of {len(pairs)}')
        run.score(way, f', {number} of {len(pairs)}')
        yield run, way


# --------------------------------------------------------------------------------------------------
# the table
def by_position(log_p, edges):
    """Mean losses of tokens edges[i] to edges[i + 1] - 1 of a document; None where there is none"""
    losses = []
    for first, stop in itertools.pairwise(edges):
        part = np.concatenate([x[first - 1:stop - 1] for x in log_p])       # x[0] is of token 1
        losses.append(-part.mean() if len(part) else None)
    return losses


def metrics(log_p, log_p_off, split):
    """The columns of a row. split: its bytes are of the tokens of log_p, its words all the text's.
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
            'word ppl': np.exp(min(700, nats / max(1, split.n_words))),     # e^710 is infinite
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
    """A table that is printed row by row. Columns are as wide as the first row and this one need,
    those for names of runs at least 15."""
    def __init__(self):
        self.rows = []

    def add(self, row):
        """Prints and keeps a row, a dict with the same keys as the first, which has a header."""
        self.rows.append(row)
        columns = []                                            # formats: text is aligned left
        for name, x in self.rows[0].items():
            width = max(15 if name == 'run' else 8, len(name), len(cell(x)))
            columns.append(f'<{width}' if isinstance(x, str) else f'>{width}')
        if len(self.rows) == 1:
            print()
            print(*map(format, row, columns))
        print(*map(format, map(cell, row.values()), columns))


def score_table(runs, args):
    """Losses and gains of each run and way, on the same tokens -> all numbers"""
    documents = runs[0].documents
    N = len(documents)
    about = dict(runs[0].about_text, documents=N, scored=sum(map(len, documents)) - N)
    Table().add(about)
    print('\non: as in training; shuffled: wrong memory; off: none; corpus, both: --retrieve-from\n'
          'word ppl: per word between blanks, first words included, as is usual for WikiText\n'
          f'±: standard error of the gain, from {N} documents (below 5 it means little)')
    table = Table()
    for run, way in score(runs):
        table.add({
            'run': run.name,
            'way': way,
            'params': sum(map(torch.numel, run.model.parameters())),
            'trained on': run.checkpoint['tokens'],
            **metrics(run.scores[way], run.scores['off'], run.split)})
    return dict(about, rows=table.rows)


def frequency(runs, args):
    """Perplexities of rare and of frequent tokens (TRIME, Table 14): a token is in the column of
    the number of times that it occurs in the split; n is how many are scored there -> the rows"""
    table = Table()
    for run, way in score(runs):
        # of each scored token: its frequency, its loss
        split = run.split
        count = np.bincount(split.tokens)                                   # (V,)
        n = count[np.delete(split.tokens, split.offsets[:-1])]              # not of first tokens
        losses = -np.concatenate(run.scores[way])

        # the perplexities
        row = {'run': run.name, 'way': way, 'all': np.exp(losses.mean())}
        low = 0
        for name, high in FREQUENCIES.items():
            part = losses[(n > low) & (n <= high)]
            row[name] = np.exp(part.mean()) if len(part) else None
            row[f'n {name}'] = len(part)
            low = high
        table.add(row)
    return table.rows


def is_repeated(ids):
    """Which tokens of a document (n,) but the first occur earlier in it -> (n - 1,) bool"""
    first = np.zeros(len(ids), bool)
    first[np.unique(ids, return_index=True)[1]] = True
    return ~first[1:]


def repeats(runs, args):
    """Losses of tokens that occur earlier in their document, and of new ones -> the rows"""
    table = Table()
    for run, way in score(runs):
        repeated = np.concatenate([is_repeated(ids.cpu().numpy()) for ids in run.documents])
        losses = -np.concatenate(run.scores[way])
        off = -np.concatenate(run.scores['off'])
        row = {'run': run.name, 'way': way, 'loss': losses.mean()}
        for name, chosen in ('repeated', repeated), ('new', ~repeated):
            row[name] = losses[chosen].mean()
            row[f'gain, {name}'] = (off - losses)[chosen].mean()
            row[f'n {name}'] = int(chosen.sum())
        table.add(row)
    return table.rows


# --------------------------------------------------------------------------------------------------
# examples of retrieval
def prompt_of(args):
    """The text of --prompt, --prompt-file or standard input; '' if there is none"""
    if args.prompt_file == '-':
        return data.unix(sys.stdin.read())
    if not args.prompt_file:
        return args.prompt
    path = Path(args.prompt_file)
    try:
        return data.read_text(path)
    except UnicodeDecodeError:
        reason, where = data.why_not_utf8(path)
        raise SystemExit(f'eval.py: --prompt-file {path}: {reason}; {where}')


def show_example(run, tokens, t, **facts):
    """Prints what is retrieved to predict token t + 1, 4 at most. -> the same as a dict"""
    # where it is
    decode = run.tokenizer.decode
    print(f'\n{run.name} retrieves this to predict the token after `before`:')
    facts['before'] = decode(tokens[:t + 1][-32:])
    facts['next'] = decode(tokens[t + 1:][:16])
    for key, value in facts.items():
        if value != '':
            print(f'{key:9} {value!r}')

    # the chunks or memories of largest weight
    run.model.way = run.on
    retrieved = []
    table = Table()
    for weight, ids, start, end in run.model.trace(tokens, t)[:4]:
        ago = t + 2 - end if ids is tokens else None            # None: in another text
        read = ids[start:end]
        first = max(0, run.chunk - 16)          # 32 tokens around the end of the first chunk
        text = decode(read[first:first + 32])
        shown = f'{text!r}'
        if run.chunk == 1:                                      # a memory
            shown = f'{decode(read[:-1])!r} -> {decode(read[-1:])!r}'
        row = dict(weight=weight, start=start, end=end, ago=ago, text=text)
        retrieved.append(row)
        table.add(dict(row, text=shown))
    if not retrieved:
        print(f'\nnothing: among {t + 1} tokens is none to retrieve, or this model shows none')
    return dict(run=run.name, **facts, retrieved=retrieved)


def best_examples(run, n):
    """Examples of n documents, each of the token that gains most"""
    results = []
    best = sorted(enumerate(run.gains()), key=lambda item: -item[1].max())
    for d, gains in best[:n]:
        t = int(gains.argmax())                                 # gains[t] is of token t + 1
        gain = round(float(gains[t]), 4)
        results.append(show_example(run, run.documents[d], t, document=d, token=t + 1, gain=gain))
    return results


def examples(runs, args, n=3):
    """What is retrieved at the end of the prompt, or in n documents where a token gains most.
    --html: a page for the prompt, or for the document that gains most in the first run"""
    for run in runs:
        if run.on == 'off':
            print(f'\n{run.name} retrieves nothing')
    runs = [run for run in runs if run.on != 'off']
    print('\ngain: in nats; start, end: tokens of the document; ago: tokens from the last of them '
          'to the predicted one\ntext: of chunks, 32 tokens around the end of the first one')

    # examples, and the text of a page
    results, texts = [], []
    prompt = prompt_of(args)
    if prompt:
        for run in runs:
            tokens = run.documents[0].new_tensor(run.tokenizer.encode(prompt))
            if len(tokens) < 2:
                raise SystemExit('eval.py: --prompt has fewer than two tokens')
            results.append(show_example(run, tokens, len(tokens) - 1))
            texts.append(tokens)
    else:
        list(score(runs, all_ways=False))                       # sets run.scores
        for run in runs:
            results += best_examples(run, n)
        if runs:
            document = np.argmax([gain[:PAGE_TOKENS].sum() for gain in runs[0].gains()])
            texts = [run.documents[document][:PAGE_TOKENS] for run in runs]

    if args.html and runs:
        write_page(args.html, [page_of(run, tokens) for run, tokens in zip(runs, texts)])
    return results


# --------------------------------------------------------------------------------------------------
# a page that shows a document and what is retrieved
def page_of(run, tokens):
    """What a page shows of a run and a text (n,). losses: off and on, of all tokens but the first;
    traces: for each chunk but the first (TRIME: token), for each group of layers, what is retrieved
    to predict its tokens: [weight, start, end, []], the list has the tokens of another text"""
    losses = [-run.log_p(way, tokens) for way in ('off', run.on)]
    chunk, traces, state = run.chunk, [], None

    # each chunk is read once, and traced for each group of layers, or once if there are no groups
    n_groups = getattr(run.model.config, 'groups', 0)
    options = [dict(group=group) for group in range(n_groups)] or [{}]
    for t in progress_bar(range(chunk, len(tokens), chunk), f'{run.name}, chunks traced'):
        state = run.model.read(tokens[None, t - chunk:t], state)
        by_group = []
        for option in options:
            reads = []
            for weight, ids, start, end in run.model.trace(tokens, t, state, **option)[:8]:
                other_text = [] if ids is tokens else ids[start:end].tolist()
                reads.append([round(weight, 4), start, end, other_text])
            by_group.append(reads)
        traces.append(by_group)
    return dict(run=run.name, chunk=chunk, traces=traces,
                tokens=tokens.tolist(), losses=np.round(losses, 3).tolist(),
                tokenizer=run.tokenizer.to_dict())


def write_page(path, pages):
    """Writes assets/trace.html with the data of the runs in it."""
    script = json.dumps(pages).replace('<', '\\u003c')          # no text ends the script
    page = (Path(__file__).parent / 'assets/trace.html').read_text('utf-8')
    train.write(path, page.replace('{{runs}}', script))
    print(f'\n{path}')


# --------------------------------------------------------------------------------------------------
# samples
def generate(model, tokenizer, prompt, args):
    """-> text that continues the prompt, to <|endoftext|> or max_tokens; drawn from
    P^(1/temperature) (0: the likeliest), among the top_k likeliest tokens (0: all) that are also
    among the fewest with a sum of top_p (Holtzman et al. 2020). args: as EvalConfig"""
    # all tokens of the prompt but the last are read, this one is the first to be continued
    generator = torch.Generator().manual_seed(args.seed)
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.eot or 0]
    prompt = torch.tensor([ids], device=next(model.parameters()).device)        # (1, t)
    state = read_long(model, prompt[:, :-1], 'tokens of the prompt read')

    for _ in progress_bar(range(args.max_tokens), 'tokens generated'):
        log_probs, state = model.stream(prompt.new_tensor([ids[-1:]]), state)
        scores = log_probs[0, -1].cpu().double() / max(args.temperature, 1e-9)  # (V,)
        p, tokens = scores.softmax(-1).sort(descending=True)

        # tokens after the first with a sum of top_p, or after the first top_k, are not drawn
        p[p.cumsum(0) - p > args.top_p] = 0
        p[args.top_k or len(p):] = 0
        token = tokens[torch.multinomial(p, 1, generator=generator)].item()
        if token == tokenizer.eot:
            break
        ids.append(token)
    return tokenizer.decode(ids[prompt.size(1):])


def read_long(model, tokens, desc):
    """model.read with a line of progress: tokens (B, t) -> the state"""
    state = None
    for piece in progress_bar(tokens.split(2 ** 16, 1), desc, size=lambda piece: piece.size(1)):
        state = model.read(piece, state)
    return state


def repeated(ids):
    """The share of the 8-grams of ids (n,) that occur earlier in it; 0 if there is none"""
    grams = list(zip(*(ids[i:] for i in range(8))))
    if not grams:
        return 0
    return 1 - len(set(grams)) / len(grams)


def samples(runs, args):
    """Continues the prompt, or 1,024 tokens up to the middle of the longest document; on and off"""
    rows = []
    given = prompt_of(args)
    for run in runs:
        # what comes before and after the middle of a document
        prompt, texts = given, {}
        if not given:
            document = max(run.documents, key=len)
            before, after = document.tensor_split([len(document) // 2])
            prompt = run.tokenizer.decode(before[-1024:]).strip('\ufffd')       # cut characters
            texts['the document'] = run.tokenizer.decode(after[:args.max_tokens])

        # continue it in both ways
        for way in dict.fromkeys((run.on, 'off')):
            run.model.way = way
            texts[way] = generate(run.model, run.tokenizer, prompt, args)

        # next to the document itself
        print(f'\n{run.name} continues\n\n{prompt[-300:]}')
        for way, text in texts.items():
            share = repeated(run.tokenizer.encode(text.replace('\ufffd', '')))
            print(f'\n[{way}: {share:.0%} of the 8-grams are repeated]\n{text}')
            rows.append(dict(run=run.name, way=way, prompt=prompt, text=text, repeated=share))
    return rows


# --------------------------------------------------------------------------------------------------
# pairs: translations and summaries
class Hypothesis(NamedTuple):
    """The beginning of a text that beam search can continue"""
    log_p: float
    ids: list           # from the last id of the prompt on
    row: int            # the row of the state that has its tokens except the last

    def score(self, length=None):
        """log P / length^0.6 (ours; with log P alone short texts win); length: of the text, or of a
        longer one"""
        return self.log_p / (length or len(self.ids) - 1) ** 0.6


def longer(hypotheses, likeliest, beam):
    """The `beam` best continuations of the hypotheses of one prompt by one token. likeliest: for
    each row of the state the likeliest tokens, [(log P, token)]"""
    found = []
    for log_p, ids, row in hypotheses:
        for x, token in likeliest[row]:
            found.append(Hypothesis(log_p + x, [*ids, token], row))
    return sorted(found, key=Hypothesis.score, reverse=True)[:beam]


def rows_of_state(state, rows):
    """A state of some of its texts, in any order: the texts are the first axis of each tensor in
    it. rows (n,)"""
    def select(x):
        if not torch.is_tensor(x):
            return x
        if len(x) == 1 or x.stride(0) == 0:             # the same for all rows: it is not copied
            return x[:1].expand(len(rows), *x.shape[1:])
        return x[rows]
    return tree_map(select, state)


def beam_search(model, prompts, eot, args):
    """The text that continues each of B prompts with the largest score that is found, to
    <|endoftext|> (eot) or n tokens: max_tokens, or as many as a training sequence has. Each step
    keeps the args.beam best continuations of a prompt. Those that end leave, and those that can
    have no better score than the best one that has ended. prompts (B, t) -> B lists of ids"""
    n = min(args.max_tokens, model.config.block_size)
    state = model.read(prompts[:, :-1])
    open_ones = [[Hypothesis(0.0, [last], row)] for row, last in enumerate(prompts[:, -1].tolist())]
    best = [None] * len(prompts)                                # of those that have ended
    for length in range(1, n + 1):
        # the likeliest next tokens of the open hypotheses of all prompts at once
        hypotheses = [x for group in open_ones for x in group]
        if not hypotheses:
            break
        rows = prompts.new_tensor([x.row for x in hypotheses])
        last = prompts.new_tensor([[x.ids[-1]] for x in hypotheses])
        log_probs, state = model.stream(last, rows_of_state(state, rows))
        values, tokens = log_probs[:, -1].topk(min(args.beam, log_probs.size(2)))
        likeliest = [list(zip(*row)) for row in zip(values.tolist(), tokens.tolist())]

        # the best continuations of each prompt
        first = 0
        for i, group in enumerate(open_ones):
            of_state = [x._replace(row=first + k) for k, x in enumerate(group)]
            first += len(group)
            open_ones[i] = []
            for x in longer(of_state, likeliest, args.beam):
                if x.ids[-1] != eot and length < n:
                    open_ones[i].append(x)
                elif best[i] is None or x.score() > best[i].score():
                    best[i] = x

            # log P only falls, so the score of a longer text is at most log P / n^0.6
            if best[i]:
                least = best[i].score()
                open_ones[i] = [x for x in open_ones[i] if x.score(n) > least]
    return [x.ids[1:] for x in best]


def continue_sources(run, sources, args, desc):
    """Beam search after each of some sources, (t,) tensors that end with TAB. Those of equal length
    are continued together, because then nothing is padded -> lists of ids, in the same order"""
    # batches of numbers of sources
    by_length = {}
    for i, source in enumerate(sources):
        by_length.setdefault(len(source), []).append(i)
    batches = [group[start:start + LINES_AT_ONCE] for group in by_length.values()
               for start in range(0, len(group), LINES_AT_ONCE)]

    results = [None] * len(sources)
    for batch in progress_bar(batches, desc, size=len):
        prompts = torch.stack([sources[i] for i in batch])
        texts = beam_search(run.model, prompts, run.tokenizer.eot, args)
        for i, ids in zip(batch, texts):
            results[i] = ids
    return results


UNSPACED = r'[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]'


def is_unspaced(texts):
    """Are most of the letters of some texts of a script that has no blanks between words?"""
    text = ''.join(texts)
    return 2 * len(regex.findall(UNSPACED, text)) > len(regex.findall(r'\p{L}', text))


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
    nothing: BLEU without a reference of four tokens, ROUGE without a reference that has a token
    -> {name: value}, {name: how its texts are cut}"""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU, CHRF
    unspaced = is_unspaced(references)
    has_kana = regex.search(r'[\p{Hiragana}\p{Katakana}]', ''.join(references))
    tokenizer = '13a'
    if unspaced:
        is_chinese = regex.search(r'\p{Han}', ''.join(references)) and not has_kana
        tokenizer = 'zh' if is_chinese else 'char'
    bleu = BLEU(tokenize=tokenizer)
    chrf = CHRF()
    values = {'BLEU': bleu.corpus_score(hypotheses, [references]).score,
              'chrF': chrf.corpus_score(hypotheses, [references]).score}
    if max(len(bleu.tokenizer(text).split()) for text in references) < 4:
        values['BLEU'] = None

    tokens = RougeTokens(unspaced)
    names = 'rouge1', 'rouge2', 'rougeL'
    scorer = RougeScorer(names, tokenizer=tokens)
    pairs = zip(references, hypotheses)
    scores = [scorer.score(*pair) for pair in pairs if tokens.tokenize(pair[0])]
    for name in names:
        values[name] = 100 * float(np.mean([x[name].fmeasure for x in scores])) if scores else None
    return values, {'BLEU': str(bleu.get_signature()), 'chrF': str(chrf.get_signature()),
                    'ROUGE': f'{tokens.name} in small letters'}


def check_pairs(runs, args):
    """SystemExit unless the runs' text has pairs"""
    if runs[0].corpus.tab < 0 or args.beam < 1:
        raise SystemExit(f'eval.py: --task {args.task} needs runs on .tsv files, and a --beam of 1 '
                         'or more')


def score_pairs(runs, args):
    """Translations or summaries of lines of a split (TRIME, Table 6; DRT, Table 2): BLEU, chrF and
    ROUGE of all lines; the first lines -> the rows; how texts are cut; source, reference and
    hypothesis of each line"""
    check_pairs(runs, args)
    try:
        import rouge_score, sacrebleu       # noqa: F401
    except ImportError:
        raise SystemExit('eval.py: --task pairs needs: pip install sacrebleu rouge-score')
    table, texts = Table(), {}
    for run in runs:
        decode = lambda ids: run.tokenizer.decode(ids).removesuffix('<|endoftext|>')
        pairs = run.documents[:args.lines or None]
        n = [1 + ids.tolist().index(run.corpus.tab) for ids in pairs]       # of a source and TAB
        sources = [ids[:i] for ids, i in zip(pairs, n)]
        for way in run.ways:
            run.model.way = way
            found = continue_sources(run, sources, args, f'{run.name}, {way}: lines')
            lines = [[decode(ids[:i - 1]), decode(ids[i:]), decode(hypothesis)]
                     for ids, i, hypothesis in zip(pairs, n, found)]
            texts[f'{run.name}, {way}'] = lines
            _, references, hypotheses = zip(*lines)
            values, signatures = text_metrics(references, hypotheses)
            table.add({'run': run.name, 'way': way, 'lines': len(lines), **values})

    # how texts are cut, and the first lines
    print()
    for name, signature in signatures.items():
        print(f'{name}: {signature}')
    for name, lines in texts.items():
        print(f'\n{name}')
        for line in [('source', 'reference', 'hypothesis'), *lines[:3]]:
            print(*(f'{text:40.40}' for text in line))
    return dict(rows=table.rows, signatures=signatures, texts=texts)


def translate(runs, args):
    """The lines of --prompt-file as sources of pairs: prints their targets, or writes them to
    --output, a line each, in the way of the first run that retrieves most -> [target]"""
    check_pairs(runs, args)
    lines = prompt_of(args).removesuffix('\n').split('\n')
    if lines == ['']:
        raise SystemExit('eval.py: --task translate needs --prompt-file FILE, a source a line')
    run = runs[0]
    run.model.way = run.on

    # blanks at the ends are not a part of a source, as in training; an empty line remains
    numbers = [i for i, line in enumerate(lines) if line.strip()]
    sources = []
    for i in numbers:
        source = ' '.join(lines[i].split('\t')).strip()
        ids = run.tokenizer.encode(f'{source}\t')
        sources.append(run.documents[0].new_tensor(ids))
    targets = [''] * len(lines)
    for i, ids in zip(numbers, continue_sources(run, sources, args, f'{run.name}: lines')):
        text = run.tokenizer.decode(ids).removesuffix('<|endoftext|>')
        targets[i] = ' '.join(text.split())
    text = '\n'.join(targets) + '\n'
    if args.output:
        train.write(args.output, text)
        print(f'{len(targets)} lines: {args.output}')
    else:
        print(text, end='')
    return targets


# --------------------------------------------------------------------------------------------------
# pictures
def draw(runs, name, plot, facts):
    """Saves what plot(figure, facts) draws next to the first checkpoint, if it is possible"""
    try:
        from matplotlib.figure import Figure            # pyplot would need a screen
        figure = Figure(layout='constrained')
        plot(figure, facts)
        path = runs[0].path.with_name(name)
        figure.savefig(path, bbox_inches='tight')
        print(f'\n{path}')
    except Exception as e:      # there is no matplotlib, nothing to draw, or a broken log
        print(f'no picture: {e!r}', file=sys.stderr)


def label_of(name):
    """The name of a run as a label: matplotlib reads $ as mathematics and hides names with _ first
    """
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
        losses[way] = by_position(run.scores[way], edges)
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
        log = list(map(json.loads, path.read_text().splitlines()))
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
# speed
def clock(tokens):
    """The time in seconds, when the device of the tokens has finished its work"""
    tokens[0, 0].item()
    return time.perf_counter()


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


def training_speed(runs, device):
    """Prints seconds (median of interleaved runs) and MACs of forward and backward, per token; of
    RPT without the ranking loss. MACs are half of torch's FLOPs; they are counted with SDPA in
    plain PyTorch, because torch does not count all of its fused kernels. -> the rows"""
    from torch.utils.flop_counter import FlopCounterMode            # imports Triton
    macs = []
    for run in runs:
        flops = train.part_of(type(run.model), 'FLOPS', {})
        counter = FlopCounterMode(display=False, custom_mapping=flops)
        with sdpa_kernel(SDPBackend.MATH), counter:
            training_seconds(run.model, device)
        config = run.model.config
        n_tokens = config.micro_batch * config.block_size
        macs.append(counter.get_total_flops() // 2 // n_tokens)

    times = [[training_seconds(run.model, device) for run in runs]
             for _ in progress_bar(range(5), 'training steps of each run')]
    times = np.median(times, axis=0)                                # (runs,)
    table = Table()
    for run, n, seconds in zip(runs, macs, times):
        table.add({'run': run.name,
                   'MACs/token': n,
                   's/token': seconds,
                   'MACs ratio': n / macs[0],
                   'time ratio': seconds / times[0]})
    return table.rows


def n_bytes(state):
    """The memory of all tensors in nested tuples and lists, except those in mapped files"""
    tensors = filter(torch.is_tensor, tree_leaves(state))
    return sum(x.nbytes for x in tensors if not x.untyped_storage().filename)


def speed(runs, args):
    """Seconds per token to read random tokens, then per token to predict the next ones; memory in
    use for what was read, that of the state (DRT, Table 3). Then the speed of training -> the rows
    of both"""
    table = Table()
    for run, (name, length) in itertools.product(runs, args.lengths.items()):
        if length == 0:
            raise SystemExit('eval.py: --lengths 0: there is nothing to read')
        run.model.way = run.on
        tokens = torch.randint(run.model.config.vocab_size, (1, length + 32),
                               device=args.device)
        began = clock(tokens)
        state = read_long(run.model, tokens[:, :length], f'{run.name}, tokens read')
        end = clock(tokens)
        for token in tokens[0, length:]:
            _, state = run.model.stream(token[None, None], state)
        generating = clock(tokens) - end
        table.add({'run': run.name,
                   'tokens': name,
                   'reading s/token': (end - began) / length,
                   'generating s/token': generating / 32,
                   'state MB': n_bytes(state) / 2 ** 20})
    return table.rows + training_speed(runs, args.device)


# --------------------------------------------------------------------------------------------------
# needles in a haystack
def answers(run, needles, n_chunks, chunks, seed):
    """Hides a needle in each of `chunks` of a text of n_chunks. Yields for each needle whether
    greedy decoding answers its question: each token of the answer is the likeliest."""
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
    state = read_long(run.model, text[None], f'{run.name}, tokens of a text read')
    for names in chains:
        question, opens, answer, _ = map(last.new_tensor, needles.sentence(names))
        last.view(hops, chunk)[:, -len(question):] = question
        prompt = torch.cat([last, opens, answer[:-1]])
        log_probs, _ = run.model.stream(prompt[None], state)
        predicted = log_probs[0, -len(answer):].argmax(-1)
        yield torch.equal(predicted, answer)


def wilson_interval(right, n):
    """The 95% confidence interval of a share, right of n (Wilson 1927) -> low, high"""
    p = right / n
    z2 = 1.96 ** 2 / n
    center = (p + z2 / 2) / (1 + z2)
    width = (z2 * (p * (1 - p) + z2 / 4)) ** 0.5 / (1 + z2)
    return max(0.0, center - width), min(1.0, center + width)


def niah(runs, args):
    """Needles in a haystack (DRT, Table 2): the share of right answers by length of the text and
    depth in it, as a table and as niah.png; 10 texts of each length, 5 above 400k tokens. low and
    high are a 95% interval; repeated: how often the text of the split is repeated in one of them"""
    table = Table()
    depths = args.depths.values()
    for run, (name, length) in itertools.product(runs, args.lengths.items()):
        # needles at these depths, in different chunks; the last two chunks are for the questions,
        # which are in one of them if there is one hop
        chunk = run.chunk if run.chunk > 1 else 32
        hops = run.corpus.hops or 1
        needles = data.Needles(run.split, run.tokenizer, hops, block_size=8 * chunk,
                               micro_batch=1, seed=0, chunk=chunk)
        n_chunks = length // chunk
        last = n_chunks - 3
        chunks = [depth * last // 100 for depth in depths]
        if len(set(chunks)) < len(chunks) or hops * len(chunks) > last or max(depths) > 100:
            raise SystemExit(f'--lengths {name}, --depths {",".join(args.depths)}: '
                             'no chunk for each needle')

        # right answers
        run.model.way = run.on
        began = time.perf_counter()
        n_texts = max(5, min(10, 2 ** 22 // length))
        texts = progress_bar(range(n_texts), f'{run.name}, texts of {name} tokens')
        right = np.array([                                      # (texts, depths)
            list(answers(run, needles, n_chunks, chunks, [args.seed, length, i]))
            for i in texts])
        low, high = wilson_interval(right.sum(), right.size)
        table.add({
            'run': run.name,
            'tokens': name,
            'repeated': max(0.0, length / len(run.split.tokens) - 1),
            'needles': right.size,
            'right': right.mean(),
            'low': low,
            'high': high,
            **{f'{depth}%': share for depth, share in zip(depths, right.mean(0))},
            's/needle': (time.perf_counter() - began) / right.size})
    draw(runs, 'niah.png', plot_needles, table.rows)
    return table.rows


# --------------------------------------------------------------------------------------------------
# the command
def report(runs, args):
    """The table, examples, samples and loss.png; of pairs, the task `pairs`"""
    if runs[0].corpus.tab >= 0:
        return score_pairs(runs, args)
    result = dict(table=score_table(runs, args),
                  examples=examples(runs, args, n=1),
                  samples=samples(runs, args))
    draw(runs, 'loss.png', plot_losses, runs)
    return result


# tasks: name -> function(runs, args), which returns what --json writes
TASKS = {'report': report, 'table': score_table, 'examples': examples, 'generate': samples,
         'pairs': score_pairs, 'translate': translate, 'speed': speed, 'niah': niah,
         'frequency': frequency, 'repeats': repeats}
FOR_PAIRS = 'report', 'pairs', 'translate', 'generate', 'speed'     # others score all tokens


def tasks_of(Models):
    """The tasks of eval.py, and those that all these models have"""
    own = [train.part_of(Model, 'TASKS', {}) for Model in Models]
    common = {name: task for name, task in own[0].items()
              if all(name in tasks for tasks in own)} if own else {}
    return {**TASKS, **common}


def parser_of(Models):
    """The flags of eval.py, and of the models"""
    summaries = []
    for name, task in tasks_of(Models).items():
        summary = re.split('[.:] | -> ', ' '.join(task.__doc__.split()))[0]
        summaries.append(f'  {name:12}{summary}'.replace('%', '%%'))    # % is special in a help
    parser = argparse.ArgumentParser(
        usage='eval.py RUN [RUN ...] [flags]', allow_abbrev=False,
        epilog='tasks:\n' + '\n'.join(summaries),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(f'eval.py: {message}')
    train.add_flags(parser, EvalConfig)
    for Config in {train.part_of(Model, 'EvalConfig'): None for Model in Models}:
        if Config:
            train.add_flags(parser, Config)
    return parser


def value_of(argv, flag):
    """The value of a flag before the parser is known"""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, default='')
    return vars(parser.parse_known_args(argv)[0])[flag.strip('-')]


@torch.no_grad()
def main(argv):
    # runs come first; their models have flags and tasks, too
    argv = argv or ['--help']
    names = list(itertools.takewhile(lambda x: not x.startswith('-'), argv))
    if not names and '--help' not in argv and '-h' not in argv:
        raise SystemExit('eval.py: runs come before flags: eval.py RUN [RUN ...] [flags], or '
                         'eval.py --help')
    model_files = value_of(argv, '--model')
    weights = [read_run(name, model_files) for name in names]
    Models = [type(model) for _, _, model, _ in weights]
    parser = parser_of(Models)
    args = train.parse_flags(parser, argv[len(names):])
    tasks = tasks_of(Models)
    if args.task not in tasks:
        parser.error(f'--task {args.task}: these runs together have {", ".join(tasks)}; datastore '
                     'is for TRIME alone, ranks for RPT')

    # the work
    args.device = train.hardware(args.device)
    args.progress_bar = progress_bar
    train.precision(args.device, 'fp32')                            # after training in a notebook
    with train.short_errors('eval.py', 'shorter --lengths, a smaller --data or --device cpu'):
        runs = [Run(name, read, args) for name, read in zip(names, weights)]
        for run in runs:
            if run.about_text != runs[0].about_text:
                parser.error(f'different texts, {runs[0].about_text} and {run.about_text}: use '
                             '--data')
        if runs[0].corpus.tab >= 0 and args.task not in FOR_PAIRS:
            parser.error(f'--task {args.task} scores all tokens, of pairs only targets are '
                         'predicted: --task pairs')
        result = tasks[args.task](runs, args)
        if args.json:
            train.write(args.json, json.dumps(result, indent=1))


if __name__ == '__main__':
    train.keep_printing()
    main(sys.argv[1:])
