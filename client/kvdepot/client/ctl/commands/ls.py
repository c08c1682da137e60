"""`kvdepotctl ls`: the namespaces, or the chunks of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.completing import Name
from kvdepot.client.ctl.listings import chunk_page_record, namespace_record, print_chunks, print_namespaces
from kvdepot.core.errors import InvalidArgument
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint


@click.command()
@click.argument("name", metavar="[NAMESPACE[/KEY]]", type=Name(chunks=True), default="")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most so many.")
@click.option("--cursor", default="", help="Go on where a listing stopped, with what it printed.")
@json_option
@click.pass_obj
def ls(connection: tuple[Endpoint, float], name: str, limit: int, cursor: str, as_json: bool) -> int:
    """List the namespaces, or the chunks of NAMESPACE (those whose key begins with KEY).

    Both may be cut short to what is still unique. Chunks come in no order that means anything; one that is there all
    the while is shown exactly once, whatever comes and goes meanwhile.
    """
    with connect(*connection) as operator, _cursor_errors():
        if name:
            _chunks(operator, name, limit, cursor, as_json=as_json)
        else:
            _namespaces(operator, limit, cursor, as_json=as_json)
    return 0


@contextmanager
def _cursor_errors() -> Iterator[None]:
    """What the daemon says of a page token is about the option."""
    try:
        yield
    except InvalidArgument as error:
        if "page_token" not in error.message:
            raise
        raise click.BadParameter("it is none that this run of the daemon has printed", param_hint="--cursor") from error


def _namespaces(operator: Operator, limit: int, cursor: str, *, as_json: bool) -> None:
    page = operator.namespaces("", limit, cursor)
    if as_json:
        records = [namespace_record(one) for one in page.namespaces]
        click.echo(json.dumps({"namespaces": records, "next_cursor": page.next_token}, indent=2))
    else:
        print_namespaces(page, Console())


def _chunks(operator: Operator, name: str, limit: int, cursor: str, *, as_json: bool) -> None:
    namespace, _, prefix = name.partition("/")
    namespace_id = operator.find_namespace(namespace)
    page = operator.chunks(namespace_id, prefix.lower(), limit, cursor)
    if as_json:
        click.echo(json.dumps(chunk_page_record(namespace_id, page), indent=2))
    else:
        print_chunks(namespace_id, page, Console())
