"""A source of the peer tier with a valid certificate that says what no real one says, or sends other bytes.

TLS hides from a proxy what is sent. So bytes are flipped before they are encrypted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

from kvdepot.core.objectfile import payload_sum
from kvdepot.server.io.chunk_words import words_of_names
from kvdepot.server.io.framing import HEAD
from kvdepot.server.io.jobs import ABSENT
from kvdepot.server.io.peer_summary import summary_of
from kvdepot.server.io.peer_wire import (
    ALPN,
    FROM_READER,
    TO_READER,
    Exact,
    Leased,
    Locate,
    Located,
    Pull,
    Question,
    Refusal,
    Refused,
    Summarize,
    Summary,
    Unchanged,
)

from tests.fakes.listener import Listener
from tests.rigs.certificates import Files
from tests.rigs.patience import patient

_LOCATED: Final = 0
_SUMMARY: Final = 5
_DRIP_SECONDS: Final = 0.01
Sent = Iterator[bytes]
"""What is sent, piece by piece. At its end the connection is closed."""


def _leased(payload: bytes, raw_sum: int | None = None, raw_bytes: int | None = None) -> bytes:
    raw_sum = payload_sum([memoryview(payload)]) if raw_sum is None else raw_sum
    return TO_READER.pack(Leased(len(payload) if raw_bytes is None else raw_bytes, raw_sum, 2))


def _flipped(at: float) -> Callable[[LyingSource, bytes], Sent]:
    """Flip a bit of the object, so far from its start as a part of it."""

    def send(_: LyingSource, payload: bytes) -> Sent:
        wrong = bytearray(payload)
        wrong[int(at * (len(payload) - 1))] ^= 1
        yield _leased(payload) + wrong

    return send


def _another_sum(_: LyingSource, payload: bytes) -> Sent:
    yield _leased(payload, 1) + payload


def _exchanged(_: LyingSource, payload: bytes) -> Sent:
    half = len(payload) // 2 + 8
    yield _leased(payload) + payload[half:] + payload[:half]


def _longer(_: LyingSource, payload: bytes) -> Sent:
    yield _leased(payload, raw_bytes=len(payload) + 1) + payload + b"!"


def _shorter(_: LyingSource, payload: bytes) -> Sent:
    yield _leased(payload[:-1]) + payload[:-1]


def _cut(_: LyingSource, payload: bytes) -> Sent:
    yield _leased(payload) + payload[: len(payload) // 2]
    raise ConnectionAbortedError


def _stalled(self: LyingSource, payload: bytes) -> Sent:
    yield _leased(payload) + payload[: len(payload) // 2]
    self.closed.wait()


def _stalled_in_a_frame(self: LyingSource, payload: bytes) -> Sent:
    yield _leased(payload)[:-1]
    self.closed.wait()


def _dripped(self: LyingSource, payload: bytes) -> Sent:
    yield _leased(payload)
    for at in range(len(payload)):
        yield payload[at : at + 1]
        if self.closed.wait(patient(_DRIP_SECONDS)):
            return


def _located_for_a_pull(*_: object) -> Sent:
    yield TO_READER.pack(Located((5,)))


def _random(*_: object) -> Sent:
    yield os.urandom(4096)


def _too_long_a_frame(*_: object) -> Sent:
    yield HEAD.pack(0xFFFF_FFFF, 0, 0) + bytes(100)


def _leased_for_a_lookup(*_: object) -> Sent:
    yield _leased(b"?" * 4096) + b"?" * 4096


def _too_few_lengths(*_: object) -> Sent:
    yield TO_READER.pack(Located(()))


def _huge_lengths(_: LyingSource, wanted: int) -> Sent:
    body = struct.pack("<I", wanted) + struct.pack("<q", (1 << 63) - 2) * wanted
    yield HEAD.pack(len(body), _LOCATED, 0) + body


def _endless_lengths(*_: object) -> Sent:
    yield HEAD.pack(4, _LOCATED, 0) + struct.pack("<I", 0xFFFF_FFFF)


def _stalled_lookup(self: LyingSource, wanted: int) -> Sent:
    yield TO_READER.pack(Located((5,) * wanted))[:-1]
    self.closed.wait()


OF_PULLS: Final[dict[str, Callable[[Any, Any], Sent]]] = {
    "first bit": _flipped(0.0), "bit in the middle": _flipped(0.5), "last bit": _flipped(1.0), "sum": _another_sum,
    "exchanged": _exchanged, "longer": _longer, "shorter": _shorter, "cut": _cut, "stalled": _stalled,
    "stalled in a frame": _stalled_in_a_frame, "dripped": _dripped, "located": _located_for_a_pull, "random": _random,
    "too long": _too_long_a_frame,
}  # fmt: skip
OF_LOOKUPS: Final[dict[str, Callable[[Any, Any], Sent]]] = {
    "leased": _leased_for_a_lookup, "too few": _too_few_lengths, "huge": _huge_lengths, "endless": _endless_lengths,
    "stalled lookup": _stalled_lookup, "random": _random, "too long": _too_long_a_frame,
}  # fmt: skip


def _all_of_them(self: LyingSource, _: object) -> Sent:
    yield TO_READER.pack(Summary(self.arena_id, 1, 5, 1, b"\xff" * 4096))


def _random_bits(self: LyingSource, _: object) -> Sent:
    yield TO_READER.pack(Summary(self.arena_id, 1, 1 << 60, 16, os.urandom(4096)))


def _no_hashes(self: LyingSource, _: object) -> Sent:
    body = struct.pack("<QQQQI", self.arena_id, 1, 5, 0, 4096) + bytes(4096)
    yield HEAD.pack(len(body), _SUMMARY, 0) + body


def _no_bits(self: LyingSource, _: object) -> Sent:
    body = struct.pack("<QQQQI", self.arena_id, 1, 5, 1, 0)
    yield HEAD.pack(len(body), _SUMMARY, 0) + body


def _endless_bits(self: LyingSource, _: object) -> Sent:
    body = struct.pack("<QQQQI", self.arena_id, 1, 5, 1, 0xFFFF_FFFF)
    yield HEAD.pack(len(body), _SUMMARY, 0) + body


def _unchanged(self: LyingSource, _: object) -> Sent:
    yield TO_READER.pack(Unchanged(self.arena_id))


def _located_for_a_summary(*_: object) -> Sent:
    yield TO_READER.pack(Located((5,)))


def _not_allowed(*_: object) -> Sent:
    yield TO_READER.pack(Refused(Refusal.NOT_ALLOWED))


def _stalled_summary(self: LyingSource, _: object) -> Sent:
    yield TO_READER.pack(Summary(self.arena_id, 1, 5, 1, bytes(4096)))[:-1]
    self.closed.wait()


def _dripped_summary(self: LyingSource, _: object) -> Sent:
    for byte in TO_READER.pack(Summary(self.arena_id, 1, 5, 1, bytes(1 << 16))):
        yield bytes([byte])
        if self.closed.wait(patient(_DRIP_SECONDS)):
            return


def _unknown_question(*_: object) -> Sent:
    """Do as a source of before: it reads a frame of a type that it does not know."""
    yield b""
    raise ConnectionAbortedError


REFUSED_SUMMARIES: Final[dict[str, Callable[[Any, Any], Sent]]] = {
    "all of them": _all_of_them, "no hashes": _no_hashes, "no bits": _no_bits, "endless bits": _endless_bits,
    "unchanged": _unchanged, "located": _located_for_a_summary, "random": _random, "too long": _too_long_a_frame,
}  # fmt: skip
FAILED_SUMMARIES: Final[dict[str, Callable[[Any, Any], Sent]]] = {
    "not allowed": _not_allowed, "unknown question": _unknown_question, "stalled summary": _stalled_summary,
    "dripped summary": _dripped_summary,
}  # fmt: skip
TAKEN_SUMMARIES: Final[dict[str, Callable[[Any, Any], Sent]]] = {"random bits": _random_bits}


class LyingSource(Listener):
    """Has the objects of `keys`, with the bytes of `payload_of`.

    `pulls`, `lookups` and `summaries`: its lies; None: it has none.
    """

    def __init__(self, files: Files, ca: Path, payload_of: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._context = context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(ca)
        context.load_cert_chain(files.cert, files.key)
        context.set_alpn_protocols([ALPN])
        self._payload_of = payload_of
        self.keys: set[bytes] = set()
        self.pulls: Callable[[Any, Any], Sent] | None = None
        self.lookups: Callable[[Any, Any], Sent] | None = None
        self.summaries: Callable[[Any, Any], Sent] | None = None
        self.namespace = bytes(16)
        """Of the objects in its summary."""
        self.arena_id = self.port
        self.summarized = 0
        self.lied = 0
        self.readers: list[str] = []
        """Serial number of the certificate of each connection."""
        self.closed = threading.Event()

    def __exit__(self, *raised: object) -> None:
        self.closed.set()
        super().__exit__(*raised)

    def accepted(self, connection: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError), raw, self._context.wrap_socket(raw, server_side=True) as connection:
            certificate = cast("Any", connection.getpeercert())
            self.readers.append(certificate["serialNumber"])
            while (frame := FROM_READER.read(Exact(connection.recv_into))) is not None:
                for piece in self._answer(frame[1]):
                    connection.sendall(piece)

    def _answer(self, question: Question) -> Sent:
        if isinstance(question, Pull):
            payload = self._payload_of(question.name.key)
            if self.pulls is not None:
                self.lied += 1
                return self.pulls(self, payload)
            return iter((_leased(payload), payload))
        if isinstance(question, Summarize):
            self.summarized += 1
            return self._summarize(question) if self.summaries is None else self.summaries(self, question)
        assert isinstance(question, Locate), "nothing else is asked over the stream"
        if self.lookups is not None and question.wanted:  # a probe asks for nothing
            self.lied += 1
            return self.lookups(self, len(question.wanted))
        lengths = [len(self._payload_of(one.key)) if one.key in self.keys else ABSENT for one in question.wanted]
        return iter((TO_READER.pack(Located(tuple(lengths))),))

    def _summarize(self, question: Summarize) -> Sent:
        words = words_of_names([(self.namespace, key) for key in sorted(self.keys)])
        summary = summary_of([words.tobytes()], self.arena_id)
        unchanged = summary.version == question.version
        yield TO_READER.pack(Unchanged(self.arena_id) if unchanged else summary)
