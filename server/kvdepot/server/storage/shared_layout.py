"""The directory of a shared tier: names and marker (docs/formats/shared.md). All is relative to its root."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final, Self

from kvdepot.core.kinds import Kind
from kvdepot.core.objectfile import ObjectName

FORMAT_VERSION: Final = 1
COMPATIBLE_SINCE: Final = 1
MARKER: Final = "kvdepot-shared.json"
MARKER_BYTES_MAX: Final = 4_096
TEMPORARIES: Final = ".tmp"
QUARANTINE: Final = ".quarantine"
NODES: Final = ".nodes"
FOLDERS: Final = (TEMPORARIES, QUARANTINE, NODES)
"""Made by a daemon that has checked the marker, and by no other: where they are missing, this is not the directory."""
JANITOR: Final = ".janitor.json"
SPARE: Final = ".spare"
"""How names end in `.nodes` that keep room for the files of nodes."""
NAMESPACE: Final = "namespace.json"
"""In a namespace's folder, for people."""
PROBE: Final = f"{TEMPORARIES}/probe"
LEFT_BY_PROBES: Final = ".probe-"
"""How names begin in the root that `kvdepotctl doctor` leaves when it is killed."""
SUFFIX: Final = ".kvd"

_KINDS: Final = {Kind.ATTENTION: "attention", Kind.WINDOW: "window", Kind.STATE: "state"}
_NUMBERS: Final = {label: kind for kind, label in _KINDS.items()}
_OBJECT: Final = re.compile(r"([0-9a-f]{32})/([0-9a-f]{2})/(\2[0-9a-f]{30})\.(attention|window|state)\.kvd")
_TRASH: Final = re.compile(r"trash-([0-9a-f]{32})-([0-9a-f]{32})\.(attention|window|state)-([0-9]+)-([0-9]+)\.kvd")
_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_ID_BYTES: Final = 16


class NotSharedError(ValueError):
    """A marker that is none, or of another version; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What says that a directory is a shared tier's, and which one: written once, by the first daemon."""

    directory_id: str  # 32 hexadecimal digits, random
    created_by: str  # for people

    def pack(self) -> bytes:
        values = {
            "format": FORMAT_VERSION,
            "compatible_since": COMPATIBLE_SINCE,
            "created_by": self.created_by,
            "id": self.directory_id,
        }
        return (json.dumps(values, indent=1) + "\n").encode()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the marker. Raise NotSharedError if the bytes are not one that this version can use."""
        try:
            values = json.loads(data[:MARKER_BYTES_MAX])
            version, compatible = values["format"], values["compatible_since"]
            directory_id, created_by = values["id"], values["created_by"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise NotSharedError(f"{MARKER} is not understood: {error}") from error
        if not isinstance(version, int) or not isinstance(compatible, int) or compatible > FORMAT_VERSION:
            raise NotSharedError(
                f"{MARKER} is of format {version!r}, compatible since {compatible!r}; this is {FORMAT_VERSION}"
            )
        if not isinstance(directory_id, str) or not re.fullmatch(r"[0-9a-f]{32}", directory_id):
            raise NotSharedError(f"{MARKER} has no id of {2 * _ID_BYTES} hexadecimal digits")
        return cls(directory_id, str(created_by))


def namespace_folder(namespace: bytes) -> str:
    return namespace.hex()


def object_file(name: ObjectName) -> str:
    """Return the file of an object, below the directory. Raise KeyError for an unknown kind."""
    return object_path(name.namespace, name.key, name.kind)


def object_path(namespace: bytes, key: bytes, kind: int) -> str:
    """Return the file of an object, below the directory. Raise KeyError for an unknown kind."""
    digits = key.hex()
    return f"{namespace_folder(namespace)}/{digits[:2]}/{digits}.{_KINDS[Kind(kind)]}{SUFFIX}"


def object_of(file: str) -> tuple[bytes, bytes, Kind] | None:
    """Return (namespace, key, kind) from a file's name; None if it is not the name of an object."""
    match = _OBJECT.fullmatch(file)
    return (bytes.fromhex(match[1]), bytes.fromhex(match[3]), _NUMBERS[match[4]]) if match else None


def temporary_file(node: str, number: int) -> str:
    """Return the name of a temporary file. `number`: one that this node has not used yet."""
    return f"{TEMPORARIES}/{node}-{number}.tmp"


def quarantine_file(at_seconds: int, name: ObjectName) -> str:
    """Return the name of a quarantined file. Names sort by age, by this node's clock.

    The finder of the damage adds `.REASON.kvd`.
    """
    return f"{QUARANTINE}/{at_seconds:010d}-{name.key.hex()}.{_KINDS[Kind(name.kind)]}"


def node_file(node: str) -> str:
    return f"{NODES}/{node}.json"


def spare_file(number: int) -> str:
    """Return the name of a file that keeps room for the nodes' own."""
    return f"{NODES}/{number}{SPARE}"


def trash_file(namespace: bytes, key: bytes, kind: int, mtime_ns: int, inode: int) -> str:
    """Return the name for an object that the janitor is deleting.

    The name holds what tells whether the file is still the one that the janitor meant.
    """
    return f"{TEMPORARIES}/trash-{namespace.hex()}-{key.hex()}.{_KINDS[Kind(kind)]}-{mtime_ns}-{inode}{SUFFIX}"


def trash_of(file_name: str) -> tuple[str, int, int] | None:
    """Return (object's file, mtime_ns, inode) from a bare name of `trash_file`; None for any other name."""
    match = _TRASH.fullmatch(file_name)
    if match is None:
        return None
    path = object_path(bytes.fromhex(match[1]), bytes.fromhex(match[2]), _NUMBERS[match[3]])
    return path, int(match[4]), int(match[5])


def is_node(node: str) -> bool:
    """Return whether a node may have this id. Ids are part of file names, and of what the janitor reads."""
    return _NODE.fullmatch(node) is not None


def temporary_node(file_name: str) -> str | None:
    """Return the node that made a temporary file, from its bare name; None if it is no node's."""
    node, dash, number = file_name.removesuffix(".tmp").rpartition("-")
    whole = dash and file_name.endswith(".tmp") and number.isascii() and number.isdigit() and is_node(node)
    return node if whole else None
