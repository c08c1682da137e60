"""What `kvdepotctl size` prints: golden screens, the same at each width, JSON, and errors.

`python -m tests.unit.client.ctl.sizing.test_command` writes the golden screens. Look at them before they are committed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from kvdepot.client.ctl.app import cli
from kvdepot.client.ctl.commands import size as size_module
from kvdepot.client.ctl.doctor.host import Host

from tests.rigs.kv_cache_specs import CONFIGS

GOLDEN: Final = Path(__file__).parents[4] / "golden/size"
SCREENS: Final = {
    "dense": ["Qwen--Qwen3-8B", "--sessions", "200"],
    "dense-cpu": ["Qwen--Qwen3-8B", "--device", "cpu"],
    "hybrid": ["Qwen--Qwen3-Next-80B-A3B-Thinking", "--tp", "4", "--sessions", "200", "--turns", "8"],
    "hybrid-cpu": ["Qwen--Qwen3-Next-80B-A3B-Thinking", "--device", "cpu", "--retention", "1152"],
    "hybrid-retention": ["Qwen--Qwen3-Next-80B-A3B-Thinking", "--retention", "544"],
    "latent": ["deepseek-ai--DeepSeek-V3", "--tp", "8", "--tokens", "100000", "--kv-cache-dtype", "fp8"],
    "short": ["Qwen--Qwen3-8B", "--tokens", "200"],
    "windows": ["openai--gpt-oss-120b", "--tokens", "128k"],
    "windows-alone": ["small--mistral"],
    "windows-retention": ["openai--gpt-oss-120b", "--retention", "512"],
}


def printed(words: list[str], width: int = 80) -> str:
    """Return what it prints for vLLM on GPUs, unless a device is asked for."""
    return printed_here([words[0], "--device", "gpu", *words[1:]], width)


def printed_here(words: list[str], width: int = 80) -> str:
    command = ["size", str(CONFIGS / f"{words[0]}.json"), *words[1:]]
    result = CliRunner().invoke(cli, command, catch_exceptions=False, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output.replace(str(CONFIGS), "/models/m")


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_as_it_was_looked_at(name: str, width: int) -> None:
    text = printed(SCREENS[name], width)
    assert text == (GOLDEN / f"{name}.txt").read_text()
    assert max(map(len, text.partition("vllm serve")[0].splitlines())) <= 80, "but for the command"


def test_json_has_what_was_asked_and_what_was_found() -> None:
    found = json.loads(printed(["Qwen--Qwen3-8B", "--json", "--sessions", "3"]))
    assert (found["architecture"], found["ranks"], found["tokens"], found["sessions"]) == (
        "Qwen3ForCausalLM", 1, 32768, 3,
    )  # fmt: skip
    assert (found["block_tokens"], found["chunk_tokens"], found["attention_bytes"]) == (16, 256, 36 << 20)
    assert found["all_bytes"] == 3 * found["session_bytes"] == 3 * 128 * (36 << 20)


def test_json_has_the_flags_as_they_are_typed() -> None:
    found = json.loads(printed(["Qwen--Qwen3-8B", "--json", "--tp", "2", "--chunk-tokens", "512"]))
    transfer = (
        '{"kv_connector":"KVDepotConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute",'
        '"kv_connector_extra_config":{"chunk_tokens":512}}'
    )
    assert found["vllm_flags"] == ["--tensor-parallel-size 2", f"--kv-transfer-config '{transfer}'"]


@pytest.mark.parametrize(
    ("file", "line", "block_tokens"),
    [
        ("nvidia0", "GPUs, as this host has", 16),
        ("kfd", "GPUs, as this host has", 16),
        ("null", "CPUs: this host has no GPU; --device gpu is for others", 128),
    ],
)
def test_the_device_is_this_host_s_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, line: str, block_tokens: int
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / file).touch()
    monkeypatch.setattr(size_module, "Host", lambda: Host(tmp_path))
    lines = printed_here(["Qwen--Qwen3-8B"]).splitlines()
    assert lines[:2] == [f"Qwen3ForCausalLM: 1 rank, blocks of {block_tokens} tokens", f"device      {line}"]
    assert ("  --block-size 128 \\" in lines) == (block_tokens == 128)
    found = json.loads(printed_here(["Qwen--Qwen3-8B", "--json"]))
    assert (found["device"], found["block_tokens"]) == ("gpu" if block_tokens == 16 else "cpu", block_tokens)


def test_what_is_asked_for_comes_before_the_device() -> None:
    asked = ["--device", "cpu", "--block-size", "64", "--state-dtype", "bfloat16", "--json"]
    found = json.loads(printed_here(["Qwen--Qwen3-Next-80B-A3B-Thinking", *asked]))
    assert (found["state_dtype"], found["block_tokens"]) == ("bfloat16", 576)
    small = json.loads(printed_here(["Qwen--Qwen3-8B", "--device", "cpu", "--block-size", "16", "--json"]))
    assert small["block_tokens"] == 16


def test_a_count_of_tokens_that_is_none_is_wrong_usage() -> None:
    result = CliRunner().invoke(cli, ["size", "x", "--tokens", "32kb"])
    assert result.exit_code == 2 and "32768, or 32k" in result.output


def test_it_imports_neither_vllm_nor_torch_and_asks_no_daemon() -> None:
    program = (
        "import sys; from kvdepot.client.ctl.app import cli; "
        f"cli(['--endpoint', 'unix:///nowhere/k.sock', 'size', {str(CONFIGS / 'Qwen--Qwen3-8B.json')!r}], "
        "standalone_mode=False); assert not {'vllm', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


if __name__ == "__main__":
    for screen, arguments in SCREENS.items():
        (GOLDEN / f"{screen}.txt").write_text(printed(arguments))
