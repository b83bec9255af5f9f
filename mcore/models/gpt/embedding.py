"""Token and position embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore.config.transformer import TransformerConfig
from mcore.errors import ShapeError
from mcore.tensor_parallel.layers import VocabParallelEmbedding
from mcore.topology.group import Group
from mcore.topology.param_sharding import replicated_sharding, set_sharding
from mcore.transformer.dropout import DropoutState, Site, dropout, needed
from mcore.transformer.initialization import normal


class LanguageModelEmbedding(nn.Module):
    """Word embedding plus, where asked for, a learned position embedding, then dropout.

    Args:
        config: width, dropout, sequence parallelism.
        vocab_size: token ids that exist.
        padded_vocab_size: rows of the table over all ranks.
        max_sequence_length: positions of the learned table.
        learned_positions: whether there is a learned table.
        tp_group: tensor-parallel group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        max_sequence_length: int,
        learned_positions: bool,
        tp_group: Group,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.hidden_dropout = config.hidden_dropout
        self.residual_dtype = config.pipeline_dtype
        self.sequence_parallel = config.sequence_parallel and tp_group.size > 1
        self.max_sequence_length = max_sequence_length
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=normal(config.init_method_std),
            config=config,
            reduce_scatter_embeddings=self.sequence_parallel,
            padded_size=padded_vocab_size,
            tp_group=tp_group,
        )
        self.position_embeddings: nn.Embedding | None = None
        if learned_positions:
            shape = (max_sequence_length, config.hidden_size)
            self.position_embeddings = nn.Embedding(*shape, dtype=config.params_dtype)
            # Under sequence parallelism each rank looks up its own positions only.
            set_sharding(
                self.position_embeddings.weight,
                replicated_sharding(shape, tp_group, sequence_parallel=self.sequence_parallel),
            )
            if config.perform_initialization:
                nn.init.normal_(self.position_embeddings.weight, std=config.init_method_std)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        dropout_state: DropoutState | None,
    ) -> Tensor:
        """Embed tokens.

        Args:
            input_ids: [b, s].
            position_ids: [b, s]; 0 .. s-1 when None.
            dropout_state: what dropout masks depend on; needed in training when dropout is on.

        Returns:
            [s, b, h], or [s/t, b, h] with sequence parallelism.

        Raises:
            ShapeError: the sequence is longer than the position table, or does not divide by t.
        """
        length = input_ids.shape[1]
        if self.sequence_parallel and length % self.tp_group.size:
            raise ShapeError(
                f"sequence length ({length}) must be divisible by the tensor-parallel size "
                f"({self.tp_group.size}) with sequence parallelism"
            )
        words = self.word_embeddings(input_ids)
        hidden_states = words if self.sequence_parallel else words.transpose(0, 1).contiguous()
        own = hidden_states.shape[0]
        first = self.tp_group.rank * own if self.sequence_parallel else 0
        if self.position_embeddings is not None:
            hidden_states = hidden_states + self._positions(position_ids, length, first, own)
        hidden_states = hidden_states.to(self.residual_dtype)
        if self.training and self.hidden_dropout > 0.0:
            hidden_states = dropout(
                hidden_states,
                self.hidden_dropout,
                needed(dropout_state),
                layer=0,
                site=Site.EMBEDDING,
                first_position=first,
            )
        return hidden_states

    def _positions(self, position_ids: Tensor | None, length: int, first: int, own: int) -> Tensor:
        """Position embeddings of this rank's part of the sequence, [s', b or 1, h]."""
        assert self.position_embeddings is not None
        table = self.position_embeddings.weight
        if position_ids is None and length > table.shape[0]:
            raise ShapeError(
                f"sequence length ({length}) exceeds max_position_embeddings ({table.shape[0]})"
            )
        if position_ids is None:
            return table[first : first + own].unsqueeze(1)
        mine = position_ids[:, first : first + own].t()  # [b, s] -> [s', b]
        return F.embedding(mine, table)


def pad_vocab_size(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """Rows to allocate: the next multiple of divisible_by x tensor-parallel size."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def default_position_ids(input_ids: Tensor) -> Tensor:
    """0 .. s-1 for every sample, [b, s]."""
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
