"""What is shipped for Prometheus and Grafana asks for what exists, and alerts fire on their faults (P10, T4, T5)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.health import CHECKS, ERRORS
from kvdepot.core.report import DaemonStatus, PeerStatus, ReaderStatus, TierStatus
from kvdepot.core.verdict import Problem
from kvdepot.server.observe.metric_families import FAMILIES
from kvdepot.server.observe.metrics import exposition

from tests.rigs.manual import anchor, sections
from tests.rigs.promql import NO_PROMTOOL, promtool, series, why_unknown

ROOT = Path(__file__).parents[3]
RULES = ROOT / "configs/prometheus/kvdepot.rules.yml"
RULE_TESTS = ROOT / "tests/prometheus/alerts.yml"
DASHBOARD = ROOT / "configs/grafana/kvdepot.json"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())
ENTRY = ["Symptom", "Cause", "Effect", "Fix"]
WITHOUT_THE_DAEMON = {
    "KVDepotDown", "KVDepotNoTarget", "KVDepotRestarts", "KVDepotEnginesUnreachable", "KVDepotHitRateFell",
    "KVDepotDriveWrites",
}  # fmt: skip
"""Alerts on what no daemon can say of itself."""
DESCRIPTION_MAX = 120
"""A message on a phone shows about as much."""
NOT_OURS = ("up", "process_cpu_seconds_total", "vllm:time_to_first_token_seconds_bucket")
needs_promtool = pytest.mark.skipif(bool(NO_PROMTOOL), reason=NO_PROMTOOL)


def _rules() -> list[str]:
    return RULES.read_text().split("- alert: ")[1:]


def _panels() -> Iterator[dict[str, Any]]:
    yield from json.loads(DASHBOARD.read_text())["panels"]


def _queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return queries + [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("query", _queries())
def test_every_query_of_the_dashboard_asks_for_what_exists(query: str) -> None:
    found = series(query)
    assert found or any(name in query for name in NOT_OURS), query
    assert [why for one in found if (why := why_unknown(one))] == []


def test_the_dashboard_fits_together() -> None:
    panels = list(_panels())
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    cells = [
        (x, y) for place in places
        for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    ]  # fmt: skip
    assert len(set(cells)) == len(cells), "panels overlap"
    variables = {one["name"] for one in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    for query in _queries():
        assert set(re.findall(r"\$([a-z]\w*)", query)) <= variables, query


@pytest.mark.requirement("P10")
def test_every_panel_says_its_unit_and_what_it_means_and_links_to_the_pages() -> None:
    shown = [panel for panel in _panels() if panel["type"] != "row"]
    assert len({panel["title"] for panel in shown}) == len(shown)
    for panel in shown:
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] not in ("", "short"), panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        (link,) = panel["links"]
        page, name = re.fullmatch(r"\$\{docs\}/(\w+)\.html#([\w-]+)", link["url"]).groups()  # type: ignore[union-attr]
        titles = sections(f"{page}.md", 2).keys() | sections(f"{page}.md", 3).keys()
        assert name in {anchor(title) for title in titles}, link["url"]
        if panel["type"] == "stat":
            assert len(defaults["thresholds"]["steps"]) > 1, panel["title"]


@pytest.mark.requirement("P10")
def test_every_state_of_a_timeline_has_a_word_and_a_colour() -> None:
    timelines = {panel["title"]: panel for panel in _panels() if panel["type"] == "state-timeline"}
    assert timelines.keys() == {"Health problems", "State of each tier", "Switched off"}
    for title, panel in timelines.items():
        (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
        kind, options = mapping["type"], mapping["options"]
        if kind == "range":  # all that the queries leave over is trouble
            assert (options["from"], options["to"]) == (1, None), title
            assert all(target["expr"].endswith(" > 0") for target in panel["targets"]), title
        results = [options["result"]] if kind == "range" else list(options.values())
        assert all(one["text"] and one["color"] for one in results), title


@pytest.mark.requirement("P10")
def test_every_state_of_a_tier_has_a_name_and_a_colour() -> None:
    (panel,) = (panel for panel in _panels() if panel["title"] == "State of each tier")
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    asked = dict(re.findall(r'(\d) \* \(kvdepot_tier_state\{[^}]*state="([\w-]+)"\}', panel["targets"][0]["expr"]))
    (states,) = (family.values for family in FAMILIES if family.full_name == "kvdepot_tier_state")
    assert sorted(asked.values()) == sorted(states)
    named = {number: one["text"] for number, one in mapping["options"].items()}
    assert named == asked | {"8": "disabled"}


@pytest.mark.requirement("P10")
def test_what_matters_comes_first_in_the_dashboard() -> None:
    first = [panel["title"] for panel in _panels() if panel["gridPos"]["y"] == 1]
    assert first == ["Token hit rate by source", "Prefill saved", "Misses by reason: the daemon"]


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("rule", _rules(), ids=ALERTS)
def test_every_alert_asks_for_what_exists_and_says_what_is_wrong(rule: str) -> None:
    found = series(rule)
    assert found or any(f"{name}{{" in rule for name in NOT_OURS)
    assert [why for one in found if (why := why_unknown(one))] == []
    assert re.search(r"labels: \{severity: (warning|critical)\}", rule)
    assert "summary: " in rule
    (description,) = re.findall(r'^ +description: "(.+)"$', rule, re.MULTILINE)
    assert description.endswith(".") and len(description) <= DESCRIPTION_MAX


def test_every_alert_has_a_test() -> None:
    tests = RULE_TESTS.read_text()
    named = re.findall(r"- name: (KV\w+)", tests)
    assert sorted(named) == sorted(ALERTS)
    quiet = tests[tests.index("- name: what is normal") :]
    assert sorted(re.findall(r"alertname: (\w+)", quiet)) == sorted(ALERTS)


@pytest.mark.requirement("P10")
def test_every_alert_links_to_an_entry_of_the_operations_manual() -> None:
    linked = {
        rule.split()[0]: re.findall(r'runbook_url: "docs/operations\.md#([\w-]+)"$', rule, re.MULTILINE)
        for rule in _rules()
    }
    entries = {anchor(title): text for title, text in sections("operations.md", 3).items()}
    assert list(linked) == ALERTS
    for alert, anchors in linked.items():
        assert len(anchors) == 1 and anchors[0] in entries, alert
        assert re.findall(r"^- \*\*(\w+):\*\*", entries[anchors[0]], re.MULTILINE) == ENTRY, alert
    listed = re.findall(
        r"^\| `(KV\w+)` \| (\w+) \| \[.+\]\(#([\w-]+)\) \|$", sections("operations.md", 2)["Alerts"], re.MULTILINE
    )
    severities = [re.findall(r"severity: (\w+)", rule)[0] for rule in _rules()]
    assert listed == [(*known, linked[known[0]][0]) for known in zip(ALERTS, severities, strict=True)]


@pytest.mark.requirement("O1")
def test_every_code_of_the_verdict_is_an_alert_and_an_entry_of_the_operations_manual() -> None:
    problems = [Problem(code, code in ERRORS, "") for code in CHECKS]
    assert {problem.alert for problem in problems} == set(ALERTS) - WITHOUT_THE_DAEMON
    for rule in _rules():
        for problem in problems:
            if rule.startswith(f"{problem.alert}\n"):
                assert f'runbook_url: "docs/operations.md#{problem.anchor}"' in rule
                damaged = problem.error and problem.code != "NOT_READY"
                assert f"severity: {'critical' if damaged else 'warning'}" in rule


def test_every_failure_in_the_operations_manual_has_symptom_cause_effect_and_fix() -> None:
    for group in ("Daemon", "Operator settings", "RAM", "Engines", "Tiers below RAM", "Shared tiers"):
        entries = re.split(r"^### ", sections("operations.md", 2)[group], flags=re.MULTILINE)[1:]
        assert len(entries) >= 3
        for entry in entries:
            assert re.findall(r"^- \*\*(\w+):\*\*", entry, re.MULTILINE) == ENTRY, entry.splitlines()[0]


def test_unknown_metrics_labels_and_values_are_found() -> None:
    for query, why in (
        ("rate(kvdepot_nothing_total[5m])", "there is no kvdepot_nothing_total"),
        ("kvdepot_locates", "there is no kvdepot_locates"),
        ('kvdepot_misses_total{outcome="ok"}', "kvdepot_misses_total has no label outcome"),
        ('kvdepot_misses_total{reason=~"unknown|not_intime"}', "kvdepot_misses_total: reason is never ['not_intime']"),
    ):
        (one,) = series(query)
        assert why_unknown(one) == why


@pytest.mark.requirement("T4", "T5", "P10")
@needs_promtool
def test_promtool_finds_the_rules_right_and_each_alert_fires_on_its_fault() -> None:
    for checked in (promtool("check", "rules", str(RULES)), promtool("test", "rules", str(RULE_TESTS))):
        assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_the_test_of_the_alerts_would_find_a_deaf_one(tmp_path: Path) -> None:
    (tmp_path / "configs/prometheus").mkdir(parents=True)
    (tmp_path / "tests/prometheus").mkdir(parents=True)
    deaf = RULES.read_text().replace("kvdepot_tier_breaker_open == 1", "kvdepot_tier_breaker_open == 2")
    (tmp_path / "configs/prometheus" / RULES.name).write_text(deaf)
    head, *tests = re.split(r"(?m)^(?=  - name: )", RULE_TESTS.read_text())
    (one,) = (test for test in tests if test.startswith("  - name: KVDepotTierDisabled\n"))
    (tmp_path / "tests/prometheus" / RULE_TESTS.name).write_text(head + one)
    found = promtool("test", "rules", str(tmp_path / "tests/prometheus" / RULE_TESTS.name))
    assert found.returncode != 0
    assert "KVDepotTierDisabled" in found.stdout + found.stderr


@pytest.mark.requirement("P10")
@needs_promtool
def test_promtool_can_read_what_the_daemon_exports() -> None:
    """Its linter too: units last, no counter without `_total`."""
    kinds = ("disk", "shared", "object", "peer")
    lower = (TierStatus(kind, kind, 1, state="ready", breaker="closed") for kind in kinds)
    tiers = (TierStatus("ram", "ram", 1), *(replace(one, peers=(PeerStatus("h:1"),)) for one in lower))
    status = DaemonStatus("1", 1, 1.0, True, "", 1, 1, tiers=tiers, readers=(ReaderStatus("URI:x"),))
    text = exposition(lambda: status)().decode()
    assert "kvdepot_peer_loads_total" in text and "kvdepot_reader_leases" in text
    checked = promtool("check", "metrics", text=text)
    assert checked.returncode == 0, checked.stderr
