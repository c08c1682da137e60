"""An engine in a process of its own that holds what it was lent, for tests that kill or stop it.

`python -m tests.rigs.engine_process SOCKET ENGINE_ID reserve|acquire PROMPT CHUNKS`: answers each line on stdin
with one on stdout. The first line it prints names its extents. `locate PROMPT CHUNKS SECONDS` is answered by the
boundary, `check` by whether its extents are as they were.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Self

from kvdepot.core.calls import AcquireOutcome, LocateCall, ReserveOutcome
from kvdepot.proto.methods import decode_reply

from tests.rigs.raw_client import RawEngine, keys_of, payload_of
from tests.rigs.stopping import stop

_EXTENT = struct.Struct("<5Q")
_ROOT = Path(__file__).parents[2]


class EngineProcess:
    """The test's end of it. `extents` are (offset, length) in the arena, in bytes."""

    def __init__(self, grpc_socket: Path, engine_id: str, verb: str, prompt: str, chunks: int) -> None:
        arguments = [str(grpc_socket), engine_id, verb, prompt, str(chunks)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.engine_process", *arguments],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            numbers = [int(number) for number in self._read().split()]
            self.extents = list(zip(numbers[::2], numbers[1::2], strict=True))
        except BaseException:  # what does not begin must not stay either
            self.close()
            raise

    def ask(self, line: str) -> str:
        self.say(line)
        return self._read()

    def say(self, line: str) -> None:
        """Without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the engine process ended"
        return line

    def suspend(self) -> None:
        stop(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def main(grpc_socket: str, engine_id: str, verb: str, prompt: str, chunks: str) -> None:
    engine = RawEngine(Path(grpc_socket), engine_id)
    keys = keys_of(prompt, int(chunks))
    if verb == "reserve":
        _, outcomes, packed = engine.reserve(keys)
        assert set(outcomes) == {ReserveOutcome.GRANTED}
        engine.write(keys, packed)
    else:
        _, outcome, packed = engine.acquire(keys)
        assert outcome is AcquireOutcome.GRANTED
    extents = [(index, offset, length) for index, _, offset, length, _ in _EXTENT.iter_unpack(packed)]
    print(*[f"{offset} {length}" for _, offset, length in extents], flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "locate":
            call = engine.locate_call(keys_of(words[0], int(words[1])), "asked", wait_seconds=float(words[2]))
            print(decode_reply(LocateCall, engine.stub.Locate(call)).boundary_tokens, flush=True)
            continue
        assert verb == "check"
        at = dict.fromkeys(range(len(keys)), 0)
        same = True
        for index, offset, length in extents:
            expected = payload_of(keys[index])[at[index] : at[index] + length]
            same = same and engine.arena[offset : offset + length] == expected
            at[index] += length
        print("same" if same else "changed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
