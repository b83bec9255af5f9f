"""What a command needs of the machine that it starts on, before any process group exists."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore.config.checkpoint import CheckpointConfig
from mcore.config.data import DataConfig
from mcore.config.partial import as_far_as_known, value_if_known
from mcore.config.profiling import ProfilingConfig
from mcore.config.tokenizer import REQUIRED_OPTIONS, TokenizerConfig
from mcore.config.training import EvaluationConfig, RuntimeConfig
from mcore.data.blend import read_blends, validation_sets_problem
from mcore.data.split_source import split_source
from mcore.device import pick_device
from mcore.errors import ConfigError, DataError
from mcore.training.initialize import Launch, backend_problem
from mcore.training.save_roots import directory_problem

#: Files that a program reads its data from.
DataFiles = Callable[[DataConfig], Iterable[str]]


def problems_here(
    sections: Mapping[str, Any], launch: Launch, data_files: DataFiles | None
) -> Iterator[str]:
    """What is wrong with the files, directories and devices that options name, in words.

    Only looked at, nothing is opened or made; what is in the files is found out later.

    Args:
        sections: of the configuration, by name; they may lack fields that are at fault.
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
    yield from as_far_as_known(_directory_problems, sections["checkpoint"])
    yield from as_far_as_known(_device_problems, sections, launch)
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
    load = value_if_known(sections["checkpoint"], "load")
    if load is not None and not Path(load).exists():
        absent.append(load)
    problems += as_far_as_known(_directory_problems, sections["checkpoint"], True)
    problems += _output_problems(sections, may_be_elsewhere=True)
    return absent, problems


def corpus_files(data: DataConfig) -> list[str]:
    """The files of mcore's own data sets; those that are named in files come after these.

    Raises:
        DataError: a data path that cannot be used.
    """
    lists = _lists(data)
    if not data.has_data or not all(Path(path).is_file() for path in lists):
        return lists
    blends = [blend for blend in read_blends(data) if blend is not None]
    words = list(dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes))
    if data.sft:
        return [*lists, *words]
    return [*lists, *(f"{word}{ending}" for word in words for ending in (".idx", ".bin"))]


def _lists(data: DataConfig) -> list[str]:
    """Files that data paths are read from."""
    return [path for path in (data.data_args_path, data.per_split_data_args_path) if path]


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
    """Files of tokenizer and data; an error where the data's cannot be told."""
    yield from as_far_as_known(tokenizer_files, sections["tokenizer"])
    if data_files is None:
        return
    try:
        yield from as_far_as_known(data_files, sections["data"])
        yield from as_far_as_known(_wrong_validation_sets, sections["data"], sections["evaluation"])
    except DataError as error:
        yield error


def _wrong_validation_sets(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[DataError]:
    """What keeps validation sets from being measured one by one; lists that are absent are told."""
    is_measured = data.multiple_validation_sets and evaluation.eval_iters > 0 and data.has_data
    if not is_measured or not all(Path(path).is_file() for path in _lists(data)):
        return
    _, blend, _ = read_blends(data)
    if blend is None or split_source(data, 1).lack is not None:
        return
    problem = validation_sets_problem(blend, data.validation_set_names)
    if problem is not None:
        yield DataError(problem)


def _directory_problems(options: CheckpointConfig, may_be_elsewhere: bool = False) -> Iterator[str]:
    problem = directory_problem(options, may_be_elsewhere=may_be_elsewhere)
    if problem is not None:
        yield problem


def _device_problems(sections: Mapping[str, Any], launch: Launch) -> Iterator[str]:
    runtime: RuntimeConfig = sections["runtime"]
    try:
        device = pick_device(runtime.device, launch.local_rank)
    except ConfigError as error:
        yield str(error)
        return
    if device.type == "cuda":
        return
    profiling: ProfilingConfig = sections["profiling"]
    if runtime.device != "cpu":  # which is told wherever one checks
        yield from as_far_as_known(profiling.without_cuda)
    problem = backend_problem(runtime.distributed_backend, device)
    if problem is not None:
        yield problem


#: Flag -> section and field of a folder or file that rank 0 writes.
_FOLDERS = {
    "--tensorboard-dir": ("logging", "tensorboard_dir"),
    "--wandb-save-dir": ("logging", "wandb_save_dir"),
    "--save": ("checkpoint", "save"),
}
_FILES = {
    "--metrics-jsonl": ("logging", "metrics_jsonl"),
    "--autopilot-log": ("stability", "autopilot_log"),
    "--profile-pipeline": ("pipeline", "profile_pipeline"),
    "--memory-snapshot-path": ("profiling", "memory_snapshot"),
}


def _output_problems(
    sections: Mapping[str, Any], *, may_be_elsewhere: bool = False
) -> Iterator[str]:
    """Places that rank 0 writes to and cannot; elsewhere its permissions are others."""
    for is_folder, places in ((True, _FOLDERS), (False, _FILES)):
        for flag, (section, field) in places.items():
            path = value_if_known(sections[section], field)
            problem = None
            if path is not None:
                problem = _why_not_written(Path(path), is_folder, may_be_elsewhere)
            if problem is not None:
                yield f"{flag} {path} cannot be written: {problem}"


def _why_not_written(path: Path, is_folder: bool, may_be_elsewhere: bool) -> str | None:
    """What stands against a file or folder at a path, as far as it can be seen without trying."""

    def allows(mode: int, place: Path) -> bool:
        return may_be_elsewhere or os.access(place, mode)

    try:
        if path.exists():
            if path.is_dir() != is_folder:
                return "it is a file" if is_folder else "it is a directory"
            return None if allows(os.W_OK, path) else "permission is denied"
        parent = next(above for above in path.absolute().parents if above.exists())
        if not parent.is_dir():
            return f"{parent} is a file"
    except (OSError, ValueError) as error:
        return str(error)
    return None if allows(os.W_OK | os.X_OK, parent) else f"permission is denied in {parent}"
