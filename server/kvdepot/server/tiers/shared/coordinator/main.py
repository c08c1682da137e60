"""The coordinator process of a shared tier.

Started by the daemon as `python -m kvdepot.server.tiers.shared.coordinator.main SOCKET_FD PARENT_PID SETTINGS BEFORE`.
The last two are JSON. What the process does may block on a mount that hangs. Then it says nothing, and ends with its
parent or when the mount answers.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable

from kvdepot.server.io.lifeline import die_with, exit_code
from kvdepot.server.io.waiting import readable
from kvdepot.server.platform.boot_clock import boot_seconds
from kvdepot.server.tiers.shared.coordinator.coordinator import Coordinator
from kvdepot.server.tiers.shared.coordinator.settings import Before, CoordinatorSettings
from kvdepot.server.tiers.shared.links import FROM_COORDINATOR, TO_COORDINATOR, Failed, Report

_RECEIVE_BYTES = 1 << 14
_HURRY = 0.25
"""Of a heartbeat, while this node waits for another one's grant."""


class Turns:
    """Heartbeats and steps of work in turn. Work has half of the time, whatever a heartbeat takes; others the rest."""

    def __init__(self, coordinator: Coordinator, heartbeat_seconds: float, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._heartbeat_at = clock()
        self._worked_seconds = self._others_seconds = 0.0  # since the last heartbeat began: heartbeat and rests

    def turn(self, tell: Callable[[Report | Failed], None]) -> float:
        """Take a turn. Return the seconds until the next one."""
        started = self._clock()
        if started >= self._heartbeat_at:
            message = self._coordinator.heartbeat()
            ended = self._clock()
            heartbeat_seconds = self._heartbeat_seconds * (_HURRY if self._coordinator.hurried else 1)
            self._heartbeat_at = max(started + heartbeat_seconds, ended + (ended - started))
            self._worked_seconds, self._others_seconds = 0.0, ended - started
            tell(message)
        began = self._clock()
        works = self._coordinator.work()
        ended = self._clock()
        self._worked_seconds += ended - began
        pause = self._heartbeat_at - ended
        if works:
            pause = min(pause, self._worked_seconds - self._others_seconds)
        pause = max(pause, 0.0)
        self._others_seconds += pause
        return pause


def main(arguments: list[str]) -> int:
    socket_fd, parent = int(arguments[0]), int(arguments[1])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the daemon
    settings = CoordinatorSettings.unpack(arguments[2])
    coordinator = Coordinator(settings, Before(**json.loads(arguments[3])), boot_seconds)
    daemon = socket.socket(fileno=socket_fd)
    received = bytearray()
    turns = Turns(coordinator, settings.heartbeat_seconds, boot_seconds)
    while True:
        pause = turns.turn(lambda message: daemon.sendall(FROM_COORDINATOR.pack(message)))
        if readable(daemon, pause):
            data = daemon.recv(_RECEIVE_BYTES)
            if not data:
                return 0
            received += data
            for _, told in TO_COORDINATOR.take(received):
                coordinator.publish(told.total_bytes, told.wanted_bytes, told.settled, refused=told.refused)


if __name__ == "__main__":
    sys.exit(exit_code(main))
