import sys
from types import SimpleNamespace

import pytest

from mcore.log import get_logger
from mcore.training.hardware import (
    HardwareMeter,
    describe,
    find_nvml,
    gpu_use,
    process_memory,
    rates,
)

DEV = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets
    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0
  eth0: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0
"""
DISKS = """   7 0 loop0 1 0 77 0 1 0 77 0 0 0 0
   8 0 sda 1 0 {read} 0 1 0 {written} 0 0 0 0
   8 1 sda1 1 0 50 0 1 0 50 0 0 0 0
 259 0 nvme0n1 1 0 0 0 1 0 0 0 0 0 0
 259 1 nvme0n1p1 1 0 10 0 1 0 10 0 0 0 0
"""


def write(proc, busy, idle, received, sent, read, written):
    (proc / "net").mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    (proc / "net" / "dev").write_text(DEV.format(received=received, sent=sent))
    (proc / "diskstats").write_text(DISKS.format(read=read, written=written))
    (proc / "meminfo").write_text("MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB\n")


@pytest.fixture
def clock(monkeypatch):
    ticks = SimpleNamespace(now=100.0)
    monkeypatch.setattr("mcore.training.hardware.time.monotonic", lambda: ticks.now)
    return ticks


def test_use_since_the_last_look(tmp_path, clock):
    write(tmp_path, 100, 900, 1_000_000, 0, 0, 0)
    meter = HardwareMeter(str(tmp_path))
    clock.now += 2.0
    write(tmp_path, 130, 910, 5_000_000, 1_000_000, 2000, 6000)
    assert meter.look() == {
        "cpu-percent": 75.0,
        "network-in-mb-per-second": 2.0,
        "network-out-mb-per-second": 0.5,
        "disk-read-mb-per-second": 2000 * 512 / 2e6,
        "disk-write-mb-per-second": 6000 * 512 / 2e6,
        "memory-used-gib": 3.0,
        "memory-total-gib": 4.0,
    }


def test_a_machine_that_tells_nothing(tmp_path):
    assert HardwareMeter(str(tmp_path)).look() == {}


class NVMLError(Exception):
    pass


def test_gpus():
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(
            used=(handle + 1) * 2**30, total=80 * 2**30
        ),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 + handle),
    )
    values = gpu_use(nvml)
    assert values["gpu-1-percent"] == 91.0
    assert values["gpu-1-memory-used-gib"] == 2.0
    assert describe("node", values) == (
        "use of node: gpu 0 90 %, 1.0 of 80.0 GiB; gpu 1 91 %, 2.0 of 80.0 GiB"
    )
    assert gpu_use(None) == {}


def broken():
    raise RuntimeError("driver not loaded")


@pytest.mark.parametrize(
    ("module", "told"),
    [(None, "pip install 'mcore[gpu]'"), (SimpleNamespace(nvmlInit=broken), "driver not loaded")],
)
def test_a_missing_library_is_told_where_there_are_gpus(monkeypatch, caplog, module, told):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with caplog.at_level("INFO", get_logger().name):
        assert find_nvml() is None
        assert caplog.text == ""
        assert find_nvml(is_expected=True) is None
    assert told in caplog.text


def refuse(*_):
    raise NVMLError("not supported")


def test_what_a_driver_does_not_tell_is_left_out():
    """As on a GPU that is cut into instances, one of another user, and one that is gone."""

    def handle(index):
        return refuse() if index == 1 else index

    def memory(handle):
        return refuse() if handle == 2 else SimpleNamespace(used=2**30, total=2**31)

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUtilizationRates=lambda h: refuse() if h == 0 else SimpleNamespace(gpu=7),
    )
    values = gpu_use(nvml)
    assert values == {
        "gpu-0-memory-used-gib": 1.0,
        "gpu-0-memory-total-gib": 2.0,
        "gpu-2-percent": 7.0,
    }
    assert describe("node", values) == "use of node: gpu 0 1.0 of 2.0 GiB; gpu 2 7 %"
    assert gpu_use(SimpleNamespace(NVMLError=NVMLError, nvmlDeviceGetCount=refuse)) == {}


@pytest.mark.parametrize("name", ["stat", "net/dev", "diskstats", "meminfo"])
def test_files_of_another_form_tell_nothing(tmp_path, name):
    write(tmp_path, 100, 900, 0, 0, 0, 0)
    (tmp_path / name).write_text("one\ntwo\nthree: words\n")
    values = HardwareMeter(str(tmp_path)).look()
    assert ("memory-used-gib" in values) == (name != "meminfo")


def test_this_machine():
    values = HardwareMeter().look()
    assert 0 < values["memory-used-gib"] < values["memory-total-gib"]
    assert process_memory() > 2**20
    assert "memory" in describe("here", values)


def test_time_that_stands_still_divides_nothing_by_zero(tmp_path, clock):
    write(tmp_path, 100, 900, 0, 0, 0, 0)
    meter = HardwareMeter(str(tmp_path))
    same = meter._count()
    assert "cpu-percent" not in rates(same, same)
    assert clock.now == 100.0
