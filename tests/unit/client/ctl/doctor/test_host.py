"""`kvdepotctl doctor` of the machine: limits, memory, kernel, logind, as files that a test has put somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvdepot.client.ctl.doctor import memory
from kvdepot.client.ctl.doctor.findings import Outcome
from kvdepot.client.ctl.doctor.host import Host
from kvdepot.client.ctl.doctor.settings import Place, Settings
from kvdepot.core.proc_text import Mount

GIB = 1 << 30
MEMINFO = "MemTotal:       67108864 kB\nMemAvailable:   60000000 kB\nSwapTotal:       8388608 kB\n"
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            {files}               1048576              files
Max locked memory         {memlock}              unlimited            bytes
"""
LOGIND = "etc/systemd/logind.conf"
DROPINS = f"{LOGIND}.d"


def settings(capacity_bytes: int = 16 * GIB) -> Settings:
    return Settings("a.toml", capacity_bytes, (Place("ram", "ram", "/dev/shm", capacity_bytes - GIB),))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A good machine, with a daemon of pid 7."""
    put(tmp_path, "proc/meminfo", MEMINFO)
    put(tmp_path, "proc/sys/kernel/osrelease", "6.8.0-52-generic\n")
    for process in ("7", "self"):
        put(tmp_path, f"proc/{process}/limits", LIMITS.format(files=65536, memlock="unlimited"))
        put(tmp_path, f"proc/{process}/status", "Name:\tkvdepotd\nCapEff:\t0000000000000000\n")
        put(tmp_path, f"proc/{process}/cgroup", "0::/system.slice/kvdepotd.service\n")
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    return Host(tmp_path, environment={})


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_good_machine_is_ok(host: Host) -> None:
    findings = [
        memory.check_memory(settings(), host),
        memory.check_memory_limit(settings(), host, "7"),
        memory.check_locked_memory(settings(), host, "7"),
        memory.check_open_files(host, "7"),
        memory.check_kernel(host),
        memory.check_remove_ipc(host, 990),
    ]
    assert [one.outcome for one in findings] == [Outcome.OK] * len(findings)


def test_what_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert memory.check_memory(settings(), host).outcome is Outcome.SKIPPED
    assert memory.check_locked_memory(settings(), host, "7").outcome is Outcome.SKIPPED
    assert memory.check_open_files(host, "7").outcome is Outcome.SKIPPED
    assert memory.check_kernel(host).outcome is Outcome.SKIPPED
    assert memory.check_remove_ipc(host, 1000).message == "no logind runs"


def test_more_than_the_machine_has(host: Host) -> None:
    found = memory.check_memory(settings(65 * GIB), host)
    assert found.outcome is Outcome.FAIL
    assert "65.00 GiB, the machine has 64.00 GiB" in found.message and found.fix == "lower [ram] capacity"
    assert memory.check_memory(settings(60 * GIB), host).outcome is Outcome.WARN


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/system.slice/kvdepotd.service\n", "system.slice/memory.max"),
        ("5:memory:/docker/a\n0::/\n", "memory/docker/memory.limit_in_bytes"),
    ],
)
def test_a_cgroup_that_is_too_small(host: Host, membership: str, file: str) -> None:
    put(host.root, "proc/7/cgroup", membership)
    put(host.root, "proc/self/cgroup", membership)
    put(host.root, f"sys/fs/cgroup/{file}", f"{8 * GIB}\n")
    found = memory.check_memory_limit(settings(), host, "7")
    assert found.outcome is Outcome.FAIL
    assert "allows 8.00 GiB" in found.message and "MemoryMax" in found.fix
    assert memory.check_memory_limit(settings(), host, "self").outcome is Outcome.WARN
    assert memory.check_memory_limit(settings(7 * GIB), host, "7").outcome is Outcome.OK


def test_a_cgroup_without_a_limit(host: Host) -> None:
    put(host.root, "sys/fs/cgroup/system.slice/memory.max", "max\n")
    put(host.root, "sys/fs/cgroup/system.slice/kvdepotd.service/memory.max", f"{(1 << 63) - 4096}\n")
    assert memory.check_memory_limit(settings(), host, "7").message == "no limit of memory"


def test_too_little_may_be_locked(host: Host) -> None:
    put(host.root, "proc/7/limits", LIMITS.format(files=65536, memlock=8 << 20))
    found = memory.check_locked_memory(settings(), host, "7")
    assert found.outcome is Outcome.WARN
    assert "8.00 MiB may be locked, the arena has 15.00 GiB" in found.message and "LimitMEMLOCK" in found.fix
    put(host.root, "proc/meminfo", MEMINFO.replace("8388608", "0"))
    assert "no swap" in memory.check_locked_memory(settings(), host, "7").message
    put(host.root, "proc/meminfo", MEMINFO)
    put(host.root, "proc/7/status", "CapEff:\t0000000000004000\n")
    assert "CAP_IPC_LOCK" in memory.check_locked_memory(settings(), host, "7").message


def test_too_few_descriptors(host: Host) -> None:
    put(host.root, "proc/7/limits", LIMITS.format(files=1024, memlock=0))
    found = memory.check_open_files(host, "7")
    assert found.outcome is Outcome.WARN and "1024 descriptors, fewer" in found.message and "LimitNOFILE" in found.fix


@pytest.mark.parametrize(("release", "outcome"), [("4.18.0-553.el8", "fail"), ("5.15.0", "warn"), ("6.5-rc1", "ok")])
def test_kernels(host: Host, release: str, outcome: str) -> None:
    put(host.root, "proc/sys/kernel/osrelease", release)
    assert memory.check_kernel(host).outcome == outcome


def test_logind_removes_the_arena_of_a_user_that_logs_in(host: Host) -> None:
    found = memory.check_remove_ipc(host, 1000)
    assert found.outcome is Outcome.WARN and "uid 1000 logs out" in found.message and "RemoveIPC=no" in found.fix
    assert memory.check_remove_ipc(host, None).outcome is Outcome.SKIPPED
    put(host.root, LOGIND, "# comment\n[Login]\n#RemoveIPC=yes\nRemoveIPC=no\n")
    assert memory.check_remove_ipc(host, 1000).message == "is off"


def test_drop_ins_of_logind_come_by_name_and_the_folders_in_their_order(host: Host) -> None:
    put(host.root, LOGIND, "[Login]\nRemoveIPC=no\n")
    put(host.root, f"usr/lib/{DROPINS.removeprefix('etc/')}/50-vendor.conf", "[Login]\nRemoveIPC=yes\n")
    assert memory.removes_ipc(host)
    put(host.root, f"{DROPINS}/60-site.conf", "[Login]\nRemoveIPC = false\n")
    assert not memory.removes_ipc(host)
    put(host.root, f"run/{DROPINS.removeprefix('etc/')}/70-late.conf", "not a configuration\n")
    assert not memory.removes_ipc(host)
    (host.root / f"{DROPINS}/60-site.conf").unlink()
    put(host.root, f"{DROPINS}/50-vendor.conf", "")  # the same name, so the vendor's is not read
    assert not memory.removes_ipc(host)


def test_the_mount_that_holds_a_path_is_found(host: Host) -> None:
    put(
        host.root,
        "proc/self/mountinfo",
        "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "22 21 0:30 / /mnt/a\\040b rw,nosuid shared:1 - nfs4 server:/x rw,soft,lookupcache=pos\n"
        "23 22 0:31 / /mnt/a\\040b ro - tmpfs none rw,size=4k\n",
    )
    assert host.mount_of("/mnt/a b/c", "7") == Mount(
        "/mnt/a b", "tmpfs", frozenset({"ro", "rw", "size=4k"}), "0:31", "/", 23, 22
    )
    assert host.mount_of("/mnt/a") == Mount("/", "ext4", frozenset({"rw", "relatime"}), "254:0", "/", 21, 1)
    put(host.root, "proc/7/mountinfo", "31 1 254:0 / / ro,relatime - ext4 /dev/vda rw\n")
    confined = host.mount_of("/mnt/a", "7")
    assert confined is not None and "ro" in confined.options
    assert Host(host.root / "none").mount_of("/") is None
