"""Engines that write and read known objects through a daemon until it is gone, or they are told to stop."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Self

import grpc
from kvdepot.core.calls import AcquireOutcome
from kvdepot.core.keys import NamespaceSpec

from tests.rigs.known_objects import Known, KnownEngine
from tests.rigs.patience import Deadline

_ATTACH_SECONDS = 20.0
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class DiskLoad:
    """One thread an engine. What an engine saw wrong is raised by `stop`."""

    def __init__(self, socket: Path, specs: list[NamespaceSpec], *, seed: int, prompts: int) -> None:
        """`prompts`: how many there are to choose from, of each namespace."""
        self._socket = socket
        self._prompts = prompts
        self._seed = seed
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self.counts: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(spec, random.Random(f"{seed} {spec.label} {time.monotonic()}")))
            for spec in specs
        ]

    def start(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for error in self._errors:
            raise error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, spec: NamespaceSpec, rng: random.Random) -> None:
        try:
            engine = self._attach(spec)
            if engine is not None:
                with engine:
                    while not self._stop.is_set():
                        self._step(engine, rng)
        except grpc.RpcError as error:
            if error.code() not in _GONE:
                self._errors.append(error)
        except BaseException as error:  # noqa: BLE001 - raised again by stop()
            self._errors.append(error)

    def _attach(self, spec: NamespaceSpec) -> KnownEngine | None:
        """The daemon may be starting, or be killed while it does. None: it was told to stop before."""
        until = Deadline(_ATTACH_SECONDS)
        while not self._stop.is_set():
            with contextlib.suppress(OSError, grpc.RpcError):
                return KnownEngine(self._socket, spec, self._seed & 0xFFFF)
            assert not until.is_over(), f"{spec.label} cannot attach"
            time.sleep(0.01)
        return None

    def _step(self, engine: KnownEngine, rng: random.Random) -> None:
        number = rng.randrange(self._prompts)
        choice = rng.random()
        if choice < 0.5:
            self.counts["put"] += engine.put(engine.prompt(number))
        elif choice < 0.9:
            self.counts["served_tokens"] += engine.get_prompt(number)
        else:
            outcome = engine.get([rng.choice(engine.prompt(number))])
            self.counts[f"get_{outcome.name.lower()}"] += 1


def serve_all(engine: KnownEngine, wanted: set[tuple[str, str]], prompts: int, seconds: float = 10.0) -> set[Known]:
    """Load these objects (key, kind) one by one; those that are not served.

    LATER is asked again, and MISSING once or twice: a worker may have been killed over it.
    """
    missing: set[Known] = set()
    for known in all_objects(engine, prompts):
        if (known.key.hex(), known.kind.name.lower()) not in wanted:
            continue
        until = Deadline(seconds)
        misses = 0
        while (outcome := engine.get([known])) is not AcquireOutcome.GRANTED:
            misses += outcome is not AcquireOutcome.LATER
            if misses > 2 or until.is_over():
                missing.add(known)
                break
            time.sleep(0.02)
    return missing


def all_objects(engine: KnownEngine, prompts: int) -> dict[Known, None]:
    """Of the first so many prompts, parents first."""
    return dict.fromkeys(known for number in range(prompts) for known in engine.prompt(number))
