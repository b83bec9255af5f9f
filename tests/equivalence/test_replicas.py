"""All copies of a logically single number stay bit-identical over a run.

Every rank reports which elements of which global parameter and state it holds; wherever two ranks
hold the same, it must be the same bits: data-parallel copies, norms and row-parallel biases over
tensor ranks, replicated key and value heads, the tied embedding on the first and the last stage.
`test_sharding.py` asks the same at every ZeRO stage.
"""

import pytest

from tests.equivalence.copies import count_copies, held_elements
from tests.equivalence.program import Layout, layout_id, train_and_inspect
from tests.equivalence.tiny import command

OPTIONS = {
    "gpt": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "multi-query": "--group-query-attention --num-query-groups 1 --qk-layernorm --swiglu "
    "--ffn-hidden-size 48 --position-embedding-type rope",
    "bf16": "--bf16 --overlap-grad-reduce --ddp-num-buckets 3",
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("gpt", Layout(tp=2, pp=2, sp=True)),
        ("bf16", Layout(pp=2, dp=2)),
        pytest.param("gpt", Layout(pp=2, dp=2), marks=pytest.mark.full),
        pytest.param("multi-query", Layout(tp=4, sp=True), marks=pytest.mark.full),
        pytest.param("bf16", Layout(tp=2, dp=2, sp=True), marks=pytest.mark.full),
        pytest.param("bf16", Layout(tp=2, pp=2, dp=2, sp=True), marks=pytest.mark.full),
        pytest.param("multi-query", Layout(tp=2, pp=2, dp=2), marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_copies_are_bit_identical_after_20_steps(corpus, variant, layout):
    words = command(corpus, 20, OPTIONS[variant])
    counts = count_copies(train_and_inspect(words, layout, held_elements))
    for name, wanted in wanted_copies(variant, layout).items():
        assert counts[name] == {wanted}, name


def wanted_copies(variant, layout):
    """Some parameters and how many ranks hold each of their rows, so that nothing is compared with
    itself only."""
    tp, dp = layout.tp, layout.dp
    wanted = {
        "decoder.layers.0.input_layernorm.weight": tp * dp,
        "exp_avg of decoder.layers.3.mlp.linear_fc2.bias": tp * dp,
        "decoder.layers.3.mlp.linear_fc1.weight": dp,
    }
    # The table is cut over tp; its copy on the last stage makes twice as many holders.
    wanted["embedding.word_embeddings.weight"] = dp * (2 if layout.pp > 1 else 1)
    if variant == "bf16":
        wanted["main_param of decoder.final_layernorm.weight"] = tp * dp
    return wanted


def test_replicated_key_and_value_heads_are_compared(corpus):
    """One query group at tp 4: the rows of its key and value are on all four ranks."""
    words = command(corpus, 2, OPTIONS["multi-query"])
    counts = count_copies(train_and_inspect(words, Layout(tp=4), held_elements))
    assert counts["decoder.layers.2.self_attention.linear_qkv.weight"] == {1, 4}


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(pp=2, dp=2), Layout(pp=4)], ids=layout_id)
@pytest.mark.parametrize("precision", ["", "--bf16"])
@pytest.mark.parametrize("overlap", ["", "--overlap-grad-reduce --ddp-bucket-size 1"])
def test_tied_copies_stay_equal_through_a_resume(corpus, tmp_path, layout, precision, overlap):
    """A hundred steps, a resume, and twenty more: both copies of the tied matrix, bit for bit."""
    save = str(tmp_path / "save")
    words = command(corpus, 120, precision, overlap, "--save-interval 100 --save", save)
    name = "embedding.word_embeddings.weight"
    for more in (["--exit-interval", "1"], ["--exit-interval", "100"], []):
        extra = [*more, "--overwrite-save"] if more == ["--exit-interval", "1"] else more
        resumes = [] if extra else ["--load", save]
        if more == ["--exit-interval", "100"]:
            extra = [*more, "--overwrite-save"]
        counts = count_copies(train_and_inspect([*words, *extra, *resumes], layout, held_elements))
        assert counts[name] == {2 * layout.dp}
