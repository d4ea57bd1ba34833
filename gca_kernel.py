"""
Grouped cross-attention (GCA), the attention of DRT over retrieved chunks.

    Xiang Hu, Zhihao Teng, Jun Zhao, Wei Wu and Kewei Tu, "Efficient Length-Generalizable Attention
    via Causal Retrieval for Long-Context Language Modeling", ICML 2025, arXiv:2410.01651

Each chunk of queries attends to K retrieved chunks of keys, to each with a softmax of its own. The
outputs are summed with the retriever's weights, so the loss of the language model trains the
retriever. The PyTorch definition gathers K copies of keys and values. The Triton kernels load each
chunk from where it is stored; their backward pass uses an inverse index and no atomics.

Where the paper is in this file
    Eq. 2        O = Σ_k w_k O_k                            gca_reference, forward_kernel
    Eq. 3        O_k = softmax(Q K_kᵀ / sqrt(D)) V_k        gca_reference, chunk_softmax
    App. A.2     Algorithms 1 and 2                         forward_kernel; dq_kernel, dkdv_kernel

Letters used in the shape comments
    B sequences    N chunks of queries    M chunks of keys    S tokens per chunk    K retrieved
    H heads        Hkv heads of keys and values, each for G = H / Hkv heads of q    D head size

Where we differ from the paper, and why
    Algorithm 1 loops over blocks of a chunk's keys; here a whole chunk fits on the chip. O_k and L
    are not saved: Algorithm 2's rowsum(dO ∘ O_k) equals rowsum(P ∘ dP). dQ has its own kernel.

    $ python gca_kernel.py           errors against fp64; on a GPU also times
"""
from __future__ import annotations      # constexpr: Triton is imported later

import functools, importlib.util, os

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# --------------------------------------------------------------------------------------------------
# the definition
SCORES = 2 ** 22        # attention scores of one block of rows; 16 MiB in fp32
HAS_TRITON = importlib.util.find_spec('triton') is not None


def gca_reference(q, k, v, w, idx, chunk, n_keys=None, sink=False, scale=None):
    """The definition of `gca`, with its arguments. Scores and softmax are fp32, or fp64 where q is.

        O_n = Σ_k w_nk softmax(Q_n K_cᵀ · scale) V_c,    c = idx_nk         (DRT, Eq. 2 and 3)"""
    (B, N, K), fp32 = idx.shape, torch.promote_types(q.dtype, torch.float32)
    w = w.masked_fill(idx < 0, 0).view(B, N, 1, 1, 1, K, 1)     # broadcast over Hkv, G, S, n_keys
    idx = idx.clamp(min=0).flatten(1)                           # (B, N K)

    def gather(x):                                  # (B, M S, Hkv, D) -> (B, N, K, n_keys, Hkv, D)
        x = x.unflatten(1, (-1, chunk))[:, :, :n_keys]          # (B, M, n_keys, Hkv, D)
        x = torch.stack([chunks.index_select(0, i) for chunks, i in zip(x, idx)])
        return x.unflatten(1, (N, K))

    with torch.autocast(q.device.type, enabled=False):          # under bf16, scores remain fp32
        heads = q.unflatten(2, (k.size(2), -1)).unflatten(1, (N, chunk))    # (B, N, S, Hkv, G, D)
        k, v = gather(k).to(fp32), gather(v)
        s = torch.einsum('bnshgd, bnkthd -> bnhgskt', heads.to(fp32), k)
        s = s * (scale or q.size(3) ** -0.5)                    # (B, N, Hkv, G, S, K, n_keys)
        if sink:
            s = F.pad(s, (0, 1))                                # one more key, with score 0
        p = s.softmax(-1)[..., :k.size(3)] * w                  # Eq. 3 and w_k of Eq. 2
        o = torch.einsum('bnhgskt, bnkthd -> bnshgd', p.to(v.dtype), v)
    return o.reshape(q.shape).to(q.dtype)


def gca_blocks(q, k, v, w, idx, chunk, n_keys, sink, scale):
    """gca_reference in blocks of rows (chunks of queries). Several blocks are checkpointed: only
    the scores of one are in memory at a time. Gradients of k, v are summed over blocks in fp32."""
    n = max(1, SCORES // (len(q) * chunk * q.size(2) * idx.size(2) * n_keys))
    if n >= idx.size(1):
        return gca_reference(q, k, v, w, idx, chunk, n_keys, sink, scale)
    k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
    blocks = zip(q.split(n * chunk, 1), w.split(n, 1), idx.split(n, 1))
    return torch.cat([checkpoint(gca_reference, q, k, v, w, idx, chunk, n_keys, sink, scale,
                                 use_reentrant=False) for q, w, idx in blocks], dim=1)


# --------------------------------------------------------------------------------------------------
# the Triton kernels (plain functions until `kernels` imports Triton), an operator with autograd
def load_chunk(X, c, Hkv, S: constexpr, D: constexpr):
    """Keys or values of chunk c, (S, D). Zeros if c is -1, by a mask: a branch is not pipelined."""
    rows = tl.arange(0, S)[:, None]
    tile = rows * (Hkv * D) + tl.arange(0, D)[None, :]
    used = rows < tl.where(c >= 0, S, 0)
    return tl.load(X + c.to(tl.int64) * (S * Hkv * D) + tile, mask=used, other=0.0)


def chunk_softmax(q, k, scale, S: constexpr, KEYS: constexpr, SINK: constexpr):
    """A chunk's softmax is p / l: p = 2^(s - m) (S, S), m = rowmax(s), l = rowsum(p) + sink."""
    s = tl.dot(q, tl.trans(k), input_precision='ieee') * (scale * 1.4426950408889634)   # log2(e)
    s = tl.where(tl.arange(0, S)[None, :] < KEYS, s, float('-inf'))
    m = tl.max(s, axis=1)
    p = tl.exp2(s - m[:, None])
    l = tl.sum(p, axis=1) + (tl.exp2(-m) if SINK else 0.0)    # sink: score 0; if l = inf, p / l = 0
    return p, m, l


def forward_kernel(Q, K, V, W, IDX, O, H, N, M, TOPK, scale, S: constexpr,
                   KEYS: constexpr, D: constexpr, G: constexpr, SINK: constexpr):
    """O = Σ_k w_k softmax(Q K_kᵀ · scale) V_k                     (DRT, Eq. 2 and 3; Algorithm 1)

    Grid      (N, B H): one program for the S queries of one chunk in one head
    Q, O      (B, N S, H, D)     contiguous, as all tensors
    K, V      (B, M S, Hkv, D)   a program loads the chunks that it needs
    W, IDX    (B, N, TOPK)       fp32 weights and int32 chunk numbers, -1 for an unused slot
    On chip   q, k, v, acc: (S, D) each; scores (S, S)
    Saved     nothing; the backward pass computes the scores again
    Numerics  products in the input dtype with fp32 accumulation, softmax in fp32"""
    Hkv, b, h = H // G, tl.program_id(1).to(tl.int64) // H, tl.program_id(1) % H
    n = b * N + tl.program_id(0)                                            # of all B N chunks
    first = (n * S * H + h) * D                                             # in Q
    head = (b * M * S * Hkv + h // G) * D                                   # in K and V
    tile = tl.arange(0, S)[:, None] * (H * D) + tl.arange(0, D)[None, :]    # (S, D) of Q and O
    q = tl.load(Q + first + tile)
    acc = tl.zeros([S, D], dtype=tl.float32)
    for slot in range(TOPK):
        c = tl.load(IDX + n * TOPK + slot)
        w = tl.load(W + n * TOPK + slot, mask=c >= 0, other=0.0)
        k = load_chunk(K + head, c, Hkv, S, D)
        v = load_chunk(V + head, c, Hkv, S, D)
        p, m, l = chunk_softmax(q, k, scale, S, KEYS, SINK)
        p = p * (w / l)[:, None]                                            # (S, S)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision='ieee')
    tl.store(O + first + tile, acc.to(O.dtype.element_ty))


def dq_kernel(Q, K, V, W, IDX, DO, DQ, DW, LSE, DELTA, H, N, M, TOPK, scale, S: constexpr,
              KEYS: constexpr, D: constexpr, G: constexpr, SINK: constexpr):
    """dQ = scale Σ_k dS_k K_k,    dw_k = Σ_rows δ_k                             (DRT, Algorithm 2)
    dS_k = w_k P_k ∘ (dP_k - δ_k),  dP_k = dO V_kᵀ,  δ_k = rowsum(P_k ∘ dP_k),  P_k the softmax

    Grid, Q, K, V, W, IDX as in forward_kernel; DO and DQ like Q
    DW          (B, N, TOPK, H)     fp32, dw of one head
    LSE, DELTA  (B, N, TOPK, H, S)  fp32, for dkdv_kernel: log2 of the softmax's denominator; δ"""
    Hkv, b, h = H // G, tl.program_id(1).to(tl.int64) // H, tl.program_id(1) % H
    n = b * N + tl.program_id(0)                                            # of all B N chunks
    first = (n * S * H + h) * D                                             # in Q
    head = (b * M * S * Hkv + h // G) * D                                   # in K and V
    rows = tl.arange(0, S)
    tile = rows[:, None] * (H * D) + tl.arange(0, D)[None, :]               # (S, D) of Q and DO
    q, do = tl.load(Q + first + tile), tl.load(DO + first + tile)
    dq = tl.zeros([S, D], dtype=tl.float32)
    for slot in range(TOPK):
        c = tl.load(IDX + n * TOPK + slot)
        w = tl.load(W + n * TOPK + slot, mask=c >= 0, other=0.0)
        k = load_chunk(K + head, c, Hkv, S, D)
        v = load_chunk(V + head, c, Hkv, S, D)
        p, m, l = chunk_softmax(q, k, scale, S, KEYS, SINK)
        p = p / l[:, None]                                                  # (S, S)
        dp = tl.dot(do, tl.trans(v), input_precision='ieee')                # (S, S)
        delta = tl.sum(p * dp, axis=1)                                      # (S,) zeros if c is -1
        ds = p * (dp - delta[:, None]) * w
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision='ieee')
        e = (n * TOPK + slot) * H + h
        tl.store(LSE + e * S + rows, m + tl.log2(l))
        tl.store(DELTA + e * S + rows, delta)
        tl.store(DW + e, tl.sum(delta, axis=0))
    tl.store(DQ + first + tile, (dq * scale).to(DQ.dtype.element_ty))


def dkdv_kernel(Q, K, V, W, DO, DK, DV, LSE, DELTA, ENTRIES, START, ORDER, H, N, M, TOPK, scale,
                S: constexpr, KEYS: constexpr, D: constexpr, G: constexpr,
                BLOCK: constexpr):
    """dV = Σ w Pᵀ dO,    dK = scale Σ dSᵀ Q,    over all (n, slot) of the chunk (DRT, Algorithm 2)

    Grid      (M, B Hkv): one program for one chunk in one head of keys, most retrieved chunks first
    DK, DV    (B, M S, Hkv, D)   zeros for keys that no query attends to
    ENTRIES, START, ORDER        of gca_plan; other arguments as in dq_kernel
    On chip   k, v, dk, dv: (S, D) each; transposed scores (S, BLOCK), for BLOCK queries at a time
    Numerics  sums in fp32, in the order of ENTRIES: no atomics, the same bits every time"""
    Hkv, parts = H // G, S // BLOCK
    b, hkv = tl.program_id(1).to(tl.int64) // Hkv, tl.program_id(1) % Hkv
    c = tl.load(ORDER + b * M + tl.program_id(0)).to(tl.int64)
    start = tl.load(START + b * (M + 1) + c)
    end = tl.load(START + b * (M + 1) + c + 1)
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, D)[None, :]
    keys = tl.arange(0, S)[:, None]
    chunk = ((b * M + c) * S * Hkv + hkv) * D
    tile = keys * (Hkv * D) + cols                                          # (S, D) of K and V
    k, v = tl.load(K + chunk + tile), tl.load(V + chunk + tile)
    dk = tl.zeros([S, D], dtype=tl.float32)
    dv = tl.zeros([S, D], dtype=tl.float32)
    base = b * N * TOPK                                                     # of a text's entries
    for g in range(G):
        h = hkv * G + g
        for i in range(start * parts, end * parts):
            e = base + tl.load(ENTRIES + base + i // parts)                 # (b N + n) TOPK + slot
            row = i % parts * BLOCK + rows                                  # (BLOCK,) of chunk n
            tile_q = (e // TOPK * S * H + h) * D + row[:, None] * (H * D) + cols    # (BLOCK, D)
            q, do = tl.load(Q + tile_q), tl.load(DO + tile_q)
            w = tl.load(W + e)
            saved = (e * H + h) * S + row
            lse, delta = tl.load(LSE + saved), tl.load(DELTA + saved)       # (BLOCK,)
            s = tl.dot(k, tl.trans(q), input_precision='ieee') * (scale * 1.4426950408889634)
            p = tl.exp2(s - lse[None, :]) * w                               # (S, BLOCK)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision='ieee')
            dp = tl.dot(v, tl.trans(do), input_precision='ieee')            # (S, BLOCK)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision='ieee')
    dk = tl.where(keys < KEYS, dk * scale, 0.0)
    dv = tl.where(keys < KEYS, dv, 0.0)
    tl.store(DK + chunk + tile, dk.to(DK.dtype.element_ty))
    tl.store(DV + chunk + tile, dv.to(DV.dtype.element_ty))


@functools.cache
def kernels():
    """The kernels as Triton's JITFunctions; each is compiled when it is first launched."""
    global tl, constexpr, load_chunk, chunk_softmax     # looked up by the kernels in this module
    import triton
    import triton.language as tl
    from triton.language import constexpr
    load_chunk, chunk_softmax = triton.jit(load_chunk), triton.jit(chunk_softmax)
    return [triton.jit(kernel) for kernel in (forward_kernel, dq_kernel, dkdv_kernel)]


def options(q, k, chunk, n_keys):
    """Constants and launch options of all kernels, and BLOCK of dkdv_kernel. Chosen by compiling
    for sm_80 and sm_90: for S = 64 in 16 bits no register is spilled, loads overlap products."""
    D, tile = q.size(3), chunk * q.size(3) * q.element_size()       # bytes of k or v in a stage
    sizes = dict(S=chunk, KEYS=n_keys, D=D, G=q.size(2) // k.size(2),
                 num_warps=4 if chunk <= 64 and chunk * D <= 64 * 64 else 8,
                 num_stages=3 if tile <= 12 * 1024 else 2)
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)
    return sizes, min(chunk, 64 if hopper else 32)


@torch.library.custom_op('nanorlm::gca', mutates_args=())
def gca_forward(q: Tensor, k: Tensor, v: Tensor, w: Tensor, idx: Tensor, entries: Tensor,
                start: Tensor, order: Tensor, chunk: int, n_keys: int, sink: bool,
                scale: float) -> Tensor:
    (B, N, K), H, M = idx.shape, q.size(2), k.size(1) // chunk
    o = torch.empty_like(q)
    sizes, _ = options(q, k, chunk, n_keys)
    with torch.cuda.device_of(q):
        kernels()[0][N, B * H](q, k, v, w, idx, o, H, N, M, K, scale, SINK=sink, **sizes)
    return o


@torch.library.custom_op('nanorlm::gca_backward', mutates_args=())
def gca_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, idx: Tensor,
                 entries: Tensor, start: Tensor, order: Tensor, chunk: int, n_keys: int,
                 sink: bool, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (B, N, K), H, M = idx.shape, q.size(2), k.size(1) // chunk
    sizes, block = options(q, k, chunk, n_keys)
    do = do.contiguous()
    dq, dk, dv, dw = *map(torch.empty_like, (q, k, v)), w.new_empty(B, N, K, H)
    lse, delta = w.new_empty(2, B, N, K, H, chunk)
    with torch.cuda.device_of(q):
        kernels()[1][N, B * H](q, k, v, w, idx, do, dq, dw, lse, delta, H, N, M, K, scale,
                               SINK=sink, **sizes)
        kernels()[2][M, B * k.size(2)](q, k, v, w, do, dk, dv, lse, delta, entries, start, order,
                                       H, N, M, K, scale, BLOCK=block, **sizes)
    return dq, dk, dv, dw.sum(3)


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def backward(ctx, do):
    return *gca_backward(do, *ctx.saved_tensors, *ctx.options), *[None] * 8


gca_forward.register_fake(lambda q, *args: torch.empty_like(q))
gca_backward.register_fake(lambda do, *args: tuple(map(torch.empty_like, args[:4])))
gca_forward.register_autograd(backward, setup_context=save)


# --------------------------------------------------------------------------------------------------
# the public functions
def gca_plan(idx, n_chunks):
    """The inverse of idx (B, N, K), for the backward pass

        entries   (B, N K) int32     n K + slot, sorted by chunk, then by number; unused slots last
        start     (B, M + 1) int32   those of chunk c are entries[start[c]:start[c + 1]]
        order     (B, M) int32       chunks, most retrieved first, because they take longest

    >>> [x.tolist() for x in gca_plan(torch.tensor([[[2, 0], [2, -1]]]), n_chunks=3)]
    [[[1, 0, 2, 3]], [[0, 1, 1, 3]], [[2, 0, 1]]]"""
    chunk = idx.masked_fill(idx < 0, n_chunks).flatten(1)                       # (B, N K)
    chunk, entries = chunk.sort(stable=True)
    edges = torch.arange(n_chunks + 1, device=idx.device, dtype=idx.dtype).repeat(len(idx), 1)
    start = torch.searchsorted(chunk, edges, out_int32=True)                    # (B, M + 1)
    order = start.diff().argsort(descending=True, stable=True)                  # (B, M)
    return entries.int(), start, order.int()


def why_not_triton(q, chunk):
    """Why the kernels cannot run on q (B, T, H, D) with such chunks; '' if they can."""
    D, size = q.size(3), q.element_size()
    fits = chunk in (16, 32, 64, 128) and 16 <= D <= 128 and chunk * max(D, 64) * size <= 2 ** 14
    if not HAS_TRITON:
        return 'the package triton is not installed'
    if not q.is_cuda and os.environ.get('TRITON_INTERPRET') != '1':
        return f'q is on {q.device}, not on a GPU'
    if not fits or size > 4 or not q.is_cuda and q.dtype == torch.bfloat16:
        return f'{q.dtype}, chunk {chunk}, head size {D}: they need 16 or 32 bits (not bf16 ' \
               'on a CPU), heads of 16 to 128, chunks of 16, 32, 64, in 16 bits 128, up to 16 KiB'
    return ''


def gca(q, k, v, w, idx, chunk, n_keys=None, sink=False, scale=None, plan=None, kernel='auto'):
    """Grouped cross-attention (see gca_reference): chunk n of q attends to chunks idx[n] of k, v.

        q        (B, N chunk, H, D)
        k, v     (B, M chunk, Hkv, D)   dtype of q; head h of q uses head h // (H / Hkv)
        w        (B, N, K) fp32         weights of the chunks; their gradient trains the retriever
        idx      (B, N, K) int32        chunk numbers in 0 ... M - 1, -1 for an unused slot
        n_keys   only the first n_keys keys of each chunk are used (default: all)
        sink     adds a key with score 0 and value 0 to each softmax
        scale    of the scores, not 0 (default: 1 / sqrt(D))
        plan     gca_plan(idx, M); made here if None
        kernel   'triton', 'torch', or 'auto': Triton on a GPU where it can run, else PyTorch

    Returns o like q, 0 for a chunk of queries whose slots are all unused. Raises
    NotImplementedError if kernel='triton' cannot run. Deterministic, except 'torch' on a GPU."""
    M, D, reason = k.size(1) // chunk, q.size(3), why_not_triton(q, chunk)
    assert k.shape == v.shape and w.shape == idx.shape and q.size(1) == idx.size(1) * chunk
    assert k.size(1) == M * chunk and q.size(2) % k.size(2) == 0
    if kernel == 'triton' and reason:
        raise NotImplementedError(f"kernel='triton' cannot run: {reason}. kernel='torch' can.")
    if not M * idx.numel():
        return torch.zeros_like(q)
    n_keys, scale = n_keys or chunk, scale or D ** -0.5
    if kernel == 'torch' or kernel == 'auto' and (reason or not q.is_cuda):
        return gca_blocks(q, k, v, w, idx, chunk, n_keys, sink, scale)
    if D & (D - 1):                                     # the width of a tile is a power of 2
        q, k, v = (F.pad(x, (0, 2 ** D.bit_length() - D)) for x in (q, k, v))
    q, k, v, w, idx = (x.contiguous() for x in (q, k, v, w.float(), idx.int()))
    plan = plan or gca_plan(idx, M)
    return gca_forward(q, k, v, w, idx, *plan, chunk, n_keys, sink, scale)[..., :D]


# --------------------------------------------------------------------------------------------------
# comparison and benchmark
def example(dtype, B, N, S, K, H, D):
    """Random q, k, v, dO, w and idx, of N chunks"""
    idx = torch.rand(B, N, N).topk(K).indices.int()
    return *torch.randn(4, B, N * S, H, D, dtype=dtype), torch.randn(B, N, K).softmax(2), idx


def compare(dtype, S=64):
    """Prints the largest errors against fp64, relative to the largest value."""
    q, k, v, do, w, idx = example(dtype, B=2, N=9, S=S, K=3, H=4, D=64)

    def run(f, *inputs, **options):
        inputs = [x.detach().requires_grad_() for x in inputs]
        o = f(*inputs, idx, S, **options)
        return o, *torch.autograd.grad(o, inputs, do.to(o.dtype))

    exact = run(gca_reference, q.double(), k.double(), v.double(), w.double())
    for kernel in ('torch',) if why_not_triton(q, S) else ('torch', 'triton'):
        found = run(gca, q, k, v, w, kernel=kernel)
        errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, exact)]
        print(f'{kernel:7}{str(dtype)[6:]:9}', *(f'{error:9.1e}' for error in errors))


def benchmark(**sizes):
    """Prints times of GCA and of full causal attention (SDPA) on a GPU, in bf16."""
    from triton.testing import do_bench
    *inputs, do, w, idx = example(torch.bfloat16, **sizes)
    q, k, v = inputs = [x.requires_grad_() for x in inputs]
    heads = [x.transpose(1, 2) for x in inputs]         # (B, H, T, D)
    methods = dict(gca=lambda: gca(q, k, v, w, idx, sizes['S']), sdpa=lambda: (
        F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)))
    print(f'\n{torch.cuda.get_device_name()}, {sizes}, bfloat16')
    for name, f in methods.items():
        forward, both = do_bench(f), do_bench(lambda: torch.autograd.grad(f(), inputs, do))
        print(f'{name:7} forward {forward:8.2f} ms, with backward {both:8.2f} ms')


if __name__ == '__main__':
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()            # if not, TRITON_INTERPRET=1 adds the kernels
    print(f'{"largest error":16}', *(f'{name:>9}' for name in ('o', 'dq', 'dk', 'dv', 'dw')))
    torch.set_default_device('cuda' if cuda else 'cpu')
    for dtype in (torch.float32, torch.float16, torch.bfloat16) if cuda else (torch.float32,):
        compare(dtype)
    if cuda:
        benchmark(B=8, N=256, S=64, K=8, H=12, D=64)
