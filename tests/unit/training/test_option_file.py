"""`--config FILE`: the names of the command line, which wins over the file."""

import json

import pytest

from mcore.cli.main import main
from mcore.training.arguments import build_config, parse, read

FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 "
    "--group-query-attention --swiglu --disable-bias-linear --lr 1e-4 --data-path 0.3 a 0.7 b "
    "--split 90,10,0 --seq-length 16 --no-load-rng --micro-batch-size 2 --train-iters 4 "
    "--tokenizer-type NullTokenizer --vocab-size 100"
)

FLAT = """
num-layers: 4  # with dashes
hidden_size: 32
num-attention-heads: 4
num_query_groups: 2
group-query-attention: true
swiglu: true
disable-bias-linear: yes
lr: 1e-4
data-path: [0.3, a, 0.7, b]
split: 90,10,0
seq-length: 16
load-rng: false
batch-size: 2
train-iters: 4
bf16: false
save: null
tokenizer-type: NullTokenizer
vocab-size: 100
"""

NESTED = """
model:
  num_layers: 4
  hidden-size: 32
  num-attention-heads: 4
  num_query_groups: 2
  gated_linear_unit: true
  add_bias_linear: false
optimizer: {lr: 0.0001}
data:
  data_path:
  - 0.3
  - a
  - 0.7
  - b
  split: "90,10,0"
training: {seq_length: 16, micro_batch_size: 2, train_iters: 4}
checkpoint: {load_rng: off}
tokenizer: {tokenizer_type: nulltokenizer, vocab_size: 100}
group-query-attention: true
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("text", [FLAT, NESTED])
def test_a_file_means_what_the_flags_mean(file, text):
    from_file = build_config(parse(["--config", file(text)]))
    assert from_file == build_config(parse(FLAGS.split()))


def test_the_command_line_wins_and_the_origin_is_known(file):
    path = file(FLAT)
    arguments = parse(["--config", path, "--lr", "1e-3", "--train-iters", "9"])
    config = build_config(arguments)
    assert (config.optimizer.lr, config.training.train_iters) == (1e-3, 9)
    assert arguments.source("optimizer", "lr").spelled == "--lr"
    assert arguments.source("model", "num_layers").spelled == f"{path} line 2"
    assert arguments.source("model", "kv_channels").kind == "default"
    assert any("--batch-size is an old name" in note for note in arguments.notes)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("\nnum-layer: 4", ["line 2", "'--num-layer'", "did you mean --num-layers"]),
        ("num-layers: four", ["line 1", "--num-layers", "'four'"]),
        ("datta: {split: 1}", ["line 1", "'datta'", "did you mean data?"]),
        ("model:\n  lr: 4", ["line 2", "lr belongs to optimizer, not to model"]),
        ("num-experts: 8", ["line 1", "--num-experts is not available"]),
        ("bf16: 1", ["line 1", "bf16 is a switch"]),
        ("lr: true", ["line 1", "lr takes a value"]),
        ("lr: 1\nlr: 2", ["line 2", "line 1 already"]),
        ("lr-decay-style: round", ["line 1", "'round'", "cosine"]),
        ("lr: [1, 2]", ["line 1", "--lr does not take '1 2'"]),
        ("- lr", ["must hold"]),
        ("lr: {", ["cannot be read", "line 1"]),
        ("config: other.yaml", ["line 1", "unknown flag"]),
    ],
)
def test_what_a_file_says_wrong_is_told_with_its_line(file, text, fragments):
    (problem,) = read(["--config", file(text)]).problems
    for fragment in fragments:
        assert fragment in problem


def test_a_file_that_is_absent():
    assert "absent.yaml cannot be read" in read(["--config", "absent.yaml"]).problems[0]


def test_arguments_of_a_program_of_its_own(file):
    def add(parser):
        parser.add_argument("--my-depth", type=int, default=3)

    path = file("my-depth: 5")
    assert parse(["--config", path], add).extra.my_depth == 5
    assert parse(["--config", path, "--my-depth", "7"], add).extra.my_depth == 7
    assert parse([], add).extra.my_depth == 3


def test_what_check_prints_as_json_is_a_file_of_the_same_run(file, capsys):
    assert main(["check", *FLAGS.split(), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)["config"]
    del tree["model"]["num_query_groups"]  # needs its switch, which is no field
    text = json.dumps({**tree, "num-query-groups": 2, "group-query-attention": True}, indent=1)
    again = build_config(parse(["--config", file(text)]))
    assert again == build_config(parse(FLAGS.split()))
