"""systemd's notification protocol (sd_notify(3)): one datagram of KEY=value to $NOTIFY_SOCKET."""

from __future__ import annotations

import contextlib
import socket


class ServiceNotifier:
    """Silent when there is no socket. Never blocks and never raises: the daemon lives without its supervisor."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        if address and address.startswith("@"):
            self._address = f"\0{address[1:]}"

    def __call__(self, state: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), self._address)
