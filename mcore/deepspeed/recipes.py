"""The optimizer and scheduler blocks of a DeepSpeed file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mcore.config.command_line import did_you_mean
from mcore.deepspeed.rules import Rule, boolean, is_auto, number, only, option, unused, whole
from mcore.deepspeed.translation import Translation

_KERNELS = unused("torch chooses its kernels by itself")


def _betas(first: str, second: str) -> Rule:
    def rule(translation: Translation, path: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) != 2:
            translation.refuse(path, value, "use two numbers")
            return
        for name, beta in zip((first, second), value, strict=True):
            option("optimizer", name, number)(translation, path, beta)

    return rule


_COMMON: Mapping[str, Rule] = {
    "lr": option("optimizer", "lr", number),
    "weight_decay": option("optimizer", "weight_decay", number),
    "max_grad_norm": only(0, 0.0, otherwise="clipping is the key gradient_clipping"),
    **dict.fromkeys(("fused", "foreach", "capturable", "set_grad_none"), _KERNELS),
}
_ADAM: Mapping[str, Rule] = {
    **_COMMON,
    "betas": _betas("adam_beta1", "adam_beta2"),
    "eps": option("optimizer", "adam_eps", number),
    "adam_w_mode": option("optimizer", "decoupled_weight_decay", boolean),
    "torch_adam": _KERNELS,
    "bias_correction": only(True, otherwise="Adam's means are always corrected; drop it"),
    "amsgrad": only(False, otherwise="this variant of Adam is not built; drop it"),
}
_LION: Mapping[str, Rule] = {**_COMMON, "betas": _betas("lion_beta1", "lion_beta2")}
_SGD: Mapping[str, Rule] = {
    **_COMMON,
    "momentum": option("optimizer", "sgd_momentum", number),
    "nesterov": only(False, otherwise="this variant of SGD is not built; drop it"),
    "dampening": only(0, 0.0, otherwise="this variant of SGD is not built; drop it"),
}
_OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Rule]]] = {
    "adam": ("adam", _ADAM),
    "adamw": ("adam", _ADAM),
    "lion": ("lion", _LION),
    "sgd": ("sgd", _SGD),
}


def take_optimizer(translation: Translation, path: str, block: Mapping[str, Any]) -> None:
    """The `optimizer` block: its type, and parameters that the type has."""
    params = _parameters(translation, path, block, ("type", "params", "legacy_fusion"))
    name = str(block.get("type", ""))
    if name.lower() not in _OPTIMIZERS:
        translation.refuse(f"{path}.type", name, "use Adam, AdamW, Lion or SGD")
        _check_known(
            translation, f"{path}.params", params, [rules for _, rules in _OPTIMIZERS.values()]
        )
        return
    kind, rules = _OPTIMIZERS[name.lower()]
    translation.set(f"{path}.type", "optimizer", "optimizer", kind)
    if name.lower() == "adamw" and params.get("adam_w_mode") is False:
        translation.refuse(f"{path}.params.adam_w_mode", False, "the type is AdamW; write Adam")
        params = {key: value for key, value in params.items() if key != "adam_w_mode"}
    if kind == "sgd":
        translation.set(f"{path}.type", "optimizer", "decoupled_weight_decay", False)
        translation.open(f"{path}.params.momentum", "optimizer", "sgd_momentum", "0", "momentum")
    apply_rules(translation, f"{path}.params", params, rules)
    translation.open(
        f"{path}.params.weight_decay", "optimizer", "weight_decay", "0", "--weight-decay"
    )


def take_scheduler(translation: Translation, path: str, block: Mapping[str, Any]) -> None:
    """The `scheduler` block, of the three types that are a warmup and a decay."""
    params = _parameters(translation, path, block, ("type", "params"))
    name = str(block.get("type", ""))
    if name not in _SCHEDULERS:
        translation.refuse(
            f"{path}.type",
            name,
            f"use {', '.join(_SCHEDULERS)}, or the flags --lr-decay-style and --lr-warmup-iters"
            f"{did_you_mean(name, _SCHEDULERS)}",
        )
        _check_known(
            translation, f"{path}.params", params, [rules for _, rules, _ in _SCHEDULERS.values()]
        )
        return
    if translation.given("training", "train_samples") is not None:
        translation.refuse(f"{path}.type", name, "it counts steps: train by --train-iters")
    style, rules, build = _SCHEDULERS[name]
    translation.set(f"{path}.type", "scheduler", "lr_decay_style", style)
    curve = params.get("warmup_type", "log")
    if curve in ("linear", "log"):  # another one is refused by its rule
        translation.set(f"{path}.params.warmup_type", "scheduler", "lr_warmup_style", curve)
    apply_rules(translation, f"{path}.params", params, rules)
    build(translation, f"{path}.params", params)
    translation.open(
        f"{path}.params.warmup_num_steps",
        "scheduler",
        "lr_warmup_iters",
        "1000",
        "--lr-warmup-iters",
    )


def _nothing_more(translation: Translation, path: str, params: Mapping[str, Any]) -> None:
    del translation, path, params


def _falls_to_start(translation: Translation, path: str, params: Mapping[str, Any]) -> None:
    """WarmupDecayLR ends at the rate that its warmup starts from."""
    lowest = params.get("warmup_min_lr", 0.0)
    value = 0.0 if is_auto(lowest) else lowest
    option("optimizer", "min_lr", number)(translation, f"{path}.warmup_min_lr", value)


def _ratios(translation: Translation, path: str, params: Mapping[str, Any]) -> None:
    """WarmupCosineLR gives both ends as parts of the highest rate."""
    highest = translation.value("optimizer", "lr")
    for name, section, field in (
        ("warmup_min_ratio", "scheduler", "lr_warmup_init"),
        ("cos_min_ratio", "optimizer", "min_lr"),
    ):
        ratio = params.get(name)
        if ratio is None or is_auto(ratio) or highest is None:
            continue
        try:
            translation.set(f"{path}.{name}", section, field, number(ratio) * highest)
        except ValueError as error:
            translation.refuse(f"{path}.{name}", ratio, str(error))
    translation.open(f"{path}.cos_min_ratio", "optimizer", "min_lr", "1e-4 of --lr", "--min-lr")


_WARMUP: Mapping[str, Rule] = {
    "warmup_num_steps": option("scheduler", "lr_warmup_iters", whole),
    "warmup_type": only("linear", "log", otherwise='write "linear" or "log"'),
    "last_batch_iteration": only(-1, otherwise="a run continues by --load; drop it"),
}
_FROM_TO: Mapping[str, Rule] = {
    **_WARMUP,
    "warmup_min_lr": option("scheduler", "lr_warmup_init", number),
    "warmup_max_lr": option("optimizer", "lr", number),
}
_LENGTH: Mapping[str, Rule] = {
    "total_num_steps": option("scheduler", "lr_decay_iters", whole),
}


def _read_together(translation: Translation, path: str, value: Any) -> None:
    """Left to `_ratios`, which knows the highest rate."""
    del translation, path, value


_Build = Callable[[Translation, str, Mapping[str, Any]], None]
_SCHEDULERS: Mapping[str, tuple[str, Mapping[str, Rule], _Build]] = {
    "WarmupLR": ("constant", _FROM_TO, _nothing_more),
    "WarmupDecayLR": ("linear", {**_FROM_TO, **_LENGTH}, _falls_to_start),
    "WarmupCosineLR": (
        "cosine",
        {
            **_WARMUP,
            **_LENGTH,
            "warmup_min_ratio": _read_together,
            "cos_min_ratio": _read_together,
        },
        _ratios,
    ),
}


def apply_rules(
    translation: Translation,
    path: str,
    values: Mapping[str, Any],
    rules: Mapping[str, Rule],
    also: Collection[str] = (),
) -> None:
    """Apply the rule of each key; a key without one is refused by its path.

    Args:
        translation: takes what the keys mean.
        path: that of the object.
        values: the object.
        rules: by key.
        also: further keys that the object may have, for the hint at a misspelled one.
    """
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        if key not in rules:
            translation.problems.append(
                f"{where} is no key that mcore reads{did_you_mean(key, [*rules, *also])}"
            )
        elif not is_auto(value):
            rules[key](translation, where, value)


def _check_known(
    translation: Translation,
    path: str,
    values: Mapping[str, Any],
    tables: Sequence[Mapping[str, Rule]],
) -> None:
    """Apply the rules of keys that any table has; the type that would tell which is at fault."""
    known = {key: rule for rules in tables for key, rule in rules.items()}
    apply_rules(translation, path, {k: v for k, v in values.items() if k in known}, known)


def _parameters(
    translation: Translation, path: str, block: Mapping[str, Any], keys: tuple[str, ...]
) -> Mapping[str, Any]:
    for key in block:
        if key not in keys:
            translation.problems.append(
                f"{path}.{key} is no key that mcore reads{did_you_mean(key, keys)}"
            )
    if block.get("legacy_fusion"):
        translation.no_effect(f"{path}.legacy_fusion", "torch chooses its kernels by itself")
    params = block.get("params", {})
    if not isinstance(params, Mapping):
        translation.refuse(f"{path}.params", params, "use an object of names and values")
        return {}
    return params
