"""`kvdepotctl evict`: delete a namespace, or a chunk and every chunk after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_record, to_json
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import confirm, json_option, name_argument, place
from kvdepot.client.ctl.texts import say

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint


@click.command()
@name_argument()
@click.option("--yes", is_flag=True, help="Delete a whole namespace without asking.")
@json_option
@click.pass_obj
def evict(connection: tuple[Endpoint, float], name: str, yes: bool, as_json: bool) -> int:
    """Delete a namespace, or a chunk's subtree.

    Deletes NAMESPACE, or its chunk KEY with every chunk after it, from RAM and from this node's disks. Ids and keys may
    be shortened while they are unique. When this answers, no engine finds the objects any more. Copies in progress keep
    their memory until they end. Files of a shared tier stay, because other nodes use them.
    """
    with connect(*connection) as operator:
        namespace_id, key = place(operator, name)
        shown = namespace_id.hex()[:12] + (f"/{key.hex()[:12]}" if key else "")
        if not key and not yes and not as_json:
            confirm(f"delete all objects of namespace {shown}?")
        reply = operator.evict(namespace_id, key)
    if as_json:
        echo_record({"namespace_id": namespace_id, "key": key} | to_json(reply))
        return 0
    say(f"evicted {shown}: {reply.chunks}{' or more' if reply.more else ''} chunks")
    if reply.unchanged_tiers:
        say(f"not changed: tiers {', '.join(reply.unchanged_tiers)}")
    return 0
