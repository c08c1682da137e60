"""`kvdepotctl top` beside a real daemon that engines use: lines of JSON, a terminal, a daemon that goes and comes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, dense_spec, keys_of

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SGR = re.compile(rb"\x1b\[([0-9;]*)m")
OBJECT_BYTES = 16 << 10
LOADED_CHUNKS = 2
COMMAND = [sys.executable, "-m", "kvdepot.client.ctl.app", "--timeout", "30", "--endpoint"]


@contextlib.contextmanager
def busy(daemon: DaemonProcess) -> Iterator[None]:
    """An engine that stores, looks up, loads and misses all the time."""
    stop, begun = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with RawEngine(daemon.socket, "busy", spec=dense_spec("a-model", OBJECT_BYTES)) as engine:
                number = 0
                while not stop.wait(0.01):
                    keys = keys_of(f"p{number}", LOADED_CHUNKS)
                    engine.store(keys)
                    engine.locate(keys)
                    engine.load(keys)
                    engine.locate(keys_of(f"none{number}", 2))
                    number += 1
                    begun.set()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(patient(60))
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


@pytest.mark.requirement("P10")
def test_a_line_of_json_for_each_look_says_what_was_done_a_second(new_daemon: DaemonProcess) -> None:
    with busy(new_daemon):
        done = kvdepotctl(new_daemon, "top", "--json", "--interval", "1", "--count", "4")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 4
    last = lines[-1]
    busiest = max(lines, key=lambda line: line["per_second"]["locates"])  # a machine may stand still in any second
    flow = busiest["per_second"]
    assert 0 < flow["locate_hits"] < flow["locates"]
    # A hit is counted at the end of its load, which may be in the next interval.
    one_load = LOADED_CHUNKS * CHUNK_TOKENS
    assert flow["hit_tokens"] == pytest.approx(flow["acquired_objects"] * CHUNK_TOKENS, abs=one_load)
    assert flow["hit_tokens"] > one_load
    assert flow["granted_read_bytes"] == pytest.approx(flow["acquired_objects"] * OBJECT_BYTES)
    assert flow["committed_objects"] > 0
    assert flow["misses"]["unknown"] > 0
    assert [engine["engine_id"] for engine in last["engines"]] == ["busy"]
    (ram,) = last["tiers"]
    assert (ram["name"], ram["state"]) == ("ram", "ready")
    assert ram["per_second"]["read_bytes"] == last["per_second"]["granted_read_bytes"]
    assert ram["objects"] > lines[0]["tiers"][0]["objects"] > 0
    assert [one["seconds"] >= 1 for one in lines] == [True] * 4


@pytest.mark.requirement("O1")
def test_without_a_terminal_screens_follow_each_other(new_daemon: DaemonProcess) -> None:
    done = kvdepotctl(new_daemon, "top", "--interval", "0.1", "--count", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("HEALTH_") == done.stdout.count("\nTRAFFIC") == 2
    assert "none is attached" in done.stdout
    assert "\x1b" not in done.stdout and "q quit" not in done.stdout


@pytest.mark.requirement("O1")
def test_once_prints_one_screen_of_what_engines_do(new_daemon: DaemonProcess) -> None:
    with busy(new_daemon):
        done = kvdepotctl(new_daemon, "top", "--once", "--interval", "3")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) == 200
    assert [line for line in lines if line.startswith("unknown  ")]
    assert [line for line in lines if ("busy" in line and "0/1" in line) or "1/1" in line]
    (loaded,) = [line for line in lines if line.startswith("loaded ")]
    assert "peak" in loaded and "peak 0 B/s" not in loaded


class Shown:
    """`kvdepotctl top` on a terminal of its own."""

    def __init__(self, daemon: DaemonProcess, *options: str, timeout: str = "30", **environment: str) -> None:
        self.ours, self.theirs = pty.openpty()
        self.found = termios.tcgetattr(self.theirs)
        self.resize(80, 24)
        command = [*COMMAND[:3], "--timeout", timeout, "--endpoint", daemon.endpoint, "top", *options]
        clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command, stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, process_group=0,
            env=clean | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | environment,
        )  # fmt: skip
        self.output = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def read(self) -> None:
        """Take what is there."""
        if select.select([self.ours], [], [], 0.05)[0]:
            self.output += os.read(self.ours, 1 << 16)

    def until(self, condition: Callable[[str], object], what: str) -> str:
        """Return the first screen after this moment of which the condition is true."""
        start, deadline = len(self.output), Deadline(60)
        while True:
            self.read()
            for part in bytes(self.output[start:]).split(b"\x1b[H")[1:]:
                screen = ESCAPES.sub("", part.decode(errors="replace"))
                if "? help" in screen and condition(screen):
                    return screen
            assert not deadline.is_over(), (what, bytes(self.output[-4000:]))

    def ended(self) -> int:
        """Return the exit code, and check that the terminal is as it was found."""
        deadline = Deadline(60)
        while self.process.poll() is None:
            self.read()
            assert not deadline.is_over(), bytes(self.output[-4000:])
        self.read()
        self.check_left()
        return self.process.returncode

    def check_left(self) -> None:
        assert termios.tcgetattr(self.theirs) == self.found
        assert self.output.rindex(b"\x1b[?1049l") > self.output.rindex(b"\x1b[?1049h")
        assert self.output.rindex(b"\x1b[?25h") > self.output.rindex(b"\x1b[?25l")

    def check_taken(self) -> None:
        assert not termios.tcgetattr(self.theirs)[3] & (termios.ICANON | termios.ECHO)


@pytest.mark.requirement("O1")
def test_keys_change_what_a_terminal_shows_and_q_leaves_it_as_it_was(new_daemon: DaemonProcess) -> None:
    with Shown(new_daemon, "--interval", "1") as top:
        first = top.until(lambda screen: "HEALTH_" in screen and "every 1 s" in screen, "the first screen")
        assert [line for line in first.replace("\r", "").split("\n") if len(line) != 80] == []
        assert len(first.split("\n")) == 24
        top.check_taken()
        for keys, wanted in (
            ("?", "kvdepotctl explain ID"), ("x", "TRAFFIC"),
            ("+", "every 2 s"), ("+", "every 5 s"), ("-", "every 2 s"),
            ("m", "MISSES SINCE THE START"), ("m", "MISSES IN"),
            ("r", "none of the latest requests has missed"), ("r", "none is remembered"),
            ("p", "paused"), ("\x1b[A\x1bOP", "paused"), ("p", "every 2 s"),
        ):  # fmt: skip
            top.press(keys)
            top.until(lambda screen, wanted=wanted: wanted in screen, wanted)  # type: ignore[misc]
        top.press("q")
        assert top.ended() == 0


@pytest.mark.requirement("O1")
def test_a_terminal_that_changes_its_size_is_filled_again(new_daemon: DaemonProcess) -> None:
    with Shown(new_daemon, "--interval", "60") as top:
        top.until(lambda screen: "HEALTH_" in screen, "the first screen")
        for columns, rows in ((120, 30), (200, 50), (40, 10), (80, 24)):
            top.resize(columns, rows)
            top.process.send_signal(signal.SIGWINCH)

            def fits(screen: str, columns: int = columns, rows: int = rows) -> bool:
                lines = screen.replace("\r", "").split("\n")
                return (len(lines), {len(line) for line in lines}) == (rows, {columns})

            deadline = Deadline(60)
            start = len(top.output)
            while not any(
                fits(ESCAPES.sub("", part.decode(errors="replace")))
                for part in bytes(top.output[start:]).split(b"\x1b[H")
            ):
                top.read()
                assert not deadline.is_over(), bytes(top.output[start:])
        top.press("q")
        assert top.ended() == 0


@pytest.mark.requirement("O1")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)]
)
def test_signals_that_end_it_leave_the_terminal_as_it_was(
    new_daemon: DaemonProcess, number: signal.Signals, code: int
) -> None:
    with Shown(new_daemon) as top:
        top.until(lambda screen: "HEALTH_" in screen, "the first screen")
        top.process.send_signal(number)
        assert top.ended() == code


@pytest.mark.requirement("O1")
def test_a_stopped_top_leaves_the_terminal_and_takes_it_again_when_it_goes_on(new_daemon: DaemonProcess) -> None:
    with Shown(new_daemon, "--interval", "0.5") as top:
        top.until(lambda screen: "HEALTH_" in screen, "the first screen")
        top.process.send_signal(signal.SIGTSTP)
        stat = Path(f"/proc/{top.process.pid}/stat")

        def stopped() -> bool:
            top.read()
            return stat.read_text().rpartition(")")[2].split()[0] == "T"

        wait_until(stopped, "it is stopped")
        top.read()
        top.check_left()
        top.process.send_signal(signal.SIGCONT)
        top.until(lambda screen: "HEALTH_" in screen, "a screen again")
        top.check_taken()
        top.press("q")
        assert top.ended() == 0


@pytest.mark.requirement("O1")
def test_a_daemon_that_is_gone_or_hangs_is_told_of_and_waited_for_and_keys_go_on(new_daemon: DaemonProcess) -> None:
    with Shown(new_daemon, "--interval", "0.5", timeout="2") as top:
        top.until(lambda screen: "HEALTH_" in screen, "the first screen")
        for go, come in ((new_daemon.kill, new_daemon.start), (new_daemon.suspend, new_daemon.resume)):
            go()
            shown = top.until(lambda screen: "trying again" in screen, "that it is gone")
            assert "no answer for" in shown.splitlines()[0] and "TIERS" in shown
            top.press("?")
            top.until(lambda screen: "kvdepotctl explain ID" in screen, "the help")
            top.press(" ")
            come()
            top.until(lambda screen: "HEALTH_" in screen and "no answer" not in screen, "that it is back")
        new_daemon.suspend()
        top.press("q")
        assert top.ended() == 0
        new_daemon.resume()


@pytest.mark.requirement("O1")
def test_a_terminal_without_color_or_orders_gets_none(new_daemon: DaemonProcess) -> None:
    with Shown(new_daemon, "--count", "2", "--interval", "0.2", NO_COLOR="1") as top:
        assert top.ended() == 0
        colors = [code for codes in SGR.findall(bytes(top.output)) for code in codes.split(b";")]
        assert colors and not [code for code in colors if code[:1] in (b"3", b"4", b"9") and len(code) == 2]
    with Shown(new_daemon, "--count", "2", "--interval", "0.2", TERM="dumb") as top:
        while top.process.poll() is None:
            top.read()
        top.read()
        text = bytes(top.output)
        assert text.isascii() and b"\x1b" not in text
        assert text.count(b"HEALTH_") == 2
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.long(seconds=8)
def test_a_daemon_that_hangs_or_has_ended_is_waited_for_alike(new_daemon: DaemonProcess) -> None:
    command = [*COMMAND[:3], "--timeout", "3", "--endpoint", new_daemon.endpoint, "top", "--json", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline()
            for go, come in ((new_daemon.suspend, new_daemon.resume), (new_daemon.kill, new_daemon.start)):
                go()
                assert "trying again" in process.stderr.readline()
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                come()
                for _ in range(10):  # more than were under way before
                    assert json.loads(process.stdout.readline())["ready"] in (True, False)
            process.send_signal(signal.SIGINT)
            assert process.wait(patient(20)) == 0
        finally:
            process.kill()


def test_no_daemon_at_the_first_look_is_an_error() -> None:
    done = kvdepotctl("unix:///nonexistent/kvdepot.sock", "top", "--count", "1")
    assert done.returncode == 3
    assert "no daemon at" in done.stderr
