"""A server that speaks as much of vLLM's HTTP interface as `kvdepotctl bench engine` needs, with caches of its own."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

BLOCK_TOKENS = 16


class FakeServer:
    """Whole blocks of prompts are in the engine's cache, which forgets, and outside, as vLLM counts them.

    `outside`: whether the connector stores. `offers_reset`: the server is in developer mode.
    """

    def __init__(self, *, outside: bool = True, offers_reset: bool = True) -> None:
        self.outside, self.offers_reset = outside, offers_reset
        self.cache_blocks = 1000
        self.own: dict[tuple[int, ...], None] = {}  # prefixes of whole blocks, the oldest first
        self.stored: set[tuple[int, ...]] = set()
        self.prompts: list[list[int]] = []
        self.counted = {"prefix_cache_queries": 0, "prefix_cache_hits": 0, "external_prefix_cache_hits": 0}
        self.authorizations: set[str | None] = set()
        self.idle = True

    def __enter__(self) -> Self:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.answer(self, None)

            def do_POST(self) -> None:
                fake.answer(self, json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"))

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        self.authorizations.add(handler.headers.get("Authorization"))
        status, content = self._answer(handler.path, body)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "toy", "max_model_len": 2048}]}
        if path == "/metrics":
            lines = [f'vllm:{name}_total{{engine="0"}} {value:.1f}' for name, value in self.counted.items()]
            size = f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{self.cache_blocks}"}} 1.0'
            return 200, "\n".join([*lines, size, ""]).encode()
        if path == "/reset_prefix_cache" and self.offers_reset:
            if self.idle:
                self.own.clear()
            return 200, {"success": self.idle}
        if path == "/v1/completions" and body is not None:
            self.ask(body["prompt"])
            return 200, {"choices": [{"text": "x"}]}
        return 404, {"detail": "Not Found"}

    def ask(self, prompt: list[int]) -> None:
        self.prompts.append(prompt)
        prefixes = [tuple(prompt[:end]) for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS)]
        own = next((number for number, one in enumerate(prefixes) if one not in self.own), len(prefixes))
        external = own
        while external < len(prefixes) and prefixes[external] in self.stored:
            external += 1
        self.counted["prefix_cache_queries"] += len(prompt)
        self.counted["prefix_cache_hits"] += BLOCK_TOKENS * own
        self.counted["external_prefix_cache_hits"] += BLOCK_TOKENS * (external - own)
        for one in prefixes:
            self.own.pop(one, None)
            self.own[one] = None
        while len(self.own) > self.cache_blocks:
            del self.own[next(iter(self.own))]
        if self.outside:
            self.stored.update(prefixes)
