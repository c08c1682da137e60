"""Names in a shared directory and its marker: as docs/formats/shared.md has them, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
from kvdepot.core.calls import Kind
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.storage.shared_layout import (
    Marker,
    NotSharedError,
    is_node,
    object_file,
    object_of,
    quarantine_file,
    temporary_file,
    temporary_node,
)

NAME = ObjectName(bytes(range(16)), bytes(range(0xA0, 0xB0)), bytes(16), 3, 256, 4096)
FILE = "000102030405060708090a0b0c0d0e0f/a0/a0a1a2a3a4a5a6a7a8a9aaabacadaeaf.state.kvd"
MARKER = {"format": 1, "compatible_since": 1, "created_by": "kvdepotd on n1", "id": "ab" * 16}


def test_an_object_has_one_file_name() -> None:
    assert object_file(NAME) == FILE
    assert object_of(FILE) == (NAME.namespace, NAME.key, Kind.STATE)


@pytest.mark.parametrize(
    "file",
    [
        "", FILE[1:], FILE + "x", FILE.replace("/a0/", "/a1/"), FILE.replace("state", "other"), FILE.upper(),
        f"./{FILE}", ".quarantine/0000000007-a0.state.header.kvd", FILE.rpartition("/")[2],
    ],
)  # fmt: skip
def test_other_names_are_no_objects(file: str) -> None:
    assert object_of(file) is None


def test_a_temporary_says_whose_it_is() -> None:
    assert temporary_file("n1.lan-77", 5) == ".tmp/n1.lan-77-5.tmp"
    assert temporary_node("n1.lan-77-5.tmp") == "n1.lan-77"
    for other in ("n1.tmp", "n1-5", "-5.tmp", "n1-five.tmp", "a/b-5.tmp"):
        assert temporary_node(other) is None


def test_a_node_id_is_a_file_name_and_no_folder() -> None:
    assert is_node("host-1.lan_ab12")
    assert not any(map(is_node, ("", ".", "..", ".hidden", "a/b", "a b", "x" * 97)))


def test_quarantined_files_sort_by_age() -> None:
    name = quarantine_file(7, NAME)
    assert name == ".quarantine/0000000007-a0a1a2a3a4a5a6a7a8a9aaabacadaeaf.state"
    assert name < quarantine_file(1_800_000_000, NAME)


def test_a_marker_comes_back_as_documented() -> None:
    marker = Marker("ab" * 16, "kvdepotd on n1")
    assert json.loads(marker.pack()) == MARKER
    assert Marker.unpack(marker.pack()) == marker


def test_a_later_format_that_is_still_compatible_is_taken() -> None:
    assert Marker.unpack(json.dumps(MARKER | {"format": 2, "more": []}).encode()).directory_id == "ab" * 16


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"7", b"\xff", b"{}", json.dumps(MARKER | {"compatible_since": 2}).encode(),
        json.dumps(MARKER | {"id": "AB" * 16}).encode(), json.dumps(MARKER | {"id": 7}).encode(),
        json.dumps(MARKER | {"format": "1"}).encode(), b"[" * 100_000,
    ],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_marker_is_refused(data: bytes) -> None:
    with pytest.raises(NotSharedError, match=r"kvdepot-shared\.json"):
        Marker.unpack(data)
