"""`mcore data` on files: each result is read back and compared with plain lists."""

import json
import os

import numpy as np
import pytest

from mcore.cli.main import main
from mcore.data import IndexedDataset, IndexedDatasetBuilder
from mcore.data.corpus_meta import meta_path, read_meta
from tests.unit.data.corpora import counting_corpus, write_corpus

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]


def documents(prefix):
    data = IndexedDataset(str(prefix))
    bounds = data.document_indices.tolist()
    return [
        [data[s].tolist() for s in range(a, b)] for a, b in zip(bounds, bounds[1:], strict=False)
    ]


@pytest.fixture
def text(tmp_path):
    source = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": t}) for t in ("1 2", "", "3 4 5", "6")]
    source.write_text("\n".join([*lines, "no JSON"]))
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "t"), *NULL]
    words += ["--append-eod", "--workers", "1", "--on-bad-line", "skip"]
    assert main(["data", "preprocess", *words]) == 0
    return str(tmp_path / "t_text_document")


def test_inspect(text, capsys):
    assert main(["data", "inspect", text, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["documents"], facts["empty_documents"], facts["sequences"]) == (4, 1, 3)
    assert (facts["tokens"], facts["bytes"], facts["highest_id"]) == (9, 18, 999)
    assert facts["meta"]["eod_tokens"] == 3
    assert main(["data", "inspect", text]) == 0
    assert "tokens: 9" in capsys.readouterr().out


def test_show(text, capsys):
    words = ["--document", "2", "--count", "2", *NULL]
    assert main(["data", "show", text, *words]) == 0
    out = capsys.readouterr().out.splitlines()[-4:]
    assert out == ["--- document 2: 4 tokens", "3 4 5 999", "--- document 3: 2 tokens", "6 999"]
    assert main(["data", "show", text, "--document", "4", *NULL]) == 1
    assert "has 0 to 3; give" in capsys.readouterr().err


def test_show_with_another_tokenizer(text, capsys, caplog):
    other = ["--document", "3", "--tokenizer-type", "ByteLevelTokenizer"]
    assert main(["data", "show", text, *other]) == 1
    shown = capsys.readouterr()
    assert "vocabulary 1000 of its NullTokenizer, this run's ByteLevelTokenizer 257" in shown.err
    os.remove(meta_path(text))
    assert main(["data", "show", text, *other]) == 1
    assert "token id 999 in document 3" in capsys.readouterr().err
    assert f"{text} has no .meta.json" in caplog.text
    assert main(["data", "show", text, *NULL]) == 0


def test_samples_are_not_read_with_another_tokenizer(text, tmp_path, capsys):
    words = ["--data-path", text, "--seq-length", "2", "--samples", "1", "0", "0"]
    words += ["--split", "1,0,0", "--out", str(tmp_path / "s.npz")]
    assert main(["data", "samples", *words, "--tokenizer-type", "ByteLevelTokenizer"]) == 1
    assert "made with another tokenizer" in capsys.readouterr().err
    assert main(["data", "samples", *words, *NULL]) == 0


def test_merge(text, tmp_path, capsys):
    out = str(tmp_path / "new" / "merged")
    assert main(["data", "merge", text, text, "--output-prefix", out]) == 0
    assert documents(out) == documents(text) * 2
    assert read_meta(out).tokens == 18
    assert read_meta(out).faulty_records == 2
    wide = write_corpus(tmp_path / "wide", [[1]], np.int32)
    assert main(["data", "merge", text, wide, "--output-prefix", out]) == 1
    assert "int32" in capsys.readouterr().err
    assert main(["data", "merge", text, "--output-prefix", text]) == 1


def test_split_is_that_of_training(tmp_path):
    prefix = counting_corpus(tmp_path / "c", [3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    assert main(["data", "split", prefix, "--split", "60,40,0", "--output-prefix", prefix]) == 0
    parts = [documents(f"{prefix}_{name}") for name in ("train", "valid")]
    assert parts[0] + parts[1] == documents(prefix)
    assert len(parts[0]) == 6
    assert not (tmp_path / "c_test.idx").exists()


def test_a_part_that_would_be_empty_is_refused_by_name(tmp_path, capsys):
    """Training refuses such a corpus; nothing is written of the other parts either."""
    prefix = counting_corpus(tmp_path / "c", [3, 1, 4])
    before = sorted(tmp_path.iterdir())
    words = ["data", "split", prefix, "--output-prefix", str(tmp_path / "p")]
    assert main([*words, "--split", "98,1,1"]) == 1
    assert "the valid part would hold none of the 3 sequences" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    assert main([*words, "--split", "98,0,0"]) == 0
    assert documents(tmp_path / "p_train") == documents(prefix)


def test_split_inside_a_document_and_its_note(tmp_path, text):
    with IndexedDatasetBuilder(str(tmp_path / "d.bin"), np.uint16) as builder:
        builder.add_document(np.arange(6), [2, 2, 2])
        builder.end_document()
        builder.add_document(np.arange(4), [4])
        builder.finalize(str(tmp_path / "d.idx"))
    prefix = str(tmp_path / "d")
    assert main(["data", "split", prefix, "--split", "50,50,0", "--output-prefix", prefix]) == 0
    assert documents(f"{prefix}_train") == [[[0, 1], [2, 3]]]
    assert documents(f"{prefix}_valid") == [[[4, 5]], [], [[0, 1, 2, 3]]]
    assert main(["data", "split", text, "--split", "1,2,0", "--output-prefix", text]) == 0
    metas = [read_meta(f"{text}_{name}") for name in ("train", "valid")]
    assert [meta.tokens for meta in metas] == [3, 6]
    assert [meta.eod_tokens for meta in metas] == [1, 2]
    assert [meta.documents for meta in metas] == [
        len(documents(f"{text}_{name}")) for name in ("train", "valid")
    ]


def documents_of_all_kinds(prefix):
    """Documents of one, no and several sequences, whose tokens count through the whole corpus."""
    first = 0
    with IndexedDatasetBuilder(f"{prefix}.bin", np.int32) as builder:
        for lengths in ((), (7,), (10, 20), (), (), (11, 3, 2), (64,), (23,), ()):
            builder.add_document(range(first, first + sum(lengths)), lengths)
            first += sum(lengths)
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize(
    "order", [[], ["--data-order", "stable"], ["--dataloader-type", "cyclic"]], ids=str
)
def test_provenance_names_the_tokens_of_the_batch(tmp_path, capsys, order):
    """What the loader reads at an iteration is what `mcore data show` shows of the documents."""
    from mcore.config.data import DataConfig
    from mcore.data.builder import build_train_valid_test_datasets
    from mcore.data.cyclic_sampler import CyclicSampler

    prefix = documents_of_all_kinds(tmp_path / "c")
    data = ["--data-path", prefix, "--split", "100,0,0", *order]
    batch = ["--iteration", "3", "--seq-length", "8", "--train-samples", "60"]
    ramp = ["--global-batch-size", "8", "--rampup-batch-size", "4", "4", "16"]
    assert main(["data", "provenance", *batch, *ramp, *data, "--json"]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # Batches of 4 up to sample 16: the third one is samples 8 to 11.
    assert [sample["sample"] for sample in samples] == [8, 9, 10, 11]
    kind = dict(zip((o[2:].replace("-", "_") for o in order[::2]), order[1::2], strict=True))
    dataset = build_train_valid_test_datasets(
        DataConfig(data_path=(prefix,), split="100,0,0", **kind),
        sizes=(60, 0, 0),
        seq_length=8,
        seed=1234,
        eod_id=0,
    )[0]

    def shown(document):
        assert main(["data", "show", prefix, "--document", str(document), "--ids"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"--- document {document}: ")
        return [int(word) for line in lines[1:] for word in line.split()]

    for sample in samples:
        number = sample["sample"]
        if "cyclic" in order:
            sampler = CyclicSampler(total_samples=len(dataset), micro_batch_size=1)
            (number,) = sampler.microbatch(number)
        read = [
            token
            for piece in sample["pieces"]
            for token in shown(piece["document"])[piece["offset"] :][: piece["length"]]
        ]
        row = dataset[number]
        assert read == [*row["tokens"].tolist(), row["labels"].tolist()[-1]]


def test_provenance_beyond_the_run(tmp_path, capsys):
    prefix = counting_corpus(tmp_path / "c", [90])
    words = ["--data-path", prefix, "--split", "1,0,0", "--seq-length", "8", "--train-iters", "3"]
    words += ["--global-batch-size", "2"]
    assert main(["data", "provenance", "--iteration", "4", *words]) == 1
    assert "samples 6 to 7 are beyond the run of 6 samples" in capsys.readouterr().err
    assert main(["data", "provenance", "--iteration", "3", *words]) == 0
    assert "document 0 tokens [" in capsys.readouterr().out


def test_provenance_of_a_batch_that_is_decreased(tmp_path, capsys):
    """10 samples asked for, 8 used: both which samples a batch has and how many are dealt."""
    from mcore.config.data import DataConfig
    from mcore.data.builder import build_train_valid_test_datasets

    prefix = counting_corpus(tmp_path / "c", [7, 30, 11, 5, 64, 23])
    words = ["--data-path", prefix, "--split", "1,0,0", "--seq-length", "8", "--train-iters", "3"]
    words += ["--global-batch-size", "10", "--micro-batch-size", "4", "--data-parallel-size", "2"]
    words += ["--decrease-batch-size-if-needed", "--iteration", "3", "--json"]
    assert main(["data", "provenance", *words]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sample["sample"] for sample in samples] == list(range(16, 24))
    dataset = build_train_valid_test_datasets(
        DataConfig(data_path=(prefix,), split="1,0,0"),
        sizes=(24, 0, 0),
        seq_length=8,
        seed=1234,
        eod_id=0,
    )[0]
    for sample in samples:
        wanted = dataset.provenance(sample["sample"])
        assert [(p["document"], p["offset"], p["length"]) for p in sample["pieces"]] == [
            (p.document, p.offset, p.length) for p in wanted
        ]


@pytest.fixture
def chats(tmp_path):
    """Lines of prompt and response, a blank one among them."""
    path = tmp_path / "chats.jsonl"
    pairs = [(f"{n}?", "ab" * (1 + n % 3)) for n in range(30)]
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in pairs]
    path.write_text("\n".join([*lines[:7], "", *lines[7:]]))
    return path


FINE_TUNING = "--sft --tokenizer-type ByteLevelTokenizer --split 100,0,0 --seq-length 16"


def chats_of_training(chats, budget):
    """The training data of the run that the questions below are about."""
    from mcore.training.arguments import build_config, parse
    from mcore.training.gpt import datasets_provider

    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --micro-batch-size 1 --lr 1"
    words = f"{FINE_TUNING} {model} {budget} --train-samples 24 --global-batch-size 4"
    config = build_config(parse([*words.split(), "--data-path", str(chats)]))
    return datasets_provider(config, (24, 0, 0))[0]


@pytest.mark.parametrize("budget", ["", "--max-tokens-per-microbatch 32"], ids=["packed", "budget"])
def test_provenance_of_fine_tuning_data(chats, capsys, budget):
    """The lines that are named hold the tokens that the step reads."""
    words = f"{FINE_TUNING} {budget} --train-samples 24 --global-batch-size 4 --iteration 3"
    words = ["data", "provenance", *words.split(), "--data-path", str(chats)]
    assert main([*words, "--json"]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sample["sample"] for sample in samples] == [8, 9, 10, 11]
    dataset, lines = chats_of_training(chats, budget), chats.read_text().splitlines()
    for sample in samples:
        assert sample["pieces"]
        said = [json.loads(lines[piece["document"] - 1]) for piece in sample["pieces"]]
        text = "".join(chat["prompt"] + chat["response"] for chat in said).encode()
        assert dataset[sample["sample"]]["tokens"].tolist()[: len(text)] == list(text)
        assert {piece["prefix"] for piece in sample["pieces"]} == {str(chats)}
    assert main(words) == 0
    first = samples[0]["pieces"][0]
    shown = capsys.readouterr().out
    assert f"{chats} line {first['document']} tokens [0, {first['length']})" in shown


def test_a_token_budget_is_of_fine_tuning_data(tmp_path, capsys):
    words = ["--data-path", str(tmp_path / "c"), "--seq-length", "8", "--train-iters", "3"]
    words += ["--global-batch-size", "2", "--iteration", "1", "--max-tokens-per-microbatch", "64"]
    assert main(["data", "provenance", *words]) == 2
    assert "add --sft" in capsys.readouterr().err


def test_provenance_after_a_number_of_samples(tmp_path, capsys):
    """Where the batch size changed on resume an iteration says nothing; consumed samples do."""
    prefix = counting_corpus(tmp_path / "c", [90])
    words = [
        "--data-path",
        prefix,
        "--split",
        "1,0,0",
        "--seq-length",
        "4",
        "--train-samples",
        "20",
    ]

    def samples(*more):
        assert main(["data", "provenance", *words, *more, "--json"]) == 0
        return capsys.readouterr().out.splitlines()

    batch = ["--global-batch-size", "4"]
    assert samples(*batch, "--consumed-samples", "4") == samples(*batch, "--iteration", "2")
    after = samples(*batch, "--consumed-samples", "6")  # three iterations of two
    assert [json.loads(line)["sample"] for line in after] == [6, 7, 8, 9]
    ramp = ["--global-batch-size", "8", "--rampup-batch-size", "4", "4", "8"]
    assert len(samples(*ramp, "--consumed-samples", "4")) == 4
    assert len(samples(*ramp, "--consumed-samples", "8")) == 8
    for wrong in ("17", "-1"):
        assert main(["data", "provenance", *words, *batch, "--consumed-samples", wrong]) == 1
    shown = capsys.readouterr().err
    assert "samples 17 to 20 are beyond the run of 20 samples" in shown
    assert "--consumed-samples is -1" in shown


def test_provenance_of_a_corpus_that_left_the_data(tmp_path, capsys, monkeypatch):
    """The samples of the batch that other corpora gave are told all the same."""
    from mcore.cli import batch_documents
    from mcore.config.data import DataConfig
    from mcore.data.builder import build_train_valid_test_datasets

    a, b = (counting_corpus(tmp_path / name, [40, 50]) for name in "ab")
    blend = ("0.7", a, "0.3", b)
    both, one = (
        build_train_valid_test_datasets(
            DataConfig(data_path=path, split="1,0,0", data_order="stable"),
            sizes=(40, 0, 0),
            seq_length=8,
            seed=1234,
            eod_id=0,
        )[0]
        for path in (blend, (a,))
    )
    common = {
        "data_segments": one.restore(both.restore([], 0), 20),
        "consumed_train_samples": 20,
    }
    monkeypatch.setattr(batch_documents, "read_common", lambda *_: common)
    words = ["--data-path", a, "--split", "1,0,0", "--data-order", "stable", "--load", "c"]
    words += ["--seq-length", "8", "--train-samples", "40", "--global-batch-size", "10"]
    assert main(["data", "provenance", "--iteration", "2", *words, "--json"]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sample["sample"] for sample in samples] == list(range(10, 20))
    for sample in samples:
        (origin,) = {piece.prefix for piece in both.provenance(sample["sample"])}
        assert sample.get("missing_corpus") == (b if origin == b else None)
        assert {piece["prefix"] for piece in sample["pieces"]} == ({a} if origin == a else set())
    assert {sample.get("missing_corpus") for sample in samples} == {None, b}
    assert main(["data", "provenance", "--iteration", "2", *words]) == 0
    out = capsys.readouterr().out
    assert out.count("no longer in the data path") == sum("missing_corpus" in s for s in samples)
