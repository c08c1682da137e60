"""systemd's side of a service: notifications (sd_notify(3)) and kept descriptors (sd_listen_fds(3)).

A notification is one datagram of KEY=value lines to $NOTIFY_SOCKET. Descriptors that were sent with FDSTORE=1 come back
at the service's next start, from number 3 on, with names in $LISTEN_FDNAMES.
"""

from __future__ import annotations

import array
import math
import os
import socket
from collections.abc import Callable, MutableMapping

_FIRST_DESCRIPTOR = 3
_PINGS_PER_LIMIT = 4
"""Some pings may be late, or lost in a full queue, before the watchdog takes the daemon for hung."""


class ServiceNotifier:
    """Silent when there is no socket. Never blocks and never raises: the daemon lives without its supervisor.

    The supervisor's queue is full now and then. What has to arrive waits for room: READY=1, without which a start
    fails, and descriptors, without which RAM is lost. A ping does not.
    """

    def __init__(self, environ: MutableMapping[str, str], *, pid: int, clock: Callable[[], float]) -> None:
        """Create a notifier. `clock` returns monotonic seconds."""
        self._address = environ.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = f"\0{self._address[1:]}"
        self._clock = clock
        self._ping_seconds = _watchdog_seconds(environ, pid) / _PINGS_PER_LIMIT  # 0: no watchdog
        self._ping_at = -math.inf
        self._unsent: dict[str, tuple[str, tuple[int, ...]]] = {}  # by what they are about: the last one of each

    @property
    def is_heard(self) -> bool:
        """Whether there is a supervisor."""
        return bool(self._address)

    def __call__(self, state: str) -> None:
        self._tell(state.partition("=")[0], state)

    def alive(self) -> None:
        """Send what waits, and a ping to the watchdog if one is due.

        Called often, by the code that hangs if the daemon hangs.
        """
        self._send_waiting()
        now = self._clock()
        if self._ping_seconds and now - self._ping_at >= self._ping_seconds:
            self._ping_at = now
            self._send("WATCHDOG=1", ())

    def keep(self, name: str, *descriptors: int) -> None:
        """Have these come back at the next start under this name, instead of what was kept under it.

        They stay open for as long as this process lives.
        """
        for state, of_it in ((f"FDSTOREREMOVE=1\nFDNAME={name}", ()), (f"FDSTORE=1\nFDNAME={name}", descriptors)):
            self._tell(state, state, of_it)

    def _tell(self, about: str, state: str, descriptors: tuple[int, ...] = ()) -> None:
        """Send this after all that waits."""
        self._unsent.pop(about, None)
        self._unsent[about] = state, descriptors
        self._send_waiting()

    def _send_waiting(self) -> None:
        for about, message in list(self._unsent.items()):
            if not self._send(*message):
                return
            del self._unsent[about]

    def _send(self, state: str, descriptors: tuple[int, ...]) -> bool:
        """Return False if the supervisor's queue has no room now."""
        if not self._address:
            return True
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendmsg([state.encode()], rights, 0, self._address)
        except BlockingIOError:
            return False
        except OSError:  # nobody is there
            pass
        return True


def take_kept(environ: MutableMapping[str, str], *, pid: int, names: tuple[str, ...]) -> tuple[list[int], ...]:
    """Return the descriptors that systemd kept under each of `names`; close any others.

    The caller owns them. The variables are deleted, so that no child takes its own descriptors for them.
    """
    count = _number(environ.pop("LISTEN_FDS", ""))
    given = environ.pop("LISTEN_FDNAMES", "").split(":")
    kept: dict[str, list[int]] = {name: [] for name in names}
    if _number(environ.pop("LISTEN_PID", "")) == pid:
        for place, descriptor in enumerate(range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + count)):
            if place < len(given) and given[place] in kept:
                os.set_inheritable(descriptor, False)
                kept[given[place]].append(descriptor)
            else:
                os.close(descriptor)
    return tuple(kept.values())


def _watchdog_seconds(environ: MutableMapping[str, str], pid: int) -> float:
    """Return the watchdog's interval; 0 without one, or if it watches another process."""
    addressee = environ.get("WATCHDOG_PID", "")
    if addressee and _number(addressee) != pid:
        return 0.0
    return _number(environ.get("WATCHDOG_USEC", "")) / 1e6


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
