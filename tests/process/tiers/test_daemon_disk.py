"""A whole daemon with a disk tier: reboot, crash, a second daemon, a hung mount (P4, P5, P6, T2, T4, T6)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from kvdepot.client.failures import CallFailure
from kvdepot.core.calls import AcquireOutcome, FindTiersCall, FindTiersReply, Kind, Nearest, ReserveReply
from kvdepot.proto.methods import decode_reply, encode

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.disk_daemon import medium_bytes
from tests.rigs.disk_node import RAM, config, daemon, ram, reboot, tier, wait_ready, wait_written
from tests.rigs.engine_client import EngineClient, prompt_keys
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, keys_of, payload_of


def writes_answered(engine: RawEngine) -> float:
    counters = engine.status().counters
    return sum(value for name, value in counters.items() if name.startswith("tier_writes.nvme/"))


@pytest.mark.requirement("P4", "T2")
@pytest.mark.parametrize(
    ("codec", "kill"),
    [
        ("none", True),
        ("bitshuffle-lz4", False),
        pytest.param("none", False, marks=pytest.mark.long(seconds=8)),
        pytest.param("bitshuffle-lz4", True, marks=pytest.mark.long(seconds=8)),
    ],
)
def test_objects_survive_a_reboot_and_come_back_verified(directory: Path, kill: bool, codec: str) -> None:
    keys = keys_of("reboot", 12)
    with daemon(directory, codec=f'"{codec}"') as node:
        with RawEngine(node.socket) as engine:
            wait_ready(engine)
            engine.store(keys)
            wait_written(engine, 12)
        reboot(node, kill=kill)
        with RawEngine(node.socket) as engine:
            wait_ready(engine)
            assert ram(engine).objects == 0
            assert engine.locate(keys) == 12 * 256
            assert engine.load(keys) == [payload_of(key) for key in keys]
            assert engine.counter("tier_reads.nvme/ok") == 12
            assert ram(engine).objects == 12
            assert engine.load(keys) is not None
            assert engine.counter("tier_reads.nvme/ok") == 12, "RAM has them now"


@pytest.mark.requirement("P10")
def test_the_daemon_says_which_chunks_only_the_disk_has(directory: Path) -> None:
    def nearest(engine: RawEngine) -> list[int]:
        call = FindTiersCall(engine.session, engine.namespace, b"".join([*keys, *keys_of("never stored", 1)]))
        reply = decode_reply(FindTiersCall, engine.stub.FindTiers(encode(call), timeout=patient(10.0)))
        assert isinstance(reply, FindTiersReply)
        return list(reply.tiers)

    keys = keys_of("places", 6)
    with daemon(directory) as node:
        with RawEngine(node.socket) as engine:
            wait_ready(engine)
            engine.store(keys)
            wait_written(engine, 6)
            assert nearest(engine) == [Nearest.RAM] * 6 + [Nearest.ABSENT]
        reboot(node)
        with RawEngine(node.socket) as engine:
            wait_ready(engine)
            assert nearest(engine) == [Nearest.BELOW_RAM] * 6 + [Nearest.ABSENT]
            assert engine.load(keys[:2]) is not None
            assert nearest(engine) == [Nearest.RAM] * 2 + [Nearest.BELOW_RAM] * 4 + [Nearest.ABSENT]
            assert engine.counter("locates") == engine.counter("misses.unknown") == 0, "it is no lookup"


def counters(engine: RawEngine) -> Mapping[str, float]:
    return engine.status().counters


@pytest.mark.long(seconds=8)
def test_requests_that_wait_find_everything_in_ram_and_the_share_is_respected(directory: Path) -> None:
    """Ten requests for six prompts are queued; each acquires later and reads nothing itself."""
    prompts = [keys_of(f"queued {number}", 8) for number in range(6)]  # 2 MiB each
    text = config(directory) + "[policy]\nprefetch_share = 0.05\n"
    with DaemonProcess(ram=RAM, config=text) as node:
        with RawEngine(node.socket) as engine:
            wait_ready(engine)
            for keys in prompts:
                engine.store(keys)
            wait_written(engine, 48)
        reboot(node)
        with RawEngine(node.socket) as engine, RawEngine(node.socket, "other") as other:
            wait_ready(engine)
            share_bytes = 0.05 * ram(engine).ready_bytes
            assert 4 * 8 * OBJECT_BYTES < share_bytes < 48 * OBJECT_BYTES * 4
            for number, keys in enumerate(prompts):
                assert engine.locate(keys, request=f"r{number}") == 8 * 256
                other.locate(keys, request=f"r{number}")
            for number, keys in enumerate(prompts):
                wait_until(lambda keys=keys: engine.tier_of(keys) == "ram", "it is in RAM", seconds=30)
                assert ram(engine).prefetched_bytes <= share_bytes
                assert engine.load(keys, request=f"r{number}") == [payload_of(key) for key in keys]
                assert other.load(keys, request=f"r{number}") is not None
            found = counters(engine)
            assert found["tier_reads.nvme/ok"] == 48, "one read an object"
            assert found["prefetched_objects"] == found["prefetch_used_objects"] == 48
            status = ram(engine)
            assert (status.prefetched_objects, status.prefetched_bytes, status.prefetching_requests) == (0, 0, 0)


@pytest.mark.requirement("T6")
def test_a_daemon_restart_keeps_ram_and_disk_together(directory: Path) -> None:
    keys = keys_of("restart", 8)
    with daemon(directory) as node:
        with RawEngine(node.socket) as engine:
            wait_ready(engine)
            engine.store(keys)
            wait_written(engine, 8)
        node.kill()
        node.start()
        with RawEngine(node.socket) as engine:
            wait_ready(engine)
            wait_until(lambda: tier(engine).objects == 8, "the disk's objects find RAM's")
            assert engine.load(keys) == [payload_of(key) for key in keys]
            assert engine.status().namespaces[0].objects[Kind.ATTENTION] == 8


@pytest.mark.requirement("T2")
def test_the_disk_evicts_and_never_exceeds_its_capacity(directory: Path) -> None:
    with daemon(directory, capacity='"32MiB"') as node, RawEngine(node.socket) as engine:
        wait_ready(engine)
        for number in range(40):
            engine.store(keys_of(f"evict {number}", 4))
            assert medium_bytes(directory) <= 32 << 20
        wait_until(lambda: tier(engine).queued_objects == 0, "everything is written", seconds=30)
        reasons = ("watermark", "room")
        wait_until(
            lambda: sum(engine.counter(f"tier_evicted_objects.nvme/{reason}") for reason in reasons) > 0, "it evicts"
        )
        assert tier(engine).objects * OBJECT_BYTES > 10 << 20


@pytest.mark.requirement("P6")
def test_a_flipped_byte_is_a_miss_and_quarantined(directory: Path) -> None:
    keys = keys_of("flip", 3)
    with daemon(directory) as node:
        with RawEngine(node.socket) as engine:
            wait_ready(engine)
            engine.store(keys)
            wait_written(engine, 3)
        node.stop()
        node.arena.unlink()
        for segment in directory.rglob("*.seg"):
            data = bytearray(segment.read_bytes())
            at = data.find(payload_of(keys[2])[:64])
            if at >= 0:
                data[at + 5000] ^= 1
                segment.write_bytes(data)
        node.start()
        with RawEngine(node.socket) as engine:
            wait_ready(engine)
            assert engine.load(keys) is None
            assert engine.locate(keys) == 2 * 256
            assert engine.load(keys[:2]) == [payload_of(key) for key in keys[:2]]
            damaged = {name for name in engine.status().counters if name.startswith("tier_damaged_objects.nvme/")}
            assert damaged <= {"tier_damaged_objects.nvme/corrupt", "tier_damaged_objects.nvme/torn"} and damaged
            wait_until(lambda: tier(engine).quarantined_bytes > 0, "it is quarantined")


def test_a_second_daemon_on_the_directory_is_refused_by_the_first_ones_pid(directory: Path) -> None:
    with daemon(directory) as node:
        other = daemon(directory)
        try:
            other.start(ready=False)
            assert other.process is not None
            assert other.process.wait(patient(60)) == 1
            assert f"held by the daemon with pid {node.pid}" in other.log
            assert "tier.nvme.path" in other.log
        finally:
            other.close()


@pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse() or "FUSE")
class TestHungMount:
    @pytest.mark.requirement("T4", "P5")
    def test_ram_serves_on_loads_end_and_a_stop_takes_less_than_10_s(self) -> None:
        prompts, in_ram = [keys_of(f"on disk {number}", 4) for number in range(6)], keys_of("in ram", 4)
        with FuseDirectory() as mount, daemon(mount.path) as node:
            with RawEngine(node.socket) as engine:
                wait_ready(engine)
                for keys in prompts:
                    engine.store(keys)
                wait_written(engine, 4 * len(prompts))
            reboot(node, config=config(mount.path, deadline='"1s"'))
            with RawEngine(node.socket) as engine:
                wait_ready(engine)
                engine.store(in_ram)
                # A write that misses so short a deadline on a busy machine is not repeated.
                wait_until(lambda: writes_answered(engine) >= 4, "four writes are answered")
                mount.hang()
                try:
                    # What the scrubber has just read, the kernel may still have: not all of it.
                    for keys in prompts:
                        limit = Deadline(6)
                        _, outcome, _ = engine.acquire(keys)
                        if outcome is AcquireOutcome.MISSING:
                            break
                    assert outcome is AcquireOutcome.MISSING
                    assert not limit.is_over(), "by the deadline of 1 s"
                    assert engine.load(in_ram) == [payload_of(key) for key in in_ram]
                    wait_until(lambda: tier(engine).breaker != "closed", "the breaker opens")
                    in_time = keys[: engine.locate(keys) // CHUNK_TOKENS]  # read before it hung, so in RAM
                    assert len(in_time) < len(keys), "nothing of the disk is offered meanwhile"
                    assert not in_time or engine.load(in_time) == [payload_of(key) for key in in_time]
                    limit = Deadline(10)
                    assert node.stop() == 0
                    assert not limit.is_over()
                finally:
                    mount.go_on()

    @pytest.mark.requirement("T4")
    def test_the_tier_returns_by_itself_when_the_mount_answers(self) -> None:
        keys = keys_of("on disk", 4)
        with FuseDirectory() as mount, daemon(mount.path) as node:
            with RawEngine(node.socket) as engine:
                wait_ready(engine)
                engine.store(keys)
                wait_written(engine, 4)
            reboot(node, config=config(mount.path, deadline='"1s"'))
            with RawEngine(node.socket) as engine:
                wait_ready(engine)
                mount.hang()
                _, outcome, _ = engine.acquire(keys)
                assert outcome is AcquireOutcome.MISSING
                wait_until(lambda: tier(engine).breaker != "closed", "the breaker opens")
                mount.go_on()
                wait_until(lambda: engine.locate(keys) == 4 * 256, "it is offered again", seconds=20)

                def loaded() -> bool:  # a read that misses so short a deadline on a busy machine is a miss
                    found = engine.load(keys)
                    assert found in (None, [payload_of(key) for key in keys])
                    return found is not None

                wait_until(loaded, "it is loaded again", seconds=20)
                wait_until(lambda: ram(engine).lent_bytes == 0, "nothing stays lent")

    @pytest.mark.requirement("T7")
    def test_an_answer_that_comes_after_its_caller_gave_up_leaves_no_lease(self) -> None:
        keys = prompt_keys("late", 4)
        with FuseDirectory() as mount, daemon(mount.path, deadline='"3s"') as node:
            with EngineClient(node.endpoint) as client:
                wait_until(lambda: client.status().tiers[1].state == "ready", "the tier opens", seconds=30)
                lease, reply = client.reserve(keys)
                assert isinstance(reply, ReserveReply)
                client.commit(lease, len(keys))
                wait_until(lambda: client.status().tiers[1].objects == 4, "four objects on the disk")
            reboot(node)
            with EngineClient(node.endpoint) as client:
                wait_until(lambda: client.status().tiers[1].state == "ready", "the tier opens", seconds=30)
                mount.hang()
                try:
                    _, answer = client.acquire(keys, timeout_seconds=0.6)
                    assert isinstance(answer, CallFailure)
                    # A worker that has a file of the mount open cannot be killed while this hangs: fuse_flush waits.
                    client.wait_nothing_owed(besides="lent bytes")
                    assert client.status().sessions[0].leases == 0
                    assert client.session.attached
                finally:
                    mount.go_on()
                wait_until(lambda: client.status().tiers[0].lent_bytes == 0, "what was read in vain is not lent")
                assert client.status().sessions[0].leases == 0
