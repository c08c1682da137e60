"""What is forked is a process of its own: environment, streams, group, status, end. With processes that do nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.engine import ROOT, Engine, EngineOptions, EngineProcess, EngineProcessError
from demo.toys import DENSE
from tests.e2e import forked
from tests.e2e.fleet import FREE_CORES
from tests.e2e.fork_server import BY_VLLM, same_at_import, server_environment
from tests.e2e.forked import ForkServer
from tests.rigs.fork_server import NoForkError, check_forkable
from tests.rigs.patience import patient, wait_until

FRONT = "tests.fakes.scripted_front"
END_SECONDS = 30.0


@pytest.fixture(scope="module", autouse=True)
def without_vllm() -> Iterator[None]:
    """A test of the connector that ran in this process before has imported vLLM, which sets these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in BY_VLLM:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(options().process_environment(), [FRONT])
    yield server
    server.close()


@pytest.fixture
def launch(server: ForkServer, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as stack:
        yield lambda **how: stack.enter_context(Engine(options(**how), tmp_path / "engine.log", server.start))


def options(environment: dict[str, str] | None = None, **arguments: Any) -> EngineOptions:
    return EngineOptions(DENSE, Path("nowhere"), None, arguments, FREE_CORES | (environment or {}))


def await_end(pids: list[int]) -> None:
    def left() -> list[int]:
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    wait_until(lambda: not left(), lambda: f"{left()} still there", END_SECONDS)


def test_each_process_of_an_engine_is_a_copy_in_one_group_with_the_environment_of_who_asked(
    server: ForkServer, launch: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = launch(core=True, environment={"KVDEPOT_TEST": "this engine's"})
    front, core, worker = processes = engine.ready["processes"]
    assert len({one["pid"] for one in processes}) == 3
    assert {one["parent"] for one in processes} == {server.pid}
    assert {one["group"] for one in processes} == {front["pid"]} != {os.getpgrp()}
    assert {front["pid"], core["pid"], worker["pid"]} < set(engine.processes())
    assert {one["environment"]["KVDEPOT_TEST"] for one in processes} == {"this engine's"}
    assert {one["directory"] for one in processes} == {str(ROOT)}
    assert "LD_PRELOAD" not in front["environment"], "that is the server's own"
    assert "a line of the log" in (tmp_path / "engine.log").read_text()


def test_copies_share_the_seed_of_hashes_and_no_random_numbers(launch: Callable[..., Engine]) -> None:
    """The first is why there are two servers, and why tests that restart an engine start it fresh."""
    processes = [process for _ in range(2) for process in launch(core=True).ready["processes"]]
    assert {process["hash"] for process in processes} != {hash("seed")}
    assert len({process["hash"] for process in processes}) == 1
    assert len({number for process in processes for number in process["random"]}) == 2 * len(processes)


def test_engines_that_start_one_after_the_other_have_other_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers: list[ForkServer] = []

    def server(environment: dict[str, str]) -> ForkServer:
        servers.append(ForkServer(environment, [FRONT]))
        return servers[-1]

    monkeypatch.setattr(forked, "ForkServer", server)
    monkeypatch.setattr(forked, "_servers", {})
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(Engine(options(core=True), tmp_path / "engine.log", forked.start_forked))
            for _ in range(4)
        ]
        first, second, third, fourth = (
            {process["hash"] for process in engine.ready["processes"]} for engine in engines
        )
    assert len(servers) == 2
    assert len(first) == len(second) == 1 and first == third != second == fourth


def test_a_copy_holds_no_descriptor_of_another_engine(launch: Callable[..., Engine]) -> None:
    """Else an engine would not see the end of what it reads, and its status would come late."""

    def pipes(process: dict[str, Any]) -> set[str]:
        return {file for file in process["files"].values() if file.startswith("pipe:")}

    first, second = launch(core=True), launch(core=True)
    for one in first.ready["processes"]:
        for other in second.ready["processes"]:
            assert not pipes(one) & pipes(other)
    first.close()
    assert second.alive


def test_a_status_passes_from_the_server_to_who_asked(launch: Callable[..., Engine]) -> None:
    engine = launch(core=True)
    os.kill(engine.ready["processes"][1]["pid"], signal.SIGKILL)
    assert engine._result(engine._send("await_core")) == -signal.SIGKILL
    process = engine._process
    assert process is not None and process.poll() is None
    engine._result(engine._send("close"))
    assert process.wait(patient(END_SECONDS)) == 7
    assert not engine.alive
    engine.kill()


def test_a_killed_engine_leaves_no_process_and_the_server_forks_the_next(launch: Callable[..., Engine]) -> None:
    engine = launch(core=True)
    processes = [process["pid"] for process in engine.ready["processes"]]
    engine.kill()
    await_end(processes)
    assert launch(core=True).alive


def test_an_engine_with_another_environment_at_import_starts_fresh(
    launch: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_process(options: EngineOptions, log: Path) -> EngineProcess:
        raise EngineProcessError("fresh")

    monkeypatch.setattr(forked, "start_process", start_process)
    with pytest.raises(EngineProcessError, match="fresh"):
        launch(core=True, environment={"PYTHONHASHSEED": "1"})


def test_what_is_read_at_import_has_to_be_the_same() -> None:
    asked = {"OMP_NUM_THREADS": "1", "KVDEPOT_AUDIT_PATH": "one", "PATH": "p"}
    server = server_environment(asked)
    assert same_at_import(asked, server)
    assert same_at_import(server, server), "as vLLM sets it for an engine's further processes"
    assert same_at_import(asked | {"KVDEPOT_AUDIT_PATH": "another", "KVDEPOT_TEST_FAULTS": "f"}, server)
    assert not same_at_import(asked | {"OMP_NUM_THREADS": "2"}, server)
    assert not same_at_import(asked | {"PYTHONHASHSEED": "0"}, server)
    assert not same_at_import(asked | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}, server)
    assert not same_at_import({"PATH": "p"}, server)


def test_a_process_with_a_second_thread_forks_nothing(tmp_path: Path) -> None:
    go_on = threading.Event()
    threading.Thread(target=go_on.wait, name="second").start()
    try:
        with pytest.raises(NoForkError, match="second"):
            check_forkable()
    finally:
        go_on.set()
    server = ForkServer(options().process_environment(), [FRONT, "tests.fakes.threaded"])
    try:
        with pytest.raises(EngineProcessError, match="2 threads"):
            Engine(options(), tmp_path / "engine.log", server.start).launch()
    finally:
        server.close()


def test_engines_end_with_their_driver(tmp_path: Path) -> None:
    driver = (
        "import sys; from tests.e2e.test_fork_server import *; "
        f"engine = Engine(options(core=True), Path({str(tmp_path / 'engine.log')!r}), "
        "ForkServer(options().process_environment(), [FRONT]).start).start(); "
        "print(*(process['pid'] for process in engine.ready['processes']), flush=True); time.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        processes = [int(pid) for pid in process.stdout.readline().split()]
        assert len(processes) == 3
        process.kill()
    await_end(processes)
