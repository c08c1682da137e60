"""Locates that name the daemon which has the objects: its tier is asked first, and nothing else is (ADR 80)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rigs.engine_rig import CHUNK, audit, path
from tests.rigs.tier_rig import COMMIT, boundary, rig_over

SOURCE = (1 << 64) - 7


@pytest.mark.requirement("B3")
def test_a_named_source_is_asked_anew_and_the_answer_says_its_tier() -> None:
    keys = path("p", 3)
    rig, client = rig_over(keys)
    rig.shared.source_id = SOURCE
    answers = client.locate_later(keys, source_id=SOURCE, request="r")
    rig.shared.run()
    assert [(one.boundary_tokens, one.source_tier) for one in answers] == [(3 * CHUNK, "nfs")]
    assert rig.shared.again == [True]
    assert (rig.counter("named_sources.peer"), rig.counter("named_sources.unknown")) == (1, 0)
    (again,) = client.locate_later(keys, source_id=SOURCE)
    assert again.source_tier == "nfs", "also where nothing has to be asked"


@pytest.mark.requirement("B3")
def test_what_a_named_source_does_not_have_ends_the_lookup_as_ever() -> None:
    rig, client = rig_over(path("p", 1))
    rig.shared.source_id = SOURCE
    answers = client.locate_later(path("absent", 20), source_id=SOURCE)
    rig.shared.run()
    assert [(one.boundary_tokens, one.miss, one.source_tier) for one in answers] == [(0, "probe_absent", "nfs")]
    assert [len(names) for names in rig.shared.searched] == [16], "no other tier is there to be asked"


@pytest.mark.requirement("B3")
def test_a_request_that_names_no_daemon_is_looked_up_as_before() -> None:
    keys = path("p", 3)
    rig, client = rig_over(keys)
    assert boundary(client, keys) == 3
    assert rig.shared.again == [False]
    assert (rig.counter("named_sources.peer"), rig.counter("named_sources.unknown")) == (0, 0)


@pytest.mark.requirement("B3")
@pytest.mark.parametrize("why", ["another arena", "not known yet", "another tenant's tier", "a tier that is disabled"])
def test_a_name_that_selects_no_peer_changes_nothing(why: str) -> None:
    keys = path("p", 3)
    options = {"shared": replace(COMMIT, tenant="b")} if why == "another tenant's tier" else {}
    rig, client = rig_over(keys, **options)
    rig.shared.source_id = {"another arena": 8, "not known yet": 0}.get(why, SOURCE)
    rig.shared.readable = why != "a tier that is disabled"
    answers = client.locate_later(keys, source_id=SOURCE)
    rig.shared.run()
    found = 3 * CHUNK if why in ("another arena", "not known yet") else 0
    assert [(one.boundary_tokens, one.source_tier) for one in answers] == [(found, "")]
    assert not any(rig.shared.again)
    assert (rig.counter("named_sources.peer"), rig.counter("named_sources.unknown")) == (0, 1)


@pytest.mark.requirement("B3")
def test_a_named_lookup_asks_again_for_what_another_lookup_may_not_have_asked_for() -> None:
    """The other one takes for absent what was absent a moment ago."""
    keys = path("p", 3)
    rig, client = rig_over(keys)
    rig.shared.source_id = SOURCE
    first = client.locate_later(keys)
    named = client.locate_later(keys, source_id=SOURCE)
    (search,) = rig.shared.searches
    rig.shared.search(search, answered=False)
    assert [one.boundary_tokens for one in first] == [0] and not named
    rig.shared.run()
    assert [(one.boundary_tokens, one.source_tier) for one in named] == [(3 * CHUNK, "nfs")]
    assert rig.shared.again == [False, True]
    audit(rig.depot)


@pytest.mark.requirement("B3")
def test_a_lookup_waits_for_what_a_named_one_asks_for_and_asks_for_nothing_twice() -> None:
    keys = path("p", 3)
    rig, client = rig_over(keys)
    rig.shared.source_id = SOURCE
    named = client.locate_later(keys, source_id=SOURCE)
    other = client.locate_later(path("p", 4))
    rig.shared.run()
    assert [one.boundary_tokens for one in (*named, *other)] == [3 * CHUNK, 3 * CHUNK]
    assert [len(names) for names in rig.shared.searched] == [3, 1] and rig.shared.again == [True, False]
