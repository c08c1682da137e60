"""What the tests of `kvdepotctl size` read of vLLM is what the installed vLLM says."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import pytest

from demo.engine import ROOT
from tests.rigs.kv_cache_specs import RANKS, SPECS
from tests.rigs.patience import patient

MODELS: Final = (
    "Qwen--Qwen3-8B",
    "Qwen--Qwen3-Next-80B-A3B-Thinking",
    "deepseek-ai--DeepSeek-V3",
    "openai--gpt-oss-120b",
    "small--granite",
)
"""Full attention, two kinds of recurrent states, a latent, and sliding windows."""


@pytest.mark.requirement("P1")
@pytest.mark.long(seconds=60)
@pytest.mark.timeout(900)
def test_the_installed_vllm_has_the_kv_caches_that_are_on_file() -> None:
    command = [sys.executable, "-m", "tests.rigs.kv_cache_specs", *MODELS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(600), check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    built = json.loads(done.stdout[done.stdout.index("{\n") :])  # vLLM may print before it
    on_file = json.loads(SPECS.read_text())
    assert built == {key: on_file[key] for name in MODELS for ranks in RANKS if (key := f"{name} {ranks}")}
