"""Folders that DeepSpeed itself wrote, against the weights that its own script takes from them."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore.checkpoint import read_common, read_tensors
from mcore.cli.main import main
from mcore.convert.deepspeed import read_hf_deepspeed, read_megatron_deepspeed
from mcore.convert.deepspeed_weights import read_ranks
from mcore.errors import CheckpointError, UnsupportedError
from mcore.generation import load_model

GOLDEN = Path(__file__).parents[2] / "golden" / "deepspeed"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
SINGLE = [case for case in CASES if "tp2" not in case and "pipeline" not in case]
VOCABULARY = 29
RENAMED = (
    ("language_model.encoder", "decoder"),
    ("language_model.embedding", "embedding"),
    ("language_model.output_layer", "output_layer"),
    ("query_key_value", "linear_qkv"),
    ("self_attention.dense.", "self_attention.linear_proj."),
    ("dense_h_to_4h", "linear_fc1"),
    ("dense_4h_to_h", "linear_fc2"),
    ("post_attention_layernorm", "pre_mlp_layernorm"),
)


def wanted_of(case):
    """Tensors by model-parallel rank and name."""
    wanted = load_file(GOLDEN / case / "wanted.safetensors")
    if case in SINGLE:
        return {0: wanted}
    ranks = {}
    for name, tensor in wanted.items():
        ranks.setdefault(int(name[:2]), {})[name[3:]] = tensor
    return ranks


def converted(case, root):
    words = ["convert", "deepspeed-to-mcore", "--deepspeed", str(GOLDEN / case)]
    if case.startswith("hf"):
        words += ["--hf-config", str(GOLDEN / case / "config.json")]
    assert main([*words, "--save", str(root)]) == 0
    return {k.removeprefix("model."): v for k, v in read_tensors(root).items()}


def renamed(name):
    for old, new in RENAMED:
        name = name.replace(old, new)
    return name


def assert_equal(tensors, wanted):
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == torch.float32
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_weights_of_each_stage(case):
    ranks = read_ranks(GOLDEN / case)
    wanted = wanted_of(case)
    assert len(ranks) == len(wanted)
    for number, rank in enumerate(ranks):
        made = {name: weight.make() for name, weight in rank.weights.items()}
        assert all(rank.weights[name].shape == tensor.shape for name, tensor in made.items())
        assert_equal(made, {k: v.float() for k, v in wanted[number].items()})


@pytest.mark.parametrize("case", [c for c in SINGLE if not c.startswith("hf")])
def test_a_megatron_deepspeed_model_becomes_a_checkpoint(tmp_path, case):
    stored = converted(case, tmp_path)
    wanted = {
        renamed(name): tensor[:VOCABULARY] if tensor.shape[0] == 32 else tensor
        for name, tensor in wanted_of(case)[0].items()
        if not name.startswith("word_embeddings_for_head")
    }
    assert_equal(stored, wanted)
    options = read_common(tmp_path)["model"]
    assert options["openai_gelu"] == case.startswith("gpt")
    assert options["num_query_groups"] == (None if case.startswith("gpt") else 1)
    assert load_model(tmp_path).model.vocab_size == VOCABULARY


@pytest.mark.parametrize("case", [c for c in CASES if "tp2" in c])
def test_tensor_parallel_ranks_are_merged(tmp_path, case):
    first, second = wanted_of(case).values()
    stored = converted(case, tmp_path)
    for name, part in first.items():
        other = second[name]
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            whole = torch.cat([part, other])[:VOCABULARY]
        elif "query_key_value" in name:
            whole = torch.cat([part, other])
        elif "dense_h_to_4h" in name and case.startswith("llama"):
            (gate, up), (other_gate, other_up) = part.chunk(2), other.chunk(2)
            whole = torch.cat([gate, other_gate, up, other_up])
        elif "dense_h_to_4h" in name:
            whole = torch.cat([part, other])
        elif name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")):
            whole = torch.cat([part, other], dim=1)
        else:
            assert torch.equal(part, other)
            whole = part
        assert torch.equal(stored[renamed(name)], whole), name


def test_pipeline_stages_are_joined(tmp_path):
    case = "gpt_pipeline_stage1"
    stored = converted(case, tmp_path)
    first, last = wanted_of(case).values()
    seen = set()
    for name, tensor in (last | first).items():  # the copy of a tied module is not trained whole
        number, _, rest = name.partition(".")
        if number == "tied_modules":
            own = f"embedding.{rest.partition('.')[2]}"
            tensor = tensor[:VOCABULARY] if "word" in own else tensor
        elif rest in ("weight", "bias"):
            own = f"decoder.final_layernorm.{rest}"
        else:
            own = renamed(f"decoder.layers.{int(number) - 3}.{rest}")
        seen.add(own)
        assert torch.equal(stored[own], tensor), name
    assert seen == stored.keys()


@pytest.mark.parametrize("case", [c for c in SINGLE if c.startswith("hf")])
def test_a_hugging_face_model_computes_the_same(tmp_path, case):
    transformers = pytest.importorskip("transformers")
    converted(case, tmp_path)
    config = transformers.LlamaConfig.from_pretrained(GOLDEN / case)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict(wanted_of(case)[0])
    tokens = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = load_model(tmp_path).model(tokens) - theirs(tokens).logits
    assert difference.abs().max() < 1e-5


# What does not fit is refused ------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(GOLDEN / "gpt_stage2_frozen", tmp_path / "copy")


@pytest.mark.parametrize("case", [c for c in CASES if "stage0" not in c])
@pytest.mark.parametrize("part", ["zero_pp_rank_0_mp", "zero_pp_rank_1_mp"])
def test_an_absent_part_of_the_optimizer(tmp_path, case, part):
    folder = shutil.copytree(GOLDEN / case, tmp_path / "copy")
    next(folder.glob(f"global_step*/*{part}_*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="optim_states|parts of the optimizer"):
        read_ranks(folder)


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
def test_truncated_files(copy, kept):
    for path in list(copy.glob("global_step*/*.pt")):
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * kept)])
        with pytest.raises(CheckpointError, match=path.name):
            read_ranks(copy)
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["*_model_states.pt", "*_optim_states.pt"])
def test_nothing_in_a_pickle_is_run(copy, tmp_path, name):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    path = next(copy.glob(f"global_step*/{name}"))
    torch.save({"optimizer_state_dict": Evil(), "module": {}}, path, pickle_module=pickle)
    with pytest.raises(CheckpointError, match="system"):
        read_ranks(copy)
    assert not (tmp_path / "ran").exists()


def test_pointers_and_folders(copy, tmp_path):
    assert read_ranks(copy / "global_step3")
    for tag in ("../copy/global_step3", "global_step9", ""):
        (copy / "latest").write_text(tag)
        with pytest.raises(CheckpointError, match="latest"):
            read_ranks(copy)
    with pytest.raises(CheckpointError, match="there is no directory"):
        read_ranks(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="mp_rank"):
        read_ranks(tmp_path)


def test_parameters_of_another_model(copy):
    path = next(copy.glob("global_step*/*_model_states.pt"))
    content = torch.load(path, weights_only=False)
    content["args"].num_layers = 3
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="absent .*layers.2"):
        read_megatron_deepspeed(copy)
    del content["args"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="--hf-config"):
        read_megatron_deepspeed(copy)
    content["param_shapes"][0]["x"] = torch.Size([10**6])
    torch.save(content, path)
    with pytest.raises(CheckpointError):
        read_ranks(copy)


def test_a_hugging_face_configuration_of_another_model(tmp_path):
    folder = GOLDEN / "hf_llama_stage2"
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="shape"):
        read_hf_deepspeed(folder, tmp_path / "config.json")
    with pytest.raises(UnsupportedError, match="model-parallel"):
        read_hf_deepspeed(GOLDEN / "llama_stage3_tp2", folder / "config.json")
    words = ["--deepspeed", str(folder), "--hf-config", str(folder / "config.json")]
    assert main(["convert", "deepspeed-to-mcore", *words, "--vocab-size", "5", "--save", "x"]) == 2
