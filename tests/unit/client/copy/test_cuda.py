"""A GPU's streams and contexts, on a model of the part of CUDA that says whose device is whose. No GPU is needed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from kvdepot.client.copy import cuda
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.cuda import CudaDevice
from kvdepot.client.copy.driver import ANY_ORDER, HIP, STREAM_ORDER, Driver
from kvdepot.client.copy.runs import Runs

from tests.fakes.driver_library import DriverLibrary


class Cuda:
    """Since CUDA 12 setting a device makes its context; a thread that has set none is on device 0.

    At the end of `with stream:` torch puts the former device back, which is device 0 on such a thread. Work goes on the
    thread's current stream, which is the device's own outside of such a block.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts = {1}  # the engine's thread of rank 1 has made its own
        self.streams: list[Stream] = []
        self.used: list[tuple[str, Stream | None]] = []  # what was given to a device, and on which stream
        self._thread = threading.local()
        for name in ("set_device_index", "current_stream"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "ExternalStream", self.external_stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "Event", lambda _: Event())
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(CudaDevice, "numbers", self.numbers)

    @property
    def device(self) -> int:
        return getattr(self._thread, "device", 0)

    @property
    def stream(self) -> Stream | None:
        """Of the calling thread. None: the device's own, which is the engine's too."""
        return getattr(self._thread, "stream", None)

    @stream.setter
    def stream(self, stream: Stream | None) -> None:
        self._thread.stream = stream

    def use(self, what: str) -> None:
        self.used.append((what, self.stream))

    def empty(self, size_bytes: int, **_: Any) -> torch.Tensor:
        self.use("memory")
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def numbers(self, values: Any) -> torch.Tensor:
        self.use("numbers")
        return torch.from_numpy(values)

    def set_device_index(self, device: torch.device | int) -> None:
        self._thread.device = device.index if isinstance(device, torch.device) else device
        self.contexts.add(self._thread.device)

    def external_stream(self, handle: int, device: torch.device) -> Stream:
        self.streams.append(Stream(self, handle, device))
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> str:
        return f"the engine's stream of {device}"


class Stream:
    """A context in which torch's operations go to it."""

    def __init__(self, cuda: Cuda, handle: int, device: torch.device) -> None:
        self.cuda_stream = handle
        self.waited: list[Any] = []
        self.wait_event = self.waited.append
        self._cuda, self._device = cuda, device

    def __enter__(self) -> None:
        self._former, self._former_stream = self._cuda.device, self._cuda.stream
        self._cuda.stream = self
        if self._former != self._device.index:
            self._cuda.set_device_index(self._device)

    def __exit__(self, *_: object) -> None:
        self._cuda.stream = self._former_stream
        if self._former != self._device.index:
            self._cuda.set_device_index(self._former)


class Event:
    """torch.Event cannot be told to block."""

    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking

    def record(self, stream: Any) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.blocking, "a wait that spins takes a core of the engine's"


def on_a_thread(work: Any) -> None:
    """As the copying thread: one that has set no device."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def everything(device: CudaDevice, runs: Runs) -> None:
    """All that a copying thread does."""
    device.enter()
    device._move = lambda *_: None
    device.run_after("mark")
    for direction in Direction:
        device.run(direction, lambda: None)
        device.memory(direction, 64)
        device.transfer(direction, runs, pinned=True)
        device.shuffle(direction, runs)
        device.wait(device.mark(direction))
    device.leave()


@pytest.fixture
def runs() -> Runs:
    memory = np.zeros(16, dtype=np.uint8)
    address = np.array([memory.ctypes.data], dtype=np.int64)
    return Runs(address, address + 8, np.array([8], dtype=np.int64))


def test_copies_of_a_rank_make_no_context_on_another_gpu(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    model = Cuda(monkeypatch)
    device = CudaDevice(torch.device("cuda", 1), Driver(DriverLibrary()))
    on_a_thread(lambda: everything(device, runs))
    assert model.contexts == {1}


def test_each_direction_has_a_stream_of_its_own_and_both_wait_for_the_engine(
    monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    model, library = Cuda(monkeypatch), DriverLibrary()
    device = CudaDevice(torch.device("cuda", 1), Driver(library))
    mark = device.engine_mark()
    assert mark.stream == "the engine's stream of cuda:1"
    on_a_thread(lambda: everything(device, runs))
    first, second = model.streams
    assert first.cuda_stream != second.cuda_stream
    assert first.waited == second.waited == ["mark"]
    batches = [call for name, call in library.calls if name == "batch"]
    assert batches == [(1, STREAM_ORDER, first.cuda_stream), (1, ANY_ORDER, second.cuda_stream)]
    assert [name for name, _ in library.calls].count("destroy") == 2
    assert library.calls[0] == ("capture", 2)


@pytest.mark.requirement("G2", "I1")
@pytest.mark.parametrize("direction", Direction)
def test_all_that_a_direction_is_given_goes_on_its_stream(
    monkeypatch: pytest.MonkeyPatch, runs: Runs, direction: Direction
) -> None:
    """On another one a copy would run beside the step that writes its blocks, or be reported before its end."""
    model, library = Cuda(monkeypatch), DriverLibrary()
    device = CudaDevice(torch.device("cuda", 1), Driver(library))
    device.enter()
    device._move = lambda *_: model.use("kernel")
    device.run(direction, lambda: model.use("work"))
    device.memory(direction, 64)
    device.shuffle(direction, runs)
    stream = model.streams[[*Direction].index(direction)]
    assert model.used == [(what, stream) for what in ("work", "memory", "numbers", "kernel")]
    assert device.mark(direction).stream is stream
    device.transfer(direction, runs, pinned=True)
    device.transfer(direction, runs, pinned=False)
    (_, (_, _, batch_stream)), (_, single_stream) = library.calls[-2:]
    assert batch_stream == single_stream == stream.cuda_stream
    assert model.stream is None, "the thread is back on the stream that it had"


def test_what_is_not_pinned_is_copied_run_by_run(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    Cuda(monkeypatch)
    library = DriverLibrary()
    device = CudaDevice(torch.device("cuda", 1), Driver(library))
    device.enter()
    device.transfer(Direction.STORE, runs, pinned=False)
    device.transfer(Direction.LOAD, runs, pinned=False)
    assert [name for name, _ in library.calls[-2:]] == ["to_host", "to_device"]


@pytest.mark.parametrize(
    ("batches", "ways"), [(True, set(Way)), (False, {Way.GATHER, Way.TORCH})], ids=["12.8", "before"]
)
def test_what_a_device_has_says_its_driver(monkeypatch: pytest.MonkeyPatch, batches: bool, ways: set[Way]) -> None:
    Cuda(monkeypatch)
    device = CudaDevice(torch.device("cuda", 1), Driver(DriverLibrary(batches=batches)))
    assert device.ways == {Way.TORCH} | ways & {Way.BATCH}, "before it is entered nothing is known of Triton"
    device.enter()
    assert device.ways == ways


def test_rocm_copies_by_the_same_code_without_the_batch_call(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    """AMD's batch call faults above some thousand runs, so it is not looked for."""
    Cuda(monkeypatch)
    library = DriverLibrary().as_hip()
    asked: list[bool] = []

    def load(*, hip: bool) -> Driver:
        asked.append(hip)
        return Driver(library, HIP)

    monkeypatch.setattr(cuda, "load_driver", load)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    device = CudaDevice(torch.device("cuda", 1))
    on_a_thread(lambda: everything(device, runs))
    assert asked == [True]
    assert device.ways == {Way.GATHER, Way.TORCH}
    copies = [name for name, _ in library.calls if name in ("to_host", "to_device", "batch")]
    assert copies == ["to_host", "to_device"], "one by one, pinned as they are"
    assert library.calls[0] == ("capture", 2)
