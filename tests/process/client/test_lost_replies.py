"""Any one reply lost, between a real daemon and the real client: no lease stays, no byte is wrong."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.session import Reply
from kvdepot.core.calls import AcquireOutcome, AcquireReply, CommitOutcome, LocateReply, ReserveOutcome, ReserveReply

from tests.fakes.reply_dropper import Loss, ReplyDropper
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_client import CHUNK_TOKENS, EngineClient, prompt_keys
from tests.rigs.seeds import one_in

COUNT = 3
ANSWER_SECONDS = 6.0
"""Of a busy machine, for a reservation or a load; the half of it is for the first attempt."""
OVER_EITHER = pytest.mark.parametrize("calls", [True, False], ids=["call-socket", "grpc"])
METHODS = ("RegisterNamespace", "Declare", "Reserve", "Commit", "EndRequest", "Locate", "Acquire", "Release", "Abandon")


@pytest.fixture(scope="module")
def brief() -> Iterator[DaemonProcess]:
    """Its leases expire before a call is repeated."""
    with DaemonProcess(config='[policy]\nlease_deadline = "3s"\n') as running:
        yield running


@pytest.mark.requirement("I5")
@OVER_EITHER
def test_nothing_is_lost_when_no_reply_is_lost(daemon: DaemonProcess, calls: bool) -> None:
    """The control: the same walk without a loss repeats nothing."""
    with ReplyDropper(daemon.socket, calls=calls) as proxy:
        counters = walk(proxy, f"control-{calls}")
    assert proxy.dropped == []
    assert counters.get("repeated", 0) == 0
    assert set(proxy.calls) == (set(METHODS) if calls else set()), "which way the calls went"


@pytest.mark.requirement("I5")
@pytest.mark.parametrize("loss", Loss, ids=lambda loss: loss.value)
@pytest.mark.parametrize("method", one_in(3, METHODS, 1))
@OVER_EITHER
def test_any_one_lost_reply_leaves_no_lease_and_no_wrong_byte(
    daemon: DaemonProcess, method: str, loss: Loss, calls: bool
) -> None:
    with ReplyDropper(daemon.socket, calls=calls) as proxy:
        proxy.drop(method, loss)
        walk(proxy, f"{method}-{loss.value}-{calls}", locate_seconds=0.5 if method == "Locate" else ANSWER_SECONDS)
        assert proxy.dropped == [method]


def walk(proxy: ReplyDropper, name: str, locate_seconds: float = ANSWER_SECONDS) -> dict[str, int]:
    """Store, look up, load, and give one reservation back; everything must come right in the end."""
    keys = prompt_keys(name, COUNT)
    client = EngineClient(proxy.endpoint, engine_id=name, name=name)
    with client:
        client.fill(0, COUNT, seed=zlib.crc32(name.encode()))
        lease, granted = asked(client, proxy, lambda: client.reserve(keys, ANSWER_SECONDS))
        assert isinstance(granted, ReserveReply), granted
        assert list(granted.outcomes) == [ReserveOutcome.GRANTED] * COUNT
        assert client.copy(granted, 0, Direction.STORE)
        assert list(client.commit(lease, COUNT)) == [CommitOutcome.COMMITTED] * COUNT
        client.session.end_request("r")
        located = client.locate(keys, locate_seconds)
        if isinstance(located, CallFailure):  # a lookup is not repeated for the caller
            # A call socket that is cut takes with it what is under way beside the call.
            assert proxy.dropped in (["Locate"], ["EndRequest"])
            client.wait_attached()
            located = client.locate(keys, ANSWER_SECONDS)
        assert located == LocateReply(COUNT * CHUNK_TOKENS, "ram", COUNT * CHUNK_TOKENS)
        lease, acquired = asked(client, proxy, lambda: client.acquire(keys, ANSWER_SECONDS))
        assert isinstance(acquired, AcquireReply), acquired
        assert acquired.outcome is AcquireOutcome.GRANTED
        assert client.copy(acquired, 32, Direction.LOAD)
        client.session.release([lease])
        assert client.equal_blocks(0, 32, COUNT)
        lease, _ = client.reserve(prompt_keys(name + "/other", 2))
        client.session.abandon(lease)
        client.wait_nothing_owed()
        return client.session.counters()


def asked(
    client: EngineClient, proxy: ReplyDropper, ask: Callable[[], tuple[int, Reply | CallFailure]]
) -> tuple[int, Reply | CallFailure]:
    """A lease, asked for once more where the call socket was cut: with it the engine attaches anew, and calls fail."""
    lease, answer = ask()
    if isinstance(answer, CallFailure) and proxy.calls:
        assert answer.reason is FailureReason.UNAVAILABLE
        client.wait_attached()
        return ask()
    return lease, answer


@pytest.mark.requirement("I5")
@pytest.mark.parametrize("loss", [Loss.CUT, Loss.SILENCE], ids=lambda loss: loss.value)
@OVER_EITHER
def test_a_reservation_whose_answers_are_all_lost_gives_its_extents_back(
    daemon: DaemonProcess, loss: Loss, calls: bool
) -> None:
    name = f"all-{loss.value}-{calls}"
    with ReplyDropper(daemon.socket, calls=calls) as proxy, EngineClient(proxy.endpoint, engine_id=name) as client:
        proxy.drop("Reserve", loss, count=1000)
        _, answer = client.reserve(prompt_keys(name, COUNT), timeout_seconds=3.0)
        assert isinstance(answer, CallFailure)
        assert answer.reason in (FailureReason.UNAVAILABLE, FailureReason.DEADLINE)
        assert len(proxy.dropped) >= (1 if calls and loss is Loss.CUT else 2)
        client.wait_nothing_owed()
        proxy.drop("Reserve", loss, count=0)
        client.wait_attached()
        lease, answer = client.reserve(prompt_keys(name, COUNT), ANSWER_SECONDS)
        assert isinstance(answer, ReserveReply)
        assert list(answer.outcomes) == [ReserveOutcome.GRANTED] * COUNT
        client.session.abandon(lease)
        client.wait_nothing_owed()


@pytest.mark.requirement("I5")
@pytest.mark.parametrize("loss", [Loss.CUT, Loss.SILENCE], ids=lambda loss: loss.value)
@OVER_EITHER
def test_an_acquire_whose_answers_are_all_lost_leaves_no_pin(daemon: DaemonProcess, loss: Loss, calls: bool) -> None:
    name = f"pin-{loss.value}-{calls}"
    with (
        ReplyDropper(daemon.socket, calls=calls) as proxy,
        EngineClient(proxy.endpoint, engine_id=name, name=name) as client,
    ):
        keys = prompt_keys(name, COUNT)
        lease, granted = client.reserve(keys, ANSWER_SECONDS)
        assert client.copy(granted, 0, Direction.STORE)
        client.commit(lease, COUNT)
        proxy.drop("Acquire", loss, count=1000)
        _, answer = client.acquire(keys, timeout_seconds=0.5)
        assert isinstance(answer, CallFailure)
        client.wait_nothing_owed()


@pytest.mark.requirement("I5")
@pytest.mark.parametrize("method", ["Acquire", "Reserve"])
def test_a_lease_that_expires_before_its_call_is_repeated_is_given_back(brief: DaemonProcess, method: str) -> None:
    """The daemon refuses the repeat, and must not end what may be in the hands of a rank: only the client knows."""
    with ReplyDropper(brief.socket) as proxy, EngineClient(proxy.endpoint, engine_id=method, name=method) as client:
        keys = prompt_keys(method, COUNT)
        if method == "Acquire":
            lease, granted = client.reserve(keys, ANSWER_SECONDS)
            assert client.copy(granted, 0, Direction.STORE)
            client.commit(lease, COUNT)
        proxy.drop(method, Loss.SILENCE)
        _, answer = (client.acquire if method == "Acquire" else client.reserve)(keys, timeout_seconds=10.0)
        assert proxy.dropped == [method]
        if isinstance(answer, AcquireReply):
            assert answer.outcome is AcquireOutcome.REFUSED
        else:
            assert isinstance(answer, ReserveReply)
            assert set(answer.outcomes) == {ReserveOutcome.REFUSED}
        client.wait_nothing_owed()


def test_a_refused_commit_of_an_unknown_lease_is_lost_and_holds_nothing_up(daemon: DaemonProcess) -> None:
    with EngineClient(daemon.endpoint, engine_id="unknown") as client:
        assert list(client.commit(client.session.new_lease_id(), 2)) == [CommitOutcome.LOST] * 2
        client.wait_nothing_owed()
