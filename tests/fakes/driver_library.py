"""A GPU driver's library of C functions over host memory: what is called with which arguments, and what is refused."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import astuple
from typing import Any

from kvdepot.client.copy.driver import CUDA, HIP

_Batch = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)


class DriverLibrary:
    """CUDA's names. `batches` None: a driver before 12.8, which does not know the batch call."""

    def __init__(self, *, batches: bool = True) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails: dict[str, int] = {}  # name -> error
        self.registered: dict[int, int] = {}
        self._batch = _Batch(self._copy_batch)
        self._batches = batches
        self.cuStreamCreateWithPriority = CFUNCTYPE(c_int, POINTER(c_void_p), c_uint, c_int)(self._stream)
        self.cuStreamDestroy_v2 = CFUNCTYPE(c_int, c_void_p)(lambda stream: self._called("destroy", stream))
        self.cuThreadExchangeStreamCaptureMode = CFUNCTYPE(c_int, POINTER(c_int))(
            lambda mode: self._called("capture", mode.contents.value)
        )
        self.cuMemHostRegister_v2 = CFUNCTYPE(c_int, c_void_p, c_size_t, c_uint)(self._register)
        self.cuMemHostUnregister = CFUNCTYPE(c_int, c_void_p)(self._unregister)
        copy = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)
        self.cuMemcpyHtoDAsync_v2 = copy(lambda *call: self._copy("to_device", *call))
        self.cuMemcpyDtoHAsync_v2 = copy(lambda *call: self._copy("to_host", *call))
        self.cuGetProcAddress_v2 = CFUNCTYPE(c_int, c_char_p, POINTER(c_void_p), c_int, c_uint64, c_void_p)(self._find)

    def as_hip(self) -> DriverLibrary:
        """Return this library with AMD's names too. The batch call has none there."""
        for cuda, hip in zip(astuple(CUDA), astuple(HIP), strict=True):
            if hip:
                setattr(self, hip, getattr(self, cuda))
        return self

    def _called(self, name: str, what: Any) -> int:
        self.calls.append((name, what))
        return self.fails.get(name, 0)

    def _stream(self, made: Any, flags: int, priority: int) -> int:
        made[0] = 0x1000 + len(self.calls)
        return self._called("stream", (flags, priority))

    def _register(self, address: int, size_bytes: int, flags: int) -> int:
        error = self._called("register", flags)
        if not error:
            self.registered[address] = size_bytes
        return error

    def _unregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def _copy(self, name: str, target: int, source: int, size_bytes: int, stream: int) -> int:
        error = self._called(name, stream)
        if not error:
            ctypes.memmove(target, source, size_bytes)
        return error

    def _find(self, name: bytes, found: Any, version: int, flags: int, status: int) -> int:
        if not self._batches:
            return 500
        assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12_080, 0) and status
        found[0] = ctypes.cast(self._batch, c_void_p).value
        return 0

    def _copy_batch(
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, firsts: int, number: int,
        failed: int, stream: int,
    ) -> int:  # fmt: skip
        """As CUDA's manual has it: `attributes` is an array of `number`, `firsts` where each begins to count."""
        words = ctypes.cast(attributes, POINTER(c_uint * 6)).contents
        assert number == 1 and ctypes.cast(firsts, POINTER(c_size_t)).contents.value == 0
        error = self._called("batch", (count, words[0], stream))
        if error:
            ctypes.cast(failed, POINTER(c_size_t)).contents.value = 3
            return error
        columns = [ctypes.cast(column, POINTER(c_size_t * count)).contents for column in (targets, sources, sizes)]
        for target, source, size in zip(*columns, strict=True):
            ctypes.memmove(target, source, size)
        return 0
