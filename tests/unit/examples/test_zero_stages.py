"""The classroom's example: every stage trains alike, and data-parallel ranks stay the same."""

import pytest
import torch

from examples import zero_stages
from mcore import parallel_state
from mcore.testing import run_distributed


def losses_and_bytes(stages):
    parallel_state.initialize_model_parallel()
    return [zero_stages.train(stage, torch.device("cpu")) for stage in stages]


@pytest.mark.dist
def test_stages_train_alike_and_keep_less():
    first, second = run_distributed(losses_and_bytes, 2, range(4))
    for ours, theirs in zip(first[1:], first, strict=False):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    kept = [held for _, _, held in first]
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert [held for _, _, held in second] == pytest.approx(kept, rel=0.05)


def weights_of_all_stages():
    """Scenario B10: what each rank has in the end, by stage."""
    parallel_state.initialize_model_parallel()
    chunks, build = [], zero_stages.get_megatron_optimizer

    def watched(config, given):
        chunks.extend(given)
        return build(config, given)

    zero_stages.get_megatron_optimizer = watched
    try:
        for stage in range(3):
            zero_stages.train(stage, torch.device("cpu"))
    finally:
        zero_stages.get_megatron_optimizer = build
    return [[part.data.clone() for part in chunk.held_parts()] for chunk in chunks]


@pytest.mark.full
@pytest.mark.dist
def test_data_parallel_ranks_have_the_same_weights():
    first, second = run_distributed(weights_of_all_stages, 2)
    assert len(first) == 3
    for ours, theirs in zip(first, second, strict=True):
        assert all(map(torch.equal, ours, theirs))
