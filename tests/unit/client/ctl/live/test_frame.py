"""The screen of `top`: golden screens of fixed figures at three sizes, and nothing that does not fit.

`python -m tests.unit.client.ctl.live.test_frame` writes the golden screens. Look at them before they are committed.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Final

import pytest
from kvdepot.client.ctl.live.frame import COLUMNS_MAX, KEYS, View, frame
from kvdepot.client.ctl.live.history import RECENT_SECONDS, Figures, History, Look
from kvdepot.core.bars import ASCII, BLOCKS, Glyphs
from kvdepot.core.calls import RequestEnd
from kvdepot.core.health import health
from kvdepot.core.misses import MissReason
from kvdepot.core.records import Lookup, RequestRecord
from kvdepot.core.report import DaemonStatus, HistogramStatus, SessionStatus, SwitchesStatus, TierStatus
from kvdepot.core.verdict import Health, Problem, Verdict
from rich.console import Console

from tests.rigs.manual import sections

GOLDEN: Final = Path(__file__).parents[4] / "golden/top"
SIZES: Final = ((80, 24), (120, 30), (200, 50))
SECONDS: Final = 2.0
LOOKS: Final = 150
STARTED: Final = 11_220.0
ENGINE: Final = "0b8dfe7b-c3a1-4f4e-a1c3-0e94ad6ac3b5"
OTHER: Final = "d71e4221-2afe-4b65-b5b0-f9bdb743595c"
UUID: Final = "b01568e4f8edc00c94cbd7184e5a99b7"
BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
VIEW: Final = View(SECONDS)


def wave(look: int, slow: float, fast: float) -> float:
    """Return a figure between 0 and 1 that rises and falls."""
    return 0.5 + 0.35 * math.sin(look / slow) + 0.15 * math.sin(look / fast)


def tier(name: str, used: int, capacity: int, objects: int) -> TierStatus:
    kind, breaker = ("ram", "") if name == "ram" else ("disk", "closed")
    return TierStatus(name, kind, capacity, capacity, used, objects=objects, state="ready", breaker=breaker)


TIERS: Final = (tier("ram", 545 << 30, 1 << 40, 2393), tier("nvme", 6710 << 30, 8 << 40, 29_133))
LOADS: Final = {
    "load_seconds.ram": (120, 2410, 7902, 8811, 8874, 8880, 8881, 8881, 8881),
    "load_seconds.nvme": (0, 0, 3, 61, 540, 771, 802, 812, 813),
    "call_seconds.Locate": (21_030, 23_874, 24_310, 24_330, 24_337, 24_339, 24_340, 24_340, 24_340),
}


def counters(look: int) -> dict[str, float]:
    """Return the counters at a look: what was before, and what each look since then has added."""
    found = {
        "prompt_tokens": 41.2e6, "served_tokens.engine": 15.1e6, "served_tokens.ram": 11.4e6,
        "served_tokens.nvme": 1.3e6, "saved_prefill_seconds": 7_400.0, "granted_read_bytes": 3.1e12,
        "granted_write_bytes": 0.9e12, "misses.unknown": 8_312.0, "misses.evicted": 640.0, "misses.not_in_time": 212.0,
        "misses.timed_out": 9.0, "io_bytes.nvme/read": 2.2e11, "io_bytes.nvme/written": 6.1e11,
    }  # fmt: skip
    for number in range(1, look + 1):
        tokens = 2 * (9_000 + 6_000 * wave(number, 19, 3))
        hits = 0.28 + 0.14 * wave(number, 29, 4)
        grown = {
            "prompt_tokens": tokens, "served_tokens.engine": 0.38 * tokens, "served_tokens.ram": hits * tokens,
            "served_tokens.nvme": 0.03 * tokens, "saved_prefill_seconds": (hits + 0.03) * tokens / 5_200,
            "granted_read_bytes": 2.6e9 * hits * wave(number, 19, 3) * 2, "misses.unknown": number % 3,
            "granted_write_bytes": 0.7e9 * wave(number, 13, 2), "misses.evicted": number % 2 * 0.5,
            "misses.not_in_time": float(number % 10 == 0), "io_bytes.nvme/read": 1.4e8 * hits,
            "io_bytes.nvme/written": 4.1e8 * wave(number, 13, 2), "evicted_objects.capacity": 3 * wave(number, 7, 2),
        }  # fmt: skip
        for name, value in grown.items():
            found[name] = found.get(name, 0.0) + value
    return found


def status(look: int, **changes: object) -> DaemonStatus:
    share = look / LOOKS
    plain = DaemonStatus(
        "0.3.0", 1, STARTED + SECONDS * look, ready=True, reason="", arena_id=1, run=1, tiers=TIERS,
        sessions=(
            SessionStatus(ENGINE, 4, 4, True, 8 << 30, 1288 << 20, 3, 112, (1, 2, 3, 4)),
            SessionStatus(OTHER, 4, 3, True, 8 << 30, 0, 0, 0, (5, 6, 7)),
        ),
        counters=counters(look),
        histograms=tuple(
            HistogramStatus(name, BOUNDS, tuple(int(share * count) for count in counts))
            for name, counts in LOADS.items()
        ),
    )  # fmt: skip
    changed = replace(plain, **changes)  # type: ignore[arg-type]
    return changed if "health" in changes else replace(changed, health=health(changed, lambda family, seconds: {}))


def record(number: int, began: float, lookup: Lookup | None, end: RequestEnd | None) -> RequestRecord:
    return RequestRecord(
        ENGINE, f"cmpl-{number:02}{UUID}-0-89282916", bytes(16), began, int(lookup is not None), began, lookup,
        ended_seconds_ago=began - 0.4 if end is not None else None, end=end, chunk_tokens=384,
    )  # fmt: skip


ALL: Final = Lookup(4, 384, 1536, 4, {"ram": 4}, 1536, 1536, "ram", 0.0001)
PART: Final = Lookup(40, 256, 10240, 24, {"nvme": 24, "ram": 20}, 6144, 6144, "nvme", 0.012, "evicted", 24, bytes(16))
NOTHING: Final = Lookup(4, 384, 1536, 0, {}, 0, 0, "", 0.0, "unknown", 0, bytes(16))
ENDS: Final = (
    (ALL, None),
    (ALL, RequestEnd(0, 1536, "", 1700, "ram", 0.004)),
    (PART, RequestEnd(0, 6144, "", 10300, "nvme", 0.071)),
    (NOTHING, RequestEnd(0, 0, "unknown", 1700)),
    (ALL, RequestEnd(1536, 0, "", 1700)),
    (ALL, RequestEnd(0, 0, "timed_out", 1700, waited_seconds=0.0503)),
    (None, RequestEnd(0, 0, "too_short", 200)),
)
RECORDS: Final = tuple(
    record(number, 0.4 + 1.7 * number, *ENDS[number % len(ENDS)] if number else ENDS[0]) for number in range(64)
)


def seen(looks: int = LOOKS, records: tuple[RequestRecord, ...] = RECORDS, **changes: object) -> Figures:
    history = History(Look(status(0, **changes), records))
    for number in range(1, looks + 1):
        history.add(Look(status(number, **changes), records))
    return history.figures()


FULL: Final = replace(TIERS[1], state="degraded", reason="file system full (28 MiB short)")
CROWDED: Final = {
    "tiers": tuple(replace(FULL, name=f"a-tier-with-a-name-of-32-letters{n}", objects=10**9) for n in range(9)),
    "sessions": tuple(SessionStatus(f"{ENGINE}-dp{n}", 8, 7, leases=999, lent_objects=10**7) for n in range(64)),
    "health": Health(
        Verdict.ERR,
        tuple(
            Problem(f"TIER_DEGRADED_{n}", n < 5, "a reason that takes some words to be understood by all", "do this")
            for n in range(20)
        ),
    ),
    "counters": {f"misses.{reason}": 10.0**number for number, reason in enumerate(MissReason)},
}
FIGURES: Final = {
    "well": seen(),
    "ill": seen(tiers=(TIERS[0], FULL), switches=SwitchesStatus(loads_off=True, loads_off_seconds=720.0)),
    "first": seen(0, RECORDS[:3]),
    "idle": replace(seen(3, (), sessions=(), counters={}, histograms=())),
    "crowded": seen(2, tuple(replace(one, began_seconds_ago=1e7) for one in RECORDS), **CROWDED),
}
SCENES: Final[dict[str, tuple[Figures, View, Glyphs]]] = {
    **{name: (figures, VIEW, BLOCKS) for name, figures in FIGURES.items()},
    "crowded": (FIGURES["crowded"], replace(VIEW, all_time=True), BLOCKS),
    "ascii": (FIGURES["well"], VIEW, ASCII),
    "no-answer": (FIGURES["ill"], replace(VIEW, no_answer="for 12 s (UNAVAILABLE)"), BLOCKS),
    "misses": (FIGURES["well"], replace(VIEW, all_time=True, only_misses=True, paused=True), BLOCKS),
    "help": (FIGURES["well"], replace(VIEW, helping=True), BLOCKS),
    "pipe": (FIGURES["well"], replace(VIEW, keys=False), BLOCKS),
}


def screen(scene: str, columns: int, rows: int) -> str:
    return "".join(f"{line.plain.rstrip()}\n" for line in frame(*SCENES[scene][:2], columns, rows, SCENES[scene][2]))


def golden(scene: str, columns: int) -> Path:
    return GOLDEN / f"{scene}-{columns}.txt"


@pytest.mark.requirement("O1")
@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("scene", SCENES)
def test_the_screen_is_as_somebody_has_looked_at_it(scene: str, columns: int, rows: int) -> None:
    assert screen(scene, columns, rows) == golden(scene, columns).read_text()


@pytest.mark.requirement("O1")
@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (20, 5), (79, 12), (80, 24), (119, 31), (160, 24), (400, 100)])
@pytest.mark.parametrize("scene", SCENES)
def test_no_line_is_wider_or_lower_than_the_terminal(scene: str, columns: int, rows: int) -> None:
    figures, view, glyphs = SCENES[scene]
    lines = frame(figures, view, columns, rows, glyphs)
    assert len(lines) == rows or (not view.keys and len(lines) < rows)
    assert max(line.cell_len for line in lines) <= min(columns, COLUMNS_MAX)
    assert not any(set(line.plain) & set("\n\t\x1b") for line in lines)
    assert not view.keys or lines[-1].plain.startswith(KEYS[: columns - 1])


@pytest.mark.requirement("O1")
@pytest.mark.parametrize("scene", ["well", "ill", "crowded", "idle", "ascii"])
def test_80x24_shows_each_subject(scene: str) -> None:
    text = screen(scene, 80, 24)
    subjects = (
        "HEALTH_", "hit rate", "prefill saved", "loaded", "stored", "load time", "TIERS", "MISSES", "ENGINES",
        "REQUESTS", "q quit",
    )  # fmt: skip
    assert [subject for subject in subjects if subject not in text] == []


@pytest.mark.requirement("O1")
def test_text_of_an_engine_gives_a_terminal_no_orders() -> None:
    session = SessionStatus("\x1b[red]", 1, 1)
    hostile = replace(RECORDS[1], request_id="\x1b]0;title\x07[bold]")
    figures = seen(1, (hostile,), sessions=(session,), tiers=(replace(TIERS[0], name="\x1b[1m[b]"),))
    text = "".join(line.plain for line in frame(figures, VIEW, 200, 50, BLOCKS))
    assert text.isprintable()
    assert "[red]" in text and "[bold]" in text and "[b]" in text


@pytest.mark.requirement("O1")
def test_color_says_how_bad_something_is_and_nothing_else() -> None:
    def colored(scene: str) -> set[str]:
        out = StringIO()
        console = Console(file=out, width=80, force_terminal=True, color_system="standard", legacy_windows=False)
        for line in frame(*SCENES[scene][:2], 80, 24, BLOCKS):
            console.print(line, soft_wrap=True, highlight=False)
        return {text.rstrip() for _, text in re.findall("\x1b\\[(?:[0-9]+;)*(3[1-7])m([^\x1b]*)", out.getvalue())}

    assert colored("well") == {"HEALTH_OK", "     3/4"}
    assert colored("ill") == {"HEALTH_WARN", "LOADS_OFF", "TIER_DEGRADED", "degraded", "     3/4"}
    assert len(colored("no-answer")) == 1


def test_the_manual_shows_a_screen_of_this_test() -> None:
    shown = f"```\n$ kvdepotctl top\n{golden('ill', 80).read_text()}```"
    assert shown in sections("kvdepotctl.md", 2)["kvdepotctl top"]


def test_a_figure_is_the_growth_between_looks_and_that_of_the_last_minutes() -> None:
    figures = FIGURES["well"]
    assert figures.now is not None
    assert [figures.now.seconds, figures.recent.seconds, len(figures.steps)] == [SECONDS, RECENT_SECONDS, LOOKS]
    longer = seen(LOOKS + 40)
    assert longer.recent.seconds == RECENT_SECONDS
    assert len(longer.steps) == LOOKS + 40
    grown = counters(LOOKS + 40)["prompt_tokens"] - counters(40)["prompt_tokens"]
    assert longer.recent.grown["prompt_tokens"] == pytest.approx(grown)


def test_a_daemon_that_started_anew_counts_from_its_start() -> None:
    history = History(Look(status(3), ()))
    history.add(Look(replace(status(0), pid=2, uptime_seconds=4.0), ()))
    figures = history.figures()
    assert figures.recent.seconds == 4.0
    assert figures.recent.grown["prompt_tokens"] == counters(0)["prompt_tokens"]


if __name__ == "__main__":
    for name in SCENES:
        for size in SIZES:
            golden(name, size[0]).write_text(screen(name, *size))
