"""What vLLM itself says of the KV caches of the models in `tests/golden/model_configs`.

`python -m tests.rigs.kv_cache_specs [NAME ...]` builds each model without memory (torch's meta device) and prints its
specs; without names it writes them all to `tests/golden/kv_cache_specs.json`. It takes minutes, so the tests of
`kvdepotctl size` read the file. A long test compares some models with it (`tests/e2e/test_model_sizes.py`).

The published models are those of the page docs/capacity.md. Their files are from the folder
`aic-core/src/aiconfigurator_core/model_configs` of ai-dynamo/aiconfigurator (commit 095f58a5; Qwen3-Next: commit
1b7cfb10, `src/aiconfigurator/model_configs`), without keys of images and of code. `small--*` are made up: they stand
for an architecture.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIGS = GOLDEN / "model_configs"
SPECS = GOLDEN / "kv_cache_specs.json"
RANKS = (1, 2)
BLOCK_TOKENS = 128


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config


def servable_here(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the same KV caches that vLLM builds on a CPU: no quantized weights, no images."""
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if text := config.get("text_config"):  # vLLM's Qwen3.5 needs torchvision, and has Qwen3-Next's layers
        kept = {key: value for key, value in text.items() if key != "rope_parameters"}
        config = {**kept, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 8}
    if pattern := config.get("hybrid_override_pattern"):  # experts of this model need a GPU
        config["hybrid_override_pattern"] = pattern.replace("E", "-")
    return config


def specs_of(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return one line for each kind of layer: class, block in tokens, bytes of a block, window, number of layers."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(servable_here(config)))
        arguments = EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, max_model_len=8192,
            enable_prefix_caching=True, tensor_parallel_size=ranks, block_size=BLOCK_TOKENS,
            mamba_ssm_cache_dtype="float32",  # some CPUs have no other: the specs are the same on all
        )  # fmt: skip
        engine = arguments.create_engine_config()
        _start_groups(engine)
        get_tp_group().world_size = ranks  # no other rank is needed to build the layers of the first one
        with set_current_vllm_config(engine), torch.device("meta"):
            initialize_model(vllm_config=engine, model_config=engine.model_config)
        current_platform.update_block_size_for_backend(engine)
    layers = engine.compilation_config.static_forward_context.values()
    found = [one.get_kv_cache_spec(engine) for one in layers if isinstance(one, AttentionLayerBase)]
    counted = Counter(
        (type(spec).__name__, spec.block_size, spec.real_page_size_bytes, getattr(spec, "sliding_window", None) or 0)
        for spec in found
    )
    return {
        "state_dtype": str(engine.cache_config.mamba_ssm_cache_dtype),
        "layers": [[*line, count] for line, count in sorted(counted.items())],
    }


def _start_groups(engine: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    folder = tempfile.mkdtemp()
    parallel_state.init_distributed_environment(1, 0, f"file://{folder}/groups", 0, "gloo")
    engine.model_config.model_arch_config.num_experts = 1  # so that there is a group for experts
    engine.parallel_config.tensor_parallel_size = 1
    with set_current_vllm_config(engine):
        parallel_state.ensure_model_parallel_initialized(1, 1)


def main() -> None:
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1")
    names = sys.argv[1:] or sorted(path.stem for path in CONFIGS.glob("*.json"))
    found = {f"{name} {ranks}": specs_of(config_of(name), ranks) for name in names for ranks in RANKS}
    text = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()) + "\n}\n"
    if sys.argv[1:]:
        sys.stdout.write(text)
    else:
        SPECS.write_text(text)


if __name__ == "__main__":
    main()
