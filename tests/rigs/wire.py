"""A wire between network namespaces, as a process: `python -m tests.rigs.wire SOCKET_FD NODES MTU SEED`.

It carries the IP packets of the nodes' interfaces, with a delay and a rate, and with faults that come and go: packets
that are lost, bits that are flipped, and nodes that are cut off. It stands for `tc netem`, which kernels may lack, and
flips bits so that no checksum of TCP shows it. What it is told comes over the socket, and each message is answered.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

from tests.rigs.namespaces import new_interface, new_namespace

QUEUE_BYTES: Final = 4 << 20
"""Of each direction of each node. What comes when it is full is lost, as at a switch."""
_BURST: Final = 64
_TCP: Final = 6
_TRIES: Final = 64


def address_of(node: int) -> str:
    return f"10.77.0.{node + 1}"


@dataclass(slots=True)
class State:
    """What the wire does to all packets of a node, in both directions."""

    delay_seconds: float = 0.0
    bytes_per_second: float = 0.0
    """0: as fast as it can."""
    cut: bool = False
    loss: float = 0.0
    flips: float = 0.0
    """Parts of all packets."""


@dataclass(slots=True)
class _Line:
    """From the wire to a node: packets in the order of their sending, with the time of their arrival."""

    fd: int
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)
    queued_bytes: int = 0
    free_at: float = 0.0


class Wire:
    def __init__(self, nodes: int, mtu: int, rng: random.Random) -> None:
        """Make the namespaces. Raise OSError."""
        self.namespaces, self._lines = [], list[_Line]()
        for node in range(nodes):
            self.namespaces.append(new_namespace())
            self._lines.append(_Line(new_interface(address_of(node), mtu)))
        self.states = [State() for _ in range(nodes)]
        self.counts = Counter[str]()
        self._rng = rng

    @property
    def fds(self) -> list[int]:
        return [line.fd for line in self._lines]

    def take(self, source: int) -> None:
        """Take what a node has sent."""
        for _ in range(_BURST):
            try:
                packet = os.read(self._lines[source].fd, 1 << 16)
            except BlockingIOError:
                return
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            if 0 <= target < len(self._lines) and target != source:
                self._carry(source, target, packet)

    def _carry(self, source: int, target: int, packet: bytes) -> None:
        states, line, now = (self.states[source], self.states[target]), self._lines[target], time.monotonic()
        if any(one.cut for one in states):
            self.counts["cut"] += 1
            return
        if any(one.loss and self._rng.random() < one.loss for one in states):
            self.counts["lost"] += 1
            return
        if line.queued_bytes + len(packet) > QUEUE_BYTES:
            self.counts["full"] += 1
            return
        if any(one.flips and self._rng.random() < one.flips for one in states):
            changed = flipped(packet, self._rng)
            self.counts["flipped"] += changed != packet
            packet = changed
        rates = [one.bytes_per_second for one in states if one.bytes_per_second]
        line.free_at = max(line.free_at, now) + (len(packet) / min(rates) if rates else 0.0)
        line.packets.append((line.free_at + max(one.delay_seconds for one in states), packet))
        line.queued_bytes += len(packet)
        self.counts["carried"] += 1

    def bring(self) -> float | None:
        """Bring what is due. Return the seconds until the next packet is; None if there is none."""
        soonest: float | None = None
        for node, line in enumerate(self._lines):
            while line.packets:
                left = line.packets[0][0] - time.monotonic()
                if left > 0:
                    soonest = left if soonest is None else min(soonest, left)
                    break
                _, packet = line.packets.popleft()
                line.queued_bytes -= len(packet)
                if not self.states[node].cut:  # it was on its way when it happened
                    try:
                        os.write(line.fd, packet)
                    except OSError:
                        self.counts["full"] += 1
        return soonest

    def told(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what the other end says. Return the answer."""
        for node in message.get("nodes", ()):
            for name, value in message["state"].items():
                setattr(self.states[node], name, value)
        return dict(self.counts)


def flipped(packet: bytes, rng: random.Random) -> bytes:
    """Flip the same bit in two 16-bit words of a TCP segment's data, where it differs: the checksum stays right.

    A packet without such data is returned as it is.
    """
    start = (packet[0] & 15) * 4
    if packet[9] != _TCP:
        return packet
    start += (packet[start + 12] >> 4) * 4
    words = (len(packet) - start) // 2
    if words < 2:
        return packet
    changed = bytearray(packet)
    for _ in range(_TRIES):
        one, other = (start + 2 * at for at in rng.sample(range(words), 2))
        byte, bit = rng.randrange(2), 1 << rng.randrange(8)
        if (changed[one + byte] ^ changed[other + byte]) & bit:
            changed[one + byte] ^= bit
            changed[other + byte] ^= bit
            return bytes(changed)
    return packet


def main(arguments: list[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    stream = control.makefile("rw")

    def say(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    try:
        wire = Wire(int(arguments[1]), int(arguments[2]), random.Random(int(arguments[3])))
    except OSError as error:
        say({"error": str(error)})
        return
    say({"namespaces": [f"/proc/{os.getpid()}/fd/{fd}" for fd in wire.namespaces]})
    nodes = {fd: node for node, fd in enumerate(wire.fds)}
    seconds: float | None = None
    while True:
        readable, _, _ = select.select([control.fileno(), *nodes], [], [], seconds)
        for one in readable:
            if one in nodes:
                wire.take(nodes[one])
            elif line := stream.readline():
                say(wire.told(json.loads(line)))
            else:
                return
        seconds = wire.bring()


if __name__ == "__main__":
    main(sys.argv[1:])
