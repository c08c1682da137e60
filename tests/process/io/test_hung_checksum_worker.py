"""A checksum worker that is stopped, or hangs: what it was lent does not stay lent for ever (I5)."""

from __future__ import annotations

import asyncio
import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.server.daemon import checksums
from kvdepot.server.daemon.checksums import ChecksumService

from tests.rigs.engine_rig import Rig, audit, path
from tests.rigs.patience import WAIT_SECONDS, until
from tests.rigs.stopping import stop

OBJECTS = 5


@pytest.mark.requirement("I5")
def test_what_a_stopped_worker_was_lent_comes_back_and_is_summed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checksums, "ANSWER_SECONDS_MAX", 0.2)
    rig = Rig()

    def lent() -> int:
        return rig.depot.status().tier.lent_bytes

    async def run() -> None:
        data = os.memfd_create("data")
        arena: Any = SimpleNamespace(parts=((data, rig.layout.data_bytes),))
        os.ftruncate(data, rig.layout.data_bytes)
        service = ChecksumService(
            arena=arena, depot=rig.depot, loop=asyncio.get_running_loop(), log=logging.getLogger("hung"),
            quarantine=lambda _: None,
        )  # fmt: skip
        service.start()
        stopped = service.pid
        assert stopped is not None
        stop(stopped)
        rig.attach().store(path("p", OBJECTS))
        service.wake()
        assert lent() == OBJECTS * 8192
        await until(lambda: service.pid != stopped, "another worker")  # its death is proven by then
        monkeypatch.setattr(checksums, "ANSWER_SECONDS_MAX", WAIT_SECONDS)  # the next one may start slowly
        await until(lambda: not rig.depot.unsummed, "all is summed")
        assert lent() == 0
        assert service._overdue is None, "a worker that has nothing to do is left alone"
        service.close()
        os.close(data)

    with caplog.at_level(logging.WARNING, "hung"):
        asyncio.run(run())
    assert f"{OBJECTS} jobs, no answer" in caplog.text
    audit(rig.depot)
