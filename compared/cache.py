"""
The continuous cache at test time, for every model: what would a cache of single tokens give?

    Edouard Grave, Armand Joulin and Nicolas Usunier, "Improving Neural Language Models with a
    Continuous Cache", ICLR 2017, arXiv:1612.04426;  TRIME, App. A

Nothing is trained. With the state f_i that predicts the token after token i, earlier states f_j of
the document, and the tokens x_j that followed them,

    P(w)  =  (1 - λ) P_model(w)  +  λ Σ_{j < i: x_j = w} softmax_j(f_i · f_j / (τ sqrt(C)))

over the last `size` positions j. τ, λ and size are tuned on another split.

Where this differs from the paper
    The scale 1 / (τ sqrt(C)) is the paper's θ. trime.py has the cache of TRIME's comparison, on g
    and with TRIME's windows: --memory local,long of a model that was trained without memory.

Letters as in trime.py; A ages: column a of a similarity is of the memory a + 1 tokens back

    $ python eval.py out/drt out/base --cache 4096
"""
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

TAUS = [0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0]
LAMBDAS = [i / 20 for i in range(1, 20)]


@dataclass
class CacheConstants:
    size: int                   # tokens of the cache
    tau: float = 0.3            # τ
    lam: float = 0.2            # λ


class Queries(NamedTuple):
    """What tuning needs of Q tokens"""
    log_p: torch.Tensor         # (Q,) log P of the target, of the model alone
    sim: torch.Tensor           # (Q, A) f_i · f_j / sqrt(C), -inf where there is no memory
    match: torch.Tensor         # (Q, A) bool, x_j is the target


class CacheState(NamedTuple):
    """What a stream keeps of a text"""
    of_model: tuple             # the state of the model
    keys: torch.Tensor          # (B, L, C) f of the last tokens, at most `size`
    tokens: torch.Tensor        # (B, L) these tokens


def by_age(x, n_before):
    """x (n, L) of n queries, the last of L positions -> (n, L - 1), column a: of the position a + 1
    before the query's. n_before = L - n; columns beyond the first position are not valid"""
    n, L = x.shape
    query = torch.arange(n_before, L, device=x.device)[:, None]
    age = torch.arange(1, L, device=x.device)
    return x.gather(1, (query - age).clamp(min=0))


def cache_similarities(f, keys, size):
    """f (B, n, C) of the last n of L positions, keys (B, L, C) of all -> f_i · f_j / sqrt(C)
    (B, n, L), -inf except for the `size` positions j before i"""
    sim = f @ keys.mT / f.size(2) ** 0.5
    j = torch.arange(keys.size(1), device=f.device)
    i = j[-f.size(1):, None]
    return sim.masked_fill((j >= i) | (j < i - size), -torch.inf)


class Cache(nn.Module):
    """A model with a cache. Its ways are those of the model, with and without the cache"""
    def __init__(self, model, size):
        super().__init__()
        self.model = model
        self.config = model.config
        self.PIECE = min(model.PIECE, 512)
        self.constants = {way: CacheConstants(size) for way in model.ways()}
        self.way = f'{model.ways()[0]}+cache'

    def ways(self):
        """on+cache, on, off+cache, off; others of the model are left out"""
        ways = self.model.ways()
        ways = dict.fromkeys((ways[0], ways[-1]))                           # one, if they are equal
        return tuple(f'{way}{end}' for way in ways for end in ('+cache', ''))

    @property
    def way_of_model(self):
        return self.way.removesuffix('+cache')

    @torch.no_grad()
    def states(self, tokens, state):
        """tokens (B, t), t <= PIECE -> f (B, t, C), keys (B, L + t, C) and tokens (B, L + t) so
        far, the new state"""
        self.model.way = self.way_of_model
        of_model = None
        keys = tokens_so_far = None
        if state is not None:
            of_model, keys, tokens_so_far = state
        f, of_model = self.model.states(tokens, of_model)
        f = f.float() if f.dtype != torch.float64 else f
        keys = f if keys is None else torch.cat([keys, f], 1)
        tokens_so_far = tokens if state is None else torch.cat([tokens_so_far, tokens], 1)
        size = max(constants.size for constants in self.constants.values())
        state = CacheState(of_model, keys[:, -size:], tokens_so_far[:, -size:])
        return f, keys, tokens_so_far, state

    def read(self, tokens, state=None):
        """The new state of stream(tokens, state), without predictions"""
        for piece in tokens.split(self.PIECE, 1):
            if piece.numel():
                *_, state = self.states(piece, state)
        return state

    def log_probs(self, tokens):
        """log P (B, t, V) fp32 of the token after each of tokens (B, t), each row a document"""
        state, parts = None, []
        for piece in tokens.split(self.PIECE, 1):
            log_probs, state = self.stream(piece, state)
            parts.append(log_probs)
        return torch.cat(parts, 1)

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """Predicts the token after each of tokens (B, t) -> log P (B, t, V), the new state"""
        f, keys, text, state = self.states(tokens, state)
        log_probs = self.model.logits(f).log_softmax(-1)
        if not self.way.endswith('+cache'):
            return log_probs, state

        # a position without a memory keeps P of the model
        constants = self.constants[self.way_of_model]
        sim = cache_similarities(f, keys, constants.size)[:, :, :-1]        # (B, t, L - 1)
        has_memory = (sim > -torch.inf).any(2, keepdim=True)
        p = (sim / constants.tau).masked_fill(~has_memory, 0).softmax(2)
        values = text[:, None, 1:].expand_as(p)
        P_cache = torch.zeros_like(log_probs).scatter_add_(2, values, p)
        lam = torch.where(has_memory, constants.lam, 0.0)
        return torch.logaddexp((1 - lam).log() + log_probs, lam.log() + P_cache.log()), state

    def trace(self, tokens, t, state=None):
        """What the model reads; the cache is not shown"""
        self.model.way = self.way_of_model
        return self.model.trace(tokens, t, state and state.of_model)

    def tune(self, split, progress_bar, n_queries=2048):
        """Sets the constants of each way of the model, for the first 65,536 tokens of a split"""
        for way in dict.fromkeys((self.model.ways()[0], self.model.ways()[-1])):
            self.way = f'{way}+cache'
            queries = self.collect(split, n_queries, progress_bar)
            self.constants[way] = best_constants(queries, self.constants[way])

    @torch.no_grad()
    def collect(self, split, n_queries, progress_bar):
        """-> [Queries], of some tokens of the first 65,536 of a split"""
        text = split.tokens[:65_536]
        documents = np.split(text, split.offsets[1:-1])
        size = self.constants[self.way_of_model].size
        device = next(self.model.parameters()).device
        rng = np.random.default_rng(0)
        result = []
        for ids in progress_bar(documents, f'{self.way}: tokens read to tune', size=len):
            tokens = torch.as_tensor(ids.astype(int), device=device)[None]
            state = None
            for piece, targets in zip(tokens[:, :-1].split(self.PIECE, 1),
                                      tokens[0, 1:].split(self.PIECE)):
                f, keys, so_far, state = self.states(piece, state)
                drawn = rng.random(len(targets)) < n_queries / len(text)
                if drawn.any():
                    drawn = torch.from_numpy(drawn).to(device)
                    result.append(self.queries(f[0], keys[0], so_far[0], targets, drawn, size))
        return result


    def queries(self, f, keys, tokens, targets, drawn, size):
        """f (n, C) of the last n of L tokens (L,), keys (L, C), targets (n,), drawn (n,) bool
        -> Queries of what is drawn"""
        n_before = len(keys) - len(f)
        sim = cache_similarities(f[None], keys[None], size)[0]              # (n, L)
        values = F.pad(tokens[1:], (0, 1)).expand_as(sim)                   # x_j

        # the column of age a is the memory a + 1 tokens before the query
        sim = by_age(sim, n_before)[drawn, :size]                           # (Q, A)
        values = by_age(values, n_before)[drawn, :size]
        age = torch.arange(1, sim.size(1) + 1, device=f.device)
        position = torch.arange(n_before, len(keys), device=f.device)[drawn, None]
        sim = sim.masked_fill(age > position, -torch.inf)

        w = targets[drawn, None]                                            # (Q, 1)
        log_p = self.model.logits(f[drawn]).log_softmax(-1).gather(1, w)
        return Queries(log_p[:, 0], sim, values == w)


def cached_log_p(queries, constants):
    """log P (Q,) of the targets of Queries with the cache"""
    sim = queries.sim[:, :constants.size]
    if sim.size(1) == 0:
        return queries.log_p
    has_memory = (sim > -torch.inf).any(1)
    p = (sim / constants.tau).masked_fill(~has_memory[:, None], 0).softmax(1)
    p = (p * queries.match[:, :constants.size]).sum(1)
    lam = torch.where(has_memory, constants.lam, 0.0)
    return torch.logaddexp((1 - lam).log() + queries.log_p, lam.log() + p.log())


def best_constants(queries, constants):
    """Coordinate ascent: the best size, τ and λ in turn, until none is better"""
    def score(candidate):
        return sum(cached_log_p(x, candidate).sum().item() for x in queries)

    sizes = sorted({min(256 * 2 ** n, constants.size) for n in range(20)})
    grids = dict(tau=TAUS, lam=LAMBDAS, size=sizes)
    before = None
    while constants != before:
        before = constants
        for name, values in grids.items():
            candidates = [replace(constants, **{name: value}) for value in values]
            constants = max([constants, *candidates], key=score)
    return constants
