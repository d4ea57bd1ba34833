"""
TRIME: a language model trained to find its next word among the contexts that it has just read.

    Zexuan Zhong, Tao Lei and Danqi Chen, "Training Language Models with Memory Augmentation",
    EMNLP 2022, arXiv:2205.12674

A Transformer predicts the next word by comparing its state with one vector per word. TRIME lets
other contexts of the batch take part: a context that was followed by "cat" is one more vector for
"cat". Both kinds of vector are in one softmax and are trained together. At test time the same
formula has memories of the current window, of the earlier document, or of a whole corpus.

Where the paper is in this file
    Eq. 1                   a language model                        Embedding
    Eq. 2, 3                local and long memory, in training      memory_mask
    Eq. 4                   external memory                         Datastore.search
    §3                      f and g                                 TRIME.encode
    §3, Eq. 5               the training objective                  TrimeLoss
    §4.1 to 4.3             segments of a micro-batch, m            batches
    §4.3                    p, a share without local memory         TRIME.training_memory
    §5.2                    the first 5% of the steps               TRIME.training_memory
    §5.2                    FAISS                                   Datastore
    App. A, Eq. 6, 8, 9     probabilities at test time              Inference
    App. A, Eq. 7           memories at test time                   TRIME.memories
    App. B, Algorithm 1     similar segments in a micro-batch       pack in data.py
    App. C                  translation                             TRIME.memories, Pairs in data.py
    App. D                  overlapping windows                     TRIME.windows
    App. E                  SRU++                                   SRUBlock, --layer sru
    Table 1, 5              which memories a model has              TRIME.prepare_eval
    Table 9                 the models                              PRESETS
    Table 13                accuracy of the datastore               datastore_accuracy
    Table 14                perplexity by frequency                 frequency in eval.py

Letters of the shape comments and formulas
    B segments    T tokens per segment    C width    H heads    D width per head    V vocabulary
    N = B T    R rows of a block    Q queries    M memories    K neighbors    L tokens of a state
    t, n any other size
    w a target word    a a cluster of words    i a query    j a memory: (c_j, x_j), a context and
    the token after it; its key is g(c_j), its value x_j. x without an index: hidden states

Where this differs from the paper, and why
    The Transformer has RMSNorm, RoPE, GELU, GPT-2's initial weights, a final norm and no biases. In
    the presets AdamW and a cosine replace NAG (247M) and the inverse square root (7M).
    In training, memories are those of the micro-batch of one process (official code, ext: of all
    processes). §4.3's m = 1 masks other segments of the same document (official code: it does not).
    Long memory is masked to the document, but its local part is not. With memory ext g is small at
    first; otherwise the words have almost no probability in the first steps, and learn more slowly.
    At test time each context is in memory once (official code: the window's twice), P' of Eq. 8 is
    over all memories (official code: the external ones), K is tuned (App. D: 1,024), similarities
    of fp16 keys are exact (official code: or of quantized keys). We read the "evaluation segment
    length" of Table 9 as the stride, the tokens scored per window.
    For translation the paper has an encoder and a decoder. Here a pair is a text "source TAB
    target" for the decoder alone; only the target is predicted, and only its contexts are memories.
    An SRU++ segment begins with the state 0 and without the keys of the one before (App. E: they go
    on), because segments of a micro-batch are encoded side by side. So its long memory is that of a
    Transformer, too: m segments, with gradients (App. E: the segment before, without gradients).

    $ python trime.py                       a demo of ten seconds
    $ python train.py --model trime
"""
import hashlib, inspect, json, math, os, random, re, shutil
from collections import namedtuple
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def check_positive(config, names):
    """Raises ValueError unless each of these fields is 1 or more."""
    for name in names.split():
        if getattr(config, name) < 1:
            raise ValueError(f'{name} must be 1 or more')


MASKED = -1e30      # similarity to a memory that is masked: finite, so no row gives nan
R = 512             # queries of a block of TrimeLoss


@dataclass
class TRIMEConfig:
    vocab_size: int = 4096      # ids of the tokenizer; for bpe, the number to learn (ours)
    block_size: int = 512       # tokens of a segment, T (paper: 150 to 3,072)
    micro_batch: int = 4        # segments of a micro-batch, B: the source of memories (paper 7M: 8)
    n_layer: int = 4            # Transformer layers (ours; paper: 8 to 16)
    n_head: int = 4             # attention heads, H (ours)
    n_embd: int = 128           # width, C (ours; paper: 128 to 1,024)
    layer: Literal['transformer', 'sru'] = 'transformer'    # sru: SRU++, of one head (App. E)
    n_inner: int = 0            # width inside the MLP; 0: 4 C (paper: 4 C, its 150M model 2,100)
    dropout: float = 0.0        # on embeddings and residual branches (ours; official code: 0.3)
    memory: Literal['none', 'local', 'long', 'ext'] = 'local'   # used in training (paper Table 1)
    n_consecutive: int = 0      # segments that share long memory, m; 0: B (paper Table 9)
    ce_warmup: float = 0.05     # first share of the steps: cross-entropy alone (paper section 5.2)
    p: float = 0.9              # probability that ext disables local memory (paper section 4.3)
    bm25: bool = True           # ext packs similar segments together (paper section 4.3, Table 11)
    memory_grad: bool = True    # back-propagate to the memories (paper section 3, Table 11)
    same_document: bool = True  # long: of the same document; ext: of others (official code: any)
    cutoffs: str = ''           # adaptive softmax: first id of each tail cluster, as 20000,60000
    div_value: int = 4          # divides the width from cluster to cluster (official code: 4 or 1)
    stride: int = 0             # tokens scored per window, at most T; 0: T/2 (paper: 64 to 512)

    def __post_init__(self):
        check_positive(self, 'vocab_size block_size micro_batch n_layer n_head n_embd div_value')

        # rotary embeddings rotate pairs of the n_embd / n_head numbers of a head
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}')
        rising = sorted({*re.findall('[1-9][0-9]*', self.cutoffs)}, key=int)
        if ','.join(rising) != self.cutoffs:
            raise ValueError(f'cutoffs {self.cutoffs}: must rise, like 20000,60000')
        if max(self.dropout, self.p, self.ce_warmup) > 1:
            raise ValueError('dropout, p and ce_warmup are shares, at most 1')
        one_segment = self.micro_batch == 1 or (self.n_consecutive == 1 and self.memory == 'long')
        if one_segment and self.memory in ('long', 'ext'):
            raise ValueError('memories long and ext are those of other segments: there is only one')


Memories = Literal['', 'none', 'local', 'local,long', 'ext', 'local,ext', 'local,long,ext']


@dataclass
class EvalConfig:
    memory: Memories = ''       # trime: memories at test time; default: as paper Table 1 (or 5)
    long: int = 24_576          # trime: tokens of long memory, tuned up to this; 0: none
    stride: int = 0             # trime: tokens scored per window (0: as trained)
    nprobe: int = 16            # trime: lists of the datastore that a search reads; 0: all


# Table 9 has sizes, stride and optimizer (lr of 247m: ours). n_head of 7m is App. F's. From the
# official code: n_head of the others (150m: it has 10, but RoPE needs even C / n_head), cutoffs
# (enwik8: it has 208), div_value, dropout (7m: ours), beta2 and weight_decay of ADAM.
WIKITEXT = dict(data='wikitext103', tokenizer='word', vocab_size=267_744, cutoffs='20000,60000',
                eval_every=2000)
ADAM = dict(optimizer='adamw', weight_decay=0.01, beta2=0.98, grad_clip=0.0, lr=2.5e-4, warmup=0.0,
            max_steps=400_000)
PRESETS = {
    'tiny': {},                         # the defaults: minutes on two CPU cores
    '7m': dict(
        ADAM, **WIKITEXT, block_size=3072, micro_batch=8, n_layer=8, n_head=4, n_embd=128,
        stride=512, tokens_per_step=24_576, lr=5e-4, warmup=0.04, max_steps=200_000),
    '150m': dict(
        ADAM, **WIKITEXT, block_size=150, micro_batch=60, n_layer=16, n_head=5, n_embd=410,
        n_inner=2100, div_value=1, dropout=0.3, stride=64, tokens_per_step=36_000),
    '247m': dict(
        WIKITEXT, block_size=3072, micro_batch=8, n_consecutive=4, n_layer=16, n_head=8,
        n_embd=1024, dropout=0.3, stride=512, tokens_per_step=73_728, lr=5e-4, warmup=0.056,
        optimizer='adamw', grad_clip=0.1, max_steps=286_000),
    'enwik8': dict(
        ADAM, data='enwik8', tokenizer='bytes', vocab_size=257, block_size=512, micro_batch=24,
        n_layer=12, n_head=8, n_embd=512, dropout=0.3, stride=80, same_document=False,
        tokens_per_step=49_152, eval_every=2000)}


def batches(config):
    """Arguments of data.Batches. A micro-batch has random segments (§4.1), m consecutive ones of a
    text (§4.2), or similar ones (§4.3, App. B)."""
    kind = 'segments'
    if config.memory == 'long':
        kind = 'consecutive'
    elif config.memory == 'ext':
        kind = 'packed'
    return dict(kind=kind, consecutive=config.n_consecutive, bm25=config.bm25,
                same_document=config.same_document)


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


def append(x, y):
    """x, then y, along the axis of tokens or memories, the second one"""
    return torch.cat([x, y], 1)


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions, over the whole segment."""
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        C = config.n_embd
        self.qkv = Linear(C, 3 * C)
        self.proj = Linear(C, C)

    def forward(self, x, past):
        """x (B, t, C), after the tokens of which past has the keys and values (None: no tokens)
        -> (B, t, C), and the keys and values of all tokens so far, 2 x (B, s, H, D)"""
        q, k, v = self.qkv(x).unflatten(2, (3, self.n_head, -1)).unbind(2)  # 3 x (B, t, H, D)

        # keys are stored with their rotation, which never changes
        first = past[0].size(1) if past else 0                              # position of x[:, 0]
        q = rotate(q, first)
        k = rotate(k, first)
        if past:
            k, v = map(append, past, (k, v))                                # (B, s, H, D)
        past = k.detach(), v.detach()

        # on a CPU in bf16 the formula itself is faster than the fused kernel (torch 2.13) while the
        # scores are few; with 2,048 tokens it takes twice the time
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))                    # (B, H, t or s, D)
        by_formula = q.is_cpu and q.dtype == torch.bfloat16 and k.size(2) < 1024

        # softmax(q kᵀ / sqrt(D) + mask) v, where query i has the position first + i
        mask = None
        if first or by_formula:
            mask = q.new_full((q.size(2), k.size(2)), -math.inf).triu(first + 1)    # (t, s)
        if by_formula:
            y = ((q / q.size(3) ** 0.5) @ k.mT + mask).softmax(3) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).flatten(2)), past


class MLP(nn.Module):
    """Two layers, the hidden one wider."""
    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 4 * config.n_embd
        self.fc = Linear(config.n_embd, n_inner)
        self.proj = Linear(n_inner, config.n_embd)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    """One pre-norm Transformer layer; returns its output, g = the input of its MLP (§3), and the
    keys and values so far."""
    def __init__(self, config):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd)
        self.attention = SelfAttention(config)
        self.norm2 = RMSNorm(config.n_embd)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past):
        y, past = self.attention(self.norm1(x), past)
        x = x + self.dropout(y)
        g = self.norm2(x)
        return x + self.dropout(self.mlp(g)), g, past


# --------------------------------------------------------------------------------------------------
# what is new in TRIME
class Embedding(nn.Module):
    """The input and output embedding, tied. With cutoffs it is adaptive (Baevski & Auli 2019): ids
    are in order of frequency, those between two cutoffs are a cluster. Cluster a = 1, 2, ... has
    vectors of C / div_value^a numbers, W_a that projects them to C, and one row in the head, which
    is the table of the frequent words and of the clusters:

        P(w) = P_head(w)  or  P_head(a) P_a(w) in cluster a,    P_a(w) ∝ exp(table_a[w] · W_aᵀ f)"""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd

        # the head has the ids below the first cutoff, cluster a those up to the next one; a small
        # vocabulary ends before some cutoffs
        cutoffs = map(int, re.findall('[0-9]+', config.cutoffs))
        self.ends = [x for x in cutoffs if x < config.vocab_size] + [config.vocab_size]

        # rows of the first table: the frequent words, then one for each cluster
        self.tables = nn.ParameterList([torch.empty(self.ends[0] + len(self.ends) - 1, C)])
        self.tail_proj = nn.ModuleList()
        for a, size in enumerate(np.diff(self.ends), 1):
            width = max(1, C // config.div_value ** a)
            self.tables.append(torch.empty(size, width))
            self.tail_proj.append(Linear(width, C))

    def clusters(self, ids):
        """For each cluster: its number a, its first id, and a mask of those of the ids in it"""
        for a, (start, end) in enumerate(pairwise(self.ends), 1):
            yield a, start, (ids >= start) & (ids < end)

    def forward(self, tokens):
        """(B, T) -> (B, T, C)"""
        # clamp: a placeholder for words of clusters, overwritten below
        x = F.embedding(tokens.clamp(max=self.ends[0] - 1), self.tables[0])
        for a, start, inside in self.clusters(tokens):
            vectors = F.embedding(tokens[inside] - start, self.tables[a])
            x[inside] = self.tail_proj[a - 1](vectors).type_as(x)
        return x

    def tail(self, a, f):
        """log P_a of all words of cluster a: f (Q, C) -> (Q, words)"""
        return (f @ self.tail_proj[a - 1].weight @ self.tables[a].T).log_softmax(1)

    def head_and_tail(self, f, w):
        """log P of given words w (Q,) after f (Q, C) has two terms: the log of the softmax of the
        head at a row, that of w or of its cluster, and log P_a(w), which is 0 for words of the
        head. -> the rows, the log P_a(w): 2 x (Q, 1)"""
        row = w[:, None].clone()
        log_p = f.new_zeros(len(w), 1)
        for a, start, inside in self.clusters(w):
            row[inside] = self.ends[0] + a - 1
            # (Q, words) in pieces; a GPU takes those of 0.5 GiB
            n_rows = 2 ** 27 // len(self.tables[a]) if f.is_cuda else 256
            pieces = torch.where(inside)[0].split(n_rows)
            for queries in pieces:
                if f.is_cuda and len(pieces) == 1:
                    log_P = self.tail(a, f[queries])
                else:               # too large to keep: the backward pass computes it again
                    log_P = checkpoint(self.tail, a, f[queries], use_reentrant=False)
                # an index, as gather would keep log_P
                log_p[queries, 0] = log_P[torch.arange(len(queries)), w[queries] - start]
        return row, log_p

    def logits(self, f):
        """f (Q, C) -> E_w · f of Eq. 1 for all words (Q, V), log Σ_w exp(E_w · f) (Q, 1). For w of
        cluster a, E_w · f stands for that of the cluster's row + log P_a(w)."""
        head = f @ self.tables[0].T
        words, clusters = head.tensor_split([self.ends[0]], 1)
        tails = [row[:, None] + self.tail(a, f) for a, row in enumerate(clusters.T, 1)]
        return torch.cat([words, *tails], 1), head.logsumexp(1, keepdim=True)


def memory_mask(memory, doc, config, rows):
    """The memories of R queries in training. Each of the N positions of a micro-batch is a query
    and a memory: memory j is the context of position j and the token after it.

    memory      none, local, long, ext or local,ext, from TRIME.training_memory
    doc         (B, T) the document of each position
    rows        a slice of the N queries, R of them
    returns     a slice of the N memories, M of them, and the mask of those of each query, (R, M)"""
    B, T = doc.shape
    doc = doc.flatten()

    # a slice with all that any of these queries has; for long, the positions up to the last query
    start, stop = 0, rows.stop
    if memory == 'none':
        stop = 1                        # the softmax over memories needs a column; it is masked
    elif memory == 'local':
        start = rows.start // T * T                                 # the first query's segment
    elif 'ext' in memory:
        stop = len(doc)                                             # later segments, too
    memories = slice(start, stop)

    # memory i has the answer to query i, so a query has only memories before it
    position = torch.arange(len(doc), device=doc.device)
    i, j = position[rows, None], position[memories]                 # (R, 1), (M,)
    earlier = j < i                                                 # (R, M)
    same_segment = i // T == j // T
    same_document = doc[i] == doc[j]

    # Eq. 2, §4.1: local memory, the earlier positions of the segment
    mask = same_segment & earlier
    if memory in ('none', 'ext'):
        mask[:] = False

    # Eq. 3, §4.2: long memory, those of the m consecutive segments
    if memory == 'long':
        group = (config.n_consecutive or B) * T                     # tokens of m segments
        long = earlier & (i // group == j // group)
        if config.same_document:
            long &= same_document
        mask |= long

    # §4.3: memory ext, all positions of other segments
    if 'ext' in memory:
        ext = ~same_segment
        if config.same_document:
            ext &= ~same_document
        mask |= ext
    return memories, mask


def softmax_and_log_sum(exponents):
    """The softmax P of (R, n) exponents, and log Σ exp of them (R, 1), which is max - log max P as
    P = exp(exponents) / Σ"""
    P = exponents.softmax(1)
    # not by logsumexp, which is another pass over (R, n)
    return P, (exponents.amax(1) - P.amax(1).log())[:, None]


class TrimeLoss(torch.autograd.Function):
    """The TRIME objective, Eq. 5. The next word w has a term for its output embedding, and one for
    each memory whose value is w; sim(q, k) = q · k / sqrt(C):

        P(w | c)  ∝  exp(E_w · f(c))  +  Σ_{j: x_j = w} exp(sim(g(c), g(c_j)))

    f, query, key     (N, C)    f(c), g(c), g(c_j) of all contexts of a micro-batch
    head              (n, C)    E_w of words, then of clusters (Embedding): n is all words, or with
                                cutoffs the frequent ones and the clusters
    tail, head_row    (N, 1)    of the target words (Embedding.head_and_tail)
    targets           (N,)      w and x_j; -1: neither scored nor a memory
    memories_of                 a slice of queries -> slice of memories, mask (memory_mask)

    returns means over the queries: of -log P and, without gradient, of the probability on memories
    and the loss without memory. The forward pass computes the gradient too, by blocks of R queries,
    as (N, n) or (N, N) would be too large. Let z be the exponent of a term, Σ the sum of all terms
    and Σ_w the sum of the terms of w. Then P(w | c) = Σ_w / Σ, and

        d(-log P(w | c)) / dz  =  exp(z) / Σ  -  exp(z) / Σ_w, the latter for the terms of w"""
    @staticmethod
    def forward(ctx, f, query, key, head, tail, head_row, targets, memories_of):
        n = len(head)
        head = aligned(head)
        block = R
        if f.is_cuda:                   # 0.25 GiB of exponents, as it needs large products
            block = 2 ** 26 // (len(head) + len(f))
        n_scored = (targets >= 0).sum().clamp(min=1)
        scale = f.size(1) ** -0.5
        loss, memory_prob, word_loss = f.new_zeros(3)
        df, dquery, dkey, dhead, dtail = map(torch.zeros_like, (f, query, key, head, tail))
        for start in range(0, len(f), block):
            rows = slice(start, start + block)
            memories, mask = memories_of(rows)
            w, value = targets[rows, None], targets[memories]       # (R, 1), x_j (M,)
            weight = (w >= 0).to(f) / n_scored                      # (R, 1) of a query in the mean

            # exponents of Eq. 5: of the first term for all words, of the second for all memories
            logits = output_product(f[rows], head.T)                # (R, n)
            logits[:, n:] = -math.inf                               # of rows that are no words
            sim = query[rows] @ key[memories].T * scale             # (R, M)
            sim.masked_fill_(~mask | (value < 0), MASKED)

            # softmaxes over all words, over all memories, over the memories with x_j = w
            P_words, log_words = softmax_and_log_sum(logits)
            P_memory, log_memory = softmax_and_log_sum(sim)
            P_match, log_match = softmax_and_log_sum(sim.masked_fill(value != w, MASKED))

            # log Σ_w, log Σ and the loss, log Σ - log Σ_w
            log_word = logits.gather(1, head_row[rows]) + tail[rows]    # first term of Eq. 5
            log_w = torch.logaddexp(log_word, log_match)                # with the second term
            log_total = torch.logaddexp(log_words, log_memory)
            loss += (weight * (log_total - log_w)).sum()
            share = weight * (log_memory - log_total).exp()     # of memories in P, weighted
            memory_prob += share.sum()
            word_loss += (weight * (log_words - log_word)).sum()
            if not f.requires_grad:
                continue

            # gradients of the exponents: exp(z) / Σ, minus exp(z) / Σ_w for the terms of w
            dlogits = P_words.mul_(weight * (log_words - log_total).exp())      # (R, n)
            dtail[rows] = -weight * (log_word - log_w).exp()                    # (R, 1)
            dlogits.scatter_add_(1, head_row[rows], dtail[rows])
            dsim = P_memory.mul_(share)                                         # (R, M)
            dsim -= P_match.mul_(weight * (log_match - log_w).exp())

            # and of the vectors whose products they are
            df[rows] = output_product(dlogits, head)
            dhead += output_product(dlogits.T, f[rows])
            dquery[rows] = dsim @ key[memories] * scale
            dkey[memories] += dsim.T @ query[rows] * scale
        ctx.grads = df, dquery, dkey, dhead[:n], dtail
        ctx.mark_non_differentiable(memory_prob, word_loss)
        return loss, memory_prob, word_loss

    @staticmethod
    def backward(ctx, dloss, *_):
        return *(dloss * grad for grad in ctx.grads), None, None, None


@dataclass
class Inference:
    """Words and M, the set of memories of Eq. 7, make one distribution at test time.

        P(w)  ∝ exp(E_w · f) + Σ_{j ∈ M: x_j = w} exp(sim_j / τ)        Eq. 6
        P'(w) ∝ Σ_{j ∈ M: x_j = w} exp(sim_j / τ')                      Eq. 8, with ext
        P(w)  <- (1 - λ) P(w) + λ P'(w)                                 Eq. 9

    linear is for a model that was trained without memory: P(w) of Eq. 1 is interpolated (Eq. 9)
    with P' of local and long memory (continuous cache, Grave et al. 2017), then with P' of ext
    (kNN-LM, Khandelwal et al. 2020), where sim_j = -|q - k|² / (2 sqrt(C)), which is TRIME's up to
    a constant if all keys have the same norm. Each P' has a τ and a λ."""
    local: bool = False         # local memory: the window
    long: int = 0               # tokens of long memory; not used without local
    n_neighbors: int = 0        # K; 0: no external memory
    linear: bool = False        # continuous cache and kNN-LM
    tau: float = 1.0            # τ of Eq. 6; linear: of the cache
    lam: float = 0.0            # linear: λ of the cache
    tau_ext: float = 1.0        # τ' of Eq. 8; linear: of kNN-LM
    lam_ext: float = 0.0        # λ of Eq. 9; linear: of kNN-LM

    def probabilities(self, log_words, sim):
        """The parts of P(w) = exp(E_w · f + log_factor) + Σ_{j: x_j = w} P_j

        log_words (Q, 1)    log Σ_w exp(E_w · f)
        sim (Q, M)          similarities, MASKED or not; the last n_neighbors are of ext
        returns             P_j (Q, M) and log_factor (Q, 1)"""
        if self.linear:
            # Eq. 1, then the continuous cache: Eq. 8 and 9 of local and long memory
            start = sim.size(1) - self.n_neighbors                  # then kNN-LM: of ext
            P, log_factor = torch.zeros_like(sim), -log_words
            P, log_factor = interpolate(P, log_factor, sim, slice(start), self.tau, self.lam)
        else:
            # Eq. 6, one softmax over words and memories
            exponents = sim / self.tau
            log_total = torch.logaddexp(log_words, exponents.logsumexp(1, keepdim=True))
            P, log_factor = (exponents - log_total).exp(), -log_total
            start = 0                                               # of all memories

        # Eq. 8 and 9
        return interpolate(P, log_factor, sim, slice(start, None), self.tau_ext, self.lam_ext)

    def log_p(self, logit, log_words, sim, match, local):
        """log P (Q, 1) of the target words of a window, from what `collect` returns of it. That has
        more memories than are used here: the last `long` before `local`, the first n_neighbors
        after it"""
        used = slice(max(0, local.start - self.long), local.stop + self.n_neighbors)
        P, log_factor = self.probabilities(log_words, sim[:, used])
        P_memory = (P * match[:, used]).sum(1, keepdim=True)
        return torch.logaddexp(logit + log_factor, P_memory.log())


def interpolate(P, log_factor, sim, columns, tau, lam):
    """P <- (1 - λ) P + λ P' (Eq. 9), where P' is the softmax of sim / τ' over the memories of these
    columns (Eq. 8) -> the new P and log_factor. A query whose memories are all masked keeps its P.
    """
    sim = sim[:, columns]
    lam = torch.where((sim > MASKED).any(1, keepdim=True), lam, 0.0)            # (Q, 1)
    P *= 1 - lam
    P[:, columns] += lam * (sim / tau).softmax(1)
    return P, log_factor + torch.log1p(-lam)


def to_numpy(x):
    """A tensor as faiss needs it: an array of fp32"""
    return x.float().cpu().numpy()


def open_index(folder, about):
    """The index in folder; None if there is none or, with a message, if a file is damaged.
    SystemExit if it depends on another thing than `about`"""
    import faiss
    try:
        saved = json.loads((folder / 'about.json').read_text())
        assert 'checkpoint' in saved
        if saved != about:
            raise SystemExit(f'{folder} is of another checkpoint, text or stride: delete it')

        # keys.ivfdata is memory-mapped: a search reads from disk what it needs. In a shorter file
        # that ends the process (SIGBUS).
        index = faiss.read_index(
            f'{folder}/keys.faiss', faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)
        lists = faiss.downcast_InvertedLists(index.invlists)
        assert (folder / 'keys.ivfdata').stat().st_size == lists.totsize, 'keys.ivfdata'
        return index
    except FileNotFoundError:                                       # there is no store
        return None
    except Exception as e:                                          # faiss's is a RuntimeError
        print(f'{folder} is damaged and is built again: {e!r:.200}')


class Datastore:
    """External memory, Eq. 4: entry j is the key g(c_j) and the value x_j of position j of a text.
    The keys are fp16 in a faiss inverted file, memory-mapped; similarities are exact."""
    SHARD = 2 ** 31                     # bytes of keys held in memory while a store is built

    def __init__(self, folder, model, text, about, progress, nprobe, pairs=None):
        """Opens the store of text (n + 1,) in folder; builds it if there is none or it is damaged.
        about: what it depends on; nprobe: lists that a search reads, 0: all; pairs: data.Pairs of
        the text, of which only targets have entries"""
        import faiss
        self.text = model.on_device(text)
        self.nprobe = nprobe
        self.index = open_index(folder, about)
        if self.index is None:
            # in a folder of this process: no half of a store is left, nor mixed with another one
            temporary = folder.with_name(f'{folder.name}.{os.getpid()}.tmp')
            try:
                self.build(temporary, model, progress, pairs)
                (temporary / 'about.json').write_text(json.dumps(about))
                shutil.rmtree(folder, ignore_errors=True)           # a damaged one
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            self.index = open_index(folder, about)

        # what a search returns, times factor / sqrt(C), is the similarity, see Inference
        if model.config.memory == 'none':
            self.factor = -0.5                                      # kNN-LM: |q - k|²
        else:
            self.index.metric_type = faiss.METRIC_INNER_PRODUCT
            self.factor = 1.0                                       # TRIME: q · k

    def keys(self, text, model, progress, desc, pairs):
        """Yields keys (m, C) of contexts of the text (1, n), and their positions (m,)."""
        if pairs:                                                   # each is encoded alone
            for i in progress(range(len(pairs)), desc):
                batch = pairs[i]
                _, g, _ = model.encode(batch.tokens.to(self.text.device))
                position = pairs.split.offsets[batch.doc] + np.arange(g.size(1))    # (B, T)
                scored = batch.targets >= 0
                yield g[scored], position[scored]
            return
        start = 0
        for _, g, _ in progress(model.windows(text), desc, 1 + text.size(1) // model.stride):
            yield g[0], start + np.arange(g.size(1))
            start += g.size(1)

    @torch.no_grad()
    def build(self, folder, model, progress, pairs):
        """Writes the index, keys.faiss, and what its lists have, keys.ivfdata. SystemExit if the
        disk has no room for them"""
        import faiss
        from faiss.contrib.ondisk import merge_ondisk
        text = self.text[None, :-1]                                 # (1, n)
        n, T, C = text.size(1), model.config.block_size, model.config.n_embd
        size = 2 * C + 8                                            # bytes: a key, its number
        print(f'{folder}: at most {n:,} entries, {n * size / 1e9:.2f} GB on disk; to build it, '
              f'twice that and {min(n * size, self.SHARD) / 1e9:.2f} GB of memory')
        folder.mkdir(exist_ok=True)
        if shutil.disk_usage(folder).free < 2 * n * size:
            raise SystemExit(f'{folder} needs {2 * n * size / 1e9:.2f} GB of free disk space')

        # an empty index, an inverted file: a key is in the list of its nearest centroid, a search
        # reads the lists of the nprobe centroids that are nearest to the query. A key itself is
        # stored, not its difference from a centroid, so all lists round alike
        n_lists = min(n // 1000, 16_384) or 1
        index = faiss.index_factory(C, f'IVF{n_lists},SQfp16')
        index.by_residual = False

        # k-means of 64 keys per list, those of a segment in every `step` tokens, makes centroids
        step = max(T, T * n // (64 * n_lists))
        sample = [model.encode(part[:, :T])[1] for part in text.split(step, 1)]     # g (1, T, C)
        index.train(to_numpy(torch.cat(sample, 1)[0]))

        # keys are added; when the index has SHARD bytes, it is written to a file, then emptied
        shards = []

        def write_shard():
            shards.append(f'{folder}/shard-{len(shards)}')
            faiss.write_index(index, shards[-1])
            index.reset()

        for keys, positions in self.keys(text, model, progress, folder.name, pairs):
            index.add_with_ids(to_numpy(keys), positions)
            if index.ntotal * size >= self.SHARD:
                write_shard()
        write_shard()

        # the files become one
        merge_ondisk(index, shards, f'{folder}/keys.ivfdata')
        faiss.write_index(index, f'{folder}/keys.faiss')
        for shard in folder.glob('shard-*'):                    # also those of a killed process
            shard.unlink()

    def search(self, query, K):
        """The K most similar entries to queries (Q, C), best first: similarities, entries (Q, K);
        MASKED and -1 where there are fewer, in nprobe lists (0: in all)"""
        self.index.nprobe = self.nprobe or self.index.nlist
        sim, j = map(torch.from_numpy, self.index.search(to_numpy(query), K))
        sim = self.factor * sim / query.size(1) ** 0.5
        return sim.clamp(min=MASKED).to(query), j


# --------------------------------------------------------------------------------------------------
# the model
COMPILED = (Block,)     # layers that train.py compiles


# What a stream keeps of a text; its size is bounded
#     text    (B, L)        its last tokens, at most long + T
#     keys    (B, L, C)     g of each of them, as first encoded
#     window  (B, n, C)     g of the tokens of the current window, the last of the text
#     past    list          of each layer, keys and values of the window; of SRU++ also c
State = namedtuple('State', 'text keys window past')


class TRIME(nn.Module):
    """A Transformer language model whose output softmax is over words and memories."""
    PIECE = 512         # eval.py passes at most so many tokens to stream: (PIECE, V) log P are held

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.embedding = Embedding(config)                          # also the output embedding E
        Layer = SRUBlock if config.layer == 'sru' else Block
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(C)

        # GPT-2's initial weights, for width C
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 0.02 * math.sqrt(768 / C)
                if name.endswith('proj.weight'):                    # what is added to x
                    std /= math.sqrt(2 * config.n_layer)
                elif 'tail_proj' in name:
                    std = weight.size(1) ** -0.5
                nn.init.normal_(weight, std=std)

        # g then has norm C^(1/4) at first, and similarities are at most 1
        if config.memory == 'ext':
            nn.init.constant_(self.blocks[-1].norm2.weight, C ** -0.25)

        # for evaluation; prepare_eval sets them
        self.inference = Inference(local=config.memory != 'none')
        self.stride = config.stride or config.block_size // 2 or 1
        self.shuffle = False            # True: a memory has the value of another one
        self.store = None               # the Datastore
        self.tab = -1                   # the id of TAB in pairs; -1: texts are no pairs

    def on_device(self, ids):
        """Token ids of a corpus, an array -> a tensor where the model is"""
        return torch.as_tensor(ids.astype(int), device=self.norm.weight.device)

    def encode(self, tokens, past=None):
        """Tokens (B, t) -> f, g (B, t, C) of their contexts, and past, the keys and values so far.
        f is the output of the Transformer, g the input of the last MLP (§3; see SRUBlock, too)."""
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        past = list(past or [None] * len(self.blocks))
        for layer, block in enumerate(self.blocks):
            x, g, past[layer] = block(x, past[layer])           # g of the last one is returned
        return self.norm(x), g, past

    def training_memory(self, seed, progress):
        """Which memory a micro-batch has: that of the config, with the exceptions of the paper"""
        config = self.config
        if progress < config.ce_warmup:             # §5.2: the first steps, by Eq. 1
            return 'none'
        if config.memory != 'ext':
            return config.memory
        if not self.training:           # ext is not causal: other segments are the future, too;
            return 'local' if config.p < 1 else 'none'          # with p = 1 local is not trained
        if random.Random(seed).random() < config.p:             # §4.3: no local memory
            return 'ext'
        return 'local,ext'

    def forward(self, batch, progress):
        """The training loss () in nats per token, causal in eval mode, and a dict to log.

        batch       tokens, targets (-1: not scored), doc (documents), each (B, T); seed, an int
        progress    step / max_steps"""
        memory = self.training_memory(batch.seed, progress)
        if self.training:
            torch.manual_seed(batch.seed)                           # for dropout
        f, g = (fp32(x).flatten(0, 1) for x in self.encode(batch.tokens)[:2])       # (N, C)

        # Eq. 5, sums in fp32, as bf16 has steps of 0.125 near 20 (in bf16 runs the factors of
        # products may be rounded, see train.precision)
        key = g if self.config.memory_grad else g.detach()
        targets = batch.targets.flatten()
        memories_of = lambda rows: memory_mask(memory, batch.doc, self.config, rows)
        with torch.autocast(g.device.type, enabled=False):
            head_row, tail = self.embedding.head_and_tail(f, targets.clamp(min=0))
            loss, memory_prob, word_loss = TrimeLoss.apply(
                f, g, key, self.embedding.tables[0], tail, head_row, targets, memories_of)
        return loss, dict(memory_prob=memory_prob, loss_without_memory=word_loss)

    @torch.no_grad()
    def windows(self, tokens, state=None):
        """Encodes tokens (B, t), which continue the text of `state`, window by window (App. D): a
        window grows to T tokens, the next one begins with its last T - stride, encoded again.
        Yields f, g (B, n, C) of the next n tokens, and the State after them."""
        T = self.config.block_size
        kept = T + self.inference.long
        text, past = tokens[:, :0], None                            # (B, 0)
        keys = window = self.embedding(text)                        # (B, 0, C)
        if state:
            text, keys, window, past = state
        while tokens.numel():
            # a full window: the next one begins with the end of this one
            if window.size(1) == T:
                overlap = text[:, -T:][:, self.stride:]             # T - stride tokens
                _, window, past = self.encode(overlap)

            # as many tokens as there is room for
            new, tokens = tokens.tensor_split([T - window.size(1)], 1)
            f, g, past = self.encode(new, past)
            text = append(text, new)[:, -kept:]
            keys = append(keys, g)[:, -kept:]
            window = append(window, g)
            yield f, g, State(text, keys, window, past)

    def memories(self, g, state, queries=slice(None)):
        """The memories of Q queries (Eq. 2 to 4): of the last n tokens of the text of `state`, with
        g (B, n, C), or of those of them with these indices.
        -> similarities and values x_j, both (Q, M), of long, local, then external memories; which
        are the local ones, a slice"""
        inference = self.inference
        text, keys, window, _ = state

        # positions in the text; memory j is the context that ends with text[j], and text[j + 1]
        L = text.size(1)
        position = torch.arange(L, device=g.device)
        i = position[-g.size(1):, None][queries]                    # (n, 1) of queries

        # the memories are `first` to L - 2, those from `start` on, the window's, are local; the
        # keys of tokens of the window are of its latest encoding
        start = L - window.size(1)
        key = append(keys[:, :start], window)                       # (B, L, C)
        if inference.local:
            first = max(0, start - inference.long)
        else:
            first = start = L - 1                                   # an empty range
        j = position[first:-1]                                      # (M,)

        # similarities, Eq. 2, 3; of a pair, a query after TAB has no memory before it
        g = g[:, queries]
        sim = g @ key[:, first:-1].mT / g.size(2) ** 0.5            # (B, n, M)
        tabs = (text == self.tab).cumsum(1)                         # (B, L), up to each token
        mask = (j < i) & (tabs[:, None, first:-1] == tabs[:, i])    # (B, n, M)
        sim = sim.masked_fill(~mask, MASKED).flatten(0, 1)

        # values; shuffled: that of another one of the n_past memories of the query
        j = j.expand(len(i), -1)                                    # (n, M)
        if self.shuffle:
            n_past = (i - first).clamp(min=1)                       # (n, 1)
            j = first + (j - first + n_past // 2) % n_past
        value = text[:, j + 1].flatten(0, 1)                        # (Q, M)

        # external memories, Eq. 4
        if inference.n_neighbors:
            sim_ext, j = self.store.search(g.flatten(0, 1), inference.n_neighbors)
            if self.shuffle:
                n_ext = self.store.index.ntotal
                j = (j + n_ext // 2) % n_ext
            sim = append(sim, sim_ext)
            value = append(value, self.store.text[j + 1])
        return sim, value, slice(start - first, L - 1 - first)

    def read(self, tokens, state=None):
        """The state that `stream` returns, without its predictions."""
        for _, _, state in self.windows(tokens, state):
            pass
        return state

    def log_probs(self, tokens):
        """log P(next token | tokens so far) of a document, by `inference`: (B, t) -> (B, t, V)"""
        return self.stream(tokens)[0]

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """log P(next token | tokens so far) (B, t, V) of tokens (B, t), which continue the text of
        `state`, and the new state; any t >= 1, weights of fp32, no autocast"""
        parts = []
        for f, g, state in self.windows(tokens, state):
            logits, log_words = self.embedding.logits(f.flatten(0, 1))          # (Q, V)
            sim, value, _ = self.memories(g, state)                             # (Q, M)
            P, log_factor = self.inference.probabilities(log_words, sim)
            P_memory = torch.zeros_like(logits).scatter_add_(1, value, P)
            log_probs = torch.logaddexp(logits + log_factor, P_memory.log())
            parts.append(log_probs.unflatten(0, f.shape[:2]))                   # (B, n, V)
        return torch.cat(parts, 1), state

    def ways(self):
        """The evaluations of the model: name -> attributes to set."""
        on = dict(inference=self.inference, shuffle=False)
        off = dict(on, inference=Inference())
        if on == off:
            return dict(off=off)
        if self.tab >= 0:                                       # of pairs, no values are exchanged
            return dict(on=on, off=off)
        return dict(on=on, shuffled=dict(on, shuffle=True), off=off)

    def trace(self, tokens, t, state=None):
        """The memories behind the prediction of token t + 1 of a document (n,), the most probable
        first: (its part of P(value), ids, start, end), where ids[start:end] ends with that value.
        state: that of read(tokens[None, :t]), computed if None"""
        state = state or self.read(tokens[None, :t])

        # the memories' parts of P (Eq. 6 to 9)
        f, g, state = next(self.windows(tokens[None, t:t + 1], state))
        _, log_words = self.embedding.logits(f[0])
        sim, _, _ = self.memories(g, state)
        P, _ = self.inference.probabilities(log_words, sim)         # (1, M)

        # where they are: c_j ends with token j of a text, x_j is token j + 1
        K = self.inference.n_neighbors
        n_past = P.size(1) - K
        sources = [(tokens, j) for j in range(t - n_past, t)]
        if K:
            _, neighbors = self.store.search(g[0], K)
            sources += [(self.store.text, j) for j in neighbors[0].tolist()]

        # the last 12 tokens of c_j, then x_j
        rows = [(part, ids, max(0, j - 11), j + 2)
                for part, (ids, j) in zip(P[0].tolist(), sources) if part]
        return sorted(rows, key=lambda row: -row[0])

    def prepare_eval(self, corpus, external, args, path, progress):
        """Opens the datastore of external.train, which is kept in the folder of the checkpoint
        `path`; tunes on a split of corpus. args: EvalConfig, and split, retrieve_from of eval.py"""
        # which memories: those of Table 1, or with --retrieve-from of Table 5
        self.stride = args.stride or self.stride
        self.inference = Inference()
        self.tab = corpus.tab
        trained = self.config.memory
        default = dict(long='local,long', ext='local,long,ext').get(trained, trained)
        names = args.memory or default
        if args.retrieve_from:
            names = f'{args.memory or "local,long"},ext'
        if names == 'none':
            return

        # of which size at most
        split = tuning_split(corpus, args.split)
        inference = Inference(local='local' in names, linear=trained == 'none')
        if 'long' in names:
            inference.long = args.long

        # the datastore
        about = dict(checkpoint=hashlib.sha256(path.read_bytes()).hexdigest(),
                     corpus=external.fingerprint, stride=self.stride)
        if 'ext' in names:
            if args.split == 'train' and external.fingerprint == corpus.fingerprint:
                raise SystemExit('--split train with --memory ext: each token would find itself')
            inference.n_neighbors = 1024
            pairs = None
            if external.tab >= 0:
                T = self.config.block_size
                pairs = external.batches(external.train, kind='documents', block_size=T,
                                         micro_batch=1 + 4096 // T, seed=0)
            self.store = Datastore(path.parent / f'datastore-{external.folder.name}', self,
                                   external.train.tokens, about, progress, args.nprobe, pairs)

        # τ, λ, K and the tokens of long memory
        self.inference = tune(collect(self, split, inference, progress, 4096), inference)
        print(f'{path}: {self.inference}, tuned on {split.name}')


# --------------------------------------------------------------------------------------------------
# compared systems
class SRUBlock(nn.Module):
    """A layer of SRU++ (Lei, EMNLP 2021, §2): causal attention of one head, without positions,
    computes the inputs of a recurrence over the tokens, in which all is elementwise:

        q = W_q x    k, v = W_k q, W_v q    u, f, r = W_o norm(q + α attention(q, k, v)) + b
        c_t = f'_t c_{t-1} + (1 - f'_t) u_t         f'_t = σ(f_t + v_f c_{t-1})
        y_t = r'_t c_t + (1 - r'_t) x_t             r'_t = σ(r_t + v_r c_{t-1})

    α is a scalar, at first 0; b is 0, of r -2 (official code). Ours: b of u, v = 0 at first, and
    g = norm(y), of which the last layer's is used. Returns y, g, and the keys, the values and c so
    far. The loop over tokens is in plain PyTorch, so slow (official code: a CUDA kernel)."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        d = max(1, C // 4)                                          # of attention; paper: 768
        self.query = Linear(C, d)
        self.kv = Linear(d, 2 * d)
        self.alpha = nn.Parameter(torch.zeros(1))
        self.norm1 = RMSNorm(d)
        self.out = nn.Linear(d, 3 * C)                              # W_o, with b
        self.v = nn.Parameter(torch.zeros(2, 1, C))                 # v_f, v_r
        self.norm2 = RMSNorm(C)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.zeros_(self.out.bias)
        nn.init.constant_(self.out.bias[2 * C:], -2)

    def forward(self, x, past):
        # attention to the tokens so far
        q = self.query(x)                                           # (B, t, d)
        no_keys = q[:, :0]
        zeros = x.new_zeros(len(x), x.size(2))
        *past, c = past or (no_keys, no_keys, zeros)
        k, v = map(append, past, self.kv(q).chunk(2, 2))            # (B, s, d)
        t = q.size(1)
        s = k.size(1)
        mask = q.new_full((t, s), -math.inf).triu(s - t + 1)
        heads = [y[:, None] for y in (q, k, v)]                     # without this axis torch
        a = F.scaled_dot_product_attention(*heads, mask)[:, 0]      # keeps scores (t, s)
        z = self.norm1(q + self.alpha * a)
        u, f, r = fp32(self.out(self.dropout(z))).chunk(3, 2)       # 3 x (B, t, C)

        # the recurrence; lerp(a, b, w) is a + w (b - a)
        v_f, v_r = self.v
        outputs = [x[:, :0]]                                        # x can be without tokens
        steps = zip(*(y.unbind(1) for y in (x, u, f, r)))           # of (B, C)
        for x_t, u_t, f_t, r_t in steps:
            reset = (r_t + v_r * c).sigmoid()                       # r'_t
            forget = (f_t + v_f * c).sigmoid()                      # f'_t
            c = u_t.lerp(c, forget)
            outputs.append(x_t.lerp(c, reset)[:, None])
        y = torch.cat(outputs, 1)
        past = k.detach(), v.detach(), c.detach()
        return y, self.norm2(y), past


# --------------------------------------------------------------------------------------------------
# evaluation
# tokens that a text must have for tuning
ENOUGH = 1000

# values that `tune` tries
TAUS = [0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.045, 0.065, 0.1,
        0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0]
LAMBDAS = [i / 20 for i in range(20)]


def tuning_split(corpus, scored):
    """The split to tune on: val or test, not the one that is scored, if it has ENOUGH tokens"""
    for split in (corpus.val, corpus.test):
        if split and split.name != scored and len(split.tokens) >= ENOUGH:
            return split
    print(f'warning: λ and τ are tuned on {scored}, the text that is scored: no other split but '
          f'train has {ENOUGH:,} tokens')
    return getattr(corpus, scored)


@torch.no_grad()
def collect(model, split, inference, progress, n_queries):
    """What `tune` needs: for each window of the first 65,536 tokens, the arguments of
    Inference.log_p for some of its tokens, about n_queries in all; for all of a text with no more.
    Of pairs only those in a target are queries."""
    model.inference = inference

    # documents, the last one cut
    text = split.tokens[:65_536]
    documents, windows = np.split(text, split.offsets[1:-1]), []

    # the queries are random, as each n-th token could be the first of a document, without memory
    rng = np.random.default_rng(0)
    for ids in progress(documents, 'tokens read to tune', size=len):
        tokens = model.on_device(ids)
        drawn = rng.random(len(ids[1:])) < n_queries / len(text)
        if model.tab >= 0:                                      # of a pair, the target alone
            drawn &= (ids[:-1] == model.tab).cumsum() > 0
        targets = tokens[1:, None].clone()
        targets[~drawn] = -1                                    # not a query
        for f, g, state in model.windows(tokens[None, :-1]):
            new, targets = targets.tensor_split([f.size(1)])
            queries = torch.where(new >= 0)[0]                                  # (Q,)
            if not len(queries):
                continue
            w = new[queries]                                                    # (Q, 1)
            logits, log_words = model.embedding.logits(f[0, queries])           # (Q, V)
            sim, value, local = model.memories(g, state, queries)               # (Q, M)
            # where a search returns fewer than K entries, the others are MASKED
            windows.append((logits.gather(1, w), log_words,
                            sim, (value == w) & (sim > MASKED), local))
    return windows


def tune(windows, inference):
    """An Inference of high likelihood, by coordinate ascent: the best tau, the best long up to
    inference.long and so on in turn, until none is better. It starts with K = 1: from K = 1,024 it
    ended at constants with which ext was worse than no ext, in a model trained with p = 0.
    `inference` is changed."""
    def score(candidate):
        return sum(candidate.log_p(*window).sum().item() for window in windows)

    # sizes of long memory: 256, 512, ... tokens, at most inference.long
    long = {min(256 * 2 ** n, inference.long) for n in range(20)}
    grids = dict(tau=TAUS, long=sorted(long))

    # a λ of 0 is no start, as its τ would have no effect
    if inference.linear and inference.local:
        inference.lam = 0.25
        grids['lam'] = LAMBDAS
    if inference.n_neighbors:
        inference.lam_ext = 0.25
        inference.n_neighbors = 1
        grids.update(tau_ext=TAUS, lam_ext=LAMBDAS, n_neighbors=[1, 8, 64, 512, 1024])

    # coordinate ascent
    before = None
    while inference != before:
        before = inference
        for name, values in grids.items():
            candidates = [replace(inference, **{name: value}) for value in values]
            inference = max([inference, *candidates], key=score)
    return inference


def datastore_accuracy(runs, args):
    """Table 13, for runs with --memory ext. top-K: the share of the queries for which one of the K
    most similar entries has the next token w as value, x_j = w. The queries are about 16,384 of the
    first 65,536 tokens of the split, the same ones for all runs; the standard error is at most
    0.4%. recall: the share of the 1,024 most similar entries that the search returns.
    -> {run: {'top-1': .., ..., 'recall': ..}}"""
    quiet = lambda items, desc, size: items
    result = {}
    for run in runs:
        model, store = run.model, run.model.store
        if not store:
            raise SystemExit(f'{run.name} has no datastore: --task datastore needs --memory ext')

        # whether the entries, the most similar one first, have the next token as value
        windows = collect(model, run.split, Inference(n_neighbors=1024), quiet, 16_384)
        match = torch.cat([window[3] for window in windows])                    # (Q, 1024)
        shares = result[run.name] = {}
        for K in 1, 8, 64, 1024:
            shares[f'top-{K}'] = match[:, :K].any(1).float().mean().item()

        # recall, for each 32nd of the first 8,192 tokens; a search of all lists is exact
        windows = model.windows(model.on_device(run.split.tokens[None, :8192]))
        query = torch.cat([g[0, ::32] for _, g, _ in windows])                  # (Q, C)
        K = min(1024, store.index.ntotal)
        sim, _ = store.search(query, K)
        nprobe, store.nprobe = store.nprobe, 0
        best, _ = store.search(query, K)
        store.nprobe = nprobe
        shares['recall'] = (sim >= best[:, -1:]).float().mean().item()
        print(f'{run.name:24}', *(f'{name} {x:.2%}' for name, x in shares.items()))
    return result


TASKS = {'datastore': datastore_accuracy}


# --------------------------------------------------------------------------------------------------
# a demo
def demo():
    """The source of TRIMEConfig, from tokens to the loss; memories of one. With assets/trime.pt, a
    model of the default configuration"""
    from eval import load               # as in a notebook
    model, tokenizer = load(Path(__file__).parent / 'assets/trime.pt')
    source = inspect.getsource(TRIMEConfig)
    ids = tokenizer.encode(source)[:360].tolist()
    tokens = torch.tensor([ids])
    log_p, state = model.stream(tokens)
    print(f"""tokens                    (B, T)     {tuple(tokens.shape)}
g of their contexts       (B, T, C)  {tuple(state.window.shape)}
similarities to memories  (Q, M)     {tuple(model.memories(state.window, state)[0].shape)}
log P of the next token   (B, T, V)  {tuple(log_p.shape)}
loss of all tokens but the first     {F.nll_loss(log_p[0, :-1], tokens[0, 1:]):.3f}
To predict what follows {tokenizer.decode(ids[340:])!r},
these contexts, each with the token after it, have the largest parts of the probability:""")
    for part, _, start, end in model.trace(tokens[0], 359)[:5]:
        print(f'{part:.3f}  {tokenizer.decode(ids[start:end])!r}')


if __name__ == '__main__':
    demo()
