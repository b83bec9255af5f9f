"""The planners of `torch.distributed.checkpoint`, told to look into our `ShardedTensor`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex


class SavePlanner(DefaultSavePlanner):
    """Default planner: replicas share the work, every byte is written once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The live memory behind a part of the plan."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """Default planner: finds the saved boxes that overlap what this process holds."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the tensors as they are; the default would allocate those on the meta device."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The live memory that a part of the plan fills."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)
