"""Commands that run under torchrun, as users start them."""

import json

import pytest

from mcore.cli.main import main
from mcore.convert import hf_to_state, save_model_state
from tests.cli.test_pretrain_gpt import ROOT, torchrun, worker_output

pytestmark = pytest.mark.cli


@pytest.mark.full
def test_selftest(tmp_path):
    done, errors = torchrun(tmp_path, 2, "-m", "mcore", "selftest", "--device", "cpu", "--json")
    assert done.returncode == 0, errors
    results = json.loads(worker_output(tmp_path))
    assert results["faults"] == []
    assert {row["result"] for name in ("collectives", "layouts") for row in results[name]} == {
        "pass"
    }
    assert [row["result"] for row in results["checkpoint"]] == ["pass", "pass"]


@pytest.mark.full
def test_generate_over_four_ranks(tmp_path, capsys):
    options, tensors = hf_to_state(ROOT / "tests" / "golden" / "train" / "gpt2" / "hf_initial")
    save_model_state(tmp_path / "checkpoint", options, tensors, {})
    words = ["generate", "--load", str(tmp_path / "checkpoint"), "--max-new-tokens", "6"]
    words += ["--prompt", "5 17 900", "--prompt", "8", "--json", "--seed", "3", "--device", "cpu"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    assert main(words) == 0
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    done, errors = torchrun(tmp_path, 4, "-m", "mcore", *words, *sizes)
    assert done.returncode == 0, errors
    assert json.loads(worker_output(tmp_path)) == json.loads(capsys.readouterr().out)
