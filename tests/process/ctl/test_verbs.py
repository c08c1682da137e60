"""What operators change with `kvdepotctl`: the real command against a real daemon that holds engines' data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from urllib.error import HTTPError

import click
import grpc
import pytest
import yaml
from click.testing import CliRunner
from kvdepot.client.ctl.app import cli
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, ReserveOutcome
from kvdepot.core.errors import InvalidArgument, NotFound
from kvdepot.core.eviction import DEFAULT_POLICY
from kvdepot.proto.v1 import control_pb2, control_pb2_grpc

from tests.rigs.ctl_process import answered, kvdepotctl, problems, record, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, dense_spec, keys_of, status_of

SPEC = dense_spec("a-model", 16 << 10)
OTHER = replace(SPEC, label="other-model")
KEYS = keys_of("prompt", 3)
CONFIG = '[ram]\nhigh_watermark = 0.9\nlow_watermark = 0.8\n[policy]\nloads_in_flight = 1\n[log]\nlevel = "info"\n'


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def engine(daemon: DaemonProcess) -> Iterator[RawEngine]:
    with RawEngine(daemon.socket, "engine-0", spec=SPEC) as one:
        one.store(KEYS)
        yield one


@pytest.fixture(scope="module")
def other(daemon: DaemonProcess) -> Iterator[RawEngine]:
    with RawEngine(daemon.socket, "engine-1", spec=OTHER) as one:
        one.store(KEYS)
        yield one


@pytest.mark.requirement("I1e")
def test_loads_off_and_on_for_one_namespace(daemon: DaemonProcess, engine: RawEngine, other: RawEngine) -> None:
    name = engine.namespace.hex()
    switched = record(daemon, "loads", "off", name[:8])
    assert switched.pop("loads_off_seconds") >= 0 and switched.pop("stores_off_seconds") == 0
    assert switched == {
        "loads_off": False, "loads_off_namespaces": [name], "stores_off": False, "stores_off_namespaces": [],
        "draining": False, "leases": 0, "not_persisted": "",
    }  # fmt: skip
    assert engine.locate(KEYS) == 0
    assert engine.acquire(KEYS)[1] is AcquireOutcome.REFUSED
    assert other.locate(KEYS) > 0
    assert status_of(daemon.socket).counters["misses.loads_off"] == 1
    assert f"loads are off for {name[:12]}" in answered(daemon, "status", "--wide")
    warning = kvdepotctl(daemon, "health")
    assert (warning.returncode, warning.stdout.split()[0]) == (1, "HEALTH_WARN")
    line = rf"LOADS_OFF for {name[:12]}, for \d+ s -> kvdepotctl loads on {name[:12]}; docs/operations.md#loads-off"
    assert re.search(line, warning.stdout), warning.stdout
    found = kvdepotctl(daemon, "health", "-o", "json").stdout
    assert (json.loads(found)["verdict"], problems(found)) == ("HEALTH_WARN", ["LOADS_OFF"])
    assert json.loads(answered(daemon, "status", "--json"))["switches"]["loads_off_namespaces"] == [name]
    with urllib.request.urlopen(f"{daemon.metrics}/metrics") as answer:
        assert "kvdepot_loads_off_namespaces 1.0" in answer.read().decode()
    assert f"loads are on for namespace {name[:12]}" in answered(daemon, "loads", "on", name[:8])
    assert engine.locate(KEYS) > 0
    assert problems(answered(daemon, "health", "-o", "json")) == []


@pytest.mark.requirement("P10")
def test_programs_choose_json_or_yaml_and_people_a_wide_table(daemon: DaemonProcess, engine: RawEngine) -> None:
    for verb in (("quota", "list"), ("config", "show")):
        as_json = json.loads(answered(daemon, *verb, "-o", "json"))
        assert json.loads(answered(daemon, *verb, "--json")) == as_json
        assert yaml.safe_load(answered(daemon, *verb, "-o", "yaml")) == as_json
        assert answered(daemon, *verb, "-o", "table") == answered(daemon, *verb)
    documents = list(yaml.safe_load_all(answered(daemon, "verify", "-o", "yaml")))
    assert documents[-1]["tiers"][0]["finished"]
    namespace = engine.namespace.hex()
    listed = yaml.safe_load(answered(daemon, "ls", "-o", "yaml"))["namespaces"]
    assert namespace in [one["namespace_id"] for one in listed]
    assert namespace[:12] in answered(daemon, "status", "-o", "wide")
    refused = kvdepotctl(daemon, "ls", "-o", "wide")
    assert (refused.returncode, "'table', 'json', 'yaml'" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.requirement("I1e")
def test_stores_off_for_all_drops_what_is_in_progress(
    daemon: DaemonProcess, engine: RawEngine, other: RawEngine
) -> None:
    fresh = keys_of("fresh", 2)
    lease, outcomes, _ = engine.reserve(fresh)
    assert set(outcomes) == {ReserveOutcome.GRANTED}
    shown = text(daemon, "stores", "off")
    assert "stores are off for all namespaces" in shown
    assert "leases granted before, still in progress: 1" in shown
    assert set(engine.commit(lease, 2)) == {CommitOutcome.EXPIRED}
    assert set(other.reserve(fresh)[1]) == {ReserveOutcome.REFUSED}
    assert status_of(daemon.socket).counters["refused_stores.stores_off"] == 4
    assert engine.locate(KEYS) > 0
    answered(daemon, "stores", "on")
    engine.store(fresh)


@pytest.mark.requirement("I1e")
def test_switches_outlive_the_daemon_and_all_is_told_apart_from_one() -> None:
    with DaemonProcess() as daemon:
        with RawEngine(daemon.socket, "engine-0", spec=SPEC) as one:
            one.store(KEYS)
            wait_until(lambda: one.counter("checksummed_objects") == len(KEYS), "the sums", 60)
            name = one.namespace.hex()
        answered(daemon, "loads", "off", name)
        answered(daemon, "loads", "off")
        daemon.kill()
        daemon.start()
        assert "restored switch: loads off for all namespaces" in daemon.log
        shown = answered(daemon, "loads", "on")
        assert f"still off by name: {name[:12]}" in shown
        with RawEngine(daemon.socket, "engine-0", spec=SPEC) as one:
            assert (one.locate(KEYS), one.counter("misses.loads_off")) == (0, 1)
            answered(daemon, "loads", "on", name[:6])
            wait_until(lambda: one.locate(KEYS) > 0, "verification", 60)


def _rewrite(daemon: DaemonProcess, before: str, after: str) -> None:
    path = daemon.directory / "kvdepot.toml"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.mark.requirement("T9")
def test_a_reload_changes_limits_and_drops_no_lease(daemon: DaemonProcess, engine: RawEngine) -> None:
    lease, outcome, _ = engine.acquire(KEYS)
    assert outcome is AcquireOutcome.GRANTED
    assert engine.acquire(KEYS)[1] is AcquireOutcome.LATER
    _rewrite(daemon, "loads_in_flight = 1", "loads_in_flight = 2")
    (change,) = record(daemon, "reload")["changes"]
    assert change == {"key": "policy.loads_in_flight", "before": "1", "after": "2", "live": True}
    second, outcome, _ = engine.acquire(KEYS)
    assert outcome is AcquireOutcome.GRANTED
    assert [one.leases for one in status_of(daemon.socket).sessions if one.engine_id == "engine-0"] == [2]
    engine.release(lease)
    engine.release(second)
    assert "configuration unchanged: " in answered(daemon, "reload")
    shown = json.loads(answered(daemon, "config", "show", "--json"))["values"]
    assert (shown["policy.loads_in_flight"], shown["daemon.listen"]) == ("2", daemon.endpoint)


@pytest.mark.requirement("T9")
def test_sighup_reloads_and_what_takes_a_restart_is_refused_with_all_the_rest(daemon: DaemonProcess) -> None:
    _rewrite(daemon, 'level = "info"', 'level = "debug"')
    start = len(daemon.log)
    os.kill(daemon.pid, signal.SIGHUP)
    daemon.wait_for_log("configuration changed: log.level is debug, was info", start)
    _rewrite(daemon, "[policy]", '[policy]\neviction = "lru"')
    _rewrite(daemon, 'level = "debug"', 'level = "error"')
    refused = kvdepotctl(daemon, "reload")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "policy.eviction: cannot change while the daemon runs" in refused.stderr
    assert "log.level" not in refused.stderr
    assert answered(daemon, "config", "diff").splitlines() == [
        "log.level: debug -> error",
        f"policy.eviction: {DEFAULT_POLICY} -> lru (needs a restart)",
    ]
    assert "log.level = debug" in answered(daemon, "config", "show")
    start = len(daemon.log)
    os.kill(daemon.pid, signal.SIGHUP)
    daemon.wait_for_log("configuration not reloaded", start)
    _rewrite(daemon, 'eviction = "lru"', "")
    _rewrite(daemon, 'level = "error"', 'level = "info"')
    answered(daemon, "reload")


def test_evict_drops_a_chunk_with_what_follows_and_then_the_rest(daemon: DaemonProcess, other: RawEngine) -> None:
    name = other.namespace.hex()[:8]
    lease, _, _ = other.acquire(KEYS)
    done = record(daemon, "evict", f"{name}/{KEYS[1].hex()}")
    assert (done["key"], done["chunks"], done["unchanged_tiers"]) == (KEYS[1].hex(), 2, [])
    assert other.locate(KEYS) == CHUNK_TOKENS
    other.release(lease)
    asked = CliRunner().invoke(cli, ["--endpoint", daemon.endpoint, "evict", name], input="n\n")
    assert "delete all objects of namespace" in asked.output and "nothing was changed" in asked.output
    unasked = kvdepotctl(daemon, "evict", name)  # nobody is there to answer
    assert (unasked.returncode, unasked.stderr.splitlines()[-1]) == (130, "cancelled: nothing was changed")
    assert other.locate(KEYS) == CHUNK_TOKENS
    assert "evicted" in answered(daemon, "evict", name, "--yes")
    assert other.locate(KEYS) == 0
    with pytest.raises(NotFound, match="no chunk"):
        answered(daemon, "evict", f"{name}/{KEYS[1].hex()}")
    other.store(KEYS)


def test_drain_refuses_waits_and_resumes(daemon: DaemonProcess, engine: RawEngine) -> None:
    lease, outcome, _ = engine.acquire(KEYS)
    assert outcome is AcquireOutcome.GRANTED
    waiting = kvdepotctl(daemon, "drain", "--wait", "0.2")
    assert (waiting.returncode, "1 leases in progress" in waiting.stdout) == (1, True)
    assert engine.locate(KEYS) == 0
    with pytest.raises(HTTPError, match="503"):
        urllib.request.urlopen(f"{daemon.metrics}/healthz")
    engine.release(lease)
    assert "drained: no leases" in answered(daemon, "drain", "--wait", "10")
    refused = kvdepotctl(daemon, "status")
    assert (refused.returncode, "an operator drains it" in refused.stdout) == (1, True)
    assert kvdepotctl(daemon, "health").returncode == 2
    answered(daemon, "resume")
    assert engine.locate(KEYS) > 0
    assert status_of(daemon.socket).ready


def test_what_is_wrong_with_a_verb_is_said_by_exit_code(daemon: DaemonProcess, engine: RawEngine) -> None:
    unknown = kvdepotctl(daemon, "loads", "off", "0" * 32)
    assert (unknown.returncode, "no namespace begins with" in unknown.stderr) == (1, True)
    with pytest.raises(click.BadParameter):
        answered(daemon, "loads", "of")
    with pytest.raises(InvalidArgument, match="hexadecimal"):
        answered(daemon, "stores", "off", "nothex")


def test_who_may_not_open_the_socket_is_refused(daemon: DaemonProcess, engine: RawEngine) -> None:
    """Socket mode and group are what authorises."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    daemon.directory.chmod(0o755)
    program = (
        "import os, rich.console\nfrom kvdepot.client.ctl.app import cli, main\ncli.verbs()\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); main()"  # once all is read that only root may
    )
    for verb in (("loads", "off"), ("quota", "set", "1MiB"), ("verify",), ("prefetch", "0")):
        command = [sys.executable, "-c", program, "--endpoint", daemon.endpoint, *verb]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
        assert refused.returncode == 4, refused.stderr
        assert "may not open the operators' socket" in refused.stderr
    assert not json.loads(answered(daemon, "status", "--json"))["switches"]["loads_off"]
    assert record(daemon, "quota", "list") == []


def test_every_method_of_control_is_served(daemon: DaemonProcess) -> None:
    """And what is no sense is refused as such."""
    with grpc.insecure_channel(f"unix:{daemon.admin_socket}") as channel:
        stub = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        for method in control_pb2.DESCRIPTOR.services_by_name["Control"].methods:
            try:
                answer = getattr(stub, method.name)(getattr(control_pb2, method.input_type.name)(), timeout=patient(60))
                if method.server_streaming:
                    list(answer)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (method.name, error)
