"""`kvdepotd fsck` and `inspect` on directories that the disk tier's code made, damaged in every way (P6, T2)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvdepot.core.allocator import Extent
from kvdepot.core.object_keys import key_id
from kvdepot.core.objectfile import HEADER_BYTES, Codec, ObjectHeader, ObjectName, object_bytes, payload_sum
from kvdepot.server.daemon.app import main
from kvdepot.server.io.directory_guard import WORKERS_LOCK, enter, renew_token
from kvdepot.server.offline import verbs
from kvdepot.server.offline.inspection import inspect
from kvdepot.server.offline.store_files import OfflineRefusalError, locked
from kvdepot.server.tiers.disk import layout as names
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.layout import DiskLayout, Store
from kvdepot.server.tiers.disk.messages import Begin, Locked
from kvdepot.server.tiers.disk.opener_process import OpenerProcess
from kvdepot.server.tiers.disk.records import Mark, Put, RecordType, pack_mark, pack_put
from kvdepot.server.tiers.disk.recovery import SnapshotFacts, make_store, write_generation

from tests.rigs.golden_objects import FILES, KEYED_FILES, KEYS, stored_form
from tests.rigs.patience import patient

CAPACITY_BYTES = 64 << 20
MIB = 1 << 20
SYNCED = 5
"""Sequences up to here are in the snapshot, the others in the journal."""


class Directory:
    """A store of eight objects: five in the snapshot, three in the journal; one in two fragments, each codec used."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = DiskLayout.plan(CAPACITY_BYTES, 1 << 20)
        for folder in names.FOLDERS:
            (root / folder).mkdir()
        self.store = make_store(root, self.layout, lambda count: bytes(range(count)))
        for number in range(2):
            with (root / names.segment_name(number)).open("wb") as segment:
                segment.truncate(self.layout.length_of(number))
        self.puts = [self._put(sequence) for sequence in range(1, 9)]
        facts = SnapshotFacts(SYNCED, SYNCED, 0, 0, 0)
        write_generation(root, self.store, 1, [pack_put(put) for put in self.puts[:SYNCED]], facts)
        self.journal = root / names.journal_name(1)
        self.append(*(pack_put(replace(put, generation=1)) for put in self.puts[SYNCED:]))

    def append(self, *records: bytes) -> None:
        with self.journal.open("ab") as file:
            file.write(b"".join(records))

    def close(self) -> None:
        self.append(pack_mark(Mark(RecordType.CLOSE, 8, 1, 1)))

    def at(self, sequence: int, offset: int = 0) -> tuple[Path, int]:
        """File and offset of a byte of an object."""
        fragments = self.puts[sequence - 1].fragments
        part = self.layout.parts(fragments, sum(length for _, length in fragments))[0]
        return self.root / part.file, part.offset + offset

    def overwrite(self, sequence: int, offset: int, data: bytes) -> None:
        path, start = self.at(sequence, offset)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(data)

    def header(self, sequence: int) -> ObjectHeader:
        path, start = self.at(sequence)
        return ObjectHeader.unpack(path.read_bytes()[start : start + HEADER_BYTES])

    def _put(self, sequence: int) -> Put:
        codec = Codec(sequence % 3)
        raw = random.Random(sequence).randbytes(2_000) * 15
        stored = stored_form(codec, raw)
        name = ObjectName(b"n" * 16, bytes([sequence]) * 16, bytes(16), 1 + sequence % 2, 256 * sequence, len(raw))
        header = ObjectHeader(
            name, codec, len(stored), payload_sum([raw]), payload_sum([stored]), sequence, 1_795_000_000
        )
        data = (header.pack() + stored).ljust(object_bytes(len(stored)), b"\0")
        fragments = self._fragments(sequence, len(data))
        at = 0
        for part in self.layout.parts(fragments, len(data)):
            with (self.root / part.file).open("r+b") as file:
                file.seek(part.offset)
                file.write(data[at : at + part.length])
            at += part.length
        return Put(
            name, sequence, 0, codec, len(stored), header.stored_sum, header.raw_sum, header.created_at, fragments
        )

    def _fragments(self, sequence: int, length: int) -> tuple[Extent, ...]:
        address = sequence * (MIB // 16)
        if sequence == 3:
            return ((address, 4096), (MIB + address, length - 4096))
        return ((address, length),)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


def fsck(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["fsck", str(root), "--json"])
    return code, json.loads(capsys.readouterr().out or "{}")


def test_a_whole_store_is_whole(directory: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    directory.close()
    code, found = fsck(directory.root, capsys)
    assert (code, found["whole"], found["outcomes"], found["findings"]) == (0, True, {"ok": 8}, [])
    assert (found["objects"], found["kinds"], found["notes"]) == (8, {"attention": 4, "window": 4}, [])
    assert found["objects_bytes"] == sum(put.medium_bytes for put in directory.puts)


@pytest.mark.requirement("T2")
def test_what_a_crash_of_the_daemon_leaves_is_no_damage(
    directory: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    directory.append(b"half a record")
    code, found = fsck(directory.root, capsys)
    assert (code, found["outcomes"]) == (0, {"ok": 8})
    assert len(found["notes"]) == 1
    assert "replay stopped" in found["notes"][0]


def with_header(change: Callable[[ObjectHeader], ObjectHeader]) -> Callable[[Directory], None]:
    return lambda directory: directory.overwrite(1, 0, change(directory.header(1)).pack())


DAMAGES: dict[str, Callable[[Directory], None]] = {
    "magic": lambda directory: directory.overwrite(1, 0, bytes(HEADER_BYTES)),
    "version": lambda directory: directory.overwrite(1, 12, b"\3"),
    "header": lambda directory: directory.overwrite(1, 200, b"\1"),
    "identity": with_header(lambda header: replace(header, sequence=99)),
    "length": with_header(lambda header: replace(header, name=replace(header.name, raw_bytes=30_001))),
    "too_short": lambda directory: os.truncate(directory.at(3)[0].with_name("00001.seg"), 3 * MIB // 16 + 4096),
    "corrupt": lambda directory: directory.overwrite(2, HEADER_BYTES + 77, b"xyz"),
}


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("outcome", DAMAGES)
def test_every_damage_has_its_name(directory: Directory, outcome: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory.close()
    DAMAGES[outcome](directory)
    code, found = fsck(directory.root, capsys)
    assert (code, found["whole"]) == (1, False)
    if outcome == "too_short":  # the tier would not serve it either: its place is beyond the file
        assert (found["outcomes"], len(found["notes"])) == ({"ok": 7}, 1)
    else:
        assert found["outcomes"] == {"ok": 7, outcome: 1}
        assert [finding["outcome"] for finding in found["findings"]] == [outcome]
        assert found["findings"][0]["sequence"] == (2 if outcome == "corrupt" else 1)


def test_a_payload_that_its_codec_refuses(directory: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    directory.close()
    header = directory.header(1)
    stored = bytes(header.stored_bytes)
    directory.overwrite(1, HEADER_BYTES, stored)
    directory.overwrite(1, 0, replace(header, stored_sum=payload_sum([stored])).pack())
    assert fsck(directory.root, capsys)[1]["outcomes"] == {"ok": 7, "codec": 1}


def test_a_whole_object_that_is_not_the_one_of_the_index(
    directory: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    directory.close()
    header = directory.header(3)
    raw = random.Random("other").randbytes(header.name.raw_bytes)
    total = payload_sum([raw])
    page = replace(header, raw_sum=total, stored_sum=total).pack()
    first, second = directory.puts[2].fragments
    assert (first[1], second[0] // MIB) == (HEADER_BYTES, 1)
    directory.overwrite(3, 0, page)
    with (directory.root / names.segment_name(1)).open("r+b") as segment:
        segment.seek(second[0] - MIB)
        segment.write(raw)
    code, found = fsck(directory.root, capsys)
    assert (code, found["outcomes"]) == (1, {"ok": 7, "corrupt": 1})
    assert "not the one of the index" in found["findings"][0]["detail"]


def test_damage_that_a_power_loss_explains_is_torn(directory: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    directory.overwrite(8, HEADER_BYTES, b"never arrived")
    directory.overwrite(1, HEADER_BYTES + 9, b"rotten")
    code, found = fsck(directory.root, capsys)
    assert (code, found["outcomes"]) == (1, {"ok": 6, "torn": 1, "corrupt": 1})


def test_a_lost_snapshot_is_damage(directory: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    directory.close()
    snapshot = directory.root / names.snapshot_name(1)
    data = bytearray(snapshot.read_bytes())
    data[-1] ^= 1
    snapshot.write_bytes(data)
    code, found = fsck(directory.root, capsys)
    assert (code, found["outcomes"]) == (1, {"ok": 3})
    assert any("snapshot 1 does not count" in note for note in found["notes"])


def test_fsck_changes_nothing_but_the_locks(directory: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    def content() -> dict[Path, bytes]:
        return {
            path: path.read_bytes() for path in directory.root.rglob("*") if path.is_file() and path.suffix != ".lock"
        }

    directory.overwrite(2, HEADER_BYTES, b"damage")
    before = content()
    assert fsck(directory.root, capsys)[0] == 1
    assert content() == before


@pytest.fixture
def holder(directory: Directory) -> Iterator[int]:
    """Another process that has the directory, as a daemon would."""
    program = (
        "import sys; from pathlib import Path; from kvdepot.server.offline.store_files import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(directory.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.stdin.close()


def test_fsck_refuses_while_a_daemon_has_the_directory(
    directory: Directory, holder: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fsck", str(directory.root)]) == 2
    assert f"pid {holder}; stop the daemon first" in capsys.readouterr().err


def test_fsck_refuses_while_a_tiers_opening_process_lives(
    directory: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    async def beside_a_tier() -> int:
        opener = OpenerProcess(DiskConfig("nvme", directory.root, CAPACITY_BYTES), asyncio.get_running_loop())
        opener.start(lambda message: None)
        try:
            opener.send(Begin())
            assert isinstance(opener.wait(patient(20.0)), Locked)
            return main(["fsck", str(directory.root)])
        finally:
            opener.end()

    assert asyncio.run(beside_a_tier()) == 2
    assert f"pid {os.getpid()}; stop the daemon first" in capsys.readouterr().err


def test_fsck_refuses_while_a_worker_of_a_dead_daemon_lives(
    directory: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory.root / WORKERS_LOCK
    renew_token(path, "token of its daemon")
    worker = enter(path, "token of its daemon")
    assert worker is not None
    assert main(["fsck", str(directory.root)]) == 2
    assert "I/O workers of an earlier daemon still live" in capsys.readouterr().err
    os.close(worker)
    assert main(["fsck", str(directory.root)]) == 0


def test_the_locks_are_given_back(directory: Directory) -> None:
    for _ in range(2):
        with locked(directory.root), pytest.raises(OfflineRefusalError), locked(directory.root):
            pass


@pytest.mark.parametrize("verb", ["fsck", "inspect"])
def test_what_is_no_store_is_refused_by_name_and_left_alone(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(tmp_path)]) == 2
    assert "is not the directory of a disk tier" in capsys.readouterr().err
    assert main([verb, str(tmp_path / "nothing")]) == 2
    (tmp_path / names.STORE).write_bytes(Store(bytes(16), MIB).pack().replace(b'"version": 1', b'"version": 9'))
    assert main([verb, str(tmp_path)]) == 2
    assert "version 9, this is version 1" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [names.STORE]


def test_inspecting_a_directory(directory: Directory) -> None:
    found = inspect(directory.root)
    assert (found["what"], found["objects"], found["segments"]) == ("disk tier", 8, 2)
    assert found["codecs"] == {"lz4": 3, "bitshuffle-lz4": 3, "none": 2}
    assert found["namespaces"] == [{"id": (b"n" * 16).hex(), "objects": 8, "bytes": found["objects_bytes"]}]
    (snapshot,) = found["snapshots"]
    assert (snapshot["complete"], snapshot["objects"], snapshot["synced_sequence"]) == (True, 5, SYNCED)
    (journal,) = found["journals"]
    assert (journal["records"], journal["stopped"]) == ({"put": 3}, "")


def test_inspecting_a_journal_that_was_cut(directory: Directory) -> None:
    length = directory.journal.stat().st_size
    os.truncate(directory.journal, length - 1)
    found = inspect(directory.journal)
    assert found["records"] == {"put": 2}
    assert "cut" in found["stopped"]
    assert found["readable_bytes"] < found["bytes"] == length - 1


def test_inspecting_a_segment_lists_its_headers(directory: Directory) -> None:
    directory.overwrite(2, 300, b"x")
    found = inspect(directory.root / names.segment_name(0))
    assert [header["sequence"] for header in found["headers"]] == list(range(1, 9))
    assert [header["outcome"] for header in found["headers"]] == ["ok", "header"] + 6 * ["ok"]


@pytest.mark.parametrize("codec", Codec)
def test_inspecting_an_object(codec: Codec) -> None:
    found = inspect(FILES[codec])
    assert (found["outcome"], found["header"]["codec"]) == ("ok", codec.name.lower().replace("_", "-"))
    assert found["header"]["created_at"] == "2026-11-18T11:06:40Z"
    assert "quarantined" not in found


@pytest.mark.requirement("S5")
@pytest.mark.parametrize("codec", Codec)
def test_inspecting_an_object_with_a_mac(codec: Codec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its header is shown to everybody, and whether its MAC is right to who has the key."""
    found = inspect(KEYED_FILES[codec])
    assert (found["outcome"], found["header"]["key_id"]) == ("unknown_key", key_id(KEYS.keys[0]).hex())
    (key_file := tmp_path / "key").touch(0o600)
    key_file.write_text(KEYS.keys[0].hex())
    assert main(["inspect", "--json", "--key-file", str(key_file), str(KEYED_FILES[codec])]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "ok"
    forged = bytearray(KEYED_FILES[codec].read_bytes())
    header = ObjectHeader.unpack(bytes(forged[:HEADER_BYTES]))
    forged[:HEADER_BYTES] = replace(header, created_at=1).pack()
    (tmp_path / "forged.kvd").write_bytes(forged)
    assert inspect(tmp_path / "forged.kvd", KEYS)["outcome"] == "forged"
    key_file.chmod(0o644)
    assert main(["inspect", "--key-file", str(key_file), str(KEYED_FILES[codec])]) == 2
    assert "chmod 0600" in capsys.readouterr().err


def test_the_story_of_a_quarantined_object(directory: Directory) -> None:
    """Another object was written over the end of this one, and its middle never arrived."""
    path = directory.root / names.quarantine_name(1_795_000_100, 0x0102030405060708, "corrupt")
    data = bytearray(FILES[Codec.NONE].read_bytes())
    data[HEADER_BYTES : HEADER_BYTES + 4096] = bytes(4096)
    data[-4096:] = directory.header(5).pack()
    path.write_bytes(data)
    found = inspect(path)
    assert (found["outcome"], found["pages"], found["zero_pages"]) == ("corrupt", 3, 1)
    assert found["quarantined"] == {
        "at": "2026-11-18T11:08:20Z", "reason": "corrupt", "sequence": 0x0102030405060708
    }  # fmt: skip
    assert [(inside["offset"], inside["sequence"]) for inside in found["headers_inside"]] == [(8192, 5)]
    assert inspect(directory.root)["quarantine"][0]["reason"] == "corrupt"


def test_a_whole_object_that_lay_in_anothers_place(directory: Directory) -> None:
    path = directory.root / names.quarantine_name(1_795_000_100, 77, "identity")
    path.write_bytes(FILES[Codec.LZ4].read_bytes())
    found = inspect(path)
    assert (found["outcome"], found["detail"]) == ("identity", f"sequence is {0x0102030405060708}, not 77")


@pytest.mark.requirement("S6")
def test_what_a_file_says_is_printed_without_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    verbs._print({"detail": "evil\x1b[2J\nforged: line", "list": ["\x9b31m"]}, as_json=False)
    assert capsys.readouterr().out == "detail: evil\\x1b[2J\\nforged: line\nlist: 1\n  \\x9b31m\n"


@given(data=st.binary(max_size=9_000), stem=st.sampled_from(["00000001.log", "00000001.snap", "00001.seg", "any.kvd"]))
@settings(max_examples=60)
def test_any_file_is_told_about_or_refused(data: bytes, stem: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("any")
    (root / names.STORE).write_bytes(Store(bytes(16), MIB).pack())
    path = root / "journal" / stem
    path.parent.mkdir()
    path.write_bytes(data)
    try:
        found = inspect(path)
    except OfflineRefusalError:
        assert path.suffix == ".kvd"
    else:
        json.dumps(found)
        assert list(verbs.lines_of(found))


@given(flips=st.lists(st.integers(0, (1 << 20) - 1), min_size=1, max_size=30))
@settings(max_examples=15)
def test_fsck_of_a_randomly_damaged_directory_ends(flips: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = Directory(tmp_path_factory.mktemp("store"))
    for flip in flips:
        choice = random.Random(flip)
        path = choice.choice(sorted(path for path in directory.root.rglob("*") if path.is_file()))
        data = bytearray(path.read_bytes())
        data[choice.randrange(min(len(data), 200_000))] ^= 1 << choice.randrange(8)
        path.write_bytes(data)
    assert main(["fsck", str(directory.root)]) in (0, 1, 2)


def test_text_is_for_people(directory: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    directory.overwrite(2, HEADER_BYTES, b"damage")
    assert main(["fsck", str(directory.root)]) == 1
    text = capsys.readouterr().out
    assert "whole: no\noutcomes: ok=7  corrupt=1\n" in text
    assert "detail=" in text
    assert main(["inspect", str(directory.root)]) == 0
    assert "snapshots: 1\n  what=snapshot" in capsys.readouterr().out
