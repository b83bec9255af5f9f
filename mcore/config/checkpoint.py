"""What is saved and loaded, where and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mcore.config.fields import below, flag, not_one_of, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoint options, in Megatron's spellings.

    Raises:
        ConfigError: options that need others.
    """

    save: str | None = flag(None, metavar="DIR", help="Save root of checkpoints.")
    save_interval: int | None = flag(
        None,
        aliases=("--persistent-save-interval",),
        help="Iterations between checkpoints; needs --save.",
    )
    async_save: bool = flag(
        False,
        help="Copy the state and go on training while a thread writes it. A save that comes before "
        "the last one is written waits for it; so does the end of the run.",
    )
    keep_latest: int | None = flag(
        None, help="After a save, delete all but the newest N checkpoints."
    )
    keep_every: int | None = flag(
        None,
        help="With --keep-latest: never delete checkpoints of iterations that are multiples of N.",
    )
    save_retain_interval: int | None = flag(
        None,
        help="After a save, delete the checkpoint before it unless its iteration is a multiple of "
        "N; the same as --keep-latest 1 --keep-every N.",
    )
    verify_saved_checkpoint: bool = flag(
        False,
        help="Read back every checkpoint in the background; damage ends the run, and the pointer "
        "goes back to the checkpoint before.",
    )
    load: str | None = flag(
        None,
        metavar="DIR",
        help="Save root, or one iteration's directory, to start from. An absent checkpoint is an "
        "error, "
        "unless the directory is that of --save and empty: then the run starts new.",
    )
    ckpt_step: int | None = flag(
        None, help="Iteration to load instead of the one that the pointer file names."
    )
    on_damaged_checkpoint: Literal["fallback", "error"] = flag(
        "fallback",
        help="When the newest checkpoint is damaged or was never finished: use the one before, or "
        "stop.",
    )
    finetune: bool = flag(
        False,
        help="Take weights only: start at iteration 0 with a fresh optimizer, schedule and data "
        "order.",
    )
    use_checkpoint_args: bool = flag(
        False, help="Take the model's options from the checkpoint; a typed flag still wins."
    )
    load_optim: bool = flag(True, help="Load the optimizer's state and the schedule.")
    load_rng: bool = flag(True, help="Load the random states.")
    save_optim: bool = flag(True, help="Save the optimizer's state.")
    save_rng: bool = flag(True, help="Save the random states.")
    exit_on_missing_checkpoint: bool = flag(
        False, help="An empty --load directory is an error even where it is that of --save."
    )
    overwrite_save: bool = flag(
        False, help="Start a new run in a --save directory that holds checkpoints already."
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.save_interval is not None and self.save is None:
            yield "save_interval also needs a directory: give --save DIR"
        names = ("save_interval", "keep_latest", "keep_every", "save_retain_interval")
        yield from below(self, 1, *names)
        yield from not_one_of(
            self.on_damaged_checkpoint, ("fallback", "error"), "on_damaged_checkpoint"
        )
        if not list(below(self, 1, *names)):
            yield from self._wrong_retention()
        for name in ("async_save", "verify_saved_checkpoint", "keep_latest"):
            if getattr(self, name) and self.save is None:
                yield f"`{name}` needs --save DIR"
        for name in ("finetune", "use_checkpoint_args", "ckpt_step", "exit_on_missing_checkpoint"):
            if getattr(self, name) not in (None, False) and self.load is None:
                yield f"`{name}` needs --load DIR"

    def _wrong_retention(self) -> Iterator[str]:
        if self.keep_every is not None and self.keep_latest is None:
            yield "keep_every needs keep_latest: without it no checkpoint is ever deleted"
        retain = self.save_retain_interval
        if retain is None:
            return
        if self.keep_latest is not None:
            yield "save_retain_interval and keep_latest exclude each other; drop one"
        if self.save_interval is None or retain % self.save_interval:
            yield (
                f"save_retain_interval ({retain}) must be a multiple of save_interval "
                f"({self.save_interval})"
            )
