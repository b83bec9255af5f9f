import json
from types import SimpleNamespace

import pytest
import torch

from mcore import device
from mcore.config.profiling import ProfilingConfig
from mcore.errors import ConfigError
from mcore.log import get_logger
from mcore.pipeline_parallel.actions import Action, Kind
from mcore.training.profiling import Profiler

CPU = torch.device("cpu")


def profiler(folder, rank=0, where=CPU, **options):
    return Profiler(ProfilingConfig(**options), folder, where, rank)


def run(profiled, iterations=4, first=0):
    for done in range(first, iterations):
        profiled.before(done)
        with profiled.running(Action(Kind.FORWARD, 0, done)), profiled.phase("a phase"):
            torch.ones(4) + 1
        profiled.after(done + 1)
    profiled.close()


OPTIONS = {"profile": True, "use_pytorch_profiler": True}


def ranges(path):
    events = json.loads(path.read_text())["traceEvents"]
    return [e["name"] for e in events if e.get("cat") == "user_annotation"]


def test_the_trace_has_the_profiled_iterations_alone(tmp_path):
    run(profiler(tmp_path, profile_step_start=1, profile_step_end=3, **OPTIONS))
    (path,) = tmp_path.iterdir()
    assert path.name == "rank0.iterations2-3.pt.trace.json"
    assert sorted(ranges(path)) == ["F0.1", "F0.2", "a phase", "a phase"]


def test_a_run_that_ends_before_the_profile_does_leaves_what_there_is(tmp_path):
    run(profiler(tmp_path, profile_step_start=2, profile_step_end=30, **OPTIONS))
    (path,) = tmp_path.iterdir()
    assert path.name == "rank0.iterations3-end.pt.trace.json"
    assert "F0.3" in ranges(path)


@pytest.mark.parametrize(("first", "name", "seen"), [(2, "3-4", ["F0.2", "F0.3"]), (4, None, [])])
def test_a_run_that_is_resumed_inside_or_beyond_the_range(tmp_path, caplog, first, name, seen):
    profiled = profiler(tmp_path, profile_step_start=1, profile_step_end=4, **OPTIONS)
    with caplog.at_level("WARNING", get_logger().name):
        run(profiled, 6, first)
    assert ("nothing is profiled" in caplog.text) == (name is None)
    files = [path.name for path in tmp_path.iterdir()]
    assert files == ([] if name is None else [f"rank0.iterations{name}.pt.trace.json"])
    assert [r for path in tmp_path.iterdir() for r in sorted(ranges(path)) if r[0] == "F"] == seen


def test_a_range_that_a_rollback_returns_to_is_profiled_once(tmp_path):
    profiled = profiler(tmp_path, profile_step_start=1, profile_step_end=2, **OPTIONS)
    for first in (0, 1):
        for done in range(first, 4):
            profiled.before(done)
            torch.ones(4) + 1
            profiled.after(done + 1)
    profiled.close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.iterations2-2.pt.trace.json"]


def test_the_end_of_the_range_may_be_passed_over(tmp_path):
    """Iterations 3 to 5 have no step."""
    profiled = profiler(tmp_path, profile_step_start=1, profile_step_end=3, **OPTIONS)
    for done in (0, 1, 5):
        profiled.before(done)
        with profiled.running(Action(Kind.FORWARD, 0, done)):
            torch.ones(4) + 1
        profiled.after(done + 1)
    (path,) = tmp_path.iterdir()
    assert [name for name in ranges(path) if name[0] == "F"] == ["F0.1"]


def test_other_ranks_are_not_profiled(tmp_path):
    profiled = profiler(tmp_path, rank=1, profile_step_start=0, **OPTIONS)
    run(profiled)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [({"profile": True}, "--use-pytorch-profiler"), ({"record_memory_history": True}, "CUDA")],
)
def test_what_needs_a_gpu(options, message):
    (problem,) = ProfilingConfig(**options).without_cuda()
    assert message in problem
    assert list(ProfilingConfig(**OPTIONS).without_cuda()) == []


def test_ranks_that_do_not_exist():
    options = ProfilingConfig(profile_ranks=(0, 4), **OPTIONS)
    assert list(options.wrong_ranks(4)) == ["--profile-ranks 0 4: the job has ranks 0 to 3"]
    assert list(options.wrong_ranks(5)) == []
    assert list(ProfilingConfig(profile_ranks=(0, 4)).wrong_ranks(4)) == []


def test_an_empty_range_is_refused():
    with pytest.raises(ConfigError, match=r"`profile_step_end` \(5\) must be above"):
        ProfilingConfig(profile_step_start=5, profile_step_end=5)
    with pytest.raises(ConfigError, match="give --profile too"):
        ProfilingConfig(use_pytorch_profiler=True)


def test_on_a_gpu_the_capture_of_nsight_is_opened_and_closed(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(device, "start_capture", lambda: calls.append("start") or "marks")
    monkeypatch.setattr(device, "stop_capture", lambda marks: calls.append(f"stop {marks}"))
    gpu = SimpleNamespace(type="cuda")
    profiled = profiler(tmp_path, where=gpu, profile=True, profile_step_start=1, profile_step_end=2)
    run(profiled)
    assert calls == ["start", "stop marks"]


def test_the_memory_history_is_written_even_when_the_run_fails(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(device, "record_memory_history", lambda: calls.append("on"))
    monkeypatch.setattr(device, "dump_memory_history", lambda path: calls.append(path.name))
    gpu = SimpleNamespace(type="cuda")
    profiler(tmp_path, where=gpu, record_memory_history=True).close()
    other = profiler(
        tmp_path, where=gpu, record_memory_history=True, memory_snapshot_path="other.bin"
    )
    other.close()
    assert calls == ["on", "snapshot.rank0.pickle", "on", "other.rank0.bin"]
