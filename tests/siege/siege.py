"""A daemon under siege: a hostile engine sends anything, an honest one compares every byte, and nothing may grow."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from kvdepot.proto.v1.control_pb2 import SetDrainingRequest
from kvdepot.proto.v1.control_pb2_grpc import ControlStub

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.flatness import count, grown, private_mib
from tests.rigs.other_uids import HONEST, HOSTILE, Comparing, OtherUser, open_to_group
from tests.rigs.raw_client import spec_of, status_of
from tests.siege.attacker import Report

_OPERATOR: Final = 0
"""The uid: root may open the socket of operators."""
_CONFIG: Final = """
[sessions]
grace = "2s"
[policy]
lease_deadline = "5s"
[[tier]]
name = "disk"
kind = "disk"
path = "{disk}"
capacity = "128MiB"
write = "commit"
io_workers = 1
"""
_TENANTS: Final = f"""
[[tenant]]
name = "honest"
users = ["{HONEST}"]
[[tenant]]
name = "hostile"
users = ["{HOSTILE}", "{_OPERATOR}"]
"""
_PAUSE_SECONDS: Final = 0.02
"""Between two prompts of the honest engine."""
_SAMPLES: Final = 16
_COUNTS: Final = {"descriptors": 64, "threads": 8, "children": 4}
_MEMORY: Final = {"private_mib": 16.0}
"""What may come and go with the connections of the moment."""
_HONEST: Final[list[Comparing]] = []


@dataclass(slots=True)
class Served:
    """What an honest engine saw. Times in milliseconds, of one prompt stored and two loaded."""

    times: list[float] = field(default_factory=list)
    objects: int = 0
    failures: list[str] = field(default_factory=list)

    def line(self, name: str) -> str:
        p50, p99 = (percentile(self.times, share) for share in (50, 99))
        return f"{name:<24}{len(self.times):>8}{self.objects:>9}{p50:>10.1f}{p99:>10.1f}{len(self.failures):>10}"


def percentile(times: Sequence[float], share: int) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[share - 1] if len(times) > 1 else float("nan")


# --- in the process of the honest user


def compare(socket: str, tenant: str, seconds: float, strict: bool) -> Served:
    """Store and load prompts. `strict`: each has to be served; else an operator may have deleted it."""
    if not _HONEST:
        _HONEST.append(Comparing(Path(socket), "honest", spec=spec_of(tenant)))
    served, until = Served(), time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        try:
            served.objects += _HONEST[0].check() if strict else _compared(_HONEST[0])
        except (AssertionError, grpc.RpcError, OSError) as error:
            served.failures.append(f"{type(error).__name__}: {error}"[:300])
        served.times.append((time.perf_counter() - began) * 1e3)
        time.sleep(_PAUSE_SECONDS)
    return served


def _compared(engine: Comparing) -> int:
    """Return how many objects were right, of what is served at all. Raise AssertionError for wrong bytes."""
    try:
        return engine.check()
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise
        return 0  # an operator has had the namespace forgotten, or the daemon drain
    except AssertionError as error:
        if "wrong bytes" in str(error):
            raise
        return 0


# --- the siege


@dataclass(frozen=True, slots=True)
class Sample:
    """Of the daemon."""

    descriptors: int
    threads: int
    children: int
    private_mib: float


@dataclass(slots=True)
class Outcome:
    """Of a whole siege."""

    served: dict[str, Served] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Siege:
    """Three parts of equal length: nobody attacks; a hostile engine does; an operator sends anything as well.

    `tenants`: the honest user and the others are tenants, each with data of its own.
    """

    def __init__(self, seed: int, say: Callable[[str], None] = print, *, tenants: bool = False) -> None:
        self._seed = seed
        self._tenants = tenants
        self._say = say
        self.daemon = DaemonProcess(ram="512MiB")
        self.outcome = Outcome()

    def run(self, seconds: float) -> Outcome:
        disk = self.daemon.directory / "disk"
        disk.mkdir(mode=0o700)
        self.daemon.config = _CONFIG.format(disk=disk) + (_TENANTS if self._tenants else "")
        self.daemon.start()
        open_to_group(self.daemon)
        with (
            OtherUser(HONEST, __name__) as honest,
            OtherUser(HOSTILE, "tests.siege.attacker") as hostile,
            OtherUser(_OPERATOR, "tests.siege.attacker") as operator,
        ):
            parts: list[tuple[str, Sequence[tuple[OtherUser, str]]]] = [
                ("before", ()),
                ("a hostile engine", ((hostile, "attack"),)),
                ("and any operator", ((hostile, "attack"), (operator, "operate"))),
            ]
            for number, (name, attackers) in enumerate(parts):
                self._part(name, honest, attackers, seconds / len(parts), number, strict=number < 2)
        self._judge()
        return self.outcome

    def close(self) -> None:
        self.daemon.close()

    def _tenant(self, name: str) -> str:
        return name if self._tenants else ""

    def _part(
        self, name: str, honest: OtherUser, attackers: Sequence[tuple[OtherUser, str]], seconds: float, number: int,
        *, strict: bool,
    ) -> None:  # fmt: skip
        socket = str(self.daemon.socket)
        threads = [
            threading.Thread(target=self._attack, args=(name, user, verb, self._seed + 10 * number + at, seconds))
            for at, (user, verb) in enumerate(attackers)
        ]
        sampling = threading.Event()
        threads.append(threading.Thread(target=self._sample, args=(sampling, seconds, bool(attackers))))
        for thread in threads:
            thread.start()
        try:
            served: Served = honest.run("compare", socket, self._tenant("honest"), seconds, strict)
        finally:
            for thread in threads[:-1]:
                thread.join()
            sampling.set()
            threads[-1].join()
        self.outcome.served[name] = served
        self.outcome.findings += [f"{name}, an honest engine: {failure}" for failure in served.failures[:5]]
        self._say(served.line(name))

    def _attack(self, name: str, user: OtherUser, verb: str, seed: int, seconds: float) -> None:
        """On a thread."""
        try:
            report: Report = user.run(
                verb, str(self.daemon.socket), self.daemon.metrics, self._tenant("hostile"), seed, seconds
            )
        except Exception as error:  # noqa: BLE001 - an attacker that ends attacks no more
            self.outcome.findings.append(f"{name}, its attacker ended: {error}")
            return
        calls, unexpected = report
        self.outcome.calls.update(calls)
        self.outcome.findings += unexpected[:20]

    def _sample(self, ended: threading.Event, seconds: float, attacked: bool) -> None:
        while attacked and not ended.wait(seconds / _SAMPLES * 2):
            self.outcome.samples.append(self._now())

    def _now(self) -> Sample:
        pid = self.daemon.pid
        return Sample(count(pid, "fd"), count(pid, "task"), len(children(pid)), private_mib(pid))

    def _judge(self) -> None:
        findings = self.outcome.findings
        process = self.daemon.process
        assert process is not None
        if process.poll() is not None:
            findings.append(f"the daemon ended: {self.daemon.log[-2000:]}")
            return
        if "Traceback" in self.daemon.log or "call failed" in self.daemon.log:
            at = max(self.daemon.log.find("Traceback"), self.daemon.log.find("call failed"))
            findings.append(f"the daemon's log: {self.daemon.log[max(at - 300, 0) :][:3000]}")
        with grpc.insecure_channel(f"unix:{self.daemon.admin_socket}") as channel:
            control = ControlStub(channel)  # type: ignore[no-untyped-call]
            control.SetDraining(SetDrainingRequest(draining=False))  # an operator may have had it drain
        if not status_of(self.daemon.socket).ready:
            findings.append("the daemon is not ready")
        findings += grown(self.outcome.samples, _COUNTS, _MEMORY)
