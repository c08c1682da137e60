"""`python -m tests.soak.rounding [--prompts N]`: how far rounding moves log probabilities of the soak's models.

The same prompts once as a whole and once in parts, as a cold run and a load cut them. docs/soak.md has the figures.
"""

from __future__ import annotations

import argparse
from random import Random
from typing import Any

import torch
import transformers

from demo.engine import ROOT
from demo.toys import Toy, make_toy, prompt
from tests.soak.engines import SOAKED
from tests.soak.judge import LEAD_MIN, OUTPUT_TOKENS

PART_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.rounding", description=__doc__)
    parser.add_argument("--prompts", type=int, default=60)
    options = parser.parse_args()
    print(f"{'model':<10}{'tokens':>8}{'largest difference':>20}{'other choices':>15}{'close choices':>15}")
    for toy in {kind.toy.name: kind.toy for kind in SOAKED.values() if kind.exact}.values():
        differences, others, leads = _measure(toy, options.prompts)
        close = sum(lead < LEAD_MIN for lead in leads) / len(leads)
        print(f"{toy.name:<10}{len(leads):>8}{max(differences):>20.6f}{others:>15}{close:>15.2%}", flush=True)


def _measure(toy: Toy, prompts: int) -> tuple[list[float], int, list[float]]:
    path = make_toy(toy, ROOT / "build" / "toys")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path, dtype=torch.float32, attn_implementation="eager").eval()
    differences: list[float] = []
    others = 0
    leads: list[float] = []
    for number in range(prompts):
        tokens = prompt(Random(number).randrange(800, 2500), f"rounding-{number}")
        with torch.inference_mode():
            whole = model(torch.tensor([tokens]), logits_to_keep=OUTPUT_TOKENS).logits[0].log_softmax(-1)
            parts = _in_parts(model, tokens)
        differences += (whole - parts).abs().amax(-1).tolist()
        others += int((whole.argmax(-1) != parts.argmax(-1)).sum())
        first, second = whole.topk(2).values.unbind(-1)
        leads += (first - second).tolist()
    return differences, others, leads


def _in_parts(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log probabilities after each of the last OUTPUT_TOKENS tokens, each of which is computed alone."""
    begin = len(tokens) - OUTPUT_TOKENS
    parts = [tokens[at : min(at + PART_TOKENS, begin)] for at in range(0, begin, PART_TOKENS)]
    past = None
    found = []
    for part in [*parts, *([token] for token in tokens[begin:])]:
        done = model(torch.tensor([part]), past_key_values=past, use_cache=True, logits_to_keep=1)
        past = done.past_key_values
        found.append(done.logits[0, -1].log_softmax(-1))
    return torch.stack(found[-OUTPUT_TOKENS:])


if __name__ == "__main__":
    main()
