"""`kvdepotctl status` and `kvdepotctl health`: show the state of the daemon, and the verdict on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option, output_option
from kvdepot.client.ctl.overview import print_overview, print_verdict
from kvdepot.client.ctl.printer import print_status
from kvdepot.core.errors import KvDepotError
from kvdepot.core.verdict import Verdict
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint

EXIT_OK, EXIT_NOT_READY = 0, 1
_WIDE: Final = "wide"
EXIT_CODES: Final = {Verdict.OK: 0, Verdict.WARN: 1, Verdict.ERR: 2}
"""As those of plugins of monitoring systems."""


@click.command()
@output_option(_WIDE)
@click.option("--wide", is_flag=True, help="The same as -o wide: show all tables too.")
@click.option("--counters", is_flag=True, help="Show all tables and each counter too.")
@click.pass_obj
def status(connection: tuple[Endpoint, float], as_json: bool, output: str, wide: bool, counters: bool) -> int:
    """Show the verdict, hit rate, tiers and engines.

    Exit code 1: the daemon is not ready.
    """
    with connect(*connection) as operator:
        found = operator.status()
    console = Console()
    if as_json:
        echo_record(found)
    elif wide or counters or output == _WIDE:
        print_verdict(found, console)
        print_status(found, console, counters=counters)
    else:
        print_overview(found, console)
    return EXIT_OK if found.ready else EXIT_NOT_READY


@click.command()
@json_option
@click.pass_obj
def health(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Show whether the daemon is well, and why not.

    Exit codes: 0 HEALTH_OK; 1 HEALTH_WARN; 2 HEALTH_ERR, or wrong usage.
    """
    with connect(*connection) as operator:
        found = operator.status()
    if found.health.verdict not in EXIT_CODES:
        raise KvDepotError("this kvdepotd gives no verdict", advice="upgrade it; `kvdepotctl status` shows its state")
    if as_json:
        echo_record(found.health)
    else:
        print_verdict(found, Console())
    return EXIT_CODES[found.health.verdict]
