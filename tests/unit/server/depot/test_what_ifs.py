"""What-if curves of a depot: fed by the first lookup of each request, by tick, and seen in its status."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from kvdepot.core.calls import Kind
from kvdepot.core.report import WhatIfStatus
from kvdepot.core.what_if import REQUESTS_MIN, WhatIf
from kvdepot.server.depot.loads import what_ifs
from kvdepot.server.depot.types import TierConfig, WritePolicy

from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Rig, path


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


def test_a_disk_that_is_not_given_everything_has_an_upper_bound() -> None:
    for write in WritePolicy:
        rig = Rig(tier=TierConfig(write=write))
        assert curve(rig, 1).upper_bound == (write in (WritePolicy.SECOND_USE, WritePolicy.AUTO))
        assert not curve(rig).upper_bound


def test_generated_chunks_are_there_in_the_next_turn() -> None:
    rig = Rig()
    client = rig.attach(spec=DENSE)
    for number in range(REQUESTS_MIN // 2):
        keys, request = path(f"p{number}", 4), f"r{number}"
        client.locate(keys[:2], request=request)
        client.store(keys[:3], request=request)
        client.end_request(request)
        client.locate(keys, request=f"s{number}")
        rig.depot.tick()
    assert {one.hit_ratio for one in curve(rig).points} == {0.5}, "3 of 2 + 4 chunks"


def test_paths_of_requests_in_progress_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_ifs, "_PATHS_BYTES_MAX", 4096)
    rig = Rig()
    client = rig.attach(spec=DENSE)
    for number in range(100):
        client.locate(path(f"p{number}", 2), request=f"r{number}")
        client.store(path(f"p{number}", 3), request=f"r{number}")
    found = rig.depot._what_ifs
    assert 0 < len(found._paths) <= 8
    assert 0 < found._paths_bytes <= 4096
    for number in range(100):
        client.end_request(f"r{number}")
    assert (len(found._paths), found._paths_bytes) == (0, 0)


def test_what_nobody_may_resume_after_is_not_counted() -> None:
    rig = Rig()
    client = rig.attach(spec=DENSE)
    for number in range(REQUESTS_MIN):
        client.locate(path("p", 4), high_tokens=2 * CHUNK, request=f"r{number}")
        rig.depot.tick()
    assert [one.hit_ratio for one in curve(rig).points][2:] == [(REQUESTS_MIN - 1) / REQUESTS_MIN] * 4


def test_a_failure_of_the_sketch_costs_no_call_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    rig = Rig()
    client = rig.attach(spec=DENSE)
    client.locate(path("p", 2), request="q")
    for name in ("asked", "computed", "work", "status"):
        monkeypatch.setattr(WhatIf, name, fail)
    client.locate(path("p", 2), request="r")
    client.store(path("p", 3), request="q")
    client.end_request("q")
    rig.depot.tick()
    assert rig.depot.status().tier.what_if is None
    assert rig.counter("internal_errors.what_if") == 4


def test_other_watermarks_begin_another_curve() -> None:
    """A disk has watermarks of its own, and RAM above it."""
    rig = Rig(tier=TierConfig())
    client = rig.attach(spec=DENSE)

    numbers = count()

    def asked() -> list[int]:
        client.locate(path("p", 2), request=f"r{next(numbers)}")
        rig.depot.tick()
        return [curve(rig).requests, curve(rig, 1).requests]

    asked()
    rig.depot.configure(rig.config, {})
    assert asked() == [2, 2], "nothing has changed"
    rig.depot.configure(rig.config, {"memory": TierConfig(high_watermark=0.8, low_watermark=0.7)})
    assert asked() == [3, 1]
    rig.depot.configure(replace(rig.config, high_watermark=0.8, low_watermark=0.7), {})
    assert asked() == [1, 1]


def test_a_shared_tier_has_no_curve() -> None:
    rig = Rig(shared=TierConfig())
    assert [one.what_if for one in rig.depot.status().lower_tiers] == [None]
