"""Verbs of which nobody reads what they print: `| head`, a full disk, `>&-`. No traceback, and no file is hurt."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.client.ctl.app import EXIT_PIPE, cli
from kvdepot.core.objectfile import Codec
from kvdepot.server.config.config import load

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.golden_objects import FILES
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import RawEngine, dense_spec, keys_of

OUTPUTS = ("closed pipe", "full", "closed")
HARNESS = """
import importlib, json, os, sys
main = importlib.import_module(sys.argv[1]).main
for output in sys.argv[2].split(","):
    for arguments in json.loads(sys.argv[3]):
        pid = os.fork()
        if not pid:
            break
        _, status = os.waitpid(pid, 0)
        print(json.dumps([output, arguments, os.waitstatus_to_exitcode(status)]), flush=True)
    else:
        continue
    sys.argv = ["kvdepot", *arguments]
    if output == "closed":
        os.close(1)
        sys.stdout = None
    else:
        reader, writer = os.pipe() if output == "closed pipe" else (None, os.open("/dev/full", os.O_WRONLY))
        os.dup2(writer, 1)
        if reader is not None:
            os.close(reader)
    sys.exit(main())
"""
"""One interpreter that has imported everything, and a child of it a verb: all with real descriptors."""


def check(module: str, verbs: list[list[str]], outputs: tuple[str, ...]) -> None:
    """No traceback, and an exit code that is right for the output. argparse's help says nothing of its own trouble."""
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, module, ",".join(outputs), json.dumps(verbs)],
        capture_output=True, text=True, timeout=patient(300), check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    for complaint in ("Traceback", "Exception ignored", "lost sys.stdout"):
        assert complaint not in done.stderr, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(output, verb) for output, verb, _ in found] == [(output, verb) for output in outputs for verb in verbs]
    for output, verb, code in found:
        assert code in EXPECTED[output] or (code == 0 and verb[-1] in ("--help", "--version")), (output, verb, code)


EXPECTED = {"closed pipe": (EXIT_PIPE,), "full": (1, 2), "closed": (0,)}
SPEC = dense_spec("m", 16 << 10)
NAMESPACE = SPEC.namespace_id().hex()
MODEL = Path(__file__).parents[2] / "golden/model_configs/Qwen--Qwen3-8B.json"
OF_THE_DAEMON = {
    "status": [], "top": ["--count", "1", "--interval", "0.1"], "ls": [], "describe": [NAMESPACE],
    "peers": [], "health": ["--help"], "requests": [], "explain": ["a-request"],
    "loads": ["on"], "stores": ["on"], "drain": [], "resume": [], "pin": [NAMESPACE],
    "unpin": [NAMESPACE], "quota": ["list"], "config": ["show"], "verify": [], "prefetch": ["--help"],
    "export": ["--help"], "completion": ["bash"], "reload": ["--help"], "doctor": ["--help"], "bench": ["--help"],
    "size": [str(MODEL)], "what-if": ["--help"],
    "assets": ["list"], "import": ["--help"], "evict": ["--help"], "epoch": ["--help"], "trace": ["--help"],
}  # fmt: skip
"""Every verb of kvdepotctl: what it needs to print something."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    tier = (
        f'[[tier]]\nname = "nvme"\nkind = "disk"\npath = "{tmp_path_factory.mktemp("tier")}"\ncapacity = "64MiB"\n'
        'write = "commit"\n'
    )
    with DaemonProcess(ram="512MiB", config=tier) as running:
        with RawEngine(running.socket, "engine-0", spec=SPEC) as engine:
            keys = keys_of("prompt", 3)
            engine.store(keys)
            engine.locate(keys, "a-request")
            wait_until(lambda: engine.status().tiers[1].objects == 3, "all on the disk", 30)
        yield running


def test_the_verbs_of_a_look_into_a_closed_pipe(daemon: DaemonProcess, tmp_path: Path) -> None:
    where = ["--endpoint", daemon.endpoint, "--timeout", "30"]
    check("kvdepot.client.ctl.app", [[*where, "status"], [*where, "ls", "--json"]], ("closed pipe",))
    config = tmp_path / "kvdepot.toml"
    config.write_text(CONFIG.format(tmp_path))
    check("kvdepot.server.daemon.app", [["check-config", str(config)], ["inspect", str(FILES[Codec.NONE])]], OUTPUTS)


@pytest.mark.long(seconds=15)
def test_every_verb_of_kvdepotctl(daemon: DaemonProcess) -> None:
    assert OF_THE_DAEMON.keys() == cli.verbs().keys()
    where = ["--endpoint", daemon.endpoint, "--timeout", "30"]
    verbs = [[*where, verb, *arguments] for verb, arguments in OF_THE_DAEMON.items()] + [["--help"], ["--version"]]
    verbs += [[*where, verb, "--json"] for verb in ("status", "ls")]
    check("kvdepot.client.ctl.app", verbs, OUTPUTS)


@pytest.mark.long(seconds=10)
def test_every_verb_of_kvdepotd(tmp_path: Path, daemon: DaemonProcess) -> None:
    config, trace = tmp_path / "kvdepot.toml", tmp_path / "trace"
    config.write_text(CONFIG.format(tmp_path))
    assert kvdepotctl(daemon, "trace", "record", "--seconds", "0.1", str(trace)).returncode == 0
    (directory,) = (tier.path for tier in load(daemon.directory / "kvdepot.toml").tables.tier)
    daemon.stop()
    verbs = [
        [verb, *options, path]
        for verb, path in (
            ("check-config", str(config)), ("fsck", directory), ("inspect", directory),
            ("inspect", str(FILES[Codec.NONE])), ("replay", str(trace)),
        )
        for options in ([], ["--json"])
    ]  # fmt: skip
    check("kvdepot.server.daemon.app", [*verbs, ["--help"], ["serve", "--help"], ["--version"]], OUTPUTS)


CONFIG = '[daemon]\nlisten = ["unix://{}/k.sock"]\nmetrics = ""\n[ram]\ncapacity = "384MiB"\n'


def test_a_daemon_without_standard_descriptors_writes_into_no_file_of_its_own() -> None:
    with DaemonProcess() as never_shown:
        never_shown.stop()
        shell = f"exec {' '.join(map(shlex.quote, never_shown.command()))} <&- >&- 2>&-"
        with subprocess.Popen(["/bin/sh", "-c", shell]) as process:
            try:
                wait_until(lambda: kvdepotctl(never_shown, "status").returncode == 0, "it serves")
                descriptors = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)]
            finally:
                process.terminate()
        assert descriptors == [os.devnull] * 3
        assert process.returncode == 0
