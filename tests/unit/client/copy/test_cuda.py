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

from tests.fakes.cuda_model import Cuda
from tests.fakes.driver_library import DriverLibrary


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
    assert model.used == [(what, stream) for what in ("work", "memory", "numbers to cuda:1", "kernel")]
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
