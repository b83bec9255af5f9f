"""Data orders, layouts, resumes and validation sets, through whole runs."""

import pytest

from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    series,
    train,
    without_rates,
)
from tests.equivalence.tiny import command, write_corpus


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [write_corpus(folder / name, documents) for name, documents in (("a", 60), ("b", 40))]


@pytest.mark.dist
@pytest.mark.parametrize("order", ["--data-order stable", "--dataloader-type cyclic"])
def test_resume_and_layouts(corpora, tmp_path, order):
    flags = f"{order} --no-data-sharding"
    straight = train(command(corpora[0], 4, flags), SINGLE)
    saving = f"{flags} --save {tmp_path}/c --save-interval 2"
    train(command(corpora[0], 4, saving, "--exit-interval 2"), SINGLE, records=tmp_path / "r")
    loading = f"{saving} --load {tmp_path}/c --num-workers 2"
    resumed = train(command(corpora[0], 4, loading), SINGLE, records=tmp_path / "r")
    assert without_rates(resumed) == without_rates(straight)
    if order.endswith("cyclic"):
        return  # Megatron's rule leaves other samples out at another micro-batch size
    layout = train(command(corpora[0], 4, flags, micro=2), Layout(dp=2))
    assert largest_difference(layout, straight) < 3e-6


def test_a_longer_stable_run_begins_with_the_shorter(corpora):
    constant = "--data-order stable --lr-decay-style constant"
    short = train(command(corpora[0], 3, constant), SINGLE)
    long = train(command(corpora[0], 600, constant, "--exit-interval 3"), SINGLE)
    assert series(long, "lm_loss") == series(short, "lm_loss")


def test_other_weights_on_resume(corpora, tmp_path):
    first = f"0.7 {corpora[0]} 0.3 {corpora[1]}"
    second = f"0.3 {corpora[0]} 0.7 {corpora[1]}"
    flags = f"--data-order stable --save {tmp_path}/c --save-interval 2 --load {tmp_path}/c"
    words = command(first, 4, flags, "--exit-interval 2")
    at = words.index(first)
    words[at : at + 1] = first.split()
    train(words, SINGLE)
    words = command(second, 4, flags)
    words[at : at + 1] = second.split()
    assert series(train(words, SINGLE), "iteration") == [3, 4]


def test_several_validation_sets(corpora):
    words = command(corpora[0], 2, "--multiple-validation-sets --eval-iters 2 --eval-interval 2")
    at = words.index("--split")
    del words[at : at + 2]
    at = words.index("--data-path")
    words[at : at + 2] = ["--train-data-path", corpora[0], "--valid-data-path", *corpora]
    records = [record for record in train(words, SINGLE) if "valid_set" in record]
    assert [record["valid_set"] for record in records] == ["a", "b"]
    alone = command(corpora[0], 2, "--eval-iters 2 --eval-interval 2")
    del alone[alone.index("--split") : alone.index("--split") + 2]
    at = alone.index("--data-path")
    alone[at : at + 2] = ["--train-data-path", corpora[0], "--valid-data-path", corpora[1]]
    assert series(train(alone, SINGLE), "valid_lm_loss") == [records[1]["valid_lm_loss"]]
