"""`kvdepotd arena list` and `kvdepotd arena remove`: memory that daemons have left, and its removal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdepot.core.errors import KvDepotError
from kvdepot.core.printable import printable
from kvdepot.core.units import duration_text, size_text
from kvdepot.server.arena.unused_arenas import FoundArena, find_arenas, remove_arena
from kvdepot.server.platform.identity import Liveness, ProcessIdentity
from kvdepot.server.platform.processes import liveness, read_boot_id

if TYPE_CHECKING:
    from kvdepot.server.offline.subparsers import Subparsers

NAME: Final = "arena"
_DONE, _REFUSED, _USAGE = 0, 1, 2
_EPILOG: Final = """\
A daemon that ends leaves its arena in memory for the next daemon with the same socket. These verbs know the arenas of
this user, in the default places and in each --arena-dir.
"""


def add(verbs: Subparsers) -> None:
    parser = verbs.add_parser(NAME, help="list arenas, and remove unused ones", epilog=_EPILOG)
    what = parser.add_subparsers(dest="what", required=True)
    listing = what.add_parser("list", help="list arenas and who uses them", epilog="Changes nothing.")
    listing.add_argument("--json", action="store_true", help="print a JSON array")
    removal = what.add_parser(
        "remove", help="remove arenas that no daemon uses",
        epilog="Refuses an arena that a daemon or an engine uses. Exit code 1: one was refused.",
    )  # fmt: skip
    removal.add_argument("arenas", nargs="*", type=Path, metavar="ARENA", help="path that `list` prints")
    removal.add_argument("--unused", action="store_true", help="each arena that no daemon and no engine uses")
    for verb in (listing, removal):
        verb.add_argument(
            "--arena-dir", type=Path, action="append", default=[], metavar="DIR", help="look in DIR too ([ram] path)"
        )


def run(options: argparse.Namespace) -> int:
    """Run the verb and return the exit code."""
    if options.what == "remove" and not options.arenas and not options.unused:
        print("kvdepotd arena remove: name an ARENA, or give --unused", file=sys.stderr)  # noqa: T201
        return _USAGE
    found = list(find_arenas(options.arena_dir, _alive))
    if options.what == "remove":
        return _remove([Path(one.path) for one in found if options.unused and one.unused] + options.arenas)
    if options.json:
        print(json.dumps([asdict(one) | {"unused": one.unused} for one in found], indent=2))  # noqa: T201
    else:
        print("\n".join(lines_of(found)))  # noqa: T201
    return _DONE


def _remove(paths: Sequence[Path]) -> int:
    if not paths:
        print("no arena of this user is unused")  # noqa: T201
    code = _DONE
    for path in dict.fromkeys(path.absolute() for path in paths):
        try:
            size = size_text(remove_arena(path, _alive).memory_bytes)
        except (KvDepotError, OSError) as error:
            print(f"kvdepotd arena remove: {printable(str(error))}", file=sys.stderr)  # noqa: T201
            code = _REFUSED
        else:
            print(printable(f"removed {path}, {size}"))  # noqa: T201
    return code


def lines_of(arenas: Sequence[FoundArena]) -> list[str]:
    """Return a line an arena, and what can be removed."""
    if not arenas:
        return ["this user has no arena"]
    rows = [("MEMORY", "LAST START", "USED BY", "ARENA")]
    rows += [
        (size_text(one.memory_bytes), f"{duration_text(one.started_seconds_ago)} ago", _users(one), printable(one.path))
        for one in arenas
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if unused := [one for one in arenas if one.unused]:
        size = size_text(sum(one.memory_bytes for one in unused))
        lines.append(f"{len(unused)} unused, {size}. To remove: kvdepotd arena remove --unused")
    return lines


def _users(arena: FoundArena) -> str:
    if arena.daemon_pid is not None:
        return f"daemon {arena.daemon_pid or '?'}"
    if arena.engine_pids:
        return f"engines {' '.join(str(pid or '?') for pid in arena.engine_pids)}"
    return "nobody"


def _alive(process: ProcessIdentity) -> Liveness:
    return liveness(process, read_boot_id())
