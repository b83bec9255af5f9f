"""Curves that a resumed run goes on with: TensorBoard's own reader, and a stand-in for wandb."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from mcore.config.checkpoint import CheckpointConfig
from mcore.config.logging import LoggingConfig
from mcore.config.run import RunConfig
from mcore.config.transformer import TransformerConfig
from mcore.errors import ConfigError
from mcore.training.scalars import TensorBoard, missing_packages, open_scalars


@pytest.fixture(autouse=True)
def numbered(monkeypatch):
    """Files of one second are read in the order of a text that ends in this number."""
    counter = event_file_writer.AtomicCounter(100)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)


def config(save=None, **options):
    return RunConfig(
        model=TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        logging=LoggingConfig(**options),
        checkpoint=CheckpointConfig(save=save),
    )


def points(directory, tag):
    reader = EventAccumulator(str(directory))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_a_resumed_curve_has_each_point_once(tmp_path):
    first = TensorBoard(str(tmp_path), 0, 10)
    for step in range(1, 7):
        first.add({"loss": float(step)}, step)
    first.close()
    resumed = TensorBoard(str(tmp_path), 3, 10)  # from the checkpoint of iteration 3
    for step in range(4, 9):
        resumed.add({"loss": 10.0 + step}, step)
    resumed.close()
    assert points(tmp_path, "loss") == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 14.0), (5, 15.0), (6, 16.0), (7, 17.0), (8, 18.0),
    ]  # fmt: skip


def test_what_is_measured_again_is_drawn_once(tmp_path):
    """A job that is started again after its end; the first one left before the test set."""
    first = TensorBoard(str(tmp_path), 0, 10)
    for step in (1, 2):
        first.add({"lm loss": float(step)}, step)
    first.add({"lm loss validation": 2.5}, 2)
    first.close()
    again = TensorBoard(str(tmp_path), 2, 10, measures_again=True)
    again.add({"lm loss validation": 2.5}, 2)
    again.add({"lm loss test": 3.5}, 2)
    again.close()
    assert points(tmp_path, "lm loss") == [(1, 1.0), (2, 2.0)]
    assert points(tmp_path, "lm loss validation") == [(2, 2.5)]
    assert points(tmp_path, "lm loss test") == [(2, 3.5)]


def test_what_is_measured_again_may_be_drawn_in_a_new_folder(tmp_path):
    again = TensorBoard(str(tmp_path / "new"), 2, 10, measures_again=True)
    again.add({"lm loss validation": 2.5}, 2)
    again.close()
    assert points(tmp_path / "new", "lm loss validation") == [(2, 2.5)]


def test_the_save_root_is_the_default_place(tmp_path):
    (sink,) = open_scalars(config(save=str(tmp_path)), 0)
    sink.close()
    assert list((tmp_path / "tensorboard").iterdir())
    assert open_scalars(config(), 0) == []


@pytest.fixture
def wandb(monkeypatch):
    """Remembers what it was asked for."""
    module = ModuleType("wandb")
    module.runs = []

    def init(**options):
        run = SimpleNamespace(options=options, logged=[], finished=False)
        run.id = options["id"] or f"id{len(module.runs)}"
        run.log = lambda values, step: run.logged.append((step, values))
        run.finish = lambda: setattr(run, "finished", True)
        module.runs.append(run)
        return run

    module.init = init
    module.__spec__ = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_weights_and_biases_gets_the_curves_and_a_resumed_run_goes_on_with_its_run(tmp_path, wandb):
    options = config(save=str(tmp_path), wandb_project="p", wandb_exp_name="n", wandb_entity="e")
    for iteration in (0, 5, 0):
        for sink in open_scalars(options, iteration):
            sink.add({"lm loss": 2.0}, iteration + 1)
            sink.add_by_samples({"lm loss vs samples": 2.0}, 100)
            sink.close()
    first, resumed, anew = wandb.runs
    assert {k: first.options[k] for k in ("project", "name", "entity")} == {
        "project": "p", "name": "n", "entity": "e",
    }  # fmt: skip
    assert first.options["dir"] == str(tmp_path / "wandb")
    elsewhere = config(wandb_project="p", wandb_save_dir=str(tmp_path / "elsewhere"))
    for sink in open_scalars(elsewhere, 0):
        sink.close()
    assert wandb.runs.pop().options["dir"] == str(tmp_path / "elsewhere")
    assert first.options["config"]["model"]["num_layers"] == 1
    assert first.logged == [(1, {"lm loss": 2.0})]
    assert first.finished
    assert (first.options["id"], resumed.options["id"], anew.options["id"]) == (None, "id0", None)
    assert resumed.logged == [(6, {"lm loss": 2.0})]


def test_without_the_package_it_is_refused_before_the_start(monkeypatch):
    monkeypatch.setattr("mcore.training.scalars.importlib.util.find_spec", lambda *_: None)
    (problem,) = missing_packages(LoggingConfig(wandb_project="p"))
    assert "--wandb-project needs the package wandb" in problem
    assert list(missing_packages(LoggingConfig())) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wandb_exp_name": "n"}, "`wandb_exp_name` needs `wandb_project`"),
        ({"log_memory_interval": 150}, "multiple of `log_interval`"),
        ({"tensorboard_queue_size": 0}, "`tensorboard_queue_size` is 0"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        LoggingConfig(**options)
