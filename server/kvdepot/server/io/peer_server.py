"""The source's server of the peer tier: it sends what its daemon has leased, from the arena, over TLS (ADR 78).

Started by the daemon as `python -m kvdepot.server.io.peer_server DATA SOCKET_FD PARENT_PID CERT KEY CA LANES
LISTENING...`. DATA: of `pack_parts`, mapped for reading alone. LANES: `nixl` if readers may borrow over NIXL, too.
LISTENING: descriptors of sockets that listen. It decides nothing: for each question of a reader it asks the daemon,
which gives it names of the certificate, and gets a lease or a refusal.

A lease is in one thread, from the daemon's answer to `Ended`. That thread sends until all is sent, until the connection
fails, or until the lease is over. TLS encrypts into memory of its own, so nothing touches the extents after a send has
returned. The daemon kills this process if an `Ended` is late, and ends its leases when it is reaped. What is borrowed
is read through another process (`nixl_lender`): here is only its lease.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import signal
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvdepot.core.data_mapping import map_parts, unpack_parts
from kvdepot.server.io.framing import FrameError
from kvdepot.server.io.lifeline import die_with, exit_code
from kvdepot.server.io.peer_connections import Connection, Connections
from kvdepot.server.io.peer_summary import Summaries
from kvdepot.server.io.peer_wire import (
    ALPN,
    ALPN_NIXL,
    FROM_DAEMON,
    FROM_READER,
    NAME_CHARACTERS_MAX,
    NAMES_MAX,
    TO_DAEMON,
    TO_READER,
    AskLocate,
    AskPull,
    AskSummary,
    Borrow,
    Ended,
    Exact,
    Gathered,
    Granted,
    Lane,
    Leased,
    Lent,
    Locate,
    Located,
    Pull,
    Question,
    Refusal,
    Refused,
    Reply,
    Return,
    Returned,
    Sent,
    Summarize,
    Summary,
    SummaryWords,
    Unchanged,
    Unconnected,
)
from kvdepot.server.platform.certificates import names_of
from kvdepot.server.platform.tls_files import CONNECTION_SECONDS_MAX, TlsFileError, TlsFiles

HANDSHAKE_SECONDS: Final = 5.0
"""Until then nothing is known of who has connected."""
FIRST_SECONDS: Final = 5.0
"""For the first question, which a reader asks at once. Its answer ends the connection of who is no peer."""
IDLE_SECONDS: Final = 60.0
QUESTION_SECONDS: Final = 5.0
"""From the first byte of a question to its last, and for an answer without an object."""
LOOK_SECONDS: Final = 5.0
"""How often the files of TLS are looked at, by a thread of its own: their mount may hang."""
ANSWER_SECONDS: Final = 10.0
"""What an answer of the daemon is waited for. A lease that is granted later ends at once."""
_SEND_BYTES: Final = 1 << 20
_PAUSE_SECONDS: Final = 0.1
"""After a connection that could not be accepted."""
_TELL_SECONDS: Final = 0.5
"""Between two messages about refused connections: everybody can be refused, as often as the network allows."""
Answer = Located | Granted | Refused | Gathered


def main(arguments: list[str]) -> int:
    data, socket_fd, parent = arguments[0], int(arguments[1]), int(arguments[2])
    cert, key, client_ca = map(Path, arguments[3:6])
    die_with(parent)
    for ending in (signal.SIGINT, signal.SIGTERM):  # for the daemon, which ends this process itself
        signal.signal(ending, signal.SIG_IGN)
    arena = map_parts(unpack_parts(data), writable=False)
    daemon = Daemon(socket.socket(fileno=socket_fd))
    certificates = Certificates(cert, key, client_ca, [ALPN_NIXL, ALPN] if arguments[6] == Lane.NIXL else [ALPN])
    server = Server(arena, daemon, certificates)
    threading.excepthook = _end
    threading.Thread(target=server.tell_refused, daemon=True).start()
    for fd in arguments[7:]:
        threading.Thread(target=server.accept, args=(socket.socket(fileno=int(fd)),), daemon=True).start()
    daemon.listen()
    return 0


def _end(failure: threading.ExceptHookArgs) -> None:
    """End the process with a thread that all connections need. The daemon starts another one."""
    sys.excepthook(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    os._exit(1)


class Daemon:
    """The daemon's end: questions of all threads, and their answers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[Answer]] = {}
        self.summaries = Summaries()

    def listen(self) -> None:
        """Hand out answers until the daemon closes the socket. The caller ends the process then."""
        stream = self._connection.makefile("rb")
        while (frame := FROM_DAEMON.read(stream)) is not None:
            number, answer = frame
            if isinstance(answer, SummaryWords):
                self.summaries.take(answer)
                continue
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting.put(answer)
            elif isinstance(answer, Granted):  # nobody waits for it any more
                self.tell(Ended(answer.lease, Sent.LATE, 0))

    def tell(self, message: AskLocate | AskPull | AskSummary | Ended | Unconnected, number: int = 0) -> None:
        with self._sending:
            self._connection.sendall(TO_DAEMON.pack(message, number))

    def ask(self, question: AskLocate | AskPull | AskSummary) -> Answer | None:
        """Return the answer; None if there is none in time."""
        number, answers = next(self._numbers), queue.SimpleQueue[Answer]()
        self._waiting[number] = answers
        self.tell(question, number)
        try:
            return answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            # The thread that removes the entry decides. If it is not this one, the answer is put there at this moment.
            return None if self._waiting.pop(number, None) is not None else answers.get()


class Certificates:
    """The server's side of TLS, by the files as they were when they last fitted together."""

    def __init__(self, cert: Path, key: Path, client_ca: Path, protocols: Sequence[str]) -> None:
        """Read the files. `protocols`: of ALPN, the best one first. Raise TlsFileError or OSError."""
        self._paths = cert, key, client_ca
        self.protocols = list(protocols)
        self._files = TlsFiles(cert, key, client_ca)
        self._files.load()
        self.context = self._made()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        pause = threading.Event()
        changed = False
        while True:
            pause.wait(LOOK_SECONDS)
            with contextlib.suppress(TlsFileError, OSError):  # a renewal writes one after the other
                changed = self._files.load_changed() is not None or changed
                if changed:
                    self.context = self._made()
                    changed = False

    def _made(self) -> ssl.SSLContext:
        cert, key, client_ca = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # a resumed session is not checked again, and its certificate may have expired
        context.load_verify_locations(client_ca)
        context.load_cert_chain(cert, key, password=str)
        context.set_alpn_protocols(self.protocols)
        return context


class Server:
    """Serves connections, each in a thread of its own."""

    def __init__(self, arena: memoryview, daemon: Daemon, certificates: Certificates) -> None:
        self._arena = arena
        self._daemon = daemon
        self._certificates = certificates
        self._changing = threading.Lock()
        self._connections = Connections()
        self._refused: Counter[str] = Counter()  # connections that the daemon was not told of, by reason
        self._has_refused = threading.Event()
        self._pause = threading.Event()

    def accept(self, listening: socket.socket) -> None:
        """Accept connections until the process ends."""
        while True:
            try:
                connection, address = listening.accept()
            except OSError:  # too few descriptors, or the reader has gone
                self._pause.wait(_PAUSE_SECONDS)
                continue
            one = self._connections.enter(str(address[0]))
            if one is None:
                connection.close()
                self._refuse("limit")
                continue
            try:
                threading.Thread(target=self._connected, args=(connection, one), daemon=True).start()
            except RuntimeError:  # the host has no room for a thread
                self._connections.leave(one)
                connection.close()
                self._refuse("limit")
                self._pause.wait(_PAUSE_SECONDS)

    def tell_refused(self) -> None:
        """Tell the daemon of refused connections, all of some time at once, until the process ends."""
        while True:
            self._has_refused.wait()
            self._has_refused.clear()
            with self._changing:
                refused, self._refused = self._refused, Counter()
            for reason, times in refused.items():
                self._daemon.tell(Unconnected(reason, times))
            self._pause.wait(_TELL_SECONDS)

    def _refuse(self, reason: str) -> None:
        with self._changing:
            self._refused[reason] += 1
        self._has_refused.set()

    def _connected(self, raw: socket.socket, one: Connection) -> None:
        try:
            with contextlib.suppress(OSError, FrameError), raw:
                self._serve(raw, one)
        except Exception:  # noqa: BLE001 - whatever it is, it ends this connection alone
            sys.excepthook(*sys.exc_info())
        finally:
            self._connections.leave(one)

    def _serve(self, raw: socket.socket, one: Connection) -> None:
        raw.settimeout(HANDSHAKE_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection = self._certificates.context.wrap_socket(raw, server_side=True)
        except (OSError, ValueError):
            self._refuse("handshake")
            return
        with connection:
            certificate = connection.getpeercert(binary_form=True)
            if connection.selected_alpn_protocol() not in self._certificates.protocols or not certificate:
                self._refuse("handshake")
                return
            found = names_of(ssl.DER_cert_to_PEM_cert(certificate).encode())
            names = tuple(name for name in found if len(name) <= NAME_CHARACTERS_MAX)[:NAMES_MAX]
            reader = _Reader(
                connection, names, self._daemon, self._arena, asks=lambda: self._connections.works(one),
                unanswered=lambda: self._refuse("no_answer"),
            )  # fmt: skip
            try:
                self._answer_all(reader, connection, one)
            finally:
                self._connections.works(one)

    def _answer_all(self, reader: _Reader, connection: ssl.SSLSocket, one: Connection) -> None:
        until = time.monotonic() + CONNECTION_SECONDS_MAX
        seconds = FIRST_SECONDS
        while time.monotonic() < until and reader.answer_next(seconds):
            if not self._connections.waits(one, connection):
                self._refuse("limit")
                return
            seconds = IDLE_SECONDS


class _Questions:
    """What a reader asks: a question may be awaited long, but has to come quickly."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection
        self._stream = Exact(self._receive)
        self._until = self._ends_at = 0.0
        self._begun = False

    def next(self, seconds: float, ends_at: float = math.inf) -> Question | None:
        """Wait for so long until the next question begins, and return it. None: there is none.

        At `ends_at` it has to be here as a whole. Raise OSError or FrameError.
        """
        self._until, self._ends_at, self._begun = time.monotonic() + seconds, ends_at, False
        frame = FROM_READER.read(self._stream)
        return None if frame is None else frame[1]

    def _receive(self, buffer: memoryview) -> int:
        self._connection.settimeout(_left(self._until))
        count = self._connection.recv_into(buffer)
        if count and not self._begun:
            self._until, self._begun = min(time.monotonic() + QUESTION_SECONDS, self._ends_at), True
        return count


def _left(until: float) -> float:
    """Return the seconds until then. Raise TimeoutError if there are none."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


class _Reader:
    """One connection of a reader."""

    def __init__(
        self, connection: ssl.SSLSocket, names: tuple[str, ...], daemon: Daemon, arena: memoryview, *,
        asks: Callable[[], None], unanswered: Callable[[], None],
    ) -> None:  # fmt: skip
        """Take the connection. `asks` is called when a question has come, `unanswered` if the daemon is silent."""
        self._asks = asks
        self._unanswered = unanswered
        self._connection = connection
        self._names = names
        self._daemon = daemon
        self._arena = arena
        self._questions = _Questions(connection)
        self._may_borrow = connection.selected_alpn_protocol() == ALPN_NIXL

    def answer_next(self, seconds: float) -> bool:
        """Answer one question, which may begin so late. Return False if no other one is to be answered.

        Raise OSError or FrameError.
        """
        question = self._questions.next(seconds)
        self._asks()
        if question is None:
            return False
        if isinstance(question, Return) or (isinstance(question, Borrow) and not self._may_borrow):
            return False  # nothing is lent to it
        answer = self._daemon.ask(self._asked(question))
        if answer is None:
            self._unanswered()
            return False
        if isinstance(answer, Granted):
            until = time.monotonic() + answer.seconds
            return self._send(answer, until) if answer.lender is None else self._lend(answer, until)
        reply = self._summary(question, answer) if isinstance(answer, Gathered) else answer
        self._tell(reply, time.monotonic() + QUESTION_SECONDS)
        return not (isinstance(answer, Refused) and answer.reason is Refusal.NOT_ALLOWED)

    def _summary(self, question: Question, gathered: Gathered) -> Summary | Unchanged:
        summary = self._daemon.summaries.of(gathered.tenant, gathered.arena_id)
        known = isinstance(question, Summarize) and question.version == summary.version
        return Unchanged(gathered.arena_id) if known else summary

    def _asked(self, question: Locate | Pull | Borrow | Summarize) -> AskLocate | AskPull | AskSummary:
        if isinstance(question, Locate):
            return AskLocate(self._names, question.wanted)
        if isinstance(question, Summarize):
            return AskSummary(self._names)
        return AskPull(self._names, question.name, isinstance(question, Borrow))

    def _lend(self, lease: Granted, until: float) -> bool:
        """Let the reader read a leased object over NIXL. Return whether it gave it back. The lease ends in any case."""
        assert lease.lender is not None
        sent = Sent.CUT
        try:
            self._tell(Lent(lease.raw_sum, lease.generation, lease.lender, lease.extents), until)
            question = self._questions.next(_left(until), until)  # else one byte would keep a lease beyond its end
            if isinstance(question, Return):
                _left(until)
                sent = Sent.WHOLE
        except TimeoutError:
            sent = Sent.LATE
        except (OSError, FrameError):
            pass
        finally:
            sent_bytes = sum(length for _, length in lease.extents) if sent is Sent.WHOLE else 0
            self._daemon.tell(Ended(lease.lease, sent, sent_bytes))
        if sent is Sent.WHOLE:
            self._tell(Returned(), time.monotonic() + QUESTION_SECONDS)
        return sent is Sent.WHOLE

    def _send(self, lease: Granted, until: float) -> bool:
        """Send a leased object. Return whether the reader has all of it. The lease ends in any case."""
        sent, sent_bytes = Sent.CUT, 0
        try:
            raw_bytes = sum(length for _, length in lease.extents)
            head = memoryview(TO_READER.pack(Leased(raw_bytes, lease.raw_sum, lease.generation)))
            sent_bytes = -len(head)
            views = [self._arena[offset : offset + length] for offset, length in lease.extents]
            for view in (head, *views):
                for start in range(0, len(view), _SEND_BYTES):
                    sent_bytes += self._send_all(view[start : start + _SEND_BYTES], until)
            sent = Sent.WHOLE
        except TimeoutError:
            sent = Sent.LATE
        except OSError:
            pass
        finally:
            self._daemon.tell(Ended(lease.lease, sent, max(sent_bytes, 0)))
        return sent is Sent.WHOLE

    def _tell(self, reply: Reply, until: float) -> None:
        self._send_all(memoryview(TO_READER.pack(reply)), until)

    def _send_all(self, piece: memoryview, until: float) -> int:
        """Send all of it, and return its length. Raise TimeoutError when the lease is over."""
        left = piece
        while left:
            self._connection.settimeout(_left(until))
            left = left[self._connection.send(left) :]
        return len(piece)


if __name__ == "__main__":
    code = exit_code(main)
    sys.stderr.flush()
    os._exit(code)  # not waiting for threads that serve
