"""Which namespace the engine's bytes belong to now, and whether anything may be asked about it yet.

Known at different times: what the ranks are (at start), the digest of the weights (some
seconds later, hashed off-thread), the daemon's acceptance, and the arena of every rank
(whenever the daemon is there). Nothing is stored or loaded before all of it is known.
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
    from kvdepot.client.vllm.metadata import RankArena
    from kvdepot.core.elements import Elements
    from kvdepot.core.keys import NamespaceSpec

WORD_SECONDS: Final = 1.0
"""How long a rank's word counts that it is attached to nothing: as long as it may wait until it tries again."""
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
        """`weights_arrive`: others than those of the files come while the engine runs, of which nobody need tell.

        `former`: of the scheduler side before, whose epoch goes on.
        """
        self._session = session
        self._build = build
        self._world_size = world_size
        self._logger = logger
        self._random_text = random_text
        self._clock = clock
        self._elements = elements  # of the objects, whatever the epoch
        self._fixed = bool(weights_version) or keep_across_sleep
        self._epoch = f"version:{weights_version}" if weights_version else ""
        if weights_arrive and not self._fixed:
            self._epoch = self._random_epoch()
        self._bumps = 0  # the operator's counter, as the daemon said
        self._was_usable = False
        self._spec: NamespaceSpec | None = None
        self._id: bytes | None = None
        self._refusal = ""
        self._arenas: dict[int, RankArena] = {}  # by rank, its last word
        self._question = 0  # the last one that the ranks were asked
        self._asked_in = 0  # the attachment in which they were
        self._heard_at = 0.0  # when the last word of a rank came
        self.epoch_number = 0  # counts epochs of this process; what began in another is void
        self.epoch_ended = MissReason.WEIGHTS_CHANGED  # why the last one did
        self.problem = ""  # why this engine stores and loads nothing, for good; empty if it may
        if former is not None:
            self._continue(former)

    def _continue(self, former: Namespaces) -> None:
        """What the engine has computed or loaded counts as it did. The ranks are asked again where they are."""
        self._epoch, self._bumps = former._epoch, former._bumps
        self._was_usable, self._question = former._was_usable, former._question
        self.epoch_number, self.epoch_ended = former.epoch_number, former.epoch_ended

    def close(self) -> None:
        """Nothing of this side may be stored or loaded any more."""
        self.epoch_number += 1
        self.problem = "the engine has other KV caches"
        if self._id is not None:
            self._session.forget(self._id)
            self._id = None

    @property
    def spec(self) -> NamespaceSpec | None:
        return self._spec

    @property
    def usable(self) -> bytes | None:
        """The namespace's id if the daemon knows it at this moment."""
        namespace = self._id
        if namespace is None or not self._session.attached or not self._session.registered(namespace):
            return None
        self._was_usable = True
        return namespace

    @property
    def coming(self) -> bool:
        """The daemon is there and `usable` may be answered any moment."""
        return not self.problem and self._session.attached

    @property
    def ranks_heard(self) -> bool:
        """Every rank has said what it is attached to, since the scheduler side is and not long ago.

        Each attaches by itself, also while the engine takes no step in which it could say so.
        """
        return self._asked_in == self._session.attachments and self._answered and not self._old

    @property
    def arena_id(self) -> int:
        """The arena every rank has mapped, by its last word; 0 while one has none or they differ."""
        arenas = {said.arena_id for said in self._arenas.values()}
        return next(iter(arenas)) if len(self._arenas) >= self._world_size and len(arenas) == 1 else 0

    @property
    def ranks_ready(self) -> bool:
        return self.arena_id != 0

    def rank_arena(self, rank: int, said: RankArena) -> None:
        """A rank says which arena it has mapped, if any. A word from before its last one is none."""
        known = self._arenas.get(rank)
        if known is not None and said.said_at < known.said_at:
            return
        self._arenas[rank] = said
        self._heard_at = self._clock()

    def question(self) -> int:
        """The number of what every rank is asked with this step: another one, another word.

        What they say of themselves, when it changes, is enough once all have an arena.
        """
        attachments = self._session.attachments
        if not self.ranks_ready and (self._asked_in != attachments or (self._answered and self._old)):
            self._question += 1
            self._asked_in = attachments
        return self._question

    @property
    def _answered(self) -> bool:
        return sum(said.question == self._question for said in self._arenas.values()) >= self._world_size

    @property
    def _old(self) -> bool:
        return self._clock() - self._heard_at > WORD_SECONDS

    def update(self) -> bool:
        """Take one step towards `usable`, without waiting. Called often, does next to nothing.

        True if the daemon's operator has ended the epoch, and another one begins.
        """
        if self._spec is None and not self.problem:
            self._describe()
        if self._session.refusal != self._refusal:
            self._refusal = self._session.refusal
            if self._refusal:
                self._logger.warning("kvdepot: the daemon refuses this engine: %s", self._refusal)
        return self._follow()

    def _follow(self) -> bool:
        """Register anew where an operator has made the namespace void. Whatever is in progress may be built on it."""
        bumps = None if self._id is None else self._session.bumps_wanted(self._id)
        if bumps is None or self._spec is None or self._id is None:
            return False
        self._bumps = bumps
        self._session.forget(self._id)
        self._use(replace(self._spec, bumps=bumps))
        if not self._was_usable:
            return False  # this process has had nothing of it
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
        self._logger.info(
            "kvdepot: namespace %s (%s, epoch %r, bump %d)", namespace.hex(), spec.label, spec.epoch, spec.bumps
        )

    def _random_epoch(self) -> str:
        return f"random:{self._random_text()}"

    def reset(self) -> bool:
        """The engine says that its caches are void. True if that begins a new epoch."""
        if self._fixed:
            return False
        self.epoch_number += 1
        self.epoch_ended = MissReason.WEIGHTS_CHANGED
        self._epoch = self._random_epoch()
        if self._spec is not None and self._id is not None:
            self._session.forget(self._id)
            self._use(replace(self._spec, epoch=self._epoch))
        return True
