"""`kvdepotctl peers`: show the daemons that this one loads from, and those that load from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.printer import new_table, show
from kvdepot.client.ctl.texts import escape
from kvdepot.core.units import size_text
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.report import DaemonStatus, PeerStatus, ReaderStatus
    from rich.table import Table

EXIT_OK, EXIT_UNREACHABLE_PEER = 0, 1


@click.command()
@json_option
@click.pass_obj
def peers(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Show peers: their state, speed and failures.

    These are the daemons that this one loads from, and those that load from it. Figures of a peer count since it was
    last found, those of a reader since this daemon started. Exit code 1: a peer cannot be asked.
    """
    with connect(*connection) as operator:
        found = operator.status()
    if as_json:
        echo_record({"tiers": {tier.name: tier.peers for tier in found.tiers if tier.peers}, "readers": found.readers})
    else:
        _print(found, Console())
    disabled = any(peer.state == "disabled" for tier in found.tiers for peer in tier.peers)
    return EXIT_UNREACHABLE_PEER if disabled else EXIT_OK


def _print(status: DaemonStatus, console: Console) -> None:
    tiers = [tier for tier in status.tiers if tier.kind == "peer"]
    parts: list[Table | str] = []
    for tier in tiers:
        if not tier.peers:
            parts.append(escape(f"tier {tier.name}: {tier.reason or 'no peer was found yet'}"))
            continue
        parts.append(_peers(f"tier {escape(tier.name)}", tier.peers))
        parts += [escape(f"{peer.address}: {remark}") for peer in tier.peers if (remark := _remark(peer))]
    if not tiers:
        parts.append("this daemon has no peer tier")
    parts.append(_readers(status.readers) if status.readers else "no daemon has loaded from this one")
    show(console, *parts)


def _peers(title: str, peers: Iterable[PeerStatus]) -> Table:
    table = new_table(title, "peer", "state, lane", ">lookups", ">a lookup", ">loads", ">loaded", ">a load", ">failed")
    for peer in peers:
        moved = peer.loaded_bytes / peer.load_seconds if peer.load_seconds else 0.0
        lane = peer.lane.partition(":")[0]
        table.add_row(
            escape(peer.address), escape(", ".join(filter(None, (peer.state, lane)))), str(peer.lookups),
            f"{1000 * peer.lookup_seconds / peer.lookups:.1f} ms" if peer.lookups else "",
            str(peer.loaded_objects), size_text(peer.loaded_bytes), f"{size_text(moved)}/s" if moved else "",
            str(sum(peer.failed_objects.values())),
        )  # fmt: skip
    return table


def _remark(peer: PeerStatus) -> str:
    """Return what has no column: reasons, failures by outcome, and what is being read. Empty: nothing."""
    lane = peer.lane if ":" in peer.lane else ""
    failed = f"failed: {_counts(peer.failed_objects)}" if peer.failed_objects else ""
    reading = f"{peer.reading_objects} objects are being read" if peer.reading_objects else ""
    return "; ".join(filter(None, (peer.chosen, peer.reason, lane, failed, reading)))


def _readers(readers: Sequence[ReaderStatus]) -> Table:
    table = new_table("readers", "reader", "tenant", ">leases", ">lent", ">objects sent", ">sent", "refused")
    for one in readers:
        table.add_row(
            escape(one.name), escape(one.tenant), str(one.leases), size_text(one.leased_bytes), str(one.sent_objects),
            size_text(one.sent_bytes), _counts(one.refused_objects),
        )  # fmt: skip
    return table


def _counts(objects: Mapping[str, int]) -> str:
    """Return how many by outcome, most first."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(objects.items(), key=lambda one: -one[1])) or "0"
