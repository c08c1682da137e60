"""The verdict: each problem has a cause, an alert of its name, and an entry of its name in the operations manual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from kvdepot.core.health import CHECKS, DAY, ERRORS, EVENTS, FLOWS, HOUR, MINUTES_15, health
from kvdepot.core.report import DaemonStatus, PeerStatus, SwitchesStatus, TierStatus
from kvdepot.core.verdict import PROBLEMS_MAX, Health, Problem, Verdict

RAM = TierStatus("ram", "ram", 1, state="ready")
NVME = TierStatus("nvme", "disk", 1, state="ready", breaker="closed")
POOL = TierStatus("pool", "shared", 1, state="ready", breaker="closed", node="a", janitor="b")
FLEET = TierStatus(
    "fleet", "peer", 1, state="ready", breaker="closed",
    peers=(PeerStatus("10.0.0.1:7448", "ready"), PeerStatus("10.0.0.4:7448", "itself")),
)  # fmt: skip
OUT = replace(FLEET, peers=(
    PeerStatus("10.0.0.1:7448", "ready"), PeerStatus("10.0.0.2:7448", "disabled", "it hangs"),
    PeerStatus("10.0.0.3:7448", "disabled", "refused"), PeerStatus("10.0.0.4:7448", "itself"),
))  # fmt: skip
WELL = DaemonStatus("1", 1, 1000.0, ready=True, reason="", arena_id=1, run=1, tiers=(RAM, NVME, POOL, FLEET))
Grown = Mapping[tuple[str, float], Mapping[str, float]]


def tiers(*changed: TierStatus) -> DaemonStatus:
    return replace(WELL, tiers=(RAM, *changed))


def judged(status: DaemonStatus = WELL, grown: Grown | None = None) -> Health:
    return health(status, lambda family, seconds: (grown or {}).get((family, seconds), {}))


DAMAGES = {"nvme/corrupt": 2.0, "nvme/torn": 7.0, "pool/forged": 3.0, "pool/unkeyed": 4.0, "pool/unknown_key": 1.0}
CAUSES: Mapping[str, tuple[DaemonStatus, Grown, str, str]] = {
    "NOT_READY": (replace(WELL, ready=False, reason="starting"), {}, "starting", ""),
    "LOADS_OFF": (
        replace(WELL, switches=SwitchesStatus(loads_off=True, loads_off_seconds=720.0)), {},
        "for all namespaces, for 12 min", "kvdepotctl loads on",
    ),
    "STORES_OFF": (
        replace(WELL, switches=SwitchesStatus(stores_off_namespaces=tuple(bytes([n]) * 16 for n in range(5)))), {},
        "for 000000000000, 010101010101, 020202020202 and 2 more", "kvdepotctl stores on 000000000000",
    ),
    "TIER_DEGRADED": (tiers(replace(NVME, state="read-only", reason="no space")), {}, "nvme: no space", ""),
    "TIER_DISABLED": (
        tiers(replace(NVME, state="offline", breaker="probing")), {}, "nvme: its path fails or hangs", "",
    ),
    "PEER_UNREACHABLE": (
        tiers(OUT), {}, "fleet: of 3 peers, 10.0.0.2:7448 cannot be asked, and 1 more: it hangs", "",
    ),
    "NO_JANITOR": (
        tiers(replace(POOL, janitor="")), {}, "pool: no node is the janitor, so soon no node can write", "",
    ),
    "WORKERS_HANG": (
        WELL, {("io_workers", MINUTES_15): {"nvme/abandoned": 2.0, "nvme/started": 9.0}},
        "nvme: 2 I/O workers hung in the last 15 min", "",
    ),
    "DAMAGED_OBJECTS": (
        WELL, {("tier_damaged_objects", HOUR): {"nvme/corrupt": 2.0, "nvme/torn": 7.0}},
        "nvme: 2 damaged objects in the last hour", "",
    ),
    "FORGED_OBJECTS": (
        WELL, {("tier_damaged_objects", HOUR): {"pool/forged": 3.0}},
        "pool: 3 objects in the last hour that nobody with the key wrote", "",
    ),
    "OTHER_KEYS": (
        WELL, {("tier_damaged_objects", HOUR): {"pool/unkeyed": 4.0, "pool/unknown_key": 1.0}},
        "pool: 5 objects of other keys in the last hour", "",
    ),
    "CORRUPT_MEMORY": (
        WELL, {("corrupt_objects", DAY): {"": 1.0}},
        "1 object of RAM did not match the checksum in the last day", "",
    ),
    "DRIFT": (
        WELL, {("audits", DAY): {"drifted": 1.0, "equal": 900.0}},
        "1 stored object differed from recomputed ones in the last day", "",
    ),
    "TLS_EXPIRES": (
        replace(WELL, certificate_seconds_left=2.0 * DAY), {},
        "the certificate of [tls] expires in 2 d", "renew the file; the daemon reads it again",
    ),
    "PEERS_REFUSED": (
        WELL, {("peer_refused_connections", MINUTES_15): {"not_allowed": 2.0, "handshake": 7.0}},
        "2 refusals of peers in the last 15 min: not_allowed", "name the peer in [tls] allow_peers",
    ),
    "LOOP_LATE": (
        WELL, {("loop_ticks", MINUTES_15): {"late": 5.0, "in_time": 95.0}},
        "5 % of the ticks were late by more than 0.25 s in the last 15 min", "",
    ),
    "DEFECT": (
        WELL,
        {("failed_calls", HOUR): {"INTERNAL": 1.0, "NOT_FOUND": 9.0}, ("internal_errors", HOUR): {"tick": 2.0}},
        "3 internal errors in the last hour", "report the traceback in the daemon's log",
    ),
    "LEASES_EXPIRE": (
        WELL, {("expired_leases", HOUR): {"read": 1.0, "write": 2.0}},
        "3 leases passed the deadline in the last hour", "",
    ),
    "LEAKED_OBJECTS": (
        WELL, {("leaked_objects", DAY): {"": 2.0}},
        "memory of 2 objects is not reused, because a process may still write to it", "",
    ),
    "OFFERS_LATE": (
        WELL, {("misses", MINUTES_15): {"not_in_time": 10.0, "probe_late": 5.0}, ("locates", MINUTES_15): {"": 100.0}},
        "15 % of the lookups of the last 15 min got nothing in time", "",
    ),
    "STORES_REFUSED": (
        WELL, {("reserved_objects", MINUTES_15): {"granted": 70.0, "later": 20.0, "no_room": 10.0, "present": 900.0}},
        "30 % of the stores of the last 15 min got no room or credit", "",
    ),
    "BUCKET_BUDGET_SPENT": (
        WELL, {("bucket_refused_jobs", HOUR): {"bucket/requests": 2.0, "bucket/read": 1.0}},
        "bucket: a budget of its bucket for this day was too small in the last hour", "",
    ),
    "WRITES_DROPPED": (
        WELL,
        {
            ("tier_writes", MINUTES_15): {"nvme/ok": 30.0, "pool/ok": 100.0},
            ("tier_writes_dropped", MINUTES_15): {"nvme/queue_full": 70.0, "pool/no_parent": 900.0},
        },
        "nvme: 70 % of the writes of the last 15 min were dropped", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("left", "message"),
    [(7.0 * DAY, ""), (7.0 * DAY - 1, "expires in 6 d 23 h"), (-3600.0, "expired 1 h ago"), (None, "")],
)
def test_a_certificate_is_a_problem_in_its_last_week_and_after_it(left: float | None, message: str) -> None:
    found = health(replace(WELL, certificate_seconds_left=left), lambda *_: {})
    assert [one.message for one in found.problems] == ([f"the certificate of [tls] {message}"] if message else [])


@pytest.mark.requirement("O1")
def test_a_daemon_that_is_well_has_no_problem_and_every_code_has_a_cause() -> None:
    assert judged() == Health(Verdict.OK)
    assert set(CAUSES) == set(CHECKS)


@pytest.mark.requirement("O1")
@pytest.mark.parametrize("code", CHECKS)
def test_each_cause_gives_its_problem_and_no_other(code: str) -> None:
    status, grown, message, fix = CAUSES[code]
    error = code in ("NOT_READY", "DAMAGED_OBJECTS", "FORGED_OBJECTS", "CORRUPT_MEMORY", "DRIFT")
    found = judged(status, grown)
    assert found == Health(Verdict.ERR if error else Verdict.WARN, (Problem(code, error, message, fix),))


@pytest.mark.requirement("O1")
def test_errors_come_first_and_decide() -> None:
    grown = {("tier_damaged_objects", HOUR): DAMAGES, ("audits", DAY): {"drifted": 1.0}}
    found = judged(replace(WELL, switches=SwitchesStatus(loads_off=True)), grown)
    assert found.verdict is Verdict.ERR
    assert [problem.code for problem in found.problems] == [
        "DAMAGED_OBJECTS", "FORGED_OBJECTS", "DRIFT", "LOADS_OFF", "OTHER_KEYS",
    ]  # fmt: skip
    assert [problem.error for problem in found.problems] == [True, True, True, False, False]


def test_damage_that_came_from_a_peer_is_looked_for_at_the_peer() -> None:
    (problem,) = judged(WELL, {("tier_damaged_objects", HOUR): {"fleet/corrupt": 2.0}}).problems
    assert problem.message == "fleet: 2 damaged objects came from its peers in the last hour"
    assert "kvdepotctl peers" in problem.fix


def test_a_server_of_peers_that_fails_is_a_problem_and_one_that_starts_is_none() -> None:
    grown = {("peer_servers", MINUTES_15): {"started": 3.0, "crashed": 1.0, "killed": 1.0}}
    (problem,) = judged(WELL, grown).problems
    assert problem.message == "the process that sends to peers failed 2 times in the last 15 min"
    assert judged(WELL, {("peer_servers", MINUTES_15): {"started": 1.0}}) == Health(Verdict.OK)


def test_few_events_are_no_share_and_a_young_node_has_no_janitor_yet() -> None:
    few = {("misses", MINUTES_15): {"not_in_time": 40.0}, ("locates", MINUTES_15): {"": 99.0}}
    assert judged(WELL, few) == Health(Verdict.OK)
    young = replace(tiers(replace(POOL, janitor="")), uptime_seconds=5.0)
    assert judged(young) == Health(Verdict.OK)


def test_the_number_of_problems_is_bounded() -> None:
    many = tuple(replace(NVME, name=f"n{number}", state="offline") for number in range(100))
    assert len(judged(replace(WELL, tiers=many)).problems) == PROBLEMS_MAX


def test_every_family_that_a_check_asks_for_is_remembered_for_as_long() -> None:
    asked: set[tuple[str, float]] = set()

    def growth(family: str, seconds: float) -> Mapping[str, float]:
        asked.add((family, seconds))
        return {}

    health(WELL, growth)
    assert {family for family, seconds in asked if seconds > MINUTES_15} <= set(EVENTS)
    assert {family for family, _ in asked} == {*EVENTS, *FLOWS}


def test_a_code_is_an_alert_and_an_anchor() -> None:
    problem = Problem("TIER_DEGRADED", False, "")
    assert (problem.alert, problem.anchor) == ("KVDepotTierDegraded", "tier-degraded")
    assert set(CHECKS) >= ERRORS


@pytest.mark.parametrize("fault", [{"state": "offline"}, {"state": "degraded"}, {"breaker": "open"}])
def test_of_a_tier_that_cannot_be_used_no_peer_is_a_problem_of_its_own(fault: dict[str, str]) -> None:
    codes = {problem.code for problem in judged(tiers(replace(OUT, **fault))).problems}  # type: ignore[arg-type]
    assert len(codes) == 1 and codes <= {"TIER_DEGRADED", "TIER_DISABLED"}
