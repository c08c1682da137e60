"""What vLLM's settings say of pictures, clips and sounds: whether their KV can be named (docs/vllm.md)."""

from __future__ import annotations

from typing import Any


def counts_items(vllm_config: Any) -> bool:
    """Whether the content of pictures, clips and sounds does not say what is computed from them.

    vLLM names them by the number of their request (`_process_mm_uuids`), and the count begins again with each process.
    Or a connector brings encoder outputs of other engines by the picture alone. Their encoders may have other weights.
    """
    if vllm_config.ec_transfer_config is not None:
        return True
    multimodal = vllm_config.model_config.multimodal_config
    cached = vllm_config.cache_config.enable_prefix_caching
    return multimodal is not None and multimodal.mm_processor_cache_gb == 0 and not cached


def items_depend_on_steps(vllm_config: Any) -> bool:
    """Whether KV of and after pictures, clips and sounds depends on the steps that compute it, which no hash covers.

    Where tokens of a picture attend to later ones of it, a step that ends within it computes other KV. vLLM prevents
    such steps, but not for a request that resumes within the picture. And where videos are pruned, vLLM learns the
    positions of what follows from the encoder, which does not run for a request that resumes after the video.
    """
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    if multimodal is None:
        return False
    return bool(model.is_mm_prefix_lm or (model.uses_mrope and multimodal.is_multimodal_pruning_enabled()))
