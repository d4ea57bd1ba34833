"""
Looks at trained models: perplexity with memory or retrieval on, off and shuffled, what was remembered, generated text, plots.

    $ python eval.py out/trime                                  the standard table, and where the memory helped most
    $ python eval.py out/trime out/vanilla --split test         several runs in one table, their curves in one plot
    $ python eval.py out/trime --task generate --prompt 'def '  text, as it is being written
    $ python eval.py out/trime --task neighbors --prompt 'import '      what it remembers there, with the sources

TRIME's memories, for any checkpoint of trime.py, the plain language model included (--formula linear is its default: continuous
cache and kNN-LM). External memory makes a datastore of the training split in the run's folder, once.

    $ python eval.py out/ext --memory local,long,ext --split test       one row of the paper's Tables 2 to 4
    $ python eval.py out/vanilla out/local out/long out/ext --memory all        all rows: Tables 7 and 10
    $ python eval.py out/ext --data my_books/ --datastore-from my_books/        another domain, no training: Table 5
    $ python eval.py out/long out/vanilla --task sweep          perplexity by size of the long memory: Figure 3
    $ python eval.py out/ext out/vanilla --task retrieval       is the next token among the K that were retrieved: Table 13
    $ python eval.py out/ext out/vanilla --task frequency --memory all          perplexity by frequency: Table 14
    $ python eval.py out/ext --task speed                       tokens per second, and what the search misses

RPT, DRT and their baselines (--retriever none, --groups 0), which have nothing to tune:

    $ python eval.py out/rpt out/xl                             perplexity at 1/8, 1, 2 and 4 times the training length; RPT's: of whole documents too
    $ python eval.py out/drt --task trace                       what was fetched where it helped most
    $ python eval.py out/rpt out/xl --task ranks                Precision, Recall, nDCG beside BM25's: Table 3, Figures 4 to 6

What the table shows. `tokens`: how many were scored, each once, with at least T - stride tokens before it where the text has
them. `loss`: nats per token. `ppl`: e^loss. `bits/byte`: total nats / ln 2 / bytes of the text; comparable between
tokenizers. `word ppl`: e^(total nats / whitespace-separated words). `off`: the words alone, Eq. 1. `shuffled`: the same similarities, but each
memory says the word of another one, far away: what is gained from any memory at all, whatever it holds. Temperatures, weights and
sizes are tuned on the first 65,536 tokens of the validation split, from one pass over them, so its own rows flatter a little: --split test is the
fair figure. All of this is in fp32. For DRT `random` is the control: chunks found by a random vector, read with its weights; for RPT
`shuffled`: the places of the own neighbors in the text of another document (`-` where some sequence has no other one beside it).
"""
import argparse
import hashlib
import importlib
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import data
import train
import rpt
from trime import METRIC, Datastore, Recipe, masses, mix

TAUS = [0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.045, 0.065, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0]   # tried on val
LAMBDAS = [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9]     # weights, Eq. 9
TUNE = 65_536                                                               # tokens of val that are used for it, at most
EVERY = 10 ** 9                                                             # the size of a memory that counts whole
TESTING = {'none': ('local',), 'local': ('local',), 'long': ('local', 'long'), 'ext': ('local', 'long', 'ext')}     # paper Table 1
ALL = [(), ('local',), ('local', 'long'), ('ext',), ('local', 'ext'), ('local', 'long', 'ext')]


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


def load(path, device='cpu', checkpoint=None):
    """-> (model, tokenizer) of a run's folder or a .pt file, ready for log_probs, stream and generate. checkpoint: if it is already read"""
    checkpoint = checkpoint or read(path, device)
    module, name = importlib.import_module(checkpoint['model_name']), checkpoint['model_name'].upper()
    model = getattr(module, name)(getattr(module, name + 'Config')(**checkpoint['config']))
    try:
        model.load_state_dict(checkpoint['model'])
    except RuntimeError as e:
        raise SystemExit(f'{path} has weights of another version of this house: train it anew ({" ".join(str(e).split())[:200]})')
    found = read_tuned(path, checkpoint).get('local')
    if found and not found['linear']:                                       # what an earlier evaluation of it found on val
        model.recipe = Recipe(('local',), found['tau'])
    return model.to(device).eval(), data.Tokenizer.from_dict(checkpoint['tokenizer'])


def read_tuned(path, checkpoint):
    """What earlier evaluations of just this checkpoint found on val: combination of memories, as local,ext -> parameters."""
    file = Path(path) / 'tuned.json'
    there = json.loads(file.read_text()) if file.exists() else None
    return there['memory'] if there and there['weights'] == weights_hash(checkpoint) else {}


def save_tuned(e, args):
    """Writes what was tuned beside the checkpoint, for generate and neighbors."""
    if Path(e.path).is_dir() and args.tau is None and not (args.data or args.stride or args.datastore_from):
        found = {','.join(c): dict(x, linear=e.linear, p_ext=args.p_ext) for c, x in e.found.items() if c}
        content = dict(weights=weights_hash(e.checkpoint), memory={**read_tuned(e.path, e.checkpoint), **found})
        train.write(Path(e.path) / 'tuned.json', lambda f: f.write(json.dumps(content, indent=1).encode()))


def equip(path, args, device):
    """
    A model with the memories that --memory asks for, as they were tuned.
    -> model, tokenizer, size (memory -> how many of it count), tokens that begin a text
    """
    checkpoint = read(path, device)
    model, tokenizer = load(path, device, checkpoint)
    wanted = args.memory[0] if args.memory else 'local'
    names = tuple(name for name in ('local', 'long', 'ext') if name in wanted.split(','))
    x, size = read_tuned(path, checkpoint).get(','.join(names)), {'local': EVERY, 'long': 0}
    if x:
        model.recipe, size = recipe_of(names, x['linear'], x, x['p_ext'])
        model.long, model.n_neighbors = size['long'] or 0, size['ext'] or 0
    elif args.memory == ['none']:
        model.recipe = Recipe()
    elif args.memory:
        folder = path if Path(path).is_dir() else Path(path).parent            # what was tuned is kept there, for its ckpt.pt
        raise SystemExit(f'{path}: these memories are not tuned yet. First: python eval.py {folder} --memory {wanted}; then with {folder}')
    if checkpoint['model_name'] == 'drt':
        model.retriever, model.offload = args.retriever or model.retriever, args.offload
    if checkpoint['model_name'] == 'rpt':
        model.n_neighbors = args.n_neighbors or model.n_neighbors
    if 'ext' in names:
        model.store = open_store(path, checkpoint, model, tokenizer, args)
    return model, tokenizer, size, [tokenizer.eot] if tokenizer.eot is not None else []


# ----------------------------------------------------------------------------------------------------------------------
# text

def generate(model, tokenizer, prompt='', max_tokens=200, temperature=0.8, seed=0):
    """
    Yields text, piece by piece, the prompt first, until the model ends it or there are max_tokens new tokens.
    temperature 0 takes the likeliest token each time.
    """
    ids = tokenizer.encode(prompt).tolist()
    start = ids or ([tokenizer.eot] if tokenizer.eot is not None else tokenizer.encode('\n').tolist())         # a new text
    generator, shown, device, state = torch.Generator().manual_seed(seed), tokenizer.decode(ids), next(model.parameters()).device, None
    yield shown
    for piece in torch.tensor([start], device=device).split(1024, dim=1):   # log_probs of all are never held
        log_probs, state = model.stream(piece, state)
    for _ in range(max_tokens):
        last = log_probs[0, -1].float().cpu()                               # (V,)
        token = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator) if temperature > 0 else last.argmax(-1, keepdim=True)
        if token.item() == tokenizer.eot:
            break
        ids.append(token.item())
        text = tokenizer.decode(ids)
        if not text.endswith('\ufffd'):                                     # the bytes of a character come one by one
            yield text[len(shown):]
            shown = text
        log_probs, state = model.stream(token[None].to(device), state)
    yield tokenizer.decode(ids)[len(shown):]


# ----------------------------------------------------------------------------------------------------------------------
# TRIME: the probability of every token of a text, with any memories, by any recipe, from one pass

def windows(n, T, stride):
    """
    How a text of n tokens is read: (start, first new position, end) of each window, which holds the inputs start..end-1
    and scores their next tokens from `first` on. Each of the n - 1 next tokens is scored exactly once.
    """
    starts = range(0, max(1, n - 1 - T + stride), stride)
    return [(s, s if s == 0 else s + T - stride, min(s + T, n - 1)) for s in starts]


def trime_inputs(model, tokens, chosen):
    """Encodes some windows. -> for each: f, g (n, C) of its inputs and the token that follows each of them (n,)."""
    device, T, inputs = next(model.parameters()).device, model.config.block_size, []
    at_once = max(1, 8192 // T)
    for a in range(0, len(chosen), at_once):
        part = chosen[a:a + at_once]
        block = np.zeros((len(part), T), dtype=np.int64)
        for row, (s, _, e) in zip(block, part):
            row[:e - s] = tokens[s:e]
        f, g, _ = model.encode(torch.from_numpy(block).to(device))
        nexts = [torch.from_numpy(tokens[s + 1:e + 1].astype(np.int64)).to(device) for s, _, e in part]
        inputs += [(f[i, :e - s].float(), g[i, :e - s].float(), y) for i, ((s, _, e), y) in enumerate(zip(part, nexts))]
    return inputs


@torch.no_grad()
def trime_entries(model, tokens, start, quiet=False):
    """What a datastore holds of a text, from context `start` on, in pieces: keys g (m, C), and the words that follow (m,)"""
    chosen = [window for window in windows(len(tokens), model.config.block_size, model.stride) if window[2] > start]
    group = max(1, 8192 // model.stride)
    for a in data.progress(range(0, len(chosen), group), 'encoding', quiet=quiet):
        part = chosen[a:a + group]
        new = [(g[max(first, start) - s:], y[max(first, start) - s:]) for (s, first, _), (_, g, y) in zip(part, trime_inputs(model, tokens, part))]
        yield torch.cat([g for g, _ in new]).cpu(), torch.cat([y for _, y in new]).cpu().numpy()


class Stats(NamedTuple):
    """All that the probabilities of the n - 1 next tokens of a text depend on, for any recipe over these temperatures and sizes."""
    log_words: torch.Tensor     # (n - 1,) log of the sum over all words
    log_w: torch.Tensor         # (n - 1,) log of the term of the token that came
    taus: list                  # temperatures, G of them
    sizes: dict                 # memory -> how many of its memories count, S numbers, rising
    masses: dict                # memory -> (3, n - 1, S, G): trime.masses of all; of those that say w; of those that would, shuffled


@torch.no_grad()
def trime_stats(model, split, names, taus, sizes, quiet=False):
    """
    One pass over a split. Each token stands in local or long memory once: in local with its state in the window at hand, in long
    as it was when its own next token was scored. Shuffled: each memory keeps its place and its similarity, and says the word of
    the memory that is half the text (or half the datastore) away.
    """
    tokens, T, C = np.asarray(split.tokens), model.config.block_size, model.config.n_embd
    n, device = len(tokens), next(model.parameters()).device
    words = torch.from_numpy(tokens.astype(np.int64)).to(device)
    past, all_windows = [name for name in names if name in ('local', 'long')], windows(n, T, model.stride)
    log_words, log_w = torch.zeros(n - 1), torch.zeros(n - 1)
    out = {name: torch.zeros(3, n - 1, len(sizes[name]), len(taus)) for name in names}
    longest, group = sizes['long'][-1] if 'long' in names else 0, max(1, 8192 // model.stride)
    scored, base = torch.zeros(0, C, device=device), 0                      # g of the positions from base on

    for a in data.progress(range(0, len(all_windows), group), 'scoring', quiet=quiet):
        chosen = all_windows[a:a + group]
        inputs = trime_inputs(model, tokens, chosen)
        queries = torch.cat([g[new - s:] for (s, new, _), (_, g, _) in zip(chosen, inputs)]).cpu()
        found = {name: model.store.search(queries, sizes[name][-1], METRIC[name]) for name in names if name in METRIC}
        at = 0
        for (s, new, e), (f, g, y) in zip(chosen, inputs):
            Q, w, here = e - new, y[new - s:, None], slice(new, e)
            log_words[here], log_w[here] = (x.cpu() for x in model.embedding.say(f[new - s:], w[:, 0]))
            lo, allowed = max(base, s - longest), None
            if model.config.same_document and longest:                      # Eq. 3: of the document at hand
                lo = min(s, max(lo, int(split.offsets[split.doc_of(np.array([new]))[0]])))
                doc_i, doc_j = (torch.from_numpy(split.doc_of(np.arange(*x))).to(device) for x in ((new, e), (lo, s)))
                allowed = (doc_i[:, None] == doc_j[None, :])[None]
            places = torch.arange(lo, e, device=device)[None]               # instead of the words: so the shuffled ones are known too
            memories = model.memories(g[None, new - s:], g[None], places[:, s - lo:], scored[None, lo - base:s - base], places[:, :s - lo],
                                      past, allowed)
            for name, (sim, place) in memories.items():
                says = words[place[0] + 1] == w, words[(place[0] + 1 + n // 2) % n] == w
                out[name][:, here] = masses(sim[0], says, taus, sizes[name]).cpu()
            for name, (sim, rows) in found.items():
                sim, rows, N = sim[at:at + Q], rows[at:at + Q], len(model.store)
                says = [model.store.said(r) == w.cpu() for r in (rows, (rows + N // 2) % N)]
                out[name][:, here] = masses(sim, says, taus, sizes[name])
            at += Q
            scored = torch.cat([scored, g[new - s:]])
            drop = max(0, len(scored) - longest - T)
            scored, base = scored[drop:], base + drop
    return Stats(log_words, log_w, taus, sizes, out)


def log_p(stats, recipe, size, shuffled=False):
    """log P of every next token, in nats (n - 1,). size: memory -> how many of it count"""
    def memory(names, tau):
        t = stats.taus.index(tau)
        parts = [stats.masses[name][:, :, stats.sizes[name].index(size[name]), t] for name in names]
        everything, good, wrong = torch.stack(parts).logsumexp(0)
        return everything, wrong if shuffled else good
    return mix(stats.log_words, stats.log_w, memory, recipe)


def grid(names, linear, sizes):
    """
    What is tuned for a combination of memories: parameter -> the values to try. linear: continuous cache and kNN-LM, for
    language models that were trained without memory; else Eq. 6, and with ext Eq. 8 and 9.
    """
    ext, past = 'ext' in names, set(names) - {'ext'}
    if linear:
        chosen = {**({'tau_cache': TAUS, 'lambda_cache': LAMBDAS} if past else {}), **({'tau_knn': TAUS, 'lambda_knn': LAMBDAS} if ext else {})}
    else:
        chosen = {**({'tau': TAUS} if names else {}), **({"tau'": TAUS, 'lambda': LAMBDAS} if ext else {})}
    return {**chosen, **({'long': sizes['long']} if 'long' in names else {}), **({'K': sizes['knn' if linear else 'ext']} if ext else {})}


def recipe_of(names, linear, x, p_ext=False):
    """-> the Recipe of some memories with the parameters x, and how many of each memory count"""
    past, size = tuple(name for name in names if name != 'ext'), {'local': EVERY, 'long': x.get('long'), 'ext': x.get('K'), 'knn': x.get('K')}
    if linear:
        mixes = [(past, x['tau_cache'], x['lambda_cache'])] if past else []
        return Recipe((), 1.0, tuple(mixes + ([(('knn',), x['tau_knn'], x['lambda_knn'])] if 'ext' in names else []))), size
    mixes = [(('ext',) if p_ext else tuple(names), x["tau'"], x['lambda'])] if 'ext' in names else []
    return Recipe(tuple(names), x.get('tau', 1.0), tuple(mixes)), size


def tune(stats, names, linear, p_ext=False, **fixed):
    """
    The parameters of the highest mean log P: one after the other, all values of each, until none changes any more; from several
    starts, since few sharp memories and many flat ones are good for different temperatures.
    """
    values = {key: [fixed[key]] if fixed.get(key) else v for key, v in grid(names, linear, stats.sizes).items()}
    score = lambda x: log_p(stats, *recipe_of(names, linear, x, p_ext)).mean().item()
    results = []
    for K in values.get('K', [None])[::2]:
        for own in (0.1, 1.0):                                              # of Eq. 8 and 9
            for shared in (0.8, 3.0) if 'tau' in values and K else (0.8,):  # of Eq. 6
                x = {key: v[-1] if key == 'long' else 0.2 if 'lambda' in key else {'K': K, 'tau': shared}.get(key, own) for key, v in values.items()}
                x = {key: min(values[key], key=lambda v: abs(v - x[key])) for key in x}
                best, before = score(x), None
                while x != before:
                    before = dict(x)
                    for key in values:
                        best, value = max((score({**x, key: value}), value) for value in values[key])
                        x[key] = value
                results.append((best, x))
    return max(results, key=lambda r: r[0])[1]


# ----------------------------------------------------------------------------------------------------------------------
# TRIME: one checkpoint, its memories tuned on the validation split and scored on another

class Evaluation(NamedTuple):
    """What the tables below are made of."""
    path: str
    checkpoint: dict
    model: torch.nn.Module
    tokenizer: data.Tokenizer
    corpus: data.Corpus
    split: data.Split
    linear: bool                # continuous cache and kNN-LM, not Eq. 6
    combinations: list          # tuples of memories
    found: dict                 # combination -> its tuned parameters
    val: Stats                  # of the validation split
    stats: Stats                # of the split


def weights_hash(checkpoint):
    """sha256 of the weights: what a datastore's keys depend on."""
    sha = hashlib.sha256()
    for name, tensor in sorted(checkpoint['model'].items()):
        sha.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def open_store(path, checkpoint, model, tokenizer, args):
    """
    The datastore of a checkpoint and the training split of a corpus, in the run's folder; built, or gone on with, where it is
    not complete. -> Datastore; .source: the corpus's name, the split
    """
    corpus = data.load(args.datastore_from or args.data or checkpoint['data'], tokenizer)
    if args.split == 'train' and corpus.fingerprint == data.load(args.data or checkpoint['data'], tokenizer, quiet=True).fingerprint:
        raise SystemExit('--split train with external memory: the datastore is made of that very split, and each token would find itself')
    weights = weights_hash(checkpoint)
    folder = (Path(path) if Path(path).is_dir() else Path(path).parent) / f'datastore-{corpus.name}-{weights[:8]}-{model.stride}'
    about = dict(weights=weights, corpus=corpus.fingerprint, name=corpus.name, split='train', tokenizer=tokenizer.name,
                 block_size=model.config.block_size, stride=model.stride)
    tokens = np.asarray(corpus.train.tokens)
    try:
        store = Datastore.build(folder, lambda start: trime_entries(model, tokens, start), len(tokens) - 1, model.config.n_embd, about)
    except ValueError as e:
        raise SystemExit(f'datastore: {e}')
    store.source = corpus.name, corpus.train
    return store


def found_of_all(model, split, K, metric):
    """Recall of the datastore's search against an exact one, by number and by softmax mass, for 256 contexts of a split."""
    g = torch.cat([g for g, _ in trime_entries(model, np.asarray(split.tokens[:8192]), 0, quiet=True)])
    return model.store.recall(g[::max(1, len(g) // 256)], K, metric=metric)


def first_tokens(split, n, tokenizer):
    """The first n tokens of a split, or all if there are fewer."""
    if len(split.tokens) <= n:
        return split
    tokens, offsets = np.asarray(split.tokens[:n]), np.append(split.offsets[split.offsets < n], n)
    documents = [tokens[a:b] for a, b in zip(offsets, offsets[1:])]
    texts = [tokenizer.decode(ids[ids != tokenizer.eot].tolist()) for ids in documents]     # the end of a document is no text
    return data.Split(split.name, tokens, offsets, sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts))


def open_run(path, args, device):
    """-> checkpoint, model, tokenizer, corpus, and its split (the first --at-most tokens of it) that the model is evaluated on"""
    checkpoint = read(path, device)
    model, tokenizer = load(path, device, checkpoint)
    corpus = data.load(args.data or checkpoint['data'], tokenizer)
    split = getattr(corpus, args.split)
    if split is None:
        raise SystemExit(f'{corpus.name} has no split {args.split}')
    if not args.data and corpus.fingerprint != checkpoint['corpus']:
        print(f'{path} was trained on another version of {corpus.name}: what it was trained on may be in this split', file=sys.stderr)
    if checkpoint['model_name'] == 'rpt':
        model.n_neighbors = args.n_neighbors or model.n_neighbors
    return checkpoint, model, tokenizer, corpus, first_tokens(split, args.at_most or len(split.tokens), tokenizer)


def prepare(path, args, device, wanted=()):
    """Loads a checkpoint and what it is evaluated on. -> path, checkpoint, model, tokenizer, corpus, split, linear, combinations"""
    checkpoint, model, tokenizer, corpus, split = open_run(path, args, device)
    if corpus.val is None:
        raise SystemExit(f'{corpus.name} has no validation split to tune the memory on')
    if not 0 <= args.stride <= model.config.block_size:
        raise SystemExit(f'--stride {args.stride} does not lie between 1 and T = {model.config.block_size}')
    model.stride = args.stride or model.stride
    model.config.same_document &= not args.across_documents
    trained = checkpoint['config']['memory']
    linear = args.formula == 'linear' or args.formula == 'auto' and trained == 'none'
    wanted = wanted or args.memory or [','.join(TESTING[trained])]
    combinations = ALL if wanted == ['all'] else [tuple(m for m in ('local', 'long', 'ext') if m in names.split(',')) for names in wanted]
    return str(path), checkpoint, model, tokenizer, corpus, split, linear, combinations


def evaluate(path, args, device, wanted=()):
    """Tunes the wanted combinations of memories on the validation split and scores the split with all of them. -> Evaluation"""
    path, checkpoint, model, tokenizer, corpus, split, linear, combinations = parts = prepare(path, args, device, wanted)
    ext = 'knn' if linear else 'ext'
    names = [ext if name == 'ext' else name for name in ('local', 'long', 'ext') if any(name in c for c in combinations)]
    if ext in names:
        model.store = open_store(path, checkpoint, model, tokenizer, args)
        print('of the true nearest {} its search finds {:.1%}, which hold {:.1%} of their softmax (256 contexts of val)'.format(
            args.n_neighbors, *found_of_all(model, corpus.val, args.n_neighbors, METRIC[ext])))
    up_to = lambda most, sizes: [size for size in sizes if size < most] + [most]
    sizes = {'local': [EVERY], 'long': up_to(args.long, [256 * 2 ** i for i in range(40)]), ext: up_to(args.n_neighbors, [8 ** i for i in range(20)])}
    taus = sorted({*TAUS, args.tau or 1.0})
    val = trime_stats(model, first_tokens(corpus.val, TUNE, tokenizer), names, taus, sizes)
    found = {c: tune(val, c, linear, args.p_ext, tau=args.tau) for c in combinations}
    if args.split == 'val' and len(split.tokens) == min(TUNE, len(corpus.val.tokens)):
        return Evaluation(*parts, found, val, val)
    if args.task != 'sweep':
        taus = sorted({1.0, *(tau for x in found.values() for key, tau in x.items() if key.startswith('tau'))})
    return Evaluation(*parts, found, val, trime_stats(model, split, names, taus, sizes))


def rows_of(e, args, stats=None, shuffled=False):
    """name -> log P of each token by that combination of memories, off first; shuffled last, if there is but one."""
    stats, only = stats or e.stats, e.combinations[0] if len(e.combinations) == 1 else ()
    rows = {','.join(c) or 'off': log_p(stats, *recipe_of(c, e.linear, e.found.get(c, {}), args.p_ext)) for c in ((), *e.combinations)}
    reach = e.model.config.block_size + (e.found[only].get('long', 0) if only else 0)
    if shuffled and only and len(e.split.tokens) // 2 > reach:              # else a shuffled memory may hold the answer
        rows['shuffled'] = log_p(stats, *recipe_of(only, e.linear, e.found[only], args.p_ext), shuffled=True)
    return {name: x.numpy() for name, x in rows.items()}


# ----------------------------------------------------------------------------------------------------------------------
# TRIME: what was remembered

@torch.no_grad()
def remembered(model, tokens, t, recipe, size, doc_start=0):
    """
    The memories of the context that ends with token t, and what part of the probability lies on each.
    -> log P of all words (V,) without and with them, and (share, memory, place in the text or row of the datastore, word), largest first
    """
    T, device = model.config.block_size, next(model.parameters()).device
    words = torch.from_numpy(tokens.astype(np.int64)).to(device)
    s = next(s for s, new, e in reversed(windows(t + 2, T, model.stride)) if new <= t < e)
    lo = min(s, max(doc_start, s - (size.get('long') or 0) if 'long' in recipe.names else s))
    old = [keys for keys, _ in trime_entries(model, tokens[:s + 1], lo, quiet=True)]
    f, g, _ = model.encode(words[None, s:t + 1])
    old, places = torch.cat(old)[None].to(device) if old else g[:, :0], torch.arange(t + 1, device=device)[None]
    memories = model.memories(g[:, -1:], g, places[:, s:], old, places[:, lo:s], names=recipe.names & {'local', 'long'})
    held = {name: (sim, place, words[place + 1]) for name, (sim, place) in memories.items()}
    for name in recipe.names & METRIC.keys():
        sim, rows = (x[None].to(device) for x in model.store.search(g[0, -1:].cpu(), size[name], METRIC[name]))
        held[name] = sim, rows, model.store.said(rows).to(device)

    f = f[:, -1:].float()
    off, on = model.embedding.log_mass(f)[0, 0], model.distribution(f, {name: (sim, said) for name, (sim, _, said) in held.items()}, recipe)[0, 0]
    sims = {name: sim[0, 0] for name, (sim, _, _) in held.items()}          # (M,) each
    everything = torch.cat([off] + [sims[name] / recipe.tau for name in recipe.joint]).logsumexp(0)
    share = {name: (sim / recipe.tau - everything).exp() * (name in recipe.joint) for name, sim in sims.items()}    # Eq. 6
    for names, tau, lam in recipe.mixes:                                    # Eq. 9
        everything = torch.cat([sims[name] / tau for name in names]).logsumexp(0)
        if everything > -math.inf:
            share = {name: (1 - lam) * share[name] + lam * (sim / tau - everything).exp() * (name in names) for name, sim in sims.items()}
    found = [(p, name, place, word) for name, (_, places, said) in held.items()
             for p, place, word in zip(share[name].tolist(), places[0, 0].tolist(), said[0, 0].tolist()) if p > 0]
    return off.log_softmax(-1), on, sorted(found, reverse=True)


def trime_helped(e, rows, args):
    """
    The tokens that the memory helped most: dicts with position, context, token, probability off and on, and the memories
    that weighed most among those that were followed by the same token. At most one token of each stretch of T, and of each token.
    """
    c, tokens, T = e.combinations[0], np.asarray(e.split.tokens), e.model.config.block_size
    recipe, size = recipe_of(c, e.linear, e.found[c], args.p_ext)
    off, on, picked, found = rows['off'], rows[','.join(c)], [], []
    for t in np.argsort(off - on, kind='stable').tolist():                  # on[t] is about token t + 1
        if len(picked) < 3 and all(t // T != p // T and tokens[t + 1] != tokens[p + 1] for p in picked):
            picked.append(t)
    for t in picked:
        w, doc = int(tokens[t + 1]), int(e.split.doc_of(np.array([t]))[0])
        start = int(e.split.offsets[doc]) if e.model.config.same_document else 0
        memories = [m for m in remembered(e.model, tokens, t, recipe, size, start)[2] if m[3] == w][:3]
        found.append(dict(position=t + 1, document=doc, context=show(e.tokenizer, tokens, t + 1), token=e.tokenizer.decode([w]),
                          p_off=float(np.exp(off[t])), p_on=float(np.exp(on[t])),
                          memories=[about_memory(e.tokenizer, tokens, e.model.store, t, *m) for m in memories]))
    return found


def show(tokenizer, tokens, end):
    """The text of the 12 tokens before position `end`."""
    return tokenizer.decode(np.asarray(tokens[max(0, end - 12):end]).tolist())


def about_memory(tokenizer, tokens, store, t, share, name, place, word):
    """One memory as a dict: its share of the probability, where it stands, its context, and the word that followed."""
    if name in METRIC:
        corpus, split = store.source
        place = int(store.positions[place])
        where, context = f'{corpus}, document {int(split.doc_of(np.array([place]))[0])}, token {place:,}', show(tokenizer, split.tokens, place + 1)
    else:
        where, context = f'{t - place:,} tokens ago', show(tokenizer, tokens, place + 1)
    return dict(share=share, memory=name, place=place, where=where, context=context, token=tokenizer.decode([word]))


# ----------------------------------------------------------------------------------------------------------------------
# the tables

def figures(total, n, split):
    """Loss, perplexity and so on of a split from the sum of -log P (nats) over n tokens."""
    return dict(tokens=n, loss=total / n, ppl=math.exp(total / n), bits_per_byte=total / math.log(2) / split.n_bytes,
                word_ppl=math.exp(min(700, total / max(1, split.n_words))))


def described(x, linear):
    """Tuned parameters in words. A temperature that is the first or the last of those tried is named: the best may lie beyond."""
    ends = [key for key, value in x.items() if key.startswith('tau') and value in (TAUS[0], TAUS[-1])]
    text = ', '.join(f'{key} = {value:g}' for key, value in x.items()) + f' ({" and ".join(ends)} at an end of what was tried)' * bool(ends)
    return f'{"linear interpolation" if linear else "Eq. 6 to 9" if "lambda" in text else "Eq. 6"}: {text}'.replace('tau', 'τ').replace('lambda', 'λ')


def table(args, device):
    """The standard table of one or several checkpoints; a dict of all numbers."""
    result = dict(split=args.split, runs={})
    for path in args.checkpoints:
        e = evaluate(path, args, device)
        rows = rows_of(e, args, shuffled=True)
        save_tuned(e, args)
        helped = trime_helped(e, rows, args) if len(e.combinations) == 1 and e.combinations[0] else []
        result['runs'][e.path] = dict(
            corpus=e.corpus.name, bytes=e.split.n_bytes, words=e.split.n_words, step=e.checkpoint['step'], stride=e.model.stride,
            parameters=sum(p.numel() for p in e.model.parameters()), block_size=e.model.config.block_size, linear=e.linear,
            tuned={','.join(c): x for c, x in e.found.items()}, memory={name: figures(-float(x.sum(dtype=np.float64)), len(x), e.split) for name, x in rows.items()}, helped=helped,
            val_ppl={name: math.exp(-x.astype(np.float64).mean()) for name, x in rows_of(e, args, e.val).items()})

    runs, width = result['runs'], max(len(path) for path in result['runs'])
    for text in sorted({f'{run["corpus"]}: {run["bytes"]:,} bytes, {run["words"]:,} words' for run in runs.values()}):
        print(f'\n{args.split} split of {text}')
    print(f'temperatures, weights and sizes were tuned on the first {TUNE:,} tokens of val; their own perplexity is `tuned ppl`')
    print(f'\n{"run":{width}}  {"step":>6} {"memory":14} {"tokens":>9} {"loss":>7} {"ppl":>8} {"bits/byte":>10} {"word ppl":>10} {"tuned ppl":>10}')
    for path, run in runs.items():
        for name, x in run['memory'].items():
            tuned = run['tuned'].get(name)
            print(f'{path:{width}}  {run["step"]:6d} {name:14} {x["tokens"]:9,} {x["loss"]:7.4f} {x["ppl"]:8.2f} '
                  f'{x["bits_per_byte"]:10.4f} {x["word_ppl"]:10.1f} {run["val_ppl"].get(name, ""):{">10.2f" if name in run["val_ppl"] else ">10"}}' + (f'   {described(tuned, run["linear"])}' if tuned else ''))
    for path, run in runs.items():
        for x in run['helped']:
            print(f'\nwhere the memory helped {path} most' if x is run['helped'][0] else '')
            print(f'  token {x["position"]:,}, in document {x["document"]}: P = {x["p_off"]:.2g} without memory, '
                  f'{x["p_on"]:.2g} with it\n    {x["context"]!r} -> {x["token"]!r}\n  it remembered')
            for m in x['memories']:
                print(f'    {m["share"]:6.1%}  {m["where"]}: {m["context"]!r} -> {m["token"]!r}')
    return result


def by_frequency(args, device):
    """Perplexity by how often the token occurs in the training split (paper Table 14, which counts on its dev set)."""
    edges, result = [-1, 10, 100, 1000, 10_000, math.inf], {}
    for path in args.checkpoints:
        e = evaluate(path, args, device)
        counts = np.bincount(np.asarray(e.corpus.train.tokens), minlength=e.tokenizer.n_vocab)[np.asarray(e.split.tokens)[1:]]
        for name, x in rows_of(e, args).items():
            inside = [(lo < counts) & (counts <= hi) for lo, hi in zip(edges, edges[1:])]
            result[f'{e.path} {name}'] = {f'<= {hi:g}' if hi < math.inf else '> 10,000': dict(
                tokens=int(b.sum()), ppl=float(np.exp(-x[b].astype(np.float64).mean())) if b.any() else None) for b, hi in zip(inside, edges[1:])}
    width = max(map(len, result))
    for what, pattern in (('tokens', '{:10,}'), ('ppl', '{:10.2f}')):
        print(f'\n{what:{width}}' + ''.join(f'{name:>10}' for name in next(iter(result.values()))))
        for name, buckets in list(result.items())[:1 if what == 'tokens' else None]:
            print(f'{name if what == "ppl" else "":{width}}' + ''.join(pattern.format(b[what]) if b[what] is not None else ' ' * 10 for b in buckets.values()))
    return result


def retrieval(args, device):
    """How often the next token is among the values of the K entries that were retrieved (paper Table 13)."""
    result = {}
    for path in args.checkpoints:
        e = evaluate(path, args, device, wanted=['ext'])
        (name, sizes), = [(name, sizes) for name, sizes in e.stats.sizes.items() if name in METRIC]
        good = e.stats.masses[name][1, :, :, -1]                            # (n - 1, S); -inf: none of them says the token
        result[e.path] = {size: (good[:, i] > -math.inf).double().mean().item() for i, size in enumerate(sizes)}
    print('\n' + ' ' * max(map(len, result)) + ''.join(f'{f"top-{size}":>10}' for size in next(iter(result.values()))))
    for path, x in result.items():
        print(f'{path:{max(map(len, result))}}' + ''.join(f'{share:10.2%}' for share in x.values()))
    return result


def sweep(args, device):
    """Perplexity against the size of the long memory (paper Figure 3), everything else tuned anew for each."""
    result = {}
    for path in args.checkpoints:
        e = evaluate(path, args, device, wanted=['local,long'])
        result[e.path] = {}
        for size in (0, *e.stats.sizes['long']):
            names = ('local', 'long') if size else ('local',)
            x = tune(e.val, names, e.linear, tau=args.tau, long=size)
            result[e.path][size] = math.exp(-log_p(e.stats, *recipe_of(names, e.linear, x)).double().mean())
    width = max(map(len, result))
    print('\n' + ' ' * width + ''.join(f'{size:9,}' for size in next(iter(result.values()))))
    for path, x in result.items():
        print(f'{path:{width}}' + ''.join(f'{ppl:9.2f}' for ppl in x.values()))
    first = Path(args.checkpoints[0])
    curves = [(list(x), list(x.values()), dict(marker='o', markersize=3, label=path)) for path, x in result.items()]
    draw((first if first.is_dir() else first.parent) / 'sweep.png', 'tokens of long memory', f'perplexity, {args.split}', curves,
         'symlog', base=2, linthresh=256)
    return result


def neighbors(args, device):
    """What a model remembers at the end of a text: its next words without and with memory, and the contexts, with their sources."""
    result = {}
    for path in args.checkpoints:
        model, tokenizer, size, start = equip(path, args, device)
        tokens = np.concatenate([start, tokenizer.encode(args.prompt)]).astype(np.int64)
        if not len(tokens):
            raise SystemExit('--task neighbors needs a text: --prompt "..."')
        off, on, found = remembered(model, tokens, len(tokens) - 1, model.recipe, size)
        words = [dict(token=tokenizer.decode([w]), off=off[w].exp().item(), on=on[w].exp().item()) for w in on.topk(8).indices.tolist()]
        memories = [about_memory(tokenizer, tokens, model.store, len(tokens) - 1, *m) for m in found[:args.shown]]
        result[str(path)] = dict(words=words, memories=memories, share=sum(m[0] for m in found))
        print(f'\n{path}: {result[str(path)]["share"]:.1%} of the probability lies on {len(found):,} memories\n')
        print(f'  {"next":20} {"without":>9} {"with memory":>12}')
        for x in words:
            print(f'  {x["token"]!r:20} {x["off"]:9.2%} {x["on"]:12.2%}')
        print()
        for m in memories:
            print(f'  {m["share"]:7.2%}  {m["context"]!r} -> {m["token"]!r}\n           {m["memory"]}: {m["where"]}')
    return result


def speed(args, device):
    """Tokens per second: plain evaluation; building a datastore of a million entries; scoring with K of them for each token."""
    path, checkpoint, model, tokenizer, corpus, split, linear, _ = prepare(args.checkpoints[0], args, device)
    tokens, some = np.asarray(corpus.train.tokens)[:1_000_001], first_tokens(split, 65_536, tokenizer)
    name, n = 'knn' if linear else 'ext', len(tokens) - 1

    def rate(names=(), sizes=None):
        start = time.perf_counter()
        stats = trime_stats(model, some, names, [1.0], sizes, quiet=True)
        return len(stats.log_w) / (time.perf_counter() - start)

    rate()                                                                  # warms up
    before, marks = rate(), {}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        model.store = Datastore.build(folder, lambda start: trime_entries(model, tokens, start, quiet=True), n, model.config.n_embd, {},
                                      progress=lambda stage, done, n: marks.update({stage: time.perf_counter()}))
        after = rate()
        searches = sorted(rate([name], {name: [args.n_neighbors]}) for _ in range(3))
        recall, mass = found_of_all(model, some, args.n_neighbors, METRIC[name])
    result = dict(plain=(before + after) / 2, store=n / (marks['store'] - start), build=n / (marks['sort'] - start), entries=n,
                  search=searches[1], recall=recall, mass=mass)
    print(f'\n{torch.get_num_threads()} threads, T = {model.config.block_size}, stride {model.stride}, C = {model.config.n_embd}\n'
          f'plain evaluation                         {result["plain"]:10,.0f} tokens/s\n'
          f'storing {n:9,} entries                 {result["store"]:10,.0f} tokens/s, {result["store"] / result["plain"]:.2f} of it; '
          f'with sorting them {result["build"]:,.0f}, {result["build"] / result["plain"]:.2f} of it\n'
          f'scored with the best {args.n_neighbors:5,} of them each  {result["search"]:10,.0f} tokens/s; found are {recall:.1%} of the true '
          f'ones, {mass:.2%} of their softmax')
    return result


# ----------------------------------------------------------------------------------------------------------------------
# RPT and DRT

def switch(model, how=None):
    """
    Makes the model read one of its ways, None: as it was trained. -> all of its ways, as it was trained first, nothing last:
    DRT learned or random, random, off; RPT own, shuffled, none.
    """
    drt = type(model).__name__ == 'DRT'
    setattr(model, 'retriever' if drt else 'reads', how or (model.config.retriever if drt else 'own'))
    ways = (model.config.retriever, 'random', 'off') if drt else ('own', 'shuffled', 'none')
    reads = model.config.groups and model.config.retriever != 'off' if drt else model.config.retriever != 'none'
    return list(dict.fromkeys(ways)) if reads else ways[2:]


def by_length(args, device):
    """
    The loss by length of the context: the split in pieces of 1/8, 1, 2 and 4 times the training length, each of one document where that
    is long enough, what is left of the documents joined; for RPT also document by document, each whole, with its memory from its
    beginning on (RPT §3.4). Every token but a document's first is scored once in each column. Retrieval on, random (DRT) or shuffled
    (RPT: the text of the neighbors is that of another document), and off.
    """
    result, autocast = dict(split=args.split, runs={}), lambda: torch.autocast(device.type, enabled=False)
    for path in map(str, args.checkpoints):
        _, model, _, _, split = open_run(path, args, device)
        T, rows = model.config.block_size, {}
        columns = {f'{L:,} tokens': (L, data.Batches(split, 'documents', L, max(1, 2 * T // L), seed=0))
                   for L in (T // 8, T, 2 * T, 4 * T) if 0 < L <= len(split.tokens)}
        if not columns:
            raise SystemExit(f'{path}: {len(split.tokens)} tokens of {args.split} are fewer than an eighth of the training length, {T // 8}')
        if type(model).__name__ == 'RPT':
            columns['whole documents'] = 'whole', WholeDocuments(split)
        for how in switch(model):
            switch(model, how)
            name = dict(learned='on', own='on', none='off').get(how, how)
            for L, texts in columns.values():
                loss, n = train.validate(model, BesideOthers(texts) if how == 'shuffled' else texts, device, autocast, 1.0)
                rows[name, L] = figures(loss * n, n, split) if n else None
        result['runs'][path] = dict(parameters=sum(p.numel() for p in model.parameters()), block_size=T, bytes=split.n_bytes,
                                    rows={f'{name} {L}': x for (name, L), x in rows.items()})
        print(f'\n{path}: {result["runs"][path]["parameters"]:,} parameters, trained on T = {T:,}; {args.split}, perplexity (bits/byte) at\n'
              f'{"retrieval":10}' + ''.join(f'{column:>20}' for column in columns))
        for name in dict.fromkeys(name for name, _ in rows):
            print(f'{name:10}' + ''.join(f'{x["ppl"]:11.2f} ({x["bits_per_byte"]:.4f})' if (x := rows[name, L]) else f'{"-":>20}' for L, _ in columns.values()))
    return result


class WholeDocuments:
    """
    The documents of a split, whole, one in a batch; those of one token have nothing to predict. Row n_rows + r is not one of them: the text
    that follows document r in the split, as long as it is.
    """
    kind = 'documents'

    def __init__(self, split):
        sizes = np.diff(split.offsets)
        self.split, self.documents = split, np.flatnonzero(sizes > 1)
        self.n_rows = len(self.documents)
        self.other = [self.n_rows + r if 2 * sizes[d] <= len(split.tokens) else None for r, d in enumerate(self.documents)]

    def __len__(self):
        return self.n_rows

    def take(self, rows, seed):
        follows, r = divmod(int(rows[0]), self.n_rows)
        a, b = self.split.offsets[self.documents[r]:][:2]
        place = (np.arange(a, b) + follows * (b - a)) % len(self.split.tokens)      # after the last document comes the first
        tokens = self.split.tokens[place].astype(np.int64)
        return data.Batch(*(torch.from_numpy(x)[None] for x in (tokens, np.append(tokens[1:], -1), self.split.doc_of(place))), seed)


class BesideOthers:
    """
    The sequences of data.Batches or WholeDocuments, each in a batch with one of other documents and without padding, from which a model
    that reads `shuffled` takes its neighbors; what is predicted there does not count. None at all if some sequence has no such companion.
    """
    kind = 'documents'

    def __init__(self, texts):
        self.texts, n = texts, texts.n_rows
        if isinstance(texts, WholeDocuments):
            self.other = texts.other
        else:
            docs = [set(texts.take(np.array([row]), 0).doc[0].tolist()) for row in range(n)]
            fits = lambda r, row: -1 not in docs[r] and not docs[r] & docs[row]
            self.other = [next((r % n for r in range(row + n // 2, row + n // 2 + n) if fits(r % n, row)), None) for row in range(n)]
        self.n_rows = n if None not in self.other else 0

    def __len__(self):
        return self.n_rows

    def take(self, rows, seed):
        one, other = (self.texts.take(np.array([row]), seed) for row in (rows[0], self.other[rows[0]]))
        return one._replace(tokens=torch.cat([one.tokens[:1], other.tokens[:1]]), doc=torch.cat([one.doc[:1], other.doc[:1]]),
                            targets=torch.cat([one.targets[:1], torch.full_like(other.targets[:1], -1)]))


def log_p_of(model, f, targets):
    """log P of the targets (T,) after f (T, C), 0 where there is none, in pieces: (T, V) is never held"""
    return torch.cat([model.say(x).gather(1, w.clamp(min=0)[:, None])[:, 0] * (w >= 0) for x, w in zip(f.split(1024), targets.split(1024))])


@torch.no_grad()
def trace(args, device):
    """What was fetched, and with which weights, for the chunks of a text that retrieval helped most; how far back it reaches."""
    result = {}
    for path in map(str, args.checkpoints):
        _, model, tokenizer, _, split = open_run(path, args, device)
        config, drt = model.config, type(model).__name__ == 'DRT'
        n, ways = config.chunk_size - drt, switch(model)                    # tokens of a chunk without its landmark
        if len(ways) == 1:
            raise SystemExit(f'{path} was trained without retrieval: it fetches nothing')
        texts = data.Batches(split, 'documents', min(4 * config.block_size, len(split.tokens) - 1), 1, seed=0)
        batch = train.on(device, texts.take(np.array([0]), seed=0))
        tokens = batch.tokens[0].cpu().numpy()
        log_p = {}
        for how in (ways[-1], ways[0]):
            switch(model, how)
            if drt:
                f, _, found = model.encode(batch.tokens, batch.doc)
            else:                                                           # what chunk c found is read while c + 1 is written
                f, s, idx = model.encode(batch.tokens, batch.doc)
                s = torch.zeros(1, *[idx.size(1)] * 2, device=device) if s is None and idx is not None else s       # BM25's are not shown
                found = [tuple(F.pad(x, (0, 0, 1, -1), value=-1) for x in (s.gather(2, idx.clamp(min=0)), idx))] if idx is not None else []
            log_p[how] = log_p_of(model, f[0], batch.targets[0]).cpu()
        if not found or not (found[0][1][0] >= 0).any():
            raise SystemExit(f'{path}: {len(tokens)} tokens are too few for one chunk to find another; take a longer text')
        gain = log_p[ways[0]] - log_p[ways[-1]]                             # (T,) of the token after each
        gains = torch.stack([part.sum() for part in F.pad(gain, (0, 0) if drt else (1, 0)).split(n)])       # (N,) nats, of the chunks
        beyond = -(-config.window // config.chunk_size)                     # chunks that the window holds
        chunks = torch.arange(len(found[0][1][0]), device=device)[:, None]
        far = [(((idx[0] >= 0) * w[0] * (chunks - idx[0] > beyond)).sum() / w.sum().clamp(min=1e-9)).item() for w, idx in found] if drt else None
        result[path] = dict(gain=(gain.sum() / (batch.targets[0] >= 0).sum().cpu()).item(), chunks=[], **(dict(beyond_the_window=far) if drt else {}))     # RPT's are all beyond it
        print(f'\n{path}: {len(tokens):,} tokens of {args.split}; retrieval gains {result[path]["gain"]:.4f} nats a token'
              + (f'; {", ".join(f"{x:.0%}" for x in far)} of the weight lies on chunks beyond the window' if drt else ''))
        text = lambda c, more=1: tokenizer.decode(tokens[c * n:(c + more) * n].tolist())
        able = (found[0][1][0] >= 0).any(1).nonzero()[:, 0].cpu()           # chunks that read something
        for c in able[gains[able].argsort(descending=True)[:3]].tolist():
            about = dict(chunk=c, gain=gains[c].item(), text=text(c), found=[[(i, w, text(i, 1 if drt else 2)) for i, w in zip(idx[0, c].tolist(), w[0, c].tolist()) if i >= 0] for w, idx in found])
            result[path]['chunks'].append(about)
            print(f'\nchunk {c} gains {about["gain"]:.2f} nats:\n    {about["text"]!r}\n  after chunk {c - 1}:\n    {text(c - 1)!r}')
            for g, some in enumerate(about['found']):
                print(f'  group {g + 1} read' if drt else '  read, with what follows' + ' (score)' * (model.retriever is not None))
                for i, w, t in sorted(some, key=lambda x: -x[1]):
                    print((f'    {w:6.1%}' if drt else f'    {w:6.2f}' if model.retriever else '    ') + f'  chunk {i}, {c - i} back: {t!r}')
    return result


def sample_chunks(args, texts, model, reference, device):
    """
    Random chunks of evenly spread sequences, and what the reference LM says of all that they may find. Says first what that costs.
    -> for each sequence: batch; chunks (N, m); doc (1, N); permitted (N, N); some, the i sampled; s_t (N, N), nan where not scored
    """
    m, rng, sample = model.config.chunk_size, np.random.default_rng(args.seed), []
    N = texts.T // m
    for row in np.linspace(0, texts.n_rows - 1, min(texts.n_rows, args.sequences)).round().astype(int):
        batch = train.on(device, texts.take(np.array([row]), seed=0))
        doc = rpt.doc_of_chunks(batch.doc, m)
        permitted = model.permitted(doc)[0]
        ask = permitted.any(1) & F.pad(doc[0, 1:] == doc[0, :-1], (0, 1))   # the target is of the same document
        some = sorted(rng.permutation(ask.nonzero()[:, 0].tolist())[:args.chunks].tolist())
        sample.append(SimpleNamespace(batch=batch, chunks=batch.tokens[0, :N * m].view(N, m), doc=doc, permitted=permitted, some=some))
    n, pairs = sum(len(x.some) for x in sample), sum(x.permitted[x.some].sum().item() for x in sample)
    if not n:
        raise SystemExit(f'{args.split} has no sequence in which a chunk may find another')
    print(f'scoring every permitted chunk for {n:,} chunks of {len(sample)} sequences: {2 * m * (pairs + n + N * len(sample)) / 1e6:.1f}M tokens for the reference LM')
    for x in data.progress(sample, 'reference LM'):
        wanted = torch.full((N, N), -1, device=device)
        wanted[x.some] = torch.where(x.permitted[x.some], torch.arange(N, device=device), -1)
        x.s_t = rpt.target_scores(reference, x.chunks, wanted)
    return sample


def bm25_order(x, w, idf, **target):
    """For each sampled chunk all that it may find, best first; those that share no term with it come last."""
    found = rpt.mine(x.chunks.cpu().numpy(), x.doc[0].cpu().numpy(), w, len(x.chunks), idf=idf, **target)
    return {i: np.concatenate([f := found[i][found[i] >= 0], np.setdiff1d(x.permitted[i].nonzero()[:, 0].cpu().numpy(), f)]) for i in x.some}


def quality(order, s_t):
    """Precision@2, Recall@10 and nDCG@20 of one chunk that has a positive: order (n,) what it may find, best first; s_t (N,)"""
    gains = torch.exp2(s_t[order].clamp(min=0)) - 1                         # per token, as in training
    discount = 1 / torch.log2(2 + torch.arange(len(order), device=gains.device))
    positive, ideal = s_t[order] > 0, gains.sort(descending=True).values
    return dict(precision_2=(positive[:2].sum() / 2).item(), recall_10=(positive[:10].sum() / positive.sum()).item(),
                ndcg_20=((gains * discount)[:20].sum() / (ideal * discount)[:20].sum()).item())


@torch.no_grad()
def ranks(args, device):
    """
    How good RPT's retrieval is, on a random sample of chunks of the split. The reference LM scores every chunk that a sampled one may
    find, so no retriever has the candidates to itself; positives have s_t > 0.
      Table 3   Precision@2, Recall@10 and nDCG@20, of chunks that have a positive, for BM25 (query c_i) and each checkpoint, beside a random
                order and the latest chunks first. Where ten chunks or fewer are permitted, the recall is 1
      Figure 4  how many different tokens the top neighbor shares with the query and with the target
      Figure 5  the largest s_t, here the sum over the target, among the first k candidates of BM25 (query c_i and c_{i+1})
      Figure 6  nats per token of the target that reading gains over the first Transformer-XL among the checkpoints (over itself without
                neighbors, if there is none), where a positive was read and where none was
      oracle    it reads what the reference LM, which knows the target, likes best: an upper bound
    """
    runs = {str(path): open_run(path, args, device) for path in args.checkpoints}
    models = {name: model for name, (_, model, *_) in runs.items()}
    (_, first, tokenizer, corpus, split), *_ = runs.values()
    m, w = first.config.chunk_size, first.config.window // first.config.chunk_size
    alike = lambda model, tokenizer: (model.config.chunk_size, model.config.window, model.config.block_size, tokenizer.to_dict())
    if any(alike(model, t) != alike(first, tokenizer) for _, model, t, *_ in runs.values()):
        raise SystemExit('the checkpoints have different chunks, windows, lengths or tokenizers: one table needs the same')
    about = [(Path(path) if Path(path).is_dir() else Path(path).parent) / 'config.json' for path in args.checkpoints]
    known = [x for file in about if file.exists() and (x := json.loads(file.read_text()).get('reference'))]
    if not (args.reference or known):
        raise SystemExit('none of these runs says which reference LM taught it: --reference CKPT')
    idf = next((model.idf.double().cpu().numpy() for model in models.values() if model.idf is not None), None)
    idf = rpt.corpus_idf(corpus.train.tokens, m, tokenizer.n_vocab) if idf is None else idf
    reference, *_ = rpt.open_reference(args.reference or known[0], tokenizer, m, device)
    sample = sample_chunks(args, data.Batches(split, 'documents', first.config.block_size, 1, seed=0), first, reference, device)

    result = dict(split=args.split, chunks=sum(len(x.some) for x in sample), sequences=len(sample), reference=args.reference or known[0], retrievers={})
    xl = next((model for model in models.values() if model.config.retriever == 'none'), None)
    log_p = lambda model, x, given=None: log_p_of(model, model.encode(x.batch.tokens, x.batch.doc, given)[0][0], x.batch.targets[0])
    for name, model in {'chance': None, 'the latest first': None, 'BM25': None, **models}.items():
        if model and model.config.retriever == 'none':
            continue
        rows, generator = [], torch.Generator().manual_seed(args.seed)      # of each sampled chunk what is known of it
        for x in sample:
            if model:
                f, scores, read = model.encode(x.batch.tokens, x.batch.doc)
                best = read.clone()
                best[0, x.some] = model.best(x.s_t[None], x.s_t[None] > 0)[0, x.some]
                own, oracle = log_p_of(model, f[0], x.batch.targets[0]), log_p(model, x, best)
                switch(model, 'none')
                plain = log_p(xl or model, x)
                switch(model, 'own')
            if not model and name != 'BM25':
                orders = {i: x.permitted[i].nonzero()[:, 0].flip(0).cpu().numpy() for i in x.some}
            elif not model or model.config.retriever == 'bm25':
                orders = bm25_order(x, w, idf, target=False)
            else:
                orders = {i: scores[0, i].masked_fill(~x.permitted[i], -math.inf).argsort(descending=True)[:x.permitted[i].sum()].cpu().numpy() for i in x.some}
            for i in x.some:
                order = torch.from_numpy(orders[i]).to(device)
                found, query, says = (set(x.chunks[c].tolist()) for c in (order[0], i, i + 1))
                row = dict(overlap_query=len(found & query), overlap_target=len(found & says)) if name != 'chance' else {}
                if (x.s_t[i] > 0).any():
                    tries = [order[torch.randperm(len(order), generator=generator)] for _ in range(100)] if name == 'chance' else [order]
                    figures_of = [quality(one, x.s_t[i]) for one in tries]
                    row.update({key: float(np.mean([each[key] for each in figures_of])) for key in figures_of[0]})
                if model:
                    of_target = lambda y: y[i * m + m - 1:i * m + 2 * m - 1].mean().item()
                    right = any(k >= 0 and x.s_t[i, k] > 0 for k in read[0, i].tolist())
                    row.update(nll=-of_target(own), nll_oracle=-of_target(oracle), gain=of_target(own) - of_target(plain), right=float(right))
                    row['gain_right' if right else 'gain_wrong'] = row['gain']
                rows.append(row)
        columns = {key: [row[key] for row in rows if key in row] for key in dict.fromkeys(key for row in rows for key in row)}
        result['retrievers'][name] = {key: float(np.mean(values)) for key, values in columns.items()}
    result['with_a_positive'] = float(np.mean([(x.s_t[i] > 0).any().item() for x in sample for i in x.some]))
    by_k = [[x.s_t[i, order[:k + 1]].max().item() * m for k in range(20)] for x in sample for i, order in bm25_order(x, w, None).items()]
    result['largest_by_k'] = np.mean(by_k, axis=0).tolist()

    print(f'\n{result["with_a_positive"]:.0%} of {result["chunks"]} chunks have a positive; gains, in nats a token, over {"Transformer-XL" if xl else "itself without neighbors"}')
    for name, x in result['retrievers'].items():
        text = lambda key, how: format(x[key], how) if key in x else '-'
        print(f'{name}: Precision@2 {text("precision_2", ".1%")}, Recall@10 {text("recall_10", ".1%")}, nDCG@20 {text("ndcg_20", ".1%")}'
              + f'; its first one shares {text("overlap_query", ".2f")} tokens with the query, {text("overlap_target", ".2f")} with the target' * ('overlap_query' in x))
        if 'gain' in x:
            print(f'    gain {text("gain", ".4f")}: {text("gain_right", ".4f")} in the {text("right", ".0%")} that read a positive, {text("gain_wrong", ".4f")} in the others; '
                  f'perplexity of the targets {math.exp(x["nll"]):.2f}, by the oracle (an upper bound: it knows the target) {math.exp(x["nll_oracle"]):.2f}')
    print('the largest s_t (sum over the target) among the first k of BM25: ' + ', '.join(f'{k}: {result["largest_by_k"][k - 1]:.2f}' for k in (1, 2, 4, 8, 20)))
    return result


# ----------------------------------------------------------------------------------------------------------------------
# pictures

def draw(path, xlabel, ylabel, curves, scale='linear', **about_scale):
    """A picture of curves (x, y, their looks), or a line on stderr where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure                                # pyplot would want a screen, and would keep what it drew
    except ImportError:
        print('no plot: matplotlib is not installed (pip install matplotlib)', file=sys.stderr)
        return
    axes = Figure(figsize=(7, 4.2), constrained_layout=True).subplots()
    for x, y, looks in curves:
        axes.plot(x, y, **looks)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_xscale(scale, **about_scale)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.figure.savefig(path, dpi=110)
    print(f'\ndrawn: {path}')


def plot(runs, path):
    """Training and validation loss of one or several runs against tokens, from their log.jsonl."""
    curves = []
    for i, run in enumerate(runs):
        log = [json.loads(line) for line in (Path(run) / 'log.jsonl').read_text().splitlines()]
        curves.append(([x['tokens'] for x in log], [x['loss'] for x in log], dict(color=f'C{i}', alpha=0.3, linewidth=1)))
        val = [(x['tokens'], x['val_loss']) for x in log if 'val_loss' in x]
        if val:
            curves.append((*zip(*val), dict(color=f'C{i}', marker='o', markersize=3, label=f'{run}: validation {val[-1][1]:.3f}')))
    draw(path, 'training tokens', 'loss, nats per token (pale: training)', curves)


# ----------------------------------------------------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description='Evaluates one or several checkpoints.', allow_abbrev=False)
    parser.add_argument('checkpoints', nargs='+', metavar='CKPT', help="a run's folder, or a .pt file")
    parser.add_argument('--task', default='table', choices=list(dict.fromkeys(('table', *[task for tasks in TASKS.values() for task in tasks], 'generate'))), help='(default: table)')
    parser.add_argument('--data', default='', help='another corpus than the one of training')
    parser.add_argument('--split', default='val', choices=('train', 'val', 'test'), help='(default: val)')
    parser.add_argument('--at-most', type=int, default=0, metavar='N', help='only the first N tokens of the split')
    parser.add_argument('--stride', type=int, default=0, help='tokens scored per window; default: as trained, T/2')
    parser.add_argument('--memory', default=[], nargs='+', metavar='M', help='none, or some of local,long,ext with commas between, several of these, '
                        "or all; default: the paper's for what the model was trained with")
    parser.add_argument('--formula', default='auto', choices=('auto', 'joint', 'linear'),
                        help='joint: Eq. 6 to 9; linear: continuous cache and kNN-LM; auto: linear if it was trained without memory')
    parser.add_argument('--long', type=int, default=4096, help='tokens of long memory, at most (default: 4096)')
    parser.add_argument('--across-documents', action='store_true', help='long memory goes on over the borders of documents, as in the official code')
    parser.add_argument('--n-neighbors', type=int, default=0, help='trime: entries retrieved for each token, K, at most (default: 1024); '
                        'rpt: chunks for each chunk (default: as trained)')
    parser.add_argument('--datastore-from', default='', metavar='CORPUS', help='external memory of another corpus; default: the training split')
    parser.add_argument('--p-ext', action='store_true', help="Eq. 8 over the external memory alone, as in the official code; the paper: over all")
    parser.add_argument('--retriever', default='', choices=('learned', 'random', 'off'), help='generate, drt: what it retrieves by (default: as trained)')
    parser.add_argument('--reference', default='', help='ranks: the reference LM (default: the one that taught the runs)')
    parser.add_argument('--sequences', type=int, default=16, help='ranks: of the split (default: 16)')
    parser.add_argument('--chunks', type=int, default=16, help='ranks: sampled in each sequence (default: 16)')
    parser.add_argument('--offload', action='store_true', help="generate, drt: keep the chunks' keys and values in the CPU's memory")
    parser.add_argument('--tau', type=float, default=None, help='temperature of Eq. 6 (not of the linear formulas); default: tuned on val')
    parser.add_argument('--device', default='auto', choices=('auto', 'cuda', 'cpu', 'mps'), help='(default: auto)')
    parser.add_argument('--json', default='', metavar='FILE', help='write every number that the screen shows')
    parser.add_argument('--prompt', default='', help='generate, neighbors: the text to go on from')
    parser.add_argument('--shown', type=int, default=10, help='neighbors: how many memories (default: 10)')
    parser.add_argument('--max-tokens', type=int, default=200, help='generate: at most so many new tokens (default: 200)')
    parser.add_argument('--temperature', type=float, default=0.8, help='generate: 0 takes the likeliest token (default: 0.8)')
    parser.add_argument('--seed', type=int, default=0, help='of the sampling, of tokens or of chunks (default: 0)')
    args = parser.parse_args()
    if args.tau is not None and args.tau <= 0:
        raise SystemExit(f'--tau {args.tau} must be positive')
    wrong = [names for names in args.memory if names not in ('none', 'all') and set(names.split(',')) - {'local', 'long', 'ext'}]
    if wrong or 'all' in args.memory and len(args.memory) > 1:
        raise SystemExit(f'--memory {" ".join(args.memory)}: all, or none, or some of local,long,ext with commas between; these last may be several')
    if args.task in ('generate', 'neighbors') and (len(args.memory) > 1 or args.memory == ['all']):
        raise SystemExit(f'--task {args.task} has one text and one set of memories: --memory local,long,ext or fewer')
    if min(args.long, args.sequences, args.chunks) < 1 or args.n_neighbors < 0 or args.at_most < 0 or args.at_most == 1:
        raise SystemExit(f'--long {args.long}, --sequences {args.sequences} and --chunks {args.chunks} must be 1 or more, '
                         f'--n-neighbors {args.n_neighbors} 0 (the default) or more, --at-most {args.at_most} 2 or more')
    if args.json and args.task == 'generate':
        raise SystemExit('--json: a text has no figures; > FILE keeps what generate writes')
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise SystemExit(f'--json {args.json}: there is no such folder')
    device = train.hardware(args.device)
    kinds = {read(path)['model_name'] for path in args.checkpoints}
    kind = kinds.pop()
    if kinds or args.task not in ('table', 'generate', *TASKS[kind]):
        raise SystemExit(f'--task {args.task}: one kind of model at a time; {kind} has table, generate, {", ".join(TASKS[kind])}')
    ranks_only, memories = ('reference', 'sequences', 'chunks'), ('stride', 'memory', 'formula', 'long', 'across_documents', 'datastore_from', 'p_ext', 'tau')
    others = {'drt': (*memories, *ranks_only, 'n_neighbors'), 'rpt': (*memories, 'retriever', 'offload'), 'trime': ('retriever', 'offload', *ranks_only)}[kind]
    wrong = [name for name in others if getattr(args, name) != parser.get_default(name)]
    if wrong:
        raise SystemExit(f'--{wrong[0].replace("_", "-")} says nothing to {kind}')
    if kind == 'trime':
        args.n_neighbors = args.n_neighbors or 1024
    if args.task == 'generate':
        for path in args.checkpoints:
            model, tokenizer, *_ = equip(path, args, device)
            for text in generate(model, tokenizer, args.prompt, args.max_tokens, args.temperature, args.seed):
                print(text, end='', flush=True)
            print()
        return
    result = TASKS[kind].get(args.task, table if kind == 'trime' else by_length)(args, device)
    runs = [path for path in args.checkpoints if (Path(path) / 'log.jsonl').exists()]
    if args.task == 'table' and len(runs) > 1:
        plot(runs, Path(runs[0]) / 'compare.png')
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


TASKS = {'trime': {'frequency': by_frequency, 'retrieval': retrieval, 'sweep': sweep, 'neighbors': neighbors, 'speed': speed},
         'rpt': {'trace': trace, 'ranks': ranks}, 'drt': {'trace': trace}}


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130)
