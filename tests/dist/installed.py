"""A wheel in an environment of its own, without the source tree, and a daemon started from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tests.dist.packing import ASSETS, ROOT
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import RawEngine, dense_spec, keys_of, payload_of

PINS: Final = ROOT / "requirements" / "image.txt"
"""All that daemon and tool need, and nothing else."""
CONFIG: Final = """
[daemon]
listen = ["unix://{folder}/d.sock"]
metrics = "127.0.0.1:0"
[ram]
capacity = "512MiB"
path = "{arena}"
[[tier]]
name = "nvme"
kind = "disk"
path = "{folder}/disk"
capacity = "256MiB"
"""
_MEMORY: Final = Path("/dev/shm")


class Installed:
    """A new virtual environment with one wheel.

    What the wheel needs is linked from the environment of the tests: no index is asked, and nothing that is not
    pinned for the image can be imported.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        """Raise CalledProcessError if the wheel cannot be installed, or needs something that is not pinned."""
        venv.create(folder, symlinks=True)
        self.folder = folder
        (self.packages,) = folder.glob("lib/python3*/site-packages")
        for line in PINS.read_text().splitlines():
            if not line.startswith("#"):
                self._link(metadata.distribution(line.partition("==")[0]))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", str(folder / "bin/python")]
        for arguments in (["install", "--no-index", f"{wheel}[node]"], ["check"]):
            subprocess.run([*pip, *arguments], check=True, capture_output=True, text=True)

    def _link(self, distribution: metadata.Distribution) -> None:
        for file in distribution.files or ():
            link = self.packages / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(file.parts[0]))).resolve())

    @property
    def assets(self) -> Path:
        """The files of `configs`."""
        return self.packages / ASSETS

    def command(self, program: str, *arguments: str) -> list[str]:
        return [str(self.folder / "bin" / program), *arguments]

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command from the root directory, with an environment that says nothing of Python."""
        command = self.command(program, *arguments)
        return subprocess.run(
            command, cwd="/", env=_environment(), capture_output=True, text=True, timeout=patient(60), check=False
        )

    def printed(self, program: str, *arguments: str) -> str:
        """Return what a command prints. Raise AssertionError if it fails."""
        done = self.run(program, *arguments)
        assert done.returncode == 0, (done.args, done.stderr)
        return done.stdout.strip()

    def places_of(self, *modules: str) -> list[str]:
        """Return the files that modules are imported from."""
        code = f"import {', '.join(modules)}; print(*({', '.join(f'{name}.__file__' for name in modules)},), sep='\\n')"
        return self.printed("python", "-c", code).splitlines()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVDEPOT", "VIRTUAL"))}


@contextmanager
def serving(installed: Installed) -> Iterator[Path]:
    """Yield the daemon's socket. At the end, stop the daemon as a service manager does; it has to end with 0."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd", dir="/tmp") as name,
        tempfile.TemporaryDirectory(prefix="kvd", dir=_MEMORY) as arena,
    ):
        folder = Path(name)
        config, log = folder / "kvdepot.toml", folder / "log"
        config.write_text(CONFIG.format(folder=folder, arena=arena))
        installed.printed("kvdepotd", "check-config", str(config))
        with log.open("w") as out:
            command = installed.command("kvdepotd", "serve", str(config))
            process = subprocess.Popen(command, cwd="/", env=_environment(), stdout=out, stderr=out)
        try:
            wait_until(lambda: process.poll() is not None or "ready to serve" in log.read_text(), "the daemon serves")
            assert process.poll() is None, log.read_text()
            yield folder / "d.sock"
            process.send_signal(signal.SIGTERM)
            assert process.wait(patient(30)) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def check_service(installed: Installed) -> dict[str, Any]:
    """Store and load through a daemon of the wheel, and return what `kvdepotctl status` prints of it."""
    with serving(installed) as socket:
        keys = keys_of("wheel", 6)
        with RawEngine(socket, spec=dense_spec("wheel")) as engine:
            engine.store(keys)
            assert engine.load(keys) == [payload_of(key) for key in keys]
        printed = installed.printed("kvdepotctl", "--endpoint", f"unix://{socket}", "status", "--json")
        status: dict[str, Any] = json.loads(printed)
        return status
