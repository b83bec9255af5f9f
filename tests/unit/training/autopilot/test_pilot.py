"""Decisions on scripted numbers: one process, no model."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from mcore.config.stability import StabilityConfig
from mcore.errors import NumericsError
from mcore.topology.context import ParallelContext
from mcore.training.autopilot import Autopilot, RollBack
from mcore.training.autopilot.audit import AuditLog
from mcore.training.autopilot.watch import Watch
from mcore.training.step import StepOutcome

NAN, BATCH = math.nan, 4


class Scaler:
    scale = torch.ones(1)


class Schedule:
    def __init__(self):
        self.factors = []

    def scale_lr(self, factor):
        self.factors.append(factor)


class Steps:
    """Gives each iteration its numbers; a list is what repeated attempts give."""

    def __init__(self, numbers):
        self._numbers = numbers
        self.attempts = []

    def attempt(self, state, streams, veto, closely=None):
        del streams, closely
        iteration = state.iteration + 1
        self.attempts.append(iteration)
        given = self._numbers[iteration - 1]
        if isinstance(given, list):
            given = given.pop(0) if len(given) > 1 else given[0]
        loss, norm = (torch.tensor(x, dtype=torch.float64) for x in given)
        applied = torch.isfinite(norm) & ~veto(loss, norm)
        one = torch.ones(())
        return StepOutcome(loss, norm, one, applied, 0.1, 0.0, one, BATCH, {}, BATCH, 0.0)

    def advance(self, state, outcome, *, is_judged=False):
        del is_judged
        state.iteration += 1
        state.consumed_train_samples += outcome.global_batch_size

    def train(self, state, streams, veto=None):
        outcome = self.attempt(state, streams, veto or (lambda *_: torch.tensor(False)))
        self.advance(state, outcome)
        return outcome


def new_state():
    return SimpleNamespace(
        iteration=0,
        consumed_train_samples=0,
        chunks=[],
        optimizer=SimpleNamespace(grad_scaler=Scaler()),
        scheduler=Schedule(),
        autopilot={},
    )


def pilot(tmp_path, numbers, overflows=False, **options):
    config = StabilityConfig(loss_spike_min_samples=3, loss_spike_window=8, **options)
    path = tmp_path / "audit.jsonl"
    made = Autopilot(
        config,
        ParallelContext.single(),
        Steps(numbers),
        AuditLog(str(path)),
        lambda places: {"corpus": [places.start]},
        overflows,
    )
    return made, lambda: [json.loads(line) for line in path.read_text().splitlines()]


def drive(autopilot, state, count):
    return [autopilot.step(state, []) for _ in range(count)]


def calm(count):
    return [(2.0 + 0.01 * (i % 3), 1.0) for i in range(count)]


def test_report_applies_the_update_and_names_the_batch(tmp_path):
    autopilot, audit = pilot(tmp_path, [*calm(5), (9.0, 1.0), *calm(1)], loss_spike_policy="report")
    outcomes = drive(autopilot, new_state(), 7)
    assert all(bool(outcome.applied) for outcome in outcomes)
    (entry,) = audit()
    assert (entry["event"], entry["iteration"], entry["action"]) == ("spike", 6, "applied")
    assert entry["samples"] == [20, 23]
    assert entry["documents"] == {"corpus": [20]}
    assert entry["loss"] == 9.0
    assert entry["limits"]["loss"] == pytest.approx(2.01 * 1.1, rel=1e-12)
    assert entry["medians"]["loss"] == 2.01


@pytest.mark.parametrize("numbers", [(9.0, 1.0), (2.0, 50.0), (math.inf, 1.0), (2.0, NAN)])
def test_skip_leaves_the_update_out(tmp_path, numbers):
    autopilot, audit = pilot(
        tmp_path, [*calm(5), numbers, *calm(1)], loss_spike_policy="skip", rerun_mode="disabled"
    )
    state = new_state()
    outcomes = drive(autopilot, state, 7)
    assert [bool(outcome.applied) for outcome in outcomes] == [True] * 5 + [False, True]
    assert state.consumed_train_samples == 28
    (entry,) = audit()
    assert (entry["iteration"], entry["action"]) == (6, "update left out")


def test_skipped_steps_are_bounded_and_a_good_step_starts_the_count_anew(tmp_path):
    bad = (9.0, 1.0)
    numbers = [*calm(4), bad, bad, *calm(1), bad, bad, bad]
    autopilot, audit = pilot(tmp_path, numbers, loss_spike_policy="skip", loss_spike_max_skips=2)
    state = new_state()
    drive(autopilot, state, 9)
    with pytest.raises(
        NumericsError, match="iteration 10: 3 consecutive .*loss-spike-max-skips 2"
    ) as caught:
        autopilot.step(state, [])
    autopilot.tell_end(caught.value, state)
    end = audit()[-1]
    assert (end["event"], end["iteration"], end["samples"]) == ("give_up", 10, [36, 39])
    assert end["documents"] == {"corpus": [36]}
    assert "3 consecutive" in end["why"]


def go_back(autopilot, state, order, saved):
    """What the loop does: the state of the checkpoint, and the window passed over."""
    state.iteration, state.autopilot = saved["iteration"], saved["autopilot"]
    state.consumed_train_samples = BATCH * state.iteration
    autopilot.rolled_back(order, state)


def save(autopilot, state):
    kept = json.loads(json.dumps(autopilot.saving(state.iteration)))
    return {"iteration": state.iteration, "autopilot": kept}


def train(autopilot, state, until, interval, restart=None):
    """The training loop in small; `restart` stands for a job that is started again."""
    saved = None
    while state.iteration < until:
        if autopilot.passes_over(state.iteration + 1):
            state.iteration += 1
            state.consumed_train_samples += BATCH
        else:
            result = autopilot.step(state, [])
            if isinstance(result, RollBack):
                go_back(autopilot, state, result, saved)
                continue
        if state.iteration % interval == 0:
            saved = save(autopilot, state)
            autopilot = autopilot if restart is None else restart(saved)
    return autopilot


def test_rollback_passes_over_the_window_and_is_bounded(tmp_path):
    numbers = [*calm(6), (9.0, 1.0), (9.0, 1.0)]
    autopilot, audit = pilot(
        tmp_path, numbers, loss_spike_policy="rollback", loss_spike_max_rollbacks=1
    )
    state = new_state()
    drive(autopilot, state, 4)
    saved = save(autopilot, state)
    order = drive(autopilot, state, 3)[-1]
    assert isinstance(order, RollBack)
    assert (state.iteration, order.iteration) == (6, 7)
    go_back(autopilot, state, order, saved)
    assert [autopilot.passes_over(i) for i in range(4, 9)] == [None, *["rollback"] * 3, None]
    entry = audit()[-1]
    assert (entry["event"], entry["checkpoint"], entry["passed_over"]) == ("rollback", 4, [5, 7])
    state.iteration, state.consumed_train_samples = 7, 28
    with pytest.raises(NumericsError, match="1 times already"):
        autopilot.step(state, [])


@pytest.mark.parametrize("interval", [1, 2, 3, 50])
@pytest.mark.parametrize("restarts", [False, True])
def test_saving_what_was_passed_over_is_no_progress(tmp_path, interval, restarts):
    """A fault that stays ends the run after three returns, however often it saves or restarts."""
    options = {"loss_spike_policy": "rollback", "rerun_mode": "disabled"}
    numbers = [*calm(50), *[(NAN, NAN)] * 100]
    autopilot, audit = pilot(tmp_path, numbers, **options)

    def restart(saved):
        again, _ = pilot(tmp_path, numbers, **options)
        again.load_state_dict(saved["autopilot"])
        again.checkpoint = saved["iteration"]
        return again

    with pytest.raises(NumericsError, match="3 times already"):
        train(autopilot, new_state(), 150, interval, restart if restarts else None)
    assert [entry["event"] for entry in audit()].count("rollback") == 3


def test_progress_between_rollbacks_starts_the_count_anew(tmp_path):
    """Six single faults, ten good iterations between them: six returns, and the run goes on."""
    numbers = [*calm(10), *[(NAN, NAN) if i % 10 == 0 else (2.0, 1.0) for i in range(61)]]
    autopilot, audit = pilot(tmp_path, numbers, loss_spike_policy="rollback", rerun_mode="disabled")
    train(autopilot, new_state(), 70, 3)
    assert [entry["event"] for entry in audit()].count("rollback") == 6


def test_a_narrow_window_trains_the_steps_before_it_again(tmp_path):
    autopilot, _ = pilot(
        tmp_path,
        [*calm(6), (9.0, 1.0)],
        loss_spike_policy="rollback",
        loss_spike_skip_iterations=2,
    )
    state = new_state()
    autopilot.checkpoint = 1
    order = drive(autopilot, state, 7)[-1]
    state.iteration = 1
    autopilot.rolled_back(order, state)
    assert [i for i in range(1, 10) if autopilot.passes_over(i)] == [6, 7]


def test_without_a_checkpoint_the_update_is_left_out(tmp_path):
    autopilot, audit = pilot(tmp_path, [*calm(4), (9.0, 1.0)], loss_spike_policy="rollback")
    outcome = drive(autopilot, new_state(), 5)[-1]
    assert not bool(outcome.applied)
    assert audit()[0]["note"] == "there is no checkpoint to go back to"


def test_the_learning_rate_dips_and_recovers_linearly(tmp_path):
    autopilot, _ = pilot(
        tmp_path,
        [*calm(5), (9.0, 1.0), *calm(8)],
        loss_spike_policy="rollback",
        loss_spike_lr_dip=0.2,
        loss_spike_lr_dip_iters=4,
    )
    state = new_state()
    autopilot.checkpoint = 5
    order = drive(autopilot, state, 6)[-1]
    state.autopilot = autopilot.state_dict()
    autopilot.rolled_back(order, state)
    state.iteration = 6
    state.scheduler.factors.clear()
    drive(autopilot, state, 6)
    assert state.scheduler.factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_a_transient_fault_is_made_good_by_a_second_attempt(tmp_path):
    numbers = [*calm(2), [(NAN, NAN), (2.0, 1.0)], *calm(1)]
    autopilot, audit = pilot(tmp_path, numbers, loss_spike_policy="report")
    state = new_state()
    outcomes = drive(autopilot, state, 4)
    assert [bool(outcome.applied) for outcome in outcomes] == [True] * 4
    assert state.iteration == 4
    (entry,) = audit()
    assert (entry["event"], entry["iteration"], entry["loss"]) == ("transient_fault", 3, "nan")


def test_a_real_fault_is_told_and_left_out(tmp_path):
    numbers = [*calm(2), [(NAN, NAN)], *calm(1)]
    autopilot, audit = pilot(tmp_path, numbers, loss_spike_policy="report")
    outcomes = drive(autopilot, new_state(), 4)
    assert [bool(outcome.applied) for outcome in outcomes] == [True, True, False, True]
    (entry,) = audit()
    assert (entry["event"], entry["fault"]) == ("non_finite", "persistent")


def test_overflows_of_a_dynamic_loss_scale_are_no_events(tmp_path):
    numbers = [*calm(4), (2.0, math.inf), (2.0, NAN), (NAN, 1.0)]
    autopilot, audit = pilot(
        tmp_path, numbers, overflows=True, loss_spike_policy="skip", rerun_mode="disabled"
    )
    drive(autopilot, new_state(), 7)
    assert [(entry["event"], entry["iteration"]) for entry in audit()] == [("non_finite", 7)]


@pytest.mark.parametrize("policy", ["off", "report"])
def test_the_threshold_of_the_gradient_norm_holds_with_any_policy(tmp_path, policy):
    numbers = [(2.0, 1.0), (2.0, 3.0), (2.0, 2.5)]
    autopilot, audit = pilot(
        tmp_path, numbers, loss_spike_policy=policy, grad_norm_skip_threshold=2.5
    )
    outcomes = drive(autopilot, new_state(), 3)
    assert [bool(outcome.applied) for outcome in outcomes] == [True, False, True]
    (entry,) = audit()
    assert (entry["event"], entry["iteration"], entry["action"], entry["samples"]) == (
        "grad_norm_above_threshold",
        2,
        "update left out",
        [4, 7],
    )
    assert entry["documents"] == {"corpus": [4]}


@pytest.mark.parametrize("policy", ["off", "report", "skip"])
def test_updates_above_the_threshold_are_bounded_with_any_policy(tmp_path, policy):
    numbers = [(2.0, 3.0), (2.0, 3.0), (2.0, 1.0), (2.0, 3.0), (2.0, 3.0), (2.0, 3.0)]
    options = {"grad_norm_skip_threshold": 2.5, "loss_spike_max_skips": 2}
    autopilot, audit = pilot(tmp_path, numbers, loss_spike_policy=policy, **options)
    state = new_state()
    assert len(drive(autopilot, state, 5)) == 5
    with pytest.raises(NumericsError, match="iteration 6: 3 consecutive .*loss-spike-max-skips 2"):
        drive(autopilot, state, 1)
    assert [entry["iteration"] for entry in audit()] == [1, 2, 4, 5, 6]


def test_what_ends_a_run_without_a_policy_is_told_with_its_batch(tmp_path):
    autopilot, audit = pilot(tmp_path, [(2.0, 1.0), (NAN, NAN)])
    state = new_state()
    drive(autopilot, state, 2)
    autopilot.tell_end(NumericsError("iteration 2: NaN"), state)
    (entry,) = audit()
    assert (entry["event"], entry["iteration"], entry["samples"]) == ("give_up", 2, [4, 7])
    assert (entry["documents"], entry["why"]) == ({"corpus": [4]}, "iteration 2: NaN")


def test_listed_iterations_are_passed_over(tmp_path):
    autopilot, audit = pilot(tmp_path, [], iterations_to_skip=("2", "5-6"))
    found = [i for i in range(1, 9) if autopilot.passes_over(i) == "--iterations-to-skip"]
    assert found == [2, 5, 6]
    autopilot.passed_over(SimpleNamespace(iteration=2, consumed_train_samples=8), 4, "why")
    assert (audit()[0]["event"], audit()[0]["samples"]) == ("passed_over", [4, 7])


def test_a_checkpoint_keeps_what_a_resumed_run_needs(tmp_path):
    options = {"loss_spike_policy": "skip", "loss_spike_max_skips": 2}
    numbers = [*calm(5), (9.0, 1.0), (9.0, 1.0), (9.0, 1.0)]
    first, _ = pilot(tmp_path, numbers, **options)
    state = new_state()
    drive(first, state, 7)
    second, audit = pilot(tmp_path, numbers, **options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    with pytest.raises(NumericsError, match="3 consecutive"):
        second.step(state, [])
    assert audit()[-1]["medians"]["loss"] == 2.01


def test_the_watch_waits_for_nobody_and_reads_what_it_judged():
    watch = Watch(
        StabilityConfig(loss_spike_policy="skip", grad_norm_skip_threshold=5.0),
        ParallelContext.single(),
        overflows=False,
    )
    assert bool(watch.judge(torch.tensor(1.0), torch.tensor(6.0)))
    finding = watch.read()
    assert (finding.is_above_threshold, finding.is_spike, finding.is_finite) == (True, False, True)
    assert (finding.loss, finding.grad_norm) == (1.0, 6.0)
