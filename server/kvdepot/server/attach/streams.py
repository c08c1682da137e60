"""The proxies of processes that cannot map the arena: start, name, end, proven death (design.md#streams)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
from pathlib import Path
from typing import Final

from kvdepot.core.errors import NoRoom, NotReady
from kvdepot.server.config.schema import SOCKET_PATH_BYTES_MAX, STREAM_SUFFIX
from kvdepot.server.io.child import spawn
from kvdepot.server.io.stream_wire import OPENING, Opening
from kvdepot.server.platform.identity import Owner

_MODULE: Final = "kvdepot.server.io.stream_proxy"
_USERS_MAX: Final = 4
"""So many times the proxies of one user are all that there may be: one takes some 40 MiB."""


class StreamProxies:
    """All proxies of this daemon, at most `count_max` of one uid. Everything runs on the loop's thread.

    `tenants`: how many are configured. Each has an equal part of all proxies.

    Their sockets lie beside the daemon's, which the caller holds the lock of.
    """

    def __init__(
        self,
        *,
        arena_fds: tuple[int, int],
        count_max: int,
        mode: int,
        group_id: int,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
        tenants: int = 0,
    ) -> None:
        self._tenants = tenants
        self._arena_fds = arena_fds  # of the tables, of the data
        self.count_max = count_max  # those above a new one go on
        self._mode = mode
        self._group_id = group_id
        self._loop = loop
        self._log = log
        self._proxies: dict[int, StreamProxy] = {}  # by number, until their death is proven

    def tidy(self, daemon_socket: Path) -> None:
        """Remove what the proxies of an earlier run have left beside this socket."""
        for path in daemon_socket.parent.iterdir():
            if path.name.startswith(f"{daemon_socket.name}{STREAM_SUFFIX}"):
                path.unlink(missing_ok=True)

    def start(self, daemon_socket: Path, owner: Owner) -> StreamProxy:
        """Start a proxy for a process of this owner.

        Raise NoRoom (too many), or NotReady (no room on the host, or no path for its socket).
        """
        full = self._full(owner)
        numbers = range(_USERS_MAX * self.count_max)
        number = next((number for number in numbers if number not in self._proxies), None)
        if full or number is None:
            users = full or f"{len(self._proxies)} processes"
            raise NoRoom(
                f"{users} use streams already",
                advice="raise [sessions] streams, or let engines map the arena (transport = shm)",
            )
        path = daemon_socket.with_name(f"{daemon_socket.name}{STREAM_SUFFIX}{number}")
        name = f"{STREAM_SUFFIX}{number}".lstrip(".")
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise NotReady(f"{path} is longer than a socket's path can be", advice="use a shorter daemon.listen")
        try:
            process, lifeline, pidfd = spawn(
                _MODULE,
                lambda socket_fd: (*self._arena_fds, socket_fd, os.getpid(), self._mode, self._group_id, path),
                self._arena_fds,
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
    """One proxy. `lifeline` is the end that the client gets; `name` is its socket's name behind the daemon's."""

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
