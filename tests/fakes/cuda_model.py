"""The part of CUDA that says whose device is whose, and on which stream work goes. No GPU is needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch


class Cuda:
    """Since CUDA 12 setting a device makes its context; a thread that has set none is on device 0.

    At the end of `with stream:` torch puts the former device back, which is device 0 on such a thread. Work goes on the
    thread's current stream, which is the device's own outside of such a block.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts = {1}  # the engine's thread of rank 1 has made its own
        self.streams: list[Stream] = []
        self.entered = 0  # streams
        self.used: list[tuple[str, Stream | None]] = []  # what was given to a device, and on which stream
        self._thread = threading.local()
        for name in ("set_device_index", "current_stream"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "ExternalStream", self.external_stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "Event", lambda _: Event())
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *place, **how: self.to_device(tensor, *place, **how))

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

    def to_device(self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking and hasattr(tensor, "pinned"), "this call waits for the queue"
        self.use(f"numbers to {device}")
        return tensor.clone()

    def set_device_index(self, device: torch.device | int) -> None:
        self._thread.device = device.index if isinstance(device, torch.device) else device
        self.contexts.add(self._thread.device)

    def external_stream(self, handle: int, device: torch.device) -> Stream:
        self.streams.append(Stream(self, handle, device))
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> str:
        return f"the engine's stream of {device}"


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    there: Any = tensor.clone()
    there.pinned = True
    copied: torch.Tensor = there
    return copied


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
        self._cuda.entered += 1
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
