"""A real agent of NIXL, in a process of its own: what it sends at once, and what both ends have room for (ADR 82)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = """
import mmap, os
from kvdepot.server.io.nixl_agent import LendingAgent, NixlError
try:
    LendingAgent(memoryview(mmap.mmap(-1, 1 << 20)))
except NixlError as error:
    print(error, flush=True)
os._exit(0)
"""


def started(**variables: str) -> str:
    """Return why an agent does not start where the environment has these variables of UCX; empty if it does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command = [sys.executable, "-c", START]
    return subprocess.run(
        command, env=environment | {"UCX_TLS": "tcp"} | variables, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_reader_by_the_defaults_of_ucx_has_room_for_what_is_sent_at_once() -> None:
    assert not started()


@pytest.mark.requirement("N1")
def test_whoever_has_less_room_than_is_sent_at_once_does_not_start() -> None:
    """UCX writes beyond its memory otherwise: it does not check what comes."""
    assert "does not start" in started(UCX_TCP_RX_SEG_SIZE="63k")


@pytest.mark.requirement("N1")
def test_nobody_sends_more_than_others_have_room_for() -> None:
    assert not started(UCX_TCP_TX_SEG_SIZE="256k"), "UCX refuses to send more than it receives"
