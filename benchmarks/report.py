"""How every benchmark prints: a table for people, one JSON object for machines."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    key: str
    value: float
    unit: str
    aim: float | None  # None: no aim
    at_least: bool  # or at most


class Report:
    """Figures in the order they were measured."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._figures: list[Figure] = []
        self._notes: dict[str, object] = {}

    def figure(
        self, key: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        aim = at_least if at_least is not None else at_most
        self._figures.append(Figure(key, value, unit, aim, at_least is not None))

    def note(self, key: str, value: object) -> None:
        """Something about the run that is no figure."""
        self._notes[key] = value

    def missed(self) -> list[str]:
        """Keys of the figures that miss their aim."""
        return [
            f.key for f in self._figures if f.aim is not None and (f.value < f.aim) == f.at_least and f.value != f.aim
        ]

    def lines(self) -> list[str]:
        """The table, a figure or note a line."""
        missed = self.missed()
        lines = []
        for f in self._figures:
            aim = (
                ""
                if f.aim is None
                else f"{'>=' if f.at_least else '<='} {f.aim:g}  {'MISSED' if f.key in missed else 'met'}"
            )
            lines.append(f"{f.key:<28}{f.value:>12.3f} {f.unit:<8} {aim}".rstrip())
        return lines + [f"{key}: {value}" for key, value in self._notes.items()]

    def record(self) -> dict[str, object]:
        """What the JSON has of it."""
        return {f.key: f.value for f in self._figures} | {"missed": self.missed(), "notes": self._notes}

    def finish(self, json_path: str | None) -> None:
        """Print the table, and write the JSON where asked."""
        print(f"\n{self.name}")
        for line in self.lines():
            print(f"  {line}")
        if json_path:
            write_record(Path(json_path), self.name, self.record())


def write_record(path: Path, benchmark: str, found: dict[str, object]) -> None:
    """Write what a benchmark found as JSON, with the machine and the date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = found | {"benchmark": benchmark, "machine": machine(), "date": now()}
    path.write_text(json.dumps(record, indent=2) + "\n")


def now() -> str:
    """UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def machine() -> dict[str, object]:
    """What the figures depend on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": platform.release(),
    }


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="PATH", help="also write the figures there")
    return parser


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
