"""
The Block-Recurrent Transformer, a baseline of RPT and DRT: one layer has states that each block of
tokens updates.

    DeLesley Hutchins, Imanol Schlag, Yuhuai Wu, Ethan Dyer and Behnam Neyshabur, "Block-Recurrent
    Transformers", NeurIPS 2022, arXiv:2203.07852;  RPT, §5 and Table 2

It starts from the Transformer-XL of rpt.py (retriever none). One upper layer also has states:
vectors that the tokens of a block attend to, and that the block then updates.

Where this differs from the paper (of which this is the configuration "skip" with a fixed gate)
    The layer is the middle one of the upper half: of twelve layers the tenth, as in the paper; of
    four, the default here, the last.
    Blocks have half a window (paper: a window).
    If a document begins in a block, the tokens of the block read the initial states, and so do
    those of the next block.
    In training, each sequence begins with the initial states and an empty window (official code:
    both continue from one training step to the next).
    The learned vectors that tell the states apart are also the initial states (official code: two
    sets). They and the gate's parameter are drawn with std 1 (official code: initial states and
    gate with 0.1).
    Tokens have other keys and values for the states than for the window (paper: the same). States
    attend to the tokens of the block (official code: also to those of the block before). Keys and
    queries have no norm (official code: length 1, and a learned scale).

Letters as in rpt.py; s the n_states vectors

    $ python train.py --model block_recurrent
"""
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

import rpt
from rpt import (RPT, Block, Linear, RMSNorm, RPTConfig, UpperInputs, begins_document,
                 check_positive, softmax_attention)


@dataclass
class BlockRecurrentConfig(RPTConfig):
    retriever: Literal['none'] = 'none'     # no chunks are retrieved
    chunk_size: int = 64                    # half a window: a chunk is a block of self-attention
    n_states: int = 128                     # vectors of the state (ours; paper: 512)

    def __post_init__(self):
        check_positive(self, 'n_states')
        if self.chunk_size != self.window // 2:
            raise ValueError(f'chunk_size {self.chunk_size} must be half of window {self.window}: '
                             'change one of them')
        super().__post_init__()


# the sizes of RPT (RPT, §5.1: the defaults of the official code, whose window is 512)
PRESETS = {'tiny': {}, 'paper': dict(rpt.PRESETS['paper'], chunk_size=1024, n_states=512)}


class StateBlock(Block):
    """A Transformer layer with states s (§3). The tokens of a block attend to the window and, apart
    from it, to s. Then s becomes

        g s + (1 - g) (W [s attends to s, s attends to the tokens of the block] + b)

    with g = σ of a parameter, W and b learned; [ , ] joins the two. Each state has a learned
    vector, which is also its initial value. Keys, values and queries of s are computed from norm(s)
    + these vectors: without them states that are once equal would remain equal, because they have
    the same weights. The tokens of a block read s as it is before the block."""
    def __init__(self, config):
        super().__init__(config)
        C = config.n_embd
        self.initial = nn.Parameter(torch.randn(1, config.n_states, C))
        self.norm = RMSNorm(C)
        self.states = Linear(C, 4 * C)                      # keys, values, two queries of s
        self.tokens = Linear(C, 3 * C)                      # keys, values, queries of tokens
        self.state_proj = Linear(C, C)
        self.mix = nn.Linear(2 * C, C)                      # W, b
        self.gate = nn.Parameter(torch.randn(C))

    def forward(self, x, past, begins):
        """x (B, t, C); past: that of SelfAttention and s (B, n_states, C), None at the beginning of
        a text; begins (B, t), see begins_document -> (B, t, C), the past of the next piece"""
        past, s = past or (None, self.initial)
        z = self.norm1(x)
        y, past = self.attention(z, past)
        read, s = self.read_states(z, s, begins)
        x = x + self.dropout(y + self.state_proj(read))
        return x + self.dropout(self.mlp(self.norm2(x))), (past, s)

    def read_states(self, z, s, begins):
        """z (B, t, C); s (B, n_states, C), at the beginning of a text (1, n_states, C); begins
        (B, t) -> what the tokens read of the states (B, t, C), the new s, updated by each whole
        block"""
        H, block = self.attention.n_head, self.attention.block
        of_tokens = self.tokens(z).unflatten(2, (3, H, -1))                 # (B, t, 3, H, D)
        reads = []
        for of_block, begins_in_block in zip(of_tokens.split(block, 1), begins.split(block, 1)):
            # a document does not read the states of another one
            continues = ~begins_in_block.any(1)[:, None, None]              # (B, 1, 1)
            s = s.where(continues, self.initial)

            # the tokens attend to the states
            of_states = self.states(self.norm(s) + self.initial)            # (B, n_states, 4C)
            k, v, q, q_for_tokens = of_states.unflatten(2, (4, H, -1)).unbind(2)
            k_tokens, v_tokens, q_tokens = of_block.unbind(2)               # (B, block, H, D)
            reads.append(softmax_attention(q_tokens, k, v))

            # a whole block updates the states
            if of_block.size(1) == block:
                from_states = softmax_attention(q, k, v)                    # (B, n_states, H, D)
                from_tokens = softmax_attention(q_for_tokens, k_tokens, v_tokens)
                both = torch.cat([from_states, from_tokens], 3)             # (B, n_states, H, 2D)
                new = self.mix(both.flatten(2))
                g = self.gate.sigmoid()
                s = g * s + (1 - g) * new                                   # (B, n_states, C)
                s = s.where(continues, self.initial)
        return torch.cat(reads, 1).flatten(2), s


class BlockRecurrent(RPT):
    """Transformer-XL, one upper layer of which has states. What is overridden: see RPT"""
    def make_layers(self, config):
        lower, upper = super().make_layers(config)
        upper[len(upper) // 2] = StateBlock(config)
        return lower, upper

    def upper_inputs(self, x, tokens, doc, forced, memory):
        """Upper layers get `begins`, see begins_document."""
        return UpperInputs(begins_document(doc), memory, s_q=None)
