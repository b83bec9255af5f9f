"""The example's model trains, saves, resumes and logs, at any layout and schedule."""

from pathlib import Path

import pytest

from examples import custom_model
from mcore.training.gpt import datasets_provider
from mcore.training.pretrain import Providers
from tests.equivalence.copies import count_copies, held_elements
from tests.equivalence.program import (
    Layout,
    largest_difference,
    train,
    train_and_inspect,
    without_rates,
)
from tests.equivalence.tiny import command

PROVIDERS = Providers(datasets_provider, custom_model.ShiftModel, custom_model.forward_step)
FLAGS = "--vocab-size 102"  # two tensor-parallel ranks share it


def run(corpus, save, iterations, layout, *more):
    records = Path(save, "records.jsonl")
    words = f"--load {save} --save {save} --save-interval 2 {' '.join(more)}"
    return train(
        command(corpus, iterations, FLAGS, words), layout, records=records, providers=PROVIDERS
    )


def test_the_example_is_short():
    assert len(Path(custom_model.__file__).read_text().splitlines()) <= 80


def test_it_learns_saves_and_resumes_alike(corpus, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    straight.mkdir()
    broken.mkdir()
    whole = run(corpus, straight, 6, Layout())
    assert whole[-1]["lm_loss"] < whole[0]["lm_loss"]
    run(corpus, broken, 6, Layout(), "--exit-interval 4")
    assert without_rates(run(corpus, broken, 6, Layout())) == without_rates(whole)


def test_data_parallel_ranks_have_the_same_weights(corpus):
    """Scenario B10: the example reduces its gradients, whatever its own code leaves out."""
    words = command(corpus, 5, FLAGS)
    counts = count_copies(
        train_and_inspect(words, Layout(dp=2), held_elements, providers=PROVIDERS)
    )
    assert set().union(*counts.values()) == {2}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(tp=2, pp=2, sp=True), "zb-v"),
        pytest.param(Layout(tp=2, pp=2), "zb-h1", marks=pytest.mark.full),
        (Layout(pp=4), "zb-h1"),
        pytest.param(Layout(pp=2, dp=2), "gpipe", marks=pytest.mark.full),
        pytest.param(Layout(pp=2, vpp=2), "interleaved-1f1b", marks=pytest.mark.full),
    ],
)
def test_any_schedule_makes_the_same_run_and_one_process_continues_it(
    corpus, tmp_path, layout, schedule
):
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    alone.mkdir()
    spread.mkdir()
    wanted = run(corpus, alone, 6, Layout())
    first = f"--exit-interval 2 --pipeline-schedule {schedule}"
    run(corpus, spread, 6, layout, first)  # from the same initial weights
    got = run(corpus, spread, 6, Layout())
    assert [record["iteration"] for record in got] == [1, 2, 3, 4, 5, 6]
    assert largest_difference(got, wanted) <= 1e-5
