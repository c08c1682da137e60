"""`kvdepotctl bench engine` at a real vLLM server: prompts by HTTP, its own counters, its own cache lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from demo.engine import EngineOptions, depot_connector
from demo.toys import DENSE, make_toy
from tests.rigs import ports
from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.vllm_server import wait_serving

PROMPTS = 4


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(ram="1GiB") as running:
        yield running


@pytest.fixture
def url(daemon: DaemonProcess, tmp_path: Path) -> Iterator[str]:
    """A server of the dense toy model, which has no tokenizer."""
    holder = ports.held()
    port = ports.port_of(holder)
    options = EngineOptions(DENSE, make_toy(DENSE, tmp_path / "toys"), depot_connector(daemon.endpoint))
    flags = {
        "--model": options.model, "--port": port, "--host": "127.0.0.1", "--max-model-len": 4096,
        "--kv-cache-memory-bytes": 1 << 28, "--kv-transfer-config": json.dumps(options.connector),
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--skip-tokenizer-init", "--enforce-eager"]
    command += [str(word) for flag in flags.items() for word in flag]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env=options.process_environment() | {"VLLM_SERVER_DEV_MODE": "1"},
        )  # fmt: skip
    try:
        wait_serving(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        holder.close()


@pytest.mark.long(seconds=120)
def test_the_prompts_of_a_real_server_come_from_kvdepot_once_its_own_cache_is_lost(
    daemon: DaemonProcess, url: str
) -> None:
    done = kvdepotctl(daemon, "bench", "engine", "--url", url, "--prompts", str(PROMPTS), "--json")
    found = json.loads(done.stdout)
    cold, own, depot = found["ways"]
    assert cold["saved"] < 0.05
    assert own["saved"] > 0.7 and depot["saved"] > 0.7
    assert found["loaded"] > 0.7, done.stdout
    assert done.returncode == (0 if found["worth"] else 1)
