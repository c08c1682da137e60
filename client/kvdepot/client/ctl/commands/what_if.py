"""`kvdepotctl what-if`: show the hit rate that tiers of other capacities would have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.curves import curve_lines, known
from kvdepot.client.ctl.texts import say
from kvdepot.core.bars import ASCII, BLOCKS
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint

EXIT_OK, EXIT_TOO_FEW = 0, 1
_COLUMNS_MIN: Final = 80


@click.command("what-if")
@json_option
@click.pass_obj
def what_if(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Show the hit rate of other capacities.

    Estimates, for RAM and for each disk, the hit rate at 0.25 to 8 times its capacity, from a sample of the requests of
    the last hour. Exit code 1: there are too few requests yet.
    """
    with connect(*connection) as operator:
        found = operator.status()
    if as_json:
        echo_record({tier.name: tier.what_if for tier in found.tiers if tier.what_if is not None})
    else:
        console = Console()
        glyphs = ASCII if console.options.ascii_only else BLOCKS
        for line in curve_lines(found, max(console.width, _COLUMNS_MIN), glyphs):
            say(line)
    return EXIT_OK if known(found) else EXIT_TOO_FEW
