"""Tables for people and plain records for `--json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.texts import escape
from kvdepot.core.calls import Kind
from kvdepot.core.control import switch_states
from kvdepot.core.endurance import written_per_hit_byte
from kvdepot.core.hit_rate import HitRate
from kvdepot.core.units import duration_text, short_count_text, size_text
from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvdepot.core.epochs import Epochs
    from kvdepot.core.report import DaemonStatus, PinStatus, QuotaStatus, SwitchesStatus
    from rich.console import Console

_IDS = frozenset({"engine", "namespace", "tenant", "tier", "path to", "key", "parent", "lease", "to", "peer", "reader"})
"""Columns whose texts people copy."""
NUMBERS: Final = ">"
"""Begins the name of a column that has numbers."""
_WIDTH_MAX = 1000
_WHOLE_SECONDS: Final = 60
"""From here on, parts of a second say nothing."""


def kind_text(kind: int) -> str:
    return Kind(kind).name.lower() if kind in Kind.__members__.values() else str(kind)


def new_table(title: str, *columns: str) -> Table:
    """Make a table. Wide cells wrap, so that ids stay whole.

    Args:
        title: printed above the table; empty for none.
        columns: a column with `>` before its name has numbers, and is aligned to the right.
    """
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False,
        pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in columns:
        name = column.removeprefix(NUMBERS)
        table.add_column(name, justify="left" if name == column else "right", overflow="fold")
    return table


def show(console: Console, *parts: Table | str) -> None:
    """Print tables and lines, with an empty line before each table but the first part.

    Each id, word and number is in one line, also on a terminal that is narrower than that.
    """
    width = console.width
    for number, table in enumerate(parts):
        if isinstance(table, str):
            console.print(table, soft_wrap=True)
            continue
        if number:
            console.print()
        _fit(table, console)
        console.width = _WIDTH_MAX
        console.print(table)
        console.width = width


def _fit(table: Table, console: Console) -> None:
    """Set the widths of columns. What is too wide wraps, the widest column first.

    rich itself does not know while it shrinks columns which of them cannot shrink.
    """
    wide = console.options.update(max_width=_WIDTH_MAX)
    least = []
    for column in table.columns:
        header, cells = console.measure(column.header, options=wide), [console.measure(cell, options=wide)
                                                                       for cell in column.cells]  # fmt: skip
        whole = column.header in _IDS or column.justify == "right"
        column.width = max([header.maximum, *(cell.maximum for cell in cells)])
        least.append(max(
            header.maximum if column.header in _IDS else header.minimum,
            *[cell.maximum if whole else cell.minimum for cell in cells] or [0],
        ))  # fmt: skip
    excess = console.measure(table, options=wide).maximum - console.width
    while excess > 0:
        shrinkable = [(column.width or 0, at) for at, column in enumerate(table.columns) if column.width != least[at]]
        if not shrinkable:
            return
        widest, at = max(shrinkable)
        table.columns[at].width = widest - 1
        excess -= 1


def pin_text(pin: PinStatus) -> str:
    namespace = f"namespace {pin.namespace_id.hex()[:12]}"
    return f"the path to chunk {pin.key.hex()[:12]} of {namespace}" if pin.key else namespace


def print_status(status: DaemonStatus, console: Console, *, counters: bool) -> None:
    """Print a table a subject; empty ones are a line."""
    state = "[green]ready[/]" if status.ready else f"[red]not ready[/]: {escape(status.reason) or 'no reason given'}"
    up = duration_text(status.uptime_seconds)
    parts: list[Table | str] = [
        f"kvdepotd {escape(status.daemon_version)}, pid {status.pid}, up {up}, {state}",
        f"arena {status.arena_id:016x}, run {status.run}",
        f"hit rate {HitRate.of(status.counters)}",
        *_switches(status.switches),
        *_epochs(status.epochs),
        _tiers(status),
    ]
    if any(tier.kind != "ram" for tier in status.tiers):
        parts += [_media(status), _prefetch(status)]
    parts.append(_sessions(status) if status.sessions else "no engine is attached")
    if status.tenants:
        parts.append(_tenants(status))
    if status.quotas:
        parts.append(quotas_table(status.quotas))
    if status.pins:
        parts.append(pins_table(status.pins))
    parts.append(_namespaces(status) if status.namespaces else "no namespace is known")
    if counters:
        parts.append(_counters(status))
    show(console, *parts)


def _switches(switches: SwitchesStatus) -> Iterator[str]:
    """Yield nothing where all are on."""
    for switch, state in switch_states(switches).items():
        if state.anywhere_off:
            whom = "all namespaces" if state.off else ", ".join(one.hex()[:12] for one in state.off_namespaces)
            yield f"[red]{switch} are off[/] for {whom}"


def _epochs(epochs: Epochs) -> Iterator[str]:
    """Yield nothing where none was bumped."""
    if epochs.bump or epochs.invalidated_namespaces:
        count = len(epochs.invalidated_namespaces)
        individually = f", {count} namespaces invalidated individually" if count else ""
        yield f"bump counter {epochs.bump}{individually}"


def _tiers(status: DaemonStatus) -> Table:
    table = new_table("tiers", "tier", "state", ">used", ">lent", ">ready", ">capacity", ">objects", ">unverified")
    for tier in status.tiers:
        state = tier.state + (f" ({tier.reason})" if tier.reason else "")
        sizes = (tier.used_bytes, tier.lent_bytes, tier.ready_bytes, tier.capacity_bytes)
        counts = (str(tier.objects), str(tier.unverified_objects))
        table.add_row(escape(tier.name), escape(state), *map(size_text, sizes), *counts)
    return table


def _media(status: DaemonStatus) -> Table:
    """Return the table of what only tiers below RAM have."""
    table = new_table(
        "media", "tier", "breaker", ">queued objects", ">queued", ">written today", ">written per hit byte",
        ">quarantined", "role",
    )  # fmt: skip
    for tier in status.tiers:
        if tier.kind != "ram":
            written = written_per_hit_byte(status.counters, tier.name)
            table.add_row(
                escape(tier.name), escape(tier.breaker), str(tier.queued_objects), size_text(tier.queued_bytes),
                size_text(tier.written_today_bytes), "" if written is None else f"{written:.2f}",
                size_text(tier.quarantined_bytes), "janitor" if tier.is_janitor else "node" if tier.node else "",
            )  # fmt: skip
    return table


def _prefetch(status: DaemonStatus) -> Table:
    """Return the table of prefetch, and of what came of it since the daemon started."""
    table = new_table("prefetch", ">requests", ">objects", ">held", ">read ahead", ">used", ">wasted")
    ram = next(tier for tier in status.tiers if tier.kind == "ram")
    wasted = sum(value for name, value in status.counters.items() if name.startswith("prefetch_wasted_bytes."))
    since = (status.counters.get("prefetched_bytes", 0), status.counters.get("prefetch_used_bytes", 0), wasted)
    table.add_row(
        str(ram.prefetching_requests), str(ram.prefetched_objects), size_text(ram.prefetched_bytes),
        *(size_text(int(size_bytes)) for size_bytes in since),
    )  # fmt: skip
    return table


def pins_table(pins: Iterable[PinStatus]) -> Table:
    """Return the table of pins: what RAM holds of each, as of some seconds ago."""
    table = new_table("pins", "namespace", "path to", ">ends in", ">chunks", ">objects kept", ">size")
    for pin in pins:
        table.add_row(
            pin.namespace_id.hex()[:12], pin.key.hex()[:12] or "(all)", duration_text(pin.seconds_left),
            str(pin.chunks), str(pin.objects), size_text(pin.size_bytes),
        )  # fmt: skip
    return table


def quotas_table(quotas: Iterable[QuotaStatus]) -> Table:
    """Return the table of quotas: a line per holder, or one for a quota that nobody uses."""
    table = new_table(
        "quotas", "tenant", "namespace", "tier", ">used", ">capacity", ">objects refused", ">objects evicted"
    )
    for quota in quotas:
        for owner in quota.owners:
            tenant = "(unknown)" if owner.tenant is None else owner.tenant
            table.add_row(
                escape(tenant), escape(owner.namespace) or "(total)", escape(quota.tier),
                size_text(owner.used_bytes), size_text(quota.capacity_bytes),
                str(owner.refused_objects), str(owner.evicted_objects),
            )  # fmt: skip
        more = quota.owners_count - len(quota.owners)
        if more or not quota.owners:
            table.add_row(
                escape(quota.tenant), escape(quota.namespace) or "(total)", escape(quota.tier),
                f"{more} more" if more else "nobody", size_text(quota.capacity_bytes),
                str(quota.refused_objects), str(quota.evicted_objects),
            )  # fmt: skip
    return table


def _tenants(status: DaemonStatus) -> Table:
    """Return the table of tenants of the configuration."""
    table = new_table(
        "tenants", "tenant", ">RAM used", ">credit used", ">credit", ">engines", ">objects refused", ">loads refused"
    )
    for tenant in status.tenants:
        sizes = (tenant.used_bytes, tenant.credit_used_bytes, tenant.credit_bytes)
        table.add_row(
            escape(tenant.name), *map(size_text, sizes), f"{tenant.sessions}/{tenant.sessions_max}",
            str(tenant.refused_objects), str(tenant.refused_loads),
        )  # fmt: skip
    return table


def _sessions(status: DaemonStatus) -> Table:
    table = new_table(
        "engines", "engine", ">ranks", "scheduler", ">leases", ">lent objects", ">credit used", ">credit", "pids"
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
    table = new_table("namespaces", "namespace", "label", "tenant", "epoch", ">chunk tokens", "objects", ">size")
    for namespace in status.namespaces:
        objects = " ".join(f"{kind_text(kind)}:{count}" for kind, count in sorted(namespace.objects.items()))
        table.add_row(
            namespace.namespace_id.hex()[:12],
            escape(namespace.label),
            escape(namespace.tenant),
            epoch_text(namespace.epoch, namespace.bumps),
            str(namespace.chunk_tokens),
            objects or "0",
            size_text(namespace.size_bytes),
        )
    return table


def epoch_text(epoch: str, bumps: int) -> str:
    """Of a namespace; empty where it is its first one."""
    return ", ".join(filter(None, (escape(epoch), f"bump {bumps}" if bumps else "")))


def _counters(status: DaemonStatus) -> Table:
    table = new_table("counters", "counter", ">value")
    for name, value in sorted(status.counters.items()):
        table.add_row(escape(name), counter_text(name, value))
    return table


def counter_text(name: str, value: float) -> str:
    """Return the value of a counter in the unit that its name ends with, before the first label."""
    family = name.partition(".")[0]
    if family.endswith("_bytes"):
        return size_text(value)
    if family.endswith("_seconds"):
        return duration_text(value) if value >= _WHOLE_SECONDS else f"{value:.2f} s"
    return short_count_text(value)
