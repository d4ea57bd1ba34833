"""
Looks at trained models: perplexity with the memory on, off and shuffled, what was remembered, generated text, plots.

    $ python eval.py out/trime                                  the standard table, and where the memory helped most
    $ python eval.py out/trime out/vanilla --split test         several runs in one table, their curves in one plot
    $ python eval.py out/trime --task generate --prompt 'def '  text, as it is being written

In a notebook:

    import eval
    model, tokenizer = eval.load('out/trime')
    tokens = torch.tensor([tokenizer.encode('import os, sys').tolist()])
    model.log_probs(tokens)                                     # (1, t, V), memory included
    print(''.join(eval.generate(model, tokenizer, 'import ')))

What the table shows. `tokens`: how many were scored, each once, with at least T - stride tokens before it where the text has
them. `loss`: nats per token. `ppl`: e^loss. `bits/byte`: total nats / ln 2 / bytes of the text; comparable between
tokenizers. `word ppl`: e^(total nats / whitespace-separated words). Memory `shuffled`: each stretch of text is given the memories of
another one, far away: what a model gains from any memory at all, whatever it holds. τ divides the similarities (Eq. 6); it is chosen
on the validation split, so a row with a tuned τ is a fair figure on the test split only. All of this is in fp32.
"""
import argparse
import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch

import data
import train
from trime import joint_log_prob

TAUS = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5]     # temperatures tried on the validation split


# ----------------------------------------------------------------------------------------------------------------------
# loading

def read(path, device='cpu'):
    """A checkpoint's dict. path: a run's folder (its best.pt, else its ckpt.pt) or a .pt file."""
    path = Path(path)
    if path.is_dir():
        path = next((path / name for name in ('best.pt', 'ckpt.pt') if (path / name).exists()), path / 'best.pt')
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        checkpoint['model_name'], checkpoint['tokenizer']
        return checkpoint
    except FileNotFoundError:
        raise SystemExit(f'{path} does not exist. `python train.py` makes out/trime with a checkpoint in it.')
    except Exception as e:
        raise SystemExit(f'{path} is no checkpoint of this house: {" ".join(str(e).split())[:200]}')


def build(checkpoint, device='cpu'):
    """The model of a checkpoint, in eval mode."""
    module = importlib.import_module(checkpoint['model_name'])
    name = checkpoint['model_name'].upper()
    model = getattr(module, name)(getattr(module, name + 'Config')(**checkpoint['config']))
    model.load_state_dict(checkpoint['model'])
    return model.to(device).eval()


def load(path, device='cpu'):
    """-> (model, tokenizer) of a run's folder or a .pt file, ready for log_probs, stream and generate."""
    checkpoint = read(path, device)
    model = build(checkpoint, device)
    tuned = Path(path) / 'tuned.json'
    if tuned.exists():                                                      # what an earlier evaluation of it found on val
        tuned = json.loads(tuned.read_text())
        model.tau = tuned['tau'] if tuned['step'] == checkpoint['step'] else model.tau
    return model, data.Tokenizer.from_dict(checkpoint['tokenizer'])


# ----------------------------------------------------------------------------------------------------------------------
# text

def generate(model, tokenizer, prompt='', max_tokens=200, temperature=0.8, seed=0):
    """
    Yields text, piece by piece, the prompt first, until the model ends it or there are max_tokens new tokens.
    temperature 0 takes the likeliest token each time.
    """
    ids = tokenizer.encode(prompt).tolist()
    start = ids or [tokenizer.eot] if tokenizer.eot is not None else ids or tokenizer.encode('\n').tolist()    # a new text
    generator, shown = torch.Generator().manual_seed(seed), tokenizer.decode(ids)
    yield shown
    log_probs, state = model.stream(torch.tensor([start], device=next(model.parameters()).device))
    for _ in range(max_tokens):
        last = log_probs[0, -1].float().cpu()                               # (V,)
        if temperature > 0:
            token = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)
        else:
            token = last.argmax(-1, keepdim=True)
        if token.item() == tokenizer.eot:
            break
        ids.append(token.item())
        text = tokenizer.decode(ids)
        if not text.endswith('\ufffd'):                                     # the bytes of a character come one by one
            yield text[len(shown):]
            shown = text
        log_probs, state = model.stream(token[None].to(next(model.parameters()).device), state)
    yield tokenizer.decode(ids)[len(shown):]


# ----------------------------------------------------------------------------------------------------------------------
# TRIME: every token's probability with the memory on, off and shuffled

def windows(n, T, stride):
    """
    How a text of n tokens is read: (start, first new position, end) of each window, which holds the inputs start..end-1
    and scores their next tokens from `first` on. Each of the n - 1 next tokens is scored exactly once.
    """
    starts = range(0, max(1, n - 1 - T + stride), stride)
    return [(s, s if s == 0 else s + T - stride, min(s + T, n - 1)) for s in starts]


def trime_inputs(model, tokens, chosen):
    """Encodes some windows. -> for each: f, g (n, C) of its inputs and the token that follows each of them (n,)."""
    device, T = model.embedding.weight.device, model.config.block_size
    block = np.zeros((len(chosen), T), dtype=np.int64)
    for row, (s, _, e) in zip(block, chosen):
        row[:e - s] = tokens[s:e]
    f, g, _ = model.encode(torch.from_numpy(block).to(device))
    nexts = [torch.from_numpy(tokens[s + 1:e + 1].astype(np.int64)).to(device) for s, _, e in chosen]
    return [(f[i, :e - s].float(), g[i, :e - s].float(), y) for i, ((s, _, e), y) in enumerate(zip(chosen, nexts))]


def similarities(query, key, first):
    """sim(g_i, g_j) for the queries at positions first.. of a window, Eq. 5; -inf unless j < i. (n - first, n_keys)"""
    i = first + torch.arange(len(query), device=query.device)[:, None]
    j = torch.arange(len(key), device=query.device)[None, :]
    return (query @ key.T / query.size(-1) ** 0.5).masked_fill(j >= i, float('-inf'))


@torch.no_grad()
def trime_scores(model, tokens, taus, quiet=False):
    """
    log P of every token of a text but the first, in nats: a dict of arrays (n - 1,).
    'off': the words alone, Eq. 1. ('on', τ): with local memory, Eq. 6. ('shuffled', τ): with another window's memories,
    the farthest of its batch; the same positions j < i of it may be used. nan where the text is too short for that.
    """
    n, T = len(tokens), model.config.block_size
    all_windows, E = windows(n, T, model.stride), model.embedding.weight.float()
    half = -(-len(all_windows) // 2)                                        # each batch has windows from both halves of the text
    order = [i for pair in zip(range(half), range(half, 2 * half)) for i in pair if i < len(all_windows)]
    scores = {key: np.zeros(n - 1, dtype=np.float32)
              for key in ['off'] + [(kind, tau) for kind in ('on', 'shuffled') for tau in taus]}
    for a in data.progress(range(0, len(order), 8), 'scoring', quiet=quiet):
        chosen = [all_windows[i] for i in order[max(0, min(a, len(order) - 2)):a + 8]]     # two at least: a partner is needed
        inputs = trime_inputs(model, tokens, chosen)
        for (s, new, e), (f, g, y) in zip(chosen, inputs):
            first = new - s
            apart, partner = max((abs(s - other[0]), b) for b, other in enumerate(chosen))
            logits = f[first:] @ E.T                                        # (Q, V)
            log_words, log_w = logits.logsumexp(-1), logits.gather(1, y[first:, None])[:, 0]
            scores['off'][new:e] = (log_w - log_words).cpu()
            for kind, (_, key, said) in (('on', (f, g, y)), ('shuffled', inputs[partner])):
                sim = similarities(g[first:], key, first)                   # (Q, M)
                says_w = said[None, :] == y[first:, None]
                for tau in taus:
                    score = joint_log_prob(log_words, log_w, sim, says_w, tau).cpu()
                    scores[kind, tau][new:e] = score if kind == 'on' or apart >= T else np.nan
    return scores


def trime_table(model, corpus, split, tau):
    """Rows of the standard table, the scores behind them, and τ: tuned on val where none is given."""
    if tau is None:
        if corpus.val is None:
            raise SystemExit(f'{corpus.name} has no validation split to tune τ on: give --tau 1')
        tokens = np.asarray(corpus.val.tokens)
        scores = trime_scores(model, tokens[:65_536], TAUS, quiet=False)    # the beginning of val is enough for one number
        tau = max(TAUS, key=lambda t: scores['on', t].mean())
    tokens = np.asarray(split.tokens)
    scores = trime_scores(model, tokens, sorted({1.0, tau}))
    rows = [('off', scores['off']), ('on, τ = 1', scores['on', 1.0])]
    rows += [(f'on, τ = {tau:g}', scores['on', tau])] if tau != 1 else []
    shuffled = scores['shuffled', tau]
    return rows + ([('shuffled', shuffled)] if not np.isnan(shuffled).any() else []), scores, tau


@torch.no_grad()
def trime_helped(model, tokenizer, split, scores, tau, how_many=3, remembered=3):
    """
    The tokens that the memory helped most: dicts with position, context, token, probability off and on, and the memories
    that weighed most among those that were followed by the same token: their contexts and their share of the probability.
    At most one token of each stretch of T, and of each token.
    """
    tokens, T = np.asarray(split.tokens), model.config.block_size
    gain = scores['on', tau] - scores['off']
    stretches, words, found = set(), set(), []
    by_start = {new: (s, new, e) for s, new, e in windows(len(tokens), T, model.stride)}
    firsts = np.array(sorted(by_start))
    show = lambda end, n=12: tokenizer.decode(tokens[max(0, end - n):end])
    for t in np.argsort(-gain, kind='stable').tolist():                     # scores[t] is about token t + 1
        if t // T in stretches or tokens[t + 1] in words:
            continue
        stretches.add(t // T), words.add(tokens[t + 1])
        s, _, e = by_start[firsts[np.searchsorted(firsts, t, side='right') - 1]]
        (f, g, y), = trime_inputs(model, tokens, [(s, s, e)])
        i = t - s
        sim = similarities(g[i:i + 1], g, i)[0] / tau                       # (n,)
        everything = torch.cat([f[i] @ model.embedding.weight.float().T, sim]).logsumexp(0)
        share = (sim - everything).exp() * (y == y[i])
        best = share.topk(min(remembered, int((share > 0).sum()))).indices.tolist()
        found.append(dict(position=t + 1, document=int(split.doc_of(t + 1)), context=show(t + 1), token=show(t + 2, 1),
                          p_off=float(np.exp(scores['off'][t])), p_on=float(np.exp(scores['on', tau][t])),
                          memories=[dict(context=show(s + j + 1), tokens_ago=i - j, share=share[j].item()) for j in best]))
        if len(found) == how_many:
            break
    return found


# ----------------------------------------------------------------------------------------------------------------------
# the standard table

def figures(log_p, split):
    """Loss, perplexity and so on of a split from log P (nats) of each of its tokens but the first."""
    total = -float(log_p.astype(np.float64).sum())
    return dict(tokens=len(log_p), loss=total / len(log_p), ppl=math.exp(total / len(log_p)),
                bits_per_byte=total / math.log(2) / split.n_bytes, word_ppl=math.exp(min(700, total / max(1, split.n_words))))


def table(paths, args, device):
    """The standard table of one or several checkpoints; a dict of all numbers."""
    result = dict(split=args.split, runs={})
    for path in paths:
        checkpoint = read(path, device)
        model, tokenizer = build(checkpoint, device), data.Tokenizer.from_dict(checkpoint['tokenizer'])
        corpus = data.load(args.data or checkpoint['data'], tokenizer)
        split = getattr(corpus, args.split)
        if split is None:
            raise SystemExit(f'{corpus.name} has no split {args.split}')
        if not args.data and corpus.fingerprint != checkpoint['corpus']:
            print(f'{path} was trained on another version of {corpus.name}: what it was trained on may be in this split', file=sys.stderr)
        if not 0 <= args.stride <= model.config.block_size:
            raise SystemExit(f'--stride {args.stride} does not lie between 1 and T = {model.config.block_size}')
        model.stride = args.stride or model.stride
        rows, scores, tau = trime_table(model, corpus, split, args.tau)
        if Path(path).is_dir() and args.tau is None and not args.data and not args.stride:
            (Path(path) / 'tuned.json').write_text(json.dumps(dict(tau=tau, step=checkpoint['step'])))
        helped = trime_helped(model, tokenizer, split, scores, tau)
        result['runs'][str(path)] = dict(
            corpus=corpus.name, bytes=split.n_bytes, words=split.n_words, step=checkpoint['step'], parameters=sum(p.numel() for p in model.parameters()), tau=tau, stride=model.stride,
            block_size=model.config.block_size, memory={name: figures(log_p, split) for name, log_p in rows}, helped=helped)

    width = max(len(path) for path in result['runs'])
    for text in sorted({f'{run["corpus"]}: {run["bytes"]:,} bytes, {run["words"]:,} words' for run in result['runs'].values()}):
        print(f'\n{args.split} split of {text}')
    print()
    print(f'{"run":{width}}  {"step":>6} {"memory":12} {"tokens":>9} {"loss":>7} {"ppl":>8} {"bits/byte":>10} {"word ppl":>10}')
    for path, run in result['runs'].items():
        for name, x in run['memory'].items():
            print(f'{path:{width}}  {run["step"]:6d} {name:12} {x["tokens"]:9,} {x["loss"]:7.4f} {x["ppl"]:8.2f} '
                  f'{x["bits_per_byte"]:10.4f} {x["word_ppl"]:10.1f}')
    for path, run in result['runs'].items():
        print(f'\nwhere the memory helped {path} most')
        for x in run['helped']:
            print(f'\n  token {x["position"]:,}, in document {x["document"]}: P = {x["p_off"]:.2g} without memory, '
                  f'{x["p_on"]:.2g} with it\n    {x["context"]!r} -> {x["token"]!r}\n  it remembered')
            for m in x['memories']:
                print(f'    {m["share"]:6.1%}  {m["tokens_ago"]:5,} tokens ago  {m["context"]!r} -> {x["token"]!r}')
    return result


def plot(runs, path):
    """Training and validation loss of one or several runs against tokens, from their log.jsonl. Needs matplotlib."""
    try:
        import matplotlib
        matplotlib.use('Agg')
        import matplotlib.pyplot as plt
    except ImportError:
        print('no plot: matplotlib is not installed (pip install matplotlib)', file=sys.stderr)
        return False
    figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    for color, run in zip(plt.rcParams['axes.prop_cycle'].by_key()['color'] * len(runs), runs):
        log = [json.loads(line) for line in (Path(run) / 'log.jsonl').read_text().splitlines()]
        axes.plot([x['tokens'] for x in log], [x['loss'] for x in log], color=color, alpha=0.3, linewidth=1)
        val = [(x['tokens'], x['val_loss']) for x in log if 'val_loss' in x]
        if val:
            axes.plot(*zip(*val), color=color, marker='o', markersize=3, label=f'{run}: validation {val[-1][1]:.3f}')
    axes.set(xlabel='training tokens', ylabel='loss, nats per token (pale: training)')
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def main():
    parser = argparse.ArgumentParser(description='Evaluates one or several checkpoints.', allow_abbrev=False)
    parser.add_argument('checkpoints', nargs='+', metavar='CKPT', help="a run's folder, or a .pt file")
    parser.add_argument('--task', default='table', choices=('table', 'generate'), help='(default: table)')
    parser.add_argument('--data', default='', help='another corpus than the one of training')
    parser.add_argument('--split', default='val', choices=('train', 'val', 'test'), help='(default: val)')
    parser.add_argument('--stride', type=int, default=0, help='tokens scored per window; default: as trained, T/2')
    parser.add_argument('--tau', type=float, default=None, help='temperature of the memory, Eq. 6; default: tuned on val')
    parser.add_argument('--device', default='auto', choices=('auto', 'cuda', 'cpu', 'mps'), help='(default: auto)')
    parser.add_argument('--json', default='', metavar='FILE', help='write every number that the screen shows')
    parser.add_argument('--prompt', default='', help='generate: the text to go on from')
    parser.add_argument('--max-tokens', type=int, default=200, help='generate: at most so many new tokens (default: 200)')
    parser.add_argument('--temperature', type=float, default=0.8, help='generate: 0 takes the likeliest token (default: 0.8)')
    parser.add_argument('--seed', type=int, default=0, help='generate: of the sampling (default: 0)')
    args = parser.parse_args()
    if args.tau is not None and args.tau <= 0:
        raise SystemExit(f'--tau {args.tau} must be positive')
    device = train.hardware(args.device)
    if args.task == 'generate':
        for path in args.checkpoints:
            model, tokenizer = load(path, device)
            for text in generate(model, tokenizer, args.prompt, args.max_tokens, args.temperature, args.seed):
                print(text, end='', flush=True)
            print()
        return
    result = table(args.checkpoints, args, device)
    runs = [path for path in args.checkpoints if (Path(path) / 'log.jsonl').exists()]
    if len(runs) > 1 and plot(runs, Path(runs[0]) / 'compare.png'):
        print(f'\ntheir curves: {Path(runs[0]) / "compare.png"}')
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == '__main__':
    main()
