"""Replays of recorded traces, and what is handed to who records them.

`python -m tests.unit.server.offline.test_trace_replay` writes the golden tables. Look at them first.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from kvdepot.core.bars import BLOCKS
from kvdepot.core.calls import Kind
from kvdepot.core.errors import InvalidArgument, LimitExceeded
from kvdepot.core.groups import GroupSpec
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import Planner
from kvdepot.core.trace_file import Request, Trace, TraceWriter, coarser
from kvdepot.core.traces import PART_KEY_BYTES_MAX, TracedNamespace, TracedRequest, TracePart
from kvdepot.server.daemon import app
from kvdepot.server.daemon.app import _parser
from kvdepot.server.depot.loads.traces import RECORDERS_MAX, WAITING_KEY_BYTES_MAX, Traces
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.types import TierConfig, WritePolicy
from kvdepot.server.offline.replay import Disk, Replay, capacities, recorded, unique_bytes
from kvdepot.server.offline.replay_verb import Setting, _settings, replayed, report

GOLDEN = Path(__file__).parents[3] / "golden/replay"
WIDTHS = (80, 120, 200)

CHUNK_TOKENS, OBJECT_BYTES = 256, 1 << 20
ATTENTION = GroupSpec(Kind.ATTENTION, CHUNK_TOKENS, rank_block_bytes=(OBJECT_BYTES,))
WINDOW = GroupSpec(Kind.WINDOW, CHUNK_TOKENS, window_tokens=CHUNK_TOKENS + 1, rank_block_bytes=(OBJECT_BYTES,))
STATE = GroupSpec(Kind.STATE, CHUNK_TOKENS, rank_block_bytes=(3 * OBJECT_BYTES,))


def spec(*groups: GroupSpec) -> NamespaceSpec:
    planner = Planner(groups, CHUNK_TOKENS)
    return NamespaceSpec({}, CHUNK_TOKENS, groups, {kind: planner.object_bytes(kind) for kind in planner.kinds})


def trace_of(paths: list[tuple[int, ...]], *groups: GroupSpec) -> Trace:
    requests = tuple(Request(float(at), "one", path, 0) for at, path in enumerate(paths))
    return Trace({"one": spec(*(groups or (ATTENTION,)))}, requests)


def hit(trace: Trace, objects: int, eviction: str = "gdsf", *, checkpoints: bool = False) -> int:
    """Chunks."""
    hits = Replay(trace, objects * OBJECT_BYTES, eviction, checkpoints=checkpoints).run()
    assert hits.asked_tokens == CHUNK_TOKENS * sum(len(request.chunks) for request in trace.requests)
    return hits.hit_tokens // CHUNK_TOKENS


def conversations(random: Random, count: int) -> list[tuple[int, ...]]:
    """Each request goes on with one of those before, or begins anew behind the same first chunk."""
    paths: list[tuple[int, ...]] = []
    talks: list[tuple[int, ...]] = []
    fresh = iter(range(1, 1_000_000))
    for _ in range(count):
        known = talks.pop(random.randrange(len(talks))) if talks and random.random() < 0.7 else (0,)
        paths.append(known + tuple(next(fresh) for _ in range(random.randint(1, 4))))
        talks.append(paths[-1])
    return paths


def test_with_room_for_everything_all_that_came_before_is_hit() -> None:
    trace = trace_of([(0, 1, 2), (0, 1, 3), (0, 1, 2), (4,), (0, 1, 3, 5)])
    assert unique_bytes(trace) == 6 * OBJECT_BYTES
    assert hit(trace, 6) == 0 + 2 + 3 + 0 + 3


def test_lru_hits_what_a_cache_of_as_many_chunks_does() -> None:
    paths = conversations(Random(5), 150)
    trace = trace_of(paths)
    for room in (5, 15, 60):
        cache: OrderedDict[int, None] = OrderedDict()
        expected = 0
        for path in paths:
            known = next((at for at, chunk in enumerate(path) if chunk not in cache), len(path))
            expected += known
            for chunk in reversed(path):  # the last one is the first to go
                cache.pop(chunk, None)
                cache[chunk] = None
            while len(cache) > room:
                cache.popitem(last=False)
        assert hit(trace, room, "lru") == pytest.approx(expected, rel=0.1, abs=5)
        assert hit(trace, room) >= 0.9 * hit(trace, room, "lru")


def test_a_state_is_needed_where_a_request_resumes_and_is_kept_as_the_engine_keeps_it() -> None:
    trace = trace_of([(0, 1, 2), (0, 1, 3), (0, 1, 2, 4)], ATTENTION, STATE)
    assert hit(trace, 40) == 3, "only the end of the first prompt has a state"
    assert hit(trace, 40, checkpoints=True) == 2 + 3
    assert unique_bytes(trace) == (5 + 3 * 3) * OBJECT_BYTES
    assert unique_bytes(trace, checkpoints=True) == (5 + 3 * 5) * OBJECT_BYTES


def test_windows_are_stored_and_loaded_with_attention() -> None:
    trace = trace_of([(0, 1, 2), (0, 1, 3), (0, 1, 2)], ATTENTION, WINDOW)
    assert hit(trace, 20) == 2 + 3
    assert hit(trace, 1) == 0


def test_namespaces_share_the_room_and_no_chunk() -> None:
    requests = [Request(at, name, (0, 1), 0) for at, name in enumerate(["one", "two", "one", "two"])]
    trace = Trace({"one": spec(ATTENTION), "two": spec(ATTENTION, STATE)}, tuple(requests))
    hits = Replay(trace, 10 * OBJECT_BYTES, "gdsf").run()
    assert hits.hit_tokens == 4 * CHUNK_TOKENS
    assert unique_bytes(trace) == (4 + 3) * OBJECT_BYTES
    assert capacities(trace)[-1] == 7 * OBJECT_BYTES


def test_a_small_trace_has_each_size_once() -> None:
    trace = Trace({"one": spec(ATTENTION)}, (Request(0, "one", (0,), 0),))
    assert len(capacities(trace)) == len(set(capacities(trace))) < 5


def test_what_was_offered_then_is_told_beside_it() -> None:
    trace = Trace({"one": spec(ATTENTION)}, (Request(0, "one", (0, 1), 256), Request(1, "one", (), 0)))
    assert recorded(trace).rate == 0.5
    assert recorded(Trace({}, ())).rate == 0.0


def test_kvdepotd_replay_prints_a_row_for_each_size_and_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, namespace_id = TraceWriter(), bytes(16)
    keys = [bytes([number]) * 16 for number in range(4)]
    requests = [TracedRequest(float(at), namespace_id, b"".join(keys[: at + 1]), 256 * at) for at in range(4)]
    lines = [
        writer.head(),
        *writer.lines(TracePart((TracedNamespace(namespace_id, spec(ATTENTION)),), tuple(requests))),
    ]
    (tmp_path / "trace").write_text("".join(lines))
    arguments = ["replay", str(tmp_path / "trace"), "--ram", "1MiB", "--ram", "1GiB", "--eviction", "lru"]
    assert app.main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recorded"] == {"asked_tokens": 2560, "hit_tokens": 1536, "hit_rate": 0.6}
    assert [(one["ram_bytes"], one["hit_rate"]) for one in said["replayed"]] == [(1 << 20, 0.3), (1 << 30, 0.6)]
    assert app.main(arguments) == 0
    assert "1.00 GiB  lru         60.0 %            1536  ██" in capsys.readouterr().out
    assert app.main(["replay", str(tmp_path / "trace")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 1 + 3 + 1  # 1, 2 and 4 MiB


def test_larger_chunks_share_less_and_are_rated_by_the_same_tokens() -> None:
    trace = trace_of([(0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 2, 3, 5)])
    pairs = coarser(trace, 2)
    assert pairs.namespaces["one"].chunk_tokens == 2 * CHUNK_TOKENS
    assert pairs.namespaces["one"].object_bytes == {Kind.ATTENTION: 2 * OBJECT_BYTES}
    assert [one.chunks for one in pairs.requests] == [(1, 3), (1, 4), (1, 3)]
    record = replayed(trace, [Setting(64 * OBJECT_BYTES, "lru", factor) for factor in (1, 2, 3)])
    asked = 13 * CHUNK_TOKENS
    assert [one["asked_tokens"] for one in record["replayed"]] == [asked] * 3
    assert [one["hit_tokens"] // CHUNK_TOKENS for one in record["replayed"]] == [3 + 4, 2 + 4, 3 + 3]


def test_a_chunk_that_the_model_cannot_have_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="namespace one"):
        coarser(trace_of([(0, 1)]), 1 << 20)


def test_a_disk_has_what_ram_has_dropped_and_its_writes_are_counted() -> None:
    paths = [tuple(range(10 * number, 10 * number + 8)) for number in range(6)] * 4
    trace = trace_of(paths)
    ram = 16 * OBJECT_BYTES
    alone = Replay(trace, ram, "lru").run()
    found = {
        write: Replay(trace, ram, "lru", disk=Disk(100 * OBJECT_BYTES, TierConfig(write))).run()
        for write in WritePolicy
    }
    assert (alone.written_bytes, alone.written_per_hit_byte) == (0, None)
    for write in (WritePolicy.COMMIT, WritePolicy.EVICT, WritePolicy.AUTO):
        assert found[write].rate > alone.rate + 0.3
        assert 0 < found[write].disk_hit_bytes <= found[write].hit_tokens // CHUNK_TOKENS * OBJECT_BYTES
    assert found[WritePolicy.COMMIT].written_bytes == 48 * OBJECT_BYTES
    assert found[WritePolicy.SECOND_USE].written_bytes == 0, "RAM has dropped all before its second use"


def drawn(scene: str, columns: int) -> str:
    """The table of a trace of conversations."""
    trace = trace_of(conversations(Random(5), 60))
    rams = [objects * OBJECT_BYTES for objects in (16, 32, 64)]
    settings = {
        "ram": [Setting(ram, policy) for policy in ("adaptive", "lru") for ram in rams],
        "all": [
            Setting(ram, "adaptive", factor, 64 * OBJECT_BYTES, write)
            for factor in (1, 2)
            for write in (WritePolicy.SECOND_USE, WritePolicy.AUTO)
            for ram in rams
        ],
    }
    return "".join(f"{line}\n" for line in report(replayed(trace, settings[scene]), columns, BLOCKS))


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("scene", ["ram", "all"])
def test_the_table_is_as_it_was(scene: str, columns: int) -> None:
    assert drawn(scene, columns) == (GOLDEN / f"{scene}-{columns}.txt").read_text()


def test_every_combination_is_replayed_and_curves_follow_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, namespace_id = TraceWriter(), bytes(16)
    request = TracedRequest(0.0, namespace_id, b"k" * 64, 0)
    lines = [writer.head(), *writer.lines(TracePart((TracedNamespace(namespace_id, spec(ATTENTION)),), (request,)))]
    (tmp_path / "trace").write_text("".join(lines))
    arguments = ["replay", str(tmp_path / "trace"), "--json", "--ram", "2MiB", "--ram", "8MiB", "--disk", "0"]
    assert app.main([*arguments, "--disk", "1GiB", "--write", "commit", "--write", "auto", "--chunks", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)["replayed"]
    found = [(one["chunk_factor"], one["disk_bytes"] >> 30, one["write"], one["ram_bytes"] >> 20) for one in rows]
    assert found == [(2, disk, write, ram) for disk, write in ((0, None), (1, "commit"), (1, "auto")) for ram in (2, 8)]


@pytest.mark.parametrize("chunks", ["0", "0.5", "-1"])
def test_smaller_chunks_are_refused_because_they_were_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chunks: str
) -> None:
    with pytest.raises(SystemExit):
        app.main(["replay", str(tmp_path / "trace"), f"--chunks={chunks}"])
    assert "smaller chunks were not recorded" in capsys.readouterr().err


@pytest.mark.requirement("I4")
def test_a_size_far_above_the_trace_has_room_for_everything_and_takes_no_memory_for_the_rest() -> None:
    trace = trace_of([(0, 1, 2), (0, 1, 2)])
    disk = Disk(1 << 62, TierConfig(WritePolicy.COMMIT))
    for room in (16 << 20, 1 << 50, 1 << 62):
        assert Replay(trace, room, "adaptive").run().hit_tokens == 3 * CHUNK_TOKENS
        assert Replay(trace, room, "adaptive", disk=disk).run().hit_tokens == 3 * CHUNK_TOKENS
    huge = "".join(f"--{name}=4PiB " for name in ("ram", "disk")).split()
    assert [one.ram_bytes for one in _settings(trace, _parser().parse_args(["replay", "x", *huge]))] == [4 << 50]


@pytest.mark.parametrize(
    "wrong", ["--ram=0", "--ram=1B", "--drive-writes-per-day=nan", "--drive-writes-per-day=-1", "--ram=8388608PiB"]
)
def test_sizes_and_targets_without_a_meaning_are_wrong_usage(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(["replay", str(tmp_path / "trace"), wrong])
    assert ended.value.code == 2 and wrong.partition("=")[0] in capsys.readouterr().err


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(("before", "after"), [('"a-label"', '"\\ud800"'), ('"a-label"', f'"{"x" * 1000}"')])
def test_what_the_depot_refuses_of_a_trace_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str
) -> None:
    writer, namespace = TraceWriter(), TracedNamespace(bytes(16), replace(spec(ATTENTION), label="a-label"))
    part = TracePart((namespace,), (TracedRequest(0.0, bytes(16), b"k" * 16, 0),))
    text = "".join([writer.head(), *writer.lines(part)])
    (tmp_path / "trace").write_text(text.replace(before, after))
    assert app.main(["replay", str(tmp_path / "trace"), "--ram", "2MiB"]) == 2
    assert str(tmp_path / "trace") in capsys.readouterr().err
    (tmp_path / "trace").write_text(text[:-9])
    assert app.main(["replay", str(tmp_path / "trace"), "--ram", "2MiB"]) == 0
    assert "its last line is not whole" in capsys.readouterr().err


def test_kvdepotd_replay_refuses_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").write_bytes(b"\xff\n")
    for path in (tmp_path / "other", tmp_path / "absent", tmp_path):
        assert app.main(["replay", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


# What recorders get.


def _namespace(label: str = "one") -> Namespace:
    namespace = Namespace(1, label.encode().ljust(16), label, 0.0)
    namespace.spec = spec(ATTENTION)
    return namespace


def test_a_recorder_gets_what_came_since_it_began_and_names_each_namespace_once() -> None:
    now = [10.0]
    traces = Traces(lambda: now[0])
    traces.asked(_namespace(), b"k" * 16, 0)
    with traces.recording() as recorder:
        now[0] = 12.5
        traces.asked(_namespace(), b"k" * 32, 256)
        part = recorder.take()
        assert part.requests == (TracedRequest(2.5, _namespace().id, b"k" * 32, 256),)
        assert [one.namespace_id for one in part.namespaces] == [_namespace().id]
        traces.asked(_namespace(), b"", 0)
        traces.asked(_namespace("two"), b"", 0)
        part = recorder.take()
        assert (len(part.requests), [one.namespace_id for one in part.namespaces]) == (2, [_namespace("two").id])
        assert recorder.take() == TracePart()
    traces.asked(_namespace(), b"k" * 16, 0)
    assert recorder.take() == TracePart()


@pytest.mark.requirement("I4")
def test_what_waits_for_a_slow_recorder_is_bounded_and_what_is_lost_is_counted() -> None:
    traces = Traces(lambda: 0.0)
    with traces.recording() as recorder:
        piece = b"k" * (1 << 20)
        for _ in range(WAITING_KEY_BYTES_MAX // len(piece) + 3):
            traces.asked(_namespace(), piece, 0)
        first = recorder.take()
        assert (sum(len(one.keys) for one in first.requests), first.lost) == (PART_KEY_BYTES_MAX, 3)
        traces.asked(_namespace(), piece, 0)  # there is room again
        rest = [recorder.take() for _ in range(4)]
        assert sum(len(part.requests) for part in rest) == WAITING_KEY_BYTES_MAX // len(piece) - 2 + 1
        assert rest[-1].lost == 3


@pytest.mark.requirement("I4")
def test_only_a_few_record_at_once() -> None:
    traces = Traces(lambda: 0.0)
    recordings = [traces.recording() for _ in range(RECORDERS_MAX)]
    for one in recordings:
        one.__enter__()
    with pytest.raises(LimitExceeded), traces.recording():
        pass
    recordings[0].__exit__(None, None, None)
    with traces.recording():
        pass


if __name__ == "__main__":
    for _scene in ("ram", "all"):
        for _columns in WIDTHS:
            (GOLDEN / f"{_scene}-{_columns}.txt").write_text(drawn(_scene, _columns))
