"""Workers that hang or die over a transfer of a bucket's object: nothing is written after extents were given back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import obstore
import pytest
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.bucket import BucketSettings
from kvdepot.server.io.jobs import PublishFile, ReadFile, StatFiles
from kvdepot.server.io.tasks import CRASHES_MAX
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of

from demo.bucket import BUCKET, CREDENTIALS
from tests.fakes.faulty_proxy import FaultyProxy
from tests.rigs.io_pool_rig import PoolRig, pool_on, until
from tests.rigs.io_rig import MIB, IoRig
from tests.rigs.s3_server import S3Server

PAGES = 4 * MIB // 4096
HELD_AT = 3 * MIB
PIECE = 100_000
GIVEN_BACK = 0x5A
SECONDS = 1.0
"""For so long the bytes that were held have time to arrive."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    server.clear()
    with FaultyProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: FaultyProxy, tmp_path: Path) -> str:
    file = tmp_path / "credentials"
    file.write_text(CREDENTIALS)
    file.chmod(0o600)
    settings = BucketSettings(f"s3://{BUCKET}", proxy.url, "us-east-1", allow_http=True, credentials_file=str(file))
    return settings.pack()


def put(name: ObjectName, offset: int) -> PublishFile:
    return PublishFile(
        "a/b.kvd", "t", 0, name, 0, 0, ((offset, name.raw_bytes),), None, sync=False, quarantine=".quarantine/x"
    )


def get(name: ObjectName, offset: int) -> ReadFile:
    return ReadFile("a/b.kvd", name, ((offset, name.raw_bytes),), ".quarantine/x")


def under_way(proxy: FaultyProxy, rig: IoRig, earlier: int, content: bytes) -> bool:
    return proxy.held > earlier and part(rig) == content[:MIB]


def gone(under: PoolRig, pid: int) -> bool:
    return pid not in under.pool.pids


def part(rig: IoRig) -> bytes:
    return bytes(rig.arena[:MIB])


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("ends", ["deadline", "kill"])
def test_what_arrives_after_the_end_of_a_get_reaches_no_extent(
    rig: IoRig, proxy: FaultyProxy, bucket: str, ends: str
) -> None:
    async def run() -> None:
        name = name_of(1, pages=PAGES)
        deadline = 3.0 if ends == "deadline" else 60.0
        async with pool_on(rig, bucket=bucket, deadline=deadline, failures=100) as under:
            rig.arena[: name.raw_bytes] = os.urandom(name.raw_bytes)
            content = bytes(rig.arena[: name.raw_bytes])
            assert (await under.ask(put(name, 0))).outcome is IoOutcome.OK
            rig.arena[: name.raw_bytes] = bytes(name.raw_bytes)
            proxy.held_at = HELD_AT
            loan = under.lent()
            asked = under.ask(get(name, 0), loan)
            for deaths in range(CRASHES_MAX if ends == "kill" else 0):
                await until(partial(under_way, proxy, rig, deaths, content), "it is in transfer")
                pid = under.pid
                os.kill(pid, signal.SIGKILL)
                await until(partial(gone, under, pid), "it is reaped")
            answer = await asked
            assert answer.outcome is (IoOutcome.TIMEOUT if ends == "deadline" else IoOutcome.IO_ERROR)
            await until(lambda: loan.held_by is None, "the extents are given back")
            assert ends == "kill" or part(rig) == content[:MIB], "the transfer was under way"
            rig.arena[: name.raw_bytes] = bytes([GIVEN_BACK]) * name.raw_bytes
            proxy.clear()
            await asyncio.sleep(SECONDS)
            assert bytes(rig.arena[: name.raw_bytes]) == bytes([GIVEN_BACK]) * name.raw_bytes
            asked = under.ask(get(name, 0), under.lent())
            assert (await asked).outcome is IoOutcome.OK
            assert bytes(rig.arena[: name.raw_bytes]) == content

    asyncio.run(run())


@pytest.mark.requirement("I6")
def test_a_put_that_was_killed_publishes_nothing_of_what_its_extents_hold_later(
    rig: IoRig, proxy: FaultyProxy, server: S3Server, bucket: str
) -> None:
    async def run() -> None:
        name = name_of(1, pages=PAGES)
        async with pool_on(rig, bucket=bucket, deadline=2.0, failures=100) as under:
            await under.ask(StatFiles(("a/b.kvd",)))
            rig.arena[: name.raw_bytes] = os.urandom(name.raw_bytes)
            proxy.hangs = True
            loan = under.lent()
            assert (await under.ask(put(name, 0), loan)).outcome is IoOutcome.TIMEOUT
            await until(lambda: loan.held_by is None, "the extents are given back")
            rig.arena[: name.raw_bytes] = bytes([GIVEN_BACK]) * name.raw_bytes
            proxy.clear()
            await asyncio.sleep(SECONDS)
            assert all(bytes([GIVEN_BACK]) * 4096 not in server.get(key) for key in server.names())

    asyncio.run(run())


def test_an_answer_that_is_cut_off_is_an_error_and_no_damage(
    rig: IoRig, proxy: FaultyProxy, server: S3Server, bucket: str
) -> None:
    async def run() -> None:
        name = name_of(1, pages=PAGES)
        async with pool_on(rig, bucket=bucket, failures=100) as under:
            assert (await under.ask(put(name, 0))).outcome is IoOutcome.OK
            proxy.answer_bytes = PIECE  # the library asks for the rest, as often as it may
            assert (await under.ask(get(name, 0))).outcome is IoOutcome.IO_ERROR
            proxy.clear()
            assert (await under.ask(get(name, 0))).outcome is IoOutcome.OK
        assert server.names() == ["a/b.kvd"] and server.quarantined() == []

    asyncio.run(run())


def test_a_look_up_tells_lengths_absent_names_and_failures_apart(
    rig: IoRig, proxy: FaultyProxy, server: S3Server, bucket: str
) -> None:
    async def run() -> None:
        for number in range(3):
            obstore.put(server.store, f"x/{number}", b"1" * (number + 1))
        async with pool_on(rig, bucket=bucket) as under:
            answer = await under.ask(StatFiles(tuple(f"x/{number}" for number in range(6))))
            assert answer.lengths == (1, 2, 3, -1, -1, -1)
            proxy.drops = True
            assert (await under.ask(StatFiles(("x/1",)))).outcome is IoOutcome.IO_ERROR

    asyncio.run(run())
