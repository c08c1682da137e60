"""Several ranks over a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.scheduling import sides

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import ScriptedEngine
from tests.rigs.connector_rig import Gate, cold, prompt, rank_copier
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import status_of


class LiveEngine(ScriptedEngine):
    """On a real daemon, by the client's own session and attachments."""

    def __init__(
        self, daemon: DaemonProcess, folder: Path, monkeypatch: pytest.MonkeyPatch, depot: Any, **options: Any
    ) -> None:
        super().__init__(depot, folder, monkeypatch, settings={"endpoint": daemon.endpoint}, **options)

    def _connect(self, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None: ...


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    process = DaemonProcess()
    yield process
    process.close()


@pytest.mark.requirement("P11")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_what_one_rank_never_acknowledges_is_never_published(
    daemon: DaemonProcess,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hybrid: bool,
) -> None:
    """Two ranks over a real daemon: rank 0 has written its part and said so, rank 1 says nothing for good."""
    depot, gate = DirectDepot(), Gate(monkeypatch)
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    daemon.start()
    tokens = prompt(4.5)
    with (
        closing(LiveEngine(daemon, folder, monkeypatch, depot, ranks=2, hybrid=hybrid)) as engine,
        closing(LiveEngine(daemon, folder, monkeypatch, depot, ranks=2, hybrid=hybrid)) as reader,
    ):
        gate.close(direction=Direction.STORE, copier=rank_copier(engine, 1))
        request_id = engine.add(tokens, max_tokens=1)
        ops = engine.side.stores._ops
        wait_until(
            lambda: bool(engine.step()) and gate.reached(0) and any(op.ranks_done for op in ops.values()),
            "not written by rank 0 alone",
        )
        assert engine.outputs[request_id] == cold(tokens, 1)
        assert reader.generate(tokens) == cold(tokens)
        assert list(reader.hits.values()) == [0]
        engine.connector.shutdown()  # its scheduler ends, its rank is still there, and goes on later
        gate.open()
    assert status_of(daemon.socket).tiers[0].objects == 0
