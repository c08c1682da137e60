"""The scripted engine with requests that differ in more than tokens: `cache_salt`, LoRA adapter, pictures, priority.

The KV of a prefix follows from all of them but the priority. So equal tokens have other bytes with another salt, which
a model would not compute: a salt only keeps users apart, and here a hit across it shows.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import vllm
from packaging.version import Version
from vllm.lora.request import LoRARequest
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.fakes.item_engine import EMBEDS_MAX, picture
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.fakes.visits import Prefix
from tests.rigs.adapter_requests import known
from tests.rigs.connector_rig import set_priorities

NAMES_BEFORE_COMPUTING = Version(vllm.__version__).release < (0, 33)
"""vLLM 0.32 names blocks that a preempted request does not compute any more, and its own cache serves them."""
ADAPTERS = (("a", "one"), ("a", "two"), ("b", "other"))
"""Names and folders: the first one is loaded again from another path."""

PICTURES = {"a": 20, "b": 20, "c": 33}
"""Their tokens."""


@dataclass(frozen=True)
class Voice:
    """What a request has besides its tokens and priority."""

    salt: str | None = None
    adapter: int | None = None
    pictures: tuple[tuple[int, str], ...] = ()  # offset, name

    def varied(self, random: Random) -> Voice:
        """Return another one that differs in one thing."""
        match random.randrange(3):
            case 0:
                return replace(self, salt=random.choice([salt for salt in (None, "a", "b") if salt != self.salt]))
            case 1:
                others = [number for number in (None, 0, 0, 1, 1, 2) if number != self.adapter]
                return replace(self, adapter=random.choice(others))
        pictures = list(self.pictures)
        if pictures and random.random() < 0.5:  # another picture in the same place
            offset, name = pictures.pop()
            pictures.append((offset, random.choice([other for other in PICTURES if other != name])))
        else:
            after = pictures[-1][0] + PICTURES[pictures[-1][1]] if pictures else 0
            pictures.append((after + random.randrange(3 * BLOCK), random.choice(list(PICTURES))))
        return replace(self, pictures=tuple(pictures))


def voices(random: Random) -> list[Voice]:
    """Return some that requests share, each of which differs in one thing from another one."""
    drawn = [Voice()]
    for _ in range(random.randrange(5)):
        drawn[0] = drawn[0].varied(random)
    for _ in range(3):
        drawn.append(random.choice(drawn).varied(random))
    return drawn


class MixedEngine(ScriptedEngine):
    """`add` draws a voice, and a priority if there are any. `folder` has the adapters."""

    def __init__(
        self,
        *arguments: Any,
        random: Random,
        choices: Sequence[Voice],
        adapters: Path,
        priorities: bool,
        **options: Any,
    ) -> None:
        self._random = random
        self._choices = choices
        self._priorities = priorities
        self.misread = 0
        self.voices: dict[str, Voice] = {}  # by request
        self._chains: dict[str, list[bytes]] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments, **options)
        self.scheduler.max_num_encoder_input_tokens = EMBEDS_MAX
        self.scheduler.encoder_cache_manager = EncoderCacheManager(EMBEDS_MAX)
        if priorities:
            set_priorities(self, random.choice((0, 2 * BLOCK, 4 * BLOCK)))
        self._content_of = dict[str, bytes]()
        self._loras: list[LoRARequest] = []
        assert self.adapters
        for number, (name, folder) in enumerate(ADAPTERS, 1):
            path = adapters / folder
            path.mkdir(exist_ok=True)
            content = self._content_of[str(path)] = folder.encode()
            if not (path / "adapter").exists():
                (path / "adapter").write_bytes(content)
            self._loras.append(LoRARequest(name, number, str(path)))
            assert known(self, self._loras[-1])

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **kwargs: Any) -> str:
        voice, random = self._random.choice(self._choices), self._random
        items = [picture(offset, PICTURES[name], name) for offset, name in voice.pictures]
        items = [item for item in items if item.mm_position.offset + item.mm_position.length <= len(prompt)]
        kwargs |= {"cache_salt": voice.salt, "mm_features": items or None}
        if voice.adapter is not None:
            kwargs["lora_request"] = self._loras[voice.adapter]
        if self._priorities:
            long = len(prompt) > 6 * BLOCK
            kwargs["priority"] = 3 * long if random.random() < 0.5 else random.randrange(4)
        request_id = super().add(prompt, max_tokens, **kwargs)
        self.voices[request_id] = voice
        return request_id

    def content(self, request_id: str) -> bytes:
        """Return the content of a request's adapter."""
        lora = self.requests[request_id].lora_request
        return b"" if lora is None else self._content_of[lora.lora_path]

    def prefix(self, request_id: str) -> Prefix:
        """Return what its KV follows from, besides its adapter. Any thread may ask."""
        with self._lock:
            request, tokens = self.requests[request_id], list(self.tokens[request_id])
            chain = self._chains.setdefault(request_id, [])
            for at in range(len(chain), len(tokens)):
                shown = [
                    (item.identifier, at - item.mm_position.offset)
                    for item in request.mm_features or ()
                    if 0 <= at - item.mm_position.offset < item.mm_position.length
                ]
                before = chain[-1] if chain else repr(request.cache_salt).encode()
                chain.append(blake2b(before + repr((tokens[at], shown)).encode(), digest_size=16).digest())
        return lambda count: chain[count - 1 : count]

    def _prefix(self, request_id: str) -> Prefix:
        return self.prefix(request_id)

    def _contents(self, rank: int, request_id: str) -> tuple[bytes, Sequence[bytes]]:
        if (lora := self.requests[request_id].lora_request) is not None:
            assert self.adapters[rank].content(lora) == self.content(request_id)
        return self.content(request_id), [self.content(request_id)]

    def _misread(self, request_id: str, what: str) -> bytes:
        """With priorities, it may be vLLM's own hit. What is computed on it is wrong, too, and must not be stored."""
        if not (self._priorities and NAMES_BEFORE_COMPUTING):
            return super()._misread(request_id, what)
        self.misread += 1
        return f"wrong {next(_wrong)}".encode()


_wrong = itertools.count()
