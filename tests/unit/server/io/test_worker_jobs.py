"""How many jobs wait in a worker follows from how long its last object took."""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.server.io.worker_jobs import NO_NUMBER, Worker

_QUICK = 0.02


@pytest.mark.parametrize(
    ("seconds", "queue_max"), [(0.0, 14), (0.000_05, 14), (0.002_9, 13), (0.01, 4), (0.019, 2), (0.02, 0), (5.0, 0)]
)
def test_the_queue_of_a_worker_takes_twice_what_a_quick_object_may_take(seconds: float, queue_max: int) -> None:
    process: Any = None
    worker = Worker(process, NO_NUMBER, 0.0)
    worker.took(seconds, _QUICK)
    assert worker.queue_max == queue_max
    assert queue_max * seconds <= 2 * _QUICK
