"""The loans of tasks: what a worker may touch while it has a job (I6)."""

from __future__ import annotations

from kvdepot.server.io.tasks import Task
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage.base import Loan, UnknownWorker


class TaskLoans:
    """Begins and ends the loans of a pool's tasks. A depot that fails at it fails the one task."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def begin(self, task: Task, worker_number: int) -> str:
        """Begin the loan of a task. Return why no worker is told of the task; empty if one is. Raise UnknownWorker."""
        try:
            lent = task.loan is None or task.loan.begin(worker_number)
        except UnknownWorker:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._guard.caught("the begin of a loan", error)
            return f"the loan could not begin: {error}"
        return "" if lent else "the loan was refused"

    def end(self, loan: Loan) -> None:
        self._guard.call("the end of a loan", loan.end)
