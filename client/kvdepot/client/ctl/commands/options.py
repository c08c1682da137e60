"""Options that several verbs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from kvdepot.client.ctl.completing import Key, Name

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator

FC = TypeVar("FC", bound=Callable[..., Any])

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: sizes in bytes, times in seconds, ids in hexadecimal."
)
chunk_option = click.option(
    "--chunk", metavar="KEY", type=Key(), default="", help="One chunk of the namespace; its key may be cut short."
)


def namespace_option(*, required: bool) -> Callable[[FC], FC]:
    return click.option(
        "--namespace", metavar="NAMESPACE", type=Name(chunks=False), default=None if required else "",
        required=required, help="Its id, which may be cut short.",
    )  # fmt: skip


def place(operator: Operator, namespace: str, chunk: str) -> tuple[bytes, bytes]:
    """(namespace id, key), empty where they are not named. Raises NotFound, or InvalidArgument."""
    if chunk and not namespace:
        raise click.UsageError("--chunk is of a namespace: give --namespace too")
    namespace_id = operator.find_namespace(namespace) if namespace else b""
    return namespace_id, operator.find_chunk(namespace_id, chunk) if chunk else b""
