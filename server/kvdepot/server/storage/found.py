"""What a tier finds on its device, as columns. Not in `base`, which I/O workers load: they do without numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from kvdepot.core.objectfile import ObjectName


@dataclass(frozen=True, slots=True, eq=False)
class FoundObjects:
    """Objects that a tier found on its device while it opened, a row each. Names are two words of 64 bits, (n, 2)."""

    handles: npt.NDArray[np.int64]
    namespaces: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint64]
    parents: npt.NDArray[np.uint64]
    kinds: npt.NDArray[np.uint8]
    boundaries: npt.NDArray[np.uint32]
    raw_bytes: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, objects: Sequence[tuple[int, ObjectName]]) -> Self:
        """Make the columns from handles and names."""
        names = [name for _, name in objects]
        namespaces, keys, parents = (
            np.frombuffer(b"".join(column), np.uint64).reshape(-1, 2)
            for column in ([n.namespace for n in names], [n.key for n in names], [n.parent for n in names])
        )
        return cls(
            np.array([handle for handle, _ in objects], np.int64), namespaces, keys, parents,
            np.array([name.kind for name in names], np.uint8),
            np.array([name.boundary_tokens for name in names], np.uint32),
            np.array([name.raw_bytes for name in names], np.uint64),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.handles)

    def __iter__(self) -> Iterator[tuple[int, ObjectName]]:
        """Yield (handle, name) of each object."""
        sixteen = (column.tobytes() for column in (self.namespaces, self.keys, self.parents))
        namespaces, keys, parents = ([data[at : at + 16] for at in range(0, len(data), 16)] for data in sixteen)
        rest = (self.kinds.tolist(), self.boundaries.tolist(), self.raw_bytes.tolist())
        return zip(self.handles.tolist(), map(ObjectName, namespaces, keys, parents, *rest), strict=True)
