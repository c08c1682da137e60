"""What flows through a daemon: the hit rate, bytes and durations, now and in the last minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.durations import Durations
from kvdepot.client.ctl.live.drawing import cell, sparkline
from kvdepot.client.ctl.rates import Rates
from kvdepot.core.hit_rate import LOAD_SECONDS, PROMPT_TOKENS, SAVED_SECONDS, HitRate
from kvdepot.core.units import count_text, duration_text, size_text
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdepot.client.ctl.live.history import Figures
    from kvdepot.core.bars import Glyphs

_LABEL, _NOW = 14, 13
_LOADED: Final = "granted_read_bytes"
_STORED: Final = "granted_write_bytes"
_LOOKUPS: Final = "call_seconds.Locate"
_NOTHING: Final = "-"


def traffic(figures: Figures, columns: int, glyphs: Glyphs, *, tall: bool, wide: bool) -> list[Text]:
    """Return the lines, the first one with the names of the columns. `tall`: with figures that are less important."""
    page = _Page(figures, columns, glyphs, wide=wide)
    hits, every = HitRate.of(figures.recent.grown), HitRate.of(figures.look.status.counters)
    saved = duration_text(hits.saved_seconds)
    lines = [page.head(), page.hit_rate(hits), page.sources(hits, every)]
    if tall:
        lines.append(
            page.flow("prompt tokens", lambda step: step.of(PROMPT_TOKENS), lambda rate: f"{count_text(rate)}/s")
        )
    lines += [
        page.flow("prefill saved", lambda step: step.of(SAVED_SECONDS), lambda rate: f"{rate:.1f} s/s", saved),
        page.flow("loaded", lambda step: step.of(_LOADED), lambda rate: f"{size_text(rate)}/s"),
        page.flow("stored", lambda step: step.of(_STORED), lambda rate: f"{size_text(rate)}/s"),
    ]
    if tall:
        lines.append(
            page.flow("misses", lambda step: sum(step.by_label("misses.").values()), lambda rate: f"{rate:.1f}/s")
        )
    lines.append(page.load_time())
    if tall:
        lookups = figures.recent.durations.get(_LOOKUPS)
        lines.append(page.text("lookup time", _times(lookups, "lookup")))
    return lines


class _Page:
    """The columns: a label, the figure of now, a sparkline, and a note on the last minutes."""

    def __init__(self, figures: Figures, columns: int, glyphs: Glyphs, *, wide: bool) -> None:
        self._figures = figures
        self._glyphs = glyphs
        self._wide = wide
        self._note = 34 if wide else 22
        self._spark = max(columns - _LABEL - _NOW - 4 - self._note, 0)

    def head(self) -> Text:
        steps = self._figures.steps[-self._spark :] if self._spark else ()
        shown = f"LAST {duration_text(sum(step.seconds for step in steps))}"
        window = f"IN {duration_text(self._figures.recent.seconds)}"
        return Text(f"{'TRAFFIC':<{_LABEL}}{'NOW':>{_NOW}}  {shown:<{self._spark}}  {window:<{self._note}}")

    def hit_rate(self, hits: HitRate) -> Text:
        rates = [HitRate.of(step.grown) for step in self._figures.steps]
        values = [rate.percent if rate.prompt_tokens else None for rate in rates]
        now = f"{values[-1]:.0f} %" if values and values[-1] is not None else _NOTHING
        return self._row("hit rate", now, values, 100.0, _share(hits) or "no prompt has ended")

    def sources(self, hits: HitRate, every: HitRate) -> Text:
        of = [f"{source} {hits.percent_of(tokens):.0f} %" for source, tokens in hits.served_tokens.items()]
        note = f"{every.percent:.0f} % since the start" if every.prompt_tokens else ""
        if self._wide and note:
            note = f"{every.percent:.0f} % of {count_text(every.prompt_tokens)} since the start"
        room = _NOW + 2 + self._spark
        text = Text(f"{'  from':<{_LABEL}}{cell(', '.join(of) or _NOTHING, room, self._glyphs)}  ")
        return text.append(cell(note, self._note, self._glyphs))

    def flow(
        self, label: str, value: Callable[[Rates], float], shown: Callable[[float], str], note: str | None = None
    ) -> Text:
        """Return a line of a rate. Without a note it names the highest rate of the last minutes."""
        values = [value(step) for step in self._figures.steps]
        peak = max(map(value, self._figures.recent_steps), default=0.0)
        now = shown(values[-1]) if values else _NOTHING
        return self._row(label, now, values, peak, f"peak {shown(peak)}" if note is None else note)

    def load_time(self) -> Text:
        """Return the line of the time of loads of the last minutes; where there is room, by source too."""
        found = {
            name.removeprefix(f"{LOAD_SECONDS}."): one
            for name, one in sorted(self._figures.recent.durations.items())
            if name.startswith(f"{LOAD_SECONDS}.")
        }
        together = Rates.over(Rates(0.0, {}, {"": one}) for one in found.values())
        text = _times(together.durations.get(""), "load")
        if self._wide and len(found) > 1:
            text += "".join(f"   {source}: {_percentiles(one)}" for source, one in found.items())
        return self.text("load time", text)

    def text(self, label: str, text: str) -> Text:
        room = _NOW + 4 + self._spark + self._note
        return Text(f"{label:<{_LABEL}}").append(cell(text, room, self._glyphs))

    def _row(self, label: str, now: str, values: list[float | None] | list[float], highest: float, note: str) -> Text:
        text = Text(f"{label:<{_LABEL}}").append(f"{now:>{_NOW}}", "bold")
        text.append(f"  {sparkline(values, self._spark, highest, self._glyphs)}  ")
        return text.append(cell(note, self._note, self._glyphs))


def _share(hits: HitRate) -> str:
    return f"{hits.percent:.0f} % of {count_text(hits.prompt_tokens)} tokens" if hits.prompt_tokens else ""


def _times(durations: Durations | None, what: str) -> str:
    if durations is None or not durations.count:
        return f"no {what} has ended"
    return f"{_percentiles(durations)}, of {count_text(durations.count)} {what}{'s' * (durations.count != 1)}"


def _percentiles(durations: Durations) -> str:
    return ", ".join(f"p{percent} {_seconds(durations.percentile(percent))}" for percent in (50, 99))


def _seconds(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
