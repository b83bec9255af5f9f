"""From the data options to the training, validation and test data sets."""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np

from mcore.config.data import DEFAULT_SPLIT, DataConfig
from mcore.data.blend import Blend, read_blends, validation_sets_problem
from mcore.data.blended_dataset import BlendedDataset
from mcore.data.corpus_identity import corpus_identity
from mcore.data.corpus_meta import TokenizerIdentity, check_meta, warn_of_missing_ends
from mcore.data.gpt_dataset import NO_PAD, GPTDataset, SampleDataset, SampleOptions
from mcore.data.indexed_dataset import IndexedDataset
from mcore.data.splits import SPLIT_NAMES, WHOLE, Bounds, split_bounds, split_range
from mcore.data.stable_blend import StableBlend
from mcore.data.stable_order import StableOrder
from mcore.errors import DataError
from mcore.log import warn_alike

_SURPLUS = 0.005  # Megatron builds every data set of a weighted blend this much longer

_ENDLESS = 1 << 62  # samples of a corpus in the stable order, which repeats without end


@dataclasses.dataclass(frozen=True, slots=True)
class DatasetGroup:
    """Several validation sets, each measured on its own (`--multiple-validation-sets`)."""

    members: dict[str, SampleDataset]

    def __len__(self) -> int:
        """Samples of the shortest."""
        return min(map(len, self.members.values()))


Datasets = tuple[SampleDataset | None, SampleDataset | DatasetGroup | None, SampleDataset | None]
Sizes = tuple[int | None, int | None, int | None]


def build_train_valid_test_datasets(  # noqa: PLR0913  (keywords, each with a plain meaning)
    config: DataConfig,
    *,
    sizes: Sizes,
    seq_length: int,
    seed: int,
    eod_id: int,
    pad_id: int | None = None,
    vocab_size: int | None = None,
    add_extra_token: bool = True,
    tokenizer: TokenizerIdentity | None = None,
) -> Datasets:
    """Open the corpora and order the samples of the three splits.

    A pure function of its arguments and the files: every process that calls it gets the same
    samples, nothing is written and nothing is communicated.

    Args:
        config: where the data are, how they are split and masked.
        sizes: samples wanted of training, validation and test; None = one pass over the corpus,
            0 = not wanted. A data set may be longer than asked for. It is shorter in one case,
            which is logged: corpora without weights are never repeated.
        seq_length: tokens per sample.
        seed: of the order; the same for every corpus.
        eod_id: end-of-document id of the tokenizer.
        pad_id: its padding id. None, or the same as `eod_id` = no padding: a pad that is also the
            end of documents would take the loss there away.
        vocab_size: number of ids, to refuse corpora of another tokenizer; None = not checked.
        add_extra_token: see `SampleOptions`.
        tokenizer: to refuse corpora whose `.meta.json` names another; None = not checked.

    Returns:
        Training, validation and test; None for a split without a share, without a corpus or not
        wanted.

    Raises:
        DataError: a file that is absent or damaged, a split that is wanted but holds no tokens, or
            a weighted blend without a size.
    """
    options = SampleOptions(
        seq_length=seq_length,
        seed=seed,
        eod_id=eod_id,
        pad_id=NO_PAD if pad_id is None or pad_id == eod_id else pad_id,
        vocab_size=vocab_size,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
        add_extra_token=add_extra_token,
        stable=config.data_order == "stable",
    )
    blends = read_blends(config)
    bounds: tuple[Bounds | None, ...] = (WHOLE, WHOLE, WHOLE)
    if not config.has_separate_splits:
        bounds = split_bounds(DEFAULT_SPLIT if config.split is None else config.split)
    corpora = _Corpora(config, tokenizer)
    if config.multiple_validation_sets:
        names = config.validation_set_names
        group = _build_group(blends[1], bounds[1], sizes[1], corpora, options, names)
        blends = (blends[0], None, blends[2])
    train, valid, test = (
        None
        if blend is None or bound is None or size == 0
        else _build_split(name, blend, bound, size, corpora, options)
        for name, blend, bound, size in zip(SPLIT_NAMES, blends, bounds, sizes, strict=True)
    )
    return train, group if config.multiple_validation_sets else valid, test


def _build_group(
    blend: Blend | None,
    bounds: Bounds | None,
    size: int | None,
    corpora: _Corpora,
    options: SampleOptions,
    chosen_names: tuple[str, ...] | None,
) -> DatasetGroup | None:
    """Each corpus as a data set: by its chosen name, or the last part of its path if those differ.

    Raises:
        DataError: weights, or names that are not one for each corpus.
    """
    if blend is None or bounds is None or size == 0:
        return None
    problem = validation_sets_problem(blend, chosen_names)
    if problem is not None:  # a run's command line has been refused; this is for other callers
        raise DataError(problem)
    names = list(chosen_names or map(os.path.basename, blend.prefixes))
    if len(set(names)) < len(names):
        names = list(blend.prefixes)
    return DatasetGroup(
        {
            name: _build_one(prefix, bounds, size, corpora, options)
            for name, prefix in zip(names, blend.prefixes, strict=True)
        }
    )


class _Corpora:
    """Every corpus is opened once, for all splits."""

    def __init__(self, config: DataConfig, tokenizer: TokenizerIdentity | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._opened: dict[str, IndexedDataset] = {}

    def open(self, prefix: str) -> IndexedDataset:
        if prefix not in self._opened:
            opened = IndexedDataset(prefix, mmap=self._config.mmap_bin_files)
            if self._tokenizer is not None:
                meta = check_meta(prefix, opened.num_tokens, self._tokenizer)
                if meta is not None and meta.eod_id == self._tokenizer.eod_id:
                    warn_of_missing_ends(prefix, meta, self._config)
            self._opened[prefix] = opened
        return self._opened[prefix]


def _build_split(
    name: str,
    blend: Blend,
    bounds: Bounds,
    size: int | None,
    corpora: _Corpora,
    options: SampleOptions,
) -> SampleDataset | None:
    if size is not None and size < 0:
        raise DataError(f"{size} samples of the {name} split are wanted; use 0 or more")
    if options.stable:
        return _build_stable(blend, bounds, size, corpora, options)
    if blend.weights is None:
        return _build_unweighted(name, blend, bounds, size, corpora, options)
    if size is None:
        raise DataError(
            f"the {name} split is a weighted blend, which needs a number of samples; give one, or "
            "leave the weights out"
        )
    targets = [math.ceil(size * weight) for weight in blend.weights]
    datasets = [
        _build_one(prefix, bounds, math.ceil(target * (1 + _SURPLUS)), corpora, options)
        for prefix, target in zip(blend.prefixes, targets, strict=True)
    ]
    blended = BlendedDataset(datasets, blend.weights, sum(targets), blend.prefixes, needed=size)
    drawn = np.bincount(blended.dataset_index[:size], minlength=len(datasets))
    for prefix in (
        prefix for prefix, count in zip(blend.prefixes, drawn, strict=True) if not count
    ):
        warn_alike(
            "none of the %d samples of the %s split comes from %s: its weight is too small",
            size,
            name,
            prefix,
        )
    return blended


def _build_stable(
    blend: Blend, bounds: Bounds, size: int | None, corpora: _Corpora, options: SampleOptions
) -> SampleDataset:
    """Endless corpora; without weights they are drawn in proportion to their tokens."""
    if len(set(blend.prefixes)) < len(blend.prefixes):
        raise DataError("a blend in the stable order names a corpus twice; add its weights up")
    if size is None and len(blend.prefixes) == 1:
        return _build_one(blend.prefixes[0], bounds, None, corpora, options)
    datasets = {
        prefix: _build_one(prefix, bounds, _ENDLESS, corpora, options) for prefix in blend.prefixes
    }
    epochs = [
        dataset.order.samples_per_epoch
        for dataset in datasets.values()
        if isinstance(dataset.order, StableOrder)
    ]
    wanted = sum(epochs) if size is None else size
    opened = {prefix: corpora.open(prefix) for prefix in blend.prefixes}
    identities = {
        prefix: corpus_identity(indexed, split_range(bounds, len(indexed)), options)
        for prefix, indexed in opened.items()
    }
    return StableBlend(datasets, identities, blend.weights or epochs, wanted)


def _build_unweighted(
    name: str,
    blend: Blend,
    bounds: Bounds,
    size: int | None,
    corpora: _Corpora,
    options: SampleOptions,
) -> SampleDataset | None:
    """One corpus as long as wanted, or one pass over several."""
    opened = [corpora.open(prefix) for prefix in blend.prefixes]
    if size is None and not any(split_range(bounds, len(indexed)) for indexed in opened):
        warn_alike("the %s split holds no sequence: it has no data set", name)
        return None
    if len(opened) == 1:
        return _build_one(blend.prefixes[0], bounds, size, corpora, options)
    whole = [
        prefix
        for prefix in blend.prefixes
        if _holds_a_sample(corpora.open(prefix), bounds, options)
    ]
    for prefix in sorted(set(blend.prefixes) - set(whole)):
        warn_alike(
            "%s holds no whole sample of %d tokens in its %s split and is left out; give it a "
            "weight to repeat it",
            prefix,
            options.seq_length,
            name,
        )
    datasets = [_build_one(prefix, bounds, None, corpora, options) for prefix in whole]
    if not datasets:
        raise DataError(
            f"none of the corpora {' '.join(blend.prefixes)} holds one sample of "
            f"{options.seq_length} tokens in its {name} split; use a shorter --seq-length or "
            "weights, with which corpora are repeated"
        )
    available = sum(len(dataset) for dataset in datasets)
    if size is not None and size > available:
        warn_alike(
            "%d samples of the %s split are wanted, but its corpora (%s) hold %d in one pass and "
            "are not repeated without weights; give each corpus a weight to repeat it",
            size,
            name,
            " ".join(whole),
            available,
        )
    return BlendedDataset(datasets, None, None if size is None else min(size, available))


def _build_one(
    prefix: str, bounds: Bounds, size: int | None, corpora: _Corpora, options: SampleOptions
) -> GPTDataset:
    indexed = corpora.open(prefix)
    chosen = split_range(bounds, len(indexed))
    documents = np.arange(chosen.start, chosen.stop, dtype=np.int32)
    dataset = GPTDataset(indexed, documents, size, options)
    if not _holds_a_sample(indexed, bounds, options):
        warn_alike(
            "%s is shorter than one sample: %d tokens in the split, and --seq-length %d needs %d; "
            "it is repeated, so that every sample holds it more than once; use a shorter "
            "--seq-length or a larger corpus",
            prefix,
            _tokens(indexed, chosen),
            options.seq_length,
            _tokens_of_a_sample(options),
        )
    return dataset


def _holds_a_sample(indexed: IndexedDataset, bounds: Bounds, options: SampleOptions) -> bool:
    return _tokens(indexed, split_range(bounds, len(indexed))) >= _tokens_of_a_sample(options)


def _tokens(indexed: IndexedDataset, chosen: range) -> int:
    return int(indexed.sequence_lengths[chosen.start : chosen.stop].sum(dtype=np.int64))


def _tokens_of_a_sample(options: SampleOptions) -> int:
    return options.seq_length + int(options.add_extra_token)
