"""The engines' calls, however they come: adapt, never decide."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvdepot.core import limits
from kvdepot.core.calls import AbandonCall, Capabilities, CommitCall, CommitReply, ReleaseCall
from kvdepot.core.errors import KvDepotError, ProtocolMismatch, StaleEpoch
from kvdepot.proto import codec, codec_namespace
from kvdepot.proto.status import to_status
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.server.engine.counters import Counters
from kvdepot.server.engine.engine import Engine
from kvdepot.server.guard import Guard, engine_guard
from kvdepot.server.rpc.answer import domain_error
from kvdepot.server.rpc.turns import children_first, in_turns, pieces

Done = Callable[[Any], None]
"""Gets a call's response, or the KvDepotError that refuses it."""


class _Call:
    """One that is not answered yet."""

    def __init__(self, method: str, counters: Counters, log: logging.Logger, guard: Guard, done: Done) -> None:
        self._method = method
        self._guard = guard
        self._log = log
        self._counters = counters
        self._done: Done | None = done
        self._began = time.monotonic()

    def end_with(self, encode: Callable[[Any], Any], reply: object) -> None:
        """From within the engine: what goes wrong here is this call's alone."""
        try:
            answer = encode(reply)
        except Exception as error:  # noqa: BLE001 - whatever it is
            answer = domain_error(error, self._log)
        self.end(answer)

    def end(self, answer: Any) -> None:
        done, self._done = self._done, None
        if done is None:  # it went wrong behind its answer
            return
        self._guard.call("answer", self._count, answer)
        self._guard.call("answer", done, answer)

    def _count(self, answer: Any) -> None:
        if isinstance(answer, KvDepotError):
            _count_failed(self._counters, answer)
        self._counters.observe(f"call_seconds.{self._method}", time.monotonic() - self._began)


def _count_failed(counters: Counters, error: KvDepotError) -> None:
    counters.add(f"failed_calls.{to_status(error)[0].name}")


class DepotCalls:
    """Service Depot: decode, ask, encode; counted and timed by method and by the status of a refusal.

    `committed` is called after every commit: there is something to sum.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        capabilities: Callable[[], Capabilities],
        committed: Callable[[], None],
        counters: Counters,
        log: logging.Logger,
    ) -> None:
        self._engine = engine
        self._capabilities = capabilities
        self._committed = committed
        self._counters = counters
        self._guard = engine_guard(counters.add)
        self._log = log
        self._placing = False  # `_place_some` is about to be called
        self._at_once: dict[str, Callable[[Any], Any]] = {
            "GetCapabilities": self._get_capabilities,
            "RegisterNamespace": self._register_namespace,
            "Reserve": self._reserve,
            "EndRequest": self._end_request,
        }
        self._later: dict[str, Callable[[Any, _Call], None]] = {
            "Locate": self._locate,
            "Acquire": self._acquire,
            "Declare": self._declare,
            "Release": self._release,
            "Commit": self._commit,
            "Abandon": self._abandon,
        }

    def start(self, method: str, request: Any, done: Done) -> None:
        """Make a call. `done` is called once: before this returns, or when what the call waits for is there.

        It may be called from within the engine, and must not raise.
        """
        call = _Call(method, self._counters, self._log, self._guard, done)
        try:
            if method in self._later:
                self._later[method](request, call)
            else:
                call.end(self._at_once[method](request))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this call's
            call.end(domain_error(error, self._log))

    def refuse(self, error: KvDepotError, done: Done) -> None:
        """A call that is not made."""
        _count_failed(self._counters, error)
        done(error)

    def abandoned(self) -> None:
        """Its caller has gone, or has waited for long enough."""
        self._counters.add("failed_calls.CANCELLED")

    def _get_capabilities(self, request: pb.GetCapabilitiesRequest) -> pb.GetCapabilitiesResponse:
        ours = (limits.PROTOCOL_MIN, limits.PROTOCOL_MAX)
        theirs = (request.protocol_min, request.protocol_max)
        if max(ours[0], theirs[0]) > min(ours[1], theirs[1]):
            raise ProtocolMismatch(ours, theirs)
        return codec.encode_capabilities(self._capabilities())

    def _register_namespace(self, request: pb.RegisterNamespaceRequest) -> pb.RegisterNamespaceResponse:
        call = codec_namespace.decode_register(request)
        try:
            return codec_namespace.encode_registered(*self._engine.register_namespace(*call))
        except StaleEpoch as stale:
            if request.follows_bumps:
                return codec_namespace.encode_stale_epoch(stale.bumps)
            raise

    def _declare(self, request: pb.DeclareRequest, call: _Call) -> None:
        decoded = codec.decode_declare_call(request)
        steps = self._engine.drop_undeclared(decoded)
        self._in_turns(call, steps, lambda: codec.encode_declare_reply(self._engine.declared(decoded)))

    def _locate(self, request: pb.LocateRequest, call: _Call) -> None:
        """What shared tiers are asked for is waited for, beside other calls. Who gave up waiting asks again."""
        answered = partial(call.end_with, codec.encode_locate_reply)
        seconds = self._engine.locate(codec.decode_locate_call(request), answered)
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._engine.answer_locates)

    def _acquire(self, request: pb.AcquireRequest, call: _Call) -> None:
        """What has to be read first is waited for, beside other calls. Who gave up waiting asks again, or releases."""
        self._engine.acquire(codec.decode_acquire_call(request), partial(call.end_with, codec.encode_acquire_reply))
        if not self._placing:
            self._placing = True
            asyncio.get_running_loop().call_soon(self._place_some)

    def _place_some(self) -> None:
        """Turn by turn."""
        self._placing = self._engine.place_some()
        if self._placing:
            asyncio.get_running_loop().call_soon(self._place_some)

    def _release(self, request: pb.ReleaseRequest, call: _Call) -> None:
        decoded = codec.decode_release_call(request)
        unused = frozenset(decoded.unused)

        def steps() -> Iterator[None]:
            for lease in decoded.lease_ids:
                self._engine.release(ReleaseCall(decoded.session, (lease,), (lease,) if lease in unused else ()))
                yield

        self._in_turns(call, steps(), pb.ReleaseResponse)

    def _reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        return codec.encode_reserve_reply(self._engine.reserve(codec.decode_reserve_call(request)))

    def _commit(self, request: pb.CommitRequest, call: _Call) -> None:
        decoded = codec.decode_commit_call(request)
        outcomes = [b"" for _ in decoded.items]

        def steps() -> Iterator[None]:
            for group in pieces(decoded.items):
                reply = self._engine.commit(CommitCall(decoded.session, tuple(piece for _, piece in group)))
                for (number, _), said in zip(group, reply.outcomes, strict=True):
                    outcomes[number] += said
                self._committed()
                yield

        self._in_turns(call, steps(), lambda: codec.encode_commit_reply(CommitReply(tuple(outcomes))))

    def _abandon(self, request: pb.AbandonRequest, call: _Call) -> None:
        decoded = codec.decode_abandon_call(request)

        def steps() -> Iterator[None]:
            for group in pieces(map(children_first, decoded.items)):
                self._engine.abandon(AbandonCall(decoded.session, tuple(piece for _, piece in group)))
                yield

        self._in_turns(call, steps(), pb.AbandonResponse)

    def _in_turns(self, call: _Call, steps: Iterator[None], answer: Callable[[], Any]) -> None:
        """Take the steps of the call, then answer it. Who gave up waiting asks again."""

        def end(error: Exception | None) -> None:
            call.end_with(lambda _: answer(), None) if error is None else call.end(domain_error(error, self._log))

        in_turns(steps, end)

    def _end_request(self, request: pb.EndRequestRequest) -> pb.EndRequestResponse:
        self._engine.end_request(codec.decode_end_request_call(request))
        return pb.EndRequestResponse()
