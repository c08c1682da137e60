"""The directory of a disk tier: names, how a capacity is divided, addresses to files (docs/formats/disk.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from kvdepot.core.allocator import GRANULE_BYTES, Extent
from kvdepot.core.errors import ConfigError
from kvdepot.server.io.directory_guard import WORKERS_LOCK
from kvdepot.server.io.jobs import Part
from kvdepot.server.platform.durable_files import TEMPORARY
from kvdepot.server.tiers.config import CAPACITY_BYTES_MIN
from kvdepot.server.tiers.disk.records import FORMAT_VERSION, STORE_ID_BYTES, BadFile

MIB: Final = 1 << 20
STORE: Final = "store.json"
DAEMON_LOCK: Final = "daemon.lock"
PROBE: Final = ".probe"
SEGMENTS: Final = "segments"
JOURNALS: Final = "journal"
SNAPSHOTS: Final = "snapshots"
QUARANTINE: Final = "quarantine"
FOLDERS: Final = (SEGMENTS, JOURNALS, SNAPSHOTS, QUARANTINE)
LOOSE: Final = frozenset({STORE, STORE + TEMPORARY, DAEMON_LOCK, WORKERS_LOCK, "lost+found"})
"""What may lie next to the folders. The last one is a file system's own, in its root."""

_HANDLE_BYTES = 64 << 10  # of capacity
_HANDLES_MIN, _HANDLES_MAX = 1_024, 8_388_608
_SNAPSHOT_RECORD_BYTES = 192  # one fragment takes 160
_JOURNAL_BYTES_MIN, _JOURNAL_BYTES_MAX = 256 << 10, 256 << 20
_JOURNALS = 3
_SNAPSHOTS = 2
_QUARANTINE_SHARE = 16
_OVERHEAD_BYTES = 192 << 10
_OVERHEAD_SHARE = 1_024
_SEGMENT_BYTES_MIN, _SEGMENT_BYTES_MAX = MIB, 256 * MIB
_SEGMENTS_WANTED, _SEGMENTS_MAX = 64, 8_192
_STORE_BYTES_MAX = 4_096
_NUMBERED = re.compile(r"([0-9]{8})\.(log|snap)")
_OURS = {
    SEGMENTS: re.compile(r"[0-9]{5}\.seg"),
    JOURNALS: re.compile(r"[0-9]{8}\.log(\.tmp)?"),
    SNAPSHOTS: re.compile(r"[0-9]{8}\.snap(\.tmp)?"),
    QUARANTINE: re.compile(r".*\.kvd(\.tmp)?"),
}


def segment_name(number: int) -> str:
    return f"{SEGMENTS}/{number:05d}.seg"


def journal_name(generation: int) -> str:
    return f"{JOURNALS}/{generation:08d}.log"


def snapshot_name(generation: int) -> str:
    return f"{SNAPSHOTS}/{generation:08d}.snap"


def quarantine_name(at_seconds: int, sequence: int, reason: str) -> str:
    """Return the name of a quarantined file. Names sort by age."""
    return f"{QUARANTINE}/{at_seconds:010d}-{sequence:016x}-{reason}.kvd"


def is_ours(folder: str, file_name: str) -> bool:
    """Return whether a tier would make a file of this name in that folder."""
    return _OURS[folder].fullmatch(file_name) is not None


def generation_of(file_name: str) -> int | None:
    """Return the generation in a journal's or snapshot's bare name; None for any other file."""
    match = _NUMBERED.fullmatch(file_name.removesuffix(TEMPORARY))
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Store:
    """What `store.json` says. It never changes."""

    store_id: bytes
    segment_bytes: int

    def pack(self) -> bytes:
        values = {
            "format": "kvdepot disk",
            "version": FORMAT_VERSION,
            "store_id": self.store_id.hex(),
            "segment_bytes": self.segment_bytes,
        }
        return (json.dumps(values, indent=1) + "\n").encode()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the store of a packed file. Raise BadFile, which says what is wrong."""
        try:
            values = json.loads(data[:_STORE_BYTES_MAX])
            store_id, segment_bytes = bytes.fromhex(values["store_id"]), values["segment_bytes"]
            name, version = values["format"], values["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadFile(f"{STORE} is not understood: {error}") from error
        if name != "kvdepot disk" or version != FORMAT_VERSION:
            raise BadFile(f"{STORE} is of {name!r} version {version!r}, this is version {FORMAT_VERSION}")
        if len(store_id) != STORE_ID_BYTES or not isinstance(segment_bytes, int):
            raise BadFile(f"{STORE} has no valid store id and segment size")
        if segment_bytes % MIB or not 0 < segment_bytes <= 1 << 40:
            raise BadFile(f"{STORE} has segments of {segment_bytes} bytes")
        return cls(store_id, segment_bytes)


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """How a capacity is divided. All parts together are at most the capacity (I4, T2)."""

    capacity_bytes: int
    segment_bytes: int
    data_bytes: int  # of all segments together
    handles: int
    journal_bytes: int  # of one journal
    snapshot_bytes: int  # of one snapshot
    quarantine_bytes: int

    @classmethod
    def plan(cls, capacity_bytes: int, quarantine_bytes: int, segment_bytes: int | None = None) -> Self:
        """Plan how the capacity is divided. `segment_bytes` is that of an existing store.

        Raise ConfigError, with the numbers, if nothing would be left.
        """
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise ConfigError("", "tier.capacity", f"{capacity_bytes} bytes are less than {CAPACITY_BYTES_MIN}")
        handles = min(max(capacity_bytes // _HANDLE_BYTES, _HANDLES_MIN), _HANDLES_MAX)
        snapshot = _whole(handles * _SNAPSHOT_RECORD_BYTES)
        journal = min(max(_whole(snapshot // 4), _JOURNAL_BYTES_MIN), _JOURNAL_BYTES_MAX)
        quarantine = min(quarantine_bytes, capacity_bytes // _QUARANTINE_SHARE) // GRANULE_BYTES * GRANULE_BYTES
        overhead = _OVERHEAD_BYTES + capacity_bytes // _OVERHEAD_SHARE
        left = capacity_bytes - _JOURNALS * journal - _SNAPSHOTS * snapshot - quarantine - overhead
        return cls(
            capacity_bytes, segment_bytes or _segment_bytes(capacity_bytes), left // GRANULE_BYTES * GRANULE_BYTES,
            handles, journal, snapshot, quarantine,
        )  # fmt: skip

    @property
    def segments(self) -> int:
        return -(-self.data_bytes // self.segment_bytes)

    @property
    def beside_bytes(self) -> int:
        """Return the bytes that are written outside segments and quarantine at most."""
        return _JOURNALS * self.journal_bytes + _SNAPSHOTS * self.snapshot_bytes

    def length_of(self, segment: int) -> int:
        return min(self.segment_bytes, self.data_bytes - segment * self.segment_bytes)

    def pieces(self, fragments: Sequence[Extent]) -> Iterator[tuple[int, int, int]]:
        """Yield (segment, offset in it, bytes) of these fragments, cut at the borders of segments."""
        for address, length in fragments:
            end = address + length
            at = address
            while at < end:
                segment, offset = divmod(at, self.segment_bytes)
                piece = min(end - at, self.segment_bytes - offset)
                yield segment, offset, piece
                at += piece

    def parts(self, fragments: Sequence[Extent], length_bytes: int) -> tuple[Part, ...]:
        """Return the parts of files that hold the first `length_bytes` of these fragments."""
        found: list[Part] = []
        for segment, offset, piece in self.pieces(fragments):
            if length_bytes > 0:
                found.append(Part(segment_name(segment), offset, min(piece, length_bytes)))
                length_bytes -= piece
        return tuple(found)


def _whole(size_bytes: int) -> int:
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES


def _segment_bytes(capacity_bytes: int) -> int:
    wanted = max(capacity_bytes // _SEGMENTS_WANTED, 1)
    power = 1 << wanted.bit_length() - 1
    least = -(-capacity_bytes // _SEGMENTS_MAX // MIB) * MIB  # so that there are not too many files
    return max(min(max(power, _SEGMENT_BYTES_MIN), _SEGMENT_BYTES_MAX), least)
