"""What is encoded comes back equal; whatever else comes over the wire is a named refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core import calls, errors, limits
from kvdepot.core.elements import ElementRun, KindElements
from kvdepot.core.epochs import Epochs
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import GroupSpec
from kvdepot.core.registration import RegisterCall, RegisterReply
from kvdepot.core.report import (
    DaemonStatus,
    HistogramStatus,
    NamespaceStatus,
    PeerStatus,
    PinStatus,
    QuotaOwnerStatus,
    QuotaStatus,
    ReaderStatus,
    SessionStatus,
    SwitchesStatus,
    TierStatus,
)
from kvdepot.proto import codec, status
from kvdepot.proto.codec import Codec, codec_of
from kvdepot.proto.methods import BY_CALL, CONTROL, DEPOT, OPERATOR, Method
from kvdepot.proto.v1 import control_pb2 as control_pb
from kvdepot.proto.v1 import depot_pb2 as pb

_TOKEN = st.binary(min_size=16, max_size=16)
_NAMED = st.characters(codec="utf-8", exclude_categories=["Cc", "Cf", "Zl", "Zp"])  # without control characters
_TEXT = st.text(_NAMED, max_size=16)  # at four bytes each the shortest limit of a text
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


def _of(
    enum: type[calls.Kind | calls.ReserveOutcome | calls.CommitOutcome | calls.Nearest], count: int
) -> st.SearchStrategy[bytes]:
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
        namespace_id=_TOKEN,
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

_ROUND_TRIPS: list[tuple[Codec[Any], st.SearchStrategy[Any]]] = [
    (DEPOT["Locate"].call, _LOCATE),
    (DEPOT["Locate"].reply, st.builds(calls.LocateReply, _U64, _TEXT, _U64, _SECONDS, _TEXT)),
    (DEPOT["Acquire"].call, _ACQUIRE),
    (DEPOT["Acquire"].reply, st.builds(calls.AcquireReply, st.sampled_from(calls.AcquireOutcome), _EXTENTS, _U64)),
    (DEPOT["Release"].call, st.builds(calls.ReleaseCall, _TOKEN, _LEASES, _LEASES)),
    (DEPOT["Release"].reply, st.builds(calls.Confirmed)),
    (DEPOT["Reserve"].call, _RESERVE),
    (DEPOT["Reserve"].reply, _RESERVE_REPLY),
    (DEPOT["Commit"].call, st.builds(calls.CommitCall, _TOKEN, _ITEMS)),
    (DEPOT["Commit"].reply, _COMMIT_REPLY),
    (DEPOT["Abandon"].call, st.builds(calls.AbandonCall, _TOKEN, _ITEMS)),
    (DEPOT["EndRequest"].call, st.builds(calls.EndRequestCall, _TOKEN, _TEXT, _END)),
    (DEPOT["FindTiers"].call, st.builds(calls.FindTiersCall, _TOKEN, _TOKEN, _packed(3, 16))),
    (DEPOT["FindTiers"].reply, st.builds(calls.FindTiersReply, _of(calls.Nearest, 3))),
    (DEPOT["Declare"].call, st.builds(calls.DeclareCall, _TOKEN, _LEASES)),
    (DEPOT["Declare"].reply, st.builds(calls.DeclareReply, _LEASES, _U32)),
    (DEPOT["GetCapabilities"].call, st.builds(calls.GetCapabilitiesCall, _U32, _U32, _TEXT)),
    (
        DEPOT["GetCapabilities"].reply,
        st.builds(calls.Capabilities, _U32, _U32, _TEXT, _U64, _U64, st.dictionaries(_TEXT, _U64)),
    ),
    (
        codec_of(calls.AttachCall, pb.AttachRequest),
        st.builds(
            calls.AttachCall,
            protocol_min=_U32,
            protocol_max=_U32,
            engine_id=st.text(_NAMED, min_size=1, max_size=40),
            scheduler=st.just(value=True),
            rank=st.integers(-1, 3),
            world_size=st.just(4),
        ),
    ),
    (
        codec_of(calls.AttachReply, pb.AttachResponse),
        st.builds(calls.AttachReply, _U32, _TEXT, _TOKEN, _U64, _U64, _TEXT),
    ),
]


@pytest.mark.parametrize(("wire", "values"), _ROUND_TRIPS, ids=[str(wire) for wire, _ in _ROUND_TRIPS])
def test_what_is_encoded_comes_back_equal(wire: Codec[Any], values: st.SearchStrategy[Any]) -> None:
    @given(values)
    def check(value: Any) -> None:
        assert wire.parse(wire.encode(value).SerializeToString()) == value

    check()


_ALL = [codec for method in BY_CALL.values() for codec in (method.call, method.reply)]


@given(st.sampled_from(_ALL), st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_named_refusal(wire: Codec[Any], data: bytes) -> None:
    try:
        wire.parse(data)
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
    ("wire", "message", "found"),
    [
        (DEPOT["Acquire"].reply, pb.AcquireResponse(outcome=9), "outcome: 9 is none of"),
        (DEPOT["Acquire"].reply, pb.AcquireResponse(outcome=1, extents=b"x" * 41), "extents: 41 bytes"),
        (DEPOT["Reserve"].reply, pb.ReserveResponse(outcomes=b"\x00"), "outcomes: 0 is none of"),
        (DEPOT["Commit"].reply, pb.CommitResponse(outcomes=[b"\x01", b"\x09"]), "outcomes[]: 9"),
        (
            DEPOT["Commit"].call,
            pb.CommitRequest(session=bytes(16), items=[pb.CommitItem(lease_id=1, indices=b"\xff" * 4)]),
            "indices: an index is not below 16384",
        ),
        (
            DEPOT["Release"].call,
            pb.ReleaseRequest(session=bytes(16), lease_ids=range(limits.LEASES_PER_CALL_MAX + 1)),
            "lease_ids: 4097 is more than 4096",
        ),
        (
            DEPOT["Reserve"].call,
            pb.ReserveRequest(session=bytes(16), lease_id=1, namespace_id=bytes(16), keys=bytes(32), parents=bytes(16)),
            "parents: 16 bytes, not 32",
        ),
        (
            DEPOT["Reserve"].call,
            pb.ReserveRequest(session=bytes(16), lease_id=0, namespace_id=bytes(16)),
            "lease_id: 0 is not a lease id",
        ),
        (
            DEPOT["Acquire"].call,
            pb.AcquireRequest(session=bytes(16), lease_id=1, namespace_id=bytes(16), keys=bytes(32), kinds=b"\1"),
            "kinds: 1 bytes, not 2",
        ),
        (
            DEPOT["Locate"].call,
            pb.LocateRequest(session=bytes(16), namespace_id=bytes(16), wait_seconds=float("nan")),
            "wait_seconds: nan",
        ),
        (DEPOT["Locate"].call, pb.LocateRequest(session=b"short"), "session: 5 bytes, not 16"),
    ],
)
def test_refusals_name_field_and_bound(wire: Codec[Any], message: Message, found: str) -> None:
    with pytest.raises((errors.InvalidArgument, errors.LimitExceeded)) as refusal:
        wire.decode(message)
    assert found in refusal.value.message


def test_bytes_that_are_no_message_are_refused_by_its_name() -> None:
    with pytest.raises(errors.InvalidArgument, match="its 1 bytes are no LocateRequest"):
        DEPOT["Locate"].call.parse(b"\xff")


# --- what a value and its message have to have in common ---


@dataclass(frozen=True)
class _Misses:
    session: bytes


@dataclass(frozen=True)
class _TextForBytes:
    session: str
    lease_ids: tuple[int, ...]


@dataclass(frozen=True)
class _OneForMany:
    session: bytes
    lease_ids: int


@dataclass(frozen=True)
class _ManyForOne:
    session: tuple[bytes, ...]
    lease_ids: tuple[int, ...]


@dataclass(frozen=True)
class _MaybeForAlways:
    session: bytes | None
    lease_ids: tuple[int, ...]


@dataclass(frozen=True)
class _AlwaysForMaybe:
    tenant: str
    namespace: str
    tier: str


@pytest.mark.parametrize(
    ("value_type", "message_type"),
    [
        (_Misses, pb.DeclareRequest),
        (_TextForBytes, pb.DeclareRequest),
        (_OneForMany, pb.DeclareRequest),
        (_ManyForOne, pb.DeclareRequest),
        (_MaybeForAlways, pb.DeclareRequest),
        (_AlwaysForMaybe, control_pb.QuotaSubject),
    ],
)
def test_a_value_that_does_not_fit_its_message_has_no_codec(value_type: type, message_type: type[Message]) -> None:
    with pytest.raises(TypeError):
        Codec(value_type, message_type)


# --- the table of methods ---


@pytest.mark.parametrize(
    ("file", "name", "methods"),
    [(pb, "Depot", DEPOT), (pb, "Operator", OPERATOR), (control_pb, "Control", CONTROL)],
)
def test_the_table_has_every_method_of_the_service_once(
    file: Any, name: str, methods: Mapping[str, Method[Any, Any]]
) -> None:
    service = file.DESCRIPTOR.services_by_name[name]
    assert sorted(methods) == sorted(method.name for method in service.methods)
    for method in methods.values():
        assert method.path == f"/kvdepot.v1.{name}/{method.name}"
        assert str(method.call) == method.descriptor.input_type.name
        assert str(method.reply) == method.descriptor.output_type.name
    assert len({method.number for method in methods.values()}) == len(methods)


def test_the_numbers_of_methods_on_a_call_socket_never_change() -> None:
    assert {name: method.number for name, method in DEPOT.items()} == {
        "GetCapabilities": 1, "RegisterNamespace": 2, "Declare": 3, "Locate": 4, "Acquire": 5, "Release": 6,
        "Reserve": 7, "Commit": 8, "Abandon": 9, "EndRequest": 10, "FindTiers": 11,
    }  # fmt: skip


# --- namespaces ---


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


REGISTER = DEPOT["RegisterNamespace"]


def _registered(call: RegisterCall) -> RegisterCall:
    found = REGISTER.call.parse(REGISTER.call.encode(call).SerializeToString())
    assert isinstance(found, RegisterCall)
    return found


def test_a_namespace_spec_comes_back_equal_and_so_does_its_id() -> None:
    call = RegisterCall(bytes(16), _SPEC)
    assert _registered(call) == call
    assert _registered(call).spec.namespace_id() == _SPEC.namespace_id()
    assert codec.decode_spec(codec.encode_spec(_SPEC)) == _SPEC


def test_elements_come_back_equal_and_are_no_part_of_the_id() -> None:
    elements = {
        calls.Kind.ATTENTION: (ElementRun("bfloat16", 4096, 8), ElementRun("", 64)),
        calls.Kind.STATE: (ElementRun("float32", 128),),
    }
    call = RegisterCall(bytes(16), _SPEC, tuple(KindElements(kind, runs) for kind, runs in elements.items()))
    assert _registered(call) == call
    assert _registered(call).elements_by_kind() == elements


@pytest.mark.parametrize(
    ("elements", "found"),
    [
        ([pb.KindElements(kind=9)], "elements[0].kind"),
        ([pb.KindElements(kind=1, runs=[pb.ElementRun(dtype="x" * 33)])], "elements[0].runs[0].dtype"),
        ([pb.KindElements(kind=1, runs=[pb.ElementRun(part_bytes=2**63)])], "elements[0].runs[0].part_bytes"),
        ([pb.KindElements(kind=1, runs=[pb.ElementRun(parts=2**31)])], "elements[0].runs[0].parts"),
        ([pb.KindElements(kind=1, runs=[pb.ElementRun()] * (limits.ELEMENT_RUNS_MAX + 1))], "elements[0].runs: 513"),
        ([pb.KindElements(kind=1)] * 4, "elements: 4"),
        ([pb.KindElements(kind=1)] * 2, "elements: a kind comes twice"),
    ],
)
def test_elements_over_a_bound_are_refused_by_name(elements: list[pb.KindElements], found: str) -> None:
    message = REGISTER.call.encode(RegisterCall(bytes(16), _SPEC))
    message.elements.extend(elements)
    with pytest.raises((errors.InvalidArgument, errors.LimitExceeded)) as refusal:
        REGISTER.call.decode(message)
    assert found in refusal.value.message


def test_an_answer_without_an_id_says_the_counter_to_register_with() -> None:
    stale = RegisterReply(b"", bumps=7)
    assert REGISTER.reply.parse(REGISTER.reply.encode(stale).SerializeToString()) == stale
    with pytest.raises(errors.InvalidArgument, match="namespace_id"):
        REGISTER.reply.decode(pb.RegisterNamespaceResponse(namespace_id=b"short"))


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
    message = REGISTER.call.encode(RegisterCall(bytes(16), _SPEC))
    change(message.spec)
    with pytest.raises((errors.InvalidArgument, errors.LimitExceeded)) as refusal:
        REGISTER.call.decode(message)
    assert found in refusal.value.message


def test_a_status_comes_back_equal() -> None:
    namespace = NamespaceStatus(bytes(16), "l", "t", "e", 256, {calls.Kind.ATTENTION: 7}, 99, {"model": "toy"}, 3)
    value = DaemonStatus(
        daemon_version="1", pid=2, uptime_seconds=3.5, ready=True, reason="r", arena_id=2**64 - 1, run=4,
        tiers=(
            TierStatus(
                "nvme", "disk", 1, 2, 3, 4, 5, 6, "ready", "why", "open", 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, "n", "o",
                write_target_bytes=17,
                peers=(PeerStatus("h:1", "new", "w", 2**64 - 1, "o", "nixl", 1, 2, 3, 4.5, {"gone": 5}, 6, 7.5, "c"),),
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
        readers=(ReaderStatus("URI:x", "t", 1, 2, 3, 4, {"busy": 5}), ReaderStatus("DNS:y")),
        histograms=(HistogramStatus("load_seconds.ram", (0.5, 1.0), (3, 4, 5)),),
    )  # fmt: skip
    wire = OPERATOR["GetStatus"].reply
    assert wire.parse(wire.encode(value).SerializeToString()) == value


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
