"""
Tensors left behind on the CPU, found without a GPU: one is pretended. What has to be seen on a real one carries the marker gpu, in
test_gca_kernel.py. Run: pytest tests/test_devices.py
"""
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import eval as evaluation
import train
from test_train import DRT, RPT, SMALL, here, texts  # noqa: F401  (fixtures)

GPU, CPU = torch.device('cuda', 0), torch.device('cpu')


def place(x):
    """Where a tensor pretends to be; None where it is not known: autograd and torch.load make some unseen."""
    return x.__dict__.get('place')


def put(x, where):
    for t in tree_leaves(x):
        if torch.is_tensor(t):
            t.place = where
    return x


class PretendedGPU(TorchFunctionMode):
    """
    Tensors that would be on a GPU are marked. To compute with one of these and one of the CPU's is an error, as it would be there; so are
    a generator of the other device, and numpy. As there, what has no axes may be the CPU's, and so may indices. The numbers are the CPU's.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, attribute, kwargs = func.__name__, getattr(func, '__self__', None), dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        if attribute is torch.Tensor.device:
            return place(args[0]) or CPU
        if attribute is torch.Tensor.is_cuda:
            return place(args[0]) == GPU

        asked = [x for x in [kwargs.get('device'), *args[1:2] * (name == 'to')] if isinstance(x, (str, torch.device))]
        where = GPU if asked and 'cuda' in str(asked[0]) else CPU if asked or name == 'cpu' or not tensors else None
        if 'device' in kwargs:                                              # everything is done on the CPU
            kwargs['device'] = 'cpu'
        elif asked:
            args = (args[0], 'cpu', *args[2:])
        elif name == 'to' and len(tensors) == 2:
            where = place(tensors[1])
        kwargs.pop('pin_memory', None)
        places = {place(t) for t in tensors if t.dim()} - {None}
        if where is None and (name in ('copy_', '__set__') or name in ('__getitem__', '__setitem__') and place(args[0]) == GPU):
            where = place(args[0])
        elif where is None and len(places) > 1 or name in ('numpy', '__array__') and GPU in places:
            raise RuntimeError(f'{name}: tensors on two devices, or numpy and a GPU: {[(place(t), tuple(t.shape)) for t in tensors]}')
        elif where is None:
            where = next(iter(places or {place(t) for t in tensors} - {None}), None)
        generator = kwargs.get('generator')
        if isinstance(generator, Generator) and where is not None and generator.place != where.type:
            raise RuntimeError(f'{name}: a generator on {generator.place} for a tensor on {where}')

        out = func(*args, **kwargs)
        if name in ('to', 'cpu') and out is args[0] and place(out) != where:        # really it is the same tensor, so far
            out = out.view_as(out)
        if attribute is torch.Tensor.data and name == '__set__':            # module.to
            put(args[0], place(args[1]))
        elif where is not None:
            put(out, where)
        return out


class Generator(torch.Generator):
    def __new__(cls, device='cpu'):
        return super().__new__(cls)

    def __init__(self, device='cpu'):
        self.place = torch.device(device).type


class Autocast(torch.autocast):
    def __init__(self, device_type, *args, **more):
        super().__init__('cpu', *args, **more)


@pytest.fixture
def gpu(here, monkeypatch):       # noqa: F811
    """In here torch.cuda says that there is an H200."""
    load = torch.load
    monkeypatch.setattr(torch, 'Generator', Generator)
    monkeypatch.setattr(torch, 'autocast', Autocast)
    monkeypatch.setattr(torch, 'load', lambda f, map_location=None, **more: put(load(f, map_location='cpu', **more), GPU if 'cuda' in str(map_location) else CPU))
    for name, answer in dict(is_available=True, get_device_capability=(9, 0), get_device_name='NVIDIA H200', max_memory_allocated=2 ** 30, synchronize=None,
                             is_current_stream_capturing=False).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    with PretendedGPU():
        yield


def test_the_pretended_gpu_notices(gpu):
    x, y = torch.ones(3, device='cuda'), torch.arange(3)
    assert x.device == GPU and x.is_cuda and (x * 2 + x.sum()).is_cuda and x[y].is_cuda and not x.cpu().is_cuda and y.to(x.device).is_cuda
    assert torch.nn.Linear(3, 3).to('cuda')(x).is_cuda and x.is_cuda and not y.is_cuda
    for wrong in (lambda: x + y, lambda: y[x.long()], lambda: x.numpy(), lambda: torch.cat([x, y.float()]), lambda: torch.nn.Linear(3, 3)(x + 0 * y),
                  lambda: torch.rand(3, device='cuda', generator=torch.Generator())):
        with pytest.raises(RuntimeError):
            wrong()
    assert torch.rand(3, device='cuda', generator=torch.Generator('cuda')).is_cuda


SMALL = [*SMALL, '--data', 'many', '--block-size', '64', '--tokens-per-step', '256']
TRAINED = {'trime': SMALL, 'trime long': [*SMALL, '--memory', 'long'], 'trime ext': [*SMALL, '--memory', 'ext'], 'drt': DRT, 'drt x1': [*DRT, '--encoder', 'lower', '--sink'],
           'drt random': [*DRT, '--encoder', 'none', '--retriever', 'random'], 'base': [*DRT, '--groups', '0'],
           'rpt': RPT, 'rpt lex': [*RPT, '--retriever', 'lex'], 'retro': [*RPT, '--retriever', 'bm25'], 'xl': [*RPT, '--retriever', 'none']}


@pytest.mark.parametrize('run', TRAINED)
def test_nothing_is_left_on_the_cpu(gpu, run, monkeypatch):
    """A run from start to sample, and its evaluation, in bf16; PyTorch stands in for the Triton kernels."""
    train.main([*TRAINED[run], '--device', 'cuda', '--dtype', 'bf16', '--compile', 'off', '--kernel', 'torch', '--max-steps', '2', '--eval-every', '1', '--out', 'out'])
    tasks = {'trime ext': [['neighbors', '--memory', 'local,long,ext']], 'drt': [['trace'], ['generate', '--max-tokens', '20', '--offload']],
             'rpt': [['trace'], ['ranks', '--sequences', '2', '--chunks', '4']]}.get(run, [])
    for task in (['table'], ['generate', '--max-tokens', '20'], *tasks):
        monkeypatch.setattr(sys, 'argv', ['eval.py', 'out', '--device', 'cuda', '--prompt', 'the cat', '--at-most', '300', '--task', *task])
        evaluation.main()
