"""Nodes of version 0.3.0 and of this one read each other's files in a shared directory (T3)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from kvdepot.server.storage.shared_layout import spare_file
from kvdepot.server.tiers.shared.coordinator.ledger import Share
from kvdepot.server.tiers.shared.coordinator.records import JanitorRecord, Lease, NodeRecord

LEASE = Lease("a-1", 3)
NODE = NodeRecord(5, 9, LEASE, wanted_bytes=7, owner="o-pool", left=True)
JANITOR = JanitorRecord(
    LEASE, 100, 120, 4, 10, {"a-1": Share(9, 5), "b-2": Share(8, 8, left=True)}, 10, counting_seconds=2,
    counted_files=33,
)  # fmt: skip
NODE_OF_0_3_0 = (
    b'{"format": 1, "published": 5, "limit": 9, "wanted": 7, "janitor": "a-1", "term": 3, "owner": "o-pool", "left": 1}'
    b"\n"
)
JANITOR_OF_0_3_0 = (
    b'{"format": 1, "holder": "a-1", "term": 3, "used": 100, "estimate": 120, "objects": 4, "quarantined": 10,'
    b' "shares": {"a-1": [9, 5, 0], "b-2": [8, 8, 1]}, "lasts": 10, "counting": 2, "counted": 33}\n'
)
"""As that version has written them."""


@pytest.mark.requirement("T3")
def test_what_a_node_of_0_3_0_wrote_is_read() -> None:
    assert NodeRecord.unpack(NODE_OF_0_3_0) == NODE
    assert JanitorRecord.unpack(JANITOR_OF_0_3_0) == JANITOR
    assert JANITOR.is_of("ab" * 16), "it does not say of which directory it is"


@pytest.mark.requirement("T3")
def test_a_node_of_0_3_0_finds_all_that_it_reads_with_the_same_meaning() -> None:
    """It reads these fields, refuses a record without one of them, and ignores others."""
    node = replace(NODE, renewals=4, refused=True)
    janitor = replace(JANITOR, directory_id="ab" * 16)
    for record, former in ((node, NODE_OF_0_3_0), (janitor, JANITOR_OF_0_3_0)):
        written, expected = json.loads(record.pack()), json.loads(former)
        assert {field: written[field] for field in expected} == expected
        assert {field: type(written[field]) for field in expected} == {
            field: type(value) for field, value in expected.items()
        }


@pytest.mark.requirement("T3")
def test_a_node_of_0_3_0_takes_spare_room_for_no_node() -> None:
    """It takes every file in the folder that ends in `.json` for one, and counts one that it cannot read as strange."""
    assert not spare_file(0).endswith(".json")
