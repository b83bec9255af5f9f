"""Curves: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from mcore.config.logging import LoggingConfig
from mcore.config.run import RunConfig
from mcore.errors import ConfigError
from mcore.log import get_logger

_WANDB_ID = "wandb_run_id.txt"


class Scalars(Protocol):
    """Takes points of curves, on the rank that writes."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named curve."""

    def add_by_samples(self, values: Mapping[str, float], samples: int) -> None:
        """Add a point to curves over consumed samples."""

    def rewind(self, iteration: int) -> None:
        """Hide points after an iteration: the run has gone back to it."""

    def flush(self) -> None:
        """Write what is held back."""

    def close(self) -> None:
        """Write everything and end."""


class TensorBoard:
    """Event files; points beyond the start, which a resumed run writes again, are hidden.

    Args:
        directory: where the files go.
        iteration: finished iterations at the start.
        queue_size: points that are held back.
        measures_again: the model of that iteration is measured once more, which gives the same
            points: curves that have theirs get no second one.

    Raises:
        ConfigError: the directory cannot be written.
    """

    def __init__(
        self, directory: str, iteration: int, queue_size: int, *, measures_again: bool = False
    ) -> None:
        self._directory, self._queue_size = directory, queue_size
        drawn = _drawn_at(directory, iteration) if measures_again else []
        self._drawn = {(name, iteration) for name in drawn}
        self._writer = self._open(directory, iteration + 1)
        self._by_samples: SummaryWriter | None = None

    def _open(self, directory: str, first: int) -> SummaryWriter:
        """Hides what an earlier run drew from the first point on, of every curve in the folder."""
        try:
            return SummaryWriter(directory, purge_step=first, max_queue=self._queue_size)
        except OSError as error:
            raise ConfigError(f"the TensorBoard directory cannot be written: {error}") from error

    def rewind(self, iteration: int) -> None:
        """See `Scalars`."""
        self.close()
        self._writer, self._by_samples = self._open(self._directory, iteration + 1), None

    def add(self, values: Mapping[str, float], step: int) -> None:
        """See `Scalars`."""
        for name, value in values.items():
            if (name, step) not in self._drawn:
                self._writer.add_scalar(name, value, step)

    def add_by_samples(self, values: Mapping[str, float], samples: int) -> None:
        """See `Scalars`; a folder of their own, since samples are no iterations to hide by."""
        if self._by_samples is None:
            self._by_samples = self._open(str(Path(self._directory, "samples")), samples)
        for name, value in values.items():
            self._by_samples.add_scalar(name, value, samples)

    def flush(self) -> None:
        """See `Scalars`."""
        self._writer.flush()
        if self._by_samples is not None:
            self._by_samples.flush()

    def close(self) -> None:
        """See `Scalars`."""
        self._writer.close()
        if self._by_samples is not None:
            self._by_samples.close()


class WeightsAndBiases:
    """A run at Weights & Biases, which a resumed run goes on with: its id is kept in the save root.

    Steps that were sent before a resume are not sent twice: wandb drops what is not beyond them.

    Args:
        config: the whole configuration, which is sent too.
        iteration: finished iterations at the start.
    """

    def __init__(self, config: RunConfig, iteration: int) -> None:
        options, save = config.logging, config.checkpoint.save
        wandb: Any = importlib.import_module("wandb")
        folder = options.wandb_save_dir or (str(Path(save, "wandb")) if save else None)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        kept = None if save is None else Path(save, _WANDB_ID)
        known = kept.read_text().strip() if kept and iteration and kept.exists() else None
        self._run = wandb.init(
            project=options.wandb_project,
            name=options.wandb_exp_name,
            entity=options.wandb_entity,
            dir=folder,
            id=known,
            resume="allow",
            config=config.to_dict(),
        )
        if kept is not None:
            kept.write_text(f"{self._run.id}\n")

    def add(self, values: Mapping[str, float], step: int) -> None:
        """See `Scalars`."""
        self._run.log(dict(values), step=step)

    def add_by_samples(self, values: Mapping[str, float], samples: int) -> None:
        """Nothing: a run there has one axis, the iterations; samples are a curve of their own."""

    def rewind(self, iteration: int) -> None:
        """Nothing: what was sent stays, and wandb drops iterations that were sent before."""

    def flush(self) -> None:
        """It sends by itself."""

    def close(self) -> None:
        """See `Scalars`."""
        self._run.finish()


def missing_packages(options: LoggingConfig) -> Iterator[str]:
    """A problem where Weights & Biases is asked for and its package is absent."""
    if options.wandb_project is None:
        return
    if importlib.util.find_spec("wandb") is None:
        yield (
            "--wandb-project needs the package wandb, which is not installed: pip install "
            "'mcore[wandb]', or drop the flag (TensorBoard has the same curves)"
        )


def tensorboard_directory(config: RunConfig) -> str | None:
    """Where TensorBoard's files go: as given, or in the save root."""
    if config.logging.tensorboard_dir is not None:
        return config.logging.tensorboard_dir
    save = config.checkpoint.save
    return None if save is None else str(Path(save) / "tensorboard")


def _drawn_at(directory: str, step: int) -> list[str]:
    """Curves in a folder that have a point at a step."""
    if not Path(directory).is_dir():
        return []
    reader = EventAccumulator(directory, size_guidance={SCALARS: 0})
    reader.Reload()
    return [
        name
        for name in reader.Tags()[SCALARS]
        if any(point.step == step for point in reader.Scalars(name))
    ]


def open_scalars(
    config: RunConfig, iteration: int, *, measures_again: bool = False
) -> list[Scalars]:
    """All curves that the options ask for.

    Args:
        config: the options.
        iteration: finished iterations at the start.
        measures_again: the run will measure the model of that iteration, whatever was measured
            before.

    Raises:
        ConfigError: a directory that cannot be written.
    """
    opened: list[Scalars] = []
    directory = tensorboard_directory(config)
    if directory is not None:
        size = config.logging.tensorboard_queue_size
        opened.append(TensorBoard(directory, iteration, size, measures_again=measures_again))
        get_logger().info("TensorBoard: tensorboard --logdir %s", directory)
    if config.logging.wandb_project is not None:
        opened.append(WeightsAndBiases(config, iteration))
    return opened
