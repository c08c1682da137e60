"""What operators read about one request: what became of it, what to do, and the history that shows it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from kvdepot.core.explanation import answer, fix_of, meaning_of, reason_of
from kvdepot.core.records import UNUSED, Outcome
from kvdepot.core.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvdepot.core.records import LoadRecord, Lookup, RequestRecord

_LABEL: Final = max(map(len, Outcome)) + 2
_INDENT: Final = 12
"""Of the history, after its labels."""


def record_lines(record: RequestRecord, columns: int) -> Iterator[str]:
    """Yield the text of one request: what became of it and what to do, then its history."""
    yield from _wrapped(f"{record.outcome:<{_LABEL}}{answer(record)}", columns, _LABEL)
    if fix := fix_of(record):
        yield from _wrapped(f"{'':<{_LABEL}}-> {fix}", columns, _LABEL + 3)
    for line in _history(record):
        yield from _wrapped(line, columns, _INDENT)


def table_lines(records: Sequence[RequestRecord], columns: int) -> Iterator[str]:
    """Yield a line a request. Ids are cut to what the width has room for; their beginnings can be asked about."""
    rows = [("AGE", "TOKENS", "HIT", "SOURCE", "REASON"), *map(_cells, records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(columns - sum(widths) - 2 * len(widths), len("ID"))
    room = min(room, max((len(record.request_id) for record in records), default=0))
    for request_id, cells in zip(("ID", *(record.request_id for record in records)), rows, strict=True):
        age, tokens, hit, source, reason = (
            cell.rjust(width) if number < 3 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield f"{request_id[:room]:<{room}}  {age}  {tokens}  {hit}  {source}  {reason}".rstrip()


def _cells(record: RequestRecord) -> tuple[str, str, str, str, str]:
    end, outcome = record.end, record.outcome
    plain = outcome in (Outcome.HIT, Outcome.MISS, Outcome.NOT_ASKED)
    return (
        duration_text(record.began_seconds_ago),
        str(end.prompt_tokens or "-") if end is not None else "-",
        str(end.loaded_tokens) if end is not None else "-",
        (end.source if end is not None else "") or "-",
        (reason_of(record) or "-") if plain else outcome.lower(),
    )


def _history(record: RequestRecord) -> Iterator[str]:
    yield f"request {record.request_id} of engine {record.engine_id}, namespace {record.namespace_id.hex()[:12]}"
    yield f"  began     {_ago(record.began_seconds_ago)}, {_ended(record)}"
    if record.lookup is not None:
        yield from _lookup_lines(record.lookup, record.lookups)
        yield from (f"{'':<{_INDENT}}  {line}" for line in record.differences)
    else:
        yield "  lookup    none"
    for load in record.loads:
        yield f"  load      {_load(load)}"
    if record.reserved:
        yield f"  stores    {_counts(record.reserved)}"
    if record.end is not None:
        miss = f": {record.end.miss}" if record.end.miss else ""
        yield f"  engine    had {record.end.local_tokens} tokens cached, loaded {record.end.loaded_tokens}{miss}"


def _ended(record: RequestRecord) -> str:
    return "in progress" if record.ended_seconds_ago is None else f"ended {_ago(record.ended_seconds_ago)}"


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s ago" if seconds < 60 else f"{duration_text(seconds)} ago"


def _lookup_lines(lookup: Lookup, lookups: int) -> Iterator[str]:
    times = f", {lookups} times" if lookups > 1 else ""
    tokens = f"{lookup.chunks} chunks of {lookup.chunk_tokens} tokens"
    yield f"  lookup    of {tokens}, usable up to {lookup.high_tokens} tokens{times}"
    if lookup.source_id:
        whose = f"tier {lookup.source_tier}, asked first" if lookup.source_tier else "no peer of this daemon"
        yield f"  named     daemon {lookup.source_id:016x} by kv_transfer_params: {whose}"
    by_tier = _counts({tier: count for tier, count in lookup.chunks_by_tier.items() if count})
    yield f"  hit       {lookup.path_chunks} chunks from the start{f' ({by_tier})' if by_tier else ''}"
    if lookup.offered_tokens:
        place = f" ({lookup.offered_place})" if lookup.offered_place else ""
        slowest = f"slowest tier {lookup.offered_tier}{place}, in RAM after {lookup.estimate_seconds:.3f} s"
        yield f"  offered   {lookup.offered_tokens} of {lookup.boundary_tokens} tokens, {slowest}"
    else:
        yield f"  offered   nothing of {lookup.boundary_tokens} tokens"
    if lookup.miss:
        key = lookup.missing_key.hex()[:12]
        yield f"  miss      chunk {lookup.missing_chunk}, {key}: {meaning_of(lookup.miss)}"
    if lookup.other_namespace:
        yield f"            namespace {lookup.other_namespace.hex()[:12]} has it. Different fields:"


def _load(load: LoadRecord) -> str:
    outcome = "granted, released unused" if load.outcome == UNUSED else load.outcome
    after = f"after {load.seconds:.3f} s: {outcome}" if load.outcome != "waiting" else "waiting"
    return f"of {load.objects} objects, {_ago(load.asked_seconds_ago)}, {after}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _wrapped(text: str, columns: int, indent: int) -> list[str]:
    """Break a line between words. The lines after the first are indented."""
    return textwrap.wrap(
        text, max(columns, indent + 20), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
