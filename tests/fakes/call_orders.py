"""In which order vLLM's model runners call a connector's worker side in a step, one table each (vLLM 0.32 and 0.33).

`tests/unit/client/vllm/scheduling/test_call_orders.py` runs the runners' own code with a recorder in the connector's
place, and compares.
"""

from __future__ import annotations

from typing import Final

FORWARD: Final = "forward"
POSTPROCESS: Final = "postprocess"
"""After sampling: with drafts, the state at the last boundary is copied into the boundary's block."""
DRAFT_FORWARD: Final = "draft_forward"

V1: Final = (
    "handle_preemptions",  # v1/worker/gpu_model_runner.py, execute_model
    # v1/worker/kv_connector_model_runner_mixin.py, _get_kv_connector_output
    "bind_connector_metadata",
    FORWARD,
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
V1_DEFERRED: Final = (
    # The same with `defer_finalize`: a draft model's forward is part of the step.
    *(call for call in V1 if call not in ("wait_for_save", "clear_connector_metadata")),
    POSTPROCESS,  # sample_tokens
    DRAFT_FORWARD,
    "wait_for_save",  # finalize_kv_connector
    "clear_connector_metadata",
)
V2: Final = (
    # v1/worker/gpu/kv_connector.py, ActiveKVConnector: pre_forward, finish_forward, post_forward
    "handle_preemptions",
    "bind_connector_metadata",
    FORWARD,
    "finish_forward",
    # v1/worker/gpu/model_runner.py, sample_tokens, up to 0.32: a draft model's forward is before `post_forward`
    POSTPROCESS,
    DRAFT_FORWARD,
    "start_load_kv",  # with keyword arguments
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
V2_DEFERRED: Final = (
    # The same from 0.33 on, with a drafter: `post_forward(defer_finalize=True)`. Stages but the last do not defer.
    *(call for call in V2 if call not in (POSTPROCESS, DRAFT_FORWARD, "wait_for_save", "clear_connector_metadata")),
    POSTPROCESS,
    DRAFT_FORWARD,
    "wait_for_save",  # finalize_step
    "clear_connector_metadata",
)
ORDERS: Final = {"v1": V1, "v1-deferred": V1_DEFERRED, "v2": V2, "v2-deferred": V2_DEFERRED}
V2_LOAD_ARGUMENTS: Final = ("scheduler_output", "request_state_indices", "request_ids", "num_tokens")
