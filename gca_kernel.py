"""
Grouped cross-attention, the attention of DRT: queries read a few chunks each, every chunk through a softmax of its own.

    Xiang Hu, Zhihao Teng, Jun Zhao, Wei Wu and Kewei Tu, "Efficient Length-Generalizable Attention via Causal
    Retrieval for Long-Context Language Modeling", ICML 2025, arXiv:2410.01651

A text is cut into chunks, and a retriever gave each of them K earlier chunks to read, with weights that sum to one. The
tokens of a chunk attend to each fetched chunk separately, and what they get is added up by those weights. So the
weights, the retriever's scores, are a factor of the output, and the loss of the language model trains the retriever.
Gathering the fetched chunks first would cost K copies of the keys and values. The kernels here read each chunk where it
lies, and the backward pass goes through an inverse index, from a chunk to those who fetched it, without atomics.

Where the paper is in this file
    Eq. 2        O = Σ_k w_k O_k                              gca_reference, the definition
    Eq. 3        O_k = softmax(Q K_kᵀ / sqrt(d)) V_k          gca_reference
    App. A.2     Algorithm 1, forward                         forward_kernel
    App. A.2     Algorithm 2, backward                        dq_kernel, dkdv_kernel

Letters used in the shape comments
    B sequences    T tokens    N chunks that ask    M chunks to read    S tokens of a chunk    K chunks each one reads
    H heads        D width of one head              Hkv heads of keys and values, each for G = H / Hkv of the H

Where we differ from the paper, and why
    Algorithm 1 has a softmax that runs over blocks of a chunk's keys; a whole chunk fits on the chip, so one pass is exact.
    (Its line 13 rescales by the inverse of the right factor.) Neither O_k nor the log-sum-exps are saved for later.
    Algorithm 2 has D = rowsum(dO ∘ O_k) from the saved O_k; rowsum(P ∘ dP) is the same and needs nothing saved.
    It accumulates dQ in memory; here dQ has a kernel of its own, as have dK and dV. Its line 17 overwrites dW.

    $ python gca_kernel.py           the errors against the definition in fp64, and speed and memory beside two others
"""
from __future__ import annotations      # tl.constexpr stands in signatures that are read before Triton is imported

import functools
import importlib.util
import os
import platform
import time
from importlib.metadata import version
from typing import NamedTuple

import torch
import torch.nn.functional as F

# ----------------------------------------------------------------------------------------------------------------------
# the definition

def fp32(x):
    """bf16 and fp16 become fp32; fp64 stays what it is, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gca_reference(q, k, v, w, idx, chunk, n_keys=None, sink=False, scale=None):
    """
    Grouped cross-attention as its formula says, with every fetched chunk gathered: slow, large, and to be believed.

        O_n = Σ_k w_nk softmax(Q_n K_cᵀ · scale) V_c,    c = idx_nk                         (DRT, Eq. 2 and 3)

    q, k, v, w, idx, chunk, n_keys, sink, scale: as `gca` has them. Returns o like q.
    """
    (B, T, H, D), N, Hkv = q.shape, idx.size(1), k.size(2)
    scale = D ** -0.5 if scale is None else scale
    q = q.reshape(B, N, chunk, H, D)
    k, v = (x.reshape(B, -1, chunk, Hkv, D)[:, :, :n_keys] for x in (k, v))                 # (B, M, n_keys, Hkv, D)
    k, v = (x.repeat_interleave(H // Hkv, dim=3) for x in (k, v))                           # (B, M, n_keys, H, D)

    used = idx >= 0                                                                         # (B, N, K)
    b, c = torch.arange(B, device=q.device)[:, None, None], idx.clamp(min=0).long()
    k, v = (x[b, c].masked_fill(~used[..., None, None, None], 0) for x in (k, v))           # (B, N, K, n_keys, H, D)
    s = torch.einsum('bnihd, bnkjhd -> bnkhij', fp32(q), fp32(k)) * scale                   # (B, N, K, H, S, n_keys)
    if sink:                                                                                # a key with score 0 and value 0
        s = F.pad(s, (0, 1))
    p = s.softmax(dim=-1)[..., :k.size(3)]
    o = torch.einsum('bnkhij, bnkjhd -> bnkihd', p, fp32(v))                                # (B, N, K, S, H, D) Eq. 3
    o = (w.masked_fill(~used, 0)[..., None, None, None] * o).sum(2)                         # (B, N, S, H, D) Eq. 2
    return o.masked_fill(~used.any(2)[..., None, None, None], 0).reshape(B, T, H, D).to(q.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# in PyTorch: blocks of rows, a row being one chunk that asks; what they fetch is gathered for one block at a time

SCORES = {'cpu': 2 ** 18, 'cuda': 2 ** 27}      # of one block: in cache on the one, enough for every core on the other

class Rows:
    """
    The rows of q, cut into blocks, and what each block reads. For each head of keys the G heads of queries lie one below
    the other and the keys of the K chunks side by side, so that scores and outputs of a block are one product each.

    Letters of its own: R rows of a block    L = n_keys, and one more for a sink: a key of zeros with a value of zeros
    """

    def __init__(self, q, k, v, w, idx, chunk, n_keys, sink, scale):
        self.n_keys, self.L, self.scale = n_keys, n_keys + sink, scale
        self.B, self.N, self.K = idx.shape
        self.M, self.S, self.H, self.Hkv, self.D = k.size(1) // chunk, chunk, q.size(2), k.size(2), q.size(3)
        self.k, self.v = self.by_chunk(k), self.by_chunk(v)
        self.empty = idx < 0                                                                # (B, N, K)
        self.w = fp32(w).masked_fill(self.empty, 0).flatten(0, 1)                           # (B N, K)
        first = torch.arange(self.B, device=q.device)[:, None, None] * self.M
        row = torch.where(self.empty, self.B * self.M, idx + first).view(-1, 1, self.K)     # (B N, 1, K)
        self.fetched = row * self.Hkv + torch.arange(self.Hkv, device=q.device)[:, None]    # (B N, Hkv, K) rows of self.k
        per_row = self.S * self.H * self.K * self.L
        self.blocks = range(0, self.B * self.N, max(1, SCORES.get(q.device.type, 2 ** 24) // per_row))

    def by_chunk(self, x):
        """(B, M S, Hkv, D) -> ((B M + 1) Hkv, L D); the last chunk is zeros, and empty slots read it."""
        x = x.reshape(self.B * self.M, self.S, self.Hkv, self.D)
        y = x.new_zeros(self.B * self.M + 1, self.Hkv, self.L, self.D)
        y[:-1, :, :self.n_keys].copy_(x[:, :self.n_keys].transpose(1, 2))
        return y.view(-1, self.L * self.D)

    def by_token(self, y, like):
        """The way back to the shape of `like`, with zeros at the keys that take no part."""
        x = like.new_zeros(self.B * self.M, self.S, self.Hkv, self.D)
        x[:, :self.n_keys].copy_(y.view(-1, self.Hkv, self.L, self.D)[:-1, :, :self.n_keys].transpose(1, 2))
        return x.view(like.shape)

    def fold(self, x, i):
        """(B N, S, H, D), the block at i -> (R Hkv, G S, D)"""
        x = x[i:i + self.blocks.step].unflatten(2, (self.Hkv, -1)).permute(0, 2, 3, 1, 4)   # (R, Hkv, G, S, D)
        return x.reshape(x.size(0) * self.Hkv, -1, self.D)

    def unfold(self, y, x, i):
        """The way back: writes the block at i of x."""
        x = x[i:i + self.blocks.step].unflatten(2, (self.Hkv, -1))                          # (R, S, Hkv, G, D)
        x.copy_(y.view(-1, self.Hkv, x.size(3), self.S, self.D).permute(0, 3, 1, 2, 4))

    def read(self, q, i):
        """The block at i: q (R Hkv, G S, D), k and v (R Hkv, K L, D), P (R H S, K, L), w to go with it, rows of self.k."""
        q, rows = self.fold(q, i), self.fetched[i:i + self.blocks.step].flatten()
        k, v = (x.index_select(0, rows).view(q.size(0), -1, self.D) for x in (self.k, self.v))
        s = fp32(q) @ fp32(k).mT                    # fp32: what bf16 leaves of a score of 20 moves e^s by 6%
        p = s.mul_(self.scale).view(-1, self.K, self.L).softmax(dim=-1)                     # Eq. 3, each chunk alone
        w = self.w[i:i + self.blocks.step].repeat_interleave(self.H * self.S, 0)[..., None] # (R H S, K, 1)
        return q, k, v, p, w, rows

    def hide_empty(self, x):
        """Exact zeros in the rows of x (B N, S, H, D) that read nothing, whatever their queries are."""
        return x.masked_fill_(self.empty.all(2).view(-1, 1, 1, 1), 0).view(self.B, self.N * self.S, self.H, self.D)


def torch_forward(q, k, v, w, idx, chunk, n_keys, sink, scale):
    """O = Σ_k w_k softmax(Q K_kᵀ · scale) V_k, where the product with [V_1; V_2; ...] is also the sum over the chunks"""
    rows = Rows(q, k, v, w, idx, chunk, n_keys, sink, scale)
    q = q.reshape(-1, chunk, *q.shape[2:])                                                  # (B N, S, H, D)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    for i in rows.blocks:
        qi, _, vi, p, wi, _ = rows.read(q, i)
        p = p.mul_(wi).to(v.dtype).view(*qi.shape[:2], -1)                                  # (R Hkv, G S, K L)
        rows.unfold(p @ vi, o, i)
    return rows.hide_empty(o)


def torch_backward(do, q, k, v, w, idx, chunk, n_keys, sink, scale):
    """
    With P the softmax of one chunk, dP = dO Vᵀ and δ = rowsum(P ∘ dP):

        dV = Σ w Pᵀ dO,    dS = w P ∘ (dP - δ) · scale,    dQ = Σ dS K,    dK = Σ dSᵀ Q,    dw = Σ_rows δ
    """
    rows = Rows(q, k, v, w, idx, chunk, n_keys, sink, scale)
    q, do = (x.reshape(-1, chunk, *x.shape[2:]) for x in (q, do))                           # (B N, S, H, D)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros_like(x, dtype=rows.w.dtype) for x in (rows.k, rows.v))            # fp32 sums
    dw = torch.empty_like(rows.w)
    for i in rows.blocks:
        (qi, ki, vi, p, wi, fetched), doi = rows.read(q, i), rows.fold(do, i)
        ds = (fp32(doi) @ fp32(vi).mT).view_as(p).mul_(p)                                   # (R H S, K, L) P ∘ dP
        delta = ds.sum(-1, keepdim=True)                                                    # (R H S, K, 1)
        dw[i:i + rows.blocks.step] = delta.view(-1, rows.H * rows.S, rows.K).sum(1)
        ds = ds.addcmul_(p, delta, value=-1).mul_(wi * scale).to(q.dtype).view(*qi.shape[:2], -1)
        p = p.mul_(wi).to(q.dtype).view_as(ds)                                              # (R Hkv, G S, K L)
        rows.unfold(ds @ ki, dq, i)
        dk.index_add_(0, fetched, (ds.mT @ qi).view(-1, dk.size(1)).to(dk.dtype))
        dv.index_add_(0, fetched, (p.mT @ doi).view(-1, dv.size(1)).to(dv.dtype))
    dw = dw.view(idx.shape).masked_fill_(rows.empty, 0).to(w.dtype)
    return rows.hide_empty(dq), rows.by_token(dk, k), rows.by_token(dv, v), dw


# ----------------------------------------------------------------------------------------------------------------------
# in Triton: one program, one tile. Plain functions here; `kernels` compiles them, and Triton is imported there

def forward_kernel(Q, K, V, W, IDX, O, H, N, TOPK, scale,
                   q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
                   S: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr,
                   G: tl.constexpr, SINK: tl.constexpr):
    """
    Grouped cross-attention, forward:  O = Σ_k w_k softmax(Q K_kᵀ · scale) V_k                (DRT, Eq. 2 and 3; Algorithm 1)

    Grid      (N, B H): one program owns the S queries of one chunk in one head; neighbors in n read much the same chunks
    Q         (B, N S, H, D)     any strides q_b, q_t, q_h of its first three axes
    K, V      (B, M S, Hkv, D)   the same; the program reads the chunks it needs where they lie
    W, IDX    (B, N, TOPK)       fp32 weights and int32 chunk numbers, -1 for an empty slot
    O         (B, N S, H, D)     contiguous
    On chip   q, k, v, acc: (S, COLS) each, COLS a power of two, D or more; an (S, S) tile of scores, KEYS columns used
    Saved     nothing; the backward pass computes the scores again
    Numerics  products in the input dtype with fp32 accumulation, softmax in fp32 and in powers of two
    """
    n, b, h = tl.program_id(0).to(tl.int64), (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows, cols, log2_scale = tl.arange(0, S), tl.arange(0, COLS), scale * 1.4426950408889634    # e^x = 2^(x log2 e)
    here = cols[None, :] < D                                                          # (1, COLS)
    q = tl.load(Q + b * q_b + n * S * q_t + h * q_h + rows[:, None] * q_t + cols[None, :], mask=here, other=0.0)
    K += b * k_b + h // G * k_h
    V += b * v_b + h // G * v_h
    acc = tl.zeros([S, COLS], dtype=tl.float32)
    any_chunk = tl.full([], -1, dtype=tl.int32)
    for slot in range(TOPK):
        c = tl.load(IDX + (b * N + n) * TOPK + slot)
        w = tl.load(W + (b * N + n) * TOPK + slot, mask=c >= 0, other=0.0)
        any_chunk = tl.maximum(any_chunk, c)
        used = (rows[:, None] < tl.where(c >= 0, KEYS, 0)) & (cols[None, :] < D)      # no branch on c: loads can be pipelined
        t = c.to(tl.int64) * S
        k = tl.load(K + t * k_t + rows[:, None] * k_t + cols[None, :], mask=used, other=0.0)          # (S, COLS)
        v = tl.load(V + t * v_t + rows[:, None] * v_t + cols[None, :], mask=used, other=0.0)          # (S, COLS)
        s = tl.dot(q, tl.trans(k), input_precision='ieee') * log2_scale                   # (S, S)
        if KEYS < S:
            s = tl.where(rows[None, :] < KEYS, s, float('-inf'))
        m = tl.max(s, axis=1)
        if SINK:
            m = tl.maximum(m, 0.0)                                                    # its score is one of the scores
        p = tl.exp2(s - m[:, None])
        l = tl.sum(p, axis=1)
        if SINK:
            l += tl.exp2(-m)
        p = p * (w / l)[:, None]                                                      # Eq. 2 and 3
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision='ieee')                   # (S, COLS)
    acc = tl.where(any_chunk >= 0, acc, 0.0)                                          # whatever q is
    out = ((b * N + n) * S * H + h) * D + rows[:, None] * (H * D) + cols[None, :]
    tl.store(O + out, acc.to(O.dtype.element_ty), mask=here)


def dq_kernel(Q, K, V, W, IDX, DO, DQ, DW, LSE, DELTA, H, N, TOPK, scale,
              q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
              S: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr,
              G: tl.constexpr, SINK: tl.constexpr):
    """
    Backward, first half:  dQ = scale Σ_k dS_k K_k,  dw_k = Σ_rows δ_k                        (DRT, Algorithm 2)
    with P_k the softmax of chunk k,  dP_k = dO V_kᵀ,  δ_k = rowsum(P_k ∘ dP_k),  dS_k = w_k P_k ∘ (dP_k - δ_k)

    Grid, Q, K, V, W, IDX as in forward_kernel; DO has Q's shape and strides do_b, do_t, do_h
    DQ          (B, N S, H, D)      contiguous
    DW          (B, H, N, TOPK)     fp32, one head's share of dw
    LSE, DELTA  (B, H, N, TOPK, S)  fp32, for dkdv_kernel: log2 of the softmax's denominator, and δ
    """
    n, b, h = tl.program_id(0).to(tl.int64), (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows, cols, log2_scale = tl.arange(0, S), tl.arange(0, COLS), scale * 1.4426950408889634    # e^x = 2^(x log2 e)
    here = cols[None, :] < D                                                          # (1, COLS)
    q = tl.load(Q + b * q_b + n * S * q_t + h * q_h + rows[:, None] * q_t + cols[None, :], mask=here, other=0.0)
    do = tl.load(DO + b * do_b + n * S * do_t + h * do_h + rows[:, None] * do_t + cols[None, :], mask=here, other=0.0)
    K += b * k_b + h // G * k_h
    V += b * v_b + h // G * v_h
    e = ((b * H + h) * N + n) * TOPK                                                  # this row's first slot in DW
    dq = tl.zeros([S, COLS], dtype=tl.float32)
    any_chunk = tl.full([], -1, dtype=tl.int32)
    for slot in range(TOPK):
        c = tl.load(IDX + (b * N + n) * TOPK + slot)
        w = tl.load(W + (b * N + n) * TOPK + slot, mask=c >= 0, other=0.0)
        any_chunk = tl.maximum(any_chunk, c)
        used = (rows[:, None] < tl.where(c >= 0, KEYS, 0)) & (cols[None, :] < D)
        t = c.to(tl.int64) * S
        k = tl.load(K + t * k_t + rows[:, None] * k_t + cols[None, :], mask=used, other=0.0)          # (S, COLS)
        v = tl.load(V + t * v_t + rows[:, None] * v_t + cols[None, :], mask=used, other=0.0)          # (S, COLS)
        s = tl.dot(q, tl.trans(k), input_precision='ieee') * log2_scale                   # (S, S)
        if KEYS < S:
            s = tl.where(rows[None, :] < KEYS, s, float('-inf'))
        m = tl.max(s, axis=1)
        if SINK:
            m = tl.maximum(m, 0.0)
        p = tl.exp2(s - m[:, None])
        l = tl.sum(p, axis=1)
        if SINK:
            l += tl.exp2(-m)
        p = p / l[:, None]                                                            # (S, S)
        dp = tl.dot(do, tl.trans(v), input_precision='ieee')                          # (S, S)
        delta = tl.sum(p * dp, axis=1)                                                # (S,) all keys of the chunk are here
        ds = p * (dp - delta[:, None]) * w
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision='ieee')
        tl.store(LSE + (e + slot) * S + rows, m + tl.log2(l))
        tl.store(DELTA + (e + slot) * S + rows, delta)
        tl.store(DW + e + slot, tl.where(c >= 0, tl.sum(delta, axis=0), 0.0))
    dq = tl.where(any_chunk >= 0, dq * scale, 0.0)
    out = ((b * N + n) * S * H + h) * D + rows[:, None] * (H * D) + cols[None, :]
    tl.store(DQ + out, dq.to(DQ.dtype.element_ty), mask=here)


def dkdv_kernel(Q, K, V, W, DO, DK, DV, LSE, DELTA, ENTRIES, START, ORDER, H, N, M, TOPK, scale,
                q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
                S: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr,
                G: tl.constexpr, BLOCK: tl.constexpr):
    """
    Backward, second half:  dV = Σ w Pᵀ dO,  dK = scale Σ dSᵀ Q,  over all (n, slot) that fetched the chunk (DRT, Algorithm 2)

    Grid      (M, B Hkv): one program owns the keys and values of one chunk in one head, the most wanted chunks first
    Q, K, V, W, DO, LSE, DELTA as in dq_kernel
    DK, DV    (B, M S, Hkv, D)   contiguous; zeros where nobody fetched, and for the keys that take no part
    ENTRIES, START, ORDER        the Plan
    On chip   k, v, dk, dv: (S, COLS) each; BLOCK queries at a time, the scores lying on their side: (S, BLOCK)
    Numerics  sums in fp32 and in the order of ENTRIES: no atomics, the same bits every time
    """
    b, hkv = (tl.program_id(1) // (H // G)).to(tl.int64), (tl.program_id(1) % (H // G)).to(tl.int64)
    c = tl.load(ORDER + b * M + tl.program_id(0)).to(tl.int64)
    start, end = tl.load(START + b * (M + 1) + c), tl.load(START + b * (M + 1) + c + 1)
    keys, rows, cols, log2_scale = tl.arange(0, S), tl.arange(0, BLOCK), tl.arange(0, COLS), scale * 1.4426950408889634
    here = cols[None, :] < D                                                          # (1, COLS)
    k = tl.load(K + b * k_b + c * S * k_t + hkv * k_h + keys[:, None] * k_t + cols[None, :], mask=here, other=0.0)
    v = tl.load(V + b * v_b + c * S * v_t + hkv * v_h + keys[:, None] * v_t + cols[None, :], mask=here, other=0.0)
    dk = tl.zeros([S, COLS], dtype=tl.float32)
    dv = tl.zeros([S, COLS], dtype=tl.float32)
    for g in range(G):
        h = hkv * G + g
        for i in range(start * (S // BLOCK), end * (S // BLOCK)):
            e = tl.load(ENTRIES + b * N * TOPK + i // (S // BLOCK)).to(tl.int64)      # n TOPK + slot
            r = i % (S // BLOCK) * BLOCK + rows                                       # (BLOCK,) rows of chunk n
            t = e // TOPK * S
            q = tl.load(Q + b * q_b + h * q_h + t * q_t + r[:, None] * q_t + cols[None, :], mask=here, other=0.0)
            do = tl.load(DO + b * do_b + h * do_h + t * do_t + r[:, None] * do_t + cols[None, :], mask=here, other=0.0)
            lse = tl.load(LSE + ((b * H + h) * N * TOPK + e) * S + r)                 # (BLOCK,)
            delta = tl.load(DELTA + ((b * H + h) * N * TOPK + e) * S + r)             # (BLOCK,)
            w = tl.load(W + b * N * TOPK + e)
            s = tl.dot(k, tl.trans(q), input_precision='ieee') * log2_scale               # (S, BLOCK)
            p = tl.exp2(s - lse[None, :]) * w
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision='ieee')               # (S, COLS)
            dp = tl.dot(v, tl.trans(do), input_precision='ieee')                      # (S, BLOCK)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision='ieee')                # (S, COLS)
    dk = tl.where(keys[:, None] < KEYS, dk * scale, 0.0)                              # a key has a row to itself,
    dv = tl.where(keys[:, None] < KEYS, dv, 0.0)                                      # so the unused ones did no harm
    out = ((b * M + c) * S * (H // G) + hkv) * D + keys[:, None] * (H // G * D) + cols[None, :]
    tl.store(DK + out, dk.to(DK.dtype.element_ty), mask=here)
    tl.store(DV + out, dv.to(DV.dtype.element_ty), mask=here)


@functools.cache
def kernels():
    """The three kernels as Triton wants them; each is compiled when it is first launched."""
    global tl                                           # the kernels above look it up here
    import triton
    import triton.language as tl
    return [triton.jit(kernel) for kernel in (forward_kernel, dq_kernel, dkdv_kernel)]


SHARED = {(8, 0): 163, (9, 0): 227, (10, 0): 227}      # KiB of shared memory a program may have; 99 on smaller GPUs

def options(capability, S, D, itemsize):
    """
    (num_warps and num_stages, BLOCK of dkdv_kernel), from compiling for sm_80 and sm_90: at S = 64 in 16 bits no register spills,
    and the loads of the next chunk are in flight during the products of this one. Nothing is tuned when it runs.
    """
    tile = S * 2 ** (D - 1).bit_length()
    warps = 4 if S <= 64 and tile <= 64 * 64 else 8
    room = SHARED.get(capability, 99) * 1024 / (tile * itemsize)
    stages = 3 if room > 8.1 else 2 if room > 6.1 else 1        # tiles of q, do, and of k and v as often as there are stages
    return dict(num_warps=warps, num_stages=stages), min(S, 64 if capability[0] >= 9 else 32)


def prepare(chunk, n_keys, *tensors):
    """What the launches share: tensors whose last stride is 1, the strides of the others, constants, options, BLOCK."""
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    q, k = tensors[:2]
    D = q.size(3)
    constants = dict(S=chunk, KEYS=n_keys, D=D, COLS=2 ** (D - 1).bit_length(), G=q.size(2) // k.size(2))
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
    return tensors, [s for x in tensors for s in x.stride()[:3]], constants, *options(capability, chunk, D, q.element_size())


def triton_forward(q, k, v, w, idx, chunk, n_keys, sink, scale):
    (B, N, K), H = idx.shape, q.size(2)
    (q, k, v), strides, constants, launch, _ = prepare(chunk, n_keys, q, k, v)
    o = q.new_empty(q.shape)
    kernels()[0][N, B * H](q, k, v, w, idx, o, H, N, K, scale, *strides, **constants, SINK=sink, **launch)
    return o


def triton_backward(do, q, k, v, w, idx, plan, chunk, n_keys, sink, scale):
    (B, N, K), H, Hkv, M = idx.shape, q.size(2), k.size(2), k.size(1) // chunk
    (q, k, v, do), strides, constants, launch, block = prepare(chunk, n_keys, q, k, v, do)
    plan = plan or gca_plan(idx, M)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dw = w.new_empty(B, H, N, K)
    lse, delta = w.new_empty(2, B, H, N, K, chunk)
    kernels()[1][N, B * H](q, k, v, w, idx, do, dq, dw, lse, delta, H, N, K, scale, *strides, **constants, SINK=sink, **launch)
    if M:
        kernels()[2][M, B * Hkv](q, k, v, w, do, dk, dv, lse, delta, *plan, H, N, M, K, scale, *strides, **constants,
                                 BLOCK=block, **launch)
    return dq, dk, dv, dw.sum(1)


# ----------------------------------------------------------------------------------------------------------------------
# one operator, so that autograd and torch.compile see nothing of all that

TENSORS = 'Tensor q, Tensor k, Tensor v, Tensor w, Tensor idx, Tensor[] plan'
FLAGS = 'int chunk, int n_keys, bool sink, float scale, bool use_triton'

@torch.library.custom_op('nanorlm::gca', mutates_args=(), schema=f'({TENSORS}, {FLAGS}) -> Tensor')
def gca_op(q, k, v, w, idx, plan, chunk, n_keys, sink, scale, use_triton):
    if not idx.is_cuda and int(idx.max()) >= k.size(1) // chunk:                # on a GPU the question would cost a wait
        raise ValueError(f'idx has a chunk {int(idx.max())}; k and v hold chunks 0 to {k.size(1) // chunk - 1}.')
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q): # what is in fp32 here shall stay so
        forward = triton_forward if use_triton else torch_forward
        return forward(q, k, v, w, idx, chunk, n_keys, sink, scale)

@torch.library.custom_op('nanorlm::gca_backward', mutates_args=(),
                         schema=f'(Tensor do, {TENSORS}, {FLAGS}) -> (Tensor, Tensor, Tensor, Tensor)')
def gca_backward_op(do, q, k, v, w, idx, plan, chunk, n_keys, sink, scale, use_triton):
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        if use_triton:
            return triton_backward(do, q, k, v, w, idx, plan, chunk, n_keys, sink, scale)
        return torch_backward(do, q, k, v, w, idx, chunk, n_keys, sink, scale)

@gca_op.register_fake
def _(q, *args):
    return q.new_empty(q.shape)

@gca_backward_op.register_fake
def _(do, q, k, v, w, *args):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, w))

def save(ctx, inputs, output):
    q, k, v, w, idx, plan, *ctx.flags = inputs
    ctx.save_for_backward(q, k, v, w, idx, *plan)                               # the inputs and nothing else

def backward(ctx, do):
    q, k, v, w, idx, *plan = ctx.saved_tensors
    return *gca_backward_op(do, q, k, v, w, idx, plan, *ctx.flags), None, [None] * len(plan), *[None] * len(ctx.flags)

gca_op.register_autograd(backward, setup_context=save)


# ----------------------------------------------------------------------------------------------------------------------
# what others call

class Plan(NamedTuple):
    """The inverse of idx: who fetched a chunk."""
    entries: torch.Tensor   # (B, N K) int32   n K + slot, sorted by chunk and within it by number; empty slots last
    start:   torch.Tensor   # (B, M + 1) int32 those of chunk c are entries[start[c]:start[c + 1]]
    order:   torch.Tensor   # (B, M) int32     the chunks, the most wanted first: a long list begun last would be waited for


def gca_plan(idx, n_chunks):
    """
    The inverse index of idx (B, N, K), for `gca` on a GPU. Layers that share idx can share it; without, each makes its own.

    >>> gca_plan(torch.tensor([[[2, 0], [2, -1]]]), n_chunks=3)       # chunk 0 is in slot 1, chunk 2 in slots 0 and 2
    Plan(entries=tensor([[1, 0, 2, 3]]), start=tensor([[0, 1, 1, 3]]), order=tensor([[2, 0, 1]]))
    """
    chunk = idx.flatten(1).masked_fill(idx.flatten(1) < 0, n_chunks)                        # (B, N K)
    chunk, entries = chunk.sort(dim=1, stable=True)
    edges = torch.arange(n_chunks + 1, device=idx.device, dtype=idx.dtype).expand(idx.size(0), -1)
    start = torch.searchsorted(chunk, edges.contiguous(), out_int32=True)                   # (B, M + 1)
    order = start.diff().argsort(dim=1, descending=True, stable=True)                       # (B, M)
    return Plan(entries.int(), start, order.int())


HAS_TRITON = importlib.util.find_spec('triton') is not None                    # looked for, not imported

def why_not_triton(q, chunk):
    """What keeps the kernels from these tensors; '' when nothing does."""
    D, size = q.size(3), q.element_size()
    if not HAS_TRITON:
        return 'the package triton is not installed'
    if not q.is_cuda and os.environ.get('TRITON_INTERPRET') != '1':
        return f'the tensors are on {q.device}; without a GPU the environment needs TRITON_INTERPRET=1'
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f'the dtype is {q.dtype}; it can be float32, float16 or bfloat16'
    if chunk not in (16, 32, 64, 128):
        return f'chunk is {chunk}; it can be 16, 32, 64 or 128'
    if not 16 <= D <= 128:
        return f'a head has width {D}; it can have 16 to 128'
    if size == 4 and chunk * D > 64 * 128:
        return f'chunks of {chunk} in heads of {D} do not fit on the chip in float32'
    return ''


def gca(q, k, v, w, idx, chunk, n_keys=None, sink=False, scale=None, plan=None, kernel='auto'):
    """
    Grouped cross-attention: each chunk of queries reads K chunks of keys, and what it gets from each is added up by w.

        O_n = Σ_k w_nk softmax(Q_n K_cᵀ · scale) V_c,    c = idx_nk                         (DRT, Eq. 2 and 3)

        q        (B, N chunk, H, D)     queries, N chunks of them
        k, v     (B, M chunk, Hkv, D)   keys and values, M chunks; head h of q reads head h // (H / Hkv). Views are welcome:
                                        nothing is copied as long as the last stride is 1
        w        (B, N, K) fp32         a weight for each chunk that is read, wherefrom the gradient reaches the retriever
        idx      (B, N, K) int32        numbers of chunks, 0 to M - 1, or -1 for none. A number out of range is an error on
                                        a CPU, and is not looked for on a GPU, where the question would cost a wait
        n_keys   of each chunk the first n_keys keys take part (default: all)
        sink     a key with score 0 and value 0 in each softmax: a chunk can be declined
        scale    of the scores; default 1 / sqrt(D)
        plan     gca_plan(idx, M), when several layers share idx; only a GPU's backward pass uses it
        kernel   'triton', 'torch', or 'auto': the first on a GPU where it can, else the second

    Returns o like q; a chunk that reads nothing gets exact zeros. Nothing but the inputs is saved for the backward pass,
    whose results are the same bit for bit every time (those of kernel 'torch' on a CPU alone).
    """
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (q.size(0), q.size(3)) != (k.size(0), k.size(3)):
        raise ValueError(f'q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} should be '
                         '(B, N*chunk, H, D) and twice (B, M*chunk, Hkv, D).')
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ValueError(f'q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they should have one floating dtype.')
    if len({x.device for x in (q, k, v, w, idx)}) > 1:
        raise ValueError(f'q, k, v, w and idx are on {[str(x.device) for x in (q, k, v, w, idx)]}; they should be on one device.')
    if chunk < 1 or q.size(1) % chunk or k.size(1) % chunk:
        raise ValueError(f'{q.size(1)} queries and {k.size(1)} keys are not both multiples of chunk = {chunk}.')
    if k.size(2) < 1 or q.size(2) % k.size(2):
        raise ValueError(f'{q.size(2)} heads of queries are not a multiple of {k.size(2)} heads of keys and values.')
    B, N = q.size(0), q.size(1) // chunk
    if idx.dim() != 3 or idx.shape[:2] != (B, N) or w.shape != idx.shape:
        raise ValueError(f'w {tuple(w.shape)} and idx {tuple(idx.shape)} should both be ({B}, {N}, K).')
    if idx.dtype not in (torch.int32, torch.int64) or not w.is_floating_point():
        raise ValueError(f'idx is {idx.dtype} and w {w.dtype}; they should be int32 or int64, and float32.')
    n_keys = chunk if n_keys is None else n_keys
    if not 1 <= n_keys <= chunk:
        raise ValueError(f'n_keys = {n_keys} does not lie between 1 and chunk = {chunk}.')
    M = k.size(1) // chunk
    if plan is not None and [x.shape for x in plan] != [(B, N * idx.size(2)), (B, M + 1), (B, M)]:
        raise ValueError(f'plan is not one of this idx {tuple(idx.shape)} and {M} chunks; make it with gca_plan(idx, {M}).')
    if kernel not in ('auto', 'triton', 'torch'):
        raise ValueError(f'kernel {kernel!r} is not one of auto, triton, torch.')
    why_not = '' if kernel == 'torch' or kernel == 'auto' and not q.is_cuda else why_not_triton(q, chunk)
    if kernel == 'triton' and why_not:
        raise ValueError(f"kernel 'triton' cannot run: {why_not}. Use kernel='torch'.")
    use_triton = kernel == 'triton' or kernel == 'auto' and q.is_cuda and not why_not

    if idx.numel() == 0 or q.numel() == 0:
        return q.new_zeros(q.shape)
    scale = q.size(3) ** -0.5 if scale is None else scale
    w, idx = w.to(torch.promote_types(q.dtype, torch.float32)).contiguous(), idx.int().contiguous()
    return gca_op(q, k, v, w, idx, list(plan or ()), chunk, n_keys, sink, scale, use_triton)


# ----------------------------------------------------------------------------------------------------------------------
# comparison and benchmark

def example(B, N, M, S, K, H, Hkv, D, dtype, device):
    """Random q, k, v, w that want gradients, idx without repetitions in a row, and a gradient of the output."""
    q, do = (torch.randn(B, N * S, H, D, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(B, M * S, Hkv, D, device=device).to(dtype) for _ in range(2))
    w = torch.randn(B, N, K, device=device).softmax(2)
    idx = torch.rand(B, N, M, device=device).topk(K).indices.int()                          # (B, N, K)
    return [x.requires_grad_() for x in (q, k, v, w)], idx, do


def errors(device):
    """The largest errors of every path, beside the largest number there is, against the definition in fp64."""
    def run(f, inputs, do, *args, **options):
        inputs = [x.detach().requires_grad_() for x in inputs]
        o = f(*inputs, *args, **options)
        return o, *torch.autograd.grad(o, inputs, do)

    print('largest error / largest value, against the definition in fp64')
    print(f'{"":18}{"o":>10}{"dq":>10}{"dk":>10}{"dv":>10}{"dw":>10}')
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        inputs, idx, do = example(2, 9, 7, 64, 3, 4, 2, 64, dtype, device)
        idx[:, 0] = -1
        exact = run(gca_reference, [x.double() for x in inputs], do.double(), idx, 64, n_keys=63, sink=True)
        for kernel in ('torch', 'triton')[:2 if device == 'cuda' else 1]:
            found = run(gca, inputs, do, idx, 64, n_keys=63, sink=True, kernel=kernel)
            worst = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, exact)]
            print(f'{kernel:7}{str(dtype)[6:]:11}' + ''.join(f'{x:10.1e}' for x in worst))


def gather_then_sdpa(q, k, v, w, idx, chunk):
    """The other way: copies of the fetched chunks, one call of PyTorch's attention, and the weighted sum."""
    (B, N, K), H, D = idx.shape, q.size(2), q.size(3)
    b = torch.arange(B, device=q.device)[:, None, None]
    k, v = (x.view(B, -1, chunk, H, D)[b, idx.long()].flatten(0, 2).transpose(1, 2) for x in (k, v))    # (B N K, H, S, D)
    q = q.view(B, N, 1, chunk, H, D).expand(-1, -1, K, -1, -1, -1).flatten(0, 2).transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v).view(B, N, K, H, chunk, D)
    return torch.einsum('bnk, bnkhid -> bnihd', w.to(o.dtype), o).flatten(1, 2)


def sliding_window(T, window, device):
    """Attention of each token to itself and the window - 1 before it: FlexAttention on a GPU, blocks and a mask on a CPU."""
    if device == 'cuda':
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < window), None, None, T, T, device=device)
        flex = torch.compile(flex_attention)
        return lambda q, k, v: flex(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)
    age = window + torch.arange(window)[:, None] - torch.arange(2 * window)[None, :]        # (window, 2 window)
    seen = (age >= 0) & (age < window)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))                                    # (B, H, T, D)
        k, v = (F.pad(x, (0, 0, window, 0)).unfold(2, 2 * window, window).mT for x in (k, v))       # (B, H, T/W, 2W, D)
        o = F.scaled_dot_product_attention(q.unflatten(2, (-1, window)), k, v, attn_mask=seen)
        return o.flatten(2, 3).transpose(1, 2)                                              # (the first block sees zeros too)
    return attend


def seconds(f, device, least=0.5):
    """The median of at least three runs, and of at least half a second of them."""
    times = []
    while len(times) < 4 or sum(times) < least:
        if device == 'cuda':
            torch.cuda.synchronize()
        start = time.perf_counter()
        f()
        if device == 'cuda':
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[len(times[1:]) // 2]                                           # the first one compiles


def benchmark(device, dtype, B, T, S, K, H, D):
    N, window = T // S, K * S
    inputs, idx, do = example(B, N, N, S, K, H, H, D, dtype, device)
    plan = gca_plan(idx, N)
    others = {'gca': lambda q, k, v, w: gca(q, k, v, w, idx, S, plan=plan),
              'gather, then SDPA': lambda q, k, v, w: gather_then_sdpa(q, k, v, w, idx, S)}
    swa = sliding_window(T, window, device)
    others[f'sliding window {window}'] = lambda q, k, v, w: swa(q, k, v)
    flop = 4 * B * T * window * H * D                                                       # two products forward, five backward
    print(f'\nB={B} T={T:,} S={S} K={K} H={H} D={D} {str(dtype)[6:]}')
    print(f'{"":20}{"forward":>24}{"with backward":>24}{"memory beside inputs" if device == "cuda" else "":>24}')
    for name, f in others.items():
        def train():
            o = f(*inputs)
            torch.autograd.grad(o, inputs, do, allow_unused=True)
        try:
            with torch.no_grad():
                forward = seconds(lambda: f(*inputs), device)
            both, memory = seconds(train, device), ''
            if device == 'cuda':
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                train()
                memory = f'{(torch.cuda.max_memory_allocated() - before) / 2 ** 30:18.2f} GiB'
            print(f'{name:20}{1e3 * forward:9.2f} ms{flop / forward / 1e12:8.3f} TF/s{1e3 * both:9.2f} ms'
                  f'{3.5 * flop / both / 1e12:8.3f} TF/s{memory}')
        except torch.OutOfMemoryError:
            print(f'{name:20}   out of memory')


if __name__ == '__main__':
    torch.manual_seed(0)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    name = torch.cuda.get_device_name() if device == 'cuda' else f'{platform.machine()}, {torch.get_num_threads()} threads'
    print(f'{name}, torch {torch.__version__}, triton {version("triton") if HAS_TRITON else None}')
    errors(device)
    if device == 'cuda':
        for B, T in ((8, 16_384), (2, 65_536)):
            benchmark(device, torch.bfloat16, B, T, S=64, K=8, H=12, D=64)
    else:
        print('\nno GPU: a small size, with kernel torch; the kernels of Triton are not measured')
        for dtype in (torch.float32, torch.bfloat16):
            benchmark(device, dtype, 4, 2048, S=32, K=4, H=4, D=64)
