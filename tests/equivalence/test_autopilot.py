"""Injected faults: the autopilot's run ends with the weights of a run that never met the fault.

Where data was passed over, the other run passes over the same data by `--iterations-to-skip`.
"""

import importlib
import json
import os
import re

import pytest
import torch

from mcore.checkpoint import complete_iterations, read_common, read_tensors
from mcore.errors import NumericsError
from mcore.training.pretrain import pretrain
from tests.equivalence.faults import POISONED, NanActivation, NanGradient, write_poisoned_corpus
from tests.equivalence.program import (
    SINGLE,
    Layout,
    layout_id,
    no_traces,
    series,
    train,
    without_rates,
)
from tests.equivalence.tiny import command

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
#: A run of twelve iterations learns fast, so few of them are the measure of the next.
WINDOW = (
    "--loss-spike-window 4 --loss-spike-min-samples 4 --loss-spike-threshold 3 "
    "--grad-norm-spike-min-factor 2"
)
#: The iteration with the poisoned document.
SPIKE = 11


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    return write_poisoned_corpus(tmp_path_factory.mktemp("poisoned") / "text_document")


def run(corpus, root, layout, *options, iterations=12, words=(), **keywords):
    """Train, and give back the records and the audit log."""
    folders = f"--save {root} --load {root} --save-interval 4"
    line = [*command(corpus, iterations, DROPOUT, WINDOW, folders, *options), *words]
    records = train(line, layout, records=root / "records.jsonl", **keywords)
    path = root / "autopilot.jsonl"
    audit = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return records, audit


def assert_same_end(first, second):
    """Weights and moments bit for bit, progress, and what was recorded on the way."""
    ours, theirs = read_tensors(first), read_tensors(second)
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []
    for name in ("iteration", "consumed_train_samples", "skipped_train_samples", "optimizer"):
        assert read_common(first)[name] == read_common(second)[name], name


def events(audit):
    return [(entry["event"], entry["iteration"]) for entry in audit]


@pytest.fixture
def roots(tmp_path):
    folders = tmp_path / "with", tmp_path / "without"
    for folder in folders:
        folder.mkdir()
    return folders


# --- a gradient that is not a number


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(tp=2), ""),
        pytest.param(Layout(tp=2, pp=2, sp=True), "", marks=pytest.mark.full),
        pytest.param(Layout(tp=2, dp=2), "--zero-stage 2", marks=pytest.mark.full),
        pytest.param(Layout(pp=2, dp=2), "--zero-stage 3", marks=pytest.mark.full),
        pytest.param(Layout(pp=2, dp=2), "--bf16 --num-workers 2", marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_a_transient_fault_leaves_no_trace(corpus, roots, layout, options):
    fault = NanGradient(rank=1, iteration=3, times=1)
    report = f"{options} --loss-spike-policy report"
    got, audit = run(corpus, roots[0], layout, report, iterations=4, providers=fault.providers())
    wanted, _ = run(corpus, roots[1], layout, options, iterations=4)
    assert_same_end(*roots)
    assert without_rates(got) == without_rates(wanted)
    assert events(audit) == [("transient_fault", 3)]
    assert audit[0]["grad_norm"] == "nan"
    assert "gradient of " in audit[0]["found"]


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=2, dp=2)], ids=layout_id)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_real_fault_is_located_and_its_data_left_out(corpus, roots, layout, policy):
    fault = NanGradient(rank=1, iteration=6, times=100)
    got, audit = run(
        corpus,
        roots[0],
        layout,
        f"--loss-spike-policy {policy}",
        iterations=8,
        providers=fault.providers(),
    )
    skipped = "6" if policy == "skip" else "5-6"
    run(corpus, roots[1], layout, f"--iterations-to-skip {skipped}", iterations=8)
    assert_same_end(*roots)
    assert events(audit)[0] == ("non_finite", 6)
    assert audit[0]["fault"] == "persistent"
    assert "micro batch 0, rank 1" in audit[0]["first"]
    assert sum(series(got, "skipped")) == (1 if policy == "skip" else 2)


@pytest.mark.dist
def test_a_fault_before_a_sum_over_ranks_is_of_the_rank_that_has_it(corpus, tmp_path):
    """The layer's output is spoiled on both tensor-parallel ranks, its input on one alone."""
    layout = Layout(tp=2, pp=2, sp=True)
    flags = "--loss-spike-policy skip"
    providers = NanActivation(rank=3, iteration=3).providers()
    _, audit = run(corpus, tmp_path, layout, flags, iterations=4, providers=providers)
    place = r"input of decoder\.layers\.\d\.mlp\.linear_fc2, micro batch 0, rank 3"
    assert re.fullmatch(place, audit[0]["first"])


def test_a_run_whose_gradients_stay_so_gives_up(corpus, tmp_path):
    fault = NanGradient(rank=0, iteration=None, times=100)
    options = "--loss-spike-policy rollback --loss-spike-max-skips 1 --rerun-mode disabled"
    with pytest.raises(NumericsError, match="--loss-spike-max-skips 1"):
        run(corpus, tmp_path, SINGLE, options, iterations=3, providers=fault.providers())
    audit = [json.loads(line) for line in (tmp_path / "autopilot.jsonl").read_text().splitlines()]
    assert events(audit) == [("non_finite", 1), ("non_finite", 2), ("give_up", 2)]
    assert audit[-1]["samples"] == [4, 7]
    assert audit[0]["note"] == "there is no checkpoint to go back to"


BREAKING = "--lr 1e38 --clip-grad 0 --save-interval 1"


def test_weights_that_are_not_finite_are_never_saved(corpus, tmp_path):
    """Going back finds good ones each time; that no data is at fault is told at the end."""
    flags = f"{BREAKING} --loss-spike-policy rollback"
    with pytest.raises(NumericsError, match=r"max-rollbacks\).*already not finite before the step"):
        run(corpus, tmp_path, SINGLE, flags, iterations=20)
    saved = complete_iterations(tmp_path)
    assert saved[0] == 1
    assert saved[-1] == 7
    for iteration in saved:
        tensors = read_tensors(tmp_path, iteration=iteration)
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "options"),
    [(Layout(pp=2), ""), (Layout(dp=2), "--zero-stage 3 --loss-spike-policy report")],
    ids=layout_id,
)
def test_a_run_whose_last_update_broke_its_weights_fails(corpus, tmp_path, layout, options):
    message = "iteration 2: the run ends with weights that are not finite"
    with pytest.raises(Exception, match=message):
        run(corpus, tmp_path, layout, f"{BREAKING} {options}", iterations=2)
    assert complete_iterations(tmp_path) == [1]


# --- a document that spikes the loss


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(dp=2), ""),
        pytest.param(Layout(tp=2, dp=2, sp=True), "", marks=pytest.mark.full),
        pytest.param(SINGLE, "--num-workers 2 --async-save", marks=pytest.mark.full),
        pytest.param(Layout(tp=2, pp=2), "--num-workers 2 --async-save", marks=pytest.mark.full),
        pytest.param(Layout(tp=2, dp=2), "--zero-stage 1", marks=pytest.mark.full),
        pytest.param(Layout(pp=2, dp=2), "--zero-stage 3", marks=pytest.mark.full),
        pytest.param(Layout(tp=2, dp=2), "--bf16", marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_a_rollback_equals_a_run_that_never_saw_the_window(poisoned, roots, layout, options):
    told = roots[0].parent / "told"
    script = roots[0].parent / "alert.sh"
    script.write_text(f"cat >> {told}\n")
    words = ["--loss-spike-policy", "rollback", "--on-alert", f"sh {script}"]
    got, audit = run(poisoned, roots[0], layout, options, words=words)
    wanted, _ = run(poisoned, roots[1], layout, f"{options} --iterations-to-skip 9-11")
    assert_same_end(*roots)
    assert without_rates(got) == without_rates(wanted)
    assert events(audit) == [
        ("spike", SPIKE),
        ("rollback", SPIKE),
        *[("passed_over", iteration) for iteration in (9, 10, 11)],
    ]
    spike, back = audit[:2]
    assert [json.loads(line) for line in told.read_text().splitlines()] == [spike, back]
    assert POISONED in spike["documents"][poisoned]
    assert spike["samples"] == [40, 43]
    assert (back["checkpoint"], back["passed_over"]) == (8, [9, 11])
    assert back["consumed_train_samples"] == 32
    assert [entry["samples"] for entry in audit[2:]] == [[32, 35], [36, 39], [40, 43]]
    assert series(got, "consumed_train_samples") == list(range(4, 52, 4))
    assert [r["iteration"] for r in got if r["skipped"]] == [9, 10, 11]
    common = read_common(roots[0])
    assert common["skipped_train_samples"] == 12
    assert common["opt_param_scheduler"]["num_steps"] == 48 - 12
    assert common["autopilot"]["windows"] == [[9, 11]]


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=2, dp=2)], ids=layout_id)
def test_a_skipped_update_equals_a_run_that_never_saw_the_batch(poisoned, roots, layout):
    got, audit = run(poisoned, roots[0], layout, "--loss-spike-policy skip")
    run(poisoned, roots[1], layout, f"--iterations-to-skip {SPIKE}")
    assert_same_end(*roots)
    assert events(audit) == [("spike", SPIKE)]
    assert [r["iteration"] for r in got if r["skipped"]] == [SPIKE]


@pytest.mark.full
def test_a_narrow_window_leaves_out_the_spike_alone(poisoned, roots):
    options = "--loss-spike-policy rollback --loss-spike-skip-iterations 1"
    got, _ = run(poisoned, roots[0], SINGLE, options)
    wanted, _ = run(poisoned, roots[1], SINGLE, f"--iterations-to-skip {SPIKE}")
    assert_same_end(*roots)
    assert without_rates(got) == without_rates(wanted)


@pytest.mark.full
def test_a_run_that_stops_after_its_rollback_goes_on_alike(poisoned, roots):
    policy = "--loss-spike-policy rollback --loss-spike-lr-dip 0.5 --loss-spike-lr-dip-iters 4"
    straight, _ = run(poisoned, roots[0], SINGLE, policy)
    run(poisoned, roots[1], SINGLE, policy, f"--exit-interval {SPIKE}")
    resumed, audit = run(poisoned, roots[1], SINGLE, policy)
    assert_same_end(*roots)
    assert without_rates(resumed) == without_rates(straight)
    assert events(audit).count(("rollback", SPIKE)) == 1


@pytest.mark.skipif("RANK" in os.environ, reason="a run of one process, and torchrun has several")
def test_numbers_that_cannot_be_trained_on_have_their_own_exit_code(
    corpus, tmp_path, monkeypatch, capsys
):
    """And the alert is sent with the default policy as well."""
    fault = NanGradient(rank=0, iteration=2, times=100)
    codes = []
    module = importlib.import_module("mcore.training.pretrain")
    monkeypatch.setattr(module, "leave_now", codes.append)
    providers = fault.providers()
    words = [*command(corpus, 3), "--device", "cpu", "--on-alert", f"cat > {tmp_path}/told"]
    with no_traces():
        pretrain(providers.datasets, providers.model, providers.forward_step, argv=words)
    assert codes == [17]
    assert "iteration 2: NaN or infinity: gradient of " in capsys.readouterr().err
    told = json.loads((tmp_path / "told").read_text())
    assert (told["event"], told["iteration"], told["samples"]) == ("give_up", 2, [4, 7])
    assert told["documents"].keys() == {corpus}
    assert "NaN or infinity: gradient of" in told["why"]
