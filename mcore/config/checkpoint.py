"""What is saved and loaded, where and how often."""

from __future__ import annotations

from dataclasses import dataclass

from mcore.config.fields import flag
from mcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoint options, in Megatron's spellings.

    Raises:
        ConfigError: options that need others.
    """

    save: str | None = flag(None, metavar="DIR", help="Save root of checkpoints.")
    save_interval: int | None = flag(None, help="Iterations between checkpoints; needs --save.")
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
        if self.save_interval is not None and self.save is None:
            raise ConfigError("save_interval needs save: give --save DIR")
        if self.save_interval is not None and self.save_interval < 1:
            raise ConfigError(f"save_interval is {self.save_interval}; use a number from 1 up")
        for name in ("finetune", "use_checkpoint_args", "ckpt_step", "exit_on_missing_checkpoint"):
            if getattr(self, name) not in (None, False) and self.load is None:
                raise ConfigError(f"{name} needs load: give --load DIR")
