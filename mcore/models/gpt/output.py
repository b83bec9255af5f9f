"""The output head: logits, or straight the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore.config.transformer import TransformerConfig
from mcore.tensor_parallel.cross_entropy import LossOptions, vocab_parallel_cross_entropy
from mcore.tensor_parallel.layers import ColumnParallelLinear
from mcore.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from mcore.topology.group import Group
from mcore.topology.param_sharding import RowCut

#: Logits of a microbatch beyond this many elements on a rank are never held at once: 256 MB in
#: float32. Below, one large product and one pass over its result are faster.
FUSE_FROM = 64 * 2**20

#: Logits of a fused chunk, 128 MB in float32: below some hundred tokens the products get slow.
FUSED_CHUNK = 32 * 2**20


def fuses_loss(config: TransformerConfig, num_logits: int) -> bool:
    """Whether a microbatch's loss is computed from the output matrix, without its logits.

    In float16 always: logits past its range would be infinite before the loss is taken.

    Args:
        config: the model.
        num_logits: of the microbatch, on a tensor-parallel rank.
    """
    is_half = config.params_dtype == torch.float16
    return config.cross_entropy_loss_fusion or is_half or num_logits > FUSE_FROM


class OutputLayer(ColumnParallelLinear):
    """Hidden states to logits of the vocabulary, which is dealt to tensor-parallel ranks.

    Args:
        config: width, loss and the like.
        padded_vocab_size: rows of the matrix over all ranks.
        vocab_size: ids that exist.
        skip_weight_param_allocation: own no weight; `forward` is given the embedding's.
        row_cut: which rows are this rank's.
        tp_group: tensor-parallel group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        padded_vocab_size: int,
        *,
        vocab_size: int,
        skip_weight_param_allocation: bool,
        row_cut: RowCut,
        tp_group: Group,
    ) -> None:
        super().__init__(
            config.hidden_size,
            padded_vocab_size,
            config=config,
            bias=False,
            skip_weight_param_allocation=skip_weight_param_allocation,
            row_cut=row_cut,
            tp_group=tp_group,
        )
        self.config = config
        self.vocab_size = vocab_size
        self.label_smoothing = config.label_smoothing
        self.z_loss_coefficient = config.z_loss_coefficient
        self.always_fuses = config.cross_entropy_loss_fusion

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the head.

        Args:
            input_: hidden states, [s, b, h], or [s/t, b, h] with sequence parallelism.
            weight: the embedding's matrix [v/t, h], where it is shared.
            labels: ids, [s, b].

        Returns:
            (logits [s, b, v/t], None), or with labels (the loss of each token [s, b], None).
        """
        if labels is None:
            return super().forward(input_, weight)
        smoothing = self.label_smoothing if self.training else 0.0
        z_loss = self.z_loss_coefficient if self.training else 0.0
        matrix = self.weight if weight is None else weight
        per_rank = self.output_size_per_partition
        if fuses_loss(self.config, labels.numel() * per_rank):
            loss = linear_cross_entropy(
                input_,
                matrix,
                labels,
                LossOptions(
                    self.tp_group, per_rank, self.vocab_size, smoothing, z_loss, FUSED_CHUNK
                ),
                sequence_parallel=self.sequence_parallel,
                gradient_accumulation_fusion=self.gradient_accumulation_fusion,
                # Who asked for the fusion wants its least number of products; who gets it for the
                # size of the logits is promised that a split backward is split.
                weight_gradients=None if self.always_fuses else self.weight_gradients,
            )
            return loss, None
        logits, _ = super().forward(input_, weight)
        loss = vocab_parallel_cross_entropy(
            logits,
            labels,
            smoothing,
            z_loss=z_loss,
            vocab_size=self.vocab_size,
            tp_group=self.tp_group,
        )
        return loss, None
