import json
import math

import pytest

from mcore.errors import ConfigError, DataError
from mcore.training.records import RecordFile


def write(path, *iterations):
    path.write_text("".join(json.dumps({"iteration": i, "x": 1 / 3}) + "\n" for i in iterations))


def iterations(path):
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_numbers_come_back_exactly(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    records = RecordFile(str(path), 0)
    records.write({"iteration": 1, "lm_loss": 0.1 + 0.2, "learning_rate": 1e-300})
    assert json.loads(path.read_text()) == {
        "iteration": 1,
        "lm_loss": 0.1 + 0.2,
        "learning_rate": 1e-300,
    }  # readable before the file is closed
    records.close()


def test_every_line_is_json_whatever_the_numbers(tmp_path):
    path = tmp_path / "records.jsonl"
    records = RecordFile(str(path), 0)
    numbers = [math.nan, math.inf, -math.inf, 0.5]
    records.write({"iteration": 1, "lm_loss": math.nan, "norms": numbers, "of": {"x": math.inf}})
    records.close()

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {
        "iteration": 1, "lm_loss": "nan", "norms": ["nan", "inf", "-inf", 0.5], "of": {"x": "inf"},
    }  # fmt: skip
    assert math.isnan(float(record["lm_loss"]))
    RecordFile(str(path), 1).close()  # a resumed run reads them
    assert iterations(path) == [1]


def test_what_is_measured_again_is_told_once(tmp_path):
    """A job that is started again after its end measures the finished model again."""
    path = tmp_path / "records.jsonl"
    lines = [
        {"iteration": 2, "valid_lm_loss": 5.0, "valid_ppl": 148.0},
        {"iteration": 3, "lm_loss": 4.0},
        {"iteration": 3, "valid_lm_loss": 4.5, "valid_ppl": 90.0, "valid_set": "a"},
        {"iteration": 3, "test_lm_loss": 4.5, "test_ppl": 90.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    RecordFile(str(path), 3).close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines
    RecordFile(str(path), 3, measures_again=True).close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:2]


@pytest.mark.parametrize(("start", "kept"), [(0, []), (2, [1, 2, 2]), (9, [1, 2, 2, 3, 4])])
def test_a_resumed_run_drops_what_lies_beyond_its_start(tmp_path, start, kept):
    path = tmp_path / "records.jsonl"
    write(path, 1, 2, 2, 3, 4)
    records = RecordFile(str(path), start)
    records.write({"iteration": start + 1})
    records.close()
    assert iterations(path) == [*kept, start + 1]
    assert [p.name for p in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_last_line_that_a_kill_cut_short_is_dropped(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, 1, 2, 3)
    path.write_text(path.read_text()[:-9])
    records = RecordFile(str(path), 5)
    records.write({"iteration": 3})
    records.close()
    assert iterations(path) == [1, 2, 3]


def test_a_last_line_without_its_line_end_stays_whole(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, 1, 2)
    path.write_text(path.read_text()[:-1])
    records = RecordFile(str(path), 5)
    records.write({"iteration": 3})
    records.close()
    assert iterations(path) == [1, 2, 3]


@pytest.mark.parametrize("text", ["hello\nworld\n", '{"iteration": 1}\n[1]\n', '{"a": 1}\n'])
def test_a_foreign_file_is_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(DataError, match="notes.txt line [12] is not a record"):
        RecordFile(str(path), 0)
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--metrics-jsonl"):
        RecordFile(str(tmp_path), 0)


def test_a_run_that_goes_back_forgets_what_came_after(tmp_path):
    path = tmp_path / "records.jsonl"
    file = RecordFile(str(path), 0)
    for iteration in (1, 2, 3):
        file.write({"iteration": iteration})
    file.rewind(1)
    file.write({"iteration": 2, "again": True})
    file.close()
    lines = path.read_text().splitlines()
    assert lines == ['{"iteration": 1}', '{"iteration": 2, "again": true}']
