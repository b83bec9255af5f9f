"""A GPT model, or the part of one that a pipeline stage holds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mcore.config.gpt import RotaryScaling
from mcore.config.transformer import TransformerConfig
from mcore.errors import ConfigError, ShapeError
from mcore.models.gpt.embedding import LanguageModelEmbedding, pad_vocab_size
from mcore.models.gpt.gpt_layer_specs import LayerSpec, get_gpt_layer_local_spec
from mcore.models.gpt.initialization import initialize_parameters_
from mcore.models.gpt.layer_range import even_layer_range
from mcore.models.gpt.output import OutputLayer
from mcore.parallel_state import data_parallel_rank_or_first, tensor_model_parallel_group_or
from mcore.tensor_parallel.mappings import (
    AnyGroup,
    gather_from_tensor_model_parallel_region,
)
from mcore.topology.param_sharding import even_rows, set_sharding
from mcore.transformer.block import TransformerBlock
from mcore.transformer.documents import AttentionMask
from mcore.transformer.dropout import DropoutState
from mcore.transformer.rotary import RotaryEmbedding, RotaryTables

_TIED_KEY = "embedding.word_embeddings.weight"


class GPTModel(nn.Module):
    """Embedding, decoder layers and output head, each present on the stages that need it.

    Args:
        config: the decoder.
        transformer_layer_spec: None or `get_gpt_layer_local_spec()`; there is one kind of layer.
        vocab_size: token ids that exist; rows are added so that the table can be dealt to the
            ranks, and they never enter the softmax.
        max_sequence_length: longest sequence.
        pre_process: this stage embeds tokens.
        post_process: this stage computes logits or the loss.
        parallel_output: return this rank's logits, padding included, rather than all of them.
        share_embeddings_and_output_weights: the output layer uses the embedding's matrix.
        position_embedding_type: `learned_absolute`, `rope` or `none`.
        rotary_percent: part of each head's channels that is rotated.
        rotary_base: base of the rotary frequencies.
        rotary_scaling: how they are stretched; None = not at all.
        make_vocab_size_divisible_by: the table's rows on each rank are a multiple of this.
        layer_range: global numbers of this stage's layers; when None all of them, or an even share
            by the pipeline rank where the model is cut.
        vp_stage: number of this chunk on its rank, with several.
        seed: initial weights are a function of it, the parameter's name and the position in it;
            torch's initial seed when None.
        tp_group: tensor-parallel group, this process's own when None.

    Raises:
        ConfigError: a layer spec that is not ours.
    """

    def __init__(  # noqa: PLR0913  (Megatron's signature)
        self,
        config: TransformerConfig,
        transformer_layer_spec: LayerSpec | None = None,
        vocab_size: int = 0,
        max_sequence_length: int = 0,
        pre_process: bool = True,
        post_process: bool = True,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000.0,
        *,
        rotary_scaling: RotaryScaling | None = None,
        make_vocab_size_divisible_by: int = 1,
        layer_range: range | None = None,
        vp_stage: int | None = None,
        seed: int | None = None,
        tp_group: AnyGroup | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(transformer_layer_spec, vocab_size, max_sequence_length)
        group = tensor_model_parallel_group_or(tp_group)
        self.config, self.tp_group, self.vp_stage = config, group, vp_stage
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process = pre_process, post_process
        self.parallel_output = parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.sequence_parallel = config.sequence_parallel and group.size > 1
        # Set by the pipeline before each forward on stages that do not embed, which takes it.
        self.input_tensor: Tensor | None = None
        self._forward_calls = 0
        # Data-parallel ranks have different samples: each a range that no batch reaches beyond.
        self._first_sample = data_parallel_rank_or_first() << 32
        self._seed = torch.initial_seed() if seed is None else seed
        layers = layer_range
        if layers is None:
            layers = even_layer_range(config, pre_process and post_process, vp_stage)
        padded = pad_vocab_size(vocab_size, make_vocab_size_divisible_by, group.size)
        # One pass over all parameters draws them below, by name.
        plain = replace(config, perform_initialization=False)

        self.embedding: LanguageModelEmbedding | None = None
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                plain,
                vocab_size=vocab_size,
                padded_vocab_size=padded,
                max_sequence_length=max_sequence_length,
                learned_positions=position_embedding_type == "learned_absolute",
                tp_group=group,
            )
            if share_embeddings_and_output_weights and not post_process:
                self.embedding.word_embeddings.weight.shared_embedding = True  # type: ignore[attr-defined]
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if position_embedding_type == "rope":
            self.rotary_pos_emb = RotaryEmbedding(
                config.head_dim,
                rotary_percent=rotary_percent,
                rotary_interleaved=config.rotary_interleaved,
                rotary_base=rotary_base,
                scaling=rotary_scaling,
            )
        self.decoder = TransformerBlock(plain, layers, post_process, group)
        self.output_layer: OutputLayer | None = None
        if post_process:
            self.output_layer = self._build_output_layer(plain, padded)
        if config.perform_initialization:
            initialize_parameters_(self, config, self._seed, group)

    def _build_output_layer(self, config: TransformerConfig, padded: int) -> OutputLayer:
        cut = even_rows(padded, self.tp_group, used=self.vocab_size)
        tied = self.share_embeddings_and_output_weights
        layer = OutputLayer(
            config,
            padded,
            vocab_size=self.vocab_size,
            skip_weight_param_allocation=tied and self.pre_process,
            row_cut=cut,
            tp_group=self.tp_group,
        )
        if tied and not self.pre_process:
            sharding = cut.sharding(config.hidden_size)
            set_sharding(layer.weight, replace(sharding, tied_key=_TIED_KEY))
        return layer

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The matrix that embedding and output layer share, where this stage holds it."""
        if self.embedding is not None:
            return self.embedding.word_embeddings.weight
        return None if self.output_layer is None else self.output_layer.weight

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Hand over the previous stage's output, [s(/t), b, h] (a list of one is unwrapped).

        The next forward takes it: each forward needs its own.
        """
        if isinstance(input_tensor, list):
            assert len(input_tensor) == 1
            input_tensor = input_tensor[0]
        self.input_tensor = input_tensor

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: AttentionMask = None,
        labels: Tensor | None = None,
        *,
        dropout_state: DropoutState | None = None,
        only_last_logits: bool = False,
    ) -> Tensor:
        """Run this stage.

        Args:
            input_ids: [b, s]; needed on the first stage only.
            position_ids: [b, s], for learned and rotary positions; 0 .. s-1 when None.
            attention_mask: True = hidden, broadcast to [b, n, s, s]; documents that do not see each
                other; None = causal.
            labels: [b, s]; used on the last stage.
            dropout_state: what dropout masks depend on. When None in training, a state is made of
                the model's seed, the number of calls and the data-parallel rank. A program that
                resumes and wants the masks of the straight run gives it, with the iteration and
                the samples' places in the stream.
            only_last_logits: logits of the last position only, [b, 1, v]; excludes labels and
                sequence parallelism.

        Returns:
            Hidden states [s(/t), b, h] on stages that do not post-process. On the last stage the
            loss of each token, [b, s] in float32 or wider, or without labels the logits [b, s, v/t]
            ([b, s, v] unless parallel_output).
        """
        if self.embedding is not None:
            if input_ids is None:
                raise ShapeError("the first stage needs input_ids")
            dropout_state = self._state_for(dropout_state, input_ids.shape[0])
            hidden_states = self.embedding(input_ids, position_ids, dropout_state)
        else:
            if self.input_tensor is None:
                raise ShapeError("this stage needs set_input_tensor before forward")
            # Kept here it would outlive its backward.
            hidden_states, self.input_tensor = self.input_tensor, None
            dropout_state = self._state_for(dropout_state, hidden_states.shape[1])
        rotary = self._rotary(hidden_states, position_ids)
        hidden_states = self.decoder(hidden_states, attention_mask, rotary, dropout_state)
        if self.output_layer is None:
            return hidden_states
        if only_last_logits:
            assert labels is None
            assert not self.sequence_parallel
            hidden_states = hidden_states[-1:]
        return self._head(hidden_states, labels)

    def _head(self, hidden_states: Tensor, labels: Tensor | None) -> Tensor:
        assert self.output_layer is not None
        weight = self.shared_embedding_or_output_weight() if self._is_tied else None
        if labels is not None:
            loss: Tensor = self.output_layer(hidden_states, weight, labels.t().contiguous())[0]
            # A tensor of its own, not a view, for `fully_shard` has hooks on what a model returns.
            return loss.t().clone(memory_format=torch.contiguous_format)
        logits, _ = self.output_layer(hidden_states, weight)  # [s, b, v/t]
        if not self.parallel_output:
            logits = gather_from_tensor_model_parallel_region(logits, self.tp_group)
            logits = logits[..., : self.vocab_size]
        return logits.transpose(0, 1).contiguous()

    @property
    def _is_tied(self) -> bool:
        return self.share_embeddings_and_output_weights

    def _rotary(self, hidden_states: Tensor, position_ids: Tensor | None) -> RotaryTables | None:
        if self.rotary_pos_emb is None:
            return None
        length = hidden_states.shape[0] * (self.tp_group.size if self.sequence_parallel else 1)
        # The residual stream may be wider than the queries and keys that are turned.
        wide = self.config.fp32_residual_connection
        dtype = self.config.params_dtype if wide else hidden_states.dtype
        tables: RotaryTables = self.rotary_pos_emb(length, dtype, position_ids)
        return tables

    def _state_for(self, state: DropoutState | None, batch: int) -> DropoutState | None:
        if state is not None or not self.training:
            return state
        self._forward_calls += 1
        first = self._first_sample
        return DropoutState(self._seed, self._forward_calls, torch.arange(first, first + batch))

    def state_dict_for_save_checkpoint(self, prefix: str = "") -> dict[str, Tensor]:
        """The module's state dict (Megatron's name for it)."""
        return self.state_dict(prefix=prefix)


def _check_arguments(spec: LayerSpec | None, vocab_size: int, max_sequence_length: int) -> None:
    if spec is not None and spec != get_gpt_layer_local_spec():
        raise ConfigError(
            f"transformer_layer_spec is {spec!r}; use None or get_gpt_layer_local_spec()"
        )
    for name, value in (("vocab_size", vocab_size), ("max_sequence_length", max_sequence_length)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; give a whole number from 1 up")
