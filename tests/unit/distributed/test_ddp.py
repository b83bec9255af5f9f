import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from mcore import parallel_state
from mcore.config.distributed import DistributedDataParallelConfig
from mcore.distributed import DistributedDataParallel, finalize_model_grads
from mcore.errors import ScheduleError
from mcore.testing import run_distributed


class Net(nn.Module):
    """Three layers, one of which (`extra`) only takes part on demand."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.extra = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x, use_extra=False):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.extra(x) if use_extra else x * self.scale


def make_net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def make_data(dtype=torch.float64):
    return torch.randn(6, 5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def wrap(net, **options):
    return DistributedDataParallel(None, DistributedDataParallelConfig(**options), net)


def gradients(ddp):
    return {name: p.main_grad.clone() for name, p in ddp.module.named_parameters()}


def reference(reduce):
    net, data = make_net(), make_data()
    reduce(torch.stack([net(x).square().sum() for x in data])).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in net.named_parameters()
    }


def train_microbatches(overlap, bucket_size):
    """Two steps on this rank's part of six microbatches; the second step's gradients."""
    context = parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), overlap_grad_reduce=overlap, bucket_size=bucket_size)
    calls, all_reduce = [], dist.all_reduce
    mine = make_data().chunk(context.dp.size)[context.dp.rank]
    for _ in range(2):
        ddp.zero_grad_buffer()
        calls.clear()
        dist.all_reduce = lambda *a, **k: calls.append(a[0].numel()) or all_reduce(*a, **k)
        try:
            with ddp.no_sync():
                for x in mine[:-1]:
                    ddp(x).square().sum().backward()
            assert not calls
            ddp(mine[-1]).square().sum().backward()
            finalize_model_grads([ddp])
            ddp.finish_grad_sync()
        finally:
            dist.all_reduce = all_reduce
        assert all(p.grad is None for p in ddp.parameters())
    return gradients(ddp), len(calls), len(ddp.buckets)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("overlap", "bucket_size"), [(False, None), (True, None), (True, 1)])
def test_equals_one_process(world_size, overlap, bucket_size):
    expected = reference(lambda losses: losses.sum() / world_size)
    results = run_distributed(train_microbatches, world_size, overlap, bucket_size)
    for grads, num_calls, num_buckets in results:
        assert num_calls == num_buckets == (8 if bucket_size else 1)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)
            assert torch.equal(grad, results[0][0][name])


class Log(torch.autograd.Function):
    """Identity that notes when its backward runs."""

    @staticmethod
    def forward(ctx, x, log, event):
        ctx.log, ctx.event = log, event
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.event)
        return grad, None, None


def log_overlap():
    parallel_state.initialize_model_parallel()
    net = make_net()
    ddp = wrap(net, overlap_grad_reduce=True, bucket_size=1)
    log, all_reduce = [], dist.all_reduce
    numbers = {p.data_ptr(): name for name, q in net.named_parameters() for p in [q.main_grad]}

    def logged(tensor, *args, **kwargs):
        log.append("reduce " + numbers[tensor.data_ptr()])
        return all_reduce(tensor, *args, **kwargs)

    def run(x):
        for i, layer in enumerate(net.layers):
            x = torch.tanh(layer(Log.apply(x, log, f"layer {i} done")))
        net.extra(x).sum().backward()

    ddp.zero_grad_buffer()
    dist.all_reduce = logged
    try:
        with ddp.no_sync():
            run(make_data()[0].requires_grad_())
        first, log[:] = list(log), []
        run(make_data()[1].requires_grad_())
        ddp.finish_grad_sync()
    finally:
        dist.all_reduce = all_reduce
    return first, log


@pytest.mark.dist
def test_each_bucket_is_reduced_before_the_layers_below_run_backward():
    for accumulated, last in run_distributed(log_overlap, 2):
        assert accumulated == ["layer 2 done", "layer 1 done", "layer 0 done"]
        at = {event: i for i, event in enumerate(last)}
        for kind in ("weight", "bias"):
            assert at[f"reduce extra.{kind}"] < at["layer 2 done"]
            assert at[f"reduce layers.2.{kind}"] < at["layer 1 done"]
            assert at[f"reduce layers.1.{kind}"] < at["layer 0 done"]
        assert len(last) == 8 + 3


def use_extra_on_rank_0_only():
    context = parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), overlap_grad_reduce=True, bucket_size=1)
    ddp.zero_grad_buffer()
    ddp(make_data()[context.dp.rank], use_extra=context.dp.rank == 0).sum().backward()
    started = sum(bucket.is_started for bucket in ddp.buckets)
    ddp.finish_grad_sync()
    return gradients(ddp), started


@pytest.mark.dist
def test_a_parameter_unused_on_some_ranks():
    net, data = make_net(), make_data()
    (net(data[0], use_extra=True).sum() + net(data[1]).sum()).backward()
    results = run_distributed(use_extra_on_rank_0_only, 2)
    assert [started for _, started in results] == [8, 0]
    for grads, _ in results:
        for name, param in net.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-12)


def broadcast_from_rank_0():
    context = parallel_state.initialize_model_parallel()
    torch.manual_seed(context.dp.rank)
    net = Net()
    net.extra.requires_grad_(False)
    ddp = wrap(net)
    ddp.broadcast_params()
    return {name: tensor.clone() for name, tensor in ddp.state_dict().items()}


@pytest.mark.dist
def test_broadcast_params():
    torch.manual_seed(0)
    expected = Net().state_dict()
    for state in run_distributed(broadcast_from_rank_0, 2):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)


class FusedLinear(torch.autograd.Function):
    """y = x W^T that adds its weight gradient to `main_grad` itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.main_grad.addmm_(grad.t(), x)
        return grad @ weight, None


def identity(function, x):
    return function(x)


def recompute(function, x):
    return checkpoint(function, x, use_reentrant=False)


@pytest.mark.parametrize("run", [identity, recompute])
@pytest.mark.parametrize("tied", [False, True])
def test_an_operation_may_add_to_main_grad_itself(run, tied):
    """The bucket counts as ready after all uses, of which one may return a gradient (`tied`)."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    module = nn.ParameterList([weight])
    ddp = wrap(module, overlap_grad_reduce=True, bucket_size=1)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def model(x, linear):
        embedded = weight[:3] + x if tied else x
        return linear(torch.tanh(embedded), weight).square().sum()

    ddp.zero_grad_buffer()
    run(lambda x: model(x, FusedLinear.apply), x).backward()
    assert ddp.buckets[0].is_started
    (expected,) = torch.autograd.grad(model(x, lambda a, w: a @ w.t()), weight)
    torch.testing.assert_close(weight.main_grad, expected, rtol=1e-12, atol=1e-12)


def test_reentrant_recomputation():
    ddp = wrap(make_net(), overlap_grad_reduce=True, bucket_size=1)
    x = make_data()[0].requires_grad_()
    ddp.zero_grad_buffer()
    checkpoint(ddp, x, use_reentrant=True).sum().backward()
    expected = make_net()
    expected(x).sum().backward()
    for grad, param in zip(gradients(ddp).values(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            grad, torch.zeros_like(grad) if param.grad is None else param.grad
        )


def test_a_late_gradient_is_an_error_not_a_wrong_number():
    ddp = wrap(make_net())
    ddp.zero_grad_buffer()
    ddp(make_data()[0]).sum().backward()
    ddp.finish_grad_sync()
    with pytest.raises(ScheduleError, match=r"layers\.2\.bias.*no_sync"):
        ddp(make_data()[1]).sum().backward()


def test_without_overlap_no_sync_is_not_needed():
    ddp = wrap(make_net())
    ddp.zero_grad_buffer()
    for x in make_data():
        ddp(x).square().sum().backward()
    finalize_model_grads([ddp])
    expected = reference(torch.sum)
    for name, grad in gradients(ddp).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "in_fp32", "grad_dtype"),
    [
        (torch.float32, True, torch.float32),
        (torch.bfloat16, True, torch.float32),
        (torch.bfloat16, False, torch.bfloat16),
        (torch.float64, True, torch.float64),
    ],
)
def test_gradient_dtype(dtype, in_fp32, grad_dtype):
    ddp = wrap(make_net(dtype), grad_reduce_in_fp32=in_fp32)
    for param in ddp.parameters():
        assert param.dtype == dtype
        assert param.main_grad.dtype == grad_dtype


def test_low_precision_gradients_accumulate_in_fp32():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    ddp = wrap(nn.ParameterList([weight]))
    ddp.zero_grad_buffer()
    for value in [1.0] + [2.0**-9] * 8:
        (weight * value).sum().backward()
    assert weight.main_grad.item() == 1.0 + 8 * 2.0**-9  # bf16 would have stayed at 1


def test_dtypes_have_buffers_of_their_own():
    net = make_net(torch.float32)
    net.layers[1].to(torch.bfloat16)
    ddp = wrap(net, overlap_grad_reduce=True, bucket_size=1)
    assert {b.param_data.dtype for b in ddp.param_and_grad_buffers} == {
        torch.float32,
        torch.bfloat16,
    }
    assert [bucket.position for bucket in ddp.buckets] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_num_buckets():
    ddp = wrap(make_net(), overlap_grad_reduce=True, num_buckets=2)
    assert len(ddp.buckets) == 2


def test_the_wrapper_is_transparent():
    class Stage(nn.Linear):
        def set_input_tensor(self, tensor):
            self.received = tensor

    stage = Stage(2, 2)
    ddp = wrap(stage)
    ddp.set_input_tensor("activation")
    assert stage.received == "activation"
    state = copy.deepcopy(ddp.state_dict())
    assert set(state) == {"weight", "bias"}
    ddp.load_state_dict({name: torch.zeros_like(t) for name, t in state.items()})
    assert not ddp.param_and_grad_buffers[0].param_data.any()


def test_a_dropped_wrapper_is_freed():
    ddp = wrap(make_net())
    ddp(make_data()[0]).sum().backward()
    watch = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert watch() is None
