"""The driver's end of the fork server of engines: an engine's front, as a process that can be asked and killed."""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
from collections.abc import Sequence
from pathlib import Path

from demo.engine import EngineOptions, EngineProcess, EngineProcessError, start_process
from tests.e2e.fork_server import FRONT, PRELOAD, same_at_import, server_environment
from tests.rigs.fork_server import NoForkError
from tests.rigs.forked import ForkedProcess, ForkingProcess


class ForkServer(ForkingProcess):
    """A process that has imported vLLM in one environment. It ends with this process, and every engine with it."""

    def __init__(self, environment: dict[str, str], modules: Sequence[str] = (FRONT, *PRELOAD)) -> None:
        super().__init__("tests.e2e.fork_server", server_environment(environment), modules)

    def start(self, options: EngineOptions, log: Path) -> EngineProcess:
        """As `start_process`. Raises EngineProcessError where the server forks nothing."""
        environment = options.process_environment()
        if not same_at_import(environment, self.client.environment):
            return start_process(options, log)
        commands, stdin = os.pipe()
        stdout, answers = os.pipe()
        request = pickle.dumps(environment) + pickle.dumps(options.engine_arguments())
        try:
            with log.open("a") as stderr:
                pid, status = self.fork([commands, answers, stderr.fileno()], request)
        except NoForkError as error:
            os.close(stdin)
            os.close(stdout)
            raise EngineProcessError(f"no fork: {error}\n{self.log}") from error
        finally:
            os.close(commands)
            os.close(answers)
        return ForkedProcess(pid, status, os.fdopen(stdin, "w"), os.fdopen(stdout))


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
