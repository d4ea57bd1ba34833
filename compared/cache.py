"""
The continuous cache at test time, for every model whose output has no memory of single tokens.

    Edouard Grave, Armand Joulin and Nicolas Usunier, "Improving Neural Language Models with a
    Continuous Cache", ICLR 2017, arXiv:1612.04426;  TRIME, §2.2, Tables 1 to 5, 10, 12, 14

Nothing is trained. The memories of a token are earlier states f_j of its document, each with the
token x_j that followed. With the state f_i that predicts the token after token i,

    P(w)  =  (1 - λ) P_model(w)  +  λ Σ_{j < i: x_j = w} softmax_j(f_i · f_j / (τ sqrt(C)))

over the last `size` positions j. Where there is none, at the first token, P is P_model. τ, λ and
size are tuned on another split than the one that is evaluated (if there is none, on that one, with
a warning).

Where the formula is in this file
    f_i · f_j / sqrt(C)     similarities
    softmax_j(... / τ)      weights_of_memories
    P(w)                    add_cache; Cache.stream for all w, cached_log_p for the target

Where this differs from the paper
    The cache is of one document; τ, λ and size are tuned one after the other. 1 / (τ sqrt(C)) is
    the paper's θ.

trime.py has the cache of TRIME's comparison, on g and with TRIME's windows: --memory local,long of
a model that was trained without memory.

Letters in the shape comments
    B sequences    t tokens of a call    C width    V vocabulary
    L these t tokens and, before them, those that are kept, up to `size`
    Q tokens for tuning    M memories of each

    $ python eval.py out/drt out/base --cache 4096
"""
import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

# what is tried in tuning, and on how many tokens from the beginning of a split
TAUS = [0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0]
LAMBDAS = [i / 20 for i in range(20)]
TUNING_TOKENS = 65_536


@dataclass(frozen=True)
class CacheConstants:
    """The constants of the formula"""
    size: int                   # tokens of the cache
    tau: float = 0.3            # τ
    lam: float = 0.2            # λ


# --------------------------------------------------------------------------------------------------
# the formula
def similarities(f, keys, size):
    """f (B, t, C) of the last t of L positions, keys (B, L, C) of all -> f_i · f_j / sqrt(C)
    (B, t, L), -inf except for the `size` positions j before i"""
    sim = f @ keys.mT / f.size(2) ** 0.5
    L = keys.size(1)
    j = torch.arange(L, device=f.device)                                    # (L,)
    i = j[L - f.size(1):, None]                                             # (t, 1)
    is_memory = (j < i) & (j >= i - size)
    return sim.masked_fill(~is_memory, -torch.inf)


def weights_of_memories(sim, tau):
    """softmax_j(sim / τ) over the last axis, sim (.., M) -> (.., M), and whether there is a memory,
    (.., 1). Where there is none, all weights are equal, instead of nan"""
    has_memory = (sim > -torch.inf).any(-1, keepdim=True)
    weights = (sim / tau).masked_fill(~has_memory, 0).softmax(-1)
    return weights, has_memory


def add_cache(log_p, p_cache, has_memory, lam):
    """log((1 - λ) P_model + λ P_cache); without a memory log P_model. log_p: log P_model, of the
    same shape as p_cache"""
    lam = torch.where(has_memory, lam, 0.0)
    return torch.logaddexp((1 - lam).log() + log_p, lam.log() + p_cache.log())


# --------------------------------------------------------------------------------------------------
# the model
def at_least_fp32(x):
    """x in fp32, or in fp64 if it is"""
    return x if x.dtype == torch.float64 else x.float()


class CacheState(NamedTuple):
    """What a stream keeps of a text"""
    of_model: tuple             # the state of the model
    keys: torch.Tensor          # (B, L, C) f of the last tokens, at most `size`
    tokens: torch.Tensor        # (B, L) these tokens


class Cache(nn.Module):
    """A model with a cache. Its ways are the first and the last one of the model, with the cache
    and without it.

    constants       {way of the model: CacheConstants}; tune sets them"""
    def __init__(self, model, size):
        super().__init__()
        self.model = model
        self.config = model.config
        self.PIECE = min(model.PIECE, 512)      # (t, L) similarities and (t, V) log P are held
        ways = model.ways()
        self.constants = {way: CacheConstants(size) for way in (ways[0], ways[-1])}
        self.way = f'{ways[0]}+cache'

    def ways(self):
        """on+cache, on, off+cache, off; or off+cache, off"""
        return tuple(f'{way}{end}' for way in self.constants for end in ('+cache', ''))

    @property
    def way_of_model(self):
        return self.way.removesuffix('+cache')

    def forward(self, batch, progress):
        """The loss of the model without the cache, for eval.py --task speed"""
        return self.model(batch, progress)

    @torch.no_grad()
    def append(self, tokens, state=None):
        """Appends tokens (B, t), t <= PIECE, to the text of `state` -> f (B, t, C) of these tokens;
        keys (B, L, C) and tokens (B, L) of the memories and of these tokens; the new state"""
        self.model.way = self.way_of_model
        f, of_model = self.model.states(tokens, state.of_model if state else None)
        f = at_least_fp32(f)
        keys = f
        if state:
            keys = torch.cat([state.keys, f], 1)
            tokens = torch.cat([state.tokens, tokens], 1)
        size = max(constants.size for constants in self.constants.values())
        return f, keys, tokens, CacheState(of_model, keys[:, -size:], tokens[:, -size:])

    def read(self, tokens, state=None):
        """The new state of stream(tokens, state), without predictions; any t >= 0"""
        for piece in tokens.split(self.PIECE, 1):
            if piece.numel():
                *_, state = self.append(piece, state)
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
        """Predicts the token after each of tokens (B, t), t <= PIECE, which continue the text of
        `state` -> log P (B, t, V), the new state"""
        f, keys, text, state = self.append(tokens, state)
        log_probs = self.model.logits(f).log_softmax(-1)                    # (B, t, V)
        if not self.way.endswith('+cache'):
            return log_probs, state

        # the last token is no memory: the token after it is not known
        constants = self.constants[self.way_of_model]
        sim = similarities(f, keys, constants.size)[:, :, :-1]              # (B, t, L - 1)
        weights, has_memory = weights_of_memories(sim, constants.tau)
        values = text[:, None, 1:].expand_as(weights)                       # x_j
        p_cache = torch.zeros_like(log_probs).scatter_add_(2, values, weights)
        return add_cache(log_probs, p_cache, has_memory, constants.lam), state

    def trace(self, tokens, t, state=None, **options):
        """What the model retrieves, from its own trace; the cache is not shown"""
        self.model.way = self.way_of_model
        of_model = state.of_model if state else None
        return self.model.trace(tokens, t, of_model, **options)

    # tuning
    def tune(self, split, tab, progress_bar):
        """Sets the constants of each way, by tokens from the beginning of a split; tab: the id of
        TAB in pairs, else -1 -> how many tokens of the split are read"""
        for way, constants in self.constants.items():
            self.way = f'{way}+cache'
            collected = self.collect(split, tab, 2048, progress_bar)
            self.constants[way] = best_constants(collected, constants)
        return min(TUNING_TOKENS, len(split.tokens))

    @torch.no_grad()
    def collect(self, split, tab, n_queries, progress_bar):
        """Draws about n_queries random tokens from the first TUNING_TOKENS of a split; of pairs,
        from targets -> the QueryData of each document that has one"""
        text = split.tokens[:TUNING_TOKENS]
        documents = np.split(text, split.offsets[1:-1])                     # the last one is cut
        rng = np.random.default_rng(0)
        result = []
        for ids in progress_bar(documents, f'{self.way}: tokens read to tune', size=len):
            drawn = rng.random(len(ids[1:])) < n_queries / len(text)
            if tab >= 0:
                drawn &= (ids[:-1] == tab).cumsum() > 0
            if drawn.any():
                result.append(self.query_data(ids, np.flatnonzero(drawn).tolist()))
        return result

    def query_data(self, ids, positions):
        """QueryData of the tokens that follow these positions of a document, ids (n,)"""
        # f of all tokens
        device = next(self.model.parameters()).device
        tokens = torch.as_tensor(ids.astype(int), device=device)
        parts, state = [], None
        for piece in tokens[None].split(self.PIECE, 1):
            f, *_, state = self.append(piece, state)
            parts.append(f[0])
        f = torch.cat(parts)                                                # (n, C)

        # the memories of each query, the latest first
        w = tokens[1:][positions]                                           # (Q,)
        size = self.constants[self.way_of_model].size
        sim, match = [], []
        for i, target in zip(positions, w):
            first = max(0, i - size)            # the memories are first .. i - 1
            keys = f[first:i]                                               # (M, C)
            values = tokens[first + 1:i + 1]                                # (M,)
            sim.append((keys @ f[i] / f.size(1) ** 0.5).flip(0))
            match.append((values == target).flip(0))
        log_probs = self.model.logits(f[positions]).log_softmax(-1)         # (Q, V)
        return QueryData(
            log_p=log_probs.gather(1, w[:, None])[:, 0],
            sim=pad_sequence(sim, batch_first=True, padding_value=-torch.inf),
            match=pad_sequence(match, batch_first=True))


# --------------------------------------------------------------------------------------------------
# the constants
class QueryData(NamedTuple):
    """What tuning needs of Q tokens and their M memories, the latest first"""
    log_p: torch.Tensor         # (Q,) log P of the target, of the model alone
    sim: torch.Tensor           # (Q, M) f_i · f_j / sqrt(C), -inf where there is no memory
    match: torch.Tensor         # (Q, M) bool, x_j is the target


def cached_log_p(data, constants):
    """log P (Q,) of the targets of QueryData with the cache"""
    sim = data.sim[:, :constants.size]
    match = data.match[:, :constants.size]
    weights, has_memory = weights_of_memories(sim, constants.tau)
    p_cache = (weights * match).sum(1)                                      # (Q,)
    return add_cache(data.log_p, p_cache, has_memory[:, 0], constants.lam)


def best_constants(collected, constants):
    """The CacheConstants of high likelihood for [QueryData], with at most the size of `constants`.
    By coordinate ascent: the best τ, λ and size in turn, until none is better"""
    @functools.cache                                    # each candidate once
    def score(candidate):
        return sum(cached_log_p(data, candidate).sum().item() for data in collected)

    sizes = sorted({min(256 * 2 ** n, constants.size) for n in range(20)})
    grids = dict(tau=TAUS, lam=LAMBDAS, size=sizes)
    before = None
    while constants != before:
        before = constants
        for name, values in grids.items():
            candidates = [replace(constants, **{name: value}) for value in values]
            constants = max([constants, *candidates], key=score)
    return constants
