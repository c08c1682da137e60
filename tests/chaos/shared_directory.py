"""The directory that the nodes of a chaos run share, as the file server sees it: damaged, moved away, audited."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Final

from kvdepot.core.objectfile import HEADER_BYTES, ObjectDamageError, ObjectHeader, payload_sum
from kvdepot.core.units import parse_size_bytes
from kvdepot.server.storage import shared_layout as layout

from tests.rigs.disk_daemon import medium_bytes

SHARED_CAPACITY: Final = "128MiB"
_LOOKS: Final = 5
"""A file that is renamed while it is counted may be counted twice: the least of so many counts."""


class SharedDirectory:
    def __init__(self, backing: Path) -> None:
        self.root = backing / "shared"
        self._away = backing / "shared-away"
        self._damaged: set[Path] = set()

    def files(self) -> list[Path]:
        """Of objects."""
        found = sorted(self.root.glob("*/*/*.kvd"))
        return [path for path in found if layout.object_of(str(path.relative_to(self.root)))]

    def flip(self, rng: random.Random, count: int) -> None:
        for path in self._some(rng, count):
            with contextlib.suppress(OSError), path.open("r+b") as file:
                at = rng.randrange(max(os.fstat(file.fileno()).st_size, 1))
                found = os.pread(file.fileno(), 1, at)
                if found:
                    os.pwrite(file.fileno(), bytes([found[0] ^ 1 << rng.randrange(8)]), at)

    def cut_off(self, rng: random.Random, count: int) -> None:
        for path in self._some(rng, count):
            with contextlib.suppress(OSError):
                os.truncate(path, rng.randrange(max(path.stat().st_size, 1)))

    def delete(self, rng: random.Random, count: int) -> None:
        for path in self._some(rng, count):
            path.unlink(missing_ok=True)

    def _some(self, rng: random.Random, count: int) -> list[Path]:
        files = self.files()
        chosen = rng.sample(files, min(count, len(files)))
        self._damaged.update(chosen)
        return chosen

    def move_away(self) -> None:
        with contextlib.suppress(OSError):
            self.root.rename(self._away)

    def move_back(self) -> str:
        """Empty, or what is wrong."""
        if not self._away.exists():
            return ""
        if self.root.exists():
            return f"T5: somebody has made {self.root} anew while it was away"
        self._away.rename(self.root)
        return ""

    def findings(self) -> list[str]:
        """At any moment."""
        limit = parse_size_bytes(SHARED_CAPACITY)
        for _ in range(_LOOKS):
            found = medium_bytes(self.root)
            if found <= limit:
                return []
        return [f"I4: {found} bytes in the shared directory, the capacity is {limit}"]

    def audit(self) -> list[str]:
        """When nobody works any more: every object is whole but for those that the run has damaged itself."""
        wrong = [
            f"damaged, and not by us: {path}: {what}"
            for path in self.files()
            for what in [_damage(path)]
            if what and path not in self._damaged
        ]
        return wrong + self.findings()


def _damage(path: Path) -> str:
    data = path.read_bytes()
    try:
        header = ObjectHeader.unpack(data[:HEADER_BYTES])
    except ObjectDamageError as error:
        return str(error)
    payload = data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
    if len(payload) != header.stored_bytes:
        return f"{len(payload)} bytes of {header.stored_bytes}"
    return "" if payload_sum([payload]) == header.stored_sum else "the checksum does not hold"
