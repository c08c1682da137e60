"""`kvdepotctl pin` and `kvdepotctl unpin`: keep a namespace or a path from being evicted from RAM, for a time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.completing import Name
from kvdepot.client.ctl.printer import pin_record, pin_text, size_text
from kvdepot.core.control import PinCall
from kvdepot.core.units import parse_duration_seconds

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint


@click.command()
@click.argument("name", metavar="NAMESPACE[/KEY]", type=Name(chunks=True))
@click.option("--ttl", default="1h", show_default=True, metavar="DURATION", help="How long, from now on: 90s, 8h, 7d.")
@json_option
@click.pass_obj
def pin(connection: tuple[Endpoint, float], name: str, ttl: str, as_json: bool) -> int:
    """Let nothing of NAMESPACE, or of the path that ends with its chunk KEY, be evicted from RAM for a time.

    Both may be cut short to what is still unique. It keeps what RAM has, and what of it comes there later, within
    [policy] pin_share; it reads nothing. Pinned again, the time begins anew. It outlives restarts of the daemon.
    """
    seconds = parse_duration_seconds(ttl)
    namespace, _, prefix = name.partition("/")
    with connect(*connection) as operator:
        namespace_id = operator.find_namespace(namespace)
        key = operator.find_chunk(namespace_id, prefix) if prefix else b""
        reply = operator.pin(PinCall(namespace_id, key, seconds))
    found = reply.pin
    if as_json:
        click.echo(json.dumps({**pin_record(found), "not_kept": reply.not_kept}, indent=2))
        return 0
    click.echo(f"pinned {pin_text(found)} for {ttl}")
    click.echo(f"of its {found.chunks} chunks {found.objects} objects are kept in RAM: {size_text(found.bytes)}")
    if reply.not_kept:
        click.echo(f"warning: {reply.not_kept}", err=True)
    return 0


@click.command()
@click.argument("name", metavar="NAMESPACE[/KEY]", type=Name(chunks=True))
@json_option
@click.pass_obj
def unpin(connection: tuple[Endpoint, float], name: str, as_json: bool) -> int:
    """End the pin of NAMESPACE, or of the path that ends with its chunk KEY; others of it stay.

    Both may be cut short to what is unique among pins.
    """
    namespace, _, prefix = name.partition("/")
    with connect(*connection) as operator:
        found = operator.find_pin(namespace, prefix)
        not_kept = operator.unpin(found.namespace_id, found.key)
    if as_json:
        record = {"namespace_id": found.namespace_id.hex(), "key": found.key.hex() or None, "not_kept": not_kept}
        click.echo(json.dumps(record, indent=2))
        return 0
    click.echo(f"unpinned {pin_text(found)}")
    if not_kept:
        click.echo(f"warning: {not_kept}", err=True)
    return 0
