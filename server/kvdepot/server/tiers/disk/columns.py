"""PUT records by the hundred thousand, as columns: a Python object each would cost an opening seconds.

The same records as `records.Put`, unpacked, checked and packed in a few numpy operations.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import xxhash
from kvdepot.core.allocator import GRANULE_BYTES
from kvdepot.core.limits import OBJECT_BYTES_MAX
from kvdepot.core.objectfile import HEADER_BYTES, PAGE_BYTES
from kvdepot.server.tiers.disk.records import (
    ADDRESS_MAX,
    KINDS,
    UNPROVEN,
    BadRecord,
    Put,
    check_record,
    pack_put,
    unpack_record,
)

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

PREFIX: Final = np.dtype(
    [("length", "<u4"), ("type", "u1"), ("flags", "u1"), ("fragments", "<u2"), ("sequence", "<u8"),
     ("generation", "<u8")]
)  # fmt: skip
"""What every record starts with."""
FIELDS: Final = np.dtype(
    [*((name, PREFIX[name]) for name in PREFIX.names or ()),
     ("namespace", "<u8", 2), ("key", "<u8", 2), ("parent", "<u8", 2), ("kind", "u1"), ("codec", "u1"),
     ("zero", "<u2"), ("boundary_tokens", "<u4"), ("raw_bytes", "<u8"), ("stored_bytes", "<u8"),
     ("stored_sum", "<u8", 2), ("raw_sum", "<u8", 2), ("created_at", "<u8"), ("address", "<u8"),
     ("length_bytes", "<u8")]
)  # fmt: skip
"""A PUT with its first fragment. Further ones and the sum follow."""
_SUM = struct.Struct("<Q")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class PutColumns:
    """PUT records as columns.

    `fields` has dtype FIELDS, a row a PUT. `rest` (n, 2): fragments after the first, of one row after the other.
    """

    fields: npt.NDArray[Any]
    rest: Words

    @classmethod
    def none(cls) -> Self:
        return cls(np.empty(0, FIELDS), np.empty((0, 2), np.uint64))

    @classmethod
    def of(cls, puts: Iterable[Put]) -> Self:
        return cls.unpacked([pack_put(put) for put in puts])

    @classmethod
    def unpacked(cls, records: Sequence[bytes]) -> Self:
        """Return the columns of whole PUT records. What they say is not checked."""
        fields = np.frombuffer(b"".join([record[: FIELDS.itemsize] for record in records]), FIELDS)
        several = np.flatnonzero(fields["fragments"] > 1).tolist()
        rest = b"".join([records[row][FIELDS.itemsize : -_SUM.size] for row in several])
        return cls(fields, np.frombuffer(rest, "<u8").reshape(-1, 2))

    @classmethod
    def joined(cls, parts: Sequence[PutColumns]) -> Self:
        return cls(np.concatenate([part.fields for part in parts]), np.concatenate([part.rest for part in parts]))

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[Put]:
        for record in self.packed():
            put, _ = unpack_record(memoryview(record), 0)
            assert isinstance(put, Put)
            yield put

    @property
    def sequences(self) -> Words:
        sequences: Words = self.fields["sequence"]
        return sequences

    def select(self, rows: Numbers) -> PutColumns:
        """Return these rows in this order."""
        if not len(self.rest):
            return PutColumns(self.fields[rows], self.rest)
        starts = self._rest_starts()
        counts = self.fields["fragments"][rows].astype(np.int64) - 1
        return PutColumns(self.fields[rows], self.rest[ranges(starts[rows], counts)])

    def slices(self, rows: int) -> Iterator[PutColumns]:
        """Yield slices of `rows` rows each; the last one may have fewer."""
        starts = np.append(self._rest_starts(), len(self.rest))
        for low in range(0, len(self), rows):
            high = min(low + rows, len(self))
            yield PutColumns(self.fields[low:high], self.rest[starts[low] : starts[high]])

    def further(self) -> Iterator[tuple[int, Words]]:
        """Yield (row, its fragments after the first) of rows that have several fragments."""
        starts = self._rest_starts()
        for row in np.flatnonzero(self.fields["fragments"] > 1).tolist():
            at = starts[row]
            yield row, self.rest[at : at + int(self.fields["fragments"][row]) - 1]

    def places(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return (first byte, byte after the last, row) of every fragment, as columns."""
        rows = np.arange(len(self))
        owners = np.concatenate((rows, np.repeat(rows, self.fields["fragments"].astype(np.int64) - 1)))
        starts = np.concatenate((self.fields["address"], self.rest[:, 0])).astype(np.int64)
        lengths = np.concatenate((self.fields["length_bytes"], self.rest[:, 1])).astype(np.int64)
        return starts, starts + lengths, owners

    def medium_bytes(self) -> Numbers:
        stored = self.fields["stored_bytes"].astype(np.int64)
        sizes: Numbers = HEADER_BYTES + -(-stored // PAGE_BYTES) * PAGE_BYTES
        return sizes

    def unproven(self, rows: Flags) -> PutColumns:
        """Return all rows, with the flag UNPROVEN set in `rows`."""
        fields = self.fields.copy()
        fields["flags"][rows] |= UNPROVEN
        return PutColumns(fields, self.rest)

    def packed(self) -> list[bytes]:
        """Return the packed records, in the order of the rows."""
        size, whole = FIELDS.itemsize, self.fields.tobytes()
        bodies = [whole[at : at + size] for at in range(0, len(whole), size)]
        for row, fragments in self.further():
            bodies[row] += fragments.tobytes()
        pack, digest = _SUM.pack, xxhash.xxh3_64_intdigest
        return [body + pack(digest(body)) for body in bodies]

    def message(self) -> bytes:
        """Pack the rows for `from_message`, between processes of one daemon."""
        return _COUNT.pack(len(self)) + self.fields.tobytes() + self.rest.tobytes()

    @classmethod
    def from_message(cls, data: bytes) -> Self:
        """Return the rows of a message. Raise ValueError if the lengths do not fit."""
        if len(data) < _COUNT.size:
            raise ValueError(f"{len(data)} bytes have no count")
        (count,) = _COUNT.unpack_from(data)
        fields = np.frombuffer(data, FIELDS, count, _COUNT.size)
        rest = np.frombuffer(data, "<u8", offset=_COUNT.size + fields.nbytes).reshape(-1, 2)
        if int(fields["fragments"].sum(dtype=np.int64)) - count != len(rest):
            raise ValueError(f"{count} records do not have {len(rest)} further fragments")
        return cls(fields, rest)

    def _rest_starts(self) -> Numbers:
        further = self.fields["fragments"].astype(np.int64) - 1
        return np.cumsum(further) - further


def split_records(data: memoryview, at: int) -> tuple[list[bytes], str]:
    """Return the records from an offset on whose checksums are right, up to the first that is bad.

    The text says why that one is bad; it is empty if all are good.
    """
    records: list[bytes] = []
    try:
        while at < len(data):
            length = check_record(data, at)[3]
            records.append(bytes(data[at : at + length]))
            at += length
    except BadRecord as error:
        return records, str(error)
    return records, ""


def prefixes(records: Sequence[bytes]) -> npt.NDArray[Any]:
    """Return the prefixes as an array of dtype PREFIX, one row for each record."""
    found: npt.NDArray[Any] = np.frombuffer(b"".join([record[: PREFIX.itemsize] for record in records]), PREFIX)
    return found


def impossible(puts: PutColumns, records: Sequence[bytes]) -> Flags:
    """Return which rows `unpack_record` refuses. `records`: the same, packed."""
    fields = puts.fields
    stored, raw = fields["stored_bytes"].astype(np.int64), fields["raw_bytes"].astype(np.int64)
    address, length = fields["address"], fields["length_bytes"]
    bad: Flags = ~np.isin(fields["kind"], KINDS) | (fields["zero"] != 0) | (fields["boundary_tokens"] == 0)
    bad |= (stored <= 0) | (stored > raw) | (raw > OBJECT_BYTES_MAX)
    single = fields["fragments"] == 1
    bad |= single & ((address > ADDRESS_MAX) | (length > ADDRESS_MAX) | (address + length > ADDRESS_MAX))
    bad |= single & ((address % GRANULE_BYTES != 0) | (length.astype(np.int64) != puts.medium_bytes()))
    for row in np.flatnonzero(~single).tolist():
        bad[row] = refusal(records[row]) != ""
    return bad


def refusal(record: bytes) -> str:
    """Return why the record is impossible; empty if it is possible."""
    try:
        unpack_record(memoryview(record), 0)
    except BadRecord as error:
        return str(error)
    return ""


def ranges(starts: Numbers, counts: Numbers) -> Numbers:
    """Return start, start + 1, ... of each range, one range after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    found: Numbers = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return found
