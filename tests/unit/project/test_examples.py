"""The files under configs/examples: each against its own schema or tool, and the router between two engines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft201909Validator
from kvdepot.client.vllm.base.settings import parse_settings
from kvdepot.server.config import config

from tests.rigs.systemd import NEEDS_SYSTEMD

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "configs/examples"
TRANSFER = re.compile(r"""\{.*"kv_connector".*\}""")


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return found


def test_the_compose_specification_accepts_the_compose_file() -> None:
    try:
        package = metadata.distribution("docker-compose")  # only its schema
    except metadata.PackageNotFoundError:
        assert "CI" not in os.environ, "there is no schema (pip: docker-compose)"
        pytest.skip("there is no schema (pip: docker-compose)")
    (path,) = (file for file in package.files or () if file.name == "compose_spec.json")
    schema = json.loads(Path(str(package.locate_file(path))).read_text())
    assert [error.message for error in Draft201909Validator(schema).iter_errors(compose())] == []
    wrong = compose()
    wrong["services"]["hold"]["comand"] = ["hold"]
    assert [error.message for error in Draft201909Validator(schema).iter_errors(wrong)] != []


def test_the_containers_of_the_compose_file_meet_at_the_host_s_directories() -> None:
    services = compose()["services"]
    mounts = {name: {one["target"]: one["source"] for one in service["volumes"]} for name, service in services.items()}
    assert mounts["hold"]["/arena"] == mounts["kvdepotd"]["/arena"] == "/dev/shm/kvdepot"
    assert mounts["vllm"]["/run/kvdepot"] == mounts["kvdepotd"]["/run/kvdepot"]
    assert services["hold"]["command"][0] == "hold" and services["kvdepotd"]["command"][0] == "serve"
    assert services["hold"]["image"] == services["kvdepotd"]["image"]
    assert services["hold"]["healthcheck"] == {"disable": True}, "the image's asks a daemon, which is not there"
    assert services["kvdepotd"]["pid"] == "host" and services["vllm"]["group_add"] == ["10001"]
    text = (ROOT / "docs/install.md").read_text()
    assert "d /dev/shm/kvdepot 0700 10001 10001 -" in text and "d /run/kvdepot 0755 10001 10001 -" in text


def test_operators_have_a_socket_that_no_container_of_an_engine_sees() -> None:
    """Images of engines run as root, and root may operate: what keeps them out is that they have no way there."""
    services = compose()["services"]
    given = services["kvdepotd"]["environment"]
    assert given["KVDEPOT_DAEMON__ADMIN"] == given["KVDEPOT_ADMIN"]  # the health check's
    folder = str(Path(given["KVDEPOT_ADMIN"].removeprefix("unix://")).parent)
    (source,) = (one["source"] for one in services["kvdepotd"]["volumes"] if one["target"] == folder)
    assert source not in {one["source"] for one in services["vllm"]["volumes"]}
    said = (ROOT / "docs/install.md").read_text()
    for name in ("KVDEPOT_DAEMON__ADMIN", "KVDEPOT_ADMIN"):
        assert f"-e {name}={given[name]}" in said
    of_a_node = config.load(ROOT / "configs/gpu-node.toml").tables.daemon
    assert [str(one.parent) for one in of_a_node.admin_sockets] == [folder]


@NEEDS_SYSTEMD
def test_systemd_has_nothing_to_say_about_the_unit_of_an_engine(tmp_path: Path) -> None:
    text = (FOLDER / "vllm.service").read_text()
    (tmp_path / "vllm.service").write_text(text.replace("/opt/vllm/bin/vllm ", "/bin/true "))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "vllm.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_each_connector_of_the_examples_is_set_as_kvdepot_demands() -> None:
    found = [json.loads(match[0]) for match in TRANSFER.finditer((FOLDER / "vllm.service").read_text())]
    found += [json.loads(word) for word in compose()["services"]["vllm"]["command"] if word.startswith("{")]
    several = json.loads((FOLDER / "several-connectors.json").read_text())
    assert len(found) == 2
    for transfer in [*found, several]:
        assert transfer["kv_load_failure_policy"] == "recompute"
    children = several["kv_connector_extra_config"]["connectors"]
    for transfer in [*found, *children]:
        assert transfer["kv_connector"] == "KVDepotConnector"
        parse_settings(transfer.get("kv_connector_extra_config", {}), {})
    endpoints = [child["kv_connector_extra_config"]["endpoint"] for child in children]
    assert len(set(endpoints)) == len(endpoints) == 2  # the same daemon twice is refused


class Engine(BaseHTTPRequestHandler):
    """An engine's HTTP: it remembers requests, and answers as vLLM does."""

    asked: list[dict[str, Any]]
    status = 200

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.end_headers()
        answer = {"choices": [{"text": "answer"}], "kv_transfer_params": {"kvdepot:1": {"boundary_tokens": 384}}}
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the base class
        """Say nothing."""


@contextmanager
def engine(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Engine", (Engine,), {"asked": asked, "status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def router(prefill: str, decode: str) -> Iterator[str]:
    command = [sys.executable, "-u", str(FOLDER / "router.py"), "--prefill", prefill, "--decode", decode, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


BODY = {"model": "m", "prompt": "a long prompt", "max_tokens": 50, "stream": False}


def test_the_router_lets_one_engine_compute_the_prompt_and_the_other_answer() -> None:
    with engine() as (prefill, computed), engine() as (decode, answered), router(prefill, decode) as url:
        assert ask(url, BODY)["choices"] == [{"text": "answer"}]
    (first,), (second,) = computed, answered
    assert (first["prompt"], first["max_tokens"], first["stream"]) == ("a long prompt", 1, False)
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert second == BODY | {"kv_transfer_params": {"kvdepot:1": {"boundary_tokens": 384}}}


def test_the_router_passes_on_what_a_client_has_of_the_turn_before() -> None:
    params = {"kvdepot:1": {"boundary_tokens": 768}}
    with engine() as (prefill, computed), engine() as (decode, _), router(prefill, decode) as url:
        ask(url, BODY | {"kv_transfer_params": params})
    assert computed[0]["kv_transfer_params"] == params


def test_without_the_prefill_engine_the_decode_engine_computes_too() -> None:
    with engine(status=500) as (prefill, _), engine() as (decode, answered), router(prefill, decode) as url:
        assert ask(url, BODY)["choices"] == [{"text": "answer"}]
    assert answered == [BODY | {"kv_transfer_params": None}]


def test_a_refusal_of_the_decode_engine_reaches_the_client() -> None:
    with engine() as (prefill, _), engine(status=400) as (decode, _), router(prefill, decode) as url:
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url, BODY)
        assert refused.value.code == 400


def test_each_example_is_on_its_page() -> None:
    page = (ROOT / "docs/examples.md").read_text()
    assert [path.name for path in FOLDER.iterdir() if path.name not in page] == []
