"""`kvdepotctl top`: show what a daemon does, at an interval."""

from __future__ import annotations

import signal
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import click
import grpc
from kvdepot.client.ctl.as_json import echo_next
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import SecondsType, json_option
from kvdepot.client.ctl.live.history import History
from kvdepot.client.ctl.live.polling import look
from kvdepot.client.ctl.live.terminal import is_live
from kvdepot.client.ctl.live.watching import print_frame, watch
from kvdepot.client.ctl.rates import Rates
from kvdepot.client.ctl.texts import say
from kvdepot.core.calls import CommitOutcome
from kvdepot.core.hit_rate import PROMPT_TOKENS, SAVED_SECONDS, SERVED_TOKENS
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.report import DaemonStatus

_COMMITTED = f"committed_objects.{CommitOutcome.COMMITTED.name.lower()}"
Answer = TypeVar("Answer")


@click.command()
@click.option(
    "--interval", type=SecondsType(min=0.1), default=2.0, show_default=True, help="Seconds between two samples."
)
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many samples. [default: when you quit]")
@click.option("--once", is_flag=True, help="Print one screen after one interval, and stop.")
@json_option
@click.pass_obj
def top(connection: tuple[Endpoint, float], interval: float, count: int | None, once: bool, as_json: bool) -> int:
    """Show live what the daemon does.

    Shows the verdict, hit rate, traffic, tiers, misses, engines and the latest requests. Keys: q quits, ? shows the
    others. Where the output is no terminal, prints one screen after the other. With --json, prints one line per
    interval. If the daemon ends or hangs after the first interval, top waits for it.
    """
    count = 1 if once else count
    console, ended_by = Console(), None
    with connect(*connection) as operator:
        try:
            if as_json:
                for before, now in pairwise(_answers(operator.status, interval, count)):
                    echo_next(_record(now, Rates.between(before, now)))
            elif is_live(console) and not once:
                ended_by = watch(operator, console, interval, count)
            else:
                _print(operator, console, interval, count)
        except KeyboardInterrupt:
            return 0
    if ended_by not in (None, signal.SIGINT):
        signal.signal(ended_by, signal.SIG_DFL)
        signal.raise_signal(ended_by)
    return 0


def _answers(ask: Callable[[], Answer], interval: float, count: int | None) -> Iterator[Answer]:
    """Yield an answer, then one at each interval. Raise grpc.RpcError for the first one only."""
    yield ask()
    pause = threading.Event()  # nobody sets it
    silent, done = False, 0
    while count is None or done < count:
        pause.wait(interval)
        try:
            answer = ask()
        except grpc.RpcError as error:
            if not silent:
                say(f"no answer: {error.code().name}; trying again", err=True)
            silent = True
            continue
        silent = False
        done += 1
        yield answer


def _print(operator: Operator, console: Console, interval: float, count: int | None) -> None:
    answers = _answers(lambda: look(operator), interval, count)
    history = History(next(answers))
    for answer in answers:
        history.add(answer)
        print_frame(history.figures(), console, interval)


def _record(now: DaemonStatus, rates: Rates) -> dict[str, Any]:
    return {
        "ready": now.ready, "reason": now.reason, "uptime_seconds": now.uptime_seconds, "seconds": rates.seconds,
        "per_second": {
            PROMPT_TOKENS: rates.of(PROMPT_TOKENS), SERVED_TOKENS: rates.by_label(f"{SERVED_TOKENS}."),
            SAVED_SECONDS: rates.of(SAVED_SECONDS),
            "locates": rates.of("locates"), "locate_hits": rates.of("locate_hits"),
            "hit_tokens": rates.of("hit_tokens"), "acquired_objects": rates.of("acquired_objects"),
            "granted_read_bytes": rates.of("granted_read_bytes"), "committed_objects": rates.of(_COMMITTED),
            "granted_write_bytes": rates.of("granted_write_bytes"), "misses": rates.by_label("misses."),
        },
        "tiers": [
            {
                "name": tier.name, "state": tier.state, "reason": tier.reason, "used_bytes": tier.used_bytes,
                "capacity_bytes": tier.capacity_bytes, "objects": tier.objects, "per_second": rates.moved(tier),
            }
            for tier in now.tiers
        ],
        "engines": [
            {
                "engine_id": one.engine_id, "ranks_attached": one.ranks_attached, "world_size": one.world_size,
                "leases": one.leases, "lent_objects": one.lent_objects, "credit_used_bytes": one.credit_used_bytes,
            }
            for one in now.sessions
        ],
    }  # fmt: skip
