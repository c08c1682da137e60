"""Work on files whose device may hang: each job has a thread of its own, and the daemon's end waits for none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_own_thread(work: Callable[[], Result]) -> Result:
    """Return or raise what `work` returns or raises. A cancellation stops the waiting, not the work.

    Raise OSError if the host has no room for a thread: callers handle it as one of the work itself.

    asyncio's own threads were rejected: `asyncio.run` waits for them without a limit, and work queued after a hung
    one waits too.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()

    def tell(say: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it took too long
            loop.call_soon_threadsafe(lambda: None if answer.done() else say())

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - it is told
            failed = error
            tell(lambda: answer.set_exception(failed))
        else:
            tell(lambda: answer.set_result(result))

    try:
        threading.Thread(target=run, name="kvdepot-file", daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, "the host has no room for another thread") from error
    return await answer
