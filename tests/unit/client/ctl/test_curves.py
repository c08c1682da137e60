"""The tables of `what-if`: golden screens at three widths, and nothing wider than the terminal.

`python -m tests.unit.client.ctl.test_curves` writes the golden screens. Look at them before they are committed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from kvdepot.client.ctl.curves import curve_lines, known
from kvdepot.core.bars import ASCII, BLOCKS
from kvdepot.core.report import CapacityFactor, DaemonStatus, WhatIfStatus
from kvdepot.proto.codec import codec_of
from kvdepot.proto.v1 import depot_pb2 as pb
from rich.cells import cell_len

from tests.fakes.daemon_status import NVME, RAM, STATUS

GOLDEN: Final = Path(__file__).parents[3] / "golden/what_if"
WIDTHS: Final = (80, 120, 200)
RATIOS: Final = ((0.25, 0.112), (0.5, 0.204), (1.0, 0.3371), (2.0, 0.48), (4.0, 0.61), (8.0, 0.61))


def status(*ratios: tuple[float, float | None], measured: float | None = 0.3312) -> DaemonStatus:
    tiers = [
        replace(tier, what_if=WhatIfStatus(3120.0, 12_403, 500, measured, tuple(
            CapacityFactor(factor, int(factor * tier.capacity_bytes), ratio, factor < 8, 57, 0.125)
            for factor, ratio in ratios
        ), upper_bound=tier is NVME))
        for tier in (RAM, NVME)
    ]  # fmt: skip
    return replace(STATUS, tiers=(*tiers, replace(NVME, name="pool", kind="shared")))


SCENES: Final = {
    "known": status(*RATIOS),
    "few": status(*((factor, None) for factor, _ in RATIOS), measured=None),
    "some": status(*((factor, ratio if factor < 4 else None) for factor, ratio in RATIOS)),
}


def drawn(scene: str, width: int) -> str:
    return "".join(f"{line}\n" for line in curve_lines(SCENES[scene], width, BLOCKS))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scene", SCENES)
def test_the_screen_is_as_it_was(scene: str, width: int) -> None:
    assert drawn(scene, width) == (GOLDEN / f"{scene}-{width}.txt").read_text()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scene", SCENES)
def test_no_line_is_wider_than_the_terminal_and_80x24_shows_two_tiers(scene: str, width: int) -> None:
    lines = drawn(scene, width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert len(lines) < 24


def test_a_plain_terminal_gets_ascii() -> None:
    assert all(line.isascii() for line in curve_lines(SCENES["known"], 80, ASCII))


def test_a_disk_that_gets_what_is_used_twice_says_that_its_rates_are_bounds() -> None:
    assert drawn("known", 80).count("at most: this disk") == 1
    assert "at most" not in drawn("few", 80)


def test_without_evidence_there_is_no_number() -> None:
    assert not known(SCENES["few"])
    assert known(SCENES["some"])
    assert "%" not in drawn("few", 80)


def test_an_older_daemon_gives_no_curve() -> None:
    (line,) = curve_lines(STATUS, 80, BLOCKS)
    assert "upgrade" in line
    assert not known(STATUS)


def test_curves_travel() -> None:
    codec = codec_of(DaemonStatus, pb.GetStatusResponse)
    for scene in SCENES.values():
        assert codec.decode(codec.encode(scene)).tiers == scene.tiers


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in SCENES:
        for columns in WIDTHS:
            (GOLDEN / f"{name}-{columns}.txt").write_text(drawn(name, columns))
