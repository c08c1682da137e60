"""`kvdepotctl status`: one look at the daemon."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
import grpc
from kvdepot.client.ctl.printer import print_status, status_record
from kvdepot.client.transports.control import CHANNEL_OPTIONS
from kvdepot.proto import codec_report
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.proto.v1 import depot_pb2_grpc
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.report import DaemonStatus

EXIT_OK, EXIT_NOT_READY = 0, 1


def get_status(endpoint: Endpoint, timeout_seconds: float) -> DaemonStatus:
    """Ask the daemon. Raises grpc.RpcError when it does not answer."""
    with grpc.insecure_channel(endpoint.grpc_target, options=CHANNEL_OPTIONS) as channel:
        stub = depot_pb2_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        return codec_report.decode_status(stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_seconds))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (sizes in bytes, ids in hexadecimal).")
@click.option("--counters", is_flag=True, help="Show every counter as well.")
@click.pass_obj
def status(connection: tuple[Endpoint, float], as_json: bool, counters: bool) -> int:
    """Show readiness, tiers, engines and namespaces. Exit code 1 if the daemon is not ready."""
    found = get_status(*connection)
    if as_json:
        click.echo(json.dumps(status_record(found), indent=2))
    else:
        print_status(found, Console(), counters=counters)
    return EXIT_OK if found.ready else EXIT_NOT_READY
