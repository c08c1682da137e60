"""docs/metrics.md, from the declarations: `python -m kvdepot.server.observe.metric_docs > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvdepot.server.observe.metric_families import SUBJECTS
from kvdepot.server.observe.metric_family import Family

_HEAD = """\
# Metrics

`make docs` generates this page from the code. `[daemon] metrics` is the daemon's address. `/metrics` has these metrics
in Prometheus' text format. `/metrics/summary` is one line for people. `/healthz` says whether the daemon is ready.

- Counters begin with 0 when the daemon starts, and never fall while it runs.
- The values of labels are fixed, and exported from the start. Namespaces, requests and engines are no labels
  (`kvdepotctl ls` and `status` show them).
- `tier` is `ram` or the `name` of a `[[tier]]`. A metric of one kind of tier is absent for others.
- The usual `process_*` metrics are those of the daemon's own process, without its workers.
- [vLLM's own metrics](vllm.md#metrics) show the engine's side.
"""


def markdown() -> str:
    return "\n".join([_HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for subject, families in SUBJECTS:
        yield f"## {subject}\n\n| metric | type | meaning |\n|---|---|---|"
        yield from map(_row, families)
        yield ""


def _row(family: Family) -> str:
    labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
    values = ", ".join([*family.values, *["or a tier"] * family.or_tiers])
    values = f" `{family.labels[-1]}`: {values}." if values else ""
    return f"| `{family.full_name}{labels}` | {family.type} | {family.text}{values} |"


if __name__ == "__main__":
    sys.stdout.write(markdown().rstrip("\n") + "\n")
