"""Conversion against transformers and against rows picked by plain indexing."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from mcore.checkpoint import latest_iteration, read_common, read_tensors
from mcore.cli import convert as command
from mcore.convert import hf_files, hf_to_state, state_to_hf
from mcore.convert.hf_tokenizer import kept_tokenizer
from mcore.errors import CheckpointError, UnsupportedError
from mcore.training.checkpointing import stored_model_options

GOLDEN = Path(__file__).parents[2] / "golden" / "train"
NAMES = ["gpt2", "llama", "gpt2_8layers"]


def run(*argv):
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    args = parser.parse_args(["convert", *map(str, argv)])
    return args.run(args)


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (2, 17), generator=generator)
    with torch.no_grad():
        return model(ids).logits


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_golden_models_make_the_round_trip_through_a_checkpoint(tmp_path, name, capsys):
    source, saved, out = GOLDEN / name / "hf_initial", tmp_path / "ckpt", tmp_path / "hf"
    assert run("hf-to-mcore", "--hf", source, "--save", saved) == 0
    assert latest_iteration(saved) == 0
    common = read_common(saved)
    assert (common["iteration"], common["consumed_train_samples"]) == (0, 0)
    assert all(key.startswith("model.") for key in read_tensors(saved))
    assert run("mcore-to-hf", "--load", saved, "--hf", out) == 0
    assert_equal(load_file(source / "model.safetensors"), load_file(out / "model.safetensors"))
    assert torch.equal(logits(source), logits(out))
    assert "parameters" in capsys.readouterr().out


def test_options_of_the_golden_models():
    gpt2, tensors = hf_to_state(GOLDEN / "gpt2" / "hf_initial")
    wanted = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": None,
        "group_query_attention": False, "kv_channels": 16, "ffn_hidden_size": 256,
        "vocab_size": 1000, "max_position_embeddings": 64,
        "position_embedding_type": "learned_absolute", "normalization": "LayerNorm",
        "norm_epsilon": 1e-5, "swiglu": False, "openai_gelu": True, "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False, "hidden_dropout": 0.0,
    }  # fmt: skip
    assert {name: gpt2[name] for name in wanted} == wanted
    assert "output_layer.weight" not in tensors
    llama, tensors = hf_to_state(GOLDEN / "llama" / "hf_initial")
    wanted = {
        "num_attention_heads": 8, "num_query_groups": 4, "group_query_attention": True,
        "kv_channels": 8, "ffn_hidden_size": 176, "position_embedding_type": "rope",
        "rotary_base": 10000.0, "normalization": "RMSNorm", "swiglu": True, "openai_gelu": False,
        "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
    }  # fmt: skip
    assert {name: llama[name] for name in wanted} == wanted
    assert tensors["output_layer.weight"].shape == (1000, 64)


def test_qkv_rows_lie_query_group_by_query_group():
    folder = GOLDEN / "llama" / "hf_initial"
    hf = load_file(folder / "model.safetensors")
    ours = hf_to_state(folder)[1]["decoder.layers.1.self_attention.linear_qkv.weight"]
    q, k, v = (hf[f"model.layers.1.self_attn.{kind}_proj.weight"] for kind in "qkv")
    for group in range(4):  # 8 heads of size 8 in 4 groups: 2 queries, key, value
        base = group * 32
        assert torch.equal(ours[base : base + 16], q[group * 16 : group * 16 + 16])
        assert torch.equal(ours[base + 16 : base + 24], k[group * 8 : group * 8 + 8])
        assert torch.equal(ours[base + 24 : base + 32], v[group * 8 : group * 8 + 8])
    fc1 = hf_to_state(folder)[1]["decoder.layers.2.mlp.linear_fc1.weight"]
    assert torch.equal(fc1[:176], hf["model.layers.2.mlp.gate_proj.weight"])
    assert torch.equal(fc1[176:], hf["model.layers.2.mlp.up_proj.weight"])


def test_gpt2_matrices_are_turned_and_heads_interleaved():
    folder = GOLDEN / "gpt2" / "hf_initial"
    hf = load_file(folder / "model.safetensors")
    ours = hf_to_state(folder)[1]
    weight, bias = (hf[f"transformer.h.3.attn.c_attn.{part}"] for part in ("weight", "bias"))
    for head in range(4):
        for kind in range(3):
            rows = slice(head * 48 + kind * 16, head * 48 + kind * 16 + 16)
            columns = slice(kind * 64 + head * 16, kind * 64 + head * 16 + 16)
            qkv = "decoder.layers.3.self_attention.linear_qkv"
            assert torch.equal(ours[f"{qkv}.weight"][rows], weight[:, columns].T)
            assert torch.equal(ours[f"{qkv}.bias"][rows], bias[columns])
    assert torch.equal(
        ours["decoder.layers.0.mlp.linear_fc2.weight"], hf["transformer.h.0.mlp.c_proj.weight"].T
    )


RANDOM = {
    "gpt2-untied-exact-gelu": GPT2Config(
        n_layer=2, n_embd=24, n_head=3, n_positions=32, vocab_size=97, n_inner=40,
        activation_function="gelu", tie_word_embeddings=False, layer_norm_epsilon=1e-3,
        bos_token_id=0, eos_token_id=0,
    ),
    "llama-tied-biases-head-dim": LlamaConfig(
        num_hidden_layers=2, hidden_size=24, intermediate_size=36, num_attention_heads=4,
        num_key_value_heads=1, head_dim=10, vocab_size=97, max_position_embeddings=40,
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(RANDOM))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_models_export_to_equal_logits(tmp_path, name, dtype):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(RANDOM[name]).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "a")
    options, tensors = hf_to_state(tmp_path / "a")
    state_to_hf(options, tensors, tmp_path / "b")
    assert_equal(*(load_file(tmp_path / part / "model.safetensors") for part in "ab"))
    a, b = logits(tmp_path / "a"), logits(tmp_path / "b")
    assert a.dtype == b.dtype
    assert torch.equal(a, b)


def edited(tmp_path, name, **changes):
    """A copy of a golden model with another configuration (None removes an entry)."""
    folder = tmp_path / "edited"
    shutil.copytree(GOLDEN / name / "hf_initial", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_spellings_of_transformers_4(tmp_path):
    folder = edited(
        tmp_path, "llama", rope_parameters="absent", rope_theta=12345.0, dtype="absent",
        torch_dtype="float32", rope_scaling=None, head_dim="absent",
    )  # fmt: skip
    options, _ = hf_to_state(folder)
    assert options["rotary_base"] == 12345.0
    assert options["kv_channels"] == 8
    _, tensors = hf_to_state(folder)
    state_to_hf(options, tensors, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 12345.0
    assert config["torch_dtype"] == config["dtype"] == "float32"


def test_names_without_prefix_old_buffers_and_an_equal_tied_head(tmp_path):
    folder = edited(tmp_path, "gpt2")
    path = folder / "model.safetensors"
    old = load_file(path)
    bare = {key.removeprefix("transformer."): value for key, value in old.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    save_file(bare, path)
    assert_equal(hf_to_state(folder)[1], hf_to_state(GOLDEN / "gpt2" / "hf_initial")[1])
    bare["lm_head.weight"][0, 0] += 1
    save_file(bare, path)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        hf_to_state(folder)


def test_several_files_are_written_and_read(tmp_path, monkeypatch):
    options, tensors = hf_to_state(GOLDEN / "llama" / "hf_initial")
    monkeypatch.setattr(hf_files.write_folder, "__defaults__", (300_000,))
    state_to_hf(options, tensors, tmp_path)
    assert len(list(tmp_path.glob("model-0000?-of-0000?.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_equal(hf_to_state(tmp_path)[1], tensors)
    assert torch.equal(logits(tmp_path), logits(GOLDEN / "llama" / "hf_initial"))
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../model.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        hf_to_state(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("llama", {"model_type": "falcon"}, "model_type is 'falcon'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"sliding_window": 16}, "sliding_window is 16"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
        ("llama", {"model_type": "qwen3", "attention_bias": True}, "attention_bias is True"),
        (
            "llama",
            {"model_type": "mistral", "layer_types": ["sliding_attention"] + ["full_attention"]},
            "layer_types",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"embd_pdrop": 0.2}, "embd_pdrop"),
    ],
)
def test_a_model_that_fits_no_family_is_refused_by_name(tmp_path, name, changes, complaint):
    with pytest.raises(UnsupportedError, match=complaint):
        hf_to_state(edited(tmp_path, name, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("llama", {"intermediate_size": 160}, "linear_fc1.weight has"),
        ("llama", {"num_hidden_layers": 3}, "no llama model has: .*layers.3"),
        ("llama", {"num_hidden_layers": 5}, "holds no tensor .*layers.4"),
        ("llama", {"num_key_value_heads": 3}, "do not fit"),
        ("llama", {"hidden_size": "absent"}, "no entry 'hidden_size'"),
        ("gpt2", {"n_positions": 65}, "position_embeddings.weight has"),
        ("gpt2", {"n_head": 0}, "impossible value"),
        ("gpt2", {"n_embd": "wide"}, "impossible value"),
    ],
)
def test_tensors_that_contradict_the_configuration(tmp_path, name, changes, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        hf_to_state(edited(tmp_path, name, **changes))


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        hf_to_state(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pytorch_model.bin is a pickle"):
        hf_to_state(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04garbage")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        hf_to_state(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rotary_percent": 0.5}, "llama: rotary_percent is 0.5"),
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "qwen3: add_qkv_bias is True"),
        ({"sliding_window": 8, "add_bias_linear": True}, "llama: is_windowed is True"),
        ({"window_size": 8}, "window_size = 8"),
    ],
)
def test_export_of_a_model_that_fits_no_family(tmp_path, changes, complaint):
    options, tensors = hf_to_state(GOLDEN / "llama" / "hf_initial")
    with pytest.raises(UnsupportedError, match=complaint):
        state_to_hf(options | changes, tensors, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_of_parameters_that_do_not_fit(tmp_path):
    options, lazy = hf_to_state(GOLDEN / "llama" / "hf_initial")
    tensors = dict(lazy)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    with pytest.raises(CheckpointError, match="has shape"):
        state_to_hf(options, tensors | {name: tensors[name][:-1]}, tmp_path)
    with pytest.raises(CheckpointError, match="absent: .*linear_fc2"):
        state_to_hf(options, {k: v for k, v in tensors.items() if k != name}, tmp_path)
    with pytest.raises(CheckpointError, match="do not know parameters extra"):
        state_to_hf(options, tensors | {"extra": tensors[name]}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_defaults_that_a_checkpoint_may_leave_out(tmp_path):
    source = GOLDEN / "gpt2" / "hf_initial"
    options, tensors = hf_to_state(source)
    for name in ("kv_channels", "ffn_hidden_size", "num_query_groups", "group_query_attention"):
        del options[name]
    options |= {"max_position_embeddings": None, "seq_length": 64}
    state_to_hf(options, tensors, tmp_path)
    assert torch.equal(logits(tmp_path), logits(source))


def test_existing_models_are_not_overwritten_unasked(tmp_path):
    source, saved, out = GOLDEN / "gpt2" / "hf_initial", tmp_path / "ckpt", tmp_path / "hf"
    for _ in range(2):
        run("hf-to-mcore", "--hf", source, "--save", saved, "--overwrite-save")
        run("mcore-to-hf", "--load", saved, "--hf", out, "--overwrite-save")
    with pytest.raises(CheckpointError, match="--overwrite-save"):
        run("hf-to-mcore", "--hf", source, "--save", saved)
    with pytest.raises(CheckpointError, match="--overwrite-save"):
        run("mcore-to-hf", "--load", saved, "--hf", out)


def test_ids_and_tokenizer_make_the_way_back_and_follow_a_root_that_is_moved(tmp_path):
    folder = edited(tmp_path, "llama", bos_token_id=5, eos_token_id=[6, 7], pad_token_id="absent")
    (folder / "tokenizer.json").write_text("{}")
    words = ["--hf", str(folder), "--save", str(tmp_path / "ckpt"), "--no-logits"]
    assert run("hf-to-mcore", *words) == 0
    assert stored_tokenizer(tmp_path / "ckpt") == str(tmp_path / "ckpt" / "tokenizer")
    (tmp_path / "ckpt").rename(tmp_path / "moved")
    assert stored_tokenizer(tmp_path / "moved") == str(tmp_path / "moved" / "tokenizer")
    assert stored_tokenizer(tmp_path / "moved" / "iter_0000000").endswith("moved/tokenizer")
    words = ["--load", str(tmp_path / "moved"), "--hf", str(tmp_path / "out"), "--no-logits"]
    assert run("mcore-to-hf", *words) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["bos_token_id"] == 5
    assert config["eos_token_id"] == [6, 7]
    assert "pad_token_id" not in config
    assert (tmp_path / "out" / "tokenizer.json").exists()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def a_tokenizer(folder, *names):
    for name in names:
        (folder / name).write_text(str(folder))
    return folder


def test_writing_over_a_model_leaves_nothing_of_its_tokenizer(tmp_path):
    first = a_tokenizer(edited(tmp_path, "llama"), "tokenizer.json", "added_tokens.json").rename(
        tmp_path / "first"
    )
    second = a_tokenizer(edited(tmp_path, "llama"), "tokenizer.model")
    saved, kept, out = tmp_path / "ckpt", tmp_path / "ckpt" / "tokenizer", tmp_path / "out"
    over = ["--no-logits", "--overwrite-save"]
    for source, names in (
        (first, ["added_tokens.json", "tokenizer.json"]),
        (second, ["tokenizer.model"]),
        (GOLDEN / "llama" / "hf_initial", []),
    ):
        assert run("hf-to-mcore", "--hf", source, "--save", saved, *over) == 0
        assert names_in(kept) == sorted(["config.json", *names])
        assert run("mcore-to-hf", "--load", saved, "--hf", out, *over) == 0
        assert names_in(out) == sorted(["config.json", "model.safetensors", *names])
        assert ("tokenizer_model" in read_common(saved)["model"]) == bool(names)
    assert run("hf-to-mcore", "--hf", first, "--save", saved, *over) == 0
    (kept / "mine.txt").write_text("")
    megatron = GOLDEN.parent / "checkpoints" / "llama" / "legacy_tp2_pp1"
    words = ["--megatron", megatron, "--save", saved, "--overwrite-save"]
    assert run("megatron-to-mcore", *words) == 0
    assert names_in(kept) == ["mine.txt"]


def test_an_import_that_fails_changes_no_tokenizer(tmp_path, monkeypatch):
    saved, kept = tmp_path / "ckpt", tmp_path / "ckpt" / "tokenizer"
    source = a_tokenizer(edited(tmp_path, "llama"), "tokenizer.json")
    words = ["--hf", source, "--save", saved, "--no-logits", "--overwrite-save"]
    assert run("hf-to-mcore", *words) == 0
    before = (kept / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text("another")

    def full(*_):
        raise CheckpointError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(command, "save_model_state", full)
        with pytest.raises(CheckpointError):
            run("hf-to-mcore", *words)
    assert (kept / "tokenizer.json").read_text() == before
    assert run("hf-to-mcore", *words) == 0
    assert (kept / "tokenizer.json").read_text() == "another"


def test_files_in_the_folder_of_a_first_export_stay(tmp_path):
    saved, out = tmp_path / "ckpt", tmp_path / "out"
    assert run("hf-to-mcore", "--hf", GOLDEN / "gpt2" / "hf_initial", "--save", saved) == 0
    out.mkdir()
    a_tokenizer(out, "tokenizer.json")
    assert run("mcore-to-hf", "--load", saved, "--hf", out, "--no-logits") == 0
    assert (out / "tokenizer.json").exists()


def test_the_tokenizer_of_a_neighbour_is_not_taken(tmp_path):
    root = tmp_path / "root"
    for folder in (tmp_path / "tokenizer", root / "tokenizer", tmp_path / "own"):
        folder.mkdir(parents=True)
    assert kept_tokenizer(tmp_path / "other", {}) is None
    assert kept_tokenizer(root, {}) == root / "tokenizer"
    (root / "iter_0000000").mkdir()
    (root / "iter_0000000" / "metadata.json").write_text("{}")
    assert kept_tokenizer(root / "iter_0000000", {}) == root / "tokenizer"
    stored = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "own")}
    assert kept_tokenizer(root, stored) == tmp_path / "own"
    gone = stored | {"tokenizer_model": str(tmp_path / "gone")}
    assert kept_tokenizer(root, gone) == root / "tokenizer"
    file = a_tokenizer(tmp_path / "own", "tokenizer.json") / "tokenizer.json"
    assert kept_tokenizer(root, stored | {"tokenizer_model": str(file)}) == tmp_path / "own"


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path):
    folder = edited(tmp_path, "llama")
    weights = {k: v + 1 for k, v in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(hf_to_state(folder)[1], hf_to_state(GOLDEN / "llama" / "hf_initial")[1])
    assert torch.equal(logits(folder), logits(GOLDEN / "llama" / "hf_initial"))


def stored_tokenizer(path):
    return stored_model_options(str(path), None)["tokenizer_model"]
