"""/metrics: everything that is counted is declared, exported from the start and documented; nothing falls (row P10)."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from kvdepot.core.calls import LocateCall, LocateReply
from kvdepot.core.errors import NoRoom
from kvdepot.core.report import CapacityFactor, DaemonStatus, SessionStatus, SwitchesStatus, TierStatus, WhatIfStatus
from kvdepot.proto.methods import DEPOT, encode
from kvdepot.server.depot.counters import BUCKETS_SECONDS, Counters
from kvdepot.server.observe.metric_families import CODES, FAMILIES
from kvdepot.server.observe.metric_family import Family
from kvdepot.server.observe.metrics import exposition
from kvdepot.server.observe.summary import summary_line
from kvdepot.server.rpc.depot_calls import DepotCalls
from kvdepot.server.rpc.depot_service import answer_call
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[4]
COUNTED = re.compile(r"""(?:counters\.(?:add|observe)|\bcount|_count)\(\s*f?"([a-z_]+)""")
COMPOSED = {
    f"{family}_{unit}" for family in ("prefetched", "prefetch_used", "prefetch_wasted") for unit in ("objects", "bytes")
}
"""In engine/holds.py."""
UNITS = ("bytes", "seconds", "tokens", "objects")
TIERS = (
    TierStatus("ram", "ram", 1 << 30, state="ready"),
    TierStatus("nvme", "disk", 1 << 40, state="ready", breaker="closed"),
    TierStatus("pool", "shared", 1 << 40, state="offline", breaker="open"),
    TierStatus("far", "object", 1 << 40),
)


def status(counters: Counters, *tiers: TierStatus) -> DaemonStatus:
    session = SessionStatus("e", 2, 2, True, 10, 4, 1, 3)
    return DaemonStatus(
        "1.2", 1, 1.0, True, "", 1, 1, tiers=tiers or TIERS, sessions=(session,), counters=counters.snapshot()
    )


def scraped(counters: Counters, *tiers: TierStatus) -> dict[str, float]:
    """By name and labels as Prometheus reads them."""
    text = exposition(lambda: status(counters, *tiers), counters.histograms)().decode()
    return {
        f"{sample.name}{dict(sorted(sample.labels.items())) or ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def counted_in_the_code() -> set[str]:
    files = (ROOT / "server/kvdepot/server").rglob("*.py")
    return {name for path in files for name in COUNTED.findall(path.read_text())} | COMPOSED


@pytest.mark.requirement("P10")
def test_what_the_code_counts_is_what_is_declared() -> None:
    counted = counted_in_the_code() - {"asked", "found", "absent", "unanswered", "prefetched"}  # labels, in lookups.py
    declared = {family.name for family in FAMILIES if family.samples is None}
    assert counted - declared == set(), "declare it in server/kvdepot/server/observe/metric_families.py"
    assert declared - counted - {"tier_probed_objects"} == set(), "nobody counts it"


def _series(text: str) -> list[tuple[str, list[str]]]:
    """Names of metrics in a document, with the labels in the braces behind them."""
    found = re.findall(r"\b(kvdepot_(?!pb)[a-z_]+)(?:\{([^}]*)\})?", text)
    return [(name, re.findall(r"([a-z_]+)(?:[=!~]+\"[^\"]*\")?(?:,|$)", labels)) for name, labels in found]


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("name", ("operations.md", "kvdepotctl.md", "metrics.md"))
def test_documents_name_metrics_and_labels_that_exist(name: str) -> None:
    known = {name: family for family in FAMILIES for name in (*family.series_names, family.full_name)}
    for metric, labels in _series((ROOT / "docs" / name).read_text()):
        assert metric in known
        assert set(labels) <= {*known[metric].labels, "le"}, metric


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_have_their_unit_last_and_texts_are_sentences(family: Family) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
    assert family.text.endswith(".") and family.text[0].isupper() | family.text[0].isdigit()
    for unit in UNITS:
        assert unit not in family.name or family.name.endswith(f"_{unit}"), "the unit stands last"
    if family.type == "histogram":
        assert family.name.endswith("_seconds")


def test_no_name_twice() -> None:
    names = [name for family in FAMILIES for name in family.series_names]
    assert len(names) == len(set(names))


@pytest.mark.requirement("P10")
def test_what_can_be_counted_is_there_with_0_before_it_happens() -> None:
    found = scraped(Counters(), *TIERS, TierStatus("node-a", "peer", 1))
    assert found["kvdepot_misses_total{'reason': 'no_checkpoint'}"] == 0
    assert found["kvdepot_tier_damaged_objects_total{'reason': 'corrupt', 'tier': 'nvme'}"] == 0
    assert found["kvdepot_call_seconds_count{'method': 'Locate'}"] == 0
    for family in FAMILIES:
        if family.samples is None:
            assert any(name.split("{")[0] in family.series_names for name in found), family.name


def test_only_tiers_of_its_kind_have_a_metric() -> None:
    found = scraped(Counters())
    assert not any(name.startswith("kvdepot_shared_") and "nvme" in name for name in found)
    assert not any(name.startswith("kvdepot_tier_scrubbed") and "pool" in name for name in found)
    assert not any(name.startswith("kvdepot_io_") for name in scraped(Counters(), TIERS[0]))


@pytest.mark.requirement("T5")
def test_exactly_one_state_of_each_tier_is_1() -> None:
    found = scraped(Counters())
    for tier, state in (("ram", "ready"), ("nvme", "ready"), ("pool", "offline")):
        states = {
            name for name, value in found.items() if name.startswith("kvdepot_tier_state") and tier in name and value
        }
        assert states == {f"kvdepot_tier_state{{'state': '{state}', 'tier': '{tier}'}}"}
    assert found["kvdepot_tier_breaker{'state': 'open', 'tier': 'pool'}"] == 1


@pytest.mark.requirement("P10")
def test_bounded_series_whatever_is_counted() -> None:
    """With eight tiers of each kind, every label and nothing that grows by use."""
    tiers = [TierStatus(f"t{number}", kind, 1) for kind in ("disk", "shared") for number in range(8)]
    assert len(scraped(Counters(), *tiers)) < 5_000
    assert not {label for family in FAMILIES for label in family.labels} & {"engine", "request", "id", "hash", "pid"}
    assert [family.name for family in FAMILIES if "namespace" in family.labels and "quota" not in family.name] == []


@pytest.mark.requirement("P10")
def test_no_counter_falls_and_no_series_goes() -> None:
    counters = Counters()
    scrapes = [scraped(counters)]
    for number in range(3):
        for family in FAMILIES:
            for key in family.known_keys(status(counters)):
                if family.type == "histogram":
                    counters.observe(f"{family.name}.{key}", 0.02 * number)
                elif family.samples is None:
                    counters.add(f"{family.name}.{key}", number)
        scrapes.append(scraped(counters))
    for earlier, later in pairwise(scrapes):
        growing = {name for name in earlier if re.match(r"kvdepot_\w+_(total|bucket|sum|count)\b", name)}
        assert growing
        assert all(later[name] >= earlier[name] for name in growing)


def test_a_histogram_counts_what_took_at_most_each_bound() -> None:
    counters = Counters()
    for seconds in (-1.0, 0.0005, 0.0006, 0.3, 31.0):
        counters.observe("loop_lag_seconds", seconds)
    found = scraped(counters)
    counts = [found[f"kvdepot_loop_lag_seconds_bucket{{'le': '{bound}'}}"] for bound in (0.0005, 0.001, 0.5, 30.0)]
    assert counts == [2, 3, 4, 4]
    assert found["kvdepot_loop_lag_seconds_bucket{'le': '+Inf'}"] == found["kvdepot_loop_lag_seconds_count"] == 5
    assert found["kvdepot_loop_lag_seconds_sum"] == pytest.approx(31.3011)
    assert list(BUCKETS_SECONDS) == sorted(BUCKETS_SECONDS)


class _Context:
    """What a refused call is aborted with."""

    async def abort(self, status: grpc.StatusCode, *_: object) -> None:
        raise grpc.aio.AbortError(status)


@pytest.mark.requirement("P10")
@pytest.mark.parametrize(
    ("raised", "counted"),
    [
        (None, None),
        (RuntimeError("a bug"), "INTERNAL"),
        (NoRoom("none"), "RESOURCE_EXHAUSTED"),
        (asyncio.CancelledError(), "CANCELLED"),
    ],
)
def test_calls_are_counted_by_how_they_end(raised: BaseException | None, counted: str | None) -> None:
    def locate(call: object, answer: Callable[[LocateReply], None]) -> float:
        del call
        if isinstance(raised, Exception):
            raise raised
        if raised is None:
            answer(LocateReply(0))
        return 0.0

    counters, engine = Counters(), SimpleNamespace(locate=locate)
    calls: Any = DepotCalls(
        engine, capabilities=print, committed=print, counters=counters, log=logging.getLogger("none"),  # type: ignore[arg-type]
    )  # fmt: skip
    request = encode(LocateCall(bytes(16), bytes(16), b"", 0)).SerializeToString()
    context: Any = _Context()

    async def run() -> None:
        call = asyncio.create_task(answer_call(calls, DEPOT["Locate"], request, context))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if isinstance(raised, asyncio.CancelledError):
            call.cancel()
        await call

    if raised is None:
        asyncio.run(run())
    else:
        with pytest.raises(asyncio.CancelledError if counted == "CANCELLED" else grpc.aio.AbortError):
            asyncio.run(run())
    assert counters.snapshot() == ({f"failed_calls.{counted}": 1} if counted else {})
    assert counted is None or counted in CODES
    if counted != "CANCELLED":  # whose caller has gone is not answered yet
        assert counters.histograms()["call_seconds.Locate"].cumulative()[-1] == 1


def test_the_summary_is_one_line_that_says_what_is_wrong() -> None:
    counters = Counters()
    assert summary_line(status(counters)) == (
        "kvdepotd 1.2 ready, up 1 s; ram 0 B of 1.00 GiB, nvme 0 B of 1.00 TiB, pool 0 B of 1.00 TiB disabled,"
        " far 0 B of 1.00 TiB;"
        " 1 engine; hit rate unknown: no prompt has ended yet"
    )
    for name, amount in {"prompt_tokens": 51200, "served_tokens.engine": 5120, "served_tokens.ram": 38400}.items():
        counters.add(name, amount)
    off = SwitchesStatus(loads_off=True, stores_off_namespaces=(bytes(16), b"n" * 16))
    switched = summary_line(replace(status(counters), switches=off))
    assert switched.endswith(" (engine 10 %, ram 75 %); loads off; stores off for 2 namespaces")
    sick = DaemonStatus(
        "1", 1, 7300.0, False, "stopping", 1, 1, counters=counters.snapshot(),
        tiers=(TierStatus("nvme", "disk", 2 << 40, used_bytes=3 << 39, state="read-only", reason="no space"),),
    )  # fmt: skip
    assert summary_line(sick) == (
        "kvdepotd 1 not ready (stopping), up 2 h 1 min; nvme 1.50 TiB of 2.00 TiB read-only (no space); 0 engines;"
        " hit rate 85 % of 51.2 k tokens (engine 10 %, ram 75 %)"
    )


def test_the_expected_hit_ratio_of_a_tier_is_a_gauge_by_factor_once_it_is_known() -> None:
    points = (CapacityFactor(0.5, 1 << 29, 0.25), CapacityFactor(1.0, 1 << 30, None))
    ram = replace(TIERS[0], what_if=WhatIfStatus(points=points))
    found = {
        name: value
        for name, value in scraped(Counters(), ram, *TIERS[1:]).items()
        if name.startswith("kvdepot_tier_expected_hit_ratio")
    }
    assert found == {"kvdepot_tier_expected_hit_ratio{'capacity_factor': '0.5', 'tier': 'ram'}": 0.25}
