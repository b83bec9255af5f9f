"""The order of copies beside the device's work, told by a machine that has only a CPU.

Tensors on `meta` stand for the GPU's. A copy to the host that is not waited for is in flight until
the stream is: reading or writing its target before that gives garbage on a GPU, and fails here.
"""

import operator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore import device
from mcore.device import HostTransfer
from mcore.errors import ConfigError

GPU = torch.device("meta")
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Machine(TorchDispatchMode):
    """Notes copies, and which host tensors are still being written."""

    def __init__(self, stream):
        super().__init__()
        self._stream = stream
        self.copies = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        assert not self._stream.in_flight & {id(x) for x in tensors}, f"{func}: still under way"
        if func not in COPIES:
            return func(*args, **kwargs)
        if func is COPIES[0]:
            target, source = args[:2]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source = args[0]
            waits = not kwargs.get("non_blocking", False)
            target = torch.empty(
                source.shape,
                dtype=kwargs.get("dtype") or source.dtype,
                device=kwargs.get("device") or source.device,
            )
        crosses = source.device != target.device
        if crosses:
            assert source.dtype == target.dtype, "the host converts, and has to wait for it"
            assert not waits, "the host waits for the copy"
            assert self._stream.is_open, "on the device's own stream"
            if target.device.type == "cpu":
                self._stream.in_flight.add(id(target))
        self.copies.append((source.device.type, target.device.type, source.dtype, target.dtype))
        return target


class Stream:
    """A side stream that notes what is asked of it."""

    def __init__(self):
        self.in_flight, self.is_open, self.log = set(), False, []

    @contextmanager
    def work(self):
        self.log.append("after the device")
        self.is_open = True
        yield
        self.is_open = False

    def join(self):
        self.log.append("join")

    def synchronize(self):
        self.in_flight.clear()
        self.log.append("synchronize")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_the_host_and_back(dtype):
    stream = Stream()
    transfer = HostTransfer(GPU, stream)
    grads = [torch.empty(3, dtype=dtype, device="meta") for _ in range(2)]
    places = [torch.zeros(3) for _ in grads]
    params = [torch.empty(3, dtype=dtype, device="meta") for _ in grads]
    with Machine(stream) as machine:
        transfer.start_to_host(zip(grads, places, strict=True))
        assert stream.in_flight == {id(place) for place in places}
        transfer.wait_for_host()
        for place in places:
            place.add_(1.0)  # what the host does with it
        transfer.to_device(zip(places, params, strict=True))
    assert stream.log == ["after the device", "synchronize", "after the device", "join"]
    narrowed = [] if dtype == torch.float32 else [("meta", "meta", dtype, torch.float32)]
    there = [*narrowed, ("meta", "cpu", torch.float32, torch.float32)] * 2
    back = [
        ("cpu", "meta", torch.float32, torch.float32),
        ("meta", "meta", torch.float32, dtype),
    ] * 2
    assert machine.copies == there + back


def test_what_is_computed_for_a_copy_is_computed_beside_the_device():
    stream = Stream()
    transfer = HostTransfer(GPU, stream)
    seen = []

    def pairs():
        for _ in range(2):
            seen.append(stream.is_open)
            yield torch.empty(3, device="meta") * 2, torch.zeros(3)

    with Machine(stream):
        transfer.start_to_host(pairs())
    assert seen == [True, True]


def test_on_the_cpu_copies_are_made_at_once():
    transfer = HostTransfer(torch.device("cpu"))
    place, back = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    transfer.start_to_host([(torch.ones(2, dtype=torch.bfloat16), place)])
    transfer.wait_for_host()
    transfer.to_device([(place, back)])
    assert place.tolist() == back.tolist() == [1.0, 1.0]


def test_a_product_is_added_in_place_where_the_device_can(monkeypatch):
    calls = []
    monkeypatch.setattr(device, "_adds_wide_products", lambda *_: True)
    monkeypatch.setattr(torch, "addmm", lambda *args, **kwargs: calls.append((args, kwargs)))
    total, left, right = torch.ones(2, 3), torch.ones(2, 4).bfloat16(), torch.ones(4, 3).bfloat16()
    device.add_product_(total, left, right)
    ((args, kwargs),) = calls
    assert all(map(operator.is_, args, (total, left, right)))
    assert kwargs == {"out_dtype": torch.float32, "out": total}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_added_on_the_cpu(dtype):
    total = torch.ones(2, 3)
    device.add_product_(total, torch.ones(2, 4, dtype=dtype), torch.ones(4, 3, dtype=dtype))
    assert total.tolist() == [[5.0] * 3] * 2


@pytest.fixture
def gpus(monkeypatch):
    """Let torch see as many GPUs as are said; returns the one that was made current."""
    current = []

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    return see


@pytest.mark.parametrize(
    ("name", "count", "local_rank", "wanted", "backend"),
    [
        ("auto", 0, 3, "cpu", "gloo"),
        ("cpu", 0, 0, "cpu", "gloo"),
        ("auto", 2, 1, "cuda:1", "nccl"),
        ("cuda", 2, 0, "cuda:0", "nccl"),
        ("cpu", 2, 1, "cpu", "gloo"),
        ("cpu", 2, 5, "cpu", "gloo"),
    ],
)
def test_the_device_and_its_backend(gpus, name, count, local_rank, wanted, backend):
    current = gpus(count)
    picked = device.pick_device(name, local_rank)
    assert picked == torch.device(wanted)
    assert current == ([local_rank] if backend == "nccl" else [])
    assert device.backend_name(picked) == backend


@pytest.mark.parametrize(
    ("name", "count", "local_rank", "message"),
    [
        ("cuda", 0, 0, "sees no GPU; use --device cpu or auto"),
        ("auto", 2, 2, "local rank 2 has no GPU: this machine has 2"),
    ],
)
def test_a_device_that_is_not_there(gpus, name, count, local_rank, message):
    gpus(count)
    with pytest.raises(ConfigError, match=message):
        device.pick_device(name, local_rank)
