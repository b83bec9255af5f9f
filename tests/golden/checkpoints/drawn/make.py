"""Make the folders beside this file: Megatron-Core (0.19.2) writes a tiny model on two processes.

    python make.py OUT [legacy_pp2_vpp2] [torch_dist]

Two processes: pipeline 2 with two virtual stages, four layers, as Megatron's `torch` format; then
the same model as `torch_dist`. Every parameter is drawn from a generator seeded by its name with
the layer's global number, which Megatron-Core itself says, so a test can draw them again.
"""

import argparse
import sys
import zlib
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

# No GPU is at hand.
mock.patch.object(torch.cuda, "synchronize").start()
mock.patch.object(torch.cuda, "current_device", return_value="cpu").start()
LAYERS, HIDDEN, HEADS, FFN, VOCABULARY, POSITIONS = 4, 16, 2, 24, 32, 8
MODEL = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "ffn_hidden_size": FFN,
    "kv_channels": HIDDEN // HEADS,
}


def draw(name, like):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator)


def global_name(name, offset):
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + offset)
    return ".".join(parts)


def build(vp_stage, pp, vpp):
    config = TransformerConfig(
        **MODEL,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    more = {} if vpp is None else {"vp_stage": vp_stage}
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=vpp is None, **more)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=vpp is None, **more)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        POSITIONS,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
        **more,
    )
    offset = model.decoder.layers[0].layer_number - 1
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(draw(global_name(name, offset), param))
    return model


def arguments(pp, vpp):
    return argparse.Namespace(
        **MODEL,
        max_position_embeddings=POSITIONS,
        seq_length=POSITIONS,
        padded_vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=VOCABULARY,
        add_position_embedding=True,
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        norm_epsilon=1e-5,
        swiglu=False,
        add_bias_linear=True,
        bias_gelu_fusion=False,
        untie_embeddings_and_output_weights=True,
        group_query_attention=False,
        num_query_groups=1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        params_dtype=torch.float32,
        consumed_train_samples=12,
        tokenizer_type="NullTokenizer",
    )


def work(rank, out, what):
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{out}/store.{what}", 2), rank=rank, world_size=2
    )
    vpp = 2 if what == "legacy_pp2_vpp2" else None
    parallel_state.initialize_model_parallel(1, 2, vpp)
    chunks = [build(stage, 2, vpp) for stage in range(vpp or 1)]
    root = Path(out, what)
    folder = root / "iter_0000005"
    if what.startswith("legacy"):
        content = {"args": arguments(2, vpp), "checkpoint_version": 3.0, "iteration": 5}
        for number, chunk in enumerate(chunks):
            content[f"model{number}"] = chunk.state_dict_for_save_checkpoint()
        place = folder / f"mp_rank_00_{rank:03d}"
        place.mkdir(parents=True)
        torch.save(content, place / "model_optim_rng.pt")
    else:
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        state = {"args": arguments(2, None), "checkpoint_version": 3.0, "iteration": 5}
        state |= chunks[0].sharded_state_dict()
        dist_checkpointing.save(state, str(folder))
    dist.barrier()
    if rank == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("5")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    out = sys.argv[1]
    Path(out).mkdir(parents=True, exist_ok=True)
    for what in sys.argv[2:] or ["legacy_pp2_vpp2", "torch_dist"]:
        mp.spawn(work, (out, what), nprocs=2)
