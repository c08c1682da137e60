"""What a keeper and its daemon say to each other: a JSON object a line, over a socketpair of streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from kvdepot.server.tiers.shared.links import Failed, Report

LINE_BYTES_MAX: Final = 64 << 10
_WORDS: Final[dict[str, type[Any]]] = {"report": Report, "failed": Failed}


class WordError(ValueError):
    """A line that nobody says."""


def pack_word(word: Report | Failed) -> bytes:
    return _line({type(word).__name__.lower(): asdict(word)})


def pack_published(total_bytes: int, wanted_bytes: int, settled: str) -> bytes:
    return _line({"published": total_bytes, "wanted": wanted_bytes, "settled": settled})


def take_words(received: bytearray) -> Iterator[Report | Failed]:
    """The whole lines at the start of `received`, which loses each as it is taken. Raises WordError."""
    for values in _take(received):
        try:
            ((kind, fields),) = values.items()
            yield _WORDS[kind](**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise WordError(f"not a keeper's word: {error}") from error


def take_published(received: bytearray) -> Iterator[tuple[int, int, str]]:
    """Likewise, of the daemon: arguments of `KeeperLink.publish`."""
    for values in _take(received):
        total, wanted, settled = (values.get(name) for name in ("published", "wanted", "settled"))
        if not isinstance(total, int) or not isinstance(wanted, int) or not isinstance(settled, str):
            raise WordError("neither numbers of bytes nor a node")
        yield total, wanted, settled


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _take(received: bytearray) -> Iterator[dict[str, Any]]:
    while (end := received.find(b"\n")) >= 0:
        line = bytes(received[:end])
        del received[: end + 1]
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WordError(f"not JSON: {error}") from error
        if not isinstance(values, dict):
            raise WordError("not a JSON object")
        yield values
    if len(received) > LINE_BYTES_MAX:
        raise WordError("a line without an end")
