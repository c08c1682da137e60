"""What operators change, over the wire."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from kvdepot.core.control import (
    BumpCall,
    BumpReply,
    ChangeReply,
    ConfigChange,
    ConfigReply,
    DeleteQuotaCall,
    DrainCall,
    DrainReply,
    EvictCall,
    EvictReply,
    GetConfigCall,
    ListQuotasCall,
    PinCall,
    PinReply,
    PrefetchCall,
    PrefetchReply,
    QuotaEntry,
    QuotasReply,
    QuotaSubject,
    ReloadCall,
    ReloadReply,
    SetQuotaCall,
    Switch,
    SwitchCall,
    SwitchReply,
    UnpinCall,
    VerifiedTier,
    VerifyCall,
    VerifyReply,
)
from kvdepot.core.epochs import Epochs
from kvdepot.core.errors import InvalidArgument, LimitExceeded
from kvdepot.core.report import PinStatus, SwitchesStatus
from kvdepot.proto.methods import BY_CALL, CONTROL
from kvdepot.proto.v1 import control_pb2 as pb

SUBJECT = QuotaSubject("a", None, "ram")
WHOLE = VerifiedTier("ram", 9, 3, 4 << 40, {"corrupt": 1}, {"left": 2}, finished=True, reason="why")
PLACES = ((b"n" * 16, b""), (b"n" * 16, b"k" * 16))
CALLS: list[object] = [
    SwitchCall(Switch.LOADS, on=True),
    SwitchCall(Switch.STORES, False, b"n" * 16),
    BumpCall(all=True),
    BumpCall(all=True, to=7),
    BumpCall(b"n" * 16),
    PinCall(b"n" * 16, b"k" * 16, 1.5),
    PinCall(b"n" * 16, b"", 60.0),
    SetQuotaCall(SUBJECT, 1 << 40),
    SetQuotaCall(SUBJECT, 0),
    SetQuotaCall(QuotaSubject("*", "", "*"), None),
    DeleteQuotaCall(SUBJECT),
    ListQuotasCall(),
    ListQuotasCall(SUBJECT),
    VerifyCall(1),
    VerifyCall(2, b"n" * 16, b"k" * 16, "nvme"),
    DrainCall(draining=True),
    ReloadCall(dry_run=True),
    GetConfigCall(),
    *(kind(*place) for place in PLACES for kind in (EvictCall, UnpinCall, PrefetchCall)),
]
REPLIES: list[object] = [
    SwitchReply(SwitchesStatus(True, (bytes(16),), True, ()), 7, "why"),
    BumpReply(Epochs(3, (bytes(16),)), True, 1, 2, 3, ("pool",), "why"),
    PinReply(PinStatus(b"n" * 16, b"k" * 16, 1.5, 2, 3, 4), "why"),
    QuotasReply((QuotaEntry(SUBJECT, 1 << 40, by_operator=True), QuotaEntry(QuotaSubject("*", "", "*"), None))),
    ReloadReply("f", (ConfigChange("a.b", "1", "2", live=True), ConfigChange("c", "x", "(absent)", live=False))),
    ConfigReply("f", {"a.b": "1", "c": "x, y"}),
    VerifyReply((WHOLE, VerifiedTier("nvme"))),
    PrefetchReply(1),
    PrefetchReply(1, 2, 3, 4, 5 << 40, {"share": 6}, {"left": 7}, True, "why"),
    EvictReply(7, True, ("pool",)),
    DrainReply(3),
    ChangeReply("why"),
]


@pytest.mark.parametrize("call", CALLS, ids=repr)
def test_a_call_comes_back_equal(call: object) -> None:
    wire = BY_CALL[type(call)].call
    assert wire.parse(wire.encode(call).SerializeToString()) == call


@pytest.mark.parametrize("reply", REPLIES, ids=repr)
def test_a_reply_comes_back_equal(reply: object) -> None:
    wires = [method.reply for method in CONTROL.values() if method.reply_type is type(reply)]
    assert wires
    for wire in wires:
        assert wire.parse(wire.encode(reply).SerializeToString()) == reply


def test_every_call_and_every_reply_was_tried() -> None:
    assert {type(call) for call in CALLS} == {method.call_type for method in CONTROL.values()}
    assert {type(reply) for reply in REPLIES} == {method.reply_type for method in CONTROL.values()}


@pytest.mark.parametrize(
    ("method", "message", "found"),
    [
        ("SetSwitch", pb.SetSwitchRequest(switch="lods"), "lods"),
        ("SetSwitch", pb.SetSwitchRequest(switch="loads", namespace_id=b"x"), "namespace_id"),
        ("BumpEpoch", pb.BumpEpochRequest(), "namespace_id"),
        ("BumpEpoch", pb.BumpEpochRequest(all=True, namespace_id=bytes(16)), "all"),
        ("BumpEpoch", pb.BumpEpochRequest(namespace_id=bytes(16), to=3), "to"),
        ("Pin", pb.PinRequest(seconds=1), "namespace_id"),
        ("Pin", pb.PinRequest(namespace_id=bytes(16), key=b"k", seconds=1), "key"),
        ("Pin", pb.PinRequest(namespace_id=bytes(16)), "seconds"),
        ("Pin", pb.PinRequest(namespace_id=bytes(16), seconds=float("nan")), "seconds"),
        ("Pin", pb.PinRequest(namespace_id=bytes(16), seconds=float("inf")), "seconds"),
        ("DeleteQuota", pb.DeleteQuotaRequest(subject=pb.QuotaSubject(tenant="a")), "tier"),
        ("DeleteQuota", pb.DeleteQuotaRequest(subject=pb.QuotaSubject(tenant="a" * 129, tier="*")), "tenant bytes"),
        ("DeleteQuota", pb.DeleteQuotaRequest(subject=pb.QuotaSubject(namespace="a" * 97)), "namespace bytes"),
        ("Verify", pb.VerifyRequest(), "bytes_per_second"),
        ("Verify", pb.VerifyRequest(bytes_per_second=1, namespace_id=b"n"), "namespace_id"),
        ("Verify", pb.VerifyRequest(bytes_per_second=1, key=bytes(16)), "key"),
        ("Verify", pb.VerifyRequest(bytes_per_second=1, namespace_id=bytes(16), key=b"k"), "key"),
        ("Evict", pb.EvictRequest(), "namespace_id"),
        ("Unpin", pb.UnpinRequest(namespace_id=bytes(16), key=b"k"), "key"),
        ("Prefetch", pb.PrefetchRequest(namespace_id=b"n"), "namespace_id"),
    ],
)
def test_nonsense_is_refused_by_name(method: str, message: Message, found: str) -> None:
    with pytest.raises((InvalidArgument, LimitExceeded), match=found):
        CONTROL[method].call.decode(message)
