"""What packs of a bucket's chunks would save and cost, on paths that are counted by hand."""

from __future__ import annotations

from benchmarks.bucket_packs import Bucket, measured
from benchmarks.policy import Request


def bucket_after(size: int, *paths: tuple[int, ...]) -> Bucket:
    bucket = Bucket(size)
    for path in paths:
        bucket.request(path)
    return bucket


def test_whole_packs_are_one_put_and_the_rest_of_a_path_is_single() -> None:
    bucket = bucket_after(2, (1, 2, 3, 4, 5))
    assert (bucket.puts, bucket.stored, bucket.packed) == (3, 5, 4)


def test_a_reader_finds_packs_and_single_chunks_up_to_the_first_gap() -> None:
    assert bucket_after(2, (1, 2, 3), (1, 2, 3, 4)).hits == 3
    assert bucket_after(2, (1, 2, 3, 4), (1, 2, 3)).hits == 2, "a pack is found by its last chunk alone"


def test_a_pack_that_began_as_single_chunks_stays_so() -> None:
    bucket = bucket_after(2, (1, 2, 3), (1, 2, 3, 4))
    assert (bucket.puts, bucket.stored, bucket.packed) == (3, 4, 2)


def test_a_branch_within_a_pack_stores_again_what_it_shares() -> None:
    bucket = bucket_after(2, (1, 2), (1, 9))
    assert (bucket.hits, bucket.puts, bucket.stored) == (0, 2, 4)
    figures = measured([Request(0.0, (1, 2), 2), Request(1.0, (1, 9), 2)], 2)
    assert figures == {"puts": round(2 / 3, 3), "stored": round(4 / 3, 3), "hits": 0.0, "packed": 1.0}
