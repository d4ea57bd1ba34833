"""
RPT, the Retrieval-Pretrained Transformer: a language model that retrieves from its past.

    Ohad Rubin and Jonathan Berant, "Retrieval-Pretrained Transformer: Long-range Language Modeling
    with Self-retrieval", TACL 2024, arXiv:2306.13421

A document is cut into chunks. The lower half of the layers encodes it with sliding-window
attention. From these states each chunk computes a query, scores the chunks that have left its
window and retrieves those with the highest scores. Upper layers attend to them while they predict
the next chunk. A ranking loss trains the retriever to agree with a reference LM on which chunks
help.

Where the paper is in this file (its equations have no numbers)
    §3.1     W_Q c_q and W_K c, the factors of s_q      Retriever
    §3.1     s_q(c) = <W_Q c_q, W_K c>                  RPT.scores
    §3.1     the K chunks of highest s_q                RPT.choose
    §3.1     neighbors and their gates                  NeighborEncoder
    §3.1     chunked cross-attention                    ChunkedCrossAttention
    §3.2     candidates by BM25                         bm25_candidates
    §3.2     s_t, the target score                      target_scores
    §3.3     L_ret, LambdaRank with a margin            ranking_loss
    §3.3     L_LM + α L_ret                             RPT.forward
    §3.3     α and τ in the course of training          RPT.schedule
    §3.4     scheduled sampling                         RPT.schedule, RPT.teacher_neighbors
    §3.4     sliding-window attention                   SelfAttention
    §3.4     inference                                  RPT.encode, RPT.stream
    §5       Transformer-XL, RETRO, RPT-Lex             --retriever none, bm25, lex
    §5       Memorizing, Block-Recurrent, Griffin, DPR  compared/
    §5       Tables 2 to 4, Figures 4 to 6              ranks

Letters in the shape comments
    B sequences    T tokens, t of a piece, s keys    C width    H heads    D width of a head
    V vocabulary   m tokens of a chunk    N chunks of a sequence or a piece    M chunks so far
    K neighbors of a chunk    G = N + 1 groups of m tokens    n any other size
    i a chunk that retrieves    j a chunk that is retrieved    l a positive in L_ret    w a target
    token (the paper's w, the chunks of a window, is window_chunks)

Where we differ from the paper, and why
    By default, fields marked (ours) differ from the paper's, which --preset paper has.
    Scores are divided by sqrt(C). s_t is a mean over tokens, L_ret over the chunks that have a
    positive. NDCG discounts by 1 / log2(1 + rank).
    A chunk without neighbors gets 0 from cross-attention.
    Scheduled sampling draws for each chunk. A teacher chooses chunks of positive s_t only, so there
    can be fewer than K.
    Retrieved states have passed the retriever's attention, those of the chunk that retrieves have
    not. L_ret trains the lower layers, too. Its τ starts at 1.
    The gate attends to the neighbors of a window of chunks, so that a stream keeps no others
    (paper: of all chunks).
    With --shift-values (ours), one layer can copy what followed a token.
    The reference LM (paper: Pythia 1.4B) has half the layers and a continuous cache, is trained on
    the same documents, and scores every n-th chunk. The other chunks are taught as in RPT-Lex.
    Muon or AdamW (paper: AdaBelief). Dropout on what layers add. Self-attention crosses joined
    documents. BM25 has the idf of the corpus. Search is exact (paper: faiss). The retriever and the
    gate have norms and biases.

    $ python rpt.py                         a demo of ten seconds, on a CPU
    $ python train.py --model rpt           trains a reference LM, then RPT, which it teaches
"""
import contextlib, functools, hashlib, math, os, zlib
from dataclasses import dataclass, fields, replace
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
        if getattr(config, name) < 1:
            raise ValueError(f'{name} must be 1 or more')


@dataclass
class RPTConfig:
    vocab_size: int = 4096        # ids of the tokenizer; for bpe, the number to train (ours)
    block_size: int = 1024        # tokens of a training sequence, T (ours; paper: 16K)
    micro_batch: int = 2          # sequences of a micro-batch, B (ours)
    n_layer: int = 4              # layers, half of them lower; see n_cca (ours; paper: 12)
    n_head: int = 4               # attention heads, H (ours; paper: 8)
    n_embd: int = 128             # width, C (ours; paper: 1,024)
    n_inner: int = 0              # hidden width of the MLP; 0: 4 C (paper)
    dropout: float = 0.0          # on embeddings and what layers add (ours; paper: 0.05)
    window: int = 128             # of self-attention, tokens: two blocks (ours; paper: 2,048)
    chunk_size: int = 32          # tokens of a chunk, m (ours; paper: 64)
    n_neighbors: int = 4          # chunks that a chunk retrieves, K (ours; paper: 2)
    n_cca: int = 1                # last layers that cross-attend; 0: the upper half (paper: 5)
    retriever: Literal['sem', 'lex', 'bm25', 'none'] = 'sem'    # RPT-Sem, RPT-Lex; RETRO (§5)
    shift_values: bool = True     # in cross-attention a token has the next one's value (ours)
    gate: bool = True             # neighbors are weighted before cross-attention (paper)
    eta: float = 0.1              # lower bound of the gate, η (paper)
    eta_gradient: bool = False    # a gate at its lower bound has a gradient, too (ours)
    alpha: float = 0.005          # weight of L_ret from a fifth of the steps on (ours; paper: 1e-9)
    tau: float = 4.0              # margin of L_ret at the end (paper: 2, 4, 8, 128); first 1 (ours)
    teacher: Literal['annealed', 'always', 'never'] = 'annealed'    # of sem, lex: when it chooses
    p_off: float = 0.0            # share of the training sequences that read no neighbors (ours)
    n_candidates: int = 4         # BM25 candidates of a chunk, J (ours; paper: 20)
    score_every: int = 8          # the reference LM scores every n-th chunk (ours); others: as lex
    reference: str = ''           # .pt file, or folder with ckpt.pt; default: one is trained first
    reference_steps: int = 300    # optimizer steps of the reference LM, at most RPT's (ours)
    reference_cache: float = 0.2  # weight of its continuous cache, λ (ours; paper: 0)

    def __post_init__(self):
        check_positive(self, 'vocab_size block_size micro_batch n_layer n_head n_embd window '
                             'chunk_size n_neighbors n_candidates score_every reference_steps')
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}')
        if self.n_cca > self.n_layer - self.n_layer // 2:
            raise ValueError(f'n_cca {self.n_cca} is more than half of n_layer {self.n_layer}')
        if self.window % (2 * self.chunk_size):
            raise ValueError(f'window {self.window} is not a multiple of 2 x chunk_size '
                             f'{self.chunk_size}')
        if self.n_candidates < self.n_neighbors:
            raise ValueError(f'n_candidates {self.n_candidates} is below n_neighbors '
                             f'{self.n_neighbors}')
        if self.block_size < self.window + 2 * self.chunk_size and self.retriever != 'none':
            raise ValueError(f'block_size {self.block_size} is below window + 2 x chunk_size = '
                             f'{self.window + 2 * self.chunk_size}')
        if self.reference and self.retriever != 'sem':
            raise ValueError('a reference is for retriever sem')
        if max(self.dropout, self.eta, self.reference_cache) >= 1 or self.p_off > 1:
            raise ValueError('dropout, eta, reference_cache must be below 1, p_off at most 1')

    @property
    def window_chunks(self):
        """Chunks of a window, the paper's w"""
        return self.window // self.chunk_size


# paper: §3.4, App. A and B. Ours are the tokenizer, the reference LM, alpha (App. A: 1e-9), AdamW
# (AdaBelief) with lr 5e-4 (5e-3) and weight_decay 0.01 (1e-8)
PRESETS = {
    'tiny': {},                             # the defaults: minutes on two CPU cores
    'paper': dict(
        data='pg19', tokenizer='gpt2', vocab_size=50_257, block_size=16_384, micro_batch=1,
        n_layer=12, n_head=8, n_embd=1024, dropout=0.05, window=2048, chunk_size=64,
        n_neighbors=2, n_cca=5, n_candidates=20, score_every=1, shift_values=False,
        reference_steps=50_000, reference_cache=0.0, tokens_per_step=131_072, max_steps=500_000,
        optimizer='adamw', lr=5e-4, warmup=0.01, weight_decay=0.01, eval_every=1000),
}


def batches(config):
    """Arguments of data.Corpus.batches: sequences of one document"""
    return dict(kind='documents', chunk=config.chunk_size)


# --------------------------------------------------------------------------------------------------
# the transformer
# (what several model files define is identical in them; the header lists what differs)
def RMSNorm(n_embd):
    """x / rms(x) * weight, over the last axis (Zhang & Sennrich 2019)."""
    return nn.RMSNorm(n_embd, eps=1e-6)


def Linear(n, m):
    """W x, from n numbers to m, without a bias. Layers with a bias are nn.Linear."""
    return nn.Linear(n, m, bias=False)


def fp32(x):
    """Converts bf16 and fp16 to fp32. fp64 remains, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(a, b):
    """a b with sums in fp32, under autocast too: near 20, bf16 has steps of 0.125. In bf16 runs the
    factors may be rounded, see train.precision.

    a (..., n, C), b (..., C, m) -> (..., n, m)"""
    with torch.autocast(a.device.type, enabled=False):
        return fp32(a) @ fp32(b)


def output_product(a, b):
    """a b with sums in fp32, for logits and their gradients, the largest products of a step. On a
    GPU, bf16 runs (train.precision) round the factors to bf16, because TF32 takes twice the time.
    Gradients then have relative errors of 0.5% instead of 0.03% (results.md).

    a (n, C), b (C, m) -> (n, m)"""
    if not a.is_cuda or torch.get_float32_matmul_precision() == 'highest':
        return product(a, b)
    a = a.bfloat16()
    b = b.bfloat16()
    if torch.__version__ < (2, 8) or torch.version.hip:
        return (a @ b).float()                                          # rounds the logits, too
    return torch.mm(a, b, out_dtype=torch.float32)


def aligned(E):
    """E (V, C) with rows of zeros up to a multiple of 64: a GPU multiplies these faster."""
    return F.pad(E, (0, 0, 0, -len(E) % 64))


def rotate(x, first=0):
    """Rotary embeddings (Su et al. 2021): at position p = first, first + 1, ... each pair
    (x_2d, x_2d+1) of a head is rotated by the angle p θ_d, θ_d = 10000^(-2d/D).

    x (..., T, H, D) -> (..., T, H, D)"""
    D = x.size(-1)
    theta = 10000 ** (-torch.arange(0, D, 2, device=x.device) / D)      # (D/2,)
    positions = torch.arange(first, first + x.size(-3), device=x.device)
    angle = positions[:, None, None] * theta                            # (T, 1, D/2)
    cos = angle.cos()
    sin = angle.sin()
    pairs = fp32(x).unflatten(-1, (-1, 2)).contiguous()                 # (..., T, H, D/2, 2)

    # the rotation of (a, b) is (a cos - b sin, a sin + b cos)
    if torch.compiler.is_compiling():
        a, b = pairs.unbind(-1)                                         # 2 x (..., T, H, D/2)
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    else:
        # (a + ib)(cos + i sin) is several times faster, but torch.compile has no complex numbers
        rotated = torch.view_as_complex(pairs) * torch.complex(cos, sin)
        rotated = torch.view_as_real(rotated)
    return rotated.flatten(-2).type_as(x)


def softmax_attention(q, k, v, bias=None):
    """softmax(q kᵀ / sqrt(D) + bias) v; bias is broadcast to (B, H, t, s).

    q (B, t, H, D), k and v (B, s, H, D) -> (B, t, H, D)"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                    # (B, H, t or s, D)

    # the formula itself: on a CPU in bf16 it is faster than the fused kernel (torch 2.13)
    if q.device.type == 'cpu' and q.dtype == torch.bfloat16:
        scores = (q / q.size(-1) ** 0.5) @ k.mT                         # (B, H, t, s)
        if bias is not None:
            scores = scores + bias
        y = scores.softmax(-1) @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, bias)
    return y.transpose(1, 2)


def window_attention(q, k, v, window, slopes):
    """softmax_attention of queries to the keys of the same position or up to window - 1 before.
    With slopes (1, H, 1, 1), ALiBi (Press et al. 2022) subtracts slope * age from each score. The
    queries (B, t, H, D) have the positions of the last t of the keys (B, s, H, D)."""
    position = torch.arange(k.size(1), device=k.device)
    age = position[-q.size(1):, None] - position                        # (t, s)
    bias = -slopes * age
    bias = bias.masked_fill((age < 0) | (age >= window), -math.inf)
    return softmax_attention(q, k, v, bias.to(q.dtype))


def in_blocks(x, block):
    """Cuts x (B, T, H, D) into blocks -> (B, n_blocks, block, H, D). Zeros fill the last one."""
    padding = -x.size(1) % block
    return F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, block))


def block_pairs(x, block):
    """Each block of x (B, T, H, D) except the first, after the block before it
    -> (B, n_blocks - 1, 2 block, H, D)"""
    x = in_blocks(x, block)
    return torch.cat([x[:, :-1], x[:, 1:]], dim=2)


def attend(q, k, v, block, window, slopes=0.0):
    """window_attention with blocks, so its time is linear in the number of tokens: queries of a
    block attend to the keys of their block and of the block before it.

        block 4, window 4              block 4, window 8
        keys      0123 4567 89         keys      0123 4567 89
        query 4    xxx x               query 4   xxxx x
        query 7        xxxx            query 7   xxxx xxxx
        query 8         xxx x          query 8        xxxx x

    q (B, t, H, D), k and v (B, s, H, D): the keys of s - t past tokens, fewer than 2 block, come
    first, and the first of them begins a block -> (B, t, H, D)"""
    t = q.size(1)
    n_past = k.size(1) - t

    # 1. the queries up to the end of the block that the past has begun; if it ends with a whole
    # block, or is empty, a whole block
    n_first = min(t, block - n_past % block)
    end = n_past + n_first
    first = window_attention(q[:, :n_first], k[:, :end], v[:, :end], window, slopes)
    if n_first == t:
        return first

    # 2. all later blocks in one product, because a GPU needs few and large ones. Their keys start
    # one block before the first of these queries
    q = in_blocks(q[:, n_first:], block)                                # (B, n_blocks, block...)
    k = block_pairs(k[:, end - block:], block)                          # (B, n_blocks, 2 block...)
    v = block_pairs(v[:, end - block:], block)
    B, n_blocks = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))                      # (B n_blocks, ...)
    y = window_attention(q, k, v, window, slopes)
    rest = y.unflatten(0, (B, n_blocks)).flatten(1, 2)                  # (B, n_blocks block, H, D)
    return torch.cat([first, rest[:, :t - n_first]], dim=1)


class MLP(nn.Module):
    """Two layers, the hidden one wider."""
    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 4 * config.n_embd
        self.fc = Linear(config.n_embd, n_inner)
        self.proj = Linear(n_inner, config.n_embd)

    def forward(self, x):
        """x (B, t, C) -> (B, t, C)"""
        return self.proj(F.gelu(self.fc(x)))


def cross_entropy_reference(f, E, targets):
    """The definition of `cross_entropy`, for autograd."""
    log_p = product(f, E.T).log_softmax(2)                              # (B, T, V)
    scored = targets >= 0
    log_p = log_p.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]  # (B, T)
    return -(log_p * scored).sum() / scored.sum().clamp(min=1)


class CrossEntropy(torch.autograd.Function):
    """The same by blocks of rows, summed instead of averaged. The (n, V) logits are never held: the
    forward pass computes the gradient too, from the logits of a block. The derivative of -log P(w)
    by the logits is P - 1[w].

    f (n, C), E (V, C), targets w (n,) -> Σ -log P(w), P = softmax(f Eᵀ) ()"""
    @staticmethod
    def forward(ctx, f, E, targets):
        V = len(E)
        E = aligned(E)
        block = 1024
        if f.is_cuda:                                   # a GPU needs large products: 0.5 GiB
            block = 2 ** 27 // len(E)
        nats = f.new_zeros(())
        df = torch.empty_like(f)
        dE = torch.zeros_like(E)
        for start in range(0, len(f), block):
            rows = slice(start, start + block)
            w = targets[rows]                                           # (block,)
            i = torch.arange(len(w), device=w.device)
            logits = output_product(f[rows], E.T)
            logits[:, V:] = -math.inf                                   # rows of zeros: no words
            log_p = logits.log_softmax(1)                               # (block, V)
            nats -= log_p[i, w].sum()
            if f.requires_grad:
                dlogits = log_p.exp_()
                dlogits[i, w] -= 1
                df[rows] = output_product(dlogits, E)
                dE += output_product(dlogits.T, f[rows])
        ctx.gradients = df, dE[:V]
        return nats

    @staticmethod
    def backward(ctx, dnats):
        df, dE = ctx.gradients
        return dnats * df, dnats * dE, None


def cross_entropy(f, E, targets, kernel='auto'):
    """Mean of -log P(w), P = softmax(f Eᵀ) in fp32, over the targets w >= 0.

    f (B, T, C), E (V, C), targets (B, T), -1 is not scored; kernel 'torch' runs the definition
    -> ()"""
    if kernel == 'torch':
        return cross_entropy_reference(f, E, targets)
    scored = targets >= 0
    nats = CrossEntropy.apply(fp32(f)[scored], E, targets[scored])
    return nats / scored.sum().clamp(min=1)


# --------------------------------------------------------------------------------------------------
# what is new in RPT
class SelfAttention(nn.Module):
    """§3.4: causal, in blocks of half a window; a token attends to its block and the one before."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.block = config.window // 2
        self.m = config.chunk_size
        self.qkv = Linear(C, 3 * C)
        self.proj = Linear(C, C)

    def forward(self, x, past):
        """x (B, t, C), past: keys and values (B, s - t, 2, H, D) of the tokens before, None at the
        beginning of a text -> (B, t, C), the past of the next piece"""
        qkv = self.qkv(x).unflatten(2, (3, self.n_head, -1))            # (B, t, 3, H, D)
        q = qkv[:, :, 0]
        kv = qkv[:, :, 1:]
        if past is not None:
            kv = torch.cat([past, kv], 1)                               # (B, s, 2, H, D)

        # RoPE, so attend has no slopes. Position 0 is the first key, which is another one in the
        # next piece: past is not rotated
        k, v = kv.unbind(2)
        n_past = k.size(1) - q.size(1)
        y = attend(rotate(q, n_past), rotate(k), v, self.block, 2 * self.block)

        # past: the unfinished block and the one before, up to the last whole chunk, because the
        # next piece encodes the tokens of the unfinished chunk again
        end = kv.size(1) // self.m * self.m
        start = max(0, end // self.block - 1) * self.block
        return self.proj(y.flatten(2)), kv[:, start:end]


class Attention(nn.Module):
    """Tokens of x attend to all tokens of y, in both directions. With shift, a token of y has the
    value of the next one, so what attends to a token reads what followed it."""
    def __init__(self, config, shift=False):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.shift = shift
        self.query = Linear(C, C)
        self.kv = Linear(C, 2 * C)
        self.proj = Linear(C, C)

    def forward(self, x, y, first=0, mask=None):
        """n attentions at once, each of a texts of t tokens to b texts of s tokens.

        x (n, a, t, C)          the tokens of each text have the positions first, first + 1, ...
        y (n, b, s, C)          the tokens of each text have the positions 0, 1, ...
        mask (n, 1, a t, b s)   True: x may attend to y; None: to all of it -> (n, a, t, C)"""
        q = self.query(x).unflatten(3, (self.n_head, -1))                   # (n, a, t, H, D)
        k, v = self.kv(y).unflatten(3, (2, self.n_head, -1)).unbind(3)      # 2 x (n, b, s, H, D)
        if self.shift:
            v = v.roll(-1, 2)                               # the last token has the first one's

        # the texts side by side
        q = rotate(q, first).flatten(1, 2)                                  # (n, a t, H, D)
        k = rotate(k).flatten(1, 2)                                         # (n, b s, H, D)
        v = v.flatten(1, 2)

        # e^-1e9 is 0; not -inf, because softmax of a row of -inf is nan
        bias = None
        if mask is not None:
            bias = torch.where(mask, 0.0, -1e9).to(q.dtype)
        o = softmax_attention(q, k, v, bias)                                # (n, a t, H, D)
        return self.proj(o.flatten(2)).view_as(x)


def in_chunks(x, m):
    """Cuts x (B, t, ...) into whole chunks -> (B, N, m, ...), without the tokens after them"""
    N = x.size(1) // m
    return x[:, :N * m].unflatten(1, (N, m))


def doc_of_chunks(doc, m):
    """doc (B, T) of tokens -> (B, N) of whole chunks; -1: tokens of two documents, or padding"""
    low, high = in_chunks(doc, m).aminmax(dim=2)                            # 2 x (B, N)
    return low.where(low == high, -1)


def each_alone(x):
    """Chunks x (B, n, t, C) as texts of B n attentions -> (B n, 1, t, C)"""
    return x.flatten(0, 1)[:, None]


class Retriever(nn.Module):
    """§3.1: the factors of s_q(c) = <W_Q c_q, W_K c>, see RPT.scores. c is the mean of a chunk's
    tokens after attention."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.norm = RMSNorm(C)
        self.attention = Attention(config)
        self.norm_q = RMSNorm(C)
        self.norm_k = RMSNorm(C)
        self.query = nn.Linear(C, C)                                        # W_Q
        self.key = nn.Linear(C, C)                                          # W_K

    def forward(self, x):
        """Chunks x (B, N, m, C) -> states to be retrieved (B, N, m, C), queries, keys (B, N, C)"""
        y = each_alone(self.norm(x))
        x = x + self.attention(y, y).view_as(x)
        query = self.query(self.norm_q(x.mean(2)))
        key = self.key(self.norm_k(x.mean(2)))
        return x, query, key


def bm25_vectors(tokens, idf):
    """Queries and keys of RETRO: <query, key> is BM25, in which len(d) = mean len, because all
    chunks are equally long. tokens (..., m), idf (V,) -> 2 x (..., V)"""
    tf = idf.new_zeros(*tokens.shape[:-1], len(idf))
    tf = tf.scatter_add(-1, tokens, tf.new_ones(tokens.shape))              # occurrences of a term
    key = idf * tf / (tf + 1.2)

    # multiples of 2^-10: sums are exact in any order, and ties remain ties
    return tf, (2 ** 10 * key).round() / 2 ** 10


def permitted(doc, window_chunks, first=0):
    """May chunk i, one of the N from `first` on, retrieve chunk j? If j has left the window of i
    and is of its document. doc (..., M) of all chunks, -1: of no document -> (..., N, M)"""
    j = torch.arange(doc.size(-1), device=doc.device)                       # (M,)
    i = j[first:, None]                                                     # (N, 1)
    has_left = j <= i - window_chunks
    doc_i = doc[..., first:, None]
    same_document = (doc[..., None, :] == doc_i) & (doc_i >= 0)
    return has_left & same_document


def top(scores, mask, K):
    """The numbers of the K highest of scores (..., n) where mask is True, the first of equal ones
    first; -1 where there are fewer -> (..., K)"""
    scores = F.pad(scores.where(mask, -math.inf), (0, K), value=-math.inf)
    values, numbers = scores.sort(descending=True, stable=True)
    return numbers.masked_fill(values == -math.inf, -1)[..., :K]


def pseudorandom(M, first, device):
    """Pseudorandom scores of the M chunks j for each chunk i from `first` on -> (N, M). They are
    functions of i and j, so they are the same in pieces of any size. Cubes modulo a prime p look
    random, and the cubes of 0 to p - 1 differ, because 3 does not divide p - 1."""
    p = 1_000_037
    j = torch.arange(M, device=device)
    i = j[first:, None]
    return ((7919 * i + j) % p) ** 3 % p


class NeighborEncoder(nn.Module):
    """§3.1: a neighbor, a retrieved chunk and its next one, before it is attended to"""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.norm1 = RMSNorm(C)
        self.attention = Attention(config)
        self.norm2 = RMSNorm(C)
        self.norm_query = RMSNorm(C)
        self.cross = Attention(config)
        if config.gate:
            self.norm3 = RMSNorm(C)
            self.gate_attention = Attention(config)
            self.norm_gate = RMSNorm(C)
            self.gate = nn.Linear(C, 1)                                     # w_ng, b

    def join(self, x):
        """Each chunk of x (B, n, m, C) and the next one attend to each other
        -> (B, n - 1, 2m, C)"""
        x = torch.cat([x[:, :-1], x[:, 1:]], 2)
        y = each_alone(self.norm1(x))
        return x + self.attention(y, y).view_as(x)

    def forward(self, joined, chosen, chunk_states):
        """The states of the neighbors of chunks, after attention to the chunk that retrieves them

        joined (B, M, 2m, C)        row j + 1: chunks j and j + 1; row 0: zeros
        chosen (B, N, K)            numbers j of retrieved chunks; -1, no neighbor, reads row 0
        chunk_states (B, N, m, C)   of the chunks that retrieve -> (B, N, K, 2m, C)"""
        # not joined[b, rows]: on a CPU the sums of its gradient have no fixed order
        rows = (chosen + 1).flatten(1)                                      # (B, N K)
        x = torch.cat([joined_b.index_select(0, rows_b) for joined_b, rows_b in zip(joined, rows)])
        x = x.unflatten(0, chosen.shape)                                    # (B, N, K, 2m, C)

        # a slot without a neighbor does not stay zero here; its gate is 0
        y = each_alone(self.norm_query(chunk_states))                       # (B N, 1, m, C)
        return x + self.cross(self.norm2(x).flatten(0, 1), y).view_as(x)

    def gates(self, neighbors, chosen):
        """A weight in [η, 1) of each neighbor; 0 where there is none:

            gate = max(η, σ((w_ng · norm(ĉ) + b) / C))

        ĉ is the mean of a neighbor's states, after attention to the means of the neighbors of
        higher rank of the same chunk, and of all neighbors of the chunks before it in a window.

        neighbors (B, n, K, 2m, C) of n chunks, chosen (B, n, K), -1: none -> (B, n, K)"""
        _, n, K = chosen.shape
        valid = chosen >= 0
        if not self.config.gate:
            return valid.to(neighbors.dtype)

        # neighbors are in the order of chunks, then of ranks; they attend to themselves and to
        # those before. No mask of documents is needed: a chunk with neighbors has a window of
        # chunks of its document before it
        chunk = torch.arange(n * K, device=chosen.device) // K              # (n K,)
        mask = (chunk > chunk[:, None] - self.config.window_chunks).tril()  # (n K, n K)
        mask = mask & valid.flatten(1)[:, None, None]                       # (B, 1, n K, n K)
        mean = neighbors.mean(3).flatten(1, 2)[:, None]                     # (B, 1, n K, C)
        y = self.norm3(mean)
        mean = mean + self.gate_attention(y, y, mask=mask)                  # ĉ (B, 1, n K, C)

        # in fp32 under autocast too, because the logit is tiny
        with torch.autocast(mean.device.type, enabled=False):
            logit = self.gate(self.norm_gate(fp32(mean))) / self.config.n_embd
        sigmoid = logit.sigmoid()
        gates = sigmoid.clamp(min=self.config.eta)                      # its gradient is 0 at η
        if self.config.eta_gradient:
            gates = sigmoid + (gates - sigmoid).detach()                # equal, with σ's gradient
        return gates.view_as(valid) * valid


class Retrieved(NamedTuple):
    """What the upper layers cross-attend to: for each of the G groups of tokens of a piece (see
    ChunkedCrossAttention), the neighbors that its chunk has retrieved"""
    states: torch.Tensor        # (B, G, K, 2m, C) of the neighbors, times their gates
    mask: torch.Tensor          # (B G, 1, 1, K 2m), False: there is no such neighbor
    in_document: torch.Tensor   # (B, t, 1), False: the token is of another document than the chunk


class ChunkedCrossAttention(nn.Module):
    """Borgeaud et al. 2022, §2.4: a group of m tokens attends to the neighbors of a chunk. Group i
    is the last token of chunk i, whose output predicts the first of chunk i + 1, and all tokens of
    chunk i + 1 except the last. They have the positions m - 1 to 2m - 2, the tokens of a neighbor 0
    to 2m - 1. The neighbors have no norm here, which would undo the gate.

        tokens, m = 4         0 1 2 | 3 4 5 6   | 7 8 9 10  | 11 ...
        attend to neighbors of none | chunk 0   | chunk 1   | chunk 2

    In a stream the first group attends to what the chunk before these N chunks has retrieved."""
    def __init__(self, config):
        super().__init__()
        self.norm = RMSNorm(config.n_embd)
        self.m = config.chunk_size
        self.attention = Attention(config, config.shift_values)

    def forward(self, x, retrieved):
        """x (B, t, C) in G groups, Retrieved -> (B, t, C)"""
        # a group begins with the last token of a chunk: a zero precedes the first chunk, zeros
        # complete the last group
        groups = in_chunks(F.pad(x, (0, 0, 1, self.m - 1)), self.m)         # (B, G, m, C)
        neighbors = retrieved.states.flatten(0, 1)                          # (B G, K, 2m, C)
        y = self.attention(each_alone(self.norm(groups)), neighbors, self.m - 1, retrieved.mask)
        y = y.view(len(x), -1, x.size(2))                                   # (B, G m, C)
        return y[:, 1:1 + x.size(1)] * retrieved.in_document                # (B, t, C)


class Block(nn.Module):
    """One pre-norm Transformer layer; the last upper ones cross-attend."""
    def __init__(self, config, cross_attends=False):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd)
        self.attention = SelfAttention(config)
        self.norm2 = RMSNorm(config.n_embd)
        self.mlp = MLP(config)
        self.cca = ChunkedCrossAttention(config) if cross_attends else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past, retrieved=None):
        """x (B, t, C), past: see SelfAttention, Retrieved or None -> (B, t, C), the past of the
        next piece"""
        y, past = self.attention(self.norm1(x), past)
        x = x + self.dropout(y)
        if self.cca is not None and retrieved is not None:
            x = x + self.dropout(self.cca(x, retrieved))
        return x + self.dropout(self.mlp(self.norm2(x))), past


# --------------------------------------------------------------------------------------------------
# supervision
def bm25_candidates(chunks, doc, window_chunks, J, idf):
    """§3.2: the J chunks most similar to chunk i and its target, c_i and c_{i+1}, by BM25. Their
    score is s_t of RPT-Lex: 1 - r / J at rank r = 0, 1, ... (ours); that of all others is 0.

    chunks (..., N, m), doc (..., N), idf (V,) -> (..., N, N)"""
    # chunks c_i and c_{i+1} are one query: their occurrences are added
    tf, keys = bm25_vectors(chunks, idf)                                    # (..., N, V)
    scores = (tf + tf.roll(-1, -2)) @ keys.mT                               # (..., N, N)

    # the last chunk of a document has no target, so it has no candidates
    has_target = F.pad(doc.diff() == 0, (0, 1))                             # (..., N)
    mask = permitted(doc, window_chunks) & has_target[..., None] & (scores > 0)
    rank = rank_of(scores * mask)                                           # r = 0, 1, ...
    return (1 - rank / J).relu() * mask


def target_log_p(reference, prompts, m, autocast):
    """Mean of log P of the last m tokens of prompts (n, 4m) -> (n,). Small LMs hardly copy from
    their context, so P is a mixture with a continuous cache (Grave et al. 2017):

        P(w) = (1 - λ) P_LM(w) + λ P_cache(w)
        P_cache(w) = Σ_{u: token u + 1 is w} softmax_u(f · f_u / sqrt(C))

    f is the state that predicts w, f_u are those before it. The model is run under autocast()."""
    lam = reference.config.reference_cache                                  # λ
    with autocast():
        states = reference.encode(prompts)[0]                               # (n, 4m, C)
    f = states[:, -m - 1:-1]                                                # (n, m, C)
    w = prompts[:, -m:, None]                                               # (n, m, 1)

    # P_cache. Query q = 0 ... m - 1 is the state of position 3m - 1 + q; it may use
    # u < 3m - 1 + q, whose next token u + 1 is known
    scores = product(f, states[:, :-1].mT) / f.size(2) ** 0.5               # (n, m, 4m - 1)
    later = torch.full_like(scores, -math.inf).triu(3 * m - 1)              # 0 for those it may use
    p_u = (scores + later).softmax(2)
    follows = prompts[:, None, 1:] == w                                     # (n, m, 4m - 1)
    p_cache = (p_u * follows).sum(2)                                        # (n, m)

    # in logarithms, because P_LM can be 0 in fp32
    log_lm = reference.logits(f).log_softmax(2).gather(2, w).squeeze(2)
    log_p = torch.logaddexp(log_lm + math.log(1 - lam), (lam * p_cache).log())
    return log_p.mean(1)


def target_scores(reference, chunks, candidates, autocast=contextlib.nullcontext):
    """§3.2: what candidate j of chunk i gains the reference LM when it predicts the target c_{i+1}:

        s_t(c_j) = (log P(c_{i+1} | c_j, c_{j+1}, c_i) - log P(c_{i+1} | c_{i-2}, c_{i-1}, c_i)) / m

    chunks (N, m), candidates (N, N) bool, of chunks 2 <= i <= N - 2
    -> s_t (N, N), 0 for all others"""
    N, m = chunks.shape
    chunks = chunks.to(reference.embedding.weight.device)
    candidates = candidates.to(chunks.device)

    # the second term is the first one of j = i - 2, which may be a candidate, too
    needed = candidates | torch.diag(candidates[2:].any(1), -2)

    # the first terms, of 4,096 tokens at once
    log_p = torch.zeros(N, N, device=chunks.device)
    for pairs in needed.nonzero().split(max(1, 1024 // m)):
        i, j = pairs.unbind(1)                                              # (n,)
        prompts = chunks[torch.stack([j, j + 1, i, i + 1], 1)]              # (n, 4, m)
        log_p[i, j] = target_log_p(reference, prompts.flatten(1), m, autocast)

    baseline = F.pad(log_p.diagonal(-2), (2, 0))                            # (N,)
    return (log_p - baseline[:, None]) * candidates


def rank_of(scores):
    """0 for the highest of scores (..., n), 1 for the next, ...; the first of equals is higher
    -> (..., n)"""
    return scores.argsort(descending=True, stable=True).argsort()


def differences(x):
    """x_l - x_j of all pairs: (B, N, N) -> (B, N, N, N), the last two l and j"""
    return x[..., None] - x[..., None, :]


def ranking_loss(s_q, s_t, tau):
    """§3.3: LambdaRank with a margin, over positives l (s_t > 0) and all permitted chunks j; one
    that was no candidate has s_t = 0. r = 1, 2, ... is the rank by s_q.

        L_ret = Σ_{l, j: s_t(l) > s_t(j)} λ_lj max(0, τ - (s_q(l) - s_q(j)))
        λ_lj  = |2^s_t(l) - 2^max(s_t(j), 0)| |1 / log2(1 + r_l) - 1 / log2(1 + r_j)| / IDCG

    s_q (B, N, N), -inf: not permitted, s_t (B, N, N) -> L_ret and NDCG@20 of each chunk, (B, N)"""
    # the terms of DCG: a positive has gain / log2(1 + r); IDCG is that of the order by s_t
    gain = torch.exp2(s_t.relu()) - 1                                       # (B, N, N)
    rank = 1 + rank_of(s_q)
    discount = 1 / torch.log2(1 + rank)
    sorted_discount = discount.sort(descending=True).values
    ideal = gain.sort(descending=True).values * sorted_discount

    # λ_lj is 0 unless s_t(l) > s_t(j): a swap changes DCG by the difference of the gains times that
    # of the discounts. Pairs with a chunk that is not permitted: as l its gain is 0, as j the hinge
    # is 0 (s_q = -1e9)
    weight = differences(gain).relu() * differences(discount).abs()         # λ_lj IDCG
    hinge = (tau - differences(s_q.clamp(min=-1e9))).relu()                 # (B, N, N, N)
    loss = (weight * hinge).sum((2, 3)) / ideal.sum(2).clamp(min=1e-9)

    # NDCG of the first 20
    dcg = (gain * discount * (rank <= 20)).sum(2)
    ndcg = dcg / ideal[..., :20].sum(2).clamp(min=1e-9)
    return loss, ndcg


# --------------------------------------------------------------------------------------------------
# the model
class Traced(NamedTuple):
    """A part of what was read to predict a token: ids[start:end] of a text"""
    weight: float
    ids: torch.Tensor       # (n,) the document, or another text
    start: int
    end: int


class Memory(NamedTuple):
    """What can be retrieved of a text with M whole chunks; what its last n chunks, a window or
    more, have retrieved"""
    last: torch.Tensor          # (B, 0 or 1, m, C) states of the last chunk: it has no next one yet
    joined: torch.Tensor        # (B, M, 2m, C) row j + 1: of chunks j and j + 1; row 0: zeros
    keys: torch.Tensor          # (B, M, C) of all chunks; RETRO: (B, M, V)
    chosen: torch.Tensor        # (B, n, K) the numbers j of neighbors, -1: none
    neighbors: torch.Tensor     # (B, n, K, 2m, C) their states
    gates: torch.Tensor         # (B, n, K) their weights; the first window_chunks - 1 rows lack a
                                # part of their window, and are not used


class State(NamedTuple):
    """What a stream keeps of a text"""
    past: list                  # of each layer; Block: keys and values (B, s, 2, H, D)
    unfinished: torch.Tensor    # (B, t) the tokens of the unfinished chunk, t < m
    memory: Memory


COMPILED = (Block, NeighborEncoder)     # layers that train.py compiles


def init_weights(model, seed):
    """GPT-2's initial weights, for width C. The seed of a matrix depends on its name, so what
    different models share begins equal."""
    config = model.config
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.manual_seed(seed + zlib.crc32(name.encode()))
            std = 0.02 * math.sqrt(768 / config.n_embd)
            if name.endswith('proj.weight'):                # of what layers add to x
                std /= math.sqrt(2 * config.n_layer)
            nn.init.normal_(p, std=std)
        elif name.endswith('bias'):
            nn.init.zeros_(p)


class RPT(nn.Module):
    """A sliding-window LM whose upper layers attend to chunks that its lower layers retrieve. By
    default it has the fields marked (ours); --preset paper has the paper's."""
    PIECE = 2048                        # tokens of a text that are encoded at once
    NOT_TAUGHT = -2                     # in place of a teacher's neighbors: the model chooses

    def __init__(self, config):
        super().__init__()
        seed = torch.randint(2 ** 48, (), device='cpu').item()              # of the weights
        self.config = config
        self.way = 'on'                                                     # see ways
        self.kernel = 'auto'                                                # see cross_entropy

        # the decoder
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)     # also the output's
        self.lower, self.upper = self.make_layers(config)

        # retrieval: learned, by BM25 with the idf of the corpus (see setup), or none
        self.retriever = None
        if config.retriever in ('sem', 'lex'):
            self.retriever = Retriever(config)
        if config.retriever == 'bm25':
            self.register_buffer('idf', torch.zeros(config.vocab_size))
        self.neighbor_encoder = None
        if config.retriever != 'none':
            self.neighbor_encoder = NeighborEncoder(config)
        self.norm = RMSNorm(config.n_embd)                                  # of the output
        init_weights(self, seed)

    def make_layers(self, config):
        """The lower and the upper half of the layers; the last n_cca upper ones cross-attend."""
        n_lower = config.n_layer // 2
        n_upper = config.n_layer - n_lower
        n_cca = 0
        if config.retriever != 'none':
            n_cca = config.n_cca or n_upper
        lower = nn.ModuleList(Block(config) for _ in range(n_lower))
        upper = nn.ModuleList(Block(config, i >= n_upper - n_cca) for i in range(n_upper))
        return lower, upper

    # lower layers, retrieval, upper layers
    def lower_layers(self, tokens, past):
        """tokens (B, t), past of these layers -> states x (B, t, C), the past of the next piece"""
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        new_past = []
        for block, block_past in zip(self.lower, past, strict=True):
            x, block_past = block(x, block_past)
            new_past.append(block_past)
        return x, new_past

    def queries_and_keys(self, chunk_states, chunk_tokens):
        """The factors of s_q (§3.1), and the states that are retrieved with a chunk

        chunk_states (B, N, m, C), chunk_tokens (B, N, m)
        -> states (B, N, m, C), queries and keys (B, N, C); RETRO: (B, N, V)"""
        if self.config.retriever == 'bm25':
            query, key = bm25_vectors(chunk_tokens, self.idf)
            return chunk_states, query, key
        return self.retriever(chunk_states)

    def scores(self, query, keys):
        """§3.1: s_q(c) = <W_Q c_q, W_K c> / sqrt(C). query (B, N, C), keys (B, M, C)
        -> (B, N, M)"""
        return product(query, keys.mT) / query.size(2) ** 0.5

    def choose(self, s_q, mask, K):
        """§3.1: the K chunks of highest s_q (B, N, M) where mask (B, N, M) is True; -1: there are
        fewer -> their numbers (B, N, K)"""
        scores = s_q
        if self.way == 'shuffled':
            N, M = s_q.shape[1:]
            scores = pseudorandom(M, M - N, s_q.device)                     # (N, M)
        elif self.config.retriever != 'bm25' and not self.training:
            # the scores of a chunk that recurs differ by errors of rounding, which depend on the
            # pieces in which a text is read. Rounded to 1 / 256 they are ties: the first is chosen
            scores = (256 * s_q).round()
        return top(scores, mask, K)

    def retrieve(self, x, tokens, chunk_doc, teacher, memory):
        """§3.1, for N whole chunks, at least one

        x (B, t, C), tokens (B, t)  of the lower layers; chunk_doc (B, N)
        teacher (B, N, K)           chunks to retrieve in training, -1: none, NOT_TAUGHT: those of
                                    highest s_q; or None: no teacher
        memory                      of the chunks before
        -> the new memory, s_q (B, N, M), -inf where a chunk may not be retrieved"""
        m = self.config.chunk_size
        window_chunks = self.config.window_chunks
        chunk_states = in_chunks(x, m)                                      # (B, N, m, C)
        states, query, key = self.queries_and_keys(chunk_states, in_chunks(tokens, m))

        # what can be retrieved: each chunk and the next one, by the key of the first
        states = torch.cat([memory.last, states], 1)                    # N or N + 1 chunks
        joined = torch.cat([memory.joined, self.neighbor_encoder.join(states)], 1)
        keys = torch.cat([memory.keys, key], 1)                         # (B, M, C)

        # which chunks may be retrieved; RETRO's have a term in common
        s_q = self.scores(query, keys)                                  # (B, N, M)
        n_before = keys.size(1) - query.size(1)                         # chunks of memory
        mask = permitted(F.pad(chunk_doc, (n_before, 0)), window_chunks, n_before)
        if self.config.retriever == 'bm25':
            mask = mask & (s_q > 0)

        # the K chunks that each chunk retrieves
        K = memory.chosen.size(2)
        chosen = self.choose(s_q, mask, K)                              # (B, N, K)
        if teacher is not None:
            chosen = chosen.where(teacher == self.NOT_TAUGHT, teacher)

        # their states and gates; the gates depend on the neighbors of a window of chunks before
        neighbors = self.neighbor_encoder(joined, chosen, chunk_states)     # (B, N, K, 2m, C)
        neighbors = torch.cat([memory.neighbors[:, -window_chunks:], neighbors], 1)
        chosen = torch.cat([memory.chosen[:, -window_chunks:], chosen], 1)
        gates = self.neighbor_encoder.gates(neighbors, chosen)
        memory = Memory(states[:, -1:], joined, keys, chosen, neighbors, gates)
        return memory, s_q.where(mask, -math.inf)

    def for_groups(self, memory, doc, chunk_doc):
        """What the G = N + 1 groups of a piece attend to. Group 0 reads what the chunk before these
        N chunks has retrieved. doc (B, t) of tokens, chunk_doc (B, N) -> Retrieved"""
        m = self.config.chunk_size
        G = chunk_doc.size(1) + 1
        states = memory.neighbors[:, -G:] * memory.gates[:, -G:, :, None, None]
        valid = (memory.chosen[:, -G:] >= 0).flatten(0, 1)                  # (B G, K)
        mask = valid.repeat_interleave(2 * m, 1)                            # (B G, K 2m)

        # the first token of group 0 precedes these t tokens. A stream is one document, number 0
        group_doc = F.pad(chunk_doc, (1, 0)).repeat_interleave(m, 1)        # (B, G m)
        in_document = group_doc[:, 1:1 + doc.size(1)] == doc                # (B, t)
        return Retrieved(states, mask[:, None, None], in_document[:, :, None])

    def upper_inputs(self, x, tokens, doc, teacher, memory):
        """What the upper layers get apart from x: each whole chunk retrieves, the tokens after it
        attend to its neighbors. doc (B, t) of tokens; other arguments as in retrieve
        -> Retrieved, or None where nothing is retrieved; the new memory; s_q, or None"""
        if self.neighbor_encoder is None or self.way == 'off':
            return None, memory, None
        s_q = None
        chunk_doc = doc_of_chunks(doc, self.config.chunk_size)              # (B, N)
        if chunk_doc.size(1) > 0:
            memory, s_q = self.retrieve(x, tokens, chunk_doc, teacher, memory)
        return self.for_groups(memory, doc, chunk_doc), memory, s_q

    def upper_layers(self, x, past, inputs):
        """x (B, t, C), past of these layers, what upper_inputs returns
        -> (B, t, C), the past of the next piece"""
        new_past = []
        for block, block_past in zip(self.upper, past, strict=True):
            x, block_past = block(x, block_past, inputs)
            new_past.append(block_past)
        return x, new_past

    def empty_state(self, B, K):
        """The state before B texts, of which each chunk retrieves K chunks"""
        config = self.config
        m = config.chunk_size
        C = config.n_embd
        key_size = config.vocab_size if config.retriever == 'bm25' else C
        slots = B, config.window_chunks, K                                  # (B, n, K)
        zeros = self.embedding.weight.new_zeros
        memory = Memory(
            last=zeros(B, 0, m, C),
            joined=zeros(B, 1, 2 * m, C),                                   # row 0
            keys=zeros(B, 0, key_size),
            chosen=zeros(slots).long() - 1,                                 # none
            neighbors=zeros(*slots, 2 * m, C),
            gates=zeros(slots))
        n_layers = len(self.lower) + len(self.upper)
        return State([None] * n_layers, zeros(B, 0).long(), memory)

    def encode(self, tokens, doc=None, teacher=None, state=None):
        """Encodes tokens (B, t), which continue the text of `state` or begin a text (None).

        doc (B, t)          documents of the tokens, if there are several; without a state only
        teacher (B, N, K)   of a training batch, see retrieve; K can be another one than the model's
        -> f (B, t, C), which predicts the next tokens, the new state, s_q (B, N, M) or None"""
        m = self.config.chunk_size
        if state is None:
            K = self.config.n_neighbors if teacher is None else teacher.size(2)
            state = self.empty_state(len(tokens), K)
        n_lower = len(self.lower)
        n_unfinished = state.unfinished.size(1)

        # the tokens of the unfinished chunk are encoded again
        tokens = torch.cat([state.unfinished, tokens], 1)
        if doc is None:
            doc = torch.zeros_like(tokens)

        # each whole chunk retrieves after the lower layers; the upper ones read its neighbors
        x, lower_past = self.lower_layers(tokens, state.past[:n_lower])
        inputs, memory, s_q = self.upper_inputs(x, tokens, doc, teacher, state.memory)
        x, upper_past = self.upper_layers(x, state.past[n_lower:], inputs)
        f = self.norm(x[:, n_unfinished:])

        end = tokens.size(1) // m * m                                       # of the whole chunks
        return f, State(lower_past + upper_past, tokens[:, end:], memory), s_q

    def logits(self, f):
        """f (..., C) -> (..., V) fp32"""
        return product(f, self.embedding.weight.T)

    # training
    def schedule(self, progress):
        """-> the chance that the teacher chooses (§3.4); α and τ of L_ret (§3.3)"""
        config = self.config
        annealed = 0.5 * (1 + math.cos(math.pi * min(1, progress / 0.9)))
        chances = {'annealed': annealed, 'always': 1, 'never': 0}
        alpha = config.alpha * min(1, progress / 0.2)
        tau = 1 + (config.tau - 1) * progress
        return chances[config.teacher], alpha, tau

    def teacher_neighbors(self, s_t, chance):
        """§3.4, scheduled sampling: with this chance a chunk gets the K chunks that help most, else
        those that the model chooses. RETRO always gets the first. s_t (B, N, N) -> (B, N, K)"""
        best = top(s_t, s_t > 0, self.config.n_neighbors)
        if self.retriever is None:
            return best
        not_taught = torch.rand_like(s_t[..., :1]) >= chance                # (B, N, 1)
        return best.masked_fill(not_taught, self.NOT_TAUGHT)

    def forward(self, batch, progress):
        """batch: data.Batch, in training with s_t a TaughtBatch; progress: step / max_steps
        -> L_LM + α L_ret () in nats per token, what to log"""
        chance, alpha, tau = self.schedule(progress)
        s_t = teacher = None
        if self.training:
            torch.manual_seed(batch.seed)                   # for scheduled sampling, dropout
            s_t = getattr(batch, 'target_scores', None)                     # (B, N, N)
        if s_t is not None:
            teacher = self.teacher_neighbors(s_t, chance)
            if self.config.p_off:
                off = torch.rand(len(s_t), device=s_t.device) < self.config.p_off
                teacher[off] = -1

        f, _, s_q = self.encode(batch.tokens, batch.doc, teacher)
        lm_loss = cross_entropy(f, self.embedding.weight, batch.targets, self.kernel)
        if s_t is None or self.retriever is None:
            return lm_loss, {}

        # means over the chunks with a positive; `ranked` of them are in a micro-batch of the step
        of_chunks = ranking_loss(s_q, s_t, tau)                             # 2 x (B, N)
        ret_loss, ndcg = (x.sum() / batch.ranked for x in of_chunks)
        log = dict(lm_loss=lm_loss, ret_loss=ret_loss, ndcg=ndcg, ranked=(s_t > 0).any(2).sum())
        return lm_loss + alpha * ret_loss, log

    # inference
    def log_probs(self, tokens):
        """log P (B, t, V) fp32 of the token after each of tokens (B, t), each row a document"""
        return self.stream(tokens)[0]

    @torch.no_grad()
    def states(self, tokens, state=None):
        """f (B, t, C), whose `logits` predict the token after each of tokens (B, t), which continue
        the text of `state`; the new state"""
        f, state, _ = self.encode(tokens, state=state)
        return f, state

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """Predicts the token after each of tokens (B, t), t >= 1, which continue the text of
        `state` -> log P (B, t, V), the new state"""
        f, state = self.states(tokens, state)
        return self.logits(f).log_softmax(-1), state

    @torch.no_grad()
    def read(self, tokens, state=None):
        """The new state of stream(tokens, state), without predictions; any t >= 0"""
        if state is None:
            state = self.empty_state(len(tokens), self.config.n_neighbors)
        for piece in tokens.split(self.PIECE, 1):
            if piece.numel():
                _, state, _ = self.encode(piece, state=state)
        return state

    def ways(self):
        """The names of the ways in which a text can be read: values of `way`, see eval.py"""
        if self.neighbor_encoder is None:
            return ('off',)
        return ('on', 'shuffled', 'off')

    def trace(self, tokens, t, state=None):
        """What is retrieved to predict token t + 1 of tokens (n,), with its gate -> [Traced], the
        largest gate first. state: of read(tokens[None, :t]), computed if None"""
        if state is None:
            state = self.read(tokens[None, :t])
        memory = self.read(tokens[None, t:t + 1], state).memory

        # the last whole chunk has retrieved chunks j and j + 1
        m = self.config.chunk_size
        rows = []
        for gate, j in zip(memory.gates[0, -1].tolist(), memory.chosen[0, -1].tolist()):
            if j >= 0:
                rows.append(Traced(gate, tokens, j * m, (j + 2) * m))
        return sorted(rows, key=lambda row: -row.weight)


# --------------------------------------------------------------------------------------------------
# before the training: s_t of all sequences
VERSION = 1     # of the scores on disk: raise it when a change of `supervision` changes a score


def corpus_idf(corpus, config):
    """idf (V,) of the chunks of a corpus, as in bm25.py"""
    tokens, m = corpus.train.tokens, config.chunk_size
    n = len(tokens) // m
    df = np.zeros(config.vocab_size)
    for chunk in tokens[:n * m].reshape(n, m):
        df[chunk] += 1                                                      # a repeated id: once
    return torch.from_numpy(idf_lucene(n, df))


def warn_if_too_short(config, corpus):
    """Prints a warning if no document is long enough for retrieval: a chunk retrieves chunks that
    have left its window, for its target, the chunk after it."""
    needed = config.window + 2 * config.chunk_size
    longest = np.diff(corpus.train.offsets).max()
    if longest < needed and not corpus.hops:
        print(f'warning: nothing can be retrieved: the longest document has {longest} tokens, less '
              f'than {needed}. Try longer documents or smaller --window and --chunk-size')


def reference_lm(config, run):
    """The reference LM, of --reference or trained first. SystemExit if it cannot score chunks"""
    window = 4 * config.chunk_size                      # the four chunks of s_t
    steps = min(config.reference_steps, run.config.max_steps)
    origin = config.reference or f'{steps} steps'
    print(f'first the reference LM, whose predictions show which chunks help: {origin}')

    # half as deep as RPT, without retrieval
    settings = {f.name: getattr(config, f.name) for f in fields(RPTConfig)}
    settings |= dict(n_layer=max(1, config.n_layer // 2), n_cca=0, retriever='none', reference='',
                     window=max(config.window, window))
    out = f'{Path(run.config.out)}-reference'
    train_config = replace(run.config, out=out, resume='auto', init='', max_steps=steps)
    reference, tokenizer = run.load_reference(
        config.reference, RPT, RPTConfig(**settings), train_config)

    # a file of --reference can be of any run
    fits = isinstance(reference, RPT) and reference.config.window >= window
    if not fits or reference.neighbor_encoder or tokenizer.ids != run.corpus.tokenizer.ids:
        raise SystemExit(f'--reference {config.reference}: no RPT of retriever none with this '
                         f'tokenizer and window >= {window}')
    reference.config.reference_cache = config.reference_cache
    return reference.eval().requires_grad_(False)


class TaughtBatch(NamedTuple):
    """data.Batch with the scores of its chunks"""
    tokens: torch.Tensor        # (B, T)
    targets: torch.Tensor       # (B, T)
    doc: torch.Tensor           # (B, T)
    seed: int
    target_scores: torch.Tensor     # s_t (B, N, N)
    ranked: float               # chunks with a positive: the mean over the micro-batches of the
                                # step, so each chunk of a step has the same weight in L_ret


class Teacher:
    """s_t of the sequences of a run, each computed once and stored in a file. The name of their
    folder is a hash of all that they depend on: runs that differ in other settings share them."""
    def __init__(self, run, model, idf, reference=None):
        """reference: the LM that scores every n-th chunk; None: all scores are as in RPT-Lex"""
        self.run = run
        self.config = config = model.config
        self.idf = idf
        self.reference = reference

        # the folder
        facts = [VERSION, run.corpus.fingerprint,
                 run.corpus.hops, run.corpus.hops and run.config.seed,          # of the needles
                 run.config.dtype, config.chunk_size, config.window_chunks, config.n_candidates,
                 config.score_every, config.reference_cache]
        digest = hashlib.sha256(repr(facts).encode())
        if reference is not None:
            for p in reference.parameters():
                digest.update(p.numpy())
            reference.to(model.embedding.weight.device)
        self.folder = run.corpus.folder / f'scores-{digest.hexdigest()[:16]}'
        self.folder.mkdir(exist_ok=True)

        # attach needs all micro-batches of a step for each of them: their scores are kept
        tokens_per_pass = run.batches.B * run.batches.T
        self.per_step = run.config.tokens_per_step // tokens_per_pass           # micro-batches
        self.scores_of = functools.lru_cache(self.per_step)(self.scores_of)

    def sequence_scores(self, chunks, doc):
        """s_t (N, N) of a sequence: by the reference LM for every n-th chunk, else as in RPT-Lex.
        chunks (N, m), doc (N,)"""
        config = self.config
        s_t = bm25_candidates(chunks, doc, config.window_chunks, config.n_candidates, self.idf)
        if self.reference is None:
            return s_t.float()
        candidates = s_t > 0
        candidates[torch.arange(len(doc)) % config.score_every > 0] = False
        by_reference = target_scores(self.reference, chunks, candidates, self.run.autocast)
        return by_reference.cpu().where(candidates, s_t).float()

    def stored_scores(self, path, chunks, doc):
        """The same from the file `path`, which is written if it is missing or broken"""
        try:
            s_t = np.load(path)
            assert np.isfinite(s_t).all()
            return torch.from_numpy(s_t)
        except Exception:                       # a broken file can raise anything
            s_t = self.sequence_scores(chunks, doc)
        temporary = path.with_name(f'{os.getpid()}.tmp.npy')
        np.save(temporary, s_t)
        temporary.replace(path)
        return s_t

    def scores_of(self, number):
        """s_t (B, N, N) of a micro-batch of the run, by its number"""
        batch = self.run.batches[number]
        m = self.config.chunk_size
        chunks = in_chunks(batch.tokens, m)                                 # (B, N, m)
        doc = doc_of_chunks(batch.doc, m)                                   # (B, N)
        s_t = torch.zeros(*doc.shape, doc.size(1))
        for b, row in enumerate(self.run.batches.rows(number)):
            path = self.folder / f'{batch.tokens.size(1)}-{row}.npy'
            s_t[b] = self.stored_scores(path, chunks[b], doc[b])
        return s_t

    def compute_all(self):
        """Computes the scores of the whole run, each process its share."""
        run = self.run
        n_batches = self.per_step * run.config.max_steps
        print(f'scores of {n_batches * run.batches.B} sequences in {self.folder}; then RPT')
        numbers = range(run.rank, n_batches, run.world)
        for number in run.progress_bar(numbers, 'scores', quiet=run.rank > 0):
            self.scores_of(number)

    def attach(self, batch, number):
        """Adds the scores to a micro-batch -> TaughtBatch"""
        first = number // self.per_step * self.per_step                     # of the step
        scores = [self.scores_of(first + i) for i in range(self.per_step)]
        ranked = sum((s_t > 0).any(2).sum().item() for s_t in scores)
        return TaughtBatch(*batch, scores[number - first], max(1, ranked) / self.per_step)


def setup(model, run):
    """Computes what RPT learns from, before its training; run: see train.py
    -> function attach(batch, number), which adds s_t to a micro-batch; None: without a retriever"""
    config = model.config
    if config.retriever == 'none':
        return None
    warn_if_too_short(config, run.corpus)

    # the teacher: BM25, or a reference LM which scores the candidates of BM25
    idf = corpus_idf(run.corpus, config)
    reference = None
    if config.retriever == 'bm25':
        model.idf.copy_(idf)
    if config.retriever == 'sem':
        reference = reference_lm(config, run)
    teacher = Teacher(run, model, idf, reference)
    teacher.compute_all()
    return teacher.attach


# --------------------------------------------------------------------------------------------------
# evaluation
def ranking_measures(s_q, s_t):
    """Of the order by s_q (n, N, N): {name: (n, N), nan: the chunk has no positive, s_t > 0}"""
    rank = rank_of(s_q)                                                     # (n, N, N)
    positive = s_t > 0
    n_positives = positive.sum(2)                                           # (n, N)
    nan = torch.tensor(math.nan, dtype=s_q.dtype, device=s_q.device)

    # NDCG of one text at a time, because a text takes (N, N, N)
    ndcg = [ranking_loss(q[None], t[None], tau=1)[1] for q, t in zip(s_q, s_t)]
    measures = {'precision@2': (positive & (rank < 2)).sum(2) / 2,
                'recall@10': (positive & (rank < 10)).sum(2) / n_positives,
                'ndcg@20': torch.cat(ndcg)}
    return {name: x.where(n_positives > 0, nan) for name, x in measures.items()}


def target_losses(model, texts, chosen):
    """Nats per token of the targets of chunks 0 to N - 2 of texts (n, N m), whose chunks have
    retrieved `chosen` (n, N, K) -> (n, N - 1)"""
    m = model.config.chunk_size
    nats = []
    for tokens, neighbors in zip(texts.split(1), chosen.split(1)):
        f = model.encode(tokens, teacher=neighbors)[0]
        logits = model.logits(f[:, m - 1:-1])                               # (1, N m - m, V)
        nats.append(F.cross_entropy(logits.mT, tokens[:, m:], reduction='none'))
    return in_chunks(torch.cat(nats), m).mean(2)


def check_ranked_runs(rankers, reference, texts):
    """SystemExit unless the last run can score what each of the others retrieves from the texts."""
    runs = [*rankers, reference]
    kinds = {(run.corpus.fingerprint, run.model.config.chunk_size) for run in runs}
    all_retrieve = rankers and all(run.model.neighbor_encoder for run in rankers)
    is_lm = not reference.model.neighbor_encoder and reference.model.config.window_chunks >= 4
    if not (len(texts) and all_retrieve and is_lm and len(kinds) == 1):
        raise SystemExit('ranks: runs that retrieve, then their reference LM (window: 4 chunks), '
                         'of one tokenizer and chunk size; a document of --block-size tokens')


class Report:
    """The lines that `ranks` prints: means over the chunks that may retrieve and have a target"""
    def __init__(self, chunks):
        self.chunks = chunks                    # a slice of the N chunks
        self.result = {}                        # {name of a line: {column: mean}}

    def add(self, name, row):
        """row: {column: (n, N) or (n, N - 1), nan: not counted}"""
        row = {column: x[:, self.chunks].nanmean().item() for column, x in row.items()}
        self.result[name] = row
        print(f'{name:24}', *(f'{column} {x:.4f}' for column, x in row.items()))


def rows_of_losses(model, texts, rankings, mask, s_t, shared):
    """Table 2, Figures 4 and 6: yields for each ranking its name and a row of columns.

    texts (n, N m)        rankings {name: s (n, N, N)}      mask (N, N): which may be retrieved
    s_t (n, N, N)         shared (n, N, N): the different ids that chunks i and j have in common"""
    n, N, _ = s_t.shape
    nothing = torch.full((n, N, 1), -1, device=s_t.device)
    off = target_losses(model, texts, nothing)                              # (n, N - 1)
    for name, s in rankings.items():
        chosen = top(s, mask, 4)                                            # (n, N, 4)
        row = {f'loss {K}': target_losses(model, texts, chosen[..., :K]) for K in (2, 3, 4)}

        # what the first two gain if one of them helps the reference LM, and if none does
        rank = rank_of(s)                                                   # (n, N, N)
        positive = (rank < 2) & (s > -math.inf) & (s_t > 0)
        missed = ~positive.any(2)[:, :-1]                                   # (n, N - 1)
        gain = off - row['loss 2']
        row['gain with positive'] = gain.masked_fill(missed, math.nan)
        row['without'] = gain.masked_fill(~missed, math.nan)

        # ids that the first one shares with chunk i, and with its target
        row['shares'] = (shared * (rank < 1)).sum(2)
        row['with target'] = (shared.roll(-1, 1) * (rank < 1)).sum(2)
        yield name, row


@torch.no_grad()
def ranks(runs, args):
    """Table 3: are the chunks that help ranked first? By chance, recency, BM25 and each run but the
    last, which is the reference LM; its s_t is positive if a chunk helps.

    Table 2, Figures 4 and 6: the loss of each run when it reads the first K chunks of a ranking, of
    its s_q, of another run's (Table 4) or of s_t (the oracle); for K = 2, what reading them gains
    where a positive is among them, and elsewhere; the different ids that the first one shares with
    the chunk and its target. Figure 5: the best s_t of the first k by BM25, as in training
    -> {name of a line: {column: mean}}"""
    *rankers, reference = runs
    config = runs[0].model.config
    m = config.chunk_size
    N = config.block_size // m

    # at most 16 sequences, evenly spread
    texts = torch.cat([in_chunks(x[None], N * m)[0] for x in runs[0].documents])
    check_ranked_runs(rankers, reference, texts)
    texts = texts[::math.ceil(len(texts) / 16)]                             # (n, N m)
    chunks = in_chunks(texts, m)                                            # (n, N, m)

    # s_t of all chunks that each of the runs may retrieve
    window_chunks = max(run.model.config.window_chunks for run in rankers)
    doc = texts.new_zeros(N)                                                # of one document
    mask = permitted(doc, window_chunks)                                    # (N, N)
    mask[-1] = False                                                        # it has no target
    s_t = torch.stack([target_scores(reference.model, x, mask)              # (n, N, N)
                       for x in args.progress_bar(chunks, 'texts scored')])

    # the scores by which chunks are ranked
    idf = corpus_idf(runs[0].corpus, config).to(s_t)
    tf, keys = bm25_vectors(chunks, idf)
    torch.manual_seed(args.seed)
    rankings = {'chance': torch.rand_like(s_t),
                'latest first': torch.arange(N).expand_as(s_t),
                'BM25': tf @ keys.mT}
    for run in rankers:
        _, _, rankings[run.name] = run.model.encode(texts)                  # s_q (n, N, N)
    rankings = {name: s.to(s_t).where(mask, -math.inf) for name, s in rankings.items()}

    # Table 3, Figure 5
    report = Report(slice(window_chunks, N - 1))
    for name, s in rankings.items():
        report.add(name, ranking_measures(s, s_t))
    rankings['oracle'] = oracle = s_t.where(mask, -math.inf)
    rank = rank_of(bm25_candidates(chunks, doc, window_chunks, N, idf))     # (n, N, N)
    report.add('best s_t', {f'of {k}': oracle.where(rank < k, -math.inf).amax(2)
                            for k in (1, 2, 5, 20)})

    # Table 2, Figures 4 and 6
    terms = tf.clamp(max=1)
    shared = terms @ terms.mT                                               # (n, N, N)
    for run in rankers:
        rows = rows_of_losses(run.model, texts, rankings, mask, s_t, shared)
        for name, row in args.progress_bar(rows, f'{run.name}: rankings read', len(rankings)):
            report.add(f'{run.name} reads {name}', row)
    return report.result


TASKS = {'ranks': ranks}


# --------------------------------------------------------------------------------------------------
# a demo
def demo():
    """The first 1,024 bytes of this file, from tokens to the loss; 20 steps of training without
    L_ret; then what is retrieved"""
    torch.manual_seed(0)
    text = Path(__file__).read_bytes()[:1024]
    tokens = torch.tensor([list(text)])                                     # (1, 1024)
    model = RPT(RPTConfig(vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    n_parameters = sum(p.numel() for p in model.parameters())
    for step in range(20):
        f, state, s_q = model.encode(tokens[:, :-1])
        loss = cross_entropy(f, model.embedding.weight, tokens[:, 1:])
        if step == 0:
            print(f"""RPTConfig()                {n_parameters:,} parameters
{f.size(1)} tokens in chunks      (B, N, m)         {tuple(in_chunks(tokens[:, :-1], 32).shape)}
scores s_q of all pairs    (B, N, M)         {tuple(s_q.shape)}
neighbors, n = N + window  (B, n, K, 2m, C)  {tuple(state.memory.neighbors.shape)}
their gates                (B, n, K)         {tuple(state.memory.gates.shape)}
states that predict        (B, T, C)         {tuple(f.shape)}
loss at first              {loss:.3f}, ln 256 = {math.log(256):.3f}""")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f'loss after 20 steps        {loss:.3f}')
    t = 1023
    print(f'To predict what follows {text[t - 40:t]!r}, it reads:')
    for row in model.eval().trace(tokens[0], t - 1):
        print(f'gate {row.weight:.3f}  {text[row.start:row.end]!r}')


if __name__ == '__main__':
    demo()
