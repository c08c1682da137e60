"""The boundary of callbacks: what they raise is counted, logged seldom, and goes no further."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest
from kvdepot.core.errors import NotFound
from kvdepot.server.platform import guard as module
from kvdepot.server.platform.guard import PLACES, Guard, Once, engine_guard, tier_guard


class Raised(Exception):  # noqa: N818
    pass


def fail(*_: object) -> None:
    raise Raised("of the callback")


def test_a_callback_that_raises_is_counted_and_its_caller_told() -> None:
    counted: list[str] = []
    guard = Guard(counted.append, logging.getLogger("guard"))
    assert guard.call("here", fail, 1) is False
    assert guard.call("there", counted.append, "called") is True
    assert guard.value("here", 7, lambda: 1 // 0) == 7
    assert guard.value("there", 7, lambda one: one + 1, 1) == 2
    guard.safe("safe", fail)(1, 2)
    assert counted == ["here", "called", "here", "safe"]


def test_each_calls_those_behind_one_that_raised() -> None:
    called: list[int] = []
    guard = Guard(lambda _: None, logging.getLogger("guard"))
    guard.each("here", lambda: called.append(1), fail, lambda: called.append(2))
    assert called == [1, 2]


def test_the_log_has_one_traceback_a_minute_for_each_place_and_type(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    guard = Guard(lambda _: None, logging.getLogger("guard"), subject="tier nvme", clock=lambda: now)
    for _ in range(500):
        guard.call("here", fail)
    guard.call("there", fail)
    guard.call("here", lambda: 1 // 0)
    now += 61
    guard.call("here", fail)
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"tier nvme: internal error in {place}" for place in ("here", "there", "here", "here")
    ]
    assert all(record.exc_info for record in caplog.records)


def test_neither_a_counter_nor_a_log_that_raises_gets_out() -> None:
    log = logging.getLogger("guard that raises")
    log.error = fail  # type: ignore[assignment]
    assert Guard(fail, log).call("here", fail) is False


def test_an_end_of_the_process_is_not_held_up() -> None:
    guard = Guard(lambda _: None, logging.getLogger("guard"))

    def leave() -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        guard.call("here", leave)


def test_a_task_that_nobody_awaits_is_noticed_when_it_fails() -> None:
    counted: list[str] = []
    guard = engine_guard(counted.append)

    async def failing() -> None:
        raise Raised

    async def refused() -> None:
        raise NotFound("an answer to whoever asked")

    async def endless() -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        tasks = [guard.task("task", one(), loop) for one in (failing, refused, endless)]
        await asyncio.sleep(0)
        tasks[-1].cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert counted == ["internal_errors.task"]


def test_a_tier_counts_under_its_own_name() -> None:
    counted: list[tuple[str, float]] = []
    guard = tier_guard("tier d", lambda name, amount: counted.append((name, amount)), logging.getLogger("g"), lambda: 0)
    guard.call("a tick", fail)
    assert counted == [("io_failed_callbacks", 1)]


def test_an_answer_is_given_once_and_a_late_one_elsewhere() -> None:
    answers: list[int] = []
    late: list[int] = []
    for once in (Once(answers.append), Once(answers.append, late.append)):
        once(1)
        once(2)
    assert (answers, late) == ([1, 1], [2])


def test_every_place_outside_tiers_is_a_label_from_the_start() -> None:
    """An alert on the increase of a counter misses the first error of a label that appears with it."""
    named = re.compile(r"guard\.(?:call|value|each|task)\(\s*\"(\w+)\"")
    folders = [Path(module.__file__).parents[1] / name for name in ("depot", "daemon", "attach", "rpc")]
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    assert {place for text in texts for place in named.findall(text)} <= set(PLACES)
