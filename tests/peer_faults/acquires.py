"""How long acquires from RAM take, as a process: `python -m tests.peer_faults.acquires SOCKET`.

It acquires and releases objects of its own, again and again. For each acquire it writes when it began and how long it
took, in seconds. It attaches again if the daemon is gone or does not answer.
"""

from __future__ import annotations

import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
from kvdepot.core.calls import AcquireOutcome

from tests.rigs.raw_client import RawEngine, keys_of

OBJECTS: Final = 8
TIMED: Final = struct.Struct("<2d")
_PAUSE_SECONDS: Final = 0.01
_AGAIN_SECONDS: Final = 0.1


class _Acquires:
    """Its leases stay while this process lives, so the last one is released by the next connection."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._runs = self._lease_id = 0

    def until_it_fails(self) -> None:
        self._runs += 1
        keys = keys_of(f"ram{self._runs}", OBJECTS)
        with RawEngine(self._socket, engine_id="acquires") as engine:
            if self._lease_id:
                engine.release(self._lease_id)
            engine.store(keys)
            while True:
                began = time.monotonic()
                self._lease_id = engine.new_lease_id()
                _, outcome, _ = engine.acquire(keys, lease_id=self._lease_id)
                seconds = time.monotonic() - began
                if outcome is not AcquireOutcome.GRANTED:
                    return
                sys.stdout.buffer.write(TIMED.pack(began, seconds))
                sys.stdout.buffer.flush()
                engine.release(self._lease_id)
                time.sleep(_PAUSE_SECONDS)


def main(socket: Path) -> None:
    acquires = _Acquires(socket)
    while True:
        with suppress(grpc.RpcError, OSError, AssertionError):
            acquires.until_it_fails()
        time.sleep(_AGAIN_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
