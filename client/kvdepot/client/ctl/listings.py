"""Namespaces, chunks and objects: tables for people and plain records for `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.ctl.printer import (
    duration_text,
    epoch_text,
    kind_text,
    new_table,
    pin_record,
    pins_table,
    show,
    size_text,
)
from kvdepot.core.calls import ROOT_KEY
from rich.markup import escape

if TYPE_CHECKING:
    from kvdepot.core.keys import NamespaceSpec
    from kvdepot.core.listing import (
        Chunk,
        ChunkDescription,
        ChunkPage,
        NamespaceContents,
        NamespaceDescription,
        NamespacePage,
        ObjectDescription,
    )
    from kvdepot.core.planner import GroupSpec
    from kvdepot.core.report import PinStatus
    from rich.console import Console
    from rich.table import Table

_ID_DIGITS: Final = 12
_IDENTITY: Final = "identity."


# --- records ---


def namespace_record(namespace: NamespaceContents) -> dict[str, Any]:
    return {
        "namespace_id": namespace.namespace_id.hex(),
        "label": namespace.label,
        "tenant": namespace.tenant,
        "epoch": namespace.epoch,
        "bumps": namespace.bumps,
        "chunk_tokens": namespace.chunk_tokens,
        "chunks": namespace.chunks,
        "sessions": namespace.sessions,
        "idle_seconds": namespace.idle_seconds,
        "tiers": [
            {
                "tier": one.tier,
                "objects": {kind_text(kind): count for kind, count in sorted(one.objects.items())},
                "size_bytes": one.size_bytes,
            }
            for one in namespace.tiers
        ],
    }


def chunk_record(chunk: Chunk, tiers: tuple[str, ...]) -> dict[str, Any]:
    held = zip(tiers, chunk.kinds, chunk.size_bytes, strict=True)
    return {
        "key": chunk.key.hex(),
        "parent": None if chunk.parent == ROOT_KEY else chunk.parent.hex(),
        "boundary_tokens": chunk.boundary_tokens,
        "usable": chunk.usable,
        "tiers": {
            tier: {"kinds": _kinds(kinds), "size_bytes": size_bytes} for tier, kinds, size_bytes in held if kinds
        },
        "incomplete": _kinds(chunk.incomplete),
    }


def chunk_page_record(namespace_id: bytes, page: ChunkPage) -> dict[str, Any]:
    return {
        "namespace_id": namespace_id.hex(),
        "tiers": list(page.tiers),
        "chunks": [chunk_record(chunk, page.tiers) for chunk in page.chunks],
        "next_cursor": page.next_token,
    }


def namespace_description_record(found: NamespaceDescription, pins: Sequence[PinStatus]) -> dict[str, Any]:
    spec = found.spec
    return namespace_record(found.contents) | {
        "engines": list(found.engines),
        "pins": [pin_record(one) for one in pins],
        "registered": spec is not None,
        "object_bytes": _sizes(spec) if spec else {},
        "groups": [_group_record(group) for group in spec.groups] if spec else [],
        "fields": spec.fields_by_path() if spec else {},
    }


def chunk_description_record(namespace_id: bytes, found: ChunkDescription) -> dict[str, Any]:
    return {
        "namespace_id": namespace_id.hex(),
        **chunk_record(found.chunk, found.tiers),
        "depth": found.depth,
        "path": [key.hex() for key in found.path],
        "children": found.children,
        "more_children": found.more_children,
        "objects": [_object_record(one) for one in found.objects],
    }


def _object_record(found: ObjectDescription) -> dict[str, Any]:
    return {
        "tier": found.tier,
        "kind": kind_text(found.kind),
        "state": found.state,
        "size_bytes": found.size_bytes,
        "stored_bytes": found.stored_bytes,
        "checksum": found.checksum.hex() or None,
        "sequence": found.sequence or None,
        "generation": found.generation,
        "extents": found.extents,
        "pinned": found.pinned,
        "loans": [
            {
                "engine_id": loan.engine_id,
                "pids": list(loan.pids),
                "mode": loan.mode,
                "lease_id": f"{loan.lease_id:016x}" if loan.lease_id else None,
            }
            for loan in found.loans
        ],
    }


def _group_record(group: GroupSpec) -> dict[str, Any]:
    return {
        "kind": kind_text(group.kind),
        "block_tokens": group.block_tokens,
        "window_tokens": group.window_tokens,
        "rank_block_bytes": list(group.rank_block_bytes),
        "replicated": group.replicated,
        "layers": list(group.layers),
    }


def _sizes(spec: NamespaceSpec) -> dict[str, int]:
    return {kind_text(kind): size_bytes for kind, size_bytes in sorted(spec.object_bytes.items())}


def _kinds(kinds: bytes) -> list[str]:
    return [kind_text(kind) for kind in kinds]


# --- tables ---


def print_namespaces(page: NamespacePage, console: Console) -> None:
    if not page.namespaces:
        console.print("no namespace is known")
        return
    table = new_table("namespaces", "namespace", "label", "tenant", "chunks", "tier", "objects", "size", "last used")
    for namespace in page.namespaces:
        _add_namespace(table, namespace)
    show(console, table)
    _print_cursor(page.next_token, console)


def _add_namespace(table: Table, namespace: NamespaceContents) -> None:
    """A row a tier."""
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
        table = new_table(title, "key", "parent", "tokens", "usable", *map(escape, page.tiers), "size")
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
    elif not page.next_token:
        console.print("no chunk is there")
    _print_cursor(page.next_token, console)


def _held(chunk: Chunk) -> list[str]:
    """By tier; what is incomplete stands in parentheses."""
    texts = [" ".join(_kinds(kinds)) for kinds in chunk.kinds]
    if chunk.incomplete:
        texts[0] = f"{texts[0]} ({' '.join(_kinds(chunk.incomplete))})".strip()
    return texts


def print_namespace_description(found: NamespaceDescription, pins: Sequence[PinStatus], console: Console) -> None:
    contents, spec = found.contents, found.spec
    console.print(f"namespace {contents.namespace_id.hex()} {escape(contents.label)}", soft_wrap=True)
    console.print(f"{contents.chunks} chunks, last used {duration_text(contents.idle_seconds)} ago")
    table = new_table("tiers", "tier", "objects", "size")
    for tier in contents.tiers:
        objects = " ".join(f"{kind_text(kind)}:{count}" for kind, count in sorted(tier.objects.items()))
        table.add_row(escape(tier.tier), objects or "0", size_text(tier.size_bytes))
    show(console, table)
    if pins:
        show(console, pins_table(pins))
    engines = ", ".join(map(escape, found.engines))
    console.print(f"engines: {engines}" if engines else "no engine is attached", soft_wrap=True)
    if spec is None:
        console.print("its fields are known once an engine registers it with this run of the daemon")
        return
    epoch = epoch_text(spec.epoch, spec.bumps) or "(none)"
    console.print(f"tenant {escape(spec.tenant) or '(none)'}, epoch {epoch}", soft_wrap=True)
    sizes = ", ".join(f"{kind} {size_text(size_bytes)}" for kind, size_bytes in _sizes(spec).items())
    console.print(f"chunks of {spec.chunk_tokens} tokens; object sizes: {sizes}", soft_wrap=True)
    show(console, _groups(spec))
    table = new_table("identity", "field", "value")
    for path, text in sorted(spec.fields_by_path().items()):
        if path.startswith(_IDENTITY):
            table.add_row(escape(path.removeprefix(_IDENTITY)), escape(text))
    show(console, table)


def _groups(spec: NamespaceSpec) -> Table:
    table = new_table("groups", "kind", "block tokens", "window tokens", "bytes a block and rank", "layers")
    for group in spec.groups:
        each = " ".join(map(str, group.rank_block_bytes)) + (" (replicated)" if group.replicated else "")
        window = str(group.window_tokens) if group.window_tokens else ""
        table.add_row(kind_text(group.kind), str(group.block_tokens), window, each, str(len(group.layers)))
    return table


def print_chunk_description(namespace_id: bytes, found: ChunkDescription, console: Console) -> None:
    chunk = found.chunk
    usable = "usable" if chunk.usable else "not usable: no request could resume here"
    more = "more than " if found.more_children else ""
    console.print(f"chunk {chunk.key.hex()} of namespace {namespace_id.hex()}", soft_wrap=True)
    console.print(
        f"ends at {chunk.boundary_tokens} tokens, {usable}; ancestors: {found.depth}, children: {more}{found.children}"
    )
    path = " ".join(key.hex()[:_ID_DIGITS] for key in found.path)
    left_out = " ..." if found.depth > len(found.path) else ""
    console.print(f"path to the root: {path}{left_out}" if path else "it is a first chunk", soft_wrap=True)
    table = new_table(
        "objects", "tier", "kind", "state", "size", "stored", "checksum", "sequence", "generation", "pieces"
    )
    for one in found.objects:
        in_arena = bool(one.extents)
        table.add_row(
            escape(one.tier), kind_text(one.kind), escape(one.state) + (" (pinned)" if one.pinned else ""),
            size_text(one.size_bytes),
            "" if in_arena else size_text(one.stored_bytes), one.checksum.hex()[:_ID_DIGITS] or "not known",
            str(one.sequence or ""), str(one.generation) if in_arena else "", str(one.extents or ""),
        )  # fmt: skip
    show(console, table)
    _print_loans(found, console)


def _print_loans(found: ChunkDescription, console: Console) -> None:
    table = new_table("lent", "kind", "to", "for", "pids", "lease")
    for one in found.objects:
        for loan in one.loans:
            lease = f"{loan.lease_id:016x}" if loan.lease_id else ""
            pids = " ".join(map(str, loan.pids))
            table.add_row(kind_text(one.kind), escape(loan.engine_id), escape(loan.mode), pids, lease)
    show(console, table if table.row_count else "lent to nobody")


def _print_cursor(cursor: str, console: Console) -> None:
    if cursor:
        console.print(f"there may be more: go on with --cursor {escape(cursor)}", soft_wrap=True)


def _digits_that_tell_apart(keys: Iterable[bytes]) -> int:
    texts = [key.hex() for key in keys]
    digits = _ID_DIGITS
    while len({text[:digits] for text in texts}) < len(set(texts)):
        digits += 1
    return digits
