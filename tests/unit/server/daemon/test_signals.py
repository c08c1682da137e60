"""Signals to a daemon that starts."""

from __future__ import annotations

import asyncio
import signal
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
    did: list[str] = []

    class Node:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        async def start(self) -> None:
            signal.raise_signal(signal.SIGHUP)
            for _ in range(turns):  # in some of which the loop hears of it
                await asyncio.sleep(0)
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
    assert did == ["started", "reloaded", "stopped"]
