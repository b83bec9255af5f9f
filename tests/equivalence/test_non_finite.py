"""A run that meets NaN says where it came from, and ends before it could be saved."""

import math

import pytest
import torch

from mcore.checkpoint import complete_iterations
from mcore.errors import NumericsError, TransientNumericsError
from mcore.pipeline_parallel.actions import backward, forward
from mcore.pipeline_parallel.hooks import Unobserved
from mcore.training.gpt import datasets_provider, model_provider
from mcore.training.gradient_probe import GradientProbe
from mcore.training.non_finite import Evidence, NonFinite, describe, find
from mcore.training.pretrain import _exit_code
from pretrain_gpt import forward_step
from tests.equivalence.program import (
    SINGLE,
    Layout,
    Providers,
    layout_id,
    read_records,
    train,
    train_and_inspect,
)
from tests.equivalence.tiny import command

UNTIED = "--untie-embeddings-and-output-weights"
BIAS = "decoder.layers.1.mlp.linear_fc2.bias"
WORDS = "embedding.word_embeddings.weight"
_seen: list[tuple[int, set[int]]] = []


def recording_forward_step(data_iterator, model):
    step, loss_func = forward_step(_Recorded(data_iterator), model)
    return step, loss_func


class _Recorded:
    def __init__(self, inner):
        self._inner = inner

    def __next__(self):
        batch = next(self._inner)
        _seen.append((self._inner.iteration, set(batch["tokens"].flatten().tolist())))
        return batch


@pytest.fixture(scope="module")
def late_token(corpus):
    """A token that occurs first at some later iteration: (token, iteration, microbatch)."""
    _seen.clear()
    words = command(corpus, 6, UNTIED)
    train(
        words,
        SINGLE,
        providers=Providers(datasets_provider, model_provider, recording_forward_step),
    )
    known = set()
    for number, (iteration, tokens) in enumerate(_seen):
        if iteration >= 3 and tokens - known:
            return min(tokens - known), iteration, number % 4
        known |= tokens
    raise AssertionError("the corpus has no late token")


def broken_row(token):
    def provide(config, stage):
        model = model_provider(config, stage)
        if stage.pre_process:
            with torch.no_grad():
                model.embedding.word_embeddings.weight[token] = torch.nan
        return model

    return provide


class BrokenRow:
    """Makes a model of which one row of the word embedding is NaN."""

    def __init__(self, token):
        self.token = token

    def __call__(self, config, stage):
        return broken_row(self.token)(config, stage)


class BrokenGradient:
    """Makes a model in which a bias's gradient is infinite in the third backward of a rank."""

    def __init__(self, rank):
        self.rank = rank

    def __call__(self, config, stage):
        model = model_provider(config, stage)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank == self.rank and 1 in stage.layers:
            bias = dict(model.named_parameters())[BIAS]
            calls = []

            def spoil(grad):
                calls.append(1)
                return grad * math.inf if len(calls) == 3 else grad

            bias.register_hook(spoil)
        return model


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (SINGLE, ""),
        (Layout(pp=2), ""),
        pytest.param(SINGLE, "--bf16", marks=pytest.mark.full),
        pytest.param(Layout(pp=2), "--bf16", marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_a_broken_weight_ends_the_run_where_it_is_met(corpus, tmp_path, late_token, layout, flags):
    token, iteration, microbatch = late_token
    save, records = tmp_path / "save", tmp_path / "records.jsonl"
    words = command(corpus, 8, UNTIED, flags, "--save-interval 1 --save", str(save))
    words += ["--metrics-jsonl", str(records), "--log-interval", "1"]
    providers = Providers(datasets_provider, BrokenRow(token), forward_step)
    last = layout.world_size - 1
    with pytest.raises(Exception, match=f"iteration {iteration}: NaN or infinity") as caught:
        train_and_inspect(words, layout, providers=providers)
    message = str(caught.value)
    assert f"already not finite before the step: {WORDS} on rank 0" in message
    assert f"loss of microbatch {microbatch} on rank {last}" in message
    lines = read_records(records)  # the loss of that iteration is told all the same
    assert [line["iteration"] for line in lines] == list(range(1, iteration + 1))
    assert lines[-1]["lm_loss"] == "nan"  # JSON has no such number
    assert all(math.isfinite(line["lm_loss"]) for line in lines[:-1])
    assert complete_iterations(save) == []  # broken before any step, although the losses were not


def test_switched_off_the_update_is_left_out_and_counted(corpus, late_token):
    token, iteration, _ = late_token
    words = command(corpus, iteration, UNTIED, "--no-check-for-nan-in-loss-and-grad")
    providers = Providers(datasets_provider, BrokenRow(token), forward_step)
    records = train(words, SINGLE, providers=providers)
    assert [line["skipped"] for line in records] == [0] * (iteration - 1) + [1]


@pytest.mark.parametrize("flags", ["", "--zero-stage 2", "--overlap-grad-reduce"])
def test_a_broken_gradient_is_named(corpus, flags):
    """By chance: when the step is computed again, all is well, so that the sum may be all there is.

    The rank that made it is known where gradients are looked at before they are summed.
    """
    words = command(corpus, 4, flags)
    providers = Providers(datasets_provider, BrokenGradient(1), forward_step)
    with pytest.raises(Exception, match=f"iteration 2: .*gradient of {BIAS} ") as caught:
        train_and_inspect(words, Layout(dp=2), providers=providers)
    message = str(caught.value)
    if flags:
        assert "'s part of the sum over data-parallel ranks; " in message
        assert f"{BIAS} on rank" not in message
    else:
        assert f"gradient of {BIAS} on rank 1; " in message
    assert "; computed again it was finite: a transient fault" in message
    assert "The same command goes on" in message
    assert "loss of" not in message


class _SeesSamples:
    def __init__(self, inner):
        self._inner, self.samples = inner, []

    def __next__(self):
        batch = next(self._inner)
        self.samples = batch["dropout_state"].sample_index.tolist()
        return batch


class Spoiling:
    """A forward step in which the gradient of one sample is infinite, always; or its loss."""

    def __init__(self, sample, *, loss=False, times=100):
        self.sample, self.loss, self.times = sample, loss, times

    def __call__(self, data_iterator, model):
        seen = _SeesSamples(data_iterator)
        output, loss_func = forward_step(seen, model)
        if self.sample in seen.samples and self.times > 0:
            self.times -= 1
            if self.loss:
                output = output * math.inf
            else:
                output.register_hook(lambda grad: grad * math.inf)
        return output, loss_func


@pytest.mark.parametrize(
    ("layout", "flags", "microbatch"),
    [
        (SINGLE, "", 2),
        (Layout(dp=2), "--zero-stage 2", 1),
        pytest.param(Layout(dp=2), "", 1, marks=pytest.mark.full),
        pytest.param(Layout(dp=2), "--overlap-grad-reduce", 1, marks=pytest.mark.full),
        pytest.param(Layout(dp=2), "--zero-stage 3", 1, marks=pytest.mark.full),
        pytest.param(Layout(pp=2), "", 2, marks=pytest.mark.full),
    ],
    ids=layout_id,
)
@pytest.mark.parametrize("iterations", [2, 4])
def test_the_microbatch_of_a_broken_gradient_is_named(
    corpus, layout, flags, microbatch, iterations
):
    """The step is computed again before the run ends, be it in the next step or at the end."""
    providers = Providers(datasets_provider, model_provider, Spoiling(6))
    wanted = f"iteration 2: NaN or infinity: gradient of .* from microbatch {microbatch}"
    with pytest.raises(Exception, match=wanted) as caught:
        train_and_inspect(command(corpus, iterations, flags), layout, providers=providers)
    assert "; computed again it was so too. The update was left out" in str(caught.value)
    assert not isinstance(caught.value, TransientNumericsError)


@pytest.mark.parametrize("times", [1, 100])
def test_a_loss_that_is_not_finite_is_computed_again(corpus, times):
    """By chance, or because of the data."""
    spoiling = Spoiling(6, loss=True, times=times)
    providers = Providers(datasets_provider, model_provider, spoiling)
    with pytest.raises(NumericsError, match="loss of microbatch 2 on rank 0; ") as caught:
        train_and_inspect(command(corpus, 4), SINGLE, providers=providers)
    assert isinstance(caught.value, TransientNumericsError) == (times == 1)
    assert _exit_code(caught.value) == (16 if times == 1 else 17)
    assert ("computed again it was so too" in str(caught.value)) == (times > 1)


OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 1"


@pytest.mark.parametrize(
    "flags",
    [
        OVERLAP,
        f"--zero-stage 1 {OVERLAP}",
        "--zero-stage 3",
        *(
            pytest.param(flags, marks=pytest.mark.full)
            for flags in (
                f"--zero-stage 1 {OVERLAP} --overlap-param-gather",
                "--zero-stage 1",
                "--zero-stage 2",
                f"--zero-stage 2 {OVERLAP}",
                "--bf16 --zero-stage 3 --recompute-activations",
            )
        ),
    ],
)
@pytest.mark.parametrize(("sample", "microbatch"), [(9, 0), (15, 3)])
def test_rank_and_microbatch_are_those_that_made_the_gradient(corpus, flags, sample, microbatch):
    """The first and the last of four microbatches, which is the one that overlaps reductions."""
    providers = Providers(datasets_provider, model_provider, Spoiling(sample))
    words = command(corpus, 2, flags, "--global-batch-size 8")
    with pytest.raises(Exception, match="iteration 2: NaN or infinity: gradient of ") as caught:
        train_and_inspect(words, Layout(dp=2), providers=providers)
    message = str(caught.value)
    place = f" on rank 1 from microbatch {microbatch}"
    assert place in message
    assert message.count(" from microbatch ") == message.count(place)
    assert "part of the sum" not in message


FP16 = "--fp16 --num-layers 2 --hidden-size 16 --seq-length 8 --initial-loss-scale 2"


def test_a_loss_that_no_scale_mends_is_told_where_it_is(corpus, capsys):
    """With a dynamic scale it does not end the run at once, and is no overflow like others."""
    providers = Providers(datasets_provider, model_provider, Spoiling(6, loss=True))
    records = train(command(corpus, 3, FP16), SINGLE, providers=providers)
    assert [record["skipped"] for record in records] == [0, 1, 0]
    told = capsys.readouterr().out
    assert "iteration 2: the loss was not finite, which no loss scale mends" in told
    assert "loss of microbatch 2 on rank 0; its update was left out" in told


@pytest.mark.parametrize("flags", ["", pytest.param("--zero-stage 1", marks=pytest.mark.full)])
def test_the_end_at_the_lowest_scale_tells_where(corpus, flags):
    providers = Providers(datasets_provider, model_provider, Spoiling(9))
    words = command(corpus, 2, FP16, "--hysteresis 1 --min-loss-scale 2", flags)
    words += ["--global-batch-size", "8"]
    wanted = r"iteration 2: .*minimum \(2.0\): gradient of .* on rank 1 from microbatch 0"
    with pytest.raises(Exception, match=wanted):
        train_and_inspect(words, Layout(dp=2), providers=providers)


def probe_each_microbatch(state):
    """Run three backwards by hand under the probe; the last is spoiled."""
    chunk, evidence = state.chunks[0], Evidence(state.chunks[0].context)
    probe = GradientProbe(evidence, state.chunks, Unobserved())
    chunk.zero_grad_buffer()
    for number in range(3):
        with probe.running(forward(0, number)):
            tokens = torch.randint(100, (1, 16))
            loss = chunk(tokens, labels=tokens).sum()
        with probe.running(backward(0, number)):
            (loss * (math.inf if number == 1 else 1.0)).backward()
    return find(evidence, state.chunks)


def test_the_probe_names_the_microbatch(corpus):
    (found,) = train_and_inspect(command(corpus, 2), SINGLE, probe_each_microbatch)
    assert found
    assert {(f.kind, f.microbatch, f.rank) for f in found} == {("gradient", 1, 0)}
    assert "from microbatch 1" in describe(found)


def test_findings_in_words():
    many = [NonFinite("gradient", 3, None, f"p{i}") for i in range(5)]
    part = NonFinite("gradient", 3, None, "p", is_sum=True)
    assert "p in rank 3's part of the sum" in describe([part])
    assert describe(many) == "gradient of p0 on rank 3, p1 on rank 3, p2 on rank 3 and 2 more"
    assert "overflowed" in describe([])
