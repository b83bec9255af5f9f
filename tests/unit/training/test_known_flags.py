"""Every flag that a command of Megatron's or Megatron-DeepSpeed's users carries means something."""

from pathlib import Path

import pytest

from mcore.errors import ConfigError
from mcore.training.arguments import build_parser, parse
from mcore.training.legacy_flag import nothing
from mcore.training.legacy_flags import LEGACY, refused_flags

FLAGS = Path(__file__).parents[2] / "golden" / "flags.txt"


def flags():
    lines = [line for line in FLAGS.read_text().splitlines() if not line.startswith("#")]
    return sorted({flag for line in lines for flag in line.split()[1:]})


def test_every_flag_is_known_or_refused_with_a_reason():
    parser, refused = build_parser(), refused_flags()
    for flag in flags():
        if parser.knows(flag):
            continue
        assert flag in refused
        (problem,) = parser.collect([flag, "1"])[1]
        assert problem.startswith(f"{flag} is not available: ")
        assert len(problem.removeprefix(f"{flag} is not available: ")) > 10


def test_no_flag_is_both_built_and_refused():
    assert set(build_parser()._option_string_actions) & set(refused_flags()) == set()


def test_a_flag_without_effect_says_so():
    silent = [item for item in LEGACY.values() if item.help.startswith("No effect")]
    words = [[item.flag, *([] if item.options.get("action") else ["1"])] for item in silent]
    notes = parse([word for one in words for word in one]).notes
    assert [note.split()[0] for note in notes if "no effect" in note] == [w[0] for w in words]


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("--transformer-impl transformer_engine", "one implementation, in plain PyTorch"),
        ("--data-impl lazy", "of the mmap kind"),
        ("--remote-device nvme", "optim_grads_params"),
        ("--ds-sequence-parallel-size 4", "--sequence-parallel"),
        ("--window-size 10,3", "never seen by a GPT model"),
        ("--window-size wide", "no pair of whole numbers"),
        ("--no-pipeline-parallel --pipeline-model-parallel-size 2", "--no-pipeline-parallel"),
    ],
)
def test_values_that_mean_nothing_here_are_refused(words, fragment):
    with pytest.raises(ConfigError, match=fragment):
        parse(words.split())


def test_what_sets_nothing_says_so():
    silent = {item.flag for item in LEGACY.values() if item.sets is nothing and item.note is None}
    assert silent == {"--group-query-attention"}  # half of a pair: test_arguments.py


SAME = [
    ("--window-size (127,0)", "--sliding-window 128"),
    ("--window-size (-1,0)", ""),
    ("--no-pad-vocab-size", "--make-vocab-size-divisible-by 1"),
    ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
    ("--num-key-value-heads 2", "--num-query-groups 2 --group-query-attention"),
    ("--enable-zbh1-pipeline", "--pipeline-schedule zb-h1"),
    ("--partition-activations", "--distribute-saved-activations"),
    ("--persistent-save-interval 5", "--save-interval 5"),
    ("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    ("--zero-reduce-bucket-size 10", "--ddp-bucket-size 10"),
    (
        "--checkpoint-activations --checkpoint-num-layers 2",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"),
    (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
        "--data-parallel-sharding-strategy optim",
    ),
    ("--use-torch-fsdp2", "--data-parallel-sharding-strategy optim_grads_params"),
    ("--zero-stage 2", "--data-parallel-sharding-strategy optim_grads"),
    ("--cpu-optimizer", "--optimizer-cpu-offload"),
    ("--rotary-position-embeddings-theta 5e5", "--rotary-base 5e5"),
    ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
    ("--zero-allgather-bucket-size 10", "--ddp-bucket-size 10"),
    ("--allgather-bucket-size 10", "--ddp-bucket-size 10"),
    ("--reduce-scatter-bucket-size 10", "--ddp-bucket-size 10"),
    ("--overlap-comm", "--overlap-grad-reduce"),
    ("--check-for-spiky-loss", "--loss-spike-policy report"),
    ("--check-for-large-grads --loss-spike-policy skip", "--loss-spike-policy skip"),
    ("--enable-zbh1-exact-semantics", "--pipeline-schedule zb-h1"),
    ("--distribute-checkpointed-activations", "--distribute-saved-activations"),
    ("--disable-pad-vocab-size", "--make-vocab-size-divisible-by 1"),
    ("--batch-size 3", "--micro-batch-size 3"),
    ("--recompute-activations", "--recompute-granularity selective"),
    ("--muon-no-split-qkv", "--no-muon-split-qkv"),
    ("--no-pipeline-parallel", "--pipeline-model-parallel-size 1"),
]


def test_every_name_of_another_program_is_compared_below():
    mapped = {item.flag for item in LEGACY.values() if item.sets is not nothing}
    # What it sets has no other name; its effect is in test_precision.py.
    compared = {word for words, _ in SAME for word in words.split()}
    assert mapped - compared == {"--grad-reduce-in-bf16"}


@pytest.mark.parametrize(("words", "same"), SAME)
def test_names_of_other_programs_mean_the_same(words, same):
    assert parse(words.split()).typed == parse(same.split()).typed
