"""An engine in a process of its own whose rank cannot map the arena, for tests that kill it.

`python -m tests.rigs.streaming_engine ENDPOINT ENGINE_ID`: reserves, and stores the same bytes into what it
reserved again and again, until it is killed.
"""

from __future__ import annotations

import sys

from kvdepot.client.attachment import Transport
from kvdepot.client.copy.base import Direction

from tests.rigs.engine_client import EngineClient, prompt_keys


def main(endpoint: str, engine_id: str) -> None:
    client = EngineClient(endpoint, engine_id, transport=Transport.STREAM).start()
    _, granted = client.reserve(prompt_keys(engine_id, 8))
    assert client.copy(granted, 0, Direction.STORE)
    print("storing", flush=True)
    while True:
        client.copy(granted, 0, Direction.STORE)


if __name__ == "__main__":
    main(*sys.argv[1:])
