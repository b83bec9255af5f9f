"""A rank's own gradients after every microbatch, whatever would be summed with them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from mcore.distributed import DataParallelModule
from mcore.pipeline_parallel.actions import Action, Kind
from mcore.pipeline_parallel.hooks import Observer
from mcore.training.non_finite import Evidence


class GradientProbe(Observer):
    """Looks at a rank's own gradients after every backward: for a step that is run again.

    Args:
        evidence: takes down what is seen.
        chunks: this rank's model chunks.
        inner: sees every action too.
    """

    def __init__(
        self, evidence: Evidence, chunks: Sequence[DataParallelModule], inner: Observer
    ) -> None:
        self._evidence = evidence
        self._chunks = chunks
        self._inner = inner
        self._microbatch: int | None = None
        self._has_looked = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the step: keep every rank's gradients apart until they were looked at."""
        with ExitStack() as stack:
            for chunk in self._chunks:
                if chunk.ddp_config.sharding_stage < 2:
                    stack.enter_context(chunk.no_sync())  # no bucket is reduced in a backward
                else:
                    stack.enter_context(self._on_their_way(chunk))
            yield

    def waiting(self, action: Action) -> AbstractContextManager[None]:
        """Nothing to see."""
        return self._inner.waiting(action)

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Look once the backward is done."""
        self._microbatch, self._has_looked = action.microbatch, False
        with self._inner.running(action):
            yield
        if action.kind is not Kind.FORWARD and not self._has_looked:
            self.look(action.chunk)

    def look(self, chunk: int) -> None:
        """Look at what a chunk has accumulated; before its reduction starts, within an action."""
        self._has_looked = True
        if self._chunks[chunk].ddp_config.sharding_stage < 2:
            self._evidence.note_own_gradients([self._chunks[chunk]], self._microbatch)

    @contextmanager
    def _on_their_way(self, chunk: DataParallelModule) -> Iterator[None]:
        """See gradients as autograd hands them over: nothing of a rank's own is kept afterwards.

        ZeRO-3 computes with gathered parameters, which a module has from its forward on.
        """
        names = {id(param): name for name, param in chunk.trained_parameters()}
        hooked: dict[int, Tensor] = {}
        handles: list[Any] = []
        for module in chunk.module.modules():
            own = {
                attribute: names[id(param)]
                for attribute, param in module.named_parameters(recurse=False)
                if id(param) in names
            }
            if own:
                look = partial(self._hook_parameters, own, hooked, handles)
                handles.append(module.register_forward_pre_hook(look))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook_parameters(
        self,
        own: Mapping[str, str],
        hooked: dict[int, Tensor],
        handles: list[Any],
        module: nn.Module,
        _: Any,
    ) -> None:
        for attribute, param in module.named_parameters(recurse=False):
            if attribute in own and param.requires_grad and id(param) not in hooked:
                hooked[id(param)] = param
                handles.append(param.register_hook(partial(self._see, own[attribute])))

    def _see(self, name: str, grad: Tensor) -> None:
        self._evidence.note_gradient(name, grad, self._microbatch)
