"""Parts of the day-one kit that a stand-in alone does not show: NUMA nodes, replays of graphs, and the sanitizer."""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import cuda
from benchmarks.day_one import kit, numa
from benchmarks.day_one.machine import Machine
from benchmarks.day_one.memcheck import memcheck
from benchmarks.day_one.pinning import steps_meanwhile
from benchmarks.day_one.stand_in import StandIn
from benchmarks.day_one.steps import Context, WrongByteError
from tests.rigs.patience import patient

MIB = 1 << 20


class JudgedMachine(StandIn):
    """One whose children are a GPU's."""

    stands_in = False


class CountingMachine(StandIn):
    """Counts graphs, their replays, and the threads that queue work."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs = self.replays = 0
        self.entered: set[str] = set()

    def enter(self) -> None:
        self.entered.add(threading.current_thread().name)

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        self.graphs += 1
        put = super().graph(work)

        def replay() -> object:
            self.replays += 1
            return put()

        return replay


@pytest.fixture
def machine() -> Iterator[CountingMachine]:
    made = CountingMachine()
    yield made
    made.close()


def context_of(machine: Machine, out: Path, seconds: float = 60.0) -> Context:
    return Context(machine, out, seed=1, until=time.monotonic() + patient(seconds))


def test_shares_of_all_steps_are_the_seconds_of_a_run() -> None:
    assert sum(step.share for step in kit.STEPS) == cuda.parse([]).seconds


def test_an_engine_replays_one_graph_on_a_thread_of_its_own_while_memory_is_pinned(machine: CountingMachine) -> None:
    began: list[int] = []
    took = steps_meanwhile(machine, lambda: began.append(machine.replays))
    assert machine.graphs == 1 and began[0] >= 1
    assert machine.replays == 1 + len(took) >= 3
    assert machine.entered and threading.current_thread().name not in machine.entered


@pytest.mark.parametrize(("said", "expected"), [("0\n", [0]), ("0-1\n", [0, 1]), ("0-1,3\n", [0, 1, 3])])
def test_the_kernels_list_of_nodes_is_read(said: str, expected: list[int]) -> None:
    assert numa.nodes(said) == expected


def test_pages_are_found_on_the_node_that_they_were_bound_to() -> None:
    try:
        found = numa.nodes_of(numa.memory_on(numa.nodes()[0], MIB))
    except PermissionError as error:
        pytest.skip(f"this container forbids it: {error}")
    assert found == {numa.nodes()[0]: MIB // mmap.PAGESIZE}
    with pytest.raises(OSError, match="has no node") as caught:
        numa.nodes_of(memoryview(mmap.mmap(-1, MIB)))
    assert caught.value.errno == errno.ENOENT


def test_each_node_is_measured_and_one_that_gives_no_memory_is_named(
    machine: CountingMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held: dict[int, int] = {}

    def memory_on(node: int, size_bytes: int) -> memoryview:
        if node == 2:
            raise OSError(errno.ENOMEM, "nothing there")
        memory = memoryview(mmap.mmap(-1, size_bytes))
        held[id(memory)] = node
        return memory

    def nodes_of(memory: memoryview) -> Counter[int]:
        return Counter({held[id(memory)]: 4}) if id(memory) in held else Counter({0: 3, 1: 1})

    monkeypatch.setattr(numa, "nodes", lambda: [0, 1, 2])
    monkeypatch.setattr(numa, "memory_on", memory_on)
    monkeypatch.setattr(numa, "nodes_of", nodes_of)
    context = context_of(machine, tmp_path)
    numa.numa(context)
    record = context.report.record()
    assert {f"node {node}: {way}" for node in (0, 1) for way in ("store", "load")} < record.keys()
    notes = record["notes"]
    assert isinstance(notes, dict)
    assert notes["numa nodes of an arena's pages"] == "node 0: 75%, node 1: 25%"
    assert "nothing there" in str(notes["node 2, not run"])


def test_a_machine_that_does_not_say_nodes_is_no_failure(
    machine: CountingMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(numa, "_CALLS", {})
    context = context_of(machine, tmp_path)
    numa.numa(context)
    assert "unknown" in str(context.report.record())


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Context]:
    """Return what makes a sanitizer of a shell script, and a step on a machine that has it."""

    def make(script: str) -> Context:
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return context_of(JudgedMachine(), tmp_path, 10.0)

    return make


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("script", ["exit 99", "echo '========= Invalid __global__ read of size 8'; exit 0"])
def test_an_access_out_of_bounds_is_a_wrong_byte(sanitizer: Callable[[str], Context], script: str) -> None:
    with pytest.raises(WrongByteError, match="out of bounds"):
        memcheck(sanitizer(script))


def test_parts_that_the_sanitizer_has_seen_are_named(sanitizer: Callable[[str], Context]) -> None:
    context = sanitizer("""echo '{"order": 18}'; echo '{"order": 18, "layers": 24}'""")
    memcheck(context)
    assert "nothing was found in: order (18 cases), layers (24 cases)" in str(context.report.record())


def test_the_time_ends_the_sanitizer_and_its_child_and_is_no_success(
    sanitizer: Callable[[str], Context], tmp_path: Path
) -> None:
    context = sanitizer(f"""echo '{{"order": 18}}'; (sleep 600 & echo $! > {tmp_path}/child; wait)""")
    context.until = time.monotonic() + 1.0
    memcheck(context)
    assert "not to its end': 'the time was over after: order (18 cases)" in str(context.report.record())
    child = Path("/proc") / (tmp_path / "child").read_text().strip()
    until = time.monotonic() + patient(10)
    while child.exists() and "Z (zombie)" not in (child / "status").read_text() and time.monotonic() < until:
        time.sleep(0.01)
    assert not child.exists() or "Z (zombie)" in (child / "status").read_text()


def test_a_program_that_ends_wrongly_under_the_sanitizer_is_a_failure(sanitizer: Callable[[str], Context]) -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        memcheck(sanitizer("exit 3"))
