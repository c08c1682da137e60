"""`kvdepotd install`: set the daemon up as a service of this host, from the files of the package.

It says each thing that it does. A second run changes nothing. What a site owns is never overwritten: an existing
configuration and every symbolic link stay, and each former content of a unit is kept next to it. Below `--root`, which
is somebody else's file system, nothing is read or written through a link that leads out of it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdepot.core.assets import BY_NAME, Asset, located
from kvdepot.core.printable import printable
from kvdepot.server.platform.durable_files import publish

if TYPE_CHECKING:
    from kvdepot.server.offline.subparsers import Subparsers

NAME: Final = "install"
SERVICE_FILES: Final = ("unit", "hold-unit", "sysusers", "tmpfiles")
CONFIG: Final = "config"
FORMER_SUFFIX: Final = ".old"
PACKAGED_PROGRAMS: Final = "/opt/kvdepot/bin/"
"""Where the shipped units have the programs."""
PROGRAMS: Final = ("kvdepotd", "kvdepotctl")
ON_THE_PATH: Final = "/usr/local/bin"
_HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - names, not used
"""ProtectHome= and PrivateTmp= of the units hide these."""
_IN_A_UNIT: Final = re.compile(r"[A-Za-z0-9/._+@:=,~-]+").fullmatch
"""What a path in ExecStart= may have without quotes, specifiers or variables (systemd.service(5))."""
_WOULD: Final = {"wrote": "would write", "replaced": "would replace", "linked": "would link"}
_BOOTED: Final = "/run/systemd/system"
_USER: Final = "kvdepot"
_FILE_MODE: Final = 0o644
_UMASK: Final = 0o022
"""The daemon is another user, who has to read what is written."""
_DONE, _REFUSED, _USAGE = 0, 1, 2
_EPILOG: Final = """\
With --systemd: writes the units of the daemon and of the holder, makes user, group and directories, writes
/etc/kvdepot/kvdepot.toml if there is none, links both commands into /usr/local/bin, and checks the configuration.
It starts nothing, unless --now is given. A second run changes nothing. To undo it: docs/install.md, "Remove the
service". Exit codes: 0 done; 1 a step failed; 2 wrong usage.
"""


class InstallError(Exception):
    """A step cannot be done. The message says why, and what to do."""


def add(verbs: Subparsers) -> None:
    parser = verbs.add_parser(NAME, help="set the daemon up as a service", epilog=_EPILOG)
    parser.add_argument("--systemd", action="store_true", required=True, help="as a service of systemd")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and change nothing")
    parser.add_argument("--now", action="store_true", help="also enable and start the service")
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="install into the file system at DIR, of an image for example"
    )


def run(options: argparse.Namespace) -> int:
    """Run the verb and return the exit code."""
    if options.now and options.root is not None:
        print("kvdepotd install: --now starts a service of this host, and --root is another", file=sys.stderr)  # noqa: T201
        return _USAGE
    if options.root is None and not options.dry_run and os.geteuid() != 0:
        print("kvdepotd install: needs root; --dry-run shows what it would do", file=sys.stderr)  # noqa: T201
        return _REFUSED
    os.umask(_UMASK)
    installation = Installation(options.root or Path("/"), Path(sys.prefix) / "bin", dry_run=options.dry_run)
    try:
        for line in installation.steps(now=options.now):
            print(printable(line), flush=True)  # noqa: T201
    except BrokenPipeError:  # nobody reads what is printed
        raise
    except (InstallError, OSError) as error:
        print(f"kvdepotd install: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        return _REFUSED
    return _DONE


class Installation:
    """The steps for the file system at `root`, with the programs in `programs`. A dry run only says them."""

    def __init__(self, root: Path, programs: Path, *, dry_run: bool = False) -> None:
        self._root = root
        self._programs = programs
        self._dry_run = dry_run
        self._here = root == Path("/")

    def steps(self, *, now: bool) -> Iterator[str]:
        """Do the steps, and yield a line for each. Raise InstallError or OSError."""
        self._check_programs()
        if caution := self._caution():
            yield caution
        for name in SERVICE_FILES:
            yield self._service_file(BY_NAME[name])
        yield self._configuration()
        for program in PROGRAMS:
            yield self._link(program)
        at = () if self._here else (f"--root={self._root}",)
        tmpfiles = Path(BY_NAME["tmpfiles"].place).name
        yield self._command("user and group", "systemd-sysusers", *at, Path(BY_NAME["sysusers"].place).name)
        yield self._command("directories", "systemd-tmpfiles", *at, "--create", tmpfiles)
        if not self._here:
            return
        check = (str(self._programs / "kvdepotd"), "check-config", BY_NAME[CONFIG].place)
        yield self._command("the configuration", "runuser", "-u", _USER, "--", *check)
        if not Path(_BOOTED).is_dir():
            yield "skipped: systemctl, because systemd does not run here"
            return
        yield self._command("units", "systemctl", "daemon-reload")
        enable = ("systemctl", "enable", "--now", *(Path(BY_NAME[name].place).stem for name in ("hold-unit", "unit")))
        yield self._command("service", *enable) if now else f"to start it: {' '.join(enable)}"

    def _check_programs(self) -> None:
        missing = [name for name in PROGRAMS if not (self._programs / name).exists()]
        if missing:
            raise InstallError(f"{self._programs} has no {' and no '.join(missing)}: pip install 'kvdepot[node]'")
        if not _IN_A_UNIT(str(self._programs)):
            raise InstallError(f"a unit cannot name {str(self._programs)!r}: install kvdepot into a simpler path")
        # The programs may be links, and are run by a Python that may be elsewhere.
        needed = (self._programs, self._programs.resolve(), Path(sys.base_prefix).resolve())
        for place in needed if self._here else ():
            if any(place.is_relative_to(folder) for folder in _HIDDEN):
                raise InstallError(
                    f"the service cannot see {place}: install kvdepot elsewhere, with a Python that is elsewhere, for "
                    "example with `/usr/bin/python3 -m venv /opt/kvdepot`"
                )

    def _caution(self) -> str:
        """Return a warning if another user than root can change what root runs as kvdepotctl. Empty if not."""
        if not self._here:
            return ""
        for place in (self._programs, *(self._programs / name for name in PROGRAMS)):
            found = place.stat()
            if found.st_uid != 0 or found.st_mode & 0o022:
                return f"caution: uid {found.st_uid}, or its group, can change {place}, which the service and root run"
        return ""

    def _service_file(self, asset: Asset) -> str:
        content = located(asset).read_text().replace(PACKAGED_PROGRAMS, f"{self._programs}/").encode()
        path = self._at(asset.place)
        if path.is_symlink():  # a masked unit, or one that the site keeps elsewhere
            return f"kept: {asset.place}, a link to {path.readlink()}"
        former = path.read_bytes() if path.exists() else None
        if former == content:
            return f"unchanged: {asset.place}"
        if former is None:
            self._write(path, content)
            return self._said("wrote", asset.place)
        old = self._keep(asset.place, former)
        self._write(path, content)
        return self._said("replaced", f"{asset.place}; the former content is in {old}")

    def _keep(self, place: str, former: bytes) -> str:
        """Keep the former content of a file next to it, and all that were kept before. Return where it is."""
        for number in count(1):
            old = f"{place}{FORMER_SUFFIX}" + (f".{number}" if number > 1 else "")
            path = self._at(old)
            if not path.is_symlink() and not path.exists():
                self._write(path, former)
                return old
            if not path.is_symlink() and path.read_bytes() == former:
                return old
        raise AssertionError("unreachable")

    def _configuration(self) -> str:
        asset = BY_NAME[CONFIG]
        path = self._at(asset.place)
        if path.is_symlink() or path.exists():  # a link may lead to what is mounted later
            return f"kept: {asset.place}"
        self._write(path, located(asset).read_bytes())
        return self._said("wrote", asset.place)

    def _link(self, program: str) -> str:
        place, target = f"{ON_THE_PATH}/{program}", self._programs / program
        path = self._at(place)
        if str(target) == place or (path.is_symlink() and path.readlink() == target):
            return f"unchanged: {place}"
        if path.is_symlink() or path.exists():
            return f"kept: {place}, which is not ours"
        if not self._dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
        return self._said("linked", f"{place} -> {target}")

    def _command(self, about: str, *command: str) -> str:
        """Run a command of the host. Its output is shown if it fails."""
        line = f"{' '.join(command)} ({about})"
        if self._dry_run:
            return f"would run: {line}"
        if shutil.which(command[0]) is None:
            raise InstallError(f"there is no {command[0]} here, which makes {about}: install systemd")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InstallError(f"{' '.join(command)} failed with {done.returncode}: {_output(done)}")
        return f"ran: {line}"

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file that others may read."""
        if self._dry_run:
            return
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        publish(path, [content], _FILE_MODE)

    def _said(self, done: str, what: str) -> str:
        return f"{_WOULD[done] if self._dry_run else done}: {what}"

    def _at(self, place: str) -> Path:
        """Return the path of a place. Raise InstallError if its folder is out of the root, by a symbolic link."""
        path = self._root / place.lstrip("/")
        if not path.parent.resolve().is_relative_to(self._root.resolve()):
            raise InstallError(f"{path.parent} leads to {path.parent.resolve()}, which is not in {self._root}")
        return path


def _output(done: subprocess.CompletedProcess[str]) -> str:
    lines: Sequence[str] = (done.stderr or done.stdout).strip().splitlines()
    return "; ".join(lines) or "it says nothing"
