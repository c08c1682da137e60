"""`python -m tests.dist FOLDER`: check the wheel and the sdist in FOLDER (`make dist`). Exit with 1 at a fault."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.dist.installed import Installed, check_service
from tests.dist.packing import ROOT, make, problems, project


def main(folder: Path) -> int:
    """Return the exit code, and print what was checked."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    version = project()["version"]
    with tempfile.TemporaryDirectory(prefix="kvdist") as name:
        scratch = Path(name)
        found = problems(wheel)
        if make("wheel", ROOT, scratch).read_bytes() != wheel.read_bytes():
            found.append("the sdist does not build the wheel that the source tree builds")
        if found:
            print(*found, sep="\n", file=sys.stderr)
            return 1
        installed = Installed(scratch / "venv", wheel)
        printed = [installed.printed(program, "--version") for program in ("kvdepotd", "kvdepotctl")]
        installed.printed("kvdepotd", "check-config", "--any-host", str(installed.assets / "kvdepot.toml"))
        status = check_service(installed)
    if status["daemon_version"] != version or not all(line.endswith(f" {version}") for line in printed):
        print(f"the version is {version}, not {printed}, {status['daemon_version']}", file=sys.stderr)
        return 1
    print(f"{wheel.name}: installed, served, stopped\n{sdist.name}: builds the same wheel")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except subprocess.CalledProcessError as error:
        print(error, error.stdout, error.stderr, sep="\n", file=sys.stderr)
        sys.exit(1)
