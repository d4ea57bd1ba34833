"""
Evaluates trained models: any mixture of them in one table, on the same text.

    $ python eval.py out/trime out/rpt out/drt      the table, examples, samples, loss.png
    $ python eval.py out/pairs                      after --data x.tsv: translations, BLEU, ROUGE
    $ python eval.py out/drt --task examples        what is retrieved where it helps most
    $ python eval.py out/drt --task examples --html out/page.html       the same in a browser
    $ python eval.py out/trime --help               all tasks and flags, those of its model too

A run is a folder, of which best.pt is used, else ckpt.pt, or it is a .pt file. Each token of a
document but its first is scored once, in fp32; the document is read from its beginning. A model is
evaluated in several ways. Each has a name and attributes of the model, which are set for it:

    on              the model retrieves, as in training
    shuffled        it retrieves random chunks, or memories with exchanged values
    off             it retrieves nothing
    corpus, both    with --retrieve-from: it retrieves from that corpus; from corpus and text
"""
import train    # before torch: it sets how torch's idle threads wait
import argparse, importlib, itertools, json, os, re, sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

import data

# columns of the table: losses of tokens up to these positions in their document
POSITIONS = {'<512': 512, '<1,024': 1024, '<2,048': 2048, '<4,096': 4096, '4,096+': sys.maxsize}
# columns of Table 14 of TRIME: tokens that occur at most so often, but not in the column before
FREQUENCIES = {'<=10': 10, '10-100': 100, '100-1k': 1000, '1k-10k': 10_000, '>10k': sys.maxsize}
UNITS = {'k': 1024, 'm': 1024 ** 2}
PAGE_TOKENS = 8192              # tokens of a document that a page shows, at most


# --------------------------------------------------------------------------------------------------
# flags
def numbers(text):
    """The type of a flag: '1k,16k,2m' -> {'1k': 1024, '16k': 16384, '2m': 2097152}"""
    if not re.fullmatch('[0-9]{1,9}[km]?(,[0-9]{1,9}[km]?)*', text):
        raise argparse.ArgumentTypeError(f'{text!r} is not like 0,16,1k,2m')
    return {x: int(x.rstrip('km')) * UNITS.get(x[-1], 1) for x in text.split(',')}


def output(text):
    """The type of a flag: a path, at which train.write can write a file after the work. Its folder
    is made."""
    path = Path(os.path.realpath(train.path(text)))         # a link remains: its file is replaced
    taken = path.exists() and not path.is_file()            # by a folder or a device
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        taken = True
    if taken or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f'{text!r} cannot be written')
    return path


@dataclass
class EvalConfig:
    task: str = 'report'    # or: table examples generate pairs niah speed frequency datastore ranks
    data: train.source = ''     # another corpus than the one of training
    retrieve_from: train.source = ''    # trime, drt: retrieve from the train split of this corpus
    split: Literal['train', 'val', 'test'] = 'val'              # which part of the corpus
    prompt: str = ''            # examples, generate: a text in place of the split's
    html: output = None         # examples: a file for a page, a document and what is retrieved
    max_tokens: int = 200       # generate, pairs: new tokens, at most
    temperature: float = 0.8    # generate: 0 takes the likeliest token
    top_k: int = 0              # generate: from so many of the likeliest tokens; 0: from all
    top_p: float = 0.95         # generate: from the likeliest tokens with this sum of probability
    seed: int = 0               # generate, niah, ranks: of the random draws
    beam: int = 4               # pairs: hypotheses that are kept (TRIME: 4); 1: the likeliest token
    lines: int = 200            # pairs: the first lines of the split; 0: all
    lengths: numbers = '1k,4k,16k'      # niah, speed: tokens of the text; k is 2^10, m is 2^20
    depths: numbers = '0,25,50,75,100'  # niah: places of the needles, in %
    json: output = None         # a file for the numbers and texts of the task
    device: Literal['auto', 'cuda', 'cpu', 'mps'] = 'auto'      # auto: cuda if present, else cpu


# --------------------------------------------------------------------------------------------------
# runs
class Run:
    """A trained model, by its folder or .pt file, and the text that it is evaluated on

    chunk       tokens that are retrieved together; 1: single ones, TRIME's memories
    split       n_bytes does not count the first tokens, which are not scored
    documents   of the split, each (n,) int64
    ways        name -> attributes of the model to set
    on          the name of the way that retrieves most
    scores      way -> log_p of each document, (n - 1,) fp64; set by `score`"""
    def __init__(self, name):
        self.name, self.scores = name, {}
        paths = Path(name, 'best.pt'), Path(name, 'ckpt.pt'), Path(name)
        self.path = next(filter(Path.is_file, paths), None)
        if self.path is None:
            raise SystemExit(f'no such run: {name} (train.py makes runs)')

        # the model, from its checkpoint alone
        self.checkpoint, model, self.tokenizer = train.read_checkpoint(self.path)
        self.model = model.eval()
        self.module = importlib.import_module(self.checkpoint['model_name'])
        self.chunk = self.module.batches(model.config).get('chunk', 1)

    def prepare(self, args):
        """Loads the text and what the model needs for it; sets documents, ways and on"""
        name = args.data or self.checkpoint['data']
        corpus = self.corpus = data.load(name, self.tokenizer, quiet=True)
        split = getattr(corpus, args.split)
        if split is None:
            raise SystemExit(f'{name} has no split {args.split}')
        if not args.data and corpus.fingerprint != self.checkpoint['corpus']:
            print(f'{self.name} was trained on another version of {name}', file=sys.stderr)
        self.text = dict(data=corpus.name, text=corpus.fingerprint[:8],
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

        # what the model retrieves from; TRIME tunes its temperatures, too
        model = self.model.to(args.device)
        if hasattr(model, 'prepare_eval'):
            external = data.load(args.retrieve_from or name, self.tokenizer, quiet=True)
            model.prepare_eval(corpus, external, args, self.path, data.progress)
        elif args.retrieve_from:
            raise SystemExit(f'{self.name} retrieves from its text alone: no --retrieve-from')
        self.ways = model.ways()
        self.on = 'both' if 'both' in self.ways else next(iter(self.ways))

    def set_way(self, way):
        """Sets the attributes of the model that belong to a way of evaluation."""
        vars(self.model).update(self.ways[way])

    def log_p(self, way, tokens):
        """log P of every token of a document but the first: tokens (n,) int64 -> (n - 1,) fp64"""
        self.set_way(way)
        parts, state = [], None
        for pairs in tokens.unfold(0, 2, 1).split(self.model.PIECE):    # (t, 2): token, next one
            log_probs, state = self.model.stream(pairs[None, :, 0], state)
            parts.append(log_probs[0].gather(1, pairs[:, 1:]))
        return torch.cat(parts).flatten().cpu().double().numpy()

    def gains(self):
        """What retrieval gains, in nats, for each token of a document but the first, (n - 1,)"""
        return list(map(np.subtract, self.scores[self.on], self.scores['off']))


def bytes_of_first_tokens(split, tokenizer):
    """The UTF-8 bytes of the first tokens of all documents; unknown words count as none, as their
    lengths are not known"""
    ids = split.tokens[split.offsets[:-1]]
    text = ''.join(tokenizer.tokens[i] for i in ids)
    if tokenizer.name == 'word':
        text = text.replace('<eos>', '\n').replace('<unk>', '').encode()
    return len(text)                            # of others, a character is a byte


def load(path):
    """For a notebook: a run's folder or .pt file -> (model in eval mode, tokenizer)"""
    run = Run(path)
    return run.model, run.tokenizer


def score(runs, all_ways=True):
    """Sets run.scores of all ways, or of `off` and run.on alone, and yields each pair (run, way)
    when it is known. The way `off` is scored first, as all are compared with it; there is one
    progress with the minutes left."""
    pairs = [(run, way) for run in runs for way in run.ways
             if all_ways or way in ('off', run.on)]

    # an item for each pair and document; `off`, which is a way of each run, takes its items with
    # the first pair of the run and none later
    documents = data.progress([tokens for run, _ in pairs for tokens in run.documents],
                              'tokens scored', size=len)
    for run, way in pairs:
        for name in 'off', way:
            if name not in run.scores:
                run.scores[name] = [run.log_p(name, next(documents)) for _ in run.documents]
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
    # 0 bytes: if documents have a byte each
    bits_per_byte = nats / np.log(2) / split.n_bytes if split.n_bytes else None

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
    if isinstance(x, float):
        return f'{x:,.0f}' if 1e4 <= x < 1e9 else f'{x:#.5g}'
    if isinstance(x, int):
        return f'{x:,}'
    return '-' if x is None else x


def add_row(rows, row):
    """Appends a row to those of a table, dicts with the same keys, and prints it, the first with
    the header. Columns are as wide as these need, those for names of runs at least 15."""
    rows.append(row)
    columns = []                                                # formats: text is aligned left
    for name, x in rows[0].items():
        width = max(15 if name == 'run' else 8, len(name), len(cell(x)))
        columns.append(f'<{width}' if isinstance(x, str) else f'>{width}')
    if len(rows) == 1:
        print()
        print(*map(format, row, columns))
    print(*map(format, map(cell, row.values()), columns))


def table(runs, args):
    """Prints a row for each run and way. -> all its numbers"""
    documents = runs[0].documents
    N = len(documents)
    text = dict(runs[0].text, documents=N, scored=sum(map(len, documents)) - N)
    add_row([], text)
    print('\non: as in training; shuffled: wrong memory; off: none; corpus, both: --retrieve-from\n'
          'word ppl: per word between blanks, first words included, as is usual for WikiText\n'
          f'±: standard error of the gain, from {N} documents (below 5 it means little)')
    rows = []
    for run, way in score(runs):
        add_row(rows, {
            'run': run.name,
            'way': way,
            'params': sum(map(torch.numel, run.model.parameters())),
            'trained on': run.checkpoint['tokens'],
            **metrics(run.scores[way], run.scores['off'], run.split)})
    return dict(text, rows=rows)


def frequency(runs, args):
    """Prints perplexities by frequency (TRIME, Table 14): a token is in the column of the number of
    times that it occurs in the split; n is how many tokens are scored there. -> the rows"""
    rows = []
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
        add_row(rows, row)
    return rows


# --------------------------------------------------------------------------------------------------
# examples of retrieval
def show(run, tokens, t, **facts):
    """Prints what is retrieved to predict token t + 1, 4 at most. -> the same as a dict"""
    # where it is
    decode, retrieved, lines = run.tokenizer.decode, [], []
    print(f'\n{run.name} retrieves this to predict the token after `before`:')
    facts['before'] = decode(tokens[:t + 1][-32:])
    facts['next'] = decode(tokens[t + 1:][:16])
    for key, value in facts.items():
        if value != '':
            print(f'{key:9} {value!r}')

    # the chunks or memories of largest weight
    run.set_way(run.on)
    for weight, where, start, end in run.model.trace(tokens, t)[:4]:
        ago = t + 2 - end if where is tokens else None          # None: in another text
        ids = where[start:end]
        first = max(0, run.chunk - 16)          # 32 tokens around the end of the first chunk
        text = decode(ids[first:first + 32])
        shown = f'{text!r}'
        if run.chunk == 1:                                      # a memory
            shown = f'{decode(ids[:-1])!r} -> {decode(ids[-1:])!r}'
        row = dict(weight=weight, start=start, end=end, ago=ago, text=text)
        retrieved.append(row)
        add_row(lines, dict(row, text=shown))
    if not lines:
        print(f'\nnothing: among {t + 1} tokens is none to retrieve (--memory knn: not shown)')
    return dict(run=run.name, **facts, retrieved=retrieved)


def examples(runs, args, n=3):
    """What is retrieved at the end of --prompt, or in n documents where a token gains most. --html:
    a page for the prompt, or for the document whose first PAGE_TOKENS tokens gain most in the first
    run, and for these tokens"""
    # the runs that retrieve, and what each token gains
    result, pages = [], []
    for run in runs:
        if run.on == 'off':
            print(f'\n{run.name} retrieves nothing')
    runs = [run for run in runs if run.on != 'off']
    print('\ngain: in nats; start, end: tokens of the document; ago: tokens from the last of them '
          'to the predicted one\ntext: of chunks, 32 tokens around the end of the first one')
    if not args.prompt:
        list(score(runs, all_ways=False))                       # sets run.scores

    # examples, and the data of a page for the same run
    for run in runs:
        if args.prompt:
            tokens = run.documents[0].new_tensor(run.tokenizer.encode(args.prompt))
            if len(tokens) < 2:
                raise SystemExit('eval.py: --prompt has fewer than two tokens')
            result.append(show(run, tokens, len(tokens) - 1))
        else:
            best = sorted(enumerate(run.gains()), key=lambda item: -item[1].max())
            for d, gains in best[:n]:
                t = int(gains.argmax())                         # gains[t] is of token t + 1
                result.append(show(run, run.documents[d], t, document=d, token=t + 1,
                                   gain=round(float(gains[t]), 4)))
            page_gains = [gain[:PAGE_TOKENS].sum() for gain in runs[0].gains()]
            tokens = run.documents[np.argmax(page_gains)][:PAGE_TOKENS]
        if args.html:
            pages.append(trace_text(run, tokens))
    if pages:                                   # assets/trace.html with the data of the runs in it
        script = json.dumps(pages).replace('<', '\\u003c')      # no text ends the script
        page = (Path(__file__).parent / 'assets/trace.html').read_text('utf-8')
        train.write(args.html, page.replace('{{runs}}', script))
        print(f'\n{args.html}')
    return result


# --------------------------------------------------------------------------------------------------
# a page that shows a document and what is retrieved
def trace_text(run, tokens):
    """What a page shows of a run and a text (n,). losses: off and on, of all tokens but the first;
    traces: for each chunk but the first (TRIME: token), for each group of layers, what is retrieved
    to predict its tokens: [weight, start, end, []], the list has the tokens of another text"""
    losses = [-run.log_p(way, tokens) for way in ('off', run.on)]
    chunk, traces, state = run.chunk, [], None

    # each chunk is read once, and traced for each group of layers, or once if there are no groups
    n_groups = getattr(run.model.config, 'groups', 0)
    options = [dict(group=group) for group in range(n_groups)] or [{}]
    for t in data.progress(range(chunk, len(tokens), chunk), f'{run.name}, chunks traced'):
        state = run.model.read(tokens[None, t - chunk:t], state)
        by_group = []
        for option in options:
            reads = []
            for weight, where, start, end in run.model.trace(tokens, t, state, **option)[:8]:
                other_text = [] if where is tokens else where[start:end].tolist()
                reads.append([round(weight, 4), start, end, other_text])
            by_group.append(reads)
        traces.append(by_group)
    return dict(run=run.name, chunk=chunk, traces=traces,
                tokens=tokens.tolist(), losses=np.round(losses, 3).tolist(),
                tokenizer=run.tokenizer.to_dict())


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
    state = model.read(prompt[:, :-1])

    for _ in data.progress(range(args.max_tokens), 'tokens generated'):
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


def repeated(ids):
    """The share of the 8-grams of ids (n,) that occur earlier in it"""
    grams = list(zip(*(ids[i:] for i in range(8))))
    return 1 - len(set(grams)) / len(grams) if grams else 0


def samples(runs, args):
    """Continues --prompt, or 1,024 tokens up to the middle of the longest document; on and off."""
    rows = []
    # what comes before and after the middle of a document
    for run in runs:
        prompt, texts = args.prompt, {}
        if not prompt:
            document = max(run.documents, key=len)
            before, after = document.tensor_split([len(document) // 2])
            prompt = run.tokenizer.decode(before[-1024:]).strip('\ufffd')       # cut characters
            texts['the document'] = run.tokenizer.decode(after[:args.max_tokens])

        # continue it in both ways
        for way in dict.fromkeys((run.on, 'off')):
            run.set_way(way)
            texts[way] = generate(run.model, run.tokenizer, prompt, args)

        # next to the document itself
        print(f'\n{run.name} continues\n\n{prompt[-300:]}')
        for way, text in texts.items():
            share = repeated(run.tokenizer.encode(text.replace('\ufffd', '')))
            print(f'\n[{way}: {share:.0%} of the 8-grams are repeated]\n{text}')
            rows.append(dict(run=run.name, way=way,
                             prompt=prompt, text=text, repeated=share))
    return rows


# --------------------------------------------------------------------------------------------------
# pairs
def beam_search(model, prompt, eot, args):
    """The ids, a list, that continue a prompt (t,) to <|endoftext|> (eot) or max_tokens, with the
    largest score = log P / (1 + length)^0.6 that is found with args.beam hypotheses. The score is
    ours; with log P alone short texts win."""
    def score(hypothesis):
        log_p, ids, _ = hypothesis
        return log_p / len(ids) ** 0.6

    # log P, ids from the last one of the prompt on, the state before the last id
    state = model.read(prompt[None, :-1])
    hypotheses = [(0.0, prompt[-1:].tolist(), state)]
    for _ in range(args.max_tokens):
        # each one that has not ended, with each of its likeliest next tokens; a state is never
        # changed, so several can continue it
        longer = []
        for log_p, ids, state in hypotheses:
            if ids[-1] == eot:
                longer.append((log_p, ids, state))
                continue
            log_probs, state = model.stream(prompt.new_tensor([ids[-1:]]), state)
            values, tokens = log_probs[0, -1].sort(descending=True)
            for x, token in zip(values[:args.beam].tolist(), tokens.tolist()):
                longer.append((log_p + x, [*ids, token], state))

        # the best ones are kept, until the best of all has ended
        hypotheses = sorted(longer, key=score, reverse=True)[:args.beam]
        if hypotheses[0][1][-1] == eot:
            break
    return hypotheses[0][1][1:]


def pairs(runs, args):
    """Translations or summaries of lines of a split (TRIME, Table 6; DRT, Table 2): BLEU and chrF
    of all lines, means of the F1 of ROUGE; the first lines. -> the rows; the source, reference and
    hypothesis of each line"""
    try:
        import sacrebleu
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise SystemExit('eval.py: --task pairs needs: pip install sacrebleu rouge-score')
    if runs[0].corpus.tab < 0 or args.beam < 1:
        raise SystemExit('eval.py: --task pairs needs .tsv files, and a --beam of 1 or more')
    names = 'rouge1', 'rouge2', 'rougeL'
    scorer = RougeScorer(names)
    rows, texts = [], {}
    for run in runs:
        for way in run.ways:
            # source, reference, hypothesis of each line
            run.set_way(way)
            name, lines = f'{run.name}, {way}', []
            for tokens in data.progress(run.documents[:args.lines or None], f'{name}, lines'):
                n = 1 + tokens.tolist().index(run.corpus.tab)
                ids = beam_search(run.model, tokens[:n], run.tokenizer.eot, args)
                parts = map(run.tokenizer.decode, (tokens[:n - 1], tokens[n:], ids))
                lines.append([text.removesuffix('<|endoftext|>') for text in parts])
            texts[name] = lines

            # the metrics
            _, references, hypotheses = zip(*lines)
            rouge = list(map(scorer.score, references, hypotheses))
            add_row(rows, {
                'run': run.name,
                'way': way,
                'lines': len(lines),
                'BLEU': sacrebleu.corpus_bleu(hypotheses, [references]).score,
                'chrF': sacrebleu.corpus_chrf(hypotheses, [references]).score,
                **{key: 100 * np.mean([x[key].fmeasure for x in rouge]) for key in names}})

    # the first lines
    for name, lines in texts.items():
        print(f'\n{name}')
        for line in [('source', 'reference', 'hypothesis'), *lines[:3]]:
            print(*(f'{text:40.40}' for text in line))
    return dict(rows=rows, texts=texts)


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
    axes.set(title=run.name, xlabel='position in the document (tokens)', xscale='log')
    axes.xaxis.set_major_formatter('{x:,.0f}')
    axes.legend()


def plot_losses(figure, runs):
    """A panel for each run, then one for the training of all"""
    n_panels = len(runs) + 1
    figure.set_size_inches(4.5 * n_panels, 4)
    figure.supylabel('loss (nats per token)')
    *panels, training = figure.subplots(1, n_panels, sharey=True)
    for axes, run in zip(panels, runs):
        plot_positions(axes, run)

        # means over n steps, a thirtieth; the first tenth of the losses is too high for the axis
        path = run.path.with_name('log.jsonl')
        if path.is_file() and path.stat().st_size:
            log = list(map(json.loads, path.read_text().splitlines()))
            log = log[len(log) // 10:]
            n = 1 + len(log) // 30
            losses = [entry['loss'] for entry in log]
            means = np.convolve(losses, np.ones(n) / n, 'valid')
            millions = [entry['tokens'] / 1e6 for entry in log]
            training.plot(millions[n - 1:], means, label=run.name)
    training.set(title='training', xlabel='tokens (millions)')
    if training.lines:
        training.legend()
    else:                                               # .pt files alone have no log
        training.remove()


def plot_needles(figure, rows):
    """A heat map: lengths of the text by depths of the needle"""
    axes = figure.subplots()
    depths = [name for name in rows[0] if name.endswith('%')]
    right = [[row[depth] for depth in depths] for row in rows]
    figure.colorbar(axes.imshow(right, vmin=0, vmax=1, aspect='auto'))
    axes.set_xticks(range(len(depths)), depths)
    axes.set_yticks(range(len(rows)), [f'{row["run"]}, {row["tokens"]}' for row in rows])
    axes.set(title='share of right answers', xlabel='depth in the text', ylabel='tokens')


# --------------------------------------------------------------------------------------------------
# speed
def clock(tokens):
    """The time in seconds, when the device of the tokens has finished its work"""
    tokens[0, 0].item()
    return time.perf_counter()


def training_seconds(model, device, kernel='auto'):
    """Seconds of a forward and a backward pass, per token of a random micro-batch"""
    shape = model.config.micro_batch, model.config.block_size
    tokens = torch.randint(model.config.vocab_size, shape, device=device)
    batch = data.Batch(tokens, tokens, torch.zeros_like(tokens), 0)
    _, autocast = train.precision(device, 'auto')
    model.train().kernel = kernel
    began = clock(tokens)
    with torch.enable_grad(), autocast():
        loss, _ = model(batch, 1.0)
    loss.backward()
    seconds = max(1e-9, clock(tokens) - began)          # a clock can be coarse
    model.eval().zero_grad()
    return seconds / tokens.numel()


def training_speed(runs, device):
    """Prints seconds (median of interleaved runs) and MACs of forward and backward, per token; of
    RPT without the ranking loss. MACs are half of torch's FLOPs; they are counted with SDPA and GCA
    in plain PyTorch, because torch does not count all fused kernels. -> the rows"""
    from torch.utils.flop_counter import FlopCounterMode            # imports Triton
    rows, macs = [], []
    for run in runs:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            training_seconds(run.model, device, 'torch')
        config = run.model.config
        n_tokens = config.micro_batch * config.block_size
        macs.append(counter.get_total_flops() // 2 // n_tokens)

    times = np.median([[training_seconds(run.model, device)
                        for run in runs]
                       for _ in range(5)], axis=0)                  # (runs,)
    for run, n, seconds in zip(runs, macs, times):
        add_row(rows, {'run': run.name,
                       'MACs/token': n,
                       's/token': seconds,
                       'MACs ratio': n / macs[0],
                       'time ratio': seconds / times[0]})
    return rows


def n_bytes(state):
    """The memory of all tensors in nested tuples and lists, but for those in mapped files"""
    tensors = filter(torch.is_tensor, tree_leaves(state))
    return sum(x.nbytes for x in tensors if not x.untyped_storage().filename)


def speed(runs, args):
    """Prints seconds per token to read random tokens, then per token to predict the next ones;
    memory in use for what was read, that of the state (DRT, Table 3). Then the speed of training.
    -> the rows of both"""
    rows = []
    for run, (name, length) in itertools.product(runs, args.lengths.items()):
        if length == 0:
            raise SystemExit('eval.py: --lengths 0: there is nothing to read')
        tokens = torch.randint(run.model.config.vocab_size, (1, length + 32),
                               device=args.device)
        began = clock(tokens)
        state = run.model.read(tokens[:, :length])
        end = clock(tokens)
        for token in tokens[0, length:]:
            _, state = run.model.stream(token[None, None], state)
        generating = clock(tokens) - end
        add_row(rows, {'run': run.name,
                       'tokens': name,
                       'reading s/token': (end - began) / length,
                       'generating s/token': generating / 32,
                       'state MB': n_bytes(state) / 2 ** 20})
    return rows + training_speed(runs, args.device)


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
    state = run.model.read(text[None])
    for names in chains:
        question, opens, answer, _ = map(last.new_tensor, needles.sentence(names))
        last.view(hops, chunk)[:, -len(question):] = question
        prompt = torch.cat([last, opens, answer[:-1]])
        log_probs, _ = run.model.stream(prompt[None], state)
        predicted = log_probs[0, -len(answer):].argmax(-1)
        yield torch.equal(predicted, answer)


def niah(runs, args):
    """Needles in a haystack (DRT, Table 2): the share of right answers by length of the text and
    depth in it, as a table and as niah.png; 10 texts of each length, fewer above 400k tokens"""
    rows, depths = [], args.depths.values()
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
        began = time.perf_counter()
        n_texts = max(1, min(10, 2 ** 22 // length))
        texts = data.progress(range(n_texts), f'{run.name}, texts of {name} tokens')
        right = np.array([                                      # (texts, depths)
            list(answers(run, needles, n_chunks, chunks, [args.seed, length, i]))
            for i in texts])
        add_row(rows, {
            'run': run.name,
            'tokens': name,
            'needles': right.size,
            'right': right.mean(),
            **{f'{depth}%': share for depth, share in zip(depths, right.mean(0))},
            's/needle': (time.perf_counter() - began) / right.size})
    draw(runs, 'niah.png', plot_needles, rows)
    return rows


# --------------------------------------------------------------------------------------------------
# the command
def report(runs, args):
    """The table, examples, samples and loss.png"""
    result = dict(table=table(runs, args),
                  examples=examples(runs, args, n=1),
                  samples=samples(runs, args))
    draw(runs, 'loss.png', plot_losses, runs)
    return result


TASKS = {'report': report, 'table': table, 'examples': examples, 'generate': samples,
         'pairs': pairs, 'speed': speed, 'niah': niah, 'frequency': frequency}


@torch.no_grad()
def main(argv):
    argv = argv or ['--help']
    runs = [Run(name)
            for name in itertools.takewhile(lambda x: not x.startswith('-'), argv)]
    modules = {run.module for run in runs}

    # flags: those of eval.py, and of the models
    parser = argparse.ArgumentParser(usage='eval.py RUN [RUN ...] [flags]', allow_abbrev=False)
    parser.error = lambda message: sys.exit(f'eval.py: {message}')
    if not runs and '--help' not in argv:
        parser.error('runs come before flags: eval.py RUN [RUN ...] [flags], or eval.py --help')
    train.add_flags(parser, EvalConfig)
    for module in modules:
        if hasattr(module, 'EvalConfig'):
            train.add_flags(parser, module.EvalConfig)
    args = train.parse_flags(parser, argv[len(runs):])

    # the task: of eval.py, or of a model, for its runs alone
    tasks = dict(TASKS)
    if len(modules) == 1:
        tasks.update(getattr(runs[0].module, 'TASKS', {}))
    if args.task not in tasks:
        parser.error(f'--task {args.task}: these runs together have '
                     f'{", ".join(tasks)}; datastore is for TRIME alone, ranks for RPT')

    # the work
    args.device = train.hardware(args.device)
    train.precision(args.device, 'fp32')                            # after training in a notebook
    with train.short_errors('eval.py', 'shorter --lengths, a smaller --data or --device cpu'):
        for run in runs:
            run.prepare(args)
            if run.text != runs[0].text:
                parser.error(f'different texts, {runs[0].text} and {run.text}: use --data')
        if runs[0].corpus.tab >= 0:
            tasks['report'] = pairs
            if args.task not in ('report', 'pairs', 'generate', 'speed'):
                parser.error(f'--task {args.task} scores all tokens, of pairs only targets are '
                             'predicted: --task pairs')
        result = tasks[args.task](runs, args)
        if args.json:
            train.write(args.json, json.dumps(result, indent=1))


if __name__ == '__main__':
    train.keep_printing()
    main(sys.argv[1:])
