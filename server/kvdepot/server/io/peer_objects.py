"""Objects of a peer: what the jobs of the shared tier are where the files are objects in the RAM of another daemon.

Bytes arrive in the lent extents themselves. Nothing is published before their checksum is the one of the lease.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final

import xxhash
from kvdepot.core.objectfile import HEADER_BYTES, Damage, ObjectDamageError
from kvdepot.server.io.context import Context, PeerLink
from kvdepot.server.io.jobs import ABSENT, Answer, Probe, ReadFile, StatFiles
from kvdepot.server.io.peer_wire import Leased, Locate, Located, Pull, Refusal, Refused, Wanted
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import object_of

_PIECE_BYTES: Final = 1 << 20
_OUTCOMES: Final = {
    Refusal.GONE: IoOutcome.GONE,
    Refusal.FOREIGN: IoOutcome.FOREIGN,
    Refusal.BUSY: IoOutcome.CANCELLED,  # it says nothing of the path, or of the object
    Refusal.NOT_ALLOWED: IoOutcome.UNREADABLE,
}


def _peer(context: Context) -> PeerLink:
    if context.peer is None:
        raise ValueError("a job for a peer, and this worker has none")
    return context.peer


def _stat(job: StatFiles, context: Context) -> Answer:
    """Return the length of each object as a file would have it, or ABSENT. One round trip."""
    found = _locate(context, Locate(tuple(map(_wanted, job.files))))
    lengths = (length + HEADER_BYTES if length >= 0 else ABSENT for length in found.lengths)
    return Answer(IoOutcome.OK, lengths=tuple(lengths), source_id=found.arena_id)


def _wanted(file: str) -> Wanted:
    found = object_of(file)
    if found is None:
        raise ValueError(f"{file!r} is not the name of an object")
    return Wanted(*found)


def _ask(context: Context, question: Locate | Pull) -> Located | Leased | Refused:
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
    """Pull an object into the extents, or through memory of this process if there are none."""
    peer, name = _peer(context), job.name
    views = None if job.extents is None else context.views(job.extents, name.raw_bytes)
    found = _ask(context, Pull(name))
    if isinstance(found, Refused):
        return Answer(_OUTCOMES[found.reason], f"the peer says: {found.reason}")
    if not isinstance(found, Leased):
        peer.close()
        raise OSError(errno.EIO, f"{type(found).__name__} is no answer to a pull")
    if found.raw_bytes != name.raw_bytes:
        peer.close()  # its bytes are on the way
        raise ObjectDamageError(Damage.LENGTH, f"payload: the peer has {found.raw_bytes} bytes, not {name.raw_bytes}")
    raw_sum = _received(peer, name.raw_bytes, views, context)
    if raw_sum != found.raw_sum:
        raise ObjectDamageError(Damage.CORRUPT, "payload: its checksum is not the one of the lease")
    if raw_sum in job.doubtful:
        raise ObjectDamageError(Damage.CORRUPT, "payload: two checksums of it differed here, and this is one of them")
    return Answer(IoOutcome.OK, stored_bytes=name.raw_bytes, stored_sum=raw_sum, raw_sum=raw_sum)


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
    return Answer(IoOutcome.OK, source_id=_locate(context, Locate(())).arena_id)


IN_PEER: Final[dict[type[Any], Callable[[Any, Context], Answer]]] = {StatFiles: _stat, ReadFile: _read, Probe: _probe}
"""What is asked of a peer. A worker of a peer gets no other jobs."""
