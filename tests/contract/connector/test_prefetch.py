"""What the daemon hears of a request that waits: how much time there is, and that it has ended."""

from __future__ import annotations

from collections import Counter

import pytest
from kvdepot.core.calls import EndRequestCall, LocateCall

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Make, cold, prompt


def ended(depot: DirectDepot) -> Counter[str]:
    return Counter(call.request_id for call in depot.calls if isinstance(call, EndRequestCall))


@pytest.mark.requirement("P5")
def test_a_lookup_says_what_is_left_of_the_load_timeout_beside_the_copies(make: Make, depot: DirectDepot) -> None:
    make(settings={"load_timeout_seconds": 8}).add(prompt(4.5))
    (call,) = [call for call in depot.calls if isinstance(call, LocateCall)]
    assert call.budget_seconds == 6.0
    assert call.request_id


def test_the_daemon_hears_of_a_request_that_was_aborted_in_the_queue(make: Make, depot: DirectDepot) -> None:
    engine = make()
    request_id = engine.add(prompt(4.5))
    engine.abort(request_id)
    engine.run()
    assert ended(depot) == {request_id: 1}
    engine.assert_clean()


def test_the_daemon_hears_once_of_every_request_whatever_became_of_it(make: Make, depot: DirectDepot) -> None:
    first, second = make(), make()
    tokens = prompt(6.5)
    assert first.generate(tokens) == cold(tokens)  # stored
    assert first.generate(tokens) == cold(tokens)  # nothing to load, nothing to store
    assert second.generate(tokens) == cold(tokens)  # loaded
    assert list(second.hits.values()) == [6 * BLOCK]
    assert ended(depot) == dict.fromkeys([*first.tokens, *second.tokens], 1)


def test_a_request_that_was_never_looked_up_is_heard_of_at_its_end_alone(make: Make, depot: DirectDepot) -> None:
    engine = make()
    engine.generate(prompt(0.5), max_tokens=1)
    assert list(ended(depot).values()) == [1], "its tokens count"
    assert not depot.count(LocateCall)
