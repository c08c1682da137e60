"""An I/O worker that waits for jobs."""

from __future__ import annotations

import queue
import socket
import threading
from unittest.mock import Mock

import pytest
from kvdepot.server.io import worker
from kvdepot.server.io.jobs import ANSWERS, Answer
from kvdepot.server.storage.base import IoOutcome


class _OverError(Exception):
    """Ends a loop that has no end."""


def test_an_idle_worker_closes_its_files_and_repeats_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, context, entrance = Mock(), Mock(), Mock()
    jobs.get.side_effect = [queue.Empty, (1, "job"), queue.Empty, (2, "job"), _OverError]
    entrance.enter.return_value = None
    perform = Mock(return_value=Answer(IoOutcome.OK))
    monkeypatch.setattr(worker, "perform", perform)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(_OverError):
            worker._serve(jobs, context, entrance, theirs, threading.Lock(), threading.Event())
        answers = list(ANSWERS.take(bytearray(ours.recv(4096))))
    assert [number for number, _ in answers] == [1, 2]
    assert perform.call_count == context.close.call_count == 2
