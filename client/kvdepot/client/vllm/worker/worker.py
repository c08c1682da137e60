"""The connector's worker side: what vLLM's worker process asks of one rank, step by step (design.md#copies).

Each step's message brings operations. The copying thread (`copy_thread.py`) does them, and later steps take the
results back to the scheduler side. A step waits for nothing, with one exception of 2 ms (`LOADS_WAIT_SECONDS`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from kvdepot.client.vllm.base.compat import KVConnectorTransferResults
from kvdepot.client.vllm.base.metadata import Geometry, RankArena, RankMeta, StepMeta
from kvdepot.client.vllm.base.operations import LoadOp, StoreOp
from kvdepot.client.vllm.base.stats import KVDepotStats
from kvdepot.client.vllm.worker.copy_outcome import CopyOutcome
from kvdepot.client.vllm.worker.copy_thread import Attached, CopyThread
from kvdepot.client.vllm.worker.places import ObjectPlaces
from kvdepot.core.planner import Planner

if TYPE_CHECKING:
    from kvdepot.client.vllm.worker.audit import Audit
    from kvdepot.client.vllm.worker.layers import RankLayers

LOGGER = logging.getLogger("vllm.kvdepot")

LOADS_WAIT_SECONDS: Final = 0.002
"""How long a step that computes nothing waits for the loads that begin in it (docs/adr/0041, 7)."""


class WorkerSide:
    """One rank: takes each step's message, and returns what the copying thread has finished.

    A step that computes nothing waits a moment for the loads that begin in it. Otherwise a load that ends just after
    the step would be reported one step of the engine later.
    """

    def __init__(
        self,
        rank: int,
        attachment: Attached,
        copies: CopyThread | None,
        layers: RankLayers,
        audit: Audit | None = None,
        digest: str = "",
    ) -> None:
        """Take over the attachment and the copying thread.

        Args:
            rank: the rank's number.
            attachment: the process's attachment; closed by `close`.
            copies: the copying thread. None: this rank can copy nothing, and every operation fails at once.
            layers: the rank's KV tensors.
            audit: where to record digests, if an operator wants them.
            digest: of this rank's facts. Operations fail until a geometry comes that was made with these facts.
        """
        self._rank = rank
        self.attachment = attachment
        self._copies = copies
        self._running: CopyThread | None = None
        self._former: list[CopyThread] = []  # of KV memory that the engine has replaced
        self._layers = layers
        self._audit = audit
        self._digest = digest
        self._geometry: Geometry | None = None  # the last that came
        self._suspended = False
        self._resets = 0  # that the scheduler side knew of when this rank last had work
        self._changed_after: int | None = None  # resets: the weights were changed in place, and none has come since
        self._refused: list[CopyOutcome] = []  # operations that no thread will see
        self._unloadable: set[str] = set()
        self._cancelled: set[int] = set()  # loads that must not succeed, even if their copy is done
        self._meta = RankMeta()
        self._stats = KVDepotStats()
        self._uncounted: list[CopyOutcome] = []  # reported, and not yet in the statistics
        self._loads_step = self._stores_step = 0  # of the last messages that were taken
        self._probe_id = 0
        self._reported: RankArena | None = None
        self._waits_for_loads = False  # this step has loads, and computes nothing

    # --- KV memory

    def replace(self, copies: CopyThread | None, layers: RankLayers, audit: Audit | None, digest: str) -> None:
        """Use other KV caches from now on, and end the copies from and to the former ones."""
        if self._copies is not None:
            self._copies.suspend()
            self._copies.close()
            self._former.append(self._copies)
        if self._audit is not None:
            self._audit.close()
        self._copies, self._running, self._layers, self._audit, self._digest = copies, None, layers, audit, digest
        if not self._copies_allowed and copies is not None:
            copies.suspend()
        self._run()

    @property
    def copies_on_device(self) -> bool:
        """Return whether this rank copies to and from a device."""
        return self._copies is not None and self._copies.on_device

    def prepare_at_once(self) -> None:
        """Do what makes copies on a device fast before the engine serves: pin the arena. Wait for that."""
        if self._copies is not None and self._copies.on_device:
            self._copies.prepare_at_once()

    def has(self, layers: RankLayers) -> bool:
        """Return whether these are the KV caches that are copied now."""
        return self._copies is not None and self._layers.same_memory(layers)

    def suspend(self) -> bool:
        """Keep copies away from KV memory until `resume`. Return False if a copy has not ended."""
        self._suspended = True
        return self._copies is None or self._copies.suspend()

    def resume(self) -> None:
        """Copy again: the engine has its KV memory back."""
        self._suspended = False
        self._copy_again()

    def weights_change(self) -> None:
        """Fail all loads and stores until the scheduler side knows of a later reset (docs/adr/0098).

        The engine changes its weights in place. What is stored, or lies in the engine's own cache, is of the former
        ones, and other engines still have them.
        """
        if self._changed_after is None:
            LOGGER.warning(
                "kvdepot: rank %d loads and stores nothing: the weights were changed in place; "
                "call reset_prefix_cache(reset_connector=True)",
                self._rank,
            )
        self._changed_after = self._resets
        if self._copies is not None and not self._copies.suspend():
            LOGGER.error("kvdepot: a copy has not ended before the engine changes its weights")

    def _see_resets(self, meta: StepMeta) -> None:
        """Copy again after a later reset. Steps without work, as while the engine sleeps, leave no KV of an epoch."""
        if meta.computes or meta.loads:
            self._resets = max(self._resets, meta.resets)  # a message without a scheduler side has 0
        if self._changed_after is not None and meta.resets > self._changed_after:
            self._changed_after = None
            self._copy_again()

    @property
    def _copies_allowed(self) -> bool:
        return not self._suspended and self._changed_after is None

    def _copy_again(self) -> None:
        if self._copies is not None and self._copies_allowed:
            self._copies.resume()

    def _run(self) -> None:
        """Copy by the last geometry, if it was made with the facts that this rank has now."""
        geometry, self._running = self._geometry, None
        if geometry is None or self._copies is None:
            return
        if geometry.ranks and self._digest not in geometry.ranks[self._rank : self._rank + 1]:
            LOGGER.warning("kvdepot: rank %d copies nothing: its KV caches are not those of the handshake", self._rank)
            return
        places = ObjectPlaces(Planner(geometry.groups, geometry.chunk_tokens), self._layers, self._rank)
        self._copies.start(places)
        self._running = self._copies

    # --- a step

    def start_loads(self, meta: StepMeta) -> None:
        """Queue this step's loads, and report those failed that the scheduler side has given up.

        A message that is no newer than the last one changes nothing.
        """
        if meta.number:
            if meta.number <= self._loads_step:
                return
            self._loads_step = meta.number
        self._see_resets(meta)
        if meta.geometry is not None:
            self._geometry = meta.geometry
            self._run()
        self._probe_id = meta.probe_id
        self._waits_for_loads = meta.idle and bool(meta.loads)
        self._unloadable.update(meta.failed_loads)
        self._cancelled.update(meta.cancelled_loads)
        if meta.loads or meta.cancelled_loads:
            if self._running is None:
                self._refused += [CopyOutcome.all_failed(op) for op in meta.loads]
            else:
                self._running.submit(meta.loads, (), meta.cancelled_loads)

    def start_stores(self, meta: StepMeta) -> None:
        """Queue this step's stores: its forward pass is submitted. A message that is no newer changes nothing."""
        if meta.number:
            if meta.number <= self._stores_step:
                return
            self._stores_step = meta.number
        if not meta.stores:
            return
        if self._running is None:
            self._refused += [CopyOutcome.all_failed(op) for op in meta.stores]
        else:
            self._running.submit((), meta.stores)

    def results(self) -> KVConnectorTransferResults:
        """Return the loads that are over, for vLLM. `take_meta` sends the same ones to the scheduler side.

        Each outcome is taken once. So they are counted elsewhere: an error there would lose reports, and requests
        would wait for ever.
        """
        failed, self._unloadable = self._unloadable, set()
        finished = set(failed)
        rank = 1 << self._rank
        for outcome in self._take_done():
            op = outcome.op
            self._uncounted.append(outcome)
            if isinstance(op, StoreOp):
                self._meta.stores[op.op_id] = (rank, outcome.failed)
                continue
            failed_all = bool(outcome.failed) or outcome.suspended or op.op_id in self._cancelled
            self._cancelled.discard(op.op_id)
            self._meta.loads[op.op_id] = (rank, rank * failed_all)
            if outcome.suspended:
                self._meta.suspended |= {op.op_id}
            if outcome.intact is False:
                self._meta.corrupt |= {op.op_id}
            finished.add(op.request_id)
            if failed_all:
                failed.add(op.request_id)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def _take_done(self) -> list[CopyOutcome]:
        done, self._refused = self._refused, []
        for former in self._former:
            done += former.take_done()
        self._former = [former for former in self._former if not former.over]
        if self._running is not None:
            if self._waits_for_loads:
                self._waits_for_loads = False
                self._running.wait_for_loads(LOADS_WAIT_SECONDS)
            done += self._running.take_done()
        elif self._copies is not None:
            done += self._copies.take_done()  # of a former geometry
        return done

    def _count(self, outcome: CopyOutcome) -> None:
        """Count the bytes that an operation moved: of a failed load none, of a store those of the good objects."""
        loading = isinstance(outcome.op, LoadOp)
        moved = [] if loading and outcome.failed else [o for o in outcome.op.objects if o.index not in outcome.failed]
        if outcome.places is not None:
            direction = "load" if loading else "store"
            self._stats.add("copied_bytes", direction, outcome.places.size_bytes(moved, writing=not loading))
            self._stats.add("copy_seconds", direction, outcome.seconds)
        if outcome.verified is not None:
            self._stats.add("verified_loads", "right" if outcome.verified else "wrong", 1)
        if outcome.intact is not None:
            self._stats.add("checked_loads", "intact" if outcome.intact else "corrupt", 1)

    def add_stats(self, stats: KVDepotStats) -> None:
        """Add what this rank has copied since the last call. vLLM calls it in every step."""
        outcomes, self._uncounted = self._uncounted, []
        for outcome in outcomes:
            self._count(outcome)
        self._stats.add("lost_devices", "", self._copies is not None and self._copies.take_lost())
        stats.aggregate(self._stats)
        self._stats.reset()

    def take_meta(self) -> RankMeta | None:
        """Return this step's message to the scheduler side, or None if there is nothing new."""
        arena = self.attachment.arena
        arena_id = arena.arena_id if arena is not None and self.attachment.session is not None else 0
        report = RankArena(arena_id, self._probe_id, time.monotonic())
        if report != self._reported:
            self._reported = self._meta.arenas[self._rank] = report
        meta, self._meta = self._meta, RankMeta()
        return meta if meta.arenas or meta.loads or meta.stores else None

    def close(self) -> None:
        """End the copying thread, and then the attachment, so that the daemon never sees a dead rank that copies."""
        if self._copies is not None:
            self._copies.close()
        self.attachment.close()
        if self._audit is not None:
            self._audit.close()
