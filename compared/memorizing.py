"""
The Memorizing Transformer, a baseline of RPT: attention to the nearest of all earlier tokens.

    Yuhuai Wu, Markus N. Rabe, DeLesley Hutchins and Christian Szegedy, "Memorizing Transformers",
    ICLR 2022, arXiv:2203.08913;  RPT, §5 and Table 2

It starts from the Transformer-XL of rpt.py (retriever none). One upper layer has a memory: keys and
values of tokens that have left the window. In this layer each head of a token also attends to a few
tokens of the memory, those whose keys are most similar to its query.

Where this differs from the paper
    §3.1   For the memory, keys and queries have length 1, and a learned scale multiplies their
           products (paper: for the window, too). In the window the layer has rotary embeddings
           (official code: no positions).
    §3.1   In training, the memory has earlier tokens of the sequence, by the current weights
           (paper: tokens of earlier steps of the document, by the weights of those steps, and none
           of the sequence itself). A token reads the memory of its own document only; its window
           can have tokens of another joined one.
    §3.1   The memory begins where the window ends, and g is 0 while it is empty (official code:
           tokens of the block before are in both; g is σ(b) always).
    §3.3   The search is exact (paper: approximate).
    Products with the scale are rounded to 1/256 before the nearest are chosen, so a token that
    recurs with all its context is nearly always a tie in a stream, too; of ties the earliest are
    read. A small scale makes more of them ties.
    §4     The layer is the middle one of the upper half: of twelve layers the tenth (paper: the
           ninth), of six the fifth, of four the last.
    By default (--shift-values, ours) a token of the memory has the value of the next one, so what
    followed it can be copied. The query is then the token's own key, which is similar to the keys
    of tokens in similar contexts.

Letters as in rpt.py; i a token that reads, j a token of the memory

    $ python train.py --model memorizing --n-layer 6
"""
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

import rpt
from rpt import (RPT, Block, RPTConfig, SelfAttention, UpperInputs, attend, begins_document,
                 check_positive, product, rotate)


@dataclass
class MemorizingConfig(RPTConfig):
    retriever: Literal['none'] = 'none'     # no chunks are retrieved
    chunk_size: int = 64                    # half a window: a chunk is a block of self-attention
    memory_size: int = 32_768   # tokens; in training fewer, a sequence's (RPT: 65K; paper: 262K)
    n_nearest: int = 32         # tokens that a head reads (paper: 32; official code: 128)

    def __post_init__(self):
        check_positive(self, 'memory_size n_nearest')
        if self.chunk_size != self.window // 2:
            raise ValueError(f'chunk_size {self.chunk_size} must be half of window {self.window}: '
                             'change one of them')
        super().__post_init__()


# the sizes of RPT (RPT, §5.1: the defaults of the official code, whose window is 512)
PRESETS = {'tiny': {}, 'paper': dict(rpt.PRESETS['paper'], chunk_size=1024, memory_size=65_536,
                                     n_nearest=128)}


def nearest(scores, n_nearest):
    """Which of scores (..., n) are the n_nearest highest, the first of equal ones -> (..., n) bool

    scores [1, 2, 1, 1, 0], n_nearest = 3: True, True, True, False, False"""
    # the scores of a token that recurs with its context differ by errors of rounding, which depend
    # on the pieces in which a text is read. Rounded to 1 / 256 they are nearly always equal
    scores = (256 * scores).round()
    n_nearest = min(scores.size(-1), n_nearest)
    lowest = scores.topk(n_nearest).values[..., -1:]                    # of the chosen ones

    # all scores above the lowest one, and the first of those that are equal to it
    above = scores > lowest
    equal = scores == lowest
    n_missing = n_nearest - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= n_missing))


class MemorizingAttention(SelfAttention):
    """§3.1 and §3.2: in each head, attention to the window and to the memory, mixed by a gate:

        y = (1 - g) y_window + g Σ_j softmax_j(scale · cosine(q_i, k_j)) v_j,   g = σ(b)

    With shift_values, token i has the query k_i, and token j the value v_{j+1}. The sum is over the
    n_nearest tokens j of the memory with the largest scale · cosine. b and scale are learned for
    each head. No gradient reaches k_j and v_j, as in the paper, where they are of earlier steps: so
    W_K and W_V learn from the window (W_K from the queries, too, if these are keys). g = 0 if the
    memory has no token."""
    def __init__(self, config):
        super().__init__(config)
        self.config = config
        self.gate = nn.Parameter(torch.zeros(config.n_head))                # b
        self.scale = nn.Parameter(torch.full((config.n_head,), 10.0))

    def forward(self, x, past, begins):
        """x (B, t, C)             the tokens of a piece
        past (B, s - t, 2, H, D)    keys and values of the tokens before it: of the memory, then of
                                    the last block; whole blocks; None at the beginning of a text
        begins (B, t)               see begins_document; None: the memory is not read
        returns                     (B, t, C), the past of the next piece"""
        block = self.block
        qkv = self.qkv(x).unflatten(2, (3, self.n_head, -1))                # (B, t, 3, H, D)
        q = qkv[:, :, 0]
        kv = qkv[:, :, 1:]
        if past is not None:
            kv = torch.cat([past, kv], 1)                                   # (B, s, 2, H, D)
        n_past = kv.size(1) - x.size(1)

        # the window, as in SelfAttention; its keys begin with the last block of the past
        start = max(0, n_past // block - 1) * block
        k, v = kv[:, start:].unbind(2)
        y = attend(rotate(q, n_past - start), rotate(k), v, block, 2 * block)   # (B, t, H, D)

        # the memory
        if begins is not None:
            memory, is_found = self.read_memory(q, kv, begins)
            g = self.gate.sigmoid()[:, None].where(is_found, 0)             # (B, t, H, 1)
            y = (1 - g) * y + g * memory

        # what the next piece needs: whole blocks, the last of which is the window's
        end = kv.size(1) // self.m * self.m
        start = max(0, (end - self.config.memory_size) // block - 1) * block
        return self.proj(y.flatten(2)), kv[:, start:end]

    def read_memory(self, q, kv, begins):
        """q (B, t, H, D) of the last t tokens, kv (B, s, 2, H, D), begins (B, t) -> Σ_j of the
        formula (B, t, H, D), and whether the memory has any token for i (B, t, 1, 1)"""
        block = self.block
        t = q.size(1)
        n_past = kv.size(1) - t

        # keys and values of all tokens, without a gradient
        k, v = kv.detach().unbind(2)                                        # 2 x (B, s, H, D)
        if self.config.shift_values:
            # the last token has the first one's value, but is in no memory
            q = kv[:, n_past:, 0]
            v = v.roll(-1, 1)
        q = self.scale[:, None] * F.normalize(q, dim=3)                     # (B, t, H, D)
        k = F.normalize(k, dim=3)

        # Documents are numbered 0, 1, ... in the piece; what is before it is of document 0: a
        # stream, which has past, is one document
        doc_i = begins.cumsum(1)                                            # (B, t)
        doc_j = F.pad(doc_i, (n_past, 0))                                   # (B, s)

        # one block of tokens i at a time. The memory is what comes before the block that precedes
        # them, so it is the same for all of them
        outputs, found = [], []
        for start in range(0, t, block):
            i = slice(start, start + block)
            end = max(0, n_past + start - block)
            j = slice(max(0, end - self.config.memory_size), end)
            mask = doc_i[:, None, i, None] == doc_j[:, None, None, j]       # (B, 1, block, n)
            q_i = q[:, i].transpose(1, 2)                                   # (B, H, block, D)
            scores = product(q_i, k[:, j].permute(0, 2, 3, 1))              # scale · cosine(q, k_j)
            scores = scores.masked_fill(~mask, -1e9)                        # (B, H, block, n)

            # softmax over the nearest
            is_near = nearest(scores, self.config.n_nearest)
            p = scores.masked_fill(~is_near, -math.inf).softmax(3)          # (B, H, block, n)
            outputs.append(torch.einsum('bhij, bjhd -> bihd', p, v[:, j]))
            found.append(mask.any(3).mT[..., None])                         # (B, block, 1, 1)
        return torch.cat(outputs, 1), torch.cat(found, 1)


class MemorizingBlock(Block):
    """A Transformer layer with MemorizingAttention"""
    def __init__(self, config):
        super().__init__(config)
        self.attention = MemorizingAttention(config)

    def forward(self, x, past, begins):
        """See MemorizingAttention -> x (B, t, C), the past of the next piece"""
        y, past = self.attention(self.norm1(x), past, begins)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm2(x))), past


class Memorizing(RPT):
    """Transformer-XL, one upper layer of which has a memory. What is overridden: see RPT"""
    def make_layers(self, config):
        lower, upper = super().make_layers(config)
        upper[len(upper) // 2] = MemorizingBlock(config)
        return lower, upper

    def upper_inputs(self, x, tokens, doc, forced, memory):
        """Upper layers get `begins`, see begins_document; None, in the way `off`, means that the
        memory is not read"""
        begins = None if self.way == 'off' else begins_document(doc)
        return UpperInputs(begins, memory, s_q=None)

    def ways(self):
        return ('on', 'off')
