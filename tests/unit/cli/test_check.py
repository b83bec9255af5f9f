"""`mcore check` examines what `pretrain_gpt.py` would be started with."""

import json

import pytest
import torch

from mcore.checkpoint import save
from mcore.cli.main import main

WORDS = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --batch-size 2 "
    "--global-batch-size 64 --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 100 --data-path corpus --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2"
)
COMMAND = WORDS.split()


def check(capsys, *words):
    status = main(["check", *words])
    return status, capsys.readouterr()


def test_a_command_that_would_run(capsys):
    status, shown = check(capsys, *COMMAND, "--world-size", "16")
    assert status == 0
    lines = shown.out.splitlines()
    assert lines[:4] == [
        "layout        tensor 2 x pipeline 2 x data 4 = 16 processes",
        "pipeline      1f1b, layers of each stage 4 4",
        "batch         micro 2 x microbatches 8 x data 4 = 64 samples, 1,024 tokens a step",
        "training      10 steps, 10,240 tokens",
    ]
    assert "note          --batch-size is an old name: it sets --micro-batch-size" in lines
    assert "absent        corpus.idx is not on this machine" in lines
    (micro,) = (line for line in lines if line.startswith("  --micro-batch-size"))
    assert micro.split() == ["--micro-batch-size", "2", "command", "line:", "--batch-size"]


def test_every_problem_is_told_and_the_status_says_so(capsys):
    """Model options at fault hide neither the batch's rule nor the schedule's."""
    words = [*COMMAND, "--num-attention-heads", "5", "--global-batch-size", "63"]
    status, shown = check(capsys, *words, "--world-size", "16", "--swiglu", "--openai-gelu")
    assert (status, shown.out) == (2, "")
    for fragment in (
        "--hidden-size (32) must be divisible by --num-attention-heads (5)",
        "--num-attention-heads (5) must be divisible by --tensor-model-parallel-size (2)",
        "--swiglu and --openai-gelu exclude each other",
        "--global-batch-size (63) must be a multiple of --micro-batch-size (2) x data-parallel "
        "size (4)",
    ):
        assert fragment in shown.err
    status, shown = check(capsys, *words, "--world-size", "16", "--json")
    told = json.loads(shown.out)
    assert (status, told["ok"], len(told["problems"])) == (2, False, 3)


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ("--openai-gelu --swiglu --world-size 6", ["exclude each other", "(6)"]),
        ("--hidden-dropout 2 --world-size 4 --pipeline-schedule 2f2b", ["is 2.0", "2f2b"]),
        ("--num-layers 8.5 --world-size 4 --global-batch-size 63 --hidden-dropout 2",
         ["'8.5'", "(63)", "is 2.0"]),
        ("--hidden-dropout nan --world-size 6 --pipeline-schedule zb-h1 --zero-stage 2",
         ["--hidden-dropout is nan", "(6)", "zb-h1"]),
        ("--position-embedding-type rope --hidden-dropout 2 --rotary-percent 0.1 --world-size 4",
         ["is 2.0", "rotary positions need an even number"]),
        ("--save-interval 5 --load /dev/null --world-size 4",
         ["--save-interval also needs", "--load /dev/null holds no checkpoint"]),
        ("--train-samples 640 --lr 1e-5 --min-lr 1 --sequence-parallel --seq-length 15 "
         "--world-size 4", ["--train-samples exclude", "--lr (1e-05)", "nearest: 14, 16"]),
        ("--tokenizer-type ByteLevelTokenizer --vocab-size 100 --world-size 5",
         ["--vocab-size is 100; use one of 257", "(5)"]),
        ("--data-parallel-sharding-strategy zero3 --num-distributed-optimizer-instances 0 "
         "--world-size 4", ["zero3", "is 0"]),
        ("--multiple-validation-sets --validation-set-names a b --seed 0 --world-size 4",
         ["gives a, b to 1 validation sets", "--seed is 0"]),
        ("--train-iters 10k --rampup-batch-size 8 8 --world-size 4", ["'10k'", "ramp"]),
    ],
)  # fmt: skip
def test_an_option_at_fault_hides_no_other(capsys, words, fragments):
    status, shown = check(capsys, *COMMAND, *words.split(), "--json")
    problems = json.loads(shown.out)["problems"]
    assert (status, len(problems)) == (2, len(fragments)), problems
    for fragment in fragments:
        assert sum(fragment in problem for problem in problems) == 1, (fragment, problems)


def test_parameters_and_memory(capsys):
    """GPT-3 13B has 12.85e9 parameters; 2 + 16 / 1 bytes each between steps without sharding."""
    sizes = "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --vocab-size 50257"
    words = [*COMMAND, *sizes.split(), "--seq-length", "2048", "--bf16", "--json"]
    status, shown = check(capsys, *words, "--world-size", "4")
    told = json.loads(shown.out)
    assert status == 0
    assert told["parameters"] == 12_853_386_240
    first, last = told["memory"]
    for rank in (first, last):
        assert rank["between_steps"] == 18 * rank["num_parameters"]
        assert rank["peak"] > rank["between_steps"] + rank["activations"]


def test_json(capsys):
    status, shown = check(capsys, *COMMAND, "--world-size", "4", "--json")
    told = json.loads(shown.out)
    assert (status, told["ok"]) == (0, True)
    assert told["layout"]["layers"] == [4, 4]
    assert told["batch"]["num_microbatches"] == 32
    assert told["config"]["training"]["micro_batch_size"] == 2
    assert told["sources"]["training"]["micro_batch_size"] == {
        "kind": "command line",
        "spelled": "--batch-size",
    }
    assert told["sources"]["training"]["seed"] == {"kind": "default", "spelled": ""}


@pytest.mark.parametrize("size", ["0", "many"])
def test_a_world_that_is_none(capsys, size):
    status, shown = check(capsys, *COMMAND, "--world-size", size)
    assert status == 2
    assert "--world-size" in shown.err


def test_nothing_is_started(capsys, monkeypatch):
    monkeypatch.setattr("torch.distributed.init_process_group", None)
    assert check(capsys, *COMMAND, "--world-size", "4")[0] == 0


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("--save made --save-interval 5", "--save made holds checkpoints already"),
        ("--load empty", "--load empty holds no checkpoint"),
        (
            "--save new --load new --save-interval 5 --exit-on-missing-checkpoint",
            "--load new holds",
        ),
        ("--profile --use-pytorch-profiler --profile-ranks 99", "the job has ranks 0 to 3"),
        ("--profile --device cpu", "--use-pytorch-profiler"),
        ("--metrics-jsonl empty", "--metrics-jsonl empty cannot be written: it is a directory"),
        ("--save /dev/null/s --save-interval 5", "--save /dev/null/s cannot be written: /dev/null"),
    ],
)
def test_what_pretraining_refuses_is_refused(capsys, tmp_path, monkeypatch, words, fragment):
    """And nothing is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "latest_checkpointed_iteration.txt").write_text("5")
    before = sorted(tmp_path.iterdir())
    status, shown = check(capsys, *COMMAND, "--world-size", "4", *words.split(), "--seed", "0")
    assert status == 2
    assert fragment in shown.err
    assert "--seed is 0" in shown.err
    assert sorted(tmp_path.iterdir()) == before


def test_the_checkpoint_is_compared(capsys, tmp_path):
    """Its model is another one, which a run would find out when it loads."""
    save(tmp_path, 4, {"model.a": torch.ones(2)}, {"model": {"hidden_size": 64}, "iteration": 4})
    status, shown = check(capsys, *COMMAND, "--world-size", "4", "--load", str(tmp_path))
    assert status == 2
    assert "--hidden-size: checkpoint 64, this run 32" in shown.err


def test_files_of_the_job_need_not_be_here(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "--load elsewhere --save there --save-interval 5 --metrics-jsonl /nowhere/m.jsonl"
    status, shown = check(capsys, *COMMAND, "--world-size", "4", *words.split())
    assert status == 0
    assert "absent        elsewhere is not on this machine" in shown.out.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_a_command_of_deepspeeds_launcher_is_told_as_torchruns(capsys):
    words = f"--num_nodes=4 --num_gpus=8 --hostfile hosts pretrain_gpt.py {WORDS} --local_rank 0"
    status, shown = check(capsys, "deepspeed", *words.split())
    assert status == 0
    first, layout = shown.out.splitlines()[:2]
    assert first.startswith(
        "launch, on every machine: torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d "
        "--rdzv-endpoint HOST:29500 pretrain_gpt.py --num-layers 8"
    )
    assert layout == "layout        tensor 2 x pipeline 2 x data 8 = 32 processes"
    status, shown = check(capsys, "deepspeed", "--num_gpus", "4", "p.py", *COMMAND, "--json")
    assert json.loads(shown.out)["launch"].startswith("torchrun --nproc-per-node 4 p.py --num")
    assert "--json" not in json.loads(shown.out)["launch"]


@pytest.mark.parametrize(
    ("start", "processes"),
    [
        ("torchrun --nproc-per-node 4 pretrain_gpt.py", 4),
        ("/opt/bin/torchrun --nnodes=1:2 --nproc_per_node=8 --rdzv-backend c10d p.py", 16),
        ("torchrun --standalone --nproc-per-node 4 -m pretrain_gpt", 4),
        ("torchrun --nproc-per-node 4 --no-python python -u p.py", 4),
        ("python -m torch.distributed.run --nproc-per-node 4 p.py", 4),
        ("python3.11 -X dev pretrain_gpt.py --world-size 4", 4),
        ("python -m pretrain_gpt --world-size 4", 4),
        ("./pretrain_gpt.py --world-size 4", 4),
        ("--load=absent/torchrun --world-size 4", 4),
    ],
)
def test_a_command_is_taken_with_what_starts_it(capsys, start, processes):
    status, shown = check(capsys, *start.split(), *COMMAND)
    assert status == 0, shown.err
    first = shown.out.splitlines()[0]
    assert first.startswith("layout")
    assert first.endswith(f"= {processes} processes")


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("--nproc-per-node gpu p.py", "--nproc-per-node gpu is no number"),
        ("--nproc-per-node auto p.py", "give --world-size N"),
        ("--nproc-per-node 0 p.py", "from 1 up"),
        ("--nnodes 1:x --nproc-per-node 2 p.py", "--nnodes x"),
        ("--nproc-per-node 4 p.py --world-size 2", "torchrun's own words"),
        ("--no-such-word 4 p.py", "torchrun: "),
        ("", "torchrun: "),
    ],
)
def test_torchruns_words_that_say_too_little_or_too_much(capsys, words, fragment):
    status, shown = check(capsys, "torchrun", *words.split(), *(COMMAND if words else ()))
    assert status == 2
    assert fragment in shown.err


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("--num_gpus 4 p.py --world-size 2", "drop --world-size"),
        ("p.py", "--num_gpus N"),
        ("--num_gpu 4 p.py", "--num_gpu"),
    ],
)
def test_a_launcher_that_says_too_little_or_too_much(capsys, words, fragment):
    status, shown = check(capsys, "deepspeed", *words.split(), *COMMAND)
    assert status == 2
    assert fragment in shown.err
