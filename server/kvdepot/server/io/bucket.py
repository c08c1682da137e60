"""A bucket, or a prefix of one, as I/O workers have it: requests by obstore, and every failure an OSError (ADR 75).

Only workers import this module's library: a request that hangs is ended with its worker.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from kvdepot.server.io.jobs import Part
from kvdepot.server.platform.secret_files import read_secret

_CREDENTIALS_BYTES_MAX: Final = 64 << 10
_DETAIL_CHARACTERS: Final = 300
_QUERY: Final = re.compile(r"(?<=\S)\?\S+")
_CHUNK_BYTES: Final = 128 << 10
"""Of an answer, at least, unless it ends. Of larger ones the C library gives each page back to the kernel, and takes a
fault for the next one: a get of 4 MiB took 1.7 times the CPU time with 1 MiB."""
_PAUSE_SECONDS: Final = 0.002
_BACKOFF: Final = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2}


Version = Mapping[str, str]
"""What a provider tells one object of a key from the next by: an `e_tag` (S3, Azure) or a `version` (GCS)."""


class SignPayload(StrEnum):
    """Whether the signature of a put to S3 also covers the payload, whose SHA-256 is most of what a put costs.

    Readers do not need it: each object has a checksum of its own.
    """

    AUTO = "auto"  # as AWS's own libraries: only where a request may go over http
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """Where a bucket is, and how it is asked. Nothing here is secret: it is an argument of the worker."""

    url: str  # s3://bucket/prefix, gs://, az://, memory://, file://
    endpoint: str = ""  # of a server that speaks S3
    region: str = ""
    allow_http: bool = False
    credentials_file: str = ""  # empty: the provider's own chain
    unconditional: bool = False  # whether a server may ignore If-None-Match
    sign_payload: SignPayload = SignPayload.AUTO
    timeout_seconds: float = 10.0  # of one request, its retries included
    retries: int = 2

    @property
    def signs_payload(self) -> bool:
        if self.sign_payload is SignPayload.AUTO:
            return self.allow_http
        return self.sign_payload is SignPayload.ALWAYS

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**values | {"sign_payload": SignPayload(values["sign_payload"])})


class Incoming:
    """The answer to a get: the bytes of an object, which can be read once, from its start on."""

    def __init__(
        self, key: str, size: int, arriving: int, version: Version, chunks: Iterator[bytes],
        count: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Take an answer. `size`: of the whole object; `arriving`: of the answer, which is at most that.

        `count` gets the length of each chunk.
        """
        self.size = size
        self.version = version
        self._arriving = arriving
        self._key = key
        self._chunks = chunks
        self._count = count
        self._at = 0
        self._left = memoryview(b"")

    def read(self, parts: Sequence[Part], buffers: Sequence[memoryview]) -> int:
        """Fill the buffers with what comes next, and return how many bytes that are. Raise OSError.

        Fewer than the buffers hold: the object ends there. The parts have to begin where the last ones ended.
        """
        if not parts:
            return 0
        if parts[0].offset != self._at:
            raise ValueError(f"{self._key} is read at {parts[0].offset}, and its bytes are at {self._at}")
        start, room = self._at, sum(part.length for part in parts)
        for buffer in buffers:
            filled, wanted = 0, min(len(buffer), room - (self._at - start))
            while filled < wanted and self._more():
                count = min(wanted - filled, len(self._left))
                buffer[filled : filled + count] = self._left[:count]
                self._left = self._left[count:]
                filled += count
                self._at += count
            if filled < wanted:
                break
        return self._at - start

    def _more(self) -> bool:
        """Have bytes at hand. Return False at the object's end. Raise OSError if the answer ends before it."""
        while not self._left:
            with _as_os_errors("get", self._key):
                chunk = next(self._chunks, None)
            if chunk is None:
                if self._at < self._arriving:
                    why = f"get: the answer ended after {self._at} of {self._arriving} bytes"
                    raise OSError(errno.EIO, why, self._key)
                return False
            self._count(len(chunk))
            self._left = memoryview(chunk)
        return True


class Bucket:
    """Requests to one bucket, by any thread. Keys are below the prefix. Everything raises OSError.

    FileNotFoundError: no such key. FileExistsError: the condition of a put does not hold.
    """

    def __init__(self, settings: BucketSettings, store: Any = None) -> None:
        """Make no connection yet. `store`: use this one, a test's."""
        self.settings = settings
        self._store = store
        self._fixed = store is not None
        self._version: object = None  # of the credentials that the store was opened with
        self._lock = threading.Lock()
        self._requests = 0
        self._received_bytes = 0

    def head(self, key: str) -> int:
        """Return the length of an object in bytes."""
        import obstore

        with _as_os_errors("head", key):
            return int(obstore.head(self._opened(), key)["size"])

    def get(self, key: str, length: int | None = None) -> Incoming:
        """Return an object that begins to arrive. `length`: no more than its first bytes."""
        try:
            return self._get(key, length)
        except FileNotFoundError:
            raise
        except OSError:
            if length is None or self.head(key):
                raise
            return self._get(key, None)  # servers have no range of an empty object

    def _get(self, key: str, length: int | None) -> Incoming:
        import obstore

        with _as_os_errors("get", key):
            options: Any = {} if length is None else {"options": {"range": (0, length)}}
            result = obstore.get(self._opened(), key, **options)
            size = int(result.meta["size"])
            incoming = iter(result.stream(min_chunk_size=_CHUNK_BYTES))
        arriving = size if length is None else min(size, length)
        return Incoming(key, size, arriving, _version_of(result.meta), incoming, self._received)

    def create(self, key: str, views: Sequence[memoryview | bytes]) -> None:
        """Put an object where there is none. Raise FileExistsError if there is one."""
        try:
            self._put(key, views, "create")
        except FileNotFoundError as error:  # what is missing is the bucket
            raise OSError(errno.EIO, error.strerror, key) from error

    def replace(self, key: str, views: Sequence[memoryview | bytes], version: Version) -> None:
        """Put an object in the place of this version. Raise FileExistsError if another one is there by now."""
        self._put(key, views, dict(version))

    def move(self, key: str, to: str) -> None:
        import obstore

        with _as_os_errors("copy", key):
            obstore.copy(self._opened(), key, to)
            obstore.delete(self._opened(), key)

    def delete(self, key: str) -> None:
        import obstore

        with _as_os_errors("delete", key):
            obstore.delete(self._opened(), key)

    def _put(self, key: str, views: Sequence[memoryview | bytes], mode: Any) -> None:
        import obstore

        lent = [memoryview(view) if isinstance(view, memoryview) else view for view in views]
        try:
            with _as_os_errors("put", key):
                obstore.put(self._opened(), key, iter(lent), mode=mode, use_multipart=False)
        finally:
            _take_back(lent)

    def take_counts(self) -> tuple[int, int]:
        """Return the requests, and the bytes of objects received, since this was last called. Retries do not count."""
        with self._lock:
            counts = self._requests, self._received_bytes
            self._requests = self._received_bytes = 0
            return counts

    def _received(self, size_bytes: int) -> None:
        with self._lock:
            self._received_bytes += size_bytes

    def _opened(self) -> Any:
        """Return the store for one request, opened again if the credentials are other ones by now."""
        path = self.settings.credentials_file
        with self._lock:
            self._requests += 1
            if self._fixed:
                return self._store
            try:
                version = _file_version(path) if path else "chain"
                if self._store is None or version != self._version:
                    self._store = _open(self.settings, _credentials(path) if path else {})
                    self._version = version
            except FileNotFoundError as error:  # which says nothing of the key
                raise PermissionError(errno.EACCES, "the file of credentials is not there", path) from error
            return self._store


def _take_back(lent: Sequence[memoryview | bytes]) -> None:
    """Wait until the library has let go of views that may change afterwards, for as long as the worker lives.

    A server may answer before it has read all of a request. The library returns then, and continues to send.
    """
    views = [view for view in lent if isinstance(view, memoryview)]
    pause = threading.Event()  # never set
    while views:
        try:
            views[-1].release()
        except BufferError:
            pause.wait(_PAUSE_SECONDS)
        else:
            views.pop()


def _open(settings: BucketSettings, credentials: dict[str, str]) -> Any:
    from obstore.store import from_url

    config: dict[str, Any] = dict(credentials)
    if settings.url.startswith("s3://"):
        if settings.endpoint:
            config |= {"endpoint": settings.endpoint, "virtual_hosted_style_request": False}
        if settings.region:
            config["region"] = settings.region
        if not settings.signs_payload:
            config["unsigned_payload"] = True
    seconds = timedelta(seconds=settings.timeout_seconds)
    network: dict[str, Any] = {}
    if settings.url.partition(":")[0] not in ("memory", "file"):
        network = {
            "client_options": {
                "timeout": seconds, "connect_timeout": seconds / 2, "allow_http": settings.allow_http,
            },
            "retry_config": {"max_retries": settings.retries, "retry_timeout": seconds, "backoff": _BACKOFF},
        }  # fmt: skip
        if config:
            network["config"] = config
    try:
        return from_url(settings.url, **network)
    except BaseException as error:
        if not credentials:
            raise
        # The library repeats a name that it does not know, and that may be a secret which has a `=` in it.
        why = f"{type(error).__name__}: not the names and values of credentials for {settings.url.partition(':')[0]}://"
        raise PermissionError(errno.EACCES, why, settings.credentials_file) from None


def _version_of(meta: Any) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _file_version(path: str) -> object:
    found = os.stat(path)  # noqa: PTH116
    return found.st_mtime_ns, found.st_ino, found.st_size


def _credentials(path: str) -> dict[str, str]:
    """Return `name = value` of each line. Raise OSError, which repeats nothing of the file."""
    advice = "only the daemon's user may read it: chmod 0600"
    try:
        data = read_secret(
            Path(path), _CREDENTIALS_BYTES_MAX, owners={os.geteuid()}, forbidden=0o077, advice=advice
        )  # fmt: skip
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise PermissionError(errno.EACCES, getattr(error, "strerror", None) or str(error), path) from None
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    if any(not mark or not name.strip() for name, mark, _ in pairs):
        raise OSError(errno.EINVAL, "expected a line `name = value` for each credential", path)
    return {name.strip(): value.strip() for name, _, value in pairs}


@contextlib.contextmanager
def _as_os_errors(request: str, key: str) -> Iterator[None]:
    """Raise what a request raises as OSError, with the first line of its text."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, _line(request, error), key) from error
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise FileExistsError(errno.EEXIST, _line(request, error), key) from error
    except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, _line(request, error), key) from error
    except (GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise OSError(errno.EIO, _line(request, error), key) from error


def _line(request: str, error: BaseException) -> str:
    """Return what happened. The text of an error may have the URL of the request, and never its headers.

    The query of a URL is left out: it can be a signature (Azure's SAS tokens).
    """
    first = _QUERY.sub("?...", str(error).partition("\n")[0])
    return f"{request}: {type(error).__name__}: {first[:_DETAIL_CHARACTERS]}"
