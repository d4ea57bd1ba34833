"""
gca_kernel.py against a double loop, in PyTorch and in Triton: its interpreter where there is no GPU.

    $ python -m pytest tests/test_gca_kernel.py
    $ python -m pytest tests/test_gca_kernel.py -m gpu          the kernels on a GPU, in bf16 too
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gca_kernel
from gca_kernel import gca, gca_plan, gca_reference

HAS_TRITON, HAS_GPU = gca_kernel.HAS_TRITON, torch.cuda.is_available()
TRITON = tuple(map(int, version('triton').split('.')[:2])) if HAS_TRITON else (0, 0)
if HAS_TRITON and not HAS_GPU:
    with mock.patch.dict(os.environ, TRITON_INTERPRET='1'):     # its own functions (tl.sum) ask when they are imported,
        importlib.import_module('triton.language')              # ours when they run: the fixture. No other test sees it

@pytest.fixture(autouse=True, scope='module')
def one_thread():
    """The examples are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

@pytest.fixture(params=['torch', 'triton'])
def kernel(request, monkeypatch):
    if request.param == 'triton':
        if not HAS_TRITON or HAS_GPU:
            pytest.skip('the interpreter needs Triton and no GPU; on a GPU run -m gpu')
        if TRITON < (3, 9) and np.lib.NumpyVersion(np.__version__) >= '2.4.0':
            pytest.skip('the interpreter of Triton before 3.9 cannot loop with numpy 2.4')
        monkeypatch.setenv('TRITON_INTERPRET', '1')
    return request.param

def double_loop(q, k, v, w, idx, S, n_keys=None, sink=False, scale=None):
    """Eq. 2 and 3 for each token of each head by itself, one chunk after the other, by the plain formula of softmax."""
    B, T, H, D = q.shape
    G, n = H // k.size(2), n_keys or S
    scale = D ** -0.5 if scale is None else scale
    by_chunk = lambda x: [[c.unbind(1) for c in sequence] for sequence in x.unflatten(1, (-1, S))[:, :, :n]]
    k, v, w, out = by_chunk(k), by_chunk(v), [[n.unbind() for n in sequence] for sequence in w], []       # k[b][c][h] (n, D)
    for b, sequence in enumerate(q):
        for t, token in enumerate(sequence):
            for h, query in enumerate(token):
                o = 0 * query
                for slot, c in enumerate(idx[b, t // S].tolist()):
                    if c >= 0:
                        e = torch.exp(k[b][c][h // G] @ query * scale)                                    # (n,)
                        o = o + w[b][t // S][slot] * (e @ v[b][c][h // G]) / (e.sum() + (1 if sink else 0))
                out.append(o)
    return torch.stack(out).view(B, T, H, D)

def example(B=2, N=4, M=5, S=16, K=3, H=2, Hkv=2, D=16, dtype=torch.float64, device='cpu', seed=0, empty=True):
    """Random inputs that `dtype` holds exactly, as fp64; half of the first rows' slots and the whole second row are empty."""
    torch.manual_seed(seed)
    q, do = (torch.randn(B, N * S, H, D, device=device).to(dtype).double() for _ in range(2))
    k, v = (torch.randn(B, M * S, Hkv, D, device=device).to(dtype).double() for _ in range(2))
    w = torch.randn(B, N, K, device=device).softmax(2).double()
    idx = torch.randint(M, (B, N, K), device=device, dtype=torch.int32)
    if empty:
        idx[:, 0, ::2] = -1
        idx[:, 1] = -1
    return q, k, v, w, idx, do

def run(f, q, k, v, w, idx, do, S, dtype=None, **options):
    """o and the four gradients; q, k, v and do in dtype, w in fp32 where dtype is not fp64"""
    dtype = dtype or q.dtype
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    inputs.append(w.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_())
    o = f(*inputs, idx, S, **options)
    return o, *torch.autograd.grad(o, inputs, do.to(o.dtype))

def assert_close(found, exact, tolerance, dw_tolerance=None):
    """Errors are measured against the largest value; that of dw, which is summed in fp32, has a bound of its own."""
    for name, a, b in zip(('o', 'dq', 'dk', 'dv', 'dw'), found, exact):
        bound = (dw_tolerance or tolerance if name == 'dw' else tolerance) * max(1, b.abs().max().item())
        assert a.shape == b.shape
        assert (a - b).abs().max().item() <= bound, name            # a NaN fails too

CASES = {
    'as in drt.py':               dict(B=2, S=32, D=64, K=4, n_keys=31),
    'one slot':                   dict(K=1),
    'eight slots, few chunks':    dict(K=8, M=2),
    'more queries than chunks':   dict(N=6, M=1),
    'wide chunks':                dict(S=64, M=3),
    'wide heads':                 dict(D=128, N=2),
    'wide heads and chunks':      dict(S=64, D=64, N=2, K=8, M=9, H=1, Hkv=1),
    'a sink':                     dict(sink=True),
    'a sink and fewer keys':      dict(sink=True, n_keys=15),
    'one key':                    dict(n_keys=1),
    'one key and a sink':         dict(n_keys=1, sink=True),
    'two heads share keys':       dict(B=2, H=4, Hkv=2, M=3),
    'all heads share keys, sink': dict(H=3, Hkv=1, sink=True, n_keys=11),
    'odd width':                  dict(D=24),
    'another scale':              dict(scale=0.7),
    'scale below zero':           dict(scale=-0.3, sink=True),
}

def split(case):
    """The sizes of an example, and what gca is told."""
    told = {x: case[x] for x in ('n_keys', 'sink', 'scale') if x in case}
    return {x: y for x, y in case.items() if x not in told}, told

# ----------------------------------------------------------------------------------------------------------------------
# What it should compute

@functools.cache
def exactly(name):
    sizes, options = split(CASES[name])
    *inputs, idx, do = example(**dict(B=1, N=3) | sizes, dtype=torch.float32)
    S = sizes.get('S', 16)
    return inputs, idx, do, S, options, run(double_loop, *inputs, idx, do, S, **options)

@pytest.mark.parametrize('name', CASES)
def test_equals_the_double_loop(name, kernel):
    """Forward and backward: a few roundings of fp64, for the reference too, and of fp32."""
    inputs, idx, do, S, options, exact = exactly(name)
    if kernel == 'torch':
        assert_close(run(gca_reference, *inputs, idx, do, S, **options), exact, 1e-12)
        assert_close(run(gca, *inputs, idx, do, S, kernel=kernel, **options), exact, 1e-12)
    assert_close(run(gca, *inputs, idx, do, S, torch.float32, kernel=kernel, **options), exact, 2e-6, 1e-5)

def test_a_plan_made_before_and_int64(kernel):
    inputs, idx, do, S, options, exact = exactly('two heads share keys')
    for numbers in (idx, idx.long()):
        found = run(gca, *inputs, numbers, do, S, torch.float32, kernel=kernel, plan=gca_plan(numbers, 3))
        assert_close(found, exact, 2e-6, 1e-5)

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_equals_the_reference_in_half_precision(dtype, kernel):
    """Three roundings of 11 or 8 bits: of P, of dS and of the result. dw comes from fp32 alone."""
    if kernel == 'triton' and dtype == torch.bfloat16:
        pytest.skip('the interpreter multiplies the bits of bf16 as if they were numbers; see the GPU test')
    *inputs, idx, do = example(B=1, N=3, M=3, S=32, D=64, K=4, H=4, dtype=dtype)
    exact = run(gca_reference, *inputs, idx, do, 32, sink=True, n_keys=31)
    unit = torch.finfo(dtype).eps
    found = run(gca, *inputs, idx, do, 32, dtype, kernel=kernel, sink=True, n_keys=31)
    assert found[0].dtype == found[2].dtype == dtype and found[4].dtype == torch.float32
    assert_close(found, exact, 1.5 * unit, 1e-5)

def test_gradcheck():
    """The written-out backward pass against differences, in fp64, with empty slots, duplicates, heads that share and a sink."""
    *inputs, idx, _ = example(B=1, N=3, M=2, S=3, K=3, H=2, Hkv=1, D=4)
    idx[0, 2] = torch.tensor([1, 1, 0])
    inputs = [x.requires_grad_() for x in inputs]
    for options in (dict(), dict(n_keys=2, sink=True)):
        assert torch.autograd.gradcheck(lambda *x: gca(*x, idx, 3, **options), inputs)

@pytest.mark.parametrize('S', [1, 3, 5, 24])
def test_any_chunk_length_in_pytorch(S):
    *inputs, idx, do = example(S=S, D=5, K=2)
    assert_close(run(gca, *inputs, idx, do, S), run(double_loop, *inputs, idx, do, S), 1e-12)

def test_blocks_of_any_size_are_the_same(monkeypatch):
    """The PyTorch path works on blocks of rows; here on one row at a time, on three, and on all."""
    *inputs, idx, do = example(B=2, N=5, H=4, Hkv=2)
    exact = run(gca, *inputs, idx, do, 16)
    for rows in (0, 3):
        monkeypatch.setitem(gca_kernel.SCORES, 'cpu', rows * 4 * 16 * 3 * 16)
        assert_close(run(gca, *inputs, idx, do, 16), exact, 1e-13)

def test_views(kernel):
    """q, k and v as a Linear for all of them leaves them, as slices, and with heads before tokens; also an expanded gradient."""
    B, N, M, S, H, D = 2, 3, 4, 16, 2, 16
    *_, w, idx, _ = example(B, N, M, S, 2, H, H, D, torch.float32)
    w = w.float()
    qkv, kv = torch.randn(B, (N + 1) * S, 3, H, D), torch.randn(B, M * S, 2, H, D)
    qs = [qkv[:, S:, 0], qkv.mT.contiguous().mT[:, :-S, 1], qkv[:, :N * S, 2].transpose(1, 2).contiguous().transpose(1, 2)]
    k, v = kv[:, :, 0], kv[:, :, 1].transpose(1, 2).contiguous().transpose(1, 2)
    for q in qs:
        assert not (q.is_contiguous() or k.is_contiguous() or v.is_contiguous())
        inputs = [x.detach().requires_grad_() for x in (q, k, v, w)]
        assert inputs[0].stride() == q.stride()
        found = torch.autograd.grad(gca(*inputs, idx, S, kernel=kernel).sum(), inputs)          # of a sum: expanded
        copies = [x.detach().contiguous().requires_grad_() for x in (q, k, v, w)]
        exact = torch.autograd.grad(gca_reference(*copies, idx, S).sum(), copies)
        assert_close(found, exact, 5e-6)

def test_under_autocast_what_is_fp32_stays_fp32(kernel):
    *inputs, idx, do = example()
    plain = run(gca, *inputs, idx, do, 16, torch.float32, kernel=kernel)
    with torch.autocast('cpu', torch.bfloat16):
        inside = run(gca, *inputs, idx, do, 16, torch.float32, kernel=kernel)
    assert all(torch.equal(a, b) for a, b in zip(inside, plain))

# ----------------------------------------------------------------------------------------------------------------------
# Laws

def heads_first(x):
    return x.transpose(1, 2)

def test_one_chunk_of_weight_one_is_ordinary_attention(kernel):
    """K = 1, w = 1: each chunk of queries attends to one chunk of keys, what PyTorch's attention computes."""
    q, k, v, w, _, do = example(K=1, N=5, empty=False)
    idx = torch.tensor([3, 0, 4, 4, 1], dtype=torch.int32).expand(2, -1)[..., None]
    def sdpa(q, k, v, w, idx, S):
        pick = lambda x: x.unflatten(1, (-1, S))[:, idx[0, :, 0].long()].flatten(0, 1)
        o = F.scaled_dot_product_attention(*(heads_first(x) for x in (q.unflatten(1, (-1, S)).flatten(0, 1), pick(k), pick(v))))
        return heads_first(o).reshape(q.shape) * w.repeat_interleave(S, 1)[..., None]
    exact = run(sdpa, q, k, v, torch.ones_like(w), idx, do, 16)
    assert_close(run(gca, q, k, v, torch.ones_like(w), idx, do, 16, torch.float32, kernel=kernel), exact, 2e-6, 1e-5)

def test_a_weight_of_one_leaves_one_chunk(kernel):
    q, k, v, w, idx, do = example(empty=False)
    w = F.one_hot(torch.full((2, 4), 1), 3).double()
    one = run(gca, q, k, v, w[..., 1:2], idx[..., 1:2].contiguous(), do, 16, torch.float32, kernel=kernel)
    all_three = run(gca, q, k, v, w, idx, do, 16, torch.float32, kernel=kernel)
    assert_close(all_three[:4], one[:4], 1e-6)
    assert all_three[4].abs().min() > 0                             # the weights of the others would have changed something

def test_the_same_chunk_in_all_slots_makes_weights_meaningless(kernel):
    """Duplicates: with Σ w = 1 the output is that of one slot, and so is the sum of what reaches the chunk."""
    q, k, v, w, idx, do = example(empty=False)
    idx = idx[..., :1].expand(-1, -1, 3).contiguous()
    one = run(gca, q, k, v, torch.ones_like(w[..., :1]), idx[..., :1].contiguous(), do, 16, torch.float32, kernel=kernel)
    three = run(gca, q, k, v, w, idx, do, 16, torch.float32, kernel=kernel)
    assert_close(three, (*one[:4], one[4].expand(-1, -1, 3)), 2e-6, 1e-5)

def test_the_order_of_the_slots_does_not_matter(kernel):
    q, k, v, w, idx, do = example(K=4)
    order = torch.tensor([2, 0, 3, 1])
    a = run(gca, q, k, v, w, idx, do, 16, torch.float32, kernel=kernel)
    b = run(gca, q, k, v, w[..., order], idx[..., order], do, 16, torch.float32, kernel=kernel)
    assert_close(b, (*a[:4], a[4][..., order]), 2e-6, 1e-5)

def test_a_sink_is_a_key_and_a_value_of_zeros(kernel):
    """Scores far below zero, where the sink has nearly all of the softmax, and far above, where it has nothing: max(m, 0)."""
    q, k, v, w, idx, do = example(dtype=torch.float32)
    last = lambda x: x.view(2, 5, 16, 2, 16)[:, :, 15]              # of every chunk
    for push in (0, -20, 20):
        q[..., 0], k[..., 0] = 20, push                             # in one direction, so that scores move by 0 or ±100
        last(k)[:], last(v)[:] = 0, 0
        o, dq, dk, dv, dw = run(double_loop, q, k, v, w, idx, do, 16)
        last(dk)[:], last(dv)[:] = 0, 0
        found = run(gca, q, k, v, w, idx, do, 16, torch.float32, kernel=kernel, n_keys=15, sink=True)
        assert_close(found, (o, dq, dk, dv, dw), 3e-5)              # at scores of 100 an fp32 score is off by 1e-5

def test_a_chunk_that_nobody_wants_gets_exact_zeros(kernel):
    q, k, v, w, idx, do = example(M=5)
    idx[idx == 3] = 2
    _, _, dk, dv, _ = run(gca, q, k, v, w, idx, do, 16, torch.float32, kernel=kernel, n_keys=13)
    for x in (dk, dv):
        x = x.view(2, 5, 16, 2, 16)
        assert x[:, 3].abs().max() == 0 and x[:, 2, :13].abs().min() > 0
        assert x[:, :, 13:].abs().max() == 0                        # nor do keys that take no part

def test_a_chunk_that_everybody_wants(kernel):
    *inputs, idx, do = example(B=1, N=7, M=6, K=3)
    idx[..., 1] = 5
    exact = run(gca_reference, *inputs, idx, do, 16)
    assert_close(run(gca, *inputs, idx, do, 16, torch.float32, kernel=kernel), exact, 2e-6, 1e-5)

def test_whoever_reads_nothing_gets_exact_zeros(kernel):
    q, k, v, w, idx, do = example()
    o, dq, _, _, dw = run(gca, q, k, v, w, idx, do, 16, torch.float32, kernel=kernel)
    assert o[:, 16:32].abs().max() == 0 and dq[:, 16:32].abs().max() == 0       # row 1
    assert dw[idx < 0].abs().max() == 0 and dw[idx >= 0].abs().min() > 0        # also row 0, half of which is empty
    nothing = torch.full_like(idx, -1)
    assert all(x.abs().max() == 0 for x in run(gca, q, k, v, w, nothing, do, 16, torch.float32, kernel=kernel))

def test_nan_stays_where_it_is(kernel):
    """
    NaN in chunks that nobody reads (0 among them, which -1 must not be mistaken for), in keys that take no part, in the
    weights of empty slots, and in the queries and gradients of a row that reads nothing: all results as with zeros there.
    """
    q, k, v, w, idx, do = (x.float() if x.is_floating_point() else x for x in example(M=5))
    idx[idx == 0] = 1
    idx[idx == 3] = 4
    dirty = [x.clone() for x in (q, k, v, w, do)]
    for x in dirty[1:3]:
        x.view(2, 5, 16, 2, 16)[:, [0, 3]] = torch.nan
        x.view(2, 5, 16, 2, 16)[:, :, 14:] = torch.nan
    dirty[3][idx < 0] = torch.nan
    dirty[0][:, 16:32] = dirty[4][:, 16:32] = torch.nan
    clean = [torch.nan_to_num(x) for x in dirty]
    for sink in (False, True):
        a = run(gca, *dirty[:4], idx, dirty[4], 16, kernel=kernel, n_keys=14, sink=sink)
        b = run(gca, *clean[:4], idx, clean[4], 16, kernel=kernel, n_keys=14, sink=sink)
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        r = gca_reference(*dirty[:4], idx, 16, n_keys=14, sink=sink)
        assert_close([a[0]], [r], 2e-6)

def test_the_same_bits_every_time(kernel):
    *inputs, idx, do = example(N=4, M=3, H=1, Hkv=1)
    a = run(gca, *inputs, idx, do, 16, torch.float32, kernel=kernel)
    b = run(gca, *inputs, idx, do, 16, torch.float32, kernel=kernel)
    assert all(torch.equal(x, y) for x, y in zip(a, b))
    flip = lambda x: x.flip(0)
    c = run(gca, *map(flip, inputs), flip(idx), flip(do), 16, torch.float32, kernel=kernel)
    assert all(torch.equal(x, flip(y)) for x, y in zip(a, c))

@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
def test_the_plan_is_the_inverse(dtype):
    """Every (n, slot) that is used stands once, under its chunk, in rising order; the most wanted chunks come first."""
    for seed in range(20):
        torch.manual_seed(seed)
        B, N, K, M = 2, *torch.randint(1, 9, (3,)).tolist()
        idx = torch.randint(-1, M, (B, N, K), dtype=dtype)
        plan = gca_plan(idx, M)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in plan)
        for b in range(B):
            lists = [plan.entries[b, plan.start[b, c]:plan.start[b, c + 1]].tolist() for c in range(M)]
            assert lists == [[n * K + slot for n in range(N) for slot in range(K) if idx[b, n, slot] == c] for c in range(M)]
            lengths = [len(lists[c]) for c in plan.order[b].tolist()]
            assert lengths == sorted(lengths, reverse=True) and sorted(plan.order[b].tolist()) == list(range(M))

def test_nothing_but_the_inputs_is_saved(kernel):
    q, k, v, w, idx, _ = (x.float() if x.is_floating_point() else x for x in example())
    q, k, v, w = (x.requires_grad_() for x in (q, k, v, w))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        gca(q, k, v, w, idx, 16, kernel=kernel)
    assert sorted(saved) == sorted(x.data_ptr() for x in (q, k, v, w, idx))

def test_compiles_whole(kernel):
    """torch.compile passes through plan, forward and backward without a break, and the numbers are the same."""
    *inputs, idx, do = example()
    def layer(q, k, v, w, idx, S, **options):
        return 2 * gca(2 * q, k, v, w, idx, S, plan=gca_plan(idx, k.size(1) // S), kernel=kernel, n_keys=15, sink=True)
    eager = run(layer, *inputs, idx, do, 16, torch.float32)
    compiled = run(torch.compile(layer, backend='aot_eager', fullgraph=True), *inputs, idx, do, 16, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager))
    inputs = [x.float().requires_grad_() for x in inputs]
    torch.library.opcheck(gca_kernel.gca_op, (*inputs, idx, [], 16, 15, True, 0.25, kernel == 'triton'))

# ----------------------------------------------------------------------------------------------------------------------
# What it refuses, and what it does without

@pytest.mark.parametrize('change, says', [
    (dict(q=torch.zeros(2, 64, 32)), 'should be'), (dict(v=torch.zeros(2, 64, 2, 16)), 'should be'),
    (dict(q=torch.zeros(1, 64, 2, 16)), 'should be'), (dict(q=torch.zeros(2, 65, 2, 16)), '65 queries'),
    (dict(chunk=15), 'chunk = 15'), (dict(chunk=0), 'chunk = 0'), (dict(q=torch.zeros(2, 64, 3, 16)), '3 heads'),
    (dict(q=torch.zeros(2, 64, 2, 16, dtype=torch.bfloat16)), 'dtype'), (dict(q=torch.zeros(2, 64, 2, 16, device='meta')), 'device'),
    (dict(w=torch.zeros(2, 4, 2)), r'\(2, 4, K\)'),
    (dict(idx=torch.zeros(2, 3, 3, dtype=torch.int32), w=torch.zeros(2, 3, 3)), r'\(2, 4, K\)'),
    (dict(idx=torch.zeros(2, 4, 3)), 'int32'), (dict(n_keys=0), 'n_keys = 0'), (dict(n_keys=17), 'n_keys = 17'),
    (dict(plan=gca_plan(torch.zeros(2, 4, 3, dtype=torch.int32), 6)), 'plan'), (dict(kernel='cuda'), 'kernel'),
    (dict(idx=torch.full((2, 4, 3), 5)), 'has a chunk 5'), (dict(kernel='triton'), 'TRITON_INTERPRET|triton is not installed'),
])
def test_what_does_not_fit_is_refused_in_one_line(change, says, monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    q, k, v, w, idx, _ = (x.float() if x.is_floating_point() else x for x in example())
    arguments = dict(q=q, k=k, v=v, w=w, idx=idx, chunk=16) | change
    with pytest.raises(ValueError, match=says) as error:
        gca(**arguments)
    assert '\n' not in str(error.value)

@pytest.mark.parametrize('chunk, D, dtype, says', [
    (24, 16, torch.float32, 'chunk is 24'), (16, 8, torch.float32, 'width 8'), (16, 256, torch.float16, 'width 256'),
    (16, 16, torch.float64, 'float64'), (128, 128, torch.float32, 'do not fit')])
def test_what_the_kernels_cannot_do_is_said(chunk, D, dtype, says, monkeypatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setattr(gca_kernel, 'HAS_TRITON', True)
    x, w, idx = torch.zeros(1, chunk, 1, D, dtype=dtype), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=says):
        gca(x, x, x, w, idx, chunk, kernel='triton')
    assert gca(x, x, x, w, idx, chunk).shape == x.shape             # auto: PyTorch

def test_no_slots_no_chunks_no_rows(kernel):
    q, k, v, w, idx, _ = (x.float() if x.is_floating_point() else x for x in example())
    zeros = torch.zeros_like(q)
    assert torch.equal(gca(q, k, v, w[..., :0], idx[..., :0], 16, kernel=kernel), zeros)
    assert gca(q[:, :0], k, v, w[:, :0], idx[:, :0], 16, kernel=kernel).shape == (2, 0, 2, 16)
    none = [x.clone().requires_grad_() for x in (q, k[:, :0], v[:, :0], w)]
    o = gca(*none, torch.full_like(idx, -1), 16, kernel=kernel)
    assert torch.equal(o, zeros)
    assert all(x.abs().sum() == 0 for x in torch.autograd.grad(o.sum(), none))

def test_importing_it_imports_no_triton_and_touches_no_gpu():
    script = 'import sys, torch, gca_kernel; assert "triton" not in sys.modules and not torch.cuda.is_initialized()'
    subprocess.run([sys.executable, '-c', script], cwd=Path(gca_kernel.__file__).parent, check=True, timeout=60)

def test_without_triton(monkeypatch):
    monkeypatch.setattr(gca_kernel, 'HAS_TRITON', False)
    *inputs, idx, do = example()
    run(gca, *inputs, idx, do, 16)
    with pytest.raises(ValueError, match='not installed'):
        run(gca, *inputs, idx, do, 16, torch.float32, kernel='triton')

# ----------------------------------------------------------------------------------------------------------------------
# The compiled kernels

COMPILE = r'''
import inspect, json, os, re, subprocess, sys, tempfile
import gca_kernel, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, capability, S, D):
    launch, block = gca_kernel.options(capability, S, D, 2)
    constants = dict(S=S, KEYS=S - 1, D=D, COLS=triton.next_power_of_2(D), G=1, SINK=True, BLOCK=block)
    names = list(inspect.signature(kernel.fn).parameters)
    kinds = dict(W='*fp32', DW='*fp32', LSE='*fp32', DELTA='*fp32', IDX='*i32', ENTRIES='*i32', START='*i32', ORDER='*i32',
                 H='i32', N='i32', M='i32', TOPK='i32', scale='fp32')
    kind = lambda n: 'constexpr' if n in constants else kinds.get(n) or ('*bf16' if n.isupper() else 'i32')
    signature = {n: kind(n) for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n][0] == '*' or re.fullmatch('[a-z]+_[bth]', n)]
    aligned = {(i,): [['tt.divisibility', 16]] for i in aligned}
    source = ASTSource(kernel, signature, {(i,): constants[n] for i, n in enumerate(names) if n in constants}, aligned)
    major, minor = capability
    binary = triton.compile(source, target=GPUTarget('cuda', 10 * major + minor, 32), options=launch)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(binary.asm['cubin'])
        file.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin', 'cuobjdump')
        usage = subprocess.run([tool, '-res-usage', file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r'REG:(\d+) STACK:(\d+)', usage).groups())
    return dict(kernel=kernel.fn.__name__, D=D, registers=registers, stack=stack, shared=binary.metadata.shared,
                async_copies='cp.async.c' in binary.asm['ptx'], wgmma='wgmma.mma_async' in binary.asm['ptx'])

capability = tuple(map(int, sys.argv[1:]))
print(json.dumps([compiled(kernel, capability, 64, D) for D in (64, 128) for kernel in gca_kernel.kernels()]))
'''

@pytest.mark.skipif(TRITON < (3, 3), reason='Triton 3.3 changed how one compiles without a GPU')
@pytest.mark.parametrize('capability, shared', [((8, 0), 163), ((9, 0), 227)])
def test_the_kernels_compile_without_spilling(capability, shared, tmp_path):
    """For GPUs that need not be here: no registers spilled, loads in flight behind the products, the right tensor cores."""
    env = {x: y for x, y in os.environ.items() if x != 'TRITON_INTERPRET'} | dict(TRITON_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, '-c', COMPILE, *map(str, capability)], cwd=Path(gca_kernel.__file__).parent, env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for found in json.loads(done.stdout):
        assert found['stack'] == 0 and found['shared'] <= shared * 1024, found
        assert found['async_copies'] and found['wgmma'] == (capability == (9, 0)), found

@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('name', [*CASES, 'the size of the paper', 'the widest'])
def test_on_a_gpu(name, dtype):
    """The compiled kernels, and the PyTorch path there, against the reference in fp64; the kernels twice, to the same bits."""
    large = {'the size of the paper': dict(B=2, N=40, M=40, S=64, K=8, H=12, Hkv=12, D=64, n_keys=63, sink=True),
             'the widest': dict(S=128, D=128, N=3, K=2)}
    sizes, options = split((CASES | large)[name])
    S = sizes.get('S', 16)
    q, k, v, w, idx, do = example(**sizes, dtype=dtype, device='cuda')
    exact = run(gca_reference, q, k, v, w, idx, do, S, **options)
    unit = torch.finfo(dtype).eps
    for kernel in ('auto', 'torch'):
        found = run(gca, q, k, v, w, idx, do, S, dtype, kernel=kernel, **options)
        assert_close(found, exact, 2e-6 if dtype == torch.float32 else 1.5 * unit, 2e-5)
    if gca_kernel.why_not_triton(q.to(dtype), S):
        return                                                      # PyTorch adds up dk and dv in any order there
    found = run(gca, q, k, v, w, idx, do, S, dtype, **options)
    again = run(gca, q, k, v, w, idx, do, S, dtype, plan=gca_plan(idx, k.size(1) // S), **options)
    assert all(torch.equal(a, b) for a, b in zip(found, again))

@pytest.mark.gpu
def test_nan_stays_where_it_is_on_a_gpu():
    q, k, v, w, idx, do = (x.bfloat16() if x.is_floating_point() else x for x in example(M=5, S=64, D=64, device='cuda'))
    idx[idx == 0] = 1
    k.view(2, 5, 64, 2, 64)[:, 0] = v.view(2, 5, 64, 2, 64)[:, 0] = torch.nan
    q[:, 64:128] = do[:, 64:128] = torch.nan
    found = run(gca, q, k, v, w, idx, do, 64)
    exact = run(gca, *(torch.nan_to_num(x) for x in (q, k, v)), w, idx, torch.nan_to_num(do), 64)
    assert all(torch.equal(a, b) for a, b in zip(found, exact))

@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """k and v more than 2^31 numbers apart from one sequence to the next, and q from one head to the next."""
    far = torch.empty(2 ** 31 + 2 ** 20, dtype=torch.bfloat16, device='cuda')
    q, k, v, w, idx, do = (x.bfloat16() if x.is_floating_point() else x for x in example(S=64, D=64, device='cuda'))
    w = w.float()
    exact = run(gca, q, k, v, w, idx, do, 64)
    apart = far.as_strided((2, 320, 2, 64), (2 ** 31, 128, 64, 1))
    apart.copy_(k)
    assert torch.equal(gca(q, apart, v, w, idx, 64), exact[0])
    apart = far.as_strided((2, 256, 2, 64), (256 * 64, 64, 2 ** 31, 1))
    apart.copy_(q)
    assert torch.equal(gca(apart, k, v, w, idx, 64), exact[0])
