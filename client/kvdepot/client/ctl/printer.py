"""Tables for people and plain records for `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvdepot.core.calls import Kind
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from kvdepot.core.report import DaemonStatus
    from rich.console import Console

_STEP = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size_bytes: int) -> str:
    """Three digits are enough for people: 1.50 GiB."""
    value, unit = float(size_bytes), 0
    while value >= _STEP and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{size_bytes} B" if not unit else f"{value:.2f} {_UNITS[unit]}"


def kind_text(kind: int) -> str:
    return Kind(kind).name.lower() if kind in Kind.__members__.values() else str(kind)


def new_table(title: str, *columns: str) -> Table:
    """The first column is text, the others stand to the right. What is too wide goes on below: ids are for copying."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def status_record(status: DaemonStatus) -> dict[str, Any]:
    """The same fields as `DaemonStatus`, JSON-safe: ids in hexadecimal, kinds by name."""
    record = asdict(status)
    record["arena_id"] = f"{status.arena_id:016x}"
    for namespace, found in zip(record["namespaces"], status.namespaces, strict=True):
        namespace["namespace_id"] = found.namespace_id.hex()
        namespace["objects"] = {kind_text(kind): count for kind, count in found.objects.items()}
    return record


def print_status(status: DaemonStatus, console: Console, *, counters: bool) -> None:
    """One table a subject; empty ones are a line."""
    state = "[green]ready[/]" if status.ready else f"[red]not ready[/]: {escape(status.reason) or 'no reason given'}"
    console.print(f"kvdepotd {escape(status.version)}, pid {status.pid}, up {status.uptime_seconds:.0f} s, {state}")
    console.print(f"arena {status.arena_id:016x}, run {status.run}")
    console.print(_tiers(status))
    if any(tier.kind != "ram" for tier in status.tiers):
        console.print(_media(status))
    console.print(_sessions(status) if status.sessions else "no engine is attached")
    console.print(_namespaces(status) if status.namespaces else "no namespace is known")
    if counters:
        console.print(_counters(status))


def _tiers(status: DaemonStatus) -> Table:
    table = new_table("tiers", "tier", "state", "used", "lent", "ready", "capacity", "objects", "unverified")
    for tier in status.tiers:
        state = tier.state + (f" ({tier.reason})" if tier.reason else "")
        sizes = (tier.used_bytes, tier.lent_bytes, tier.ready_bytes, tier.capacity_bytes)
        counts = (str(tier.objects), str(tier.unverified_objects))
        table.add_row(escape(tier.name), escape(state), *map(size_text, sizes), *counts)
    return table


def _media(status: DaemonStatus) -> Table:
    """What only tiers below RAM have."""
    table = new_table("media", "tier", "breaker", "queued objects", "queued", "written today", "quarantined")
    for tier in status.tiers:
        if tier.kind != "ram":
            sizes = (tier.queued_bytes, tier.written_today_bytes, tier.quarantined_bytes)
            table.add_row(
                escape(tier.name), escape(tier.breaker), str(tier.queued_objects), *map(size_text, sizes)
            )  # fmt: skip
    return table


def _sessions(status: DaemonStatus) -> Table:
    table = new_table(
        "engines", "engine", "ranks", "scheduler", "leases", "lent objects", "credit used", "credit", "pids"
    )
    for session in status.sessions:
        table.add_row(
            escape(session.engine_id),
            f"{session.ranks_attached}/{session.world_size}",
            "yes" if session.scheduler_attached else "no",
            str(session.leases),
            str(session.lent_objects),
            size_text(session.credit_used_bytes),
            size_text(session.credit_bytes),
            " ".join(map(str, session.pids)),
        )
    return table


def _namespaces(status: DaemonStatus) -> Table:
    table = new_table("namespaces", "namespace", "label", "tenant", "epoch", "chunk tokens", "objects", "size")
    for namespace in status.namespaces:
        objects = " ".join(f"{kind_text(kind)}:{count}" for kind, count in sorted(namespace.objects.items()))
        table.add_row(
            namespace.namespace_id.hex()[:12],
            escape(namespace.label),
            escape(namespace.tenant),
            escape(namespace.epoch),
            str(namespace.chunk_tokens),
            objects or "0",
            size_text(namespace.bytes),
        )
    return table


def _counters(status: DaemonStatus) -> Table:
    table = new_table("counters", "counter", "value")
    for name, value in sorted(status.counters.items()):
        table.add_row(escape(name), f"{value:g}")
    return table
