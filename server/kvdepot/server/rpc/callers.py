"""Who calls over TLS, as the checked certificate of the connection says it: never metadata, never an address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvdepot.server.platform.certificates import names_of


@dataclass(frozen=True, slots=True)
class Certificate:
    """A caller over TLS. `names`: of its certificate, with their kinds."""

    names: tuple[str, ...]
    address: str


def certificate_of(context: Any) -> Certificate | None:
    """Return the caller of a call; None if its connection has no certificate that was checked."""
    found = context.auth_context()
    pem = found.get("x509_pem_cert", ())
    if found.get("transport_security_type") != [b"ssl"] or len(pem) != 1:
        return None
    return Certificate(names_of(pem[0]), context.peer())
