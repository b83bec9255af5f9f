"""Which samples an evaluation measures."""

from __future__ import annotations

from dataclasses import dataclass

from mcore.config.run import Resolved, RunConfig
from mcore.data.gpt_dataset import SampleDataset
from mcore.data.whole_dataset import WholeDataset


@dataclass(frozen=True, slots=True)
class Measurement:
    """A part of a data set.

    Attributes:
        samples: where it is from.
        first: number of its first sample.
        iterations: global batches.
        is_whole: every sample of the set, in order.
    """

    samples: SampleDataset
    first: int
    iterations: int
    is_whole: bool = False


def plan_measurement(
    split: str, samples: SampleDataset, config: RunConfig, resolved: Resolved, iteration: int
) -> Measurement:
    """What to measure after an iteration.

    Validation goes through its data as Megatron does: each evaluation begins where the last one
    ended, which follows from the iteration alone. The test set is measured from its start.

    Args:
        split: `valid` or `test`.
        samples: the data set.
        config: how much of it is measured.
        resolved: the batch.
        iteration: finished training steps.
    """
    options, batch = config.evaluation, resolved.eval_global_batch_size
    if split == "valid" and options.full_validation:
        whole = WholeDataset(samples, batch)
        return Measurement(whole, 0, len(whole) // batch, is_whole=True)
    interval, first = options.eval_interval, 0
    if split == "valid":
        left_out = max(0, options.start_eval_at_iter - 1) // interval
        done = max(0, max(0, iteration - 1) // interval - left_out)
        first = done * options.eval_iters * batch
    return Measurement(samples, first, options.eval_iters)
