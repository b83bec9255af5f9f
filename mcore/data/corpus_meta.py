"""`PREFIX.meta.json`: what is known about an indexed dataset beside its tokens.

Written by the preprocessing tool, absent for files of other programs. It lies beside `.bin` and
`.idx`, whose bytes stay Megatron's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

from mcore.config.data import DataConfig
from mcore.data.indexed_builder import IndexedDatasetBuilder
from mcore.data.indexed_format import get_bin_path, get_idx_path
from mcore.data.publishing import partial_path, publish
from mcore.errors import DataError
from mcore.log import warn_alike

FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CorpusMeta:
    """What the preprocessing tool notes down.

    Attributes:
        tokenizer_type: class of the tokenizer.
        tokenizer_fingerprint: hash of what the tokenizer does (`mcore.tokenizers.fingerprint`).
        vocab_size: number of its ids.
        eod_id: its end-of-document id, or None.
        append_eod: documents end with that id.
        dtype: token type of the file.
        documents: documents, empty ones included.
        empty_documents: documents without a token.
        sequences: sequences.
        tokens: tokens, end marks included.
        eod_tokens: tokens that are the end-of-document id.
        faulty_records: records of the input that were left out.
        sentence_splitter: what cut documents into sequences, or None.
        format: version of this file.
    """

    tokenizer_type: str
    tokenizer_fingerprint: str
    vocab_size: int
    eod_id: int | None
    append_eod: bool
    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    eod_tokens: int
    faulty_records: int = 0
    sentence_splitter: str | None = None
    format: int = FORMAT

    def write(self, path: str) -> None:
        """Write the file and bring it to the disk.

        Args:
            path: a temporary name; `publish_corpus` gives it that of `meta_path`.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


def meta_path(prefix: str) -> str:
    """`PREFIX.meta.json`."""
    return prefix + ".meta.json"


def seal_corpus(builder: IndexedDatasetBuilder, prefix: str, meta: CorpusMeta | None) -> None:
    """Bring tokens, index and note to the disk, all under temporary names, and close the builder.

    Args:
        builder: of `PREFIX.bin`.
        prefix: of the files to be.
        meta: the note; None = nothing is known.
    """
    builder.seal(get_idx_path(prefix))
    if meta is not None:
        meta.write(partial_path(meta_path(prefix)))


def publish_corpus(prefix: str, *, has_meta: bool) -> None:
    """Give sealed files their names; can be done again after a kill at any point.

    Args:
        prefix: of the files.
        has_meta: there is a note; without one that of the files which are replaced is removed.
    """
    note, index = meta_path(prefix), get_idx_path(prefix)
    if not has_meta and os.path.exists(partial_path(index)):
        # Tokens that are not those of a note are refused, so it goes after the index that it is of.
        for path in (index, note):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
    publish(get_bin_path(prefix), index, note_path=note if has_meta else None)


def read_meta(prefix: str) -> CorpusMeta | None:
    """What is known about a dataset; None where there is no such file.

    Raises:
        DataError: the file is damaged or of a later version.
    """
    path = meta_path(prefix)
    try:
        with open(path, encoding="utf-8") as file:
            values: dict[str, Any] = json.load(file)
        if values.get("format") != FORMAT:
            raise DataError(
                f"{path} has format {values.get('format')!r}; this version reads {FORMAT}; "
                "preprocess again, or remove the file to train without its checks"
            )
        return CorpusMeta(**values)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged ({error}); preprocess again, or remove the file to train without "
            "its checks"
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """The tokenizer of a run, to compare corpora with.

    Attributes:
        tokenizer_type: its class.
        vocab_size: number of its ids.
        eod_id: its end-of-document id, or None.
        fingerprint: the hash of what it does, asked for each corpus that has one to compare: it
            looks at the whole vocabulary, so compute it once.
    """

    tokenizer_type: str
    vocab_size: int
    eod_id: int | None
    fingerprint: Callable[[], str]


def check_meta(prefix: str, num_tokens: int, tokenizer: TokenizerIdentity) -> CorpusMeta | None:
    """Refuse a corpus that another tokenizer made; a corpus without `.meta.json` passes.

    A NullTokenizer reads no text, so only sizes and the end-of-document id are compared with it. A
    corpus that one made for a real tokenizer must have that one's vocabulary, and the log says that
    nothing shows whose ids they are.

    Returns:
        What is known about the corpus; None where there is no `.meta.json`.

    Raises:
        DataError: the corpus is of another tokenizer, or not the one that its `.meta.json` is of.
    """
    meta = read_meta(prefix)
    if meta is None:
        return None
    path = meta_path(prefix)
    if meta.tokens != num_tokens:
        raise DataError(
            f"{path} is of {meta.tokens} tokens, but {prefix}.bin has {num_tokens}: it belongs to "
            "another version of the corpus; restore the files, or remove it"
        )
    differences = []
    null = "NullTokenizer"
    is_bare = meta.tokenizer_type == null != tokenizer.tokenizer_type
    if meta.vocab_size > tokenizer.vocab_size or (
        is_bare and meta.vocab_size < tokenizer.vocab_size
    ):
        differences.append(
            f"vocabulary {meta.vocab_size} of its {meta.tokenizer_type}, this run's "
            f"{tokenizer.tokenizer_type} {tokenizer.vocab_size}"
        )
    if meta.append_eod and meta.eod_id != tokenizer.eod_id:
        differences.append(f"end-of-document id {meta.eod_id}, this run {tokenizer.eod_id}")
    if null not in (tokenizer.tokenizer_type, meta.tokenizer_type) and (
        meta.tokenizer_fingerprint != tokenizer.fingerprint()
    ):
        differences.append(
            f"{meta.tokenizer_type} {meta.tokenizer_fingerprint}, this run "
            f"{tokenizer.tokenizer_type} {tokenizer.fingerprint()}"
        )
    if differences:
        raise DataError(
            f"{prefix} was made with another tokenizer ({path}): {'; '.join(differences)}; give "
            "the tokenizer it was made with, or preprocess the text again"
        )
    if is_bare:
        warn_alike(
            "%s was made by a NullTokenizer of %d ids; the %s has %d too, but nothing shows that "
            "the ids are its own",
            prefix,
            meta.vocab_size,
            tokenizer.tokenizer_type,
            tokenizer.vocab_size,
        )
    return meta


def warn_of_missing_ends(prefix: str, meta: CorpusMeta, options: DataConfig) -> None:
    """Say that masks which follow from ends of documents find none in a corpus."""
    masks = {
        "--reset-position-ids": options.reset_position_ids,
        "--reset-attention-mask": options.reset_attention_mask,
        "--eod-mask-loss": options.eod_mask_loss,
    }
    given = [flag for flag, is_given in masks.items() if is_given]
    if given and meta.eod_tokens == 0:
        warn_alike(
            "nothing in %s marks where a document ends, so that %s can do nothing there; "
            "preprocess the text with --append-eod, or leave out the option",
            prefix,
            " and ".join(given),
        )
