"""moto's S3 server as a process of its own, with one bucket that tests look into."""

from __future__ import annotations

from typing import Any, Self

import obstore
from obstore.store import S3Store

from demo.bucket import BUCKET, BucketServer
from tests.rigs.patience import patience


class S3Server(BucketServer):
    """A server on a port of its own. `names` and the rest look past every proxy."""

    def __init__(self) -> None:
        super().__init__(patience)

    def __enter__(self) -> Self:
        super().__enter__()
        self.store = S3Store(
            BUCKET, endpoint=self.url, access_key_id="testing", secret_access_key="testing", region="us-east-1",
            client_options={"allow_http": True},
        )  # fmt: skip
        return self

    def names(self) -> list[str]:
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
