"""Sources that may lie, the file that lists them, and a tier that has them as peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvdepot.core.objectfile import ObjectName
from kvdepot.server.tiers.conformance_harness import name_of, payload_of
from kvdepot.server.tiers.peer.places import PlacesFile

from tests.fakes.lying_source import LyingSource
from tests.rigs.certificates import Authority
from tests.rigs.peer_fleet import PEER
from tests.rigs.peer_live import PeerLive

NAMES = [name_of(number) for number in range(1, 33)]


class Sources:
    """Sources of which each may have any of `NAMES`, and the file that lists them."""

    def __init__(self, folder: Path, stack: ExitStack, count: int) -> None:
        self.folder = folder
        authority = Authority(folder)
        files = authority.issue("peer", PEER)
        payload = {name.key: payload_of(name) for name in NAMES}
        self.each = [stack.enter_context(LyingSource(files, authority.pem, payload.__getitem__)) for _ in range(count)]
        for source in self.each:
            source.namespace = NAMES[0].namespace
        self.file = folder / "peers"
        self.list(*self.each)

    def list(self, *sources: LyingSource) -> None:
        self.write("".join(f"127.0.0.1:{source.port}\n" for source in sources))

    def write(self, text: str) -> None:
        """Have the file say this, at once: one that is being written names no peer for a moment."""
        written = self.file.with_suffix(".new")
        written.write_text(text)
        written.rename(self.file)

    def at(self, ports: Collection[int]) -> tuple[LyingSource, ...]:
        return tuple(source for source in self.each if source.port in ports)


def with_sources(
    folder: Path, test: Callable[[Sources, PeerLive], Awaitable[None]], *, count: int = 2, peers_max: int = 4,
    places: Callable[[Path], PlacesFile] = PlacesFile, **more: Any,
) -> None:  # fmt: skip
    """Run a test with so many sources, and a tier that asks at most `peers_max` of them. `places` reads the list."""

    async def run(sources: Sources) -> None:
        live = PeerLive(folder, places=places(sources.file), peers_max=peers_max, find_seconds=0.05, **more)
        try:
            await test(sources, live)
        finally:
            await live.close()

    with ExitStack() as stack:
        asyncio.run(run(Sources(folder, stack, count)))


async def found(live: PeerLive, *names: ObjectName) -> dict[ObjectName, int]:
    """Look up until all are found: what was absent a moment ago is not asked for again at once."""
    handles: dict[ObjectName, int] = {}
    while set(handles) != set(names):
        handles.update(await live.look_up(*(name for name in names if name not in handles)))
        await asyncio.sleep(0)
    return handles


async def readable(live: PeerLive) -> None:
    await live.until(lambda: live.tier.readable and not live.tier.status().reason, "it serves")
