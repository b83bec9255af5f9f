"""The stable order: what it promises, checked by reading the corpus in plain loops."""

import numpy as np
import pytest

from mcore.config.data import DataConfig
from mcore.data.builder import build_train_valid_test_datasets
from mcore.data.stable_blend import StableBlend, match_corpora
from mcore.data.stable_order import StableOrder, permute
from mcore.errors import DataError
from tests.unit.data.corpora import write_corpus

LENGTHS = np.array([5, 0, 7, 3, 9, 6, 1, 40, 2], np.int32)
LENGTH = 8


def build(words, size, seed=1):
    config = DataConfig(
        data_path=tuple(map(str, words)), split="100,0,0", data_order="stable", num_workers=0
    )
    return build_train_valid_test_datasets(
        config, sizes=(size, 0, 0), seq_length=LENGTH, seed=seed, eod_id=0
    )[0]


@pytest.fixture
def corpora(tmp_path):
    """Prefixes of two corpora whose tokens are all different."""
    prefixes = []
    first = 1
    for name, documents in (("a", 12), ("b", 9)):
        texts = []
        for number in range(documents):
            length = 3 + 5 * number % 11
            texts.append(list(range(first, first + length)))
            first += length
        write_corpus(tmp_path / name, texts)
        prefixes.append(str(tmp_path / name))
    return prefixes


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_permute_is_a_permutation(size):
    keys = (3, 5, 7, 11)
    images = [permute(number, size, keys) for number in range(size)]
    assert sorted(images) == list(range(size))
    if size > 60:
        assert images != [permute(number, size, (4, 5, 7, 11)) for number in range(size)]
        assert sum(a < b for a, b in zip(images, images[1:], strict=False)) in range(
            size // 3, 2 * size // 3
        )


def test_an_epoch_reads_the_circle_once():
    order = StableOrder(LENGTHS, np.arange(len(LENGTHS)), seq_length=LENGTH, seed=3)
    total = int(LENGTHS.sum())
    assert order.samples_per_epoch == total // LENGTH
    circle = [(int(d), t) for d in order.stream._order for t in range(int(LENGTHS[d]))]
    starts = []
    for index in range(3 * order.samples_per_epoch):
        epoch, start = order.place(index)
        assert epoch == index // order.samples_per_epoch
        pieces = order.pieces(index)
        read = [
            (int(d), t)
            for d, o, n in zip(pieces.documents, pieces.offsets, pieces.lengths, strict=True)
            for t in range(int(o), int(o + n))
        ]
        assert read == [circle[(start + i) % total] for i in range(LENGTH + 1)]
        starts.append((epoch, start))
    for epoch in range(3):
        mine = [start for e, start in starts if e == epoch]
        tokens = {(start + i) % total for start in mine for i in range(LENGTH)}
        assert len(tokens) == len(mine) * LENGTH


def test_every_epoch_deals_each_sample_once_and_in_another_order():
    """15 samples an epoch, 62 samples: four orders, no sample more than once ahead of another."""

    def dealt(seed):
        order = StableOrder(np.full(15, 10), np.arange(15), seq_length=10, seed=seed)
        places = [order.place(index) for index in range(62)]
        first = [min(start % 10 for e, start in places if e == epoch) for epoch in range(5)]
        return [(epoch, (start - first[epoch]) % 150 // 10) for epoch, start in places]

    numbers = dealt(1)
    epochs = [[number for e, number in numbers if e == epoch] for epoch in range(5)]
    assert [sorted(epoch) for epoch in epochs[:4]] == [list(range(15))] * 4
    assert len(set(map(tuple, epochs[:4]))) == 4
    assert len(epochs[4]) == len(set(epochs[4])) == 2
    assert list(range(15)) not in epochs
    assert numbers == dealt(1)
    assert numbers != dealt(2)


def test_a_longer_run_begins_with_the_shorter(corpora):
    short, long = build(corpora[:1], 10), build(corpora[:1], 500)
    assert (len(short), len(long)) == (10, 500)
    for index in range(10):
        np.testing.assert_array_equal(short[index]["tokens"], long[index]["tokens"])
    other = build(corpora[:1], 10, seed=2)
    assert any((other[i]["tokens"] != short[i]["tokens"]).any() for i in range(10))


def test_other_weights_keep_the_cursors(corpora):
    """Each corpus is read in its own order without gap or repeat over a change of weights."""
    a, b = (build([prefix], 200) for prefix in corpora)
    owner = {"a": a, "b": b}
    cursor = {"a": 0, "b": 0}

    def follow(blend, indices):
        for index in indices:
            (piece, *_) = blend.provenance(index)
            name = piece.prefix[-1]
            np.testing.assert_array_equal(
                blend[index]["tokens"], owner[name][cursor[name]]["tokens"]
            )
            cursor[name] += 1

    first = build([0.7, corpora[0], 0.3, corpora[1]], 40)
    segments = first.restore([], 0)
    follow(first, range(25))
    assert cursor == {"a": 17, "b": 8}
    second = build([0.2, corpora[0], 0.8, corpora[1]], 60)
    segments = second.restore(segments, 25)
    follow(second, range(25, 50))
    assert cursor == {"a": 22, "b": 28}
    third = build([corpora[0]], 80)  # without the other corpus
    segments = third.restore(segments, 50)
    follow(third, range(50, 55))
    fourth = build([0.5, corpora[0], 0.5, corpora[1]], 100)
    assert len(fourth.restore(segments, 55)) == 4
    follow(fourth, range(55, 75))
    cursor.update(a=0, b=0)
    follow(fourth, range(75))  # the past is still known
    with pytest.raises(DataError, match="no longer in the data path"):
        [third[index] for index in range(50)]


def test_a_corpus_keeps_its_cursor_wherever_it_lies(corpora, tmp_path, monkeypatch):
    """Absolute, relative, moved: the run goes on as under the first spelling."""
    words = [0.7, corpora[0], 0.3, corpora[1]]
    straight = build(words, 60)
    segments = straight.restore([], 0)
    (tmp_path / "moved").mkdir()
    for end in ("bin", "idx"):
        (tmp_path / f"b.{end}").rename(tmp_path / "moved" / f"other.{end}")
    monkeypatch.chdir(tmp_path)
    resumed = build([0.7, "a", 0.3, "moved/other"], 60)
    assert len(resumed.restore(segments, 25)) == 1
    for index in range(60):
        np.testing.assert_array_equal(straight[index]["tokens"], resumed[index]["tokens"])
    alone = build([corpora[0]], 60)
    segments = alone.restore([], 0)
    again = build(["./a"], 60)
    again.restore(segments, 25)
    np.testing.assert_array_equal(alone[30]["tokens"], again[30]["tokens"])


def test_what_changed_is_said(corpora, caplog):
    segments = build([0.7, corpora[0], 0.3, corpora[1]], 60).restore([], 0)
    for segment in segments:
        segment["identities"][corpora[0]] = "of other documents"
    build([0.7, corpora[0], 0.3, corpora[1]], 60).restore(segments, 25)
    assert f"{corpora[0]} is not what it was" in caplog.text
    segments[-1]["weights"] = {"gone": 0.7, corpora[1]: 0.3}
    del segments[-1]["identities"]
    caplog.clear()
    build([0.7, corpora[0], 0.3, corpora[1]], 60).restore(segments, 25)
    assert f"{corpora[0]} was not in the data before" in caplog.text
    assert "gone left the data" in caplog.text


def test_a_corpus_that_leaves_is_named_once(corpora, caplog):
    segments = build([0.7, corpora[0], 0.3, corpora[1]], 60).restore([], 0)
    alone = build([corpora[0]], 60)
    segments = alone.restore(segments, 25)
    assert f"{corpora[1]} left the data" in caplog.text
    assert "not in the data before" not in caplog.text
    caplog.clear()
    build([corpora[0]], 60).restore(segments, 30)
    assert not caplog.text


@pytest.mark.parametrize(
    ("known", "ours", "names"),
    [
        ({"a": "1", "b": "2"}, {"b": "1", "a": "2"}, {"a": "b", "b": "a"}),
        ({"a": "1", "b": "2"}, {"b": "1"}, {"a": "b", "b": "b (before)"}),
        ({"a": None, "b": "2"}, {"a": "1", "c": "2"}, {"a": "a", "b": "c"}),
        ({"a": "1", "b": "1"}, {"a": "1", "c": "1"}, {"a": "a", "b": "c"}),
        ({"a": "1"}, {"b": "2"}, {"a": "a"}),
    ],
)
def test_which_corpus_is_which(known, ours, names):
    assert match_corpora(known, ours) == names


def test_the_same_weights_change_nothing(corpora):
    words = [0.7, corpora[0], 0.3, corpora[1]]
    straight, resumed = build(words, 60), build(words, 60)
    segments = resumed.restore(straight.restore([], 0), 20)
    assert len(segments) == 1
    for index in range(60):
        np.testing.assert_array_equal(straight[index]["tokens"], resumed[index]["tokens"])


def test_without_weights_in_proportion_and_without_end(corpora):
    blend = build(corpora, 300)
    assert isinstance(blend, StableBlend)
    names = [blend.provenance(index)[0].prefix for index in range(300)]
    tokens = [sum(3 + 5 * n % 11 for n in range(count)) // LENGTH for count in (12, 9)]
    assert abs(names.count(corpora[0]) - 300 * tokens[0] / sum(tokens)) <= 1


def test_a_corpus_shorter_than_a_sample(tmp_path):
    write_corpus(tmp_path / "c", [[1, 2, 3]])
    with pytest.raises(DataError, match="shorter than one sample"):
        build([tmp_path / "c"], 5)


def test_past_2_to_the_31():
    """Samples and tokens beyond 32 bits: plain integers all along."""
    lengths = np.full(2000, 1_500_000, np.int32)
    order = StableOrder(lengths, np.arange(2000), seq_length=4096, seed=1)
    assert order.stream.num_tokens == 3_000_000_000
    index = 5_000_000_000
    epoch, start = order.place(index)
    assert epoch == index // (3_000_000_000 // 4096)
    pieces = order.pieces(index)
    assert int(pieces.lengths.sum()) == 4097
    assert pieces.position == start // 1_500_000
