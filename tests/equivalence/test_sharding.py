"""Every ZeRO stage, with every other option, trains as the reference does.

The factors are stage, layout, overlap, recomputation and tying of the embedding. All combinations
run in `make test-full`; the daily suite runs a cover in which every two values meet.
"""

import itertools

import pytest

from tests.equivalence.copies import count_copies, held_elements
from tests.equivalence.program import (
    Layout,
    largest_difference,
    largest_relative_difference,
    layout_id,
    read_records,
    series,
    train,
    train_and_inspect,
    without_rates,
)
from tests.equivalence.test_golden import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    assert_equals_reference,
    families,  # noqa: F401  (a fixture)
)
from tests.equivalence.tiny import command

LAYOUTS = [
    Layout(dp=2),
    Layout(tp=2, dp=2, sp=True),
    Layout(pp=2, dp=2),
    Layout(pp=2, vpp=2, dp=2),
    Layout(tp=2, pp=2, dp=2),
]
RECOMPUTE = {
    "keep": "",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-activations --recompute-modules core_attn layernorm mlp",
}
FACTORS = [range(4), LAYOUTS, [False, True], list(RECOMPUTE), ["gpt2", "llama"]]
BF16_TOLERANCE = 2e-2
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 1"


def _cover():
    """Combinations in which every two values of two factors occur together.

    Every stage meets every layout, which is 20 runs; the other factors change along both, each in
    its own rhythm.
    """
    for stage, (number, layout) in itertools.product(range(4), enumerate(LAYOUTS)):
        overlap = (number + stage // 2) % 2 == 1
        recompute = list(RECOMPUTE)[(number + stage) % 3]
        yield stage, layout, overlap, recompute, ["gpt2", "llama"][(number // 2 + stage) % 2]


COVER = list(_cover())


def _cases():
    for combination in itertools.product(*FACTORS):
        yield pytest.param(
            *combination,
            marks=() if combination in COVER else pytest.mark.full,
            id=_id(combination),
        )


def _id(combination):
    stage, layout, overlap, recompute, name = combination
    return f"{name}-zero{stage}-{layout}-{'overlap' if overlap else 'plain'}-{recompute}"


def test_every_two_values_meet_in_the_cover():
    assert len(COVER) == 20
    for first, second in itertools.combinations(range(len(FACTORS)), 2):
        met = {(combination[first], combination[second]) for combination in COVER}
        assert met == set(itertools.product(FACTORS[first], FACTORS[second]))


def is_daily(session):
    """Whether no test of the whole matrix runs: then a few iterations have to do."""
    return not any(item.get_closest_marker("full") for item in session.items)


def shortened(session):
    return ["--exit-interval", "4"] if is_daily(session) else []


def assert_equals_beginning(records, reference, session):
    """All iterations, or the first few: step 1 shows a wrong sum in its norm."""
    whole = len(reference["iterations"])
    assert len(records) == (4 if is_daily(session) else whole)
    iterations = reference["iterations"][: len(records)]
    assert_equals_reference(records, {**reference, "iterations": iterations})


def assert_copies_are_equal(ranks, stage, layout):
    """All holders of a number agree, and those that should hold a replicated one are compared."""
    counts = count_copies(ranks)
    norm, copies = "decoder.layers.0.input_layernorm.weight", layout.tp
    assert counts[norm] == {copies * (1 if stage == 3 else layout.dp)}
    assert counts[f"exp_avg of {norm}"] == {copies * (1 if stage else layout.dp)}


def options_of(stage, overlap, recompute):
    words = ["--zero-stage", str(stage), *RECOMPUTE[recompute].split()]
    if overlap:
        words += [*OVERLAP.split(), *(["--overlap-param-gather"] if stage in (1, 2) else [])]
    return words


@pytest.mark.golden
@pytest.mark.parametrize(("stage", "layout", "overlap", "recompute", "name"), list(_cases()))
def test_training_equals_the_reference(
    families,  # noqa: F811
    request,
    tmp_path,
    stage,
    layout,
    overlap,
    recompute,
    name,
):
    family = families(name)
    words = [*family.command(1), *options_of(stage, overlap, recompute)]
    words += shortened(request.session)
    path = tmp_path / "records.jsonl"
    ranks = train_and_inspect([*words, "--metrics-jsonl", str(path)], layout, held_elements)
    assert_copies_are_equal(ranks, stage, layout)
    assert_equals_beginning(read_records(path), family.reference, request.session)


#: Products of bf16 are slow on a CPU: the daily suite runs these.
BF16_DAILY = [COVER[10], COVER[15]]


@pytest.mark.golden
@pytest.mark.parametrize(
    ("stage", "layout", "overlap", "recompute", "name"),
    [
        pytest.param(*case, marks=() if case in BF16_DAILY else pytest.mark.full, id=_id(case))
        for case in COVER
    ],
)
def test_bf16_follows_the_reference(
    families,  # noqa: F811
    request,
    stage,
    layout,
    overlap,
    recompute,
    name,
):
    """Within 2e-2 of the curve in fp32, which is not ours."""
    family = families(name)
    words = [*family.command(2), "--bf16", *options_of(stage, overlap, recompute)]
    records = train([*words, *shortened(request.session)], layout)
    iterations = family.reference["iterations"]
    assert len(records) == (4 if is_daily(request.session) else len(iterations))
    assert 0 < largest_difference(records, iterations[: len(records)]) <= BF16_TOLERANCE
    assert not any(series(records, "skipped"))


@pytest.mark.golden
@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3]
)
def test_three_ranks_and_counts_that_do_not_divide(families, request, stage):  # noqa: F811
    family = families("gpt2_8layers")
    words = [*family.command(1), "--zero-stage", str(stage), *shortened(request.session)]
    assert_equals_beginning(train(words, Layout(dp=3)), family.reference, request.session)


ODD = "--hidden-size 36 --num-attention-heads 3 --ffn-hidden-size 46"


@pytest.fixture(scope="module")
def odd_reference(corpus):
    return train(command(corpus, 6, ODD), Layout(dp=2))


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(dp=2), "--zero-stage 1 --ddp-num-buckets 3 --overlap-param-gather"),
        (Layout(dp=4), "--zero-stage 1 --num-distributed-optimizer-instances 2"),
        (Layout(dp=4), "--zero-stage 2 --num-distributed-optimizer-instances 2"),
        (Layout(dp=4), "--zero-stage 3 --num-distributed-optimizer-instances 2"),
        (Layout(pp=2, dp=2), "--zero-stage 3 --reshard-every-microbatch"),
    ],
    ids=layout_id,
)
def test_hybrid_sharding_and_odd_sizes(corpus, odd_reference, layout, flags):
    records = train(command(corpus, 6, ODD, flags), layout)
    assert largest_difference(records, odd_reference) <= LOSS_TOLERANCE
    assert largest_relative_difference(records, odd_reference) <= NORM_TOLERANCE


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            ("--zero-stage 1", Layout(dp=2)),
            ("--zero-stage 3", Layout(dp=4)),
            marks=pytest.mark.full,
        ),
        (("--zero-stage 3", Layout(tp=2, dp=2)), ("--zero-stage 2", Layout(pp=2, dp=2))),
        pytest.param(
            ("--bf16 --zero-stage 3", Layout(dp=2)),
            ("--bf16", Layout(dp=2)),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--bf16 --zero-stage 1", Layout(dp=2)),
            ("--bf16 --zero-stage 3", Layout(dp=2)),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_run_goes_on_at_another_stage(corpus, tmp_path, first, second):
    flags = "--save-interval 3 --no-load-rng --save"
    straight = train(command(corpus, 6, first[0]), first[1])
    path = tmp_path / "records.jsonl"
    words = command(corpus, 6, first[0], flags, str(tmp_path / "save"), "--exit-interval 3")
    train(words, first[1], records=path)
    words = command(
        corpus, 6, second[0], flags, str(tmp_path / "save"), "--load", str(tmp_path / "save")
    )
    resumed = train(words, second[1], records=path)
    assert series(resumed, "iteration") == [1, 2, 3, 4, 5, 6]
    loss, norm = (2e-2, 2e-2) if "--bf16" in first[0] else (1e-5, 2e-5)
    assert largest_difference(straight, resumed) <= loss
    assert largest_relative_difference(straight, resumed) <= norm


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_resuming_is_bit_exact(corpus, tmp_path, stage):
    options = f"--zero-stage {stage} --hidden-dropout 0.1 --overlap-grad-reduce"
    flags = ["--save-interval 3 --save", str(tmp_path / "save")]
    straight = train(command(corpus, 8, options), Layout(dp=2))
    path = tmp_path / "records.jsonl"
    words = command(corpus, 8, options, *flags, "--exit-interval 3")
    train(words, Layout(dp=2), records=path)
    words = command(corpus, 8, options, *flags, "--load", str(tmp_path / "save"))
    resumed = train(words, Layout(dp=2), records=path)
    assert without_rates(resumed) == without_rates(straight)
