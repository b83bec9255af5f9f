"""Command lines that cannot work are refused before anything is started, in the user's words."""

import re

import pytest

from mcore.config.data import DataConfig
from mcore.errors import ConfigError, McoreError
from mcore.training.arguments import parse
from mcore.training.initialize import Launch
from mcore.training.options import spellings
from mcore.training.places import corpus_files
from mcore.training.prepare import prepare
from mcore.training.pretrain import _refuse

WORDS = {
    "--num-layers": "4",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--micro-batch-size": "1",
    "--global-batch-size": "8",
    "--train-iters": "4",
    "--lr": "1e-3",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
    "--data-path": "corpus",
}


def prepared(world_size, changes=""):
    """Prepare the command line above with words changed, added, or taken out (`--flag -`)."""
    words = dict(WORDS)
    rest = changes.split()
    while rest:
        name = rest.pop(0)
        value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        words[name] = value
        if value == "-":
            del words[name]
    line = [word for pair in words.items() for word in pair if word]
    return prepare(parse(line), Launch(0, world_size, 0))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_command_line_itself_is_fine():
    assert prepared(2, "--tensor-model-parallel-size 2 --sequence-parallel").loads is False


@pytest.mark.parametrize(
    ("world_size", "changes", "fragments"),
    [
        (6, "--tensor-model-parallel-size 4", ["6", "--tensor-model-parallel-size", "4"]),
        (3, "--pipeline-model-parallel-size 2", ["3", "--pipeline-model-parallel-size", "2"]),
        (3, "", ["--global-batch-size (8)", "data-parallel size (3)", "nearest: 6, 9"]),
        (1, "--num-attention-heads 6 --hidden-size 32", ["--hidden-size (32)", "(6)"]),
        (4, "--num-attention-heads 6 --hidden-size 36 --tensor-model-parallel-size 4",
         ["--num-attention-heads (6)", "--tensor-model-parallel-size (4)", "1, 2, 3, 6"]),
        (4, "--ffn-hidden-size 66 --tensor-model-parallel-size 4",
         ["--ffn-hidden-size (66)", "64 and 68"]),
        (1, "--num-virtual-stages-per-pipeline-rank 2",
         ["2 virtual stages", "--num-virtual-stages-per-pipeline-rank",
          "--pipeline-model-parallel-size"]),
        (2, "--num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2",
         ["--num-layers (4)", "stages (6: --pipeline-model-parallel-size x", "use 6"]),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 15",
         ["--seq-length (15)", "--sequence-parallel", "nearest: 14, 16"]),
        (1, "--max-position-embeddings 8", ["--seq-length (16)", "--max-position-embeddings (8)"]),
        (1, "--tensor-model-parallel-size 0", ["--tensor-model-parallel-size is 0"]),
        (1, "--micro-batch-size -", ["missing: --micro-batch-size"]),
        (1, "--data-path -", ["--data-path"]),
        (1, "--tokenizer-type -", ["--tokenizer-type is missing"]),
        (1, "--vocab-size -", ["--vocab-size"]),
        (1, "--save somewhere", ["--save-interval"]),
        (1, "--save-interval 5", ["--save-interval", "--save"]),
        (1, "--finetune", ["--finetune", "--load"]),
        (1, "--use-checkpoint-args", ["--load"]),
        (1, "--train-iters 4 --train-samples 32", ["--train-iters", "--train-samples"]),
        (1, "--swiglu --openai-gelu", ["--swiglu and --openai-gelu exclude each other"]),
        (1, "--group-query-attention --num-query-groups 3",
         ["--num-attention-heads (4)", "--num-query-groups (3)", "1, 2, 4"]),
        (1, "--normalization BatchNorm", ["--normalization", "'BatchNorm'", "LayerNorm"]),
        (1, "--sliding-window 0", ["--sliding-window is 0"]),
        (1, "--label-smoothing 1 --z-loss-coefficient -2",
         ["--label-smoothing is 1.0", "--z-loss-coefficient is -2"]),
        (1, "--recompute-method block", ["--recompute-method", "--recompute-granularity full"]),
        (1, "--recompute-modules mpl", ["--recompute-modules has mpl", "core_attn"]),
        (1, "--distribute-saved-activations",
         ["--distribute-saved-activations needs --recompute-granularity full"]),
        (1, "--rotary-percent 0", ["--rotary-percent is 0.0"]),
        (1, "--use-rope-scaling", ["--position-embedding-type rope"]),
        (1, "--position-embedding-type rope --kv-channels 5", ["--rotary-percent", "5"]),
        (1, "--micro-batch-size 0 --seed 0", ["--micro-batch-size is 0", "--seed is 0"]),
        (1, "--eval-iters -1", ["--eval-iters is -1", "0"]),
        (1, "--eval-interval 0", ["--eval-interval is 0", "--eval-iters 0"]),
        (1, "--log-interval 0", ["--log-interval is 0"]),
        (1, "--num-workers -1", ["--num-workers is -1"]),
        (1, "--distributed-timeout-minutes 0", ["--distributed-timeout-minutes is 0"]),
        (1, "--optimizer lamb", ["--optimizer", "'lamb'", "adam"]),
        (1, "--lr 1e-4 --min-lr 1", ["--lr (0.0001)", "--min-lr (1.0)"]),
        (1, "--weight-decay -1", ["--weight-decay is -1.0"]),
        (1, "--start-weight-decay 0.1", ["--weight-decay-incr-style"]),
        (1, "--weight-decay-incr-style linear --start-weight-decay 2 --end-weight-decay 1",
         ["--start-weight-decay (2.0)", "--end-weight-decay (1.0)"]),
        (1, "--lr-warmup-iters 4",
         ["the warmup (4, from --lr-warmup-iters)", "--lr-decay-iters", "(4;"]),
        (1, "--train-iters - --train-samples 16 --lr-warmup-samples 16",
         ["the warmup (16, from --lr-warmup-samples)", "(16;"]),
        (1, "--lr-warmup-fraction 0.5 --lr-decay-iters 0",
         ["the warmup (0.0, from --lr-warmup-fraction)", "(0;"]),
        (1, "--lr-warmup-init 1", ["--lr-warmup-init (1.0)", "--lr (0.001)"]),
        (1, "--lr-warmup-samples 2", ["--train-iters", "--lr-warmup-samples"]),
        (1, "--lr-decay-style WSD", ["--lr-wsd-decay-iters"]),
        (1, "--hysteresis 0", ["--hysteresis is 0"]),
        (1, "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
         ["--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"]),
        (1, "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
         ["--use-distributed-optimizer", "--data-parallel-sharding-strategy"]),
        (1, "--overlap-param-gather", ["--overlap-param-gather needs sharding"]),
        (1, "--ddp-bucket-size 5 --ddp-num-buckets 5", ["--ddp-bucket-size", "--ddp-num-buckets"]),
        (4, "--use-distributed-optimizer --num-distributed-optimizer-instances 3",
         ["--num-distributed-optimizer-instances (3)", "(4)"]),
        (1, "--save x --save-interval 2 --keep-every 4", ["--keep-every needs --keep-latest"]),
        (1, "--save x --save-interval 2 --save-retain-interval 3",
         ["--save-retain-interval (3)", "--save-interval (2)"]),
        (1, "--tokenizer-type GPT2BPETokenizer", ["--vocab-file", "--merge-file"]),
        (1, "--vocab-extra-ids -1", ["--vocab-extra-ids is -1"]),
        (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4",
         ["--num-layers (4)", "first stage (4)"]),
        (2, "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved-1f1b",
         ["--num-virtual-stages-per-pipeline-rank"]),
        (2, "--pipeline-model-parallel-size 2 --pipeline-schedule 2f2b", ["2f2b", "1f1b"]),
        (1, "--train-iters - --train-samples 3", ["--train-samples (3)", "(8)"]),
        (1, "--train-iters - --train-samples 2 --global-batch-size - --micro-batch-size 3",
         ["--train-samples (2)", "(3)"]),
        (1, "--micro-batch-size 3 --global-batch-size - --eval-micro-batch-size 2 "
         "--full-validation", ["--eval-global-batch-size (3, that of training)", "(2)", "2, 4"]),
        (1, "--global-batch-size 10 --micro-batch-size 4 --decrease-batch-size-if-needed "
         "--eval-micro-batch-size 5", ["--eval-global-batch-size (8, that of training)", "5, 10"]),
        (2, "--eval-global-batch-size 8 --eval-micro-batch-size 3", ["(8)", "(2) = 6", "6, 12"]),
        (4, "--profile --use-pytorch-profiler --profile-ranks 0 4", ["0 4", "ranks 0 to 3"]),
        (1, "--profile --device cpu", ["--use-pytorch-profiler"]),
        (1, "--record-memory-history --device cpu", ["--record-memory-history needs CUDA"]),
        (1, "--distributed-backend nccl --device cpu", ["--distributed-backend", "gloo"]),
        (1, "--load nowhere", ["--load nowhere holds no checkpoint"]),
        (1, "--load nowhere --use-checkpoint-args --seed 0", ["nowhere", "--seed is 0"]),
        (1, "--metrics-jsonl /dev/null/r --seed 0", ["--metrics-jsonl /dev/null/r", "--seed is 0"]),
        (1, "--log-interval 0 --tensorboard-dir /dev/null/t",
         ["--log-interval is 0", "--tensorboard-dir /dev/null/t cannot be written"]),
        (1, "--tensorboard-dir /dev/null/t", ["--tensorboard-dir /dev/null/t cannot be written"]),
        (2, "--pipeline-model-parallel-size 2 --pipeline-schedule file:plan --seed 0",
         ["2 problems", "schedule file:plan cannot be read", "--seed is 0"]),
        (1, "--autopilot-log /", ["--autopilot-log / cannot be written: it is a directory"]),
        (1, "--save /dev/null/s --save-interval 1", ["--save /dev/null/s cannot be written"]),
        (1, "--tokenizer-type HuggingFaceTokenizer --vocab-size - --tokenizer-model gone --lr -",
         ["gone is not there", "missing: --lr"]),
        (1, "--manual-gc-interval 3", ["--manual-gc-interval (3) needs --manual-gc"]),
        (1, "--recompute-granularity full", ["--recompute-method", "--recompute-num-layers"]),
        (1, "--hidden-dropout 1.5", ["--hidden-dropout is 1.5"]),
        (1, "--bf16 --fp16", ["--bf16", "--fp16"]),
        (1, "--null-tokenizer-eod-id 100", ["--null-tokenizer-eod-id is 100", "0 to 99"]),
    ],
)  # fmt: skip
def test_a_command_line_that_cannot_work_is_refused(world_size, changes, fragments):
    with pytest.raises(McoreError) as caught:
        prepared(world_size, changes)
    for fragment in fragments:
        assert fragment in str(caught.value)
    # Everything is said in flags, nothing in the names of fields.
    words = set(re.findall(r"(?<![\w/-])[a-z]+(?:_[a-z]+)+", str(caught.value)))
    assert words & set(spellings()) == set()


def test_all_problems_are_told_together():
    with pytest.raises(ConfigError) as caught:
        prepared(3, "--lr - --seq-length 40 --max-position-embeddings 32 --save x --data-path -")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{len(lines) - 1} problems with the options:"
    for fragment in ("--lr", "--global-batch-size (8)", "(40)", "--save-interval", "--data-path"):
        assert sum(fragment in line for line in lines[1:]) >= 1


@pytest.mark.parametrize(
    "changes",
    [
        "--global-batch-size 10 --micro-batch-size 4 --decrease-batch-size-if-needed "
        "--eval-micro-batch-size 8",
        "--global-batch-size - --micro-batch-size 6 --eval-micro-batch-size 2",
    ],
)
def test_an_evaluation_batch_that_fits_what_training_uses(changes):
    assert prepared(1, changes).config.evaluation.eval_micro_batch_size is not None


def test_the_files_of_a_program_are_looked_for_with_everything_else(tmp_path):
    """Nothing has been made when the command line is wrong elsewhere."""
    (tmp_path / "half.idx").write_bytes(b"")
    line = [word for pair in WORDS.items() for word in pair][:-2]
    more = "--seed 0 --save new --save-interval 2 --data-path 1 half 2 gone"
    words = [*line, *more.split()]
    with pytest.raises(ConfigError) as caught:
        prepare(parse(words), Launch(0, 1, 0), corpus_files)
    for fragment in ("half.bin is not", "gone.idx is not", "gone.bin is not", "--seed is 0"):
        assert fragment in str(caught.value)
    assert "half.idx" not in str(caught.value)
    assert not (tmp_path / "new").exists()
    for name in ("half", "gone"):
        for ending in ("idx", "bin"):
            (tmp_path / f"{name}.{ending}").write_bytes(b"")
    words[words.index("--seed") + 1] = "7"
    assert prepare(parse(words), Launch(0, 1, 0), corpus_files).loads is False
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--data-path a --validation-set-names x y", "gives x, y to 1 validation sets"),
        ("--data-path a b --validation-set-names x x", "gives x, x to 2 validation sets"),
        ("--data-path 1 a 2 b", "leave the weights out"),
        ("--data-args-path list --validation-set-names x", "gives x to 2 validation sets"),
        ("--data-path a b --validation-set-names x y", None),
        ("--data-path 1 a 2 b --eval-iters 0", None),
        ("--data-path a --validation-set-names x y --split 1", None),
        ("--train-data-path a --validation-set-names x y", None),
    ],
)
def test_validation_sets_are_counted_before_anything_starts(tmp_path, words, problem):
    (tmp_path / "list").write_text("a b")
    line = [word for pair in WORDS.items() for word in pair][:-2]
    for name in "ab":
        for ending in ("idx", "bin"):
            (tmp_path / f"{name}.{ending}").write_bytes(b"")
    words = parse([*line, "--multiple-validation-sets", *words.split()])
    if problem is None:
        prepare(words, Launch(0, 1, 0), corpus_files)
        return
    with pytest.raises(ConfigError) as caught:
        prepare(words, Launch(0, 1, 0), corpus_files)
    assert problem in str(caught.value)


def test_paths_in_files_are_looked_for_too(tmp_path):
    (tmp_path / "words").write_text("3 a 1 b")
    (tmp_path / "splits.json").write_text('{"train": ["a"], "valid": ["c"], "test": null}')
    assert corpus_files(DataConfig(data_args_path="words")) == [
        "words", "a.idx", "a.bin", "b.idx", "b.bin"
    ]  # fmt: skip
    by_split = corpus_files(DataConfig(per_split_data_args_path="splits.json"))
    assert by_split == ["splits.json", "a.idx", "a.bin", "c.idx", "c.bin"]
    assert corpus_files(DataConfig(data_args_path="gone")) == ["gone"]
    assert corpus_files(DataConfig(data_path=("chats.jsonl",), sft=True)) == ["chats.jsonl"]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_batch_that_fits_is_accepted(world_size):
    assert prepared(world_size).config.training.global_batch_size == 8


@pytest.mark.parametrize(("launch", "wait"), [((0, 16, 0), 0), ((8, 16, 0), 3), ((9, 16, 1), 12)])
def test_a_rank_that_alone_sees_an_error_tells_it_late(launch, wait, capsys, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(SystemExit) as left:
        _refuse(ConfigError("no such file"), Launch(*launch))
    assert left.value.code == 2
    assert sum(waits) == wait
    prefix = "" if launch[0] == 0 else f"rank {launch[0]}: "
    assert capsys.readouterr().err == f"error: {prefix}no such file\n"
