"""
Evaluates trained models: any mixture of them in one table, on the same text.

    $ python eval.py out/trime out/rpt out/drt      the table, examples, loss.png, samples
    $ python eval.py out/drt --task examples        what is retrieved where it helps most
    $ python eval.py out/trime --help               all tasks and flags, those of its model too

A run is a folder, of which best.pt is used, else ckpt.pt, or it is a .pt file. Each token of a
document but its first is scored once, in fp32; the document is read from its beginning.
"""
import os       # before torch: waiting threads spin for some 10 µs (GNU OpenMP), then sleep
os.environ |= {'OMP_WAIT_POLICY': 'PASSIVE', 'GOMP_SPINCOUNT': '1000'} | os.environ
import argparse, functools, importlib, itertools, json, math, sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import data, train

POSITIONS = {'<512': 512, '<1,024': 1024, '<2,048': 2048, '<4,096': 4096, '4,096+': sys.maxsize}


@dataclass
class EvalConfig:
    task: str = ''              # table, examples, generate, niah, speed; rpt: ranks; '': a report
    data: str = ''              # another corpus than the one of training
    retrieve_from: str = ''     # trime, drt: retrieve from the train split of this corpus
    split: Literal['train', 'val', 'test'] = 'val'              # which part of the corpus
    prompt: str = ''            # examples, generate: a text in place of the split's
    max_tokens: int = 200       # generate: new tokens, at most
    temperature: float = 0.8    # generate: 0 takes the likeliest token
    top_p: float = 0.95         # generate: from the likeliest tokens with this sum of probability
    seed: int = 0               # generate, niah, ranks: of the random draws
    lengths: str = '1k,4k,16k'  # niah: tokens of the text; k is 2^10, m is 2^20
    depths: str = '0,25,50,75,100'                              # niah: places of the needles, in %
    json: str = ''              # a file for the numbers and texts of the task
    device: Literal['auto', 'cuda', 'cpu', 'mps'] = 'auto'      # auto: cuda if present, else cpu


class Run:
    """A trained model, by its folder or .pt file, and the text that it is evaluated on"""
    def __init__(self, name):
        self.name, self.path = name, Path(name)
        if self.path.is_dir():
            self.path /= 'best.pt' if (self.path / 'best.pt').exists() else 'ckpt.pt'
        try:
            checkpoint = torch.load(self.path, map_location='cpu', weights_only=True)
            model = checkpoint['model_name']
            assert model in train.MODELS, model
            module = importlib.import_module(model)
            config = getattr(module, model.upper() + 'Config')(**checkpoint['config'])
            assert checkpoint['config'].keys() == vars(config).keys(), 'of another version'
            self.model = getattr(module, model.upper())(config).eval()
            self.model.load_state_dict(checkpoint['model'])
            self.tokenizer = data.Tokenizer(**checkpoint['tokenizer'])
            self.module, self.checkpoint = module, checkpoint
        except Exception as e:                      # a broken or hostile file can raise anything
            raise SystemExit(f'{self.path} is not a checkpoint of this version: {e!r:.200}')

    def prepare(self, args):
        """documents: each tokens (n,) int64; ways: name -> attributes of the model to set"""
        name = args.data or self.checkpoint['data']
        corpus = self.corpus = data.load(name, self.tokenizer, quiet=True)
        split = self.split = getattr(corpus, args.split)
        if split is None: raise SystemExit(f'{name} has no split {args.split}')
        if not args.data and corpus.fingerprint != self.checkpoint['corpus']:
            print(f'{self.name} was trained on another version of {name}', file=sys.stderr)
        tokens = torch.tensor(split.tokens.astype(int), device=args.device)
        documents = tokens.tensor_split(split.offsets[1:-1].tolist())
        self.documents = [tokens for tokens in documents if len(tokens) > 1]
        if not self.documents: raise SystemExit(f'{name}: no {args.split} document has two tokens')
        self.text = dict(data=corpus.name, text=corpus.fingerprint[:8], split=args.split,
                         bytes=split.n_bytes, words=split.n_words)
        self.model.to(args.device)
        if hasattr(self.model, 'prepare_eval'):
            external = data.load(args.retrieve_from or name, self.tokenizer, quiet=True)
            self.model.prepare_eval(corpus, external, args, self.path, data.progress)
        self.ways = self.model.ways()
        self.on = next(way for way in ('both', 'on', 'off') if way in self.ways)

    def log_p(self, tokens):
        """log P of every token of a document but the first: tokens (n,) int64 -> (n - 1,) fp32"""
        parts, state, size = [], None, self.model.PIECE
        for piece, targets in zip(tokens[:-1].split(size), tokens[1:].split(size)):
            log_probs, state = self.model.stream(piece[None], state)
            parts.append(log_probs[0].gather(1, targets[:, None])[:, 0])
        return torch.cat(parts)

    @functools.cache
    def score(self, way):
        """log_p of each document, (n - 1,) fp64; computed once for each way"""
        vars(self.model).update(self.ways[way])
        documents = data.progress(self.documents, f'{self.name}, {way}')
        return [self.log_p(tokens).cpu().double().numpy() for tokens in documents]


def load(path, device='cpu'):
    """For a notebook: a run's folder or .pt file -> (model in eval mode, tokenizer)"""
    run = Run(path)
    return run.model.to(device), run.tokenizer


def by_position(log_p, edges):
    """Mean losses of tokens edges[i] to edges[i + 1] - 1 of a document; None where there is none"""
    parts = [np.concatenate([x[first - 1:stop - 1] for x in log_p])         # x[0] is of token 1
             for first, stop in itertools.pairwise(edges)]
    return [-part.mean() if len(part) else None for part in parts]


def metrics(log_p, log_p_off, split):
    """The columns of a row; bytes and words are all the text's. Tokens of a document depend on each
    other, so N documents are the sample. D_d: sum of log_p - log_p_off over the n_d tokens of d
        gain = Σ D_d / Σ n_d        error = sqrt(N / (N - 1) Σ (D_d - gain n_d)²) / Σ n_d"""
    N, n = len(log_p), np.array([len(x) for x in log_p])                    # n (N,)
    nats, total = -np.concatenate(log_p).sum(), n.sum()
    loss = nats / total
    row = {'loss': loss, 'ppl': np.exp(loss), 'bits/byte': nats / math.log(2) / split.n_bytes,
           'word ppl': np.exp(min(700, nats / split.n_words))}
    row.update(zip(POSITIONS, by_position(log_p, [1, *POSITIONS.values()])))
    D = np.array([(x - off).sum() for x, off in zip(log_p, log_p_off)])     # (N,)
    gain = D.sum() / total
    error = math.sqrt(N / (N - 1) * ((D - gain * n) ** 2).sum()) / total if N > 1 else None
    return {**row, 'gain over off': gain, '±': error}


def cell(x):
    if isinstance(x, float): return f'{x:,.0f}' if 1e4 <= x < 1e9 else f'{x:#.5g}'
    return f'{x:,}' if isinstance(x, int) else x or '-'


def print_table(rows):
    """Prints dicts with the same keys, the header; text left, numbers right. -> rows"""
    lines = [list(rows[0])] + [[cell(x) for x in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    sides = ['<' if isinstance(x, str) else '>' for x in rows[0].values()]
    print()
    for line in lines:
        print(' '.join(f'{x:{side}{n}}' for x, side, n in zip(line, sides, widths)).rstrip())
    return rows


def table(runs, args):
    """Prints a row for each run and way. -> all its numbers"""
    rows = [{'run': run.name, 'way': way,
             'params': sum(p.numel() for p in run.model.parameters()),
             'trained on': run.checkpoint['tokens'],
             **metrics(run.score(way), run.score('off'), run.split)}
            for run in runs for way in run.ways]
    scored = [len(log_p) for log_p in runs[0].score('off')]
    text = dict(runs[0].text, documents=len(scored), scored=sum(scored))
    print_table([text])
    print_table(rows)
    print('shuffled: wrong memory; corpus, both: --retrieve-from; off: none; ±: standard error')
    return dict(text, rows=rows)


def show(run, tokens, t, **facts):
    """Prints what is retrieved to predict token t + 1, 4 at most. -> the same as a dict"""
    decode, rows = run.tokenizer.decode, []
    vars(run.model).update(run.ways[run.on])
    facts['before'] = decode(tokens[:t + 1][-32:])
    facts['text'] = decode(tokens[t + 1:][:16])
    for weight, where, start, end in run.model.trace(tokens, t)[:4]:
        ago = t + 2 - end if where is tokens else None          # tokens; None: in another text
        text = decode(where[start:end])[-100:]
        rows.append(dict(weight=weight, start=start, end=end, ago=ago, text=text))
    print(f'\n{run.name} retrieves this to predict the first token of text:')
    print(*(f'{key:9} {value!r}' for key, value in facts.items()), sep='\n')
    print_table([dict(row, text=repr(row['text'])) for row in rows] or [{'retrieved': 'nothing'}])
    return dict(run=run.name, **facts, retrieved=rows)


def examples(runs, args, n=3):
    """What is retrieved at the end of --prompt, or in n documents where a token gains most"""
    result = []
    for run in runs:
        if run.on == 'off': print(f'\n{run.name} retrieves nothing')
        elif len(prompt := run.tokenizer.encode(args.prompt)):
            prompt = run.documents[0].new_tensor(prompt)
            result.append(show(run, prompt, len(prompt) - 1))
        else:
            gains = map(np.subtract, run.score(run.on), run.score('off'))
            for d, gain in sorted(enumerate(gains), key=lambda x: -x[1].max())[:n]:
                t, most = int(gain.argmax()), round(float(gain.max()), 4)
                result.append(show(run, run.documents[d], t, document=d, token=t + 1, gain=most))
    return result


def generate(model, tokenizer, prompt='', n=200, temperature=0.8, top_p=0.95, seed=0):
    """-> text that continues the prompt, to <|endoftext|> or n tokens; drawn from P^(1/temperature)
    (0: the likeliest), among the fewest tokens that have top_p of it (Holtzman et al. 2020)."""
    new, generator = [], torch.Generator().manual_seed(seed)
    prompt = tokenizer.encode(prompt).tolist() or [tokenizer.eot or 0]
    prompt = torch.tensor([prompt], device=next(model.parameters()).device)
    pending, state = prompt[:, -1:], model.read(prompt[:, :-1])
    for _ in data.progress(range(n), 'generating'):
        log_probs, state = model.stream(pending, state)
        scores = log_probs[0, -1].cpu().double() / max(temperature, 1e-9)       # (V,)
        p, tokens = scores.softmax(-1).sort(descending=True)
        p[1:] *= p.cumsum(0)[:-1] < top_p                       # those before it are enough
        token = tokens[torch.multinomial(p, 1, generator=generator)].item()
        if token == tokenizer.eot: break
        new.append(token)
        pending = pending.new_tensor([[token]])
    return tokenizer.decode(new)


def repeated(ids):
    """The share of the 8-grams of ids, a list, that occur earlier in it"""
    grams = list(zip(*(ids[i:] for i in range(8))))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def samples(runs, args):
    """Continues --prompt, or 1,024 tokens up to the middle of the longest document; on and off."""
    rows, sampling = [], (args.max_tokens, args.temperature, args.top_p, args.seed)
    for run in runs:
        ids = max(run.documents, key=len).tolist()
        before, after = ids[:len(ids) // 2][-1024:], ids[len(ids) // 2:][:args.max_tokens]
        prompt = args.prompt or run.tokenizer.decode(before).strip('\ufffd')     # cut characters
        texts = {} if args.prompt else {'the document': run.tokenizer.decode(after)}
        for way in dict.fromkeys((run.on, 'off')):
            vars(run.model).update(run.ways[way])
            texts[way] = generate(run.model, run.tokenizer, prompt, *sampling)
        print(f'\n{run.name} continues\n\n{prompt[-300:]}')
        for way, text in texts.items():
            share = repeated(run.tokenizer.encode(text.replace('\ufffd', '')).tolist())
            print(f'\n[{way}: {share:.0%} of the 8-grams are repeated]\n{text}')
            rows.append(dict(run=run.name, way=way, prompt=prompt, text=text, repeated=share))
    return rows


def draw(runs, path):
    """Plots log.jsonl's training losses and the table's losses by position (DRT, Fig. 3b, c)."""
    try:
        from matplotlib.figure import Figure            # pyplot would need a screen
    except ImportError:
        return print('no picture: matplotlib is not installed', file=sys.stderr)
    figure = Figure(figsize=(13, 5), layout='constrained')
    curves, positions = figure.subplots(1, 2)
    styles, edges = {'on': '-', 'shuffled': ':', 'off': '--'}, 2 ** np.arange(32)
    for i, run in enumerate(runs):
        log = run.path.with_name('log.jsonl')
        lines = log.read_text().splitlines() if log.exists() else []
        log = [json.loads(line) for line in lines if line.endswith('}')]        # the rest is torn
        tokens = [x['tokens'] for x in log]
        curves.plot(tokens, [x['loss'] for x in log], f'C{i}', alpha=0.3)
        curves.plot(tokens, [x.get('val_loss') for x in log], f'C{i}o')
        positions.axvline(run.model.config.block_size, color=f'C{i}', linewidth=0.5)
        for way in run.ways:
            style, losses = styles.get(way, '-.'), by_position(run.score(way), edges)
            positions.plot(edges[:-1] * 2 ** 0.5, losses, f'C{i}{style}', label=f'{run.name} {way}')
    curves.set(xlabel='tokens of training, by log.jsonl', ylabel='training loss; dots: validation')
    positions.set(xlabel='position; thin line: block_size', xscale='log', ylabel='loss')
    positions.legend()
    try: figure.savefig(path, dpi=110)
    except OSError as e: return print(f'no picture: {e}', file=sys.stderr)
    print(f'\n{path}')


def speed(runs, args):
    """Seconds (median of interleaved runs) and MACs of forward and backward, per token; of RPT
    without the ranking loss. MACs are half of torch's FLOPs; they are counted with SDPA and GCA in
    plain PyTorch, because torch does not count all fused kernels."""
    from torch.utils.flop_counter import FlopCounterMode            # imports Triton
    _, autocast = train.precision(args.device, 'auto')
    def seconds(run, kernel='auto'):
        run.model.kernel, c, began = kernel, run.model.config, time.perf_counter()
        tokens = torch.randint(c.vocab_size, (c.micro_batch, c.block_size), device=args.device)
        with torch.enable_grad(), autocast():
            loss, _ = run.model.train()(data.Batch(tokens, tokens.roll(-1, 1), 0 * tokens, 0), 1.0)
        loss.backward()
        loss.item()                                                 # waits for a GPU
        run.model.zero_grad()
        return (time.perf_counter() - began) / tokens.numel()
    macs = []
    for run in runs:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            seconds(run, 'torch')
        c = run.model.config
        macs.append(counter.get_total_flops() // 2 // (c.micro_batch * c.block_size))
    times = np.median([[seconds(run) for run in runs] for _ in range(5)], axis=0)
    return print_table([
        {'run': run.name, 'MACs/token': n, 's/token': t, 'MACs ratio': n / macs[0],
         'time ratio': t / times[0]} for run, n, t in zip(runs, macs, times)])


def answers(run, needles, n_chunks, slots, seed):
    """Hides a needle in each slot (second hops elsewhere) of a text of whole chunks -> for each
    question, whether greedy decoding gives the answer: each of its tokens is the likeliest"""
    c, hops, rng = needles.chunk, needles.hops, np.random.default_rng(seed)
    start = rng.integers(len(run.split.tokens))
    ids = np.take(run.split.tokens, start + np.arange(n_chunks * c), mode='wrap').astype(int)
    chains = needles.chains(rng, len(slots), ids)           # (needles, hops + 1, 4) words of names
    free = [i for i in rng.permutation(n_chunks - 2) if i not in slots]
    for hop, chunks in enumerate([slots, free][:hops]):
        needles.hide(rng, ids, zip(chunks, chains[:, hop:hop + 2]))
    text, end = run.documents[0].new_tensor(ids).tensor_split([-hops * c])
    state, right = run.model.read(text[None]), []
    for names in chains:
        question, opens, answer, _ = map(end.new_tensor, needles.sentence(names))
        end.view(hops, c)[:, -len(question):] = question
        log_probs, _ = run.model.stream(torch.cat([end, opens, answer[:-1]])[None], state)
        right.append(torch.equal(log_probs[0, -len(answer):].argmax(-1), answer))
    return right


def niah(runs, args):
    """Needles in a haystack (DRT, Table 2): right answers by length of the text and depth in it"""
    rows, units = [], {'k': 2 ** 10, 'm': 2 ** 20}
    try:
        lengths = {x: int(x.rstrip('km')) * units.get(x[-1:], 1) for x in args.lengths.split(',')}
        depths = {f'{int(x)}%': range(101).index(int(x)) for x in args.depths.split(',')}
    except ValueError:                                  # of int, or a depth above 100
        raise SystemExit('eval.py: --lengths are like 1k,16k,2m, --depths like 0,50,100')
    for run, (name, length) in itertools.product(runs, lengths.items()):
        chunk = run.module.batches(run.model.config).get('chunk', 32)
        hops, n_chunks = run.corpus.hops or 1, length // chunk
        needles = data.Needles(run.split, run.tokenizer, hops, 8 * chunk, 1, 0, chunk)
        slots = [depth * (n_chunks - 3) // 100 for depth in depths.values()]
        if len(set(slots)) < len(slots) or n_chunks - 2 < hops * len(slots):
            raise SystemExit(f'--lengths {name}, --depths {args.depths}: no chunk for each needle')
        began, n_texts = time.time(), max(1, min(10, 2 ** 22 // length))
        right = np.array([answers(run, needles, n_chunks, slots, [args.seed, length, i])
                          for i in data.progress(range(n_texts), f'{run.name}, {name}')])
        rows.append({'run': run.name, 'tokens': name, 'needles': right.size,    # (texts, depths)
                     'right': right.mean(), **dict(zip(depths, right.mean(axis=0))),
                     's/needle': (time.time() - began) / right.size})
    return print_table(rows)


def report(runs, args):
    """The table, examples, loss.png and samples"""
    result = dict(table=table(runs, args), examples=examples(runs, args, n=1))
    draw(runs, runs[0].path.with_name('loss.png'))
    return dict(result, samples=samples(runs, args))


TASKS = {'': report, 'table': table, 'examples': examples, 'generate': samples,
         'speed': speed, 'niah': niah}


@torch.no_grad()
def main(argv):
    runs = [Run(name) for name in itertools.takewhile(lambda x: x[:1] != '-', argv)]
    modules = list(dict.fromkeys(run.module for run in runs))
    tasks = TASKS | (getattr(modules[0], 'TASKS', {}) if len(modules) == 1 else {})
    parser = argparse.ArgumentParser(usage='eval.py RUN [RUN ...] [flags]', allow_abbrev=False)
    parser.error = lambda message: sys.exit(f'eval.py: {message}')
    for Config in (EvalConfig, *(x.EvalConfig for x in modules if hasattr(x, 'EvalConfig'))):
        train.add_flags(parser, Config)
    if not runs and not {'-h', '--help'} & {*argv}: parser.error(f'usage: {parser.usage}')
    args = train.parse_flags(parser, argv[len(runs):])
    args.device = train.hardware(args.device)
    train.precision(args.device, 'fp32')                            # after training in a notebook
    if args.task not in tasks:
        parser.error(f'--task {args.task}: these runs together have {", ".join(tasks).strip(", ")}')
    try:
        file = Path(os.path.realpath(args.json))               # checked now, not after the work
        if args.json and (file.exists() > file.is_file() or not os.access(file.parent, os.W_OK)):
            parser.error(f'--json {args.json!r} cannot be written')
        for run in runs:
            if args.retrieve_from and not hasattr(run.model, 'prepare_eval'):
                parser.error(f'{run.name} retrieves from its own text: no --retrieve-from')
            run.prepare(args)
            if run.text != runs[0].text:
                parser.error(f'different texts, {runs[0].text} and {run.text}: use --data')
        result = tasks[args.task](runs, args)
        if args.json: train.write(file, json.dumps(result, indent=1))
    except (OSError, KeyboardInterrupt) as e:
        parser.error(str(e) or 'stopped')


if __name__ == '__main__':
    sys.stdout.reconfigure(errors='replace')            # a console may lack some characters
    main(sys.argv[1:])
