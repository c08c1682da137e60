"""Options that several verbs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from kvdepot.client.ctl.completing import Key, Name
from kvdepot.client.ctl.texts import say
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.units import parse_rate_bytes_per_second

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator

FC = TypeVar("FC", bound=Callable[..., Any])


class RateType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Bytes a second, above 0."""

    name = "rate"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            rate = parse_rate_bytes_per_second(str(value))
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)
        return rate or self.fail("expected a rate above 0, for example 256MiB/s", param, ctx)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: sizes in bytes, times in seconds, ids in hexadecimal."
)
chunk_option = click.option(
    "--chunk", metavar="KEY", type=Key(), default="", help="One chunk of the namespace; its key may be shortened."
)


def namespace_option(*, required: bool) -> Callable[[FC], FC]:
    default: dict[str, Any] = {} if required else {"default": ""}  # click 8.5 takes a None for a value
    return click.option(
        "--namespace", metavar="NAMESPACE", type=Name(chunks=False), required=required,
        help="Id of the namespace; it may be shortened.", **default,
    )  # fmt: skip


def place(operator: Operator, namespace: str, chunk: str) -> tuple[bytes, bytes]:
    """(namespace id, key), empty where they are not named. Raises NotFound, or InvalidArgument."""
    if chunk and not namespace:
        raise click.UsageError("--chunk needs --namespace")
    namespace_id = operator.find_namespace(namespace) if namespace else b""
    return namespace_id, operator.find_chunk(namespace_id, chunk) if chunk else b""


def confirm(question: str) -> None:
    """Ask. Raise click.Abort, and print what that means, if the answer is not yes."""
    try:
        click.confirm(question, abort=True)
    except click.Abort:
        say("cancelled: nothing was changed", err=True)
        raise
