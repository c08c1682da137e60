"""Daemons that are peers of each other, each in a network namespace of its own (`tests.rigs.network`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.network import Network
from tests.rigs.patience import wait_until
from tests.rigs.peer_fleet import BORROWING, LENDING, RAM, Fleet, peer_tiers, tier_of

PORT: Final = 7448
"""Of all sources: each has an address of its own."""
LARGE_RAM: Final = "864MiB"
"""Of a reader whose workers take more of it: over NIXL, or of up to four peers and a guest."""


class PeerNetwork(Fleet):
    """`close` ends all daemons. The network is the caller's."""

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder)
        self.folder = folder
        self.network = network

    def source_at(
        self, node: int, *, ram: str = RAM, cpus: Iterable[int] = (), more: str = "", lends: bool = False
    ) -> DaemonProcess:
        """Start a daemon that listens for peers. It listens at the same place after each restart.

        `lends`: over NIXL, too.
        """
        return self._at(node, f"[daemon]\n{self.listening(node, lends=lends)}{self.tls()}{more}", ram, cpus)

    def reader_at(
        self, node: int, *sources: int, deadline: str = "2s", ram: str = RAM, cpus: Iterable[int] = (),
        breaker: str = 'failures = 3\nprobe_every = "1s"\n', more: str = "", borrows: bool = False,
        listed: bool = False,
    ) -> DaemonProcess:  # fmt: skip
        """Start a daemon with a peer tier for each of these nodes. Return when all tiers are ready.

        `borrows`: over NIXL. `listed`: with one tier instead, whose peers are in a file.
        """
        tiers = self.tiers(node, *sources, deadline=deadline, borrows=borrows, listed=listed)
        ram = LARGE_RAM if borrows or listed else ram
        daemon = self._at(node, f"{self.tls()}{tiers}[breaker]\n{breaker}{more}", ram, cpus)
        wait_until(lambda: self.ready(daemon, 1 if listed else len(sources)), "all its tiers are ready")
        return daemon

    def program(self, node: int) -> tuple[str, ...]:
        """Return what runs a daemon in a node, for `demo.daemon.Daemon`.

        By TCP alone: else UCX would find out that all nodes are on one host, and use no network. Waits are those of
        `tests.fakes.peer_waits`.
        """
        program = self.network.program(node)
        return ("env", "UCX_TLS=tcp", sys.executable, "-m", "tests.fakes.peer_waits", *program)

    def listening(self, node: int, *, lends: bool) -> str:
        """Return lines of the table `[daemon]` of a source."""
        return f'listen_peers = "tcp://{self.network.address(node)}:{PORT}"\n{LENDING if lends else ""}'

    def tiers(self, node: int, *sources: int, deadline: str, borrows: bool, listed: bool = False) -> str:
        """Return the tables of a reader's tiers, one for each of these nodes. `listed`: one for a file with all."""
        places = [f"{self.network.address(source)}:{PORT}" for source in sources]
        urls = [f"tcp://{place}" for place in places]
        if listed:
            file = self.folder / f"peers-of-{node}"
            file.write_text("\n".join(places))
            urls = [f"file://{file}"]
        return peer_tiers(urls, deadline, BORROWING if borrows else "")

    @staticmethod
    def ready(daemon: DaemonProcess, tiers: int) -> bool:
        """Return whether its peers can be read, all of them."""
        found = [tier_of(daemon, number) for number in range(tiers)]
        return all((one.state, one.breaker, one.reason) == ("ready", "closed", "") for one in found)

    def _at(self, node: int, config: str, ram: str, cpus: Iterable[int]) -> DaemonProcess:
        daemon = DaemonProcess(ram=ram, config=config, program=self.network.program(node, cpus))
        self.daemons.append(daemon)
        return daemon.start()
