"""`kvdepotctl bench`: are this node's RAM and tiers as fast as its memory and media, and faster than computing?"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click
from kvdepot.client.bulk import BulkEngine
from kvdepot.client.ctl.benching import Bench, Measured, bench_spec, size_bytes
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.printer import new_table, size_text
from kvdepot.core.errors import NotFound
from kvdepot.core.units import parse_size_bytes
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from rich.table import Table

EXIT_SLOW: Final = 1


@click.command()
@click.option("--object-size", default="16MiB", show_default=True, metavar="SIZE", help="Of one chunk.")
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Tokens of one chunk.",
)
@click.option("--bytes", "wanted", metavar="SIZE", help="Move so much. Default: 1 GiB, or a quarter of RAM or a tier.")
@click.option(
    "--prefill", type=click.FloatRange(min=0.001), metavar="TOKENS/S", help="How fast the engine computes a prompt."
)
@json_option
@click.pass_obj
def bench(
    connection: tuple[Endpoint, float], object_size: str, chunk_tokens: int, wanted: str | None, prefill: float | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Store and load through RAM and each tier as an engine does, beside memcpy and what the media do by themselves.

    With --prefill it says how many times as fast as computing each is; exit code 1 where one is not. --object-size and
    --chunk-tokens are those of a model: `kvdepotctl describe NAMESPACE` says them. Run it where the daemon runs, as its
    user or root. It evicts what is used least, if RAM is full, and writes to tiers; what it stored goes at its end.
    """
    endpoint, timeout_seconds = connection
    object_bytes = parse_size_bytes(object_size)
    console = Console(stderr=as_json)
    with connect(*connection) as operator:
        status = operator.status()
        tiers, spec = status.tiers, bench_spec(object_bytes, chunk_tokens, status.epochs.bump)
        total = size_bytes(tiers, parse_size_bytes(wanted) if wanted else 0, object_bytes)
        settings = operator.configuration().values
        try:
            with BulkEngine(endpoint, spec, "kvdepotctl-bench", timeout_seconds=timeout_seconds) as engine:
                found = list(Bench(engine, operator, settings, total).run(tiers))
        finally:
            with suppress(NotFound):
                operator.evict(spec.namespace_id(), b"")
    per_token = object_bytes / chunk_tokens
    if as_json:
        click.echo(json.dumps(_record(found, total, per_token, prefill), indent=2))
    else:
        console.print(_table(found, total, per_token, prefill))
        for one in found:
            if one.note:
                console.print(f"{one.tier}, {one.way}: {one.note}", markup=False, highlight=False)
        if prefill:
            console.print(_verdict(found, per_token, prefill), markup=False, highlight=False, soft_wrap=True)
    slow = prefill and any(one.way == "load" and one.times(per_token, prefill) < 1 for one in found)
    return EXIT_SLOW if slow else 0


def _record(found: list[Measured], total: int, per_token: float, prefill: float | None) -> dict[str, Any]:
    return {
        "bytes": total,
        "bytes_per_token": per_token,
        "measured": [
            asdict(one) | {"share": one.share, "times_prefill": one.times(per_token, prefill or 0.0)} for one in found
        ],
    }


def _table(found: list[Measured], total: int, per_token: float, prefill: float | None) -> Table:
    columns = ["tier", "way", "rate", "beside", "share", "tokens/s", *(["times prefill"] if prefill else [])]
    table = new_table(f"{size_text(total)}, {per_token / 1024:.1f} KiB a token", *columns)
    for one in found:
        beside = f"{one.limit_name} {_rate(one.limit)}" if one.limit else ""
        cells = [escape(one.tier), one.way, _rate(one.rate), beside, f"{one.share:.2f}" if one.limit else ""]
        cells.append(f"{one.rate / per_token:,.0f}" if one.rate else "")
        if prefill:
            cells.append(f"{one.times(per_token, prefill):.1f}" if one.way == "load" else "")
        table.add_row(*cells)
    return table


def _verdict(found: list[Measured], per_token: float, prefill: float) -> str:
    said = []
    for one in found:
        if one.way == "load":
            times = one.times(per_token, prefill)
            slow = f"slower than computing ({times:.2f}): its loads are not worth their time"
            said.append(f"{one.tier}: {slow if times < 1 else f'{times:.1f} times as fast as computing'}")
    return "\n".join(said)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s" if bytes_per_second else ""
