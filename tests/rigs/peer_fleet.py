"""Daemons that are peers of each other on this host, with certificates of one authority."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvdepot.core.report import TierStatus

from tests.rigs import ports
from tests.rigs.certificates import Authority, Files
from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, payload_of, status_of
from tests.rigs.stopping import stop

PEER: Final = "URI:spiffe://fleet/kvdepot"
RAM: Final = "512MiB"
LENDING: Final = "lend_nixl = true\n"
LENT: Final = "RAM is lent over NIXL"
"""In the log of a source that lends, from then on."""
BORROWING: Final = 'lane = "nixl"\n'


def peer_tiers(urls: Iterable[str], deadline: str, of_tier: str = "") -> str:
    """Return a peer tier for each of these URLs. `of_tier`: further lines of each."""
    return "".join(
        f'[[tier]]\nname = "peer-{number}"\nkind = "peer"\nurl = "{url}"\ncapacity = "64MiB"\n'
        f'deadline = "{deadline}"\n{of_tier}\n'
        for number, url in enumerate(urls)
    )


def filled(engine: RawEngine, daemon: DaemonProcess, prompt: str) -> list[list[bytes]]:
    """Store until most of RAM is in use, from its start on, and with it whatever was given back. Return the prompts."""
    prompts: list[list[bytes]] = []
    ready_bytes = status_of(daemon.socket).tiers[0].ready_bytes
    while status_of(daemon.socket).tiers[0].used_bytes < 0.8 * ready_bytes:
        prompts.append(keys_of(f"{prompt}{len(prompts)}", 32))
        engine.store(prompts[-1])
    return prompts


class Fleet:
    """`close` ends all daemons that were made."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.files = self.authority.issue("peer", PEER)
        self.daemons: list[DaemonProcess] = []
        self._ports: list[socket.socket] = []

    def tls(self, files: Files | None = None, names: tuple[str, ...] = (PEER,)) -> str:
        files = files or self.files
        return (
            f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"\nclient_ca = "{self.authority.pem}"\n'
            f"allow_peers = {json.dumps(names)}\n"
        )

    def source(
        self, *, port: int = 0, more: str = "", tls: str = "", lends: bool = False, ram: str = RAM
    ) -> DaemonProcess:  # fmt: skip
        """Start a daemon that listens for peers. `lends`: over NIXL, too. It may not be ready to when this returns."""
        listen = f'[daemon]\nlisten_peers = "tcp://127.0.0.1:{port}"\n{LENDING if lends else ""}'
        config = f"{listen}{tls or self.tls()}{more}"
        return self._start(config, ram)

    def reader(
        self,
        *ports: int,
        deadline: str = "10s",
        tls: str = "",
        ready: bool = True,
        more: str = "",
        of_tier: str = "",
        host: str = "127.0.0.1",
        url: str = "",
        ram: str = RAM,
        under: tuple[str, ...] = (),
    ) -> DaemonProcess:
        """Start a daemon with a peer tier for each port, or with one for the URL of several peers.

        `under`: a module that runs the daemon's.
        """
        urls = [url] if url else [f"tcp://{host}:{port}" for port in ports]
        tiers = peer_tiers(urls, deadline, of_tier)
        breaker = '[breaker]\nfailures = 3\nprobe_every = "1s"\n'
        daemon = self._start(f"{tls or self.tls()}{tiers}{breaker}{more}", ram, under)
        for number in range(len(urls) if ready else 0):
            wait_until(lambda: tier_of(daemon, number).state == "ready", lambda: f"ready: {tier_of(daemon, number)}")  # noqa: B023
        return daemon

    def _start(self, config: str, ram: str = RAM, under: tuple[str, ...] = ()) -> DaemonProcess:
        daemon = DaemonProcess(ram=ram, config=config, under=under)
        self.daemons.append(daemon)
        return daemon.start()

    def port(self) -> int:
        """Return a port for a source that ends and comes back."""
        self._ports.append(ports.held())
        return ports.port_of(self._ports[-1])

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.close()
        for held in self._ports:
            held.close()


def port_of(source: DaemonProcess) -> int:
    """Return where the latest run of a daemon listens for peers."""
    return int(re.findall(r"peers connect to tcp://\S*?:(\d+)", source.log)[-1])


def chosen_by(reader: DaemonProcess) -> dict[int, str]:
    """Return the peers of the reader's tier by port, and why each was chosen, as its log says."""
    line = re.findall(r"tier peer-0: peers: (.*)", reader.log)[-1]
    return {int(port): why for port, why in re.findall(r":(\d+) \((by \w+)", line)}


def tier_of(daemon: DaemonProcess, number: int = 0) -> TierStatus:
    return status_of(daemon.socket).tiers[1 + number]


def counter(daemon: DaemonProcess, name: str) -> float:
    return status_of(daemon.socket).counters.get(name, 0.0)


def located(engine: RawEngine, keys: list[bytes]) -> None:
    """Wait until all are found: a lookup that takes longer than a Locate waits is for the next one."""
    wait_until(lambda: engine.locate(keys) == len(keys) * CHUNK_TOKENS, "all of them are found")


def served_again(engine: RawEngine, keys: list[bytes]) -> list[bytes]:
    """Ask until a load is served, and return it: of a source that has come back, the first answers may be too early."""
    loaded: list[bytes] = []

    def served() -> bool:
        if engine.locate(keys) == len(keys) * CHUNK_TOKENS:
            loaded[:] = engine.load(keys) or []
        return bool(loaded)

    wait_until(served, "it is served again")
    return loaded


@contextmanager
def stopped(daemon: DaemonProcess) -> Iterator[None]:
    """Stop a daemon and its child processes for a while."""
    pids = [daemon.pid, *children(daemon.pid)]
    for pid in pids:
        stop(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def payloads(keys: list[bytes]) -> list[bytes]:
    return [payload_of(key) for key in keys]


def stored(daemon: DaemonProcess, keys: list[bytes]) -> None:
    """Store these, and wait until each has a checksum."""
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        wait_until(lambda: status_of(daemon.socket).tiers[0].pending_checksums == 0, "all have checksums")
