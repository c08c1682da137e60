"""`kvdepotctl verify`: have the daemon read again what it has, now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import RateType, chunk_option, json_option, namespace_option, place
from kvdepot.client.ctl.completing import TierName
from kvdepot.client.ctl.following import EXIT_STOPPED, Bar, counted, follow
from kvdepot.client.ctl.printer import new_table, show, size_text
from kvdepot.core.control import VerifyCall
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.control import VerifiedTier, VerifyReply
    from rich.table import Table

EXIT_FOUND: Final = 1


@click.command()
@namespace_option(required=False)
@chunk_option
@click.option("--tier", metavar="NAME", type=TierName(), default="", help="One tier: ram, or a name of [[tier]].")
@click.option(
    "--rate",
    metavar="RATE",
    type=RateType(),
    default="256MiB/s",
    show_default=True,
    help="Read at most so much of each tier.",
)
@json_option
@click.pass_obj
def verify(
    connection: tuple[Endpoint, float], namespace: str, chunk: str, tier: str, rate: int, as_json: bool
) -> int:  # fmt: skip
    """Have the daemon read what it has again and compare it with its checksums, now: all, or what is named.

    With a chunk: it and all that follows it. It goes on behind everything that serves; ^C ends it in the daemon too.
    What is damaged is dropped, or goes to quarantine, as whenever it is found. Exit code 1 if something is damaged, or
    a tier could not be read to its end. With --json a line for each look.
    """
    console = Console()
    with connect(*connection) as operator:
        call = VerifyCall(rate, *place(operator, namespace, chunk), tier)
        followed = follow(operator.verify(call), console, _bars, as_json=as_json)
    tiers = followed.reply.tiers if followed.reply else ()
    if tiers and not as_json:
        show(console, _table(tiers))
    if followed.stopped:
        return EXIT_STOPPED
    return EXIT_FOUND if any(one.damaged or one.reason for one in tiers) else 0


def _bars(reply: VerifyReply) -> list[Bar]:
    return [
        Bar(one.tier, _met(one), one.objects, f"{_sum(one.damaged)} damaged, {size_text(one.verified_bytes)}")
        for one in reply.tiers
    ]


def _met(one: VerifiedTier) -> int:
    return one.verified + _sum(one.damaged) + _sum(one.skipped)


def _sum(found: Mapping[str, int]) -> int:
    return sum(found.values())


def _table(tiers: Iterable[VerifiedTier]) -> Table:
    table = new_table("verified", "tier", "verified", "size", "damaged", "skipped", "the rest")
    for one in tiers:
        rest = f"skipped: {escape(one.reason)}" if one.reason else "" if one.over else "not read: stopped"
        damaged = f"[red]{counted(one.damaged)}[/]" if one.damaged else "0"
        table.add_row(
            escape(one.tier), str(one.verified), size_text(one.verified_bytes), damaged, counted(one.skipped), rest
        )  # fmt: skip
    return table
