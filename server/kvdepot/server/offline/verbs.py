"""The command line of the verbs without a daemon: `kvdepotd fsck`, `inspect`, `replay`, `arena` and `install`.

Those of tiers only read. All refuse what a running daemon uses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdepot.core.errors import ConfigError
from kvdepot.core.object_keys import NO_KEYS
from kvdepot.core.printable import printable
from kvdepot.core.units import size_text
from kvdepot.server.config.key_files import read_key_file
from kvdepot.server.offline import arena_verb, install_verb, replay_verb
from kvdepot.server.offline.fsck import Finding, Verdict, check_store
from kvdepot.server.offline.inspection import Record, inspect, kind_text, objects_record, time_text
from kvdepot.server.offline.store_files import OfflineRefusalError
from kvdepot.server.storage.base import IoOutcome

if TYPE_CHECKING:
    from kvdepot.server.offline.subparsers import Subparsers

_MODULES: Final = {module.NAME: module for module in (replay_verb, arena_verb, install_verb)}
VERBS: Final = frozenset({"fsck", "inspect", *_MODULES})
_SOUND, _DAMAGED, _REFUSED = 0, 1, 2
_EXIT_CODES = "Exit codes: 0 no damage; 1 damage; 2 cannot tell (a daemon runs, or the directory has no store)."
_LIST_INDENT = "  "


def add_verbs(verbs: Subparsers) -> None:
    fsck = verbs.add_parser(
        "fsck",
        help="verify every object of a disk tier",
        epilog=f"The daemon must not run. fsck changes nothing: the daemon quarantines damaged objects. {_EXIT_CODES}",
    )
    fsck.add_argument("directory", type=Path, metavar="DIR", help="[[tier]].path")
    fsck.add_argument("--json", action="store_true", help="print one JSON object")
    show = verbs.add_parser(
        "inspect",
        help="show the content of a disk tier or a file",
        epilog="FILE: an object (for example a quarantined one), a segment, a journal or a snapshot. Changes nothing.",
    )
    show.add_argument("path", type=Path, metavar="DIR|FILE")
    show.add_argument("--key-file", type=Path, metavar="KEYS", help="[[tier]].key_file, to check the MAC of an object")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    for module in _MODULES.values():
        module.add(verbs)


def run(options: argparse.Namespace) -> int:
    """Run an offline verb and return the exit code."""
    if options.verb in _MODULES:
        code: int = _MODULES[options.verb].run(options)
        return code
    try:
        if options.verb == "fsck":
            return _fsck(options.directory, as_json=options.json)
        given = options.key_file
        keys = NO_KEYS if given is None else read_key_file(given, file="command line", key="--key-file")
        record = inspect(options.path, keys)
    except BrokenPipeError:  # nobody reads what is printed
        raise
    except (OfflineRefusalError, ConfigError, OSError) as error:
        print(f"kvdepotd {options.verb}: {error}", file=sys.stderr)  # noqa: T201
        return _REFUSED
    _print(record, as_json=options.json)
    return _SOUND


def _fsck(root: Path, *, as_json: bool) -> int:
    show = sys.stderr.isatty() and not as_json
    verdict = check_store(root, _show_progress if show else None)
    _print(verdict_record(verdict), as_json=as_json)
    return _SOUND if verdict.whole else _DAMAGED


def _show_progress(done: int, total: int) -> None:
    if done % 1_000 == 0:
        print(f"{done} of {total} objects", end="\r", file=sys.stderr)  # noqa: T201


def verdict_record(verdict: Verdict) -> Record:
    """Return what `fsck --json` prints."""
    listed = len(verdict.findings)
    damaged = verdict.outcomes.total() - verdict.outcomes[IoOutcome.OK]
    return {
        "what": "fsck", "directory": str(verdict.root), "store_id": verdict.store.store_id.hex(),
        "whole": verdict.whole, "outcomes": {outcome: count for outcome, count in verdict.outcomes.items() if count},
        "bytes_by_outcome": dict(verdict.bytes_by_outcome), **objects_record(verdict.index.puts),
        "findings": [_finding_record(finding) for finding in verdict.findings],
        "findings_left_out": damaged - listed, "notes": list(verdict.index.notes),
        "quarantine": len(verdict.quarantine),
        "quarantine_bytes": sum(file.size_bytes for file in verdict.quarantine),
    }  # fmt: skip


def _finding_record(finding: Finding) -> Record:
    name = finding.put.name
    return {
        "outcome": str(finding.outcome), "file": finding.file, "offset": finding.offset,
        "sequence": finding.put.sequence, "namespace": name.namespace.hex(), "key": name.key.hex(),
        "kind": kind_text(name.kind), "boundary_tokens": name.boundary_tokens,
        "created_at": time_text(finding.put.created_at), "detail": finding.detail,
    }  # fmt: skip


def _print(record: Record, *, as_json: bool) -> None:
    print(json.dumps(record, indent=2) if as_json else "\n".join(map(printable, lines_of(record))))  # noqa: T201


def lines_of(record: Record, indent: str = "") -> Iterator[str]:
    """Yield a record as text: one line per field, and one per entry of a list."""
    for name, value in record.items():
        label = f"{indent}{name.replace('_', ' ')}:"
        if isinstance(value, dict):
            yield f"{label} {_flat(value)}"
        elif isinstance(value, list):
            yield f"{label} {len(value)}"
            for item in value:
                yield indent + _LIST_INDENT + (_flat(item) if isinstance(item, dict) else str(item))
        else:
            yield f"{label} {_text(name, value)}"


def _flat(record: Record) -> str:
    """Return a record in one line, without empty fields. A list in a list is shown by its length."""
    return "  ".join(
        f"{name} {{{_flat(value)}}}" if isinstance(value, dict) else f"{name}={_text(name, value)}"
        for name, value in record.items()
        if value not in ("", [], {})
    )


def _text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return str(len(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (name == "bytes" or name.endswith("_bytes")):
        return size_text(value)
    return str(value)
