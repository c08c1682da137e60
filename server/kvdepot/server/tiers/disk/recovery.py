"""The files of a disk tier, read and made while nobody writes to them: opening and compaction (docs/formats/disk.md).

Blocking file operations, called by the opening process and by offline verbs, never by the daemon's loop.
Everything here raises OSError as the system calls do.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from kvdepot.server.io.jobs import prober
from kvdepot.server.platform.durable_files import TEMPORARY, naming, opened, publish, sync_file
from kvdepot.server.platform.file_room import NO_ROOM, allocate
from kvdepot.server.tiers.disk import layout as names
from kvdepot.server.tiers.disk.columns import Flags, Numbers, PutColumns
from kvdepot.server.tiers.disk.layout import DiskLayout, Store
from kvdepot.server.tiers.disk.paths import depth_first
from kvdepot.server.tiers.disk.records import (
    GENERATION_MAX,
    SEQUENCE_BITS,
    SNAPSHOT_HEADER_BYTES,
    BadFile,
    SnapshotHeader,
    pack_journal_header,
    pack_snapshot_header,
)
from kvdepot.server.tiers.disk.replay import Replayed, replay

_FILE_BYTES_MAX: Final = 2 << 30
"""Of a journal or snapshot: above what any capacity makes. More is not read."""
_NO_ROOM = NO_ROOM | {errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Index:
    """What lies on the device. `notes` are for the log: what did not count, and why."""

    replayed: Replayed
    puts: PutColumns  # parents before children
    generation: int  # above every one that a file name has
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """What a snapshot says in addition to its records."""

    synced_sequence: int
    highest_sequence: int
    scrub_position: int
    day: int
    day_bytes: int


def read_store(root: Path) -> Store | None:
    """Return the store, or None if there is none yet. Raise BadFile for a store that this version cannot open."""
    try:
        return Store.unpack(_read(root / names.STORE))
    except FileNotFoundError:
        return None


def make_store(root: Path, layout: DiskLayout, random_bytes: Callable[[int], bytes]) -> Store:
    """Make a new store. Delete what a store without its `store.json` has left: nothing could tell what that is.

    Raise BadFile, and change nothing, if anything else lies in the directory: the path belongs to something else.
    """
    with naming("readdir", root):
        left, foreign = _left_overs(root)
    if foreign:
        raise BadFile(f"there is no {names.STORE}, and {foreign} is not a tier's: the path belongs to something else")
    for path in left:
        with naming("unlink", path):
            path.unlink()
    store = Store(random_bytes(16), layout.segment_bytes)
    publish(root / names.STORE, [store.pack()])
    return store


def read_index(root: Path, store: Store, layout: DiskLayout) -> Index:
    """Replay what is there, less what lies outside the capacity or the files. Writes nothing."""
    snapshots, journals = _numbered(root / names.SNAPSHOTS), _numbered(root / names.JOURNALS)
    whole = sorted(number for number, path in snapshots.items() if path.suffix != TEMPORARY)
    notes: list[str] = []
    found: Replayed | None = None
    for number in reversed(whole):
        try:
            data = _read(snapshots[number])
            found = replay(data, _row(journals, number), store.store_id, number)
            break
        except BadFile as error:
            notes.append(f"snapshot {number} does not count: {error}")
    if found is None:
        found = replay(None, _row(journals, _row_start(journals)), store.store_id, 0)
        if whole:
            notes.append("no snapshot counts: only what the journals say is known")
    if found.stopped:
        notes.append(f"replay stopped: {found.stopped}")
    puts, gone = _servable(root, found, layout)
    notes += gone
    highest = max([*snapshots, *journals, found.highest_sequence >> SEQUENCE_BITS], default=0)
    if highest >= GENERATION_MAX:
        raise BadFile(f"generation {highest} is the last one there is")
    return Index(found, puts, highest + 1, tuple(notes))


def write_generation(
    root: Path, store: Store, generation: int, records: Sequence[bytes], facts: SnapshotFacts
) -> int:  # fmt: skip
    """Write the snapshot of a generation and its empty journal, both durable. Then remove all others.

    Return the bytes of the snapshot. `records`: packed PUTs, parents first.
    """
    size_bytes = _write_snapshot(root, store, generation, records, facts)
    journal = root / names.journal_name(generation)
    publish(journal, [pack_journal_header(store.store_id, generation)])
    remove_others(root, generation)
    return size_bytes


def compact(root: Path, store: Store, generation: int, synced_sequence: int) -> int:
    """Make snapshot generation + 1 out of snapshot and journal `generation`, and remove both. Return its bytes.

    Raise BadFile if these are not what the daemon has written: nothing is changed then.
    """
    snapshot = _read(root / names.snapshot_name(generation))
    journal = _read(root / names.journal_name(generation))
    found = replay(snapshot, [(generation, journal)], store.store_id, generation)
    if found.stopped:
        raise BadFile(found.stopped)
    sync_segments(root)
    puts = found.live.select(_parents_first(found.live))
    facts = SnapshotFacts(
        synced_sequence, found.highest_sequence, found.scrub_position, found.day, found.day_bytes
    )  # fmt: skip
    size_bytes = _write_snapshot(root, store, generation + 1, puts.packed(), facts)
    remove_others(root, generation + 1)
    return size_bytes


def sync_segments(root: Path) -> None:
    """Make everything durable that was written to a segment."""
    for path in files_of(root / names.SEGMENTS, ".seg"):
        with opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
            sync_file(fd, path, data_only=True)


def complete_segments(root: Path, layout: DiskLayout, used_end: int, making: int = -1) -> int:
    """Allocate what is missing up to the last segment that is there. Truncate what is beyond the capacity.

    Return the number of segments.
    `used_end`: the byte after the last one that is not free. Segments before it are made even if they are missing.
    Those after it are removed if the file system has no room for them.
    `making`: a worker may be making this segment. It is neither counted nor touched, unless it has bytes in use.
    Where that worker meets the end of the room, it cuts the file to what it found, or removes it.
    """
    there = _segment_sizes(root)
    for number in [number for number in there if number >= layout.segments]:
        (root / names.segment_name(number)).unlink()
        del there[number]
    if making >= 0:
        there = {number: size for number, size in there.items() if number < making}
    count = max(max(there, default=-1) + 1, -(-used_end // layout.segment_bytes))
    for number in range(count):
        length = layout.length_of(number)
        if there.get(number) == length:
            continue
        try:
            _allocate(root / names.segment_name(number), length, layout.beside_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM or used_end > number * layout.segment_bytes:
                raise
            for beyond in range(number, count):
                (root / names.segment_name(beyond)).unlink(missing_ok=True)
            return number
    return count


def remove_others(root: Path, generation: int) -> None:
    """Remove journals and snapshots of older generations, and their temporaries."""
    for folder in (names.SNAPSHOTS, names.JOURNALS):
        for path in (root / folder).iterdir():
            number = names.generation_of(path.name)
            if number is not None and (number < generation or path.suffix == TEMPORARY):
                with naming("unlink", path):
                    path.unlink(missing_ok=True)


def remove_temporaries(root: Path) -> None:
    """Remove what killed workers have left. Called only while there are no workers, except for probes.

    A probe of a living process may be this daemon's, and under way. If another process has the pid by now, the probe is
    removed at a later opening.
    """
    for path in (root / names.PROBE, *files_of(root / names.QUARANTINE, TEMPORARY)):
        path.unlink(missing_ok=True)
    for path in root.glob(f"{names.PROBE}.*"):
        pid = prober(path.name, names.PROBE)
        if pid is not None and not _lives(pid):
            path.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    """Return whether any process has this pid now, of any owner."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    except OverflowError:  # no process ever had it
        return False
    return True


def _write_snapshot(
    root: Path, store: Store, generation: int, records: Sequence[bytes], facts: SnapshotFacts
) -> int:  # fmt: skip
    total = xxhash.xxh3_128()
    for record in records:
        total.update(record)
    body_bytes = sum(map(len, records))
    header = SnapshotHeader(
        store.store_id, generation, facts.synced_sequence, facts.highest_sequence, facts.scrub_position,
        facts.day, facts.day_bytes, len(records), body_bytes, total.intdigest(),
    )  # fmt: skip
    publish(root / names.snapshot_name(generation), [pack_snapshot_header(header), *records])
    return SNAPSHOT_HEADER_BYTES + body_bytes


def _left_overs(root: Path) -> tuple[list[Path], str]:
    """Return files of the folders that a new store makes again, and the first thing that no store would have made."""
    left: list[Path] = []
    for path in sorted(root.iterdir()):
        if path.name in names.FOLDERS:
            files = sorted(path.iterdir())
            strange = [file for file in files if not names.is_ours(path.name, file.name)]
            if strange:
                return [], str(strange[0].relative_to(root))
            left += files if path.name != names.QUARANTINE else []
        elif path.name not in names.LOOSE and not path.name.startswith(names.PROBE):
            return [], path.name
    return left, ""


def _numbered(folder: Path) -> dict[int, Path]:
    """Return the file of each generation in a folder; a temporary only if there is no file."""
    found: dict[int, Path] = {}
    with naming("readdir", folder):
        paths = sorted(folder.iterdir(), reverse=True)  # temporaries first
    for path in paths:
        number = names.generation_of(path.name)
        if number is not None:
            found[number] = path
    return found


def _row(journals: dict[int, Path], start: int) -> list[tuple[int, bytes]]:
    row = []
    while start in journals:
        row.append((start, _read(journals[start])))
        start += 1
    return row


def _row_start(journals: dict[int, Path]) -> int:
    start = max(journals, default=0)
    while start - 1 in journals:
        start -= 1
    return start


def _read(path: Path) -> bytes:
    with opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd, naming("read", path):  # opening a pipe would wait for ever
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadFile(f"{path.name} is no regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise BadFile(f"{path.name} has more than {_FILE_BYTES_MAX} bytes")
    return data


def files_of(folder: Path, suffix: str) -> list[Path]:
    """Return the files of a folder, by name. Raise OSError where `Path.glob` takes a refusal for an empty folder."""
    with naming("readdir", folder):
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)


def sizes_of(folder: Path, suffix: str) -> dict[Path, int]:
    """Return the bytes of each file of a folder, by name. One that a worker removes meanwhile is left out."""
    sizes = {}
    for path in files_of(folder, suffix):
        with suppress(FileNotFoundError), naming("stat", path):
            sizes[path] = path.stat().st_size
    return sizes


def _segment_sizes(root: Path) -> dict[int, int]:
    return {
        int(path.stem): size_bytes
        for path, size_bytes in sizes_of(root / names.SEGMENTS, ".seg").items()
        if path.stem.isdecimal() and path.name == Path(names.segment_name(int(path.stem))).name
    }


def _servable(root: Path, found: Replayed, layout: DiskLayout) -> tuple[PutColumns, list[str]]:
    """Return the objects inside the files and the capacity, one path after the other, and notes on the others.

    There are at most as many as the index has room for.
    """
    live = found.live
    if not found.closed:
        live = live.unproven(live.sequences > found.synced_sequence)
    inside = live.select(np.flatnonzero(_inside(live, _segment_sizes(root), layout)))
    inside = inside.select(_parents_first(inside))
    fitting = _fitting(inside, layout)
    notes = []
    if len(inside) < len(live):
        notes.append(f"{len(live) - len(inside)} objects lie outside the segments or the capacity")
    if found.overlapped:
        notes.append(f"{found.overlapped} objects are damaged: later ones were written over them")
    if fitting < len(inside):
        notes.append(f"{len(inside) - fitting} objects do not fit the index of this capacity")
    fitted = inside.select(np.arange(fitting))
    return fitted.select(depth_first(fitted)), notes


def _parents_first(puts: PutColumns) -> Numbers:
    order: Numbers = np.argsort(puts.fields["boundary_tokens"], kind="stable")
    return order


def _inside(puts: PutColumns, sizes: dict[int, int], layout: DiskLayout) -> Flags:
    """Return which objects have all of their bytes in segments that are there and long enough."""
    length = layout.segment_bytes
    sizes = {number: size for number, size in sizes.items() if number < layout.segments}  # others may have any number
    there = np.zeros(max(sizes, default=0) + 2, np.int64)  # the last one stands for all that are not there
    there[list(sizes)] = list(sizes.values())
    short: Numbers = np.cumsum(there < length) - (there < length)  # segments before each that are not whole
    starts, ends, owners = puts.places()
    first, last = (np.minimum(at // length, len(there) - 1) for at in (starts, ends - 1))
    inside = (short[first] == short[last]) & (ends - last * length <= there[last]) & (ends <= layout.data_bytes)
    found = np.ones(len(puts), np.bool_)
    found[owners[~inside]] = False
    return found


def _fitting(puts: PutColumns, layout: DiskLayout) -> int:
    """Return how many of the first objects fit the index."""
    ends = np.cumsum(puts.fields["length"], dtype=np.int64)
    fitting = np.searchsorted(ends, layout.snapshot_bytes - SNAPSHOT_HEADER_BYTES, side="right")
    return min(int(fitting), layout.handles)


def _allocate(path: Path, length_bytes: int, beside_bytes: int) -> None:
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
        allocate(fd, os.fspath(path), length_bytes, beside_bytes)
