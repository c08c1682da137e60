"""What `explain` and `requests` print: the answer first, then what to do, then the history.

`python -m tests.unit.client.ctl.test_explaining` writes the golden screens. Look at them before they are committed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from kvdepot.client.ctl.explaining import record_lines, table_lines
from kvdepot.core.calls import RequestEnd
from kvdepot.core.explanation import FIX, MEANING, answer
from kvdepot.core.misses import UNASKED_REASONS, UNHEARD_REASONS, MissReason
from kvdepot.core.records import LoadRecord, Lookup, Outcome, RequestRecord

GOLDEN: Final = Path(__file__).parents[3] / "golden/explain"
WIDTHS: Final = (80, 120, 200)
KEY: Final = bytes.fromhex("61833ed51bb3") + bytes(10)
NAMESPACE: Final = bytes.fromhex("1b4fd7fa54e8") + bytes(10)
ENGINE: Final = "d71e4221-2afe-4b65-b5b0-f9bdb743595c"
UUID: Final = "b01568e4f8edc00c94cbd7184e5a99b7"

ALL: Final = Lookup(4, 384, 1536, 4, {"nvme": 4, "ram": 4}, 1536, 1536, "ram", 0.0001)
PART: Final = Lookup(40, 256, 10240, 24, {"nvme": 24, "ram": 20}, 6144, 6144, "nvme", 0.012, "evicted", 24, KEY)
NOTHING: Final = Lookup(4, 384, 1536, 0, {}, 0, 0, "", 0.0, "unknown", 0, KEY)
FOREIGN: Final = replace(NOTHING, miss="other_namespace", other_namespace=bytes.fromhex("5d6f6014bad5") + bytes(10))


def record(
    number: int, lookup: Lookup | None, end: RequestEnd | None, verb: str = "cmpl", began: float = 22.4
) -> RequestRecord:
    return RequestRecord(
        ENGINE, f"{verb}-{number}{UUID}-0-89282916", NAMESPACE, began, int(lookup is not None), began - 0.1, lookup,
        ended_seconds_ago=began - 1.1 if end is not None else None, end=end, chunk_tokens=384,
    )  # fmt: skip


SCENES: Final = {
    "hit": replace(
        record(1, ALL, RequestEnd(0, 1536, "", 1700, "ram", 0.012)), loads=(LoadRecord("granted", 5, 22.2, 0.001),)
    ),
    "part-hit": replace(
        record(2, PART, RequestEnd(0, 6144, "", 10300, "nvme", 1.26), began=247.0),
        loads=(LoadRecord("granted", 24, 4.1, 0.013),), reserved={"granted": 16},
    ),
    "timed-out": record(3, ALL, RequestEnd(0, 0, "timed_out", 1700, waited_seconds=0.0503)),
    "first-time": replace(record(4, NOTHING, RequestEnd(0, 0, "unknown", 1700)), reserved={"granted": 5}),
    "own-cache": record(5, ALL, RequestEnd(1536, 0, "", 1700)),
    "too-short": record(6, None, RequestEnd(0, 0, "too_short", 200), "chatcmpl"),
    "reads-no-cache": record(7, None, RequestEnd(0, 0, "reads_no_cache", 1700), "chatcmpl"),
    "unreachable": record(8, None, RequestEnd(0, 0, "unreachable", 1700)),
    "other-namespace": replace(
        record(9, FOREIGN, RequestEnd(0, 0, "unknown", 1700)),
        differences=('identity.cache_config.cache_dtype: "auto" != "fp8"',),
    ),
    "running": record(10, ALL, None, began=0.4),
    "aborted": record(11, ALL, RequestEnd()),
    "stores-only": record(12, None, RequestEnd(0, 0, "", 1700), began=90_000.0),
    "engine-gone": replace(record(13, ALL, None), ended_seconds_ago=20.0),
}  # fmt: skip


def screen(scene: str, width: int) -> str:
    listed = scene == "requests"
    lines = table_lines(list(SCENES.values()), width) if listed else record_lines(SCENES[scene], width)
    return "".join(f"{line}\n" for line in lines)


def golden(scene: str, width: int) -> Path:
    return GOLDEN / f"{scene}-{width}.txt"


SCREENS: Final = list(itertools.product([*SCENES, "requests"], WIDTHS))


@pytest.mark.requirement("P10")
@pytest.mark.parametrize(("scene", "width"), SCREENS)
def test_the_screen_is_as_somebody_has_looked_at_it(scene: str, width: int) -> None:
    assert screen(scene, width) == golden(scene, width).read_text()


@pytest.mark.requirement("P10")
def test_the_first_line_says_what_became_of_the_request() -> None:
    assert {scene: record.outcome for scene, record in SCENES.items()} == {
        "hit": Outcome.HIT, "part-hit": Outcome.HIT, "timed-out": Outcome.MISS, "first-time": Outcome.MISS,
        "own-cache": Outcome.OWN_CACHE, "too-short": Outcome.NOT_ASKED, "reads-no-cache": Outcome.NOT_ASKED,
        "unreachable": Outcome.MISS, "other-namespace": Outcome.MISS, "running": Outcome.RUNNING,
        "aborted": Outcome.ABORTED, "engine-gone": Outcome.ABORTED, "stores-only": Outcome.NOT_ASKED,
    }  # fmt: skip
    for scene, found in SCENES.items():
        lines = screen(scene, 80).splitlines()
        assert lines[0].startswith(found.outcome), scene
        assert max(map(len, lines)) <= 80, scene


def test_an_operator_learns_of_another_tenant_what_the_engine_does_not() -> None:
    assert "other_namespace: another namespace has it" in screen("other-namespace", 200).splitlines()[0]


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("reason", MissReason, ids=str)
def test_each_reason_is_told_in_the_first_line_and_what_to_do_in_the_next(reason: MissReason) -> None:
    lookup = None if reason in UNASKED_REASONS else NOTHING
    found = record(1, lookup, RequestEnd(0, 0, reason, 1700))
    first, second, *_ = record_lines(found, 400)
    miss = lookup is not None or reason in UNHEARD_REASONS
    assert first.split("  ")[0] == (Outcome.MISS if miss else Outcome.NOT_ASKED)
    assert reason.value in first or reason is MissReason.TOO_SHORT
    assert second.strip() == f"-> {FIX[reason]}"
    assert MEANING.keys() == FIX.keys() == set(MissReason)


@pytest.mark.parametrize("scene", SCENES)
def test_what_an_older_engine_does_not_report_is_left_out(scene: str) -> None:
    """Its report has the first three fields only."""
    end = SCENES[scene].end
    if end is None:
        return
    if end.miss == MissReason.UNKNOWN:
        return  # its words are not of the report
    older = replace(SCENES[scene], end=RequestEnd(end.local_tokens, end.loaded_tokens, end.miss), chunk_tokens=0)
    text = answer(older)
    assert " 0 " not in text and " of " not in text.split(";")[0] and "  " not in text


def test_a_terminal_of_80_columns_shows_each_request_in_one_line() -> None:
    lines = screen("requests", 80).splitlines()
    assert len(lines) == len(SCENES) + 1
    assert max(map(len, lines)) <= 80
    assert f"1{UUID}-0-89282916" in screen("requests", 200), "whole ids where there is room"


@pytest.mark.requirement("B3")
@pytest.mark.parametrize(
    ("tier", "whose"), [("node-a", "tier node-a, asked first"), ("", "no peer of this daemon")], ids=["peer", "unknown"]
)
def test_a_daemon_that_params_name_is_shown(tier: str, whose: str) -> None:
    lookup = replace(NOTHING, source_id=0xF00D, source_tier=tier)
    lines = list(record_lines(record(1, lookup, RequestEnd(0, 0, MissReason.UNKNOWN, 1700)), 120))
    assert f"  named     daemon 000000000000f00d by kv_transfer_params: {whose}" in lines
    lines = list(record_lines(record(1, NOTHING, RequestEnd(0, 0, MissReason.UNKNOWN, 1700)), 120))
    assert not any(line.startswith("  named") for line in lines)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for scene, width in SCREENS:
        golden(scene, width).write_text(screen(scene, width))
