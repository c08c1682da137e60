"""Azurite, Microsoft's server for tests that speaks Azure Blob Storage, with one container (`make azurite`)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

import obstore
from obstore.store import AzureStore

from tests.rigs import ports
from tests.rigs.patience import wait_until

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = ROOT / "build/azurite/node_modules/.bin/azurite-blob"
NO_AZURITE: Final = "" if PROGRAM.exists() and shutil.which("node") else "azurite is missing: make azurite"
CONTAINER: Final = "kvdepot"
ACCOUNT: Final = "devstoreaccount1"
_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of the account that every Azurite has. It is in its documentation."""
_VERSION: Final = "2023-11-03"


class Azurite:
    """A server on a port of its own. What it keeps is gone with it."""

    def __init__(self) -> None:
        self._held = ports.held()
        self._port = ports.port_of(self._held)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}/{ACCOUNT}"
        self.credentials = f"account_name = {ACCOUNT}\naccount_key = {_KEY}\nendpoint = {self.url}\n"

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [
                PROGRAM, "--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--inMemoryPersistence", "--silent",
                "--disableTelemetry", "--skipApiVersionCheck",
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until(self._has_container, "the container is there")
        except BaseException:
            self.close()
            raise
        self.store = AzureStore(
            CONTAINER, account_name=ACCOUNT, account_key=_KEY, endpoint=self.url, client_options={"allow_http": True}
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self._held.close()

    def names(self) -> list[str]:
        """Of objects, not of probes."""
        paths = [entry["path"] for batch in obstore.list(self.store) for entry in batch]
        return [path for path in paths if "/." not in f"/{path}"]

    def _has_container(self) -> bool:
        """Make the container, which no library of the tests does."""
        now = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        path = f"/{ACCOUNT}/{CONTAINER}"
        signed = f"PUT{12 * chr(10)}x-ms-date:{now}\nx-ms-version:{_VERSION}\n/{ACCOUNT}{path}\nrestype:container"
        digest = hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)
        headers = {
            "x-ms-date": now,
            "x-ms-version": _VERSION,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
            "Content-Length": "0",
        }
        request = urllib.request.Request(f"{self.url}/{CONTAINER}?restype=container", method="PUT", headers=headers)
        try:
            with urllib.request.urlopen(request):
                return True
        except ConnectionError:
            return False
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionError):
                return False  # it starts yet
            raise
