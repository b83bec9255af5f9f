"""The `mcore` command: statuses, messages, suggestions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore.cli.main import COMMANDS, main

CORPUS = Path(__file__).parents[2] / "golden" / "preprocess" / "bpe_text_document"


def fail(capsys, *words):
    """Status and message of a command that fails."""
    status = main(words)
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return status, output.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rank"], "unknown command 'rank'; did you mean ranks?"),
        (["qwertz"], f"unknown command 'qwertz' (commands: {', '.join(COMMANDS)})"),
        (["ranks", "--order", "tp-xx"], "order"),
        (["ranks", "--tp", "0"], "tp size is 0"),
        (["ranks", "--tp", "two"], "argument --tp: invalid int value: 'two'"),
        (["ranks", "--jso"], "unknown flag '--jso'; did you mean --json?"),
        (["ranks", "tp=2"], "unknown argument 'tp=2'"),
        (["data", "sample"], "invalid choice: 'sample' (choose from"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_usage_errors_have_status_2(capsys, words, message):
    status, error = fail(capsys, *words)
    assert status == 2
    assert message in error


def test_faulty_files_have_status_1(capsys, tmp_path):
    words = ["data", "samples", "--samples", "none", "0", "0", "--seq-length", "8"]
    words += ["--out", str(tmp_path / "x.npz"), "--data-path", str(tmp_path / "absent")]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]
    status, error = fail(capsys, *words)
    assert status == 1
    assert "absent" in error


def test_ctrl_c_ends_a_command_without_a_word(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mcore.cli.ranks.run", interrupted)
    assert fail(capsys, "ranks", "--tp", "2") == (130, "")


def test_json_alone_on_stdout(capsys):
    assert main(["ranks", "--tp", "2", "--dp", "2", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)
    assert groups["tp"] == [[0, 1], [2, 3]]
    assert groups["dp"] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: mcore {command}" in capsys.readouterr().out


@pytest.mark.cli
def test_the_module_runs_and_ranks_and_data_need_no_torch():
    script = (
        "import sys; from mcore.cli.main import main; main(['ranks', '--json']); "
        f"status = main(['data', 'inspect', {str(CORPUS)!r}]); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=300).returncode == 0
    words = [sys.executable, "-m", "mcore", "--version"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
    assert shown.startswith("mcore ")
