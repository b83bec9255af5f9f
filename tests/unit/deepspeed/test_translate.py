"""What DeepSpeed's keys mean here, and what is refused by its path."""

import base64
import json
import math

import pytest

from mcore.deepspeed import BatchSizes, read_config, solve_batch, translate
from mcore.errors import ConfigError


def read(config, world_size=1, **given):
    """Translate with options of the command line given as section__field=value."""
    return translate(config, lambda *place: given.get("__".join(place)), world_size)


def meaning(config, world_size=1, **given):
    translation = read(config, world_size, **given)
    assert translation.problems == []
    return {f"{s.section}.{s.field}": s.value for s in translation.settings}


# --- the batch triangle, whose table is DeepSpeed's


@pytest.mark.parametrize(
    ("corners", "copies", "sizes"),
    [
        ((32, 2, 4), 4, (32, 2, 4)),
        ((32, 2, None), 4, (32, 2, 4)),
        ((32, None, 4), 4, (32, 2, 4)),
        ((None, 2, 4), 4, (32, 2, 4)),
        ((32, None, None), 4, (32, 8, 1)),
        ((None, 2, None), 4, (8, 2, 1)),
    ],
)
def test_two_corners_give_the_third(corners, copies, sizes):
    assert solve_batch(*corners, copies) == BatchSizes(*sizes)


@pytest.mark.parametrize("accumulation", [None, 4])
def test_too_little_is_no_triangle(accumulation):
    assert solve_batch(None, None, accumulation, 4) is None


@pytest.mark.parametrize(
    ("corners", "fragments"),
    [
        ((256, 2, 8), ["(256)", "(2)", "(8)", "(4) = 64", "train_batch_size 64",
                       "train_micro_batch_size_per_gpu 8", "gradient_accumulation_steps 32"]),
        ((30, 2, None), ["(30)", "= 24"]),
        ((30, None, 4), ["(30)", "= 16"]),
    ],
)  # fmt: skip
def test_a_product_that_does_not_come_out_is_refused_with_the_equation(corners, fragments):
    with pytest.raises(ConfigError) as caught:
        solve_batch(*corners, 4)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_corners_of_file_and_command_line_are_one_triangle():
    both = {"train_batch_size": 64, "gradient_accumulation_steps": 8}
    sizes = {"training.global_batch_size": 64, "training.micro_batch_size": 2}
    assert meaning(both, 64, model__tensor_model_parallel_size=8,
                   model__pipeline_model_parallel_size=2) == sizes  # fmt: skip
    given = {"training__micro_batch_size": 2}
    assert meaning({"train_batch_size": 64}, 4, **given) == {"training.global_batch_size": 64}
    wrong = read({"train_batch_size": 256, "gradient_accumulation_steps": 8}, 4, **given)
    (problem,) = wrong.problems
    for fragment in ("256", "(2)", "(8)", "= 64", "is --micro-batch-size 2"):
        assert fragment in problem
    assert "beside it" in read({"gradient_accumulation_steps": 8}).problems[0]


def test_every_corner_that_is_no_size_is_told():
    wrong = {
        "train_batch_size": "many",
        "train_micro_batch_size_per_gpu": 1.5,
        "gradient_accumulation_steps": 0,
    }
    problems = read(wrong).problems
    assert [problem.split()[0] for problem in problems] == list(wrong)


# --- blocks


@pytest.mark.parametrize(
    ("config", "given", "wanted"),
    [
        ({"bf16": {"enabled": True}}, {}, {"training.bf16": True}),
        ({"bfloat16": {"enabled": True}}, {}, {"training.bf16": True}),
        ({"bf16": {"enabled": "auto"}}, {}, {}),
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12,
                      "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}},
            {},
            {"optimizer.fp16": True, "optimizer.initial_loss_scale": 4096.0,
             "optimizer.loss_scale_window": 500, "optimizer.hysteresis": 3,
             "optimizer.min_loss_scale": 2.0},
        ),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {},
         {"optimizer.fp16": True, "optimizer.loss_scale": 128.0}),
        ({"fp16": {"enabled": False, "loss_scale": 128}}, {}, {"optimizer.fp16": False}),
        ({"zero_optimization": True}, {},
         {"ddp.data_parallel_sharding_strategy": "optim"}),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8,
                                   "allgather_bucket_size": 2e8, "overlap_comm": True,
                                   "contiguous_gradients": True, "offload_optimizer": None}},
            {},
            {"ddp.data_parallel_sharding_strategy": "optim_grads", "ddp.bucket_size": 500_000_000,
             "ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True},
        ),
        ({"zero_optimization": {"stage": 3, "allgather_bucket_size": 100, "overlap_comm": True}},
         {},
         {"ddp.data_parallel_sharding_strategy": "optim_grads_params", "ddp.bucket_size": 100,
          "ddp.overlap_grad_reduce": True}),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5,
                                                                  "pin_memory": True}}},
         {},
         {"ddp.data_parallel_sharding_strategy": "optim",
          "optimizer.optimizer_cpu_offload": True, "optimizer.optimizer_offload_fraction": 0.5}),
        ({"zero_optimization": {"cpu_offload": True}}, {},
         {"optimizer.optimizer_cpu_offload": True}),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, {"model__hidden_size": 64},
         {"ddp.bucket_size": 4096}),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-7,
                                                      "weight_decay": 0.05}}},
            {},
            {"optimizer.optimizer": "adam", "optimizer.lr": 1e-4, "optimizer.adam_beta1": 0.8,
             "optimizer.adam_beta2": 0.9, "optimizer.adam_eps": 1e-7,
             "optimizer.weight_decay": 0.05},
        ),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {},
         {"optimizer.optimizer": "adam", "optimizer.decoupled_weight_decay": False}),
        ({"optimizer": {"type": "Lion", "params": {"lr": "auto", "betas": [0.9, 0.99]}}}, {},
         {"optimizer.optimizer": "lion", "optimizer.lion_beta1": 0.9,
          "optimizer.lion_beta2": 0.99}),
        (
            {"scheduler": {"type": "WarmupDecayLR",
                           "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 1e-3,
                                      "warmup_num_steps": 10, "total_num_steps": 100,
                                      "warmup_type": "linear"}}},
            {},
            {"scheduler.lr_decay_style": "linear", "scheduler.lr_warmup_init": 1e-6,
             "optimizer.lr": 1e-3, "scheduler.lr_warmup_iters": 10,
             "scheduler.lr_decay_iters": 100, "optimizer.min_lr": 1e-6,
             "scheduler.lr_warmup_style": "linear"},
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}, {},
         {"scheduler.lr_decay_style": "constant", "scheduler.lr_warmup_iters": 10,
          "scheduler.lr_warmup_style": "log"}),
        (
            {"scheduler": {"type": "WarmupCosineLR",
                           "params": {"warmup_min_ratio": 0.01, "cos_min_ratio": 0.5,
                                      "total_num_steps": 100, "warmup_type": "linear"}}},
            {"optimizer__lr": 2.0},
            {"scheduler.lr_decay_style": "cosine", "scheduler.lr_decay_iters": 100,
             "scheduler.lr_warmup_init": 0.02, "optimizer.min_lr": 1.0,
             "scheduler.lr_warmup_style": "linear"},
        ),
        ({"gradient_clipping": 0.5}, {}, {"optimizer.clip_grad": 0.5}),
        ({"data_types": {"grad_accum_dtype": "bf16"}, "bf16": {"enabled": True}}, {},
         {"training.bf16": True, "ddp.grad_reduce_in_fp32": False}),
        ({"communication_data_type": "fp32"}, {}, {"ddp.grad_reduce_in_fp32": True}),
        ({"activation_checkpointing": {"partition_activations": True}},
         {"model__recompute_granularity": "full", "model__tensor_model_parallel_size": 2},
         {"model.distribute_saved_activations": True}),
        # Contiguous memory without a number of checkpoints fails in DeepSpeed; the seeds have it.
        ({"activation_checkpointing": {"partition_activations": True,
                                       "contiguous_memory_optimization": True}}, {}, {}),
        ({"flops_profiler": {"enabled": False}, "elasticity": {"enabled": False},
          "steps_per_print": 10, "wall_clock_breakdown": False, "zero_optimization": {}}, {}, {}),
    ],
)  # fmt: skip
def test_a_block_means(config, given, wanted):
    assert meaning(config, **given) == wanted


@pytest.mark.parametrize(
    "zero",
    [
        {"reduce_bucket_size": 5e8, "allgather_bucket_size": 2e8},
        {"allgather_bucket_size": 2e8, "reduce_bucket_size": 5e8},
    ],
)
def test_the_bucket_of_reduction_serves_gathering_in_any_order(zero):
    assert meaning({"zero_optimization": zero}) == {"ddp.bucket_size": 500_000_000}


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        ({"gradient_clipping": math.inf}, ["gradient_clipping (inf): use a finite number"]),
        ({"gradient_clipping": 10**400}, ["gradient_clipping", "finite"]),
        ({"zero_optimization": {"reduce_bucket_size": math.inf}},
         ["zero_optimization.reduce_bucket_size", "whole number"]),
        ({"train_batch_size": math.nan}, ["train_batch_size", "whole number"]),
        ({"fp16": {"enabled": True, "initial_scale_power": 2000}},
         ["fp16.initial_scale_power (2000)", "0 to 127"]),
        ({"communication_data_type": ["bf16"]}, ["communication_data_type", "use fp32"]),
        ({"zero_optimisation": {"stage": 1}}, ["zero_optimisation", "zero_optimization?"]),
        ({"zero_optimization": {"stages": 1}}, ["zero_optimization.stages", "stage"]),
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage", "4", "0, 1, 2 or 3"]),
        ({"fp16": {"enabled": "yes"}}, ["fp16.enabled", "'yes'", "true or false"]),
        ({"fp16": True}, ["fp16", "object"]),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}},
         ["zero_optimization.offload_param.device", "'cpu'"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
         ["zero_optimization.offload_optimizer.device", "'nvme'"]),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}},
         ["cpu_offload", "keep the second"]),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}},
         ["zero_hpz_partition_size", "--num-distributed-optimizer-instances"]),
        ({"optimizer": {"type": "OneBitAdam"}}, ["optimizer.type", "'OneBitAdam'", "AdamW"]),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
         ["optimizer.params.max_grad_norm", "gradient_clipping"]),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1.0}}},
         ["optimizer.params.learning_rate"]),
        ({"scheduler": {"type": "OneCycle"}}, ["scheduler.type", "'OneCycle'", "WarmupLR"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
         ["scheduler.params.warmup_type", "cubic", "linear"]),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
          "scheduler": {"type": "WarmupLR",
                        "params": {"warmup_max_lr": 2e-4, "warmup_type": "linear"}}},
         ["optimizer.params.lr", "scheduler.params.warmup_max_lr", "0.0001", "0.0002"]),
        ({"activation_checkpointing": {"cpu_checkpointing": True}},
         ["activation_checkpointing.cpu_checkpointing", "--cpu-offloading-num-layers"]),
        ({"activation_checkpointing": {"partitioned_activations": True}},
         ["activation_checkpointing.partitioned_activations"]),
        ({"communication_data_type": "bf16"}, ["communication_data_type", "'bf16'"]),
        ({"elasticity": {"enabled": True}}, ["elasticity"]),
        ({"tensorboard": {"enabled": True}}, ["tensorboard", "--tensorboard-dir"]),
        ({"train_batch_size": 0}, ["train_batch_size", "0"]),
        ({"train_batch_size": "many"}, ["train_batch_size", "'many'"]),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_its_path(config, fragments):
    (problem,) = read(config).problems
    for fragment in fragments:
        assert fragment in problem


def test_a_constant_scale_beside_a_dynamic_one_is_refused():
    fp16 = {"fp16": {"enabled": True, "loss_scale": 0}}
    (problem,) = read(fp16, optimizer__loss_scale=12.0).problems
    assert problem.startswith("fp16.loss_scale (0): 0 is a dynamic scale, and --loss-scale 12")
    constant = read({"fp16": {"enabled": True, "loss_scale": 128}, "gradient_clipping": 1.0})
    assert constant.notes() == []  # an initial scale would mean nothing


def test_a_wrong_type_does_not_hide_wrong_values():
    optimizer = {"type": "OneBitAdam", "params": {"lr": "much", "freeze_step": 4, "betas": [1]}}
    scheduler = {"type": "OneCycle", "params": {"warmup_num_steps": -0.5, "cycle_min_lr": 1}}
    problems = read({"optimizer": optimizer, "scheduler": scheduler}).problems
    paths = ["optimizer.type", "optimizer.params.lr", "optimizer.params.betas", "scheduler.type",
             "scheduler.params.warmup_num_steps"]  # fmt: skip
    assert [problem.split()[0] for problem in problems] == paths
    adamw = {"type": "AdamW", "params": {"adam_w_mode": False, "eps": "tiny"}}
    problems = read({"optimizer": adamw}).problems
    assert [problem.split()[0].split(".")[-1] for problem in problems] == ["adam_w_mode", "eps"]


def test_keys_without_effect_are_told_by_path_and_reason():
    zero = {"stage": 3, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e9,
            "contiguous_gradients": False}  # fmt: skip
    notes = "\n".join(read({"zero_optimization": zero, "gradient_clipping": 1.0}).notes())
    for key in ("stage3_max_live_parameters", "sub_group_size", "contiguous_gradients"):
        assert f"zero_optimization.{key}" in notes
    assert read({"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}).notes() == []


def test_defaults_that_differ_from_deepspeeds_are_told():
    notes = "\n".join(read({"fp16": {"enabled": True}}).notes())
    assert "gradient_clipping is not given: the default of --clip-grad holds" in notes
    assert "fp16.initial_scale_power is not given" in notes
    assert read({}, optimizer__clip_grad=0.5).notes() == []


# --- the file


def test_comments_base64_and_errors_of_the_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{ // a comment\n "a": "#1 // no comment", /* long\n one */ "b": 5e8 # end\n}')
    assert read_config(str(path)) == {"a": "#1 // no comment", "b": 5e8}
    word = base64.urlsafe_b64encode(json.dumps({"a": 1}).encode()).decode()
    assert read_config(word) == {"a": 1}
    path.write_text('{\n"a": 1,\n"a": 2}')
    with pytest.raises(ConfigError, match="'a' stands twice"):
        read_config(str(path))
    path.write_text('{\n/* one\ntwo */ "a": ,\n}')
    with pytest.raises(ConfigError, match="line 3"):
        read_config(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="one JSON object"):
        read_config(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(str(tmp_path / "absent.json"))
