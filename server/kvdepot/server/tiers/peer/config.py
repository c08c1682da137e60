"""What a peer tier is configured with, in addition to what a shared tier is."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdepot.server.io.peer_wire import PeerSettings
from kvdepot.server.tiers.shared.config import SharedConfig


@dataclass(frozen=True, slots=True)
class PeerConfig(SharedConfig):
    """`path` is the URL, for people: no file is below it. `capacity_bytes` bounds what this node knows of."""

    touches: bool = False
    kind: str = "peer"
    peer: PeerSettings = field(default_factory=lambda: PeerSettings("", 0, "", "", "", (), 10.0))
