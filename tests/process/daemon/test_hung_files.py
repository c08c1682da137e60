"""Configuration or state on a medium that hangs: changes are whole, the latest one is kept, a stop ends (I8, T4)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from kvdepot.core.control import BumpCall, Switch, SwitchCall
from kvdepot.proto.v1 import control_pb2 as pb
from kvdepot.proto.v1 import control_pb2_grpc as pb_grpc
from kvdepot.server.daemon import state_file
from kvdepot.server.daemon.state_file import StateFile
from kvdepot.server.platform import durable_files
from kvdepot.server.rpc.control_service import control_service

from tests.fakes.operator_control import calls_of_anybody, control_over
from tests.fakes.thread_room import no_room_for_threads
from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_rig import Rig
from tests.rigs.patience import wait_until

HUNG_SECONDS = 30.0


@contextmanager
def first_write_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until the event is set; those that follow are written at once."""
    publish, goes_on = durable_files.publish, threading.Event()
    hung: list[Path] = []

    def hanging(path: Path, pieces: Sequence[bytes]) -> None:
        if not hung:
            hung.append(path)
            goes_on.wait(HUNG_SECONDS)
        publish(path, pieces)

    monkeypatch.setattr(state_file, "publish", hanging)
    yield goes_on
    goes_on.set()


@pytest.mark.requirement("P2")
def test_a_bump_whose_caller_gave_up_is_done_and_not_only_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the run that goes on would serve what the next one has void."""

    async def scenario(goes_on: threading.Event) -> None:
        rig, state = Rig(), StateFile(tmp_path / "state")
        control = control_over(rig, state)
        control.restore()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((control_service(control, calls_of_anybody(), logging.getLogger("tests")),))
        server.add_insecure_port(f"unix:{tmp_path}/s")
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            stub = pb_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.BumpEpoch(pb.BumpEpochRequest(all=True), timeout=0.3)
            assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            goes_on.set()
            await control.close(HUNG_SECONDS)
        await server.stop(0)
        assert state.read().epochs == rig.depot.invalidation.epochs
        assert rig.depot.invalidation.epochs.bump == 1

    with first_write_hangs(monkeypatch) as goes_on:
        asyncio.run(scenario(goes_on))


@pytest.mark.requirement("I1e")
def test_what_was_told_last_is_kept_although_an_earlier_caller_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(goes_on: threading.Event) -> None:
        state = StateFile(tmp_path / "state")
        control = control_over(Rig(), state)
        control.restore()
        first = asyncio.create_task(control.switch(SwitchCall(Switch.LOADS, on=False)))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(control.switch(SwitchCall(Switch.LOADS, on=True)))
        await asyncio.sleep(0.1)
        assert not second.done(), "one after the other"
        goes_on.set()
        assert not (await second).not_persisted
        await control.close(HUNG_SECONDS)
        assert not state.read().switches.loads_off

    with first_write_hangs(monkeypatch) as goes_on:
        asyncio.run(scenario(goes_on))


@pytest.mark.requirement("I8")
def test_what_an_operator_says_is_done_though_the_host_has_no_room_for_the_thread_that_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig()
        control = control_over(rig, StateFile(tmp_path / "state"))
        with no_room_for_threads(monkeypatch):
            switched = await control.switch(SwitchCall(Switch.LOADS, on=False))
            bumped = await control.bump(BumpCall(all=True))
        assert switched.switches.loads_off and rig.depot.invalidation.epochs.bump == 1
        assert all("no room for another thread" in one.not_persisted for one in (switched, bumped))

    asyncio.run(scenario())


@contextmanager
def reload_hangs() -> Iterator[tuple[DaemonProcess, Path]]:
    """Of a configuration on a mount that does not answer, say: here nobody ever writes into the FIFO."""
    with DaemonProcess(config="") as daemon:
        file = daemon.directory / "kvdepot.toml"
        file.unlink()
        os.mkfifo(file)
        os.kill(daemon.pid, signal.SIGHUP)
        wait_until(lambda: _waits_in(daemon.pid, "wait_for_partner", "fifo_open"), "the reload hangs", 10)
        yield daemon, file


@pytest.mark.requirement("T4")
def test_a_stop_ends_beside_a_reload_that_hangs() -> None:
    with reload_hangs() as (daemon, _):
        assert daemon.stop() == 0


@pytest.mark.requirement("T9")
def test_a_reload_does_not_wait_for_one_that_hangs() -> None:
    with reload_hangs() as (daemon, file):
        file.unlink()
        file.write_text("[policy]\nloads_in_flight = 2\n")
        assert "policy.loads_in_flight: 64 -> 2" in kvdepotctl(daemon, "reload").stdout


def _waits_in(pid: int, *functions: str) -> bool:
    """A thread of the process waits in one of these of the kernel's."""
    return any(path.read_text().strip() in functions for path in Path(f"/proc/{pid}/task").glob("*/wchan"))
