"""The pictures of the live page in docs: a real daemon under made-up chats, in a real browser.

`python -m tests.rigs.screenshots DIR` writes `live-page.png` and `live-page-phone.png`. The chats go on for some
minutes, because the page has one bar a minute.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import random
import time
from pathlib import Path
from typing import Final

from kvdepot.core.calls import KEY_BYTES, AcquireOutcome, EndRequestCall, RequestEnd, ReserveOutcome, TokenReport
from kvdepot.core.misses import MissReason
from kvdepot.proto.methods import encode

from tests.rigs.browser import Browser
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient
from tests.rigs.raw_client import CALL_SECONDS, CHUNK_TOKENS, RawEngine, keys_of

SHOTS: Final = (("live-page", 1100, False), ("live-page-phone", 390, True))
"""Name, width in pixels, dark."""
_CHATS: Final = 60
_CHUNKS_MAX: Final = 24
_PAUSE_SECONDS: Final = 0.1
_TOKENS_PER_SECOND: Final = 8000  # of the prefill that loads save
_CONFIG: Final = """
[[tier]]
name = "nvme"
kind = "disk"
path = "{path}"
capacity = "2GiB"
write = "commit"
"""


class Chats:
    """Users who come back with longer prompts; some more often than others. Half of the last turn was generated."""

    def __init__(self, engine: RawEngine) -> None:
        self._engine = engine
        self._chunks = dict.fromkeys(range(_CHATS), 0)
        self._names = dict.fromkeys(range(_CHATS), 0)
        self._turns = 0

    def turn(self) -> None:
        """Look a prompt up, load what is there, store the rest, and report it as the connector does."""
        self._turns += 1
        chat = min(int(random.expovariate(1 / 12)), _CHATS - 1)
        if self._chunks[chat] >= _CHUNKS_MAX:
            self._chunks[chat], self._names[chat] = 0, self._turns  # a new chat
        self._chunks[chat] += random.randint(1, 4)
        keys, request = _keys(f"{chat}-{self._names[chat]}", self._chunks[chat]), f"chatcmpl-{self._turns}"
        engine, began = self._engine, time.monotonic()
        found = engine.locate(keys, request) // CHUNK_TOKENS
        tier = engine.tier_of(keys) if found else ""
        if found:
            lease, outcome, _ = engine.acquire(keys[:found], request)
            if outcome is AcquireOutcome.GRANTED:
                engine.release(lease)
            else:
                found = 0
        self._store(keys, found, request)
        prompt, loaded = len(keys) * CHUNK_TOKENS + random.randint(1, CHUNK_TOKENS), found * CHUNK_TOKENS
        end = RequestEnd(0, loaded, "" if loaded else MissReason.UNKNOWN, prompt, tier, time.monotonic() - began)
        report = TokenReport(self._turns, prompt, 0, {tier: loaded} if loaded else {}, loaded / _TOKENS_PER_SECOND)
        call = encode(EndRequestCall(engine.session, request, end, report))
        engine.stub.EndRequest(call, timeout=patient(CALL_SECONDS))

    def _store(self, keys: list[bytes], first: int, request: str) -> None:
        lease, outcomes, extents = self._engine.reserve(keys, request=request, first=first)
        if set(outcomes) == {ReserveOutcome.GRANTED}:
            self._engine.write(keys[first:], extents)
            self._engine.commit(lease, len(outcomes))
        else:
            self._engine.abandon(lease)


def _keys(prompt: str, chunks: int) -> list[bytes]:
    """Return keys like those of an engine, which are hashes: the what-if curve takes a sample of their values."""
    return [hashlib.blake2b(key, digest_size=KEY_BYTES).digest() for key in keys_of(prompt, chunks)]


def shoot(browser: Browser, url: str, file: Path, *, width: int, dark: bool) -> None:
    """Write the whole page as a picture."""
    browser.open(url, width=width, dark=dark)
    browser.wait_for("document.getElementById('verdict')?.textContent.startsWith('HEALTH_')")
    height = browser.value("document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    picture = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    file.write_bytes(base64.b64decode(picture["data"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0, help="of chats (default: 240)")
    options = parser.parse_args()
    daemon = DaemonProcess(ram="512MiB")
    daemon.config = _CONFIG.format(path=daemon.directory / "nvme")
    with daemon, RawEngine(daemon.socket) as engine, Browser() as browser:
        chats, until = Chats(engine), time.monotonic() + options.seconds
        while time.monotonic() < until:
            chats.turn()
            time.sleep(_PAUSE_SECONDS)
        for name, width, dark in SHOTS:
            file = options.directory / f"{name}.png"
            shoot(browser, f"{daemon.metrics}/?{name}", file, width=width, dark=dark)
            print(f"{file}: {file.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
