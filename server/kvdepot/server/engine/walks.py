"""Ways through the tree of chunks that take their time: in slices, between which it may change.

What is there from the first slice to the last is met exactly once. What comes meanwhile may be left out, and
a node that goes is no longer met.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

import numpy as np
from kvdepot.core.errors import NotFound
from kvdepot.server.engine.index import NONE, Nodes
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.space import Space

_NUMBERS: Final = 8192
"""Node numbers of a slice that is a range of them: 0.1 ms, and as much for each tier that looks up what it has."""
_STEPS: Final = 512
"""Nodes and children of a slice that goes from one to the next: 1 ms."""
_WALKED: Final = 4096
"""Nodes of one that goes up, likewise."""
_CHILDREN: Final = 256
"""More are not gone through one by one: there may be a million of them."""


def named(space: Space, namespace_id: bytes, key: bytes = b"") -> Namespace:
    """The namespace that an operator names, and a chunk of it. Raises NotFound."""
    namespace = space.namespaces.by_id.get(namespace_id)
    if namespace is None:
        raise NotFound(f"there is no namespace {namespace_id.hex()}")
    if key and space.index.find(namespace.slot, key) == NONE:
        raise NotFound(f"namespace {namespace_id.hex()} has no chunk {key.hex()}")
    return namespace


def everything(space: Space) -> Iterator[Nodes]:
    """All numbers that were ever a node's, in no order. One that is nobody's has no object in any tier."""
    at = 0
    while at < space.index.high:
        yield np.arange(at, min(at + _NUMBERS, space.index.high))
        at += _NUMBERS


def namespace_nodes(space: Space, namespace: Namespace) -> Iterator[Nodes]:
    """Likewise, of one namespace."""
    at = 0
    while at < space.index.high and _stands(space, namespace):
        yield space.index.candidates(namespace.slot, at, at + _NUMBERS)
        at += _NUMBERS


def parents_first(space: Space, namespace: Namespace) -> Iterator[Nodes]:
    """All chunks of a namespace, the beginnings of all paths before what is behind them."""
    index, keys = space.index, deque[bytes]()
    for candidates in namespace_nodes(space, namespace):
        first = candidates[index.parents_of(candidates) == NONE]
        keys.extend(map(index.key, index.live(namespace.slot, first)))
        yield np.empty(0, np.int64)
    yield from below(space, namespace, keys)


def path(space: Space, namespace: Namespace, key: bytes) -> Iterator[Nodes]:
    """The chunks from the first one to this one."""
    index, found = space.index, list[int]()
    for _ in up(space, namespace, key, found):
        yield np.empty(0, np.int64)
    keys = list(map(index.key, found))
    for start in range(0, len(keys), _STEPS):
        if not _stands(space, namespace):
            return
        nodes = index.find_many(namespace.slot, b"".join(keys[start : start + _STEPS]))
        yield nodes[nodes != NONE]


def up(space: Space, namespace: Namespace, key: bytes, path: list[int]) -> Iterator[None]:
    """Fill `path` with the nodes from the first chunk to this one; none where it is gone."""
    index = space.index
    node = index.find(namespace.slot, key) if key else NONE
    while node != NONE:
        path.append(node)
        if len(path) % _WALKED == 0:
            at = index.key(node)
            yield
            if index.find(namespace.slot, at) != node:  # it went meanwhile, perhaps with all below it
                path.clear()
                node = index.find(namespace.slot, key)
                continue
        node = index.parent(node)
    path.reverse()


def below(space: Space, namespace: Namespace, keys: deque[bytes]) -> Iterator[Nodes]:
    """The chunks of these keys and all below them, parents before children."""
    index = space.index
    while keys and _stands(space, namespace):
        nodes: list[int] = []
        steps = 0
        while keys and steps < _STEPS:
            key = keys.popleft()
            node = index.find(namespace.slot, key)
            if node == NONE:
                continue
            nodes.append(node)
            children = list(islice(index.children(node), _CHILDREN + 1))
            steps += 1 + len(children)
            if len(children) > _CHILDREN:
                yield np.array(nodes, np.int64)
                nodes, steps = [], _STEPS
                yield from _children(space, namespace, key, keys)
            else:
                keys.extend(map(index.key, children))
        yield np.array(nodes, np.int64)


def _children(space: Space, namespace: Namespace, key: bytes, keys: deque[bytes]) -> Iterator[Nodes]:
    """Append the keys of a chunk's many children, found by their numbers: the list of them may change meanwhile."""
    index = space.index
    for candidates in namespace_nodes(space, namespace):
        node = index.find(namespace.slot, key)
        if node == NONE:
            return
        keys.extend(map(index.key, index.live(namespace.slot, candidates[index.parents_of(candidates) == node])))
        yield np.empty(0, np.int64)


def _stands(space: Space, namespace: Namespace) -> bool:
    """Whether it is still in the table: another one may have its slot."""
    return space.namespaces.by_slot.get(namespace.slot) is namespace
