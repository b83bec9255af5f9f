"""Make the folders beside this file: DeepSpeed trains tiny models and saves them.

Needs the package deepspeed (0.19.8 made what is committed) and torch for CPUs; the tests do not:

    DS_ACCELERATOR=cpu python make.py [CASE...]

Each CASE/ holds what `save_checkpoint` wrote and `wanted.safetensors`: the weights in fp32 that
DeepSpeed's own zero_to_fp32 takes from it (for a case with several model-parallel ranks, which
zero_to_fp32 does not know, those of the live engine, with `MM.` of the rank before each name).
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
STEPS = 3

#: Names as Megatron-DeepSpeed's arguments have them, and what it derives from them.
GPT = {
    "num_layers": 2,
    "hidden_size": 9,
    "ffn_hidden_size": 15,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_channels": 3,
    "seq_length": 7,
    "max_position_embeddings": 7,
    "padded_vocab_size": 32,
    "vocab_size": 29,
    "swiglu": False,
    "normalization": "layernorm",
    "add_bias_linear": True,
    "add_position_embedding": True,
    "use_rotary_position_embeddings": False,
    "untie_embeddings_and_output_weights": False,
    "bias_gelu_fusion": True,
    "ds_num_experts": [1],
    "rope_theta": 10000,
    "layernorm_epsilon": 1e-5,
    "iteration": STEPS,
}
LLAMA = GPT | {
    "hidden_size": 12,
    "kv_channels": 4,
    "num_key_value_heads": 1,
    "swiglu": True,
    "normalization": "rmsnorm",
    "add_bias_linear": False,
    "add_position_embedding": False,
    "use_rotary_position_embeddings": True,
    "untie_embeddings_and_output_weights": True,
    "bias_gelu_fusion": False,
}
EVEN = {"hidden_size": 8, "num_attention_heads": 4, "kv_channels": 2, "ffn_hidden_size": 16}

#: Case: (arguments, ZeRO stage, bf16, tensor-parallel size, further settings of ZeRO).
CASES = {
    "gpt_stage0": (GPT, 0, False, 1, {}),
    "gpt_stage1": (GPT, 1, True, 1, {}),
    "gpt_stage2_frozen": (GPT, 2, False, 1, {}),
    "gpt_stage3_frozen": (GPT, 3, False, 1, {}),
    "llama_stage2": (LLAMA, 2, True, 1, {"round_robin_gradients": True}),
    "llama_stage3": (LLAMA, 3, True, 1, {"stage3_param_persistence_threshold": 0}),
    "gpt_stage1_tp2": (GPT | EVEN | {"num_key_value_heads": 4}, 1, True, 2, {}),
    "llama_stage3_tp2": (LLAMA | EVEN | {"num_key_value_heads": 2}, 3, True, 2, {}),
    "gpt_pipeline_stage1": (GPT, 1, True, 1, {}),
    "hf_llama_stage2": (None, 2, True, 1, {}),
    "hf_llama_stage3": (None, 3, False, 1, {}),
}


class Copy(torch.autograd.Function):
    """Identity whose gradient is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.group is not None:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """Sum over the tensor-parallel ranks whose gradient is passed on."""

    @staticmethod
    def forward(ctx, x, group):  # noqa: ARG004
        x = x.clone()
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        return gradient, None


class Rms(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def norm(a):
    return Rms(a.hidden_size) if a.normalization == "rmsnorm" else nn.LayerNorm(a.hidden_size)


class Attention(nn.Module):
    def __init__(self, a, tp):
        super().__init__()
        self.groups, self.d = a.num_key_value_heads // tp, a.kv_channels
        self.heads = a.num_attention_heads // tp
        rows = (self.heads + 2 * self.groups) * self.d
        self.query_key_value = nn.Linear(a.hidden_size, rows, a.add_bias_linear)
        self.dense = nn.Linear(self.heads * self.d, a.hidden_size, a.add_bias_linear)

    def forward(self, x, group):
        b, s, _ = x.shape
        qkv = self.query_key_value(Copy.apply(x, group)).view(b, s, self.groups, -1, self.d)
        q, k, v = qkv.split([self.heads // self.groups, 1, 1], dim=3)
        q, k, v = (y.expand(b, s, self.groups, q.shape[3], self.d).flatten(2, 3) for y in (q, k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = nn.functional.linear(out.transpose(1, 2).flatten(2), self.dense.weight)
        out = Sum.apply(out, group)
        return out if self.dense.bias is None else out + self.dense.bias


class Mlp(nn.Module):
    def __init__(self, a, tp):
        super().__init__()
        self.gated, ffn = a.swiglu, a.ffn_hidden_size // tp
        self.dense_h_to_4h = nn.Linear(a.hidden_size, ffn * (1 + a.swiglu), a.add_bias_linear)
        self.dense_4h_to_h = nn.Linear(ffn, a.hidden_size, a.add_bias_linear)

    def forward(self, x, group):
        x = self.dense_h_to_4h(Copy.apply(x, group))
        if self.gated:
            gate, up = x.chunk(2, -1)
            x = nn.functional.silu(gate) * up
        else:
            x = nn.functional.gelu(x, approximate="tanh")
        x = Sum.apply(nn.functional.linear(x, self.dense_4h_to_h.weight), group)
        return x if self.dense_4h_to_h.bias is None else x + self.dense_4h_to_h.bias


class Layer(nn.Module):
    def __init__(self, a, tp):
        super().__init__()
        self.input_layernorm, self.self_attention = norm(a), Attention(a, tp)
        self.post_attention_layernorm, self.mlp = norm(a), Mlp(a, tp)

    def forward(self, x, group):
        x = x + self.self_attention(self.input_layernorm(x), group)
        return x + self.mlp(self.post_attention_layernorm(x), group)


class Gpt(nn.Module):
    """The parameters of Megatron-DeepSpeed's GPTModel, by its names, and a loss that uses all."""

    def __init__(self, a, tp, group, tp_rank):
        super().__init__()
        self.group, self.tied = group, not a.untie_embeddings_and_output_weights
        rows = a.padded_vocab_size // tp
        self.start = rows * tp_rank
        language_model = nn.Module()
        embedding = nn.Module()
        embedding.word_embeddings = nn.Embedding(rows, a.hidden_size)
        if a.add_position_embedding:
            embedding.position_embeddings = nn.Embedding(a.max_position_embeddings, a.hidden_size)
        encoder = nn.Module()
        encoder.layers = nn.ModuleList(Layer(a, tp) for _ in range(a.num_layers))
        encoder.final_layernorm = norm(a)
        language_model.embedding, language_model.encoder = embedding, encoder
        if not self.tied:
            language_model.output_layer = nn.Linear(a.hidden_size, rows, bias=False)
        self.language_model = language_model
        if self.tied and tp == 1:
            self.word_embeddings_for_head = embedding.word_embeddings

    def forward(self, tokens):
        embedding, encoder = self.language_model.embedding, self.language_model.encoder
        words = embedding.word_embeddings
        local = tokens - self.start
        inside = (local >= 0) & (local < words.weight.shape[0])
        x = words(local.clamp(0, words.weight.shape[0] - 1)) * inside[..., None]
        x = Sum.apply(x, self.group)
        if hasattr(embedding, "position_embeddings"):
            x = x + embedding.position_embeddings(torch.arange(tokens.shape[1]))
        for layer in encoder.layers:
            x = layer(x, self.group)
        x = Copy.apply(encoder.final_layernorm(x), self.group)
        if self.tied and hasattr(self, "word_embeddings_for_head"):
            head = self.word_embeddings_for_head.weight
        else:
            head = words.weight if self.tied else self.language_model.output_layer.weight
        return Sum.apply((nn.functional.linear(x, head).float() - 1).square().mean(), self.group)


class Embedding(nn.Module):
    """First stage of a pipeline, as Megatron-DeepSpeed's EmbeddingPipe names its parameters."""

    def __init__(self, a):
        super().__init__()
        self.word_embeddings = nn.Embedding(a.padded_vocab_size, a.hidden_size)
        self.position_embeddings = nn.Embedding(a.max_position_embeddings, a.hidden_size)

    @property
    def word_embeddings_weight(self):
        return self.word_embeddings.weight

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        return self.word_embeddings(tokens) + self.position_embeddings(positions)


class PipelineLayer(Layer):
    def forward(self, x):
        return super().forward(x, None)


def pipeline(a):
    """The layers in the order of Megatron-DeepSpeed's GPTModelPipe: functions have numbers too."""

    def logits(embedding, x):
        return nn.functional.linear(x, embedding.word_embeddings_weight)

    tied = {"tied_weight_attr": "word_embeddings_weight"}
    return PipelineModule(
        [
            lambda tokens: tokens,
            TiedLayerSpec("embed", Embedding, a, **tied),
            lambda x: x,
            *(LayerSpec(PipelineLayer, a, 1) for _ in range(a.num_layers)),
            lambda x: x,
            LayerSpec(nn.LayerNorm, a.hidden_size),
            TiedLayerSpec("embed", Embedding, a, forward_fn=logits, **tied),
        ],
        topology=PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=2),
        loss_fn=lambda x, _: (x.float() - 1).square().mean(),
        partition_method="type:PipelineLayer",
    )


class HfLoss(transformers.LlamaForCausalLM):
    """Hugging Face's own model; called with tokens it gives the loss."""

    def forward(self, tokens):
        return super().forward(input_ids=tokens, labels=tokens).loss


def hf_config():
    return transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=12,
        intermediate_size=18,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=7,
        architectures=["LlamaForCausalLM"],
    )


class Mpu:
    """The model-parallel unit that DeepSpeed asks for its groups."""

    def __init__(self, tp, dp):
        rank = dist.get_rank()
        for first in range(0, tp * dp, tp):
            ranks = list(range(first, first + tp))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.model_group = group
        for first in range(tp):
            ranks = list(range(first, tp * dp, tp))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.data_group = group

    def get_model_parallel_group(self):
        return self.model_group

    def get_model_parallel_rank(self):
        return dist.get_rank(self.model_group)

    def get_model_parallel_world_size(self):
        return dist.get_world_size(self.model_group)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self):
        return self.data_group

    def get_data_parallel_rank(self):
        return dist.get_rank(self.data_group)

    def get_data_parallel_world_size(self):
        return dist.get_world_size(self.data_group)


def configuration(stage, bf16, more):
    zero = {"stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero | more,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def built(case, a, tp, mpu):
    """The model of a case, its weights the same on all data-parallel ranks."""
    torch.manual_seed(1234)  # norms and biases are the same on all tensor-parallel ranks
    if a is None:
        return HfLoss(hf_config())
    if "pipeline" in case:
        return pipeline(a)
    tp_rank = mpu.get_model_parallel_rank()
    model = Gpt(a, tp, mpu.model_group if tp > 1 else None, tp_rank)
    generator = torch.Generator().manual_seed(99 + tp_rank)
    for parameter in model.parameters():
        if tp > 1 and parameter.dim() == 2 and parameter.shape[0] != a.max_position_embeddings:
            parameter.data.normal_(0, 0.2, generator=generator)
    if "frozen" in case:
        model.language_model.embedding.position_embeddings.weight.requires_grad_(False)
    return model


def work(rank, case, root, world):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    options, stage, bf16, tp, more = CASES[case]
    a = argparse.Namespace(**options, tensor_model_parallel_size=tp) if options else None
    deepspeed.init_distributed("gloo")
    is_pipeline = "pipeline" in case
    mpu = Mpu(tp, world // tp)
    model = built(case, a, tp, mpu)
    used = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in used if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in used if p.dim() == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        config=configuration(stage, bf16, more),
        mpu=mpu if tp > 1 else None,
    )
    tokens = torch.Generator().manual_seed(7 + mpu.get_data_parallel_rank())
    batches = [torch.randint(29, (2, 7), generator=tokens) for _ in range(STEPS)]
    for batch in batches:
        if is_pipeline:
            engine.train_batch(iter([(batch, batch)]))
        else:
            engine.backward(engine(batch))
            engine.step()
    live = {
        name: safe_get_full_fp32_param(parameter).detach().clone()
        for name, parameter in engine.module.named_parameters()
        if stage and parameter.requires_grad
    }
    client = {"args": a, "iteration": STEPS, "checkpoint_version": 3.0} if a else {}
    engine.save_checkpoint(str(root), tag=f"global_step{STEPS}", client_state=client)
    ranks = [None] * world
    dist.all_gather_object(ranks, live)
    if rank == 0:
        # One data-parallel rank's: those of a pipeline stage, or of a tensor-parallel group.
        ranks = ranks[:: world // 2] if is_pipeline else ranks[:tp]
        save_file(
            wanted(root, stage, ranks, bool(more.get("round_robin_gradients"))),
            root / "wanted.safetensors",
        )
        if a is None:
            hf_config().save_pretrained(root)
    dist.barrier()


def wanted(root, stage, ranks, round_robin):
    """Weights in fp32: DeepSpeed's own answer, which must be that of the engines."""
    if len(ranks) > 1:
        return {f"{r:02d}.{name}": t for r, live in enumerate(ranks) for name, t in live.items()}
    if stage == 0:
        path = root / f"global_step{STEPS}" / "mp_rank_00_model_states.pt"
        state = torch.load(path, weights_only=False)["module"]
    else:
        state = get_fp32_state_dict_from_zero_checkpoint(str(root))
        if not round_robin:  # the engine itself confuses parameters then
            assert all(torch.equal(state[name], tensor) for name, tensor in ranks[0].items())
    return {name: tensor.clone().contiguous() for name, tensor in state.items()}


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        root = HERE / case
        shutil.rmtree(root, ignore_errors=True)
        world = 4 if "pipeline" in case else 2 * CASES[case][3]
        mp.start_processes(work, (case, root, world), world, start_method="fork")
        for script in root.glob("zero_to_*.py"):  # copies of its own recovery scripts
            script.unlink()
