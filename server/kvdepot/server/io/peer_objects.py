"""Objects of a peer: what the jobs of the shared tier are where the files are objects in the RAM of another daemon.

Bytes arrive in the lent extents themselves, over TLS or NIXL. Nothing is published before their checksum is the one of
the lease.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final

import xxhash
from kvdepot.core.objectfile import HEADER_BYTES, Damage, ObjectDamageError, payload_sum
from kvdepot.server.io.context import Context, NixlLink, PeerLink
from kvdepot.server.io.direct_io import first_bytes
from kvdepot.server.io.jobs import Answer, Probe, ReadFile, StatFiles
from kvdepot.server.io.nixl_agent import NotReachedError
from kvdepot.server.io.peer_wire import (
    Borrow,
    Lane,
    Leased,
    Lent,
    Locate,
    Located,
    Pull,
    Question,
    Refusal,
    Refused,
    Reply,
    Wanted,
)
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import object_of

_PIECE_BYTES: Final = 1 << 20
_NOT_LENT: Final = "the peer lends nothing over NIXL now"
_OUTCOMES: Final = {
    Refusal.GONE: IoOutcome.GONE,
    Refusal.FOREIGN: IoOutcome.FOREIGN,
    Refusal.BUSY: IoOutcome.CANCELLED,  # it says nothing of the path, or of the object
    Refusal.NOT_ALLOWED: IoOutcome.UNREADABLE,
    Refusal.NOT_LENT: IoOutcome.CANCELLED,
}


def _peer(context: Context) -> PeerLink:
    if context.peer is None:
        raise ValueError("a job for a peer, and this worker has none")
    return context.peer


def _stat(job: StatFiles, context: Context) -> Answer:
    """Return the length of each object as a file would have it, ABSENT or UNKNOWN. One round trip."""
    found = _locate(context, Locate(tuple(map(_wanted, job.files))))
    lengths = (length + HEADER_BYTES if length >= 0 else length for length in found.lengths)
    return Answer(IoOutcome.OK, lengths=tuple(lengths), source_id=found.arena_id)


def _wanted(file: str) -> Wanted:
    found = object_of(file)
    if found is None:
        raise ValueError(f"{file!r} is not the name of an object")
    return Wanted(*found)


def _ask(context: Context, question: Question) -> Reply:
    found = _peer(context).ask(question)
    if isinstance(found, Refused) and found.reason is Refusal.NOT_ALLOWED:
        raise OSError(errno.EACCES, "the peer does not allow this daemon: see its [tls] allow_peers")
    return found


def _locate(context: Context, question: Locate) -> Located:
    found = _ask(context, question)
    if not isinstance(found, Located) or len(found.lengths) != len(question.wanted):
        _peer(context).close()  # bytes of an object may be on the way
        raise OSError(errno.EIO, f"{type(found).__name__} is no answer to {len(question.wanted)} names")
    return found


def _read(job: ReadFile, context: Context) -> Answer:
    """Load an object into the extents, or through memory of this process if there are none."""
    peer, name = _peer(context), job.name
    views = None if job.extents is None else context.views(job.extents, name.raw_bytes)
    why_not = ""
    if views is not None and context.nixl is not None and peer.lends():
        borrowed = context.nixl.why_not or _borrow(job, views, context, context.nixl)
        if isinstance(borrowed, Answer):
            return borrowed
        why_not = borrowed
    found = _ask(context, Pull(name))
    if isinstance(found, Refused):
        return _refused(found.reason)
    if not isinstance(found, Leased):
        peer.close()
        raise OSError(errno.EIO, f"{type(found).__name__} is no answer to a pull")
    _check_length(found.raw_bytes, job, peer)
    raw_sum = _received(peer, name.raw_bytes, views, context)
    return _compared(raw_sum, found.raw_sum, job, f"{Lane.STREAM}: {why_not}" if why_not else peer.lane)


def _borrow(job: ReadFile, views: list[memoryview], context: Context, nixl: NixlLink) -> Answer | str:
    """Read an object over NIXL into the extents. Return why it has to come over the stream, if it has to.

    NixlError ends the worker: only its end proves that nothing is written to the extents any more.
    """
    peer, extents = _peer(context), job.extents
    found = _ask(context, Borrow(job.name))
    if isinstance(found, Refused):
        return _NOT_LENT if found.reason is Refusal.NOT_LENT else _refused(found.reason)
    if not isinstance(found, Lent):
        peer.close()
        raise OSError(errno.EIO, f"{type(found).__name__} is no answer to a reader that borrows")
    _check_length(sum(length for _, length in found.extents), job, peer)
    assert extents is not None, "there are views of them"
    try:
        nixl.read(found.lender, extents, found.extents)
    except NotReachedError as error:
        peer.close()  # which ends the lease
        return str(error)
    except ValueError as error:
        peer.close()
        raise OSError(errno.EIO, f"the peer: {error}") from error
    in_time = peer.give_back()
    raw_sum = payload_sum(first_bytes(views, job.name.raw_bytes))
    if raw_sum != found.raw_sum and not in_time:
        raise OSError(errno.EIO, "the lease ended before all bytes were here")
    return _compared(raw_sum, found.raw_sum, job, Lane.NIXL)


def _refused(reason: Refusal) -> Answer:
    return Answer(_OUTCOMES[reason], f"the peer says: {reason}")


def _check_length(raw_bytes: int, job: ReadFile, peer: PeerLink) -> None:
    """Raise ObjectDamageError if the peer has another length. Its lease ends, and with it what is on the way."""
    if raw_bytes != job.name.raw_bytes:
        peer.close()
        raise ObjectDamageError(Damage.LENGTH, f"payload: the peer has {raw_bytes} bytes, not {job.name.raw_bytes}")


def _compared(raw_sum: int, expected: int, job: ReadFile, lane: str) -> Answer:
    """Return the answer for bytes with this checksum. Raise ObjectDamageError if it is not what the lease says."""
    if raw_sum != expected:
        raise ObjectDamageError(Damage.CORRUPT, "payload: its checksum is not the one of the lease")
    if raw_sum in job.doubtful:
        raise ObjectDamageError(Damage.CORRUPT, "payload: two checksums of it differed here, and this is one of them")
    raw_bytes = job.name.raw_bytes
    return Answer(IoOutcome.OK, stored_bytes=raw_bytes, stored_sum=raw_sum, raw_sum=raw_sum, lane=lane)


def _received(peer: PeerLink, left: int, views: list[memoryview] | None, context: Context) -> int:
    """Receive an object. Return the XXH3-128 of what lies in the views."""
    state = xxhash.xxh3_128()
    for view in views or [memoryview(b"")]:
        end = min(len(view), left) if views is not None else left
        for start in range(0, end, _PIECE_BYTES):
            length = min(_PIECE_BYTES, end - start)
            piece = view[start : start + length] if views is not None else context.scratch(0, length)
            peer.receive(piece)
            state.update(piece)
        left -= end
    return state.intdigest()


def _probe(job: Probe, context: Context) -> Answer:  # noqa: ARG001
    """Ask for nothing: the peer answers, and allows this daemon."""
    arena_id = _locate(context, Locate(())).arena_id
    return Answer(IoOutcome.OK, source_id=arena_id, lane=_peer(context).lane)


IN_PEER: Final[dict[type[Any], Callable[[Any, Context], Answer]]] = {StatFiles: _stat, ReadFile: _read, Probe: _probe}
"""What is asked of a peer. A worker of a peer gets no other jobs."""
