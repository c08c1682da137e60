"""Requests to a bucket: what they count, what their errors say, and which files of credentials are taken."""

from __future__ import annotations

import errno
import hashlib
import mmap
import socket
import threading
from pathlib import Path

import pytest
from kvdepot.server.io.bucket import Bucket, BucketSettings, SignPayload
from kvdepot.server.io.jobs import Part
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from tests.rigs.patience import patient

SECRET = "hunter2"
KEY = "a/b.kvd"
PAYLOAD = b"payload" * 100
LARGE_BYTES = 32 << 20
"""More than the sockets hold."""
UNREAD_SECONDS = 0.5


def credentials(folder: Path) -> Path:
    file = folder / "credentials"
    file.write_text("access_key_id = a\nsecret_access_key = b\n")
    file.chmod(0o600)
    return file


def in_memory() -> Bucket:
    return Bucket(BucketSettings("memory://"), MemoryStore())


def test_each_request_and_each_byte_that_arrives_counts_once() -> None:
    bucket = in_memory()
    bucket.create(KEY, [b"1" * 5_000])
    bucket.head(KEY)
    found = bucket.get(KEY)
    assert found.read([Part(KEY, 0, 5_000)], [memoryview(bytearray(5_000))]) == 5_000
    assert bucket.take_counts() == (3, 5_000)
    bucket.move(KEY, "elsewhere")
    assert bucket.take_counts() == (2, 0)
    assert bucket.take_counts() == (0, 0)


def test_a_second_object_of_a_key_is_refused_and_replaced_only_by_its_version() -> None:
    bucket = in_memory()
    bucket.create(KEY, [b"first"])
    with pytest.raises(FileExistsError):
        bucket.create(KEY, [b"second"])
    version = bucket.get(KEY).version
    bucket.replace(KEY, [b"second"], version)
    with pytest.raises(FileExistsError):
        bucket.replace(KEY, [b"third"], version)
    with pytest.raises(FileNotFoundError):
        bucket.head("nothing")


def test_no_error_repeats_the_query_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise GenericError(f"Error performing GET https://a.blob.example/kv/x?sv=1&sig={SECRET} in 3ms\nmore {SECRET}")

    monkeypatch.setattr("obstore.head", fails)
    with pytest.raises(OSError, match=r"https://a.blob.example/kv/x\?\.\.\. in 3ms") as raised:
        in_memory().head(KEY)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (f"secret_access_key = {SECRET}\n", 0o640, "only the daemon's user"),
        (f"{SECRET}\n", 0o600, "expected a line"),
        (f"= {SECRET}\n", 0o600, "expected a line"),
    ],
)
def test_credentials_of_others_or_without_names_are_refused_and_not_repeated(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    file = tmp_path / "credentials"
    file.write_text(text)
    file.chmod(mode)
    bucket = Bucket(BucketSettings("s3://kv", credentials_file=str(file)))
    with pytest.raises(OSError, match=why) as raised:
        bucket.head(KEY)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(
    "text", [f"{SECRET}==\n", f"account_key = {SECRET}\nx = 1\n", f"allow_http = {SECRET}\nx_a = y\n"]
)
def test_credentials_that_the_library_refuses_are_an_error_that_repeats_nothing(
    tmp_path: Path, scheme: str, text: str
) -> None:
    file = tmp_path / "credentials"
    file.write_text(text)
    file.chmod(0o600)
    bucket = Bucket(BucketSettings(f"{scheme}://kv", credentials_file=str(file)))
    with pytest.raises(PermissionError, match=f"credentials for {scheme}://") as raised:
        bucket.head(KEY)
    assert SECRET not in str(raised.value)


def test_a_panic_of_the_library_is_an_error_of_the_request(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("secret_access_key = a\nallow_http = true\n")
    file.chmod(0o600)
    with pytest.raises(PermissionError, match="PanicException"):
        Bucket(BucketSettings("s3://kv", credentials_file=str(file))).head(KEY)


@pytest.mark.parametrize("raised", [TypeError("odd"), KeyError("size"), RuntimeError("closed")])
def test_whatever_the_library_raises_is_an_error_of_the_request(
    monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    def fails(*_: object) -> None:
        raise raised

    monkeypatch.setattr("obstore.head", fails)
    with pytest.raises(OSError, match=f"head: {type(raised).__name__}"):
        in_memory().head(KEY)


def test_credentials_that_are_gone_are_an_error_and_no_absent_object(tmp_path: Path) -> None:
    bucket = Bucket(BucketSettings("memory://", credentials_file=str(tmp_path / "credentials")))
    with pytest.raises(PermissionError, match="not there"):
        bucket.head(KEY)


def test_a_put_into_a_bucket_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise FileNotFoundError("NoSuchBucket")

    monkeypatch.setattr("obstore.put", fails)
    with pytest.raises(OSError, match="NoSuchBucket") as raised:
        in_memory().create(KEY, [b"1"])
    assert raised.value.errno == errno.EIO


class RecordingServer:
    """Answers one put, and keeps what came before its payload."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.head = b""
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with self._socket, self._socket.accept()[0] as client:
            received = b""
            while PAYLOAD not in received:
                received += client.recv(1 << 16)
            self.head = received.partition(b"\r\n\r\n")[0].lower()
            client.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n')


@pytest.mark.parametrize("sign", SignPayload)
def test_a_signature_covers_the_payload_over_http_unless_never_is_said(tmp_path: Path, sign: SignPayload) -> None:
    server = RecordingServer()
    file = credentials(tmp_path)
    settings = BucketSettings(
        "s3://kv", server.url, "r", allow_http=True, credentials_file=str(file), retries=0, sign_payload=sign
    )
    Bucket(BucketSettings.unpack(settings.pack())).create(KEY, [PAYLOAD])
    server.thread.join()
    covered = "unsigned-payload" if sign is SignPayload.NEVER else hashlib.sha256(PAYLOAD).hexdigest()
    assert f"x-amz-content-sha256: {covered}\r\n".encode() in server.head + b"\r\n"


def test_over_https_a_signature_covers_the_payload_only_if_always_is_said() -> None:
    signs = {sign: BucketSettings("s3://kv", sign_payload=sign).signs_payload for sign in SignPayload}
    assert signs == {SignPayload.AUTO: False, SignPayload.ALWAYS: True, SignPayload.NEVER: False}


class EarlyServer:
    """Answers a put 412 after its first bytes, and reads the rest later: when told to, or after a while."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.returned = threading.Event()
        self.body = b""
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _serve(self) -> None:
        with self._socket, self._socket.accept()[0] as client:
            while b"\r\n\r\n" not in self.body:
                self.body += client.recv(1 << 16)
            client.sendall(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n")
            self.returned.wait(patient(UNREAD_SECONDS))
            self.body = self.body.partition(b"\r\n\r\n")[2]
            while len(self.body) < LARGE_BYTES and (more := client.recv(1 << 20)):
                self.body += more


@pytest.mark.requirement("I6")
def test_a_put_returns_when_nothing_of_its_views_is_sent_any_more(tmp_path: Path) -> None:
    server = EarlyServer()
    file = credentials(tmp_path)
    bucket = Bucket(BucketSettings("s3://kv", server.url, "r", allow_http=True, credentials_file=str(file), retries=0))
    arena = memoryview(mmap.mmap(-1, LARGE_BYTES))
    arena[:] = b"1" * LARGE_BYTES
    with pytest.raises(FileExistsError):
        bucket.create(KEY, [arena])
    arena[:] = b"2" * LARGE_BYTES  # given back, and another object's
    server.returned.set()
    server.thread.join()
    assert (len(server.body), server.body.count(b"2")) == (LARGE_BYTES, 0)


def test_credentials_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.touch(mode=0o600)
    file.write_text("# none yet\n")
    bucket = Bucket(BucketSettings("memory://", credentials_file=str(file)))
    bucket.create(KEY, [b"1"])
    bucket.head(KEY)
    file.write_text("# others\n")
    with pytest.raises(FileNotFoundError):  # the store was opened again, and this one's objects go with it
        bucket.head(KEY)
