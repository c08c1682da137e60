"""The process that lends over NIXL, without NIXL: when it serves its agent."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from kvdepot.server.io import nixl_lender
from kvdepot.server.io.peer_wire import TO_LENDER, Serve

from tests.rigs.patience import patient

ABOVE_SELECT = 1100
"""A number of a descriptor that select(2) does not take."""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * ABOVE_SELECT, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_the_process_that_lends_serves_whatever_number_its_socket_has() -> None:
    agent, served = Mock(), threading.Event()
    agent.serve.side_effect = served.set
    ours, theirs = socket.socketpair()
    theirs = socket.socket(fileno=fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD, ABOVE_SELECT))
    ended: list[int] = []
    serving = threading.Thread(target=lambda: ended.append(nixl_lender._serve(theirs, agent)))
    serving.start()
    with ours, theirs:
        ours.sendall(TO_LENDER.pack(Serve(on=True)))
        assert served.wait(patient(10))
        ours.shutdown(socket.SHUT_RDWR)
        serving.join(patient(10))
    assert ended == [0]
