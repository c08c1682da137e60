"""Export files: docs/formats/export.md byte by byte, the golden file, and everything that is not one."""

from __future__ import annotations

import io
import re
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.client.ctl.exporting import planned
from kvdepot.client.ctl.importing import spec_of
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.errors import InvalidArgument, NotFound
from kvdepot.core.export_file import ExportedObject, ExportEnd, ExportHead, ExportReader, ExportWriter
from kvdepot.core.groups import GroupSpec
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.listing import Chunk, ChunkPage
from kvdepot.core.objectfile import Codec, ObjectHeader, ObjectName, payload_sum
from kvdepot.proto import codec

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "export-v1" / "hybrid.kvdx"
"""Written once by `golden_export` and never rewritten."""
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "formats" / "export.md"
PAGE = 4096
GROUPS = (GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)), GroupSpec(Kind.STATE, 16, rank_block_bytes=(6000,)))
SPEC = NamespaceSpec(
    {"model": '"golden"'}, 16, GROUPS, {Kind.ATTENTION: 4096, Kind.STATE: 6000}, label="golden", tenant="a", bumps=3
)
FIELDS = codec.encode_spec(SPEC)
KEYS = [bytes([number] * 16) for number in (1, 2, 3)]


def golden_objects() -> list[ExportedObject]:
    parents = [ROOT_KEY, *KEYS]
    names = [
        ObjectName(SPEC.namespace_id(), key, parents[at], kind, 16 * (at + 1), SPEC.object_bytes[kind])
        for at, key in enumerate(KEYS)
        for kind in ((Kind.ATTENTION, Kind.STATE) if at == 2 else (Kind.ATTENTION,))
    ]
    return [ExportedObject(name, bytes([name.key[0] * 16 + name.kind]) * name.raw_bytes) for name in names]


def golden_export() -> bytes:
    file = io.BytesIO()
    objects = golden_objects()
    size_bytes = sum(len(one.payload) for one in objects)
    writer = ExportWriter(file, ExportHead(SPEC.namespace_id(), FIELDS, 1_800_000_000, len(objects), size_bytes))
    for one in objects:
        writer.add(one, payload_sum((one.payload,)))
    writer.end(2)
    return file.getvalue()


def read(data: bytes) -> tuple[ExportReader, list[ExportedObject]]:
    reader = ExportReader(io.BytesIO(data))
    return reader, list(reader.objects(SPEC.object_bytes))


def test_the_golden_file_is_read_and_written_as_it_is() -> None:
    data = GOLDEN.read_bytes()
    reader, objects = read(data)
    assert spec_of(reader) == SPEC
    assert [(one.name, bytes(one.payload)) for one in objects] == [(o.name, o.payload) for o in golden_objects()]
    assert reader.end == ExportEnd(4, 3 * 4096 + 6000, 2) and not reader.cut_short and not reader.damaged
    assert golden_export() == data


def test_the_document_says_where_everything_lies() -> None:
    tables = re.findall(r"(?:\| \d+ \| \d+ \| [^\n]+\n)+", DOCUMENT.read_text())
    head, end = ([tuple(map(int, row)) for row in re.findall(r"\| (\d+) \| (\d+) \|", table)] for table in tables)
    for rows in (head, end):
        assert [at + size for at, size in rows] == [at for at, _ in rows[1:]] + [PAGE]
    data = golden_export()
    values: list[bytes | int] = [
        b"KVDEXPRT",
        1,
        1,
        xxhash.xxh3_64_intdigest(data[:16] + data[24:PAGE]),
        SPEC.namespace_id(),
        1_800_000_000,
    ]
    values += [len(FIELDS), xxhash.xxh3_128_digest(FIELDS), 4, 3 * 4096 + 6000]
    for (at, size), value in zip(head, values, strict=False):
        expected = value if isinstance(value, bytes) else value.to_bytes(size, "little")
        assert data[at : at + size] == expected, at
    assert not any(data[head[-1][0] : PAGE])
    assert data[PAGE : PAGE + len(FIELDS)] == FIELDS
    assert ObjectHeader.unpack(data[2 * PAGE : 3 * PAGE]).name == golden_objects()[0].name
    last = data[-PAGE:]
    assert last[:8] == b"KVDEXEND" and struct.unpack("<QQQ", last[24:48]) == (4, 3 * 4096 + 6000, 2)
    assert not any(last[48:])


@pytest.mark.requirement("I1")
@given(cut=st.integers(0, len(golden_export()) - 1))
def test_a_file_that_is_cut_gives_what_is_before_and_says_so(cut: int) -> None:
    data = golden_export()[:cut]
    if cut < PAGE + len(FIELDS):
        with pytest.raises(InvalidArgument):
            read(data)
        return
    reader, objects = read(data)
    assert [one.name for one in objects] == [one.name for one in golden_objects()][: len(objects)]
    assert reader.end is None


@pytest.mark.requirement("I1")
@given(at=st.integers(0, len(golden_export()) - 1), bit=st.integers(0, 7))
def test_one_bit_anywhere_is_never_a_wrong_object(at: int, bit: int) -> None:
    data = bytearray(golden_export())
    data[at] ^= 1 << bit
    whole = {(one.name, one.payload) for one in golden_objects()}
    try:
        reader, objects = read(bytes(data))
        spec = spec_of(reader)
    except InvalidArgument:
        assert at < 2 * PAGE
        return
    assert spec == SPEC, "padding"
    assert {(one.name, bytes(one.payload)) for one in objects} <= whole
    if len(objects) < 4:
        assert reader.damaged or reader.cut_short


def test_fields_of_another_namespace_are_refused() -> None:
    data = bytearray(golden_export())
    data[24] ^= 1
    data[16:24] = xxhash.xxh3_64_intdigest(bytes(data[:16] + data[24:PAGE])).to_bytes(8, "little")
    reader = ExportReader(io.BytesIO(bytes(data)))
    with pytest.raises(InvalidArgument, match="its fields are those of namespace"):
        spec_of(reader)
    assert not list(reader.objects(SPEC.object_bytes)) and "an object of namespace" in reader.cut_short


def test_a_later_format_is_refused_and_a_compatible_one_is_read() -> None:
    for version, compatible, readable in ((2, 2, False), (2, 1, True)):
        data = bytearray(golden_export())
        data[8:16] = struct.pack("<II", version, compatible)
        data[16:24] = xxhash.xxh3_64_intdigest(bytes(data[:16] + data[24:PAGE])).to_bytes(8, "little")
        if readable:
            assert len(read(bytes(data))[1]) == 4
        else:
            with pytest.raises(InvalidArgument, match="upgrade kvdepotctl"):
                read(bytes(data))


def chunk(key: int, parent: int, depth: int, ram: str, disk: str) -> Chunk:
    kinds = [bytes(Kind[{"a": "ATTENTION", "s": "STATE"}[one]] for one in has) for has in (ram, disk)]
    return Chunk(bytes([key] * 16), bytes([parent] * 16), 16 * depth, usable=True, kinds=tuple(kinds))


def test_a_plan_has_parents_first_one_path_after_the_other_and_paths_before_states() -> None:
    page = ChunkPage(
        ("ram", "nvme"),
        (
            chunk(4, 1, 2, "a", "s"), chunk(3, 2, 3, "sa", ""), chunk(2, 1, 2, "", "a"), chunk(9, 8, 5, "a", ""),
            chunk(1, 0, 1, "a", "a"), chunk(5, 0, 1, "a", ""),
        ),
    )  # fmt: skip
    plan = planned(page, SPEC, b"", "")
    order = [(name.key[0], Kind(name.kind)) for names in plan for name in names]
    assert sorted(order) == sorted(
        [(1, Kind.ATTENTION), (2, Kind.ATTENTION), (3, Kind.ATTENTION), (3, Kind.STATE), (4, Kind.ATTENTION),
         (4, Kind.STATE), (5, Kind.ATTENTION)]
    ), "what has no path is left out"  # fmt: skip
    assert order.index((3, Kind.STATE)) == order.index((3, Kind.ATTENTION)) + 1
    seen = [names[0].key[0] for names in plan]
    assert seen.index(2) == seen.index(3) - 1 and seen.index(1) < min(seen.index(2), seen.index(4))
    path = planned(page, SPEC, bytes([3] * 16), "")
    assert [name.key[0] for names in path for name in names] == [1, 2, 3, 3]
    in_ram = [(name.key[0], name.kind) for names in planned(page, SPEC, b"", "ram") for name in names]
    assert (2, Kind.ATTENTION) not in in_ram and (4, Kind.STATE) not in in_ram and len(in_ram) == 5
    with pytest.raises(NotFound, match="not there any more"):
        planned(page, SPEC, bytes([9] * 16), "")
    with pytest.raises(NotFound, match="there are ram, nvme"):
        planned(page, SPEC, b"", "tape")


class _Counting(io.BytesIO):
    largest = 0

    def read(self, size: int | None = -1) -> bytes:
        self.largest = max(self.largest, size or 0)
        return super().read(size)


@pytest.mark.requirement("I4")
def test_an_object_that_is_announced_and_not_there_takes_no_memory() -> None:
    """A read of 8 GiB takes them before there is a byte."""
    size_bytes = 8 << 30
    groups = (GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(size_bytes,)),)
    spec = NamespaceSpec({"model": '"large"'}, 16, groups, {Kind.ATTENTION: size_bytes})
    name = ObjectName(spec.namespace_id(), KEYS[0], ROOT_KEY, Kind.ATTENTION, 16, size_bytes)
    file = _Counting()
    ExportWriter(file, ExportHead(spec.namespace_id(), codec.encode_spec(spec), 1_800_000_000, 1, size_bytes))
    file.write(ObjectHeader(name, Codec.NONE, size_bytes, 0, 0, 0, 1_800_000_000).pack() + bytes(100_000))
    file.seek(0)
    reader = ExportReader(file)
    assert list(reader.objects(spec.object_bytes)) == []
    assert reader.cut_short == f"payload: 100000 of {size_bytes} bytes"
    assert file.largest <= 16 << 20
