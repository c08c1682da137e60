"""Real engines on one daemon for a long time: aborts, preemptions, resets, killed engines, killed daemons."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

import grpc
from kvdepot.client.vllm.scheduling.negative import NEGATIVE_SECONDS
from kvdepot.core.report import DaemonStatus

from demo.engine import Engine
from tests.e2e import arena_bytes
from tests.e2e.fleet import Fleet
from tests.soak.engines import SOAKED
from tests.soak.judge import OUTPUT_TOKENS, Audited, Memory, Prompts, audited, sure_tokens, token_trouble

IN_FLIGHT = 6
"""Requests of each engine at a time."""
STARTED_AT_ONCE = 2
REQUEST_SECONDS_MAX = 240.0
FAULT_SECONDS = 4.0
FIRST_KILL_SECONDS = 20.0
REST_SECONDS = 100.0
"""From an engine's return to the next one's end: in five minutes one of four engines lives through, for its memory."""
SAMPLE_SECONDS = 2.0
TICK_SECONDS = 0.02
FINDINGS_MAX = 5
AGAIN = 4
"""Prompts that each engine is asked twice at the end. Their objects fit beside those of the tenant's other engine."""


class Violation(Exception):  # noqa: N818 - it says what was found
    """Something that must not be."""


@dataclass
class Driven:
    """One engine and what it is asked."""

    name: str
    prompts: Prompts
    engine: Engine | None = None  # None: killed, its successor starts
    starting: Future[None] | None = None
    asked: dict[str, tuple[int, float, Future[Any]]] = field(default_factory=dict)
    draining: bool = False  # takes nothing new, so that its cache can be reset


@dataclass
class Outcome:
    """What a run did and saw."""

    counts: Counter[str] = field(default_factory=Counter)
    external_tokens: int = 0
    prompt_tokens: int = 0
    audits: dict[str, Audited] = field(default_factory=dict)
    rises_mib: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        rows = [(name, str(count)) for name, count in sorted(self.counts.items())]
        rows += [("prompt tokens", str(self.prompt_tokens)), ("of them from the daemon", str(self.external_tokens))]
        rows += [
            (f"{toy}: {kind} blocks loaded", str(count))
            for toy, found in self.audits.items()
            for kind, count in sorted(found.loaded_by_kind.items())
        ]
        rows += [("MiB a process rose, at most", f"{max(self.rises_mib.values(), default=0.0)}")]
        rows += [("seconds", f"{self.seconds:.0f}")]
        return [f"{name:<40}{value:>10}" for name, value in rows]


class Soak:
    """`prepare`, then `run`. Raises Violation at the first thing that must not be."""

    def __init__(
        self,
        fleet: Fleet,
        seed: int,
        *,
        engines: Iterable[str] = SOAKED,
        plant: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """`plant`: change bytes in the daemon's memory, which the run must notice."""
        self._fleet = fleet
        self._random = Random(seed)
        self._faults = Random(f"{seed}-faults")
        self._plant = plant
        self._asking = True  # until the load ends
        self._deck: list[Callable[[], None]] = []  # faults to come, in an order that was drawn: none is left out
        self._all_faults = plant  # whether each has happened; a run that plants has another one
        self._rested_at = 0.0  # then the next engine is killed
        self._say = say
        self._memory = Memory()
        self._names = itertools.count()
        self._starter = ThreadPoolExecutor(1)
        prompts = {kind.toy.name: Prompts.make(seed, kind.toy.name, 8, 4) for kind in SOAKED.values()}
        self._driven = {name: Driven(name, prompts[SOAKED[name].toy.name]) for name in engines}
        self.outcome = Outcome()

    # --- before

    def prepare(self) -> None:
        """Cold runs of everything, one request at a time, before there is a daemon; then start it."""
        assert not self._fleet.daemon.running
        names = iter(self._driven)
        while some := list(islice(names, STARTED_AT_ONCE)):
            self._fleet.launch(some)
        if self._fleet.refused:
            raise next(iter(self._fleet.refused.values()))
        for one in self._driven.values():
            one.engine = self._fleet.running(one.name)
            if SOAKED[one.name].exact and not one.prompts.cold and one.engine is not None:
                self._say(f"{len(one.prompts.prompts)} cold runs of {one.name}")
                begun = one.engine.begin(one.prompts.prompts, OUTPUT_TOKENS, serial=True, leads=True)
                one.prompts.cold = [sure_tokens(done) for done in one.engine.finish(begun, 600)]
        self._fleet.ensure_daemon()
        for name in self._driven:
            self._fleet.engine(name)

    # --- the run

    def run(self, seconds: float, *, requests_min: int = 0) -> Outcome:
        """Load for so long, until so many requests have been judged, and until each fault has happened."""
        began = time.monotonic()
        self._rested_at = began + FIRST_KILL_SECONDS
        fault_at = began + FAULT_SECONDS
        sample_at = began
        while (
            (now := time.monotonic()) < began + seconds
            or self.outcome.counts["requests"] < requests_min
            or not self._all_faults
        ):
            for one in self._driven.values():
                self._drive(one)
            if now >= fault_at:
                self._fault()
                fault_at = time.monotonic() + self._random.uniform(0.5, 1.5) * FAULT_SECONDS
            if now >= sample_at:
                self._sample(now - began)
                sample_at = time.monotonic() + SAMPLE_SECONDS
            time.sleep(TICK_SECONDS)
        self._say("the load ends")
        self._drain()
        self._finish()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _drive(self, one: Driven) -> None:
        if one.starting is not None and one.starting.done():
            one.starting.result()
            one.starting, one.engine = None, self._fleet.running(one.name)
            if one.engine is None:
                raise Violation(f"{one.name} does not start again: {self._fleet.refused.get(one.name)}")
            self._rested_at = time.monotonic() + REST_SECONDS
        if one.engine is None:
            return
        for name in [name for name, (_, _, begun) in one.asked.items() if begun.done()]:
            self._judge(one, one.engine, name)
        overdue = [name for name, (_, at, _) in one.asked.items() if time.monotonic() - at > REQUEST_SECONDS_MAX]
        if overdue:
            raise Violation(f"{one.name} has not answered {overdue} in {REQUEST_SECONDS_MAX} s")
        if one.draining and not one.asked:
            one.engine.reset_prefix_cache(60.0)  # answers False while a store has pins
            one.draining = False
            self.outcome.counts["cache resets"] += 1
        while self._asking and not one.draining and self._has_room(one):
            self._ask(one, one.engine)

    def _has_room(self, one: Driven) -> bool:
        """While an engine starts the others get one request at a time between them: else a start takes minutes."""
        if any(other.starting for other in self._driven.values()):
            return not any(other.asked for other in self._driven.values())
        return len(one.asked) < IN_FLIGHT

    def _ask(self, one: Driven, engine: Engine) -> None:
        which = one.prompts.pick(self._random)
        name = f"soak-{next(self._names)}"
        begun = engine.begin([one.prompts.prompts[which]], OUTPUT_TOKENS, names=[name])
        one.asked[name] = (which, time.monotonic(), begun)

    def _judge(self, one: Driven, engine: Engine, name: str) -> None:
        which, _, begun = one.asked.pop(name)
        (done,) = engine.finish(begun)
        self.outcome.counts["requests"] += 1
        self.outcome.counts["requests aborted"] += done.finish_reason == "abort"
        cold = one.prompts.cold[which] if SOAKED[one.name].exact else ()
        trouble = token_trouble(done, cold)
        if trouble:
            raise Violation(f"{one.name}: {trouble}")
        self.outcome.counts["requests compared with a cold run"] += SOAKED[one.name].exact
        self.outcome.counts["tokens compared with a cold run"] += min(len(cold), len(done.tokens))

    # --- faults

    def _fault(self) -> None:
        if self._plant:
            self._damage()
        elif time.monotonic() >= self._rested_at and not any(one.starting for one in self._driven.values()):
            self._kill_engine()
        else:
            if not self._deck:
                self._deck = [self._abort] * 6 + [self._reset] * 3 + [self._kill_daemon] * 2
                self._faults.shuffle(self._deck)
            self._deck.pop()()
            self._all_faults = self._all_faults or not self._deck

    def _some(self) -> tuple[Driven, Engine] | None:
        alive = [(one, one.engine) for one in self._driven.values() if one.engine is not None]
        return self._random.choice(alive) if alive else None

    def _abort(self) -> None:
        if (some := self._some()) is not None:
            one, engine = some
            engine.abort(self._random.sample(sorted(one.asked), len(one.asked) // 2))

    def _reset(self) -> None:
        if (some := self._some()) is not None:
            some[0].draining = True

    def _kill_engine(self) -> None:
        if (some := self._some()) is None:
            return
        one, engine = some
        self._count_preemptions(engine)
        self._fleet.end(one.name, kill=True)
        self.outcome.counts["engines killed"] += 1
        self.outcome.counts["requests of engines killed"] += len(one.asked)
        one.asked.clear()
        one.draining = False
        one.engine, one.starting = None, self._starter.submit(self._fleet.launch, [one.name])

    def _kill_daemon(self) -> None:
        self._fleet.daemon.kill()
        self.outcome.counts["daemons killed"] += 1
        until = time.monotonic() + self._random.choice([0.0, 0.5, 3.0])
        while time.monotonic() < until:
            for one in self._driven.values():
                self._drive(one)
            time.sleep(TICK_SECONDS)
        self._fleet.daemon.start()

    def _damage(self) -> None:
        """Of the objects in memory, whoever they belong to: nothing verifies these before they are served."""
        arena = self._fleet.daemon.arena
        for stored in self._random.sample(sorted(objects := arena_bytes.committed(arena)), len(objects) // 4):
            arena_bytes.damage(arena, stored)
        for one in self._driven.values():
            one.draining = one.engine is not None

    # --- looking

    def _sample(self, at: float) -> None:
        try:
            status = self._fleet.daemon.status()
        except grpc.RpcError:
            return
        self.outcome.counts["looks at the quotas"] += 1
        for quota in status.quotas:
            over = [owner for owner in quota.owners if owner.used_bytes > quota.capacity_bytes]
            if over:
                raise Violation(f"above the quota of {quota.capacity_bytes}: {over}")
        self._memory.sample("daemon", [status.pid], at)
        for one in self._driven.values():
            if one.engine is not None:
                self._memory.sample(one.name, one.engine.processes(), at)

    def _count_preemptions(self, engine: Engine) -> None:
        totals = engine.totals()
        self.outcome.counts["preemptions"] += totals.preemptions
        self.outcome.external_tokens += totals.external_tokens
        self.outcome.prompt_tokens += totals.prompt_tokens

    # --- after

    def _drain(self) -> None:
        """Every request ends, and every engine that was killed is back."""
        self._asking = False
        while any(one.asked or one.starting for one in self._driven.values()):
            for one in self._driven.values():
                self._drive(one)
            time.sleep(TICK_SECONDS)

    def _finish(self) -> None:
        """Nothing is left over, everything still works, and all that was ever loaded was right."""
        self._fleet.wait_attached()
        status = self._fleet.daemon.settle(timeout_seconds=90.0)  # no lease, no loan, no reserved byte
        self._check_sessions(status)
        time.sleep(NEGATIVE_SECONDS)
        for one in self._driven.values():
            self._serve_once_more(one)
        self._fleet.daemon.settle(timeout_seconds=90.0)
        for toy in {SOAKED[name].toy.name for name in self._driven}:
            names = [name for name in self._driven if SOAKED[name].toy.name == toy]
            found = self.outcome.audits[toy] = audited(self._fleet.directory, names)
            if found.wrong:
                raise Violation(f"{toy}: {len(found.wrong)} of {found.loaded_blocks} loaded blocks differ: "
                                f"{list(found.wrong.items())[:FINDINGS_MAX]}")  # fmt: skip
        self.outcome.rises_mib = self._memory.rises()
        rose = {life: mib for life, mib in self.outcome.rises_mib.items() if mib > Memory.RISE_MIB_MAX}
        if rose:
            raise Violation(f"memory is not flat, MiB: {rose}")

    def _check_sessions(self, status: DaemonStatus) -> None:
        if len(status.sessions) != len(self._driven):
            raise Violation(f"sessions of {[one.engine_id for one in status.sessions]} for {len(self._driven)} engines")

    def _serve_once_more(self, one: Driven) -> None:
        """All prompts again, the longest last, then those once more, each time on an empty cache.

        Quotas may have left none of this engine's objects of the load. What it has just stored is there.
        """
        assert one.engine is not None
        which = sorted(range(len(one.prompts.prompts)), key=lambda prompt: len(one.prompts.prompts[prompt]))
        self._answer(one, one.engine, which)
        before = one.engine.totals()
        self._answer(one, one.engine, which[-AGAIN:])
        if not one.engine.totals().since(before).external_tokens:
            raise Violation(f"{one.name} is not served what it has just stored")
        self._count_preemptions(one.engine)

    def _answer(self, one: Driven, engine: Engine, which: Sequence[int]) -> None:
        self._fleet.forget(engine)
        asked = [one.prompts.prompts[prompt] for prompt in which]
        for prompt, done in zip(which, engine.generate(asked, OUTPUT_TOKENS), strict=True):
            trouble = token_trouble(done, one.prompts.cold[prompt] if SOAKED[one.name].exact else ())
            if trouble:
                raise Violation(f"{one.name}, at the end: {trouble}")
            self.outcome.counts["requests"] += 1

    def close(self) -> None:
        self._starter.shutdown(wait=True)
