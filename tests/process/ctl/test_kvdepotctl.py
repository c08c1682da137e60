"""`kvdepotctl ls` and `describe`, the real command against a real daemon with a disk tier."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvdepot.core.calls import RequestEnd
from kvdepot.core.listing import CHUNKS_PER_PAGE_MAX

from tests.rigs.ctl_process import kvdepotctl, record, text
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, dense_spec, status_of
from tests.rigs.stopping import stop

OBJECT = 16 << 10
MANY = CHUNKS_PER_PAGE_MAX + 50
SPEC = dense_spec("a-model", OBJECT)
OTHER = replace(SPEC, identity={"model": '"toy"', "cache_config.cache_dtype": '"fp8"'}, epoch="later")


def keys_of(name: str, count: int) -> list[bytes]:
    return [blake2b(f"{name}{number}".encode(), digest_size=16).digest() for number in range(count)]


SHORT = keys_of("short", 3)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    config = f"""
[[tier]]
name = "nvme"
kind = "disk"
path = "{tmp_path_factory.mktemp("tier")}"
capacity = "64MiB"
write = "commit"
"""
    with DaemonProcess(ram="512MiB", config=config) as running:
        wait_until(lambda: _tier(running).state == "ready", "the tier is open", 60)
        yield running


@pytest.fixture(scope="module")
def engine(daemon: DaemonProcess) -> Iterator[RawEngine]:
    """Stored by one engine: a short prompt and a long one; by another, of another namespace, one chunk."""
    with RawEngine(daemon.socket, "engine-0", spec=SPEC) as one, RawEngine(daemon.socket, "other", spec=OTHER) as other:
        one.store(SHORT)
        one.store(keys_of("long", MANY))
        other.store(SHORT[:1])
        wait_until(lambda: _tier(daemon).objects == len(SHORT) + MANY + 1, "everything is written", 60)
        wait_until(lambda: not status_of(daemon.socket).tiers[0].lent_bytes, "no worker reads the objects", 60)
        yield one


def _tier(daemon: DaemonProcess) -> Any:
    return status_of(daemon.socket).tiers[1]


def test_ls_shows_the_namespaces_with_what_each_tier_holds(daemon: DaemonProcess, engine: RawEngine) -> None:
    shown = {one["namespace_id"]: one for one in record(daemon, "ls")["namespaces"]}
    own = shown[engine.namespace.hex()]
    count = len(SHORT) + MANY
    assert (own["label"], own["chunks"], own["sessions"]) == ("a-model", count, 1)
    assert own["tiers"] == [
        {"tier": tier, "objects": {"attention": count}, "size_bytes": count * OBJECT} for tier in ("ram", "nvme")
    ]
    assert 0 <= own["idle_seconds"] < 600
    assert shown[OTHER.namespace_id().hex()]["epoch"] == "later"
    table = text(daemon, "ls")
    assert all(word in table for word in (engine.namespace.hex()[:12], "a-model", "nvme", f"attention:{count}", "ago"))


def test_ls_shows_the_chunks_of_a_namespace_over_several_pages(daemon: DaemonProcess, engine: RawEngine) -> None:
    name = engine.namespace.hex()[:6]
    listed = record(daemon, "ls", name, "--limit", "10000")
    assert listed["tiers"] == ["ram", "nvme"]
    assert listed["next_cursor"] == ""
    by_key = {one["key"]: one for one in listed["chunks"]}
    assert len(by_key) == len(listed["chunks"]) == len(SHORT) + MANY
    held = {"kinds": ["attention"], "size_bytes": OBJECT}
    assert by_key[SHORT[1].hex()] == {
        "key": SHORT[1].hex(),
        "parent": SHORT[0].hex(),
        "boundary_tokens": 2 * CHUNK_TOKENS,
        "usable": True,
        "tiers": {"ram": held, "nvme": held},
        "incomplete": [],
    }
    assert by_key[SHORT[0].hex()]["parent"] is None


@pytest.mark.requirement("P10")
def test_explain_tells_what_became_of_a_request(daemon: DaemonProcess, engine: RawEngine) -> None:
    asked = [*SHORT, *keys_of("nowhere", 2)]
    assert engine.locate(asked, "cmpl-1-0-abc") == len(SHORT) * CHUNK_TOKENS
    (explained,) = record(daemon, "explain", "cmpl-1")
    assert (explained["engine_id"], explained["request_id"]) == ("engine-0", "cmpl-1-0-abc")
    lookup = explained["lookup"]
    assert lookup["chunks_by_tier"] == {"ram": 3, "nvme": 3}
    assert (lookup["missing_chunk"], lookup["missing_key"]) == (3, asked[3].hex())
    shown = text(daemon, "explain", "cmpl-1")
    assert shown.startswith("RUNNING") and "miss      chunk 3" in shown
    (listed,) = record(daemon, "requests", "--last", "1")
    assert [listed[name] for name in ("outcome", "request_id", "lookup")] == ["running", "cmpl-1-0-abc", lookup]
    assert "cmpl-1-0-abc  " in text(daemon, "requests").splitlines()[1]
    assert text(daemon, "requests", "--misses").strip() == "no request has missed"
    engine.locate(keys_of("never stored", 2), "cmpl-2-0-abc")
    engine.end_request("cmpl-2-0-abc", RequestEnd(miss="unknown", prompt_tokens=600))
    (missed,) = record(daemon, "requests", "--misses")
    assert (missed["outcome"], missed["request_id"]) == ("miss", "cmpl-2-0-abc")
    _, row = text(daemon, "requests", "--misses").splitlines()
    assert row.startswith("cmpl-2-0-abc  ") and row.split()[-4:] == ["600", "0", "-", "unknown"]
    done = kvdepotctl(daemon, "explain", "no-such")
    assert done.returncode == 1 and "no-such" in done.stderr


@pytest.mark.requirement("I4")
def test_a_cursor_goes_on_where_a_listing_stopped(daemon: DaemonProcess, engine: RawEngine) -> None:
    name = engine.namespace.hex()
    keys: list[str] = []
    cursor = ""
    while True:
        page = record(daemon, "ls", name, "--limit", "140", "--cursor", cursor)
        assert len(page["chunks"]) <= 140
        keys += [one["key"] for one in page["chunks"]]
        cursor = page["next_cursor"]
        if not cursor:
            break
    assert len(keys) == len(set(keys)) == len(SHORT) + MANY
    assert "--cursor" in text(daemon, "ls", name, "--limit", "2")
    namespaces = record(daemon, "ls", "--limit", "1")
    assert len(namespaces["namespaces"]) == 1
    (rest,) = record(daemon, "ls", "--cursor", namespaces["next_cursor"])["namespaces"]
    assert rest["namespace_id"] != namespaces["namespaces"][0]["namespace_id"]


def test_ls_takes_the_beginning_of_a_key(daemon: DaemonProcess, engine: RawEngine) -> None:
    begins = SHORT[2].hex()[:8]
    (chunk,) = record(daemon, "ls", f"{engine.namespace.hex()}/{begins.upper()}")["chunks"]
    assert chunk["key"] == SHORT[2].hex()
    assert SHORT[2].hex()[:12] in text(daemon, "ls", f"{engine.namespace.hex()}/{begins}")
    assert "no chunk is there" in text(daemon, "ls", f"{engine.namespace.hex()}/{'0' * 32}")


def test_describe_shows_every_field_of_a_namespace(daemon: DaemonProcess, engine: RawEngine) -> None:
    name = engine.namespace.hex()[:8]
    found = record(daemon, "describe", name)
    assert found["fields"] == SPEC.fields_by_path()
    assert found["object_bytes"] == {"attention": OBJECT}
    assert found["groups"][0]["block_tokens"] == 16
    assert found["engines"] == ["engine-0"]
    assert found["registered"] is True
    table = text(daemon, "describe", name)
    assert all(word in table for word in (engine.namespace.hex(), "engine-0", '"toy"', "256 tokens", "16.00 KiB"))


def test_describe_says_which_fields_differ(daemon: DaemonProcess, engine: RawEngine) -> None:
    one, other = engine.namespace.hex(), OTHER.namespace_id().hex()
    assert record(daemon, "describe", one, "--differs", other) == {
        "first": one,
        "second": other,
        "differences": [
            {"field": "epoch", "first": '""', "second": '"later"'},
            {"field": "identity.cache_config.cache_dtype", "first": None, "second": '"fp8"'},
        ],
    }
    assert text(daemon, "describe", one, "--differs", other).splitlines() == SPEC.differences(OTHER)
    assert "the same" in text(daemon, "describe", one, "--differs", one)
    chunk = kvdepotctl(daemon, "describe", f"{one}/{SHORT[0].hex()}", "--differs", other)
    assert chunk.returncode == 2
    assert "--differs" in chunk.stderr


@pytest.mark.requirement("I6")
def test_describe_shows_a_chunk_in_every_tier_and_who_is_lent_it(daemon: DaemonProcess, engine: RawEngine) -> None:
    lease_id, _, _ = engine.acquire([SHORT[1]])
    name = f"{engine.namespace.hex()[:8]}/{SHORT[1].hex()[:8]}"
    found = record(daemon, "describe", name)
    assert found["key"] == SHORT[1].hex()
    assert (found["depth"], found["path"], found["children"]) == (1, [SHORT[0].hex()], 1)
    ram, nvme = found["objects"]
    assert (ram["tier"], ram["kind"], ram["state"], ram["size_bytes"]) == ("ram", "attention", "complete", OBJECT)
    assert ram["generation"] % 2 == 0
    (loan,) = ram["loans"]
    assert loan == {
        "engine_id": "engine-0", "pids": [os.getpid()], "mode": "read", "lease_id": f"{lease_id:016x}",
    }  # fmt: skip
    assert nvme["tier"] == "nvme"
    assert nvme["sequence"] > 0
    assert nvme["stored_bytes"] == OBJECT
    assert nvme["checksum"] == ram["checksum"]
    shown = text(daemon, "describe", name)
    assert all(word in shown for word in (SHORT[1].hex(), "engine-0", str(nvme["sequence"]), ram["checksum"][:12]))
    engine.release(lease_id)
    assert "lent to nobody" in text(daemon, "describe", name)


def test_what_is_unknown_or_ambiguous_names_candidates(daemon: DaemonProcess, engine: RawEngine) -> None:
    name = engine.namespace.hex()
    beyond = next(digits for digits in ("00", "01", "02") if not name.startswith(digits))
    beyond += "0" * 28
    unknown = kvdepotctl(daemon, "describe", beyond)
    assert unknown.returncode == 1
    assert "no namespace begins with" in unknown.stderr
    assert f"{name[:12]} (a-model)" in unknown.stderr
    common = next(
        digit for digit in "0123456789abcdef" if sum(one.hex()[0] == digit for one in keys_of("long", 99)) > 1
    )
    ambiguous = kvdepotctl(daemon, "describe", f"{name}/{common}")
    assert ambiguous.returncode == 2
    assert "several chunks begin with" in ambiguous.stderr
    missing = kvdepotctl(daemon, "describe", f"{name}/{'0' * 32}")
    assert missing.returncode == 1
    assert "no chunk" in missing.stderr
    assert kvdepotctl(daemon, "describe", f"{name}/{'0' * 31}").returncode == 1
    for wrong in ("nothex", "/00", f"{name}/xyz"):
        refused = kvdepotctl(daemon, "ls", wrong)
        assert refused.returncode == 2, refused
        assert "hexadecimal" in refused.stderr
    for where in ([name], []):
        refused = kvdepotctl(daemon, "ls", *where, "--cursor", "xx")
        assert refused.returncode == 2
        assert "--cursor" in refused.stderr and "page_token" not in refused.stderr


def test_fields_that_no_engine_has_registered_are_said_to_be_unknown(tmp_path: Path) -> None:
    with DaemonProcess() as restarted:
        with RawEngine(restarted.socket, "engine-0", spec=SPEC) as one:
            one.store(SHORT)
            wait_until(lambda: one.counter("checksummed_objects") == len(SHORT), "the sums", 60)
            name = one.namespace.hex()
        restarted.stop()
        restarted.start()
        assert record(restarted, "describe", name)["registered"] is False
        assert "once an engine registers it" in text(restarted, "describe", name)
        refused = kvdepotctl(restarted, "describe", name, "--differs", name)
        assert refused.returncode == 1
        assert "not known" in refused.stderr


def test_a_daemon_that_knows_no_listing_is_told_apart_from_none(tmp_path: Path) -> None:
    path = tmp_path / "old.sock"
    older = grpc.server(ThreadPoolExecutor(1))
    older.add_insecure_port(f"unix:{path}.admin")
    older.start()
    try:
        refused = kvdepotctl(f"unix://{path}", "ls")
    finally:
        older.stop(0).wait()
    assert refused.returncode == 3
    assert "older than kvdepotctl" in refused.stderr


@pytest.mark.parametrize("left", ["nothing", "a socket that nobody listens on", "the engines' socket alone"])
def test_without_a_daemon_one_line_says_where_it_should_be(tmp_path: Path, left: str) -> None:
    path, why = tmp_path / "k.sock", "No such file or directory"
    if left.startswith("a socket"):
        with socket.socket(socket.AF_UNIX) as ended:
            ended.bind(f"{path}.admin")
        why = "Connection refused"
    elif left.startswith("the"):
        path.touch()
    missing = kvdepotctl(f"unix://{path}", "ls")
    assert missing.returncode == 3
    expected = f"no daemon at unix://{path} ({why}). Start it: kvdepotd serve. Or name its socket with --endpoint"
    if left.startswith("the"):
        expected = (
            f"the daemon at unix://{path} has its operators' socket elsewhere ([daemon] admin): name it with --admin"
        )
    assert missing.stderr == f"kvdepotctl: {expected}\n"


def test_tables_that_no_terminal_shows_have_unbroken_ids(daemon: DaemonProcess, engine: RawEngine) -> None:
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", daemon.endpoint]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    for verb in ("ls", "status"):
        shown = subprocess.run([*command, verb], capture_output=True, text=True, check=True, env=environment)
        assert engine.namespace.hex()[:12] in shown.stdout


def test_a_reader_that_has_enough_says_nothing_of_the_daemon(daemon: DaemonProcess, engine: RawEngine) -> None:
    """`kvdepotctl ls | grep -q` under pipefail: 1 would say that there is nothing by that name."""
    reader, writer = os.pipe()
    os.close(reader)
    for verb in (["ls", engine.namespace.hex()], ["ls", "--json"], ["status"]):
        command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", daemon.endpoint, *verb]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (141, "")
    os.close(writer)


def test_usage_is_checked_before_the_daemon_is_asked() -> None:
    missing = kvdepotctl("unix:///nowhere/d.sock", "prefetch")
    assert missing.returncode == 2
    assert "Missing argument 'NAMESPACE[/KEY]'" in missing.stderr
    shown = kvdepotctl("unix:///nowhere/d.sock", "--version")
    assert (shown.returncode, shown.stdout.startswith("kvdepotctl ")) == (0, True)


def test_a_daemon_that_gets_no_cpu_for_a_while_is_waited_for(daemon: DaemonProcess) -> None:
    """As long as the call may take; gRPC gives up a connection by itself after its shortest backoff."""
    stop(daemon.pid)
    going_on = threading.Timer(1.0, os.kill, (daemon.pid, signal.SIGCONT))
    going_on.start()
    try:
        shown = kvdepotctl(daemon, "status")
    finally:
        going_on.join()
    assert shown.returncode == 0, shown.stderr


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("verb", ["explain {}", "ls --cursor {}", "quota set 1GiB --tenant {}", "verify --tier {}"])
def test_an_argument_that_no_message_can_have_is_wrong_usage(daemon: DaemonProcess, verb: str) -> None:
    refused = kvdepotctl(daemon, *(word.format(os.fsdecode(b"\xff")) for word in verb.split()))
    assert (refused.returncode, "no message can have this argument" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.requirement("P10")
def test_a_limit_above_all_messages_lists_everything(daemon: DaemonProcess, engine: RawEngine) -> None:
    every = record(daemon, "ls", engine.namespace.hex(), "--limit", str(10**20))
    assert (len(every["chunks"]), every["next_cursor"]) == (len(SHORT) + MANY, "")
    assert len(record(daemon, "ls", "--limit", str(10**20))["namespaces"]) == 2
