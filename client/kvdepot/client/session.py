"""The scheduler side's session with the daemon. No call here waits for the daemon; none raises for its sake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvdepot.client.failures import CallFailure
from kvdepot.core.calls import (
    AcquireCall,
    AcquireReply,
    LocateCall,
    LocateReply,
    ReserveCall,
    ReserveReply,
)

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.keys import NamespaceSpec

Call = LocateCall | AcquireCall | ReserveCall
Reply = LocateReply | AcquireReply | ReserveReply
Done = Callable[[Reply | CallFailure], None]
CommitDone = Callable[[bytes], None]


class DepotSession:
    """All of an engine's control calls. Made and used by the scheduler's thread.

    Callbacks run inside `poll`, on the thread that calls it. Calls are made with
    `session=b""`: the session fills in its current token. Lease ids come from
    `new_lease_id`.
    """

    def __init__(self, endpoint: Endpoint, engine_id: str, world_size: int = 1) -> None: ...

    def start(self) -> None:
        """Start the threads. Returns at once; `attached` turns True when the daemon was reached."""

    @property
    def attached(self) -> bool:
        """Attached, leases declared, every registered namespace known to this daemon."""
        return False

    @property
    def ranks_attached(self) -> int:
        """Ranks the daemon has seen attach (it grants nothing before all have)."""
        return 0

    @property
    def refusal(self) -> str:
        """Why the daemon refused to attach this engine, or to register a namespace, in its words; empty if not."""
        return ""

    def register(self, spec: NamespaceSpec) -> None:
        """Make a namespace known, now and after every re-attach, until `forget`. Returns at once."""

    def forget(self, namespace: bytes) -> None:
        """Stop registering a namespace (an epoch has ended)."""

    def registered(self, namespace: bytes) -> bool:
        """Whether the daemon of this attach has accepted it."""
        return False

    def new_lease_id(self) -> int:
        """A lease id no other session of this engine draws (63 bits, random start)."""
        return 0

    def submit(self, call: Call, timeout_seconds: float, done: Done) -> None:
        """Start a Locate, Acquire or Reserve; `done` gets the reply or a CallFailure within the timeout, in `poll`.

        An Acquire or Reserve is repeated with the same lease id while time is left.
        After a failure its lease is ended here: the caller owes nothing for it.
        """

    def release(self, lease_ids: Sequence[int]) -> None:
        """Every rank is done with these reader leases. Repeated until the daemon confirms."""

    def commit(self, lease_id: int, indices: Sequence[int], done: CommitDone | None = None) -> None:
        """All ranks have written these objects of a reservation. `done` gets one CommitOutcome an index, in `poll`.

        Repeated until the daemon answers, in the order of the calls; LOST if the daemon lost the lease.
        """

    def abandon(self, lease_id: int, indices: Sequence[int] = ()) -> None:
        """No rank touches these granted objects any more (none named: the whole lease). Repeated until confirmed."""

    def end_request(self, request_id: str) -> None:
        """The request is over: sent after the commits asked for before it."""

    def poll(self) -> int:
        """Run the callbacks that are due, on this thread. Returns how many."""
        return 0

    def wait(self, timeout_seconds: float) -> int:
        """For tools and tests: wait until a callback is due, then `poll`. An engine never calls this."""
        return 0

    @property
    def open_leases(self) -> int:
        """Leases asked for whose end the daemon has not confirmed."""
        return 0

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Send what is queued for at most `timeout_seconds`, then detach; the daemon ends what is left."""
