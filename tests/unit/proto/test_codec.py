"""What is encoded comes back equal; whatever else comes over the wire is a named refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core import calls, errors, limits
from kvdepot.core.elements import ElementRun
from kvdepot.core.epochs import Epochs
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import GroupSpec
from kvdepot.core.report import (
    DaemonStatus,
    NamespaceStatus,
    PinStatus,
    QuotaOwnerStatus,
    QuotaStatus,
    SessionStatus,
    SwitchesStatus,
    TierStatus,
)
from kvdepot.proto import codec, codec_namespace, codec_records, codec_report, codec_trace, status
from kvdepot.proto.v1 import depot_pb2 as pb

_TOKEN = st.binary(min_size=16, max_size=16)
_TEXT = st.text(max_size=16)  # at four bytes each the shortest limit of a text
_U64 = st.integers(0, 2**64 - 1)
_LEASE = st.integers(1, 2**64 - 1)
_LEASES = st.lists(_U64, max_size=5).map(tuple)
_INDICES = st.lists(st.integers(0, limits.OBJECTS_PER_LEASE_MAX - 1), max_size=5).map(
    lambda found: b"".join(index.to_bytes(4, "little") for index in found)
)
_ITEMS = st.lists(st.builds(calls.CommitItem, _LEASE, _INDICES), max_size=4).map(tuple)
_EXTENTS = st.integers(0, 3).flatmap(lambda count: st.binary(min_size=40 * count, max_size=40 * count))


def _packed(count: int, entry_bytes: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=count * entry_bytes, max_size=count * entry_bytes)


def _of(enum: type[calls.Kind | calls.ReserveOutcome | calls.CommitOutcome], count: int) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(list(enum)), min_size=count, max_size=count).map(bytes)


_SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)

_LOCATE = st.integers(0, 4).flatmap(
    lambda n: st.builds(
        calls.LocateCall,
        _TOKEN,
        _TOKEN,
        _packed(n, 16),
        _U64,
        request_id=_TEXT,
        budget_seconds=_SECONDS,
        wait_seconds=_SECONDS,
        local_tokens=_U64,
        token_seconds=_SECONDS,
    )
)
_ACQUIRE = st.integers(0, 4).flatmap(
    lambda n: st.builds(calls.AcquireCall, _TOKEN, _LEASE, _TOKEN, _packed(n, 16), _of(calls.Kind, n), _TEXT)
)
_RESERVE = st.integers(0, 4).flatmap(
    lambda n: st.builds(
        calls.ReserveCall,
        session=_TOKEN,
        lease_id=_LEASE,
        namespace=_TOKEN,
        keys=_packed(n, 16),
        parents=_packed(n, 16),
        kinds=_of(calls.Kind, n),
        boundaries=_packed(n, 4),
        request_id=_TEXT,
    )
)
_RESERVE_REPLY = st.integers(0, 4).flatmap(
    lambda n: st.builds(calls.ReserveReply, _of(calls.ReserveOutcome, n), _EXTENTS, _U64, _TEXT)
)
_COMMIT_REPLY = st.lists(st.integers(0, 4).flatmap(lambda n: _of(calls.CommitOutcome, n)), max_size=3).map(
    lambda outcomes: calls.CommitReply(tuple(outcomes))
)
_U32 = st.integers(0, 2**32 - 1)

_END = st.builds(calls.RequestEnd, _U64, _U64, _TEXT)

_ROUND_TRIPS: list[tuple[str, st.SearchStrategy[Any]]] = [
    ("locate_call", _LOCATE),
    ("locate_reply", st.builds(calls.LocateReply, _U64, _TEXT, _U64, _SECONDS, _TEXT)),
    ("acquire_call", _ACQUIRE),
    ("acquire_reply", st.builds(calls.AcquireReply, st.sampled_from(calls.AcquireOutcome), _EXTENTS, _U64)),
    ("release_call", st.builds(calls.ReleaseCall, _TOKEN, _LEASES, _LEASES)),
    ("reserve_call", _RESERVE),
    ("reserve_reply", _RESERVE_REPLY),
    ("commit_call", st.builds(calls.CommitCall, _TOKEN, _ITEMS)),
    ("commit_reply", _COMMIT_REPLY),
    ("abandon_call", st.builds(calls.AbandonCall, _TOKEN, _ITEMS)),
    ("end_request_call", st.builds(calls.EndRequestCall, _TOKEN, _TEXT, _END)),
    ("declare_call", st.builds(calls.DeclareCall, _TOKEN, _LEASES)),
    ("declare_reply", st.builds(calls.DeclareReply, _LEASES, _U32)),
    ("capabilities", st.builds(calls.Capabilities, _U32, _U32, _TEXT, _U64, _U64, st.dictionaries(_TEXT, _U64))),
    (
        "attach_call",
        st.builds(
            calls.AttachCall,
            protocol_min=_U32,
            protocol_max=_U32,
            engine_id=st.text(min_size=1, max_size=40),
            scheduler=st.just(value=True),
            rank=st.integers(-1, 3),
            world_size=st.just(4),
        ),
    ),
    ("attach_reply", st.builds(calls.AttachReply, _U32, _TEXT, _TOKEN, _U64, _U64, _TEXT)),
]


@pytest.mark.parametrize(("name", "values"), _ROUND_TRIPS, ids=[name for name, _ in _ROUND_TRIPS])
def test_what_is_encoded_comes_back_equal(name: str, values: st.SearchStrategy[Any]) -> None:
    encode, decode = getattr(codec, f"encode_{name}"), getattr(codec, f"decode_{name}")

    @given(values)
    def check(value: Any) -> None:
        wire = encode(value)
        if isinstance(wire, Message):
            wire = type(wire).FromString(wire.SerializeToString())
        assert decode(wire) == value

    check()


_DECODERS: list[tuple[Callable[[Any], object], type[Message]]] = [
    (codec.decode_locate_call, pb.LocateRequest),
    (codec.decode_locate_reply, pb.LocateResponse),
    (codec.decode_acquire_call, pb.AcquireRequest),
    (codec.decode_acquire_reply, pb.AcquireResponse),
    (codec.decode_release_call, pb.ReleaseRequest),
    (codec.decode_reserve_call, pb.ReserveRequest),
    (codec.decode_reserve_reply, pb.ReserveResponse),
    (codec.decode_commit_call, pb.CommitRequest),
    (codec.decode_commit_reply, pb.CommitResponse),
    (codec.decode_abandon_call, pb.AbandonRequest),
    (codec.decode_declare_call, pb.DeclareRequest),
    (codec.decode_declare_reply, pb.DeclareResponse),
    (codec.decode_end_request_call, pb.EndRequestRequest),
    (codec_records.decode_explain, pb.ExplainRequestRequest),
    (codec_records.decode_records, pb.ExplainRequestResponse),
    (codec_trace.decode_part, pb.RecordTraceResponse),
    (codec.decode_capabilities, pb.GetCapabilitiesResponse),
    (codec_namespace.decode_register, pb.RegisterNamespaceRequest),
    (codec_namespace.decode_registered, pb.RegisterNamespaceResponse),
    (codec_report.decode_status, pb.GetStatusResponse),
]


@given(st.sampled_from(_DECODERS), st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_named_refusal(
    decoder: tuple[Callable[[Any], object], type[Message]], data: bytes
) -> None:
    decode, kind = decoder
    try:
        message = kind.FromString(data)
    except DecodeError:
        return
    try:
        decode(message)
    except (errors.InvalidArgument, errors.LimitExceeded) as error:
        assert ":" in error.message


@given(st.binary(max_size=200))
def test_any_datagram_is_a_value_or_a_named_refusal(data: bytes) -> None:
    for decode in (codec.decode_attach_call, codec.decode_attach_reply):
        try:
            decode(data)
        except (errors.InvalidArgument, errors.LimitExceeded) as error:
            assert ":" in error.message


@pytest.mark.parametrize(
    ("decode", "message", "found"),
    [
        (codec.decode_acquire_reply, pb.AcquireResponse(outcome=9), "outcome: 9 is none of"),
        (codec.decode_acquire_reply, pb.AcquireResponse(outcome=1, extents=b"x" * 41), "extents: 41 bytes"),
        (codec.decode_reserve_reply, pb.ReserveResponse(outcomes=b"\x00"), "outcomes: 0 is none of"),
        (codec.decode_commit_reply, pb.CommitResponse(outcomes=[b"\x01", b"\x09"]), "outcomes[]: 9"),
        (
            codec.decode_commit_call,
            pb.CommitRequest(session=bytes(16), items=[pb.CommitItem(lease_id=1, indices=b"\xff" * 4)]),
            "indices: an index is not below 16384",
        ),
        (
            codec.decode_release_call,
            pb.ReleaseRequest(session=bytes(16), lease_ids=range(limits.LEASES_PER_CALL_MAX + 1)),
            "lease_ids: 4097 is more than 4096",
        ),
    ],
)
def test_refusals_name_field_and_bound(decode: Callable[[Any], object], message: Message, found: str) -> None:
    with pytest.raises((errors.InvalidArgument, errors.LimitExceeded)) as refusal:
        decode(message)
    assert found in refusal.value.message


_SPEC = NamespaceSpec(
    identity={"model": '"toy"', "cache.dtype": '"bf16"'},
    chunk_tokens=1056,
    groups=(
        GroupSpec(calls.Kind.ATTENTION, 16, rank_block_bytes=(4096, 8192), layers=("a", "b")),
        GroupSpec(calls.Kind.WINDOW, 16, window_tokens=100, rank_block_bytes=(4096,), replicated=True),
        GroupSpec(calls.Kind.STATE, 1056, rank_block_bytes=(64, 64)),
    ),
    object_bytes={calls.Kind.ATTENTION: 1, calls.Kind.WINDOW: 2, calls.Kind.STATE: 3},
    label="toy",
    tenant="t",
    epoch="e",
    bumps=3,
)


def test_a_namespace_spec_comes_back_equal_and_so_does_its_id() -> None:
    message = codec_namespace.encode_register(bytes(16), _SPEC)
    found = codec_namespace.decode_register(pb.RegisterNamespaceRequest.FromString(message.SerializeToString()))
    assert found == (bytes(16), _SPEC, {})
    _, spec, _ = found
    assert spec.namespace_id() == _SPEC.namespace_id()


def test_elements_come_back_equal_and_are_no_part_of_the_id() -> None:
    elements = {
        calls.Kind.ATTENTION: (ElementRun("bfloat16", 4096, 8), ElementRun("", 64)),
        calls.Kind.STATE: (ElementRun("float32", 128),),
    }
    message = codec_namespace.encode_register(bytes(16), _SPEC, elements)
    assert codec_namespace.decode_register(message) == (bytes(16), _SPEC, elements)


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (pb.ElementRun(kind=9), "elements[0].kind"),
        (pb.ElementRun(kind=1, dtype="x" * 33), "elements[0].dtype"),
        (pb.ElementRun(kind=1, part_bytes=2**63), "elements[0].part_bytes"),
        (pb.ElementRun(kind=1, parts=2**31), "elements[0].parts"),
    ],
)
def test_elements_over_a_bound_are_refused_by_name(run: pb.ElementRun, found: str) -> None:
    message = codec_namespace.encode_register(bytes(16), _SPEC)
    message.elements.append(run)
    with pytest.raises((errors.InvalidArgument, errors.LimitExceeded)) as refusal:
        codec_namespace.decode_register(message)
    assert found in refusal.value.message
    del message.elements[:]
    message.elements.extend([pb.ElementRun(kind=1)] * (limits.ELEMENT_RUNS_MAX + 1))
    with pytest.raises(errors.LimitExceeded):
        codec_namespace.decode_register(message)


def test_an_answer_without_an_id_says_the_counter_to_register_with() -> None:
    assert not codec_namespace.encode_register(bytes(16), _SPEC).follows_bumps
    answer = codec_namespace.encode_stale_epoch(7)
    assert (codec_namespace.decode_registered(answer), answer.bumps) == ((b"", 0), 7)
    with pytest.raises(errors.InvalidArgument, match="namespace"):
        codec_namespace.decode_registered(pb.RegisterNamespaceResponse(namespace=b"short"))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda spec: spec.identity.update({str(n): "1" for n in range(limits.IDENTITY_ENTRIES_MAX)}), "identity"),
        (lambda spec: spec.groups.extend([pb.Group(kind=1)] * limits.GROUPS_MAX), "groups"),
        (lambda spec: spec.groups[0].layers.extend(["x"] * limits.LAYERS_PER_GROUP_MAX), "groups[0].layers"),
        (lambda spec: spec.groups[1].rank_block_bytes.extend([1] * limits.RANKS_MAX), "groups[1].rank_block_bytes"),
        (lambda spec: spec.groups[1].rank_block_bytes.append(2**63), "groups[1].rank_block_bytes[]"),
        (lambda spec: spec.object_bytes.update({17: 1}), "object_bytes: 17"),
        (lambda spec: setattr(spec, "label", "x" * 97), "label bytes: 97"),
        (lambda spec: setattr(spec, "chunk_tokens", 2**32 - 1), "chunk_tokens"),
        (lambda spec: spec.identity.update({"big": "x" * limits.SPEC_BYTES_MAX}), "spec bytes"),
    ],
)
def test_specs_over_a_bound_are_refused_by_name(change: Callable[[pb.NamespaceSpec], None], found: str) -> None:
    message = codec_namespace.encode_namespace_spec(_SPEC)
    change(message)
    with pytest.raises((errors.InvalidArgument, errors.LimitExceeded)) as refusal:
        codec_namespace.decode_namespace_spec(message)
    assert found in refusal.value.message


def test_a_status_comes_back_equal() -> None:
    namespace = NamespaceStatus(bytes(16), "l", "t", "e", 256, {1: 7}, 99, {"model": "toy"}, 3)
    value = DaemonStatus(
        version="1", pid=2, uptime_seconds=3.5, ready=True, reason="r", arena_id=2**64 - 1, run=4,
        tiers=(
            TierStatus(
                "nvme", "disk", 1, 2, 3, 4, 5, 6, "ready", "why", "open", 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, "n", "o"
            ),
        ),
        sessions=(SessionStatus("e", 2, 1, True, 10, 5, 3, 4, (7, 8)),),
        namespaces=(namespace,),
        quotas=(
            QuotaStatus("*", "x", "ram", 9, 2, (QuotaOwnerStatus("", "x", 1, 2, 3), QuotaOwnerStatus(None)), 4, 5),
        ),
        counters={"evictions": 3.0},
        switches=SwitchesStatus(True, (bytes(16),), False, (b"n" * 16,), draining=True),
        pins=(PinStatus(bytes(16), b"k" * 16, 1.5, 2, 3, 4), PinStatus(b"n" * 16)),
        epochs=Epochs(3, (bytes(16),)),
    )  # fmt: skip
    message = codec_report.encode_status(value)
    assert codec_report.decode_status(pb.GetStatusResponse.FromString(message.SerializeToString())) == value


def test_the_status_table_covers_the_closed_set() -> None:
    assert set(status.STATUS) == set(errors.ERRORS)
    assert len({error.code for error in errors.ERRORS}) == len(errors.ERRORS)


@pytest.mark.parametrize("kind", errors.ERRORS, ids=lambda kind: kind.code)
def test_an_error_crosses_the_wire_with_its_class_advice_and_retry(kind: type[errors.KvDepotError]) -> None:
    error = kind.__new__(kind)
    errors.KvDepotError.__init__(error, "what happened: 7 > 5", advice="täglich")
    found = status.from_status(*status.to_status(error))
    assert type(found) is kind
    assert (found.message, found.advice) == ("what happened: 7 > 5", "täglich")
    assert status.retry_of(found) is kind.retry


@pytest.mark.parametrize(
    ("code", "retry"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Retry.LATER),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.Retry.LATER),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Retry.AFTER_REATTACH),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Retry.NEVER),
    ],
)
def test_a_status_that_is_not_ours_is_still_an_error_of_ours(code: grpc.StatusCode, retry: errors.Retry) -> None:
    for metadata in (None, (), (("kvdepot-code", "from_the_future"),)):
        found = status.from_status(code, None, metadata)
        assert isinstance(found, status.RefusedByDaemon)
        assert found.status is code
        assert status.retry_of(found) is retry
