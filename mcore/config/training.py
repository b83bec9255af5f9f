"""Length, batch and precision of training, evaluation, and where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mcore.config.fields import below, flag, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """How long to train on which batches, and in which precision.

    Raises:
        ConfigError: a number out of range, or options that exclude each other.
    """

    micro_batch_size: int | None = flag(
        None, help="Samples that one data-parallel rank computes at a time; required."
    )
    global_batch_size: int | None = flag(
        None, help="Samples per optimizer step; micro batch x data-parallel size when absent."
    )
    max_tokens_per_microbatch: int | None = flag(
        None,
        help="With --sft: micro batches are rows of this many tokens, filled with as many whole "
        "conversations as fit; --global-batch-size counts conversations, --seq-length bounds one.",
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        help="START INCREMENT SAMPLES: the global batch grows from START by INCREMENT in equal "
        "steps over SAMPLES samples, up to --global-batch-size. Needs --train-samples.",
        metavar="N",
    )
    step_batch_size_schedule: str | None = flag(
        None,
        help="Global batch by consumed tokens, as TOKENS:SAMPLES pairs such as '0:16 1B:32 10B:64' "
        "(K, M, B, T allowed); in place of --global-batch-size. Needs --train-samples.",
    )
    decrease_batch_size_if_needed: bool = flag(
        False,
        help="Where a global batch is no multiple of micro batch x data-parallel size, use the "
        "next lower one.",
    )
    train_iters: int | None = flag(None, help="Optimizer steps of the whole run.")
    train_samples: int | None = flag(
        None, help="Samples of the whole run, instead of --train-iters."
    )
    seq_length: int | None = flag(
        None, aliases=("--encoder-seq-length",), help="Tokens per sample; required."
    )
    seed: int = flag(1234, help="Seed of initial weights, data order and dropout; above 0.")
    bf16: bool = flag(
        False, help="bfloat16 parameters and activations, float32 main parameters and gradients."
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        name="--check-for-nan-in-loss-and-grad",
        help="End the run at a loss or gradient that is NaN or infinite, with rank, microbatch and "
        "parameter. Off = such updates are left out and counted. With a dynamic loss scale, which "
        "lives on overflows, a run ends at the scale's minimum; what was not finite is told then, "
        "and whenever it is a loss.",
    )
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None,
        help="Iterations between comparisons of the parameters' bits over data-parallel ranks; the "
        "run ends where they differ. Never when absent.",
    )
    exit_interval: int | None = flag(
        None,
        help="Save and exit with code 0 once the iteration is a multiple of this; --train-iters "
        "stays "
        "the full length, so data order and schedules do not change.",
    )
    exit_duration_in_mins: float | None = flag(
        None, help="Save and exit with code 0 after the iteration in which this many minutes pass."
    )
    exit_signal_handler: bool = flag(
        True,
        help="on SIGTERM, SIGINT, SIGHUP or SIGUSR2 to any rank all ranks save after the same "
        "iteration and exit with code 0; without it these signals end a process at once.",
    )
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR2", "SIGUSR1"] = flag(
        "SIGTERM",
        help="SIGUSR1, which else saves and goes on, saves and exits too; the others do so anyway.",
    )
    skip_train: bool = flag(
        False,
        help="Load a checkpoint's weights, whatever its iteration and schedule, and evaluate.",
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from below(
            self,
            1,
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "train_samples",
            "seq_length",
            "max_tokens_per_microbatch",
            "exit_interval",
            "check_weight_hash_across_dp_replicas_interval",
            "seed",
        )
        minutes = self.exit_duration_in_mins
        if minutes is not None and minutes <= 0:
            yield f"`exit_duration_in_mins` is {minutes}; use a number above 0"
        if self.train_iters is not None and self.train_samples is not None:
            yield "train_iters and train_samples exclude each other; give one"
        yield from self._wrong_growing_batch()

    def _wrong_growing_batch(self) -> Iterator[str]:
        ramp, steps = self.rampup_batch_size, self.step_batch_size_schedule
        if ramp is None and steps is None:
            return
        name = "--rampup-batch-size" if steps is None else "--step-batch-size-schedule"
        if ramp is not None and steps is not None:
            yield (
                "--rampup-batch-size and --step-batch-size-schedule exclude each other; give one"
            )
        if self.train_iters is not None:
            yield f"{name} needs --train-samples in place of --train-iters"
        if ramp is not None and len(ramp) != 3:
            yield f"{name} takes START INCREMENT SAMPLES, got {list(ramp)}"
        if ramp is not None and self.global_batch_size is None:
            yield f"{name} needs --global-batch-size, the batch at its end"
        if steps is not None and (
            self.global_batch_size is not None or self.decrease_batch_size_if_needed
        ):
            yield f"{name} excludes --global-batch-size and --decrease-batch-size-if-needed"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """When the validation and test sets are measured.

    Raises:
        ConfigError: a number out of range.
    """

    eval_iters: int = flag(
        100,
        help="Global batches per evaluation; 0 = never evaluate (no valid or test data is opened).",
    )
    eval_interval: int = flag(1000, help="Iterations between evaluations on the validation set.")
    start_eval_at_iter: int = flag(0, help="No evaluation during training before this iteration.")
    full_validation: bool = flag(
        False,
        help="Measure every sample of each validation set, each once; --eval-iters then holds for "
        "the test set only.",
    )
    eval_micro_batch_size: int | None = flag(
        None, help="Samples that a rank evaluates at a time; --micro-batch-size when absent."
    )
    eval_global_batch_size: int | None = flag(
        None, help="Samples of an evaluated global batch; --global-batch-size when absent."
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.eval_iters < 0:
            yield f"eval_iters is {self.eval_iters}; use 0 to switch evaluation off"
        yield from below(self, 1, "eval_micro_batch_size", "eval_global_batch_size")
        yield from below(self, 0, "start_eval_at_iter")
        if self.eval_interval < 1:
            yield (
                f"eval_interval is {self.eval_interval}; use a whole number from 1 up "
                "(--eval-iters 0 switches evaluation off)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Device and process groups.

    Raises:
        ConfigError: a timeout below a minute.
    """

    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", help="Where tensors live; auto = CUDA where there is one."
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, help="Backend of the process groups; nccl on CUDA and gloo on the CPU when absent."
    )
    distributed_timeout_minutes: int = flag(
        10, help="Minutes after which a collective that does not finish ends the job."
    )
    local_rank: int | None = flag(
        None,
        aliases=("--local_rank",),
        help="Number of this process on its machine, from launchers that pass it as a flag.",
    )

    deterministic_mode: bool = flag(
        False,
        help="Use no kernel that gives other numbers when run again; an operation without one is "
        "an error. On the CPU runs repeat bit for bit anyway.",
    )
    manual_gc: bool = flag(
        False,
        help="Collect Python's garbage before training and every --manual-gc-interval iterations "
        "only, on all ranks at once.",
    )
    manual_gc_interval: int = flag(0, help="Iterations between collections; 0 = none in training.")

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.manual_gc_interval < 0:
            yield f"manual_gc_interval is {self.manual_gc_interval}; use 0 for no collection"
        if self.manual_gc_interval and not self.manual_gc:
            yield f"manual_gc_interval ({self.manual_gc_interval}) needs --manual-gc; add it"
        if self.distributed_timeout_minutes < 1:
            yield (
                f"distributed_timeout_minutes is {self.distributed_timeout_minutes}; "
                "use a whole number from 1 up"
            )
