"""Another layout of the KV caches of a connector, and whether it still loads."""

from __future__ import annotations

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import cold, prompt


def turn_layout(engine: ScriptedEngine) -> None:
    """Blocks of another shape, and so other facts: 32 bytes by two, which only the namespace tells apart."""
    for worker, memory in zip(engine.workers, engine.memories, strict=True):
        caches = {name: cache.view(*cache.shape[:-1], 2, -1) for name, cache in memory.caches.items()}
        worker.register_kv_caches(caches)


def works(engine: ScriptedEngine) -> None:
    """It stores, and is served that, and has nothing left of before."""
    engine.run()
    engine.reset()
    for seed in (11, 12):
        tokens = prompt(4.5, seed)
        assert engine.generate(tokens) == cold(tokens)
        engine.reset()
        assert engine.generate(tokens) == cold(tokens)
        assert list(engine.hits.values())[-1] == 4 * BLOCK
        engine.reset()
    engine.assert_clean()
