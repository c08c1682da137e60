"""What Linux has for a network of its own in one process: namespaces and interfaces (`ip(8)` is not needed).

All of it ends with the last process that has it open, so nothing stays behind, whatever is killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
_CLONE_NEWNS: Final = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_SYS, _CGROUP = b"/sys", b"/sys/fs/cgroup"
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8916, 0x891C, 0x8922, 0x8943
_IFF_UP: Final = 1
_NAME: Final = b"wire0"
_libc: Final = ctypes.CDLL(None, use_errno=True)


def new_namespace() -> int:
    """Move the calling thread into a new network namespace. Return a descriptor of it. Raise OSError."""
    _checked(_libc.unshare(_CLONE_NEWNET), "unshare")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def enter(namespace: str) -> None:
    """Move the calling thread, and all that it starts, into the namespace that this path is. Raise OSError."""
    fd = os.open(namespace, os.O_RDONLY)
    try:
        _checked(_libc.setns(fd, _CLONE_NEWNET), "setns")
    finally:
        os.close(fd)


def see_interfaces() -> None:
    """Let this process, and all that it starts, see the interfaces of its namespace in /sys. Raise OSError.

    UCX looks for them there. Other processes see what they saw before.
    """
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare")
    cgroup = os.open(_CGROUP, os.O_PATH)
    try:
        _checked(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
        _checked(_libc.mount(b"sysfs", _SYS, b"sysfs", 0, None), "mount")
        _checked(_libc.mount(b"/proc/self/fd/%d" % cgroup, _CGROUP, None, _MS_BIND | _MS_REC, None), "mount")
    finally:
        os.close(cgroup)


def _checked(code: int, call: str) -> None:
    if code:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


def new_interface(address: str, mtu: int) -> int:
    """Make an interface of the calling thread's namespace, and bring loopback up. Raise OSError.

    Return a descriptor: each read takes an IP packet that was sent, and each write brings one.
    """
    tun = os.open(Path("/dev/net/tun"), os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", _NAME, _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFADDR, _of_address(address))
        fcntl.ioctl(control, _SIOCSIFNETMASK, _of_address("255.255.255.0"))
        fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", _NAME, mtu))
        fcntl.ioctl(control, _SIOCSIFTXQLEN, struct.pack("16si20x", _NAME, 2000))
        for name in (_NAME, b"lo"):
            flags = struct.unpack("16xH22x", fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH22x", name, 0)))[0]
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", name, flags | _IFF_UP))
    return tun


def _of_address(address: str) -> bytes:
    return struct.pack("16sHH4s16x", _NAME, socket.AF_INET, 0, socket.inet_aton(address))
