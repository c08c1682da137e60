"""Where the daemon listens: the gRPC socket and the attachment socket next to it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from kvdepot.core import runtime
from kvdepot.core.secrets import mask_secrets

ENDPOINT_VARIABLE: Final = "KVDEPOT_ENDPOINT"
PACKAGED_ENDPOINT: Final = "unix:///run/kvdepot/kvdepot.sock"
_SCHEME = "unix://"
PATH_BYTES_MAX = 107  # sun_path of Linux, without its closing zero
_ATTACH_SUFFIX = ".attach"
ADMIN_SUFFIX: Final = ".admin"


class EndpointError(ValueError):
    """The endpoint is not one this client can use. The message says what to write."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A daemon's sockets. `path`: that of engines; `admin`: that of operators, if it is not next to the former."""

    path: str
    admin: str = ""

    @staticmethod
    def parse(text: str) -> Endpoint:
        """From `unix:///run/kvdepot/kvdepot.sock`. Raises EndpointError."""
        shown = mask_secrets(text)
        if not text.startswith(_SCHEME + "/"):
            raise EndpointError(
                f"endpoint {shown!r}: write unix:// and an absolute path, as unix:///run/kvdepot/kvdepot.sock"
            )
        path = text[len(_SCHEME) :]
        if "\0" in path or "," in path:
            raise EndpointError(f"endpoint {shown!r}: a socket's path here has neither a comma nor a NUL character")
        length = len(os.fsencode(path + _ATTACH_SUFFIX))
        if length > PATH_BYTES_MAX:
            raise EndpointError(
                f"endpoint {shown!r}: {length} bytes with {_ATTACH_SUFFIX}, unix sockets allow {PATH_BYTES_MAX}; "
                "use a shorter path"
            )
        return Endpoint(path)

    @property
    def attach_path(self) -> str:
        return self.path + _ATTACH_SUFFIX

    @property
    def admin_path(self) -> str:
        """Return the path of the operators' socket."""
        return self.admin or self.path + ADMIN_SUFFIX

    @property
    def admin_target(self) -> str:
        return _grpc_address(self.admin_path)

    @property
    def grpc_target(self) -> str:
        return _grpc_address(self.path)

    def stream_target(self, name: str) -> str:
        """Of a proxy's socket, by its name in the attachment's reply."""
        return _grpc_address(f"{self.path}.{name}")

    def __str__(self) -> str:
        return _SCHEME + self.path


def default_endpoint() -> str:
    """Return the URL that engines and `kvdepotctl` use if they are given none.

    It is that of this user's own `kvdepotd serve`, if it exists, or else that of the packaged daemon.

    A socket in a directory to which another user may write is ignored: that user could have put it there.
    """
    with contextlib.suppress(OSError):  # among them: no temporary directory
        directory = Path(runtime.runtime_directory(os.environ, tempfile.gettempdir, os.geteuid()))
        status = directory.lstat()
        if runtime.only_writer(os.geteuid(), status.st_mode, status.st_uid) and (directory / "kvdepot.sock").exists():
            return f"unix://{directory / 'kvdepot.sock'}"
    return PACKAGED_ENDPOINT


def endpoint_url(settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> str:
    """Return the URL in an engine's settings, or else that of the environment or the default one."""
    return str(settings.get("endpoint", environment.get(ENDPOINT_VARIABLE) or default_endpoint()))


def _grpc_address(path: str) -> str:
    """Return the path as the URI that gRPC reads."""
    return f"unix:{quote(os.fsencode(path))}"
