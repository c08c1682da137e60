"""How often the second request of the quick start hits on a busy machine: `python -m tests.walk --tries 100 --load 20`.

Each try is a prompt of its own. It is sent, stored, forgotten by vLLM, and sent again. `--load` processes use the
processors meanwhile. A second request that was computed is explained. Exit code 1: more than one of 100 was computed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from demo.toys import prompt
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import status_of
from tests.walk.walk import Walk

TOKENS = 2000
HIT_TOKENS = 1792
MISSED_SHARE_MAX = 0.01


def tried(walk: Walk, number: int) -> bool:
    """Return whether the second of two equal requests was loaded. Raise AssertionError if its tokens differ."""
    sent = prompt(TOKENS, f"try {number}")
    objects = status_of(walk.socket).tiers[0].objects
    first = walk.complete(sent)
    wait_until(lambda: status_of(walk.socket).tiers[0].objects >= objects + 7, "it is stored", 300, pause_seconds=0.2)
    walk.forget()
    before = walk.metric("vllm:external_prefix_cache_hits")
    second = walk.complete(sent)
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"], f"try {number}: other tokens"
    hit = walk.metric("vllm:external_prefix_cache_hits") - before >= HIT_TOKENS
    if not hit:
        print(walk.ask("explain", second["id"]), flush=True)
    return hit


def exit_code(tries: int, hits: int) -> int:
    """Return 1 if more than one of 100 second requests was computed."""
    return int(tries - hits > MISSED_SHARE_MAX * tries)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.walk", description=__doc__)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--load", type=int, default=20)
    options = parser.parse_args()
    with ExitStack() as stack:
        walk = stack.enter_context(Walk(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd")))))
        walk.type("python3 -m venv")
        walk.type("export PATH=")
        walk.serve_daemon()
        walk.install_connector()
        walk.serve_vllm()
        for _ in range(options.load):
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        hits, load_max = 0, 0.0
        for number in range(options.tries):
            hits += tried(walk, number)
            load_max = max(load_max, load := os.getloadavg()[0])
            print(f"{number + 1} tries, {hits} hit, load {load:.0f}, at most {load_max:.0f}", flush=True)
    return exit_code(options.tries, hits)


if __name__ == "__main__":
    sys.exit(main())
