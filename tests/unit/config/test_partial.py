"""One option at fault, any of them: the rules about the others still tell what they find."""

import dataclasses

import pytest

from mcore.config.checks import can_be_scheduled, problems_between
from mcore.config.run import RunConfig
from mcore.training.arguments import build_sections, read
from mcore.training.options import sections

WORDS = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 2 --global-batch-size 64 --train-iters 10 --lr 1e-3 --bf16 --fp16 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --data-path corpus "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)
FIELDS = [
    (name, field.name) for name, kind in sections().items() for field in dataclasses.fields(kind)
]
#: Without one of these nothing can be said about the number of processes, or the precision.
SIZES = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
}
PRECISIONS = {"bf16", "fp16"}


@pytest.fixture(scope="module")
def typed():
    return read(WORDS.split())


def told(arguments, field):
    built, _ = build_sections(arguments)
    config = RunConfig(**built)
    found = " | ".join(problems_between(config, 6))
    assert ("world size (6)" in found) == (field not in SIZES), (field, found)
    assert ("--bf16 and --fp16 exclude" in found) == (field not in PRECISIONS), (field, found)
    can_be_scheduled(config, 8)


@pytest.mark.parametrize("section", sections())
def test_a_value_that_cannot_be_read(typed, section):
    for _, field in (place for place in FIELDS if place[0] == section):
        told(dataclasses.replace(typed, malformed=frozenset({(section, field)})), field)


@pytest.mark.parametrize("value", [-1, 0, float("nan")])
def test_a_number_that_cannot_be(typed, value):
    for section, field in FIELDS:
        kind = sections()[section].__annotations__.get(field, "")
        if ("int" in kind or "float" in kind) and "tuple" not in kind:
            values = {**typed.typed[section], field: value}
            changed = {**typed.typed, section: values}
            told(dataclasses.replace(typed, typed=changed), field)
