"""The namespace and epoch of the engine's bytes, and whether the daemon may be asked about them yet.

The facts become known at different times: the ranks' (at start), the digest of the weights (some seconds later, hashed
on another thread), the daemon's acceptance, and the arena of every rank. Nothing is stored or loaded before all of
them are known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvdepot.core.errors import KvDepotError
from kvdepot.core.misses import MissReason

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.base.metadata import RankArena
    from kvdepot.core.elements import Elements
    from kvdepot.core.keys import NamespaceSpec

REPORT_SECONDS: Final = 1.0
"""How long a rank's report that it is attached to nothing counts: as long as its pause between two attempts."""
SpecBuilder = Callable[[], "NamespaceSpec | None"]
"""The spec without an epoch, once everything about the engine is known; None until then.

Raises KvDepotError for an engine that cannot be described.
"""


class Namespaces:
    """The current namespace and epoch of one engine. Used on the scheduler's thread only."""

    def __init__(
        self,
        session: DepotSession,
        build: SpecBuilder,
        world_size: int,
        logger: logging.Logger,
        random_text: Callable[[], str],
        clock: Callable[[], float],
        *,
        weights_version: str = "",
        keep_across_sleep: bool = False,
        weights_arrive: bool = False,
        elements: Elements = MappingProxyType({}),
        former: Namespaces | None = None,
    ) -> None:
        """Begin an epoch, or continue one.

        Args:
            session: with the daemon.
            build: builds the namespace's spec.
            world_size: number of ranks.
            logger: for warnings.
            random_text: draws the name of a random epoch.
            clock: monotonic, in seconds.
            weights_version: a name of the weights; resets then begin no epoch.
            keep_across_sleep: whether resets begin no epoch.
            weights_arrive: whether weights arrive while the engine runs, without notice to the connector.
            elements: dtype layout of the objects.
            former: of the former scheduler side, whose epoch continues.
        """
        self._session = session
        self._build = build
        self._world_size = world_size
        self._logger = logger
        self._random_text = random_text
        self._clock = clock
        self._elements = elements  # of the objects, the same in every epoch
        self._fixed = bool(weights_version) or keep_across_sleep
        self._epoch = f"version:{weights_version}" if weights_version else ""
        if weights_arrive and not self._fixed:
            self._epoch = self._random_epoch()
        self._bumps = 0  # the operator's counter, as the daemon reported it
        self._was_registered = False
        self._spec: NamespaceSpec | None = None
        self._id: bytes | None = None
        self._refusal = ""
        self._arenas: dict[int, RankArena] = {}  # by rank, its last report
        self._probe_id = 0  # the last one sent to the ranks
        self._asked_in = 0  # the attachment in which it was sent
        self._reported_at = 0.0  # when the last report of a rank came
        self.resets = 0  # that have begun an epoch of this engine alone
        self.epoch_number = 0  # counts epochs of this process; requests of another epoch are invalid
        self.epoch_ended = MissReason.WEIGHTS_CHANGED  # why the last epoch ended
        self.problem = ""  # why this engine never stores or loads anything; empty if it may
        if former is not None:
            self._continue(former)

    def _continue(self, former: Namespaces) -> None:
        """Continue the epoch of a former side. The ranks are asked again what they are attached to."""
        self._epoch, self._bumps = former._epoch, former._bumps
        self._was_registered, self._probe_id = former._was_registered, former._probe_id
        self.epoch_number, self.epoch_ended, self.resets = former.epoch_number, former.epoch_ended, former.resets

    def close(self) -> None:
        """Refuse all further stores and loads of this side."""
        self.epoch_number += 1
        self.problem = "the engine has other KV caches"
        if self._id is not None:
            self._session.forget(self._id)
            self._id = None

    @property
    def spec(self) -> NamespaceSpec | None:
        """The present namespace's spec, or None before the weights are known."""
        return self._spec

    @property
    def registered_id(self) -> bytes | None:
        """The namespace's id if the daemon knows it at this moment, or None."""
        namespace = self._id
        if namespace is None or not self._session.attached or not self._session.registered(namespace):
            return None
        self._was_registered = True
        return namespace

    @property
    def coming(self) -> bool:
        """Whether the daemon is there, so that `registered_id` may be known any moment."""
        return not self.problem and self._session.attached

    @property
    def ranks_reported(self) -> bool:
        """Whether every rank has reported what it is attached to: after this side was attached, and not long ago.

        Ranks attach on their own, also while the engine takes no step in which they could report it.
        """
        return self._asked_in == self._session.attachments and self._answered and not self._old

    @property
    def arena_id(self) -> int:
        """The arena that every rank has mapped, by the last reports; 0 while one has none, or they differ."""
        arenas = {report.arena_id for report in self._arenas.values()}
        return next(iter(arenas)) if len(self._arenas) >= self._world_size and len(arenas) == 1 else 0

    @property
    def ranks_ready(self) -> bool:
        """Whether all ranks have mapped one arena."""
        return self.arena_id != 0

    def rank_arena(self, rank: int, report: RankArena) -> None:
        """Note a rank's report of the arena that it has mapped, if any. An older report than its last is ignored."""
        known = self._arenas.get(rank)
        if known is not None and report.reported_at < known.reported_at:
            return
        self._arenas[rank] = report
        self._reported_at = self._clock()

    def probe(self) -> int:
        """Return the number of the question that goes to every rank with this step. A new number wants a new report.

        As soon as all ranks have an arena, the reports that they send after a change are enough.
        """
        attachments = self._session.attachments
        if not self.ranks_ready and (self._asked_in != attachments or (self._answered and self._old)):
            self._probe_id += 1
            self._asked_in = attachments
        return self._probe_id

    @property
    def _answered(self) -> bool:
        return sum(report.probe_id == self._probe_id for report in self._arenas.values()) >= self._world_size

    @property
    def _old(self) -> bool:
        return self._clock() - self._reported_at > REPORT_SECONDS

    def update(self) -> bool:
        """Take one step towards `registered_id`, without waiting. Called often, and cheap.

        Return True if the daemon's operator has ended the epoch, and another one begins.
        """
        if self._spec is None and not self.problem:
            self._describe()
        if self._session.refusal != self._refusal:
            self._refusal = self._session.refusal
            if self._refusal:
                self._logger.warning("kvdepot: the daemon refuses this engine: %s", self._refusal)
        return self._follow()

    def _follow(self) -> bool:
        """Register again if an operator has invalidated the namespace. Requests in progress may be built on it."""
        bumps = None if self._id is None else self._session.bumps_wanted(self._id)
        if bumps is None or self._spec is None or self._id is None:
            return False
        self._bumps = bumps
        self._session.forget(self._id)
        self._use(replace(self._spec, bumps=bumps))
        if not self._was_registered:
            return False  # this process has used nothing of it
        self.epoch_number += 1
        self.epoch_ended = MissReason.EPOCH_BUMPED
        return True

    def _describe(self) -> None:
        try:
            spec = self._build()
            if spec is not None:
                self._use(replace(spec, epoch=self._epoch, bumps=self._bumps))
        except Exception as error:  # noqa: BLE001 - I3: a configuration is full of foreign objects, any may raise
            self.problem = str(error) if isinstance(error, KvDepotError) else repr(error)
            self._logger.error("kvdepot: stores and loads nothing: %s", error)

    def _use(self, spec: NamespaceSpec) -> None:
        namespace = spec.namespace_id()
        self._session.register(spec, self._elements)
        self._spec = spec
        self._id = namespace

    def _random_epoch(self) -> str:
        return f"random:{self._random_text()}"

    def reset(self) -> bool:
        """Note that the engine's caches are invalid. Return True if that begins a new epoch."""
        if self._fixed:
            return False
        self.epoch_number += 1
        self.resets += 1
        self.epoch_ended = MissReason.WEIGHTS_CHANGED
        self._epoch = self._random_epoch()
        if self._spec is not None and self._id is not None:
            self._session.forget(self._id)
            self._use(replace(self._spec, epoch=self._epoch))
        return True
