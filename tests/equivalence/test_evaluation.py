"""Evaluation: what it measures, and that training never notices it."""

import pytest
import torch

from mcore.errors import ConfigError, DataError
from mcore.training.arguments import parse
from mcore.training.gpt import datasets_provider
from mcore.training.initialize import Launch
from mcore.training.prepare import prepare
from tests.equivalence.program import (
    SINGLE,
    Layout,
    layout_id,
    read_records,
    series,
    train,
    train_and_inspect,
    without_rates,
)
from tests.equivalence.tiny import command, write_corpus

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [write_corpus(folder / name, documents) for name, documents in (("a", 40), ("b", 25))]


def separate(corpora, iterations, *more, **options):
    """A command line that trains on the first corpus and measures all of them."""
    words = command(corpora[0], iterations, *more, **options)
    del words[words.index("--split") : words.index("--split") + 2]
    at = words.index("--data-path")
    words[at : at + 2] = ["--train-data-path", corpora[0], "--valid-data-path", *corpora]
    return words


def loss_by_sample(words):
    """Inspect function: mean loss over every validation sample, each computed by itself."""
    config = prepare(parse([*words, "--device", "cpu"]), Launch(0, 1, 0)).config
    samples = datasets_provider(config, (8, None, 0))[1]
    assert len(samples) % 6 != 0  # the last batch is not full

    def inspect(state):
        model = state.chunks[0].eval()
        total, count = 0.0, 0.0
        with torch.no_grad():
            for number in range(len(samples)):
                sample = {k: torch.from_numpy(v)[None] for k, v in samples[number].items()}
                loss = model(sample["tokens"], sample["position_ids"], labels=sample["labels"])
                total += float((loss * sample["loss_mask"]).sum(dtype=torch.float64))
                count += float(sample["loss_mask"].sum())
        return total / count

    return inspect


def test_full_validation_measures_every_sample_once(corpora, tmp_path):
    words = command(corpora[0], 2, DROPOUT, "--eval-iters 1 --eval-interval 2 --full-validation")
    path = tmp_path / "records"
    sizes = "--eval-global-batch-size 6 --eval-micro-batch-size 3"
    flags = [*words, *sizes.split(), "--metrics-jsonl", str(path)]
    (expected,) = train_and_inspect(flags, SINGLE, loss_by_sample(words))
    (measured,) = series(read_records(path), "valid_lm_loss")
    assert measured == pytest.approx(expected, abs=1e-6)
    (ppl,) = series(read_records(path), "valid_ppl")
    assert ppl == pytest.approx(2.718281828459045**measured, rel=1e-12)
    cyclic = train([*words, "--dataloader-type", "cyclic"], SINGLE)  # its order does not matter
    assert series(cyclic, "valid_lm_loss") != [measured]  # another order of training
    assert len(series(cyclic, "valid_lm_loss")) == 1


@pytest.mark.parametrize("layout", [SINGLE, Layout(pp=2), Layout(dp=2)], ids=layout_id)
def test_the_size_of_evaluated_batches_changes_nothing(corpora, layout):
    words = command(corpora[0], 2, DROPOUT, "--eval-interval 2")
    same = [
        "--eval-iters 4",
        "--eval-iters 2 --eval-global-batch-size 8",
        "--eval-iters 2 --eval-global-batch-size 8 --eval-micro-batch-size 4",
    ]
    runs = [train([*words, *options.split()], layout) for options in same]
    losses = [series(run, "valid_lm_loss") for run in runs]
    assert losses[1][0] == pytest.approx(losses[0][0], abs=2e-6)
    assert losses[2][0] == pytest.approx(losses[0][0], abs=2e-6)


@pytest.mark.parametrize(
    "layout",
    [SINGLE, Layout(pp=2), pytest.param(Layout(tp=2, pp=2, sp=True), marks=pytest.mark.full)],
    ids=layout_id,
)
def test_training_does_not_notice(corpora, layout):
    quiet = train(separate(corpora, 6, DROPOUT), layout)
    busy = "--eval-iters 1 --eval-interval 2 --multiple-validation-sets --full-validation "
    busy += "--eval-micro-batch-size 2 --validation-set-names first second --num-workers 2"
    records = train(separate(corpora, 6, DROPOUT, busy), layout)
    assert without_rates([r for r in records if "lm_loss" in r]) == without_rates(quiet)
    measured = [(r["iteration"], r["valid_set"]) for r in records if "valid_set" in r]
    assert measured == [(n, name) for n in (2, 4, 6) for name in ("first", "second")]


def test_the_first_evaluations_may_be_left_out(corpora):
    words = command(corpora[0], 7, "--eval-iters 1 --eval-interval 2")
    records = train([*words, "--start-eval-at-iter", "4"], SINGLE)
    assert [r["iteration"] for r in records if "valid_lm_loss" in r] == [4, 6, 7]
    early = train([*words[:], "--exit-interval", "4"], SINGLE)
    assert series(records, "valid_lm_loss")[0] != series(early, "valid_lm_loss")[1]  # first samples


def test_the_test_set_is_measured_at_the_end(corpora):
    words = command(corpora[0], 3, "--eval-iters 2 --eval-interval 2 --split 60,20,20")
    records = train(words, SINGLE)
    assert [(r["iteration"], "test_lm_loss" in r) for r in records if "lm_loss" not in r] == [
        (2, False),
        (3, False),
        (3, True),
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            "--eval-global-batch-size 6 --eval-micro-batch-size 4",
            ConfigError,
            r"\(6\) must be a mult",
        ),
        ("--eval-micro-batch-size 0", ConfigError, "eval-micro-batch-size is 0"),
        ("--validation-set-names a", ConfigError, "--multiple-validation-sets"),
        (
            "--multiple-validation-sets --eval-iters 1 --validation-set-names a",
            DataError,
            "to 2 validation",
        ),
    ],
)
def test_what_is_refused(corpora, options, error, message):
    with pytest.raises(error, match=message):
        train(separate(corpora, 2, options), SINGLE)


@pytest.mark.parametrize("saved", ["", "--no-save-optim"])
def test_a_checkpoint_is_measured_whatever_its_schedule_and_iteration(corpora, tmp_path, saved):
    """The command of docs/evaluation.md."""
    flags = f"--eval-interval 2 --full-validation --eval-iters 1 {saved}"
    saving = f"--save {tmp_path} --save-interval 4"
    trained = train(separate(corpora, 4, flags, saving), SINGLE)
    flags = f"--use-checkpoint-args --load {tmp_path} --skip-train --lr 0 --min-lr 0"
    words = separate(corpora, 1, "--lr-warmup-iters 0 --eval-iters 1", flags)
    measured = train([*words, "--full-validation"], SINGLE)
    wanted = series(trained, "valid_lm_loss")[-1]
    assert [(record["iteration"], record["valid_lm_loss"]) for record in measured] == [(4, wanted)]
    assert len(series(train(words, SINGLE), "valid_lm_loss")) == 1  # the data are those of a step
