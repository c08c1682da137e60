"""Operators of a daemon: every method that they have, and what the audit log says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from kvdepot.proto.status import CODE_KEY
from kvdepot.proto.v1 import control_pb2, depot_pb2

from tests.rigs.patience import patient

_CALL_SECONDS: Final = 60.0
_AS_OTHER_USER: Final = """
import json, os, sys
from tests.rigs.operators import Caller
user, groups, socket, *verbs = json.loads(sys.argv[1])
os.setgroups(groups); os.setgid(user); os.setuid(user)
with Caller(socket) as caller:
    print(json.dumps({name: caller.outcome(name) for name in verbs}))
"""


def methods() -> Iterator[MethodDescriptor]:
    """Yield the methods of operators, as the .proto files have them."""
    for file, service in ((depot_pb2, "Operator"), (control_pb2, "Control")):
        yield from file.DESCRIPTOR.services_by_name[service].methods


class Caller:
    """Calls methods by name with an empty message, on one connection."""

    def __init__(self, socket: Path | str) -> None:
        self._methods = {method.name: method for method in methods()}
        self._channel = grpc.insecure_channel(f"unix:{socket}", [("grpc.use_local_subchannel_pool", 1)])

    def outcome(self, name: str) -> str:
        """Return "ok", the code of the refusal, or gRPC's status; "begun" for a stream, given up at its first reply."""
        method = self._methods[name]
        path = f"/{method.containing_service.full_name}/{name}"
        request = GetMessageClass(method.input_type)().SerializeToString()
        try:
            if not method.server_streaming:
                self._channel.unary_unary(path, None, None)(request, timeout=patient(_CALL_SECONDS))
                return "ok"
            replies: Any = self._channel.unary_stream(path, None, None)(request, timeout=patient(_CALL_SECONDS))
            for _ in replies:
                replies.cancel()
                break
        except grpc.RpcError as error:
            metadata = {entry.key: entry.value for entry in error.trailing_metadata() or ()}
            return str(metadata.get(CODE_KEY, error.code().name))
        return "begun"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def outcomes_as(user: int, groups: Sequence[int], socket: Path, *verbs: str) -> dict[str, str]:
    """Return the outcomes of verbs that another user calls. Needs root."""
    arguments = json.dumps([user, groups, str(socket), *verbs])
    done = subprocess.run(
        [sys.executable, "-c", _AS_OTHER_USER, arguments],
        capture_output=True, text=True, check=True, timeout=patient(60), cwd=Path(__file__).parents[2],
    )  # fmt: skip
    found: dict[str, str] = json.loads(done.stdout)
    return found


def lines_of_log(log: str) -> list[Mapping[str, Any]]:
    """Return the audit lines in the daemon's log, in text."""
    return [json.loads(line.partition("operator call: ")[2]) for line in log.splitlines() if "operator call: " in line]


def lines_of_file(path: Path) -> list[Mapping[str, Any]]:
    """Return the audit lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
