"""Operators' changes: this module adapts calls, and decides nothing."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from kvdepot.core.control import (
    BumpCall,
    BumpReply,
    ChangeReply,
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
    SwitchCall,
    SwitchReply,
    UnpinCall,
    VerifyCall,
    VerifyReply,
)
from kvdepot.proto.methods import CONTROL
from kvdepot.server.rpc.operator_calls import OperatorCalls
from kvdepot.server.rpc.service import Service, operators_service


class Control(Protocol):
    """What the daemon does for operators (`kvdepot.server.daemon.control`)."""

    async def switch(self, call: SwitchCall) -> SwitchReply: ...
    async def drain(self, *, draining: bool) -> int: ...
    async def bump(self, call: BumpCall) -> BumpReply: ...
    async def pin(self, call: PinCall) -> PinReply: ...
    async def unpin(self, namespace_id: bytes, key: bytes) -> str: ...
    def quotas(self, subject: QuotaSubject | None = None) -> tuple[QuotaEntry, ...]: ...
    async def set_quota(self, entry: QuotaEntry) -> str: ...
    async def delete_quota(self, subject: QuotaSubject) -> str: ...
    async def evict(self, namespace_id: bytes, key: bytes) -> EvictReply: ...
    def verify(self, call: VerifyCall) -> AsyncGenerator[VerifyReply, None]: ...
    def prefetch(self, namespace_id: bytes, key: bytes) -> AsyncGenerator[PrefetchReply, None]: ...
    def configuration(self) -> ConfigReply: ...
    async def compare(self) -> ReloadReply: ...
    async def reload(self) -> ReloadReply: ...


def control_service(control: Control, calls: OperatorCalls, log: logging.Logger) -> Service:
    """Return the handlers of service Control."""

    async def unpin(call: UnpinCall) -> ChangeReply:
        return ChangeReply(await control.unpin(call.namespace_id, call.key))

    async def set_quota(call: SetQuotaCall) -> ChangeReply:
        return ChangeReply(await control.set_quota(QuotaEntry(call.subject, call.capacity_bytes, by_operator=True)))

    async def delete_quota(call: DeleteQuotaCall) -> ChangeReply:
        return ChangeReply(await control.delete_quota(call.subject))

    async def list_quotas(call: ListQuotasCall) -> QuotasReply:
        return QuotasReply(control.quotas(call.subject))

    async def reload(call: ReloadCall) -> ReloadReply:
        return await (control.compare() if call.dry_run else control.reload())

    async def configuration(_: GetConfigCall) -> ConfigReply:
        return control.configuration()

    async def drain(call: DrainCall) -> DrainReply:
        return DrainReply(await control.drain(draining=call.draining))

    async def evict(call: EvictCall) -> EvictReply:
        return await control.evict(call.namespace_id, call.key)

    def prefetch(call: PrefetchCall) -> AsyncGenerator[PrefetchReply, None]:
        return control.prefetch(call.namespace_id, call.key)

    handlers: dict[str, Callable[..., Any]] = {
        "SetSwitch": control.switch,
        "SetDraining": drain,
        "Evict": evict,
        "BumpEpoch": control.bump,
        "Verify": control.verify,
        "Prefetch": prefetch,
        "Pin": control.pin,
        "Unpin": unpin,
        "SetQuota": set_quota,
        "DeleteQuota": delete_quota,
        "ListQuotas": list_quotas,
        "Reload": reload,
        "GetConfig": configuration,
    }
    return operators_service(CONTROL, handlers, calls, log)
