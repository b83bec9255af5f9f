"""Every pipeline schedule and split against figures of other programs, and against one process."""

import itertools
import json
import random
import re
import time

import pytest

from mcore import parallel_state
from mcore.checkpoint import read_tensors
from mcore.topology.context import ParallelContext
from mcore.training.gpt import datasets_provider, model_provider
from mcore.training.pretrain import Providers
from mcore.training.setup import report_parameters
from pretrain_gpt import forward_step
from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    largest_relative_difference,
    series,
    train,
    train_and_inspect,
)
from tests.equivalence.test_golden import (
    LAYOUT_TOLERANCE,
    Family,
    assert_equals_reference,
)
from tests.equivalence.tiny import command as tiny_command

full = pytest.mark.full

#: Schedules by the name of the case: ranks and flags.
SCHEDULES = {
    "gpipe2": (2, "--pipeline-schedule gpipe"),
    "1f1b2": (2, ""),
    "bounded2": (2, "--max-in-flight-microbatches 1"),
    "zb-h1-2": (2, "--pipeline-schedule zb-h1"),
    "interleaved2": (2, "--num-virtual-stages-per-pipeline-rank 2"),
    "zb-v2": (2, "--pipeline-schedule zb-v"),
    "gpipe4": (4, "--pipeline-schedule gpipe"),
    "1f1b4": (4, ""),
    "bounded4": (4, "--max-in-flight-microbatches 2"),
    "zb-h1-4": (4, "--pipeline-schedule zb-h1"),
}
#: Each schedule once a day, alternating families and microbatch counts.
DAILY = {
    ("gpt2", "gpipe2", 4, 1),
    ("llama", "bounded2", 4, 1),
    ("gpt2", "zb-h1-2", 2, 2),
    ("llama", "interleaved2", 1, 1),
    ("llama", "zb-v2", 8, 1),
    ("llama", "zb-h1-4", 4, 1),
}
#: Of the model of eight layers, at pp 4 with m = 12 / micro batch.
DEEP = {
    "interleaved": "--num-virtual-stages-per-pipeline-rank 2",
    "interleaved-group": "--num-virtual-stages-per-pipeline-rank 2 "
    "--microbatch-group-size-per-virtual-pipeline-stage 5",
    "by-layers": "--num-layers-per-virtual-pipeline-stage 1",
    "zb-v": "--pipeline-schedule zb-v",
    "ends": "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
    "first-zb-h1": "--decoder-first-pipeline-num-layers 2 --pipeline-schedule zb-h1",
    "layout": "--pipeline-model-parallel-layout Et|t*3|(t|)t*3L",
    "layout-virtual": "--pipeline-model-parallel-layout E|tt|t|t|t|t|t|tL",
    "auto": "--pipeline-model-parallel-layout auto",
    "auto-zb-v": "--pipeline-model-parallel-layout auto --pipeline-schedule zb-v",
    "ends-gpipe": "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1 "
    "--pipeline-schedule gpipe",
    "layout-bounded": "--pipeline-model-parallel-layout Et|t*3|(t|)t*3L "
    "--max-in-flight-microbatches 2",
}
#: Those that run with tensor and sequence parallelism as well, on 8 ranks.
DEEP_CUT = [("interleaved", 4), ("zb-v", 6), ("first-zb-h1", 3), ("layout-bounded", 12)]


def matrix():
    for name in ("gpt2", "llama"):
        for schedule in SCHEDULES:
            for m in (1, 2, 4, 8):
                for tp in (1, 2):
                    is_daily = (name, schedule, m, tp) in DAILY
                    if tp == 2 and SCHEDULES[schedule][0] == 4 and m != 4:  # 8 ranks
                        continue
                    marks = () if is_daily else (full,)
                    yield pytest.param(name, schedule, m, tp, marks=marks)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = Family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.golden
@pytest.mark.dist
@pytest.mark.parametrize(("name", "schedule", "m", "tp"), list(matrix()))
def test_every_schedule_equals_the_reference(families, name, schedule, m, tp):
    family = families(name)
    pp, flags = SCHEDULES[schedule]
    records = train([*family.command(8 // m), *flags.split()], Layout(tp=tp, pp=pp, sp=tp > 1))
    assert_equals_reference(records, family.reference)


def deep_cases():
    daily = {("zb-v", 3), ("layout-virtual", 4)}
    for case in DEEP:
        for m in (1, 2, 3, 4, 6, 12):
            yield pytest.param(case, m, 1, marks=() if (case, m) in daily else (full,))
    for case, m in DEEP_CUT:
        yield pytest.param(case, m, 2, marks=full)


@pytest.mark.golden
@pytest.mark.dist
@pytest.mark.parametrize(("case", "m", "tp"), list(deep_cases()))
def test_every_split_equals_the_reference(families, case, m, tp):
    family = families("gpt2_8layers")
    flags = [*family.command(12 // m), *DEEP[case].split()]
    assert_equals_reference(train(flags, Layout(tp=tp, pp=4, sp=tp > 1)), family.reference)


#: Plans of one's own, two ranks and four microbatches: some backwards split and others not.
FILES = {
    "usual": """
# any order that simulates
F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 W0.1 B0.2 B0.3 W0.3
F0.0,F0.1,B0.0,B0.1,W0.1,F0.2,B0.2,F0.3,B0.3,W0.3
""",
    "v": """
placement: v
F0.0 F0.1 F1.0 B1.0 F0.2 F1.1 B1.1 B0.0 F0.3 F1.2 B1.2 B0.1 F1.3 B1.3 B0.2 B0.3
F0.0 F1.0 F0.1 F1.1 B1.0 B0.0 F0.2 F1.2 B1.1 B0.1 F0.3 F1.3 B1.2 B0.2 B1.3 B0.3
""",
}


@pytest.mark.golden
@pytest.mark.dist
@pytest.mark.parametrize("case", ["usual", pytest.param("v", marks=full)])
def test_a_schedule_from_a_file_equals_the_reference(families, tmp_path, case):
    path = tmp_path / "plans.txt"
    path.write_text(FILES[case])
    family = families("gpt2")
    words = f"--pipeline-schedule file:{path}"
    if case == "v":
        words += " --num-virtual-stages-per-pipeline-rank 2"
    records = train([*family.command(2), *words.split()], Layout(pp=2))
    assert_equals_reference(records, family.reference)


SLEEPS = random.Random(17)


def stumbling_forward_step(data_iterator, model):
    """Every rank is held up now and then, the later ones for longer."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    time.sleep(SLEEPS.choice([0.0, 0.0, 0.0, 0.01]) * rank)
    return forward_step(data_iterator, model)


@pytest.mark.golden
@pytest.mark.dist
@pytest.mark.parametrize("m", [4, pytest.param(12, marks=full)])
@pytest.mark.parametrize("case", ["interleaved", pytest.param("zb-v", marks=full)])
def test_ranks_of_different_speeds_neither_hang_nor_change_a_number(families, case, m):
    family = families("gpt2_8layers")
    words = [*family.command(12 // m), *DEEP[case].split()]
    providers = Providers(datasets_provider, model_provider, stumbling_forward_step)
    records = train(words, Layout(pp=4), providers=providers)
    assert_equals_reference(records, family.reference)


#: Against our own run in one process, with dropout and evaluations on the way.
ODD = {
    "1f1b": (4, ""),
    "interleaved": (2, "--num-virtual-stages-per-pipeline-rank 2"),
    "zb-h1": (4, "--pipeline-schedule zb-h1"),
    "zb-v": (2, "--pipeline-schedule zb-v"),
    "bounded": (4, "--max-in-flight-microbatches 3"),
    "gpipe": (4, "--pipeline-schedule gpipe"),
}
#: With two chunks on each of four ranks, of a model of eight layers: fewer microbatches than ranks,
#: and a last group that is not full.
ODD_DEEP = (3, 5, 7, 8, 9)


def odd_cases():
    daily = {("interleaved", 3), ("zb-h1", 5), ("zb-v", 5)}
    for case, (pp, _) in ODD.items():
        for m in range(1, 2 * pp + 2):
            marks = () if (case, m) in daily else (full,)
            yield pytest.param("gpt2", case, pp, m, marks=marks)
    for case in ("interleaved", "zb-v"):
        for m in ODD_DEEP:
            yield pytest.param("gpt2_8layers", case, 4, m, marks=full)


@pytest.fixture(scope="module")
def alone(families):
    """Runs in one process by model and microbatch count."""
    made = {}

    def get(name, m):
        if (name, m) not in made:
            made[name, m] = train(odd_command(families(name), m), SINGLE)
        return made[name, m]

    return get


def odd_command(family, m):
    words = f"--global-batch-size {m} --train-iters 4 --split 90,10,0 --hidden-dropout 0.1"
    words += " --attention-dropout 0.1 --eval-iters 1 --eval-interval 2"
    return [*family.command(1), *words.split()]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "case", "pp", "m"), list(odd_cases()))
def test_every_microbatch_count_equals_one_process(families, alone, name, case, pp, m):
    words = [*odd_command(families(name), m), *ODD[case][1].split()]
    records, wanted = train(words, Layout(pp=pp)), alone(name, m)
    assert largest_difference(records, wanted) <= LAYOUT_TOLERANCE
    assert largest_difference(records, wanted, "valid_lm_loss") <= LAYOUT_TOLERANCE
    assert largest_relative_difference(records, wanted) <= 2e-5


@pytest.mark.dist
@pytest.mark.parametrize(
    "case", ["zb-v", pytest.param("interleaved", marks=full), pytest.param("zb-h1", marks=full)]
)
def test_data_parallel_overlap_and_a_sharded_optimizer(families, case):
    """The tied copies of the embedding are dealt alike, also where they lie on one rank."""
    family, (_, flags) = families("gpt2"), ODD[case]
    words = f"{flags} --use-distributed-optimizer --overlap-grad-reduce --ddp-num-buckets 3"
    records = train([*family.command(1), *words.split()], Layout(pp=2, dp=2))
    assert_equals_reference(records, family.reference)


@pytest.fixture(scope="module")
def in_bfloat16(families):
    """The usual schedule in bf16."""
    return train([*families("llama").command(2), "--bf16"], Layout(pp=2))


@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    [
        "zb-v2",
        *(pytest.param(case, marks=full) for case in ("gpipe2", "bounded2", "zb-h1-2")),
        pytest.param("interleaved2", marks=full),
    ],
)
def test_bfloat16_at_every_schedule(families, in_bfloat16, case):
    family = families("llama")
    words = [*family.command(2), "--bf16", *SCHEDULES[case][1].split()]
    records = train(words, Layout(pp=2))
    assert 0 < largest_difference(records, family.reference["iterations"]) <= 0.05
    assert largest_difference(records, in_bfloat16) <= 0.02


@pytest.mark.dist
def test_a_profile_shows_what_happened_beside_what_was_predicted(families, tmp_path):
    trace = tmp_path / "trace.json"
    words = f"--pipeline-schedule zb-h1 --train-iters 4 --profile-pipeline {trace}"
    train([*families("gpt2").command(2), *words.split()], Layout(pp=2))
    content = json.loads(trace.read_text())
    figures = content["otherData"]
    assert 0 < figures["bubble_measured"] < 1
    # From costs measured just now: test_pipeline_report has the arithmetic.
    assert 0 < figures["bubble_predicted"] < 1
    assert figures["step_seconds_predicted"] > 0
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    done = [(e["pid"], e["args"]["iteration"], e["name"]) for e in spans if e["name"][0] in "FBW"]
    kinds = [f"{kind}0.{m}" for kind in "FBW" for m in range(4)]
    assert sorted(done) == sorted((r, s, a) for r in (0, 1) for s in (2, 3, 4) for a in kinds)
    for rank in (0, 1):
        ends = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["pid"] == rank]
        assert all(end <= start + 1 for (_, end), (start, _) in itertools.pairwise(sorted(ends)))


def held_parameters(state):
    """Parameters of this rank that count: those that are updated, and those that are reported."""
    parts = [item.part for item in state.optimizer.params]
    updated = sum(part.sharding.owned_numel(part.run.shape) for part in parts)
    return updated, report_parameters(state.chunks, ParallelContext.single())


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 0), ("1f1b", 3), ("zb-h1", 0)])
def test_a_stage_without_layers(corpus, tmp_path, stage, schedule):
    words = tiny_command(corpus, 4, "--num-layers 2")
    flags = f"--pipeline-model-parallel-layout Et||tL --zero-stage {stage}"
    saving = f"--pipeline-schedule {schedule} --save {tmp_path}/c --save-interval 2"
    records = train([*words, *f"{flags} {saving}".split()], Layout(pp=3))
    wanted = train(words, SINGLE)
    assert largest_difference(records, wanted) <= LAYOUT_TOLERANCE
    again = f"{flags} {saving} --load {tmp_path}/c --ckpt-step 2 --no-load-rng"
    assert largest_difference(train([*words, *again.split()], Layout(pp=3)), wanted[2:]) <= (
        LAYOUT_TOLERANCE
    )


#: Splits of a model of five layers: layout, flags of the split and flags of the model.
SPLITS = {
    "ends": (Layout(pp=2), "--decoder-first-pipeline-num-layers 2", ""),
    "loss": (
        Layout(pp=2),
        "--account-for-loss-in-pipeline-split",
        "--untie-embeddings-and-output-weights",
    ),
    "layout": (Layout(pp=2), "--pipeline-model-parallel-layout Et|ttt|t|L", ""),
    "auto": (
        Layout(pp=2, tp=2, sp=True),
        "--pipeline-model-parallel-layout auto",
        "--vocab-size 102",
    ),
    "zb-v": (
        Layout(pp=2),
        "--pipeline-schedule zb-v --decoder-first-pipeline-num-layers 2",
        "",
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize(
    "case", [name if name == "layout" else pytest.param(name, marks=full) for name in SPLITS]
)
def test_parameters_trained_are_those_reported_and_those_saved(corpus, tmp_path, case):
    layout, split, model = SPLITS[case]
    words = tiny_command(corpus, 2, "--num-layers 5", model)
    ((_, whole),) = train_and_inspect(words, SINGLE, held_parameters)
    saving = [*words, *split.split(), "--save", str(tmp_path), "--save-interval", "2"]
    ranks = train_and_inspect(saving, layout, held_parameters)
    updated, reported = (sum(numbers) for numbers in zip(*ranks, strict=True))
    saved = {k: x for k, x in read_tensors(tmp_path).items() if k.startswith("model.")}
    assert updated == reported == sum(x.numel() for x in saved.values()) == whole
    numbers = {int(found[1]) for key in saved if (found := re.search(r"\.layers\.(\d+)\.", key))}
    assert numbers == set(range(5))


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("case", ["1f1b", "zb-v"])
def test_a_growing_batch_is_that_of_one_process(corpus, case):
    """4, then 8, then 12 samples a step: other microbatches, and so another plan, each time."""
    words = tiny_command(corpus, 2, "--train-samples 60 --rampup-batch-size 4 4 24")
    at = words.index("--train-iters")
    del words[at : at + 2]
    words[words.index("--global-batch-size") + 1] = "12"
    at = words.index("--lr-warmup-iters")
    words[at : at + 2] = ["--lr-warmup-samples", "8"]
    flags = ODD[case][1] or "--pipeline-schedule 1f1b"
    got = train([*words, *flags.split()], Layout(pp=2))
    wanted = train(words, SINGLE)
    assert series(got, "global_batch_size") == [4, 4, 4, 8, 8, 12, 12]
    assert largest_difference(got, wanted) <= LAYOUT_TOLERANCE
