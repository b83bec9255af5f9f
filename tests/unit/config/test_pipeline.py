"""Options of the pipeline, from a command line to a schedule and a split."""

from __future__ import annotations

import pytest

from mcore.config.checks import check
from mcore.config.run import microbatch_counts
from mcore.errors import ConfigError, McoreError
from mcore.pipeline_parallel import Schedule, default_schedule
from mcore.training.arguments import build_config, parse
from mcore.training.idle_options import idle_options
from mcore.training.initialize import Launch
from mcore.training.pipeline_plan import (
    plan_pipeline,
    plan_split,
    prove_pipeline,
    relative_costs,
)
from mcore.training.prepare import prepare

BASE = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 1 --lr 1e-3 --data-path x --tokenizer-type NullTokenizer "
    "--vocab-size 100"
)


def config_of(pp, layers, flags):
    return build_config(parse(words_of(pp, layers, flags)))


def words_of(pp, layers, flags):
    base = BASE.replace("--train-iters 1", "") if "--train-samples" in flags else BASE
    if "--step-batch-size-schedule" in flags:
        base = base.replace("--global-batch-size 8", "")
    return f"{base} --pipeline-model-parallel-size {pp} --num-layers {layers} {flags}".split()


def plan(pp, layers, flags=""):
    config = config_of(pp, layers, flags)
    check(config, pp)
    chosen = plan_pipeline(config)
    prove_pipeline(chosen, [8])
    return chosen, plan_split(config, chosen)


@pytest.mark.parametrize(
    ("pp", "layers", "flags", "schedule", "split"),
    [
        (1, 3, "", default_schedule(1), (3,)),
        (4, 8, "", default_schedule(4), (2, 2, 2, 2)),
        (2, 8, "--num-virtual-stages-per-pipeline-rank 2", default_schedule(2, 2), (2, 2, 2, 2)),
        (2, 8, "--num-layers-per-virtual-pipeline-stage 2", default_schedule(2, 2), (2, 2, 2, 2)),
        (2, 4, "--pipeline-model-parallel-layout E|tt|t|tL", default_schedule(2, 2), (0, 2, 1, 1)),
        (2, 3, "--pipeline-model-parallel-layout Ett|tL", default_schedule(2), (2, 1)),
        (4, 14, "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4",
         default_schedule(4), (2, 4, 4, 4)),
        (4, 30, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         default_schedule(4), (7, 8, 8, 7)),
        (2, 4, "--pipeline-schedule gpipe", Schedule(name="gpipe"), (2, 2)),
        (2, 4, "--pipeline-schedule zb-h1", Schedule(name="zb-h1"), (2, 2)),
        (2, 4, "--pipeline-schedule zb-v", Schedule(name="zb-v", num_chunks=2), (1, 1, 1, 1)),
        (2, 5, "--pipeline-schedule zb-v --decoder-last-pipeline-num-layers 2",
         Schedule(name="zb-v", num_chunks=2), (1, 1, 1, 2)),
        (2, 4, "--max-in-flight-microbatches 1", Schedule(name="bounded", max_in_flight=1), (2, 2)),
        (2, 8, "--num-virtual-stages-per-pipeline-rank 2 "
         "--microbatch-group-size-per-virtual-pipeline-stage 3",
         default_schedule(2, 2, 3), (2, 2, 2, 2)),
        (2, 5, "--pipeline-model-parallel-layout auto", default_schedule(2), (3, 2)),
    ],
)  # fmt: skip
def test_options_choose_schedule_and_split(pp, layers, flags, schedule, split):
    chosen, layers_of = plan(pp, layers, flags)
    assert chosen.schedule == schedule
    assert chosen.placement == schedule.placement(pp)
    assert layers_of == split


def test_auto_weighs_the_vocabulary():
    config = config_of(2, 8, "--pipeline-model-parallel-layout auto --vocab-size 2000")
    # 12 h^2 weights a layer and 32 x 64 of attention, against h V of the output layer.
    layer = 2 * 12 * 64 * 64 + 2 * 32 * 64
    assert relative_costs(config) == (2 * 64 / layer, (2 * 64 + 5) * 2000 / layer)
    assert plan_split(config, plan_pipeline(config)) == (5, 3)


@pytest.mark.parametrize(
    ("pp", "layers", "flags", "message"),
    [
        (2, 5, "", r"--num-layers \(5\) must be divisible by .* use 4 or 6 layers"),
        (1, 4, "--num-virtual-stages-per-pipeline-rank 2", "2 virtual stages a rank .* at least 2"),
        (2, 8, "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
         "exclude each other"),
        (2, 8, "--num-layers-per-virtual-pipeline-stage 3", r"must be a multiple of .* = 6"),
        (2, 4, "--pipeline-model-parallel-layout Ett|tL", "has 3 layers"),
        (2, 4, "--pipeline-model-parallel-layout Ett|ttL --account-for-loss-in-pipeline-split",
         "excludes the other flags"),
        (2, 4, "--pipeline-model-parallel-layout auto --account-for-loss-in-pipeline-split",
         "excludes the other flags"),
        (2, 4, "--pipeline-schedule zb", "unknown schedule 'zb'"),
        (2, 4, "--pipeline-schedule 1f1b --max-in-flight-microbatches 1", "belongs to"),
        (2, 4, "--pipeline-schedule interleaved-1f1b", "needs several chunks a rank"),
        (2, 4, "--pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2", "one model"),
        (4, 8, "--num-virtual-stages-per-pipeline-rank 2 "
         "--microbatch-group-size-per-virtual-pipeline-stage 2", r"must be at least the pipeline"),
        (2, 4, "--pipeline-schedule file:/nowhere/at/all.txt", "cannot be read"),
        (2, 4, "--pipeline-schedule zb-h1 "
         "--data-parallel-sharding-strategy optim_grads", "computes weight gradients after"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_any_group_exists(pp, layers, flags, message):
    with pytest.raises(ConfigError, match=message):
        plan(pp, layers, flags)


def test_a_file_is_checked_first(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0.0,F0.1,B0.0,B0.1\nF0.0,B0.0,F0.1,B0.1\n")
    flags = f"--pipeline-schedule file:{path}"
    with pytest.raises(ConfigError, match=r"mine\.csv is a schedule for 2 microbatches, and 8"):
        plan(2, 4, flags)
    config = config_of(2, 4, flags)
    prove_pipeline(plan_pipeline(config), [2])
    path.write_text("F0.0,B0.0,F0.1,B0.1\nF0.0,F0.1,B0.0,B0.1\n")
    with pytest.raises(McoreError, match=r"rank 0, action B0\.0: deadlock"):
        prove_pipeline(plan_pipeline(config), [2])


def test_every_number_of_microbatches_of_the_run_is_proved(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0.0,F0.1,B0.0,B0.1\nF0.0,B0.0,F0.1,B0.1\n")
    flags = f"--pipeline-schedule file:{path} --eval-iters 0"
    fitting = f"{flags} --global-batch-size 2"
    assert microbatch_counts(config_of(2, 4, fitting), 2) == {2}
    prepare_at(2, fitting)
    samples = "--train-samples 90"
    for more, counts in (
        ("--global-batch-size 2 --eval-global-batch-size 4", {2, 4}),
        (f"--rampup-batch-size 2 2 24 --global-batch-size 6 {samples}", {2, 4, 6}),
        (f"--step-batch-size-schedule 0:2,192:8 {samples}", {2, 8}),
    ):
        assert microbatch_counts(config_of(2, 4, f"{flags} {more}"), 2) == counts
        listed = ", ".join(map(str, sorted(counts)))
        message = rf"mine\.csv is for 2 microbatches, and .* have {listed} .*: use a schedule by"
        with pytest.raises(ConfigError, match=message):
            prepare_at(2, f"{flags} {more}")
    with pytest.raises(ConfigError, match="every step has its own: use a schedule by name"):
        prepare_at(2, f"{flags} --sft --max-tokens-per-microbatch 64")


def prepare_at(pp, flags):
    return prepare(parse(words_of(pp, 4, flags)), Launch(0, pp, 0))


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        ("", []),
        ("--pipeline-schedule zb-v", ["--pipeline-schedule"]),
        ("--pipeline-schedule interleaved-1f1b", ["--pipeline-schedule"]),
        ("--max-in-flight-microbatches 2", ["--max-in-flight-microbatches"]),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage 2",
            ["--microbatch-group-size-per-virtual-pipeline-stage"],
        ),
        ("--profile-pipeline trace.json", ["--profile-pipeline"]),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"],
        ),
        ("--pipeline-model-parallel-layout auto", ["--pipeline-model-parallel-layout"]),
        ("--pipeline-model-parallel-layout Et*4L", ["--pipeline-model-parallel-layout"]),
        (
            "--num-layers-per-virtual-pipeline-stage 4",
            ["--num-layers-per-virtual-pipeline-stage"],
        ),
        ("--use-tp-pp-dp-mapping", ["--use-tp-pp-dp-mapping"]),
    ],
)
def test_what_means_nothing_on_one_rank_is_told(flags, ignored):
    config = config_of(1, 4, flags)
    check(config, 1)
    assert plan_pipeline(config).schedule == default_schedule(1)
    assert plan_split(config, plan_pipeline(config)) == (4,)
    assert list(idle_options(config)) == [(flag, "there is one pipeline rank") for flag in ignored]
    assert list(idle_options(config_of(2, 4, flags))) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-schedule nonsense", "unknown schedule 'nonsense'"),
        ("--pipeline-schedule file:/nowhere", "cannot be read"),
        ("--pipeline-schedule gpipe --max-in-flight-microbatches 2", "belongs to schedule bounded"),
    ],
)
def test_what_does_not_exist_is_refused_on_one_rank_too(flags, message):
    with pytest.raises(ConfigError, match=message):
        plan_pipeline(config_of(1, 4, flags))
