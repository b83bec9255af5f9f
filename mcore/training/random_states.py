"""The random states of a process: what users' layers draw from; mcore's own numbers need none."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from mcore import device
from mcore.tensor_parallel.random import get_cuda_rng_tracker

_TRACKER_PREFIX = "tracker."


def random_states() -> dict[str, Tensor]:
    """States of torch, the device, the tracker, Python and NumPy, by name."""
    states = {"torch": torch.get_rng_state(), "device": device.get_rng_state()}
    for name, tensor in get_cuda_rng_tracker().get_states().items():
        states[_TRACKER_PREFIX + name] = tensor
    _, internal, _ = random.getstate()
    states["python"] = torch.tensor(internal, dtype=torch.int64)
    generator = np.random.get_state(legacy=False)["state"]
    numbers = [*generator["key"].tolist(), generator["pos"]]
    states["numpy"] = torch.tensor(numbers, dtype=torch.int64)
    return states


def restore_random_states(states: dict[str, Tensor]) -> None:
    """Go on from `random_states`."""
    torch.set_rng_state(states["torch"])
    device.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(
        {
            name.removeprefix(_TRACKER_PREFIX): tensor
            for name, tensor in states.items()
            if name.startswith(_TRACKER_PREFIX)
        }
    )
    version, _, gauss = random.getstate()
    random.setstate((version, tuple(states["python"].tolist()), gauss))
    *keys, position = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
