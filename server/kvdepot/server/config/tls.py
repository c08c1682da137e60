"""The table `[tls]`: the certificates of `tcp://` addresses, and the names of those who may call there.

A name is a subject alternative name of the caller's certificate: `DNS:host` or `URI:spiffe://...`. The common name is
no name: a certificate without alternative names would turn it into an identity (RFC 9525, section 2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

from kvdepot.core.errors import ConfigError
from kvdepot.server.config.peer_keys import PEER_KIND
from kvdepot.server.config.table import Table
from kvdepot.server.platform.certificates import DNS, URI, canonical
from kvdepot.server.platform.tls_files import Pem, TlsFileError, TlsFiles
from pydantic import Field, field_validator, model_validator

_NAMES_MAX: Final = 1024
_NAME_CHARACTERS_MAX: Final = 512


def check_name(text: str) -> str:
    """Return a name of a certificate as it is compared. Raise ValueError for what is none."""
    kind = text[: len(DNS)]
    rest = text[len(DNS) :]
    if kind not in (DNS, URI) or not rest or len(text) > _NAME_CHARACTERS_MAX:
        raise ValueError(f"expected {DNS}host or {URI}uri, got {text[:_NAME_CHARACTERS_MAX]!r}")
    if not all("!" <= character <= "~" for character in rest):
        raise ValueError(f"expected a name of visible ASCII characters, got {text!r}")
    if kind == DNS and "*" in rest:
        raise ValueError(f"expected the name of one host, got the pattern {text!r}")
    return canonical(text)


class TlsTable(Table):
    """The table `[tls]`."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    allow_admins: list[str] = Field(default=[], max_length=_NAMES_MAX)
    allow_readers: list[str] = Field(default=[], max_length=_NAMES_MAX)
    allow_peers: list[str] = Field(default=[], max_length=_NAMES_MAX)

    @field_validator("cert", "key", "client_ca")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if path and (not Path(path).is_absolute() or path.endswith("/")):
            raise ValueError("expected the absolute path of a file")  # without the value: it may be a key
        return path

    @field_validator("allow_admins", "allow_readers", "allow_peers")
    @classmethod
    def _check_names(cls, names: list[str]) -> list[str]:
        return [check_name(name) for name in names]

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        missing = [name for name in ("cert", "key", "client_ca") if not getattr(self, name)]
        if missing and (len(missing) < 3 or self.allow_admins or self.allow_readers or self.allow_peers):
            raise ValueError(f"needs {', '.join(missing)} too")
        return self

    @property
    def on(self) -> bool:
        return bool(self.cert)

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(Path(self.cert), Path(self.key), Path(self.client_ca))


def load_tls(file: str, files: TlsFiles) -> Pem:
    """Return what the files have. Raise ConfigError, also without the extra."""
    try:
        import cryptography  # noqa: F401 - what reads the names of certificates
    except ImportError as error:
        raise ConfigError(file, "tls", "needs cryptography", advice="pip install 'kvdepot[tls]'") from error
    try:
        return files.load()
    except TlsFileError as error:
        raise ConfigError(file, f"tls.{error.key}", error.reason, of_host=True) from error


def check_tls(file: str, table: TlsTable, *, listening: bool, peers: str = "") -> None:
    """Raise ConfigError for certificates that nothing uses, or for what needs them and has none.

    `peers`: the key that says that peers call, or are called; empty if there are none.
    """
    if listening and not table.on:
        raise ConfigError(file, "daemon.listen", "a tcp:// address needs [tls] cert, key and client_ca")
    if peers and not table.on:
        raise ConfigError(file, peers, "peers need [tls] cert, key and client_ca")
    if table.on and not listening and not peers:
        raise ConfigError(file, "tls", "has certificates, and daemon.listen has no tcp:// address")
    if listening and not (table.allow_admins or table.allow_readers):
        raise ConfigError(file, "tls", "allows nobody to call", advice="list names in allow_admins or allow_readers")
    if peers and not table.allow_peers:
        raise ConfigError(file, "tls.allow_peers", "allows no peer", advice="list the names of the peers' certificates")
    if table.allow_peers and not peers:
        raise ConfigError(
            file, "tls.allow_peers", "nobody could call",
            advice=f'set daemon.listen_peers, or add a tier of kind "{PEER_KIND}"',
        )  # fmt: skip
