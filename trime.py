"""
TRIME: a language model trained to find its next word among the contexts that it has just read.

    Zexuan Zhong, Tao Lei and Danqi Chen, "Training Language Models with Memory Augmentation",
    EMNLP 2022, arXiv:2205.12674

A Transformer predicts the next word by comparing its state with one vector per word. TRIME lets
other contexts of the batch take part: a context that was followed by "cat" is one more vector for
"cat". Both kinds of vector stand in one softmax and are trained together. At test time the same
formula uses memories of the current window, of the earlier document, or of a whole corpus.

Where the paper is in this file
    Eq. 1; 2, 3, 4   a language model; the memories     TrimeLoss; memory_mask, TRIME.memories
    §3, Eq. 5        f and g; the objective             TRIME.encode; TrimeLoss
    §4, §5.2         m, p, the first 5% of the steps    batches, TRIME.forward
    App. A, Eq. 6-9  the probabilities at test time     Inference
    App. D; §5.2     overlapping windows; FAISS         TRIME.windows; Datastore, with faiss
    Table 9          the models                         PRESETS

Letters used in the shape comments
    B segments    T tokens per segment    C width    H heads    D width per head    V vocabulary
    N = B T       M memories              R rows of a block     Q queries           K neighbors
Memory j is (c_j, x_j): key g(c_j), value x_j. In training the values are memory_targets.

Where this differs from the paper, and why
    RMSNorm and RoPE replace LayerNorm and sinusoids: the three models share one Transformer, also
    no biases, GELU for ReLU, GPT-2's initial weights, no sqrt(C) on the embeddings, a final norm.
    AdamW and a cosine replace NAG (247M) and the inverse square root (7M).
    §4.3's m = 1: other segments of the same document are masked (not in the official code).
    At test time each context is in memory once (official code: the window's twice). P' of Eq. 8 is
    over all memories (official code: the external ones). --gather-memory passes gradients.
    With memory ext g starts small: at a gain of 1 more than 90% of the probability is on other
    documents at first, and the words do not recover in hundreds of steps.
    The datastore has exact similarities of fp16 keys (paper: product quantization).
    Not here: translation (§5.4) and SRU++ (App. E).

    $ python trime.py                       a demo on a CPU
    $ python train.py --model trime
"""
import hashlib
import itertools
import json
import math
import random
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass
class TRIMEConfig:
    vocab_size: int = 4096      # ids of the tokenizer; for bpe, how many to learn (ours)
    block_size: int = 512       # tokens of a segment, T (paper: 150 to 3,072)
    micro_batch: int = 4        # segments of a micro-batch, B: the source of memories (paper 7M: 8)
    n_layer: int = 4            # Transformer layers (ours; paper: 8 to 16)
    n_head: int = 4             # attention heads, H (ours)
    n_embd: int = 256           # width, C (ours; paper: 128 to 1,024)
    n_inner: int = 0            # width inside the MLP; 0: 4 C (paper: 4 C, its 150M model 2,100)
    dropout: float = 0.0        # on embeddings and residual branches (ours; official: 0.1 to 0.3)
    memory: Literal['none', 'local', 'long', 'ext'] = 'local'   # for training (paper Table 1)
    m: int = 0                  # consecutive segments that share long memory; 0: B (paper Table 9)
    ce_warmup: float = 0.05     # first share of the steps, without memory (paper section 5.2)
    p: float = 0.9              # probability that ext disables local memory (paper section 4.3)
    bm25: bool = True           # ext packs similar segments together (paper section 4.3, Table 11)
    memory_grad: bool = True    # back-propagate to the memories (paper section 3, Table 11)
    same_document: bool = True  # long memory within documents, ext across (paper; official: no)
    gather_memory: bool = False     # memories of all processes, not of one (official code: yes)
    cutoffs: str = ''           # adaptive softmax: first id of each tail cluster, as 20000,60000
    div_value: int = 4          # each cluster's vectors are narrower by this (official code: 4)
    stride: int = 0             # tokens scored per window in tests; 0: T/2 (paper: T/6 to T/2)

    def __post_init__(self):
        for name, value in vars(self).items():
            least = 0 if name in ('n_inner', 'm', 'stride') else 1
            if type(value) is int and value < least or type(value) is float and not 0 <= value <= 1:
                raise ValueError(f'{name} {value} is below {least}, or not between 0.0 and 1.0')
        cutoffs = [int(x) if x.isdecimal() else 0 for x in self.cutoffs.split(',') if x]
        if cutoffs != sorted({*cutoffs} - {0}) or self.n_embd < self.div_value ** len(cutoffs):
            raise ValueError(f'cutoffs {self.cutoffs!r} are not rising ids, as 20000,60000, or too '
                             f'many: n_embd {self.n_embd} is divided by div_value for each')
        if self.n_embd % (2 * self.n_head) or self.stride > self.block_size:
            raise ValueError(f'n_embd {self.n_embd} is no multiple of 2 x n_head {self.n_head}, or '
                             f'stride {self.stride} above block_size {self.block_size}')


Memories = Literal['', 'none', 'local', 'local,long', 'ext', 'local,ext', 'local,long,ext']


@dataclass
class EvalConfig:
    memory: Memories = ''       # trime: memories at test time; default: as in Table 1
    formula: Literal['auto', 'linear', 'trime'] = 'auto'    # trime: linear is cache and kNN-LM
    long: int = 24_576          # trime: tokens of long memory, at most; tuned on val
    n_neighbors: int = 0        # trime: entries retrieved for each token, at most; 0: 1,024
    nprobe: int = 16            # trime: lists of the datastore that are searched, of 1,000 entries
    recall: bool = False        # trime: measure the recall of this search
    datastore_from: str = ''    # trime: another corpus for external memory
    stride: int = 0             # trime: tokens scored per window (0: as trained)
    tau: float = 0.0            # trime: temperature of Eq. 6 (0: tuned on val)


# Table 9: T, B = in-batch memories / T, m, n_layer, n_embd, n_inner, tokens_per_step, lr (247M:
# ours), warmup, grad_clip, max_steps. App. F: the 7M model's heads. Official code: other heads
# (its 150M model has 10), cutoffs, div_value, dropout, stride, weight_decay, beta2.
WIKITEXT = dict(data='wikitext103', tokenizer='word', vocab_size=267_744, cutoffs='20000,60000',
                eval_every=2000)
ADAM = dict(weight_decay=0.01, beta2=0.98, grad_clip=0.0)
PRESETS = {
    'tiny': {},                         # the defaults: minutes on two CPU cores
    '7m': dict(WIKITEXT, **ADAM, block_size=3072, micro_batch=8, n_layer=8, n_head=4, n_embd=128,
               stride=512, tokens_per_step=24_576, lr=5e-4, warmup=0.04, max_steps=200_000),
    '150m': dict(WIKITEXT, **ADAM, block_size=150, micro_batch=60, n_layer=16, n_head=5, n_embd=410,
                 n_inner=2100, div_value=1, dropout=0.1, stride=64, tokens_per_step=36_000,
                 lr=2.5e-4, warmup=0.0, max_steps=400_000),
    '247m': dict(WIKITEXT, block_size=3072, micro_batch=8, m=4, n_layer=16, n_head=8, n_embd=1024,
                 dropout=0.3, stride=512, tokens_per_step=73_728, lr=5e-4, warmup=0.056,
                 grad_clip=0.1, max_steps=286_000),
    'enwik8': dict(ADAM, data='enwik8', tokenizer='bytes', vocab_size=257, block_size=512,
                   micro_batch=24, n_layer=12, n_head=8, n_embd=512, dropout=0.1, stride=80,
                   same_document=False, tokens_per_step=49_152, lr=2.5e-4, warmup=0.0,
                   max_steps=400_000, eval_every=2000)}


def batches(config):
    """Arguments of data.Batches: segments (§4.1), consecutive (§4.2) or packed (§4.3, App. B)."""
    kind = {'long': 'consecutive', 'ext': 'packed' if config.bm25 else 'segments'}
    return dict(kind=kind.get(config.memory, 'segments'), consecutive=config.m,
                same_document=config.same_document)


# --------------------------------------------------------------------------------------------------
# the transformer (the same text in trime.py, rpt.py and drt.py)

class RMSNorm(nn.Module):
    """x / rms(x) * gain, over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, n_embd):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n_embd))

    def forward(self, x):
        return F.rms_norm(x, self.gain.shape, self.gain, eps=1e-6)


def fp32(x):
    """bf16 and fp16 become fp32; fp64 remains, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotary(positions, D):
    """
    cos and sin of the angles p θ_d, θ_d = 10000^(-2d/D), of rotary embeddings (Su et al. 2021).
    positions (T,) -> 2 x (T, 1, D/2)
    """
    theta = 10000 ** (-torch.arange(0, D, 2, device=positions.device) / D)
    angle = positions[:, None, None] * theta                        # (T, 1, D/2)
    return angle.cos(), angle.sin()


def rotate(x, rotary):
    """Rotates each pair (x_2d, x_2d+1) of a head by its angle. x (B, T, H, D) -> same shape"""
    pairs = torch.view_as_complex(fp32(x).unflatten(-1, (-1, 2)).contiguous())  # (B, T, H, D/2)
    return torch.view_as_real(pairs * torch.complex(*rotary)).flatten(-2).type_as(x)


def softmax_attention(q, k, v, mask=None):
    """
    softmax(q kᵀ / sqrt(D) + mask) v; mask, broadcast to (..., t, s), is added, or True where a
    query may attend. On a CPU in bf16 the definition is faster than the fused kernel (torch 2.13).

    q (..., t, D)   k, v (..., s, D) -> (..., t, D)
    """
    if q.device.type != 'cpu' or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    z = q / math.sqrt(q.size(-1)) @ k.transpose(-2, -1)             # (..., t, s)
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask
    return z.softmax(-1) @ v


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions, over the whole segment."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, rotary, past=None):
        q, k, v = self.qkv(x).unflatten(2, (3, self.n_head, -1)).unbind(2)  # 3 x (B, T, H, D)
        q, k = rotate(q, rotary), rotate(k, rotary)
        if past is not None:                                        # keys, values of earlier tokens
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        heads = [y.transpose(1, 2) for y in (q, k, v)]              # (B, H, tokens, D)
        if past is None and (x.is_cuda or q.dtype != torch.bfloat16):       # the faster kernels
            y = F.scaled_dot_product_attention(*heads, is_causal=True)
        else:
            j = torch.arange(k.size(1), device=x.device)
            y = softmax_attention(*heads, j <= j[-x.size(1):, None])        # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2)), (k, v)


class MLP(nn.Module):
    """Two layers, the hidden one wider."""

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

    def forward(self, x, rotary, past=None):
        y, kv = self.attention(self.norm1(x), rotary, past)
        x = x + F.dropout(y, self.dropout, self.training)
        x = x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)
        return x, kv


# --------------------------------------------------------------------------------------------------
# what is new in TRIME

class Embedding(nn.Module):
    """
    The input and output embedding, tied. With cutoffs it is adaptive (Baevski & Auli 2019): ids are
    in order of frequency, those between two cutoffs are a cluster. Cluster i has vectors of
    C / div_value^i numbers, W_i that projects them to C, and one row in the head:

        P(w) = P_head(w)  or  P_head(i) P_i(w)  in cluster i,    P_i(w) ∝ exp(table_i[w] · W_iᵀ f)
    """

    def __init__(self, config):
        super().__init__()
        ends = [int(x) for x in config.cutoffs.split(',') if x and int(x) < config.vocab_size]
        ends += [config.vocab_size]
        widths = [config.n_embd // config.div_value ** i for i in range(len(ends))]
        rows = [ends[0] + len(ends) - 1] + [end - start for start, end in zip(ends, ends[1:])]
        self.clusters = list(zip(range(ends[0], rows[0]), ends, ends[1:]))  # row; ids: from, to
        self.tables = nn.ParameterList(torch.empty(*size) for size in zip(rows, widths))
        self.tail_proj = nn.ModuleList(nn.Linear(n, widths[0], bias=False) for n in widths[1:])

    def forward(self, tokens):
        """(B, T) -> (B, T, C)"""
        x = F.embedding(tokens.clamp(max=len(self.tables[0]) - 1), self.tables[0])
        for (_, start, end), table, proj in zip(self.clusters, self.tables[1:], self.tail_proj):
            inside = (tokens >= start) & (tokens < end)
            x[inside] = proj(F.embedding(tokens[inside] - start, table)).type_as(x)
        return x

    def head_index_and_tail_logprob(self, f, w):
        """Words w (Q,) after f (Q, C) -> their rows of the head, log P_i(w) or 0: 2 x (Q, 1)"""
        index, logprob = w.clone(), f.new_zeros(len(w))
        for (row, start, end), table, proj in zip(self.clusters, self.tables[1:], self.tail_proj):
            inside = ((w >= start) & (w < end)).nonzero()[:, 0]
            index[inside] = row
            logits = f[inside] @ proj.weight @ table.T              # (words inside, ids)
            nll = F.cross_entropy(logits, w[inside] - start, reduction='none')
            logprob = logprob.index_put((inside,), -nll)
        return index[:, None], logprob[:, None]

    def logits(self, f, w=None):
        """E_w · f of Eq. 1 for w (Q,) or all words; log Σ exp. f (Q, C) -> (Q, 1 or V), (Q, 1)"""
        head = f @ self.tables[0].T
        log_total, words = head.logsumexp(1, keepdim=True), len(self.tables[0]) - len(self.clusters)
        if w is not None:
            index, logprob = self.head_index_and_tail_logprob(f, w)
            return head.gather(1, index) + logprob, log_total
        tails = [head[:, row, None] + (f @ proj.weight @ table.T).log_softmax(1) for (row, *_),
                 table, proj in zip(self.clusters, self.tables[1:], self.tail_proj)]
        return torch.cat([head[:, :words], *tails], dim=1), log_total


def memory_mask(mode, rows, T, doc, memory_doc, first=0, local=True, same_document=True, m=0):
    """
    Which memories the queries of slice `rows` may use: lo, hi, and (R, hi - lo) bool for the
    memories lo..hi-1. Memory j is (c_j, x_j), a context and the token after it: memory i holds the
    answer to query i. doc, memory_doc: documents; first: position of query 0 among the memories
    """
    i = first + torch.arange(rows.start, rows.stop, device=doc.device)[:, None]
    lo = (first + rows.start) // T * T if mode == 'local' else 0
    hi = len(memory_doc) if mode == 'ext' else first + rows.stop
    j = torch.arange(lo, hi, device=doc.device)[None, :]
    segment, earlier = i // T == j // T, j < i
    document = (doc[rows, None] == memory_doc[None, lo:hi]) & same_document
    if mode == 'local':                                             # Eq. 2
        return lo, hi, segment & earlier
    if mode == 'ext':                                               # §4.3
        return lo, hi, ~segment & ~document | segment & earlier & local
    group = i // (m * T) == j // (m * T) if m else True             # Eq. 3, §4.2
    return lo, hi, earlier & group & (segment | document | (not same_document))


def group_logsumexp(x, group, n):
    """log Σ exp(x) of each of n groups. x, group (few,) -> (n,); -inf for an empty group"""
    top = x.new_full((n,), -1e30).scatter_reduce_(0, group, x, 'amax')
    return x.new_zeros(n).index_add_(0, group, (x - top[group]).exp()).log() + top


def exponentials_(x):
    """x (R, n) becomes exp(x - max), in place -> max, log Σ exp(x) (R, 1). A row may be all -inf"""
    top = x.amax(1, keepdim=True).clamp(min=-1e30)
    return top, x.sub_(top).exp_().sum(1, keepdim=True).log() + top


class TrimeLoss(torch.autograd.Function):
    """
    The TRIME objective, Eq. 5. The next word w has a term for its output embedding, and one for
    each memory whose value is w; sim(q, k) = q · k / sqrt(C):

        P(w | c)  ∝  exp(E_w · f(c))  +  Σ_{j: x_j = w} exp(sim(g(c), g(c_j)))

    f, query (N, C)   f(c), g(c)                    key (M, C)   g of the memories; None for Eq. 1
    targets (N,)   w, -1: not scored                memory_targets (M,)   x_j, -1: no memory
    mask   slice of queries -> memory_mask          embedding, *weights   an Embedding's parameters

    returns the mean of -log P, and two means without gradient: the probability on memories, the
    loss without memory. Neither (N, V) nor (N, M) is held: queries are taken in blocks of R, and
    the gradient of a block is computed in the forward pass. P: the part of word v, of memory j in
    the sum over everything; W: in the terms of w, zero for all others

        dL/d(E_v · f) = P_v - W_v        dL/d(sim_j) = P_j - W_j
    """
    R = 512

    @staticmethod
    def forward(ctx, f, query, key, targets, memory_targets, mask, embedding, with_grad, *weights):
        n, C = (targets >= 0).sum().clamp(min=1), f.size(1)
        nll, memory_prob, word_nll = f.new_zeros(3)                 # sums over the queries
        df, dq, dk, *dw = (torch.zeros_like(x) if with_grad and x is not None else None
                           for x in (f, query, key, *weights))
        for start in range(0, len(f), TrimeLoss.R):
            rows = slice(start, min(start + TrimeLoss.R, len(f)))
            scored = (targets[rows, None] >= 0).to(f) / n           # (R, 1) the weight of a query
            w = targets[rows, None].clamp(min=0)                    # (R, 1)
            with torch.set_grad_enabled(with_grad):
                f_rows = f[rows].detach().requires_grad_(with_grad)
                index, tail = embedding.head_index_and_tail_logprob(f_rows, w[:, 0])
            logits = f[rows] @ weights[0].T                         # (R, rows of the head)
            log_w = log_word = logits.gather(1, index) + tail.detach()      # first term of Eq. 5
            top, log_total = exponentials_(logits)
            word_nll += ((log_total - log_word) * scored).sum()
            if key is not None:
                lo, hi, allowed = mask(rows)
                allowed = allowed & (memory_targets[lo:hi] >= 0)
                q = query[rows] / C ** 0.5
                sim = (q @ key[lo:hi].T).masked_fill_(~allowed, -math.inf)          # (R, hi - lo)
                i, j = (allowed & (memory_targets[lo:hi] == w)).nonzero(as_tuple=True)
                match = sim[i, j]                                   # (pairs with x_j = w,)
                log_match = group_logsumexp(match, i, len(w))[:, None]
                log_w = torch.logaddexp(log_word, log_match)        # second term of Eq. 5
                top_sim, log_memory = exponentials_(sim)
                log_total = torch.logaddexp(log_total, log_memory)
                memory_prob += ((log_memory - log_total).exp() * scored).sum()
            nll += ((log_total - log_w) * scored).sum()
            if with_grad:
                dz = logits.mul_(scored * (top - log_total).exp())                  # P_v
                W_w = scored * (log_word - log_w).exp()
                dz.scatter_add_(1, index, -W_w)                     # - W_v
                df[rows] = dz @ weights[0]
                dw[0].addmm_(dz.T, f[rows])
                if tail.requires_grad:
                    grads = torch.autograd.grad(tail, (f_rows, *weights[1:]), -W_w)
                    for total, grad in zip((df[rows], *dw[1:]), grads):
                        total += grad
            if with_grad and key is not None:
                ds = sim.mul_(scored * (top_sim - log_total).exp())                 # P_j
                ds[i, j] -= scored[i, 0] * (match - log_w[i, 0]).exp()              # - W_j
                dq[rows] = ds @ key[lo:hi] / C ** 0.5
                dk[lo:hi].addmm_(ds.T, q)
        ctx.grads = df, dq, dk, *[None] * 5, *dw
        ctx.mark_non_differentiable(memory_prob, word_nll)
        return nll, memory_prob, word_nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d, *_):
        return tuple(None if x is None else x * d for x in ctx.grads)


class Gather(torch.autograd.Function):
    """(N, ...) of each process -> (processes N, ...), with the gradient that all_gather lacks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, d):
        d = d.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(d)                                          # every process used our rows
        return d.chunk(dist.get_world_size())[dist.get_rank()]


@dataclass
class Inference:
    """
    How words and memories make one distribution at test time. M (Eq. 7): local memory, the last
    `long` tokens of long memory, the K most similar entries of external memory.

        P(w)  ∝ exp(E_w · f) + Σ_{j in M: x_j = w} exp(sim_j / τ)       Eq. 6
        P'(w) ∝ Σ_{j in M: x_j = w} exp(sim_j / τ')                     Eq. 8, with ext
        P(w)  <- (1 - λ) P(w) + λ P'(w)                                 Eq. 9

    linear: Eq. 1, then Eq. 8 and 9 of local and long memory (continuous cache, Grave et al. 2017;
    τ = 1/θ), then of ext (kNN-LM, Khandelwal et al. 2020), with sim_j = -|q - k|² / (2 sqrt(C)):
    but for a constant the same as ours for keys of one length.
    """
    memories: tuple = ()        # of local, long, ext; (): Eq. 1
    linear: bool = False        # continuous cache and kNN-LM
    long: int = 0               # tokens of long memory
    n_neighbors: int = 1024     # K
    tau: float = 1.0            # τ of Eq. 6; linear: τ' of the cache
    lam: float = 0.0            # linear: λ of the cache
    tau_ext: float = 1.0        # τ' of Eq. 8; linear: of kNN-LM
    lam_ext: float = 0.0        # λ of Eq. 9; linear: of kNN-LM

    def log_p(self, logits, log_total, memories):
        """
        log P(w) of one word w per query, or of all words: (Q, 1 or V). logits, log_total: of
        Embedding.logits; memories: name -> sim (Q, M), and x_j = w, or x_j, (Q, M)
        """
        def logsumexps(names, tau):                                 # of sim_j / τ: all j, x_j = w
            size = dict(local=None, long=self.long, ext=self.n_neighbors)
            sim, x = (torch.cat([memories[name][i][:, :size[name]] for name in names], dim=1)
                      for i in (0, 1))
            sim = sim / tau
            top, total = exponentials_(sim)
            if x.dtype == torch.bool:
                return total, (sim * x).sum(1, keepdim=True).log() + top
            return total, torch.zeros_like(logits).scatter_add_(1, x, sim).log() + top

        log_p = logits - log_total                                  # Eq. 1
        if self.memories and not self.linear:
            total, match = logsumexps(self.memories, self.tau)      # Eq. 6
            log_p = torch.logaddexp(logits, match) - torch.logaddexp(log_total, total)
        cache = [name for name in self.memories if name != 'ext'], self.tau, self.lam
        ext = ['ext'] if self.linear else self.memories, self.tau_ext, self.lam_ext
        for names, tau, lam in (cache, ext):
            if lam > 0:
                total, match = logsumexps(names, tau)
                log_p_memory = match - total.clamp(min=-1e30) + math.log(lam)       # Eq. 8
                mixed = torch.logaddexp(log_p + math.log1p(-lam), log_p_memory)     # Eq. 9
                log_p = torch.where(total == -math.inf, log_p, mixed)
        return log_p


class Datastore:
    """
    External memory, Eq. 4: entry j is the key g(c_j) and the value x_j of position j of a text. The
    keys are fp16 in a faiss inverted file, memory-mapped; the values are the text. A search visits
    the nprobe nearest lists of each query; the similarities that it returns are exact.
    """
    SHARD = 2 ** 31                     # bytes of keys held in memory while a store is built

    def __init__(self, folder, model, text, about, nprobe, progress):
        """
        Opens the store of text (n + 1,) in folder, or builds it, or the rest of it after an
        interruption. about: what it depends on. SystemExit if the folder has another store
        """
        import faiss
        self.text, self.nprobe, file = text, nprobe, folder / 'about.json'
        if file.exists() and json.loads(file.read_text()) != about:
            raise SystemExit(f'{folder} is of another checkpoint or text: move or delete it')
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(about))
        if not (folder / 'keys.faiss').exists():
            self.build(folder, model, progress)
        flags = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR     # memory-mapped
        self.index = faiss.read_index(str(folder / 'keys.faiss'), flags)

    @torch.no_grad()
    def build(self, folder, model, progress):
        import faiss
        from faiss.contrib.ondisk import merge_ondisk
        n, C, T = len(self.text) - 1, model.config.n_embd, model.config.block_size
        n_lists, size = max(1, min(n // 1000, 16_384)), n * (2 * C + 8)     # 8: its number
        memory = min(size, self.SHARD) + 64 * n_lists * 4 * C
        print(f'datastore {folder}: {n:,} entries of width {C}, {size / 1e9:.2f} GB on disk; to '
              f'build it, twice that, and {memory / 1e9:.2f} GB of memory')

        def write(index, path):
            faiss.write_index(index, str(folder / 'new.faiss'))
            (folder / 'new.faiss').replace(path)                    # complete, or not there

        trained, step = folder / 'trained.faiss', -(-self.SHARD // (2 * C + 8))
        if not trained.exists():                                    # k-means of a sample of keys
            starts = range(0, n, max(T, T * n // (64 * n_lists)))
            texts = (model.ids(self.text[start:min(start + T, n)])[None] for start in starts)
            sample = torch.cat([model.encode(tokens)[1][0] for tokens in texts])
            index = faiss.IndexIVFScalarQuantizer(faiss.IndexFlatL2(C), C, n_lists,
                                                  faiss.ScalarQuantizer.QT_fp16)
            index.by_residual = False
            index.train(sample.float().cpu().numpy())
            write(index, trained)
        shards = {start: folder / f'shard-{start}.faiss' for start in range(0, n, step)}
        for start, path in shards.items():
            if not path.exists():
                at, end = max(0, start - T), min(start + step, n)   # T tokens of context
                index = faiss.read_index(str(trained))
                windows = model.windows(model.ids(self.text[at:end])[None])
                for _, g, _ in progress(windows, path.stem, (end - at) // model.stride):
                    g, at = g[0, max(0, start - at):].float().cpu().numpy(), at + g.size(1)
                    index.add_with_ids(g, np.arange(at - len(g), at))
                write(index, path)
        index = faiss.read_index(str(trained))
        merge_ondisk(index, [*map(str, shards.values())], str(folder / 'keys.ivfdata'))
        write(index, folder / 'keys.faiss')
        for path in (trained, *shards.values()):
            path.unlink()

    def search(self, query, K, l2=False, nprobe=None):
        """
        The K entries most similar to each query (Q, C): similarities, falling, and entries (Q, K);
        -inf and -1 where there are fewer. l2: sim is -|q - k|² / (2 sqrt(C)), not q · k / sqrt(C)
        """
        import faiss
        self.index.metric_type = faiss.METRIC_L2 if l2 else faiss.METRIC_INNER_PRODUCT
        self.index.nprobe = nprobe or self.nprobe
        sim, j = map(torch.from_numpy, self.index.search(query.float().cpu().numpy(), K))
        sim = sim / (-2 if l2 else 1) / query.size(1) ** 0.5
        return sim.masked_fill(j < 0, -math.inf).to(query), j.to(query.device)


# --------------------------------------------------------------------------------------------------
# the model

class TRIME(nn.Module):
    """A Transformer language model whose output softmax has memories beside the words."""
    TOKENS = 8192                       # encoded at once at test time

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)                          # also the output embedding E
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd)
        self.inference = self.tuned = Inference(('local',) * (config.memory != 'none'))
        self.shuffle, self.store, self.kernel = False, None, 'auto'
        self.stride = config.stride or max(1, config.block_size // 2)
        if config.memory == 'ext':                                  # g starts with norm C^(1/4)
            nn.init.constant_(self.blocks[-1].norm2.gain, config.n_embd ** -0.25)
        for name, p in self.named_parameters():                     # GPT-2's
            if p.dim() == 2:
                std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith('proj.weight') else 0.02
                nn.init.normal_(p, std=p.size(1) ** -0.5 if 'tail_proj' in name else std)

    def ids(self, array):
        return torch.from_numpy(array.astype(np.int64)).to(self.norm.gain.device)

    def encode(self, tokens, past=None):
        """
        f(c) and g(c) (B, t, C) for the contexts of tokens (B, t), and the new past; g is the input
        of the last MLP (§3). past: what an earlier call returned for the tokens before these
        """
        start = 0 if past is None else past[0][0].size(1)
        positions = start + torch.arange(tokens.size(1), device=tokens.device)
        angles = rotary(positions, self.config.n_embd // self.config.n_head)
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        past, new_past = past or [None] * len(self.blocks), []
        for block, kv in zip(self.blocks[:-1], past):
            x, kv = block(x, angles, kv)
            new_past.append(kv)
        last = self.blocks[-1]                                      # written out, because of g
        y, kv = last.attention(last.norm1(x), angles, past[-1])
        x = x + F.dropout(y, last.dropout, self.training)
        g = last.norm2(x)                                           # (B, t, C)
        f = self.norm(x + F.dropout(last.mlp(g), last.dropout, self.training))
        return f, g, new_past + [kv]

    def forward(self, batch, progress):
        """
        The training loss () in nats per token, and a dict of what to log; in eval mode, a causal
        loss. batch: tokens, targets, doc (B, T) int64 (targets -1: not scored), seed of all
        randomness; progress: step / max_steps
        """
        config, (B, T) = self.config, batch.tokens.shape
        memory = 'none' if progress < config.ce_warmup else config.memory           # §5.2
        if memory == 'ext' and not self.training:                   # ext sees later text
            memory = 'local'
        local = random.Random(batch.seed).random() >= config.p      # §4.3: one Bernoulli draw
        gather, first = config.gather_memory and dist.is_initialized(), 0
        if self.training and config.dropout:
            torch.manual_seed(batch.seed + (dist.get_rank() if gather else 0))
        f, g = (fp32(x).flatten(0, 1) for x in self.encode(batch.tokens)[:2])       # 2 x (N, C)
        key, targets, doc = memories = g, batch.targets.flatten(), batch.doc.flatten()
        if gather and self.training and memory in ('long', 'ext'):
            memories, first = map(Gather.apply, memories), dist.get_rank() * B * T
        key, memory_targets, memory_doc = memories                  # (M, C), (M,), (M,)
        mask = lambda rows: memory_mask(memory, rows, T, doc, memory_doc, first, local,
                                        config.same_document, config.m)
        key = None if memory == 'none' else key if config.memory_grad else key.detach()
        with torch.autocast(g.device.type, enabled=False):          # bf16: steps of 0.125 near 20
            loss, memory_prob, without_memory = TrimeLoss.apply(
                f, g, key, targets, memory_targets, mask, self.embedding, torch.is_grad_enabled(),
                *self.embedding.parameters())
        return loss, dict(memory_prob=memory_prob, loss_without_memory=without_memory)

    def windows(self, tokens, state=None):
        """
        Encodes tokens (B, t), which continue the text of `state`. When a window has T tokens, the
        last T - stride are encoded again with the next `stride` (App. D), many windows at once.
        Yields f, g (B, q, C) of the next q tokens and the state after them: the last long + T ids
        (B, n); g of each when it was new (B, n, C); g of the window (B, w, C); the window's past
        """
        T, S, C, kept = self.config.block_size, self.stride, self.config.n_embd, self.inference.long
        kept, none = kept + T, self.norm.gain.new_zeros(len(tokens), 0, C)
        text, scored, keys, past = state or (tokens[:, :0], none, none, None)
        while tokens.size(1):
            n, context = 1, keys                                    # the window continues
            if keys.size(1) < T:
                new, tokens = tokens.tensor_split([T - keys.size(1)], dim=1)
                f, g, past = self.encode(new, past)
            else:                                                   # n windows begin
                n, context = max(1, min(tokens.size(1) // S, self.TOKENS // T)), none
                new, tokens = tokens.tensor_split([n * S], dim=1)
                x = torch.cat([text[:, text.size(1) - T + S:], new], dim=1)
                f, g, past = self.encode(x.unfold(1, min(T, x.size(1)), S).flatten(0, 1))
            f, g = (x.unflatten(0, (-1, n)).unbind(1) for x in (f, g))      # n x (B, w, C)
            for ids, f_window, g_window in zip(new.chunk(n, dim=1), f, g):
                q, keys = ids.size(1), torch.cat([context, g_window], dim=1)
                text = torch.cat([text, ids], dim=1)[:, -kept:]
                scored = torch.cat([scored, g_window[:, -q:]], dim=1)[:, -kept:]
                state = text, scored, keys, past if n == 1 else None
                yield f_window[:, -q:], g_window[:, -q:], state

    def memories(self, g, state, w=None, every=1):
        """
        The memories of g (B, q, C), the last queries of the state's window, or each n-th of them:
        name -> sim (Q, M), the latest or most similar first, -inf where masked; their values, or
        where these are w (Q,) (Q, M); their positions in the state's text, or entries (.., M)
        """
        (text, scored, keys, _), (B, q, C), found = state, g.shape, {}
        n, start, x = text.size(1), text.size(1) - keys.size(1), self.inference
        g, i = fp32(g[:, ::every]), torch.arange(n - q, n, every, device=g.device)[:, None]
        spans = dict(local=(start, n), long=(max(0, start - x.long), start))
        for name in x.memories:
            if name == 'ext':                                       # Eq. 4
                sim, j = self.store.search(g.flatten(0, 1), x.n_neighbors, x.linear)
                j = (j + self.shuffle * (len(self.store.text) // 2)) % (len(self.store.text) - 1)
                values = self.ids(self.store.text[j.cpu().numpy() + 1]).unflatten(0, (B, -1))
            else:                                                   # Eq. 2, 3
                a, b = spans[name]
                j = torch.arange(b - 1, a - 1, -1, device=g.device)[None, :]        # (1, M)
                k = fp32(keys if name == 'local' else scored[:, a:b])
                sim = (g @ k.transpose(1, 2) / C ** 0.5).flip(2).masked_fill(j >= i, -math.inf)
                if self.shuffle:                                    # another memory of this query
                    M = i.clamp(max=b) - a
                    j = a + (j - a + M // 2) % M.clamp(min=1)
                sim, values = sim.flatten(0, 1), text[:, (j + 1).clamp(max=n - 1)]
            values = values.expand(B, i.size(0), -1) if w is None else values == w.view(B, -1, 1)
            found[name] = sim, values.flatten(0, 1), j
        return found

    def log_probs(self, tokens):
        """log P(next token | tokens so far) of a document, memory included: (B, t) -> (B, t, V)"""
        return self.stream(tokens)[0]

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """
        log P(next token | tokens so far) of tokens (B, t), any t >= 1, which continue the text of
        `state`, of the last call. -> (B, t, V) fp32, each row sums to one, and the new state
        """
        parts = []
        for f, g, state in self.windows(tokens, state):
            logits = self.embedding.logits(fp32(f).flatten(0, 1))   # (B q, V), (B q, 1)
            log_p = self.inference.log_p(*logits, self.memories(g, state))
            parts.append(log_p.unflatten(0, f.shape[:2]))           # (B, q, V)
        return torch.cat(parts, dim=1), state

    @torch.no_grad()
    def score(self, tokens, every=1):
        """Arguments of Inference.log_p for tokens 1, 1 + every, ... of a document, by window."""
        tokens, at = tokens.to(self.norm.gain.device), 1
        for f, g, state in self.windows(tokens[None, :-1]):
            w, at = tokens[at:at + f.size(1)][::every], at + f.size(1)
            logits = self.embedding.logits(fp32(f[0, ::every]), w)  # 2 x (q, 1)
            yield *logits, self.memories(g, state, w, every)

    def log_p(self, tokens):
        """log P of every token but the first of a document (n,), read from its start -> (n - 1,)"""
        return torch.cat([self.inference.log_p(*window)[:, 0] for window in self.score(tokens)])

    def ways(self):
        """How to evaluate the model: name -> attributes to set."""
        on, shuffled = (dict(inference=self.tuned, shuffle=shuffle) for shuffle in (False, True))
        off = dict(inference=Inference(), shuffle=False)
        return dict(on=on, shuffled=shuffled, off=off) if self.tuned.memories else dict(off=off)

    @torch.no_grad()
    def trace(self, tokens, t):
        """
        The memories that predict token t + 1 of a document (n,): list of (part of the probability,
        array of ids, start, end), the largest first; ids[start:end] ends with the memory's value
        """
        for f, g, state in self.windows(tokens[None, :t + 1].to(self.norm.gain.device)):
            pass                                                    # the last window has token t
        memories, n, found = self.memories(g[:, -1:], state), 0, []
        for name, (sim, _, j) in memories.items():                  # each is a word of its own
            memories[name] = sim, torch.arange(n, n := n + j.size(1), device=j.device)[None], j
        log_total = self.embedding.logits(fp32(f[0, -1:]))[1]
        parts = self.inference.log_p(log_total.new_full((1, n), -math.inf), log_total, memories)
        for name, (_, word, j) in memories.items():
            ids = self.store.text if name == 'ext' else tokens
            shift = 0 if name == 'ext' else t + 1 - state[0].size(1)
            for part, at in zip(parts.exp()[0, word[0]].tolist(), (j[0] + shift).tolist()):
                found += [(part, ids, max(0, at - 11), at + 2)] * (part > 0)
        return sorted(found, key=lambda memory: -memory[0])

    @torch.no_grad()
    def prepare_eval(self, corpus, args, path, progress):
        """
        Opens the datastore and tunes the inference on corpus.val; what was tuned is kept in the
        folder of the checkpoint file `path`. args: EvalConfig's fields, split
        """
        config, text, folder, sha = self.config, corpus, Path(path).parent, hashlib.sha256()
        for name, x in sorted(self.state_dict().items()):
            sha.update(name.encode() + x.cpu().contiguous().numpy().tobytes())
        weights, K = sha.hexdigest()[:16], args.n_neighbors or 1024
        self.stride = max(1, min(args.stride or self.stride, config.block_size))
        if args.tau < 0 or min(args.long, args.nprobe, K) < 1:
            raise SystemExit('--long, --nprobe and --n-neighbors must be positive, --tau 0 or more')
        names = {'long': 'local,long', 'ext': 'local,long,ext'}.get(config.memory, config.memory)
        names = [name for name in (args.memory or names).split(',') if name != 'none']  # Table 1
        linear = args.formula == 'linear' or args.formula == 'auto' and config.memory == 'none'
        if 'ext' in names:
            if args.datastore_from:                                 # by the data.py of the corpus
                load = sys.modules[type(corpus).__module__].load
                text = load(args.datastore_from, corpus.tokenizer)
            if args.split == 'train' and text.fingerprint == corpus.fingerprint:
                raise SystemExit('--split train with --memory ext: each token would find itself')
            about = dict(weights=weights, corpus=text.fingerprint, stride=self.stride)
            store = folder / f'datastore-{text.name}-{weights}-{self.stride}'
            self.store = Datastore(store, self, text.train.tokens, about, args.nprobe, progress)
        if 'ext' in names and args.recall:
            windows = self.windows(self.ids(corpus.val.tokens[:8192])[None])
            query = torch.cat([g[0, ::32] for _, g, _ in windows])
            exact, rows = (self.store.search(query, K, linear, n)[1] for n in (2 ** 20, None))
            hits = torch.stack([torch.isin(*pair) for pair in zip(exact, rows)])[exact >= 0]
            print(f'recall of the {K:,} nearest entries: {hits.float().mean():.1%}')
        tau, long = args.tau or 1.0, args.long if 'long' in names else 0
        x = Inference(names, linear, long, K, tau)
        key = json.dumps([asdict(x), args.tau, args.nprobe, self.stride, corpus.fingerprint,
                          text.fingerprint])
        file = folder / f'tuned-{weights}.json'
        tuned = json.loads(file.read_text()) if file.exists() else {}
        if key not in tuned:
            windows = collect(self, corpus.val, x, progress)
            tuned[key] = asdict(tune(windows, x, *['tau'] * bool(args.tau)))
            file.write_text(json.dumps(tuned, indent=1))
        self.inference = self.tuned = Inference(**tuned[key])
        print(f'{path}: {self.tuned}')


# --------------------------------------------------------------------------------------------------
# evaluation

TAUS = [0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.045, 0.065, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65,
        0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0]
LONG = [256 * 2 ** i for i in range(20)]
LAMBDAS = [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9]


def collect(model, split, x, progress=lambda items, _: items):
    """Every 16th of the first 65,536 tokens of a split, see TRIME.score, with the memories of x."""
    model.inference, windows, ends = x, [], np.minimum(split.offsets, 65_536)
    for a, b in progress([*zip(ends, ends[1:])], 'tuning'):
        windows += model.score(model.ids(split.tokens[a:b]), every=16)
    return windows


def tune(windows, x, *fixed):
    """
    The inference with the highest mean log P over what collect returns: all combinations of a
    temperature and its weight, then of sizes, until none is better. fixed: names of parameters
    """
    K, score = x.n_neighbors, lambda x: sum(x.log_p(*window).sum().item() for window in windows)
    values = dict(tau=TAUS, lam=LAMBDAS if x.linear and 'local' in x.memories else [0.0],
                  tau_ext=TAUS, lam_ext=LAMBDAS if 'ext' in x.memories else [0.0],
                  long=[n for n in LONG if n < x.long] + [x.long],
                  n_neighbors=[n for n in (1, 8, 64, 512) if n < K] + [K])
    values.update({name: [getattr(x, name)] for name in fixed})
    before = None
    while x != before:
        before = x
        for names in (('tau', 'lam'), ('tau_ext', 'lam_ext'), ('long', 'n_neighbors')):
            tries = itertools.product(*(values[name] for name in names))
            x = max([x, *(replace(x, **dict(zip(names, tried))) for tried in tries)], key=score)
    return x


def sweep(runs, corpus, split, args):
    """Perplexity by size of the long memory, all else tuned for each size (Figure 3)."""
    result = {}
    for run in runs:
        x = Inference(['local', 'long'], run.model.tuned.linear, args.long)
        windows, ends = collect(run.model, corpus.val, x), split.offsets
        for size in (0, *(n for n in LONG if n < args.long), args.long):
            run.model.inference = tune(windows, replace(x, long=size), 'long')
            texts = (run.model.ids(split.tokens[a:b]) for a, b in zip(ends, ends[1:]) if b - a > 1)
            log_p = torch.cat([run.model.log_p(tokens) for tokens in texts])
            result[f'{run.name} {size}'] = math.exp(-log_p.mean())
            print(f'{run.name}  long memory {size:6,}  perplexity {math.exp(-log_p.mean()):9.2f}')
    return result


TASKS = {'sweep': sweep}


# --------------------------------------------------------------------------------------------------
# a demo

if __name__ == '__main__':
    torch.manual_seed(0)
    tokens = torch.randint(4096, (4, 513))
    batch = SimpleNamespace(tokens=tokens[:, :-1], targets=tokens[:, 1:], seed=0,
                            doc=torch.arange(4)[:, None].expand(4, 512))
    for memory in ('none', 'local', 'long', 'ext'):
        model = TRIME(TRIMEConfig(memory=memory))
        loss, log = model(batch, progress=1.0)
        print(f'memory {memory:5}  loss {loss:.4f} on random tokens (ln V = {math.log(4096):.4f}), '
              f'{log["memory_prob"]:.3f} of the probability on memories')
    log_probs, _ = model.stream(tokens[:1, :8])                     # (1, 8, V)
    print(f'the probabilities of a next token sum to {log_probs[0, -1].exp().sum():.6f}')
