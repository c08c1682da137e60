"""The daemon's end of the opening process, against bytes that no opener of ours sends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kvdepot.server.io.framing import HEAD
from kvdepot.server.tiers.disk import opener_process
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.messages import Ended, Message
from kvdepot.server.tiers.disk.opener_process import OpenerProcess

from tests.rigs.patience import patient


@pytest.mark.parametrize("frame", [HEAD.pack(1 << 31, 0, 0), HEAD.pack(0, 255, 0)], ids=["too long", "unknown"])
def test_a_first_frame_that_is_none_ends_the_process_and_not_the_daemons_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frame: bytes
) -> None:
    async def run() -> tuple[Message | None, list[Message]]:
        told: list[Message] = []
        opener = OpenerProcess(DiskConfig("nvme", tmp_path, 1 << 30), asyncio.get_running_loop())
        monkeypatch.setattr(opener._stream, "start", lambda *_, **__: None)
        monkeypatch.setattr(opener._stream, "receive", lambda: frame)
        monkeypatch.setattr(opener_process, "readable", lambda *_: True)
        opener.start(told.append)
        return opener.wait(patient(5.0)), told

    assert asyncio.run(run()) == (None, [Ended()])
