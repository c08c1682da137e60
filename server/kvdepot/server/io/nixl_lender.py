"""The source's process that lends the arena over NIXL: it has the agent from which readers read (ADR 82).

Started by the daemon as `python -m kvdepot.server.io.nixl_lender DATA SOCKET_FD PARENT_PID`. DATA: of `pack_parts`,
mapped for reading alone, so that a reader that writes ends this process and changes nothing. It holds no key and no
certificate: NIXL over TCP lets every host that reaches its port read this process, and write to it.

It decides nothing. It says what its agent is, and serves while the daemon says that something is lent. A read that is
late finds other bytes, which the reader's checksum tells.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

from kvdepot.core.data_mapping import map_parts, unpack_parts
from kvdepot.server.io.lifeline import die_with, exit_code
from kvdepot.server.io.nixl_agent import POLL_SECONDS, LendingAgent, NixlError
from kvdepot.server.io.peer_wire import FROM_LENDER, TO_LENDER
from kvdepot.server.io.waiting import readable


def main(arguments: list[str]) -> int:
    data, socket_fd, parent = arguments[0], int(arguments[1]), int(arguments[2])
    die_with(parent)
    for ending in (signal.SIGINT, signal.SIGTERM):  # for the daemon, which ends this process itself
        signal.signal(ending, signal.SIG_IGN)
    daemon = socket.socket(fileno=socket_fd)
    try:
        agent = LendingAgent(map_parts(unpack_parts(data), writable=False))
    except NixlError as error:
        print(f"kvdepotd: nothing is lent over NIXL: {error}", file=sys.stderr)  # noqa: T201 - the daemon's log
        return 1
    daemon.sendall(FROM_LENDER.pack(agent.lender))
    return _serve(daemon, agent)


def _serve(daemon: socket.socket, agent: LendingAgent) -> int:
    """Serve until the daemon closes the socket."""
    received = bytearray()
    pause = threading.Event()
    serving = False
    while True:
        if not readable(daemon, 0 if serving else None):
            pause.wait(POLL_SECONDS)  # poll(2) waits for 1 ms at least, and every read of a peer with it
            agent.serve()
            continue
        if not (data := daemon.recv(1 << 10)):
            return 0
        received += data
        for _, message in TO_LENDER.take(received):
            serving = message.on


if __name__ == "__main__":
    code = exit_code(main)
    sys.stderr.flush()
    os._exit(code)  # UCX crashes in the interpreter's exit
