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
    §3.1           the chunk encoder, C_k and l_k           ChunkEncoder, DRT.add_chunks
    Eq. 1          scores r, the top K chunks               DRT.retrieve
    Eq. 2          w_k, the softmax of the scores           DRT.retrieve
    Eq. 2          g(l), the group of a layer               DRT.encode
    Eq. 2, Eq. 3   O = Σ_k w_k O_k, O_k by attention        GroupedCrossAttention, gca_kernel.py
    Eq. 2          H + O                                    Block
    §3.2           Gumbel top-k                             DRT.retrieve
    §3.2           MLM of the encoder                       DRT.forward
    §3.3           inference from a bounded state           DRT.stream, DRT.read
    §3.3           memory offloading                        DRT.store
    §4.1.2         a sliding window, ALiBi                  SelfAttention
    Table 1 to 3   Landmark Attention, compared             LandmarkAttention
    §4.4, Table 4  retrieval from a corpus                  DRT.prepare_eval
    App. A.5       random retrieval                         DRT.retrieve

Letters used in the shape comments
    B sequences    T tokens    L positions: tokens and landmarks    C width    V vocabulary
    N chunks       S positions of a chunk, its landmark included    H heads    D width of a head
    K chunks retrieved for one    M chunks to retrieve from         W window   P positions before

Where this differs from the paper, and why
    Fields marked (ours); the preset 124m has the paper's. As in the official code, a chunk is S - 1
    tokens and a landmark; cross-attention has a sink in place of the landmark's key, a norm and a
    projection; h, l_k and the encoder's input have norms. H + O of Eq. 2 is the residual (official
    code: only the MLP's input). Scores and top K: no autocast (official code: bf16). Streams keep
    chunks in 16 bits. Retrieval never crosses joined documents; self-attention does. Of a corpus
    too, keys and values are stored (paper, §3.3: only landmarks; chunks are encoded again). With
    --next-chunk the chunk after the last one that can be retrieved is the retrieving chunk itself.
    Weights start with std 0.02 for C = 768 (as in the official code), over sqrt(2 n_layer) where
    they add to the residual, except in GCA.

    $ python drt.py                         a demo on a CPU
    $ python train.py --model drt
"""
import inspect, math, tempfile, zlib
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gca_kernel import gca

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
    landmark: bool = False      # with groups 0: Landmark Attention; scores of (B, H, L, L)
    encoder: Literal['lower', 'tokens'] = 'lower'   # encodes lower layers' output, or embeddings
    n_encoder: int = 1          # layers of the chunk encoder; 0: none, w/o enc (official code: 2)
    compare_means: bool = True  # l_k: mean of C_k; the query compares means, see retrieve (ours)
    shift_values: bool = True   # value: the next token's; at first W_Q = W_K, W_O = W_Vᵀ (ours)
    gumbel: bool = False        # Gumbel noise on the scores, in training (ours: no; §3.2: yes)
    mlm: float = 0.15           # --encoder tokens: share masked in first half (official code: 0.15)
    retriever: Literal['learned', 'random', 'off'] = 'learned'  # random: App. A.5; off: no chunks
    sink: bool = True           # a key and a value of zero in each chunk (official code: yes)

    def __post_init__(self):
        check_positive(self, 'vocab_size block_size micro_batch n_layer n_head n_embd window '
                             'n_neighbors')
        n_upper = self.n_layer // 2
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}')
        if self.chunk_size < 2 or self.slope < 2 ** -8 or self.mlm > 1:
            raise ValueError('chunk_size must be 2 or more, slope 2^-8 or more, mlm at most 1')
        if self.landmark:
            if self.groups:
                raise ValueError('landmark is for groups 0')
            self.window = 1_000_000_000                         # all positions are kept
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
                 shift_values=False, gumbel=True, tokens_per_step=524_160, max_steps=60_000,
                 optimizer='adamw', lr=2e-3, warmup=0.02, weight_decay=0.001, eval_every=1000),
}


@dataclass
class EvalConfig:
    offload: str = ''           # drt: folder for keys and values, 4 n_embd bytes a position


def batches(config):
    return dict(kind='documents', chunk=config.chunk_size - 1)  # of data.Corpus.batches


def setup(model, corpus, *args):
    """Warns if no document has two chunks and a token, which reads one."""
    needed = 2 * model.config.chunk_size - 1
    longest = np.diff(corpus.train.offsets).max()
    if longest < needed and 'on' in model.ways() and not corpus.hops:
        print(f'warning: nothing can be retrieved: the longest document has {longest} tokens, less '
              f'than {needed}. Try longer documents or a smaller --chunk-size')


# --------------------------------------------------------------------------------------------------
# the transformer
# (what several model files define is identical in them, except SelfAttention, MLP and Block)
def RMSNorm(n_embd):
    """x / rms(x) * weight, over the last axis (Zhang & Sennrich 2019)."""
    return nn.RMSNorm(n_embd, eps=1e-6)


def Linear(n, m):
    """W x, from n numbers to m. No biases here; where there are some, it is nn.Linear."""
    return nn.Linear(n, m, bias=False)


def fp32(x):
    """bf16 and fp16 become fp32; fp64 remains, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(a, b):
    """a b with fp32 sums, under autocast too: bf16 has steps of 0.125 near 20. The factors of the
    sums may be rounded in bf16 runs, see train.precision.

    a (..., n, C)   b (..., C, m) -> (..., n, m)"""
    with torch.autocast(a.device.type, enabled=False):
        return fp32(a) @ fp32(b)


def output_product(a, b):
    """a b with fp32 sums, for logits and their gradients, the largest products of a step. On a GPU,
    in bf16 runs (train.precision), the factors are rounded to bf16, as TF32 takes twice the time:
    gradients then have relative errors of 0.5%, not of 0.03% (results.md).

    a (n, C)   b (C, m) -> (n, m)"""
    if not a.is_cuda or torch.get_float32_matmul_precision() == 'highest':
        return product(a, b)
    a = a.bfloat16()
    b = b.bfloat16()
    if torch.__version__ < (2, 8) or torch.version.hip:
        return (a @ b).float()                                          # logits are rounded, too
    return torch.mm(a, b, out_dtype=torch.float32)


def aligned(E):
    """E (V, C) with rows of zeros, to a multiple of 64: a GPU multiplies them faster."""
    return F.pad(E, (0, 0, 0, -len(E) % 64))


def rotate(x, first=0):
    """Rotary embeddings (Su et al. 2021): at position p = first, first + 1, ... each pair
    (x_2d, x_2d+1) of a head is rotated by the angle p θ_d, θ_d = 10000^(-2d/D).

    x (..., T, H, D) -> (..., T, H, D)"""
    D = x.size(-1)
    theta = 10000 ** (-torch.arange(0, D, 2, device=x.device) / D)      # (D/2,)
    positions = torch.arange(first, first + x.size(-3), device=x.device)
    angle = positions[:, None, None] * theta                            # (T, 1, D/2)

    # a pair is a complex number, its rotation a product with cos + i sin; by real numbers the same
    # takes several times as long, but complex ones cannot be compiled
    pairs = fp32(x).unflatten(-1, (-1, 2)).contiguous()                 # (..., T, H, D/2, 2)
    cos = angle.cos()
    sin = angle.sin()
    if torch.compiler.is_compiling():
        a, b = pairs.unbind(-1)                                         # (..., T, H, D/2) each
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    else:
        rotated = torch.view_as_complex(pairs) * torch.complex(cos, sin)
        rotated = torch.view_as_real(rotated)
    return rotated.flatten(-2).type_as(x)


def softmax_attention(q, k, v, bias=None):
    """softmax(q kᵀ / sqrt(D) + bias) v; bias is broadcast to (B, H, t, s).

    q (B, t, H, D)   k, v (B, s, H, D) -> (B, t, H, D)"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                    # (B, H, t or s, D)
    if q.device.type == 'cpu' and q.dtype == torch.bfloat16:
        # the formula itself: on a CPU in bf16 faster than the fused kernel (torch 2.13)
        scores = (q / q.size(-1) ** 0.5) @ k.mT                         # (B, H, t, s)
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
    """Cuts x (B, T, H, D) into blocks -> (B, n_blocks, block, H, D). Zeros fill the last one."""
    padding = -x.size(1) % block
    return F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, block))


def block_pairs(x, block):
    """Each block of x (B, T, H, D) but the first, after the one before it
    -> (B, n_blocks - 1, 2 block, H, D)"""
    x = in_blocks(x, block)
    return torch.cat([x[:, :-1], x[:, 1:]], dim=2)


def attend(q, k, v, block, window, slopes=0.0):
    """Causal attention in blocks, linear in T: a query attends to the keys of its block and of the
    block before it, none later, none `window` or more tokens older. With slopes (1, H, 1, 1), ALiBi
    (Press et al. 2022) subtracts slope * age from each score.

    q (B, T, H, D)   k, v (B, P + T, H, D): the keys of the past, P < 2 block, come first, and the
    first of them begins a block -> (B, T, H, D)"""
    T = q.size(1)
    P = k.size(1) - T

    # 1. queries up to the end of the block that the past has begun (a whole block if it has not)
    n_first = min(T, block - P % block)
    end = P + n_first
    first = window_attention(q[:, :n_first], k[:, :end], v[:, :end], window, slopes)
    if n_first == T:
        return first

    # 2. all later blocks, in one product, as a GPU needs few and large ones. Their keys start one
    # block before the first of these queries
    q = in_blocks(q[:, n_first:], block)                            # (B, n_blocks, block, H, D)
    k, v = (block_pairs(x[:, end - block:], block) for x in (k, v))     # ..., 2 block, H, D)
    B, n_blocks = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))                      # (B n_blocks, ...)
    y = window_attention(q, k, v, window, slopes)
    rest = y.unflatten(0, (B, n_blocks)).flatten(1, 2)                  # (B, n_blocks block, H, D)
    return torch.cat([first, rest[:, :T - n_first]], dim=1)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): one of two layers gates the other."""
    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 32 * math.ceil(8 / 3 * config.n_embd / 32)
        self.fc = Linear(config.n_embd, 2 * n_inner)
        self.proj = Linear(n_inner, config.n_embd)

    def forward(self, x):
        gate, y = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * y)


class CrossEntropy(torch.autograd.Function):
    """Σ -log P(w), P = softmax(f Eᵀ). The (n, V) logits are never held: the forward pass computes
    the gradient too, from the logits of R rows at a time. The derivative of -log P(w) by the logits
    is P - 1[w].

    f (n, C)   E (V, C)   targets w (n,) -> ()"""
    @staticmethod
    def forward(ctx, f, E, targets):
        V = len(E)
        E = aligned(E)
        R = 2 ** 27 // len(E) if f.is_cuda else 1024    # a GPU needs large products: 0.5 GiB
        nats = f.new_zeros(())
        df = torch.empty_like(f)
        dE = torch.zeros_like(E)
        for start in range(0, len(f), R):
            rows = slice(start, start + R)
            w = targets[rows]                                           # (R,)
            i = torch.arange(len(w), device=w.device)
            logits = output_product(f[rows], E.T)
            logits[:, V:] = -math.inf                                   # of rows that are no words
            log_p = logits.log_softmax(1)                               # (R, V)
            nats -= log_p[i, w].sum()
            if f.requires_grad:
                dlogits = log_p.exp_()
                dlogits[i, w] -= 1
                df[rows] = output_product(dlogits, E)
                dE += output_product(dlogits.T, f[rows])
        ctx.grads = df, dE[:V]
        return nats

    @staticmethod
    def backward(ctx, dnats):
        return *(dnats * grad for grad in ctx.grads), None


def cross_entropy(f, E, targets):
    """Mean of -log P(w), P = softmax(f Eᵀ) in fp32, over the targets w >= 0.

    f (B, T, C)   E (V, C)   targets (B, T), -1 is not scored -> ()"""
    scored = targets >= 0
    nats = CrossEntropy.apply(fp32(f)[scored], E, targets[scored])
    return nats / scored.sum().clamp(min=1)


# --------------------------------------------------------------------------------------------------
# what is new in DRT
class SelfAttention(nn.Module):
    """Causal attention over a sliding window, with ALiBi (Press et al. 2022) for positions."""
    attend = staticmethod(attend)       # LandmarkAttention has another one

    def __init__(self, config):
        super().__init__()
        C, self.config = config.n_embd, config
        self.qkv = Linear(C, 3 * C)
        self.proj = Linear(C, C)

    def forward(self, x, past):
        """x (B, L, C), past: keys and values (B, P, H, D) of the positions before, or None
        -> (B, L, C), keys and values of the last W positions"""
        H, W = self.config.n_head, self.config.window
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).unbind(2)       # (B, L, H, D) each
        if past is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(past, (k, v)))   # (B, P + L, H, D)
        exponents = torch.linspace(math.log2(self.config.slope), -8, H, device=x.device)
        slopes = exponents.exp2().view(1, -1, 1, 1)                     # (1, H, 1, 1)
        y = self.attend(q, k, v, W, W, slopes)                          # (B, L, H, D)
        return self.proj(y.flatten(2)), (k[:, -W:], v[:, -W:])


class GroupedCrossAttention(nn.Module):
    """O = Σ_k w_k softmax(Q K_kᵀ / sqrt(D)) V_k (Eq. 2 and 3, gca_kernel.py), and a projection."""
    def __init__(self, config):
        super().__init__()
        C, self.config = config.n_embd, config
        self.norm = RMSNorm(C)
        self.query = Linear(C, C)
        self.proj = Linear(C, C)

    def forward(self, x, kv, w, idx, mask, start, kernel):
        """A piece of a text, of n chunks in whole or in part, that begins `start` positions into a
        chunk, attends to chunks.

        x (B, L, C)   kv (2, B, M, S, H, D)   w (B, n, K) fp32   idx (B, n, K) int32, -1: none
        mask (B, L), False: a position attends to nothing; None: all attend   -> (B, L, C)"""
        S, L = self.config.chunk_size, x.size(1)
        q = self.query(self.norm(x)).unflatten(-1, (self.config.n_head, -1))    # (B, L, H, D)

        # gca takes whole chunks of queries, and S - 1 keys of a chunk: not the landmark's. w has a
        # row more than whole chunks: of the unfinished one
        after = w.size(1) * S - start - L
        q = F.pad(q, (0, 0, 0, 0, start, after))                        # (B, n S, H, D)
        k, v = kv.type_as(q).flatten(2, 3)                              # (B, M S, H, D)
        o = gca(q, k, v, w, idx, S, n_keys=S - 1, sink=self.config.sink, kernel=kernel)
        o = o[:, start:start + L]
        if mask is not None:
            o = o.where(mask[..., None, None], 0)
        return self.proj(o.flatten(2))


class Block(nn.Module):
    """A pre-norm Transformer layer; those of the upper half have grouped cross-attention."""
    def __init__(self, config, retrieves=False):
        super().__init__()
        attention = LandmarkAttention if config.landmark else SelfAttention
        self.norm1 = RMSNorm(config.n_embd)
        self.attention = attention(config)
        self.norm2 = RMSNorm(config.n_embd)
        self.mlp = MLP(config)
        self.gca = GroupedCrossAttention(config) if retrieves else None

    def forward(self, x, past, retrieved=None):
        y, past = self.attention(self.norm1(x), past)
        x = x + y
        if retrieved is not None:
            x = x + self.gca(x, *retrieved)                             # H + O of Eq. 2
        return x + self.mlp(self.norm2(x)), past


class EncoderBlock(nn.Module):
    """A pre-norm Transformer layer with bidirectional attention and rotary positions."""
    def __init__(self, config):
        super().__init__()
        C, self.n_head = config.n_embd, config.n_head
        self.norm1 = RMSNorm(C)
        self.norm2 = RMSNorm(C)
        self.mlp = MLP(config)
        self.proj = Linear(C, C)
        self.qkv = Linear(C, 3 * C)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.n_head, -1))
        q, k, v = qkv.unbind(2)                                         # (B N, S, H, D) each
        y = softmax_attention(rotate(q), rotate(k), v)
        x = x + self.proj(y.flatten(2))
        return x + self.mlp(self.norm2(x))


class ChunkEncoder(nn.Module):
    """§3.1: C_k of a chunk, by attention within it; its keys and values for cross-attention."""
    def __init__(self, config):
        super().__init__()
        C, self.config = config.n_embd, config
        self.blocks = nn.Sequential(*(EncoderBlock(config) for _ in range(config.n_encoder)))
        self.norm_in = RMSNorm(C) if config.n_encoder else nn.Identity()
        self.norm = RMSNorm(C)
        self.kv = Linear(C, 2 * C)

    def forward(self, x):
        """x (B, N, S, C) -> C_k (B, N, S, C), its keys and values (2, B, N, S, H, D)"""
        y = self.blocks(self.norm_in(x).flatten(0, 1))                  # (B N, S, C)
        y = self.norm(y).view(x.shape)                                  # C_k
        k, v = self.kv(y).unflatten(-1, (2, self.config.n_head, -1)).unbind(3)
        if self.config.shift_values:
            v = v.roll(-1, 2)          # of the next token; the last token has the landmark's
        return y, torch.stack([k, v])


COMPILED = (Block, EncoderBlock)        # layers that train.py compiles


# What a stream keeps of a text (§3.3); only landmarks and kv grow, once a chunk
#     past        list          of each layer, keys and values of the last W positions
#     unfinished  (B, s, C)     the encoder's input, of the chunk that is not yet complete
#     landmarks   list          of pieces, l_k of their chunks, (B, n, C)
#     kv          list          of each chunk, (2, B, S, H, D) 16 bits; in forward a tensor
#     chosen      list          of each group, w and idx (B, n, K), the last of the unfinished chunk
State = namedtuple('State', 'past unfinished landmarks kv chosen')


# --------------------------------------------------------------------------------------------------
# the model
class DRT(nn.Module):
    """A sliding-window language model whose upper layers attend to chunks that it retrieves."""
    PIECE = 2048                # positions of a long text that are processed at once

    def __init__(self, config):
        super().__init__()
        self.config, self.kernel = config, 'auto'                       # kernel: of gca
        self.retriever, self.source = config.retriever, 'text'          # see ways
        self.corpus, self.offload = None, ''    # tokens, landmarks and kv; see prepare_eval, State
        seed = torch.randint(2 ** 48, (), device='cpu').item()
        C, n_upper = config.n_embd, config.n_layer // 2
        retrieves = config.groups > 0

        # ids after those of the tokenizer: the landmark; for MLM the mask
        n_ids = config.vocab_size
        if retrieves or config.landmark:
            n_ids += 2 if config.encoder == 'tokens' else 1
        self.embedding = nn.Embedding(n_ids, C)                         # also the output embedding
        self.lower = nn.ModuleList(Block(config) for _ in range(config.n_layer - n_upper))
        self.upper = nn.ModuleList(Block(config, retrieves) for _ in range(n_upper))
        self.landmark_norms = nn.ModuleList(RMSNorm(C) for _ in range(config.groups))
        self.encoder = ChunkEncoder(config) if retrieves else None
        self.norm = RMSNorm(C)

        # normal weights, seeded by name: what models of other settings share is equal
        for name, p in self.named_parameters():
            if p.dim() == 2:
                torch.manual_seed(seed + zlib.crc32(name.encode()))
                std = 0.02 * math.sqrt(768 / C)
                if name.endswith('proj.weight') and 'gca' not in name:  # it adds to the residual
                    std /= math.sqrt(2 * config.n_layer)
                nn.init.normal_(p, std=std)
        if config.compare_means:
            for norm in self.landmark_norms:
                nn.init.zeros_(norm.weight)                             # h begins at 0
        if config.groups and config.shift_values:
            # GCA begins by copying what followed a similar token: W_Q = W_K, W_O = W_Vᵀ
            k, v = self.encoder.kv.weight.data.chunk(2)
            for block in self.upper:
                block.gca.query.weight.data.copy_(k)
                block.gca.proj.weight.data.copy_(v.T)

    def empty_state(self, B):
        """The state before a text. A corpus to retrieve from comes first: its chunks (B = 1)."""
        config, zeros = self.config, self.embedding.weight.new_zeros
        nothing = zeros(B, 0, config.n_embd)
        landmarks, kv = [nothing], []
        if self.source != 'text':
            _, landmarks, kv = self.corpus
        w = zeros(B, 1, config.n_neighbors)
        chosen = [(w, w.int() - 1)] * config.groups                     # weights 0, no chunks
        return State([None] * config.n_layer, nothing, landmarks, kv, chosen)

    def insert(self, x, value, state=None):
        """§3.1: inserts `value` after every S - 1 tokens, at positions S - 1, 2S - 1, ... of a
        text. x (B, T), which continues the text of state -> (B, L). value None: repeats the number
        before. The base LM has no landmarks."""
        if self.config.groups == 0 and not self.config.landmark:
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

    def retrieve(self, g, x, l_k, mask):
        """Eq. 1: r = h · l_k / sqrt(C). Retrieves the K chunks of largest r (§3.2: + noise),
        weighted by the softmax of r.

        compare_means (ours): l_k is the mean of chunk k's states C_k, not its landmark's state, and
        the query of chunk t is

            h_t = norm_g(x_t) + RMSNorm(l_t - mean of l_k over the chunks that t may retrieve)

        The weight of norm_g starts at 0, so at first similar chunks retrieve each other.

        x (B, N, C), of group g, of the last N of M landmarks   l_k (B, M, C)   mask (B, N, M),
        False: not to retrieve -> w (B, N, K) fp32, idx (B, N, K) int32; 0, -1 where no chunk is
        left"""
        N, M = mask.shape[1:]
        K = self.config.n_neighbors

        # the query h (B, N, C)
        h = self.landmark_norms[g](fp32(x))
        if self.retriever == 'random':
            # App. A.5: row k is the query of landmark k, in every text. Uniform, with mean 0 and
            # standard deviation 1: that of numbers from 0 to 1 is 1 / sqrt(12)
            generator = torch.Generator().manual_seed(g)
            table = torch.rand(M, h.size(2), generator=generator)[M - N:]
            h = (table * 12 ** 0.5 - 3 ** 0.5).to(h)                    # (N, C)
        elif self.config.compare_means:
            n_chunks = mask.sum(2, keepdim=True).clamp(min=1)
            mean = product(mask.type_as(l_k), l_k) / n_chunks           # (B, N, C)
            h = h + F.rms_norm(l_k[:, M - N:] - mean, mean.shape[2:], eps=1e-6)

        # scores, with K columns or more
        r = product(h, l_k.mT) / h.size(-1) ** 0.5                      # (B, N, M)
        r = F.pad(r.masked_fill(~mask, MASKED), (0, K), value=MASKED)
        order = r
        if not self.training:
            # the scores of a chunk that recurs differ by errors of rounding, which depend on the
            # pieces in which a text is read: rounded to 1 / 256 they are ties
            order = (256 * r).round()
        elif self.config.gumbel:                                        # noise: -log Exp(1)
            order = r - torch.empty_like(r).exponential_().log()

        # the top K; not by topk, whose ties depend on M
        idx = order.argsort(descending=True, stable=True)[..., :K]      # (B, N, K)
        w = r.gather(2, idx)
        valid = w > MASKED
        return w.softmax(2) * valid, idx.masked_fill(~valid, -1).int()

    def store(self, kv):
        """kv (2, B, N, S, H, D) -> a list of N chunks, 16 bits, with --offload in a mapped file"""
        if kv.dtype == torch.float32:                                   # fp64 is for the tests
            kv = kv.half()
        if self.offload:
            # the file is unlinked at once: the system frees it together with the tensor
            with tempfile.NamedTemporaryFile(dir=self.offload) as file:
                kv.cpu().numpy().tofile(file)
                kv = torch.from_file(file.name, True, kv.numel(),
                                     dtype=kv.dtype).view_as(kv)
        return list(kv.unbind(2))

    def add_chunks(self, x, state, stored):
        """§3.1: encodes the chunks that end in x (B, L, C), the encoder's input. -> C_k (B, N, S,
        C), None if there is none, and the new unfinished, landmarks and kv of a State"""
        S = self.config.chunk_size
        unfinished = torch.cat([state.unfinished, x], 1)
        N = unfinished.size(1) // S
        whole, unfinished = unfinished.tensor_split([N * S], 1)
        if N == 0 or self.encoder is None:                  # a base LM has chunks, but no encoder
            return None, unfinished, state.landmarks, state.kv
        chunks, kv = self.encoder(whole.unflatten(1, (N, S)))           # (B, N, S, C)
        landmarks = chunks[:, :, -1]                                    # l_k (B, N, C)
        if self.config.compare_means:
            landmarks = chunks.mean(2)
        if stored:
            kv = state.kv + self.store(kv)
        return chunks, unfinished, [*state.landmarks, landmarks], kv

    def may_retrieve(self, B, N, M, docs):
        """The mask of `retrieve` (B, N, M): the last N of M landmarks retrieve chunks before their
        own, of their document if docs (B, L) is not None."""
        S = self.config.chunk_size
        mask = self.embedding.weight.new_ones(B, N, M, dtype=torch.bool).tril(M - N - 1)
        if self.source != 'text':                                       # Table 4: a corpus is first
            n_corpus = len(self.corpus[2])
            if self.config.next_chunk:
                mask[..., n_corpus - 1] = False                         # no chunk comes after it
            if self.source == 'corpus':
                mask[..., n_corpus:] = False
        if docs is not None:                                            # only forward: N = M
            # documents are contiguous: if chunk k begins in the document in which landmark n > k
            # is, all of chunk k is in it
            first = docs[:, None, :N * S:S]                             # (B, 1, N) of chunks
            last = docs[:, S - 1::S, None]                              # (B, N, 1)
            mask &= (first == last) & (first >= 0)                      # not of padding
        return mask

    def gca_inputs(self, w, idx, kv, docs, start, L):
        """Arguments of GroupedCrossAttention for the L positions of a piece: its chunk n attends to
        what the landmark before it has retrieved, w[:, n] and idx[:, n]."""
        S, mask = self.config.chunk_size, None
        if self.config.next_chunk:                                      # (B, n, 2 K); -1 remains -1
            w = w.repeat_interleave(2, 2) / 2
            idx = torch.stack([idx, idx + (idx >= 0)], 3).flatten(2)
        if docs is None:
            # a stream copies each chunk that is retrieved once; for -1 the last, which is not read
            numbers, copies = idx.unique(return_inverse=True)
            idx = copies.masked_fill(idx < 0, -1)
            kv = torch.stack([kv[k] for k in numbers.tolist()], 2).to(w.device)
        else:                               # a landmark retrieves for positions of its document
            position = torch.arange(L, device=docs.device)
            mask = docs == docs[:, position // S * S - 1]   # (B, L); chunk 0 reads nothing
        return kv, w, idx, mask, start, self.kernel

    def encode(self, ids, state=None, docs=None, masked=None, upper=True):
        """ids (B, L), of tokens and landmarks, continue the text of state, if it is not None. Only
        from forward: docs (B, L), documents; masked (B, L), hidden from the encoder. upper=False:
        for a text of which only later positions matter. -> f (B, L, C), C_k (B, N, S, C) of the N
        chunks that end here, the new state"""
        S = self.config.chunk_size
        B, L = ids.shape
        state = state or self.empty_state(B)
        past = list(state.past)
        chosen = list(state.chosen)
        start = state.unfinished.size(1)                                # positions before ids

        # the lower layers
        x = self.embedding(ids)                                         # (B, L, C)
        for i, block in enumerate(self.lower):
            x, past[i] = block(x, past[i])

        # the chunks that end here; a stream stores them
        if masked is not None:
            ids = ids.masked_fill(masked, self.config.vocab_size + 1)
        y = x if self.config.encoder == 'lower' else self.embedding(ids)
        chunks, unfinished, landmarks, kv = self.add_chunks(y, state, stored=docs is None)
        if len(landmarks) > 1 and upper:
            landmarks = [torch.cat(landmarks, 1)]
        state = State(past, unfinished, landmarks, kv, chosen)
        if not upper:
            return None, None, state

        # the upper layers; where a group of them begins, its landmarks retrieve
        l_k = landmarks[0]                                              # (B, M, C)
        M = l_k.size(1)
        retrieves, retrieved = self.retriever != 'off' and M > 0, None
        if retrieves:
            N = (start + L) // S
            mask = self.may_retrieve(B, N, M, docs)                     # (B, N, M)
            depth = len(self.upper) // self.config.groups               # layers of a group
        for j, block in enumerate(self.upper):
            if retrieves and j % depth == 0:
                g = j // depth                                          # g(l) of Eq. 2
                at_landmarks = x[:, S - 1 - start::S]                   # (B, N, C)
                pair = self.retrieve(g, at_landmarks, l_k, mask)        # w, idx
                # the first chunk of these ids attends to what the landmark before it retrieved
                chosen[g] = [torch.cat([last[:, -1:], new], 1)          # (B, N + 1, K)
                             for last, new in zip(chosen[g], pair)]
                retrieved = self.gca_inputs(*chosen[g], kv, docs, start, L)
            i = len(self.lower) + j
            x, past[i] = block(x, past[i], retrieved)
        return self.norm(x), chunks, state

    def forward(self, batch, progress):
        """The training loss () in nats per token and a dict to log; in eval mode without Gumbel
        noise and MLM. batch: tokens, targets, doc (B, T) int64 (target -1: not scored), seed;
        progress: step / max_steps"""
        config = self.config
        V = config.vocab_size
        if self.training:
            torch.manual_seed(batch.seed)                               # for Gumbel noise and MLM

        # landmarks are inserted after the shift of targets: they predict nothing
        ids = self.insert(batch.tokens, V)                              # (B, L)
        targets = self.insert(batch.targets, -1)
        docs = self.insert(batch.doc, None)                             # a landmark's: of its chunk

        # §3.2: in the first half of training MLM hides tokens from the encoder, no landmarks
        masked = None
        if self.encoder and config.encoder == 'tokens' and self.training and progress < 0.5:
            masked = torch.rand(ids.shape, device=ids.device) < config.mlm
            masked &= (ids < V) & (docs >= 0)

        E = self.embedding.weight[:V]
        f, chunks, state = self.encode(ids, None, docs, masked)
        loss, log = cross_entropy(f, E, targets), {}
        if config.groups > 0:
            w, _ = state.chosen[-1]
            largest = w[:, :-1].amax(2)                                 # (B, N)
            log['top_weight'] = largest.sum() / (largest > 0).sum().clamp(min=1)
        if masked is not None:                                          # the encoder predicts them
            encoded = chunks.flatten(1, 2)                              # (B, N S, C)
            hidden = ids.masked_fill(~masked, -1)[:, :encoded.size(1)]
            mlm_loss = cross_entropy(encoded, E, hidden)
            log.update(lm_loss=loss, mlm_loss=mlm_loss)
            loss = loss + mlm_loss
        return loss, log

    def log_probs(self, tokens):
        """log P(next token | all so far), one document: tokens (B, T) int64 -> (B, T, V) fp32"""
        return self.stream(tokens)[0]

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """log_probs of tokens (B, t) that continue the text of state, and the new state"""
        V = self.config.vocab_size
        ids = self.insert(tokens, V, state)
        f, _, state = self.encode(ids, state)
        logits = product(f[:, ids[0] < V], self.embedding.weight[:V].T)     # not of landmarks
        return logits.log_softmax(-1), state

    @torch.no_grad()
    def read(self, tokens, state=None):
        """The state of `stream`. Upper layers run only at the end, on what later positions need: W
        for each layer, and S for each group, as a landmark retrieves for the chunk after it."""
        config = self.config
        ids = self.insert(tokens, config.vocab_size, state)

        # where the upper layers start again, `past` and `chosen` are of an earlier part of the
        # text. What they spoil spreads by W per layer and by S per group; the final state also has
        # the last landmark's choice, at most S back. So `reach` positions are enough to be exact
        reach = len(self.upper) * config.window + (1 + config.groups) * config.chunk_size
        after = ids.size(1)                                             # positions after a piece
        for piece in ids.split(self.PIECE, dim=1):
            after -= piece.size(1)
            _, _, state = self.encode(piece, state, upper=after < reach)
        return state

    def ways(self):
        """Name -> attributes to set: chunks of the text, of a corpus, of both, random ones, none"""
        if self.config.groups == 0 or self.config.retriever == 'off':
            return {'off': {}}
        on = dict(retriever=self.config.retriever, source='text')
        ways = {'on': on}
        if self.corpus:                                                 # Table 4
            for source in ('corpus', 'both'):
                ways[source] = dict(on, source=source)
        ways['shuffled'] = dict(on, retriever='random')
        ways['off'] = dict(on, retriever='off')
        return ways

    def trace(self, tokens, t, state=None, group=None):
        """The chunks that are read to predict token t + 1, by all groups or one: a list of (weight,
        ids, start, end), largest weight first. The chunk is ids[start:end], with next_chunk two,
        of tokens (n,) or of a corpus. state: that of read(tokens[None, :t])"""
        state = state or self.read(tokens[None, :t])
        n_tokens = self.config.chunk_size - 1                           # of a chunk
        n_corpus = len(self.empty_state(1).kv)
        n_read = 2 * n_tokens if self.config.next_chunk else n_tokens
        rows = []
        for g, (w, idx) in enumerate(state.chosen):
            for weight, k in zip(w[0, -1].tolist(), idx[0, -1].tolist()):
                if k < 0 or group not in (None, g):
                    continue
                ids, start = tokens, (k - n_corpus) * n_tokens
                if k < n_corpus:
                    ids, start = self.corpus[0], k * n_tokens
                rows.append((weight, ids, start, start + n_read))
        return sorted(rows, key=lambda row: -row[0])

    @torch.no_grad()
    def prepare_eval(self, corpus, external, args, path, progress):
        """Table 4: with --retrieve-from, reads external.train as a text before each other one.
        Raises SystemExit if a text would retrieve from itself, or if there is no chunk."""
        self.offload = args.offload
        if not args.retrieve_from or 'on' not in self.ways():
            return
        if args.split == 'train' and external.fingerprint == corpus.fingerprint:
            raise SystemExit('--split train with --retrieve-from: each text would find itself')
        tokens = torch.as_tensor(external.train.tokens.astype('int64'),
                                 device=self.embedding.weight.device)
        if len(tokens) < 2 * (self.config.chunk_size - 1):
            raise SystemExit('--retrieve-from: its text is shorter than two chunks')
        state = None
        for piece in progress(tokens.split(16 * self.PIECE), 'reading the corpus'):
            state = self.read(piece[None], state)
        self.corpus = tokens, state.landmarks, state.kv


# --------------------------------------------------------------------------------------------------
# compared systems
class LandmarkAttention(SelfAttention):
    """Landmark Attention (Mohtashami & Jaggi, NeurIPS 2023, §3): one softmax over the tokens of a
    position's chunk, up to it, and the landmarks of earlier chunks. The weight w_k of a landmark is
    that of its chunk, whose tokens have a softmax of their own:

        o = Σ_{j in its chunk} w_j v_j + Σ_k w_k Σ_{j in chunk k} softmax_j(q k_j / sqrt(D)) v_j

    k: in training, on short texts, all earlier chunks; else the K of largest scores, of each
    position and head. Scores have ALiBi (paper: rotary embeddings); landmarks that are farther than
    a training sequence is long count as so far (§3.2). All keys and values are kept."""
    def attend(self, q, k, v, block, window, slopes):
        S = self.config.chunk_size
        q = q.transpose(1, 2) / q.size(3) ** 0.5                        # (B, H, L, D)
        positions = torch.arange(k.size(1), device=q.device)
        i = positions[-q.size(2):, None]                                # (L, 1)

        # scores r of landmarks: infinite for the position's chunk, which need not have one yet
        landmarks = k[:, S - 1::S].transpose(1, 2)
        landmarks = F.pad(landmarks, (0, 0, 0, 1))                      # (B, H, M, D)
        chunk = positions[:landmarks.size(2)]                           # (M,)
        age = (i - S * chunk - S + 1).clamp(max=self.config.block_size)
        r = product(q, landmarks.mT) - slopes * age                     # (B, H, L, M)
        r = r.masked_fill(chunk > i // S, MASKED)
        r = r.masked_fill(chunk == i // S, math.inf)

        # which chunks are read; of equal scores, as of chunks that recur, the latest
        if not self.training:
            n = 1 + self.config.n_neighbors
            chunk = (256 * r).round().argsort(stable=True)[..., -n:]    # (B, H, L, n)
            r = r.gather(3, chunk)

        # scores z of their tokens (B, H, L, n, S - 1), or fewer in a text that is shorter
        j = S * chunk[..., None] + positions[:S - 1]
        age = i[..., None] - j
        b = torch.arange(len(q), device=q.device)[:, None, None, None, None]
        h = torch.arange(q.size(1), device=q.device)[:, None, None, None]
        k, v = (x[b, j.clamp(max=x.size(1) - 1), h] for x in (k, v))    # (..., n, S - 1, D)
        z = torch.einsum('bhid, bhinjd -> bhinj', q, k)
        z = z - slopes[..., None] * age
        z = z.masked_fill(age < 0, MASKED)

        # one softmax of landmarks and of tokens in its chunk: log Σ exp z is the score of a chunk
        r = torch.where(r < math.inf, r, z.logsumexp(4))
        o = torch.einsum('bhinj, bhinjd -> bhind', z.softmax(4), v)     # of each chunk
        return torch.einsum('bhin, bhind -> bihd', r.softmax(3), o)     # (B, L, H, D)


# --------------------------------------------------------------------------------------------------
# a demo
def demo():
    """From tokens to the loss, and what is retrieved, with the weights of assets/drt.pt"""
    from eval import load               # as in a notebook
    model, tokenizer = load(Path(__file__).parent / 'assets/drt.pt')
    source = inspect.getsource(DRTConfig)
    ids = tokenizer.encode(source)[:401].tolist()
    tokens = torch.tensor([ids])
    x = model.insert(tokens[:, :-1], model.config.vocab_size)
    f, chunks, state = model.encode(x)
    log_p = model.log_probs(tokens[:, :-1]).gather(2, tokens[:, 1:, None])
    print(f"""400 tokens and landmarks   (B, L)        {tuple(x.shape)}
chunks, encoded            (B, N, S, C)  {tuple(chunks.shape)}
chunks retrieved for each  (B, N, K)     {tuple(state.chosen[-1][1].shape)}
states                     (B, L, C)     {tuple(f.shape)}
loss of the 400 next tokens              {-log_p.mean():.3f}
After {tokenizer.decode(ids[390:-1])!r} these are read, by weight, to predict the next token:""")
    for weight, _, start, end in model.trace(tokens[0], 399):
        print(f'{weight:.3f}  {tokenizer.decode(ids[start:end])!r:.90}')


if __name__ == '__main__':
    demo()
