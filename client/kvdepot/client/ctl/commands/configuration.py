"""`kvdepotctl reload` and `kvdepotctl config`: what the daemon runs with, and what its file says now."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.control import ConfigChange, ReloadReply

EXIT_DIFFERENT = 1


@click.command()
@json_option
@click.pass_obj
def reload(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Have the daemon read its configuration again: all that is new in it or, with exit code 1, nothing.

    No lease ends for it. What cannot change while the daemon runs is refused by name; `config diff` says what would be.
    """
    with connect(*connection) as operator:
        reply = operator.reload()
    if as_json:
        click.echo(json.dumps(_record(reply), indent=2))
        return 0
    for change in reply.changes:
        click.echo(_line(change))
    if not reply.changes:
        click.echo(f"{reply.file} says nothing new")
    return 0


@click.group()
def config() -> None:
    """What the daemon runs with."""


@config.command()
@json_option
@click.pass_obj
def show(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Show every key with its value: file, command line and defaults together."""
    with connect(*connection) as operator:
        reply = operator.configuration()
    if as_json:
        click.echo(json.dumps({"file": reply.file, "values": dict(sorted(reply.values.items()))}, indent=2))
        return 0
    click.echo(f"# {reply.file}")
    for key, value in sorted(reply.values.items()):
        click.echo(f"{key} = {value}")
    return 0


@config.command()
@json_option
@click.pass_obj
def diff(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Say what is different in the file from what the daemon runs with. Exit code 1 if anything is."""
    with connect(*connection) as operator:
        reply = operator.reload(dry_run=True)
    if as_json:
        click.echo(json.dumps(_record(reply), indent=2))
    else:
        for change in reply.changes:
            click.echo(_line(change) + ("" if change.live else " (takes a restart)"))
    return EXIT_DIFFERENT if reply.changes else 0


def _record(reply: ReloadReply) -> dict[str, object]:
    return {"file": reply.file, "changes": [asdict(change) for change in reply.changes]}


def _line(change: ConfigChange) -> str:
    return f"{change.key}: {change.before} -> {change.after}"
