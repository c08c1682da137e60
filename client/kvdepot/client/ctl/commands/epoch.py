"""`kvdepotctl epoch bump`: never serve again what was stored so far."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import confirm, json_option
from kvdepot.client.ctl.completing import Name
from kvdepot.client.ctl.printer import epochs_record
from kvdepot.core.control import BumpCall
from kvdepot.core.limits import BUMPS_MAX

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.control import BumpReply


@click.group()
def epoch() -> None:
    """Make void what engines have stored."""


@epoch.command()
@click.option("--namespace", type=Name(chunks=False), default="", help="Only of this one; its id may be cut short.")
@click.option(
    "--to", type=click.IntRange(1, BUMPS_MAX), default=None, metavar="COUNTER",
    help="Bump to this counter, that of the other nodes of a shared directory; nothing is done where it is reached.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def bump(connection: tuple[Endpoint, float], namespace: str, to: int | None, yes: bool, as_json: bool) -> int:
    """Never serve again what was stored so far, of all namespaces or of one, from any tier. There is no way back.

    It takes effect before this answers, and outlives restarts of the daemon. What is being loaded fails and is
    computed; what is being stored is not kept, nor is more of requests that run. Engines go on by themselves, as
    another namespace. Bump on every node of a shared directory: each has a counter of its own.
    """
    if namespace and to is not None:
        raise click.UsageError("--to is for all namespaces")
    with connect(*connection) as operator:
        namespace_id = operator.find_any_namespace(namespace) if namespace else b""
        whose = f"namespace {namespace_id.hex()[:12]}" if namespace_id else "all namespaces"
        if not yes and not as_json:
            confirm(f"never serve again what was stored of {whose}?")
        reply = operator.bump(BumpCall(namespace_id, to or 0))
    if as_json:
        record = {
            **epochs_record(reply.epochs), "changed": reply.changed, "namespaces": reply.namespaces,
            "chunks": reply.chunks, "leases": reply.leases, "shared": list(reply.shared), "not_kept": reply.not_kept,
        }  # fmt: skip
        click.echo(json.dumps(record, indent=2))
        return 0
    _print(reply, whose, all_of_them=not namespace_id)
    return 0


def _print(reply: BumpReply, whose: str, *, all_of_them: bool) -> None:
    if not reply.changed:
        click.echo(f"nothing to do: the counter is {reply.epochs.bump}" if all_of_them else f"{whose} is void already")
    else:
        click.echo(f"void from now on: what was stored of {whose} ({reply.chunks} chunks here)")
        if all_of_them:
            click.echo(f"the bump counter is {reply.epochs.bump}")
    if reply.leases:
        click.echo(f"loads and stores in progress, of which nothing comes: {reply.leases}")
    if reply.shared:
        counter = f", with --to {reply.epochs.bump}" if all_of_them else ""
        click.echo(f"bump on every node that has the directory of {', '.join(reply.shared)}{counter}")
    if reply.not_kept:
        click.echo(f"warning: {reply.not_kept}", err=True)
