"""What the daemons that load from here were sent, and are lent now: by a name of their certificate, for operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.report import ReaderStatus
from kvdepot.server.io.peer_wire import Refusal, Sent

READERS_MAX: Final = 256
"""Names in a status, those that were sent most. Daemons may share a name, and those of one fleet often do."""


@dataclass(slots=True)
class _Reader:
    tenant: str
    leases: dict[int, int] = field(default_factory=dict)  # number -> bytes
    sent_objects: int = 0
    sent_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class PeerReaders:
    """Of each name that is or was allowed in this run. Everything runs on the loop's thread."""

    def __init__(self) -> None:
        self._readers: dict[str, _Reader] = {}
        self._of_lease: dict[int, _Reader] = {}

    def leased(self, name: str, tenant: str | None, lease: int, raw_bytes: int) -> None:
        reader = self._of_lease[lease] = self._reader(name, tenant)
        reader.leases[lease] = raw_bytes

    def ended(self, lease: int, sent: Sent, sent_bytes: int) -> None:
        reader = self._of_lease.pop(lease)
        del reader.leases[lease]
        reader.sent_bytes += sent_bytes
        if sent is Sent.WHOLE:
            reader.sent_objects += 1
        else:
            reader.refused[sent.value] += 1

    def ended_all(self) -> None:
        """Note that the process that sends has ended, and all leases with it."""
        for lease in tuple(self._of_lease):
            self.ended(lease, Sent.CUT, 0)

    def refused(self, name: str, tenant: str | None, reason: Refusal) -> None:
        self._reader(name, tenant).refused[reason.value] += 1

    def statuses(self) -> tuple[ReaderStatus, ...]:
        """Return those that were sent most first."""
        most = sorted(self._readers.items(), key=lambda one: (-one[1].sent_bytes, one[0]))
        return tuple(
            ReaderStatus(
                name, one.tenant, len(one.leases), sum(one.leases.values()), one.sent_objects, one.sent_bytes,
                dict(one.refused),
            )
            for name, one in most[:READERS_MAX]
        )  # fmt: skip

    def _reader(self, name: str, tenant: str | None) -> _Reader:
        return self._readers.setdefault(name, _Reader(tenant or ""))
