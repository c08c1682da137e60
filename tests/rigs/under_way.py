"""A connector with work under way, and what it holds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvdepot.client.copy.base import Direction
from kvdepot.core.calls import AcquireCall, LocateCall, ReserveCall

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Gate, prompt


def threads(engine: ScriptedEngine) -> Counter[str]:
    """Threads that began since this engine did. Those of an earlier test may only now be ending."""
    names = (thread.name for thread in set(threading.enumerate()) - engine.threads_before)
    return Counter(name for name in names if name.startswith("kvdepot"))


def belongings(engine: ScriptedEngine) -> dict[str, Any]:
    """All that an engine has of its own, here and at the daemon."""
    holds, daemon = engine.side.holds, engine.depot.engine
    return {
        "side": id(engine.side),
        "session": id(engine.session),
        "threads": threads(engine),
        "sessions": len(daemon._sessions.by_slot),
        "connections": sum(attached.connections for attached in daemon._sessions.attachments.values()),
        "leases": sum(len(session.leases) for session in daemon._sessions.by_slot.values()),
        "lent": engine.depot.lent(),
        "pins": holds.pinned_blocks,
        "watched": holds.held_blocks,
        "requests": len(engine.side._requests) + engine.side.stores.open_requests,
        "former": len(engine.connector.sides.former),
    }


PHASES: dict[str, Callable[[DirectDepot, Gate], object]] = {
    "looked up": lambda depot, _: depot.held.add(LocateCall),
    "acquiring": lambda depot, _: depot.held.add(AcquireCall),
    "loading": lambda _, gate: gate.close(batch_bytes=2048),
    "reserving": lambda depot, _: depot.held.add(ReserveCall),
    "storing": lambda _, gate: gate.close(direction=Direction.STORE),
}


def under_way(engine: ScriptedEngine, depot: DirectDepot, gate: Gate, phase: str) -> str:
    """A request that stands still there."""
    PHASES[phase](depot, gate)
    loads = phase in ("looked up", "acquiring", "loading")
    request_id = engine.add(prompt(9.5) if loads else prompt(5.5, seed=3), max_tokens=2 * BLOCK)
    engine.step()
    engine.step()
    if phase in ("loading", "storing"):
        assert gate.reached()
    return request_id


def let_go(engine: ScriptedEngine, depot: DirectDepot, gate: Gate) -> None:
    depot.held.clear()
    engine.session.let_go()
    gate.open()
