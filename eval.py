"""
Evaluates trained models: any mixture of them in one table, on the same tokens.

    $ python eval.py out/trime out/rpt out/drt      the table, examples, loss.png, samples
    $ python eval.py out/drt --task examples        where retrieval helped most
    $ python eval.py out/trime --help               all tasks and flags, those of its model too

A run is a folder (its best.pt, else its ckpt.pt) or a .pt file. The table has a row for each way of
using memory or retrieval: on (as trained), shuffled (others in place of those retrieved) and off;
RPT and DRT with --retrieve-from also corpus (chunks of that corpus only) and both.
Each token of a document but its first is scored once, given all tokens before it, in fp32. loss:
nats per token; ppl: e^loss; bits/byte: nats / ln 2 / bytes of the text, comparable between
tokenizers; word ppl: e^(nats / words); <512 and so on: loss of tokens 1 to 511 of a document, 512
to 1,023, ...; gain over off: loss of off - loss of this way, ± its standard error over documents.
"""
import os
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')     # before torch: its idle threads sleep
import argparse, codecs, hashlib, importlib, itertools, json, math, sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import data, train

POSITIONS = {'<512': 512, '<1,024': 1024, '<2,048': 2048, '<4,096': 4096, '4,096+': math.inf}
REREAD = 500_000                # tokens that the traces of a page read again, about twice as many


@dataclass
class EvalConfig:
    task: str = ''              # table, examples, generate, niah, speed or sweep, ranks
    data: str = ''              # another corpus than the one of training
    retrieve_from: str = ''     # table, examples, generate: retrieve from this corpus's train split
    split: Literal['train', 'val', 'test'] = 'val'              # which part of the corpus
    prompt: str = ''            # examples, generate: a text in place of the split
    context: str = ''           # a file whose text comes before the prompt
    max_tokens: int = 200       # generate: new tokens, at most
    temperature: float = 0.8    # generate: 0 takes the likeliest token
    top_k: int = 0              # generate: from so many likeliest tokens; 0: from all
    top_p: float = 0.95         # generate: from the likeliest tokens with this sum of probability
    seed: int = 0               # generate, niah, ranks: of the random draws
    lengths: str = '1k,4k,16k'  # niah, speed: tokens of the text; k is 2^10, m is 2^20
    depths: str = '0,25,50,75,100'                              # niah: places of the needles, in %
    json: str = ''              # a file for every number that the screen shows
    html: str = ''              # examples: a page that shows a document and what was retrieved
    device: Literal['auto', 'cuda', 'cpu', 'mps'] = 'auto'      # auto: cuda if present, else cpu


class Run:
    """
    A trained model, by its folder or .pt file. documents: of the split, tokens (n,) int64, n > 1;
    ways: model.ways() after prepare_eval; scores: see score; text: facts, equal in all runs
    """

    def __init__(self, name):
        self.name, self.path, self.scores = name, Path(name), {}
        if self.path.is_dir():
            self.path /= 'best.pt' if (self.path / 'best.pt').exists() else 'ckpt.pt'
        try:
            self.checkpoint = torch.load(self.path, map_location='cpu', weights_only=True)
            name = self.checkpoint['model_name']
            assert name in train.MODELS, name
            self.module = importlib.import_module(name)
            config = getattr(self.module, name.upper() + 'Config')(**self.checkpoint['config'])
            assert self.checkpoint['config'].keys() == vars(config).keys(), 'of another version'
            self.model = getattr(self.module, name.upper())(config).eval()
            self.model.load_state_dict(self.checkpoint['model'])
            self.tokenizer = data.Tokenizer.from_dict(self.checkpoint['tokenizer'])
        except Exception as e:                      # a broken or hostile file can raise anything
            raise SystemExit(f'{self.path} is no checkpoint of this train.py: {e!r:.200}')

    def open_text(self, args, device, quiet=False):
        """Sets corpus, split, documents and text. SystemExit where there is no such split."""
        name = args.data or self.checkpoint['data']
        self.corpus = data.load(name, self.tokenizer, quiet=quiet)
        split = getattr(self.corpus, args.split)
        if split is None:
            raise SystemExit(f'{name} has no split {args.split}')
        if not args.data and self.corpus.fingerprint != self.checkpoint['corpus']:
            print(f'{self.name} was trained on another version of {name}', file=sys.stderr)
        ids = torch.tensor(split.tokens.astype(np.int64), device=device)
        documents = ids.tensor_split(split.offsets[1:-1].tolist())
        self.split, self.documents = split, [tokens for tokens in documents if len(tokens) > 1]
        self.text = dict(data=self.corpus.name, text=self.corpus.fingerprint.split('-')[0],
                         split=args.split, bytes=split.n_bytes, words=split.n_words)

    def open_index(self, corpus, split):
        """model.corpus: corpus.train.tokens and model.index of them, which is kept on disk"""
        if corpus.fingerprint == self.corpus.fingerprint and split == 'train':
            raise SystemExit('--split train with --retrieve-from: each text would find itself')
        about = hashlib.sha256(self.path.read_bytes()).hexdigest(), corpus.fingerprint
        if len(corpus.train.tokens) < 2 * self.module.batches(self.model.config)['chunk']:
            raise SystemExit(f'--retrieve-from {corpus.name}: its text is shorter than two chunks')
        file = self.path.with_name(f'{self.path.stem}-index-{corpus.folder.name}.pt')
        if not file.exists():
            tokens = torch.from_numpy(corpus.train.tokens.astype(np.int64))
            index = self.model.index(tokens.to(self.documents[0]), data.progress)
            train.write(file, dict(about=about, index=index))
        try:
            saved = torch.load(file, map_location='cpu', mmap=True, weights_only=True)
            assert saved['about'] == about
        except Exception:
            raise SystemExit(f'{file} is damaged, or of another checkpoint or text: delete it')
        self.model.corpus = corpus.train.tokens, *saved['index']

    def encode(self, text):
        return torch.tensor(self.tokenizer.encode(text).tolist()).to(self.documents[0])

    def set_way(self, way):
        for attribute, value in self.ways[way].items():
            setattr(self.model, attribute, value)

    def log_p(self, tokens):
        """log P of every token of a document but the first: tokens (n,) int64 -> (n - 1,) fp32"""
        parts, state, size = [], None, self.model.PIECE
        for piece, targets in zip(tokens[:-1].split(size), tokens[1:].split(size)):
            log_probs, state = self.model.stream(piece[None], state)
            parts.append(log_probs[0].gather(1, targets[:, None])[:, 0])
        return torch.cat(parts)

    def score(self, ways):
        """Fills scores[way]: for each document, log_p (n - 1,) fp64. -> scores"""
        for way in [way for way in ways if way not in self.scores]:
            self.set_way(way)
            documents = data.progress(self.documents, f'{self.name}, {way}')
            self.scores[way] = [self.log_p(x).cpu().double().numpy() for x in documents]
        return self.scores


def load(path, device='cpu'):
    """For a notebook: a run's folder or .pt file -> (model in eval mode, tokenizer)"""
    run = Run(path)
    return run.model.to(device), run.tokenizer


def by_position(log_p, edges):
    """Mean losses of tokens edges[i] to edges[i + 1] - 1 of a document; None where there is none"""
    nats = -np.concatenate(log_p)                                   # (tokens,)
    bins = np.digitize(np.concatenate([1 + np.arange(len(x)) for x in log_p]), edges)
    parts = [nats[bins == i] for i in range(1, len(edges))]
    return [part.mean() if len(part) else None for part in parts]


def metrics(log_p, log_p_off, split):
    """
    The columns of a row, from log P of the tokens but the first of each document. The error of the
    gain is that of a sample of N documents, as a document's tokens depend on each other: with D_d
    the sum of the differences of its n_d tokens

        gain = Σ D_d / Σ n_d        error = sqrt(N / (N - 1) Σ (D_d - gain n_d)²) / Σ n_d
    """
    n, N = np.array([len(x) for x in log_p]), len(log_p)
    total = -sum(x.sum() for x in log_p)
    loss = total / n.sum()
    row = {'loss': loss, 'ppl': math.exp(loss), 'bits/byte': total / math.log(2) / split.n_bytes,
           'word ppl': math.exp(min(700, total / max(1, split.n_words)))}
    row.update(zip(POSITIONS, by_position(log_p, [1, *POSITIONS.values()])))
    D = np.array([(a - b).sum() for a, b in zip(log_p, log_p_off)])
    gain = D.sum() / n.sum()
    error = math.sqrt(N / (N - 1) * ((D - gain * n) ** 2).sum()) / n.sum() if N > 1 else None
    return {**row, 'gain over off': gain, '±': error}


def print_table(rows):
    """rows: dicts with the same keys, the header; text is printed to the left, numbers right"""
    columns = []
    for name, first in rows[0].items():
        cells = [name] + [f'{x:#.5g}' if isinstance(x, float) else f'{x:,}' if isinstance(x, int)
                          else x or '-' for x in (row[name] for row in rows)]
        width, justify = max(map(len, cells)), str.ljust if isinstance(first, str) else str.rjust
        columns.append([justify(x, width) for x in cells])
    print('', *(' '.join(line).rstrip() for line in zip(*columns)), sep='\n')


def table(runs, args):
    """Prints a row for each run and way. -> all its numbers"""
    first = runs[0]
    rows = [{'run': run.name[-32:], 'way': way,
             'params': sum(p.numel() for p in run.model.parameters()),
             'trained on': run.checkpoint['tokens'],
             **metrics(log_p, run.scores['off'], run.split)}
            for run in runs for way, log_p in run.score(run.ways).items()]
    scored = sum(map(len, first.scores['off']))
    head = dict(first.text, documents=len(first.documents), scored=scored)
    print_table([head])
    print_table(rows)
    if any(run.tokenizer.to_dict() != first.tokenizer.to_dict() for run in runs):
        print('The tokenizers differ: only bits/byte and word ppl are comparable between them.')
    return dict(head, rows=rows)


def retrieved(run, tokens, t, n):
    """The n largest weights of what predicts token t + 1; ago: of tokens, None: of another text"""
    return [dict(weight=float(weight), start=a, end=b,
                 ago=t + 2 - b if where is tokens else None,
                 text=run.tokenizer.decode(where[a:b].tolist()))
            for weight, where, a, b in run.model.trace(tokens, t)[:n]]


def best_tokens(run, n):
    """
    The token of each document that gains most over off, of the n documents where it gains most.
    Yields tokens of the document, t where token t + 1 is that one, what to print
    """
    scores, text = run.score((run.on, 'off')), lambda ids: run.tokenizer.decode(ids.tolist())
    gains = [on - off for on, off in zip(scores[run.on], scores['off'])]
    for d in sorted(range(len(gains)), key=lambda d: -gains[d].max())[:n]:
        tokens, t = run.documents[d], int(gains[d].argmax())
        yield tokens, t, dict(document=d, token=t + 1, gain=round(float(gains[d][t]), 6),
                              before=text(tokens[:t + 1][-32:]), text=text(tokens[t + 1:][:16]))


def examples(runs, args, n=3):
    """What is retrieved where it helps most, or at the end of --prompt: the 4 largest weights"""
    runs, result = [run for run in runs if 'on' in run.ways], []
    if args.html:
        write_page(runs, args)
    for run in runs:
        prompt = run.encode(args.prompt)
        its_end = [(prompt, len(prompt) - 1, dict(text=args.prompt[-300:]))]
        for tokens, t, row in its_end if args.prompt else best_tokens(run, n):
            run.set_way(run.on)
            row = dict(run=run.name, **row, retrieved=retrieved(run, tokens, t, 4))
            result.append(row)
            print('', *(f'{key:9} {row[key]!r}' for key in [*row][:-1]), sep='\n')
            print_table([dict(x, text=repr(x['text'][-100:])) for x in row['retrieved']]
                        or [dict(retrieved='nothing')])
    return result


def token_texts(tokenizer, ids):
    """The text of each token; a character of several tokens is that of the last one."""
    if tokenizer.name == 'word':
        return [tokenizer.decode(i) + ' ' for i in ids]
    decode = codecs.getincrementaldecoder('utf-8')('replace').decode
    return [decode(tokenizer.tokens[i].encode('latin-1')) for i in ids]


def trace_document(run, tokens):
    """
    What assets/trace.html shows of tokens (n,): losses on and off, and of the chunks where they
    differ most, for better or worse, the trace of the token where they differ most. Each trace
    reads all tokens before it again: there are at most REREAD / n.
    """
    n, losses, traces = len(tokens), {}, {}
    for name, way in (('off', 'off'), ('on', run.on)):
        run.set_way(way)
        losses[name] = np.append(0, -run.log_p(tokens).cpu().double().numpy())      # (n,)
    gain = losses['off'] - losses['on']
    size = run.module.batches(run.model.config).get('chunk', 1)     # without chunks: each token
    starts = np.arange(0, n, size)
    order = np.argsort(-abs(np.add.reduceat(gain, starts)), kind='stable')
    for start in data.progress(starts[order][:max(4, REREAD // n)].tolist(), f'{run.name}: traces'):
        i = max(1, start + int(abs(gain[start:start + size]).argmax()))
        traces[i] = retrieved(run, tokens, i - 1, 32)
    return dict(run=run.name, model=run.module.__name__, size=size, traces=traces,
                tokens=token_texts(run.tokenizer, tokens.tolist()),
                on=losses['on'].round(3).tolist(), off=losses['off'].round(3).tolist())


def write_page(runs, args):
    """assets/trace.html with the traces of --prompt, or of the document nearest to 8,192 tokens"""
    template = Path(__file__).with_name('assets') / 'trace.html'
    documents = [[run.encode(args.prompt)] if args.prompt else run.documents for run in runs]
    chosen = [min(texts, key=lambda tokens: abs(len(tokens) - 8192)) for texts in documents]
    if min(map(len, chosen), default=0) < 2:
        raise SystemExit('eval.py: --html needs a run that retrieves, and a text of two tokens')
    pages = json.dumps([trace_document(run, tokens) for run, tokens in zip(runs, chosen)])
    pages = pages.replace('<', '\\u003c')                   # no text ends the page's script
    train.write(args.html, template.read_text('utf-8').replace('{{runs}}', pages))
    print(args.html)


def generate(model, tokenizer, prompt='', n=200, temperature=0.8, top_k=0, top_p=0.95, seed=0):
    """
    -> text that continues the prompt, to <|endoftext|> or n tokens; drawn from P^(1/temperature)
    (0: the likeliest), of top_k tokens (0: all) the fewest with top_p (Holtzman et al. 2020).
    """
    new, generator = [], torch.Generator().manual_seed(seed)
    prompt = tokenizer.encode(prompt).tolist() or [tokenizer.eot or 0]
    prompt = torch.tensor([prompt], device=next(model.parameters()).device)
    pending, state = prompt[:, -1:], model.read(prompt[:, :-1])
    for _ in data.progress(range(n), 'generating'):
        log_probs, state = model.stream(pending, state)
        last = log_probs[0, -1].cpu().double() / max(temperature, 1e-9)         # (V,)
        p, tokens = last.softmax(-1).topk(min(top_k, len(last)) if top_k > 0 else len(last))
        p[1:] *= (p.cumsum(-1) < top_p * p.sum())[:-1]  # the sum of those before a token
        token = tokens[torch.multinomial(p, 1, generator=generator)]
        if token.item() == tokenizer.eot:
            break
        new.append(token.item())
        pending = token[None].to(pending.device)
    return tokenizer.decode(new)


def repeated(ids, n=8):
    """The share of the n-grams of ids (a list) that occur earlier in it."""
    grams = [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0


def samples(runs, args):
    """Continues --prompt, or 1,024 tokens amid the longest document, with and without memory"""
    result, sampling = [], (args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    for run in runs:
        ids = max(run.documents, key=len).tolist()
        before, after = ids[:len(ids) // 2][-1024:], ids[len(ids) // 2:][:args.max_tokens]
        prompt = args.prompt or run.tokenizer.decode(before)
        texts = {} if args.prompt else {'text': run.tokenizer.decode(after)}
        print(f'\n{run.name} continues\n\n{prompt[-300:]}')
        for way in [way for way in (run.on, 'off') if way in run.ways]:
            run.set_way(way)
            began = time.time()
            texts[way] = generate(run.model, run.tokenizer, prompt, *sampling)
            rate = len(run.tokenizer.encode(texts[way])) / (time.time() - began)
            print(f'{way}: {rate:.0f} tokens/s, with the prompt')
        for name, text in texts.items():
            share = repeated(run.tokenizer.encode(text).tolist())
            print(f'\n[{name}]\n{text}\n[{share:.0%} of the 8-grams are repeated]')
        result.append(dict(run=run.name, prompt=prompt, texts=texts))
    return result


def draw(path, size, plot):
    """A figure of matplotlib, where it is installed: plot(figure) draws it"""
    try:
        from matplotlib.figure import Figure            # pyplot would need a screen
    except ImportError:
        return print('no picture: matplotlib is not installed', file=sys.stderr)
    figure = Figure(figsize=size, constrained_layout=True)
    plot(figure)
    figure.savefig(path, dpi=110)
    print(f'\n{path}')


def plot_losses(runs, figure):
    """
    Training and validation loss, from log.jsonl; loss by position in the document, from the table
    (DRT, Figure 3b, c), a thin line at block_size
    """
    curves, positions = figure.subplots(1, 2)
    style = {'on': '-', 'shuffled': ':', 'off': '--', 'corpus': '-.', 'both': '-.'}
    longest = max(len(tokens) for run in runs for tokens in run.documents)
    edges = 2 ** np.arange(1 + (longest - 1).bit_length())
    for i, run in enumerate(runs):
        path = run.path.with_name('log.jsonl')
        log = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        tokens = [x['tokens'] for x in log]
        curves.plot(tokens, [x['loss'] for x in log], f'C{i}', alpha=0.3)
        curves.plot(tokens, [x.get('val_loss', math.nan) for x in log], f'C{i}o', label=run.name)
        positions.axvline(run.model.config.block_size, color=f'C{i}', linewidth=0.5)
        for way, log_p in run.scores.items():
            positions.plot(edges[:-1] * 2 ** 0.5, by_position(log_p, edges), f'C{i}{style[way]}')
    curves.set(xlabel='tokens of training', ylabel='training loss; dots: validation')
    curves.legend()
    positions.set(xlabel='position in the document', xscale='log',
                  ylabel='loss; solid: on, dotted: shuffled, dashed: off')


def plot_needles(rows, depths, figure):
    """A heat map of right answers"""
    axes = figure.subplots()
    axes.imshow([[row[depth] for depth in depths] for row in rows], vmin=0, vmax=1, aspect='auto')
    axes.set_xticks(range(len(depths)), depths)
    axes.set_yticks(range(len(rows)), [f'{row["run"]}, {row["tokens"]}' for row in rows])
    axes.set(xlabel='depth of the needle', title='right answers: yellow all, blue none')


def clock(tensor):
    """The time when a GPU has computed all that it was given"""
    tensor.sum().item()
    return time.perf_counter()


def reading(runs, args, steps=32):
    """
    Microseconds for a token at the end of random texts (DRT, Table 3): in model.read of the second
    half, and in the steps of model.stream after it. peak: the most memory of the process so far
    """
    import resource                                     # not on Windows
    rows, unit = [], 2 ** 20 if sys.platform == 'darwin' else 2 ** 10
    for run, (name, n) in itertools.product(runs, args.lengths.items()):
        text = torch.randint(run.model.config.vocab_size, (1, n)).to(run.documents[0])
        first, second = text.tensor_split(2, dim=1)
        state, times = run.model.read(first), [clock(text)]
        state = run.model.read(second, state)
        times.append(clock(text))
        for token in text[:, :steps].unbind(1):
            _, state = run.model.stream(token[None], state)
        read, step = np.diff([*times, clock(text)]) * 1e6
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
        if text.is_cuda:
            peak = torch.cuda.max_memory_allocated() // 2 ** 20
        rows.append({'run': run.name, 'text': name, 'read µs': read / second.numel(),
                     'step µs': step / steps, 'peak MB': peak})
    print_table(rows)
    return rows


def speed(runs, args, rounds=5):
    """
    Seconds (median; the runs interleaved) and MACs of a forward and a backward pass on random
    tokens, of RPT without its ranking loss, and their ratios to the first run. MACs: half the FLOPs
    that torch counts, attention by its definition, as the fused kernel of a CPU is not counted.
    Before it the table of `reading`
    """
    from torch.utils.flop_counter import FlopCounterMode            # imports Triton
    batches, rows, read, device = [], [], reading(runs, args), runs[0].documents[0].device
    _, autocast = train.precision(device, 'auto')

    def seconds(model, batch):
        began = clock(batch.tokens)
        with torch.enable_grad(), autocast():
            loss, _ = model(batch, 1.0)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return clock(batch.tokens) - began

    for run in runs:
        c, model = run.model.config, run.model.train()
        tokens = torch.randint(c.vocab_size, (c.micro_batch, c.block_size), device=device)
        batches.append((model, data.Batch(tokens, tokens.roll(-1, 1), 0 * tokens, seed=0)))
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            seconds(*batches[-1])
        macs = counter.get_total_flops() // 2 // tokens.numel()
        rows.append({'run': run.name, 'tokens': tokens.numel(), 'MACs/token': macs})
    times = [[seconds(*batch) for batch in batches] for _ in range(rounds)]
    for row, t in zip(rows, np.median(times, axis=0).tolist()):
        row['s/token'] = t / row['tokens']
        row['time ratio'] = row['s/token'] / rows[0]['s/token']
        row['MACs ratio'] = row['MACs/token'] / rows[0]['MACs/token']
    print_table(rows)
    return dict(training=rows, reading=read)


def answers(run, needles, n_chunks, depths, rng):
    """
    Hides a needle at each depth (with 2 hops, the second ones anywhere) of a text of whole chunks,
    reads it once, and continues it by the question of each needle -> whether all tokens of the
    answer, drawn greedily, are right: a bool for each depth
    """
    model, c, start = run.model, needles.chunk, rng.integers(len(run.split.tokens))
    ids = np.take(run.split.tokens, start + np.arange(n_chunks * c), mode='wrap').astype(int)
    chains, slots = needles.chains(rng, len(depths), ids), [int(d * (n_chunks - 3)) for d in depths]
    if len({*slots}) < len(slots):
        raise SystemExit(f'--depths: two needles share a chunk of {n_chunks}')
    free = [i for i in rng.permutation(n_chunks - 2)[:99] if i not in slots]
    more = zip(free, chains[:, 1:]) if needles.hops > 1 else []
    needles.hide(rng, ids, [*zip(slots, chains[:, :2]), *more])
    text, end = torch.from_numpy(ids).to(run.documents[0]).tensor_split([-needles.hops * c])
    read, right = model.read(text[None]), []
    for names in chains:
        question, opens, answer, _ = (torch.from_numpy(x).to(end) for x in needles.sentence(names))
        end.view(-1, c)[:, -len(question):] = question
        greedy, pending, state = [], torch.cat([end, opens]), read
        for _ in answer:
            log_probs, state = model.stream(pending[None], state)
            pending = log_probs[0, -1:].argmax(-1)
            greedy.append(pending.item())
        right.append(greedy == answer.tolist())
    return right


def niah(runs, args):
    """
    Needles in a haystack (DRT, Table 2): right answers by length of the text and depth of the
    needle, 10 texts of each length up to 64k tokens, 4 up to 1m, 1 beyond. Also drawn: niah.png
    """
    rows, depths = [], [f'{d:.0%}' for d in args.depths]
    for run, (name, length) in itertools.product(runs, args.lengths.items()):
        chunk = run.module.batches(run.model.config).get('chunk', 32)
        hops = run.corpus.hops or 1
        needles = data.Needles(run.split, run.tokenizer, hops, 8 * chunk, 1, 0, chunk=chunk)
        began, n = time.time(), 10 if length <= 2 ** 16 else 4 if length <= 2 ** 20 else 1
        right = [answers(run, needles, length // chunk, args.depths,
                         np.random.default_rng([args.seed, length, i]))
                 for i in data.progress(range(n), f'{run.name}, {name}')]       # (n, depths)
        rows.append({'run': run.name[-32:], 'tokens': name, 'needles': np.size(right),
                     'right': np.mean(right), **dict(zip(depths, np.mean(right, axis=0))),
                     's/needle': (time.time() - began) / np.size(right)})
    print_table(rows)
    size = 7, 1 + 0.4 * len(rows)
    draw(runs[0].path.with_name('niah.png'), size, lambda x: plot_needles(rows, depths, x))
    return rows


def report(runs, args):
    """The table, examples, loss.png and samples"""
    result = dict(table=table(runs, args), examples=examples(runs, args, n=1))
    draw(runs[0].path.with_name('loss.png'), (12, 4.2), lambda figure: plot_losses(runs, figure))
    return dict(result, samples=samples(runs, args))


TASKS = {'': report, 'table': table, 'examples': examples, 'generate': samples,
         'speed': speed, 'niah': niah}


def parse(argv, runs):
    """-> args, the function of the task. SystemExit with one line for a bad flag"""
    modules = list(dict.fromkeys(run.module for run in runs))
    parser = argparse.ArgumentParser(usage='python eval.py RUN [RUN ...] [flags]',
                                     allow_abbrev=False, conflict_handler='resolve')
    parser.error = lambda message: sys.exit(f'eval.py: {message}')
    for module in (sys.modules[__name__], *modules):
        if hasattr(module, 'EvalConfig'):
            train.add_flags(parser, module.EvalConfig)
    if not (runs or {'-h', '--help'} & {*argv}):
        parser.error(parser.usage)
    args = train.parse_flags(parser, argv)
    tasks = {**TASKS, **(modules[0].TASKS if len(modules) == 1 else {})}
    if args.task not in tasks:
        parser.error(f'--task {args.task}: these runs together have {", ".join(tasks).strip(", ")}')
    if args.html and args.task not in ('', 'examples'):
        parser.error('--html is for --task examples')
    if args.retrieve_from and args.task not in ('', 'table', 'examples', 'generate'):
        parser.error('--retrieve-from is for --task table, examples and generate')
    for path in filter(None, (args.json, args.html)):
        if Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK):
            parser.error(f'{path} cannot be written')
    try:
        unit = {'k': 2 ** 10, 'm': 2 ** 20}
        args.lengths = {x: int(x[:-1]) * unit[x[-1]] if x[-1:] in unit else int(x)
                        for x in args.lengths.split(',')}
        args.depths = [int(x) / 100 for x in args.depths.split(',')]
        assert 0 <= min(args.depths) and max(args.depths) <= 1 and min(args.lengths.values()) >= 512
    except (ValueError, AssertionError):
        parser.error('--lengths 1k,16k,2m (from 512), --depths 0,50,100 (%): see --help')
    try:
        args.prompt = (args.context and Path(args.context).read_text('utf-8')) + args.prompt
    except (OSError, UnicodeDecodeError) as e:
        parser.error(f'--context {args.context} cannot be read: {e}')
    return args, tasks[args.task]


@torch.no_grad()
def main(argv=None):
    argv = argv or sys.argv[1:]
    runs = [Run(name) for name in itertools.takewhile(lambda x: x[:1] != '-', argv)]
    args, task = parse(argv[len(runs):], runs)
    device = train.hardware(args.device)
    torch.set_float32_matmul_precision('highest')       # train.py may have set another one
    try:
        for run in runs:
            run.model.to(device)
            run.open_text(args, device, quiet=run is not runs[0])
            if run.text != runs[0].text:
                raise SystemExit(f'eval.py: different texts, {runs[0].text} and {run.text}: '
                                 '--data chooses one')
            name = args.retrieve_from
            external = data.load(name, run.tokenizer) if name else run.corpus
            if hasattr(run.model, 'prepare_eval'):
                run.model.prepare_eval(run.corpus, external, args, run.path, data.progress)
            if name and hasattr(run.model, 'index') and 'on' in run.model.ways():
                run.open_index(external, args.split)
            run.ways = run.model.ways()
            run.set_way(next(iter(run.ways)))               # as trained
            run.on = 'both' if 'both' in run.ways else 'on'     # of examples, generate
        result = task(runs, args)
        if args.json:
            train.write(args.json, json.dumps(result, indent=1))
    except OSError as e:                                # a full disk
        raise SystemExit(f'eval.py: {e}')


if __name__ == '__main__':
    main()
