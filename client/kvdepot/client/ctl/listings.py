"""Namespaces, chunks and objects: tables for people and plain records for `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.ctl.as_json import kind_names, to_json
from kvdepot.client.ctl.printer import epoch_text, kind_text, new_table, pins_table, show
from kvdepot.client.ctl.texts import escape
from kvdepot.core.calls import ROOT_KEY
from kvdepot.core.units import duration_text, size_text

if TYPE_CHECKING:
    from kvdepot.core.keys import NamespaceSpec
    from kvdepot.core.listing import (
        Chunk,
        ChunkDescription,
        ChunkPage,
        NamespaceContents,
        NamespaceDescription,
        NamespacePage,
    )
    from kvdepot.core.report import PinStatus
    from rich.console import Console
    from rich.table import Table

_ID_DIGITS: Final = 12
_IDENTITY: Final = "identity."


# --- records ---


def chunk_record(chunk: Chunk, tiers: tuple[str, ...]) -> dict[str, Any]:
    """By tier what the chunk has by the number of a tier."""
    held = zip(tiers, chunk.kinds, chunk.size_bytes, strict=True)
    by_tier = {tier: {"kinds": kind_names(kinds), "size_bytes": size} for tier, kinds, size in held if kinds}
    parent = None if chunk.parent == ROOT_KEY else chunk.parent.hex()
    plain = {name: item for name, item in to_json(chunk).items() if name not in ("kinds", "size_bytes")}
    return plain | {"parent": parent, "tiers": by_tier}


def chunk_page_record(namespace_id: bytes, page: ChunkPage) -> dict[str, Any]:
    return {
        "namespace_id": namespace_id.hex(),
        "tiers": list(page.tiers),
        "chunks": [chunk_record(chunk, page.tiers) for chunk in page.chunks],
        "next_cursor": page.next_page_token,
    }


def namespace_description_record(found: NamespaceDescription, pins: Sequence[PinStatus]) -> dict[str, Any]:
    spec = found.spec
    return to_json(found.contents) | {  # type: ignore[no-any-return]
        "engines": to_json(found.engines),
        "pins": to_json(pins),
        "registered": spec is not None,
        "object_bytes": to_json(spec.object_bytes) if spec else {},
        "groups": to_json(spec.groups) if spec else [],
        "fields": spec.fields_by_path() if spec else {},
    }


def chunk_description_record(namespace_id: bytes, found: ChunkDescription) -> dict[str, Any]:
    plain = {name: item for name, item in to_json(found).items() if name not in ("chunk", "tiers")}
    for one in plain["objects"]:
        one["sequence"] = one["sequence"] or None  # none in the arena
    return {"namespace_id": namespace_id.hex(), **chunk_record(found.chunk, found.tiers), **plain}


# --- tables ---


def print_namespaces(page: NamespacePage, console: Console) -> None:
    if not page.namespaces:
        console.print("no namespace is known")
        return
    table = new_table("namespaces", "namespace", "label", "tenant", ">chunks", "tier", "objects", ">size", ">last used")
    for namespace in page.namespaces:
        _add_namespace(table, namespace)
    show(console, table)
    _print_cursor(page.next_page_token, console)


def _add_namespace(table: Table, namespace: NamespaceContents) -> None:
    """Add a row per tier."""
    first = [
        namespace.namespace_id.hex()[:_ID_DIGITS], escape(namespace.label), escape(namespace.tenant),
        str(namespace.chunks),
    ]  # fmt: skip
    used = f"{duration_text(namespace.idle_seconds)} ago"
    for tier in namespace.tiers:
        objects = " ".join(f"{kind_text(kind)}:{count}" for kind, count in sorted(tier.objects.items()))
        table.add_row(*first, escape(tier.tier), objects or "0", size_text(tier.size_bytes), used)
        first, used = [""] * len(first), ""


def print_chunks(namespace_id: bytes, page: ChunkPage, console: Console) -> None:
    if page.chunks:
        digits = _digits_that_tell_apart(chunk.key for chunk in page.chunks)
        title = f"chunks of namespace {namespace_id.hex()[:_ID_DIGITS]}"
        table = new_table(title, "key", "parent", ">tokens", "usable", *map(escape, page.tiers), ">size")
        for chunk in page.chunks:
            table.add_row(
                chunk.key.hex()[:digits],
                "root" if chunk.parent == ROOT_KEY else chunk.parent.hex()[:digits],
                str(chunk.boundary_tokens),
                "yes" if chunk.usable else "no",
                *_held(chunk),
                size_text(sum(chunk.size_bytes)),
            )
        show(console, table)
    elif not page.next_page_token:
        console.print("no chunk is there")
    _print_cursor(page.next_page_token, console)


def _held(chunk: Chunk) -> list[str]:
    """By tier; what is incomplete stands in parentheses."""
    texts = [" ".join(kind_names(kinds)) for kinds in chunk.kinds]
    if chunk.incomplete:
        texts[0] = f"{texts[0]} ({' '.join(kind_names(chunk.incomplete))})".strip()
    return texts


def print_namespace_description(found: NamespaceDescription, pins: Sequence[PinStatus], console: Console) -> None:
    contents, spec = found.contents, found.spec
    engines = ", ".join(map(escape, found.engines))
    parts: list[Table | str] = [
        f"namespace {contents.namespace_id.hex()} {escape(contents.label)}",
        f"{contents.chunks} chunks, last used {duration_text(contents.idle_seconds)} ago",
        f"engines: {engines}" if engines else "no engine is attached",
        *(
            _spec_lines(spec)
            if spec
            else ["its fields are known once an engine registers it with this run of the daemon"]
        ),
        _tiers(contents),
    ]
    if pins:
        parts.append(pins_table(pins))
    if spec is not None:
        parts += [_groups(spec), _identity(spec)]
    show(console, *parts)


def _spec_lines(spec: NamespaceSpec) -> Iterator[str]:
    epoch = epoch_text(spec.epoch, spec.bumps) or "(none)"
    yield f"tenant {escape(spec.tenant) or '(none)'}, epoch {epoch}"
    sizes = ", ".join(
        f"{kind_text(kind)} {size_text(size_bytes)}" for kind, size_bytes in sorted(spec.object_bytes.items())
    )
    yield f"chunks of {spec.chunk_tokens} tokens; object sizes: {sizes}"


def _tiers(contents: NamespaceContents) -> Table:
    table = new_table("tiers", "tier", "objects", ">size")
    for tier in contents.tiers:
        objects = " ".join(f"{kind_text(kind)}:{count}" for kind, count in sorted(tier.objects.items()))
        table.add_row(escape(tier.tier), objects or "0", size_text(tier.size_bytes))
    return table


def _identity(spec: NamespaceSpec) -> Table:
    table = new_table("identity", "field", "value")
    for path, text in sorted(spec.fields_by_path().items()):
        if path.startswith(_IDENTITY):
            table.add_row(escape(path.removeprefix(_IDENTITY)), escape(text))
    return table


def _groups(spec: NamespaceSpec) -> Table:
    table = new_table("groups", "kind", ">block tokens", ">window tokens", "size a block and rank", ">layers")
    for group in spec.groups:
        each = ", ".join(map(size_text, group.rank_block_bytes)) + (" (replicated)" if group.replicated else "")
        window = str(group.window_tokens) if group.window_tokens else ""
        table.add_row(kind_text(group.kind), str(group.block_tokens), window, each, str(len(group.layers)))
    return table


def print_chunk_description(namespace_id: bytes, found: ChunkDescription, console: Console) -> None:
    chunk = found.chunk
    usable = "usable" if chunk.usable else "not usable: no request could resume here"
    more = "more than " if found.more_children else ""
    ends = f"ends at {chunk.boundary_tokens} tokens, {usable}"
    path = " ".join(key.hex()[:_ID_DIGITS] for key in found.path)
    left_out = " ..." if found.depth > len(found.path) else ""
    table = new_table(
        "objects", "tier", "kind", "state", ">size", ">stored", "checksum", ">sequence", ">generation", ">pieces"
    )
    for one in found.objects:
        in_arena = bool(one.extents)
        tier = f"{one.tier} ({one.place})" if one.place else one.tier
        table.add_row(
            escape(tier), kind_text(one.kind), escape(one.state) + (" (pinned)" if one.pinned else ""),
            size_text(one.size_bytes),
            "" if in_arena else size_text(one.stored_bytes), one.checksum.hex()[:_ID_DIGITS] or "not known",
            str(one.sequence or ""), str(one.generation) if in_arena else "", str(one.extents or ""),
        )  # fmt: skip
    show(
        console,
        f"chunk {chunk.key.hex()} of namespace {namespace_id.hex()}",
        f"{ends}; ancestors: {found.depth}, children: {more}{found.children}",
        f"path to the root: {path}{left_out}" if path else "it is a first chunk",
        table,
        _loans(found),
    )


def _loans(found: ChunkDescription) -> Table | str:
    table = new_table("lent", "kind", "to", "for", "pids", "lease")
    for one in found.objects:
        for loan in one.loans:
            lease = f"{loan.lease_id:016x}" if loan.lease_id else ""
            pids = " ".join(map(str, loan.pids))
            table.add_row(kind_text(one.kind), escape(loan.engine_id), escape(loan.mode), pids, lease)
    return table if table.row_count else "lent to nobody"


def _print_cursor(cursor: str, console: Console) -> None:
    if cursor:
        console.print(f"there may be more: continue with --cursor {escape(cursor)}", soft_wrap=True)


def _digits_that_tell_apart(keys: Iterable[bytes]) -> int:
    texts = [key.hex() for key in keys]
    digits = _ID_DIGITS
    while len({text[:digits] for text in texts}) < len(set(texts)):
        digits += 1
    return digits
