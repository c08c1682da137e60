"""kvdepotctl: inspect and control a running daemon."""

from __future__ import annotations

import errno
import os
import re
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

import click
import grpc
from kvdepot.client.ctl.commands.options import SecondsType
from kvdepot.client.ctl.remote import EXIT_UNREACHABLE, LOCAL_VERBS, TCP, Address, Remote, chosen
from kvdepot.client.ctl.sections import SectionedGroup
from kvdepot.client.ctl.texts import say
from kvdepot.client.endpoint import ADMIN_SUFFIX, ENDPOINT_VARIABLE, Endpoint, EndpointError, default_endpoint
from kvdepot.core.errors import (
    ConfigError,
    InvalidArgument,
    KvDepotError,
    LimitExceeded,
    LoadsOff,
    NoRoom,
    NotFound,
    PermissionDenied,
    StaleEpoch,
    StoresOff,
)

EXIT_CODES = (
    "Exit codes: 0 ok; 1 the daemon refuses, or the result is negative (see the help of each verb); 2 wrong usage; "
    "3 the daemon does not answer; 4 this user is no operator; 141 nobody reads the output."
)
EXIT_REFUSED, EXIT_USAGE, EXIT_FORBIDDEN = 1, 2, 4
EXIT_PIPE = 141
"""As a shell says of what SIGPIPE ended."""
_WIDE = 250
"""Columns of a table that no terminal shows: whole ids, for grep and scripts."""


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class EndpointType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """An option with the daemon's endpoint."""

    name = "url"

    def __init__(self, *, tcp: bool = False) -> None:
        self._tcp = tcp

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Endpoint | Address:
        if isinstance(value, Endpoint | Address):
            return value
        try:
            return Address.parse(str(value)) if self._tcp and str(value).startswith(TCP) else Endpoint.parse(str(value))
        except EndpointError as error:
            self.fail(str(error), param, ctx)


@click.group(cls=SectionedGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.option(
    "--endpoint", type=EndpointType(tcp=True), envvar=ENDPOINT_VARIABLE, default=default_endpoint, show_envvar=True,
    help="URL of the daemon's socket: unix:///run/kvdepot/kvdepot.sock, or tcp://host:port of another host.",
)  # fmt: skip
@click.option(
    "--admin", type=EndpointType(), envvar="KVDEPOT_ADMIN", show_envvar=True,
    help="URL of the operators' socket. Default: that of --endpoint, with the suffix .admin.",
)  # fmt: skip
@click.option(
    "--tls-ca", type=_FILE, envvar="KVDEPOT_TLS_CA", show_envvar=True, help="With tcp://: the CA of the daemon, PEM."
)
@click.option(
    "--tls-cert", type=_FILE, envvar="KVDEPOT_TLS_CERT", show_envvar=True, help="With tcp://: your certificate, PEM."
)
@click.option("--tls-key", type=_FILE, envvar="KVDEPOT_TLS_KEY", show_envvar=True, help="With tcp://: its key, PEM.")
@click.option(
    "--tls-server-name", envvar="KVDEPOT_TLS_SERVER_NAME", show_envvar=True, default="",
    help="With tcp://: the name in the daemon's certificate. Default: the host.",
)  # fmt: skip
@click.version_option(package_name="kvdepot", message="kvdepotctl %(version)s")
@click.option(
    "--timeout", type=SecondsType(min=0.01), default=5.0, show_default=True, help="Seconds to wait for an answer."
)
@click.pass_context
def cli(context: click.Context, /, timeout: float, **_: object) -> None:
    """Inspect and control a running kvdepotd."""
    daemon = chosen(context.params)
    if isinstance(daemon, Remote) and context.invoked_subcommand in LOCAL_VERBS:
        raise click.UsageError(f"{context.invoked_subcommand} runs on the daemon's own host: use a unix:// endpoint")
    context.obj = (daemon, timeout)


cli.add_section(
    "Inspect",
    {
        "status": "status", "health": "status", "top": "top", "ls": "ls", "describe": "describe", "peers": "peers",
        "config": "configuration", "completion": "completion", "assets": "assets",
    },
)  # fmt: skip
cli.add_section(
    "Control",
    {
        "loads": "switches", "stores": "switches", "pin": "pins", "unpin": "pins", "evict": "evict", "epoch": "epoch",
        "quota": "quotas", "drain": "drain", "resume": "drain", "reload": "configuration",
    },
)  # fmt: skip
cli.add_section("Move", {"prefetch": "prefetch", "export": "exports", "import": "exports"})
cli.add_section(
    "Diagnose",
    {
        "doctor": "doctor", "explain": "explain", "requests": "explain", "verify": "verify", "bench": "bench",
        "size": "size", "what-if": "what_if", "trace": "trace",
    },
)  # fmt: skip


def main() -> None:
    """Run the `kvdepotctl` command."""
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
    except SystemExit as ended:  # click's and rich's, with 1: nobody reads what is printed, of which no daemon knows
        if not ended.code:  # of click, after a completion
            raise
        _drop_output()
        sys.exit(EXIT_PIPE)
    except grpc.RpcError as error:
        if "Permission denied" in (error.details() or ""):
            say("kvdepotctl: this user may not open the operators' socket; run kvdepotctl as root or as the", err=True)
            say("daemon's user, or see [daemon] admin_group and [operators] in docs/operations.md", err=True)
            sys.exit(EXIT_FORBIDDEN)
        say(f"kvdepotctl: {_why_no_answer(error)}", err=True)
        sys.exit(EXIT_UNREACHABLE)
    except KvDepotError as error:
        say(f"kvdepotctl: {error}", err=True)
        sys.exit(_exit_code(error))
    except OSError as error:  # what is printed cannot be written; files that verbs write are told of by them
        _drop_output()
        say(f"kvdepotctl: {error.strerror or error}", err=True)
        sys.exit(EXIT_REFUSED)
    sys.exit(code if isinstance(code, int) else 0)


def _why_no_answer(error: grpc.RpcError) -> str:
    found = _NOT_CONNECTED.search(error.details() or "")
    if found is None:
        return f"no answer: {error.code().name}: {error.details()}"
    path, why = found["path"].removesuffix(ADMIN_SUFFIX), found["why"]
    if path != found["path"] and why == os.strerror(errno.ENOENT) and Path(path).exists():
        return f"the daemon at unix://{path} has its operators' socket elsewhere ([daemon] admin): name it with --admin"
    return f"no daemon at unix://{path} ({why}). Start it: kvdepotd serve. Or name its socket with --endpoint"


_NOT_CONNECTED = re.compile(r"unix:(?P<path>/.*): connect failed: .* error: (?P<why>.+)$")
"""gRPC's text. Another text is shown as it is."""


def _prepare_output() -> None:
    """Let names have any byte, and open closed streams: the caller may have closed them."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Drop what is left in the buffer: the interpreter would try to write it at its end, and complain."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _exit_code(error: KvDepotError) -> int:
    if isinstance(error, PermissionDenied):
        return EXIT_FORBIDDEN
    if isinstance(error, NotFound | ConfigError | LimitExceeded | LoadsOff | StoresOff | StaleEpoch | NoRoom):
        return EXIT_REFUSED
    return EXIT_USAGE if isinstance(error, InvalidArgument) else EXIT_UNREACHABLE


if __name__ == "__main__":
    main()
