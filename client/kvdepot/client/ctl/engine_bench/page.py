"""The report of `kvdepotctl bench engine` as one HTML file, with two plots and no external request."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Final

from kvdepot.client.ctl.engine_bench.measuring import WAYS, Found
from kvdepot.core.units import percent_text

_WIDTH, _HEIGHT = 720, 300
_LEFT, _BOTTOM, _TOP, _RIGHT = 60, 40, 12, 12
_COLORS: Final = dict(zip(WAYS, ("#c2410c", "#6b7280", "#15803d"), strict=True))
_STYLE: Final = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 760px; margin: 2rem auto; padding: 0 1rem; line-height: 1.5; }
table { border-collapse: collapse; } td, th { padding: .2rem 1rem; text-align: right; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
svg { width: 100%; height: auto; } text { fill: currentColor; font-size: 12px; }
.axis { stroke: currentColor; opacity: .4; }
"""


def page(found: Found, *, title: str, facts: dict[str, str]) -> str:
    """Return the report. `facts`: lines about the run."""
    rows = "".join(
        f"<tr><td>{html.escape(way.name)}</td><td>{way.p50_seconds:.3f} s</td><td>{way.p90_seconds:.3f} s</td>"
        f"<td>{percent_text(way.saved)}</td></tr>"
        for way in found.ways
    )
    lines = "".join(f"<li>{html.escape(name)}: {html.escape(value)}</li>" for name, value in facts.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p><strong>{html.escape(found.verdict.text)}</strong></p>
<table><tr><th></th><th>TTFT p50</th><th>TTFT p90</th><th>prefill saved</th></tr>{rows}</table>
<h2>Time to first token, by prompt tokens</h2>
{_by_tokens(found)}
<h2>Share of prompts that had their first token in this time</h2>
{_by_share(found)}
<h2>This run</h2><ul>{lines}</ul></body></html>
"""


def _by_tokens(found: Found) -> str:
    tokens_max = max(one.tokens for one in found.asked)
    dots = [
        f'<circle cx="{_x(one.tokens / tokens_max):.1f}" cy="{_y(seconds / _seconds_max(found)):.1f}" r="4"'
        f' fill="{_COLORS[way]}"><title>{html.escape(way)}: {one.tokens} tokens, {seconds:.3f} s</title></circle>'
        for one in found.asked
        for way, seconds in one.seconds.items()
    ]
    return _plot(found, dots, f"{tokens_max} tokens")


def _by_share(found: Found) -> str:
    """Return the plot of the distributions: seconds upwards, the share of prompts to the right."""
    lines = []
    for way in WAYS:
        seconds = sorted(one.seconds[way] for one in found.asked)
        points = " ".join(
            f"{_x((number + 1) / len(seconds)):.1f},{_y(one / _seconds_max(found)):.1f}"
            for number, one in enumerate(seconds)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke-width="2" stroke="{_COLORS[way]}"/>')
    return _plot(found, lines, "100 %")


def _plot(found: Found, marks: list[str], right: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f'<line class="axis" x1="{_LEFT}" y1="{_y(0)}" x2="{_x(1)}" y2="{_y(0)}"/>'
        f'<line class="axis" x1="{_LEFT}" y1="{_TOP}" x2="{_LEFT}" y2="{_y(0)}"/>'
        f'<text x="4" y="{_TOP + 8}">{_seconds_max(found):.2f} s</text><text x="4" y="{_y(0)}">0 s</text>'
        f'<text x="{_x(1)}" y="{_y(0) + 18}" text-anchor="end">{right}</text>'
        f"{''.join(marks)}{''.join(_legend())}</svg>"
    )


def _legend() -> Iterator[str]:
    for number, (way, color) in enumerate(_COLORS.items()):
        x = _LEFT + 20 + 140 * number
        yield f'<circle cx="{x}" cy="{_HEIGHT - 10}" r="5" fill="{color}"/><text x="{x + 10}" y="{_HEIGHT - 6}">'
        yield f"{html.escape(way)}</text>"


def _seconds_max(found: Found) -> float:
    return max(seconds for one in found.asked for seconds in one.seconds.values())


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)
