"""`kvdepotd`: the daemon's command line.

`kvdepotd serve [CONFIG]` runs it; `kvdepotd check-config CONFIG` only says whether the file would do;
`kvdepotd fsck` and `kvdepotd inspect` look at a disk tier's directory while no daemon runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from kvdepot.core.errors import ConfigError, KvDepotError
from kvdepot.server import config_environment as environment
from kvdepot.server.capacity_check import capacity_warnings
from kvdepot.server.config import DISK, Config, embedded, load
from kvdepot.server.config_facts import facts
from kvdepot.server.logs import UnhandledErrors, make_log
from kvdepot.server.offline import verbs as offline
from kvdepot.server.processes import read_boot_id
from kvdepot.server.service_notify import ServiceNotifier, take_kept
from kvdepot.server.start_checks import host_problems

EXIT_PIPE = 141
"""As a shell says of what SIGPIPE ended."""
_STDERR = 2
_UMASK = 0o077
"""What the daemon makes is its user's alone; sockets until their mode is set."""
_SERVE_EPILOG = """\
Without CONFIG: a quarter of what memory, cgroup and /dev/shm have, at most 4 GiB, sockets under
$XDG_RUNTIME_DIR/kvdepot (or a directory of this user in the temporary directory), metrics on a free port,
and a disk tier in $XDG_CACHE_HOME/kvdepot (or ~/.cache/kvdepot): a quarter of what is free there, at most 8 GiB;
the log says where. Variables of the environment, KVDEPOT_<TABLE>__<KEY>, override single keys of either, and options
override these (docs/configuration.md).

SIGHUP reads CONFIG again, as `kvdepotctl reload` does: all of it that can change live, or nothing.

SIGTERM and SIGINT stop in order: no more grants, outstanding checksums are finished, exit code 0. The arena
file stays, with its memory, so that the next daemon on it serves the same objects. To give the memory
back, remove that file while no daemon runs; its name is in the log's last line.
"""


def prepare() -> None:
    """Import what serves. Raises ModuleNotFoundError without the extra `server`, whatever is to be done."""
    _open_standard_descriptors()  # else an import may open something that has the number of one
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read by the first import: what it says each second, the log says
    import kvdepot.server.node  # noqa: F401


def main(arguments: Sequence[str] | None = None) -> int:
    _open_standard_descriptors()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may have any byte
    try:
        try:
            options = _parser().parse_args(arguments)
            answer = _run(options)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:  # what a verb says could not be written
        _drop_output()
        if error.errno != errno.EPIPE:
            print(f"kvdepotd: cannot write: {error.strerror}", file=sys.stderr)  # noqa: T201
            return 1
        return EXIT_PIPE
    if isinstance(answer, int):
        return answer
    os.umask(_UMASK)
    prepare()
    reread = None if options.config is None else partial(_config, options)
    return asyncio.run(_serve(answer, reread))


def _run(options: argparse.Namespace) -> int | Config:
    """The exit code, or what is to be served."""
    if options.verb in offline.VERBS:
        return offline.run(options)
    try:
        config = _config(options)
        if options.verb == "check-config":
            return _check_config(config, as_json=options.json, any_host=options.any_host)
    except (KvDepotError, OSError) as error:  # OSError: what the configuration is made from cannot be asked
        if isinstance(error, BrokenPipeError):
            raise
        print(f"kvdepotd: {error}", file=sys.stderr)  # noqa: T201 - no log is configured yet
        return 1
    return config


def _check_config(config: Config, *, as_json: bool, any_host: bool) -> int:
    """Raises ConfigError, unless a program asks, which gets the reason with the rest; or it is for another host."""
    problems = list(host_problems(config, read_boot_id()))
    if as_json:
        print(json.dumps(facts(config, *problems[:1]), indent=2))  # noqa: T201
    if problems and not any_host:
        raise problems[0]
    if not as_json:
        print(described(config, problems))  # noqa: T201
    return 0


def _open_standard_descriptors() -> None:
    """So that no file gets the number of one that was closed: what is written for people would go into it."""
    with contextlib.suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
            os.set_inheritable(number, True)
        os.close(number)


def _drop_output() -> None:
    """What is left in the buffer goes nowhere: the interpreter would try again at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def described(config: Config, problems: Sequence[KvDepotError] = ()) -> str:
    """What `check-config` says: the sizes that follow from it, and every key that is given, with its source.

    `problems`: what this host refuses, where another one may not.
    """
    lines = [f"{config.file}: ok, capacity {config.capacity_bytes} bytes, arena {config.arena_path}"]
    lines += [f"warning: {text}" for text in capacity_warnings(config)]
    lines += [f"{key} = {json.dumps(value)} ({source})" for key, (value, source) in config.sources.items()]
    if problems:
        lines += ["", f"about this host ({os.uname().nodename}), where the daemon would not start:"]
        lines += [f"warning: {error}" for error in problems]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvdepotd", description="KV-cache storage daemon, one per node")
    parser.add_argument("--version", action="version", version=f"kvdepotd {version('kvdepot')}")
    verbs = parser.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser(
        "serve", help="run the daemon", epilog=_SERVE_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    serve.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="TOML file; without it: embedded default")
    serve.add_argument("--socket", type=Path, help="path of the gRPC socket; instead of [daemon].listen")
    serve.add_argument(
        "--metrics", metavar="HOST:PORT", help="instead of [daemon].metrics; port 0: a free one, '': off"
    )
    serve.add_argument("--ram", metavar="SIZE", help='instead of [ram].capacity, for example "512MiB"')
    serve.add_argument("--arena-dir", type=Path, help="instead of [ram].path")
    serve.add_argument("--disk", metavar="DIR", help="a disk tier in DIR instead of [[tier]]; '': none")
    serve.add_argument("--disk-capacity", metavar="SIZE", help="of --disk; without it a quarter of what is free there")
    serve.add_argument("--log-level", help="instead of [log].level")
    serve.add_argument("--log-format", help="instead of [log].format")
    check = verbs.add_parser(
        "check-config", help="say whether a configuration file is good, and what comes from where; exit code 1 if not"
    )
    check.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="without it: what serve uses then")
    check.add_argument("--json", action="store_true", help="the sizes, paths and sockets that follow, as JSON")
    check.add_argument(
        "--any-host", action="store_true", help="the file is for another host: what this host refuses is a warning"
    )
    offline.add_verbs(verbs)
    return parser


def _config(options: argparse.Namespace) -> Config:
    variables = environment.variables(os.environ)
    if options.verb == "check-config":
        return embedded(variables=variables) if options.config is None else load(options.config, variables=variables)
    overrides: dict[str, dict[str, Any]] = {}
    for table, key, value in (
        ("daemon", "listen", None if options.socket is None else [f"unix://{options.socket.absolute()}"]),
        ("daemon", "metrics", options.metrics),
        ("ram", "capacity", options.ram),
        ("ram", "path", None if options.arena_dir is None else str(options.arena_dir.absolute())),
        (DISK, "path", options.disk and str(Path(options.disk).absolute())),
        (DISK, "capacity", options.disk_capacity),
        ("log", "level", options.log_level),
        ("log", "format", options.log_format),
    ):
        if value is not None:
            overrides.setdefault(table, {})[key] = value
    if options.disk_capacity is not None and not options.disk:
        raise ConfigError("command line", "--disk-capacity", "is of --disk, which is not given")
    if options.config is None:
        return embedded(overrides, variables)
    return load(options.config, overrides, variables)


async def _serve(config: Config, reread: Callable[[], Config] | None) -> int:
    from kvdepot.server.node import ARENA_NAME, Node  # with gRPC, which the other verbs do not need

    log = make_log(config.tables.log.level, config.tables.log.format)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(UnhandledErrors(log, loop.time))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, log.warning, "SIGHUP: nothing to reload yet")
    log.info("kvdepotd %s, pid %d, configuration: %s", version("kvdepot"), os.getpid(), config.file)
    if config.note:
        log.warning("%s", config.note)
    notify = ServiceNotifier(os.environ, pid=os.getpid(), clock=time.monotonic)
    kept = take_kept(os.environ, pid=os.getpid(), name=ARENA_NAME)
    try:
        node = Node(config, log=log, loop=loop, notify=notify, kept_arenas=kept, reread=reread)
    except (KvDepotError, OSError) as error:
        log.error("cannot start: %s", error)
        return 1
    try:
        await node.start()
    except (KvDepotError, OSError) as error:
        log.error("cannot start: %s", error)
        await node.stop()
        return 1
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        reloads.add(task := node.begin_reload())
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    await stop.wait()
    await node.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
