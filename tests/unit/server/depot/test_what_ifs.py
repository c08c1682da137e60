"""What-if curves of a depot: fed by the first lookup of each request, by tick, and seen in its status."""

from __future__ import annotations

from kvdepot.core.calls import Kind
from kvdepot.core.report import WhatIfStatus
from kvdepot.core.what_if import REQUESTS_MIN
from kvdepot.server.depot.types import TierConfig

from tests.rigs.engine_rig import DENSE, HYBRID, Rig, path


def curve(rig: Rig, tier: int = 0) -> WhatIfStatus:
    status = rig.depot.status()
    found = (status.tier, *status.lower_tiers)[tier].what_if
    assert found is not None
    return found


def test_a_curve_has_what_was_asked_for_and_what_was_offered() -> None:
    rig = Rig()
    client = rig.attach(spec=DENSE)
    keys = path("p", 4)
    client.store(keys[:2])
    for number in range(REQUESTS_MIN):
        client.locate(keys, request=f"r{number}")
        rig.depot.tick()
    found = curve(rig)
    assert found.requests == REQUESTS_MIN
    assert found.measured_hit_ratio == 0.5
    expected = (REQUESTS_MIN - 1) / REQUESTS_MIN
    assert [one.hit_ratio for one in found.points][2:] == [expected] * 4
    (one,) = [one for one in found.points if one.factor == 1.0]
    assert one.capacity_bytes == rig.depot.status().tier.capacity_bytes


def test_only_the_first_lookup_of_a_request_counts() -> None:
    rig = Rig()
    client = rig.attach(spec=DENSE)
    for request in ("one", "one", "", "two"):
        client.locate(path("p", 2), request=request)
    rig.depot.tick()
    assert curve(rig).requests == 2


def test_a_lookup_does_not_wait_for_the_sketch() -> None:
    rig = Rig()
    client = rig.attach(spec=DENSE)
    client.locate(path("p", 2), request="r")
    assert curve(rig).requests == 0
    rig.depot.tick()
    assert curve(rig).requests == 1


def test_a_hybrid_model_resumes_at_ends_only() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    assert Kind.STATE in HYBRID.object_bytes
    for number in range(REQUESTS_MIN):
        client.locate((*path("system", 2), *path(f"own {number}", 1)), request=f"r{number}")
        rig.depot.tick()
    assert {one.hit_ratio for one in curve(rig).points} == {0.0}


def test_a_disk_has_a_curve_of_its_own() -> None:
    rig = Rig(tier=TierConfig())
    client = rig.attach(spec=DENSE)
    client.locate(path("p", 2), request="r")
    rig.depot.tick()
    assert curve(rig, 1).requests == 1
    assert curve(rig, 1).points[2].capacity_bytes == rig.depot.status().lower_tiers[0].capacity_bytes


def test_a_shared_tier_has_no_curve() -> None:
    rig = Rig(shared=TierConfig())
    assert [one.what_if for one in rig.depot.status().lower_tiers] == [None]
