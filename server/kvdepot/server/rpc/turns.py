"""The work of a large call, in turns of the loop: other calls are answered between two turns.

A turn ends with the step in which its time is over, so a step must be short. Nothing is undone if a later step fails:
each of these calls may be repeated, and each step repeats its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
from kvdepot.core.calls import CommitItem

TURN_SECONDS: Final = 0.001
"""Short, because an answer to somebody else takes several rounds of the loop, and each has a turn."""
STEP_OBJECTS: Final = 64
"""Objects that one step commits or abandons: 1 to 3 ms."""

_INDEX_BYTES: Final = 4


def in_turns(steps: Iterator[None], end: Callable[[Exception | None], None]) -> None:
    """Take the steps, the first ones at once. `end` is called once, after the last one or with what one raised."""
    until = time.monotonic() + TURN_SECONDS
    try:
        for _ in steps:
            if time.monotonic() >= until:
                asyncio.get_running_loop().call_soon(in_turns, steps, end)
                return
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this call's
        end(error)
    else:
        end(None)


def pieces(items: Iterable[CommitItem]) -> Iterator[list[tuple[int, CommitItem]]]:
    """Yield the items in groups for one step each, in order. A long item comes in pieces, with the item's number."""
    group: list[tuple[int, CommitItem]] = []
    objects = 0
    for number, item in enumerate(items):
        for at in range(0, max(len(item.indices), 1), STEP_OBJECTS * _INDEX_BYTES):
            piece = item.indices[at : at + STEP_OBJECTS * _INDEX_BYTES]
            group.append((number, CommitItem(item.lease_id, piece)))
            objects += max(len(piece) // _INDEX_BYTES, 1)
            if objects >= STEP_OBJECTS:
                yield group
                group, objects = [], 0
    if group:
        yield group


def children_first(item: CommitItem) -> CommitItem:
    """Return the item with its indices in descending order: a reservation names parents before children."""
    return CommitItem(item.lease_id, np.unique(np.frombuffer(item.indices, "<u4"))[::-1].tobytes())
