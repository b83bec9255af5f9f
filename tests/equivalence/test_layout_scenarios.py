"""A layout changes nothing: what users of such systems reported, as runs (scenario class A).

| scenario | covered by |
|---|---|
| A01 small gaps between layouts | `test_golden`, `test_layouts` |
| A03 cross entropy over a cut vocabulary | `test_golden`; large logits here |
| A04 gradients scaled by tokens under pipelines | here |
| A07 means of means of masked micro batches | by hand here; `test_layouts` |
| A08 gate and up rows met wrongly | `test_reshard_ring`, `test_golden` (llama) |
| A09 replicated key and value heads drift | `test_replicas`; 300 steps here |
| A10 fewer query groups than tensor ranks | `test_layouts`; refusals here |
| A12 interleaving with uneven ends | here; `test_pipelines` (splits) |
| A13 first and last stage options at pp 1 | here; `tests/unit/topology/test_stages.py` |
| A14 initial weights depend on the layout | here |
| A16 recomputation over several layers | `test_layouts`; with virtual stages here |
"""

import itertools

import pytest
import torch

from mcore.checkpoint import read_tensors
from mcore.errors import McoreError
from mcore.training.gpt import datasets_provider, model_provider
from mcore.training.pretrain import Providers
from pretrain_gpt import forward_step
from tests.equivalence.copies import count_copies, held_elements
from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    largest_relative_difference,
    layout_id,
    series,
    train,
    train_and_inspect,
)
from tests.equivalence.tiny import command

full = pytest.mark.full

#: Runs of one iteration end within the warmup of a longer curve.
SHORT = "--lr-decay-iters 5"


def later(layouts):
    """All but the first in the full suite only."""
    return [
        layout if i == 0 else pytest.param(layout, marks=full) for i, layout in enumerate(layouts)
    ]


@pytest.mark.parametrize("layout", later([Layout(tp=2), Layout(tp=4)]), ids=layout_id)
def test_large_logits_are_finite_and_equal(corpus, layout):
    """A03."""
    words = command(corpus, 2, "--init-method-std 5.0 --untie-embeddings-and-output-weights")
    wanted, records = train(words), train(words, layout)
    first = wanted[0]["lm_loss"]
    assert 50 < first < float("inf")
    assert abs(records[0]["lm_loss"] - first) <= 2e-6 * first


@pytest.mark.parametrize("clip", ["0.0", pytest.param("0.5", marks=full)])
def test_the_first_gradient_norm_does_not_know_the_pipeline(corpus, clip):
    """A04: read before any update, with and without clipping; the loss alone would not show it."""
    words = command(corpus, 1, f"--clip-grad {clip}", SHORT)
    wanted = train(words)
    for layout in (Layout(pp=2), Layout(pp=4)):
        records = train(words, layout)
        assert largest_relative_difference(records, wanted) <= 1e-5
        assert series(records, "lm_loss") == series(wanted, "lm_loss")


#: Tokens and loss of each of two micro batches.
CONSTANT = itertools.cycle([(63, 5.0), (1, 2.0)])


def constant_losses(data_iterator, model):
    """Known sums in place of the model's."""
    output, _ = forward_step(data_iterator, model)
    count, value = next(CONSTANT)

    def loss_func(output):
        return output.sum() * 0.0 + count * value, torch.tensor(float(count))

    return output, loss_func


def test_losses_are_weighed_by_their_tokens(corpus):
    """A07, by hand: (63 x 5 + 1 x 2) / 64, where a mean of means gives 3.5."""
    providers = Providers(datasets_provider, model_provider, constant_losses)
    words = command(corpus, 1, "--global-batch-size 2", SHORT)
    (record,) = train(words, providers=providers)
    assert record["lm_loss"] == pytest.approx((63 * 5 + 2) / 64, rel=1e-6)


@full
@pytest.mark.parametrize(
    ("layout", "dropout"), [(Layout(tp=2), "0.1"), (Layout(tp=4), "0.0")], ids=layout_id
)
def test_replicated_heads_after_300_steps(corpus, layout, dropout):
    """A09."""
    options = f"--group-query-attention --num-query-groups 1 --hidden-dropout {dropout}"
    words = command(corpus, 300, options, f"--attention-dropout {dropout}")
    counts = count_copies(train_and_inspect(words, layout, held_elements))
    assert (
        max(n for name, found in counts.items() if "linear_qkv" in name for n in found) == layout.tp
    )


@pytest.mark.parametrize(
    ("options", "layout", "named"),
    [
        ("--num-attention-heads 6 --hidden-size 36", Layout(tp=4), r"6.*4"),
        ("--group-query-attention --num-query-groups 3", Layout(tp=2), r"3.*2|4.*3"),
        ("--swiglu --ffn-hidden-size 51", Layout(tp=2), r"51.*2"),
        ("--decoder-last-pipeline-num-layers 1", SINGLE, r"pipeline"),
        ("--decoder-first-pipeline-num-layers 1", SINGLE, r"pipeline"),
    ],
)
def test_refusals_name_what_was_typed(corpus, options, layout, named):
    """A08, A10, A13: before any model is built."""
    with pytest.raises(McoreError, match=named):
        train(command(corpus, 1, options, SHORT), layout)


VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        (6, f"{VIRTUAL} --decoder-first-pipeline-num-layers 4"),
        pytest.param(6, f"{VIRTUAL} --decoder-last-pipeline-num-layers 2", marks=full),
        pytest.param(7, "--pipeline-model-parallel-layout Et|t*3|tt|tL", marks=full),
    ],
)
def test_interleaving_with_uneven_ends(corpus, tmp_path, layers, flags):
    """A12: every layer is where its number says, from the first weights on."""
    options = f"--num-layers {layers} --hidden-dropout 0.1"
    still = f"{SHORT} --lr 0 --min-lr 0 --weight-decay 0 --save {tmp_path}"
    train(command(corpus, 1, options, f"{still}/one --save-interval 1"))
    train(command(corpus, 1, options, f"{still}/two --save-interval 1", flags), Layout(pp=2))
    assert_same_bits(tmp_path / "one", tmp_path / "two")
    wanted = train(command(corpus, 4, options))
    records = train(command(corpus, 4, options, flags), Layout(pp=2))
    assert largest_difference(records, wanted) <= 1e-5


def assert_same_bits(first, second):
    one, two = weights(first), weights(second)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def weights(root):
    return {name: t for name, t in read_tensors(root).items() if name.startswith("model.")}


@pytest.mark.parametrize(
    "layout",
    later([Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=4), Layout(dp=2), Layout(pp=2, vpp=2)]),
    ids=layout_id,
)
def test_initial_weights_are_those_of_one_process(corpus, tmp_path, layout):
    """A14; a step with learning rate 0 is made so that there is something to save."""
    still = f"{SHORT} --lr 0 --min-lr 0 --weight-decay 0 --save-interval 1 --save {tmp_path}"
    train(command(corpus, 1, f"{still}/one"))
    sharded = "--use-distributed-optimizer" if layout.dp > 1 else ""
    train(command(corpus, 1, f"{still}/two", sharded), layout)
    assert_same_bits(tmp_path / "one", tmp_path / "two")
    kernels = [t for n, t in weights(tmp_path / "one").items() if n.endswith("fc1.weight")]
    assert all(not torch.equal(kernels[0], other) for other in kernels[1:])


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(pp=2, vpp=2), 1),
        *(pytest.param(Layout(pp=2), layers, marks=full) for layers in (2, 3)),
        *(pytest.param(SINGLE, layers, marks=full) for layers in (2, 4)),
    ],
    ids=layout_id,
)
def test_recomputed_groups_are_bit_identical(corpus, layout, layers):
    """A16."""
    recompute = "--recompute-granularity full --recompute-method uniform"
    words = command(corpus, 4, "--hidden-dropout 0.1 --attention-dropout 0.1")
    wanted = train(words, layout)
    for options in (
        f"{recompute} --recompute-num-layers {layers}",
        "--recompute-granularity selective",
    ):
        records = train([*words, *options.split()], layout)
        for name in ("lm_loss", "grad_norm"):
            assert series(records, name) == series(wanted, name)
