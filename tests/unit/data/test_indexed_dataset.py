import hashlib
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore.data import DType, IndexedDataset, IndexedDatasetBuilder
from mcore.errors import DataError
from tests.unit.data.corpora import GOLDEN, counting_corpus, write_corpus

# formats.md 3.1: uint16, three documents of one sequence each with lengths 3, 1, 2.
GOLDEN_IDX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0300000000000000 0400000000000000"
    "030000000100000002000000 000000000000000006000000000000000800000000000000"
    "0000000000000000010000000000000002000000000000000300000000000000"
)
GOLDEN_SHA = "1c8fe6f3727b2b1f50f9d9f1c8ac39414f04463fc33c45feb10b3dfd564cc8e2"
CORPORA = ("alpha_text_document", "beta_text_document", "gamma_text_document")


def independent_reader(prefix):
    """A second parser of the format, sequence by sequence."""
    raw, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert raw[:9] == b"MMIDIDX\0\0"
    _, code, count, boundaries = struct.unpack_from("<QBQQ", raw, 9)
    letter = {8: "H", 4: "i", 5: "q"}[code]
    lengths = struct.unpack_from(f"<{count}i", raw, 34)
    pointers = struct.unpack_from(f"<{count}q", raw, 34 + 4 * count)
    documents = struct.unpack_from(f"<{boundaries}q", raw, 34 + 12 * count)
    rows = [
        list(struct.unpack_from(f"<{length}{letter}", tokens, pointer))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return rows, list(documents)


def test_golden_index_bytes(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3], [4], [5, 6]])
    raw = (tmp_path / "c.idx").read_bytes()
    assert raw == GOLDEN_IDX
    assert hashlib.sha256(raw).hexdigest() == GOLDEN_SHA
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx"]
    assert IndexedDataset.exists(prefix)


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("mmap", [True, False])
def test_megatron_corpus_reads_and_rewrites_the_same(name, mmap, tmp_path):
    data = IndexedDataset(str(GOLDEN / name), mmap=mmap)
    rows, documents = independent_reader(GOLDEN / name)
    assert [row.tolist() for row in (data[i] for i in range(len(data)))] == rows
    assert data.document_indices.tolist() == documents
    assert data.get(3, 2, 3).tolist() == rows[3][2:5]
    assert data.get(3, 2).tolist() == rows[3][2:]
    with IndexedDatasetBuilder(str(tmp_path / "copy.bin"), data.dtype) as builder:
        for index in range(len(data)):
            builder.add_document(data[index], [len(data[index])])
        builder.finalize(str(tmp_path / "copy.idx"))
    for suffix in (".bin", ".idx"):
        copied = (tmp_path / f"copy{suffix}").read_bytes()
        assert copied == (GOLDEN / f"{name}{suffix}").read_bytes()


def test_documents_of_several_and_of_no_sequences(tmp_path):
    prefix = tmp_path / "c"
    with IndexedDatasetBuilder(f"{prefix}.bin", np.int32) as builder:
        builder.add_document([7, 8, 9], [1, 2])
        builder.end_document()
        builder.add_item(torch.tensor([70000, -1]))
        builder.add_item([])
        builder.end_document()
        builder.finalize(f"{prefix}.idx")
    assert independent_reader(prefix) == ([[7], [8, 9], [70000, -1], []], [0, 2, 2, 4])
    data = IndexedDataset(str(prefix))
    assert data.num_tokens == 5
    assert data[3].tolist() == []


def test_add_index_appends_whole_corpora(tmp_path):
    first = write_corpus(tmp_path / "first", [[1, 2], [3]])
    second = tmp_path / "second"
    with IndexedDatasetBuilder(f"{second}.bin", np.uint16) as builder:
        builder.add_document([4, 5, 6], [1, 2])
        builder.end_document()
        builder.finalize(f"{second}.idx")
    with IndexedDatasetBuilder(str(tmp_path / "all.bin"), np.uint16) as builder:
        builder.add_index(first)
        builder.add_index(str(second))
        builder.finalize(str(tmp_path / "all.idx"))
    wanted = ([[1, 2], [3], [4], [5, 6]], [0, 1, 2, 4, 4])
    assert independent_reader(tmp_path / "all") == wanted


def test_add_index_refuses_another_dtype(tmp_path):
    narrow = write_corpus(tmp_path / "narrow", [[1]])
    with (
        IndexedDatasetBuilder(str(tmp_path / "all.bin"), np.int32) as builder,
        pytest.raises(DataError, match="uint16"),
    ):
        builder.add_index(narrow)
    assert sorted(os.listdir(tmp_path)) == ["narrow.bin", "narrow.idx"]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(65499, np.uint16), (65500, np.int32), (65537, np.int32), (None, np.int32)],
)
def test_dtype_by_vocabulary(vocab_size, dtype, tmp_path):
    assert DType.optimal_dtype(vocab_size) is dtype
    largest = (vocab_size or 70000) - 1
    assert IndexedDataset(write_corpus(tmp_path / "c", [[0, largest]], dtype))[0][1] == largest


@pytest.mark.parametrize("token", [65536, -1])
def test_a_token_that_does_not_fit_is_refused(token, tmp_path):
    with pytest.raises(DataError, match=f"token id {token} does not fit uint16"):
        write_corpus(tmp_path / "c", [[1, token]])
    assert os.listdir(tmp_path) == []


def test_unfinished_work_never_looks_complete(tmp_path):
    write_corpus(tmp_path / "c", [[1, 2, 3]])
    old = (tmp_path / "c.bin").read_bytes(), (tmp_path / "c.idx").read_bytes()
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), np.uint16)
    builder.add_item([9] * 50)
    assert ((tmp_path / "c.bin").read_bytes(), (tmp_path / "c.idx").read_bytes()) == old
    with pytest.raises(DataError, match="end_document"):
        builder.finalize(str(tmp_path / "c.idx"))
    builder.end_document()
    builder.finalize(str(tmp_path / "c.idx"))
    assert IndexedDataset(str(tmp_path / "c"))[0].tolist() == [9] * 50
    with pytest.raises(DataError, match="finished"):
        builder.add_item([1])


def test_a_range_outside_the_sequence_is_an_error():
    data = IndexedDataset(str(GOLDEN / CORPORA[0]))
    length = int(data.sequence_lengths[0])
    for index, offset, count in ((0, 1, length), (0, -1, 1), (-1, 0, None), (len(data), 0, None)):
        with pytest.raises(IndexError, match="alpha_text_document"):
            data.get(index, offset, count)


HEADER_FAULTS = {
    "magic": (0, b"XX", "wrong first bytes"),
    "version": (9, struct.pack("<Q", 2), "version 2"),
    "float dtype": (17, b"\x06", "dtype code 6"),
    "unknown dtype": (17, b"\xff", "dtype code 255"),
    "2^62 sequences": (18, struct.pack("<Q", 1 << 62), "claims 4611686018427387904 sequences"),
    "2^64 - 1 documents": (26, struct.pack("<Q", (1 << 64) - 1), "document boundaries"),
    "fewer sequences": (18, struct.pack("<Q", 2), "claims 2 sequences"),
    "negative length": (34, struct.pack("<i", -3), "negative length"),
    "longer sequence": (34, struct.pack("<i", 4), "pointer of sequence 1"),
    "pointer beyond the file": (34 + 12 + 16, struct.pack("<q", 1 << 40), "pointer of sequence 2"),
    "negative pointer": (34 + 12, struct.pack("<q", -2), "pointer of sequence 0"),
    "first boundary": (34 + 36, struct.pack("<q", 1), "do not run from 0"),
    "last boundary": (34 + 36 + 24, struct.pack("<q", 9), "do not run from 0 to 3"),
    "decreasing boundary": (34 + 36 + 8, struct.pack("<q", 3), "decrease"),
    "pickle": (0, b"\x80\x04cos\nsystem\n(S'exit 7'\ntR.", "wrong first bytes"),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_a_damaged_index_is_refused_by_name(fault, tmp_path):
    offset, patch, message = HEADER_FAULTS[fault]
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3], [4], [5, 6]])
    raw = bytearray((tmp_path / "c.idx").read_bytes())
    raw[offset : offset + len(patch)] = patch
    (tmp_path / "c.idx").write_bytes(raw)
    with pytest.raises(DataError, match=message) as error:
        IndexedDataset(prefix)
    assert "c.idx" in str(error.value)


@pytest.mark.parametrize("size", [0, 5, 33, 34, 101])
def test_a_truncated_index_is_refused(size, tmp_path):
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3], [4], [5, 6]])
    os.truncate(tmp_path / "c.idx", size)
    with pytest.raises(DataError, match="c.idx"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("size", [0, 11, 13])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_token_file_of_another_size_is_refused(size, mmap, tmp_path):
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3], [4], [5, 6]])
    os.truncate(tmp_path / "c.bin", size)
    with pytest.raises(DataError, match=r"c\.bin is (truncated|too long)"):
        IndexedDataset(prefix, mmap=mmap)


def test_an_index_of_objects_is_never_unpickled(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3]])

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    with open(tmp_path / "c.idx", "wb") as file:
        np.save(file, np.array([Payload()], object), allow_pickle=True)
    with pytest.raises(DataError, match="wrong first bytes"):
        IndexedDataset(prefix)
    assert not (tmp_path / "executed").exists()


def test_missing_files_say_what_a_prefix_is(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[1]])
    with pytest.raises(DataError, match=r"nothing\.idx and .*nothing\.bin not found"):
        IndexedDataset(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"write .*c: a data path"):
        IndexedDataset(prefix + ".bin")
    shutil.move(prefix + ".bin", prefix + ".away")
    with pytest.raises(DataError, match=r"c\.bin not found"):
        IndexedDataset(prefix)


def test_a_corpus_without_tokens_opens(tmp_path):
    for mmap in (True, False):
        assert len(IndexedDataset(write_corpus(tmp_path / "none", []), mmap=mmap)) == 0
        data = IndexedDataset(write_corpus(tmp_path / "empty", [[], []]), mmap=mmap)
        assert data[1].tolist() == []


def test_one_very_long_document(tmp_path):
    lengths = [5, 3_000_000, 5]
    data = IndexedDataset(counting_corpus(tmp_path / "c", lengths))
    assert data.sequence_lengths.tolist() == lengths
    assert data[2].tolist() == [3_000_005, 3_000_006, 3_000_007, 3_000_008, 3_000_009]


def test_byte_offsets_beyond_2_to_the_31(tmp_path):
    """A sparse corpus of 2.4 GB, read at its far end."""
    lengths = [1_200_000_000, 3]
    ends = np.cumsum(lengths)
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(int(ends[-1]) * 2)
        file.seek(int(ends[0]) * 2)
        file.write(struct.pack("<3H", 11, 12, 13))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 3)
    body = struct.pack("<2i2q3q", *lengths, 0, int(ends[0]) * 2, 0, 1, 2)
    (tmp_path / "big.idx").write_bytes(header + body)
    for mmap in (True, False):
        data = IndexedDataset(str(tmp_path / "big"), mmap=mmap)
        assert data[1].tolist() == [11, 12, 13]
        assert data.get(0, 1_199_999_999).tolist() == [0]


def test_merged_pointers_pass_2_to_the_31(tmp_path, monkeypatch):
    """The tokens are not copied here: only the arithmetic of the index is looked at."""
    copy = shutil.copyfileobj

    def copy_small_files(source, target, size):
        if os.fstat(source.fileno()).st_size < 1 << 20:
            copy(source, target, size)

    monkeypatch.setattr("shutil.copyfileobj", copy_small_files)
    lengths = [1_200_000_000, 3]
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(sum(lengths) * 2)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 3)
    body = struct.pack("<2i2q3q", *lengths, 0, lengths[0] * 2, 0, 1, 2)
    (tmp_path / "big.idx").write_bytes(header + body)
    with IndexedDatasetBuilder(str(tmp_path / "all.bin"), np.uint16) as builder:
        builder.add_index(str(tmp_path / "big"))
        builder.add_index(str(tmp_path / "big"))
        builder.finalize(str(tmp_path / "all.idx"))
    os.truncate(tmp_path / "all.bin", 2 * sum(lengths) * 2)
    data = IndexedDataset(str(tmp_path / "all"))
    assert data.sequence_pointers.tolist() == [0, 2400000000, 2400000006, 4800000006]
    assert data.document_indices.tolist() == [0, 1, 2, 3, 4]


def test_a_full_disk_leaves_no_temporary_files(tmp_path):
    """What the buffer still holds cannot be written when the files are closed, either."""
    builder = IndexedDatasetBuilder(str(tmp_path / "full.bin"), np.int32)
    assert builder._files is not None
    builder._files[0].close()
    builder._files[0] = Path("/dev/full").open("wb")  # noqa: SIM115  (the builder closes it)
    builder.add_document([1, 2, 3], [3])
    builder.discard()
    assert not list(tmp_path.iterdir())
