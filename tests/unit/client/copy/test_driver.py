"""Calls of a driver by their C interface: the arguments arrive, errors are raised by name, limits are kept."""

from __future__ import annotations

import mmap
import random

import numpy as np
import pytest
from kvdepot.client.copy import driver
from kvdepot.client.copy.driver import ANY_ORDER, HIP, STREAM_ORDER, Driver, DriverError
from kvdepot.client.copy.runs import Runs, address_of

from tests.fakes.driver_library import DriverLibrary


class Memory:
    """Source and target of some runs, at random places."""

    def __init__(self, count: int, seed: int = 0) -> None:
        chance = random.Random(seed)
        self.source = memoryview(bytearray(chance.randbytes(64 * count)))
        self.target = memoryview(bytearray(64 * count))
        places = chance.sample(range(count), count)
        self.lengths = [chance.randrange(1, 65) for _ in range(count)]
        self.at = [place * 64 for place in places]
        self.runs = Runs(
            np.arange(count, dtype=np.int64) * 64 + address_of(self.source),
            np.array(self.at, dtype=np.int64) + address_of(self.target),
            np.array(self.lengths, dtype=np.int64),
        )

    @property
    def expected(self) -> bytes:
        data = bytearray(len(self.target))
        for number, (at, length) in enumerate(zip(self.at, self.lengths, strict=True)):
            data[at : at + length] = self.source[64 * number : 64 * number + length]
        return bytes(data)


@pytest.mark.parametrize("order", [STREAM_ORDER, ANY_ORDER])
def test_a_batch_is_one_call_for_as_many_runs_as_a_driver_takes(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    monkeypatch.setattr(driver, "DESCRIPTORS_MAX", 100)
    library, memory = DriverLibrary(), Memory(250)
    Driver(library).copy_batch(memory.runs, 0x77, order)
    assert library.calls == [("batch", (count, order, 0x77)) for count in (100, 100, 50)]
    assert bytes(memory.target) == memory.expected


@pytest.mark.parametrize(
    ("runs", "calls"), [(8191, [8191]), (8192, [8192]), (8193, [8192, 1])], ids=["below", "as many", "one more"]
)
def test_a_driver_takes_8192_runs_a_call(runs: int, calls: list[int]) -> None:
    """One has crashed with 51,828, and others fault above this."""
    library, memory = DriverLibrary(), Memory(runs)
    Driver(library).copy_batch(memory.runs, 0x77, ANY_ORDER)
    assert library.calls == [("batch", (count, ANY_ORDER, 0x77)) for count in calls]
    assert bytes(memory.target) == memory.expected


@pytest.mark.parametrize(("to_host", "name"), [(True, "to_host"), (False, "to_device")])
def test_single_copies_say_which_side_is_the_host(to_host: bool, name: str) -> None:
    library, memory = DriverLibrary(), Memory(5)
    Driver(library).copy(memory.runs, 0x77, to_host=to_host)
    assert library.calls == [(name, 0x77)] * 5
    assert bytes(memory.target) == memory.expected


def test_a_driver_before_the_batch_call_has_none() -> None:
    assert Driver(DriverLibrary()).has_batches
    assert not Driver(DriverLibrary(batches=False)).has_batches


def test_a_stream_waits_for_no_other_one_and_has_the_lowest_priority() -> None:
    library = DriverLibrary()
    made = Driver(library)
    stream = made.stream()
    made.destroy_stream(stream)
    assert stream and library.calls == [("stream", (1, 0)), ("destroy", stream)]


def test_the_thread_captures_relaxed() -> None:
    library = DriverLibrary()
    Driver(library).relax_capture()
    assert library.calls == [("capture", 2)]


def test_what_the_driver_refuses_to_pin_is_said_and_is_no_error() -> None:
    library, host = DriverLibrary(), memoryview(mmap.mmap(-1, 8192))
    made = Driver(library)
    assert made.register(host) and library.registered == {address_of(host): 8192}
    assert library.calls == [("register", 0)], "pinned for the context of this thread alone"
    made.unregister(host)
    assert not library.registered
    library.fails["register"] = 2
    assert not made.register(host)


@pytest.mark.parametrize(
    ("name", "message"),
    [("batch", "cuMemcpyBatchAsync: error 700 at run 3 of 4"), ("to_host", "cuMemcpyDtoHAsync_v2: error 700")],
)
def test_errors_name_the_call_and_the_number(name: str, message: str) -> None:
    library, memory = DriverLibrary(), Memory(4)
    library.fails[name] = 700
    made = Driver(library)
    with pytest.raises(DriverError, match=message):
        made.copy_batch(memory.runs, 1, ANY_ORDER) if name == "batch" else made.copy(memory.runs, 1, to_host=True)


def test_amd_has_the_same_calls_under_other_names() -> None:
    memory, made = Memory(3), Driver(DriverLibrary().as_hip(), HIP)
    assert not made.has_batches
    made.copy(memory.runs, 0x77, to_host=False)
    assert bytes(memory.target) == memory.expected
