"""The chart, rendered by Helm: valid for the API, the same pods as the plain manifests, and no value without a rule."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvdepot.core.units import DURATION_UNITS_SECONDS, SIZE_UNITS_BYTES, parse_size_bytes
from kvdepot.server.config import config
from kvdepot.server.config.key_files import read_key_file

from tests.rigs.helm import helm, rendered
from tests.rigs.kubernetes import VERSIONS, complaints

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "configs/helm/kvdepot"
PLAIN = ROOT / "configs/kubernetes"
CUSTOM = {"PodMonitor"}
"""Kinds of the Prometheus operator, which the API's schemas do not have."""
EVERYTHING = (
    "--set-string", "image.tag=0.3.0@sha256:0123", "--set", "image.pullSecrets={registry}",
    "--set", "podMonitor.enabled=true,podMonitor.labels.release=prometheus", "--set", "priorityClassName=high",
    "--set-string", "podAnnotations.a=b,podLabels.team=llm",
    "--set-json", 'extraVolumes=[{"name":"keys","secret":{"secretName":"keys"}}]',
    "--set-json", 'extraVolumeMounts=[{"name":"keys","mountPath":"/etc/keys"}]',
    "--set-json", 'affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution=[{"topologyKey":"zone"}]',
    "--set-json", 'extraConfig="[policy]\\npin_share = 0.1\\n"', "--set-string", "keys.secret=fleet-keys",
)  # fmt: skip
PEERS = (
    "--set", "peers.enabled=true,peers.secret=kvdepot-tls,peers.max=3,peers.workers=2",
    "--set-json", 'peers.allow=["URI:spiffe://cluster/kvdepot"]',
)  # fmt: skip
NOTHING = (
    "--set", "hold.enabled=false,service.enabled=false,networkPolicy.enabled=false,disk.enabled=false",
    "--set", "nodeSelector=null,tolerations=null",
)  # fmt: skip
VARIANTS = pytest.mark.parametrize(
    "values", [(), EVERYTHING, NOTHING, PEERS], ids=["default", "everything", "nothing", "peers"]
)


def only(documents: list[dict[str, Any]], kind: str, name: str = "kvdepot") -> dict[str, Any]:
    (found,) = (one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod(documents: list[dict[str, Any]], name: str = "kvdepot") -> dict[str, Any]:
    found: dict[str, Any] = only(documents, "DaemonSet", name)["spec"]["template"]
    return found


def toml(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return tomllib.loads(only(documents, "ConfigMap")["data"]["kvdepot.toml"])


def test_helm_has_nothing_to_say_about_the_chart() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
@VARIANTS
def test_the_api_s_schemas_accept_what_it_renders(version: str, values: tuple[str, ...]) -> None:
    documents = rendered(CHART, *values)
    assert {one["metadata"]["namespace"] for one in documents} == {"llm"}
    assert [fault for one in documents if one["kind"] not in CUSTOM for fault in complaints(one, version)] == []


def test_what_the_api_would_refuse_is_found() -> None:
    (document,) = (one for one in rendered(CHART) if one["kind"] == "NetworkPolicy")
    document["spec"]["policyTpyes"] = ["Ingress"]
    assert complaints(document, VERSIONS[-1]) != []


@pytest.mark.parametrize("name", ["kvdepot", "kvdepot-hold"])
def test_its_pods_are_those_of_the_plain_manifests(name: str) -> None:
    plain = [one for path in PLAIN.glob("*.yaml") for one in yaml.safe_load_all(path.read_text())]
    made = only(rendered(CHART), "DaemonSet", name)["spec"]
    for container in made["template"]["spec"]["containers"] + made["template"]["spec"]["initContainers"]:
        assert container.pop("imagePullPolicy") == "IfNotPresent"
    assert made == only(plain, "DaemonSet", name)["spec"]
    assert toml(rendered(CHART)) == toml(plain)


@VARIANTS
def test_the_daemon_accepts_its_configuration(values: tuple[str, ...], tmp_path: Path) -> None:
    documents = rendered(CHART, *values)
    checked = config.check("helm", toml(documents), {"ram": {"path": str(tmp_path)}})
    (container,) = pod(documents)["spec"]["containers"]
    assert parse_size_bytes(container["resources"]["limits"]["memory"] + "B") > checked.capacity_bytes
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {tier.path for tier in checked.tables.tier if tier.kind == "disk"} <= mounted
    tls = checked.tables.tls
    assert {str(Path(file).parent) for file in (tls.cert, tls.key, tls.client_ca) if file} <= mounted
    assert (checked.tables.policy.pin_share == 0.1) is (values == EVERYTHING)


def test_each_value_reaches_the_pod() -> None:
    made = pod(rendered(CHART, *EVERYTHING))
    spec = made["spec"]
    assert {one["image"] for one in spec["containers"] + spec["initContainers"]} == {"kvdepot:0.3.0@sha256:0123"}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["priorityClassName"] == "high" and "podAffinity" in spec["affinity"]
    assert made["metadata"]["annotations"] == {"a": "b"} and made["metadata"]["labels"]["team"] == "llm"
    assert {"name": "keys", "mountPath": "/etc/keys"} in spec["containers"][0]["volumeMounts"]


def test_nothing_that_is_switched_off_is_rendered() -> None:
    documents = rendered(CHART, *NOTHING)
    assert sorted(one["kind"] for one in documents) == ["ConfigMap", "DaemonSet"]
    spec = pod(documents)["spec"]
    assert not {"nodeSelector", "tolerations"} & spec.keys()
    assert "nvme" not in json.dumps(documents)


def test_who_reads_metrics_finds_the_daemon_s_pods_and_nobody_else_reaches_them() -> None:
    documents = rendered(CHART, *EVERYTHING)
    labels = pod(documents)["metadata"]["labels"].items()
    ports = {one["name"] for one in pod(documents)["spec"]["containers"][0]["ports"]}
    monitor = only(documents, "PodMonitor")
    service, policy = only(documents, "Service", "kvdepot-metrics")["spec"], only(documents, "NetworkPolicy")["spec"]
    selectors = (monitor["spec"]["selector"]["matchLabels"], service["selector"], policy["podSelector"]["matchLabels"])
    for selector in selectors:
        assert selector.items() <= labels
        assert not selector.items() <= pod(documents, "kvdepot-hold")["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert {monitor["spec"]["podMetricsEndpoints"][0]["port"], service["ports"][0]["targetPort"]} == ports
    (rule,) = policy["ingress"]
    assert [port["port"] for port in rule["ports"]] == ["metrics"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_the_pod_monitor_has_no_field_that_was_not_compared_with_the_operator_s_schema() -> None:
    """It is valid for the CRD of version 0.93.0, without unknown fields. What is new here has to be compared again."""
    monitor = only(rendered(CHART, *EVERYTHING), "PodMonitor")
    (endpoint,) = monitor["spec"].pop("podMetricsEndpoints")
    relabelings = endpoint.pop("relabelings")
    assert (monitor["apiVersion"], monitor["spec"].keys()) == ("monitoring.coreos.com/v1", {"selector"})
    assert monitor["spec"]["selector"].keys() == {"matchLabels"}
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "15s"}
    assert set().union(*relabelings) == {"targetLabel", "replacement", "sourceLabels"}


def test_peers_find_each_other_by_a_name_and_are_the_only_ones_that_reach_their_port() -> None:
    documents = rendered(CHART, *PEERS)
    labels = pod(documents)["metadata"]["labels"].items()
    (container,) = pod(documents)["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    (tier,) = (one for one in toml(documents)["tier"] if one["kind"] == "peer")
    service = only(documents, "Service", "kvdepot-peers")["spec"]
    assert tier["url"] == f"dns://kvdepot-peers.llm.svc:{service['ports'][0]['port']}"
    assert (tier["peers_max"], tier["io_workers"]) == (3, 2)
    assert toml(documents)["tls"]["allow_peers"] == ["URI:spiffe://cluster/kvdepot"]
    assert service["clusterIP"] == "None" and service["selector"].items() <= labels
    assert service["ports"][0]["targetPort"] == "peers" and ports["peers"] == service["ports"][0]["port"]
    assert toml(documents)["daemon"]["listen_peers"] == f"tcp://0.0.0.0:{ports['peers']}"
    (rule,) = (one for one in only(documents, "NetworkPolicy")["spec"]["ingress"] if one["ports"][0]["port"] == "peers")
    (whom,) = rule["from"]
    assert whom.keys() == {"podSelector"} and whom["podSelector"]["matchLabels"].items() <= labels
    (volume,) = (one for one in pod(documents)["spec"]["volumes"] if one["name"] == "tls")
    assert volume["secret"] == {"secretName": "kvdepot-tls", "defaultMode": 0o440}
    assert pod(documents)["spec"]["securityContext"]["fsGroup"] == 10001, "otherwise the daemon cannot read its key"
    assert "peers" not in json.dumps(rendered(CHART))


def test_without_scrapers_nobody_reaches_the_metrics() -> None:
    policy = only(rendered(CHART, "--set-json", "networkPolicy.scrapers=[]"), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"] and "ingress" not in policy


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("ram.capacty=1GiB", "capacty"), ("ram.capacity=much", "capacity"), ("ram.hostPath=/srv/arena", "hostPath"),
        ("image.pullPolicy=Sometimes", "pullPolicy"), ("podMonitor.interval=15", "interval"),
        ("resources.limits.memory=null", "limits"), ("hold=true", "hold"), ("disk.capacity=null", "disk.capacity"),
        ("peers.enabled=true", "secret"), ("peers.enabled=true,peers.secret=tls", "allow"),
        ("ram.capacity=64GB", "capacity"), ("peers.deadline=1min", "deadline"), ("peers.host=fd00::1", "host"),
        ("peers.max=33", "max"), ("peers.allow={kvdepot}", "allow"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(value: str, said: str) -> None:
    done = helm("template", "kvdepot", str(CHART), "--set", value)
    assert done.returncode != 0 and said in done.stderr


def test_the_units_of_sizes_and_durations_are_the_daemon_s() -> None:
    """Others would be refused on each node, at the start."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    for pattern, units in (
        (schema["definitions"]["size"]["pattern"], SIZE_UNITS_BYTES),
        (schema["properties"]["peers"]["properties"]["deadline"]["pattern"], DURATION_UNITS_SECONDS),
    ):
        assert set(re.findall(r"\w+", pattern.rpartition("(")[2])) == units.keys()


def test_odd_names_that_are_legal_stay_what_they_are() -> None:
    odd = ("--set-json", 'sockets.hostPath="/run/a,b"', "--set-json", 'state.hostPath="/srv/{x}:y#z"',
           "--set-json", 'image.pullSecrets=["123"]', "--set-string", "priorityClassName=1e3")  # fmt: skip
    documents = rendered(CHART, *odd, "--namespace", "2026")
    assert {one["metadata"]["namespace"] for one in documents} == {"2026"}
    spec = pod(documents)["spec"]
    paths = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"] if "hostPath" in one}
    assert (paths["sockets"], paths["state"]) == ("/run/a,b", "/srv/{x}:y#z")
    assert (spec["imagePullSecrets"], spec["priorityClassName"]) == ([{"name": "123"}], "1e3")


def test_key_files_of_a_secret_are_as_the_daemon_demands(tmp_path: Path) -> None:
    """It refuses those that Kubernetes mounts: they are root's, and its group may read them."""
    spec = pod(rendered(CHART, *EVERYTHING))["spec"]
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert volumes["tier-keys-secret"]["secret"]["secretName"] == "fleet-keys"
    assert volumes["tier-keys"]["emptyDir"]["medium"] == "Memory"
    (daemon,), (root,) = spec["containers"], spec["initContainers"]
    mounts = {one["name"]: one["mountPath"] for one in root["volumeMounts"]}
    assert {"name": "tier-keys", "mountPath": mounts["tier-keys"], "readOnly": True} in daemon["volumeMounts"]
    assert "tier-keys-secret" not in {one["name"] for one in daemon["volumeMounts"]}
    for name in ("tier-keys-secret", "tier-keys"):
        (tmp_path / name).mkdir()
    (tmp_path / "tier-keys-secret/..data").mkdir()
    (tmp_path / "tier-keys-secret/..data/nfs.key").write_text("ab" * 32)
    (tmp_path / "tier-keys-secret/nfs.key").symlink_to("..data/nfs.key")
    command = root["args"][0].rpartition(" && ")[2].replace("-o 10001 -g 10001", "")
    for name in ("tier-keys-secret", "tier-keys"):
        command = command.replace(mounts[name], str(tmp_path / name))
    for _ in range(2):  # also when the pod starts again
        subprocess.run(["sh", "-c", command], check=True)
    assert read_key_file(tmp_path / "tier-keys/nfs.key", file="helm", key="key_file")


def test_each_value_has_a_rule_and_each_rule_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert properties.keys() - {"global"} == values.keys()
    for name, rules in properties.items():
        if "properties" in rules:
            assert rules["properties"].keys() == values[name].keys()


def test_it_is_the_chart_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert chart["kubeVersion"] == f">={VERSIONS[0]}-0"
