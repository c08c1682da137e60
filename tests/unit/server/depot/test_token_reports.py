"""What engines report of their prompts: counted once, and believed as far as it can be true."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import EndRequestCall, RequestEnd, TokenReport
from kvdepot.core.hit_rate import HitRate

from tests.rigs.engine_rig import Rig


def report(rig: Rig, session: bytes, tokens: TokenReport, end: RequestEnd = RequestEnd()) -> HitRate:  # noqa: B008
    rig.depot.end_request(EndRequestCall(session, "r", end, tokens))
    return HitRate.of(rig.depot.status().counters)


@pytest.mark.requirement("O2")
def test_reports_of_all_engines_add_up_and_a_repeated_one_counts_once() -> None:
    rig = Rig()
    one, other = rig.attach("one"), rig.attach("other", 11)
    first = TokenReport(7, 100, 10, {"ram": 50}, 0.5)
    for _ in range(2):  # its answer was lost
        assert report(rig, one.session, first) == HitRate(100, {"engine": 10, "ram": 50}, 0.5)
    assert report(rig, one.session, TokenReport(6, 100)).prompt_tokens == 100, "an older one"
    assert report(rig, other.session, first) == HitRate(200, {"engine": 20, "ram": 100}, 1.0)
    assert report(rig, one.session, TokenReport()).prompt_tokens == 200, "an older engine reports nothing"


@pytest.mark.requirement("O2")
def test_engines_make_no_labels_and_no_more_hits_than_tokens() -> None:
    rig = Rig()
    client = rig.attach("one")
    assert report(rig, client.session, TokenReport(1, 100, 0, {"x": 10, "y": 20})).served_tokens == {"other": 30}
    assert report(rig, client.session, TokenReport(2, 100, 60, {"ram": 41})).prompt_tokens == 100
    assert report(rig, client.session, TokenReport(3, 2**64 - 1)).prompt_tokens == 100
    assert report(rig, client.session, TokenReport(4, 100, 0, {"ram": 100}, 1.7e308)).saved_seconds == 0.0
    assert rig.depot.status().counters["invalid_token_reports"] == 3


@pytest.mark.requirement("O2")
def test_a_load_that_supplied_tokens_is_timed_once_under_its_source() -> None:
    rig = Rig()
    client = rig.attach("one")
    end = RequestEnd(0, 50, "", 100, "ram", 0.02)
    for _ in range(2):  # its answer was lost
        report(rig, client.session, TokenReport(1, 100, 0, {"ram": 50}), end)
    report(rig, client.session, TokenReport(2, 100, 0, {"x": 50}), RequestEnd(0, 50, "", 100, "an engine's word", 40.0))
    report(rig, client.session, TokenReport(3, 100), RequestEnd(0, 0, "timed_out", 100))
    found = {
        one.name: dict(zip(one.bounds_seconds, one.counts, strict=False))
        for one in rig.depot.counters.histogram_statuses()
    }
    assert {name: (counts[0.01], counts[0.025], counts[30.0]) for name, counts in found.items()} == {
        "load_seconds.ram": (0, 1, 1),
        "load_seconds.other": (0, 0, 0),
    }
