"""Status and listings for operators, between the wire and `kvdepot.core.report`."""

from __future__ import annotations

from kvdepot.core.epochs import Epochs
from kvdepot.core.report import (
    DaemonStatus,
    NamespaceStatus,
    PinStatus,
    QuotaOwnerStatus,
    QuotaStatus,
    SessionStatus,
    SwitchesStatus,
    TierStatus,
)
from kvdepot.proto.v1 import depot_pb2 as pb


def encode_status(status: DaemonStatus) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(
        daemon_version=status.version,
        pid=status.pid,
        uptime_seconds=status.uptime_seconds,
        ready=status.ready,
        reason=status.reason,
        arena_id=status.arena_id,
        run=status.run,
        tiers=[_encode_tier(tier) for tier in status.tiers],
        sessions=[_encode_session(session) for session in status.sessions],
        namespaces=[encode_namespace_status(namespace) for namespace in status.namespaces],
        counters=status.counters,
        quotas=[_encode_quota(quota) for quota in status.quotas],
        switches=encode_switches(status.switches),
        pins=[encode_pin(pin) for pin in status.pins],
        epochs=encode_epochs(status.epochs),
    )


def decode_status(message: pb.GetStatusResponse) -> DaemonStatus:
    return DaemonStatus(
        version=message.daemon_version,
        pid=message.pid,
        uptime_seconds=message.uptime_seconds,
        ready=message.ready,
        reason=message.reason,
        arena_id=message.arena_id,
        run=message.run,
        tiers=tuple(_decode_tier(tier) for tier in message.tiers),
        sessions=tuple(_decode_session(session) for session in message.sessions),
        namespaces=tuple(decode_namespace_status(namespace) for namespace in message.namespaces),
        counters=dict(message.counters),
        quotas=tuple(_decode_quota(quota) for quota in message.quotas),
        switches=decode_switches(message.switches),
        pins=tuple(decode_pin(pin) for pin in message.pins),
        epochs=decode_epochs(message.epochs),
    )


def encode_epochs(epochs: Epochs) -> pb.Epochs:
    return pb.Epochs(bump=epochs.bump, void_namespaces=epochs.void)


def decode_epochs(message: pb.Epochs) -> Epochs:
    return Epochs(message.bump, tuple(message.void_namespaces))


def encode_pin(pin: PinStatus) -> pb.Pin:
    return pb.Pin(
        namespace=pin.namespace_id,
        key=pin.key,
        seconds_left=pin.seconds_left,
        chunks=pin.chunks,
        objects=pin.objects,
        bytes=pin.bytes,
    )


def decode_pin(message: pb.Pin) -> PinStatus:
    return PinStatus(
        message.namespace, message.key, message.seconds_left, message.chunks, message.objects, message.bytes
    )


def encode_switches(switches: SwitchesStatus) -> pb.Switches:
    return pb.Switches(
        loads_off=switches.loads_off,
        loads_off_namespaces=switches.loads_off_namespaces,
        stores_off=switches.stores_off,
        stores_off_namespaces=switches.stores_off_namespaces,
        draining=switches.draining,
    )


def decode_switches(message: pb.Switches) -> SwitchesStatus:
    return SwitchesStatus(
        loads_off=message.loads_off,
        loads_off_namespaces=tuple(message.loads_off_namespaces),
        stores_off=message.stores_off,
        stores_off_namespaces=tuple(message.stores_off_namespaces),
        draining=message.draining,
    )


def encode_namespace_status(namespace: NamespaceStatus) -> pb.NamespaceStatus:
    return pb.NamespaceStatus(
        namespace=namespace.namespace_id,
        label=namespace.label,
        tenant=namespace.tenant,
        epoch=namespace.epoch,
        bumps=namespace.bumps,
        chunk_tokens=namespace.chunk_tokens,
        objects=namespace.objects,
        bytes=namespace.bytes,
        identity=namespace.identity,
    )


def decode_namespace_status(message: pb.NamespaceStatus) -> NamespaceStatus:
    return NamespaceStatus(
        namespace_id=message.namespace,
        label=message.label,
        tenant=message.tenant,
        epoch=message.epoch,
        bumps=message.bumps,
        chunk_tokens=message.chunk_tokens,
        objects=dict(message.objects),
        bytes=message.bytes,
        identity=dict(message.identity),
    )


def _encode_tier(tier: TierStatus) -> pb.TierStatus:
    return pb.TierStatus(
        name=tier.name,
        kind=tier.kind,
        capacity_bytes=tier.capacity_bytes,
        ready_bytes=tier.ready_bytes,
        used_bytes=tier.used_bytes,
        lent_bytes=tier.lent_bytes,
        objects=tier.objects,
        unverified_objects=tier.unverified_objects,
        unsummed_objects=tier.unsummed_objects,
        prefetched_objects=tier.prefetched_objects,
        prefetched_bytes=tier.prefetched_bytes,
        prefetching_requests=tier.prefetching_requests,
        pinned_objects=tier.pinned_objects,
        pinned_bytes=tier.pinned_bytes,
        state=tier.state,
        reason=tier.reason,
        breaker=tier.breaker,
        queued_objects=tier.queued_objects,
        queued_bytes=tier.queued_bytes,
        written_today_bytes=tier.written_today_bytes,
        quarantined_bytes=tier.quarantined_bytes,
        node=tier.node,
        janitor=tier.janitor,
    )


def _decode_tier(message: pb.TierStatus) -> TierStatus:
    return TierStatus(
        name=message.name,
        kind=message.kind,
        capacity_bytes=message.capacity_bytes,
        ready_bytes=message.ready_bytes,
        used_bytes=message.used_bytes,
        lent_bytes=message.lent_bytes,
        objects=message.objects,
        unverified_objects=message.unverified_objects,
        unsummed_objects=message.unsummed_objects,
        prefetched_objects=message.prefetched_objects,
        prefetched_bytes=message.prefetched_bytes,
        prefetching_requests=message.prefetching_requests,
        pinned_objects=message.pinned_objects,
        pinned_bytes=message.pinned_bytes,
        state=message.state,
        reason=message.reason,
        breaker=message.breaker,
        queued_objects=message.queued_objects,
        queued_bytes=message.queued_bytes,
        written_today_bytes=message.written_today_bytes,
        quarantined_bytes=message.quarantined_bytes,
        node=message.node,
        janitor=message.janitor,
    )


def _encode_quota(quota: QuotaStatus) -> pb.QuotaStatus:
    return pb.QuotaStatus(
        tenant=quota.tenant,
        namespace=quota.namespace,
        tier=quota.tier,
        capacity_bytes=quota.capacity_bytes,
        owners_count=quota.owners_count,
        owners=[
            pb.QuotaOwnerStatus(
                tenant=owner.tenant,
                namespace=owner.namespace,
                used_bytes=owner.used_bytes,
                refused_objects=owner.refused_objects,
                evicted_objects=owner.evicted_objects,
            )
            for owner in quota.owners
        ],
        refused_objects=quota.refused_objects,
        evicted_objects=quota.evicted_objects,
    )


def _decode_quota(message: pb.QuotaStatus) -> QuotaStatus:
    return QuotaStatus(
        tenant=message.tenant,
        namespace=message.namespace,
        tier=message.tier,
        capacity_bytes=message.capacity_bytes,
        owners_count=message.owners_count,
        owners=tuple(
            QuotaOwnerStatus(
                tenant=owner.tenant if owner.HasField("tenant") else None,
                namespace=owner.namespace,
                used_bytes=owner.used_bytes,
                refused_objects=owner.refused_objects,
                evicted_objects=owner.evicted_objects,
            )
            for owner in message.owners
        ),
        refused_objects=message.refused_objects,
        evicted_objects=message.evicted_objects,
    )


def _encode_session(session: SessionStatus) -> pb.SessionStatus:
    return pb.SessionStatus(
        engine_id=session.engine_id,
        world_size=session.world_size,
        ranks_attached=session.ranks_attached,
        scheduler_attached=session.scheduler_attached,
        credit_bytes=session.credit_bytes,
        credit_used_bytes=session.credit_used_bytes,
        leases=session.leases,
        lent_objects=session.lent_objects,
        pids=session.pids,
    )


def _decode_session(message: pb.SessionStatus) -> SessionStatus:
    return SessionStatus(
        engine_id=message.engine_id,
        world_size=message.world_size,
        ranks_attached=message.ranks_attached,
        scheduler_attached=message.scheduler_attached,
        credit_bytes=message.credit_bytes,
        credit_used_bytes=message.credit_used_bytes,
        leases=message.leases,
        lent_objects=message.lent_objects,
        pids=tuple(message.pids),
    )
