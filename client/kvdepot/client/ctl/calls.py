"""The operator's calls: pages put together, prefixes turned into whole ids, refusals into kvdepot's errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from threading import Event, Timer
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from kvdepot.client.transports.control import CHANNEL_OPTIONS
from kvdepot.core.control import (
    BumpCall,
    BumpReply,
    ConfigReply,
    EvictReply,
    PinCall,
    PinReply,
    PrefetchReply,
    QuotaEntry,
    QuotaSubject,
    ReloadReply,
    Switch,
    SwitchCall,
    SwitchReply,
    VerifyCall,
    VerifyReply,
    switch_states,
)
from kvdepot.core.errors import InvalidArgument, KvDepotError, NotFound
from kvdepot.core.limits import NAMESPACE_ID_BYTES
from kvdepot.core.listing import (
    PREFIX_DIGITS_MAX,
    Chunk,
    ChunkDescription,
    ChunkPage,
    NamespaceContents,
    NamespaceDescription,
    NamespacePage,
    prefix_range,
)
from kvdepot.proto import codec_control, codec_listing, codec_records, codec_report, codec_trace
from kvdepot.proto.status import CODE_KEY, from_status
from kvdepot.proto.v1 import control_pb2, control_pb2_grpc, depot_pb2, depot_pb2_grpc

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.records import RequestRecord
    from kvdepot.core.report import DaemonStatus, PinStatus
    from kvdepot.core.traces import TracePart

_CANDIDATES_SHOWN: Final = 8

Reply = TypeVar("Reply")


@contextmanager
def connect(endpoint: Endpoint, timeout_seconds: float) -> Iterator[Operator]:
    """`timeout_seconds` is each call's."""
    with grpc.insecure_channel(endpoint.grpc_target, options=CHANNEL_OPTIONS) as channel:
        operator = depot_pb2_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        control = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        yield Operator(operator, control, timeout_seconds)


class Operator:
    """All methods raise NotFound, InvalidArgument, or grpc.RpcError when the daemon does not answer."""

    def __init__(self, stub: Any, control: Any, timeout_seconds: float) -> None:
        self._stub = stub
        self._control = control
        self._timeout_seconds = timeout_seconds

    def status(self) -> DaemonStatus:
        return codec_report.decode_status(self._call(self._stub.GetStatus, depot_pb2.GetStatusRequest()))

    def namespaces(self, prefix: str, limit: int, cursor: str = "") -> NamespacePage:
        """At most `limit`, and where to go on."""
        found: list[NamespaceContents] = []
        while len(found) < limit:
            request = codec_listing.encode_list_contents(prefix, limit - len(found), cursor)
            page = codec_listing.decode_namespace_page(self._call(self._stub.ListContents, request))
            found += page.namespaces
            cursor = page.next_token
            if not cursor:
                break
        return NamespacePage(tuple(found), cursor)

    def chunks(self, namespace_id: bytes, prefix: str, limit: int, cursor: str = "") -> ChunkPage:
        """At most `limit`, and where to go on."""
        found: list[Chunk] = []
        tiers: tuple[str, ...] = ()
        while len(found) < limit:
            request = codec_listing.encode_list_chunks(namespace_id, prefix, limit - len(found), cursor)
            page = codec_listing.decode_chunk_page(self._call(self._stub.ListChunks, request))
            found += page.chunks
            tiers, cursor = page.tiers, page.next_token
            if not cursor:
                break
        return ChunkPage(tiers, tuple(found), cursor)

    def describe_namespace(self, namespace_id: bytes) -> NamespaceDescription:
        request = codec_listing.encode_describe_namespace(namespace_id)
        return codec_listing.decode_namespace_description(self._call(self._stub.DescribeNamespace, request))

    def describe_chunk(self, namespace_id: bytes, key: bytes) -> ChunkDescription:
        request = codec_listing.encode_describe_chunk(namespace_id, key)
        return codec_listing.decode_chunk_description(self._call(self._stub.DescribeChunk, request))

    def explain(self, request_id: str) -> tuple[RequestRecord, ...]:
        """What is remembered of the requests of this id, or with this beginning; the latest first."""
        request = codec_records.encode_explain(request_id)
        return codec_records.decode_records(self._call(self._stub.ExplainRequest, request))

    def record_trace(self) -> Generator[TracePart, None, None]:
        """What requests look up from now on, as it comes; without end."""
        for message in self._stream(self._stub.RecordTrace, depot_pb2.RecordTraceRequest()):
            yield codec_trace.decode_part(message)

    # What changes something

    def switch(self, call: SwitchCall) -> SwitchReply:
        request = codec_control.encode_switch_call(call)
        return codec_control.decode_switch_reply(self._call(self._control.SetSwitch, request))

    def bump(self, call: BumpCall) -> BumpReply:
        return codec_control.decode_bump_reply(
            self._call(self._control.BumpEpoch, codec_control.encode_bump_call(call))
        )

    def drain(self, *, draining: bool) -> int:
        """How many leases were granted before and have not ended."""
        return int(self._call(self._control.SetDraining, control_pb2.SetDrainingRequest(draining=draining)).leases)

    def pin(self, call: PinCall) -> PinReply:
        return codec_control.decode_pin_reply(self._call(self._control.Pin, codec_control.encode_pin_call(call)))

    def unpin(self, namespace_id: bytes, key: bytes) -> str:
        """Empty, or why the next run of the daemon will not know."""
        request = control_pb2.UnpinRequest(namespace=namespace_id, key=key)
        return str(self._call(self._control.Unpin, request).not_kept)

    def set_quota(self, entry: QuotaEntry) -> str:
        """Empty, or why the next run of the daemon will not know."""
        return str(self._call(self._control.SetQuota, codec_control.encode_set_quota(entry)).not_kept)

    def delete_quota(self, subject: QuotaSubject) -> str:
        """Likewise."""
        request = control_pb2.DeleteQuotaRequest(subject=codec_control.encode_quota_subject(subject))
        return str(self._call(self._control.DeleteQuota, request).not_kept)

    def quotas(self, subject: QuotaSubject | None = None) -> tuple[QuotaEntry, ...]:
        """Those in effect: all, or the one about the subject where there is one."""
        return codec_control.decode_quotas(
            self._call(self._control.ListQuotas, codec_control.encode_list_quotas(subject))
        )

    def evict(self, namespace_id: bytes, key: bytes) -> EvictReply:
        request = codec_control.encode_evict_call(namespace_id, key)
        return codec_control.decode_evict_reply(self._call(self._control.Evict, request))

    def verify(self, call: VerifyCall) -> Generator[VerifyReply, None, None]:
        """How far it is, now and then, and at its end. Closed before that it ends in the daemon too."""
        for message in self._stream(self._control.Verify, codec_control.encode_verify_call(call)):
            yield codec_control.decode_verify_reply(message)

    def prefetch(self, namespace_id: bytes, key: bytes) -> Generator[PrefetchReply, None, None]:
        """Likewise."""
        for message in self._stream(self._control.Prefetch, codec_control.encode_prefetch_call(namespace_id, key)):
            yield codec_control.decode_prefetch_reply(message)

    def reload(self, *, dry_run: bool = False) -> ReloadReply:
        """Raises ConfigError for a file that is wrong or, unless it is a dry run, says what takes a restart."""
        request = control_pb2.ReloadRequest(dry_run=dry_run)
        return codec_control.decode_reload_reply(self._call(self._control.Reload, request))

    def configuration(self) -> ConfigReply:
        request = control_pb2.GetConfigRequest()
        return codec_control.decode_config_reply(self._call(self._control.GetConfig, request))

    # Names

    def find_namespace(self, prefix: str) -> bytes:
        """The one id that begins with these digits. Raises NotFound or InvalidArgument, naming candidates."""
        prefix = _digits("NAMESPACE", prefix)
        found = self.namespaces(prefix, _CANDIDATES_SHOWN + 1).namespaces
        if len(found) == 1:
            return found[0].namespace_id
        if found:
            raise _ambiguous("namespaces", prefix, [_named(one) for one in found])
        others = [_named(one) for one in self.namespaces("", _CANDIDATES_SHOWN + 1).namespaces]
        raise NotFound(
            f"no namespace begins with {prefix}", advice=f"there are {_some(others)}" if others else "there is none"
        )

    def find_any_namespace(self, prefix: str) -> bytes:
        """Likewise; all digits of one are taken for what they are, also where the daemon knows no such namespace."""
        digits = _digits("NAMESPACE", prefix)
        return bytes.fromhex(digits) if len(digits) == 2 * NAMESPACE_ID_BYTES else self.find_namespace(digits)

    def find_switched_off(self, switch: Switch, prefix: str) -> bytes:
        """Likewise of those that are switched off by themselves, which the daemon may know no other way."""
        prefix = _digits("NAMESPACE", prefix)
        off = switch_states(self.status().switches)[switch].off_namespaces
        found = [one for one in off if one.hex().startswith(prefix)]
        if len(found) > 1:
            raise _ambiguous("namespaces", prefix, [one.hex() for one in found])
        return found[0] if found else self.find_namespace(prefix)

    def find_pin(self, namespace: str, key: str) -> PinStatus:
        """The one pin whose names begin with these digits; without a key a whole namespace's. Raises likewise."""
        namespace = _digits("NAMESPACE", namespace)
        found = [
            one
            for one in self.status().pins
            if one.namespace_id.hex().startswith(namespace)
            and (one.key.hex().startswith(_digits("KEY", key)) if key else not one.key)
        ]
        if len(found) > 1:
            names = [one.namespace_id.hex() + (f"/{one.key.hex()}" if one.key else "") for one in found]
            raise _ambiguous("pins", f"{namespace}/{key}" if key else namespace, names)
        if not found:
            what = f"no path that ends with {key}" if key else "no namespace"
            raise NotFound(f"{what} is pinned by the name of {namespace}", advice="`kvdepotctl status` lists what is")
        return found[0]

    def find_chunk(self, namespace_id: bytes, prefix: str) -> bytes:
        """The one key that begins with these digits. Raises NotFound or InvalidArgument, naming candidates."""
        prefix = _digits("KEY", prefix)
        if len(prefix) == PREFIX_DIGITS_MAX:
            return bytes.fromhex(prefix)
        found = self.chunks(namespace_id, prefix, _CANDIDATES_SHOWN + 1).chunks
        if len(found) == 1:
            return found[0].key
        if found:
            raise _ambiguous("chunks", prefix, [chunk.key.hex() for chunk in found])
        shown = namespace_id.hex()[:12]
        raise NotFound(
            f"no chunk of namespace {shown} begins with {prefix}",
            advice=f"`kvdepotctl ls {shown}` shows what there is",
        )

    def _call(self, method: Callable[..., Reply], request: object) -> Reply:
        try:
            return method(request, timeout=self._timeout_seconds)
        except grpc.RpcError as error:
            raise _refusal(error) or error from None

    def _stream(self, method: Callable[..., Any], request: object) -> Iterator[Any]:
        """The answers of a call that goes on. Raises KvDepotError also where none comes for `timeout_seconds`."""
        call, silent = method(request), Event()

        def give_up() -> None:
            silent.set()
            call.cancel()

        try:
            while True:
                timer = Timer(self._timeout_seconds, give_up)
                timer.daemon = True
                timer.start()
                try:
                    message = next(call, None)
                finally:
                    timer.cancel()
                if message is None:
                    return
                yield message
        except grpc.RpcError as error:
            if silent.is_set():
                raise KvDepotError(
                    f"no word from the daemon for {self._timeout_seconds:g} s", advice="its log, or a longer --timeout"
                ) from None
            raise _refusal(error) or error from None
        finally:
            call.cancel()


def _refusal(error: grpc.RpcError) -> KvDepotError | None:
    """What the daemon said; None where it is not the daemon's word."""
    metadata = [(entry.key, entry.value) for entry in error.trailing_metadata() or ()]
    if CODE_KEY in dict(metadata):
        return from_status(error.code(), error.details(), metadata)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return KvDepotError("this kvdepotd does not know the call", advice="upgrade it: it is older than kvdepotctl")
    return None


def _digits(what: str, text: str) -> str:
    text = text.lower()
    if not text:
        raise InvalidArgument(f"{what} is empty", advice="give at least one hexadecimal digit")
    prefix_range(what, text)
    return text


def _named(namespace: NamespaceContents) -> str:
    shown = namespace.namespace_id.hex()[:12]
    return f"{shown} ({namespace.label})" if namespace.label else shown


def _some(names: list[str]) -> str:
    more = " and more" if len(names) > _CANDIDATES_SHOWN else ""
    return ", ".join(names[:_CANDIDATES_SHOWN]) + more


def _ambiguous(what: str, prefix: str, names: list[str]) -> InvalidArgument:
    return InvalidArgument(f"several {what} begin with {prefix}", advice=f"give more digits of one of {_some(names)}")
