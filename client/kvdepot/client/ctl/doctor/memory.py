"""Checks of the machine's memory and limits against the arena."""

from __future__ import annotations

import configparser
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.doctor.findings import HOST, Check
from kvdepot.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdepot.client.ctl.doctor.findings import Finding
    from kvdepot.client.ctl.doctor.host import Host
    from kvdepot.client.ctl.doctor.settings import Settings

FILES_MIN: Final = 4096
"""Three descriptors an engine process, some a worker and a shared tier's files: enough for a node full of engines."""
SYSTEM_UID_MAX: Final = 999
"""Of users that are no persons, to whom logind's RemoveIPC does not apply (login.defs(5), SYS_UID_MAX)."""
KERNEL_MIN: Final = (5, 3)
KERNEL_GOOD: Final = (6, 5)
_WITHOUT_DAEMON: Final = "of this process, as the daemon does not run or cannot be seen"
_LOGIND: Final = "systemd/logind.conf"
_FOLDERS: Final = ("/usr/lib", "/usr/local/lib", "/run", "/etc")
"""Of logind.conf.d, the later before the earlier (logind.conf(5))."""


def check_memory(settings: Settings, host: Host) -> Finding:
    check, total_bytes = Check("memory", HOST), host.memory_bytes("MemTotal")
    if total_bytes is None:
        return check.skipped("/proc/meminfo cannot be read")
    shown = f"[ram] capacity is {size_text(settings.capacity_bytes)}, the machine has {size_text(total_bytes)}"
    if settings.capacity_bytes > total_bytes:
        return check.fail(shown, "lower [ram] capacity")
    if settings.capacity_bytes > total_bytes * 9 // 10:
        return check.warn(shown, "lower [ram] capacity: engines and the system need memory too")
    return check.ok(shown)


def check_memory_limit(settings: Settings, host: Host, process: str) -> Finding:
    """Check the memory limits of the daemon's cgroups, in which the arena's pages count."""
    check, limits = Check("cgroup", HOST), host.memory_limits(process)
    if not limits:
        return check.ok("no limit of memory")
    cgroup, limit_bytes = min(limits, key=lambda one: one[1])
    shown = f"{cgroup} allows {size_text(limit_bytes)}, [ram] capacity is {size_text(settings.capacity_bytes)}"
    if limit_bytes > settings.capacity_bytes:
        return check.ok(shown)
    fix = "raise MemoryMax of the unit (or the container's limit) above [ram] capacity, or lower that"
    if process == "self":
        return check.warn(f"{shown}; the cgroup is that {_WITHOUT_DAEMON}", fix)
    return check.fail(shown, fix)


def check_locked_memory(settings: Settings, host: Host, process: str) -> Finding:
    """Not locked, the arena works; it can be swapped out, and then loads wait for a disk."""
    check, limit = Check("memlock", HOST), host.limit(process, "Max locked memory")
    if limit is None:
        return check.skipped(f"/proc/{process}/limits cannot be read")
    if host.may_lock_memory(process):
        return check.ok("CAP_IPC_LOCK: no limit applies")
    arena = size_text(settings.ram.needed_bytes)
    if limit >= settings.ram.needed_bytes:
        return check.ok(f"at least the {arena} of the arena")
    shown = f"{size_text(int(limit))} may be locked, the arena has {arena}"
    if not host.memory_bytes("SwapTotal"):
        return check.ok(f"{shown}; there is no swap, so nothing is lost by that")
    if process == "self":
        shown = f"{shown}; the limit is that {_WITHOUT_DAEMON}"
    return check.warn(
        shown, "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container, or `memlock` in limits.conf"
    )


def check_open_files(host: Host, process: str) -> Finding:
    check, limit = Check("open files", HOST), host.limit(process, "Max open files")
    if limit is None:
        return check.skipped(f"/proc/{process}/limits cannot be read")
    if limit >= FILES_MIN:
        return check.ok(f"{limit:g} descriptors")
    whose = f" ({_WITHOUT_DAEMON})" if process == "self" else ""
    return check.warn(
        f"{limit:g} descriptors{whose}, fewer than {FILES_MIN}",
        "LimitNOFILE=65536 in the unit, --ulimit nofile=65536 for a container, or `nofile` in limits.conf",
    )


def check_kernel(host: Host) -> Finding:
    check, release = Check("kernel", HOST), (host.text("/proc/sys/kernel/osrelease") or "").strip()
    parts = release.split("-")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return check.skipped(f"{release!r} is no version")
    version = (int(parts[0]), int(parts[1]))
    if version < KERNEL_MIN:
        return check.fail(f"{release}: has no pidfd_open, the daemon does not run", "upgrade it to 6.5 or newer")
    if version < KERNEL_GOOD:
        return check.warn(f"{release}: works, less certain (docs/operations.md, Kernels)", "upgrade it to 6.5 or newer")
    return check.ok(release)


def check_remove_ipc(host: Host, daemon_uid: int | None) -> Finding:
    """Check RemoveIPC: logind removes a user's files in /dev/shm, also the arena, when its last session ends."""
    check = Check("RemoveIPC", HOST)
    if not host.path("/run/systemd/users").is_dir():
        return check.ok("no logind runs")
    if not removes_ipc(host):
        return check.ok("is off")
    if daemon_uid is None:
        return check.skipped("it is on, and no daemon answers, so its user is not known")
    if daemon_uid <= SYSTEM_UID_MAX:
        return check.ok(f"is on, and not for system users such as uid {daemon_uid}")
    return check.warn(
        f"is on: when uid {daemon_uid} logs out, logind removes the arena's file",
        "run the daemon as a system user (configs/systemd), or set RemoveIPC=no under [Login] in "
        "/etc/systemd/logind.conf.d/kvdepot.conf and restart systemd-logind",
    )


def removes_ipc(host: Host) -> bool:
    """As logind.conf(5) says: the main file, then drop-ins by name; of those with one name the folders' last."""
    value = "yes"  # what it is built with
    for file in _logind_files(host):
        parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True, delimiters=("=",))
        try:
            parser.read_string(host.text(file) or "")
        except configparser.Error:  # not a file that logind understands either
            continue
        value = parser.get("Login", "RemoveIPC", fallback=value) or value
    return value.strip().lower() in ("yes", "true", "on", "1", "y", "t")


def _logind_files(host: Host) -> Iterator[str]:
    main = [f"{folder}/{_LOGIND}" for folder in _FOLDERS if host.text(f"{folder}/{_LOGIND}") is not None]
    yield from main[-1:]
    by_name = {
        path.name: f"{folder}/{_LOGIND}.d/{path.name}"
        for folder in _FOLDERS
        for path in host.path(f"{folder}/{_LOGIND}.d").glob("*.conf")
    }
    yield from (by_name[name] for name in sorted(by_name))
