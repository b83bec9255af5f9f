import json

import numpy as np
import pytest

from mcore.config.data import DataConfig
from mcore.data import (
    BlendedDataset,
    GPTDataset,
    IndexedDataset,
    SampleOptions,
    build_train_valid_test_datasets,
)
from mcore.errors import DataError
from tests.unit.data.corpora import GOLDEN, counting_corpus, write_corpus

CASES = {case["name"]: case for case in json.loads((GOLDEN / "cases.json").read_text())}
SPLITS = ("train", "valid", "test")
MASK_OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def words(blend):
    if blend is None:
        return None
    prefixes, weights = blend
    paths = [str(GOLDEN / prefix) for prefix in prefixes]
    if weights is None:
        return tuple(paths)
    return tuple(w for pair in zip(map(str, weights), paths, strict=True) for w in pair)


def config_of(case, **more):
    options = {name: case[name] for name in MASK_OPTIONS} | more
    if case["blend_per_split"] is None:
        return DataConfig(data_path=words(case["blend"]), split=case["split"], **options)
    paths = {
        f"{name}_data_path": words(blend)
        for name, blend in zip(SPLITS, case["blend_per_split"], strict=True)
    }
    return DataConfig(**paths, **options)


def build(case, **more):
    return build_train_valid_test_datasets(
        config_of(case, **more),
        sizes=tuple(case["sizes"]),
        seq_length=case["seq_length"],
        seed=case["seed"],
        eod_id=0,
        pad_id=999,
        vocab_size=1000,
        add_extra_token=case["add_extra_token_to_sequence"],
    )


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_golden_samples(name, mmap):
    case = CASES[name]
    golden = np.load(GOLDEN / f"{name}.npz")
    for split, dataset in zip(SPLITS, build(case, mmap_bin_files=mmap), strict=True):
        wanted = case["splits"][split]
        if wanted is None:
            assert dataset is None
            continue
        assert len(dataset) == wanted["len"]
        samples = [dataset[index] for index in range(wanted["kept"])]
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            got = np.stack([sample[key] for sample in samples])
            assert got.dtype == golden[f"{split}.{key}"].dtype
            np.testing.assert_array_equal(got, golden[f"{split}.{key}"])
        assert dataset[0]["tokens"].dtype == np.int64


def test_golden_attention_masks():
    golden = np.load(GOLDEN / "eod_resets.npz")
    for split, dataset in zip(SPLITS, build(CASES["eod_resets"]), strict=True):
        if dataset is None:
            continue
        packed = golden[f"{split}.attention_mask"]
        assert len(packed) > 3
        for index, bits in enumerate(packed):
            mask = dataset.attention_mask(index)
            assert mask.shape == (1, 40, 40)
            np.testing.assert_array_equal(np.packbits(mask), bits)
            positions = dataset[index]["position_ids"]
            assert (
                dataset.document_starts(index).tolist() == np.flatnonzero(positions == 0).tolist()
            )


def test_golden_cases_read_before_are_not_disturbed():
    """A pad in one sample must not leak into the mask of another (a fault of Megatron's)."""
    train = build(CASES["single_one_epoch"])[0]
    golden = np.load(GOLDEN / "single_one_epoch.npz")["train.loss_mask"]
    masked = [index for index, row in enumerate(golden) if row.min() == 0]
    assert masked
    for _ in range(2):
        for index in [*masked, 0, 1, 2]:
            np.testing.assert_array_equal(train[index]["loss_mask"], golden[index])


def test_provenance_names_the_tokens():
    for name in ("blend_weights", "short_docs", "no_extra_token"):
        train = build(CASES[name])[0]
        corpora = {}
        for index in (0, 7, len(train) - 1):
            pieces = train.provenance(index)
            parts = []
            for piece in pieces:
                corpus = corpora.setdefault(piece.prefix, IndexedDataset(piece.prefix))
                first, last = corpus.document_indices[piece.document : piece.document + 2]
                document = np.concatenate([corpus[number] for number in range(first, last)])
                parts.append(document[piece.offset : piece.offset + piece.length])
            text = np.concatenate(parts).astype(np.int64)
            text[text == 999] = 0
            np.testing.assert_array_equal(text[: CASES[name]["seq_length"]], train[index]["tokens"])


def options(**changes):
    return SampleOptions(**({"seq_length": 8, "seed": 1, "eod_id": 0} | changes))


def test_shared_arrays_are_read_only(tmp_path):
    corpus = IndexedDataset(counting_corpus(tmp_path / "c", [30, 50]))
    dataset = GPTDataset(corpus, np.arange(2), None, options())
    first, second = dataset[0], dataset[1]
    assert first["position_ids"] is second["position_ids"]
    for key in ("loss_mask", "position_ids"):
        with pytest.raises(ValueError, match="read-only"):
            first[key][0] = 5
    first["tokens"][:] = -7
    assert dataset[0]["tokens"].min() >= 0


def test_a_short_last_sample_is_padded_without_loss(tmp_path):
    corpus = IndexedDataset(counting_corpus(tmp_path / "c", [12, 8]))
    dataset = GPTDataset(corpus, np.arange(2), None, options(drop_last=False))
    assert len(dataset) == 3  # ceil(19 / 8)
    last = dataset[dataset.order.shuffle_index.tolist().index(2)]
    assert last["loss_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert last["tokens"][4:].tolist() == [0] * 4
    assert last["labels"][3:].tolist() == [0] * 5


def test_each_mask_option_alone(tmp_path):
    corpus = IndexedDataset(write_corpus(tmp_path / "c", [[5, 0, 6, 7, 0, 0, 8, 9, 1]]))

    def sample(**changes):
        dataset = GPTDataset(corpus, np.arange(1), None, options(**changes))
        return dataset[0] | {"mask": dataset.attention_mask(0)[0]}

    causal = np.triu(np.ones((8, 8), bool), 1)
    counted = [0, 1, 2, 3, 4, 5, 6, 7]
    plain = sample()
    assert plain["loss_mask"].tolist() == [1] * 8
    assert plain["position_ids"].tolist() == counted
    np.testing.assert_array_equal(plain["mask"], causal)

    masked = sample(eod_mask_loss=True)
    assert masked["loss_mask"].tolist() == [1, 0, 1, 1, 0, 0, 1, 1]
    assert masked["position_ids"].tolist() == counted

    placed = sample(reset_position_ids=True)
    assert placed["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
    assert placed["loss_mask"].tolist() == [1] * 8
    np.testing.assert_array_equal(placed["mask"], causal)

    hidden = sample(reset_attention_mask=True)
    assert hidden["position_ids"].tolist() == counted
    wanted = causal.copy()
    for eod in (1, 4, 5):
        wanted[eod + 1 :, : eod + 1] = True
    np.testing.assert_array_equal(hidden["mask"], wanted)


def test_a_token_of_another_vocabulary_is_named(tmp_path):
    corpus = IndexedDataset(write_corpus(tmp_path / "c", [[1, 2, 3, 4, 5], [6, 7, 8, 500, 9]]))
    dataset = GPTDataset(corpus, np.arange(2), None, options(vocab_size=500))
    with pytest.raises(DataError, match=r"token id 500 in document 1 of .*c is outside"):
        dataset[0]


def test_impossible_requests_name_the_numbers(tmp_path):
    corpus = IndexedDataset(counting_corpus(tmp_path / "c", [5, 3]))
    with pytest.raises(DataError, match="shorter than one sample: 8 tokens.*needs 9"):
        GPTDataset(corpus, np.arange(2), None, options())
    assert len(GPTDataset(corpus, np.arange(2), 4, options())) >= 4
    with pytest.raises(DataError, match="4 samples wanted .* 0 of its 2 sequences"):
        GPTDataset(corpus, np.arange(0), 4, options())
    empty = IndexedDataset(write_corpus(tmp_path / "e", [[], []]))
    with pytest.raises(DataError, match="no token"):
        GPTDataset(empty, np.arange(2), 4, options())
    dataset = GPTDataset(corpus, np.arange(2), 4, options())
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[index]


def builder(config, sizes, **more):
    return build_train_valid_test_datasets(
        config, **({"sizes": sizes, "seq_length": 8, "seed": 1, "eod_id": 0} | more)
    )


def test_a_corpus_shorter_than_a_sample_is_repeated_and_named(tmp_path, caplog):
    short, whole = counting_corpus(tmp_path / "c", [5, 3]), counting_corpus(tmp_path / "w", [9])
    for words in ((whole,), ("1", whole)):
        builder(DataConfig(data_path=words, split="1"), (4, 0, 0))
    assert not caplog.text
    for words in ((short,), ("1", short)):
        assert len(builder(DataConfig(data_path=words, split="1"), (4, 0, 0))[0]) >= 4
        wanted = f"{short} is shorter than one sample: 8 tokens in the split, and --seq-length 8"
        assert wanted in caplog.text
        caplog.clear()


def test_default_split_and_splits_that_are_not_wanted(tmp_path):
    prefix = counting_corpus(tmp_path / "c", [20] * 100)
    train, valid, test = builder(DataConfig(data_path=(prefix,)), (None, None, None))
    seen = [
        {piece.document for index in range(len(part)) for piece in part.provenance(index)}
        for part in (train, valid)
    ]
    assert seen == [set(range(97)), {97, 98, 99}]  # 969, 30, 1 of 100 sequences
    assert test is None  # its share rounds to no sequence
    assert builder(DataConfig(data_path=(prefix,)), (5, 0, 0))[1:] == (None, None)
    with pytest.raises(DataError, match="2 samples wanted"):
        builder(DataConfig(data_path=(prefix,)), (5, 0, 2))


def test_data_paths_in_files(tmp_path):
    first = counting_corpus(tmp_path / "a", [200])
    second = counting_corpus(tmp_path / "b", [100])
    (tmp_path / "args").write_text(f"3 {first}\n1 {second}\n")
    (tmp_path / "split.json").write_text(json.dumps({"train": [first], "valid": [1, second]}))
    direct = builder(DataConfig(data_path=("3", first, "1", second), split="1"), (8, 0, 0))[0]
    config = DataConfig(data_args_path=str(tmp_path / "args"), split="1")
    from_file = builder(config, (8, 0, 0))[0]
    assert [from_file.provenance(i) for i in range(8)] == [direct.provenance(i) for i in range(8)]
    config = DataConfig(per_split_data_args_path=str(tmp_path / "split.json"))
    train, valid, test = builder(config, (4, None, 4))
    assert train.provenance(0)[0].prefix == first
    assert isinstance(valid, GPTDataset)  # the weight of a split's only corpus means nothing
    assert valid.provenance(0)[0].prefix == second
    assert test is None
    (tmp_path / "split.json").write_text('{"training": []}')
    with pytest.raises(DataError, match="keys train, valid, test"):
        builder(config, (4, 4, 4))


def test_one_corpus_with_a_weight_goes_through_the_blend(tmp_path):
    """Megatron orders ceil(1.005 * 100) = 101 samples then, which can add an epoch."""
    for held, epochs in ((100, 2), (101, 1)):
        prefix = counting_corpus(tmp_path / f"c{held}", [8 * held + 1])
        plain = builder(DataConfig(data_path=(prefix,), split="1"), (100, 0, 0))[0]
        blended = builder(DataConfig(data_path=("1", prefix), split="1"), (100, 0, 0))[0]
        assert plain.order.plan.epochs == 1
        assert isinstance(blended, BlendedDataset)
        assert len(blended) == 100
        assert blended.datasets[0].order.plan.epochs == epochs


def test_corpora_without_weights_are_not_repeated(tmp_path, caplog):
    paths = (
        counting_corpus(tmp_path / "a", [81]),  # 10 samples
        counting_corpus(tmp_path / "tiny", [3]),  # none
        counting_corpus(tmp_path / "b", [41]),  # 5
    )
    config = DataConfig(data_path=paths, split="1")
    train = builder(config, (100, 0, 0))[0]
    assert len(train) == 15
    assert "100 samples of the train split are wanted" in caplog.text
    assert f"its corpora ({paths[0]} {paths[2]}) hold 15 in one pass" in caplog.text
    assert f"{paths[1]} holds no whole sample of 8 tokens in its train split" in caplog.text
    places = [train.provenance(index)[0] for index in range(15)]
    assert len(set(places)) == 15
    assert builder(config, (6, 0, 0))[0].dataset_index.tolist() == [0, 1, 0, 0, 1, 0]
    with pytest.raises(DataError, match="none of the corpora"):
        builder(DataConfig(data_path=(paths[1], paths[1], paths[1]), split="1"), (4, 0, 0))


def test_a_weight_that_is_too_small_is_told(tmp_path, caplog):
    """Megatron's rule draws the second corpus at once, whatever its weight, the third after 333."""
    paths = [counting_corpus(tmp_path / name, [81]) for name in ("a", "b", "c")]
    words = ("0.998", paths[0], "0.001", paths[1], "0.001", paths[2])
    train = builder(DataConfig(data_path=words, split="1"), (10, 0, 0))[0]
    assert train.dataset_index[:10].tolist() == [0, 1] + [0] * 8
    assert len(train.datasets[2]) >= 1
    assert f"none of the 10 samples of the train split comes from {paths[2]}" in caplog.text
    assert f"comes from {paths[1]}" not in caplog.text


def test_a_weighted_blend_needs_a_number(tmp_path):
    prefix = counting_corpus(tmp_path / "c", [81])
    config = DataConfig(data_path=("1", prefix), split="90,10")
    with pytest.raises(DataError, match="needs a number of samples"):
        builder(config, (None, 0, 0))
    with pytest.raises(DataError, match="-1 samples"):
        builder(DataConfig(data_path=(prefix,)), (-1, 0, 0))
