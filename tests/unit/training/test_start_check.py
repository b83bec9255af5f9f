"""Options are compared with the checkpoint of --load before anything is started."""

import pytest
import torch

from mcore.checkpoint import find_checkpoint, save
from mcore.errors import CheckpointError, ConfigError
from mcore.training.arguments import read
from mcore.training.prepare import settle_options
from mcore.training.setup import build_scheduler
from mcore.training.start_check import _NoOptimizer, resolve

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
WORDS = (
    "--seq-length 16 --micro-batch-size 2 --train-iters 24 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --data-path corpus"
)


def settled(words):
    return settle_options(read(words.split()), 1)


@pytest.fixture
def root(tmp_path):
    """A save root with iterations 4 and 8 of a run of 24."""
    config = settled(f"{MODEL} {WORDS}").config
    common = {
        "model": config.model_options(),
        "optimizer": {"step_count": 8},
        "opt_param_scheduler": build_scheduler(
            _NoOptimizer(), config, resolve(config, 1)
        ).state_dict(),
    }
    for iteration in (4, 8):
        save(tmp_path, iteration, {"model.a": torch.ones(2)}, {**common, "iteration": iteration})
    return tmp_path


def problems(root, words, model=MODEL):
    try:
        settled(f"{model} {WORDS} --load {root} {words}")
    except ConfigError as error:
        return str(error)
    return ""


ANOTHER = "hidden-size: checkpoint 32, this run 64"
SCHEDULE = "lr_decay_steps: here 12, checkpoint 48"


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ("", []),
        ("--hidden-size 64", [ANOTHER]),
        ("--hidden-size 64 --seed 0", [ANOTHER, "--seed is 0", "2 problems"]),
        ("--hidden-size 64 --finetune", [ANOTHER]),
        ("--hidden-size 64 --skip-train", [ANOTHER]),
        ("--hidden-size 64 --use-checkpoint-args", [ANOTHER]),
        ("--hidden-dropout 0.3 --attention-dropout 0.2", []),
        ("--train-iters 6 --ckpt-step 4", [SCHEDULE, "--override-opt-param-scheduler"]),
        ("--train-iters 6 --ckpt-step 4 --seed 0", [SCHEDULE, "--seed is 0", "2 problems"]),
        ("--train-iters 6", [SCHEDULE, "iteration 8, beyond the 6 iterations", "2 problems"]),
        ("--train-iters 6 --ckpt-step 4 --override-opt_param-scheduler", []),
        ("--train-iters 6 --ckpt-step 4 --use-checkpoint-opt_param-scheduler", []),
        ("--train-iters 6 --ckpt-step 4 --no-load-optim", []),
        ("--train-iters 6 --no-load-optim", ["iteration 8, beyond the 6 iterations"]),
        ("--train-iters 6 --finetune", []),
        ("--train-iters 6 --skip-train", []),
        ("--lr 1e-2", ["max_lr: here 0.01, checkpoint 0.001"]),
        ("--lr -1 --min-lr 3", ["--lr"]),
    ],
)
def test_what_contradicts_the_checkpoint(root, words, fragments):
    told = problems(root, words)
    assert bool(told) == bool(fragments)
    for fragment in fragments:
        assert fragment in told


def test_the_model_of_the_checkpoint_is_no_contradiction(root):
    assert problems(root, "--use-checkpoint-args", model="") == ""


def test_a_checkpoint_without_optimizer(tmp_path):
    save(tmp_path, 0, {"model.a": torch.ones(2)}, {"iteration": 0})
    assert "holds no optimizer state; use --finetune" in problems(tmp_path, "")
    for words in ("--finetune", "--no-load-optim", "--skip-train"):
        assert problems(tmp_path, words) == ""


def test_damage_is_left_to_loading(root):
    """The one before decides, or none."""
    (root / "iter_0000008" / "metadata.json").write_text("{}")
    assert "beyond" not in problems(root, "--train-iters 6")
    assert SCHEDULE in problems(root, "--train-iters 6")
    assert problems(root, "--train-iters 6 --on-damaged-checkpoint error") == ""
    (root / "iter_0000004" / "metadata.json").write_bytes(b"\xff")
    assert problems(root, "--train-iters 6") == ""
    (root / "latest_checkpointed_iteration.txt").write_text("no number")
    assert problems(root, "--train-iters 6") == ""
    assert problems(root / "absent", "") == ""


def test_a_checkpoint_whose_files_are_cut_short_is_not_the_start(root):
    (shard,) = (root / "iter_0000008").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:20])
    assert "beyond" not in problems(root, "--train-iters 6")
    shard.unlink()
    assert "beyond" not in problems(root, "--train-iters 6")


def test_a_folder_of_megatrons_is_told_what_makes_it_one_of_ours(tmp_path):
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(CheckpointError, match="mcore convert megatron-to-mcore --megatron"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [None, 3, "text", [], {}])
def test_foreign_values_contradict_nothing(tmp_path, value):
    names = ("model", "iteration", "optimizer", "opt_param_scheduler")
    save(tmp_path, 0, {"model.a": torch.ones(2)}, dict.fromkeys(names, value))
    assert problems(tmp_path, "--train-iters 6") == ""
