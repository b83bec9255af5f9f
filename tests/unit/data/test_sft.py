"""Fine-tuning data: what is trained on, and how conversations share samples."""

import json

import numpy as np
import pytest

from mcore.config.data import DataConfig
from mcore.data.conversations import read_conversations
from mcore.data.packed_dataset import PackedConversations, pack
from mcore.data.sft_builder import build_sft_datasets
from mcore.errors import DataError

EOD = 256


def encode(texts):
    """Bytes as ids."""
    rows = [text.encode() for text in texts]
    return np.frombuffer(b"".join(rows), np.uint8), np.array([len(row) for row in rows])


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def shown(data, number):
    """(text with # for EOD, ^ below what is trained on) of a conversation."""
    part = slice(int(data.starts[number]), int(data.starts[number + 1]))
    text = "".join("#" if i == EOD else chr(i) for i in data.ids[part])
    return text, "".join("^" if mark else "." for mark in data.trained[part])


def test_identity(tmp_path):
    chat = [
        ("system", "S"),
        ("user", "ask"),
        ("assistant", "yes"),
        ("user", "?"),
        ("assistant", "ok"),
    ]
    path = write(
        tmp_path / "in.jsonl",
        {"prompt": "ab", "response": "cde"},
        {"messages": [{"role": role, "content": text} for role, text in chat]},
        {"prompt": "x", "completion": "y"},
        {"messages": [{"role": "user", "content": "lone"}]},
    )
    data = read_conversations([path], encode, EOD)
    assert shown(data, 0) == ("abcde#", "..^^^^")
    assert shown(data, 1) == ("Saskyes#?ok#", "....^^^^.^^^")
    assert shown(data, 2) == ("xy#", ".^^")
    assert shown(data, 3) == ("lone#", ".....")
    assert data.origin[1] == (path, 2)


def test_chatml(tmp_path):
    path = write(tmp_path / "in.jsonl", {"prompt": "a", "response": "b"})
    text, marks = shown(read_conversations([path], encode, EOD, "chatml"), 0)
    expected = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n#"
    assert text == expected
    trained = expected.index("b<|im_end|>")
    assert marks == "." * trained + "^" * (len(expected) - trained)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', "needed are the keys"),
        ("[1", "line 2"),
        ('{"messages": []}', "at least one message"),
        ('{"prompt": 1, "response": "x"}', "role and content"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "messages and prompt"),
    ],
)
def test_faulty_lines_are_named(tmp_path, line, message):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read_conversations([str(path)], encode, EOD)
    assert f"{path}, line 2" in str(caught.value)


USER_ALONE = {"messages": [{"role": "user", "content": "a"}, {"role": "Assistant", "content": "b"}]}


def test_conversations_that_teach_nothing_are_counted(tmp_path, caplog):
    path = write(tmp_path / "in.jsonl", {"prompt": "a", "response": "b"}, USER_ALONE, USER_ALONE)
    read_conversations([path], encode, EOD)
    assert f"2 of 3 conversations (the first: {path}, line 2) have nothing" in caplog.text


@pytest.mark.parametrize("prompt_format", ["identity", "chatml"])
def test_data_that_teaches_nothing_is_refused(tmp_path, prompt_format):
    path = write(tmp_path / "in.jsonl", USER_ALONE, USER_ALONE)
    with pytest.raises(DataError, match=r"the 2 conversations .*line 1\).* role 'assistant'"):
        read_conversations([path], encode, EOD, prompt_format)


def conversations(tmp_path, lengths):
    """Each is `a` and then n - 2 times its own letter, trained on, and EOD."""
    records = [
        {"prompt": "a", "response": chr(ord("b") + i) * (n - 2)} for i, n in enumerate(lengths)
    ]
    return read_conversations([write(tmp_path / "c.jsonl", *records)], encode, EOD)


def test_no_label_belongs_to_another_conversation(tmp_path):
    data = conversations(tmp_path, [5, 4, 7, 3, 9, 20])
    chosen = np.arange(6)
    dataset = PackedConversations(data, chosen, None, seq_length=10, seed=1, pad_id=0)
    seen = []
    for index in range(len(dataset)):
        sample = dataset[index]
        starts = [*np.flatnonzero(sample["is_document_start"]), 10]
        assert starts[0] == 0
        for start, stop in zip(starts, starts[1:], strict=False):
            tokens, labels = sample["tokens"][start:stop], sample["labels"][start:stop]
            mask = sample["loss_mask"][start:stop]
            if tokens[0] == 0:
                assert not mask.any()
                continue
            assert sample["position_ids"][start:stop].tolist() == list(range(stop - start))
            seen.append(int(labels[0]) - ord("b"))
            assert mask.all()  # every label is of the response
            assert tokens[1:].tolist() == labels[:-1].tolist()
            expected = min(int(np.diff(data.starts)[seen[-1]]) - 1, 10)
            assert stop - start == expected
        pieces = dataset.provenance(index)
        assert [p.document - 1 for p in pieces] == seen[-len(pieces) :]
        hidden = dataset.attention_mask(index)[0]
        assert not hidden.diagonal().any()
        for start in starts[1:-1]:
            assert hidden[start:, :start].all()
    assert sorted(seen) == list(range(6))


def test_epochs_differ_and_a_longer_run_begins_with_the_shorter(tmp_path):
    data = conversations(tmp_path, [4, 5, 6, 7, 8, 9] * 4)
    build = lambda n: PackedConversations(  # noqa: E731
        data, np.arange(24), n, seq_length=12, seed=1, pad_id=0
    )
    short, long = build(5), build(60)
    for index in range(5):
        np.testing.assert_array_equal(short[index]["tokens"], long[index]["tokens"])
    epoch = len(build(None))
    first = [p.document for i in range(epoch) for p in long.provenance(i)]
    assert sorted(first) == list(range(1, 25))
    second = [p.document for i in range(epoch, epoch + 3) for p in long.provenance(i)]
    assert second != first[: len(second)]


def test_pack_fills_up_to_the_capacity():
    places = np.array([3, 3, 4, 10, 1, 9, 0])
    packed = [row.tolist() for row in pack(np.arange(7), places, 10)]
    assert packed == [[0, 1, 2], [3], [4, 5, 6]]


def test_splits_and_refusals(tmp_path):
    records = [{"prompt": str(i), "response": "x"} for i in range(10)]
    path = write(tmp_path / "in.jsonl", *records)

    def build(sizes, **options):
        return build_sft_datasets(
            DataConfig(sft=True, **options),
            sizes=sizes,
            seq_length=8,
            seed=1,
            encode=encode,
            eod_id=EOD,
        )

    train, valid, test = build((20, 3, 0), data_path=(path,), split="80,20,0")
    assert len(train) >= 20
    assert test is None
    lines = {p.document for i in range(len(valid)) for p in valid.provenance(i)}
    assert lines == {9, 10}
    with pytest.raises(DataError, match="holds none of its 10 conversations"):
        build((1, 1, 0), data_path=(path,), split="999,1,0")
    with pytest.raises(DataError, match="leave the weights out"):
        build((1, 0, 0), data_path=("1", path, "2", path))
    with pytest.raises(DataError, match="cannot be read"):
        build((1, 0, 0), data_path=(str(tmp_path / "none"),))
