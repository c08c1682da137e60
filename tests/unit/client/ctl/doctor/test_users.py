"""Who shares the KV of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.credentials import Credentials
from kvdepot.client.ctl.doctor.daemon import Daemon
from kvdepot.client.ctl.doctor.findings import Outcome
from kvdepot.client.ctl.doctor.host import Host
from kvdepot.client.ctl.doctor.users import check_engine_users, check_group
from kvdepot.client.endpoint import Endpoint

from tests.fakes.daemon_status import STATUS

ENDPOINT = Endpoint.parse("unix:///run/kvdepot/kvdepot.sock")
PASSWD = """root:x:0:0::/root:/bin/sh
kvdepot:x:990:{gid}::/:/usr/sbin/nologin
vllm:x:1001:1001::/:/bin/sh
alice:x:1002:{gid}::/:/bin/sh
a broken line
"""


def host_with(root: Path, mode: int, members: str) -> tuple[Host, int]:
    socket = root / "run/kvdepot/kvdepot.sock"
    socket.parent.mkdir(parents=True)
    socket.touch()
    socket.chmod(mode)
    gid = socket.stat().st_gid
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text(PASSWD.format(gid=gid))
    (root / "etc/group").write_text(f"other:x:{gid + 1}:mallory\nkvdepot:x:{gid}:{members}\nbroken\n")
    return Host(root, environment={}), gid


@pytest.mark.parametrize(
    ("mode", "members", "outcome", "named"),
    [
        (0o660, "vllm", Outcome.WARN, ["alice", "vllm"]),
        (0o660, "root,kvdepot", Outcome.OK, ["alice"]),
        (0o600, "vllm", Outcome.OK, []),
        (0o660, ",".join(f"u{number:02}" for number in range(20)), Outcome.WARN, ["alice", "u06", "and 13 more"]),
    ],
    ids=["two", "one", "closed", "many"],
)  # fmt: skip
def test_a_group_of_several_users_is_a_warning(
    tmp_path: Path, mode: int, members: str, outcome: Outcome, named: list[str]
) -> None:
    host, _ = host_with(tmp_path, mode, members)
    found = check_group(Daemon(ENDPOINT, STATUS, peer=Credentials(1, 990, 990)), host)
    assert found.outcome is outcome
    assert all(name in found.message for name in named)
    assert "mallory" not in found.message and "root" not in found.message and "kvdepot" not in found.message


def test_a_daemon_without_a_socket_is_skipped(tmp_path: Path) -> None:
    assert check_group(Daemon(ENDPOINT), Host(tmp_path)).outcome is Outcome.SKIPPED


@pytest.mark.parametrize(("uids", "outcome"), [([], Outcome.OK), ([7, 7], Outcome.OK), ([7, 8], Outcome.WARN)])
def test_engines_of_several_users_are_a_warning(tmp_path: Path, uids: list[int], outcome: Outcome) -> None:
    for pid, uid in enumerate(uids, start=100):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/status").write_text(f"Name:\tx\nUid:\t0\t{uid}\t0\t0\n")
    sessions: list[Any] = [type("Session", (), {"pids": (pid,)}) for pid in (100, 101, 102)]
    found = check_engine_users(Host(tmp_path), sessions)
    assert found.outcome is outcome
    assert found.message.startswith(
        {0: "no engine", 1: "all engines are of user 7", 2: "engines of users 7, 8"}[len({*uids})]
    )
