"""The operator settings that the next run restores: a small JSON file, always replaced as a whole."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvdepot.core.calls import KEY_BYTES
from kvdepot.core.control import QuotaEntry, QuotaSubject, switch_states
from kvdepot.core.epochs import Epochs
from kvdepot.core.errors import ConfigError
from kvdepot.core.limits import BUMPS_MAX, NAMESPACE_ID_BYTES
from kvdepot.core.report import SwitchesStatus
from kvdepot.server.platform.durable_files import publish
from kvdepot.server.platform.own_files import open_own
from kvdepot.server.platform.own_thread import in_own_thread

_FORMAT: Final = 1
_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class KeptPin:
    """A pin, with the time at which it ends."""

    namespace_id: bytes
    key: bytes  # empty: all of the namespace
    until: float  # seconds since 1970


@dataclass(frozen=True, slots=True)
class OperatorState:
    """All of it. Equal to `OperatorState()` where nothing was ever told."""

    switches: SwitchesStatus = field(default_factory=SwitchesStatus)
    pins: tuple[KeptPin, ...] = ()
    quotas: tuple[QuotaEntry, ...] = ()  # that are set at run time
    epochs: Epochs = field(default_factory=Epochs)


class StateFile:
    """One writer: the daemon that holds the file's lock. What two wrote would undo each other's epoch bumps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = asyncio.Lock()

    def read(self) -> OperatorState:
        """Return the state.

        Raise ConfigError for a file that cannot be read, so that disabled loads or stores stay disabled.

        A file that another user may have written is refused too: it may be in a directory in which all users
        may create files.
        """
        try:
            fd = open_own(self.path, os.O_RDONLY)
            with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
                text = file.read(_BYTES_MAX + 1)
        except FileNotFoundError:
            return OperatorState()
        except OSError as error:
            raise self._bad(f"cannot be read: {error.strerror}") from error
        try:
            return _decoded(text)
        except (ValueError, KeyError, TypeError) as error:
            raise self._bad(f"is not a state file of this version of kvdepotd: {error}") from error

    @property
    def writable(self) -> bool:
        """Return whether the directory looks writable."""
        return os.access(self.path.parent, os.W_OK | os.X_OK)

    async def write(self, state: OperatorState) -> str:
        """Write the state durably. Return why it is not written; empty if it is. Must not be cancelled.

        After a cancellation the thread would continue, and could overwrite the next state with an older one.
        """
        async with self._writing:
            try:
                await in_own_thread(partial(publish, self.path, [_encoded(state)]))
            except OSError as error:
                return f"not saved for the next run: {self.path}: {error.strerror}"
        return ""

    def _bad(self, reason: str) -> ConfigError:
        advice = (
            "repair it (its owner and mode too), or delete it. Without it, loads and stores are on, pins and "
            "operator quotas are gone, and tiers serve again what any `epoch bump` has invalidated"
        )
        return ConfigError(str(self.path), "", reason, advice=advice)


def _encoded(kept: OperatorState) -> bytes:
    switches, now = kept.switches, time.time()
    states = switch_states(switches)
    document = {
        "format": _FORMAT,
        "loads_off": switches.loads_off,
        "loads_off_namespaces": [one.hex() for one in switches.loads_off_namespaces],
        "stores_off": switches.stores_off,
        "stores_off_namespaces": [one.hex() for one in switches.stores_off_namespaces],
        **{f"{switch}_off_at": now - state.off_seconds for switch, state in states.items() if state.off_seconds},
        "pins": [{"namespace": pin.namespace_id.hex(), "key": pin.key.hex(), "until": pin.until} for pin in kept.pins],
        "quotas": [asdict(one.subject) | {"capacity": one.capacity_bytes} for one in kept.quotas],
        "epochs": {
            "bump": kept.epochs.bump,
            "invalidated": [one.hex() for one in kept.epochs.invalidated_namespaces],
        },
    }
    return json.dumps(document, indent=1).encode()


def _decoded(text: bytes) -> OperatorState:
    """Return the state in a file's text. Raise ValueError, KeyError or TypeError."""
    if len(text) > _BYTES_MAX:
        raise ValueError(f"more than {_BYTES_MAX} bytes are too many")
    document = json.loads(text)
    if document["format"] != _FORMAT:
        raise ValueError(f"format {document['format']!r}")
    return OperatorState(
        SwitchesStatus(
            _flag(document["loads_off"]), _ids(document["loads_off_namespaces"]),
            _flag(document["stores_off"]), _ids(document["stores_off_namespaces"]),
            loads_off_seconds=_seconds_since(document.get("loads_off_at")),
            stores_off_seconds=_seconds_since(document.get("stores_off_at")),
        ),
        tuple(_pin(value) for value in document.get("pins", ())),  # versions before wrote none
        tuple(_quota(value) for value in document.get("quotas", ())),
        _epochs(document.get("epochs", {"bump": 0, "invalidated": []})),
    )  # fmt: skip


def _epochs(value: Any) -> Epochs:
    bump = value["bump"]
    if not isinstance(bump, int) or not 0 <= bump <= BUMPS_MAX:
        raise TypeError(f"{bump!r} is no counter")
    return Epochs(bump, _ids(value["invalidated"]))


def _quota(value: Any) -> QuotaEntry:
    tenant, namespace, tier, capacity = (value[name] for name in ("tenant", "namespace", "tier", "capacity"))
    if not isinstance(tenant, str) or not isinstance(namespace, str | None) or not isinstance(tier, str):
        raise TypeError(f"{value!r} is about nobody")
    if capacity is not None and (not isinstance(capacity, int) or capacity < 1):
        raise TypeError(f"{capacity!r} is no number of bytes that may be held")
    return QuotaEntry(QuotaSubject(tenant, namespace, tier), capacity, by_operator=True)


def _pin(value: Any) -> KeptPin:
    (namespace_id,) = _ids([value["namespace"]])
    key = bytes.fromhex(value["key"])
    if len(key) not in (0, KEY_BYTES):
        raise ValueError(f"{key.hex()} is no chunk's key")
    return KeptPin(namespace_id, key, float(value["until"]))


def _seconds_since(at: Any) -> float:
    """Return 0, which is not known, for None of versions before, and for a time to come: the clock was set back."""
    seconds = 0.0 if at is None else time.time() - float(at)
    if not math.isfinite(seconds):
        raise ValueError(f"{at!r} is no time")
    return max(seconds, 0.0)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _ids(values: Any) -> tuple[bytes, ...]:
    found = tuple(bytes.fromhex(value) for value in values)
    for one in found:
        if len(one) != NAMESPACE_ID_BYTES:
            raise ValueError(f"{one.hex()} is no namespace's id")
    return found
