"""Records of the latest requests, for `kvdepotctl explain`. They are bounded, and never hold up a request."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from kvdepot.core.calls import AcquireCall, AcquireOutcome, AcquireReply, RequestEnd, ReserveOutcome
from kvdepot.core.errors import NotFound
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.misses import UNASKED_REASONS
from kvdepot.core.records import (
    DIFFERENCES_MAX,
    LIST_MAX,
    LOADS_PER_RECORD_MAX,
    RECORDS_MAX,
    RECORDS_PER_ANSWER_MAX,
    UNUSED,
    LoadRecord,
    Lookup,
    Outcome,
    RequestRecord,
    outcome_of,
)
from kvdepot.core.request_ids import ADVICE, meant
from kvdepot.server.depot.loads.acquires import Answer
from kvdepot.server.depot.loads.traces import Traces
from kvdepot.server.depot.sessions.session import ReadLease
from kvdepot.server.depot.tree.namespaces import Namespace, Namespaces

_GRANTED: Final = AcquireOutcome.GRANTED.name.lower()


@dataclass(slots=True)
class _Load:
    lease_id: int
    record: LoadRecord
    asked_at: float


@dataclass(slots=True)
class _Record:
    engine_id: str
    request_id: str
    namespace_id: bytes
    began_at: float
    lookups: int = 0
    looked_up_at: float = 0.0
    lookup: Lookup | None = None
    loads: list[_Load] = field(default_factory=list)
    reserved: Counter[str] = field(default_factory=Counter)
    ended_at: float | None = None
    end: RequestEnd | None = None


class Records:
    """The records of all engines, in the order in which requests began. Calls without a request id leave no record."""

    def __init__(
        self,
        namespaces: Namespaces,
        clock: Callable[[], float],
        over: Callable[[RequestRecord], None] | None = None,
        asked: Callable[[str, str, Namespace, bytes, Lookup], None] | None = None,
    ) -> None:
        """Remember nothing yet. `over` is told of each request that has ended, `asked` of the first lookup of each."""
        self._namespaces = namespaces
        self._clock = clock
        self._records: OrderedDict[tuple[str, str], _Record] = OrderedDict()
        self.traces = Traces(clock)
        self._over = over
        self._asked = asked

    def __len__(self) -> int:
        return len(self._records)

    # What requests do

    def looked_up(self, engine_id: str, request_id: str, namespace: Namespace, keys: bytes, lookup: Lookup) -> None:
        record = self._record(engine_id, request_id, namespace)
        if record is not None:
            if not record.lookups:
                self.traces.asked(namespace, keys, lookup.offered_tokens)
                if self._asked is not None:
                    self._asked(engine_id, request_id, namespace, keys, lookup)
            record.lookups += 1
            record.looked_up_at = self._clock()
            record.lookup = lookup

    def loading(self, engine_id: str, namespace: Namespace, call: AcquireCall, answer: Answer) -> Answer:
        """Record that a request asked for its load. Return a function that records the answer and passes it on."""
        record = self._record(engine_id, call.request_id, namespace)
        if record is None:
            return answer
        load = _Load(call.lease_id, LoadRecord("waiting", len(call.kinds), 0.0), self._clock())
        record.loads = [*record.loads[1 - LOADS_PER_RECORD_MAX :], load]

        def answered(reply: AcquireReply) -> None:
            seconds = self._clock() - load.asked_at
            load.record = replace(load.record, outcome=reply.outcome.name.lower(), seconds=seconds)
            answer(reply)

        return answered

    def unused(self, lease: ReadLease) -> None:
        """Record that a request did not use what this lease granted."""
        record = self._records.get((lease.session.engine_id, lease.request_id))
        for load in record.loads if record is not None else ():
            if load.lease_id == lease.id and load.record.outcome == _GRANTED:
                load.record = replace(load.record, outcome=UNUSED)

    def reserved(self, engine_id: str, request_id: str, namespace: Namespace, outcomes: bytes) -> None:
        record = self._record(engine_id, request_id, namespace)
        if record is not None:
            counts = {outcome.name.lower(): outcomes.count(outcome) for outcome in ReserveOutcome}
            record.reserved.update({name: count for name, count in counts.items() if count})

    def ended(self, engine_id: str, request_id: str, end: RequestEnd, namespace_id: bytes | None = None) -> None:
        """Record that the request is over. A repeated call changes nothing.

        `namespace_id`: the latest namespace of the request's engine. A request for which nothing was asked is
        remembered with this namespace, for the reason of the request.
        """
        record = self._records.get((engine_id, request_id))
        unasked = end.miss in UNASKED_REASONS and (record is None or record.end not in (None, end))
        if unasked and request_id and namespace_id is not None:
            record = self._begin(engine_id, request_id, namespace_id)
        if record is not None and record.end is None:
            record.ended_at, record.end = self._clock(), end
            if self._over is not None:
                self._over(self._told(record))

    def engine_gone(self, engine_id: str) -> None:
        """Record that the requests of this engine are over, although it did not say so."""
        now = self._clock()
        for record in self._records.values():
            if record.engine_id == engine_id and record.ended_at is None:
                record.ended_at = now

    def _record(self, engine_id: str, request_id: str, namespace: Namespace) -> _Record | None:
        """Return the record of the request, or None without a request id.

        A request whose id has ended and comes again is another request.
        """
        if not request_id:
            return None
        name = (engine_id, request_id)
        record = self._records.get(name)
        if record is None or record.ended_at is not None:
            record = self._begin(engine_id, request_id, namespace.id)
        return record

    def _begin(self, engine_id: str, request_id: str, namespace_id: bytes) -> _Record:
        name = (engine_id, request_id)
        record = self._records[name] = _Record(engine_id, request_id, namespace_id, self._clock())
        self._records.move_to_end(name)
        if len(self._records) > RECORDS_MAX:
            self._records.popitem(last=False)
        return record

    # What operators ask

    def explain(self, request_id: str) -> tuple[RequestRecord, ...]:
        """Return those that an id means, which may be a user's (`core.request_ids`), the latest first.

        Raise NotFound.
        """
        latest = list(reversed(self._records.values()))
        found = [latest[place] for place in meant(request_id, [record.request_id for record in latest])]
        if not found:
            raise NotFound(
                f"no request {request_id!r} is remembered", advice=f"the latest {RECORDS_MAX} of this run are; {ADVICE}"
            )
        return tuple(
            replace(self._told(record), differences=self._differences(record))
            for record in islice(found, RECORDS_PER_ANSWER_MAX)
        )

    def latest(self, count: int, *, misses: bool = False) -> tuple[RequestRecord, ...]:
        """Return the records of the latest requests, or of those that missed, the latest first."""
        found = (
            record for record in reversed(self._records.values()) if not misses or _outcome(record) is Outcome.MISS
        )
        return tuple(self._told(record) for record in islice(found, min(count or LIST_MAX, LIST_MAX)))

    def _told(self, record: _Record) -> RequestRecord:
        """Return the record without its differences, which take long."""
        now = self._clock()
        spec = self._spec(record.namespace_id)
        return RequestRecord(
            engine_id=record.engine_id,
            request_id=record.request_id,
            namespace_id=record.namespace_id,
            began_seconds_ago=now - record.began_at,
            lookups=record.lookups,
            looked_up_seconds_ago=now - record.looked_up_at if record.lookup is not None else 0.0,
            lookup=record.lookup,
            loads=tuple(replace(load.record, asked_seconds_ago=now - load.asked_at) for load in record.loads),
            reserved=dict(record.reserved),
            ended_seconds_ago=now - record.ended_at if record.ended_at is not None else None,
            end=record.end,
            chunk_tokens=spec.chunk_tokens if spec is not None else 0,
        )

    def _differences(self, record: _Record) -> tuple[str, ...]:
        """Return lines `path: ours != theirs`."""
        if record.lookup is None or not record.lookup.other_namespace:
            return ()
        ours, theirs = self._spec(record.namespace_id), self._spec(record.lookup.other_namespace)
        if ours is None or theirs is None:
            return ()
        return tuple(ours.differences(theirs)[:DIFFERENCES_MAX])

    def _spec(self, namespace_id: bytes) -> NamespaceSpec | None:
        namespace = self._namespaces.by_id.get(namespace_id)
        return namespace.spec if namespace is not None else None


def _outcome(record: _Record) -> Outcome:
    return outcome_of(record.lookup, record.end, loads=bool(record.loads), over=record.ended_at is not None)
