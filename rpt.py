"""
RPT, the Retrieval-Pretrained Transformer: a language model that retrieves from its own past.

    Ohad Rubin and Jonathan Berant, "Retrieval-Pretrained Transformer: Long-range Language Modeling
    with Self-retrieval", TACL 2024, arXiv:2306.13421

A document is cut into chunks. The lower half of the layers encodes it with sliding-window
attention. From these states each chunk computes a query, scores the chunks that have left its
window and retrieves the best few. Upper layers attend to them while they predict the next chunk.
A ranking loss trains the retriever to agree with a reference LM on which chunks help.

Where the paper is in this file (its equations have no numbers)
    §3.1  chunks, s_q, the top K; neighbors, gate   Retriever, RPT.retrieve; NeighborEncoder
    §3.1  chunked cross-attention                   ChunkedCrossAttention
    §3.2  candidates by BM25; s_t, the target score bm25_candidates, target_scores, setup
    §3.3  L_ret, LambdaRank with a margin           ranking_loss
    §3.3, §3.4  schedules; windows; inference       RPT.schedule, SelfAttention, RPT.encode
    §5    Transformer-XL, RETRO, RPT-Lex; Table 3   --retriever none, bm25, lex; ranks

Letters in the shape comments
    B sequences    T tokens (t of a piece)    C width    H heads    D head size    V vocabulary
    N, c, M chunks of a sequence, of a piece, so far    m tokens of a chunk    w chunks of a window
    K neighbors of a chunk    G = c + 1 groups of m tokens    n, a, b, s other sizes

Where we differ from the paper, and why
    Scores are divided by sqrt(C); s_t is a mean over tokens, L_ret over the chunks with a positive;
    NDCG discounts by 1 / log2(1 + rank). A chunk without neighbors gets 0 from cross-attention.
    Scheduled sampling draws for each chunk. Retrieved states have passed the retriever's attention.
    The gate attends to neighbors of w chunks, so that a stream keeps no others (paper: of all).
    With --shift-values (not in the preset `paper`) one layer can copy what followed a token.
    The reference LM (paper: Pythia 1.4B) has half the layers and a continuous cache, is trained on
    the same documents and scores every n-th chunk; the others are taught as in RPT-Lex. Muon or
    AdamW, not AdaBelief; dropout on what layers add; self-attention crosses joined documents;
    corpus idf; exact search (paper: faiss); norms and biases in retriever and gate.

    $ python rpt.py                         a demo, on a CPU
    $ python train.py --model rpt           a reference LM, then RPT, which it teaches
"""
import functools, hashlib, inspect, math, os, zlib
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bm25 import idf_lucene


def check_positive(config, names):
    """Raises ValueError unless each of these fields is 1 or more."""
    for name in names.split():
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f'{name} is {value}, it must be 1 or more')


@dataclass
class RPTConfig:
    vocab_size: int = 4096        # ids of the tokenizer; for bpe, how many to train (ours)
    block_size: int = 1024        # tokens of a training sequence, T (ours; paper: 16K)
    micro_batch: int = 2          # sequences of a micro-batch, B (ours)
    n_layer: int = 4              # layers, half of them lower; see n_cca (ours; paper: 12)
    n_head: int = 4               # attention heads, H (ours; paper: 8)
    n_embd: int = 128             # width, C (ours; paper: 1,024)
    n_inner: int = 0              # hidden width of the MLP; 0: 4 C (paper)
    dropout: float = 0.0          # on embeddings and what layers add (ours; paper: 0.05)
    window: int = 128             # two attention blocks: its own, one before (ours; paper: 2,048)
    chunk_size: int = 32          # tokens of a chunk, m (ours; paper: 64)
    n_neighbors: int = 2          # chunks that a chunk retrieves, K (paper; tiny: 4, as m is half)
    n_cca: int = 0                # last layers that cross-attend; 0: upper half (paper: 5; tiny: 1)
    retriever: Literal['sem', 'lex', 'bm25', 'none'] = 'sem'    # RPT-Sem, RPT-Lex; RETRO; none (§5)
    shift_values: bool = True     # in cross-attention a token has the next one's value (ours)
    gate: bool = True             # neighbors are weighted before cross-attention (paper)
    eta: float = 0.1              # lower bound of the gate, η (paper)
    alpha: float = 0.005          # weight of L_ret from a fifth of the steps on (ours; paper: 1e-9)
    tau: float = 4.0              # margin of L_ret, rises from 1 to this (paper: 2, 4, 8 or 128)
    teacher: Literal['annealed', 'always', 'never'] = 'annealed'    # of sem, lex: when it chooses
    n_candidates: int = 20        # BM25 candidates of a chunk, J (paper)
    score_every: int = 1          # the reference LM scores every n-th chunk; others: as lex (ours)
    reference: str = ''           # .pt file, or folder with ckpt.pt; default: one is trained first
    reference_steps: int = 600    # steps of its training, at most as many as RPT's (ours)
    reference_cache: float = 0.2  # weight of its continuous cache, λ (ours; paper: 0)

    def __post_init__(self):
        if self.n_embd % (2 * self.n_head) or self.n_cca > self.n_layer - self.n_layer // 2:
            raise ValueError('n_embd: a multiple of 2 n_head; n_cca: at most half of n_layer')
        if self.window % (2 * self.chunk_size) or self.n_candidates < self.n_neighbors:
            raise ValueError('window: a multiple of 2 chunk_size; n_candidates: >= n_neighbors')
        if self.retriever != 'none' and self.block_size < self.window + 2 * self.chunk_size:
            raise ValueError(f'block_size {self.block_size} is below window + 2 x chunk_size')
        if self.reference and self.retriever != 'sem':
            raise ValueError('a reference is for retriever sem')
        if not max(self.dropout, self.eta, self.reference_cache) < 1:
            raise ValueError('dropout, eta and reference_cache are below 1')


PRESETS = {         # §3.4, App. A, B; ours: tokenizer, optimizer, its settings, alpha, reference LM
    'tiny': dict(n_neighbors=4, n_cca=1, n_candidates=4, score_every=8, reference_steps=300),
    'paper': dict(data='pg19', tokenizer='gpt2', vocab_size=50_257, block_size=16_384,
                  micro_batch=1, n_layer=12, n_head=8, n_embd=1024, dropout=0.05, window=2048,
                  chunk_size=64, n_cca=5, tokens_per_step=131_072, max_steps=500_000, lr=5e-4,
                  optimizer='adamw', warmup=0.01, weight_decay=0.01, eval_every=1000,
                  shift_values=False, reference_steps=50_000, reference_cache=0.0),
}


def batches(config):
    return dict(kind='documents', chunk=config.chunk_size)      # of data.Corpus.batches


# --------------------------------------------------------------------------------------------------
# the transformer (what two model files define has the same text, but SelfAttention, MLP, Block)
def RMSNorm(n_embd):
    """x / rms(x) * weight, over the last axis (Zhang & Sennrich 2019)."""
    return nn.RMSNorm(n_embd, eps=1e-6)


def fp32(x):
    """bf16 and fp16 become fp32; fp64 remains, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(a, b):
    """a bᵀ in fp32, under autocast too: bf16 has steps of 0.125 near 20.

    a (..., n, C)   b (..., m, C) -> (..., n, m)"""
    with torch.autocast(a.device.type, enabled=False):
        return fp32(a) @ fp32(b).mT


def rotate(x, first=0):
    """Rotary embeddings (Su et al. 2021): at position p = first, first + 1, ... each pair
    (x_2d, x_2d+1) of a head is rotated by the angle p θ_d, θ_d = 10000^(-2d/D).

    x (..., T, H, D) -> (..., T, H, D)"""
    T, D = x.size(-3), x.size(-1)
    theta = 10000 ** (-torch.arange(0, D, 2, device=x.device) / D)      # (D/2,)
    positions = torch.arange(first, first + T, device=x.device)
    angle = positions[:, None, None] * theta                            # (T, 1, D/2)

    # a pair is a complex number, its rotation a product with cos + i sin
    pairs = fp32(x).unflatten(-1, (-1, 2)).contiguous()                 # (..., T, H, D/2, 2)
    rotation = torch.complex(angle.cos(), angle.sin())
    rotated = torch.view_as_complex(pairs) * rotation                   # (..., T, H, D/2)
    return torch.view_as_real(rotated).flatten(-2).type_as(x)


def softmax_attention(q, k, v, bias=None):
    """softmax(q kᵀ / sqrt(D) + bias) v; bias is broadcast to (B, H, t, s).

    q (B, t, H, D)   k, v (B, s, H, D) -> (B, t, H, D)"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                    # (B, H, t or s, D)
    if q.device.type == 'cpu' and q.dtype == torch.bfloat16:
        # the formula itself: on a CPU in bf16 faster than the fused kernel (torch 2.13)
        scores = q / q.size(-1) ** 0.5 @ k.mT                           # (B, H, t, s)
        if bias is not None:
            scores = scores + bias
        y = scores.softmax(-1) @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, bias)
    return y.transpose(1, 2)


def window_attention(q, k, v, window, slopes):
    """softmax_attention of queries to keys of the same position or up to window - 1 before. The
    queries (B, t, H, D) have the positions of the last t of the keys (B, s, H, D)."""
    position = torch.arange(k.size(1), device=k.device)
    age = position[-q.size(1):, None] - position                        # (t, s)
    bias = -slopes * age                                                # ALiBi
    bias = bias.masked_fill((age < 0) | (age >= window), -math.inf)
    return softmax_attention(q, k, v, bias.to(q.dtype))


def in_blocks(x, block):
    """Cuts x (B, T, H, D) into n blocks -> (B, n, block, H, D); the last is padded with zeros."""
    padding = -x.size(1) % block
    return F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, block))


def attend(q, k, v, block, window, slopes=0.0):
    """Causal attention in blocks, linear in T: a query of block n attends to keys of blocks n - 1
    and n, none later, none `window` or more tokens older. With slopes (1, H, 1, 1), ALiBi (Press et
    al. 2022) subtracts slope * age from each score.

    q (B, T, H, D)   k, v (B, P + T, H, D): P < 2 block keys precede the queries, the first of them
    begins a block -> (B, T, H, D)"""
    T, P = q.size(1), k.size(1) - q.size(1)

    # queries up to the end of the first block: in a stream it can be incomplete
    n = min(T, block - P % block)
    first = window_attention(q[:, :n], k[:, :P + n], v[:, :P + n], window, slopes)
    if n == T:
        return first

    # the blocks after it, in one product, as a GPU needs few and large ones
    keys_start = P + n - block                                          # one block earlier
    q = in_blocks(q[:, n:], block)                                      # (B, N, block, H, D)
    k = in_blocks(k[:, keys_start:], block)                             # (B, N + 1, block, H, D)
    v = in_blocks(v[:, keys_start:], block)
    k = torch.cat([k[:, :-1], k[:, 1:]], dim=2)                         # (B, N, 2 block, H, D)
    v = torch.cat([v[:, :-1], v[:, 1:]], dim=2)
    rest = window_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), window, slopes)
    rest = rest.unflatten(0, q.shape[:2]).flatten(1, 2)                 # (B, N block, H, D)
    return torch.cat([first, rest[:, :T - n]], dim=1)


class MLP(nn.Module):
    """Two layers, the hidden one wider."""
    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 4 * config.n_embd
        self.fc = nn.Linear(config.n_embd, n_inner, bias=False)
        self.proj = nn.Linear(n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class CrossEntropy(torch.autograd.Function):
    """Σ -log P(w), P = softmax(f Eᵀ) in fp32. The (n, V) logits are never held: the forward pass
    computes the gradient too, from the logits of R rows at a time. The derivative of -log P(w) by
    the logits is P - 1[w].

    f (n, C)   E (V, C)   targets w (n,) -> ()"""
    R = 1024

    @staticmethod
    def forward(ctx, f, E, targets):
        df, dE = torch.empty_like(f), torch.zeros_like(E)
        nats = fp32(f).new_zeros(())
        with torch.autocast(f.device.type, enabled=False):
            for start in range(0, len(f), CrossEntropy.R):
                rows = slice(start, start + CrossEntropy.R)
                w = targets[rows]                                       # (R,)
                i = torch.arange(len(w), device=w.device)
                log_p = product(f[rows], E).log_softmax(1)              # (R, V)
                nats -= log_p[i, w].sum()
                if f.requires_grad:
                    dlogits = log_p.exp_()
                    dlogits[i, w] -= 1
                    df[rows] = dlogits @ fp32(E)
                    dE.addmm_(dlogits.T, fp32(f[rows]))
        ctx.grads = df, dE
        return nats

    @staticmethod
    def backward(ctx, dnats):
        df, dE = ctx.grads
        return dnats * df, dnats * dE, None


def cross_entropy(f, E, targets):
    """Mean of -log P(w), P = softmax(f Eᵀ), over the targets w >= 0.

    f (B, T, C)   E (V, C)   targets (B, T), -1 is not scored -> ()"""
    scored = targets >= 0
    nats = CrossEntropy.apply(f[scored], E, targets[scored])
    return nats / scored.sum().clamp(min=1)


# --------------------------------------------------------------------------------------------------
# what is new in RPT
class SelfAttention(nn.Module):
    """§3.4: causal, in blocks of half a window; a token attends to its block and the one before."""
    def __init__(self, config):
        super().__init__()
        self.n_head, self.block, self.m = config.n_head, config.window // 2, config.chunk_size
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, past):
        q, k, v = self.qkv(x).unflatten(2, (3, self.n_head, -1)).unbind(2)  # 3 x (B, t, H, D)
        if past is not None:
            k, v = (torch.cat(pair, dim=1) for pair in zip(past, (k, v)))
        q = rotate(q, k.size(1) - x.size(1))                                # cached k: not rotated
        y = attend(q, rotate(k), v, self.block, 2 * self.block)
        end = k.size(1) // self.m * self.m                                  # of whole chunks
        start = max(0, end // self.block - 1) * self.block                  # of the last two blocks
        return self.proj(y.flatten(2)), (k[:, start:end], v[:, start:end])


class Attention(nn.Module):
    """Tokens of x attend to those of y where mask is True; positions start at 0, x's at `first`."""
    def __init__(self, config, shift=False):
        super().__init__()
        C, self.n_head, self.shift = config.n_embd, config.n_head, shift
        self.query, self.kv = nn.Linear(C, C, bias=False), nn.Linear(C, 2 * C, bias=False)
        self.proj = nn.Linear(C, C, bias=False)

    def forward(self, x, y, first=0, mask=None):
        """x (n, a, t, C), y (n, b, s, C), mask broadcast to (n, H, a t, b s) -> as x"""
        q = self.query(x).unflatten(-1, (self.n_head, -1))                  # (n, a, t, H, D)
        k, v = self.kv(y).unflatten(-1, (2, self.n_head, -1)).unbind(3)     # 2 x (n, b, s, H, D)
        v = v.roll(-1, dims=2) if self.shift else v                         # next token's; cyclic
        q, k, v = (z.flatten(1, 2) for z in (rotate(q, first), rotate(k), v))
        mask = None if mask is None else (mask.to(q.dtype) - 1) * 1e9       # 0; -1e9: e^z is 0
        y = softmax_attention(q, k, v, mask)                                # (n, a t, H, D)
        return self.proj(y.flatten(2)).view_as(x)


class Retriever(nn.Module):
    """§3.1: s_q(c) = <W_Q c_q, W_K c> / sqrt(C), c the mean of a chunk's tokens after attention."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.norm, self.attention = RMSNorm(C), Attention(config)
        self.norm_q, self.norm_k = RMSNorm(C), RMSNorm(C)
        self.query, self.key = nn.Linear(C, C), nn.Linear(C, C)             # W_Q, W_K

    def forward(self, x):
        """x (B, c, m, C) -> states (B, c, m, C) to be retrieved, queries and keys (B, c, C)"""
        y = self.norm(x).flatten(0, 1)[:, None]                             # (B c, 1, m, C)
        x = x + self.attention(y, y).view_as(x)
        return x, self.query(self.norm_q(x.mean(2))), self.key(self.norm_k(x.mean(2)))


class NeighborEncoder(nn.Module):
    """§3.1: a neighbor, a retrieved chunk and its next one, before it is attended to."""
    def __init__(self, config):
        super().__init__()
        C, self.config = config.n_embd, config
        self.norm1, self.attention = RMSNorm(C), Attention(config)
        self.norm2, self.norm_query, self.cross = RMSNorm(C), RMSNorm(C), Attention(config)
        if config.gate:
            self.norm3, self.gate_attention = RMSNorm(C), Attention(config)
            self.norm_gate, self.gate = RMSNorm(C), nn.Linear(C, 1)

    def pairs(self, x):
        """Each chunk of x (B, n, m, C) and the next, attending to themselves: (B, n - 1, 2m, C)"""
        x = torch.cat([x[:, :-1], x[:, 1:]], dim=2)
        y = self.norm1(x).flatten(0, 1)[:, None]                            # (B (n - 1), 1, 2m, C)
        return x + self.attention(y, y).view_as(x)

    def forward(self, x, chunk):
        """x (n, K, 2m, C), such pairs, attend to the chunk (n, m, C) that retrieves them -> as x"""
        return x + self.cross(self.norm2(x), self.norm_query(chunk)[:, None])

    def gates(self, neighbors, chosen):
        """max(η, σ((w_ng · norm(ĉ) + b) / C)) (B, n, K), 0: no neighbor. ĉ: mean of one (B, n, K,
        2m, C) after attention to itself, better ones of its chunk, those of w - 1 chunks before."""
        (B, n, K), config, valid = chosen.shape, self.config, chosen >= 0
        if not config.gate: return valid.to(neighbors.dtype)
        # a chunk with neighbors is w chunks into its document or more: the w - 1 before are of it
        mean = neighbors.mean(3).view(B, 1, n * K, -1)                      # (B, 1, n K, C)
        j = torch.arange(n * K, device=chosen.device)
        chunk, w = j // K, config.window // config.chunk_size
        mask = (j <= j[:, None]) & (chunk > chunk[:, None] - w) & valid.view(B, 1, 1, -1)
        y = self.norm3(mean)
        mean = mean + self.gate_attention(y, y, mask=mask)                  # ĉ
        with torch.autocast(mean.device.type, enabled=False):               # z is tiny
            z = self.gate(self.norm_gate(fp32(mean))) / config.n_embd       # (B, 1, n K, 1)
        return z.sigmoid().clamp(min=config.eta).view(B, n, K) * valid


class ChunkedCrossAttention(nn.Module):
    """Borgeaud et al. 2022, §2.4: a group of m tokens attends to the neighbors of chunk i: the last
    token of chunk i, the first that may depend on them, and all but the last of chunk i + 1. Their
    positions are m - 1 to 2m - 2, neighbors' 0 to 2m - 1. A norm of these would undo the gate."""
    def __init__(self, config):
        super().__init__()
        self.norm, self.m = RMSNorm(config.n_embd), config.chunk_size
        self.attention = Attention(config, config.shift_values)

    def forward(self, x, neighbors, mask, attends):
        """x (B, t, C) of G groups; neighbors (B, G, K, 2m, C), mask (B, G, K 2m); attends (B, t)"""
        (B, t, C), G, m = x.shape, neighbors.size(1), self.m
        groups = F.pad(x, (0, 0, 1, G * m - 1 - t)).view(B * G, 1, m, C)
        y = self.attention(self.norm(groups), neighbors.flatten(0, 1), m - 1,
                           mask.view(B * G, 1, 1, -1))
        return y.view(B, G * m, C)[:, 1:t + 1] * attends[..., None]


class Block(nn.Module):
    """One pre-norm Transformer layer; returns its keys and values too, for streaming."""
    def __init__(self, config, cross_attends=False):
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.n_embd), SelfAttention(config)
        self.norm2, self.mlp = RMSNorm(config.n_embd), MLP(config)
        self.cca = ChunkedCrossAttention(config) if cross_attends else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past, cross=None):
        y, kv = self.attention(self.norm1(x), past)
        x = x + self.dropout(y)
        if self.cca and cross:
            x = x + self.dropout(self.cca(x, *cross))
        return x + self.dropout(self.mlp(self.norm2(x))), kv


def doc_of_chunks(doc, m):
    """doc (B, T) of tokens -> (B, N) of chunks, -1 if the tokens are of two documents or padding"""
    last = doc[:, m - 1::m]
    first = doc[:, ::m][:, :last.size(1)]
    return first.where(first == last, -1)


def permitted(doc, c, w):
    """(B, c, M): may chunk i of the last c retrieve k? doc (B, M) of chunks, -1: of no document"""
    k = torch.arange(doc.size(-1), device=doc.device)
    i, doc_i = k[-c:, None], doc[..., -c:, None]
    return (k <= i - w) & (doc[..., None, :] == doc_i) & (doc_i >= 0)       # k has left i's window


def top(scores, allowed, K):
    """Indices (..., K) of the highest allowed of scores (..., n), -1 where there are fewer"""
    scores = F.pad(scores.where(allowed, -math.inf), (0, K), value=-math.inf)
    values, indices = scores.sort(descending=True, stable=True)
    return indices.masked_fill(values == -math.inf, -1)[..., :K]


def ranking_loss(s_q, s_t, tau):
    """§3.3: LambdaRank with a margin, over positives l (s_t > 0) and permitted j; r: rank by s_q

        L_ret = Σ_{l, j: s_t(l) > s_t(j)} λ_lj max(0, τ - (s_q(l) - s_q(j)))
        λ_lj  = |2^s_t(l) - 2^max(s_t(j), 0)| |1 / log2(1 + r_l) - 1 / log2(1 + r_j)| / IDCG

    s_q (B, N, N), -inf: not permitted, s_t (B, N, N) -> L_ret and NDCG@20 of each chunk, (B, N)"""
    pairs = lambda x: x[..., None] - x[:, :, None]                          # x_l - x_j (B, N, N, N)
    gain = torch.exp2(s_t.clamp(min=0)) - 1                                 # (B, N, N)
    rank = 1 + s_q.argsort(descending=True, stable=True).argsort()
    discount = 1 / torch.log2(1 + rank)
    ideal = gain.sort(descending=True).values * discount.sort(descending=True).values
    lam = pairs(gain).clamp(min=0) * pairs(discount).abs()                  # 0 if s_t(l) <= s_t(j)
    hinge = (tau - pairs(s_q.clamp(min=-1e9))).clamp(min=0)                 # j not permitted: 0
    loss = (lam * hinge).sum((2, 3)) / ideal.sum(2).clamp(min=1e-9)
    ndcg = (gain * discount * (rank <= 20)).sum(2) / ideal[..., :20].sum(2).clamp(min=1e-9)
    return loss, ndcg


def bm25_vectors(tokens, idf):
    """tokens (..., m), idf (V,) -> q, k (..., V); <q, k> is BM25, as chunks are equally long."""
    q = idf.new_zeros(*tokens.shape[:-1], len(idf))
    q = q.scatter_add(-1, tokens, q.new_ones(tokens.shape))                 # occurrences
    k = idf * q / (q + 1.2)
    return q, (2 ** 10 * k).round() / 2 ** 10           # so sums are exact, and ties remain ties


def corpus_idf(tokens, m, V):
    """idf (V,) of the chunks of a corpus, as in bm25.py"""
    n, df = len(tokens) // m, np.zeros(V)
    for chunk in tokens[:n * m].reshape(n, m):
        df[chunk] += 1                                                      # a repeated id: once
    return torch.from_numpy(idf_lucene(n, df))


def bm25_candidates(chunks, doc, w, J, idf):
    """§3.2: chunks (N, m), doc (N,) -> s_t of RPT-Lex (N, N): J best: 1 - r / J (ours), else 0"""
    q, keys = bm25_vectors(chunks, idf)                                     # (N, V)
    scores = (q + q.roll(-1, 0)) @ keys.T                                   # of (c_i, c_{i+1})
    has_target = F.pad(doc[1:] == doc[:-1], (0, 1))[:, None]                # c_{i+1}
    allowed = permitted(doc, len(doc), w) & has_target & (scores > 0)
    order = (scores * allowed).argsort(descending=True, stable=True)
    return (1 - order.argsort() / J).clamp(min=0) * allowed                 # r = 0, 1, ...


@torch.no_grad()
def target_scores(reference, chunks, candidates):
    """§3.2: how much candidate j of chunk i helps the reference LM to predict the target c_{i+1}:

        s_t(c_j) = (log P(c_{i+1} | c_j, c_{j+1}, c_i) - log P(c_{i+1} | c_{i-2}, c_{i-1}, c_i)) / m

    P is (1 - λ) P_LM + λ P_cache, as small LMs hardly copy. Continuous cache (Grave et al. 2017):
    P_cache(x) = Σ softmax_u(f_t · f_u / sqrt(C)) over the tokens u < t that x follows.
    chunks (N, m), candidates (N, N): True or not -> s_t (N, N), 0 where not"""
    (N, m), lam = chunks.shape, reference.config.reference_cache            # λ
    baseline = candidates.any(1)[2:].diag(-2)                               # (N, N) at j = i - 2
    log_p = torch.zeros(N, N, device=chunks.device)
    for pairs in (candidates | baseline).nonzero().split(max(1, 1024 // m)):
        i, j = pairs.unbind(1)                                              # (n,)
        tokens = chunks[torch.stack([j, j + 1, i, i + 1], dim=1)].flatten(1)
        f = reference.encode(tokens)[0]                                     # (n, 4m, C)
        f_t, x = f[:, -m - 1:-1].contiguous(), tokens[:, -m:, None]         # x follows t
        s = product(f_t, f[:, :-1]) / f.size(2) ** 0.5                      # (n, m, 4m - 1)
        later = torch.full_like(s, -math.inf).triu(3 * m - 1)               # row 0: t = 3m - 1
        p_u = (s + later).softmax(2)                                        # u < t
        p_cache = (p_u * (tokens[:, None, 1:] == x)).sum(2)                 # x follows u
        log_lm = reference.logits(f_t).log_softmax(2).gather(2, x)[..., 0]  # (n, m)
        log_mix = torch.logaddexp(log_lm + math.log(1 - lam), (lam * p_cache).log())
        log_p[i, j] = log_mix.mean(1)                                       # over m tokens
    return (log_p - (log_p * baseline).sum(1, keepdim=True)) * candidates


def load_reference(c, config, corpus, train_reference):
    """The reference LM, of --reference or trained first; its window has the four chunks of s_t."""
    half, window = max(1, c.n_layer // 2), 4 * c.chunk_size
    path = c.reference or train_reference(
        replace(c, n_layer=half, n_cca=0, window=max(c.window, window), retriever='none'),
        replace(config, init='', max_steps=min(c.reference_steps, config.max_steps)))
    path = Path(path, 'ckpt.pt') if Path(path).is_dir() else path
    try:
        file = torch.load(path, map_location='cpu', weights_only=True)
        assert file['tokenizer'] == corpus.tokenizer.to_dict()
        assert file['config']['window'] >= window and file['config']['retriever'] == 'none'
        reference = RPT(RPTConfig(**file['config'])).eval().requires_grad_(False)
        reference.load_state_dict(file['model'])
    except Exception as e:                              # a broken file can raise anything
        raise SystemExit(f'--reference {path}: no RPT of retriever none with this tokenizer and '
                         f'window >= {window} ({e!r:.99})')
    reference.config.reference_cache = c.reference_cache
    return reference


# data.Batch, s_t (B, N, N), and how many chunks of a micro-batch have a positive: the step's mean
TaughtBatch = namedtuple('TaughtBatch', 'tokens targets doc seed target_scores ranked')


def setup(model, corpus, batches, config, autocast, train_reference, progress):
    """Stores s_t of each sequence that the run will use in a file, in a folder whose name is a hash
    of what they depend on; each process does its share. -> attach(batch, g), a TaughtBatch"""
    c, m, device = model.config, model.config.chunk_size, model.embedding.weight.device
    if c.retriever == 'none': return lambda batch, g: batch
    idf, reference, weights = corpus_idf(corpus.train.tokens, m, c.vocab_size), None, b''
    if c.retriever == 'bm25': model.idf.copy_(idf)
    if c.retriever == 'sem':
        reference = load_reference(c, config, corpus, train_reference)
        weights = b''.join(p.numpy().tobytes() for p in reference.parameters())
        reference.to(device)
        reference.encode = autocast()(reference.encode)                 # the scores remain fp32
    facts = [corpus.fingerprint, corpus.hops, corpus.hops * config.seed, config.dtype, m, model.w,
             c.n_candidates, c.score_every, c.reference_cache,
             *map(inspect.getsource, (target_scores, bm25_candidates, bm25_vectors))]
    name = hashlib.sha256(repr(facts).encode() + weights).hexdigest()[:16]
    folder = corpus.folder / f'scores-{name}'
    folder.mkdir(exist_ok=True)
    n = config.tokens_per_step // (batches.B * batches.T)               # micro-batches of a step

    @functools.lru_cache(n)                                             # attach reads each n times
    def scores(g):
        """s_t (B, N, N) of micro-batch g; each sequence's is computed only once"""
        batch = batches[g]
        doc, T = doc_of_chunks(batch.doc, m), batch.tokens.size(1)
        B, N = doc.shape
        s_t = torch.zeros(B, N, N)
        scored = (torch.arange(N) % c.score_every == 0)[:, None]
        for b, row in enumerate(batches.rows(g)):
            path, temporary = folder / f'{T}-{row}.npy', folder / f'{os.getpid()}.tmp.npy'
            if not path.exists():
                chunks = batch.tokens[b, :N * m].view(N, m)
                new = bm25_candidates(chunks, doc[b], model.w, c.n_candidates, idf)
                pairs = scored & (new > 0)
                if reference and pairs.any():
                    s_lm = target_scores(reference, chunks.to(device), pairs.to(device))
                    new = s_lm.cpu().where(pairs, new)
                np.save(temporary, new.numpy())
                temporary.replace(path)
            s_t[b] = torch.from_numpy(np.load(path))
        return s_t

    if reference:                                       # candidate i of chunk i holds the target
        chunks = batches[0].tokens[0].split(m)[:c.block_size // m]
        itself = torch.eye(len(chunks), dtype=torch.bool, device=device)
        itself[-1] = itself[:2] = False                             # no target, no baseline
        copy = target_scores(reference, torch.stack(chunks).to(device), itself)[itself].mean()
        weak = ', too little to teach: see --reference-cache' if copy < 0.5 else ''
        print(f'a copy of the target is worth {copy:.3f} nats per token to the reference LM{weak}')
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    for g in progress(range(rank, n * config.max_steps, world), f'scores in {folder}', quiet=rank):
        scores(g)

    def attach(batch, g):
        first = g - g % n                                           # of the step
        ranked = sum((scores(i) > 0).any(2).sum().item() for i in range(first, first + n))
        return TaughtBatch(*batch, scores(g), max(1, ranked) / n)
    return attach


# --------------------------------------------------------------------------------------------------
# the model
class State(NamedTuple):
    """What a stream keeps of a text: M whole chunks, neighbors of the last n >= w of them"""
    past: list                  # of each layer, keys and values of the last two blocks
    rest: torch.Tensor          # (B, fewer than m) tokens of the unfinished chunk
    last: torch.Tensor          # (B, 1, m, C) of the last chunk, which is not yet a pair
    pairs: torch.Tensor         # (B, M, 2m, C) to be retrieved: zeros, then chunk and next chunk
    keys: torch.Tensor          # (B, M, C) of all chunks; RETRO: (B, M, V)
    chosen: torch.Tensor        # (B, n, K) numbers of the neighbors, -1: none
    neighbors: torch.Tensor     # (B, n, K, 2m, C) their states
    gates: torch.Tensor         # (B, n, K) their weights; the first w - 1 of the n are not used


class RPT(nn.Module):
    """A sliding-window LM whose upper layers attend to chunks that its lower layers retrieve."""
    PIECE = 2048                        # tokens of a text that are encoded at once

    def __init__(self, config):
        super().__init__()
        seed = torch.randint(2 ** 48, (), device='cpu').item()
        C, kind, upper = config.n_embd, config.retriever, config.n_layer - config.n_layer // 2
        n_cca = 0 if kind == 'none' else config.n_cca or upper
        self.config, self.w = config, config.window // config.chunk_size
        self.retrieval = 'on' if n_cca else 'off'                           # see ways
        self.embedding = nn.Embedding(config.vocab_size, C)                 # also the output's
        self.lower = nn.ModuleList(Block(config) for _ in range(config.n_layer - upper))
        self.upper = nn.ModuleList(Block(config, i >= upper - n_cca) for i in range(upper))
        self.retriever = Retriever(config) if kind in ('sem', 'lex') else None
        self.neighbor_encoder = NeighborEncoder(config) if n_cca else None
        self.norm = RMSNorm(C)
        self.register_buffer('idf', torch.zeros(config.vocab_size) if kind == 'bm25' else None)
        for name, p in self.named_parameters():     # GPT-2's, for width C; by name, so that equal
            if p.dim() == 2:                        # parts of different models begin equal
                torch.manual_seed(seed + zlib.crc32(name.encode()))
                deep = math.sqrt(2 * config.n_layer) if name.endswith('proj.weight') else 1
                nn.init.normal_(p, std=0.02 * math.sqrt(768 / C) / deep)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def empty_state(self, tokens):
        c, zeros = self.config, self.embedding.weight.new_zeros
        B, w, m, K, C = len(tokens), self.w, c.chunk_size, c.n_neighbors, c.n_embd
        keys = zeros(B, 0, c.vocab_size if c.retriever == 'bm25' else C)
        return State([None] * c.n_layer, tokens[:, :0], zeros(B, 0, m, C), zeros(B, 1, 2 * m, C),
                     keys, zeros(B, w, K).long() - 1, zeros(B, w, K, 2 * m, C), zeros(B, w, K))

    def retrieve(self, x, tokens, doc, teacher, state):
        """§3.1, for c chunks: x (B, t, C), doc (B, c) -> state; s_q (B, c, M), -inf: forbidden"""
        (B, c), m, K, w = doc.shape, self.config.chunk_size, self.config.n_neighbors, self.w
        x, tokens = (y[:, :c * m].unflatten(1, (c, m)) for y in (x, tokens))
        y, q, keys = self.retriever(x) if self.retriever else (x, *bm25_vectors(tokens, self.idf))
        y = torch.cat([state.last, y], dim=1)                               # of c or c + 1 chunks
        pairs = torch.cat([state.pairs, self.neighbor_encoder.pairs(y)], dim=1)     # (B, M, 2m, C)
        keys = torch.cat([state.keys, keys], dim=1)
        s_q = product(q, keys) / q.size(2) ** 0.5                           # (B, c, M)
        k = torch.arange(keys.size(1), device=x.device)
        allowed = permitted(F.pad(doc, (len(k) - c, 0)), c, w)
        if self.retriever is None:
            allowed &= s_q > 0                                              # a term in common
        order = s_q
        if self.retrieval == 'shuffled':            # a hash of i and k: the same in any pieces
            order = ((7919 * k[-c:, None] + k) % 1_000_037) ** 3 % 1_000_037
        chosen = top(order, allowed, K)                                     # (B, c, K)
        if teacher is not None:
            chosen = chosen.where(teacher == -2, teacher)
        # pair k is row k + 1; index_select: on a CPU the gradient of pairs[b, i] adds in any order
        new = [pair.index_select(0, i) for pair, i in zip(pairs, (chosen + 1).flatten(1))]
        new = self.neighbor_encoder(torch.cat(new).view(B * c, K, 2 * m, -1), x.flatten(0, 1))
        neighbors = torch.cat([state.neighbors[:, -w:], new.unflatten(0, (B, c))], dim=1)
        chosen = torch.cat([state.chosen[:, -w:], chosen], dim=1)
        gates = self.neighbor_encoder.gates(neighbors, chosen)
        state = State(state.past, state.rest, y[:, -1:], pairs, keys, chosen, neighbors, gates)
        return state, s_q.masked_fill(~allowed, -math.inf)

    def encode(self, tokens, doc=None, teacher=None, state=None):
        """Tokens (B, t) continue the text of state. Of a batch: doc (B, t) and, in training, the
        teacher's neighbors (B, N, K), -1: none, -2: it does not choose -> f (B, t, C), the new
        state, s_q (B, c, M) or None. An unfinished chunk is encoded again in the next call"""
        state, n = state or self.empty_state(tokens), tokens.size(1)
        tokens, past = torch.cat([state.rest, tokens], dim=1), list(state.past)
        t, m = tokens.size(1), self.config.chunk_size
        c, s_q, cross = t // m, None, None
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        for i, block in enumerate(self.lower):
            x, past[i] = block(x, past[i])
        if self.retrieval != 'off':
            doc = torch.zeros_like(tokens) if doc is None else doc
            chunk_doc = doc_of_chunks(doc, m)                               # (B, c)
            if c:
                state, s_q = self.retrieve(x, tokens, chunk_doc, teacher, state)
            chosen, neighbors, gates = (y[:, -1 - c:] for y in state[-3:])  # of G = c + 1 groups
            mask = (chosen >= 0).repeat_interleave(2 * m, dim=2)            # (B, G, K 2m)
            group_doc = F.pad(chunk_doc, (1, 0)).repeat_interleave(m, dim=1)
            attends = group_doc[:, 1:t + 1] == doc                          # (B, t)
            cross = neighbors * gates[..., None, None], mask, attends
        for i, block in enumerate(self.upper, len(self.lower)):
            x, past[i] = block(x, past[i], cross)
        return self.norm(x[:, -n:]), state._replace(past=past, rest=tokens[:, c * m:]), s_q

    def logits(self, f):
        """f (..., C) -> (..., V) fp32"""
        return product(f, self.embedding.weight)

    def schedule(self, progress):
        """-> chance that the teacher chooses (§3.4); α and τ of L_ret (§3.3)"""
        annealed = 0.5 * (1 + math.cos(math.pi * min(1, progress / 0.9)))
        chance = dict(annealed=annealed, always=1, never=0)[self.config.teacher]
        alpha = self.config.alpha * min(1, progress / 0.2)
        return chance, alpha, 1 + (self.config.tau - 1) * progress

    def forward(self, batch, progress):
        """A batch (target -1: not scored), step / max_steps -> L_LM + α L_ret (), a log"""
        s_t = getattr(batch, 'target_scores', None) if self.training else None      # (B, N, N)
        teacher, (chance, alpha, tau) = None, self.schedule(progress)
        if self.training:
            torch.manual_seed(batch.seed)                   # for scheduled sampling, dropout
        if s_t is not None:                                 # the K chunks that help most
            teacher = top(s_t, s_t > 0, self.config.n_neighbors)
            if self.retriever:                              # scheduled sampling; not in RETRO
                student = torch.rand_like(s_t[..., :1]) >= chance                   # (B, N, 1)
                teacher = teacher.masked_fill(student, -2)
        f, _, s_q = self.encode(batch.tokens, batch.doc, teacher)
        loss = cross_entropy(f, self.embedding.weight, batch.targets)
        if s_t is None or self.retriever is None:
            return loss, {}
        ret_loss, ndcg = (x.sum() / batch.ranked for x in ranking_loss(s_q, s_t, tau))
        ranked = (s_t > 0).any(2).sum()                     # chunks with a positive
        log = dict(lm_loss=loss, ret_loss=ret_loss, ndcg=ndcg, ranked=ranked)
        return loss + alpha * ret_loss, log

    def log_probs(self, tokens):
        """log P (B, t, V) fp32 of the next token; tokens (B, t) are of one document."""
        return self.stream(tokens)[0]

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """log_probs of tokens (B, t), t >= 1, that continue the text of `state`; the new state"""
        f, state, _ = self.encode(tokens, state=state)
        return self.logits(f).log_softmax(-1), state

    @torch.no_grad()
    def read(self, tokens, state=None):
        """The new state of stream(tokens, state), without predictions"""
        for piece in tokens.split(self.PIECE, dim=1):
            state = self.encode(piece, state=state)[1]
        return state

    def ways(self):
        names = ('on', 'shuffled', 'off') if self.neighbor_encoder else ('off',)
        return {name: {'retrieval': name} for name in names}

    def trace(self, tokens, t):
        """Chunks read for token t + 1: [(gate, tokens, start, end)], largest gate first"""
        state, m = self.read(tokens[None, :t + 1]), self.config.chunk_size
        pairs = zip(state.gates[0, -1].tolist(), state.chosen[0, -1].tolist())
        found = [(gate, tokens, k * m, (k + 2) * m) for gate, k in pairs if k >= 0]
        return sorted(found, key=lambda read: -read[0])


@torch.no_grad()
def ranks(runs, args):
    """Table 3, over chunks that have a positive: chance, recency, BM25, runs; the last gives s_t"""
    c, corpus = runs[0].model.config, runs[0].corpus
    m, N = c.chunk_size, c.block_size // c.chunk_size
    texts = [x for text in runs[0].documents for x in text.split(N * m) if len(x) == N * m]
    kinds = {(run.corpus.fingerprint, run.model.config.chunk_size) for run in runs}
    *runs, reference = runs
    retrieve = runs and all(run.model.neighbor_encoder for run in runs)
    judges = not reference.model.neighbor_encoder and reference.model.w >= 4
    if not (texts and retrieve and judges) or len(kinds) > 1:
        raise SystemExit(f'ranks: runs that retrieve, then their reference LM (window: 4 chunks), '
                         f'of one tokenizer and chunk size; a document of {N * m} tokens or more')
    texts = torch.stack(texts[::-(-len(texts) // 16)])                  # (n, T), at most 16
    chunks, k = texts.view(-1, N, m), torch.arange(N, device=texts.device)
    allowed = k <= k[:, None] - max(run.model.w for run in runs)
    allowed[-1] = False                                                 # there is no target
    s_t = torch.stack([target_scores(reference.model, x, allowed) for x in chunks])     # (n, N, N)
    q, keys = bm25_vectors(chunks, corpus_idf(corpus.train.tokens, m, c.vocab_size).to(s_t))
    torch.manual_seed(args.seed)
    scores = {'chance': torch.rand(s_t.shape), 'latest first': k.expand(s_t.shape),
              'BM25': q @ keys.mT, **{run.name: run.model.encode(texts)[2] for run in runs}}
    n, result = (s_t > 0).sum(2), {}                                    # (n, N) positives
    for name, s_q in scores.items():
        s_q = s_q.to(s_t).masked_fill(~allowed, -math.inf)              # (n, N, N)
        positive = (s_t > 0).gather(2, s_q.argsort(descending=True, stable=True))
        measures = {'precision@2': positive[..., :2].sum(2) / 2,        # (n, N) each
                    'recall@10': positive[..., :10].sum(2) / n,
                    'ndcg@20': torch.cat([ranking_loss(q[None], t[None], tau=1)[1]
                                          for q, t in zip(s_q, s_t)])}
        result[name] = {key: x[n > 0].mean().item() for key, x in measures.items()}
        print(f'{name:24}', *(f'{key} {x:.4f}' for key, x in result[name].items()))
    return result


TASKS = {'ranks': ranks}


if __name__ == '__main__':
    f, state, s_q = RPT(RPTConfig()).encode(torch.randint(4096, (1, 1024)))
    print(f'f {tuple(f.shape)}, s_q {tuple(s_q.shape)}; retrieved', state.chosen[0, -1].tolist())
