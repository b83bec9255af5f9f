"""Megatron's own checkpoints in, bit for bit, and out as it wrote them; nothing in them is run."""

import argparse
import pickle
import shutil
import signal
import sys
import types
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mcore.checkpoint import read_common, read_tensors
from mcore.cli.main import main
from mcore.convert.megatron_args import args_from_options, options_from_args, tokenizer_args
from mcore.convert.megatron_dist import read_torch_dist
from mcore.convert.megatron_export import write_legacy
from mcore.convert.megatron_legacy import read_legacy
from mcore.convert.megatron_names import canonical_name, modern_qkv
from mcore.convert.model_options import ModelOptions
from mcore.convert.safe_pickle import Placeholder, load_dcp_metadata, load_torch_file
from mcore.errors import CheckpointError, ConfigError, UnsupportedError

GOLDEN = Path(__file__).parents[2] / "golden"
CHECKPOINTS = GOLDEN / "checkpoints"
KINDS = ["legacy_tp2_pp1", "legacy_tp2_pp2", "torch_dist"]


def golden_weights(family):
    content = load_file(GOLDEN / "model" / f"megatron_{family}.safetensors")
    return {k.removeprefix("weight."): v for k, v in content.items() if k.startswith("weight.")}


def assert_equal(tensors, wanted):
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], value) for name, value in wanted.items())


def read(path, *args):
    return (read_torch_dist if "torch_dist" in str(path) else read_legacy)(path, *args)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_golden_checkpoints_in(tmp_path, family, kind):
    words = ["--megatron", str(CHECKPOINTS / family / kind), "--save", str(tmp_path)]
    assert main(["convert", "megatron-to-mcore", *words]) == 0
    stored = {k.removeprefix("model."): v for k, v in read_tensors(tmp_path).items()}
    assert_equal(stored, golden_weights(family))
    options = read_common(tmp_path)["model"]
    assert options["rotary_percent"] == (0.5 if family == "llama" else 1.0)
    assert options["num_query_groups"] == (2 if family == "llama" else None)
    _, cut = read(CHECKPOINTS / family / kind, 1000)
    assert cut["embedding.word_embeddings.weight"].shape[0] == 1000


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(("kind", "layers"), [("legacy_tp2_pp1", None), ("legacy_tp2_pp2", "1 2")])
def test_what_is_written_is_what_megatron_wrote(tmp_path, family, kind, layers):
    golden = CHECKPOINTS / family / kind
    words = ["--megatron", str(golden), "--save", str(tmp_path / "ckpt")]
    assert main(["convert", "megatron-to-mcore", *words]) == 0
    words = ["--load", str(tmp_path / "ckpt"), "--megatron", str(tmp_path / "out")]
    words += ["--tensor-model-parallel-size", "2"]
    words += ["--layers", *layers.split()] if layers else []
    assert main(["convert", "mcore-to-megatron", *words]) == 0
    files = sorted(golden.glob("iter_*/*/model_optim_rng.pt"))
    assert len(files) == (4 if layers else 2)
    for file in files:
        ours = tmp_path / "out" / "release" / file.parent.name / file.name
        theirs, written = (load_torch_file(path, "here") for path in (file, ours))
        wanted = {k: v for k, v in theirs["model"].items() if isinstance(v, torch.Tensor)}
        assert_equal(written["model"], wanted)
        for name in ("num_layers", "padded_vocab_size", "swiglu", "norm_epsilon", "kv_channels"):
            assert getattr(written["args"], name) == getattr(theirs["args"], name)
        read_by_megatron = "add_position_embedding max_position_embeddings tokenizer_type"
        read_by_megatron += " make_vocab_size_divisible_by data_parallel_random_init"
        read_by_megatron += " global_batch_size tensor_model_parallel_size"
        assert vars(written["args"]).keys() >= set(read_by_megatron.split())
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"


@pytest.mark.parametrize("fused", [False, True])
def test_virtual_stages_and_fused_norms_make_the_round_trip(tmp_path, fused):
    options, tensors = read(CHECKPOINTS / "llama" / "torch_dist")
    write_legacy(options, tensors, tmp_path, tp=1, layers=[[1, 1], [1, 0]], fused_norms=fused)
    names = load_torch_file(tmp_path / "release/mp_rank_00_001/model_optim_rng.pt", "x").keys()
    assert {"model0", "model1"} <= names
    assert_equal(read_legacy(tmp_path)[1], tensors)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([[1, 1], [1]], "every stage needs the same number of virtual stages"),
        ([[1, 1], [1, 1]], "make 4 layers, the model has 3"),
    ],
)
def test_layers_that_do_not_fit(tmp_path, layers, said):
    options, tensors = read(CHECKPOINTS / "llama" / "torch_dist")
    with pytest.raises(ConfigError, match=said):
        write_legacy(options, tensors, tmp_path, tp=1, layers=layers, fused_norms=False)


def drawn(name, shape):
    """As tests/golden/checkpoints/drawn/make.py draws a parameter."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("kind", ["legacy_pp2_vpp2", "torch_dist"])
def test_what_megatron_core_0_19_wrote(kind):
    """Two processes, pipeline 2: virtual stages; `torch_dist`, since then without common.pt."""
    options, tensors = read(CHECKPOINTS / "drawn" / kind)
    assert list((CHECKPOINTS / "drawn").rglob("common.pt")) == []
    assert (options.num_layers, options.untie_embeddings_and_output_weights) == (4, True)
    assert_equal(tensors, {name: drawn(name, shape) for name, shape in options.shapes().items()})


def old_names(tensors, tied):
    """The nested dicts of Megatron before its core, for one rank."""
    encoder, embedding = OrderedDict(), {}
    for name, value in tensors.items():
        if name.startswith("embedding."):
            part = name.split(".")[1]
            embedding[part] = {"weight": value}
        elif name.startswith("decoder."):
            old = name.removeprefix("decoder.")
            for new, before in (
                ("linear_qkv", "query_key_value"),
                ("linear_proj", "dense"),
                ("pre_mlp_layernorm", "post_attention_layernorm"),
                ("linear_fc1", "dense_h_to_4h"),
                ("linear_fc2", "dense_4h_to_h"),
            ):
                old = old.replace(f".{new}.", f".{before}.")
            encoder[old] = value
    model = {"language_model": {"embedding": embedding, "encoder": encoder}}
    if tied:
        model["word_embeddings_for_head"] = {"weight": tensors["embedding.word_embeddings.weight"]}
    return model


@pytest.mark.parametrize("version", [0, 1.0, 3.0])
def test_names_and_qkv_rows_of_old_checkpoints(tmp_path, version):
    args = load_torch_file(
        CHECKPOINTS / "gpt/legacy_tp2_pp1/iter_0000007/mp_rank_00/model_optim_rng.pt", "x"
    )["args"]
    wanted = golden_weights("gpt")
    old = dict(wanted)
    for name, tensor in wanted.items():
        if "linear_qkv" in name and version < 2:  # [heads, 3, d] -> the order of that version
            grouped = tensor.view(4, 3, 16, *tensor.shape[1:])
            moved = (1, 0, 2) if version == 0 else (0, 2, 1)
            rest = tuple(range(3, grouped.dim()))
            old[name] = grouped.permute(*moved, *rest).reshape(tensor.shape)
    content = {"args": argparse.Namespace(**vars(args)), "model": old_names(old, tied=True)}
    content |= {"checkpoint_version": version, "iteration": 7}
    content["rng_state"] = [{"np_rng_state": np.random.RandomState(1).get_state()}]
    folder = tmp_path / "release" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(content, folder / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_equal(read_legacy(tmp_path)[1], wanted)


def test_rows_of_version_zero_by_hand():
    rows = torch.tensor([10, 11, 20, 21, 30, 31])  # q of both heads, k of both, v of both; d = 1
    assert modern_qkv(rows, 0, 2).tolist() == [10, 20, 30, 11, 21, 31]
    assert modern_qkv(torch.tensor([10, 20, 30, 11, 21, 31]), 1.0, 2).tolist() == [
        10, 20, 30, 11, 21, 31,
    ]  # fmt: skip
    name = "language_model.transformer.layers.3.attention.dense.bias"
    assert canonical_name(name) == "decoder.layers.3.self_attention.linear_proj.bias"


class Payload:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (open, (str(self.trace), "w"))


def test_code_in_pickles_is_refused_by_name_and_not_run(tmp_path):
    trace = tmp_path / "trace"
    content = {"args": argparse.Namespace(), "model": {}, "evil": Payload(trace)}
    folder = tmp_path / "iter_0000001" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(content, folder / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match=r"open, which is not data"):
        read_legacy(tmp_path / "iter_0000001")
    dist = tmp_path / "dist"
    shutil.copytree(CHECKPOINTS / "gpt" / "torch_dist" / "iter_0000007", dist)
    good = (dist / ".metadata").read_bytes()
    (dist / ".metadata").write_bytes(pickle.dumps(Payload(trace)))
    with pytest.raises(CheckpointError, match=r"open, which is not data"):
        read_torch_dist(dist)
    metadata = pickle.loads(good)
    place = next(iter(metadata.storage_data.values()))
    for index, value in metadata.storage_data.items():
        metadata.storage_data[index] = type(value)("../../x", value.offset, value.length)
    (dist / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside of it"):
        read_torch_dist(dist)
    (dist / ".metadata").write_bytes(good)
    torch.save({"args": Payload(trace)}, dist / "common.pt")
    with pytest.raises(CheckpointError, match="not data"):
        read_torch_dist(dist)
    (dist / "common.pt").unlink()
    data = dist / place.relative_path
    data.write_bytes(data.read_bytes()[:-1000])
    with pytest.raises(CheckpointError):
        read_torch_dist(dist)
    assert not trace.exists()


class Megatron(argparse.Namespace):
    """Stands for a class of a package that is not installed."""


Megatron.__module__, Megatron.__qualname__ = "megatron.core.enums", "ModelType"


def test_foreign_classes_become_placeholders(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        for name in ("megatron", "megatron.core", "megatron.core.enums"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["megatron.core.enums"].ModelType = Megatron
        torch.save({"kind": Megatron(value=3)}, tmp_path / "x.pt")
    kind = load_torch_file(tmp_path / "x.pt", "x")["kind"]
    assert isinstance(kind, Placeholder)
    assert kind.value == 3
    assert "megatron.core.enums" not in sys.modules


@pytest.mark.parametrize("archive", [True, False])
def test_what_megatron_leaves_in_its_arguments_becomes_placeholders(tmp_path, archive):
    args = argparse.Namespace(
        exit_signal=signal.SIGTERM, path=Path("/a/b"), more=types.SimpleNamespace(x=1)
    )
    torch.save(
        {"args": args, "model": {"a": torch.ones(3)}, "generator": torch.Generator()},
        tmp_path / "x",
        _use_new_zipfile_serialization=archive,
    )
    content = load_torch_file(tmp_path / "x", "x")
    args = content["args"]
    assert content["model"]["a"].tolist() == [1.0] * 3
    assert args.exit_signal.args == (15,)
    assert args.path.args == ("/", "a", "b")
    assert args.more.x == 1
    inert = (args, args.exit_signal, args.path, args.more, content["generator"])
    assert all(isinstance(value, Placeholder) for value in inert)


def test_metadata_with_paths_of_python_3_13(tmp_path):
    source = CHECKPOINTS / "gpt" / "torch_dist" / "iter_0000007" / ".metadata"
    with source.open("rb") as file:
        metadata = pickle.load(file)
    metadata.storage_meta = Path("/a/b")
    plain = pickle.dumps(metadata, protocol=2)
    name = b"cpathlib\nPosixPath\n"
    assert name in plain
    (tmp_path / "x").write_bytes(plain.replace(name, b"cpathlib._local\nPosixPath\n"))
    assert load_dcp_metadata(tmp_path / "x").storage_meta == "//a/b"


ARGS = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "padded_vocab_size": 128,
    "max_position_embeddings": 16, "vocab_size": 100,
}  # fmt: skip


def test_the_vocabulary_of_a_null_tokenizer():
    """Before it had an option for its end of document, that came on top of `vocab_size`."""

    def read_size(**more):
        return options_from_args(argparse.Namespace(**ARGS, **more)).vocab_size

    assert read_size(tokenizer_type="NullTokenizer") == 101
    assert read_size(tokenizer_type="NullTokenizer", null_tokenizer_eod_id=None) == 100
    assert read_size(tokenizer_type="GPT2BPETokenizer") == 100
    options = options_from_args(argparse.Namespace(**ARGS))
    for eod in (None, 3):
        ours = options.as_dict() | {"tokenizer_type": "NullTokenizer", "null_tokenizer_eod_id": eod}
        said = tokenizer_args(ours)
        assert said["null_tokenizer_eod_id"] == (99 if eod is None else 3)
        args = args_from_options(options, padded_vocab_size=128, **said)
        assert options_from_args(args).vocab_size == 100


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tp": 0}, "tensor-parallel size is 0"),
        ({"divisible_by": 0}, "divisor of the vocabulary is 0"),
        ({"layers": [[4], [-1]]}, "layers per stage"),
    ],
)
def test_sizes_that_are_none(tmp_path, changes, complaint):
    options, tensors = read(CHECKPOINTS / "llama" / "torch_dist")
    with pytest.raises(ConfigError, match=complaint):
        write_legacy(options, tensors, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_parameters_that_are_not_those_of_the_options_are_not_written(tmp_path):
    options, tensors = read(CHECKPOINTS / "llama" / "torch_dist")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    for wrong in (
        {k: v for k, v in tensors.items() if k != name},
        tensors | {"extra": tensors[name]},
        tensors | {name: tensors[name][:-1]},
    ):
        with pytest.raises(CheckpointError, match=rf"extra|{name}"):
            write_legacy(options, wrong, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("no_rope_freq", None, [0, 1]),
        ("no_rope_freq", None, 4),
        ("qk_l2_norm", False, True),
        ("softmax_type", "vanilla", "off-by-one"),
        ("softmax_scale", None, 0.5),
        ("glu_linear_offset", 0.0, 1.0),
        ("activation_func_clamp_value", None, 7.0),
        ("layernorm_zero_centered_gamma", False, True),
    ],
)
def test_what_changes_numbers_and_no_shapes_is_refused(name, usual, other):
    options_from_args(argparse.Namespace(**ARGS, **{name: usual}))
    with pytest.raises(UnsupportedError, match=name):
        options_from_args(argparse.Namespace(**ARGS, **{name: other}))


def test_a_window_that_no_layer_has_is_not_written():
    options = ModelOptions.from_mapping(ARGS | {"sliding_window": 5})
    assert args_from_options(options).window_size == (4, 0)
    none = ModelOptions.from_mapping(ARGS | {"sliding_window": 5, "sliding_window_first_layer": 2})
    assert args_from_options(none).window_size is None


@pytest.mark.parametrize("size", [0, 1, 500, 11310])
def test_truncated_metadata(tmp_path, size):
    path = tmp_path / ".metadata"
    source = CHECKPOINTS / "llama" / "torch_dist" / "iter_0000007" / ".metadata"
    path.write_bytes(source.read_bytes()[:size])
    with pytest.raises(CheckpointError):
        load_dcp_metadata(path)
