"""
TRIME: a language model trained to find its next word among the contexts that it has just read.

    Zexuan Zhong, Tao Lei and Danqi Chen, "Training Language Models with Memory Augmentation",
    EMNLP 2022, arXiv:2205.12674

A Transformer predicts the next word by comparing its state with one vector per word. TRIME lets
other contexts of the batch take part: a context that was followed by "cat" is one more vector for
"cat". Both kinds of vector stand in one softmax and are trained together. At test time the same
formula uses memories of the current window, of the earlier document, or of a whole corpus.

Where the paper is in this file
    Eq. 1; 2, 3, 4   a language model; the memories     Embedding; memory_mask, TRIME.memories
    §3, Eq. 5        f and g; the objective             TRIME.encode; TrimeLoss
    §4, §5.2         m, p, the first 5% of the steps    batches, TRIME.forward
    App. A, Eq. 6-9  the probabilities at test time     Inference
    App. D; §5.2     overlapping windows; FAISS         TRIME.windows; Datastore, with faiss
    Table 9          the models                         PRESETS

Letters used in the shape comments
    B segments    T tokens per segment    C width    H heads    D width per head    V vocabulary
    N = B T    R rows of a block    Q queries    K neighbors    M memories: (c_j, x_j), a context
    and the token after it; key g(c_j), value x_j

Where this differs from the paper, and why
    The Transformer has RMSNorm, RoPE, GELU, GPT-2's initial weights, a final norm and no biases. In
    the presets AdamW and a cosine replace NAG (247M) and the inverse square root (7M).
    In training, memories are of a process's own micro-batch (official ext: of all processes), and
    §4.3's m = 1 masks other segments of the same document (official code: none). With memory ext g
    starts small; otherwise the words have almost no probability at first, and learn more slowly.
    At test time each context is in memory once (official code: the window's twice), P' of Eq. 8 is
    over all memories (there: the external ones), K is tuned (App. D: 1,024), similarities of fp16
    keys are exact (official: or by product quantization). Not here: translation, SRU++ (App. E).

    $ python trime.py                       a demo on a CPU
    $ python train.py --model trime
"""
import contextlib, hashlib, inspect, json, math, random, re
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

MASKED = -1e30      # similarity to a memory that a query may not use: finite, so no row gives nan


@dataclass
class TRIMEConfig:
    vocab_size: int = 4096      # ids of the tokenizer; for bpe, how many to learn (ours)
    block_size: int = 512       # tokens of a segment, T (paper: 150 to 3,072)
    micro_batch: int = 4        # segments of a micro-batch, B: the source of memories (paper 7M: 8)
    n_layer: int = 4            # Transformer layers (ours; paper: 8 to 16)
    n_head: int = 4             # attention heads, H (ours)
    n_embd: int = 128           # width, C (ours; paper: 128 to 1,024)
    n_inner: int = 0            # width inside the MLP; 0: 4 C (paper: 4 C, its 150M model 2,100)
    dropout: float = 0.0        # on embeddings and residual branches (ours; official code: 0.3)
    memory: Literal['none', 'local', 'long', 'ext'] = 'local'   # used in training (paper Table 1)
    m: int = 0                  # consecutive segments that share long memory; 0: B (paper Table 9)
    ce_warmup: float = 0.05     # first share of the steps, without memory (paper section 5.2)
    p: float = 0.9              # probability that ext disables local memory (paper section 4.3)
    bm25: bool = True           # ext packs similar segments together (paper section 4.3, Table 11)
    memory_grad: bool = True    # back-propagate to the memories (paper section 3, Table 11)
    same_document: bool = True  # long: memory of its own document; ext: of others (official: any)
    cutoffs: str = ''           # adaptive softmax: first id of each tail cluster, as 20000,60000
    div_value: int = 4          # divides the width from one cluster to the next (official: 4 or 1)
    stride: int = 0             # tokens scored per window, at most T; 0: T/2 (paper: 64 to 512)

    def __post_init__(self):
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}')
        if not re.fullmatch('([1-9][0-9]*(,|$))*', self.cutoffs):
            raise ValueError(f'cutoffs {self.cutoffs}: must be like 20000,60000')
        if max(self.dropout, self.p, self.ce_warmup) > 1:
            raise ValueError('dropout, p and ce_warmup are shares, at most 1')
        alone = self.micro_batch == 1 or self.m == 1 and self.memory == 'long'
        if alone and self.memory in ('long', 'ext'):
            raise ValueError('memories long and ext are those of other segments: there is only one')


@dataclass
class EvalConfig:
    Names = Literal['', 'none', 'local', 'local,long', 'ext', 'local,ext', 'local,long,ext']
    memory: Names = ''          # trime: memories at test time; default: as paper Table 1 (or 5)
    long: int = 24_576          # trime: tokens of long memory, at most, tuned on val; 0: none
    stride: int = 0             # trime: tokens scored per window (0: as trained)
    nprobe: int = 16            # trime: lists of the datastore to search; more: slower, more exact
    recall: bool = False        # trime: print how many of the best 1,024 entries nprobe finds


# Table 9 (lr of 247M: ours); n_head of 7M: App. F, of the others: official code (150M there: 10),
# as are cutoffs (enwik8 there: 208), div_value, dropout (7m: ours) and ADAM's beta2, weight_decay
WIKITEXT = dict(data='wikitext103', tokenizer='word', vocab_size=267_744, cutoffs='20000,60000',
                eval_every=2000)
ADAM = dict(optimizer='adamw', weight_decay=0.01, beta2=0.98, grad_clip=0.0, lr=2.5e-4, warmup=0.0,
            max_steps=400_000)
PRESETS = {
    'tiny': {},                         # the defaults: minutes on two CPU cores
    '7m': dict(ADAM, **WIKITEXT, block_size=3072, micro_batch=8, n_layer=8, n_head=4, n_embd=128,
               stride=512, tokens_per_step=24_576, lr=5e-4, warmup=0.04, max_steps=200_000),
    '150m': dict(ADAM, **WIKITEXT, block_size=150, micro_batch=60, n_layer=16, n_head=5, n_embd=410,
                 n_inner=2100, div_value=1, dropout=0.3, stride=64, tokens_per_step=36_000),
    '247m': dict(WIKITEXT, block_size=3072, micro_batch=8, m=4, n_layer=16, n_head=8, n_embd=1024,
                 dropout=0.3, stride=512, tokens_per_step=73_728, lr=5e-4, warmup=0.056,
                 optimizer='adamw', grad_clip=0.1, max_steps=286_000),
    'enwik8': dict(ADAM, data='enwik8', tokenizer='bytes', vocab_size=257, block_size=512,
                   micro_batch=24, n_layer=12, n_head=8, n_embd=512, dropout=0.3, stride=80,
                   same_document=False, tokens_per_step=49_152, eval_every=2000)}


def batches(config):
    """Arguments of data.Batches: segments (§4.1), consecutive (§4.2) or packed (§4.3, App. B)."""
    kind = dict(long='consecutive', ext='packed').get(config.memory, 'segments')
    return dict(kind=kind, consecutive=config.m, bm25=config.bm25,
                same_document=config.same_document)


# --------------------------------------------------------------------------------------------------
# the transformer (what two model files define has the same text, but SelfAttention, MLP, Block)
def RMSNorm(n_embd):
    """x / rms(x) * weight, over the last axis (Zhang & Sennrich 2019)."""
    return nn.RMSNorm(n_embd, eps=1e-6)


def fp32(x):
    """bf16 and fp16 become fp32; fp64 remains, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotate(x, first=0):
    """Rotary embeddings (Su et al. 2021): at position p = first, first + 1, ... each pair
    (x_2d, x_2d+1) of a head is rotated by p θ_d, θ_d = 10000^(-2d/D). x (..., T, H, D) -> as x"""
    T, D = x.size(-3), x.size(-1)
    theta = 10000 ** (-torch.arange(0, D, 2, device=x.device) / D)              # (D/2,)
    positions = torch.arange(first, first + T, device=x.device)
    angle = positions[:, None, None] * theta                                    # (T, 1, D/2)
    pairs = torch.view_as_complex(fp32(x).unflatten(-1, (-1, 2)).contiguous())  # (..., T, H, D/2)
    turned = pairs * torch.complex(angle.cos(), angle.sin())
    return torch.view_as_real(turned).flatten(-2).type_as(x)


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions, over the whole segment."""
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, past):
        q, k, v = self.qkv(x).unflatten(2, (3, self.n_head, -1)).unbind(2)  # 3 x (B, T, H, D)
        first = past[0].size(1) if past else 0
        q, k = rotate(q, first), rotate(k, first)
        if past:                                                    # keys, values of earlier tokens
            k, v = (torch.cat(pair, dim=1) for pair in zip(past, (k, v)))
        past = k.detach(), v.detach()
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))            # (B, H, tokens, D)
        mask = q.new_full((q.size(2), k.size(2)), -math.inf).triu(first + 1)        # (T, tokens)
        if q.device.type == 'cpu' and q.dtype == torch.bfloat16 and k.size(2) < 1024:
            y = (q / q.size(3) ** 0.5 @ k.mT + mask).softmax(3) @ v  # faster than the fused kernel
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask if first else None, 0.0, not first)
        return self.proj(y.transpose(1, 2).flatten(2)), past


class MLP(nn.Module):
    """Two layers, the hidden one wider."""
    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or 4 * config.n_embd
        self.fc = nn.Linear(config.n_embd, n_inner, bias=False)
        self.proj = nn.Linear(n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    """One pre-norm Transformer layer; returns the input g of its MLP, its keys and values too."""
    def __init__(self, config):
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.n_embd), SelfAttention(config)
        self.norm2, self.mlp = RMSNorm(config.n_embd), MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past):
        y, kv = self.attention(self.norm1(x), past)
        x = x + self.dropout(y)
        g = self.norm2(x)
        x = x + self.dropout(self.mlp(g))
        return x, g, kv


# --------------------------------------------------------------------------------------------------
# what is new in TRIME
class Embedding(nn.Module):
    """The input and output embedding, tied. With cutoffs it is adaptive (Baevski & Auli 2019): ids
    are in order of frequency, those between two cutoffs are a cluster. Cluster i has vectors of
    C / div_value^i numbers, W_i that projects them to C, and one row in the head:

        P(w) = P_head(w)  or  P_head(i) P_i(w)  in cluster i,   P_i(w) ∝ exp(table_i[w] · W_iᵀ f)"""
    def __init__(self, config):
        super().__init__()
        C, V = config.n_embd, config.vocab_size
        ends = re.findall('[0-9]+', f'{config.cutoffs},{V}')
        self.ends = sorted({min(int(x), V) for x in ends})          # ids where head, clusters end
        self.tables = nn.ParameterList([torch.empty(self.ends[0] + len(self.ends) - 1, C)])
        self.tail_proj = nn.ModuleList()
        for i, size in enumerate(np.diff(self.ends), 1):
            width = max(1, C // config.div_value ** i)
            self.tables.append(torch.empty(size, width))
            self.tail_proj.append(nn.Linear(width, C, bias=False))

    def clusters(self, ids):
        """For each cluster: its number i from 1 on, its first id, and which of the ids are in it"""
        for i, (start, end) in enumerate(zip(self.ends, self.ends[1:]), 1):
            yield i, start, (ids >= start) & (ids < end)

    def forward(self, tokens):
        """(B, T) -> (B, T, C)"""
        x = F.embedding(tokens.clamp(max=self.ends[0] - 1), self.tables[0])
        for i, start, inside in self.clusters(tokens):
            vectors = self.tail_proj[i - 1](F.embedding(tokens[inside] - start, self.tables[i]))
            x[inside] = vectors.type_as(x)
        return x

    def tail(self, i, f):
        """log P_i after f: (Q, C) -> (Q, words of cluster i)"""
        return (f @ self.tail_proj[i - 1].weight @ self.tables[i].T).log_softmax(1)

    def word(self, f, w):
        """Words w (Q,) after f (Q, C) -> their rows of the head, log P_i(w) or 0: 2 x (Q, 1)"""
        row, log_p = w[:, None].clone(), f.new_zeros(len(w), 1)
        for i, start, inside in self.clusters(w):
            row[inside] = self.ends[0] + i - 1
            for q in inside.nonzero()[:, 0].split(256):             # backward computes P_i again
                log_P = checkpoint(self.tail, i, f[q], use_reentrant=False)
                log_p[q, 0] = log_P[torch.arange(len(q)), w[q] - start]         # gather keeps log_P
        return row, log_p

    def logits(self, f):
        """f (Q, C) -> E_w · f of Eq. 1 for all words (Q, V), log Σ exp of them (Q, 1)"""
        head = f @ self.tables[0].T
        words, clusters = head.tensor_split([self.ends[0]], dim=1)
        tails = [row[:, None] + self.tail(i, f) for i, row in enumerate(clusters.T, 1)]
        return torch.cat([words, *tails], dim=1), head.logsumexp(1, keepdim=True)


def memory_mask(memory, doc, config, rows):
    """The slice of memories for the slice `rows` of queries, and which of them each query may use,
    (R, M) bool. Memory i holds the answer to query i. doc (B, T): documents of the contexts"""
    (B, T), doc = doc.shape, doc.flatten()
    end = len(doc) if 'ext' in memory else rows.stop
    start = dict(local=rows.start // T * T, none=end - 1).get(memory, 0)    # none: one, masked
    position = torch.arange(len(doc), device=doc.device)
    i, j = position[rows, None], position[start:end]                # (R, 1), (M,)
    earlier, segment, document = j < i, i // T == j // T, doc[i] == doc[j]      # (R, M)
    allowed = segment & earlier & (memory != 'ext')                 # Eq. 2
    if memory == 'long':                                            # Eq. 3, §4.2
        group = (config.m or B) * T
        allowed |= earlier & (i // group == j // group) & (document | (not config.same_document))
    if 'ext' in memory:                                             # §4.3
        allowed |= ~segment & ~(document & config.same_document)
    return slice(start, end), allowed


def softmax(x):
    """The softmax P of x (R, n), and log Σ exp(x) (R, 1), which is max x - log max P"""
    P = x.softmax(1)
    return P, x.amax(1, keepdim=True) - P.amax(1, keepdim=True).log()


class TrimeLoss(torch.autograd.Function):
    """The TRIME objective, Eq. 5. The next word w has a term for its output embedding, and one for
    each memory whose value is w; sim(q, k) = q · k / sqrt(C):

        P(w | c)  ∝  exp(E_w · f(c))  +  Σ_{j: x_j = w} exp(sim(g(c), g(c_j)))

    f, query, key (N, C)   f(c), g(c), g(c_j)      head (n, C)   vectors of words and clusters
    tail, row (N, 1)       of Embedding.word       mask          slice of queries -> memory_mask
    targets (N,)           w and x_j; -1: neither scored nor a memory

    returns means over the queries: of -log P and, without gradient, of the probability on memories
    and the loss without memory. The forward pass computes the gradient too, by blocks of R queries,
    as (N, n) or (N, N) would be too large. The derivative of -log P by the exponent of a term is
    P - W: its share of the sum of all terms minus its share of the sum of the terms of w."""
    R = 512

    @staticmethod
    def forward(ctx, f, query, key, head, tail, row, targets, mask):
        n_scored, scale = (targets >= 0).sum().clamp(min=1), f.size(1) ** -0.5
        loss, memory_prob, word_loss = f.new_zeros(3)
        df, dquery, dkey, dhead, dtail = map(torch.zeros_like, (f, query, key, head, tail))
        for start in range(0, len(f), TrimeLoss.R):
            rows = slice(start, min(start + TrimeLoss.R, len(f)))
            memories, allowed = mask(rows)
            w, x = targets[rows, None], targets[memories]           # (R, 1), x_j (M,)
            logits = f[rows] @ head.T                               # (R, n)
            sim = query[rows] @ key[memories].T * scale             # (R, M)
            sim.masked_fill_(~allowed | (x < 0), MASKED)
            P_words, log_words = softmax(logits)
            P_memory, log_memory = softmax(sim)
            W_memory, log_match = softmax(sim.masked_fill(x != w, MASKED))
            log_word = logits.gather(1, row[rows]) + tail[rows]     # first term of Eq. 5
            log_w = torch.logaddexp(log_word, log_match)            # with the second term
            log_total = torch.logaddexp(log_words, log_memory)
            weight = (w >= 0).to(f) / n_scored                      # (R, 1) of a query in the mean
            loss += (weight * (log_total - log_w)).sum()
            of_memory = weight * (log_memory - log_total).exp()     # their probability
            memory_prob += of_memory.sum()
            word_loss += (weight * (log_words - log_word)).sum()
            if f.requires_grad:
                dlogits = P_words.mul_(weight * (log_words - log_total).exp())
                dtail[rows] = -weight * (log_word - log_w).exp()
                dlogits.scatter_add_(1, row[rows], dtail[rows])     # P - W of the words
                df[rows] = dlogits @ head
                dhead += dlogits.T @ f[rows]
                dsim = P_memory.mul_(of_memory)
                dsim -= W_memory.mul_(weight * (log_match - log_w).exp())
                dquery[rows] = dsim @ key[memories] * scale
                dkey[memories] += dsim.T @ query[rows] * scale
        ctx.grads = df, dquery, dkey, dhead, dtail
        ctx.mark_non_differentiable(memory_prob, word_loss)
        return loss, memory_prob, word_loss

    @staticmethod
    def backward(ctx, dloss, *_):
        return *(dloss * x for x in ctx.grads), None, None, None


@dataclass
class Inference:
    """How words and the memories M (Eq. 7) make one distribution at test time.

        P(w)  ∝ exp(E_w · f) + Σ_{j in M: x_j = w} exp(sim_j / τ)       Eq. 6
        P'(w) ∝ Σ_{j in M: x_j = w} exp(sim_j / τ')                     Eq. 8, with ext
        P(w)  <- (1 - λ) P(w) + λ P'(w)                                 Eq. 9

    linear: Eq. 1, then Eq. 8 and 9 of local and long memory (continuous cache, Grave et al. 2017),
    then of ext (kNN-LM, Khandelwal et al. 2020), with sim_j = -|q - k|² / (2 sqrt(C)), ours up
    to a constant if all keys have the same norm"""
    local: bool = False         # local memory: the window
    long: int = 0               # tokens of long memory; not used without local
    n_neighbors: int = 0        # K; 0: no external memory
    linear: bool = False        # continuous cache and kNN-LM
    tau: float = 1.0            # τ of Eq. 6; linear: τ' of the cache
    lam: float = 0.0            # linear: λ of the cache
    tau_ext: float = 1.0        # τ' of Eq. 8; linear: of kNN-LM
    lam_ext: float = 0.0        # λ of Eq. 9; linear: of kNN-LM

    def probabilities(self, log_words, sim):
        """P (Q, M) of memories, log_factor (Q, 1): P(w) = exp(E_w · f + log_factor) + Σ_{x_j=w} P_j
        log_words (Q, 1): log Σ exp(E_w · f); sim (Q, M): the last n_neighbors are of ext"""
        x = torch.full_like(sim, MASKED) if self.linear else sim / self.tau
        log_factor = -torch.logaddexp(log_words, x.logsumexp(1, keepdim=True))
        P = (x + log_factor).exp()                                  # Eq. 6; linear: Eq. 1
        n = sim.size(1) - self.n_neighbors
        cache = slice(n), self.tau, self.lam                        # lam is 0 unless linear
        ext = slice(n if self.linear else 0, None), self.tau_ext, self.lam_ext
        for group, tau, lam in (cache, ext):
            if lam > 0:
                x = sim[:, group]
                lam = lam * (x > MASKED).any(1, keepdim=True)       # 0: no memories yet
                P *= 1 - lam
                P[:, group] += lam * (x / tau).softmax(1)           # Eq. 8, 9
                log_factor = log_factor + torch.log1p(-lam)
        return P, log_factor

    def log_p(self, logit, log_words, sim, match, window):
        """log P (Q, 1) of the next words of a window of `collect`, with the memories in use"""
        used = slice(max(0, window.start - self.long), window.stop + self.n_neighbors)
        P, log_factor = self.probabilities(log_words, sim[:, used])
        P_memory = (P * match[:, used]).sum(1, keepdim=True)
        return torch.logaddexp(logit + log_factor, P_memory.log())


class Datastore:
    """External memory, Eq. 4: entry j is the key g(c_j) and the value x_j of position j of a text.
    The keys are fp16 in a faiss inverted file, memory-mapped; similarities are exact."""
    SHARD = 2 ** 31                     # bytes of keys held in memory while a store is built

    def __init__(self, folder, model, text, about, progress, nprobe=16):
        """Opens the store of text (n + 1,) in folder, or builds it. about: what it depends on"""
        import faiss
        self.text, file = torch.from_numpy(text.astype(int)), folder / 'about.json'
        if not file.exists():                                       # it is written last
            self.build(folder, model, progress)
            file.write_text(json.dumps(about))
        if json.loads(file.read_text()) != about:
            raise SystemExit(f'{folder} is of another checkpoint, text or stride: delete it')
        flags = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR     # memory-mapped
        self.index, self.nprobe = faiss.read_index(str(folder / 'keys.faiss'), flags), nprobe

    @torch.no_grad()
    def build(self, folder, model, progress):
        """Writes keys.faiss, keys.ivfdata."""
        import faiss.contrib.ondisk
        text = self.text[None, :-1].to(model.norm.weight.device)
        n, C, T = text.size(1), model.config.n_embd, model.config.block_size
        entry = 2 * C + 8                                           # bytes: a key, its number
        print(f'{folder}: {n:,} entries, {n * entry / 1e9:.2f} GB on disk; to build it, twice that '
              f'and {min(n * entry, self.SHARD) / 1e9:.2f} GB of memory')
        folder.mkdir(parents=True, exist_ok=True)
        n_lists = max(1, min(n // 1000, 16_384))
        starts = range(0, n, max(T, T * n // (64 * n_lists)))       # k-means of a sample of keys
        sample = torch.cat([model.encode(text[:, start:start + T])[1][0] for start in starts])
        index = faiss.index_factory(C, f'IVF{n_lists},SQfp16')
        index.by_residual = False
        index.train(sample.float().cpu().numpy())
        end, shards = 0, []
        for _, g, _ in progress(model.windows(text), folder.name, 1 + n // model.stride):
            start, end = end, end + g.size(1)
            index.add_with_ids(g[0].float().cpu().numpy(), np.arange(start, end))
            if index.ntotal * entry >= self.SHARD or end == n:
                shards.append(str(folder / f'shard-{len(shards)}'))
                faiss.write_index(index, shards[-1])
                index.reset()
        faiss.contrib.ondisk.merge_ondisk(index, shards, str(folder / 'keys.ivfdata'))
        faiss.write_index(index, str(folder / 'keys.faiss'))
        for shard in folder.glob('shard-*'):
            shard.unlink()

    def search(self, query, K, l2=False, nprobe=0):
        """The K most similar entries to queries (Q, C), best first: similarities, entries (Q, K)"""
        import faiss
        self.index.nprobe = nprobe or self.nprobe                   # lists to search
        self.index.metric_type = faiss.METRIC_L2 if l2 else faiss.METRIC_INNER_PRODUCT
        sim, j = map(torch.from_numpy, self.index.search(query.float().cpu().numpy(), K))
        sim = sim / (-2 if l2 else 1) / query.size(1) ** 0.5        # l2: see Inference
        return sim.clamp(min=MASKED).to(query), j                   # fewer than K: MASKED and -1


# --------------------------------------------------------------------------------------------------
# the model
class TRIME(nn.Module):
    """A Transformer language model whose output softmax has memories beside the words."""
    PIECE = 512                         # tokens for one call of stream: (PIECE, V) log P are held

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.n_embd
        self.embedding = Embedding(config)                          # also the output embedding E
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(C)
        self.inference = Inference(local=config.memory != 'none')
        self.shuffle, self.store = False, None
        self.stride = config.stride or config.block_size // 2 or 1
        if config.memory == 'ext':                                  # g starts with norm C^(1/4)
            nn.init.constant_(self.blocks[-1].norm2.weight, C ** -0.25)
        for name, p in self.named_parameters():
            if p.dim() == 2:                                        # GPT-2's, for width C
                deep = math.sqrt(2 * config.n_layer) if name.endswith('proj.weight') else 1
                std = 0.02 * math.sqrt(768 / C) / deep
                nn.init.normal_(p, std=p.size(1) ** -0.5 if 'tail_proj' in name else std)

    def encode(self, tokens, past=None):
        """Tokens (B, t) -> f, g (B, t, C) of their contexts, and past, the keys and values so far;
        g is the input of the last MLP (§3)"""
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        past = list(past or [None] * len(self.blocks))
        for i, block in enumerate(self.blocks):
            x, g, past[i] = block(x, past[i])                       # g of the last one remains
        return self.norm(x), g, past

    def forward(self, batch, progress):
        """The training loss () in nats per token, causal in eval mode, and a dict to log. batch:
        tokens, targets (-1: not scored), doc (B, T), seed; progress: step / max_steps"""
        config = self.config
        memory = config.memory if self.training else config.memory.replace('ext', 'local')
        if memory == 'ext' and random.Random(batch.seed).random() >= config.p:      # §4.3
            memory = 'local,ext'
        if progress < config.ce_warmup:                             # §5.2
            memory = 'none'
        if self.training:
            torch.manual_seed(batch.seed)                           # for dropout
        f, g = (fp32(x).flatten(0, 1) for x in self.encode(batch.tokens)[:2])       # 2 x (N, C)
        key = g if config.memory_grad else g.detach()
        head, targets = self.embedding.tables[0], batch.targets.flatten()
        mask = lambda rows: memory_mask(memory, batch.doc, config, rows)
        with torch.autocast(g.device.type, enabled=False):          # bf16: steps of 0.125 near 20
            row, tail = self.embedding.word(f, targets.clamp(min=0))
            loss, p, word_loss = TrimeLoss.apply(f, g, key, head, tail, row, targets, mask)
        return loss, dict(memory_prob=p, loss_without_memory=word_loss)

    @torch.no_grad()
    def windows(self, tokens, state=None):
        """Encodes tokens (B, t), which continue the text of `state`. After a window of T tokens the
        next begins with its last T - stride, encoded again (App. D). Yields f, g (B, q, C) of the
        next q tokens, and the state: the last long + T ids (B, n), g of each when it was new
        (B, n, C), g of the window (B, w, C), and its past"""
        T, kept = self.config.block_size, self.config.block_size + self.inference.long
        none = self.norm.weight.new_zeros(len(tokens), 0, self.config.n_embd)
        text, keys, window, past = state or (tokens[:, :0], none, none, None)
        while tokens.size(1):
            if window.size(1) == T:
                _, window, past = self.encode(text[:, -T:][:, self.stride:])
            new, tokens = tokens.tensor_split([T - window.size(1)], dim=1)
            f, g, past = self.encode(new, past)
            text = torch.cat([text, new], dim=1)[:, -kept:]
            keys = torch.cat([keys, g], dim=1)[:, -kept:]
            window = torch.cat([window, g], dim=1)
            yield f, g, (text, keys, window, past)

    def memories(self, g, state, every=1):
        """For one in `every` of the text's last q queries g (B, q, C): similarities to memories and
        their values x_j, (Q, M): long, local, then external; and the slice of the local ones"""
        (text, keys, window, _), x = state, self.inference
        n, start = text.size(1), text.size(1) - window.size(1)
        first = max(0, start - x.long) if x.local else n - 1
        position = torch.arange(n, device=g.device) - first         # from the first memory on
        i, j = position[-g.size(1)::every, None], position[first:-1]            # (q, 1), (M,)
        g = g[:, ::every]
        key = torch.cat([keys[:, :start], window], dim=1)[:, first:-1]          # (B, M, C)
        sim = (g @ key.mT / g.size(2) ** 0.5).masked_fill(j >= i, MASKED)       # Eq. 2, 3
        n_past = i.clamp(min=1)                                     # (q, 1) memories of a query
        j = (j + n_past // 2 * self.shuffle) % n_past               # (q, M); shuffled: another
        sim, value = sim.flatten(0, 1), text[:, first + 1 + j].flatten(0, 1)
        if x.n_neighbors:                                           # Eq. 4
            sim_ext, j = self.store.search(g.flatten(0, 1), x.n_neighbors, x.linear)
            n_ext = len(self.store.text) - 1
            value_ext = self.store.text[1 + (j + n_ext // 2 * self.shuffle) % n_ext].to(g.device)
            sim, value = torch.cat([sim, sim_ext], dim=1), torch.cat([value, value_ext], dim=1)
        return sim, value, slice(start - first, n - 1 - first)

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
            sim, value, _ = self.memories(g, state)                 # (Q, M)
            P, log_factor = self.inference.probabilities(log_words, sim)
            P_memory = torch.zeros_like(logits).scatter_add_(1, value, P)
            log_probs = torch.logaddexp(logits + log_factor, P_memory.log())
            parts.append(log_probs.unflatten(0, f.shape[:2]))       # (B, q, V)
        return torch.cat(parts, dim=1), state

    def ways(self):
        """How to evaluate the model: name -> attributes to set."""
        on = dict(inference=self.inference, shuffle=False)
        off = dict(on, inference=Inference())
        return dict(off=off) if on == off else dict(on=on, shuffled=dict(on, shuffle=True), off=off)

    @torch.no_grad()
    def trace(self, tokens, t):
        """The memories used to predict token t + 1 of a document (n,), the most probable first:
        (its part of P(value), ids, start, end), where ids[start:end] ends with that value"""
        x, state = self.inference, self.read(tokens[None, :t])
        f, g, state = next(self.windows(tokens[None, t:t + 1], state))
        sim, log_words = self.memories(g, state)[0], self.embedding.logits(f[0])[1]
        P, _ = x.probabilities(log_words, sim)                      # (1, M)
        where = [(tokens, j) for j in range(t - P.size(1) + x.n_neighbors, t)]
        if x.n_neighbors:
            _, neighbors = self.store.search(g[0], x.n_neighbors, x.linear)
            where += [(self.store.text, j) for j in neighbors[0].tolist()]
        found = [(p, ids, max(0, j - 11), j + 2)                    # 12 tokens of c_j, then x_j
                 for p, (ids, j) in zip(P[0].tolist(), where) if p]
        return sorted(found, key=lambda memory: -memory[0])

    def prepare_eval(self, corpus, external, args, path, progress):
        """Opens the datastore of external.train, tunes on corpus.val; keeps both beside `path`."""
        trained, folder = self.config.memory, path.parent
        names = args.memory or {'long': 'local,long', 'ext': 'local,long,ext'}.get(trained, trained)
        if args.retrieve_from:                                      # Table 5; above, Table 1
            names = f'{args.memory or "local,long"},ext'
        self.stride, self.inference = args.stride or self.stride, Inference()
        if names == 'none': return                                  # nothing to tune
        if corpus.val is None or external.train is None:
            raise SystemExit('TRIME is tuned on a split val, and its datastore is of a split train')
        x = Inference('local' in names, args.long * ('long' in names), 1024 * ('ext' in names),
                      linear=trained == 'none')
        about = dict(checkpoint=hashlib.sha256(path.read_bytes()).hexdigest(),
                     corpus=external.fingerprint, stride=self.stride)
        if x.n_neighbors:
            if args.split == 'train' and external.fingerprint == corpus.fingerprint:
                raise SystemExit('--split train with --memory ext: each token would find itself')
            store = folder / f'datastore-{external.folder.name}'
            self.store = Datastore(store, self, external.train.tokens, about, progress, args.nprobe)
            if args.recall:
                text = torch.from_numpy(corpus.val.tokens[None, :8192].astype(int))
                windows = self.windows(text.to(self.norm.weight.device))
                query = torch.cat([g[0, ::32] for _, g, _ in windows])
                found, best = (self.store.search(query, 1024, x.linear, n)[0] for n in (0, 2 ** 20))
                print(f'{store}: recall {(found >= best[:, -1:]).float().mean():.1%}')
        code = [TAUS, LAMBDAS, LONG, *map(inspect.getsource, (TRIME, Inference, collect, tune))]
        facts = repr([about, corpus.fingerprint, x, args.nprobe, code])
        file, key = folder / 'tuned.json', hashlib.sha256(facts.encode()).hexdigest()
        try: tuned = json.loads(file.read_text())
        except (OSError, ValueError): tuned = {}                    # there is none, or it is torn
        if key not in tuned:
            tuned[key] = asdict(tune(collect(self, corpus.val, x, progress), x))
            with contextlib.suppress(OSError): file.write_text(json.dumps(tuned, indent=1))
        self.inference = Inference(**tuned[key])
        print(f'{path}: {self.inference}')


# --------------------------------------------------------------------------------------------------
# evaluation
TAUS = [0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.045, 0.065, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65,
        0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0]
LAMBDAS = [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9]
LONG = [256 * 2 ** i for i in range(20)]            # tokens


@torch.no_grad()
def collect(model, split, x, progress):
    """Arguments of Inference.log_p, of tokens of each window: every 16th of the first 65,536"""
    model.inference, windows = x, []
    every = 1 + min(65_535, len(split.tokens)) // 4096          # a shorter text: more of them
    for ids in progress(np.split(split.tokens[:65_536], split.offsets[1:-1]), 'tuning'):
        tokens = torch.from_numpy(ids.astype(int)).to(model.norm.weight.device)
        targets = tokens[1:, None]
        for f, g, state in model.windows(tokens[None, :-1]):
            w, targets = targets[:f.size(1):every], targets[f.size(1):]             # (Q, 1)
            logits, log_words = model.embedding.logits(f[0, ::every])               # (Q, V)
            sim, value, window = model.memories(g, state, every)                    # (Q, M)
            windows.append((logits.gather(1, w), log_words, sim, value == w, window))
    return windows


def tune(windows, x):
    """An Inference of high mean log P over what collect returns, by coordinate ascent: the best
    tau, the best long up to x.long and so on in turn, until none is better. It starts with K = 1:
    from K = 1,024 it ended at constants with which ext was worse than no ext (p = 0)"""
    grids = dict(tau=TAUS, long=sorted({min(n, x.long) for n in LONG}))
    if x.linear and x.local:
        x, grids['lam'] = replace(x, lam=0.25), LAMBDAS             # with lam = 0 tau has no effect
    if x.n_neighbors:
        x = replace(x, lam_ext=0.25, n_neighbors=1)                 # with lam_ext = 0, tau_ext too
        grids.update(tau_ext=TAUS, lam_ext=LAMBDAS, n_neighbors=[1, 8, 64, 512, 1024])
    score = lambda x: sum(x.log_p(*window).sum().item() for window in windows)
    before = None
    while x != before:
        before = x
        for name, values in grids.items():
            x = max([x, *(replace(x, **{name: value}) for value in values)], key=score)
    return x


if __name__ == '__main__':
    model, tokens = TRIME(TRIMEConfig()), torch.randint(4096, (1000,))
    log_p = model.log_probs(tokens[None, :-1])[0].gather(1, tokens[1:, None])
    print(f'untrained, with memories: loss {-log_p.mean():.3f}, ln V {math.log(4096):.3f}')
    p, _, start, end = model.trace(tokens, t=900)[0]
    print(f'{p:.4f} of P(token 901 = token {end - 1}) is by the memory of {start} to {end - 2}')
