"""The proxy of one process that cannot map the arena: it moves that process's payload by gRPC (service Data).

Started by the daemon as `python -m kvdepot.server.io.stream_proxy TABLES_FD GENERATIONS_FD DATA_FD PART SOCKET_FD
PARENT_PID MODE GROUP PATH`, one for each such process. DATA_FD is that part of the data, and the only one that it maps.
To the daemon it is the process that may touch what the rank is lent: it stands in the attachment table, and its proven
death is what frees the rank's place.

SOCKET_FD is its lifeline. The daemon writes the attachment and the session's token, then passes the other end on to
the client: the proxy says READY when it serves, and ends when that end is closed. Nobody else has this end, so its end
of file proves to the client that no thread of the proxy can write any more (ADR 0020).
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
from kvdepot.core.arena import PAGE_BYTES, ArenaTables, Superblock
from kvdepot.core.calls import STREAM_READY, DataCall
from kvdepot.core.data_mapping import map_data
from kvdepot.core.errors import InvalidArgument, KvDepotError, UnknownSession
from kvdepot.core.limits import MESSAGE_BYTES_MAX
from kvdepot.proto import codec_data
from kvdepot.proto.codec import parse
from kvdepot.proto.status import to_status
from kvdepot.proto.v1 import data_pb2 as pb
from kvdepot.server.io.lent_extents import LentExtents
from kvdepot.server.io.lifeline import die_with, exit_code
from kvdepot.server.io.stream_wire import OPENING
from kvdepot.server.platform.grpc_guards import address, guards

_CALLS_MAX: Final = 4
"""A rank has a store and a load under way; the rest is for those of a connection that broke."""
_CONNECTIONS_MAX: Final = 16
"""One client has one, or a new one while an old one breaks."""
CALL_SECONDS_MAX: Final = 3600.0
"""Without a deadline a call could hold one of the few threads for ever."""
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    *guards(_CONNECTIONS_MAX),
)
Context = Any
"""grpc.ServicerContext; its stubs know no `time_remaining` of None."""


def main(arguments: list[str]) -> int:
    tables_fd, generations_fd, data_fd, part, socket_fd, parent, mode, group = map(int, arguments[:8])
    path = arguments[8]
    die_with(parent)
    for ending in (signal.SIGINT, signal.SIGTERM):  # for the daemon, which ends this process itself
        signal.signal(ending, signal.SIG_IGN)
    lifeline = socket.socket(fileno=socket_fd)
    frame = OPENING.read(lifeline.makefile("rb"))
    if frame is None:
        return 0
    opening = frame[1]
    layout = Superblock.unpack(os.pread(tables_fd, PAGE_BYTES, 0)).layout
    mapped, generations = (
        memoryview(mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ))
        for fd, size_bytes in ((tables_fd, layout.tables_bytes), (generations_fd, layout.generations_bytes))
    )
    tables = ArenaTables(mapped, layout, generations)
    data = memoryview(map_data(data_fd, layout.parts[part]))
    session = int(tables.attachments["session"][opening.attachment])
    extents = LentExtents(data, tables, session, layout.part_starts[part])
    server = grpc.server(ThreadPoolExecutor(_CALLS_MAX), options=_OPTIONS, maximum_concurrent_rpcs=_CALLS_MAX)
    server.add_generic_rpc_handlers((data_service(extents, opening.session),))
    server.add_insecure_port(address(Path(path)))
    server.start()
    os.chown(path, -1, group)
    Path(path).chmod(mode)
    lifeline.sendall(STREAM_READY)
    while lifeline.recv(1):  # nobody says anything here: this is the end of file
        pass
    return 0


def data_service(extents: LentExtents, session: bytes) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the handlers of service Data. Messages are bytes, so that what is none gets our refusal, not gRPC's."""
    data = _Data(extents, session)
    handlers = {
        "Load": grpc.unary_stream_rpc_method_handler(data.load, None, pb.LoadResponse.SerializeToString),
        "Store": grpc.stream_unary_rpc_method_handler(data.store, None, pb.StoreResponse.SerializeToString),
    }
    return grpc.method_handlers_generic_handler(pb.DESCRIPTOR.services_by_name["Data"].full_name, handlers)


class _Data:
    """Serves one session. Every refusal is a status, and nothing is touched before a call has been checked."""

    def __init__(self, extents: LentExtents, session: bytes) -> None:
        self._extents = extents
        self._session = session

    def load(self, request: bytes, context: Context) -> Iterator[pb.LoadResponse]:
        try:
            call = codec_data.decode_load_call(parse(pb.LoadRequest, request))
            self._check(call)
            _check_deadline(context)
            reading = self._extents.to_read(call.extents)
            for data in reading.pieces():
                if not context.is_active():
                    return
                yield codec_data.encode_load_piece(data)
            reading.check()
        except KvDepotError as error:
            _abort(context, error)
        yield codec_data.encode_load_end()

    def store(self, requests: Iterator[bytes], context: Context) -> pb.StoreResponse:
        try:
            _check_deadline(context)  # before a thread waits for what a peer may never send
            first = next(requests, None)
            if first is None:
                raise InvalidArgument("a store begins with a message that names extents")
            call = codec_data.decode_store_call(parse(pb.StoreRequest, first))
            self._check(call)
            writing = self._extents.to_write(call.extents)
            for message in requests:
                writing.write(codec_data.decode_store_piece(parse(pb.StoreRequest, message)))
            writing.finish()
        except KvDepotError as error:
            _abort(context, error)
        return pb.StoreResponse()

    def _check(self, call: DataCall) -> None:
        if call.session != self._session:
            raise UnknownSession("this proxy serves another session")


def _check_deadline(context: Context) -> None:
    left = context.time_remaining()
    if left is None or left > CALL_SECONDS_MAX:
        raise InvalidArgument(f"a call needs a deadline of at most {CALL_SECONDS_MAX:g} s")


def _abort(context: Context, error: KvDepotError) -> NoReturn:
    status, details, metadata = to_status(error)
    context.set_trailing_metadata(metadata)
    context.abort(status, details)
    raise AssertionError("abort returned")


if __name__ == "__main__":
    code = exit_code(main)
    sys.stderr.flush()
    os._exit(code)  # not waiting for threads that serve
