"""docs/metrics.md, from the declarations: `python -m kvdepot.server.metric_docs > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvdepot.server.metric_families import SUBJECTS, Family

_HEAD = """\
# Metrics

Made from the code by `make docs`. `[daemon] metrics` says where the daemon listens: `/metrics` is this, in Prometheus'
text format; `/metrics/summary` is one line for people, `/healthz` says whether it is ready.

Counters begin with 0 when the daemon starts and never fall while it runs. What a label can be is known beforehand and
exported from the start; namespaces, requests and engines are no labels (`kvdepotctl ls` and `status` tell of them).
`tier` is `ram` or the `name` of a `[[tier]]`; what only a kind of tier has is absent for others. Beside these there are
the usual `process_*` of the daemon's own process, without its workers. What an engine sees is in vLLM's own metrics.
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
    values = f" `{family.labels[-1]}`: {', '.join(family.values)}." if family.values else ""
    return f"| `{family.full_name}{labels}` | {family.type} | {family.text}{values} |"


if __name__ == "__main__":
    sys.stdout.write(markdown().rstrip("\n") + "\n")
