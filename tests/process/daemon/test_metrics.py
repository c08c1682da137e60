"""/metrics of a real daemon through a life of it: no counter falls or goes, and every label has a bound (row P10)."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from kvdepot.core import limits
from kvdepot.core.report import DaemonStatus, TierStatus
from kvdepot.server.observe.metric_families import FAMILIES
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.ctl_process import answered
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_process import EngineProcess
from tests.rigs.known_objects import Known, KnownEngine, dense
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import RawEngine, status_of

pytestmark = pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
WAIT_SECONDS = 60.0
OBJECT_BYTES = 64 << 10
PROMPTS = 4
SESSIONS = 5
TENANTS = ("*", "t")
TIERS = ("ram", "nvme")
CONFIG = f"""
[policy]
loads_in_flight = 4
[breaker]
failures = 2
probe_every = "200ms"
[scrub]
quarantine_capacity = "8MiB"
[[tier]]
name = "nvme"
kind = "disk"
path = "{{path}}"
capacity = "128MiB"
write = "commit"
[[quota]]
tier = "ram"
capacity = "{8 * OBJECT_BYTES}B"
[[quota]]
tenant = "t"
namespace = "*"
tier = "nvme"
capacity = "{{disk}}B"
"""
Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Scraped:
    growing: dict[Series, float]  # counters, and histograms' buckets, sums and counts
    others: dict[Series, float]

    def value(self, name: str, **labels: str) -> float:
        return (self.growing | self.others)[f"kvdepot_{name}", tuple(sorted(labels.items()))]


@dataclass
class Depot:
    daemon: DaemonProcess
    fuse: FuseDirectory

    def engine(self, label: str) -> KnownEngine:
        return KnownEngine(self.daemon.socket, dense(OBJECT_BYTES, label))

    @property
    def status(self) -> DaemonStatus:
        return status_of(self.daemon.socket)

    @property
    def disk(self) -> TierStatus:
        return self.status.tiers[1]

    def in_use(self) -> bool:
        return (self.disk.state, self.disk.breaker) == ("ready", "closed")

    def scrape(self) -> Scraped:
        with urllib.request.urlopen(f"{self.daemon.metrics}/metrics") as answer:
            text = answer.read().decode()
        growing, others = dict[Series, float](), dict[Series, float]()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found = growing if family.type in ("counter", "histogram") else others
                found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return Scraped(growing, others)


@pytest.fixture
def depot(fuse: FuseDirectory) -> Iterator[Depot]:
    config = CONFIG.format(path=fuse.path / "nvme", disk=64 << 20)
    with DaemonProcess(ram="456MiB", config=config) as daemon:
        depot = Depot(daemon, fuse)
        wait_until(depot.in_use, "the tier is open", WAIT_SECONDS)
        yield depot


def stored_and_loaded(depot: Depot) -> None:
    """More than the quota lets into RAM: evicted, and read from the disk again."""
    with depot.engine("dense") as engine:
        objects = set[Known]()
        for number in range(PROMPTS):
            objects.update(engine.prompt(number))
            engine.put_until(engine.prompt(number), lambda: depot.disk.objects == len(objects), WAIT_SECONDS)

        def read() -> bool:
            """Of eight objects in RAM, which those are is the policy's choice; a sum under way may leave no room."""
            served = [number for number in range(PROMPTS) if engine.get_prompt(number) > 0]
            return len(served) == PROMPTS and depot.status.counters.get("tier_reads.nvme/ok", 0) > 0

        wait_until(read, "all are served, some from the disk", WAIT_SECONDS)
        engine.locate([bytes(range(16))])


def session_ended(depot: Depot) -> None:
    """An engine is killed with an open lease."""
    wait_until(lambda: depot.status.tiers[0].lent_bytes == 0, "what is in RAM may be evicted", WAIT_SECONDS)
    with EngineProcess(depot.daemon.socket, "killed", "reserve", "its own", 1) as engine:
        assert "killed" in {session.engine_id for session in depot.status.sessions}
        engine.kill()
        wait_until(
            lambda: "killed" not in {session.engine_id for session in depot.status.sessions}, "it is gone", WAIT_SECONDS
        )


def reloaded(depot: Depot) -> None:
    """Another limit, and a smaller quota."""
    path = depot.daemon.directory / "kvdepot.toml"
    before = path.read_text()
    path.write_text(before.replace("loads_in_flight = 4", "loads_in_flight = 2").replace(f"{64 << 20}B", f"{1 << 20}B"))
    assert "policy.loads_in_flight" in answered(depot.daemon, "reload")


def tier_failed(depot: Depot) -> None:
    """Reads fail until the path is out of use; then it comes back."""
    with depot.engine("dense") as engine:
        depot.fuse.fault(read=5)

        def out_of_use() -> bool:
            for number in range(PROMPTS):
                engine.get_prompt(number)
            return depot.disk.breaker != "closed"

        wait_until(out_of_use, "its path is out of use", WAIT_SECONDS)
        depot.fuse.fault()
        wait_until(depot.in_use, "it is in use again", WAIT_SECONDS)


def directory_lost(depot: Depot) -> None:
    """And found again, its index read anew."""
    directory = depot.fuse.backing / "nvme"
    with depot.engine("dense") as engine:
        directory.rename(directory.with_name("away"))

        def offline() -> bool:
            engine.put(engine.prompt(PROMPTS + len(noticed)))
            noticed.append(depot.disk.state)
            return noticed[-1] == "offline"

        noticed: list[str] = []
        wait_until(offline, "it is missed", WAIT_SECONDS)
        directory.with_name("away").rename(directory)
        wait_until(depot.in_use, "it is in use again", WAIT_SECONDS)


def many_namespaces(depot: Depot) -> None:
    """As many as sessions may have, one of each asked for."""
    with ExitStack() as stack:
        for number in range(SESSIONS):
            spec = replace(dense(OBJECT_BYTES, f"engine-{number}"), tenant="t")
            engine = stack.enter_context(RawEngine(depot.daemon.socket, spec.label, spec=spec))
            for epoch in range(limits.NAMESPACES_PER_SESSION_MAX - 1):
                engine.namespace = engine.register(replace(spec, epoch=f"{epoch}")).namespace_id
                assert engine.locate([bytes(16)]) == 0


def check_labels(scraped: Scraped) -> None:
    """All of what the configuration names and what the program can say."""
    families = {name: family for family in FAMILIES for name in family.series_names}
    for name, labels in [*scraped.growing, *scraped.others]:
        if not name.startswith("kvdepot_"):
            continue
        said, family = dict(labels), families[name]
        said.pop("le", None)
        assert said.keys() == set(family.labels), name
        if family.values:
            assert said.pop(family.labels[-1]) in (*family.values, *(TIERS if family.or_tiers else ())), name
        assert said.pop("tier", "ram") in TIERS
        assert said.pop("tenant", "*") in TENANTS
        assert said.pop("namespace", "") in ("", "*")
        said.pop("version", None)
        assert not said, f"{name}: {said} has no bound"


@pytest.mark.requirement("P10")
def test_no_counter_falls_or_goes_and_no_label_is_what_engines_say(depot: Depot) -> None:
    scrapes = [depot.scrape()]
    for step in (stored_and_loaded, session_ended, reloaded, tier_failed, directory_lost, many_namespaces):
        step(depot)
        scrapes.append(depot.scrape())
    for before, after in pairwise(scrapes):
        assert before.growing.keys() <= after.growing.keys(), "none goes"
        fallen = {series: value for series, value in before.growing.items() if after.growing[series] < value}
        assert not fallen
    first, last = scrapes[0], scrapes[-1]
    assert first.growing.keys() == last.growing.keys(), "nor comes: what can happen was there with 0"
    for scraped in scrapes:
        check_labels(scraped)
    assert last.value("namespaces") >= SESSIONS * (limits.NAMESPACES_PER_SESSION_MAX - 1)
    assert last.value("evicted_objects_total", reason="quota") > 0
    assert last.value("quota_evicted_objects_total", tenant="*", namespace="", tier="ram") > 0
    assert last.value("tier_reads_total", tier="nvme", outcome="ok") > 0
    assert last.value("io_answers_total", tier="nvme", outcome="io_error") > 0
    assert last.value("io_breaker_openings_total", tier="nvme") > 0
    assert last.value("misses_total", reason="unknown") > 0
