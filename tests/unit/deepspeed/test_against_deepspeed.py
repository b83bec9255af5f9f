"""Batch triangle and schedules against what DeepSpeed itself computed.

`golden/deepspeed_settings.json`: `batch` has rows of (data-parallel size, `train_batch_size`,
`train_micro_batch_size_per_gpu`, `gradient_accumulation_steps`, what `DeepSpeedConfig` makes of
them or null for an error); `rates` has the learning rate of each iteration, read before the step,
of its schedulers over torch's SGD with lr 1e-3; `log_rates` those of its default warmup.
"""

import json
from pathlib import Path

import pytest

from mcore.deepspeed import solve_batch
from mcore.errors import ConfigError
from mcore.optimizer import get_optimizer_param_scheduler
from mcore.training.arguments import read
from mcore.training.prepare import settle_options

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/deepspeed_settings.json").read_text())
MODEL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 1 "
    "--tokenizer-type NullTokenizer --vocab-size 9 --data-path corpus --train-iters 20 --lr 1e-3"
)


def test_the_batch_triangle():
    for copies, train, micro, accumulation, wanted in GOLDEN["batch"]:
        try:
            sizes = solve_batch(train, micro, accumulation, copies)
        except ConfigError:
            sizes = None
        found = None if sizes is None else [sizes.train, sizes.micro, sizes.accumulation]
        assert found == wanted, (copies, train, micro, accumulation)


class _Groups:
    def __init__(self):
        self.param_groups = [{}]


def rates(name, tmp_path, kind="rates", batch=1):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"scheduler": {"type": name, "params": GOLDEN[kind][name]["params"]}})
    )
    line = f"{MODEL} --deepspeed_config {path}"
    config = settle_options(read(line.split()), 1).config
    groups = _Groups()
    schedule = get_optimizer_param_scheduler(
        groups, config.optimizer, config.scheduler, global_batch_size=batch, train_iters=20
    )
    found = []
    for _ in range(20):
        found.append(groups.param_groups[0]["lr"])
        schedule.step(batch)
    return found


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR"])
def test_a_rate_is_deepspeeds_of_the_next_iteration(name, tmp_path):
    """DeepSpeed takes the rate of step 0 twice; mcore, as Megatron, once."""
    theirs = GOLDEN["rates"][name]["rates"]
    assert rates(name, tmp_path)[:19] == pytest.approx(theirs[1:], abs=1e-15)


def test_the_cosine_is_deepspeeds_of_the_same_iteration(tmp_path):
    """Its warmup takes step 0 twice as well, and its decay begins one step ahead."""
    theirs, ours = GOLDEN["rates"]["WarmupCosineLR"]["rates"], rates("WarmupCosineLR", tmp_path)
    assert ours[:5] == pytest.approx(theirs[1:6], abs=1e-15)
    assert ours[6:] == pytest.approx(theirs[6:], abs=1e-15)


@pytest.mark.parametrize("batch", [1, 12])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_logarithmic_warmup_is_deepspeeds(name, batch, tmp_path):
    """Its default. The cosine's decay begins one step ahead."""
    golden = GOLDEN["log_rates"][name]
    theirs, ours = golden["rates"], rates(name, tmp_path, "log_rates", batch)
    warmup = golden["params"]["warmup_num_steps"]
    last = warmup if name == "WarmupCosineLR" else 19
    assert ours[:last] == pytest.approx(theirs[1 : last + 1], abs=1e-15)
    assert max(ours[: warmup + 1]) == pytest.approx(1e-3, abs=1e-15)
    if name == "WarmupCosineLR":
        assert ours[warmup + 1 :] == pytest.approx(theirs[warmup + 1 :], abs=1e-15)
