"""`kvdepotctl reload` and `kvdepotctl config`: the configuration in effect, and that of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.texts import say
from kvdepot.core.units import size_text

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.control import ConfigChange

EXIT_DIFFERENT = 1


@click.command()
@json_option
@click.pass_obj
def reload(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Reload the configuration file.

    The daemon applies all changes of the file or, with exit code 1, none. No lease ends. A change that needs a restart
    is refused with its key; `config diff` shows what would change.
    """
    with connect(*connection) as operator:
        reply = operator.reload()
    if as_json:
        echo_record(reply)
        return 0
    for change in reply.changes:
        say(_line(change))
    if not reply.changes:
        say(f"configuration unchanged: {reply.file}")
    return 0


@click.group()
def config() -> None:
    """Show the configuration in effect."""


@config.command()
@json_option
@click.pass_obj
def show(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Show each key with its value.

    The values combine file, environment, command line and defaults.
    """
    with connect(*connection) as operator:
        reply = operator.configuration()
    if as_json:
        echo_record(reply)
        return 0
    say(f"# {reply.file}")
    for key, value in sorted(reply.values.items()):
        say(f"{key} = {value}")
    return 0


@config.command()
@json_option
@click.pass_obj
def diff(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Compare the file with the running daemon.

    Exit code 1: they differ.
    """
    with connect(*connection) as operator:
        reply = operator.reload(dry_run=True)
    if as_json:
        echo_record(reply)
    else:
        for change in reply.changes:
            say(_line(change) + ("" if change.live else " (needs a restart)"))
        if reply.empties_ram:
            say("RAM will begin empty after a restart with this file, because the arena is another one")
        elif reply.ram_lost_bytes:
            smaller = size_text(reply.ram_lost_bytes)
            say(f"RAM will be {smaller} smaller after a restart with this file, and lose what lay at its end")
    return EXIT_DIFFERENT if reply.changes else 0


def _line(change: ConfigChange) -> str:
    return f"{change.key}: {change.before} -> {change.after}"
