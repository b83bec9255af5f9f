"""Generated tokens against Hugging Face's, sampling by hand, loading."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM

from mcore.cli import generate as command
from mcore.cli.generate import tokenizer_config
from mcore.cli.main import main
from mcore.convert import hf_to_state, save_model_state
from mcore.errors import CheckpointError, ConfigError, DataError
from mcore.generation import Sampling, generate, generate_batch, load_model
from mcore.generation.sampling import choose_token, kept_probabilities

GOLDEN = Path(__file__).parents[2] / "golden" / "train"
PROMPT = [5, 17, 900, 17, 3, 44]


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Converted golden models by family."""
    roots = {}
    for family in ("gpt2", "llama"):
        roots[family] = tmp_path_factory.mktemp(family)
        options, tensors = hf_to_state(GOLDEN / family / "hf_initial")
        save_model_state(roots[family], options, tensors, {})
    return roots


def greedy(model, prompts, **options):
    """New tokens of each prompt."""
    steps = generate_batch(model, prompts, sampling=Sampling(greedy=True), **options)
    return [list(filter(lambda t: t is not None, row)) for row in zip(*steps, strict=True)]


def test_greedy_is_that_of_hugging_face(roots):
    for family, root in roots.items():
        theirs = AutoModelForCausalLM.from_pretrained(GOLDEN / family / "hf_initial").eval()
        theirs.generation_config.eos_token_id = None
        prompt = torch.tensor([PROMPT])
        expected = theirs.generate(prompt, max_new_tokens=50, do_sample=False, pad_token_id=0)
        ours = greedy(load_model(root).model, [PROMPT], max_new_tokens=50)
        assert PROMPT + ours[0] == expected[0].tolist()


def test_a_text_ends_where_positions_do(roots):
    model = load_model(roots["gpt2"]).model
    length = model.max_sequence_length
    whole, short = greedy(model, [[7] * length, PROMPT], max_new_tokens=100)
    assert (len(whole), len(short)) == (1, length + 1 - len(PROMPT))
    assert [short] == greedy(model, [PROMPT], max_new_tokens=100)
    with pytest.raises(DataError, match=f"{length + 1} tokens, but the model has {length}"):
        greedy(model, [[7] * (length + 1)], max_new_tokens=1)


def test_seed_and_stop(roots):
    model = load_model(roots["gpt2"]).model
    first = list(generate(model, PROMPT, max_new_tokens=8, seed=1))
    assert first == list(generate(model, PROMPT, max_new_tokens=8, seed=1))
    assert first != list(generate(model, PROMPT, max_new_tokens=8, seed=2))
    assert len(first) == 8
    stop = first[3]
    cut = list(generate(model, PROMPT, max_new_tokens=8, seed=1, stop_id=stop))
    assert cut == first[: first.index(stop)]


@pytest.mark.parametrize(("prompt", "message"), [([], "no tokens"), ([1, 1000], "token 1000")])
def test_prompts_that_cannot_be_continued(roots, prompt, message):
    with pytest.raises(DataError, match=message):
        generate(load_model(roots["gpt2"]).model, prompt, max_new_tokens=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125]),
        ({"temperature": 0.5}, [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [1, 0, 0, 0]),
    ],
)
def test_probabilities_by_hand(options, expected):
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log() + 3
    if options == {"top_k": 3, "top_p": 0.5}:
        logits[3] -= 1  # no tie at the third place
    kept = kept_probabilities(logits, Sampling(**options))
    torch.testing.assert_close(kept / kept.sum(), torch.tensor(expected, dtype=torch.float32))


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([choose_token(logits, Sampling(), generator) for _ in range(4000)])
    found = torch.bincount(drawn, minlength=3) / 4000
    torch.testing.assert_close(found, logits.softmax(0), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_options_out_of_range(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Sampling(**options)


def test_a_checkpoint_that_is_not_what_it_says(tmp_path):
    options, tensors = hf_to_state(GOLDEN / "gpt2" / "hf_initial")
    tensors = dict(tensors)
    weight = tensors.pop("decoder.final_layernorm.weight")
    save_model_state(tmp_path / "a", options, tensors, {})
    with pytest.raises(CheckpointError, match=r"model\.decoder\.final_layernorm\.weight"):
        load_model(tmp_path / "a")
    tensors["decoder.final_layernorm.weight"] = weight[:3]
    save_model_state(tmp_path / "b", options, tensors, {})
    with pytest.raises(CheckpointError, match="has shape"):
        load_model(tmp_path / "b")


def test_the_command(roots, capsys):
    words = ["generate", "--load", str(roots["gpt2"]), "--prompt", "5 17 900", "--greedy"]
    words += ["--max-new-tokens", "5"]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    assert main([*words, *tokenizer]) == 0
    (ours,) = greedy(load_model(roots["gpt2"]).model, [[5, 17, 900]], max_new_tokens=5, stop_id=999)
    assert capsys.readouterr().out == " ".join(map(str, [5, 17, 900, *ours])) + "\n"
    assert main(words) == 2
    assert "names no tokenizer" in capsys.readouterr().err
    assert main([*words, *tokenizer, "--prompt", "9", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["new_tokens"] for row in rows] == greedy(
        load_model(roots["gpt2"]).model, [[5, 17, 900], [9]], max_new_tokens=5, stop_id=999
    )
    assert rows[0]["text"] == " ".join(map(str, [5, 17, 900, *ours]))
    assert main([*words[:3], *tokenizer]) == 2
    assert "nothing to continue" in capsys.readouterr().err
    assert main([*words, *tokenizer, "--temperature", "0"]) == 2
    assert main(["generate", "--load", str(roots["gpt2"] / "x"), "--prompt", "5"]) == 1


def test_a_prompt_that_cannot_be_continued_is_told_by_its_place(roots, tmp_path, capsys):
    file = tmp_path / "prompts"
    words = ["generate", "--load", str(roots["gpt2"]), "--tokenizer-type", "NullTokenizer"]
    words += ["--vocab-size", "1000"]
    assert main([*words, "--prompt", "5", "--prompt", ""]) == 2
    assert "prompt 2 has no tokens" in capsys.readouterr().err
    for line, problem in (("", "has no tokens"), ("7 " * 2000, "has 2000 tokens, but the model")):
        file.write_text(f"5\n6\n{line}\n8\n")
        assert main([*words, "--prompt", "9", "--prompts-file", str(file)]) == 2
        told = capsys.readouterr()
        assert f"prompt 4 (line 3 of {file}) {problem}" in told.err
        assert told.out == ""


def test_greedy_leaves_nothing_to_sampling(capsys):
    words = ["generate", "--load", "nowhere", "--prompt", "5", "--greedy"]
    assert main([*words, "--temperature", "0.5", "--top-p", "1"]) == 2
    message = capsys.readouterr().err
    assert all(flag in message for flag in ("--greedy", "--temperature, --top-p"))
    assert main([*words, "--top-k", "0"]) == 2
    assert "--top-k" in capsys.readouterr().err


def test_a_file_of_prompts_is_taken_a_batch_at_a_time(roots, tmp_path, capsys, monkeypatch):
    file, batches = tmp_path / "prompts", []

    def counted(model, prompts, **options):
        batches.append(len(prompts))
        return generate_batch(model, prompts, **options)

    monkeypatch.setattr(command, "generate_batch", counted)
    file.write_text("\n".join(f"{n}\x1c7" for n in range(1, 36)) + "\r\n")  # \x1c: a blank here
    words = ["generate", "--load", str(roots["gpt2"]), "--prompts-file", str(file), "--json"]
    words += ["--max-new-tokens", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["prompt_tokens"] for row in rows] == [[n, 7] for n in range(1, 36)]
    assert batches == [32, 3]
    together = greedy(
        load_model(roots["gpt2"]).model, [[n, 7] for n in range(1, 36)], max_new_tokens=1
    )
    assert main([*words, "--greedy"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["new_tokens"] for row in rows] == together
    file.write_bytes(b"5 \xff")
    assert main(words) == 2
    assert "is not text in UTF-8" in capsys.readouterr().err
    file.unlink()
    assert main(words) == 2
    assert "cannot read --prompts-file" in capsys.readouterr().err


def test_the_tokenizer_of_a_root_that_was_moved(tmp_path, capsys):
    options, tensors = hf_to_state(GOLDEN / "gpt2" / "hf_initial")
    old, new = tmp_path / "old", tmp_path / "new"
    options |= {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(old / "tokenizer"),
    }
    save_model_state(old, options, tensors, {})
    (old / "tokenizer").mkdir()
    words = {f"w{n}": n for n in range(1000)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(old / "tokenizer" / "tokenizer.json"))
    old.rename(new)
    assert main(["generate", "--load", str(new), "--prompt", "w5 w6", "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("w5 w6 w")


def test_tokenizer_flags_replace_what_is_stored():
    stored = {
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 100,
        "null_tokenizer_eod_id": 3,
        "hidden_size": 8,
    }
    assert tokenizer_config(stored, {}).null_tokenizer_eod_id == 3
    assert tokenizer_config(stored, {"null_tokenizer_eod_id": 4}).null_tokenizer_eod_id == 4
    other = tokenizer_config(stored, {"tokenizer_type": "ByteLevelTokenizer"})
    assert (other.tokenizer_type, other.vocab_size) == ("ByteLevelTokenizer", None)
