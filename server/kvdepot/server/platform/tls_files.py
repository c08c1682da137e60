"""Certificate, key and CA of a listener: read and checked as a whole, and read again when a file changes.

Files that do not fit together are not used: a rotation writes them one after the other. What was read before is used
until they do. Nor does a certificate that is not valid now replace one that is.
"""

from __future__ import annotations

import codecs
import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.server.platform.secret_files import read_secret

CONNECTION_SECONDS_MAX: Final = 600.0
"""After it a connection is made again, with the certificate and under the CA of that time."""
_BYTES_MAX: Final = 1 << 20


class TlsFileError(ValueError):
    """A file that cannot be used. `key` is its key in the table `[tls]`. Nothing of a key file is repeated."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"tls.{key}: {reason}")
        self.key = key
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Pem:
    """What a TLS server needs, each as PEM. The certificate is valid between two times, in unix seconds."""

    cert: bytes
    key: bytes
    client_ca: bytes
    begins_at: float
    expires_at: float

    def valid_at(self, now: float) -> bool:
        return self.begins_at <= now < self.expires_at


class TlsFiles:
    """The three files. Not for several threads at once."""

    def __init__(self, cert: Path, key: Path, client_ca: Path) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._seen: object = None
        self._used: Pem | None = None

    def load(self) -> Pem:
        """Return what the files have. Raise TlsFileError."""
        pem, seen = self._read()
        self._used, self._seen = pem, seen
        return pem

    def load_changed(self) -> Pem | None:
        """Return what the files have if one of them has changed since they were last used. Raise TlsFileError."""
        if self._stamps() == self._seen:
            return None
        pem, seen = self._read()
        now = time.time()
        if self._used is not None and self._used.valid_at(now) and not pem.valid_at(now):
            raise TlsFileError("cert", f"{self._cert} is not valid now, and the certificate in use is")
        self._used, self._seen = pem, seen
        return pem

    def _read(self) -> tuple[Pem, object]:
        """Return what the files have, and their stamps. Raise TlsFileError."""
        before = self._stamps()
        cert, key = _public("cert", self._cert), _secret("key", self._key)
        client_ca = _public("client_ca", self._client_ca)
        self._check()
        # OpenSSL skips the mark of UTF-8, and gRPC does not: it finds nothing then, and keeps the former certificates.
        cert, key, client_ca = (data.removeprefix(codecs.BOM_UTF8) for data in (cert, key, client_ca))
        pem = Pem(cert, key, client_ca, *_life_of(cert, self._cert))
        if self._stamps() != before:
            raise TlsFileError("cert", "the files change while they are read")
        return pem, before

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(self._client_ca)
        except (ssl.SSLError, OSError) as error:
            raise TlsFileError("client_ca", f"{self._client_ca} has no certificates") from error
        try:
            context.load_cert_chain(self._cert, self._key, password=str)  # an empty one: nobody is asked at a terminal
        except (ssl.SSLError, OSError) as error:
            reason = f"{self._cert} and {self._key} are no pair of a certificate and its key without a password"
            raise TlsFileError("cert", reason) from error

    def _stamps(self) -> tuple[tuple[int, int, int, int], ...]:
        return tuple(
            _stamp(name, path)
            for name, path in (("cert", self._cert), ("key", self._key), ("client_ca", self._client_ca))
        )


def _life_of(pem: bytes, path: Path) -> tuple[float, float]:
    """Return begin and end of a certificate in unix seconds. Raise TlsFileError for a kind of key that gRPC refuses.

    With such a key the daemon would refuse every handshake. gRPC takes a key in its usual encoding alone: no curve by
    its parameters, and no RSA-PSS.
    """
    from cryptography import x509  # the extra `tls`
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    refused = TlsFileError("cert", f"{path} has a key that gRPC cannot use: make an RSA, P-256 or P-384 key")
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        life = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    except ValueError as error:
        raise TlsFileError("cert", f"{path} has no certificate that can be read") from error
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise refused from error
    curve = key.curve if isinstance(key, ec.EllipticCurvePublicKey) else None
    if not isinstance(key, rsa.RSAPublicKey) and not isinstance(curve, ec.SECP256R1 | ec.SECP384R1):
        raise refused
    if key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) not in certificate.tbs_certificate_bytes:
        raise refused
    return life


def _stamp(name: str, path: Path) -> tuple[int, int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise TlsFileError(name, f"{path} cannot be used: {error.strerror}") from error
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _public(name: str, path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TlsFileError(name, f"{path} cannot be used: {error.strerror}") from error
    return data


def _secret(name: str, path: Path) -> bytes:
    """Return the bytes of the key. Group members may read it: that is how Kubernetes mounts secrets (`fsGroup`)."""
    advice = "no other user may read it, or its group change it: chmod 0640"
    try:
        return read_secret(path, _BYTES_MAX, owners={0, os.geteuid()}, forbidden=0o027, advice=advice)
    except OSError as error:
        raise TlsFileError(name, f"{path} cannot be used: {error.strerror}") from error
    except ValueError as error:
        raise TlsFileError(name, f"{path}: {error}") from None
