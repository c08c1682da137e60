"""The quick start leads from a clone to a first hit, by what it says alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from demo.toys import prompt
from tests.rigs.patience import patience, wait_until
from tests.rigs.raw_client import status_of
from tests.walk.walk import Walk, commands

SECONDS_MAX = 300.0
"""Beside downloads, to the first hit."""


def test_what_is_typed_is_what_the_consoles_of_a_page_say() -> None:
    page = "text\n```console\n$ one --two # why\nprinted\n$ three\\\n    four\n```\n```text\n$ no console\n```\n"
    assert commands(page) == ["one --two", "three four"]


@pytest.mark.e2e
@pytest.mark.long(seconds=120)
@pytest.mark.timeout(900)
def test_the_page_leads_to_a_first_hit_in_five_minutes(tmp_path: Path) -> None:
    with Walk(tmp_path) as walk:
        walk.type("python3 -m venv")
        began = time.monotonic()
        walk.type("export PATH=")
        walk.serve_daemon()
        walk.serve_vllm()
        wait_until(lambda: "kvdepot: attached to unix://" in walk.log("vllm"), "vLLM's log says that it is attached")
        sent = prompt(2000, "a long prompt")
        first = walk.complete(sent)
        wait_until(lambda: status_of(walk.socket).tiers[0].objects >= 7, "it is stored", pause_seconds=0.1)
        walk.forget()
        second = walk.complete(sent)
        seconds = time.monotonic() - began
        assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        wait_until(lambda: walk.metric("vllm:external_prefix_cache_hits") >= 1792, "vLLM counts the hit")
        assert walk.type("kvdepotctl status").startswith("HEALTH_OK")
        assert second["id"] in walk.type("kvdepotctl requests")
        assert walk.type("kvdepotctl explain", REQUEST=second["id"]).splitlines()[0].startswith("HIT")
        walk.end()
        assert str(walk.arena) in walk.type("kvdepotd arena list")
        walk.type("kvdepotd arena remove", ARENA=str(walk.arena))
        assert not walk.arena.exists()
        assert walk.typed == walk.commands, "nothing on the page was left out"
    assert seconds < SECONDS_MAX * patience()
