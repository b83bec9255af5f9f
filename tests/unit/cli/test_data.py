import argparse
import json

import numpy as np
import pytest

from mcore.cli import data
from mcore.errors import ConfigError, DataError
from tests.unit.data.corpora import GOLDEN
from tests.unit.data.test_gpt_dataset import CASES, MASK_OPTIONS, SPLITS, words

TOKENIZER = [
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"),
    *("--null-tokenizer-eod-id", "0", "--null-tokenizer-pad-id", "999"),
]
REACHABLE = [name for name, case in CASES.items() if case["add_extra_token_to_sequence"]]


def run(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    data.register(parser.add_subparsers(required=True))
    args = parser.parse_args(["data", "samples", *arguments])
    return args.run(args)


def arguments_of(case, out):
    flags = [
        "--seq-length",
        str(case["seq_length"]),
        "--seed",
        str(case["seed"]),
        "--out",
        str(out),
    ]
    flags += ["--samples", *("none" if n is None else str(n) for n in case["sizes"])]
    flags += ["--" + name.replace("_", "-") for name in MASK_OPTIONS if case[name]]
    if case["blend"] is not None:
        return [*flags, "--data-path", *words(case["blend"]), "--split", case["split"], *TOKENIZER]
    for name, blend in zip(SPLITS, case["blend_per_split"], strict=True):
        if blend is not None:
            flags += [f"--{name}-data-path", *words(blend)]
    return [*flags, *TOKENIZER]


@pytest.mark.parametrize("name", REACHABLE)
def test_golden_cases_through_the_command_line(name, tmp_path, capsys):
    out = tmp_path / "deep" / "samples.npz"
    assert run(*arguments_of(CASES[name], out)) == 0
    got, golden = np.load(out, allow_pickle=False), np.load(GOLDEN / f"{name}.npz")
    wanted = {key for key in golden.files if not key.endswith("attention_mask")}
    assert set(got.files) == wanted
    for key in wanted:
        assert got[key].dtype == golden[key].dtype
        np.testing.assert_array_equal(got[key][: len(golden[key])], golden[key])
    printed = capsys.readouterr().out
    for split, entry in CASES[name]["splits"].items():
        if entry is None:
            assert f"{split}: no data" in printed
        else:
            assert len(got[f"{split}.tokens"]) == entry["len"]
    assert [path.name for path in out.parent.iterdir()] == ["samples.npz"]


def test_the_file_gets_the_name_that_was_asked_for(tmp_path):
    arguments = arguments_of(CASES["short_docs"], tmp_path / "samples.out")
    run(*arguments, "--no-mmap-bin-files")
    assert "train.tokens" in np.load(tmp_path / "samples.out").files


def test_data_paths_in_a_file(tmp_path):
    case = CASES["per_split_blend"]
    content = {
        name: words(blend) for name, blend in zip(SPLITS, case["blend_per_split"], strict=True)
    }
    (tmp_path / "paths.json").write_text(json.dumps(content))
    run(
        *("--per-split-data-args-path", str(tmp_path / "paths.json"), *TOKENIZER),
        *("--seq-length", "24", "--seed", "11", "--samples", "150", "10", "none"),
        *("--out", str(tmp_path / "o.npz")),
    )
    golden = np.load(GOLDEN / "per_split_blend.npz")
    got = np.load(tmp_path / "o.npz")
    np.testing.assert_array_equal(got["train.tokens"], golden["train.tokens"])


def test_what_cannot_be_done_is_an_error(tmp_path, capsys):
    out = tmp_path / "o.npz"
    arguments = arguments_of(CASES["short_docs"], out)
    with pytest.raises(ConfigError, match="given twice"):
        run(*arguments, "--train-data-path", "x")
    with pytest.raises(DataError, match="seq-length is 0"):
        run(*arguments, "--seq-length", "0")
    with pytest.raises(SystemExit):
        run(*arguments, "--samples", "1", "-2", "x")
    with pytest.raises(SystemExit):
        run(*arguments, "--num-workers", "3")  # this command has no workers
    with pytest.raises(DataError, match="no data"):
        run(*TOKENIZER, "--seq-length", "8", "--samples", "1", "0", "0", "--out", str(out))
    assert not out.exists()
    capsys.readouterr()
