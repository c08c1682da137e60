"""Prompts around the boundaries of a model, of the hybrid toy above all, and what is stored and loaded of them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from demo.engine import Engine
from tests.e2e.fleet import Fleet

CHUNK = 384
Digests = dict[tuple[str, str, int, int, int], dict[str, set[str]]]
GROUPS = {0, 1, 2, 3}  # three of recurrent state, one of attention


def lengths(chunk: int) -> list[int]:
    """Return ten lengths of prompts in tokens, of which at least 79 % are whole chunks."""
    parts = [(2, 9), (2, 100), (3, 1), (3, 50), (3, 200), (4, 8), (4, 120), (5, 30), (5, 300), (7, 40)]
    return [chunk * chunks + rest for chunks, rest in parts]


LENGTHS = lengths(CHUNK)


def boundary(tokens: int, chunk: int = CHUNK) -> int:
    return (tokens - 1) // chunk * chunk


def store(fleet: Fleet, engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Compute and store prompts; their tokens when they hit the engine's own cache, the reference for loads."""
    reference = hits(engine, prompts)
    fleet.forget(engine)
    return reference


def hits(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Compute prompts; their tokens when they hit the engine's own cache."""
    block = engine.options.engine_arguments()["block_size"]
    for ids in prompts:
        engine.ask(ids)
    again = [engine.ask(ids) for ids in prompts]
    assert [one.local_tokens for one in again] == [boundary(len(ids), block) for ids in prompts]
    return [one.tokens for one in again]


def check_loads(fleet: Fleet, engine: Engine, prompts: list[list[int]], reference: list[tuple[int, ...]]) -> None:
    """P4: every prompt's boundary comes from the daemon, at least 79 % of it, and the tokens are equal."""
    chunk = engine.options.toy.chunk_tokens
    boundaries = [boundary(len(ids), chunk) for ids in prompts]
    loaded = [fleet.ask(engine, ids) for ids in prompts]
    assert [one.external_tokens for one in loaded] == boundaries, fleet.told()
    assert [one.served.tokens for one in loaded] == boundaries
    assert [one.tokens for one in loaded] == reference
    share = [one.external_tokens / len(ids) for one, ids in zip(loaded, prompts, strict=True)]
    assert min(share) >= 0.79
    assert min(part for part, ids in zip(share, prompts, strict=True) if len(ids) > 7 * chunk) >= 0.95


def digests_by_place(lines: list[dict[str, Any]]) -> Digests:
    """By block of an object: the digests of the ranks' own blocks, when they stored and when they loaded it."""
    digests: Digests = defaultdict(lambda: {"stored": set(), "loaded": set()})
    for line in lines:
        for number, digest in enumerate(line["blocks"]):
            place = (line["key"], line["kind"], line["rank"], line["group"], line["first_block"] + number)
            digests[place][line["event"]].add(digest)
    return digests


def wrong(digests: Digests) -> Digests:
    """What was loaded without having been stored so."""
    return {place: found for place, found in digests.items() if not found["loaded"] <= found["stored"]}
