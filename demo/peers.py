"""Two nodes that are peers: one certificate for both, and the configurations of their daemons."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_NAME: Final = "spiffe://demo/kvdepot"
_DAY: Final = timedelta(days=1)
_TLS: Final = """[tls]
cert = "{cert}"
key = "{key}"
client_ca = "{cert}"
allow_peers = ["URI:{name}"]
"""
_TIER: Final = """[[tier]]
name = "first-node"
kind = "peer"
url = "{url}"
capacity = "1GiB"
deadline = "10s"
"""


@dataclass(frozen=True, slots=True)
class Peers:
    """`url`: where the first node listens. `tls` is TOML of both nodes, `listen` of the first, `tier` of the second."""

    url: str
    tls: str

    @property
    def listen(self) -> str:
        """Return lines of the table `[daemon]`."""
        return f'listen_peers = "{self.url}"\n'

    @property
    def tier(self) -> str:
        return _TIER.format(url=self.url)

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Write a certificate that signs itself, and its key."""
        cert, key_file = folder / "peers.pem", folder / "peers.key"
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvdepot demo")])
        now = datetime.now(UTC)
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_NAME)])
        builder = (
            x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - _DAY).not_valid_after(now + _DAY)
            .add_extension(usages, critical=False).add_extension(names, critical=False)
        )  # fmt: skip
        cert.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
        key_file.touch(0o600)
        key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return cls(f"tcp://127.0.0.1:{port}", _TLS.format(cert=cert, key=key_file, name=_NAME))
