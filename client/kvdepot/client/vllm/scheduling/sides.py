"""The scheduler sides of one engine: the present one, and former ones whose last copies the ranks still finish.

A handshake with every rank's facts begins a side. vLLM 0.33 repeats the handshake at each wake-up: the same facts
change nothing, and other facts end the side and begin another one in the same epoch (docs/adr/0047). A former side
stays until no rank copies anything for it. All sides share one session with the daemon as long as it fits.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvdepot.client.session import DepotSession
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.metadata import RankFacts
from kvdepot.client.vllm.base.stats import KVDepotStats
from kvdepot.client.vllm.identity import identity, items
from kvdepot.client.vllm.identity.element_layout import element_layout
from kvdepot.client.vllm.identity.speculation import speculation
from kvdepot.client.vllm.identity.weights import Digests, LoraSalts, cache_path, weights_sources
from kvdepot.client.vllm.scheduling.namespaces import Namespaces
from kvdepot.client.vllm.scheduling.scheduler import SchedulerSide
from kvdepot.core.errors import ConfigError, KvDepotError

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.engine_types import BlockPool
    from kvdepot.client.vllm.base.metadata import RankMeta, StepMeta
    from kvdepot.client.vllm.base.settings import Settings
    from kvdepot.core.keys import NamespaceSpec
    from kvdepot.core.planner import Planner

LOGGER = logging.getLogger("vllm.kvdepot")


class SchedulerSides:
    """Begins, replaces and ends scheduler sides. Used on the scheduler's thread only."""

    _facts: tuple[RankFacts, ...] | None = None  # of the last handshake; None: not yet

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        group_ids: tuple[int, ...],
        *,
        loads_on: bool,
    ) -> None:
        """Begin to digest the weights. Raise ConfigError if they cannot be identified."""
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._group_ids = group_ids
        self._loads_on = loads_on
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._world_size = int(vllm_config.parallel_config.world_size)
        self._weights = weights_sources(vllm_config, settings.model_revision)
        self._digests = Digests(cache_path())
        for source in self._weights.values():
            if source.folder is not None:
                self._digests.get(source.folder)
        self._salts = LoraSalts(self._digests)  # for all sides: ranks report an adapter once
        self.current: SchedulerSide | None = None
        self.former: list[SchedulerSide] = []
        self.session: DepotSession | None = None
        self.stepped = False  # the engine has taken a step, and so may have cached something
        self._session_ranks = 0
        self._epoch: Namespaces | None = None  # of the last side: the next one continues its epoch
        self._reset_early = False  # before there was a side
        self._pool: BlockPool | None = None
        self._stats, self._events = KVDepotStats(), list[Any]()  # of former sides

    # --- handshakes

    def handshake(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Begin a side with every rank's facts, or compare them with those of the last handshake.

        Raises:
            PlannerError: at the first handshake, if the geometry cannot work: the engine has not started yet. Later
                nothing is raised.
        """
        # Next to another connector the ranks' answers may be that connector's. Without ours, kvdepot stays idle.
        # By the code first: the rank of other code may be anything (`RankFacts`).
        facts = tuple(sorted(_own(metadata.values()), key=lambda fact: (str(fact.code), fact.rank)))
        if self._facts is None:
            self._facts = facts
            self._begin(facts)
        else:
            self._repeat(facts)

    def _repeat(self, facts: tuple[RankFacts, ...]) -> None:
        """Change nothing if the facts are known, or a part of the known ones of an engine with as many ranks."""
        before, self._world_size = self._world_size, int(self._config.parallel_config.world_size)
        complete = not identity.check_ranks(facts, self._world_size)
        known = facts == self._facts if complete else set(facts) <= set(self._facts or ())
        if known and before == self._world_size and (self.current is not None or not complete):
            return
        self._facts = facts
        try:
            self._begin(facts)
        except KvDepotError as error:
            LOGGER.error("kvdepot: stores and loads nothing: %s", error)
        self._forget_former()

    def _begin(self, facts: tuple[RankFacts, ...]) -> None:
        """End the present side, and build another one from all ranks' facts. Raise PlannerError."""
        requests = self._end_current()
        problem = identity.check_ranks(facts, self._world_size)
        if problem:
            LOGGER.error("kvdepot: stores and loads nothing: %s", problem)
            return
        if self._pool is None:
            LOGGER.error("kvdepot: stores and loads nothing until the engine gives its block pool")
            return
        config = self._config
        groups = identity.group_specs(self._kv_cache_config, self._group_ids, facts, config.parallel_config)
        planner = identity.engine_planner(config, self._kv_cache_config, groups, self._settings)
        session = self._session_for(self._world_size)
        namespaces = self._namespaces(session, planner, facts)
        drafting = speculation(config)
        side = SchedulerSide(
            session,
            namespaces,
            planner,
            self._settings,
            self._salts,
            self._pool,
            hash_block_tokens=compat.hash_block_tokens(self._kv_cache_config, config),
            lookahead_tokens=drafting.lookahead_tokens if drafting is not None else 0,
            group_ids=self._group_ids,
            world_size=self._world_size,
            clock=time.monotonic,
            event_kinds=compat.event_kinds(config, self._kv_cache_config),
            loads_on=self._loads_on,
            alone=config.parallel_config.data_parallel_size == config.parallel_config.pipeline_parallel_size == 1,
            counts_items=items.counts_items(config),
            keys_end_at_items=items.items_depend_on_steps(config),
            ranks=[fact.digest for fact in facts],
            after_another=self.stepped,
            speculates=config.speculative_config is not None,
        )
        if self._reset_early:
            namespaces.reset()
        self._epoch, self._reset_early = namespaces, False
        self.current = side
        namespaces.update()
        side.adopt(requests)

    def _namespaces(self, session: DepotSession, planner: Planner, facts: tuple[RankFacts, ...]) -> Namespaces:
        config = self._config
        return Namespaces(
            session,
            self._spec_builder(planner, facts),
            self._world_size,
            LOGGER,
            lambda: secrets.token_hex(8),
            time.monotonic,
            weights_version=self._settings.weights_version,
            keep_across_sleep=self._settings.keep_across_sleep,
            weights_arrive=config.weight_transfer_config is not None,
            elements=element_layout(
                self._kv_cache_config,
                str(config.cache_config.cache_dtype),
                planner,
                self._group_ids,
                facts,
                speculation(config),
            ),
            former=self._epoch,
        )

    def _spec_builder(self, planner: Planner, facts: tuple[RankFacts, ...]) -> Callable[[], NamespaceSpec | None]:
        """Return what builds the namespace as soon as the digests of all weights are known."""

        def build() -> NamespaceSpec | None:
            weights = {}
            for name, source in self._weights.items():
                weights[name] = source.text
                if source.folder is not None:
                    digest = self._digests.get(source.folder)
                    if digest is None:
                        problem = self._digests.problem(source.folder)
                        if problem:
                            raise ConfigError("kvdepot", "weights", problem)
                        return None
                    weights[name] = f"files {digest}"
            return identity.namespace_spec(self._config, self._kv_cache_config, planner, facts, self._settings, weights)

        return build

    def _session_for(self, world_size: int) -> DepotSession:
        """Return one session for all sides, as long as it fits.

        Another session would declare extents as free that ranks still copy for a former side (docs/adr/0047).
        """
        if self.session is None or self._session_ranks != world_size:
            self.session = DepotSession(
                self._settings.endpoint, self._engine_id, world_size, log=LOGGER, log_absence=True
            )
            self._session_ranks = world_size
            self.session.start()
        return self.session

    # --- the engine's calls

    def bind_pool(self, pool: BlockPool) -> None:
        """Take the engine's block pool. The same one changes nothing; in another one, block ids mean other blocks."""
        if pool is self._pool:
            return
        self._pool = pool
        if self._facts is not None:
            self._begin(self._facts)

    def add_ends(self, meta: StepMeta) -> None:
        """Add to a step's message what former sides still have to tell the ranks."""
        for side in self.former:
            side.add_ends(meta)
        self._forget_former()

    def output(self, meta: RankMeta) -> None:
        """Give the ranks' message to every side."""
        for side in self.former:
            side.acknowledged(meta)
        if self.current is not None:
            self.current.output(meta)
        else:
            for read in meta.adapters:  # reported once: a later side has to know what the ranks compute with
                self._salts.read(read)

    def pending(self) -> bool:
        """Return whether the engine has to keep stepping although it has no request."""
        return any(side is not None and side.pending() for side in (*self.former, self.current))

    def reset(self) -> None:
        """Begin an epoch, also if there is no side yet: the engine's caches are invalid."""
        if self.current is not None:
            self.current.reset()
        elif self._epoch is not None:
            self._epoch.reset()
        else:
            self._reset_early = True

    def take_stats(self) -> KVDepotStats:
        """Return what all sides have counted since the last call."""
        stats, self._stats = self._stats, KVDepotStats()
        if self.current is not None:
            self.current.stats.add_to(stats)
        return stats

    def take_events(self) -> list[Any]:
        """Return the KV events of all sides since the last call."""
        events, self._events = self._events, []
        return events + (self.current.events.take() if self.current is not None else [])

    # --- ends

    def _end_current(self) -> list[Any]:
        """Retire the present side, if there is one. Return its requests."""
        side, self.current = self.current, None
        if side is None:
            return []
        self.former.append(side)
        requests = side.retire()
        self._events += side.events.take()
        return requests

    def _forget_former(self) -> None:
        """Forget sides for which no rank copies anything, and those of a session that no rank uses any more."""
        for side in list(self.former):
            if not side.over and (side.session is self.session or side.pending()):
                continue
            self.former.remove(side)
            side.stats.add_to(self._stats)
            shared = any(other.session is side.session for other in self.former)
            if not shared and (side.session is not self.session or self.current is None):
                side.session.end()  # not `close`: this thread waits for no daemon (I2)
                self.session = self.session if side.session is not self.session else None

    def close(self) -> None:
        """End all sides and sessions. Wait for their threads, for a bounded time. Safe to call twice."""
        session, self.session = self.session, None
        sessions = {side.session for side in self.former} | ({session} if session is not None else set())
        self.former.clear()
        self.current = None
        for ended in sessions:
            ended.end()
        for ended in sessions:
            ended.close()
        self._digests.close()


def _own(answers: Iterable[Any]) -> Iterable[RankFacts]:
    """Return those of the ranks' answers that are facts of kvdepot."""
    return (answer for answer in answers if isinstance(answer, RankFacts))
