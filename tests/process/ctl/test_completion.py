"""What is completed of a `kvdepotctl` command line, beside a daemon, and that a real bash completes it so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from kvdepot.client.ctl.app import cli

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient
from tests.rigs.raw_client import RawEngine, dense_spec, keys_of

KEYS = keys_of("prompt", 3)


@pytest.fixture(scope="module")
def engine(daemon: DaemonProcess) -> Iterator[RawEngine]:
    with RawEngine(daemon.socket, "engine-0", spec=dense_spec("a-model", 16 << 10)) as one:
        one.store(KEYS)
        yield one


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `kvdepotctl` on the path beside it, as an installation has it."""
    folder = tmp_path_factory.mktemp("shell")
    command = folder / "kvdepotctl"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom kvdepot.client.ctl.app import main\nsys.argv[0] = 'kvdepotctl'\nmain()\n"
    )
    command.chmod(0o755)
    path = folder / "completion.bash"
    path.write_text(CliRunner().invoke(cli, ["completion", "bash"], standalone_mode=False).output)
    return path


def completed(script: Path, endpoint: str, *words: str) -> list[str]:
    """What there is for the last of the words."""
    bash = shutil.which("bash")
    assert bash is not None
    line = f'source {script}; shift; COMP_WORDS=(kvdepotctl "$@"); COMP_CWORD=$#; _kvdepotctl_completion kvdepotctl'
    done = subprocess.run(
        [bash, "-c", f'{line}; printf "%s\\n" "${{COMPREPLY[@]}}"', "bash", "", *words],
        env=os.environ | {"PATH": f"{script.parent}:{os.environ['PATH']}", "KVDEPOT_ENDPOINT": endpoint},
        capture_output=True, text=True, timeout=patient(60), check=True,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout.split()


def completions(*words: str) -> list[str]:
    """What the script is told there is, in this process: bash takes half a second for each."""
    completer = BashComplete(cli, {}, "kvdepotctl", "_KVDEPOTCTL_COMPLETE")
    return [item.value for item in completer.get_completions([*words[:-1]], words[-1])]


def test_verbs_and_options_are_completed(script: Path) -> None:
    nobody = "unix:///nonexistent/kvdepot.sock"
    assert completed(script, nobody, "st") == ["status", "stores"]
    assert completed(script, nobody, "pin", "--t") == ["--ttl"]
    assert completed(script, nobody, "completion", "") == ["bash", "zsh", "fish"]


@pytest.mark.long(seconds=8)
def test_namespaces_and_chunks_are_completed_from_the_daemon(
    script: Path, daemon: DaemonProcess, engine: RawEngine
) -> None:
    namespace = engine.namespace.hex()[:12]
    assert completed(script, daemon.endpoint, "ls", namespace[:3]) == [namespace]
    chunks = {f"{namespace[:6]}/{key.hex()[:12]}" for key in KEYS}
    assert set(completed(script, daemon.endpoint, "describe", f"{namespace[:6]}/")) == chunks
    assert set(completed(script, daemon.endpoint, "verify", f"{namespace[:6]}/")) == chunks


def test_every_verb_of_a_namespace_or_chunk_completes_them(
    monkeypatch: pytest.MonkeyPatch, daemon: DaemonProcess, engine: RawEngine
) -> None:
    monkeypatch.setenv("KVDEPOT_ENDPOINT", daemon.endpoint)
    namespace = engine.namespace.hex()[:12]
    assert completions("epoch", "bump", namespace[:3]) == [namespace]
    for verb in ("ls", "describe", "evict", "pin", "unpin", "verify", "prefetch"):
        assert completions(verb, namespace[:3]) == [namespace]
    assert completions("loads", "off", "") == [namespace]
    assert completions("ls", "nothing-begins-so") == []
    for verb in ("verify", "prefetch"):
        assert set(completions(verb, f"{namespace[:6]}/")) == {f"{namespace[:6]}/{key.hex()[:12]}" for key in KEYS}
    assert completions("verify", "--tier", "") == ["ram"]


@pytest.mark.parametrize("endpoint", ["unix:///nonexistent/kvdepot.sock", "tcp://localhost:1"])
def test_nothing_is_completed_and_nothing_said_where_no_daemon_answers(script: Path, endpoint: str) -> None:
    assert completed(script, endpoint, "ls", "") == []


def test_a_completion_is_no_failure(script: Path) -> None:
    asked = {"COMP_WORDS": "kvdepotctl st", "COMP_CWORD": "1", "_KVDEPOTCTL_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [script.parent / "kvdepotctl"], env=os.environ | asked, capture_output=True, text=True, timeout=patient(60),
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["plain,status", "plain,stores"], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str) -> None:
    printed = CliRunner().invoke(cli, ["completion", shell], standalone_mode=False).output
    assert f"_KVDEPOTCTL_COMPLETE={shell}_complete" in printed
