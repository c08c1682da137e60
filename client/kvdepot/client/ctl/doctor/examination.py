"""All checks of `kvdepotctl doctor`, in the order in which they are shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.doctor import arenas, daemon_checks, directories, engines, memory, probe, transports, users
from kvdepot.client.ctl.doctor.daemon import metrics_answer
from kvdepot.client.ctl.doctor.directories import Looked, check_answers
from kvdepot.client.ctl.doctor.probe import Probed
from kvdepot.client.ctl.doctor.programs import Program

if TYPE_CHECKING:
    from kvdepot.client.ctl.doctor.daemon import Daemon
    from kvdepot.client.ctl.doctor.findings import Finding
    from kvdepot.client.ctl.doctor.host import Host
    from kvdepot.client.ctl.doctor.settings import Place, Settings


PROBE: Final = (sys.executable, "-I", "-S", probe.__file__)


def examine(
    host: Host, settings: Settings | None, daemon: Daemon, *, timeout_seconds: float, writing: bool
) -> Iterator[Finding]:
    """Without settings only what the daemon and the host say. No path takes much longer than `timeout_seconds`."""
    yield daemon_checks.check_daemon(daemon)
    if settings is not None:
        yield daemon_checks.check_same_configuration(daemon, settings)
    yield daemon_checks.check_sockets(daemon, settings, host)
    yield users.check_group(daemon, host)
    yield daemon_checks.check_descriptor(daemon)
    yield daemon_checks.check_identity(daemon)
    if settings is not None:
        off = settings.metrics.rpartition(":")[2] in ("", "0")
        answer = "" if off else metrics_answer(settings.metrics, timeout_seconds)
        yield daemon_checks.check_metrics(settings, daemon, answer)
        yield memory.check_memory(settings, host)
        yield memory.check_memory_limit(settings, host, daemon.process)
        yield memory.check_locked_memory(settings, host, daemon.process)
    yield memory.check_open_files(host, daemon.process)
    yield memory.check_kernel(host)
    yield memory.check_remove_ipc(host, daemon.uid)
    if settings is not None and settings.uses_nixl:
        pid = daemon.peer.pid if daemon.peer is not None else 0
        yield transports.check_transports(host.environment_of(pid) if pid > 0 else None)
    yield from daemon_checks.check_tiers(daemon)
    if settings is not None:
        yield arenas.check_unused_arenas(settings)
        yield from _check_places(host, _directories(settings), daemon, timeout_seconds, writing=writing)
    status = daemon.status
    sessions = status.sessions if status and daemon.in_sight else ()
    yield engines.check_hashes(host, sessions, status.namespaces if status else ())
    yield users.check_engine_users(host, sessions)
    yield engines.check_vllm(engines.vllm_version())


def _directories(settings: Settings) -> list[Place]:
    """Return the places that are directories of this host. Probes of the daemon look at the others."""
    return [place for place in settings.places if place.kind not in ("object", "peer")]


def _check_places(
    host: Host, places: Sequence[Place], daemon: Daemon, timeout_seconds: float, *, writing: bool
) -> Iterator[Finding]:
    found = look_at(places, timeout_seconds, writing=writing)
    for place, probed in zip(places, found, strict=True):
        yield check_answers(place, probed, timeout_seconds)
        if probed is None or probed.looking:
            continue
        looked = Looked(place, probed, host.mount_of(probed.resolved, daemon.process), daemon.uid, host.uid)
        checks = {"ram": directories.OF_RAM, "disk": directories.OF_TIERS, "shared": directories.OF_SHARED}
        yield from (check(looked) for check in checks[place.kind])
        if place.kind == "ram":
            yield directories.check_huge_pages(looked, host)


def look_at(
    places: Sequence[Place], timeout_seconds: float, *, writing: bool, command: Sequence[str] = PROBE
) -> list[Probed | None]:
    """All at once, each by a process of its own; None: no answer in time. The arena's is not written to."""
    programs = [
        Program([*command, place.path, place.held, "1" if writing and place.kind != "ram" else "0"]) for place in places
    ]
    until = time.monotonic() + timeout_seconds
    return [_probed(place, program, until) for place, program in zip(places, programs, strict=True)]


def _probed(place: Place, program: Program, until: float) -> Probed | None:
    ended = program.wait(until)
    if ended is None:
        return None
    if ended.code:
        return Probed(place.path, looking=(ended.errors.strip().splitlines() or ["no reason given"])[-1])
    try:
        return Probed(**ended.parsed())
    except TypeError:
        return Probed(place.path, looking=f"the answer is no JSON: {ended.output.strip()[:80]!r}")
