"""Calls of a GPU's driver that torch does not offer, by ctypes. Each gives the GIL back once, however much it copies.

CUDA's driver and AMD's runtime have the same calls under other names. The calls return their error and keep none:
an error of CUDA's runtime, by contrast, is raised again by the next call of that thread whose result is read.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.copy.runs import address_of

if TYPE_CHECKING:
    from kvdepot.client.copy.runs import Runs

DESCRIPTORS_MAX: Final = 8192
"""Of one batch call: a driver has crashed with 51,828 of them, and others fault above this."""
STREAM_ORDER, ANY_ORDER = 1, 3
"""When the source of a batch call may be read: when the stream gets there, or as soon as the call is made."""

_BATCH_SINCE: Final = 12_080  # the version of CUDA whose batch call this is
_NON_BLOCKING: Final = 1
_RELAXED: Final = 2


class DriverError(RuntimeError):
    """A call of the driver failed: its name and number."""


@dataclass(frozen=True, slots=True)
class _Names:
    stream: str
    destroy_stream: str
    capture_mode: str
    register: str
    unregister: str
    to_device: str
    to_host: str
    address: str = ""  # how to find the batch call


CUDA: Final = _Names(
    "cuStreamCreateWithPriority", "cuStreamDestroy_v2", "cuThreadExchangeStreamCaptureMode",
    "cuMemHostRegister_v2", "cuMemHostUnregister", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2",
    "cuGetProcAddress_v2",
)  # fmt: skip
HIP: Final = _Names(
    "hipStreamCreateWithPriority", "hipStreamDestroy", "hipThreadExchangeStreamCaptureMode",
    "hipHostRegister", "hipHostUnregister", "hipMemcpyHtoDAsync", "hipMemcpyDtoHAsync",
)  # fmt: skip


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


_size, _pointer = ctypes.c_size_t, ctypes.c_void_p
_BatchCall = ctypes.CFUNCTYPE(
    ctypes.c_int, _pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer, _pointer
)
_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "stream": (_pointer, ctypes.c_uint, ctypes.c_int),
    "destroy_stream": (_pointer,),
    "capture_mode": (_pointer,),
    "register": (_pointer, _size, ctypes.c_uint),
    "unregister": (_pointer,),
    "to_device": (_pointer, _pointer, _size, _pointer),
    "to_host": (_pointer, _pointer, _size, _pointer),
}


class Driver:
    """A driver's library. Every call is for the device that the calling thread has set."""

    def __init__(self, library: Any, names: _Names = CUDA) -> None:
        """Raise AttributeError for a library that lacks one of the calls. The batch call may be missing."""
        self._names = names
        self._calls: dict[str, Any] = {}
        for key, arguments in _ARGUMENTS.items():
            call = getattr(library, getattr(names, key))
            call.argtypes, call.restype = arguments, ctypes.c_int
            self._calls[key] = call
        self._batch = _batch_call(library, names)

    @property
    def has_batches(self) -> bool:
        """Return whether many copies can be one call."""
        return self._batch is not None

    def stream(self) -> int:
        """Return a new stream of the lowest priority, which waits for no other. Raise DriverError."""
        made = _pointer()
        self._call("stream", ctypes.byref(made), _NON_BLOCKING, 0)
        return made.value or 0

    def destroy_stream(self, stream: int) -> None:
        """End a stream. What was queued on it is still done."""
        self._call("destroy_stream", stream)

    def relax_capture(self) -> None:
        """Let this thread pin, wait and allocate while another one captures a graph. Raise DriverError."""
        self._call("capture_mode", ctypes.byref(ctypes.c_int(_RELAXED)))

    def register(self, host: memoryview) -> bool:
        """Pin whole pages of host memory. Return False if the driver refuses."""
        return not self._calls["register"](address_of(host), len(host), 0)

    def unregister(self, host: memoryview) -> None:
        """Unpin what `register` was given. The caller has waited for every copy to or from it."""
        self._calls["unregister"](address_of(host))

    def copy(self, runs: Runs, stream: int, *, to_host: bool) -> None:
        """Queue one copy a run, for host memory of any kind. Raise DriverError if the driver refuses."""
        name = "to_host" if to_host else "to_device"
        for target, source, length in zip(
            runs.targets.tolist(), runs.sources.tolist(), runs.lengths.tolist(), strict=True
        ):
            self._call(name, target, source, length, stream)

    def copy_batch(self, runs: Runs, stream: int, order: int) -> None:
        """Queue the same by one call for `DESCRIPTORS_MAX` runs. All host memory is pinned. Raise DriverError."""
        assert self._batch is not None
        attributes, first, failed = _Attributes(order=order), _size(0), _size(0)
        for part in runs.split(DESCRIPTORS_MAX):
            error = self._batch(
                part.targets.ctypes.data, part.sources.ctypes.data, part.lengths.ctypes.data, len(part),
                ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed), stream,
            )  # fmt: skip
            if error:
                raise DriverError(f"cuMemcpyBatchAsync: error {error} at run {failed.value} of {len(part)}")

    def _call(self, key: str, *arguments: Any) -> None:
        error = self._calls[key](*arguments)
        if error:
            raise DriverError(f"{getattr(self._names, key)}: error {error}")


def _batch_call(library: Any, names: _Names) -> Any:
    """Return the call, or None if the driver is older than it."""
    find = getattr(library, names.address, None) if names.address else None
    if find is None:
        return None
    find.argtypes = (ctypes.c_char_p, _pointer, ctypes.c_int, ctypes.c_uint64, _pointer)
    find.restype = ctypes.c_int
    address, status = _pointer(), ctypes.c_int()
    error = find(b"cuMemcpyBatchAsync", ctypes.byref(address), _BATCH_SINCE, 0, ctypes.byref(status))
    return _BatchCall(address.value) if not error and address.value else None


def load_driver(*, hip: bool = False) -> Driver:
    """Return the driver that torch uses in this process. Raise OSError or AttributeError if there is none."""
    if not hip:
        return Driver(ctypes.CDLL("libcuda.so.1"), CUDA)
    try:
        return Driver(ctypes.CDLL("libamdhip64.so"), HIP)
    except OSError:  # the name without a version comes with the development files only
        return Driver(ctypes.CDLL("libamdhip64.so.7"), HIP)
