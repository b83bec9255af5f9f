"""Training that was interrupted is the training that was not: records, weights, moments, data."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore.checkpoint import complete_iterations, read_common, read_tensors
from mcore.convert import save_model_state
from mcore.errors import ConfigError
from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    largest_relative_difference,
    layout_id,
    read_records,
    series,
    train,
    without_rates,
)
from tests.equivalence.test_layouts import every_layout
from tests.equivalence.tiny import command

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 2e-5


def in_two_parts(corpus, root, iterations, layout, *options, then=None):
    """Records of a run that leaves in the middle and goes on, at another layout if `then`."""
    middle = iterations // 2
    folder = f"--save {root}/save --load {root}/save --save-interval {iterations}"
    words = command(corpus, iterations, DROPOUT, folder, *options)
    log = root / "records.jsonl"
    train([*words, "--exit-interval", str(middle)], layout, records=log)
    trained = [r["iteration"] for r in read_records(log) if "lm_loss" in r]
    assert trained == list(range(1, middle + 1))
    return train(words, then or layout, records=log)


@pytest.mark.parametrize(
    ("layout", "iterations", "options"),
    [
        pytest.param(SINGLE, 20, "--num-workers 2", marks=pytest.mark.full),
        (Layout(tp=2, pp=2, sp=True), 10, ""),
        (Layout(dp=2), 10, "--overlap-grad-reduce --ddp-num-buckets 3 --num-workers 2"),
        pytest.param(Layout(pp=2, vpp=2), 20, "--bf16", marks=pytest.mark.full),
        pytest.param(  # sizes of which no rank has an equal share
            Layout(dp=4),
            20,
            "--data-parallel-sharding-strategy optim --hidden-size 60",
            marks=pytest.mark.full,
        ),
        pytest.param(
            Layout(pp=2),
            10,
            "--num-layers 5 --decoder-first-pipeline-num-layers 3",
            marks=pytest.mark.full,
        ),
        pytest.param(
            Layout(pp=2),
            10,
            "--num-layers 5 --decoder-last-pipeline-num-layers 3",
            marks=pytest.mark.full,
        ),
        pytest.param(Layout(tp=2, pp=2, sp=True), 20, "", marks=pytest.mark.full),
        pytest.param(Layout(tp=2, dp=2, sp=True), 20, "--bf16", marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_resume_at_the_same_layout_is_bit_identical(corpus, tmp_path, layout, iterations, options):
    straight = f"--save {tmp_path}/straight --save-interval {iterations}"
    wanted = train(command(corpus, iterations, DROPOUT, options, straight), layout)
    records = in_two_parts(corpus, tmp_path, iterations, layout, options)
    assert without_rates(records) == without_rates(wanted)
    tensors, expected = read_tensors(tmp_path / "save"), read_tensors(tmp_path / "straight")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def with_virtual_stages():
    """Every layout of 2, 4 and 8 ranks; those with stages also with two virtual ones a rank."""
    for layout in every_layout():
        yield layout
        if layout.pp > 1:
            yield replace(layout, vpp=2)


@pytest.mark.full
@pytest.mark.parametrize("layout", list(with_virtual_stages()), ids=layout_id)
def test_every_layout_resumes(corpus, tmp_path, layout):
    options = "--num-layers 8 --global-batch-size 8"
    wanted = train(command(corpus, 4, DROPOUT, options), layout)
    records = in_two_parts(corpus, tmp_path, 4, layout, options)
    assert without_rates(records) == without_rates(wanted)


@pytest.mark.parametrize(
    ("layout", "then", "iterations"),
    [
        (Layout(tp=2, pp=2, sp=True), Layout(dp=2), 10),
        pytest.param(Layout(tp=2, pp=2, sp=True), Layout(dp=2), 20, marks=pytest.mark.full),
        pytest.param(SINGLE, Layout(tp=4), 20, marks=pytest.mark.full),
        pytest.param(Layout(tp=4, sp=True), Layout(pp=4), 20, marks=pytest.mark.full),
        pytest.param(Layout(dp=2), Layout(tp=2, pp=2, dp=2, sp=True), 20, marks=pytest.mark.full),
        pytest.param(Layout(pp=2, vpp=2), SINGLE, 20, marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_resume_at_another_layout(corpus, tmp_path, layout, then, iterations):
    wanted = train(command(corpus, iterations, DROPOUT), layout)
    records = in_two_parts(corpus, tmp_path, iterations, layout, then=then)
    assert series(records, "iteration") == series(wanted, "iteration")
    assert largest_difference(records, wanted) <= LOSS_TOLERANCE
    assert largest_relative_difference(records, wanted) <= NORM_TOLERANCE
    for name in ("learning_rate", "weight_decay", "consumed_train_samples", "tokens"):
        assert series(records, name) == series(wanted, name)


# What a run may start from, and what it must refuse -------------------------------------------


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """A save root with iterations 2 and 4 of 8, and its records."""
    root = tmp_path_factory.mktemp("saved")
    words = command(corpus, 8, DROPOUT, f"--save {root} --save-interval 2 --exit-interval 4")
    train(words, records=root / "records.jsonl")
    return root


def go_on(corpus, root, *options, iterations=8, **keywords):
    folders = f"--load {root} --save {root} --save-interval 100"
    return train(command(corpus, iterations, DROPOUT, folders, *options), **keywords)


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_exit_interval_saves_and_keeps_the_length(saved):
    common = read_common(saved)
    assert common["iteration"] == 4
    assert common["consumed_train_samples"] == 16
    assert (saved / "latest_checkpointed_iteration.txt").read_bytes() == b"4"
    rates = series(read_records(saved / "records.jsonl"), "learning_rate")
    assert rates[0] == 0.0
    assert rates[3] > 5e-3  # the cosine of 8 iterations, not of 4


def test_an_edited_pointer_decides(corpus, copy):
    (copy / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert go_on(corpus, copy, "--exit-interval 3")[0]["iteration"] == 3


def test_ckpt_step_chooses_an_iteration_and_records_beyond_it_go(corpus, copy):
    log = copy / "records.jsonl"
    before = read_records(log)
    records = go_on(corpus, copy, "--ckpt-step 2 --exit-interval 4", records=log)
    assert without_rates(records) == without_rates(before)


@pytest.mark.parametrize("damage", ["7", "banana", "", "-2"])
def test_a_damaged_pointer_is_told_and_the_newest_checkpoint_is_taken(corpus, copy, capsys, damage):
    (copy / "latest_checkpointed_iteration.txt").write_text(damage)
    assert go_on(corpus, copy, "--exit-interval 5")[0]["iteration"] == 5
    assert "WARNING" in (text := capsys.readouterr().out)
    assert "latest_checkpointed_iteration.txt" in text


def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(corpus, copy, capsys):
    before = read_records(copy / "records.jsonl")
    shard = max(copy.glob("iter_0000004/*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    records = go_on(corpus, copy, "--exit-interval 4", records=copy / "records.jsonl")
    assert shard.name in capsys.readouterr().out
    assert without_rates(records) == without_rates(before)


def test_a_damaged_one_is_none_of_those_that_are_kept(corpus, copy):
    """4 is damaged, 5 has just been written and has not been read: 2 stays until there is 6."""
    shard = max(copy.glob("iter_0000004/*.safetensors"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])
    go_on(corpus, copy, "--keep-latest 2 --exit-interval 5")
    assert complete_iterations(copy) == [2, 4, 5]
    go_on(corpus, copy, "--keep-latest 2 --exit-interval 6")
    assert complete_iterations(copy) == [5, 6]


def test_a_checkpoint_of_another_program_ahead_is_told_at_the_start(corpus, copy, tmp_path):
    for root, iteration in ((copy, 3), (copy, 7), (tmp_path / "new", 1)):
        folder = root / f"iter_000000{iteration}"
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"")
    from_two = f"--load {copy}/iter_0000002 --save {tmp_path}/other --save-interval 3"
    (tmp_path / "other" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "other" / "iter_0000001" / ".metadata").write_bytes(b"")
    assert train(command(corpus, 8, DROPOUT, from_two, "--exit-interval 3"))  # 1 is behind it
    for root, iteration in ((copy, 7), (tmp_path / "new", 1)):
        with pytest.raises(ConfigError, match=f"another program, of iteration {iteration}, "):
            go_on(corpus, root)
    (copy / "iter_0000007" / ".metadata").unlink()
    assert [r["iteration"] for r in go_on(corpus, copy, "--exit-interval 5")] == [5]


def test_a_first_run_starts_new_and_says_so(corpus, tmp_path, capsys):
    records = go_on(corpus, tmp_path / "absent", "--exit-interval 2")
    assert [r["iteration"] for r in records] == [1, 2]
    assert "STARTS NEW" in capsys.readouterr().out


@pytest.mark.parametrize("extra", ["", "--save {0}/other --save-interval 2"])
def test_any_other_absent_checkpoint_is_an_error(corpus, tmp_path, extra):
    words = command(corpus, 2, f"--load {tmp_path}/absent", extra.format(tmp_path))
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        train(words)


def test_absent_is_an_error_on_demand(corpus, tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        go_on(corpus, tmp_path / "absent", "--exit-on-missing-checkpoint")


def test_saving_over_checkpoints_has_to_be_asked_for(corpus, saved, copy):
    words = command(corpus, 2, f"--save {copy} --save-interval 2")
    with pytest.raises(ConfigError, match="--load .*--overwrite-save"):
        train(words)
    with pytest.raises(ConfigError, match="--overwrite-save"):
        train([*words, "--load", str(saved)])
    train([*words, "--overwrite-save"])
    assert read_common(copy)["iteration"] == 2


def test_finetune_takes_the_weights_only(corpus, saved, tmp_path):
    folders = f"--save {tmp_path} --save-interval 3"
    records = train(
        command(corpus, 3, f"--load {saved} --finetune", folders, "--lr 1e-30 --min-lr 0")
    )
    assert [r["iteration"] for r in records] == [1, 2, 3]
    assert records[0]["consumed_train_samples"] == 4
    assert records[0]["learning_rate"] == 0.0
    ours, theirs = read_tensors(tmp_path), read_tensors(saved)
    for name, tensor in theirs.items():
        if name.startswith("model."):
            assert torch.equal(ours[name], tensor), name


def test_no_load_optim_goes_on_with_a_fresh_optimizer(corpus, copy):
    records = go_on(corpus, copy, "--no-load-optim --exit-interval 5")
    assert [r["iteration"] for r in records] == [5]
    assert records[0]["consumed_train_samples"] == 20
    assert read_common(copy)["optimizer"]["step_count"] == 1


def test_a_checkpoint_without_optimizer_names_the_ways_out(corpus, saved, tmp_path):
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in read_tensors(saved).items()
        if name.startswith("model.")
    }
    save_model_state(tmp_path, read_common(saved)["model"], tensors, {})
    words = command(corpus, 2, DROPOUT, f"--load {tmp_path}")
    with pytest.raises(ConfigError, match="--finetune"):
        train(words)


def test_another_model_is_refused_with_the_differences(corpus, saved):
    words = command(corpus, 8, DROPOUT, f"--load {saved} --openai-gelu --norm-epsilon 1e-6")
    with pytest.raises(ConfigError) as caught:
        train(words)
    assert "--openai-gelu" in str(caught.value)
    assert "--norm-epsilon: checkpoint 1e-05, this run 1e-06" in str(caught.value)


def test_the_model_comes_from_the_checkpoint_and_a_typed_flag_wins(corpus, copy, capsys):
    words = command(corpus, 8)
    assert words[:6:2] == ["--num-layers", "--hidden-size", "--num-attention-heads"]
    words = [*words[6:], "--load", str(copy), "--use-checkpoint-args", "--exit-interval", "5"]
    wanted = go_on(corpus, copy, "--exit-interval 5")
    (copy / "latest_checkpointed_iteration.txt").write_text("4")
    assert without_rates(train(words)) == without_rates(wanted)
    capsys.readouterr()
    other = train([*words, "--hidden-dropout", "0"])
    assert "--hidden-dropout: 0.0 from the command line, checkpoint 0.1" in capsys.readouterr().out
    assert other[0]["lm_loss"] != wanted[0]["lm_loss"]
    with pytest.raises(ConfigError, match="another one"):
        train([*words, "--ffn-hidden-size", "64"])


# Edges ----------------------------------------------------------------------------------------


def test_a_finished_run_has_nothing_to_do(corpus, copy):
    go_on(corpus, copy)
    before = sorted(path.name for path in copy.iterdir())
    stamp = (copy / "iter_0000008").stat().st_mtime_ns
    assert go_on(corpus, copy) == []
    assert sorted(path.name for path in copy.iterdir()) == before
    assert (copy / "iter_0000008").stat().st_mtime_ns == stamp


def test_a_finished_run_that_is_started_again_tells_nothing_twice(corpus, copy):
    """It measures the finished model again, which a kill may have prevented."""
    log = copy / "records.jsonl"
    measure = ("--eval-iters 1 --eval-interval 4", "--split 80,10,10")
    first = go_on(corpus, copy, *measure, records=log)
    assert {*first[-1]} - {*first[-2]} == {"test_lm_loss", "test_ppl"}
    log.write_text("".join(f"{json.dumps(record)}\n" for record in first[:-1]))  # killed before
    assert go_on(corpus, copy, *measure, records=log) == first
    reader = EventAccumulator(str(copy / "tensorboard"))
    reader.Reload()
    for split in ("validation", "test"):
        assert [point.step for point in reader.Scalars(f"lm loss {split}")] == [8]


def test_a_checkpoint_beyond_the_end_is_refused(corpus, copy):
    with pytest.raises(ConfigError, match="iteration 4, beyond the 3"):
        go_on(corpus, copy, "--override-opt-param-scheduler", iterations=3)


def test_the_last_iteration_is_saved_once(corpus, tmp_path, capsys):
    words = command(corpus, 4, f"--save {tmp_path} --save-interval 2 --exit-interval 4")
    train(words)
    assert capsys.readouterr().out.count("saved checkpoint") == 2


# Evaluation, logging and saving change nothing ------------------------------------------------


@pytest.mark.parametrize("layout", [SINGLE, Layout(pp=2)], ids=layout_id)
def test_evaluation_logging_and_saving_change_nothing(corpus, tmp_path, layout):
    words = command(corpus, 8, DROPOUT)
    wanted = train(words, layout)
    busy = f"--eval-iters 2 --eval-interval 3 --log-interval 1 --save {tmp_path} --save-interval 1"
    records = train([*words, *busy.split(), "--num-workers", "2"], layout)
    assert without_rates([r for r in records if "lm_loss" in r]) == without_rates(wanted)
    evaluated = [r for r in records if "valid_lm_loss" in r]
    assert [r["iteration"] for r in evaluated] == [3, 6, 8]
    assert all("lm_loss" not in record for record in evaluated)


def test_evaluations_after_a_resume_are_those_of_the_straight_run(corpus, tmp_path):
    evaluate = "--eval-iters 2 --eval-interval 2"
    wanted = train(command(corpus, 8, DROPOUT, evaluate))
    records = in_two_parts(corpus, tmp_path, 8, SINGLE, evaluate)
    assert without_rates(records) == without_rates(wanted)


def test_records_hold_what_they_promise(saved):
    lines = (saved / "records.jsonl").read_text().splitlines()
    for number, record in enumerate(map(json.loads, lines), 1):
        assert record["iteration"] == number
        assert record["consumed_train_samples"] == 4 * number
        assert 0 < record["tokens"] <= 64
        assert record["skipped"] == 0
        assert record["loss_scale"] == 1.0
        assert record["weight_decay"] == 0.1
        assert record["seconds"] > 0


@pytest.mark.full
def test_bf16_follows_float32(corpus):
    layout = Layout(tp=2)
    wanted = train(command(corpus, 8, "--hidden-dropout 0 --attention-dropout 0"), layout)
    records = train(command(corpus, 8, "--hidden-dropout 0 --attention-dropout 0 --bf16"), layout)
    assert 0 < largest_difference(records, wanted) <= 2e-2
