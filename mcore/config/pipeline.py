"""Which pipeline schedule runs, and which layers each stage holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore.config.fields import below, flag, refuse
from mcore.config.transformer import TransformerConfig
from mcore.errors import ConfigError
from mcore.topology.placement import StagePlacement
from mcore.topology.stage_layout import layout_split
from mcore.topology.stages import balanced_split, split_layers

AUTO_LAYOUT = "auto"
_OTHER_SPLITS = (
    "--pipeline-model-parallel-layout excludes the other flags that split layers "
    "(--decoder-first/last-pipeline-num-layers, --account-for-...-in-pipeline-split); drop them"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Schedule and layer split of a pipeline; sizes are in `ModelParallelConfig`.

    Raises:
        ConfigError: a number below 1.
    """

    pipeline_schedule: str | None = flag(
        None,
        metavar="NAME",
        help="gpipe, 1f1b, interleaved-1f1b, bounded, zb-h1, zb-v, or file:PATH with one line of "
        "actions a rank; 1f1b when absent, interleaved-1f1b with virtual stages. `mcore schedule` "
        "draws them.",
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None,
        help="Microbatches that run through a chunk before the next chunk's turn "
        "(interleaved-1f1b); the pipeline size when absent.",
    )
    max_in_flight_microbatches: int | None = flag(
        None, help="Microbatches whose activations a rank may hold; chooses schedule bounded."
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        help="Layers of each chunk, instead of --num-virtual-stages-per-pipeline-rank.",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, help="Layers of the first pipeline rank; the others share the rest evenly."
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, help="Layers of the last pipeline rank; the others share the rest evenly."
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, help="Count the embedding as one layer when layers are shared out."
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, help="Count the output layer and loss as one layer when layers are shared out."
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        metavar="LAYOUT",
        help="Layers of every stage in Megatron's letters, such as Et*3|(tt|)*2ttL, or auto: "
        "balanced by estimated cost, embedding and loss included.",
    )

    profile_pipeline: str | None = flag(
        None,
        metavar="FILE",
        help="Write a Chrome/Perfetto trace of the pipeline's actions in the second to eleventh "
        "step, and report the measured bubble beside the predicted one.",
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from below(
            self,
            1,
            "microbatch_group_size_per_virtual_pipeline_stage",
            "max_in_flight_microbatches",
            "num_layers_per_virtual_pipeline_stage",
        )

    @property
    def layout(self) -> str | None:
        """The layout in letters, if one is given."""
        text = self.pipeline_model_parallel_layout
        return None if text == AUTO_LAYOUT else text

    def num_chunks(self, model: TransformerConfig) -> int | None:
        """Model chunks a rank, from whichever flag says so; None where none does.

        Raises:
            ConfigError: more than one flag says so, or numbers that do not divide.
        """
        selectors = {
            "--num-virtual-stages-per-pipeline-rank": model.virtual_pipeline_model_parallel_size,
            "--num-layers-per-virtual-pipeline-stage": self.num_layers_per_virtual_pipeline_stage,
            "--pipeline-model-parallel-layout": self.layout,
        }
        given = [name for name, value in selectors.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other; give one")
        pp = model.pipeline_model_parallel_size
        if self.layout is not None:
            if self._splits_otherwise:
                raise ConfigError(_OTHER_SPLITS)
            return len(layout_split(self.layout, model.num_layers, pp)) // pp
        if self.num_layers_per_virtual_pipeline_stage is not None:
            return self._chunks_of_layers(model.num_layers, pp)
        return model.virtual_pipeline_model_parallel_size

    def split(
        self, model: TransformerConfig, placement: StagePlacement, costs: tuple[float, float]
    ) -> tuple[int, ...]:
        """The number of layers of each stage of the chain.

        Args:
            model: number of layers.
            placement: where the stages live.
            costs: of the embedding and of output layer with loss, in layers (for `auto`).

        Raises:
            ConfigError: the layers cannot be split so.
        """
        pp, chunks = placement.num_ranks, placement.num_chunks
        if self.layout is not None:
            return layout_split(self.layout, model.num_layers, pp)
        if self.pipeline_model_parallel_layout == AUTO_LAYOUT:
            if self._splits_otherwise:
                raise ConfigError(_OTHER_SPLITS)
            return balanced_split(model.num_layers, placement, *costs)
        if placement != StagePlacement.usual(pp, chunks):
            # On a V both ends are on rank 0: first and last mean the stages themselves.
            pp, chunks = placement.num_stages, 1
        return split_layers(
            model.num_layers,
            pp,
            chunks,
            num_layers_in_first_pipeline_stage=self.decoder_first_pipeline_num_layers,
            num_layers_in_last_pipeline_stage=self.decoder_last_pipeline_num_layers,
            account_for_embedding_in_pipeline_split=self.account_for_embedding_in_pipeline_split,
            account_for_loss_in_pipeline_split=self.account_for_loss_in_pipeline_split,
        )

    @property
    def _splits_otherwise(self) -> bool:
        return (
            self.decoder_first_pipeline_num_layers is not None
            or self.decoder_last_pipeline_num_layers is not None
            or self.account_for_embedding_in_pipeline_split
            or self.account_for_loss_in_pipeline_split
        )

    def _chunks_of_layers(self, num_layers: int, pp: int) -> int:
        layers = self.num_layers_per_virtual_pipeline_stage
        assert layers is not None
        if self.decoder_first_pipeline_num_layers or self.decoder_last_pipeline_num_layers:
            raise ConfigError(
                "--num-layers-per-virtual-pipeline-stage excludes --decoder-first/last-pipeline-"
                "num-layers; use --num-virtual-stages-per-pipeline-rank"
            )
        counted = (
            num_layers
            + self.account_for_embedding_in_pipeline_split
            + self.account_for_loss_in_pipeline_split
        )
        if counted % (pp * layers):
            raise ConfigError(
                f"--num-layers ({num_layers}, {counted} with what counts as a layer) must be a "
                f"multiple of --pipeline-model-parallel-size ({pp}) x "
                f"--num-layers-per-virtual-pipeline-stage ({layers}) = {pp * layers}"
            )
        return counted // (pp * layers)
