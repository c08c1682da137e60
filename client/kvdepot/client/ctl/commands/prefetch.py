"""`kvdepotctl prefetch`: read objects from lower tiers into RAM before a request needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option, name_argument, place
from kvdepot.client.ctl.following import EXIT_STOPPED, Bar, counted, follow
from kvdepot.client.ctl.printer import new_table, show
from kvdepot.client.ctl.texts import escape
from kvdepot.core.units import size_text
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.control import PrefetchReply
    from rich.table import Table

EXIT_NOT_ALL: Final = 1


@click.command()
@name_argument()
@json_option
@click.pass_obj
def prefetch(connection: tuple[Endpoint, float], name: str, as_json: bool) -> int:
    """Read objects from lower tiers into RAM.

    Reads NAMESPACE, or the prefix that ends with its chunk KEY. Operator prefetch uses the limits of request prefetch
    and has the lowest priority. It may use at most [policy] prefetch_share of RAM. ^C stops it in the daemon too.
    Prefetched objects may be evicted; pin them to prevent that. With --json, prints one line per progress report. Exit
    code 1: not all objects are in RAM.
    """
    console = Console()
    with connect(*connection) as operator:
        replies = operator.prefetch(*place(operator, name))
        followed = follow(replies, console, _bars, as_json=as_json)
    reply = followed.reply
    if reply is None:
        return EXIT_STOPPED
    if not as_json:
        show(console, _table(reply))
        if not reply.finished or reply.reason:
            console.print(f"the rest was not read: {escape(reply.reason) or 'stopped'}")
    if followed.stopped:
        return EXIT_STOPPED
    return EXIT_NOT_ALL if reply.refused or reply.failed or reply.reason else 0


def _bars(reply: PrefetchReply) -> list[Bar]:
    return [Bar("chunks", reply.examined, reply.chunks, f"{reply.read} objects read, {size_text(reply.read_bytes)}")]


def _table(reply: PrefetchReply) -> Table:
    table = new_table("prefetched", ">chunks", ">present", ">read", ">size", "refused", "failed")
    table.add_row(
        str(reply.examined), str(reply.present), str(reply.read), size_text(reply.read_bytes), counted(reply.refused),
        counted(reply.failed),
    )  # fmt: skip
    return table
