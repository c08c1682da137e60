"""The file that `kvdepotctl trace record` writes and `kvdepotd replay` reads: docs/formats/trace.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvdepot.core.calls import KEY_BYTES, Kind
from kvdepot.core.errors import InvalidArgument, KvDepotError
from kvdepot.core.groups import GroupSpec
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import Planner
from kvdepot.core.traces import TracedRequest, TracePart

VERSION: Final = 1
_KINDS: Final = {kind.name.lower(): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Request:
    """`chunks` are numbers of chunks: the same number is the same prefix."""

    at_seconds: float
    namespace: str
    chunks: tuple[int, ...]
    boundary_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """`namespaces`: by name, with sizes and geometry alone. `cut`: its last line is not whole, and was left out."""

    namespaces: Mapping[str, NamespaceSpec]
    requests: tuple[Request, ...]
    cut: bool = False


class TraceWriter:
    """Lines of a file. Keys become numbers in the order in which they come first: nothing of a prompt is in it."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._chunk_tokens: dict[bytes, int] = {}
        self.requests = 0
        self.tokens = 0
        self.offered_tokens = 0

    @property
    def chunks(self) -> int:
        """Return the number of different chunks."""
        return len(self._numbers)

    def head(self) -> str:
        return _line({"kvdepot_trace": VERSION})

    def lines(self, part: TracePart) -> list[str]:
        found = []
        for traced in part.namespaces:
            spec = traced.spec
            self._chunk_tokens[traced.namespace_id] = spec.chunk_tokens
            groups = [
                {"kind": one.kind.name.lower(), "block_tokens": one.block_tokens, "window_tokens": one.window_tokens,
                 "block_bytes": sum(one.rank_block_bytes)}
                for one in spec.groups
            ]  # fmt: skip
            named = {"namespace": traced.namespace_id.hex(), "label": spec.label, "chunk_tokens": spec.chunk_tokens}
            found.append(_line(named | {"groups": groups}))
        return found + [self._request(request) for request in part.requests]

    def _request(self, request: TracedRequest) -> str:
        keys = [request.keys[at : at + KEY_BYTES] for at in range(0, len(request.keys), KEY_BYTES)]
        tokens = len(keys) * self._chunk_tokens.get(request.namespace_id, 0)
        self.requests += 1
        self.tokens += tokens
        self.offered_tokens += request.boundary_tokens
        return _line(
            {"timestamp": round(request.seconds * 1000), "namespace": request.namespace_id.hex(),
             "input_length": tokens, "hash_ids": [self._numbers.setdefault(key, len(self._numbers)) for key in keys],
             "boundary_tokens": request.boundary_tokens}
        )  # fmt: skip


def read_trace(lines: Iterable[str]) -> Trace:
    """Return the trace in these lines. Raise InvalidArgument, with the line's number.

    A recording that was killed, or whose disk is full, ends within a line. What was recorded before it is whole.
    """
    namespaces: dict[str, NamespaceSpec] = {}
    requests: list[Request] = []
    number, cut = 0, False
    for number, line in enumerate(lines, 1):
        try:
            try:
                record = json.loads(line)
            except ValueError:
                if number == 1 or line.endswith("\n"):
                    raise
                cut = True
                break
            if number == 1:
                _check_head(record)
            elif "hash_ids" in record:
                requests.append(_read_request(record, namespaces))
            else:
                namespaces[str(record["namespace"])] = _read_namespace(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, KvDepotError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else f"{error}"
            raise InvalidArgument(f"line {number}: {why}", advice="docs/formats/trace.md says what it has") from error
    if not number:
        raise InvalidArgument("it is empty", advice="record one with `kvdepotctl trace record`")
    return Trace(namespaces, tuple(requests), cut)


def coarser(trace: Trace, factor: int) -> Trace:
    """Return what engines with chunks of `factor` recorded ones would have asked for.

    A chunk hash covers the whole prefix, so a larger chunk has the number of its last recorded one. What smaller chunks
    would have shared is not in a trace. Raise InvalidArgument for a chunk that a model of the trace cannot have.
    """
    if factor == 1:
        return trace
    namespaces = {}
    for name, spec in trace.namespaces.items():
        try:
            planner = Planner(spec.groups, factor * spec.chunk_tokens)
        except KvDepotError as error:
            raise InvalidArgument(f"namespace {name} cannot have chunks {factor} times as large: {error}") from error
        sizes = {kind: planner.object_bytes(kind) for kind in planner.kinds}
        namespaces[name] = replace(spec, chunk_tokens=planner.chunk_tokens, object_bytes=sizes)
    requests = tuple(replace(one, chunks=one.chunks[factor - 1 :: factor]) for one in trace.requests)
    return replace(trace, namespaces=namespaces, requests=requests)


def _check_head(record: Any) -> None:
    version = record.get("kvdepot_trace")
    if version != VERSION:
        raise ValueError(f"a trace of version {VERSION} begins with its version, not {version!r}")


def _read_namespace(record: Mapping[str, Any]) -> NamespaceSpec:
    groups = tuple(
        GroupSpec(
            _KINDS[group["kind"]], _whole(group["block_tokens"]), _whole(group["window_tokens"]),
            rank_block_bytes=(_whole(group["block_bytes"]),),
        )
        for group in record["groups"]
    )  # fmt: skip
    planner = Planner(groups, _whole(record["chunk_tokens"]))
    sizes = {kind: planner.object_bytes(kind) for kind in planner.kinds}
    identity = {"trace": json.dumps(str(record["namespace"]))}
    return NamespaceSpec(identity, planner.chunk_tokens, groups, sizes, label=str(record["label"]))


def _read_request(record: Mapping[str, Any], namespaces: Mapping[str, NamespaceSpec]) -> Request:
    name = str(record["namespace"])
    if name not in namespaces:
        raise ValueError(f"nothing was said of namespace {name} before")
    chunks = tuple(_whole(chunk) for chunk in record["hash_ids"])
    return Request(_whole(record["timestamp"]) / 1000, name, chunks, _whole(record["boundary_tokens"]))


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no whole number from 0 up")
    return value


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"
