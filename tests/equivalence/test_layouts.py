"""Every kind of model computes the same at every layout.

In float64, where only a fault can differ by more than rounding (1e-15 is usual): loss, gradient
norm, final parameters and moments. Then in float32 the tolerances that are promised.
"""

import itertools

import pytest
import torch

from mcore.checkpoint import read_tensors
from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    largest_relative_difference,
    layout_id,
    series,
    train,
)
from tests.equivalence.tiny import command

ITERATIONS = 3
EXACT = 1e-11
FIRST_LOSS_TOLERANCE = 2e-6
LOSS_TOLERANCE = 1e-5

VARIANTS = {
    # Learned positions, biases, tied output, both kinds of dropout.
    "gpt": "--hidden-dropout 0.1 --attention-dropout 0.1",
    # Two query groups: replicated key and value heads at tp 4.
    "llama": "--normalization RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 2 --add-qkv-bias --qk-layernorm "
    "--hidden-dropout 0 --attention-dropout 0",
    # One query group: replicated at any tp > 1.
    "multi-query": "--group-query-attention --num-query-groups 1 --kv-channels 12 --openai-gelu "
    "--position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved --rotary-base 500 "
    "--qk-layernorm --hidden-dropout 0 --attention-dropout 0.1",
    "untied": "--untie-embeddings-and-output-weights --position-embedding-type none "
    "--hidden-dropout 0.1 --attention-dropout 0",
}

# (layout, micro batch, options that must change nothing)
DAILY = [
    (Layout(tp=2, sp=True), 2, ""),
    (
        Layout(tp=4),
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
    ),
    (Layout(pp=2, vpp=2), 1, ""),
    (Layout(tp=2, pp=2, sp=True), 1, ""),
    (Layout(dp=2), 2, "--overlap-grad-reduce --ddp-num-buckets 5"),
]
FULL = [
    (Layout(tp=2), 1, ""),
    (Layout(tp=4, sp=True), 2, "--overlap-grad-reduce --ddp-num-buckets 2"),
    (Layout(pp=4), 1, ""),
    (Layout(tp=2, dp=2, sp=True), 2, ""),
    (Layout(pp=2, dp=2), 1, "--use-tp-pp-dp-mapping"),
    (Layout(dp=4), 1, ""),
    (Layout(tp=4, pp=2, sp=True, vpp=2), 1, ""),
    (Layout(tp=2, pp=2, dp=2, sp=True), 1, "--use-tp-pp-dp-mapping --overlap-grad-reduce"),
]  # fmt: skip


@pytest.fixture(scope="module")
def single_runs(corpus, tmp_path_factory):
    """Each variant in one process: records and final parameters."""
    made = {}

    def get(variant):
        if variant not in made:
            save = tmp_path_factory.mktemp(variant)
            made[variant] = run_and_read(corpus, save, VARIANTS[variant], SINGLE)
        return made[variant]

    return get


def run_and_read(corpus, save, options, layout, micro=1):
    flags = [f"--save {save} --save-interval {ITERATIONS} --no-save-rng"]
    words = command(corpus, ITERATIONS, options, *flags, micro=micro)
    return train(words, layout, dtype=torch.float64), read_tensors(save)


def key_rows(tensor, options):
    """Key biases among the rows of a QKV bias: their true gradient is zero (unless keys are rotated
    or normalised), and Adam makes steps of what rounding leaves of it."""
    heads, groups = 4, 1 if "groups 1" in options else 2 if "groups 2" in options else 4
    per_group = tensor.view(groups, heads // groups + 2, -1)
    return per_group[:, -2]


def assert_same_parameters(tensors, wanted, options):
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = (tensors[name] - value).abs()
        if name.startswith("model.") and name.endswith("linear_qkv.bias"):
            key_rows(difference, options).zero_()
        assert difference.max() <= EXACT, name


def float64_cases():
    """Every variant at every layout; daily every other one of a chess board, so that each comes."""
    for row, case in enumerate(DAILY + FULL):
        for column, variant in enumerate(VARIANTS):
            daily = row < len(DAILY) and (row + column) % 2 == 0
            yield pytest.param(variant, *case, marks=() if daily else pytest.mark.full)


@pytest.mark.parametrize(
    ("variant", "layout", "micro", "options"), list(float64_cases()), ids=layout_id
)
def test_float64_runs_agree_to_rounding(
    corpus, tmp_path, single_runs, variant, layout, micro, options
):
    wanted, wanted_parameters = single_runs(variant)
    flags = f"{VARIANTS[variant]} {options}"
    records, parameters = run_and_read(corpus, tmp_path, flags, layout, micro)
    assert largest_difference(records, wanted) <= EXACT
    assert largest_relative_difference(records, wanted) <= EXACT
    assert series(records, "tokens") == series(wanted, "tokens")
    assert_same_parameters(parameters, wanted_parameters, flags)


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        (
            "--hidden-dropout 0.1 --attention-dropout 0.1 --vocab-size 997 "
            "--make-vocab-size-divisible-by 128",
            [Layout(tp=4, sp=True), Layout(tp=2, pp=2, sp=True), Layout(pp=4)],
        ),
        pytest.param(
            VARIANTS["llama"], [Layout(tp=4), Layout(tp=2, pp=2, dp=2)], marks=pytest.mark.full
        ),
    ],
    ids=["gpt-dropout", "llama"],
)
def test_float32_runs_from_a_fresh_initialisation(corpus, options, layouts):
    words = command(corpus, 4, options)
    wanted = train(words)
    for layout in layouts:
        records = train(words, layout)
        first = abs(records[0]["lm_loss"] - wanted[0]["lm_loss"])
        assert first <= FIRST_LOSS_TOLERANCE, layout
        assert largest_difference(records, wanted) <= LOSS_TOLERANCE, layout


def every_layout():
    """All of worlds of 2, 4 and 8 out of tp and pp of 1, 2 and 4."""
    for world, tp, pp in itertools.product((2, 4, 8), (1, 2, 4), (1, 2, 4)):
        if world % (tp * pp) == 0:
            for sp in (False, True) if tp > 1 else (False,):
                yield Layout(tp=tp, pp=pp, dp=world // (tp * pp), sp=sp)


@pytest.fixture(scope="module")
def fresh_run(corpus):
    words = command(corpus, 4, "--hidden-dropout 0.1 --attention-dropout 0.1 --global-batch-size 8")
    return words, train(words)


@pytest.mark.full
@pytest.mark.parametrize("layout", list(every_layout()), ids=layout_id)
def test_every_layout_from_a_fresh_initialisation_with_dropout(fresh_run, layout):
    words, wanted = fresh_run
    records = train(words, layout)
    first = abs(records[0]["lm_loss"] - wanted[0]["lm_loss"])
    worst = largest_difference(records, wanted)
    print(f"{layout}: first loss {first:.1e}, all {worst:.1e}")
    assert first <= FIRST_LOSS_TOLERANCE
    assert worst <= LOSS_TOLERANCE


def test_dropout_trains_another_path_than_none(corpus):
    """Otherwise all tests of dropout above would hold for a dropout that does nothing."""
    plain, *others = (
        train(command(corpus, 2, f"--hidden-dropout {hidden} --attention-dropout {attention}"))
        for hidden, attention in ((0, 0), (0.1, 0), (0, 0.1), (0.1, 0.1))
    )
    losses = {records[0]["lm_loss"] for records in others}
    assert len(losses) == 3
    assert plain[0]["lm_loss"] not in losses


@pytest.mark.parametrize("layout", [SINGLE, Layout(pp=2)], ids=layout_id)
@pytest.mark.parametrize("layers", [1, 3])
def test_recomputation_is_bit_identical(corpus, layout, layers):
    recompute = (
        f"--recompute-granularity full --recompute-method uniform --recompute-num-layers {layers}"
    )
    wanted = train(command(corpus, 4), layout)
    records = train(command(corpus, 4, recompute), layout)
    assert series(records, "lm_loss") == series(wanted, "lm_loss")
    assert series(records, "grad_norm") == series(wanted, "grad_norm")


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2, pp=2, sp=True)], ids=layout_id)
def test_overlapped_reduction_is_bit_identical(corpus, layout):
    overlap = "--overlap-grad-reduce --ddp-num-buckets 4"
    wanted = train(command(corpus, 4), layout)
    records = train(command(corpus, 4, overlap), layout)
    assert series(records, "lm_loss") == series(wanted, "lm_loss")
    assert series(records, "grad_norm") == series(wanted, "grad_norm")
