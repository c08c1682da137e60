"""The process that asks peers for summaries, where its daemon is gone."""

from __future__ import annotations

import os
import socket

import pytest
from kvdepot.server.io.peer_scout import Scout
from kvdepot.server.io.peer_wire import PeerSettings
from kvdepot.server.io.scout_wire import Asked, At, Told


class EndedError(Exception):
    """`os._exit` was called, which does not return."""


def test_an_answer_that_nobody_reads_ends_the_process_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", ended)
    own, daemons = socket.socketpair()
    with own:
        scout = Scout(
            own, PeerSettings("", 0, "", "", "", (), 1.0), arena_id=1, seats=1, every_seconds=1.0, bytes_max=1 << 20
        )
        daemons.close()
        with pytest.raises(EndedError) as end:
            scout._tell(Told(At("::1", 7448), Asked.FAILED, "no answer"))
    assert end.value.args == (0,)
