"""A daemon of another host: its address, what TLS needs there, and why a connection failed."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import grpc
from kvdepot.client.ctl.texts import say
from kvdepot.client.endpoint import Endpoint, EndpointError
from kvdepot.client.transports.control import CHANNEL_OPTIONS
from kvdepot.core.secrets import mask_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

TCP: Final = "tcp://"
EXIT_UNREACHABLE: Final = 3
LOCAL_VERBS: Final = frozenset({"doctor", "bench", "export", "import"})
"""Verbs that look at this host, or map the daemon's memory."""
_PORT_MAX: Final = 65535


class NoConnectionError(click.ClickException):
    """There is no connection to the daemon. The message says why."""

    exit_code = EXIT_UNREACHABLE

    def show(self, file: Any = None) -> None:
        """Print it as kvdepotctl prints everything that it says itself."""
        del file
        say(f"kvdepotctl: {self.message}", err=True)


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of `tcp://host:port`."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        """Raise EndpointError."""
        host, _, port = text.removeprefix(TCP).rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not bare or set(bare) & set("[]/@ ") or not (port.isascii() and port.isdigit()) or int(port) > _PORT_MAX:
            raise EndpointError(f"endpoint {mask_secrets(text)!r}: write tcp://host:port (IPv6: tcp://[::1]:7447)")
        return Address(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Remote:
    """A daemon that is called over TLS. `server_name`: the name of its certificate, if it is not the host."""

    address: Address
    ca: Path
    cert: Path
    key: Path
    server_name: str = ""

    def channel(self) -> grpc.Channel:
        """Return a channel. Raise NoConnectionError if a file cannot be read."""
        try:
            credentials = grpc.ssl_channel_credentials(
                self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
            )
        except OSError as error:
            raise NoConnectionError(f"cannot read {error.filename}: {error.strerror}") from error
        named = (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()
        return grpc.secure_channel(str(self.address), credentials, options=(*CHANNEL_OPTIONS, *named))

    def why_refused(self, timeout_seconds: float) -> str:
        """Return why no connection can be made, by trying one; empty if it can. gRPC says no reason of TLS."""
        where = f"{TCP}{self.address}"
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.load_cert_chain(self.cert, self.key, password=str)  # an empty one: nobody is asked at a terminal
        except OSError as error:
            return f"{self.cert}, {self.key} and {self.ca} cannot be used for TLS: {error.strerror or error}"
        context.set_alpn_protocols(["h2"])
        try:
            with (
                socket.create_connection((self.address.host, self.address.port), timeout_seconds) as plain,
                context.wrap_socket(plain, server_hostname=self.server_name or self.address.host) as secure,
            ):
                # With TLS 1.3 a server refuses a certificate after the client's handshake. gRPC's then says nothing.
                if not secure.recv(1):
                    return f"{where} does not accept this certificate: {self._own_fault()}"
        except ssl.SSLCertVerificationError as error:
            return f"the certificate of {where} is not accepted here: {error.verify_message}"
        except ssl.SSLError as error:
            return f"{where} refuses the connection: {error.reason or error}; {self._own_fault()}"
        except TimeoutError:
            return f"no answer from {where} within {timeout_seconds:g} s"
        except OSError as error:
            return f"no daemon at {where} ({error.strerror or error})"
        return ""

    def _own_fault(self) -> str:
        """Return what is wrong with the own certificate, as far as a handshake within this process can find it."""
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca)
        server.verify_mode = ssl.CERT_REQUIRED
        client = ssl.create_default_context(cafile=self.ca)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        for context in (server, client):
            context.load_cert_chain(self.cert, self.key, password=str)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = (
            client.wrap_bio(to_client, to_server),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for side in sides * 2:  # two flights each
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return f"{error.verify_message}, checked with {self.ca}"
        other = "the daemon's [tls] client_ca may be another one, or all its connections are taken"
        return f"{self.ca} has issued it, so {other}"


def chosen(options: Mapping[str, Any]) -> Endpoint | Remote:
    """Return the daemon that the options of `kvdepotctl` name. Raise UsageError."""
    endpoint = options["endpoint"]
    given = {name: options[f"tls_{name}"] for name in ("ca", "cert", "key")}
    if isinstance(endpoint, Address):
        missing = ", ".join(f"--tls-{name}" for name, path in given.items() if path is None)
        if missing:
            raise click.UsageError(f"{TCP}{endpoint} needs {missing}")
        return Remote(endpoint, **given, server_name=options["tls_server_name"])
    admin = options["admin"]
    return endpoint if admin is None else Endpoint(endpoint.path, admin.path)
