"""
DRT, the Differentiable Retrieval-based Transformer: the language model's loss trains retrieval.

    Xiang Hu, Zhihao Teng, Jun Zhao, Wei Wu and Kewei Tu, "Efficient Length-Generalizable Attention
    via Causal Retrieval for Long-Context Language Modeling", ICML 2025, arXiv:2410.01651
    (sections, equations and tables are numbered as in its version of 2024, "Efficient Long-Range
    Language Modeling with Self-Supervised Causal Retrieval")

A landmark token ends each chunk of a text. It scores all earlier chunks, and the best few are read.
The upper half of the layers attends to them from the positions of the next chunk: to each with its
own softmax, weighted by the softmaxed scores. So the loss reaches the scores, and a chunk that
helps is scored higher. There is no other supervision of the scores.

Where the paper is in this file
    §3.1           landmarks in the text                    DRT.insert
    §3.1           the chunk encoder, C_k and l_k           ChunkEncoder, DRT.encode_chunks
    Eq. 1          h_t, the query of a landmark             DRT.query
    Eq. 1          the scores r                             DRT.scores
    Eq. 1          the top K chunks                         DRT.choose
    Eq. 2          w_k, the softmax of the scores           DRT.choose
    Eq. 2          g(l), the group of a layer               DRT.upper_layers
    Eq. 2, Eq. 3   O = Σ_k w_k O_k, O_k by attention        GroupedCrossAttention, gca_kernel.py
    Eq. 2          H + O                                    Block
    §3.2           Gumbel top-k                             DRT.choose
    §3.2           MLM of the encoder                       DRT.masked_for_mlm, DRT.forward
    §3.3           inference, piece by piece                DRT.stream, DRT.read
    §3.3           memory offloading                        DRT.store, gather_chunks
    §4.1.2         a sliding window, ALiBi                  SelfAttention
    Table 1, 2     RPT_contriever                           compared/dense.py
    Table 1 to 3   Block-Recurrent                          compared/block_recurrent.py
    Table 1 to 3   Landmark Attention                       compared/landmark.py
    §4.4, Table 4  retrieval from a corpus                  prepare_eval; not with Contriever
    App. A.5       random retrieval                         DRT.random_query
    App. A.1       sizes and optimizer                      PRESETS
    Table 2, A.4   needles in a haystack                    Needles in data.py, niah in eval.py
    Table 2        summaries                                pairs in eval.py
    Table 3        time and memory                          speed in eval.py
    Figure 3b, c   extrapolation: loss by position          plot_positions in eval.py

Letters in the shape comments
    B sequences    T tokens    L positions: tokens and landmarks    C width (the paper's d)
    H heads        D width of a head           V vocabulary         W window
    N chunks (the paper's N are layers)        t tokens of a call   n, m, s any other size
    S positions of a chunk: S - 1 tokens and a landmark (the paper's S are tokens)
    K chunks retrieved for one                 M chunks to retrieve from

Vectors and indices, as in the paper
    t, k           a chunk that retrieves, a chunk that can be retrieved; both are numbered from 0
                   (t in formulas, and as an index; in shapes it is a number of tokens, in trace the
                   number of a token)
    g              a group of upper layers, numbered from 0
    C_k            the encoder's states of chunk k, (S, C); l_k, its vector for Eq. 1, (C,)
    h_t, r_k, w_k  the query of chunk t, its score of chunk k, the softmax of its scores
    x, f           states of positions: x between layers; f after the last, it predicts a token
    H, O           in H + O of Eq. 2: hidden states, x in the code, and what GCA adds to them
    idx            the numbers k of the chunks that are retrieved, the paper's set C_t

Where we differ from the paper, and why
    The last fields of DRTConfig, marked (ours), change the method; --preset 124m has the paper's
    values. next_chunk: what followed a similar chunk may follow here, too. compare_means: means of
    states can be compared before any training. shift_values: one layer can find a similar token and
    read what followed it. copy_start: it does so from the beginning. p_off: the model also learns
    to predict without retrieval. slope, gumbel: losses are in results.md.
    As in the official code, cross-attention has a norm, a projection and, in place of the
    landmark's key, a sink; h, l_k and the encoder's input have norms. H + O of Eq. 2 is the
    residual, and its Norm is norm2, in front of the MLP (official code: H + O is only the MLP's
    input).
    Scores and top K are computed without autocast (official code: bf16). In evaluation, scores are
    rounded to 1/256 before the top K, so chunks that recur with all that their states depend on
    nearly always have equal scores.
    Streams keep chunks in 16 bits on the model's device, with --offload in a mapped file (paper,
    §3.3: in CPU memory), and in each call copy the retrieved ones (paper: once every S tokens for
    each group). Of a corpus, keys and values are stored, too (paper, §3.3: only landmarks; chunks
    are encoded again), it is searched exactly (paper: Faiss), and either encoder can be used
    (paper: that of DRT_enc-dec).
    In training, retrieval never crosses joined documents; self-attention does. A corpus is one
    text: its chunks can have the tokens of two documents.
    With --next-chunk, chunk t may retrieve chunk t - 1 together with the chunk after it, which is
    chunk t itself. This is causal: chunk t is complete before chunk t + 1 attends to it.
    Weights start with std 0.02 for C = 768 (as in the official code), divided by sqrt(2 n_layer)
    where they add to the residual, except in GCA.

    $ python drt.py                         a demo of ten seconds, on a CPU
    $ python train.py --model drt
"""
import math, tempfile, zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gca_kernel import FLOPS, gca, gca_plan     # noqa: F401   FLOPS: for eval.py --task speed

MASKED = -1e30      # score of a chunk that may not be retrieved: finite, so no row gives nan
NO_CHUNK = -1       # in place of a chunk's number, where fewer than K chunks are retrieved
NO_TARGET = -1      # in place of a target, where nothing is predicted


def check_positive(config, names):
    """Raises ValueError unless each of these fields is 1 or more."""
    for name in names.split():
        if getattr(config, name) < 1:
            raise ValueError(f'{name} must be 1 or more')


@dataclass
class DRTConfig:
    # sizes
    vocab_size: int = 4096      # ids of the tokenizer; for bpe, the number to learn (ours)
    block_size: int = 992       # tokens of a training sequence, landmarks not counted (paper: 16K)
    micro_batch: int = 2        # sequences of a micro-batch, B (official code: 4)
    n_layer: int = 5            # Transformer layers; the upper n_layer // 2 retrieve (paper: 12)
    n_head: int = 4             # attention heads, H (paper: 12)
    n_embd: int = 128           # width, C (paper: 768)
    n_inner: int = 0            # hidden width of the MLP; 0: 8/3 C, rounded up (paper: 2,048)
    window: int = 128           # positions that a query attends to, itself included, W (paper: 512)
    chunk_size: int = 32        # positions of a chunk, its landmark included, S (official: 64)
    n_neighbors: int = 4        # chunks retrieved for each chunk, K (paper: 8)
    groups: int = 1             # groups of upper layers, each retrieves; 0: base LM (paper: 1, 2)
    n_encoder: int = 1          # layers of the chunk encoder; 0: none, w/o enc (official code: 2)

    # the paper's variants
    encoder: Literal['lower', 'tokens'] = 'lower'   # encodes lower layers' output, or embeddings
    mlm: float = 0.15           # --encoder tokens: share masked in first half (official code: 0.15)
    retriever: Literal['learned', 'random', 'none'] = 'learned'     # random: App. A.5; none: no GCA
    sink: bool = True           # a key and a value of zero in each chunk (official code: yes)

    # what we change of the method; --preset 124m has the paper's values
    gumbel: bool = False        # Gumbel noise on the scores, in training (ours: no; §3.2: yes)
    slope: float = 4.0          # ALiBi's first slope, the last is 2^-8 (ours; official: 2^(-8/H))
    next_chunk: bool = True     # the chunk after each is read too, both with w_k / 2 (ours)
    compare_means: bool = True  # scores compare means of chunks, not landmarks, see query (ours)
    shift_values: bool = True   # in cross-attention a token has the next one's value (ours)
    copy_start: bool = True     # at first W_Q = W_K and W_O = W_Vᵀ in cross-attention (ours)
    p_off: float = 0.0          # share of the training sequences that retrieve nothing (ours)

    def __post_init__(self):
        check_positive(self, 'vocab_size block_size micro_batch n_layer n_head n_embd window '
                             'n_neighbors')

        # rotary embeddings rotate pairs of the n_embd / n_head numbers of a head
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}')
        if self.chunk_size < 2:
            raise ValueError(f'chunk_size {self.chunk_size} is below 2, a token and a landmark')
        if self.slope < 2 ** -8:
            raise ValueError(f'slope {self.slope} is below 2^-8, the last slope')
        if max(self.mlm, self.p_off) > 1:
            raise ValueError('mlm and p_off are shares, at most 1')
        if self.p_off and (self.groups == 0 or self.retriever == 'none'):
            raise ValueError('p_off is for models with groups and a retriever')

        # of models that retrieve; the base LM does not
        if self.groups == 0:
            return
        if self.n_upper == 0 or self.n_upper % self.groups:
            raise ValueError(f'n_layer // 2 = {self.n_upper} has to be a positive multiple of '
                             f'groups {self.groups}')
        if self.block_size <= 2 * (self.chunk_size - 1):
            raise ValueError(f'block_size {self.block_size} must be above 2 (chunk_size - 1)')
        if self.encoder == 'tokens' and self.n_encoder == 0 and not self.compare_means:
            raise ValueError('encoder tokens needs n_encoder above 0, or compare_means: else all '
                             'landmarks are equal')

    @property
    def n_upper(self):
        """Layers of the upper half"""
        return self.n_layer // 2


# 124m: App. A.1, but the learning rate ends at a tenth of its peak (paper: at a fifth). The paper's
# base LMs: --groups 0, with --window 512 or 768, or --n-layer 14 --window 658; its DRT_enc-dec:
# --encoder tokens --n-neighbors 4
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
    """Arguments of data.Corpus.batches: a row is of one document, or of joined ends of several"""
    return dict(kind='documents', chunk=config.chunk_size - 1)


def setup(model, run):
    """Prints a warning if no document is long enough for retrieval: it needs two chunks, then a
    token that reads the first of them, and its target. run: see train.py"""
    n_tokens = model.config.chunk_size - 1                              # of a chunk
    needed = 2 * n_tokens + 2
    longest = np.diff(run.corpus.train.offsets).max()
    # with `hops` the batches are needles, and each row is a document
    if longest < needed and 'on' in model.ways() and not run.corpus.hops:
        print(f'warning: nothing can be retrieved: the longest document has {longest} tokens, less '
              f'than {needed}. Try longer documents or a smaller --chunk-size')


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
        """ALiBi's slopes of the heads, a geometric series from `slope` to 2^-8 -> (1, H, 1, 1)"""
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
        # The first key begins a block of `attend`, wherever it is in the text. This is correct for
        # any position, because a block is as long as the window
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
    """§3.1: the states C_k of a chunk, by attention within it. Eq. 3: its keys and values, by W_K
    and W_V, which all upper layers share"""
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
        encoded = self.blocks(self.norm_in(x).flatten(0, 1))            # (B N, S, C)
        encoded = self.norm(encoded).view(x.shape)                      # C_k of each chunk
        kv = self.kv(encoded).unflatten(-1, (2, self.config.n_head, -1))
        k, v = kv.unbind(3)                                             # 2 x (B, N, S, H, D)
        if self.config.shift_values:
            # ours: of the next position. The last token has the landmark's value; the landmark has
            # that of position 0, but its key and value are not used
            v = v.roll(-1, 2)
        return encoded, torch.stack([k, v])


class Retrieved(NamedTuple):
    """What the positions of a piece cross-attend to in a group of layers (Eq. 2). All positions of
    a chunk attend to what the landmark before the chunk has retrieved: row i of w and idx is for
    the i-th chunk of the piece. If N landmarks are in the piece, there are n = N + 1 rows.

    A piece is a whole sequence in training, in a stream any part of a text. So its first and its
    last chunk can be incomplete. An example, S = 4: positions 6 to 17 of a text (L = 12, n = 4)

        position                  6  7 | 8  9 10 11 | 12 13 14 15 | 16 17
        row of w and idx           0   |     1      |      2      |   3
        retrieved by landmark at   3   |     7      |     11      |  15

    Its start is 2: two positions of its first chunk, 4 and 5, were in the piece before. So was
    landmark 3: State keeps what it retrieved. A piece that begins in the first chunk of a text has
    no chunks in row 0. If a piece ends with a landmark, the last row is for the chunk that follows.

    With next_chunk, K is 2 n_neighbors."""
    kv: torch.Tensor            # (2, B, M, S, H, D) keys and values of chunks
    w: torch.Tensor             # (B, n, K) fp32, w_k of Eq. 2; 0 where there is no chunk
    idx: torch.Tensor           # (B, n, K) integers, which of the M chunks; or NO_CHUNK
    plan: tuple | None          # gca_plan of idx, for the backward pass on a GPU; or None
    start: int                  # positions of the first chunk that come before the piece
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
        kv, w, idx, plan, start, mask = retrieved
        S = self.config.chunk_size
        L = x.size(1)
        n = w.size(1)

        # gca takes whole chunks of queries: zeros complete the first and the last of the n chunks
        q = self.query(self.norm(x)).unflatten(-1, (self.config.n_head, -1))    # (B, L, H, D)
        missing = n * S - start - L                                     # after the piece
        q = F.pad(q, (0, 0, 0, 0, start, missing))                      # (B, n S, H, D)

        # the keys of a chunk are those of its S - 1 tokens
        k, v = kv.type_as(q).flatten(2, 3)                              # 2 x (B, M S, H, D)
        o = gca(
            q, k, v, w, idx, S,
            n_keys=S - 1, sink=self.config.sink, plan=plan, kernel=kernel)

        # of the positions of the piece
        o = o[:, start:start + L]                                       # (B, L, H, D)
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


class Candidates(NamedTuple):
    """The M chunks that the N landmarks of a piece can retrieve from. There are two kinds:

    in training     a piece is a whole sequence, its N = M chunks are the candidates, and kv is one
                    tensor, through which gradients reach the encoder
    in a stream     the candidates are all chunks of the text up to the end of the piece, of which
                    the last N are the landmarks' own, and kv is a list, which grows with the text
                    (§3.3); most of its chunks are not retrieved, and can be in a file"""
    l_k: torch.Tensor           # (B, M, C)
    kv: torch.Tensor | list     # (2, B, M, S, H, D), or M tensors (B, 2, S, H, D): see DRT.store
    permitted: torch.Tensor     # (B, N, M) bool: may the landmark of chunk t retrieve chunk k?
    start: int                  # see Retrieved
    mask: torch.Tensor | None   # see Retrieved


def gather_chunks(kv, idx):
    """The keys and values that gca needs for idx (B, n, K). In training, those of all chunks: gca
    reads each chunk where it is. In a stream, only the m chunks that are retrieved are copied from
    the list. kv: see Candidates -> kv (2, B, m, S, H, D), the numbers of the chunks in it (B, n, K)

    >>> kv = [torch.full((1, 2, 1, 1, 1), k) for k in range(9)]
    >>> copied, numbers = gather_chunks(kv, torch.tensor([[[7, 2], [7, 3]]]))
    >>> copied.flatten().tolist(), numbers.tolist()
    ([2, 3, 7, 2, 3, 7], [[[2, 0], [2, 1]]])"""
    if torch.is_tensor(kv):
        return kv, idx
    retrieved, numbers = idx.unique(return_inverse=True)                # (m,), (B, n, K)

    # for NO_CHUNK, -1, this copies the last chunk, which is not read
    copied = torch.stack([kv[k] for k in retrieved.tolist()], 2)        # (B, 2, m, S, H, D)
    copied = copied.transpose(0, 1).contiguous().to(idx.device)
    return copied, numbers.masked_fill(idx == NO_CHUNK, NO_CHUNK)


# --------------------------------------------------------------------------------------------------
# the model
class Traced(NamedTuple):
    """A part of what was read to predict a token: ids[start:end] of a text"""
    weight: float
    ids: torch.Tensor       # (n,) the document, or another text
    start: int
    end: int


class State(NamedTuple):
    """What a stream keeps of a text (§3.3). Only l_k and kv grow, with each chunk that ends. A
    state never changes: the next one has new lists, of the same tensors and those of new chunks;
    l_k is joined to one tensor, a copy."""
    past: list                  # of each layer, keys and values of the last W positions; of upper
                                # layers older ones, while `read` omits them
    unfinished: torch.Tensor    # (B, s, C) the encoder's input, of the unfinished chunk
    l_k: list                   # (B, n, C) of n chunks each; encode_upper joins them to one
    kv: list                    # (B, 2, S, H, D) of each chunk, 16 bits
    chosen: list                # of each group, w and idx (B, n, K) of the last piece, of which the
                                # last row, that of the unfinished chunk, is needed


class RetrievalCorpus(NamedTuple):
    """A text from which all others can retrieve (§4.4)"""
    tokens: torch.Tensor        # (n,)
    l_k: list                   # as in State, with B = 1
    kv: list


COMPILED = (Block, EncoderBlock)        # layers that train.py compiles


def init_weights(model, seed):
    """Normal initial weights, for width C. The seed of a matrix depends on its name, so what
    different models share begins equal."""
    config = model.config
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 * math.sqrt(768 / config.n_embd)
            if name.endswith('proj.weight') and 'gca' not in name:      # it adds to the residual
                std /= math.sqrt(2 * config.n_layer)

            # from the CPU's generator, so a model begins equal on all devices
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            weights = torch.empty(p.shape, device='cpu').normal_(std=std, generator=generator)
            p.data.copy_(weights)

    # norm_g(x) is 0 at first, so similar chunks retrieve each other, see DRT.query
    if config.compare_means:
        for norm in model.landmark_norms:
            nn.init.zeros_(norm.weight)

    # GCA begins by copying. With W_Q = W_K similar states have high scores; W_Vᵀ W_V is a multiple
    # of I on average, so O is near the state that is read, with shift_values what followed it
    if config.groups > 0 and config.copy_start:
        k, v = model.encoder.kv.weight.data.chunk(2)
        for block in model.upper:
            block.gca.query.weight.data.copy_(k)                        # W_Q = W_K
            block.gca.proj.weight.data.copy_(v.T)                       # W_O = W_Vᵀ


class DRT(nn.Module):
    """A sliding-window language model whose upper layers attend to chunks that it retrieves. Its
    steps, for whole sequences (encode_batch) and for the next piece of a text (encode), are

        insert              landmarks between the tokens
        lower_layers        states x of all positions
        encode_chunks       C_k, l_k, keys and values of the whole chunks
        upper_layers        for each group of layers: the landmarks retrieve, then all positions
                            cross-attend in each of its layers"""
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
        self.landmark_norms = nn.ModuleList(RMSNorm(C) for _ in range(config.groups))   # norm_g
        self.encoder = ChunkEncoder(config) if config.groups > 0 else None
        self.norm = RMSNorm(C)                                          # of the output
        init_weights(self, seed)

        # for evaluation, set by prepare_eval
        self.corpus = None                                              # RetrievalCorpus
        self.offload = ''                                               # folder for kv

    @property
    def has_landmarks(self):
        """The base LM has none."""
        return self.config.groups > 0

    @property
    def retrieves(self):
        """Whether the upper layers retrieve: not in a base LM, not with --retriever none, and not
        while `way` is 'off'"""
        return self.encoder is not None and self.way != 'off' and self.config.retriever != 'none'

    def make_layers(self, config):
        """The lower and the upper half of the layers; the upper ones retrieve."""
        n_lower = config.n_layer - config.n_upper
        lower = nn.ModuleList(Block(config) for _ in range(n_lower))
        upper = nn.ModuleList(Block(config, config.groups > 0) for _ in range(config.n_upper))
        return lower, upper

    def insert(self, x, value, state=None):
        """§3.1: inserts a landmark after every S - 1 tokens of a text, at positions S - 1,
        2 S - 1, ...

        x (B, T)        a number for each token, as its id
        value           the number of a landmark; None: that of the token before
        state           of the text that x continues; None: x begins a text
        returns         (B, L)

            S = 4, value 0         1 2 3 4 5 6 7 8  ->  1 2 3 0 4 5 6 0 7 8
            the text continues     9 10 11 12       ->  9 0 10 11 12 0
            S = 4, value None      1 2 3 4 5 6 7 8  ->  1 2 3 3 4 5 6 6 7 8"""
        if not self.has_landmarks:
            return x
        n_tokens = self.config.chunk_size - 1                           # of a chunk

        # where x begins and ends, in tokens from the beginning of its first chunk
        start = state.unfinished.size(1) if state else 0
        end = start + x.size(1)

        # chunks of tokens, of which zeros complete the first and the last; a landmark after each
        x = F.pad(x, (start, -end % n_tokens))
        x = x.unflatten(1, (-1, n_tokens))                              # (B, N, S - 1)
        landmarks = x[:, :, -1:]                                        # (B, N, 1)
        if value is not None:
            landmarks = torch.full_like(landmarks, value)
        x = torch.cat([x, landmarks], 2).flatten(1)                     # (B, N S)
        return x[:, start:end + end // n_tokens]

    # lower layers, retrieval, upper layers
    def run_layers(self, layers, x, past, retrieved=None):
        """x (B, L, C) and Retrieved, through some layers; past: of each of them
        -> (B, L, C), the past of the next piece"""
        new_past = []
        for layer, layer_past in zip(layers, past, strict=True):
            x, layer_past = layer(x, layer_past, retrieved, self.kernel)
            new_past.append(layer_past)
        return x, new_past

    def lower_layers(self, ids, past):
        """ids (B, L), past of these layers -> states x (B, L, C), the past of the next piece"""
        return self.run_layers(self.lower, self.embedding(ids), past)

    def encoder_input(self, x, ids):
        """What the chunk encoder gets of a piece: x (B, L, C) of the lower layers, or embeddings of
        ids (B, L), in the encoder-decoder variant (§3.1) -> (B, L, C)"""
        if self.config.encoder == 'lower':
            return x
        return self.embedding(ids)

    def encode_chunks(self, x):
        """§3.1, of N whole chunks: x (B, N S, C) of encoder_input -> C_k (B, N, S, C), l_k
        (B, N, C), keys and values (2, B, N, S, H, D)"""
        encoded, kv = self.encoder(x.unflatten(1, (-1, self.config.chunk_size)))
        l_k = encoded[:, :, -1]                                         # the landmark's state
        if self.config.compare_means:
            l_k = encoded.mean(2)
        return encoded, l_k, kv

    def query(self, g, x, l_k, permitted):
        """Eq. 1: h_t of group g, a norm of the state x_t of landmark t before the group's layers

            h_t = norm_g(x_t)

        compare_means (ours): l_k is the mean of chunk k's states C_k, not its landmark's state, and

            h_t = norm_g(x_t) + RMSNorm(l_t - mean of l_k over the chunks that t may retrieve)

        All l_k share a large part (at first their cosine is about 0.8), which tells nothing about
        similarity: without it, chunks similar to chunk t have the highest scores, before any
        training. RMSNorm gives the difference the size of norm_g(x_t).

        x (B, N, C), at the last N of M landmarks, l_k (B, M, C), permitted (B, N, M)
        -> (B, N, C)"""
        h = self.landmark_norms[g](fp32(x))
        if not self.config.compare_means:
            return h
        N, M = permitted.shape[1:]
        n_permitted = permitted.sum(2, keepdim=True).clamp(min=1)
        mean = product(permitted.type_as(l_k), l_k) / n_permitted       # (B, N, C)
        l_t = l_k[:, M - N:]                                            # (B, N, C)
        return h + F.rms_norm(l_t - mean, (l_t.size(2),), eps=1e-6)

    def random_query(self, g, x, M):
        """App. A.5: random vectors in place of h, for x (B, N, C) at the last N of M landmarks. In
        training they are new each time: else chunks would learn to be chosen by them. In evaluation
        landmark t has the same vector in every text. -> (N, C)"""
        _, N, C = x.shape
        seed = g
        if self.training:
            seed = torch.randint(2 ** 48, (), device='cpu').item()
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(M, C, generator=generator)[M - N:]         # (N, C) from 0 to 1

        # uniform between -limit and limit: mean 0, standard deviation limit / sqrt(3) = 1
        limit = 3 ** 0.5
        return (2 * limit * uniform - limit).to(fp32(x))

    def scores(self, h, l_k):
        """Eq. 1: r_k = h · l_k / sqrt(C). h (B, N, C) or (N, C), l_k (B, M, C) -> (B, N, M)"""
        return product(h, l_k.mT) / h.size(-1) ** 0.5

    def rounded(self, r):
        """Scores r (..., n) rounded to 1/256, as integers: n round(256 r) - k for chunk k. They all
        differ, because the choice of topk among equal numbers depends on n; where rounded scores
        are equal, the first chunk has the highest number."""
        n = r.size(-1)
        # MASKED would overflow an integer, and masked chunks could then be the best
        units = (256 * r.clamp(min=-2.0 ** 30)).round().long()
        return units * n - torch.arange(n, device=r.device)

    def choose(self, r, permitted):
        """Eq. 1: the permitted chunks k of the K largest scores r_k; in training, Gumbel noise can
        change which these are (§3.2). Eq. 2: their weights, from scores without noise,

            w_k = exp(r_k) / Σ_k' exp(r_k')

        r, permitted (B, N, M) -> w (B, N, K) fp32, idx (B, N, K) int32. Where fewer than K chunks
        are permitted, w is 0 and idx is NO_CHUNK."""
        K = self.config.n_neighbors
        r = r.masked_fill(~permitted, MASKED)
        r = F.pad(r, (0, K), value=MASKED)                              # (B, N, M + K), for topk

        # what the best chunks are chosen by
        best_by = r
        if not self.training:
            # chunks that recur with all that their states depend on have scores that differ by
            # floating-point errors, which depend on the pieces in which a text is read. Rounded to
            # 1/256 they are equal, so the first of these chunks is chosen, unless a rounding
            # boundary separates them
            best_by = self.rounded(r)
        elif self.config.gumbel:
            exponential = torch.empty_like(r).exponential_()
            noise = -exponential.log()                                  # of Gumbel's distribution
            best_by = r + noise

        idx = best_by.topk(K).indices                                   # (B, N, K)
        r_k = r.gather(2, idx)                                          # (B, N, K)
        valid = r_k > MASKED
        w = r_k.softmax(2) * valid                                      # Eq. 2
        return w, idx.masked_fill(~valid, NO_CHUNK).int()

    def retrieve(self, g, x, candidates):
        """What the landmarks of a piece retrieve for group g: query, scores, choice. x (B, N, C) at
        the N landmarks -> w, idx (B, N, K)"""
        l_k, permitted = candidates.l_k, candidates.permitted
        if self.way == 'shuffled' or self.config.retriever == 'random':
            h = self.random_query(g, x, l_k.size(1))
            l_k = l_k.detach()                          # nothing is learned from random scores
        else:
            h = self.query(g, x, l_k, permitted)
        r = self.scores(h, l_k)                                         # (B, N, M)
        return self.choose(r, permitted)

    def make_retrieved(self, w, idx, candidates):
        """w, idx (B, n, K): which of the candidates the n chunks of a piece read -> Retrieved"""
        if self.config.next_chunk:
            # ours: chunks 5, 2 with weights 0.6, 0.4 become 5, 6, 2, 3 with 0.3, 0.3, 0.2, 0.2
            following = idx + (idx != NO_CHUNK)
            idx = torch.stack([idx, following], 3).flatten(2)           # (B, n, 2 K)
            w = w.repeat_interleave(2, 2) / 2
        kv, idx = gather_chunks(candidates.kv, idx)

        # once for all layers of the group
        plan = None
        if idx.is_cuda and torch.is_grad_enabled():
            plan = gca_plan(idx, kv.size(2))
        return Retrieved(kv, w, idx, plan, candidates.start, candidates.mask)

    def upper_layers(self, x, past, chosen, candidates):
        """x (B, L, C); past of these layers; chosen: see State; candidates: Candidates, or None if
        nothing is retrieved -> (B, L, C), the past of the next piece, the new chosen"""
        if candidates is None:
            x, new_past = self.run_layers(self.upper, x, past)
            return x, new_past, chosen

        S = self.config.chunk_size
        n_layers = len(self.upper) // self.config.groups                # of a group
        new_past = []
        new_chosen = []
        for g in range(self.config.groups):
            # Eq. 1: the landmarks of the piece retrieve for the chunks after them
            x_t = x[:, S - 1 - candidates.start::S]                     # (B, N, C) at landmarks
            w, idx = self.retrieve(g, x_t, candidates)                  # (B, N, K)

            # the first chunk of the piece reads what the last landmark before it retrieved
            last_w, last_idx = chosen[g]
            w = torch.cat([last_w[:, -1:], w], 1)                       # (B, N + 1, K)
            idx = torch.cat([last_idx[:, -1:], idx], 1)
            new_chosen.append((w, idx))

            # Eq. 2: its layers, all l with g(l) = g, attend to these chunks
            retrieved = self.make_retrieved(w, idx, candidates)
            layers = slice(g * n_layers, (g + 1) * n_layers)
            x, group_past = self.run_layers(self.upper[layers], x, past[layers], retrieved)
            new_past += group_past
        return x, new_past, new_chosen

    def nothing_chosen(self, B):
        """For chunk 0 of B texts, w and idx (B, 1, K) of each group: no chunks"""
        w = self.embedding.weight.new_zeros(B, 1, self.config.n_neighbors)
        idx = torch.full_like(w, NO_CHUNK, dtype=torch.int32)
        return [(w, idx)] * self.config.groups

    # training
    def training_candidates(self, l_k, kv, docs):
        """What whole sequences retrieve from: a landmark from the chunks before its own, of its
        document. l_k (B, N, C), kv (2, B, N, S, H, D), docs (B, L): the document of each position;
        -1: padding -> Candidates"""
        S = self.config.chunk_size
        N = l_k.size(1)

        # documents are contiguous: if chunk k begins in the document of the landmark of a later
        # chunk t, all of chunk k is in it
        chunk = torch.arange(N, device=docs.device)
        earlier = chunk < chunk[:, None]                                # (N, N) k < t
        doc_of_t = docs[:, S - 1::S, None]                              # (B, N, 1), landmark
        doc_of_k = docs[:, None, :N * S:S]                              # (B, 1, N), first token
        permitted = earlier & (doc_of_k == doc_of_t) & (doc_of_k >= 0)
        if self.training and self.config.p_off:
            off = torch.rand(len(docs), 1, 1, device=docs.device) < self.config.p_off
            permitted = permitted & ~off

        # a position reads what the landmark before its chunk retrieved, if that landmark is of its
        # document. Chunk 0 has no landmark before it: its weights are 0, with any mask
        position = torch.arange(docs.size(1), device=docs.device)
        landmark = (position // S * S - 1).clamp(min=0)                 # (L,)
        mask = docs == docs[:, landmark]                                # (B, L)
        return Candidates(l_k, kv, permitted, 0, mask)

    def encode_batch(self, ids, docs, encoder_ids):
        """Whole sequences from their beginning, with gradients. ids, docs (B, L) of tokens and
        landmarks; encoder_ids (B, L): ids that the encoder sees, some of which can be masked
        -> f (B, L, C), C_k (B, N, S, C) or None, w and idx of each group"""
        B, L = ids.shape
        S = self.config.chunk_size
        x, _ = self.lower_layers(ids, [None] * len(self.lower))

        # the whole chunks, and what can be retrieved of them
        encoded = candidates = None
        if self.encoder is not None:
            whole = self.encoder_input(x, encoder_ids)[:, :L // S * S]  # (B, N S, C)
            encoded, l_k, kv = self.encode_chunks(whole)
        if self.retrieves:
            candidates = self.training_candidates(l_k, kv, docs)

        x, _, chosen = self.upper_layers(
            x, [None] * len(self.upper), self.nothing_chosen(B), candidates)
        return self.norm(x), encoded, chosen

    def masked_for_mlm(self, ids, docs):
        """§3.2: the tokens that are hidden from the encoder: a random share, without landmarks and
        padding. ids, docs (B, L) -> (B, L) bool"""
        masked = torch.rand(ids.shape, device=ids.device) < self.config.mlm
        return masked & (ids < self.config.vocab_size) & (docs >= 0)

    def forward(self, batch, progress):
        """batch: data.Batch; progress: step / max_steps; in eval mode no Gumbel noise, MLM, p_off
        -> the loss () in nats per token, what to log"""
        config = self.config
        V = config.vocab_size
        if self.training:
            torch.manual_seed(batch.seed)                       # for Gumbel noise, MLM and p_off

        # landmarks are inserted after the shift of targets: they predict nothing
        ids = self.insert(batch.tokens, V)                              # (B, L)
        targets = self.insert(batch.targets, NO_TARGET)
        docs = self.insert(batch.doc, None)                             # a landmark's: of its chunk

        # §3.2: MLM, in the first half of training; the decoder sees all tokens
        with_mlm = config.encoder == 'tokens' and self.encoder is not None
        with_mlm = with_mlm and self.training and progress < 0.5
        encoder_ids = ids
        if with_mlm:
            masked = self.masked_for_mlm(ids, docs)                     # (B, L)
            encoder_ids = ids.masked_fill(masked, V + 1)

        # the loss of the language model
        E = self.embedding.weight[:V]
        f, encoded, chosen = self.encode_batch(ids, docs, encoder_ids)
        loss = cross_entropy(f, E, targets, self.kernel)
        log = {}
        if config.groups > 0:
            # of the last group: the mean of the largest w_k, over the chunks that read any. Row n
            # of w is for chunk n; the last of the N + 1 is for the unfinished one, if there is one.
            # A chunk that begins a document counts, although it does not read what its row has
            w, _ = chosen[-1]
            n_chunks = math.ceil(ids.size(1) / config.chunk_size)
            largest = w[:, :n_chunks].amax(2)                           # (B, n_chunks)
            log['top_weight'] = largest.sum() / (largest > 0).sum().clamp(min=1)
        if not with_mlm:
            return loss, log

        # the loss of MLM: the encoder predicts the masked tokens of whole chunks
        encoded = encoded.flatten(1, 2)                                 # (B, N S, C)
        mlm_targets = ids.masked_fill(~masked, NO_TARGET)[:, :encoded.size(1)]
        mlm_loss = cross_entropy(encoded, E, mlm_targets, self.kernel)
        log.update(lm_loss=loss, mlm_loss=mlm_loss)
        return loss + mlm_loss, log

    # inference
    @property
    def n_corpus(self):
        """The number of chunks of a corpus that come before those of a text"""
        if self.way in ('corpus', 'both'):
            return len(self.corpus.kv)
        return 0

    def empty_state(self, B):
        """The state before B texts. The chunks of a corpus to retrieve from are in it already."""
        nothing = self.embedding.weight.new_zeros(B, 0, self.config.n_embd)
        l_k = [nothing]
        kv = []
        if self.n_corpus > 0:
            l_k = [x.expand(B, -1, -1) for x in self.corpus.l_k]
            kv = [x.expand(B, -1, -1, -1, -1) for x in self.corpus.kv]
        past = [None] * self.config.n_layer
        return State(past, nothing, l_k, kv, self.nothing_chosen(B))

    def store(self, kv):
        """kv (2, B, N, S, H, D) -> a list of N chunks (B, 2, S, H, D), 16 bits; with --offload they
        are in a file that is mapped to memory (§3.3: memory offloading)"""
        if kv.dtype == torch.float32:                                   # fp64 is for the tests
            kv = kv.half()
        if self.offload:
            # the file is unlinked at once: the system frees it together with the tensor
            with tempfile.NamedTemporaryFile(dir=self.offload) as file:
                kv.cpu().contiguous().view(torch.uint8).numpy().tofile(file)    # numpy lacks bf16
                stored = torch.from_file(file.name, shared=True, size=kv.numel(), dtype=kv.dtype)
                kv = stored.view_as(kv)
        return list(kv.transpose(0, 1).unbind(2))

    def encode_lower(self, ids, state):
        """ids (B, L), which continue the text of state, through the lower layers and the chunk
        encoder -> x (B, L, C), the new state, except for the past of the upper layers and chosen,
        which encode_upper replaces"""
        S = self.config.chunk_size
        n_lower = len(self.lower)
        x, lower_past = self.lower_layers(ids, state.past[:n_lower])
        past = lower_past + state.past[n_lower:]

        # the chunks that end here, and the next one, which is unfinished
        unfinished = torch.cat([state.unfinished, self.encoder_input(x, ids)], 1)
        N = unfinished.size(1) // S
        whole, unfinished = unfinished.tensor_split([N * S], 1)

        # new lists: the former state remains as it is
        l_k, kv = state.l_k, state.kv
        if N > 0 and self.encoder is not None:
            _, new_l_k, new_kv = self.encode_chunks(whole)
            l_k = [*l_k, new_l_k.clone()]           # a view would keep all of C_k
            kv = [*kv, *self.store(new_kv)]
        return x, State(past, unfinished, l_k, kv, state.chosen)

    def stream_candidates(self, l_k, kv, N, start):
        """What the landmarks of a piece retrieve from. They end the last N chunks of the text, and
        each retrieves from the chunks before its own; those of a corpus come first. l_k (B, M, C),
        kv: a list of M chunks, start: see Retrieved -> Candidates"""
        B, M, _ = l_k.shape
        chunk = torch.arange(M, device=l_k.device)
        permitted = chunk < chunk[M - N:, None]                         # (N, M) k < t
        n_corpus = self.n_corpus
        if n_corpus > 0 and self.config.next_chunk:
            # the next chunk after the corpus's last one would be the first of the text
            permitted[:, n_corpus - 1] = False
        if n_corpus > 0 and self.way == 'corpus':
            permitted[:, n_corpus:] = False
        return Candidates(l_k, kv, permitted.expand(B, N, M), start, None)

    def encode_upper(self, x, start, state):
        """x and the state of encode_lower, through the upper layers; start: see Retrieved
        -> f (B, L, C), the new state"""
        n_lower = len(self.lower)
        l_k = state.l_k[0]                                              # (B, M, C)
        if len(state.l_k) > 1:                                          # chunks ended in the piece
            l_k = torch.cat(state.l_k, 1)
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
        """f (..., C) -> (..., V) fp32; landmark and mask have no logits"""
        return product(f, self.embedding.weight[:self.config.vocab_size].T)

    @torch.no_grad()
    def states(self, tokens, state=None):
        """f (B, t, C), whose `logits` predict the token after each of tokens (B, t), which continue
        the text of `state`; the new state"""
        V = self.config.vocab_size
        ids = self.insert(tokens, V, state)
        f, state = self.encode(ids, state)
        return f[:, ids[0] < V], state                                  # not of landmarks

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

        # The upper layers skip all pieces but those with the last `reach` positions. Where they
        # start, their `past` and `chosen` are of an earlier part of the text, so their first states
        # are wrong: each layer spreads this error by W positions, each group by S. The choice of
        # the last landmark, at most S positions before the end, is kept and has to be right. With
        # W = 128, S = 32 and two upper layers in one group, `reach` is 2 x 128 + 2 x 32 = 320
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
        """The ways in which a text can be read, values of `way`. on: as trained; shuffled: random
        scores, so random chunks and weights; off: nothing is retrieved; corpus, both: chunks of a
        corpus, of corpus and text"""
        if self.config.groups == 0 or self.config.retriever == 'none':
            return ('off',)
        if self.corpus is None:
            return ('on', 'shuffled', 'off')
        return ('on', 'corpus', 'both', 'shuffled', 'off')              # Table 4

    def trace(self, tokens, t, state=None, group=None):
        """What the upper layers, in all groups or one, read to predict token t + 1 of tokens (n,)
        -> [Traced], the largest w_k first, each a chunk, with next_chunk two. state: of
        read(tokens[None, :t]), computed if None"""
        if state is None:
            state = self.read(tokens[None, :t])
        n_tokens = self.config.chunk_size - 1                           # of a chunk
        n_read = 2 * n_tokens if self.config.next_chunk else n_tokens

        # token t + 1 is predicted at the position of token t, which reads what the last landmark
        # before it chose, in each group. (A landmark after token t chooses for later positions)
        rows = []
        for g, (w, idx) in enumerate(state.chosen):
            if group not in (None, g):
                continue
            for weight, k in zip(w[0, -1].tolist(), idx[0, -1].tolist()):
                if k == NO_CHUNK:
                    continue
                if k < self.n_corpus:                                   # of a corpus
                    ids = self.corpus.tokens
                    start = k * n_tokens
                else:
                    ids = tokens
                    start = (k - self.n_corpus) * n_tokens
                rows.append(Traced(weight, ids, start, start + n_read))
        return sorted(rows, key=lambda row: -row.weight)


# --------------------------------------------------------------------------------------------------
# evaluation
@torch.no_grad()
def prepare_eval(model, corpus, external, args, path):
    """Sets --offload. Table 4: with --retrieve-from, reads external.train once; each text that is
    evaluated can then retrieve the chunks of it, too. SystemExit if a text would retrieve from
    itself, if external.train has fewer than two chunks, or if --offload is no folder"""
    if args.offload and not Path(args.offload).is_dir():
        raise SystemExit(f'--offload {args.offload}: there is no such folder')
    model.offload = args.offload
    if not args.retrieve_from or 'on' not in model.ways():
        return
    if args.split == 'train' and external.fingerprint == corpus.fingerprint:
        raise SystemExit('--split train with --retrieve-from: each text would find itself in the '
                         'corpus; choose another --split')
    tokens = torch.as_tensor(external.train.tokens.astype('int64'),
                             device=model.embedding.weight.device)
    if len(tokens) < 2 * (model.config.chunk_size - 1):
        raise SystemExit(f'--retrieve-from: its text has {len(tokens)} tokens, fewer than two '
                         f'chunks have, {2 * (model.config.chunk_size - 1)}; choose a longer one')

    # all of it is one text, of which l_k and kv are needed
    state = model.empty_state(1)
    for piece in args.progress_bar(tokens.split(16 * model.PIECE), 'reading the corpus'):
        state = model.read(piece[None], state)
    model.corpus = RetrievalCorpus(tokens, state.l_k, state.kv)


# --------------------------------------------------------------------------------------------------
# a demo
def demo():
    """The first 992 bytes of this file, from tokens to the loss; 20 steps of training; then what is
    retrieved"""
    torch.manual_seed(0)
    text = Path(__file__).read_bytes()[:993]
    tokens = torch.tensor([list(text)])                                     # (1, 993)
    model = DRT(DRTConfig(vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    n_parameters = sum(p.numel() for p in model.parameters())

    # position 31, 63, ... is a landmark
    ids = model.insert(tokens[:, :-1], 256)                                 # (1, L)
    targets = model.insert(tokens[:, 1:], NO_TARGET)
    docs = torch.zeros_like(ids)
    for step in range(20):
        f, encoded, chosen = model.encode_batch(ids, docs, ids)
        loss = cross_entropy(f, model.embedding.weight[:256], targets)
        if step == 0:
            print(f"""DRTConfig()                {n_parameters:,} parameters
992 tokens and landmarks   (B, L)        {tuple(ids.shape)}
chunks, encoded            (B, N, S, C)  {tuple(encoded.shape)}
weights of the retrieved   (B, N + 1, K) {tuple(chosen[-1][0].shape)}
states that predict        (B, L, C)     {tuple(f.shape)}
loss at first              {loss:.3f}, ln 256 = {math.log(256):.3f}""")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f'loss in step 20            {loss:.3f}')
    print(f'To predict what follows {text[952:992]!r}, it reads:')
    for row in model.eval().trace(tokens[0], 991):
        print(f'weight {row.weight:.3f}  {text[row.start:row.end]!r}')


if __name__ == '__main__':
    demo()
