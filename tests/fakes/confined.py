"""What a unit file takes from its service: `python -m tests.fakes.confined UNIT MODULE ARGUMENTS`.

Runs MODULE in this process with the unit's system call filter, without capabilities, and
where the kernel knows how without memory that is writable and executable. systemd only says what its groups hold.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_SCMP_ACT_ALLOW = 0x7FFF0000
_SCMP_ACT_ERRNO_EPERM = 0x00050001
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_MDWE = 24, 38, 65
_CAPABILITIES_MAX = 64


def settings(unit: Path, key: str) -> list[str]:
    """The values of a key, in order."""
    lines = (line.partition("=") for line in unit.read_text().splitlines())
    return [value.strip() for name, _, value in lines if name == key]


def calls(group: str) -> Iterator[str]:
    """Names of the system calls that one word of a filter stands for."""
    if not group.startswith("@"):
        yield group
        return
    found = subprocess.run(["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True)
    for line in found.stdout.splitlines()[1:]:
        if line.strip() and not line.strip().startswith("#"):
            yield from calls(line.strip())


def allowed(filters: Iterable[str]) -> set[str]:
    """What a list of SystemCallFilter= values lets through (systemd.exec(5))."""
    found = set(calls("@default"))
    for words in filters:
        named = {call for word in words.removeprefix("~").split() for call in calls(word)}
        found = found - named if words.startswith("~") else found | named
    return found


def confine(unit: Path) -> None:
    """This process, and what it executes from now on."""
    names = allowed(settings(unit, "SystemCallFilter"))
    libc = ctypes.CDLL(None, use_errno=True)
    assert settings(unit, "CapabilityBoundingSet") == [""]
    for capability in range(_CAPABILITIES_MAX):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    assert not libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if settings(unit, "MemoryDenyWriteExecute") == ["yes"]:
        libc.prctl(_PR_SET_MDWE, 1, 0, 0, 0)  # Linux 6.3; before, systemd does it by a filter
    seccomp = ctypes.CDLL(ctypes.util.find_library("seccomp"))
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(_SCMP_ACT_ERRNO_EPERM))
    for name in names:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # others are of other architectures
            assert not seccomp.seccomp_rule_add(context, ctypes.c_uint32(_SCMP_ACT_ALLOW), number, 0)
    assert not seccomp.seccomp_load(context)


if __name__ == "__main__":
    confine(Path(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])
