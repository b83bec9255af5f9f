"""Kinds of input, faulty records, sentences, and the note beside the output."""

import io
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mcore.cli.main import main as mcore
from mcore.config.tokenizer import TokenizerConfig
from mcore.data import IndexedDataset
from mcore.data.corpus_meta import TokenizerIdentity, check_meta, read_meta
from mcore.errors import DataError
from mcore.tokenizers import build_tokenizer, encode_texts, fingerprint
from tests.unit.tokenizers.test_tokenizers import write_ranks
from tests.unit.tools.test_preprocess_data import (
    BPE,
    BYTES,
    GOLDEN,
    SP,
    environment,
    null,
    read_indexed,
    run,
    run_failing,
    write_lines,
)
from tools.preprocess_data import main
from tools.sentence_splitting import build_splitter, split_by_rule

TEXTS = ["one", "", "two\nlines \u00fc", "three"]


def bytes_of(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def plain(tmp_path):
    """(the lines as bytes, the output for them)."""
    source = write_lines(tmp_path / "plain.jsonl", *TEXTS)
    run(tmp_path, source, *BYTES)
    return source.read_bytes(), bytes_of(tmp_path / "out_text_document")


def test_old_names_of_the_format_write_mmap_files_and_say_so(tmp_path, plain, capsys):
    data, wanted = plain
    source = tmp_path / "again.jsonl"
    source.write_bytes(data)
    run(tmp_path, source, *BYTES, "--dataset-impl", "lazy")
    assert bytes_of(tmp_path / "out_text_document") == wanted
    assert "--dataset-impl lazy has no effect" in capsys.readouterr().err


class TestKindsOfInput:
    def check(self, tmp_path, source, plain, *arguments):
        run(tmp_path, source, *BYTES, *arguments)
        assert bytes_of(tmp_path / "out_text_document") == plain[1]

    @pytest.mark.parametrize("packing", ["gzip", "bz2", "lzma"])
    def test_packed_lines_whatever_the_name(self, tmp_path, plain, packing):
        source = tmp_path / "in.data"
        source.write_bytes(__import__(packing).compress(plain[0]))
        self.check(tmp_path, source, plain)

    def test_zstandard(self, tmp_path, plain):
        zstandard = pytest.importorskip("zstandard")
        half = len(plain[0]) // 2
        frames = [zstandard.compress(plain[0][:half]), zstandard.compress(plain[0][half:])]
        source = tmp_path / "in.jsonl.zst"
        source.write_bytes(b"".join(frames))
        self.check(tmp_path, source, plain)

    def test_damaged_zstandard(self, tmp_path, capsys):
        zstandard = pytest.importorskip("zstandard")
        source = tmp_path / "in.jsonl.zst"
        source.write_bytes(zstandard.compress(b'{"text": "abc"}\n')[:9] + b"\0" * 20)
        assert f"{source}, from line 1 on: cannot be read" in run_failing(
            tmp_path, capsys, source, *BYTES
        )

    @pytest.mark.parametrize("skip", [[], ["--on-bad-line", "skip"]])
    @pytest.mark.parametrize("name", ["in.jsonl.zst", "in.txt.zst"])
    def test_zstandard_that_is_cut_short(self, tmp_path, capsys, plain, name, skip):
        """The library's own reader ends there without a word."""
        zstandard = pytest.importorskip("zstandard")
        source = tmp_path / name
        frame = zstandard.compress(plain[0])
        source.write_bytes(frame + frame[:-3])
        (tmp_path / "here").mkdir()
        error = run_failing(tmp_path / "here", capsys, source, *BYTES, *skip)
        assert f"{source}, from line" in error
        assert "cut short" in error

    def test_parquet(self, tmp_path, plain):
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        source = tmp_path / "in.parquet"
        parquet.write_table(pyarrow.table({"n": [1, 2, 3, 4], "text": TEXTS}), source)
        self.check(tmp_path, source, plain)

    @pytest.mark.parametrize(
        ("name", "content", "package"),
        [("in.jsonl.zst", b"\x28\xb5\x2f\xfd", "zstandard"), ("in.parquet", b"PAR1", "pyarrow")],
    )
    def test_packages_that_are_not_there(
        self, tmp_path, capsys, monkeypatch, name, content, package
    ):
        monkeypatch.setitem(sys.modules, package, None)
        source = tmp_path / name
        source.write_bytes(content)
        error = run_failing(tmp_path, capsys, source, *BYTES)
        assert f"{source} needs the Python package {package}" in error

    def test_a_text_file_is_a_document(self, tmp_path):
        source = tmp_path / "in.txt"
        source.write_text("a\nb\n")
        tokens, lengths, documents = run(tmp_path, source, *BYTES)
        assert (bytes(tokens.tolist()), lengths, documents) == (b"a\nb", [3], [0, 1])

    def test_lines_of_a_text_file(self, tmp_path):
        source = tmp_path / "in.txt"
        source.write_text("a\n\nbc\n")
        _, lengths, _ = run(tmp_path, source, *BYTES, "--txt-documents", "line")
        assert lengths == [1, 2]

    def test_standard_input(self, tmp_path, plain, monkeypatch):
        with open(tmp_path / "plain.jsonl", "rb") as file:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
            self.check(tmp_path, "-", plain)

    def test_standard_input_alone(self, tmp_path, capsys):
        arguments = ["--input", "-", "x.jsonl", "--output-prefix", str(tmp_path / "out")]
        assert main([*arguments, *BYTES]) == 1
        assert "cannot stand beside other inputs" in capsys.readouterr().err


class TestFaultyRecords:
    def test_they_are_named_counted_and_left_out(self, tmp_path, capsys):
        source = tmp_path / "in.jsonl"
        lines = ['{"text": "1 2"}', "{no", '{"x": 1}', '{"text": "9 100"}', "", '{"text": "3"}']
        source.write_text("\n".join(lines))
        tokens, _, documents = run(tmp_path, source, *null(100), "--on-bad-line", "skip")
        assert (tokens.tolist(), documents) == ([1, 2, 3], [0, 1, 2])
        out, error = capsys.readouterr()
        assert "records left out: 3" in out
        assert f"left out: {source}, line 2: no JSON" in error
        assert f"left out: {source}, line 3: there is no key 'text'" in error
        assert f"left out: {source}, line 4: token id 100 is outside" in error

    def test_a_text_that_the_library_cannot_read(self, tmp_path, capsys):
        ranks = write_ranks(tmp_path / "ranks.json", "ab")
        source = write_lines(tmp_path / "in.jsonl", "ab", " " * 1_000_000 + "x", "b")
        words = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(ranks)]
        words += ["--on-bad-line", "skip"]
        assert len(run(tmp_path, source, *words)[1]) == 2
        assert f"left out: {source}, line 2: a text with 300000 blanks" in capsys.readouterr().err

    def test_a_record_is_left_out_under_every_key(self, tmp_path):
        source = tmp_path / "in.jsonl"
        source.write_text('{"a": "1", "b": "x"}\n{"a": "2", "b": "3"}\n')
        arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *null(9)]
        assert main([*arguments, "--json-keys", "a", "b", "--on-bad-line", "skip"]) == 0
        assert read_indexed(tmp_path / "out_a_document")[0].tolist() == [2]
        assert read_indexed(tmp_path / "out_b_document")[0].tolist() == [3]


class TestSentences:
    @pytest.mark.parametrize("run", [" ", ".", "\n", "\t \n"])
    def test_long_runs_cost_their_length_only(self, run):
        """Tried at every place of the run, this would take minutes."""
        text = f"One.{run * 200_000}x two."
        assert "".join(split_by_rule(text, keep_newlines=True)) == text

    @pytest.mark.parametrize(
        ("text", "sentences"),
        [
            ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
            ("He said \u201cno.\u201d She left.", ["He said \u201cno.\u201d", "She left."]),
            ("Dr. Who met J. Smith, i.e. him. Yes.", ["Dr. Who met J. Smith, i.e. him.", "Yes."]),
            ("At 3.14 it was... nothing. End", ["At 3.14 it was... nothing.", "End"]),
            ("A title\n\nA text", ["A title", "A text"]),
            ("\u4f60\u597d\u3002\u518d\u89c1\uff01", ["\u4f60\u597d\u3002", "\u518d\u89c1\uff01"]),
            ("  \n ", []),
        ],
    )
    def test_the_rule(self, text, sentences):
        assert split_by_rule(text) == sentences

    def test_with_its_gaps_a_text_is_whole(self):
        text = "One.  Two!\n\nThree? \n"
        assert "".join(split_by_rule(text, keep_newlines=True)) == text

    def test_sentences_are_sequences(self, tmp_path):
        source = write_lines(tmp_path / "in.jsonl", "A b. C.", "D")
        arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *BYTES]
        assert main([*arguments, "--split-sentences", "--append-eod"]) == 0
        _, lengths, documents = read_indexed(tmp_path / "out_text_sentence")
        assert (lengths, documents) == ([4, 3, 2], [0, 2, 3])
        assert read_meta(str(tmp_path / "out_text_sentence")).sentence_splitter is not None

    @pytest.fixture
    def punkt(self, tmp_path, monkeypatch):
        """A package in the place of NLTK, whose model of German ends a sentence after each `|`."""
        folder = tmp_path / "packages" / "nltk" / "tokenize"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").write_text(
            "import re\n"
            "class PunktTokenizer:\n"
            "    def __init__(self, language):\n"
            "        if language != 'german':\n"
            "            raise LookupError(language)\n"
            "    def span_tokenize(self, text):\n"
            "        return (m.span() for m in re.finditer(r'\\S[^|]*\\|', text))\n"
            "    def tokenize(self, text):\n"
            "        return [text[start:end] for start, end in self.span_tokenize(text)]\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        for name in ("nltk", "nltk.tokenize"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        yield
        for name in ("nltk", "nltk.tokenize"):
            sys.modules.pop(name, None)

    @pytest.mark.usefixtures("punkt")
    @pytest.mark.parametrize("workers", [1, 2])
    def test_punkt_where_it_is_installed(self, tmp_path, capsys, workers):
        source = write_lines(tmp_path / "in.jsonl", "A. b| C|", " \n", "D|")
        words = ["--input", str(source), "--split-sentences", "--lang", "german", *BYTES]
        words += ["--workers", str(workers)]
        for name, gaps, lengths in (("a", [], [5, 2, 2]), ("b", ["--keep-newlines"], [6, 2, 2])):
            prefix = str(tmp_path / name)
            assert main([*words, "--output-prefix", prefix, *gaps]) == 0
            assert read_indexed(f"{prefix}_text_sentence")[1:] == (lengths, [0, 2, 2, 3])
            assert read_meta(f"{prefix}_text_sentence").sentence_splitter == "punkt german"
        assert "sentences: 3, split by punkt german" in capsys.readouterr().out

    @pytest.mark.usefixtures("punkt")
    def test_a_language_without_a_model(self):
        assert build_splitter("klingon", keep_newlines=False)[1] == "rule"


class TestFastByteLevelBPE:
    CONFIG = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(GOLDEN / "vocab.json"),
        merge_file=str(GOLDEN / "merges.txt"),
    )

    def test_random_characters(self):
        generator = np.random.default_rng(1)
        tokenizer = build_tokenizer(self.CONFIG)
        ranges = [(0, 0x80), (0, 0x3000), (0xE000, 0x20000), (0, 0x110000)]
        texts = []
        for low, high in ranges * 40:
            points = generator.integers(low, high, 60)
            texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
        texts += [" " * 300_000, "a" * 100_000, "\n" * 60_000 + "x"]
        ids, lengths = encode_texts(tokenizer, texts)
        expected = tokenizer.tokenize_batch(texts)
        assert tokenizer._fast is not None
        assert lengths.tolist() == [len(row) for row in expected]
        assert ids.tolist() == [token for row in expected for token in row]

    @pytest.mark.parametrize("fault", ["unreachable", "twice"])
    def test_a_vocabulary_that_does_not_fit_goes_the_slow_way(self, tmp_path, fault):
        vocab = json.loads((GOLDEN / "vocab.json").read_text(encoding="utf-8"))
        merges = (GOLDEN / "merges.txt").read_text(encoding="utf-8").splitlines()
        first, second = next(m.split(" ") for m in merges if not m.startswith("#"))
        if fault == "unreachable":  # first and second merge before second and q
            vocab[second + "q"] = len(vocab)
            vocab[first + second + "q"] = len(vocab)
            merges += [f"{second} q", f"{first} {second}q"]
        else:
            merges.append(f"{first} {second}")
        (tmp_path / "v.json").write_text(json.dumps(vocab), encoding="utf-8")
        (tmp_path / "m.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
        tokenizer = build_tokenizer(
            TokenizerConfig(
                tokenizer_type="GPT2BPETokenizer",
                vocab_file=str(tmp_path / "v.json"),
                merge_file=str(tmp_path / "m.txt"),
            )
        )
        text = "queue " + first + second + "q"
        assert encode_texts(tokenizer, [text]).ids.tolist() == tokenizer.tokenize(text)
        assert tokenizer._fast is None


class TestMeta:
    def identity(self, config):
        tokenizer = build_tokenizer(config)
        return TokenizerIdentity(
            config.tokenizer_type,
            tokenizer.vocab_size,
            tokenizer.eod,
            lambda: fingerprint(tokenizer),
        )

    def test_the_tokenizer_that_made_it(self, tmp_path):
        source = write_lines(tmp_path / "in.jsonl", "some text")
        tokens, _, _ = run(tmp_path, source, *BPE, "--append-eod")
        prefix = str(tmp_path / "out_text_document")
        meta = read_meta(prefix)
        assert (meta.documents, meta.tokens, meta.eod_tokens) == (1, len(tokens), 1)
        check_meta(prefix, len(tokens), self.identity(TestFastByteLevelBPE.CONFIG))
        other = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=2048)
        with pytest.raises(DataError, match="end-of-document id 0, this run 2047"):
            check_meta(prefix, len(tokens), self.identity(other))
        with pytest.raises(DataError, match="made with another tokenizer"):
            check_meta(
                prefix,
                len(tokens),
                self.identity(TokenizerConfig(tokenizer_type="ByteLevelTokenizer")),
            )
        with pytest.raises(DataError, match="another version of the corpus"):
            check_meta(prefix, len(tokens) + 1, self.identity(TestFastByteLevelBPE.CONFIG))

    def test_numbers_of_a_null_tokenizer(self, tmp_path, caplog):
        """With the same end-of-document id only the sizes can tell that they are not text's ids."""
        source = write_lines(tmp_path / "in.jsonl", "1 2 3")
        prefix = str(tmp_path / "out_text_document")
        for size in (1000, 2048):
            null = ["--tokenizer-type", "NullTokenizer", "--null-tokenizer-eod-id", "0"]
            null += ["--vocab-size", str(size)]
            tokens, _, _ = run(tmp_path, source, *null, "--append-eod")
            if size == 1000:
                with pytest.raises(DataError, match="1000 of its Null.*GPT2BPETokenizer 2048"):
                    check_meta(prefix, len(tokens), self.identity(TestFastByteLevelBPE.CONFIG))
                assert not caplog.text
        check_meta(prefix, len(tokens), self.identity(TestFastByteLevelBPE.CONFIG))
        assert "a NullTokenizer of 2048 ids; the GPT2BPETokenizer has 2048 too" in caplog.text
        larger = TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=3000, null_tokenizer_eod_id=0
        )
        caplog.clear()
        check_meta(prefix, len(tokens), self.identity(larger))
        assert not caplog.text

    def test_foreign_files_have_none(self, tmp_path):
        check_meta(str(tmp_path / "foreign"), 5, self.identity(TestFastByteLevelBPE.CONFIG))


class TestScale:
    def peak(self, tmp_path, documents, tokenizer=BYTES, new_words=False):
        """Largest resident memory of a run over documents of one word, in bytes."""
        source = tmp_path / f"{documents}.jsonl"
        with open(source, "w") as file:
            for number in range(documents):
                word = f"w{number * 7919:o}x" if new_words else "word"
                file.write(f'{{"text": "{word}"}}\n')
        script = (
            "import sys\n"
            "from tools.preprocess_data import main\n"
            "assert main(sys.argv[1:]) == 0\n"
            "with open('/proc/self/status') as file:\n"  # ru_maxrss begins with the parent's
            "    print(next(line.split()[1] for line in file if line.startswith('VmHWM')))\n"
        )
        words = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), *tokenizer]
        words += ["--workers", "1", "--log-interval", "0"]
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment(),
            check=True,
        )
        return int(done.stdout.split()[-1]) * 1024

    def test_memory_does_not_grow_with_documents(self, tmp_path):
        growth = self.peak(tmp_path, 300_000) - self.peak(tmp_path, 30_000)
        assert growth < 4 << 20  # one number each in a list of Python's would take 10 MB

    @pytest.mark.full
    def test_a_million_documents(self, tmp_path):
        assert self.peak(tmp_path, 1_000_000) < 0.5e9

    @pytest.mark.full
    @pytest.mark.parametrize("tokenizer", [BPE, SP], ids=["bpe", "sp"])
    def test_nor_with_words_never_seen_before(self, tmp_path, tokenizer):
        """A tokenizer's cache is bounded."""
        sizes = [self.peak(tmp_path, n, tokenizer, new_words=True) for n in (20_000, 120_000)]
        assert sizes[1] - sizes[0] < 100_000 * 100
        assert sizes[1] < 1.5e9

    @pytest.mark.full
    def test_a_merge_beyond_4_gigabytes(self, tmp_path):
        """Two sparse files of 1.2e9 tokens each, with marks at their ends."""
        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 4)
        lengths = [600_000_000, 599_999_997, 3]
        pointers = [0, 1_200_000_000, 2_399_999_994]
        for name in ("a", "b"):
            body = struct.pack("<3i3q4q", *lengths, *pointers, 0, 1, 2, 3)
            (tmp_path / f"{name}.idx").write_bytes(header + body)
            with open(tmp_path / f"{name}.bin", "wb") as file:
                file.truncate(2_400_000_000)
                file.seek(2_399_999_994)
                file.write(np.array([7, 8, ord(name)], "<u2").tobytes())
        prefixes = [str(tmp_path / name) for name in ("a", "b")]
        assert mcore(["data", "merge", *prefixes, "--output-prefix", str(tmp_path / "m")]) == 0
        merged = IndexedDataset(str(tmp_path / "m"))
        assert merged[2].tolist() == [7, 8, ord("a")]
        assert merged[5].tolist() == [7, 8, ord("b")]
        assert int(merged.sequence_pointers[5]) == 4_799_999_994
