"""What recomputation and offloading refuse beside each other, and sizes that leave nothing."""

import pytest

from mcore.config.transformer import TransformerConfig
from mcore.errors import ConfigError

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "recompute",
    [
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    ],
)
def test_offloading_excludes_what_would_make_it_idle(recompute):
    TransformerConfig(**SIZES, **recompute)
    with pytest.raises(ConfigError, match="cpu_offloading_num_layers excludes"):
        TransformerConfig(**SIZES, **recompute, cpu_offloading_num_layers=1)


def test_a_gated_mlp_without_width_is_refused():
    with pytest.raises(ConfigError, match=r"hidden_size \(16\) gives a gated MLP no width"):
        TransformerConfig(**SIZES, gated_linear_unit=True)
    TransformerConfig(**SIZES, gated_linear_unit=True, ffn_hidden_size=32)
