"""GPTModel against Megatron-Core's own forward and backward, at several layouts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore import parallel_state
from mcore.models.gpt import GPTModel
from mcore.testing import run_distributed
from mcore.topology.param_sharding import global_named_parameters, sharding_of
from mcore.transformer import TransformerConfig

FOLDER = Path(__file__).parents[2] / "golden" / "model"


def build(variant, tp=1, sequence_parallel=False, dtype=torch.float32):
    c = json.loads((FOLDER / f"megatron_{variant}.json").read_text())["config"]
    config = TransformerConfig(
        num_layers=c["num_layers"],
        hidden_size=c["hidden_size"],
        num_attention_heads=c["num_attention_heads"],
        num_query_groups=c.get("num_query_groups"),
        kv_channels=c.get("kv_channels"),
        ffn_hidden_size=c["ffn_hidden_size"],
        normalization=c["normalization"],
        layernorm_epsilon=c["layernorm_epsilon"],
        gated_linear_unit=c["gated_linear_unit"],
        add_bias_linear=c["add_bias_linear"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
    )
    return GPTModel(
        config,
        vocab_size=c["vocab_size"],
        max_sequence_length=c["seq_length"],
        share_embeddings_and_output_weights=c["share_embeddings_and_output_weights"],
        position_embedding_type=c["position_embedding_type"],
        rotary_percent=c.get("rotary_percent", 1.0),
        rotary_base=c.get("rotary_base", 10000),
    )


def run(variant, tp, sequence_parallel, dtype):
    """Loss, and for each parameter the (global place, gradient) pieces of this rank."""
    group = parallel_state.initialize_model_parallel(tp).tp
    golden = load_file(FOLDER / f"megatron_{variant}.safetensors")
    model = build(variant, tp, sequence_parallel, dtype)
    with torch.no_grad():
        for name, param in global_named_parameters(model):
            sharding = sharding_of(param, group)
            whole = golden["weight." + name]
            assert tuple(whole.shape) == sharding.global_shape
            for piece, view in sharding.views(param):
                view.copy_(whole.narrow(sharding.dim, piece.global_start, piece.length))
    loss = model(golden["tokens"], None, None, labels=golden["labels"])
    # The golden gradient is that of the mean over tokens.
    loss.mean().backward()
    pieces = {}
    for name, param in global_named_parameters(model):
        sharding = sharding_of(param, group)
        for piece, view in sharding.views(param.grad):
            at = (sharding.dim, piece.global_start, piece.length, sharding.sequence_parallel)
            pieces.setdefault(name, []).append((at, piece.is_owner, piece.is_shared, view.clone()))
    return loss.detach(), pieces


def assemble(results, golden):
    """Whole gradients: partial ones are summed, replicas have to agree."""
    whole = {name[5:]: torch.zeros_like(t) for name, t in golden.items() if name[:5] == "grad."}
    for _, pieces in results:
        for name, parts in pieces.items():
            for (dim, start, length, partial), is_owner, is_shared, grad in parts:
                if is_owner or is_shared or partial:
                    whole[name].narrow(dim, start, length).add_(grad)
    return whole


@pytest.mark.dist
@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)]
)
def test_loss_and_gradients_equal_megatrons(variant, tp, sequence_parallel):
    golden = load_file(FOLDER / f"megatron_{variant}.safetensors")
    results = run_distributed(run, tp, variant, tp, sequence_parallel, torch.float32)
    for loss, _ in results:
        torch.testing.assert_close(loss, golden["loss"], rtol=0, atol=1e-5)
    for name, grad in assemble(results, golden).items():
        torch.testing.assert_close(grad, golden["grad." + name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.dist
@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layouts_agree_in_float64(variant, sequence_parallel):
    """A missing factor or reduction shows as 1e-1 here, rounding as 1e-14."""
    golden = load_file(FOLDER / f"megatron_{variant}.safetensors")
    golden = {name: t.double() for name, t in golden.items()}
    alone = run_distributed(run, 1, variant, 1, False, torch.float64)
    cut = run_distributed(run, 4, variant, 4, sequence_parallel, torch.float64)
    torch.testing.assert_close(cut[0][0], alone[0][0], rtol=0, atol=1e-12)
    reference = assemble(alone, golden)
    for name, grad in assemble(cut, golden).items():
        torch.testing.assert_close(grad, reference[name], rtol=0, atol=1e-12, msg=name)


def test_state_dict_has_megatrons_names():
    for variant in ("gpt", "llama"):
        shapes = json.loads((FOLDER / f"megatron_{variant}.json").read_text())["shapes"]
        ours = {name: list(t.shape) for name, t in build(variant).state_dict().items()}
        assert ours == shapes
