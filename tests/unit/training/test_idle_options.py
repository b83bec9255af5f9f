import pytest

from mcore.config.checkpoint import CheckpointConfig
from mcore.config.distributed import DistributedDataParallelConfig
from mcore.config.run import RunConfig
from mcore.config.transformer import TransformerConfig
from mcore.training.idle_options import idle_options

ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}


def idle(model=None, **ddp):
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    config = RunConfig(
        model=TransformerConfig(**sizes, **(model or {})), ddp=DistributedDataParallelConfig(**ddp)
    )
    return [option for option, _ in idle_options(config)]


@pytest.mark.parametrize(
    ("model", "ddp", "wanted"),
    [
        ({}, {}, []),
        ({"sequence_parallel": True}, {}, ["--sequence-parallel"]),
        ({"recompute_modules": ("mlp",)}, {}, ["--recompute-modules"]),
        ({"recompute_modules": ("mlp",), "recompute_granularity": "selective"}, {}, []),
        (
            {},
            {"reshard_every_microbatch": True, "use_distributed_optimizer": True},
            ["--reshard-every-microbatch"],
        ),
        ({}, {"reshard_every_microbatch": True, **ZERO3}, ["--reshard-every-microbatch"]),
        (
            {"pipeline_model_parallel_size": 2},
            {"reshard_every_microbatch": True, **ZERO3},
            [],
        ),
        (
            {},
            {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 9, **ZERO3},
            ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size"],
        ),
        ({}, {"num_buckets": 2, **ZERO3}, ["--ddp-num-buckets"]),
        ({}, {"num_buckets": 2}, ["--ddp-num-buckets"]),
        ({}, {"num_buckets": 2, "overlap_grad_reduce": True}, []),
        ({}, {"num_buckets": 2, "data_parallel_sharding_strategy": "optim_grads"}, []),
    ],
)
def test_what_has_no_effect_is_named(model, ddp, wanted):
    assert idle(model, **ddp) == wanted


def test_what_is_not_loaded_from_nowhere():
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    spared = {"load_rng": False, "load_optim": False}
    for load, wanted in ((None, ["--no-load-rng", "--no-load-optim"]), ("folder", [])):
        config = RunConfig(
            model=TransformerConfig(**sizes), checkpoint=CheckpointConfig(load=load, **spared)
        )
        assert [option for option, _ in idle_options(config)] == wanted
