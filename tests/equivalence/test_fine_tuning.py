"""Fine-tuning runs: packed samples and token budgets give the same numbers at every layout."""

import json
from pathlib import Path

import numpy as np
import pytest

from mcore.data.conversations import read_conversations
from mcore.data.token_budget import BudgetedConversations, rank_rows
from mcore.errors import ConfigError
from mcore.training.arguments import parse
from mcore.training.initialize import Launch
from mcore.training.pretrain import prepare
from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    series,
    train,
    without_rates,
)
from tests.equivalence.tiny import command
from tests.unit.data.test_sft import encode

BUDGET = "--max-tokens-per-microbatch 32 --global-batch-size 8"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft") / "chats.jsonl"
    generator = np.random.default_rng(5)
    with open(path, "w") as file:
        for number in range(60):
            response = "ab" * int(generator.integers(1, 7))
            file.write(json.dumps({"prompt": f"{number}?", "response": response}) + "\n")
    return str(path)


def flags(chats, *more):
    words = command(chats, 3, "--sft --hidden-dropout 0.1 --attention-dropout 0.0", *more)
    words[words.index("NullTokenizer")] = "ByteLevelTokenizer"
    for flag in ("--vocab-size", "--null-tokenizer-eod-id"):
        at = words.index(flag)
        del words[at : at + 2]
    words.remove("--eod-mask-loss")  # conversations have losses of their own
    return words


@pytest.mark.dist
@pytest.mark.parametrize("more", ["", BUDGET], ids=["packed", "budget"])
def test_layouts(chats, more):
    single = train(flags(chats, more), SINGLE)
    assert all(record["tokens"] > 0 for record in single)
    for layout in (Layout(tp=2, pp=2, sp=True), Layout(dp=2)):
        other = train(flags(chats, more), layout)
        assert series(other, "tokens") == series(single, "tokens")
        assert largest_difference(other, single) < 3e-6, layout


def test_resume_of_a_token_budget(chats, tmp_path):
    straight = train(flags(chats, BUDGET), SINGLE)
    save = f"--save {tmp_path}/c --save-interval 2"
    train(flags(chats, BUDGET, save, "--exit-interval 2"), SINGLE, records=tmp_path / "r")
    again = flags(chats, BUDGET, save, f"--load {tmp_path}/c")
    assert without_rates(train(again, SINGLE, records=tmp_path / "r")) == without_rates(straight)


def test_every_conversation_once_an_epoch_and_none_over_the_budget(chats):
    data = read_conversations([chats], encode, 256)
    dataset = BudgetedConversations(
        data, np.arange(60), 120, max_length=16, budget=32, seed=1, pad_id=256
    )
    lengths = np.minimum(np.diff(data.starts) - 1, 16)
    seen = []
    for consumed in range(0, 60, 12):
        rows = dataset.rows(consumed, 12)
        assert all(lengths[row].sum() <= 32 for row in rows)
        seen += np.concatenate(rows).tolist()
        for size in (1, 2, 4):
            dealt = [list(rank_rows(dataset, consumed, 12, rank, size)) for rank in range(size)]
            assert {len(mine) for mine in dealt} == {dataset.num_microbatches(consumed, 12, size)}
            trained = sum(row["loss_mask"].sum() for mine in dealt for _, row in mine)
            if size == 1:
                whole = trained
            assert trained == whole
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--max-tokens-per-microbatch 8", "must hold the longest conversation"),
        ("--max-tokens-per-microbatch 32 --micro-batch-size 2", "use 1"),
    ],
)
def test_refusals(chats, more, message):
    with pytest.raises(ConfigError, match=message):
        prepare(parse(flags(chats, more)), Launch(0, 1, 0))
    assert Path(chats).exists()
