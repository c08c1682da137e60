"""The engines' calls: adapt, never decide."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvdepot.core import limits
from kvdepot.core.calls import AcquireReply, Capabilities, LocateReply
from kvdepot.core.errors import ProtocolMismatch, StaleEpoch
from kvdepot.proto import codec, codec_namespace
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.proto.v1 import depot_pb2_grpc as pb_grpc
from kvdepot.server.engine.engine import Engine
from kvdepot.server.rpc.answer import Context, Settled, answer


class DepotService(pb_grpc.DepotServicer):
    """`committed` is called after every commit: there is something to sum."""

    def __init__(
        self,
        engine: Engine,
        *,
        capabilities: Callable[[], Capabilities],
        committed: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self._engine = engine
        self._capabilities = capabilities
        self._committed = committed
        self._log = log

    async def GetCapabilities(  # noqa: N802
        self, request: pb.GetCapabilitiesRequest, context: Context
    ) -> pb.GetCapabilitiesResponse:
        def run() -> pb.GetCapabilitiesResponse:
            ours = (limits.PROTOCOL_MIN, limits.PROTOCOL_MAX)
            theirs = (request.protocol_min, request.protocol_max)
            if max(ours[0], theirs[0]) > min(ours[1], theirs[1]):
                raise ProtocolMismatch(ours, theirs)
            return codec.encode_capabilities(self._capabilities())

        return await answer(context, self._log, run)

    async def RegisterNamespace(  # noqa: N802
        self, request: pb.RegisterNamespaceRequest, context: Context
    ) -> pb.RegisterNamespaceResponse:
        def run() -> pb.RegisterNamespaceResponse:
            call = codec_namespace.decode_register(request)
            try:
                return codec_namespace.encode_registered(*self._engine.register_namespace(*call))
            except StaleEpoch as stale:
                if request.follows_bumps:
                    return codec_namespace.encode_stale_epoch(stale.bumps)
                raise

        return await answer(context, self._log, run)

    async def Declare(self, request: pb.DeclareRequest, context: Context) -> pb.DeclareResponse:  # noqa: N802
        def run() -> pb.DeclareResponse:
            return codec.encode_declare_reply(self._engine.declare(codec.decode_declare_call(request)))

        return await answer(context, self._log, run)

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:  # noqa: N802
        """What shared tiers are asked for is waited for, beside other calls. Who gave up waiting asks again."""
        located: Settled[LocateReply] = Settled()
        seconds = await answer(
            context, self._log, lambda: self._engine.locate(codec.decode_locate_call(request), located.settle)
        )
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._engine.answer_locates)
        return codec.encode_locate_reply(await located.reply)

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:  # noqa: N802
        """What has to be read first is waited for, beside other calls. Who gave up waiting asks again, or releases."""
        acquired: Settled[AcquireReply] = Settled()
        await answer(
            context, self._log, lambda: self._engine.acquire(codec.decode_acquire_call(request), acquired.settle)
        )
        return codec.encode_acquire_reply(await acquired.reply)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:  # noqa: N802
        def run() -> pb.ReleaseResponse:
            self._engine.release(codec.decode_release_call(request))
            return pb.ReleaseResponse()

        return await answer(context, self._log, run)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:  # noqa: N802
        def run() -> pb.ReserveResponse:
            return codec.encode_reserve_reply(self._engine.reserve(codec.decode_reserve_call(request)))

        return await answer(context, self._log, run)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:  # noqa: N802
        def run() -> pb.CommitResponse:
            reply = self._engine.commit(codec.decode_commit_call(request))
            self._committed()
            return codec.encode_commit_reply(reply)

        return await answer(context, self._log, run)

    async def Abandon(self, request: pb.AbandonRequest, context: Context) -> pb.AbandonResponse:  # noqa: N802
        def run() -> pb.AbandonResponse:
            self._engine.abandon(codec.decode_abandon_call(request))
            return pb.AbandonResponse()

        return await answer(context, self._log, run)

    async def EndRequest(self, request: pb.EndRequestRequest, context: Context) -> pb.EndRequestResponse:  # noqa: N802
        def run() -> pb.EndRequestResponse:
            self._engine.end_request(codec.decode_end_request_call(request))
            return pb.EndRequestResponse()

        return await answer(context, self._log, run)
