"""A flag that does nothing would lie: each one here changes a figure of a tiny run.

Whatever changes no figure on one rank by design (layouts, buckets, where things are written) has
to be named by a test of its own.
"""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from mcore.config.command_line import flag_names
from mcore.config.fields import flag_of
from mcore.training.options import sections
from tests.equivalence.program import series, train
from tests.equivalence.tiny import command, write_corpus

TESTS = Path(__file__).parents[1]
ROPE = "--position-embedding-type rope"
STRETCHED = f"{ROPE} --use-rope-scaling --rope-original-max-positions 16"
FP16 = "--fp16 --initial-loss-scale 1024"
OVERFLOW = "--fp16 --initial-loss-scale 1e30"
SAMPLES = "--train-samples 12 --lr-warmup-iters 0"

#: (the flag with a value, figure that changes, what else the run needs)
PROBES = [
    ("--num-layers 1", "lm_loss", ""),
    ("--hidden-size 24", "lm_loss", ""),
    ("--num-attention-heads 4", "lm_loss", ""),
    ("--num-query-groups 2", "lm_loss", "--group-query-attention"),
    ("--kv-channels 4", "lm_loss", ""),
    ("--ffn-hidden-size 20", "lm_loss", ""),
    ("--normalization RMSNorm", "lm_loss", ""),
    ("--norm-epsilon 0.1", "lm_loss", ""),
    ("--swiglu", "lm_loss", "--ffn-hidden-size 64"),
    ("--openai-gelu", "grad_norm", "--init-method-std 1"),
    ("--no-bias-linear", "grad_norm", ""),
    ("--add-qkv-bias", "grad_norm", "--no-bias-linear"),
    ("--qk-layernorm", "lm_loss", ""),
    ("--sliding-window 2", "grad_norm", ""),
    ("--sliding-window-first-layer 1", "grad_norm", "--sliding-window 2"),
    ("--rotary-interleaved", "grad_norm", ROPE),
    ("--hidden-dropout 0.3", "lm_loss", ""),
    ("--attention-dropout 0.3", "lm_loss", ""),
    ("--init-method-std 0.3", "lm_loss", ""),
    ("--label-smoothing 0.2", "lm_loss", ""),
    ("--z-loss-coefficient 0.1", "lm_loss", ""),
    ("--fp32-residual-connection", "lm_loss", "--bf16"),
    ("--position-embedding-type rope", "lm_loss", ""),
    ("--rotary-base 100", "grad_norm", ROPE),
    ("--rotary-percent 0.5", "grad_norm", ROPE),
    ("--rotary-seq-len-interpolation-factor 4", "grad_norm", ROPE),
    ("--use-rope-scaling", "grad_norm", f"{ROPE} --rope-original-max-positions 16"),
    ("--rope-scaling-factor 2", "grad_norm", STRETCHED),
    ("--rope-low-freq-factor 3", "grad_norm", STRETCHED),
    ("--rope-high-freq-factor 9", "grad_norm", STRETCHED),
    ("--rope-original-max-positions 64", "grad_norm", STRETCHED),
    ("--untie-embeddings-and-output-weights", "lm_loss", ""),
    ("--vocab-size 130", "lm_loss", ""),
    ("--null-tokenizer-eod-id 9", "lm_loss", ""),
    ("--null-tokenizer-pad-id 9", "lm_loss", ""),
    ("--split 40,60,0", "lm_loss", ""),
    ("--reset-position-ids", "lm_loss", ""),
    ("--reset-attention-mask", "grad_norm", ""),
    ("--data-order stable", "lm_loss", ""),
    ("--dataloader-type cyclic", "lm_loss", ""),
    ("--global-batch-size 8", "lm_loss", ""),
    ("--train-iters 9", "learning_rate", ""),
    ("--seq-length 12", "lm_loss", ""),
    ("--seed 7", "lm_loss", ""),
    ("--bf16", "lm_loss", ""),
    ("--optimizer sgd", "lm_loss", ""),
    ("--lr 1e-1", "learning_rate", ""),
    ("--min-lr 9e-3", "learning_rate", ""),
    ("--decoupled-lr 1", "lm_loss", ""),
    ("--decoupled-min-lr 0.9", "lm_loss", "--decoupled-lr 1 --train-iters 4"),
    ("--weight-decay 0.9", "weight_decay", ""),
    ("--no-decoupled-weight-decay", "lm_loss", "--weight-decay 0.9"),
    ("--adam-beta1 0.1", "lm_loss", ""),
    ("--adam-beta2 0.1", "lm_loss", ""),
    ("--adam-eps 1", "lm_loss", ""),
    ("--sgd-momentum 0.1", "lm_loss", "--optimizer sgd --lr 1"),
    ("--lion-beta1 0.1", "lm_loss", "--optimizer lion"),
    ("--lion-beta2 0.1", "lm_loss", "--optimizer lion"),
    ("--muon-momentum 0.1", "lm_loss", "--optimizer muon"),
    ("--no-muon-split-qkv", "lm_loss", "--optimizer muon"),
    ("--muon-nesterov", "lm_loss", "--optimizer muon"),
    ("--muon-num-ns-steps 1", "lm_loss", "--optimizer muon"),
    ("--muon-coefficient-type simple", "lm_loss", "--optimizer muon"),
    ("--muon-scale-mode unit_rms_norm", "lm_loss", "--optimizer muon"),
    ("--muon-extra-scale-factor 0.5", "lm_loss", "--optimizer muon"),
    ("--exp-avg-dtype bf16", "lm_loss", ""),
    ("--exp-avg-sq-dtype bf16", "lm_loss", ""),
    ("--main-grads-dtype bf16", "lm_loss", "--bf16"),
    ("--clip-grad 1e-3", "lm_loss", "--optimizer sgd --lr 1"),
    ("--log-num-zeros-in-grad", "num_zeros", ""),
    ("--log-params-norm", "params_norm", ""),
    ("--fp16", "lm_loss", "--loss-scale 1"),
    ("--loss-scale 8", "loss_scale", ""),
    ("--initial-loss-scale 64", "loss_scale", "--fp16"),
    ("--loss-scale-window 1", "loss_scale", FP16),
    ("--hysteresis 1", "loss_scale", OVERFLOW),
    ("--lr-decay-style constant", "learning_rate", ""),
    ("--lr-decay-iters 50", "learning_rate", ""),
    ("--lr-decay-samples 50", "learning_rate", SAMPLES),
    ("--lr-warmup-fraction 0.9", "learning_rate", "--lr-warmup-iters 0"),
    ("--lr-warmup-iters 2", "learning_rate", ""),
    ("--lr-warmup-samples 8", "learning_rate", SAMPLES),
    ("--lr-warmup-init 1e-3", "learning_rate", ""),
    ("--lr-warmup-style log", "learning_rate", "--lr-warmup-iters 2"),
    ("--lr-wsd-decay-style linear", "learning_rate", "--lr-decay-style WSD --lr-wsd-decay-iters 2"),
    ("--lr-wsd-decay-iters 1", "learning_rate", "--lr-decay-style WSD --lr-wsd-decay-iters 2"),
    (
        "--lr-wsd-decay-samples 4",
        "learning_rate",
        f"{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 8",
    ),
    (
        "--start-weight-decay 0.2",
        "weight_decay",
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.5",
    ),
    (
        "--end-weight-decay 0.9",
        "weight_decay",
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.5",
    ),
    (
        "--weight-decay-incr-style cosine",
        "weight_decay",
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.5",
    ),
    ("--eval-iters 1", "valid_lm_loss", "--eval-interval 2"),
    ("--eval-interval 1", "valid_lm_loss", "--eval-iters 1"),
    ("--exit-interval 2", "lm_loss", ""),
]

#: Flags whose tests name the value.
_BY_VALUE = {"--sft-tokenizer-prompt-format": ["chatml"]}
#: Tests that set every flag or name every flag prove nothing about any.
_OF_ALL_FLAGS = {"test_probes.py", "test_known_flags.py", "test_arguments.py", "flags.txt"}


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "text_document", documents=30)

    @functools.cache
    def run(words):
        small = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
        exact = "--hidden-dropout 0 --attention-dropout 0"
        line = command(corpus, 3, small, exact, words, micro=4)
        if "--train-samples" in words:
            place = line.index("--train-iters")
            del line[place : place + 2]
        return train(line)

    return run


@pytest.mark.parametrize(("flag", "figure", "more"), PROBES, ids=lambda value: str(value))
def test_a_flag_changes_its_figure(figures, flag, figure, more):
    without, with_flag = figures(more), figures(f"{more} {flag}")
    assert series(with_flag, figure) != series(without, figure)


def test_every_other_flag_is_named_by_a_test_of_its_effect():
    probed = {flag.split()[0] for flag, _, _ in PROBES}
    files = [path for path in TESTS.rglob("*.py") if path.name not in _OF_ALL_FLAGS]
    text = "\n".join(path.read_text() for path in files)
    unproved = []
    for kind in sections().values():
        for field in dataclasses.fields(kind):
            described = flag_of(field)
            if described is None or described.hidden:
                continue
            names = flag_names(field, described)
            if probed.intersection(names):
                continue
            spelled = [rf"{re.escape(name)}(?![\w-])" for name in names]
            spelled.append(rf"(?<![\w.]){field.name}=")  # as a keyword of its configuration
            spelled += map(re.escape, _BY_VALUE.get(names[0], []))
            if not re.search("|".join(spelled), text):
                unproved.append(names[0])
    assert unproved == []
