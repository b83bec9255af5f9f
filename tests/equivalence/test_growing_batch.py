"""A global batch that grows while training, against Megatron's table and over a resume."""

import itertools

import pytest

from mcore.config.run import resolve
from mcore.errors import ConfigError
from mcore.training.arguments import build_config, parse
from mcore.training.initialize import Launch
from mcore.training.pretrain import prepare
from tests.equivalence.program import SINGLE, read_records, series, train, without_rates
from tests.equivalence.tiny import command


def growing(corpus, *more, ramp="4 4 24", last=12, samples=60):
    words = command(corpus, 1, f"--train-samples {samples} --rampup-batch-size {ramp}", *more)
    at = words.index("--train-iters")
    del words[at : at + 2]
    words[words.index("--global-batch-size") + 1] = str(last)
    for iterations in ("--lr-warmup-iters",):
        at = words.index(iterations)
        words[at : at + 2] = ["--lr-warmup-samples", "8"]
    return words


def test_batches_rates_and_resume(corpus, tmp_path):
    straight = train(growing(corpus), SINGLE, records=tmp_path / "a.jsonl")
    # 4 until 12 samples, 8 until 24, then 12: 12 + 16 + 24 + ... of 60 samples.
    assert series(straight, "global_batch_size") == [4, 4, 4, 8, 8, 12, 12]
    consumed = [4, 8, 12, 20, 28, 40, 52]
    assert series(straight, "consumed_train_samples") == consumed
    assert series(straight, "learning_rate")[:3] == [0.0, 0.5e-2, 1e-2]
    saves = f"--save {tmp_path}/c --save-interval 4 --exit-interval 4"
    train(growing(corpus, saves), SINGLE, records=tmp_path / "b.jsonl")
    again = growing(corpus, f"--save {tmp_path}/c --save-interval 100 --load {tmp_path}/c")
    resumed = train(again, SINGLE, records=tmp_path / "b.jsonl")
    assert without_rates(resumed) == without_rates(straight)


@pytest.mark.full
@pytest.mark.parametrize("middle", [4, 5, 7, 9])
def test_resume_at_every_part_of_the_ramp(corpus, tmp_path, middle):
    """Where the batch has just grown, between, where it grows next, and after the ramp."""
    ramp = {"ramp": "4 4 48", "last": 16, "samples": 120}
    straight = train(growing(corpus, **ramp))
    sizes = [4, 4, 4, 4, 8, 8, 12, 12, 16, 16, 16, 16]
    assert series(straight, "global_batch_size") == sizes
    assert series(straight, "consumed_train_samples") == list(itertools.accumulate(sizes))
    folder = f"--save {tmp_path} --load {tmp_path} --save-interval 100"
    records = tmp_path / "records.jsonl"
    train(growing(corpus, folder, f"--exit-interval {middle}", **ramp), records=records)
    assert len(read_records(records)) == middle
    resumed = train(growing(corpus, folder, **ramp), records=records)
    assert without_rates(resumed) == without_rates(straight)


def test_a_batch_that_does_not_divide(corpus):
    with pytest.raises(ConfigError, match="reaches a global batch of 4, which is no multiple"):
        prepare(parse(growing(corpus, "--micro-batch-size 3")), Launch(0, 1, 0))


def test_iterations_exclude_it(corpus):
    with pytest.raises(ConfigError, match="needs --train-samples"):
        build_config(parse(command(corpus, 5, "--rampup-batch-size 4 4 24")))


def stepping(corpus, schedule):
    words = growing(corpus, "--step-batch-size-schedule", schedule)
    for flag, size in (("--rampup-batch-size", 4), ("--global-batch-size", 2)):
        at = words.index(flag)
        del words[at : at + size]
    return words


def test_iterations_of_a_batch_that_returns_to_its_first_size(corpus):
    """4 samples to sample 12, 12 samples to sample 36, and 4 to the 60th."""
    words = stepping(corpus, "0:4,192:12,576:4")
    assert resolve(build_config(parse(words)), 1).train_iters == 3 + 2 + 6


def test_steps_by_tokens(corpus):
    words = stepping(corpus, "0:4,192:12")
    assert resolve(build_config(parse(words)), 1).train_iters == 7
    assert series(train(words, SINGLE), "global_batch_size") == [4, 4, 4, 12, 12, 12, 12]
