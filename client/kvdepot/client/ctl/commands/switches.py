"""`kvdepotctl loads` and `kvdepotctl stores`: switch them off and on, without restarting an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_record, to_json
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option, name_argument
from kvdepot.client.ctl.texts import say
from kvdepot.core.control import Switch, SwitchCall, switch_states

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint

_HELP = """Switch {0} off or on.

    Applies to NAMESPACE, whose id may be shortened, or to all namespaces. It takes effect before this answers, and
    survives restarts of the daemon. Switching {0} on for all does not change namespaces that were switched off by name.
    """


def _command(switch: Switch) -> click.Command:
    @click.command(name=switch, help=_HELP.format(switch))
    @click.argument("state", type=click.Choice(["on", "off"]))
    @name_argument(required=False, chunks=False)
    @json_option
    @click.pass_obj
    def run(connection: tuple[Endpoint, float], state: str, name: str, as_json: bool) -> int:
        _set(connection, switch, name, on=state == "on", as_json=as_json)
        return 0

    return run


loads, stores = _command(Switch.LOADS), _command(Switch.STORES)


def _set(connection: tuple[Endpoint, float], switch: Switch, namespace: str, *, on: bool, as_json: bool) -> None:
    with connect(*connection) as operator:
        find = operator.find_namespace if not on else lambda prefix: operator.find_switched_off(switch, prefix)
        namespace_id = find(namespace) if namespace else b""
        reply = operator.switch(SwitchCall(switch, on, namespace_id))
    if as_json:
        record = to_json(reply)
        echo_record(record.pop("switches") | record)
        return
    whom = f"namespace {namespace_id.hex()[:12]}" if namespace_id else "all namespaces"
    say(f"{switch} are {'on' if on else 'off'} for {whom}")
    state = switch_states(reply.switches)[switch]
    if on and namespace_id and state.off:
        say(f"{switch} are still off for all namespaces: run `kvdepotctl {switch} on`")
    if on and not namespace_id and state.off_namespaces:
        say(f"still off by name: {', '.join(one.hex()[:12] for one in state.off_namespaces)}")
    if not on and reply.leases:
        say(f"leases granted before, still in progress: {reply.leases}")
    if reply.not_persisted:
        say(f"warning: {reply.not_persisted}", err=True)
