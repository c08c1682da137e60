"""The examples under configs/kubernetes: against the API's schemas, the daemon's own checks, and one another."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.vllm.base.settings import parse_settings
from kvdepot.core.units import parse_size_bytes
from kvdepot.server.config import config

from tests.rigs.kubernetes import VERSIONS, complaints

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "configs" / "kubernetes"


def _documents() -> Iterator[dict[str, Any]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def _only(kind: str) -> dict[str, Any]:
    """Return the document of a kind; of several, the daemon's."""
    found = [document for document in _documents() if document["kind"] == kind]
    (only,) = [one for one in found if len(found) == 1 or one["metadata"]["name"] == "kvdepot"]
    return only


def _pod(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = _only(kind)["spec"]["template"]["spec"]
    return found


def _container(kind: str) -> dict[str, Any]:
    (found,) = _pod(kind)["containers"]
    assert isinstance(found, dict)
    return found


def _host_path(kind: str, mount: str) -> str:
    """Which directory of the host lies at `mount`."""
    (name,) = (m["name"] for m in _container(kind)["volumeMounts"] if m["mountPath"] == mount)
    (path,) = (volume["hostPath"]["path"] for volume in _pod(kind)["volumes"] if volume["name"] == name)
    return str(path)


def _configuration() -> dict[str, Any]:
    return tomllib.loads(_only("ConfigMap")["data"]["kvdepot.toml"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_s_schemas_accept_every_document(version: str) -> None:
    assert [fault for document in _documents() for fault in complaints(document, version)] == []


def test_the_daemon_accepts_its_configuration(tmp_path: Path) -> None:
    document = _configuration()
    assert _host_path("DaemonSet", document["ram"]["path"]).startswith("/dev/shm/")  # RAM outlives the pod
    checked = config.check("kubernetes", document, {"ram": {"path": str(tmp_path)}})
    limit = parse_size_bytes(_container("DaemonSet")["resources"]["limits"]["memory"] + "B")
    assert limit > checked.capacity_bytes
    assert checked.tables.daemon.metrics.endswith(f":{_container('DaemonSet')['ports'][0]['containerPort']}")
    mounted = {mount["mountPath"] for mount in _container("DaemonSet")["volumeMounts"]}
    state = str(Path(checked.tables.daemon.state).parent)
    assert {tier.path for tier in checked.tables.tier} | {document["ram"]["path"], state} <= mounted
    assert _host_path("DaemonSet", state) == state


def test_daemon_and_engine_meet_at_the_host_s_directory() -> None:
    (url,) = _configuration()["daemon"]["listen"]
    directory = str(Path(url.removeprefix("unix://")).parent)
    assert _host_path("DaemonSet", directory) == _host_path("Deployment", directory)
    (transfer,) = (json.loads(word) for word in _container("Deployment")["args"] if word.startswith("{"))
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert parse_settings(transfer["kv_connector_extra_config"], {}).endpoint == Endpoint.parse(url)


def test_who_runs_it_may_do_nothing_else() -> None:
    pod = _pod("DaemonSet")
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{pod['securityContext']['runAsGroup']}\n" in (ROOT / "Dockerfile").read_text()
    assert _pod("Deployment")["securityContext"]["supplementalGroups"] == [user]
    assert pod["securityContext"]["runAsNonRoot"]
    security = _container("DaemonSet")["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    for one in (pod, _pod("Deployment")):
        assert not {"hostIPC", "hostNetwork"} & one.keys()
    (directories,) = pod["initContainers"]
    assert directories["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
    assert directories["image"] == _container("DaemonSet")["image"]


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
@pytest.mark.parametrize(("answer", "alive"), [(0, True), (1, True), (3, False), (124, False)])
def test_a_full_metrics_port_does_not_restart_the_daemon(tmp_path: Path, probe: str, answer: int, alive: bool) -> None:
    """The probe asks over the socket. A daemon that answers and is not ready (1) is alive."""
    found = _container("DaemonSet")[probe]
    assert "httpGet" not in found and "tcpSocket" not in found
    program = tmp_path / "kvdepotctl"
    program.write_text(f"#!/bin/sh\necho said\nexit {answer}\n")
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(found["exec"]["command"], env=path, check=False, capture_output=True)
    assert (done.returncode == 0, done.stdout) == (alive, b"")


def test_operators_have_a_socket_that_no_engine_sees() -> None:
    """Images of engines run as root, and root may operate: what keeps them out is that they have no way there."""
    daemon, container = (
        config.check("kubernetes", _configuration() | {"ram": {}}).tables.daemon,
        _container("DaemonSet"),
    )
    (socket,) = daemon.admin_sockets
    seen = {_host_path("Deployment", mount["mountPath"]) for mount in _container("Deployment")["volumeMounts"]}
    assert _host_path("DaemonSet", str(socket.parent)) not in seen
    assert {"name": "KVDEPOT_ADMIN", "value": f"unix://{socket}"} in container["env"], "probes, and kubectl exec"


def test_two_daemons_never_meet_on_a_node() -> None:
    assert _only("DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0


def test_the_holder_is_found_by_the_daemon_and_outlives_it() -> None:
    (found,) = (one for one in _documents() if one["metadata"]["name"] == "kvdepot-hold")
    pod, daemon = found["spec"]["template"]["spec"], _pod("DaemonSet")
    (container,) = pod["containers"]
    verb, *options = container["args"]
    given = dict(zip(options[::2], options[1::2], strict=True))
    document = _configuration()
    assert verb == "hold" and document["daemon"]["listen"] == [f"unix://{given['--socket']}"]
    assert document["ram"]["path"] == given["--arena-dir"]
    assert document["ram"].get("sealed", True)
    assert pod["securityContext"] == daemon["securityContext"]
    assert container["image"] == _container("DaemonSet")["image"]
    assert (pod["nodeSelector"], pod["tolerations"]) == (daemon["nodeSelector"], daemon["tolerations"])
    (volume,) = pod["volumes"]
    assert volume["hostPath"]["path"] == _host_path("DaemonSet", given["--arena-dir"])
    assert found["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_the_service_of_peers_names_the_daemon_s_pods_as_the_page_says() -> None:
    service = _only("Service")
    (port,) = service["spec"]["ports"]
    assert service["spec"]["clusterIP"] == "None", "each pod's address, and not one for all"
    assert service["spec"]["selector"].items() <= _only("DaemonSet")["spec"]["template"]["metadata"]["labels"].items()
    page = (ROOT / "docs/peers.md").read_text()
    assert f'url = "dns://{service["metadata"]["name"]}:{port["port"]}"' in page
    assert f'listen_peers = "tcp://0.0.0.0:{port["port"]}"' in page
