"""The table `[daemon]`: where the daemon listens, and what it tells."""

from __future__ import annotations

import grp
from pathlib import Path

from kvdepot.server.config.table import Table
from kvdepot.server.platform.addresses import TCP, check_listen_url, check_url, host_and_port
from pydantic import Field, field_validator

DEFAULT_SOCKET = "unix:///run/kvdepot/kvdepot.sock"
ADMIN_SUFFIX = ".admin"
RPC_SUFFIX = ".rpc"
"""Suffix of the socket on which gRPC gets operators' connections, behind the admin sockets."""


class DaemonTable(Table):
    """The table `[daemon]`."""

    listen: list[str] = Field(default=[DEFAULT_SOCKET], min_length=1, max_length=8)
    listen_peers: str = ""
    lend_nixl: bool = False
    lend_disks: bool = True
    metrics: str = "127.0.0.1:9421"  # empty: off
    page: bool = True
    mode: str = Field(default="0660", pattern=r"^0?[0-7]{3}$")
    group: str = ""
    admin: str = ""
    admin_mode: str = Field(default="0600", pattern=r"^0?[0-7]{3}$")
    admin_group: str = ""
    state: str = ""

    @field_validator("admin")
    @classmethod
    def _check_admin(cls, url: str) -> str:
        if url:
            check_url(url)
        return url

    @field_validator("state")
    @classmethod
    def _check_state(cls, path: str) -> str:
        if path and (not Path(path).is_absolute() or path.endswith("/")):
            raise ValueError(f"expected the absolute path of a file, got {path!r}")
        return path

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, urls: list[str]) -> list[str]:
        for url in urls:
            check_listen_url(url)
        if len(set(urls)) != len(urls):
            raise ValueError(f"expected different addresses, got one twice: {urls}")
        if all(url.startswith(TCP) for url in urls):
            raise ValueError("expected a unix:// address too: engines of this host need it")
        return urls

    @field_validator("listen_peers")
    @classmethod
    def _check_listen_peers(cls, url: str) -> str:
        if url and not url.startswith(TCP):
            raise ValueError(f"expected {TCP}host:port, got {url!r}")
        if url:
            host_and_port(url.removeprefix(TCP))
        return url

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, address: str) -> str:
        if address:
            host_and_port(address)
        return address

    @property
    def sockets(self) -> tuple[Path, ...]:
        return tuple(Path(url.removeprefix("unix://")) for url in self.listen if not url.startswith(TCP))

    @property
    def tcp_addresses(self) -> tuple[tuple[str, int], ...]:
        """Return host and port of each `tcp://` address."""
        return tuple(host_and_port(url.removeprefix(TCP)) for url in self.listen if url.startswith(TCP))

    @property
    def peers_address(self) -> tuple[str, int] | None:
        """Return host and port where peers connect."""
        return host_and_port(self.listen_peers.removeprefix(TCP)) if self.listen_peers else None

    @property
    def admin_sockets(self) -> tuple[Path, ...]:
        """Return the operators' sockets: the configured one, or one next to each socket of engines."""
        if self.admin:
            return (Path(self.admin.removeprefix("unix://")),)
        return tuple(path.with_name(f"{path.name}{ADMIN_SUFFIX}") for path in self.sockets)

    @property
    def rpc_socket(self) -> Path:
        """Return the socket behind the operators' sockets."""
        first = self.sockets[0]
        return first.with_name(f"{first.name}{RPC_SUFFIX}")

    @property
    def mode_bits(self) -> int:
        return int(self.mode, 8)

    @property
    def admin_mode_bits(self) -> int:
        return int(self.admin_mode, 8)

    @property
    def group_id(self) -> int:
        return _group_id(self.group)

    @property
    def admin_group_id(self) -> int:
        return _group_id(self.admin_group)


def _group_id(name: str) -> int:
    """Return the id of a group; -1 without a name, or for a group that this host does not know."""
    try:
        return grp.getgrnam(name).gr_gid if name else -1
    except KeyError:
        return -1
