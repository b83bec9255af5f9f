"""Commands as Megatron-DeepSpeed's users have them, smaller: they run as what their words mean."""

import json

import pytest

from mcore.errors import ConfigError
from mcore.training.arguments import parse
from mcore.training.prepare import settle_options
from tests.equivalence.program import Layout, train, without_rates
from tests.equivalence.tiny import command

pytestmark = pytest.mark.dist

#: What the tiny command has and these commands spell otherwise is taken out of it.
OLD_WORDS = (
    "--checkpoint-activations --DDP-impl local --data-impl mmap --no-async-tensor-model-parallel-"
    "allreduce --use-flash-attn-v2 --no-query-key-layer-scaling --distributed-backend gloo"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ZERO = {
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e3,
        "allgather_bucket_size": 5e3,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "gradient_clipping": 0.5,
    "activation_checkpointing": {
        "partition_activations": True,
        "contiguous_memory_optimization": True,  # without number_checkpoints, as in the seeds
    },
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}


def without(words, *flags):
    """A command without flags of one value each."""
    kept = list(words)
    for flag in flags:
        place = kept.index(flag)
        del kept[place : place + 2]
    return kept


def test_a_megatron_deepspeed_command_on_two_ranks(corpus, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO))
    plain = command(corpus, 3)
    bare = without(
        plain, "--micro-batch-size", "--global-batch-size", "--clip-grad", "--weight-decay",
        "--adam-beta2", "--lr",
    )  # fmt: skip
    words = f"{OLD_WORDS} --batch-size 1 --deepspeed --deepspeed_config {path}".split()
    same = f"{RECOMPUTE} --zero-stage 2 --overlap-grad-reduce --overlap-param-gather"
    same = f"{same} --ddp-bucket-size 5000".split()
    layout = Layout(dp=2)
    from_file = train([*bare, *words], layout)
    assert len(from_file) == 3
    assert without_rates(from_file) == without_rates(train([*plain, *same], layout))


def test_zero_3_with_a_pipeline(corpus):
    words = command(corpus, 2, "--zero-stage 3 --overlap-comm --allgather-bucket-size 500000000")
    records = train([*words, "--reduce-scatter-bucket-size", "500000000"], Layout(pp=2))
    plain = train(command(corpus, 2), Layout(pp=2))
    assert [r["lm_loss"] for r in records] == pytest.approx([r["lm_loss"] for r in plain], abs=3e-6)


def test_a_batch_triangle_that_does_not_come_out(corpus, tmp_path):
    """64 processes, tensor 8, pipeline 2: 2 x 8 x 4 = 64, and the file says 256."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 256, "gradient_accumulation_steps": 8}))
    words = without(command(corpus, 3), "--micro-batch-size", "--global-batch-size")
    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --batch-size 2"
    sizes = "--num-attention-heads 8 --deepspeed --deepspeed_config"
    arguments = parse([*words, *layout.split(), *sizes.split(), str(path)])
    with pytest.raises(ConfigError) as caught:
        settle_options(arguments, 64)
    for fragment in ("ds.json", "(256)", "(8)", "(4) = 64", "--micro-batch-size 2"):
        assert fragment in str(caught.value)
