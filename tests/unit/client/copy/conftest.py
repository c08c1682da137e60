"""An arena for copies."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from kvdepot.client.arena_map import ArenaMap

from tests.rigs.memory_arena import make_arena


@pytest.fixture
def arena() -> Iterator[ArenaMap]:
    made, descriptor = make_arena()
    yield made
    made.close()
    os.close(descriptor)
