"""A vLLM server on this host: which process it is, and the flags and variables that it was started with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvdepot.core.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from kvdepot.client.ctl.doctor.host import Host

_LISTENS: Final = "0A"
_FILE_BYTES_MAX: Final = 1 << 20
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1", "::"})  # noqa: S104 - names to compare
_SHORT: Final[Mapping[str, str]] = {
    "tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size", "n": "nnodes", "sc": "speculative-config",
}  # fmt: skip
_SWITCH: Final = re.compile(
    r"(no|enable|disable)-|(trust-remote-code|enforce-eager|skip-tokenizer-init|async-scheduling|headless)$"
)
"""Flags that take no value: what follows one is something else, such as the model."""
_SERVERS: Final = ("serve", "vllm.entrypoints.openai.api_server")


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A server. `flags` have dashes, values as text; a switch has `true` or `false`."""

    pid: int
    model: str
    flags: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_known: bool = True  # False: it may not be read
    unread: str = ""  # why flags in a file (`--config`) are missing here
    root: Path = Path("/")
    """Its root directory as this process sees it. A container has its own."""
    directory: str = ""
    """Its working directory, as it sees it itself."""

    def number(self, name: str, default: int) -> int:
        """Return a flag's number. What is no number is vLLM's to refuse."""
        text = self.flags.get(name, "")
        return int(text) if re.fullmatch(r"\d{1,12}", text) else default

    def is_on(self, name: str, default: bool) -> bool:
        return self.flags.get(name, str(default)).lower() == "true"

    def settings(self, name: str) -> dict[str, Any] | None:
        """Return a flag that is a JSON object, also if it is given in parts; None without it. Raise InvalidArgument."""
        parts = {key: text for key, text in self.flags.items() if key.startswith(f"{name}.")}
        if name not in self.flags and not parts:
            return None
        found = _json(name, self.flags.get(name, "{}"))
        for key, text in parts.items():
            place = found
            *folders, last = key[len(name) + 1 :].replace("-", "_").split(".")
            for folder in folders:
                place = place.setdefault(folder, {})
                if not isinstance(place, dict):
                    raise InvalidArgument(f"--{key}: {folder} is no JSON object")
            try:
                place[last] = json.loads(text)
            except ValueError:
                place[last] = text
        return found


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"--{name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"--{name} is no JSON object")
    return found


def engine_process(host: Host, engine: str) -> EngineProcess:
    """Return the server of a pid or a URL of this host. Raise NotFound, or InvalidArgument for another host's URL.

    Children of a server have its socket too, so all that have it are tried.
    """
    if engine.isdecimal():
        return _process(host, int(engine))
    first, *others = _listeners(host, engine)
    for pid in (first, *others):
        with suppress(InvalidArgument, NotFound):
            return _process(host, pid)
    return _process(host, first)


def _process(host: Host, pid: int) -> EngineProcess:
    command = host.data(f"/proc/{pid}/cmdline")
    if not command:
        raise NotFound(f"no process {pid}, or its command line may not be read", advice="run as root or as its user")
    words = [word.decode(errors="replace") for word in command.rstrip(b"\0").split(b"\0")]
    model, flags = parse_command(words)
    unread = ""
    if file := flags.get("config"):
        try:
            in_file = _file_flags(host, pid, file)
        except InvalidArgument as error:
            unread = str(error)
        else:
            model = model or in_file.get("model", "")
            flags = in_file | flags
    environment, root = host.environment_of(pid), host.path(f"/proc/{pid}/root")
    return EngineProcess(
        pid, model, flags, environment or {}, environment is not None, unread, root, _directory(host, pid)
    )


def _directory(host: Host, pid: int) -> str:
    return host.link(f"/proc/{pid}/cwd")


def _file_flags(host: Host, pid: int, file: str) -> dict[str, str]:
    """Return the flags of a `--config` file, as the process sees the file. Raise InvalidArgument."""
    from yaml import AliasEvent, YAMLError, parse, safe_load  # one command in a thousand

    seen = file if file.startswith("/") else f"{_directory(host, pid)}/{file}"
    data = host.small_file(f"/proc/{pid}/root{seen}", _FILE_BYTES_MAX)
    if data is None:
        raise InvalidArgument(f"--config {file}: it cannot be read")
    try:
        if any(isinstance(event, AliasEvent) for event in parse(data)):  # a small file could become any size
            raise InvalidArgument(f"--config {file}: aliases are not read")
        found = safe_load(data)
        if not isinstance(found, dict):
            raise InvalidArgument(f"--config {file}: no keys and values")
        words = list(_words(found))
    except InvalidArgument:
        raise
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"--config {file}: no YAML of flags: {str(error).partition(chr(10))[0]}") from error
    return parse_flags(words)[1]


def _words(flags: dict[Any, Any]) -> Iterator[str]:
    """Yield what vLLM makes of a file's keys: words of a command line (FlexibleArgumentParser.load_config_file)."""
    for name, value in flags.items():
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, dict):
            yield f"--{name}={json.dumps(value)}"
        elif not isinstance(value, list):
            yield f"--{name}={value}"


def parse_command(words: list[str]) -> tuple[str, dict[str, str]]:
    """Return model and flags of `vllm serve`, or of the module of its server. Raise InvalidArgument for others."""
    start = next((number for number, word in enumerate(words) if word in _SERVERS), None)
    if start is None:
        raise InvalidArgument(
            f"{Path(words[0]).name[:40]!r} is no vLLM server", advice="name the pid of `vllm serve`, or its URL"
        )
    return parse_flags(words[start + 1 :])


def parse_flags(words: list[str]) -> tuple[str, dict[str, str]]:
    """Return model and flags of what follows the command."""
    flags: dict[str, str] = {}
    model = ""
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        if not re.match(r"--?[A-Za-z]", word):
            model = model or word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        head, dot, tail = name.partition(".")
        head = head.replace("_", "-")
        name = _SHORT.get(head, head) + dot + tail
        if equals or (rest and not re.match(r"--?[A-Za-z]", rest[-1]) and not _SWITCH.match(name)):
            flags[name] = value if equals else rest.pop()
        else:
            flags[name.removeprefix("no-")] = "false" if name.startswith("no-") else "true"
    return flags.get("model", model), flags


def _listeners(host: Host, url: str) -> list[int]:
    """Return the processes that have the listening socket of a URL's port, at least one, the oldest pid first."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        hostname, port = parts.hostname, parts.port or 8000
    except ValueError:
        hostname, port = None, 0
    if not hostname:
        raise InvalidArgument(f"{url!r} is neither a pid nor a URL", advice="for example http://localhost:8000")
    if hostname not in _LOCAL:
        raise InvalidArgument(f"{hostname} is not this host", advice="run kvdepotctl on the engine's host")
    inodes = set(_listening_inodes(host, port))
    pids = sorted(int(name) for name in host.names("/proc") if name.isdecimal())
    if found := [pid for pid in pids if inodes & set(_sockets(host, str(pid)))]:
        return found
    raise NotFound(
        f"no process that listens on port {port} can be seen", advice="run as root or as its user, or name its pid"
    )


def _listening_inodes(host: Host, port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        for line in (host.text(f"/proc/net/{table}") or "").splitlines()[1:]:
            columns = line.split()
            if len(columns) > 9 and columns[3] == _LISTENS and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]


def _sockets(host: Host, pid: str) -> Iterator[str]:
    for name in host.names(f"/proc/{pid}/fd"):
        try:
            target = str(host.path(f"/proc/{pid}/fd/{name}").readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]
