"""Tiny random models of each family: transformers' logits from our model, and the way back."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from mcore.checkpoint import read_common
from mcore.cli import convert
from mcore.cli.main import main
from mcore.convert.logits import largest_logit_difference

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 96,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 300.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 3.0, "original_max_position_embeddings": 24,
}  # fmt: skip
FAMILIES = {
    "gpt2": GPT2Config(
        n_layer=3, n_embd=32, n_head=4, n_positions=96, vocab_size=97, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama-3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-linear": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=9, head_dim=12),
    "mistral-no-window": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "qwen3-window": Qwen3Config(
        **SIZES, head_dim=12, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
}  # fmt: skip


def random_model(config, folder):
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        norm = "norm" in name or "ln_" in name
        torch.nn.init.normal_(parameter, mean=1.0 if norm else 0.0, std=0.2)
    model.save_pretrained(folder)
    return model


#: The others differ little from these.
USUAL = ("llama-3", "mistral", "qwen2-window", "qwen3-window")


@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES],
)
def test_logits_are_those_of_transformers(tmp_path, name, capsys):
    source, saved, out = tmp_path / "hf", tmp_path / "ckpt", tmp_path / "again"
    random_model(FAMILIES[name], source)
    (source / "tokenizer.json").write_text("{}")
    assert main(["convert", "hf-to-mcore", "--hf", str(source), "--save", str(saved)]) == 0
    assert "largest difference of the logits" in capsys.readouterr().out
    assert largest_logit_difference(saved, source) < 1e-5
    options = read_common(saved)["model"]
    assert options["tokenizer_type"] == "HuggingFaceTokenizer"
    family = name.partition("-")[0]
    words = ["--load", str(saved), "--hf", str(out), "--model-type", family]
    assert main(["convert", "mcore-to-hf", *words]) == 0
    assert (out / "tokenizer.json").read_text() == "{}"
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    tokens = torch.arange(60)[None] % 97
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, out)]
    with torch.no_grad():
        assert torch.equal(*(model(tokens).logits for model in models))


@pytest.mark.parametrize(
    ("difference", "warns"), [(1e-5, False), (2e-3, True), (float("nan"), True)]
)
def test_logits_that_differ_by_more_than_rounding_are_warned_of(
    tmp_path, monkeypatch, caplog, difference, warns
):
    random_model(FAMILIES["qwen2"], tmp_path / "hf")
    monkeypatch.setattr(convert, "largest_logit_difference", lambda *_: difference)
    words = ["--hf", str(tmp_path / "hf"), "--save", str(tmp_path / "saved")]
    assert main(["convert", "hf-to-mcore", *words]) == 0
    assert ("more than rounding" in caplog.text) == warns


def test_the_windows_and_scalings_above_matter(tmp_path):
    """A conversion that dropped them would be noticed."""
    for name in ("llama-3", "mistral", "qwen2-window"):
        folder = tmp_path / name
        random_model(FAMILIES[name], folder)
        saved = tmp_path / f"{name}.ckpt"
        words = ["--hf", str(folder), "--save", str(saved), "--no-logits"]
        assert main(["convert", "hf-to-mcore", *words]) == 0
        config = json.loads((folder / "config.json").read_text())
        if config.get("sliding_window"):
            config["sliding_window"] = 90
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
        (folder / "config.json").write_text(json.dumps(config))
        assert largest_logit_difference(saved, folder) > 1e-3, name
