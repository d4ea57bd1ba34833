"""
RPT, the Retrieval-Pretrained Transformer: a language model that retrieves from its own past.

    Ohad Rubin and Jonathan Berant, "Retrieval-Pretrained Transformer: Long-range Language Modeling
    with Self-retrieval", TACL 2024, arXiv:2306.13421

A document is cut into chunks. The lower half of the layers encodes it with sliding-window
attention. From these states each chunk computes a query, scores the chunks that have left its
window and retrieves the best few. The upper half attends to them while it predicts the next chunk.
In training, a frozen reference LM measures which earlier chunks help, and a ranking loss trains the
retriever to agree with it.

Where the paper is in this file (its equations have no numbers)
    §3.1  chunks, s_q, the top K; neighbors, gate   Retriever, RPT.retrieve; NeighborEncoder
    §3.1  chunked cross-attention                   ChunkedCrossAttention
    §3.2  candidates by BM25; s_t, the target score bm25_candidates, target_scores, setup
    §3.3  L_ret, LambdaRank with a margin           ranking_loss
    §3.4  schedules; windows; inference             RPT.schedule, SelfAttention, RPT.encode
    §5    Transformer-XL, RETRO, RPT-Lex; Table 3   --retriever none, bm25, lex; ranks

Letters in the shape comments
    B sequences    T tokens (t of a piece)    C width    H heads    D head size    V vocabulary
    N chunks    m tokens of a chunk    w chunks of a window    c of a piece    M so far
    K neighbors of a chunk    J candidates    G = c + 1 groups of m tokens    n items of any kind

Where we differ from the paper, and why
    Scores are divided by sqrt(C); a chunk without neighbors gets 0 from cross-attention; s_t is a
    mean over tokens, L_ret over the chunks with a positive; |Δ NDCG| is of 1 / log2(1 + rank).
    With --shift-values (not in the preset `paper`) one layer can copy what followed a token.
    The gate attends to the neighbors of w chunks, so that the state is bounded (paper: all chunks).
    Scheduled sampling draws for each chunk. Muon. BM25's idf is the corpus's. Dropout in layers.
    The reference LM (paper: Pythia 1.4B) has half the layers and a continuous cache, is trained on
    the same documents and scores every n-th chunk. The others are taught as in RPT-Lex, where the
    candidate of rank r = 0, 1, ... has s_t = 1 - r / J. To a chunk without positives the teacher
    gives no neighbors.
    In joined short documents self-attention alone crosses them, as in Transformer-XL.

    $ python rpt.py                         a demo, on a CPU
    $ python train.py --model rpt           reference LM, scores and RPT, one after the other
"""
import hashlib, math, os, zlib
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bm25 import idf_lucene


@dataclass
class RPTConfig:
    vocab_size: int = 4096        # ids of the tokenizer; for bpe, how many to train (ours)
    block_size: int = 1024        # tokens of a training sequence, T (ours; paper: 16K)
    micro_batch: int = 2          # sequences of a micro-batch, B (ours)
    n_layer: int = 4              # layers; the upper half retrieves (ours; paper: 12)
    n_head: int = 4               # attention heads, H (ours; paper: 8)
    n_embd: int = 128             # width, C (ours; paper: 1,024)
    n_inner: int = 0              # hidden width of the MLP; 0: 4 C (paper)
    dropout: float = 0.0          # on embeddings and what layers add (ours; paper: 0.05)
    window: int = 128             # two attention blocks (ours; paper: 2,048)
    chunk_size: int = 32          # tokens of a chunk, m (ours; paper: 64)
    n_neighbors: int = 2          # chunks that a chunk retrieves, K (paper)
    n_cca: int = 0                # last layers that cross-attend; 0: the upper half (paper: 5)
    retriever: Literal['sem', 'lex', 'bm25', 'none'] = 'sem'        # bm25: RETRO (§5.1)
    shift_values: bool = True     # the key of a token has the value of the next one (ours)
    gate: bool = True             # neighbors are weighted before cross-attention (paper)
    eta: float = 0.1              # lower bound of the gate, η (paper)
    alpha: float = 0.005          # weight of L_ret from a fifth of the steps on (ours; paper: 1e-9)
    tau: float = 4.0              # margin of L_ret at the end, 1 at the start (paper: 2 to 128)
    teacher: Literal['annealed', 'always', 'never'] = 'annealed'    # of sem, lex: chooses (paper)
    n_candidates: int = 20        # BM25 candidates of a chunk, J (paper)
    score_every: int = 1          # the reference LM scores every n-th chunk; others: as lex (ours)
    reference: str = ''           # checkpoint of the reference LM; default: one is trained first
    reference_steps: int = 600    # steps of its training, at most as many as RPT's (ours)
    reference_cache: float = 0.2  # weight of its continuous cache, λ (ours; paper: 0)

    def __post_init__(self):
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is no multiple of 2 x n_head {self.n_head}')
        if self.window % (2 * self.chunk_size):
            raise ValueError(f'window {self.window} is no multiple of 2 x {self.chunk_size}')
        if self.retriever != 'none' and self.block_size < self.window + 2 * self.chunk_size:
            raise ValueError(f'block_size {self.block_size} is below window + 2 x chunk_size')
        if not max(self.dropout, self.eta, self.reference_cache) < 1:
            raise ValueError('dropout, eta and reference_cache are below 1')


PRESETS = {         # §3.4, App. A, B; tokenizer, optimizer with its settings, reference LM: ours
    'tiny': dict(n_candidates=4, score_every=4),
    'paper': dict(data='pg19', tokenizer='gpt2', vocab_size=50_257, block_size=16_384,
                  micro_batch=1, n_layer=12, n_head=8, n_embd=1024, dropout=0.05, window=2048,
                  chunk_size=64, n_cca=5, tokens_per_step=131_072, max_steps=500_000, lr=5e-4,
                  optimizer='adamw', warmup=0.01, weight_decay=0.01, eval_every=1000,
                  shift_values=False, reference_steps=50_000, reference_cache=0.0),
}


def batches(config):
    """Arguments of data.Batches."""
    return dict(kind='documents', chunk=config.chunk_size)


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


def attend(q, k, v, block, window, slopes=0.0):
    """
    Causal attention in blocks, linear in T: a query of block n attends to keys of blocks n - 1 and
    n, none later, none `window` or more tokens older. With slopes (1, H, 1, 1), ALiBi (Press et al.
    2022) subtracts slope * age from each score.

    q (B, T, H, D)   k, v (B, P + T, H, D): P keys precede the queries, the first begins a block
    returns (B, T, H, D)
    """
    T, P = q.size(1), k.size(1) - q.size(1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                # (B, H, tokens, D)

    def bias(i, j):
        age = i[:, None] - j                                        # (queries, keys)
        visible = (age >= 0) & (age < window) & (j // block >= i[:, None] // block - 1)
        penalty = -slopes * age                                     # ((1, H,) queries, keys)
        return penalty.masked_fill(~visible, -math.inf).to(q.dtype)

    if T <= block:                                                  # one piece: the definition
        j = torch.arange(P + T, device=q.device)
        return softmax_attention(q, k, v, bias(j[P:], j)).transpose(1, 2)

    B, H, _, D = q.shape
    N = -(-(P + T) // block)                                        # blocks; padding fills the last
    q = F.pad(q, (0, 0, P, N * block - P - T))
    k, v = (F.pad(x, (0, 0, 0, N * block - P - T)) for x in (k, v))
    j = torch.arange(2 * block, device=q.device)
    mask = bias(j[block:], j)                                       # ((1, H,) block, 2 block)
    first = softmax_attention(q[:, :, :block], k[:, :, :block], v[:, :, :block], mask[..., block:])
    q, k, v = (x.unflatten(2, (N, block)).transpose(1, 2) for x in (q, k, v))
    pairs = (torch.cat([x[:, :-1], x[:, 1:]], dim=3).flatten(0, 1) for x in (k, v))
    rest = softmax_attention(q[:, 1:].flatten(0, 1), *pairs, mask)  # (B (N - 1), H, block, D)
    rest = rest.view(B, N - 1, H, block, D).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, rest], dim=2)[:, :, P:P + T].transpose(1, 2)


class MLP(nn.Module):
    """Two layers, the hidden one wider."""

    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 4 * config.n_embd
        self.fc = nn.Linear(config.n_embd, n_inner, bias=False)
        self.proj = nn.Linear(n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


def cross_entropy(f, E, targets):
    """
    Mean of -log P(w), P = softmax(f Eᵀ) in fp32, over the targets w >= 0. The (n, V) logits are
    never held: rows are taken in slices, whose logits the backward pass computes again.

    f (B, T, C)   E (V, C)   targets (B, T), -1 is not scored -> ()
    """
    def of_slice(f, w):
        with torch.autocast(f.device.type, enabled=False):
            return F.cross_entropy(f @ fp32(E).T, w, reduction='sum')

    scored = targets >= 0
    slices = zip(fp32(f[scored]).split(256), targets[scored].split(256))
    nats = [checkpoint(of_slice, *rows, use_reentrant=False, preserve_rng_state=False)
            for rows in slices]
    return torch.stack(nats).sum() / scored.sum().clamp(min=1)


# --------------------------------------------------------------------------------------------------
# what is new in RPT

class SelfAttention(nn.Module):
    """
    §3.4: causal attention in blocks of half a window; a token attends to its block and the one
    before. Cached keys are not rotated: positions count from the first of them and remain small.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head, self.block, self.m = config.n_head, config.window // 2, config.chunk_size
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, rotary, past=None):
        q, k, v = self.qkv(x).unflatten(2, (3, self.n_head, -1)).unbind(2)  # 3 x (B, t, H, D)
        if past is not None:
            k, v = (torch.cat(pair, dim=1) for pair in zip(past, (k, v)))   # (B, P + t, H, D)
        q_rotary = [angles[-x.size(1):] for angles in rotary]
        y = attend(rotate(q, q_rotary), rotate(k, rotary), v, self.block, 2 * self.block)
        end = k.size(1) - x.size(1) % self.m                                # of whole chunks
        start = max(0, end // self.block - 1) * self.block                  # of the last two blocks
        return self.proj(y.flatten(2)), (k[:, start:end], v[:, start:end])


class Attention(nn.Module):
    """
    Multi-head attention of a texts x (n, a, t, C) to all tokens of b texts y (n, b, s, C), where
    mask, broadcast to (n, H, a t, b s), is True. Positions count from 0 in a text, in x from
    `first`. With shift, the key of a token has the value of the next one, the last's of the first.
    """

    def __init__(self, config, shift=False):
        super().__init__()
        self.n_head, self.shift = config.n_head, shift
        self.query = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.kv = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, y, first=0, mask=None):
        q = self.query(x).unflatten(-1, (self.n_head, -1))                  # (n, a, t, H, D)
        k, v = self.kv(y).unflatten(-1, (2, self.n_head, -1)).unbind(3)     # 2 x (n, b, s, H, D)
        v = v.roll(-1, dims=2) if self.shift else v
        q = rotate(q, rotary(torch.arange(first, first + x.size(2), device=x.device), q.size(-1)))
        k = rotate(k, rotary(torch.arange(y.size(2), device=x.device), k.size(-1)))
        q, k, v = (z.flatten(1, 2).transpose(1, 2) for z in (q, k, v))      # (n, H, tokens, D)
        y = softmax_attention(q, k, v, mask).transpose(1, 2)                # (n, a t, H, D)
        return self.proj(y.flatten(2)).view_as(x)


class Retriever(nn.Module):
    """
    §3.1: the tokens of a chunk attend to each other, their mean is the chunk's vector c, and
    s_q(c) = <W_Q c_q, W_K c> / sqrt(C). These tokens are what is retrieved later.
    """

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.norm, self.attention = RMSNorm(C), Attention(config)
        self.norm_q, self.norm_k = RMSNorm(C), RMSNorm(C)
        self.query, self.key = nn.Linear(C, C), nn.Linear(C, C)             # W_Q, W_K

    def forward(self, x):
        """x (B, c, m, C) -> the tokens (B, c, m, C), queries and keys (B, c, C)"""
        y = self.norm(x).flatten(0, 1)[:, None]                             # (B c, 1, m, C)
        x = x + self.attention(y, y).view_as(x)
        mean = x.mean(2)                                                    # (B, c, C)
        return x, self.query(self.norm_q(mean)), self.key(self.norm_k(mean))


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

    def forward(self, x, chunk):
        """x (n, K, 2m, C): a neighbor attends to itself, then to chunk (n, m, C) -> as x"""
        y = self.norm1(x).flatten(0, 1)[:, None]                            # (n K, 1, 2m, C)
        x = x + self.attention(y, y).view_as(x)
        return x + self.cross(self.norm2(x), self.norm_query(chunk)[:, None])

    def gates(self, neighbors, chosen):
        """
        max(η, σ((w · norm(ĉ) + b) / C)): ĉ is the mean of a neighbor's tokens after attention to
        the better neighbors of its chunk and to those of the w - 1 chunks before, of one document.
        neighbors (B, n, K, 2m, C) of n chunks, chosen (B, n, K) their numbers -> (B, n, K)
        """
        (B, n, K), config = chosen.shape, self.config
        if not config.gate:
            return torch.ones(B, n, K, device=chosen.device)
        # a chunk with neighbors is at least w chunks into its document: the w - 1 before are of it
        j = torch.arange(n * K, device=chosen.device)
        age = j[:, None] // K - j // K                                      # in chunks
        recent = (j <= j[:, None]) & (age < config.window // config.chunk_size)
        mask = recent & (chosen >= 0).view(B, 1, n * K) | (age == 0) & (j == j[:, None])
        c = neighbors.mean(3).view(B, 1, n * K, -1)                         # (B, 1, n K, C)
        y = self.norm3(c)
        c = c + self.gate_attention(y, y, mask=mask[:, None])
        z = self.gate(self.norm_gate(c)) / config.n_embd                    # (B, 1, n K, 1)
        return z.sigmoid().clamp(min=config.eta).view(B, n, K)


class ChunkedCrossAttention(nn.Module):
    """
    Borgeaud et al. 2022, §2.4: the group that attends to the neighbors of chunk i is the last token
    of chunk i, the first that may depend on them, and the first m - 1 tokens of chunk i + 1, at
    positions m - 1 to 2m - 2; those of a neighbor are 0 to 2m - 1. No norm: it would undo the gate.
    """

    def __init__(self, config):
        super().__init__()
        self.norm, self.m = RMSNorm(config.n_embd), config.chunk_size
        self.attention = Attention(config, config.shift_values)

    def forward(self, x, neighbors, mask, attends):
        """
        x (B, t, C) begins with a chunk; neighbors (B, G, K, 2m, C); mask (B G, 1, 1, K 2m): which
        of their tokens; attends (B, t): the token does -> as x, 0 where it does not
        """
        (B, t, C), G, m = x.shape, neighbors.size(1), self.m
        groups = F.pad(x, (0, 0, 1, G * m - 1 - t)).view(B * G, 1, m, C)
        y = self.attention(self.norm(groups), neighbors.flatten(0, 1), m - 1, mask)
        return y.view(B, G * m, C)[:, 1:t + 1] * attends[..., None]


class Block(nn.Module):
    """
    One pre-norm Transformer layer; returns its keys and values too, for streaming. Layers of the
    upper half cross-attend to neighbors between self-attention and MLP.
    """

    def __init__(self, config, cross_attends=False):
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.n_embd), SelfAttention(config)
        self.norm2, self.mlp = RMSNorm(config.n_embd), MLP(config)
        self.cca = ChunkedCrossAttention(config) if cross_attends else None
        self.dropout = config.dropout

    def forward(self, x, rotary, past, cross=None):
        y, kv = self.attention(self.norm1(x), rotary, past)
        x = x + F.dropout(y, self.dropout, self.training)
        if self.cca and cross:
            x = x + F.dropout(self.cca(x, *cross), self.dropout, self.training)
        x = x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)
        return x, kv


def doc_of_chunks(doc, m):
    """doc (B, T) -> (B, N): the document of a chunk; -1 if it has tokens of two or padding"""
    N = doc.size(1) // m
    doc = doc[:, :N * m].unflatten(1, (N, m))
    return doc[..., 0].where((doc == doc[..., :1]).all(2), -1)


def permitted(doc, c, w):
    """
    Which chunks k the last c chunks i may retrieve: those of their document that have left the
    window, k <= i - w. doc (B, M), -1: chunk of no document -> (B, c, M)
    """
    k = torch.arange(doc.size(1), device=doc.device)
    i, doc_i = k[-c:, None], doc[:, -c:, None]
    return (k <= i - w) & (doc[:, None] == doc_i) & (doc_i >= 0)


def best(scores, K):
    """
    The places of the K highest scores, of equal ones the first; -1: none, scores of -inf do not
    count. scores (..., n) -> (..., K)
    """
    padded = F.pad(scores, (0, K), value=-math.inf)
    values, order = padded.sort(dim=-1, descending=True, stable=True)
    return order.masked_fill(values == -math.inf, -1)[..., :K]


def ranking_loss(scores, candidates, target_scores, tau):
    """
    LambdaRank with a margin (§3.3), over positives l (s_t(l) > 0) and permitted j that help less;
    chunks that are not candidates help less than all that are. r is the rank by s_q:

        L_ret = Σ_{l, j: s_t(l) > s_t(j)} λ_lj max(0, τ - (s_q(l) - s_q(j)))
        λ_lj  = |2^s_t(l) - 2^max(s_t(j), 0)| |1 / log2(1 + r_l) - 1 / log2(1 + r_j)| / IDCG

    scores      (B, N, N)  s_q of chunk i for chunk k, -inf where i may not retrieve k
    candidates  (B, N, J)  -1: none      target_scores (B, N, J)  s_t
    returns     (B, N)     L_ret and NDCG@20 of chunk i; 0 if it has no positive
    """
    B, N, _ = scores.shape
    column = candidates.where(candidates >= 0, N)                           # N: of no chunk
    s_t = scores.new_full((B, N, N + 1), -math.inf)
    s_t = s_t.scatter(2, column, target_scores.to(scores))[..., :N]
    gain = torch.exp2(s_t.clamp(min=0)) - 1                                 # (B, N, N)
    rank = 1 + scores.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
    discount = 1 / torch.log2(1 + rank)
    ideal = gain.sort(dim=2, descending=True).values * discount.sort(dim=2, descending=True).values

    def pairs(x):
        return x[..., None] - x[:, :, None]                                 # x_l - x_j (B, N, N, N)

    lam = pairs(gain).clamp(min=0) * pairs(discount).abs()                  # 0: l helps no more
    hinge = (tau - pairs(scores.clamp(min=-1e9))).clamp(min=0)              # 0: j not permitted
    loss = (lam * hinge).sum((2, 3)) / ideal.sum(2).clamp(min=1e-9)
    dcg = (gain * discount * (rank <= 20)).sum(2)
    return loss, dcg / ideal[..., :20].sum(2).clamp(min=1e-9)


def corpus_idf(tokens, m, V):
    """idf (V,) fp64 of all chunks of m tokens, as in bm25.py"""
    n, df = len(tokens) // m, np.zeros(V)
    for i in range(n):
        df[tokens[i * m:(i + 1) * m]] += 1                                  # a repeated id: once
    return torch.from_numpy(idf_lucene(n, df))


def bm25_vectors(tokens, idf):
    """
    Queries and keys: <q, k> is bm25.py's score, as all chunks are equally long. Weights are
    multiples of 2^-10, so that ties remain ties. tokens (..., m), idf (V,) -> 2 x (..., V)
    """
    q = idf.new_zeros(*tokens.shape[:-1], len(idf))
    q = q.scatter_add(-1, tokens, q.new_ones(tokens.shape))                 # occurrences
    return q, (2 ** 10 * idf * q / (q + 1.2)).round() / 2 ** 10


def bm25_candidates(chunks, doc, w, J, idf):
    """
    §3.2: the J best permitted chunks by BM25 for the query (c_i, c_{i+1}), which has the target.
    chunks (N, m), doc (N,) of chunks, idf (V,) -> (N, J), -1: none
    """
    q, keys = bm25_vectors(chunks, idf)                                     # (N, V)
    scores = (q + q.roll(-1, 0)) @ keys.T
    has_target = F.pad(doc[1:] == doc[:-1], (0, 1))                         # c_{i+1} is of its text
    allowed = permitted(doc[None], len(doc), w)[0] & has_target[:, None] & (scores > 0)
    return best(scores.masked_fill(~allowed, -math.inf), J)


def log_p_with_cache(reference, f, tokens, cache):
    """
    Mean log P of the last m of the tokens (n, 4m), which have the states f (n, 4m, C). As small LMs
    hardly copy, P is (1 - λ) P_LM + λ P_cache with a continuous cache (Grave et al. 2017):

        P_cache(x) = Σ softmax_u(f_t · f_u / sqrt(C)) over the tokens u < t that x follows
    """
    m = tokens.size(1) // 4
    x, followers = tokens[:, -m:, None], tokens[:, None, 1:]                # (n, m, 1), (n, 1, 4m-1)
    f_t, f_u = f[:, -m - 1:-1], f[:, :-1]                                   # of x; of followers
    s = fp32(f_t @ f_u.mT) / f.size(2) ** 0.5                               # (n, m, 4m - 1)
    earlier = torch.ones_like(s[0], dtype=torch.bool).tril(3 * m - 2)       # u < t
    p_cache = (s.masked_fill(~earlier, -math.inf).softmax(2) * (followers == x)).sum(2)
    log_p_lm = reference.logits(f_t).log_softmax(2).gather(2, x)[..., 0]    # (n, m)
    return (log_p_lm + math.log(1 - cache)).logaddexp((cache * p_cache).log()).mean(1)


@torch.no_grad()
def target_scores(reference, chunks, candidates, cache):
    """
    §3.2: how much candidate j of chunk i helps the reference LM to predict the target c_{i+1}:

        s_t(c_j) = (log P(c_{i+1} | c_j, c_{j+1}, c_i) - log P(c_{i+1} | c_{i-2}, c_{i-1}, c_i)) / m

    The keys and values of a prefix (c_j, c_{j+1}) serve all i. The baseline is prefix j = i - 2.
    chunks (N, m), candidates (N, J), -1: none -> (N, J), nan where there is none
    """
    N, m = chunks.shape
    baseline = (torch.arange(N, device=chunks.device) - 2).where((candidates >= 0).any(1), -1)
    prefixes = torch.cat([baseline[:, None], candidates], dim=1)            # (N, 1 + J)
    log_p = torch.full(prefixes.shape, math.nan, device=chunks.device)
    i, slot = (prefixes >= 0).nonzero(as_tuple=True)                        # (n,) all pairs
    j, row = prefixes[i, slot].unique(return_inverse=True)
    prefix = torch.cat([chunks[j], chunks[j + 1]], dim=1)                   # (prefixes, 2m)
    f_prefix, state, _ = reference.encode(prefix)
    size = max(1, 2048 // m)                                                # pairs at once
    for i, slot, row in zip(i.split(size), slot.split(size), row.split(size)):
        tokens = torch.cat([chunks[i], chunks[i + 1]], dim=1)               # (size, 2m)
        past = [(k[row], v[row]) for k, v in state.past]
        after = state._replace(past=past, rest=state.rest[row])
        f, _, _ = reference.encode(tokens, state=after)
        f, tokens = torch.cat([f_prefix[row], f], 1), torch.cat([prefix[row], tokens], 1)
        log_p[i, slot] = log_p_with_cache(reference, f, tokens, cache)
    return log_p[:, 1:] - log_p[:, :1]


# data.Batch with candidates (B, N, J), -1: none, and their target_scores (B, N, J)
TaughtBatch = namedtuple('TaughtBatch', 'tokens targets doc seed candidates target_scores')


def load_reference(c, config, corpus, train_reference):
    """The reference LM, of --reference or trained first"""
    path, window = c.reference, 4 * c.chunk_size                            # see target_scores
    if not path:
        steps = min(c.reference_steps, config.max_steps)
        path = train_reference(
            replace(c, retriever='none', n_layer=max(1, c.n_layer // 2),
                    window=max(c.window, window)),
            replace(config, init='', max_steps=steps), 'reference')
    try:
        file = torch.load(path, map_location='cpu', weights_only=True)
        reference = RPT(RPTConfig(**file['config'])).eval().requires_grad_(False)
        reference.load_state_dict(file['model'])
        assert reference.config.retriever == 'none' and reference.config.window >= window
        assert file['tokenizer'] == corpus.tokenizer.to_dict()
    except Exception as e:                              # a broken file can raise anything
        raise SystemExit(f'--reference {path}: a checkpoint of retriever none, window >= {window} '
                         f'and the same tokenizer is needed ({e!r:.99})')
    return reference


def setup(model, corpus, batches, config, autocast, train_reference, progress):
    """
    Stores candidates and scores of the sequences that the run will use, a file each, in a folder
    whose name is a hash of all that they depend on; an interrupted run resumes, and each process
    does its share. -> attach(batch, g): TaughtBatch of micro-batch g
    """
    c, device, reference = model.config, model.embedding.weight.device, None
    N, m, J = c.block_size // c.chunk_size, c.chunk_size, c.n_candidates
    if c.retriever == 'none':
        return lambda batch, g: batch
    if config.grow_context:
        raise SystemExit('--grow-context: the scores are of sequences of one length')
    idf = corpus_idf(corpus.train.tokens, m, c.vocab_size)
    facts = [corpus.fingerprint, corpus.hops and (corpus.hops, config.seed), c.retriever,
             c.block_size, c.window, m, J]
    if c.retriever == 'bm25':
        model.idf.copy_(idf)
    if c.retriever == 'sem':
        reference = load_reference(c, config, corpus, train_reference)
        weights = b''.join(p.numpy().tobytes() for p in reference.parameters())
        facts += [hashlib.sha256(weights).hexdigest(), c.score_every, c.reference_cache,
                  config.dtype]
        reference.to(device)
    folder = corpus.folder / f'scores-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}'
    folder.mkdir(exist_ok=True)

    def load(row):
        """candidates and scores of a sequence, (2, N, J) fp32"""
        path = folder / f'{row}.npy'
        if not path.exists():
            batch = batches.take(np.array([row]), seed=0)
            chunks, doc = batch.tokens[0, :N * m].view(N, m), doc_of_chunks(batch.doc[:1], m)[0]
            candidates = bm25_candidates(chunks, doc, model.w, J, idf)
            scores = (1 - torch.arange(J) / J).expand(N, J)                 # RPT-Lex
            if reference:
                scored = (torch.arange(N) % c.score_every == 0)[:, None]
                to_score = candidates.where(scored, -1).to(device)
                with autocast():
                    s_t = target_scores(reference, chunks.to(device), to_score, c.reference_cache)
                scores = s_t.cpu().where(scored, scores)
            scores = scores.where(candidates >= 0, 0)
            temporary = folder / f'{row}-{os.getpid()}.tmp.npy'
            np.save(temporary, torch.stack([candidates, scores]).float().numpy())
            os.replace(temporary, path)
        return torch.from_numpy(np.load(path))

    n = config.max_steps * config.tokens_per_step // (batches.B * batches.T)    # micro-batches
    used = np.unique(np.concatenate([batches.rows(g) for g in range(n)]))
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    for row in progress(used[rank::world], f'candidates and scores in {folder}', quiet=rank):
        load(row)

    def attach(batch, g):
        taught = torch.full((len(batch.tokens), 2, N, J), -1.0)             # -1: rows of padding
        for b, row in enumerate(batches.rows(g)):
            taught[b] = load(row)
        return TaughtBatch(*batch, taught[:, 0].long(), taught[:, 1])

    return attach


# --------------------------------------------------------------------------------------------------
# the model

class State(NamedTuple):
    """What is kept of a text: M whole chunks, of the last n >= w of them the neighbors, and rest"""
    past: list                  # of each layer, keys and values of the last two blocks
    rest: torch.Tensor          # (B, fewer than m) tokens of the unfinished chunk
    E: torch.Tensor             # (B, M, m, C) tokens of all chunks, to be retrieved
    keys: torch.Tensor          # (B, M, C) of all chunks; RETRO: (B, M, V)
    chosen: torch.Tensor        # (B, n, K) numbers of the neighbors, -1: none
    neighbors: torch.Tensor     # (B, n, K, 2m, C) their tokens
    gates: torch.Tensor         # (B, n, K) their weights; the first w - 1 of the n are not used


class RPT(nn.Module):
    """A sliding-window LM whose upper layers attend to chunks that its lower layers retrieve."""

    PIECE = 2048                        # tokens of a text that are encoded at once

    def __init__(self, config):
        super().__init__()
        seed = torch.randint(2 ** 48, (), device='cpu').item()
        C, upper = config.n_embd, config.n_layer - config.n_layer // 2
        n_cca = 0 if config.retriever == 'none' else config.n_cca or upper
        self.config, self.w = config, config.window // config.chunk_size
        self.retrieval = 'on' if n_cca else 'off'                           # see ways
        self.embedding = nn.Embedding(config.vocab_size, C)                 # also the output's
        self.lower = nn.ModuleList(Block(config) for _ in range(config.n_layer - upper))
        self.upper = nn.ModuleList(Block(config, i >= upper - n_cca) for i in range(upper))
        self.retriever = Retriever(config) if config.retriever in ('sem', 'lex') else None
        self.neighbor_encoder = NeighborEncoder(config) if n_cca else None
        self.norm = RMSNorm(C)
        idf = torch.zeros(config.vocab_size) if config.retriever == 'bm25' else None
        self.register_buffer('idf', idf)                                    # see setup
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
        return State([None] * c.n_layer, tokens[:, :0], zeros(B, 0, m, C), keys,
                     zeros(B, w, K).long() - 1, zeros(B, w, K, 2 * m, C), zeros(B, w, K))

    def retrieve(self, x, tokens, doc, teacher, state):
        """
        §3.1 for c chunks: lower states x (B, c, m, C), tokens (B, c, m), documents doc (B, c)
        -> the state with these chunks and their neighbors; s_q (B, c, M), -inf: not permitted
        """
        B, c, m, C = x.shape
        K = self.config.n_neighbors
        E, q, keys = self.retriever(x) if self.retriever else (x, *bm25_vectors(tokens, self.idf))
        E, keys = torch.cat([state.E, E], dim=1), torch.cat([state.keys, keys], dim=1)
        M = E.size(1)
        with torch.autocast(x.device.type, enabled=False):                  # bf16 has ties
            scores = fp32(q) @ fp32(keys).mT / q.size(2) ** 0.5             # (B, c, M)
        allowed = permitted(F.pad(doc, (M - c, 0)), c, self.w)
        if self.config.retriever == 'bm25':
            allowed = allowed & (scores > 0)                                # a term in common
        scores = scores.masked_fill(~allowed, -math.inf)
        chosen = best(self.shuffled(scores) if self.retrieval == 'shuffled' else scores, K)
        if teacher is not None:
            chosen = chosen.where(teacher == -2, teacher)                   # (B, c, K)

        k = torch.stack([chosen, chosen + 1], dim=3).clamp(min=0)           # (B, c, K, 2)
        b = torch.arange(B, device=x.device)[:, None, None, None]
        new = E[b, k].view(B * c, K, 2 * m, C)
        new = self.neighbor_encoder(new, x.flatten(0, 1)).unflatten(0, (B, c))
        neighbors = torch.cat([state.neighbors[:, -self.w:], new], dim=1)
        chosen = torch.cat([state.chosen[:, -self.w:], chosen], dim=1)
        gates = self.neighbor_encoder.gates(neighbors, chosen)
        return State(state.past, state.rest, E, keys, chosen, neighbors, gates), scores

    def shuffled(self, scores):
        """Scores (B, c, M) in a random order of the permitted chunks: hashes of i and k"""
        k = torch.arange(scores.size(2), device=scores.device)
        i = k[-scores.size(1):, None]
        hashes = ((7919 * i + k) % 1_000_037) ** 3 % 1_000_037
        return hashes.where(scores > -math.inf, -math.inf)

    def cross_attention_inputs(self, state, doc, chunk_doc):
        """
        Of the G groups of tokens with documents doc (B, t), chunks with chunk_doc (B, c): neighbors
        (B, G, K, 2m, C), gated, mask and attends for ChunkedCrossAttention
        """
        t, G, m = doc.size(1), chunk_doc.size(1) + 1, self.config.chunk_size
        valid = state.chosen[:, -G:] >= 0                                   # (B, G, K)
        any_valid = valid.any(2)                                            # (B, G)
        mask = (valid | ~any_valid[..., None]).flatten(0, 1)                # all, rather than none
        mask = mask[:, None, None].repeat_interleave(2 * m, dim=3)
        group_doc = F.pad(chunk_doc, (1, 0)).where(any_valid, -2)           # -2: of no token
        attends = group_doc.repeat_interleave(m, dim=1)[:, 1:t + 1] == doc
        return state.neighbors[:, -G:] * state.gates[:, -G:, :, None, None], mask, attends

    def encode(self, tokens, doc=None, teacher=None, state=None):
        """
        tokens (B, t) that continue the text of `state`, None: begin one. In training doc (B, t) and
        teacher (B, N, K), neighbors in place of those retrieved, -1: none, -2: those retrieved
        -> f (B, t, C), the new state, s_q (B, c, M) or None
        """
        state, n = state or self.empty_state(tokens), tokens.size(1)
        tokens, past = torch.cat([state.rest, tokens], dim=1), list(state.past)
        t, m, scores, cross = tokens.size(1), self.config.chunk_size, None, None
        c = t // m                                                          # whole chunks
        cached = past[0][0].size(1) if past[0] else 0
        positions = torch.arange(cached + t, device=tokens.device)
        angles = rotary(positions, self.config.n_embd // self.config.n_head)
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        for i, block in enumerate(self.lower):
            x, past[i] = block(x, angles, past[i])
        if self.retrieval != 'off':
            doc = torch.zeros_like(tokens) if doc is None else doc
            chunk_doc = doc_of_chunks(doc, m)                               # (B, c)
            if c:
                chunks = (y[:, :c * m].unflatten(1, (c, m)) for y in (x, tokens))
                state, scores = self.retrieve(*chunks, chunk_doc, teacher, state)
            cross = self.cross_attention_inputs(state, doc, chunk_doc)
        for i, block in enumerate(self.upper, len(self.lower)):
            x, past[i] = block(x, angles, past[i], cross)
        state = state._replace(past=past, rest=tokens[:, c * m:])
        return self.norm(x[:, -n:]), state, scores

    def logits(self, f):
        """f (..., C) -> (..., V) fp32"""
        with torch.autocast(f.device.type, enabled=False):
            return fp32(f) @ fp32(self.embedding.weight).T

    def schedule(self, progress):
        """-> chance that the teacher chooses (§3.4); α and τ of L_ret (§3.3)"""
        annealed = 0.5 * (1 + math.cos(math.pi * min(1, progress / 0.9)))
        chance = dict(annealed=annealed, always=1, never=0)[self.config.teacher]
        alpha = self.config.alpha * min(1, progress / 0.2)
        return chance, alpha, 1 + (self.config.tau - 1) * progress

    def taught_neighbors(self, batch, chance):
        """
        The K candidates that help most, or as many as help; with a retriever, scheduled sampling
        -> (B, N, K), -1: none, -2: those retrieved
        """
        s_t = batch.target_scores.masked_fill(batch.target_scores <= 0, -math.inf)
        slots = best(s_t, self.config.n_neighbors)                          # (B, N, K)
        teacher = batch.candidates.gather(2, slots.clamp(min=0)).where(slots >= 0, -1)
        if self.retriever:
            student = torch.rand(s_t.shape[:2], device=s_t.device) >= chance
            teacher = teacher.masked_fill(student[..., None], -2)
        return teacher

    def forward(self, batch, progress):
        """
        TaughtBatch (target -1: not predicted), step / max_steps -> loss () in nats per token, dict
        of what to log. In eval mode or without candidates, the LM loss.
        """
        chance, alpha, tau = self.schedule(progress)
        taught = self.training and hasattr(batch, 'candidates')
        if self.training:
            torch.manual_seed(batch.seed)                   # of scheduled sampling and dropout
        teacher = self.taught_neighbors(batch, chance) if taught else None
        f, _, scores = self.encode(batch.tokens, batch.doc, teacher)
        loss = cross_entropy(f, self.embedding.weight, batch.targets)
        if not (taught and self.retriever):
            return loss, {}
        ranking, ndcg = ranking_loss(scores, batch.candidates, batch.target_scores, tau)
        ranked = (batch.target_scores > 0).any(2).sum()     # chunks with a positive
        ranking, ndcg = (x.sum() / ranked.clamp(min=1) for x in (ranking, ndcg))
        log = dict(lm_loss=loss, ret_loss=ranking, ndcg=ndcg, ranked=ranked)
        return loss + alpha * ranking, log

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
        """shuffled: permitted chunks, chosen by a hash of their numbers"""
        names = ('on', 'shuffled', 'off') if self.neighbor_encoder else ('off',)
        return {name: {'retrieval': name} for name in names}

    def trace(self, tokens, t):
        """Chunks read for token t + 1: [(gate, tokens, start, end)], largest gate first"""
        state, m = self.read(tokens[None, :t + 1]), self.config.chunk_size
        spans = [(gate, tokens, k * m, (k + 2) * m)
                 for gate, k in zip(state.gates[0, -1].tolist(), state.chosen[0, -1].tolist())
                 if k >= 0]
        return sorted(spans, key=lambda span: span[0], reverse=True)


# --------------------------------------------------------------------------------------------------
# evaluation

@torch.no_grad()
def ranks(runs, args):
    """
    Table 3: of chance, recency, BM25 and the runs, for chunks that have a positive. The last run,
    with retriever none, is the reference LM, which scores all permitted chunks.
    """
    *runs, reference = runs
    kinds = {(run.corpus.fingerprint, run.model.config.window, run.model.config.chunk_size)
             for run in runs}
    if len(kinds) != 1 or reference.corpus.fingerprint != runs[0].corpus.fingerprint \
            or [run for run in (*runs, reference) if 'on' not in run.model.ways()] != [reference]:
        raise SystemExit('ranks: runs that retrieve, alike in tokenizer, window and chunks, then '
                         'their reference LM, as out/rpt-reference')
    c, corpus, device = runs[0].model.config, runs[0].corpus, runs[0].documents[0].device
    m, N = c.chunk_size, c.block_size // c.chunk_size
    texts = [text.view(N, m) for tokens in runs[0].documents for text in tokens.split(N * m)
             if len(text) == N * m]
    if not texts:
        raise SystemExit(f'ranks: no document of the split has {N * m} tokens')
    idf = corpus_idf(corpus.train.tokens, m, c.vocab_size).float().to(device)
    k = torch.arange(N, device=device)
    allowed = permitted(torch.zeros_like(k)[None], N, runs[0].model.w)[0]
    allowed[-1] = False                                                 # it has no target
    candidates = k.where(allowed, -1)
    torch.manual_seed(args.seed)                                        # of chance
    measures = {}                                                       # name: [(chunks, 3)]
    for chunks in texts[::-(-len(texts) // 16)]:                        # at most 16, evenly spread
        s_t = target_scores(reference.model, chunks, candidates, c.reference_cache)
        q, keys = bm25_vectors(chunks, idf)
        scores = dict(chance=torch.rand(N, N, device=device), recency=k.float().expand(N, N),
                      BM25=q @ keys.T)
        for run in runs:
            scores[run.name] = run.model.encode(chunks.view(1, -1))[2][0]
        for name, s_q in scores.items():
            s_q = s_q.masked_fill(~allowed, -math.inf)
            _, ndcg = ranking_loss(s_q[None], candidates[None], s_t[None], tau=1)
            order = s_q.argsort(dim=1, descending=True, stable=True)    # best s_q first
            positive = (s_t > 0).gather(1, order)
            n = positive.sum(1)
            rows = [positive[:, :2].sum(1) / 2, positive[:, :10].sum(1) / n, ndcg[0]]
            measures.setdefault(name, []).append(torch.stack(rows, dim=1)[n > 0])
    result = {}
    for name, rows in measures.items():
        means = torch.cat(rows).mean(0).tolist()
        result[name] = dict(zip(('precision@2', 'recall@10', 'ndcg@20'), means))
        print(f'{name:24}', *(f'{key} {value:.4f}' for key, value in result[name].items()))
    return result


TASKS = {'ranks': ranks}


# --------------------------------------------------------------------------------------------------
# a demo
if __name__ == '__main__':
    f, state, scores = RPT(RPTConfig()).encode(torch.randint(4096, (1, 1024)))
    print(f'states {tuple(f.shape)}, scores {tuple(scores.shape)}; the last chunk has neighbors',
          state.chosen[0, -1].tolist())
