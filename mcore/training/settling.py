"""What follows from an update once the host knows whether it was made."""

from __future__ import annotations

import math

from mcore.errors import NumericsError
from mcore.log import warn_alike
from mcore.training.non_finite import describe, find, look_closely, refuse
from mcore.training.setup import TrainState


def settle(state: TrainState) -> None:
    """Let the schedule follow the last update, now that it is known whether it was made.

    It is asked as late as possible: right before the next update, or before the state is saved.
    The numbers were sent to the host right behind the last update, so that the host waits for that,
    and not for the step that has been handed to the device since.

    Raises:
        NumericsError: the loss or a gradient was not finite, and the run looks for that, or the
            loss scale can fall no further.
    """
    last, state.unsettled = state.unsettled, None
    if last is None:
        return
    applied, grad_norm, loss, is_stuck = last.facts.wait()
    if applied:
        state.scheduler.step(increment=last.samples)
    else:
        state.skipped_iterations += 1
        state.skipped_train_samples += last.samples
    evidence, scales = last.evidence, state.optimizer.config.scales_dynamically
    is_finite, has_loss = math.isfinite(grad_norm), math.isfinite(loss)
    if evidence is not None and not (is_finite and has_loss) and not scales:
        look = look_closely(evidence, state.chunks, was_applied=bool(applied))
        refuse(state.iteration, look, was_applied=bool(applied))
    if is_stuck:
        close = None if evidence is None else look_closely(evidence, state.chunks)
        if close is not None and close.came_again is False:
            refuse(state.iteration, close, was_applied=False)
        where = "" if close is None else f": {close}"
        raise NumericsError(
            f"iteration {state.iteration}: gradients are not finite although the loss scale is at "
            f"its minimum ({state.optimizer.config.min_loss_scale}){where}. Nothing was saved "
            "since. Go back to an earlier checkpoint, or lower the learning rate"
        )
    if scales and not has_loss:
        where = "" if evidence is None else f": {describe(find(evidence, state.chunks))}"
        _warn(state, f"the loss was not finite, which no loss scale mends{where}", applied)
    elif not applied and is_finite:
        _warn(state, f"gradient norm {grad_norm:.3g}", applied)
    elif not applied and not scales:  # overflows are how a dynamic scale finds its place
        _warn(state, "a gradient was not finite", applied)


def _warn(state: TrainState, what: str, applied: float) -> None:
    update = "was made" if applied else "was left out"
    warn_alike("iteration %d: %s; its update %s", state.iteration, what, update)
