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
    §3.1     s_q, and the K chunks of highest s_q       RPT.retrieve
    §3.1     neighbors and their gates                  NeighborEncoder
    §3.1     chunked cross-attention                    ChunkedCrossAttention
    §3.2     candidates by BM25                         bm25_candidates
    §3.2     s_t, the target score                      target_scores
    §3.3     L_ret, LambdaRank with a margin            ranking_loss
    §3.3     L_LM + α L_ret                             RPT.forward
    §3.3     α and τ in the course of training          RPT.schedule
    §3.4     scheduled sampling                         RPT.schedule, RPT.forward
    §3.4     sliding-window attention                   SelfAttention
    §3.4     inference                                  RPT.encode, RPT.stream
    §5       Transformer-XL, RETRO, RPT-Lex             --retriever none, bm25, lex
    §5       Memorizing and Block-Recurrent, Griffin    --memory knn, state, lru
    App. C   DPR; also Contriever                       --retriever dpr, contriever
    §5       Tables 2 to 4, Figures 4 to 6              ranks

Letters in the shape comments
    B sequences    T tokens (t of a piece)    C width    H heads    D head size    V vocabulary
    m tokens of a chunk    N chunks of a sequence or of a piece    M chunks of the text so far
    K neighbors of a chunk    G = N + 1 groups of m tokens    n, a, b, s, P, R further sizes
    Numbers: i of a chunk that retrieves, j of one that is retrieved, g of a micro-batch. w is a
    target token (the paper's w, the chunks of a window, is window_chunks); l is a positive in L_ret

Where we differ from the paper, and why
    Scores are divided by sqrt(C); s_t is a mean over tokens, L_ret over the chunks with a positive;
    NDCG discounts by 1 / log2(1 + rank). A chunk without neighbors gets 0 from cross-attention.
    Scheduled sampling draws for each chunk; what a teacher chooses has a positive s_t, so it can be
    fewer than K. Retrieved states have passed the retriever's attention, those of the chunk that
    retrieves have not. L_ret trains the lower layers, too; its τ starts at 1.
    The gate attends to neighbors of a window of chunks, so that a stream keeps no others (paper: of
    all). With --shift-values (not in the preset `paper`) one layer can copy what followed a token.
    The reference LM (paper: Pythia 1.4B) has half the layers and a continuous cache, is trained on
    the same documents and scores every n-th chunk; the others are taught as in RPT-Lex. Muon or
    AdamW, not AdaBelief; dropout on what layers add; self-attention crosses joined documents;
    corpus idf; exact search (paper: faiss); norms and biases in retriever and gate.

    $ python rpt.py                         a demo, on a CPU
    $ python train.py --model rpt           a reference LM, then RPT, which it teaches
"""
import functools, hashlib, inspect, math, os, zlib
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

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


Retrievers = Literal['sem', 'lex', 'bm25', 'dpr', 'contriever', 'none']


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
    n_neighbors: int = 2          # chunks that a chunk retrieves, K (paper; tiny: 4, as m is half)
    n_cca: int = 0                # last layers that cross-attend; 0: upper half (paper: 5; tiny: 1)
    retriever: Retrievers = 'sem'   # RPT-Sem, RPT-Lex; RETRO; fixed before training; none (§5)
    memory: Literal['none', 'knn', 'lru', 'state'] = 'none'     # no retriever; m = window / 2 (§5)
    memory_size: int = 32_768     # of memory knn: tokens (its paper: 65K)
    n_nearest: int = 32           # of memory knn: tokens that a head reads (official code: 128)
    n_states: int = 128           # of memory state: vectors (ours; its paper: 512)
    shift_values: bool = True     # in cross-attention a token has the next one's value (ours)
    gate: bool = True             # neighbors are weighted before cross-attention (paper)
    eta: float = 0.1              # lower bound of the gate, η (paper)
    alpha: float = 0.005          # weight of L_ret from a fifth of the steps on (ours; paper: 1e-9)
    tau: float = 4.0              # margin of L_ret at the end (paper: 2, 4, 8, 128); first 1 (ours)
    teacher: Literal['annealed', 'always', 'never'] = 'annealed'    # of sem, lex: when it chooses
    n_candidates: int = 20        # BM25 candidates of a chunk, J (paper)
    score_every: int = 1          # the reference LM scores every n-th chunk; others: as lex (ours)
    reference: str = ''           # .pt file, or folder with ckpt.pt; default: one is trained first
    reference_steps: int = 600    # of its training, at most RPT's; of dpr and contriever (ours)
    reference_cache: float = 0.2  # weight of its continuous cache, λ (ours; paper: 0)

    def __post_init__(self):
        if self.memory != 'none':
            self.retriever = 'none'
            self.chunk_size = self.window // 2          # its streams are cut between blocks
        check_positive(self, 'vocab_size block_size micro_batch n_layer n_head n_embd window '
                             'chunk_size n_neighbors n_candidates score_every reference_steps '
                             'n_states n_nearest')
        if self.n_embd % (2 * self.n_head):
            raise ValueError('n_embd: a multiple of 2 n_head')
        if self.n_cca > self.n_layer - self.n_layer // 2:
            raise ValueError('n_cca: at most half of n_layer')
        if self.window % (2 * self.chunk_size):
            raise ValueError('window: a multiple of 2 chunk_size')
        if self.n_candidates < self.n_neighbors:
            raise ValueError('n_candidates: at least n_neighbors')
        if self.block_size < self.window + 2 * self.chunk_size and self.retriever != 'none':
            raise ValueError(f'block_size {self.block_size} is below window + 2 x chunk_size')
        if self.reference and self.retriever != 'sem':
            raise ValueError('a reference is for retriever sem')
        if max(self.dropout, self.eta, self.reference_cache) >= 1:
            raise ValueError('dropout, eta and reference_cache are below 1')

    @property
    def window_chunks(self):
        """Chunks of a window, the paper's w"""
        return self.window // self.chunk_size


# paper: §3.4, App. A and B. Ours are the tokenizer, the reference LM, alpha (App. A: 1e-9), AdamW
# (AdaBelief) with lr 5e-4 (5e-3) and weight_decay 0.01 (1e-8)
PRESETS = {
    'tiny': dict(n_neighbors=4, n_cca=1, n_candidates=4, score_every=8, reference_steps=300),
    'paper': dict(data='pg19', tokenizer='gpt2', vocab_size=50_257, block_size=16_384,
                  micro_batch=1, n_layer=12, n_head=8, n_embd=1024, dropout=0.05, window=2048,
                  chunk_size=64, n_cca=5, tokens_per_step=131_072, max_steps=500_000, lr=5e-4,
                  optimizer='adamw', warmup=0.01, weight_decay=0.01, eval_every=1000,
                  shift_values=False, n_states=512, reference_steps=50_000,
                  reference_cache=0.0),
}


def batches(config):
    """Arguments of data.Corpus.batches"""
    return dict(kind='documents', chunk=config.chunk_size)


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
    """Two layers, the hidden one wider."""
    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 4 * config.n_embd
        self.fc = Linear(config.n_embd, n_inner)
        self.proj = Linear(n_inner, config.n_embd)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


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

    def heads(self, x, past):
        """As forward, but P has no limit: what the tokens do not attend to comes first
        -> y, q (B, t, H, D), all keys and values (B, P + t, 2, H, D)"""
        qkv = self.qkv(x).unflatten(2, (3, self.n_head, -1))            # (B, t, 3, H, D)
        q = qkv[:, :, 0]
        kv = qkv[:, :, 1:]
        if past is not None:
            kv = torch.cat([past, kv], 1)                               # (B, P + t, 2, H, D)

        # RoPE, so attend has no slopes. Position 0 is the first key, another one in the next piece:
        # `past` is not rotated
        P = kv.size(1) - x.size(1)
        start = max(0, P // self.block - 1) * self.block
        k, v = kv[:, start:].unbind(2)
        y = attend(rotate(q, P - start), rotate(k), v, self.block, 2 * self.block)
        return y, q, kv

    def kept(self, kv, older=0):
        """Of all keys and values, the past of the next piece: of the unfinished block, the one
        before and `older` tokens, up to the last whole chunk. The next piece encodes the unfinished
        chunk again."""
        end = kv.size(1) // self.m * self.m
        start = max(0, (end - older) // self.block - 1) * self.block
        return kv[:, start:end]

    def forward(self, x, past):
        """x (B, t, C), past: keys and values (B, P, 2, H, D) of the P tokens before, None at the
        beginning of a text -> (B, t, C), the past of the next piece"""
        y, _, kv = self.heads(x, past)
        return self.proj(y.flatten(2)), self.kept(kv)


class Attention(nn.Module):
    """Tokens of x attend to all tokens of y, in both directions. With shift, a token of y has the
    value of the next one, so that who attends to a token reads what followed it."""
    def __init__(self, config, shift=False):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.shift = shift
        self.query = Linear(C, C)
        self.kv = Linear(C, 2 * C)
        self.proj = Linear(C, C)

    def forward(self, x, y, first=0, mask=None):
        """x (B, n, a, t, C), `a` texts with positions first, first + 1, ...; y (B, n, b, s, C), b
        texts with positions 0, 1, ...; an axis of one text can be absent: x (B, n, t, C)
        mask (B n, 1, a t, b s), True: x may attend to y -> as x"""
        q = self.query(x).unflatten(-1, (self.n_head, -1))                  # (B, n, a, t, H, D)
        k, v = self.kv(y).unflatten(-1, (2, self.n_head, -1)).unbind(-3)    # (B, n, b, s, H, D)
        if self.shift:
            v = v.roll(-1, -3)                              # the last token has the first one's
        q = rotate(q, first)
        k = rotate(k)
        q, k, v = (z.flatten(2, -3).flatten(0, 1) for z in (q, k, v))       # (B n, ..., H, D)

        # e^-1e9 is 0; not -inf, as softmax of a row of -inf is nan
        bias = None
        if mask is not None:
            bias = torch.where(mask, 0.0, -1e9).to(q.dtype)
        y = softmax_attention(q, k, v, bias)                                # (B n, a t, H, D)
        return self.proj(y.flatten(2)).view_as(x)


def in_chunks(x, m):
    """Cuts x (B, t, ...) into whole chunks (B, N, m, ...), without the tokens after them."""
    N = x.size(1) // m
    return x[:, :N * m].unflatten(1, (N, m))


def doc_of_chunks(doc, m):
    """doc (B, T) of tokens -> (B, N) of whole chunks, -1: tokens of two documents, or padding"""
    low, high = in_chunks(doc, m).aminmax(dim=2)                            # 2 x (B, N)
    return low.where(low == high, -1)


class Retriever(nn.Module):
    """§3.1: the factors of s_q(c) = <W_Q c_q, W_K c> / sqrt(C), which RPT.retrieve computes. c is
    the mean of a chunk's tokens after attention."""
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
        """Chunks x (B, N, m, C) -> states (B, N, m, C) to be retrieved, queries, keys (B, N, C)"""
        y = self.norm(x)
        x = x + self.attention(y, y)
        query = self.query(self.norm_q(x.mean(2)))
        key = self.key(self.norm_k(x.mean(2)))
        return x, query, key


def bm25_vectors(tokens, idf):
    """Queries and keys of RETRO: <query, key> is BM25, in which len(d) = mean len, as all chunks
    are equally long. tokens (..., m), idf (V,) -> 2 x (..., V)"""
    tf = idf.new_zeros(*tokens.shape[:-1], len(idf))
    tf = tf.scatter_add(-1, tokens, tf.new_ones(tokens.shape))              # occurrences of a term
    key = idf * tf / (tf + 1.2)
    return tf, (2 ** 10 * key).round() / 2 ** 10        # so sums are exact, and ties remain ties


def permitted(doc, window_chunks, first=0):
    """(..., N, M): may chunk i, one of the N from `first` on, retrieve chunk j? If j has left the
    window of i and is of its document. doc (..., M) of all chunks, -1: of no document"""
    j = torch.arange(doc.size(-1), device=doc.device)                       # (M,)
    i = j[first:, None]                                                     # (N, 1)
    has_left = j <= i - window_chunks
    doc_i = doc[..., first:, None]
    same_document = (doc[..., None, :] == doc_i) & (doc_i >= 0)
    return has_left & same_document


def top(scores, mask, K):
    """Indices (..., K) of the highest of scores (..., n) where mask is True; -1: there are fewer"""
    scores = F.pad(scores.where(mask, -math.inf), (0, K), value=-math.inf)
    values, indices = scores.sort(descending=True, stable=True)
    return indices.masked_fill(values == -math.inf, -1)[..., :K]


def pseudorandom(M, first, device):
    """(N, M): pseudorandom scores of the M chunks j for each chunk i from `first` on. They are
    functions of i and j, so that they are the same in pieces of any size. Cubes modulo a prime p
    look random, and those of 0 to p - 1 differ, as 3 does not divide p - 1."""
    p = 1_000_037
    j = torch.arange(M, device=device)
    i = j[first:, None]
    return ((7919 * i + j) % p) ** 3 % p


class NeighborEncoder(nn.Module):
    """§3.1: a neighbor, a retrieved chunk and its next one, before it is attended to."""
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
        """Each chunk of x (B, n, m, C) and the next one attend to each other: (B, n - 1, 2m, C)"""
        x = torch.cat([x[:, :-1], x[:, 1:]], 2)
        y = self.norm1(x)
        return x + self.attention(y, y)

    def forward(self, joined, chosen, chunk_states):
        """The states of the neighbors of chunks, which have attended to the chunk that retrieves
        them. joined (B, M, 2m, C), chosen (B, N, K), chunk_states (B, N, m, C)
        -> (B, N, K, 2m, C)"""
        # row j + 1 of joined is chunks j and j + 1; row 0 is zeros, so -1 (no neighbor) reads zeros
        rows = (chosen + 1).flatten(1)                                      # (B, N K)

        # not joined[b, rows]: on a CPU its gradient is a sum in any order
        x = torch.cat([x.index_select(0, i) for x, i in zip(joined, rows)])
        x = x.unflatten(0, chosen.shape)                                    # (B, N, K, 2m, C)

        # a slot without a neighbor does not stay zero here; its gate is 0
        return x + self.cross(self.norm2(x), self.norm_query(chunk_states))

    def gates(self, neighbors, chosen):
        """A weight in [η, 1) of each neighbor; 0 where there is none:

            gate = max(η, σ((w_ng · norm(ĉ) + b) / C))

        ĉ is the mean of a neighbor's states, after attention to the means of neighbors of higher
        rank of the same chunk, and of all neighbors of the chunks before it, within a window.
        neighbors (B, n, K, 2m, C) of n chunks, chosen (B, n, K), -1: none -> (B, n, K)"""
        _, n, K = chosen.shape
        valid = chosen >= 0
        if not self.config.gate:
            return valid.to(neighbors.dtype)

        # sorted by chunk, then by rank, they attend to themselves and to those before them. Chunk i
        # has neighbors only if a window of chunks before it is of its document; so masking by
        # document is not needed
        chunk = torch.arange(n * K, device=chosen.device) // K              # (n K,)
        mask = (chunk > chunk[:, None] - self.config.window_chunks).tril()  # (n K, n K)
        mask = mask & valid.flatten(1)[:, None, None]                       # (B, 1, n K, n K)
        mean = neighbors.mean(3).flatten(1, 2)[:, None]                     # (B, 1, n K, C)
        y = self.norm3(mean)
        mean = mean + self.gate_attention(y, y, mask=mask)                  # ĉ (B, 1, n K, C)

        # in fp32 under autocast too, as the logit is tiny
        with torch.autocast(mean.device.type, enabled=False):
            logit = self.gate(self.norm_gate(fp32(mean))) / self.config.n_embd
        gates = logit.sigmoid().clamp(min=self.config.eta)
        return gates.view_as(valid) * valid


class ChunkedCrossAttention(nn.Module):
    """Borgeaud et al. 2022, §2.4: a group of m tokens attends to the neighbors of a chunk. Group i
    = the last token of chunk i (its output predicts the first of chunk i + 1) and all but the last
    token of chunk i + 1. Their positions are m - 1 to 2m - 2, those of a neighbor 0 to 2m - 1. A
    norm of the neighbors would undo the gate.

        tokens, m = 4         0 1 2 | 3 4 5 6   | 7 8 9 10  | 11 ...
        attend to neighbors of none | chunk 0   | chunk 1   | chunk 2

    In a stream the first group attends to what the chunk before these N chunks has retrieved."""
    def __init__(self, config):
        super().__init__()
        self.norm = RMSNorm(config.n_embd)
        self.m = config.chunk_size
        self.attention = Attention(config, config.shift_values)

    def forward(self, x, states, mask, in_document):
        """x (B, t, C), in G groups -> (B, t, C)

        states (B, G, K, 2m, C) of the neighbors of each group, times their gates
        mask (B G, 1, 1, K 2m), False: the chunk has fewer neighbors
        in_document (B, t, 1), False: the token is of another document than the chunk"""
        # a group begins with the last token of a chunk: a zero precedes the first chunk, zeros
        # complete the last group
        groups = in_chunks(F.pad(x, (0, 0, 1, self.m - 1)), self.m)         # (B, G, m, C)
        y = self.attention(self.norm(groups), states, self.m - 1, mask).flatten(1, 2)
        return y[:, 1:1 + in_document.size(1)] * in_document                # (B, t, C)


class Block(nn.Module):
    """One pre-norm Transformer layer; returns its keys and values too, for streaming. The compared
    systems have another `attend`, whose inputs are `begins`."""
    def __init__(self, config, cross_attends=False):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd)
        self.attention = SelfAttention(config)
        self.norm2 = RMSNorm(config.n_embd)
        self.mlp = MLP(config)
        self.cca = ChunkedCrossAttention(config) if cross_attends else None
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, z, past, inputs):
        return self.attention(z, past)

    def forward(self, x, past, inputs=None):
        y, past = self.attend(self.norm1(x), past, inputs)
        x = x + self.dropout(y)
        if self.cca and inputs:
            x = x + self.dropout(self.cca(x, *inputs))
        return x + self.dropout(self.mlp(self.norm2(x))), past


def rank_of(scores):
    """0 for the highest of scores (..., n), 1 for the next, ...; the first of equals is higher"""
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

    # λ_lj is 0 unless s_t(l) > s_t(j): a swap changes DCG by the gains' difference times that of
    # the discounts. Pairs with a chunk that is not permitted: as l its gain is 0, as j the hinge is
    # 0 (s_q = -1e9)
    weight = differences(gain).relu() * differences(discount).abs()         # λ_lj IDCG
    hinge = (tau - differences(s_q.clamp(min=-1e9))).relu()                 # (B, N, N, N)
    loss = (weight * hinge).sum((2, 3)) / ideal.sum(2).clamp(min=1e-9)

    # NDCG of the first 20
    dcg = (gain * discount * (rank <= 20)).sum(2)
    ndcg = dcg / ideal[..., :20].sum(2).clamp(min=1e-9)
    return loss, ndcg


# --------------------------------------------------------------------------------------------------
# the model
# Memory of a text with M whole chunks: what can be retrieved, and what the last n chunks, a window
# or more, have retrieved
#     last       (B, 1, m, C)      states of the last chunk, which lacks its next one
#     joined     (B, M, 2m, C)     row j + 1: of chunks j and j + 1; row 0: zeros
#     keys       (B, M, C)         of all chunks; RETRO: (B, M, V)
#     chosen     (B, n, K)         the numbers j of neighbors, -1: none
#     neighbors  (B, n, K, 2m, C)  their states
#     gates      (B, n, K)         their weights; valid for the last n - window_chunks + 1 chunks,
#                                  as the others lack a part of their window
# State: what a stream keeps of a text
#     past       list              of each layer, keys and values of the unfinished block and the
#                                  one before, up to the last whole chunk
#     unfinished (B, < m)          tokens of the unfinished chunk
#     memory     Memory
Memory = namedtuple('Memory', 'last joined keys chosen neighbors gates')
State = namedtuple('State', 'past unfinished memory')


class RPT(nn.Module):
    """A sliding-window LM whose upper layers attend to chunks that its lower layers retrieve."""
    PIECE = 2048                        # tokens of a text that are encoded at once
    NOT_TAUGHT = -2                     # in place of a teacher's neighbors: the model chooses

    def __init__(self, config):
        super().__init__()
        seed = torch.randint(2 ** 48, (), device='cpu').item()              # of the weights

        # the last n_cca of the upper layers cross-attend
        n_lower = config.n_layer // 2
        n_upper = config.n_layer - n_lower
        n_cca = config.n_cca or n_upper
        retrieves = config.retriever != 'none'

        # the decoder
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)     # also the output's
        self.lower = nn.ModuleList(Block(config) for _ in range(n_lower))
        self.upper = nn.ModuleList(Block(config, retrieves and i >= n_upper - n_cca)
                                   for i in range(n_upper))

        # compared systems: Griffin has as many recurrent layers as would cross-attend, after the
        # others. Others have a memory in one layer (Block-Recurrent's paper: the tenth of twelve)
        if config.memory == 'lru':
            self.upper.extend(RecurrentLayer(config) for _ in range(n_cca))
        if config.memory == 'knn':
            self.upper[n_upper // 2] = MemorizingBlock(config)
        if config.memory == 'state':
            self.upper[n_upper // 2] = StateBlock(config)

        # retrieval: learned, trained before (dense), by BM25 with the idf of the corpus, or none
        self.retriever = Retriever(config) if config.retriever in ('sem', 'lex') else None
        self.dense = None
        if config.retriever in ('dpr', 'contriever'):
            self.dense = nn.Sequential(OrderedDict(
                embedding=nn.Embedding(config.vocab_size, config.n_embd),
                retriever=Retriever(config))).requires_grad_(False)
            self.dense.register_buffer('is_trained', torch.zeros(()))       # see setup
        if config.retriever == 'bm25':
            self.register_buffer('idf', torch.zeros(config.vocab_size))     # see setup
        self.neighbor_encoder = NeighborEncoder(config) if retrieves else None
        self.norm = RMSNorm(config.n_embd)                                  # of the output
        self.way = next(iter(self.ways()))

        # GPT-2's initial weights, for width C. The seed of a matrix depends on its name, so that
        # what different models share begins equal
        for name, p in self.named_parameters():
            if p.dim() == 2:
                torch.manual_seed(seed + zlib.crc32(name.encode()))
                std = 0.02 * math.sqrt(768 / config.n_embd)
                if name.endswith('proj.weight'):            # of what layers add to x
                    std /= math.sqrt(2 * config.n_layer)
                nn.init.normal_(p, std=std)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def empty_state(self, tokens):
        """The state before the tokens (B, t) of new texts"""
        config, B = self.config, len(tokens)
        neighbor = 2 * config.chunk_size, config.n_embd         # (2m, C)
        slots = B, config.window_chunks, config.n_neighbors     # (B, n, K)
        zeros = self.embedding.weight.new_zeros
        memory = Memory(
            last=zeros(0),                              # torch.cat skips it
            joined=zeros(B, 1, *neighbor),              # row 0
            keys=zeros(0),
            chosen=zeros(slots).long() - 1,             # none
            neighbors=zeros(*slots, *neighbor),
            gates=zeros(slots))
        return State([None] * len(self.lower + self.upper), tokens[:, :0], memory)

    def retrieve(self, x, tokens, doc, teacher, memory):
        """§3.1, for N whole chunks: x (B, t, C) of the lower layers, tokens (B, t), doc (B, N) of
        chunks -> the new memory and s_q (B, N, M), -inf where a chunk may not be retrieved"""
        m, window_chunks = self.config.chunk_size, self.config.window_chunks
        states = chunk_states = in_chunks(x, m)                             # (B, N, m, C)
        if self.retriever:
            states, query, key = self.retriever(chunk_states)
        elif self.dense:
            _, query, key = self.dense(in_chunks(tokens, m))
        else:
            query, key = bm25_vectors(in_chunks(tokens, m), self.idf)

        # what can be retrieved: each chunk and the next one, by the key of the first
        states = torch.cat([memory.last, states], 1)                    # N or N + 1 chunks
        joined = torch.cat([memory.joined, self.neighbor_encoder.join(states)], 1)
        keys = torch.cat([memory.keys, key], 1)                         # (B, M, C)

        # which K chunks each chunk retrieves
        first = keys.size(1) - query.size(1)            # the number of the first of these chunks
        s_q = product(query, keys.mT) / query.size(2) ** 0.5                # (B, N, M)
        doc = F.pad(doc, (first, 0))                    # of a stream: its chunks have doc 0
        mask = permitted(doc, window_chunks, first)
        if self.config.retriever == 'bm25':
            mask = mask & (s_q > 0)                     # RETRO: only chunks with a common term
        scores = s_q
        if self.way == 'shuffled':
            scores = pseudorandom(s_q.size(2), first, x.device)             # (N, M)
        elif self.config.retriever != 'bm25' and not self.training:
            # the scores of a chunk that recurs differ by errors of rounding, which depend on the
            # pieces in which a text is read: rounded to 1 / 256 they are ties
            scores = (256 * s_q).round()
        chosen = top(scores, mask, self.config.n_neighbors)                 # (B, N, K)
        if teacher is not None:
            chosen = chosen.where(teacher == self.NOT_TAUGHT, teacher)

        # their states and gates; the gates depend on neighbors of a window of chunks before
        neighbors = self.neighbor_encoder(joined, chosen, chunk_states)     # (B, N, K, 2m, C)
        neighbors = torch.cat([memory.neighbors[:, -window_chunks:], neighbors], 1)
        chosen = torch.cat([memory.chosen[:, -window_chunks:], chosen], 1)
        gates = self.neighbor_encoder.gates(neighbors, chosen)
        memory = Memory(states[:, -1:], joined, keys, chosen, neighbors, gates)
        return memory, s_q.where(mask, -math.inf)

    def for_groups(self, memory, doc, chunk_doc):
        """What ChunkedCrossAttention needs: states, mask, in_document. doc (B, t) of tokens,
        chunk_doc (B, N)"""
        m = self.config.chunk_size
        G = chunk_doc.size(1) + 1                       # group 0 is of the chunk before these N
        states = memory.neighbors[:, -G:] * memory.gates[:, -G:, :, None, None]
        valid = (memory.chosen[:, -G:] >= 0).flatten(0, 1)                  # (B G, K)
        mask = valid.repeat_interleave(2 * m, 1)                            # (B G, K 2m)

        # the first token of group 0 is that before these t
        group_doc = F.pad(chunk_doc, (1, 0)).repeat_interleave(m, 1)        # (B, G m)
        in_document = group_doc[:, 1:1 + doc.size(1)] == doc                # (B, t)
        return states, mask[:, None, None], in_document[:, :, None]

    def encode(self, tokens, doc=None, teacher=None, state=None):
        """Tokens (B, t) that continue the text of `state`, or begin a text. doc (B, t): their
        documents, if several. teacher (B, N, K): chunks to retrieve in training, -1: none,
        NOT_TAUGHT: those with the highest s_q
        -> f (B, t, C), the new state, s_q (B, N, M) or None"""
        m = self.config.chunk_size
        past, unfinished, memory = state or self.empty_state(tokens)
        past = list(past)                               # a state can be continued more than once

        # doc is only given without a state, so then nothing is unfinished
        tokens = torch.cat([unfinished, tokens], 1)

        # the lower layers
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        for i, block in enumerate(self.lower):
            x, past[i] = block(x, past[i])

        # each whole chunk retrieves; the tokens after it attend to its neighbors
        end = tokens.size(1) // m * m                                   # of the whole chunks
        cca_inputs = s_q = None
        if doc is None:
            doc = torch.zeros_like(tokens)
        if self.config.memory != 'none':                                # compared systems
            cca_inputs = F.pad(doc.diff() != 0, (1, 0))
            cca_inputs |= self.config.memory == 'knn' and self.way == 'off'
        elif self.way != 'off':
            chunk_doc = doc_of_chunks(doc, m)                               # (B, N)
            if end > 0:
                memory, s_q = self.retrieve(x, tokens, chunk_doc, teacher, memory)
            cca_inputs = self.for_groups(memory, doc, chunk_doc)

        # the upper layers
        for i, block in enumerate(self.upper, len(self.lower)):
            x, past[i] = block(x, past[i], cca_inputs)
        state = State(past, tokens[:, end:], memory)
        return self.norm(x[:, unfinished.size(1):]), state, s_q

    def logits(self, f):
        """f (..., C) -> (..., V) fp32"""
        return product(f, self.embedding.weight.T)

    def schedule(self, progress):
        """-> chance that the teacher chooses (§3.4); α and τ of L_ret (§3.3)"""
        config = self.config
        annealed = 0.5 * (1 + math.cos(math.pi * min(1, progress / 0.9)))
        chances = {'annealed': annealed, 'always': 1, 'never': 0}
        alpha = config.alpha * min(1, progress / 0.2)
        tau = 1 + (config.tau - 1) * progress
        return chances[config.teacher], alpha, tau

    def forward(self, batch, progress):
        """A batch (target -1: not scored; in training a TaughtBatch), step / max_steps
        -> L_LM + α L_ret (), what to log"""
        chance, alpha, tau = self.schedule(progress)
        s_t = teacher = None
        if self.training:
            torch.manual_seed(batch.seed)                   # for scheduled sampling, dropout
            s_t = getattr(batch, 'target_scores', None)                     # (B, N, N)
        if s_t is not None:
            # the K chunks that help most; scheduled sampling (§3.4): each chunk has them with this
            # chance. In RETRO all have them
            teacher = top(s_t, s_t > 0, self.config.n_neighbors)            # (B, N, K)
            if self.retriever:
                student = torch.rand_like(s_t[..., :1]) >= chance           # (B, N, 1)
                teacher = teacher.masked_fill(student, self.NOT_TAUGHT)
        f, _, s_q = self.encode(batch.tokens, batch.doc, teacher)
        loss = cross_entropy(f, self.embedding.weight, batch.targets)
        if s_t is None or not self.retriever:
            return loss, {}

        # means over the chunks with a positive; `ranked` of them are in a micro-batch of the step
        of_chunks = ranking_loss(s_q, s_t, tau)                             # 2 x (B, N)
        ret_loss, ndcg = (x.sum() / batch.ranked for x in of_chunks)
        log = dict(lm_loss=loss, ret_loss=ret_loss, ndcg=ndcg,
                   ranked=(s_t > 0).any(2).sum())
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
        for piece in tokens.split(self.PIECE, 1):
            if piece.numel():
                state = self.encode(piece, state=state)[1]
        return state

    def ways(self):
        """What eval.py compares: {name: attributes of the model to set}"""
        names = 'on shuffled off' if self.neighbor_encoder else 'off'
        if self.config.memory == 'knn':
            names = 'on off'
        return {name: {'way': name} for name in names.split()}

    def trace(self, tokens, t, state=None):
        """What is retrieved to predict token t + 1 of tokens (n,): [(gate, tokens, start, end)],
        largest gate first. state: of read(tokens[None, :t]), computed if None"""
        state = state or self.read(tokens[None, :t])
        memory = self.read(tokens[None, t:t + 1], state).memory

        # the last whole chunk has retrieved chunks j and j + 1
        m = self.config.chunk_size
        pairs = zip(memory.gates[0, -1].tolist(), memory.chosen[0, -1].tolist())
        return sorted([(gate, tokens, j * m, (j + 2) * m) for gate, j in pairs if j >= 0],
                      key=lambda item: -item[0])


# --------------------------------------------------------------------------------------------------
# compared systems: --retriever dpr, contriever
def contrast(dense, chunks, doc, config, idf):
    """The loss of RPT.dense, a Retriever that sees the tokens of a chunk alone. It is trained
    first, then fixed: softmax_j(s_q(j)) over all other chunks j of a micro-batch is to be large at

        dpr         the first chunk by BM25 for c_i and c_{i+1} (RPT, App. C)
        contriever  the chunk before c_i, as two spans of a document are alike (RPT_contriever of
                    DRT; Izacard et al. 2022)

    chunks (B, N, m), doc (B, N) -> (), 0 if no chunk has a positive"""
    # the positives of each chunk of a sequence: (B, N, N)
    if config.retriever == 'dpr':
        positives = bm25_candidates(chunks, doc, config.window_chunks, 1, idf)
    else:
        positives = permitted(doc, 1) & ~permitted(doc, 2)
    positives = torch.block_diag(*positives)                                # (B N, B N)

    _, query, key = dense(chunks)                                           # (B, N, C)
    s_q = query.flatten(0, 1) @ key.flatten(0, 1).T / key.size(2) ** 0.5    # (B N, B N)
    log_p = s_q.fill_diagonal_(-1e9).log_softmax(1)
    return -(log_p * positives).sum() / positives.sum().clamp(min=1)


def train_dense(dense, batches, config, idf, progress):
    """Trains RPT.dense on the first micro-batches of a run."""
    device = dense.embedding.weight.device
    optimizer = torch.optim.AdamW(dense.requires_grad_().parameters(), lr=1e-3)
    for g in progress(range(config.reference_steps), 'training the retriever'):
        batch = batches[g]
        chunks = in_chunks(batch.tokens, config.chunk_size).to(device)
        doc = doc_of_chunks(batch.doc, config.chunk_size).to(device)
        optimizer.zero_grad()
        contrast(dense, chunks, doc, config, idf.to(device)).backward()
        optimizer.step()
    dense.requires_grad_(False)
    dense.is_trained.fill_(1)


# --------------------------------------------------------------------------------------------------
# compared systems: --memory knn, lru, state
# A layer of the upper half is replaced, or layers are added to it. In place of cross-attention's
# inputs they get `begins` (B, t), True: the token begins another document. A memory is of one
# document; self-attention and the convolution are not. A chunk is half a window, a block of
# self-attention: pieces of a stream begin with a block
class MemorizingBlock(Block):
    """Memorizing Transformer (Wu et al. 2022, §3): each head also attends to tokens that have left
    the window, to the n_nearest ones whose keys are most similar to its query:

        y = (1 - g) y_window + g Σ_j softmax_j(s cosine(q, k_j)) v_j,   g = σ(b)

    b and s are learned for each head; no gradient reaches k_j and v_j. With shift_values (ours) q
    is the token's own key, as queries learn to match keys of the window only, and v_j is that of
    the token after j. In training the memory is of the sequence (paper: of those before it, too).
    """
    def __init__(self, config):
        super().__init__(config)
        self.config = config
        self.gate = nn.Parameter(torch.zeros(config.n_head))                # b
        self.scale = nn.Parameter(torch.full((config.n_head,), 10.0))       # s

    def attend(self, z, past, begins):
        """z (B, t, C), past (B, P, 2, H, D): of the last block and, before it, the memory, in whole
        blocks -> what the layer adds to x (B, t, C), the past of the next piece"""
        size, block = self.config.memory_size, self.attention.block
        y, q, kv = self.attention.heads(z, past)
        P = kv.size(1) - z.size(1)

        # queries, and keys and values of all tokens
        k, v = kv.detach().unbind(2)                                        # (B, P + t, H, D)
        if self.config.shift_values:
            q = kv[:, P:, 0]
            v = v.roll(-1, 1)
        q = self.scale[:, None] * F.normalize(q, dim=3)                     # (B, t, H, D)
        k = F.normalize(k, dim=3)

        # each block of tokens i reads tokens j of its document that have left its window
        doc = begins.cumsum(1)                                              # (B, t)
        doc_j = F.pad(doc, (P, 0))                                          # (B, P + t)
        outputs = []
        for start in range(0, z.size(1), block):
            i = slice(start, start + block)
            left = max(0, P + start - block)
            j = slice(max(0, left - size), left)
            mask = doc[:, None, i, None] == doc_j[:, None, None, j]         # (B, 1, block, n)
            s_cos = torch.einsum('bihd, bjhd -> bhij', q[:, i], k[:, j])
            s_cos = s_cos.masked_fill(~mask, -1e9)
            lowest = s_cos.topk(
                min(s_cos.size(3), self.config.n_nearest)).values[..., -1:]
            p = s_cos.masked_fill(s_cos < lowest, -math.inf).softmax(3)     # (B, H, block, n)
            memory = torch.einsum('bhij, bjhd -> bihd', p, v[:, j])

            # g (B, block, H, 1) is 0 where no token is found
            g = self.gate.sigmoid()[:, None] * mask.any(3).mT[..., None]
            outputs.append((1 - g) * y[:, i]
                           + g * memory)

        y = torch.cat(outputs, 1)                                           # (B, t, H, D)
        return self.attention.proj(y.flatten(2)), self.attention.kept(kv, size)


def scan(a, b):
    """h_t = a_t h_{t-1} + b_t with h_{-1} = 0, in log2 T steps: after n = 1, 2, 4, ... b_t has the
    terms of the last n tokens, and a_t is the product of theirs. a, b (..., T) -> (..., T)"""
    n = 1
    while n < b.size(-1):
        b = b + a * F.pad(b, (n, -n))
        a = a * F.pad(a, (n, -n))
        n *= 2
    return b


class RecurrentLayer(nn.Module):
    """Griffin's recurrent block (De et al. 2024, §2.3, §2.4). With z = norm(x), u = conv(W_u z):

        y   = x + W (gelu(W_y z) h)
        h_t = a_t h_{t-1} + sqrt(1 - a_t²) i_t u_t
        a_t = exp(-8 r_t softplus(Λ)),   r_t = σ(W_r u_t + b_r),   i_t = σ(W_i u_t + b_i)

    W_r and W_i are block-diagonal. As in RPT's Table 2, h has 2C channels, conv 3 tokens. Where
    r_t = 1, a_t is 0.9 to 0.999 at first, log(1 - a_t) evenly spaced (paper: a_t uniform)."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        R = 2 * C
        self.m = config.chunk_size
        self.norm = RMSNorm(C)
        self.inputs = nn.Linear(C, 2 * R)                                   # W_y, W_u
        self.conv = nn.Conv1d(R, R, 3, groups=R)
        self.gates = nn.Conv1d(R, 2 * R, 1, groups=config.n_head)           # of r and i in turn
        self.decay = nn.Parameter(torch.linspace(-4.3, -9, R))              # Λ
        self.proj = nn.Linear(R, C)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past, begins):
        """x (B, t, C), past: the last two inputs of conv (B, R, 2) and h (B, R, 1), None at the
        beginning of a text -> y (B, t, C), the past of the next piece"""
        gate, z = self.inputs(self.norm(x)).mT.chunk(2, 1)                  # 2 x (B, R, t)
        if past is None:
            past = z.new_zeros(*z.shape[:2], 3).split((2, 1), 2)
        z = torch.cat([past[0], z], 2)                                      # (B, R, 2 + t)
        u = self.conv(z)                                                    # (B, R, t)

        # in fp32, with a clamp, as the derivative of sqrt at 0 is infinite
        gates = fp32(self.gates(u)).sigmoid()                               # (B, 2R, t)
        r, i = gates.unflatten(1, (-1, 2)).unbind(2)                        # 2 x (B, R, t)
        a = torch.exp(-8 * r * F.softplus(self.decay)[:, None])
        b = (1 - a * a).clamp(min=1e-6).sqrt() * i * u

        # a document does not continue h; the sum begins with h of the past
        a = F.pad(a.masked_fill(begins[:, None], 0), (1, 0))
        h = scan(a, torch.cat([past[1], b], 2))                             # (B, R, 1 + t)
        y = self.proj((F.gelu(gate) * h[..., 1:]).mT)
        end = x.size(1) // self.m * self.m
        return x + self.dropout(y), (z[..., end:end + 2], h[..., end:end + 1])


class StateBlock(Block):
    """Block-Recurrent Transformer (Hutchins et al. 2022, §3; configuration skip, gate fixed). The
    tokens of a block attend to the window and, apart from it, to the states s. Then s becomes

        g s + (1 - g) (W [s attends to s, s attends to the tokens of the block] + b)

    g = σ of a parameter. In a block in which a document begins and after it, s is the initial one.
    Ours: blocks of half a window (paper: a window); the states begin as the vectors that tell them
    apart; keys and values of tokens, for s, are not the window's."""
    def __init__(self, config):
        super().__init__(config)
        C = config.n_embd
        self.initial = nn.Parameter(torch.randn(1, config.n_states, C))
        self.norm = RMSNorm(C)
        self.states = Linear(C, 4 * C)       # keys, values, queries for both
        self.tokens = Linear(C, 3 * C)       # keys, values, queries for s
        self.state_proj = Linear(C, C)
        self.mix = nn.Linear(2 * C, C)                      # W, b
        self.gate = nn.Parameter(torch.randn(C))

    def attend(self, z, past, begins):
        """As above; past also has s (B, n_states, C)."""
        past, s = past or (None, self.initial)
        y, past = self.attention(z, past)
        H, block = self.attention.n_head, self.attention.block
        of_tokens = self.tokens(z).unflatten(2, (3, H, -1))                 # (B, t, 3, H, D)
        reads = []
        for of_block, begin in zip(of_tokens.split(block, 1), begins.split(block, 1)):
            # the tokens attend to the states
            continues = ~begin.any(1)[:, None, None]                        # (B, 1, 1)
            s = s.where(continues, self.initial)
            of_states = self.states(self.norm(s) + self.initial)            # (B, n_states, 4C)
            k, v, q, q_tokens = of_states.unflatten(2, (4, H, -1)).unbind(2)
            k_tokens, v_tokens, q_states = of_block.unbind(2)               # (B, block, H, D)
            reads.append(softmax_attention(q_states, k, v))

            # a whole block updates the states
            if of_block.size(1) == block:
                from_states = softmax_attention(q, k, v)                    # (B, n_states, H, D)
                from_tokens = softmax_attention(q_tokens, k_tokens, v_tokens)
                both = torch.cat([from_states, from_tokens], 3)             # (B, n_states, H, 2D)
                new = self.mix(both.flatten(2))
                g = self.gate.sigmoid()
                s = g * s + (1 - g) * new                                   # (B, n_states, C)
                s = s.where(continues, self.initial)
        return y + self.state_proj(torch.cat(reads, 1).flatten(2)), (past, s)


COMPILED = (Block, NeighborEncoder, RecurrentLayer)     # layers that train.py compiles


# --------------------------------------------------------------------------------------------------
# supervision: what RPT learns from is computed before the training, by setup
VERSION = 1     # of the scores on disk: raise it when a change of this section changes a score
RANK = int(os.getenv('RANK', 0))                # number of this process
WORLD = int(os.getenv('WORLD_SIZE', 1))         # number of processes


def corpus_idf(corpus, config):
    """idf (V,) of the chunks of a corpus, as in bm25.py"""
    tokens, m = corpus.train.tokens, config.chunk_size
    n = len(tokens) // m
    df = np.zeros(config.vocab_size)
    for chunk in tokens[:n * m].reshape(n, m):
        df[chunk] += 1                                                      # a repeated id: once
    return torch.from_numpy(idf_lucene(n, df))


def bm25_candidates(chunks, doc, window_chunks, J, idf):
    """§3.2: the J chunks most similar to chunk i and its target, c_i and c_{i+1}, by BM25. Their
    score is s_t of RPT-Lex: 1 - r / J at rank r = 0, 1, ... (ours); that of all others is 0.
    chunks (..., N, m), doc (..., N) -> (..., N, N)"""
    # chunks c_i and c_{i+1} are one query: their occurrences are added
    tf, keys = bm25_vectors(chunks, idf)                                    # (..., N, V)
    scores = (tf + tf.roll(-1, -2)) @ keys.mT                               # (..., N, N)

    # the last chunk of a document has no target, so that it has no candidates
    has_target = F.pad(doc.diff() == 0, (0, 1))                             # (..., N)
    mask = permitted(doc, window_chunks) & has_target[..., None] & (scores > 0)
    rank = rank_of(scores * mask)                                           # r = 0, 1, ...
    return (1 - rank / J).relu() * mask


def target_log_p(reference, prompts, m):
    """Mean of log P of the last m tokens of prompts (n, 4m) -> (n,). As small LMs hardly copy from
    their context, P is a mixture with a continuous cache (Grave et al. 2017):

        P(w) = (1 - λ) P_LM(w) + λ P_cache(w)
        P_cache(w) = Σ_{u: token u + 1 is w} softmax_u(f · f_u / sqrt(C))

    f is the state that predicts w, f_u are those before it."""
    lam = reference.config.reference_cache                                  # λ
    states = reference.encode(prompts)[0]                                   # (n, 4m, C)
    f = states[:, -m - 1:-1]                                                # (n, m, C)
    w = prompts[:, -m:, None]                                               # (n, m, 1)

    # P_cache. Query a = 0 ... m - 1 is the state of position 3m - 1 + a; it may use
    # u < 3m - 1 + a, whose next token u + 1 is known
    scores = product(f, states[:, :-1].mT) / f.size(2) ** 0.5               # (n, m, 4m - 1)
    later = torch.full_like(scores, -math.inf).triu(3 * m - 1)              # 0 for those it may use
    p_u = (scores + later).softmax(2)
    follows = prompts[:, None, 1:] == w                                     # (n, m, 4m - 1)
    p_cache = (p_u * follows).sum(2)                                        # (n, m)

    # in logarithms, as P_LM can be 0 in fp32
    log_lm = reference.logits(f).log_softmax(2).gather(2, w).squeeze(2)
    log_p = torch.logaddexp(log_lm + math.log(1 - lam), (lam * p_cache).log())
    return log_p.mean(1)


def target_scores(reference, chunks, candidates):
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
        log_p[i, j] = target_log_p(reference, prompts.flatten(1), m)

    baseline = F.pad(log_p.diagonal(-2), (2, 0))                            # (N,)
    return (log_p - baseline[:, None]) * candidates


def reference_lm(config, train_config, corpus, load_reference):
    """The reference LM, of --reference or trained first; its window has the four chunks of s_t."""
    path, window = config.reference, 4 * config.chunk_size
    steps = min(config.reference_steps, train_config.max_steps)
    print(f'first the reference LM, which tells which chunks help: {path or f"{steps} steps"}')

    # half as deep as RPT, without retrieval
    _, reference, tokenizer = load_reference(
        path,
        replace(config, n_layer=max(1, config.n_layer // 2), n_cca=0, reference='',
                window=max(config.window, window), retriever='none'),
        replace(train_config, out=f'{Path(train_config.out)}-reference', resume='auto', init='',
                max_steps=steps))

    # a file of --reference can be of any run
    fits = isinstance(reference, RPT) and reference.config.window >= window
    if not fits or reference.neighbor_encoder or tokenizer.ids != corpus.tokenizer.ids:
        raise SystemExit(f'--reference {path}: no RPT of retriever none with this tokenizer and '
                         f'window >= {window}')
    reference.config.reference_cache = config.reference_cache
    return reference.eval().requires_grad_(False)


def sequence_scores(path, chunks, doc, config, idf, reference):
    """s_t (N, N) of a sequence, stored in the file `path`: for every n-th chunk by the reference
    LM, else as in RPT-Lex. chunks (N, m), doc (N,)"""
    try:
        s_t = np.load(path)
        assert np.isfinite(s_t).all()
        return torch.from_numpy(s_t)
    except Exception:       # there is no file, or it is broken, which can raise anything
        pass

    s_t = bm25_candidates(chunks, doc, config.window_chunks, config.n_candidates, idf)
    if reference is not None:
        candidates = s_t > 0
        candidates[torch.arange(len(doc)) % config.score_every > 0] = False
        s_t = target_scores(
            reference, chunks, candidates).cpu().where(candidates, s_t)
    temporary = path.with_name(f'{os.getpid()}.tmp.npy')
    np.save(temporary, s_t.float())
    temporary.replace(path)
    return s_t


# data.Batch, s_t (B, N, N), and `ranked`, the number of chunks with a positive in a micro-batch:
# the mean over those of the step, so that each chunk of a step has the same weight in L_ret
TaughtBatch = namedtuple('TaughtBatch', 'tokens targets doc seed target_scores ranked')


def setup(model, corpus, batches, train_config, autocast, load_reference, progress):
    """Computes s_t of all sequences of the run, each process its share, and stores it in files. The
    name of their folder is a hash of all that they depend on: runs that differ in other settings
    share them. -> attach(batch, g), which adds s_t to batch, the micro-batch number g;
    None: there is no s_t"""
    config, m = model.config, model.config.chunk_size
    if config.retriever == 'none':
        return

    # a chunk retrieves chunks before its window, for its target: the chunk after it
    needed = config.window + 2 * m
    longest = np.diff(corpus.train.offsets).max()
    if longest < needed and not corpus.hops:
        print(f'warning: nothing can be retrieved: the longest document has {longest} tokens, less '
              f'than {needed}. Try longer documents or smaller --window and --chunk-size')

    # the teacher: BM25, or a reference LM which scores the candidates of BM25
    idf = corpus_idf(corpus, config)
    if config.retriever == 'bm25':
        model.idf.copy_(idf)
    if model.dense:
        if RANK == 0 and not model.dense.is_trained:
            print(f'first the retriever, {config.reference_steps} steps; then RPT')
            train_dense(model.dense, batches, config, idf, progress)
        if WORLD > 1:
            for x in model.dense.state_dict().values():
                torch.distributed.broadcast(x, 0)
        return

    facts = [VERSION, corpus.fingerprint,
             corpus.hops, corpus.hops and train_config.seed,                # of the needles
             train_config.dtype, m, config.window_chunks, config.n_candidates,
             config.score_every, config.reference_cache]
    digest = hashlib.sha256(repr(facts).encode())
    reference = None
    if config.retriever == 'sem':
        reference = reference_lm(config, train_config, corpus, load_reference)
        for p in reference.parameters():
            digest.update(p.numpy())
        reference.to(model.embedding.weight.device)
        # encode runs under autocast; target_log_p outside it, so scores remain fp32
        reference.encode = autocast()(reference.encode)

    # the folder of the scores, and how many are computed
    folder = corpus.folder / f'scores-{digest.hexdigest()[:16]}'
    folder.mkdir(exist_ok=True)
    n = train_config.tokens_per_step // (batches.B * batches.T)             # micro-batches per step
    total = n * train_config.max_steps

    @functools.lru_cache(n)                     # for attach, which needs all n of a step each time
    def scores_of(g):
        """s_t (B, N, N) of micro-batch g. That of a sequence is computed only once."""
        batch = batches[g]
        chunks = in_chunks(batch.tokens, m)                                 # (B, N, m)
        doc = doc_of_chunks(batch.doc, m)                                   # (B, N)
        s_t = torch.zeros(*doc.shape, doc.size(1))
        for b, row in enumerate(batches.rows(g)):
            path = folder / f'{batch.tokens.size(1)}-{row}.npy'
            s_t[b] = sequence_scores(path, chunks[b], doc[b], config, idf, reference)
        return s_t

    # compute the scores
    print(f'scores of {total * batches.B} sequences in {folder}; then RPT')
    for g in progress(range(RANK, total, WORLD), 'scores', quiet=RANK > 0):
        scores_of(g)

    def attach(batch, g):
        first = g // n * n                                                  # of the step
        scores = [scores_of(first + i) for i in range(n)]
        ranked = sum((s_t > 0).any(2).sum().item() for s_t in scores)
        return TaughtBatch(*batch, scores[g % n], max(1, ranked) / n)

    return attach


# --------------------------------------------------------------------------------------------------
# evaluation
def ranking_measures(s_q, s_t):
    """Of the order by s_q (n, N, N): {name: (n, N), nan: the chunk has no positive, s_t > 0}"""
    rank = rank_of(s_q)                                                     # (n, N, N)
    positive = s_t > 0
    n_positives = positive.sum(2)                                           # (n, N)
    one = n_positives / n_positives                     # 1, or 0 / 0 = nan: without a positive

    # NDCG of one text at a time, as a text takes (N, N, N)
    ndcg = [ranking_loss(q[None], t[None], tau=1)[1] for q, t in zip(s_q, s_t)]
    return {'precision@2': one * (positive & (rank < 2)).sum(2) / 2,
            'recall@10': (positive & (rank < 10)).sum(2) / n_positives,
            'ndcg@20': one * torch.cat(ndcg)}


def target_losses(model, texts, chosen):
    """Nats per token of the targets of chunks 0 to N - 2 of texts (n, N m), of which each has
    retrieved `chosen` (n, N, K) -> (n, N - 1)"""
    m, K = model.config.chunk_size, model.config.n_neighbors
    model.config.n_neighbors = chosen.size(2)
    nats = []
    for tokens, neighbors in zip(texts.split(1),
                                 chosen.split(1)):
        f = model.encode(tokens, teacher=neighbors)[0]
        logits = model.logits(f[:, m - 1:-1])                               # (1, N m - m, V)
        nats.append(F.cross_entropy(logits.mT, tokens[:, m:],
                                    reduction='none'))
    model.config.n_neighbors = K
    return in_chunks(torch.cat(nats), m).mean(2)


@torch.no_grad()
def ranks(runs, args):
    """Table 3: are the chunks that help ranked first? By chance, recency, BM25 and each run but the
    last, which is the reference LM; its s_t is positive if a chunk helps.

    Table 2, Figures 4 and 6: the loss of each run when it reads the first K chunks of a ranking, of
    its s_q, of another run's (Table 4) or of s_t (the oracle); for K = 2, what reading them gains
    where a positive is among them, and elsewhere; the different ids that the first one shares with
    the chunk and its target. Figure 5: the best s_t of the first k by BM25, as in training"""
    *rankers, reference = runs
    config = runs[0].model.config
    m = config.chunk_size
    N = config.block_size // m
    texts = torch.cat([in_chunks(x[None], N * m)[0] for x in runs[0].documents])

    # the last run must be able to score what each of the others retrieves
    kinds = {(run.corpus.fingerprint, run.model.config.chunk_size) for run in runs}
    retrieve = rankers and all(run.model.neighbor_encoder for run in rankers)
    is_lm = not reference.model.neighbor_encoder and reference.model.config.window_chunks >= 4
    if not (len(texts) and retrieve and is_lm and len(kinds) == 1):
        raise SystemExit('ranks: runs that retrieve, then their reference LM (window: 4 chunks), '
                         f'of one tokenizer and chunk size; a document of {N * m} tokens or more')

    # at most 16 sequences, evenly spread
    texts = texts[::math.ceil(len(texts) / 16)]                             # (n, T)
    chunks = in_chunks(texts, m)                                            # (n, N, m)

    # s_t of all chunks that each of the runs may retrieve
    window_chunks = max(run.model.config.window_chunks for run in rankers)
    doc = texts.new_zeros(N)                                                # of one document
    mask = permitted(doc, window_chunks)                                    # (N, N)
    mask[-1] = False                                                        # it has no target
    s_t = torch.stack([target_scores(reference.model, x, mask) for x in chunks])    # (n, N, N)

    # s_q by which the chunks are ranked
    idf = corpus_idf(runs[0].corpus, config).to(s_t)
    tf, keys = bm25_vectors(chunks, idf)
    torch.manual_seed(args.seed)
    rankings = {'chance': torch.rand_like(s_t), 'latest first': torch.arange(N).expand_as(s_t),
                'BM25': tf @ keys.mT}
    for run in rankers:
        rankings[run.name] = run.model.encode(texts)[2]                     # (n, N, N)

    result = {}

    def report(name, row):
        """Prints and stores means over the chunks that may retrieve and have a target, of a row
        {column: (n, N), nan: not counted}."""
        result[name] = {key: x[:, window_chunks:N - 1].nanmean().item()
                        for key, x in row.items()}
        print(f'{name:24}', *(f'{key} {x:.4f}' for key, x in result[name].items()))

    for name, s_q in rankings.items():
        s_q = s_q.to(s_t).where(mask, -math.inf)
        rankings[name] = s_q
        report(name, ranking_measures(s_q, s_t))

    # the best of the first k by BM25
    oracle = s_t.where(mask, -math.inf)
    rank = rank_of(bm25_candidates(chunks, doc, window_chunks, N, idf))     # (n, N, N)
    best = {f'of {k}': oracle.where(rank < k, -math.inf).amax(2)
            for k in (1, 2, 5, 20)}
    report('best s_t', best)

    # the losses of each run with the first chunks of each ranking
    terms = tf.clamp(max=1)
    shared = terms @ terms.mT                                               # (n, N, N)
    rankings['oracle'] = oracle
    for run in rankers:
        off = target_losses(run.model, texts,
                            top(s_t, mask[-1], 1))                          # they read nothing
        for name, s_q in rankings.items():
            chosen = top(s_q, mask, 4)
            row = {f'loss {K}': target_losses(run.model, texts, chosen[..., :K])
                   for K in (2, 3, 4)}
            rank = rank_of(s_q)                                             # (n, N, N)
            positive = (rank < 2) & (s_q > -math.inf) & (s_t > 0)
            missed = ~positive.any(2)[:, :-1]                               # (n, N - 1)
            gain = off - row['loss 2']
            row['gain with positive'] = gain.masked_fill(missed, math.nan)
            row['without'] = gain.where(missed, math.nan)
            row['shares'] = (shared * (rank < 1)).sum(2)
            row['with target'] = (shared.roll(-1, 1) * (rank < 1)).sum(2)
            report(f'{run.name} reads {name}', row)
    return result


TASKS = {'ranks': ranks}


# --------------------------------------------------------------------------------------------------
# a demo
def demo():
    """The source of RPTConfig, from tokens to the loss; what a chunk retrieves; of assets/rpt.pt"""
    from eval import load               # as in a notebook
    model, tokenizer = load(Path(__file__).parent / 'assets/rpt.pt')
    source = inspect.getsource(RPTConfig)
    ids = tokenizer.encode(source)[-513:].tolist()
    tokens = torch.tensor([ids])
    f, state, s_q = model.encode(tokens[:, :-1])
    loss = cross_entropy(f, model.embedding.weight, tokens[:, 1:])
    print(f"""512 tokens in chunks             (B, N, m)        {tuple(in_chunks(tokens, 32).shape)}
scores s_q of all pairs          (B, N, N)        {tuple(s_q.shape)}
neighbors: 4 empty slots, then N (B, n, K, 2m, C) {tuple(state.memory.neighbors.shape)}
their gates, 0.1 or more         (B, n, K)        {tuple(state.memory.gates.shape)}
states that predict              (B, T, C)        {tuple(f.shape)}
loss of the 512 next tokens                       {loss:.3f}
To predict what follows {tokenizer.decode(ids[480:-1])!r:.70}, it reads:""")
    for gate, _, start, end in model.trace(tokens[0], 511):
        print(f'gate {gate:.3f}  {tokenizer.decode(ids[start:end])!r:.90}')


if __name__ == '__main__':
    demo()
