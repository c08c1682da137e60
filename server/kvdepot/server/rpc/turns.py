"""The work of a large call in turns of the loop: between two of them everybody else is answered.

A turn ends with the step in which its time is over, so a step has to be short. Nothing of a call is undone when a later
step of it fails: each of these calls may be repeated, and each step says again what it has said.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
from kvdepot.core.calls import CommitItem

TURN_SECONDS: Final = 0.005
STEP_OBJECTS: Final = 64
"""Objects that one step commits or abandons: 1 to 3 ms."""

_INDEX_BYTES: Final = 4


def in_turns(steps: Iterator[None], end: Callable[[Exception | None], None]) -> None:
    """Take the steps, the first ones at once. `end` is called once, behind the last one or with what one raised."""
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
    """The items in groups for a step each, a long one in pieces, each with its item's number. Their order stays."""
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
    """The item with its indices from the largest down: a reservation names parents before children."""
    return CommitItem(item.lease_id, np.unique(np.frombuffer(item.indices, "<u4"))[::-1].tobytes())
