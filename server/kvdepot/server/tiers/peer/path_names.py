"""Which names of a lookup prove where a prompt is: those of objects that make a path, one for each chunk.

Other kinds of objects are not there for each chunk, wherever the prompt is. Summaries do not know kinds (ADR 85). So a
place with a copy of a prompt would seem to have all that no copy has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvdepot.core.kinds import Kind
from kvdepot.server.storage.shared_layout import object_of, object_path

NAMESPACES_MAX: Final = 1_024


class PathNames:
    """The kind that makes paths in each namespace, learned from lookups: they ask for it first, if they ask for it."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[bytes, Kind] = OrderedDict()

    def of(self, files: Sequence[str], missing: Sequence[str]) -> list[str]:
        """Return the names of paths among the `missing` ones. `files`: all of the lookup, of one namespace."""
        first = object_of(files[0])
        if first is None:
            return []
        namespace, key, kind = first
        kind = min(kind, self._kinds.pop(namespace, kind))
        self._kinds[namespace] = kind
        if len(self._kinds) > NAMESPACES_MAX:
            self._kinds.popitem(last=False)
        ending = object_path(namespace, key, kind).rpartition(key.hex())[2]
        return [file for file in missing if file.endswith(ending)]
