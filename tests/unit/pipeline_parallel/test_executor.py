"""The executor and its edges in one process: hooks, losses, what a user may get wrong."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mcore.errors import ConfigError, LostPeerError, ScheduleError, ShapeError
from mcore.pipeline_parallel import (
    P2PCommunicator,
    ScheduleHooks,
    TensorSpec,
    forward_backward_no_pipelining,
    hooks_from_config,
)
from mcore.pipeline_parallel.actions import parse_action
from mcore.pipeline_parallel.communication import Batch
from mcore.pipeline_parallel.loss import read_loss
from mcore.pipeline_parallel.messages import Message
from mcore.pipeline_parallel.user_config import default_hooks, stage_dtype, stage_tensor_shape
from mcore.topology.context import ParallelContext
from mcore.topology.group import Group
from tests.unit.pipeline_parallel.tiny_stages import (
    BATCH,
    SEQ,
    Recorder,
    Stage,
    forward_step_with,
    gradients,
    loss_of,
    microbatch,
    reference,
)


def run(chunks, m, **options):
    options.setdefault("forward_step_func", forward_step_with("sum"))
    return forward_backward_no_pipelining(
        data_iterator=[iter([microbatch(i) for i in range(m)]) for _ in chunks],
        model=list(chunks),
        num_microbatches=m,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        **options,
    )


@pytest.mark.parametrize("form", ["sum", "pair", "mean"])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_one_rank_equals_plain_autograd(form, num_chunks):
    chunks = [Stage(stage, num_chunks) for stage in range(num_chunks)]
    recorder = Recorder()
    records = run(chunks, 4, forward_step_func=forward_step_with(form), hooks=recorder.hooks())
    wanted, losses, count = reference(num_chunks, 4, form)
    for chunk, grads in zip(chunks, wanted, strict=True):
        torch.testing.assert_close(gradients(chunk), grads, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([loss_of(r) for r in records], losses, rtol=1e-12, atol=0)
    assert recorder.tokens is not None
    assert recorder.tokens.dtype == torch.float64
    assert float(recorder.tokens) == (1.0 if form == "mean" else count)


def test_hooks_are_called_where_gradients_are_ready():
    recorder = Recorder()
    run([Stage(0, 2), Stage(1, 2)], 2, hooks=recorder.hooks())
    accumulated = [(what, chunk) for chunk in (0, 1, 1, 0) for what in ("enter", "leave")]
    assert recorder.events == [
        *(("param_sync", 0), *accumulated[:2], ("param_sync", 1), *accumulated[2:]),
        *(("grad_sync", 1), ("grad_sync", 0), ("finalize",)),
    ]


def test_loss_scale_multiplies_what_the_backward_starts_from():
    plain, scaled = Stage(0, 1), Stage(0, 1)
    run([plain], 2)
    records = run([scaled], 2, hooks=Recorder().hooks(scale=8.0))
    torch.testing.assert_close(
        gradients(scaled), {n: 8.0 * g for n, g in gradients(plain).items()}, rtol=1e-12, atol=0
    )
    torch.testing.assert_close([loss_of(r) for r in records], reference(1, 2, "sum")[1])


def test_evaluation_builds_no_graph_and_changes_nothing():
    recorder = Recorder()
    grad_modes = []

    def forward_step(iterator, model):
        grad_modes.append(torch.is_grad_enabled())
        return forward_step_with("sum")(iterator, model)

    chunks = [Stage(0, 2), Stage(1, 2)]
    hooks = recorder.hooks()
    records = run(chunks, 3, forward_step_func=forward_step, forward_only=True, hooks=hooks)
    torch.testing.assert_close([loss_of(r) for r in records], reference(2, 3, "sum")[1])
    assert grad_modes == [False] * 6
    assert recorder.events == [("param_sync", 0), ("param_sync", 1)]
    assert all(p.grad is None for chunk in chunks for p in chunk.parameters())


def test_other_data_than_losses_can_be_collected():
    def forward_step(iterator, model):
        output = model(next(iterator)[0])
        return output, lambda out, non_loss_data=False: ("kept", non_loss_data, out.shape)

    records = run(
        [Stage(0, 1)],
        2,
        forward_step_func=forward_step,
        forward_only=True,
        collect_non_loss_data=True,
    )
    assert records == [("kept", True, (SEQ, BATCH))] * 2
    with pytest.raises(ConfigError, match="needs forward_only=True"):
        run([Stage(0, 1)], 1, forward_step_func=forward_step, collect_non_loss_data=True)


class Ignores(Stage):
    """A middle stage whose output has nothing to do with its input."""

    def forward(self, tokens):  # noqa: ARG002
        return self.linear(torch.ones_like(self.input))[0]


class Passes(Stage):
    """A stage without layers."""

    def forward(self, tokens):  # noqa: ARG002
        return self.input


def test_a_stage_that_ignores_its_input_sends_a_zero_gradient_back():
    chunks = [Stage(0, 3), Ignores(1, 3), Stage(2, 3)]
    run(chunks, 2)
    assert all(not p.grad.any() for p in chunks[0].parameters())
    assert chunks[1].linear.weight.grad.any()


def test_a_stage_without_layers_passes_everything_through():
    with_gap, without = [Stage(0, 3), Passes(1, 3), Stage(2, 3)], [Stage(0, 3), Stage(2, 3)]
    run(with_gap, 3)
    run(without, 3)
    torch.testing.assert_close(gradients(with_gap[0]), gradients(without[0]), rtol=0, atol=0)


def test_frozen_stages_run():
    chunks = [Stage(0, 3), Stage(1, 3), Stage(2, 3)]
    for parameter in [*chunks[0].parameters(), *chunks[1].parameters()]:
        parameter.requires_grad = False
    run(chunks, 2)
    torch.testing.assert_close(gradients(chunks[2]), reference(3, 2, "sum")[0][2])
    for parameter in chunks[2].parameters():
        parameter.requires_grad = False
    run(chunks, 1)


def test_wrappers_are_looked_through():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            self.entered = 0

        @contextlib.contextmanager
        def no_sync(self):
            self.entered += 1
            yield

        def forward(self, *args):
            return self.module(*args)

    chunks = [Wrapper(Stage(0, 2)), Wrapper(Stage(1, 2))]
    run(chunks, 3)
    torch.testing.assert_close(gradients(chunks[1].module), reference(2, 3, "sum")[0][1])
    assert [chunk.entered for chunk in chunks] == [4, 4]  # two microbatches of three, F and B


class Tells(Stage):
    def __init__(self, *args):
        super().__init__(*args)
        self.told = 0

    def set_is_first_microbatch(self):
        self.told += 1


def test_chunks_are_told_of_the_first_microbatch():
    chunk = Tells(0, 1)
    run([chunk], 3)
    assert chunk.told == 1
    run([chunk], 3, forward_only=True, first_val_step=True)
    assert chunk.told == 2
    run([chunk], 3, forward_only=True, first_val_step=False)
    assert chunk.told == 2


def test_a_failing_action_is_named(caplog):
    def forward_step(iterator, model):
        tokens, mask = next(iterator)
        if torch.equal(tokens, microbatch(2)[0]):
            raise FloatingPointError("broken sample")
        return model(tokens), lambda out: (out.sum(), mask.sum())

    with (
        caplog.at_level(logging.ERROR, logger="mcore"),
        pytest.raises(FloatingPointError, match="broken sample"),
    ):
        run([Stage(0, 1)], 4, forward_step_func=forward_step)
    assert "pipeline rank 0 failed in F0.2 (chunk 0, microbatch 2)" in caplog.text


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(()), "got a tensor of shape"),
        ((torch.ones(2), {}), r"must be a tensor of one element, got a tensor of shape \[2\]"),
        ((1.0, {}), "must be a tensor of one element, got float"),
        ((torch.ones(()), 1, {}, 2), r"loss_func must return .* got \(a tensor of shape \[\], int"),
        ((torch.ones(()), "3", {}), "num_tokens .* must be a number or a tensor, got str"),
    ],
)
def test_losses_without_a_meaning_are_refused(returned, message):
    with pytest.raises(ScheduleError, match=message):
        read_loss(returned, 1)


def test_sum_and_mean_do_not_mix():
    forms = iter(["sum", "mean"])

    def forward_step(iterator, model):
        return forward_step_with(next(forms))(iterator, model)

    with pytest.raises(ScheduleError, match="a mean for one microbatch and a sum"):
        run([Stage(0, 1)], 2, forward_step_func=forward_step)


class Detached(Stage):
    """A stage whose output has lost its graph."""

    def forward(self, tokens):
        return super().forward(tokens).detach()


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Detached(0, 1)], r"the loss of chunk 0 .*\(microbatch 0\) has no gradient"),
        ([Stage(0, 2), Detached(1, 2)], "the loss of chunk 1 on pipeline rank 0 .*detached"),
        ([Detached(0, 2), Stage(1, 2)], "the output of chunk 0 on pipeline rank 0 .*detached"),
    ],
)
def test_nothing_is_left_untrained_in_silence(chunks, message):
    with pytest.raises(ScheduleError, match=message):
        run(chunks, 2)
    run(chunks, 2, forward_only=True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(2), r"must return \(output, loss_func\), got a tensor of shape \[2\]"),
        ((torch.ones(1), None), "returned NoneType in the place of loss_func"),
        ((torch.ones(1), torch.ones(1)), "in the place of loss_func"),
    ],
)
def test_a_forward_step_returns_output_and_loss_func(returned, message):
    with pytest.raises(ScheduleError, match=message):
        run([Stage(0, 1)], 1, forward_step_func=lambda iterator, model: returned)  # noqa: ARG005


def test_an_iterator_that_ends_early_is_told():
    with pytest.raises(ScheduleError, match="ended at microbatch 2; the step reads 3 of them"):
        forward_backward_no_pipelining(
            forward_step_func=forward_step_with("sum"),
            data_iterator=iter([microbatch(0), microbatch(1)]),
            model=Stage(0, 1),
            num_microbatches=3,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 2.0}, "num_microbatches is 2.0; pass a whole number"),
        ({"adjust_tensor_shapes_fn": max}, "must be None here: say the shapes with tensor_shape="),
        ({"p2p_communicator": 1}, "p2p_communicator must be None here"),
        ({"pg_collection": 1}, "pg_collection must be None here: .*initialize_model_parallel"),
    ],
)
def test_arguments_of_megatron_without_a_meaning_are_refused(options, message):
    sizes = {"num_microbatches": 1, "seq_length": SEQ, "micro_batch_size": BATCH}
    with pytest.raises(ConfigError, match=message):
        forward_backward_no_pipelining(
            forward_step_func=forward_step_with("sum"),
            data_iterator=iter([microbatch(0)]),
            model=Stage(0, 1),
            **{**sizes, **options},
        )


def test_what_travels_must_be_tensors():
    def forward_step(iterator, model):
        return {"x": model(next(iterator)[0])}, lambda out: (out.sum(), {})

    with pytest.raises(ScheduleError, match=r"chunk 0 on pipeline rank 0 returned dict"):
        run([Stage(0, 2), Stage(1, 2)], 1, forward_step_func=forward_step)


def test_a_first_stage_needs_no_set_input_tensor():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def set_input_tensor(self, tensor):
            self.module.set_input_tensor(tensor)

        def forward(self, tokens):
            return self.module(tokens)

    records = run([Wrapper(nn.Embedding(7, 1))], 1, forward_step_func=plain_step)
    assert len(records) == 1


def plain_step(iterator, model):
    tokens, mask = next(iterator)
    return model(tokens), lambda out: ((out.squeeze(-1) * mask).sum(), mask.sum())


def test_a_later_stage_needs_set_input_tensor():
    class Deaf(nn.Module):
        pass

    with pytest.raises(ScheduleError, match=r"\(Deaf\) is not the first stage and needs a method"):
        run([Stage(0, 2), Deaf()], 1)


def test_each_chunk_needs_its_own_iterator():
    with pytest.raises(ConfigError, match="one iterator for each of the 2 model chunks"):
        forward_backward_no_pipelining(
            forward_step_func=forward_step_with("sum"),
            data_iterator=iter([]),
            model=[Stage(0, 2), Stage(1, 2)],
            num_microbatches=1,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )


@pytest.mark.parametrize("wrong", [torch.zeros(3, 2, 4), torch.zeros(3, 2, 5, dtype=torch.float64)])
def test_a_tensor_of_another_shape_or_dtype_is_not_sent(wrong):
    specs = [TensorSpec((3, 2, 4), torch.float64)]
    p2p = P2PCommunicator(Group.single("pp"), specs, torch.device("cpu"))
    message = Message(parse_action("F0.0"), 0, parse_action("F0.0"), 1)
    with pytest.raises(ShapeError, match=r"between stages travels a tensor: \[3, 2, 4\] float64"):
        p2p.post(Batch(sends=(message,)), {message: (wrong,)})


class Work:
    def __init__(self, error=None):
        self.error = error

    def wait(self):
        if self.error is not None:
            raise RuntimeError(self.error)


@pytest.mark.parametrize(
    ("works", "named", "unnamed"),
    [
        ([Work(), Work("Connection closed by peer. x")], "F0.1 .* from pipeline rank 0", "rank 2"),
        ([Work("Timed out"), Work()], "the receipt of F0.0 .* by pipeline rank 2", "rank 0 "),
        ([Work("NCCL error")], "by pipeline rank 2 .* or F0.1 .* from pipeline rank 0", "never"),
    ],
    ids=["receive", "send", "one-work-for-all"],
)
def test_a_lost_peer_is_the_one_whose_message_failed(monkeypatch, works, named, unnamed):
    monkeypatch.setattr(dist, "P2POp", lambda *arguments: arguments)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: works)  # noqa: ARG005
    group = Group("pp", (4, 5, 6), 1, object())
    p2p = P2PCommunicator(group, [TensorSpec((2,), torch.float32)], torch.device("cpu"))
    sent = Message(parse_action("F0.0"), 1, parse_action("F0.0"), 2)
    awaited = Message(parse_action("F0.1"), 0, parse_action("F0.1"), 1)
    p2p.post(Batch((sent,), (awaited,)), {sent: (torch.zeros(2),)})
    with pytest.raises(LostPeerError, match=named) as caught:
        p2p.receive(awaited)
    assert unnamed not in str(caught.value)


def test_megatrons_callables_become_hooks():
    calls = []
    chunks = [Stage(0, 2), Stage(1, 2)]
    config = SimpleNamespace(
        no_sync_func=lambda: contextlib.nullcontext(calls.append("no_sync")),
        grad_sync_func=[lambda ps, c=c: calls.append(("grad", c, len(list(ps)))) for c in (0, 1)],
        param_sync_func=None,
        grad_scale_func=lambda loss: loss * 2.0,
        finalize_model_grads_func=lambda *call: calls.append(("finalize", len(call[0]), call[1])),
    )
    run(chunks, 2, hooks=hooks_from_config(config, chunks))
    *before, (what, num_chunks, tokens) = calls
    assert before == ["no_sync"] * 4 + [("grad", 1, 4), ("grad", 0, 3)]
    assert (what, num_chunks, float(tokens)) == ("finalize", 2, reference(2, 2, "sum")[2])
    wanted = reference(2, 2, "sum")[0][0]
    torch.testing.assert_close(gradients(chunks[0]), {n: 2 * g for n, g in wanted.items()})

    calls.clear()
    chunks[0].config = config
    run(chunks, 2, forward_step_func=forward_step_with("mean"))  # found through the model's config
    (finalize,) = [call for call in calls if call[0] == "finalize"]
    assert float(finalize[2]) == 1.0


def test_one_function_a_chunk():
    with pytest.raises(ConfigError, match="1 functions were given for 2 model chunks"):
        hooks_from_config(SimpleNamespace(no_sync_func=[None]), [Stage(0, 2), Stage(1, 2)])
    assert default_hooks([Stage(0, 1)]) == ScheduleHooks()


def test_shape_and_dtype_between_stages():
    ctx = ParallelContext.single()
    config = SimpleNamespace(hidden_size=16, sequence_parallel=True)
    assert stage_tensor_shape(config, ctx, 32, 2) == (32, 2, 16)
    with pytest.raises(ConfigError, match="pass tensor_shape="):
        stage_tensor_shape(SimpleNamespace(), ctx, 32, 2)
    assert stage_dtype(config, [Stage(0, 1)]) is torch.float64
    assert stage_dtype(SimpleNamespace(pipeline_dtype=torch.bfloat16), []) is torch.bfloat16
    with pytest.raises(ConfigError, match="pass dtype="):
        stage_dtype(None, [nn.Identity()])
