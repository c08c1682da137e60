"""Whether KV of pictures and videos depends on the steps that compute it, by vLLM's settings.

The names of a model's settings are compared with vLLM's when a connector is made. vLLM makes no settings of a model
with pictures here, because it needs torchvision for that.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvdepot.client.vllm.identity.items import items_depend_on_steps
from vllm.config import MultiModalConfig

ALL, PRUNED = MultiModalConfig(), MultiModalConfig(video_pruning_rate=0.5)


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(
    ("both_ways", "multimodal", "positions_of_pictures", "depends"),
    [
        (True, ALL, False, True),
        (True, PRUNED, False, True),
        (False, ALL, True, False),
        (False, PRUNED, True, True),
        (False, PRUNED, False, False),  # positions are the tokens' numbers
        (False, None, False, False),
    ],
)
def test_pictures_that_attend_both_ways_and_pruned_videos_depend_on_steps(
    both_ways: bool, multimodal: MultiModalConfig | None, positions_of_pictures: bool, depends: bool
) -> None:
    model = SimpleNamespace(
        is_mm_prefix_lm=both_ways, multimodal_config=multimodal, uses_mrope=positions_of_pictures
    )  # fmt: skip
    assert items_depend_on_steps(SimpleNamespace(model_config=model)) == depends
