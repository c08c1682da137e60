"""Which objects of RAM a restart has to keep, by the tables and the medium alone: what the next daemon has, too."""

from __future__ import annotations

import numpy as np
from kvdepot.core.arena import NO_ROW, RowState
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.server.depot.tree.rows import SUMMED

from tests.rigs.engine_rig import Rig, audit

Name = tuple[bytes, bytes, int]
"""(namespace, key, kind) of an object."""
Parents = dict[Name, bytes]


NEVER = ("overlap", "repeated", "unknown_namespace", "torn_fields", "torn_extent", "torn_links", "namespace_repeated")
"""No kill makes such rows: they would mean that the order of stores is wrong."""


def check_restart(rig: Rig, outlives: set[Name]) -> None:
    """The next run has these objects, once its tiers have opened, and nothing that contradicts itself."""
    audit(rig.depot)
    while rig.depot._attaching.run_once():
        audit(rig.depot)
    assert outlives <= _objects_in_ram(rig), "objects with checksums and a path were lost"
    dropped = rig.report.dropped
    assert not [reason for reason in dropped if reason in NEVER], rig.report
    if rig.tier_config is not None:  # but for reservations, which stay lent
        assert dropped.get("no_parent", 0) <= rig.report.pinned, rig.report


def outliving(rig: Rig) -> set[Name]:
    """Return the objects with checksums whose path is in RAM or on the disk that will say so.

    A disk is told first what RAM alone has the path of. Of what the disk has, what follows something else is dropped.
    """
    in_ram = _summed(rig)
    rooted = _following(in_ram, {})
    on_disk: Parents = {}
    if rig.tier_config is not None:
        names = (rig.medium.names[handle] for handle in rig.medium.stored)
        on_disk = _following({(name.namespace, name.key, name.kind): name.parent for name in names}, rooted)
    return set(_following(in_ram, on_disk))


def _objects_in_ram(rig: Rig) -> set[Name]:
    """Return the committed objects that the index has."""
    ram, by_slot = rig.depot._ram, rig.depot._tree.namespaces.by_slot
    rows = ram.rows
    indexed = {row for column in rig.depot._tree.index.rows for row in column[rig.depot._tree.index.nodes()].tolist()}
    return {
        (by_slot[rows.namespace[row]].id, rows.key(row), rows.kind[row])
        for row in indexed - {NO_ROW}
        if rows.state[row] == RowState.COMMITTED
    }


def _summed(rig: Rig) -> Parents:
    tables = rig.depot._tables
    columns, ids = tables.extents, tables.namespaces["id"].view("u1").reshape(-1, 16)
    keys, parents = (columns[name].view("u1").reshape(-1, 16) for name in ("key", "parent"))
    summed = np.flatnonzero((columns["state"] == RowState.COMMITTED) & (columns["flags"] & SUMMED != 0)).tolist()
    return {
        (ids[columns["namespace"][row]].tobytes(), keys[row].tobytes(), int(columns["kind"][row])): (
            parents[row].tobytes()
        )
        for row in summed
    }


def _following(objects: Parents, others: Parents) -> Parents:
    """Return those of these objects that follow each other or the others, up to the root."""
    kept: Parents = {}
    while True:
        paths = {(namespace, key) for namespace, key, kind in (*kept, *others) if kind == Kind.ATTENTION}
        more = {
            name: parent
            for name, parent in objects.items()
            if name not in kept and (parent == ROOT_KEY or (name[0], parent) in paths)
        }
        if not more:
            return kept
        kept |= more
