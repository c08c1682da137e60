"""`kvdepotctl export` and `kvdepotctl import`: a warmed namespace as one file."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import click
import grpc
from kvdepot.client.bulk import BulkEngine
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import STREAM, file_errors, json_option, parts
from kvdepot.client.ctl.completing import Name, TierName
from kvdepot.client.ctl.exporting import CHUNKS_MAX, Exporter, ExportProgress, export_spec, planned
from kvdepot.client.ctl.following import EXIT_STOPPED, Bar, counted, follow
from kvdepot.client.ctl.importing import Importer, ImportProgress, check, spec_of
from kvdepot.client.ctl.texts import escape
from kvdepot.core.errors import KvDepotError, LimitExceeded
from kvdepot.core.export_file import ExportHead, ExportReader
from kvdepot.core.units import size_text
from kvdepot.proto import codec
from rich.console import Console

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint

EXIT_NOT_ALL: Final = 1
UNFINISHED: Final = ".unfinished"


@click.command("export")
@click.argument("name", metavar="NAMESPACE[/KEY]", type=Name(chunks=True))
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--tier", metavar="NAME", type=TierName(), default="", help="Only objects of this tier: ram, or a name of [[tier]]."
)
@json_option
@click.pass_obj
def export(connection: tuple[Endpoint, float], name: str, file: str, tier: str, as_json: bool) -> int:
    """Export objects to a file.

    Writes NAMESPACE, or the prefix that ends with its chunk KEY, to FILE (-: stdout). `kvdepotctl import` reads the
    file into any daemon whose engines have the same namespace. Engines continue during an export. Objects that only a
    lower tier has are read into RAM first; --tier ram leaves them out. FILE gets its name when it is complete. With
    --json, prints one line per progress report. Exit code 1: an object could not be exported.
    """
    if file == STREAM and as_json:
        raise click.UsageError("--json needs stdout, which - uses for the export: name a FILE")
    endpoint, timeout_seconds = connection
    namespace, prefix = parts(name)
    console = Console(stderr=True)
    with connect(*connection) as operator:
        namespace_id = operator.find_namespace(namespace)
        key = operator.find_chunk(namespace_id, prefix) if prefix else b""
        spec = export_spec(operator, namespace_id)
        page = operator.chunks(namespace_id, "", CHUNKS_MAX)
        if page.next_page_token:
            raise LimitExceeded(
                "chunks of one export", CHUNKS_MAX + 1, CHUNKS_MAX, advice="export single prefixes: NAMESPACE/KEY"
            )
        chunks = planned(page, spec, key, tier)
        pathless = 0 if key else len(page.chunks) - len(chunks)
        names = [one for chunk in chunks for one in chunk]
        head = ExportHead(
            namespace_id, codec.encode_spec(spec),
            int(time.time()), len(names), sum(one.raw_bytes for one in names),
        )  # fmt: skip
        engine = BulkEngine(endpoint, spec, "kvdepotctl-export", timeout_seconds=timeout_seconds)
        with file_errors(file), engine, _whole(file) as out:
            told = Exporter(engine, operator, out, head).run(chunks, pathless)
            followed = follow(told, console, _export_bars, as_json=as_json)
            if followed.stopped:
                raise click.Abort
    done = followed.reply
    assert done is not None
    said = f"exported {done.exported} objects, {size_text(done.exported_bytes)}, of namespace {namespace_id.hex()[:12]}"
    left_out = f"; left out: {counted(done.left_out)}" if done.left_out else ""
    console.print(escape(said + left_out), highlight=False, soft_wrap=True)
    return EXIT_NOT_ALL if done.left_out else 0


@click.command("import")
@click.argument("file", type=click.File("rb"))
@click.option("--check", "check_only", is_flag=True, help="Only verify the checksums of FILE; call no daemon.")
@json_option
@click.pass_obj
def import_(connection: tuple[Endpoint, float], file: BinaryIO, check_only: bool, as_json: bool) -> int:
    """Import objects from a file.

    Reads FILE (-: stdin) of `kvdepotctl export` into RAM, as if an engine had stored the objects. Only whole objects
    with correct checksums are imported, into the namespace of the file. The import evicts objects if RAM is full, and
    lower tiers receive objects by their `write` policy. Objects that are present are skipped. With --json, prints one
    line per progress report. Exit code 1: not all objects are present at the end.
    """
    endpoint, timeout_seconds = connection
    console = Console(stderr=True)
    with file_errors(file.name):
        reader = ExportReader(file)
    spec = spec_of(reader)
    shown = f"namespace {reader.head.namespace_id.hex()[:12]} ({spec.label})"
    if check_only:
        with file_errors(file.name):
            followed = follow(check(reader, spec), console, _import_bars, as_json=as_json)
    else:
        engine = BulkEngine(endpoint, spec, "kvdepotctl-import", timeout_seconds=timeout_seconds)
        with file_errors(file.name), engine:
            followed = follow(Importer(engine, reader).run(), console, _import_bars, as_json=as_json)
    done = followed.reply
    if done is not None and not as_json:
        said = escape(_told(done, shown, check_only=check_only))
        console.print(said, highlight=False, soft_wrap=True)
    if followed.stopped or done is None:
        return EXIT_STOPPED
    if not check_only:
        _warn_of_evicted(connection, reader.head.namespace_id, done, console)
    return 0 if done.whole else EXIT_NOT_ALL


def _warn_of_evicted(
    connection: tuple[Endpoint, float], namespace_id: bytes, done: ImportProgress, console: Console
) -> None:
    with suppress(grpc.RpcError, KvDepotError), connect(*connection) as operator:
        found = operator.namespaces(namespace_id.hex(), 1).namespaces
        in_ram = sum(found[0].tiers[0].objects.values()) if found else 0
        if in_ram >= done.imported:
            return
        console.print(
            f"warning: RAM has only {in_ram} objects of the namespace now: it is too small, and later objects "
            "replaced earlier ones",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


@contextmanager
def _whole(file: str) -> Iterator[BinaryIO]:
    """Open a file that only this user may read, because it has users' content. It gets its name when it is complete.

    What is no ordinary file, and stdout, are written as they are.
    """
    path = Path(file)
    if file == STREAM:
        with open(sys.stdout.fileno(), "wb", closefd=False) as there:  # sys.stdout itself may be without a buffer
            yield there
        return
    if path.exists() and not path.is_file():
        with path.open("wb") as there:
            yield there
        return
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as there:  # noqa: PTH123 - a descriptor
            yield there
            there.flush()
            os.fsync(there.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _export_bars(progress: ExportProgress) -> list[Bar]:
    done = progress.exported + sum(progress.left_out.values())
    return [Bar("objects", done, progress.planned, size_text(progress.exported_bytes))]


def _import_bars(progress: ImportProgress) -> list[Bar]:
    done = progress.imported + progress.present + sum(progress.refused.values())
    return [Bar("objects", done, progress.planned, f"{size_text(progress.imported_bytes)} imported")]


def _told(done: ImportProgress, shown: str, *, check_only: bool) -> str:
    if check_only:
        said = f"{done.present} whole objects of {shown}"
    else:
        brought = f"imported {done.imported} objects, {size_text(done.imported_bytes)}, of {shown}"
        said = f"{brought}; {done.present} already present"
    if done.refused:
        said += f"; refused: {counted(done.refused)}" + (f" ({done.reason})" if done.reason else "")
    if done.damaged:
        said += f"; damaged in the file: {counted(done.damaged)}"
    if done.cut_short:
        said += f"; the file is cut short: {done.cut_short}"
    return said if done.finished else f"{said}; stopped before its end"
