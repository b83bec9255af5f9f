"""What --save, --load and --finetune may mean together."""

import pytest
import torch

from mcore.checkpoint import save
from mcore.config.checkpoint import CheckpointConfig
from mcore.training.save_roots import directory_problem


def root_with(tmp_path, *iterations):
    for iteration in iterations:
        save(tmp_path, iteration, {"model.a": torch.ones(2)}, {})
    return str(tmp_path)


def problem(load, to, **options):
    return directory_problem(CheckpointConfig(load=load, save=to, save_interval=1, **options))


def test_fine_tuning_does_not_write_over_what_it_starts_from(tmp_path):
    root = root_with(tmp_path, 5, 10)
    assert problem(root, root) is None
    assert "(of iteration 5, 10)" in problem(root, root, finetune=True)
    assert problem(root, root, finetune=True, overwrite_save=True) is None


def test_fine_tuning_may_be_saved_beside_converted_weights(tmp_path):
    root = root_with(tmp_path, 0)
    assert problem(root, root, finetune=True) is None
    root_with(tmp_path, 3)  # once it has begun, the same command would begin again
    assert "without --finetune" in problem(root, root, finetune=True)


@pytest.mark.parametrize("finetune", [False, True])
def test_the_way_on_is_named_where_another_run_is_loaded(tmp_path, finetune):
    first, second = root_with(tmp_path / "a", 2), root_with(tmp_path / "b", 2)
    told = problem(first, second, finetune=finetune)
    assert f"by --load {second}" in told
    assert ("without --finetune" in told) == finetune
