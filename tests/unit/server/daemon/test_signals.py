"""Signals to a daemon that starts."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kvdepot.server.config.config import load
from kvdepot.server.daemon import app, node


@pytest.mark.requirement("T9")
@pytest.mark.parametrize("turns", range(4))
def test_a_reload_that_is_asked_for_during_the_start_is_done_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The file may have changed since the start has read it."""

    async def start() -> None:
        signal.raise_signal(signal.SIGHUP)
        for _ in range(turns):  # in some of which the loop hears of it
            await asyncio.sleep(0)

    assert served(tmp_path, monkeypatch, start) == ["started", "reloaded", "stopped"]


@pytest.mark.requirement("T9")
def test_a_reload_that_is_asked_for_before_the_daemon_can_hear_is_done_after_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # as `entry` does
    signal.raise_signal(signal.SIGHUP)

    async def start() -> None:
        pass

    assert served(tmp_path, monkeypatch, start) == ["started", "reloaded", "stopped"]
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "workers would not hear of it either"


HUNG_UP = """
import os, signal, sys
from kvdepot.server.daemon import entry

class While(object):
    def find_spec(self, name, path=None, target=None):
        if name == "kvdepot.server.daemon.app":
            os.kill(os.getpid(), signal.SIGHUP)

sys.meta_path.insert(0, While())
sys.exit(entry.main())
"""


@pytest.mark.requirement("T9")
@pytest.mark.parametrize(("verb", "code"), [("serve", app.EXIT_CONFIG), ("check-config", -signal.SIGHUP)])
def test_sighup_ends_a_verb_of_a_terminal_and_no_daemon_that_is_being_loaded(
    tmp_path: Path, verb: str, code: int
) -> None:
    file = tmp_path / "kvdepot.toml"
    file.write_text("[ran]\n")
    done = subprocess.run([sys.executable, "-c", HUNG_UP, verb, str(file)], capture_output=True, check=False)
    assert done.returncode == code, done.stderr


def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[], Awaitable[None]]) -> list[str]:
    """Run a daemon that stops after its first reload. Return what it did."""
    did: list[str] = []

    class Node:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        async def start(self) -> None:
            await start()
            did.append("started")

        def begin_reload(self) -> asyncio.Task[None]:
            return asyncio.create_task(self._reload())

        async def _reload(self) -> None:
            did.append("reloaded")
            signal.raise_signal(signal.SIGTERM)

        async def stop(self) -> None:
            did.append("stopped")

    monkeypatch.setattr(node, "Node", Node)
    file = tmp_path / "kvdepot.toml"
    file.write_text(f'[daemon]\nlisten = ["unix://{tmp_path}/k.sock"]\n[ram]\npath = "{tmp_path}"\n')
    assert asyncio.run(app._serve(load(file), None)) == 0
    return did
