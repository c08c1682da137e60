"""Work in a thread of its own: what it returns or raises, and who does not wait for it."""

from __future__ import annotations

import asyncio
import threading

import pytest
from kvdepot.server.platform.own_thread import in_own_thread

from tests.fakes.thread_room import no_room_for_threads
from tests.rigs.patience import wait_until


def test_what_work_returns_or_raises_is_returned_or_raised() -> None:
    def fail() -> None:
        raise KeyError("of the work's own")

    async def run() -> None:
        assert await in_own_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(KeyError, match="of the work's own"):
            await in_own_thread(fail)

    asyncio.run(run())


def test_a_host_without_room_for_a_thread_is_an_error_that_callers_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_room_for_threads(monkeypatch), pytest.raises(OSError, match="no room for another thread"):
        asyncio.run(in_own_thread(lambda: 7))


@pytest.mark.requirement("I2")
@pytest.mark.parametrize("raises", [False, True])
def test_nobody_waits_for_work_that_hangs_and_its_late_end_harms_nobody(raises: bool) -> None:
    goes_on, caught = threading.Event(), list[threading.ExceptHookArgs]()

    def hang() -> None:
        goes_on.wait()
        if raises:
            raise OSError("late")

    async def run(errors: list[object]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        late = asyncio.ensure_future(in_own_thread(hang))
        hung = asyncio.ensure_future(in_own_thread(hang))
        await asyncio.sleep(0)
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung
        assert await in_own_thread(lambda: 7) == 7, "it waits for no other work"
        goes_on.set()
        await asyncio.wait([late])
        assert isinstance(late.exception(), OSError) is raises
        await asyncio.sleep(0)

    async def leave() -> None:
        hung = asyncio.ensure_future(in_own_thread(hang))
        await asyncio.sleep(0)
        hung.cancel()

    errors: list[object] = []
    asyncio.run(run(errors))
    assert errors == []
    goes_on.clear()
    before, threading.excepthook = threading.excepthook, caught.append
    try:
        asyncio.run(leave())
        goes_on.set()  # the loop is closed by now
        wait_until(lambda: not any(one.name == "kvdepot-file" for one in threading.enumerate()), "it has ended", 15)
    finally:
        threading.excepthook = before
    assert caught == []
