"""`kvdepotctl bench`: compare RAM and tiers with memory, devices and the speed of computing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click
from kvdepot.client.bulk import BulkEngine
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.benching import Bench, Measured, Shape, bench_shape, bench_spec, size_bytes
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.bench_engine import engine
from kvdepot.client.ctl.commands.options import FiniteType, json_option
from kvdepot.client.ctl.printer import new_table, show
from kvdepot.client.ctl.texts import escape
from kvdepot.core.errors import NotFound
from kvdepot.core.hit_rate import HitRate
from kvdepot.core.units import parse_size_bytes, size_text
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdepot.client.endpoint import Endpoint
    from rich.table import Table

EXIT_SLOW: Final = 1


@click.group(invoke_without_command=True)
@click.option("--object-size", metavar="SIZE", help="Size of one chunk. [default: an engine's, or 16 MiB]")
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of one chunk. [default: an engine's, or 256]",
)
@click.option(
    "--bytes", "wanted", metavar="SIZE", help="Bytes to move. [default: 1 GiB, at most a quarter of RAM or a tier]"
)
@click.option(
    "--prefill", type=FiniteType(min=0.001), metavar="TOKENS/S",
    help="Prefill rate of the engine. [default: as engines measured it]",
)  # fmt: skip
@json_option
@click.pass_context
def bench(
    context: click.Context, object_size: str | None, chunk_tokens: int | None, wanted: str | None,
    prefill: float | None, as_json: bool,
) -> int:  # fmt: skip
    """Measure the speed of RAM and tiers.

    Stores and loads objects as an engine does, and compares the rates with memcpy, the device and computing. Exit code
    1: loading from a tier is slower than computing. Run it on the daemon's host, as its user or root.
    """
    if context.invoked_subcommand is not None:
        return 0
    connection: tuple[Endpoint, float] = context.obj
    endpoint, timeout_seconds = connection
    console = Console(stderr=as_json)
    with connect(*connection) as operator:
        status = operator.status()
        shape = bench_shape(operator, object_size, chunk_tokens)
        prefill = prefill or HitRate.of(status.counters).prefill_rate or None
        tiers, spec = status.tiers, bench_spec(shape, status.epochs.bump)
        total = size_bytes(tiers, parse_size_bytes(wanted) if wanted else 0, shape.object_bytes)
        settings = operator.configuration().values
        try:
            with BulkEngine(endpoint, spec, "kvdepotctl-bench", timeout_seconds=timeout_seconds) as bulk:
                found = list(Bench(bulk, operator, settings, total).run(tiers))
        finally:
            with suppress(NotFound):
                operator.evict(spec.namespace_id(), b"")
    if as_json:
        echo_record(_record(shape, found, total, prefill))
    else:
        print_measured(shape, found, total, prefill, console)
    slow = prefill and any(one.way == "load" and one.times(shape.token_bytes, prefill) < 1 for one in found)
    return EXIT_SLOW if slow else 0


bench.add_command(engine)


def _record(shape: Shape, found: Sequence[Measured], total: int, prefill: float | None) -> dict[str, Any]:
    return {
        "shape_of": shape.label,
        "object_bytes": shape.object_bytes,
        "chunk_tokens": shape.chunk_tokens,
        "prefill": prefill,
        "bytes": total,
        "bytes_per_token": shape.token_bytes,
        "measured": [
            asdict(one)
            | {"share": one.share, "doubt": one.doubt, "times_prefill": one.times(shape.token_bytes, prefill or 0.0)}
            for one in found
        ],
    }


def print_measured(
    shape: Shape, found: Sequence[Measured], total: int, prefill: float | None, console: Console
) -> None:
    """Print the table, what is to be said of its lines, and how each tier compares with computing.

    Args:
        shape: the chunk that was measured with.
        found: what was measured.
        total: bytes that were moved each way.
        prefill: tokens that an engine computes in a second; None if that is not known.
        console: where to print.
    """
    rate = f", {prefill:,.0f} tokens/s of prefill" if prefill else "; no engine has told its prefill rate yet"
    chunk = f"chunks of {shape.chunk_tokens} tokens, {size_text(shape.object_bytes)} ({escape(shape.label)})"
    show(console, f"{chunk}{rate}", _table(shape, found, total, prefill), *_remarks(shape, found, prefill))


def _table(shape: Shape, found: Sequence[Measured], total: int, prefill: float | None) -> Table:
    columns = ["tier", "way", ">rate", ">beside", ">share", ">tokens/s", *([">times prefill"] if prefill else [])]
    table = new_table(f"{size_text(total)}, {size_text(shape.token_bytes)} a token", *columns)
    for one in found:
        beside = f"{one.limit_name} {_rate(one.limit)}" if one.limit else ""
        share = "too noisy" if one.doubt else f"{one.share:.2f}" if one.limit else ""
        cells = [escape(one.tier), one.way, _rate(one.rate), beside, share]
        cells.append(f"{one.rate / shape.token_bytes:,.0f}" if one.rate else "")
        if prefill:
            cells.append(f"{one.times(shape.token_bytes, prefill):.1f}" if one.way == "load" else "")
        table.add_row(*cells)
    return table


def _remarks(shape: Shape, found: Sequence[Measured], prefill: float | None) -> Iterator[str]:
    for one in found:
        doubt = f"this machine is too noisy to tell; {one.doubt}" if one.doubt else ""
        for remark in filter(None, (doubt, one.note)):
            yield escape(f"{one.tier}, {one.way}: {remark}")
    if not prefill:
        return
    for one in found:
        if one.way == "load":
            times = one.times(shape.token_bytes, prefill)
            slow = f"slower than computing ({times:.2f} times as fast): its loads cost more time than they save"
            verdict = slow if times < 1 else f"{times:.1f} times as fast as computing"
            doubt = ", but this machine is too noisy to tell" if one.doubt else ""
            yield f"{escape(one.tier)}: {verdict}{doubt}"


def _rate(bytes_per_second: float) -> str:
    return f"{size_text(bytes_per_second)}/s" if bytes_per_second else ""
