"""`kvdepotctl status`: one look at the daemon."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.printer import print_status, status_record
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint

EXIT_OK, EXIT_NOT_READY = 0, 1


@click.command()
@json_option
@click.option("--counters", is_flag=True, help="Show every counter as well.")
@click.pass_obj
def status(connection: tuple[Endpoint, float], as_json: bool, counters: bool) -> int:
    """Show readiness, tiers, engines and namespaces. Exit code 1 if the daemon is not ready."""
    with connect(*connection) as operator:
        found = operator.status()
    if as_json:
        click.echo(json.dumps(status_record(found), indent=2))
    else:
        print_status(found, Console(), counters=counters)
    return EXIT_OK if found.ready else EXIT_NOT_READY
