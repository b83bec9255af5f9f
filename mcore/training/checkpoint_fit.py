"""How a checkpoint fits a run: model, precision, options; and what of it the run leaves unread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mcore import device
from mcore.checkpoint import ShardedTensor, Source
from mcore.checkpoint.rank_local import is_rank_local
from mcore.config.run import OPTION_NAMES, RunConfig
from mcore.errors import CheckpointError
from mcore.log import get_logger

#: So many names or options are told one by one.
_FEW = 8
#: Sections that say nothing of what is computed.
_BESIDE_TRAINING = ("checkpoint", "logging", "profiling", "runtime")


def precise_source(tensors: Mapping[str, ShardedTensor]) -> Source:
    """Where weights are read from, so that no change of precision rounds what was trained.

    A parameter of another type than it is wanted in comes from its main parameter, if that is
    stored; a main parameter that is not stored comes from the parameter.

    Args:
        tensors: what is wanted, by key.
    """

    def source(key: str, stored: Mapping[str, Any]) -> str:
        family, _, name = key.partition(".")
        main = f"main_param.{name}"
        if family == "main_param" and key not in stored:
            return f"model.{name}"
        is_other = key in stored and stored[key].dtype != tensors[key].dtype
        return main if family == "model" and is_other and main in stored else key

    return source


def log_unread(keys: Iterable[str]) -> None:
    """Say what of a checkpoint is left unread, by family.

    Args:
        keys: of tensors that no rank read.
    """
    families: dict[str, list[str]] = {}
    of_ranks = set()
    for key in keys:
        if is_rank_local(key):
            of_ranks.add(key.rpartition(".")[2])
        else:
            families.setdefault(key.partition(".")[0], []).append(key)
    parts = [
        ", ".join(names) if len(names) <= _FEW else f"{family}.* ({len(names)} tensors)"
        for family, names in sorted(families.items())
    ]
    if of_ranks:
        parts.append(f"random states of {len(of_ranks)} ranks")
    if parts:
        get_logger().info("not read from the checkpoint: %s", ", ".join(parts))


def log_changes(common: Mapping[str, Any], config: RunConfig) -> None:
    """Say in which options a run differs from the one that saved its checkpoint.

    Args:
        common: JSON state of the checkpoint.
        config: of this run.
    """
    stored, ours = common.get("config"), config.to_dict()
    if not isinstance(stored, dict) or common.get("fingerprint") == config.fingerprint():
        return
    changes = [
        f"{name} {stored[section][name]} -> {value}"
        for section, values in ours.items()
        if section not in _BESIDE_TRAINING and section in stored
        for name, value in values.items()
        if name in stored[section] and stored[section][name] != value
    ]
    if changes:
        more = f" and {len(changes) - _FEW} more" if len(changes) > _FEW else ""
        text = ", ".join(changes[:_FEW])
        get_logger().info("options other than the checkpoint's: %s%s", text, more)


def check_model(common: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse a checkpoint whose model computes another function than the configured one.

    Raises:
        CheckpointError: it does; the options in which they differ are named.
    """
    stored = common.get("model", {})
    ours = config.model_options()
    silent = {"hidden_dropout", "attention_dropout", "seq_length", "max_position_embeddings"}
    none_counts = {"sliding_window", "rotary_seq_len_interpolation_factor"}
    tokenizer = {"tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"}
    fields = {option: field for field, option in OPTION_NAMES.items()}
    differences = [
        f"{fields.get(name, name)}: checkpoint {stored[name]!r}, this run {ours[name]!r}"
        for name in ours
        if name in stored
        and name not in silent | tokenizer
        and not name.startswith(("null_tokenizer", "vocab_extra"))
        and (name in none_counts or None not in (stored[name], ours[name]))
        and stored[name] != ours[name]
    ]
    if differences:
        raise CheckpointError(
            "the checkpoint's model is another one:\n  "
            + "\n  ".join(differences)
            + "\ncorrect the flags or take them from the checkpoint with --use-checkpoint-args"
        )


def check_optimizer(common: Mapping[str, Any], directory: Path) -> None:
    """Refuse to go on with the optimizer of a checkpoint that holds none.

    Raises:
        CheckpointError: it holds none.
    """
    if "optimizer" not in common:
        raise CheckpointError(
            f"the checkpoint {directory} holds no optimizer state; use --finetune to start a "
            "new run from its weights, or --no-load-optim to go on with a fresh optimizer"
        )


def check_end(iteration: int, train_iters: int) -> None:
    """Refuse to go on with a run that is past its end.

    Raises:
        CheckpointError: it is.
    """
    if iteration > train_iters:
        raise CheckpointError(
            f"the checkpoint is of iteration {iteration}, beyond the {train_iters} "
            "iterations of this run; raise --train-iters"
        )


def compare_threads(common: Mapping[str, Any]) -> None:
    """Warn where another number of threads rounds differently."""
    stored, ours = common.get("num_threads"), torch.get_num_threads()
    if stored is not None and stored != ours and device.current_device().type == "cpu":
        get_logger().warning(
            "the checkpoint was saved with %d CPU threads, this run has %d: numbers agree to "
            "rounding, not bit for bit; set OMP_NUM_THREADS=%d for that",
            stored,
            ours,
            stored,
        )
