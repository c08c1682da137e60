"""Each of the engine's own reasons for which a request is computed, caused once and read back (row P10).

It is read back from vLLM's /metrics and, where the daemon has heard of the request, from the record that
`kvdepotctl explain` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.scheduling import negative as negative_module
from kvdepot.core.calls import AcquireCall, LocateCall, LocateReply
from kvdepot.core.control import Switch
from kvdepot.core.errors import NotFound
from kvdepot.core.misses import LOOKUP_REASONS, MissReason

from tests.fakes.broken_copies import break_copies
from tests.fakes.frontend import Frontend
from tests.fakes.scripted_engine import ScriptedEngine
from tests.rigs.connector_rig import Gate, Make, cold, evict, prompt, rank_copier

pytestmark = pytest.mark.usefixtures("own_registry")

TOKENS: Final = prompt(9.5)


@dataclass
class Scene:
    """An engine, and another one that has stored `TOKENS` before."""

    make: Make
    gate: Gate
    monkeypatch: pytest.MonkeyPatch

    def engine(self, **settings: Any) -> ScriptedEngine:
        engine = self.make(settings=settings)
        self.frontend = Frontend(engine)
        return engine


@dataclass
class Asked:
    """A request that is due a reason."""

    engine: ScriptedEngine
    tokens: list[int] = field(default_factory=lambda: TOKENS)
    arguments: dict[str, Any] = field(default_factory=dict)
    recorded: bool = True  # the daemon has heard of it
    also: dict[tuple[str, str], int] = field(default_factory=dict)  # samples that it counts besides


Cause = Callable[[Scene], AbstractContextManager[Asked]]


def before_load(engine: ScriptedEngine, action: Callable[[], object]) -> None:
    """Do this between the next lookup and its load."""
    submit = engine.session.submit

    def disturbed(call: Any, timeout_seconds: float, done: Any, then: Any = None) -> None:
        if isinstance(call, AcquireCall):
            engine.session.submit = submit  # type: ignore[method-assign]
            action()
        submit(call, timeout_seconds, done, then)

    engine.session.submit = disturbed  # type: ignore[method-assign]


@contextmanager
def unreachable(scene: Scene) -> Iterator[Asked]:
    engine = scene.engine()
    engine.depot.present = False
    yield Asked(engine, recorded=False)


@contextmanager
def not_ready(scene: Scene) -> Iterator[Asked]:
    """As while the weights are hashed."""
    engine = scene.engine()
    engine.session.forget(engine.side.namespaces.registered_id)
    yield Asked(engine)


@contextmanager
def timed_out(scene: Scene) -> Iterator[Asked]:
    engine = scene.engine()
    engine.depot.held.add(LocateCall)
    yield Asked(engine, also={("timeouts_total", "lookup"): 1})
    engine.session.let_go()


@contextmanager
def failed_lately(scene: Scene) -> Iterator[Asked]:
    scene.monkeypatch.setattr(negative_module, "NEGATIVE_SECONDS", 3600.0)
    engine = scene.engine(load_timeout_seconds=0.2)
    engine.depot.held.add(AcquireCall)
    engine.generate(TOKENS)
    engine.depot.held.clear()
    engine.session.let_go()
    engine.settle(0.0)
    engine.reset()
    yield Asked(engine)


@contextmanager
def too_many_loads(scene: Scene) -> Iterator[Asked]:
    other = prompt(4.5, seed=1)
    scene.make().generate(other)
    engine = scene.engine(loads_in_flight=1)
    scene.gate.close()
    engine.add(other)
    engine.step()
    assert scene.gate.reached()
    yield Asked(engine)


@contextmanager
def excluded(scene: Scene) -> Iterator[Asked]:
    yield Asked(scene.engine(), arguments={"prompt_is_token_ids": [True] * len(TOKENS)})


@contextmanager
def reads_no_cache(scene: Scene) -> Iterator[Asked]:
    yield Asked(scene.engine(), arguments={"params": {"prompt_logprobs": 1}})


@contextmanager
def gone(scene: Scene) -> Iterator[Asked]:
    engine = scene.engine()
    before_load(engine, lambda: evict(engine))
    yield Asked(engine, also={("stale_total", "missing"): 1, ("failed_loads_total", "missing"): 1})


@contextmanager
def refused(scene: Scene) -> Iterator[Asked]:
    engine = scene.engine()
    before_load(engine, lambda: engine.depot.engine.switch(Switch.LOADS, b"", on=False))
    yield Asked(engine)


@contextmanager
def no_room(scene: Scene) -> Iterator[Asked]:
    """The daemon has as many loads of this engine in flight as may be."""
    engine = scene.engine()
    depot_engine = engine.depot.engine
    full = replace(depot_engine._config, loads_in_flight=0)
    before_load(engine, lambda: depot_engine.configure(full, {}))
    yield Asked(engine)


@contextmanager
def load_timed_out(scene: Scene) -> Iterator[Asked]:
    engine = scene.engine(load_timeout_seconds=0.2)
    engine.depot.held.add(AcquireCall)
    yield Asked(engine, also={("timeouts_total", "load"): 1})
    engine.session.let_go()


@contextmanager
def load_failed(scene: Scene) -> Iterator[Asked]:
    engine = scene.engine()
    break_copies(scene.monkeypatch, rank_copier(engine, 0), Direction.LOAD)
    yield Asked(engine, also={("failed_loads_total", "copy"): 1})


@contextmanager
def weights_changed(scene: Scene) -> Iterator[Asked]:
    engine = scene.engine()
    before_load(engine, engine.side.reset)
    yield Asked(engine, also={("stale_total", "epoch"): 1, ("failed_loads_total", "epoch"): 1})


@contextmanager
def other(scene: Scene) -> Iterator[Asked]:
    """A daemon of another version, with a word that this one does not know."""
    engine = scene.engine()
    serve = engine.session._serve

    def answer(call: Any) -> Any:
        reply = serve(call)
        return LocateReply(0, miss="a-new-reason") if isinstance(reply, LocateReply) else reply

    scene.monkeypatch.setattr(engine.session, "_serve", answer)
    yield Asked(engine)


@contextmanager
def not_worth_it(scene: Scene) -> Iterator[Asked]:
    """Its user wants fewer tokens than are there."""
    yield Asked(scene.engine(), arguments={"params": {"extra_args": {"kv_transfer_params": {"max_load_tokens": 0}}}})


@contextmanager
def too_short(scene: Scene) -> Iterator[Asked]:
    yield Asked(scene.engine(), prompt(0.5))


CAUSES: Final[dict[MissReason, Cause]] = {
    MissReason.UNREACHABLE: unreachable,
    MissReason.NOT_READY: not_ready,
    MissReason.TIMED_OUT: timed_out,
    MissReason.FAILED_LATELY: failed_lately,
    MissReason.TOO_MANY_LOADS: too_many_loads,
    MissReason.EXCLUDED: excluded,
    MissReason.TOO_SHORT: too_short,
    MissReason.READS_NO_CACHE: reads_no_cache,
    MissReason.GONE: gone,
    MissReason.REFUSED: refused,
    MissReason.LOAD_TIMED_OUT: load_timed_out,
    MissReason.LOAD_FAILED: load_failed,
    MissReason.WEIGHTS_CHANGED: weights_changed,
    MissReason.OTHER: other,
    # Two that the daemon has as well.
    MissReason.NOT_WORTH_IT: not_worth_it,
    MissReason.NO_ROOM: no_room,
}


@pytest.mark.requirement("P10")
def test_every_reason_of_the_engine_has_a_cause() -> None:
    assert CAUSES.keys() | {*LOOKUP_REASONS} == {*MissReason}


def recorded(engine: ScriptedEngine, request_id: str) -> str | None:
    """The engine's word in the daemon's record; None where there is none."""
    try:
        (record,) = engine.depot.engine.records.explain(request_id)
    except NotFound:
        return None
    assert record.end is not None
    return record.end.miss


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("reason", CAUSES, ids=str)
def test_each_reason_of_the_engines_own_is_counted_once_a_request_and_told_to_the_daemon(
    make: Make, gate: Gate, monkeypatch: pytest.MonkeyPatch, reason: MissReason
) -> None:
    make().generate(TOKENS)
    scene = Scene(make, gate, monkeypatch)
    with CAUSES[reason](scene) as asked:
        engine, before = asked.engine, scene.frontend.samples()
        request_id = engine.add(asked.tokens, **asked.arguments)
        while not engine.outputs[request_id]:
            engine.step()
        gate.open()
        engine.run()
        assert engine.outputs[request_id] == cold(asked.tokens)
        assert engine.hits[request_id] == 0
    engine.settle(0.0)
    found = scene.frontend.samples()
    grown = {name: int(value - before.get(name, 0)) for name, value in found.items() if value > before.get(name, 0)}
    assert {label: number for (name, label), number in grown.items() if name == "misses_total"} == {reason: 1}
    assert asked.also.items() <= grown.items()
    assert recorded(engine, request_id) == (reason if asked.recorded else None)
    assert engine.session.computed == (reason is MissReason.UNREACHABLE), "for the engine's log"
