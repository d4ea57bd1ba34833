"""
Griffin, a baseline of RPT: a sliding-window language model with linear recurrent layers.

    Soham De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models", 2024, arXiv:2402.19427;  RPT, §5.1 and Table 2

It starts from the Transformer-XL of rpt.py (retriever none). As in RPT's comparison (§5.1),
recurrent layers come after all others: there 5 after 12 layers, with a state of 2,048 channels for
C = 1,024, and convolutions over 3 tokens. A recurrent layer keeps a vector h of the whole past.

Where this differs from the paper
    The layers are those of RPT, §5.1 (paper: two recurrent ones, one with attention, and so on;
    convolutions over 4 tokens).
    §2.3   The recurrent layers have no MLP.
    §2.4   Initially, for r_t = 1, a_t is 0.9 to 0.999, as in the paper, with log(1 - a_t) evenly
           spaced (paper: a_t uniform; official code: a = exp(-softplus(Λ)) is 0.9 to 0.999 with a²
           uniform, so a_t = a⁸ is 0.43 to 0.992).
    §2.4   Λ is as in App. A and the official code; by a = σ(Λ) of §2.4 it has the other sign.
    §2.4   At the first token h = sqrt(1 - a_t²) i_t u_t, by the formula (official code: i_t u_t).
    h does not continue into another joined document; self-attention and the convolution do
    (official code: neither does).

Letters as in rpt.py, except R = 2C, the channels of h

    $ python train.py --model griffin
"""
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

import rpt
from rpt import (RPT, Block, RMSNorm, RPTConfig, UpperInputs, begins_document, check_positive,
                 fp32)


@dataclass
class GriffinConfig(RPTConfig):
    retriever: Literal['none'] = 'none'     # nothing is retrieved
    n_recurrent: int = 1                    # recurrent layers, after all others (RPT, §5.1: 5)

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, 'n_recurrent')


PRESETS = {'tiny': {}, 'paper': dict(rpt.PRESETS['paper'], n_recurrent=5)}


def scan(a, b):
    """h_t = a_t h_{t-1} + b_t with h_{-1} = 0, in log2 T steps. Before the step of n = 1, 2, 4, ...
    b_t has the terms of the last n tokens, and a_t is the product of theirs.

    a, b (..., T) -> (..., T)"""
    n = 1
    while n < b.size(-1):
        b = b + a * F.pad(b, (n, -n))
        a = a * F.pad(a, (n, -n))
        n *= 2
    return b


class RecurrentLayer(nn.Module):
    """Griffin's recurrent block (§2.3, §2.4). With z = norm(x), u = conv(W_u z):

        y   = x + W (gelu(W_y z) h)
        h_t = a_t h_{t-1} + sqrt(1 - a_t²) i_t u_t
        a_t = exp(-8 r_t softplus(Λ)),   r_t = σ(W_r u_t + b_r),   i_t = σ(W_i u_t + b_i)

    Λ is a learned vector (R,). r forgets: where it is 0, h is kept. i admits the input. With
    sqrt(1 - a_t²) the variance of h remains 1, if the inputs are independent with variance 1. a_t
    and i_t depend on the input, not on h, so the recurrence is linear in h, and `scan` computes all
    h_t at once.

    Biases of W, W_y and W_u are not shown. W_r and W_i are block-diagonal, with a block for each
    head. Their rows are interleaved in one matrix: r_0, i_0, r_1, i_1, ... of the R channels."""
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        R = 2 * C
        self.m = config.chunk_size
        self.norm = RMSNorm(C)
        self.inputs = nn.Linear(C, 2 * R)                                   # W_y, W_u
        self.conv = nn.Conv1d(R, R, 3, groups=R)
        self.gates = nn.Conv1d(R, 2 * R, 1, groups=config.n_head)           # W_r and W_i, b_r, b_i
        self.decay = nn.Parameter(torch.linspace(-4.3, -9, R))              # Λ
        self.proj = nn.Linear(R, C)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, past, begins):
        """x (B, t, C); past: the last two inputs of conv (B, R, 2) and h (B, R, 1), None at the
        beginning of a text; begins (B, t), see begins_document -> y (B, t, C), the past of the next
        piece"""
        branch, inputs = self.inputs(self.norm(x)).mT.chunk(2, 1)           # W_y z, W_u z (B, R, t)
        if past is None:
            zeros = inputs.new_zeros(*inputs.shape[:2], 2)                  # (B, R, 2)
            past = zeros, zeros[..., :1]
        past_inputs, past_h = past
        inputs = torch.cat([past_inputs, inputs], 2)                        # (B, R, 2 + t)
        u = self.conv(inputs)                                               # (B, R, t)

        # a_t, and b_t = sqrt(1 - a_t²) i_t u_t, in fp32; with a clamp, because the derivative of
        # sqrt at 0 is infinite
        gates = fp32(self.gates(u)).sigmoid()                               # (B, 2R, t) interleaved
        r, i = gates.unflatten(1, (-1, 2)).unbind(2)                        # 2 x (B, R, t)
        a = torch.exp(-8 * r * F.softplus(self.decay)[:, None])
        b = (1 - a * a).clamp(min=1e-6).sqrt() * i * u

        # where a document begins, a_t = 0, so h of the document before is lost. In front of the
        # piece is a step with a = 0 and b = h of the past, so h after it is that of the past
        a = F.pad(a.masked_fill(begins[:, None], 0), (1, 0))
        h = scan(a, torch.cat([past_h, b], 2))                              # (B, R, 1 + t)
        added = self.proj((F.gelu(branch) * h[..., 1:]).mT)                 # (B, t, C)

        # the next piece begins after the last whole chunk
        end = x.size(1) // self.m * self.m
        return x + self.dropout(added), (inputs[..., end:end + 2], h[..., end:end + 1])


COMPILED = (Block, RecurrentLayer)


class Griffin(RPT):
    """Transformer-XL, then recurrent layers. What is overridden: see RPT"""
    def make_layers(self, config):
        lower, upper = super().make_layers(config)
        upper.extend(RecurrentLayer(config) for _ in range(config.n_recurrent))
        return lower, upper

    def upper_inputs(self, x, tokens, doc, forced, memory):
        """Upper layers get `begins`, see begins_document. Those with self-attention ignore it."""
        return UpperInputs(begins_document(doc), memory, s_q=None)
