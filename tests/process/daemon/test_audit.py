"""The shadow audit of a whole daemon: a wrong object with a right checksum is found (design.md#audit, I1)."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvdepot.core.calls import CommitOutcome, Kind, LocateCall, ReserveOutcome
from kvdepot.core.elements import ElementRun, Elements
from kvdepot.core.misses import MissReason
from kvdepot.core.report import DaemonStatus
from kvdepot.proto.methods import decode_reply

from tests.rigs.ctl_process import answered
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, keys_of, payload_of, status_of

ELEMENTS: Elements = {Kind.ATTENTION: (ElementRun("bfloat16", OBJECT_BYTES // 8, 8),)}
KEYS = keys_of("audit", 4)
WAIT_SECONDS = 30.0


def config(path: Path, sample: float) -> str:
    return f"""
[[tier]]
name = "nvme"
kind = "disk"
path = "{path}"
capacity = "128MiB"
write = "commit"
[policy]
audit_sample = {sample}
"""


def numbers(key: bytes, noise: float = 0.0) -> bytes:
    """What a model makes of a chunk, in bfloat16: the same each time but for some noise."""
    of_key = np.random.default_rng(int.from_bytes(key, "little"))
    values = of_key.standard_normal(OBJECT_BYTES // 2) + noise * np.random.default_rng().standard_normal(
        OBJECT_BYTES // 2
    )
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def wrong(key: bytes) -> bytes:
    """Another chunk's, in place of the second's."""
    return numbers(KEYS[3] if key == KEYS[1] else key)


@pytest.fixture
def daemon(directory: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(ram="512MiB", config=config(directory, 1.0)) as running:
        yield running


def status(daemon: DaemonProcess) -> DaemonStatus:
    return status_of(daemon.socket)


def audits(daemon: DaemonProcess) -> dict[str, float]:
    """From the metrics, which alerts are made of."""
    text = urllib.request.urlopen(f"{daemon.metrics}/metrics", timeout=patient(WAIT_SECONDS)).read().decode()
    found = re.findall(r'^kvdepot_audits_total\{outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
    assert len(found) == 7, "every outcome is there from the start"
    return {outcome: float(value) for outcome, value in found if float(value)}


def on_disk(daemon: DaemonProcess) -> int:
    return status(daemon).tiers[1].objects


def store(daemon: DaemonProcess, engine: RawEngine, payload: object) -> list[ReserveOutcome]:
    """As an engine does that has computed all of it, and may be asked for what is there."""
    lease, outcomes, extents = engine.reserve(KEYS)
    assert callable(payload)
    engine.write(KEYS, extents, payload)
    if extents:
        assert ReserveOutcome.PRESENT not in outcomes
        assert set(engine.commit(lease, len(KEYS))) == {CommitOutcome.COMMITTED}
    return outcomes


def miss(engine: RawEngine, keys: list[bytes] = KEYS) -> tuple[int, str]:
    reply = decode_reply(LocateCall, engine.stub.Locate(engine.locate_call(keys)))
    return reply.boundary_tokens, reply.miss


def ready(daemon: DaemonProcess) -> None:
    wait_until(lambda: status(daemon).tiers[1].state == "ready", "the tier opens", WAIT_SECONDS)


def stored_everywhere(daemon: DaemonProcess) -> None:
    """With a checksum, which the write takes where the checksum worker has not."""
    wait_until(lambda: on_disk(daemon) == len(KEYS), "all is on the disk", WAIT_SECONDS)


@pytest.mark.requirement("I1")
def test_wrong_bytes_with_a_right_checksum_are_found_dropped_everywhere_and_never_served(
    daemon: DaemonProcess,
) -> None:
    ready(daemon)
    with (
        RawEngine(daemon.socket, "wrong", elements=ELEMENTS) as broken,
        RawEngine(daemon.socket, "right", elements=ELEMENTS) as sound,
    ):
        store(daemon, broken, wrong)
        stored_everywhere(daemon)
        assert sound.load(KEYS) == [wrong(key) for key in KEYS]  # no checksum says anything
        store(daemon, sound, lambda key: numbers(key, 0.01))
        wait_until(lambda: audits(daemon).get("drifted"), "the audit", WAIT_SECONDS)
        wait_until(lambda: not status(daemon).tiers[0].lent_bytes, "all comparisons", WAIT_SECONDS)
        # What followed went with it, so that the comparisons of that are of nothing.
        found = audits(daemon)
        assert (found["same"], found["drifted"]) == (1, 1) and sum(found.values()) == len(KEYS)
        assert on_disk(daemon) == status(daemon).tiers[0].objects == 1
        assert status(daemon).counters["dropped_objects.below_drifted"] == 2
        assert miss(sound) == (0, MissReason.LOADS_OFF), "the namespace is in quarantine"
        answered(daemon, "loads", "on", sound.namespace.hex())
        assert sound.locate(KEYS) == CHUNK_TOKENS
        (line,) = [line for line in daemon.log.splitlines() if "differs from what an engine computed again" in line]
        assert KEYS[1].hex() in line and sound.namespace.hex() in line and "attention" in line
        assert store(daemon, sound, numbers)[1:] == [ReserveOutcome.GRANTED] * 3
        assert sound.load(KEYS) == [numbers(key) for key in KEYS]
        stored = [numbers(key) for key in KEYS]
    daemon.stop()
    daemon.arena.unlink()
    daemon.start()
    ready(daemon)
    with RawEngine(daemon.socket, "later", elements=ELEMENTS) as later:
        assert later.locate(KEYS) == len(KEYS) * CHUNK_TOKENS
        assert later.load(KEYS) == stored  # from the disk


def test_a_miss_for_drift_says_so(daemon: DaemonProcess) -> None:
    ready(daemon)
    with RawEngine(daemon.socket, elements=ELEMENTS) as engine:
        store(daemon, engine, lambda key: bytes(OBJECT_BYTES))
        store(daemon, engine, numbers)
        wait_until(lambda: audits(daemon).get("drifted"), "the audit", WAIT_SECONDS)
        answered(daemon, "loads", "on", engine.namespace.hex())
        assert miss(engine) == (0, MissReason.DRIFT)


@pytest.mark.requirement("I1", "I1e")
def test_a_namespace_of_which_bytes_have_drifted_is_served_to_nobody_until_an_operator_says_so(
    daemon: DaemonProcess,
) -> None:
    """Also what did not drift, also after a restart; others are served on."""
    ready(daemon)
    healthy = keys_of("healthy", 2)
    with (
        RawEngine(daemon.socket, elements=ELEMENTS) as engine,
        RawEngine(daemon.socket, "other", label="another") as other,
    ):
        engine.store(healthy)
        other.store(healthy)
        store(daemon, engine, wrong)
        store(daemon, engine, numbers)
        wait_until(lambda: engine.locate(healthy) == 0, "quarantine", WAIT_SECONDS)
        assert other.locate(healthy) == 2 * CHUNK_TOKENS
        assert status(daemon).switches.loads_off_namespaces == (engine.namespace,)
        wait_until(lambda: on_disk(daemon) == len(healthy) * 2 + 1, "all that is left is on the disk", WAIT_SECONDS)
    daemon.stop()
    daemon.start()
    with RawEngine(daemon.socket, elements=ELEMENTS) as engine:
        assert miss(engine, healthy) == (0, MissReason.LOADS_OFF)
        answered(daemon, "loads", "on", engine.namespace.hex())
        wait_until(lambda: engine.load(healthy) is not None, "what was adopted is verified", WAIT_SECONDS)
        assert engine.load(healthy) == [payload_of(key) for key in healthy]


def test_noise_is_nothing_and_the_scratch_is_never_served(daemon: DaemonProcess) -> None:
    ready(daemon)
    with (
        RawEngine(daemon.socket, "one", elements=ELEMENTS) as one,
        RawEngine(daemon.socket, "other", elements=ELEMENTS) as other,
    ):
        store(daemon, one, numbers)
        stored_everywhere(daemon)
        before = status(daemon)
        for _ in range(3):
            assert store(daemon, other, lambda key: numbers(key, 0.02)) == [ReserveOutcome.GRANTED] * len(KEYS)
            wait_until(lambda: not status(daemon).tiers[0].lent_bytes, "the comparisons", WAIT_SECONDS)
        assert audits(daemon) == {"same": 3 * len(KEYS)}
        after = status(daemon)
        assert (after.tiers[0].objects, after.tiers[0].used_bytes) == (4, before.tiers[0].used_bytes)
        assert all(session.credit_used_bytes == session.leases == 0 for session in after.sessions)
        assert other.load(KEYS) == [numbers(key) for key in KEYS]
        assert "audit:" not in daemon.log


def test_off_no_byte_moves_and_a_reload_switches_it_on(directory: Path) -> None:
    with DaemonProcess(ram="512MiB", config=config(directory, 0.0)) as daemon:
        ready(daemon)
        with RawEngine(daemon.socket, elements=ELEMENTS) as engine:
            store(daemon, engine, wrong)
            before = status(daemon).counters["granted_write_bytes"]
            assert store(daemon, engine, numbers) == [ReserveOutcome.PRESENT] * len(KEYS)
            assert status(daemon).counters["granted_write_bytes"] == before and audits(daemon) == {}
            (daemon.directory / "kvdepot.toml").write_text(config(directory, 1.0))
            assert "policy.audit_sample" in answered(daemon, "reload")
            store(daemon, engine, numbers)
            wait_until(lambda: audits(daemon).get("drifted"), "the audit", WAIT_SECONDS)


@pytest.mark.requirement("P10")
def test_an_engine_of_before_is_not_audited(daemon: DaemonProcess) -> None:
    """It says nothing of its types, and goes on as ever."""
    with RawEngine(daemon.socket) as engine:
        engine.store(KEYS)
        assert engine.reserve(KEYS)[1:] == ([ReserveOutcome.PRESENT] * len(KEYS), b"")
        assert audits(daemon) == {"unknown_type": len(KEYS)}
