"""What it takes to be answered by a process that does nothing else: what of `acquire_probe`'s figures is the machine's.

`python -m benchmarks.echo_probe`: each line on stdin is a number of seconds; answered by the 99th
percentile of that window, in seconds.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from benchmarks.acquire_probe import PAUSE_SECONDS, p99

MESSAGE = b"x" * 400  # about what an acquire of 16 objects is
MESSAGE_BYTES_MAX = 4096


def serve(connection: socket.socket) -> None:
    while message := connection.recv(MESSAGE_BYTES_MAX):
        connection.send(message)


def window(connection: socket.socket, seconds: float) -> float:
    took = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        connection.send(MESSAGE)
        connection.recv(MESSAGE_BYTES_MAX)
        took.append(time.perf_counter() - began)
        time.sleep(PAUSE_SECONDS)
    return p99(took)


def main() -> None:
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        serve(there)
        os._exit(0)
    there.close()
    for line in sys.stdin:
        print(window(here, float(line)), flush=True)


if __name__ == "__main__":
    main()
