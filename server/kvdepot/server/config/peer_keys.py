"""The keys of a `[[tier]]` that only a peer has, and those that it cannot have (ADR 78)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from kvdepot.server.io.peer_wire import Lane
from kvdepot.server.platform.addresses import DNS, FILE, TCP, host_and_port, is_peers_url
from kvdepot.server.tiers.peer.places import DnsName, PlacesFile
from pydantic import BaseModel, Field

PEER_KIND: Final = "peer"
PEERS_MAX: Final = 4
_NOT_OF_PEERS: Final = (
    "path", "write", "drive_writes_per_day", "write_budget", "read_budget", "request_budget", "codec", "fsync",
    "key_file", "prefix", "endpoint", "region", "credentials_file", "allow_http", "unconditional", "sign_payload",
    "high_watermark", "low_watermark",
)  # fmt: skip


class PeerKeys(BaseModel):
    """A part of `[[tier]]`."""

    kind: str
    url: str
    tenant: str = ""
    lane: Annotated[Lane, Field(strict=False)] = Lane.STREAM
    peers_max: int = Field(default=PEERS_MAX, ge=1, le=32)

    @property
    def peer_address(self) -> tuple[str, int]:
        """Return host and port of the only peer."""
        return host_and_port(self.url.removeprefix(TCP))

    @property
    def peer_places(self) -> DnsName | PlacesFile | None:
        """Return where the peers are found; None where `url` has the only one."""
        if self.url.startswith(FILE):
            return PlacesFile(Path(self.url.removeprefix(FILE)))
        return DnsName(*host_and_port(self.url.removeprefix(DNS))) if self.url.startswith(DNS) else None

    @property
    def peers_at_most(self) -> int:
        """Return how many peers the tier has at once."""
        return 1 if self.url.startswith(TCP) else self.peers_max

    def check_peer(self) -> None:
        """Raise ValueError if another kind of tier has a key of peers, or a peer has a key of tiers that are written.

        on_root_filesystem is refused for every kind but one.
        """
        if self.kind != PEER_KIND:
            defaults = {"tenant": "", "lane": Lane.STREAM, "peers_max": PEERS_MAX}
            if own := [name for name, default in defaults.items() if getattr(self, name) != default]:
                raise ValueError(f'{own[0]} needs kind = "{PEER_KIND}"')
            return
        if given := [name for name in _NOT_OF_PEERS if name in self.model_fields_set]:
            raise ValueError(f'{given[0]} is no key of kind = "{PEER_KIND}": nothing is written there')
        if not is_peers_url(self.url):
            raise ValueError(
                f'kind = "{PEER_KIND}" needs url = "{TCP}host:port", where the peer listens for peers, '
                f'"{DNS}name:port" or "{FILE}/absolute/path" for several'
            )
        if self.url.startswith(TCP) and self.peers_max != PEERS_MAX:
            raise ValueError(f'peers_max needs url = "{DNS}name:port" or "{FILE}/absolute/path": {TCP} is one peer')
