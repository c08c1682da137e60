"""moto's S3 server as a process of its own, with one bucket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from typing import Any, Self

import obstore
from obstore.store import S3Store

from tests.rigs.patience import patient, wait_until

BUCKET = "kvdepot"
CREDENTIALS = "access_key_id = testing\nsecret_access_key = testing\n"
START_SECONDS = 60.0


class S3Server:
    """A server on a port of its own. `objects` and the rest look past every proxy."""

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        environment = {**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        wait_until(self._made, "the server has the bucket", START_SECONDS)
        self.store = S3Store(
            BUCKET, endpoint=self.url, access_key_id="testing", secret_access_key="testing", region="us-east-1",
            client_options={"allow_http": True},
        )  # fmt: skip
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def keys(self) -> list[str]:
        """Of objects, not of what is in quarantine or of probes."""
        return [key for key in self._listed() if "/." not in f"/{key}"]

    def quarantined(self) -> list[str]:
        return [key for key in self._listed() if "/.quarantine/" in f"/{key}"]

    def clear(self) -> None:
        for key in self._listed():
            obstore.delete(self.store, key)

    def _listed(self) -> list[str]:
        listed: list[Any] = [entry for batch in obstore.list(self.store) for entry in batch]
        return sorted(entry["path"] for entry in listed)

    def get(self, key: str) -> bytes:
        return bytes(obstore.get(self.store, key).bytes())

    def put(self, key: str, data: bytes) -> None:
        obstore.put(self.store, key, data)

    def _made(self) -> bool:
        assert self._process.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT"), timeout=patient(5)
            ):
                return True
        except OSError:
            return False
