"""The page docs/model-sizes.md: what common models take. `python -m tests.rigs.model_sizes` prints it."""

from __future__ import annotations

from collections.abc import Iterator

from kvdepot.client.ctl.sizing.architectures import describe_model
from kvdepot.client.ctl.sizing.geometry import Engine
from kvdepot.client.ctl.sizing.sizes import Load, sizes
from kvdepot.core.units import size_text

from tests.rigs.kv_cache_specs import CONFIGS, config_of

TOKENS = 32768
SESSIONS = 100
_HEAD = f"""\
# Sizes of common models

`kvdepotctl size` computes these rows, on vLLM's defaults for GPUs and one rank. `make docs` generates this page.
[Sizing](capacity.md#before-the-first-run) says how to size another model, several ranks or an fp8 cache.

- **Chunk:** its tokens, and the bytes of its attention. Windows are an object of their own.
- **Checkpoint:** the state of a hybrid model at the end of a prompt.
- **Session:** {TOKENS:,} tokens with one checkpoint.
- **RAM:** `[ram] capacity` for {SESSIONS} such sessions that share nothing.

| model | chunk | attention | windows | checkpoint | session | RAM |
|---|---|---|---|---|---|---|
"""
_FOOT = """
Several ranks together take the same, with two exceptions. Ranks beyond the number of KV heads each store a copy of a
head. Hybrid models have smaller chunks. The `config.json` of each model lies in `tests/golden/model_configs`.
`tests/rigs/kv_cache_specs.py` names their source.

The layers of each are compared with vLLM's own KV-cache specs. vLLM builds the models without weights, on a CPU:

- Qwen3.5 is built as Qwen3-Next, which has the same layers. vLLM's own class needs the packages for images.
- Nemotron is built with plain layers in place of experts, which need a GPU and have no KV cache.
- FP8 weights are left out.
"""


def published() -> list[str]:
    """Return the names of the models that exist, which are `OWNER--MODEL`."""
    return sorted((path.stem for path in CONFIGS.glob("*.json") if not path.stem.startswith("small--")), key=str.lower)


def markdown() -> str:
    """Return the page."""
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in _rows()) + _FOOT


def _rows() -> Iterator[list[str]]:
    for name in published():
        found = sizes(describe_model(config_of(name)), Engine(), Load(TOKENS, SESSIONS))
        parts = (found.attention_bytes, found.window_bytes, found.state_bytes, found.session_bytes)
        yield [
            name.partition("--")[2],
            f"{found.chunk_tokens}",
            *(size_text(size_bytes) if size_bytes else "" for size_bytes in parts),
            f"{found.ram_capacity_bytes >> 30} GiB",
        ]


if __name__ == "__main__":
    print(markdown(), end="")
