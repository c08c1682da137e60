"""Every error that kvdepot raises on purpose: a closed set.

Each error says who must fix it, whether a repeated call can succeed, and what to do. `code` is stable, and is part of
gRPC statuses, counters and `--json` output. Only `kvdepot.proto.status` maps the set to gRPC codes.
"""

# The names say what happened; the suffix "Error" would add nothing.
# ruff: noqa: N818

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import ClassVar

from kvdepot.core.secrets import mask_secrets


class Fault(Enum):
    """Who has to change something."""

    CLIENT = "client"  # the engine's side: its call or its settings
    OPERATOR = "operator"  # the daemon's configuration or host
    DAEMON = "daemon"  # kvdepotd itself, or its momentary state
    MEDIUM = "medium"  # memory, device or file system


class Retry(Enum):
    """Whether the same call can succeed if it is repeated."""

    NEVER = "never"
    LATER = "later"
    AFTER_REATTACH = "after_reattach"  # attach again, register the namespaces, declare the leases


class KvDepotError(Exception):
    """Base of the closed set. `message` has facts and numbers, and `advice` says what to do.

    A caller with better advice than the class passes its own. `str()` has both.
    """

    code: ClassVar[str] = "internal"
    fault: ClassVar[Fault] = Fault.DAEMON
    retry: ClassVar[Retry] = Retry.NEVER
    default_advice: ClassVar[str] = "report this as a bug of kvdepot"

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = self.default_advice if advice is None else advice

    def __str__(self) -> str:
        return f"{self.message}; {self.advice}" if self.advice else self.message


class InvalidArgument(KvDepotError, ValueError):
    """A value that is wrong in every state of the daemon."""

    code = "invalid_argument"
    fault = Fault.CLIENT
    default_advice = "correct the call"


class UnknownSession(KvDepotError):
    """The session token is not of this run of the daemon."""

    code = "unknown_session"
    fault = Fault.CLIENT
    retry = Retry.AFTER_REATTACH
    default_advice = "attach first: connect to the attachment socket and use the token of its answer"


class UnknownNamespace(KvDepotError):
    """The namespace is not registered with this run of the daemon."""

    code = "unknown_namespace"
    fault = Fault.CLIENT
    retry = Retry.AFTER_REATTACH
    default_advice = "register the namespace in this session"


class NotFound(KvDepotError):
    """An operator named a namespace or a chunk that the daemon does not have."""

    code = "not_found"
    fault = Fault.CLIENT
    default_advice = "`kvdepotctl ls` lists namespaces and chunks"


class PermissionDenied(KvDepotError):
    """The caller's user may not make this call. The kernel says who the caller is."""

    code = "permission_denied"
    fault = Fault.OPERATOR
    default_advice = "add the user or its group to [operators] in the daemon's configuration, and reload it"


class ProtocolMismatch(KvDepotError):
    """The protocol ranges of client and daemon do not overlap."""

    code = "protocol_mismatch"
    fault = Fault.OPERATOR
    default_advice = "upgrade the older side; versions N and N-1 work together"

    def __init__(self, ours: tuple[int, int], theirs: tuple[int, int], *, advice: str | None = None) -> None:
        super().__init__(
            f"this side speaks protocols {ours[0]} to {ours[1]}, the other side {theirs[0]} to {theirs[1]}",
            advice=advice,
        )
        self.ours = ours
        self.theirs = theirs


class EngineIdInUse(KvDepotError):
    """Another living process of the same user is attached in the same place of an engine with this id."""

    code = "engine_id_in_use"
    fault = Fault.OPERATOR
    default_advice = "give each engine its own engine_id, or stop the other process"


class NotScheduler(KvDepotError):
    """A rank made a call that only the scheduler of its engine may make."""

    code = "not_scheduler"
    fault = Fault.CLIENT
    default_advice = "make the call with the token that the engine's scheduler got when it attached"


class NamespaceRefused(KvDepotError):
    """A namespace spec that contradicts itself or is over a limit. The message has the numbers."""

    code = "namespace_refused"
    fault = Fault.CLIENT
    default_advice = "register what the groups imply"


class StaleEpoch(KvDepotError):
    """A namespace that an operator has invalidated. `bumps` is the counter to register it with."""

    code = "stale_epoch"
    fault = Fault.CLIENT
    default_advice = "register it with the counter that the daemon names; upgrade a client that cannot"

    def __init__(self, bumps: int, *, advice: str | None = None) -> None:
        super().__init__(
            f"an operator has bumped the epoch: the namespace's bump counter has to be {bumps}", advice=advice
        )
        self.bumps = bumps


class LimitExceeded(KvDepotError):
    """A bound of `kvdepot.core.limits` or of the configuration. `limit` is its name."""

    code = "limit_exceeded"
    fault = Fault.CLIENT
    default_advice = "split the call, or use less at once"

    def __init__(self, limit: str, value: int, maximum: int, *, advice: str | None = None) -> None:
        super().__init__(f"{limit}: {value} is more than {maximum}", advice=advice)
        self.limit = limit
        self.value = value
        self.maximum = maximum


class NotLent(KvDepotError):
    """A process asked its proxy for extents that are not lent to it, or not any more."""

    code = "not_lent"
    fault = Fault.CLIENT
    default_advice = "count it as a miss: the lease has ended, or belongs to another process"


class NoRoom(KvDepotError):
    """A table or the arena is full, and nothing in it can be evicted now."""

    code = "no_room"
    fault = Fault.MEDIUM
    retry = Retry.LATER
    default_advice = "retry later; `kvdepotctl status` shows what is full"


class LoadsOff(KvDepotError):
    """The operator switched loads off, for the namespace or for all."""

    code = "loads_off"
    fault = Fault.OPERATOR
    retry = Retry.LATER
    default_advice = "compute the prompt, until an operator runs `kvdepotctl loads on`"


class StoresOff(KvDepotError):
    """The operator switched stores off, for the namespace or for all."""

    code = "stores_off"
    fault = Fault.OPERATOR
    retry = Retry.LATER
    default_advice = "store nothing, until an operator runs `kvdepotctl stores on`"


class NotReady(KvDepotError):
    """The daemon is starting, adopting or stopping."""

    code = "not_ready"
    fault = Fault.DAEMON
    retry = Retry.LATER
    default_advice = "retry later"


class ConfigError(KvDepotError):
    """A refused setting: `file` (or its substitute), dotted `key`, and `reason`, in which secrets are masked."""

    code = "config_error"
    fault = Fault.OPERATOR
    default_advice = ""

    def __init__(self, file: str, key: str, reason: str, *, advice: str | None = None, of_host: bool = False) -> None:
        reason = mask_secrets(reason)
        super().__init__(": ".join(part for part in (file, key, reason) if part), advice=advice)
        self.file = file
        self.key = key
        self.reason = reason
        self.of_host = of_host
        """Whether the same setting may be right later, or on another host."""
        self.also: tuple[ConfigError, ...] = ()
        """What else of the file is refused."""

    @property
    def all(self) -> tuple[ConfigError, ...]:
        """Return this error and the others of its file."""
        return (self, *self.also)


def together(errors: Sequence[ConfigError]) -> ConfigError:
    """Return the first of these errors, which has the others."""
    first, *others = errors
    first.also = tuple(others)
    return first


class ArenaInUse(KvDepotError):
    """Another daemon holds the lock of this arena."""

    code = "arena_in_use"
    fault = Fault.OPERATOR
    retry = Retry.LATER
    default_advice = "stop the other daemon, or configure another [ram].path or socket"


class PlannerError(KvDepotError):
    """A group geometry or a position in it that cannot work. The message names the numbers."""

    code = "planner_error"
    fault = Fault.CLIENT
    default_advice = ""


class NamespaceError(KvDepotError):
    """A part of the engine's identity that has no canonical form. The message names its path."""

    code = "namespace_error"
    fault = Fault.CLIENT
    default_advice = "convert the value to plain data, or exclude its path if it cannot change a byte of KV"

    def __init__(self, path: str, reason: str, *, advice: str | None = None) -> None:
        super().__init__(f"{path or '(the value itself)'}: {reason}", advice=advice)
        self.path = path
        self.reason = reason


ERRORS: tuple[type[KvDepotError], ...] = (
    InvalidArgument,
    UnknownSession,
    UnknownNamespace,
    NotFound,
    PermissionDenied,
    ProtocolMismatch,
    EngineIdInUse,
    NotScheduler,
    NamespaceRefused,
    StaleEpoch,
    LimitExceeded,
    NotLent,
    NoRoom,
    LoadsOff,
    StoresOff,
    NotReady,
    ConfigError,
    ArenaInUse,
    PlannerError,
    NamespaceError,
)
"""The closed set: everything else that is raised is a bug."""
