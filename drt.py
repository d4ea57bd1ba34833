"""
DRT, the Differentiable Retrieval-based Transformer: a language model that learns by itself what to look up in its own past.

    Xiang Hu, Zhihao Teng, Jun Zhao, Wei Wu and Kewei Tu, "Efficient Length-Generalizable Attention via Causal Retrieval
    for Long-Context Language Modeling", ICML 2025, arXiv:2410.01651 (as a submission: "Efficient Long-range Language
    Modeling with Self-supervised Causal Retrieval")

A text is cut into chunks, and after each stands a landmark, a token that sums it up. When a chunk ends, its landmark scores
all earlier chunks and fetches the best few; the layers of the upper half read these while they write the next chunk. Each
fetched chunk is read by itself, and what was read is added up with the softmaxed scores as weights. So the loss of the next
tokens reaches the scores: a chunk that helped is scored higher the next time. Nothing but the language model's loss is needed.

Where the paper is in this file
    §3.1         landmarks, chunks of S positions              DRT.insert
    §3.1         sliding-window attention, ALiBi               SelfAttention
    §3.1         the chunk encoder: C_k and l_k                ChunkEncoder
    Eq. 1        relevance scores and the choice of chunks     DRT.retrieve
    Eq. 2, 3     grouped cross-attention                       GroupedCrossAttention, UpperBlock (and gca_kernel.py)
    §3.1         the encoder-decoder variant                   DRT.encode, with encoder = 'tokens'
    §3.2         Gumbel top-k, MLM                             DRT.forward
    §3.3         inference, memory offloading                  DRT.stream
    §4.1.2       the base LM: groups = 0; the other sizes      PRESETS

Letters used in the shape comments
    B sequences    T tokens    C width    H heads    D width of one head    V vocabulary
    N chunks       S positions of a chunk, its landmark included      P = N S positions
    K chunks that are fetched for one      M chunks that are there to be fetched      G groups      W window

Where we differ from the paper, and why
    A chunk is S - 1 tokens and its landmark, S positions in all (the paper's own training configuration, not its text).
    The window holds W tokens, the token itself included (official code: one more).
    The landmark's key takes no part in cross-attention, and the softmax is that of Eq. 3; --sink is the official code's, with a key
    and a value of zero beside those of each chunk.
    Norm(H + O) of Eq. 2 is the norm before the MLP, and the residual goes on without O, as in the official code.
    A token never reads a chunk of another document than its own (official code: no documents).
    Scores, choice and weights are in fp32 (official code: bf16, which ties scores). AdamW's weight decay is on matrices only, and
    the cosine ends at a tenth of the learning rate (paper: a fifth).
    Initial weights of what a layer adds to the residual are scaled by depth, as in all models of this house; GCA's last matrix, which
    adds nothing to it, has 0.02 sqrt(768 / C), the official scale at any width (official code: 0.02 for all, C = 768).
    Not here: retrieval from a whole corpus (§3.3, Table 4).

    $ python drt.py                         a tour and the cost of retrieval, on a CPU
    $ python train.py --model drt
"""
import math
import time
import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from gca_kernel import gca, gca_plan


@dataclass
class DRTConfig:
    vocab_size: int = 4096        # ids of the tokenizer; for bpe, how many to learn (ours)
    block_size: int = 992         # tokens of a training sequence, T, landmarks not counted (ours; paper: 16K)
    micro_batch: int = 2          # sequences of a micro-batch, B (ours; official code: 4)
    n_layer: int = 4              # Transformer layers, the upper half of which retrieve (ours; paper: 12)
    n_head: int = 4               # attention heads, H (ours; official code: 12)
    n_embd: int = 128             # width, C (ours; official code: 768)
    n_inner: int = 0              # width inside the MLP; 0 is 8/3 C, up to a multiple of 32 (official code: 2,048)
    window: int = 128             # tokens that a token attends to, itself included, W (ours; paper: 512)
    chunk_size: int = 32          # positions of a chunk, S, its landmark included (ours; paper: 64)
    n_neighbors: int = 4          # chunks fetched for each chunk, K (ours; paper: 8, encoder-decoder 4)
    groups: int = 1               # groups of upper layers, G, each fetches anew; 0 is the base LM (paper: 1, 2)
    encoder: str = 'lower'        # the chunk encoder reads: lower (layers' output), tokens (encoder-decoder); none: there is no encoder
    n_encoder: int = 2            # its layers (official code)
    gumbel: bool = True           # noise on the scores when chunks are chosen, in training only (paper section 3.2)
    mlm: float = 0.15             # with encoder tokens: share of its tokens masked in the first half of training (official code)
    retriever: str = 'learned'    # learned; random: a random vector in place of the landmark's (paper appendix A.5); off: nothing is read
    sink: bool = False            # a key and a value of zero beside those of each chunk (official code: yes)

    def __post_init__(self):
        for name in ('vocab_size', 'block_size', 'micro_batch', 'n_layer', 'n_head', 'n_embd', 'n_neighbors', 'n_encoder'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} {getattr(self, name)} must be 1 or more')
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd {self.n_embd} is not a multiple of 2 x n_head {self.n_head}; RoPE turns pairs')
        if self.window < 2 or self.chunk_size < 2:
            raise ValueError(f'window {self.window} and chunk_size {self.chunk_size} must be 2 or more')
        if self.groups < 0 or self.groups and (self.n_layer % 2 or self.n_layer // 2 % self.groups):
            raise ValueError(f'n_layer {self.n_layer} is not twice a multiple of groups {self.groups}: '
                             'the upper half of the layers is cut into groups of one size')
        if self.encoder not in ('lower', 'tokens', 'none'):
            raise ValueError(f'encoder {self.encoder!r} is not one of lower, tokens, none')
        if self.retriever not in ('learned', 'random', 'off'):
            raise ValueError(f'retriever {self.retriever!r} is not one of learned, random, off')
        if not 0 <= self.mlm < 1 or self.n_inner < 0:
            raise ValueError(f'mlm {self.mlm} is a share, from 0 to below 1; n_inner {self.n_inner} is 0 or more')


# The paper's model, App. A.1: T (260 chunks of 63 tokens), tokens_per_step (8 GPUs x 4 sequences), max_steps, lr, warmup, weight_decay.
# Its base LMs are --groups 0, with --window 768, or with --n-layer 14 --window 658; x2 is --groups 2; the encoder-decoder variant is
# --encoder tokens --n-neighbors 4.
PRESETS = {
    'tiny': dict(tokens_per_step=1984, max_steps=1000),     # the defaults: minutes on two CPU cores
    '124m': dict(data='pg19', tokenizer='gpt2', vocab_size=50_257, block_size=16_380, micro_batch=4, n_layer=12, n_head=12, n_embd=768,
                 window=512, chunk_size=64, n_neighbors=8, tokens_per_step=524_160, max_steps=60_000, lr=2e-3, warmup=0.02,
                 weight_decay=0.001, eval_every=1000),
}


def batches(config):
    """The batching of data.py that this model trains on: long pieces of one document."""
    return 'documents'


# ----------------------------------------------------------------------------------------------------------------------
# the transformer (the same text in trime.py, rpt.py and drt.py)

class RMSNorm(nn.Module):
    """x / rms(x) * gain, over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, n_embd):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n_embd))

    def forward(self, x):
        return F.rms_norm(x, self.gain.shape, self.gain, eps=1e-6)


def fp32(x):
    """bf16 and fp16 become fp32; fp64 stays what it is, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rope(positions, D):
    """The turns e^(i p θ_d), θ_d = 10000^(-2d/D), of rotary embeddings (Su et al. 2021). positions (T,) -> (T, 1, D/2)"""
    theta = 10000 ** (-torch.arange(0, D, 2, device=positions.device) / D)
    angle = positions[:, None, None] * theta                                # (T, 1, D/2)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x, turns):
    """Turns each pair (x_2d, x_2d+1) of every head by the angle of its position. x (B, T, H, D) -> the same."""
    pairs = torch.view_as_complex(fp32(x).unflatten(-1, (-1, 2)))           # (B, T, H, D/2)
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def softmax_attention(q, k, v, mask=None):
    """
    softmax(q kᵀ / sqrt(D) + mask) v. mask broadcasts to (..., t, s): what to add, or True where to look. On a CPU in bf16 by the
    definition: the fused kernel takes 1.4 to 4 times as long there, forward and back (torch 2.13; python rpt.py measures it).

    q (..., t, D)   k, v (..., s, D) -> (..., t, D)
    """
    if q.device.type != 'cpu' or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    z = q / math.sqrt(q.size(-1)) @ k.transpose(-2, -1)                     # (..., t, s)
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask
    return z.softmax(-1) @ v


def attend(q, k, v, block, window, slopes=None):
    """
    Causal attention in blocks: the queries of block n see the keys of blocks n-1 and n, none later, none `window` or
    more tokens older. With slopes (H,), ALiBi takes slope · age from each score (in the dtype of q). The cost is linear in T.

    q (B, T, H, D)   k, v (B, P + T, H, D): the P keys that come before the queries, the first at the start of a block
    returns (B, T, H, D)
    """
    T, P = q.size(1), k.size(1) - q.size(1)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)       # (B, H, T, D)
    if P == 0 and T <= min(block, window) and slopes is None and q.is_cuda:        # without a mask it has a faster kernel
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def bias(i, j):
        age = i[:, None] - j[None, :]                                       # (queries, keys)
        seen = (age >= 0) & (age < window) & (j // block >= i[:, None] // block - 1)
        penalty = torch.zeros(age.shape, device=q.device) if slopes is None else -slopes[None, :, None, None] * age
        return penalty.masked_fill(~seen, float('-inf')).to(q.dtype)        # (queries, keys) or (1, H, queries, keys)

    if P > 0 or T <= block:                                                 # one piece: by the definition
        j = torch.arange(P + T, device=q.device)
        return softmax_attention(q, k, v, bias(j[P:], j)).transpose(1, 2)

    B, H, _, D = q.shape
    N = -(-T // block)                                                      # blocks; the last is filled up with tokens
    q, k, v = (F.pad(t, (0, 0, 0, N * block - T)) for t in (q, k, v))       # that come after all others
    mask = bias(block + torch.arange(block, device=q.device), torch.arange(2 * block, device=q.device))
    first = softmax_attention(q[:, :, :block], k[:, :, :block], v[:, :, :block], mask[..., block:])     # (B, H, block, D) has none before it
    blocks = lambda t: t.reshape(B, H, N, block, D).transpose(1, 2)         # (B, N, H, block, D)
    pairs = lambda t: torch.cat([blocks(t)[:, :-1], blocks(t)[:, 1:]], dim=3).flatten(0, 1)     # (B (N - 1), H, 2 block, D)
    rest = softmax_attention(blocks(q)[:, 1:].flatten(0, 1), pairs(k), pairs(v), mask)
    rest = rest.view(B, N - 1, H, block, D).transpose(1, 2).reshape(B, H, (N - 1) * block, D)
    return torch.cat([first, rest], dim=2)[:, :, :T].transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------------
# what is new in DRT

class SelfAttention(nn.Module):
    """Causal multi-head attention over a sliding window, with ALiBi (Press et al. 2022) in place of positions."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.window = config.n_head, config.window
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.register_buffer('slopes', 2 ** (-8 * torch.arange(1, self.n_head + 1) / self.n_head), persistent=False)     # (H,)

    def forward(self, x, past=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).unbind(2)      # 3 x (B, T, H, D)
        if past is not None:                                                # the keys and values of earlier tokens
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        y = attend(q, k, v, self.window, self.window, self.slopes)          # (B, T, H, D)
        return self.proj(y.reshape(B, T, C)), (k[:, 1 - self.window:], v[:, 1 - self.window:])


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): one of two layers is the gate of the other."""

    def __init__(self, config):
        super().__init__()
        n_inner = config.n_inner or -(-8 * config.n_embd // 96) * 32
        self.fc = nn.Linear(config.n_embd, 2 * n_inner, bias=False)
        self.proj = nn.Linear(n_inner, config.n_embd, bias=False)

    def forward(self, x):
        gate, y = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * y)


class Block(nn.Module):
    """One pre-norm Transformer layer; returns its keys and values too, for streaming."""

    def __init__(self, config):
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.n_embd), SelfAttention(config)
        self.norm2, self.mlp = RMSNorm(config.n_embd), MLP(config)

    def forward(self, x, past=None):
        y, kv = self.attention(self.norm1(x), past)
        x = x + y
        return x + self.mlp(self.norm2(x)), kv


class CrossEntropy(torch.autograd.Function):
    """
    Σ -log P(w) with P = softmax(f Eᵀ), over the targets w >= 0. (n, V) is never held: tokens are taken in blocks of R, and as the
    gradient of a block, P minus one at w, is known as soon as P is, it is computed right there, in the forward pass. Under
    autocast the products of the gradient round to bf16, as all of the way back does; the logits do not.

    f (n, C)   E (V, C)   targets (n,), -1 does not count   with_grad: False where nobody will ask for gradients
    returns ()
    """
    R = 512

    @staticmethod
    def forward(ctx, f, E, targets, with_grad):
        total = f.new_zeros(())
        df, dE = (torch.zeros_like(x) if with_grad else None for x in (f, E))
        logits = f.new_empty(min(CrossEntropy.R, len(f)), len(E))           # the same memory for all blocks
        for a in range(0, len(f), CrossEntropy.R):
            rows = slice(a, a + CrossEntropy.R)
            counts, w = targets[rows, None] >= 0, targets[rows, None].clamp(min=0)      # (R, 1)
            with torch.autocast(f.device.type, enabled=False):              # rounded inputs are fine, rounded logits are not
                z = torch.mm(f[rows], E.T, out=logits[:len(f) - a])         # (R, V)
            z -= z.amax(1, keepdim=True)
            right = z.gather(1, w)                                          # (R, 1)
            Z = z.exp_().sum(1, keepdim=True)                               # z is e^z from here on, in the same memory
            total += ((Z.log() - right) * counts).sum()
            if with_grad:
                dz = z.mul_(counts / Z).scatter_add_(1, w, -counts.to(z))   # P minus one at w
                df[rows] = dz @ E
                dE += dz.T @ f[rows]
        ctx.grads = df, dE
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        (df, dE), ctx.grads = ctx.grads, None                               # they are large, and of no use any more
        return df * d, dE * d, None, None


def gumbel(shape, generator, device):
    """Gumbel noise: the places of the K largest of r + noise are K draws from softmax(r) without replacement (§3.2)."""
    return -torch.empty(shape, device=device).exponential_(generator=generator).log()


class GroupedCrossAttention(nn.Module):
    """
    Eq. 2 and 3: the tokens of chunk t+1 read the K chunks that were fetched for it, each by a softmax of its own, and add up
    what they read with the weights of the chunks:  O = Σ_k w_k softmax(Q K_kᵀ / sqrt(D)) V_k. Only Q is this layer's own.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.norm = RMSNorm(config.n_embd)
        self.query = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, read):
        """x (B, T, C); read: (B, T, H, D) queries -> what they read, the same shape"""
        q = self.query(self.norm(x)).unflatten(-1, (self.n_head, -1))
        return self.proj(read(q).flatten(-2))


class UpperBlock(Block):
    """A layer of the upper half: what is read from the fetched chunks enters the MLP, Norm(H + O) of Eq. 2. The base LM's reads nothing."""

    def __init__(self, config):
        super().__init__(config)
        self.gca = GroupedCrossAttention(config) if config.groups else None

    def forward(self, x, past=None, read=None):
        y, kv = self.attention(self.norm1(x), past)
        x = x + y
        o = 0 if read is None else self.gca(x, read)
        return x + self.mlp(self.norm2(x + o)), kv


class EncoderBlock(nn.Module):
    """One pre-norm layer over a chunk, every position of which sees all others; rotary positions within the chunk."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.norm1, self.norm2, self.mlp = RMSNorm(config.n_embd), RMSNorm(config.n_embd), MLP(config)
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, turns):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.n_head, -1)).unbind(2)     # 3 x (B N, S, H, D)
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, turns), rotate(k, turns), v))
        y = softmax_attention(q, k, v).transpose(1, 2)
        x = x + self.proj(y.flatten(-2))
        return x + self.mlp(self.norm2(x))


class ChunkEncoder(nn.Module):
    """
    What a chunk is to those who fetch it (§3.1): C_k for the cross-attention, and at its landmark l_k, by which it is found.
    Its keys and values are made once, for all layers that read it. With encoder = 'none' only the norm is left.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.n_encoder if config.encoder != 'none' else 0))
        self.norm_in, self.norm = RMSNorm(config.n_embd) if self.blocks else nn.Identity(), RMSNorm(config.n_embd)
        self.kv = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)

    def forward(self, x):
        """x (B, N S, C), whole chunks -> C_k (B, N, S, C), k and v (B, N S, H, D)"""
        config, (B, P, C) = self.config, x.shape
        turns = rope(torch.arange(config.chunk_size, device=x.device), C // config.n_head)
        x = self.norm_in(x.reshape(-1, config.chunk_size, C))
        for block in self.blocks:
            x = block(x, turns)
        x = self.norm(x).view(B, -1, config.chunk_size, C)
        k, v = self.kv(x).view(B, P, 2, config.n_head, -1).unbind(2)
        return x, k, v


# ----------------------------------------------------------------------------------------------------------------------
# the model

class DRT(nn.Module):
    """A sliding-window language model whose upper layers read earlier chunks that it retrieved itself."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        seed = torch.randint(2 ** 48, (), device='cpu').item()              # drawn first, so all settings of this file draw the same
        n_upper = config.n_layer // 2
        self.landmark, self.mask = config.vocab_size, config.vocab_size + 1             # ids that the tokenizer does not have
        n_ids = config.vocab_size + (config.groups > 0) + (config.groups > 0 and config.encoder == 'tokens')
        self.embedding = nn.Embedding(n_ids, config.n_embd)                             # also the output embedding
        self.lower = nn.ModuleList(Block(config) for _ in range(config.n_layer - n_upper))
        self.upper = nn.ModuleList(UpperBlock(config) for _ in range(n_upper))
        self.landmark_norms = nn.ModuleList(RMSNorm(config.n_embd) for _ in range(config.groups))
        self.encoder = ChunkEncoder(config) if config.groups else None
        self.norm = RMSNorm(config.n_embd)
        self.retriever = config.retriever       # eval.py tries others
        self.kernel = 'auto'                    # of gca: auto, triton or torch
        self.offload = False                    # streaming keeps the chunks' keys and values in the CPU's memory (§3.3)
        for name, p in self.named_parameters():                             # GPT-2's: what a block adds to the residual starts small
            std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith('proj.weight') else 0.02
            if name.endswith('gca.proj.weight'):                            # what GCA adds never enters the residual; and it has to be
                std = 0.02 * math.sqrt(768 / config.n_embd)                 # of use soon, or the scores forget which chunks are alike
            if p.dim() == 2:
                torch.manual_seed(seed + zlib.crc32(name.encode()))         # of each name, so what two settings share begins alike
                nn.init.normal_(p, std=std)

    def groups(self):
        """The layers of the upper half, cut into groups; the base LM's are one that retrieves nothing."""
        G = max(1, self.config.groups)
        n = len(self.upper) // G                                            # layers of a group
        return [list(self.upper)[g * n:(g + 1) * n] for g in range(G)]

    def insert(self, x, fill, at_landmark):
        """x (B, T) -> (B, N S): a landmark's value after each S - 1; the last chunk is filled up. The base LM has none."""
        if not self.config.groups:
            return x
        B, T = x.shape
        n = self.config.chunk_size - 1
        x = F.pad(x, (0, -T % n), value=fill).view(B, -1, n)
        return torch.cat([x, torch.full_like(x[:, :, :1], at_landmark)], dim=2).flatten(1)

    def retrieve(self, h, landmarks, allowed, noise=None):
        """
        Eq. 1: relevance r = h · l_k / sqrt(C), the K most relevant chunks, and their weights, a softmax over these K (Eq. 2).

        h, landmarks   (B, n, C), (B, M, C)  h before the group for the chunks that ask, l_k of those that may be found
        allowed        (B, n, M) bool
        noise          (B, n, M) or None  added for the choice alone, not to what becomes a weight
        returns        w (B, n, K) in fp32, 0 where there is no chunk; idx (B, n, K) int32, -1 there
        """
        K = min(self.config.n_neighbors, landmarks.size(1))
        with torch.autocast(h.device.type, enabled=False):                  # bf16 has steps of 0.125 near 20: ties
            r = fp32(h) @ fp32(landmarks).transpose(1, 2) / h.size(-1) ** 0.5           # (B, n, M)
            wanted = r.detach() if noise is None else r.detach() + noise
            idx = wanted.masked_fill(~allowed, -math.inf).topk(K).indices   # (B, n, K)
            there = allowed.gather(2, idx)
            w = r.gather(2, idx).masked_fill(~there, -1e30).softmax(2) * there          # finite where there is none: no NaN, no gradient
        return w, idx.masked_fill(~there, -1).int()

    def ask(self, g, x, first):
        """
        The landmarks' states that ask, h of Eq. 1: x (B, n, C) before group g, of the chunks from number `first` on. Retriever random
        has a vector of its own for each chunk and group instead, always the same.
        """
        if self.retriever == 'random':
            t, c = torch.arange(first, first + x.size(1), dtype=torch.float64), torch.arange(x.size(2))
            chaos = torch.sin((t[:, None] * x.size(2) + c + 1) * (12.9898 + g)) * 43758.5453    # (n, C) a hash, not a generator's state:
            return ((chaos % 1 - 0.5) * 12 ** 0.5).to(x).expand_as(x)                           # chunk t's vector depends on t alone
        return self.landmark_norms[g](x)

    def encode(self, tokens, doc=None, noise=None, masked=None):
        """
        tokens (B, T); doc (B, T) their documents, None: all of one; noise (G, B, N, N) or None; masked (B, N S) bool or None
        returns f (B, T, C), the states that say the next token; C_k (B, N, S, C); for each group w, idx (B, N, K): what chunk n reads
        """
        config, (B, T), S = self.config, tokens.shape, self.config.chunk_size
        ids = self.insert(tokens, 0, self.landmark)                         # (B, P)
        x = self.embedding(ids)
        below = x if masked is None else self.embedding(ids.masked_fill(masked, self.mask))
        for block in self.lower:
            x, _ = block(x)
        if not config.groups:
            for block in self.upper:
                x, _ = block(x)
            return self.norm(x), None, []

        chunks, k, v = self.encoder(below if config.encoder == 'tokens' else x)
        N, landmarks = chunks.size(1), chunks[:, :, -1]                     # (B, N, C)
        earlier = torch.ones(N, N, dtype=torch.bool, device=x.device).tril(-1).expand(B, N, N)   # chunk t finds chunks before it
        if doc is not None:
            docs = self.insert(doc, -1, 0).view(B, N, S)                    # (B, N, S)
            docs[..., -1] = last = docs[..., -2]                            # (B, N) a landmark is of the document before it
            whole = (docs == last[..., None]).all(2)                        # (B, N) chunks of one document: they are found, by that one
            earlier = earlier & whole[:, None, :] & (last[:, :, None] == last[:, None, :])
            asked_by = F.pad(last, (1, -1), value=-1)                       # (B, N) whose landmark asked for chunk n
            reads = (docs == asked_by[..., None]).view(B, -1, 1, 1)         # (B, P, 1, 1) tokens of another one do not read it

        found = []
        for g, group in enumerate(self.groups()):
            h = self.ask(g, x.view(B, N, S, -1)[:, :, -1], 0)               # (B, N, C)
            w, idx = self.retrieve(h, landmarks, earlier, None if noise is None else noise[g])
            w, idx = F.pad(w, (0, 0, 1, -1)), F.pad(idx, (0, 0, 1, -1), value=-1)       # what chunk t found is for chunk t + 1
            plan = gca_plan(idx, N)                                         # the layers of a group share what was found

            def read(q):
                o = gca(q, k, v, w, idx, S, n_keys=S - 1, sink=config.sink, plan=plan, kernel=self.kernel)
                return o if doc is None else o * reads

            for block in group:
                x, _ = block(x, read=None if self.retriever == 'off' else read)
            found.append((w, idx))
        f = self.norm(x).view(B, N, S, -1)[:, :, :-1].flatten(1, 2)[:, :T]  # nothing is predicted at landmarks
        return f, chunks, found

    def nll(self, f, targets):
        """The sum of -log P of targets (...), -1 does not count, after f (..., C)."""
        E = fp32(self.embedding.weight[:self.config.vocab_size])            # only the tokenizer's words can be said
        return CrossEntropy.apply(fp32(f).reshape(-1, f.size(-1)), E, targets.reshape(-1), torch.is_grad_enabled())

    def say(self, f):
        """log P of all words: f (..., C) -> (..., V) fp32"""
        with torch.autocast(f.device.type, enabled=False):
            return (fp32(f) @ fp32(self.embedding.weight[:self.config.vocab_size]).T).log_softmax(-1)

    def check(self, tokens):
        """ValueError unless tokens are (B, t) ids of the tokenizer."""
        if tokens.dim() != 2 or tokens.size(1) < 1:
            raise ValueError(f'tokens {tuple(tokens.shape)}: (B, t) is needed, t of 1 or more')
        if not tokens.is_cuda and not 0 <= tokens.min() <= tokens.max() < self.config.vocab_size:       # on a GPU it would wait
            raise ValueError(f'ids {tokens.min()} to {tokens.max()}: the tokenizer has 0 to {self.config.vocab_size - 1}')

    def forward(self, batch, progress):
        """
        The training loss of one micro-batch; in eval mode the language model's loss.

        batch      tokens, targets, doc (B, T) int64 (targets -1: not predicted) and seed, from which all randomness comes
        progress   step / max_steps
        returns    loss () in nats per token, and a dict of what to log
        """
        config, (B, T), device = self.config, batch.tokens.shape, batch.tokens.device
        generator = torch.Generator(device).manual_seed(batch.seed)
        N, noise, masked = -(-T // (config.chunk_size - 1)), None, None
        if self.training and config.gumbel and config.groups:
            noise = gumbel((config.groups, B, N, N), generator, device)
        if self.training and config.encoder == 'tokens' and config.groups and config.mlm and progress < 0.5:
            masked = torch.rand(B, N * config.chunk_size, device=device, generator=generator) < config.mlm
            masked &= self.insert(batch.targets, -1, -1) >= 0               # no landmark, no padding
        f, chunks, found = self.encode(batch.tokens, batch.doc, noise, masked)
        n = (batch.targets >= 0).sum().clamp(min=1)
        loss, log = self.nll(f, batch.targets) / n, {}
        if found:
            w, idx = found[-1]
            back = torch.arange(w.size(1), device=device)[:, None] - idx    # (B, N, K) how many chunks ago
            some = (w > 0).any(2).sum().clamp(min=1)
            log = {'top_weight': w.detach().amax(2).sum() / some, 'chunks_back': (w.detach() * back).sum() / some}
        if masked is not None:                                              # §3.2: the encoder guesses what it was not shown
            log['lm_loss'] = loss.detach()
            ids = self.insert(batch.tokens, 0, 0)[masked]
            mlm = self.nll(chunks.flatten(1, 2)[masked], ids) / max(1, len(ids))
            log['mlm_loss'] = mlm.detach()
            loss = loss + mlm
        return loss, log

    @torch.no_grad()
    def log_probs(self, tokens):
        """
        log P(next token | the tokens so far). ValueError for anything but tokens (B, t) int64, any t >= 1; they are one document.
        returns (B, t, V) fp32, each row sums to one
        """
        self.check(tokens)
        return self.say(self.encode(tokens)[0])

    @torch.no_grad()
    def stream(self, tokens, state=None):
        """
        The same, piece by piece: tokens (B, t) come next in a text, any t >= 1; state is what the last call returned. It holds, per
        layer, the keys and values of the window; of the unfinished chunk what the encoder will read; of each finished chunk l_k, and
        its keys and values (with model.offload in the CPU's memory, pinned); and for each group the K chunks that are being read.
        A state is continued once (copy.deepcopy keeps one): ValueError the second time.
        returns log_probs (B, t, V) and the new state
        """
        config, parts = self.config, []
        self.check(tokens)
        S = config.chunk_size if config.groups else config.window + 1       # the base LM has pieces of a window, without landmarks
        old = state or SimpleNamespace(B=len(tokens), past=[None] * config.n_layer, chunk=None, n=0, landmarks=None, store=[],
                                       reading=[None] * max(1, config.groups))
        if old.past is None or old.B != len(tokens):
            raise ValueError('this state was continued before' if old.past is None else f'a state of {old.B} texts, tokens of {len(tokens)}')
        state, old.past = SimpleNamespace(**vars(old)), None                # the new one goes on with the same lists
        while tokens.size(1):
            held = 0 if state.chunk is None else state.chunk.size(1)
            now, tokens = tokens[:, :S - 1 - held], tokens[:, S - 1 - held:]
            full = config.groups and held + now.size(1) == S - 1            # then the landmark follows at once
            x = below = self.embedding(F.pad(now, (0, 1), value=self.landmark) if full else now)
            for i, block in enumerate(self.lower):
                x, state.past[i] = block(x, state.past[i])
            if config.groups:
                below = below if config.encoder == 'tokens' else x
                state.chunk = below if state.chunk is None else torch.cat([state.chunk, below], dim=1)      # (B, s, C)
            for g, group in enumerate(self.groups()):
                fetched = self.fetch(state, self.ask(g, x[:, -1:], state.n)) if full and state.n else None
                read = state.reading[g] and (lambda q: self.read(q, *state.reading[g]))
                for i, block in enumerate(group):
                    i += len(self.lower) + g * len(group)
                    x, state.past[i] = block(x, state.past[i], None if self.retriever == 'off' else read)
                if full:
                    state.reading[g] = fetched                              # the landmark itself still read what the chunk did
            if full:
                self.remember(state)
            f = self.norm(x)[:, :now.size(1)]
            parts.append(self.say(f))
        return torch.cat(parts, dim=1), state

    def remember(self, state):
        """Encodes the chunk that is complete, so that later ones find it."""
        chunk, k, v = self.encoder(state.chunk)                             # (B, 1, S, C), (B, S, H, D)
        if state.landmarks is None or state.n == state.landmarks.size(1):   # twice the room each time, so that all copies together are few
            room = chunk.new_zeros(chunk.size(0), max(16, state.n), chunk.size(3))
            state.landmarks = room if state.landmarks is None else torch.cat([state.landmarks, room], dim=1)
        state.landmarks[:, state.n] = chunk[:, 0, -1]
        kv = torch.stack([k, v])[:, :, :-1]                                 # (2, B, S - 1, H, D) the landmark's key takes no part
        if self.offload:
            kv = torch.empty_like(kv, device='cpu', pin_memory=kv.is_cuda).copy_(kv)
        state.store.append(kv)
        state.n, state.chunk = state.n + 1, None

    def fetch(self, state, h):
        """The chunks that h (B, 1, C) finds: w (B, K), and their keys and values (2, B, K, S - 1, H, D), on the model's device"""
        w, idx = self.retrieve(h, state.landmarks[:, :state.n], torch.ones(h.size(0), 1, state.n, dtype=torch.bool, device=h.device))
        fetch = lambda c, b: state.store[c][:, b].to(h.device, non_blocking=True)           # (2, S - 1, H, D)
        return w[:, 0], torch.stack([torch.stack([fetch(c, b) for c in found], dim=1) for b, found in enumerate(idx[:, 0].tolist())], dim=1)

    def read(self, q, w, kv):
        """Eq. 2 and 3 for the tokens of one chunk, as they come: q (B, t, H, D), w (B, K), kv (2, B, K, S - 1, H, D) -> (B, t, H, D)"""
        k, v = kv.transpose(3, 4).flatten(1, 2)                             # (B K, H, S - 1, D)
        if self.config.sink:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        o = softmax_attention(q.transpose(1, 2).repeat_interleave(w.size(1), dim=0), k, v)     # (B K, H, t, D)
        return torch.einsum('bk,bkhtd->bthd', w, fp32(o.unflatten(0, w.shape))).to(q)

    def multiply_adds(self):
        """Multiply-adds of a training step per token: what the definitions need, thrice for the way back."""
        c, C, S = self.config, self.config.n_embd, self.config.chunk_size
        inner = self.lower[0].mlp.proj.in_features
        N = -(-c.block_size // (S - 1)) if c.groups else 0
        P = N * S or c.block_size                                           # positions of a sequence
        W = min(c.window, P)
        mean = lambda W, n: (W * (W + 1) / 2 + (n - W) * W) / n if n > W else (n + 1) / 2       # of 1, 2, ..., W, W, ... W
        layer = 4 * C * C + 3 * C * inner
        macs = c.n_layer * (layer + 2 * C * mean(W, P))                     # the matrices, and attention's two products
        if c.groups:
            read = mean(c.n_neighbors, N - 2) * (N - 2) / N if N > 2 else 0         # chunks that a chunk reads; the first two read none
            macs += (len(self.encoder.blocks) * (layer + 2 * C * S) + 2 * C * C             # the chunk encoder, K and V
                     + c.n_layer // 2 * (2 * C * C + 2 * C * (S - 1) * read)            # GCA
                     + c.groups * C * N / S)                                # all pairs of landmarks
        return 3 * (macs * P / c.block_size + C * c.vocab_size)


# ----------------------------------------------------------------------------------------------------------------------
# a tour

def tour():
    """What goes in, what comes out, and what retrieval costs: time beside multiply-adds."""
    torch.manual_seed(0)
    config = DRTConfig()
    tokens = torch.randint(config.vocab_size, (config.micro_batch, config.block_size + 1))
    batch = SimpleNamespace(tokens=tokens[:, :-1], targets=tokens[:, 1:], doc=torch.zeros_like(tokens[:, 1:]), seed=0)
    model = DRT(config)
    f, chunks, found = model.encode(batch.tokens)
    count = lambda module: sum(p.numel() for p in module.parameters())
    print(f'DRT, {count(model):,} parameters, {count(model.encoder.blocks):,} of them in the encoder')
    (w, idx), = found
    print(f'tokens {tuple(tokens[:, 1:].shape)} -> chunks {tuple(chunks.shape)}, each of which reads others: weights, numbers {tuple(w.shape)}')
    print(f'chunk 9 reads {idx[0, 9].tolist()} with weights {[round(x, 3) for x in w[0, 9].tolist()]}')
    some = batch.tokens[:1, :100]
    log_probs, _ = model.stream(some)
    print(f'stream {tuple(log_probs.shape)}: {(log_probs - model.log_probs(some)).abs().max():.1e} from the full forward pass')
    loss, log = model(batch, 0)
    print(f'loss {loss:.4f} on random tokens (ln V = {math.log(config.vocab_size):.4f}), ' + ', '.join(f'{k} {v:.3f}' for k, v in log.items()))

    wide = config.window + config.n_neighbors * config.chunk_size // 2      # attends to as much
    sizes = {'base LM': dict(groups=0), f'base LM, window {wide}': dict(groups=0, window=wide), 'DRT x1': dict(), 'DRT x2': dict(groups=2)}
    print(f'\na training step against the base LM, {config.micro_batch} sequences of {config.block_size:,}, in turns')
    in_turns(sizes)
    print('\na training step by length of the sequences, as many tokens')
    in_turns({f'T = {T:,}': dict(block_size=T, micro_batch=8 * 992 // T) for T in (992, 1984, 3968, 7936)})


def in_turns(sizes):
    """Trains models on random tokens, one step each, again and again; prints their times and multiply-adds beside the first's."""
    runs = {}
    for name, change in sizes.items():
        config = DRTConfig(**change)
        tokens = torch.randint(config.vocab_size, (config.micro_batch, config.block_size + 1))
        batch = SimpleNamespace(tokens=tokens[:, :-1], targets=tokens[:, 1:], doc=torch.zeros_like(tokens[:, 1:]), seed=0)
        model = DRT(config)
        runs[name] = model, torch.optim.AdamW(model.parameters(), fused=True), batch, []
    for _ in range(8):
        for model, optimizer, batch, times in runs.values():
            start = time.perf_counter()
            model(batch, 1)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
    base, _, _, plain = next(iter(runs.values()))
    for name, (model, _, batch, times) in runs.items():
        ratios = sorted(y / x for x, y in zip(plain[1:], times[1:]))        # the first one warms up
        print(f'{name:20} time x {ratios[len(ratios) // 2]:.3f}, multiply-adds x {model.multiply_adds() / base.multiply_adds():.3f}   '
              f'({batch.tokens.numel() / min(times):,.0f} tokens/s)')


if __name__ == '__main__':
    tour()
