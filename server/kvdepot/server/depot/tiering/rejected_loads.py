"""Rejected loads: requests compute what a lower tier has, because that is faster. The daemon reads it for later ones.

Nothing is read while such a request computes: the request needs the cores, and gets nothing from the read. A prompt is
due after twice the time that computing takes, whatever has become of its request. It has the lowest priority (after
loads, prefetch and operator prefetch), one object of a tier at a time, and is pinned for nobody. What was read is
content like any other, and the tier stays measured. What finds no room, or is more than prefetch may pin, is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import KEY_BYTES
from kvdepot.server.depot.tree.index import NONE, Index
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace, Namespaces
from kvdepot.server.depot.tree.switches import Refusal

PROMPTS_MAX: Final = 64
"""Further prompts are not read: there will be another lookup for what is asked for again."""
_COMPUTED_TIMES: Final = 2.0
"""How fast an engine computes is the median of its last requests."""
_WAIT_SECONDS_MAX: Final = 60.0


@dataclass(eq=False, slots=True)
class _Prompt:
    """One prompt.

    `todo`: by tier number, (chunk, kind) to read from it, the first one last. An absent tier was not looked at.
    """

    session: int  # the slot of whose request it is
    namespace: Namespace
    keys: bytes
    tiers: set[int]
    due_at: float
    todo: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    read_bytes: int = 0  # begun


class Reader(Protocol):
    """Prefetch, which reads rejected loads by its rules and within its share of RAM."""

    seconds: float

    def room_bytes(self, namespace: Namespace) -> int: ...

    def limit_bytes(self, namespace: Namespace) -> int: ...

    def missing(self, namespace: Namespace, keys: bytes, tier: LowerTier) -> list[tuple[int, int]]: ...

    def begin(
        self, namespace: Namespace, node: int, kind: int, tier: LowerTier, ended: Callable[[bool], None]
    ) -> int | None: ...

    def reading(self, token: int) -> bool: ...

    def release(self, tokens: list[int], reason: str) -> None: ...


class RejectedLoads:
    """The prompts of rejected loads, in the order of their arrival, and their reads that are under way."""

    def __init__(
        self,
        prefetch: Reader,
        index: Index,
        namespaces: Namespaces,
        rounded: Callable[[int], int],
        clock: Callable[[], float],
    ) -> None:
        self._prefetch = prefetch
        self._index = index
        self._namespaces = namespaces
        self._clock = clock
        self._rounded = rounded
        self._prompts: list[_Prompt] = []  # in the order of arrival
        self._reads: list[tuple[Namespace, int]] = []  # under way, with the tokens of their pins

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def tokens(self) -> list[int]:
        return [token for _, token in self._reads]

    def add(
        self, session: int, namespace: Namespace, keys: bytes, tiers: Collection[int], computed_seconds: float
    ) -> None:
        """Note a prompt of which these tiers have some chunks, and which is computed in so many seconds."""
        known = any(prompt.keys == keys and prompt.namespace is namespace for prompt in self._prompts)
        if not tiers or known or len(self._prompts) >= PROMPTS_MAX:
            return
        due_at = self._clock() + min(_COMPUTED_TIMES * computed_seconds, _WAIT_SECONDS_MAX)
        self._prompts.append(_Prompt(session, namespace, keys, set(tiers), due_at))

    def tick(self) -> None:
        self._release_read()
        begun_by = self._clock() - self._prefetch.seconds
        self._prompts = [prompt for prompt in self._prompts if prompt.tiers and prompt.due_at > begun_by]

    def end_session(self, session: int) -> None:
        self._prompts = [prompt for prompt in self._prompts if prompt.session != session]

    def end_namespaces(self, refusal: Refusal) -> None:
        """Forget prompts and end reads in namespaces (ids) for which there is a refusal."""
        self._prompts = [prompt for prompt in self._prompts if not refusal(prompt.namespace.id)]
        reads, self._reads = self._reads, []
        for namespace, token in reads:
            if reason := refusal(namespace.id):
                self._prefetch.release([token], reason)
            else:
                self._reads.append((namespace, token))

    def begin_next(self, tier: LowerTier) -> bool:
        """Read the next object of the tier. Return False when none is due, or the tier is busy."""
        if tier.reads.reads:
            return False
        now = self._clock()
        return any(
            self._begin_of(prompt, tier)
            for prompt in self._prompts
            if tier.number in prompt.tiers and prompt.due_at <= now
        )

    def _begin_of(self, prompt: _Prompt, tier: LowerTier) -> bool:
        if not self._namespaces.defined(prompt.namespace) or prompt.namespace.invalid:
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
        """Begin one read. Return False when there is nothing to read, or no room: then the prompt is given up."""
        prefetch, namespace = self._prefetch, prompt.namespace
        node = self._index.find(namespace.slot, prompt.keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES])
        if node == NONE or not tier.has(node, kind) or self._index.row(node, kind) != NO_ROW:
            return False
        size_bytes = self._rounded(namespace.object_bytes[kind])
        token = None
        if size_bytes <= min(prefetch.room_bytes(namespace), prefetch.limit_bytes(namespace) - prompt.read_bytes):
            token = prefetch.begin(namespace, node, kind, tier, self._release_read)
        if token is None:
            prompt.todo[tier.number].clear()
            return False
        prompt.read_bytes += size_bytes
        self._reads.append((namespace, token))
        return True

    def _release_read(self, _whole: bool = True) -> None:
        """Release the reads that are over."""
        over = [token for _, token in self._reads if not self._prefetch.reading(token)]
        if over:
            self._reads = [read for read in self._reads if read[1] not in over]
            self._prefetch.release(over, "rejected")
