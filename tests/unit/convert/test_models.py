"""Converted weights in our own model, at several layouts, against transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore import parallel_state
from mcore.checkpoint import load, read_common, read_tensors, save, sharded_parameter
from mcore.config.transformer import TransformerConfig
from mcore.convert import ModelOptions, hf_to_state, save_model_state
from mcore.models.gpt import GPTModel
from mcore.testing import run_distributed
from mcore.topology.param_sharding import global_named_parameters, sharding_of

GOLDEN = Path(__file__).parents[2] / "golden" / "train"


def build(options, tp, pp):
    config = TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        num_query_groups=options.num_query_groups,
        kv_channels=options.kv_channels,
        ffn_hidden_size=options.ffn_hidden_size,
        normalization=options.normalization,
        layernorm_epsilon=options.norm_epsilon,
        gated_linear_unit=options.swiglu,
        openai_gelu=options.openai_gelu,
        add_bias_linear=options.add_bias_linear,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )
    return GPTModel(
        config,
        vocab_size=options.vocab_size,
        max_sequence_length=options.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not options.untie_embeddings_and_output_weights,
        position_embedding_type=options.position_embedding_type,
        rotary_base=options.rotary_base,
        make_vocab_size_divisible_by=96,
    )


def parts(model, group, for_save):
    out = {}
    for name, parameter in global_named_parameters(model):
        part = sharded_parameter(
            f"model.{name}", parameter, sharding_of(parameter, group), for_save=for_save
        )
        out[part.key] = out[part.key].joined(part) if part.key in out else part
    return out


def load_run_save(root, again, tp, pp, ids):
    """Load at a layout, run it where one stage holds all, save from there."""
    group = parallel_state.initialize_model_parallel(tp, pp).tp
    model = build(ModelOptions.from_mapping(read_common(root)["model"]), tp, pp)
    load(root, parts(model, group, False))
    logits = None
    if pp == 1:
        with torch.no_grad():
            logits = model.eval()(ids)
    save(again, 3, parts(model, group, True), {})
    return logits


@pytest.mark.dist
@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.full), "llama"])
def test_every_layout_computes_the_same_and_saves_the_same(tmp_path, family):
    folder = GOLDEN / family / "hf_final"
    options, tensors = hf_to_state(folder)
    save_model_state(tmp_path / "converted", options, tensors, {})
    ids = torch.randint(0, 1000, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
    for tp, pp in ((4, 1), (2, 1), (1, 1), (2, 2), (1, 4)):
        again = tmp_path / f"{tp}-{pp}"
        answers = run_distributed(load_run_save, 4, tmp_path / "converted", again, tp, pp, ids)
        for logits in answers:
            if pp == 1:
                torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)
        stored = read_tensors(again)
        assert stored.keys() == {f"model.{name}" for name in tensors}
        assert all(torch.equal(stored[f"model.{name}"], value) for name, value in tensors.items())
