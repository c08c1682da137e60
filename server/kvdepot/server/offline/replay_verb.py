"""The command line of `kvdepotd replay`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdepot.core.errors import InvalidArgument
from kvdepot.core.eviction import DEFAULT_POLICY, policy_names
from kvdepot.core.trace_file import Trace, read_trace
from kvdepot.core.units import parse_size_bytes, size_text
from kvdepot.server.offline.replay import Hits, Replay, capacities, recorded, unique_bytes

if TYPE_CHECKING:
    from kvdepot.server.offline.subparsers import Subparsers

NAME: Final = "replay"
_OK, _REFUSED = 0, 2
_CHECKPOINTS = ("last", "all")


def add(verbs: Subparsers) -> None:
    verb = verbs.add_parser(
        NAME,
        help="replay a trace against other RAM sizes",
        epilog=(
            "TRACE: a file of `kvdepotctl trace record`. replay runs the daemon's index and eviction over its lookups,"
            " in their order and by their clock, without payload and without lower tiers. SIZE is the room for objects"
            " in RAM. Exit codes: 0 replayed; 2 not a trace."
        ),
    )
    verb.add_argument("trace", type=Path, metavar="TRACE")
    verb.add_argument(
        "--ram", type=_size, action="append", metavar="SIZE",
        help="may be repeated; default: 5, 10, 25, 50 and 100 %% of the bytes of all objects of the trace",
    )  # fmt: skip
    verb.add_argument(
        "--eviction",
        choices=policy_names(),
        action="append",
        help=f"[policy] eviction; may be repeated; default: {DEFAULT_POLICY}",
    )
    verb.add_argument(
        "--checkpoints", choices=_CHECKPOINTS, default="last",
        help="recurrent states: one per prompt (prefix_cache_retention_interval 0), or one per chunk",
    )  # fmt: skip
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Replay a trace, print the hit rates, and return the exit code."""
    try:
        with options.trace.open() as lines:
            trace = read_trace(lines)
    except (InvalidArgument, OSError, UnicodeDecodeError) as error:
        print(f"kvdepotd {NAME}: {options.trace}: {error}", file=sys.stderr)  # noqa: T201
        return _REFUSED
    show = _show_progress if sys.stderr.isatty() and not options.json else None
    record = replayed(
        trace,
        options.ram or [],
        options.eviction or [DEFAULT_POLICY],
        checkpoints=options.checkpoints == "all",
        show=show,
    )
    print(json.dumps(record, indent=2) if options.json else "\n".join(_lines(record)))  # noqa: T201
    return _OK


def replayed(
    trace: Trace, sizes: list[int], policies: list[str], *, checkpoints: bool,
    show: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what `--json` prints. One process per processor replays; `show` gets the number of finished replays."""
    sizes = sizes or capacities(trace, checkpoints=checkpoints)
    settings = [(size, policy) for size in sizes for policy in policies]
    with ProcessPoolExecutor() as pool:
        running = [pool.submit(_replay, trace, size, policy, checkpoints) for size, policy in settings]
        found = []
        for number, one in enumerate(running):
            if show is not None:
                show(number, len(running))
            found.append(one.result())
    return {
        "what": NAME,
        "requests": len(trace.requests),
        "seconds": trace.requests[-1].at_seconds - trace.requests[0].at_seconds if trace.requests else 0.0,
        "unique_bytes": unique_bytes(trace, checkpoints=checkpoints),
        "recorded": _record(recorded(trace)),
        "replayed": [
            {"ram_bytes": size, "eviction": policy, **_record(hits)}
            for (size, policy), hits in zip(settings, found, strict=True)
        ],
    }


def _replay(trace: Trace, size: int, policy: str, checkpoints: bool) -> Hits:
    return Replay(trace, size, policy, checkpoints=checkpoints).run()


def _show_progress(done: int, total: int) -> None:
    print(f"{done} of {total} replays", end="\r", file=sys.stderr)  # noqa: T201


def _record(hits: Hits) -> dict[str, Any]:
    return {"asked_tokens": hits.asked_tokens, "hit_tokens": hits.hit_tokens, "hit_rate": round(hits.rate, 4)}


def _lines(record: dict[str, Any]) -> list[str]:
    before, whole = record["recorded"], size_text(record["unique_bytes"])
    return [
        f"{record['requests']} requests in {record['seconds']:.0f} s, {before['asked_tokens']} tokens asked for",
        f"all their objects together take {whole}",
        f"{'RAM':>12}  {'eviction':<8}  {'hit rate':>8}  {'tokens hit':>14}",
        *(
            f"{size_text(one['ram_bytes']):>12}  {one['eviction']:<8}  {one['hit_rate']:>8.1%}  {one['hit_tokens']:>14}"
            for one in record["replayed"]
        ),
        f"{'recorded':>12}  {'':<8}  {before['hit_rate']:>8.1%}  {before['hit_tokens']:>14}",
    ]


def _size(text: str) -> int:
    try:
        return parse_size_bytes(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
