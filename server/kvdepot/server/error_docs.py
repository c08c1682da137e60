"""docs/errors.md, from the declarations: `python -m kvdepot.server.error_docs > docs/errors.md`."""

from __future__ import annotations

import sys

from kvdepot.core.errors import ERRORS, Fault, KvDepotError, Retry
from kvdepot.proto.status import STATUS

_HEAD = """\
# Errors

Made from the code by `make docs`. The set is closed: whatever else a call ends with is a bug, or gRPC's own.

A refused call ends with the gRPC status below, the message with its numbers as details, and `kvdepot-code`,
`kvdepot-retry` and `kvdepot-advice-bin` in the trailing metadata (docs/formats/protocol.md). `kvdepotctl` prints
message and advice on stderr, with `--json` too; its exit codes are in docs/kvdepotctl.md. An engine
counts each as a miss.

| code | gRPC | what it means | who has to change something | does repeating help | advice |
|---|---|---|---|---|---|"""
_FAULTS = {
    Fault.CLIENT: "the engine's side",
    Fault.OPERATOR: "the operator",
    Fault.DAEMON: "nobody, or the daemon",
    Fault.MEDIUM: "memory or medium",
}
_RETRIES = {Retry.NEVER: "no", Retry.LATER: "later", Retry.AFTER_REATTACH: "after attaching anew"}


def markdown() -> str:
    return "\n".join([_HEAD, *map(_row, ERRORS)])


def _row(error: type[KvDepotError]) -> str:
    meaning = " ".join((error.__doc__ or "").split())
    advice = error.default_advice or "in the message"
    cells = f"`{error.code}`", STATUS[error].name, meaning, _FAULTS[error.fault], _RETRIES[error.retry], advice
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(markdown().rstrip("\n") + "\n")
