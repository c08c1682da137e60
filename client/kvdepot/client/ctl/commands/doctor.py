"""`kvdepotctl doctor`: check the host and the daemon, and name a fix for each problem."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource
from kvdepot.client.ctl.as_json import echo_record
from kvdepot.client.ctl.commands.options import json_option
from kvdepot.client.ctl.doctor.daemon import ask
from kvdepot.client.ctl.doctor.engine_flags import check_flags
from kvdepot.client.ctl.doctor.engine_process import engine_process
from kvdepot.client.ctl.doctor.examination import examine
from kvdepot.client.ctl.doctor.findings import Outcome
from kvdepot.client.ctl.doctor.host import Host
from kvdepot.client.ctl.doctor.settings import config_file, read_settings
from kvdepot.client.ctl.printer import new_table
from kvdepot.client.ctl.texts import escape
from kvdepot.client.endpoint import Endpoint
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdepot.client.ctl.doctor.findings import Finding
    from kvdepot.client.ctl.doctor.settings import Settings

EXIT_OK, EXIT_FAILED = 0, 1
_STYLES: Final = {Outcome.FAIL: "red", Outcome.WARN: "yellow", Outcome.SKIPPED: "dim", Outcome.OK: "green"}
"""In the order in which their rows are read."""
_WITHOUT_ALL: Final = (Outcome.FAIL, Outcome.WARN)


@click.command()
@click.option(
    "--config", "file", metavar="FILE", help="The daemon's configuration. [default: that of the service, if it exists]"
)
@click.option("--read-only", is_flag=True, help="Write no temporary file to a tier, and do not attach.")
@click.option("--engine", metavar="URL|PID", help="Check only the flags of a vLLM server on this host.")
@click.option("--all", "every", is_flag=True, help="List also what is ok, and what was skipped.")
@json_option
@click.pass_context
def doctor(
    context: click.Context, file: str | None, read_only: bool, engine: str | None, every: bool, as_json: bool
) -> int:
    """Check this host and the daemon.

    Compares the host with a configuration and a running daemon, and names a fix for each problem. Run it as the
    daemon's user or as root: checks that need more permissions are skipped. With --engine, compares the flags of a
    running vLLM with what the connector demands. Exit code 1: a check fails, or the daemon does not answer.
    """
    connection: tuple[Endpoint, float] = context.obj
    endpoint, timeout_seconds = connection
    host = Host()
    settings, first = read_settings(config_file(host, file))
    if settings is not None and file is not None and _is_default(context):
        endpoint = Endpoint.parse(settings.listen[0])
    if engine is not None:
        findings = list(check_flags(engine_process(host, engine), endpoint))
    else:
        daemon = ask(endpoint, timeout_seconds, attaching=not read_only)
        findings = [first, *examine(host, settings, daemon, timeout_seconds=timeout_seconds, writing=not read_only)]
    if as_json:
        echo_record(_record(endpoint, settings, findings))
    else:
        echo_table(findings, Console(), every=every)
    return EXIT_FAILED if any(one.outcome is Outcome.FAIL for one in findings) else EXIT_OK


def _is_default(context: click.Context) -> bool:
    """Nobody has named a socket, so it is the file's."""
    parent = context.parent
    return parent is not None and parent.get_parameter_source("endpoint") is ParameterSource.DEFAULT


def _record(endpoint: Endpoint, settings: Settings | None, findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "endpoint": str(endpoint),
        "configuration": settings.file if settings else None,
        "outcomes": {str(outcome): count for outcome, count in _counts(findings).items()},
        "findings": [asdict(finding) for finding in findings],
    }


def echo_table(findings: Sequence[Finding], console: Console, *, every: bool) -> None:
    """Print a row per check that fails or warns, the worst first, and below it what to do. With `every`, all checks."""
    shown = [
        one for outcome in _STYLES for one in findings if one.outcome is outcome and (every or outcome in _WITHOUT_ALL)
    ]
    table = new_table("doctor", "outcome", "of", "check", "found")
    for one in shown:
        fix = f"\n[bold]fix:[/] {escape(one.fix)}" if one.fix else ""
        fix += f"\n[bold]see:[/] {one.runbook}" if one.runbook else ""
        state = f"[{_STYLES[one.outcome]}]{one.outcome}[/]"
        table.add_row(state, escape(one.subject), escape(one.check), escape(one.message) + fix)
    if shown:
        console.print(table)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in _counts(findings).items())
    console.print(counts if len(shown) == len(findings) else f"{counts} (--all lists each)")


def _counts(findings: Sequence[Finding]) -> dict[Outcome, int]:
    found = Counter(one.outcome for one in findings)
    return {outcome: found[outcome] for outcome in Outcome}
