"""What looks at steps from outside: timers, the profiler, the pipeline's profile, the notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from mcore import device
from mcore.config.run import RunConfig
from mcore.notice import Notice
from mcore.pipeline_parallel.actions import Action
from mcore.pipeline_parallel.hooks import Observer, Unobserved
from mcore.training.initialize import Runtime
from mcore.training.pipeline_profile import PipelineProfile
from mcore.training.profiling import Profiler
from mcore.training.scalars import tensorboard_directory
from mcore.training.timers import Timers


class Whereabouts:
    """Writes down what this rank's host is doing, for those who outlive it.

    Args:
        notice: where.
    """

    def __init__(self, notice: Notice) -> None:
        self._notice = notice

    @contextmanager
    def waiting(self, action: Action) -> Iterator[None]:
        """Say what is waited for."""
        self._notice.write(f"waiting for the input of {action.described}")
        yield

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Say what is computed, and afterwards that it has been."""
        self._notice.write(f"in {action.described}")
        yield
        self._notice.write(f"after {action.described}")


class Observation:
    """Hands phases and actions of a step to whoever looks at them; each may be absent.

    Args:
        timers: sums phases.
        profiler: marks them in a profile.
        pipeline: records actions for the pipeline's profile.
        whereabouts: sees the actions of evaluations, too.
    """

    def __init__(
        self,
        timers: Timers | None = None,
        profiler: Profiler | None = None,
        pipeline: PipelineProfile | None = None,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self._timers, self._profiler, self._pipeline = timers, profiler, pipeline
        self._whereabouts = whereabouts

    def before_step(self, iteration: int) -> None:
        """A step starts after this many iterations."""
        if self._profiler is not None:
            self._profiler.before(iteration)
        if self._pipeline is not None:
            self._pipeline.begin_step(iteration + 1)

    def after_step(self, iteration: int, data_wait: float) -> None:
        """A step has ended, as this iteration; its rank waited so many seconds for samples.

        Comm: after the last step of a pipeline's profile, a gather over the pipeline group.
        """
        if self._timers is not None:
            self._timers.add("batch-generator", data_wait, 2)
        if self._profiler is not None:
            self._profiler.after(iteration)
        if self._pipeline is not None:
            self._pipeline.end_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context of a part of the step (timing level 1)."""
        with ExitStack() as stack:
            if self._profiler is not None:
                stack.enter_context(self._profiler.phase(name))
            if self._timers is not None:
                stack.enter_context(self._timers(name, 1))
            yield

    def observer(self) -> Observer:
        """Who sees the actions of the coming training step."""
        observers: list[Observer] = [] if self._whereabouts is None else [self._whereabouts]
        if self._profiler is not None and self._profiler.is_on:
            observers.append(self._profiler)
        if self._timers is not None and self._timers.level >= 2:
            observers.append(self._timers)
        if self._pipeline is not None:
            observers.append(self._pipeline)
        if len(observers) > 1:
            return _Several(observers)
        return observers[0] if observers else Unobserved()

    def evaluation_observer(self) -> Observer:
        """Who sees the actions of an evaluation."""
        return self._whereabouts or Unobserved()


def build_timers(config: RunConfig, runtime: Runtime) -> Timers:
    """Timers at the level that the options ask for."""
    options = config.logging
    level = 2 if options.log_straggler else options.timing_log_level
    return Timers(device.Clock(runtime.device), level)


def build_profiler(config: RunConfig, runtime: Runtime) -> Profiler:
    """The profiler of this rank."""
    folder = Path(tensorboard_directory(config) or "profile")
    return Profiler(config.profiling, folder, runtime.device, runtime.ctx.rank)


class _Several:
    """Observers one after the other, from the inside out."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def waiting(self, action: Action) -> AbstractContextManager[None]:
        return self._all([observer.waiting(action) for observer in self._observers])

    def running(self, action: Action) -> AbstractContextManager[None]:
        return self._all([observer.running(action) for observer in self._observers])

    @contextmanager
    def _all(self, contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            yield
