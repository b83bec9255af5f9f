"""Each Hugging Face family trains at tp2 pp2 as transformers and torch's AdamW train it.

In float64. In float32 a correct model may leave 1e-5 within a few steps: Adam's first steps are
those of the gradient's sign almost, so rounding decides the direction where a gradient is small
(transformers in float32 against itself in float64 is as far off).
"""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mcore.cli.main import main
from mcore.training.arguments import build_config, parse
from mcore.training.checkpointing import stored_model_options
from mcore.training.gpt import datasets_provider
from tests.equivalence.program import Layout, series, train
from tests.equivalence.tiny import BATCH, EOD, VOCABULARY, command
from tests.unit.convert.test_families import FAMILIES, random_model

ITERATIONS = 5
EXACT = 1e-8
WEIGHT_TOLERANCE = 1e-7


def flags(corpus, saved):
    """The tiny corpus with the model of a checkpoint."""
    words = command(corpus, ITERATIONS, f"--load {saved} --finetune --use-checkpoint-args")
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads"):
        at = words.index(name)
        del words[at : at + 2]
    return words


def in_float64(model):
    """The model without the places where transformers goes back to float32: its RMSNorm.

    Rotary tables stay those of float32, as mcore's do.
    """
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                exact = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                exact.weight.data = norm.weight.data
                setattr(parent, name, exact)
    return model.double()


def reference(folder, words, saved, rates):
    """Losses, gradient norms before clipping and weights, by transformers and torch alone."""
    model = in_float64(AutoModelForCausalLM.from_pretrained(folder).train())
    config = build_config(parse(words), stored_model_options(str(saved), None))
    samples = datasets_provider(config, (ITERATIONS * BATCH, 0, 0))[0]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for iteration in range(ITERATIONS):
        batch = [samples[iteration * BATCH + i] for i in range(BATCH)]
        tokens, labels = (
            torch.stack([torch.as_tensor(s[k]) for s in batch]).long() for k in ("tokens", "labels")
        )
        mask = (tokens != EOD).double()
        logits = model(tokens).logits
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        loss = (each * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = rates[iteration]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, model.state_dict()


@pytest.mark.dist
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama-3", marks=pytest.mark.full),
        pytest.param("mistral", marks=pytest.mark.full),
        pytest.param("qwen2-window", marks=pytest.mark.full),
        "qwen3-window",
    ],
)
def test_training_is_that_of_transformers(corpus, tmp_path, name):
    config = copy.deepcopy(FAMILIES[name])
    config.vocab_size = VOCABULARY
    config.num_hidden_layers, config.layer_types = 4, None
    config = type(config)(**config.to_diff_dict())
    random_model(config, tmp_path / "hf")
    words = ["--hf", str(tmp_path / "hf"), "--save", str(tmp_path / "ckpt"), "--no-logits"]
    assert main(["convert", "hf-to-mcore", *words]) == 0
    words = flags(corpus, tmp_path / "ckpt")
    saves = ["--save", str(tmp_path / "trained"), "--save-interval", str(ITERATIONS)]
    records = train([*words, *saves], Layout(tp=2, pp=2, sp=True), dtype=torch.float64)
    rates = series(records, "learning_rate")
    losses, norms, weights = reference(tmp_path / "hf", words, tmp_path / "ckpt", rates)
    assert series(records, "lm_loss") == pytest.approx(losses, rel=EXACT)
    assert series(records, "grad_norm") == pytest.approx(norms, rel=EXACT)
    words = ["--load", str(tmp_path / "trained"), "--hf", str(tmp_path / "out"), "--no-logits"]
    assert main(["convert", "mcore-to-hf", *words, "--model-type", config.model_type]) == 0
    before, trained = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "out")
    )
    assert trained.keys() == weights.keys()
    for key, wanted in weights.items():  # keys are rotated, so their biases count as well
        assert (wanted - before[key]).abs().max() > 1e-3, key
        torch.testing.assert_close(trained[key], wanted, rtol=0, atol=WEIGHT_TOLERANCE, msg=key)
