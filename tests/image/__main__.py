"""`python -m tests.image`: build the Dockerfile without a container engine, and run what comes of it.

As root, with Debian's buildah and debootstrap (`make image-check` installs them). The base is made from Debian
packages, because no registry may be in reach; it stays in build/image for the next time. Then a daemon of the image, as
its user, serves an engine outside of it, its health check says so, and it ends as a container's stop ends it.
Exits with 1 at the first thing that is not as docs/install.md says.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import RawEngine, dense_spec, keys_of, payload_of

ROOT: Final = Path(__file__).resolve().parents[2]
KEPT: Final = ROOT / "build" / "image"
BASE: Final = "localhost/kvdepot-base:bookworm"
IMAGE: Final = "kvdepot:check"
USER: Final = 10001
DEBIAN: Final = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
"""The host's: a site's own authority is in there."""
STORAGE: Final = ("--root", str(KEPT / "storage"), "--runroot", str(KEPT / "run"), "--storage-driver", "vfs")
CONFIG: Final = """
[daemon]
metrics = "127.0.0.1:0"
[ram]
capacity = "600MiB"
path = "/arena"
[[tier]]
name = "nvme"
kind = "disk"
path = "/var/lib/kvdepot"
capacity = "256MiB"
"""


def buildah(*arguments: str | os.PathLike[str]) -> str:
    """What it prints. Raises CalledProcessError."""
    command = ["buildah", *STORAGE, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_base() -> None:
    if BASE in buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        return
    folder = KEPT / "base"
    shutil.rmtree(folder, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={DEBIAN}", "bookworm", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    container = buildah("from", "scratch")
    buildah("copy", "-q", container, folder, "/")
    buildah("commit", "-q", "--rm", container, BASE)
    shutil.rmtree(folder)


def build() -> None:
    """As a user does, but for the base."""
    volume = ("--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro") if CERTIFICATES.exists() else ()
    buildah(
        "build",
        "--isolation",
        "chroot",
        "--format",
        "docker",
        "--build-arg",
        f"BASE={BASE}",
        *volume,
        "-t",
        IMAGE,
        ROOT,
    )


@contextmanager
def container() -> Iterator[str]:
    name = buildah("from", IMAGE)
    try:
        yield name
    finally:
        buildah("rm", name)


def daemon_pid(lock: Path) -> int:
    """The lock beside the socket has it: processes of a chroot are the host's."""
    wait_until(lambda: lock.exists() and lock.read_text().strip(), "the daemon in the container starts")
    return int(lock.read_text())


def serve(name: str, folder: Path) -> None:
    for part in ("sockets", "arena", "disk", "config"):
        (folder / part).mkdir()
        os.chown(folder / part, USER, USER)
    (folder / "config" / "kvdepot.toml").write_text(CONFIG)
    mounts = [
        option
        for source, target in (
            ("sockets", "/run/kvdepot"), ("arena", "/arena"), ("disk", "/var/lib/kvdepot"), ("config", "/etc/kvdepot"),
        )
        for option in ("-v", f"{folder / source}:{target}")
    ]  # fmt: skip
    run = ["buildah", *STORAGE, "run", "--isolation", "chroot", "--user", f"{USER}:{USER}", *mounts, name]
    process = subprocess.Popen(
        [*run, "kvdepotd", "serve", "/etc/kvdepot/kvdepot.toml"], stderr=subprocess.PIPE, text=True
    )
    try:
        socket = folder / "sockets" / "kvdepot.sock"
        pid = daemon_pid(socket.with_name("kvdepot.sock.lock"))
        wait_until(socket.exists, "the daemon in the container listens")
        assert Path(f"/proc/{pid}").stat().st_uid == USER, "it does not run as the image's user"
        keys = keys_of("image", 6)
        with RawEngine(socket, spec=dense_spec("image")) as engine:
            engine.store(keys)
            assert engine.load(keys) == [payload_of(key) for key in keys]
        healthy = subprocess.run([*run, "kvdepotctl", "status", "--json"], capture_output=True, check=False)
        assert healthy.returncode == 0, healthy.stderr
        os.kill(pid, signal.SIGTERM)
        assert process.wait(patient(30)) == 0, process.stderr and process.stderr.read()
    finally:
        process.kill()
    assert [path.suffix for path in sorted((folder / "arena").iterdir())] == [".arena", ".data", ".lock"]


def main() -> int:
    """Exit code 0, or 1 with the reason."""
    missing = [program for program in ("buildah", "debootstrap") if shutil.which(program) is None]
    if missing or os.geteuid():
        print("it needs root, and", " and ".join(missing or ["nothing else"]), file=sys.stderr)
        return 1
    KEPT.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    arena = Path(tempfile.mkdtemp(prefix="kvdimg", dir="/dev/shm"))
    try:
        make_base()
        build()
        size = buildah("images", "--format", "{{.Size}}", IMAGE)
        base = buildah("images", "--format", "{{.Size}}", BASE)
        with container() as name:
            serve(name, arena)
    except subprocess.CalledProcessError as error:
        print(error, error.stderr, sep="\n", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(arena, ignore_errors=True)
    print(f"built, served and stopped in {time.monotonic() - began:.0f} s; {size} with a base of {base}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
