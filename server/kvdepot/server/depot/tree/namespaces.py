"""The namespaces of the arena: slots, specs and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import numpy as np
from kvdepot.core.arena import NAMESPACES_MAX, ArenaTables
from kvdepot.core.calls import Kind
from kvdepot.core.elements import ElementRun, Elements
from kvdepot.core.errors import NoRoom
from kvdepot.core.keys import NamespaceSpec, check_sizes
from kvdepot.core.limits import LABEL_BYTES_MAX
from kvdepot.core.planner import Planner
from kvdepot.core.printable import without_controls
from kvdepot.core.report import NamespaceStatus
from kvdepot.server.platform.identity import Owner

SPECS_BYTES_MAX: Final = 32 << 20
"""Of all namespaces, in the daemon's private memory: 600 specs of 50 KiB."""


class Namespace:
    """One slot. `spec` and `planner` are None until an engine registers it in this run."""

    def __init__(
        self, slot: int, namespace_id: bytes, label: str, now: float,
        needs_changed: Callable[[Namespace], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Make a namespace. `needs_changed` is called when the namespace turns out to need more."""
        self.slot = slot
        self.id = namespace_id
        self.label = label
        self.tenant: str | None = None  # known once registered
        self.spec: NamespaceSpec | None = None
        self.party: int | str | None = None  # the tenant or user of the engine that defined the spec
        self.spec_bytes = 0  # of the spec's canonical encoding
        self.planner: Planner | None = None
        self.base_id: bytes | None = None  # its id with a bump counter of 0, and its counter; known once registered
        self.bumps = 0
        self.invalid = False  # an operator has made it so in this run
        self.path_kind = int(Kind.ATTENTION)  # which kind of object makes a path; known once registered
        self.object_bytes: dict[int, int] = {}
        self.elements: Mapping[int, tuple[ElementRun, ...]] = {}  # by kind; empty: nobody has said
        self.kinds: tuple[int, ...] = (int(Kind.ATTENTION),)  # what a boundary needs, as far as is known
        self.window_chunks = 1  # how many chunks the windows that end at a boundary reach into, at least 1
        self._needs_changed = needs_changed
        self.nodes = 0
        self.sessions = 0  # that registered it
        self.objects = {int(kind): 0 for kind in Kind}  # committed
        self.bytes = 0  # of committed objects
        self.used_at = now

    def define(self, spec: NamespaceSpec) -> None:
        planner = spec.planner()
        self.spec = spec
        self.spec_bytes = len(spec.canonical())
        self.base_id = spec.base_id()
        self.bumps = spec.bumps
        self.planner = planner
        self.tenant = spec.tenant
        self.label = spec.label
        self.path_kind = int(planner.path_kind)
        self.object_bytes = {int(kind): planner.object_bytes(kind) for kind in planner.kinds}
        self._need(tuple(self.object_bytes), max(planner.window_chunks, 1))

    def describe(self, elements: Elements) -> None:
        """Note the element layout of the objects, as an engine reports it. The last report of several counts."""
        if elements:
            self.elements = {int(kind): runs for kind, runs in elements.items()}

    def accepts(self, kind: int, raw_bytes: int) -> bool:
        """Return whether it can have an object of this kind and size, as far as is known."""
        return raw_bytes == self.object_bytes.get(kind, raw_bytes if self.spec is None else 0)

    def learn(self, kind: int, raw_bytes: int) -> None:
        """Note the kind and size of an object that was found in a backing store. A registered spec takes precedence."""
        if self.spec is None and kind not in self.object_bytes:
            self.object_bytes[kind] = raw_bytes
            kinds = tuple(sorted({*self.object_bytes, *(kind for kind, count in self.objects.items() if count)}))
            self.path_kind = kinds[0]
            self._need(kinds, self.window_chunks)

    def _need(self, kinds: tuple[int, ...], window_chunks: int) -> None:
        if (kinds, window_chunks) != (self.kinds, self.window_chunks):
            self.kinds, self.window_chunks = kinds, window_chunks
            self._needs_changed(self)

    def forget_spec(self) -> None:
        """Forget the spec, as after a restart. Objects stay. An engine that registers it again defines it again."""
        self.spec = None
        self.party = None
        self.spec_bytes = 0
        self.planner = None
        self.elements = {}

    def status(self) -> NamespaceStatus:
        spec = self.spec
        return NamespaceStatus(
            namespace_id=self.id,
            label=self.label,
            tenant=self.tenant or "",
            epoch=spec.epoch if spec else "",
            bumps=self.bumps,
            chunk_tokens=spec.chunk_tokens if spec else 0,
            objects={Kind(kind): count for kind, count in self.objects.items() if count},
            size_bytes=self.bytes,
            identity=spec.identity if spec else {},
        )


def checked_id(spec: NamespaceSpec) -> bytes:
    """Return the id of a spec whose sizes are right. Raise NamespaceRefused with the numbers for another spec."""
    check_sizes(spec)
    return spec.namespace_id()


class NamespaceListener(Protocol):
    """The owner of what belongs to namespaces."""

    def named(self, namespace: Namespace) -> None:
        """Note a namespace, and note it again when its tenant is known."""

    def left(self, slot: int) -> None:
        """Note that the slot has no namespace any more."""

    def needs_changed(self, namespace: Namespace) -> None:
        """Note that the namespace turns out to need more."""


class Namespaces:
    """The namespace table: fields first, `used` last."""

    def __init__(self, tables: ArenaTables, listener: NamespaceListener) -> None:
        self._listener = listener
        self._ids = tables.namespaces["id"].view("u1").reshape(-1, 16)
        self._labels = tables.namespaces["label"].view("u1").reshape(-1, LABEL_BYTES_MAX)
        self._used = tables.namespaces["used"].data
        self.by_slot: dict[int, Namespace] = {}
        self.by_id: dict[bytes, Namespace] = {}

    def load(self, now: float) -> int:
        """Read the table of an adopted arena. Return how many slots repeat an id; those are not taken."""
        repeated = 0
        for slot in np.flatnonzero(np.asarray(self._used)).tolist():
            namespace_id = self._ids[slot].tobytes()
            if namespace_id in self.by_id:
                self._used[slot] = 0
                repeated += 1
                continue
            label = without_controls(self._labels[slot].tobytes().rstrip(b"\0").decode(errors="ignore"))
            self._enter(self._made(slot, namespace_id, label, now))
        return repeated

    def add(self, namespace_id: bytes, label: str, now: float) -> Namespace | None:
        """Add a namespace, and return it. Return None when the table is full."""
        slot = next((slot for slot in range(NAMESPACES_MAX) if slot not in self.by_slot), None)
        if slot is None:
            return None
        self._ids[slot] = list(namespace_id)
        self._labels[slot] = list(label.encode().ljust(LABEL_BYTES_MAX, b"\0"))
        self._used[slot] = 1
        namespace = self._made(slot, namespace_id, label, now)
        self._enter(namespace)
        return namespace

    def define(self, namespace: Namespace, spec: NamespaceSpec, owner: Owner, bytes_max: int) -> None:
        """Define a namespace by the spec of an engine of this owner. Specs of idle namespaces are forgotten first.

        `bytes_max`: of all specs of the owner's user or tenant.

        Raise NoRoom when the specs in use leave no room.
        """
        namespace.define(spec)
        namespace.party = owner.party
        self._listener.named(namespace)
        self._bound_specs(namespace, f" of {owner.party_name}", bytes_max, lambda one: one.party == owner.party)
        self._bound_specs(namespace, "", SPECS_BYTES_MAX, lambda _: True)

    def _bound_specs(self, new: Namespace, whose: str, bytes_max: int, counts: Callable[[Namespace], bool]) -> None:
        """Forget idle specs until those that count have room for the new one. Raise NoRoom."""
        over = sum(one.spec_bytes for one in self.by_slot.values() if counts(one)) - bytes_max
        for idle in filter(counts, self.idle() if over > 0 else ()):
            if over > 0 and idle is not new:
                over -= idle.spec_bytes
                idle.forget_spec()
        if over > 0:
            new.forget_spec()
            raise NoRoom(f"the specs{whose} of the namespaces in use have {bytes_max >> 20} MiB already")

    def remove(self, namespace: Namespace) -> None:
        """Remove a namespace whose slot no row names any more as part of the index."""
        self._used[namespace.slot] = 0
        del self.by_slot[namespace.slot]
        del self.by_id[namespace.id]
        self._listener.left(namespace.slot)

    def defined(self, namespace: Namespace) -> bool:
        """Return whether it is still in the table, and its spec is known."""
        return namespace.spec is not None and self.by_slot.get(namespace.slot) is namespace

    def of_party(self, party: int | str) -> list[Namespace]:
        """Return the namespaces that engines of this tenant or user have defined."""
        return [one for one in self.by_slot.values() if one.party == party]

    def idle(self) -> list[Namespace]:
        """Return namespaces that no session registered: first those without nodes, each group by last use."""
        return sorted((n for n in self.by_slot.values() if not n.sessions), key=lambda n: (n.nodes > 0, n.used_at))

    def _made(self, slot: int, namespace_id: bytes, label: str, now: float) -> Namespace:
        return Namespace(slot, namespace_id, label, now, self._listener.needs_changed)

    def _enter(self, namespace: Namespace) -> None:
        self.by_slot[namespace.slot] = namespace
        self.by_id[namespace.id] = namespace
        self._listener.named(namespace)
