"""A bare TLS socket between two namespaces, as processes: what a stream of bytes can have at most.

`python -m benchmarks.tls_probe NAMESPACE ROLE ADDRESS CERT KEY CA BYTES CONNECTIONS`. The role `send` listens and says
`ready`. The role `receive` connects, then takes as many bytes over each connection as one has to send, and says how
many seconds all of them took together. Both roles say at last how much CPU time they took, in seconds. TLS 1.3 with
certificates on both sides, and the priority of processes that do I/O, as peers have it.
"""

from __future__ import annotations

import mmap
import os
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from tests.rigs.namespaces import enter

NICENESS: Final = 5
PORT: Final = 7449
PIECE_BYTES: Final = 1 << 20


def _context(protocol: int, cert: str, key: str, ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(ca)
    context.load_cert_chain(cert, key)
    return context


def send(address: str, context: ssl.SSLContext, length: int, connections: int) -> None:
    """Send so many bytes over each connection, once it has asked for them."""
    payload = memoryview(bytes(PIECE_BYTES))
    threads = []
    with socket.create_server((address, PORT)) as listener:
        print("ready", flush=True)
        for _ in range(connections):
            raw, _ = listener.accept()
            threads.append(threading.Thread(target=_send, args=(raw, context, payload, length)))
            threads[-1].start()
    began = time.process_time()
    for thread in threads:
        thread.join()
    print(time.process_time() - began, flush=True)


def _send(raw: socket.socket, context: ssl.SSLContext, payload: memoryview, length: int) -> None:
    with raw, context.wrap_socket(raw, server_side=True) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(1)
        for at in range(0, length, PIECE_BYTES):
            connection.sendall(payload[: min(PIECE_BYTES, length - at)])
        connection.recv(1)


def receive(address: str, context: ssl.SSLContext, length: int, connections: int) -> None:
    """Receive into memory that was touched before. Print the seconds from the first question to the last byte."""
    opened = [context.wrap_socket(socket.create_connection((address, PORT))) for _ in range(connections)]
    buffers = [mmap.mmap(-1, 4 * PIECE_BYTES) for _ in opened]
    for buffer in buffers:
        buffer.write(bytes(len(buffer)))
    threads = [
        threading.Thread(target=_receive, args=(one, memoryview(buffer), length))
        for one, buffer in zip(opened, buffers, strict=True)
    ]
    began, cpu_began = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.perf_counter() - began, time.process_time() - cpu_began, flush=True)


def _receive(connection: ssl.SSLSocket, buffer: memoryview, length: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"?")
    received = 0
    while received < length:
        at = received % len(buffer)
        count = connection.recv_into(buffer[at : at + PIECE_BYTES])
        if not count:
            raise SystemExit("the sender has ended")
        received += count
    connection.close()


def main(arguments: list[str]) -> None:
    namespace, role, address, cert, key, ca, length, connections = arguments
    enter(namespace)
    os.nice(NICENESS)
    if role == "send":
        send(address, _context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca), int(length), int(connections))
    else:
        receive(address, _context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca), int(length), int(connections))


if __name__ == "__main__":
    main(sys.argv[1:])
