"""Every command in the pages could run as printed, and those that a CPU can run are run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mcore.cli.main import main
from mcore.errors import ConfigError
from mcore.training.arguments import build_parser
from tests.unit.docs.commands import (
    ROOT,
    Block,
    blocks,
    check_command,
    commands,
    launched_by,
    other_lines,
)
from tests.unit.docs.documented import daily, make, put_stand_ins, small_torchrun, spelled_out
from tools.preprocess_data import main as preprocess

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PROGRAMS = {"torchrun", "python", "mcore", "make", "bash", "sbatch", "srun", "kubectl", "nsys"}
BLOCKS = [block for page in PAGES for block in blocks(page)]
RUNNABLE = [block for block in BLOCKS if block.environment is not None]
SCRIPTS = {
    "gpt3_13b/train.sh": {"MASTER_ADDR": "first", "DATA": "corpus_text_document"},
    "gpt3_13b/train.slurm": {
        "DATA": "corpus_text_document",
        "SLURM_JOB_NODELIST": "machine-[1-8]",
        "SLURM_JOB_ID": "4711",
        "SLURM_NNODES": "8",
    },
    "llama3_8b/train.sh": {"DATA": "corpus_text_document", "TOKENIZER": "Meta-Llama-3-8B"},
    "labs/lab_b.sh": {},
    "labs/lab_c.sh": {},
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_commands_are_valid(block):
    for words in commands(block.text):
        check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_is_shown_where_nobody_checks_it(page):
    """Whole commands are in tagged fences; of options alone every name is a flag's."""
    parser = build_parser()
    for line in other_lines(page):
        words = line.split()
        assert not words or words[0] not in PROGRAMS, f"{page.name}: {line}"
        if words and re.match("--[a-z]", words[0]):
            flags = [word for word in words if word.startswith("--")]
            assert [flag for flag in flags if not parser.knows(flag)] == [], page.name


def test_sizes_are_reduced_and_nothing_else():
    words = "--nnodes 4 --nproc-per-node 8 --rdzv-backend c10d"
    reduced = small_torchrun([*words.split(), "pretrain_gpt.py", "...", "--lr", "1"])
    assert reduced[:6] == [
        "--standalone", "--nproc-per-node", "4", "--max-restarts", "0", "pretrain_gpt.py"
    ]  # fmt: skip
    assert {"--bf16", "--sequence-parallel", "data/corpus_text_document"} <= {*reduced}
    assert reduced[reduced.index("--hidden-size") + 1] == "32"
    assert reduced[reduced.index("--lr") + 1] == "3e-4"
    assert small_torchrun(["--nproc-per-node", "8", "-m", "mcore", "selftest"])[2] == "2"


def test_the_checker_sees_mistakes():
    assert len(BLOCKS) > 15
    assert len(RUNNABLE) >= 14
    good = next(b for b in BLOCKS if b.page.name == "launching.md").text
    (words,) = commands(good)
    check_command(words)
    for old, new in (
        ("--sequence-parallel", "--sequence-paralel"),
        ("1024", "1000"),
        ("--nproc-per-node", "--nproc-per-machine"),
    ):
        with pytest.raises((ConfigError, SystemExit)):
            check_command([new if word == old else word for word in words])
    for wrong in (["unknown-program"], ["make", "nothing"], ["bash", "examples/none.sh"]):
        with pytest.raises(AssertionError):
            check_command(wrong)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_start_what_could_run(tmp_path, name):
    out = {"OUT": str(tmp_path / "out")} if name.startswith("labs") else {}
    started = launched_by(ROOT / "examples" / name, tmp_path, **SCRIPTS[name], **out)
    assert len(started) == {"labs/lab_b.sh": 2, "labs/lab_c.sh": 3}.get(name, 1)
    for words in started:
        check_command(words)
    if name.endswith(".slurm"):
        assert "machine-1:24711" in started[0]
        assert started[0][started[0].index("--rdzv-id") + 1] == "4711"


def test_the_llama_example_starts_from_converted_weights_once(tmp_path):
    script, settings = ROOT / "examples/llama3_8b/train.sh", SCRIPTS["llama3_8b/train.sh"]
    save = tmp_path / "save"
    settings = {**settings, "START": "start", "SAVE": str(save)}
    (first,) = launched_by(script, tmp_path, **settings)
    assert first[first.index("--load") + 1] == "start"
    assert "--finetune" in first
    save.mkdir()
    (save / "latest_checkpointed_iteration.txt").write_text("5")
    (tmp_path / "calls").unlink()
    (later,) = launched_by(script, tmp_path, **settings)
    assert later[later.index("--load") + 1] == str(save)
    assert "--finetune" not in later


def test_the_launch_page_explains_the_words_of_the_script(tmp_path):
    (started,) = launched_by(
        ROOT / "examples/gpt3_13b/train.sh", tmp_path, **SCRIPTS["gpt3_13b/train.sh"]
    )
    page = ROOT / "docs" / "launching.md"
    (shown,) = commands(next(b for b in blocks(page)).text)
    assert [w for w in started if w.startswith("--")] == [w for w in shown if w.startswith("--")]
    table = page.read_text().split("| words |")[1].split("\n\n")[0]
    for word in shown:
        assert not word.startswith("--") or word in table, f"{word} is not explained"


def test_kubernetes_manifest(tmp_path):
    job = yaml.safe_load((ROOT / "examples/kubernetes/pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 7)
    pods = [replica["template"]["spec"]["containers"][0] for replica in replicas.values()]
    assert pods[0] == pods[1]
    settings = {item["name"]: item["value"] for item in pods[0]["env"]}
    assert int(settings["NNODES"]) == sum(r["replicas"] for r in replicas.values())
    command = pods[0]["command"]
    assert command[0] == "bash"
    settings["MASTER_ADDR"] = "gpt3-13b-master-0"
    (started,) = launched_by(ROOT / command[1], tmp_path, **settings)
    check_command(started)


@pytest.fixture(scope="session")
def documented(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documented")
    make(folder)
    return folder


@pytest.mark.parametrize("words", [*daily(PAGES)], ids=lambda words: " ".join(words)[:60])
def test_commands_that_start_no_other_run(documented, tmp_path, monkeypatch, words):
    """In a folder that has everything they name, each by itself."""
    shutil.copytree(documented, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    program, *rest = spelled_out(words)
    if rest[0] == "check":
        shutil.rmtree("checkpoints")  # which are of a smaller model
    if program == "python":
        assert preprocess(rest[1:]) == 0
    elif "--help" in rest:
        with pytest.raises(SystemExit, match="0"):
            main(rest)
    else:
        assert main(rest) == 0


@pytest.mark.full
@pytest.mark.cli
@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: block.name)
def test_commands_run(documented, tmp_path, block):
    """A whole block by bash, with programs in front that reduce its sizes."""
    assert isinstance(block, Block)
    assert block.environment is not None
    shutil.copytree(documented, tmp_path, dirs_exist_ok=True)
    for entry in ("mcore", "tools", "examples", "pretrain_gpt.py"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    put_stand_ins(tmp_path / "stand-ins")
    programs = f"{tmp_path / 'stand-ins'}:{Path(sys.executable).parent}"
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{programs}:{os.environ['PATH']}",
        **block.environment,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    # What a worker says comes before the launcher's account of it, which is long.
    said = done.stderr.partition("Sending process")[0]
    assert done.returncode == 0, done.stdout[-3000:] + said[-3000:]
