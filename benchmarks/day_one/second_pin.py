"""A second process that pins the pages of a first one, for step 6."""

from __future__ import annotations

import argparse
import mmap
from pathlib import Path

from benchmarks.day_one.child import say
from benchmarks.day_one.machine import machine_of
from benchmarks.day_one.pinning import pin_all


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    device = machine_of(stand_in=options.stand_in).copies()
    device.enter()
    with options.path.open("r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
    say(seconds=pin_all(device, memory))
    device.leave()


if __name__ == "__main__":
    main()
