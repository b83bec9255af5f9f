import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.config.data import DataConfig
from mcore.data import BlendedDataset
from mcore.data.blend import blend_order, dangling_weight, normalise, parse_blend, read_blends
from mcore.errors import DataError


def one_by_one(weights, size, limits=None):
    """Draw after draw, as the rule reads."""
    counts = [0] * len(weights)
    corpora, samples = [], []
    for draw in range(size):
        best = None
        for number, weight in enumerate(weights):
            if limits is not None and counts[number] == limits[number]:
                continue
            lag = weight * max(float(draw), 1.0) - counts[number]
            if best is None or lag > best[0]:
                best = (lag, number)
        corpora.append(best[1])
        samples.append(counts[best[1]])
        counts[best[1]] += 1
    return corpora, samples


def as_lists(order):
    assert [array.dtype for array in order] == [np.int16, np.int64]
    return tuple(array.tolist() for array in order)


def test_golden_orders():
    # formats.md 3.4
    assert as_lists(blend_order(normalise([0.5, 0.3, 0.2]), 10)) == (
        [0, 1, 2, 0, 1, 0, 2, 0, 1, 0],
        [0, 0, 0, 1, 1, 2, 1, 3, 2, 4],
    )
    assert as_lists(blend_order(normalise([3, 1]), 8)) == (
        [0, 1, 0, 0, 0, 1, 0, 0],
        [0, 0, 1, 2, 3, 1, 4, 5],
    )
    assert as_lists(blend_order(normalise([3, 2, 1]), 6, [3, 2, 1])) == (
        [0, 1, 2, 0, 1, 0],
        [0, 0, 0, 1, 1, 2],
    )


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=7),
    size=st.integers(0, 5000),
)
def test_lanes_equal_drawing_one_by_one(weights, size):
    weights = normalise(weights)
    assert as_lists(blend_order(weights, size)) == one_by_one(weights, size)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=7), data=st.data())
def test_lanes_equal_drawing_one_by_one_until_corpora_are_used_up(lengths, data):
    size = data.draw(st.one_of(st.just(sum(lengths)), st.integers(0, sum(lengths))))
    weights = normalise(lengths)
    assert as_lists(blend_order(weights, size, lengths)) == one_by_one(weights, size, lengths)


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [30, 70], [1, 1, 1], [0.999, 0.001]])
def test_every_prefix_holds_the_shares(weights):
    shares = np.array(normalise(weights))
    corpora, samples = blend_order(shares.tolist(), 4000)
    drawn = np.cumsum(corpora[:, None] == np.arange(len(shares)), axis=0)
    exact = np.arange(1, 4001)[:, None] * shares
    assert np.abs(drawn - exact).max() < 1.01
    for number in range(len(shares)):
        mine = samples[corpora == number]
        assert mine.tolist() == list(range(len(mine)))


def test_a_weight_without_a_corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "ends in the weight 0.5 without a corpus" in dangling_weight(["0.5", "p", "0.5"])
    with pytest.raises(DataError, match="data path .* ends in the weight 0.5"):
        read_blends(DataConfig(data_path=("0.5", "p", "0.5")))
    assert dangling_weight(["0.5", "p", "q"]) is None
    assert dangling_weight(["0.5"]) is None
    (tmp_path / "2.idx").touch()  # the name of a corpus after all
    assert dangling_weight(["2", "p", "0.5"]) is None


def test_forms_of_a_data_path():
    assert parse_blend(["p"]).weights is None
    assert parse_blend(["p", "q"]) == parse_blend(("p", "q"))
    assert parse_blend(["p", "q"]).prefixes == ("p", "q")
    assert parse_blend(["30", "p", "70", "q"]).weights == (0.3, 0.7)
    assert parse_blend(["30", "p", "70", "q"]).prefixes == ("p", "q")
    assert parse_blend(["1", "p", "2"]).prefixes == ("1", "p", "2")  # odd: never weighted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "empty"),
        (["1", "p", "q", "r"], "some corpora only"),
        (["-1", "p", "2", "q"], "above 0"),
        (["0", "p", "0", "q"], "above 0"),
        (["0", "p", "1", "q"], "above 0"),
        (["nan", "p", "1", "q"], "finite"),
        (["inf", "p", "1", "q"], "finite"),
    ],
)
def test_bad_data_paths(words, message):
    with pytest.raises(DataError, match=message):
        parse_blend(words)


class Numbers:
    """A data set of `length` samples that are their own numbers."""

    def __init__(self, name, length):
        self._name, self._length = name, length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return {"tokens": (self._name, index)}


def test_a_blend_reads_each_data_set_in_its_order():
    blend = BlendedDataset([Numbers("a", 3), Numbers("b", 2), Numbers("c", 1)], None, None)
    got = [blend[index]["tokens"] for index in range(len(blend))]
    assert got == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2)]
    for index in (-1, 6):
        with pytest.raises(IndexError, match="which has 6"):
            blend[index]


def test_a_blend_never_reads_past_the_end():
    with pytest.raises(DataError, match="draws 10 from data set 1, which holds 9"):
        BlendedDataset([Numbers("a", 30), Numbers("b", 9)], [0.5, 0.5], 20)
    with pytest.raises(DataError, match="draws 10 from the/path, which holds 9"):
        BlendedDataset([Numbers("a", 30), Numbers("b", 9)], [0.5, 0.5], 20, ["x", "the/path"])
    with pytest.raises(DataError, match="20 samples wanted from corpora that hold 5"):
        BlendedDataset([Numbers("a", 3), Numbers("b", 2)], None, 20)
    with pytest.raises(DataError, match="needs a number"):
        BlendedDataset([Numbers("a", 3)], [1.0], None)
    with pytest.raises(DataError, match="2 weights"):
        BlendedDataset([Numbers("a", 3)], [1.0, 2.0], 3)


def test_shares_rounded_up_do_not_make_a_blend_that_cannot_be_filled():
    """One large corpus and 99 small ones: 10 samples are wanted, the rounded shares sum to 109."""
    lengths, weights = [50, *[2] * 99], [0.901, *[0.001] * 99]
    corpora = [list(range(length)) for length in lengths]
    with pytest.raises(DataError, match="draws 9[0-9] from data set 0, which holds 50"):
        BlendedDataset(corpora, weights, 109)
    blend = BlendedDataset(corpora, weights, 109, needed=10)
    assert len(blend) == 10
    assert as_lists((blend.dataset_index, blend.dataset_sample_index)) == one_by_one(weights, 10)
    assert (
        len(BlendedDataset([*corpora[1:], list(range(200))], [*weights[1:], 0.9], 109, needed=10))
        == 109
    )
