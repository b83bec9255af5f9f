"""What only a GPU shows: `make test-gpu`. Everywhere else these tests are left out by their marker.

They have not run yet (`docs/verified.md`).
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore import device
from mcore.checkpoint import AsyncSaver, CheckpointReader, differences, save
from mcore.device import HostTransfer, host_copy
from mcore.training.hardware import find_nvml
from tests.equivalence.program import (
    largest_difference,
    largest_relative_difference,
    train,
    without_rates,
)
from tests.equivalence.tiny import command, write_corpus
from tests.unit.optimizer.test_offload import compared_steps, make_net, optimizer_of

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5


@pytest.fixture(scope="session", autouse=True)
def gpu(request):
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if request.config.getoption("markexpr") == "gpu":
        pytest.fail("these tests need a GPU, and torch sees none")
    pytest.skip("torch sees no GPU")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transfers_beside_a_busy_device(gpu, dtype):
    """Copies of what a long product is still making, while the host looks elsewhere."""
    transfer = HostTransfer(gpu)
    factor = torch.full((4096, 4096), 1.0 / 4096, device=gpu)
    places = [host_copy(torch.zeros(4096, 4096)) for _ in range(2)]
    back = [torch.zeros(4096, 4096, dtype=dtype, device=gpu) for _ in places]
    for turn in range(1, 4):
        sources = []
        for number in range(len(places)):
            x = torch.full((4096, 4096), float(turn + number), device=gpu)
            for _ in range(10):
                x = x @ factor
            sources.append(x.to(dtype))
        transfer.start_to_host(zip(sources, places, strict=True))
        transfer.wait_for_host()
        for number, place in enumerate(places):
            assert (place - (turn + number)).abs().max() < 0.1
            place.mul_(2.0)
        transfer.to_device(zip(places, back, strict=True))
        for number, result in enumerate(back):
            assert (result.float() - 2.0 * (turn + number)).abs().max() < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_offloaded_state_gives_the_same_numbers(gpu, dtype, fraction):
    """Host and device round alike but for the order of a few operations."""
    plain, moved = make_net(dtype).to(gpu), make_net(dtype).to(gpu)
    ours = optimizer_of(moved, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    theirs = optimizer_of(plain)
    assert any(item.is_offloaded for item in ours.params)
    for p, q in compared_steps(ours, theirs, moved, plain):
        rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (8e-3, 1e-4)
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)
    assert ours.step_count == theirs.step_count == 3


def test_offloaded_activations_change_no_bit(corpus):
    words = command(corpus, 4)
    plain = train(words, device="cuda")
    moved = train([*words, "--cpu-offloading-num-layers", "3"], device="cuda")
    assert without_rates(moved) == without_rates(plain)


def test_training_equals_the_cpu(corpus):
    words = command(corpus, 4)
    ours, theirs = train(words, device="cuda"), train(words)
    assert largest_difference(ours, theirs) <= TOLERANCE
    assert largest_relative_difference(ours, theirs) <= 10 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_sum_takes_a_product_without_rounding_it(gpu, dtype):
    left = torch.randn(1024, 512, device=gpu).to(dtype)
    right = torch.randn(512, 1024, device=gpu).to(dtype)
    try:
        torch.mm(left, right, out_dtype=torch.float32)
    except (RuntimeError, TypeError) as missing:
        pytest.skip(f"no product of this torch and GPU is wider than its factors: {missing}")
    total = torch.ones(1024, 1024, device=gpu)
    device.add_product_(total, left, right)  # the library may take memory of its own at first
    total.fill_(1.0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    device.add_product_(total, left, right)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < left.shape[0] * right.shape[1] * dtype.itemsize
    wanted = 1.0 + left.double() @ right.double()
    torch.testing.assert_close(total.double(), wanted, rtol=0, atol=1e-3)


def test_profile_memory_history_and_hardware(corpus, tmp_path, capsys):
    """Kernels in the trace, allocations in the history, and what NVML says of the GPU."""
    snapshot = tmp_path / "memory.pickle"
    watch = "--log-hardware --log-interval 1 --profile --use-pytorch-profiler"
    steps = "--profile-step-start 1 --profile-step-end 3 --record-memory-history"
    places = f"--tensorboard-dir {tmp_path} --memory-snapshot-path {snapshot}"
    train(command(corpus, 4, watch, steps, places), device="cuda")
    (trace,) = tmp_path.glob("*.pt.trace.json")
    assert trace.name == "rank0.iterations2-3.pt.trace.json"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    # Torch's own pickle of plain containers, written a moment ago.
    history = pickle.loads((tmp_path / "memory.rank0.pickle").read_bytes())
    assert sum(map(len, history["device_traces"])) > 0
    use = [line for line in capsys.readouterr().out.splitlines() if "use of " in line]
    if find_nvml() is None:
        pytest.skip("NVML is not there; the rest has passed")
    assert len(use) == 4
    assert all("gpu 0 " in line and " GiB" in line for line in use)


def test_overlap_on_streams_changes_no_bit(corpus, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = []
    for number, overlap in enumerate(
        ([], ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "1"])
    ):
        path = tmp_path / f"{number}.jsonl"
        words = command(corpus, 6, "--zero-stage 1 --clip-grad 0 --device cuda", *overlap)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [
                *launcher,
                *("--nproc-per-node", "2", str(ROOT / "pretrain_gpt.py"), *words),
                *("--metrics-jsonl", str(path)),
            ],
            check=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        found.append([json.loads(line)["lm_loss"] for line in path.read_text().splitlines()])
    assert found[0] == found[1]


def test_a_save_beside_training_is_that_of_its_moment(gpu, tmp_path):
    """The device is still at work on what is saved, and changes it right after the call."""
    factor = torch.full((2048, 2048), 1.0 / 2048, device=gpu)
    generator = torch.Generator(device=gpu).manual_seed(3)
    tensors = {
        "model.w": torch.randn(2048, 2048, device=gpu, generator=generator),
        "exp_avg.w": torch.randn(2048, 2048, device=gpu, generator=generator).bfloat16(),
    }
    saver, places = AsyncSaver(), []
    for iteration in (1, 2):
        for tensor in tensors.values():
            for _ in range(50):
                tensor.copy_(tensor.float() @ factor + 1.0)
        saver.save(tmp_path / "async", iteration, tensors, {})
        wanted = {name: tensor.cpu() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.add_(1)
        torch.cuda.synchronize()
        saver.wait()
        save(tmp_path / "sync", iteration, wanted, {})
        found = [CheckpointReader(tmp_path / name) for name in ("async", "sync")]
        assert list(differences(*found)) == []
        buffers = saver._staging._buffers.values()
        assert all(buffer.is_pinned() for buffer in buffers)
        places.append([buffer.data_ptr() for buffer in buffers])
    saver.close()
    assert places[0] == places[1]


@pytest.fixture
def alone_over_nccl(gpu, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=gpu)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone_over_nccl")
def test_a_resumed_run_is_the_straight_one(corpus, tmp_path):
    """Dropout, and saves beside training."""
    words = command(corpus, 12, "--hidden-dropout 0.1 --attention-dropout 0.1 --bf16")
    words += ["--save-interval", "3", "--async-save"]
    straight = train([*words, "--save", str(tmp_path / "a")], device="cuda")
    folder, records = str(tmp_path / "b"), tmp_path / "b.jsonl"
    words += ["--save", folder, "--load", folder]
    train([*words, "--exit-interval", "6"], device="cuda", records=records)
    resumed = train(words, device="cuda", records=records)
    assert without_rates(resumed) == without_rates(straight)
    assert list(differences(*(CheckpointReader(tmp_path / name) for name in "ab"))) == []
