"""What the connector remembers of one request of the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from kvdepot.client.vllm.base.engine_types import EngineRequest
from kvdepot.client.vllm.identity.adapters import Adapter
from kvdepot.core.calls import KEY_BYTES, ROOT_KEY, Kind, RequestEnd
from kvdepot.core.keys import chunk_key
from kvdepot.core.limits import REQUEST_ID_BYTES_MAX
from kvdepot.core.misses import MissReason
from kvdepot.core.printable import control_character, printable

_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""What vLLM's hashers make of a picture, clip or sound.

Instead of it there may be an id that a client has chosen. Another engine may use it for other content.
"""


@dataclass(slots=True)
class Lookup:
    """One Locate: asked, and what came back."""

    asked_at: float  # seconds, the session's clock
    epoch: int
    step: int  # of the engine, in which it was asked
    wait_seconds: float  # how long the engine waits for the answer, as the daemon knows
    starved_seconds: float  # of the threads that answer, when it was asked
    renewal: bool = False  # of an answer that was too old, or lacked a fact
    local_tokens: int | None = None  # of the engine itself, as sent to the daemon; None: not known then
    local_matters: bool = False  # with it, the answer might have been another one
    answered: bool = False
    boundary_tokens: int = 0
    source: str = ""  # the slowest tier that has to supply something
    miss: MissReason | None = None  # why the boundary is no deeper, if the answer says so
    source_tier: str = ""  # of the daemon's, by which it asks the daemon that the request's params name


@dataclass(slots=True, eq=False)
class RequestState:
    """Loads and stores of one request. Lives from `on_new_request` until it has finished; a key by identity."""

    request: EngineRequest
    arrived_at: float
    adapter: Adapter | None = None  # LoRA adapter of the request
    salt: bytes = b""  # content digest of the adapter, empty without one
    excluded: str = ""  # why it is neither stored nor served; empty if it is
    load_tokens_max: int | None = None  # limit of its user
    keyed_tokens_max: int | None = None  # chunks beyond have no key, because it would not determine their KV
    keys: list[bytes] = field(default_factory=list)  # of chunks 0, 1, ...
    depot_id: str = field(init=False)  # its id at the daemon
    # loads
    located: bool = False  # the daemon knows the request, and must be told of its end
    lookup: Lookup | None = None
    preemptions: int = 0  # seen at the last lookup
    offered: tuple[int, int] = (0, 0)  # local tokens and boundary of the last offer
    renewed_for_age: bool = False  # since its last preemption
    held_since: float | None = None  # when an offer was first held back for other loads
    load_failed: bool = False  # so nothing is offered to it again (P8)
    handed_tokens: int | None = None  # stored by another engine, as its params say; None: not read yet
    handed_until: float = 0.0  # until when to wait for them
    miss: MissReason | None = None  # why nothing was offered; counted when it is computed
    # stores
    store_epoch: int = 0  # the epoch in which it began; in any other it stores nothing
    stored: set[tuple[int, Kind]] = field(default_factory=set)  # no copy needed: there, in progress, or given up
    next_chunk: int = 0  # all chunks before it have been considered
    assumed_chunks: int = 0  # with attention at the daemon, by a lookup or a load
    given_up: set[tuple[int, Kind]] = field(default_factory=set)  # of `stored`, the objects that are not stored
    # where its KV is from
    admitted: bool = False  # asked about since its last step
    tail_unknown: bool = False  # not known yet how far within a block the engine resumes
    hit_tokens: int = 0  # the engine's own at its admission, in whole blocks
    sound_tokens: int = 0  # a step that begins beyond them has KV of another connector
    covered_tokens: int = 0  # by its last step, and by hashes
    noted_tokens: int = 0  # up to which `Provenance` knows its blocks
    foreign: bool = False  # maybe computed on KV of another connector, or on a step that failed
    store_stopped: str = ""  # why no more is stored of it; empty while stores continue
    invalid: bool = False  # maybe computed on KV of an ended epoch, or of its adapter's former content

    # what became of it, for the daemon's record
    local_tokens: int = 0
    loaded_tokens: int = 0
    load_seconds: float = 0.0  # of the load of these
    load_source: str = ""
    missed: MissReason | None = None
    waited_seconds: float = 0.0  # in vain, for the answer to its lookup

    # its prompt at its first admission, for the hit rate
    prompt_tokens: int = 0  # 0: not admitted yet
    engine_tokens: int = 0  # that the engine had itself
    loads_first: bool = False  # that admission began a load
    first_load: tuple[str, int, int] | None = None  # that succeeded: source, tokens, tokens that the engine reused

    def __post_init__(self) -> None:
        self.depot_id = depot_id(self.request.request_id)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def end(self) -> RequestEnd:
        return RequestEnd(
            self.local_tokens if self.prompt_tokens else 0, self.loaded_tokens, self.missed or "",
            self.prompt_tokens, self.load_source, self.load_seconds, self.waited_seconds,
        )  # fmt: skip

    def invalidate(self, why: str) -> None:
        """Store no more of it, and let nothing count that is computed on its blocks."""
        self.invalid = True
        self.store_stopped = self.store_stopped or why

    def update_keys(self, chunk_tokens: int, hash_block_tokens: int, lookahead_tokens: int = 0) -> int:
        """Add the keys of chunks whose hashes and lookahead tokens the engine knows. Return the number of known chunks.

        The hash at a chunk's last hash block is chained: it covers the whole prefix, the LoRA name, multimodal content
        and the salt. The KV of draft layers depends on more: on the tokens after the chunk (docs/adr/0061).
        """
        hashes, num_tokens = self.request.block_hashes, self.request.num_tokens
        per_chunk = chunk_tokens // hash_block_tokens
        known = max(min(len(hashes) // per_chunk, (num_tokens - lookahead_tokens) // chunk_tokens), 0)
        if self.keyed_tokens_max is not None:
            known = min(known, self.keyed_tokens_max // chunk_tokens)
        for chunk in range(len(self.keys), known):
            salt = self.salt + lookahead_salt(self.request, (chunk + 1) * chunk_tokens, lookahead_tokens)
            self.keys.append(chunk_key(hashes[(chunk + 1) * per_chunk - 1], salt))
        return known

    def packed_keys(self, chunks: int) -> bytes:
        """Return the keys of the first `chunks` chunks, one after the other."""
        packed = b"".join(self.keys[:chunks])
        assert len(packed) == chunks * KEY_BYTES
        return packed

    def parent_key(self, chunk: int) -> bytes:
        """Return the key of the chunk before, or the root's."""
        return self.keys[chunk - 1] if chunk else ROOT_KEY


def lookahead_salt(request: EngineRequest, boundary_tokens: int, lookahead_tokens: int) -> bytes:
    """Return what draft layers read after a boundary: tokens, and the pictures, clips and sounds in their places.

    A place of an item has the same token in every prompt. So the item's digest says which one it is, and its offset
    says which part of it.
    """
    if not lookahead_tokens:
        return b""
    end = boundary_tokens + lookahead_tokens
    # vLLM never appends placeholders: a negative token raises, and the request has no key.
    tokens = [token.to_bytes(4, "little") for token in request.all_token_ids[boundary_tokens:end]]
    items = [
        f"{item.identifier}@{item.mm_position.offset - boundary_tokens}".encode()
        for item in request.mm_features or ()
        if item.mm_position.offset < end and boundary_tokens < item.mm_position.offset + item.mm_position.length
    ]
    return b"".join(tokens + items)


def depot_id(request_id: str) -> str:
    """Return the engine's request id, or a digest of it if a user's id does not fit a call.

    The daemon refuses control characters, so they become escapes. A header that is not ASCII has some.
    """
    encoded = request_id.encode("utf-8", "surrogatepass")
    try:
        encoded.decode()
    except UnicodeDecodeError:
        return _digest(encoded)
    name = printable(request_id) if control_character(request_id) else request_id
    return name if len(name.encode()) <= REQUEST_ID_BYTES_MAX else _digest(encoded)


def _digest(encoded: bytes) -> str:
    return "digest-" + blake2b(encoded, digest_size=16).hexdigest()


def exclusion(request: EngineRequest, *, counts_items: bool = False) -> str:
    """Return why a request is neither stored nor served: its hashes do not cover its content. Empty if they do.

    An identifier with an adapter's name before the digest is of a picture that the adapter's vision tower has read
    (`enable_tower_connector_lora`). vLLM keeps the tower's output by that name, also for another adapter of this name.

    `counts_items`: as `items.counts_items` says.
    """
    if request.mm_features and counts_items:
        return "multimodal_id"
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return "prompt_embeds"
    if request.resumable:
        return "streaming_input"  # its tokens, and so its hashes, are replaced while it runs
    if not all(_DIGEST.fullmatch(item.identifier) for item in request.mm_features or ()):
        return "multimodal_id"
    return ""


def tokens_before_items(request: EngineRequest) -> int | None:
    """Return the tokens before the first picture, clip or sound, or None if there is none."""
    return min((item.mm_position.offset for item in request.mm_features or ()), default=None)


def transfer_params(request: EngineRequest) -> dict[Any, Any] | None:
    """Return the request's `kv_transfer_params`, or None if there are none, or no dict."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else None


def load_tokens_max(request: EngineRequest) -> int | None:
    """Return `max_load_tokens` of its `kv_transfer_params`, or None if that is no number of tokens."""
    return token_count((transfer_params(request) or {}).get("max_load_tokens"))


def token_count(value: Any) -> int | None:
    """Return a number of tokens that came from outside, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
