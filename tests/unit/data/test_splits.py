import pytest

from mcore.data.splits import parse_split, split_bounds, split_range
from mcore.errors import DataError


@pytest.mark.parametrize(
    ("split", "shares"),
    [
        ("969, 30, 1", (0.969, 0.03, 0.001)),
        ("0.9/0.1", (0.9, 0.1, 0.0)),
        ("90", (1.0, 0.0, 0.0)),
        ("8,1,1", (0.8, 0.1, 0.1)),
        ("0,0,5", (0.0, 0.0, 1.0)),
    ],
)
def test_shares(split, shares):
    assert parse_split(split) == pytest.approx(shares, abs=1e-15)


@pytest.mark.parametrize("split", ["", "none", "0,0,0", "1,2,3,4", "90,-5,15", "-1", "1.2.3", "."])
def test_bad_splits_are_refused_with_the_text(split):
    with pytest.raises(DataError, match="split"):
        parse_split(split)


def test_a_split_without_a_share_is_none():
    assert split_bounds("100,0,0") == ((0.0, 1.0), None, None)
    assert split_bounds("1,0,1") == ((0.0, 0.5), None, (0.5, 1.0))


@pytest.mark.parametrize("split", ["969,30,1", "80,12,8", "1,1,1", "0.3,0.3,0.4"])
def test_splits_cover_the_corpus_without_overlap(split):
    for count in (0, 1, 2, 5, 37, 1000, 12345):
        ranges = [split_range(bounds, count) for bounds in split_bounds(split)]
        assert [i for part in ranges for i in part] == list(range(count))


def test_halves_round_to_even():
    assert split_range((0.0, 0.5), 5) == range(2)  # round(2.5)
    assert split_range((0.0, 0.5), 7) == range(4)  # round(3.5)
