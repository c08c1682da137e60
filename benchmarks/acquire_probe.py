"""What acquires of objects in RAM take, seen by an engine in a process of its own.

`python -m benchmarks.acquire_probe ENDPOINT`: each line on stdin is a number of seconds; answered
by the 99th percentile of that window, in seconds.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from kvdepot.client.endpoint import Endpoint
from kvdepot.client.session import DepotSession
from kvdepot.core.calls import (
    ROOT_KEY,
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitOutcome,
    Kind,
    ReserveCall,
    ReserveReply,
)
from kvdepot.core.groups import GroupSpec
from kvdepot.core.keys import NamespaceSpec

from benchmarks.depot import engine

CHUNK_TOKENS, OBJECT_BYTES, OBJECTS = 256, 64 << 10, 16
CALL_SECONDS = 10.0
PAUSE_SECONDS = 0.002
"""Between acquires: an engine's steps; a closed loop would measure its own queue."""


class Probe:
    """The benchmark's end of it, or of another module that is asked alike."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=Path(__file__).resolve().parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @classmethod
    def of(cls, endpoint: Endpoint) -> Self:
        return cls("benchmarks.acquire_probe", endpoint.grpc_target.removeprefix("unix:"))

    def p99_seconds(self, window_seconds: float) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{window_seconds}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def spec() -> NamespaceSpec:
    group = GroupSpec(Kind.ATTENTION, CHUNK_TOKENS, rank_block_bytes=(OBJECT_BYTES,))
    return NamespaceSpec(
        {"benchmark": "probe"}, CHUNK_TOKENS, (group,), {Kind.ATTENTION: OBJECT_BYTES}, label="acquire_probe"
    )


def p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


class Prober:
    """Stores one chain and acquires it again and again."""

    def __init__(self, session: DepotSession) -> None:
        self._session = session
        self._keys = [random.randbytes(16) for _ in range(OBJECTS)]
        self._namespace = spec().namespace_id()
        self._answers: list[object] = []

    def store(self) -> None:
        lease = self._session.new_lease_id()
        boundaries = b"".join((CHUNK_TOKENS * (at + 1)).to_bytes(4, "little") for at in range(OBJECTS))
        call = ReserveCall(
            b"", lease, self._namespace, b"".join(self._keys), b"".join((ROOT_KEY, *self._keys[:-1])),
            bytes([Kind.ATTENTION] * OBJECTS), boundaries,
        )  # fmt: skip
        self._session.submit(call, CALL_SECONDS, self._answers.append)
        assert isinstance(self._answer(), ReserveReply)
        self._session.commit(lease, range(OBJECTS), self._answers.append)
        assert self._answer() == bytes([CommitOutcome.COMMITTED] * OBJECTS)

    def window(self, seconds: float) -> float:
        took = []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            lease = self._session.new_lease_id()
            call = AcquireCall(b"", lease, self._namespace, b"".join(self._keys), bytes([Kind.ATTENTION] * OBJECTS))
            self._session.submit(call, CALL_SECONDS, self._answers.append)
            reply = self._answer()
            took.append(time.perf_counter() - began)
            if not isinstance(reply, AcquireReply) or reply.outcome is not AcquireOutcome.GRANTED:
                raise SystemExit(f"acquire: {reply}")
            self._session.release((lease,))
            time.sleep(PAUSE_SECONDS)
        return p99(took)

    def _answer(self) -> object:
        while not self._answers:
            if not self._session.wait(CALL_SECONDS):
                raise SystemExit("no answer")
        return self._answers.pop()


def main() -> None:
    with engine(Endpoint.parse(f"unix://{sys.argv[1]}"), spec(), "probe") as (session, _):
        prober = Prober(session)
        prober.store()
        for line in sys.stdin:
            print(prober.window(float(line)), flush=True)


if __name__ == "__main__":
    main()
