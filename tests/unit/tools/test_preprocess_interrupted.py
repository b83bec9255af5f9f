"""Interrupted runs: the same command goes on, and nothing half done looks complete."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from mcore.data import IndexedDataset
from mcore.data.corpus_meta import read_meta
from tests.unit.tools.test_preprocess_data import BYTES, GOLDEN, read_indexed, write_lines
from tools import corpus_reading, preprocess_data
from tools.corpus_encoding import EncodedChunk, EncodedPart
from tools.corpus_reading import Chunk, Place
from tools.preprocess_data import main
from tools.preprocess_progress import Progress
from tools.preprocess_state import only_run


def bytes_of(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


class TestInterruptedRuns:
    @pytest.fixture
    def source(self, tmp_path):
        texts = [f"document {i} " * 40 for i in range(4000)]
        return write_lines(tmp_path / "in.jsonl", *texts)

    def arguments(self, tmp_path, source, name):
        arguments = ["--input", str(source), "--output-prefix", str(tmp_path / name)]
        return [*arguments, *BYTES, "--workers", "1", "--append-eod"]

    def interrupt(self, monkeypatch, arguments, chunks, error=KeyboardInterrupt):
        """Stop after some chunks; a state is noted after each."""
        encode = preprocess_data.encode_in_order
        clock = iter(range(0, 10**9, 1000))

        def some(*job):
            for number, result in enumerate(encode(*job)):
                if number == chunks:
                    raise error
                yield result

        with monkeypatch.context() as patch:
            patch.setattr(preprocess_data, "encode_in_order", some)
            patch.setattr(time, "monotonic", lambda: next(clock))
            if error is KeyboardInterrupt:
                assert main(arguments) == 130
                return
            with pytest.raises(error):
                main(arguments)

    def test_the_same_command_goes_on(self, tmp_path, source, monkeypatch, capsys):
        assert main(self.arguments(tmp_path, source, "whole")) == 0
        arguments = self.arguments(tmp_path, source, "out")
        self.interrupt(monkeypatch, arguments, 3)
        assert not (tmp_path / "out_text_document.idx").exists()
        with open(tmp_path / "out_text_document.bin.partial", "ab") as file:
            file.write(b"what was not yet noted")
        capsys.readouterr()
        assert main(arguments) == 0
        assert "an interrupted run goes on at" in capsys.readouterr().err
        whole = tmp_path / "whole_text_document"
        assert bytes_of(tmp_path / "out_text_document") == bytes_of(whole)
        assert read_meta(str(tmp_path / "out_text_document")) == read_meta(str(whole))
        assert not list(tmp_path.glob("*.partial"))
        assert not list(tmp_path.glob("*state*"))

    def test_ctrl_c_ends_with_the_note(self, tmp_path, source, monkeypatch, capsys):
        self.interrupt(monkeypatch, self.arguments(tmp_path, source, "out"), 2)
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == "note: what is done is kept; the same command goes on from there"

    def test_another_input_starts_anew(self, tmp_path, source, monkeypatch, capsys):
        arguments = self.arguments(tmp_path, source, "out")
        self.interrupt(monkeypatch, arguments, 2)
        write_lines(source, "other")
        assert main(arguments) == 0
        told = capsys.readouterr().err
        assert "goes on at" not in told
        assert "an interrupted run is begun again" in told
        assert len(read_indexed(tmp_path / "out_text_document")[1]) == 1
        assert not list(tmp_path.glob("*.partial"))

    def test_the_state_of_another_command_is_of_no_use(self, tmp_path, source, monkeypatch, capsys):
        """Its temporary files have been replaced: going on from it would mix two corpora."""
        assert main(self.arguments(tmp_path, source, "whole")) == 0
        arguments = self.arguments(tmp_path, source, "out")
        self.interrupt(monkeypatch, arguments, 2)
        other = self.arguments(tmp_path, write_lines(tmp_path / "o.jsonl", "x" * 10**6), "out")
        self.interrupt(monkeypatch, other, 0)
        capsys.readouterr()
        assert main(arguments) == 0
        assert "goes on at" not in capsys.readouterr().err
        assert bytes_of(tmp_path / "out_text_document") == bytes_of(
            tmp_path / "whole_text_document"
        )

    def test_a_fault_of_the_program_discards_nothing(self, tmp_path, source, monkeypatch, capsys):
        assert main(self.arguments(tmp_path, source, "whole")) == 0
        arguments = self.arguments(tmp_path, source, "out")
        self.interrupt(monkeypatch, arguments, 2, OverflowError)
        assert "what is done is kept" in capsys.readouterr().err
        assert main(arguments) == 0
        assert "goes on at" in capsys.readouterr().err
        assert bytes_of(tmp_path / "out_text_document") == bytes_of(
            tmp_path / "whole_text_document"
        )

    def test_an_input_that_the_system_cannot_read_for_once(
        self, tmp_path, source, monkeypatch, capsys
    ):
        arguments = [*self.arguments(tmp_path, source, "out"), "--state-interval", "1e-9"]

        class Failing:
            def __init__(self, path):
                self._file, self._reads = open(path, "rb"), 0  # noqa: SIM115 - see __exit__

            def __getattr__(self, name):
                return getattr(self._file, name)

            def __enter__(self):
                return self

            def __exit__(self, *error):
                self._file.close()

            def read(self, size):
                self._reads += 1
                if self._reads > 2:
                    raise OSError(errno.EIO, "Input/output error")
                return self._file.read(size)

        with monkeypatch.context() as patch:
            patch.setattr(corpus_reading, "_open_raw", Failing)
            assert main(arguments) == 1
        error = capsys.readouterr().err
        assert f"{source}, from line " in error
        assert "Input/output error" in error
        assert main(arguments) == 0
        assert "goes on at" in capsys.readouterr().err

    def test_progress_of_a_packed_file(self, tmp_path, monkeypatch, capsys):
        """The place is counted in unpacked bytes, progress in those of the file."""
        packed = tmp_path / "in.jsonl.gz"
        with open(packed, "wb") as file:
            file.truncate(1 << 40)
        clock = iter((0.0, 10.0, 20.0))
        monkeypatch.setattr(time, "monotonic", lambda: next(clock))
        start = Place(0, 1 << 60, 5)
        progress = Progress(1, [str(packed)], start)
        one = EncodedPart(np.zeros(1), np.ones(1), np.ones(1))
        for stored in (1 << 38, 1 << 39):
            chunk = Chunk(str(packed), "json", 5, b"", start, stored)
            progress.add(chunk, EncodedChunk({"text": one}, [], 1))
        first, second = capsys.readouterr().err.splitlines()
        assert first.endswith("25% of the input.")
        assert second.endswith("50% of the input, ETA 0:00:40.")

    def test_progress_through_a_file_that_is_given_twice(self, tmp_path, monkeypatch, capsys):
        source = tmp_path / "in.jsonl"
        source.write_bytes(b"x" * 100)
        clock = iter((0.0, 10.0, 15.0))
        monkeypatch.setattr(time, "monotonic", lambda: next(clock))
        progress = Progress(1, [str(source)] * 2, None)
        one = EncodedPart(np.zeros(1), np.ones(1), np.ones(1))
        for after, stored in ((Place(0, 100, 2), 100), (Place(1, 50, 2), 50)):
            chunk = Chunk(str(source), "json", 1, b"", after, stored)
            progress.add(chunk, EncodedChunk({"text": one}, [], 1))
        first, second = capsys.readouterr().err.splitlines()
        assert first.endswith("50% of the input, ETA 0:00:10.")
        assert second.endswith("75% of the input, ETA 0:00:05.")

    def test_temporary_files_that_are_gone(self, tmp_path, source, monkeypatch, capsys):
        arguments = self.arguments(tmp_path, source, "out")
        self.interrupt(monkeypatch, arguments, 2)
        (tmp_path / "out_text_document.bin.lengths.partial").unlink()
        before = sorted(path.name for path in tmp_path.iterdir())
        capsys.readouterr()
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert "goes on" not in error  # neither here nor with the same command
        assert "out_text_document.bin.lengths.partial is gone" in error
        assert "out.preprocess_state.json" in error
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    @pytest.mark.parametrize("file", ["vocab.json", "merges.txt"])
    def test_another_tokenizer_starts_anew(self, tmp_path, monkeypatch, capsys, file):
        source = write_lines(tmp_path / "in.jsonl", *["some text " * 30] * 1000)
        for name in ("vocab.json", "merges.txt"):
            (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
        kind = ["--tokenizer-type", "GPT2BPETokenizer"]
        kind += ["--vocab-file", f"{tmp_path}/vocab.json", "--merge-file", f"{tmp_path}/merges.txt"]
        words = ["--input", str(source), *kind, "--workers", "1", "--output-prefix"]
        self.interrupt(monkeypatch, [*words, f"{tmp_path}/out"], 1)
        if file == "vocab.json":
            vocab = json.loads((tmp_path / file).read_text(encoding="utf-8"))
            vocab["d"], vocab["o"] = vocab["o"], vocab["d"]
            (tmp_path / file).write_text(json.dumps(vocab), encoding="utf-8")
        else:
            lines = (tmp_path / file).read_text(encoding="utf-8").splitlines()
            lines[-2:] = reversed(lines[-2:])
            (tmp_path / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
        preprocess_data.cached_tokenizer.cache_clear()
        capsys.readouterr()
        assert main([*words, f"{tmp_path}/out"]) == 0
        assert "goes on at" not in capsys.readouterr().err
        assert main([*words, f"{tmp_path}/whole"]) == 0
        assert bytes_of(tmp_path / "out_text_document") == bytes_of(
            tmp_path / "whole_text_document"
        )
        preprocess_data.cached_tokenizer.cache_clear()


class TestKilledAtEveryRename:
    """A process ends at its n-th change of a name, for every n; then the same command is given."""

    def ends_at(self, number, arguments):
        """Run in a process that dies before its `number`-th renaming or removal; its status."""
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(240)
            done = [0]

            def counted(change):
                def dying(*paths):
                    done[0] += 1
                    if done[0] == number:
                        os._exit(9)
                    return change(*paths)

                return dying

            status = 1
            try:
                os.replace, os.remove = counted(os.replace), counted(os.remove)
                status = main(arguments)
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    @pytest.mark.parametrize("is_old", [False, True], ids=["new", "over old files"])
    def test_the_same_command_ends_the_work(self, tmp_path, is_old):
        source = tmp_path / "in.jsonl"
        source.write_text('{"a": "some", "b": "text"}\n{"a": "", "b": "c"}\n')

        def arguments(prefix, *more):
            words = ["--input", str(source), "--output-prefix", str(prefix), "--json-keys", "a"]
            words += ["b", *BYTES, "--workers", "1", "--append-eod", "--state-interval", "1e-9"]
            return [*words, *more]

        assert main(arguments(tmp_path / "whole")) == 0
        number, status = 0, 9
        while status == 9:
            number += 1
            folder = tmp_path / str(number)
            folder.mkdir()
            if is_old:
                words = ["--input", str(write_lines(folder / "old.jsonl", "much older text"))]
                words += ["--output-prefix", str(folder / "out"), *BYTES, "--workers", "1"]
                source_keys = [*words, "--json-keys", "text"]
                assert main(source_keys) == 0
                for end in ("bin", "idx", "meta.json"):
                    data = (folder / f"out_text_document.{end}").read_bytes()
                    for key in "ab":
                        (folder / f"out_{key}_document.{end}").write_bytes(data)
            status = self.ends_at(number, arguments(folder / "out"))
            for key in "ab":
                prefix = f"{folder}/out_{key}_document"
                if IndexedDataset.exists(prefix):  # old or new, but whole, and with its note
                    assert read_meta(prefix).tokens == IndexedDataset(prefix).num_tokens
            assert main(arguments(folder / "out")) == 0
            for key in "ab":
                names = [
                    f"{where}_{key}_document" for where in (folder / "out", tmp_path / "whole")
                ]
                assert bytes_of(names[0]) == bytes_of(names[1])
                assert read_meta(names[0]) == read_meta(names[1])
            assert not list(folder.glob("*.partial"))
            assert not list(folder.glob("*state*"))
        assert status == 0
        assert number > 10


def test_a_second_run_on_the_same_output_is_refused(tmp_path, capsys):
    """It would write into the files of the first, or take its state for that of a dead one."""
    source = write_lines(tmp_path / "in.jsonl", "some words")
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *BYTES]
    with only_run(str(tmp_path / "out")):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert f"another run (process {os.getpid()} on " in said
        assert "give another --output-prefix" in said
    assert main(words) == 0
    assert not list(tmp_path.glob("*lock*"))


def test_a_lock_whose_owner_is_dead_holds_nobody_up(tmp_path):
    Path(f"{tmp_path}/out.preprocess_lock").write_text("process 1 on a machine of the past")
    source = write_lines(tmp_path / "in.jsonl", "some words")
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *BYTES]
    assert main(words) == 0
    assert not list(tmp_path.glob("*lock*"))
