import dataclasses
import typing
from typing import Literal, get_args, get_origin

import pytest
import torch

from mcore.config.command_line import flag_names
from mcore.config.fields import flag_of
from mcore.config.run import RunConfig
from mcore.errors import ConfigError
from mcore.training.arguments import build_config, overrides, parse

MODEL = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"]
SECTIONS = typing.get_type_hints(RunConfig)


def all_flags():
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            described = flag_of(field)
            if described is not None and not described.hidden:
                for name in flag_names(field, described):
                    yield pytest.param(section, field, hints[field.name], name, id=name)


def example(hint):
    """(words, value) that a flag of this type reads."""
    if hint is bool:
        return [], None
    arguments = [arg for arg in get_args(hint) if arg is not type(None)]
    if get_origin(hint) is Literal:
        return [str(get_args(hint)[-1])], get_args(hint)[-1]
    if get_origin(hint) is tuple:
        one = get_args(hint)[0]
        length = 2 if get_args(hint)[-1] is Ellipsis else len(get_args(hint))
        return ["7"] * length, tuple(one(7) for _ in range(length))
    if arguments:
        return example(arguments[0])
    return ["7"], hint(7)


@pytest.mark.parametrize(("section", "field", "hint", "name"), all_flags())
def test_every_spelling_of_every_field_sets_that_field(section, field, hint, name):
    words, value = example(hint)
    if hint is bool:
        value = not field.default
    extra = ["--group-query-attention"] if field.name == "num_query_groups" else []
    arguments = parse([name, *words, *extra])
    typed = {(s, f): v for s, values in arguments.typed.items() for f, v in values.items()}
    assert typed == {(section, field.name): value}


def test_help_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    assert "--tensor-model-parallel-size N" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ("--num-layer 2", ["unknown flag '--num-layer'", "--num-layers"]),
        ("--tensor-model-parallel 2", ["--tensor-model-parallel-size"]),
        ("--tensor-parallel-model-size 2", ["--tensor-model-parallel-size"]),
        ("--lr-decay-stile cosine", ["--lr-decay-style"]),
        ("--sequence_parallel", ["--sequence-parallel"]),
        ("--nonsense-xyz --foo", ["'--nonsense-xyz'", "'--foo'"]),
        ("--num-layers=two", ["--num-layers", "'two'"]),
        ("--num-layers", ["--num-layers", "expected one argument"]),
        ("--lr-decay-style cosin", ["cosin", "linear", "WSD"]),
        ("7", ["unknown argument '7'"]),
        ("--num-experts 8", ["--num-experts is not available", "mixture"]),
    ],
)
def test_what_is_not_a_flag_is_refused_with_a_hint(words, fragments):
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("--batch-size 2", "--micro-batch-size 2"),
        (
            "--checkpoint-activations",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        ("--overlap-comm", "--overlap-grad-reduce"),
        ("--reduce-scatter-bucket-size 500", "--ddp-bucket-size 500"),
        ("--allgather-bucket-size 500", "--ddp-bucket-size 500"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--data-impl mmap", ""),
        ("--data-impl infer", ""),
    ],
)
def test_old_and_foreign_spellings_mean_what_they_say_and_leave_a_note(words, same):
    legacy, plain = parse(words.split()), parse(same.split())
    assert legacy.typed == plain.typed
    assert any(words.split()[0] in note for note in legacy.notes)
    assert plain.notes == ()


def test_an_old_spelling_that_contradicts_the_new_one_is_refused():
    with pytest.raises(ConfigError, match=r"--batch-size .* 4"):
        parse(["--batch-size", "2", "--micro-batch-size", "4"])


def test_launchers_local_rank_flag():
    assert parse(["--local_rank", "3"]).get("runtime", "local_rank") == 3


def test_grouped_queries_need_their_switch():
    with pytest.raises(ConfigError, match="--group-query-attention"):
        parse(["--num-query-groups", "2"])
    assert parse(["--group-query-attention"]).typed["model"] == {"num_query_groups": 1}


def test_arguments_of_a_program_of_its_own():
    def add(parser):
        parser.add_argument("--my-depth", type=int, default=3)
        parser.add_argument("--my-name")

    extra = parse(["--my-name", "x", *MODEL], add).extra
    assert (extra.my_depth, extra.my_name) == (3, "x")
    with pytest.raises(ConfigError, match="--my-depth"):
        parse(["--my-dept", "4"], add)


def test_the_model_has_to_come_from_somewhere():
    with pytest.raises(ConfigError, match=r"--hidden-size.*--use-checkpoint-args"):
        build_config(parse(["--num-layers", "2"]))


STORED = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "ffn_hidden_size": 64,
    "position_embedding_type": "rope",
    "rotary_base": 500000.0,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "vocab_size": 77,
    "tokenizer_type": "NullTokenizer",
    "seq_length": 24,
    "max_position_embeddings": 48,
}


def test_a_checkpoint_supplies_the_model():
    config = build_config(parse([]), STORED)
    assert (config.model.num_layers, config.model.query_groups) == (4, 2)
    assert config.model.layernorm_epsilon == 1e-6
    assert config.model.gated_linear_unit
    assert config.gpt.rotary_base == 500000.0
    assert config.gpt.untie_embeddings_and_output_weights
    assert config.tokenizer.vocab_size == 77
    assert config.training.seq_length == 24
    assert config.max_positions == 48
    options = config.model_options()
    assert {name: options[name] for name in STORED} == STORED


def test_a_typed_flag_beats_the_checkpoint_and_is_told():
    arguments = parse(["--rotary-base", "1000", "--hidden-dropout", "0", "--seq-length", "16"])
    config = build_config(arguments, STORED)
    assert config.gpt.rotary_base == 1000.0
    assert config.training.seq_length == 16
    (line,) = overrides(arguments, STORED)
    assert line == "--rotary-base: 1000.0 from the command line, checkpoint 500000.0"


def test_bf16_is_the_type_of_the_parameters():
    assert build_config(parse(MODEL)).model.params_dtype == torch.float32
    assert build_config(parse([*MODEL, "--bf16"])).model.params_dtype == torch.bfloat16


def test_errors_speak_of_flags_and_come_together():
    words = "--num-attention-heads 6 --tensor-model-parallel-size 4 --lr 1e-4 --min-lr 1 --seed 0"
    with pytest.raises(ConfigError) as caught:
        build_config(parse([*MODEL, "--hidden-size", "24", *words.split()]))
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 problems with the options:"
    assert (
        "--num-attention-heads (6) must be divisible by --tensor-model-parallel-size (4)"
        in (lines[1])
    )
    assert "--seed is 0" in lines[2]
    assert "--lr (0.0001) must not be below --min-lr (1.0)" in lines[3]
