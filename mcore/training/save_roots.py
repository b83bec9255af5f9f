"""Whether a run may start from, and save to, the directories that it names."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mcore import checkpoint
from mcore.checkpoint.metadata import CheckpointMetadata
from mcore.checkpoint.reader import read_metadata
from mcore.config.checkpoint import CheckpointConfig
from mcore.errors import CheckpointError, DamagedCheckpointError


def directory_problem(options: CheckpointConfig, *, may_be_elsewhere: bool = False) -> str | None:
    """What could lose or silently restart a run, in words.

    That is --load without a checkpoint, unless this is the first run into the same --save, and
    --save with checkpoints of a run that is not being continued (--finetune continues none), or of
    another program where a save may want to go.

    Args:
        options: where to save and load.
        may_be_elsewhere: a --load directory that is not here is on the machines of the job.
    """
    load, save = options.load, options.save
    continues = _same(load, save)
    in_the_way = save is not None and not continues and _holds_any(save)
    if in_the_way and not options.overwrite_save:
        if load is None:
            return (
                f"--save {save} holds checkpoints already: continue that run with --load {save}, "
                "or start anew over it with --overwrite-save"
            )
        if _holds_any(load):
            return (
                f"--save {save} holds checkpoints already, and --load names another directory; "
                f"go on with that run by --load {save}"
                f"{' without --finetune' if options.finetune else ''}, choose a new --save, or "
                "start anew over it with --overwrite-save"
            )
    if save is not None and continues and options.finetune and not options.overwrite_save:
        trained = [number for number in checkpoint.complete_iterations(save) if number > 0]
        if trained:
            return (
                f"--finetune starts at iteration 0 and would write over the checkpoints in --save "
                f"{save} (of iteration {', '.join(map(str, trained))}), which it loads from; go on "
                "with that run without --finetune, choose a new --save, or start anew over it with "
                "--overwrite-save"
            )
    if load is not None and not _holds_any(load):
        elsewhere = may_be_elsewhere and not Path(load).exists()
        starts_new = elsewhere or (continues and options.ckpt_step is None)
        if options.exit_on_missing_checkpoint or not starts_new:
            return (
                f"--load {load} holds no checkpoint; correct the path, or give the same directory "
                "as --save to start a new run there"
            )
    return None if save is None else _foreign_problem(save, options)


def _foreign_problem(save: str, options: CheckpointConfig) -> str | None:
    """What a save would come upon after hours."""
    start = _start(options)
    ahead = [number for number in checkpoint.foreign_iterations(save) if number > start]
    if not ahead:
        return None
    return (
        f"--save {save} holds checkpoints of another program, of iteration "
        f"{', '.join(map(str, ahead))}, which mcore does not write over; move them away or choose "
        "another --save"
    )


def _start(options: CheckpointConfig) -> int:
    """The iteration from which the run goes on, as far as that can be told before it loads."""
    start = None if options.finetune else readable_start(options)
    return 0 if start is None else start[1].iteration


def readable_start(options: CheckpointConfig) -> tuple[Path, CheckpointMetadata] | None:
    """The checkpoint that a run would start from, as far as that can be told before it loads.

    Returns:
        Directory and metadata of the first that is not damaged, or None: why there is none is told
        when the run loads it.
    """
    load, step = options.load, options.ckpt_step
    if load is None:
        return None
    with contextlib.suppress(CheckpointError, OSError):
        if options.on_damaged_checkpoint == "fallback":
            found = checkpoint.candidates(load, step)[0]
        else:
            found = [checkpoint.find_checkpoint(load, step)]
        for directory in found:
            with contextlib.suppress(DamagedCheckpointError):
                metadata = read_metadata(directory)
                if _has_its_files(directory, metadata):
                    return directory, metadata
    return None


def _has_its_files(directory: Path, metadata: CheckpointMetadata) -> bool:
    """Whether every file is there with its size, which is what most damage changes."""
    places = {name: directory / name for name in metadata.files}
    return all(
        path.is_file() and path.stat().st_size == metadata.files[name].nbytes
        for name, path in places.items()
    )


def has_start(options: CheckpointConfig) -> bool:
    """Whether there is a checkpoint to load."""
    return options.load is not None and _holds_any(options.load)


def make_root(save: str) -> None:
    """Make the save root, so that a path that cannot be one is found before anything is built.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"--save {save} cannot be made: {error}") from error


def _holds_any(root: str) -> bool:
    path = Path(root)
    if not path.is_dir():
        return False
    pointer = path / "latest_checkpointed_iteration.txt"
    complete = checkpoint.complete_iterations(path)  # unfinished ones are of a first save that died
    return pointer.exists() or bool(complete) or (path / "metadata.json").exists()


def _same(first: str | None, second: str | None) -> bool:
    return (
        first is not None and second is not None and Path(first).resolve() == Path(second).resolve()
    )
