"""The client against a real daemon that is absent, stopped, killed, restarted or replaced (I2, I3, I5, I6)."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.attachment import Attachment, EngineProcess, Transport
from kvdepot.client.copy.base import Direction
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.session import Reply
from kvdepot.client.transports.attach import Attached, attach
from kvdepot.core.calls import (
    AcquireOutcome,
    AcquireReply,
    CommitOutcome,
    FindTiersCall,
    FindTiersReply,
    LocateCall,
    LocateReply,
    Nearest,
    ReserveOutcome,
    ReserveReply,
)

from tests.rigs.ctl_process import kvdepotctl, record, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_client import CHUNK_TOKENS, EngineClient, prompt_keys
from tests.rigs.patience import Deadline, patient, wait_until

COUNT = 3
SUBMIT_SECONDS_MAX = 0.001
AT_ONCE_SECONDS = 5.0
"""What a busy machine may take for it: less than the timeouts of the calls that would otherwise end it."""
EITHER = pytest.mark.parametrize("transport", [Transport.SHM, Transport.STREAM])


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    process = DaemonProcess()
    yield process
    process.close()


def test_a_session_knows_the_threads_that_an_answer_comes_from(daemon: DaemonProcess) -> None:
    client = EngineClient(daemon.start().endpoint)
    assert client.session.threads == (0, 0), "before its start"
    with client:
        (reads,) = (one.native_id for one in threading.enumerate() if one.name == "kvdepot-session")
        assert client.session.threads == (reads, daemon.pid)
        daemon.kill()
        wait_until(lambda: client.session.threads == (reads, 0), "the loss is noticed")


def store(client: EngineClient, name: str) -> list[bytes]:
    keys = prompt_keys(name, COUNT)
    lease, granted = client.reserve(keys)
    assert isinstance(granted, ReserveReply), granted
    assert client.copy(granted, 0, Direction.STORE)
    assert list(client.commit(lease, COUNT)) == [CommitOutcome.COMMITTED] * COUNT
    client.session.end_request("r")
    return keys


def load_equals(client: EngineClient, keys: list[bytes]) -> bool:
    """Load into other blocks; whether the bytes are those of the first blocks."""
    lease, acquired = client.acquire(keys)
    assert isinstance(acquired, AcquireReply), acquired
    assert acquired.outcome is AcquireOutcome.GRANTED
    held = client.copy(acquired, 32, Direction.LOAD)
    client.session.release([lease])
    return held and client.equal_blocks(0, 32, COUNT)


@pytest.mark.requirement("I3")
@EITHER
def test_without_a_daemon_calls_fail_at_once_and_a_late_daemon_is_found(
    daemon: DaemonProcess, transport: Transport
) -> None:
    client = EngineClient(daemon.endpoint, transport=transport).start(attached=False)
    try:
        limit = Deadline(AT_ONCE_SECONDS)
        answer = client.locate(prompt_keys("absent", 1), 15.0)
        assert isinstance(answer, CallFailure)
        assert answer.reason is FailureReason.UNAVAILABLE
        assert not limit.is_over()
        assert client.session.open_leases == 0
        daemon.start()
        client.wait_attached()
        assert load_equals(client, store(client, "late"))
        client.wait_nothing_owed()
    finally:
        client.close()


@pytest.mark.requirement("P10")
def test_a_session_asks_where_chunks_are(daemon: DaemonProcess) -> None:
    daemon.start()
    with EngineClient(daemon.endpoint) as client:
        keys = store(client, "placed")
        answer = client.call(FindTiersCall(b"", client.namespace, b"".join([*keys, bytes(16)])))
        assert answer == FindTiersReply(bytes([Nearest.RAM] * COUNT + [Nearest.ABSENT]))
        assert client.session.open_leases == 0
        daemon.kill()
        wait_until(lambda: not client.session.attached, "the loss is noticed")
        failed = client.call(FindTiersCall(b"", client.namespace, keys[0]))
        assert isinstance(failed, CallFailure) and failed.reason is FailureReason.UNAVAILABLE


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_daemon_restarted_between_reserve_and_commit_keeps_lease_and_bytes(daemon: DaemonProcess, how: str) -> None:
    daemon.start()
    with EngineClient(daemon.endpoint) as client:
        client.fill(0, COUNT, seed=1)
        keys = prompt_keys(how, COUNT)
        lease, granted = client.reserve(keys)
        getattr(daemon, how)()
        arena = client.worker.arena
        # The mapping outlives the daemon: ranks finish their copies without asking anybody.
        assert client.copy(granted, 0, Direction.STORE)
        outcomes: list[bytes] = []
        client.session.commit(lease, range(COUNT), outcomes.append)
        daemon.start()
        client.wait_attached()
        wait_until(lambda: client.session.poll() > 0 or bool(outcomes), "no outcome after the restart")
        assert list(outcomes[0]) == [CommitOutcome.COMMITTED] * COUNT
        assert client.worker.arena is arena
        assert load_equals(client, keys)
        client.wait_nothing_owed()


@pytest.mark.requirement("I5")
def test_a_reservation_given_back_while_the_daemon_is_away_is_given_back_to_the_next(daemon: DaemonProcess) -> None:
    daemon.start()
    with EngineClient(daemon.endpoint) as client:
        lease, _ = client.reserve(prompt_keys("away", COUNT))
        pinned = store(client, "pinned")
        reader, _ = client.acquire(pinned)
        daemon.kill()
        client.session.abandon(lease)
        client.session.release([reader])
        assert client.session.open_leases > 0
        daemon.start()
        client.wait_attached()
        client.wait_nothing_owed()


@pytest.mark.requirement("I6")
def test_an_arena_that_is_gone_loses_leases_by_name_and_the_old_mapping_still_takes_copies(
    daemon: DaemonProcess,
) -> None:
    daemon.start()
    with EngineClient(daemon.endpoint) as client:
        lease, granted = client.reserve(prompt_keys("gone", COUNT))
        old = client.worker.arena
        assert isinstance(old, ArenaMap)
        daemon.kill()
        daemon.arena.unlink()
        daemon.start()
        client.wait_attached()
        wait_until(lambda: client.worker.arena is not old, "the new arena was not mapped")
        assert isinstance(granted, ReserveReply)
        assert client.worker.arena is not None
        assert client.worker.arena.arena_id != granted.arena_id == old.arena_id
        old.buffer[-1] = 1  # a copy that is still running writes where nobody reads
        assert list(client.commit(lease, COUNT)) == [CommitOutcome.LOST] * COUNT
        client.fill(0, COUNT, seed=2)
        assert load_equals(client, store(client, "new"))
        client.wait_nothing_owed()


@pytest.mark.requirement("P5", "I2")
def test_a_stopped_daemon_costs_deadlines_and_never_the_calling_thread(daemon: DaemonProcess) -> None:
    daemon.start()
    with EngineClient(daemon.endpoint) as client:
        keys = store(client, "before")
        daemon.suspend()
        answers: list[tuple[float, Reply | CallFailure]] = []
        submitted: list[float] = []
        for _ in range(40):
            call = LocateCall(b"", client.namespace, b"".join(keys), 1 << 20)
            start = time.monotonic()
            client.session.submit(call, 0.2, lambda answer, at=start: answers.append((time.monotonic() - at, answer)))  # type: ignore[misc]
            submitted.append(time.monotonic() - start)
        wait_until(lambda: client.session.wait(0.05) >= 0 and len(answers) == 40, "a deadline did not fire")
        assert all(isinstance(answer, CallFailure) for _, answer in answers)
        assert max(seconds for seconds, _ in answers) < 0.2 + patient(AT_ONCE_SECONDS)
        # The median: one sample may hold a slice that the kernel gave to another process.
        assert sorted(submitted)[20] < patient(SUBMIT_SECONDS_MAX)
        _, answer = client.reserve(prompt_keys("during", COUNT), timeout_seconds=1.5)
        assert isinstance(answer, CallFailure)
        wait_until(lambda: client.locate(keys, 0.3) is not None and not client.session.attached, "still in use")
        limit = Deadline(AT_ONCE_SECONDS)
        assert isinstance(client.locate(keys, 15.0), CallFailure)
        assert not limit.is_over(), "an unresponsive daemon is not asked for every request"
        daemon.resume()
        client.wait_attached()
        assert isinstance(client.locate(keys), LocateReply)
        client.wait_nothing_owed()


@pytest.mark.requirement("T7")
def test_a_closed_session_leaves_nothing_behind(daemon: DaemonProcess) -> None:
    daemon.start()
    with EngineClient(daemon.endpoint, engine_id="watching") as watching:
        leaving = EngineClient(daemon.endpoint, engine_id="leaving").start()
        lease, _ = leaving.reserve(prompt_keys("left", COUNT))
        leaving.session.abandon(lease)
        leaving.close()
        answer: list[object] = []
        leaving.session.submit(LocateCall(b"", leaving.namespace, b"", 1), 1.0, answer.append)
        assert leaving.session.poll() == 1
        assert isinstance(answer[0], CallFailure)
        watching.wait_nothing_owed()


def test_two_incarnations_never_draw_the_same_lease_id(daemon: DaemonProcess) -> None:
    sessions = [EngineClient(daemon.endpoint).session for _ in range(3)]
    drawn = [session.new_lease_id() for session in sessions for _ in range(1000)]
    assert len(set(drawn)) == 3000
    assert all(0 < lease < 1 << 63 for lease in drawn)


@pytest.mark.requirement("I3")
def test_a_socket_that_answers_garbage_is_a_refusal_and_not_an_error() -> None:
    path = Path(f"/tmp/kvdg{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.attach")
    listener.listen()
    worker = Attachment(Endpoint.parse(f"unix://{path}"), EngineProcess("e", scheduler=False, rank=0))
    try:
        worker.start()
        peer, _ = listener.accept()
        peer.recv(4096)
        peer.send(b"\xff" * 100)
        wait_until(lambda: worker.refusal != "", "garbage was taken for an answer")
        assert worker.session is None
        assert worker.arena is None
        peer.close()
    finally:
        worker.close()
        listener.close()
        Path(f"{path}.attach").unlink()


@pytest.mark.requirement("I3")
@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "no descriptor"), MemoryError("none")], ids=["descriptors", "anything"]
)
def test_an_attempt_to_attach_that_fails_on_this_side_is_not_the_last_one(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    daemon.start()
    make = socket.socket
    failed: list[Exception] = []

    def scarce(*arguments: Any, **named: Any) -> socket.socket:
        if not failed:
            failed.append(error)
            raise error
        return make(*arguments, **named)

    monkeypatch.setattr("kvdepot.client.transports.attach.socket.socket", scarce)
    worker = Attachment(Endpoint.parse(daemon.endpoint), EngineProcess("e", scheduler=False, rank=0))
    try:
        worker.start()
        wait_until(lambda: worker.session is not None, "it never attached")
        assert failed
    finally:
        worker.close()


@pytest.mark.requirement("I3")
def test_a_process_with_a_thousand_descriptors_attaches_when_the_daemon_comes(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM raises its limit, and select(2) ends at 1023."""
    paths: list[str] = []

    def counted(path: str, *arguments: Any) -> Attached:
        paths.append(path)
        return attach(path, *arguments)

    monkeypatch.setattr("kvdepot.client.attachment.attach", counted)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    worker = Attachment(Endpoint.parse(daemon.endpoint), EngineProcess("e", scheduler=False, rank=0))
    try:
        worker.start()
        wait_until(lambda: len(paths) > 1, "it ended at its first pause")
        daemon.start()
        wait_until(lambda: worker.session is not None, "it never attached")
    finally:
        worker.close()
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_attach_refused_by_name_is_told_and_tried_again_later(daemon: DaemonProcess) -> None:
    """A world of no ranks is refused by the daemon; the reason reaches whoever asks for it."""
    daemon.start()
    worker = Attachment(Endpoint.parse(daemon.endpoint), EngineProcess("e", scheduler=False, rank=5, world_size=2))
    worker.start()
    try:
        wait_until(lambda: "rank" in worker.refusal, "no reason")
        assert worker.session is None
    finally:
        worker.close()


def test_kvdepotctl_status_shows_what_the_daemon_holds(daemon: DaemonProcess) -> None:
    daemon.start()
    with EngineClient(daemon.endpoint, engine_id="shown", name="a-model") as client:
        store(client, "status")
        client.wait_nothing_owed()
        shown = record(daemon, "status")
        assert shown["ready"] is True
        assert shown["pid"] == daemon.pid
        assert shown["tiers"][0]["objects"] == COUNT
        assert shown["sessions"][0]["engine_id"] == "shown"
        assert shown["sessions"][0]["ranks_attached"] == 1
        assert shown["namespaces"][0]["namespace_id"] == client.namespace.hex()
        assert shown["namespaces"][0]["objects"] == {"attention": COUNT}
        table = text(daemon, "status", "--counters")
        assert all(word in table for word in ("shown", "a-model", "ram", "ready", "counters"))
        located = client.locate(prompt_keys("status", COUNT))
        assert located == LocateReply(COUNT * CHUNK_TOKENS, "ram", COUNT * CHUNK_TOKENS)


def test_kvdepotctl_exit_codes_say_what_is_wrong(daemon: DaemonProcess) -> None:
    missing = kvdepotctl(daemon, "status")
    assert missing.returncode == 3
    assert "no daemon at" in missing.stderr
    for endpoint, expected in (
        ("http://host:1", "unix://"),
        ("tcp://host", "tcp://host:port"),
        ("tcp://host:1", "--tls-ca"),
    ):
        wrong = kvdepotctl(endpoint, "status")
        assert wrong.returncode == 2
        assert expected in wrong.stderr
    assert kvdepotctl(daemon, "status", "--nothing").returncode == 2


def test_reserve_outcomes_of_a_present_object_open_no_lease(daemon: DaemonProcess) -> None:
    daemon.start()
    with EngineClient(daemon.endpoint) as client:
        keys = store(client, "present")
        _, again = client.reserve(keys)
        assert isinstance(again, ReserveReply)
        assert list(again.outcomes) == [ReserveOutcome.PRESENT] * COUNT
        wait_until(lambda: client.session.open_leases == 0)
        _, missing = client.acquire(prompt_keys("missing", 1))
        assert isinstance(missing, AcquireReply)
        assert missing.outcome is AcquireOutcome.MISSING
        wait_until(lambda: client.session.open_leases == 0)
        client.wait_nothing_owed()


@pytest.mark.requirement("I1", "S2")
def test_a_process_whose_user_moves_to_another_tenant_never_copies_in_the_former_ones_data() -> None:
    """The arena is the same. Offsets of new grants count in another part of it than the one that is mapped."""
    tenants = '[[tenant]]\nname = "a"\nusers = ["{}"]\n[[tenant]]\nname = "b"\nusers = ["{}"]\n'
    me, nobody = os.geteuid(), 4242
    with DaemonProcess(config=tenants.format(me, nobody)) as daemon:
        client = EngineClient(daemon.endpoint, transport=Transport.AUTO)
        client.choose(replace(client.spec, tenant="a"))
        with client:
            client.fill(0, COUNT, seed=1)
            store(client, "p")
            former = client.worker.arena
            assert isinstance(former, ArenaMap)
            looked_at = former.buffer[: 8 << 20]
            before = bytes(looked_at)
            assert any(before)
            daemon.stop()
            daemon.config = tenants.format(nobody, me)
            daemon.start()
            assert " adopted" in daemon.log
            client.choose(replace(client.spec, tenant="b"))
            client.session.register(client.spec)
            client.wait_attached()
            client.fill(0, COUNT, seed=2)
            assert load_equals(client, store(client, "q"))
            assert bytes(looked_at) == before, "it wrote into the data of its former tenant"
            assert not isinstance(client.worker.arena, ArenaMap), "streams, until it is restarted"
