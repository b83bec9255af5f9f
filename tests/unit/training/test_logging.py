import json
import re
from types import SimpleNamespace

import pytest
import torch

from mcore.config.run import resolve
from mcore.log import configure, get_logger, warn_alike
from mcore.topology.context import ParallelContext
from mcore.training.arguments import build_config, parse
from mcore.training.initialize import Runtime
from mcore.training.logging import RunLog
from mcore.training.pipeline_plan import plan_pipeline
from mcore.training.step import StepOutcome

WORDS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 20 --lr 1e-3"
)


@pytest.fixture(autouse=True)
def _logger():
    logger = get_logger()
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_what_all_ranks_find_alike_is_said_once(capsys):
    for rank in range(3):
        configure(rank, 3)
        warn_alike("%d corpora", 2)
        get_logger().warning("mine")
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] WARNING: 2 corpora",
        *(f"[rank {rank}] WARNING: mine" for rank in range(3)),
    ]


def run_log(extra=""):
    configure(0, 1)  # here, since the logger keeps the stdout of this moment
    config = build_config(parse([*WORDS.split(), *extra.split()]))
    runtime = Runtime(ParallelContext.single(), torch.device("cpu"), False, plan_pipeline(config))
    return RunLog(config, resolve(config, 1), runtime, 0)


def outcome(loss, applied=True, norm=0.25, **watched):
    return StepOutcome(
        loss=torch.tensor(loss, dtype=torch.float64),
        grad_norm=torch.tensor(norm, dtype=torch.float64),
        num_tokens=torch.tensor(32.0, dtype=torch.float64),
        applied=torch.tensor(applied),
        learning_rate=5e-4,
        weight_decay=0.01,
        loss_scale=torch.ones(1),
        global_batch_size=4,
        watched=watched,
        sequences=4,
        data_wait=0.125,
    )


def state(iteration):
    return SimpleNamespace(iteration=iteration, consumed_train_samples=4 * iteration)


def steps(log, outcomes, first=1):
    for i, item in enumerate(outcomes, first):
        log.step(state(i), item)


def fields(line):
    """Name -> value of a log line, split as tools that read Megatron's logs do."""
    parts = [part.strip() for part in line.split("|") if ":" in part]
    return dict(part.split(":", 1) for part in parts)


def test_the_line_has_megatrons_fields(capsys):
    steps(run_log("--log-interval 1"), [outcome(2.5)])
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+\] iteration +1/ +20 \|", line)
    assert line.endswith("|")
    assert list(fields(line.split("]", 1)[1])) == [
        "consumed samples",
        "elapsed time per iteration (ms)",
        "learning rate",
        "global batch size",
        "lm loss",
        "loss scale",
        "grad norm",
        "number of skipped iterations",
        "number of nan iterations",
        "tokens per second",
        "MFU",
        "data wait (ms)",
        "ETA",
    ]
    values = fields(line)
    assert values["consumed samples"].split() == ["4"]
    assert float(values["learning rate"]) == 5e-4
    assert float(values["lm loss"]) == 2.5
    assert float(values["grad norm"]) == 0.25


def test_a_line_is_the_mean_of_its_interval(capsys):
    steps(run_log("--log-interval 3"), [outcome(float(i)) for i in range(1, 8)])
    lines = capsys.readouterr().out.splitlines()
    assert [float(fields(line)["lm loss"]) for line in lines] == [2.0, 5.0]


def test_the_rest_of_an_interval_is_told_at_the_end(capsys):
    log = run_log("--log-interval 7")
    steps(log, [outcome(float(i)) for i in range(1, 21)])
    log.end_interval(state(20))
    log.end_interval(state(20))
    log.close()
    lines = capsys.readouterr().out.splitlines()
    assert [float(fields(line)["lm loss"]) for line in lines] == [4.0, 11.0, 17.5]


def test_fields_that_flags_add_stand_where_megatron_has_them(capsys):
    watched = {"num_zeros": torch.tensor(12.0), "params_norm": torch.tensor(3.0)}
    steps(run_log("--log-interval 1 --log-throughput"), [outcome(2.5, **watched)])
    line = capsys.readouterr().out
    names = list(fields(line.split("]", 1)[1]))
    at = names.index("elapsed time per iteration (ms)")
    assert names[at + 1] == "throughput per GPU (TFLOP/s/GPU)"
    at = names.index("grad norm")
    assert names[at + 1 : at + 3] == ["num zeros", "params norm"]
    assert fields(line)["num zeros"].split() == ["12"]


@pytest.fixture
def clock(monkeypatch):
    """Every module's seconds, which pass only when a test says so."""
    ticks = SimpleNamespace(now=1000.0)
    for module in ("logging", "rates"):
        monkeypatch.setattr(
            f"mcore.training.{module}.time", SimpleNamespace(perf_counter=lambda: ticks.now)
        )
    return ticks


def test_every_rate_is_what_a_hand_computes(capsys, tmp_path, monkeypatch, clock):
    """Two steps of 0.5 and 1.5 seconds, 4 sequences of 8 tokens; a device of 1 MFLOP/s."""
    monkeypatch.setattr("mcore.training.rates.peak", lambda *_: 1e6)
    log = run_log(f"--log-interval 2 --log-throughput --metrics-jsonl {tmp_path}/r.jsonl")
    log.restart_clock()
    for number, seconds in enumerate((0.5, 1.5), 1):
        clock.now += seconds
        log.step(state(number), outcome(2.0))
    log.close()
    # 2 layers of 16: qkv and out 4 x 256, scores and values 2 x 16 x 4, MLP 2 x 16 x 64
    flops = 6 * 2 * (4 * 256 + 2 * 16 * 4 + 2 * 16 * 64) * 4 * 8 / 1.0  # a step a second
    values = fields(capsys.readouterr().out)
    assert float(values["elapsed time per iteration (ms)"]) == 1000.0
    assert float(values["tokens per second"]) == 32.0
    assert float(values["throughput per GPU (TFLOP/s/GPU)"]) == pytest.approx(flops / 1e12, 1e-3)
    assert float(values["MFU"].strip().rstrip("%")) == pytest.approx(100 * flops / 1e6, abs=0.01)
    assert float(values["data wait (ms)"]) == 125.0
    assert values["ETA"].strip() == "0:00:18"  # 18 steps at a second each
    first, second = (json.loads(line) for line in (tmp_path / "r.jsonl").open())
    assert (first["seconds"], second["seconds"]) == (0.5, 1.5)
    assert "tokens_per_second" not in first
    assert second["tokens_per_second"] == 32.0
    assert second["tflops_per_gpu"] == flops / 1e12
    assert second["mfu"] == flops / 1e6
    assert second["data_wait_seconds"] == 0.125


def test_evaluations_count_for_the_eta_and_not_for_the_rates(capsys, clock):
    log = run_log("--log-interval 1")
    log.restart_clock()
    clock.now += 1.0
    log.step(state(1), outcome(2.0))
    clock.now += 3.0  # an evaluation
    log.restart_clock()
    clock.now += 1.0
    log.step(state(2), outcome(2.0))
    values = fields(capsys.readouterr().out.splitlines()[1])
    assert float(values["elapsed time per iteration (ms)"]) == 1000.0
    assert values["ETA"].strip() == "0:00:45"  # 18 steps, each at 5 / 2 seconds


def test_a_device_without_a_known_peak(capsys, monkeypatch):
    monkeypatch.setattr("mcore.training.rates.peak", lambda *_: None)
    steps(run_log("--log-interval 1"), [outcome(2.0)])
    assert "MFU: unknown |" in capsys.readouterr().out


def test_skipped_and_nan_steps_are_counted_and_leave_the_mean_alone(capsys):
    bad = outcome(float("nan"), applied=False, norm=float("inf"))
    steps(run_log("--log-interval 4"), [outcome(1.0), bad, outcome(3.0), bad])
    (line,) = capsys.readouterr().out.splitlines()
    values = fields(line)
    assert float(values["lm loss"]) == 2.0
    assert values["number of skipped iterations"].split() == ["2"]
    assert values["number of nan iterations"].split() == ["2"]


def test_an_evaluation_has_its_own_line_and_record(capsys, tmp_path):
    log = run_log(f"--metrics-jsonl {tmp_path}/r.jsonl")
    log.evaluation("valid", state(7), 2.0)
    log.close()
    line = capsys.readouterr().out
    assert "validation loss at iteration 7 | lm loss value: 2.000000E+00" in line
    assert "lm loss PPL: 7.389056E+00 |" in line
    text = (tmp_path / "r.jsonl").read_text()
    assert '"valid_lm_loss": 2.0' in text
    assert '"lm_loss"' not in text
