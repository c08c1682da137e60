"""What an operator has under way beside the engines of a `World`: verbs that take long."""

from __future__ import annotations

from contextlib import suppress

from kvdepot.core.control import VerifyCall
from kvdepot.core.errors import LoadsOff, NotFound
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.operators.operator_prefetch import OperatorPrefetch
from kvdepot.server.depot.operators.verification import Verification


class Operator:
    """One call of a verb at a time, as `Control` sees to it. Calls end with the daemon (`engine`) that they went to."""

    def __init__(self) -> None:
        self._engine: Depot | None = None
        self._verification: Verification | None = None
        self._warming: OperatorPrefetch | None = None

    def verify(self, engine: Depot, namespace_id: bytes, keys: list[bytes]) -> None:
        """Have all read again, or the last of these chunks with all below it."""
        self._ask(engine)
        if self._verification is not None:
            self._verification.cancel()
        call = VerifyCall(1 << 20, namespace_id, keys[-1]) if keys else VerifyCall(1 << 20)
        with suppress(NotFound):
            self._verification = engine.verification(call)

    def warm(self, engine: Depot, namespace_id: bytes, keys: list[bytes]) -> None:
        """Have all of the namespace read into RAM, or the path to the last of these chunks."""
        self._ask(engine)
        if self._warming is not None:
            self._warming.cancel()
        with suppress(NotFound, LoadsOff):
            self._warming = engine.operator_prefetch(namespace_id, keys[-1] if keys else b"")

    def go_on(self, engine: Depot) -> None:
        self._ask(engine)
        if self._verification is not None and not self._verification.run_once():
            assert all(tier.finished for tier in self._verification.reply().tiers)
        if self._warming is not None and not self._warming.run_once():
            assert self._warming.reply().finished

    def cancel(self, engine: Depot) -> None:
        self._ask(engine)
        for work in (self._verification, self._warming):
            if work is not None:
                work.cancel()

    def _ask(self, engine: Depot) -> None:
        if engine is not self._engine:
            self._engine, self._verification, self._warming = engine, None, None
