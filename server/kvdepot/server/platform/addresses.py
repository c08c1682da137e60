"""Addresses in the configuration: unix sockets, and host and port."""

from __future__ import annotations

from typing import Final

TCP: Final = "tcp://"
DNS: Final = "dns://"
FILE: Final = "file://"
ATTACH_SUFFIX = ".attach"
SOCKET_PATH_BYTES_MAX = 107
"""Bytes of a path in sockaddr_un (unix(7)), without its final zero."""
_PORT_MAX: Final = 65535


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:9421`, `node-7:9421` or `[::1]:9421`. Raise ValueError for other texts."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    digits = port.isascii() and port.isdigit() and len(port) <= len(str(_PORT_MAX))
    if not colon or not bare or set(bare) & set("[]/ ") or not digits or int(port) > _PORT_MAX:
        raise ValueError(f'expected "host:port" with a port up to {_PORT_MAX} (IPv6: "[::1]:9421"), got {address!r}')
    return bare, int(port)


def url_address(host: str, port: int) -> str:
    """Return the address as a URL has it: IPv6 in brackets, its zone escaped (RFC 6874)."""
    return f"[{host.replace('%', '%25')}]:{port}" if ":" in host else f"{host}:{port}"


def is_peers_url(url: str) -> bool:
    """Return whether this says where a peer is, or several are. Raise ValueError if it says so, and not where."""
    for scheme in (TCP, DNS):
        if url.startswith(scheme):
            host_and_port(url.removeprefix(scheme))
            return True
    if url.startswith(FILE) and not url.startswith(f"{FILE}/"):
        raise ValueError(f"expected {FILE}/absolute/path, got {url!r}")
    return url.startswith(FILE)


def check_listen_url(url: str) -> None:
    if url.startswith(TCP):
        host_and_port(url.removeprefix(TCP))
    else:
        check_url(url)


def check_url(url: str) -> None:
    path = url.removeprefix("unix://")
    if path == url or not path.startswith("/") or path.rpartition("/")[2] in ("", ".", ".."):
        raise ValueError(f"expected unix:///absolute/path of a file, got {url!r}")
    if "," in path:
        raise ValueError(f"{url!r} has a comma, which gRPC does not accept in an address")
    length = len(path.encode()) + len(ATTACH_SUFFIX)
    if length > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"the path has {length} bytes with the suffix {ATTACH_SUFFIX!r}, expected at most {SOCKET_PATH_BYTES_MAX}"
        )
