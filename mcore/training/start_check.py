"""Whether a run can go on from the checkpoint of --load, as far as its options can tell.

It is asked before any process group exists. Loading asks again: the checkpoint may be another by
then, and damage is found there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from mcore.config.checks import can_be_scheduled
from mcore.config.fields import AtFaultError
from mcore.config.run import RunConfig, resolve
from mcore.errors import CheckpointError, ConfigError
from mcore.training.checkpoint_fit import check_end, check_model, check_optimizer
from mcore.training.save_roots import readable_start
from mcore.training.setup import build_scheduler


def start_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """What of the options contradicts the checkpoint that the run would start from, in words.

    A checkpoint that is not on this machine, is damaged or of another program contradicts nothing.

    Args:
        config: its sections may lack fields that are at fault (`mcore.config.partial`).
        world_size: processes of the job.
    """
    start = readable_start(config.checkpoint)
    if start is None:
        return
    for check in _checks(start[0], start[1].common, config, world_size):
        try:
            check()
        except (CheckpointError, ConfigError) as error:
            yield str(error)
        except AtFaultError:
            continue


def _checks(
    directory: Path, common: Mapping[str, Any], config: RunConfig, world_size: int
) -> Iterator[Callable[[], object]]:
    """Those that loading makes with the same options; each raises what is wrong."""
    if isinstance(common.get("model"), dict):
        yield partial(check_model, common, config)
    options = config.checkpoint
    if options.finetune or config.training.skip_train:
        return
    if options.load_optim:
        yield partial(check_optimizer, common, directory)
    if not can_be_scheduled(config, world_size):
        return
    resolved = resolve(config, world_size)
    if isinstance(common.get("iteration"), int):
        yield partial(check_end, common["iteration"], resolved.train_iters)
    theirs = common.get("opt_param_scheduler")
    if options.load_optim and isinstance(theirs, dict):
        with contextlib.suppress(ConfigError):  # no schedule at all, which is told elsewhere
            ours = build_scheduler(_NoOptimizer(), config, resolved)
            yield partial(ours.differences, theirs)


class _NoOptimizer:
    """A schedule is compared without the groups that it writes into."""

    param_groups: ClassVar[list[dict[str, Any]]] = []
