"""Named random states and recomputation that replays them."""

import pytest
import torch
import torch.nn.functional as F

from mcore import parallel_state
from mcore.errors import ConfigError
from mcore.tensor_parallel import (
    checkpoint,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from mcore.tensor_parallel.random import CudaRNGStatesTracker
from mcore.testing import run_distributed
from tests.unit.tensor_parallel.helpers import draw, run_at

pytestmark = pytest.mark.dist


def _numbers(group):
    del group
    model_parallel_cuda_manual_seed(42)
    tracker = get_cuda_rng_tracker()
    default = torch.rand(4)
    with tracker.fork():
        named = torch.rand(4)
    after = torch.rand(4)
    with tracker.fork("model-parallel-rng"):
        named_again = torch.rand(4)
    return default, after, named, named_again


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_default_state_is_common_and_the_named_one_differs_by_rank(tp):
    results = run_at(tp, _numbers)
    expected = torch.rand(8, generator=torch.Generator().manual_seed(42))
    named = torch.stack([torch.cat(result[2:]) for result in results])
    for rank, (default, after, _, _) in enumerate(results):
        assert torch.equal(torch.cat([default, after]), expected)  # a fork leaves it as it was
        stream = torch.Generator().manual_seed(42 + 2718 + rank)
        assert torch.equal(named[rank], torch.rand(8, generator=stream))


def test_states_travel():
    tracker = CudaRNGStatesTracker()
    assert not tracker.is_initialized()
    tracker.add("a", 1)
    saved = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    tracker.set_states(saved)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    tracker.reset()
    with pytest.raises(ConfigError, match="'a' does not exist"), tracker.fork("a"):
        pass


def test_one_seed_or_name_serves_one_state():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(ConfigError, match="seed 1"):
        tracker.add("b", 1)
    with pytest.raises(ConfigError, match="'a' exists"):
        tracker.add("a", 2)


def test_fork_puts_the_state_back_after_an_error():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    torch.manual_seed(3)
    with pytest.raises(KeyError), tracker.fork("a"):
        {}[float(torch.rand(1))]
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))


def _layers(x, weight):
    x = F.dropout(x @ weight, 0.5)
    with get_cuda_rng_tracker().fork():
        x = F.dropout(torch.sin(x @ weight), 0.5)
        x = F.dropout(x, 0.5)
    return F.dropout(torch.sin(x @ weight), 0.5)


def _train(recompute):
    """Two layers in a row, a forward of something else between forward and backward."""
    model_parallel_cuda_manual_seed(9)
    weight = draw(16, 16, seed=1).requires_grad_()
    x = draw(4, 16, seed=2).requires_grad_()
    y = x
    for _ in range(2):
        y = checkpoint(_layers, False, y, weight) if recompute else _layers(y, weight)
    with get_cuda_rng_tracker().fork():
        noise = torch.rand(2)  # moves the states on before backward
    y.pow(2).sum().backward()
    with get_cuda_rng_tracker().fork():
        named = torch.rand(2)
    return y.detach(), x.grad, weight.grad, noise, named, torch.rand(2)


def _both(group):
    del group
    return _train(False), _train(True)


@pytest.mark.parametrize("tp", [1, 2])
def test_recomputation_repeats_dropout_bit_for_bit(tp):
    for kept, recomputed in run_at(tp, _both):
        assert kept[1].any()
        for one, other in zip(kept, recomputed, strict=True):
            assert torch.equal(one, other)


def test_recomputation_runs_the_function_again_in_backward():
    calls = []

    def square(x, factor):
        calls.append(torch.is_grad_enabled())
        return (x * factor).pow(2)

    x = draw(3).requires_grad_()
    y = checkpoint(square, False, x, 2.0)
    assert len(calls) == 1
    y.sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(x.grad, 8 * x.detach())


def distributed_activations():
    context = parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4).requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = checkpoint(lambda a, k: (a * k).pow(3), True, x, 2.0)
    y.sum().backward()
    return context.tp.rank, y.detach(), x.grad, saved


def test_distributed_activations_change_no_number():
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    for _, y, grad, saved in run_distributed(distributed_activations, 2):
        torch.testing.assert_close(y, (2 * x).pow(3))
        torch.testing.assert_close(grad, 24 * x.pow(2))
        assert saved == [4]  # half of the input


def test_a_kept_graph_is_replayed_twice():
    model_parallel_cuda_manual_seed(3)
    tracker = get_cuda_rng_tracker()

    def drop(x):
        with tracker.fork():
            return F.dropout(x * x, 0.5)

    x = torch.arange(1.0, 65.0, requires_grad=True)
    y = checkpoint(drop, False, x)
    once = torch.autograd.grad(y.sum(), x, retain_graph=True)
    state = torch.get_rng_state()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], once[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal((once[0] != 0), y != 0)
