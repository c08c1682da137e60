"""The probes of the Kubernetes example, run as kubelet does, against a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kvdepot.client.ctl.remote import EXIT_UNREACHABLE

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess

_MANIFEST = Path(__file__).resolve().parents[3] / "configs" / "kubernetes" / "daemonset.yaml"


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
def test_a_daemon_is_alive_while_it_answers_operators(tmp_path: Path, probe: str) -> None:
    """Not ready is alive too, and a daemon that has ended is not."""
    (container,) = list(yaml.safe_load_all(_MANIFEST.read_text()))[1]["spec"]["template"]["spec"]["containers"]
    program = tmp_path / "kvdepotctl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvdepot.client.ctl.app "$@"\n')
    program.chmod(0o755)

    def is_alive() -> bool:
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KVDEPOT_ENDPOINT": daemon.endpoint}
        return subprocess.run(container[probe]["exec"]["command"], env=environment, check=False).returncode == 0

    with DaemonProcess() as daemon:
        assert is_alive()
        kvdepotctl(daemon, "drain")
        assert kvdepotctl(daemon, "status").returncode == 1
        assert is_alive()
        daemon.kill()
        assert kvdepotctl(daemon, "status").returncode == EXIT_UNREACHABLE
        assert not is_alive()
