"""What a prefill/decode router does with conversations, in a few lines: vLLM's own proxies speak HTTP for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvdepot.client.vllm.scheduling.transfer_params import PREFIX

from tests.e2e.fleet import Fleet, Loaded

ASKED = {"do_remote_decode": True}
"""What vLLM's proxies send with the first request: there is nothing to pass on yet, and the answer shall bring some."""


@dataclass
class Conversation:
    """Two engines take turns in it. `tokens`: all that was said."""

    fleet: Fleet
    prefill: str
    decode: str
    tokens: list[int] = field(default_factory=list)
    heard: int = 0  # of these, before the latest answer
    params: dict[str, Any] = field(default_factory=lambda: dict(ASKED))  # of the latest answer

    def turn(self, said: list[int], answer_tokens: int) -> tuple[Loaded, Loaded]:
        """The user says something. The prefill engine computes it, the decode engine answers.

        Each request carries what the answer before it brought, and follows it at once.
        """
        prompt = self.tokens + said
        computed = self._ask(self.prefill, prompt, 1)
        answered = self._ask(self.decode, prompt, answer_tokens)
        self.tokens, self.heard = prompt + list(answered.tokens), len(prompt)
        return computed, answered

    def _ask(self, name: str, prompt: list[int], max_tokens: int) -> Loaded:
        engine = self.fleet.running(name)
        assert engine is not None
        loaded = self.fleet.ask(engine, prompt, max_tokens, self.params)
        assert loaded.answer.completion.params is not None
        self.params = loaded.answer.completion.params
        return loaded

    @property
    def boundary(self) -> int:
        """How far it is stored, as the engine that was asked last says."""
        return next((int(said["boundary_tokens"]) for key, said in self.params.items() if key.startswith(PREFIX)), 0)
