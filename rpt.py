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
    §3       C_<i, the chunks that c_i may retrieve     permitted
    §3.1     lower and upper decoder                    RPT.encode
    §3.1     all steps of retrieval                     RPT.retrieve
    §3.1     c, W_Q c_q and W_K c                       Retriever
    §3.1     s_q(c) = <W_Q c_q, W_K c>                  RPT.scores
    §3.1     R(c_q), the K chunks of highest s_q        RPT.choose
    §3.1     C, states of neighbors; footnote 2, App. B  NeighborEncoder
    §3.1     C^g, neighbor gating                       NeighborEncoder.gates
    §3.1     chunked cross-attention                    ChunkedCrossAttention
    §3.2     the candidates, by BM25                    bm25_candidates
    §3.2     s_t, the target score                      target_scores
    §3.3     L_ret, LambdaRank with a margin            ranking_loss
    §3.3     L_LM + α L_ret                             RPT.forward
    §3.3     α and τ in the course of training          RPT.schedule
    §3.4     scheduled sampling, p_ss                   RPT.schedule, RPT.scheduled_sampling
    §3.4     sliding-window attention                   SelfAttention
    §3.4     inference, the index of keys               RPT.stream, RPT.extend_index
    §5       Transformer-XL, RETRO, RPT-Lex             --retriever none, bm25, lex
    §5       Memorizing, Block-Recurrent, Griffin, DPR  compared/
    §5       Tables 2 to 4, Figures 4 to 6              ranks

Letters in the shape comments
    B sequences    T tokens, t of a piece, s keys    C width    V vocabulary
    H heads        D width of a head                 R, X, Y see Attention
    m tokens of a chunk    N chunks of a sequence or a piece    M chunks so far
    K neighbors of a chunk    J candidates of a chunk
    G = N + 1 groups of m tokens, see ChunkedCrossAttention     n any other size
    i a chunk that retrieves (the paper's c_q = c_i)    j a chunk that is retrieved
    l a positive, in L_ret    λ_lj LambdaRank's factor, in L_ret    r a rank, from 0
    w a target token; in BM25 any    u an earlier token    λ the weight of the reference LM's cache
    x states between layers    f states after the last norm    E embeddings (V, C): f Eᵀ are logits

Letters of the paper with another meaning here: its d is C, its C (states of neighbors) is `states`
in Neighbors, its w (chunks of a window) is window_chunks.

A text is a sequence of a training batch, or it is read in pieces, one after the other (a stream).
A neighbor is a retrieved chunk together with the chunk after it.

Where we differ from the paper, and why
    Settings: by default, fields marked (ours) differ, except eta_gradient and p_off, which are off;
    --preset paper has the paper's, except those named at PRESETS. Those that change the method, not
    only its size, are a group of their own in RPTConfig.
    As in the official code, and not in the paper's text: s_q is divided by sqrt(C). The retriever
    and the gate have norms and biases. Retrieved states have passed the retriever's attention,
    those of the chunk that retrieves have not. L_ret trains the lower layers, too. Its τ starts
    at 1.
    Scores: search is exact (paper: faiss). In evaluation, scores are rounded to 1/256, so chunks
    that recur with all that their states depend on nearly always have equal scores. A chunk without
    neighbors gets 0 from cross-attention.
    Layers: the gate is max(η, σ), as in the paper (official code: η + (1 - η) σ). It attends to the
    neighbors of a window of chunks, so that a stream keeps no others (paper: of all chunks).
    Dropout is on embeddings and what each Block adds, not in the retriever and the neighbor
    encoder. Self-attention crosses joined documents.
    Teacher: the reference LM (paper: Pythia 1.4B) has half the layers and a continuous cache, is
    trained on the same documents, and scores the candidates of every n-th chunk of a sequence,
    n = score_every. The other chunks are taught as in RPT-Lex. BM25 has the idf of the corpus.
    Scheduled sampling draws for each chunk.
    Losses: s_t is a mean over tokens, L_ret over the chunks that have a positive. In λ_lj the
    discount is NDCG's (official code: log2(2 + r), not its reciprocal).
    Measures: Precision@2 is over the chunks that have a positive (paper: over all). Figure 6 has
    nats over the same model without neighbors (paper: % over Transformer-XL).
    Optimizer: Muon or AdamW (paper: AdaBelief).

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
    # sizes
    vocab_size: int = 4096        # ids of the tokenizer; for bpe, the number to learn (ours)
    block_size: int = 1024        # tokens of a training sequence, T (ours; paper: 16K)
    micro_batch: int = 2          # sequences of a micro-batch, B (ours)
    n_layer: int = 4              # layers, half of them lower; see n_cca (ours; paper: 12)
    n_head: int = 4               # attention heads, H (ours; paper: 8)
    n_embd: int = 128             # width, C (ours; paper: 1,024)
    n_inner: int = 0              # hidden width of the MLP; 0: 4 C (paper)
    dropout: float = 0.0          # on embeddings and what layers add (ours; paper: 0.05)
    window: int = 128             # tokens of self-attention, two blocks (ours; paper: 2,048)
    chunk_size: int = 32          # tokens of a chunk, m (ours; paper: 64)
    n_neighbors: int = 4          # chunks that a chunk retrieves, K (ours; paper: 2)
    n_cca: int = 1                # last layers that cross-attend; 0: upper half (ours; paper: 5)
    n_candidates: int = 4         # BM25 candidates of a chunk, J (ours; paper: 20)

    # the method of the paper, its baselines (§5.1) and ablations (§5.3)
    retriever: Literal['sem', 'lex', 'bm25', 'none'] = 'sem'    # bm25: RETRO; none: Transformer-XL
    gate: bool = True             # neighbors are weighted before cross-attention (paper)
    eta: float = 0.1              # lower bound of the gate, η (paper)
    alpha: float = 0.005          # weight of L_ret from a fifth of the steps on (ours; paper: 1e-9)
    tau: float = 4.0              # margin of L_ret at the end, at first 1 (paper: 2, 4, 8, 128)
    teacher: Literal['annealed', 'always', 'never'] = 'annealed'    # teacher forcing (sem, lex)

    # the reference LM, here trained first (paper: Pythia)
    reference: str = ''           # .pt file, or folder with ckpt.pt; default: one is trained first
    reference_steps: int = 300    # optimizer steps of the reference LM, at most RPT's (ours)

    # changes of the method: all are off in --preset paper
    shift_values: bool = True     # in cross-attention a token has the next one's value (ours)
    reference_cache: float = 0.2  # weight of a cache in the reference LM, λ (ours; paper: 0)
    score_every: int = 8          # the reference LM scores every n-th chunk, BM25 the others (ours)
    eta_gradient: bool = False    # a gate at its lower bound has a gradient, too (ours)
    p_off: float = 0.0            # share of the training sequences without neighbors (ours)

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
        if self.p_off and self.retriever not in ('sem', 'lex', 'bm25'):
            raise ValueError('p_off is for retriever sem, lex or bm25')

    @property
    def window_chunks(self):
        """Chunks of a window, the paper's w (§3)"""
        return self.window // self.chunk_size

    @property
    def last_scored_chunk(self):
        """Of the chunks 0, n, 2n, ... of a sequence, n = score_every, the last that has a target.
        Chunks below window_chunks cannot retrieve, so the reference LM scores only those from there
        on."""
        last_with_target = self.block_size // self.chunk_size - 2
        return last_with_target // self.score_every * self.score_every


# paper: §3.4, App. A and B. Ours are the tokenizer, the reference LM, alpha (App. A: 1e-9), warmup,
# and AdamW (AdaBelief) with lr 5e-4 (5e-3) and weight_decay 0.01 (1e-8)
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
    """Arguments of data.Corpus.batches: a row is of one document, or of joined ends of several"""
    return dict(kind='documents', chunk=config.chunk_size)


# --------------------------------------------------------------------------------------------------
# the transformer
# (what several files define here is identical, except SelfAttention, Block and drt.py's MLP)
def RMSNorm(n_embd):
    """x / rms(x) * weight, over the last axis (Zhang & Sennrich 2019)."""
    return nn.RMSNorm(n_embd, eps=1e-6)


def Linear(n_in, n_out):
    """W x, from n_in numbers to n_out, without a bias. Layers with a bias are nn.Linear."""
    return nn.Linear(n_in, n_out, bias=False)


def fp32(x):
    """Converts bf16 and fp16 to fp32. fp64 remains, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(a, b):
    """a b with sums in fp32, under autocast too: bf16 would round a logit near 20 to a multiple of
    0.125. In bf16 runs the factors may be rounded, see train.precision.

    a (..., n, C), b (..., C, s) -> (..., n, s)"""
    with torch.autocast(a.device.type, enabled=False):
        return fp32(a) @ fp32(b)


def output_product(a, b):
    """a b with sums in fp32, for logits and their gradients, the largest products of a step. On a
    GPU, bf16 runs (train.precision) round the factors to bf16, because TF32 takes twice the time.
    Gradients then have relative errors of 0.5% instead of 0.03% (results.md).

    a (n, C), b (C, s) -> (n, s)"""
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
    With slopes (1, H, 1, 1), ALiBi (Press et al. 2022) subtracts slope * age from each score; under
    bf16 autocast the product is rounded to bf16, which changes weights by up to 1.6% where it is
    below 8. The queries (B, t, H, D) have the positions of the last t of the keys (B, s, H, D)."""
    position = torch.arange(k.size(1), device=k.device)
    age = position[k.size(1) - q.size(1):, None] - position             # (t, s)
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

    # 1. the queries up to the end of the block that the past has begun. If the past is empty or
    # ends with a whole block, they are those of the first new block
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
    """Two linear layers, with n_inner numbers between them"""
    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 4 * config.n_embd
        self.fc = Linear(config.n_embd, n_inner)
        self.proj = Linear(n_inner, config.n_embd)

    def forward(self, x):
        """x (B, t, C) -> (B, t, C)"""
        return self.proj(F.gelu(self.fc(x)))


def cross_entropy_reference(f, E, targets):
    """The definition of `cross_entropy`, for autograd: the mean over the targets w >= 0 of

        -log P(w),   P(w) = exp(f · E_w) / Σ_v exp(f · E_v)

    f (B, T, C), E (V, C) with rows E_w, targets (B, T), -1 is not scored -> ()"""
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
        E = aligned(E)                                  # (V', C), V' is a multiple of 64
        block = 1024
        if f.is_cuda:                                   # a GPU needs large products: 0.5 GiB
            block = 2 ** 27 // len(E)

        nats = f.new_zeros(())
        df = torch.empty_like(f)
        dE = torch.zeros_like(E)
        for start in range(0, len(f), block):
            # the loss of a block of rows
            rows = slice(start, start + block)
            w = targets[rows]                                           # (block,)
            i = torch.arange(len(w), device=w.device)
            logits = output_product(f[rows], E.T)
            logits[:, V:] = -math.inf                                   # rows of zeros: no words
            log_p = logits.log_softmax(1)                               # (block, V')
            nats -= log_p[i, w].sum()

            # its gradients
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
    """§3.4: causal attention in a sliding window (paper: 2,048 tokens, with a stride of 1,024). A
    block has half a window; a token attends to its block, up to itself, and to the whole block
    before it."""
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

        # Only differences of rotary positions matter, so positions count from the first key. The
        # next piece has another first key, so the past has keys that are not rotated. A query sees
        # its block and the one before, which are a window, so `attend` masks no other key
        k, v = kv.unbind(2)
        n_past = k.size(1) - q.size(1)
        y = attend(rotate(q, n_past), rotate(k), v, self.block, 2 * self.block)

        # the past of the next piece: the unfinished block and the one before, up to the last whole
        # chunk, because the next piece encodes the tokens of the unfinished chunk again
        end = kv.size(1) // self.m * self.m
        start = max(0, end // self.block - 1) * self.block
        return self.proj(y.flatten(2)), kv[:, start:end]


class Attention(nn.Module):
    """Multi-head attention of all tokens of x to all tokens of y, without a causal mask. With shift
    (ours), a token of y has the value of the next one, so a query that matches a token gets the
    value of the token after it."""
    def __init__(self, config, shift=False):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.shift = shift
        self.query = Linear(C, C)
        self.kv = Linear(C, 2 * C)
        self.proj = Linear(C, C)

    def forward(self, x, y, first=0, mask=None):
        """R independent attentions at once. In each of them, all tokens of X texts attend to all
        tokens of Y texts. For example, G groups of tokens of B sequences read K neighbors each:
        R = B G, X = 1 text of m tokens, Y = K texts of 2m tokens.

        x (R, X, t, C)          the tokens of each text have the positions first, first + 1, ...
        y (R, Y, s, C)          the tokens of each text have the positions 0, 1, ...
        mask                    True: x may attend to y, broadcast to (R, H, X t, Y s); None: to all
        returns                 (R, X, t, C)"""
        q = self.query(x).unflatten(3, (self.n_head, -1))               # (R, X, t, H, D)
        k, v = self.kv(y).unflatten(3, (2, self.n_head, -1)).unbind(3)  # 2 x (R, Y, s, H, D)
        if self.shift:
            v = v.roll(-1, 2)                               # the last token has the first one's

        # each text has its own positions; then the texts are one long text
        q = rotate(q, first).flatten(1, 2)                              # (R, X t, H, D)
        k = rotate(k).flatten(1, 2)                                     # (R, Y s, H, D)
        v = v.flatten(1, 2)

        # e^-1e9 is 0; not -inf, because softmax of a row of -inf is nan
        bias = None
        if mask is not None:
            bias = torch.where(mask, 0.0, -1e9).to(q.dtype)
        o = softmax_attention(q, k, v, bias)                            # (R, X t, H, D)
        return self.proj(o.flatten(2)).view_as(x)


def as_separate_texts(x):
    """n texts x (B, n, t, C), each in an attention of its own: R = B n, one text
    -> (B n, 1, t, C)"""
    return x.flatten(0, 1)[:, None]


def in_chunks(x, m):
    """Cuts x (B, t, ...) into whole chunks -> (B, N, m, ...), without the tokens after them"""
    N = x.size(1) // m
    return x[:, :N * m].unflatten(1, (N, m))


def doc_of_chunks(doc, m):
    """doc (B, T) of tokens -> (B, N) of whole chunks; -1: tokens of two documents, or padding"""
    low, high = in_chunks(doc, m).aminmax(dim=2)                        # 2 x (B, N)
    return low.where(low == high, -1)


def begins_document(doc):
    """doc (B, t) of tokens -> (B, t), True: the token begins a document within the piece. For the
    layers of compared/ whose memory is of one document"""
    return F.pad(doc.diff() != 0, (1, 0))


class Retriever(nn.Module):
    """§3.1: the factors of s_q(c) = <W_Q c_q, W_K c>, see RPT.scores. The vector c of a chunk is
    the mean of its tokens' states, after they have attended to each other in both directions."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.norm = RMSNorm(C)
        self.attention = Attention(config)
        self.norm_q = RMSNorm(C)
        self.norm_k = RMSNorm(C)
        self.query = nn.Linear(C, C)                                    # W_Q
        self.key = nn.Linear(C, C)                                      # W_K

    def forward(self, x):
        """Chunks x (B, N, m, C) of the lower layers -> states to be retrieved (B, N, m, C), queries
        W_Q c and keys W_K c (B, N, C)"""
        y = as_separate_texts(self.norm(x))                             # (B N, 1, m, C)
        x = x + self.attention(y, y).view_as(x)

        # c is the mean of x over the tokens
        query = self.query(self.norm_q(x.mean(2)))                      # (B, N, C)
        key = self.key(self.norm_k(x.mean(2)))
        return x, query, key


K1 = 1.2        # of BM25, as in bm25.py: with a smaller one, repeated terms count less


def bm25_vectors(tokens, idf):
    """Queries and keys of RETRO (§5.1), whose product is BM25. Term w occurs tf_w times in a chunk:

        <query, key> = Σ_w tf_w(query) · idf(w) tf_w(key) / (tf_w(key) + K1)

    This is bm25.py with b = 0, because all chunks are equally long.

    tokens (..., m), idf (V,) -> 2 x (..., V)"""
    tf = idf.new_zeros(*tokens.shape[:-1], len(idf))
    tf = tf.scatter_add(-1, tokens, tf.new_ones(tokens.shape))          # (..., V)
    key = idf * tf / (tf + K1)

    # multiples of 2^-10: sums are exact in any order, and ties remain ties
    return tf, (2 ** 10 * key).round() / 2 ** 10


def permitted(doc, window_chunks, first=0):
    """§3: may chunk i, one of the N from `first` on, retrieve chunk j, one of all M? Yes if j has
    left the window of i, j <= i - window_chunks, and both are of one document. As in the paper,
    self-attention is in blocks: chunk i attends to its block and the one before it. So up to half a
    window, between that block and the chunks that may be retrieved, is neither retrieved nor
    attended to.

    doc (..., M) of all chunks, -1: of no document -> (..., N, M) bool"""
    j = torch.arange(doc.size(-1), device=doc.device)                   # (M,)
    i = j[first:, None]                                                 # (N, 1)
    has_left = j <= i - window_chunks
    doc_i = doc[..., first:, None]
    same_document = (doc[..., None, :] == doc_i) & (doc_i >= 0)
    return has_left & same_document


def top(scores, K):
    """The indices of the K highest of scores (..., n), of equal scores the first one first; -1
    where fewer than K are above -inf -> (..., K)

    scores [2, -inf, 5, 2], K = 2: [2, 0]; K = 4: [2, 0, 3, -1]"""
    scores = F.pad(scores, (0, K), value=-math.inf)                     # at least K columns
    values, numbers = scores.sort(descending=True, stable=True)
    return numbers.masked_fill(values == -math.inf, -1)[..., :K]


def rank_of(scores):
    """The rank of each of scores (..., n): 0 for the highest, 1 for the next, ...; the first of
    equal ones is higher -> (..., n)

    scores [2, 7, 5]: [2, 0, 1]"""
    order = scores.argsort(descending=True, stable=True)
    return order.argsort()                                              # the inverse permutation


class Index(NamedTuple):
    """What can be retrieved of a text (§3.4): its M whole chunks so far"""
    keys: torch.Tensor          # (B, M, C) of chunks 0 to M - 1; RETRO: (B, M, V)
    chunk_pairs: torch.Tensor   # (B, M, 2m, C) row j + 1: states of chunks j and j + 1, for j from
                                # 0 to M - 2; row 0: zeros, in place of no chunk. Before the
                                # first chunk M is 0, and there is row 0 alone
    last: torch.Tensor          # (B, 0 or 1, m, C) states of chunk M - 1, until it has a next one


class NeighborEncoder(nn.Module):
    """§3.1: the states of neighbors, and their gates. A neighbor is a retrieved chunk and the next
    one. §3.1 puts their states side by side; App. B counts two attention layers in both directions:
    the retriever's and, as we read it, the one in which the two chunks attend to each other."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.config = config

        # the two chunks of a neighbor attend to each other
        self.norm1 = RMSNorm(C)
        self.attention = Attention(config)

        # they attend to the chunk that has retrieved them (footnote 2)
        self.norm2 = RMSNorm(C)
        self.norm_query = RMSNorm(C)
        self.cross = Attention(config)

        # the gate
        if config.gate:
            self.norm3 = RMSNorm(C)
            self.gate_attention = Attention(config)
            self.norm_gate = RMSNorm(C)
            self.gate = nn.Linear(C, 1)                                 # w_ng, b

    def encode_pairs(self, x):
        """(c_j, c_{j+1}): the tokens of each chunk and the next one attend to each other.
        x (B, n, m, C) -> n - 1 pairs (B, n - 1, 2m, C)"""
        x = torch.cat([x[:, :-1], x[:, 1:]], 2)
        y = as_separate_texts(self.norm1(x))                            # (B (n - 1), 1, 2m, C)
        return x + self.attention(y, y).view_as(x)

    def forward(self, chunk_pairs, chosen, chunk_states):
        """The neighbors of N chunks: pairs, after attention to the chunk that retrieves them
        (footnote 2)

        chunk_pairs (B, M, 2m, C)   see Index: row j + 1 has chunks j and j + 1, row 0 has zeros
        chosen (B, N, K)            numbers j of retrieved chunks; -1: none, so row 0 is read
        chunk_states (B, N, m, C)   of the chunks that retrieve
        returns                     states (B, N, K, 2m, C), the paper's C"""
        # not chunk_pairs[b, rows]: on a CPU the sums of its gradient have no fixed order
        rows = (chosen + 1).flatten(1)                                  # (B, N K)
        selected = [pairs.index_select(0, r) for pairs, r in zip(chunk_pairs, rows)]
        x = torch.cat(selected).unflatten(0, chosen.shape)              # (B, N, K, 2m, C)

        # a slot without a neighbor does not stay zero here; its gate is 0
        y = as_separate_texts(self.norm_query(chunk_states))            # (B N, 1, m, C)
        return x + self.cross(self.norm2(x).flatten(0, 1), y).view_as(x)

    def gates(self, states, chosen):
        """The gate of neighbor k of chunk i, from η to 1; 0 if there is no such neighbor. C_{i,k}
        are the neighbor's states (the paper's letter). The logit is divided by the width, n_embd:

            gate = max(η, σ((w_ng · norm(ĉ_{i,k}) + b) / n_embd)),    C^g_{i,k} = gate · C_{i,k}

        ĉ_{i,k} is the mean of C_{i,k} over its tokens, after it has attended to itself, to the
        means of the neighbors of chunk i with a higher rank, and to the means of all neighbors of
        the chunks before chunk i in its window.

        states (B, n, K, 2m, C) of the neighbors of n chunks, chosen (B, n, K), -1: none
        -> (B, n, K)"""
        _, n, K = chosen.shape
        exists = chosen >= 0
        if not self.config.gate:
            return exists.to(states.dtype)

        # A row of n K neighbors, in the order of chunks, then of ranks. Each attends to itself and
        # to those before it, of the last window_chunks chunks. These chunks are of one document,
        # because a chunk with neighbors has retrieved one of its document that is at least
        # window_chunks before it. In the mask a row is a query, a column a key
        chunk = torch.arange(n * K, device=chosen.device) // K          # (n K,) which one retrieves
        in_window = chunk > chunk[:, None] - self.config.window_chunks  # (n K, n K)
        mask = in_window.tril() & exists.flatten(1)[:, None, None]      # (B, 1, n K, n K)
        mean = states.mean(3).flatten(1, 2)[:, None]                    # (B, 1, n K, C)
        y = self.norm3(mean)
        mean = mean + self.gate_attention(y, y, mask=mask)              # ĉ (B, 1, n K, C)

        # in fp32 under autocast too, because the logit is tiny
        with torch.autocast(mean.device.type, enabled=False):
            logit = self.gate(self.norm_gate(fp32(mean))) / self.config.n_embd
        sigmoid = logit.sigmoid()                                       # (B, 1, n K, 1)
        # at η the gate has no gradient; the states keep η times theirs, which is what η is for
        gates = sigmoid.clamp(min=self.config.eta)
        if self.config.eta_gradient:
            gates = sigmoid + (gates - sigmoid).detach()                # equal, with σ's gradient
        return gates.view_as(exists).masked_fill(~exists, 0)


class Retrieved(NamedTuple):
    """What the upper layers cross-attend to in a piece of t tokens, which are in G groups (see
    ChunkedCrossAttention): each group to the K neighbors that one chunk has retrieved"""
    states: torch.Tensor        # (B, G, K, 2m, C) C^g: of the neighbors, times their gates
    mask: torch.Tensor          # (B, G, K), False: there is no such neighbor
    in_document: torch.Tensor   # (B, t, 1), False: the token gets 0, because it is of another
                                # document than the chunk that has retrieved


class ChunkedCrossAttention(nn.Module):
    """Borgeaud et al. 2022, §2.4: what chunk i has retrieved is read by the m tokens that predict
    chunk i + 1: the last token of chunk i, and all tokens of chunk i + 1 except its last. These are
    a group. N whole chunks, and the tokens after them, are in G = N + 1 groups:

        tokens, m = 4               0 1 2 | 3 4 5 6 | 7 8 9 10 | 11 ...
        number of the group         0     | 1       | 2        | 3
        attends to neighbors of     none  | chunk 0 | chunk 1  | chunk 2

    A group has the positions m - 1 to 2m - 2, a neighbor 0 to 2m - 1: as if chunk i had the place
    of the retrieved chunk j. In a stream, group 0 reads what the chunk before the piece has
    retrieved."""
    def __init__(self, config):
        super().__init__()
        self.norm = RMSNorm(config.n_embd)
        self.m = config.chunk_size
        self.attention = Attention(config, config.shift_values)

    def forward(self, x, retrieved):
        """x (B, t, C), Retrieved -> (B, t, C)"""
        m = self.m
        # a group begins with the last token of a chunk: a zero precedes the first chunk, zeros
        # complete the last group
        groups = in_chunks(F.pad(x, (0, 0, 1, m - 1)), m)               # (B, G, m, C)
        groups = as_separate_texts(self.norm(groups))                   # (B G, 1, m, C)

        # neighbors have no norm here: it would undo the gate. Without any neighbor, all values are
        # 0, so the output is 0, too
        neighbors = retrieved.states.flatten(0, 1)                      # (B G, K, 2m, C)
        mask = retrieved.mask.flatten(0, 1).repeat_interleave(2 * m, 1) # (B G, K 2m)
        y = self.attention(groups, neighbors, m - 1, mask[:, None, None])

        # without the zero at the start and the zeros at the end
        y = y.view(len(x), -1, x.size(2))                               # (B, G m, C)
        return y[:, 1:1 + x.size(1)] * retrieved.in_document            # (B, t, C)


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
    score is s_t of RPT-Lex (§5.1): 1 - r / J at rank r = 0, 1, ... (ours); that of all others is 0.

    chunks (..., N, m), doc (..., N), idf (V,) -> (..., N, N)"""
    # chunks c_i and c_{i+1} are one query: their occurrences are added
    tf, keys = bm25_vectors(chunks, idf)                                # (..., N, V)
    scores = (tf + tf.roll(-1, -2)) @ keys.mT                           # (..., N, N)

    # the last chunk of a document has no target, so it has no candidates
    has_target = F.pad(doc.diff() == 0, (0, 1))                         # (..., N)
    mask = permitted(doc, window_chunks) & has_target[..., None] & (scores > 0)
    rank = rank_of(scores.masked_fill(~mask, 0))                        # r = 0, 1, ...
    return (1 - rank / J).relu().masked_fill(~mask, 0)


def target_log_p(reference, prompts, m, lam, autocast):
    """Mean of log P of the last m tokens of prompts (n, 4m) -> (n,). Small LMs hardly copy from
    their context, so P is a mixture with a continuous cache (Grave et al. 2017) of weight λ, lam:

        P(w) = (1 - λ) P_LM(w) + λ P_cache(w)
        P_cache(w) = Σ_{u: token u + 1 is w} softmax_u(f · f_u / sqrt(C))

    f is the state that predicts w, f_u are those before it. The model is run under autocast()."""
    with autocast():
        states = reference.encode(prompts).f                            # (n, 4m, C)
    f = states[:, -m - 1:-1]                                            # (n, m, C)
    w = prompts[:, -m:, None]                                           # (n, m, 1)

    # P_cache. Query q = 0 ... m - 1 is the state of position 3m - 1 + q; it may use
    # u < 3m - 1 + q, whose next token u + 1 is known
    scores = product(f, states[:, :-1].mT) / f.size(2) ** 0.5           # (n, m, 4m - 1)
    later = torch.full_like(scores, -math.inf).triu(3 * m - 1)          # 0 for those it may use
    p_u = (scores + later).softmax(2)
    follows = prompts[:, None, 1:] == w                                 # (n, m, 4m - 1)
    p_cache = (p_u * follows).sum(2)                                    # (n, m)

    # in logarithms, because P_LM can be 0 in fp32
    log_lm = reference.logits(f).log_softmax(2).gather(2, w).squeeze(2)
    log_p = torch.logaddexp(log_lm + math.log(1 - lam), (lam * p_cache).log())
    return log_p.mean(1)


def target_scores(reference, chunks, candidates, lam, autocast=contextlib.nullcontext):
    """§3.2: how much candidate j of chunk i helps the reference LM: log P of the target c_{i+1}
    after the candidate, minus log P after the two chunks before chunk i, per token:

        s_t(c_j) = (log P(c_{i+1} | c_j, c_{j+1}, c_i) - log P(c_{i+1} | c_{i-2}, c_{i-1}, c_i)) / m

    chunks (N, m); candidates (N, N) bool, j of chunks 2 <= i <= N - 2; lam, autocast: see
    target_log_p -> s_t (N, N), 0 where j is no candidate of i"""
    N, m = chunks.shape
    chunks = chunks.to(reference.embedding.weight.device)
    candidates = candidates.to(chunks.device)

    # the first term is computed for all candidates. The second term is the first one of j = i - 2,
    # so this j is computed, too, for each i that has candidates
    has_candidates = candidates.any(1)                                  # (N,)
    needed = candidates | torch.diag(has_candidates[2:], -2)            # (N, N)

    # prompts of 4,096 tokens at once
    log_p = torch.zeros(N, N, device=chunks.device)
    for pairs in needed.nonzero().split(max(1, 1024 // m)):
        i, j = pairs.unbind(1)                                          # (n,)
        prompts = chunks[torch.stack([j, j + 1, i, i + 1], 1)]          # (n, 4, m)
        log_p[i, j] = target_log_p(reference, prompts.flatten(1), m, lam, autocast)

    second_term = F.pad(log_p.diagonal(-2), (2, 0))                     # (N,)
    s_t = log_p - second_term[:, None]
    return s_t.masked_fill(~candidates, 0)


def differences(x):
    """x_l - x_j of all pairs: (B, N, N) -> (B, N, N, N), the last two l and j"""
    return x[..., None] - x[..., None, :]


def gain_of(s_t):
    """What a chunk adds to the DCG at rank 0: 2^max(s_t, 0) - 1"""
    return torch.exp2(s_t.relu()) - 1


def discount_of(rank):
    """1 / log2(2 + r) at rank r = 0, 1, ...: 1, 0.63, 0.5, ..."""
    return 1 / torch.log2(2 + rank)


def ideal_dcg(gain, n):
    """The highest DCG, Σ gain · discount over n ranks: of the best order, that by the gain.
    gain (..., N) -> (...)"""
    best = gain.sort(descending=True).values[..., :n]
    ranks = torch.arange(best.size(-1), device=gain.device)
    return (best * discount_of(ranks)).sum(-1).clamp(min=1e-9)


def ranking_loss(s_q, s_t, tau):
    """§3.3: LambdaRank with a margin, over positives l (s_t > 0) and all permitted chunks j; one
    that was no candidate has s_t = 0. r = 0, 1, ... is the rank by s_q.

        L_ret = Σ_{l, j: s_t(l) > s_t(j)} λ_lj max(0, τ - (s_q(l) - s_q(j)))

    λ_lj is how much NDCG changes if l and j exchange their ranks (Burges et al. 2006):

        λ_lj  = |gain_l - gain_j| |discount_l - discount_j| / IDCG
        gain  = 2^max(s_t, 0) - 1,    discount = 1 / log2(2 + r)

    IDCG is the DCG, Σ gain · discount, of the best order, that by s_t.

    s_q (B, N, N), -inf: not permitted, s_t (B, N, N) -> L_ret of each chunk (B, N)"""
    gain = gain_of(s_t)                                                 # (B, N, N)
    discount = discount_of(rank_of(s_q))

    # Only pairs with gain_l > gain_j count. Pairs with a chunk that is not permitted do not: as l
    # its gain is 0, as j its s_q = -1e9 makes the hinge 0
    weight = differences(gain).relu() * differences(discount).abs()     # λ_lj IDCG
    hinge = (tau - differences(s_q.clamp(min=-1e9))).relu()             # (B, N, N, N)
    return (weight * hinge).sum((2, 3)) / ideal_dcg(gain, gain.size(2))


def ndcg(s_q, s_t, n=20):
    """NDCG@n: the DCG of the first n by s_q, as a share of the highest one. s_q, s_t as in
    ranking_loss -> (B, N), 0 if no s_t is positive"""
    gain = gain_of(s_t)                                                 # (B, N, N)
    rank = rank_of(s_q)
    dcg = gain * discount_of(rank) * (rank < n)
    return dcg.sum(2) / ideal_dcg(gain, n)


# --------------------------------------------------------------------------------------------------
# the model
class Traced(NamedTuple):
    """A part of what was read to predict a token: ids[start:end] of a text"""
    weight: float
    ids: torch.Tensor       # (n,) the document, or another text
    start: int
    end: int


class Neighbors(NamedTuple):
    """What the last n whole chunks of a text have retrieved, the latest in row n - 1: the N chunks
    of a piece, and before them window_chunks chunks, because gates depend on the neighbors of a
    window of chunks. The rows before chunk 0 have no neighbors.

    For example, with windows of 4 chunks and pieces of 5 and 3 chunks: after the second piece n is
    4 + 3, for chunks 1 to 7. The gates of chunks 1 to 3 lack a part of their window, and are not
    used; those of chunk 4 are, because group 0 of the piece reads its neighbors"""
    chosen: torch.Tensor        # (B, n, K) numbers j of retrieved chunks, -1: none
    states: torch.Tensor        # (B, n, K, 2m, C) of chunks j and j + 1, see NeighborEncoder
    gates: torch.Tensor         # (B, n, K)


class Memory(NamedTuple):
    """What retrieval needs of the text before a piece"""
    index: Index
    neighbors: Neighbors


class State(NamedTuple):
    """What a stream keeps of a text. For example, after 70 tokens in chunks of 32: the keys and
    values of tokens 0 to 63, the tokens 64 to 69, and a Memory of two chunks"""
    past: list                  # of each layer; of a Block, keys and values (B, s, 2, H, D)
    unfinished: torch.Tensor    # (B, t) the tokens of the unfinished chunk, t < m
    memory: Memory


class Forced(NamedTuple):
    """Neighbors that are retrieved in place of those of highest s_q, in teacher forcing (§3.4)"""
    chosen: torch.Tensor        # (B, N, K) numbers j of the chunks for each chunk, -1: none
    mask: torch.Tensor          # (B, N, 1), False: this chunk retrieves those of highest s_q


class UpperInputs(NamedTuple):
    """What RPT.upper_inputs returns"""
    retrieved: Retrieved | None     # third argument of each upper layer; None: nothing
    memory: Memory                  # the new one
    s_q: torch.Tensor | None        # (B, N, M), -inf: j may not be retrieved; None: no scores


class Encoded(NamedTuple):
    """What RPT.encode returns"""
    f: torch.Tensor                 # (B, t, C) states that predict the next tokens
    state: State                    # the new one
    s_q: torch.Tensor | None        # see UpperInputs


class TaughtBatch(NamedTuple):
    """data.Batch with the scores of its chunks"""
    tokens: torch.Tensor            # (B, T)
    targets: torch.Tensor           # (B, T)
    doc: torch.Tensor               # (B, T)
    seed: int
    target_scores: torch.Tensor     # (B, N, N) s_t
    ranked: float                   # chunks with a positive: the mean over the micro-batches of the
                                    # step, so each chunk of a step has the same weight in L_ret


COMPILED = (Block, NeighborEncoder)     # layers that train.py compiles


def init_weights(model, seed):
    """GPT-2's initial weights, for width C. The seed of a matrix depends on its name, so what
    different models share begins equal."""
    config = model.config
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 * math.sqrt(768 / config.n_embd)
            if name.endswith('proj.weight'):                # of what layers add to x
                std /= math.sqrt(2 * config.n_layer)

            # from the CPU's generator, so a model begins equal on all devices
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            weights = torch.empty(p.shape, device='cpu').normal_(std=std, generator=generator)
            p.data.copy_(weights)
        elif name.endswith('bias'):
            nn.init.zeros_(p)


def pseudorandom(M, first, device):
    """For the evaluation `shuffled`: pseudorandom scores of the M chunks j for each chunk i from
    `first` on -> (N, M). They are functions of i and j, so they are the same in pieces of any size.
    Cubes modulo a prime p look random, and the cubes of 0 to p - 1 differ, because 3 does not
    divide p - 1."""
    p = 1_000_037
    j = torch.arange(M, device=device)
    i = j[first:, None]
    return ((7919 * i + j) % p) ** 3 % p


class RPT(nn.Module):
    """A sliding-window LM whose upper layers attend to chunks that its lower layers retrieve.

    The models of compared/ are subclasses. What they can override:

    make_layers         the lower and the upper layers: modules that are called with x (B, t, C),
                        their past, None at the beginning of a text, and, if they are upper ones,
                        UpperInputs.retrieved -> x, the past of the next piece
    queries_and_keys    what s_q compares
    upper_inputs        what all upper layers get, with x -> UpperInputs. Its `retrieved` can be any
                        object that these layers expect. Without retrieval its `memory` is the
                        argument and its s_q is None
    ways                names of the ways of evaluation"""
    PIECE = 2048                        # tokens of a text that are encoded at once

    def __init__(self, config):
        super().__init__()
        seed = torch.randint(2 ** 48, (), device='cpu').item()          # of the weights
        self.config = config
        self.way = 'on'                                                 # see ways
        self.kernel = 'auto'                                            # see cross_entropy

        # the decoder
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd) # also the output's
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
        self.norm = RMSNorm(config.n_embd)                              # of the output
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

    # retrieval
    def retrieve(self, x, tokens, chunk_doc, forced, memory):
        """§3.1, for the N whole chunks of a piece, at least one

        x (B, t, C), tokens (B, t)  states of the lower layers, and their tokens
        chunk_doc (B, N)            documents of the chunks, -1: of no document
        forced                      Forced, or None
        memory                      of the chunks before
        returns                     the new memory; s_q (B, N, M), -inf: j may not be retrieved"""
        m = self.config.chunk_size
        K = memory.neighbors.chosen.size(2)                             # see encode
        chunk_states = in_chunks(x, m)                                  # (B, N, m, C)
        states, query, key = self.queries_and_keys(chunk_states, in_chunks(tokens, m))

        # each chunk scores all chunks so far
        index = self.extend_index(memory.index, states, key)
        s_q = self.scores(query, index.keys)                            # (B, N, M)
        s_q = self.mask_scores(s_q, chunk_doc)

        # it retrieves the K best, or those that a teacher has chosen
        chosen = self.choose(s_q, K)                                    # (B, N, K)
        if forced is not None:
            chosen = forced.chosen.where(forced.mask, chosen)

        # their states and gates
        neighbors = self.encode_neighbors(index, chosen, chunk_states, memory.neighbors)
        return Memory(index, neighbors), s_q

    def queries_and_keys(self, chunk_states, chunk_tokens):
        """The factors of s_q, and the states that are retrieved with a chunk

        chunk_states (B, N, m, C), chunk_tokens (B, N, m)
        -> states (B, N, m, C), queries and keys (B, N, C); RETRO: (B, N, V)"""
        if self.config.retriever == 'bm25':
            query, key = bm25_vectors(chunk_tokens, self.idf)
            return chunk_states, query, key
        return self.retriever(chunk_states)

    def extend_index(self, index, states, keys):
        """Adds N chunks to what can be retrieved: their states (B, N, m, C) and keys (B, N, C). A
        chunk is found by its key, and retrieved with the next one -> the new Index"""
        states = torch.cat([index.last, states], 1)                     # N or N + 1 chunks
        pairs = self.neighbor_encoder.encode_pairs(states)
        chunk_pairs = torch.cat([index.chunk_pairs, pairs], 1)          # (B, M, 2m, C)
        keys = torch.cat([index.keys, keys], 1)                         # (B, M, C)
        return Index(keys, chunk_pairs, states[:, -1:])

    def scores(self, query, keys):
        """s_q(c) = <W_Q c_q, W_K c> / sqrt(C). query (B, N, C), keys (B, M, C) -> (B, N, M). RETRO
        has V numbers in place of C."""
        return product(query, keys.mT) / query.size(2) ** 0.5

    def mask_scores(self, s_q, chunk_doc):
        """s_q (B, N, M) with -inf where chunk i may not retrieve chunk j, see `permitted`; with
        BM25, also where they have no term in common. chunk_doc (B, N) of the chunks i
        -> (B, N, M)"""
        n_before = s_q.size(2) - s_q.size(1)                            # chunks before the piece
        doc = F.pad(chunk_doc, (n_before, 0))                           # a stream is document 0
        mask = permitted(doc, self.config.window_chunks, n_before)
        if self.config.retriever == 'bm25':
            mask = mask & (s_q > 0)
        return s_q.where(mask, -math.inf)

    def choose(self, s_q, K):
        """R(c_q): the K chunks of highest s_q (B, N, M); -1: there are fewer above -inf
        -> their numbers (B, N, K). They have no gradient, and the gates do not depend on s_q, so
        W_Q and W_K learn from L_ret alone"""
        if not self.training:
            s_q = self.evaluation_scores(s_q)
        return top(s_q, K)

    def evaluation_scores(self, s_q):
        """The scores by which chunks are chosen in evaluation: s_q (B, N, M), rounded, in units of
        1/256. Without rounding, chunks that recur with all that their states depend on have scores
        that differ by floating-point errors, which depend on the pieces in which a text is read.
        Rounded scores are equal, so the first of these chunks is chosen, unless a rounding boundary
        separates them. BM25 needs no rounding. In the way `shuffled`: random numbers
        -> (B, N, M)"""
        if self.way == 'shuffled':
            N, M = s_q.shape[1:]
            random = pseudorandom(M, M - N, s_q.device)                 # (N, M)
            return random.where(s_q > -math.inf, -math.inf)
        if self.config.retriever == 'bm25':
            return s_q
        return (256 * s_q).round()

    def encode_neighbors(self, index, chosen, chunk_states, before):
        """The states and gates of chosen chunks (B, N, K), for the chunks that retrieve them,
        chunk_states (B, N, m, C); before: Neighbors of the chunks before -> Neighbors"""
        states = self.neighbor_encoder(index.chunk_pairs, chosen, chunk_states) # (B, N, K, 2m, C)

        # the gates depend on the neighbors of a window of chunks before
        window_chunks = self.config.window_chunks
        states = torch.cat([before.states[:, -window_chunks:], states], 1)      # (B, n, K, 2m, C)
        chosen = torch.cat([before.chosen[:, -window_chunks:], chosen], 1)      # (B, n, K)
        return Neighbors(chosen, states, self.neighbor_encoder.gates(states, chosen))

    def for_groups(self, neighbors, doc, chunk_doc):
        """What the G = N + 1 groups of a piece attend to: group g to the neighbors of chunk g - 1
        of the N, group 0 to those of the chunk before the piece.

        doc (B, t) of tokens, chunk_doc (B, N) -> Retrieved"""
        m = self.config.chunk_size
        G = chunk_doc.size(1) + 1
        gates = neighbors.gates[:, -G:, :, None, None]                  # (B, G, K, 1, 1)
        states = neighbors.states[:, -G:] * gates                       # (B, G, K, 2m, C) C^g
        mask = neighbors.chosen[:, -G:] >= 0                            # (B, G, K)

        # group 0 begins one token before the piece. In a stream all is document 0. In training no
        # chunk precedes the piece: group 0 reads nothing
        group_doc = F.pad(chunk_doc, (1, 0)).repeat_interleave(m, 1)    # (B, G m)
        in_document = group_doc[:, 1:1 + doc.size(1)] == doc            # (B, t)
        return Retrieved(states, mask, in_document[:, :, None])

    # lower layers, retrieval, upper layers
    def lower_layers(self, tokens, past):
        """tokens (B, t), past of these layers -> states x (B, t, C), the past of the next piece"""
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        new_past = []
        for block, block_past in zip(self.lower, past, strict=True):
            x, block_past = block(x, block_past)
            new_past.append(block_past)
        return x, new_past

    def upper_inputs(self, x, tokens, doc, forced, memory):
        """Each whole chunk retrieves; a group of tokens reads its neighbors. x (B, t, C) of the
        lower layers; tokens, doc (B, t); forced, memory: see retrieve -> UpperInputs"""
        if self.neighbor_encoder is None or self.way == 'off':
            return UpperInputs(retrieved=None, memory=memory, s_q=None)
        s_q = None
        chunk_doc = doc_of_chunks(doc, self.config.chunk_size)          # (B, N)
        if chunk_doc.size(1) > 0:
            memory, s_q = self.retrieve(x, tokens, chunk_doc, forced, memory)
        retrieved = self.for_groups(memory.neighbors, doc, chunk_doc)
        return UpperInputs(retrieved, memory, s_q)

    def upper_layers(self, x, past, retrieved):
        """x (B, t, C), past of these layers, UpperInputs.retrieved -> (B, t, C), the past of the
        next piece"""
        new_past = []
        for block, block_past in zip(self.upper, past, strict=True):
            x, block_past = block(x, block_past, retrieved)
            new_past.append(block_past)
        return x, new_past

    def empty_state(self, B, K):
        """The state before B texts, of which each chunk retrieves K chunks"""
        config = self.config
        m = config.chunk_size
        C = config.n_embd
        zeros = self.embedding.weight.new_zeros
        if self.neighbor_encoder is None:
            K = 0                                                       # nothing is retrieved

        # no chunks
        key_size = config.vocab_size if config.retriever == 'bm25' else C
        index = Index(
            keys=zeros(B, 0, key_size),
            chunk_pairs=zeros(B, 1, 2 * m, C),                          # row 0
            last=zeros(B, 0, m, C))

        # the neighbors of the chunks of a window before chunk 0: none
        n = config.window_chunks
        neighbors = Neighbors(
            chosen=torch.full((B, n, K), -1, device=self.embedding.weight.device),
            states=zeros(B, n, K, 2 * m, C),
            gates=zeros(B, n, K))
        n_layers = len(self.lower) + len(self.upper)
        return State([None] * n_layers, zeros(B, 0).long(), Memory(index, neighbors))

    def encode(self, tokens, doc=None, forced=None, state=None):
        """Encodes tokens (B, t), which continue the text of `state` or begin a text (None).

        doc (B, t)      documents of the tokens, if there are several; without a state only
        forced          Forced, or None: all chunks retrieve those of highest s_q. Without a state
                        its K can be another one than the model's
        returns         Encoded"""
        m = self.config.chunk_size
        if state is None:
            K = self.config.n_neighbors if forced is None else forced.chosen.size(2)
            state = self.empty_state(len(tokens), K)
        n_lower = len(self.lower)
        n_unfinished = state.unfinished.size(1)

        # the tokens of the unfinished chunk are encoded again: when it is whole, it retrieves by
        # the states of all its tokens
        tokens = torch.cat([state.unfinished, tokens], 1)
        if doc is None:
            doc = torch.zeros_like(tokens)

        # the lower decoder, the retriever, the upper decoder (Figure 2)
        x, lower_past = self.lower_layers(tokens, state.past[:n_lower])
        retrieved, memory, s_q = self.upper_inputs(x, tokens, doc, forced, state.memory)
        x, upper_past = self.upper_layers(x, state.past[n_lower:], retrieved)
        f = self.norm(x[:, n_unfinished:])

        end = tokens.size(1) // m * m                                   # of the whole chunks
        state = State(lower_past + upper_past, tokens[:, end:], memory)
        return Encoded(f, state, s_q)

    def logits(self, f):
        """f (..., C) -> (..., V) fp32"""
        return product(f, self.embedding.weight.T)

    # training
    def schedule(self, progress):
        """What changes in the course of training; progress: from 0 to 1. Returns

        p_ss    §3.4: probability that the teacher chooses, a cosine from 1 to 0 in the first 90%
        α       §3.3: weight of L_ret, rises in the first fifth (paper: 100K of 500K steps)
        τ       §3.3: margin of L_ret, rises

        At first the retriever's own choice is bad, and the upper layers would learn to ignore it;
        later they have to learn from it, because in evaluation there is no teacher. W_Q and W_K
        have gradients of L_ret alone, whose scale Adam and Muon undo, so α mainly matters where
        those of L_LM are added: in the lower layers and the retriever's attention."""
        config = self.config
        p_ss = 0.5 * (1 + math.cos(math.pi * min(1, progress / 0.9)))
        if config.teacher == 'always':
            p_ss = 1
        elif config.teacher == 'never':
            p_ss = 0
        alpha = config.alpha * min(1, progress / 0.2)
        tau = 1 + (config.tau - 1) * progress
        return p_ss, alpha, tau

    def scheduled_sampling(self, s_t, p_ss):
        """§3.4: with probability p_ss a teacher chooses the neighbors of a chunk: its K positives
        of highest s_t, or all if it has fewer (§3.2: R_pos has positives only), maybe none. Else
        the chunk retrieves them itself. In RETRO the teacher, which is BM25, always chooses (§5.1).
        s_t (B, N, N) -> Forced"""
        best = top(s_t.where(s_t > 0, -math.inf), self.config.n_neighbors)      # (B, N, K)
        mask = torch.ones_like(best[..., :1], dtype=torch.bool)                 # (B, N, 1)
        if self.retriever is not None:
            mask = torch.rand_like(s_t[..., :1]) < p_ss

        # ours: some sequences read nothing
        if self.config.p_off:
            off = torch.rand(len(s_t), device=s_t.device) < self.config.p_off
            off = off[:, None, None]                                            # (B, 1, 1)
            best = best.masked_fill(off, -1)
            mask = mask | off
        return Forced(best, mask)

    def forward(self, batch, progress):
        """batch: data.Batch, or the TaughtBatch of a training step; progress: step / max_steps
        -> L_LM (nats per token) + α L_ret (), what to log"""
        p_ss, alpha, tau = self.schedule(progress)
        if self.training:
            torch.manual_seed(batch.seed)                   # for scheduled sampling, dropout
        is_taught = self.training and isinstance(batch, TaughtBatch)
        forced = None
        if is_taught:
            forced = self.scheduled_sampling(batch.target_scores, p_ss)

        f, _, s_q = self.encode(batch.tokens, batch.doc, forced)
        lm_loss = cross_entropy(f, self.embedding.weight, batch.targets, self.kernel)
        if not is_taught or self.retriever is None:
            return lm_loss, {}

        # means over the chunks with a positive: `ranked` is how many a micro-batch has on average
        s_t = batch.target_scores                                       # (B, N, N)
        ret_loss = ranking_loss(s_q, s_t, tau).sum() / batch.ranked
        log = dict(lm_loss=lm_loss,
                   ret_loss=ret_loss,
                   ndcg=ndcg(s_q, s_t).sum() / batch.ranked,
                   ranked=(s_t > 0).any(2).sum())
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
                state = self.encode(piece, state=state).state
        return state

    def ways(self):
        """The ways in which a text can be read, values of `way`. on: as trained; shuffled: random
        chunks; off: nothing is retrieved"""
        if self.neighbor_encoder is None:
            return ('off',)
        return ('on', 'shuffled', 'off')

    def trace(self, tokens, t, state=None):
        """What is retrieved to predict token t + 1 of tokens (n,), with its gate -> [Traced], the
        largest gate first. state: of read(tokens[None, :t]), computed if None"""
        if state is None:
            state = self.read(tokens[None, :t])
        neighbors = self.read(tokens[None, t:t + 1], state).memory.neighbors

        # the last whole chunk has retrieved chunks j and j + 1
        m = self.config.chunk_size
        gates = neighbors.gates[0, -1].tolist()
        chosen = neighbors.chosen[0, -1].tolist()
        rows = []
        for gate, j in zip(gates, chosen):
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
        df[chunk] += 1                                                  # a repeated id: once
    return torch.from_numpy(idf_lucene(n, df))


def warn_if_too_short(config, corpus):
    """Prints a warning if no document is long enough to teach retrieval. The first chunk that can
    retrieve one comes after window_chunks others; its target is the chunk after it."""
    needed = config.window + 2 * config.chunk_size
    longest = np.diff(corpus.train.offsets).max()
    # with `hops` the batches are needles, and each row is a document
    if longest < needed and not corpus.hops:
        print(f'warning: nothing can be taught: retrieval is learned from documents of {needed} '
              f'or more tokens (--window + 2 --chunk-size); the longest has {longest}. Try longer '
              'documents or smaller --window and --chunk-size')


def reference_lm(config, run):
    """The reference LM, of --reference or trained first. SystemExit if it cannot score chunks"""
    window = 4 * config.chunk_size                      # the four chunks of s_t
    steps = min(config.reference_steps, run.config.max_steps)
    origin = config.reference or f'{steps} steps'
    print(f'first the reference LM, whose predictions show which chunks help: {origin}')

    # half as deep as RPT, without retrieval
    settings = {f.name: getattr(config, f.name) for f in fields(RPTConfig)}
    settings |= dict(n_layer=max(1, config.n_layer // 2), n_cca=0, retriever='none', reference='',
                     window=max(config.window, window), p_off=0.0)
    out = f'{Path(run.config.out)}-reference'
    train_config = replace(
        run.config, out=out, resume='auto', init='', gains=False, max_steps=steps)
    reference, tokenizer = run.load_reference(
        config.reference, RPT, RPTConfig(**settings), train_config)

    # a file of --reference can be of any run
    fits = isinstance(reference, RPT) and reference.config.window >= window
    if not fits or reference.neighbor_encoder or tokenizer.ids != run.corpus.tokenizer.ids:
        raise SystemExit(f'--reference {config.reference}: no RPT of retriever none with this '
                         f'tokenizer and window >= {window}; without --reference one is trained')
    return reference.eval().requires_grad_(False)


class Teacher:
    """s_t of the sequences of a run, each computed once and stored in a file. The name of their
    folder is a hash of all that they depend on: runs that differ in other settings share them."""
    def __init__(self, run, model, idf, reference=None):
        """reference: the LM that scores every n-th chunk; None: all scores are as in RPT-Lex"""
        self.run = run
        self.config = config = model.config
        self.idf = idf
        self.reference = reference

        # the folder. Needles are drawn by the seed, so their scores depend on it
        corpus = run.corpus
        seed = run.config.seed if corpus.hops else 0
        facts = [VERSION, corpus.fingerprint, corpus.hops, seed, run.bf16,
                 config.chunk_size, config.window_chunks, config.n_candidates,
                 config.score_every, config.reference_cache]
        digest = hashlib.sha256(repr(facts).encode())
        if reference is not None:
            for p in reference.parameters():
                digest.update(p.numpy())
            reference.to(model.embedding.weight.device)
        self.folder = corpus.folder / f'scores-{digest.hexdigest()[:16]}'
        self.folder.mkdir(exist_ok=True)

        # for each micro-batch, attach needs the scores of all micro-batches of its step
        tokens_per_pass = run.batches.B * run.batches.T
        self.per_step = run.config.tokens_per_step // tokens_per_pass   # micro-batches
        self.cached_scores_of = functools.lru_cache(self.per_step)(self.scores_of)

    def sequence_scores(self, chunks, doc):
        """s_t (N, N) of a sequence: by the reference LM for every n-th chunk, else as in RPT-Lex.
        chunks (N, m), doc (N,)"""
        config = self.config
        s_t = bm25_candidates(chunks, doc, config.window_chunks, config.n_candidates, self.idf)
        if self.reference is None:
            return s_t.float()
        candidates = s_t > 0
        candidates[torch.arange(len(doc)) % config.score_every > 0] = False
        by_reference = target_scores(
            self.reference, chunks, candidates, config.reference_cache, self.run.autocast)
        return by_reference.cpu().where(candidates, s_t).float()

    def stored_scores(self, path, chunks, doc):
        """The same from the file `path`, which is written if it is missing or broken"""
        try:
            s_t = np.load(path)
            if np.isfinite(s_t).all():
                return torch.from_numpy(s_t)
        except Exception:                       # a broken file can raise anything
            pass
        s_t = self.sequence_scores(chunks, doc)
        temporary = path.with_name(f'{path.stem}.{os.getpid()}.tmp.npy')
        np.save(temporary, s_t)
        temporary.replace(path)
        return s_t

    def scores_of(self, number):
        """s_t (B, N, N) of a micro-batch of the run, by its number"""
        batch = self.run.batches[number]
        m = self.config.chunk_size
        chunks = in_chunks(batch.tokens, m)                             # (B, N, m)
        doc = doc_of_chunks(batch.doc, m)                               # (B, N)
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
        first = number // self.per_step * self.per_step     # the first micro-batch of this step
        scores = [self.cached_scores_of(first + i) for i in range(self.per_step)]
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
        if config.last_scored_chunk < config.window_chunks:
            raise SystemExit(f'--score-every {config.score_every}: the reference LM would score no '
                             f'chunk of --block-size {config.block_size}; --score-every '
                             f'{config.window_chunks} works')
        reference = reference_lm(config, run)
    teacher = Teacher(run, model, idf, reference)
    teacher.compute_all()
    return teacher.attach


# --------------------------------------------------------------------------------------------------
# evaluation
def ranking_measures(s_q, s_t):
    """§5.1: how well the order by s_q finds the positives. Chunk j is a positive of chunk i if
    s_t > 0; its rank is 0, 1, ... Chunks that are not retrieved (RETRO's, with no term in common)
    follow in the order of the text.

    s_q, s_t (n, N, N) -> {name: (n, N), nan where chunk i has no positive}"""
    rank = rank_of(s_q)                                                 # (n, N, N)
    positive = s_t > 0
    n_positives = positive.sum(2)                                       # (n, N)
    measures = {'precision@2': (positive & (rank < 2)).sum(2) / 2,
                'recall@10': (positive & (rank < 10)).sum(2) / n_positives,
                'ndcg@20': ndcg(s_q, s_t)}
    return {name: x.masked_fill(n_positives == 0, math.nan) for name, x in measures.items()}


def target_losses(model, texts, chosen):
    """Nats per token of the targets of chunks 0 to N - 2 of texts (n, N m), whose chunks retrieve
    `chosen` (n, N, K), whatever their s_q is -> (n, N - 1)"""
    m = model.config.chunk_size
    nats = []
    for tokens, row in zip(texts.split(1), chosen.split(1)):
        all_chunks = torch.ones_like(row[..., :1], dtype=torch.bool)    # (1, N, 1)
        f = model.encode(tokens, forced=Forced(row, all_chunks)).f      # (1, N m, C)
        logits = model.logits(f[:, m - 1:-1])                           # (1, N m - m, V)
        nats.append(F.cross_entropy(logits.mT, tokens[:, m:], reduction='none'))
    return in_chunks(torch.cat(nats), m).mean(2)


def check_ranked_runs(rankers, reference):
    """SystemExit unless the last run can score what each of the others retrieves."""
    if not rankers:
        raise SystemExit('ranks: there is one run only. Name runs that retrieve chunks, then their '
                         'reference LM: eval.py out/rpt out/rpt-reference --task ranks')

    # the runs that rank
    for run in rankers:
        if not run.model.neighbor_encoder:
            raise SystemExit(f'ranks: {run.name} retrieves no chunks. All runs but the last, which '
                             'is the reference LM, must be RPTs with a retriever')
        if run.corpus.fingerprint != reference.corpus.fingerprint:
            raise SystemExit(f'ranks: {run.name} and the reference LM {reference.name} differ in '
                             'text or tokenizer. Use the reference LM that was trained for the run')
        m = run.model.config.chunk_size
        if m != rankers[0].model.config.chunk_size:
            raise SystemExit(f'ranks: {run.name} has chunks of {m} tokens, {rankers[0].name} has '
                             'others. Use runs of one --chunk-size')
        least = run.model.config.window + 2 * m
        if rankers[0].model.config.block_size < least:
            raise SystemExit(f'ranks: the --block-size of the first run, {rankers[0].name}, is too '
                             f'short for the window of {run.name}: use {least} or more')

    # the reference LM
    if reference.model.neighbor_encoder:
        raise SystemExit(f'ranks: the last run, {reference.name}, retrieves chunks. It must be the '
                         'reference LM, an RPT of --retriever none, as out/rpt-reference is')
    if reference.model.config.window < 4 * m:
        raise SystemExit(f'ranks: the window of the reference LM {reference.name} is shorter than '
                         'the 4 chunks that it scores. Train one with a larger --window')


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


def rankings_by(rankers, texts, bm25_scores, mask):
    """The scores by which chunks are ranked: random numbers, recency, BM25, s_q of each run.
    texts (n, N m), bm25_scores (n, N, N), mask (N, N): which chunks may be retrieved
    -> {name: scores (n, N, N), -inf where mask is False}"""
    N = len(mask)
    rankings = {'chance': torch.rand_like(bm25_scores),
                'latest first': torch.arange(N).expand_as(bm25_scores),
                'BM25': bm25_scores}
    for run in rankers:
        s_q = run.model.encode(texts).s_q
        rankings[run.name] = run.model.evaluation_scores(s_q)           # by which the run chooses
    return {name: s.to(bm25_scores).where(mask, -math.inf) for name, s in rankings.items()}


def best_of_first(k, candidates, s_t):
    """Figure 5: the highest s_t of the first k by BM25 of chunk and target. candidates (n, N, N):
    see bm25_candidates; s_t (n, N, N) -> (n, N), nan where chunk i has no candidate"""
    among_first = (rank_of(candidates) < k) & (candidates > 0)
    best = s_t.where(among_first, -math.inf).amax(2)
    return best.where(best > -math.inf, math.nan)


def rows_of_losses(model, texts, rankings, s_t, shared):
    """Table 2, Figures 4 and 6: yields for each ranking its name and a row of columns.

    texts (n, N m)        rankings {name: scores (n, N, N), -inf: may not be retrieved}
    s_t (n, N, N)         shared (n, N, N): how many different ids chunks i and j have in common"""
    n, N, _ = s_t.shape
    nothing = torch.full((n, N, 1), -1, device=s_t.device)
    off = target_losses(model, texts, nothing)                          # (n, N - 1)
    shared_with_target = shared.roll(-1, 1)                             # row i is that of i + 1
    for name, s in rankings.items():
        chosen = top(s, 4)                                              # (n, N, 4)
        row = {f'loss {K}': target_losses(model, texts, chosen[..., :K]) for K in (2, 3, 4)}

        # what the first two gain if one of them helps the reference LM, and if none does
        rank = rank_of(s)                                               # (n, N, N)
        positive = (rank < 2) & (s > -math.inf) & (s_t > 0)
        missed = ~positive.any(2)[:, :-1]                               # (n, N - 1)
        gain = off - row['loss 2']
        row['gain with positive'] = gain.masked_fill(missed, math.nan)
        row['gain without positive'] = gain.masked_fill(~missed, math.nan)

        # ids that the first one shares with chunk i, and with its target
        is_first = (rank == 0) & (s > -math.inf)
        row['shares'] = (shared * is_first).sum(2)
        row['with target'] = (shared_with_target * is_first).sum(2)
        yield name, row


@torch.no_grad()
def ranks(runs, args):
    """Compares rankings of the past chunks: by chance, recency, BM25 and s_q of each run. The last
    of the runs is the reference LM, whose s_t > 0 if a chunk helps. Prints for each ranking

    Table 3     whether the chunks that help are ranked first, see ranking_measures
    Table 2     the loss of each run when it reads the first K chunks of the ranking, which can be
                another run's (Table 4) or that by s_t (the oracle)
    Figure 6    what reading the first two gains, where one of them helps and where none does
    Figure 4    how many different ids the first one shares with the chunk and its target

    and, for Figure 5, the best s_t of the first k by BM25 of chunk and target.

    -> {name of a line: {column: mean}}"""
    *rankers, reference = runs
    config = runs[0].model.config
    check_ranked_runs(rankers, reference)
    m = config.chunk_size
    N = config.block_size // m

    # at most 16 sequences, evenly spread
    texts = torch.cat([in_chunks(x[None], N * m)[0] for x in runs[0].documents])
    if len(texts) == 0:
        raise SystemExit(f'ranks: no document has {N * m} tokens, the --block-size of '
                         f'{runs[0].name}. Use another --split or --data')
    texts = texts[::math.ceil(len(texts) / 16)]                         # (n, N m)
    chunks = in_chunks(texts, m)                                        # (n, N, m)

    # s_t of all chunks that each of the runs may retrieve
    window_chunks = max(run.model.config.window_chunks for run in rankers)
    doc = texts.new_zeros(N)                                            # of one document
    mask = permitted(doc, window_chunks)                                # (N, N)
    mask[-1] = False                                                    # it has no target
    lam = reference.model.config.reference_cache                        # λ
    s_t = torch.stack([target_scores(reference.model, x, mask, lam)     # (n, N, N)
                       for x in args.progress_bar(chunks, 'texts scored')])

    # Table 3
    idf = corpus_idf(runs[0].corpus, config).to(s_t)
    tf, keys = bm25_vectors(chunks, idf)
    torch.manual_seed(args.seed)
    rankings = rankings_by(rankers, texts, tf @ keys.mT, mask)
    report = Report(slice(window_chunks, N - 1))
    for name, s in rankings.items():
        report.add(name, ranking_measures(s, s_t))

    # Figure 5
    candidates = bm25_candidates(chunks, doc, window_chunks, N, idf)    # J = N: no rank is cut off
    report.add('best s_t', {f'of {k}': best_of_first(k, candidates, s_t) for k in (1, 2, 5, 20)})

    # Table 2, Figures 4 and 6
    rankings['oracle'] = s_t.where(mask, -math.inf)
    occurs = tf.clamp(max=1)
    shared = occurs @ occurs.mT                                         # (n, N, N)
    for run in rankers:
        rows = rows_of_losses(run.model, texts, rankings, s_t, shared)
        for name, row in args.progress_bar(rows, f'{run.name}: rankings read', len(rankings)):
            report.add(f'{run.name} reads {name}', row)
    return report.result


TASKS = {'ranks': ranks}


# --------------------------------------------------------------------------------------------------
# a demo
def demo():
    """The first 1,024 bytes of this file, from tokens to the loss; 20 steps of training; then what
    is retrieved.

    See the shapes, and how the loss falls. It is L_LM alone, because there is no reference LM here:
    W_Q and W_K are not trained, so the choice means nothing, and the gates are near σ(0) = 1/2.
    train.py --model rpt trains it; eval.py --task examples then shows what it retrieves"""
    torch.manual_seed(0)
    text = Path(__file__).read_bytes()[:1024]
    tokens = torch.tensor([list(text)])                                 # (1, 1024)
    config = RPTConfig(vocab_size=256)
    model = RPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    n_parameters = sum(p.numel() for p in model.parameters())

    # training
    for step in range(20):
        f, state, s_q = model.encode(tokens[:, :-1])
        loss = cross_entropy(f, model.embedding.weight, tokens[:, 1:])
        if step == 0:
            chunks = in_chunks(tokens[:, :-1], config.chunk_size)
            neighbors = state.memory.neighbors
            print(f"""RPTConfig()                {n_parameters:,} parameters
{f.size(1)} tokens in chunks      (B, N, m)         {tuple(chunks.shape)}
scores s_q of all pairs    (B, N, M)         {tuple(s_q.shape)}
neighbors, n = N + 4       (B, n, K, 2m, C)  {tuple(neighbors.states.shape)}
their gates                (B, n, K)         {tuple(neighbors.gates.shape)}
states that predict        (B, T, C)         {tuple(f.shape)}
loss at first              {loss:.3f}, ln 256 = {math.log(256):.3f}""")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f'loss in step 20            {loss:.3f}')

    # what is retrieved for the last byte
    t = 1023
    print(f'To predict what follows {text[t - 40:t]!r}, it reads, with untrained W_Q and W_K:')
    for row in model.eval().trace(tokens[0], t - 1):
        print(f'gate {row.weight:.3f}  {text[row.start:row.end]!r}')


if __name__ == '__main__':
    demo()
