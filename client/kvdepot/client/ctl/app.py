"""kvdepotctl: what an operator asks a running daemon.

Exit codes: 0 ok, 1 the daemon is not ready, has nothing by that name or refuses it, a check of `doctor` fails, `verify`
finds damage, `export` or `import` not all, `bench` a tier that is slower than computing,
2 wrong usage, 3 no daemon answers, 4 its socket is not for this user.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

import click
import grpc
from kvdepot.client.ctl.commands.bench import bench
from kvdepot.client.ctl.commands.completion import completion
from kvdepot.client.ctl.commands.configuration import config, reload
from kvdepot.client.ctl.commands.describe import describe
from kvdepot.client.ctl.commands.doctor import doctor
from kvdepot.client.ctl.commands.drain import drain, resume
from kvdepot.client.ctl.commands.epoch import epoch
from kvdepot.client.ctl.commands.evict import evict
from kvdepot.client.ctl.commands.explain import explain
from kvdepot.client.ctl.commands.exports import export, import_
from kvdepot.client.ctl.commands.ls import ls
from kvdepot.client.ctl.commands.pins import pin, unpin
from kvdepot.client.ctl.commands.prefetch import prefetch
from kvdepot.client.ctl.commands.quotas import quota
from kvdepot.client.ctl.commands.status import status
from kvdepot.client.ctl.commands.switches import loads, stores
from kvdepot.client.ctl.commands.top import top
from kvdepot.client.ctl.commands.trace import trace
from kvdepot.client.ctl.commands.verify import verify
from kvdepot.client.endpoint import Endpoint, EndpointError
from kvdepot.core import runtime
from kvdepot.core.errors import (
    ConfigError,
    InvalidArgument,
    KvDepotError,
    LimitExceeded,
    LoadsOff,
    NoRoom,
    NotFound,
    StaleEpoch,
    StoresOff,
)

EXIT_REFUSED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_FORBIDDEN = 1, 2, 3, 4
EXIT_PIPE = 141
"""As a shell says of what SIGPIPE ended."""
_WIDE = 250
"""Columns of a table that no terminal shows: whole ids, for grep and scripts."""


def default_endpoint() -> str:
    """The socket of this user's `kvdepotd serve` without a file, if there is one, else the packaged daemon's.

    Where somebody else could have put it there it is nobody's: the daemon makes none in such a directory either.
    """
    with suppress(OSError):  # among them: no temporary directory
        own = Path(runtime.runtime_directory(os.environ, tempfile.gettempdir, os.geteuid()))
        found = own.lstat()
        if runtime.only_writer(os.geteuid(), found.st_mode, found.st_uid) and (own / "kvdepot.sock").exists():
            return f"unix://{own / 'kvdepot.sock'}"
    return "unix:///run/kvdepot/kvdepot.sock"


class EndpointType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    name = "url"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Endpoint:
        if isinstance(value, Endpoint):
            return value
        try:
            return Endpoint.parse(str(value))
        except EndpointError as error:
            self.fail(str(error), param, ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=(__doc__ or "").split("\n\n")[1])
@click.option(
    "--endpoint", type=EndpointType(), envvar="KVDEPOT_ENDPOINT", default=default_endpoint, show_envvar=True,
    help="The daemon's socket, as unix:///run/kvdepot/kvdepot.sock.",
)  # fmt: skip
@click.version_option(package_name="kvdepot", message="kvdepotctl %(version)s")
@click.option(
    "--timeout", type=click.FloatRange(min=0.01), default=5.0, show_default=True, help="Seconds to wait for an answer."
)
@click.pass_context
def cli(context: click.Context, endpoint: Endpoint, timeout: float) -> None:
    """Look into a running kvdepotd, and steer it."""
    context.obj = (endpoint, timeout)


for command in (
    status, top, ls, describe, explain, doctor, loads, stores, drain, resume, pin, unpin, quota, evict, epoch, verify,
    prefetch, export, import_, trace, bench, reload, config, completion,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """The `kvdepotctl` command."""
    _prepare_output()
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", str(_WIDE))
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except SystemExit:  # click's and rich's, with 1: nobody reads what is printed, which says nothing of the daemon
        _drop_output()
        sys.exit(EXIT_PIPE)
    except grpc.RpcError as error:
        if "Permission denied" in (error.details() or ""):
            click.echo(
                "kvdepotctl: the daemon's socket is not for this user; [daemon] mode and group say for whom", err=True
            )
            sys.exit(EXIT_FORBIDDEN)
        click.echo(f"kvdepotctl: no answer: {error.code().name}: {error.details()}", err=True)
        click.echo("Is kvdepotd running, and does --endpoint name its socket?", err=True)
        sys.exit(EXIT_UNREACHABLE)
    except KvDepotError as error:
        click.echo(f"kvdepotctl: {error}", err=True)
        sys.exit(_exit_code(error))
    except OSError as error:  # what is printed cannot be written; files that verbs write are told of by them
        _drop_output()
        click.echo(f"kvdepotctl: {error.strerror or error}", err=True)
        sys.exit(EXIT_REFUSED)
    sys.exit(code if isinstance(code, int) else 0)


def _prepare_output() -> None:
    """Names may have any byte, and whoever starts this may have closed what is printed to."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What is left in the buffer: the interpreter would try to write it at its end, and complain."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _exit_code(error: KvDepotError) -> int:
    if isinstance(error, NotFound | ConfigError | LimitExceeded | LoadsOff | StoresOff | StaleEpoch | NoRoom):
        return EXIT_REFUSED
    return EXIT_USAGE if isinstance(error, InvalidArgument) else EXIT_UNREACHABLE


if __name__ == "__main__":
    main()
