"""Engines' calls of both lanes: this module adapts calls, and decides nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from kvdepot.core import limits
from kvdepot.core.calls import (
    AbandonCall,
    AcquireCall,
    Capabilities,
    CommitCall,
    CommitReply,
    Confirmed,
    DeclareCall,
    EndRequestCall,
    FindTiersCall,
    FindTiersReply,
    GetCapabilitiesCall,
    LocateCall,
    ReleaseCall,
    ReserveCall,
    ReserveReply,
)
from kvdepot.core.errors import KvDepotError, ProtocolMismatch, StaleEpoch
from kvdepot.core.registration import TIERS_MAX, RegisterCall, RegisterReply
from kvdepot.proto.methods import Method
from kvdepot.proto.status import to_status
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.depot import Depot
from kvdepot.server.platform.guard import Guard, engine_guard
from kvdepot.server.rpc.answer import domain_error
from kvdepot.server.rpc.turns import children_first, in_turns, pieces

Done = Callable[[bytes | KvDepotError], None]
"""Gets the message of a call's reply, or the error that refuses the call."""


class _Call:
    """One that is not answered yet."""

    def __init__(
        self, method: Method[Any, Any], counters: Counters, log: logging.Logger, guard: Guard, done: Done
    ) -> None:
        self._method = method
        self._guard = guard
        self._log = log
        self._counters = counters
        self._done: Done | None = done
        self._began = time.monotonic()

    def reply(self, value: object) -> None:
        """Send the reply from within the depot. An error here ends only this call."""
        try:
            answer = self._method.reply.encode(value).SerializeToString()
        except Exception as error:  # noqa: BLE001 - whatever it is
            answer = domain_error(error, self._log)
        self._end(answer)

    def refuse(self, error: Exception) -> None:
        self._end(domain_error(error, self._log))

    def _end(self, answer: bytes | KvDepotError) -> None:
        done, self._done = self._done, None
        if done is None:  # it went wrong after its answer
            return
        self._guard.call("answer", self._count, answer)
        self._guard.call("answer", done, answer)

    def _count(self, answer: bytes | KvDepotError) -> None:
        if isinstance(answer, KvDepotError):
            _count_failed(self._counters, answer)
        self._counters.observe(f"call_seconds.{self._method.name}", time.monotonic() - self._began)


def _count_failed(counters: Counters, error: KvDepotError) -> None:
    counters.add(f"failed_calls.{to_status(error)[0].name}")


class DepotCalls:
    """Service Depot: decode, ask, encode; counted and timed by method and by the status of a refusal.

    `committed` is called after every commit: there is something to sum.
    """

    def __init__(
        self,
        depot: Depot,
        *,
        capabilities: Callable[[], Capabilities],
        committed: Callable[[], None],
        counters: Counters,
        log: logging.Logger,
    ) -> None:
        self._depot = depot
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
            "FindTiers": self._find_tiers,
        }
        self._later: dict[str, Callable[[Any, _Call], None]] = {
            "Locate": self._locate,
            "Acquire": self._acquire,
            "Declare": self._declare,
            "Release": self._release,
            "Commit": self._commit,
            "Abandon": self._abandon,
        }

    def start(self, method: Method[Any, Any], message: bytes, done: Done) -> None:
        """Make a call. `done` is called once: before this returns, or when what the call waits for is there.

        It may be called from within the engine, and must not raise.
        """
        call = _Call(method, self._counters, self._log, self._guard, done)
        try:
            value = method.call.parse(message)
            if method.name in self._later:
                self._later[method.name](value, call)
            else:
                call.reply(self._at_once[method.name](value))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this call's
            call.refuse(error)

    def refuse(self, error: KvDepotError, done: Done) -> None:
        """Return an answer that refuses a call."""
        _count_failed(self._counters, error)
        done(error)

    def abandoned(self) -> None:
        """Return whether the caller is gone, or its waiting time is over."""
        self._counters.add("failed_calls.CANCELLED")

    def _get_capabilities(self, call: GetCapabilitiesCall) -> Capabilities:
        ours = (limits.PROTOCOL_MIN, limits.PROTOCOL_MAX)
        theirs = (call.protocol_min, call.protocol_max)
        if max(ours[0], theirs[0]) > min(ours[1], theirs[1]):
            raise ProtocolMismatch(ours, theirs)
        return self._capabilities()

    def _register_namespace(self, call: RegisterCall) -> RegisterReply:
        try:
            found = self._depot.register_namespace(call.session, call.spec, call.elements_by_kind())
            return RegisterReply(*found, tier_bytes=dict(islice(self._depot.tier_bytes().items(), TIERS_MAX)))
        except StaleEpoch as stale:
            if call.follows_bumps:
                return RegisterReply(b"", bumps=stale.bumps)
            raise

    def _declare(self, value: DeclareCall, call: _Call) -> None:
        self._in_turns(call, self._depot.drop_undeclared(value), lambda: self._depot.declared(value))

    def _locate(self, value: LocateCall, call: _Call) -> None:
        """Answer a Locate. Probes of shared tiers run next to other calls. A caller that stopped waiting asks again."""
        seconds = self._depot.locate(value, call.reply)
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._depot.answer_locates)

    def _acquire(self, value: AcquireCall, call: _Call) -> None:
        """Answer an Acquire.

        Reads from lower tiers run next to other calls. A caller that gave up asks again, or releases.
        """
        self._depot.acquire(value, call.reply)
        if not self._placing:
            self._placing = True
            asyncio.get_running_loop().call_soon(self._place_some)

    def _place_some(self) -> None:
        """Turn by turn."""
        self._placing = self._depot.place_some()
        if self._placing:
            asyncio.get_running_loop().call_soon(self._place_some)

    def _release(self, value: ReleaseCall, call: _Call) -> None:
        unused, doubted = frozenset(value.unused), frozenset(value.doubted)

        def steps() -> Iterator[None]:
            for lease in value.lease_ids:
                one = (lease,)
                self._depot.release(
                    ReleaseCall(value.session, one, one if lease in unused else (), one if lease in doubted else ())
                )
                yield

        self._in_turns(call, steps(), Confirmed)

    def _reserve(self, call: ReserveCall) -> ReserveReply:
        return self._depot.reserve(call)

    def _commit(self, value: CommitCall, call: _Call) -> None:
        outcomes = [b"" for _ in value.items]

        def steps() -> Iterator[None]:
            for group in pieces(value.items):
                reply = self._depot.commit(CommitCall(value.session, tuple(piece for _, piece in group)))
                for (number, _), said in zip(group, reply.outcomes, strict=True):
                    outcomes[number] += said
                self._committed()
                yield

        self._in_turns(call, steps(), lambda: CommitReply(tuple(outcomes)))

    def _abandon(self, value: AbandonCall, call: _Call) -> None:
        def steps() -> Iterator[None]:
            for group in pieces(map(children_first, value.items)):
                self._depot.abandon(AbandonCall(value.session, tuple(piece for _, piece in group)))
                yield

        self._in_turns(call, steps(), Confirmed)

    def _in_turns(self, call: _Call, steps: Iterator[None], answer: Callable[[], Any]) -> None:
        """Take the steps of the call, then answer it. Who gave up waiting asks again."""

        def end(error: Exception | None) -> None:
            if error is not None:
                call.refuse(error)
                return
            try:
                value = answer()
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is this call's
                call.refuse(failure)
            else:
                call.reply(value)

        in_turns(steps, end)

    def _end_request(self, call: EndRequestCall) -> Confirmed:
        self._depot.end_request(call)
        return Confirmed()

    def _find_tiers(self, call: FindTiersCall) -> FindTiersReply:
        return self._depot.find_tiers(call)
