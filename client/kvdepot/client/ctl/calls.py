"""The operator's calls: pages put together, prefixes turned into whole ids, refusals into kvdepot's errors."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from threading import Event, Timer
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from kvdepot.client.ctl.remote import NoConnectionError, Remote
from kvdepot.client.transports.control import CHANNEL_OPTIONS
from kvdepot.core.control import (
    BumpCall,
    BumpReply,
    ChangeReply,
    ConfigReply,
    DeleteQuotaCall,
    DrainCall,
    DrainReply,
    EvictCall,
    EvictReply,
    GetConfigCall,
    ListQuotasCall,
    PinCall,
    PinReply,
    PrefetchCall,
    PrefetchReply,
    QuotaEntry,
    QuotasReply,
    QuotaSubject,
    ReloadCall,
    ReloadReply,
    SetQuotaCall,
    Switch,
    SwitchCall,
    SwitchReply,
    UnpinCall,
    VerifyCall,
    VerifyReply,
    switch_states,
)
from kvdepot.core.errors import InvalidArgument, KvDepotError, NotFound
from kvdepot.core.limits import NAMESPACE_ID_BYTES
from kvdepot.core.listing import (
    CHUNKS_PER_PAGE_MAX,
    NAMESPACES_PER_PAGE_MAX,
    PREFIX_DIGITS_MAX,
    Chunk,
    ChunkDescription,
    ChunkPage,
    DescribeChunkCall,
    DescribeNamespaceCall,
    ListChunksCall,
    ListContentsCall,
    NamespaceContents,
    NamespaceDescription,
    NamespacePage,
    prefix_range,
)
from kvdepot.core.records import ExplainCall, ExplainReply, ListRequestsCall, RequestList
from kvdepot.core.report import DaemonStatus, GetStatusCall
from kvdepot.core.traces import RecordTraceCall, TracePart
from kvdepot.proto.methods import BY_CALL, Method
from kvdepot.proto.status import CODE_KEY, from_status

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.records import RequestRecord
    from kvdepot.core.report import PinStatus

_CANDIDATES_SHOWN: Final = 8


Reply = TypeVar("Reply")


@contextmanager
def connect(endpoint: Endpoint | Remote, timeout_seconds: float) -> Iterator[Operator]:
    """`timeout_seconds` is each call's. Raise NoConnectionError if TLS is why there is none."""
    if isinstance(endpoint, Remote):
        with endpoint.channel() as channel:
            try:
                yield Operator(channel, timeout_seconds)
            except grpc.RpcError as error:
                unreachable = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                if unreachable and (why := endpoint.why_refused(timeout_seconds)):
                    raise NoConnectionError(why) from error
                raise
        return
    with grpc.insecure_channel(endpoint.admin_target, options=CHANNEL_OPTIONS) as channel:
        yield Operator(channel, timeout_seconds)


class Operator:
    """All methods raise NotFound, InvalidArgument, or grpc.RpcError when the daemon does not answer."""

    def __init__(self, channel: grpc.Channel, timeout_seconds: float) -> None:
        self._channel = channel
        self._timeout_seconds = timeout_seconds

    def status(self) -> DaemonStatus:
        return self._ask(GetStatusCall(), DaemonStatus)

    def namespaces(self, prefix: str, limit: int, cursor: str = "", tenant: str | None = None) -> NamespacePage:
        """Return at most `limit` entries, of one tenant or of all, and where to continue."""
        found: list[NamespaceContents] = []
        while len(found) < limit:
            page = self._ask(
                ListContentsCall(prefix, min(limit - len(found), NAMESPACES_PER_PAGE_MAX), cursor), NamespacePage
            )
            found += (one for one in page.namespaces if tenant in (None, one.tenant))
            cursor = page.next_page_token
            if not cursor:
                break
        return NamespacePage(tuple(found), cursor)

    def chunks(self, namespace_id: bytes, prefix: str, limit: int, cursor: str = "") -> ChunkPage:
        """Return at most `limit` entries, and where to continue."""
        found: list[Chunk] = []
        tiers: tuple[str, ...] = ()
        while len(found) < limit:
            page = self._ask(
                ListChunksCall(namespace_id, prefix, min(limit - len(found), CHUNKS_PER_PAGE_MAX), cursor), ChunkPage
            )
            found += page.chunks
            tiers, cursor = page.tiers, page.next_page_token
            if not cursor:
                break
        return ChunkPage(tiers, tuple(found), cursor)

    def describe_namespace(self, namespace_id: bytes) -> NamespaceDescription:
        return self._ask(DescribeNamespaceCall(namespace_id), NamespaceDescription)

    def describe_chunk(self, namespace_id: bytes, key: bytes) -> ChunkDescription:
        return self._ask(DescribeChunkCall(namespace_id, key), ChunkDescription)

    def explain(self, request_id: str) -> tuple[RequestRecord, ...]:
        """Return the records of requests with this id, or with this beginning of an id; the latest first."""
        return self._ask(ExplainCall(request_id), ExplainReply).records

    def requests(self, last: int, *, misses: bool) -> tuple[RequestRecord, ...]:
        """Return the records of the latest requests, or of those that missed, the latest first."""
        return self._ask(ListRequestsCall(last, misses), RequestList).records

    def record_trace(self) -> Generator[TracePart, None, None]:
        """Yield what requests look up from now on, without end."""
        return self._follow(RecordTraceCall(), TracePart)

    # What changes something

    def switch(self, call: SwitchCall) -> SwitchReply:
        return self._ask(call, SwitchReply)

    def bump(self, call: BumpCall) -> BumpReply:
        return self._ask(call, BumpReply)

    def drain(self, *, draining: bool) -> int:
        """How many leases were granted before and have not ended."""
        return self._ask(DrainCall(draining), DrainReply).leases

    def pin(self, call: PinCall) -> PinReply:
        return self._ask(call, PinReply)

    def unpin(self, namespace_id: bytes, key: bytes) -> str:
        """Empty, or why the next run of the daemon will not know."""
        return self._ask(UnpinCall(namespace_id, key), ChangeReply).not_persisted

    def set_quota(self, subject: QuotaSubject, capacity_bytes: int | None) -> str:
        """Empty, or why the next run of the daemon will not know."""
        return self._ask(SetQuotaCall(subject, capacity_bytes), ChangeReply).not_persisted

    def delete_quota(self, subject: QuotaSubject) -> str:
        """Empty, or why the next run of the daemon will not know."""
        return self._ask(DeleteQuotaCall(subject), ChangeReply).not_persisted

    def quotas(self, subject: QuotaSubject | None = None) -> tuple[QuotaEntry, ...]:
        """Those in effect: all, or the one about the subject where there is one."""
        return self._ask(ListQuotasCall(subject), QuotasReply).quotas

    def evict(self, namespace_id: bytes, key: bytes) -> EvictReply:
        return self._ask(EvictCall(namespace_id, key), EvictReply)

    def verify(self, call: VerifyCall) -> Generator[VerifyReply, None, None]:
        """How far it is, now and then, and at its end. Closed before that it ends in the daemon too."""
        return self._follow(call, VerifyReply)

    def prefetch(self, namespace_id: bytes, key: bytes) -> Generator[PrefetchReply, None, None]:
        """How far it is, as with `verify`."""
        return self._follow(PrefetchCall(namespace_id, key), PrefetchReply)

    def reload(self, *, dry_run: bool = False) -> ReloadReply:
        """Reload. Raise ConfigError for a wrong file or, unless it is a dry run, for keys that need a restart."""
        return self._ask(ReloadCall(dry_run), ReloadReply)

    def configuration(self) -> ConfigReply:
        return self._ask(GetConfigCall(), ConfigReply)

    # How

    def _ask(self, call: object, reply_type: type[Reply]) -> Reply:
        """Make a call that has one reply."""
        method = _method(call, reply_type)
        answering = self._channel.unary_unary(method.path, None, None)
        request = _encoded(method, call)
        try:
            message = answering(request, timeout=self._timeout_seconds)
        except grpc.RpcError as error:
            raise _refusal(error) or error from None
        return method.reply.parse(message)

    def _follow(self, call: object, reply_type: type[Reply]) -> Generator[Reply, None, None]:
        """Make a call that has many replies, and yield them. Closed before the end, it ends in the daemon too.

        Raises KvDepotError also where no reply comes for `timeout_seconds`.
        """
        method = _method(call, reply_type)
        replies = self._channel.unary_stream(method.path, None, None)(_encoded(method, call))
        for message in self._watched(replies):
            yield method.reply.parse(message)

    # Names

    def find_namespace(self, prefix: str) -> bytes:
        """Return the one id that begins with these digits. Raise NotFound or InvalidArgument, with candidates."""
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
        """Return the only namespace with this prefix. A whole id is taken, also if the daemon does not know it."""
        digits = _digits("NAMESPACE", prefix)
        return bytes.fromhex(digits) if len(digits) == 2 * NAMESPACE_ID_BYTES else self.find_namespace(digits)

    def find_switched_off(self, switch: Switch, prefix: str) -> bytes:
        """Return the only namespace with this prefix that is switched off. The daemon may know nothing else of it."""
        prefix = _digits("NAMESPACE", prefix)
        off = switch_states(self.status().switches)[switch].off_namespaces
        found = [one for one in off if one.hex().startswith(prefix)]
        if len(found) > 1:
            raise _ambiguous("namespaces", prefix, [one.hex() for one in found])
        return found[0] if found else self.find_namespace(prefix)

    def find_pin(self, namespace: str, key: str) -> PinStatus:
        """Return the one pin with these beginnings; without a key, of a whole namespace. Raise as `namespace`."""
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
        """Return the one key that begins with these digits. Raise NotFound or InvalidArgument, with candidates."""
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

    def _watched(self, call: Any) -> Iterator[bytes]:
        """Yield the messages of a streaming call."""
        silent = Event()

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


def _method(call: object, reply_type: type[Reply]) -> Method[Any, Reply]:
    method = BY_CALL[type(call)]
    assert method.reply_type is reply_type
    return method


def _encoded(method: Method[Any, Any], call: object) -> bytes:
    """Return the message of a call. Raise InvalidArgument for a text that is not UTF-8, or a number without room."""
    try:
        message: bytes = method.call.encode(call).SerializeToString()
    except ValueError as error:
        raise InvalidArgument(f"no message can have this argument: {error}") from error
    return message


def _refusal(error: grpc.RpcError) -> KvDepotError | None:
    """Return the daemon's error, or None if the error is not the daemon's."""
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
