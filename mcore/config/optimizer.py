"""Options of the optimizer and of its learning-rate and weight-decay schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mcore.config.fields import below, flag, not_one_of, refuse
from mcore.errors import ConfigError

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WarmupStyle = Literal["linear", "log"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayIncrStyle = Literal["constant", "linear", "cosine"]

#: fp16 and fp8 are Megatron's, and refused with the reason.
StateDtype = Literal["fp32", "bf16", "fp16", "fp8"]

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WARMUP_STYLES = ("linear", "log")
WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WEIGHT_DECAY_INCR_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The update rule. Parameters in a lower precision than fp32 get fp32 main parameters."""

    optimizer: Literal["adam", "sgd", "lion", "muon"] = flag(
        "adam",
        help="Update rule. muon: weight matrices of layers by orthogonalised momentum, all else by "
        "adam.",
    )
    lr: float | None = flag(None, help="Highest learning rate, reached at the end of the warmup.")
    min_lr: float = flag(0.0, help="Lowest learning rate of the decay.")
    decoupled_lr: float | None = flag(
        None, help="Highest learning rate of the word embedding and the output layer; --lr if none."
    )
    decoupled_min_lr: float | None = flag(
        None, help="Lowest learning rate of these two; --min-lr when absent."
    )
    weight_decay: float = flag(0.01, help="Weight decay; not applied to biases and 1-D parameters.")
    decoupled_weight_decay: bool = flag(
        True, help="Decay weights beside the update (AdamW) rather than through the gradient (L2)."
    )
    adam_beta1: float = flag(0.9, help="Decay of Adam's running mean of gradients.")
    adam_beta2: float = flag(0.999, help="Decay of Adam's running mean of squared gradients.")
    sgd_momentum: float = flag(0.9, help="Decay of SGD's running sum of gradients.")
    lion_beta1: float = flag(0.95, help="Weight of Lion's running mean in its update.")
    lion_beta2: float = flag(0.98, help="Decay of Lion's running mean of gradients.")
    muon_momentum: float = flag(0.95, help="Decay of Muon's running mean of gradients.")
    muon_nesterov: bool = flag(
        False,
        aliases=("--muon-use-nesterov",),
        help="Orthogonalise a mean of gradient and momentum rather than the momentum.",
    )
    muon_split_qkv: bool = flag(
        True,
        name="--muon-split-qkv",
        help="Orthogonalise the rows of queries, keys and values each as a matrix of their own.",
    )
    muon_num_ns_steps: int = flag(5, help="Newton-Schulz steps of Muon's orthogonalisation.")
    muon_coefficient_type: Literal["quintic", "simple"] = flag(
        "quintic", help="Coefficients of these steps."
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "spectral",
        help="Size of Muon's updates for a matrix of r rows and c columns: sqrt(max(r, c)), "
        "sqrt(r / c) or sqrt(max(1, r / c)).",
    )
    muon_extra_scale_factor: float = flag(
        1.0, help="A further factor of Muon's updates; 0.2 with spectral gives Adam's size."
    )
    muon_tp_mode: Literal["duplicated", "distributed", "blockwise"] = flag(
        "duplicated",
        help="Muon orthogonalises whole matrices at every layout. Megatron's blockwise does so for "
        "each tensor-parallel rank's block, which makes another update, and is refused.",
    )
    adam_eps: float = flag(1e-8, help="Added to the denominator of Adam's update.")
    exp_avg_dtype: StateDtype = flag(
        "fp32", help="Dtype in which Adam's running means of gradients are kept: fp32 or bf16."
    )
    exp_avg_sq_dtype: StateDtype = flag(
        "fp32",
        help="The same of its running means of squared gradients; in bf16 changes below 1/256 of a "
        "value are lost, so use a lower --adam-beta2 such as 0.95.",
    )
    main_params_dtype: Literal["fp32", "fp16"] = flag(
        "fp32", help="Dtype of the parameters that are updated; there is fp32 only."
    )
    optimizer_cpu_offload: bool = flag(
        False,
        help="Keep main parameters and moments in host memory and update them there (CUDA; on the "
        "CPU they are there anyway).",
    )
    optimizer_offload_fraction: float = flag(
        1.0, help="Part of this rank's parameters, by elements, that --optimizer-cpu-offload takes."
    )
    clip_grad: float = flag(
        1.0, help="Largest global L2 norm of the gradient; 0 = measured, not clipped."
    )
    log_num_zeros_in_grad: bool = flag(
        False, help="Count the gradient's zero elements every iteration: num_zeros in the record."
    )
    log_params_norm: bool = flag(
        False, help="Measure the parameters' L2 norm after every update: params_norm in the record."
    )
    fp16: bool = flag(
        False, help="float16 parameters and activations, float32 main parameters, scaled loss."
    )
    loss_scale: float | None = flag(
        None, help="Constant loss scale, also without --fp16; dynamic with --fp16 when absent."
    )
    initial_loss_scale: float = flag(2.0**32, help="First dynamic loss scale.")
    min_loss_scale: float = flag(1.0, help="Lowest dynamic loss scale; training stops below it.")
    loss_scale_window: int = flag(
        1000, help="Iterations in a row without overflow after which the loss scale doubles."
    )
    hysteresis: int = flag(
        2, help="Overflows that the loss scale bears before it halves; refilled when it doubles."
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    @property
    def scales_dynamically(self) -> bool:
        """Whether the loss scale changes: overflows are then how it finds its place."""
        return self.fp16 and self.loss_scale is None

    def _problems(self) -> Iterator[str]:
        yield from not_one_of(self.optimizer, ("adam", "sgd", "lion", "muon"), "optimizer")
        yield from self._wrong_muon()
        yield from self._wrong_states()
        if self.min_lr < 0:
            yield f"min_lr is {self.min_lr}; it must not be negative"
        if self.lr is not None and self.lr < self.min_lr:
            yield f"`lr` ({self.lr}) must not be below min_lr ({self.min_lr})"
        if self.clip_grad < 0:
            yield f"clip_grad is {self.clip_grad}; use 0 to switch clipping off"
        if self.decoupled_lr is None and self.decoupled_min_lr is not None:
            yield "decoupled_min_lr needs decoupled_lr"
        lowest = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        if self.decoupled_lr is not None and self.decoupled_lr < lowest:
            bound = "min_lr" if self.decoupled_min_lr is None else "decoupled_min_lr"
            yield f"decoupled_lr ({self.decoupled_lr}) must not be below {bound} ({lowest})"
        names = (
            "adam_beta1",
            "adam_beta2",
            "sgd_momentum",
            "lion_beta1",
            "lion_beta2",
            "muon_momentum",
        )
        for name, beta in ((name, getattr(self, name)) for name in names):
            if not 0 <= beta < 1:
                yield f"{name} is {beta}; it must lie in [0, 1)"
        if self.adam_eps <= 0:
            yield f"adam_eps is {self.adam_eps}; it must be positive"
        yield from self._wrong_loss_scale()

    def _wrong_states(self) -> Iterator[str]:
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = getattr(self, name)
            if dtype in ("fp16", "fp8"):
                yield (
                    f"{name} {dtype} would need a scale for every tensor, which transformer-engine "
                    "has and mcore does not: use bf16 or fp32"
                )
                continue
            yield from not_one_of(dtype, ("fp32", "bf16"), name)
            if dtype != "fp32" and self.optimizer != "adam":
                yield f"{name} {dtype} needs `optimizer` adam, got {self.optimizer}"
        if self.main_params_dtype != "fp32":
            yield (
                f"main_params_dtype {self.main_params_dtype} would need a scale for every tensor, "
                "which transformer-engine has and mcore does not: use fp32"
            )
        if not 0.0 <= self.optimizer_offload_fraction <= 1.0:
            yield (
                f"optimizer_offload_fraction is {self.optimizer_offload_fraction}; use a number "
                "from 0 to 1"
            )
        if self.optimizer_cpu_offload and self.optimizer == "muon":
            yield (
                "optimizer_cpu_offload and optimizer muon exclude each other: whole matrices are "
                "orthogonalised on the device; use adam, sgd or lion"
            )

    def _wrong_muon(self) -> Iterator[str]:
        types = ("quintic", "simple")
        yield from not_one_of(self.muon_coefficient_type, types, "muon_coefficient_type")
        modes = ("spectral", "unit_rms_norm", "shape_scaling")
        yield from not_one_of(self.muon_scale_mode, modes, "muon_scale_mode")
        if self.muon_tp_mode != "duplicated":
            yield (
                f"muon_tp_mode is {self.muon_tp_mode!r}; mcore orthogonalises whole matrices, the "
                "same at every layout: use duplicated"
            )
        yield from below(self, 1, "muon_num_ns_steps")
        if self.optimizer == "muon" and not self.decoupled_weight_decay:
            yield "`optimizer` muon decays weights beside the update; L2 is not defined"

    def _wrong_loss_scale(self) -> Iterator[str]:
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{name} is {value}; it must be positive"
        if self.initial_loss_scale < self.min_loss_scale:
            yield (
                f"initial_loss_scale ({self.initial_loss_scale}) must not be below min_loss_scale "
                f"({self.min_loss_scale})"
            )
        yield from below(self, 1, "loss_scale_window", "hysteresis")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How learning rate and weight decay change over training.

    Lengths are in iterations when training is (`--train-iters`) and in samples when training is
    (`--train-samples`); `scheduler_steps` turns both into samples.
    """

    lr_decay_style: DecayStyle = flag("linear", help="Curve of the learning rate after the warmup.")
    lr_decay_iters: int | None = flag(
        None, help="Iterations over which the learning rate decays; the training length by default."
    )
    lr_decay_samples: int | None = flag(
        None, help="Samples over which the learning rate decays; the training length by default."
    )
    lr_warmup_fraction: float | None = flag(
        None, help="Part of the decay length that is warmup; excludes the other two lengths."
    )
    lr_warmup_iters: int = flag(0, help="Iterations of warmup.")
    lr_warmup_samples: int = flag(0, help="Samples of warmup.")
    lr_warmup_style: WarmupStyle = flag(
        "linear",
        help="Curve of the warmup. log, DeepSpeed's: at iteration i (from 0) of n the part "
        "log(i + 1) / log(n) of the way.",
    )
    lr_warmup_init: float = flag(0.0, help="Learning rate at step 0 of the warmup.")
    lr_wsd_decay_style: WsdDecayStyle = flag("exponential", help="Curve of WSD's final decay.")
    lr_wsd_decay_iters: int | None = flag(None, help="Iterations of WSD's final decay.")
    lr_wsd_decay_samples: int | None = flag(None, help="Samples of WSD's final decay.")
    start_weight_decay: float | None = flag(
        None, help="First weight decay where it changes; needs --weight-decay-incr-style."
    )
    end_weight_decay: float | None = flag(
        None, help="Last weight decay where it changes; needs --weight-decay-incr-style."
    )
    weight_decay_incr_style: WeightDecayIncrStyle = flag(
        "constant", help="Curve from the first weight decay to the last, over the training length."
    )
    override_opt_param_scheduler: bool = flag(
        False,
        aliases=("--override-opt_param-scheduler", "--override-lr-scheduler"),
        help="On resume take the schedule from the command line, not from the checkpoint.",
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        aliases=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"),
        help="On resume take the schedule from the checkpoint, not from the command line.",
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_one_of(self.lr_decay_style, DECAY_STYLES, "lr_decay_style")
        yield from not_one_of(self.lr_warmup_style, WARMUP_STYLES, "lr_warmup_style")
        yield from not_one_of(self.lr_wsd_decay_style, WSD_DECAY_STYLES, "lr_wsd_decay_style")
        yield from not_one_of(
            self.weight_decay_incr_style, WEIGHT_DECAY_INCR_STYLES, "weight_decay_incr_style"
        )
        fraction = self.lr_warmup_fraction
        if fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples):
            yield "give lr_warmup_fraction or a warmup length, not both"
        if fraction is not None and not 0 <= fraction < 1:
            yield f"lr_warmup_fraction is {fraction}; it must lie in [0, 1)"
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield (
                "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler contradict "
                "each other; give one"
            )
        yield from self._wrong_weight_decay()

    def _wrong_weight_decay(self) -> Iterator[str]:
        ends = (self.start_weight_decay, self.end_weight_decay)
        if self.weight_decay_incr_style == "constant":
            if ends != (None, None):
                yield (
                    "start_weight_decay and end_weight_decay need weight_decay_incr_style linear "
                    "or cosine; a constant one is weight_decay"
                )
        elif None in ends:
            yield (
                f"weight_decay_incr_style {self.weight_decay_incr_style} needs both "
                "start_weight_decay and end_weight_decay"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSteps:
    """Lengths of the schedules in scheduler steps; a step is one sample.

    Attributes:
        lr_warmup_steps: warmup, fractional where it is a fraction of the decay.
        lr_decay_steps: warmup and decay together.
        wd_incr_steps: length of the weight-decay ramp: the whole training.
        wsd_decay_steps: final decay of WSD, or None for other styles.
    """

    lr_warmup_steps: float
    lr_decay_steps: int
    wd_incr_steps: int
    wsd_decay_steps: int | None


def scheduler_steps(
    config: SchedulerConfig,
    *,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
) -> SchedulerSteps:
    """Schedule lengths in samples.

    Args:
        config: lengths in iterations or samples, like the training length.
        global_batch_size: samples per iteration, after any ramp-up.
        train_iters: training length in iterations; give this or `train_samples`.
        train_samples: training length in samples.

    Raises:
        ConfigError: both or neither training length, lengths in the other unit, or WSD without the
            length of its decay.
    """
    if (train_iters is None) == (train_samples is None):
        raise ConfigError("give exactly one of train_iters and train_samples")
    if train_iters is not None:
        _refuse_other_unit(
            "train_iters",
            lr_decay_samples=config.lr_decay_samples,
            lr_warmup_samples=config.lr_warmup_samples,
            lr_wsd_decay_samples=config.lr_wsd_decay_samples,
        )
        length, unit = train_iters, global_batch_size
        decay, warmup = config.lr_decay_iters, config.lr_warmup_iters
        wsd = config.lr_wsd_decay_iters
    else:
        assert train_samples is not None
        _refuse_other_unit(
            "train_samples",
            lr_decay_iters=config.lr_decay_iters,
            lr_warmup_iters=config.lr_warmup_iters,
            lr_wsd_decay_iters=config.lr_wsd_decay_iters,
        )
        length, unit = train_samples, 1
        decay, warmup = config.lr_decay_samples, config.lr_warmup_samples
        wsd = config.lr_wsd_decay_samples
    decay_steps = (length if decay is None else decay) * unit
    fraction = config.lr_warmup_fraction
    warmup_steps = warmup * unit if fraction is None else fraction * decay_steps
    return SchedulerSteps(
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        wd_incr_steps=length * unit,
        wsd_decay_steps=_wsd_steps(config, wsd, unit),
    )


def _wsd_steps(config: SchedulerConfig, length: int | None, unit: int) -> int | None:
    if config.lr_decay_style != "WSD":
        return None
    if length is None:
        raise ConfigError("lr_decay_style WSD needs lr_wsd_decay_iters or lr_wsd_decay_samples")
    return length * unit


def _refuse_other_unit(training: str, **lengths: int | None) -> None:
    given = [name for name, value in lengths.items() if value]
    if given:
        raise ConfigError(f"training is measured by {training}, which excludes {', '.join(given)}")
