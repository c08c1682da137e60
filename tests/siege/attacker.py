"""What a hostile process does to a daemon: its own sessions, all methods, frames, datagrams, HTTP, and silence.

Its functions run in a process of another user (`tests/rigs/other_uids.py`).
"""

from __future__ import annotations

import array
import contextlib
import encodings.idna  # noqa: F401 - the process of another user may not import it later
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from kvdepot.core.calls import (
    ROOT_KEY,
    AbandonCall,
    AcquireCall,
    AttachCall,
    CommitCall,
    CommitItem,
    DeclareCall,
    EndRequestCall,
    FindTiersCall,
    Kind,
    LocateCall,
    ReleaseCall,
    ReserveCall,
)
from kvdepot.core.errors import KvDepotError
from kvdepot.core.registration import RegisterCall
from kvdepot.proto import codec
from kvdepot.proto.call_frames import Frames, decode_refusal, encode_frame
from kvdepot.proto.methods import BY_CALL, DEPOT, encode
from kvdepot.proto.status import CODE_KEY

from tests.rigs.patience import patient
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, spec_of
from tests.siege.messages import Messages

CALL_SECONDS: Final = 30.0
_STREAM_SECONDS: Final = 1.0
"""For a part of a stream that need not come, and for answers to frames, of which some may wait."""
SESSION_CALLS: Final = 200
"""Then it attaches anew."""
_SILENT: Final = 3
_NAMES: Final = "Aa\x0a\x1b\u202e\U0001f4a90%"
_NOT_EXPECTED: Final = frozenset({"internal", "INTERNAL", "UNKNOWN"})

Report = tuple[dict[str, int], list[str]]
"""How often each kind of call ended how, and what no call may answer."""


class Attacker:
    """One hostile process of a tenant. `methods`: those it calls by gRPC, on the socket at `calls_path`."""

    def __init__(
        self, socket_path: str, calls_path: str, metrics: str, tenant: str, seed: int,
        methods: Sequence[MethodDescriptor],
    ) -> None:  # fmt: skip
        self._path = Path(socket_path)
        self._calls_path = calls_path
        self._http = metrics.removeprefix("http://").rpartition(":")
        self._tenant = tenant
        self._random = Random(seed)
        self._methods = list(methods)
        self._silent: list[socket.socket] = []
        self._messages = Messages(self._random, keys_of("none", 2))
        self.outcomes: Counter[str] = Counter()
        self.unexpected: list[str] = []

    def run(self, seconds: float) -> Report:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self._engine() as engine:
                known, honest = [*keys_of("none", 2), *keys_of("own", 4)], {}
                if engine is not None:
                    known += [engine.session, engine.namespace]
                    honest = _honest(engine, self._tenant, self._random)
                self._messages = Messages(self._random, known, honest)
                with grpc.insecure_channel(
                    f"unix:{self._calls_path}", [("grpc.use_local_subchannel_pool", 1)]
                ) as channel:
                    for _ in range(SESSION_CALLS):
                        if time.monotonic() > until:
                            break
                        if self._random.random() < 0.7:
                            self._call(channel)
                        else:
                            self._random.choice((self._attach, self._frames, self._http_bytes, self._bytes))()
        return dict(self.outcomes), self.unexpected

    @contextlib.contextmanager
    def _engine(self) -> Any:
        """Yield a session of its own, with objects in it; or None, if the daemon gives it none."""
        name = f"hostile-{self._random.randrange(4)}"
        try:
            engine = RawEngine(self._path, name, spec=spec_of(self._tenant, f"own-{self._random.randrange(3)}"))
        except (AssertionError, OSError, grpc.RpcError) as error:
            self.outcomes[f"session: {type(error).__name__}"] += 1
            yield None
            return
        with engine:
            with contextlib.suppress(AssertionError, grpc.RpcError):  # the daemon may have no room for it
                engine.store(keys_of("own", 4))
            yield engine

    def _call(self, channel: Any) -> None:
        method = self._random.choice(self._methods)
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        call = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}", None, None)
        data = self._messages.draw(method)
        seconds = patient(_STREAM_SECONDS if method.server_streaming else CALL_SECONDS)
        try:
            answer = call(iter([data]) if method.client_streaming else data, timeout=seconds)
            if method.server_streaming:
                next(answer, None)
                answer.cancel()
            outcome = "answered"
        except grpc.RpcError as error:
            metadata = {entry.key: entry.value for entry in error.trailing_metadata() or ()}
            outcome = str(metadata.get(CODE_KEY, error.code().name))
        self._note(f"grpc: {method.name}: {outcome}", outcome, data)

    def _note(self, key: str, outcome: str, data: bytes) -> None:
        self.outcomes[key] += 1
        if outcome in _NOT_EXPECTED:
            self.unexpected.append(f"{key}: {data[:400].hex()}")

    def _attach(self) -> None:
        """A datagram to attach with, whole or not, perhaps with descriptors."""
        random = self._random
        call = AttachCall(
            random.choice((0, 1, 1, 2**32 - 1)), random.choice((1, 1, 0, 2**32 - 1)),
            "".join(random.choice(_NAMES) for _ in range(random.randint(1, 60))),
            scheduler=random.random() < 0.7, rank=random.choice((-1, 0, 0, 1, 63)),
            world_size=random.choice((1, 1, 2, 64)), calls=random.random() < 0.5, stream=random.random() < 0.02,
            parts=random.random() < 0.9,
        )  # fmt: skip
        try:
            data = codec.encode_attach_call(call)
        except KvDepotError:  # of a name that no client sends
            data = random.randbytes(64)
        draw = random.random()
        if draw < 0.25:
            data = random.randbytes(random.choice((1, 10, 500, 4095, 4097, 60_000)))
        elif draw < 0.75:
            data = self._messages.changed(data) or b"\0"
        self.outcomes[f"attach: {self._exchanged(data, random.randrange(3) * random.randrange(20))}"] += 1

    def _exchanged(self, data: bytes, count: int) -> str:
        given = [os.open(os.devnull, os.O_RDWR) for _ in range(count)]
        received: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(patient(CALL_SECONDS))
                connection.connect(f"{self._path}.attach")
                packed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))] if given else []
                connection.sendmsg([data], packed)
                answer, ancillary, _, _ = connection.recvmsg(8192, socket.CMSG_SPACE(64))
                for _, _, found in ancillary:
                    received += array.array("i", found[: len(found) // 4 * 4])
                if len(received) == 3:
                    with socket.socket(fileno=received.pop()) as calls:
                        self._frames_on(calls)
                return "answered" if answer else "closed"
        except OSError as error:
            return type(error).__name__
        finally:
            for descriptor in (*given, *received):
                os.close(descriptor)

    def _frames(self) -> None:
        name = f"calls-{self._random.randrange(4)}"
        call = AttachCall(1, 1, name, scheduler=True, rank=0, world_size=1, calls=True, parts=True)
        self.outcomes[f"calls: {self._exchanged(codec.encode_attach_call(call), 0)}"] += 1

    def _frames_on(self, calls: socket.socket) -> None:
        random = self._random
        calls.settimeout(patient(_STREAM_SECONDS))
        frames, sent = Frames(), 0
        for _ in range(random.randint(1, 40)):
            method = random.choice(list(DEPOT.values()))
            frame = encode_frame(random.getrandbits(64), method.number, self._messages.draw(method.descriptor))
            if random.random() < 0.02:  # what is no frame: the daemon closes the socket
                frame = random.choice((struct.pack("<I", 2**32 - 1), bytes(13), self._messages.changed(frame)))
                calls.sendall(frame)
                return
            calls.sendall(frame)
            sent += 1
        answered = 0
        while answered < sent:
            data = calls.recv(1 << 16)
            if not data:
                self.outcomes["frames: closed"] += 1
                return
            frames.feed(data)
            for answer in frames:
                answered += 1
                outcome = "answered" if answer.method else decode_refusal(answer.body).code
                self._note(f"frame: {outcome}", outcome, answer.body)

    def _http_bytes(self) -> None:
        host, _, port = self._http
        data = self._random.choice(
            (b"GET /metrics HTTP/1.1\r\n\r\n", b"GET / ", b"\xff" * 9000, b"A: " + b"x" * 70_000)
        )
        self._bytes_to(lambda: socket.create_connection((host, int(port)), timeout=patient(5.0)), data, "http")

    def _bytes(self) -> None:
        """Bytes that are no gRPC, to the socket of engines."""

        def connected() -> socket.socket:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(patient(5.0))
            connection.connect(os.fspath(self._path))
            return connection

        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        data = self._random.choice((b"", preface, preface + self._random.randbytes(300), self._random.randbytes(5000)))
        self._bytes_to(connected, data, "socket")

    def _bytes_to(self, connect: Callable[[], socket.socket], data: bytes, what: str) -> None:
        """Some of these connections stay open, silent."""
        try:
            connection = connect()
            connection.sendall(data)
        except OSError as error:
            self.outcomes[f"{what}: {type(error).__name__}"] += 1
            return
        self.outcomes[f"{what}: sent"] += 1
        self._silent.append(connection)
        while len(self._silent) > _SILENT:
            self._silent.pop(0).close()


def _honest(engine: RawEngine, tenant: str, random: Random) -> dict[str, Any]:
    """Return a message of each method of an engine that it might send."""
    session, namespace, keys = engine.session, engine.namespace, keys_of("own", 4)
    joined, kinds, lease = b"".join(keys), bytes([Kind.ATTENTION]) * len(keys), random.randrange(3, 9)
    item = CommitItem(lease, struct.pack("<2I", 0, 1))
    boundaries = struct.pack("<4I", *(CHUNK_TOKENS * number for number in range(1, 5)))
    calls = (
        DeclareCall(session, (lease,)),
        LocateCall(session, namespace, joined, 1 << 30, "r", 1.0, 0.0),
        FindTiersCall(session, namespace, joined),
        AcquireCall(session, lease, namespace, joined, kinds, "r"),
        ReleaseCall(session, (lease,)),
        ReserveCall(
            session, lease, namespace, keys=joined, parents=ROOT_KEY + joined[: -len(ROOT_KEY)], kinds=kinds,
            boundaries=boundaries, request_id="r",
        ),
        CommitCall(session, (item,)),
        AbandonCall(session, (item,)),
        EndRequestCall(session, "r"),
        RegisterCall(session, spec_of(tenant, "hostile"), (), follows_bumps=False),
    )  # fmt: skip
    return {BY_CALL[type(call)].name: encode(call) for call in calls}


def attack(socket_path: str, metrics: str, tenant: str, seed: int, seconds: float) -> Report:
    """As an engine: every method, also those of operators, on the socket of engines."""
    methods = [method.descriptor for method in BY_CALL.values()]
    return Attacker(socket_path, socket_path, metrics, tenant, seed, methods).run(seconds)


def operate(socket_path: str, metrics: str, tenant: str, seed: int, seconds: float) -> Report:
    """As an operator who sends anything: every method, on the socket of operators."""
    methods = [method.descriptor for method in BY_CALL.values()]
    return Attacker(socket_path, f"{socket_path}.admin", metrics, tenant, seed, methods).run(seconds)
