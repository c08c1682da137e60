"""Configurations of speculative decoding, as vLLM resolves them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from vllm.config import SpeculativeConfig

FROM_TOKENS = ("ngram", "ngram_gpu")
"""Methods without a draft model. `suffix` needs a package for its own."""


def drafting(config: Any, method: str, drafter: Path | None = None, draft_tokens: int = 2, **options: Any) -> Any:
    """Return a copy of an engine's configuration that speculates.

    Args:
        config: An engine's configuration, without speculative decoding.
        method: vLLM's name of it. Methods with a drafter of their own architecture take the one of `draft_model`:
            to resolve another one takes seconds.
        drafter: The drafter's folder; None: none.
        draft_tokens: Draft tokens of a step.
        options: Further settings of `SpeculativeConfig`.
    """
    speculative = SpeculativeConfig(
        method=method if method in FROM_TOKENS else "draft_model" if drafter is not None else "ngram",
        model=str(drafter) if drafter is not None else None,
        num_speculative_tokens=draft_tokens,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
        **options,
    )
    object.__setattr__(speculative, "method", method)
    config = copy.copy(config)
    object.__setattr__(config, "speculative_config", speculative)
    return config
