"""Texts of clients on a terminal: no style of rich, no sequence that the terminal obeys."""

from __future__ import annotations

import pytest
from kvdepot.client.ctl.printer import print_status
from kvdepot.client.ctl.texts import escape, say
from kvdepot.core.report import DaemonStatus, SessionStatus, TierStatus
from rich.console import Console

EVIL = "evil\x1b[2Jid\r[red]forged[/]"


@pytest.mark.requirement("S6")
def test_an_engine_s_name_changes_neither_terminal_nor_style(capsys: pytest.CaptureFixture[str]) -> None:
    status = DaemonStatus(
        "0.2.0", 1, 1.0, ready=True, reason="", arena_id=1, run=1, sessions=(SessionStatus(engine_id=EVIL),),
        tiers=(TierStatus("ram", "ram", 1 << 30),),
    )  # fmt: skip
    print_status(status, Console(width=300), counters=False)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\r" not in printed
    assert "evil\\x1b[2Jid\\r[red]forged[/]" in printed


@pytest.mark.requirement("S6")
@pytest.mark.parametrize("err", [False, True])
def test_lines_stay_lines_and_nothing_else_is_obeyed(capsys: pytest.CaptureFixture[str], err: bool) -> None:
    say(f"first {EVIL}\nsecond", err=err)
    printed = capsys.readouterr()
    assert (printed.err if err else printed.out) == "first evil\\x1b[2Jid\\r[red]forged[/]\nsecond\n"


def test_a_cell_of_plain_text_is_what_it_was() -> None:
    assert escape("tenant-1") == "tenant-1"
