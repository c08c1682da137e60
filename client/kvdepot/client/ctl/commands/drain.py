"""`kvdepotctl drain` and `kvdepotctl resume`: stop granting leases and wait for open ones; grant again."""

from __future__ import annotations

import time
from threading import Event
from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import SecondsType, json_option
from kvdepot.client.ctl.texts import say

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint

EXIT_NOT_DRAINED: Final = 1
_STEP_SECONDS: Final = 0.1


@click.command()
@click.option(
    "--wait",
    type=SecondsType(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait at most this long for the drain to end.",
)
@json_option
@click.pass_obj
def drain(connection: tuple[Endpoint, float], wait: float, as_json: bool) -> int:
    """Stop granting leases.

    The daemon reports not ready, and engines miss and store nothing. Leases that were granted continue until they end.
    The drain lasts until `resume`, or until the daemon restarts. Exit code 1: leases, or objects that wait to be
    written, remain when the --wait time ends.
    """
    with connect(*connection) as operator:
        leases, objects = operator.drain(draining=True), 0
        pause = Event()  # nobody sets it
        until = time.monotonic() + wait
        while True:
            leases, objects = _remaining(operator)
            if not leases + objects or time.monotonic() >= until:
                break
            pause.wait(_STEP_SECONDS)
    if as_json:
        echo_record({"draining": True, "leases": leases, "queued_objects": objects})
    elif leases + objects:
        say(f"draining: {leases} leases in progress, {objects} objects wait to be written")
    else:
        say("drained: no leases, no objects wait to be written")
    return EXIT_NOT_DRAINED if leases + objects else 0


@click.command()
@json_option
@click.pass_obj
def resume(connection: tuple[Endpoint, float], as_json: bool) -> int:
    """Grant leases again after a drain."""
    with connect(*connection) as operator:
        leases = operator.drain(draining=False)
    if as_json:
        echo_record({"draining": False, "leases": leases})
    else:
        say("resumed")
    return 0


def _remaining(operator: Operator) -> tuple[int, int]:
    """Return the leases of all engines, and the objects that wait to be written to tiers."""
    status = operator.status()
    return sum(one.leases for one in status.sessions), sum(tier.queued_objects for tier in status.tiers)
