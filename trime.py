"""
TRIME: a language model trained to find its next word among the contexts that it has just read.

    Zexuan Zhong, Tao Lei and Danqi Chen, "Training Language Models with Memory Augmentation",
    EMNLP 2022, arXiv:2205.12674

A Transformer predicts the next word by comparing its state f with one vector per word. TRIME also
compares a second state, g, with the g of other contexts of the batch: a context that was followed
by "cat" is one more vector for "cat". Both kinds of vector are in one softmax and are trained
together. At test time the contexts are those of the current window, of the earlier part of the
document, or of a whole corpus.

Where the paper is in this file
    Eq. 1                   a language model                        Embedding
    Eq. 2, 3, §4.1 to 4.3   local, long and ext memory in training  memory_mask
    Eq. 4                   external memory at test time            Datastore
    §3                      f and g                                 TRIME.encode
    §3, Eq. 5               the training objective                  trime_loss_reference
    §4.1 to 4.3             segments of a micro-batch, m            batches
    §4.3                    p, probability of no local memory       TRIME.training_memory
    §5.2                    the first 5% of the steps               TRIME.training_memory
    §5.2                    FAISS                                   Datastore
    App. A, Eq. 6           probabilities at test time              TrimeInference
    App. A, Eq. 8, 9        interpolation with memories alone       interpolate
    §2.2, App. A            continuous cache, kNN-LM                LinearInference
    App. A, Eq. 7           memories at test time                   TRIME.memories
    App. B, Algorithm 1     similar segments in a micro-batch       pack in data.py
    App. C                  translation                             TRIME.same_side; data.Pairs
    App. D                  overlapping windows                     TRIME.windows
    App. E                  SRU++                                   compared/sru.py
    Table 1, 5              which memories a model has              prepare_eval
    Table 9                 the models                              PRESETS
    Table 13                accuracy of the datastore               datastore_accuracy
    Table 14                perplexity by frequency                 frequency in eval.py

Letters in the shape comments and formulas
    B segments    T tokens of a segment (the paper's L)    t of a piece    s keys    C width (its d)
    H heads       D width of a head        V vocabulary    N = B T contexts of a micro-batch
    Q queries     M memories               K neighbors     n any other size
    L tokens that a stream keeps
    m segments that share long memory (§4.2)
    w a target word    i a query    j a memory: (c_j, x_j), a context and the token after it. Its
    key is g(c_j), its value x_j. x without an index: hidden states

Where this differs from the paper, and why
    Layers: RMSNorm, RoPE, GELU, GPT-2's initial weights, a final norm, no biases, no dropout of
    attention weights or in the MLP (official code: 0.1).
    Optimizer: the presets of the paper's sizes have AdamW and a cosine (paper: NAG for 247M;
    inverse square root for 7M); the default has Muon.
    Training: memories are those of the micro-batch of one process (official code: ext memory is of
    all processes, long memory of several). §4.3 sets m = 1; here ext memory also excludes other
    segments of the query's own document (official code: it does not). Long memory is of the query's
    document; local memory may cross a boundary of documents.
    With memory ext the gain of g is small at first. Otherwise memories have almost all probability
    when they are first used, and the words learn more slowly.
    Test time: each document is read alone, from an empty window (official code: the split is one
    text). Contexts of the datastore cross boundaries of documents. Each context is in memory once
    (official code: the window's twice). P' of Eq. 8 is over all memories (official code: the
    external ones). K is tuned (App. D: 1,024). Similarities are exact, of keys in fp16 (official
    code: by default of quantized keys).
    We read the "evaluation segment length" of Table 9 as the stride, the tokens scored per window.
    Translation: the paper has an encoder and a decoder. Here a pair is a text "source TAB target"
    for the decoder alone; only the target is predicted, and only its contexts are memories. With
    --memory ext, --p 1 trains without local memory (§5.4: external memory alone).

    $ python trime.py                       a demo of ten seconds, on a CPU
    $ python train.py --model trime
"""
import argparse, contextlib, ctypes, hashlib, json, math, os, random, re, shutil
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

MASKED = -1e30      # similarity to a memory that is masked: finite, so no row gives nan
BLOCK = 512         # queries of a block of TrimeLoss, on a CPU


def check_positive(config, names):
    """Raises ValueError unless each of these fields is 1 or more."""
    for name in names.split():
        if getattr(config, name) < 1:
            raise ValueError(f'{name} must be 1 or more')


@dataclass
class TRIMEConfig:
    vocab_size: int = 4096      # ids of the tokenizer; for bpe, the number to learn (ours)
    block_size: int = 512       # tokens of a segment, T (paper: 150 to 3,072)
    micro_batch: int = 4        # segments of a micro-batch, B: the source of memories (paper 7M: 8)
    n_layer: int = 4            # Transformer layers (ours; paper: 8 to 16, MT: 6 + 6)
    n_head: int = 4             # attention heads, H (ours)
    n_embd: int = 128           # width, C (ours; paper: 128 to 1,024)
    n_inner: int = 0            # hidden width of the MLP; 0: 4 C (paper: 4 C; 150M: 2,100; MT: 2 C)
    dropout: float = 0.0        # on embeddings and residual branches (ours; official code: 0.3)
    memory: Literal['none', 'local', 'long', 'ext'] = 'local'   # used in training (paper Table 1)
    n_consecutive: int = 0      # segments that share long memory, m; 0: B (paper Table 9)
    ce_warmup: float = 0.05     # first share of the steps: cross-entropy alone (paper section 5.2)
    p: float = 0.9              # probability that ext disables local memory (paper section 4.3)
    bm25: bool = True           # ext packs similar segments together (paper section 4.3, Table 11)
    memory_grad: bool = True    # back-propagate to the memories (paper section 3, Table 11)
    same_document: bool = True  # long: only of the query's document; ext: of others (ours)
    cutoffs: str = ''           # adaptive softmax: first id of each tail cluster, as 20000,60000
    div_value: int = 4          # divides the width from cluster to cluster (official code: 4 or 1)
    stride: int = 0             # tokens scored per window, at most T; 0: T/2 (paper: 64 to 512)

    def __post_init__(self):
        check_positive(self, 'vocab_size block_size micro_batch n_layer n_head n_embd div_value')

        # rotary embeddings rotate pairs of the n_embd / n_head numbers of a head
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}')
        parse_cutoffs(self.cutoffs)
        if max(self.dropout, self.p, self.ce_warmup) > 1:
            raise ValueError('dropout, p and ce_warmup are shares, at most 1')
        if self.stride > self.block_size:
            raise ValueError(f'stride {self.stride} is more than block_size {self.block_size}')
        n_segments = self.micro_batch                                   # that share a memory
        if self.memory == 'long' and self.n_consecutive:
            n_segments = min(n_segments, self.n_consecutive)
        if n_segments == 1 and self.memory in ('long', 'ext'):
            too_small = 'micro_batch' if self.micro_batch == 1 else 'n_consecutive'
            raise ValueError(f'memory {self.memory} needs two segments or more: a larger '
                             f'{too_small}')


def parse_cutoffs(text):
    """'20000,60000' -> [20000, 60000]. ValueError unless they are numbers from 1 that rise"""
    if not text:
        return []
    if re.fullmatch('[1-9][0-9]*(,[1-9][0-9]*)*', text):
        cutoffs = [int(cutoff) for cutoff in text.split(',')]
        if cutoffs == sorted(set(cutoffs)):
            return cutoffs
    raise ValueError(f'cutoffs {text}: must be numbers from 1 that rise, like 20000,60000')


MEMORIES = 'none', 'local', 'local,long', 'ext', 'local,ext', 'local,long,ext'


def memory_names(text):
    """The type of --memory of eval.py: one of MEMORIES, in any order, or ''"""
    if text == '':
        return text
    for names in MEMORIES:
        if sorted(names.split(',')) == sorted(text.split(',')):
            return names
    raise argparse.ArgumentTypeError(f'{text} is not one of: {"; ".join(MEMORIES)}')


@dataclass
class EvalConfig:
    memory: memory_names = ''   # trime: none, local, ext or several: local,long,ext; '': as Table 1
    long: int = 24_576          # trime: tokens of memory long, if used, tuned up to this; 0: none
    stride: int = 0             # trime: tokens scored per window (0: as trained)
    nprobe: int = 16            # trime: lists of memory ext, if used, that a search reads; 0: all


# Table 9 has sizes, stride and optimizer; ours are AdamW for 247m (paper: NAG) with its lr, beta2
# and weight_decay, and the cosine of 7m (inverse square root). n_head of 7m is App. F's. From the
# official code: n_head of the others (150m: it has 10, but RoPE needs even C / n_head), cutoffs
# (enwik8: it has 208), div_value, dropout (7m: ours), beta2 and weight_decay of ADAM (7m: as for
# the others).
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
    """Arguments of data.Corpus.batches. A micro-batch has random segments (§4.1), m consecutive
    ones of a text (§4.2), or similar ones, which stand for the nearest neighbors that external
    memory has at test time (§4.3, App. B)."""
    kind = 'segments'
    if config.memory == 'long':
        kind = 'consecutive'
    elif config.memory == 'ext':
        kind = 'packed'
    return dict(kind=kind, consecutive=config.n_consecutive, bm25=config.bm25,
                other_documents=config.same_document)


def setup(model, run):
    """Before training: SystemExit if the text has no such memories; names the cutoffs that a small
    vocabulary does not have."""
    config = model.config
    corpus = run.corpus
    if config.memory == 'long' and corpus.tab >= 0:
        raise SystemExit('--memory long: each pair is a text of one segment, so no pair has long '
                         'memory; use --memory local or ext')
    # with corpus.hops the text is that of an artificial task, Needles of data.py, whose rows are
    # documents of their own
    is_one_document = len(corpus.train.offsets) == 2 and not corpus.hops
    if config.memory == 'ext' and config.same_document and is_one_document:
        raise SystemExit('--memory ext: all segments are of one document, so none has memories; '
                         'use --no-same-document')

    # the cutoffs
    V = config.vocab_size
    dropped = [x for x in parse_cutoffs(config.cutoffs) if x >= V]
    if dropped:
        print(f'the vocabulary has {V:,} tokens: cutoffs {dropped} are not used')


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


def append(x, y):
    """x, then y, along the second axis, that of tokens or memories"""
    return torch.cat([x, y], 1)


def causal_attention(q, k, v):
    """softmax(q kᵀ / sqrt(D) + mask) v: a query attends to the keys up to its own position. The
    queries have the positions of the last t of the s keys.

    q (B, t, H, D), k and v (B, s, H, D) -> (B, t, H, D)"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                    # (B, H, t or s, D)
    t = q.size(2)
    s = k.size(2)
    # on a CPU in bf16 the formula itself is faster than the fused kernel (torch 2.13), while the
    # scores are few; with 2,048 tokens it takes twice the time
    use_formula = q.is_cpu and q.dtype == torch.bfloat16 and s < 1024
    if t == s and not use_formula:                                      # faster without a mask
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    mask = q.new_full((t, s), -math.inf).triu(s - t + 1)                # -inf for later keys
    if use_formula:
        scores = (q / q.size(3) ** 0.5) @ k.mT                          # (B, H, t, s)
        y = (scores + mask).softmax(3) @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask)
    return y.transpose(1, 2)


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions, over the whole segment"""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.qkv = Linear(C, 3 * C)
        self.proj = Linear(C, C)

    def forward(self, x, past):
        """x (B, t, C), past: 2 x (B, s - t, H, D), keys and values of the tokens before, None at
        the beginning of a segment -> (B, t, C), keys and values of all tokens so far"""
        q, k, v = self.qkv(x).unflatten(2, (3, self.n_head, -1)).unbind(2)  # 3 x (B, t, H, D)

        # keys are stored with their rotation, which never changes
        first = past[0].size(1) if past else 0                              # position of x[:, 0]
        q = rotate(q, first)
        k = rotate(k, first)
        if past:
            past_k, past_v = past
            k = append(past_k, k)                                           # (B, s, H, D)
            v = append(past_v, v)
        y = causal_attention(q, k, v)                                       # (B, t, H, D)

        # without gradient, because training has no past
        return self.proj(y.flatten(2)), (k.detach(), v.detach())


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


class Block(nn.Module):
    """One pre-norm Transformer layer"""
    def __init__(self, config):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd)
        self.attention = SelfAttention(config)
        self.norm2 = RMSNorm(config.n_embd)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past):
        """x (B, t, C), past: see SelfAttention -> (B, t, C); the input of the MLP (B, t, C), which
        is g in the last layer (§3); keys and values of all tokens so far"""
        y, past = self.attention(self.norm1(x), past)
        x = x + self.dropout(y)
        g = self.norm2(x)
        return x + self.dropout(self.mlp(g)), g, past


# --------------------------------------------------------------------------------------------------
# what is new in TRIME
class Embedding(nn.Module):
    """The input and output embedding, tied: row w is E_w (Eq. 1)."""
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))

    def forward(self, tokens):
        """(B, t) -> (B, t, C)"""
        return F.embedding(tokens, self.weight)

    def logits(self, f):
        """f (Q, C) -> E_w · f of Eq. 1 for all words (Q, V), log Σ_w exp(E_w · f) (Q, 1)"""
        logits = f @ self.weight.T
        return logits, logits.logsumexp(1, keepdim=True)

    def rows_of(self, f, w):
        """For TrimeLoss, which does not keep the logits of all words: the logit of w is
        weight[row] · f + extra. Here row = w and extra = 0; AdaptiveEmbedding has rows for clusters
        of words. f (Q, C), w (Q,) -> row, extra: 2 x (Q, 1)"""
        return w[:, None], f.new_zeros(len(w), 1)


def memory_mask(kinds, doc, config, queries, columns):
    """The memories of some queries in training. Each of the N positions of a micro-batch is a query
    and a memory: memory j is the context of position j and the token after it.

    kinds       which memories, of local, long and ext, from TRIME.training_memory
    doc (B, T)  the document of each position
    queries     a slice of the N queries, Q of them
    columns     a slice of the N memories, M of them
    -> True where a query has a memory (Q, M)"""
    B, T = doc.shape
    doc = doc.flatten()
    position = torch.arange(len(doc), device=doc.device)
    i = position[queries, None]                                     # (Q, 1)
    j = position[columns]                                           # (M,)
    same_segment = i // T == j // T                                 # (Q, M)
    same_document = doc[i] == doc[j]

    # memory i has the answer to query i: local and long memories are those before it
    earlier = j < i
    mask = torch.zeros_like(earlier)

    # Eq. 2, §4.1: local memory, the earlier positions of the segment
    if 'local' in kinds:
        mask |= same_segment & earlier

    # Eq. 3, §4.2: long memory, those of the m consecutive segments
    if 'long' in kinds:
        group = (config.n_consecutive or B) * T                     # tokens of m segments
        long = earlier & (i // group == j // group)
        if config.same_document:
            long &= same_document
        mask |= long

    # §4.3: memory ext, all positions of other segments; with same_document, only those of other
    # documents than the query's (§1: "segments from other documents"; the mask is ours)
    if 'ext' in kinds:
        ext = ~same_segment
        if config.same_document:
            ext &= ~same_document
        mask |= ext
    return mask


def memory_columns(kinds, doc, config, queries):
    """A slice of the N positions that has all memories of these queries, for speed. doc (B, T),
    queries: a slice of the N queries -> a slice, not empty"""
    B, T = doc.shape
    if 'ext' in kinds:
        return slice(0, B * T)                                      # later segments, too
    if not kinds:
        return slice(0, 1)          # one that is masked: it adds exp(-1e30), 0, to each sum

    # from the beginning of the first query's segment, or of the m segments that it is one of
    group = T
    if 'long' in kinds:
        group = (config.n_consecutive or B) * T
    return slice(queries.start // group * group, queries.stop)


def trime_loss_reference(logits, query, key, targets, values, mask):
    """The TRIME objective, Eq. 5. The next word w has a term for its output embedding, and one for
    each memory whose value is w:

        P(w | c) ∝ exp(E_w · f(c)) + Σ_{j: x_j = w} exp(sim(g(c), g(c_j))),  sim(q, k) = q · k / √C

    logits (N, V)                 E_w · f(c) for all contexts c and words w
    query (N, C), key (M, C)      g(c) and g(c_j)
    targets (N,)                  w; -1: not scored
    values (M,)                   x_j; -1: no memory
    mask (N, M)                   True where a context has this memory, see memory_mask
    -> means over the scored contexts, (): of -log P(w | c); of the probability on memories; of
    -log P(w | c) without memories (Eq. 1)"""
    w = targets.clamp(min=0)[:, None]                                   # (N, 1)
    sim = product(query, key.T) / query.size(1) ** 0.5                  # (N, M)
    sim = sim.masked_fill(~mask | (values < 0), -math.inf)

    # log of the sum of the terms of w, and of all terms
    logit_w = logits.gather(1, w)                                       # first term of Eq. 5
    sim_w = sim.masked_fill(values != w, -math.inf)                     # those of the second term
    log_sum_w = torch.cat([logit_w, sim_w], 1).logsumexp(1)             # (N,)
    log_sum_all = torch.cat([logits, sim], 1).logsumexp(1)
    loss = log_sum_all - log_sum_w                                      # -log P(w | c)

    # the means
    memory_prob = (sim - log_sum_all[:, None]).exp().sum(1)
    word_loss = logits.logsumexp(1) - logit_w[:, 0]
    weight = (targets >= 0).to(loss) / (targets >= 0).sum().clamp(min=1)    # (N,)
    return (loss * weight).sum(), (memory_prob * weight).sum(), (word_loss * weight).sum()


def softmax_and_log_sum(exponents):
    """The softmax P of exponents (Q, n), and log Σ exp of them (Q, 1). For the largest exponent z,
    log P = z - log Σ, so log Σ = z - log P."""
    P = exponents.softmax(1)
    # on a CPU this takes a third of the time of logsumexp
    return P, (exponents.amax(1) - P.amax(1).log())[:, None]


class TrimeLoss(torch.autograd.Function):
    """trime_loss_reference by blocks of queries, because (N, V) or (N, N) would be too large. The
    forward pass computes the gradient too. Let z be the exponent of a term, Σ the sum of all terms
    and Σ_w the sum of the terms of w. Then P(w | c) = Σ_w / Σ, and

        d(-log P(w | c)) / dz  =  exp(z) / Σ  -  exp(z) / Σ_w, the latter for the terms of w

    f, query, key (N, C)      f(c), g(c), g(c_j) of all contexts of a micro-batch
    E (n_rows, C)             Embedding.weight: a row for each word (AdaptiveEmbedding: or cluster)
    rows_of_w, extra (N, 1)   of the targets, from Embedding.rows_of
    targets (N,)              w and x_j; -1: neither scored nor a memory
    memories_of               a function of a slice of the N queries -> memory_columns, memory_mask
    -> as trime_loss_reference; the last two without gradient"""
    @staticmethod
    def forward(ctx, f, query, key, E, rows_of_w, extra, targets, memories_of):
        n_rows = len(E)
        E = aligned(E)                  # (rows up to a multiple of 64, C)
        block = BLOCK
        if f.is_cuda:                   # a GPU needs large products: 0.25 GiB of exponents
            block = 2 ** 26 // (len(E) + len(f))
        n_scored = (targets >= 0).sum().clamp(min=1)
        scale = f.size(1) ** -0.5
        loss = f.new_zeros(())
        memory_prob = f.new_zeros(())
        word_loss = f.new_zeros(())
        df, dquery, dkey, dE, dextra = map(torch.zeros_like, (f, query, key, E, extra))
        for start in range(0, len(f), block):
            queries = slice(start, min(start + block, len(f)))      # Q queries
            columns, mask = memories_of(queries)                    # of all N, its M memories
            w = targets[queries, None]                              # (Q, 1)
            values = targets[columns]                               # x_j (M,)
            weight = (w >= 0).to(f) / n_scored                      # (Q, 1), 0 if not scored

            # exponents of Eq. 5: of the first term for all words, of the second for all memories
            logits = output_product(f[queries], E.T)                # (Q, aligned rows)
            logits[:, n_rows:] = -math.inf                          # rows of zeros: no words
            sim = query[queries] @ key[columns].T * scale           # (Q, M)
            sim.masked_fill_(~mask | (values < 0), MASKED)

            # softmaxes over all words, over all memories, over the memories with x_j = w
            P_words, log_sum_words = softmax_and_log_sum(logits)
            P_memory, log_sum_memory = softmax_and_log_sum(sim)
            P_match, log_sum_match = softmax_and_log_sum(sim.masked_fill(values != w, MASKED))

            # log Σ_w, log Σ and the loss, log Σ - log Σ_w
            logit_w = logits.gather(1, rows_of_w[queries]) + extra[queries]     # term 1 of Eq. 5
            log_sum_w = torch.logaddexp(logit_w, log_sum_match)             # with the second term
            log_sum_all = torch.logaddexp(log_sum_words, log_sum_memory)
            loss += (weight * (log_sum_all - log_sum_w)).sum()
            P_on_memory = (log_sum_memory - log_sum_all).exp()              # (Q, 1)
            memory_prob += (weight * P_on_memory).sum()
            word_loss += (weight * (log_sum_words - logit_w)).sum()
            if not ctx.needs_input_grad[0]:
                continue

            # gradients of the exponents: exp(z) / Σ, minus exp(z) / Σ_w for the terms of w. Here
            # exp(z) / Σ = P_words Σ_words / Σ for a word, P_memory Σ_memory / Σ for a memory
            dlogits = P_words.mul_(weight * (log_sum_words - log_sum_all).exp())
            # extra is in Σ_w alone. With AdaptiveEmbedding it is log P of w in its cluster; in Σ
            # the row of a cluster stands for all its words
            dextra[queries] = -weight * (logit_w - log_sum_w).exp()     # (Q, 1)
            dlogits.scatter_add_(1, rows_of_w[queries], dextra[queries])
            dsim = P_memory.mul_(weight * P_on_memory)                      # (Q, M)
            dsim -= P_match.mul_(weight * (log_sum_match - log_sum_w).exp())

            # and of the vectors whose products they are
            df[queries] = output_product(dlogits, E)
            dE += output_product(dlogits.T, f[queries])
            dquery[queries] = dsim @ key[columns] * scale
            dkey[columns] += dsim.T @ query[queries] * scale
        ctx.gradients = df, dquery, dkey, dE[:n_rows], dextra
        ctx.mark_non_differentiable(memory_prob, word_loss)
        return loss, memory_prob, word_loss

    @staticmethod
    def backward(ctx, dloss, *_):
        df, dquery, dkey, dE, dextra = (dloss * gradient for gradient in ctx.gradients)
        return df, dquery, dkey, dE, None, dextra, None, None


# --------------------------------------------------------------------------------------------------
# probabilities at test time

# values of τ and λ that `tune` tries. λ is below 1, so that words keep a part
TAUS = [0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.045, 0.065, 0.1,
        0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0]
LAMBDAS = [i / 20 for i in range(20)]


class Memories(NamedTuple):
    """The memories of Q queries (Eq. 7): of long, of local, then of external memory"""
    sim: torch.Tensor       # (Q, M) similarities, MASKED or not
    value: torch.Tensor     # (Q, M) x_j
    local: slice            # which of the M are of local memory


class QueryData(NamedTuple):
    """What `tune` needs of Q queries. They have the M memories of the largest constants it tries"""
    logit: torch.Tensor         # (Q, 1) E_w · f of the target words
    log_words: torch.Tensor     # (Q, 1) log Σ_w exp(E_w · f)
    sim: torch.Tensor           # (Q, M)
    match: torch.Tensor         # (Q, M) bool, x_j = w
    local: slice                # see Memories


# At test time P(w) has a part of the word itself and a part P_j of each memory whose value is w:
#
#     P(w) = exp(E_w · f + log_factor) + Σ_{j: x_j = w} P_j
#
# All P_j of Q queries are P_memory (Q, M); log_factor is (Q, 1).
def interpolate(P_memory, log_factor, sim, columns, tau, lam):
    """Eq. 9: P(w) <- (1 - λ) P(w) + λ P'(w). P' is the softmax of sim / τ over the memories of
    these columns (Eq. 8). A query whose memories are all masked keeps its P.

    P_memory (Q, M), changed in place, log_factor (Q, 1), sim (Q, M) -> P_memory, log_factor"""
    if lam == 0:
        return P_memory, log_factor
    sim = sim[:, columns]
    lam = torch.where((sim > MASKED).any(1, keepdim=True), lam, 0.0)            # (Q, 1)
    P_memory *= 1 - lam
    P_memory[:, columns] += lam * (sim / tau).softmax(1)
    return P_memory, log_factor + torch.log1p(-lam)


@dataclass
class Inference:
    """Which memories are used at test time. Subclasses define `probabilities` and `constants`"""
    local: bool = False         # local memory: the window
    long: int = 0               # tokens of long memory; not used without local
    n_neighbors: int = 0        # K of external memory; 0: none

    @property
    def is_empty(self):
        return not self.local and self.n_neighbors == 0

    def log_p(self, data):
        """log P (Q, 1) of the target words of QueryData. Its memories are: of long memory the last
        `long` before the local ones, all local ones, the first n_neighbors of external memory"""
        local = data.local
        used = slice(max(0, local.start - self.long), local.stop + self.n_neighbors)
        P_memory, log_factor = self.probabilities(data.log_words, data.sim[:, used])
        P_match = (P_memory * data.match[:, used]).sum(1, keepdim=True)         # Σ_{j: x_j = w} P_j
        return torch.logaddexp(data.logit + log_factor, P_match.log())


@dataclass
class TrimeInference(Inference):
    """Words and memories make one distribution. With external memory it is interpolated with one of
    all memories:

        P(w)  ∝ exp(E_w · f) + Σ_{j: x_j = w} exp(sim_j / τ)            Eq. 6
        P'(w) ∝ Σ_{j: x_j = w} exp(sim_j / τ')                          Eq. 8
        P(w)  <- (1 - λ) P(w) + λ P'(w)                                 Eq. 9

    Why the second one: the nearest entries of a datastore are more similar to the query than the
    memories in training. Their order is still right, but no single τ suits both it and the balance
    with the words (App. A)."""
    tau: float = 1.0            # τ of Eq. 6
    tau_ext: float = 1.0        # τ' of Eq. 8
    lam_ext: float = 0.0        # λ of Eq. 9

    def probabilities(self, log_words, sim):
        """log_words (Q, 1): log Σ_w exp(E_w · f); sim (Q, M), the last n_neighbors of ext
        -> P_memory (Q, M), log_factor (Q, 1), the parts of P(w), see above"""
        # Eq. 6, one softmax over words and memories
        exponents = sim / self.tau
        log_total = torch.logaddexp(log_words, exponents.logsumexp(1, keepdim=True))
        P_memory = (exponents - log_total).exp()

        # Eq. 8 and 9
        return interpolate(P_memory, -log_total, sim, slice(None), self.tau_ext, self.lam_ext)

    def constants(self):
        """What `tune` tries besides tau, long and n_neighbors, {constant: its values}; and the
        values to start with"""
        if self.n_neighbors == 0:
            return {}, {}
        return (dict(tau_ext=TAUS, lam_ext=LAMBDAS),
                dict(lam_ext=0.25))             # not 0, where τ' would have no effect


@dataclass
class LinearInference(Inference):
    """For a model that was trained without memory: P(w) of Eq. 1 is interpolated (Eq. 9) with P' of
    local and long memory (the continuous cache, Grave et al. 2017), then with P' of external memory
    (kNN-LM, Khandelwal et al. 2020). In kNN-LM sim_j = -|q - k|² / (2 sqrt(C)), which is TRIME's up
    to a constant if all keys have the same norm."""
    tau: float = 1.0            # τ of the cache
    lam: float = 0.0            # λ of the cache
    tau_ext: float = 1.0        # τ of kNN-LM
    lam_ext: float = 0.0        # λ of kNN-LM

    def probabilities(self, log_words, sim):
        """As TrimeInference.probabilities"""
        P_memory = torch.zeros_like(sim)
        start = sim.size(1) - self.n_neighbors                          # of external memory
        past = slice(start)
        ext = slice(start, None)
        P_memory, log_factor = interpolate(P_memory, -log_words, sim, past, self.tau, self.lam)
        return interpolate(P_memory, log_factor, sim, ext, self.tau_ext, self.lam_ext)

    def constants(self):
        """As TrimeInference.constants"""
        values, first = {}, {}
        if self.local:
            values['lam'] = LAMBDAS
            first['lam'] = 0.25
        if self.n_neighbors:
            values.update(tau_ext=TAUS, lam_ext=LAMBDAS)
            first['lam_ext'] = 0.25
        return values, first


# --------------------------------------------------------------------------------------------------
# the model
class Traced(NamedTuple):
    """A part of what was read to predict a token: ids[start:end] of a text"""
    weight: float
    ids: torch.Tensor       # (n,) the document, or another text
    start: int
    end: int


class State(NamedTuple):
    """What a stream keeps of a text; its size is bounded"""
    text: torch.Tensor      # (B, L) its last tokens, at most long + T
    keys: torch.Tensor      # (B, L, C) g of each of them, as first encoded
    window: torch.Tensor    # (B, n, C) g of the tokens of the current window, the last of the text
    past: list | None       # of each layer; of a Block, keys and values of the window's tokens


@dataclass
class EvalMemory:
    """What the model reads at test time; prepare_eval sets it"""
    inference: Inference            # which memories, and the constants of their probabilities
    stride: int                     # tokens scored per window (App. D)
    store: 'Datastore | None' = None    # external memory
    tab: int = -1                   # the id of TAB in pairs; -1: texts are no pairs


COMPILED = (Block,)     # layers that train.py compiles


def init_weights(model):
    """GPT-2's initial weights, for width C"""
    config = model.config
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            std = 0.02 * math.sqrt(768 / config.n_embd)
            if name.endswith('proj.weight'):                        # what is added to x
                std /= math.sqrt(2 * config.n_layer)
            elif 'tail_proj' in name:
                std = weight.size(1) ** -0.5
            nn.init.normal_(weight, std=std)

    # the norms of g are √C times this weight, so C^(1/4) at first, and q · k / √C is at most 1
    if config.memory == 'ext':
        nn.init.constant_(model.blocks[-1].norm2.weight, config.n_embd ** -0.25)


def has_local_memory(config):
    """Is the model trained with local memory?"""
    return config.memory in ('local', 'long') or (config.memory == 'ext' and config.p < 1)


class TRIME(nn.Module):
    """A Transformer language model whose output softmax is over words and memories"""
    PIECE = 512         # tokens that eval.py passes to stream at once: log P are (PIECE, V)

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.way = 'on'                                             # see ways
        self.kernel = 'auto'                                        # torch: trime_loss_reference
        Table = AdaptiveEmbedding if config.cutoffs else Embedding
        self.embedding = Table(config)                              # also the output embedding E
        self.blocks = self.make_layers(config)
        self.norm = RMSNorm(config.n_embd)
        init_weights(self)
        self.eval_memory = EvalMemory(
            TrimeInference(local=has_local_memory(config)),
            stride=config.stride or config.block_size // 2 or 1)

    def make_layers(self, config):
        """The layers; compared/sru.py has others"""
        return nn.ModuleList(Block(config) for _ in range(config.n_layer))

    def on_device(self, ids):
        """Token ids of a corpus, an array -> a tensor where the model is"""
        return torch.as_tensor(ids.astype(int), device=self.norm.weight.device)

    def encode(self, tokens, past=None):
        """§3: f is the output of the Transformer, g the input of the last MLP. tokens (B, t), past:
        keys and values of the tokens before -> f, g (B, t, C) of their contexts, the new past"""
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        past = past or [None] * len(self.blocks)
        new_past = []
        for block, block_past in zip(self.blocks, past, strict=True):
            x, g, block_past = block(x, block_past)                 # g of the last one is returned
            new_past.append(block_past)
        return self.norm(x), g, new_past

    # training
    def training_memory(self, seed, progress):
        """Which memories a micro-batch has, of local, long and ext: those of the config, with the
        exceptions of the paper -> a set"""
        config = self.config
        # §5.2: the first steps are by Eq. 1, because with memories training was not stable
        if progress < config.ce_warmup:
            return set()
        if config.memory != 'ext':
            of_config = {'none': set(), 'local': {'local'}, 'long': {'local', 'long'}}
            return of_config[config.memory]

        # validation uses local memory alone, if the model is trained with it: ext is not causal,
        # because other segments may come later
        if not self.training:
            return {'local'} if has_local_memory(config) else set()

        # §4.3: often without local memory; else the model uses it and ignores ext (Table 15)
        if random.Random(seed).random() < config.p:
            return {'ext'}
        return {'local', 'ext'}

    def forward(self, batch, progress):
        """batch: data.Batch; progress: step / max_steps -> the loss () in nats per token, causal in
        eval mode; what to log"""
        kinds = self.training_memory(batch.seed, progress)
        if self.training:
            torch.manual_seed(batch.seed)                           # for dropout
        f, g, _ = self.encode(batch.tokens)
        f = fp32(f).flatten(0, 1)                                   # (N, C)
        g = fp32(g).flatten(0, 1)
        key = g if self.config.memory_grad else g.detach()
        targets = batch.targets.flatten()                           # (N,)

        def memories_of(queries):
            """-> the slice of the N memories that a slice of queries can have, and the mask"""
            columns = memory_columns(kinds, batch.doc, self.config, queries)
            return columns, memory_mask(kinds, batch.doc, self.config, queries, columns)

        # Eq. 5, in fp32 (see product)
        with torch.autocast(g.device.type, enabled=False):
            if self.kernel == 'torch':
                columns, mask = memories_of(slice(0, len(f)))
                logits, _ = self.embedding.logits(f)
                loss, memory_prob, word_loss = trime_loss_reference(
                    logits, g, key[columns], targets, targets[columns], mask)
            else:
                rows_of_w, extra = self.embedding.rows_of(f, targets.clamp(min=0))
                loss, memory_prob, word_loss = TrimeLoss.apply(
                    f, g, key, self.embedding.weight, rows_of_w, extra, targets, memories_of)
        return loss, dict(memory_prob=memory_prob, loss_without_memory=word_loss)

    # inference
    @property
    def inference(self):
        """The Inference of the current `way`"""
        if self.way == 'off':
            return TrimeInference()
        return self.eval_memory.inference

    def empty_state(self, B):
        """The state before B texts"""
        no_keys = self.norm.weight.new_zeros(B, 0, self.config.n_embd)
        return State(no_keys[:, :, 0].long(), no_keys, no_keys, None)

    @torch.no_grad()
    def windows(self, tokens, state=None):
        """Encodes tokens (B, t), which continue the text of `state`, window by window (App. D): a
        window grows to T tokens, the next one begins with its last T - stride, encoded again.
        Yields f, g (B, n, C) of the next n tokens, and the State after them."""
        T = self.config.block_size
        kept = T + self.inference.long
        text, keys, window, past = state or self.empty_state(len(tokens))
        while tokens.numel():
            # a full window: the next one begins with the end of this one
            if window.size(1) == T:
                overlap = text[:, -T:][:, self.eval_memory.stride:]     # T - stride tokens
                _, window, past = self.encode(overlap)

            # as many tokens as there is room for
            new, tokens = tokens.tensor_split([T - window.size(1)], 1)
            f, g, past = self.encode(new, past)
            text = append(text, new)[:, -kept:]
            keys = append(keys, g)[:, -kept:]
            window = append(window, g)
            yield f, g, State(text, keys, window, past)

    def past_memories(self, g, state, queries):
        """Long and local memory (Eq. 2, 3). Memory j is the context that ends with text[j], its
        value is text[j + 1]. g, state, queries: see `memories`, below -> Memories"""
        text, keys, window, _ = state
        L = text.size(1)
        window_start = L - window.size(1)
        position = torch.arange(L, device=g.device)
        i = position[-g.size(1):, None][queries]                    # (n, 1), n queries of a text
        g = g[:, queries]                                           # (B, n, C)

        # the memories are `first` to L - 2; those in the window are local
        first = L - 1                                               # none
        if self.inference.local:
            first = max(0, window_start - self.inference.long)
        j = position[first:-1]                                      # (M,)

        # keys of tokens in the window are of its latest encoding
        key = append(keys[:, :window_start], window)[:, first:-1]   # (B, M, C)
        sim = g @ key.mT / g.size(2) ** 0.5                         # (B, n, M)
        mask = (j < i) & self.same_side(text, i, j)                 # (B, n, M)
        sim = sim.masked_fill(~mask, MASKED)

        # values, for all queries the same; shuffled, each query exchanges those of its memories
        value = text[:, None, first + 1:].expand_as(sim)            # (B, n, M)
        if self.way == 'shuffled':
            n_earlier = (i - first).clamp(min=1)                    # memories of a query (n, 1)
            value = text[:, exchanged(j, first, n_earlier) + 1]
        local = slice(max(0, window_start - first), L - 1 - first)
        return Memories(sim.flatten(0, 1), value.flatten(0, 1), local)

    def same_side(self, text, i, j):
        """App. C: in a pair, a query of the target, from TAB on, has no memory of the source: no
        TAB may be after position j, up to i. text (B, L), i (n, 1), j (M,) -> (B, n, M) bool"""
        tabs = (text == self.eval_memory.tab).cumsum(1)             # (B, L), up to each token
        return tabs[:, None, j] == tabs[:, i]

    def external_memories(self, query):
        """Eq. 4: the K nearest entries of the datastore to queries (Q, C)
        -> similarities and values, 2 x (Q, K)"""
        store = self.eval_memory.store
        sim, j = store.search(query, self.inference.n_neighbors)
        if self.way == 'shuffled':
            j = exchanged(j, 0, store.index.ntotal)
        return sim, store.text[j + 1]

    def memories(self, g, state, queries=slice(None)):
        """The memories of Q queries (Eq. 2 to 4, 7). The queries are the last n tokens of the text
        of `state`, with g (B, n, C), or of these tokens those with the indices `queries`
        -> Memories"""
        past = self.past_memories(g, state, queries)
        if self.inference.n_neighbors == 0:
            return past
        sim, value = self.external_memories(g[:, queries].flatten(0, 1))
        return Memories(append(past.sim, sim), append(past.value, value), past.local)

    @torch.no_grad()
    def read(self, tokens, state=None):
        """The new state of stream(tokens, state), without predictions; any t >= 0"""
        state = state or self.empty_state(len(tokens))
        for _, _, state in self.windows(tokens, state):
            pass
        return state

    def log_probs(self, tokens):
        """log P (B, t, V) fp32 of the token after each of tokens (B, t), each row a document"""
        return self.stream(tokens)[0]

    def logits(self, f):
        """E_w · f of Eq. 1, without memories: f (B, t, C) -> (B, t, V)"""
        return self.embedding.logits(f.flatten(0, -2))[0].unflatten(0, f.shape[:-1])

    @torch.no_grad()
    def states(self, tokens, state=None):
        """f (B, t, C), whose `logits` predict the token after each of tokens (B, t) without
        memories; the tokens continue the text of `state`; the new state"""
        parts = []
        for f, _, state in self.windows(tokens, state):
            parts.append(f)
        return torch.cat(parts, 1), state

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """Predicts the token after each of tokens (B, t), t >= 1, which continue the text of
        `state`, by `inference`; weights of fp32, no autocast -> log P (B, t, V), the new state"""
        parts = []
        for f, g, state in self.windows(tokens, state):
            logits, log_words = self.embedding.logits(f.flatten(0, 1))          # (Q, V)
            memories = self.memories(g, state)
            P_memory, log_factor = self.inference.probabilities(log_words, memories.sim)
            log_probs = logits + log_factor                                     # of words alone
            if P_memory.size(1) > 0:
                P_match = torch.zeros_like(logits).scatter_add_(1, memories.value, P_memory)
                log_probs = torch.logaddexp(log_probs, P_match.log())
            parts.append(log_probs.unflatten(0, f.shape[:2]))                   # (B, n, V)
        return torch.cat(parts, 1), state

    def ways(self):
        """The ways in which a text can be read, values of `way`. on: with memory; shuffled:
        memories exchange their values; off: words alone"""
        if self.eval_memory.inference.is_empty:
            return ('off',)
        memory = self.eval_memory
        store_of_pairs = memory.store is not None and memory.store.of_pairs
        if memory.tab >= 0 or store_of_pairs:   # `exchanged` would take values from sources
            return ('on', 'off')
        return ('on', 'shuffled', 'off')

    @torch.no_grad()
    def trace(self, tokens, t, state=None):
        """The memories j with the largest parts of P when token t + 1 of tokens (n,) is predicted,
        at most 100, the largest first -> [Traced]: the part; the last 12 tokens of c_j, then x_j.
        state: of read(tokens[None, :t]), computed if None"""
        if state is None:
            state = self.read(tokens[None, :t])

        # the memories' parts of P (Eq. 6 to 9)
        f, g, state = next(self.windows(tokens[None, t:t + 1], state))
        _, log_words = self.embedding.logits(f[0])
        sim = self.memories(g, state).sim                           # (1, M)
        P_memory, _ = self.inference.probabilities(log_words, sim)

        # memory number `index` of the M is of this text or, of the last K, of the datastore
        K = self.inference.n_neighbors
        n_past = P_memory.size(1) - K
        if K:
            # the search of self.memories once more, for the numbers of the entries
            store = self.eval_memory.store
            _, neighbors = store.search(g[0], K)                    # (1, K)

        # c_j ends with token j of its text, x_j is token j + 1
        parts, order = P_memory[0].sort(descending=True, stable=True)
        rows = []
        for part, index in zip(parts[:100].tolist(), order[:100].tolist()):
            ids, j = tokens, t - n_past + index
            if index >= n_past:
                ids, j = store.text, neighbors[0, index - n_past].item()
            if part > 0:
                rows.append(Traced(part, ids, max(0, j - 11), j + 2))
        return rows


def exchanged(j, first, n):
    """For the way `shuffled`: memory j of n memories from `first` on becomes the memory n // 2
    places further, cyclically. A single memory stays."""
    return first + (j - first + n // 2) % n


# --------------------------------------------------------------------------------------------------
# external memory
def to_numpy(x):
    """A tensor as faiss needs it: an array of fp32"""
    return x.float().cpu().numpy()


# parts of faiss's messages about too little memory, too many open files, or no permission
NOT_NOW = 'could not mmap|allocate|bad_alloc|MemoryError|Too many|Permission'


@contextlib.contextmanager
def c_prints_to_stderr():
    """What faiss prints on standard output, which is for results such as translations, goes to
    standard error. C has a buffer of its own, which is emptied before and after."""
    flush = ctypes.CDLL(None).fflush
    flush(None)
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def open_index(folder, about):
    """The index in folder; None if there is none or, with a message, if a file is damaged.
    SystemExit if it depends on other values than those of `about`, or cannot be opened for another
    reason: then it may be good, and is kept"""
    import faiss
    try:
        saved = json.loads((folder / 'about.json').read_text())
        if 'checkpoint' not in saved:
            raise ValueError('about.json')
        if saved != about:
            raise SystemExit(f'{folder} is of another checkpoint, text or stride, or of an '
                             'earlier version: delete it')

        # keys.ivfdata is memory-mapped: a search reads from disk what it needs. Reading beyond the
        # end of a file that was cut short would kill the process (SIGBUS), so its size is compared
        with c_prints_to_stderr():
            index = faiss.read_index(
                f'{folder}/keys.faiss', faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)
        lists = faiss.downcast_InvertedLists(index.invlists)
        if (folder / 'keys.ivfdata').stat().st_size != lists.totsize:
            raise ValueError('keys.ivfdata')
        return index
    except FileNotFoundError:                                       # there is no store
        return None
    except Exception as e:                                          # faiss's is a RuntimeError
        if isinstance(e, OSError) or re.search(NOT_NOW, repr(e)):
            raise SystemExit(f'{folder} cannot be opened; delete it if it is damaged: '
                             f'{repr(e)[-200:]}')
        print(f'{folder} is damaged and is built again: {e!r:.200}')


class Datastore:
    """External memory, Eq. 4: entry j is the key g(c_j) and the value x_j of position j of a text.
    The keys are fp16 in a faiss inverted file, memory-mapped; similarities are exact."""
    SHARD = 2 ** 31                     # bytes of keys held in memory while a store is built

    def __init__(self, folder, model, text, about, nprobe, new_folder, progress_bar, pairs=None):
        """Opens the store of text (n + 1,) in folder; builds it if there is none or it is damaged.

        about           a dict of what it depends on
        nprobe          lists that a search reads, 0: all
        new_folder, progress_bar    of data.py
        pairs           data.Pairs of the text, of which only targets have entries
        SystemExit if the folder has another store or the disk no room"""
        import faiss
        self.text = model.on_device(text)
        self.nprobe = nprobe
        self.of_pairs = pairs is not None
        self.index = open_index(folder, about)
        if self.index is None:
            with new_folder(folder) as temporary:                   # half a store is never opened
                self.build(temporary, model, progress_bar, pairs)
                (temporary / 'about.json').write_text(json.dumps(about))
                shutil.rmtree(folder, ignore_errors=True)           # a damaged one
            self.index = open_index(folder, about)

        # what a search returns, times factor / sqrt(C), is the similarity, see LinearInference. The
        # lists that it reads are those of the nearest centroids, by |q - k|², for both
        if model.config.memory == 'none':
            self.factor = -0.5                                      # kNN-LM: |q - k|²
        else:
            self.index.metric_type = faiss.METRIC_INNER_PRODUCT
            self.factor = 1.0                                       # TRIME: q · k

    def keys(self, text, model, progress_bar, desc, pairs):
        """Yields keys (s, C) of some contexts of the text (1, n), and their positions (s,)."""
        if pairs:                                                   # each is encoded alone
            for i in progress_bar(range(len(pairs)), desc):
                batch = pairs[i]
                _, g, _ = model.encode(batch.tokens.to(self.text.device))
                position = pairs.split.offsets[batch.doc] + np.arange(g.size(1))    # (B, T)
                scored = batch.targets >= 0
                yield g[scored], position[scored]
            return
        start = 0
        n_more = max(0, text.size(1) - model.config.block_size)     # tokens after the first window
        n_windows = 1 + math.ceil(n_more / model.eval_memory.stride)
        for _, g, _ in progress_bar(model.windows(text), desc, n_windows):
            yield g[0], start + np.arange(g.size(1))
            start += g.size(1)

    @torch.no_grad()
    def build(self, folder, model, progress_bar, pairs):
        """Writes the index, keys.faiss, and the contents of its lists, keys.ivfdata. `folder` is
        one of new_folder, in the folder of the run. SystemExit if the disk has no room for them"""
        import faiss
        from faiss.contrib.ondisk import merge_ondisk
        text = self.text[None, :-1]                                 # (1, n)
        n = text.size(1)
        T = model.config.block_size
        C = model.config.n_embd
        size = 2 * C + 8                                            # bytes: a key, its number
        run = folder.parent
        print(f'{run}: a datastore of at most {n:,} entries, {n * size / 1e9:.2f} GB on disk; to '
              f'build it, twice that and {min(n * size, self.SHARD) / 1e9:.2f} GB of memory')
        if shutil.disk_usage(folder).free < 2 * n * size:
            raise SystemExit(f'{run}: a datastore needs {2 * n * size / 1e9:.2f} GB of free disk '
                             'space')

        # an empty index, an inverted file: each key is in the list of its nearest centroid, and a
        # search reads the lists of the nprobe centroids nearest to the query. Keys are stored as
        # they are, not as differences from their centroid, so rounding is the same in all lists
        n_lists = min(n // 1000, 16_384) or 1
        index = faiss.index_factory(C, f'IVF{n_lists},SQfp16')
        index.by_residual = False

        # the centroids: k-means on about 64 keys per list, of one segment in every `step` tokens
        step = max(T, T * n // (64 * n_lists))
        sample = [model.encode(part[:, :T])[1] for part in text.split(step, 1)]     # g (1, T, C)
        index.train(to_numpy(torch.cat(sample, 1)[0]))

        # keys are added; when the index has SHARD bytes, it is written to a file, then emptied
        shards = []

        def write_shard():
            shards.append(f'{folder}/shard-{len(shards)}')
            faiss.write_index(index, shards[-1])
            index.reset()

        for keys, positions in self.keys(text, model, progress_bar, 'keys of the datastore', pairs):
            index.add_with_ids(to_numpy(keys), positions)
            if index.ntotal * size >= self.SHARD:
                write_shard()
        write_shard()

        # the files become one
        with c_prints_to_stderr():
            merge_ondisk(index, shards, f'{folder}/keys.ivfdata')
        faiss.write_index(index, f'{folder}/keys.faiss')
        for shard in shards:
            Path(shard).unlink()

    def search(self, query, K):
        """Searches nprobe lists (0: all) for the K entries most similar to queries (Q, C)
        -> similarities, the highest first, and numbers of the entries, 2 x (Q, K); MASKED and -1
        where there are fewer"""
        self.index.nprobe = self.nprobe or self.index.nlist
        sim, j = map(torch.from_numpy, self.index.search(to_numpy(query), K))
        sim = self.factor * sim / query.size(1) ** 0.5
        return sim.clamp(min=MASKED).to(query), j


# --------------------------------------------------------------------------------------------------
# adaptive softmax, for the 267,744 words of WikiText-103: --cutoffs
class AdaptiveEmbedding(Embedding):
    """With cutoffs the embedding is adaptive (Baevski & Auli 2019): ids are in order of frequency,
    those between two cutoffs are a cluster. Cluster a = 1, 2, ... has vectors of C / div_value^a
    numbers, W_a that projects them to C, and one row in `weight`, the head, which has the frequent
    words and then the clusters:

        P(w) = P_head(w)  or  P_head(a) P_a(w) in cluster a,    P_a(w) ∝ exp(table_a[w] · W_aᵀ f)"""
    def __init__(self, config):
        # the head has the ids below the first cutoff, cluster a those up to the next one; a small
        # vocabulary ends before some cutoffs
        cutoffs = parse_cutoffs(config.cutoffs)
        ends = [x for x in cutoffs if x < config.vocab_size] + [config.vocab_size]
        # rows of the head: its words, then one for each cluster
        super().__init__(replace(config, vocab_size=ends[0] + len(ends) - 1))
        self.ends = ends
        self.tables = nn.ParameterList()
        self.tail_proj = nn.ModuleList()
        for a, size in enumerate(np.diff(ends), 1):
            width = max(1, config.n_embd // config.div_value ** a)
            self.tables.append(torch.empty(size, width))
            self.tail_proj.append(Linear(width, config.n_embd))

    def clusters(self, ids):
        """For each cluster: its number a, its first id, True for the ids in it"""
        for a, (start, end) in enumerate(pairwise(self.ends), 1):
            yield a, start, (ids >= start) & (ids < end)

    def forward(self, tokens):
        """(B, t) -> (B, t, C)"""
        # clamp: a placeholder for words of clusters, overwritten below
        x = F.embedding(tokens.clamp(max=self.ends[0] - 1), self.weight)
        for a, start, inside in self.clusters(tokens):
            vectors = F.embedding(tokens[inside] - start, self.tables[a - 1])
            x[inside] = self.tail_proj[a - 1](vectors).type_as(x)
        return x

    def tail(self, a, f):
        """log P_a of all words of cluster a: f (Q, C) -> (Q, words)"""
        return (f @ self.tail_proj[a - 1].weight @ self.tables[a - 1].T).log_softmax(1)

    def logits(self, f):
        """f (Q, C) -> E_w · f of Eq. 1 for all words (Q, V), log Σ_w exp(E_w · f) (Q, 1). The logit
        of a word of cluster a is the logit of the cluster's row plus log P_a(w)."""
        head = f @ self.weight.T
        words, clusters = head.tensor_split([self.ends[0]], 1)
        tails = [row[:, None] + self.tail(a, f) for a, row in enumerate(clusters.T, 1)]
        # the words of a cluster sum to its row, so the sum over the head is that over all words
        return torch.cat([words, *tails], 1), head.logsumexp(1, keepdim=True)

    def rows_of(self, f, w):
        """The logit of word w is that of its row of the head, or of its cluster's row plus
        log P_a(w): f (Q, C), w (Q,) -> the rows; log P_a(w), 0 for words of the head: 2 x (Q, 1)"""
        row = w[:, None].clone()
        extra = f.new_zeros(len(w), 1)
        for a, start, inside in self.clusters(w):
            row[inside] = self.ends[0] + a - 1
            # log P_a (Q, words) of some queries at a time; on a GPU it has up to 0.5 GiB
            n_queries = 2 ** 27 // len(self.tables[a - 1]) if f.is_cuda else 256
            pieces = torch.where(inside)[0].split(n_queries)
            for queries in pieces:
                if f.is_cuda and len(pieces) == 1:
                    log_P = self.tail(a, f[queries])
                else:               # too large to keep: the backward pass computes it again
                    log_P = checkpoint(self.tail, a, f[queries], use_reentrant=False)
                # an index, because gather would keep log_P for the backward pass
                extra[queries, 0] = log_P[torch.arange(len(queries)), w[queries] - start]
        return row, extra


# --------------------------------------------------------------------------------------------------
# evaluation
def prepare_eval(model, corpus, external, args, path):
    """Sets model.eval_memory: opens the datastore of external.train, which is kept in the folder of
    the checkpoint `path`; tunes on another split of corpus. args: EvalConfig, and split,
    retrieve_from, new_folder, progress_bar of eval.py. SystemExit if tokens would find themselves,
    or --stride is too large; see Datastore, too. -> {name: constant}, {} with memory none"""
    # no memories while a datastore is built, and if there are none
    memory = model.eval_memory
    memory.inference = TrimeInference()
    T = model.config.block_size
    if args.stride > T:
        raise SystemExit(f'--stride {args.stride} is more than the block size of {path}, {T}')
    memory.stride = args.stride or memory.stride
    memory.tab = corpus.tab

    # which memories: those of --memory; without it those of Table 1, of pairs ext alone (§5.4) or,
    # with --retrieve-from, those of Table 5. --retrieve-from adds ext in any case
    trained = model.config.memory
    default = dict(long='local,long', ext='local,long,ext').get(trained, trained)
    if corpus.tab >= 0 and trained == 'ext':
        default = 'ext'
    names = args.memory or default
    if args.retrieve_from:
        names = f'{args.memory or "local,long"},ext'
    names = names.split(',')
    if names == ['none']:
        return {}

    # the kinds of memory, each of the largest size that `tune` can choose
    split = corpus.tuning_split(args.split)
    kind = LinearInference if trained == 'none' else TrimeInference
    inference = kind(local='local' in names, long=args.long if 'long' in names else 0)
    if 'ext' in names:
        inference.n_neighbors = 1024
        memory.store = open_store(model, corpus, external, args, path)

    # τ, λ, K and the tokens of long memory
    memory.inference = inference
    memory.inference = tune(collect(model, split, 4096, args.progress_bar), inference)
    print(f'{path}: {memory.inference}, tuned on {split.name}')
    return asdict(memory.inference)


def open_store(model, corpus, external, args, path):
    """The Datastore of external.train, arguments as in prepare_eval"""
    if args.split == 'train' and external.fingerprint == corpus.fingerprint:
        raise SystemExit('--split train with --memory ext: each scored token would find itself in '
                         'the datastore; choose another --split')
    about = dict(checkpoint=hashlib.sha256(path.read_bytes()).hexdigest(),
                 corpus=external.fingerprint, pairs=external.tab >= 0,
                 stride=model.eval_memory.stride)
    pairs = None
    if external.tab >= 0:
        T = model.config.block_size
        pairs = external.batches(external.train, kind='documents', block_size=T,
                                 micro_batch=1 + 4096 // T, seed=0)
    folder = path.parent / f'datastore-{external.folder.name}'
    return Datastore(folder, model, external.train.tokens, about, args.nprobe, args.new_folder,
                     args.progress_bar, pairs)


@torch.no_grad()
def collect(model, split, n_queries, progress_bar):
    """Draws about n_queries random tokens from the first 65,536 of a split (all, if it has no more
    than n_queries; of pairs, those that are in targets remain) and computes what `tune` needs of
    them, with the memories of model.inference -> [QueryData]"""
    # documents, the last one cut
    text = split.tokens[:65_536]
    documents = np.split(text, split.offsets[1:-1])

    # random queries: equally spaced ones could all be at the same place of a document, for example
    # at its beginning, where memory is empty
    collected = []
    tab = model.eval_memory.tab
    rng = np.random.default_rng(0)
    for ids in progress_bar(documents, 'tokens read to tune', size=len):
        tokens = model.on_device(ids)
        drawn = rng.random(len(ids[1:])) < n_queries / len(text)
        if tab >= 0:                                            # of a pair, the target alone
            drawn &= (ids[:-1] == tab).cumsum() > 0
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
            match = (value == w) & (sim > MASKED)
            collected.append(QueryData(logits.gather(1, w), log_words, sim, match, local))
    return collected


def tune(collected, inference):
    """Chooses an Inference with high likelihood for the QueryData of `collect`, by coordinate
    ascent: it sets tau, long (at most inference.long) and the other constants in turn to their best
    values, until none improves. Ties keep the current value, so long stays inference.long if no
    document is that long. The search starts with K = 1: from K = 1,024, in a model trained with
    p = 0, it ended at constants with which ext was worse than no ext."""
    scores = {}                                         # of the candidates so far

    def score(candidate):
        key = astuple(candidate)
        if key not in scores:
            scores[key] = sum(candidate.log_p(data).sum().item() for data in collected)
        return scores[key]

    # sizes of long memory: 256, 512, ... tokens, at most inference.long; 0 is --memory local
    long = {min(256 * 2 ** n, inference.long) for n in range(20)}
    grids, first = inference.constants()
    grids = dict(tau=TAUS, long=sorted(long), **grids)                  # in this order
    if inference.n_neighbors:
        grids['n_neighbors'] = [1, 8, 64, 512, 1024]
        first['n_neighbors'] = 1
    inference = replace(inference, **first)

    # coordinate ascent
    before = None
    while inference != before:
        before = inference
        for name, values in grids.items():
            candidates = [replace(inference, **{name: value}) for value in values]
            inference = max([inference, *candidates], key=score)
    return inference


def datastore_accuracy(runs, args):
    """Whether the next token is among the most similar entries (Table 13, for runs with --memory
    ext). top-K: the share of the queries for which one of the K most similar entries has the next
    token w as value, x_j = w. The queries are about 16,384 of the first 65,536 tokens of the split,
    the same ones for all runs; the standard error is at most 0.4%. recall: the share of the 1,024
    most similar entries that the search returns.
    -> {run: {'top-1': .., ..., 'recall': ..}}"""
    result = {}
    for run in runs:
        model = run.model
        store = model.eval_memory.store
        if store is None:
            raise SystemExit(f'{run.name} has no datastore: --task datastore needs --memory ext')

        # whether the entries, the most similar one first, have the next token as value
        tuned = model.eval_memory.inference
        model.eval_memory.inference = TrimeInference(n_neighbors=1024)
        collected = collect(model, run.split, 16_384, args.progress_bar)
        model.eval_memory.inference = tuned
        match = torch.cat([data.match for data in collected])                   # (Q, 1024)
        shares = result[run.name] = {}
        for K in 1, 8, 64, 1024:
            shares[f'top-{K}'] = match[:, :K].any(1).float().mean().item()

        # recall, for each 32nd of the first 8,192 tokens, read as one text; a search of all lists
        # is exact
        windows = model.windows(model.on_device(run.split.tokens[None, :8192]))
        query = torch.cat([g[0] for _, g, _ in windows])[::32]                  # (Q, C)
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
    """The first 1,024 bytes of this file as two segments, from tokens to the loss; 40 steps of
    training, the first ten without memories; then the memories that weigh most for one byte"""
    torch.manual_seed(0)
    text = Path(__file__).read_bytes()[:1025]
    tokens = torch.tensor(list(text))
    inputs = tokens[:-1].view(2, 512)
    targets = tokens[1:]                                                # (N,)
    doc = torch.zeros_like(inputs)
    model = TRIME(TRIMEConfig(vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    n_parameters = sum(p.numel() for p in model.parameters())
    every = slice(0, 1024)
    for step in range(40):
        f, g, _ = model.encode(inputs)
        f = f.flatten(0, 1)                                             # (N, C)
        g = g.flatten(0, 1)
        logits, _ = model.embedding.logits(f)
        kinds = {'local'} if step >= 10 else set()
        mask = memory_mask(kinds, doc, model.config, every, every)
        loss, memory_prob, word_loss = trime_loss_reference(logits, g, g, targets, targets, mask)
        if step == 0:
            print(f"""TRIMEConfig()                   {n_parameters:,} parameters
f and g of all contexts (N, C)  {tuple(f.shape)}
logits of all words     (N, V)  {tuple(logits.shape)}
mask of memories        (N, M)  {tuple(mask.shape)}
loss at first                   {loss:.3f}, ln 256 = {math.log(256):.3f}""")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f'loss in step 40                 {loss:.3f}, by the words alone {word_loss:.3f}')

    # the place where one memory has the largest part of P, for the right byte or a wrong one
    model.eval()
    t = max(range(40, 511, 5), key=lambda t: model.trace(tokens, t)[0].weight)
    print(f'After {text[t - 39:t + 1]!r} comes {text[t + 1:t + 2]!r}.')
    print('The memories with the largest parts of P, each with the byte after it, right or wrong:')
    for row in model.trace(tokens, t)[:5]:
        print(f'{row.weight:.3f}  {text[row.start:row.end - 1]!r} -> {text[row.end - 1:row.end]!r}')


if __name__ == '__main__':
    demo()
