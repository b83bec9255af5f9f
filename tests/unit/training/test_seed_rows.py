"""The words that users of the two seed documents paste: each row acts, is noted, or is refused."""

import inspect
import json
import signal
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from mcore import parallel_state, signals
from mcore.cli.main import main
from mcore.errors import ConfigError, TopologyError
from mcore.training.arguments import read
from mcore.training.prepare import settle_options
from mcore.training.scalars import tensorboard_directory
from tools.preprocess_data import _parser as preprocessing_parser

ROOT = Path(__file__).parents[3]
BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --train-iters 4 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 100 --data-path corpus"
)


def settle(words, world_size=1, base=BASE):
    return settle_options(read(f"{base} {words}".split()), world_size)


def initialize_positionally():
    """Tensor, pipeline, virtual; a data-parallel size is asserted, by keyword alone."""
    names = list(inspect.signature(parallel_state.initialize_model_parallel).parameters)
    assert names[:3] == [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
    ]
    with pytest.raises(TopologyError, match=r"data_parallel_size \(2\) must be world size \(1\)"):
        parallel_state.initialize_model_parallel(1, 1, data_parallel_size=2)


def batch_size():
    settled = settle("--batch-size 2")
    assert settled.config.training.micro_batch_size == 2
    assert any("--batch-size is an old name" in note for note in settled.notes)


def checkpoint_activations():
    model = settle("--micro-batch-size 1 --checkpoint-activations").config.model
    assert (model.recompute_granularity, model.recompute_method, model.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )


def data_impl():
    for kind in ("mmap", "infer", "cached"):
        notes = settle(f"--micro-batch-size 1 --data-impl {kind}").notes
        assert any(note.startswith("--data-impl has no effect") for note in notes)
    with pytest.raises(ConfigError, match="--data-impl lazy"):
        settle("--micro-batch-size 1 --data-impl lazy")


def dataset_impl():
    words = "--input a.jsonl --output-prefix a --workers 1 --tokenizer-type ByteLevelTokenizer"
    for kind in ("mmap", "lazy", "cached"):
        preprocessing_parser().parse_args([*words.split(), "--dataset-impl", kind])


def overlap_and_buckets():
    sizes = "--allgather-bucket-size 5000 --reduce-scatter-bucket-size 5000"
    ddp = settle(f"--micro-batch-size 1 --zero-stage 2 --overlap-comm {sizes}").config.ddp
    assert (ddp.overlap_grad_reduce, ddp.bucket_size) == (True, 5000)


def deepspeed_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.5}))
    config = settle(f"--deepspeed --deepspeed_config {path}").config
    assert (config.training.micro_batch_size, config.optimizer.clip_grad) == (3, 0.5)


def deepspeed_launcher(capsys):
    launcher = "deepspeed --num_nodes=4 --num_gpus=8 pretrain_gpt.py --local_rank 0"
    words = f"{launcher} {BASE} --micro-batch-size 1"
    assert main(["check", *words.split()]) == 0
    assert "torchrun --nnodes 4 --nproc-per-node 8 " in capsys.readouterr().out.splitlines()[0]


def zero_3_with_a_pipeline():
    settled = settle("--micro-batch-size 1 --zero-stage 3 --pipeline-model-parallel-size 2", 4)
    assert settled.config.ddp.sharding_stage == 3
    with pytest.raises(ConfigError, match=r"optim_grads_params|zb-h1"):
        settle(
            "--micro-batch-size 1 --zero-stage 3 --pipeline-model-parallel-size 2 "
            "--pipeline-schedule zb-h1",
            4,
        )


def batch_triangle(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 256, "gradient_accumulation_steps": 8}))
    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2"
    with pytest.raises(ConfigError, match=r"\(256\) .*\(2\) .*\(8\) .*\(4\) = 64"):
        settle(f"{layout} --batch-size 2 --deepspeed_config {path}", 64)
    assert settle(f"{layout} --deepspeed_config {path}", 64).config.training.micro_batch_size == 8


def contiguous_memory(tmp_path):
    path = tmp_path / "ds.json"
    blocks = {"partition_activations": True, "contiguous_memory_optimization": True}
    path.write_text(json.dumps({"activation_checkpointing": blocks}))
    assert settle(f"--micro-batch-size 1 --deepspeed_config {path}").notes


def save_signal():
    """Whole jobs are signalled in tests/cli/test_signals.py."""
    assert signals.SAVE_SIGNAL == signal.SIGUSR1
    assert signal.SIGTERM in signals.EXIT_SIGNALS


def tensorboard_at_the_save_root():
    config = settle("--micro-batch-size 1 --save out --save-interval 2").config
    assert tensorboard_directory(config) == "out/tensorboard"


def validator(tmp_path, capsys):
    assert main(["ckpt", "verify", str(tmp_path)]) != 0
    assert str(tmp_path) in capsys.readouterr().err


def deepspeed_folder(tmp_path, capsys):
    """Folders that DeepSpeed wrote are read in tests/unit/convert/test_deepspeed.py."""
    folders = ["--deepspeed", str(tmp_path), "--save", str(tmp_path / "x")]
    assert main(["convert", "deepspeed-to-mcore", *folders]) != 0
    assert capsys.readouterr().err


def any_layout():
    """Nothing about a checkpoint is asked; tests/equivalence/test_reshard_ring.py goes round."""
    settle("--micro-batch-size 1 --tensor-model-parallel-size 8 --ckpt-format torch_dist", 8)


def installation():
    """Packages come by name and version alone."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("dependencies = [", 1)[1].split("]", 1)[0]
    requirements = [Requirement(line) for line in yaml.safe_load(f"[{block}]")]
    assert requirements
    assert all(requirement.url is None for requirement in requirements)


def labs():
    """They run in tests/unit/docs/test_commands.py, and lab A in tests/unit/examples."""
    for name in ("zero_stages.py", "labs/lab_b.sh", "labs/lab_c.sh", "labs/compare.py"):
        assert (ROOT / "examples" / name).exists()


ROWS = {
    "initialize_model_parallel(tp_size, pp_size, dp_size)": initialize_positionally,
    "--batch-size 2": batch_size,
    "--checkpoint-activations": checkpoint_activations,
    "--data-impl mmap": data_impl,
    "--dataset-impl mmap": dataset_impl,
    "--overlap-comm, --allgather-bucket-size, --reduce-scatter-bucket-size": overlap_and_buckets,
    "--deepspeed --deepspeed_config ds.json": deepspeed_file,
    "deepspeed --num_nodes=4 --num_gpus=8 pretrain_gpt.py": deepspeed_launcher,
    "ZeRO stage 3 and --pipeline-model-parallel-size 2": zero_3_with_a_pipeline,
    "64 GPUs, TP8 PP2, micro 2, train_batch_size 256, GAS 8": batch_triangle,
    "contiguous_memory_optimization without number_checkpoints": contiguous_memory,
    "SIGUSR1 saves a checkpoint": save_signal,
    "tensorboard --logdir=$CHECKPOINT_PATH": tensorboard_at_the_save_root,
    "load_checkpoint(path) as a validator": validator,
    "checkpoint tree of DeepSpeed": deepspeed_folder,
    "resume needs identical TP/PP": any_layout,
    "pip install -r requirements.txt": installation,
    "labs A, B and C": labs,
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_contract(row, tmp_path, capsys):
    given = {"tmp_path": tmp_path, "capsys": capsys}
    check = ROWS[row]
    check(**{name: given[name] for name in inspect.signature(check).parameters})
