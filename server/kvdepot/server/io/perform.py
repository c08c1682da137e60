"""What an I/O worker does with each job; free of processes, so that tests and offline verbs call it too."""

from __future__ import annotations

from kvdepot.server.io.jobs import Answer, Job


class Context:
    """What one thread of a worker works with: its directory, the arena it maps, its open files, its scratch memory."""

    def __init__(self, directory: str, arena: memoryview | None = None) -> None:
        """`arena`: writable and page-aligned, all of it; None where no job has extents."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files."""
        raise NotImplementedError


def perform(job: Job, context: Context) -> Answer:
    """Do it. Never raises for what a medium does or holds: that is the answer's `outcome`."""
    raise NotImplementedError
