"""
DRT, the Differentiable Retrieval-based Transformer: the language model's loss trains retrieval.

    Xiang Hu, Zhihao Teng, Jun Zhao, Wei Wu and Kewei Tu, "Efficient Length-Generalizable Attention
    via Causal Retrieval for Long-Context Language Modeling", ICML 2025, arXiv:2410.01651

A landmark token ends each chunk of a text. It scores all earlier chunks, and the best few are read.
The upper half of the layers attends to them from the positions of the next chunk: to each with its
own softmax, weighted by the softmaxed scores. So the loss reaches the scores, and a chunk that
helps is scored higher. There is no other supervision of the scores.

Where the paper is in this file
    §3.1, §4.1.2   landmarks; ALiBi; the chunk encoder   DRT.insert; SelfAttention; ChunkEncoder
    Eq. 1 to 3     scores, top K; cross-attention        DRT.retrieve; Block, gca_kernel.py
    §3.2, §3.3     Gumbel top-k; MLM; inference          DRT.retrieve; DRT.forward; DRT.stream
    §4.4, Table 4  retrieval from a corpus               DRT.prepare_eval

Letters used in the shape comments
    B sequences    T tokens    L positions: tokens and landmarks    C width    V vocabulary
    N chunks       S positions of a chunk, its landmark included    H heads    D width of a head
    K chunks retrieved for one    M chunks to retrieve from         W window

Where this differs from the paper, and why
    Fields marked (ours); the preset 124m has the paper's. As in the official code, a chunk is S - 1
    tokens and a landmark; cross-attention has a sink in place of the landmark's key, a norm and a
    projection; h, l_k and the encoder's input have norms. H + O of Eq. 2 is the residual (there:
    only the MLP's input). Scores, top-k: no autocast (there: bf16). Streams keep chunks in 16 bits.
    Retrieval never crosses joined documents; self-attention does. Of a corpus too, keys and values
    are stored (§3.3: only landmarks; chunks are encoded again). Weights start with std 0.02 for
    C = 768 (as there), over sqrt(2 n_layer) where they add to the residual, except in GCA.

    $ python drt.py                         a demo on a CPU
    $ python train.py --model drt
"""
import math, tempfile, zlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from gca_kernel import gca

MASKED = -1e30      # score of a chunk that may not be retrieved: finite, so no row gives nan


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
    compare_means: bool = True  # l_k: mean of C_k; h: first 0, + RMSNorm(l_t - mean l_k) (ours)
    shift_values: bool = True   # value: the next token's; at first W_Q = W_K, W_O = W_Vᵀ (ours)
    gumbel: bool = False        # Gumbel noise on the scores, in training (ours: no; §3.2: yes)
    mlm: float = 0.15           # --encoder tokens: masked share, first half; 0: none (code: 0.15)
    retriever: Literal['learned', 'random', 'off'] = 'learned'  # random: App. A.5; off: no chunks
    sink: bool = True           # a key and a value of zero in each chunk (official code: yes)

    def __post_init__(self):
        upper = self.n_layer // 2
        if self.n_embd % (2 * self.n_head) or self.groups and (not upper or upper % self.groups):
            raise ValueError('n_embd: a multiple of 2 n_head; n_layer / 2: a multiple of groups')
        if self.chunk_size < 2 or self.groups and self.block_size <= 2 * self.chunk_size - 2:
            raise ValueError('chunk_size: 2 or more, block_size: above 2 (chunk_size - 1)')
        if self.groups and self.encoder == 'tokens' and not (self.n_encoder or self.compare_means):
            raise ValueError('encoder tokens: landmarks are equal without n_encoder, compare_means')
        if self.slope < 2 ** -8 or self.mlm > 1:
            raise ValueError('slope: 2^-8 or more; mlm: a share, at most 1')


# 124m: App. A.1, but the rate ends at a tenth (there a fifth); base LMs: --groups 0 [--window 768]
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


# --------------------------------------------------------------------------------------------------
# the transformer (what two model files define has the same text, but SelfAttention, MLP, Block)
def RMSNorm(n_embd):
    """x / rms(x) * weight, over the last axis (Zhang & Sennrich 2019)."""
    return nn.RMSNorm(n_embd, eps=1e-6)


def fp32(x):
    """bf16 and fp16 become fp32; fp64 remains, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(a, b):
    """a bᵀ in fp32, under autocast too: a (..., n, C), b (..., m, C) -> (..., n, m)"""
    with torch.autocast(a.device.type, enabled=False):              # bf16: steps of 0.125 near 20
        return fp32(a) @ fp32(b).mT


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


def softmax_attention(q, k, v, mask=None):
    """softmax(q kᵀ / sqrt(D) + mask) v; mask is broadcast to (B, H, t, s). On a CPU in bf16 the
    definition is faster than the fused kernel (torch 2.13).

    q (B, t, H, D)   k, v (B, s, H, D) -> (B, t, H, D)"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                # (B, H, t or s, D)
    if q.device.type == 'cpu' and q.dtype == torch.bfloat16:
        z = q / q.size(-1) ** 0.5 @ k.mT                            # (B, H, t, s)
        y = (z if mask is None else z + mask).softmax(-1) @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask)
    return y.transpose(1, 2)


def attend(q, k, v, block, window, slopes=0.0):
    """Causal attention in blocks, linear in T: a query of block n attends to keys of blocks n - 1
    and n, none later, none `window` or more tokens older. With slopes (1, H, 1, 1), ALiBi (Press et
    al. 2022) subtracts slope * age from each score.
    q (B, T, H, D)   k, v (B, P + T, H, D): P < 2 block keys precede the queries, the first of them
    begins a block; returns (B, T, H, D)"""
    def attention(q, k, v):                         # queries have the positions of the last keys
        j = torch.arange(k.size(1), device=k.device)
        age = j[-q.size(1):, None] - j                              # (queries, keys)
        bias = (-slopes * age).masked_fill((age < 0) | (age >= window), -math.inf).to(q.dtype)
        return softmax_attention(q, k, v, bias)
    T, P = q.size(1), k.size(1) - q.size(1)
    n = min(T, block - P % block)                                   # to the end of a block
    first = attention(q[:, :n], k[:, :P + n], v[:, :P + n])
    if n == T:
        return first
    start, pad = P + n - block, (0, 0, 0, 0, 0, (n - T) % block)
    parts = q[:, n:], k[:, start:], v[:, start:]                    # k, v: from one block earlier
    q, k, v = (F.pad(x, pad).unflatten(1, (-1, block)) for x in parts)
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], dim=2).flatten(0, 1) for x in (k, v))
    rest = attention(q.flatten(0, 1), k, v).reshape(q.shape)        # (B, N, block, H, D)
    return torch.cat([first, rest.flatten(1, 2)[:, :T - n]], dim=1)


def cross_entropy(f, E, targets):
    """Mean of -log P(w), P = softmax(f Eᵀ) in fp32, over the targets w >= 0. The (n, V) logits are
    never held: those of a slice of rows are freed once they have given its gradient.

    f (B, T, C)   E (V, C)   targets (B, T), -1 is not scored -> ()"""
    scored, nats, trains = targets >= 0, 0, torch.is_grad_enabled()
    inputs = *f[scored].split(1024), E
    *slices, E = (x.detach().requires_grad_(trains) for x in inputs)
    for rows, w in zip(slices, targets[scored].split(1024)):
        with torch.autocast(f.device.type, enabled=False):          # fp32 in backward, too
            loss = F.cross_entropy(product(rows, E), w, reduction='sum')
            if trains: loss.backward()                              # adds to .grad of rows and E
        nats += loss.detach()
    if trains:                                                  # adds 0, whose gradient is .grad
        nats += sum(((x - x.detach()) * y.grad).sum() for x, y in zip(inputs, (*slices, E)))
    return nats / scored.sum().clamp(min=1)


# --------------------------------------------------------------------------------------------------
# what is new in DRT
class SelfAttention(nn.Module):
    """Causal attention over a sliding window, with ALiBi (Press et al. 2022) for positions."""
    def __init__(self, config):
        super().__init__()
        self.n_head, self.window, self.slope = config.n_head, config.window, config.slope
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, past):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).unbind(2)     # 3 x (B, L, H, D)
        if past is not None:
            k, v = (torch.cat(pair, dim=1) for pair in zip(past, (k, v)))       # (B, P + L, H, D)
        slopes = torch.linspace(math.log2(self.slope), -8, self.n_head, device=x.device).exp2()
        y = attend(q, k, v, self.window, self.window, slopes.view(1, -1, 1, 1))     # (B, L, H, D)
        return self.proj(y.flatten(2)), (k[:, -self.window:], v[:, -self.window:])


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): one of two layers gates the other."""
    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or -(-8 * config.n_embd // 96) * 32
        self.fc = nn.Linear(config.n_embd, 2 * n_inner, bias=False)
        self.proj = nn.Linear(n_inner, config.n_embd, bias=False)

    def forward(self, x):
        gate, y = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * y)


class Block(nn.Module):
    """A pre-norm Transformer layer; those of the upper half have grouped cross-attention."""
    def __init__(self, config, retrieves=False):
        super().__init__()
        C, self.n_head = config.n_embd, config.n_head
        self.norm1, self.attention = RMSNorm(C), SelfAttention(config)
        self.norm2, self.mlp = RMSNorm(C), MLP(config)
        if retrieves:
            self.gca = nn.ModuleDict(dict(norm=RMSNorm(C), query=nn.Linear(C, C, bias=False),
                                          proj=nn.Linear(C, C, bias=False)))

    def forward(self, x, past, cross_attend=None):
        y, past = self.attention(self.norm1(x), past)
        x = x + y
        if cross_attend is not None:
            q = self.gca.query(self.gca.norm(x)).unflatten(-1, (self.n_head, -1))   # (B, L, H, D)
            x = x + self.gca.proj(cross_attend(q).flatten(2))       # H + O of Eq. 2; O is like q
        return x + self.mlp(self.norm2(x)), past


class ChunkEncoder(nn.Module):
    """§3.1: C_k of chunks; keys and values from it. Bidirectional, pre-norm, rotary positions."""
    def __init__(self, config):
        super().__init__()
        C, self.n_head, self.shift = config.n_embd, config.n_head, config.shift_values
        self.blocks = nn.ModuleList(nn.ModuleDict(dict(
            norm1=RMSNorm(C), norm2=RMSNorm(C), mlp=MLP(config), proj=nn.Linear(C, C, bias=False),
            qkv=nn.Linear(C, 3 * C, bias=False))) for _ in range(config.n_encoder))
        self.norm_in = RMSNorm(C) if config.n_encoder else nn.Identity()
        self.norm, self.kv = RMSNorm(C), nn.Linear(C, 2 * C, bias=False)

    def forward(self, x):
        """x (B, N, S, C) -> C_k (B, N, S, C), its keys and values (2, B, N, S, H, D)"""
        y = self.norm_in(x).flatten(0, 1)                           # (B N, S, C)
        for block in self.blocks:
            q, k, v = block.qkv(block.norm1(y)).unflatten(-1, (3, self.n_head, -1)).unbind(2)
            y = y + block.proj(softmax_attention(rotate(q), rotate(k), v).flatten(2))
            y = y + block.mlp(block.norm2(y))
        y = self.norm(y).view(x.shape)
        k, v = self.kv(y).unflatten(-1, (2, self.n_head, -1)).unbind(3)     # 2 x (B, N, S, H, D)
        v = v.roll(-1, dims=2) if self.shift else v     # the last token has the landmark's value
        return y, torch.stack([k, v])


class State(NamedTuple):
    """What streaming keeps of a text (§3.3). Only landmarks and kv grow, once a chunk."""
    past: list                  # of each layer, keys and values of the last W positions
    unfinished: torch.Tensor    # (B, s, C) the encoder's input, of the chunk not yet complete
    landmarks: list             # of pieces, l_k of their chunks, (B, n, C)
    kv: list                    # of each chunk, (2, B, S, H, D) 16 bits; in forward a tensor
    reads: list                 # of each group, w and idx (B, n, K); the last: of the unfinished


# --------------------------------------------------------------------------------------------------
# the model
class DRT(nn.Module):
    """A sliding-window language model whose upper layers attend to chunks that it retrieves."""
    PIECE = 2048                # positions of a long text that are processed at once

    def __init__(self, config):
        super().__init__()
        self.config, self.kernel = config, 'auto'                   # kernel: of gca
        self.retriever, self.source = config.retriever, 'text'      # see ways
        self.corpus, self.offload = None, ''                        # see prepare_eval
        retrieves, n_upper = config.groups > 0, config.n_layer // 2
        seed = torch.randint(2 ** 48, (), device='cpu').item()
        n_ids = config.vocab_size + retrieves * (1 + (config.encoder == 'tokens'))  # landmark, mask
        self.embedding = nn.Embedding(n_ids, config.n_embd)         # also the output embedding
        self.lower = nn.ModuleList(Block(config) for _ in range(config.n_layer - n_upper))
        self.upper = nn.ModuleList(Block(config, retrieves) for _ in range(n_upper))
        self.landmark_norms = nn.ModuleList(RMSNorm(config.n_embd) for _ in range(config.groups))
        self.encoder = ChunkEncoder(config) if retrieves else None
        self.norm = RMSNorm(config.n_embd)
        for name, p in self.named_parameters():
            if p.dim() == 2:        # seeded by name: what models of other settings share is equal
                torch.manual_seed(seed + zlib.crc32(name.encode()))
                adds = name.endswith('proj.weight') and 'gca' not in name
                deep = math.sqrt(2 * config.n_layer) if adds else 1
                nn.init.normal_(p, std=0.02 * math.sqrt(768 / config.n_embd) / deep)
        for norm in self.landmark_norms if config.compare_means else ():
            nn.init.zeros_(norm.weight)
        if retrieves and config.shift_values:   # at first GCA copies what followed a similar token
            k, v = self.encoder.kv.weight.detach().chunk(2)
            for block in self.upper:
                block.gca.query.weight.data.copy_(k)
                block.gca.proj.weight.data.copy_(v.T)

    def empty_state(self, B):
        """The state before a text. A corpus to retrieve from comes first: its chunks (B = 1)."""
        c, E = self.config, self.embedding.weight
        w, none = E.new_zeros(B, 1, c.n_neighbors), E.new_empty(B, 0, c.n_embd)
        landmarks, kv = ([none], []) if self.source == 'text' else self.corpus[1:]
        return State([None] * c.n_layer, none, landmarks, kv, [(w, w.int() - 1)] * c.groups)

    def insert(self, x, value, s=0):
        """§3.1: inserts `value` after every S - 1 tokens; s tokens precede x (B, T) -> (B, L)"""
        n, end = self.config.chunk_size - 1, s + x.size(1)
        chunks = F.pad(x, (s, -end % n)).unflatten(1, (-1, n))
        ids = F.pad(chunks, (0, 1), value=value).flatten(1)[:, s:end + end // n]
        return ids if self.config.groups else x                     # the base LM has no landmarks

    def retrieve(self, g, x, l, allowed):
        """Eq. 1: r = h · l_k / sqrt(C). Retrieves the K chunks of largest r (§3.2: + noise),
        weighted by the softmax of r. x (B, N, C) is of the last N of M landmarks l (B, M, C),
        allowed (B, N, M) -> w (B, N, K) fp32, idx (B, N, K) int32; 0, -1 where no chunk is left"""
        K, (N, M) = self.config.n_neighbors, allowed.shape[1:]
        h = self.landmark_norms[g](fp32(x))
        if self.retriever == 'random':                              # appendix A.5; uniform, sd 1
            table = torch.rand(M, h.size(2), generator=torch.Generator().manual_seed(g))
            h = (table[M - N:] * 12 ** 0.5 - 3 ** 0.5).to(h)
        elif self.config.compare_means:
            mean = product(allowed.type_as(l), l.mT) / allowed.sum(2, keepdim=True).clamp(min=1)
            h = h + F.rms_norm(l[:, M - N:] - mean, l.shape[2:], eps=1e-6)
        r = (product(h, l) / h.size(-1) ** 0.5).masked_fill(~allowed, MASKED)   # (B, N, M)
        r = F.pad(r, (0, K), value=MASKED)                          # K columns or more
        noisy = self.training and self.config.gumbel                # Gumbel: -log Exp(1)
        order = r - torch.empty_like(r).exponential_().log() if noisy else r
        idx = order.argsort(descending=True, stable=True)[..., :K]  # not topk: its ties depend on M
        w = r.gather(2, idx)                                        # (B, N, K)
        valid = w > MASKED
        return w.softmax(2) * valid, idx.masked_fill(~valid, -1).int()

    def store(self, kv):
        """kv (2, B, N, S, H, D) -> a list of N chunks, 16 bits, with --offload in a mapped file"""
        kv = kv.half() if kv.dtype == torch.float32 else kv         # fp64 is for the tests
        if self.offload:                # the file is unlinked at once: it is freed with the tensor
            with tempfile.NamedTemporaryFile(dir=self.offload) as file:
                torch.save(kv, file)
                file.flush()
                kv = torch.load(file.name, map_location='cpu', mmap=True)
        return list(kv.unbind(2))

    def encode(self, ids, state, docs=None, masked=None, upper=True):
        """ids (B, L), of tokens and landmarks, continue the text of state. Only from forward: docs
        (B, L), documents; masked (B, L), hidden from the encoder -> f (B, L, C), C_k (B, N, S, C)
        of the N chunks that end here, the new state"""
        config, S = self.config, self.config.chunk_size
        (B, L), chunks = ids.shape, None
        past, unfinished, landmarks, kv, reads = state
        past, reads = list(past), list(reads)
        s = unfinished.size(1)                                      # positions before ids
        x = self.embedding(ids)                                     # (B, L, C)
        for i, block in enumerate(self.lower):
            x, past[i] = block(x, past[i])
        if config.groups:                                           # else the base LM
            seen = ids if masked is None else ids.masked_fill(masked, config.vocab_size + 1)
            y = x if config.encoder == 'lower' else self.embedding(seen)
            unfinished = torch.cat([unfinished, y], dim=1)
        N = unfinished.size(1) // S
        if N > 0:
            chunks, new_kv = self.encoder(unfinished[:, :N * S].unflatten(1, (N, S)))
            unfinished = unfinished[:, N * S:]
            l = chunks.mean(2) if config.compare_means else chunks[:, :, -1]    # (B, N, C)
            landmarks = [*landmarks, l]
            kv = new_kv if docs is not None else kv + self.store(new_kv)    # forward: a tensor
        if not upper: return None, None, State(past, unfinished, landmarks, kv, reads)

        if len(landmarks) > 1:
            landmarks = [torch.cat(landmarks, dim=1)]               # (B, M, C)
        M, same = landmarks[0].size(1), True
        allowed = x.new_ones(B, N, M, dtype=torch.bool).tril(M - N - 1)     # chunks before its own
        if self.source != 'text':                                   # Table 4
            n = len(self.corpus[2])
            allowed[..., n - 1] &= not config.next_chunk            # there is none after it
            allowed[..., n:] &= self.source == 'both'
        if docs is not None and N > 0:          # no retrieval from another document
            first, ends = docs[:, None, :N * S:S], docs[:, S - 1::S]    # (B, 1, N), (B, N)
            allowed &= (first == ends[:, :, None]) & (first >= 0)   # chunks wholly in it
            retrieved_for = F.pad(ends, (1, 0)).repeat_interleave(S, dim=1)[:, :L]
            same = (docs == retrieved_for)[:, :, None, None]        # (B, L, 1, 1) bool

        def cross_attend(q):        # (B, L, H, D) -> the same; w, idx, retrieved: of the loop below
            q = F.pad(q, (0, 0, 0, 0, s, (N + 1) * S - s - L))      # N + 1 whole chunks
            k, v = retrieved.type_as(q).flatten(2, 3)               # (B, n S, H, D)
            o = gca(q, k, v, w, idx, S, S - 1, config.sink, kernel=self.kernel)
            return o[:, s:s + L] * same

        retrieves, n_lower = self.retriever != 'off' and M > 0, len(self.lower)
        depth = len(self.upper) // (config.groups or 1)             # layers of a group
        for i, block in enumerate(self.upper, n_lower):
            g, j = divmod(i - n_lower, depth)                       # layer j of group g
            if retrieves and j == 0:                                # a group begins
                h = x[:, S - 1 - s::S]                              # (B, N, C) of the landmarks
                pairs = zip(reads[g], self.retrieve(g, h, landmarks[0], allowed))
                w, idx = (torch.cat([old[:, -1:], new], dim=1) for old, new in pairs)
                reads[g] = w, idx           # (B, N + 1, K): landmark n retrieves for chunk n + 1
                if config.next_chunk:                               # 2 K columns
                    w = w.repeat_interleave(2, dim=2) / 2
                    idx = torch.stack([idx, idx + (idx >= 0)], dim=3).flatten(2)    # -1 remains
                retrieved = kv                                      # (2, B, N, S, H, D)
                if docs is None:                                    # each retrieved chunk once
                    numbers, idx = idx.clamp(min=0).unique(return_inverse=True)     # (w is 0 at -1)
                    retrieved = torch.stack([kv[m] for m in numbers.tolist()], dim=2).to(x.device)
            x, past[i] = block(x, past[i], cross_attend if retrieves else None)
        return self.norm(x), chunks, State(past, unfinished, landmarks, kv, reads)

    def forward(self, batch, progress):
        """batch: tokens, targets, doc (B, T) int64 (target -1: not scored), seed; progress: 0 to 1
        -> loss () in nats per token (in eval mode without noise and MLM), a dict to log"""
        config, V, masked = self.config, self.config.vocab_size, None
        ids, targets = self.insert(batch.tokens, V), self.insert(batch.targets, -1)         # (B, L)
        docs = self.insert(batch.doc, 0)
        docs = docs.where(ids < V, docs.roll(1, dims=1))            # a landmark's: of its chunk
        if self.training: torch.manual_seed(batch.seed)             # for Gumbel noise and MLM
        if self.training and config.groups and config.encoder == 'tokens' and progress < 0.5:
            masked = torch.rand(ids.shape, device=ids.device) < config.mlm
            masked &= (ids < V) & (docs >= 0)                       # no landmarks, no padding

        f, chunks, state = self.encode(ids, self.empty_state(len(ids)), docs, masked)
        loss, log = cross_entropy(f, self.embedding.weight[:V], targets), {}
        if config.groups:
            top = state.reads[-1][0][:, :-1].amax(2)                # (B, N)
            log['top_weight'] = top.sum() / (top > 0).sum().clamp(min=1)
        if masked is not None:                                      # §3.2: MLM trains the encoder
            encoded = chunks.flatten(1, 2)                          # (B, N S, C)
            words = ids.masked_fill(~masked, -1)[:, :encoded.size(1)]
            mlm = cross_entropy(encoded, self.embedding.weight[:V], words)
            log.update(lm_loss=loss, mlm_loss=mlm)
            loss = loss + mlm
        return loss, log

    def log_probs(self, tokens):
        """log P(next token | all so far), one document: tokens (B, T) int64 -> (B, T, V) fp32"""
        return self.stream(tokens)[0]

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """log_probs of tokens (B, t) that continue the text of state, and the new state"""
        state, V = state or self.empty_state(len(tokens)), self.config.vocab_size
        ids = self.insert(tokens, V, state.unfinished.size(1))
        f, _, state = self.encode(ids, state)
        logits = product(f[:, ids[0] < V], self.embedding.weight[:V])       # not of landmarks
        return logits.log_softmax(-1), state

    @torch.no_grad()
    def read(self, tokens, state=None):
        """The state of `stream`. Upper layers run only at the end, on what later positions need: W
        positions for each layer, S for each group, as a chunk reads what the one before it chose"""
        state, c = state or self.empty_state(len(tokens)), self.config
        ids = self.insert(tokens, c.vocab_size, state.unfinished.size(1))
        reach = len(self.upper) * c.window + (1 + c.groups) * c.chunk_size
        after = ids.size(1)                                         # positions after a piece
        for piece in ids.split(self.PIECE, dim=1):
            after -= piece.size(1)
            state = self.encode(piece, state, upper=after < reach)[-1]
        return state

    def ways(self):
        """Name -> attributes to set: chunks of the text, of a corpus, of both, random ones, none"""
        if not self.config.groups or self.config.retriever == 'off': return {'off': {}}
        on = dict(retriever=self.config.retriever, source='text')
        sources = ('corpus', 'both') if self.corpus else ()         # Table 4
        return dict(on=on, **{source: dict(on, source=source) for source in sources},
                    shuffled=dict(on, retriever='random'), off=dict(on, retriever='off'))

    def trace(self, tokens, t):
        """Chunks read for token t + 1: [(weight, where, start, end)], where: a text or corpus"""
        n, found, M = self.config.chunk_size - 1, [], len(self.empty_state(1).kv)
        for w, idx in self.read(tokens[None, :t]).reads:
            for weight, k in zip(w[0, -1].tolist(), idx[0, -1].tolist()):
                if k >= 0:
                    where, k = (tokens, k - M) if k >= M else (self.corpus[0], k)
                    found.append((weight, where, k * n, (k + 1 + self.config.next_chunk) * n))
        return sorted(found, key=lambda read: -read[0])

    @torch.no_grad()
    def prepare_eval(self, corpus, external, args, path, progress):
        """Table 4: with --retrieve-from, reads external.train as a text before any other one"""
        self.source, self.offload = 'text', args.offload
        if args.retrieve_from and 'on' in self.ways():
            state, tokens = self.empty_state(1), external.train.tokens.astype('int64')
            if args.split == 'train' and external.fingerprint == corpus.fingerprint:
                raise SystemExit('--split train with --retrieve-from: each text would find itself')
            if len(tokens) < 2 * (self.config.chunk_size - 1):
                raise SystemExit('--retrieve-from: its text is shorter than two chunks')
            tokens = torch.from_numpy(tokens).to(state.unfinished.device)
            for piece in progress(tokens.split(16 * self.PIECE), 'reading the corpus'):
                state = self.read(piece[None], state)
            self.corpus = tokens, state.landmarks, state.kv


if __name__ == '__main__':
    model, tokens = DRT(DRTConfig()), torch.randint(4096, (1000,))
    log_p = model.log_probs(tokens[None, :-1])[0].gather(1, tokens[1:, None])
    print(f'untrained: loss {-log_p.mean():.3f}, ln V {math.log(4096):.3f}')
    for weight, _, start, end in model.trace(tokens, t=900):
        print(f'token 901 is predicted from tokens {start} to {end - 1} with weight {weight:.3f}')
