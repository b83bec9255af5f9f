"""A language model that is no transformer; run it like pretrain_gpt.py, with any of its flags."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, manual_seed, nn

from mcore import tensor_parallel as tp
from mcore.config.run import RunConfig
from mcore.config.transformer import TransformerConfig
from mcore.training import Stage, corpus_files, pretrain
from mcore.training.gpt import datasets_provider
from mcore.transformer.norm import build_norm
from pretrain_gpt import loss_func


class ShiftLayer(nn.Module):
    """x + MLP(norm(x), norm(x) of the token before)."""

    def __init__(self, config: TransformerConfig, seed: int) -> None:
        super().__init__()
        manual_seed(seed)  # the same weights whatever else is in the stage
        h = config.hidden_size
        self.now = tp.ColumnParallelLinear(h, config.ffn_size, config=config)
        self.before = tp.ColumnParallelLinear(h, config.ffn_size, config=config, bias=False)
        self.out = tp.RowParallelLinear(config.ffn_size, h, config=config, input_is_parallel=True)
        group, is_part = self.now.tp_group, config.sequence_parallel  # each rank has a part of s
        self.norm = build_norm(config, h, group, partial_gradient=is_part)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], or a part of s each; the linear layers gather and scatter it."""
        now, before = self.now(self.norm(x))[0], self.before(self.norm(x))[0]
        return x + self.out(F.silu(now + F.pad(before[:-1], (0, 0, 0, 0, 1, 0))))[0]


class ShiftModel(nn.Module):
    """The part of the model that a stage holds; t divides the vocabulary, which is not padded."""

    def __init__(self, config: RunConfig, stage: Stage) -> None:
        super().__init__()
        seed = config.training.seed
        self.config = config.model  # the schedule reads hidden_size, the shape that travels
        self.layer_offset = stage.layers.start  # checkpoints number the layers of the whole model
        self.layers = nn.Sequential(*(ShiftLayer(config.model, seed + n) for n in stage.layers))
        size, vocabulary = config.model.hidden_size, config.tokenizer.vocab_size or 0
        self.input: Any = None
        self.embedding = self.head = None
        if stage.pre_process:
            manual_seed(seed - 1)
            self.embedding = tp.VocabParallelEmbedding(vocabulary, size, config=self.config)
        if stage.post_process:
            manual_seed(seed - 2)
            self.head = tp.ColumnParallelLinear(size, vocabulary, config=config.model)

    def set_input_tensor(self, input_tensor: list[Any]) -> None:
        """What the stage before returned."""
        self.input = input_tensor[0]

    def forward(self, tokens: Any, labels: Any) -> Tensor:
        """[s, b, h] to the next stage; on the last stage the loss of each token, [b, s]."""
        x, self.input = self.input, None  # kept, it would outlive its backward
        if self.embedding is not None:
            x = self.embedding(tokens).transpose(0, 1)
            x = tp.scatter_to_sequence_parallel_region(x) if self.config.sequence_parallel else x
        x = self.layers(x)
        if self.head is None:
            return x
        return tp.vocab_parallel_cross_entropy(self.head(x)[0].transpose(0, 1), labels)


def forward_step(iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    """Run a micro batch through this stage."""
    tokens, labels, mask = map(next(iterator).get, ("tokens", "labels", "loss_mask"))
    return model(tokens, labels), lambda output: loss_func(mask, output)


if __name__ == "__main__":
    pretrain(datasets_provider, ShiftModel, forward_step, data_files=corpus_files)
