"""Training runs against figures of Hugging Face models and torch's AdamW, at every layout.

`tests/golden/train` holds, per family, the initial weights, a corpus, the loss, gradient norm and
learning rate of every iteration, and the weights after the last one.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore.convert import hf_to_state, load_model_state, save_model_state, state_to_hf
from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    largest_relative_difference,
    layout_id,
    train,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "train"

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-5
RATE_TOLERANCE = 1e-12
LAYOUT_TOLERANCE = 3e-6
WEIGHT_TOLERANCE = 5e-5

#: Micro batches of 2 where tensor parallelism pays for each message, which is slow over gloo.
DAILY = [
    (SINGLE, 1),
    (Layout(tp=2, sp=True), 2),
    (Layout(tp=4), 2),
    (Layout(pp=4), 1),
    (Layout(tp=2, pp=2, sp=True), 2),
    (Layout(dp=2), 2),
    (Layout(tp=2, pp=2, dp=2), 2),
]


def every_layout():
    """(layout, micro batch) for worlds of 1, 2, 4 and 8."""
    for world, tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        if world % (tp * pp):
            continue
        dp = world // (tp * pp)
        for sp, micro in itertools.product((False, True) if tp > 1 else (False,), (1, 2)):
            if 8 % (micro * dp) == 0:
                yield Layout(tp=tp, pp=pp, dp=dp, sp=sp), micro


def cases():
    for layout, micro in every_layout():
        marks = () if (layout, micro) in DAILY else (pytest.mark.full,)
        yield pytest.param(layout, micro, marks=marks)


class Family:
    """One golden folder: its initial checkpoint, its command line, and the runs made so far."""

    def __init__(self, name, root):
        self.folder = GOLDEN / name
        self.reference = json.loads((self.folder / "reference.json").read_text())
        self.root = root
        self.runs = {}
        options, tensors = hf_to_state(self.folder / "hf_initial")
        save_model_state(root / "initial", options, tensors, {})

    def command(self, micro):
        h = self.reference["hyperparameters"]
        return [
            *("--use-checkpoint-args", "--load", str(self.root / "initial"), "--finetune"),
            *("--data-path", str(self.folder / "text_document"), "--split", h["split"]),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(h["vocab_size"])),
            *("--null-tokenizer-eod-id", str(h["eod_id"]), "--seq-length", str(h["seq_length"])),
            *("--micro-batch-size", str(micro), "--global-batch-size", str(h["global_batch_size"])),
            *("--train-iters", str(h["train_iters"]), "--seed", str(h["seed"])),
            *("--lr", str(h["lr"]), "--min-lr", str(h["min_lr"])),
            *("--lr-decay-style", h["lr_decay_style"]),
            *("--lr-decay-iters", str(h["lr_decay_iters"])),
            *("--lr-warmup-iters", str(h["lr_warmup_iters"])),
            *("--weight-decay", str(h["weight_decay"]), "--clip-grad", str(h["clip_grad"])),
            *("--adam-beta1", str(h["adam_beta1"]), "--adam-beta2", str(h["adam_beta2"])),
            *("--adam-eps", str(h["adam_eps"]), "--eval-iters", "0"),
        ]

    def run(self, layout, micro):
        """Records of a run and where it saved; all runs so far must agree with it."""
        save = self.root / f"{layout}-{micro}"
        iterations = str(self.reference["hyperparameters"]["train_iters"])
        flags = ["--save", str(save), "--save-interval", iterations]
        records = train([*self.command(micro), *flags], layout)
        for other, earlier in self.runs.items():
            assert largest_difference(records, earlier) <= LAYOUT_TOLERANCE, f"against {other}"
        self.runs[layout, micro] = records
        return records, save


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = Family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def assert_equals_reference(records, reference):
    wanted = reference["iterations"]
    assert [r["iteration"] for r in records] == [r["iteration"] for r in wanted]
    assert largest_difference(records, wanted) <= LOSS_TOLERANCE
    assert largest_relative_difference(records, wanted) <= NORM_TOLERANCE
    assert largest_difference(records, wanted, "learning_rate") <= RATE_TOLERANCE


def without_key_biases(name, tensor, hidden):
    """GPT-2 keeps query, key and value biases in one vector. A key bias has no effect on the loss,
    so what Adam makes of its gradient is the sign of rounding errors."""
    if name.endswith("attn.c_attn.bias"):
        return torch.cat([tensor[:hidden], tensor[2 * hidden :]])
    return tensor


def assert_same_weights(folder, wanted_folder, hidden):
    ours = load_file(folder / "model.safetensors")
    wanted = load_file(wanted_folder / "model.safetensors")
    if "lm_head.weight" not in ours:  # tied; whether a file repeats it is the writer's choice
        wanted.pop("lm_head.weight", None)
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            without_key_biases(name, ours[name], hidden),
            without_key_biases(name, tensor, hidden),
            rtol=0,
            atol=WEIGHT_TOLERANCE,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_training_equals_reference(family, folder, layout, micro):
    records, save = family.run(layout, micro)
    assert_equals_reference(records, family.reference)
    options, tensors = load_model_state(save)
    state_to_hf(options, tensors, folder / "hf")
    assert_same_weights(folder / "hf", family.folder / "hf_final", options["hidden_size"])


@pytest.mark.golden
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("layout", "micro"), list(cases()), ids=layout_id)
def test_training_equals_the_reference(families, tmp_path, name, layout, micro):
    assert_training_equals_reference(families(name), tmp_path, layout, micro)


@pytest.mark.golden
@pytest.mark.parametrize(
    ("layout", "micro"),
    [
        pytest.param(Layout(dp=3), 1),
        pytest.param(Layout(pp=4), 2),
        pytest.param(Layout(pp=4, vpp=2), 1),
        pytest.param(Layout(pp=2, vpp=4), 1, marks=pytest.mark.full),
        pytest.param(Layout(tp=2, pp=4, sp=True), 3, marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_deep_pipelines_and_odd_data_parallel_sizes(families, tmp_path, layout, micro):
    assert_training_equals_reference(families("gpt2_8layers"), tmp_path, layout, micro)
