"""Jobs of several launchers, and jobs that last."""

import os
import re
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from mcore.training.hardware import process_memory
from tests.cli.jobs import LIMIT_SECONDS, PROGRAM, ROOT, Job
from tests.equivalence.program import Layout, read_records, series, train, without_rates
from tests.equivalence.tiny import command, write_corpus

pytestmark = [pytest.mark.cli, pytest.mark.full]


def test_two_launchers_with_folders_and_data_of_their_own(tmp_path):
    """As on two machines: nothing is shared but the save root."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    layout = Layout(tp=2, dp=2)
    words = command("text", 6, f"--save {tmp_path}/save --save-interval 3 --eval-iters 1")
    agents = []
    for node in range(2):
        folder = tmp_path / str(node)
        folder.mkdir()
        write_corpus(folder / "text")
        launcher = (
            f"-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d "
            f"--rdzv-endpoint localhost:{port} --rdzv-id two"
        )
        files = ["--metrics-jsonl", "r.jsonl", "--device", "cpu"]
        with (folder / "output.txt").open("w") as output:
            agents.append(
                subprocess.Popen(
                    [sys.executable, *launcher.split(), PROGRAM, *words, *layout.flags, *files],
                    cwd=folder,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [agent.wait(LIMIT_SECONDS) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    outputs = [(tmp_path / str(node) / "output.txt").read_text() for node in range(2)]
    assert codes == [0, 0], outputs
    assert [(tmp_path / str(node) / "r.jsonl").exists() for node in range(2)].count(True) == 1
    (records,) = tmp_path.glob("*/r.jsonl")
    corpus = write_corpus(tmp_path / "text")
    plain = train(command(corpus, 6, "--eval-iters 1"), layout)
    assert without_rates(read_records(records)) == without_rates(plain)
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "6"


@pytest.mark.skipif(process_memory() is None, reason="the kernel does not tell")
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_does_not_grow_over_three_thousand_iterations(tmp_path, workers):
    """Between iterations 500 and 3,000, with a log line each and evaluations: under 20 MB."""
    corpus = write_corpus(tmp_path / "text")
    more = f"--num-workers {workers} --log-interval 1 --eval-interval 100 --eval-iters 2"
    job = Job(tmp_path, command(corpus, 3050, more, "--log-straggler --log-hardware"), 0).start()
    sizes = {}
    for iteration in (500, 1000, 2000, 3000):
        job.wait_until(lambda seen=iteration: job.iteration >= seen, 20 * LIMIT_SECONDS, tick=0.5)
        pages = Path(f"/proc/{job.process.pid}/statm").read_text().split()[1]
        sizes[iteration] = int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6
    assert job.wait() == 0, job.output.read_text()
    assert sizes[3000] - sizes[500] < 20, sizes
    assert len(series(read_records(tmp_path / "r.jsonl"), "seconds")) == 3050


def logged(job):
    """(iteration, fields, time) of every line of an interval."""
    for line in job.output.read_text().splitlines():
        found = re.search(r"\[(\S+ \S+)\] iteration +(\d+)/ +20 \| (.*)", line)
        if found is not None:
            pairs = (part.split(": ", 1) for part in found[3].split(" | "))
            fields = {name: value.strip(" |") for name, value in pairs}
            yield int(found[2]), fields, datetime.fromisoformat(found[1])


@pytest.mark.parametrize("size", [0, 2])
def test_lines_of_any_interval_are_those_of_its_steps(tmp_path, size):
    """Twenty iterations, two of them passed over, told every 1, 5 and 7."""
    corpus = write_corpus(tmp_path / "text")
    larger = "--hidden-size 128 --seq-length 64 --iterations-to-skip 6 13"
    told = {}
    for interval in (1, 5, 7):
        folder = tmp_path / str(interval)
        folder.mkdir()
        words = command(corpus, 20, larger, f"--log-interval {interval}")
        job = Job(folder, words, size).start()
        assert job.wait() == 0, job.output.read_text()
        records, before, last_time = read_records(folder / "r.jsonl"), 0, None
        steps = 0
        for iteration, fields, when in logged(job):
            mine = [r for r in records if before < r["iteration"] <= iteration]
            losses = series(mine, "lm_loss")
            mean = sum(losses) / len(losses)
            assert float(fields["lm loss"]) == pytest.approx(mean, rel=1e-6)
            assert int(fields["number of skipped iterations"]) == len(mine) - len(losses)
            if last_time is not None and interval > 1:
                spent = float(fields["elapsed time per iteration (ms)"]) * len(losses) / 1000
                assert spent == pytest.approx((when - last_time).total_seconds(), rel=0.1, abs=0.02)
            before, last_time, steps = iteration, when, steps + len(losses)
        assert (before, steps) == (20, 18)
        told[interval] = without_rates(records)
    assert told[1] == told[5] == told[7]
