"""What verbs with tables print: golden screens at three widths.

`python -m tests.unit.client.ctl.test_screens` writes the golden screens. Look at them before they are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Final
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from kvdepot.client.ctl.app import cli
from kvdepot.client.ctl.benching import Measured, Shape
from kvdepot.client.ctl.commands.bench import print_measured
from kvdepot.client.ctl.commands.bench_engine import print_found
from kvdepot.client.ctl.commands.doctor import echo_table
from kvdepot.client.ctl.doctor.findings import DAEMON, HOST, Finding, Outcome
from kvdepot.client.ctl.engine_bench.measuring import COLD, DEPOT, OWN, Asked, Found, Way
from kvdepot.core.calls import ROOT_KEY
from kvdepot.core.control import (
    ConfigChange,
    ConfigReply,
    PrefetchReply,
    QuotaEntry,
    QuotaSubject,
    ReloadReply,
    VerifiedTier,
    VerifyReply,
)
from kvdepot.core.epochs import Epochs
from kvdepot.core.groups import GroupSpec
from kvdepot.core.health import health
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.kinds import Kind
from kvdepot.core.listing import (
    Chunk,
    ChunkDescription,
    ChunkPage,
    LoanDescription,
    NamespaceContents,
    NamespaceDescription,
    NamespacePage,
    ObjectDescription,
    TierContents,
)
from kvdepot.core.report import (
    DaemonStatus,
    NamespaceStatus,
    PeerStatus,
    PinStatus,
    QuotaOwnerStatus,
    QuotaStatus,
    ReaderStatus,
    SessionStatus,
    SwitchesStatus,
    TenantStatus,
    TierStatus,
)
from rich.console import Console

GOLDEN: Final = Path(__file__).parents[3] / "golden/screens"
WIDTHS: Final = (80, 120, 200)
ENGINE: Final = "0b8dfe7b-c3a1-4f4e-a1c3-0e94ad6ac3b5"
NAMESPACE: Final = bytes.fromhex("5d6f6014bad5c4cbfa4eb4dc6cc90c54")
OTHER: Final = bytes.fromhex("1b4fd7fa54e80b2e5c1e4f4ea1c30e94")
KEYS: Final = tuple(bytes.fromhex(f"{start}{'0' * 24}") for start in ("61833ed5", "564cb76e", "9ee94f0d"))
KINDS: Final = bytes([Kind.ATTENTION, Kind.STATE])
PEER: Final = PeerStatus(
    "10.0.0.2:7448", "ready", lane="nixl", reading_objects=2, loaded_objects=18_204, loaded_bytes=76 << 30,
    load_seconds=140.0, failed_objects={"gone": 12, "timed_out": 3}, lookups=90_112, lookup_seconds=55.0,
)  # fmt: skip
TIERS: Final = (
    TierStatus(
        "ram", "ram", 64 << 30, 64 << 30, 51 << 30, 3 << 30, objects=41_820, unverified_objects=12, state="ready",
        prefetched_objects=7, prefetched_bytes=21 << 20, prefetching_requests=2,
    ),
    TierStatus(
        "nvme", "disk", 2 << 40, 2 << 40, 1400 << 30, objects=1_204_118, state="degraded", reason="28 MiB short",
        breaker="closed", queued_objects=31, queued_bytes=93 << 20, written_today_bytes=310 << 30,
        quarantined_bytes=3 << 20,
    ),
    TierStatus(
        "fleet", "peer", 64 << 30, 64 << 30, 12 << 30, objects=9_300, state="ready", breaker="closed",
        peers=(
            PEER,
            replace(PEER, address="10.0.0.3:7448", state="disabled", reason="connection refused", breaker="open",
                    reading_objects=0, loaded_objects=0, loaded_bytes=0, load_seconds=0.0, lookups=0,
                    lane="stream: UCX has no transport", failed_objects={}),
        ),
    ),
)  # fmt: skip
QUOTA: Final = QuotaStatus(
    "a", "", "nvme", 200 << 30, 1, (QuotaOwnerStatus("a", "", 231 << 30, 4, 5),), refused_objects=4, evicted_objects=5
)
STATUS: Final = DaemonStatus(
    "0.3.0", 4711, 11_520.0, ready=True, reason="", arena_id=0x6F0205D90003, run=7,
    tiers=TIERS,
    sessions=(
        SessionStatus(
            ENGINE, 4, 4, scheduler_attached=True, credit_bytes=8 << 30, credit_used_bytes=1290 << 20, leases=3,
            lent_objects=112, pids=(7352, 7353, 7354, 7355),
        ),
    ),
    namespaces=(
        NamespaceStatus(NAMESPACE, "Qwen3NextForCausalLM bfloat16", "a", "", 384,
                        {Kind.ATTENTION: 40_020, Kind.STATE: 1_800}, 51 << 30, bumps=1),
    ),
    counters={
        "prompt_tokens": 44_900_000.0, "served_tokens.engine": 17_062_000.0, "served_tokens.ram": 13_470_000.0,
        "served_tokens.nvme": 1_347_000.0, "saved_prefill_seconds": 2_730.4,
        "tier_written_bytes.nvme/": 332_859_965_440.0,
        "tier_hit_bytes.nvme/": 116_939_000_000.0, "tier_probe_seconds.nvme/": 0.0123, "commits": 116_939_000.0,
        "prefetched_bytes": 1 << 32, "prefetch_used_bytes": 3 << 30, "prefetch_wasted_bytes.evicted": 1 << 28,
    },
    quotas=(QUOTA,),
    pins=(PinStatus(NAMESPACE, KEYS[1], 5400.0, 24, 24, 1536 << 20),),
    tenants=(TenantStatus("a", 20 << 30, 8 << 30, 1290 << 20, 1, 16, 4, 0), TenantStatus("b", 0, 8 << 30, 0, 0, 16)),
    readers=(ReaderStatus("URI:spiffe://cluster/kvdepot", "", 2, 64 << 20, 2_113, 9 << 30, {"evicted": 4}),),
    switches=SwitchesStatus(loads_off_namespaces=(OTHER,), loads_off_seconds=5_400.0),
    epochs=Epochs(bump=1),
)  # fmt: skip
STATUS_WITH_VERDICT: Final = replace(STATUS, health=health(STATUS, lambda family, seconds: {}))
CONTENTS: Final = NamespaceContents(
    NAMESPACE, "Qwen3NextForCausalLM bfloat16", "a", "", 384, 40_020, 1, 2.0,
    (
        TierContents("ram", {Kind.ATTENTION: 40_020, Kind.STATE: 1_800}, 51 << 30),
        TierContents("nvme", {Kind.ATTENTION: 1_180_000}, 1400 << 30),
    ),
)  # fmt: skip
SPEC: Final = NamespaceSpec(
    {"model": '{"name": "Qwen/Qwen3-Next-80B-A3B-Instruct", "dtype": "bfloat16"}', "vllm": '"0.32"'}, 384,
    (
        GroupSpec(Kind.ATTENTION, 384, rank_block_bytes=(1 << 20, 1 << 20), layers=tuple(f"l{n}" for n in range(12))),
        GroupSpec(Kind.STATE, 384, rank_block_bytes=(402 << 10,), replicated=True, layers=("l12",)),
    ),
    {Kind.ATTENTION: 2 << 20, Kind.STATE: 402 << 10}, label="Qwen3NextForCausalLM bfloat16", tenant="a",
)  # fmt: skip
CHUNKS: Final = (
    Chunk(KEYS[0], ROOT_KEY, 384, True, (KINDS, KINDS), (4 << 20, 4 << 20)),
    Chunk(KEYS[1], KEYS[0], 768, True, (KINDS[:1], b""), (2 << 20, 0)),
    Chunk(KEYS[2], KEYS[1], 1152, False, (b"", KINDS[:1]), (0, 2 << 20), incomplete=KINDS[1:]),
)
CHUNK: Final = ChunkDescription(
    CHUNKS[1], ("ram", "nvme"),
    (
        ObjectDescription(
            "ram", Kind.ATTENTION, 2 << 20, "complete", bytes.fromhex("8dd990d3f651") + bytes(10), generation=2,
            extents=1, loans=(LoanDescription(ENGINE, (7352, 7353), "read", 0x6F0205D90003),), pinned=True,
        ),
        ObjectDescription(
            "nvme", Kind.ATTENTION, 2 << 20, "complete", bytes.fromhex("8dd990d3f651") + bytes(10),
            stored_bytes=1843 << 10, sequence=1_099_511_627_777,
        ),
    ),
    (KEYS[0],), depth=1, children=1,
)  # fmt: skip
FINDINGS: Final = (
    Finding("memory", HOST, Outcome.OK, "96 GiB are available"),
    Finding("kernel", HOST, Outcome.SKIPPED, "no permission to read /proc/sys"),
    Finding("write", "nvme", Outcome.FAIL, "no file can be made: Input/output error", "permissions, quota or room of "
            "/mnt/nvme/kvdepot; `dmesg`"),
    Finding("configuration in use", DAEMON, Outcome.WARN, "[ram] capacity is 64GiB, and the file has 128GiB",
            "restart kvdepotd"),
)  # fmt: skip
VERIFIED: Final = VerifyReply(
    (
        VerifiedTier("ram", 20_482, 20_480, 5 << 30, {}, {"being_written": 2}, True),
        VerifiedTier("nvme", 163_840, 163_837, 40 << 30, {"corrupt": 3}, {}, True),
        VerifiedTier("fleet", reason="it is of other daemons"),
    )
)
ENTRIES: Final = (
    QuotaEntry(QuotaSubject("a", None, "nvme"), 200 << 30, by_operator=True),
    QuotaEntry(QuotaSubject("*", "*", "ram"), None),
)
PREFETCHED: Final = PrefetchReply(
    1_240, 1_240, 310, 1_866, 7464 << 20, {"share": 188, "quota": 12}, {"corrupt": 2}, finished=True
)
FILE: Final = "/etc/kvdepot/kvdepot.toml"
CONFIGURATION: Final = ConfigReply(
    FILE,
    {
        "ram.capacity": "68719476736", "tier.nvme.kind": "disk", "tier.nvme.path": "/mnt/nvme/kvdepot",
        "daemon.listen": '["unix:///run/kvdepot/kvdepot.sock", "tcp://10.0.0.1:7448"]', "policy.prefetch_share": "0.1",
    },
)  # fmt: skip
CHANGED: Final = ReloadReply(
    FILE,
    (
        ConfigChange("ram.capacity", "68719476736", "34359738368", live=False),
        ConfigChange("log.level", "info", "debug", live=True),
    ),
    ram_lost_bytes=32 << 30,
)  # fmt: skip
MEASURED: Final = (
    Measured("ram", "store", 6.1e9, "memcpy", 11.2e9),
    Measured("ram", "load", 10.4e9, "memcpy", 11.2e9, shares=(0.95, 0.93, 0.91)),
    Measured("nvme", "store", 0.74e9, "medium", 0.1276e9),
    Measured("nvme", "load", 2.9e9, "medium", 3.2e9),
    Measured("bucket", "store", 0.0, note="write = evict: only what RAM evicts gets there"),
    Measured("bucket", "load", 0.021e9, "medium", 0.024e9),
)
FOUND: Final = Found(
    [Asked(tokens, {COLD: tokens / 9_100, OWN: 0.031, DEPOT: 0.08 + tokens / 160_000}) for tokens in (2_000, 30_000)],
    [Way(COLD, 1.758, 3.297, 0.0), Way(OWN, 0.031, 0.031, 0.97), Way(DEPOT, 0.18, 0.268, 0.964)],
    0.961,
)


@dataclass
class Daemon:
    """The answers of a daemon that the scenes ask for."""

    state: DaemonStatus = STATUS_WITH_VERDICT
    entries: Sequence[QuotaEntry] = field(default=ENTRIES)

    def status(self) -> DaemonStatus:
        return self.state

    def namespaces(self, *_: object) -> NamespacePage:
        other = NamespaceContents(OTHER, "Qwen3-0.6B", tiers=(TierContents("ram"),), idle_seconds=90_000.0)
        return NamespacePage((CONTENTS, other), "page-2")

    def find_namespace(self, name: str) -> bytes:
        return NAMESPACE

    def find_chunk(self, namespace_id: bytes, key: str) -> bytes:
        return KEYS[1]

    def chunks(self, *_: object) -> ChunkPage:
        return ChunkPage(("ram", "nvme"), CHUNKS)

    def describe_namespace(self, namespace_id: bytes) -> NamespaceDescription:
        return NamespaceDescription(CONTENTS, SPEC, (ENGINE,))

    def describe_chunk(self, namespace_id: bytes, key: bytes) -> ChunkDescription:
        return CHUNK

    def quotas(self, subject: QuotaSubject | None = None) -> Sequence[QuotaEntry]:
        return [one for one in self.entries if subject in (None, one.subject)]

    def verify(self, call: object) -> Iterator[VerifyReply]:
        yield VERIFIED

    def prefetch(self, *_: object) -> Iterator[PrefetchReply]:
        yield PREFETCHED

    def configuration(self) -> ConfigReply:
        return CONFIGURATION

    def reload(self, *, dry_run: bool) -> ReloadReply:
        assert dry_run
        return CHANGED


VERBS: Final = {
    "assets-list": "assets list",
    "config-diff": "config diff",
    "config-show": "config show",
    "describe-chunk": "describe 5d6f/564c",
    "describe-namespace": "describe 5d6f",
    "health": "health",
    "ls": "ls",
    "ls-chunks": "ls 5d6f",
    "peers": "peers",
    "prefetch": "prefetch 5d6f",
    "quota-get": "quota get --tenant a --tier nvme",
    "quota-list": "quota list",
    "status-counters": "status --counters",
    "status-wide": "status --wide",
    "verify": "verify",
}
"""Scenes that a daemon's answers make, as they are typed."""
MODULES: Final = ("configuration", "describe", "ls", "peers", "prefetch", "quotas", "status", "verify")
WORKLOAD: Final = {"model": "Qwen/Qwen3-8B", "workload": "chat: turns of a conversation", "tokens": "2000 to 30000"}
PRINTED: Final[dict[str, Callable[[Console], None]]] = {
    "bench": lambda console: print_measured(
        Shape(2 << 20, 384, "Qwen3NextForCausalLM bfloat16"), MEASURED, 1 << 30, 9_100.0, console
    ),
    "bench-engine": lambda console: print_found(FOUND, WORKLOAD, console),
    "bench-no-engine": lambda console: print_measured(
        Shape(16 << 20, 256, "no engine has registered yet"), MEASURED[:2], 1 << 30, None, console
    ),
    "doctor": lambda console: echo_table(FINDINGS, console, every=False),
    "doctor-all": lambda console: echo_table(FINDINGS, console, every=True),
}
"""Scenes of what a host or an engine makes."""
SCENES: Final = sorted([*VERBS, *PRINTED])


def screen(scene: str, width: int) -> str:
    """Return what the verb prints, without the blanks at the ends of rows."""
    if scene in PRINTED:
        out = StringIO()
        PRINTED[scene](Console(file=out, width=width))
        text = out.getvalue()
    else:
        with _answered_by(Daemon()):
            ended = CliRunner().invoke(cli, VERBS[scene].split(), env={"COLUMNS": str(width)})
        assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exc_info
        text = ended.stdout
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@contextmanager
def _answered_by(daemon: Daemon) -> Iterator[None]:
    @contextmanager
    def connect(*_: object) -> Iterator[Daemon]:
        yield daemon

    with ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(patch(f"kvdepot.client.ctl.commands.{module}.connect", connect))
        yield


def golden(scene: str, width: int) -> Path:
    return GOLDEN / f"{scene}-{width}.txt"


@pytest.mark.requirement("O1")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scene", SCENES)
def test_the_screen_is_as_somebody_has_looked_at_it(scene: str, width: int) -> None:
    assert screen(scene, width) == golden(scene, width).read_text()


@pytest.mark.parametrize("scene", SCENES)
def test_no_screen_has_frames_and_words_are_not_cut(scene: str) -> None:
    text = screen(scene, 80)
    assert not set(text) & set("│┃┏┓└┘┡")
    assert [
        word for word in ("unverified", "scheduler", "capacity") if word in screen(scene, 200) and word not in text
    ] == []


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in SCENES:
        for columns in WIDTHS:
            golden(name, columns).write_text(screen(name, columns))
