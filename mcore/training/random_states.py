"""The random states of a process: what users' layers draw from; mcore's own numbers need none."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from mcore import device
from mcore.tensor_parallel.random import get_cuda_rng_tracker

_TRACKER_PREFIX = "tracker."
#: Normal numbers come in twos: the second of Python's and of NumPy's where it was not given out.
_PENDING = "pending_normals"


def random_states() -> dict[str, Tensor]:
    """States of torch, the device, the tracker, Python and NumPy, by name."""
    states = {"torch": torch.get_rng_state(), "device": device.get_rng_state()}
    for name, tensor in get_cuda_rng_tracker().get_states().items():
        states[_TRACKER_PREFIX + name] = tensor
    _, internal, python_normal = random.getstate()
    states["python"] = torch.tensor(internal, dtype=torch.int64)
    generator = np.random.get_state(legacy=False)
    numbers = [*generator["state"]["key"].tolist(), generator["state"]["pos"]]
    states["numpy"] = torch.tensor(numbers, dtype=torch.int64)
    pending = [python_normal is not None, python_normal or 0.0]
    pending += [generator["has_gauss"], generator["gauss"] if generator["has_gauss"] else 0.0]
    states[_PENDING] = torch.tensor(pending, dtype=torch.float64)
    return states


def restore_random_states(states: dict[str, Tensor]) -> None:
    """Go on from `random_states`; those of older checkpoints know of no pending numbers."""
    torch.set_rng_state(states["torch"])
    device.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(
        {
            name.removeprefix(_TRACKER_PREFIX): tensor
            for name, tensor in states.items()
            if name.startswith(_TRACKER_PREFIX)
        }
    )
    pending = states[_PENDING].tolist() if _PENDING in states else [0.0] * 4
    python_normal = pending[1] if pending[0] else None
    version = random.getstate()[0]
    random.setstate((version, tuple(states["python"].tolist()), python_normal))
    *keys, position = states["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, int(pending[2]), pending[3])
    )
