"""The proxies of processes that cannot map the arena: start, name, end, proven death (design.md#streams)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvdepot.core.errors import NoRoom, NotReady
from kvdepot.server.config.schema import STREAM_SUFFIX
from kvdepot.server.io.child import spawn
from kvdepot.server.io.stream_wire import OPENING, Opening
from kvdepot.server.platform.addresses import SOCKET_PATH_BYTES_MAX
from kvdepot.server.platform.identity import Owner
from kvdepot.server.platform.token_bucket import TokenBuckets

_MODULE: Final = "kvdepot.server.io.stream_proxy"
_USERS_MAX: Final = 4
"""So many times the proxies of one user are all that there may be: one takes some 40 MiB."""
STARTS_PER_SECOND: Final = 1.0
"""Of one user, after as many at once as its share is: each start costs 0.1 s of a core, and 40 MiB for a moment."""


class StreamProxies:
    """All proxies of this daemon, at most `count_max` of one uid. Everything runs on the loop's thread.

    `arena_fds` are of the tables and the generations, `parts` of the data. A proxy gets the part of its client's tenant
    (`part_of`).

    `tenants`: how many are configured. Each has an equal part of all proxies. `count` counts an event by its name.

    Their sockets lie next to the daemon's, of which the caller holds the lock.
    """

    def __init__(
        self,
        *,
        arena_fds: tuple[int, int],
        parts: Sequence[int],
        part_of: Callable[[str | None], int],
        count_max: int,
        mode: int,
        group_id: int,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
        count: Callable[[str], None],
        tenants: int = 0,
        starts_per_second: float = STARTS_PER_SECOND,
    ) -> None:
        self._tenants = tenants
        self._count = count
        self._starts = TokenBuckets(per_second=starts_per_second, burst=count_max, clock=loop.time)
        self._arena_fds = arena_fds
        self._parts = parts
        self._part_of = part_of
        self._mode = mode
        self._group_id = group_id
        self._loop = loop
        self._log = log
        self._proxies: dict[int, StreamProxy] = {}  # by number, until their death is proven

    @property
    def count_max(self) -> int:
        """How many proxies a user may have. It may start so many at once, too."""
        return self._starts.burst

    @count_max.setter
    def count_max(self, count_max: int) -> None:
        self._starts.burst = count_max  # proxies above a new limit continue

    def tidy(self, daemon_socket: Path) -> None:
        """Remove what the proxies of an earlier run have left next to this socket."""
        for path in daemon_socket.parent.iterdir():
            if path.name.startswith(f"{daemon_socket.name}{STREAM_SUFFIX}"):
                path.unlink(missing_ok=True)

    def start(self, daemon_socket: Path, owner: Owner) -> StreamProxy:
        """Start a proxy for a process of this owner.

        Raise NoRoom (too many), or NotReady (too many a second, no room on the host, or no path for its socket).
        """
        full = self._full(owner)
        numbers = range(_USERS_MAX * self.count_max)
        number = next((number for number in numbers if number not in self._proxies), None)
        if full or number is None:
            users = full or f"{len(self._proxies)} processes"
            self._count("refused_streams.share")
            raise NoRoom(
                f"{users} use streams already",
                advice="raise [sessions] streams, or let engines map the arena (transport = shm)",
            )
        path = daemon_socket.with_name(f"{daemon_socket.name}{STREAM_SUFFIX}{number}")
        name = f"{STREAM_SUFFIX}{number}".lstrip(".")
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise NotReady(f"{path} is longer than a socket's path can be", advice="use a shorter daemon.listen")
        if not self._starts.take(owner.uid):
            self._count("refused_streams.rate")
            raise NotReady(
                f"processes of {owner} start streams too often: {self.count_max} at once may, and then one a second",
                advice="find out why they attach again and again, or let them map the arena (transport = shm)",
            )
        part = self._part_of(owner.tenant)
        files = (*self._arena_fds, self._parts[part])
        try:
            process, lifeline, pidfd = spawn(
                _MODULE,
                lambda socket_fd: (*files, part, socket_fd, os.getpid(), self._mode, self._group_id, path),
                files,
            )
        except OSError as error:
            raise NotReady(f"no proxy can be started: {error}") from error
        proxy = self._proxies[number] = StreamProxy(name, path, process, lifeline, pidfd, owner)
        self._loop.add_reader(pidfd, self._died, number)
        return proxy

    def _full(self, owner: Owner) -> str:
        """Return who has its share of the proxies, the user or its tenant; empty: nobody."""
        of_user = sum(proxy.owner.uid == owner.uid for proxy in self._proxies.values())
        if of_user >= self.count_max:
            return f"{of_user} processes of {owner}"
        of_tenant = sum(proxy.owner.tenant == owner.tenant for proxy in self._proxies.values())
        if self._tenants and of_tenant >= max(_USERS_MAX * self.count_max // self._tenants, 1):
            return f"{of_tenant} processes of {owner.party_name}"
        return ""

    def close(self) -> None:
        """End them all. Their deaths are not waited for: they stand in the attachment table."""
        for proxy in self._proxies.values():
            proxy.kill()
            self._loop.remove_reader(proxy.pidfd)
            proxy.forget()
        self._proxies.clear()

    def _died(self, number: int) -> None:
        proxy = self._proxies.pop(number)
        self._loop.remove_reader(proxy.pidfd)
        status = proxy.reap()
        proxy.forget()
        if not proxy.killed:
            self._log.warning("proxy ended: %s, pid %d, status %d", proxy.name, proxy.pid, status)


class StreamProxy:
    """One proxy. `lifeline` is the end that the client gets; `name` is its socket's name after the daemon's."""

    def __init__(
        self, name: str, path: Path, process: subprocess.Popen[bytes], lifeline: socket.socket, pidfd: int, owner: Owner
    ) -> None:
        self.name = name
        self.owner = owner  # of the process that it serves
        self.lifeline = lifeline
        self.pidfd = pidfd  # this object's own
        self.killed = False
        self._path = path
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, attachment: int, session: bytes) -> None:
        """Tell it whom it serves. The caller passes `lifeline` on and closes it."""
        self.lifeline.send(OPENING.pack(Opening(attachment, session)))

    def kill(self) -> None:
        """Send SIGKILL unless the proxy is dead. Do not wait."""
        if self._process.poll() is None:
            self.killed = True
            self._process.kill()

    def reap(self) -> int:
        """Return the exit status of a dead proxy."""
        return self._process.wait()

    def forget(self) -> None:
        """Remove its socket, and let go of its descriptors."""
        self.lifeline.close()
        os.close(self.pidfd)
        self._path.unlink(missing_ok=True)
