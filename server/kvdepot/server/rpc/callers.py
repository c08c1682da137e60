"""Who calls over TLS, as the checked certificate of the connection says it: never metadata, never an address."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from kvdepot.server.config.tls import DNS, URI, canonical

_REMEMBERED_MAX: Final = 256


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


@lru_cache(_REMEMBERED_MAX)
def names_of(pem: bytes) -> tuple[str, ...]:
    """Return the DNS and URI names of a certificate. A name with other characters than visible ASCII is none.

    gRPC for Python shows names too, and cuts each at a NUL character: a longer name would be another one's. Common
    names are no names (`config.tls`).
    """
    from cryptography import x509  # the extra `tls`: nobody calls without it

    try:
        certificate = x509.load_pem_x509_certificate(pem)
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return ()
    names = [
        *((DNS, name) for name in found.get_values_for_type(x509.DNSName)),
        *((URI, name) for name in found.get_values_for_type(x509.UniformResourceIdentifier)),
    ]
    return tuple(canonical(f"{kind}{name}") for kind, name in names if all("!" <= each <= "~" for each in name))
