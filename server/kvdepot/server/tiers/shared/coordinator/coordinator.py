"""The coordinator of a shared directory on one node. It opens it, registers the node, may be its janitor (ADR 18).

It does what may block, so it has a process of its own (`kvdepot.server.tiers.shared.coordinator.main`).
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvdepot.server.platform.file_room import explained
from kvdepot.server.storage.shared_layout import JANITOR, node_file, temporary_file
from kvdepot.server.tiers.shared.coordinator.files import Found, ServerClock, read_small
from kvdepot.server.tiers.shared.coordinator.janitor import Janitor
from kvdepot.server.tiers.shared.coordinator.nodes import read_node, registered
from kvdepot.server.tiers.shared.coordinator.opening import NotThereError, check_directory, make_folders, open_directory
from kvdepot.server.tiers.shared.coordinator.pace import Pace
from kvdepot.server.tiers.shared.coordinator.records import JANITOR_BYTES_MAX, JanitorRecord, Lease, NodeRecord
from kvdepot.server.tiers.shared.coordinator.settings import Before, CoordinatorSettings
from kvdepot.server.tiers.shared.coordinator.spare import SpareRoom
from kvdepot.server.tiers.shared.links import Failed, Report

_OWN_FILE: Final = 1 << 62
"""Number of the temporary; no publish gets there."""
_HOST_CHARACTERS: Final = 48


def new_node() -> str:
    """Return a new id for one registration."""
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname()).strip(".-")[:_HOST_CHARACTERS]
    return f"{host or 'node'}-{secrets.token_hex(6)}"


def _version(path: Path) -> tuple[int, int, int]:
    """Return what no other file has of this name. Raise OSError."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


class Coordinator:
    """The coordinator of one node. `clock` runs while the machine sleeps.

    Call `heartbeat` once a heartbeat, and `work` in between.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        before: Before,
        clock: Callable[[], float],
        new_node: Callable[[], str] = new_node,
    ) -> None:
        self._settings = settings
        self._root: Path = settings.root
        self._clock = clock
        self._new_node = new_node
        self._known = before.known
        self._opened = False
        self._folders_gone = False  # of the tier's own, one may be: somebody removed it, or did not restore it
        self._published_bytes = before.published_bytes
        self._wanted_bytes = 0
        self._refused = False  # see `CoordinatorLink.publish`
        self._server = ServerClock(clock)
        self._pace = Pace(settings)
        self._spare = SpareRoom(settings.root, settings.capacity_bytes)
        self._janitor = Janitor(settings, clock, self._server, self._pace, self._spare)
        self._seen = Lease()
        self._report = JanitorRecord(Lease(), None, 0, 0, 0, {})
        self._lease_age_seconds = 0.0
        self._current = False  # whether that janitor renews its lease
        self._node = new_node()
        self._offset_bytes = self._published_bytes  # of an earlier registration
        self._limit_bytes = 0
        self._renewed_at: float | None = None
        self._renewals = 0  # of this registration
        self._version = 0, 0, 0  # of this node's file, as it was left
        self._settled = ""  # see `CoordinatorLink.publish`; of all runs of the owner
        self._inherits = ""  # the node that has inherited

    @property
    def janitor(self) -> Janitor:
        return self._janitor

    @property
    def allowed(self) -> bool:
        """Return whether this node may write at all."""
        return self._limit_bytes > self._published_bytes - self._offset_bytes

    @property
    def hurried(self) -> bool:
        """Return whether this node waits for what another one grants: a janitor that waits has to work, not to ask."""
        return not self.allowed and not self._janitor.holding

    def publish(self, total_bytes: int, wanted_bytes: int = 0, settled: str = "", *, refused: bool = False) -> None:
        """See `CoordinatorLink`. `settled` is also of the owner's earlier runs."""
        self._published_bytes = max(self._published_bytes, total_bytes)
        self._wanted_bytes = wanted_bytes
        self._settled = settled
        self._refused = refused

    def heartbeat(self) -> Report | Failed:
        started = self._clock()
        message = self._heartbeat()
        self._pace.beat_took(self._clock() - started)
        return message

    def _heartbeat(self) -> Report | Failed:
        try:
            if not self._opened:
                self._known = open_directory(
                    self._root,
                    self._known,
                    self._settings.created_by,
                    on_root_filesystem=self._settings.on_root_filesystem,
                )
                self._opened = True
            self._known = check_directory(self._root, self._known)
        except (OSError, NotThereError) as error:
            return self._told(str(error), marker_ok=False) if self._opened else Failed(str(error))
        reason = ""
        try:
            if self._folders_gone:
                make_folders(self._root)
            self._renew()
            self._folders_gone = False
        except NotThereError as error:
            return self._told(str(error), marker_ok=False)
        except OSError as error:
            self._folders_gone |= isinstance(error, FileNotFoundError)
            reason = f"cannot take part: {explained(error)}"
        return self._told(reason or self._janitor.reason, marker_ok=True)

    def work(self) -> bool:
        """Do one step of the janitor's work. Return False if there is none."""
        return self._janitor.work()

    def _renew(self) -> None:
        """Write this node's file. Use a new limit only if the same janitor is there after the limit was written.

        A later janitor reads the nodes' files when it has become janitor. So it knows every limit in use.
        """
        if self._renewed_at is not None and (
            self._clock() - self._renewed_at > self._settings.allowed_seconds or not self._as_left()
        ):
            self._forget()  # taken for gone, or it may be: what it was allowed is not its own any more
        own = node_file(self._node)
        _, record = self._read_lease()
        limit = max(self._limit_bytes, record.limit_of(self._node) if record else 0)
        started = self._clock()
        written = NodeRecord(
            self._published_bytes - self._offset_bytes, limit, self._seen, self._wanted_bytes, self._settings.owner,
            renewals=self._renewals + 1, refused=self._refused,
        )  # fmt: skip
        temporary = Path(temporary_file(self._node, _OWN_FILE)).name
        self._spare.replace(own, written.pack(), temporary)
        self._version = _version(self._root / own)
        self._server.stamped(self._version[-1])
        self._renewed_at, self._renewals = started, written.renewals
        if self._settled == self._node != self._inherits and self._settings.owner:
            self._inherit()
        found, again = self._read_lease()
        if record is not None and again is not None and again.lease == record.lease:
            self._limit_bytes = limit
        if again is not None:
            self._report = again
        self._janitor.heartbeat(self._known.directory_id, self._node, found, again)
        lasts_seconds = self._pace.honoured_seconds(again.lasts_seconds if again else 0)
        self._lease_age_seconds = self._janitor.lease_age_seconds(found) if found else lasts_seconds
        self._current = self._janitor.holding or self._lease_age_seconds < lasts_seconds

    def _as_left(self) -> bool:
        """Return whether this node's file is there, and is not of an earlier time. Raise OSError.

        A copy of the directory may be in its place, or what was restored of it. Nobody there knows what this node was
        allowed since, and what this node knows as janitor is not so there.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            if _version(self._root / node_file(self._node)) == self._version:
                return True
            found, record = read_node(self._root, self._node)
            if record is not None and record.renewals < self._renewals:
                self._janitor.resign()
                return False
            return found is not None
        return False

    def _forget(self) -> None:
        """Register under a new id: nothing is allowed, and what was published before belongs to another id."""
        self._node = self._new_node()
        self._offset_bytes = self._published_bytes
        self._limit_bytes = self._renewals = 0
        self._renewed_at = None

    def _inherit(self) -> None:
        """Mark this owner's earlier nodes as gone, so that the janitor does not wait for their silence. Raise OSError.

        A daemon that is killed again and again, or its coordinator, would else hold the grants of all of them.
        """
        temporary = Path(temporary_file(self._node, _OWN_FILE)).name
        for node in registered(self._root):
            _, record = read_node(self._root, node)
            if record is None or record.owner != self._settings.owner or record.left or node == self._node:
                continue
            self._spare.replace(node_file(node), replace(record, left=True).pack(), temporary)
        self._inherits = self._node

    def _read_lease(self) -> tuple[Found | None, JanitorRecord | None]:
        """Return the lease file and its record. A record with a term below one that was seen came late: None.

        Raise NotThereError if it is another directory's.
        """
        found = read_small(self._root, JANITOR, JANITOR_BYTES_MAX)
        record = JanitorRecord.unpack(found.data) if found else None
        if record is not None and not record.is_of(self._known.directory_id):
            raise NotThereError(f"{self._root} is another directory than before, by its {JANITOR}")
        if record is None or record.lease.term < self._seen.term:
            return found, None
        self._seen = record.lease
        return found, record

    def _told(self, reason: str, *, marker_ok: bool) -> Report:
        allowed = self._renewed_at is not None and self._clock() - self._renewed_at <= self._settings.allowed_seconds
        unused = max(self._limit_bytes - (self._published_bytes - self._offset_bytes), 0) if allowed else 0
        record = self._report
        counting = self._counting()
        return Report(
            node=self._node,
            janitor=record.lease.holder if self._current else "",
            is_janitor=self._janitor.holding,
            used_bytes=record.estimate_bytes,
            quarantined_bytes=record.quarantined_bytes,
            objects=record.objects,
            limit_bytes=self._published_bytes + unused,
            marker_ok=marker_ok,
            device=self._known.device,
            reason=reason,
            directory_id=self._known.directory_id,
            counting_seconds=None if counting is None else counting[0],
            counted_files=0 if counting is None else counting[1],
            until=self._clock() + self._settings.unheard_seconds,
        )

    def _counting(self) -> tuple[float, int] | None:
        """Return the count that this node's grants may wait for, whichever node makes it: its seconds and files."""
        if self._janitor.counting is not None or not self._current or self._report.counting_seconds is None:
            return self._janitor.counting
        return self._report.counting_seconds + self._lease_age_seconds, self._report.counted_files
