"""The command line of `kvdepotd replay`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdepot.core.bars import Glyphs, bar, glyphs_for
from kvdepot.core.errors import InvalidArgument, KvDepotError
from kvdepot.core.eviction import DEFAULT_POLICY, policy_names
from kvdepot.core.trace_file import Trace, coarser, read_trace
from kvdepot.core.units import parse_size_bytes, percent_text, size_text
from kvdepot.core.write_admission import DRIVE_WRITES_PER_DAY
from kvdepot.server.depot.types import TierConfig, WritePolicy
from kvdepot.server.offline.replay import RAM_BYTES_MIN, Disk, Hits, Replay, capacities, recorded, unique_bytes

if TYPE_CHECKING:
    from kvdepot.server.offline.subparsers import Subparsers

NAME: Final = "replay"
_OK, _REFUSED = 0, 2
_CHECKPOINTS = ("last", "all")
_NO_DISK: Final = 0
_COLUMNS_MIN, _COLUMNS_MAX = 80, 120
_PLOT_MIN: Final = 10
"""Columns of the plot at least: a table with a disk is wider than a narrow terminal."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What one replay has. `chunk_factor`: recorded chunks in a chunk."""

    ram_bytes: int
    eviction: str
    chunk_factor: int = 1
    disk_bytes: int = _NO_DISK
    write: WritePolicy = WritePolicy.SECOND_USE
    drive_writes_per_day: float = DRIVE_WRITES_PER_DAY
    checkpoints: bool = False

    @property
    def disk(self) -> Disk | None:
        if not self.disk_bytes:
            return None
        config = TierConfig(self.write, write_bytes_per_day=self.drive_writes_per_day * self.disk_bytes)
        return Disk(self.disk_bytes, config)


def add(verbs: Subparsers) -> None:
    verb = verbs.add_parser(
        NAME,
        help="replay a trace against other tiers",
        epilog=(
            "TRACE: a file of `kvdepotctl trace record`. replay runs the daemon's index, eviction and write policies"
            " over its lookups, in their order and by their clock, without payload. SIZE is the room for objects."
            " All given values are combined. A trace has whole chunks, so only larger chunks can be replayed."
            " Exit codes: 0 replayed; 2 not a trace, or chunks that its model cannot have."
        ),
    )
    verb.add_argument("trace", type=Path, metavar="TRACE")
    verb.add_argument(
        "--ram", type=_ram_size, action="append", metavar="SIZE",
        help="may be repeated; default: 5, 10, 25, 50 and 100 %% of the bytes of all objects of the trace",
    )  # fmt: skip
    verb.add_argument(
        "--disk", type=_size, action="append", metavar="SIZE", help="a disk below RAM; may be repeated; 0: none"
    )
    verb.add_argument(
        "--write",
        choices=[policy.value for policy in WritePolicy],
        action="append",
        help="write of the disk; may be repeated; default: second_use",
    )
    verb.add_argument(
        "--drive-writes-per-day",
        type=_drive_writes,
        default=DRIVE_WRITES_PER_DAY,
        metavar="N",
        help="the target of --write auto; 0: none",
    )
    verb.add_argument(
        "--eviction",
        choices=policy_names(),
        action="append",
        help=f"[policy] eviction; may be repeated; default: {DEFAULT_POLICY}",
    )
    verb.add_argument(
        "--chunks", type=_factor, action="append", metavar="N", help="times the recorded chunk size; may be repeated"
    )
    verb.add_argument(
        "--checkpoints", choices=_CHECKPOINTS, default="last",
        help="recurrent states: one per prompt (prefix_cache_retention_interval 0), or one per chunk",
    )  # fmt: skip
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Replay a trace, print the hit rates, and return the exit code."""
    show = _show_progress if sys.stderr.isatty() and not options.json else None
    try:
        with options.trace.open() as lines:
            trace = read_trace(lines)
        record = replayed(trace, _settings(trace, options), show=show)
    except (KvDepotError, OSError, ValueError, BrokenProcessPool) as error:
        print(f"kvdepotd {NAME}: {options.trace}: {error}", file=sys.stderr)  # noqa: T201
        return _REFUSED
    if trace.cut:
        print(f"kvdepotd {NAME}: {options.trace}: its last line is not whole, and is left out", file=sys.stderr)  # noqa: T201
    columns = min(max(shutil.get_terminal_size((_COLUMNS_MIN, 24)).columns, _COLUMNS_MIN), _COLUMNS_MAX)
    lines_ = report(record, columns, glyphs_for(sys.stdout.encoding if sys.stdout else None))
    print(json.dumps(record, indent=2) if options.json else "\n".join(lines_))  # noqa: T201
    return _OK


def _settings(trace: Trace, options: argparse.Namespace) -> list[Setting]:
    """Return every combination of what was given. Those that differ in RAM alone follow each other: a curve."""
    checkpoints = options.checkpoints == "all"
    writes = list(map(WritePolicy, options.write or [WritePolicy.SECOND_USE]))
    return [
        Setting(ram, eviction, factor, disk, write, options.drive_writes_per_day, checkpoints)
        for factor in options.chunks or [1]
        for eviction in options.eviction or [DEFAULT_POLICY]
        for disk in options.disk or [_NO_DISK]
        for write in (writes if disk else writes[:1])
        for ram in options.ram or capacities(trace, checkpoints=checkpoints)
    ]


def replayed(
    trace: Trace, settings: Sequence[Setting], *, show: Callable[[int, int], None] | None = None
) -> dict[str, Any]:  # fmt: skip
    """Return what `--json` prints. One process per processor replays; `show` gets the number of finished replays.

    Raise InvalidArgument for chunks that a model of the trace cannot have.
    """
    traces = {factor: coarser(trace, factor) for factor in {one.chunk_factor for one in settings}}
    asked = recorded(trace)
    with ProcessPoolExecutor() as pool:
        running = [pool.submit(_replay, traces[one.chunk_factor], one) for one in settings]
        found = []
        for number, one in enumerate(running):
            if show is not None:
                show(number, len(running))
            # Of larger chunks fewer are whole. The rates are of the same tokens nevertheless.
            found.append(replace(one.result(), asked_tokens=asked.asked_tokens))
    return {
        "what": NAME,
        "requests": len(trace.requests),
        "seconds": trace.requests[-1].at_seconds - trace.requests[0].at_seconds if trace.requests else 0.0,
        "unique_bytes": unique_bytes(trace, checkpoints=any(one.checkpoints for one in settings)),
        "recorded": _record(asked),
        "replayed": [_of_setting(one) | _record(hits) for one, hits in zip(settings, found, strict=True)],
    }


def _replay(trace: Trace, setting: Setting) -> Hits:
    """Run in a process of its own. Raise ValueError for a trace that the depot refuses."""
    try:
        return Replay(
            trace, setting.ram_bytes, setting.eviction, checkpoints=setting.checkpoints, disk=setting.disk
        ).run()  # fmt: skip
    except KvDepotError as error:  # which no other process could read
        raise ValueError(str(error)) from None


def _show_progress(done: int, total: int) -> None:
    print(f"{done} of {total} replays", end="\r", file=sys.stderr)  # noqa: T201


def _of_setting(setting: Setting) -> dict[str, Any]:
    return {
        "ram_bytes": setting.ram_bytes, "disk_bytes": setting.disk_bytes,
        "write": setting.write.value if setting.disk_bytes else None,
        "eviction": setting.eviction, "chunk_factor": setting.chunk_factor,
    }  # fmt: skip


def _record(hits: Hits) -> dict[str, Any]:
    record: dict[str, Any] = {
        "asked_tokens": hits.asked_tokens, "hit_tokens": hits.hit_tokens, "hit_rate": round(hits.rate, 4)
    }  # fmt: skip
    if hits.written_bytes or hits.disk_hit_bytes:
        cost = hits.written_per_hit_byte
        record |= {
            "written_bytes": hits.written_bytes, "disk_hit_bytes": hits.disk_hit_bytes,
            "written_per_hit_byte": None if cost is None else round(cost, 4),
        }  # fmt: skip
    return record


def report(record: dict[str, Any], columns: int, glyphs: Glyphs) -> Iterator[str]:
    """Yield the table of a record of `replayed`. Its last column is the plot. What no row has gets no column."""
    before, rows = record["recorded"], record["replayed"]
    yield f"{record['requests']} requests in {record['seconds']:.0f} s, {before['asked_tokens']} tokens asked for"
    yield f"all their objects together take {size_text(record['unique_bytes'])}"
    disks, chunks = any(one["disk_bytes"] for one in rows), any(one["chunk_factor"] > 1 for one in rows)
    tables = [_cells(one, disks=disks, chunks=chunks) for one in rows]
    head = _line(_head(disks=disks, chunks=chunks))
    yield head
    plot = max(columns - len(head) - 2, _PLOT_MIN)
    for one, cells in zip(rows, tables, strict=True):
        yield f"{_line(cells)}  {bar(one['hit_rate'], plot, glyphs)}"
    last = {"ram_bytes": None, "disk_bytes": None, "write": None, "eviction": "", "chunk_factor": None, **before}
    yield f"{_line(_cells(last, disks=disks, chunks=chunks))}  {bar(before['hit_rate'], plot, glyphs)}"


_WIDTHS: Final = {
    "RAM": ">10", "disk": ">10", "write": "<10", "eviction": "<8", "chunks": ">6", "hit rate": ">8",
    "tokens hit": ">14", "written": ">10", "per hit": ">7",
}  # fmt: skip
Cells = dict[str, str]


def _head(*, disks: bool, chunks: bool) -> Cells:
    absent = {"tokens hit"} if disks else {"disk", "write", "written", "per hit"}
    absent |= set() if chunks else {"chunks"}
    return {name: name for name in _WIDTHS if name not in absent}


def _cells(one: dict[str, Any], *, disks: bool, chunks: bool) -> Cells:
    ram, factor, cost = one["ram_bytes"], one["chunk_factor"], one.get("written_per_hit_byte")
    cells = {
        "RAM": "recorded" if ram is None else size_text(ram),
        "disk": size_text(one["disk_bytes"]) if one["disk_bytes"] else "",
        "write": one["write"] or "",
        "eviction": one["eviction"],
        "chunks": "" if factor is None else f"x{factor}",
        "hit rate": percent_text(one["hit_rate"], 1),
        "tokens hit": str(one["hit_tokens"]),
        "written": size_text(one["written_bytes"]) if "written_bytes" in one else "",
        "per hit": "" if cost is None else f"{cost:.2f}",
    }
    return {name: cells[name] for name in _head(disks=disks, chunks=chunks)}


def _line(cells: Cells) -> str:
    return "  ".join(f"{text:{_WIDTHS[name]}}" for name, text in cells.items())


def _size(text: str) -> int:
    try:
        return parse_size_bytes(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ram_size(text: str) -> int:
    if (size_bytes := _size(text)) < RAM_BYTES_MIN:
        raise argparse.ArgumentTypeError(f"expected at least {size_text(RAM_BYTES_MIN)}, got {text!r}")
    return size_bytes


def _drive_writes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 0 up, got {text!r}")
    return number


def _factor(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}: smaller chunks were not recorded")
    return int(text)
