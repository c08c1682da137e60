"""The small files by which nodes know of each other: a node's record and the janitor's lease (docs/formats/shared.md).

Anybody may have written them, in part or wrongly: what is not understood is None, and its length is bounded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, Self

from kvdepot.server.storage.shared_layout import is_node
from kvdepot.server.tiers.shared.coordinator.ledger import NODES_MAX, Ledger, Share

NODE_BYTES_MAX: Final = 4_096
JANITOR_BYTES_MAX: Final = 512 << 10
_FORMAT: Final = 1
_NUMBER_MAX: Final = (1 << 62) - 1
_SECONDS_MAX: Final = (1 << 31) - 1
"""Of a count: its begin is shown as a date."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The janitor, by its lease. A later one has a higher term."""

    holder: str = ""
    term: int = 0


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node's file. `limit_bytes`: written before the node acts under it. `lease`: the newest it has seen."""

    published_bytes: int
    limit_bytes: int
    lease: Lease
    wanted_bytes: int = 0  # beyond what is published; 0: it has enough
    owner: str = ""  # whose runs follow one another, `CoordinatorSettings.owner`
    left: bool = False  # its owner has proved that none of its writes is in progress: it is gone
    renewals: int = 0  # how often the node had written its file: one of fewer is of an earlier time
    refused: bool = False  # the file system had no room for its writes lately

    def pack(self) -> bytes:
        values = {
            "format": _FORMAT,
            "published": self.published_bytes,
            "limit": self.limit_bytes,
            "wanted": self.wanted_bytes,
            "janitor": self.lease.holder,
            "term": self.lease.term,
            "owner": self.owner,
            "left": int(self.left),
            "renewals": self.renewals,
            "refused": int(self.refused),
        }
        return (json.dumps(values) + "\n").encode()

    @classmethod
    def unpack(cls, data: bytes) -> Self | None:
        values = _values(data, NODE_BYTES_MAX)
        try:
            return cls(
                _number(values["published"]), _number(values["limit"]),
                Lease(_name(values["janitor"]), _number(values["term"])),
                _number(values["wanted"]), _name(values["owner"]), bool(_number(values["left"])),
                _number(values.get("renewals", 0)), bool(_number(values.get("refused", 0))),
            )  # fmt: skip
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class JanitorRecord:
    """The lease, what the last count found, and everybody's share. `used_bytes` None: not counted yet.

    `counting_seconds`: for how long a count had run when this was written; None: none ran. `directory_id`: by the
    marker; empty: not said.
    """

    lease: Lease
    used_bytes: int | None
    estimate_bytes: int  # used, with what nodes have published since
    objects: int
    quarantined_bytes: int
    shares: dict[str, Share]
    lasts_seconds: int = 0  # without a renewal; 0: as long as any
    counting_seconds: int | None = None
    counted_files: int = 0
    directory_id: str = ""

    def is_of(self, directory_id: str) -> bool:
        """Return whether it may be this directory's: another one may have come in its place."""
        return self.directory_id in ("", directory_id)

    def limit_of(self, node: str) -> int:
        share = self.shares.get(node)
        return share.limit_bytes if share else 0

    def ledger(self, capacity_bytes: int) -> Ledger:
        """Return a successor's ledger, which may hand out at once what is left."""
        ledger = Ledger(capacity_bytes, self.used_bytes)
        ledger.shares = {node: Share(s.limit_bytes, s.counted_bytes, s.left) for node, s in self.shares.items()}
        return ledger

    def pack(self) -> bytes:
        values = {
            "format": _FORMAT,
            "holder": self.lease.holder,
            "term": self.lease.term,
            "used": self.used_bytes,
            "estimate": self.estimate_bytes,
            "objects": self.objects,
            "quarantined": self.quarantined_bytes,
            "shares": {node: [s.limit_bytes, s.counted_bytes, int(s.left)] for node, s in self.shares.items()},
            "lasts": self.lasts_seconds,
            "counting": self.counting_seconds,
            "counted": self.counted_files,
            "directory": self.directory_id,
        }
        return (json.dumps(values) + "\n").encode()

    @classmethod
    def unpack(cls, data: bytes) -> Self | None:
        values = _values(data, JANITOR_BYTES_MAX)
        try:
            used, shares, counting = values["used"], values["shares"], values.get("counting")
            if not isinstance(shares, dict) or len(shares) > NODES_MAX:
                return None
            return cls(
                Lease(_name(values["holder"]), _number(values["term"])),
                None if used is None else _number(used),
                _number(values["estimate"]), _number(values["objects"]), _number(values["quarantined"]),
                {_name(node): _share(share) for node, share in shares.items()},
                _number(values.get("lasts", 0)),
                None if counting is None else _number(counting, _SECONDS_MAX), _number(values.get("counted", 0)),
                _name(values.get("directory", "")),
            )  # fmt: skip
        except (KeyError, ValueError):
            return None


def _values(data: bytes, bytes_max: int) -> dict[str, Any]:
    """Return the values, or an empty mapping if they are not understood."""
    if len(data) > bytes_max:
        return {}
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) and values.get("format") == _FORMAT else {}


def _number(value: object, most: int = _NUMBER_MAX) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("not a number of bytes or seconds")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not (value == "" or is_node(value)):
        raise ValueError("not a node's id")
    return value


def _share(value: object) -> Share:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("not a share")
    limit, counted, left = map(_number, value)
    return Share(limit, counted, bool(left))
