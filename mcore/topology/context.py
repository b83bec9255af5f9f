"""Where this process stands in the job: built once, never changed, passed by the name `ctx`."""

from __future__ import annotations

from dataclasses import dataclass

from mcore.errors import TopologyError
from mcore.topology.group import Group
from mcore.topology.placement import StagePlacement
from mcore.topology.rank_layout import RankLayout


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """The layout and every group that this process is in.

    Attributes:
        layout: axis sizes and order.
        rank: this process's rank in the world.
        tp: tensor-parallel group; pp, dp, cp alike.
        dp_cp: data- and context-parallel ranks: gradients are reduced over it.
        mp: tensor- and pipeline-parallel ranks: they hold one copy of the model together.
        tp_cp: tensor- and context-parallel ranks.
        tp_dp_cp: all ranks of one pipeline stage.
        embd: ranks of the first and last stage of this pipeline, or None on the ranks between.
        pos_embd: the rank of the first stage, or None elsewhere.
        virtual_pipeline_model_parallel_size: model chunks per rank, or None without virtual stages.
        stage_placement: where the stages live; None = the usual placement, see `placement`.
    """

    layout: RankLayout
    rank: int
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    dp_cp: Group
    mp: Group
    tp_cp: Group
    tp_dp_cp: Group
    embd: Group | None
    pos_embd: Group | None
    virtual_pipeline_model_parallel_size: int | None = None
    stage_placement: StagePlacement | None = None

    @property
    def placement(self) -> StagePlacement:
        """Which rank and chunk each stage of the pipeline is; who embeds and who has the loss."""
        if self.stage_placement is not None:
            return self.stage_placement
        return StagePlacement.usual(self.pp.size, self.virtual_pipeline_model_parallel_size or 1)

    @classmethod
    def single(cls) -> ParallelContext:
        """The context of one process; needs no torch.distributed."""
        names = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp-cp", "embedding")
        groups = {name: Group.single(name) for name in names}
        return cls(
            layout=RankLayout(),
            rank=0,
            tp=groups["tp"],
            cp=groups["cp"],
            dp=groups["dp"],
            pp=groups["pp"],
            dp_cp=groups["dp-cp"],
            mp=groups["tp-pp"],
            tp_cp=groups["tp-cp"],
            tp_dp_cp=groups["tp-dp-cp"],
            embd=groups["embedding"],
            pos_embd=Group.single("position-embedding"),
        )

    def member(self, name: str, group: Group | None) -> Group:
        """The group, or a `TopologyError` that names who is in it."""
        if group is None:
            ends = {self.placement.first_rank}
            if name != "position embedding":
                ends.add(self.placement.last_rank)
            ranks = [self.pp.ranks[index] for index in sorted(ends)]
            raise TopologyError(
                f"rank {self.rank} is not in its pipeline's {name} group, ranks {ranks}"
            )
        return group
