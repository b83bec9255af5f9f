"""The layers in a user's own module: nothing but `initialize_model_parallel`, or not even that."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mcore.config.parallel import ModelParallelConfig
from mcore.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from tests.unit.tensor_parallel.helpers import run_at

pytestmark = pytest.mark.dist

VOCAB, HIDDEN, BATCH = 24, 8, 16


class _OwnModel(nn.Module):
    def __init__(self):
        super().__init__()
        config = ModelParallelConfig(params_dtype=torch.float64)
        self.embedding = VocabParallelEmbedding(VOCAB, HIDDEN, config=config)
        self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, config=config)
        self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, config=config, input_is_parallel=True)
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, config=config, bias=False)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        y, _ = self.up(x)
        y, _ = self.down(F.gelu(y))
        logits, _ = self.head(self.norm(x + y))
        return vocab_parallel_cross_entropy(logits, labels).mean()


class _PlainModel(nn.Module):
    def __init__(self):
        super().__init__()
        options = {"dtype": torch.float64}
        self.embedding = nn.Parameter(nn.init.normal_(torch.empty(VOCAB, HIDDEN, **options)))
        self.up = nn.Parameter(nn.init.xavier_normal_(torch.empty(4 * HIDDEN, HIDDEN, **options)))
        self.up_bias = nn.Parameter(torch.zeros(4 * HIDDEN, **options))
        self.down = nn.Parameter(nn.init.xavier_normal_(torch.empty(HIDDEN, 4 * HIDDEN, **options)))
        self.down_bias = nn.Parameter(torch.zeros(HIDDEN, **options))
        self.norm = nn.LayerNorm(HIDDEN, **options)
        self.head = nn.Parameter(nn.init.xavier_normal_(torch.empty(VOCAB, HIDDEN, **options)))

    def forward(self, ids, labels):
        x = F.embedding(ids, self.embedding)
        y = F.linear(F.gelu(F.linear(x, self.up, self.up_bias)), self.down, self.down_bias)
        logits = F.linear(self.norm(x + y), self.head)
        return F.cross_entropy(logits, labels)


def _train(model_class):
    torch.manual_seed(1)
    model = model_class()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(5):
        ids = torch.randint(VOCAB, (BATCH,), generator=generator)
        loss = model(ids, (ids * 5 + 1) % VOCAB)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def _train_own(group):
    del group
    return _train(_OwnModel)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_training_follows_the_plain_module(tp):
    expected = _train(_PlainModel)
    assert expected[-1] < expected[0]
    for losses in run_at(tp, _train_own):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
