"""Each tokenizer against figures made elsewhere or worked out by hand."""

import base64
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers as backend
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from mcore.config.tokenizer import TokenizerConfig
from mcore.data.conversations import read_conversations
from mcore.errors import ConfigError, DataError
from mcore.tokenizers import build_tokenizer, encode_segments, encode_texts, start_ids
from mcore.tokenizers.base import EncodesToArrays
from mcore.tokenizers.fast_bpe import KNOWN_PATTERNS
from tests.unit.tokenizers.difficult_texts import DIFFICULT_TEXTS

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"
SP_MODEL = str(GOLDEN / "sp.model")


def random_texts():
    """Characters of every kind, and cuts of words in a mix that no real text has."""
    generator = np.random.default_rng(3)
    texts = []
    for low, high in [(0, 0x80), (0, 0x3000), (0xE000, 0x20000), (0, 0x110000)] * 20:
        points = generator.integers(low, high, 60)
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
    bits = [
        "'s",
        "'LL",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "ab",
        "Q",
        "7",
        "42",
        "'",
        "\u00e9",
        "!?",
        "x",
    ]
    texts += ["".join(generator.choice(bits, 40)) for _ in range(60)]
    return texts


RANDOM = random_texts()


def corpus():
    lines = (GOLDEN / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def golden_documents(name, eod):
    """The golden token file, cut into documents behind every end-of-document id."""
    tokens = np.fromfile(GOLDEN / f"{name}_text_document.bin", "<u2")
    ends = np.flatnonzero(tokens == eod) + 1
    return [part.tolist() for part in np.split(tokens, ends)[:-1]]


def gpt2_bpe():
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(GOLDEN / "vocab.json"),
            merge_file=str(GOLDEN / "merges.txt"),
        )
    )


def from_model(kind, path, **options):
    return build_tokenizer(
        TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path), **options)
    )


def write_ranks(path, *merges):
    tokens = [bytes([i]) for i in range(256)] + [m.encode() for m in merges]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
        for i, t in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return path


def write_huggingface(folder, special=("<|endoftext|>",), post=None, pattern=None, **config):
    """A byte-level tokenizer.json with the golden merges behind some special tokens."""
    model = models.BPE.from_file(str(GOLDEN / "vocab.json"), str(GOLDEN / "merges.txt"))
    tokenizer = backend.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == KNOWN_PATTERNS[-1]:
        tokenizer.normalizer = normalizers.NFC()  # as Qwen 2 has it
    if pattern is not None:
        cut = pre_tokenizers.Split(backend.Regex(pattern), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(8)  # a leftover of training that must not cut documents
    if post:
        bos = tokenizer.token_to_id(post)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{post} $A", special_tokens=[(post, bos)]
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class TestGPT2BPE:
    def test_corpus_equals_megatron(self):
        tokenizer = gpt2_bpe()
        ids = [[*tokenizer.tokenize(text), 0] for text in corpus() if text]
        assert ids == golden_documents("bpe", eod=0)
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (2048, 0, -1)

    def test_end_mark_in_text_is_ordinary_text(self):
        tokenizer = gpt2_bpe()
        assert tokenizer.eod not in tokenizer.tokenize("one<|endoftext|>two")
        assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"

    def test_half_a_character_is_replaced(self):
        tokenizer = gpt2_bpe()
        assert tokenizer.detokenize(tokenizer.tokenize("é")[:1]) == "\ufffd"

    def test_half_a_surrogate_pair_is_read_as_the_mark_for_it(self):
        tokenizer = gpt2_bpe()
        broken, mended = (encode_texts(tokenizer, [f"a{x}b"]) for x in ("\ud800", "\ufffd"))
        assert broken.ids.tolist() == mended.ids.tolist()

    def test_missing_end_mark(self, tmp_path):
        vocab = json.loads((GOLDEN / "vocab.json").read_text())
        vocab["<|end|>"] = vocab.pop("<|endoftext|>")
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        tokenizer = build_tokenizer(
            TokenizerConfig(
                tokenizer_type="GPT2BPETokenizer",
                vocab_file=str(tmp_path / "vocab.json"),
                merge_file=str(GOLDEN / "merges.txt"),
            )
        )
        with pytest.raises(ConfigError, match="endoftext"):
            _ = tokenizer.eod

    @pytest.mark.parametrize("content", [None, "", "{", '{"a": "b"}', "[1, 2]"])
    def test_bad_vocabulary(self, tmp_path, content):
        path = tmp_path / "vocab.json"
        if content is not None:
            path.write_text(content)
        config = TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(path),
            merge_file=str(GOLDEN / "merges.txt"),
        )
        with pytest.raises(DataError, match=r"vocab\.json"):
            build_tokenizer(config)


class TestSentencePiece:
    def test_gpt_style_equals_megatron(self):
        tokenizer = from_model("GPTSentencePieceTokenizer", SP_MODEL)
        ids = [[*tokenizer.tokenize(text), 2] for text in corpus() if text]
        assert ids == golden_documents("sp", eod=2)
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (1500, 2, 3)

    def test_llama_style_starts_every_text(self):
        tokenizer = from_model("Llama2Tokenizer", SP_MODEL)
        text = corpus()[0]
        first = golden_documents("sp", eod=2)[0][:-1]
        assert tokenizer.tokenize(text) == [1, *first]
        assert tokenizer.tokenize_batch([text, ""]) == [[1, *first], [1]]
        # This model's normaliser turns line ends into spaces, so only one line comes back exactly.
        line = text.splitlines()[0]
        assert tokenizer.detokenize(tokenizer.tokenize(line)) == line
        assert (tokenizer.vocab_size, tokenizer.eod) == (1500, 2)

    @pytest.mark.parametrize(
        "kind", ["GPTSentencePieceTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer"]
    )
    def test_arrays_are_the_lists(self, kind):
        tokenizer = from_model(kind, SP_MODEL)
        texts = [*corpus(), *DIFFICULT_TEXTS.values(), "", "a <MASK>b<CLS>", "<EOD>"]
        assert isinstance(tokenizer, EncodesToArrays)
        encoded = encode_texts(tokenizer, texts)
        rows = [tokenizer.tokenize(text) for text in texts]
        assert encoded.lengths.tolist() == [len(row) for row in rows]
        assert encoded.ids.dtype == np.int32
        assert encoded.ids.tolist() == [token for row in rows for token in row]

    def test_added_tokens_follow_the_pieces(self):
        # The model has <pad>, <s>, </s> (3, 1, 2); <CLS> <SEP> <EOD> <MASK> and extras are added.
        tokenizer = from_model("SentencePieceTokenizer", SP_MODEL, vocab_extra_ids=2)
        plain = sentencepiece.SentencePieceProcessor(model_file=SP_MODEL)
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (1506, 1502, 3)
        text = "<CLS>steal<MASK><extra_id_1> boust</s>"
        expected = [1500, *plain.encode("steal"), 1503, 1505, *plain.encode(" boust"), 2]
        assert tokenizer.tokenize(text) == expected
        assert tokenizer.detokenize([1500, *plain.encode("steal"), 1502]) == " <CLS> steal <EOD> "

    def test_model_without_end_piece(self, tmp_path):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c d e f g"] * 20),
            model_prefix=str(tmp_path / "m"),
            vocab_size=20,
            eos_id=-1,
            bos_id=-1,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        model = tmp_path / "m.model"
        with pytest.raises(ConfigError, match="end-of-sentence"):
            _ = from_model("GPTSentencePieceTokenizer", model).eod
        with pytest.raises(ConfigError, match="beginning-of-sentence"):
            from_model("Llama2Tokenizer", model)
        added = from_model("SentencePieceTokenizer", model)
        size = sentencepiece.SentencePieceProcessor(model_file=str(model)).vocab_size()
        # <CLS> <SEP> <EOD> <MASK> <PAD> <BOS> <EOS>
        assert (added.vocab_size, added.eod, added.pad) == (size + 7, size + 2, size + 4)

    def test_no_model(self, tmp_path):
        (tmp_path / "x.model").write_bytes(b"no model at all")
        for name in ("x.model", "absent.model"):
            with pytest.raises(DataError, match=name):
                from_model("GPTSentencePieceTokenizer", tmp_path / name)


class TestHuggingFace:
    def test_bare_file_with_one_usual_end_token(self, tmp_path):
        folder = write_huggingface(tmp_path / "hf")
        (folder / "tokenizer.json").rename(tmp_path / "mine.json")
        tokenizer = from_model("HuggingFaceTokenizer", tmp_path / "mine.json")
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (2048, 0, -1)
        assert tokenizer.tokenize_batch(corpus()[:50]) == gpt2_bpe().tokenize_batch(corpus()[:50])

    def test_special_tokens_in_text_are_recognised(self, tmp_path):
        tokenizer = from_model("HuggingFaceTokenizer", write_huggingface(tmp_path / "hf"))
        assert tokenizer.tokenize("<|endoftext|>") == [0]

    def test_end_and_padding_from_the_configuration(self, tmp_path):
        folder = write_huggingface(
            tmp_path / "hf",
            special=("<bos>", "<end>", "<fill>"),
            post="<bos>",
            eos_token={"content": "<end>", "lstrip": False},
            bos_token="<bos>",
            pad_token="<fill>",
        )
        tokenizer = from_model("HuggingFaceTokenizer", folder)
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (2051, 2049, 2050)
        assert tokenizer.tokenize("steal")[0] == 2048  # the file's own template puts it there

    @pytest.mark.parametrize("post", [None, "<bos>"])
    @pytest.mark.parametrize("pattern", [None, *KNOWN_PATTERNS], ids=["gpt2", "llama3", "qwen2"])
    def test_the_fast_core_gives_the_same_ids(self, tmp_path, pattern, post):
        special = ("<|endoftext|>", *([post] if post else []))
        folder = write_huggingface(tmp_path / "hf", special, post, pattern)
        tokenizer = from_model("HuggingFaceTokenizer", folder)
        texts = [*corpus()[:100], *DIFFICULT_TEXTS.values(), "a<|endoftext|>b", "<bos>", *RANDOM]
        encoded = encode_texts(tokenizer, texts)
        assert tokenizer._fast is not None
        rows = tokenizer.tokenize_batch(texts)
        assert encoded.lengths.tolist() == [len(row) for row in rows]
        assert encoded.ids.dtype == np.int32
        assert encoded.ids.tolist() == [token for row in rows for token in row]

    @pytest.mark.parametrize(
        ("part", "value", "reason"),
        [
            ("normalizer", {"type": "Lowercase"}, r"its text is changed first (Lowercase)"),
            ("pre_tokenizer", {"add_prefix_space": True}, "a blank before each text"),
            ("pre_tokenizer", {"use_regex": False}, "a rule of its own"),
            ("model", {"dropout": 0.1}, "its model has dropout 0.1"),
        ],
    )
    def test_where_it_could_differ_it_says_so_and_stays(
        self, tmp_path, caplog, part, value, reason
    ):
        folder = write_huggingface(tmp_path / "hf")
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        content[part] = {**(content[part] or {}), **value}
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        tokenizer = from_model("HuggingFaceTokenizer", folder)
        encode_texts(tokenizer, ["x"])
        assert tokenizer._fast is None
        assert "tokenizing the slower way, since" in caplog.text
        assert reason in caplog.text

    def test_other_kinds_are_not_talked_about(self, tmp_path, caplog):
        words = backend.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(tmp_path / "tokenizer.json"))
        tokenizer = from_model("HuggingFaceTokenizer", tmp_path)
        assert encode_texts(tokenizer, ["a b", "c"]).ids.tolist() == [0, 1, 2]
        assert caplog.text == ""

    def test_padding_shared_with_the_end_token_is_none(self, tmp_path):
        folder = write_huggingface(
            tmp_path / "hf", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
        )
        assert from_model("HuggingFaceTokenizer", folder).pad == -1

    @pytest.mark.parametrize(
        ("special", "config"),
        [
            (("</s>",), {}),  # <|endoftext|> is in the vocabulary too: which one?
            ((), {"eos_token": "<absent>"}),
        ],
    )
    def test_unknown_end_token(self, tmp_path, special, config):
        folder = write_huggingface(tmp_path / "hf", special=special, **config)
        tokenizer = from_model("HuggingFaceTokenizer", folder)
        with pytest.raises(ConfigError, match="end-of-document"):
            _ = tokenizer.eod

    def test_absent_or_damaged(self, tmp_path):
        with pytest.raises(DataError, match="nothing is downloaded"):
            from_model("HuggingFaceTokenizer", "gpt2")
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            from_model("HuggingFaceTokenizer", tmp_path)


class TestTikToken:
    def test_ids_worked_out_by_hand(self, tmp_path):
        ranks = write_ranks(tmp_path / "ranks.json", "ab", "abc", " a")
        tokenizer = from_model("TikTokenizer", ranks, tiktoken_num_special_tokens=10)
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (269, 2, -1)
        assert tokenizer.tokenize("abc a") == [10 + 257, 10 + 258]
        assert tokenizer.tokenize("</s>") == [10 + byte for byte in b"</s>"]
        assert tokenizer.detokenize([267, 2, 3]) == "abc</s><SPECIAL_3>"

    def test_patterns_cut_words_differently(self, tmp_path):
        ranks = write_ranks(tmp_path / "ranks.json", "aB", "12", "/\n")
        ids = {
            pattern: from_model(
                "TikTokenizer", ranks, tiktoken_pattern=pattern, tiktoken_num_special_tokens=3
            ).tokenize("aB12 -\n/\n")
            for pattern in ("v1", "v2")
        }
        a, b, one, two, space, dash, line, slash = (3 + byte for byte in b"aB12 -\n/")
        assert ids["v1"] == [3 + 256, one, two, space, dash, line, 3 + 258]
        assert ids["v2"] == [a, b, one, two, space, dash, line, 3 + 258]
        assert slash not in ids["v1"]

    def test_size_and_file(self, tmp_path):
        ranks = write_ranks(tmp_path / "ranks.json", "ab", "abc")
        cut = from_model("TikTokenizer", ranks, tiktoken_num_special_tokens=3, vocab_size=260)
        assert cut.tokenize("abc") == [3 + 256, 3 + ord("c")]
        with pytest.raises(ConfigError, match="259 to 261"):
            from_model("TikTokenizer", ranks, tiktoken_num_special_tokens=3, vocab_size=262)
        for content in ('[{"rank": 0}]', "[]", '{"a": 1}'):
            ranks.write_text(content)
            with pytest.raises(DataError, match=r"ranks\.json"):
                from_model("TikTokenizer", ranks)

    @pytest.mark.parametrize("pattern", ["v1", "v2"])
    def test_more_blanks_than_the_library_can_take(self, tmp_path, pattern):
        ranks = write_ranks(tmp_path / "ranks.json", "ab")
        tokenizer = from_model("TikTokenizer", ranks, tiktoken_pattern=pattern)
        assert len(tokenizer.tokenize(" " * 299_999 + "x")) == 300_000
        for encode in (tokenizer.tokenize, lambda text: encode_texts(tokenizer, [text])):
            with pytest.raises(DataError, match="300000 blanks in a row"):
                encode(" " * 1_000_000 + "x")


class TestPartsOfATextHaveNoStart:
    """What fine-tuning lays end to end: one BOS before all, none between."""

    @pytest.mark.parametrize("kind", ["hf", "llama2"])
    def test_segments(self, tmp_path, kind):
        if kind == "hf":
            folder = write_huggingface(tmp_path / "hf", ("<|endoftext|>", "<bos>"), "<bos>")
            tokenizer = from_model("HuggingFaceTokenizer", folder)
            bos, plain = 2048, gpt2_bpe()
        else:
            tokenizer = from_model("Llama2Tokenizer", SP_MODEL)
            bos, plain = 1, from_model("GPTSentencePieceTokenizer", SP_MODEL)
        texts = ["some text", "", "more"]
        assert tokenizer.tokenize_batch(texts) == [[bos, *plain.tokenize(t)] for t in texts]
        assert start_ids(tokenizer) == (bos,)
        assert encode_segments(tokenizer, texts).lengths.tolist() == [
            len(plain.tokenize(text)) for text in texts
        ]
        path = tmp_path / "chat.jsonl"
        path.write_text('{"prompt": "some text", "response": "more"}\n')
        data = read_conversations(
            [str(path)],
            partial(encode_segments, tokenizer),
            tokenizer.eod,
            start_ids=start_ids(tokenizer),
        )
        asked, said = plain.tokenize("some text"), plain.tokenize("more")
        assert data.ids.tolist() == [bos, *asked, *said, tokenizer.eod]
        assert data.trained.tolist() == [False] * (1 + len(asked)) + [True] * (len(said) + 1)

    def test_most_tokenizers_start_a_text_with_nothing(self):
        assert start_ids(gpt2_bpe()) == ()
        assert start_ids(from_model("GPTSentencePieceTokenizer", SP_MODEL)) == ()


class TestNull:
    def test_ids(self):
        tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (9, 8, -1)
        assert tokenizer.tokenize(" 0 8\n3\t") == [0, 8, 3]
        assert tokenizer.tokenize("") == []
        assert tokenizer.detokenize([0, 8, 3]) == "0 8 3"

    def test_chosen_special_ids(self):
        tokenizer = build_tokenizer(
            TokenizerConfig(
                tokenizer_type="NullTokenizer",
                vocab_size=1000,
                null_tokenizer_eod_id=0,
                null_tokenizer_pad_id=999,
            )
        )
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (1000, 0, 999)

    @pytest.mark.parametrize(("text", "named"), [("1 9", "9"), ("-1 2", "-1"), ("1 x", "'x'")])
    def test_no_id(self, text, named):
        tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
        with pytest.raises(DataError, match=named):
            tokenizer.tokenize(text)


def test_bytes():
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, -1)
    assert tokenizer.tokenize("\0é") == [0, 0xC3, 0xA9]
    assert tokenizer.detokenize([0xC3, 256, 65]) == "\ufffdA"


@pytest.mark.parametrize("text", DIFFICULT_TEXTS.values(), ids=DIFFICULT_TEXTS)
@pytest.mark.parametrize("kind", ["gpt2", "bytes", "huggingface", "tiktoken"])
def test_difficult_text_round_trips(kind, text, tmp_path):
    if kind == "gpt2":
        tokenizer = gpt2_bpe()
    elif kind == "bytes":
        tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    elif kind == "huggingface":
        tokenizer = from_model("HuggingFaceTokenizer", write_huggingface(tmp_path / "hf"))
    else:
        tokenizer = from_model("TikTokenizer", write_ranks(tmp_path / "ranks.json", "ab", "th"))
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.tokenize_batch([text, "x", text]) == [ids, tokenizer.tokenize("x"), ids]


@pytest.fixture(scope="module")
def byte_fallback_model(tmp_path_factory):
    """A model that changes no text: characters that it has no piece for become their bytes."""
    prefix = tmp_path_factory.mktemp("sp") / "m"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in corpus() for line in text.splitlines()]),
        model_prefix=str(prefix),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return f"{prefix}.model"


@pytest.mark.parametrize("text", DIFFICULT_TEXTS.values(), ids=DIFFICULT_TEXTS)
@pytest.mark.parametrize(
    "kind", ["GPTSentencePieceTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer"]
)
def test_difficult_text_round_trips_through_pieces(kind, text, byte_fallback_model):
    tokenizer = from_model(kind, byte_fallback_model)
    ids = tokenizer.tokenize(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    found = tokenizer.detokenize(ids)
    if kind == "SentencePieceTokenizer":  # special tokens are found in texts, and set off by blanks
        found, text = (re.sub(r" *(<[^<>]*>) *", r"\1", each) for each in (found, text))
    assert found == text


@pytest.fixture(scope="module")
def shared_gpt2_bpe():
    return gpt2_bpe()


@given(text=st.text())
def test_any_text_round_trips(shared_gpt2_bpe, text):
    tokenizer = shared_gpt2_bpe
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


class TestFactory:
    def test_type_is_needed(self):
        with pytest.raises(ConfigError, match="--tokenizer-type"):
            build_tokenizer(TokenizerConfig())

    def test_vocabulary_size_must_agree_with_the_files(self):
        assert from_model("GPTSentencePieceTokenizer", SP_MODEL, vocab_size=1500).vocab_size == 1500
        with pytest.raises(ConfigError, match="1500 tokens"):
            from_model("GPTSentencePieceTokenizer", SP_MODEL, vocab_size=1501)

    def test_options_of_other_types_are_named(self, caplog):
        build_tokenizer(
            TokenizerConfig(
                tokenizer_type="ByteLevelTokenizer", vocab_file="v.json", null_tokenizer_eod_id=3
            )
        )
        assert "--vocab-file has no effect" in caplog.text
        assert "--null-tokenizer-eod-id has no effect" in caplog.text

    def test_a_null_tokenizer_imports_no_library(self):
        script = (
            "import sys\n"
            "from mcore.config.tokenizer import TokenizerConfig\n"
            "from mcore.tokenizers import build_tokenizer\n"
            "build_tokenizer(TokenizerConfig(tokenizer_type='NullTokenizer', vocab_size=9))\n"
            "print({'tokenizers', 'sentencepiece', 'tiktoken', 'torch'} & sys.modules.keys())\n"
        )
        root = Path(__file__).parents[3]
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
        assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer_type": "GPT2"}, "GPT2BPETokenizer, SentencePieceTokenizer"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "needs --merge-file"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file, --merge-file"),
        ({"tokenizer_type": "Llama2Tokenizer"}, "needs --tokenizer-model"),
        ({"tokenizer_type": "NullTokenizer"}, "needs --vocab-size"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "whole number from 1 up"),
        ({"vocab_extra_ids": -1}, "whole number from 0 up"),
        ({"make_vocab_size_divisible_by": 0}, "whole number from 1 up"),
        ({"tiktoken_num_special_tokens": 2}, "at least 3"),
    ],
)
def test_configuration_is_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        TokenizerConfig(**options)


@pytest.mark.parametrize(("eod", "pad"), [(10, -1), (-1, -1), (None, 10), (None, -2), (3, 3)])
def test_null_ids_are_checked(eod, pad):
    with pytest.raises(ConfigError, match="null_tokenizer_"):
        TokenizerConfig(
            tokenizer_type="NullTokenizer",
            vocab_size=10,
            null_tokenizer_eod_id=eod,
            null_tokenizer_pad_id=pad,
        )


def test_null_padding_may_not_be_the_default_end_id():
    with pytest.raises(ConfigError, match="masked from the loss"):
        TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10, null_tokenizer_pad_id=9)
