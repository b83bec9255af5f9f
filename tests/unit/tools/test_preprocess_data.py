"""The preprocessing tool: Megatron's bytes, difficult input, and failures that leave nothing."""

import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.unit.tokenizers.difficult_texts import DIFFICULT_TEXTS
from tools.preprocess_data import main

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "preprocess"
BPE = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(GOLDEN / "vocab.json")]
BPE += ["--merge-file", str(GOLDEN / "merges.txt")]
SP = [
    "--tokenizer-type",
    "GPTSentencePieceTokenizer",
    "--tokenizer-model",
    str(GOLDEN / "sp.model"),
]
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
EOD = 256  # of the byte-level tokenizer


def null(size):
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]


def command(*arguments):
    return [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *map(str, arguments)]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def write_lines(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def read_indexed(prefix):
    """An .idx parser of its own: (tokens, sequence lengths, document boundaries)."""
    index = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, bounds = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    dtype = {4: "<i4", 8: "<u2"}[code]
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(index, "<i8", bounds, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * bounds
    tokens = np.fromfile(f"{prefix}.bin", dtype)
    ends = np.cumsum(lengths, dtype=np.int64)
    assert ends[-1] == len(tokens)
    np.testing.assert_array_equal(pointers, (ends - lengths) * np.dtype(dtype).itemsize)
    return tokens, lengths.tolist(), documents.tolist()


def run(tmp_path, source, *arguments):
    """Run in this process; returns what `read_indexed` does."""
    prefix = tmp_path / "out"
    arguments = [
        "--input",
        str(source),
        "--output-prefix",
        str(prefix),
        "--workers",
        "1",
        *arguments,
    ]
    assert main(arguments) == 0
    return read_indexed(f"{prefix}_text_document")


def run_failing(tmp_path, capsys, source, *arguments):
    """Run in this process; returns the error after checking that no file is left."""
    prefix = tmp_path / "out"
    arguments = ["--input", str(source), "--output-prefix", str(prefix), *arguments]
    assert main(arguments) == 1
    assert not list(tmp_path.glob("out*"))
    return capsys.readouterr().err


class TestGolden:
    @pytest.mark.cli
    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_bpe_bytes(self, tmp_path, workers):
        done = subprocess.run(
            command("--input", GOLDEN / "corpus.jsonl", "--output-prefix", tmp_path / "bpe", *BPE)
            + ["--append-eod", "--workers", str(workers)],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        for name in ("bpe_text_document.bin", "bpe_text_document.idx"):
            assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()
        made = ["bpe_text_document.bin", "bpe_text_document.idx", "bpe_text_document.meta.json"]
        assert sorted(os.listdir(tmp_path)) == made
        assert "documents: 400 (17 empty)" in done.stdout
        assert "EOD id: 0, EOD tokens: 383" in done.stdout

    @pytest.mark.parametrize("workers", [1, 2])
    def test_sentencepiece_bytes(self, tmp_path, workers):
        self.assert_golden(tmp_path, "sp", *SP, "--workers", str(workers))

    def test_a_huggingface_file_of_the_same_vocabulary(self, tmp_path):
        tokenizer = tokenizers.Tokenizer(
            tokenizers.models.BPE.from_file(str(GOLDEN / "vocab.json"), str(GOLDEN / "merges.txt"))
        )
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = byte_level
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
        self.assert_golden(tmp_path, "bpe", *kind, "--workers", "2")

    @staticmethod
    def assert_golden(folder, name, *arguments):
        source, prefix = str(GOLDEN / "corpus.jsonl"), str(folder / name)
        words = ["--input", source, "--output-prefix", prefix, "--append-eod", *arguments]
        assert main(words) == 0
        for made in (f"{name}_text_document.bin", f"{name}_text_document.idx"):
            assert (folder / made).read_bytes() == (GOLDEN / made).read_bytes()

    def test_many_chunks_on_two_workers(self, tmp_path):
        """Long and short documents, so that later chunks finish before earlier ones."""
        texts = [f"{i} " * (50_000 if i % 500 == 0 else 1 + i % 7) for i in range(3_000)]
        source = write_lines(tmp_path / "in.jsonl", *texts)
        expected = run(tmp_path, source, *BYTES, "--append-eod")
        prefix = str(tmp_path / "two")
        arguments = ["--input", str(source), "--output-prefix", prefix, "--workers", "2", *BYTES]
        assert main([*arguments, "--append-eod"]) == 0
        found = read_indexed(prefix + "_text_document")
        np.testing.assert_array_equal(found[0], expected[0])
        assert found[1:] == expected[1:]


class TestDocuments:
    @pytest.mark.parametrize("eod", [True, False])
    def test_empty_documents_are_boundaries_without_sequence(self, tmp_path, capsys, eod):
        source = write_lines(tmp_path / "in.jsonl", "", "ab", "", " \n", "c", "")
        tokens, lengths, documents = run(tmp_path, source, *BYTES, *["--append-eod"] * eod)
        ends = [EOD] * eod
        assert tokens.tolist() == [*b"ab", *ends, *b" \n", *ends, *b"c", *ends]
        assert lengths == [2 + eod, 2 + eod, 1 + eod]
        assert documents == [0, 0, 1, 1, 2, 3, 3]
        output = capsys.readouterr()
        assert "documents: 6 (3 empty)" in output.out
        assert ("--append-eod is absent" in output.err) is not eod

    def test_nothing_but_empty_documents(self, tmp_path, capsys):
        source = write_lines(tmp_path / "in.jsonl", "", "")
        error = run_failing(tmp_path, capsys, source, *BYTES, "--append-eod")
        assert "not one token in the 2 documents" in error

    def test_no_documents(self, tmp_path, capsys):
        source = write_lines(tmp_path / "in.jsonl")
        assert "0 documents" in run_failing(tmp_path, capsys, source, *BYTES)

    @pytest.mark.parametrize("eod", [True, False])
    def test_lengths_count_the_end_mark(self, tmp_path, eod):
        source = write_lines(tmp_path / "in.jsonl", *["1 2 3 4 5 6 7 8 9"] * 100)
        options = ["--append-eod"] * eod
        tokens, lengths, documents = run(tmp_path, source, *null(100), *options)
        assert lengths == [9 + eod] * 100
        assert len(tokens) == 900 + 100 * eod
        assert documents == list(range(101))
        assert (tokens[8 + eod :: 9 + eod] == (99 if eod else 9)).all()

    @pytest.mark.parametrize("size", [65_499, 65_500, 65_535, 65_536, 65_537, 70_000])
    def test_largest_id_fits(self, tmp_path, size):
        source = write_lines(tmp_path / "in.jsonl", f"0 {size - 2} {size - 1}")
        tokens, _, _ = run(tmp_path, source, *null(size), "--append-eod")
        assert tokens.tolist() == [0, size - 2, size - 1, size - 1]
        assert tokens.dtype == (np.uint16 if size < 65_500 else np.int32)

    def test_very_long_document(self, tmp_path):
        long = " ".join(["7"] * 3_000_000)
        source = write_lines(tmp_path / "in.jsonl", "1 1 1 1 1", long, "2 2 2 2 2")
        tokens, lengths, _ = run(tmp_path, source, *null(10), "--append-eod")
        assert lengths == [6, 3_000_001, 6]
        assert np.bincount(tokens).tolist() == [0, 5, 5, 0, 0, 0, 0, 3_000_000, 0, 3]

    def test_difficult_texts(self, tmp_path):
        texts = list(DIFFICULT_TEXTS.values())
        tokens, lengths, documents = run(
            tmp_path, write_lines(tmp_path / "in.jsonl", *texts), *BYTES, "--append-eod"
        )
        ends = np.cumsum([0, *lengths])
        found = [
            bytes(tokens[ends[a] : ends[b]][:-1].tolist()).decode()
            for a, b in zip(documents, documents[1:], strict=False)
        ]
        assert found == texts

    def test_lists_of_texts_are_sequences_of_one_document(self, tmp_path):
        source = write_lines(tmp_path / "in.jsonl", ["ab", "", "c"], ["", ""], [], ["d", ""])
        tokens, lengths, documents = run(tmp_path, source, *BYTES, "--append-eod")
        assert tokens.tolist() == [*b"abc", EOD, *b"d", EOD]
        assert lengths == [2, 2, 2]
        assert documents == [0, 2, 2, 2, 3]

    def test_several_keys(self, tmp_path):
        source = tmp_path / "in.jsonl"
        source.write_text('{"a": "x", "b": ""}\n{"b": "yz", "a": "w", "c": 1}\n')
        prefix = str(tmp_path / "out")
        arguments = ["--input", str(source), "--output-prefix", prefix, "--json-keys", "a", "b"]
        assert main([*arguments, *BYTES]) == 0
        assert read_indexed(prefix + "_a_document")[0].tolist() == [*b"xw"]
        assert read_indexed(prefix + "_b_document")[1:] == ([2], [0, 0, 1])

    def test_end_mark_asked_of_a_tokenizer_without_one(self, tmp_path, capsys):
        tokenizer = json.loads((GOLDEN / "vocab.json").read_text())
        tokenizer["other"] = tokenizer.pop("<|endoftext|>")
        (tmp_path / "vocab.json").write_text(json.dumps(tokenizer))
        source = write_lines(tmp_path / "in.jsonl", "a")
        flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file"]
        flags += [str(tmp_path / "vocab.json"), "--merge-file", str(GOLDEN / "merges.txt")]
        error = run_failing(tmp_path, capsys, source, *flags, "--append-eod")
        assert "--append-eod" in error
        assert "<|endoftext|>" in error
        run(tmp_path, source, *flags)
        assert "EOD id: none" in capsys.readouterr().out


class TestInput:
    def test_order_of_files_and_patterns(self, tmp_path):
        for name in "cab":
            write_lines(tmp_path / f"part-{name}.jsonl", name)
        packed = tmp_path / "z.jsonl.gz"
        packed.write_bytes(gzip.compress(b'{"text": "Z"}\n'))
        prefix = str(tmp_path / "out")
        sources = [str(packed), str(tmp_path / "part-*.jsonl"), str(tmp_path / "part-a.jsonl")]
        assert main(["--input", *sources, "--output-prefix", prefix, *BYTES]) == 0
        assert read_indexed(prefix + "_text_document")[0].tolist() == [*b"Zabca"]

    def test_line_ends_byte_order_mark_and_blank_lines(self, tmp_path):
        source = tmp_path / "in.jsonl"
        source.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
        assert run(tmp_path, source, *BYTES)[0].tolist() == [*b"ab"]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"text": "a"', "no JSON"),
            ("not json", "no JSON"),
            ("[1, 2]", "JSON object is needed, got list"),
            ('{"txt": "a"}', r"no key 'text' (--json-keys); the keys are ['txt']"),
            ('{"text": null}', "must be a text or a list of texts, got NoneType"),
            ('{"text": ["a", 3]}', "got int"),
            ('{"text": "\\ud800"}', "surrogate"),
            ('{"text": "\udcff"}', "no JSON"),  # written below as the byte FF: no UTF-8
            ("[" * 200_000, "no JSON"),
        ],
    )
    def test_faulty_line(self, tmp_path, capsys, line, message):
        source = tmp_path / "in.jsonl"
        lines = ['{"text": "good"}', "", line]
        source.write_bytes("\n".join(lines).encode("utf-8", errors="surrogateescape"))
        error = run_failing(tmp_path, capsys, source, *BYTES)
        assert f"{source}, line 3: " in error
        assert message in error

    @pytest.mark.parametrize("workers", [1, 2])
    def test_first_faulty_line_of_many_chunks(self, tmp_path, capsys, workers):
        source = tmp_path / "in.jsonl"
        lines = ['{"text": "good"}'] * 20_000
        lines[11_999] = "wrong"
        lines[16_500] = "also wrong, but later"
        source.write_text("\n".join(lines))
        error = run_failing(tmp_path, capsys, source, *BYTES, "--workers", str(workers))
        assert f"{source}, line 12000: no JSON" in error

    def test_text_that_the_tokenizer_refuses(self, tmp_path, capsys):
        source = write_lines(tmp_path / "in.jsonl", "1 2", "3", "4 100", "x")
        error = run_failing(tmp_path, capsys, source, *null(100), "--workers", "1")
        assert f"{source}, line 3: token id 100 is outside" in error

    def test_damaged_gzip(self, tmp_path, capsys):
        source = tmp_path / "in.jsonl.gz"
        source.write_bytes(gzip.compress(b'{"text": "abc"}\n' * 1_000)[:-20])
        error = run_failing(tmp_path, capsys, source, *BYTES)
        assert f"{source}, from line " in error
        assert "cannot be read" in error

    def test_missing_file(self, tmp_path, capsys):
        source = tmp_path / "*.jsonl"
        assert f"no file '{source}'" in run_failing(tmp_path, capsys, source, *BYTES)

    def test_a_failed_run_keeps_the_files_of_an_earlier_one(self, tmp_path):
        before = run(tmp_path, write_lines(tmp_path / "in.jsonl", "good"), *BYTES)
        (tmp_path / "in.jsonl").write_text("bad")
        arguments = ["--input", str(tmp_path / "in.jsonl"), *BYTES]
        assert main([*arguments, "--output-prefix", str(tmp_path / "out")]) == 1
        after = read_indexed(tmp_path / "out_text_document")
        assert (after[0].tolist(), after[1:]) == (before[0].tolist(), before[1:])
        assert not list(tmp_path.glob("*.partial"))


class TestCommandLine:
    REQUIRED = ("--input", "in.jsonl", "--output-prefix", "out")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--tokeniser-type", "x"], "did you mean --tokenizer-type?"),
            (["--append_eod"], "did you mean --append-eod?"),
            (["--append"], "unknown flag '--append'; did you mean --append-eod?"),
            (["--tokenizer-mod=x"], "did you mean --tokenizer-model?"),
            (["--qwertz"], "unknown flag '--qwertz'"),
            (["--max-documents", "5"], "--max-documents is not available"),
            (["--keep-newlines"], "--keep-newlines belongs to --split-sentences"),
            (["--dataset-impl", "tfrecord"], "invalid choice"),
            (["--workers", "0"], "--workers is 0"),
            (["--log-interval", "-1"], "--log-interval is -1"),
            (["--json-keys", "a", "a"], "twice"),
            (["--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file, --merge-file"),
        ],
    )
    def test_usage_errors(self, capsys, arguments, message):
        assert main([*self.REQUIRED, *arguments]) == 2
        assert message in capsys.readouterr().err

    def test_input_and_output_are_required(self, capsys):
        assert main(BYTES) == 2
        assert "--input, --output-prefix" in capsys.readouterr().err

    def test_a_tokenizer_is_required(self, tmp_path, capsys):
        source = write_lines(tmp_path / "in.jsonl", "a")
        assert "--tokenizer-type" in run_failing(tmp_path, capsys, source)

    def test_old_command_lines(self, tmp_path, capsys):
        source = write_lines(tmp_path / "in.jsonl", *["a"] * 10)
        old = ["--dataset-impl", "mmap", "--partitions", "2", "--keep-sequential-samples"]
        tokens, _, _ = run(tmp_path, source, *BYTES, *old, "--log-interval", "5")
        assert len(tokens) == 10
        error = capsys.readouterr().err
        assert "--partitions needs nothing" in error
        assert "Processed 10 documents" in error

    def test_new_folders_are_made(self, tmp_path):
        source = write_lines(tmp_path / "in.jsonl", "a")
        prefix = tmp_path / "new" / "folder" / "x"
        assert main(["--input", str(source), "--output-prefix", str(prefix), *BYTES]) == 0
        assert prefix.with_name("x_text_document.idx").exists()

    @pytest.mark.cli
    def test_help_needs_no_torch(self):
        script = "import sys, tools.preprocess_data; print('torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.stdout == "False\n", done.stderr


@pytest.mark.cli
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
class TestLostProcesses:
    @pytest.fixture
    def tool(self, tmp_path):
        """The tool at work on two processes, far from done."""
        source = write_lines(tmp_path / "in.jsonl", *["some words " * 1_000] * 5_000)
        tool = subprocess.Popen(
            command("--input", source, "--output-prefix", tmp_path / "out", *BPE)
            + ["--workers", "2", "--log-interval", "1"],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert tool.stderr.readline().startswith("Processed ")
        yield tool
        tool.kill()
        tool.communicate(timeout=120)

    @staticmethod
    def workers_of(tool):
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                line = folder.joinpath("cmdline").read_bytes()
            except OSError:
                continue
            if parent == tool.pid and b"spawn_main" in line:
                found.append(int(folder.name))
        return found

    def test_a_killed_worker_ends_the_run(self, tool, tmp_path):
        workers = self.workers_of(tool)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        _, error = tool.communicate(timeout=1200)
        assert tool.returncode == 1
        assert "a worker process died" in error
        assert not list(tmp_path.glob("out*"))

    def test_workers_end_with_their_parent(self, tool, tmp_path):
        workers = self.workers_of(tool)
        assert len(workers) == 2
        tool.kill()
        tool.wait(timeout=120)
        deadline = time.monotonic() + 30
        while any(map(_runs, workers)):
            assert time.monotonic() < deadline, f"workers {workers} outlive their parent"
            time.sleep(0.05)
        assert not list(tmp_path.glob("out*.idx"))


@pytest.mark.cli
def test_killed_again_and_again_it_goes_on(tmp_path):
    """SIGKILL three times, as soon as a new state is noted, then left to its end."""
    source = write_lines(tmp_path / "in.jsonl", *[f"{i} some words " * 3_000 for i in range(450)])
    words = ["--input", source, *BPE, "--append-eod", "--workers", "1", "--log-interval", "0"]
    assert main([*map(str, words), "--output-prefix", str(tmp_path / "whole")]) == 0
    words += ["--state-interval", "0.01", "--output-prefix", tmp_path / "out"]
    for _ in range(3):
        before = _state(tmp_path)
        tool = subprocess.Popen(command(*words), env=environment(), stderr=subprocess.DEVNULL)
        while _state(tmp_path) == before:
            assert tool.poll() is None, "it ended before a state was noted"
            time.sleep(0.002)
        tool.kill()
        tool.wait(timeout=120)
        assert not list(tmp_path.glob("out*.idx"))
    done = subprocess.run(
        command(*words), env=environment(), capture_output=True, text=True, timeout=1200, check=True
    )
    assert "an interrupted run goes on at" in done.stderr
    for end in (".bin", ".idx"):
        ours, whole = (tmp_path / f"{name}_text_document{end}" for name in ("out", "whole"))
        assert ours.read_bytes() == whole.read_bytes()


def _state(folder):
    """Contents of the file from which a killed run goes on; None before there is one.

    The file is replaced by renaming, so it is read by its name: a listing would also find the one
    being written, which is gone a moment later.
    """
    path = folder / "out.preprocess_state.json"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
