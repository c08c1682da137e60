"""The order in which an opening tells its objects: each path at a stretch.

An engine that hears of a chunk and of what follows it at once has less to do than one that hears of all first chunks,
then of all second ones: in between, each would be an end that may go (`benchmarks.disk --open`: 2.0 s, not 2.8).
"""

from __future__ import annotations

import numpy as np
from kvdepot.server.tiers.disk.columns import Numbers, PutColumns, Words


def depth_first(puts: PutColumns) -> Numbers:
    """Return the rows in an order in which each chunk comes after its parent, directly followed by all its descendants.

    The object that makes the path is first of its chunk. If a parent is not there, or does not end before its child,
    the child is the first chunk of a path.
    """
    fields = puts.fields
    named = np.concatenate((fields["namespace"], fields["key"]), axis=1)
    followed = np.concatenate((fields["namespace"], fields["parent"]), axis=1)
    numbers = _numbered(np.concatenate((named, followed)))
    chunks, parents = numbers[: len(puts)], numbers[len(puts) :]
    boundaries = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)  # 0: a parent that is not there
    boundaries[chunks] = fields["boundary_tokens"]
    above = np.full(len(boundaries), -1)
    above[chunks] = parents
    above[boundaries[above] >= boundaries] = -1
    places = _places(above, boundaries)
    order: Numbers = np.lexsort((fields["kind"], places[chunks]))
    return order


def _numbered(rows: Words) -> Numbers:
    """Return a number for each row, from 0 on. Equal rows have the same number."""
    order = np.lexsort(rows.T)
    new = np.zeros(len(rows), np.int64)
    new[1:] = (rows[order][1:] != rows[order][:-1]).any(axis=1)
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.cumsum(new)
    return numbers


def _places(above: Numbers, boundaries: Numbers) -> Numbers:
    """Return the place of each node of a forest that is walked depth first. `above`: parents; -1: there is none."""
    sizes = np.ones(len(above), np.int64)  # of subtrees
    order = np.argsort(-boundaries, kind="stable")
    order = order[above[order] >= 0]
    for level in np.split(order, np.flatnonzero(np.diff(boundaries[order])) + 1):
        np.add.at(sizes, above[level], sizes[level])
    siblings = np.lexsort((boundaries, above))
    starts = np.cumsum(sizes[siblings]) - sizes[siblings]
    family = np.searchsorted(above[siblings], above[siblings])  # where each one's siblings begin
    places = np.empty(len(above), np.int64)
    places[siblings] = starts - starts[family] + 1  # after its parent, and then after its parent's parent, ...
    while (below := above >= 0).any():
        places[below] += places[above[below]]
        above = np.where(below, above[above], -1)
    return places
