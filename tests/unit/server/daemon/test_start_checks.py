"""`check-config` and `serve` judge every configuration alike: each of these goes through both."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.server.config import arena_directory
from kvdepot.server.config.config import load
from kvdepot.server.daemon import app

TIER = '[[tier]]\nname = "{name}"\nkind = "disk"\npath = "{path}"\ncapacity = "64MiB"\n'
STARTS = ""
KEYED = (
    '------[[tier]]\nname = "pool"\nkind = "shared"\npath = "B/tier"\ncapacity = "1GiB"\non_root_filesystem = true\n'
    'key_file = "{file}"\n'
)


class Host:
    """A directory for sockets, state and tiers, and one for arenas, with what the cases find there."""

    def __init__(self, base: Path) -> None:
        self.base = base
        for name in ("run", "tier", "shm"):
            (base / name).mkdir()
        (base / "link").symlink_to("tier")
        (base / "arena-link").symlink_to("shm")
        (base / "file").write_text("somebody's")
        (base / "run/is-a-file").write_text("somebody's")
        (base / "run/is-a-folder").mkdir()
        (base / "run/k2.attach").write_text("somebody's")
        (base / "run/k3.lock").symlink_to("elsewhere")
        (base / "bad-state").write_text("{")
        (base / "loop").symlink_to("loop")
        (base / "run/half-a-key").write_text("abc")
        (base / "run/half-a-key").chmod(0o600)

    def config(self, text: str) -> Path:
        """`B` stands for the base. Keys of [daemon] and [ram] stand before the first table of `text`."""
        daemon, ram, rest = [*text.replace("B/", f"{self.base}/").split("---"), "", ""][:3]
        given = dict(line.split(" = ", 1) for line in daemon.splitlines())
        lines = ["[daemon]", *(f"{key} = {value}" for key, value in given.items())]
        lines += [f'listen = ["unix://{self.base}/run/k.sock"]'] * ("listen" not in given)
        lines += ['metrics = ""'] * ("metrics" not in given)
        given = dict(line.split(" = ", 1) for line in ram.splitlines())
        lines += ["[ram]", *(f"{key} = {value}" for key, value in given.items())]
        lines += ['capacity = "640MiB"'] * ("capacity" not in given)
        lines += [f'path = "{self.base}/shm"'] * ("path" not in given)
        path = self.base / "kvdepot.toml"
        path.write_text("\n".join([*lines, rest]))
        return path


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    class AtOnce(asyncio.Event):
        """Nobody has to send a signal: a daemon that has started stops."""

        async def wait(self) -> bool:  # type: ignore[override]
            return True

    class OfTheApp:
        """Other modules have real events: what waits for one there would not let go of the loop."""

        Event = AtOnce

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

    monkeypatch.setattr(app, "asyncio", OfTheApp())
    monkeypatch.setattr(app.os, "umask", lambda mask: mask)  # type: ignore[attr-defined]
    base = Path(tempfile.mkdtemp(prefix="kvd", dir="/dev/shm"))
    yield Host(base)
    shutil.rmtree(base)


def tiers(*paths: str) -> str:
    return "------" + "".join(TIER.format(name=f"t{number}", path=path) for number, path in enumerate(paths))


NUL = "\\u0000"
CASES = {
    # the daemon's sockets
    "no directory": ('listen = ["unix://B/absent/k.sock"]', "daemon.listen: cannot use"),
    "in a file": ('listen = ["unix://B/file/k.sock"]', "daemon.listen: cannot use"),
    "is a file": ('listen = ["unix://B/run/is-a-file"]', "exists and is not a socket"),
    "is a folder": ('listen = ["unix://B/run/is-a-folder"]', "exists and is not a socket"),
    "attachments at a file": ('listen = ["unix://B/run/k2"]', "k2.attach exists and is not a socket"),
    "a lock that is a link": ('listen = ["unix://B/run/k3"]', "k3.lock"),
    "in a loop of links": ('listen = ["unix://B/loop/k"]', "daemon.listen: cannot use"),
    "root": ('listen = ["unix:///"]', "expected unix:///absolute/path of a file"),
    "slash at the end": ('listen = ["unix://B/run/"]', "expected unix:///absolute/path of a file"),
    "dots at the end": ('listen = ["unix://B/run/.."]', "expected unix:///absolute/path of a file"),
    "comma": ('listen = ["unix://B/run/a,b"]', "comma"),
    "too long": (f'listen = ["unix://B/run/{"x" * 100}"]', "expected at most 107"),
    "name too long": (f'state = "B/{"x" * 253}"', "too long"),
    "twice by slashes": ('listen = ["unix://B/run/k", "unix://B/run//k"]', "is also the socket"),
    "twice by a link": ('listen = ["unix://B/tier/k", "unix://B/link/k"]', "is also the socket"),
    "socket of attachments": ('listen = ["unix://B/run/k", "unix://B/run/k.attach"]', "is also the attachment socket"),
    "nul in listen": (f'listen = ["unix://B/run/k{NUL}"]', "daemon.listen: "),
    # addresses
    "port": ('metrics = "127.0.0.1:65536"', "daemon.metrics: "),
    "no port": ('metrics = "127.0.0.1"', "daemon.metrics: "),
    "sign": ('metrics = "127.0.0.1:+80"', "daemon.metrics: "),
    "no host": ('metrics = ":80"', "daemon.metrics: "),
    "half a bracket": ('metrics = "[::1:80"', "daemon.metrics: "),
    "empty label": ('metrics = "a..b:0"', "daemon.metrics: "),
    "label too long": (f'metrics = "{"a" * 70}:0"', "daemon.metrics: "),
    "another host's": ('metrics = "192.0.2.1:0"', "daemon.metrics: cannot listen on 192.0.2.1:0"),
    "nul in metrics": (f'metrics = "127.0.0.1{NUL}:0"', "NUL"),
    # users and groups
    "group": ('group = "no-such-group"', "does not exist on this host"),
    "nul in group": (f'group = "a{NUL}"', "NUL"),
    # the state
    "state unreadable": ('state = "B/bad-state"', "bad-state: is not a state file"),
    "state is a folder": ('state = "B/tier"', "cannot be read"),
    "state in a file": ('state = "B/file/state"', "cannot be read"),
    "state is the socket": ('listen = ["unix://B/run/k"]\nstate = "B/run/k"', "is also the state file"),
    "state is a lock": ('listen = ["unix://B/run/k"]\nstate = "B/run/k.lock"', "is also the state file"),
    "state of streams": ('listen = ["unix://B/run/k"]\nstate = "B/run/k.stream-9"', "streams of"),
    "nul in state": (f'state = "/x{NUL}"', "NUL"),
    # the arena
    "arena in a file": ('---path = "B/file"', "ram.path: "),
    "arena nowhere": ('---path = "B/absent"', "ram.path: "),
    "name of the arena too long": (f'---path = "B/{"x" * 300}"', "ram.path: "),
    "more than there is": ('---capacity = "900TiB"', "ram.capacity: a capacity of"),
    "nul in ram.path": (f'---path = "/x{NUL}"', "NUL"),
    # tiers
    "one in the other": (tiers("B/tier", "B/tier/sub"), "overlap"),
    "one in the other by a link": (tiers("B/link/sub", "B/tier"), "overlap"),
    "one directory by a link": (tiers("B/tier", "B/link"), "overlap"),
    "one directory by a loop of dots": (tiers("B/tier", "B/run/../link/."), "overlap"),
    "around the arena": (tiers("B/shm"), "contains the arena"),
    "around the arena by a link": (tiers("B/arena-link"), "contains the arena"),
    "around the socket": (tiers("B/run"), "lies in the directory of tier"),
    "around the state by a link": ('state = "B/link/state"' + tiers("B/tier"), "lies in the directory of tier"),
    "nul in a tier": (tiers(f"/x{NUL}y"), "tier[0].path: "),
    "no key file": (KEYED.format(file="B/absent/key"), "absent/key cannot be used"),
    "a key half written": (KEYED.format(file="B/run/half-a-key"), "half-a-key: "),
    # traces
    "no scheme": ('---' * 2 + '[trace]\nendpoint = "localhost:4318"', "expected an http:// or https:// URL"),
    "no host of traces": ('---' * 2 + '[trace]\nendpoint = "http://"', "expected an http:// or https:// URL"),
    "half a bracket of trace": ('---' * 2 + '[trace]\nendpoint = "http://[::1"', "expected an http:// or https:// URL"),
    "port of traces": ('---' * 2 + '[trace]\nendpoint = "http://a:99999/"', "expected an http:// or https:// URL"),
    # the file
    "nested": (f"------a = {'[' * 5000}{']' * 5000}", "is no TOML"),
    "digits": (f"------a = {'9' * 5000}", "is no TOML"),
    # what is fine
    "plain": ("", STARTS),
    "socket with signs": ('listen = ["unix://B/run/a%41?b#c d\\ne\\u00e9"]', STARTS),
    "localhost": ('metrics = "localhost:0"', STARTS),
    "IPv6": ('metrics = "[::1]:0"', STARTS),
    "state that is not there": ('state = "B/tier/state"', STARTS),
    "two tiers and slashes": (tiers("B/tier/a/", "B/tier//b"), STARTS),
    "a tier that is a file": (tiers("B/file"), STARTS),
    "a tier beside the arena": (tiers("B/shm/tier"), STARTS),
}  # fmt: skip


def judged(verb: str, file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = app.main([verb, str(file)])
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return code, errors


@pytest.mark.parametrize(("text", "reason"), CASES.values(), ids=CASES)
def test_check_config_and_serve_judge_alike(
    host: Host, text: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if "[::1]" in text and not _has_ipv6():
        pytest.skip("this host has no ::1")
    file = host.config(text)
    before = sorted(path.relative_to(host.base) for path in host.base.rglob("*"))
    checked, why = judged("check-config", file, capfd)
    assert sorted(path.relative_to(host.base) for path in host.base.rglob("*")) == before, "it only looks"
    served, log = judged("serve", file, capfd)
    assert checked == served and bool(checked) == bool(reason), why + log
    assert reason in why
    told, logged = (re.sub("[0-9]+", "N", text.replace("\\n", "\n")) for text in (why, log))  # what is free changes
    assert not reason or told.removeprefix("kvdepotd: ").strip() in logged


HOST_FACTS = (
    "no directory", "in a file", "is a file", "another host's", "group", "state unreadable",
    "more than there is", "no key file", "a key half written",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_file_for_another_host_is_judged_without_this_host_s_facts(
    host: Host, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text, reason = CASES[name]
    if "[::1]" in text and not _has_ipv6():
        pytest.skip("this host has no ::1")
    code = app.main(["check-config", "--any-host", str(host.config(text))])
    said, errors = capfd.readouterr()
    judged_by_host = "about this host (" in said
    assert name not in HOST_FACTS or judged_by_host
    assert (bool(code), bool(errors)) == ((False, False) if judged_by_host or not reason else (True, True))
    assert reason in (said.partition("about this host (")[2] if judged_by_host else errors)


@pytest.mark.parametrize("verb", ["check-config", "serve", "hold"])
def test_a_wrong_file_is_told_whole_and_a_service_manager_does_not_repeat_the_start(
    host: Host, verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = host.config('mode = "rwx"---capasity = "1GiB"\nhigh_watermark = 2---[log]\nlevel = "loud"')
    code, errors = judged(verb, file, capfd)
    assert code == app.EXIT_CONFIG
    keys = ("daemon.mode", "ram.high_watermark", "ram.capasity", "log.level")
    assert [line.split(": ")[2] for line in errors.splitlines()] == list(keys)
    unit = Path(__file__).parents[4] / f"configs/systemd/kvdepot{'-hold' if verb == 'hold' else 'd'}.service"
    assert f"RestartPreventExitStatus={app.EXIT_CONFIG}\n" in unit.read_text()


def test_settings_that_contradict_each_other_are_told_together(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    text = tiers("B/a", "B/b").replace('"t1"', '"t0"').removeprefix("------")
    text += '[[quota]]\ntier = "none"\ncapacity = "1GiB"\n[sessions]\ncredit = "9GiB"'
    code, errors = judged("check-config", host.config(f"------{text}"), capfd)
    assert code == app.EXIT_CONFIG
    assert [line.split(": ")[2] for line in errors.splitlines()] == ["tier.name", "quota[0].tier", "sessions.credit"]


@pytest.mark.parametrize("name", HOST_FACTS)
def test_what_the_host_may_mend_is_tried_again(host: Host, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A mount that comes late, a directory service that does not answer yet."""
    assert judged("serve", host.config(CASES[name][0]), capfd)[0] == 1


def test_a_holder_s_full_file_system_and_a_disk_that_is_not_there_yet_are_tried_again(
    host: Host, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["serve", str(host.config("")), "--disk", "/proc/none"]) == 1

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = host.base / "default.toml"
    file.write_text(f'[daemon]\nlisten = ["unix://{host.base}/run/new.sock"]\n')
    monkeypatch.setattr(Path, "mkdir", full)
    monkeypatch.setattr(arena_directory, "BASE", host.base / "shm")
    assert app.main(["hold", str(file)]) == 1
    assert "cannot create" in capfd.readouterr().err


def test_the_price_of_another_size_is_told_before_it_is_paid(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    file = host.config("")
    assert judged("serve", file, capfd)[0] == 0
    assert app.main(["check-config", str(file)]) == 0
    assert "RAM" not in capfd.readouterr().out
    assert app.main(["check-config", str(host.config('---capacity = "700MiB"'))]) == 0
    assert "warning: RAM will begin empty, because the arena is replaced: its size" in capfd.readouterr().out


@pytest.mark.requirement("T6")
def test_a_changed_tier_keeps_ram_and_the_rest_is_told(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    def told(size: str, tier: str) -> str:
        assert app.main(["check-config", str(host.config(f'---capacity = "{size}"{tier}'))]) == 0
        return capfd.readouterr().out

    tier = "---" + TIER.format(name="d", path=host.base / "tier")
    assert judged("serve", host.config('---capacity = "700MiB"'), capfd)[0] == 0
    assert "warning: the next start keeps RAM, but RAM shrinks from" in told("700MiB", tier)
    assert "RAM" not in told("700MiB", "")
    assert "warning: RAM will begin empty" in told("800MiB", tier)


def test_everything_that_this_host_lacks_is_named(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    text = 'listen = ["unix:///run/no-kvdepot/k.sock"]\ngroup = "no-such-group"---capacity = "900TiB"'
    assert app.main(["check-config", "--any-host", str(host.config(text))]) == 0
    lines = capfd.readouterr().out.splitlines()
    warnings = lines[lines.index(next(line for line in lines if line.startswith("about this host"))) + 1 :]
    assert all(line.startswith("warning: ") for line in warnings)
    assert [word for word in ("daemon.listen: ", "daemon.group: ", "ram.capacity: ") if word in "".join(warnings)] == [
        "daemon.listen: ", "daemon.group: ", "ram.capacity: "
    ]  # fmt: skip


def test_a_filter_that_does_not_know_faccessat2_refuses_no_start(
    host: Host, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """os.access answers False for EPERM and ENOSYS, too."""
    access = os.access

    def filtered(path: os.PathLike[str], mode: int, *, effective_ids: bool = False) -> bool:
        return not effective_ids and access(path, mode)

    monkeypatch.setattr(os, "access", filtered)
    file = host.config("")
    assert [judged(verb, file, capfd)[0] for verb in ("check-config", "serve")] == [0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="giving privileges up needs root")
def test_a_directory_that_cannot_be_written_to_is_refused(host: Host) -> None:
    host.base.chmod(0o755)
    (host.base / "run").chmod(0o755)
    host.config("").chmod(0o644)
    program = (
        "import os, sys\nfrom kvdepot.server.daemon import app\napp.main()  # reads what it imports late\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.exit(app.main())"
    )
    command = [sys.executable, "-c", program, "check-config", str(host.base / "kvdepot.toml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 1 and "cannot be written to" in checked.stderr, checked.stderr


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("variable", ["KVDEPOT_RAM__PATH", "KVDEPOT_DAEMON__STATE", "KVDEPOT_DAEMON__LISTEN"])
def test_bytes_that_are_no_text_are_refused_by_the_variable_s_name(
    host: Host, variable: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    strange = host.base / os.fsdecode(b"x\xff")
    strange.mkdir()
    monkeypatch.setenv(variable, f"unix://{strange}/k" if variable.endswith("LISTEN") else str(strange))
    file = host.config("")
    for verb in ("check-config", "serve"):
        code, errors = judged(verb, file, capfd)
        assert code == app.EXIT_CONFIG and f"environment: {variable}: " in errors and "is not UTF-8" in errors


def test_hard_links_of_one_file_are_one_file(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    (host.base / "run/k.sock.lock").touch(0o600)
    os.link(host.base / "run/k.sock.lock", host.base / "tier/state.lock")
    file = host.config('state = "B/tier/state"')
    for verb in ("check-config", "serve"):
        code, errors = judged(verb, file, capfd)
        assert code == 1 and "is also the state file's lock" in errors


def test_programs_get_the_address_as_it_stands_in_a_url(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    for address, shown in (("::1:9421", "[::1]:9421"), ("127.0.0.1:0", "127.0.0.1:0"), ("", "")):
        assert app.main(["check-config", "--json", str(host.config(f'metrics = "{address}"'))]) in (0, 1)
        assert json.loads(capfd.readouterr().out)["daemon"]["metrics"] == shown


def test_a_file_s_name_may_have_any_byte(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    file = host.config("").rename(host.base / os.fsdecode(b"\xff.toml"))
    assert judged("check-config", file, capfd)[0] == 0
    assert judged("serve", file, capfd)[0] == 0
    assert load(file).file == f"{host.base}/\\udcff.toml"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
@pytest.mark.parametrize("name", ["run/k.sock.lock", "state"])
def test_files_of_another_user_are_refused(host: Host, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    (host.base / name).touch(0o600)
    os.chown(host.base / name, 65534, 65534)
    file = host.config('state = "B/state"')
    for verb in ("check-config", "serve"):
        code, errors = judged(verb, file, capfd)
        assert code == 1 and "no regular file of uid 0" in errors
