"""systemd's part of a service, spoken by a test: notifications, the descriptor store, what a restart passes on.

`python -m tests.fakes.supervisor DESCRIPTORS NAMES MODULE ARGUMENTS` is the start of a service: it runs MODULE with the
descriptors (separated by commas) from 3 on, as sd_listen_fds(3) says.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
from pathlib import Path

from tests.rigs.daemon_process import DaemonProcess

WAIT_SECONDS = 60.0
_DATAGRAM_BYTES = 4096
_DESCRIPTORS_MAX = 8


class Supervisor:
    """Binds `address`; what it was told is in `told`, in order, and what it keeps in `store`."""

    def __init__(self, address: Path) -> None:
        self.address = address
        self.told: list[str] = []
        self.store: list[tuple[str, int]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(os.fspath(address))

    def wait_for(self, text: str) -> None:
        """Until a datagram, one of those to come, says `text`."""
        until = time.monotonic() + WAIT_SECONDS
        while True:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            if text in self._receive().split("\n"):
                return

    def hear(self) -> None:
        """What was said until now."""
        self._socket.settimeout(0)
        while True:
            try:
                self._receive()
            except BlockingIOError:
                return

    def restart(self, daemon: DaemonProcess) -> None:
        """Start it with what is kept. The caller has ended the one before."""
        descriptors = tuple(descriptor for _, descriptor in self.store)
        names = ":".join(name for name, _ in self.store)
        daemon.under = ("tests.fakes.supervisor", ",".join(map(str, descriptors)), names)
        daemon.pass_fds = descriptors
        daemon.start()

    def close(self) -> None:
        self._socket.close()
        for _, descriptor in self.store:
            os.close(descriptor)

    def _receive(self) -> str:
        datagram, descriptors, _, _ = socket.recv_fds(self._socket, _DATAGRAM_BYTES, _DESCRIPTORS_MAX)
        said = datagram.decode()
        self.told.append(said)
        fields = dict(line.split("=", 1) for line in said.split("\n"))
        name = fields.get("FDNAME", "stored")
        if "FDSTOREREMOVE" in fields:
            for entry in [entry for entry in self.store if entry[0] == name]:
                os.close(entry[1])
                self.store.remove(entry)
        if "FDSTORE" in fields:
            self.store += [(name, descriptor) for descriptor in descriptors]
        return said


def _pass_on(descriptors: list[int], names: str) -> None:
    free = 3 + len(descriptors) + max(descriptors, default=0)
    parked = [os.dup2(descriptor, free + place, False) for place, descriptor in enumerate(descriptors)]
    for place, descriptor in enumerate(parked):
        os.dup2(descriptor, 3 + place)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(parked)), "LISTEN_FDNAMES": names}


if __name__ == "__main__":
    _pass_on([int(number) for number in sys.argv[1].split(",") if number], sys.argv[2])
    del sys.argv[:3]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
