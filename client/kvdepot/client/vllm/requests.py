"""What the connector remembers of one request of the engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, Protocol

from kvdepot.client.vllm.adapters import Adapter
from kvdepot.core.calls import KEY_BYTES, ROOT_KEY, Kind, RequestEnd
from kvdepot.core.keys import chunk_key
from kvdepot.core.limits import REQUEST_ID_BYTES_MAX
from kvdepot.core.misses import MissReason

_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""What vLLM's hashers make of a picture, clip or sound. Instead of it there may be an id that a client has chosen:
another engine's name for something else.
"""


class EngineRequest(Protocol):
    """What is used of vLLM's Request (v1/request.py). Read only."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool
    lora_request: Any
    prompt_embeds: Any
    prompt_is_token_ids: Any
    mm_features: Any
    resumable: bool
    kv_transfer_params: Any

    @property
    def num_tokens(self) -> int: ...


@dataclass(slots=True)
class Lookup:
    """One Locate: asked, and what came back."""

    asked_at: float  # seconds, the session's clock
    epoch: int
    step: int  # the engine's, in which it was asked
    renewal: bool = False  # of an answer that had become old, or to a question that said too little
    local_tokens: int | None = None  # that the engine has itself, as the daemon was told; None: not known then
    local_matters: bool = False  # knowing it, the daemon might have answered otherwise
    answered: bool = False
    boundary_tokens: int = 0
    source: str = ""  # the slowest tier that has to give something for it
    miss: MissReason | None = None  # why there is no more, if the answer says so


@dataclass(slots=True, eq=False)
class RequestState:
    """Loads and stores of one request. Lives from `on_new_request` until it has finished; a key by identity."""

    request: EngineRequest
    arrived_at: float
    adapter: Adapter | None = None  # the LoRA adapter that it is computed with
    salt: bytes = b""  # that one's content digest, empty without one
    excluded: str = ""  # why it is neither stored nor served; empty if it is
    load_tokens_max: int | None = None  # its user wants no more of it loaded
    keys: list[bytes] = field(default_factory=list)  # of chunks 0, 1, ...
    depot_id: str = field(init=False)  # what the daemon knows it by
    # loads
    located: bool = False  # the daemon may be reading ahead for it, or is to explain it: it must hear of its end
    lookup: Lookup | None = None
    preemptions: int = 0  # seen at the last lookup
    offered: tuple[int, int] = (0, 0)  # local tokens and boundary of the last offer
    held_since: float | None = None  # when too many loads in flight first kept an offer back
    load_failed: bool = False  # and so nothing is offered to it again (P8)
    handed_tokens: int | None = None  # stored of it by another engine, in that one's word; None: not read yet
    handed_until: float = 0.0  # when to wait for them no more
    miss: MissReason | None = None  # why the last offer was nothing; counted when the engine goes on without
    # stores
    store_epoch: int = 0  # the epoch in which it began; in any other it stores nothing
    stored: set[tuple[int, Kind]] = field(default_factory=set)  # needs no copy: there, on its way, or given up
    next_chunk: int = 0  # all before it have been considered
    assumed_chunks: int = 0  # whose attention is taken to be there because a lookup or a load said so
    given_up: set[tuple[int, Kind]] = field(default_factory=set)  # of these, what is not on its way any more
    noted_tokens: int = 0  # up to which `Provenance` has heard of it since it was admitted
    store_stopped: str = ""  # why no more is stored of it; empty while it goes on
    void: bool = False  # it may be computed on what an ended epoch, or another content of its adapter, has left

    # what became of it, for the daemon's record
    local_tokens: int = 0
    loaded_tokens: int = 0
    missed: MissReason | None = None

    def __post_init__(self) -> None:
        self.depot_id = depot_id(self.request.request_id)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def end(self) -> RequestEnd:
        return RequestEnd(self.local_tokens, self.loaded_tokens, self.missed or "")

    def update_keys(self, chunk_tokens: int, hash_block_tokens: int) -> int:
        """Add the keys of chunks whose hashes the engine knows by now; returns how many there are.

        The hash at a chunk's last hash block is chained: it covers the whole prefix, the LoRA
        name, multimodal content and the salt.
        """
        hashes = self.request.block_hashes
        per_chunk = chunk_tokens // hash_block_tokens
        known = len(hashes) // per_chunk
        for chunk in range(len(self.keys), known):
            self.keys.append(chunk_key(hashes[(chunk + 1) * per_chunk - 1], self.salt))
        return known

    def packed_keys(self, chunks: int) -> bytes:
        packed = b"".join(self.keys[:chunks])
        assert len(packed) == chunks * KEY_BYTES
        return packed

    def parent_key(self, chunk: int) -> bytes:
        return self.keys[chunk - 1] if chunk else ROOT_KEY


def depot_id(request_id: str) -> str:
    """The engine's id, or a digest of it where users chose one that does not fit a call."""
    encoded = request_id.encode("utf-8", "surrogatepass")
    try:
        encoded.decode()
    except UnicodeDecodeError:
        return _digest(encoded)
    return request_id if len(encoded) <= REQUEST_ID_BYTES_MAX else _digest(encoded)


def _digest(encoded: bytes) -> str:
    return "digest-" + blake2b(encoded, digest_size=16).hexdigest()


def exclusion(request: EngineRequest, *, counts_items: bool = False) -> str:
    """Why a request is neither stored nor served, whatever its LoRA: its hashes do not cover its content.

    `counts_items`: this engine names a picture by its number, and may digest that with the settings for it.
    """
    if request.mm_features and counts_items:
        return "multimodal_id"
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return "prompt_embeds"
    if request.resumable:
        return "streaming_input"  # its tokens, and so its hashes, are replaced while it runs
    prefix = f"{getattr(request.lora_request, 'lora_name', '')}:"
    if not all(_DIGEST.fullmatch(item.identifier.removeprefix(prefix)) for item in request.mm_features or ()):
        return "multimodal_id"
    return ""


def transfer_params(request: EngineRequest) -> dict[Any, Any] | None:
    """Its `kv_transfer_params`, from whoever sent it; None where there are none, or something else instead."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else None


def load_tokens_max(request: EngineRequest) -> int | None:
    """`max_load_tokens` of its `kv_transfer_params`; None where there is none, or no number of tokens."""
    return token_count((transfer_params(request) or {}).get("max_load_tokens"))


def token_count(value: Any) -> int | None:
    """A number of tokens as it came from outside; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
