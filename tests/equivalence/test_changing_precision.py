"""A run goes on in another precision: nothing that was trained is rounded away, or left unsaid."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mcore.checkpoint import read_common, read_tensors
from mcore.training.arguments import build_config, parse
from mcore.training.gpt import model_provider
from tests.equivalence.program import (
    PROVIDERS,
    SINGLE,
    Layout,
    save_again,
    train,
    train_and_inspect,
    without_rates,
)
from tests.equivalence.tiny import command

SMALL = "--num-layers 2 --hidden-size 16 --seq-length 8"
FP16 = "--fp16 --initial-loss-scale 1024"
PAIR = Layout(dp=2)


def three_steps(corpus, root, *more):
    return command(corpus, 6, SMALL, f"--save {root} --save-interval 3 --exit-interval 3", *more)


def write_again(corpus, source, target, layout, *more):
    """What a run holds that has loaded `source` and made no step, by key."""
    flags = f"--load {source} --save {target} --save-interval 100 --skip-train"
    words = command(corpus, 6, SMALL, flags, *more)
    train_and_inspect(words, layout, partial(save_again, words))
    return read_tensors(target)


def assert_same(tensors, wanted):
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)


def weights(tensors, family):
    return {
        key.partition(".")[2]: tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{family}.")
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("first", "second", "layout"),
    [
        ("--bf16", "", SINGLE),
        pytest.param("", "--bf16", SINGLE, marks=pytest.mark.full),
        pytest.param("--bf16", FP16, SINGLE, marks=pytest.mark.full),
        pytest.param("--bf16 --zero-stage 3", "--zero-stage 1", PAIR, marks=pytest.mark.full),
        pytest.param("--zero-stage 3", "--bf16 --zero-stage 3", PAIR, marks=pytest.mark.full),
        pytest.param(f"{FP16} --zero-stage 1", "--zero-stage 3", PAIR, marks=pytest.mark.full),
    ],
)
def test_there_and_back_is_as_if_nothing_had_changed(corpus, tmp_path, first, second, layout):
    straight = train(command(corpus, 6, SMALL, first), layout)
    records = tmp_path / "records.jsonl"
    train(three_steps(corpus, tmp_path / "a", first), layout, records=records)
    write_again(corpus, tmp_path / "a", tmp_path / "b", layout, second)
    back = command(corpus, 6, SMALL, first, f"--load {tmp_path}/b")
    assert without_rates(train(back, layout, records=records)) == without_rates(straight)


@pytest.mark.dist
@pytest.mark.parametrize(
    "how", ["", "--finetune", pytest.param("--no-load-optim", marks=pytest.mark.full)]
)
def test_fp32_takes_the_main_parameters(corpus, tmp_path, how):
    train(three_steps(corpus, tmp_path / "a", "--bf16"))
    trained = weights(read_tensors(tmp_path / "a"), "main_param")
    assert any((tensor != tensor.bfloat16()).any() for tensor in trained.values())
    tensors = write_again(corpus, tmp_path / "a", tmp_path / "b", SINGLE, how)
    assert_same(weights(tensors, "model"), trained)
    assert not weights(tensors, "main_param")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("stage", "layout"), [(0, SINGLE), pytest.param(3, PAIR, marks=pytest.mark.full)]
)
def test_fine_tuning_in_bf16_starts_from_fp32_weights(corpus, tmp_path, stage, layout):
    """From those of an fp32 run, and from the main parameters of a bf16 run, at every stage."""
    for name, precision in (("wide", ""), ("narrow", "--bf16")):
        root = tmp_path / name
        train(three_steps(corpus, root, precision))
        trained = weights(read_tensors(root), "main_param" if precision else "model")
        flags = f"--bf16 --finetune --zero-stage {stage}"
        tensors = write_again(corpus, root, tmp_path / f"{name}2", layout, flags)
        assert_same(weights(tensors, "main_param"), trained)
        rounded = {key: tensor.bfloat16() for key, tensor in trained.items()}
        assert_same(weights(tensors, "model"), rounded)


def frozen_embedding(config, stage):
    model = model_provider(config, stage)
    model.embedding.word_embeddings.weight.requires_grad_(False)
    return model


def test_fine_tuning_with_a_frozen_part_of_the_model(corpus, tmp_path):
    """What is frozen has no main parameter, though the checkpoint has one of it."""
    train(three_steps(corpus, tmp_path, "--bf16 --untie-embeddings-and-output-weights"))
    flags = f"--bf16 --finetune --untie-embeddings-and-output-weights --load {tmp_path}"
    providers = replace(PROVIDERS, model=frozen_embedding)
    assert len(train(command(corpus, 3, SMALL, flags), providers=providers)) == 3


@pytest.mark.parametrize("how", ["--finetune", "--no-load-optim --no-load-rng"])
def test_what_stays_unread_is_said(corpus, tmp_path, capsys, how):
    words = three_steps(corpus, tmp_path)
    train(words)
    common = read_common(tmp_path)
    config = build_config(parse([*words, "--device", "cpu"]))
    assert common["config"]["training"] == config.to_dict()["training"]
    assert len(common["fingerprint"]) == 16
    capsys.readouterr()
    flags = f"--load {tmp_path} --skip-train --lr 3e-2"
    train_and_inspect(command(corpus, 6, SMALL, how, flags))
    text = capsys.readouterr().out
    count = sum(key.startswith("model.") for key in read_tensors(tmp_path))
    assert (
        f"not read from the checkpoint: exp_avg.* ({count} tensors), exp_avg_sq.* ({count} "
        "tensors), random states of 1 ranks"
    ) in text
    told = next(line for line in text.splitlines() if "options other than" in line)
    assert "lr 0.01 -> 0.03" in told
    assert "hidden_size" not in told


def test_random_states_load_unless_told_not_to(corpus, tmp_path):
    train(three_steps(corpus, tmp_path))
    saved = read_tensors(tmp_path, ["torch.rank_00000"])["torch.rank_00000"]

    def state_after(*more):
        words = command(corpus, 6, SMALL, "--seed 77 --skip-train", *more)
        return train_and_inspect(words, SINGLE, lambda state: torch.get_rng_state())[0]  # noqa: ARG005

    fresh = state_after()
    assert not torch.equal(fresh, saved)
    load = f"--load {tmp_path}"
    assert torch.equal(state_after(load), saved)
    assert torch.equal(state_after(load, "--no-load-rng"), fresh)
