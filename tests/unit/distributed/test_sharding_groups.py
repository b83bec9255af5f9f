"""Groups of hybrid sharding wait as long as the job says."""

from datetime import timedelta

import pytest
import torch

from mcore import parallel_state
from mcore.config.distributed import DistributedDataParallelConfig
from mcore.config.run import RunConfig
from mcore.config.training import RuntimeConfig
from mcore.config.transformer import TransformerConfig
from mcore.testing import run_distributed
from mcore.training.setup import wrap_chunks


def timeouts():
    context = parallel_state.initialize_model_parallel()
    config = RunConfig(
        model=TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True, num_distributed_optimizer_instances=2
        ),
        runtime=RuntimeConfig(distributed_timeout_minutes=7),
    )
    (chunk,) = wrap_chunks(config, context, [torch.nn.Linear(2, 2)])
    groups = (chunk.groups.shard, chunk.groups.replica)
    cpu = torch.device("cpu")
    return [group.handle._get_backend(cpu).options._timeout for group in groups]


@pytest.mark.dist
def test_the_jobs_timeout_holds_for_groups_of_hybrid_sharding():
    assert run_distributed(timeouts, 2) == [[timedelta(minutes=7)] * 2] * 2
