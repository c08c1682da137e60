"""What `kvdepotctl bench` says of rates that it has measured."""

from __future__ import annotations

from io import StringIO

import pytest
from kvdepot.client.ctl.benching import Measured, Shape
from kvdepot.client.ctl.commands.bench import print_measured
from rich.console import Console

STORE = Measured("ram", "store", 1.2e9, "memcpy", 2e9)


@pytest.mark.parametrize(
    ("measured", "doubt"),
    [
        (STORE, ""),
        (Measured("ram", "store", 0.74e9, "medium", 0.1276e9), "a share of 5.80 is impossible"),
        (Measured("ram", "load", 2.4e9, "memcpy", 2e9, shares=(1.1, 1.2)), ""),
        (
            Measured("ram", "load", 1e9, "memcpy", 2e9, shares=(0.5, 0.2, 0.41)),
            "rounds found shares from 0.20 to 0.50",
        ),
        (Measured("nvme", "store", 0.0, note="only what RAM evicts gets there"), ""),
    ],
)
def test_a_share_is_doubted_that_is_impossible_or_differs_from_round_to_round(measured: Measured, doubt: str) -> None:
    assert measured.doubt == doubt


def test_a_share_in_doubt_is_not_printed_and_the_verdict_has_the_doubt_too() -> None:
    doubted = Measured("ram", "load", 1e9, "memcpy", 2e9, shares=(0.5, 0.2))
    out = StringIO()
    print_measured(Shape(1 << 20, 256, "as given"), [STORE, doubted], 1 << 30, 1000.0, Console(file=out, width=120))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines == [
        "chunks of 256 tokens, 1.00 MiB (as given), 1,000 tokens/s of prefill",
        "",
        "1.00 GiB, 4.00 KiB a token",
        "tier  way            rate             beside      share  tokens/s  times prefill",
        "─" * 80,
        "ram   store    1.12 GiB/s  memcpy 1.86 GiB/s       0.60   292,969",
        "ram   load   953.67 MiB/s  memcpy 1.86 GiB/s  too noisy   244,141          244.1",
        "ram, load: this machine is too noisy to tell; rounds found shares from 0.20 to 0.50",
        "ram: 244.1 times as fast as computing, but this machine is too noisy to tell",
    ]
