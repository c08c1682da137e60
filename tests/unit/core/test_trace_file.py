"""Trace files: what is written is read, nothing of a key is in them, and whatever else they hold is refused by line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.calls import Kind
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.groups import GroupSpec
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import Planner
from kvdepot.core.trace_file import TraceWriter, read_trace
from kvdepot.core.traces import TracedNamespace, TracedRequest, TracePart

GROUPS = (
    GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096, 4096)),
    GroupSpec(Kind.WINDOW, 32, window_tokens=100, rank_block_bytes=(8192,), replicated=True),
    GroupSpec(Kind.STATE, 64, rank_block_bytes=(1 << 16, 1 << 16)),
)
PLANNER = Planner(GROUPS, 64)
SPEC = NamespaceSpec({}, 64, GROUPS, {kind: PLANNER.object_bytes(kind) for kind in PLANNER.kinds}, label="a-model")
ID = bytes(range(16))
A, B, C = (bytes([one]) * 16 for one in b"abc")
PART = TracePart(
    (TracedNamespace(ID, SPEC),),
    (TracedRequest(0.25, ID, A + B, 64), TracedRequest(1.5, ID, A + C, 64), TracedRequest(2.0, ID, b"", 0)),
)


def _written(*parts: TracePart) -> list[str]:
    writer = TraceWriter()
    return [writer.head(), *(line for part in parts for line in writer.lines(part))]


def test_what_is_written_is_read() -> None:
    lines = _written(PART, replace(PART, namespaces=()))
    trace = read_trace(lines)
    spec = trace.namespaces[ID.hex()]
    assert (spec.label, spec.chunk_tokens, spec.object_bytes) == (SPEC.label, SPEC.chunk_tokens, SPEC.object_bytes)
    assert [one.window_tokens for one in spec.groups] == [0, 100, 0]
    assert [one.chunks for one in trace.requests] == [(0, 1), (0, 2), ()] * 2
    assert [one.at_seconds for one in trace.requests][:3] == [0.25, 1.5, 2.0]
    assert [one.boundary_tokens for one in trace.requests][:3] == [64, 64, 0]
    assert json.loads(lines[2])["input_length"] == 128


def test_nothing_of_a_prompt_is_in_it() -> None:
    text = "".join(_written(PART))
    for key in (A, B, C):
        assert key.hex() not in text and key.decode() not in text


def test_a_writer_says_how_far_it_is() -> None:
    writer = TraceWriter()
    writer.lines(PART)
    assert (writer.requests, writer.chunks, writer.tokens, writer.offered_tokens) == (3, 3, 256, 128)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "it is empty"),
        (["[]"], "line 1"),
        (['{"kvdepot_trace": 2}'], "line 1: a trace of version 1"),
        (['{"timestamp": 0, "hash_ids": []}'], "line 1"),
        ([*_written(PART)[:1], "{\n"], "line 2"),
        (['{"kvdepot_trace"'], "line 1"),
        ([*_written(PART)[:1], _written(PART)[2]], "line 2: nothing was said of namespace"),
        ([*_written(PART)[:2], _written(PART)[2].replace("[0,1]", "[0,-1]")], "line 3: -1 is no whole number"),
        ([*_written(PART)[:2], _written(PART)[2].replace("250", "1e3")], "line 3: 1000.0 is no whole number"),
        (
            [_written(PART)[0], _written(PART)[1].replace('"chunk_tokens":64', '"chunk_tokens":63')],
            "line 2: .*multiple",
        ),
        ([_written(PART)[0], _written(PART)[1].replace('"state"', '"other"')], "line 2: no 'other'"),
        ([_written(PART)[0], "[" * 100_000], "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(lines: list[str], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        read_trace(lines)


@pytest.mark.requirement("I4")
def test_what_was_recorded_before_the_disk_was_full_is_read() -> None:
    """A recording that is killed ends within a line, too."""
    lines = _written(PART)
    last = len(lines[-1]) - 1
    for end in range(1, last):
        trace = read_trace([*lines[:-1], lines[-1][:end]])
        assert (len(trace.requests), trace.cut) == (len(PART.requests) - 1, True)
    for whole in (lines, [*lines[:-1], lines[-1][:last]]):
        assert (len(read_trace(whole).requests), read_trace(whole).cut) == (len(PART.requests), False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["namespace", "label", "chunk_tokens", "groups", "kind", "block_tokens", "window_tokens", "block_bytes",
         "timestamp", "hash_ids", "boundary_tokens"]), inner, max_size=6),
)  # fmt: skip


@pytest.mark.requirement("I4")
@given(st.lists(JSON, max_size=3), st.text(max_size=20))
def test_no_line_does_anything_but_be_read_or_refused(records: list[object], text: str) -> None:
    lines = [*_written(PART)[:2], *(json.dumps(one) for one in records), text]
    try:
        read_trace(lines)
    except InvalidArgument as error:
        assert "line " in error.message
