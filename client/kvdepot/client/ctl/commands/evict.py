"""`kvdepotctl evict`: drop a chunk with all below it, or all of a namespace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import confirm, json_option
from kvdepot.client.ctl.completing import Name

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint


@click.command()
@click.argument("name", metavar="NAMESPACE[/KEY]", type=Name(chunks=True))
@click.option("--yes", is_flag=True, help="Do not ask before a whole namespace goes.")
@json_option
@click.pass_obj
def evict(connection: tuple[Endpoint, float], name: str, yes: bool, as_json: bool) -> int:
    """Drop all of NAMESPACE, or its chunk KEY with all that follows it, from RAM and this node's disks.

    Both may be cut short to what is still unique. Nobody finds it any more when this answers; what ranks are copying at
    the moment stays until they are done. Files of a shared tier stay: they are other nodes' too.
    """
    namespace, _, prefix = name.partition("/")
    with connect(*connection) as operator:
        namespace_id = operator.find_namespace(namespace)
        key = operator.find_chunk(namespace_id, prefix) if prefix else b""
        shown = namespace_id.hex()[:12] + (f"/{key.hex()[:12]}" if key else "")
        if not key and not yes and not as_json:
            confirm(f"drop everything of namespace {shown}?")
        reply = operator.evict(namespace_id, key)
    if as_json:
        record = {
            "namespace_id": namespace_id.hex(), "key": key.hex() or None, "chunks": reply.chunks, "more": reply.more,
            "spared": list(reply.spared),
        }  # fmt: skip
        click.echo(json.dumps(record, indent=2))
        return 0
    click.echo(f"evicted {shown}: {reply.chunks}{' or more' if reply.more else ''} chunks")
    if reply.spared:
        click.echo(f"these tiers keep what they have: {', '.join(reply.spared)}")
    return 0
