"""Network namespaces that are joined by a wire with a delay, a rate and faults. They need root and /dev/net/tun."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from tests.rigs.namespaces import enter
from tests.rigs.patience import patient
from tests.rigs.wire import address_of

_T = TypeVar("_T")
ROOT: Final = Path(__file__).resolve().parents[2]
DELAY_SECONDS: Final = 0.0005
RATE_BYTES_PER_SECOND: Final = 1.25e9
"""10 Gbit/s: an upper bound, as the wire is a process that copies each packet."""
MTU: Final = 9000
_ANSWER_SECONDS: Final = 30.0


class NetworkError(Exception):
    """There are no namespaces here."""


class Network:
    """Nodes 0 to `nodes` - 1, each in a namespace of its own. `close` ends all of it, and so does the caller's end."""

    def __init__(
        self, nodes: int, *, delay_seconds: float = DELAY_SECONDS, rate: float = RATE_BYTES_PER_SECOND, mtu: int = MTU,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """`rate`: bytes a second, in each direction of each node. Raise NetworkError."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.rigs.wire", str(theirs.fileno()), str(nodes), str(mtu), str(seed)],
                cwd=ROOT, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._ours = ours
        ours.settimeout(patient(_ANSWER_SECONDS))
        self._stream = ours.makefile("rw")
        self.nodes = range(nodes)
        try:
            self.namespaces = self._answer()["namespaces"]
            self._usual = {"delay_seconds": delay_seconds, "bytes_per_second": rate}
            self.heal()
        except BaseException:
            self.close()
            raise

    def address(self, node: int) -> str:
        return address_of(node)

    def program(self, node: int, cpus: Iterable[int] = ()) -> tuple[str, ...]:
        """Return what runs a daemon in a node, for `DaemonProcess`. No `cpus`: on all."""
        return ("tests.rigs.daemon_in_namespace", self.namespaces[node], ",".join(map(str, cpus)) or "-")

    def in_node(self, node: int, make: Callable[[], _T]) -> _T:
        """Call `make` in a node, and return what it returns: a socket stays in the node where it was made."""
        with ThreadPoolExecutor(1, initializer=enter, initargs=(self.namespaces[node],)) as thread:
            return thread.submit(make).result()

    def fault(self, *nodes: int, **state: float) -> None:
        """Change what the wire does to packets of these nodes, in both directions (`tests.rigs.wire.State`)."""
        self._tell({"nodes": nodes, "state": state})

    def cut(self, *nodes: int) -> None:
        """Lose all packets of these nodes, silently: as a partition does."""
        self.fault(*nodes, cut=True)

    def heal(self, *nodes: int) -> None:
        """End all faults of these nodes, or of all."""
        self.fault(*(nodes or self.nodes), cut=False, loss=0.0, flips=0.0, **self._usual)

    def counts(self) -> dict[str, int]:
        """Return how many packets were `carried`, `lost`, `cut`, `flipped`, or too many for a queue (`full`)."""
        return self._tell({})

    def _tell(self, message: dict[str, Any]) -> dict[str, int]:
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._stream.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the wire has ended"}
        if "error" in answer:
            raise NetworkError(answer["error"])
        return answer

    def close(self) -> None:
        self._stream.close()
        self._ours.close()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def why_no_network() -> str:
    """Return why there can be no namespaces here; empty if there can."""
    try:
        Network(1).close()
    except NetworkError as error:
        return f"no network namespaces: {error} (they need root and /dev/net/tun)"
    return ""
