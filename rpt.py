"""
RPT, the Retrieval-Pretrained Transformer: a language model that looks things up in its own past.

    Ohad Rubin and Jonathan Berant, "Retrieval-Pretrained Transformer: Long-range Language Modeling with Self-retrieval",
    TACL 2024, arXiv:2306.13421

A document is cut into chunks. The lower half of the layers reads it through a sliding window. From what it read, each
chunk makes a query, scores every chunk that has left its window and fetches the best few. The upper half reads those
while it predicts the next chunk. During training a second, frozen language model tells which past chunks would have
helped, and a ranking loss teaches the queries to agree with it.

Where the paper is in this file (its equations have no numbers)
    §3    chunks; which of them may be found        RPT.permitted
    §3.1  s_q(c) = <W_Q c_q, W_K c>; the top K      Retriever, RPT.scores, RPT.best
    §3.1  neighbors, what follows them, the gate    NeighborEncoder, RPT.neighbors, RPT.gate_mask
    §3.1  chunked cross-attention                   ChunkedCrossAttention, UpperBlock
    §3.2  candidates by BM25; s_t, the target score mine, target_scores, prepare
    §3.3  L_ret, LambdaRank with a margin           ranking_loss
    §3.3, §3.4  schedules, scheduled sampling       RPT.schedule, RPT.forward, RPT.encode
    §3.4  window of two blocks; inference           SelfAttention, RPT.stream, RPT.remember
    §5.1  Transformer-XL, RETRO, RPT-Lex, RPT-Sem   --retriever none, bm25, lex, sem
    App. B  what it costs                           RPT.multiply_adds

Letters used in the shape comments
    B sequences    T tokens    C width    H heads    D width of one head    V vocabulary
    N chunks       m tokens of a chunk    K neighbors of a chunk    J candidates    w chunks of a window
    n sequences, chunks or pairs taken together    t, s tokens that look, that are looked at    L = N K neighbors in order

Where we differ from the paper, and why
    Scores are divided by sqrt(C): the paper's formula leaves it out, its margins are tuned with it (official code).
    A chunk without neighbors gets exactly 0 from cross-attention; there are no learned null keys (official code: there are).
    s_t is the mean over the tokens of the target, not the sum: the same sign and order, and gains 2^s_t - 1 that do not explode.
    L_ret is the mean over the query chunks that have a positive; with ten times its weight the language model learned more slowly
    (paper: 1e-9, for a sum that it does not give). |Δ NDCG| is of 1 / log2(1 + rank) (official code: of log2(1 + rank), which hardly
    prefers the top).
    Chunk i finds chunks up to i - w in training as at test time (official code: two other rules), all of its own document.
    The gate reads the neighbors of the last w chunks, so that streaming has a bounded state (paper: those of all chunks before).
    Scheduled sampling tosses a coin for each chunk (official code: one for a whole step).
    AdamW instead of AdaBelief. Dropout on what a layer adds, not on attention weights.
    The reference LM is trained by this file on every second document and scores only the others, so half of the chunks have no scores
    (paper: Pythia 1.4B, all); --score-every leaves out more. A chunk without scores has BM25 for a teacher and no L_ret; one that has
    scores, none of them positive, is taught to read nothing.
    RPT-Lex: of J candidates the one of rank r has s_t = 1 - r / J. RETRO's training neighbors have the idf of their own document.
    From the official code, the paper being silent: W_Q, W_K have biases and a norm before them; the gate's attention is over the
    places chunk · K + rank, pre-norm and residual, with a norm and a bias before σ; τ starts at 1.
    σ(w · ĉ / C) hardly leaves 1/2 in a short run: with ĉ of size sqrt(C), w has to grow for long before it matters.

    $ python rpt.py                         a tour and the cost of retrieval, on a CPU
    $ python train.py --model rpt           reference LM, scoring and RPT, one after the other
"""
import hashlib
import json
import math
import os
import shutil
import time
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bm25 import BM25, count, idf_lucene


@dataclass
class RPTConfig:
    vocab_size: int = 4096        # ids of the tokenizer; for bpe, how many to learn (ours)
    block_size: int = 1024        # tokens of a training sequence, T (ours; paper: 16K)
    micro_batch: int = 2          # sequences of a micro-batch, B (ours; paper: one for each host)
    n_layer: int = 4              # Transformer layers, the upper half of which read neighbors (ours; paper: 12)
    n_head: int = 4               # attention heads, H (ours; paper: 8)
    n_embd: int = 128             # width, C (ours; paper: 1,024)
    n_inner: int = 0              # width inside the MLP; 0 is 4 C (paper)
    dropout: float = 0.0          # in the layers and on the embeddings (ours; paper: 0.05)
    window: int = 128             # two blocks: a token attends to its own block and the whole one before it (ours; paper: 2,048)
    chunk_size: int = 32          # tokens of a chunk, m (ours; paper: 64)
    n_neighbors: int = 2          # chunks that are fetched for each chunk, K (paper)
    n_cca: int = 0                # layers with cross-attention, the last ones; 0 is the whole upper half (ours; paper: 5 of 12)
    retriever: str = 'sem'        # sem: taught by the reference LM; lex: by BM25; bm25: it is BM25 (RETRO); none: Transformer-XL
    gate: bool = True             # neighbors are weighed before they are read (paper)
    eta: float = 0.1              # the least weight (paper)
    alpha: float = 0.005          # weight of the ranking loss, reached after a fifth of the steps (ours; paper: 1e-9, see above)
    tau: float = 4.0              # margin of the ranking loss at the end, from 1 at the start (paper: 2 to 128, by corpus)
    teacher: str = 'annealed'     # who chooses neighbors in training. annealed: the teacher, then more and more the model (paper); always: the teacher; never: the model
    n_candidates: int = 20        # candidates by BM25 for each chunk, J (paper)
    score_every: int = 1          # the reference LM scores every n-th chunk; the teacher of the others is BM25 (ours)

    def __post_init__(self):
        for name in ('vocab_size', 'block_size', 'micro_batch', 'n_layer', 'n_head', 'n_embd', 'n_neighbors', 'chunk_size', 'score_every'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} {getattr(self, name)} must be 1 or more')
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}; RoPE turns pairs')
        if self.retriever not in ('sem', 'lex', 'bm25', 'none'):
            raise ValueError(f'retriever {self.retriever!r} is not one of sem, lex, bm25, none')
        if self.teacher not in ('annealed', 'always', 'never'):
            raise ValueError(f'teacher {self.teacher!r} is not one of annealed, always, never')
        if self.window < 2 or self.window % 2:
            raise ValueError(f'window {self.window} is not two blocks')
        if self.retriever != 'none':
            if self.window % (2 * self.chunk_size):
                raise ValueError(f'window {self.window} is not a multiple of two chunks of {self.chunk_size} tokens')
            if self.block_size < self.window + 2 * self.chunk_size:
                raise ValueError(f'block_size {self.block_size}: no chunk of {self.chunk_size} tokens would have a next one and find one that has left the window '
                                 f'of {self.window}; {self.window + 2 * self.chunk_size} is the least')
            if self.n_layer < 2 or not 0 <= self.n_cca <= self.n_layer - self.n_layer // 2:
                raise ValueError(f'n_layer {self.n_layer} has an upper half of {self.n_layer - self.n_layer // 2}; n_cca {self.n_cca} of them read neighbors')
            if self.n_candidates < self.n_neighbors:
                raise ValueError(f'n_candidates {self.n_candidates} are fewer than n_neighbors {self.n_neighbors}')
        if not 0 <= self.eta <= 1 or not 0 <= self.dropout < 1 or self.n_inner < 0 or self.alpha < 0 or self.tau < 0:
            raise ValueError(f'eta {self.eta} and dropout {self.dropout} are shares; n_inner {self.n_inner}, alpha {self.alpha}, tau {self.tau} are 0 or more')


# The paper's model, §3.4 and App. A: T, tokens_per_step (2^17), max_steps; lr for AdamW is ours. Its vocabulary has 50,277 ids (GPT-NeoX).
PRESETS = {
    'tiny': dict(tokens_per_step=2048, max_steps=1000, n_candidates=4, score_every=2),       # minutes on two CPU cores
    'paper': dict(data='pg19', tokenizer='gpt2', vocab_size=50_257, block_size=16_384, micro_batch=1, n_layer=12, n_head=8, n_embd=1024, dropout=0.05,
                  window=2048, chunk_size=64, n_cca=5, tokens_per_step=131_072, max_steps=500_000, lr=5e-4, warmup=0.01,
                  weight_decay=0.01, eval_every=1000),
}


def batches(config):
    """The batching of data.py that this model trains on: long pieces of one document."""
    return 'documents'


# ----------------------------------------------------------------------------------------------------------------------
# the transformer (the same text in trime.py, rpt.py and drt.py)

class RMSNorm(nn.Module):
    """x / rms(x) * gain, over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, n_embd):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n_embd))

    def forward(self, x):
        return F.rms_norm(x, self.gain.shape, self.gain, eps=1e-6)


def fp32(x):
    """bf16 and fp16 become fp32; fp64 stays what it is, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rope(positions, D):
    """The turns e^(i p θ_d), θ_d = 10000^(-2d/D), of rotary embeddings (Su et al. 2021). positions (T,) -> (T, 1, D/2)"""
    theta = 10000 ** (-torch.arange(0, D, 2, device=positions.device) / D)
    angle = positions[:, None, None] * theta                                # (T, 1, D/2)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x, turns):
    """Turns each pair (x_2d, x_2d+1) of every head by the angle of its position. x (B, T, H, D) -> the same."""
    pairs = torch.view_as_complex(fp32(x).unflatten(-1, (-1, 2)))           # (B, T, H, D/2)
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def softmax_attention(q, k, v, mask=None):
    """
    softmax(q kᵀ / sqrt(D) + mask) v. mask broadcasts to (..., t, s): what to add, or True where to look. On a CPU in bf16 by the
    definition: the fused kernel takes 1.4 to 4 times as long there, forward and back (torch 2.13; python rpt.py measures it).

    q (..., t, D)   k, v (..., s, D) -> (..., t, D)
    """
    if q.device.type != 'cpu' or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    z = q / math.sqrt(q.size(-1)) @ k.transpose(-2, -1)                     # (..., t, s)
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask
    return z.softmax(-1) @ v


def attend(q, k, v, block, window, slopes=None):
    """
    Causal attention in blocks: the queries of block n see the keys of blocks n-1 and n, none later, none `window` or
    more tokens older. With slopes (H,), ALiBi takes slope · age from each score (in the dtype of q). The cost is linear in T.

    q (B, T, H, D)   k, v (B, P + T, H, D): the P keys that come before the queries, the first at the start of a block
    returns (B, T, H, D)
    """
    T, P = q.size(1), k.size(1) - q.size(1)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)       # (B, H, T, D)
    if P == 0 and T <= min(block, window) and slopes is None and q.is_cuda:        # without a mask it has a faster kernel
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def bias(i, j):
        age = i[:, None] - j[None, :]                                       # (queries, keys)
        seen = (age >= 0) & (age < window) & (j // block >= i[:, None] // block - 1)
        penalty = torch.zeros(age.shape, device=q.device) if slopes is None else -slopes[None, :, None, None] * age
        return penalty.masked_fill(~seen, float('-inf')).to(q.dtype)        # (queries, keys) or (1, H, queries, keys)

    if P > 0 or T <= block:                                                 # one piece: by the definition
        j = torch.arange(P + T, device=q.device)
        return softmax_attention(q, k, v, bias(j[P:], j)).transpose(1, 2)

    B, H, _, D = q.shape
    N = -(-T // block)                                                      # blocks; the last is filled up with tokens
    q, k, v = (F.pad(t, (0, 0, 0, N * block - T)) for t in (q, k, v))       # that come after all others
    mask = bias(block + torch.arange(block, device=q.device), torch.arange(2 * block, device=q.device))
    first = softmax_attention(q[:, :, :block], k[:, :, :block], v[:, :, :block], mask[..., block:])     # (B, H, block, D) has none before it
    blocks = lambda t: t.reshape(B, H, N, block, D).transpose(1, 2)         # (B, N, H, block, D)
    pairs = lambda t: torch.cat([blocks(t)[:, :-1], blocks(t)[:, 1:]], dim=3).flatten(0, 1)     # (B (N - 1), H, 2 block, D)
    rest = softmax_attention(blocks(q)[:, 1:].flatten(0, 1), pairs(k), pairs(v), mask)
    rest = rest.view(B, N - 1, H, block, D).transpose(1, 2).reshape(B, H, (N - 1) * block, D)
    return torch.cat([first, rest], dim=2)[:, :, :T].transpose(1, 2)


class MLP(nn.Module):
    """Two layers, wider inside."""

    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 4 * config.n_embd
        self.fc = nn.Linear(config.n_embd, n_inner, bias=False)
        self.proj = nn.Linear(n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    """One pre-norm Transformer layer; returns its keys and values too, for streaming."""

    def __init__(self, config):
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.n_embd), SelfAttention(config)
        self.norm2, self.mlp = RMSNorm(config.n_embd), MLP(config)
        self.dropout = config.dropout

    def forward(self, x, turns, past=None):
        y, kv = self.attention(self.norm1(x), turns, past)
        x = x + F.dropout(y, self.dropout, self.training)
        x = x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)
        return x, kv


class CrossEntropy(torch.autograd.Function):
    """
    Σ -log P(w) with P = softmax(f Eᵀ), over the targets w >= 0. (n, V) is never held: tokens are taken in blocks of R, and as the
    gradient of a block, P minus one at w, is known as soon as P is, it is computed right there, in the forward pass. Under
    autocast the products of the gradient round to bf16, as all of the way back does; the logits do not.

    f (n, C)   E (V, C)   targets (n,), -1 does not count   with_grad: False where nobody will ask for gradients
    returns ()
    """
    R = 512

    @staticmethod
    def forward(ctx, f, E, targets, with_grad):
        total = f.new_zeros(())
        df, dE = (torch.zeros_like(x) if with_grad else None for x in (f, E))
        logits = f.new_empty(min(CrossEntropy.R, len(f)), len(E))           # the same memory for all blocks
        for a in range(0, len(f), CrossEntropy.R):
            rows = slice(a, a + CrossEntropy.R)
            counts, w = targets[rows, None] >= 0, targets[rows, None].clamp(min=0)      # (R, 1)
            with torch.autocast(f.device.type, enabled=False):              # rounded inputs are fine, rounded logits are not
                z = torch.mm(f[rows], E.T, out=logits[:len(f) - a])         # (R, V)
            z -= z.amax(1, keepdim=True)
            right = z.gather(1, w)                                          # (R, 1)
            Z = z.exp_().sum(1, keepdim=True)                               # z is e^z from here on, in the same memory
            total += ((Z.log() - right) * counts).sum()
            if with_grad:
                dz = z.mul_(counts / Z).scatter_add_(1, w, -counts.to(z))   # P minus one at w
                df[rows] = dz @ E
                dE += dz.T @ f[rows]
        ctx.grads = df, dE
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        (df, dE), ctx.grads = ctx.grads, None                               # they are large, and of no use any more
        return df * d, dE * d, None, None


# ----------------------------------------------------------------------------------------------------------------------
# what is new in RPT

class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions, in blocks of half a window: each sees itself and the whole one before it (§3.4)."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.block = config.n_head, config.window // 2
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, turns, past=None):
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, -1)
        q, k = rotate(qkv[:, :, :2].flatten(2, 3), turns).chunk(2, dim=2)   # 2 x (B, T, H, D)
        v = qkv[:, :, 2]                                                    # (B, T, H, D)
        if past is not None:                                                # the keys and values of earlier tokens
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        y = attend(q, k, v, self.block, 2 * self.block)                     # (B, T, H, D)
        over = max(0, k.size(1) // self.block - 1) * self.block             # blocks that no later token sees
        return self.proj(y.reshape(B, T, C)), (k[:, over:], v[:, over:])


class Attention(nn.Module):
    """Multi-head attention of the tokens of x over themselves or over other tokens y, all of them; `places` (tokens,) turn their keys and queries."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.query = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.kv = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def keys_values(self, y, places):
        """y (n, s, C) -> k, v (n, H, s, D)"""
        k, v = self.kv(y).unflatten(-1, (2, self.n_head, -1)).unbind(2)     # 2 x (n, s, H, D)
        return rotate(k, rope(places, k.size(-1))).transpose(1, 2), v.transpose(1, 2)

    def forward(self, x, places, kv=None, mask=None):
        """x (n, t, C); kv of y, None: of x; mask broadcast to (n, H, t, s): True where x may look -> (n, t, C)"""
        k, v = kv or self.keys_values(x, places)
        q = self.query(x).unflatten(-1, (self.n_head, -1))                  # (n, t, H, D)
        q = rotate(q, rope(places, q.size(-1))).transpose(1, 2)
        return self.proj(softmax_attention(q, k, v, mask).transpose(1, 2).flatten(-2))


class Retriever(nn.Module):
    """
    §3.1: the tokens of a chunk look at each other, their mean is the chunk c; s_q(c) = <W_Q c_q, W_K c> / sqrt(C). What is fetched
    later are these tokens.
    """

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.norm, self.attention = RMSNorm(C), Attention(config)
        self.norm_q, self.norm_k = RMSNorm(C), RMSNorm(C)
        self.query, self.key = nn.Linear(C, C), nn.Linear(C, C)             # W_Q, W_K

    def forward(self, x):
        """x (B, N, m, C), the chunks -> their tokens E (B, N, m, C), queries and keys (B, N, C)"""
        E = x + self.attention(self.norm(x).flatten(0, 1), torch.arange(x.size(2), device=x.device)).view_as(x)
        c = E.mean(2)                                                       # (B, N, C)
        return E, self.query(self.norm_q(c)), self.key(self.norm_k(c))


class NeighborEncoder(nn.Module):
    """
    What is done to the neighbors before they are read (§3.1): the 2 m tokens of each look at each other and then at the chunk that
    asked; then the gate, one weight for each neighbor, max(η, σ(w · ĉ / C)) with ĉ the mean of its tokens, which has looked at
    the better neighbors of the same chunk and at those of the w - 1 chunks before.
    """

    def __init__(self, config):
        super().__init__()
        C, self.config = config.n_embd, config
        self.norm1, self.attention = RMSNorm(C), Attention(config)
        self.norm2, self.norm_query, self.cross = RMSNorm(C), RMSNorm(C), Attention(config)
        if config.gate:
            self.norm3, self.gate_attention = RMSNorm(C), Attention(config)
            self.norm_gate, self.gate = RMSNorm(C), nn.Linear(C, 1)

    def augment(self, x, query_chunk):
        """x (n, K, 2m, C) the neighbors of n chunks, query_chunk (n, m, C) -> (n, K, 2m, C)"""
        places = torch.arange(x.size(2), device=x.device)
        x = x + self.attention(self.norm1(x).flatten(0, 1), places).view_as(x)
        kv = self.cross.keys_values(self.norm_query(query_chunk), places[:query_chunk.size(1)])             # once for all K
        y = self.cross(self.norm2(x).flatten(1, 2), places.repeat(x.size(1)), kv)
        return x + y.view_as(x)

    def weigh(self, pooled, seen):
        """The gate of each neighbor. pooled (B, L, C): their means, by chunk and rank; seen (B, L, L): which looks at which. -> (B, L) fp32"""
        places = torch.arange(pooled.size(1), device=pooled.device)         # chunk · K + rank; only their differences count
        c = pooled + self.gate_attention(self.norm3(pooled), places, mask=seen[:, None])
        with torch.autocast(c.device.type, enabled=False):
            z = self.gate(self.norm_gate(fp32(c)))[..., 0] / self.config.n_embd
        return z.sigmoid().clamp(min=self.config.eta)


class ChunkedCrossAttention(nn.Module):
    """
    RETRO's (Borgeaud et al. 2022, §2.4): the last token of chunk i, which is the first that may know what chunk i has found, and the
    first m - 1 tokens of chunk i + 1 read the neighbors of chunk i. All neighbors have positions 0 to 2m - 1, these tokens m - 1
    to 2m - 2. The neighbors are not normalized: that would undo the gate.
    """

    def __init__(self, config):
        super().__init__()
        self.m = config.chunk_size
        self.norm, self.attention = RMSNorm(config.n_embd), Attention(config)

    def keys_values(self, neighbors):
        """(n, K, 2m, C) -> k, v (n, H, K 2m, D)"""
        places = torch.arange(2 * self.m, device=neighbors.device).repeat(neighbors.size(1))
        return self.attention.keys_values(neighbors.flatten(1, 2), places)

    def read(self, x, first, kv, valid):
        """x (n, t, C) tokens of n groups that begin at place `first` of theirs; valid (n, K) -> (n, t, C), 0 where there is no neighbor"""
        any_valid = valid.any(1)[:, None, None]                             # (n, 1, 1)
        mask = (valid[:, None, None, :, None] | ~any_valid[..., None, None]).expand(-1, 1, 1, -1, 2 * self.m).flatten(3)     # never all False
        places = self.m - 1 + first + torch.arange(x.size(1), device=x.device)
        return self.attention(self.norm(x), places, kv, mask) * any_valid

    def forward(self, x, neighbors, valid, may_read):
        """x (B, T, C), neighbors (B, N, K, 2m, C), valid (B, N, K), may_read (B, N, m): which tokens -> (B, T, C)"""
        B, T, C = x.shape
        groups = F.pad(x[:, self.m - 1:], (0, 0, 0, valid.size(1) * self.m - (T - self.m + 1))).view(-1, self.m, C)     # (B N, m, C)
        y = self.read(groups, 0, self.keys_values(neighbors.flatten(0, 1)), valid.flatten(0, 1))
        y = (y.view(*may_read.shape, C) * may_read[..., None]).flatten(1, 2)[:, :T - self.m + 1]
        return F.pad(y, (0, 0, self.m - 1, 0))


class UpperBlock(Block):
    """A layer of the upper half: self-attention, then cross-attention to the neighbors, then the MLP."""

    def __init__(self, config, reads):
        super().__init__(config)
        self.cca = ChunkedCrossAttention(config) if reads else None

    def forward(self, x, turns, past=None, read=None):
        y, kv = self.attention(self.norm1(x), turns, past)
        x = x + F.dropout(y, self.dropout, self.training)
        if read and self.cca:
            x = x + F.dropout(read(self.cca, x), self.dropout, self.training)
        x = x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)
        return x, kv


def ranking_loss(scores, permitted, candidates, target_scores, tau):
    """
    LambdaRank with a margin (§3.3), summed over the positives l (s_t(l) > 0) and all permitted j that are worse for the target:

        L_ret = Σ_{l, j: s_t(l) > s_t(j)} λ_lj max(0, τ - (s_q(l) - s_q(j)))
        λ_lj  = |2^s_t(l) - 2^max(s_t(j), 0)| · |1 / log2(1 + r_l) - 1 / log2(1 + r_j)| / IDCG

    r is the rank by s_q. So λ is what the NDCG would change by if l and j changed places. A chunk that was not a candidate is worse than
    all that were.

    scores, permitted   (B, N, N)  s_q of chunk i for chunk k; which k chunk i may find
    candidates          (B, N, J)  -1: none      target_scores (B, N, J)  s_t, nan: not scored
    returns             the mean over the chunks that have a positive, their NDCG@20, and how many these are; all () and 0 if there are none
    """
    (B, N, _), J = scores.shape, candidates.size(2)
    s_t = target_scores.nan_to_num(-math.inf).masked_fill(candidates < 0, -math.inf)       # (B, N, J)
    positive, there = s_t > 0, candidates.clamp(min=0).long()
    gain = torch.exp2(s_t.clamp(min=0)) - 1                                 # (B, N, J)
    spread = scores.new_full((B, N, N + 1), -math.inf)                      # of every chunk; empty slots go to column N
    all_t = spread.scatter(2, candidates.long().where(candidates >= 0, N), s_t.to(scores))[..., :N]     # (B, N, N)
    all_gain = torch.exp2(all_t.clamp(min=0)) - 1

    order = scores.detach().masked_fill(~permitted, -math.inf).argsort(dim=2, descending=True, stable=True)
    ranks = torch.arange(1, N + 1, device=scores.device).to(scores)
    rank = torch.empty_like(scores).scatter(2, order, ranks.expand_as(scores))             # (B, N, N)
    discount = 1 / torch.log2(1 + rank)
    best = gain.sort(2, descending=True).values / torch.log2(torch.arange(2, J + 2).to(scores))   # (B, N, J)
    ideal = best.sum(2).clamp(min=1e-9)                                     # (B, N) IDCG

    worse = positive[..., None] & permitted[:, :, None, :] & (s_t[..., None] > all_t[:, :, None, :])    # (B, N, J, N)
    # λ but for IDCG, one number for each chunk, which divides below
    lam = (gain[..., None] - all_gain[:, :, None, :]).abs() * (discount.gather(2, there)[..., None] - discount[:, :, None, :]).abs()
    hinge = (tau - (scores.gather(2, there)[..., None] - scores[:, :, None, :])).clamp(min=0)
    n = positive.any(2).sum()
    loss = (lam * hinge * worse).sum((2, 3)) / ideal                        # (B, N), 0 without a positive; so is dcg
    dcg, best20 = (all_gain * discount * (rank <= 20)).sum(2), best[..., :20].sum(2).clamp(min=1e-9)
    return loss.sum() / n.clamp(min=1), (dcg / best20).sum() / n.clamp(min=1), n.to(scores)


# ----------------------------------------------------------------------------------------------------------------------
# supervision

def doc_of_chunks(doc, m):
    """doc (B, T) -> (B, N): the document that a chunk lies in as a whole; -1 where two share it, and at padding"""
    docs = doc[:, :doc.size(1) // m * m].unflatten(1, (doc.size(1) // m, m))
    return torch.where((docs == docs[..., -1:]).all(2), docs[..., -1], -1)


def mine(chunks, chunk_doc, w, n, target=True, idf=None):
    """
    The n best permitted chunks by BM25 for each chunk of a sequence (§3.2).

    chunks      (N, m) token ids     chunk_doc (N,) the document that a chunk lies in as a whole, else -1
    target      the query is (c_i, c_{i+1}), which knows the future; False: c_i alone
    idf         (V,) from the training corpus; None: from this document, what comes later included
    returns     (N, n) int64, best first, -1 where there are no more
    """
    found = np.full((len(chunks), n), -1)
    for doc in np.unique(chunk_doc[chunk_doc >= 0]):
        here, = np.nonzero(chunk_doc == doc)                                # they follow each other
        queries = [chunks[i:i + 1 + target].ravel() for i in here[:len(here) - target]]
        limit = np.maximum(0, np.arange(len(queries)) - w + 1)
        ids, _ = BM25(list(chunks[here]), idf=idf).search_many(queries, n, limit)
        found[here[:len(queries)]] = np.where(ids >= 0, ids + here[0], -1)
    return found


@torch.no_grad()
def target_scores(reference, chunks, candidates, pairs=64):
    """
    What the reference LM thinks of the candidates (§3.2), per token of the target c_t = c_{i+1}, with c_q = c_i:

        s_t(c_j) = (log P(c_t | c_j, c_{j+1}, c_q) - log P(c_t | c_{i-2}, c_{i-1}, c_q)) / m

    The prefix (c_j, c_{j+1}) always stands at position 0, so its keys and values are made once for all chunks that have j as a
    candidate; the baseline is candidate i - 2. The head is used at the target alone.

    reference   .read(tokens, past=None, rows=None) -> f, past  goes on from those rows of a past;  .log_p(f, tokens): of each token after f
    chunks      (N, m) token ids; candidates (N, J), -1: none. returns (N, J) fp32, nan where there is none
    """
    N, m = chunks.shape
    has_any = (candidates >= 0).any(1, keepdim=True)                        # these have a target, and i >= w > 1
    js = torch.cat([torch.where(has_any, torch.arange(N, device=chunks.device)[:, None] - 2, -1), candidates], dim=1)    # (N, 1 + J)
    i, slot = (js >= 0).nonzero(as_tuple=True)                              # (n,) all pairs
    needed, prefix = js[i, slot].unique(return_inverse=True)
    if len(i) == 0:
        return torch.full(candidates.shape, math.nan, device=chunks.device)
    parts = []
    _, past = reference.read(torch.cat([chunks[needed], chunks[needed + 1]], dim=1))                    # of (P, 2m) tokens
    for some in torch.arange(len(i), device=chunks.device).split(pairs):
        goes_on = torch.cat([chunks[i[some]], chunks[i[some] + 1]], dim=1)                              # (n, 2m) c_q, c_t
        f, _ = reference.read(goes_on, past, prefix[some])
        parts.append(reference.log_p(f[:, m - 1:-1], goes_on[:, m:]).mean(1))
    log_p = torch.full(js.shape, math.nan, device=chunks.device, dtype=parts[0].dtype)
    log_p[i, slot] = torch.cat(parts)
    return log_p[:, 1:] - log_p[:, :1]


def must_hold(window, m):
    """Ends the program with one line where a reference LM would say the end of c_t without having read c_j."""
    if window < 4 * m:
        raise SystemExit(f'the reference LM reads four chunks, {4 * m} tokens, and sees {window}: --window {4 * m}, a smaller --chunk-size, or another --reference')


def open_reference(path, tokenizer, m, device='cpu'):
    """
    A frozen reference LM: a checkpoint of this file with retriever none, or a GPT-2 of the library transformers (a name or a folder)
    where that is installed and the tokenizer is gpt2.
    m           it has to hold four chunks
    returns     it; a hash of its weights; the fold of documents that it was trained on, -1: all, and of which corpus (fingerprint)
    """
    if not str(path).endswith('.pt') and not (Path(path) / 'ckpt.pt').exists() and tokenizer.name == 'gpt2':
        reference, fold, corpus = GPT2(path), -1, ''
        must_hold(reference.window, m)
    else:
        path = Path(path) / 'ckpt.pt' if Path(path).is_dir() else Path(path)
        try:
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
            config, name, fold, corpus = checkpoint['config'], checkpoint['model_name'], checkpoint['fold'], checkpoint['corpus']
            fits = name == 'rpt' and config['retriever'] == 'none' and checkpoint['tokenizer'] == tokenizer.to_dict()
            config = RPTConfig(**config) if fits else None
        except FileNotFoundError:
            raise SystemExit(f'--reference {path} does not exist')
        except Exception as e:
            raise SystemExit(f'--reference {path}: no checkpoint of this house ({" ".join(str(e).split())[:200]})')
        if not fits:
            raise SystemExit(f'--reference {path}: a checkpoint of `train.py --model rpt --retriever none` on the same tokenizer is needed')
        must_hold(config.window, m)
        reference = RPT(config)
        reference.load_state_dict(checkpoint['model'])
    digest = hashlib.sha256()
    for p in reference.parameters():
        digest.update(p.detach().float().numpy().tobytes())
    return reference.to(device).eval().requires_grad_(False), digest.hexdigest()[:16], fold, corpus


class GPT2(nn.Module):
    """A causal language model of the library transformers as reference LM: read and log_p of RPT."""

    def __init__(self, name):
        super().__init__()
        try:
            from transformers import AutoModelForCausalLM, DynamicCache
            self.model, self.new_past = AutoModelForCausalLM.from_pretrained(name), DynamicCache
            self.window = self.model.config.max_position_embeddings
        except (ImportError, OSError) as e:
            raise SystemExit(f'--reference {name}: neither a checkpoint of this house nor a model that transformers can load ({" ".join(str(e).split())[:200]})')

    def read(self, tokens, past=None, rows=None):
        kv = self.new_past()                                                # it grows, so it is always a new one
        for i, layer in enumerate(past.layers if past is not None else ()):
            kv.update(layer.keys[rows], layer.values[rows], i)
        out = self.model.base_model(tokens, past_key_values=kv, use_cache=True)
        return out.last_hidden_state, out.past_key_values

    def log_p(self, f, tokens):
        z = self.model.get_output_embeddings()(f).float()
        return z.gather(-1, tokens[..., None])[..., 0] - z.logsumexp(-1)


class Supervision:
    """
    What the teacher knows, in a folder beside the corpus: for each sequence of the training split the candidates (N, J) and their
    scores s_t (nan: not scored). A sequence's row is written before its mark in `done`, so any number of processes may fill it,
    be killed, and go on.
    """

    def __init__(self, folder, rows, N, J, scored):
        self.folder, self.scored = Path(folder), scored
        files = dict(candidates=((rows, N, J), np.int32), scores=((rows, N, J) if scored else (1,), np.float16), done=((rows,), np.uint8))
        if not self.folder.exists():                                        # made whole under another name; the first of several runs is kept
            temporary = self.folder.with_name(f'{self.folder.name}.{os.getpid()}.tmp')
            temporary.mkdir(parents=True)
            for name, (shape, dtype) in files.items():
                np.lib.format.open_memmap(temporary / f'{name}.npy', mode='w+', dtype=dtype, shape=shape).flush()
            try:
                os.rename(temporary, self.folder)
            except OSError:
                shutil.rmtree(temporary)
        for name, (shape, dtype) in files.items():
            path = self.folder / f'{name}.npy'
            try:
                np.load(path, mmap_mode='r')                                # in mode r+ NumPy fills up a file that is too short, with zeros
                array = np.load(path, mmap_mode='r+')
                if array.shape != shape or array.dtype != dtype:
                    raise ValueError(f'{array.dtype} {array.shape} instead of {np.dtype(dtype)} {shape}')
            except (ValueError, EOFError, OSError) as error:
                raise SystemExit(f'{path}: not readable ({error}); delete {self.folder} to make it anew')
            setattr(self, name, array)

    def put(self, row, candidates, scores=None):
        self.candidates[row] = candidates
        if self.scored:
            self.scores[row] = scores
        self.done[row] = 1

    def attach(self, batch, rows):
        """The batch with candidates (B, N, J) int64 and target_scores (B, N, J) fp32 of its sequences, numbers `rows` (at most B,)"""
        missing = [row for row in rows if not self.done[row]]
        if missing:
            raise ValueError(f'{self.folder}: sequences {missing} were never prepared')
        candidates = np.full((len(batch.tokens), *self.candidates.shape[1:]), -1, dtype=np.int64)
        candidates[:len(rows)] = self.candidates[rows]
        scores = np.full(candidates.shape, np.nan, dtype=np.float32)
        if self.scored:
            scores[:len(rows)] = self.scores[rows]
        return batch._replace(candidates=torch.from_numpy(candidates), target_scores=torch.from_numpy(scores))


def corpus_idf(tokens, m, V):
    """idf (V,) of BM25 over all chunks of m tokens of a training split: nothing of the text that is read later is in it."""
    n, df = len(tokens) // m, np.zeros(V)
    for chunks in np.array_split(np.asarray(tokens[:n * m]).reshape(n, m), -(-n // 2 ** 14) or 1):
        _, terms, _ = count(chunks.ravel().astype(np.int64), np.full(len(chunks), m))            # each term once for each chunk
        df += np.bincount(terms, minlength=V)
    return idf_lucene(n, df)


def prepare(config, folder, key, texts, rows, reference=None, held_out=None, autocast=nullcontext, device='cpu', rank=0, world=1, barrier=lambda: None,
            progress=lambda items, *_, **__: items, say=print):
    """
    The supervision of those sequences that a run will visit: candidates by BM25, and for retriever sem the reference LM's scores.

    folder, key     of the corpus; what the result depends on beside config and the sequences: text
    texts, rows     data.Batches and the numbers of its sequences that are wanted, in order of need
    reference       has read and log_p (target_scores); held_out(document) is False for documents that it was trained on: they are not scored
    returns         a Supervision that has these rows; those that were there before are not made again
    """
    N, m, w = config.block_size // config.chunk_size, config.chunk_size, config.window // config.chunk_size
    scored = config.retriever == 'sem'
    with autocast():
        rounded = scored and torch.is_autocast_enabled(torch.device(device).type)
    facts = [key, 'int32, bm25 lucene 1.2 0.75', config.block_size, m, w, config.n_candidates, texts.n_rows, texts.fold, config.score_every if scored else 0, rounded]
    path = Path(folder) / f'candidates-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}'
    if rank == 0:
        Supervision(path, texts.n_rows, N, config.n_candidates, scored)
    barrier()
    result = Supervision(path, texts.n_rows, N, config.n_candidates, scored)
    rows = list(dict.fromkeys(rows))
    todo = [row for row in rows if not result.done[row]]
    own = [row for row in rows[rank::world] if not result.done[row]]        # whatever the other processes have done by now
    J, chunks_each = config.n_candidates, N / config.score_every / 2 if held_out else N / config.score_every
    if todo and scored:
        say(f'scoring {len(todo):,} sequences of {config.block_size:,} tokens: at most {J} candidates for each of about {len(todo) * chunks_each:,.0f} chunks, '
            f'{len(todo) * chunks_each * 2 * m * (J + 2) / 1e6:,.1f}M tokens for the reference LM; kept in {path}')
    for row in progress(own, 'reference LM scores' if scored else 'candidates by BM25', quiet=rank > 0):
        batch = texts.take(np.array([row]), seed=0)
        chunks, chunk_doc = batch.tokens[0, :N * m].view(N, m).numpy(), doc_of_chunks(batch.doc[:1], m)[0].numpy()
        found, scores = mine(chunks, chunk_doc, w, J), None
        if scored:
            to_score = np.arange(N) % config.score_every == 0
            if held_out:
                to_score &= np.array([d >= 0 and held_out(d) for d in chunk_doc])
            with autocast():
                scores = target_scores(reference, torch.from_numpy(chunks).to(device), torch.from_numpy(np.where(to_score[:, None], found, -1)).to(device))
            scores = scores.float().cpu().numpy()
        result.put(row, found, scores)
    barrier()
    if scored and all(np.isnan(result.scores[row]).all() for row in rows):
        raise SystemExit('no chunk has a score, so nothing would teach the retriever: documents are too short, or the reference LM was trained on all of them')
    return result


# ----------------------------------------------------------------------------------------------------------------------
# the model

class RPT(nn.Module):
    """A sliding-window language model whose upper layers read chunks that its lower layers found in the same document."""

    def __init__(self, config):
        super().__init__()
        self.config, self.D = config, config.n_embd // config.n_head
        seed = torch.randint(2 ** 48, (), device='cpu').item()              # drawn first, so all settings of this file draw the same
        C, n_upper = config.n_embd, config.n_layer - config.n_layer // 2
        n_cca = 0 if config.retriever == 'none' else config.n_cca or n_upper
        self.embedding = nn.Embedding(config.vocab_size, C)                 # also the output embedding
        self.lower = nn.ModuleList(Block(config) for _ in range(config.n_layer - n_upper))
        self.upper = nn.ModuleList(UpperBlock(config, reads=i >= n_upper - n_cca) for i in range(n_upper))
        self.retriever = Retriever(config) if config.retriever in ('sem', 'lex') else None
        self.neighbor_encoder = NeighborEncoder(config) if n_cca else None
        self.norm = RMSNorm(C)
        self.register_buffer('idf', torch.zeros(config.vocab_size) if config.retriever == 'bm25' else None)      # corpus_idf
        self.n_neighbors = config.n_neighbors   # at test time any number
        self.reads = 'own'                      # eval.py tries others: shuffled (of the next sequence of the batch), none
        for name, p in self.named_parameters():                             # GPT-2's: what a block adds starts small
            if p.dim() == 2:
                torch.manual_seed(seed + zlib.crc32(name.encode()))         # of each name, so what two settings share begins alike
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if name.endswith('proj.weight') else 0.02)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def permitted(self, chunk_doc):
        """Chunk i may find chunk k (B, N, N): k <= i - w, w chunks being a window, in the same document; so k + 1 < i, as w > 1."""
        w, i = self.config.window // self.config.chunk_size, torch.arange(chunk_doc.size(1), device=chunk_doc.device)
        same = (chunk_doc[:, :, None] == chunk_doc[:, None, :]) & (chunk_doc >= 0)[:, :, None]
        return same & (i[None, :] <= i[:, None] - w)

    def scores(self, q, k):
        """s_q of all chunks for all chunks: q (B, n, C), k (B, N, C) -> (B, n, N) fp32"""
        with torch.autocast(q.device.type, enabled=False):                  # bf16 would tie the top K
            return fp32(q) @ fp32(k).transpose(1, 2) / q.size(-1) ** 0.5

    def best(self, scores, permitted):
        """(B, n, N) twice -> the K best chunks (B, n, K), best first, -1 where there are no more"""
        top = scores.detach().masked_fill(~permitted, -math.inf).topk(min(self.n_neighbors, scores.size(2)), dim=2)
        return F.pad(top.indices.masked_fill(top.values == -math.inf, -1), (0, self.n_neighbors - top.indices.size(2)), value=-1)

    def trained_idf(self):
        if not self.idf.any():
            raise ValueError('retriever bm25 has no idf yet: model.idf.copy_(corpus_idf(...)) of its training corpus')
        return self.idf.double().cpu().numpy()

    def found_by_bm25(self, tokens, doc):
        """RETRO at test time: the K best chunks for c_i alone, idf from the training corpus. (B, T) twice -> (B, N, K)"""
        m, w = self.config.chunk_size, self.config.window // self.config.chunk_size
        found = [mine(t[:len(t) // m * m].view(-1, m).numpy(), d.numpy(), w, self.n_neighbors, target=False, idf=self.trained_idf())
                 for t, d in zip(tokens.cpu(), doc_of_chunks(doc, m).cpu())]
        return torch.from_numpy(np.stack(found)).to(tokens.device)

    def neighbors(self, x, E, found, chunk_doc):
        """
        What the chunks read: x (B, N, m, C) their tokens, E (B, N, m, C) the tokens that are fetched, found (B, N, K)
        returns (B, N, K, 2m, C), gated: each chunk that was found, and the one after it
        """
        B, N, K = found.shape
        k = torch.stack([found, found + 1], dim=-1).clamp(0, N - 1) + N * torch.arange(B, device=x.device)[:, None, None, None]
        pairs = E.flatten(0, 1).index_select(0, k.flatten()).view(B * N, K, 2 * self.config.chunk_size, -1)
        pairs = self.neighbor_encoder.augment(pairs, x.flatten(0, 1)).unflatten(0, (B, N))
        if not self.config.gate:
            return pairs
        g = self.neighbor_encoder.weigh(pairs.mean(3).flatten(1, 2), self.gate_mask(found, chunk_doc))
        return pairs * g.view(B, N, K, 1, 1).to(pairs)

    def gate_mask(self, found, chunk_doc):
        """Which neighbors the gate of a neighbor looks at: itself, better ones of the chunk, those of the w - 1 chunks before. (B, N K, N K)"""
        (_, N, K), w = found.shape, self.config.window // self.config.chunk_size
        place = torch.arange(N * K, device=found.device)
        i = place // K
        near = (place[None, :] <= place[:, None]) & (i[None, :] > i[:, None] - w)
        doc = chunk_doc.repeat_interleave(K, dim=1)                         # (B, N K)
        there = (found >= 0).flatten(1)[:, None, :] & (doc[:, :, None] == doc[:, None, :])
        return near & there | torch.eye(N * K, dtype=torch.bool, device=found.device)

    def encode(self, tokens, doc=None, given=None, use=None):
        """
        tokens (B, T); doc (B, T) their documents, None: all of one
        given (B, N, K), use (B, N) bool: chunks that read these and not what they find themselves, -1: none; use None: all
        returns f (B, T, C), the states that say the next token; s_q (B, N, N) or None; what was read (B, N, K) or None
        """
        config, T, m = self.config, tokens.size(1), self.config.chunk_size
        N, turns = T // m, rope(torch.arange(T, device=tokens.device), self.D)
        x = F.dropout(self.embedding(tokens), config.dropout, self.training)
        for block in self.lower:
            x, _ = block(x, turns)
        read = scores = found = None
        if config.retriever != 'none' and N and self.reads != 'none':
            chunks = x[:, :N * m].unflatten(1, (N, m))                      # (B, N, m, C)
            doc = torch.zeros_like(tokens) if doc is None else doc
            chunk_doc, E, found = doc_of_chunks(doc, m), chunks, given
            if self.retriever:
                E, q, k = self.retriever(chunks)
                scores = self.scores(q, k)
                if use is not None or given is None:
                    found = self.best(scores, self.permitted(chunk_doc))
                if use is not None:
                    found = torch.where(use[..., None], given, found)
            elif given is None:
                found = self.found_by_bm25(tokens, doc)
            if self.reads == 'shuffled':
                if len(E) == 1:
                    raise ValueError('reads shuffled: the neighbors come from the next sequence of the batch, and there is only one')
                E = E.roll(-1, 0)
            neighbors, valid = self.neighbors(chunks, E, found, chunk_doc), found >= 0
            after = F.pad(doc[:, m - 1:], (0, (N + 1) * m - 1 - T), value=-1).unflatten(1, (N, m))       # (B, N, m) documents of those that read
            may_read = after == chunk_doc[..., None]                        # those of another document may not
            read = lambda cca, x: cca(x, neighbors, valid, may_read)
        for block in self.upper:
            x, _ = block(x, turns, read=read)
        return self.norm(x), scores, found

    def nll(self, f, targets):
        """The sum of -log P of targets (...), -1 does not count, after f (..., C)."""
        return CrossEntropy.apply(fp32(f).reshape(-1, f.size(-1)), fp32(self.embedding.weight), targets.reshape(-1), torch.is_grad_enabled())

    def say(self, f):
        """log P of all words: f (..., C) -> (..., V) fp32"""
        with torch.autocast(f.device.type, enabled=False):
            return (fp32(f) @ fp32(self.embedding.weight).T).log_softmax(-1)

    @torch.no_grad()
    def log_p(self, f, tokens):
        """log P of tokens (...) after f (..., C); a few rows of logits at a time, for the cache."""
        parts = []
        with torch.autocast(f.device.type, enabled=False):
            for some, w in zip(fp32(f).reshape(-1, f.size(-1)).split(CrossEntropy.R), tokens.reshape(-1, 1).split(CrossEntropy.R)):
                z = some @ fp32(self.embedding.weight).T                    # (R, V)
                z -= z.amax(1, keepdim=True)
                parts.append(z.gather(1, w)[:, 0] - z.exp_().sum(1).log())
        return torch.cat(parts).view(tokens.shape)

    def check(self, tokens):
        """ValueError unless tokens are (B, t) ids of the tokenizer."""
        if tokens.dim() != 2 or tokens.size(1) < 1:
            raise ValueError(f'tokens {tuple(tokens.shape)}: (B, t) is needed, t of 1 or more')
        if not tokens.is_cuda and not 0 <= tokens.min() <= tokens.max() < self.config.vocab_size:       # on a GPU it would wait
            raise ValueError(f'ids {tokens.min()} to {tokens.max()}: the tokenizer has 0 to {self.config.vocab_size - 1}')

    def schedule(self, progress):
        """-> p_ss, the chance that a chunk reads what the teacher chose (§3.4); α and τ of the ranking loss (§3.3)"""
        config = self.config
        p_ss = dict(annealed=0.5 * (1 + math.cos(math.pi * min(1, progress / 0.9))), always=1.0, never=0.0)[config.teacher]
        return p_ss, config.alpha * min(1, progress / 0.2), 1 + (config.tau - 1) * progress

    def forward(self, batch, progress):
        """
        The training loss of one micro-batch; in eval mode the language model's loss, with its own retrieval.

        batch      tokens, targets, doc (B, T) int64 (targets -1: not predicted) and seed, from which all randomness comes;
                   in training also candidates (B, N, J) and target_scores (B, N, J) (Supervision.attach)
        progress   step / max_steps
        returns    loss () in nats per token, and a dict of what to log
        """
        config, given, use = self.config, None, None
        if self.training and config.dropout:
            torch.manual_seed(batch.seed)
        if self.training and config.retriever != 'none':
            if batch.candidates is None:
                raise ValueError(f'retriever {config.retriever} trains on batches with candidates: prepare and Supervision.attach make them')
            generator = torch.Generator(batch.tokens.device).manual_seed(batch.seed)
            p_ss, alpha, tau = self.schedule(progress)
            candidates, s_t = batch.candidates, batch.target_scores
            by_rank = -torch.arange(candidates.size(2), device=s_t.device).to(s_t)         # as BM25 has them
            if config.retriever == 'lex':                                   # RPT-Lex: all candidates are positives, the better the higher
                s_t = (1 + by_rank / candidates.size(2)).expand_as(s_t)
            # §3.4: the teacher gives the K best positives, or as many as there are; where nothing was scored, BM25's first K
            wanted = torch.where(s_t.isnan(), by_rank, s_t.masked_fill(s_t <= 0, -math.inf)).masked_fill(candidates < 0, -math.inf)
            top = wanted.topk(self.n_neighbors, dim=2)
            given = candidates.gather(2, top.indices).masked_fill(top.values == -math.inf, -1)          # (B, N, K)
            if config.retriever != 'bm25':
                use = torch.rand(given.shape[:2], device=given.device, generator=generator) < p_ss
        elif config.retriever == 'bm25' and self.reads != 'none':           # outside of encode, which may be compiled
            given = self.found_by_bm25(batch.tokens, batch.doc)
        f, scores, found = self.encode(batch.tokens, batch.doc, given, use)
        n = (batch.targets >= 0).sum().clamp(min=1)
        loss, log = self.nll(f, batch.targets) / n, {}
        if self.training and self.retriever:
            permitted = self.permitted(doc_of_chunks(batch.doc, config.chunk_size))
            ranking, ndcg, ranked = ranking_loss(scores, permitted, candidates, s_t, tau)
            log = {'lm_loss': loss.detach(), 'ret_loss': ranking.detach(), 'ndcg': ndcg, 'ranked': ranked}
            loss = loss + alpha * ranking
        return loss, log

    @torch.no_grad()
    def log_probs(self, tokens):
        """
        log P(next token | the tokens so far). ValueError for anything but tokens (B, t) int64, any t >= 1; they are one document.
        returns (B, t, V) fp32, each row sums to one
        """
        self.check(tokens)
        return self.say(self.encode(tokens)[0])

    def read(self, tokens, past=None, rows=None):
        """
        As a plain Transformer-XL (retriever none), piece by piece: tokens (n, t) come after those of an earlier call, whose rows
        are chosen by `rows` (n,); one past may be gone on from many times. -> f (n, t, C), the new past (position, kv of each layer)
        """
        start, kvs = (0, [None] * self.config.n_layer) if past is None else past
        if rows is not None:
            kvs = [(k[rows], v[rows]) for k, v in kvs]
        x, turns, kept = self.embedding(tokens), rope(start + torch.arange(tokens.size(1), device=tokens.device), self.D), []
        for block, kv in zip([*self.lower, *self.upper], kvs):
            x, kv = block(x, turns, kv)
            kept.append(kv)
        return self.norm(x), (start + tokens.size(1), kept)

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """
        log_probs piece by piece: tokens (B, t) come next in a text, any t >= 1; state is what the last call returned. It holds, for each
        layer, the keys and values of the window; of the unfinished chunk the lower states; of each finished chunk its key and, in the
        CPU's memory, its tokens E; of the last w chunks what the gate looks at; and the neighbors that are being read.
        A state is continued once (copy.deepcopy keeps one): ValueError the second time.
        returns log_probs (B, t, V) and the new state
        """
        config, m, parts = self.config, self.config.chunk_size, []
        self.check(tokens)
        old = state or SimpleNamespace(B=len(tokens), n=0, past=[None] * config.n_layer, chunk=None, ids=tokens[:, :0], keys=None, store=[],
                                       pooled=None, found=None, reading=None)
        if old.past is None or old.B != len(tokens):
            raise ValueError('this state was continued before' if old.past is None else f'a state of {old.B} texts, tokens of {len(tokens)}')
        if self.reads == 'shuffled':
            raise ValueError('stream reads its own text: reads own or none')
        state, old.past = SimpleNamespace(**vars(old)), None                # the new one goes on with the same lists
        while tokens.size(1):
            place = (state.n + 1) % m                                       # in the group that reads together
            step = m - place if config.retriever != 'none' else config.window // 2
            now, tokens = tokens[:, :step], tokens[:, step:]
            x, turns = self.embedding(now), rope(state.n + torch.arange(now.size(1), device=now.device), self.D)
            for i, block in enumerate(self.lower):
                x, state.past[i] = block(x, turns, state.past[i])
            if config.retriever != 'none':
                chunk = x if state.chunk is None else torch.cat([state.chunk, x], dim=1)                # (B, s, C)
                if not self.retriever:                                      # BM25 reads tokens
                    state.ids = torch.cat([state.ids, now], dim=1)
                if place == 0:                                              # the first token completes a chunk
                    self.remember(state, chunk[:, :m])
                    chunk = chunk[:, m:]
                state.chunk = chunk
            reading = None if self.reads == 'none' else state.reading
            for i, block in enumerate(self.upper):
                read = reading and (lambda cca, x: cca.read(x, place, *reading[i]))
                x, state.past[len(self.lower) + i] = block(x, turns, state.past[len(self.lower) + i], read)
            state.n += now.size(1)
            parts.append(self.say(self.norm(x)))
        return torch.cat(parts, dim=1), state

    def remember(self, state, chunk):
        """A chunk (B, m, C) is complete: it can be found from now on, and finds what the next tokens read."""
        i, m, w, K = len(state.store), self.config.chunk_size, self.config.window // self.config.chunk_size, self.n_neighbors
        B, M, E = len(chunk), max(0, i - w + 1), chunk                      # M chunks may be found
        if self.retriever:
            E, q, k = self.retriever(chunk[:, None])
            if state.keys is None or i == state.keys.size(1):               # twice the room each time, so that all copies together are few
                room = k.new_zeros(B, max(16, i), k.size(2))
                state.keys = room if state.keys is None else torch.cat([state.keys, room], dim=1)
            state.keys[:, i] = k[:, 0]
            found = self.best(self.scores(q, state.keys[:, :M]), torch.ones(B, 1, M, dtype=torch.bool, device=q.device))[:, 0]      # (B, K)
            E = E[:, 0]
        else:
            texts, idf = state.ids[:, :(i + 1) * m].view(B, i + 1, m).cpu().numpy(), self.trained_idf()
            found = [BM25(list(text[:M]), idf=idf).search_many(text[i:], K)[0] for text in texts]
            found = torch.from_numpy(np.concatenate(found)).to(chunk.device)
        state.store.append(E.cpu())
        two = lambda b, k: torch.cat([state.store[k][b], state.store[min(k + 1, i)][b]])                # (2m, C)
        pairs = torch.stack([two(b, k) for b, ks in enumerate(found.clamp(min=0).tolist()) for k in ks]).unflatten(0, (B, K))
        pairs = self.neighbor_encoder.augment(pairs.to(chunk.device), chunk)                            # (B, K, 2m, C)
        if self.config.gate:
            last = lambda n, old, new: (new if old is None else torch.cat([old, new], dim=1))[:, -n:]
            state.pooled, state.found = last(w * K, state.pooled, pairs.mean(2)), last(w, state.found, found[:, None])
            mask = self.gate_mask(state.found, found.new_zeros(state.found.shape[:2]))
            g = self.neighbor_encoder.weigh(state.pooled, mask)[:, -K:]
            pairs = pairs * g[..., None, None].to(pairs)
        state.reading = [(block.cca.keys_values(pairs), found >= 0) if block.cca else None for block in self.upper]

    def multiply_adds(self):
        """Multiply-adds of a training step per token: what the definitions need, thrice for the way back."""
        c, C, m, T = self.config, self.config.n_embd, self.config.chunk_size, self.config.block_size
        block, n_cca = c.window // 2, sum(b.cca is not None for b in self.upper)
        inner = self.upper[0].mlp.proj.in_features
        seen = sum(block * min(n, 1) + (min(block, T - n * block) + 1) / 2 for n in range(-(-T // block))) / -(-T // block)
        macs = c.n_layer * (4 * C * C + 2 * C * inner + 2 * C * seen)       # the matrices, and attention's two products
        if c.retriever != 'none':
            N, K = T // m, c.n_neighbors
            if self.retriever:
                macs += 4 * C * C + 2 * C * m + 2 * C * C / m + C * N / m   # tokens of a chunk over each other; W_Q, W_K; all pairs of chunks
            macs += 2 * K * (4 * C * C + 2 * C * 2 * m)                     # 2 K m tokens of neighbors for m tokens: over each other,
            macs += 2 * K * 2 * C * C + 2 * C * C + 2 * K * 2 * C * m       # over the chunk that asked;
            macs += (4 * K * C * C / m + 2 * K * C * K * c.window / m / m if c.gate else 0)              # the gate
            macs += n_cca * (2 * C * C + 2 * K * 2 * C * C + 2 * C * K * 2 * m)                          # cross-attention
        return 3 * (macs + C * c.vocab_size)


# ----------------------------------------------------------------------------------------------------------------------
# a tour

def naive_scores(reference, chunks, candidates):
    """target_scores by its definition: every pair is read from its first token on, the baseline too."""
    N, m = chunks.shape
    log_p = torch.full((N, 1 + candidates.size(1)), math.nan)
    i, slot = torch.cat([(candidates >= 0).any(1, keepdim=True), candidates >= 0], dim=1).nonzero(as_tuple=True)
    j = torch.where(slot == 0, i - 2, candidates[i, slot - 1])
    for some in torch.arange(len(i)).split(32):
        texts = torch.cat([chunks[j[some]], chunks[j[some] + 1], chunks[i[some]], chunks[i[some] + 1]], dim=1)     # (n, 4m)
        log_p[i[some], slot[some]] = reference.log_p(reference.read(texts)[0][:, 3 * m - 1:-1], texts[:, 3 * m:]).mean(1)
    return log_p[:, 1:] - log_p[:, :1]


@torch.no_grad()
def compare_scoring(reference, chunks, w, J):
    """The keys and values of (c_j, c_j+1) once for all that ask, against every pair from its first token: time beside tokens."""
    candidates = torch.from_numpy(mine(chunks.numpy(), np.zeros(len(chunks), dtype=int), w, J))
    times, results = {target_scores: [], naive_scores: []}, {}
    for _ in range(4):
        for f in times:
            start = time.perf_counter()
            results[f] = f(reference, chunks, candidates)
            times[f].append(time.perf_counter() - start)
    ratio = sorted(slow / fast for fast, slow in list(zip(*times.values()))[1:])[1]
    asked = (candidates >= 0).any(1)
    pairs = (candidates >= 0).sum() + asked.sum()
    prefixes = len(set(candidates[candidates >= 0].tolist()) | set((asked.nonzero()[:, 0] - 2).tolist()))
    off = (results[target_scores] - results[naive_scores]).nan_to_num().abs().max()
    head, body = reference.config.n_embd * reference.config.vocab_size, reference.multiply_adds() / 3      # for each token
    of = lambda tokens, targets: tokens * (body - head) + targets * head
    print(f'scoring {J:2} candidates of {asked.sum()} chunks: x {ratio:.2f} as fast as pair by pair, which reads x {2 * pairs / (prefixes + pairs):.2f} '
          f'the tokens, x {of(4 * pairs, pairs) / of(2 * (prefixes + pairs), pairs):.2f} the multiply-adds; scores differ by {off:.0e}')
    return candidates, results[target_scores]


def compare_attention(config):
    """softmax_attention on a CPU in bf16, by the definition, against the fused kernel, forward and back, for two attentions of the model."""
    N, K, m, H, D = config.block_size // config.chunk_size, config.n_neighbors, config.chunk_size, config.n_head, config.n_embd // config.n_head
    block = config.window // 2
    for name, n, t, s in [('self-attention', config.block_size // block - 1, block, 2 * block), ('tokens of a neighbor', N * K, 2 * m, 2 * m)]:
        q, k, v = (torch.randn(n, length, H, D, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for length in (t, s, s))
        times = {softmax_attention: [], F.scaled_dot_product_attention: []}
        for _ in range(7):
            for f in times:
                start = time.perf_counter()
                f(q, k, v).sum().backward()
                times[f].append(time.perf_counter() - start)
        ratio = sorted(fused / ours for ours, fused in list(zip(*times.values()))[1:])[3]
        print(f'bf16 attention, {name}, {tuple(q.shape)} to {s} keys, forward and back: the fused kernel takes x {ratio:.2f} the time')


def tour():
    """What goes in, what comes out, and what retrieval costs: time beside multiply-adds."""
    torch.manual_seed(0)
    sizes = dict(block_size=2048, micro_batch=1, n_candidates=4)
    config = RPTConfig(**sizes)
    T, w = config.block_size, config.window // config.chunk_size
    tokens = torch.randint(config.vocab_size, (1, T + 1))
    reference = RPT(RPTConfig(**sizes, retriever='none', n_layer=2))
    for J in (20, 8, config.n_candidates):
        candidates, s_t = compare_scoring(reference, tokens[0, :T].view(-1, config.chunk_size), w, J)       # (N, J)
    batch = SimpleNamespace(tokens=tokens[:, :-1], targets=tokens[:, 1:], doc=torch.zeros(1, T, dtype=torch.long), seed=0,
                            candidates=candidates[None], target_scores=s_t[None])
    model = RPT(config)
    f, scores, found = model.eval().encode(batch.tokens)
    print(f'RPT, {sum(p.numel() for p in model.parameters()):,} parameters; tokens {tuple(batch.tokens.shape)} -> scores {tuple(scores.shape)}, '
          f'neighbors {tuple(found.shape)}; chunk 40 reads {found[0, 40].tolist()} and what follows them')
    some = batch.tokens[:, :600]
    log_probs, _ = model.stream(some)
    print(f'stream {tuple(log_probs.shape)}: {(log_probs - model.log_probs(some)).abs().max():.1e} from the full forward pass')
    loss, log = model.train()(batch, 0.5)
    print(f'loss {loss:.4f} on random tokens (ln V = {math.log(config.vocab_size):.4f}), ' + ', '.join(f'{k} {v:.3f}' for k, v in log.items()))

    compare_attention(config)
    print(f'\na training step against Transformer-XL, a sequence of {T:,}, in turns')
    runs = {}
    for name, change in {'Transformer-XL': dict(retriever='none'), 'RETRO': dict(retriever='bm25'), 'RPT': dict(), 'RPT, 4 neighbors': dict(n_neighbors=4)}.items():
        model = RPT(RPTConfig(**sizes, **change))
        runs[name] = model, torch.optim.AdamW(model.parameters(), fused=True), []
    for _ in range(6):
        for model, optimizer, times in runs.values():
            start = time.perf_counter()
            model(batch, 0.5)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
    base, _, plain = runs['Transformer-XL']
    for name, (model, _, times) in runs.items():
        ratios = sorted(y / x for x, y in zip(plain[1:], times[1:]))        # the first one warms up
        print(f'{name:20} time x {ratios[len(ratios) // 2]:.3f}, multiply-adds x {model.multiply_adds() / base.multiply_adds():.3f}   '
              f'({T / min(times):,.0f} tokens/s)')


if __name__ == '__main__':
    tour()
