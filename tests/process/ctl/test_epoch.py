"""`kvdepotctl epoch bump`: the real command against real daemons (rows I1, P2, I8)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import grpc
import pytest
from click.testing import CliRunner
from kvdepot.client.ctl.app import cli
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, ReserveOutcome
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.registration import RegisterCall
from kvdepot.proto.methods import encode
from kvdepot.proto.v1 import control_pb2, control_pb2_grpc

from tests.rigs.ctl_process import answered, kvdepotctl, record, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_client import EngineClient, prompt_keys
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import (
    CALL_SECONDS,
    CHUNK_TOKENS,
    OBJECT_BYTES,
    RawEngine,
    dense_spec,
    keys_of,
    payload_of,
    status_of,
)

KEYS = keys_of("prompt", 3)
SPEC, OTHER = dense_spec("a-model"), dense_spec("other-model")
WHOLE = 3 * CHUNK_TOKENS
BOTH = pytest.mark.parametrize("everywhere", [True, False], ids=["all", "one"])
TIER = """
[[tier]]
name = "{kind}"
kind = "{kind}"
path = "{path}"
capacity = "64MiB"
write = "commit"
"""
SHARED = "on_root_filesystem = true\n"


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


def bump(daemon: DaemonProcess, namespace: bytes | None = None, *options: str) -> dict[str, object]:
    one = [namespace.hex()] if namespace else []
    reply: dict[str, object] = record(daemon, "epoch", "bump", *one, *options)
    return reply


def bumped(spec: NamespaceSpec, bumps: int) -> NamespaceSpec:
    return replace(spec, bumps=bumps)


def wanted(engine: RawEngine, spec: NamespaceSpec) -> int:
    """The bump counter with which the daemon wants it registered."""
    reply = engine.register(spec, follows_bumps=True)
    assert (reply.namespace_id, reply.ranks_attached) == (b"", 0)
    return reply.bumps


def refused(call: object, *arguments: object) -> str:
    assert callable(call)
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments)
    return str(error.value.details())


@pytest.mark.requirement("P2")
@BOTH
def test_what_was_stored_is_served_to_no_engine_from_before_or_after(daemon: DaemonProcess, everywhere: bool) -> None:
    with RawEngine(daemon.socket, "one", spec=SPEC) as one, RawEngine(daemon.socket, "other", spec=OTHER) as other:
        one.store(KEYS)
        other.store(KEYS)
        assert bump(daemon, None if everywhere else one.namespace) == {
            "bump": int(everywhere), "invalidated_namespaces": [] if everywhere else [SPEC.namespace_id().hex()],
            "changed": True, "namespaces": 1 + everywhere, "chunks": 3 * (1 + everywhere), "leases": 0, "shared": [],
            "not_persisted": "",
        }  # fmt: skip
        for call in (one.locate, one.acquire, one.reserve):
            assert "has not registered namespace" in refused(call, KEYS)
        assert wanted(one, SPEC) == 1
        # A client that knows of no counters is told so, and goes on without.
        register = encode(RegisterCall(one.session, SPEC))
        assert "bump counter has to be 1" in refused(one.stub.RegisterNamespace, register)
        if not everywhere:
            assert other.locate(KEYS) == WHOLE
    with RawEngine(daemon.socket, "late", spec=bumped(SPEC, 1)) as late:
        assert late.locate(KEYS, request="asks") == 0
        assert late.load(KEYS) is None
        assert "an operator bumped the epoch" in answered(daemon, "explain", "asks")
        late.store(KEYS)
        assert late.load(KEYS) == [payload_of(key) for key in KEYS]
        described = json.loads(answered(daemon, "describe", late.namespace.hex(), "--json"))
        assert (described["bumps"], described["fields"]["bumps"]) == (1, "1")
        assert "epoch bump 1" in answered(daemon, "describe", late.namespace.hex())
    shown = answered(daemon, "status", "--wide")
    assert "bump counter 1" in shown if everywhere else "1 namespaces invalidated individually" in shown
    assert json.loads(answered(daemon, "status", "--json"))["epochs"]["bump"] == int(everywhere)
    with urllib.request.urlopen(f"{daemon.metrics}/metrics") as answer:
        metrics = answer.read().decode()
    assert f"kvdepot_epoch_bump {float(everywhere)}" in metrics
    assert f"kvdepot_epoch_invalidated_namespaces {float(not everywhere)}" in metrics
    assert "kvdepot_stale_registrations_total 2.0" in metrics


@pytest.mark.requirement("P2", "I6")
@BOTH
def test_nothing_in_progress_succeeds_and_what_is_lent_stays_until_it_is_given_back(
    daemon: DaemonProcess, everywhere: bool
) -> None:
    with RawEngine(daemon.socket, "one", spec=SPEC) as one:
        one.store(KEYS)
        reading, outcome, extents = one.acquire(KEYS)
        assert outcome is AcquireOutcome.GRANTED
        writing, outcomes, _ = one.reserve(keys_of("fresh", 2))
        assert set(outcomes) == {ReserveOutcome.GRANTED}
        assert bump(daemon, None if everywhere else one.namespace)["leases"] == 2
        now = one.generations
        words = memoryview(extents).cast("Q").tolist()
        for row, generation in zip(words[1::5], words[4::5], strict=True):
            assert now[row] != generation, "a rank reports failure"
        lent = 5 * OBJECT_BYTES
        wait_until(lambda: status_of(daemon.socket).tiers[0].lent_bytes == lent, "the worker's sums end")
        wait_until(lambda: status_of(daemon.socket).tiers[0].used_bytes == lent, "the rest is dropped")
        assert one.commit(writing, 2) == [CommitOutcome.EXPIRED] * 2
        one.release(reading)
        wait_until(lambda: status_of(daemon.socket).tiers[0].used_bytes == 0, "what was lent is free")
    with RawEngine(daemon.socket, "late", spec=bumped(SPEC, 1)) as late:
        assert late.locate(KEYS) == late.locate(keys_of("fresh", 2)) == 0


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("end", ["stop", "kill"])
@BOTH
def test_nothing_comes_back_from_arena_or_disk_with_the_next_run(tmp_path: Path, everywhere: bool, end: str) -> None:
    config = f'[daemon]\nstate = "{tmp_path}/state"\n' + TIER.format(kind="disk", path=tmp_path / "disk")
    with DaemonProcess(ram="456MiB", config=config) as daemon:
        with RawEngine(daemon.socket, "one", spec=SPEC) as one, RawEngine(daemon.socket, "other", spec=OTHER) as other:
            wait_until(lambda: one.status().tiers[1].state == "ready", "the tier opens", 30)
            one.store(KEYS)
            other.store(KEYS)
            wait_until(lambda: one.status().tiers[1].objects == 6, "they are on the disk", 30)
            assert bump(daemon, None if everywhere else one.namespace)["not_persisted"] == ""
        for reboot in (False, True):
            daemon.kill() if end == "kill" else daemon.stop()
            if reboot:
                daemon.arena.unlink()
            daemon.start()
            assert "restored epoch: " in daemon.log
            with (
                RawEngine(daemon.socket, "one", spec=bumped(SPEC, 1)) as one,
                RawEngine(daemon.socket, "other", spec=bumped(OTHER, int(everywhere))) as other,
            ):
                wait_until(lambda at=one: at.status().tiers[1].state == "ready", "the tier opens", 30)
                if not everywhere:
                    wait_until(lambda at=other: at.locate(KEYS) == WHOLE, "the other's are there", 30)
                assert one.locate(KEYS) == 0 and one.load(KEYS) is None
                assert other.locate(KEYS) == (0 if everywhere else WHOLE)
                assert wanted(one, SPEC) == 1


@pytest.mark.requirement("I8")
def test_what_a_reboot_would_forget_is_said(tmp_path: Path) -> None:
    config = TIER.format(kind="disk", path=tmp_path / "disk")
    with DaemonProcess(ram="456MiB", config=config) as daemon:
        done = kvdepotctl(daemon, "epoch", "bump", "--yes")
        assert (done.returncode, "saved until the node reboots" in done.stderr) == (0, True)


@pytest.mark.requirement("P6")
@pytest.mark.long(seconds=10)
def test_nodes_of_a_shared_directory_share_when_their_counters_are_equal(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    config = TIER.format(kind="shared", path=tmp_path / "pool") + SHARED
    with DaemonProcess(ram="456MiB", config=config) as first, DaemonProcess(ram="456MiB", config=config) as second:

        def files() -> int:
            return len(list((tmp_path / "pool").glob("*/*/*.kvd")))

        def stored(daemon: DaemonProcess, spec: NamespaceSpec, count: int) -> None:
            with RawEngine(daemon.socket, "stores", spec=spec) as engine:
                wait_until(lambda: not engine.status().tiers[1].reason, "there is room", 60)
                engine.store(KEYS)
                wait_until(lambda: files() == count, "they are published", 60)

        def located(daemon: DaemonProcess, spec: NamespaceSpec) -> int:
            with RawEngine(daemon.socket, "asks", spec=spec) as engine:
                wait_until(lambda: not engine.status().tiers[1].reason, "it can be asked", 60)
                return engine.located_at(KEYS).boundary_tokens

        stored(first, SPEC, 3)
        assert located(second, SPEC) == WHOLE
        assert bump(first)["shared"] == ["shared"]
        assert located(first, bumped(SPEC, 1)) == 0, "the files are those of another namespace"
        assert located(second, SPEC) == WHOLE, "its counter is its own"
        stored(first, bumped(SPEC, 1), 6)
        assert "--to 1" in text(first, "epoch", "bump", "--to", "1", "--yes")
        assert bump(second, None, "--to", "1")["bump"] == 1
        assert located(second, bumped(SPEC, 1)) == WHOLE


def test_the_client_goes_on_as_another_namespace(daemon: DaemonProcess) -> None:
    """Over real sockets: it learns of the bump by its next call."""
    with EngineClient(daemon.endpoint) as client:
        keys = prompt_keys("p", 2)
        lease, _ = client.reserve(keys)
        client.commit(lease, 2)
        void = client.namespace
        bump(daemon)
        client.locate(keys)
        session = client.session
        wait_until(lambda: session.bumps_wanted(void) == 1, "it learns of it")
        assert not session.registered(void)
        session.forget(void)
        spec = bumped(client.spec, 1)
        session.register(spec)
        wait_until(lambda: session.registered(spec.namespace_id()), "it is registered anew")
        assert session.bumps_wanted(void) is None


def test_the_verb_asks_first_and_says_what_is_wrong_by_exit_code(daemon: DaemonProcess) -> None:
    with RawEngine(daemon.socket, "one", spec=SPEC) as one:
        one.store(KEYS)
        name = one.namespace.hex()
        asked = CliRunner().invoke(cli, ["--endpoint", daemon.endpoint, "epoch", "bump"], input="n\n")
        assert "invalidate all stored objects of all namespaces?" in asked.output
        assert one.locate(KEYS) == WHOLE
        shown = text(daemon, "epoch", "bump", name[:6], "--yes")
        assert f"invalidated: namespace {name[:12]} (3 chunks on this node)" in shown
        assert "is invalidated already" in text(daemon, "epoch", "bump", name, "--yes")
        # One that this daemon knows nothing of, as where only a shared directory has it.
        assert bump(daemon, bytes(16))["changed"]
        unknown = kvdepotctl(daemon, "epoch", "bump", "0" * 8, "--yes")
        assert (unknown.returncode, "no namespace begins with" in unknown.stderr) == (1, True)
        early = kvdepotctl(daemon, "epoch", "bump", "--to", "2", "--yes")
        assert (early.returncode, "bump to 3 or more" in early.stderr) == (2, True)
        with pytest.raises(click.UsageError):
            answered(daemon, "epoch", "bump", name, "--to", "3")
        assert bump(daemon, None, "--to", "5")["bump"] == 5
        assert "nothing to do: the counter is 5" in text(daemon, "epoch", "bump", "--to", "4", "--yes")
        assert wanted(one, SPEC) == 5


def test_a_bump_says_what_it_is_about(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(f"unix:{daemon.admin_socket}") as channel:
        stub = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        for call in (
            control_pb2.BumpEpochRequest(),
            control_pb2.BumpEpochRequest(all=True, namespace_id=bytes(16)),
            control_pb2.BumpEpochRequest(namespace_id=bytes(16), to=2),
        ):
            with pytest.raises(grpc.RpcError) as error:
                stub.BumpEpoch(call, timeout=patient(CALL_SECONDS))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
