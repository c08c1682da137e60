"""`kvdepotctl verify`: read stored objects and compare their checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import RateType, json_option, name_argument, place
from kvdepot.client.ctl.completing import TierName
from kvdepot.client.ctl.following import EXIT_STOPPED, Bar, counted, follow
from kvdepot.client.ctl.printer import new_table, show
from kvdepot.client.ctl.texts import escape
from kvdepot.core.control import VerifyCall
from kvdepot.core.units import size_text
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.control import VerifiedTier, VerifyReply
    from rich.table import Table

EXIT_FOUND: Final = 1


@click.command()
@name_argument(required=False)
@click.option("--tier", metavar="NAME", type=TierName(), default="", help="Only this tier: ram, or a name of [[tier]].")
@click.option(
    "--rate",
    metavar="RATE",
    type=RateType(),
    default="256MiB/s",
    show_default=True,
    help="Read at most this much of each tier.",
)
@json_option
@click.pass_obj
def verify(
    connection: tuple[Endpoint, float], name: str, tier: str, rate: int, as_json: bool
) -> int:  # fmt: skip
    """Verify stored objects by their checksums.

    Reads all objects, or those of NAMESPACE, or its chunk KEY with every chunk after it, and compares their checksums.
    It has the lowest priority; ^C stops it in the daemon too. Damaged objects are dropped from RAM, or moved to
    quarantine. With --json, prints one line per progress report. Exit code 1: an object is damaged, or a tier could not
    be read to its end.
    """
    console = Console()
    with connect(*connection) as operator:
        call = VerifyCall(rate, *place(operator, name), tier)
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
    table = new_table("verified", "tier", ">verified", ">size", "damaged", "skipped", "the rest")
    for one in tiers:
        rest = f"skipped: {escape(one.reason)}" if one.reason else "" if one.finished else "not read: stopped"
        damaged = f"[red]{counted(one.damaged)}[/]" if one.damaged else "0"
        table.add_row(
            escape(one.tier), str(one.verified), size_text(one.verified_bytes), damaged, counted(one.skipped), rest
        )  # fmt: skip
    return table
