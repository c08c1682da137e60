"""The keeper process of a shared tier.

Started by the daemon as `python -m kvdepot.server.io.shared_keeper SOCKET_FD PARENT_PID SETTINGS BEFORE`, the last two
as JSON. What it does may block on a mount that hangs; then it says nothing, and ends with its parent or when the mount
answers.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time

from kvdepot.server.io.lifeline import die_with, exit_code
from kvdepot.server.io.waiting import readable
from kvdepot.server.tiers.shared.keeper.keeper import Keeper
from kvdepot.server.tiers.shared.keeper.settings import Before, KeeperSettings
from kvdepot.server.tiers.shared.keeper.words import pack_word, take_published

_RECEIVE_BYTES = 1 << 14
_HURRY = 0.25
"""Of a heartbeat, while this node waits for another one's grant."""


def boot_seconds() -> float:
    """Goes on while the machine sleeps, and is nobody's to set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def next_beat(started: float, ended: float, heartbeat_seconds: float) -> float:
    """When one is due after one that took so long: half of the time, at least, is left for work between them."""
    return max(started + heartbeat_seconds, ended + (ended - started))


def rest(started: float, beaten: float, worked: float) -> float:
    """How long to do nothing after a step of work, and the heartbeat before it: half of the time is others'."""
    return max((worked - beaten) - (beaten - started), 0.0)


def main(arguments: list[str]) -> int:
    socket_fd, parent = int(arguments[0]), int(arguments[1])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the daemon
    settings = KeeperSettings.unpack(arguments[2])
    keeper = Keeper(settings, Before(**json.loads(arguments[3])), boot_seconds)
    daemon = socket.socket(fileno=socket_fd)
    received = bytearray()
    beat_at = boot_seconds()
    while True:
        started = boot_seconds()
        if started >= beat_at:
            word = keeper.beat()
            beat_at = next_beat(started, boot_seconds(), settings.heartbeat_seconds * (_HURRY if keeper.hurried else 1))
            daemon.sendall(pack_word(word))
        beaten = boot_seconds()
        works = keeper.work()
        worked = boot_seconds()
        pause = beat_at - worked
        if works:
            pause = min(pause, rest(started, beaten, worked))
        if readable(daemon, pause):
            data = daemon.recv(_RECEIVE_BYTES)
            if not data:
                return 0
            received += data
            for told in take_published(received):
                keeper.publish(*told)


if __name__ == "__main__":
    sys.exit(exit_code(main))
