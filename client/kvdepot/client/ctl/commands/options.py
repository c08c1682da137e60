"""Options that several verbs have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click
from click.core import ParameterSource
from kvdepot.client.ctl.as_json import choose_yaml
from kvdepot.client.ctl.completing import Name
from kvdepot.client.ctl.texts import say
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.units import parse_rate_bytes_per_second

if TYPE_CHECKING:
    from kvdepot.client.ctl.calls import Operator

SECONDS_MAX: Final = 366 * 86_400.0
STREAM: Final = "-"
"""A file's name that stands for stdin or stdout."""
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


class FiniteType(click.FloatRange):
    """A number. Click takes `nan` for one of any range, and `inf` for one without a maximum."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        return number if isfinite(number) else self.fail(f"{value} is not a finite number", param, ctx)


class SecondsType(click.FloatRange):
    """A number of seconds that clocks and gRPC can represent. Click takes `nan` for a number of any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        return seconds if seconds <= SECONDS_MAX else self.fail(f"{value} is not at most {SECONDS_MAX:.0f}", param, ctx)


TABLE: Final = "table"
"""What people read, which is not always a table."""
_JSON, _YAML = "json", "yaml"


def output_option(*tables: str) -> Callable[[FC], FC]:
    """Give a command the option `-o`, and `--json`. `tables`: further forms for people, which it takes as `output`.

    The command takes `as_json`: whether to print for programs. `as_json.echo_record` knows in which format.
    """

    def decorate(command: FC) -> FC:
        @click.option(
            "-o", "--output", type=click.Choice([TABLE, *tables, _JSON, _YAML]), default=TABLE,
            help="Form of the output. For programs: sizes in bytes, times in seconds, ids in hexadecimal.",
        )  # fmt: skip
        @click.option("--json", "json", is_flag=True, help="The same as -o json.")
        @wraps(command)
        def chosen(*arguments: Any, output: str, json: bool, **options: Any) -> Any:
            if output == _YAML and not json:
                choose_yaml()
            if tables:
                options["output"] = output
            return command(*arguments, as_json=json or output in (_JSON, _YAML), **options)

        return cast(FC, chosen)

    return decorate


json_option = output_option()


def not_empty(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Refuse an empty name: a script whose variable is not set does not mean everything."""
    if not value and ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
        raise click.BadParameter("is empty; leave it out, or name something", ctx, param)
    return value


def name_argument(*, required: bool = True, chunks: bool = True) -> Callable[[FC], FC]:
    """Give a command the argument `name`: NAMESPACE, or with `chunks` NAMESPACE/KEY. `place` says what it names."""
    metavar = "NAMESPACE[/KEY]" if chunks else "NAMESPACE"
    default: dict[str, Any] = {} if required else {"default": ""}  # click 8.5 takes a None for a value
    return click.argument(
        "name",
        metavar=metavar if required else f"[{metavar}]",
        type=Name(chunks=chunks),
        callback=not_empty,
        **default,
    )


def place(operator: Operator, name: str) -> tuple[bytes, bytes]:
    """(namespace id, key), empty where they are not named. Raises NotFound, or InvalidArgument."""
    namespace, prefix = parts(name)
    namespace_id = operator.find_namespace(namespace) if namespace else b""
    return namespace_id, operator.find_chunk(namespace_id, prefix) if prefix else b""


def parts(name: str) -> tuple[str, str]:
    """Return NAMESPACE and KEY of a name, empty where there are none. Raise UsageError for an empty side of a slash.

    A script whose variable for KEY is not set does not mean the whole namespace.
    """
    namespace, slash, prefix = name.partition("/")
    if slash and not namespace:
        raise click.UsageError(f"{name!r} names no namespace")
    if slash and not prefix:
        raise click.UsageError(f"{name!r} names no chunk; leave out the / to name the whole namespace")
    return namespace, prefix


@contextmanager
def file_errors(file: str) -> Iterator[None]:
    """Turn errors of the file into one line: a full disk, or a pipe that nobody reads."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror or error}") from error


def confirm(question: str) -> None:
    """Ask. Raise click.Abort, and print what that means, if the answer is not yes."""
    try:
        click.confirm(question, abort=True)
    except click.Abort:
        say("cancelled: nothing was changed", err=True)
        raise
