"""`kvdepotctl status`: show the state of the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_json
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.printer import print_status
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint

EXIT_OK, EXIT_NOT_READY = 0, 1


@click.command()
@json_option
@click.option("--counters", is_flag=True, help="Show each counter too.")
@click.pass_obj
def status(connection: tuple[Endpoint, float], as_json: bool, counters: bool) -> int:
    """Show readiness, tiers, engines, namespaces.

    Exit code 1: the daemon is not ready.
    """
    with connect(*connection) as operator:
        found = operator.status()
    if as_json:
        echo_json(found)
    else:
        print_status(found, Console(), counters=counters)
    return EXIT_OK if found.ready else EXIT_NOT_READY
