"""Whether chunks of a bucket should lie there several in an object (a pack), for each workload family.

    python -m benchmarks.bucket_packs [--families agents chat] [--seeds 1] [--requests 600] [--sizes 2 4 8]
                                      [--traces PATH ...] [--json PATH]

Nothing is evicted, and each chunk (512 tokens) is stored once it was computed. A pack has all chunks from one multiple
of its size to the next. Its name is that of its last chunk, so that a reader of the path finds it without an index. A
chunk whose pack is not whole at the end of a request is an object of its own, and stays one. A reader takes whole
packs, and then single chunks, up to the first one that is missing.

Figures are shares of those without packs: `puts`, `stored` bytes (what branches have in common is stored again), and
`hits` (tokens). `packed`: the share of stored chunks that lie in packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.policy import Request, read_trace
from benchmarks.report import write_record
from benchmarks.workload_policies import family_parser, printed, requests_of
from benchmarks.workloads.families import family_names

_SIZES = (2, 4, 8)


@dataclass(slots=True)
class Bucket:
    """A bucket with packs of `size` chunks; 1: without packs."""

    size: int
    puts: int = 0
    stored: int = 0  # chunks
    hits: int = 0  # chunks
    packed: int = 0  # chunks
    _packs: set[int] = field(default_factory=set)  # by their last chunk
    _single: set[int] = field(default_factory=set)

    def request(self, chunks: Sequence[int]) -> None:
        """Look a path up, and store what is not there."""
        found = self._found(chunks)
        self.hits += found
        for start in range(0, len(chunks), self.size):
            pack = chunks[start : start + self.size]
            if start + len(pack) <= found:
                continue
            if len(pack) == self.size > 1 and not self._single.intersection(pack):
                self._packs.add(pack[-1])
                self.puts += 1
                self.stored += self.size
                self.packed += self.size
                continue
            for chunk in pack:
                if chunk not in self._single:
                    self._single.add(chunk)
                    self.puts += 1
                    self.stored += 1

    def _found(self, chunks: Sequence[int]) -> int:
        at = 0
        while at < len(chunks):
            pack = chunks[at : at + self.size]
            if len(pack) == self.size and pack[-1] in self._packs:
                at += self.size
                continue
            single = next((index for index, chunk in enumerate(pack) if chunk not in self._single), len(pack))
            at += single
            if single < len(pack):
                break
        return at


def measured(requests: Sequence[Request], size: int) -> dict[str, float]:
    """Return the figures of packs of this size."""
    plain, bucket = Bucket(1), Bucket(size)
    for request in requests:
        chunks = request.blocks[: request.whole_blocks]
        plain.request(chunks)
        bucket.request(chunks)
    return {
        "puts": round(bucket.puts / plain.puts, 3),
        "stored": round(bucket.stored / plain.stored, 3),
        "hits": round(bucket.hits / plain.hits, 3) if plain.hits else 1.0,
        "packed": round(bucket.packed / bucket.stored, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = family_parser(__doc__, family_names(), ())
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES, help="chunks of a pack")
    parser.add_argument("--traces", type=Path, nargs="*", default=[], metavar="PATH", help="further traces")
    options = parser.parse_args(arguments)

    def rows() -> Iterator[dict[str, object]]:
        named = [(f, s, requests_of(f, s, options.requests)) for s in options.seeds for f in options.families]
        named += [(path.stem, 0, read_trace(path)) for path in options.traces]
        for name, seed, requests in named:
            for size in options.sizes:
                yield {"workload": name, "seed": seed, "size": size, **measured(requests, size)}

    found = printed(rows())
    if options.json:
        write_record(options.json, "bucket_packs", {"rows": found})


if __name__ == "__main__":
    main()
