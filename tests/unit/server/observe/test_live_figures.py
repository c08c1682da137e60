"""The figures of the live page: the last hour by minute, bounded, and without names."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from kvdepot.core.calls import RequestEnd
from kvdepot.core.explanation import FIX, MEANING
from kvdepot.core.health import CHECKS, health
from kvdepot.core.misses import MissReason
from kvdepot.core.records import Lookup, RequestRecord
from kvdepot.core.report import CapacityFactor, DaemonStatus, SessionStatus, SwitchesStatus, WhatIfStatus
from kvdepot.server.depot.counters import Counters
from kvdepot.server.observe.live_figures import LiveFigures

from tests.fakes.daemon_status import NVME, RAM, STATUS

SECRET = "secret"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def _live(counters: Counters, clock: Clock, status: DaemonStatus = STATUS, *records: RequestRecord) -> LiveFigures:
    return LiveFigures(counters, clock, lambda: status, lambda count: records[:count])


def _ended(end: RequestEnd | None) -> RequestRecord:
    return RequestRecord(f"{SECRET}-engine", f"{SECRET}-request", b"\xab" * 32, 3.0, end=end, ended_seconds_ago=1.0)


@pytest.mark.requirement("O5")
def test_each_minute_of_the_last_hour_has_what_happened_in_it() -> None:
    counters, clock = Counters(), Clock()
    live = _live(counters, clock)
    for second in range(2 * 3600):
        clock.now += 1
        if second >= 3600:
            counters.add("prompt_tokens", 10)
            counters.add("served_tokens.ram", 5 if second < 5400 else 10)
            counters.add("granted_read_bytes", 7)
            counters.add("misses.unknown", 2)
            counters.add("misses.not_in_time", 3)
        live.note()
    hour = live.figures()["last_hour"]
    assert hour["hit_rate"]["percent"] == pytest.approx(75, abs=1)
    assert list(hour["hit_rate"]["percent_by_source"]) == ["ram"]
    assert list(hour["misses"]) == ["not_in_time", "unknown"], "the most frequent first"
    minutes = hour["minutes"]
    assert len(minutes) == 60
    assert [minutes[at]["percent"] for at in (1, 20, 40, 59)] == [50, 50, 100, 100]
    assert sum(one["loaded_bytes"] for one in minutes) == pytest.approx(7 * 3600, rel=0.01)
    clock.now += 30
    counters.add("prompt_tokens", 1)
    assert live.figures()["last_hour"]["minutes"][-1]["percent"] < 100, "also what no sample has yet"


def test_an_hour_without_traffic_has_no_hit_rate() -> None:
    hour = _live(Counters(), Clock()).figures()["last_hour"]
    assert hour["hit_rate"]["percent"] is None
    assert {one["percent"] for one in hour["minutes"]} == {None}


def test_a_busy_day_keeps_no_more_than_an_hour_of_samples() -> None:
    counters, clock = Counters(), Clock()
    live = _live(counters, clock)
    for _ in range(86_400 // 5):
        clock.now += 5
        counters.add("prompt_tokens", 1)
        live.note()
    assert len(live._history._samples) <= 362


def test_a_tier_has_its_curve_in_percent_and_none_without_evidence() -> None:
    points = (CapacityFactor(1.0, 1 << 30, 0.25, True, 280), CapacityFactor(8.0, 8 << 30))
    ram = replace(RAM, what_if=WhatIfStatus(60.0, 300, 200, 0.5, points, upper_bound=True))
    first, second = _live(Counters(), Clock(), replace(STATUS, tiers=(ram, NVME))).figures()["tiers"]
    assert second["what_if"] is None
    assert first["what_if"]["measured_percent"] == 50
    assert first["what_if"]["upper_bound"]
    assert [one["sampled_requests"] for one in first["what_if"]["points"]] == [280, 0]
    assert [(one["factor"], one["percent"], one["full"]) for one in first["what_if"]["points"]] == [
        (1.0, 25.0, True), (8.0, None, False),
    ]  # fmt: skip


@pytest.mark.requirement("O5")
def test_nothing_names_a_namespace_a_model_an_engine_or_a_request() -> None:
    ids = (b"\xab" * 32, b"\xcd" * 32)
    status = replace(
        STATUS,
        switches=SwitchesStatus(loads_off_namespaces=ids, stores_off_namespaces=ids[:1]),
        sessions=tuple(SessionStatus(f"{SECRET}-{number}", 2, 2 - number % 2) for number in range(100)),
    )
    status = replace(status, health=health(status, lambda _family, _seconds: {}))
    forged = RequestEnd(loaded_tokens=5, miss=f"{SECRET}-reason", prompt_tokens=9, source=f"{SECRET}-source")
    honest = RequestEnd(miss="unknown", prompt_tokens=9)
    records = (_ended(forged), _ended(honest), _ended(None))
    found = _live(Counters(), Clock(), status, *records).figures()
    text = json.dumps(found)
    assert SECRET not in text
    assert "abab" not in text
    assert [(one["code"], one["message"]) for one in found["problems"]] == [
        ("LOADS_OFF", "for 2 namespaces"), ("STORES_OFF", "for 1 namespace"),
    ]  # fmt: skip
    assert found["engines"] == {"attached": 100, "incomplete": 50, "ranks": 200, "ranks_attached": 150}
    assert [(one["source"], one["reason"]) for one in found["requests"]] == [("", "other"), ("", "unknown"), ("", "")]


@pytest.mark.requirement("O5")
def test_a_request_is_explained_in_the_sentences_of_explain_and_without_names() -> None:
    def ask(end: RequestEnd | None, miss: str = "") -> tuple[str, str]:
        lookup = Lookup(4, 384, 1536, 2, {}, 0, 0, miss=miss, missing_key=b"\xab" * 16, other_namespace=b"\xab" * 32)
        record = replace(_ended(end), lookup=lookup, differences=(SECRET,), chunk_tokens=384)
        (shown,) = _live(Counters(), Clock(), STATUS, record).figures()["requests"]
        assert SECRET not in json.dumps(shown) and "abab" not in json.dumps(shown)
        return shown["answer"], shown["fix"]

    for reason in sorted(set(MissReason) - {MissReason.OTHER_NAMESPACE, MissReason.TIMED_OUT, MissReason.TOO_SHORT}):
        assert ask(RequestEnd(miss=reason, prompt_tokens=9)) == (f"{reason}: {MEANING[reason]}", FIX[reason])
    told = ask(RequestEnd(miss="too_short", prompt_tokens=9))
    assert told == ("prompt of 9 tokens, a chunk has 384", FIX[MissReason.TOO_SHORT])
    known = ask(RequestEnd(loaded_tokens=5, prompt_tokens=9, source="ram", load_seconds=0.01), "evicted")
    assert known == ("5 of 9 tokens from ram in 10 ms; the rest: evicted", FIX[MissReason.EVICTED])
    assert ask(None)[0] == "0 tokens were offered; the engine was gone before it could report"
    forged = ask(RequestEnd(loaded_tokens=5, prompt_tokens=9, source=SECRET, miss=SECRET))
    assert forged == ("5 of 9 tokens; the rest: other", FIX[MissReason.OTHER])


@pytest.mark.requirement("O5", "S1")
def test_the_page_says_nothing_of_another_namespace_that_has_the_prompt() -> None:
    lookup = Lookup(4, 384, 1536, 2, {}, 0, 0, miss="other_namespace", other_namespace=b"\xab" * 32)
    for miss in ("unknown", "other_namespace"):
        record = replace(_ended(RequestEnd(miss=miss, prompt_tokens=9)), lookup=lookup)
        (shown,) = _live(Counters(), Clock(), STATUS, record).figures()["requests"]
        assert shown["reason"] == "unknown" and "namespace" not in shown["answer"] + shown["fix"]


def test_no_text_of_any_problem_names_a_namespace_or_an_engine() -> None:
    """A check that begins to print an id is found here."""
    status = replace(
        STATUS,
        switches=SwitchesStatus(loads_off_namespaces=(b"\xab" * 32,), stores_off_namespaces=(b"\xab" * 32,)),
        sessions=(SessionStatus(f"{SECRET}-engine"),),
        certificate_seconds_left=0.0,
    )
    labels = (
        "",
        "drifted",
        "INTERNAL",
        "late",
        "later",
        "not_allowed",
        "not_in_time",
        "nvme/abandoned",
        "nvme/forged",
        "nvme/unkeyed",
        "nvme/read",
    )
    grown = dict.fromkeys((*labels, "nvme/queue_full"), 1000.0) | {"later": 1e6}
    verdict = health(status, lambda _family, _seconds: grown)
    shown = _live(Counters(), Clock(), replace(status, health=verdict)).figures()["problems"]
    missing = set(CHECKS) - {problem["code"] for problem in shown}
    assert missing <= {
        "LOOP_LATE", "NOT_READY", "TIER_DEGRADED", "TIER_DISABLED", "PEER_UNREACHABLE", "NO_JANITOR", "WRITES_DROPPED",
    }  # fmt: skip
    assert SECRET not in json.dumps(shown)
    assert "abab" not in json.dumps(shown)
