"""Prompts whose requests compute what a lower tier has, as that is faster: read for whoever comes next.

Not while such a request computes: it has the cores then, and is not served by it. After twice the time that computing
takes its prompt is due, whatever has become of the request. It is read behind all else (loads, what requests wait
for, what an operator has read), one object of a tier at a time, and held for nobody: what was read is content like any
other, and the tier stays measured. What finds no room, or is more than prefetch may hold, is left where it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import KEY_BYTES
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.switches import Refusal

if TYPE_CHECKING:
    from kvdepot.server.engine.prefetch import Prefetch

PROMPTS_MAX: Final = 64
"""Further ones are not read: of what is asked for again there will be another lookup."""
_COMPUTED_TIMES: Final = 2.0
"""How fast an engine computes is the median of its last requests."""
_WAIT_SECONDS_MAX: Final = 60.0


@dataclass(eq=False, slots=True)
class _Prompt:
    """`todo`: by tier number, (chunk, kind) of what to read from it, the first one last; not there: not looked at."""

    session: int  # the slot of whose request it is
    namespace: Namespace
    keys: bytes
    tiers: set[int]
    due_at: float
    todo: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    read_bytes: int = 0  # begun


class Declined:
    """Belongs to one `Prefetch`, by whose rules it reads."""

    def __init__(self, prefetch: Prefetch, space: Space) -> None:
        self._prefetch = prefetch
        self._space = space
        self._prompts: list[_Prompt] = []  # in the order of their coming
        self._reads: list[tuple[Namespace, int]] = []  # under way, with the tokens of their holds

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def tokens(self) -> list[int]:
        return [token for _, token in self._reads]

    def add(
        self, session: int, namespace: Namespace, keys: bytes, tiers: Collection[int], computed_seconds: float
    ) -> None:
        """These tiers have some of these chunks, which are computed in so many seconds."""
        known = any(prompt.keys == keys and prompt.namespace is namespace for prompt in self._prompts)
        if not tiers or known or len(self._prompts) >= PROMPTS_MAX:
            return
        due_at = self._space.clock() + min(_COMPUTED_TIMES * computed_seconds, _WAIT_SECONDS_MAX)
        self._prompts.append(_Prompt(session, namespace, keys, set(tiers), due_at))

    def tick(self) -> None:
        self._release_read()
        begun_by = self._space.clock() - self._prefetch.seconds
        self._prompts = [prompt for prompt in self._prompts if prompt.tiers and prompt.due_at > begun_by]

    def end_session(self, session: int) -> None:
        self._prompts = [prompt for prompt in self._prompts if prompt.session != session]

    def end_namespaces(self, refusal: Refusal) -> None:
        """Nothing is to be read in namespaces (ids) for which there is a reason against it."""
        self._prompts = [prompt for prompt in self._prompts if not refusal(prompt.namespace.id)]
        reads, self._reads = self._reads, []
        for namespace, token in reads:
            if reason := refusal(namespace.id):
                self._prefetch.release([token], reason)
            else:
                self._reads.append((namespace, token))

    def begin_next(self, tier: LowerTier) -> bool:
        """Have the next object of the tier read; False: none is due, or it has something to do."""
        if tier.reads.reads:
            return False
        now = self._space.clock()
        return any(
            self._begin_of(prompt, tier)
            for prompt in self._prompts
            if tier.number in prompt.tiers and prompt.due_at <= now
        )

    def _begin_of(self, prompt: _Prompt, tier: LowerTier) -> bool:
        if not self._space.namespaces.defined(prompt.namespace) or prompt.namespace.void:
            prompt.tiers.clear()
            return False
        todo = prompt.todo.get(tier.number)
        if todo is None:
            todo = prompt.todo[tier.number] = self._prefetch.missing(prompt.namespace, prompt.keys, tier)
        while todo:
            if self._begin(prompt, tier, *todo.pop()):
                return True
        prompt.tiers.discard(tier.number)
        return False

    def _begin(self, prompt: _Prompt, tier: LowerTier, chunk: int, kind: int) -> bool:
        """False: there is nothing to read, or no room; then nothing more of this prompt is."""
        space, prefetch, namespace = self._space, self._prefetch, prompt.namespace
        node = space.index.find(namespace.slot, prompt.keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES])
        if node == NONE or not tier.has(node, kind) or space.index.row(node, kind) != NO_ROW:
            return False
        size_bytes = space.allocator.rounded(namespace.object_bytes[kind])
        token = None
        if size_bytes <= min(prefetch.room_bytes, prefetch.limit_bytes - prompt.read_bytes):
            token = prefetch.begin(namespace, node, kind, tier, self._release_read)
        if token is None:
            prompt.todo[tier.number].clear()
            return False
        prompt.read_bytes += size_bytes
        self._reads.append((namespace, token))
        return True

    def _release_read(self, _whole: bool = True) -> None:
        """What is over by now, read or not."""
        over = [token for _, token in self._reads if not self._prefetch.reading(token)]
        if over:
            self._reads = [read for read in self._reads if read[1] not in over]
            self._prefetch.release(over, "declined")
