"""
Grouped cross-attention (GCA), the attention of DRT over retrieved chunks.

    Xiang Hu, Zhihao Teng, Jun Zhao, Wei Wu and Kewei Tu, "Efficient Length-Generalizable Attention
    via Causal Retrieval for Long-Context Language Modeling", ICML 2025, arXiv:2410.01651

Each chunk of queries attends to K retrieved chunks of keys, to each with a separate softmax. The
outputs are summed with the retriever's weights, so the loss of the language model trains the
retriever. The PyTorch definition gathers K copies of keys and values. The Triton kernels load each
chunk from where it is stored; their backward pass uses an inverse index and no atomics.

Where the paper is in this file
    Eq. 2        O = Σ_k w_k O_k                            gca_reference, forward_kernel
    Eq. 3        O_k = softmax(Q K_kᵀ / sqrt(D)) V_k        gca_reference, chunk_softmax
    App. A.2     Algorithms 1 and 2                         forward_kernel; dq_kernel, dkdv_kernel

Three layers, from the public function inwards
    gca                the public function: checks the sizes, chooses PyTorch or Triton
    gca_forward        the operator nanorlm::gca, with autograd: allocates o, launches the kernel
    forward_kernel     the kernel; likewise gca_backward launches dq_kernel, then dkdv_kernel

Letters used in the shape comments
    B sequences    N chunks of queries    M chunks of keys    K retrieved for a chunk of queries
    S positions per chunk (in drt.py S - 1 tokens and a landmark)    D head size
    H heads of queries    Hkv heads of keys and values, each for R = H / Hkv heads of queries

Indices
    b, h     a sequence, a head of queries
    n        a chunk of queries; in kernels, its number among the B N chunks of all sequences
    slot     0 ... K - 1, the place of one of the chunks that n retrieves; k in formulas
    c        idx[b, n, slot], the chunk of keys in a slot; -1: the slot is unused
    entry    n K + slot, the number of a slot among all slots of a sequence (kernels: of all)

Matrices in the formulas, of one chunk of queries in one head
    Q, O, dO       (S, D)
    K_k, V_k       (S, D)    keys and values of the chunk in slot k
    S_k, P_k       (S, S)    scores Q K_kᵀ · scale; their softmax in each row
    dS_k, dP_k     (S, S)    gradients
    L_k            (S,)      log-sum-exp of each row of S_k
    δ_k            (S,)      rowsum(dO ∘ O_k), the paper's D

The same in the kernels. A GPU computes 2^x, not e^x, so scores are multiplied by log2(e)
    s              S_k log2(e): 2^s is exp(S_k)
    exp_s          2^(s - largest), at most 1, not yet normalized (the paper's P with a tilde);
                   largest: the maximum of each row of s
    total          sum of each row of exp_s; with a sink, whose score is 0, plus 2^(0 - largest)
    p, wp          P_k = exp_s / total; w_k P_k
    lse2           L_k log2(e) = largest + log2(total), log-sum-exp in base 2: P_k = 2^(s - lse2)
    delta          δ_k

Where we differ from the paper, and why
    Algorithm 1 loops over blocks of a chunk's keys; here a whole chunk fits on the chip. The
    forward pass saves neither O_k nor L; dq_kernel computes L again and stores it for dkdv_kernel.
    δ_k is computed as rowsum(P_k ∘ dP_k), which is equal. Algorithm 2's dK, dV are those of a slot;
    here dkdv_kernel sums them over all slots that hold a chunk.
    In the pseudo-code of App. A.2 we correct what contradicts Eq. 2 and 3: scores lack 1 / sqrt(D);
    line 13 of Algorithm 1 divides by exp(m_old - m_new), which is a factor, and O_i is both the sum
    over k and that of one chunk; line 17 of Algorithm 2 overwrites dW for each block j of keys, and
    has to add to it, and to sum over the rows of Q_i.
    n_keys and sink are not in the paper: a landmark is no key, and in its place is a key with score
    0 and value 0 (as in the official code), the sink. Without it a query has to read something of
    each chunk; with it the weights of the keys sum to less than 1, to almost 0 if no key fits.

    $ python gca_kernel.py           errors against fp64; on a GPU also times
"""
from __future__ import annotations      # tl.constexpr in signatures: tl is imported later

import functools, importlib.util, os

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# --------------------------------------------------------------------------------------------------
# the definition
SCORES = 2 ** 22            # attention scores of one block of rows; 16 MiB in fp32


def fp32(x):
    """bf16 and fp16 become fp32; fp64 remains, for the tests."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def retrieved_chunks(x, idx, chunk, n_keys):
    """The first n_keys keys or values of each retrieved chunk; all of them if n_keys is None.

    x (B, M S, Hkv, D)   idx (B, N, K) -> (B, N, K, n_keys, Hkv, D), 0 for an unused slot"""
    x = x.unflatten(1, (-1, chunk))[:, :, :n_keys]              # (B, M, n_keys, Hkv, D)
    numbers = idx.clamp(min=0).flatten(1)                       # (B, N K)
    retrieved = [x_b.index_select(0, c) for x_b, c in zip(x, numbers)]
    retrieved = torch.stack(retrieved).unflatten(1, idx.shape[1:])

    # an unused slot gathers chunk 0: without the mask a NaN in it would reach all gradients
    unused = (idx < 0)[..., None, None, None]
    return retrieved.masked_fill(unused, 0)


def gca_reference(q, k, v, w, idx, chunk, n_keys=None, sink=False, scale=None):
    """The definition of `gca`, with its arguments. Scores and softmax are fp32, or fp64 where q is.

        O = Σ_k w_k softmax(Q K_kᵀ · scale) V_k    for each chunk of queries   (DRT, Eq. 2 and 3)"""
    B, N, K = idx.shape
    if scale is None:
        scale = q.size(3) ** -0.5

    with torch.autocast(q.device.type, enabled=False):          # under bf16, scores remain fp32
        k = retrieved_chunks(k, idx, chunk, n_keys)             # (B, N, K, n_keys, Hkv, D)
        v = retrieved_chunks(v, idx, chunk, n_keys)
        n_keys, Hkv = k.shape[3:5]

        # Eq. 3, P_k: a softmax for each query and slot, over the keys of one chunk. einsum has the
        # letters of the shapes in lower case; h is Hkv, and t is n_keys
        grouped = q.unflatten(1, (N, chunk))                    # (B, N, S, H, D)
        grouped = grouped.unflatten(3, (Hkv, -1))               # (B, N, S, Hkv, R, D)
        s = torch.einsum('bnshrd, bnkthd -> bnhrskt', fp32(grouped), fp32(k))
        s = s * scale                                           # (B, N, Hkv, R, S, K, n_keys)
        if sink:
            s = F.pad(s, (0, 1))                                # one more key, with score 0
        p = s.softmax(-1)[..., :n_keys]                         # without the sink: its value is 0

        # Eq. 2, Σ_k w_k P_k V_k: w_k is 0 for an unused slot, equal for all Hkv, R, S, n_keys
        w = w.masked_fill(idx < 0, 0)                           # (B, N, K)
        wp = p * w.view(B, N, 1, 1, 1, K, 1)
        o = torch.einsum('bnhrskt, bnkthd -> bnshrd', wp.to(v.dtype), v)
    return o.reshape(q.shape).to(q.dtype)


def gca_blocks(q, k, v, w, idx, chunk, n_keys, sink, scale):
    """gca_reference in blocks of rows (chunks of queries). Several blocks are checkpointed: only
    the scores of one are in memory at a time. Gradients of k, v are summed over blocks in fp32."""
    B, N, K = idx.shape
    scores_of_row = B * chunk * q.size(2) * K * n_keys
    rows = max(1, SCORES // scores_of_row)                      # in a block
    if rows >= N:
        return gca_reference(q, k, v, w, idx, chunk, n_keys, sink, scale)

    # the blocks; their scores are computed again in the backward pass
    k = fp32(k)
    v = fp32(v)
    blocks = zip(q.split(rows * chunk, 1), w.split(rows, 1), idx.split(rows, 1))
    outputs = [checkpoint(gca_reference, q_block, k, v, w_block, idx_block,
                          chunk, n_keys, sink, scale, use_reentrant=False)
               for q_block, w_block, idx_block in blocks]
    return torch.cat(outputs, dim=1)


# --------------------------------------------------------------------------------------------------
# the Triton kernels
#
# From here to dkdv_kernel no function has the decorator @triton.jit, because it would import Triton
# together with this file. Instead import_triton, below dkdv_kernel, imports Triton (as `tl`) and
# applies triton.jit to each of them before the first launch.
#
# Each kernel runs as a grid of programs, one for each chunk and head. All tensors are contiguous.
# In a tensor (chunks, S, H, D), head h of chunk n begins at the offset (n S H + h) D, and its rows
# are H D numbers apart. So a program loads an (S, D) tile from the addresses
#
#     ptr + offset + tile         offset () of the head of the chunk, tile (S, D) within it
#
# The next chunk begins S H D numbers later. An offset can need 64 bits, so b is an int64; a tile
# needs 32.
HAS_TRITON = importlib.util.find_spec('triton') is not None


def tile_offsets(rows, H, D: tl.constexpr):
    """Offsets (rows, D) of rows of a head of a chunk, relative to its row 0"""
    columns = tl.arange(0, D)
    return rows[:, None] * (H * D) + columns[None, :]


def load_slot(k_ptr, v_ptr, w_row, idx_row, b, h, slot,
              H, M, S: tl.constexpr, D: tl.constexpr, R: tl.constexpr, N_KEYS: tl.constexpr):
    """The chunk of keys in a slot: its weight (), its keys and values (S, D) for head h of sequence
    b, zeros from N_KEYS on. All are zeros if the slot is unused; by masks, because a branch is not
    pipelined."""
    c = tl.load(idx_row + slot)
    w = tl.load(w_row + slot, mask=c >= 0, other=0.0)

    rows = tl.arange(0, S)
    Hkv = H // R
    tile = tile_offsets(rows, Hkv, D)                           # (S, D)
    offset = ((b * M + c) * S * Hkv + h // R) * D               # in k and v
    # no rows of an unused slot; not mask=c >= 0, because the interpreter takes no scalar here
    n_rows = tl.where(c >= 0, N_KEYS, 0)
    mask = rows[:, None] < n_rows
    k = tl.load(k_ptr + offset + tile, mask=mask, other=0.0)
    v = tl.load(v_ptr + offset + tile, mask=mask, other=0.0)
    return w, k, v


def product_t(a, b):
    """a bᵀ in fp32. Without 'ieee', a GPU would round fp32 inputs to TF32."""
    return tl.dot(a, tl.trans(b), input_precision='ieee')


def add_product(acc, a, b):
    """acc + a b in fp32, a rounded to the dtype of b"""
    return tl.dot(a.to(b.dtype), b, acc, input_precision='ieee')


def scores_log2(a, b, scale):
    """Scores a bᵀ · scale, multiplied by log2(e): 2 to this power is exp of the score."""
    log2_e = 1.4426950408889634
    return product_t(a, b) * (scale * log2_e)


def chunk_softmax(q, k, scale, S: tl.constexpr,
                  N_KEYS: tl.constexpr, SINK: tl.constexpr):
    """The softmax P_k (S, S) over the keys of a chunk (Eq. 3), in parts: P_k = exp_s / total

    -> exp_s = 2^(s - largest) (S, S), largest = rowmax(s) (S,), total (S,), the sum of each row of
    exp_s, plus 2^-largest with a sink"""
    s = scores_log2(q, k, scale)
    is_key = tl.arange(0, S) < N_KEYS
    s = tl.where(is_key[None, :], s, float('-inf'))
    largest = tl.max(s, axis=1)
    exp_s = tl.exp2(s - largest[:, None])                       # at most 1: no overflow
    total = tl.sum(exp_s, axis=1)
    if SINK:                                                    # one more key, with score 0
        total += tl.exp2(-largest)                              # if inf, exp_s / total is 0
    return exp_s, largest, total


def forward_kernel(q_ptr, k_ptr, v_ptr, w_ptr, idx_ptr, o_ptr,
                   H, N, M, K, scale,
                   S: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                   N_KEYS: tl.constexpr, SINK: tl.constexpr):
    """O = Σ_k w_k softmax(Q K_kᵀ · scale) V_k                     (DRT, Eq. 2 and 3; Algorithm 1)

    Grid      (N, H, B): one program for the S queries of one chunk in one head
    q, o      (B, N S, H, D)     contiguous, like all tensors
    k, v      (B, M S, Hkv, D)   a program loads the chunks that it needs
    w, idx    (B, N, K)          fp32 weights and int32 chunk numbers, -1 for an unused slot
    On chip   q, k, v, acc: (S, D) each; scores (S, S)
    Saved     nothing; the backward pass computes the scores again
    Numerics  products in the input dtype with fp32 accumulation, softmax in fp32"""
    # the head and the chunk of queries of this program
    b = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1)
    n = b * N + tl.program_id(0)                                # among the B N of all sequences

    # its queries, and its row of w and idx
    rows = tl.arange(0, S)
    q_tile = tile_offsets(rows, H, D)                           # (S, D)
    q_offset = (n * S * H + h) * D                              # in q and o
    q = tl.load(q_ptr + q_offset + q_tile)
    w_row = w_ptr + n * K
    idx_row = idx_ptr + n * K

    # one slot after the other
    acc = tl.zeros([S, D], tl.float32)
    for slot in range(K):
        w, k, v = load_slot(k_ptr, v_ptr, w_row, idx_row, b, h, slot, H, M, S, D, R, N_KEYS)

        # O += w_k P_k V_k
        exp_s, largest, total = chunk_softmax(q, k, scale, S, N_KEYS, SINK)
        wp = exp_s * (w / total)[:, None]                       # (S, S) w_k P_k
        acc = add_product(acc, wp, v)
    tl.store(o_ptr + q_offset + q_tile, acc)                    # rounds to the dtype of o


def dq_kernel(q_ptr, k_ptr, v_ptr, w_ptr, idx_ptr, do_ptr,
              dq_ptr, dw_ptr, lse2_ptr, delta_ptr,
              H, N, M, K, scale,
              S: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
              N_KEYS: tl.constexpr, SINK: tl.constexpr):
    """dQ = scale Σ_k dS_k K_k,    dw_k = Σ_rows δ_k                             (DRT, Algorithm 2)
    dS_k = w_k P_k ∘ (dP_k - δ_k),  dP_k = dO V_kᵀ,  δ_k = rowsum(P_k ∘ dP_k),  P_k the softmax

    Grid, q, k, v, w, idx as in forward_kernel; do and dq like q
    dw           (B, N, K, H)     fp32, dw of one head
    lse2, delta  (B, N, K, H, S)  fp32, log-sum-exp of scores in base 2 and δ, for dkdv_kernel"""
    # the head and the chunk of queries of this program, as in forward_kernel
    b = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1)
    n = b * N + tl.program_id(0)                                # among the B N of all sequences

    # its queries and dO, and its row of w and idx
    rows = tl.arange(0, S)
    q_tile = tile_offsets(rows, H, D)                           # (S, D)
    q_offset = (n * S * H + h) * D                              # in q, do and dq
    q = tl.load(q_ptr + q_offset + q_tile)
    do = tl.load(do_ptr + q_offset + q_tile)
    w_row = w_ptr + n * K
    idx_row = idx_ptr + n * K

    # one slot after the other
    dq = tl.zeros([S, D], tl.float32)
    for slot in range(K):
        w, k, v = load_slot(k_ptr, v_ptr, w_row, idx_row, b, h, slot, H, M, S, D, R, N_KEYS)

        # P_k, dP_k, δ_k, dS_k
        exp_s, largest, total = chunk_softmax(q, k, scale, S, N_KEYS, SINK)
        p = exp_s / total[:, None]                              # (S, S)
        dp = product_t(do, v)                                   # (S, S)
        delta = tl.sum(p * dp, axis=1)                          # (S,), 0 for an unused slot
        ds = p * (dp - delta[:, None]) * w                      # (S, S)
        dq = add_product(dq, ds, k)                             # dQ += dS_k K_k

        # what dkdv_kernel needs of this softmax; dw_k
        saved = (n * K + slot) * H + h                          # in (B, N, K, H)
        lse2 = largest + tl.log2(total)                         # (S,)
        tl.store(lse2_ptr + saved * S + rows, lse2)
        tl.store(delta_ptr + saved * S + rows, delta)
        tl.store(dw_ptr + saved, tl.sum(delta, axis=0))
    tl.store(dq_ptr + q_offset + q_tile, dq * scale)


def dkdv_kernel(q_ptr, k_ptr, v_ptr, w_ptr, do_ptr, dk_ptr, dv_ptr,
                lse2_ptr, delta_ptr, entries_ptr, start_ptr, order_ptr,
                H, N, M, K, scale,
                S: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                N_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """dV = Σ w_k P_kᵀ dO,   dK = scale Σ dS_kᵀ Q,   over slots that hold the chunk    (Algorithm 2)
    P_k = 2^(s - lse2),  dS_k = w_k P_k ∘ (dP_k - δ_k),  dP_k = dO V_kᵀ; the sink is in lse2

    Grid      (M, Hkv, B): one program for one chunk in one head of keys, most retrieved first
    dk, dv    (B, M S, Hkv, D)   zeros for keys that no query attends to
    entries, start, order        of gca_plan; other arguments as in dq_kernel
    On chip   k, v, dk, dv: (S, D) each; transposed scores (S, BLOCK), for BLOCK queries at a time
    Numerics  sums in fp32, in the order of entries: no atomics, the same bits every time"""
    # the head and the chunk of keys of this program
    Hkv = H // R
    b = tl.program_id(2).to(tl.int64)
    hkv = tl.program_id(1)
    c = tl.load(order_ptr + b * M + tl.program_id(0))

    # its keys and values
    keys = tl.arange(0, S)
    k_tile = tile_offsets(keys, Hkv, D)                         # (S, D)
    k_offset = ((b * M + c) * S * Hkv + hkv) * D                # in k, v, dk and dv
    k = tl.load(k_ptr + k_offset + k_tile)
    v = tl.load(v_ptr + k_offset + k_tile)

    # the slots that hold this chunk are entries[start:end] of sequence b
    start_row = start_ptr + b * (M + 1)
    start = tl.load(start_row + c)
    end = tl.load(start_row + c + 1)
    first_entry = b * N * K                                     # of sequence b

    dk = tl.zeros([S, D], tl.float32)
    dv = tl.zeros([S, D], tl.float32)
    blocks = S // BLOCK                                         # of a chunk of queries
    for r in range(R):                                          # heads of queries that share hkv
        h = hkv * R + r

        # entries, and for each the blocks of its S queries: in one loop, which can be pipelined
        for i in range(start * blocks, end * blocks):
            position = i // blocks                              # in entries
            block = i % blocks

            # BLOCK queries of chunk n, and what dq_kernel saved of their softmax; entry and n are
            # numbers among those of all sequences
            entry = first_entry + tl.load(entries_ptr + first_entry + position)
            n = entry // K
            rows = block * BLOCK + tl.arange(0, BLOCK)
            q_tile = tile_offsets(rows, H, D)                   # (BLOCK, D)
            q_offset = (n * S * H + h) * D                      # in q and do
            q = tl.load(q_ptr + q_offset + q_tile)
            do = tl.load(do_ptr + q_offset + q_tile)
            w = tl.load(w_ptr + entry)
            saved = entry * H + h                               # in (B, N, K, H)
            lse2 = tl.load(lse2_ptr + saved * S + rows)         # (BLOCK,)
            delta = tl.load(delta_ptr + saved * S + rows)

            # transposed, a row for each key: w_k P_kᵀ, dP_kᵀ and dS_kᵀ. Rows from N_KEYS on are no
            # keys: what is computed for them is replaced by 0 at the end
            s = scores_log2(k, q, scale)                        # (S, BLOCK)
            wp = tl.exp2(s - lse2[None, :]) * w
            dv = add_product(dv, wp, do)                        # dV += w_k P_kᵀ dO
            dp = product_t(v, do)                               # (S, BLOCK)
            ds = wp * (dp - delta[None, :])
            dk = add_product(dk, ds, q)                         # dK += dS_kᵀ Q

    # keys from N_KEYS on have no part in the softmax
    is_key = keys[:, None] < N_KEYS
    dk = tl.where(is_key, dk * scale, 0.0)
    dv = tl.where(is_key, dv, 0.0)
    tl.store(dk_ptr + k_offset + k_tile, dk)
    tl.store(dv_ptr + k_offset + k_tile, dv)


@functools.cache
def import_triton():
    """Imports Triton before the first launch, because nothing else needs it. The kernels look up
    `tl` and each other in this module. So this function assigns `tl`, and replaces each function by
    what the decorator @triton.jit would return."""
    global tl
    import triton
    import triton.language as tl
    for function in (tile_offsets, load_slot, product_t, add_product, scores_log2, chunk_softmax,
                     forward_kernel, dq_kernel, dkdv_kernel):
        globals()[function.__name__] = triton.jit(function)


def compute_capability(device):
    """(8, 0) of an A100, (9, 0) of an H100; (0, 0) if it is no GPU"""
    return torch.cuda.get_device_capability(device) if device.type == 'cuda' else (0, 0)


def kernel_options(q, k, chunk, n_keys):
    """A dict of the constants that are compiled into all kernels, and of launch options.

    The numbers were chosen by compiling for sm_80 and sm_90: for S = 64, D = 64 or 128 in 16 bits
    no register is spilled, and loads overlap products. They change no result beyond rounding."""
    H, D = q.shape[2:]
    options = dict(S=chunk, D=D, R=H // k.size(2), N_KEYS=n_keys)

    # 4 warps would spill registers for tiles larger than 64 x 64 in 16 bits
    tile_bytes = chunk * D * q.element_size()
    is_small = chunk <= 64 and tile_bytes <= 8 * 1024
    options['num_warps'] = 4 if is_small else 8

    # a stage holds a k and v (in dkdv_kernel a q and dO): the next are loaded while these are
    # multiplied
    options['num_stages'] = 3 if tile_bytes <= 12 * 1024 else 2
    return options


def dkdv_options(q, k, chunk, n_keys):
    """The same for dkdv_kernel, with BLOCK, the number of queries at a time"""
    block = 64 if compute_capability(q.device) >= (9, 0) else 32    # on an H100 64 take less time
    return dict(kernel_options(q, k, chunk, n_keys), BLOCK=min(block, chunk))


# --------------------------------------------------------------------------------------------------
# an operator with autograd
@torch.library.custom_op('nanorlm::gca', mutates_args=())
def gca_forward(q: Tensor, k: Tensor, v: Tensor, w: Tensor,
                idx: Tensor, entries: Tensor, start: Tensor, order: Tensor,
                chunk: int, n_keys: int, sink: bool, scale: float) -> Tensor:
    """o, by forward_kernel (Algorithm 1). The plan (entries, start, order: see gca_plan) is for the
    backward pass."""
    import_triton()
    B, N, K = idx.shape
    H = q.size(2)
    M = k.size(1) // chunk
    o = torch.empty_like(q)
    with torch.cuda.device_of(q):
        forward_kernel[N, H, B](
            q, k, v, w, idx, o,
            H, N, M, K, scale, SINK=sink, **kernel_options(q, k, chunk, n_keys))
    return o


@torch.library.custom_op('nanorlm::gca_backward', mutates_args=())
def gca_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor,
                 idx: Tensor, entries: Tensor, start: Tensor, order: Tensor,
                 chunk: int, n_keys: int, sink: bool,
                 scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dw (Algorithm 2). dq_kernel saves what dkdv_kernel needs of each softmax."""
    import_triton()
    B, N, K = idx.shape
    H = q.size(2)
    M = order.size(1)
    do = do.contiguous()

    # what the kernels write
    dq, dk, dv = map(torch.empty_like, (q, k, v))
    dw = w.new_empty(B, N, K, H)                                # of each head, summed below
    lse2 = w.new_empty(B, N, K, H, chunk)
    delta = torch.empty_like(lse2)

    # one program for each chunk of queries and head, then for each chunk of keys and head of keys
    with torch.cuda.device_of(q):
        dq_kernel[N, H, B](
            q, k, v, w, idx, do, dq, dw, lse2, delta,
            H, N, M, K, scale, SINK=sink, **kernel_options(q, k, chunk, n_keys))
        dkdv_kernel[M, k.size(2), B](
            q, k, v, w, do, dk, dv, lse2, delta, entries, start, order,
            H, N, M, K, scale, **dkdv_options(q, k, chunk, n_keys))
    return dq, dk, dv, dw.sum(3)


@gca_forward.register_fake
def fake_forward(q, *args):
    """The shapes of the result, for torch.compile"""
    return torch.empty_like(q)


@gca_backward.register_fake
def fake_backward(do, *inputs):
    """The shapes of dq, dk, dv, dw"""
    return tuple(map(torch.empty_like, inputs[:4]))             # of q, k, v, w


def save_inputs(ctx, inputs, output):
    """What the backward pass of gca_forward needs"""
    *tensors, chunk, n_keys, sink, scale = inputs               # q, k, v, w, idx and the plan
    ctx.save_for_backward(*tensors)
    ctx.numbers = chunk, n_keys, sink, scale


def backward(ctx, do):
    """The gradients of all inputs of gca_forward"""
    dq, dk, dv, dw = gca_backward(do, *ctx.saved_tensors, *ctx.numbers)
    of_integers = [None] * 4                                    # idx, entries, start, order
    of_numbers = [None] * 4                                     # chunk, n_keys, sink, scale
    return dq, dk, dv, dw, *of_integers, *of_numbers


gca_forward.register_autograd(backward, setup_context=save_inputs)


# --------------------------------------------------------------------------------------------------
# FLOPs, for torch.utils.flop_counter: the formulas of the operators get the shapes of tensors
def product_flops(q_shape, idx_shape):
    """FLOPs of Q K_kᵀ, or of another product of its size, for all slots and heads"""
    B, T, H, D = q_shape
    _, N, K = idx_shape
    S = T // N
    return 2 * B * N * K * H * S * S * D


def forward_flops(q_shape, k_shape, v_shape, w_shape, idx_shape, *others, out_shape):
    return 2 * product_flops(q_shape, idx_shape)                # Q K_kᵀ, P_k V_k


def backward_flops(do_shape, q_shape, k_shape, v_shape, w_shape, idx_shape, *others, out_shape):
    dq_products = 3                                             # Q K_kᵀ, dP_k, dQ
    dkdv_products = 4                                           # Q K_kᵀ, dP_k, dK_k, dV_k
    return (dq_products + dkdv_products) * product_flops(q_shape, idx_shape)


# FlopCounterMode(custom_mapping=FLOPS) counts the kernels. Unused slots count like others: all
# kernels except dkdv_kernel multiply their zeros.
FLOPS = {
    torch.ops.nanorlm.gca: forward_flops,
    torch.ops.nanorlm.gca_backward: backward_flops}


# --------------------------------------------------------------------------------------------------
# the public functions
def gca_plan(idx, n_chunks):
    """The inverse of idx (B, N, K), for the backward pass

        entries   (B, N K) int32     n K + slot, sorted by chunk, then by number; unused slots last
        start     (B, M + 1) int32   those of chunk c are entries[start[c]:start[c + 1]]
        order     (B, M) int32       chunks, most retrieved first, because they take longest

    >>> [x.tolist() for x in gca_plan(torch.tensor([[[2, 0], [2, -1]]]), n_chunks=3)]
    [[[1, 0, 2, 3]], [[0, 1, 1, 3]], [[2, 0, 1]]]"""
    # the chunk of each entry, M for an unused slot; entries sorted by it
    c = idx.masked_fill(idx < 0, n_chunks).flatten(1)           # (B, N K)
    c, entries = c.sort(stable=True)

    # where each chunk, and M, first occurs among the sorted ones
    every_c = torch.arange(n_chunks + 1, device=idx.device, dtype=idx.dtype)
    every_c = every_c.repeat(len(idx), 1)                       # (B, M + 1)
    start = torch.searchsorted(c, every_c, out_int32=True)

    # chunks by how many entries each has
    count = start.diff()                                        # (B, M)
    order = count.argsort(descending=True, stable=True)
    return entries.int(), start, order.int()


def triton_can_run(q, chunk):
    """Can the kernels run on q (B, T, H, D)? On a GPU, or in Triton's interpreter, which cannot
    multiply bf16; not in fp64"""
    interprets = os.environ.get('TRITON_INTERPRET') == '1' and q.dtype != torch.bfloat16
    if not HAS_TRITON or not (q.is_cuda or interprets):
        return False

    # NVIDIA's from the A100 on: Triton has no tensor cores of earlier ones
    if q.is_cuda and not torch.version.hip and compute_capability(q.device) < (8, 0):
        return False

    # sizes whose tiles fit the shared memory of RTX cards from RTX 30 on, 99 KiB; for small heads,
    # the scores are the largest tile
    D = q.size(3)
    tile_bytes = chunk * max(D, 64) * q.element_size()
    fits = 16 <= D <= 128 and tile_bytes <= 16 * 1024
    return fits and chunk in (16, 32, 64, 128) and q.element_size() <= 4


def gca(q, k, v, w, idx, chunk, n_keys=None, sink=False, scale=None, plan=None, kernel='auto'):
    """Grouped cross-attention (see gca_reference): chunk n of q attends to chunks idx[n] of k, v.

        q        (B, N chunk, H, D)
        k, v     (B, M chunk, Hkv, D)   dtype of q; head h of q uses head h // (H / Hkv)
        w        (B, N, K) fp32         weights of the chunks; their gradient trains the retriever
        idx      (B, N, K) integers     chunk numbers in 0 ... M - 1, -1 for an unused slot
        n_keys   only the first n_keys keys of each chunk are used (default: all)
        sink     adds a key with score 0 and value 0 to each softmax
        scale    of the scores (default: 1 / sqrt(D))
        plan     gca_plan(idx, M), for the backward pass; made here if None
        kernel   'triton', 'torch', or 'auto': Triton on a GPU where it can run, else PyTorch

    Returns o like q, 0 for a chunk of queries whose slots are all unused. Raises
    NotImplementedError if kernel='triton' cannot run. Deterministic, except 'torch' on a GPU."""
    M = k.size(1) // chunk
    D = q.size(3)
    assert k.shape == v.shape and w.shape == idx.shape
    assert len(q) == len(k) == len(idx)
    assert q.size(1) == idx.size(1) * chunk
    assert k.size(1) == M * chunk
    assert q.size(2) % k.size(2) == 0
    assert q.size(3) == k.size(3)
    assert kernel in ('auto', 'triton', 'torch'), kernel

    # kernel='auto' becomes 'torch' or 'triton'
    can_run = triton_can_run(q, chunk)
    if kernel == 'triton' and not can_run:
        raise NotImplementedError(
            "kernel='triton' cannot run: it needs a GPU (NVIDIA: from the A100 on), the package "
            f'triton, 16 or 32 bits (here {q.dtype}), head size 16 to 128 (here {D}), chunk 16, '
            f'32, 64 or 128 (here {chunk}), and chunk x max(head size, 64) numbers in 16 KiB. '
            "kernel='torch' can.")
    if kernel == 'auto':
        kernel = 'triton' if can_run and q.is_cuda else 'torch'

    # without slots or chunks o is 0
    if M == 0 or idx.numel() == 0:
        return torch.zeros_like(q)

    # defaults
    if n_keys is None:
        n_keys = chunk
    if scale is None:
        scale = D ** -0.5
    assert 1 <= n_keys <= chunk

    # PyTorch: the definition
    if kernel == 'torch':
        return gca_blocks(q, k, v, w, idx, chunk, n_keys, sink, scale)

    # Triton: the head size is a power of 2, tensors are contiguous
    width = 2 ** (D - 1).bit_length()
    if width > D:
        q, k, v = (F.pad(x, (0, width - D)) for x in (q, k, v))
    if plan is None and torch.is_grad_enabled():
        plan = gca_plan(idx, M)
    assert plan is None or plan[-1].shape == (len(k), M), plan[-1].shape
    if plan is None:                                            # there is no backward pass
        plan = [idx.new_empty(0, dtype=torch.int32)] * 3
    tensors = [x.contiguous() for x in (q, k, v, w.float(), idx.int())]
    o = gca_forward(*tensors, *plan, chunk, n_keys, sink, scale)
    return o[..., :D]


# --------------------------------------------------------------------------------------------------
# comparison and benchmark
def example(dtype, B, N, S, K, H=4, D=64):
    """Random q, k, v, dO, w and idx, of N chunks"""
    idx = torch.rand(B, N, N).topk(K).indices
    q, k, v, do = torch.randn(4, B, N * S, H, D, dtype=dtype)
    w = torch.randn(B, N, K).softmax(2)
    return q, k, v, do, w, idx.int()


def output_and_gradients(function, inputs, do, *args, **kwargs):
    """-> o of a function of q, k, v, w and more, and the gradients dq, dk, dv, dw"""
    inputs = [x.detach().requires_grad_() for x in inputs]
    o = function(*inputs, *args, **kwargs)
    gradients = torch.autograd.grad(o, inputs, do.to(o.dtype))
    return o, *gradients


def compare(dtype, S=64):
    """Prints the largest errors against fp64, relative to the largest value."""
    q, k, v, do, w, idx = example(dtype, B=2, N=9, S=S, K=3)
    inputs = q, k, v, w
    in_fp64 = [x.double() for x in inputs]
    exact = output_and_gradients(gca_reference, in_fp64, do, idx, S)
    for kernel in ['torch', 'triton'] if triton_can_run(q, S) else ['torch']:
        results = output_and_gradients(gca, inputs, do, idx, S, kernel=kernel)
        line = f'{kernel:7}{str(dtype)[6:]:9}'
        for a, b in zip(results, exact):
            line += f'{(a - b).abs().max() / b.abs().max():10.1e}'
        print(line)


def benchmark(**sizes):
    """Prints times of GCA and of full causal attention (SDPA) on a GPU, in bf16."""
    from triton.testing import do_bench
    *inputs, do, w, idx = example(torch.bfloat16, **sizes)
    for x in inputs:
        x.requires_grad_()
    heads = [x.transpose(1, 2) for x in inputs]                 # (B, H, T, D)
    functions = {
        'gca': lambda: gca(*inputs, w, idx, sizes['S']),
        'sdpa': lambda: F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)}

    print(f'\n{torch.cuda.get_device_name()}, {sizes}, bfloat16')
    for name, attention in functions.items():
        forward = do_bench(attention)
        both = do_bench(lambda: torch.autograd.grad(attention(), inputs, do))
        print(f'{name:7} forward {forward:8.2f} ms, with backward {both:8.2f} ms')


if __name__ == '__main__':
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()             # if not, TRITON_INTERPRET=1 adds the kernels
    torch.set_default_device('cuda' if has_gpu else 'cpu')
    print('Largest errors compared with fp64, relative to the largest value')
    print(f'kernel dtype {"o":>13}{"dq":>10}{"dk":>10}{"dv":>10}{"dw":>10}')
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        compare(dtype)
    if has_gpu:
        benchmark(B=8, N=256, S=64, K=8, H=12, D=64)
