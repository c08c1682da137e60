"""A short siege: hostile users send anything, and an honest engine is served every byte of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.flatness import grown
from tests.rigs.other_uids import needs_root
from tests.rigs.seeds import RUN_SEED
from tests.siege.siege import Sample, Siege

pytestmark = needs_root


@pytest.fixture
def siege(tenants: bool) -> Iterator[Siege]:
    siege = Siege(RUN_SEED, tenants=tenants)
    try:
        yield siege
    finally:
        siege.close()


def _holds(siege: Siege, seconds: float, calls_min: int) -> None:
    outcome = siege.run(seconds)
    assert not outcome.findings, outcome.findings[:5]
    assert outcome.calls.total() > calls_min
    before, attacked, _ = outcome.served.values()
    assert before.objects and attacked.objects
    assert {"attach", "calls", "frame", "grpc", "http", "socket"} <= {name.partition(":")[0] for name in outcome.calls}


@pytest.mark.requirement("S1", "S4", "I2", "I3")
@pytest.mark.parametrize("tenants", [False, pytest.param(True, marks=pytest.mark.long(seconds=30))], ids=["one", "two"])
@pytest.mark.timeout(300)
def test_hostile_users_find_no_internal_error_and_no_wrong_byte_in_seconds(siege: Siege) -> None:
    _holds(siege, 18, 500)


@pytest.mark.requirement("S1", "S4", "I2", "I3")
@pytest.mark.parametrize("tenants", [False, True], ids=["one", "two"])
@pytest.mark.long(seconds=160)
@pytest.mark.timeout(1200)
def test_hostile_users_find_no_internal_error_and_no_wrong_byte_in_minutes(siege: Siege) -> None:
    _holds(siege, 150, 5_000)


def test_what_grows_is_found() -> None:
    samples = [Sample(50, 9, 4, 48.0)] * 8 + [Sample(50, 9, 5, 60.0)] * 8
    assert grown(samples, {"descriptors": 0, "children": 0}, {"private_mib": 10.0}) == [
        "children: 4, then 5",
        "private_mib: 12.0 more",
    ]
