"""A bucket: moto's S3 server as a process of its own, and the configuration of a daemon that keeps objects there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

BUCKET: Final = "kvdepot"
CREDENTIALS: Final = "access_key_id = testing\nsecret_access_key = testing\n"
START_SECONDS: Final = 60.0
_CONFIGURATION: Final = """capacity = "1GiB"
[[tier]]
name = "bucket"
kind = "object"
url = "s3://{bucket}"
prefix = "demo"
endpoint = "{url}"
region = "us-east-1"
allow_http = true
credentials_file = "{credentials}"
capacity = "1GiB"
write = "commit"
"""


class BucketServer:
    """A server on a port of its own, with one bucket. What it keeps is gone with it."""

    def __init__(self, patience: Callable[[], float] = lambda: 1.0) -> None:
        """`patience`: how many times as long as usual things may take now."""
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._held: socket.socket | None = None

    def __enter__(self) -> Self:
        self._held = held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server binds to it, too
        held.bind(("127.0.0.1", 0))  # and nobody else is given it until then
        self.port = held.getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
            env=os.environ | {"MOTO_S3_CUSTOM_ENDPOINTS": ""},
        )  # fmt: skip
        try:
            self._wait(self._process)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        held, self._held = self._held, None
        if held is not None:
            held.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def configuration(self, folder: Path) -> str:
        """Return what `demo.daemon.Daemon` takes. A file of credentials is made in the folder."""
        credentials = folder / "credentials"
        credentials.touch(mode=0o600)
        credentials.write_text(CREDENTIALS)
        return _CONFIGURATION.format(bucket=BUCKET, url=self.url, credentials=credentials)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        began = time.monotonic()
        while time.monotonic() - began < START_SECONDS * self._patience():
            if process.poll() is not None:
                raise RuntimeError(f"moto.server exited with {process.returncode}")
            request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
            try:
                with urllib.request.urlopen(request, timeout=5 * self._patience()):
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"moto.server does not answer after {START_SECONDS} s")
