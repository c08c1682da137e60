"""Processes of other users, next to a real daemon: they run functions of a test module, without any privilege.

Such a process imports its module as root and then becomes the user, because the interpreter may lie where only root
can read. It lives until its `OtherUser` is closed, so what its functions keep in globals stays from call to call.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import pytest
from kvdepot.core.calls import AttachCall, AttachReply
from kvdepot.proto import codec

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.raw_client import RawEngine, attach_socket, exchange, keys_of, payload_of

needs_root: Final = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
needs_unshare: Final = pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare")
GROUP: Final = 61000
"""Of every engine; the sockets' group."""
HONEST: Final = 61002
HOSTILE: Final = 61003
IN_A_PID_NAMESPACE: Final = ("unshare", "--pid", "--fork", "--kill-child")


def open_to_group(daemon: DaemonProcess) -> None:
    """Give the engines' sockets of a running daemon to their group."""
    daemon.directory.chmod(0o755)
    for path in (daemon.socket, daemon.attach_socket):
        os.chown(path, -1, GROUP)
        path.chmod(0o660)


class OtherUser:
    """A process of `uid` that runs functions of `module`. `under`: a command that runs it."""

    def __init__(self, uid: int, module: str, *, under: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*under, sys.executable, "-m", __name__, module, str(uid)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def run(self, function: str, *arguments: object) -> Any:
        """Return what the function returns there. Raise what it raises there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((function, arguments), self._process.stdin)
        self._process.stdin.flush()
        result, error = pickle.load(self._process.stdout)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- in such a process


class Attached:
    """One connection to the attachment socket, as any process of the group can make it."""

    def __init__(
        self, socket_path: str, engine_id: str, *, scheduler: bool = True, rank: int = 0, world_size: int = 1,
        stream: bool = False,
    ) -> None:  # fmt: skip
        self.connection = attach_socket(Path(f"{socket_path}.attach"))
        call = AttachCall(
            1, 1, engine_id, scheduler=scheduler, rank=rank, world_size=world_size, stream=stream, parts=True
        )
        self.reply: AttachReply
        self.reply, descriptors = exchange(self.connection, codec.encode_attach_call(call))
        self._lifeline = descriptors if stream else ()  # a proxy ends when its client has closed this
        for descriptor in () if stream else descriptors:
            os.close(descriptor)

    def close(self) -> None:
        self.connection.close()
        for descriptor in self._lifeline:
            os.close(descriptor)


class Comparing(RawEngine):
    """An honest engine that compares each byte."""

    _prompts = 0

    def check(self, chunks: int = 4) -> int:
        """Store a prompt, and load this one and the first one. Return how many objects were right."""
        self._prompts += 1
        self.store(self.keys(self._prompts, chunks))
        right = 0
        for number in {1, self._prompts}:
            keys = self.keys(number, chunks)
            loaded = self.load(keys)
            assert loaded is not None, f"prompt {number} is not served"
            assert loaded == [payload_of(key) for key in keys], f"prompt {number} has wrong bytes"
            right += len(keys)
        return right

    @staticmethod
    def keys(number: int, chunks: int) -> list[bytes]:
        """Return the keys of a prompt, by its number from 1 on."""
        return keys_of(f"{os.getpid()}-{number}", chunks)


def _serve(module: str, uid: int) -> None:
    functions = importlib.import_module(module)
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(uid)
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pickle.load(calls)
            result, failure = None, None
            try:
                result = getattr(functions, name)(*arguments)
            except Exception as error:  # noqa: BLE001 - it is the caller's
                failure = RuntimeError(f"{type(error).__name__}: {error}")
            pickle.dump((result, failure), answers)
            answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
