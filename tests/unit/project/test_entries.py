"""The two commands where the package was installed without what they need."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from kvdepot.client.ctl import entry as ctl
from kvdepot.server.daemon import entry as server

from tests.rigs.patience import patient

PROJECT = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
WITHOUT = """
import sys
sys.modules[{blocked!r}] = None
from {module} import main
sys.argv[1:] = ["--help"]
sys.exit(main())
"""
EXTRAS = {"server": server.EXTRA, "ctl": ctl.EXTRA}
BLOCKED = [(extra, module) for extra, modules in EXTRAS.items() for module in modules]


def run(extra: str, blocked: str) -> subprocess.CompletedProcess[str]:
    module = {"server": server.__name__, "ctl": ctl.__name__}[extra]
    code = WITHOUT.format(blocked=blocked, module=module)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=patient(60)
    )


@pytest.mark.parametrize(("extra", "blocked"), BLOCKED)
def test_a_command_without_its_extra_says_in_a_line_what_to_install(extra: str, blocked: str) -> None:
    done = run(extra, blocked)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"pip install '.[{extra}]'" in done.stderr and blocked in done.stderr


@pytest.mark.parametrize(
    ("extra", "blocked"),
    [("server", "grpc"), ("server", "kvdepot.server.daemon.node"), ("ctl", "kvdepot.client.ctl.calls")],
)
def test_what_should_be_there_in_any_case_is_a_bug(extra: str, blocked: str) -> None:
    done = run(extra, blocked)
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_the_scripts_are_these_and_the_modules_their_extras_own() -> None:
    assert PROJECT["scripts"] == {"kvdepotd": f"{server.__name__}:main", "kvdepotctl": f"{ctl.__name__}:main"}
    distributions = packages_distributions()
    for extra, modules in EXTRAS.items():
        needed = {re.split("[^A-Za-z0-9_-]", one)[0] for one in PROJECT["optional-dependencies"][extra]}
        assert {name for module in modules for name in distributions[module]} <= needed
