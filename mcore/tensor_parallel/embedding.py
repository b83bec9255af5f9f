"""Token embedding whose rows are dealt to tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore.config.parallel import ModelParallelConfig
from mcore.errors import ShapeError
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.initialization import InitMethod, initialize_slice_
from mcore.tensor_parallel.mappings import (
    AnyGroup,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from mcore.topology.param_sharding import even_rows, set_sharding


class VocabParallelEmbedding(nn.Module):
    """Embedding of [num_embeddings, embedding_dim] with the rows dealt to the ranks in even runs.

    Args:
        num_embeddings: vocabulary size. Where it does not divide by t (or by `padded_size`'s rule)
            zero rows are added at the end; they are never looked up, trained or saved.
        embedding_dim: width.
        init_method: fills the whole matrix in place; normal with deviation 1 when None, as torch's.
        config: data type and the like; defaults when None.
        reduce_scatter_embeddings: return this rank's part of the sequence ([s/t, b, h]); the ids
            are then [b, s] and the output is sequence first.
        padded_size: rows to allocate over all ranks; the next multiple of t when None.
        tp_group: tensor-parallel group, this process's own when None.

    Raises:
        ShapeError: padded_size is too small or does not divide by t.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod | None = None,
        config: ModelParallelConfig | None = None,
        reduce_scatter_embeddings: bool = False,
        padded_size: int | None = None,
        tp_group: AnyGroup | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tensor_model_parallel_group_or(tp_group)
        config = config or ModelParallelConfig()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        padded = padded_size or -(-num_embeddings // self.tp_group.size) * self.tp_group.size
        if padded < num_embeddings:
            raise ShapeError(f"padded_size ({padded}) is below num_embeddings ({num_embeddings})")
        cut = even_rows(padded, self.tp_group, used=num_embeddings)
        self.num_embeddings_per_partition = cut.local
        self.vocab_start_index = self.tp_group.rank * cut.local
        self.vocab_end_index = self.vocab_start_index + cut.local
        self.weight = nn.Parameter(torch.empty(cut.local, embedding_dim, dtype=config.params_dtype))
        set_sharding(self.weight, cut.sharding(embedding_dim))
        if config.perform_initialization:
            sharding = cut.sharding(embedding_dim)
            initialize_slice_(self.weight, sharding, init_method or nn.init.normal_)

    def forward(self, input_: Tensor) -> Tensor:
        """Look ids up.

        Args:
            input_: ids, [b, s] (any shape without reduce_scatter_embeddings), below num_embeddings.
                Any other id gives NaN (torch raises IndexError on one CPU rank without padding).

        Returns:
            [b, s, h] equal on all ranks, or [s/t, b, h] with reduce_scatter_embeddings.

        Comm: one all-reduce (or reduce-scatter) of the output; none when t is 1.
        """
        if self.tp_group.size == 1 and self.num_embeddings_per_partition == self.num_embeddings:
            found = F.embedding(input_, self.weight)
        else:
            end = min(self.vocab_end_index, self.num_embeddings)
            foreign = (input_ < self.vocab_start_index) | (input_ >= end)
            local = (input_ - self.vocab_start_index).masked_fill(foreign, 0)
            found = F.embedding(local, self.weight)
            found = torch.where(foreign.unsqueeze(-1), self._absent(input_), found)
        if self.reduce_scatter_embeddings:
            found = found.transpose(0, 1).contiguous()  # [b, s, h] -> [s, b, h]
            return reduce_scatter_to_sequence_parallel_region(found, self.tp_group)
        return reduce_from_tensor_model_parallel_region(found, self.tp_group)

    def _absent(self, ids: Tensor) -> Tensor:
        """What an id without a row here gives: zero, or NaN if no rank has one; [..., 1]."""
        wrong = (ids < 0) | (ids >= self.num_embeddings)
        zeros = torch.zeros(ids.shape, dtype=self.weight.dtype, device=ids.device)
        return zeros.masked_fill_(wrong, torch.nan).unsqueeze(-1)
