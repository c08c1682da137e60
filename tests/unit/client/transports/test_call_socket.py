"""Calls over a socket: both ends with a socketpair between them, a clock to turn, and peers that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import socket
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.client.failures import FailureReason
from kvdepot.client.inbox import Inbox
from kvdepot.client.transports import call_socket
from kvdepot.client.transports.call_socket import CallSocket
from kvdepot.core.calls import (
    Confirmed,
    EndRequestCall,
    GetCapabilitiesCall,
    LocateCall,
    LocateReply,
    ReleaseCall,
    ReserveReply,
)
from kvdepot.core.errors import (
    InvalidArgument,
    KvDepotError,
    LimitExceeded,
    NoRoom,
    NotReady,
    UnknownNamespace,
    UnknownSession,
)
from kvdepot.proto.call_frames import (
    FRAME_BYTES_MAX,
    REFUSAL,
    Frame,
    Frames,
    decode_refusal,
    encode_frame,
    encode_refusal,
)
from kvdepot.proto.methods import BY_NUMBER, DEPOT
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.server.attach.attach import AttachListener
from kvdepot.server.rpc import call_socket as server_end

from tests.fakes.call_daemon import LOG, Calls, Daemon
from tests.rigs.patience import patient

TOKEN = b"t" * 16
LOCATE = LocateCall(TOKEN, b"n" * 16, b"k" * 16, 16, "r")


def frames_in(data: bytes) -> list[Frame]:
    frames = Frames()
    frames.feed(data)
    return list(frames)


def reply_frame(number: int, answer: object, method: str = "Locate") -> bytes:
    if isinstance(answer, KvDepotError):
        return encode_refusal(number, answer)
    return encode_frame(number, DEPOT[method].number, DEPOT[method].reply.encode(answer).SerializeToString())


# --- frames ---


def test_every_method_has_a_number_of_its_own_that_is_no_refusal() -> None:
    assert {method.number: method for method in DEPOT.values()} == BY_NUMBER
    assert len(BY_NUMBER) == len(pb.DESCRIPTOR.services_by_name["Depot"].methods)
    assert REFUSAL not in BY_NUMBER and max(BY_NUMBER) < 256


def test_the_page_of_the_protocol_has_the_numbers() -> None:
    page = (Path(__file__).parents[4] / "docs/formats/protocol.md").read_text()
    section = page.partition("## Call sockets")[2].partition("## Streams")[0]
    assert dict(re.findall(r"`(\w+)` \| (\d+)", section)) == {name: str(one.number) for name, one in DEPOT.items()}


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("keys: 17 bytes", advice="send whole keys"),
        UnknownSession("who?"),
        NoRoom("full"),
        KvDepotError("the daemon failed on this call"),
        InvalidArgument("a lone surrogate \ud800"),
    ],
)
def test_a_refusal_says_what_a_status_of_grpc_says(error: KvDepotError) -> None:
    (frame,) = frames_in(encode_refusal(1, error))
    assert (frame.number, frame.method) == (1, REFUSAL)
    found = decode_refusal(frame.body)
    if type(error) is not KvDepotError:
        assert type(found) is type(error)
        assert found.advice == error.advice
    assert error.message.encode("utf-8", "replace").decode() in str(found)


FRAME = st.builds(Frame, st.integers(0, 2**64 - 1), st.integers(0, 255), st.binary(max_size=64))


@given(st.lists(FRAME, max_size=8), st.data())
def test_frames_come_out_whole_however_they_are_cut(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(*frame) for frame in sent)
    frames, found = Frames(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        frames.feed(stream[:cut])
        stream = stream[cut:]
        found += list(frames)
    assert found == sent


@pytest.mark.requirement("I4")
def test_a_frame_that_is_too_long_is_refused_before_it_comes() -> None:
    with pytest.raises(LimitExceeded):
        frames_in(struct.pack("<I", FRAME_BYTES_MAX + 1))
    with pytest.raises(LimitExceeded):
        encode_frame(1, 1, bytes(FRAME_BYTES_MAX))


def test_a_frame_without_room_for_its_head_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        frames_in(struct.pack("<I", 8) + bytes(8))


@given(st.binary(max_size=200))
def test_whatever_comes_in_a_frame_is_decoded_or_refused(body: bytes) -> None:
    for method in DEPOT.values():
        for codec in (method.call, method.reply):
            with contextlib.suppress(InvalidArgument, LimitExceeded):
                codec.parse(body)
    with contextlib.suppress(InvalidArgument):
        decode_refusal(body)


# --- the client's end ---


class Client:
    """A client's end whose clock is turned by hand, and the daemon's end as a bare socket."""

    def __init__(self) -> None:
        ours, self.daemon = socket.socketpair()
        self.daemon.setblocking(False)
        self.now = 0.0
        self.ended: list[str] = []
        self.answers: list[Any] = []
        self.inbox: Inbox[int] = Inbox()
        self.channel = CallSocket(
            ours, lambda: self.now,
            unwatch=lambda: self.ended.append("unwatch"), broken=lambda: self.ended.append("broken"),
        )  # fmt: skip

    def start(self, call: Any = LOCATE, seconds: float = 1.0) -> None:
        self.channel.start(call, seconds, self.answers.append)

    def received(self) -> list[tuple[int, str]]:
        """Number and method of what the daemon got, as far as it is whole."""
        data = b""
        while True:
            try:
                data += self.daemon.recv(1 << 20)
            except BlockingIOError:
                return [(frame.number, BY_NUMBER[frame.method].name) for frame in frames_in(data)]

    def answer(self, number: int, answer: object, method: str = "Locate") -> None:
        self.daemon.sendall(reply_frame(number, answer, method))
        self.channel.work(ready=True)

    @property
    def deadline(self) -> float:
        return self.channel.watch(self.inbox)


@pytest.fixture
def client() -> Client:
    return Client()


def test_answers_find_their_calls_in_any_order(client: Client) -> None:
    client.start()
    client.start(ReleaseCall(TOKEN, (7,)))
    assert client.received() == [(1, "Locate"), (2, "Release")]
    client.answer(2, Confirmed(), "Release")
    client.answer(1, LocateReply(16, "ram"))
    assert client.answers == [Confirmed(), LocateReply(16, "ram")]


@pytest.mark.parametrize(
    ("refusal", "reason", "code"),
    [
        (NotReady("the daemon is stopping"), FailureReason.UNAVAILABLE, "not_ready"),
        (UnknownSession("who?"), FailureReason.LOST, "unknown_session"),
        (InvalidArgument("what?"), FailureReason.REFUSED, "invalid_argument"),
    ],
)
def test_refusals_are_what_they_are_over_grpc(
    client: Client, refusal: KvDepotError, reason: FailureReason, code: str
) -> None:
    client.start()
    client.answer(1, refusal)
    (answer,) = client.answers
    assert (answer.reason, answer.code) == (reason, code)


@pytest.mark.requirement("I1")
def test_another_method_s_answer_answers_nothing(client: Client) -> None:
    client.start(ReleaseCall(TOKEN, (7,)))
    client.answer(1, LocateReply(16, "ram"))
    assert [(answer.reason, answer.code) for answer in client.answers] == [(FailureReason.REFUSED, "malformed_reply")]


def test_a_call_fails_at_its_deadline_and_its_answer_is_nobody_s(client: Client) -> None:
    client.start(seconds=1.0)
    client.start(seconds=3.0)
    assert client.deadline == 1.0
    client.now = 1.0
    client.channel.work(ready=False)
    assert [answer.reason for answer in client.answers] == [FailureReason.DEADLINE]
    assert client.deadline == 3.0
    client.answer(1, LocateReply(16, "ram"))
    assert len(client.answers) == 1


@pytest.mark.requirement("I3", "I4")
def test_a_daemon_that_takes_nothing_costs_a_bounded_amount_and_gets_nothing_stale(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_socket, "UNSENT_BYTES_MAX", 1 << 20)
    large = LocateCall(TOKEN, b"n" * 16, bytes(16) * 4096, 16, "r")
    for _ in range(64):
        client.start(large)
    failed = [answer for answer in client.answers if answer.code == "calls_unsent"]
    assert 0 < len(failed) < 63, "the socket and the bound took some"
    client.now = 2.0
    client.channel.work(ready=False)
    assert len(client.answers) == 64, "each is answered once"
    client.start(EndRequestCall(TOKEN, "r"), seconds=9.0)
    stream = b""
    while client.channel._unsent:
        stream += client.daemon.recv(1 << 20)
        client.channel.work(ready=True)
    stream += client.daemon.recv(1 << 20)
    got = [(frame.number, BY_NUMBER[frame.method].name) for frame in frames_in(stream)]
    assert got[-1] == (65, "EndRequest")
    assert len(got) < 64 - len(failed), "what nobody waited for any more was left out, as far as it was not under way"


def test_what_nobody_waits_for_any_more_takes_no_room(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a daemon that hangs for long would be one that takes no calls."""
    monkeypatch.setattr(call_socket, "UNSENT_BYTES_MAX", 1 << 20)
    large = LocateCall(TOKEN, b"n" * 16, bytes(16) * 4096, 16, "r")
    for _ in range(50):
        for _ in range(4):
            client.start(large, seconds=0.5)
        client.now += 1.0
        client.channel.work(ready=False)
    assert len(client.answers) == 200
    assert {answer.reason for answer in client.answers} == {FailureReason.DEADLINE}


@pytest.mark.requirement("I5")
def test_an_answer_that_is_there_is_had_although_sending_fails(client: Client) -> None:
    """A daemon that has committed and then ended: what it did is known."""
    client.start(ReleaseCall(TOKEN, (7,)))
    client.daemon.sendall(reply_frame(1, Confirmed(), "Release"))
    client.daemon.close()
    client.start()
    assert not client.channel._unsent, "a socket that takes nothing any more is always ready for it"
    client.channel.work(ready=True)
    client.channel.work(ready=True)
    assert client.answers[0] == Confirmed()
    assert [answer.reason for answer in client.answers[1:]] == [FailureReason.UNAVAILABLE]
    assert client.ended == ["unwatch", "broken"]


def test_a_connection_that_ends_fails_what_is_under_way_and_says_so_once(client: Client) -> None:
    client.start()
    client.daemon.close()
    client.channel.work(ready=True)
    assert [answer.reason for answer in client.answers] == [FailureReason.UNAVAILABLE]
    assert client.ended == ["unwatch", "broken"], "no descriptor is closed while it is waited for"
    client.start()
    assert len(client.answers) == 2
    client.channel.close()
    assert client.ended == ["unwatch", "broken"]


def test_what_is_no_frame_ends_the_connection(client: Client) -> None:
    client.start()
    client.daemon.sendall(struct.pack("<I", 3) + b"\xff\xff\xff")
    client.channel.work(ready=True)
    assert client.ended == ["unwatch", "broken"]
    assert [answer.reason for answer in client.answers] == [FailureReason.UNAVAILABLE]


@pytest.mark.requirement("I3")
def test_what_cannot_be_encoded_is_refused(client: Client) -> None:
    client.start(EndRequestCall(TOKEN, "\ud800"))
    client.start(LocateCall(TOKEN, b"n" * 16, bytes(FRAME_BYTES_MAX), 16, "r"))
    assert [answer.reason for answer in client.answers] == [FailureReason.REFUSED] * 2
    client.start(GetCapabilitiesCall(1, 1))
    assert [method for _, method in client.received()] == ["GetCapabilities"], "and nothing of it was sent"


# --- the daemon's end ---


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_calls_are_begun_in_order_and_answered_when_they_are_done() -> None:
    async def run() -> None:
        daemon = Daemon()
        daemon.calls.answer = None
        daemon.send(1, 2)
        await daemon.kept(2)
        daemon.calls.answer = Confirmed()
        daemon.send(3, method="Release")
        daemon.calls.kept[1](LocateReply(32, "ram"))
        assert [number for number, _ in await daemon.answers(2)] == [2, 3]
        daemon.calls.kept[0](UnknownNamespace("which?"))
        ((number, refusal),) = await daemon.answers(1)
        assert number == 1 and isinstance(refusal, UnknownNamespace)
        daemon.end.close()

    asyncio.run(run())


def test_a_turn_of_the_loop_is_bounded_and_others_have_theirs() -> None:
    async def run() -> None:
        daemon = Daemon()
        daemon.calls.seconds = 0.002
        turns = 0
        daemon.send(*range(1, 51))
        while len(daemon.calls.begun) < 50:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 50
        assert len(await daemon.answers(50)) == 50
        daemon.end.close()

    asyncio.run(run())


@pytest.mark.requirement("I4")
def test_too_many_calls_under_way_are_answered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_end, "_WAITING_MAX", 2)

    async def run() -> None:
        daemon = Daemon()
        daemon.calls.answer = None
        daemon.send(1, 2, 3)
        ((number, refusal),) = await daemon.answers(1)
        assert number == 3 and isinstance(refusal, NoRoom)
        daemon.calls.kept[0](LocateReply(0))
        await daemon.answers(1)
        daemon.send(4)
        await daemon.kept(3)
        daemon.end.close()

    asyncio.run(run())


@pytest.mark.requirement("I4")
def test_nothing_is_read_from_a_client_that_takes_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_end, "_UNSENT_BYTES_MAX", 1 << 16)

    async def run() -> None:
        daemon = Daemon()
        daemon.calls.answer = ReserveReply(b"", bytes(40 << 10))
        sent = 0
        loop = asyncio.get_running_loop()
        frame = encode_frame(1, DEPOT["Reserve"].number, bytes(1 << 12))
        for _ in range(2000):
            try:
                await asyncio.wait_for(loop.sock_sendall(daemon.client, frame), 0.5)
            except TimeoutError:
                break
            sent += 1
        begun = len(daemon.calls.begun)
        assert begun < 100, "it stopped"
        assert sent < 2000, "and so did what it takes in"
        monkeypatch.setattr(daemon.calls, "answer", ReserveReply(b""))
        assert len(await daemon.answers(sent)) == sent == len(daemon.calls.begun), "it goes on where it stopped"
        daemon.end.close()

    asyncio.run(run())


@pytest.mark.requirement("I4")
def test_calls_that_have_come_do_not_begin_while_the_client_takes_no_answers() -> None:
    async def run() -> None:
        daemon = Daemon()
        daemon.send(1)
        await daemon.answers(1)
        daemon.end.pause_writing()
        daemon.end.data_received(b"".join(encode_frame(number, DEPOT["Locate"].number, b"") for number in (2, 3, 4)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(daemon.calls.begun) == 1
        daemon.end.resume_writing()
        assert [number for number, _ in await daemon.answers(3)] == [2, 3, 4]
        daemon.end.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "refused"),
    [
        (struct.pack("<I", 8) + b"\xff" * 100, None),
        (struct.pack("<I", FRAME_BYTES_MAX + 1), None),
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (encode_frame(9, 200, b"what?"), InvalidArgument),
    ],
    ids=["no head", "too long", "another protocol", "a method of a later version"],
)
def test_garbage_ends_the_connection_and_an_unknown_method_is_refused(
    sent: bytes, refused: type[KvDepotError] | None
) -> None:
    async def run() -> None:
        daemon = Daemon()
        daemon.client.sendall(sent)
        answers = await daemon.answers(1)
        if refused is None:
            assert answers == []
        else:
            ((number, refusal),) = answers
            assert number == 9 and isinstance(refusal, refused)
        assert daemon.calls.begun == []
        daemon.end.close()

    asyncio.run(run())


def test_a_stopping_daemon_answers_not_ready_and_finishes_what_is_under_way() -> None:
    async def run() -> None:
        daemon = Daemon()
        daemon.calls.answer = None
        daemon.send(1)
        await daemon.kept(1)
        daemon.end.refuse_new()
        daemon.send(2)
        ((number, refusal),) = await daemon.answers(1)
        assert number == 2 and isinstance(refusal, NotReady)
        daemon.calls.kept[0](LocateReply(0))
        assert [number for number, _ in await daemon.answers(1)] == [1]
        daemon.end.close()
        assert await daemon.answers(1) == [], "closed"

    asyncio.run(run())


@pytest.mark.requirement("I5")
def test_what_came_on_a_socket_that_is_closed_is_not_begun() -> None:
    async def run() -> None:
        daemon = Daemon()
        daemon.send(1)
        await asyncio.sleep(0.05)
        daemon.send(2)
        daemon.end.close()
        daemon.end.close()
        await asyncio.sleep(0.05)
        assert daemon.calls.begun == ["Locate"]

    asyncio.run(run())


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("turns", range(5))
def test_an_end_while_it_begins_leaves_no_descriptor(turns: int) -> None:
    """Where an attachment's answer cannot be sent, as when no descriptor is left: it is tried again and again."""

    async def run() -> None:
        calls: Any = Calls()
        gc.disable()
        try:
            before = descriptors()
            for _ in range(50):
                end = server_end.CallSocket(calls, loop=asyncio.get_running_loop(), log=LOG)
                client = end.open()
                client.settimeout(patient(5))
                for _ in range(turns):
                    await asyncio.sleep(0)
                end.close()
                end.close()
                for _ in range(5):
                    await asyncio.sleep(0)
                assert client.recv(1) == b"", "closed"
                client.close()
            await asyncio.sleep(0.05)
            assert descriptors() <= before
        finally:
            gc.enable()

    asyncio.run(run())


def test_a_stop_waits_for_what_was_begun_and_no_longer_than_its_grace() -> None:
    async def run() -> None:
        daemon, loop = Daemon(), asyncio.get_running_loop()
        daemon.calls.answer = None
        daemon.send(1, 2)
        await daemon.kept(2)
        listener: Any = object.__new__(AttachListener)
        listener._loop, listener._connections = (
            loop,
            {1: SimpleNamespace(calls=daemon.end), 2: SimpleNamespace(calls=None)},
        )
        began = loop.time()
        await listener.finish_calls(0.1)
        assert loop.time() - began >= 0.1, "they are not answered"
        for kept in daemon.calls.kept:
            loop.call_later(0.1, kept, LocateReply(0))
        await listener.finish_calls(30.0)
        assert loop.time() - began < 15
        assert len(await daemon.answers(2)) == 2
        daemon.end.close()

    asyncio.run(run())


def test_an_answer_that_comes_after_the_end_is_nobody_s() -> None:
    async def run() -> None:
        daemon = Daemon()
        daemon.calls.answer = None
        daemon.send(1)
        await daemon.kept(1)
        daemon.client.close()
        await asyncio.sleep(0.05)
        daemon.calls.kept[0](LocateReply(0))
        daemon.end.close()

    asyncio.run(run())
