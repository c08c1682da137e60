"""`kvdepotctl bench engine`: what kvdepot does for the first tokens of a running vLLM."""

from __future__ import annotations

import os
import secrets
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.engine_bench.measuring import Found, Measuring, fillers
from kvdepot.client.ctl.engine_bench.page import page
from kvdepot.client.ctl.engine_bench.server import EngineBenchError, EngineServer
from kvdepot.client.ctl.engine_bench.workloads import WORKLOADS, items
from kvdepot.client.ctl.printer import new_table, show
from kvdepot.client.ctl.texts import escape
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.units import percent_text
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint
    from rich.table import Table

EXIT_NOT_WORTH: Final = 1
_STORED_SECONDS_MAX: Final = 60.0
_QUIET_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.1
_ANSWER_TOKENS: Final = 1
_KEY_VARIABLES: Final = ("VLLM_API_KEY", "OPENAI_API_KEY")


@click.command("engine")
@click.option("--url", default="http://localhost:8000", show_default=True, help="Of the vLLM server.")
@click.option("--workload", type=click.Choice(list(WORKLOADS)), default="chat", show_default=True, help="Its prompts.")
@click.option("--prompts", "count", type=click.IntRange(2, 1000), default=20, show_default=True, help="How many.")
@click.option("--fill", is_flag=True, help="Fill the engine's cache with other prompts; they are stored too.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a report with plots.")
@json_option
@click.pass_obj
def engine(
    connection: tuple[Endpoint, float], url: str, workload: str, count: int, fill: bool, html_file: Path | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Measure first tokens of a running vLLM.

    Sends random prompts of a workload's lengths, one at a time: computed, with the engine's own cache, and with kvdepot
    after the engine has lost its cache. They are real load, and are stored. An API key is read from VLLM_API_KEY. Exit
    code 1: kvdepot is slower than computing, or it cannot be told.
    """
    server = EngineServer(url, api_key=next(filter(None, map(os.environ.get, _KEY_VARIABLES)), ""))
    console = Console(stderr=True)
    began, seed = time.time(), secrets.randbits(48)
    model, tokens_max = server.model()
    known = WORKLOADS[workload]
    prompts = list(
        items(
            known, count, times=3, seed=seed,
            tokens_max=(tokens_max or known.known_max + known.new + _ANSWER_TOKENS) - _ANSWER_TOKENS,
        )
    )  # fmt: skip
    if html_file is not None and not html_file.parent.is_dir():
        raise InvalidArgument(f"--html {html_file}: no such directory")
    fill_prompts = fillers(server, prompts[0].tokens, seed + 1) if fill else []
    with connect(*connection) as operator, console.status("measuring") as shown:
        operator.status()  # a daemon that does not answer costs the engine nothing
        if not fill and not server.reset_own_cache():
            raise EngineBenchError(
                f"{server.url} has no /reset_prefix_cache",
                advice="start it with VLLM_SERVER_DEV_MODE=1, or use --fill",
            )
        tell = shown.update if console.is_terminal else _silent
        found = Measuring(server, model, lambda: _stored(operator), tell, fill_prompts).run(prompts)
    facts = {
        "model": model, "workload": f"{workload}: {known.about}", "prompts": f"{count}, one at a time",
        "tokens": f"{min(one.tokens for one in prompts)} to {max(one.tokens for one in prompts)}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began)),
        "loaded": f"{percent_text(found.loaded)} of the tokens came from kvdepot",
    }  # fmt: skip
    if html_file is not None:
        html_file.write_text(page(found, title=f"kvdepot for {model}", facts=facts))
    if as_json:
        echo_record(_record(found, facts))
    else:
        print_found(found, facts, Console())
    return 0 if found.verdict.worth else EXIT_NOT_WORTH


def _silent(text: str) -> None:
    """Say nothing: nobody watches."""


def _stored(operator: Operator) -> None:
    """Return when nothing is being stored any more, or after a minute."""
    until, quiet_since = time.monotonic() + _STORED_SECONDS_MAX, time.monotonic()
    pause = threading.Event()  # never set: ^C ends the wait
    while time.monotonic() < until and time.monotonic() - quiet_since < _QUIET_SECONDS:
        status = operator.status()
        if any(one.credit_used_bytes or one.leases for one in status.sessions):
            quiet_since = time.monotonic()
        pause.wait(_POLL_SECONDS)


def print_found(found: Found, facts: Mapping[str, str], console: Console) -> None:
    """Print the table of the ways, and the verdict. `facts`: model, workload and tokens among them."""
    head = f"{facts['model']}, {facts['workload']}, {facts['tokens']} tokens"
    show(console, escape(head), _table(found), escape(found.verdict.text))


def _table(found: Found) -> Table:
    table = new_table("", "way", ">TTFT p50", ">TTFT p90", ">prefill saved")
    for way in found.ways:
        table.add_row(way.name, f"{way.p50_seconds:.3f} s", f"{way.p90_seconds:.3f} s", percent_text(way.saved))
    return table


def _record(found: Found, facts: dict[str, str]) -> dict[str, Any]:
    return {
        "facts": facts,
        "ways": [asdict(way) for way in found.ways],
        "prompts": [asdict(one) for one in found.asked],
        "loaded": found.loaded,
        "break_even_tokens": found.break_even_tokens,
        "worth": found.verdict.worth,
        "verdict": found.verdict.text,
    }
