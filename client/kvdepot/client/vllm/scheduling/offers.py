"""Lookups and offers: from a request's arrival to the answer that vLLM's scheduler gets (design.md#load).

    no lookup --locate--> asked --Locate answered--> answered --offer--> tokens, or a miss with its reason
                            ^                           |
                            +--- renewal: too old, or the daemon lacked a fact ---+

A lookup pins nothing. While it may still be answered, vLLM is told to ask again, for the *budget* of the request: a
part of the time in which the engine would compute what is at stake (docs/adr/0073). Time in which a thread that the
answer waits for was ready and had no processor does not count. Nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.vllm.base.stats import Sources
from kvdepot.client.vllm.scheduling.answering_threads import AnsweringThreads
from kvdepot.client.vllm.scheduling.requests import Lookup, RequestState
from kvdepot.client.vllm.scheduling.transfer_params import ASK_SECONDS, TransferParams
from kvdepot.core.calls import Kind, LocateCall, LocateReply
from kvdepot.core.limits import KEYS_PER_CALL_MAX
from kvdepot.core.misses import UNASKED_REASONS, MissReason, miss_reason

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.base.settings import Settings
    from kvdepot.client.vllm.scheduling.events import KvEvents
    from kvdepot.client.vllm.scheduling.loads import Loads
    from kvdepot.client.vllm.scheduling.namespaces import Namespaces
    from kvdepot.client.vllm.scheduling.prefill_rate import PrefillRate
    from kvdepot.client.vllm.scheduling.speculative import SpeculativeAcquires
    from kvdepot.core.planner import Planner

ANSWER_SECONDS_MAX: Final = 1.0
"""An older answer is asked for again. If its objects are gone meanwhile, the request would lose its only load."""
RENEWALS_MAX: Final = 16
"""Renewals at a time: when many answers are old, the engine goes through its whole queue in one step."""
BUDGET_SHARE: Final = 0.1
"""Part of the time to compute a prompt that a request may lose to a daemon that does not answer."""
STARVED_TIMES: Final = 2.0
"""How many times its budget a request waits at most, where threads are kept from running."""
TIMEOUT_SECONDS_MORE: Final = 1.0
"""Of a lookup: an answer after the budget still serves a request that has to queue."""
_ASK_SHARE: Final = 0.1
"""Of the wait, between two lookups for what another engine is storing."""
COPY_SHARE: Final = 0.25
"""Part of `load_timeout_seconds` for the copies of the ranks. In the rest the daemon has everything in RAM."""

Answer = tuple[int | None, bool]
"""To vLLM: tokens that can be loaded beyond the local ones (None: ask again), and whether the load is asynchronous."""


class Offers:
    """All lookups of one engine, and the offers made of them. Used on the scheduler's thread only."""

    def __init__(
        self,
        session: DepotSession,
        namespaces: Namespaces,
        planner: Planner,
        settings: Settings,
        clock: Callable[[], float],
        counters: Counter[str],
        events: KvEvents,
        prefill_rate: PrefillRate,
        loads: Loads,
        speculative: SpeculativeAcquires,
    ) -> None:
        self._session = session
        self._namespaces = namespaces
        self._planner = planner
        self._settings = settings
        self._clock = clock
        self._threads = AnsweringThreads(session)
        self._counters = counters
        self._events = events
        self._prefill_rate = prefill_rate
        self._loads = loads
        self._speculative = speculative
        self.transfer_params = TransferParams(namespaces, planner, counters)
        self._renewals = 0  # in progress
        self._sources = Sources()

    # --- lookup

    def locate(self, state: RequestState, local_tokens: int | None = None, *, renewal: bool = False) -> Lookup | None:
        """Ask the daemon for the request's best boundary.

        Args:
            state: the request.
            local_tokens: what the engine has itself; None before it has looked.
            renewal: whether an earlier answer is asked for again.

        Returns:
            The lookup, or None if there is no daemon to ask.
        """
        namespace = self._namespaces.registered_id
        if namespace is None:
            return None
        settings, chunk_tokens = self._settings, self._planner.chunk_tokens
        whole = high = self._planner.high_boundary(state.request.num_tokens)
        if state.load_tokens_max is not None:
            high = min(whole, ((local_tokens or 0) + state.load_tokens_max) // chunk_tokens * chunk_tokens)
        chunks = min(high // chunk_tokens, len(state.keys), KEYS_PER_CALL_MAX)
        budget_seconds = self._budget_seconds(high - (local_tokens or 0))
        lookup = Lookup(
            self._clock(), self._namespaces.epoch_number, self._loads.step, budget_seconds,
            self._threads.starved_seconds(), renewal, local_tokens, local_matters=high < whole,
        )  # fmt: skip
        state.lookup = lookup
        self._speculative.cancel(state.request_id)  # it was for the previous answer
        if chunks * chunk_tokens < settings.min_load_tokens:
            lookup.answered = True
            lookup.miss = MissReason.NOT_WORTH_IT
            return lookup
        call = LocateCall(
            b"", namespace, state.packed_keys(chunks), high, state.depot_id,
            budget_seconds=settings.load_timeout_seconds * (1 - COPY_SHARE),
            wait_seconds=budget_seconds,
            local_tokens=local_tokens or 0,
            token_seconds=self._prefill_rate.token_seconds * settings.load_weight,
            source_id=self.transfer_params.source_id(state.request, namespace),
        )  # fmt: skip
        state.located = True
        self._counters["lookups"] += 1
        self._renewals += renewal
        timeout = budget_seconds + TIMEOUT_SECONDS_MORE
        then = None
        room = self._loads.active + len(self._speculative) < settings.loads_in_flight
        if settings.speculative_acquire and room and not renewal and self._namespaces.ranks_ready:
            then = self._speculative.then(state, lookup, namespace, chunks)
        self._session.submit(call, timeout, partial(self._located, state, lookup), then)
        return lookup

    def _budget_seconds(self, tokens: int) -> float:
        """Return how long a request waits for an answer that may save it the computation of so many tokens."""
        share = BUDGET_SHARE * self._prefill_rate.likely_seconds(max(tokens, 0))
        return min(max(share, self._settings.lookup_min_seconds), self._settings.lookup_timeout_seconds)

    def _located(self, state: RequestState, lookup: Lookup, reply: Any) -> None:
        lookup.answered = True
        self._speculative.answered(state, lookup, self._loads.step)
        self._renewals -= lookup.renewal
        if isinstance(reply, CallFailure):
            self._counters[f"lookup_failed_{reply.reason.value}"] += 1
            late = reply.reason is FailureReason.DEADLINE
            lookup.miss = MissReason.TIMED_OUT if late else MissReason.UNREACHABLE
            return
        assert isinstance(reply, LocateReply)
        if lookup.epoch != self._namespaces.epoch_number:
            self._counters["stale.epoch"] += 1
            return
        lookup.boundary_tokens = reply.boundary_tokens
        lookup.source = self._sources.label(reply.tier) if reply.tier else ""
        lookup.miss = miss_reason(reply.miss) if reply.miss else None
        lookup.source_tier = reply.source_tier
        # The daemon compares loading with computing for the tokens that the engine lacks. If the engine has some of
        # them itself, the answer may change.
        lookup.local_matters |= lookup.miss is MissReason.NOT_WORTH_IT
        lookup.local_matters |= bool(self._prefill_rate.token_seconds and reply.estimate_seconds)
        if Kind.ATTENTION in self._planner.kinds:
            attention_chunks = reply.attention_tokens // self._planner.chunk_tokens
            state.assumed_chunks = max(state.assumed_chunks, attention_chunks)
            self._events.located(state, attention_chunks, lookup.miss)

    # --- offer

    def offer(self, state: RequestState, local_tokens: int) -> Answer:
        """Answer vLLM's question what can be loaded beyond `local_tokens`. May be called any number of times."""
        request = state.request
        state.miss = None
        if state.load_failed or self._loads.loading(state.request_id):
            return 0, False
        if request.skip_reading_prefix_cache:
            return self._nothing(state, MissReason.READS_NO_CACHE)
        high = self._planner.high_boundary(request.num_tokens)
        if high < self._settings.min_load_tokens:
            return self._nothing(state, MissReason.TOO_SHORT)
        if request.num_preemptions != state.preemptions:
            # What it needs and what is stored have both changed since the last lookup.
            state.preemptions = request.num_preemptions
            state.lookup = None
            state.held_since = None
            state.renewed_for_age = False
        lookup = state.lookup or self.locate(state, local_tokens)
        self._speculative.looked(state, local_tokens)
        now = self._clock()
        if lookup is None or not lookup.answered:
            answer = self._wait(state, lookup, now, at_stake=high > local_tokens)
        else:
            answer = self._offer(state, lookup, local_tokens, now)
        if high <= local_tokens:
            state.miss = None  # the engine has all of it
        return answer

    def missed(self, state: RequestState) -> None:
        """Count the miss of a request that the engine now computes: it has allocated blocks for no load."""
        self._speculative.cancel(state.request_id)
        if state.miss is None:
            return
        self._counters[f"misses.{state.miss}"] += 1
        state.missed = state.miss
        state.located |= state.miss in UNASKED_REASONS and self._namespaces.registered_id is not None
        if state.miss is MissReason.TIMED_OUT:
            self._counters["timeouts.lookup"] += 1
        elif state.miss is MissReason.UNREACHABLE:
            self._session.count_computed()
        state.miss = None

    def _wait(self, state: RequestState, lookup: Lookup | None, now: float, *, at_stake: bool = True) -> Answer:
        """Wait for an answer, for the daemon, or for the ranks' reports, but not for long."""
        if lookup is None:
            there = self._namespaces.coming
            if there and now - state.arrived_at < self._settings.lookup_min_seconds:  # it may take minutes
                return None, False
            return self._nothing(state, MissReason.NOT_READY if there else MissReason.UNREACHABLE)
        wait_seconds = lookup.wait_seconds if at_stake else min(lookup.wait_seconds, self._settings.lookup_min_seconds)
        waited_seconds = now - lookup.asked_at
        if waited_seconds < wait_seconds:
            return None, False
        if waited_seconds < wait_seconds * STARVED_TIMES:
            starved_seconds = self._threads.starved_seconds() - lookup.starved_seconds
            if waited_seconds - starved_seconds < wait_seconds or self._threads.is_ready():
                return None, False
        self._counters["lookup_timeouts"] += not lookup.answered
        state.waited_seconds = waited_seconds
        return self._nothing(state, MissReason.NOT_READY if lookup.answered else MissReason.TIMED_OUT)

    def _offer(self, state: RequestState, lookup: Lookup, local_tokens: int, now: float) -> Answer:
        """Offer what an answered lookup found, if a load may begin now."""
        if lookup.local_matters and lookup.local_tokens is None and local_tokens and self._renewals < RENEWALS_MAX:
            return self._renew(state, local_tokens)
        boundary = min(lookup.boundary_tokens, self._planner.high_boundary(state.request.num_tokens))
        if self.transfer_params.awaited(state, lookup, boundary, local_tokens, now):
            pause_seconds = max(ASK_SECONDS, lookup.wait_seconds * _ASK_SHARE)
            if now - lookup.asked_at >= pause_seconds and self._renewals < RENEWALS_MAX:
                return self._renew(state, local_tokens)
            return None, False
        tokens = boundary - local_tokens
        if state.load_tokens_max is not None and tokens > state.load_tokens_max:
            return self._nothing(state, MissReason.NOT_WORTH_IT)  # the engine itself has less than it had
        if tokens < self._settings.min_load_tokens:
            return self._nothing(state, MissReason.NOT_WORTH_IT if tokens > 0 else lookup.miss)
        if not self._namespaces.ranks_ready:
            if not self._namespaces.ranks_reported:
                return self._wait(state, lookup, now)
            return self._nothing(state, MissReason.NOT_READY)
        if self._loads.failed_lately(state.keys[boundary // self._planner.chunk_tokens - 1]):
            self._counters["offers_withheld_negative"] += 1
            return self._nothing(state, MissReason.FAILED_LATELY)
        if self._loads.active + self._speculative.others(state.request_id) >= self._settings.loads_in_flight:
            self._speculative.reset()  # a speculative lease delays a load by one step at most
            return self._held_back(state, now, lookup.wait_seconds), False
        if self._old(state, lookup, now) and self._renewals < RENEWALS_MAX:
            state.renewed_for_age = True
            return self._renew(state, local_tokens)
        state.offered = (local_tokens, boundary)
        return tokens, True

    def _renew(self, state: RequestState, local_tokens: int) -> Answer:
        """Ask the daemon again. Without a daemon there is nothing to load."""
        return (None if self.locate(state, local_tokens, renewal=True) else 0), False

    def _nothing(self, state: RequestState, miss: MissReason | None) -> Answer:
        """Offer nothing, and keep the reason. `missed` counts it: until then vLLM may ask again."""
        state.miss = miss
        return 0, False

    def _old(self, state: RequestState, lookup: Lookup, now: float) -> bool:
        """Return whether to renew an answer for its age: once, and never in the step after the lookup.

        A renewal lets others pass. Where answers or free seats come slowly, each one would be too old again. What a
        stale answer offers and the daemon lacks is computed.
        """
        age_seconds = now - lookup.asked_at
        is_fresh = age_seconds <= ANSWER_SECONDS_MAX or lookup.step >= self._loads.step - 1
        return not is_fresh and not state.renewed_for_age

    def _held_back(self, state: RequestState, now: float, wait_seconds: float) -> int | None:
        """Hold an offer back while too many loads are in flight, then offer nothing (P7).

        An Acquire that the daemon refuses would cost more.
        """
        if state.held_since is None:
            state.held_since = now
            self._counters["loads_held_back"] += 1
        if now - state.held_since < wait_seconds:
            return None
        self._counters["loads_given_up"] += 1
        state.miss = MissReason.TOO_MANY_LOADS
        return 0
