"""Configurations as Megatron's users write them: harmless fields are taken, others are refused."""

import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F

from mcore.errors import ConfigError
from mcore.model_parallel_config import ModelParallelConfig
from mcore.transformer.transformer_config import TransformerConfig

SIZES = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4}


def test_what_says_nothing_new_is_accepted():
    config = TransformerConfig(
        **SIZES,
        use_cpu_initialization=True,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        autocast_dtype=torch.bfloat16,
        activation_func=F.gelu,
        num_moe_experts=None,
        expert_model_parallel_size=1,
        deallocate_pipeline_outputs=True,
        attention_softmax_in_fp32=True,
        no_sync_func=None,
    )
    assert config == TransformerConfig(**SIZES, params_dtype=torch.bfloat16)
    assert dataclasses.replace(config, num_layers=3).num_layers == 3
    assert pickle.loads(pickle.dumps(config)) == config
    assert ModelParallelConfig(pipeline_dtype=torch.float32) == ModelParallelConfig()
    TransformerConfig(**SIZES, gated_linear_unit=True, activation_func=F.silu)


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"pipeline_dtype": torch.bfloat16}, ["pipeline_dtype=torch.bfloat16", "params_dtype"]),
        ({"bf16": True}, ["bf16=True", "params_dtype=torch.bfloat16"]),
        ({"activation_func": F.relu}, ["activation_func=relu", "gelu"]),
        ({"activation_func": F.silu}, ["activation_func=silu", "gated_linear_unit"]),
        ({"init_method": torch.nn.init.zeros_}, ["init_method=zeros_", "init_method_std"]),
        ({"num_moe_experts": 8}, ["num_moe_experts=8", "experts"]),
        ({"grad_scale_func": len}, ["grad_scale_func=len", "ScheduleHooks"]),
        ({"window_size": (7, 0)}, ["window_size=(7, 0)", "sliding_window"]),
        ({"num_moe_experts": 8, "fp8": "hybrid"}, ["num_moe_experts=8", "fp8='hybrid'"]),
    ],
)
def test_what_would_change_the_model_is_refused_with_its_replacement(options, fragments):
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(**SIZES, **options)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_what_nobody_knows_is_a_type_error():
    with pytest.raises(TypeError, match="number_of_layers"):
        TransformerConfig(**SIZES, number_of_layers=2)
