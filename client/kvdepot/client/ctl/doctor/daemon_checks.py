"""Checks of a running daemon, and of the way to it."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.doctor.findings import DAEMON, Check
from kvdepot.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdepot.client.ctl.doctor.daemon import Daemon
    from kvdepot.client.ctl.doctor.findings import Finding
    from kvdepot.client.ctl.doctor.host import Host
    from kvdepot.client.ctl.doctor.settings import Settings

_DENIED: Final = os.strerror(errno.EACCES)
_JOIN: Final = "join the sockets' group (`usermod -aG`), or set [daemon] mode and group for this user"
_OPERATE: Final = "run this as root or as the daemon's user, or set [daemon] admin_group and [operators] for this user"
_SILENT: Final = "the daemon does not answer"
_WELL: Final = ("growing", "opening", "ready")
"""States of tiers that are well; the others are in docs/operations.md."""


def check_daemon(daemon: Daemon) -> Finding:
    check, status = Check("answers", DAEMON), daemon.status
    if status is None and _DENIED in daemon.silence:
        return check.fail(f"{daemon.endpoint}: {daemon.silence}", _OPERATE)
    if status is None:
        return check.fail(
            f"{daemon.endpoint}: {daemon.silence}",
            "start it (`systemctl start kvdepotd`), or name its socket with --endpoint; "
            "if it runs and hangs, its log says why, and kill -9 is safe",
        )
    shown = f"version {status.daemon_version}, pid {status.pid}, at {daemon.endpoint}"
    if not status.ready:
        return check.fail(f"{shown}: not ready: {status.reason or 'no reason given'}", "its log says what it waits for")
    if status.reason:
        return check.warn(f"{shown}: {status.reason}", "docs/operations.md has an entry for it")
    return check.ok(shown)


def check_tiers(daemon: Daemon) -> Iterator[Finding]:
    """Check what the daemon itself reports about its tiers: a bad disk, a mount that is gone."""
    for tier in daemon.status.tiers if daemon.status else ():
        check = Check("state", tier.name)
        shown = tier.state + (f": {tier.reason}" if tier.reason else "")
        fix = "docs/operations.md has an entry for it; for a disk also `dmesg` and `smartctl -a`"
        if tier.state == "offline":
            yield check.fail(shown, fix)
        elif tier.breaker not in ("", "closed"):
            yield check.fail(f"{tier.reason or 'disabled'}; breaker {tier.breaker}", fix)
        elif tier.state not in _WELL or tier.reason:
            yield check.warn(shown, fix)
        else:
            yield check.ok(shown)


def check_same_configuration(daemon: Daemon, settings: Settings) -> Finding:
    check, status = Check("configuration in use", DAEMON), daemon.status
    if status is None:
        return check.skipped(_SILENT)
    running = {tier.name: (tier.kind, tier.capacity_bytes) for tier in status.tiers}
    configured = {place.name: (place.kind, place.needed_bytes) for place in settings.places[1:]}
    configured[settings.ram.name] = settings.ram.kind, settings.capacity_bytes
    differing = sorted(name for name in running.keys() | configured.keys() if running.get(name) != configured.get(name))
    if f"unix://{daemon.endpoint.path}" not in settings.listen:
        return check.warn(
            f"{daemon.endpoint} is none of the sockets of {settings.file}",
            "name the daemon's own file with --config, or its socket with --endpoint",
        )
    if differing:
        return check.warn(
            f"the daemon runs with another kind or capacity of {', '.join(differing)} than {settings.file} has",
            "restart it, or name the file that it runs with by --config",
        )
    return check.ok(f"tiers as in {settings.file}")


def check_sockets(daemon: Daemon, settings: Settings | None, host: Host) -> Finding:
    check = Check("sockets", DAEMON)
    try:
        found = [host.path(path).stat() for path in (daemon.endpoint.path, daemon.endpoint.attach_path)]
    except PermissionError as error:
        return check.fail(f"{error.filename}: {_DENIED}", "let this user into the folder that holds it")
    except OSError as error:
        if daemon.status is None:
            return check.skipped(f"{error.filename}: {error.strerror}")
        return check.fail(f"{error.filename}: {error.strerror}", "the sockets are in one folder: mount all of it")
    if not all(stat.S_ISSOCK(one.st_mode) for one in found):
        return check.fail("what lies there is no socket", "remove it and restart the daemon")
    if daemon.attach_error:
        return check.fail(
            f"{daemon.endpoint.attach_path}: {daemon.attach_error}",
            _JOIN if daemon.attach_error == _DENIED else "restart the daemon: it makes both sockets again",
        )
    modes = {stat.S_IMODE(one.st_mode) for one in found}
    shown = f"mode {' and '.join(f'{mode:04o}' for mode in sorted(modes))}, group {found[0].st_gid}"
    if any(mode & stat.S_IWOTH for mode in modes):
        return check.warn(
            f"{shown}: every user of this machine can read and fill the arena", '[daemon] mode = "0660" and a group'
        )
    if len({one.st_gid for one in found}) > 1 or len(modes) > 1 or (settings and _differ(found[0], settings)):
        return check.warn(
            f"{shown}: not as [daemon] mode and group say",
            "restart the daemon; leave mode and group of its sockets",
        )
    return check.ok(shown)


def _differ(found: os.stat_result, settings: Settings) -> bool:
    return stat.S_IMODE(found.st_mode) != settings.mode or settings.group_id not in (-1, found.st_gid)


def check_descriptor(daemon: Daemon) -> Finding:
    """As an engine does it: one datagram each way, and the arena's descriptor with the answer."""
    check, attachment = Check("descriptor passing", DAEMON), daemon.attachment
    if attachment is None:
        return check.skipped(_why_not_attached(daemon))
    if attachment.trouble:
        return check.fail(
            attachment.trouble,
            "nothing between daemon and engines may take descriptors away (proxied sockets, some sandboxes): mount the "
            "sockets' folder itself; engines that cannot map the arena use transport = stream",
        )
    return check.ok(f"an arena of {size_text(attachment.arena_bytes)} came through")


def check_identity(daemon: Daemon) -> Finding:
    """Deaths of engines are proven by their pids, or on kernels from 6.5 by descriptors of them."""
    check, attachment, peer = Check("peer identity", DAEMON), daemon.attachment, daemon.peer
    if attachment is None or peer is None:
        return check.skipped(_why_not_attached(daemon))
    if attachment.trouble:
        return check.skipped("no attachment")
    if attachment.pids != (os.getpid(),):
        seen = " ".join(map(str, attachment.pids)) or "nobody"
        return check.warn(
            f"this is pid {os.getpid()}, the daemon sees {seen}: it is in another PID namespace, where deaths of"
            " engines are proven late, or not at all after it was restarted",
            "give the daemon the host's PID namespace: --pid=host, hostPID: true",
        )
    if peer.pid == 0:
        return check.warn(
            f"the daemon (uid {peer.uid}) is in a PID namespace that cannot be seen from here",
            "run this on the host, or next to the daemon, for the checks of its limits",
        )
    return check.ok(f"the daemon is pid {peer.pid}, uid {peer.uid}, and knows this process by its pid")


def check_metrics(settings: Settings, daemon: Daemon, answer: str) -> Finding:
    """`answer`: of `daemon.metrics_answer`; empty where there is nobody to ask."""
    check = Check("metrics", DAEMON)
    if not answer:
        return check.skipped("[daemon] metrics is off, or has port 0: a free one, which the log tells")
    shown = f"{settings.metrics}: {answer}"
    if answer == "kvdepot":
        return check.ok(shown)
    if answer == "free":
        if daemon.status is None:
            return check.ok(shown)
        return check.warn(f"{shown}: the daemon has another address", "restart it, or scrape where it listens")
    return check.fail(shown, "end what listens there, or set [daemon] metrics to an address that is free")


def _why_not_attached(daemon: Daemon) -> str:
    if daemon.status is None:
        return _SILENT
    return f"the attachment socket: {daemon.attach_error}" if daemon.attach_error else "not tried: --read-only"
