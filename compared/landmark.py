"""
Landmark Attention, a baseline of DRT: each position attends to its chunk and to the chunks of the
best landmarks.

    Amirkeivan Mohtashami and Martin Jaggi, "Landmark Attention: Random-Access Infinite Context
    Length for Transformers", NeurIPS 2023, arXiv:2305.16300;  DRT, Tables 1 to 3

It starts from the base LM of drt.py (groups 0), whose sliding window it replaces, and from DRT's
landmarks. All keys and values are kept. Scores (B, H, L, L) limit the length of a training
sequence.

Where this differs from the paper
    Scores have ALiBi; --positions rotary is the paper's.
    §3.2   A chunk that is farther than any in training moves nearer as a whole: its landmark is
           scored, and its tokens are read, at the farthest distance of training (paper: all
           chunks but the latest K are scored at one position, and what is read has positions just
           before the text). --no-limit-distance leaves distances as they are.
    §3.2   In evaluation the K best chunks and the tokens of a position's own chunk are all that is
           read (paper: the latest tokens, too). Of equal scores, rounded to 1 / 256, the latest
           chunk is read.
    As in DRT, chunks of other joined documents are not read. But a position reads all tokens of its
    own chunk up to itself, also those of another document; a chunk with tokens of two documents is
    read by its own positions only. DRT's flags of retrieval, except --n-neighbors, have no effect.

Letters as in drt.py

    $ python train.py --model landmark --n-layer 6 --block-size 248 --micro-batch 8
"""
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

import drt
from drt import DRT, MASKED, Block, DRTConfig, SelfAttention, fp32, product

UNLIMITED = 1_000_000_000


@dataclass
class LandmarkConfig(DRTConfig):
    groups: int = 0             # it has no grouped cross-attention: no other value
    window: int = UNLIMITED     # all positions are kept: no other value
    positions: Literal['alibi', 'rotary'] = 'alibi'     # a penalty by distance, or rotated q and k
    limit_distance: bool = True     # no landmark is farther than the farthest of training

    def __post_init__(self):
        super().__post_init__()
        if self.groups != 0:
            raise ValueError('groups are for --model drt: here no other value than 0')
        if self.window != UNLIMITED:
            raise ValueError('landmark attention has no window')
        slopes = DRTConfig.slope, drt.PRESETS['124m']['slope']          # of the presets
        if self.positions == 'rotary' and self.slope not in slopes:
            raise ValueError('slope is for positions alibi')


# DRT, Table 1 and App. A.1: K = 4; a sequence has 768 positions, here 12 chunks of 63 tokens and a
# landmark. Positions are those of the official code. A step has 704 sequences (paper: 2^19 tokens),
# which up to 32 GPUs can share
PRESETS = {
    'tiny': drt.PRESETS['tiny'],
    '124m': dict(drt.PRESETS['124m'], groups=0, window=UNLIMITED, n_neighbors=4, block_size=756,
                 micro_batch=22, positions='rotary', tokens_per_step=532_224)}


def rotate_at(x, p):
    """Rotary embeddings at any positions p (rotate in drt.py: at consecutive ones): each pair of
    numbers (x_2d, x_2d+1) is rotated by the angle p θ_d, θ_d = 10000^(-2d/D). The product of two
    vectors then depends on their distance alone.

    x (..., D), p (...) or what is broadcast to it -> (..., D)"""
    x = fp32(x)
    D = x.size(-1)
    theta = 10000 ** (-torch.arange(0, D, 2).to(x) / D)                 # (D/2,)
    angle = p[..., None] * theta                                        # (..., D/2)
    cos = angle.cos()
    sin = angle.sin()

    # the rotation of (a, b) is (a cos - b sin, a sin + b cos)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)                          # 2 x (..., D/2)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class LandmarkAttention(SelfAttention):
    """§3, the grouped softmax: one softmax over the tokens of a position's chunk, up to it, and the
    landmarks of earlier chunks. The weight w_k of a landmark is that of its chunk, whose tokens
    have a softmax of their own:

        o = Σ_{j in its chunk} w_j v_j + Σ_k w_k Σ_{j in chunk k} softmax_j(q · key_j / sqrt(D)) v_j

    k: in training, whose texts are short, all earlier chunks; in evaluation, however short the
    text, the K of largest scores, of each position and head."""
    def forward(self, x, past, docs=None):
        """x (B, L, C); past: 2 x (B, s - L, H, D), keys and values of all positions before, None at
        the beginning of a text; docs (B, L): documents of a training sequence, None: one document
        -> (B, L, C), keys and values of all positions"""
        q, k, v = self.qkv(x).unflatten(2, (3, self.config.n_head, -1)).unbind(2)  # (B, L, H, D)
        if past is not None:
            past_k, past_v = past
            k = torch.cat([past_k, k], 1)                               # (B, s, H, D)
            v = torch.cat([past_v, v], 1)
        q = q.transpose(1, 2) / q.size(3) ** 0.5                        # (B, H, L, D)
        r, chunk = self.score_chunks(q, k, docs)
        o = self.read_chunks(q, k, v, r, chunk)                         # (B, L, H, D)
        return self.proj(o.flatten(2)), (k, v)

    def score_chunks(self, q, k, docs):
        """Scores of the landmarks. That of a position's own chunk is inf: this chunk is always
        read, even if its landmark is still to come

        q (B, H, L, D), of the last positions of k (B, s, H, D), docs (B, L) or None
        -> r (B, H, L, n) and the numbers of the n chunks that are read: in training (n,), of all;
        else (B, H, L, n)"""
        S = self.config.chunk_size
        positions = torch.arange(k.size(1), device=q.device)
        i = positions[k.size(1) - q.size(2):, None]                     # (L, 1)
        landmarks = k[:, S - 1::S].transpose(1, 2)
        # the last of the M chunks is unfinished, or has no position yet, so it has no landmark:
        # zeros, whose score is replaced below
        landmarks = F.pad(landmarks, (0, 0, 0, 1))                      # (B, H, M, D)
        chunk = positions[:landmarks.size(2)]                           # (M,)
        age = i - (S * chunk + S - 1)                                   # (L, M)
        excess = self.excess(age)
        if self.config.positions == 'rotary':
            near = product(rotate_at(q, i[:, 0]), rotate_at(landmarks, S * chunk + S - 1).mT)
            farthest = age.new_full((), self.farthest)      # as if a landmark were at position 0
            far = product(rotate_at(q, farthest), landmarks.mT)
            r = torch.where(excess > 0, far, near)                      # (B, H, L, M)
        else:
            r = product(q, landmarks.mT) - self.slopes(q.device) * (age - excess)
        r = r.masked_fill(chunk > i // S, MASKED)
        if docs is not None:
            r = r.masked_fill(~self.same_document(docs), MASKED)
        r = r.masked_fill(chunk == i // S, math.inf)
        if self.training:
            return r, chunk

        # the K best and the position's own; of equal scores, as of chunks that recur farther away
        # than any in training, the latest
        n = 1 + self.config.n_neighbors
        chunk = (256 * r).round().argsort(stable=True)[..., -n:]        # (B, H, L, n)
        return r.gather(3, chunk), chunk

    @property
    def farthest(self):
        """The distance of the last position of a training sequence to the first landmark"""
        S = self.config.chunk_size
        T = self.config.block_size
        return max(0, T + T // (S - 1) - S)

    def excess(self, age):
        """By how many positions landmarks at these distances count as nearer than they are"""
        return (age - self.farthest).clamp(min=0) * self.config.limit_distance

    def same_document(self, docs):
        """Is all of chunk k in the document of position i? False for the last chunk, which has no
        landmark yet. docs (B, L) -> (B, 1, L, M)"""
        S = self.config.chunk_size
        last = F.pad(docs[:, S - 1::S], (0, 1), value=-1)               # (B, M) of landmarks
        first = F.pad(docs[:, ::S], (0, 1), value=-1)                   # of all chunks
        first = first[:, :last.size(1)]
        is_whole = (first == last)[:, None, None]                       # (B, 1, 1, M)
        return is_whole & (last[:, None, None] == docs[:, None, :, None])

    def tokens_of_chunks(self, x, chunk):
        """The S - 1 tokens of chunks: x (B, s, H, D), chunk as in score_chunks; zeros where the
        last chunk has fewer -> (B, H, 1 in training, else L, n, S - 1, D)"""
        S = self.config.chunk_size
        missing = S - x.size(1) % S                                     # 1 or more
        x = F.pad(x, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, S))    # (B, M, S, H, D)
        x = x[:, :, :S - 1].permute(0, 3, 1, 2, 4)                      # (B, H, M, S - 1, D)
        if self.training:
            return x[:, :, None]

        # rows of a table of all chunks of all heads: faster than x[b, h, chunk]
        B, H, M = x.shape[:3]
        first = M * torch.arange(B * H, device=x.device).view(B, H, 1, 1)
        rows = x.reshape(B * H * M, -1).index_select(0, (first + chunk).flatten())
        return rows.view(*chunk.shape, *x.shape[3:])

    def read_chunks(self, q, k, v, r, chunk):
        """The formula above: q (B, H, L, D), of the last positions of k and v (B, s, H, D); r and
        chunk of score_chunks -> o (B, L, H, D)"""
        S = self.config.chunk_size
        positions = torch.arange(k.size(1), device=q.device)
        i = positions[k.size(1) - q.size(2):, None]                     # (L, 1)

        # the tokens j of these chunks. The last chunk can have fewer than S - 1: the rest are of
        # later positions than i, and masked
        token = torch.arange(S - 1, device=q.device)                    # its number in a chunk
        j = S * chunk[..., None] + token                                # (..., n, S - 1)
        age = i[..., None] - j
        k = fp32(k)
        if self.config.positions == 'rotary':
            k = rotate_at(k, positions[:, None])                        # (B, s, H, D)
        k = self.tokens_of_chunks(k, chunk)                             # (..., n, S - 1, D)
        v = self.tokens_of_chunks(v, chunk)

        # their scores z (B, H, L, n, S - 1), in fp32. Moving a far chunk nearer changes rotary
        # scores only: with ALiBi it would add the same number to all scores of a chunk, which
        # changes no softmax over its tokens
        with torch.autocast(q.device.type, enabled=False):
            q = fp32(q)
            if self.config.positions == 'rotary':
                excess = self.excess(i - (S * chunk + S - 1))           # (..., n)
                q = rotate_at(q[:, :, :, None], i - excess)             # (B, H, L, n, D)
                z = torch.einsum('bhind, bhinjd -> bhinj', q, k)
            else:
                z = torch.einsum('bhid, bhinjd -> bhinj', q, k)
                z = z - self.slopes(q.device)[..., None] * age
        z = z.masked_fill(age < 0, MASKED)

        # one softmax of landmarks and of tokens in its chunk: log Σ exp z is the score of a chunk
        r = torch.where(r < math.inf, r, z.logsumexp(4))
        o = torch.einsum('bhinj, bhinjd -> bhind', z.softmax(4), v)     # of each chunk
        return torch.einsum('bhin, bhind -> bihd', r.softmax(3), o)     # (B, L, H, D)


class LandmarkBlock(Block):
    """A Transformer layer with LandmarkAttention"""
    def __init__(self, config):
        super().__init__(config)
        self.attention = LandmarkAttention(config)

    def forward(self, x, past, docs=None, kernel='auto'):
        """See LandmarkAttention -> x (B, L, C), the past of the next piece. In a stream docs is
        None: there run_layers passes Retrieved, here always None. No kernel is used."""
        y, past = self.attention(self.norm1(x), past, docs)
        x = x + y
        return x + self.mlp(self.norm2(x)), past


class Landmark(DRT):
    """A language model with landmarks, all layers of which have LandmarkAttention"""
    has_landmarks = True

    def make_layers(self, config):
        n_lower = config.n_layer - config.n_upper
        lower = nn.ModuleList(LandmarkBlock(config) for _ in range(n_lower))
        upper = nn.ModuleList(LandmarkBlock(config) for _ in range(config.n_upper))
        return lower, upper

    def encode_batch(self, ids, docs, encoder_ids):
        """Whole sequences from their beginning: ids, docs (B, L) -> f (B, L, C); there are no
        encoded chunks and no choices of groups"""
        x = self.embedding(ids)
        for block in (*self.lower, *self.upper):
            x, _ = block(x, None, docs)
        return self.norm(x), None, []
