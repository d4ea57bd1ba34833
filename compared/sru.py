"""
SRU++: recurrent layers with attention; TRIME trains them with memories, too.

    Tao Lei, "When Attention Meets Fast Recurrence: Training Language Models with Reduced Compute",
    EMNLP 2021, arXiv:2102.12459;  TRIME, Table 4 and App. E

It starts from trime.py, whose Transformer layers it replaces; any of TRIME's memories can be used.
A layer has causal attention without positions, whose output is the input of a recurrence over the
tokens.

Where this differs from the paper
    A segment begins with the state 0 and without the keys of the one before (TRIME, App. E: with
    both), because all segments of a micro-batch are encoded in parallel. So long memory is
    that of trime.py: m segments, with gradients (App. E: the segment before, without). At test time
    each window begins with the state 0, too (official code: the state of the text so far).
    Attention has one head. Ours: a bias for u, v_f = v_r = 0 at first, and g = norm(y).
    Norms are RMSNorm (official code: LayerNorm); one more precedes the output, whose weights are
    the embedding's (official code: no such norm, weights of its own). Dropout is on embeddings and
    before W_o (official code: also on attention weights, c and the output).
    The loop over tokens is in plain PyTorch, so it is slow (official code: a CUDA kernel).

Letters as in trime.py, except d, the width of attention

    $ python train.py --model sru --n-embd 304 --n-layer 4 --lr 4e-3
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trime import TRIME, Linear, RMSNorm, TRIMEConfig, append, fp32


@dataclass
class SRUConfig(TRIMEConfig):
    n_head: int = 1             # attention heads: no other value (official code: 1 or 2)

    def __post_init__(self):
        super().__post_init__()
        if self.n_head != 1:
            raise ValueError(f'n_head {self.n_head}: the attention of SRU++ has one head here')
        if self.n_inner:
            raise ValueError(f'n_inner {self.n_inner}: SRU++ has no MLP, so it is 0')


# From TRIME: L = 512 (Table 4, also 2,048), 400K steps and batches of 16 segments (App. E). From
# SRU++'s official code for enwik8: n_layer, dropout, lr, warmup, weight_decay and beta2. Its
# optimizer is RAdam, its base model has 108M parameters. n_embd is ours: it makes 42M parameters as
# in TRIME, Table 4. The long memory of App. E has two segments: --memory long --n-consecutive 2
PRESETS = {
    'tiny': {},
    'enwik8': dict(
        data='enwik8', tokenizer='bytes', vocab_size=257, block_size=512, micro_batch=4,
        n_layer=10, n_head=1, n_embd=1920, dropout=0.22, same_document=False,
        tokens_per_step=8_192, max_steps=400_000, optimizer='adamw', lr=3e-4, warmup=0.04,
        weight_decay=0.1, beta2=0.999, eval_every=2000)}
COMPILED = ()               # its loop over tokens would be unrolled


class SRUBlock(nn.Module):
    """A layer of SRU++ (§2): causal attention of one head, without positions, computes the inputs
    of a recurrence over the tokens, in which all is elementwise:

        q = W_q x    k, v = W_k q, W_v q    u, f, r = W_o norm(q + α attention(q, k, v)) + b
        c_t = f'_t c_{t-1} + (1 - f'_t) u_t         f'_t = σ(f_t + v_f c_{t-1})
        y_t = r'_t c_t + (1 - r'_t) x_t             r'_t = σ(r_t + v_r c_{t-1})

    v_f and v_r are learned vectors (C,). No matrix multiplies c, so the products with matrices are
    those of all tokens at once, and only the elementwise part is a loop over the tokens. α is a
    scalar, at first 0, with which a layer begins without attention; b is 0, of r -2 (official
    code)."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        d = max(1, C // 4)                          # width of attention (paper: C 3,072, d 768)
        self.query = Linear(C, d)                                   # W_q
        self.kv = Linear(d, 2 * d)                                  # W_k, W_v
        self.alpha = nn.Parameter(torch.zeros(1))
        self.norm1 = RMSNorm(d)
        self.out = nn.Linear(d, 3 * C)                              # W_o, b
        self.v_f = nn.Parameter(torch.zeros(C))
        self.v_r = nn.Parameter(torch.zeros(C))
        self.norm2 = RMSNorm(C)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.zeros_(self.out.bias)
        nn.init.constant_(self.out.bias[2 * C:], -2)

    def forward(self, x, past):
        """x (B, t, C); past: keys and values 2 x (B, s - t, d) and c (B, C) of the tokens before,
        None at the beginning of a segment -> y (B, t, C); norm(y), g in the last layer; the past
        with these tokens"""
        if past is None:
            no_keys = self.query(x[:, :0])
            past = no_keys, no_keys, x.new_zeros(len(x), x.size(2))
        past_k, past_v, c = past

        # attention to the tokens so far
        q = self.query(x)                                           # (B, t, d)
        k, v = self.kv(q).chunk(2, 2)
        k = append(past_k, k)                                       # (B, s, d)
        v = append(past_v, v)
        t = q.size(1)
        s = k.size(1)
        mask = q.new_full((t, s), -math.inf).triu(s - t + 1)
        # with an axis of one head: without it scaled_dot_product_attention keeps the scores (t, s)
        heads = [y[:, None] for y in (q, k, v)]
        a = F.scaled_dot_product_attention(*heads, mask)[:, 0]
        z = self.norm1(q + self.alpha * a)
        u, f, r = fp32(self.out(self.dropout(z))).chunk(3, 2)       # 3 x (B, t, C)

        # the recurrence; lerp(a, b, w) is a + w (b - a)
        outputs = [x[:, :0]]                                        # x can be without tokens
        steps = zip(*(y.unbind(1) for y in (x, u, f, r)))           # of (B, C)
        for x_t, u_t, f_t, r_t in steps:
            reset = (r_t + self.v_r * c).sigmoid()                  # r'_t
            forget = (f_t + self.v_f * c).sigmoid()                 # f'_t
            c = u_t.lerp(c, forget)
            outputs.append(x_t.lerp(c, reset)[:, None])
        y = torch.cat(outputs, 1)
        return y, self.norm2(y), (k.detach(), v.detach(), c.detach())


class SRU(TRIME):
    """TRIME with recurrent layers"""
    def make_layers(self, config):
        layers = nn.ModuleList(SRUBlock(config) for _ in range(config.n_layer))
        for layer in layers[:-1]:
            layer.norm2 = nn.Identity()                             # g is of the last layer alone
        return layers
