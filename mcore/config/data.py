"""Where the training tokens come from, and how samples are cut out of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from mcore.config.fields import below, flag, not_one_of, refuse

DEFAULT_SPLIT = "969, 30, 1"
"""Megatron's default shares of training, validation and test."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The data options, in Megatron's spellings.

    A PREFIX names a pair of files `PREFIX.bin` and `PREFIX.idx`. Tokens come from one of three
    places: `data_path` or `data_args_path` (one distribution, cut by `split`), or the three
    per-split paths, or `per_split_data_args_path`.

    Raises:
        ConfigError: options that exclude each other, or a number out of range.
    """

    data_path: tuple[str, ...] | None = flag(
        None,
        help="Corpus: one PREFIX, or PREFIX PREFIX ... (in proportion to their lengths, never "
        "repeated), or WEIGHT PREFIX WEIGHT PREFIX ... (shares of the samples, any scale).",
        metavar="PREFIX",
    )
    data_args_path: str | None = flag(
        None, help="File that holds the words of --data-path.", metavar="FILE"
    )
    train_data_path: tuple[str, ...] | None = flag(
        None,
        help="Corpus of the training split alone, in the forms of --data-path.",
        metavar="PREFIX",
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, help="Corpus of the validation split alone.", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] | None = flag(
        None, help="Corpus of the test split alone.", metavar="PREFIX"
    )
    per_split_data_args_path: str | None = flag(
        None,
        help="JSON file with the keys train, valid and test, each a list of --data-path words.",
        metavar="FILE",
    )
    split: str | None = flag(
        None,
        help="Shares of the sequences for training, validation and test, for example 90,8,2. "
        f"Default: {DEFAULT_SPLIT}.",
    )
    reset_position_ids: bool = flag(
        False, help="Restart the position ids after every end-of-document token."
    )
    reset_attention_mask: bool = flag(
        False, help="Hide everything before an end-of-document token from what follows it."
    )
    eod_mask_loss: bool = flag(False, help="No loss where the input is the end-of-document token.")
    data_order: Literal["megatron", "stable"] = flag(
        "megatron",
        help="megatron = Megatron's order, which depends on the number of samples wanted; stable = "
        "sample by sample a function of seed and epoch, so that a longer run or other blend "
        "weights never deal consumed samples again.",
    )
    multiple_validation_sets: bool = flag(
        False, help="Measure every corpus of the validation split on its own; without weights."
    )
    validation_set_names: tuple[str, ...] | None = flag(
        None,
        metavar="NAME",
        help="With --multiple-validation-sets, what each is called in logs and records, in order; "
        "the last part of its path when absent.",
    )
    sft: bool = flag(
        False,
        help="Fine-tuning: data paths are files of JSON lines with prompt and response, or with "
        "chat messages; loss on responses only, packed to --seq-length with document masks.",
    )
    sft_tokenizer_prompt_format: Literal["identity", "chatml"] = flag(
        "identity",
        help="With --sft: texts as they are, or between <|im_start|>ROLE and <|im_end|>.",
    )
    num_workers: int = flag(
        2, help="Threads that read batches ahead of the training step; 0 = read inside the step."
    )
    dataloader_type: str = flag(
        "single",
        help="single = one pass by consumed samples; cyclic = a new random order every epoch.",
    )
    data_sharding: bool = flag(
        True, help="With cyclic: each data-parallel rank reads its own part of the data set."
    )
    mmap_bin_files: bool = flag(
        True, help="Map the .bin files into memory; off = read them through a file descriptor."
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        sources = {
            "--data-path": self.data_path is not None,
            "--data-args-path": self.data_args_path is not None,
            "--train-data-path, --valid-data-path or --test-data-path": self.has_split_paths,
            "--per-split-data-args-path": self.per_split_data_args_path is not None,
        }
        given = [name for name, present in sources.items() if present]
        if len(given) > 1:
            yield f"data is given twice, by {' and by '.join(given)}; keep one of them"
        if self.split is not None and self.has_separate_splits:
            yield (
                f"--split {self.split!r} cuts one corpus into three, but {given[0]} gives each "
                f"split "
                "its own corpus; drop one of the two"
            )
        if self.sft and (self.data_order == "stable" or self.multiple_validation_sets):
            yield (
                "--sft has an order and splits of its own; drop --data-order stable and "
                "--multiple-validation-sets"
            )
        if self.validation_set_names is not None and not self.multiple_validation_sets:
            yield "--validation-set-names needs --multiple-validation-sets"
        yield from below(self, 0, "num_workers")
        yield from not_one_of(self.data_order, ("megatron", "stable"), "data_order")
        if self.dataloader_type == "external":
            yield "--dataloader-type external is not available; use single or cyclic"
        else:
            yield from not_one_of(self.dataloader_type, ("single", "cyclic"), "dataloader_type")

    @property
    def has_split_paths(self) -> bool:
        """Some split has its own corpus on the command line."""
        paths = (self.train_data_path, self.valid_data_path, self.test_data_path)
        return any(path is not None for path in paths)

    @property
    def has_separate_splits(self) -> bool:
        """The splits are separate corpora rather than parts of one."""
        return self.has_split_paths or self.per_split_data_args_path is not None

    @property
    def has_data(self) -> bool:
        """Any corpus is named at all."""
        one_corpus = self.data_path is not None or self.data_args_path is not None
        return one_corpus or self.has_separate_splits
