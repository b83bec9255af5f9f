"""From a DeepSpeed configuration to options of mcore, by the tables of `keys` and `recipes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mcore.deepspeed.batch import solve_batch
from mcore.deepspeed.keys import ACTIVATION_CHECKPOINTING, BF16, FP16, TOP, ZERO
from mcore.deepspeed.recipes import apply_rules, take_optimizer, take_scheduler
from mcore.deepspeed.rules import Rule, boolean, is_auto, option, whole
from mcore.deepspeed.translation import Setting, Translation
from mcore.errors import ConfigError

__all__ = ["Setting", "Translation", "translate"]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BATCH_FIELDS = {("training", "global_batch_size"), ("training", "micro_batch_size")}
_Block = Callable[[Translation, str, Mapping[str, Any]], None]


def translate(
    config: Mapping[str, Any], given: Callable[[str, str], Any], world_size: int
) -> Translation:
    """Read a DeepSpeed configuration as options.

    Args:
        config: the file's object.
        given: (section, field) -> what the command line gives, None where it does not. "auto" in
            the file leaves a value to it.
        world_size: processes of the job, for the batch triangle.

    Returns:
        Options, notes and problems. Options that differ from given ones are among the settings:
        the caller compares.
    """
    translation = Translation(given)
    rest = dict(config)
    # What later keys depend on comes first: precision, then the stage, then rates.
    for key, take in _BLOCKS.items():
        if key in rest:
            _take_block(translation, key, rest.pop(key), take)
    for key in [key for key in rest if key in _BATCH]:
        rest.pop(key)
    _take_batch(translation, config, world_size)
    apply_rules(translation, "", rest, TOP, also=(*_BLOCKS, *_BATCH))
    _mention_defaults(translation, config)
    return translation


def _take_block(translation: Translation, key: str, value: Any, take: _Block) -> None:
    if key == "zero_optimization" and isinstance(value, bool):
        value = {"stage": int(value)}
    if isinstance(value, Mapping):
        take(translation, key, value)
    elif value is not None and not is_auto(value):
        translation.refuse(key, value, "use an object of names and values")


def _take_precision(section: str, name: str, rules: Mapping[str, Rule]) -> _Block:
    """`fp16` or `bf16`: the other keys count where it is enabled."""

    def take(translation: Translation, path: str, block: Mapping[str, Any]) -> None:
        enabled = block.get("enabled", False)
        values = {key: value for key, value in block.items() if key != "enabled"}
        if is_auto(enabled):
            enabled = bool(translation.given(section, name))
        else:
            option(section, name, boolean)(translation, f"{path}.enabled", enabled)
        if enabled is not True:
            known = {key: None for key in values if key in rules}
            values = {key: value for key, value in values.items() if key not in known}
        apply_rules(translation, path, values, rules)
        if enabled is True and name == "fp16" and not translation.value("optimizer", "loss_scale"):
            translation.open(
                f"{path}.initial_scale_power",
                "optimizer",
                "initial_loss_scale",
                "16",
                "--initial-loss-scale",
            )

    return take


def _take_zero(translation: Translation, path: str, block: Mapping[str, Any]) -> None:
    flat = _flat(_renamed(translation, path, block))
    values = {key: flat.pop(key) for key in ZERO if key in flat} | flat  # in the table's order
    hidden = translation.given("model", "hidden_size")
    is_open = hidden is not None and translation.given("ddp", "bucket_size") is None
    if is_open and is_auto(values.get("reduce_bucket_size")):
        values["reduce_bucket_size"] = hidden * hidden  # what the word means to DeepSpeed's users
    apply_rules(translation, path, values, ZERO)
    overlaps = values.get("overlap_comm") is True
    if overlaps and translation.value("ddp", "data_parallel_sharding_strategy") in (
        "optim",
        "optim_grads",
    ):
        translation.set(f"{path}.overlap_comm", "ddp", "overlap_param_gather", True)


def _renamed(translation: Translation, path: str, block: Mapping[str, Any]) -> Mapping[str, Any]:
    """The block with its deprecated switches as what they became."""
    values = dict(block)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old not in values:
            continue
        on = values.pop(old)
        if new in values:
            translation.problems.append(f"{path}.{old} and {path}.{new} are one; keep the second")
        elif on:
            values[new] = {"device": "cpu"}
    values.pop("cpu_offload_use_pin_memory", None)
    return values


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Inner objects as `outer.inner` keys; null ones vanish."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith("offload_") and isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": one for inner, one in value.items()})
        elif value is not None or not key.startswith("offload_"):
            flat[key] = value
    return {key: value for key, value in flat.items() if value is not None}


def _take_activations(translation: Translation, path: str, block: Mapping[str, Any]) -> None:
    values = {key: value for key, value in block.items() if key != "partition_activations"}
    apply_rules(translation, path, values, ACTIVATION_CHECKPOINTING)
    if not block.get("partition_activations"):
        return
    where = f"{path}.partition_activations"
    if translation.given("model", "recompute_granularity") != "full":
        translation.no_effect(where, "it needs full recomputation: --recompute-granularity full")
    elif translation.given("model", "sequence_parallel"):
        translation.no_effect(where, "--sequence-parallel keeps 1/t of the activations anyway")
    elif (translation.given("model", "tensor_model_parallel_size") or 1) == 1:
        translation.no_effect(where, "there is one tensor-parallel rank")
    else:
        translation.set(where, "model", "distribute_saved_activations", True)


def _take_data_types(translation: Translation, path: str, block: Mapping[str, Any]) -> None:
    apply_rules(translation, path, block, {"grad_accum_dtype": TOP["communication_data_type"]})


_BLOCKS: Mapping[str, _Block] = {
    "fp16": _take_precision("optimizer", "fp16", FP16),
    "bf16": _take_precision("training", "bf16", BF16),
    "bfloat16": _take_precision("training", "bf16", BF16),
    "zero_optimization": _take_zero,
    "optimizer": take_optimizer,
    "scheduler": take_scheduler,
    "activation_checkpointing": _take_activations,
    "data_types": _take_data_types,
}


def _take_batch(translation: Translation, config: Mapping[str, Any], world_size: int) -> None:
    """Both batch sizes, from whichever corners the file and the command line give."""
    corners = _corners(translation, config)
    if corners is not None and all(corner is None for corner in corners.values()):
        return
    copies = _copies(translation, world_size)
    if corners is None or copies is None:  # which is told, that of the copies elsewhere
        translation.unread |= _BATCH_FIELDS
        return
    train, micro = corners["train_batch_size"], corners["train_micro_batch_size_per_gpu"]
    typed_train = translation.given("training", "global_batch_size")
    typed_micro = translation.given("training", "micro_batch_size")
    try:
        sizes = solve_batch(
            typed_train if train is None else train,
            typed_micro if micro is None else micro,
            corners["gradient_accumulation_steps"],
            copies,
        )
    except ConfigError as error:
        translation.problems.append(_with_origins(str(error), corners, typed_train, typed_micro))
        translation.unread |= _BATCH_FIELDS
        return
    if sizes is None:
        translation.unread |= _BATCH_FIELDS
        translation.problems.append(
            "gradient_accumulation_steps needs train_batch_size or train_micro_batch_size_per_gpu "
            "beside it, or --micro-batch-size"
        )
        return
    named = [key for key, corner in corners.items() if corner is not None]
    for key, field, value in (
        (_BATCH[0], "global_batch_size", sizes.train),
        (_BATCH[1], "micro_batch_size", sizes.micro),
    ):
        path = key if corners[key] is not None else " and ".join(named)
        if corners[key] is not None or translation.given("training", field) is None:
            translation.set(path, "training", field, value)


def _corners(translation: Translation, config: Mapping[str, Any]) -> dict[str, int | None] | None:
    """The file's corners, None for one that it leaves open; None where any is refused."""
    corners: dict[str, int | None] = {}
    known = len(translation.problems)
    for key in _BATCH:
        value = config.get(key)
        corners[key] = None
        if value is None or is_auto(value):
            continue
        try:
            corners[key] = whole(value)
        except ValueError as error:
            translation.refuse(key, value, str(error))
            continue
        if whole(value) < 1:
            translation.refuse(key, value, "use a whole number from 1 up")
    return corners if len(translation.problems) == known else None


def _with_origins(
    text: str, corners: Mapping[str, int | None], train: int | None, micro: int | None
) -> str:
    """The error, with the corners that the command line gave."""
    typed = {_BATCH[0]: ("--global-batch-size", train), _BATCH[1]: ("--micro-batch-size", micro)}
    lines = [
        f"{key} is {flag} {value}" if corners[key] is None else f"{flag} is {value}, too"
        for key, (flag, value) in typed.items()
        if value is not None
    ]
    derived = [
        key for key in _BATCH if corners[key] is None and typed.get(key, ("", None))[1] is None
    ]
    lines += [f"{key} is not given" for key in derived]
    return text + (f" ({'; '.join(lines)})" if lines else "")


def _copies(translation: Translation, world_size: int) -> int | None:
    """The data-parallel size, or None where the world does not divide."""
    shards = 1
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ):
        shards *= translation.given("model", name) or 1
    return None if shards < 1 or world_size % shards else world_size // shards


def _mention_defaults(translation: Translation, config: Mapping[str, Any]) -> None:
    """Say where mcore's default holds and DeepSpeed's differs."""
    if config.get("gradient_clipping") is None:
        translation.open("gradient_clipping", "optimizer", "clip_grad", "0", "--clip-grad")
    sharded = translation.value("ddp", "data_parallel_sharding_strategy") not in (None, "no_shard")
    if sharded and translation.value("training", "bf16") and "data_types" not in config:
        translation.left_open.append(
            "data_types.grad_accum_dtype is not given: gradients accumulate in float32, where "
            "DeepSpeed's ZeRO would do so in bf16"
        )
