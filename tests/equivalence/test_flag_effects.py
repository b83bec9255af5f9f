"""Flags whose effect is no figure of the run: files, kernels, queues."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore.cli.main import main
from mcore.training import scalars
from tests.equivalence.program import train, train_and_inspect
from tests.equivalence.tiny import command


def iterations(folder):
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


def test_deterministic_mode_asks_torch_for_it(corpus):
    def asked(state):
        del state
        return torch.are_deterministic_algorithms_enabled()

    assert train_and_inspect(command(corpus, 2, "--deterministic-mode"), inspect=asked) == [True]
    assert train_and_inspect(command(corpus, 2), inspect=asked) == [False]


def test_save_retain_interval_leaves_its_multiples_and_the_last(corpus, tmp_path):
    train(command(corpus, 6, f"--save {tmp_path} --save-interval 2 --save-retain-interval 4"))
    assert iterations(tmp_path) == [4, 6]


def test_no_save_optim_leaves_the_moments_out(corpus, tmp_path):
    sizes = {}
    for name, more in (("whole", ""), ("weights", "--no-save-optim")):
        root = tmp_path / name
        train(command(corpus, 2, f"--save {root} --save-interval 2", more))
        sizes[name] = sum(path.stat().st_size for path in root.glob("iter_*/*.safetensors"))
    assert 0 < sizes["weights"] < 0.5 * sizes["whole"]


def test_tensorboard_log_interval_and_queue(corpus, tmp_path, monkeypatch):
    queues = []

    class Recorded(scalars.SummaryWriter):
        def __init__(self, *args, **options):
            queues.append(options["max_queue"])
            super().__init__(*args, **options)

    monkeypatch.setattr(scalars, "SummaryWriter", Recorded)
    more = f"--tensorboard-dir {tmp_path} --tensorboard-log-interval 2 --tensorboard-queue-size 7"
    train(command(corpus, 5, more))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("lm loss")] == [2, 4]
    assert set(queues) == {7}


def test_curves_of_timers_memory_and_world_size(corpus, tmp_path):
    more = f"--tensorboard-dir {tmp_path} --timing-log-level 2 --log-interval 2"
    curves = {}
    for name in ("none", "all"):
        asked = "--log-timers-to-tensorboard --log-memory-to-tensorboard"
        asked += " --log-world-size-to-tensorboard"
        train(command(corpus, 2, more.replace(str(tmp_path), str(tmp_path / name))
                      + (f" {asked}" if name == "all" else "")))  # fmt: skip
        curves[name] = set(EventAccumulator(str(tmp_path / name)).Reload().Tags()["scalars"])
    added = curves["all"] - curves["none"]
    assert {"forward-backward-time", "optimizer-time", "mem-host-bytes", "world-size"} <= added


@pytest.mark.parametrize(("option", "said"), [("max", "max time"), ("all", "rank  0")])
def test_timing_log_option_chooses_what_is_told(corpus, capsys, option, said):
    more = f"--timing-log-level 2 --timing-log-option {option} --log-interval 2"
    train(command(corpus, 2, more))
    assert said in capsys.readouterr().out


def test_log_memory_interval_tells_each_ranks_memory(corpus, capsys):
    train(command(corpus, 5, "--log-interval 1 --log-memory-interval 2"))
    assert capsys.readouterr().out.count("memory of rank 0 (MiB)") == 2


def test_reports_that_cannot_be_made_are_named(corpus, capsys):
    curves = "--log-timers-to-tensorboard --log-world-size-to-tensorboard"
    train(command(corpus, 2, "--log-progress", curves))
    said = capsys.readouterr().out
    for flag in ("--log-progress", *curves.split()):
        assert f"{flag} has no effect" in said


def test_timers_without_a_level_are_named(corpus, tmp_path, capsys):
    train(command(corpus, 2, f"--log-timers-to-tensorboard --tensorboard-dir {tmp_path}"))
    assert "give --timing-log-level 1 or 2" in capsys.readouterr().out


def test_parts_of_the_optimizer_are_timed(corpus, capsys):
    train(command(corpus, 2, "--timing-log-level 1 --log-interval 2 --log-num-zeros-in-grad"))
    said = capsys.readouterr().out
    for part in (
        "copy-to-main-grad",
        "unscale-and-check-inf",
        "count-zeros",
        "clip-main-grad",
        "inner-step",
        "copy-main-to-model-params",
    ):
        assert f"optimizer-{part} ." in said


def test_check_takes_the_model_from_a_checkpoint_and_says_so(corpus, tmp_path, capsys):
    train(command(corpus, 2, f"--save {tmp_path} --save-interval 2 --rotary-base 77"))
    capsys.readouterr()
    words = f"--load {tmp_path} --use-checkpoint-args --hidden-dropout 0 --micro-batch-size 1"
    rest = f"--train-iters 4 --lr 1e-3 --data-path {corpus} --world-size 2 --json"
    rest += " --override-opt-param-scheduler"
    assert main(["check", *words.split(), *rest.split()]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["config"]["model"]["num_layers"] == 4
    origins = {
        field: told["sources"][section][field]["kind"]
        for section, field in (
            ("model", "num_layers"),
            ("gpt", "rotary_base"),
            ("model", "hidden_dropout"),
            ("model", "sequence_parallel"),
        )
    }
    assert origins == {
        "num_layers": "checkpoint",
        "rotary_base": "checkpoint",
        "hidden_dropout": "command line",
        "sequence_parallel": "default",
    }
    assert "--hidden-dropout: 0.0 from the command line, checkpoint 0.1" in told["notes"]
