"""Who calls over TLS, as the checked certificate of the connection says it: never metadata, never an address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvdepot.server.config.tls import DNS, URI

_KINDS: Final = (("peer_dns", DNS), ("peer_uri", URI))
"""Fields of gRPC's authentication context with alternative names of the peer's certificate, by their kind."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A caller over TLS. `names`: of its certificate, with their kinds."""

    names: tuple[str, ...]
    address: str


def certificate_of(context: Any) -> Certificate | None:
    """Return the caller of a call; None if its connection has no certificate that was checked.

    Common names are no names (`config.tls`).
    """
    found = context.auth_context()
    if found.get("transport_security_type") != [b"ssl"] or not found.get("x509_pem_cert"):
        return None
    names = [
        f"{kind}{name.decode('utf-8', 'backslashreplace')}" for field, kind in _KINDS for name in found.get(field, ())
    ]
    lower = (name.lower().replace(DNS.lower(), DNS, 1) if name.startswith(DNS) else name for name in names)
    return Certificate(tuple(lower), context.peer())
