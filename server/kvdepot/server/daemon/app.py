"""`kvdepotd`: the daemon's command line.

`serve` runs the daemon, and `check-config` checks a configuration without running it. `fsck`, `inspect` and `replay`
work without a daemon (`server/offline`).
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
from typing import Any, NoReturn

from kvdepot.core.errors import ConfigError, KvDepotError
from kvdepot.core.secrets import mask_secrets
from kvdepot.core.units import size_text
from kvdepot.server.arena.arena_file import KeptFiles
from kvdepot.server.arena.arena_request import NOTHING_KNOWN, Outlook
from kvdepot.server.arena.holding import become_holder
from kvdepot.server.config import environment
from kvdepot.server.config.capacity_check import capacity_warnings
from kvdepot.server.config.config import DISK, Config, embedded, load
from kvdepot.server.config.facts import facts
from kvdepot.server.config.key_files import with_keys
from kvdepot.server.daemon.start_checks import arena_outlook, check_operators, host_problems
from kvdepot.server.offline import verbs as offline
from kvdepot.server.platform.logs import UnhandledErrors, make_log
from kvdepot.server.platform.processes import read_boot_id
from kvdepot.server.platform.service_notify import ServiceNotifier, take_kept

EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: no restart helps while the configuration is as it is."""
EXIT_PIPE = 141
"""As a shell says of what SIGPIPE ended."""
_STDERR = 2
_UMASK = 0o077
"""What the daemon makes is its user's alone; sockets until their mode is set."""
_SERVE_EPILOG = """\
Without CONFIG the daemon uses these defaults, and its log names the paths:
  RAM      a quarter of what memory, cgroup and /dev/shm have, at most 4 GiB
  sockets  in $XDG_RUNTIME_DIR/kvdepot, or in a directory of this user in the temporary directory
  metrics  on a free port
  disk     in $XDG_CACHE_HOME/kvdepot, or ~/.cache/kvdepot: a quarter of the free space, at most 8 GiB

Environment variables KVDEPOT_<TABLE>__<KEY> override single keys. Options override both (docs/configuration.md).

SIGHUP reloads CONFIG, as `kvdepotctl reload` does: it applies all changes or none.

SIGTERM and SIGINT stop the daemon with exit code 0. It grants no more leases, and takes the pending checksums. The
arena and its memory stay, so that the next daemon serves the same objects. A holder keeps it: a small process that the
daemon has started, the service manager, or `kvdepotd hold`. To free the memory, delete the arena while no daemon runs.
The last line of the log names the file. With [ram] sealed = false, delete ARENA.data, too.

Exit code 78: the configuration is wrong, and a restart does not help. 1: the daemon cannot start for another reason.
"""
_HOLD_EPILOG = """\
A daemon that ends leaves its arena to the holder, and the next daemon gets it from there. Use this verb where a daemon
cannot leave a process: in a container, or under a service manager that ends all processes of a service. Run it
as the daemon's user, with its configuration, --socket and --arena-dir, before the daemon, and for longer. It takes
10 MiB. It ends with exit code 1 when its directory was emptied: start it again.
"""


def prepare() -> None:
    """Import what serves. Raises ModuleNotFoundError without the extra `server`, whatever is to be done."""
    _open_standard_descriptors()  # else an import may open something that has the number of one
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read by the first import: what it says each second, the log says
    import kvdepot.server.daemon.node  # noqa: F401


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
    return asyncio.run(_serve(answer, None if options.config is None else partial(_reread, options, answer)))


def _run(options: argparse.Namespace) -> int | Config:
    """Return the exit code of a verb, or the configuration to serve."""
    if options.verb in offline.VERBS:
        return offline.run(options)
    try:
        config = _config(options)
        if options.verb == "hold":
            return _hold(config)
        if options.verb == "check-config":
            return _check_config(config, as_json=options.json, any_host=options.any_host)
        config = with_keys(config)
    except (KvDepotError, OSError) as error:  # OSError: what the configuration is made from cannot be asked
        if isinstance(error, BrokenPipeError):
            raise
        return _refused(error)
    return config


def _refused(error: KvDepotError | OSError) -> int:
    """Print why the daemon does not start, all of it, and return the exit code. No log is configured yet."""
    errors = error.all if isinstance(error, ConfigError) else (error,)
    for one in errors:
        print(f"kvdepotd: {one}", file=sys.stderr)  # noqa: T201
    may_end = any(not isinstance(one, ConfigError) or one.of_host for one in errors)
    return 1 if may_end else EXIT_CONFIG


def _check_config(config: Config, *, as_json: bool, any_host: bool) -> int:
    """Print what follows from a configuration, and return 0; 1 if this host refuses it, with all reasons.

    With `as_json` the first reason is printed with the rest. With `any_host` the reasons are warnings.
    """
    problems = list(host_problems(config))
    try:
        outlook = arena_outlook(config, read_boot_id())
    except KvDepotError as error:
        outlook = NOTHING_KNOWN
        problems.append(error)
    if as_json:
        print(json.dumps(facts(config, *problems[:1]), indent=2))  # noqa: T201
    if problems and not any_host:
        for problem in problems:
            _refused(problem)
        return 1
    if not as_json:
        print(described(config, problems, outlook))  # noqa: T201
    return 0


def _hold(config: Config) -> NoReturn:
    """Hold the arena until a signal ends this process."""
    if not config.tables.ram.sealed:
        raise ConfigError(config.file, "ram.sealed", "is false, so that the arena is a file, which nobody has to hold")
    os.umask(_UMASK)
    arena_path = config.placed().arena_path
    become_holder(arena_path, lambda: print(f"holding {arena_path} for its daemons", flush=True))  # noqa: T201


def _open_standard_descriptors() -> None:
    """Open closed standard descriptors, so that no file gets their numbers: log lines would go into it."""
    with contextlib.suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
            os.set_inheritable(number, True)
        os.close(number)


def _drop_output() -> None:
    """Drop the buffered output, which the interpreter would try to write at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def described(config: Config, problems: Sequence[KvDepotError] = (), outlook: Outlook = NOTHING_KNOWN) -> str:
    """Return what `check-config` prints: the sizes that follow, and each given key with its source.

    `problems` are refusals of this host alone. `outlook`: of a start on this host.
    """
    lines = [f"{config.file}: ok, capacity {size_text(config.capacity_bytes)}, arena {config.arena_path}"]
    if outlook.loss:
        lines.append(f"warning: RAM will begin empty, because the arena is replaced: {outlook.loss}")
    if outlook.note:
        lines.append(f"warning: the next start keeps RAM, but {outlook.note}")
    lines += [f"warning: {text}" for text in capacity_warnings(config)]
    for key, (value, source) in config.sources.items():
        lines.append(f"{key} = {json.dumps(mask_secrets(value) if isinstance(value, str) else value)} ({source})")
    if problems:
        lines += ["", f"about this host ({os.uname().nodename}), on which the daemon would not start:"]
        lines += [f"warning: {error}" for error in problems]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvdepotd", description="Run, check and repair the KV-cache storage daemon of a node."
    )
    parser.add_argument("--version", action="version", version=f"kvdepotd {version('kvdepot')}")
    verbs = parser.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser(
        "serve", help="run the daemon", epilog=_SERVE_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    serve.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="TOML file; without it: the defaults below"
    )
    serve.add_argument("--metrics", metavar="HOST:PORT", help="overrides [daemon].metrics; port 0: a free one, '': off")
    serve.add_argument("--ram", metavar="SIZE", help='overrides [ram].capacity, for example "512MiB"')
    serve.add_argument("--disk", metavar="DIR", help="a disk tier in DIR, overrides [[tier]]; '': none")
    serve.add_argument(
        "--disk-capacity", metavar="SIZE", help="capacity of --disk; default: a quarter of the free space"
    )
    serve.add_argument("--log-level", help="overrides [log].level")
    serve.add_argument("--log-format", help="overrides [log].format")
    check = verbs.add_parser(
        "check-config",
        help="check a configuration file",
        epilog="Prints resulting sizes, warnings, and each given key with its source. Exit codes 1 and 78: refused.",
    )
    check.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="without it: the defaults of serve")
    check.add_argument("--json", action="store_true", help="print the sizes, paths and sockets that follow, as JSON")
    check.add_argument("--any-host", action="store_true", help="warn, not fail, about what only this host refuses")
    hold = verbs.add_parser(
        "hold", help="hold the arena while its daemon restarts", epilog=_HOLD_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    hold.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="without it: the defaults of serve")
    hold.set_defaults(metrics=None, ram=None, disk=None, disk_capacity=None, log_level=None, log_format=None)
    for verb in (serve, hold):
        verb.add_argument(
            "--socket", type=Path, help="path of the gRPC socket; overrides the sockets of [daemon].listen"
        )
        verb.add_argument("--arena-dir", type=Path, help="overrides [ram].path")
    offline.add_verbs(verbs)
    return parser


def _config(options: argparse.Namespace, running: Config | None = None) -> Config:
    """Return the configuration. `running`: of the daemon that reads it again, whose automatic sizes stay."""
    variables = environment.variables(os.environ)
    if options.verb == "check-config":
        return embedded(variables=variables) if options.config is None else load(options.config, variables=variables)
    disk_capacity, running_bytes = options.disk_capacity, None
    if running is not None:
        running_bytes = running.capacity_bytes
        if options.disk:
            disk_capacity = f"{running.tables.tier[0].capacity}B"
    overrides: dict[str, dict[str, Any]] = {}
    for table, key, value in (
        ("daemon", "listen", None if options.socket is None else [f"unix://{options.socket.absolute()}"]),
        ("daemon", "metrics", options.metrics),
        ("ram", "capacity", options.ram),
        ("ram", "path", None if options.arena_dir is None else str(options.arena_dir.absolute())),
        (DISK, "path", options.disk and str(Path(options.disk).absolute())),
        (DISK, "capacity", disk_capacity),
        ("log", "level", options.log_level),
        ("log", "format", options.log_format),
    ):
        if value is not None:
            overrides.setdefault(table, {})[key] = value
    if options.disk_capacity is not None and not options.disk:
        raise ConfigError("command line", "--disk-capacity", "needs --disk, which is not given")
    if options.config is None:
        return embedded(overrides, variables)
    return load(options.config, overrides, variables, running_bytes)


def _reread(options: argparse.Namespace, started: Config) -> Config:
    """Return the configuration for a reload, after the checks of a start of what a reload can change."""
    config = with_keys(_config(options, started))
    check_operators(config)
    return config


class _Reloads:
    """Reloads that SIGHUP asks for. During a start they wait for its end: the file may have changed since then.

    `entry` blocks the signal until its handler is here.
    """

    def __init__(self) -> None:
        self._begin: Callable[[], asyncio.Task[None]] | None = None
        self._asked = False
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self) -> None:
        self._asked = True
        if self._begin is not None:
            self._tasks.add(task := self._begin())
            task.add_done_callback(self._tasks.discard)

    def begin_by(self, begin: Callable[[], asyncio.Task[None]]) -> None:
        """Begin reloads from now on, with one if somebody has asked before."""
        self._begin = begin
        if self._asked:
            self.ask()


async def _serve(config: Config, reread: Callable[[], Config] | None) -> int:
    from kvdepot.server.daemon.node import (  # with gRPC, which the other verbs do not need
        OTHERS_NAME,
        TABLES_NAME,
        Node,
    )

    log = make_log(config.tables.log.level, config.tables.log.format)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(UnhandledErrors(log, loop.time))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reloads = _Reloads()
    loop.add_signal_handler(signal.SIGHUP, reloads.ask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    log.info("daemon starts: kvdepotd %s, pid %d, configuration: %s", version("kvdepot"), os.getpid(), config.file)
    if config.note:
        log.warning("configuration: %s", config.note)
    notify = ServiceNotifier(os.environ, pid=os.getpid(), clock=time.monotonic)
    kept = take_kept(os.environ, pid=os.getpid(), names=(TABLES_NAME, OTHERS_NAME))
    try:
        node = Node(config, log=log, loop=loop, notify=notify, kept=KeptFiles(*kept), reread=reread)
    except (KvDepotError, OSError) as error:
        log.error("cannot start: %s", error)
        return 1
    try:
        await node.start()
    except (KvDepotError, OSError) as error:
        log.error("cannot start: %s", error)
        await node.stop()
        return 1
    reloads.begin_by(node.begin_reload)
    await stop.wait()
    await node.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
