"""The driver's end of the fork server: an engine's front, as a process that can be asked, waited for and killed."""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from demo.engine import ROOT, EngineOptions, EngineProcess, EngineProcessError, start_process
from tests.e2e.fork_server import FRONT, PRELOAD, Client, NoForkError, same_at_import, server_environment
from tests.rigs.patience import patient

FORK_TIMEOUT_SECONDS = 120.0
"""The first copy waits for the server's own imports."""
_SERVE = "import sys; from tests.e2e.fork_server import serve; serve(*map(int, sys.argv[1:3]), *sys.argv[3:])()"


class ForkServer:
    """A process that has imported vLLM in one environment. It ends with this process, and every engine with it."""

    def __init__(self, environment: dict[str, str], modules: Sequence[str] = (FRONT, *PRELOAD)) -> None:
        directory = Path(tempfile.mkdtemp(prefix="kvd-"))
        self._client = Client(str(directory / "fork.sock"), server_environment(environment))
        self._log = directory / "fork.log"
        alive, self._alive = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("w") as log:
            listener.bind(self._client.address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(listener.fileno()), str(alive), *modules],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=self._client.environment,
                pass_fds=(listener.fileno(), alive),
            )  # fmt: skip
        os.close(alive)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def serves(self) -> bool:
        return self._process.poll() is None

    def start(self, options: EngineOptions, log: Path) -> EngineProcess:
        """As `start_process`. Raises EngineProcessError where the server forks nothing."""
        environment = options.process_environment()
        if not same_at_import(environment, self._client.environment):
            return start_process(options, log)
        commands, stdin = os.pipe()
        stdout, answers = os.pipe()
        request = pickle.dumps(environment) + pickle.dumps(options.engine_arguments())
        try:
            with log.open("a") as stderr:
                pid, status, parent = self._client.fork(
                    [commands, answers, stderr.fileno()], 0, request, patient(FORK_TIMEOUT_SECONDS)
                )
        except NoForkError as error:
            os.close(stdin)
            os.close(stdout)
            raise EngineProcessError(f"no fork: {error}\n{self._log.read_text()}") from error
        finally:
            os.close(commands)
            os.close(answers)
        os.close(parent)
        return ForkedFront(pid, status, os.fdopen(stdin, "w"), os.fdopen(stdout))

    def close(self) -> None:
        os.close(self._alive)
        self._process.wait(30)


class ForkedFront:
    """A child of the server, with the part of `subprocess.Popen` that an engine needs."""

    def __init__(self, pid: int, status: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = pid
        self.stdin: IO[str] | None = stdin
        self.stdout: IO[str] | None = stdout
        self._status = status
        self._code: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not wait([self._status], timeout):
                raise subprocess.TimeoutExpired(f"front {self.pid}", timeout or 0)
            try:
                self._code = forkserver.read_signed(self._status)
            except EOFError:  # the server has ended, and killed it before
                self._code = -1
            os.close(self._status)
        return self._code


SERVERS = 2
_servers: dict[int, ForkServer] = {}
_turns = itertools.count()


def start_forked(options: EngineOptions, log: Path) -> EngineProcess:
    """As `start_process`, from a server of this process, in the environment of the first engine.

    Servers take turns: engines that start one after the other have other seeds of `hash()`, as users' engines do.
    """
    turn = next(_turns) % SERVERS
    server = _servers.get(turn)
    if server is None or not server.serves:
        server = _servers[turn] = ForkServer(options.process_environment())
        atexit.register(server.close)
    return server.start(options, log)
