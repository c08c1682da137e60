"""Everything kvdepot parses, as functions of any bytes: they return or refuse, and nothing else.

Where a checksum would stop a fuzzer at the first byte, the target puts a right one: what stands behind it
has to hold too.
"""

from __future__ import annotations

import contextlib
import io
import struct
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from google.protobuf.message import DecodeError, Message
from kvdepot.core.arena import NO_ROW, PAGE_BYTES, ArenaLayout, ArenaTables, LentMode, RowState, tables_in_memory
from kvdepot.core.calls import Kind
from kvdepot.core.errors import KvDepotError
from kvdepot.core.export_file import ExportedObject, ExportHead, ExportReader, ExportWriter
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.object_keys import NO_KEYS, KeyRing, parse_keys
from kvdepot.core.objectfile import HEADER_BYTES, Codec, ObjectDamageError, ObjectHeader, ObjectName, fields_as_found
from kvdepot.core.planner import GroupSpec
from kvdepot.proto import call_frames as call_frames_codec
from kvdepot.proto import codec, codec_data
from kvdepot.proto.methods import BY_CALL
from kvdepot.proto.v1 import data_pb2 as data_pb
from kvdepot.server.config import config
from kvdepot.server.io import checksum_wire, jobs, peer_wire, scout_wire, stream_wire
from kvdepot.server.io.codecs import decode
from kvdepot.server.io.framing import FrameError, Framing
from kvdepot.server.io.lent_extents import LentExtents
from kvdepot.server.io.macs import mac_of
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk import messages
from kvdepot.server.tiers.disk.layout import Store
from kvdepot.server.tiers.disk.records import (
    MARK_BYTES,
    RECORD_BYTES_MAX,
    BadFile,
    SnapshotHeader,
    pack_journal_header,
    pack_snapshot_header,
)
from kvdepot.server.tiers.disk.replay import replay
from kvdepot.server.tiers.shared import links

STORE_ID = bytes(16)
_FRAMINGS: tuple[Framing[Any], ...] = (
    jobs.JOBS, jobs.ANSWERS, checksum_wire.JOBS, checksum_wire.ANSWERS, messages.REQUESTS, messages.MESSAGES,
    links.TO_COORDINATOR, links.FROM_COORDINATOR, stream_wire.OPENING,
    peer_wire.FROM_READER, peer_wire.TO_READER, peer_wire.TO_DAEMON, peer_wire.FROM_DAEMON,
    peer_wire.TO_LENDER, peer_wire.FROM_LENDER, scout_wire.TO_SCOUT, scout_wire.FROM_SCOUT,
)  # fmt: skip
_MAGIC_AND_VERSION = struct.pack("<8sII", b"KVDOBJCT", 1, 1)
_METHODS = tuple(BY_CALL.values())
_DATA_REQUESTS: tuple[tuple[type[Message], Callable[..., object]], ...] = (
    (data_pb.LoadRequest, codec_data.decode_load_call),
    (data_pb.StoreRequest, codec_data.decode_store_call),
    (data_pb.StoreRequest, codec_data.decode_store_piece),
    (data_pb.LoadResponse, codec_data.decode_load_piece),
)


def header(data: bytes) -> None:
    """An object's header, as it is, and with a right magic, version and checksum."""
    body = data[:HEADER_BYTES].ljust(HEADER_BYTES - 24, b"\0")[: HEADER_BYTES - 24]
    total = xxhash.xxh3_64_intdigest(_MAGIC_AND_VERSION + body)
    for page in (data, _MAGIC_AND_VERSION + struct.pack("<Q", total) + body):
        fields_as_found(page)
        try:
            found = ObjectHeader.unpack(page)
        except ObjectDamageError:
            continue
        assert 0 < found.stored_bytes <= found.name.raw_bytes
        for keys in (NO_KEYS, KeyRing((bytes(31) + b"k",))):
            with contextlib.suppress(ObjectDamageError):
                mac = mac_of(found, page, keys)
                assert mac is not None or not (found.keyed or keys)


def key_file(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        ring = parse_keys(data.decode("ascii", "replace"))
        assert ring.keys and all(len(key) == 32 for key in ring.keys)


def lz4(data: bytes) -> None:
    _decode(Codec.LZ4, data)


def bitshuffle_lz4(data: bytes) -> None:
    """With the lengths in front that let a chunk come to its library."""
    _decode(Codec.BITSHUFFLE_LZ4, data)
    if len(data) < 4:
        return
    raw_bytes = int.from_bytes(data[:2], "little") + 1
    stored = 16 + len(data) - 4
    block = int.from_bytes(data[2:4], "little")
    chunk = struct.pack("<BBBBIII", 2, 1, 0x24 | (data[0] & 0x10), 2, raw_bytes, block, stored) + data[4:]
    _decode(Codec.BITSHUFFLE_LZ4, struct.pack("<HI", raw_bytes & 0xFFFF, len(chunk)) + chunk)


def _decode(chosen: Codec, data: bytes) -> None:
    """The first two bytes are the raw length."""
    raw_bytes = int.from_bytes(data[:2], "little")
    around = bytearray(b"\xa5" * (raw_bytes + 128))
    target = memoryview(around)[64 : 64 + raw_bytes]
    assert decode(chosen, memoryview(data)[2:], [target]) in (IoOutcome.OK, IoOutcome.CODEC)
    assert around[:64] == around[64 + raw_bytes :] == b"\xa5" * 64


def journal(data: bytes) -> None:
    replay(None, [(1, data)], STORE_ID, 1)
    replay(None, [(1, pack_journal_header(STORE_ID, 1) + _with_sums(data))], STORE_ID, 1)


def snapshot(data: bytes) -> None:
    body = _with_sums(data)
    count = data[-1] if data else 0
    head = SnapshotHeader(STORE_ID, 1, 0, 0, 0, 0, 0, count, len(body), xxhash.xxh3_128_intdigest(body))
    for content in (data, pack_snapshot_header(head) + body):
        try:
            replay(content, [], STORE_ID, 1)
        except BadFile:
            continue


def _with_sums(data: bytes) -> bytes:
    """Records whose checksums hold, as far as their lengths let them be told apart."""
    records = []
    at = 0
    while at + MARK_BYTES <= len(data):
        length = int.from_bytes(data[at : at + 2], "little") % RECORD_BYTES_MAX
        length = max(MARK_BYTES, length - length % 8)
        record = struct.pack("<I", length) + data[at + 4 : at + length - 8]
        record = record.ljust(length - 8, b"\0")
        records.append(record + struct.pack("<Q", xxhash.xxh3_64_intdigest(record)))
        at += length
    return b"".join(records)


def store(data: bytes) -> None:
    try:
        Store.unpack(data)
    except BadFile:
        return


def export(data: bytes) -> None:
    """As it is; with a right head and fields; and what a right end or object header may follow."""
    spec = dense_namespace()
    whole = io.BytesIO()
    writer = ExportWriter(whole, ExportHead(spec.namespace_id(), b"spec", 1, 1, 1))
    name = ObjectName(spec.namespace_id(), bytes(range(16)), bytes(16), Kind.ATTENTION, 16, 4096)
    writer.add(ExportedObject(name, data[:4096].ljust(4096, b"\0")), int.from_bytes(data[:16], "little"))
    for content in (data, whole.getvalue()[: 2 * HEADER_BYTES] + data, whole.getvalue() + data):
        try:
            reader = ExportReader(io.BytesIO(content))
        except KvDepotError:
            continue
        for one in reader.objects(spec.object_bytes):
            assert len(one.payload) == 4096


def dense_namespace() -> NamespaceSpec:
    group = GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,))
    return NamespaceSpec({}, 16, (group,), {Kind.ATTENTION: 4096})


def configuration(data: bytes) -> None:
    """What lies behind TOML; its parser is Python's."""
    try:
        document = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return
    try:
        config.check("fuzzed.toml", document)
    except KvDepotError:
        return


def request(data: bytes) -> None:
    """The first byte says which call, of any service, and whether it is the call or its reply."""
    which, is_reply = divmod(data[0] if data else 0, 2)
    method = _METHODS[which % len(_METHODS)]
    try:
        (method.reply if is_reply else method.call).parse(data[1:])
    except KvDepotError:
        return


def attach_datagram(data: bytes) -> None:
    try:
        codec.decode_attach_call(data)
    except KvDepotError:
        return


def data_request(data: bytes) -> None:
    """The first byte says which message. Over an arena in which a row may be read and another one written."""
    message_class, decode_call = _DATA_REQUESTS[data[0] % len(_DATA_REQUESTS) if data else 0]
    message = message_class()
    with contextlib.suppress(DecodeError, KvDepotError):
        message.ParseFromString(data[1:])
        decode_call(message)
    arena = bytearray(_DATA_LAYOUT.data_bytes)
    extents = LentExtents(memoryview(arena), _DATA_TABLES, session=3)
    words = data[1 : 1 + len(data[1:]) // 40 * 40]
    # As it is, and with rows, offsets and lengths that nearly are those that are lent.
    near = struct.pack("<5Q", 0, *_near(data, (1, PAGE_BYTES, 100, 7)))
    for packed in (words, near):
        with contextlib.suppress(KvDepotError):
            assert len(b"".join(extents.to_read(packed).pieces(16))) <= len(packed) // 40 * 100
        with contextlib.suppress(KvDepotError):
            writing = extents.to_write(packed)
            writing.write(b"w" * min(writing.length, 1000))
            writing.finish()
    arena[PAGE_BYTES : PAGE_BYTES + 100] = bytes(100)
    assert not any(arena)


def _near(data: bytes, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Each number a little off, or not."""
    offs = data[:4].ljust(4, b"\0")
    return tuple(max(value + (off % 5) - 2, 0) if off else value for value, off in zip(wanted, offs, strict=True))


def _data_tables() -> ArenaTables:
    """Row 0 is lent for reading and row 1 for writing to session 3; 100 bytes each, of zeros."""
    tables = tables_in_memory(_DATA_LAYOUT)
    for row, (state, mode) in enumerate(((RowState.COMMITTED, LentMode.READ), (RowState.RESERVED, LentMode.WRITE))):
        values = {"generation": 6 + row, "offset": row * PAGE_BYTES, "length": 100}
        for column, value in (values | {"state": state, "next": NO_ROW}).items():
            tables.extents[column][row] = value
        for column, value in {"row": row, "session": 3, "mode": mode}.items():
            tables.lent[column][row] = value
    return tables


_DATA_LAYOUT = ArenaLayout.plan(ArenaLayout.plan(64 << 20, 8, 8).overhead_bytes + 2 * PAGE_BYTES, 8, 8)
_DATA_TABLES = _data_tables()


def call_frames(data: bytes) -> None:
    """As a client takes them in; `request` has what the daemon does with their bodies."""
    frames = call_frames_codec.Frames()
    frames.feed(data)
    with contextlib.suppress(KvDepotError):
        for frame in frames:
            if frame.method == call_frames_codec.REFUSAL:
                call_frames_codec.decode_refusal(frame.body)


def child_frames(data: bytes) -> None:
    """As daemon and child processes take them in; the first byte says which types they are, the second which one."""
    framing = _FRAMINGS[data[0] % len(_FRAMINGS)] if data else _FRAMINGS[0]
    with contextlib.suppress(FrameError):
        list(framing.take(bytearray(data[1:])))
    with contextlib.suppress(FrameError):
        framing.unpack(data[1] if data[1:] else 0, data[2:])


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        header, lz4, bitshuffle_lz4, journal, snapshot, store, export, configuration, request, attach_datagram,
        data_request, call_frames, child_frames, key_file,
    )
}  # fmt: skip
CORPORA = {
    "configuration": Path(__file__).resolve().parents[2] / "configs",
    "header": Path(__file__).resolve().parents[1] / "golden" / "object-v1",
    "export": Path(__file__).resolve().parents[1] / "golden" / "export-v1",
}
"""Folders of good examples to start from."""
