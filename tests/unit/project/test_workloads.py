"""The workload families: equal seeds give equal traces, and their statistics are those that the sources give."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks import policy, workload_changes, workload_policies, write_policies
from benchmarks.workloads import __main__ as command
from benchmarks.workloads.families import (
    AGENT_STEPS,
    BATCH_JOBS,
    CHAT_TURNS,
    DOCUMENTS,
    TENANTS,
    family_names,
    prompts_of,
)
from benchmarks.workloads.trace import BLOCK_TOKENS, Blocks, Prompt, Segment


def prompts(family: str, requests: int = 600, seed: int = 5) -> list[Prompt]:
    return list(prompts_of(family, seed, requests))


def printed(capsys: pytest.CaptureFixture[str], family: str, seed: int) -> str:
    command.main([family, "--seed", str(seed), "--requests", "60"])
    return capsys.readouterr().out


@pytest.mark.parametrize("family", family_names())
def test_a_seed_decides_all_lines_and_another_seed_gives_others(
    family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = printed(capsys, family, 7)
    assert printed(capsys, family, 7) == lines
    assert printed(capsys, family, 8) != lines
    (tmp_path / "trace.jsonl").write_text(lines)
    requests = policy.read_trace(tmp_path / "trace.jsonl")
    assert len(requests) == 60
    assert all(before.at_seconds <= after.at_seconds for before, after in pairwise(requests))
    for line in map(json.loads, lines.splitlines()):
        assert line["output_length"] > 0
        assert len(line["hash_ids"]) == -(-line["input_length"] // BLOCK_TOKENS)


def test_prompts_share_the_blocks_up_to_their_first_difference() -> None:
    blocks = Blocks()
    system, a, b = Segment("system", 1100), Segment("a", 900), Segment("b", 900)
    first, second = blocks.of((system, a)), blocks.of((system, b))
    assert [len(first), len(second)] == [4, 4]
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    longer = blocks.of((system, a, b))
    assert longer[:3] == first[:3]
    assert longer[3] != first[3]  # it was partial
    assert blocks.of((system, a)) == first
    assert not set(blocks.of((a, system))) & set(first)


def lengths_of_sessions(family: str, first: str) -> list[int]:
    """Requests of each session that began and ended well inside the trace."""
    made = prompts(family, 3000)
    sessions = Counter(name for prompt in made for name in named(prompt, first) if isinstance(name, tuple))
    began = {name: at for at, prompt in reversed(list(enumerate(made))) for name in named(prompt, first)}
    return [count for name, count in sessions.items() if began[name] < 2000]


def named(prompt: Prompt, kind: str) -> list[object]:
    names = [segment.name for segment in prompt.segments]
    return [name[:2] for name in names if isinstance(name, tuple) and name[0] == kind and name[2:] in {(), (0,)}]


def test_conversations_have_as_many_turns_as_wildchat_s_and_messages_as_long() -> None:
    assert mean(lengths_of_sessions("chat", "user")) == pytest.approx(CHAT_TURNS, rel=0.12)
    made = prompts("chat", 3000)
    messages = {segment.name: segment.tokens for prompt in made for segment in prompt.segments}
    users = [size for name, size in messages.items() if isinstance(name, tuple) and name[0] == "user"]
    assert mean(users) == pytest.approx(295.58, rel=0.15)
    assert mean(prompt.output_tokens for prompt in made) == pytest.approx(441.34, rel=0.1)


def test_agents_take_as_many_steps_as_swe_agent_s_and_their_context_only_grows() -> None:
    assert mean(lengths_of_sessions("agents", "task")) == pytest.approx(AGENT_STEPS, rel=0.2)
    seen: dict[object, int] = {}
    for prompt in prompts("agents"):
        (task,) = named(prompt, "task")
        assert prompt.tokens > seen.get(task, 0)
        seen[task] = prompt.tokens


def test_three_percent_of_the_documents_get_sixty_percent_of_the_retrievals() -> None:
    uses = Counter(name for prompt in prompts("retrieval", 3000) for name in named(prompt, "document"))
    top = sum(count for _, count in uses.most_common(DOCUMENTS * 3 // 100))
    assert top / uses.total() == pytest.approx(0.6, abs=0.06)


def test_no_block_of_a_one_shot_job_comes_twice_and_a_batch_comes_at_once() -> None:
    made = prompts("scans")
    blocks = Blocks()
    uses = Counter(block for prompt in made if named(prompt, "one-shot") for block in blocks.of(prompt.segments))
    assert uses
    assert max(uses.values()) == 1
    jobs = [prompt.at_seconds for prompt in made if named(prompt, "one-shot")][:BATCH_JOBS]
    assert jobs[-1] - jobs[0] < 40


def test_requests_of_a_tenant_share_as_much_as_preble_s() -> None:
    shares: dict[int, list[float]] = {}
    for prompt in prompts("tenants", 3000):
        system, _ = prompt.segments
        shares.setdefault(system.tokens, []).append(system.tokens / prompt.tokens)
    assert set(shares) == {round(size * share) for size, share in TENANTS}
    for size, share in TENANTS:
        assert mean(shares[round(size * share)]) == pytest.approx(share, abs=0.03)


def test_the_shift_begins_with_chat_and_ends_with_agents_and_nothing_of_a_part_comes_again() -> None:
    made = prompts("shift")
    parts = made[:300], made[300:450], made[450:]
    assert any(named(prompt, "user") for prompt in parts[0])
    assert all(named(prompt, "document") for prompt in parts[1])
    assert any(named(prompt, "task") for prompt in parts[2])
    blocks = Blocks()
    held = [{block for prompt in part for block in blocks.of(prompt.segments)} for part in parts]
    assert not held[0] & held[1] | held[1] & held[2] | held[0] & held[2]


def test_the_table_has_a_row_for_each_family_geometry_and_capacity(tmp_path: Path) -> None:
    path = tmp_path / "out" / "families.json"
    workload_policies.main(
        ["--families", "chat", "tenants", "--seeds", "3", "--requests", "40", "--fractions", "0.2", "--json", str(path)]
    )
    rows = json.loads(path.read_text())["rows"]
    assert [(row["family"], row["geometry"], row["fraction"]) for row in rows] == [
        (family, geometry.name, 0.2) for family in ("chat", "tenants") for geometry in policy.GEOMETRIES
    ]
    assert all(0 <= row["gdsf"] <= 1 and 0 <= row["lru"] <= 1 for row in rows)


def test_after_a_change_come_as_many_requests_of_the_other_family_and_they_count() -> None:
    marked = workload_changes.changed(("chat", "tenants"), 3, 40)
    assert [counts for counts, _ in marked] == [False] * 40 + [True] * 40
    times = [request.at_seconds for _, request in marked]
    assert times == sorted(times)
    before, after = ({block for _, request in part for block in request.blocks} for part in (marked[:40], marked[40:]))
    assert not before & after


@pytest.mark.parametrize("geometry", policy.GEOMETRIES, ids=lambda geometry: geometry.name)
def test_a_scan_has_ten_times_the_capacity_and_comes_once(geometry: policy.Geometry) -> None:
    family = workload_policies.requests_of("chat", 3, 80)
    capacity_bytes = geometry.unique_bytes(family) // 10
    marked = workload_changes.scanned(family, geometry, capacity_bytes, 3)
    assert [request for counts, request in marked if counts] == family
    scan = [request for counts, request in marked if not counts]
    assert 10 <= geometry.unique_bytes(scan) / capacity_bytes < 11
    uses = Counter(block for request in scan for block in request.blocks)
    assert max(uses.values()) == 1
    assert not set(uses) & {block for request in family for block in request.blocks}
    assert family[20].at_seconds < scan[0].at_seconds < scan[-1].at_seconds < family[60].at_seconds


@pytest.mark.long(seconds=15)
def test_tables_of_a_change_and_of_a_scan_compare_all_policies(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    small = ["--requests", "30", "--fractions", "0.3", "--json", str(path)]
    workload_changes.main(["change", "--pairs", "chat:tenants", *small])
    rows = json.loads(path.read_text())["rows"]
    assert [row["geometry"] for row in rows] == [geometry.name for geometry in policy.GEOMETRIES]
    assert all(
        row["over_best"] == pytest.approx(row["adaptive"] / max(row["gdsf"], row["lru"]), abs=2e-3) for row in rows
    )
    workload_changes.main(["scan", "--families", "tenants", *small])
    rows = json.loads(path.read_text())["rows"]
    assert all(-1 <= row[f"{name}_cost"] <= 1 for row in rows for name in ("adaptive", "gdsf", "lru"))


def test_write_policies_are_compared_and_equal_arguments_give_equal_rows(tmp_path: Path) -> None:
    def rows(name: str) -> list[dict[str, Any]]:
        arguments = ["--families", "tenants", "--requests", "80", "--targets", "0.5", "--json", str(tmp_path / name)]
        write_policies.main(arguments)
        found: list[dict[str, Any]] = json.loads((tmp_path / name).read_text())["rows"]
        return found

    found = rows("one")
    assert rows("two") == found
    for geometry in ("attention", "hybrid"):
        by_write = {row["write"]: row for row in found if row["geometry"] == geometry}
        assert list(by_write) == ["commit", "evict", "second_use", "auto"]
        assert by_write["auto"]["writes"] < 0.5 * 1.25 + 0.5 < by_write["commit"]["writes"]
        assert by_write["commit"]["hits"] > 0
