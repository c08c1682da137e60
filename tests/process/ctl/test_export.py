"""`kvdepotctl export` and `import`: the real commands between real daemons, and files that are not what they were."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.client.attachment import Transport
from kvdepot.client.bulk import BulkEngine, Granted
from kvdepot.client.endpoint import Endpoint
from kvdepot.core.calls import ROOT_KEY, CommitOutcome, Kind, ReserveOutcome
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.objectfile import ObjectName
from kvdepot.core.planner import GroupSpec, Planner

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import (
    CHUNK_TOKENS,
    EXTENT,
    OBJECT_BYTES,
    RawEngine,
    dense_spec,
    keys_of,
    payload_of,
    status_of,
)

SPEC = dense_spec("a-model")
KEYS, BRANCH, OTHER = keys_of("prompt", 12), keys_of("branch", 3), keys_of("other", 4)
HEAD_PAGES = 2
"""Of a file: its head, and the spec of a small namespace."""
OBJECT_PAGES = 1 + OBJECT_BYTES // 4096


@pytest.fixture
def source() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


@pytest.fixture
def target() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


def exported(daemon: DaemonProcess, name: str, file: Path, *options: str, code: int = 0) -> str:
    printed = kvdepotctl(daemon, "export", name, str(file), *options)
    assert printed.returncode == code, printed.stderr
    return printed.stderr.strip()


def imported(daemon: DaemonProcess, file: Path, *options: str, code: int = 0) -> str:
    printed = kvdepotctl(daemon, "import", str(file), *options)
    assert printed.returncode == code, printed.stderr
    return printed.stderr.strip()


def dense(daemon: DaemonProcess) -> str:
    """Two prompts, one of which another one leaves after its fourth chunk. Returns the namespace."""
    with RawEngine(daemon.socket, spec=SPEC) as engine:
        engine.store(KEYS)
        engine.store(OTHER)
        with BulkEngine(Endpoint.parse(daemon.endpoint), SPEC, "test", timeout_seconds=30) as bulk:
            store(bulk, path(SPEC, BRANCH, KEYS[3], 4))
        return engine.namespace.hex()


def path(spec: NamespaceSpec, keys: Sequence[bytes], parent: bytes, chunks: int) -> list[ObjectName]:
    """Names of attention objects behind `chunks` others."""
    parents = [parent, *keys[:-1]]
    return [
        ObjectName(
            spec.namespace_id(), key, parents[at], Kind.ATTENTION, (chunks + at + 1) * spec.chunk_tokens,
            spec.object_bytes[Kind.ATTENTION],
        )
        for at, key in enumerate(keys)
    ]  # fmt: skip


def store(engine: BulkEngine, names: Sequence[ObjectName]) -> None:
    outcomes, granted, reason = engine.reserve(names)
    assert granted is not None and set(outcomes) == {ReserveOutcome.GRANTED}, (outcomes, reason)
    for index, name in enumerate(names):
        assert engine.write(granted, index, content(name))
    assert set(engine.commit(granted, range(len(names)))) == {CommitOutcome.COMMITTED}


def content(name: ObjectName) -> bytes:
    return payload_of(name.key[:15] + bytes([name.kind]), name.raw_bytes)


def tools(daemon: DaemonProcess) -> list[str]:
    return [one.engine_id for one in status_of(daemon.socket).sessions if one.engine_id.startswith("kvdepotctl-")]


def wait_tools_ended(daemon: DaemonProcess) -> None:
    wait_until(lambda: not tools(daemon), "the sessions of the tools end")


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))


@pytest.mark.requirement("I1")
def test_a_namespace_is_in_another_daemon_byte_by_byte(
    source: DaemonProcess, target: DaemonProcess, tmp_path: Path
) -> None:
    file = tmp_path / "warm.kvdx"
    name = dense(source)
    said = exported(source, name[:8], file)
    assert said == f"exported 19 objects, 4.75 MiB, of namespace {name[:12]}"
    assert file.stat().st_size == (HEAD_PAGES + 19 * OBJECT_PAGES + 1) * 4096
    assert list(tmp_path.iterdir()) == [file], "nothing of an unfinished one is left"
    assert file.stat().st_mode & 0o777 == 0o600, "it has in it what users said"
    assert imported(target, file, "--check") == f"19 whole objects of namespace {name[:12]} (a-model)"
    said = imported(target, file)
    assert said == f"imported 19 objects, 4.75 MiB, of namespace {name[:12]} (a-model); 0 already present"
    with RawEngine(target.socket, spec=SPEC) as engine:
        assert engine.locate(KEYS) == 12 * CHUNK_TOKENS
        assert engine.locate([*KEYS[:4], *BRANCH]) == 7 * CHUNK_TOKENS
        assert engine.load(KEYS) == [payload_of(key) for key in KEYS]
        assert engine.load(OTHER) == [payload_of(key) for key in OTHER]
        assert engine.load(BRANCH) == [content(one) for one in path(SPEC, BRANCH, KEYS[3], 4)]
    assert "imported 0 objects" in imported(target, file) and "19 already present" in imported(target, file)
    with RawEngine(target.socket, spec=dense_spec("another-model")) as engine:
        assert engine.locate(KEYS) == 0, "it is another namespace's"
    for daemon in (source, target):
        wait_tools_ended(daemon)


def test_a_pipe_from_daemon_to_daemon(source: DaemonProcess, target: DaemonProcess) -> None:
    name = dense(source)
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint"]
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    giving = subprocess.Popen([*command, source.endpoint, "export", name, "-"], stdout=subprocess.PIPE, env=unbuffered)
    taking = subprocess.run(
        [*command, target.endpoint, "import", "-", "--json"],
        stdin=giving.stdout,
        capture_output=True,
        timeout=patient(60),
        check=False,
    )
    assert giving.wait(patient(30)) == 0 and taking.returncode == 0, taking.stderr
    last = json.loads(taking.stdout.splitlines()[-1])
    assert last == {
        "planned": 19, "imported": 19, "imported_bytes": 19 * OBJECT_BYTES, "present": 0, "refused": {}, "damaged": {},
        "cut_short": "", "finished": True, "reason": "",
    }  # fmt: skip
    with RawEngine(target.socket, spec=SPEC) as engine:
        assert engine.load(KEYS) == [payload_of(key) for key in KEYS]


def hybrid_spec() -> NamespaceSpec:
    groups = (
        GroupSpec(Kind.ATTENTION, 64, rank_block_bytes=(8192, 8192)),
        GroupSpec(Kind.STATE, 64, rank_block_bytes=(20480, 20480)),
    )
    planner = Planner(groups, 64)
    sizes = {kind: planner.object_bytes(kind) for kind in planner.kinds}
    return NamespaceSpec({"model": '"hybrid"'}, 64, groups, sizes, label="hybrid", tenant="a")


def hybrid_names(spec: NamespaceSpec, keys: Sequence[bytes], states: Sequence[int]) -> list[ObjectName]:
    """Attention of all chunks, and states at the ends of these."""
    attention = path(spec, keys, ROOT_KEY, 0)
    return attention + [
        ObjectName(one.namespace, one.key, one.parent, Kind.STATE, one.boundary_tokens, spec.object_bytes[Kind.STATE])
        for at, one in enumerate(attention)
        if at in states
    ]


@pytest.mark.requirement("I7")
def test_states_and_two_ranks_of_a_hybrid_model(source: DaemonProcess, target: DaemonProcess, tmp_path: Path) -> None:
    spec, file = hybrid_spec(), tmp_path / "hybrid.kvdx"
    names = hybrid_names(spec, KEYS, [3, 8])
    with BulkEngine(Endpoint.parse(source.endpoint), spec, "engine", timeout_seconds=30) as engine:
        store(engine, names)
        said = exported(source, spec.namespace_id().hex(), file)
        assert said.startswith("exported 14 objects")
    assert "imported 14 objects" in imported(target, file)
    wait_tools_ended(target)
    with BulkEngine(Endpoint.parse(target.endpoint), spec, "engine", timeout_seconds=30) as engine:
        there = [one for one in names if one.boundary_tokens <= 9 * 64]
        granted = engine.acquire(there)
        assert isinstance(granted, Granted)
        assert [bytes(engine.read(granted, at) or b"") for at in range(len(there))] == [content(one) for one in there]
        engine.release(granted)
    with RawEngine(target.socket, spec=spec) as raw:
        assert raw.locate(KEYS) == 9 * 64 and raw.locate(KEYS[:8]) == 4 * 64


def test_the_path_to_a_chunk_alone(source: DaemonProcess, target: DaemonProcess, tmp_path: Path) -> None:
    name, file = dense(source), tmp_path / "path.kvdx"
    assert exported(source, f"{name[:8]}/{BRANCH[1].hex()}", file).startswith("exported 6 objects")
    imported(target, file)
    with RawEngine(target.socket, spec=SPEC) as engine:
        assert engine.locate([*KEYS[:4], *BRANCH]) == 6 * CHUNK_TOKENS
        assert engine.locate(OTHER) == 0


def test_what_only_a_disk_has_and_an_export_is_no_use(directory: Path, tmp_path: Path) -> None:
    tier = f'[[tier]]\nname = "nvme"\nkind = "disk"\npath = "{directory}"\ncapacity = "128MiB"\nwrite = '
    file = tmp_path / "cold.kvdx"
    with DaemonProcess(ram="512MiB", config=f'{tier}"commit"\n') as daemon:
        with RawEngine(daemon.socket, spec=SPEC) as engine:
            name = engine.namespace.hex()
            wait_until(lambda: engine.status().tiers[1].state == "ready", "the disk opens")
            engine.store(KEYS)
            wait_until(lambda: engine.status().tiers[1].objects == 12, "they are on the disk")
        daemon.stop()
        daemon.arena.unlink()
        daemon.start()
        wait_until(lambda: status_of(daemon.socket).tiers[1].objects == 12, "the disk opens again")
        said = kvdepotctl(daemon, "export", name, str(file))
        assert said.returncode == 1 and "no engine has registered" in said.stderr and not file.exists()
        with RawEngine(daemon.socket, spec=SPEC) as engine:
            assert exported(daemon, name, file, "--tier", "ram").startswith("exported 0 objects")
            assert exported(daemon, name, file).startswith("exported 12 objects")
            assert engine.status().tiers[0].objects == 12
        said = kvdepotctl(daemon, "export", name, str(file), "--tier", "tape")
        assert said.returncode == 1 and "there are ram, nvme" in said.stderr
    other = directory / "second"
    other.mkdir()
    with (
        DaemonProcess(ram="512MiB", config=f'{tier.replace(str(directory), str(other))}"second_use"\n') as daemon,
        RawEngine(daemon.socket, spec=SPEC) as engine,
    ):
        wait_until(lambda: engine.status().tiers[1].state == "ready", "the disk opens")
        imported(daemon, file)
        exported(daemon, name, file)
        tier_status = engine.status().tiers[1]
        assert (tier_status.objects, tier_status.queued_objects) == (0, 0), "nobody has used them"
        assert engine.counter("hit_tokens") == 0
        assert engine.load(KEYS[:2]) is not None
        wait_until(lambda: engine.status().tiers[1].objects == 2, "what is used goes to the disk")


@pytest.mark.requirement("I1")
def test_damage_in_the_file_is_never_imported(source: DaemonProcess, target: DaemonProcess, tmp_path: Path) -> None:
    """A chain of 12 chunks: each damage leaves out what it has hit, and what nobody could resume at without."""
    file, whole = tmp_path / "warm.kvdx", tmp_path / "whole.kvdx"
    with RawEngine(source.socket, spec=SPEC) as engine:
        engine.store(KEYS)
        exported(source, engine.namespace.hex(), whole)
    data = whole.read_bytes()

    file.write_bytes(data)
    flip(file, (HEAD_PAGES + 5 * OBJECT_PAGES + 1) * 4096 + 77)  # the payload of the sixth
    assert "damaged in the file: 1 corrupt" in imported(target, file, "--check", code=1)
    said = imported(target, file, code=1)
    assert "imported 5 objects" in said and "refused: 6 no_parent; damaged in the file: 1 corrupt" in said

    file.write_bytes(data)
    flip(file, (HEAD_PAGES + 7 * OBJECT_PAGES) * 4096 + 100)  # the header of the eighth
    said = imported(target, file, code=1)
    assert "imported 2 objects" in said and "5 already present" in said and "cut short: header: checksum" in said

    file.write_bytes(data[: (HEAD_PAGES + 9 * OBJECT_PAGES) * 4096 - 1])
    assert "cut short: payload: 262143 of 262144 bytes" in imported(target, file, code=1)
    file.write_bytes(data[: (HEAD_PAGES + 9 * OBJECT_PAGES) * 4096])
    said = imported(target, file, code=1)
    assert "imported 1 objects" in said and "it ends before its end" in said
    with RawEngine(target.socket, spec=SPEC) as engine:
        assert engine.locate(KEYS) == 9 * CHUNK_TOKENS
        assert engine.load(KEYS[:9]) == [payload_of(key) for key in KEYS[:9]]

    one_less = data[: (HEAD_PAGES + 11 * OBJECT_PAGES) * 4096] + data[-4096:]
    file.write_bytes(one_less)
    assert "it has 11 of the 12 objects that its end says" in imported(target, file, "--check", code=1)

    for at, text in ((10, "format"), (60, "checksum"), (4096 + 30, "spec of its namespace is damaged")):
        file.write_bytes(data)
        flip(file, at)
        said = imported(target, file, code=2)
        assert text in said or "checksum" in said
    file.write_bytes(b"something else" * 1000)
    assert "this is no export" in imported(target, file, code=2)
    assert imported(target, whole).endswith("9 already present")


@pytest.mark.requirement("I1")
def test_what_is_damaged_in_ram_is_not_exported_as_if_it_were_whole(source: DaemonProcess, tmp_path: Path) -> None:
    file = tmp_path / "warm.kvdx"
    with RawEngine(source.socket, spec=SPEC) as engine:
        engine.store(KEYS)
        wait_until(lambda: engine.status().tiers[0].pending_checksums == 0, "their sums have been taken")
        lease, _, extents = engine.acquire([KEYS[9]])
        engine.arena[EXTENT.unpack(extents)[2] + 5000] ^= 1
        engine.release(lease)
        said = exported(source, engine.namespace.hex(), file, code=1)
    assert said.startswith("exported 9 objects") and said.endswith("left out: 1 damaged, 2 path")


@pytest.mark.long(seconds=6)
def test_what_an_operator_has_made_void_or_switched_off(
    source: DaemonProcess, target: DaemonProcess, tmp_path: Path
) -> None:
    name, file = dense(source), tmp_path / "warm.kvdx"
    exported(source, name, file)
    assert kvdepotctl(target, "stores", "off").returncode == 0
    assert "nothing is stored" in imported(target, file, code=1)
    assert kvdepotctl(target, "stores", "on").returncode == 0
    assert kvdepotctl(source, "loads", "off").returncode == 0
    assert "nothing is lent" in exported(source, name, tmp_path / "again.kvdx", code=1)
    assert list(tmp_path.iterdir()) == [file]
    assert kvdepotctl(target, "epoch", "bump", "--yes").returncode == 0
    assert "an operator has bumped the epoch" in imported(target, file, code=1)
    assert status_of(target.socket).tiers[0].objects == 0


def test_what_is_stored_after_an_epoch_bump_goes_both_ways(source: DaemonProcess, tmp_path: Path) -> None:
    file, spec = tmp_path / "warm.kvdx", replace(SPEC, bumps=1)
    assert kvdepotctl(source, "epoch", "bump", "--yes").returncode == 0
    with RawEngine(source.socket, spec=spec) as engine:
        engine.store(KEYS)
        assert "exported 12 objects" in exported(source, engine.namespace.hex(), file)
    assert "12 already present" in imported(source, file)


@pytest.mark.requirement("I4")
@pytest.mark.long(seconds=8)
def test_credit_and_room_that_are_smaller_than_the_file(tmp_path: Path) -> None:
    with DaemonProcess(ram="512MiB") as source:
        name, file = dense(source), tmp_path / "warm.kvdx"
        exported(source, name, file)
        with DaemonProcess(config='[sessions]\ncredit = "600KiB"\n') as small:
            assert "imported 19 objects" in imported(small, file)
            with RawEngine(small.socket, spec=SPEC) as engine:
                assert engine.load(KEYS) == [payload_of(key) for key in KEYS]
        with RawEngine(source.socket, "many", spec=SPEC) as engine:
            for prompt in range(16):
                engine.store(keys_of(f"many {prompt}", 40))
            exported(source, name, file)
    with DaemonProcess(ram="328MiB") as small:
        said = imported(small, file)
        wait_tools_ended(small)
        status = status_of(small.socket).tiers[0]
        assert 50 < status.objects < 659 and status.used_bytes <= status.ready_bytes
        warned = re.search(r"warning: RAM has only (\d+) objects", said)
        assert "imported 659 objects" in said and warned
        assert status.objects <= int(warned[1]) < 659, "and it went on to its watermark"


@pytest.mark.requirement("I5")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_export_that_is_stopped_leaves_no_file_and_no_lease(
    source: DaemonProcess, tmp_path: Path, sent: signal.Signals
) -> None:
    name, pipe = dense(source), tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", source.endpoint, "export", name, str(pipe)]
    giving = subprocess.Popen(command, stderr=subprocess.PIPE)
    with pipe.open("rb") as reading:
        assert reading.read(4096).startswith(b"KVDEXPRT")
        giving.send_signal(sent)
        giving.wait(patient(30))
    assert giving.returncode == (130 if sent is signal.SIGINT else -signal.SIGKILL)
    wait_tools_ended(source)
    wait_until(lambda: not status_of(source.socket).tiers[0].lent_bytes, "only the checksum worker had something")


def test_a_file_that_cannot_be_written_is_said_in_a_line(source: DaemonProcess, tmp_path: Path) -> None:
    name = dense(source)
    assert exported(source, name, tmp_path / "no" / "folder", code=1).startswith("Error: ")
    said = exported(source, name, Path("/dev/full"), code=1)
    assert said == "Error: /dev/full: No space left on device"
    wait_tools_ended(source)


def test_a_pipe_that_nobody_reads_is_said_in_a_line(source: DaemonProcess) -> None:
    name = dense(source)
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", source.endpoint, "export", name, "-"]
    giving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert giving.stdout is not None
    giving.stdout.close()
    assert giving.stderr is not None and giving.stderr.read() == "Error: -: Broken pipe\n"
    assert giving.wait(patient(30)) == 1


@pytest.mark.long(seconds=6)
def test_what_a_quota_refuses_is_left_out_and_the_rest_is_there(directory: Path, tmp_path: Path) -> None:
    """Twelve chunks that only a disk has; RAM may have four of them at once."""
    config = (
        f'[[tier]]\nname = "nvme"\nkind = "disk"\npath = "{directory}"\ncapacity = "128MiB"\nwrite = "commit"\n'
        '[[quota]]\ntier = "ram"\ncapacity = "1100KiB"\n'
    )
    with DaemonProcess(ram="456MiB", config=config) as daemon, RawEngine(daemon.socket, spec=SPEC) as engine:
        wait_until(lambda: engine.status().tiers[1].state == "ready", "the disk opens")
        with BulkEngine(Endpoint.parse(daemon.endpoint), SPEC, "test", timeout_seconds=30) as bulk:
            for at in range(0, 12, 2):
                store(bulk, path(SPEC, KEYS[at : at + 2], KEYS[at - 1] if at else ROOT_KEY, at))
                wait_until(lambda count=at + 2: engine.status().tiers[1].objects == count, "they are on the disk")
                wait_until(lambda: not engine.status().tiers[0].lent_bytes, "nothing sums them: RAM may let them go")
        file = tmp_path / "warm.kvdx"
        said = kvdepotctl(daemon, "export", engine.namespace.hex(), str(file))
        assert said.returncode == 0 and "exported 12 objects" in said.stderr, said.stderr


@pytest.mark.requirement("I5")
def test_an_import_that_is_killed_leaves_only_whole_objects(
    source: DaemonProcess, target: DaemonProcess, tmp_path: Path
) -> None:
    name, file = dense(source), tmp_path / "warm.kvdx"
    exported(source, name, file)
    data = file.read_bytes()
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", target.endpoint, "import", "-"]
    taking = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert taking.stdin is not None
    taking.stdin.write(data[: len(data) // 2])
    taking.stdin.flush()
    wait_until(lambda: tools(target), "it is attached")
    taking.kill()
    taking.wait(patient(30))
    wait_tools_ended(target)
    wait_until(lambda: not status_of(target.socket).tiers[0].lent_bytes, "only the checksum worker had something")
    found = re.search(r"imported (\d+) objects.*; (\d+) already present", imported(target, file))
    assert found and int(found[1]) + int(found[2]) == 19
    with RawEngine(target.socket, spec=SPEC) as engine:
        assert engine.load(KEYS) == [payload_of(key) for key in KEYS]


def test_by_streams_where_the_arena_cannot_be_mapped(source: DaemonProcess) -> None:
    spec = hybrid_spec()
    names = hybrid_names(spec, KEYS[:4], [3])
    endpoint = Endpoint.parse(source.endpoint)
    with BulkEngine(endpoint, spec, "engine", timeout_seconds=60, transport=Transport.STREAM) as engine:
        store(engine, names)
        granted = engine.acquire(names)
        assert isinstance(granted, Granted)
        assert [bytes(engine.read(granted, at) or b"") for at in range(len(names))] == [content(one) for one in names]
        engine.release(granted)
