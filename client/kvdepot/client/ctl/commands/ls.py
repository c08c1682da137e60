"""`kvdepotctl ls`: list namespaces, or the chunks of one namespace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.completing import Name
from kvdepot.client.ctl.listings import chunk_page_record, print_chunks, print_namespaces
from kvdepot.core.errors import InvalidArgument
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint


@click.command()
@click.argument("name", metavar="[NAMESPACE[/KEY]]", type=Name(chunks=True), default="")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most this many.")
@click.option("--cursor", default="", help="Continue a listing after the cursor that it printed.")
@click.option("--tenant", help="List only the namespaces of this tenant.")
@json_option
@click.pass_obj
def ls(
    connection: tuple[Endpoint, float], name: str, limit: int, cursor: str, tenant: str | None, as_json: bool
) -> int:
    """List namespaces, or chunks of a namespace.

    With NAMESPACE, lists its chunks; with KEY, only chunks whose key begins with it. Both may be shortened while they
    are unique. Chunks are listed in no particular order. A chunk that exists for the whole listing appears exactly
    once.
    """
    if name and tenant is not None:
        raise click.BadParameter("a namespace has one tenant; leave out the name or the option", param_hint="--tenant")
    with connect(*connection) as operator, _cursor_errors():
        if name:
            _chunks(operator, name, limit, cursor, as_json=as_json)
        else:
            _namespaces(operator, limit, cursor, tenant, as_json=as_json)
    return 0


@contextmanager
def _cursor_errors() -> Iterator[None]:
    """Name the option in an error about the page token."""
    try:
        yield
    except InvalidArgument as error:
        if "page_token" not in error.message:
            raise
        raise click.BadParameter(
            "this run of the daemon did not print this cursor; start the listing again without --cursor",
            param_hint="--cursor",
        ) from error


def _namespaces(operator: Operator, limit: int, cursor: str, tenant: str | None, *, as_json: bool) -> None:
    page = operator.namespaces("", limit, cursor, tenant)
    if as_json:
        echo_record({"namespaces": page.namespaces, "next_cursor": page.next_page_token})
    else:
        print_namespaces(page, Console())


def _chunks(operator: Operator, name: str, limit: int, cursor: str, *, as_json: bool) -> None:
    namespace, _, prefix = name.partition("/")
    namespace_id = operator.find_namespace(namespace)
    page = operator.chunks(namespace_id, prefix.lower(), limit, cursor)
    if as_json:
        echo_record(chunk_page_record(namespace_id, page))
    else:
        print_chunks(namespace_id, page, Console())
