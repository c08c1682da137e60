"""What `kvdepotctl` prints of listings: nothing that is there is left out, nothing of a name is markup."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from kvdepot.client.ctl.listings import (
    chunk_description_record,
    chunk_page_record,
    print_chunk_description,
    print_chunks,
    print_namespace_description,
    print_namespaces,
)
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.listing import (
    Chunk,
    ChunkDescription,
    ChunkPage,
    LoanDescription,
    NamespaceContents,
    NamespaceDescription,
    NamespacePage,
    ObjectDescription,
    TierContents,
)
from kvdepot.core.planner import GroupSpec
from kvdepot.core.report import PinStatus
from rich.console import Console

ID = b"\xaa" * 16
WINDOW = int(Kind.WINDOW)


def printed(show: Callable[[Console], None], width: int = 160) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width))
    return out.getvalue()


def chunk(key: bytes, **changed: object) -> Chunk:
    fields: dict[str, object] = {"parent": ROOT_KEY, "boundary_tokens": 256, "usable": False} | changed
    return Chunk(key, kinds=(b"\x01", b""), size_bytes=(1024, 0), **fields)  # type: ignore[arg-type]


def test_keys_are_cut_only_as_far_as_they_stay_different() -> None:
    alike = [ID[:15] + b"\x01", ID[:15] + b"\x02"]
    text = printed(lambda console: print_chunks(ID, ChunkPage(("ram", "t"), tuple(map(chunk, alike))), console))
    assert all(key.hex() in text for key in alike)
    apart = [b"\x01" * 16, b"\x02" * 16]
    text = printed(lambda console: print_chunks(ID, ChunkPage(("ram", "t"), tuple(map(chunk, apart))), console))
    assert "010101010101 " in text
    assert "01010101010101" not in text


def test_what_is_incomplete_stands_in_parentheses() -> None:
    page = ChunkPage(("ram", "t"), (chunk(ID, incomplete=bytes([Kind.STATE])),))
    assert "attention (state)" in printed(lambda console: print_chunks(ID, page, console))
    (record,) = chunk_page_record(ID, page)["chunks"]
    assert record["incomplete"] == ["state"]
    assert record["tiers"] == {"ram": {"kinds": ["attention"], "size_bytes": 1024}}


@pytest.mark.requirement("I4")
def test_a_page_without_chunks_that_is_not_the_last_says_how_to_go_on() -> None:
    text = printed(lambda console: print_chunks(ID, ChunkPage(("ram",), (), "1.ff"), console))
    assert "--cursor 1.ff" in text
    assert "no chunk" not in text
    assert "no chunk" in printed(lambda console: print_chunks(ID, ChunkPage(("ram",)), console))


PIN = PinStatus(ID, b"\x5a" * 16, 5400.0, 3, 2, 1024)


def test_names_are_never_markup() -> None:
    contents = NamespaceContents(ID, "[red]label", "[b]tenant", tiers=(TierContents("[i]tier", {Kind.WINDOW: 2}, 5),))
    text = printed(lambda console: print_namespaces(NamespacePage((contents,)), console))
    assert all(name in text for name in ("[red]label", "[b]tenant", "[i]tier", "window:2"))
    group = GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(64, 64), layers=("l0", "l1"))
    spec = NamespaceSpec({"[u]field": '"[/]"'}, 32, (group,), {Kind.ATTENTION: 256}, tenant="[b]t", epoch="[b]e")
    found = NamespaceDescription(contents, spec, ("[b]engine",))
    text = printed(lambda console: print_namespace_description(found, (PIN,), console))
    assert all(name in text for name in ("[u]field", '"[/]"', "[b]t", "[b]e", "[b]engine", "64 B, 64 B"))
    assert all(cell in text for cell in ("5a5a5a5a5a5a", "1 h 30 min", "1.00 KiB"))
    assert "no namespace is known" in printed(lambda console: print_namespaces(NamespacePage(), console))


def test_a_namespace_that_is_known_and_one_that_is_not_have_no_engine() -> None:
    group = GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(64,))
    spec = NamespaceSpec({}, 32, (group,), {Kind.ATTENTION: 128}, tenant="who")
    for known, said in ((spec, "tenant who"), (None, "known once an engine registers it")):
        found = NamespaceDescription(NamespaceContents(ID), known, ())
        text = printed(lambda console, found=found: print_namespace_description(found, (), console))  # type: ignore[misc]
        assert "no engine is attached" in text and said in text


def test_ids_and_sequences_are_folded_never_cut() -> None:
    loan = LoanDescription("an-engine-with-a-long-name", (12345,), "read", 0xABCDEF)
    in_ram = ObjectDescription("ram", Kind.ATTENTION, 1024, "complete", generation=4, extents=2, loans=(loan,))
    on_disk = ObjectDescription("nvme", Kind.ATTENTION, 1024, "complete", b"\x07" * 16, 1000, 2**60)
    found = ChunkDescription(chunk(ID), ("ram", "nvme"), (in_ram, on_disk), (ID,), 9, 10_000, more_children=True)
    narrow = printed(lambda console: print_chunk_description(ID, found, console), width=80)
    assert "…" not in narrow
    wide = printed(lambda console: print_chunk_description(ID, found, console))
    assert all(
        text in wide for text in (str(2**60), "not known", "0000000000abcdef", "more than 10000", "ancestors: 9")
    )
    assert "aaaaaaaaaaaa ..." in wide, "eight ancestors are not named"
    record = chunk_description_record(ID, found)
    assert record["objects"][0]["checksum"] is None
    assert record["objects"][0]["sequence"] is None
    assert record["objects"][1]["checksum"] == "07" * 16
    assert record["objects"][1]["sequence"] == 2**60
    assert record["more_children"] is True


def test_how_long_ago_is_told_in_units_people_use() -> None:
    for seconds, shown in ((0.4, "0 s"), (59, "59 s"), (90, "1 min 30 s"), (7200, "2 h"), (216_000, "2 d 12 h")):
        page = NamespacePage((NamespaceContents(ID, idle_seconds=seconds, tiers=(TierContents("ram"),)),))
        assert f"{shown} ago" in printed(lambda console, page=page: print_namespaces(page, console))  # type: ignore[misc]
