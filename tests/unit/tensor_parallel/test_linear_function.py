"""Communication hidden behind the weight gradient's product, shown by a log of calls."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.config.parallel import ModelParallelConfig
from mcore.tensor_parallel import ColumnParallelLinear
from mcore.tensor_parallel.linear_function import (
    LinearWithGradAccumulationAndAsyncCommunication,
    linear_with_grad_accumulation_and_async_allreduce,
)
from mcore.topology.group import Group
from tests.unit.tensor_parallel.helpers import draw, own, run_at

pytestmark = pytest.mark.dist

S, B, K, N = 4, 2, 6, 8


class _Products(TorchDispatchMode):
    """Logs every matrix product with the shape of its result."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.log.append(("product", tuple(result.shape)))
        return result


class _LoggedWork:
    def __init__(self, work, name, log):
        self.work, self.name, self.log = work, name, log

    def wait(self):
        self.log.append(("wait", self.name))
        return self.work.wait()


@contextlib.contextmanager
def _call_log():
    log, count = [], iter(range(100))

    def logged(name):
        original = dist.__dict__[name]

        def call(*args, **kwargs):
            label = f"{name} {next(count)}"
            log.append(("start", label))
            work = original(*args, **kwargs)
            return None if work is None else _LoggedWork(work, label, log)

        return mock.patch.object(dist, name, call)

    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "all_to_all_single"):
            stack.enter_context(logged(name))
        stack.enter_context(_Products(log))
        yield log


def _backward_log(group, sp, with_bias):
    layer = ColumnParallelLinear(K, N, bias=with_bias, config=_config(sp))
    x = draw(S // group.size if sp else S, B, K).requires_grad_()
    out, _ = layer(x)
    with _call_log() as log:
        out.backward(draw(*out.shape))
    return log


def _config(sp):
    return ModelParallelConfig(params_dtype=torch.float64, sequence_parallel=sp)


DGRAD, WGRAD = ("product", (S * B, K)), ("product", (N // 2, K))


@pytest.mark.parametrize("with_bias", [False, True])
def test_all_reduce_of_dx_runs_while_dw_is_computed(with_bias):
    for log in run_at(2, _backward_log, False, with_bias):
        assert log == [
            DGRAD,
            ("start", "all_reduce 0"),
            WGRAD,
            ("wait", "all_reduce 0"),
        ]


def test_sequence_parallel_gather_and_reduce_scatter_run_behind_products():
    # Over gloo a small gather, and a reduce-scatter, is an all-to-all.
    for log in run_at(2, _backward_log, True, True):
        assert log == [
            ("start", "all_to_all_single 0"),  # the input is gathered again ...
            DGRAD,  # ... behind the product for dx
            ("start", "all_to_all_single 1"),  # dx is reduce-scattered ...
            ("wait", "all_to_all_single 0"),
            WGRAD,  # ... behind the product for dW
            ("wait", "all_to_all_single 1"),
        ]


def test_one_rank_sends_nothing():
    for log in run_at(1, _backward_log, True, True):
        assert [kind for kind, _ in log] == ["product", "product"]


def _accumulate(group, sp, main_dtype, param_dtype):
    """Two backward passes into `main_grad`, against the sum of two plain weight gradients."""
    weight = own(draw(N, K), 0, group).to(param_dtype).requires_grad_()
    plain = weight.detach().clone().requires_grad_()
    weight.main_grad = torch.ones(weight.shape, dtype=main_dtype)
    total = torch.ones(weight.shape, dtype=main_dtype)
    for seed in range(2):
        whole = draw(S, B, K, seed=seed).to(param_dtype)
        x = own(whole, 0, group) if sp else whole
        dy = draw(S, B, len(weight), seed=10 + group.rank).to(param_dtype)
        for w, fuse in ((weight, True), (plain, False)):
            linear_with_grad_accumulation_and_async_allreduce(
                x, w, None, fuse, allreduce_dgrad=not sp, sequence_parallel=sp
            ).backward(dy)
        total += plain.grad
        plain.grad = None
    assert weight.grad is None
    tolerance = 0.05 if param_dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(weight.main_grad, total, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(
    ("main_dtype", "param_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.float32, torch.bfloat16),
    ],
)
def test_weight_gradient_is_added_to_the_main_gradient(tp, sp, main_dtype, param_dtype):
    run_at(tp, _accumulate, sp, main_dtype, param_dtype)


def _fused_product(group):
    del group
    layer = ColumnParallelLinear(K, N, bias=False)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    out, _ = layer(draw(S, B, K, dtype=torch.float32).requires_grad_())
    with _call_log() as log:
        out.backward(torch.ones_like(out))
    assert layer.weight.main_grad.any()
    return log


def test_the_product_itself_adds():
    with _call_log() as log:
        torch.ones(2, 2).addmm_(torch.ones(2, 2), torch.ones(2, 2))
    assert log == [("product", (2, 2))]  # what a fused accumulation looks like in the log
    for log in run_at(2, _fused_product):
        assert log == [DGRAD, ("start", "all_reduce 0"), WGRAD, ("wait", "all_reduce 0")]


@pytest.mark.parametrize("with_bias", [True, False])
def test_numerical_gradients(with_bias):
    group = Group.single("tp")
    inputs = [draw(S, B, K), draw(N, K, seed=1)] + [draw(N, seed=2)] * with_bias
    inputs = [x.requires_grad_() for x in inputs]

    def linear(x, weight, bias=None):
        apply = LinearWithGradAccumulationAndAsyncCommunication.apply
        return apply(x, weight, bias, group, False, False, False, None)

    assert gradcheck(linear, inputs)
