"""What operators change: adapt, never decide."""

from __future__ import annotations

import logging

from kvdepot.core.control import PrefetchReply, VerifyReply
from kvdepot.proto import codec_control
from kvdepot.proto.v1 import control_pb2 as pb
from kvdepot.proto.v1 import control_pb2_grpc as pb_grpc
from kvdepot.server.control import Control
from kvdepot.server.rpc.answer import Context, answer, answer_when_done


class ControlService(pb_grpc.ControlServicer):
    def __init__(self, control: Control, log: logging.Logger) -> None:
        self._control = control
        self._log = log

    async def SetSwitch(self, request: pb.SetSwitchRequest, context: Context) -> pb.SetSwitchResponse:  # noqa: N802
        async def run() -> pb.SetSwitchResponse:
            reply = await self._control.switch(codec_control.decode_switch_call(request))
            return codec_control.encode_switch_reply(reply)

        return await answer_when_done(context, self._log, run)

    async def BumpEpoch(self, request: pb.BumpEpochRequest, context: Context) -> pb.BumpEpochResponse:  # noqa: N802
        async def run() -> pb.BumpEpochResponse:
            return codec_control.encode_bump_reply(await self._control.bump(codec_control.decode_bump_call(request)))

        return await answer_when_done(context, self._log, run)

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:  # noqa: N802
        async def run() -> pb.PinResponse:
            return codec_control.encode_pin_reply(await self._control.pin(codec_control.decode_pin_call(request)))

        return await answer_when_done(context, self._log, run)

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:  # noqa: N802
        async def run() -> pb.UnpinResponse:
            return pb.UnpinResponse(not_kept=await self._control.unpin(*codec_control.decode_place(request)))

        return await answer_when_done(context, self._log, run)

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:  # noqa: N802
        async def run() -> pb.SetQuotaResponse:
            return pb.SetQuotaResponse(not_kept=await self._control.set_quota(codec_control.decode_set_quota(request)))

        return await answer_when_done(context, self._log, run)

    async def DeleteQuota(  # noqa: N802
        self, request: pb.DeleteQuotaRequest, context: Context
    ) -> pb.DeleteQuotaResponse:
        async def run() -> pb.DeleteQuotaResponse:
            subject = codec_control.decode_quota_subject(request.subject)
            return pb.DeleteQuotaResponse(not_kept=await self._control.delete_quota(subject))

        return await answer_when_done(context, self._log, run)

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Context) -> pb.ListQuotasResponse:  # noqa: N802
        def run() -> pb.ListQuotasResponse:
            subject = codec_control.decode_quota_subject(request.subject) if request.HasField("subject") else None
            return codec_control.encode_quotas(self._control.quotas(subject))

        return await answer(context, self._log, run)

    async def Reload(self, request: pb.ReloadRequest, context: Context) -> pb.ReloadResponse:  # noqa: N802
        async def run() -> pb.ReloadResponse:
            reply = await (self._control.compare() if request.dry_run else self._control.reload())
            return codec_control.encode_reload_reply(reply)

        return await answer_when_done(context, self._log, run)

    async def GetConfig(self, request: pb.GetConfigRequest, context: Context) -> pb.GetConfigResponse:  # noqa: N802, ARG002
        return await answer(
            context, self._log, lambda: codec_control.encode_config_reply(self._control.configuration())
        )

    async def SetDraining(  # noqa: N802
        self, request: pb.SetDrainingRequest, context: Context
    ) -> pb.SetDrainingResponse:
        async def run() -> pb.SetDrainingResponse:
            return pb.SetDrainingResponse(leases=await self._control.drain(draining=request.draining))

        return await answer_when_done(context, self._log, run)

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:  # noqa: N802
        async def run() -> pb.EvictResponse:
            return codec_control.encode_evict_reply(await self._control.evict(*codec_control.decode_place(request)))

        return await answer_when_done(context, self._log, run)

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> None:  # noqa: N802
        async def tell(reply: VerifyReply) -> None:
            await context.write(codec_control.encode_verify_reply(reply))

        async def run() -> None:
            await self._control.verify(codec_control.decode_verify_call(request), tell)

        await answer_when_done(context, self._log, run)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> None:  # noqa: N802
        async def tell(reply: PrefetchReply) -> None:
            await context.write(codec_control.encode_prefetch_reply(reply))

        async def run() -> None:
            await self._control.prefetch(*codec_control.decode_place(request), tell)

        await answer_when_done(context, self._log, run)
