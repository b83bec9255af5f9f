"""What a command needs of the machine that it starts on, before any process group exists."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore.config.checkpoint import CheckpointConfig
from mcore.config.data import DataConfig
from mcore.config.logging import LoggingConfig
from mcore.config.profiling import ProfilingConfig
from mcore.config.tokenizer import REQUIRED_OPTIONS, TokenizerConfig
from mcore.config.training import RuntimeConfig
from mcore.data.blend import read_blends
from mcore.device import pick_device
from mcore.errors import ConfigError, DataError
from mcore.training.checkpointing import directory_problem
from mcore.training.initialize import Launch, backend_problem

#: Files that a program reads its data from.
DataFiles = Callable[[DataConfig], Iterable[str]]


def problems_here(
    sections: Mapping[str, Any], launch: Launch, data_files: DataFiles | None
) -> Iterator[str]:
    """What is wrong with the files, directories and devices that options name, in words.

    Only looked at, nothing is opened or made; what is in the files is found out later.

    Args:
        sections: of the configuration, by name; those that could not be built are absent.
        launch: this process.
        data_files: of the program; None = its data is its own business.
    """
    for path in _input_files(sections, data_files):
        if isinstance(path, DataError):
            yield str(path)
        elif not Path(path).exists():
            yield f"{path} is not there"
        elif not os.access(path, os.R_OK):
            yield f"{path} cannot be read: permission is denied"
    if "checkpoint" in sections:
        problem = directory_problem(sections["checkpoint"])
        if problem is not None:
            yield problem
    yield from _device_problems(sections, launch)
    if launch.rank == 0:
        yield from _output_problems(sections)


def absent_files(sections: Mapping[str, Any], data_files: DataFiles) -> tuple[list[str], list[str]]:
    """Files and directories to read from that this machine lacks, and what is wrong with others.

    Args:
        sections: as for `problems_here`.
        data_files: of the program.
    """
    absent, problems = [], []
    for path in _input_files(sections, data_files):
        if isinstance(path, DataError):
            problems.append(str(path))
        elif not Path(path).exists():
            absent.append(path)
    checkpoint: CheckpointConfig | None = sections.get("checkpoint")
    if checkpoint is not None:
        if checkpoint.load is not None and not Path(checkpoint.load).exists():
            absent.append(checkpoint.load)
        problem = directory_problem(checkpoint, may_be_elsewhere=True)
        problems += [] if problem is None else [problem]
    return absent, problems


def corpus_files(data: DataConfig) -> list[str]:
    """The files of mcore's own data sets; those that are named in files come after these.

    Raises:
        DataError: a data path that cannot be used.
    """
    lists = [path for path in (data.data_args_path, data.per_split_data_args_path) if path]
    if not data.has_data or not all(Path(path).is_file() for path in lists):
        return lists
    blends = [blend for blend in read_blends(data) if blend is not None]
    words = list(dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes))
    if data.sft:
        return [*lists, *words]
    return [*lists, *(f"{word}{ending}" for word in words for ending in (".idx", ".bin"))]


def tokenizer_files(tokenizer: TokenizerConfig) -> list[str]:
    """The files that a tokenizer is made of."""
    needed = REQUIRED_OPTIONS.get(tokenizer.tokenizer_type or "", ())
    files = {
        "tokenizer_model": tokenizer.tokenizer_model,
        "vocab_file": tokenizer.vocab_file,
        "merge_file": tokenizer.merge_file,
    }
    return [path for name, path in files.items() if name in needed and path is not None]


def _input_files(
    sections: Mapping[str, Any], data_files: DataFiles | None
) -> Iterator[str | DataError]:
    """Files of tokenizer, schedule and data; an error where the data's cannot be told."""
    if "tokenizer" in sections:
        yield from tokenizer_files(sections["tokenizer"])
    schedule = sections["pipeline"].pipeline_schedule if "pipeline" in sections else None
    if schedule is not None and schedule.startswith("file:"):
        yield schedule.removeprefix("file:")
    if data_files is None or "data" not in sections:
        return
    try:
        yield from data_files(sections["data"])
    except DataError as error:
        yield error


def _device_problems(sections: Mapping[str, Any], launch: Launch) -> Iterator[str]:
    runtime: RuntimeConfig | None = sections.get("runtime")
    if runtime is None:
        return
    try:
        device = pick_device(runtime.device, launch.local_rank)
    except ConfigError as error:
        yield str(error)
        return
    if device.type == "cuda":
        return
    profiling: ProfilingConfig | None = sections.get("profiling")
    if profiling is not None and runtime.device != "cpu":  # which is told wherever one checks
        yield from profiling.without_cuda()
    problem = backend_problem(runtime.distributed_backend, device)
    if problem is not None:
        yield problem


def _output_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    """Places that rank 0 writes to and cannot."""
    options: LoggingConfig | None = sections.get("logging")
    folders: dict[str, str | None] = {}
    files: dict[str, str | None] = {}
    if options is not None:
        folders["--tensorboard-dir"] = options.tensorboard_dir
        folders["--wandb-save-dir"] = options.wandb_save_dir
        files["--metrics-jsonl"] = options.metrics_jsonl
    if "stability" in sections:
        files["--autopilot-log"] = sections["stability"].autopilot_log
    if "pipeline" in sections:
        files["--profile-pipeline"] = sections["pipeline"].profile_pipeline
    if "checkpoint" in sections:
        folders["--save"] = sections["checkpoint"].save
    profiling: ProfilingConfig | None = sections.get("profiling")
    if profiling is not None and profiling.record_memory_history:
        files["--memory-snapshot-path"] = profiling.memory_snapshot_path
    for is_folder, places in ((True, folders), (False, files)):
        for flag, path in places.items():
            problem = None if path is None else _why_not_written(Path(path), is_folder)
            if problem is not None:
                yield f"{flag} {path} cannot be written: {problem}"


def _why_not_written(path: Path, is_folder: bool) -> str | None:
    """What stands against a file or folder at a path, as far as it can be seen without trying."""
    try:
        if path.exists():
            if path.is_dir() != is_folder:
                return "it is a file" if is_folder else "it is a directory"
            return None if os.access(path, os.W_OK) else "permission is denied"
        parent = next(above for above in path.absolute().parents if above.exists())
        if not parent.is_dir():
            return f"{parent} is a file"
    except (OSError, ValueError) as error:
        return str(error)
    return None if os.access(parent, os.W_OK | os.X_OK) else f"permission is denied in {parent}"
