"""Fields of Megatron's configuration classes that mcore's do not have, and what becomes of them.

A value that says what mcore does anyway is accepted, so that Megatron's code runs; any other is
refused with its replacement. Nothing is stored.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from mcore.config.fields import refuse

_Config = TypeVar("_Config")

#: Does a value say what mcore does? Gets the built configuration and the value.
_Accepts = Callable[[Any, Any], bool]


def _any(config: Any, value: Any) -> bool:
    del config, value
    return True


def _off(config: Any, value: Any) -> bool:
    del config
    return value is None or value is False or (isinstance(value, int) and value == 0)


def _one(config: Any, value: Any) -> bool:
    del config
    return value in (None, 1)


def _precision(dtype: torch.dtype) -> _Accepts:
    return lambda config, value: not value or config.params_dtype == dtype


def _residual_type(config: Any, value: Any) -> bool:
    return value is None or value == config.pipeline_dtype


def _activation(config: Any, value: Any) -> bool:
    return value is (F.silu if config.gated_linear_unit else F.gelu)


_WEIGHTS = "initial weights are normal, of init_method_std and the seed; leave it out"
_HOOKS = "pass hooks=ScheduleHooks(...) to the schedule, or an object of your own that has it"
_EXPERTS = "mixture-of-experts models are not built; leave it out"
_STAGES = "give GPTModel(layer_range=...), or the flags of `pretrain_gpt.py` that split layers"

#: Name -> (which values are accepted, what to do about others).
_FIELDS: Mapping[str, tuple[_Accepts, str]] = {
    **dict.fromkeys(
        (
            "use_cpu_initialization",
            "async_tensor_model_parallel_allreduce",
            "attention_backend",
            "attention_softmax_in_fp32",
            "autocast_dtype",
            "barrier_with_L1_time",
            "batch_p2p_comm",
            "batch_p2p_sync",
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "calculate_per_token_loss",
            "cross_entropy_fusion_impl",
            "deallocate_pipeline_outputs",
            "disable_parameter_transpose_cache",
            "masked_softmax_fusion",
            "memory_efficient_layer_norm",
            "apply_rope_fusion",
            "overlap_p2p_comm",
            "persist_layer_norm",
            "use_ring_exchange_p2p",
        ),
        (_any, ""),
    ),
    "pipeline_dtype": (
        _residual_type,
        "it follows from params_dtype and fp32_residual_connection; leave it out",
    ),
    "bf16": (_precision(torch.bfloat16), "give params_dtype=torch.bfloat16"),
    "fp16": (_precision(torch.float16), "give params_dtype=torch.float16"),
    "activation_func": (
        _activation,
        "MLPs have gelu (openai_gelu for its tanh form), or silu with gated_linear_unit",
    ),
    "init_method": (_off, _WEIGHTS),
    "output_layer_init_method": (_off, _WEIGHTS),
    **dict.fromkeys(
        (
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
            "grad_scale_func",
            "finalize_model_grads_func",
        ),
        (_off, _HOOKS),
    ),
    "timers": (_off, "leave it out"),
    "enable_autocast": (_off, "precision is params_dtype; leave it out"),
    "variable_seq_lengths": (
        _off,
        "a GPT model's stages send one shape; a model of your own says variable_seq_lengths in a "
        "config of its own, which the schedule reads",
    ),
    "expert_model_parallel_size": (_one, _EXPERTS),
    "expert_tensor_parallel_size": (_one, _EXPERTS),
    "num_moe_experts": (_off, _EXPERTS),
    "moe_grouped_gemm": (_off, _EXPERTS),
    "moe_router_topk": (_any, ""),  # it has a default that says nothing without experts
    "tp_comm_overlap": (_off, "it needs transformer-engine; leave it out"),
    "fp8": (_off, "it needs transformer-engine; leave it out"),
    "multi_latent_attention": (_off, "it is not built; leave it out"),
    "layernorm_zero_centered_gamma": (_off, "norms have plain weights; leave it out"),
    "apply_query_key_layer_scaling": (_off, "softmax is taken in float32; leave it out"),
    "apply_residual_connection_post_layernorm": (_off, "it is not built; leave it out"),
    "softmax_scale": (_off, "scores are divided by the root of kv_channels; leave it out"),
    "window_size": (_off, "give sliding_window, which counts the token itself: LEFT + 1"),
    "cp_comm_type": (_off, "context parallelism is not built; leave it out"),
    "first_pipeline_num_layers": (_off, _STAGES),
    "last_pipeline_num_layers": (_off, _STAGES),
    "num_layers_in_first_pipeline_stage": (_off, _STAGES),
    "num_layers_in_last_pipeline_stage": (_off, _STAGES),
    "account_for_embedding_in_pipeline_split": (_off, _STAGES),
    "account_for_loss_in_pipeline_split": (_off, _STAGES),
    "deterministic_mode": (_off, "call torch.use_deterministic_algorithms; leave it out"),
    "cpu_offloading": (_off, "give cpu_offloading_num_layers"),
}


def accepts_megatron_names(config_class: type[_Config]) -> type[_Config]:
    """Let a configuration class take Megatron's further fields where they change nothing."""
    build: Any = config_class.__init__
    fields = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]

    @functools.wraps(build)
    def init(self: Any, **options: Any) -> None:
        names = [name for name in options if name in _FIELDS and name not in fields]
        foreign = {name: options.pop(name) for name in names}
        build(self, **options)
        refuse(_problems(self, foreign))

    config_class.__init__ = init  # type: ignore[method-assign]
    return config_class


def _problems(config: Any, foreign: Mapping[str, Any]) -> Iterator[str]:
    for name, value in foreign.items():
        accepts, instead = _FIELDS[name]
        if not accepts(config, value):
            yield f"{name}={_shown(value)} is a field of Megatron's that mcore lacks: {instead}"


def _shown(value: Any) -> str:
    is_function = isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
    return str(value.__name__) if is_function else repr(value)
