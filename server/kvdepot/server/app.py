"""`kvdepotd`: the daemon's command line.

`kvdepotd serve [CONFIG]` runs it; `kvdepotd check-config CONFIG` only says whether the file would do;
`kvdepotd fsck` and `kvdepotd inspect` look at a disk tier's directory while no daemon runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvdepot.core.errors import ConfigError, KvDepotError
from kvdepot.server.config import DISK, Config, embedded, load
from kvdepot.server.logs import make_log
from kvdepot.server.node import Node
from kvdepot.server.offline import verbs as offline
from kvdepot.server.service_notify import ServiceNotifier

_UMASK = 0o177
"""Sockets and the arena are this user's alone until their mode is set."""
_SERVE_EPILOG = """\
Without CONFIG: a quarter of what memory, cgroup and /dev/shm have, at most 4 GiB, sockets under
$XDG_RUNTIME_DIR/kvdepot (or a directory of this user in the temporary directory), metrics on a free port,
and a disk tier in $XDG_CACHE_HOME/kvdepot (or ~/.cache/kvdepot): a quarter of what is free there, at most 8 GiB;
the log says where. Options override single keys of either.

SIGTERM and SIGINT stop in order: no more grants, outstanding checksums are finished, exit code 0. The arena
file stays, with its memory, so that the next daemon on it serves the same objects. To give the memory
back, remove that file while no daemon runs; its name is in the log's last line.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.verb in offline.VERBS:
        return offline.run(options)
    try:
        config = _config(options)
    except KvDepotError as error:
        print(f"kvdepotd: {error}", file=sys.stderr)  # noqa: T201 - no log is configured yet
        return 1
    if options.verb == "check-config":
        print(f"{config.file}: ok, capacity {config.capacity_bytes} bytes, arena {config.arena_path}")  # noqa: T201
        return 0
    os.umask(_UMASK)
    return asyncio.run(_serve(config))


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
    check = verbs.add_parser("check-config", help="say whether a configuration file is good; exit code 1 if not")
    check.add_argument("config", type=Path, metavar="CONFIG")
    offline.add_verbs(verbs)
    return parser


def _config(options: argparse.Namespace) -> Config:
    if options.verb == "check-config":
        return load(options.config)
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
    return embedded(overrides) if options.config is None else load(options.config, overrides)


async def _serve(config: Config) -> int:
    log = make_log(config.tables.log.level, config.tables.log.format)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(
        signal.SIGHUP,
        log.warning,
        "SIGHUP: reloading is not available in this version; restart to apply %s",
        config.file,
    )
    log.info("kvdepotd %s, pid %d, configuration: %s", version("kvdepot"), os.getpid(), config.file)
    if config.note:
        log.warning("%s", config.note)
    try:
        node = Node(config, log=log, loop=loop, notify=ServiceNotifier(os.environ.get("NOTIFY_SOCKET")))
    except (KvDepotError, OSError) as error:
        log.error("cannot start: %s", error)
        return 1
    try:
        await node.start()
    except (KvDepotError, OSError) as error:
        log.error("cannot start: %s", error)
        await node.stop()
        return 1
    await stop.wait()
    await node.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
