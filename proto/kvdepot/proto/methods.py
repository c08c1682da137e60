"""Every call that a daemon answers: its name, its two values, and how they travel.

The services of the .proto files are the truth about names and messages, and a test compares this page with them. Both
lanes of service Depot, gRPC and the call socket, are made from this table. So are the operators' services, the labels
of the metrics and the documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Generic, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from kvdepot.core import calls, control, listing, records, registration, report, traces
from kvdepot.proto.codec import Codec, codec_of
from kvdepot.proto.v1 import control_pb2
from kvdepot.proto.v1 import depot_pb2 as pb

C = TypeVar("C")
R = TypeVar("R")


@dataclass(frozen=True)
class Method(Generic[C, R]):
    """One call. `number` names it on a call socket, and is never given to another method."""

    descriptor: MethodDescriptor
    number: int
    call_type: type[C]
    reply_type: type[R]

    @property
    def name(self) -> str:
        return self.descriptor.name

    @property
    def path(self) -> str:
        """Return gRPC's name of the method."""
        return f"/{self.descriptor.containing_service.full_name}/{self.name}"

    @property
    def streams(self) -> bool:
        """Return whether one call has many replies."""
        return self.descriptor.server_streaming

    @cached_property
    def call(self) -> Codec[C]:
        return codec_of(self.call_type, GetMessageClass(self.descriptor.input_type))

    @cached_property
    def reply(self) -> Codec[R]:
        return codec_of(self.reply_type, GetMessageClass(self.descriptor.output_type))


def _service(descriptor: ServiceDescriptor, *rows: tuple[str, type, type]) -> dict[str, Method[Any, Any]]:
    """Return the methods of a service by name. The number of a method is its place: add new ones at the end."""
    return {
        name: Method(descriptor.methods_by_name[name], number, call_type, reply_type)
        for number, (name, call_type, reply_type) in enumerate(rows, start=1)
    }


DEPOT: Final[Mapping[str, Method[Any, Any]]] = _service(
    pb.DESCRIPTOR.services_by_name["Depot"],
    ("GetCapabilities", calls.GetCapabilitiesCall, calls.Capabilities),
    ("RegisterNamespace", registration.RegisterCall, registration.RegisterReply),
    ("Declare", calls.DeclareCall, calls.DeclareReply),
    ("Locate", calls.LocateCall, calls.LocateReply),
    ("Acquire", calls.AcquireCall, calls.AcquireReply),
    ("Release", calls.ReleaseCall, calls.Confirmed),
    ("Reserve", calls.ReserveCall, calls.ReserveReply),
    ("Commit", calls.CommitCall, calls.CommitReply),
    ("Abandon", calls.AbandonCall, calls.Confirmed),
    ("EndRequest", calls.EndRequestCall, calls.Confirmed),
    ("FindTiers", calls.FindTiersCall, calls.FindTiersReply),
)
OPERATOR: Final[Mapping[str, Method[Any, Any]]] = _service(
    pb.DESCRIPTOR.services_by_name["Operator"],
    ("GetStatus", report.GetStatusCall, report.DaemonStatus),
    ("ListNamespaces", report.ListNamespacesCall, report.NamespaceStatusPage),
    ("ListContents", listing.ListContentsCall, listing.NamespacePage),
    ("ListChunks", listing.ListChunksCall, listing.ChunkPage),
    ("DescribeNamespace", listing.DescribeNamespaceCall, listing.NamespaceDescription),
    ("DescribeChunk", listing.DescribeChunkCall, listing.ChunkDescription),
    ("ExplainRequest", records.ExplainCall, records.ExplainReply),
    ("RecordTrace", traces.RecordTraceCall, traces.TracePart),
    ("ListRequests", records.ListRequestsCall, records.RequestList),
)
CONTROL: Final[Mapping[str, Method[Any, Any]]] = _service(
    control_pb2.DESCRIPTOR.services_by_name["Control"],
    ("SetSwitch", control.SwitchCall, control.SwitchReply),
    ("SetDraining", control.DrainCall, control.DrainReply),
    ("Evict", control.EvictCall, control.EvictReply),
    ("BumpEpoch", control.BumpCall, control.BumpReply),
    ("Verify", control.VerifyCall, control.VerifyReply),
    ("Prefetch", control.PrefetchCall, control.PrefetchReply),
    ("Pin", control.PinCall, control.PinReply),
    ("Unpin", control.UnpinCall, control.ChangeReply),
    ("SetQuota", control.SetQuotaCall, control.ChangeReply),
    ("DeleteQuota", control.DeleteQuotaCall, control.ChangeReply),
    ("ListQuotas", control.ListQuotasCall, control.QuotasReply),
    ("Reload", control.ReloadCall, control.ReloadReply),
    ("GetConfig", control.GetConfigCall, control.ConfigReply),
)
BY_CALL: Final[Mapping[type, Method[Any, Any]]] = {
    method.call_type: method for service in (DEPOT, OPERATOR, CONTROL) for method in service.values()
}
"""Of all services: no two methods take the same value."""
BY_NUMBER: Final[Mapping[int, Method[Any, Any]]] = {method.number: method for method in DEPOT.values()}
"""Of service Depot."""


def encode(call: object) -> Any:
    """Return the message of a call."""
    return BY_CALL[type(call)].call.encode(call)


def decode_reply(call_type: type, message: Message) -> Any:
    """Return the reply in a message. Raise InvalidArgument or LimitExceeded."""
    return BY_CALL[call_type].reply.decode(message)
