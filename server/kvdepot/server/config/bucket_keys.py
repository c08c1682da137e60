"""The keys of a `[[tier]]` that only a bucket has (ADR 75)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from kvdepot.server.io.bucket import SignPayload
from kvdepot.server.platform.addresses import is_peers_url
from pydantic import BaseModel, Field, field_validator

NO_LIBRARY: Final = "tiers of kind 'object' need the package obstore, which is not installed"
_SCHEMES: Final = ("s3", "gs", "az")
_FOLDERS: Final = r"^([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?$"


class BucketKeys(BaseModel):
    """A part of `[[tier]]`. Refusals do not repeat the value: it may have a secret."""

    url: str = ""
    prefix: str = Field(default="", pattern=_FOLDERS)
    endpoint: str = ""
    region: str = ""
    credentials_file: str = ""
    allow_http: bool = False
    unconditional: bool = False
    sign_payload: Annotated[SignPayload, Field(strict=False)] = SignPayload.AUTO

    @field_validator("url")
    @classmethod
    def _check_bucket(cls, url: str) -> str:
        if is_peers_url(url):
            return url
        parts = urlsplit(url)
        whole = f"{parts.scheme}://{parts.netloc}"
        if url and (parts.scheme not in _SCHEMES or not parts.hostname or "@" in parts.netloc or url != whole):
            raise ValueError("expected s3://, gs:// or az:// and the name of a bucket, and nothing else")
        return url

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query):
            raise ValueError("expected http:// or https:// and a host, without user, password or query")
        return url

    @field_validator("credentials_file")
    @classmethod
    def _check_credentials_file(cls, path: str) -> str:
        if path and (not Path(path).is_absolute() or path.endswith("/")):
            raise ValueError("expected the absolute path of a file with credentials")
        return path

    def check_bucket(self) -> None:
        """Raise ValueError if the keys contradict each other, or the URL is a peer's."""
        if is_peers_url(self.url):
            raise ValueError(f"expected the url of a bucket, got an address: {self.url}")
        if self.endpoint and not self.url.startswith("s3:"):
            raise ValueError("endpoint needs a url that begins with s3://")
        if self.sign_payload is not SignPayload.AUTO and not self.url.startswith("s3:"):
            raise ValueError("sign_payload needs a url that begins with s3://")
        if self.endpoint.startswith("http:") and not self.allow_http:
            raise ValueError("endpoint is http://, so that anybody on the way reads and changes all: set allow_http")


def has_library() -> bool:
    """Return whether the library is installed. It is not imported: only I/O workers do that."""
    return find_spec("obstore") is not None
