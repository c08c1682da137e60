"""`kvdepotd inspect`: the content of a disk tier's directory, or of one of its files, as plain records.

It only reads, and takes no lock. While a daemon runs, a journal may end in the middle of a record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kvdepot.core.calls import Kind
from kvdepot.core.limits import OBJECT_BYTES_MAX
from kvdepot.core.object_keys import NO_KEYS, KeyRing
from kvdepot.core.objectfile import (
    HEADER_BYTES,
    MAGIC,
    PAGE_BYTES,
    Codec,
    ObjectDamageError,
    ObjectHeader,
    fields_as_found,
    object_bytes,
)
from kvdepot.server.io.context import Context
from kvdepot.server.io.direct_io import outcome_of
from kvdepot.server.io.jobs import Part, ReadObject
from kvdepot.server.io.objects import read_object
from kvdepot.server.offline.store_files import (
    OfflineRefusalError,
    layout_as_found,
    quarantine_of,
    quarantined,
    store_of,
)
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk import layout as names
from kvdepot.server.tiers.disk.layout import Store
from kvdepot.server.tiers.disk.records import (
    JOURNAL_HEADER_BYTES,
    SNAPSHOT_HEADER_BYTES,
    BadFile,
    BadRecord,
    Put,
    check_journal_header,
    unpack_record,
    unpack_snapshot_header,
)
from kvdepot.server.tiers.disk.recovery import files_of, read_index, sizes_of

LISTED_MAX: Final = 1_000
"""Of one list; `left_out` says how many more there were."""
_FILE_BYTES_MAX: Final = 2 << 30

Record = dict[str, Any]


def inspect(path: Path, keys: KeyRing = NO_KEYS) -> Record:
    """Return what a path holds. Raise OfflineRefusalError for files of other programs, and OSError.

    `keys` are for an object with a MAC.
    """
    if path.is_dir():
        return _directory(path)
    folder = path.absolute().parent.parent
    if path.suffix == ".log":
        return _journal(path, store_of(folder))
    if path.suffix == ".snap":
        return _snapshot(path, store_of(folder))
    if path.suffix == ".seg":
        return {"what": "segment", "file": str(path), "bytes": path.stat().st_size} | _listed("headers", _headers(path))
    return _object(path, keys)


def _directory(root: Path) -> Record:
    store = store_of(root)
    try:
        index = read_index(root, store, layout_as_found(store))
    except BadFile as error:
        raise OfflineRefusalError(f"{root}: {error}") from error
    segments = sizes_of(root / names.SEGMENTS, ".seg").values()
    quarantine = quarantine_of(root)
    return {
        "what": "disk tier", "directory": str(root), "store_id": store.store_id.hex(),
        "segment_bytes": store.segment_bytes, "segments": len(segments), "segments_bytes": sum(segments),
        "next_generation": index.generation, "notes": list(index.notes),
        **objects_record(index.puts),
        "snapshots": [_snapshot(path, store) for path in files_of(root / names.SNAPSHOTS, ".snap")],
        "journals": [_journal(path, store) for path in files_of(root / names.JOURNALS, ".log")],
        "quarantine_bytes": sum(file.size_bytes for file in quarantine),
        **_listed("quarantine", (asdict(file) | {"at": time_text(file.at)} for file in quarantine)),
    }  # fmt: skip


def objects_record(puts: Iterable[Put]) -> Record:
    """Return the number of objects by kind, and the bytes that they take on the device."""
    kinds, codecs, namespaces, sizes = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for put in puts:
        namespace = put.name.namespace.hex()
        kinds[kind_text(put.name.kind)] += 1
        codecs[codec_text(put.codec)] += 1
        namespaces[namespace] += 1
        sizes[namespace] += put.medium_bytes
    return {
        "objects": kinds.total(), "objects_bytes": sizes.total(), "kinds": dict(kinds), "codecs": dict(codecs),
        **_listed("namespaces", (
            {"id": name, "objects": count, "bytes": sizes[name]} for name, count in namespaces.most_common()
        )),
    }  # fmt: skip


def _journal(path: Path, store: Store) -> Record:
    data, generation = _data(path), _generation(path)
    counts: Counter[str] = Counter()
    at, stopped = 0, ""
    try:
        check_journal_header(data, store.store_id, generation)
        at = JOURNAL_HEADER_BYTES
        while at < len(data):
            record, at = unpack_record(data, at)
            counts["put" if isinstance(record, Put) else record.type.name.lower()] += 1
    except (BadFile, BadRecord) as error:
        stopped = str(error)
    return {
        "what": "journal", "file": str(path), "generation": generation, "bytes": len(data), "records": dict(counts),
        "readable_bytes": at, "stopped": stopped,
    }  # fmt: skip


def _snapshot(path: Path, store: Store) -> Record:
    data, generation = _data(path), _generation(path)
    record: Record = {"what": "snapshot", "file": str(path), "generation": generation, "bytes": len(data)}
    try:
        header = unpack_snapshot_header(data, store.store_id, generation)
        objects = objects_record(_puts(data))
    except (BadFile, BadRecord) as error:
        return record | {"complete": False, "why": str(error)}
    facts = asdict(replace(header, store_id=b"", body_sum=0))
    del facts["store_id"], facts["body_sum"], facts["generation"]
    return record | {"complete": True, **facts, **objects}


def _puts(data: memoryview) -> Iterator[Put]:
    at = SNAPSHOT_HEADER_BYTES
    while at < len(data):
        record, at = unpack_record(data, at)
        if isinstance(record, Put):
            yield record


def _object(path: Path, keys: KeyRing) -> Record:
    """Return what an object in a file of its own holds, or what is left of it."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        page = file.read(HEADER_BYTES)
    kept = quarantined(path)
    if kept is None and page[: len(MAGIC)] != MAGIC:
        raise OfflineRefusalError(f"{path} is no object, segment, journal or snapshot")
    outcome, detail = _verified(path, page, size_bytes, 0 if kept is None else kept.sequence, keys)
    record: Record = {
        "what": "object", "file": str(path), "bytes": size_bytes, "outcome": str(outcome), "detail": detail,
        "header": _header_record(page),
    }  # fmt: skip
    if kept is not None:
        record["quarantined"] = {"at": time_text(kept.at), "reason": kept.reason, "sequence": kept.sequence}
    if outcome is not IoOutcome.OK:
        record |= _traces(path)
    return record


def _verified(path: Path, page: bytes, size_bytes: int, sequence: int, keys: KeyRing) -> tuple[IoOutcome, str]:
    """Return the outcome of a file's object. Its header names it, except the sequence, which the file name has."""
    try:
        header = ObjectHeader.unpack(page)
    except ObjectDamageError as error:
        return IoOutcome(error.damage.value), str(error)
    whole_pages = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    part = Part(path.name, 0, min(whole_pages, object_bytes(OBJECT_BYTES_MAX)))
    context = Context(str(path.absolute().parent))
    try:
        answer = read_object(ReadObject((part,), header.name, sequence, None), context, keys)
    except ObjectDamageError as error:
        return IoOutcome(error.damage.value), str(error)
    except OSError as error:
        return outcome_of(error), str(error)
    finally:
        context.close()
    return answer.outcome, answer.detail


def _header_record(page: bytes | memoryview) -> Record:
    found: Record = dict(fields_as_found(page))
    if found:
        found["kind"], found["codec"] = kind_text(found["kind"]), codec_text(found["codec"])
        found["created_at"] = time_text(found["created_at"])
    return found


def _traces(path: Path) -> Record:
    """Return hints at the cause of damage: pages never written, and headers of other objects in the payload."""
    zero_pages, pages = 0, 0
    with path.open("rb") as file:
        while page := file.read(PAGE_BYTES):
            pages += 1
            zero_pages += not any(page)
    return {"pages": pages, "zero_pages": zero_pages} | _listed(
        "headers_inside", (found for found in _headers(path) if found["offset"])
    )


def _headers(path: Path) -> Iterator[Record]:
    """Yield each page that begins like a header, of served and of earlier objects."""
    with path.open("rb") as file:
        while page := file.read(PAGE_BYTES):
            if page[: len(MAGIC)] != MAGIC:
                continue
            try:
                ObjectHeader.unpack(page)
                outcome, detail = IoOutcome.OK, ""
            except ObjectDamageError as error:
                outcome, detail = IoOutcome(error.damage.value), str(error)
            offset = file.tell() - len(page)
            yield {"offset": offset, "outcome": str(outcome), "detail": detail} | _header_record(page)


def _listed(name: str, items: Iterable[Record]) -> Record:
    """Return at most LISTED_MAX entries, and how many more there are."""
    found: list[Record] = []
    left_out = 0
    for item in items:
        if len(found) < LISTED_MAX:
            found.append(item)
        else:
            left_out += 1
    return {name: found} | ({f"{name}_left_out": left_out} if left_out else {})


def _data(path: Path) -> memoryview:
    if path.stat().st_size > _FILE_BYTES_MAX:
        raise OfflineRefusalError(f"{path} has more than {_FILE_BYTES_MAX} bytes: no journal or snapshot has")
    return memoryview(path.read_bytes())


def _generation(path: Path) -> int:
    generation = names.generation_of(path.name)
    if generation is None:
        raise OfflineRefusalError(
            f"{path} is not named like a journal or snapshot, which is how its generation is known"
        )
    return generation


def kind_text(kind: int) -> str:
    return Kind(kind).name.lower() if kind in Kind.__members__.values() else str(kind)


def codec_text(codec: int) -> str:
    return Codec(codec).name.lower().replace("_", "-") if codec in Codec.__members__.values() else str(codec)


def time_text(seconds: int) -> str:
    """Return a time as UTC; the number itself if no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat().removesuffix("+00:00") + "Z"
    except (ValueError, OverflowError, OSError):
        return str(seconds)
