"""gca_kernel.py against a double loop in fp64; without a GPU, Triton runs in its interpreter."""
import itertools, os, subprocess, sys
from importlib.metadata import version
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import gca_kernel
from gca_kernel import gca, gca_plan, gca_reference

TRITON = tuple(map(int, version('triton').split('.')[:2])) if gca_kernel.HAS_TRITON else (0, 0)
INTERPRETER = TRITON >= (3, 9) and not torch.cuda.is_available()    # earlier ones need numpy < 2.4
if INTERPRETER:                         # tl's functions read the variable when they are imported
    with mock.patch.dict(os.environ, TRITON_INTERPRET='1'):
        __import__('triton.language')
triton = pytest.param('triton', marks=pytest.mark.skipif(not INTERPRETER, reason='run -m gpu'))


@pytest.fixture(params=['torch', triton])
def kernel(request, monkeypatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    return request.param


def double_loop(q, k, v, w, idx, S, n_keys=None, sink=False, scale=None):
    """Eq. 2 and 3 for each token of each head, one chunk after the other."""
    B, T, H, D = q.shape
    scale = scale or D ** -0.5
    o = torch.zeros_like(q)
    for b, t, h in itertools.product(range(B), range(T), range(H)):
        hkv = h * k.size(2) // H
        for slot, c in enumerate(idx[b, t // S].tolist()):
            if c < 0: continue
            keys = slice(c * S, c * S + (n_keys or S))
            e = torch.exp(k[b, keys, hkv] @ q[b, t, h] * scale)             # (n_keys,)
            o_k = e @ v[b, keys, hkv] / (e.sum() + sink)                    # (D,)
            o[b, t, h] += w[b, t // S, slot] * o_k
    return o


def example(B=2, N=4, M=5, S=16, K=3, H=2, Hkv=2, D=16, dtype=torch.float32, device='cpu'):
    """fp64 inputs that dtype can hold; half of row 0 and all of row 1 are unused, with w = NaN."""
    torch.manual_seed(0)
    q, do = torch.randn(2, B, N * S, H, D, device=device).to(dtype).double()
    k, v = torch.randn(2, B, M * S, Hkv, D, device=device).to(dtype).double()
    w = torch.randn(B, N, K, device=device).softmax(2).double()
    idx = torch.randint(M, (B, N, K), device=device, dtype=torch.int32)
    idx[:, 0, ::2] = idx[:, 1] = -1
    return q, k, v, w.masked_fill(idx < 0, torch.nan), idx, do


def run(f, q, k, v, w, idx, do, S, dtype=torch.float32, **options):
    """o and the four gradients; q, k, v, do in dtype, w at least in fp32"""
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    inputs.append(w.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_())
    o = f(*inputs, idx, S, **options)
    return o, *torch.autograd.grad(o, inputs, do.to(o.dtype))


def assert_close(found, exact, tolerance=2e-6, dw_tolerance=1e-5):
    """Relative to the largest value. The defaults are roundings of fp32; dw is the longest sum."""
    for name, a, b in zip(('o', 'dq', 'dk', 'dv', 'dw'), found, exact):
        largest = max(1, b.abs().max().item())
        atol = largest * (dw_tolerance if name == 'dw' else tolerance)
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol)


CASES = {                               # sizes of the example, options of gca
    'as in drt.py': (dict(N=2, S=32, D=64, K=4), dict(n_keys=31)),
    'eight slots of two chunks': (dict(K=8, M=2), dict()),
    'more chunks of queries': (dict(N=6, M=1, K=1), dict()),
    'wide chunks': (dict(S=64, M=3, D=32, H=1, Hkv=1), dict()),
    'wide heads': (dict(D=128, N=2), dict(scale=-0.3)),
    'one key and a sink': (dict(), dict(sink=True, n_keys=1)),
    'two heads share keys': (dict(B=2, H=4, M=3), dict(sink=True, n_keys=11)),
    'head size 24': (dict(D=24), dict())}


@pytest.mark.parametrize('name', CASES)
def test_equals_the_double_loop(name, kernel):
    """Exact zeros too: o, dq and dw without chunks, dk and dv without queries."""
    sizes, options = CASES[name]
    inputs, S = example(**dict(B=1, N=3) | sizes), sizes.get('S', 16)
    exact = run(double_loop, *inputs, S, torch.float64, **options)
    assert_close(run(gca_reference, *inputs, S, torch.float64, **options), exact, 1e-12, 1e-12)
    found = run(gca, *inputs, S, kernel=kernel, **options)
    assert_close(found, exact)
    assert all((a[b == 0] == 0).all() for a, b in zip(found, exact))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype, kernel):
    """Only P, dS (dP in PyTorch) and results are rounded: scores are fp32, under autocast too."""
    if kernel == 'triton' and dtype == torch.bfloat16:
        pytest.skip('the interpreter cannot multiply bf16; the GPU test does')
    inputs = example(B=1, N=3, M=3, S=32, D=64, K=4, H=4, Hkv=4, dtype=dtype)
    options = dict(sink=True, n_keys=31, scale=0.5)                         # scores up to 17
    exact = run(gca_reference, *inputs, 32, torch.float64, **options)
    autocast = torch.autocast('cpu', torch.bfloat16)
    found = run(autocast(gca), *inputs, 32, dtype, kernel=kernel, **options)
    unit = torch.finfo(found[0].dtype).eps
    assert_close(found, exact, 1.5 * unit, unit if kernel == 'torch' else 1e-5)


def test_views(kernel):
    """Tensors that are not contiguous, int64 idx, and an expanded gradient."""
    *inputs, idx, _ = example()
    q, k, v, w = inputs = [x.float().requires_grad_() for x in inputs]
    views = [q.transpose(1, 2).contiguous().transpose(1, 2), *torch.stack([k, v], 2).unbind(2)]
    found = torch.autograd.grad(gca(*views, w, idx.long(), 16, kernel=kernel).sum(), inputs)
    exact = torch.autograd.grad(gca_reference(*inputs, idx, 16).sum(), inputs)
    assert_close(found, exact, 5e-6)


def test_one_chunk_equals_sdpa(kernel):
    q, k, v, w, _, _ = (x.float() for x in example(K=1, N=5))
    chunks = torch.tensor([3, 0, 4, 4, 1])                                  # for both sequences
    o = gca(q, k, v, torch.ones_like(w), chunks.expand(2, -1)[..., None], 16, kernel=kernel)
    q, k, v = (x.unflatten(1, (5, 16)).transpose(2, 3) for x in (q, k, v))  # (B, N, H, S, D)
    exact = F.scaled_dot_product_attention(q, k[:, chunks], v[:, chunks])
    assert_close([o], [exact.transpose(2, 3).flatten(1, 2)])


@pytest.mark.parametrize('score', [0, -100, 100])
def test_a_sink_at_any_score(score, kernel):
    """Far below zero, where the sink has all the probability, and far above."""
    q, k, v, w, idx, do = example(B=1, N=3)
    q[..., 0], k[..., 0] = 20, score / 5                                    # scale is 1 / 4
    exact = run(double_loop, q, k, v, w, idx, do, 16, torch.float64, n_keys=15, sink=True)
    found = run(gca, q, k, v, w, idx, do, 16, kernel=kernel, n_keys=15, sink=True)
    assert_close(found, exact, 3e-5, 3e-5)                                  # scores of 100 in fp32


def test_without_slots_or_chunks():
    q, k, v, w, idx, _ = example()
    assert (gca(q, k, v, w[..., :0], idx[..., :0], 16) == 0).all()
    assert (gca(q, k[:, :0], v[:, :0], w, 0 * idx - 1, 16) == 0).all()
    with pytest.raises(AssertionError): gca(q, k[:, 1:], v[:, 1:], w, idx, 16)      # half a chunk


@pytest.mark.parametrize('seed', range(10))
def test_the_plan_is_the_inverse(seed):
    torch.manual_seed(seed)
    N, K, M = torch.randint(1, 9, (3,)).tolist()
    idx = torch.randint(-1, M, (2, N, K), dtype=torch.int32)
    for numbers, entries, start, order in zip(idx.flatten(1).tolist(), *gca_plan(idx, M)):
        lists = [[e for e in range(N * K) if numbers[e] == c] for c in range(M)]
        assert lists == [entries[start[c]:start[c + 1]].tolist() for c in range(M)]
        assert order.tolist() == sorted(range(M), key=lambda c: -len(lists[c]))


@pytest.mark.parametrize('rows', [1, 3])
def test_blocks_bound_the_memory(rows, monkeypatch):
    """Blocks of chunks of queries give the same numbers, and save no scores for backward."""
    inputs, scores, saved = example(N=8, M=8, K=8, D=2), 16 * 2 * 8 * 16, []    # scores of a row
    exact = run(gca, *inputs, 16, torch.float64)
    monkeypatch.setattr(gca_kernel, 'SCORES', rows * scores)
    save = lambda x: saved.append(x.numel()) or x
    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        assert_close(run(gca, *inputs, 16, torch.float64), exact, 1e-13, 1e-13)
    assert max(saved) < scores


def test_compiles_without_a_graph_break(kernel):
    def layer(q, k, v, w, idx, S):
        return 2 * gca(2 * q, k, v, w, idx, S, 15, plan=gca_plan(idx, 5), kernel=kernel)

    compiled = torch.compile(layer, backend='aot_eager', fullgraph=True)
    assert_close(run(compiled, *example(), 16), run(layer, *example(), 16), 0, 0)


COMPILE = r'''
import inspect, sys, torch, gca_kernel
from types import SimpleNamespace
assert 'triton' not in sys.modules              # it is imported when it is first needed
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

major = int(sys.argv[1])
torch.cuda.get_device_capability = lambda device: (major, 0)
q = SimpleNamespace(size=lambda i: 64, element_size=lambda: 2, is_cuda=True, device=None)
types = dict.fromkeys(['H', 'N', 'M', 'TOPK'], 'i32') | dict(scale='fp32')
types |= dict.fromkeys(['W', 'DW', 'LSE', 'DELTA'], '*fp32')
types |= dict.fromkeys(['IDX', 'ENTRIES', 'START', 'ORDER'], '*i32')
for kernel in gca_kernel.kernels():
    launch, block = gca_kernel.options(q, q, 64, 63)
    constants = dict(SINK=True, BLOCK=block)
    constants |= {x: launch.pop(x) for x in ('S', 'KEYS', 'D', 'G')}
    types |= dict.fromkeys(constants, 'constexpr')
    signature = {x: types.get(x, '*bf16') for x in inspect.signature(kernel.fn).parameters}
    constants = {(i,): constants[x] for i, x in enumerate(signature) if x in constants}
    pointers = [i for i, x in enumerate(signature) if '*' in signature[x]]
    aligned = {(i,): [['tt.divisibility', 16]] for i in pointers}
    source = ASTSource(kernel, signature, constants, aligned)
    binary = triton.compile(source, GPUTarget('cuda', 10 * major, 32), launch)
    print(binary.metadata.shared, 'atom' in binary.asm['ptx'])
'''


@pytest.mark.skipif(TRITON < (3, 3), reason='Triton 3.3 changed how to compile without a GPU')
@pytest.mark.parametrize('major, kilobytes', [(8, 163), (9, 227)])
def test_the_kernels_compile(major, kilobytes, tmp_path):
    """For sm_80 and sm_90, with no GPU: they fit on the chip and have no atomics."""
    env = dict(TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET='0', PYTHONPATH=':'.join(sys.path))
    command = [sys.executable, '-c', COMPILE, str(major)]
    output = subprocess.check_output(command, cwd=tmp_path, env=os.environ | env, text=True)
    for shared, atomics in map(str.split, output.splitlines()):
        assert int(shared) <= kilobytes * 1024 and atomics == 'False'


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('sizes, options', [
    *CASES.values(), (dict(N=40, M=40, S=64, K=8, H=12, Hkv=12, D=64), dict(n_keys=63))])
def test_on_a_gpu(sizes, options, dtype):
    """The compiled kernels, twice to the same bits."""
    inputs, S = example(**sizes, dtype=dtype, device='cuda'), sizes.get('S', 16)
    exact = run(gca_reference, *inputs, S, torch.float64, **options)
    tolerance = 2e-6 if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps
    found, again = (run(gca, *inputs, S, dtype, kernel='triton', **options) for _ in 'ab')
    assert_close(found, exact, tolerance, max(tolerance, 2e-5))
    assert_close(found, again, 0, 0)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """k of more than 2^31 numbers; the last of nine sequences equals that sequence alone."""
    k = torch.randn(9, 2048 * 64, 16, 128, dtype=torch.bfloat16, device='cuda')
    w, idx = torch.ones(9, 2048, 1, device='cuda'), torch.arange(2048, device='cuda').int()
    arguments = k, k, k, w, idx.flip(0).expand(9, -1)[..., None]
    assert torch.equal(gca(*arguments, 64)[-1:], gca(*(x[-1:] for x in arguments), 64))
