import re
from types import SimpleNamespace

import pytest
import torch

from mcore.config.run import resolve
from mcore.log import configure, get_logger
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


def run_log(extra=""):
    configure(0, 1)  # here, since the logger keeps the stdout of this moment
    config = build_config(parse([*WORDS.split(), *extra.split()]))
    runtime = Runtime(ParallelContext.single(), torch.device("cpu"), False, plan_pipeline(config))
    return RunLog(config, resolve(config, 1), runtime, 0)


def outcome(loss, applied=True, norm=0.25):
    return StepOutcome(
        loss=torch.tensor(loss, dtype=torch.float64),
        grad_norm=torch.tensor(norm, dtype=torch.float64),
        num_tokens=torch.tensor(32.0, dtype=torch.float64),
        applied=torch.tensor(applied),
        learning_rate=5e-4,
        weight_decay=0.01,
        loss_scale=torch.ones(1),
        global_batch_size=4,
        watched={},
    )


def steps(log, outcomes):
    for i, item in enumerate(outcomes, 1):
        log.step(SimpleNamespace(iteration=i, consumed_train_samples=4 * i), item)


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
    log.evaluation("valid", SimpleNamespace(iteration=7), 2.0)
    log.close()
    line = capsys.readouterr().out
    assert "validation loss at iteration 7 | lm loss value: 2.000000E+00" in line
    assert "lm loss PPL: 7.389056E+00 |" in line
    text = (tmp_path / "r.jsonl").read_text()
    assert '"valid_lm_loss": 2.0' in text
    assert '"lm_loss"' not in text
