"""What `status` prints first: golden screens at three widths, and nothing that a terminal of 80x24 does not show.

`python -m tests.unit.client.ctl.test_overview` writes the golden screens. Look at them before they are committed.
"""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Final

import pytest
from kvdepot.client.ctl.overview import print_overview, print_verdict
from kvdepot.core.health import CHECKS, health
from kvdepot.core.kinds import Kind
from kvdepot.core.report import DaemonStatus, NamespaceStatus, SessionStatus, SwitchesStatus, TierStatus
from kvdepot.core.verdict import Health, Problem
from rich.console import Console

GOLDEN: Final = Path(__file__).parents[3] / "golden/overview"
WIDTHS: Final = (80, 120, 200)
COUNTERS: Final = {
    "prompt_tokens": 1_200_000.0,
    "served_tokens.engine": 480_000.0,
    "served_tokens.nvme": 36_000.0,
    "served_tokens.ram": 336_000.0,
    "saved_prefill_seconds": 290.0,
}
RAM: Final = TierStatus("ram", "ram", 1 << 30, 1 << 30, 545 << 20, objects=2393, state="ready")
NVME: Final = TierStatus("nvme", "disk", 80 << 20, 80 << 20, 66 << 20, objects=291, state="ready", breaker="closed")


def verdict(status: DaemonStatus) -> DaemonStatus:
    return replace(status, health=health(status, lambda family, seconds: {}))


WELL: Final = verdict(
    DaemonStatus(
        "0.1.0", 1, 11_520.0, ready=True, reason="", arena_id=1, run=1,
        tiers=(RAM, NVME),
        sessions=(SessionStatus("0b8dfe7b-c3a1-4f4e-a1c3-0e94ad6ac3b5", 1, 1, scheduler_attached=True),),
        namespaces=(
            NamespaceStatus(bytes.fromhex("5d6f6014bad5") + bytes(10), "Qwen3NextForCausalLM bfloat16", size_bytes=1),
        ),
        counters=COUNTERS,
    )
)  # fmt: skip
FULL: Final = replace(NVME, state="degraded", reason="file system full (28 MiB short)")
ILL: Final = verdict(replace(WELL, tiers=(RAM, FULL), switches=SwitchesStatus(loads_off=True, loads_off_seconds=720.0)))
CROWDED: Final = replace(
    WELL,
    tiers=(
        RAM,
        *(replace(FULL, name=f"tier-{n}", objects=10**9, used_bytes=9 << 40, capacity_bytes=9 << 40) for n in range(9)),
    ),
    sessions=tuple(SessionStatus(f"0b8dfe7b-c3a1-4f4e-a1c3-0e94ad6ac3b5-dp{n}", 8, 7) for n in range(64)),
    namespaces=tuple(
        NamespaceStatus(
            bytes([n]) * 16,
            "a label that is as long as labels can be " + "x" * 40,
            "tenant",
            "epoch",
            256,
            {Kind.ATTENTION: 1},
            n,
        )
        for n in range(40)
    ),
    health=Health(
        verdict(replace(WELL, ready=False)).health.verdict,
        tuple(
            Problem(code, n < 5, f"tier-{n}: a reason that takes some words to be understood by all", "do this")
            for n, code in enumerate(CHECKS)
        ),
    ),
)
SCENES: Final = {
    "well": WELL,
    "ill": ILL,
    "crowded": CROWDED,
    "empty": verdict(replace(WELL, tiers=(RAM,), sessions=(), namespaces=(), counters={})),
}


def screen(status: DaemonStatus, width: int) -> str:
    out = StringIO()
    print_overview(status, Console(file=out, width=width))
    return out.getvalue()


def golden(scene: str, width: int) -> Path:
    return GOLDEN / f"{scene}-{width}.txt"


@pytest.mark.requirement("O1")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scene", SCENES)
def test_the_screen_is_as_somebody_has_looked_at_it(scene: str, width: int) -> None:
    assert screen(SCENES[scene], width) == golden(scene, width).read_text()


@pytest.mark.requirement("O1")
@pytest.mark.parametrize("scene", SCENES)
def test_the_screen_fits_80x24_with_the_prompt_below_it(scene: str) -> None:
    lines = screen(SCENES[scene], 80).splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80


@pytest.mark.requirement("O1")
def test_the_first_line_is_the_verdict_and_health_shows_every_problem() -> None:
    for scene, word in (("well", "HEALTH_OK"), ("ill", "HEALTH_WARN"), ("crowded", "HEALTH_ERR")):
        assert screen(SCENES[scene], 80).startswith(word)
    out = StringIO()
    print_verdict(CROWDED, Console(file=out, width=80))
    assert [code for code in CHECKS if f"  {code} " in out.getvalue()] == list(CHECKS)
    assert "more: kvdepotctl health" not in out.getvalue()


def test_a_tier_with_the_longest_name_takes_two_lines() -> None:
    tier = replace(FULL, name="a-tier-with-a-name-of-32-letters", used_bytes=900 << 30, capacity_bytes=900 << 30)
    lines = screen(replace(WELL, tiers=(tier,)), 80).splitlines()
    assert lines[lines.index(f"{tier.name} ") + 1].endswith("degraded")
    assert max(map(len, lines)) <= 80


def test_a_daemon_that_gives_no_verdict_is_shown_without_one() -> None:
    assert screen(replace(WELL, health=Health()), 80).startswith("ready, no verdict from this version")


def test_engines_are_told_apart_by_the_letters_that_differ() -> None:
    pair = tuple(SessionStatus(f"0b8dfe7b-c3a1-4f4e-a1c3-0e94ad6ac3b5-dp{n}", 1, 1) for n in range(2))
    assert "0b8dfe7b 1/1" in screen(replace(WELL, sessions=pair[:1]), 80)
    both = screen(replace(WELL, sessions=pair), 200)
    assert all(f"{one.engine_id} 1/1 ranks" in both for one in pair)


if __name__ == "__main__":
    for name, status in SCENES.items():
        for columns in WIDTHS:
            golden(name, columns).write_text(screen(status, columns))
