"""What operators change, over the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.control import (
    BumpCall,
    BumpReply,
    ConfigChange,
    ConfigReply,
    PinCall,
    PinReply,
    PrefetchReply,
    QuotaEntry,
    QuotaSubject,
    ReloadReply,
    Switch,
    SwitchCall,
    SwitchReply,
    VerifiedTier,
    VerifyCall,
    VerifyReply,
)
from kvdepot.core.epochs import Epochs
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.report import PinStatus, SwitchesStatus
from kvdepot.proto import codec_control
from kvdepot.proto.v1 import control_pb2 as pb


@pytest.mark.parametrize("call", [SwitchCall(Switch.LOADS, on=True), SwitchCall(Switch.STORES, False, b"n" * 16)])
def test_a_switch_comes_back_equal(call: SwitchCall) -> None:
    message = codec_control.encode_switch_call(call)
    assert codec_control.decode_switch_call(pb.SetSwitchRequest.FromString(message.SerializeToString())) == call
    reply = SwitchReply(SwitchesStatus(True, (bytes(16),), True, ()), 7, "why")
    answer = codec_control.encode_switch_reply(reply)
    assert codec_control.decode_switch_reply(pb.SetSwitchResponse.FromString(answer.SerializeToString())) == reply


def test_a_bump_comes_back_equal_and_is_of_one_or_of_all() -> None:
    for call in (BumpCall(), BumpCall(to=7), BumpCall(b"n" * 16)):
        message = codec_control.encode_bump_call(call)
        assert codec_control.decode_bump_call(pb.BumpEpochRequest.FromString(message.SerializeToString())) == call
    reply = BumpReply(Epochs(3, (bytes(16),)), True, 1, 2, 3, ("pool",), "why")
    answer = codec_control.encode_bump_reply(reply)
    assert codec_control.decode_bump_reply(pb.BumpEpochResponse.FromString(answer.SerializeToString())) == reply
    for wrong, found in (
        (pb.BumpEpochRequest(), "namespace"),
        (pb.BumpEpochRequest(all=True, namespace=bytes(16)), "all"),
        (pb.BumpEpochRequest(namespace=bytes(16), to=3), "to"),
    ):
        with pytest.raises(InvalidArgument, match=found):
            codec_control.decode_bump_call(wrong)


def test_a_pin_comes_back_equal() -> None:
    for call in (PinCall(b"n" * 16, b"k" * 16, 1.5), PinCall(b"n" * 16, b"", 60.0)):
        message = codec_control.encode_pin_call(call)
        assert codec_control.decode_pin_call(pb.PinRequest.FromString(message.SerializeToString())) == call
    reply = PinReply(PinStatus(b"n" * 16, b"k" * 16, 1.5, 2, 3, 4), "why")
    answer = codec_control.encode_pin_reply(reply)
    assert codec_control.decode_pin_reply(pb.PinResponse.FromString(answer.SerializeToString())) == reply


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (pb.PinRequest(seconds=1), "namespace"),
        (pb.PinRequest(namespace=bytes(16), key=b"k", seconds=1), "key"),
        (pb.PinRequest(namespace=bytes(16)), "seconds"),
        (pb.PinRequest(namespace=bytes(16), seconds=float("nan")), "seconds"),
        (pb.PinRequest(namespace=bytes(16), seconds=float("inf")), "seconds"),
    ],
)
def test_a_pin_without_a_name_or_an_end_is_refused(message: pb.PinRequest, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        codec_control.decode_pin_call(message)


def test_quotas_come_back_equal() -> None:
    limited = QuotaEntry(QuotaSubject("a", None, "ram"), 1 << 40, by_operator=True)
    unlimited = QuotaEntry(QuotaSubject("*", "", "*"), None, by_operator=True)
    for entry in (limited, unlimited, replace(limited, capacity_bytes=0)):
        message = codec_control.encode_set_quota(entry)
        assert codec_control.decode_set_quota(pb.SetQuotaRequest.FromString(message.SerializeToString())) == entry
    entries = (limited, replace(unlimited, by_operator=False))
    answer = pb.ListQuotasResponse.FromString(codec_control.encode_quotas(entries).SerializeToString())
    assert codec_control.decode_quotas(answer) == entries
    assert not codec_control.encode_list_quotas(None).HasField("subject")
    asked = codec_control.encode_list_quotas(unlimited.subject)
    assert codec_control.decode_quota_subject(asked.subject) == unlimited.subject
    with pytest.raises(InvalidArgument, match="tier"):
        codec_control.decode_quota_subject(pb.QuotaSubject(tenant="a"))


def test_a_configuration_and_its_changes_come_back_equal() -> None:
    reload = ReloadReply(
        "f", (ConfigChange("a.b", "1", "2", live=True), ConfigChange("c", "x", "(absent)", live=False))
    )
    changed = pb.ReloadResponse.FromString(codec_control.encode_reload_reply(reload).SerializeToString())
    assert codec_control.decode_reload_reply(changed) == reload
    config = ConfigReply("f", {"a.b": "1", "c": "x, y"})
    shown = pb.GetConfigResponse.FromString(codec_control.encode_config_reply(config).SerializeToString())
    assert codec_control.decode_config_reply(shown) == config


@pytest.mark.parametrize(
    ("message", "found"),
    [(pb.SetSwitchRequest(switch="lods"), "lods"), (pb.SetSwitchRequest(switch="loads", namespace=b"x"), "namespace")],
)
def test_nonsense_is_refused_by_name(message: pb.SetSwitchRequest, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        codec_control.decode_switch_call(message)


def test_a_verification_comes_back_equal() -> None:
    for call in (VerifyCall(1), VerifyCall(2, b"n" * 16, b"k" * 16, "nvme")):
        message = codec_control.encode_verify_call(call)
        assert codec_control.decode_verify_call(pb.VerifyRequest.FromString(message.SerializeToString())) == call
    whole = VerifiedTier("ram", 9, 3, 4 << 40, {"corrupt": 1}, {"left": 2}, over=True, reason="why")
    reply = VerifyReply((whole, VerifiedTier("nvme")))
    answer = codec_control.encode_verify_reply(reply)
    assert codec_control.decode_verify_reply(pb.VerifyResponse.FromString(answer.SerializeToString())) == reply


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (pb.VerifyRequest(), "bytes_per_second"),
        (pb.VerifyRequest(bytes_per_second=1, namespace=b"n"), "namespace"),
        (pb.VerifyRequest(bytes_per_second=1, key=bytes(16)), "key"),
        (pb.VerifyRequest(bytes_per_second=1, namespace=bytes(16), key=b"k"), "key"),
    ],
)
def test_a_verification_without_a_rate_or_of_a_chunk_of_nothing_is_refused(
    message: pb.VerifyRequest, found: str
) -> None:
    with pytest.raises(InvalidArgument, match=found):
        codec_control.decode_verify_call(message)


def test_a_prefetch_comes_back_equal() -> None:
    for place in ((b"n" * 16, b""), (b"n" * 16, b"k" * 16)):
        message = codec_control.encode_prefetch_call(*place)
        assert codec_control.decode_place(pb.PrefetchRequest.FromString(message.SerializeToString())) == place
    for reply in (PrefetchReply(1), PrefetchReply(1, 2, 3, 4, 5 << 40, {"share": 6}, {"left": 7}, True, "why")):
        answer = codec_control.encode_prefetch_reply(reply)
        assert codec_control.decode_prefetch_reply(pb.PrefetchResponse.FromString(answer.SerializeToString())) == reply
