"""`kvdepotctl explain` and `kvdepotctl requests`: show what requests hit, and why the rest was a miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_record, to_json
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option, not_empty
from kvdepot.client.ctl.explaining import record_lines, table_lines
from kvdepot.client.ctl.texts import say
from kvdepot.core.records import LIST_MAX
from rich.console import Console

if TYPE_CHECKING:
    from typing import Any

    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.records import RequestRecord


@click.command()
@click.argument("request_id", metavar="REQUEST_ID", callback=not_empty)
@json_option
@click.pass_obj
def explain(connection: tuple[Endpoint, float], request_id: str, as_json: bool) -> int:
    """Explain what one request hit or missed.

    REQUEST_ID is the id in the engine's log or its beginning, or the id that a user or a gateway knows: that of an
    answer, or an X-Request-Id. vLLM adds `cmpl-` or `chatcmpl-` before the latter, and numbers around it.
    """
    with connect(*connection) as operator:
        records = operator.explain(request_id)
    if as_json:
        echo_record([_to_json(record) for record in records])
    else:
        columns = Console().width
        say("\n\n".join("\n".join(record_lines(record, columns)) for record in records))
    return 0


@click.command()
@click.option("--misses", is_flag=True, help="Show only requests that missed.")
@click.option(
    "--last", type=click.IntRange(1, LIST_MAX), default=20, show_default=True, help="Show at most this many requests."
)
@json_option
@click.pass_obj
def requests(connection: tuple[Endpoint, float], misses: bool, last: int, as_json: bool) -> int:
    """List the latest requests, and what they hit.

    The latest is first. `kvdepotctl explain ID` shows one of them; the beginning of its ID is enough.
    """
    with connect(*connection) as operator:
        records = operator.requests(last, misses=misses)
    if as_json:
        echo_record([_to_json(record) for record in records])
    elif records:
        say("\n".join(table_lines(records, Console().width)))
    else:
        say("no request has missed" if misses else "no request is remembered")
    return 0


def _to_json(record: RequestRecord) -> dict[str, Any]:
    """Return the record's fields and what became of it."""
    return {"outcome": record.outcome.name.lower(), **to_json(record)}
