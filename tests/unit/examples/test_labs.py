import json

import pytest

from examples.labs import compare


def write(path, losses):
    lines = [{"iteration": i, "lm_loss": loss} for i, loss in enumerate(losses, 1)]
    lines.append({"iteration": 1, "valid_lm_loss": 5.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("losses", "code"),
    [([3.0, 2.0], 0), ([3.0, 2.000005], 0), ([3.0, 2.1], 1), (["nan", 2.0], 1), ([3.0, "inf"], 1)],
)
def test_losses_are_compared(tmp_path, monkeypatch, capsys, losses, code):
    files = [write(tmp_path / "a.jsonl", [3.0, 2.0]), write(tmp_path / "b.jsonl", losses)]
    monkeypatch.setattr("sys.argv", ["compare", *files])
    assert compare.main() == code
    assert ("DIFFER" in capsys.readouterr().out) == bool(code)
