"""Two network namespaces that are joined by the kernel alone, as fast as it can: for benchmarks. They need root.

`tests.rigs.network` has delays and faults, and costs a process that copies each packet.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Final, Self

MTU: Final = 9000
_INTERFACE: Final = "cable0"
_RATE: Final = "10gbit"
_DELAY: Final = "0.5ms"


class CableError(Exception):
    """There are no namespaces here."""


class Cable:
    """Nodes 0 and 1 with a pair of interfaces. `close` ends it, and so does the caller's end."""

    def __init__(self) -> None:
        """Raise CableError."""
        missing = [name for name in ("ip", "nsenter", "tc", "unshare") if shutil.which(name) is None]
        if missing:
            raise CableError(f"there is no {', '.join(missing)}")
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(2):  # cat(1) ends when its input does
                holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._holders.append(holder)
                assert holder.stdin is not None
                assert holder.stdout is not None
                holder.stdin.write(b".")
                holder.stdin.flush()
                if not holder.stdout.read(1):
                    raise CableError("unshare --net failed: it needs root")
            one, other = (str(holder.pid) for holder in self._holders)
            _run("ip", "link", "add", _INTERFACE, "netns", one, "type", "veth", "peer", _INTERFACE, "netns", other)
            self.shaping = ""
            for node in range(2):
                self._in(node, "ip", "address", "add", f"{self.address(node)}/24", "dev", _INTERFACE)
                self._in(node, "ip", "link", "set", _INTERFACE, "mtu", str(MTU), "up")
                self._in(node, "ip", "link", "set", "lo", "up")
                self.shaping = self._shaped(node)
        except BaseException:
            self.close()
            raise

    def _shaped(self, node: int) -> str:
        """Limit the rate of a node, with a delay where the kernel can. Return what it does."""
        queue = ("tc", "qdisc", "add", "dev", _INTERFACE, "root")
        try:
            self._in(node, *queue, "netem", "delay", _DELAY, "rate", _RATE, "limit", "100000")
        except CableError:
            self._in(node, *queue, "tbf", "rate", _RATE, "burst", "4mb", "latency", "50ms")
            return f"{_RATE}, no delay: this kernel has no netem"
        return f"{_RATE}, {_DELAY}"

    def _in(self, node: int, *command: str) -> None:
        _run("nsenter", f"--net={self.namespace(node)}", *command)

    def namespace(self, node: int) -> str:
        return f"/proc/{self._holders[node].pid}/ns/net"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def program(self, node: int) -> tuple[str, ...]:
        """Return what runs a daemon in a node, for `DaemonProcess`."""
        return ("tests.rigs.daemon_in_namespace", self.namespace(node), "-")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CableError(f"{' '.join(command)}: {done.stderr.strip()}")
