import pytest

from mcore.errors import ConfigError
from mcore.training.initialize import Launch, read_launch


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_this_is_the_only_process():
    assert read_launch() == Launch(0, 1, 0)


def test_torchrun_says_who_we_are(monkeypatch):
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(5, 8, 1)
    assert read_launch(local_rank=3) == Launch(5, 8, 1)


def test_torchrun_is_known_by_what_it_sets(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(0, 1, 0, by_torchrun=True)


def test_a_launcher_that_passes_the_local_rank_as_a_flag(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert read_launch(local_rank=3) == Launch(5, 8, 3)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_a_launcher_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name} is set but not all of RANK, WORLD_SIZE"):
        read_launch()
