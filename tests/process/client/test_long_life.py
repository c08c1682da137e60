"""One process that makes and drops engine after engine: daemon and process are as they were (I4, I5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.long_life.life import RISE_MIB_MAX, LongLife, Sample, trouble
from tests.rigs.patience import patient
from tests.rigs.seeds import RUN_SEED

ENGINES, BRIEF_ENGINES = 20, 400
LONG_ENGINES = 5000
LONG_SECONDS = 1500.0
"""A quiet machine needs half of it."""


@pytest.mark.requirement("I5")
@pytest.mark.timeout(300)
def test_hundreds_of_engines_of_a_living_process_leave_nothing() -> None:
    with LongLife(RUN_SEED) as life:
        for _ in range(3):  # what is made once: threads of pools, pages of modules
            life.one()
        before = life.sample()
        for _ in range(ENGINES):
            life.one()
            for _ in range(BRIEF_ENGINES // ENGINES):
                life.brief()
        after = life.sample()
    assert (after.sessions, after.slots) == (0, before.slots), "slots are those of the I/O workers"
    assert trouble([before, before, before, replace(after, daemon_mib=0.0, own_mib=0.0)]) == []


@pytest.mark.requirement("I5")
@pytest.mark.long(seconds=700)
@pytest.mark.timeout(LONG_SECONDS + 300)
def test_thousands_of_engines_of_one_process_leave_both_flat() -> None:
    with LongLife(RUN_SEED, say=print) as life:
        samples = life.run(engines=LONG_ENGINES, seconds=patient(LONG_SECONDS), samples=16)
    assert trouble(samples) == []
    assert life.engines == LONG_ENGINES


def test_a_long_life_that_is_not_flat_is_said_so() -> None:
    """The negative control."""
    at_first = Sample(0, 0.0, 28, 9, 5, 0, 2, 44.0, 6, 2, 199.0)
    flat = [replace(at_first, engines=number) for number in range(16)]
    assert trouble(flat) == []
    for name in ("daemon_fds", "daemon_threads", "daemon_children", "sessions", "slots", "own_fds", "own_threads"):
        grown = [replace(one, **{name: getattr(one, name) + one.engines}) for one in flat]
        assert trouble(grown) == [f"{name}: {getattr(grown[7], name)}, then {getattr(grown[15], name)}"]
    for name in ("daemon_mib", "own_mib"):
        grown = [replace(one, **{name: getattr(one, name) + one.engines * RISE_MIB_MAX / 7}) for one in flat]
        (found,) = trouble(grown)
        assert found.startswith(name)
    warming_up = [replace(one, daemon_fds=28 + min(one.engines, 4) * 10) for one in flat]
    assert trouble(warming_up) == [], "what is made once, in the first quarter"
