"""The end of a copy is reported once, whatever the engine's thread does meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.base.guard import Failures
from kvdepot.client.vllm.base.operations import LoadOp
from kvdepot.client.vllm.worker.copy_outcome import CopyOutcome
from kvdepot.client.vllm.worker.copy_thread import CopyThread


def load(number: int) -> LoadOp:
    return LoadOp(number, f"r{number}", time.monotonic() + 3600, 1, b"", ())


@pytest.mark.requirement("I5")
def test_a_copy_that_an_unusable_device_fails_during_suspend_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    attachment: Any = SimpleNamespace(arena=None, session=None)
    copier: Any = SimpleNamespace(mark=lambda: None, wait=lambda _direction=None: None)
    thread = CopyThread(attachment, copier, Failures(logging.getLogger("test.copies")))
    thread._usable = False
    thread.submit([load(2)], [])
    copying = threading.Thread(target=thread._copy, args=(load(1), None))
    gone = CopyOutcome.memory_gone

    def during(op: Any) -> CopyOutcome:
        copying.start()
        copying.join(0.2)  # it ends only if it takes no lock
        return gone(op)

    monkeypatch.setattr(CopyOutcome, "memory_gone", during)
    thread.suspend()
    copying.join()
    assert {outcome.op.request_id for outcome in thread.take_done()} == {"r1", "r2"}  # type: ignore[union-attr]
