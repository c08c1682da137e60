"""The files of `configs` that a package brings: names, and where a service manager looks for them.

An installed package has them in the folder `kvdepot/assets`. A source tree has them only in `configs`: there is no
second copy that could differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, or one folder of files, below `configs`. `place`: where `kvdepotd install` puts it; empty: nowhere."""

    name: str
    path: str
    about: str
    place: str = ""


ASSETS: Final = (
    Asset(
        "unit", "systemd/kvdepotd.service", "systemd unit of the daemon", "/etc/systemd/system/kvdepotd.service"
    ),
    Asset(
        "hold-unit", "systemd/kvdepot-hold.service", "systemd unit that keeps RAM while the daemon is stopped",
        "/etc/systemd/system/kvdepot-hold.service",
    ),
    Asset(
        "sysusers", "systemd/kvdepot.sysusers.conf", "systemd-sysusers: user and group",
        "/usr/lib/sysusers.d/kvdepot.conf",
    ),
    Asset(
        "tmpfiles", "systemd/kvdepot.tmpfiles.conf", "systemd-tmpfiles: directories", "/usr/lib/tmpfiles.d/kvdepot.conf"
    ),
    Asset("config", "kvdepot.toml", "configuration: each key, at its default", "/etc/kvdepot/kvdepot.toml"),
    Asset("config-development", "development.toml", "configuration for trying it out"),
    Asset("config-disk", "disk.toml", "configuration with a disk tier"),
    Asset("config-gpu-node", "gpu-node.toml", "configuration of a node with GPUs"),
    Asset("config-nfs", "nfs.toml", "configuration with a tier that nodes share"),
    Asset("rules", "prometheus/kvdepot.rules.yml", "alert rules for Prometheus"),
    Asset("dashboard", "grafana/kvdepot.json", "dashboard for Grafana"),
    Asset("k8s-daemonset", "kubernetes/daemonset.yaml", "Kubernetes: the daemon on each node"),
    Asset("k8s-hold", "kubernetes/hold.yaml", "Kubernetes: keeps RAM over upgrades"),
    Asset("k8s-engine", "kubernetes/engine.yaml", "Kubernetes: what an engine's pod needs"),
    Asset("k8s-peers", "kubernetes/peers.yaml", "Kubernetes: a name for all daemons, as peers"),
    Asset("compose", "examples/compose.yaml", "example: Docker Compose, with a vLLM"),
    Asset("vllm-unit", "examples/vllm.service", "example: systemd unit of a vLLM"),
    Asset("router", "examples/router.py", "example: router for prefill and decode engines"),
    Asset("several-connectors", "examples/several-connectors.json", "example: a vLLM with several connectors"),
    Asset("chart", "helm/kvdepot", "Kubernetes: Helm chart, a folder"),
)  # fmt: skip
BY_NAME: Final = {asset.name: asset for asset in ASSETS}


def folder() -> Traversable:
    """Return the folder with the files."""
    tree = files("kvdepot.core").joinpath("../../../configs")
    # Only a source tree has this file. Copies that an editable installation once made may be old.
    return tree if tree.joinpath("mkdocs.yml").is_file() else files("kvdepot").joinpath("assets")


def located(asset: Asset) -> Traversable:
    """Return the file or folder of an asset."""
    return folder().joinpath(asset.path)


def contents(asset: Asset) -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of each file. The path begins with the last part of the asset's own."""
    yield from _contents(located(asset), "")


def _contents(found: Traversable, parent: str) -> Iterator[tuple[str, bytes]]:
    path = f"{parent}{found.name}"
    if found.is_dir():
        for child in sorted(found.iterdir(), key=lambda one: one.name):
            yield from _contents(child, f"{path}/")
    else:
        yield path, found.read_bytes()
