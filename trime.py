"""
TRIME: a language model that is trained to look up its next word among the contexts it has just seen.

    Zexuan Zhong, Tao Lei and Danqi Chen, "Training Language Models with Memory Augmentation",
    EMNLP 2022, arXiv:2205.12674

A Transformer says the next word by comparing its state with one vector per word. TRIME lets the other contexts of
the batch take part: a context that was followed by "cat" is one more vector for "cat". Both kinds of vector stand
in one softmax and are trained together, the memories included. At test time the same formula reads memories of the
segment at hand, of the document so far, or of a whole corpus. Nothing else about the Transformer changes.

Where the paper is in this file
    Eq. 1        P(w | c) of a plain language model           TrimeLoss without memory; Embedding: adaptive softmax
    Eq. 2, 3, 4  local, long-term and external memory         accessible (training), TRIME.memories (testing)
    §3, Eq. 5    the training objective                       TrimeLoss
    §3           f, and g: the input of the last MLP          TRIME.encode
    §4.1-4.3     which batch makes which memory               batches; Algorithm 1: pack_order in data.py
    §4.3         p, local memory off in training              TRIME.forward
    §5.2         the first 5% of the steps by Eq. 1           TRIME.forward
    Eq. 6, 8, 9  the probabilities at test time (App. A)      mix
    Eq. 7        which memories, and the baselines'           Recipe
    App. D       windows that overlap at test time            TRIME.stream
    §5.2         the datastore and its search                 Datastore
    Table 9      the models                                   PRESETS
Not here: translation (§5.4) and SRU++ (App. E).

Letters used in the shape comments
    B segments     T tokens of one     C width        H heads      D width of one head     V vocabulary
    N = B*T        M memories          R rows of a block of queries             Q queries  K entries retrieved
The paper's: memory j is (c_j, x_j), key g(c_j) and word x_j: memory_targets in training, said at test time, values on disk.

Where we differ from the paper, and why
    RMSNorm and RoPE for LayerNorm and sinusoids, so that the three models of this house share one Transformer.
    AdamW and a cosine for all: NAG (the paper's 247M model) and the inverse square root (its 7M model) earn no code.
    §4.3's m = 1, one segment of each document: Algorithm 1 skips segments of the own document, and those that still meet in a
    batch do not see each other. Else at short T all neighbors are of the own document, and ext learns to read long memory.
    Long memory stops at a document's border. --no-same-document ignores documents in both, as the official code does.
    At test time each context stands in memory once; the official code has the window's tokens in local and in long memory.
    P' of Eq. 8 is over all memories, as the paper says; the official code has the external ones alone (eval.py --p-ext).
    The official code passes no gradient to memories on other GPUs; --gather-memory does, as the paper says.
    g starts small for ext: at a gain of 1, more than 90% of the probability lies on the other documents when they come in, and
    the words do not recover in hundreds of steps (results.md; the paper says "unstable").
    The datastore is searched in blocks of similar keys whose similarities are then exact; the paper: FAISS's product codes.

    $ python trime.py                     a tour and the cost of the memory, on a CPU
    $ python train.py --model trime
"""
import json
import math
import os
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass
class TRIMEConfig:
    vocab_size: int = 4096        # ids of the tokenizer; for bpe, how many to learn (ours)
    block_size: int = 512         # tokens of a segment, T (paper: 150 to 3,072)
    micro_batch: int = 4          # segments of a micro-batch, B: in-batch memories come from these (ours; paper: 8, its 7M model)
    n_layer: int = 4              # Transformer blocks (ours; paper: 8 to 16)
    n_head: int = 4               # attention heads, H (ours)
    n_embd: int = 256             # width, C (ours; paper: 128 to 1,024)
    n_inner: int = 0              # width inside the MLP; 0 is 4 C (paper: 4 C, its 150M model 2,100)
    cutoffs: str = ''             # adaptive softmax: first ids of the bands after the first, as 20000,60000; '' is none (official code)
    band_factor: int = 4          # each band's vectors are so much narrower than the last one's (official code: 4, its 150M model 1)
    dropout: float = 0.0          # on embeddings and on what each block adds (ours; official code: 0.1 to 0.3)
    memory: str = 'local'         # none, local, long or ext: the training memory (paper Table 1)
    plain: float = 0.05           # first share of the steps, trained without memory (paper section 5.2)
    p: float = 0.9                # chance that memory ext leaves out the own segment (paper section 4.3)
    bm25: bool = True             # memory ext packs similar segments together; else random ones (paper section 4.3, Table 11)
    memory_grad: bool = True      # back-propagate to the memories (paper section 3, Table 11)
    same_document: bool = True    # long memory is of the own document, ext's other segments of others (paper Eq. 3, 4.3; official code: no)
    gather_memory: bool = False   # memories of all processes together, not of one (official code: yes)
    stride: int = 0               # tokens scored per window when a text is longer than T; 0 is T/2 (paper: T/6.4 to T/2.3)

    def __post_init__(self):
        if self.memory not in ('none', 'local', 'long', 'ext'):
            raise ValueError(f'memory {self.memory!r} is not one of none, local, long, ext')
        if min(self.n_layer, self.n_head, self.n_embd, self.block_size, self.micro_batch) < 1:
            raise ValueError('n_layer, n_head, n_embd, block_size and micro_batch must be 1 or more')
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}; RoPE turns pairs')
        if not re.fullmatch(r'(\d+(,\d+)*)?', self.cutoffs) or self.band_factor < 1:
            raise ValueError(f'cutoffs {self.cutoffs!r} are ids with commas between, as 20000,60000; band_factor {self.band_factor} is 1 or more')
        if not 0 <= self.stride <= self.block_size:
            raise ValueError(f'stride {self.stride} does not lie between 0 and block_size {self.block_size}')
        if not (0 <= self.dropout < 1 and 0 <= self.plain <= 1 and 0 <= self.p <= 1):
            raise ValueError(f'dropout {self.dropout}, plain {self.plain} and p {self.p} are shares, from 0 to 1')


# The paper's models. Table 9: T, n_layer, n_embd, n_inner, tokens_per_step, lr (247M: ours), warmup, grad_clip, max_steps, and
# micro_batch = in-batch memories / T, which is also m, the number of consecutive segments (247M: 8, though Table 9 has m = 4).
# eval_every: ours. App. F: the 7M model's heads. Official code: other heads, cutoffs, band_factor, dropout (7M: ours, none), stride, weight_decay, beta2.
WIKITEXT103 = dict(data='wikitext103', tokenizer='word', vocab_size=267_744, cutoffs='20000,60000', eval_every=2000)
ADAM = dict(weight_decay=0.01, beta2=0.98)
PRESETS = {
    'tiny': {},                   # the defaults: minutes on two CPU cores
    '7m': dict(WIKITEXT103, **ADAM, block_size=3072, micro_batch=8, n_layer=8, n_head=4, n_embd=128, stride=512,
               tokens_per_step=24_576, lr=5e-4, warmup=0.04, grad_clip=0.0, max_steps=200_000),
    '150m': dict(WIKITEXT103, **ADAM, block_size=150, micro_batch=60, n_layer=16, n_head=5, n_embd=410, n_inner=2100,       # paper: 10 heads
                 band_factor=1, dropout=0.1, stride=64, tokens_per_step=36_000, lr=2.5e-4, warmup=0.0, grad_clip=0.0, max_steps=400_000),
    '247m': dict(WIKITEXT103, block_size=3072, micro_batch=8, n_layer=16, n_head=8, n_embd=1024, dropout=0.3, stride=512,
                 tokens_per_step=73_728, lr=5e-4, warmup=0.056, grad_clip=0.1, max_steps=286_000),
    'enwik8': dict(ADAM, data='enwik8', tokenizer='bytes', vocab_size=257, block_size=512, micro_batch=24, n_layer=12, n_head=8, n_embd=512,
                   dropout=0.1, stride=80, same_document=False, tokens_per_step=49_152, lr=2.5e-4, warmup=0.0, grad_clip=0.0,
                   max_steps=400_000, eval_every=2000),
}


def batches(config):
    """The batching of data.py that builds this config's memories: segments (§4.1), consecutive (§4.2), packed (§4.3, App. B)."""
    return {'none': 'segments', 'local': 'segments', 'long': 'consecutive', 'ext': 'packed' if config.bm25 else 'segments'}[config.memory]


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


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions, over the whole segment."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.block = config.n_head, config.block_size
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, turns, past=None):
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, -1)
        q, k = rotate(qkv[:, :, :2].flatten(2, 3), turns).chunk(2, dim=2)   # 2 x (B, T, H, D)
        v = qkv[:, :, 2]                                                    # (B, T, H, D)
        if past is not None:                                                # the keys and values of earlier tokens
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        y = attend(q, k, v, self.block, self.block)                         # (B, T, H, D)
        return self.proj(y.reshape(B, T, C)), (k, v)


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


# ----------------------------------------------------------------------------------------------------------------------
# what is new in TRIME

class Embedding(nn.Module):
    """
    The vectors of the words, the same for reading and for saying them. With cutoffs they are adaptive (Baevski & Auli 2019):
    ids are in order of frequency and cut into bands; those of band i have C / band_factor^i numbers and a matrix W_i that
    widens them to C, and only the words of band 0 stand in the softmax themselves, beside one row for each band i:

        P(w) = P_head(w)  in band 0,     P(w) = P_head(band i) · P_i(w)  in band i,     P_i(w) ∝ exp(table_i[w] · W_iᵀ f)

    Without cutoffs band 0 is everything: the plain tied embedding. (Band 0 has no W_0 of its own; the papers' code has.)
    """

    def __init__(self, config):
        super().__init__()
        C, V, cutoffs = config.n_embd, config.vocab_size, [int(cutoff) for cutoff in config.cutoffs.split(',') if cutoff]
        ends = [cutoff for cutoff in cutoffs if cutoff < V] + [V]           # a small vocabulary has fewer bands
        if sorted({0, *cutoffs}) != [0] + cutoffs or C < config.band_factor ** (len(ends) - 1):
            raise ValueError(f'cutoffs {config.cutoffs} do not rise from above 0, or n_embd {C} leaves the last band no width')
        self.bands = list(zip([0] + ends, ends))                            # [first id, last id + 1)
        widths = [C // config.band_factor ** i for i in range(len(ends))]
        rows = [ends[0] + len(ends) - 1] + [end - start for start, end in self.bands[1:]]    # band 0 has the bands' rows too
        self.tables = nn.ParameterList(torch.empty(n, width) for n, width in zip(rows, widths))
        self.widen = nn.ModuleList(nn.Linear(width, C, bias=False) for width in widths[1:])

    def forward(self, tokens):
        """(B, T) -> (B, T, C)"""
        (_, end), *tails = self.bands
        x = F.embedding(tokens.clamp(max=end - 1), self.tables[0])
        for (start, end), table, widen in zip(tails, self.tables[1:], self.widen):
            here = (tokens >= start) & (tokens < end)
            x[here] = widen(F.embedding(tokens[here] - start, table)).type_as(x)
        return x

    def row_and_tail(self, f, w):
        """
        The two factors for words w (N,) after f (N, C): the row of tables[0] that stands for each, its own or its band's (N,), and
        log P_i(w), 0 in band 0 (N,)
        """
        row, log_p = w.clone(), f.new_zeros(len(w))
        for i, ((start, end), table, widen) in enumerate(zip(self.bands[1:], self.tables[1:], self.widen)):
            here = ((w >= start) & (w < end)).nonzero()[:, 0]
            row[here] = self.bands[0][1] + i
            logits = f[here] @ widen.weight @ table.T                       # (n, words of the band)
            log_p = log_p.index_put((here,), -F.cross_entropy(logits, w[here] - start, reduction='none'))
        return row, log_p

    def log_mass(self, f):
        """What stands under the exp of Eq. 1 for all words, once band i is spread over its own: f (..., C) -> (..., V)"""
        head, (_, n) = f @ self.tables[0].T, self.bands[0]
        tails = [head[..., n + i, None] + (f @ widen.weight @ table.T).log_softmax(-1)
                 for i, (table, widen) in enumerate(zip(self.tables[1:], self.widen))]
        return torch.cat([head[..., :n]] + tails, dim=-1)

    def say(self, f, w):
        """-> log Σ_v exp(log_mass of v) and log_mass of w, for words w (N,) after f (N, C): all that Eq. 6 needs of the words"""
        head, (row, tail) = f @ self.tables[0].T, self.row_and_tail(f, w)   # (N, rows): the sum over all is the sum over these
        return head.logsumexp(-1), head.gather(1, row[:, None])[:, 0] + tail


def accessible(mode, i, j, T, doc_i, doc_j, local=True, documents=True):
    """
    Which memory may serve which query: True where query i may use memory j. Memory j is (c_j, x_j), the context that
    ends at position j and the token that follows it; so memory i itself holds i's answer and is never allowed.

    i, j           (R, 1), (1, M)  positions, counted through the segments of the batch in stream order
    doc_i, doc_j   (R, 1), (1, M)  their documents
    local          False switches the own segment off (§4.3); for mode ext only
    documents      False: as if they had no borders
    returns        (R, M) bool
    """
    own, earlier = i // T == j // T, j < i
    if mode == 'local':                                                     # Eq. 2: earlier in the same segment
        return own & earlier
    if mode == 'long':                                                      # Eq. 3: and in earlier segments of the document
        return earlier & (own | (doc_i == doc_j)) if documents else earlier
    other = ~own & (doc_i != doc_j) if documents else ~own                  # ext, §4.3: all of the other segments, of other
    return other | own & earlier if local else other                        # documents (m = 1), and the past of the own one


def group_logsumexp(x, group, n):
    """log Σ exp(x) of each of n groups. x, group (few,) -> (n,), -inf for a group with no member"""
    top = x.new_full((n,), -1e30).scatter_reduce_(0, group, x, 'amax')      # each its own: no group underflows beside another
    return x.new_zeros(n).index_add_(0, group, (x - top[group]).exp()).log() + top


def exponentials(x):
    """x (R, n) becomes exp(x - top) in place; returns top and log Σ exp(x), (R, 1) each. A row may be -inf throughout."""
    top = x.amax(1, keepdim=True).clamp(min=-1e30)
    return top, x.sub_(top).exp_().sum(1, keepdim=True).log() + top


class TrimeLoss(torch.autograd.Function):
    """
    The TRIME objective, Eq. 5. The next word w can be said by its row of the output embedding, and also by every
    memory that was itself followed by w:

        P(w | c)  ∝  exp(E_w · f(c))  +  Σ_{j: x_j = w} exp(sim(g(c), g(c_j))),      sim(q, k) = q · k / sqrt(C)

    f, E             (N, C)  (V, C)  f(c) for every query, and the output embedding
    row, tail        (N,)    the row of E for w, its own or its band's, and log P_i(w) in that band (Embedding).
                             A band's words share its row, and their P_i sum to 1: the sum over all rows is that over all words
    query, key       (N, C)  (M, C)  g at the queries and at the memories; both None for Eq. 1, no memory
    targets          (N,)    w, the word to predict; -1 counts neither as a query nor as a memory
    memory_targets   (M,)    x_j, the word that followed memory j
    allowed          rows -> (lo, hi, mask (R, hi - lo)): these queries may use the memories lo..hi-1 where mask is True
    with_grad        False where nobody will ask for gradients

    returns the mean negative log likelihood in nats per token, and two figures that carry no gradient: the mean share
    of the probability that lies on memories, and the mean loss if there were none.

    Neither (N, V) nor (N, M) is ever held: queries are taken in blocks of R rows. The loss is a mean over queries, so
    the gradient of a block is known as soon as the block is, and is computed right there, in the forward pass:

        dL/d(E_v · f) = P_v - W_v      P_v, P_j: the shares of word v and of memory j in the sum over everything
        dL/d(sim_j)   = P_j - W_j      W_v, W_j: their shares in the sum over what says w; zero for all else
    """
    R = 512

    @staticmethod
    def forward(ctx, f, E, row, tail, query, key, targets, memory_targets, allowed, with_grad):
        n, C = (targets >= 0).sum().clamp(min=1), f.size(1)
        df, dE, dt, dq, dk = (torch.zeros_like(t) if with_grad and t is not None else None for t in (f, E, tail, query, key))
        nll, share, plain = f.new_zeros(3)                                  # sums over the queries
        for a in range(0, len(f), TrimeLoss.R):
            rows = slice(a, min(a + TrimeLoss.R, len(f)))
            weight = (targets[rows] >= 0)[:, None].to(f) / n                # (R, 1) the mean is over real targets
            w, r = targets[rows, None], row[rows, None]                     # (R, 1)
            words = f[rows] @ E.T                                           # (R, V) the logits
            log_w = log_word = words.gather(1, r) + tail[rows, None]        # (R, 1) first term of Eq. 5
            top, log_all = exponentials(words)                              # the sum over everything, so far over the words
            plain += ((log_all - log_word) * weight).sum()
            if key is not None:
                lo, hi, mask = allowed(rows)
                q = query[rows] / C ** 0.5
                memories = (q @ key[lo:hi].T).masked_fill_(~mask, float('-inf'))    # (R, hi - lo) the similarities
                i, j = (mask & (memory_targets[lo:hi] == w)).nonzero(as_tuple=True)         # (few,) the pairs with x_j = w
                say_w = memories[i, j]                                      # (few,)
                log_w = torch.logaddexp(log_word, group_logsumexp(say_w, i, len(w))[:, None])       # second term of Eq. 5
                top_memory, log_memories = exponentials(memories)
                log_all = torch.logaddexp(log_all, log_memories)
                share += ((log_memories - log_all).exp() * weight).sum()
            nll += ((log_all - log_w) * weight).sum()

            if with_grad:
                dz = words.mul_(weight * (top - log_all).exp())             # P_v
                W_w = weight * (log_word - log_w).exp()                     # (R, 1)
                dz.scatter_add_(1, r, -W_w)                                 # - W_v
                dt[rows] = -W_w[:, 0]                                       # the tail is in log_word alone
                df[rows] = dz @ E
                dE.addmm_(dz.T, f[rows])
                if key is not None:
                    ds = memories.mul_(weight * (top_memory - log_all).exp())       # P_j
                    ds[i, j] -= weight[i, 0] * (say_w - log_w[i, 0]).exp()  # - W_j
                    dq[rows] = ds @ key[lo:hi] / C ** 0.5
                    if ctx.needs_input_grad[5]:
                        dk[lo:hi].addmm_(ds.T, q)
        ctx.grads = df, dE, None, dt, dq, dk
        ctx.mark_non_differentiable(share, plain)
        return nll, share, plain

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, *_):
        grads = [None if d is None or not needed else d * d_loss for d, needed in zip(ctx.grads, ctx.needs_input_grad)]
        return *grads, None, None, None, None


class Gather(torch.autograd.Function):
    """(N, ...) of each process -> (world·N, ...), in their order, with the gradient that dist.all_gather does not have."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        d = d.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(d)                                                  # every process has used our rows
        return d.chunk(dist.get_world_size())[dist.get_rank()]


METRIC = {'ext': 'ip', 'knn': 'l2'}                                        # how the datastore is searched for each


class Recipe(NamedTuple):
    """
    How words and memories make one distribution at test time: Eq. 6 over the memories `joint` at temperature τ, then Eq. 9
    with each of `mixes`, (memories, τ', λ), in turn. The paper's models and those it compares with are all of this form:

        vanilla LM             Recipe()
        + continuous cache     Recipe(mixes=[(['local', 'long'], 1 / θ, λ)])        P_cache(w) ∝ Σ_{j: x_j = w} exp(θ sim_j)
        kNN-LM                 Recipe(mixes=[(['knn'], τ', λ)])         P_kNN(w) ∝ Σ_{j: x_j = w} exp(-|q - k_j|² / (2 sqrt(C) τ'))
        kNN-LM + cache         Recipe(mixes=[(['local', 'long'], 1 / θ, λ), (['knn'], τ', λ')])
        TrimeLM                Recipe(['local'], τ)                                 Eq. 7, from here on
        TrimeLM_long           Recipe(['local', 'long'], τ)
        TrimeLM_ext            Recipe(['local', 'long', 'ext'], τ, [(['local', 'long', 'ext'], τ', λ)])

    local is the window at hand, long what the document had before it, ext the K entries of the datastore with the highest
    sim, knn the K nearest ones. -|q - k|² / (2 sqrt(C)) is q · k / sqrt(C) less what is the same for keys of one length, so all
    temperatures are of one unit. (The official code gives τ' for q · k, so its 10.5 at C = 1,024 is 0.328 here.)
    """
    joint: tuple = ()
    tau: float = 1.0
    mixes: tuple = ()

    @property
    def names(self):
        """The memories that it uses."""
        return {name for names in [self.joint] + [names for names, _, _ in self.mixes] for name in names}


def mix(log_words, log_w, memory_sums, recipe):
    """
    log P(w | c), for one word w of each query, or for all words at once:

        P(w)  ∝ exp(E_w · f) + Σ_{j: x_j = w} exp(sim_j / τ)      Eq. 6, over the memories recipe.joint
        P'(w) ∝ Σ_{j: x_j = w} exp(sim_j / τ')                    Eq. 8
        P(w)  ← (1 - λ) P(w) + λ P'(w)                            Eq. 9, for each of recipe.mixes

    log_words, log_w   log Σ_v exp(E_v · f(c)) and E_w · f(c)
    memory_sums        (names, τ) -> log Σ_j exp(sim_j / τ) over all their memories and over those with x_j = w; -inf: there are none
    """
    log_p = log_w - log_words                                               # Eq. 1
    if recipe.joint:
        everything, good = memory_sums(recipe.joint, recipe.tau)
        log_p = torch.logaddexp(log_w, good) - torch.logaddexp(log_words, everything)       # Eq. 6
    for names, tau, lam in recipe.mixes:
        everything, good = memory_sums(names, tau)
        nothing = everything == -math.inf
        p_memory = good - everything.masked_fill(nothing, 0)                # Eq. 8
        log_rest, log_lam = (math.log(x) if x > 0 else -math.inf for x in (1 - lam, lam))
        log_p = torch.where(nothing, log_p, torch.logaddexp(log_p + log_rest, p_memory + log_lam))      # Eq. 9
    return log_p


def masses(sim, says, taus, sizes):
    """
    What `mix` needs of some memories, for every temperature and every number of them: eval.py tunes both from one pass.

    sim       (Q, M)  similarities, the memories in the order in which they count as the first so many; -inf: not allowed
    says      several (Q, M) bool
    returns   (1 + len(says), Q, len(sizes), len(taus)): log Σ_j exp(sim_j / τ) over the first `size` memories, then over those of
              them that says[0] has, and so on
    """
    (Q, M), S = sim.shape, len(sizes)
    out = sim.new_empty(1 + len(says), Q, S, len(taus))
    ends = [0] + [min(size, M) for size in sizes]
    parts = [sim[:, a:b] for a, b in zip(ends, ends[1:])]                   # what each size adds to the one before
    few = [s[:, :ends[-1]].nonzero(as_tuple=True) for s in says]            # those that say w are few: (query, memory) of each
    few = [(sim[q, j], q * S + torch.bucketize(j, torch.tensor(ends[1:], device=j.device), right=True)) for q, j in few]
    for t, tau in enumerate(taus):
        for s, part in enumerate(parts):
            out[0, :, s, t] = (part / tau).logsumexp(1)                     # -inf if it adds nothing
        for k, (some, group) in enumerate(few):
            out[k + 1, ..., t] = group_logsumexp(some / tau, group, Q * S).view(Q, S)
    return out.logcumsumexp(2)


class Datastore:
    """
    The memories (c_j, x_j) of a whole corpus, on disk: of each the key g(c_j), the value x_j, which is the token
    that followed, and the position j in the text. (A first reading can skip this class: the paper has FAISS here.) A folder of

        entries.bin    (N,) records of key, value and position, in blocks of S similar keys
        blocks.bin     (N/S, C + 1) fp32, the means of k and of |k|² in each block
        header.json    about: all that the entries depend on; done: how many are stored; complete: they are sorted too

    A search does not look at all N: it compares a query with blocks.bin, then with all keys of the best P blocks. It
    may miss some of the true K best (`recall` says how many); the similarities it returns are those of the stored keys.
    Letters: N entries, C width, S entries of a block, Q queries, R of them at a time, K neighbors, P blocks probed
    """
    BLOCK, PROBE = 512, 32      # S, and P unless a search says otherwise
    CELL, CELLS = 1024, 4096    # k-means: entries of a cell on average, and at most so many cells
    BUFFER = 2 ** 28            # bytes of similarities that a search holds at once
    record = staticmethod(lambda C: np.dtype([('key', '<f2', (C,)), ('value', '<i4'), ('position', '<i8')]))

    def __init__(self, folder):
        """Opens a store. ValueError if it is not complete, or damaged."""
        self.about, _, complete = self.read_header(Path(folder))
        if not complete:
            raise ValueError(f'{folder} is not complete; build it with the same settings again, it goes on from there')
        N, C, self.S = (self.about[name] for name in ('entries', 'width', 'block'))
        entries = self.open_file(Path(folder, 'entries.bin'), self.record(C), (N,))
        blocks = self.open_file(Path(folder, 'blocks.bin'), np.dtype('<f4'), (-(-N // self.S), C + 1))
        self.keys, self.values, self.positions = (entries[name] for name in entries.dtype.names)
        self.mean, self.square = torch.from_numpy(np.array(blocks)).split([C, 1], dim=1)    # (N/S, C), (N/S, 1)
        self.spread = (self.square / C - self.mean.pow(2).mean(1, keepdim=True)).clamp(min=0).sqrt()    # of a component

    def __len__(self):
        return len(self.values)

    def said(self, rows):
        """The values of entries: rows, int64 of any shape -> int64, the same shape. Row -1 gives any value."""
        return torch.from_numpy(np.asarray(self.values[rows.cpu().numpy()])).long()

    @staticmethod
    def open_file(path, dtype, shape):
        """The array (*shape) on disk, read only. ValueError unless the file is there and just as long."""
        actual, size = path.stat().st_size if path.exists() else 0, int(np.prod(shape)) * dtype.itemsize
        if actual != size:
            raise ValueError(f'{path} has {actual:,} bytes where header.json asks for {size:,}; delete the folder')
        return np.asarray(np.memmap(path, dtype, 'r', shape=shape))         # on disk still; plain arrays slice faster

    @staticmethod
    def read_header(folder):
        """-> about, done, complete"""
        try:
            header = json.loads((folder / 'header.json').read_text())
            return dict(header['about']), header['done'], header['complete']
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ValueError(f'{folder}: header.json cannot be read ({e}); give another folder, or delete it') from None

    @staticmethod
    def write(path, start, data):
        """Replaces a file from byte `start` on, at 0 all of it at once. The disk has it on return; else ValueError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(path.name + '.new') if start == 0 else path        # no header is ever half there
            with open(new, 'ab') as f:
                f.truncate(start)
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            new.replace(path)
        except OSError as e:
            raise ValueError(f'{path}: {e}; what was stored stays, the same command goes on once this is mended') from e

    @classmethod
    def build(cls, folder, entries, n, width, about, progress=lambda stage, done, n: None):
        """
        Builds a store, or goes on where an earlier build stopped, or just opens it if it is complete. -> Datastore;
        ValueError for entries that do not fit, another store in the folder, or a full disk

        entries     start -> iterator of (keys (m, C) fp32 tensor, values (m,) int array), in text order from start on;
                    m should be some thousands, as each part is made safe on the disk by itself
        about       dict of JSON types: everything that the n entries of this width depend on
        progress    called now and then with 'store' or 'sort', how many entries that is done for, and n
        """
        if min(n, width) < 1:
            raise ValueError(f'a datastore of {n} entries of width {width}: both must be 1 or more')
        folder, about, record = Path(folder), dict(about, entries=n, width=width, block=cls.BLOCK), cls.record(width)
        about, text = json.loads(json.dumps(about)), folder / 'text.bin'    # in JSON a tuple is a list; the entries in text order
        say = lambda **what: cls.write(folder / 'header.json', 0, json.dumps(dict(about=about, **what)).encode())
        done, complete = 0, False
        if folder.is_dir() and {*os.listdir(folder)} - {'header.json.new'}:
            there, done, complete = cls.read_header(folder)
            differ = [f'{name} ({there.get(name)!r} there, {about.get(name)!r} here)'
                      for name in sorted({*about, *there}) if there.get(name) != about.get(name)]
            if differ:
                raise ValueError(f'{folder} was built from something else: {", ".join(differ)}; give another folder')
        if not complete:
            cls.check_space(folder, n, width)
            done = min(done, text.stat().st_size // record.itemsize if text.exists() else 0)
            say(done=done, complete=False)
            for keys, values in entries(done) if done < n else ():
                part = np.empty(len(keys), record)                          # (m,)
                part['key'], part['value'] = keys.detach().cpu().half(), values
                part['position'] = np.arange(done, done + len(part))
                if done + len(part) > n or not np.isfinite(part['key']).all():
                    raise ValueError(f'entries {done:,} to {done + len(part) - 1:,} of {n:,} are too many, or not '
                                     'finite in fp16; check that the text is the same and training has not diverged')
                cls.write(text, done * record.itemsize, part.tobytes())
                done += len(part)
                say(done=done, complete=False)                              # only when it is true
                progress('store', done, n)
            if done < n:
                raise ValueError(f'the entries ended after {done:,} of {n:,}; check that it is the same text')
            cls.sort(folder, np.memmap(text, record, 'r', shape=(n,)), progress)
            say(done=n, complete=True)                                      # before this line no one opens it
        text.unlink(missing_ok=True)
        return cls(folder)

    @classmethod
    def check_space(cls, folder, n, width):
        """Says what the build will take; ValueError if the disk does not have it."""
        text = n * cls.record(width).itemsize
        final = text + -(-n // cls.BLOCK) * 4 * (width + 1)
        memory = 32 * n + 6 * width * 256 * min(cls.CELLS, n // cls.CELL)   # the order, and the keys that k-means reads
        there = sum(f.stat().st_size for f in os.scandir(folder)) if folder.is_dir() else 0
        free = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free
        line = (f'datastore {folder}: {n:,} entries of width {width}, {final / 1e9:.2f} GB on disk and '
                f'{(text + final) / 1e9:.2f} GB while it is sorted, of which {there / 1e9:.2f} GB are there and '
                f'{free / 1e9:.2f} GB free; about {memory / 1e9:.2f} GB of memory')
        if text + final > there + free:
            raise ValueError(f'{line}. Free some space, give a folder on another disk, or store fewer entries')
        print(line, flush=True)

    @classmethod
    def sort(cls, folder, text, progress):
        """Records (N,) into blocks: k-means finds cells of similar keys, `halve` orders them and the keys in each."""
        import faiss
        (n, C), S, done, blocks = text['key'].shape, cls.BLOCK, 0, []
        cells = max(1, min(cls.CELLS, n // cls.CELL))
        kmeans = faiss.Kmeans(C, cells, niter=10, seed=0, min_points_per_centroid=1)
        kmeans.train(text['key'][::max(1, n // (256 * cells))].astype(np.float32))
        rank = cls.halve(torch.from_numpy(kmeans.centroids), 1).argsort().short().numpy()   # (cells,) place of each
        chunks = (text['key'][a:a + 2 ** 16].astype(np.float32) for a in range(0, n, 2 ** 16))
        cell = np.concatenate([rank[kmeans.assign(chunk)[1]] for chunk in chunks])          # (N,)
        ends = (np.bincount(cell).cumsum() + S // 2) // S * S               # cells of whole blocks
        for rows in filter(len, np.split(cell.argsort(kind='stable'), ends)):
            part = text[rows]                                               # (m,) read forwards, as disks like it
            keys = torch.from_numpy(part['key']).float()                    # (m, C)
            order = cls.halve(keys, S)                                      # (m,)
            cls.write(folder / 'entries.bin', done * text.itemsize, part[order.numpy()].tobytes())
            moments = torch.cat([keys, keys.pow(2).sum(1, keepdim=True)], dim=1)[order]     # (m, C + 1)
            blocks += [block.mean(0) for block in moments.split(S)]
            done += len(rows)
            progress('sort', done, n)
        cls.write(folder / 'blocks.bin', 0, torch.stack(blocks).numpy().tobytes())

    @classmethod
    def halve(cls, x, S):
        """
        Orders keys x (m, C) so that blocks of S are alike inside: cut in two along the direction in which they vary
        most, and each half again. Without it a block would be no better than a random part of its cell. -> (m,)
        """
        if len(x) <= S:
            return torch.arange(len(x))
        x = x - x.mean(0)
        v = x[x.pow(2).sum(1).argmax()]                                     # (C,)
        for _ in range(10):                                                 # power iteration
            v = F.normalize(x.T @ (x @ v), dim=0)
        halves = (x @ v).argsort(stable=True).tensor_split([-(-len(x) // S) // 2 * S])
        return torch.cat([half[cls.halve(x[half], S)] for half in halves])

    def search(self, query, K, metric='ip', probe=PROBE):
        """
        The K entries most similar to each query (Q, C), in the `probe` blocks that promise most. All blocks: exact.

        metric   ip: sim = q · k / sqrt(C), TRIME's (Eq. 5). l2: sim = -|q - k|² / (2 sqrt(C)), kNN-LM's, in a unit
                 in which one temperature does for both: for keys of one length they differ by a constant
        returns  on the CPU: sim (Q, K) fp32, falling, rows (Q, K) int64 of the store; -inf and -1 where there are fewer
        """
        C, S, n_blocks = self.keys.shape[1], self.S, len(self.mean)
        if metric not in ('ip', 'l2') or min(K, probe) < 1 or query.shape[1:] != (C,):
            raise ValueError(f'no search for K {K} and probe {probe} (1 or more), metric {metric!r} (ip or l2), '
                             f'queries {tuple(query.shape)} ((Q, {C}))')
        query, l2 = query.detach().to('cpu', torch.float32), 1 / (2 * C ** 0.5) if metric == 'l2' else 0
        P, step = min(probe, n_blocks), min(probe, n_blocks, self.PROBE)    # blocks of a query: in all, at a time
        R = max(1, min(len(query), self.BUFFER // (4 * max(step * S, n_blocks))))
        buffer = torch.empty(R * step, S)                                   # made once: new pages take longer than sums
        sims, found = torch.full((len(query), K), -torch.inf), torch.full((len(query), K), -1)
        for q, sim, rows in zip((query / C ** 0.5).split(R), sims.split(R), found.split(R)):
            promise = q @ self.mean.T - l2 * self.square.T                  # (R, N/S) the mean of the similarities,
            promise += 2 * q.norm(dim=1, keepdim=True) * self.spread.T      # and two standard deviations for the best keys
            probed = promise.topk(P, sorted=False).indices.sort(dim=1).values               # (R, P)
            for blocks in probed.split(step, dim=1):
                new = buffer[:blocks.numel()]                               # (R step, S); the last round may have fewer than step
                order, pair = blocks.flatten().sort(stable=True)            # (R step,) each: a block, and which query at which place
                order, counts = order.unique_consecutive(return_counts=True)
                for block, pairs in zip(order.tolist(), pair.split(counts.tolist())):       # one read serves all that probe it
                    k = torch.from_numpy(np.array(self.keys[block * S:(block + 1) * S])).float()    # (S, C)
                    this = F.linear(q[pairs // blocks.size(1)], k, -l2 * k.pow(2).sum(1) if l2 else None)
                    if len(k) < S:                                          # the store's last block
                        this = F.pad(this, (0, S - len(k)), value=-torch.inf)
                    new.index_copy_(0, pairs, this)
                new, at = new.view(*blocks.shape, S).flatten(1).topk(min(K, blocks.size(1) * S), sorted=False)
                at = blocks.gather(1, at // S) * S + at % S                 # (R, K)
                best = torch.cat([sim, new], dim=1).topk(K)
                sim[:], rows[:] = best.values, torch.cat([rows, at], dim=1).gather(1, best.indices)
        sims -= l2 * query.pow(2).sum(1, keepdim=True)
        return sims, found.masked_fill_(sims == -torch.inf, -1)

    def recall(self, query, K, probe=PROBE, metric='ip'):
        """The share of the true K best that a search finds: by number, by softmax mass. Some hundred queries do."""
        sim, rows = self.search(query, K, metric, len(self.mean))           # 2 x (Q, K)
        found = self.search(query, K, metric, probe)[1]
        hit = torch.stack([torch.isin(best, some) for best, some in zip(rows, found)])      # (Q, K); -1 has no mass
        return hit[rows >= 0].float().mean().item(), (hit * sim.softmax(1)).sum(1).mean().item()


# ----------------------------------------------------------------------------------------------------------------------
# the model

class TRIME(nn.Module):
    """A Transformer language model whose output softmax holds memories beside the words."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)                                  # also the output embedding E
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd)
        self.recipe = Recipe(() if config.memory == 'none' else ('local',))     # at test time; eval.py tunes it on the validation split
        self.long, self.store, self.n_neighbors = 0, None, 1024             # tokens of long memory; a Datastore and K
        self.stride = config.stride or max(1, config.block_size // 2)
        if config.memory == 'ext':                                          # g starts with norm C^(1/4), so sim within -1..1
            nn.init.constant_(self.blocks[-1].norm2.gain, config.n_embd ** -0.25)
        for name, p in self.named_parameters():                             # GPT-2's: what a block adds starts small
            if p.dim() == 2:
                std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith('proj.weight') else 0.02
                nn.init.normal_(p, std=p.size(1) ** -0.5 if 'widen' in name else std)

    def encode(self, tokens, past=None):
        """
        f(c) and g(c) for every context of a segment; g is the input of the last feed-forward layer (§3).
        tokens (B, t); past: what an earlier call returned for the tokens before these, at most T in all
        returns f, g (B, t, C) and the new past
        """
        start = 0 if past is None else past[0][0].size(1)
        positions = start + torch.arange(tokens.size(1), device=tokens.device)
        turns = rope(positions, self.config.n_embd // self.config.n_head)
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        past, kept = past or [None] * len(self.blocks), []
        for block, kv in zip(self.blocks[:-1], past):
            x, kv = block(x, turns, kv)
            kept.append(kv)
        last = self.blocks[-1]                                              # written out, to get hold of g
        y, kv = last.attention(last.norm1(x), turns, past[-1])
        x = x + F.dropout(y, last.dropout, self.training)
        g = last.norm2(x)                                                   # (B, t, C)
        f = self.norm(x + F.dropout(last.mlp(g), last.dropout, self.training))
        return f, g, kept + [kv]

    def forward(self, batch, progress):
        """
        The training loss of one micro-batch; in eval mode its causal loss, with local memory where it is trained with ext.

        batch      tokens, targets, doc (B, T) int64 (targets -1: not predicted) and seed, from which all randomness comes
        progress   step / max_steps
        returns    loss () in nats per token, and a dict of what to log
        """
        config, (B, T) = self.config, batch.tokens.shape
        memory = 'none' if progress < config.plain else config.memory       # §5.2
        if memory == 'ext' and not self.training:                           # ext sees what comes later, in other segments
            memory = 'local'
        local = random.Random(batch.seed).random() >= config.p              # §4.3: one coin for the micro-batch
        if self.training and config.dropout:
            torch.manual_seed(batch.seed + (dist.get_rank() if config.gather_memory and dist.is_initialized() else 0))
        f, g = (x.flatten(0, 1) for x in self.encode(batch.tokens)[:2])     # 2 x (N, C)
        targets, doc = batch.targets.flatten(), batch.doc.flatten()         # (N,)

        key, memory_targets, memory_doc, first = g, targets, doc, 0
        if self.training and config.gather_memory and memory in ('long', 'ext') and dist.is_initialized():     # in validation each has its own
            key, memory_targets, memory_doc = Gather.apply(g), Gather.apply(targets), Gather.apply(doc)
            first = dist.get_rank() * B * T                                 # where our own rows stand among all
        if not config.memory_grad:
            key = key.detach()
        padded = bool((memory_targets < 0).any())

        def allowed(rows):
            i = first + torch.arange(rows.start, rows.stop, device=g.device)[:, None]
            lo = (first + rows.start) // T * T if memory == 'local' else 0              # the first and the last memory
            hi = len(memory_targets) if memory == 'ext' else first + rows.stop          # that any of these queries may use
            j = torch.arange(lo, hi, device=g.device)[None, :]
            mask = accessible(memory, i, j, T, doc[rows, None], memory_doc[None, lo:hi], local, config.same_document)
            return lo, hi, mask & (memory_targets[lo:hi] >= 0) if padded else mask

        with torch.autocast(g.device.type, enabled=False):                  # bf16 has steps of 0.125 near 20: too coarse
            query, key = (None, None) if memory == 'none' else (fp32(g), fp32(key))     # inside exp
            f, E = fp32(f), self.embedding.tables[0]
            loss, share, plain = TrimeLoss.apply(f, E, *self.embedding.row_and_tail(f, targets.clamp(min=0)), query, key, targets,
                                                 memory_targets, allowed, torch.is_grad_enabled())
        return loss, {'memory_share': share, 'loss_without_memory': plain}

    def memories(self, g, keys, said, old_keys, old_said, names, old_allowed=None):
        """
        The memories of some contexts: name -> (sim (B, t, M), said (B, t or 1, M)); long has the latest first, ext and knn the
        most similar: the first so many are a smaller memory (`masses`).

        g                     (B, t, C)  the queries, the last t of the n contexts of a window
        keys, said            (B, n, C)  (B, n - 1 or n)  the window's contexts and the word x_j that followed each
        old_keys, old_said    (B, M, C)  (B, M)  those before the window, from when they were scored
        names                 some of local, long, ext, knn
        old_allowed           (B, t, M) bool, or None: all
        """
        (B, t, C), n, memories = g.shape, keys.size(1), {}
        g = fp32(g)
        if 'local' in names:
            i, j = torch.arange(n - t, n, device=g.device), torch.arange(n - 1, device=g.device)
            sim = g @ fp32(keys[:, :-1]).transpose(1, 2) / C ** 0.5         # (B, t, n - 1)
            memories['local'] = sim.masked_fill(j >= i[:, None], -math.inf), said[:, None, :n - 1]      # Eq. 2
        if 'long' in names:
            sim = (g @ fp32(old_keys).transpose(1, 2) / C ** 0.5).flip(2)   # (B, t, M) Eq. 3
            sim = sim if old_allowed is None else sim.masked_fill(~old_allowed.flip(2), -math.inf)
            memories['long'] = sim, old_said[:, None].flip(2)
        for name in METRIC.keys() & names:                                  # Eq. 4
            sim, rows = (x.view(B, t, -1) for x in self.store.search(g.flatten(0, 1), self.n_neighbors, METRIC[name]))
            memories[name] = sim.to(g.device), self.store.said(rows).to(g.device)
        return memories

    def distribution(self, f, memories, recipe):
        """log P(w) for all w by a recipe. f (B, t, C), memories as `memories` has them -> (B, t, V) fp32"""
        z = self.embedding.log_mass(fp32(f))                                # (B, t, V)
        query = torch.arange(z[..., 0].numel(), device=z.device).view(*z.shape[:2], 1)

        def memory_sums(names, tau):
            sim = torch.cat([memories[name][0] for name in names], dim=2) / tau     # (B, t, M)
            group = torch.cat([query * z.size(2) + memories[name][1] for name in names], dim=2)     # a group is a query and a word
            good = group_logsumexp(sim.flatten(), group.flatten(), z.numel()).view_as(z)
            return sim.logsumexp(2, keepdim=True), good

        return mix(z.logsumexp(2, keepdim=True), z, memory_sums, recipe)

    def log_probs(self, tokens):
        """log P(next token | the tokens so far), memory included: `stream` in one piece. tokens (B, t), one document -> (B, t, V)"""
        return self.stream(tokens)[0]

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """
        log P(next token | the tokens so far), piece by piece: tokens (B, t) come next in a text, any t >= 1; state is what the
        last call returned. A text longer than T is read in windows, each `stride` later than the one before: when T tokens are
        held, the last T - stride are encoded anew and the next `stride` are scored behind them (Baevski & Auli 2019; App. D).
        returns log_probs (B, t, V) fp32, each row sums to one, and the new state
        """
        T, parts, none = self.config.block_size, [], self.norm.gain.new_zeros(len(tokens), 0, self.config.n_embd)
        text, scored, keys, past = state or (tokens[:, :0], none, none, None)
        while tokens.size(1):
            if keys.size(1) == T:                                           # full: begin again with the end of it
                keys, past = none, None
                if self.stride < T:
                    _, keys, past = self.encode(text[:, self.stride - T:])
            now, tokens = tokens.tensor_split([T - keys.size(1)], dim=1)
            f, g, past = self.encode(now, past)
            keys = torch.cat([keys, g], dim=1)                              # (B, n, C) g of the window's n tokens
            text = torch.cat([text, now], dim=1)[:, -self.long - T:]        # (B, m)
            scored = torch.cat([scored, g], dim=1)[:, -self.long - T:]      # (B, m, C) g as it was when its next token was scored
            start = text.size(1) - keys.size(1)                             # of the window
            lo = max(0, start - self.long)                                  # of long memory
            memories = self.memories(g, keys, text[:, start + 1:], scored[:, lo:start], text[:, lo + 1:start + 1], self.recipe.names)
            parts.append(self.distribution(f, memories, self.recipe))
        return torch.cat(parts, dim=1), (text, scored, keys, past)

    def multiply_adds(self):
        """Multiply-adds of a training step per token: what the definitions need (bands 1, 2, ... apart), thrice for the way back."""
        c, C = self.config, self.config.n_embd
        T, N = c.block_size, c.block_size * c.micro_batch
        memories = {'none': 0, 'local': (T - 1) / 2, 'long': (N - 1) / 2, 'ext': N - T + (1 - c.p) * (T - 1) / 2}
        layer = 4 * C * C + 2 * C * (c.n_inner or 4 * C) + 2 * C * (T + 1) / 2      # the matrices, and attention's two products
        return 3 * (c.n_layer * layer + len(self.embedding.tables[0]) * C + memories[c.memory] * C)


# ----------------------------------------------------------------------------------------------------------------------
# a tour

def random_batch(config):
    tokens = torch.randint(config.vocab_size, (config.micro_batch, config.block_size + 1))
    return SimpleNamespace(tokens=tokens[:, :-1], targets=tokens[:, 1:], doc=torch.zeros_like(tokens[:, 1:]), seed=0)


def tour():
    """What goes in, what comes out, and what the memory costs: bytes, and time beside multiply-adds."""
    import resource                                                         # not on Windows
    torch.manual_seed(0)
    config = TRIMEConfig()
    N, C, V = 24_576, config.n_embd, config.vocab_size                      # N: 8 segments of 3,072, as the paper's 7M model
    f, E, g = (torch.randn(n, C, requires_grad=True) for n in (N, V, N))
    targets, peaks = torch.randint(V, (N,)), []
    earlier = lambda rows: (0, N, torch.arange(N)[None, :] < torch.arange(rows.start, rows.stop)[:, None])
    for key in (None, g):                                                   # first of all: a peak does not fall again
        TrimeLoss.apply(f, E, targets, torch.zeros(N), key, key, targets, targets, earlier, True)[0].backward()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == 'darwin' else 20))     # GB
    print(f'the loss of {N:,} queries, forward and backward: {N:,} in-batch memories add {peaks[1] - peaks[0]:.2f} GB '
          f'to a peak of {peaks[0]:.2f} GB')

    model, batch = TRIME(config), random_batch(config)
    f, g, _ = model.encode(batch.tokens[:1])
    log_probs, _ = model.stream(batch.tokens[:1, :8])
    print(f'\nTRIME, {sum(p.numel() for p in model.parameters()):,} parameters')
    print(f'tokens {tuple(batch.tokens.shape)} -> f {tuple(f.shape)}, g {tuple(g.shape)} of the first segment')
    print(f'stream {tuple(log_probs.shape)}: each row sums to {log_probs.exp().sum(-1).mean():.6f}')
    for progress, name in ((0, 'Eq. 1, no memory'), (1, 'Eq. 5, local memory')):
        loss, log = model(batch, progress)
        print(f'{name:20} loss {loss:7.4f} on random tokens (ln V = {math.log(V):.4f}), '
              f'share of the probability on memories {log["memory_share"]:.3f}')

    print('\na training step with each memory against one without, in turns (two minutes)')
    for micro_batch, T in ((config.micro_batch, config.block_size), (8, 3072)):
        runs = {}
        for memory in ('none', 'local', 'long', 'ext'):
            model = TRIME(TRIMEConfig(block_size=T, micro_batch=micro_batch, memory=memory))
            runs[memory] = model, torch.optim.AdamW(model.parameters(), fused=True), []
        batch = random_batch(model.config)                                  # its coin leaves the own segment out of ext
        for _ in range(10 if T < 1024 else 4):
            for memory, (model, optimizer, times) in runs.items():
                batch.doc[:] = torch.arange(micro_batch)[:, None] * (memory == 'ext')       # long: one document, ext: many
                start = time.perf_counter()
                model(batch, 1)[0].backward()
                optimizer.step()
                optimizer.zero_grad()
                times.append(time.perf_counter() - start)
        vanilla, _, plain = runs.pop('none')
        for memory, (model, _, times) in runs.items():
            ratios = sorted(y / x for x, y in zip(plain[1:], times[1:]))    # the first one warms up
            print(f'{micro_batch} segments of {T:5,}, {memory:5}: time x {ratios[len(ratios) // 2]:.3f}, multiply-adds x '
                  f'{model.multiply_adds() / vanilla.multiply_adds():.3f}   ({micro_batch * T / min(times):,.0f} tokens/s)')


if __name__ == '__main__':
    tour()
