"""Random states that are put back: what is drawn next is what would have been drawn."""

import random

import numpy as np
import pytest
import torch

from mcore.training.random_states import random_states, restore_random_states


@pytest.fixture(autouse=True)
def as_before():
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw():
    """Three of each, so that a pending normal number and the ones after it are among them."""
    numbers = [random.gauss(0.0, 1.0) for _ in range(3)] + [random.random()]
    return (
        numbers + np.random.randn(3).tolist() + np.random.rand(1).tolist() + torch.rand(2).tolist()
    )


@pytest.mark.parametrize("drawn", [0, 1, 2])
@pytest.mark.parametrize("elsewhere", [0, 1])
def test_normal_numbers_come_in_twos(drawn, elsewhere):
    """With one of two drawn the other is pending: there, and in the process that goes on."""
    for _ in range(drawn):
        random.gauss(0.0, 1.0)
        np.random.randn()
    states = random_states()
    wanted = draw()
    random.seed(5)
    np.random.seed(5)
    for _ in range(elsewhere):
        random.gauss(0.0, 1.0)
        np.random.randn()
    restore_random_states(states)
    assert draw() == wanted


def test_states_of_a_checkpoint_that_knows_of_no_pending_numbers():
    random.seed(5)
    np.random.seed(5)
    states = random_states()
    wanted = draw()
    del states["pending_normals"]
    random.seed(6)
    random.gauss(0.0, 1.0)
    np.random.randn()
    restore_random_states(states)
    assert draw() == wanted
