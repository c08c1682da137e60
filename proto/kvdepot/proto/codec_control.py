"""What operators change, between the wire and `kvdepot.core.control`."""

from __future__ import annotations

from collections.abc import Iterable

from kvdepot.core import limits
from kvdepot.core.calls import KEY_BYTES
from kvdepot.core.control import (
    PIN_SECONDS_MAX,
    BumpCall,
    BumpReply,
    ConfigChange,
    ConfigReply,
    EvictReply,
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
from kvdepot.proto.bounds import bad, check_bytes, check_text
from kvdepot.proto.codec_report import (
    decode_epochs,
    decode_pin,
    decode_switches,
    encode_epochs,
    encode_pin,
    encode_switches,
)
from kvdepot.proto.v1 import control_pb2 as pb


def encode_switch_call(call: SwitchCall) -> pb.SetSwitchRequest:
    return pb.SetSwitchRequest(switch=call.switch, on=call.on, namespace=call.namespace_id)


def decode_switch_call(message: pb.SetSwitchRequest) -> SwitchCall:
    """Raises InvalidArgument."""
    if message.switch not in set(Switch):
        raise bad("switch", f"{message.switch[:64]!r} is none of {[str(one) for one in Switch]}")
    if message.namespace:
        check_bytes("namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    return SwitchCall(Switch(message.switch), message.on, message.namespace)


def encode_switch_reply(reply: SwitchReply) -> pb.SetSwitchResponse:
    return pb.SetSwitchResponse(switches=encode_switches(reply.switches), leases=reply.leases, not_kept=reply.not_kept)


def decode_switch_reply(message: pb.SetSwitchResponse) -> SwitchReply:
    return SwitchReply(decode_switches(message.switches), message.leases, message.not_kept)


def encode_bump_call(call: BumpCall) -> pb.BumpEpochRequest:
    return pb.BumpEpochRequest(namespace=call.namespace_id, all=not call.namespace_id, to=call.to)


def decode_bump_call(message: pb.BumpEpochRequest) -> BumpCall:
    """Raises InvalidArgument."""
    if message.all:
        if message.namespace:
            raise bad("all", "and a namespace: either")
        return BumpCall(to=message.to)
    check_bytes("namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    if message.to:
        raise bad("to", "is for all namespaces")
    return BumpCall(message.namespace)


def encode_bump_reply(reply: BumpReply) -> pb.BumpEpochResponse:
    return pb.BumpEpochResponse(
        epochs=encode_epochs(reply.epochs),
        changed=reply.changed,
        namespaces=reply.namespaces,
        chunks=reply.chunks,
        leases=reply.leases,
        shared=reply.shared,
        not_kept=reply.not_kept,
    )


def decode_bump_reply(message: pb.BumpEpochResponse) -> BumpReply:
    return BumpReply(
        decode_epochs(message.epochs),
        message.changed,
        message.namespaces,
        message.chunks,
        message.leases,
        tuple(message.shared),
        message.not_kept,
    )


def encode_reload_reply(reply: ReloadReply) -> pb.ReloadResponse:
    changes = [pb.ConfigChange(key=one.key, before=one.before, after=one.after, live=one.live) for one in reply.changes]
    return pb.ReloadResponse(file=reply.file, changes=changes)


def decode_reload_reply(message: pb.ReloadResponse) -> ReloadReply:
    changes = tuple(ConfigChange(one.key, one.before, one.after, one.live) for one in message.changes)
    return ReloadReply(message.file, changes)


def encode_config_reply(reply: ConfigReply) -> pb.GetConfigResponse:
    return pb.GetConfigResponse(file=reply.file, values=reply.values)


def decode_config_reply(message: pb.GetConfigResponse) -> ConfigReply:
    return ConfigReply(message.file, dict(message.values))


def encode_pin_call(call: PinCall) -> pb.PinRequest:
    return pb.PinRequest(namespace=call.namespace_id, key=call.key, seconds=call.seconds)


def decode_pin_call(message: pb.PinRequest) -> PinCall:
    """Raises InvalidArgument."""
    namespace_id, key = decode_place(message)
    if not 0 < message.seconds <= PIN_SECONDS_MAX:
        raise bad("seconds", f"{message.seconds} is not above 0 and at most {PIN_SECONDS_MAX:.0f}")
    return PinCall(namespace_id, key, message.seconds)


def encode_pin_reply(reply: PinReply) -> pb.PinResponse:
    return pb.PinResponse(pin=encode_pin(reply.pin), not_kept=reply.not_kept)


def decode_pin_reply(message: pb.PinResponse) -> PinReply:
    return PinReply(decode_pin(message.pin), message.not_kept)


def encode_quota_subject(subject: QuotaSubject) -> pb.QuotaSubject:
    return pb.QuotaSubject(tenant=subject.tenant, namespace=subject.namespace, tier=subject.tier)


def decode_quota_subject(message: pb.QuotaSubject) -> QuotaSubject:
    """Raises InvalidArgument, or LimitExceeded."""
    check_text("tenant", message.tenant, limits.TENANT_BYTES_MAX)
    check_text("namespace", message.namespace, limits.LABEL_BYTES_MAX)
    check_text("tier", message.tier, limits.LABEL_BYTES_MAX)
    if not message.tier:
        raise bad("tier", "is empty; all of them are '*'")
    return QuotaSubject(message.tenant, message.namespace if message.HasField("namespace") else None, message.tier)


def encode_set_quota(entry: QuotaEntry) -> pb.SetQuotaRequest:
    return pb.SetQuotaRequest(subject=encode_quota_subject(entry.subject), capacity_bytes=entry.capacity_bytes)


def decode_set_quota(message: pb.SetQuotaRequest) -> QuotaEntry:
    """Raises InvalidArgument, or LimitExceeded."""
    capacity = message.capacity_bytes if message.HasField("capacity_bytes") else None
    return QuotaEntry(decode_quota_subject(message.subject), capacity, by_operator=True)


def encode_list_quotas(subject: QuotaSubject | None) -> pb.ListQuotasRequest:
    return pb.ListQuotasRequest(subject=None if subject is None else encode_quota_subject(subject))


def encode_quotas(entries: Iterable[QuotaEntry]) -> pb.ListQuotasResponse:
    return pb.ListQuotasResponse(
        quotas=[
            pb.Quota(
                subject=encode_quota_subject(one.subject),
                capacity_bytes=one.capacity_bytes,
                by_operator=one.by_operator,
            )
            for one in entries
        ]
    )


def decode_quotas(message: pb.ListQuotasResponse) -> tuple[QuotaEntry, ...]:
    return tuple(
        QuotaEntry(
            decode_quota_subject(one.subject),
            one.capacity_bytes if one.HasField("capacity_bytes") else None,
            one.by_operator,
        )
        for one in message.quotas
    )


def encode_evict_call(namespace_id: bytes, key: bytes) -> pb.EvictRequest:
    return pb.EvictRequest(namespace=namespace_id, key=key)


def decode_place(
    message: pb.EvictRequest | pb.PinRequest | pb.UnpinRequest | pb.VerifyRequest | pb.PrefetchRequest,
) -> tuple[bytes, bytes]:
    """(namespace id, key of a chunk or nothing). Raises InvalidArgument."""
    check_bytes("namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    if message.key:
        check_bytes("key", message.key, KEY_BYTES)
    return message.namespace, message.key


def encode_evict_reply(reply: EvictReply) -> pb.EvictResponse:
    return pb.EvictResponse(chunks=reply.chunks, more=reply.more, spared=reply.spared)


def decode_evict_reply(message: pb.EvictResponse) -> EvictReply:
    return EvictReply(message.chunks, message.more, tuple(message.spared))


def encode_verify_call(call: VerifyCall) -> pb.VerifyRequest:
    return pb.VerifyRequest(
        namespace=call.namespace_id, key=call.key, tier=call.tier, bytes_per_second=call.bytes_per_second
    )


def decode_verify_call(message: pb.VerifyRequest) -> VerifyCall:
    """Raises InvalidArgument, or LimitExceeded."""
    check_text("tier", message.tier, limits.LABEL_BYTES_MAX)
    if not message.bytes_per_second:
        raise bad("bytes_per_second", "is 0: nothing would be read")
    if not message.namespace and message.key:
        raise bad("key", "is of a chunk of no namespace")
    place = decode_place(message) if message.namespace else (b"", b"")
    return VerifyCall(message.bytes_per_second, *place, message.tier)


def encode_verify_reply(reply: VerifyReply) -> pb.VerifyResponse:
    return pb.VerifyResponse(
        tiers=[
            pb.VerifiedTier(
                tier=one.tier,
                objects=one.objects,
                verified=one.verified,
                verified_bytes=one.verified_bytes,
                damaged=one.damaged,
                skipped=one.skipped,
                over=one.over,
                reason=one.reason,
            )
            for one in reply.tiers
        ]
    )


def decode_verify_reply(message: pb.VerifyResponse) -> VerifyReply:
    return VerifyReply(
        tuple(
            VerifiedTier(
                one.tier,
                one.objects,
                one.verified,
                one.verified_bytes,
                dict(one.damaged),
                dict(one.skipped),
                one.over,
                one.reason,
            )
            for one in message.tiers
        )
    )


def encode_prefetch_call(namespace_id: bytes, key: bytes) -> pb.PrefetchRequest:
    return pb.PrefetchRequest(namespace=namespace_id, key=key)


def encode_prefetch_reply(reply: PrefetchReply) -> pb.PrefetchResponse:
    return pb.PrefetchResponse(
        chunks=reply.chunks,
        looked_at=reply.looked_at,
        there=reply.there,
        read=reply.read,
        read_bytes=reply.read_bytes,
        refused=reply.refused,
        failed=reply.failed,
        over=reply.over,
        reason=reply.reason,
    )


def decode_prefetch_reply(message: pb.PrefetchResponse) -> PrefetchReply:
    return PrefetchReply(
        message.chunks,
        message.looked_at,
        message.there,
        message.read,
        message.read_bytes,
        dict(message.refused),
        dict(message.failed),
        message.over,
        message.reason,
    )
