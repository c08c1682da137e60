"""How a call to the daemon can fail, as a value: nothing here is raised into the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FailureReason(Enum):
    """Why a call failed."""

    UNAVAILABLE = "unavailable"  # not attached, no connection, closed, or too many calls in flight
    DEADLINE = "deadline"  # no answer in time; the daemon may or may not have acted
    REFUSED = "refused"  # the daemon said no: `code` says which rule, asking again does not help
    LOST = "lost"  # the daemon that had accepted it is gone, and with it the lease


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A miss with a name. `code` is the daemon's error code or the gRPC status name, `message` is for people."""

    reason: FailureReason
    code: str = ""
    message: str = ""
