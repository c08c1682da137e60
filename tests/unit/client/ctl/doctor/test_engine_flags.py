"""`kvdepotctl doctor --engine`: the flags of a running vLLM, and the value that each should have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.ctl.doctor.engine_flags import check_flags
from kvdepot.client.ctl.doctor.engine_process import EngineProcess, engine_process, parse_command
from kvdepot.client.ctl.doctor.findings import Finding, Outcome
from kvdepot.client.ctl.doctor.host import Host
from kvdepot.client.ctl.sizing.architectures import describe_model
from kvdepot.client.ctl.sizing.flags import engine_flags
from kvdepot.client.ctl.sizing.geometry import Engine
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.vllm.base.engine_rules import transfer_config
from kvdepot.core.errors import InvalidArgument, NotFound

from tests.rigs.kv_cache_specs import CONFIGS, config_of

DAEMON = Endpoint("/run/d.sock")
DENSE, HYBRID = "Qwen--Qwen3-8B", "Qwen--Qwen3-Next-80B-A3B-Thinking"
ENVIRONMENT = {"KVDEPOT_ENDPOINT": str(DAEMON)}


def model_folder(directory: Path, name: str) -> str:
    shutil.copy(CONFIGS / f"{name}.json", directory / "config.json")
    return str(directory)


def transfer(**changes: Any) -> str:
    return json.dumps(transfer_config() | changes)


def checked(words: list[str], environment: dict[str, str] | None = None) -> dict[str, Finding]:
    model, flags = parse_command(["python", "/venv/bin/vllm", "serve", *words])
    process = EngineProcess(7, model, flags, ENVIRONMENT if environment is None else environment)
    return {one.check: one for one in check_flags(process, DAEMON)}


def wrong(findings: dict[str, Finding]) -> dict[str, Outcome]:
    return {name: one.outcome for name, one in findings.items() if one.outcome in (Outcome.WARN, Outcome.FAIL)}


@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_flags_that_size_prints_are_good(tmp_path: Path, name: str, ranks: int) -> None:
    flags = engine_flags(describe_model(config_of(name)), Engine(ranks))
    words = [word.strip("'") for flag in flags for word in str(flag).split(" ", 1)]
    findings = checked([model_folder(tmp_path, name), *words])
    assert wrong(findings) == {}
    assert findings["failed loads"].outcome is Outcome.OK


def test_the_flags_of_a_hybrid_model_are_named_with_their_values(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, HYBRID)
    findings = checked([folder, "--kv-transfer-config", transfer(), "--mamba-cache-mode", "none"])
    assert wrong(findings) == {"mamba-cache-mode": Outcome.FAIL, "block-size": Outcome.WARN}
    assert findings["mamba-cache-mode"].fix == "set --mamba-cache-mode align"
    assert findings["block-size"].fix == "set --block-size 544"
    short = checked([folder, "--kv-transfer-config", transfer(), "--mamba-cache-mode", "align", "--block-size", "128"])
    assert wrong(short) == {"block-size": Outcome.FAIL} and short["block-size"].fix == "set --block-size 640"
    kept = checked([folder, "--kv-transfer-config", transfer(), "--mamba-cache-mode", "align", "--block-size", "544",
                    "--prefix-cache-retention-interval=544"])  # fmt: skip
    assert wrong(kept) == {"max-num-batched-tokens": Outcome.WARN}


@pytest.mark.parametrize(
    ("words", "check", "fix"),
    [
        ([], "connector", "KVDepotConnector"),
        (["--kv-transfer-config", "{"], "connector", "KVDepotConnector"),
        (["--kv-transfer-config", transfer(kv_connector="NixlConnector")], "connector", "'KVDepotConnector'"),
        (["--kv-transfer-config", transfer(kv_load_failure_policy="fail")], "failed loads", "'recompute'"),
        (["--kv-transfer-config", '{"kv_connector":"KVDepotConnector"}'], "failed loads", "'recompute'"),
        (["--kv-transfer-config", transfer(kv_connector_extra_config={"chunk": 1})], "connector settings", "did you"),
        (["--kv-transfer-config", transfer(kv_role="kv_producer")], "connector settings", "kv_both"),
        (["--no-enable-prefix-caching"], "prefix caching", "--enable-prefix-caching"),
        (["--enable_prefix_caching=false"], "prefix caching", "--enable-prefix-caching"),
        (["-dcp", "2"], "ranks of the engine", "decode_context_parallel_size to 1"),
        (["--nnodes", "2"], "ranks of the engine", "one node"),
        (["--prefix-caching-hash-algo", "xxhash"], "prefix hashes", "PYTHONHASHSEED"),
        (["--speculative-config", '{"method": "medusa"}'], "speculative decoding", "switch"),
        (["--speculative-config.method", "dflash"], "speculative decoding", "switch"),
    ],
)
def test_a_wrong_flag_fails_with_the_right_value(tmp_path: Path, words: list[str], check: str, fix: str) -> None:
    finding = checked([model_folder(tmp_path, DENSE), *words])[check]
    assert finding.outcome is Outcome.FAIL and fix in finding.fix


def test_a_connector_of_several_is_not_judged(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, DENSE)
    findings = checked([folder, "--kv-transfer-config", transfer(kv_connector="WeightedMultiConnector")])
    assert findings["connector"].outcome is Outcome.SKIPPED and "failed loads" not in findings


def test_the_environment_counts(tmp_path: Path) -> None:
    words = [model_folder(tmp_path, DENSE), "--kv-transfer-config", transfer(), "--prefix-caching-hash-algo", "xxhash"]
    good = checked(words, ENVIRONMENT | {"PYTHONHASHSEED": "0", "VLLM_PLUGINS": "other,kvdepot"})
    assert wrong(good) == {}
    elsewhere = checked(words, {"KVDEPOT_ENDPOINT": "unix:///run/e.sock", "VLLM_PLUGINS": "other"})
    assert wrong(elsewhere) == {
        "daemon of the engine": Outcome.WARN, "plugin": Outcome.FAIL, "prefix hashes": Outcome.FAIL,
    }  # fmt: skip


def test_a_model_that_is_not_known_is_skipped(tmp_path: Path) -> None:
    findings = checked(["Owner/Model", "--kv-transfer-config", transfer()], ENVIRONMENT | {"HF_HOME": str(tmp_path)})
    assert findings["flags of the model"].outcome is Outcome.SKIPPED


def test_forms_of_flags_are_equal() -> None:
    for words in (
        ["vllm", "serve", "M", "--tensor-parallel-size", "2", "--kv-transfer-config.kv_role", "kv_both"],
        ["vllm", "serve", "--tensor_parallel_size=2", "M", "--kv-transfer-config.kv_role=kv_both"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "M", "-tp=2", "--kv_transfer_config",
         '{"kv_role": "kv_both"}'],
    ):  # fmt: skip
        model, flags = parse_command(words)
        process = EngineProcess(1, model, flags)
        assert (model, process.number("tensor-parallel-size", 1)) == ("M", 2)
        assert process.settings("kv-transfer-config") == {"kv_role": "kv_both"}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Processes 7, which serves on port 8000, and 8, which is none of vLLM's."""
    for pid, words in ((7, ["vllm", "serve", "M"]), (8, ["sleep", "9"])):
        (tmp_path / f"proc/{pid}/fd").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cmdline").write_text("\0".join(words) + "\0")
        (tmp_path / f"proc/{pid}/fd/3").symlink_to(f"socket:[{pid}00]")
    (tmp_path / "proc/7/environ").write_text("PYTHONHASHSEED=0\0")
    (tmp_path / "proc/net").mkdir()
    line = "   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000  0 700 1 x\n"
    (tmp_path / "proc/net/tcp6").write_text("head\n" + line)
    return Host(tmp_path, environment={})


@pytest.mark.parametrize("name", ["7", "http://localhost:8000", "localhost:8000", "http://127.0.0.1/v1"])
def test_a_server_is_found_by_its_pid_or_its_port(host: Host, name: str) -> None:
    found = engine_process(host, name)
    assert (found.pid, found.model, dict(found.environment)) == (7, "M", {"PYTHONHASHSEED": "0"})


def test_a_real_server_is_found_by_its_port_and_its_pid() -> None:
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    command = [sys.executable, "-c", listen, "serve", "M", "--kv-transfer-config", transfer()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        port = server.stdout.readline().strip()
        found = engine_process(Host(), f"http://127.0.0.1:{port}/v1")
        assert found == engine_process(Host(), str(server.pid))
        server.stdin.write("\n")
        server.stdin.close()
    assert (found.pid, found.model, found.settings("kv-transfer-config")) == (server.pid, "M", transfer_config())


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("8", InvalidArgument), ("9", NotFound), ("http://localhost:9", NotFound),
        ("http://other.example:8000", InvalidArgument), ("nonsense", InvalidArgument), ("", InvalidArgument),
        ("http://localhost:99999", InvalidArgument), ("http://[::1", InvalidArgument),
    ],
)  # fmt: skip
def test_what_is_no_server_of_this_host_is_refused(host: Host, name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        engine_process(host, name)


def test_a_child_that_has_the_socket_too_is_not_taken_for_the_server(host: Host, tmp_path: Path) -> None:
    """vLLM listens before it starts its engine, which has a higher pid of more digits."""
    for pid, words in ((10, ["VLLM::EngineCore"]), (6, ["sh", "-c", "x"])):
        (tmp_path / f"proc/{pid}/fd").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cmdline").write_text("\0".join(words) + "\0")
        (tmp_path / f"proc/{pid}/fd/9").symlink_to("socket:[700]")
    assert engine_process(host, "http://localhost:8000").pid == 7


def test_what_is_no_server_is_named_without_its_arguments() -> None:
    with pytest.raises(InvalidArgument, match="'curl' is no vLLM server") as refused:
        parse_command(["/usr/bin/curl", "-u", "admin:secret"])
    assert "secret" not in str(refused.value)


def test_a_switch_takes_no_value() -> None:
    for switch in ("--enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager", "--trust-remote-code"):
        model, flags = parse_command(["vllm", "serve", switch, "M", "--dtype", "half"])
        assert (model, flags["dtype"]) == ("M", "half")
        assert flags[switch.removeprefix("--").removeprefix("no-")] in ("true", "false")


CONTAINER = "proc/7/root"


def started(root: Path, words: list[str], file: str | None = None) -> EngineProcess:
    """Return process 7 of a host, which works in /app of a container and was started so; `file`: its /app/f.yaml."""
    (root / "proc/7").mkdir(parents=True, exist_ok=True)
    (root / "proc/7/cmdline").write_text("\0".join(["vllm", "serve", *words]) + "\0")
    (root / "proc/7/environ").write_text("".join(f"{name}={value}\0" for name, value in ENVIRONMENT.items()))
    (root / "proc/7/cwd").unlink(missing_ok=True)
    (root / "proc/7/cwd").symlink_to("/app")
    if file is not None:
        (root / CONTAINER / "app").mkdir(parents=True, exist_ok=True)
        (root / CONTAINER / "app/f.yaml").write_text(file)
    return engine_process(Host(root, environment={}), "7")


@pytest.mark.parametrize("path", ["f.yaml", "/app/f.yaml"])
def test_flags_in_a_file_count_and_those_of_the_command_win(tmp_path: Path, path: str) -> None:
    (tmp_path / CONTAINER / "models").mkdir(parents=True)
    model_folder(tmp_path / CONTAINER / "models", HYBRID)
    file = f"""
model: /models
mamba-cache-mode: align
block_size: 128
enable-prefix-caching: false
served-model-name: [one, two]
kv-transfer-config: {transfer()}
"""
    process = started(tmp_path, ["--config", path, "--block-size", "544"], file)
    assert (process.model, process.number("block-size", 1)) == ("/models", 544)
    found = wrong({one.check: one for one in check_flags(process, DAEMON)})
    assert found == {"prefix caching": Outcome.FAIL}


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (None, "cannot be read"),
        ("a: [", "no YAML"),
        ("- a", "no keys and values"),
        ("#" * (1 << 20), "cannot be read"),
        ("a: {b: 2020-01-01}", "no YAML of flags"),
        ("a: {2020-01-01: b}", "no YAML of flags"),
        ("a: " + "[" * 600 + "]" * 600, "no YAML of flags"),
        ("a: &a {b: c}\nd: {e: *a, f: *a}", "aliases are not read"),
    ],
)
def test_a_file_that_cannot_be_read_is_said_and_nothing_is_judged(tmp_path: Path, file: str | None, why: str) -> None:
    process = started(tmp_path, [model_folder(tmp_path, DENSE), "--config", "f.yaml"], file and file + "\n")
    ((outcome, message),) = [(one.outcome, one.message) for one in check_flags(process, DAEMON)]
    assert outcome is Outcome.SKIPPED and "--config f.yaml" in message and why in message


def test_a_pipe_in_the_place_of_the_file_hangs_nobody(tmp_path: Path) -> None:
    (tmp_path / CONTAINER / "app").mkdir(parents=True)
    os.mkfifo(tmp_path / CONTAINER / "app/f.yaml")
    assert "cannot be read" in started(tmp_path, ["M", "--config", "f.yaml"]).unread


def test_a_retention_of_a_model_without_states_and_windows_is_wrong(tmp_path: Path) -> None:
    findings = checked([model_folder(tmp_path, DENSE), "--kv-transfer-config", transfer(),
                        "--prefix-cache-retention-interval", "512"])  # fmt: skip
    assert wrong(findings) == {"prefix-cache-retention-interval": Outcome.FAIL}
    assert findings["prefix-cache-retention-interval"].fix == "leave it out"


@pytest.mark.parametrize(
    "words", [["--kv-cache-dtype", "nvfp4"], ["--mamba-ssm-cache-dtype", "x"], ["--tensor-parallel-size", "3"]]
)
def test_a_value_that_is_not_known_here_is_skipped(tmp_path: Path, words: list[str]) -> None:
    findings = checked([model_folder(tmp_path, HYBRID), "--kv-transfer-config", transfer(), *words])
    assert wrong(findings) == {}
    assert findings["flags of the model"].outcome is Outcome.SKIPPED


def test_parts_of_a_setting_that_do_not_fit_are_an_error_of_the_flag(tmp_path: Path) -> None:
    parts = ["--kv-transfer-config.a", "1", "--kv-transfer-config.a.b", "1"]
    findings = checked([model_folder(tmp_path, DENSE), *parts])
    assert findings["connector"].outcome is Outcome.FAIL and "a is no JSON object" in findings["connector"].message


def test_an_environment_that_may_not_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    words = [model_folder(tmp_path, DENSE), "--kv-transfer-config", transfer(), "--prefix-caching-hash-algo", "xxhash"]
    model, flags = parse_command(["vllm", "serve", *words])
    process = EngineProcess(7, model, flags, environment_known=False)
    findings = {one.check: one.outcome for one in check_flags(process, DAEMON)}
    skipped = {name for name, outcome in findings.items() if outcome is Outcome.SKIPPED}
    assert skipped == {"prefix hashes", "plugin", "daemon of the engine"}


def test_a_retention_that_is_no_multiple_of_the_block_is_wrong_and_other_batches_are_a_hint(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, HYBRID)
    good = [folder, "--kv-transfer-config", transfer(), "--mamba-cache-mode", "align", "--block-size", "544"]
    findings = checked([*good, "--prefix-cache-retention-interval", "512"])
    assert wrong(findings) == {"prefix-cache-retention-interval": Outcome.FAIL}
    assert findings["prefix-cache-retention-interval"].fix == "take 544"
    findings = checked([*good, "--prefix-cache-retention-interval", "1088", "--max-num-batched-tokens", "8192"])
    assert wrong(findings) == {"max-num-batched-tokens": Outcome.WARN}
