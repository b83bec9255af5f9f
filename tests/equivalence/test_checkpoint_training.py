"""Training and its checkpoints: written beside training, damaged, deleted, at several layouts."""

import itertools
import os
import threading
import time
from dataclasses import dataclass, field

import pytest

from mcore.checkpoint import (
    CheckpointReader,
    complete_iterations,
    dump,
    latest_iteration,
    shard_file,
)
from mcore.checkpoint.commit import iteration_directory
from mcore.errors import CheckpointError
from mcore.testing import run_distributed
from mcore.training.logging import RunLog
from tests.equivalence.program import (
    Layout,
    layout_id,
    train,
    train_here,
    without_rates,
)
from tests.equivalence.tiny import command

ZERO = "--data-parallel-sharding-strategy"
LAYOUTS = [
    Layout(),
    Layout(tp=2, sp=True, dp=2),
    Layout(pp=2, dp=2),
    Layout(tp=2, pp=2, vpp=2),
]
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


def dumped(root, out):
    dump(CheckpointReader(root), out)
    return out.read_bytes()


def growing(corpus, *more):
    """The global batch grows: 6 samples, 12 from the third step on."""
    words = command(corpus, 1, "--rampup-batch-size 6 6 10 --train-samples 96", *more)
    del words[words.index("--train-iters") : words.index("--train-iters") + 2]
    words[words.index("--global-batch-size") + 1] = "12"
    at = words.index("--lr-warmup-iters")
    words[at : at + 2] = ["--lr-warmup-samples", "8"]
    return words


def resumes():
    """Each layout without and with ZeRO, saving in the foreground and in the background."""
    for layout, strategy, background in itertools.product(
        LAYOUTS, ("no_shard", "optim"), ("", "--async-save")
    ):
        daily = (layout, strategy, background) == (Layout(pp=2, dp=2), "optim", "--async-save")
        marks = () if daily else pytest.mark.full
        yield pytest.param(layout, strategy, background, marks=marks)
    yield pytest.param(Layout(dp=3), "optim_grads_params", "--async-save", marks=pytest.mark.full)


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "strategy", "background"), list(resumes()), ids=layout_id)
def test_resume_is_a_continuation(corpus, tmp_path, layout, strategy, background):
    """Dropout, evaluation, reading threads, a growing batch, a save in the background."""
    flags = f"{DROPOUT} {ZERO} {strategy} --eval-iters 1 --eval-interval 3 --num-workers 2"
    want = train(growing(corpus, flags, f"--save {tmp_path}/a --save-interval 100"), layout)
    assert sum("lm_loss" in record for record in want) == 9
    saves = f"--save {tmp_path}/b --save-interval 4 {background}"
    records = tmp_path / "records.jsonl"
    train(growing(corpus, flags, saves, "--exit-interval 4"), layout, records=records)
    again = train(growing(corpus, flags, saves, f"--load {tmp_path}/b"), layout, records=records)
    assert without_rates(again) == without_rates(want)
    assert dumped(tmp_path / "a", tmp_path / "1") == dumped(tmp_path / "b", tmp_path / "2")


@dataclass
class Watch:
    """What happened in one process while it trained: the first write outlasts three steps."""

    steps: list = field(default_factory=list)
    write: tuple = ()
    forks: int = 0

    def __enter__(self):
        self._restore = [(shard_file, "_write", shard_file._write), (RunLog, "step", RunLog.step)]
        write, step = shard_file._write, RunLog.step

        def slow(*args):
            start, before = time.monotonic(), len(self.steps)
            while not self.write and len(self.steps) < before + 3 and time.monotonic() < start + 60:
                time.sleep(0.01)
            result = write(*args)
            self.write = self.write or (start, time.monotonic())
            return result

        def stamped(log, *args):
            self.steps.append(time.monotonic())
            return step(log, *args)

        shard_file._write, RunLog.step = slow, stamped
        os.register_at_fork(before=self._forked)  # for good, so it asks whether it still counts
        self.is_open = True
        return self

    def _forked(self):
        self.forks += self.is_open

    def __exit__(self, *_):
        self.is_open = False
        for place, name, value in self._restore:
            setattr(place, name, value)


def train_and_watch(words):
    with Watch() as watch:
        train_here(words)
    left = [thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"]
    return watch.steps, watch.write, watch.forks, len(left)


@pytest.mark.dist
def test_three_steps_are_made_while_a_slow_disk_writes(corpus, tmp_path):
    """On both ranks; and no process is forked, which groups and threads would not survive."""
    words = command(corpus, 12, f"--save {tmp_path} --save-interval 6 --async-save --device cpu")
    for steps, write, forks, left in run_distributed(train_and_watch, 2, words, timeout=120):
        assert sum(write[0] < stamp < write[1] for stamp in steps) >= 3
        assert (forks, left) == (0, 0)
    assert complete_iterations(tmp_path) == [6, 12]


def test_saves_that_come_faster_than_the_disk_wait_for_each_other(corpus, tmp_path, monkeypatch):
    write, running, most = shard_file._write, [], []

    def slow(*args):
        running.append(1)
        most.append(len(running))
        time.sleep(0.2)
        result = write(*args)
        running.pop()
        return result

    monkeypatch.setattr(shard_file, "_write", slow)
    train(command(corpus, 6, f"--save {tmp_path} --save-interval 1 --async-save"))
    assert complete_iterations(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert most == [1] * 6


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_ends_the_run_and_leaves_the_last_one(
    corpus, tmp_path, monkeypatch, background
):
    write, calls = shard_file._write, []

    def fails_later(*args):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(shard_file, "_write", fails_later)
    flags = f"--save {tmp_path} --save-interval 2 {'--async-save' * background}"
    with pytest.raises(CheckpointError, match="No space left"):
        train(command(corpus, 30, flags))
    assert (latest_iteration(tmp_path), complete_iterations(tmp_path)) == (2, [2])


@pytest.mark.parametrize("flags", ["", "--async-save --verify-saved-checkpoint"])
def test_retention(corpus, tmp_path, flags):
    keep = f"--save {tmp_path} --save-interval 1 --keep-latest 2 --keep-every 4"
    train(command(corpus, 10, keep, flags))
    assert complete_iterations(tmp_path) == [4, 8, 9, 10]
    assert latest_iteration(tmp_path) == 10


@pytest.mark.dist
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(corpus, tmp_path):
    layout = Layout(tp=2)
    words = command(corpus, 8, f"--save {tmp_path} --save-interval 2", DROPOUT)
    records = tmp_path / "records.jsonl"
    want = train(words, layout, records=records)
    shard = sorted(iteration_directory(tmp_path, 8).glob("shard_00001*"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (tmp_path / "iter_0000009").mkdir()
    with pytest.raises(Exception, match="damaged"):
        train([*words, "--load", str(tmp_path), "--on-damaged-checkpoint", "error"], layout)
    again = train([*words, "--load", str(tmp_path)], layout, records=records)
    assert without_rates(again) == without_rates(want)
    assert latest_iteration(tmp_path) == 8
