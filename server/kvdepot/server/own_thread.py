"""Work on files whose medium may hang: each on a thread of its own, which nobody waits for at the daemon's end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_own_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises. Cancelled it is waited for no more, and goes on.

    Not asyncio's own threads: `asyncio.run` waits for these without an end, and what is behind hung ones in their queue
    waits with them.
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

    threading.Thread(target=run, name="kvdepot-file", daemon=True).start()
    return await answer
