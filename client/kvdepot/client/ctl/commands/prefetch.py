"""`kvdepotctl prefetch`: have the daemon read into RAM what tiers below it have, before somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import chunk_option, json_option, namespace_option, place
from kvdepot.client.ctl.following import EXIT_STOPPED, Bar, counted, follow
from kvdepot.client.ctl.printer import new_table, show, size_text
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.control import PrefetchReply
    from rich.table import Table

EXIT_NOT_ALL: Final = 1


@click.command()
@namespace_option(required=True)
@chunk_option
@json_option
@click.pass_obj
def prefetch(connection: tuple[Endpoint, float], namespace: str, chunk: str, as_json: bool) -> int:
    """Have the daemon read into RAM what tiers below it have of NAMESPACE, or of the path that ends with a chunk.

    Within [policy] prefetch_share, behind loads and what requests wait for; ^C ends it in the daemon too. What was read
    may be evicted as anything else: pin it to keep it. Exit code 1 if not all of it is in RAM. With --json a line for
    each look.
    """
    console = Console()
    with connect(*connection) as operator:
        replies = operator.prefetch(*place(operator, namespace, chunk))
        followed = follow(replies, console, _bars, as_json=as_json)
    reply = followed.reply
    if reply is None:
        return EXIT_STOPPED
    if not as_json:
        show(console, _table(reply))
        if not reply.over or reply.reason:
            console.print(f"the rest was not read: {reply.reason or 'stopped'}", markup=False)
    if followed.stopped:
        return EXIT_STOPPED
    return EXIT_NOT_ALL if reply.refused or reply.failed or reply.reason else 0


def _bars(reply: PrefetchReply) -> list[Bar]:
    return [Bar("chunks", reply.looked_at, reply.chunks, f"{reply.read} objects read, {size_text(reply.read_bytes)}")]


def _table(reply: PrefetchReply) -> Table:
    table = new_table("prefetched", "chunks", "there before", "read", "size", "refused", "failed")
    table.add_row(
        str(reply.looked_at), str(reply.there), str(reply.read), size_text(reply.read_bytes), counted(reply.refused),
        counted(reply.failed),
    )  # fmt: skip
    return table
