"""`kvdepotctl epoch bump`: invalidate all objects that were stored so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_record, to_json
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import confirm, json_option, name_argument
from kvdepot.client.ctl.texts import say
from kvdepot.core.control import BumpCall
from kvdepot.core.limits import BUMPS_MAX

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.control import BumpReply


@click.group()
def epoch() -> None:
    """Invalidate stored objects."""


@epoch.command()
@name_argument(required=False, chunks=False)
@click.option(
    "--to", type=click.IntRange(1, BUMPS_MAX), default=None, metavar="COUNTER",
    help="Bump to this counter, the one of the other nodes of a shared directory. No effect if it is reached already.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Invalidate without asking.")
@json_option
@click.pass_obj
def bump(connection: tuple[Endpoint, float], name: str, to: int | None, yes: bool, as_json: bool) -> int:
    """Invalidate all objects stored so far.

    Objects of all namespaces, or of NAMESPACE, are never served again from any tier. This cannot be undone. It takes
    effect before this answers, and survives restarts of the daemon. Loads in progress fail and are recomputed; stores
    in progress are discarded. Engines continue under another namespace. On a shared directory, bump every node: each
    daemon has its own counter.
    """
    if name and to is not None:
        raise click.UsageError("--to needs all namespaces: leave out NAMESPACE")
    with connect(*connection) as operator:
        namespace_id = operator.find_any_namespace(name) if name else b""
        whose = f"namespace {namespace_id.hex()[:12]}" if namespace_id else "all namespaces"
        if not yes and not as_json:
            confirm(f"invalidate all stored objects of {whose}?")
        reply = operator.bump(BumpCall(namespace_id, all=not namespace_id, to=to or 0))
    if as_json:
        record = to_json(reply)
        echo_record(record.pop("epochs") | record)
        return 0
    _print(reply, whose, all_of_them=not namespace_id)
    return 0


def _print(reply: BumpReply, whose: str, *, all_of_them: bool) -> None:
    if not reply.changed:
        say(f"nothing to do: the counter is {reply.epochs.bump}" if all_of_them else f"{whose} is invalidated already")
    else:
        say(f"invalidated: {whose} ({reply.chunks} chunks on this node)")
        if all_of_them:
            say(f"the bump counter is {reply.epochs.bump}")
    if reply.leases:
        say(f"loads and stores in progress that are discarded: {reply.leases}")
    if reply.shared:
        counter = f", with --to {reply.epochs.bump}" if all_of_them else ""
        say(f"run the bump on every node that shares the directory of {', '.join(reply.shared)}{counter}")
    if reply.not_persisted:
        say(f"warning: {reply.not_persisted}", err=True)
