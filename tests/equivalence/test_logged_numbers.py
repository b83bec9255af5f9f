"""Every figure that a run writes, against one computed here from the records or by hand."""

import json
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from tests.equivalence.faults import SlowForward
from tests.equivalence.program import SINGLE, Layout, layout_id, series, train
from tests.equivalence.tiny import BATCH, SEQUENCE, VOCABULARY, command

#: 4 layers of 32: qkv and out 4 x 32 x 32, scores and values 2 x 32 x 8 keys, MLP 2 x 32 x 128.
FLOPS = 6 * (4 * (4 * 32 * 32 + 2 * 32 * 8 + 2 * 32 * 128) + 32 * VOCABULARY) * BATCH * SEQUENCE


def number(line, name):
    (found,) = re.findall(rf"\| {re.escape(name)}: +([^ ]+) \|", line.replace("|", "| |"))
    return float(found.rstrip("%"))


def test_a_line_agrees_with_the_records_of_its_interval(corpus, tmp_path, capsys):
    flags = "--log-interval 3 --log-throughput --log-params-norm --timing-log-level 2"
    records = train(command(corpus, 7, flags), records=tmp_path / "r.jsonl")
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if "| consumed samples" in line]
    for line, first, last in zip(lines, (0, 3, 6), (3, 6, 7), strict=True):
        interval = records[first:last]
        mean = sum(series(interval, "seconds")) / len(interval)
        losses = series(interval, "lm_loss")
        assert f"iteration {last:8d}/{7:8d}" in line
        assert number(line, "consumed samples") == last * BATCH
        assert number(line, "lm loss") == pytest.approx(sum(losses) / len(losses), abs=1e-6)
        assert number(line, "grad norm") == pytest.approx(interval[-1]["grad_norm"], abs=5e-4)
        assert number(line, "params norm") == pytest.approx(interval[-1]["params_norm"], abs=5e-4)
        assert number(line, "learning rate") == pytest.approx(interval[-1]["learning_rate"], 1e-6)
        assert number(line, "elapsed time per iteration (ms)") == pytest.approx(1e3 * mean, abs=0.1)
        assert number(line, "tokens per second") == pytest.approx(64 / mean, abs=0.1)
        tflops = number(line, "throughput per GPU (TFLOP/s/GPU)")
        assert tflops == pytest.approx(FLOPS / mean / 1e12, rel=1e-3)
        assert 0 < number(line, "MFU") < 100
    # The parts of a step, in milliseconds a step: they are no longer than the step.
    phases = dict(re.findall(r"^    ([a-z-]+) \.+: \(([\d.]+), ", output, re.M))
    whole = number(lines[-1], "elapsed time per iteration (ms)")
    inside = sum(float(phases[name]) for name in ("forward-compute", "backward-compute"))
    assert inside + float(phases["all-grads-sync"]) <= float(phases["forward-backward"]) + 0.1
    assert float(phases["forward-backward"]) + float(phases["optimizer"]) <= whole + 0.1


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2)], ids=layout_id
)
def test_work_and_tokens_do_not_depend_on_the_layout(corpus, layout):
    records = train(command(corpus, 4, "--log-interval 2 --log-throughput"), layout)
    assert series(records, "tokens") == [BATCH * SEQUENCE - r for r in _masked(corpus)]
    assert series(records, "consumed_train_samples") == [4, 8, 12, 16]
    for number in (1, 3):
        mean = (records[number - 1]["seconds"] + records[number]["seconds"]) / 2
        job = records[number]["tflops_per_gpu"] * 1e12 * layout.world_size
        assert job * mean == pytest.approx(FLOPS, rel=1e-9)
        assert records[number]["tokens_per_second"] * mean == pytest.approx(64.0, rel=1e-9)


def _masked(corpus):
    """Tokens that --eod-mask-loss leaves out, from a run in one process."""
    return [BATCH * SEQUENCE - n for n in series(train(command(corpus, 4), SINGLE), "tokens")]


def test_curves_of_a_resumed_run_are_those_of_the_records(corpus, tmp_path, monkeypatch):
    """Saved at 2, left at 4 without a save, resumed at 2: no point twice, none missing."""
    # Files of one second and process are read in the order of a text that ends in this number.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    save, file = tmp_path / "save", tmp_path / "r.jsonl"
    options = f"--save {save} --save-interval 2 --log-interval 1 --eval-iters 1 --eval-interval 3"
    train(command(corpus, 6, options, "--exit-interval 2"), records=file)
    train(command(corpus, 6, f"{options} --load {save} --exit-interval 4"), records=file)
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    records = train(command(corpus, 6, f"{options} --load {save}"), records=file)
    assert series(records, "iteration") == [1, 2, 3, 3, 4, 5, 6, 6]
    reader = EventAccumulator(str(save / "tensorboard"))
    reader.Reload()
    curves = {"lm loss": "lm_loss", "grad-norm": "grad_norm", "learning-rate": "learning_rate"}
    for tag, name in (curves | {"lm loss validation": "valid_lm_loss"}).items():
        expected = [(r["iteration"], r[name]) for r in records if name in r]
        drawn = [(event.step, event.value) for event in reader.Scalars(tag)]
        assert [step for step, _ in drawn] == [step for step, _ in expected]
        assert [v for _, v in drawn] == pytest.approx([v for _, v in expected], rel=1e-6)
    by_samples = EventAccumulator(str(save / "tensorboard" / "samples"))
    by_samples.Reload()
    samples = [(event.step, event.value) for event in by_samples.Scalars("lm loss vs samples")]
    assert [step for step, _ in samples] == [4 * i for i in range(1, 7)]
    for tag in ("tokens-per-second", "data-wait", "mfu"):
        assert [event.step for event in reader.Scalars(tag)] == [1, 2, 3, 4, 5, 6]
    assert any(tag.endswith("memory-total-gib") for tag in reader.Tags()["scalars"])


def test_a_profile_of_two_iterations(corpus, tmp_path):
    flags = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3 "
    train(command(corpus, 4, flags, f"--tensorboard-dir {tmp_path}"))
    (path,) = tmp_path.glob("*.json")
    events = json.loads(path.read_text())["traceEvents"]
    ranges = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    for name in ("forward-backward", "optimizer", "all-grads-sync", "F0.0", "B0.3"):
        assert ranges.count(name) == 2
    assert any("mm" in e["name"] for e in events if e.get("cat") == "cpu_op")


def test_profiling_and_timing_change_no_number(corpus, tmp_path):
    watch = "--log-straggler --log-hardware --log-progress --timing-log-level 2 --log-interval 1"
    more = f"--profile --use-pytorch-profiler --save {tmp_path} --save-interval 2 --log-throughput"
    plain, watched = train(command(corpus, 3)), train(command(corpus, 3, watch, more))
    for name in ("lm_loss", "grad_norm", "learning_rate", "tokens"):
        assert series(watched, name) == series(plain, name)
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[1] for line in lines] == ["started", "saved", "saved", "ended"]
    assert f"\ttokens: {3 * 64}\tfloating-point operations: {3 * FLOPS:.6e}" in lines[-1]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "slow", "named"),
    [
        (Layout(dp=2), 1, "forward-compute: rank 1 takes"),
        pytest.param(
            Layout(tp=2, dp=2), 3, "forward-compute: tensor-parallel ranks 2 3 take",
            marks=pytest.mark.full,
        ),
    ],
    ids=layout_id,
)  # fmt: skip
def test_a_slow_rank_is_named(corpus, tmp_path, layout, slow, named):
    fault = SlowForward(slow, 0.05, tmp_path / "log")
    words = command(corpus, 4, "--log-straggler --log-interval 2")
    train(words, layout, providers=fault.providers())
    told = [line for line in fault.log.read_text().splitlines() if "straggler: forward" in line]
    assert len(told) == 2
    for line in told:
        assert named in line
        assert float(re.search(r"take?s? ([\d.]+) ms", line)[1]) > 50 * BATCH // layout.dp
