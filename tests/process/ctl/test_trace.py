"""`kvdepotctl trace`: the real command records what engines ask a real daemon for, and replays it."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, keys_of

KEYS = keys_of("traced", 4)


@contextmanager
def recording(daemon: DaemonProcess, engine: RawEngine, file: Path) -> Iterator[subprocess.Popen[str]]:
    """`kvdepotctl trace record`, which has got a first request."""
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", daemon.endpoint, "--timeout", "30"]
    process = subprocess.Popen([*command, "trace", "record", str(file)], stderr=subprocess.PIPE, text=True)
    numbers = itertools.count()

    def begun() -> bool:
        engine.locate(KEYS[:1], f"early-{next(numbers)}")
        return file.exists() and "hash_ids" in file.read_text()

    try:
        wait_until(begun, "it records")
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def requests(file: Path) -> list[dict[str, Any]]:
    return [record for record in map(json.loads, file.read_text().splitlines()) if "hash_ids" in record]


def test_what_engines_ask_for_is_recorded_and_replayed(new_daemon: DaemonProcess, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with RawEngine(new_daemon.socket, "one", label="a-model") as engine, recording(new_daemon, engine, file) as process:
        engine.locate(KEYS[:2], "first")
        engine.store(KEYS[:2], "first")
        engine.end_request("first")
        for _ in range(3):  # asked again while it waits: one request
            assert engine.locate(KEYS, "second") == 2 * CHUNK_TOKENS
        engine.end_request("second")
        engine.locate(KEYS)  # nobody's request
        engine.locate([KEYS[0], *keys_of("other", 1)], "third")
        wait_until(lambda: requests(file)[-1]["boundary_tokens"] == CHUNK_TOKENS, "all are there")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=patient(60))
        assert process.returncode == 0, said
    first, second, third = requests(file)[-3:]
    early = len(requests(file)) - 3
    assert (first["hash_ids"], first["boundary_tokens"], first["input_length"]) == ([0, 1], 0, 2 * CHUNK_TOKENS)
    assert (second["hash_ids"], second["boundary_tokens"]) == ([0, 1, 2, 3], 2 * CHUNK_TOKENS)
    assert third["hash_ids"] == [0, 4]
    assert first["timestamp"] <= second["timestamp"] <= third["timestamp"]
    (namespace,) = (one for one in map(json.loads, file.read_text().splitlines()) if "groups" in one)
    assert (namespace["label"], namespace["chunk_tokens"]) == ("a-model", CHUNK_TOKENS)
    (group,) = namespace["groups"]
    assert (group["kind"], group["block_bytes"] * CHUNK_TOKENS) == ("attention", OBJECT_BYTES * group["block_tokens"])
    assert f"{len(requests(file))} requests, 5 different chunks" in said
    assert KEYS[0].hex() not in file.read_text()

    replayed = kvdepotctl(new_daemon, "trace", "replay", str(file), "--ram", "64MiB", "--json")
    assert replayed.returncode == 0, replayed.stderr
    told = json.loads(replayed.stdout)
    assert told["requests"] == len(requests(file))
    assert told["unique_bytes"] == 5 * OBJECT_BYTES
    asked = (early + 2 + 4 + 2) * CHUNK_TOKENS
    assert told["replayed"] == [
        {"ram_bytes": 64 << 20, "disk_bytes": 0, "write": None, "eviction": "adaptive", "chunk_factor": 1,
             "asked_tokens": asked,
         "hit_tokens": (early - 1 + 1 + 2 + 1) * CHUNK_TOKENS,
         "hit_rate": pytest.approx((early + 3) * CHUNK_TOKENS / asked, abs=1e-4)}
    ]  # fmt: skip
    assert told["recorded"]["hit_tokens"] == (2 + 1) * CHUNK_TOKENS


def test_it_ends_by_itself_after_so_many_seconds_and_writes_to_stdout(new_daemon: DaemonProcess) -> None:
    done = kvdepotctl(new_daemon, "trace", "record", "-", "--seconds", "0.6")
    assert (done.returncode, done.stdout) == (0, '{"kvdepot_trace":1}\n')
    assert "0 requests" in done.stderr


def test_a_daemon_that_stops_ends_it_and_what_was_recorded_is_kept(new_daemon: DaemonProcess, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with RawEngine(new_daemon.socket, "one") as engine, recording(new_daemon, engine, file) as process:
        before = len(requests(file))
        assert new_daemon.stop() == 0
        _, said = process.communicate(timeout=patient(60))
        assert process.returncode == 3, said
        assert "Traceback" not in said
        assert len(requests(file)) >= before > 0
    assert "Traceback" not in new_daemon.log


def test_a_second_recording_into_a_file_is_refused_and_a_full_disk_is_named(
    new_daemon: DaemonProcess, tmp_path: Path
) -> None:
    file = tmp_path / "trace"
    with RawEngine(new_daemon.socket, "one") as engine, recording(new_daemon, engine, file):
        before = file.read_text()
        second = kvdepotctl(new_daemon, "trace", "record", str(file), "--seconds", "0.1")
        assert (second.returncode, f"{file}: another recording" in second.stderr) == (1, True), second.stderr
        assert file.read_text().startswith(before)
    full = kvdepotctl(new_daemon, "trace", "record", "/dev/full", "--seconds", "0.1")
    assert (full.returncode, full.stderr.splitlines()[0]) == (1, "Error: /dev/full: No space left on device")
    again = kvdepotctl(new_daemon, "trace", "record", str(file), "--seconds", "0.1")
    assert (again.returncode, file.read_text()) == (0, '{"kvdepot_trace":1}\n')


def test_replay_says_what_kvdepotd_says_of_a_file_that_is_no_trace(new_daemon: DaemonProcess, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("{}\n")
    done = kvdepotctl(new_daemon, "trace", "replay", str(tmp_path / "trace"))
    assert (done.returncode, "line 1: a trace of version 1" in done.stderr) == (2, True)
    assert "--checkpoints" in kvdepotctl(new_daemon, "trace", "replay", "--help").stdout
