"""A vLLM server as its users see it: completions by HTTP, its limits and its counters of cached tokens."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from kvdepot.core.errors import InvalidArgument, NotFound

_BYTES_MAX: Final = 64 << 20
_COUNTER: Final = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_BLOCKS: Final = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)


_FAILED: Final = re.compile(rb'"success"\s*:\s*false')


class EngineBenchError(NotFound):
    """The server does not answer, or refuses what a measurement needs."""

    default_advice = "see the log of the vLLM server"


class _NotOfferedError(EngineBenchError):
    """The server has no such path."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Tokens of prompts that the server did not compute: its own cache had them, or the connector."""

    own: float = 0.0
    external: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(self.own + other.own, self.external + other.external)

    def __sub__(self, other: Counters) -> Counters:
        return Counters(self.own - other.own, self.external - other.external)


class EngineServer:
    """One server. Everything raises EngineBenchError."""

    def __init__(self, url: str, *, api_key: str = "", timeout_seconds: float = 600.0) -> None:
        """Make no connection yet. Raise InvalidArgument for what is no URL."""
        try:
            parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host = ""
        if not self._host or parts.scheme not in ("http", "https"):
            raise InvalidArgument(f"{url!r} is no URL of a server", advice="for example http://localhost:8000")
        self._tls = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_seconds = timeout_seconds
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"  # without a password

    def model(self) -> tuple[str, int]:
        """Return the model's name and the most tokens of a request."""
        try:
            found = json.loads(self._asked("GET", "/v1/models"))["data"]
            return str(found[0]["id"]), int(found[0].get("max_model_len") or 0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineBenchError(f"{self.url} names no model", advice="name the URL of a vLLM") from error

    def ask(self, model: str, tokens: list[int]) -> float:
        """Return the seconds until the first token of an answer to this prompt."""
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        self._asked("POST", "/v1/completions", body)
        return time.perf_counter() - began

    def reset_own_cache(self) -> bool:
        """Have the engine forget its own prefix cache. Return False if the server does not offer that."""
        try:
            answer = self._asked("POST", "/reset_prefix_cache")
        except _NotOfferedError:
            return False
        if _FAILED.search(answer):
            raise EngineBenchError("the engine could not reset its prefix cache: it serves others", advice="try later")
        return True

    def counters(self) -> Counters:
        found: dict[str, float] = {}
        for name, value in _COUNTER.findall(self._asked("GET", "/metrics").decode(errors="replace")):
            found[name] = found.get(name, 0.0) + float(value)
        return Counters(
            found.get("prefix_cache_hits", 0.0),
            found.get("external_prefix_cache_hits", 0.0),
        )

    def own_cache_tokens(self) -> int:
        """Return how many tokens the engine's own cache holds, at most; 0 if the server does not say."""
        match = _BLOCKS.search(self._asked("GET", "/metrics").decode(errors="replace"))
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[1])) if match else {}
        blocks, block_tokens = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        return int(blocks) * int(block_tokens) if blocks.isdecimal() and block_tokens.isdecimal() else 0

    def _asked(self, verb: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the body of an answer that is a success."""
        connection = self._connection()
        data = None if body is None else json.dumps(body)
        try:
            connection.request(verb, self._path + path, data, self._headers | {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read(_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise EngineBenchError(f"{self.url} does not answer: {error}", advice="name the URL of a vLLM") from error
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            said = content[:300].decode(errors="replace")
            kind = _NotOfferedError if answer.status == http.client.NOT_FOUND else EngineBenchError
            raise kind(f"{self.url}{path} answers {answer.status}: {said}")
        return content

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_seconds, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
