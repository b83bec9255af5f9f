import json
from pathlib import Path

import pytest

from mcore import num_microbatches_calculator as calculator
from mcore.errors import ConfigError, NotInitializedError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())


@pytest.fixture(autouse=True)
def fresh():
    calculator.destroy_num_microbatches_calculator()
    yield
    calculator.unset_num_microbatches_calculator()


@pytest.mark.parametrize("case", GOLDEN["microbatches"])
def test_equals_megatron_tables(case):
    calculator.init_num_microbatches_calculator(
        0,
        case["rampup"],
        case["global_batch_size"],
        case["micro_batch_size"],
        case["data_parallel_size"],
    )
    for consumed, size, number in case["consumed_gbs_num"]:
        calculator.update_num_microbatches(consumed, consistency_check=True)
        assert calculator.get_current_global_batch_size() == size
        assert calculator.get_current_running_global_batch_size() == size
        assert calculator.get_num_microbatches() == number


@pytest.mark.parametrize("resume_at", [0, 5, 7, 9])
def test_ramp_is_a_function_of_consumed_samples(resume_at):
    consumed, sizes = 0, []
    ramp = calculator.RampupBatchsizeNumMicroBatchesCalculator(16, 2, 2, False, 0, 4, 4, 48)
    for iteration in range(12):
        if iteration == resume_at:
            ramp = calculator.RampupBatchsizeNumMicroBatchesCalculator(16, 2, 2, False, 0, 4, 4, 48)
        ramp.update(consumed)
        sizes.append(ramp.get_current_global_batch_size())
        consumed += sizes[-1]
    assert sizes == [4, 4, 4, 4, 8, 8, 12, 12, 16, 16, 16, 16]
    assert consumed == 120


def test_constant():
    calculator.init_num_microbatches_calculator(0, None, 32, 2, 4)
    calculator.update_num_microbatches(10**12)
    assert calculator.get_num_microbatches() == 4
    assert calculator.get_micro_batch_size() == 2
    calculator.reconfigure_num_microbatches_calculator(0, None, 64, 2, 4)
    assert calculator.get_num_microbatches() == 8


def test_decrease_batch_size_if_needed():
    calculator.init_num_microbatches_calculator(1, None, 33, 2, 4, True)
    assert calculator.get_current_global_batch_size() == 33
    assert calculator.get_current_running_global_batch_size() == 32
    assert calculator.get_num_microbatches() == 4


def test_ramp_with_an_indivisible_start():
    calculator.init_num_microbatches_calculator(0, [6, 2, 10], 8, 4, 2)
    with pytest.raises(ConfigError, match=r"\(6\).*divisible"):
        calculator.update_num_microbatches(0)
    calculator.update_num_microbatches(0, consistency_check=False)
    calculator.update_num_microbatches(10)
    assert calculator.get_num_microbatches() == 1


def test_ramp_without_growth():
    calculator.init_num_microbatches_calculator(0, [8, 4, 100], 8, 4, 2)
    calculator.update_num_microbatches(50)
    assert calculator.get_current_global_batch_size() == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, None, 10, 4, 1), "divisible"),
        ((0, None, 3, 4, 1, True), "no microbatch fits"),
        ((0, None, 8, 0, 1), "micro_batch_size"),
        ((0, [4, 3, 10], 8, 1, 1), "whole steps"),
        ((0, [16, 4, 10], 8, 1, 1), "whole steps"),
        ((0, [4, 4], 8, 1, 1), "three numbers"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        calculator.init_num_microbatches_calculator(*arguments)


def test_initialisation_is_checked():
    with pytest.raises(NotInitializedError):
        calculator.get_num_microbatches()
    calculator.init_num_microbatches_calculator(0, None, 8, 1, 1)
    with pytest.raises(ConfigError, match="already"):
        calculator.init_num_microbatches_calculator(0, None, 8, 1, 1)


def test_steps_by_tokens():
    schedule = calculator.parse_step_schedule("0:16 1K:32, 2.5K:64", seq_length=10)
    assert schedule == [(0, 16), (100, 32), (250, 64)]
    steps = calculator.StepBatchsizeNumMicroBatchesCalculator(schedule, 4, 2)
    sizes = [steps.global_batch_size_at(n) for n in (0, 99, 100, 249, 250, 10**9)]
    assert sizes == [16, 16, 32, 32, 64, 64]


@pytest.mark.parametrize("text", ["", "1K:8", "0:8 x:9", "0:8 1K:4 1K:5", "0:0", "0:8 2K:4 1K:2"])
def test_steps_that_make_no_sense(text):
    with pytest.raises(ConfigError, match="step-batch-size-schedule"):
        calculator.parse_step_schedule(text, 10)
