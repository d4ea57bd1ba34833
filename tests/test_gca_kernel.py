"""gca_kernel.py against a double loop in fp64; without a GPU, Triton runs in its interpreter."""
import doctest, importlib, os, subprocess, sys
from importlib.metadata import version
from unittest import mock

import numpy as np
import pytest
import torch
from pytest import mark

import gca_kernel
from gca_kernel import gca, gca_plan, gca_reference, output_and_gradients
from helpers import close

TRITON = (0, 0)
if gca_kernel.HAS_TRITON:
    TRITON = tuple(int(x) for x in version('triton').split('.')[:2])
INTERPRETER = TRITON >= (3, 9) and not torch.cuda.is_available()    # earlier ones need numpy < 2.4
if INTERPRETER:                                         # Triton reads the variable at its import
    with mock.patch.dict(os.environ, TRITON_INTERPRET='1'):
        importlib.import_module('triton.language')
interpreted = mark.skipif(not INTERPRETER, reason='run -m gpu')


@pytest.fixture(params=['torch', pytest.param('triton', marks=interpreted)])
def kernel(request, monkeypatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    return request.param


def double_loop(q, k, v, w, idx, S, n_keys=None, sink=False, scale=None):
    """Eq. 2 and 3 for each token of each head, one chunk after the other."""
    B, T, H, D = q.shape
    G = H // k.size(2)
    scale = scale or D ** -0.5
    o = torch.zeros_like(q)
    for b, t, h in np.ndindex(B, T, H):
        n = t // S
        for slot, c in enumerate(idx[b, n].tolist()):
            if c < 0: continue
            keys = slice(c * S, c * S + (n_keys or S))
            k_c = k[b, keys, h // G]                                        # (n_keys, D)
            v_c = v[b, keys, h // G]
            e = torch.exp(k_c @ q[b, t, h] * scale)                         # (n_keys,)
            total = e.sum() + int(sink)                                     # its e^0
            o_c = e @ v_c / total                                           # (D,)
            o[b, t, h] += w[b, n, slot] * o_c
    return o


def example(B=2, N=4, M=5, S=16, K=3, H=2, Hkv=2, D=16,
            dtype=torch.float32):
    """fp64 inputs that dtype can hold: q, k, v, w, idx, do. Half of row 0 and all of row 1 are
    unused, with w = NaN."""
    def randn(*shape):
        return torch.randn(*shape).to(dtype).double()

    torch.manual_seed(0)
    q, do = randn(2, B, N * S, H, D)
    k, v = randn(2, B, M * S, Hkv, D)
    w = torch.randn(B, N, K).softmax(2)
    idx = torch.randint(M, (B, N, K), dtype=torch.int32)
    idx[:, 0, ::2] = -1
    idx[:, 1] = -1
    w[idx < 0] = torch.nan
    return q, k, v, w.double(), idx, do


def run(function, q, k, v, w, idx, do, dtype=torch.float32, **options):
    """o and the four gradients; q, k, v, do in dtype, w at least in fp32"""
    inputs = [x.to(dtype) for x in (q, k, v)]
    inputs.append(w.to(torch.promote_types(dtype, torch.float32)))
    S = q.size(1) // idx.size(1)
    return output_and_gradients(function, inputs, do, idx, S, **options)


def run_exact(function, *inputs, **options):
    return run(function, *inputs, dtype=torch.float64, **options)


def assert_close(results, exact, tolerance=2e-6, dw_tolerance=1e-5):
    """Relative to the largest value. The defaults are roundings of fp32; dw is the longest sum."""
    tolerances = [tolerance] * 4 + [dw_tolerance]                           # o, dq, dk, dv, dw
    for a, b, bound in zip(results, exact, tolerances):
        largest = max(1, b.abs().max().item())
        close(a.double(), b.double(), bound * largest)


CASES = {                               # sizes of the example, options of gca
    'as in drt.py': (dict(N=2, S=32, D=64, K=4), dict(n_keys=31)),
    'eight slots of two chunks': (dict(K=8, M=2), {}),
    'more chunks of queries': (dict(N=6, M=1, K=1), {}),
    'wide chunks': (dict(S=64, M=3, D=32, H=1, Hkv=1), {}),
    'wide heads': (dict(D=128, N=2), dict(scale=-0.3)),
    'one key and a sink': ({}, dict(sink=True, n_keys=1)),
    'two heads share keys': (dict(B=2, H=4, M=3), dict(sink=True, n_keys=11)),
    'head size 24': (dict(D=24), {}),
}


@mark.parametrize('name', CASES)
def test_equals_the_double_loop(name, kernel):
    """Exact zeros too: o, dq and dw without chunks, dk and dv without queries."""
    sizes, options = CASES[name]
    inputs = example(**dict(B=1, N=3) | sizes)
    exact = run_exact(double_loop, *inputs, **options)
    reference = run_exact(gca_reference, *inputs, **options)
    assert_close(reference, exact, 1e-12, 1e-12)
    results = run(gca, *inputs, kernel=kernel, **options)
    assert_close(results, exact)
    for a, b in zip(results, exact):
        assert (a[b == 0] == 0).all()


@mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype, kernel):
    """Only P, dS (dP in PyTorch) and results are rounded: scores are fp32, under autocast too."""
    if kernel == 'triton' and dtype == torch.bfloat16:
        pytest.skip('the interpreter cannot multiply bf16; the GPU test does')
    inputs = example(N=3, M=3, S=32, K=4, D=64, dtype=dtype)
    options = dict(sink=True, n_keys=31, scale=0.5)                         # scores up to 17
    exact = run_exact(gca_reference, *inputs, **options)
    autocast = torch.autocast('cpu', torch.bfloat16)
    results = run(autocast(gca), *inputs, dtype, kernel=kernel, **options)
    unit = torch.finfo(results[0].dtype).eps
    dw_tolerance = unit if kernel == 'torch' else 1e-5
    assert_close(results, exact, 1.5 * unit, dw_tolerance)


def test_views(kernel):
    """Tensors that are not contiguous, int64 idx, and an expanded gradient."""
    def of_views(q, k, v, w, idx, S):
        q = q.mT.contiguous().mT
        k, v = torch.stack([k, v], 2).unbind(2)
        idx = idx.long().mT.contiguous().mT
        return gca(q, k, v, w, idx, S, kernel=kernel)

    *inputs, do = example()
    inputs.append(torch.ones(()).expand_as(do))
    exact = run_exact(gca_reference, *inputs)
    assert_close(run(of_views, *inputs), exact, 5e-6)


@mark.filterwarnings('ignore:overflow')                 # of NumPy, in the interpreter
@mark.parametrize('score', [0, -100, 100])
def test_a_sink_at_any_score(score, kernel):
    """Far below zero, where the sink has all the probability, and far above."""
    inputs = example(B=1, N=3)
    q, k = inputs[:2]
    q[..., 0] = 20
    k[..., 0] = score / 5                                                   # scale is 1 / 4
    options = dict(n_keys=15, sink=True)
    exact = run_exact(double_loop, *inputs, **options)
    results = run(gca, *inputs, kernel=kernel, **options)
    assert_close(results, exact, 3e-5, 3e-5)                                # scores of 100 in fp32


@mark.filterwarnings('ignore:invalid value')          # of NumPy, in the interpreter
@mark.parametrize('bad', [torch.nan, torch.inf])
def test_what_is_not_read_changes_nothing(bad, kernel, monkeypatch):
    """NaN or inf in a chunk that no row retrieves, and in keys from n_keys on; in blocks, too."""
    q, k, v, w, idx, do = example(B=1, N=3, M=3)
    idx = idx.where(idx != 0, 1)
    options = dict(kernel=kernel, n_keys=15)
    wanted = run(gca, q, k, v, w, idx, do, **options)
    for x in (k, v):
        x[:, :16] = bad
        x[:, 15::16] = bad
    for scores in (gca_kernel.SCORES, 1)[:1 + (kernel == 'torch')]:         # blocks of PyTorch
        monkeypatch.setattr(gca_kernel, 'SCORES', scores)
        results = run(gca, q, k, v, w, idx, do, **options)
        assert_close(results, wanted, 1e-6, 1e-6)


def test_without_slots_or_chunks():
    q, k, v, w, idx, _ = example()
    no_slots = gca(q, k, v, w[..., :0], idx[..., :0], 16)
    no_keys = k[:, :0]
    unused = torch.full_like(idx, -1)
    no_chunks = gca(q, no_keys, no_keys, w, unused, 16)
    assert not no_slots.any() and not no_chunks.any()
    half = k[:, 8:]                                                         # of the first chunk
    for wrong in (half, k[:1], k[..., :8]):                                 # sequences, head size
        with pytest.raises(AssertionError):
            gca(q, wrong, wrong, w, idx, 16)


@interpreted
def test_no_plan_is_made_without_a_backward_pass(monkeypatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    *inputs, idx, _ = example()
    q, k, v, w = (x.float() for x in inputs)
    with torch.no_grad(), mock.patch.object(gca_kernel, 'gca_plan', side_effect=AssertionError):
        o = gca(q, k, v, w, idx, 16, kernel='triton')
    close(o, gca_reference(q, k, v, w, idx, 16), 1e-5)


@mark.parametrize('major, can_run', [(7, False), (8, True), (9, True)])
def test_gpus_before_the_a100_are_left_to_pytorch(monkeypatch, major, can_run):
    monkeypatch.setattr(gca_kernel, 'HAS_TRITON', True)
    monkeypatch.setattr(gca_kernel, 'compute_capability', lambda device: (major, 0))
    monkeypatch.setattr(torch.version, 'hip', None)
    q = mock.Mock(is_cuda=True, dtype=torch.bfloat16)
    q.size.return_value = 64                                                # of a head
    q.element_size.return_value = 2
    assert gca_kernel.triton_can_run(q, 64) == can_run


@mark.parametrize('rows', [1, 3])
def test_blocks_bound_the_memory(rows, monkeypatch):
    """Blocks of chunks of queries give the same numbers, and save no scores for backward."""
    inputs = example(N=8, M=8, K=8, D=2)
    exact = run_exact(gca, *inputs)
    scores_of_row = 2 * 16 * 2 * 8 * 16                                     # B S H K n_keys
    monkeypatch.setattr(gca_kernel, 'SCORES', rows * scores_of_row)
    sizes = []

    def save(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        results = run_exact(gca, *inputs)
    assert_close(results, exact, 1e-13, 1e-13)
    assert max(sizes) < scores_of_row


def test_compiles_without_a_graph_break(kernel):
    def layer(q, k, v, w, idx, S):
        plan = gca_plan(idx, k.size(1) // S)
        return 2 * gca(2 * q, k, v, w, idx, S, 15, plan=plan, kernel=kernel)

    inputs = example(B=1, N=3)
    compiled = torch.compile(layer, backend='aot_eager', fullgraph=True)
    results = run(compiled, *inputs)
    assert_close(results, run(layer, *inputs), 0, 0)


def products_in_kernels(monkeypatch):
    """A list to which Triton's interpreter appends the FLOPs of each product of two tiles."""
    from triton.runtime.interpreter import InterpreterBuilder
    create_dot = InterpreterBuilder.create_dot
    flops = []

    def counted(self, a, b, *args):
        m, k = a.data.shape
        flops.append(2 * m * k * b.data.shape[1])
        return create_dot(self, a, b, *args)

    monkeypatch.setattr(InterpreterBuilder, 'create_dot', counted)
    return flops


@interpreted
@mark.parametrize('name', ['as in drt.py', 'two heads share keys', 'head size 24'])
def test_flops_are_those_of_the_kernels(name, monkeypatch):
    """torch's counter with FLOPS, against a closed formula and against the products that the
    kernels compute; dkdv_kernel computes none for unused slots."""
    from torch.utils.flop_counter import FlopCounterMode
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    sizes, options = CASES[name]
    q, k, v, w, idx, do = example(**sizes | dict(B=1))
    B, N, K = idx.shape
    _, T, H, D = q.shape
    S = T // N
    width = 32 if D == 24 else D                                            # a power of 2
    product = 2 * S * S * width                                             # FLOPs of one
    slots = B * N * H * K
    used = int((idx >= 0).sum()) * H

    executed = products_in_kernels(monkeypatch)
    with FlopCounterMode(display=False, custom_mapping=gca_kernel.FLOPS) as counter:
        run(gca, q, k, v, w, idx, do, kernel='triton', **options)
    assert counter.get_flop_counts()['Global'] == {
        torch.ops.nanorlm.gca: 2 * slots * product,
        torch.ops.nanorlm.gca_backward: 7 * slots * product}
    assert sum(executed) == (2 + 3) * slots * product + 4 * used * product

    # all slots used: exactly what the kernels compute
    executed.clear()
    run(gca, q, k, v, w.nan_to_num(), idx.clamp(min=0), do, kernel='triton', **options)
    assert sum(executed) == counter.get_total_flops()


@mark.parametrize('sizes', [{}, dict(H=4, Hkv=2, S=32)])
def test_flops_are_those_of_the_definition(sizes):
    """In PyTorch, forward has the same 2 products, backward has 4: the kernels save no scores, so
    both compute Q Kᵀ and dO Vᵀ, which makes 7."""
    from torch.utils.flop_counter import FlopCounterMode
    inputs = example(**sizes)
    with FlopCounterMode(display=False) as counter:
        run(gca_reference, *inputs)
    q, k, v, w, idx, do = (x.shape for x in inputs)
    forward = gca_kernel.forward_flops(q, k, v, w, idx, out_shape=q)
    backward = gca_kernel.backward_flops(do, q, k, v, w, idx, out_shape=(q, k, v, w))
    assert counter.get_total_flops() == forward + backward * 4 // 7


COMPILE = r'''
import inspect, itertools, re, sys
import torch
import gca_kernel

assert 'triton' not in sys.modules              # it is imported when it is first needed
gca_kernel.import_triton()
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

q = torch.empty(1, 64, 1, 64, dtype=torch.bfloat16, device='meta')         # S = D = 64
types = dict.fromkeys(['H', 'N', 'M', 'K'], 'i32') | dict(scale='fp32')
types |= dict.fromkeys(['w_ptr', 'dw_ptr', 'lse2_ptr', 'delta_ptr'], '*fp32')
types |= dict.fromkeys(['idx_ptr', 'entries_ptr', 'start_ptr', 'order_ptr'], '*i32')

kernels = gca_kernel.forward_kernel, gca_kernel.dq_kernel, gca_kernel.dkdv_kernel
for major, kernel in itertools.product((8, 9), kernels):
    gca_kernel.compute_capability = lambda device: (major, 0)
    constants = gca_kernel.dkdv_options(q, q, 64, 63)
    launch = {name: constants.pop(name) for name in ('num_warps', 'num_stages')}
    constants['SINK'] = True
    signature, values, alignment = {}, {}, {}
    for i, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name] = 'constexpr'
            values[(i,)] = constants[name]
        else:
            signature[name] = types.get(name, '*bf16')
        if name.endswith('_ptr'):
            alignment[(i,)] = [['tt.divisibility', 16]]
    source = ASTSource(kernel, signature, values, alignment)
    binary = triton.compile(source, GPUTarget('cuda', 10 * major, 32), launch)
    # of offsets from arguments: %q_ptr, or %arg0 in early versions
    widths = re.findall(r'addptr %(?:\w+_ptr|arg\d+), .*, (i\d+)', binary.asm['ttir'])
    print(major, binary.metadata.shared, 'atom' in binary.asm['ptx'], *set(widths))
'''


@mark.skipif(TRITON < (3, 3), reason='Triton 3.3 changed how to compile without a GPU')
def test_the_kernels_compile(tmp_path):
    """For sm_80 and sm_90, with no GPU: they fit on the chip, have no atomics, and offsets in
    tensors have 64 bits."""
    env = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET='0',
               PYTHONPATH=':'.join(sys.path))
    command = [sys.executable, '-c', COMPILE]
    output = subprocess.check_output(command, cwd=tmp_path, env=env, text=True)
    lines = output.splitlines()
    assert len(lines) == 2 * 3
    for line in lines:
        major, shared, atomics, *widths = line.split()
        assert int(shared) <= {'8': 163, '9': 227}[major] * 1024
        assert atomics == 'False'
        assert widths == ['i64']


def test_the_plan_begins_with_the_chunks_of_most_queries():
    idx = torch.tensor([2, 2, 0, 1, 2, 1]).view(1, 6, 1)
    *_, order = gca_plan(idx, 3)
    assert order.tolist() == [[2, 1, 0]]


def test_the_example_in_a_docstring():
    results = doctest.testmod(gca_kernel)
    assert results.attempted == 1
    assert results.failed == 0


LARGE = dict(N=40, M=40, S=64, K=8, H=12, Hkv=12, D=64)


@mark.gpu
@mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@mark.parametrize('sizes, options', [
    *CASES.values(), (LARGE, dict(n_keys=63)), (dict(S=128, D=64), {})])
def test_on_a_gpu(sizes, options, dtype):
    """The compiled kernels, twice to the same bits."""
    if sizes.get('S') == 128 and dtype == torch.float32:
        pytest.skip('128 x 64 numbers in fp32 are more than 16 KiB')
    with torch.device('cuda'):
        inputs = example(**sizes, dtype=dtype)
    exact = run_exact(gca_reference, *inputs, **options)
    tolerance = 2e-6
    if dtype != torch.float32:
        tolerance = 1.5 * torch.finfo(dtype).eps
    results = run(gca, *inputs, dtype, kernel='triton', **options)
    assert_close(results, exact, tolerance, max(tolerance, 2e-5))
    repeated = run(gca, *inputs, dtype, kernel='triton', **options)
    assert_close(repeated, results, 0, 0)


@mark.gpu
def test_offsets_beyond_32_bits():
    """k of more than 2^31 numbers; the last of nine sequences equals that sequence alone, and so do
    its gradients."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip('it takes about 30 GB')
    k = torch.randn(9, 2048 * 64, 16, 128, dtype=torch.bfloat16, device='cuda')
    w = torch.ones(9, 2048, 1, device='cuda')
    chunks = torch.arange(2048, device='cuda')
    idx = chunks.flip(0).view(1, 2048, 1).expand(9, -1, -1)
    results = output_and_gradients(gca, (k, k, k, w), k, idx, 64)
    k, w, idx = k[-1:], w[-1:], idx[-1:]
    for a, b in zip(results, output_and_gradients(gca, (k, k, k, w), k, idx, 64)):
        assert torch.equal(a[-1:], b)


def test_blocks_have_all_options(monkeypatch):
    """A sink, fewer keys and a scale reach each block of rows."""
    inputs = example(N=8)
    options = dict(n_keys=11, sink=True, scale=0.7)
    monkeypatch.setattr(gca_kernel, 'SCORES', 1)
    exact = run_exact(gca_reference, *inputs, **options)
    assert_close(run_exact(gca, *inputs, **options), exact, 1e-12, 1e-12)
