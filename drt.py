"""
DRT, the Differentiable Retrieval-based Transformer: the language model's loss trains retrieval.

    Xiang Hu, Zhihao Teng, Jun Zhao, Wei Wu and Kewei Tu, "Efficient Length-Generalizable Attention
    via Causal Retrieval for Long-Context Language Modeling", ICML 2025, arXiv:2410.01651

A landmark token ends each chunk of a text. It scores all earlier chunks, and the best few are read.
The upper half of the layers attends to them from the positions of the next chunk: to each with its
own softmax, weighted by the softmaxed scores. So the loss reaches the scores, and a chunk that
helps is scored higher. There is no other supervision of the scores.

Where the paper is in this file
    §3.1           landmarks in the text                    DRT.insert
    §3.1           the chunk encoder, C_k and l_k           ChunkEncoder, DRT.encode_chunks
    Eq. 1          the scores r                             DRT.query, DRT.scores
    Eq. 1          the top K chunks                         DRT.choose
    Eq. 2          w_k, the softmax of the scores           DRT.choose
    Eq. 2          g(l), the group of a layer               DRT.upper_layers
    Eq. 2, Eq. 3   O = Σ_k w_k O_k, O_k by attention        GroupedCrossAttention, gca_kernel.py
    Eq. 2          H + O                                    Block
    §3.2           Gumbel top-k                             DRT.choose
    §3.2           MLM of the encoder                       DRT.forward
    §3.3           inference from a bounded state           DRT.stream, DRT.read
    §3.3           memory offloading                        DRT.store
    §4.1.2         a sliding window, ALiBi                  SelfAttention
    Table 1 to 3   Landmark Attention                       compared/landmark.py
    §4.4, Table 4  retrieval from a corpus                  prepare_eval
    App. A.5       random retrieval                         DRT.random_query

Letters in the shape comments
    B sequences    T tokens    L positions: tokens and landmarks    C width (the paper's d)
    H heads        D width of a head           V vocabulary         W window
    N chunks       S positions of a chunk: S - 1 tokens and a landmark (the paper's S are tokens)
    K chunks retrieved for one                 M chunks to retrieve from
    C_k            the states of chunk k, (S, C), as in the paper

Where we differ from the paper, and why
    By default, fields marked (ours) differ from the paper's, which --preset 124m has.
    As in the official code, cross-attention has a sink in place of the landmark's key, a norm and a
    projection; h, l_k and the encoder's input have norms. H + O of Eq. 2 is the residual (official
    code: only the MLP's input).
    Scores and top K are computed without autocast (official code: bf16).
    Streams keep chunks in 16 bits. Of a corpus, keys and values are stored, too (paper, §3.3: only
    landmarks; chunks are encoded again).
    Retrieval never crosses joined documents; self-attention does.
    With --next-chunk, the chunk after the last permitted one is the retrieving chunk itself.
    Weights start with std 0.02 for C = 768 (as in the official code), divided by sqrt(2 n_layer)
    where they add to the residual, except in GCA.

    $ python drt.py                         a demo of ten seconds, on a CPU
    $ python train.py --model drt
"""
import math, tempfile, zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gca_kernel import FLOPS, gca      # noqa: F401   FLOPS: for eval.py --task speed

MASKED = -1e30      # score of a chunk that may not be retrieved: finite, so no row gives nan


def check_positive(config, names):
    """Raises ValueError unless each of these fields is 1 or more."""
    for name in names.split():
        if getattr(config, name) < 1:
            raise ValueError(f'{name} must be 1 or more')


@dataclass
class DRTConfig:
    vocab_size: int = 4096      # ids of the tokenizer; for bpe, how many to learn (ours)
    block_size: int = 992       # tokens of a training sequence, landmarks not counted (paper: 16K)
    micro_batch: int = 2        # sequences of a micro-batch, B (official code: 4)
    n_layer: int = 5            # Transformer layers; the upper n_layer // 2 retrieve (paper: 12)
    n_head: int = 4             # attention heads, H (paper: 12)
    n_embd: int = 128           # width, C (paper: 768)
    n_inner: int = 0            # width inside the MLP; 0: 8/3 C, rounded up (paper: 2,048)
    window: int = 128           # positions that a query attends to, itself included, W (paper: 512)
    chunk_size: int = 32        # positions of a chunk, its landmark included, S (official: 64)
    slope: float = 4.0          # ALiBi's first slope, the last is 2^-8 (ours; official: 2^(-8/H))
    n_neighbors: int = 4        # chunks retrieved for each chunk, K (paper: 8)
    next_chunk: bool = True     # the chunk after each is read too, both with w_k / 2 (ours)
    groups: int = 1             # groups of upper layers, each retrieves; 0: base LM (paper: 1, 2)
    encoder: Literal['lower', 'tokens'] = 'lower'   # encodes lower layers' output, or embeddings
    n_encoder: int = 1          # layers of the chunk encoder; 0: none, w/o enc (official code: 2)
    compare_means: bool = True  # l_k: mean of C_k; the query compares means, see query (ours)
    shift_values: bool = True   # in cross-attention a token has the next one's value (ours)
    copy_start: bool = True     # at first W_Q = W_K and W_O = W_Vᵀ in cross-attention (ours)
    gumbel: bool = False        # Gumbel noise on the scores, in training (ours: no; §3.2: yes)
    mlm: float = 0.15           # --encoder tokens: share masked in first half (official code: 0.15)
    retriever: Literal['learned', 'random', 'none'] = 'learned'     # random: App. A.5
    p_off: float = 0.0          # share of the training sequences that retrieve nothing (ours)
    sink: bool = True           # a key and a value of zero in each chunk (official code: yes)

    def __post_init__(self):
        check_positive(self, 'vocab_size block_size micro_batch n_layer n_head n_embd window '
                             'n_neighbors')
        n_upper = self.n_layer // 2
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}')
        if self.chunk_size < 2 or self.slope < 2 ** -8 or max(self.mlm, self.p_off) > 1:
            raise ValueError('chunk_size must be 2 or more, slope 2^-8 or more, mlm and p_off at '
                             'most 1')
        if self.groups == 0:                                    # the base LM retrieves nothing
            return
        if n_upper == 0 or n_upper % self.groups:
            raise ValueError(f'n_layer // 2 = {n_upper} is not a multiple of groups {self.groups}')
        if self.block_size <= 2 * (self.chunk_size - 1):
            raise ValueError(f'block_size {self.block_size} must be above 2 (chunk_size - 1)')
        if self.encoder == 'tokens' and self.n_encoder == 0 and not self.compare_means:
            raise ValueError('encoder tokens: landmarks are equal without n_encoder, compare_means')


# 124m: App. A.1, but the learning rate ends at a tenth of its peak (paper: at a fifth). The paper's
# base LMs: --groups 0, with --window 512 or 768
PRESETS = {
    'tiny': dict(tokens_per_step=1984),     # the defaults: minutes on two CPU cores
    '124m': dict(data='pg19', tokenizer='gpt2', vocab_size=50_257, block_size=16_380, micro_batch=4,
                 n_layer=12, n_encoder=2, n_head=12, n_embd=768, window=512, chunk_size=64,
                 n_neighbors=8, next_chunk=False, slope=2 ** (-8 / 12), compare_means=False,
                 shift_values=False, copy_start=False, gumbel=True, tokens_per_step=524_160,
                 max_steps=60_000, optimizer='adamw', lr=2e-3, warmup=0.02, weight_decay=0.001,
                 eval_every=1000),
}


@dataclass
class EvalConfig:
    offload: str = ''           # drt: folder for keys and values, 4 n_embd bytes a position


def batches(config):
    """Arguments of data.Corpus.batches: sequences of one document"""
    return dict(kind='documents', chunk=config.chunk_size - 1)


def setup(model, run):
    """Prints a warning if no document has two chunks and a token, which reads one. run: see
    train.py"""
    needed = 2 * model.config.chunk_size - 1
    longest = np.diff(run.corpus.train.offsets).max()
    if longest < needed and 'on' in model.ways() and not run.corpus.hops:
        print(f'warning: nothing can be retrieved: the longest document has {longest} tokens, less '
              f'than {needed}. Try longer documents or a smaller --chunk-size')


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
    """SwiGLU (Shazeer 2020): one of two layers gates the other."""
    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 32 * math.ceil(8 / 3 * config.n_embd / 32)
        self.fc = Linear(config.n_embd, 2 * n_inner)
        self.proj = Linear(n_inner, config.n_embd)

    def forward(self, x):
        """x (B, t, C) -> (B, t, C)"""
        gate, y = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * y)


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
# what is new in DRT
class SelfAttention(nn.Module):
    """Causal attention over a sliding window, with ALiBi (Press et al. 2022) for positions."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.qkv = Linear(C, 3 * C)
        self.proj = Linear(C, C)

    def slopes(self, device):
        """ALiBi's slopes, a geometric series -> (1, H, 1, 1)"""
        exponents = torch.linspace(
            math.log2(self.config.slope), -8, self.config.n_head, device=device)
        return exponents.exp2().view(1, -1, 1, 1)

    def forward(self, x, past):
        """x (B, L, C), past: 2 x (B, s, H, D), keys and values of the positions before, None at the
        beginning of a text -> (B, L, C), keys and values of the last W positions"""
        W = self.config.window
        q, k, v = self.qkv(x).unflatten(2, (3, self.config.n_head, -1)).unbind(2)  # (B, L, H, D)
        if past is not None:
            past_k, past_v = past
            k = torch.cat([past_k, k], 1)                               # (B, s + L, H, D)
            v = torch.cat([past_v, v], 1)
        y = attend(q, k, v, W, W, self.slopes(x.device))                # (B, L, H, D)
        return self.proj(y.flatten(2)), (k[:, -W:], v[:, -W:])


class EncoderBlock(nn.Module):
    """A pre-norm Transformer layer with bidirectional attention and rotary positions."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.norm1 = RMSNorm(C)
        self.qkv = Linear(C, 3 * C)
        self.proj = Linear(C, C)
        self.norm2 = RMSNorm(C)
        self.mlp = MLP(config)

    def forward(self, x):
        """x (B N, S, C), chunks -> (B N, S, C)"""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.n_head, -1))
        q, k, v = qkv.unbind(2)                                         # 3 x (B N, S, H, D)
        y = softmax_attention(rotate(q), rotate(k), v)
        x = x + self.proj(y.flatten(2))
        return x + self.mlp(self.norm2(x))


class ChunkEncoder(nn.Module):
    """§3.1: C_k of a chunk, by attention within it; its keys and values for cross-attention"""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.norm_in = RMSNorm(C) if config.n_encoder else nn.Identity()
        self.blocks = nn.Sequential(*(EncoderBlock(config) for _ in range(config.n_encoder)))
        self.norm = RMSNorm(C)
        self.kv = Linear(C, 2 * C)                                      # W_K, W_V

    def forward(self, x):
        """x (B, N, S, C) -> C_k (B, N, S, C), its keys and values (2, B, N, S, H, D)"""
        y = self.blocks(self.norm_in(x).flatten(0, 1))                  # (B N, S, C)
        y = self.norm(y).view(x.shape)                                  # C_k
        k, v = self.kv(y).unflatten(-1, (2, self.config.n_head, -1)).unbind(3)
        if self.config.shift_values:
            v = v.roll(-1, 2)          # of the next token; the last token has the landmark's
        return y, torch.stack([k, v])


class Retrieved(NamedTuple):
    """What the L positions of a piece cross-attend to (Eq. 2): each of its n chunks, whole or in
    part, to what the landmark before it has retrieved"""
    kv: torch.Tensor            # (2, B, M, S, H, D) keys and values of chunks
    w: torch.Tensor             # (B, n, K) fp32, their weights
    idx: torch.Tensor           # (B, n, K) int32, their numbers among the M; -1: none
    start: int                  # positions of the first chunk before the piece
    mask: torch.Tensor | None   # (B, L), False: a position attends to nothing; None: all attend


class GroupedCrossAttention(nn.Module):
    """O = Σ_k w_k softmax(Q K_kᵀ / sqrt(D)) V_k (Eq. 2 and 3, gca_kernel.py), and a projection"""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.norm = RMSNorm(C)
        self.query = Linear(C, C)                                       # W_Q
        self.proj = Linear(C, C)                                        # W_O

    def forward(self, x, retrieved, kernel):
        """x (B, L, C), Retrieved, kernel of gca -> (B, L, C)"""
        kv, w, idx, start, mask = retrieved
        S = self.config.chunk_size
        L = x.size(1)
        q = self.query(self.norm(x)).unflatten(-1, (self.config.n_head, -1))    # (B, L, H, D)

        # gca takes whole chunks of queries: n for the rows of w, one for each whole chunk and one
        # for the unfinished one. Of a chunk it takes S - 1 keys, without the landmark's
        after = w.size(1) * S - start - L
        q = F.pad(q, (0, 0, 0, 0, start, after))                        # (B, n S, H, D)
        k, v = kv.type_as(q).flatten(2, 3)                              # 2 x (B, M S, H, D)
        o = gca(q, k, v, w, idx, S, n_keys=S - 1, sink=self.config.sink, kernel=kernel)
        o = o[:, start:start + L]
        if mask is not None:
            o = o.where(mask[..., None, None], 0)
        return self.proj(o.flatten(2))


class Block(nn.Module):
    """A pre-norm Transformer layer; those of the upper half have grouped cross-attention."""
    def __init__(self, config, retrieves=False):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd)
        self.attention = SelfAttention(config)
        self.norm2 = RMSNorm(config.n_embd)
        self.mlp = MLP(config)
        self.gca = GroupedCrossAttention(config) if retrieves else None

    def forward(self, x, past, retrieved=None, kernel='auto'):
        """x (B, L, C), past: see SelfAttention, Retrieved or None, kernel of gca -> (B, L, C), the
        past of the next piece"""
        y, past = self.attention(self.norm1(x), past)
        x = x + y
        if self.gca is not None and retrieved is not None:
            x = x + self.gca(x, retrieved, kernel)                      # H + O of Eq. 2
        return x + self.mlp(self.norm2(x)), past


# --------------------------------------------------------------------------------------------------
# the model
class Traced(NamedTuple):
    """A part of what was read to predict a token: ids[start:end] of a text"""
    weight: float
    ids: torch.Tensor       # (n,) the document, or another text
    start: int
    end: int


class State(NamedTuple):
    """What a stream keeps of a text (§3.3); only landmarks and kv grow, once a chunk. They are
    lists, because a list is extended without a copy of what it has."""
    past: list                  # of each layer, keys and values of the last W positions
    unfinished: torch.Tensor    # (B, s, C) the encoder's input, of the unfinished chunk
    landmarks: list             # of pieces of the text, l_k of their chunks, (B, n, C)
    kv: list                    # of each chunk, (B, 2, S, H, D) in 16 bits
    chosen: list                # of each group, w and idx (B, n, K); the last row is for the
                                # unfinished chunk


class Candidates(NamedTuple):
    """The M chunks that the N landmarks of a piece can retrieve from"""
    l_k: torch.Tensor           # (B, M, C)
    permitted: torch.Tensor     # (B, N, M) bool
    take: Callable              # idx (B, n, K) -> kv (2, B, m, S, H, D) of chunks, idx among the m
    start: int                  # see Retrieved
    mask: torch.Tensor | None   # see Retrieved


COMPILED = (Block, EncoderBlock)        # layers that train.py compiles


def init_weights(model, seed):
    """Normal initial weights, for width C. The seed of a matrix depends on its name, so what
    different models share begins equal."""
    config = model.config
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.manual_seed(seed + zlib.crc32(name.encode()))
            std = 0.02 * math.sqrt(768 / config.n_embd)
            if name.endswith('proj.weight') and 'gca' not in name:      # it adds to the residual
                std /= math.sqrt(2 * config.n_layer)
            nn.init.normal_(p, std=std)

    # h begins at 0, so at first similar chunks retrieve each other, see DRT.query
    if config.compare_means:
        for norm in model.landmark_norms:
            nn.init.zeros_(norm.weight)

    # GCA begins by copying what followed a similar token
    if config.groups and config.copy_start:
        k, v = model.encoder.kv.weight.data.chunk(2)
        for block in model.upper:
            block.gca.query.weight.data.copy_(k)                        # W_Q = W_K
            block.gca.proj.weight.data.copy_(v.T)                       # W_O = W_Vᵀ


class DRT(nn.Module):
    """A sliding-window language model whose upper layers attend to chunks that it retrieves. By
    default it has the fields marked (ours); --preset 124m has the paper's."""
    PIECE = 2048                # positions of a long text that are processed at once

    def __init__(self, config):
        super().__init__()
        seed = torch.randint(2 ** 48, (), device='cpu').item()          # of the weights
        C = config.n_embd
        self.config = config
        self.way = 'on'                                                 # see ways
        self.kernel = 'auto'                                            # see gca, cross_entropy

        # ids after those of the tokenizer: the landmark; for MLM the mask
        n_ids = config.vocab_size
        if self.has_landmarks:
            n_ids += 2 if config.encoder == 'tokens' else 1
        self.embedding = nn.Embedding(n_ids, C)                         # also the output embedding
        self.lower, self.upper = self.make_layers(config)

        # retrieval
        self.landmark_norms = nn.ModuleList(RMSNorm(C) for _ in range(config.groups))
        self.encoder = ChunkEncoder(config) if config.groups else None
        self.norm = RMSNorm(C)                                          # of the output
        init_weights(self, seed)

        # for evaluation; prepare_eval sets them
        self.corpus = None      # to retrieve from: its tokens (n,), landmarks and kv as in State
        self.offload = ''       # folder for kv

    @property
    def has_landmarks(self):
        """The base LM has none."""
        return self.config.groups > 0

    def make_layers(self, config):
        """The lower and the upper half of the layers; the upper ones retrieve."""
        n_upper = config.n_layer // 2
        n_lower = config.n_layer - n_upper
        lower = nn.ModuleList(Block(config) for _ in range(n_lower))
        upper = nn.ModuleList(Block(config, config.groups > 0) for _ in range(n_upper))
        return lower, upper

    def insert(self, x, value, state=None):
        """§3.1: inserts `value` after every S - 1 tokens, at positions S - 1, 2S - 1, ... of a
        text; None: repeats the number before. x (B, T) continues the text of state -> (B, L)"""
        if not self.has_landmarks:
            return x
        S = self.config.chunk_size
        s = state.unfinished.size(1) if state else 0                    # positions before x
        end = s + x.size(1)
        position = torch.arange(s, end + end // (S - 1), device=x.device)

        # up to position p, itself included, there are (p + 1) // S landmarks
        x = x[:, position - (position + 1) // S - s]                    # (B, L)
        if value is None:
            return x
        return x.where(position % S < S - 1, value)

    # lower layers, retrieval, upper layers
    def lower_layers(self, ids, past):
        """ids (B, L), past of these layers -> states x (B, L, C), the past of the next piece"""
        x = self.embedding(ids)
        new_past = []
        for block, block_past in zip(self.lower, past, strict=True):
            x, block_past = block(x, block_past)
            new_past.append(block_past)
        return x, new_past

    def encoder_input(self, x, ids):
        """What the chunk encoder gets of a piece: x (B, L, C) of the lower layers, or embeddings of
        ids (B, L) -> (B, L, C)"""
        if self.config.encoder == 'lower':
            return x
        return self.embedding(ids)

    def encode_chunks(self, x):
        """§3.1, of N whole chunks: x (B, N S, C) of encoder_input -> C_k (B, N, S, C), l_k
        (B, N, C), keys and values (2, B, N, S, H, D)"""
        chunks, kv = self.encoder(x.unflatten(1, (-1, self.config.chunk_size)))
        l_k = chunks[:, :, -1]                                          # of the landmarks
        if self.config.compare_means:
            l_k = chunks.mean(2)
        return chunks, l_k, kv

    def query(self, g, x, l_k, permitted):
        """h of Eq. 1, for group g of the upper layers: a norm of x at the landmark.

        compare_means (ours): l_k is the mean of chunk k's states C_k, not its landmark's state, and
        the query of chunk t is

            h_t = norm_g(x_t) + RMSNorm(l_t - mean of l_k over the chunks that t may retrieve)

        x (B, N, C), at the last N of M landmarks, l_k (B, M, C), permitted (B, N, M)
        -> (B, N, C)"""
        h = self.landmark_norms[g](fp32(x))
        if not self.config.compare_means:
            return h
        N, M = permitted.shape[1:]
        n_permitted = permitted.sum(2, keepdim=True).clamp(min=1)
        mean = product(permitted.type_as(l_k), l_k) / n_permitted       # (B, N, C)
        return h + F.rms_norm(l_k[:, M - N:] - mean, mean.shape[2:], eps=1e-6)

    def random_query(self, g, x, M):
        """App. A.5: random numbers in place of h, for x (B, N, C) at the last N of M landmarks: row
        k is the query of landmark k, in every text -> (N, C)"""
        _, N, C = x.shape
        generator = torch.Generator().manual_seed(g)
        table = torch.rand(M, C, generator=generator)[M - N:]

        # uniform, with mean 0 and standard deviation 1: that of numbers from 0 to 1 is 1 / sqrt(12)
        return (table * 12 ** 0.5 - 3 ** 0.5).to(fp32(x))

    def scores(self, h, l_k):
        """Eq. 1: r_k = h · l_k / sqrt(C). h (B, N, C) or (N, C), l_k (B, M, C) -> (B, N, M)"""
        return product(h, l_k.mT) / h.size(-1) ** 0.5

    def choose(self, r, permitted):
        """Eq. 1 and 2: the K permitted chunks of largest r (§3.2: + noise), weighted by the softmax
        of r. r, permitted (B, N, M) -> w (B, N, K) fp32, idx (B, N, K) int32; 0 and -1 where there
        are fewer"""
        K = self.config.n_neighbors
        r = F.pad(r.masked_fill(~permitted, MASKED), (0, K), value=MASKED)      # K or more columns
        order = r
        if not self.training:
            # the scores of a chunk that recurs differ by errors of rounding, which depend on the
            # pieces in which a text is read. Rounded to 1 / 256 they are ties: the first is chosen
            order = (256 * r).round()
        elif self.config.gumbel:                                        # noise: -log Exp(1)
            order = r - torch.empty_like(r).exponential_().log()

        # not by topk, whose ties depend on M
        idx = order.argsort(descending=True, stable=True)[..., :K]      # (B, N, K)
        w = r.gather(2, idx)
        valid = w > MASKED
        return w.softmax(2) * valid, idx.masked_fill(~valid, -1).int()

    def retrieve(self, g, x, candidates):
        """What the landmarks retrieve for group g: query, scores, choice. x (B, N, C) at the N
        landmarks of a piece -> w, idx (B, N, K)"""
        l_k, permitted = candidates.l_k, candidates.permitted
        if self.way == 'shuffled' or self.config.retriever == 'random':
            h = self.random_query(g, x, l_k.size(1))
        else:
            h = self.query(g, x, l_k, permitted)
        r = self.scores(h, l_k)                                         # (B, N, M)
        return self.choose(r, permitted)

    def for_positions(self, w, idx, candidates):
        """What is retrieved by landmarks is read at the positions after each: w, idx (B, n, K) of
        the n chunks of a piece -> Retrieved"""
        if self.config.next_chunk:                                      # (B, n, 2 K); -1 remains -1
            w = w.repeat_interleave(2, 2) / 2
            idx = torch.stack([idx, idx + (idx >= 0)], 3).flatten(2)
        kv, idx = candidates.take(idx)
        return Retrieved(kv, w, idx, candidates.start, candidates.mask)

    def upper_layers(self, x, past, chosen, candidates):
        """x (B, L, C); past of these layers; chosen: see State; candidates: Candidates, or None if
        nothing is retrieved -> (B, L, C), the past of the next piece, the new chosen"""
        new_past = []
        new_chosen = []
        retrieved = None
        for layer, (block, block_past) in enumerate(zip(self.upper, past, strict=True)):
            # where a group of layers begins, its landmarks retrieve
            if candidates is not None and layer % (len(self.upper) // self.config.groups) == 0:
                g = len(new_chosen)                                     # g(l) of Eq. 2
                S = self.config.chunk_size
                at_landmarks = x[:, S - 1 - candidates.start::S]        # (B, N, C)
                w, idx = self.retrieve(g, at_landmarks, candidates)

                # the first chunk of these positions reads what the landmark before it retrieved
                last_w, last_idx = chosen[g]
                w = torch.cat([last_w[:, -1:], w], 1)                   # (B, N + 1, K)
                idx = torch.cat([last_idx[:, -1:], idx], 1)
                new_chosen.append((w, idx))
                retrieved = self.for_positions(w, idx, candidates)
            x, block_past = block(x, block_past, retrieved, self.kernel)
            new_past.append(block_past)
        return x, new_past, new_chosen or chosen

    @property
    def retrieves(self):
        """Whether it retrieves now"""
        return self.encoder is not None and self.way != 'off' and self.config.retriever != 'none'

    def nothing_chosen(self, B):
        """w and idx of each group, for the chunk at the beginning of B texts: no chunks"""
        w = self.embedding.weight.new_zeros(B, 1, self.config.n_neighbors)
        return [(w, w.int() - 1)] * self.config.groups

    # training
    def training_candidates(self, l_k, kv, docs):
        """Of sequences from their beginning: landmarks retrieve chunks before their own, of their
        document. l_k (B, N, C), kv (2, B, N, S, H, D), docs (B, L) of positions -> Candidates"""
        S = self.config.chunk_size
        N = l_k.size(1)
        earlier = torch.ones(N, N, dtype=torch.bool, device=docs.device).tril(-1)

        # documents are contiguous: if chunk k begins in the document in which landmark n > k is,
        # all of chunk k is in it
        first = docs[:, None, :N * S:S]                                 # (B, 1, N) of chunks
        last = docs[:, S - 1::S, None]                                  # (B, N, 1)
        permitted = earlier & (first == last) & (first >= 0)            # not of padding
        if self.training and self.config.p_off:
            off = torch.rand(len(docs), 1, 1, device=docs.device) < self.config.p_off
            permitted = permitted & ~off

        # a landmark retrieves for positions of its document; chunk 0 reads nothing
        position = torch.arange(docs.size(1), device=docs.device)
        mask = docs == docs[:, position // S * S - 1]                   # (B, L)
        return Candidates(l_k, permitted, lambda idx: (kv, idx), 0, mask)

    def encode_batch(self, ids, docs, encoder_ids):
        """Whole sequences from their beginning, with gradients. ids, docs (B, L) of tokens and
        landmarks; encoder_ids (B, L): ids that the encoder sees, some of which can be masked
        -> f (B, L, C), C_k (B, N, S, C) or None, chosen of each group"""
        B, L = ids.shape
        x, _ = self.lower_layers(ids, [None] * len(self.lower))
        chunks = candidates = None
        if self.encoder is not None:
            end = L // self.config.chunk_size * self.config.chunk_size
            chunks, l_k, kv = self.encode_chunks(self.encoder_input(x, encoder_ids)[:, :end])
        if self.retrieves:
            candidates = self.training_candidates(l_k, kv, docs)
        x, _, chosen = self.upper_layers(
            x, [None] * len(self.upper), self.nothing_chosen(B), candidates)
        return self.norm(x), chunks, chosen

    def forward(self, batch, progress):
        """batch: data.Batch; progress: step / max_steps; in eval mode without Gumbel noise and MLM
        -> the loss () in nats per token, what to log"""
        config = self.config
        V = config.vocab_size
        if self.training:
            torch.manual_seed(batch.seed)                               # for Gumbel noise and MLM

        # landmarks are inserted after the shift of targets: they predict nothing
        ids = self.insert(batch.tokens, V)                              # (B, L)
        targets = self.insert(batch.targets, -1)
        docs = self.insert(batch.doc, None)                             # a landmark's: of its chunk

        # §3.2: in the first half of training MLM hides tokens from the encoder, no landmarks
        with_mlm = self.encoder is not None and config.encoder == 'tokens'
        with_mlm = with_mlm and self.training and progress < 0.5
        masked = torch.zeros_like(ids, dtype=torch.bool)
        if with_mlm:
            masked = torch.rand(ids.shape, device=ids.device) < config.mlm
            masked &= (ids < V) & (docs >= 0)

        # the loss
        E = self.embedding.weight[:V]
        f, chunks, chosen = self.encode_batch(ids, docs, ids.masked_fill(masked, V + 1))
        loss = cross_entropy(f, E, targets, self.kernel)
        log = {}
        if config.groups > 0:
            w, _ = chosen[-1]
            largest = w[:, :-1].amax(2)                                 # (B, N)
            log['top_weight'] = largest.sum() / (largest > 0).sum().clamp(min=1)
        if not with_mlm:
            return loss, log

        # the encoder predicts the masked tokens
        encoded = chunks.flatten(1, 2)                                  # (B, N S, C)
        hidden = ids.masked_fill(~masked, -1)[:, :encoded.size(1)]
        mlm_loss = cross_entropy(encoded, E, hidden, self.kernel)
        log.update(lm_loss=loss, mlm_loss=mlm_loss)
        return loss + mlm_loss, log

    # inference
    def empty_state(self, B):
        """The state before B texts. A corpus to retrieve from comes first: its chunks."""
        nothing = self.embedding.weight.new_zeros(B, 0, self.config.n_embd)
        landmarks, kv = [nothing], []
        if self.reads_corpus:
            _, landmarks, kv = self.corpus
            landmarks = [x.expand(B, -1, -1) for x in landmarks]
            kv = [x.expand(B, -1, -1, -1, -1) for x in kv]
        return State([None] * self.config.n_layer, nothing, landmarks, kv, self.nothing_chosen(B))

    @property
    def reads_corpus(self):
        return self.way in ('corpus', 'both')

    def store(self, kv):
        """kv (2, B, N, S, H, D) -> a list of N chunks (B, 2, S, H, D), 16 bits, with --offload in a
        mapped file"""
        if kv.dtype == torch.float32:                                   # fp64 is for the tests
            kv = kv.half()
        if self.offload:
            # the file is unlinked at once: the system frees it together with the tensor
            with tempfile.NamedTemporaryFile(dir=self.offload) as file:
                kv.cpu().numpy().tofile(file)
                kv = torch.from_file(file.name, True, kv.numel(),
                                     dtype=kv.dtype).view_as(kv)
        return list(kv.transpose(0, 1).unbind(2))

    def encode_lower(self, ids, state):
        """ids (B, L), which continue the text of state, through the lower layers and the chunk
        encoder -> x (B, L, C), a state whose upper past and chosen are still the former ones"""
        S = self.config.chunk_size
        n_lower = len(self.lower)
        x, lower_past = self.lower_layers(ids, state.past[:n_lower])
        past = lower_past + state.past[n_lower:]

        # the chunks that end here
        unfinished = torch.cat([state.unfinished, self.encoder_input(x, ids)], 1)
        N = unfinished.size(1) // S
        whole, unfinished = unfinished.tensor_split([N * S], 1)
        landmarks, kv = state.landmarks, state.kv
        if N > 0 and self.encoder is not None:
            _, l_k, new_kv = self.encode_chunks(whole)
            landmarks = [*landmarks, l_k]
            kv = kv + self.store(new_kv)
        return x, State(past, unfinished, landmarks, kv, state.chosen)

    def stream_candidates(self, l_k, kv, N, start):
        """Of a stream: the last N of M landmarks retrieve chunks before their own. With a corpus,
        its chunks come first. l_k (B, M, C), kv: see State -> Candidates"""
        B, M, _ = l_k.shape
        permitted = torch.ones(N, M, dtype=torch.bool, device=l_k.device).tril(M - N - 1)
        if self.reads_corpus:
            n_corpus = len(self.corpus[2])
            if self.config.next_chunk:
                permitted[:, n_corpus - 1] = False                      # no chunk comes after it
            if self.way == 'corpus':
                permitted[:, n_corpus:] = False

        def take(idx):
            # each chunk that is retrieved is copied once; for -1 the last one, which is not read
            numbers, copies = idx.unique(return_inverse=True)
            copied = torch.stack([kv[k] for k in numbers.tolist()], 2)  # (B, 2, m, S, H, D)
            return copied.transpose(0, 1).to(idx.device), copies.masked_fill(idx < 0, -1)

        return Candidates(l_k, permitted.expand(B, N, M), take, start, None)

    def encode_upper(self, x, start, state):
        """x and the state of encode_lower, through the upper layers; start: positions of the first
        chunk before x -> f (B, L, C), the new state"""
        n_lower = len(self.lower)
        l_k = torch.cat(state.landmarks, 1)                             # (B, M, C)
        candidates = None
        if self.retrieves and l_k.size(1) > 0:
            N = (start + x.size(1)) // self.config.chunk_size           # landmarks in x
            candidates = self.stream_candidates(l_k, state.kv, N, start)
        x, upper_past, chosen = self.upper_layers(
            x, state.past[n_lower:], state.chosen, candidates)
        past = state.past[:n_lower] + upper_past
        return self.norm(x), State(past, state.unfinished, [l_k], state.kv, chosen)

    @torch.no_grad()
    def encode(self, ids, state=None):
        """ids (B, L), of tokens and landmarks, continue the text of state or begin one (None)
        -> f (B, L, C), which predicts the next tokens, the new state"""
        if state is None:
            state = self.empty_state(len(ids))
        start = state.unfinished.size(1)
        x, state = self.encode_lower(ids, state)
        return self.encode_upper(x, start, state)

    def log_probs(self, tokens):
        """log P (B, t, V) fp32 of the token after each of tokens (B, t), each row a document"""
        return self.stream(tokens)[0]

    def logits(self, f):
        """f (..., C) -> (..., V) fp32; ids beyond the text's have none"""
        return product(f, self.embedding.weight[:self.config.vocab_size].T)

    @torch.no_grad()
    def states(self, tokens, state=None):
        """f (B, t, C), whose `logits` predict the token after each of tokens (B, t), which continue
        the text of `state`; the new state"""
        V = self.config.vocab_size
        ids = self.insert(tokens, V, state)
        f, state = self.encode(ids, state)
        return f[:, ids[0] < V], state                                      # not of landmarks

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """Predicts the token after each of tokens (B, t), t >= 1, which continue the text of
        `state` -> log P (B, t, V), the new state"""
        f, state = self.states(tokens, state)
        return self.logits(f).log_softmax(-1), state

    @torch.no_grad()
    def read(self, tokens, state=None):
        """The new state of stream(tokens, state), without predictions; any t >= 0. Upper layers run
        only at the end, on what later positions need: W positions for each layer, and S for each
        group, because a landmark retrieves for the chunk after it."""
        config = self.config
        if state is None:
            state = self.empty_state(len(tokens))
        ids = self.insert(tokens, config.vocab_size, state)

        # Where the upper layers start again, `past` and `chosen` are of an earlier part of the
        # text. What is wrong with them spreads by W per layer and by S per group, and the final
        # state also has the last landmark's choice, at most S back. So `reach` positions are enough
        # to be exact: W = 128, S = 32, two upper layers in one group: 2 x 128 + 2 x 32 = 320
        reach = len(self.upper) * config.window + (1 + config.groups) * config.chunk_size
        n_after = ids.size(1)                                           # positions after a piece
        for piece in ids.split(self.PIECE, dim=1):
            n_after -= piece.size(1)
            start = state.unfinished.size(1)
            x, state = self.encode_lower(piece, state)
            if n_after < reach:
                _, state = self.encode_upper(x, start, state)
        return state

    def ways(self):
        """The names of the ways in which a text can be read: values of `way`, see eval.py"""
        if self.config.groups == 0 or self.config.retriever == 'none':
            return ('off',)
        if self.corpus is None:
            return ('on', 'shuffled', 'off')
        return ('on', 'corpus', 'both', 'shuffled', 'off')              # Table 4

    def trace(self, tokens, t, state=None, group=None):
        """The chunks that are read to predict token t + 1 of tokens (n,), by all groups or one,
        with w_k; with next_chunk two at once -> [Traced], the largest weight first. state: of
        read(tokens[None, :t]), computed if None"""
        if state is None:
            state = self.read(tokens[None, :t])
        n_tokens = self.config.chunk_size - 1                           # of a chunk
        n_read = 2 * n_tokens if self.config.next_chunk else n_tokens
        n_corpus = len(self.corpus[2]) if self.reads_corpus else 0
        rows = []
        for g, (w, idx) in enumerate(state.chosen):
            if group not in (None, g):
                continue
            for weight, k in zip(w[0, -1].tolist(), idx[0, -1].tolist()):
                if k < 0:
                    continue
                ids, start = tokens, (k - n_corpus) * n_tokens
                if k < n_corpus:
                    ids, start = self.corpus[0], k * n_tokens
                rows.append(Traced(weight, ids, start, start + n_read))
        return sorted(rows, key=lambda row: -row.weight)


# --------------------------------------------------------------------------------------------------
# evaluation
@torch.no_grad()
def prepare_eval(model, corpus, external, args, path):
    """Table 4: with --retrieve-from, reads external.train as a text before each other one. Raises
    SystemExit if a text would retrieve from itself, or if there is no chunk."""
    model.offload = args.offload
    if not args.retrieve_from or 'on' not in model.ways():
        return
    if args.split == 'train' and external.fingerprint == corpus.fingerprint:
        raise SystemExit('--split train with --retrieve-from: each text would find itself')
    tokens = torch.as_tensor(external.train.tokens.astype('int64'),
                             device=model.embedding.weight.device)
    if len(tokens) < 2 * (model.config.chunk_size - 1):
        raise SystemExit('--retrieve-from: its text is shorter than two chunks')
    state = model.empty_state(1)
    for piece in args.progress_bar(tokens.split(16 * model.PIECE), 'reading the corpus'):
        state = model.read(piece[None], state)
    model.corpus = tokens, state.landmarks, state.kv


# --------------------------------------------------------------------------------------------------
# a demo
def demo():
    """The first 992 bytes of this file, from tokens to the loss; 20 steps of training; then what is
    retrieved"""
    torch.manual_seed(0)
    text = Path(__file__).read_bytes()[:993]
    tokens = torch.tensor([list(text)])                                     # (1, 993)
    model = DRT(DRTConfig(vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    n_parameters = sum(p.numel() for p in model.parameters())

    # position 31, 63, ... is a landmark
    ids = model.insert(tokens[:, :-1], 256)                                 # (1, L)
    targets = model.insert(tokens[:, 1:], -1)
    docs = torch.zeros_like(ids)
    for step in range(20):
        f, chunks, chosen = model.encode_batch(ids, docs, ids)
        loss = cross_entropy(f, model.embedding.weight[:256], targets)
        if step == 0:
            print(f"""DRTConfig()                {n_parameters:,} parameters
992 tokens and landmarks   (B, L)        {tuple(ids.shape)}
chunks, encoded            (B, N, S, C)  {tuple(chunks.shape)}
weights of the retrieved   (B, N + 1, K) {tuple(chosen[-1][0].shape)}
states that predict        (B, L, C)     {tuple(f.shape)}
loss at first              {loss:.3f}, ln 256 = {math.log(256):.3f}""")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f'loss after 20 steps        {loss:.3f}')
    print(f'To predict what follows {text[952:992]!r}, it reads:')
    for row in model.eval().trace(tokens[0], 991):
        print(f'weight {row.weight:.3f}  {text[row.start:row.end]!r}')


if __name__ == '__main__':
    demo()
