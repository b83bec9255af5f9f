"""Linear layers whose weight is cut over tensor-parallel ranks.

Shapes: s sequence, b micro batch, t tensor-parallel size; with sequence parallelism activations
between layers are [s/t, b, h], otherwise [s, b, h] and equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mcore.config.parallel import ModelParallelConfig
from mcore.errors import ConfigError, ShapeError
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.attributes import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from mcore.tensor_parallel.embedding import VocabParallelEmbedding
from mcore.tensor_parallel.initialization import (
    InitMethod,
    default_init_method,
    initialize_slice_,
)
from mcore.tensor_parallel.linear_function import (
    WeightGradients,
    accumulates_in_main_grad,
    linear_with_grad_accumulation_and_async_allreduce,
)
from mcore.tensor_parallel.mappings import (
    AnyGroup,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from mcore.topology.param_sharding import (
    ParamSharding,
    RowCut,
    even_rows,
    replicated_sharding,
    set_sharding,
)

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "linear_with_grad_accumulation_and_async_allreduce",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]


class _SplitsBackward:
    """What lets a pipeline compute a layer's weight gradients in an action of their own."""

    weight_gradients: WeightGradients

    def defer_weight_gradients(self, work: list[Callable[[], None]] | None) -> None:
        """Leave the products of coming backwards in `work`; None = compute them there again."""
        self.weight_gradients.work = work


class ColumnParallelLinear(_SplitsBackward, nn.Module):
    """y = x A^T + b with the output features of A dealt to the ranks: A = [A_1; ...; A_t].

    Args:
        input_size: columns of A.
        output_size: rows of A, all ranks together.
        config: data type, sequence parallelism and the like; defaults when None.
        init_method: fills the whole [output_size, input_size] matrix in place; each rank keeps its
            part, so the weights do not depend on t. Xavier-normal when None.
        bias: whether b exists; it starts at zero.
        gather_output: return the whole output on every rank rather than this rank's features.
        skip_bias_add: return b instead of adding it, so that a later operation can.
        skip_weight_param_allocation: own no weight; `forward` is given one (a tied output layer).
        row_cut: which rows of A are this rank's, where it is not an even run.
        tp_group: tensor-parallel group, this process's own when None.

    Raises:
        ShapeError: output_size does not divide by t.
        ConfigError: gather_output with sequence parallelism.
    """

    def __init__(  # noqa: PLR0913  (Megatron's signature)
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        row_cut: RowCut | None = None,
        tp_group: AnyGroup | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tensor_model_parallel_group_or(tp_group)
        config = config or ModelParallelConfig()
        self.weight_gradients = WeightGradients()
        cut = row_cut or even_rows(output_size, self.tp_group)
        self.input_size, self.output_size = input_size, output_size
        self.output_size_per_partition = cut.local
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.sequence_parallel = config.sequence_parallel and self.tp_group.size > 1
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        if gather_output and self.sequence_parallel:
            raise ConfigError("gather_output is not defined with sequence_parallel; switch one off")
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)
        else:
            self.weight = _make_weight(
                (cut.local, input_size), cut.sharding(input_size), config, init_method
            )
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.zeros(cut.local, dtype=config.params_dtype))
            set_sharding(self.bias, cut.sharding())
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            input_: [s, b, k], or [s/t, b, k] with sequence parallelism.
            weight: used instead of the layer's own; required where it has none.

        Returns:
            (y, b): y is [s, b, n/t], or [s, b, n] gathered; b is the bias if it is still to be
            added, else None.

        Comm: backward all-reduces dx, or forward gathers x and backward reduce-scatters dx.
        """
        if weight is None:
            weight = self.weight
        if weight is None:
            raise ShapeError("this layer owns no weight; pass one to forward")
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            self.gradient_accumulation_fusion and accumulates_in_main_grad(weight),
            allreduce_dgrad=not self.sequence_parallel,
            sequence_parallel=self.sequence_parallel,
            tp_group=self.tp_group,
            weight_gradients=self.weight_gradients,
        )
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(_SplitsBackward, nn.Module):
    """y = x A^T + b with the input features of A dealt to the ranks: A = [A_1 ... A_t].

    Args:
        input_size: columns of A, all ranks together.
        output_size: rows of A.
        config: data type, sequence parallelism and the like; defaults when None.
        init_method: as in `ColumnParallelLinear`.
        bias: whether b exists; every rank holds all of it and adds it once, after the sum.
        input_is_parallel: the input holds this rank's features already.
        skip_bias_add: return b instead of adding it.
        tp_group: tensor-parallel group, this process's own when None.

    Raises:
        ShapeError: input_size does not divide by t.
        ConfigError: sequence parallelism with an input that is not parallel.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
        tp_group: AnyGroup | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tensor_model_parallel_group_or(tp_group)
        config = config or ModelParallelConfig()
        self.weight_gradients = WeightGradients()
        cut = even_rows(input_size, self.tp_group)
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = cut.local
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.sequence_parallel = config.sequence_parallel and self.tp_group.size > 1
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        if self.sequence_parallel and not input_is_parallel:
            raise ConfigError(
                "sequence_parallel needs input_is_parallel=True in a row-parallel layer"
            )
        self.weight = _make_weight(
            (output_size, cut.local), cut.sharding(output_size, dim=1), config, init_method
        )
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype))
            # It is added to this rank's part of the sequence only, where its gradient is partial.
            set_sharding(
                self.bias,
                replicated_sharding(
                    (output_size,), self.tp_group, sequence_parallel=self.sequence_parallel
                ),
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            input_: [s, b, k/t], or [s, b, k] when the input is not parallel.

        Returns:
            (y, b): y is [s, b, n], or [s/t, b, n] with sequence parallelism; b is the bias if it is
            still to be added, else None.

        Comm: forward all-reduces y, or reduce-scatters it with sequence parallelism.
        """
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        partial = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            self.weight,
            # Alone there is no sum to wait for, so the product adds the bias itself.
            self.bias if self.tp_group.size == 1 and not self.skip_bias_add else None,
            self.gradient_accumulation_fusion and accumulates_in_main_grad(self.weight),
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=self.tp_group,
            weight_gradients=self.weight_gradients,
        )
        if self.tp_group.size == 1:
            return partial, self.bias if self.skip_bias_add else None
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(partial, self.tp_group)
        else:
            output = reduce_from_tensor_model_parallel_region(partial, self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        # Under autocast the bias is wider than the output and would widen it.
        return (output if self.bias is None else output + self.bias.to(output.dtype)), None


def _make_weight(
    shape: tuple[int, int],
    sharding: ParamSharding,
    config: ModelParallelConfig,
    init_method: InitMethod | None,
) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    set_sharding(weight, sharding)
    if config.perform_initialization:
        initialize_slice_(weight, sharding, init_method or default_init_method)
    return weight
