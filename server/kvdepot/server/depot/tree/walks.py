"""Walks through the tree of chunks, in slices between which the tree may change.

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
from kvdepot.server.depot.tree.index import NONE, Index, Nodes
from kvdepot.server.depot.tree.namespaces import Namespace, Namespaces

_NUMBERS: Final = 8192
"""Node numbers of a slice that is a range of them: 0.1 ms, and as much for each tier that looks up what it has."""
_STEPS: Final = 512
"""Nodes and children of a slice that goes from one to the next: 1 ms."""
_WALKED: Final = 4096
"""Nodes of a slice that goes up: 1 ms."""
_CHILDREN: Final = 256
"""More are not gone through one by one: there may be a million of them."""


def named(index: Index, namespaces: Namespaces, namespace_id: bytes, key: bytes = b"") -> Namespace:
    """Return the namespace that an operator names. Raise NotFound where it, or the chunk, is unknown."""
    namespace = namespaces.by_id.get(namespace_id)
    if namespace is None:
        raise NotFound(f"there is no namespace {namespace_id.hex()}")
    if key and index.find(namespace.slot, key) == NONE:
        raise NotFound(f"namespace {namespace_id.hex()} has no chunk {key.hex()}")
    return namespace


def everything(index: Index) -> Iterator[Nodes]:
    """Yield all numbers that were ever a node's, in no order. A number without a node has no object in any tier."""
    at = 0
    while at < index.high:
        yield np.arange(at, min(at + _NUMBERS, index.high))
        at += _NUMBERS


def namespace_nodes(index: Index, namespaces: Namespaces, namespace: Namespace) -> Iterator[Nodes]:
    """Yield all numbers that were ever a node's of the namespace, in no order."""
    at = 0
    while at < index.high and _in_table(namespaces, namespace):
        yield index.candidates(namespace.slot, at, at + _NUMBERS)
        at += _NUMBERS


def parents_first(index: Index, namespaces: Namespaces, namespace: Namespace) -> Iterator[Nodes]:
    """Yield all chunks of a namespace, each after its parent."""
    keys = deque[bytes]()
    for candidates in namespace_nodes(index, namespaces, namespace):
        first = candidates[index.parents_of(candidates) == NONE]
        keys.extend(map(index.key, index.live(namespace.slot, first)))
        yield np.empty(0, np.int64)
    yield from below(index, namespaces, namespace, keys)


def path(index: Index, namespaces: Namespaces, namespace: Namespace, key: bytes) -> Iterator[Nodes]:
    """Yield the chunks from the first one to this one."""
    found = list[int]()
    for _ in up(index, namespace, key, found):
        yield np.empty(0, np.int64)
    keys = list(map(index.key, found))
    for start in range(0, len(keys), _STEPS):
        if not _in_table(namespaces, namespace):
            return
        nodes = index.find_many(namespace.slot, b"".join(keys[start : start + _STEPS]))
        yield nodes[nodes != NONE]


def up(index: Index, namespace: Namespace, key: bytes, path: list[int]) -> Iterator[None]:
    """Fill `path` with the nodes from the first chunk to this one; none where it is gone."""
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


def below(index: Index, namespaces: Namespaces, namespace: Namespace, keys: deque[bytes]) -> Iterator[Nodes]:
    """Yield the chunks of these keys and all below them, parents before children."""
    while keys and _in_table(namespaces, namespace):
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
                yield from _children(index, namespaces, namespace, key, keys)
            else:
                keys.extend(map(index.key, children))
        yield np.array(nodes, np.int64)


def _children(
    index: Index, namespaces: Namespaces, namespace: Namespace, key: bytes, keys: deque[bytes]
) -> Iterator[Nodes]:
    """Append the keys of a chunk's many children, found by their numbers: the list of them may change meanwhile."""
    for candidates in namespace_nodes(index, namespaces, namespace):
        node = index.find(namespace.slot, key)
        if node == NONE:
            return
        keys.extend(map(index.key, index.live(namespace.slot, candidates[index.parents_of(candidates) == node])))
        yield np.empty(0, np.int64)


def _in_table(namespaces: Namespaces, namespace: Namespace) -> bool:
    """Return whether the namespace is still in the table: another one may have its slot."""
    return namespaces.by_slot.get(namespace.slot) is namespace
