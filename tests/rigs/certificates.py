"""Certificates for tests: an authority of its own, and what it issues, right or wrong, as PEM files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY: Final = timedelta(days=1)
SERVER: Final = ("DNS:localhost", "IP:127.0.0.1")


@dataclass(frozen=True)
class Files:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Issues certificates. Its own one is `pem`, in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self._cert = _signed(
            _builder(self._name, self._key, self._name, (-DAY, 30 * DAY)).add_extension(
                x509.BasicConstraints(ca=True, path_length=None), critical=True
            ),
            self._key,
        )
        self.pem = folder / f"{name}.pem"
        self.pem.write_bytes(self._cert.public_bytes(Encoding.PEM))

    def issue(
        self, name: str, *alternatives: str, life: tuple[timedelta, timedelta] = (-DAY, 30 * DAY),
        client: bool = True, own: bool = False,
        make_key: Callable[[], Any] | None = None,
    ) -> Files:  # fmt: skip
        """Write NAME.pem and NAME.key. `life`: first and last moment, from now. `own`: signed by its own key."""
        key = ec.generate_private_key(ec.SECP256R1()) if make_key is None else make_key()
        subject = _named(name)
        builder = _builder(subject, key, subject if own else self._name, life)
        if alternatives:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_alternative(one) for one in alternatives]), critical=False
            )
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] + ([ExtendedKeyUsageOID.CLIENT_AUTH] if client else [])
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        files = Files(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        files.cert.write_bytes(_signed(builder, key if own else self._key).public_bytes(Encoding.PEM))
        files.key.touch(0o600)
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return files

    @classmethod
    def in_folder(cls, folder: Path, name: str) -> Self:
        folder.mkdir(exist_ok=True)
        return cls(folder, name)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, key: Any, issuer: x509.Name, life: tuple[timedelta, timedelta]
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    first, last = life
    return (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now + first).not_valid_after(now + last)
    )  # fmt: skip


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    return builder.sign(key, hashes.SHA256())


def _alternative(text: str) -> x509.GeneralName:
    kind, _, value = text.partition(":")
    match kind:
        case "DNS":
            return x509.DNSName(value)
        case "URI":
            return x509.UniformResourceIdentifier(value)
        case "IP":
            return x509.IPAddress(ip_address(value))
    raise ValueError(text)
