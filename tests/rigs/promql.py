"""Metrics of the daemon as queries name them, and Prometheus' own checker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from kvdepot.core.hit_rate import LOAD_SECONDS
from kvdepot.server.observe.metric_families import FAMILIES
from kvdepot.server.observe.metric_family import Family

from tests.rigs.patience import patient

PROMTOOL = shutil.which("promtool")
NO_PROMTOOL = "" if PROMTOOL or "CI" in os.environ else "promtool is missing (Debian: prometheus)"
_SERIES = re.compile(r"(?<![:\w])((?:vllm:)?kvdepot_[a-z_]+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"([a-z_]+)(?:(=~|!~|!=|=)\"([^\"]*)\")?\s*(?:,|$)")
OF_PROMETHEUS = {"instance", "job", "le"}
OF_VLLM = {*OF_PROMETHEUS, "engine", "model_name"}


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    labels: tuple[tuple[str, str], ...]  # name, and the value or the pattern that is asked for


def series(text: str) -> list[Series]:
    """All that a text names, in a query or a document."""
    found = []
    for name, labels in _SERIES.findall(text):
        found.append(Series(name, tuple((label, value) for label, _, value in _LABEL.findall(labels))))
    return found


def why_unknown(one: Series) -> str:
    """Empty if the daemon, or the connector in vLLM, has such a metric, with such labels and values."""
    if one.name.startswith("vllm:"):
        return _why_unknown_to_vllm(one)
    family: Family | None = next((family for family in FAMILIES if one.name in family.series_names), None)
    if family is None:
        return f"there is no {one.name}"
    for label, value in one.labels:
        if label not in {*family.labels, *OF_PROMETHEUS}:
            return f"{one.name} has no label {label}"
        known = label == family.labels[-1] and family.values if family.labels else ()
        if known and value and not value.startswith("$"):
            unknown = [part for part in value.split("|") if part not in known]
            if unknown:
                return f"{one.name}: {label} is never {unknown}"
    return ""


def _why_unknown_to_vllm(one: Series) -> str:
    from kvdepot.client.vllm.base.stats import COUNTERS, GAUGES, PREFIX  # imports vLLM

    families = {f"{PREFIX}{name}_total": {label} for name, (label, _) in COUNTERS.items()}
    families |= {f"{PREFIX}{name}": set() for name in GAUGES}
    families |= {f"{PREFIX}{LOAD_SECONDS}{part}": {"source"} for part in ("_bucket", "_sum", "_count")}
    if one.name not in families:
        return f"there is no {one.name}"
    unknown = {label for label, _ in one.labels} - families[one.name] - OF_VLLM
    return f"{one.name} has no label {unknown}" if unknown else ""


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    assert PROMTOOL, "promtool is missing: make system-deps"
    return subprocess.run(
        [PROMTOOL, *arguments], input=text, capture_output=True, text=True, check=False, timeout=patient(60)
    )
