"""The demo's requirements: what it accepts and what it fails on."""

import math

import numpy as np
import pytest

from examples.demo import run


def records(losses, first=1):
    return [{"iteration": first + i, "lm_loss": loss} for i, loss in enumerate(losses)]


STRAIGHT = records(np.linspace(8, 4, run.ITERATIONS).tolist())


def resumed(shift=0.0, first=run.STOP + 1):
    wanted = {r["iteration"]: r["lm_loss"] for r in STRAIGHT}
    return records([wanted[first + i] + shift for i in range(5)], first)


def test_a_resume_that_agrees(capsys):
    run.check_resume(STRAIGHT, resumed(shift=9e-6))
    assert f"iteration {run.STOP + 1}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (resumed(shift=2e-5), "differs by 2.00e-05"),
        (resumed(shift=math.nan), "differs by nan"),
        (resumed(first=run.STOP), f"should start with iteration {run.STOP + 1}"),
        ([], "should start"),
    ],
)
def test_a_resume_that_does_not(found, message):
    with pytest.raises(SystemExit, match=message):
        run.check_resume(STRAIGHT, found)


@pytest.fixture
def uniform_tokens(monkeypatch):
    """Token files in which all ids are equally frequent: unigram perplexity = vocabulary."""
    tokens = np.arange(run.VOCAB_SIZE)
    monkeypatch.setattr(run, "read_tokens", lambda _: tokens)


@pytest.mark.usefixtures("uniform_tokens")
def test_perplexity_has_to_be_under_half():
    half = math.log(run.VOCAB_SIZE / 2)
    run.check_perplexity([{"valid_lm_loss": 9.0}, {"valid_lm_loss": half - 1e-3}])
    with pytest.raises(SystemExit, match="is not below 1024.0"):
        run.check_perplexity([{"valid_lm_loss": half + 1e-3}])
    with pytest.raises(SystemExit, match="no record of an evaluation"):
        run.check_perplexity(STRAIGHT)


def test_a_failing_command_ends_the_demo(capsys):
    with pytest.raises(SystemExit, match="ended with status 3"):
        run._run("sh", "-c", "exit 3")
    assert "$ sh -c 'exit 3'" in capsys.readouterr().out
