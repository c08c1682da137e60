"""`python -m demo`: two toy models, a real vLLM, a real kvdepotd, one table.

Exit status 1 if tokens differ or an expected hit is missing.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.bucket import BucketServer
from demo.daemon import Daemon
from demo.engine import ROOT
from demo.peers import Peers
from demo.scenarios import PROMPT_TOKENS, Demo, Row, Say, Tokens, ToyRun
from demo.toys import DENSE, HYBRID

TABLE_COLUMNS = 120  # of a file or a pipe, which have no width of their own


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"kvdepot demo: prompts of {PROMPT_TOKENS} tokens, one at a time")
    for heading in ("model", "scenario"):
        table.add_column(heading)
    for heading in ("prompt tokens", "own cache", "from kvdepot", "daemon says", "first token"):
        table.add_column(heading, justify="right")
    table.add_column("tokens equal")
    for row in rows:
        hit = (
            f"{row.kvdepot_tokens}"
            if row.hit_as_expected
            else f"[red]{row.kvdepot_tokens}, not {row.expected_tokens}[/]"
        )
        table.add_row(
            row.model, row.scenario, f"{row.prompt_tokens}", f"{row.local_tokens}", hit, f"{row.served_tokens}",
            f"{row.first_token_seconds * 1000:.0f} ms", "[green]yes[/]" if row.tokens_equal else "[red]NO[/]",
        )  # fmt: skip
    return table


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    progress = Console(stderr=True, highlight=False)

    def say(text: str) -> None:
        progress.print(f"[dim]{time.monotonic() - started:6.1f} s[/]  {text}", soft_wrap=True)

    build = ROOT / "build"
    logs = build / "demo-logs"
    logs.mkdir(parents=True, exist_ok=True)
    say("making two toy models and starting kvdepotd on its embedded default")
    with Daemon() as daemon:
        say(f"kvdepotd serves at {daemon.endpoint}, {daemon.status().tiers[0].capacity_bytes >> 20} MiB of RAM")
        with _on(daemon, build, "kvdepotd", say) as demo:
            demo.run()
    rows = demo.rows + _bucket_rows(build, demo.reference, say)
    return _report(rows, build / "demo.json")


@contextmanager
def _on(daemon: Daemon, build: Path, log: str, say: Say, reference: Tokens | None = None) -> Iterator[Demo]:
    """Yield a demo on this daemon. Its log is kept."""
    runs = [ToyRun.make(toy, build / "toys", daemon.endpoint) for toy in (DENSE, HYBRID)]
    demo = Demo(daemon, runs, build / "demo-logs", say, reference)
    try:
        yield demo
    finally:
        demo.close()
        (build / "demo-logs" / f"{log}.log").write_bytes(daemon.log.read_bytes())


def _bucket_rows(build: Path, reference: Tokens, say: Say) -> list[Row]:
    """Two nodes, one after the other: all that they share is a bucket."""
    say("starting an S3 server, and kvdepotd on a node of its own")
    with BucketServer() as server, tempfile.TemporaryDirectory() as folder:
        configuration = server.configuration(Path(folder))
        with Daemon(configuration) as first, _on(first, build, "kvdepotd-first-node", say) as demo:
            demo.fill_bucket()
        say("that node is gone; starting kvdepotd on a new one")
        peers = Peers.make(Path(folder))
        with Daemon(configuration + peers.tls, of_daemon=peers.listen) as second:
            with _on(second, build, "kvdepotd-new-node", say, reference) as demo:
                demo.load_from_bucket()
                rows = demo.rows
            return rows + _peer_rows(build, reference, say, peers)


def _peer_rows(build: Path, reference: Tokens, say: Say, peers: Peers) -> list[Row]:
    """A node that has nothing but a peer, which has the prompts in its RAM."""
    say("starting kvdepotd on another node, which has nothing but that node as a peer")
    configuration = f'capacity = "1GiB"\n{peers.tls}{peers.tier}'
    with Daemon(configuration) as third, _on(third, build, "kvdepotd-reader", say, reference) as demo:
        demo.load_from_peer()
        return demo.rows


def _report(rows: list[Row], file: Path) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_COLUMNS)
    file.write_text(json.dumps({"rows": [row.as_json() for row in rows]}, indent=2) + "\n")
    console.print(_table(rows))
    failed = [row for row in rows if not row.passed]
    for row in failed:
        console.print(f"[red]failed:[/] {row.model}, {row.scenario}")
    console.print(f"{len(rows) - len(failed)} of {len(rows)} rows as expected; {file.relative_to(ROOT)}")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
