"""`kvdepotctl pin` and `kvdepotctl unpin`: protect a namespace or a prefix in RAM from eviction, for a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_record, to_json
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option, name_argument, parts, place
from kvdepot.client.ctl.printer import pin_text
from kvdepot.client.ctl.texts import say
from kvdepot.core.control import PinCall
from kvdepot.core.units import parse_duration_seconds, size_text

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint


@click.command()
@name_argument()
@click.option("--ttl", default="1h", show_default=True, metavar="DURATION", help="Time from now on: 90s, 8h, 7d.")
@json_option
@click.pass_obj
def pin(connection: tuple[Endpoint, float], name: str, ttl: str, as_json: bool) -> int:
    """Protect objects in RAM from eviction.

    Protects NAMESPACE, or the prefix that ends with its chunk KEY, for a time. Both may be shortened while they are
    unique. A pin covers objects that are in RAM now or get there later, within [policy] pin_share. It reads nothing.
    Another pin of the same name sets the time again. Pins survive restarts of the daemon.
    """
    seconds = parse_duration_seconds(ttl)
    with connect(*connection) as operator:
        namespace_id, key = place(operator, name)
        reply = operator.pin(PinCall(namespace_id, key, seconds))
    found = reply.pin
    if as_json:
        echo_record(to_json(found) | {"not_persisted": reply.not_persisted})
        return 0
    say(f"pinned {pin_text(found)} for {ttl}")
    say(f"pinned in RAM: {found.objects} objects of {found.chunks} chunks, {size_text(found.size_bytes)}")
    if reply.not_persisted:
        say(f"warning: {reply.not_persisted}", err=True)
    return 0


@click.command()
@name_argument()
@json_option
@click.pass_obj
def unpin(connection: tuple[Endpoint, float], name: str, as_json: bool) -> int:
    """Remove a pin.

    Removes the pin of NAMESPACE, or of the prefix that ends with its chunk KEY. Other pins stay. Both may be shortened
    while they are unique among pins.
    """
    namespace, prefix = parts(name)
    with connect(*connection) as operator:
        found = operator.find_pin(namespace, prefix)
        not_persisted = operator.unpin(found.namespace_id, found.key)
    if as_json:
        echo_record({"namespace_id": found.namespace_id, "key": found.key, "not_persisted": not_persisted})
        return 0
    say(f"unpinned {pin_text(found)}")
    if not_persisted:
        say(f"warning: {not_persisted}", err=True)
    return 0
