"""`kvdepotctl top`: show the rates of a daemon at an interval."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import click
import grpc
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.printer import new_table, show
from kvdepot.client.ctl.rates import Rates
from kvdepot.client.ctl.texts import escape, say
from kvdepot.core.calls import CommitOutcome
from kvdepot.core.hit_rate import PROMPT_TOKENS, SAVED_SECONDS, SERVED_TOKENS, HitRate
from kvdepot.core.units import count_text, duration_text, size_text
from rich.console import Console, Group
from rich.live import Live

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.report import DaemonStatus, TierStatus
    from rich.table import Table

_COMMITTED = f"committed_objects.{CommitOutcome.COMMITTED.name.lower()}"


@click.command()
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between two samples."
)
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many samples. [default: at ^C]")
@json_option
@click.pass_obj
def top(connection: tuple[Endpoint, float], interval: float, count: int | None, as_json: bool) -> int:
    """Show the daemon's rates live.

    Shows prompt tokens, their hit rate, loads, stores, misses and tiers, each per second. With --json, prints one line
    per interval. If the daemon ends or hangs after the first interval, top waits for it until ^C.
    """
    with connect(*connection) as operator:
        looks = _looks(operator, interval, count)
        try:
            if as_json:
                for now, rates in looks:
                    say(json.dumps(_record(now, rates)))
            else:
                _show(looks)
        except KeyboardInterrupt:
            return 0
    return 0


def _looks(operator: Operator, interval: float, count: int | None) -> Iterator[tuple[DaemonStatus, Rates]]:
    """Yield the status at each look. Raise grpc.RpcError for the first look only."""
    before, pause = operator.status(), threading.Event()  # nobody sets it
    silent, done = False, 0
    while count is None or done < count:
        pause.wait(interval)
        try:
            now = operator.status()
        except grpc.RpcError as error:
            if not silent:
                say(f"no answer: {error.code().name}; trying again", err=True)
            silent = True
            continue
        silent = False
        done += 1
        yield now, Rates.between(before, now)
        before = now


def _show(looks: Iterator[tuple[DaemonStatus, Rates]]) -> None:
    console = Console()
    if not console.is_terminal:
        for now, rates in looks:
            show(console, *_screen(now, rates))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for now, rates in looks:
            live.update(Group(*_screen(now, rates)), refresh=True)


def _screen(now: DaemonStatus, rates: Rates) -> tuple[str | Table, ...]:
    ready = "[green]ready[/]" if now.ready else f"[red]not ready[/]: {escape(now.reason)}"
    up = f"up {duration_text(now.uptime_seconds)}"
    title = f"kvdepotd {escape(now.daemon_version)}, {up}, {ready}; the last {rates.seconds:.1f} s:"
    return title, _flow(rates), _tiers(now, rates), _engines(now)


def _flow(rates: Rates) -> Table:
    hits = HitRate.of({name: rates.of(name) for name in rates.grown})
    table = new_table("a second", "prompt tokens", "hit rate", "prefill saved", "loads", "stores", "misses")
    misses = ", ".join(f"{reason} {value:.1f}" for reason, value in list(rates.by_label("misses.").items())[:4])
    sources = ", ".join(f"{source} {hits.percent_of(tokens):.0f} %" for source, tokens in hits.served_tokens.items())
    table.add_row(
        count_text(hits.prompt_tokens),
        f"{hits.percent:.0f} %" + (f" ({sources})" if sources else "") if hits.prompt_tokens else "-",
        f"{hits.saved_seconds:.1f} s",
        f"{rates.of('acquired_objects'):.1f} objects, {size_text(int(rates.of('granted_read_bytes')))}",
        f"{rates.of(_COMMITTED):.1f} objects, {size_text(int(rates.of('granted_write_bytes')))}",
        misses or "none",
    )
    return table


def _tiers(now: DaemonStatus, rates: Rates) -> Table:
    table = new_table("tiers", "tier", "state", "used", "capacity", "objects", "read/s", "written/s", "evicted/s")
    for tier in now.tiers:
        state = tier.state + (f" ({tier.reason})" if tier.reason else "")
        moved = _moved(tier, rates)
        table.add_row(
            escape(tier.name), escape(state), size_text(tier.used_bytes), size_text(tier.capacity_bytes),
            str(tier.objects), size_text(int(moved["read_bytes"])), size_text(int(moved["written_bytes"])),
            f"{moved['evicted_objects']:.1f}",
        )  # fmt: skip
    return table


def _engines(now: DaemonStatus) -> Table | str:
    if not now.sessions:
        return "no engine is attached"
    table = new_table("engines", "engine", "ranks", "leases", "lent objects", "credit used")
    for session in now.sessions:
        table.add_row(
            escape(session.engine_id), f"{session.ranks_attached}/{session.world_size}", str(session.leases),
            str(session.lent_objects), size_text(session.credit_used_bytes),
        )  # fmt: skip
    return table


def _moved(tier: TierStatus, rates: Rates) -> dict[str, float]:
    """Return the rates of a tier. RAM's bytes are lent to engines; other tiers' are moved by I/O workers."""
    of = rates.of
    if tier.kind == "ram":
        return {
            "read_bytes": of("granted_read_bytes"), "written_bytes": of("granted_write_bytes"),
            "evicted_objects": sum(rates.by_label("evicted_objects.").values()),
        }  # fmt: skip
    return {
        "read_bytes": of(f"io_bytes.{tier.name}/read"), "written_bytes": of(f"io_bytes.{tier.name}/written"),
        "evicted_objects": sum(rates.by_label(f"tier_evicted_objects.{tier.name}/").values()),
    }  # fmt: skip


def _record(now: DaemonStatus, rates: Rates) -> dict[str, Any]:
    return {
        "ready": now.ready, "reason": now.reason, "uptime_seconds": now.uptime_seconds, "seconds": rates.seconds,
        "per_second": {
            PROMPT_TOKENS: rates.of(PROMPT_TOKENS), SERVED_TOKENS: rates.by_label(f"{SERVED_TOKENS}."),
            SAVED_SECONDS: rates.of(SAVED_SECONDS),
            "locates": rates.of("locates"), "locate_hits": rates.of("locate_hits"),
            "hit_tokens": rates.of("hit_tokens"), "acquired_objects": rates.of("acquired_objects"),
            "granted_read_bytes": rates.of("granted_read_bytes"), "committed_objects": rates.of(_COMMITTED),
            "granted_write_bytes": rates.of("granted_write_bytes"), "misses": rates.by_label("misses."),
        },
        "tiers": [
            {
                "name": tier.name, "state": tier.state, "reason": tier.reason, "used_bytes": tier.used_bytes,
                "capacity_bytes": tier.capacity_bytes, "objects": tier.objects, "per_second": _moved(tier, rates),
            }
            for tier in now.tiers
        ],
        "engines": [
            {
                "engine_id": one.engine_id, "ranks_attached": one.ranks_attached, "world_size": one.world_size,
                "leases": one.leases, "lent_objects": one.lent_objects, "credit_used_bytes": one.credit_used_bytes,
            }
            for one in now.sessions
        ],
    }  # fmt: skip
