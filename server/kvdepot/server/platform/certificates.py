"""The names in a certificate that says who calls, or who answers: its DNS and URI alternative names, with their kind.

The common name is no name: a certificate without alternative names would turn it into an identity (RFC 9525, section
2).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

DNS: Final = "DNS:"
URI: Final = "URI:"
_REMEMBERED_MAX: Final = 256


def canonical(name: str) -> str:
    """Return the name as it is compared: names of hosts have no case (RFC 4343)."""
    return f"{DNS}{name[len(DNS) :].lower()}" if name.startswith(DNS) else name


@lru_cache(_REMEMBERED_MAX)
def names_of(pem: bytes) -> tuple[str, ...]:
    """Return the DNS and URI names of a certificate. A name with other characters than visible ASCII is none.

    gRPC for Python shows names too, and cuts each at a NUL character: a longer name would be another one's. Common
    names are no names.
    """
    from cryptography import x509  # the extra `tls`: nobody calls without it

    try:
        certificate = x509.load_pem_x509_certificate(pem)
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (
        ValueError, x509.InvalidVersion, x509.ExtensionNotFound, x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
    ):  # fmt: skip
        return ()
    names = [
        *((DNS, name) for name in found.get_values_for_type(x509.DNSName)),
        *((URI, name) for name in found.get_values_for_type(x509.UniformResourceIdentifier)),
    ]
    return tuple(canonical(f"{kind}{name}") for kind, name in names if all("!" <= each <= "~" for each in name))
