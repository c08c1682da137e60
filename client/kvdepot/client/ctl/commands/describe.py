"""`kvdepotctl describe`: show one namespace or chunk, or how two namespaces differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.completing import Name
from kvdepot.client.ctl.listings import (
    chunk_description_record,
    namespace_description_record,
    print_chunk_description,
    print_namespace_description,
)
from kvdepot.client.ctl.texts import say
from kvdepot.core.errors import NotFound
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint


@click.command()
@click.argument("name", metavar="NAMESPACE[/KEY]", type=Name(chunks=True))
@click.option(
    "--differs", metavar="OTHER", type=Name(chunks=False), help="Show only the fields in which OTHER differs."
)
@json_option
@click.pass_obj
def describe(connection: tuple[Endpoint, float], name: str, differs: str | None, as_json: bool) -> int:
    """Describe a namespace or a chunk.

    Ids and keys may be shortened while they are unique.
    """
    namespace, slash, key = name.partition("/")
    if differs is not None and slash:
        raise click.UsageError("--differs compares namespaces, not chunks")
    with connect(*connection) as operator:
        namespace_id = operator.find_namespace(namespace)
        if differs is not None:
            _differences(operator, namespace_id, operator.find_namespace(differs), as_json=as_json)
        elif slash:
            _chunk(operator, namespace_id, operator.find_chunk(namespace_id, key), as_json=as_json)
        else:
            _namespace(operator, namespace_id, as_json=as_json)
    return 0


def _namespace(operator: Operator, namespace_id: bytes, *, as_json: bool) -> None:
    found = operator.describe_namespace(namespace_id)
    pins = [one for one in operator.status().pins if one.namespace_id == namespace_id]
    if as_json:
        echo_record(namespace_description_record(found, pins))
    else:
        print_namespace_description(found, pins, Console())


def _chunk(operator: Operator, namespace_id: bytes, key: bytes, *, as_json: bool) -> None:
    found = operator.describe_chunk(namespace_id, key)
    if as_json:
        echo_record(chunk_description_record(namespace_id, found))
    else:
        print_chunk_description(namespace_id, found, Console())


def _differences(operator: Operator, one: bytes, other: bytes, *, as_json: bool) -> None:
    ours, theirs = _fields(operator, one), _fields(operator, other)
    paths = sorted(path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path))
    if as_json:
        differences = [{"field": path, "first": ours.get(path), "second": theirs.get(path)} for path in paths]
        record = {"first": one.hex(), "second": other.hex(), "differences": differences}
        echo_record(record)
        return
    for path in paths:
        say(f"{path}: {ours.get(path, '(absent)')} != {theirs.get(path, '(absent)')}")
    if not paths:
        say("they are the same namespace")


def _fields(operator: Operator, namespace_id: bytes) -> dict[str, str]:
    spec = operator.describe_namespace(namespace_id).spec
    if spec is None:
        raise NotFound(
            f"the fields of namespace {namespace_id.hex()} are not known",
            advice="start an engine that uses it: the daemon learns the fields when an engine registers",
        )
    return spec.fields_by_path()
