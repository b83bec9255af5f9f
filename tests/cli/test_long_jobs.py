"""Jobs of several launchers, and jobs that last."""

import os
import socket
import subprocess
import sys
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
def test_memory_does_not_grow_over_two_thousand_iterations(tmp_path, workers):
    """Between iterations 500 and 2,000, with a log line each and evaluations: under 20 MB."""
    corpus = write_corpus(tmp_path / "text")
    more = f"--num-workers {workers} --log-interval 1 --eval-interval 100 --eval-iters 2"
    job = Job(tmp_path, command(corpus, 2050, more, "--log-straggler --log-hardware"), 0).start()
    sizes = {}
    for iteration in (500, 1000, 1500, 2000):
        job.wait_until(lambda seen=iteration: job.iteration >= seen)
        pages = Path(f"/proc/{job.process.pid}/statm").read_text().split()[1]
        sizes[iteration] = int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6
    assert job.wait() == 0, job.output.read_text()
    assert sizes[2000] - sizes[500] < 20, sizes
    assert len(series(read_records(tmp_path / "r.jsonl"), "seconds")) == 2050
