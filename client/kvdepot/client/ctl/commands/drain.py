"""`kvdepotctl drain` and `kvdepotctl resume`: grant nothing more, and wait for what was granted; grant again."""

from __future__ import annotations

import json
import time
from threading import Event
from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint

EXIT_NOT_DRAINED: Final = 1
_STEP_SECONDS: Final = 0.1


@click.command()
@click.option("--wait", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Wait until it is drained.")
@json_option
@click.pass_obj
def drain(connection: tuple[Endpoint, float], wait: float, as_json: bool) -> int:
    """Let the daemon grant nothing more: it is not ready, engines miss and store nothing, what was granted ends.

    Until `resume`, or the end of its run. Exit code 1 if leases, or objects that wait to be written, are left when the
    time to wait is over.
    """
    with connect(*connection) as operator:
        leases, objects = operator.drain(draining=True), 0
        pause = Event()  # nobody sets it
        until = time.monotonic() + wait
        while True:
            leases, objects = _left(operator)
            if not leases + objects or time.monotonic() >= until:
                break
            pause.wait(_STEP_SECONDS)
    if as_json:
        click.echo(json.dumps({"draining": True, "leases": leases, "queued_objects": objects}, indent=2))
    elif leases + objects:
        click.echo(f"draining: {leases} leases have not ended, {objects} objects wait to be written")
    else:
        click.echo("drained: nothing is lent, nothing waits to be written")
    return EXIT_NOT_DRAINED if leases + objects else 0


@click.command()
@json_option
@click.pass_obj
def resume(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Let a drained daemon grant again."""
    with connect(*connection) as operator:
        leases = operator.drain(draining=False)
    click.echo(json.dumps({"draining": False, "leases": leases}, indent=2) if as_json else "resumed")
    return 0


def _left(operator: Operator) -> tuple[int, int]:
    """Leases of all engines, and objects that wait to be written to tiers."""
    status = operator.status()
    return sum(one.leases for one in status.sessions), sum(tier.queued_objects for tier in status.tiers)
