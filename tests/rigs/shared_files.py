"""Objects as files of a shared directory, published and read by the code of the I/O workers, without processes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdepot.core.objectfile import Codec
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import Answer, PublishFile, ReadFile
from kvdepot.server.io.perform import perform
from kvdepot.server.storage import shared_layout as layout
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import object_file, quarantine_file, temporary_file

from tests.rigs.io_rig import MIB, IoRig

NODE = "node-1"


class Files(IoRig):
    """A shared directory, as its coordinator leaves it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, segment_bytes=0)
        self.segment.parent.rmdir()
        for folder in layout.FOLDERS:
            (directory / folder).mkdir()
        (directory / layout.MARKER).write_bytes(layout.Marker("ab" * 16, "a test").pack())
        self.context = Context(os.fspath(directory), self.arena)
        self._temporaries = 0

    def job(self, seed: int, raw_bytes: int = 2 * MIB, codec: Codec = Codec.NONE, **changes: Any) -> PublishFile:
        """Of a pattern that this puts into the arena."""
        write = self.write(seed, raw_bytes, codec)
        self._temporaries += 1
        name = replace(write.name, kind=1 + seed % 3)
        job = PublishFile(
            object_file(name), temporary_file(NODE, self._temporaries), self.directory.stat().st_dev, name, codec,
            write.created_at, write.extents, write.raw_sum, sync=False, quarantine=quarantine_file(7, name),
        )  # fmt: skip
        return replace(job, **changes)

    def publish(self, job: PublishFile) -> Answer:
        return perform(job, self.context)

    def stored(self, seed: int, raw_bytes: int = 2 * MIB, codec: Codec = Codec.NONE, **changes: Any) -> PublishFile:
        job = self.job(seed, raw_bytes, codec, **changes)
        answer = self.publish(job)
        assert (answer.outcome, answer.already_there) == (IoOutcome.OK, False), answer
        return job

    def read_job(self, job: PublishFile) -> ReadFile:
        extents = self.spread(job.name.raw_bytes, 2, 16 * MIB)
        return ReadFile(job.file, job.name, extents, job.quarantine, keys=job.keys)

    def read(self, job: PublishFile) -> tuple[IoOutcome, bytes]:
        read = self.read_job(job)
        assert read.extents is not None
        for offset, length in read.extents:
            self.arena[offset : offset + length] = bytes(length)
        answer = perform(read, self.context)
        return answer.outcome, self.taken(read.extents)

    def path(self, job: PublishFile) -> Path:
        return self.directory / job.file

    def files(self, folder: str = "") -> list[str]:
        found = (self.directory / folder).rglob("*.kvd") if folder else self.directory.rglob("*")
        return sorted(str(path.relative_to(self.directory)) for path in found if path.is_file())
