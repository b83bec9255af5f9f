"""Where checkpoints lie and how one comes into being: shards, then metadata, then the pointer.

An iteration exists once its `metadata.json` does. That file names the shards by names that no
other save uses, and appears by an atomic rename, so a save that dies leaves whatever was there
before, also when it was about to replace the same iteration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from mcore.errors import CheckpointError, DamagedCheckpointError

METADATA_NAME = "metadata.json"
REPLACED_NAME = f".{METADATA_NAME}.replaced"
POINTER_NAME = "latest_checkpointed_iteration.txt"
#: What shards are called; anything else in the directory of an iteration is somebody's own.
SHARD_PATTERN = "shard_[0-9]*.*.safetensors"
#: A folder of `torch.distributed.checkpoint` has this file and, as Megatron-LM writes it, a
#: `metadata.json` that is none of ours.
_FOREIGN_NAME = ".metadata"
_ITERATION = re.compile(r"iter_([0-9]{7,})")


def iteration_directory(root: str | os.PathLike[str], iteration: int) -> Path:
    """`ROOT/iter_0000006`."""
    return Path(root) / f"iter_{iteration:07d}"


def iteration_of(directory: Path) -> int:
    """The number in the name of an `iteration_directory`."""
    return int(directory.name.removeprefix("iter_"))


def is_foreign(directory: Path) -> bool:
    """Whether the directory of an iteration holds a checkpoint that another program wrote."""
    return (directory / _FOREIGN_NAME).exists()


def complete_iterations(root: str | os.PathLike[str]) -> list[int]:
    """Iterations of a save root that were written to the end, ascending; those of others not."""
    return [n for n, entry in _iterations(root) if (entry / METADATA_NAME).is_file()]


def unfinished_iterations(root: str | os.PathLike[str]) -> list[int]:
    """Iterations of a save root whose saving died or is still under way, ascending."""
    return [n for n, entry in _iterations(root) if not (entry / METADATA_NAME).is_file()]


def foreign_iterations(root: str | os.PathLike[str]) -> list[int]:
    """Iterations of a save root that another program wrote, ascending."""
    return [n for n, _ in _iterations(root, foreign=True)]


def _iterations(root: str | os.PathLike[str], *, foreign: bool = False) -> list[tuple[int, Path]]:
    """Directories of iterations by number; of ours, or of those that another program wrote."""
    if not Path(root).is_dir():
        return []
    return sorted(
        (int(match.group(1)), entry)
        for entry in Path(root).iterdir()
        if (match := _ITERATION.fullmatch(entry.name))
        and entry.is_dir()
        and is_foreign(entry) == foreign
    )


def latest_iteration(root: str | os.PathLike[str]) -> int | None:
    """The iteration that the pointer file names; None where there is no pointer file.

    Raises:
        CheckpointError: the pointer cannot be read or is not a plain integer.
    """
    pointer = Path(root) / POINTER_NAME
    try:
        text = pointer.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedCheckpointError(f"cannot read {pointer}: {error}") from error
    if not re.fullmatch(rb"\s*[0-9]{1,18}\s*", text):
        raise DamagedCheckpointError(
            f"{pointer} holds {text[:40]!r}, not an iteration number; {_remedy(root)}"
        )
    return int(text)


def _remedy(root: str | os.PathLike[str]) -> str:
    complete = complete_iterations(root)
    if not complete:
        return f"there is no complete checkpoint in {root}"
    return (
        f"complete checkpoints there: {', '.join(map(str, complete))}; write one of these numbers "
        f"into {POINTER_NAME} or choose one with --ckpt-step"
    )


def find_checkpoint(path: str | os.PathLike[str], iteration: int | None = None) -> Path:
    """The directory of a complete checkpoint.

    Args:
        path: a save root, or (iteration None) the directory of one iteration.
        iteration: which one; None = the one that the pointer names.

    Raises:
        CheckpointError: there is none, the pointer is damaged or what it names is incomplete.
    """
    root = Path(path)
    if iteration is None and (root / METADATA_NAME).is_file():
        return root
    if not root.is_dir():
        raise CheckpointError(f"there is no directory {root}")
    wanted = latest_iteration(root) if iteration is None else iteration
    if wanted is None and _ITERATION.fullmatch(root.name):
        raise DamagedCheckpointError(
            f"{root} has no {METADATA_NAME}: it was never completed, or has lost it"
        )
    if wanted is None:
        raise CheckpointError(f"{root} is not a checkpoint: no {POINTER_NAME}; {_remedy(root)}")
    directory = iteration_directory(root, wanted)
    if is_foreign(directory) or any(directory.glob("mp_rank_*")):
        raise CheckpointError(
            f"{directory} was written by another program; from a checkpoint of Megatron's, mcore "
            f"convert megatron-to-mcore --megatron {root} --save DIR makes one to load"
        )
    if not (directory / METADATA_NAME).is_file():
        source = f"{root / POINTER_NAME} names" if iteration is None else "the load asks for"
        raise DamagedCheckpointError(
            f"{source} iteration {wanted}, but {directory} has no {METADATA_NAME}: it is absent or "
            f"was never completed; {_remedy(root)}"
        )
    return directory


def publish(directory: Path, metadata: bytes) -> None:
    """Make a checkpoint exist: its shards are on disk, now its `metadata.json` appears.

    One that is replaced can be taken back until its leftovers are deleted.
    """
    path, replaced = directory / METADATA_NAME, directory / REPLACED_NAME
    if path.is_file():
        replace_file(replaced, path.read_bytes())
    else:
        replaced.unlink(missing_ok=True)
    _sync_directory(directory)
    replace_file(path, metadata)


def take_back(directory: Path) -> bool:
    """Let the checkpoint that was replaced here exist again; whether there was one."""
    replaced = directory / REPLACED_NAME
    if not replaced.is_file():
        return False
    os.replace(replaced, directory / METADATA_NAME)
    _sync_directory(directory)
    return True


def temporary_name(name: str) -> str:
    """What a file is called until it is whole."""
    return f".{name}.tmp"


def delete_leftovers(directory: Path, shards: Collection[str]) -> None:
    """Delete the shards of saves that died or were replaced; `shards` are those in use."""
    for name in (REPLACED_NAME, temporary_name(REPLACED_NAME)):
        (directory / name).unlink(missing_ok=True)
    for entry in directory.glob(SHARD_PATTERN):
        if entry.name not in shards:
            entry.unlink(missing_ok=True)


def discard(shard: Path) -> None:
    """Delete a shard of a save that failed, unless the save failed after it was published."""
    metadata = shard.with_name(METADATA_NAME)
    if not metadata.is_file() or shard.name.encode() not in metadata.read_bytes():
        shard.unlink(missing_ok=True)


def point_to(root: Path, iteration: int) -> None:
    """Let the pointer file name an iteration, atomically."""
    replace_file(root / POINTER_NAME, f"{iteration}".encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that at any moment either the old or the new content is there, and stays."""
    temporary = path.with_name(temporary_name(path.name))
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def make_directory(directory: Path) -> None:
    """Create the directory of an iteration, durably."""
    directory.mkdir(parents=True, exist_ok=True)
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
