"""CPU time of the daemon's one thread per object, by call, with 1, 4 and 16 engines and many objects in RAM.

Objects are small: the work of a call grows with their number, not with their bytes. Engines are processes with the
client of vLLM's connector, all of one namespace, and copy nothing. A prompt is one call of 16 chunks. What a call
causes later (checksums, writes, journals) counts as its own. So that machines can be compared, times are CPU time of
that thread (`/proc/PID/task/PID/schedstat`); its longest hold is `benchmarks.loop_hold`'s.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvdepot.core.arena import ROW_BYTES_MEAN
from kvdepot.core.ram_size import capacity_for

from benchmarks.control_engines import IN_FLIGHT, Engines, Prompt
from benchmarks.control_engines import engines as attached
from benchmarks.depot import Daemon, Status, daemon
from benchmarks.report import Report, arguments

ENGINES: Final = (1, 4, 16)
FEW_OBJECTS: Final = 10_000
PROMPT_CHUNKS: Final = 16
SAMPLE_PROMPTS: Final = 256
STORE_US_MAX, DISK_WRITE_US_MAX, LOAD_US_MAX, GROWTH_MAX = 50.0, 200.0, 0.5, 1.2
_DISK_RAM: Final = "640MiB"
_DISK_CONFIG: Final = """
[[tier]]
name = "disk"
kind = "disk"
path = "{path}"
capacity = "2GiB"
write = "commit"
"""


def prompts(count: int) -> list[Prompt]:
    return [tuple(random.randbytes(16) for _ in range(PROMPT_CHUNKS)) for _ in range(count)]


class Load:
    """Calls of some engines on one daemon, and what they cost its thread."""

    def __init__(self, engines: Engines, node: Daemon, status: Status) -> None:
        self._engines = engines
        self._clock = Path(f"/proc/{node.pid}/task/{node.pid}/schedstat")
        self._status = status

    def cost_us(self, work: Callable[[], int]) -> float:
        """Return CPU microseconds of the daemon's thread per object. `work` returns the number of its objects."""
        self._settle()
        began = self._cpu_ns()
        objects = work()
        self._settle()
        return (self._cpu_ns() - began) / objects / 1000

    def _cpu_ns(self) -> int:
        return int(self._clock.read_text().split()[0])

    def _settle(self) -> None:
        """Return when nothing is left to do. Asking for that costs little beside a thousand objects."""
        self._status.wait_summed()
        while any(tier.queued_objects for tier in self._status().tiers):
            time.sleep(0.05)

    def store(self, chosen: Sequence[Prompt]) -> int:
        """In parts, as much as the engines' credit permits."""
        for at in range(0, len(chosen), SAMPLE_PROMPTS):
            self._engines.reserve(chosen[at : at + SAMPLE_PROMPTS])
            self._engines.commit()
        return len(chosen) * PROMPT_CHUNKS

    def costs(self, resident: Sequence[Prompt]) -> dict[str, float]:
        """Return the microseconds of each call, with these prompts in RAM. Fresh ones are stored."""
        fresh = prompts(SAMPLE_PROMPTS)

        def reserve() -> int:
            self._engines.reserve(fresh)
            return len(fresh) * PROMPT_CHUNKS

        def commit() -> int:
            self._engines.commit()
            return len(fresh) * PROMPT_CHUNKS

        reserve_us = self.cost_us(reserve)
        commit_us = self.cost_us(commit)
        sample = random.sample(resident, min(len(resident), 4 * SAMPLE_PROMPTS))
        known = self._engines.locate(sample)[:SAMPLE_PROMPTS]
        locate_us = self.cost_us(lambda: len(self._engines.locate(known)) * PROMPT_CHUNKS)
        acquire_us, release_us = self.load_us(known)
        return {
            "reserve": reserve_us, "commit": commit_us, "locate": locate_us, "acquire": acquire_us,
            "release": release_us,
        }  # fmt: skip

    def load_us(self, chosen: Sequence[Prompt]) -> tuple[float, float]:
        """Return the microseconds of an acquire and of a release. Neither causes anything later, if all is in RAM."""
        acquired_ns = released_ns = 0
        self._settle()
        at_once = IN_FLIGHT * self._engines.count  # an engine does not load less because there are others
        for at in range(0, len(chosen), at_once):
            began = self._cpu_ns()
            self._engines.acquire(chosen[at : at + at_once])
            between = self._cpu_ns()
            self._engines.release()
            acquired_ns += between - began
            released_ns += self._cpu_ns() - between
        objects = len(chosen) * PROMPT_CHUNKS
        return acquired_ns / objects / 1000, released_ns / objects / 1000


@contextmanager
def loaded(engines: int, ram: str, config: Path | None = None) -> Iterator[tuple[Load, Daemon]]:
    """A daemon with its whole arena in memory, and so many engines."""
    with daemon(ram, config=config) as node:
        status = Status(node.endpoint)
        status.wait_populated(node)
        with attached(engines, node.endpoint) as processes:
            yield Load(processes, node, status), node


def in_ram(objects: int, engines: int) -> dict[str, float]:
    """Return the costs with few objects in RAM, with `objects`, and with RAM full."""
    ram = capacity_for(objects * ROW_BYTES_MEAN * 9 // 8)
    found: dict[str, float] = {}
    with loaded(engines, f"{ram >> 20}MiB") as (load, node):
        resident = prompts(FEW_OBJECTS // PROMPT_CHUNKS)
        load.store(resident)
        for name, count in (("few", 0), ("many", objects - FEW_OBJECTS)):
            more = prompts(count // PROMPT_CHUNKS)
            load.store(more)
            resident += more
            found |= {f"{call}_{name}": us for call, us in load.costs(resident).items()}
        load.store(prompts(node.arena_bytes // ROW_BYTES_MEAN // PROMPT_CHUNKS - len(resident)))
        latest = prompts(4 * SAMPLE_PROMPTS)
        load.store(latest)
        found |= {f"{call}_full": us for call, us in load.costs(latest).items()}
    return found


def with_a_disk(engines: int) -> dict[str, float]:
    """Return what a store costs that is written to a disk, and a load that reads it there."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        disk, config = Path(directory) / "disk", Path(directory) / "config.toml"
        disk.mkdir()
        config.write_text(_DISK_CONFIG.format(path=disk))
        with loaded(engines, _DISK_RAM, config) as (load, node):
            first = prompts(SAMPLE_PROMPTS)
            found["store_on_disk"] = load.cost_us(lambda: load.store(first))
            load.store(prompts(node.arena_bytes * 3 // 2 // ROW_BYTES_MEAN // PROMPT_CHUNKS))
            found["load_from_disk"], _ = load.load_us(first)
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--objects", type=int, default=1_000_000, help="in RAM (default: 1000000, 72 GiB)")
    parser.add_argument("--engines", type=int, nargs="+", default=list(ENGINES), help="attached (default: 1 4 16)")
    parser.add_argument("--disk", action="store_true", help="measure only stores on a disk, and loads from it")
    options = parser.parse_args()
    report = Report("control")
    rows: dict[int, dict[str, float]] = {}
    for engines in options.engines:
        ram = {} if options.disk else in_ram(options.objects, engines)
        rows[engines] = ram | with_a_disk(engines)
    columns = [f"{engines} engines" for engines in rows]
    print(f"{'us of CPU per object':<24}" + "".join(f"{column:>12}" for column in columns))
    for name in next(iter(rows.values())):
        print(f"{name:<24}" + "".join(f"{row[name]:>12.2f}" for row in rows.values()))
    if not options.disk:
        judge(report, rows)
        report.note("objects", options.objects)
    report.note("objects of each figure", SAMPLE_PROMPTS * PROMPT_CHUNKS)
    report.finish(options.json)


def judge(report: Report, rows: dict[int, dict[str, float]]) -> None:
    """Report the figures of the aims, by the costs for so many engines."""
    first, last = min(rows), max(rows)
    one = rows[first]
    store = {engines: row["reserve_full"] + row["commit_full"] for engines, row in rows.items()}
    load = {engines: row["acquire_many"] + row["release_many"] for engines, row in rows.items()}
    store_few, store_many = (one[f"reserve_{name}"] + one[f"commit_{name}"] for name in ("few", "many"))
    report.figure("store_us", store[first], "us", at_most=STORE_US_MAX)
    report.figure("load_us", load[first], "us", at_most=LOAD_US_MAX)
    report.figure("write_us", one["store_on_disk"] - store_few, "us", at_most=DISK_WRITE_US_MAX)
    report.figure("read_us", one["load_from_disk"] - one["acquire_few"], "us")
    report.figure("store_growth_engines", store[last] / store[first], "", at_most=GROWTH_MAX)
    report.figure("load_growth_engines", load[last] / load[first], "", at_most=GROWTH_MAX)
    report.figure("store_growth_objects", store_many / store_few, "", at_most=GROWTH_MAX)


if __name__ == "__main__":
    main()
