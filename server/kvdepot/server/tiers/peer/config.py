"""What a peer tier is configured with, in addition to what a shared tier is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvdepot.server.io.peer_wire import PeerSettings
from kvdepot.server.tiers.peer.choice import EXCHANGE_SECONDS
from kvdepot.server.tiers.peer.places import DnsName, PlacesFile
from kvdepot.server.tiers.peer.scout import SUMMARY_SECONDS
from kvdepot.server.tiers.shared.config import SharedConfig

FIND_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class PeerConfig(SharedConfig):
    """`path` is the URL, for people: no file is below it. `capacity_bytes` bounds what this node knows of."""

    touches: bool = False
    gives_up: bool = False  # a network fails, and says nothing of an object
    kind: str = "peer"
    peer: PeerSettings = field(default_factory=lambda: PeerSettings("", 0, "", "", "", (), 10.0))
    places: DnsName | PlacesFile | None = None  # of several peers: `peer` has neither host nor port
    peers_max: int = 1
    find_seconds: float = FIND_SECONDS  # between two looks at `places`
    summary_seconds: float = SUMMARY_SECONDS  # between two questions for the summary of a place
    exchange_seconds: float = EXCHANGE_SECONDS  # between two exchanges of a peer for a more useful one
