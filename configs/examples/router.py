"""A router for a prefill and a decode engine that share the kvdepotd of their node. It needs Python 3.11 alone.

    python3 router.py --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002 --port 8000

The prompt goes to the prefill engine, which computes it, and whose chunks the daemon gets. Then the whole request goes
to the decode engine, which loads them. `kv_transfer_params` of the first answer tell it what is still being stored. If
the prefill engine fails, the decode engine computes the prompt too.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions")
ASKED = {"do_remote_decode": True}
"""There is nothing to pass on yet, and the answer shall bring some."""
PIECE_BYTES = 64 << 10


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request that computes the prompt of `body`, and one token."""
    request = {name: value for name, value in body.items() if name not in ("stream_options", "max_completion_tokens")}
    params = body.get("kv_transfer_params") or ASKED
    return request | {"max_tokens": 1, "stream": False, "n": 1, "kv_transfer_params": params}


def post(url: str, body: dict[str, Any], authorization: str | None) -> Any:
    """Return the open answer. Raise OSError; an answer that is an error is a urllib.error.HTTPError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": authorization} if authorization else {})
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))


class Router(BaseHTTPRequestHandler):
    """Answers one request. `prefill` and `decode` are the URLs of the engines."""

    prefill = decode = ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path not in PATHS:
            self.send_error(404)
            return
        authorization = self.headers.get("Authorization")
        try:
            with post(f"{self.prefill}{self.path}", prefill_request(body), authorization) as answer:
                params = json.load(answer).get("kv_transfer_params")
        except OSError as error:
            self.log_message("the prefill engine failed: %s", error)
            params = None
        try:
            with post(f"{self.decode}{self.path}", body | {"kv_transfer_params": params}, authorization) as answer:
                self._pass_on(answer)
        except urllib.error.HTTPError as refusal:
            self._pass_on(refusal)
        except OSError as error:
            self.send_error(502, f"the decode engine failed: {error}")

    def _pass_on(self, answer: Any) -> None:
        """Send what the decode engine sends, as it comes. The connection ends with it."""
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.end_headers()
        while piece := answer.read1(PIECE_BYTES):
            self.wfile.write(piece)
            self.wfile.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Route prompts to one engine, and their answers to another.")
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    Router.prefill, Router.decode = options.prefill.rstrip("/"), options.decode.rstrip("/")
    with ThreadingHTTPServer(("127.0.0.1", options.port), Router) as server:
        print(f"routing on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
