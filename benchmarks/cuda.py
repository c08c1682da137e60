"""Copies between KV tensors on a GPU and the arena, as a share of one pinned copy of the same size.

`--day-one --out DIR` is the whole kit for the first machine with a GPU (`benchmarks/day_one`); without it, one way and
one size of blocks are measured. Without a GPU this says so and exits with 2; `--stand-in` rehearses it in host memory,
where ratios mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from benchmarks import paths

paths.add_sources()

import torch
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import Direction

from benchmarks.copy_ratio import ratio_bench
from benchmarks.day_one.kit import run
from benchmarks.day_one.machine import machine_of
from benchmarks.report import Report, arguments, median

LAYERS = 32


def parse(arguments_given: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--mib", type=int, default=1024, help="bytes of a round")
    parser.add_argument("--block-kib", type=int, default=64, help="a block of one layer: 16 tokens of 8 heads in bf16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--copies", choices=["auto", *Way], default="auto", help="how batches travel")
    parser.add_argument("--stand-in", action="store_true", help="in host memory, without a GPU")
    kit = parser.add_argument_group("the day-one kit")
    kit.add_argument("--day-one", action="store_true", help="all steps; needs --out")
    kit.add_argument("--out", type=Path, metavar="DIR", help="where report.json and report.md are written")
    kit.add_argument("--seconds", type=float, default=520.0, help="for all steps together")
    kit.add_argument("--steps", metavar="N,N", help="only these")
    kit.add_argument("--cases", type=int, metavar="N", help="with --stand-in: so many of a step's cases, drawn")
    kit.add_argument("--seed", type=int, help="of what is drawn at random")
    options = parser.parse_args(arguments_given)
    if options.day_one and options.out is None:
        parser.error("--day-one needs --out DIR")
    if options.cases is not None and not (options.stand_in and options.cases > 0):
        parser.error("--cases needs --stand-in and at least 1: on a GPU no case is left out")
    return options


def main() -> int:
    options = parse()
    if not options.stand_in and not torch.cuda.is_available():
        print("this needs a CUDA device, and torch sees none here")
        return 2
    if options.day_one:
        steps = [int(number) for number in options.steps.split(",")] if options.steps else None
        return run(
            options.out, options.seconds, stand_in=options.stand_in, steps=steps, seed=options.seed, cases=options.cases
        )
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    machine, block_bytes = machine_of(stand_in=options.stand_in), options.block_kib << 10
    blocks = 2 * ((options.mib << 20) // (LAYERS * block_bytes))
    layers = [torch.empty((blocks, block_bytes // 2), dtype=torch.int16, device=machine.device) for _ in range(LAYERS)]
    way = None if options.copies == "auto" else Way(options.copies)
    report = Report("cuda")
    with ratio_bench(layers, machine.copies(), way, options.mib << 20) as bench:
        pin_seconds, piece_seconds = bench.pin_all()
        for direction in Direction:
            name = direction.value
            bench.round(direction)  # not measured: memory is taken
            rounds = [bench.round(direction) for _ in range(options.rounds)]
            report.figure(f"{name}_ratio", median([one.pinned / one.ours for one in rounds]), "", at_least=0.9)
            report.figure(f"{name}_gb_s", bench.size_bytes / median([one.ours for one in rounds]) / 1e9, "GB/s")
            report.figure(
                f"{name}_pinned_gb_s", bench.size_bytes / median([one.pinned for one in rounds]) / 1e9, "GB/s"
            )
        report.figure("pin_seconds_per_gib", pin_seconds / bench.arena.size_bytes * 2**30, "s")
        report.figure("pin_piece_ms_max", piece_seconds * 1e3, "ms")
        if wrong := bench.wrong_layers():
            raise SystemExit(f"wrong bytes in layers {wrong}")
    report.note("block_kib", options.block_kib)
    report.note("copies", options.copies)
    report.note("device", machine.name)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
