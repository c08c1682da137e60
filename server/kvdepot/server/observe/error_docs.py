"""docs/errors.md, from the declarations: `python -m kvdepot.server.observe.error_docs > docs/errors.md`."""

from __future__ import annotations

import sys

from kvdepot.core.errors import ERRORS, Fault, KvDepotError, Retry
from kvdepot.proto.status import STATUS

_HEAD = """\
# Errors

`make docs` generates this page from the code. The set is closed: a call that ends in another way met a bug, or an error
of gRPC.

A refused call ends with the gRPC status below, and the message with its numbers as details. The trailing metadata has
`kvdepot-code`, `kvdepot-retry` and `kvdepot-advice-bin` ([protocol](formats/protocol.md)). `kvdepotctl` prints message
and advice on stderr, also with `--json` ([exit codes](kvdepotctl.md#exit-codes)). An engine counts each error as a
miss.

| code | gRPC | meaning | fix by | retryable | advice |
|---|---|---|---|---|---|"""
_FAULTS = {
    Fault.CLIENT: "the engine",
    Fault.OPERATOR: "the operator",
    Fault.DAEMON: "the daemon",
    Fault.MEDIUM: "memory or device",
}
_RETRIES = {Retry.NEVER: "no", Retry.LATER: "later", Retry.AFTER_REATTACH: "after a new attachment"}


def markdown() -> str:
    return "\n".join([_HEAD, *map(_row, ERRORS)])


def _row(error: type[KvDepotError]) -> str:
    meaning = " ".join((error.__doc__ or "").split())
    advice = error.default_advice or "in the message"
    cells = f"`{error.code}`", STATUS[error].name, meaning, _FAULTS[error.fault], _RETRIES[error.retry], advice
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(markdown().rstrip("\n") + "\n")
