"""The keys of a `[[tier]]` that only a peer has, and those that it cannot have (ADR 78)."""

from __future__ import annotations

from typing import Annotated, Final

from kvdepot.server.config.addresses import TCP, host_and_port
from kvdepot.server.io.peer_wire import Lane
from pydantic import BaseModel, Field

PEER_KIND: Final = "peer"
_NOT_OF_PEERS: Final = (
    "path", "write", "drive_writes_per_day", "write_budget", "read_budget", "request_budget", "codec", "fsync",
    "key_file", "prefix", "endpoint", "region", "credentials_file", "allow_http", "unconditional", "high_watermark",
    "low_watermark",
)  # fmt: skip


class PeerKeys(BaseModel):
    """A part of `[[tier]]`."""

    kind: str
    url: str
    tenant: str = ""
    lane: Annotated[Lane, Field(strict=False)] = Lane.STREAM

    @property
    def peer_address(self) -> tuple[str, int]:
        """Return host and port of a peer."""
        return host_and_port(self.url.removeprefix(TCP))

    def check_peer(self) -> None:
        """Raise ValueError if another kind of tier has a key of peers, or a peer has a key of tiers that are written.

        on_root_filesystem is refused for every kind but one.
        """
        if self.kind != PEER_KIND:
            if self.tenant or self.lane is not Lane.STREAM:
                raise ValueError(f'{"tenant" if self.tenant else "lane"} needs kind = "{PEER_KIND}"')
            return
        if given := [name for name in _NOT_OF_PEERS if name in self.model_fields_set]:
            raise ValueError(f'{given[0]} is no key of kind = "{PEER_KIND}": nothing is written there')
        if not self.url.startswith(TCP):
            raise ValueError(f'kind = "{PEER_KIND}" needs url = "{TCP}host:port", where the peer listens for peers')
