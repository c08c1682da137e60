"""The live page in a real browser: what it shows of a daemon, at which widths, and what it asks for."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from kvdepot.core.units import count_text, duration_text, size_text

from tests.rigs.browser import NEEDS_CHROMIUM, Browser
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.raw_client import RawEngine, keys_of
from tests.rigs.screenshots import Chats, shoot

SHOWN = "document.getElementById('verdict')?.textContent.startsWith('HEALTH_')"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

BACKGROUNDS = {False: "rgb(255, 255, 255)", True: "rgb(17, 19, 24)"}


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@NEEDS_CHROMIUM
@pytest.mark.requirement("O5")
def test_the_page_of_a_daemon_with_traffic_fits_and_makes_no_complaint(browser: Browser, daemon: DaemonProcess) -> None:
    with RawEngine(daemon.socket, "<b>engine</b>") as engine:
        engine.store(keys := keys_of("page", 2))
        engine.locate(keys)
        for width, dark in itertools.product((1280, 390), (False, True)):
            browser.open(f"{daemon.metrics}/?{width}{dark}", width=width, dark=dark)
            browser.wait_for(f"location.search === '?{width}{dark}' && {SHOWN}")
            text = browser.value("document.body.innerText")
            assert "1 attached, with " in text
            assert "ram" in text
            assert "highest: " in text
            assert browser.value("document.querySelectorAll('main b, header b').length") == 0
            assert "engine</b>" not in text
            assert browser.value(OVERFLOW) == 0
            assert browser.value("getComputedStyle(document.body).backgroundColor") == BACKGROUNDS[dark]
            assert browser.value("document.querySelectorAll('#stored div').length") == 60
    assert browser.complaints == []
    asked = {one.partition("?")[0] for one in browser.requests if not one.startswith(("data:", "about:"))}
    assert asked == {f"{daemon.metrics}/", f"{daemon.metrics}/live.json"}


@NEEDS_CHROMIUM
@pytest.mark.requirement("O5")
def test_sizes_counts_and_durations_are_those_of_the_other_outputs(browser: Browser, daemon: DaemonProcess) -> None:
    browser.open(f"{daemon.metrics}/", width=1280)
    browser.wait_for(SHOWN)
    numbers = [
        0, 1, 59, 60, 999, 1000, 1023, 1024, 3599, 12_400, 86_399, 90_061, 116_939_000, 218_103_808, 10**13, 1 << 62,
    ]  # fmt: skip
    for function, text in (("bytes", size_text), ("count", count_text), ("time", duration_text)):
        assert browser.value(f"{json.dumps(numbers)}.map({function})") == [text(number) for number in numbers]


@NEEDS_CHROMIUM
@pytest.mark.requirement("O5")
@pytest.mark.parametrize(("width", "dark"), list(itertools.product((390, 1280), (False, True))))
def test_long_names_and_large_figures_of_100_tiers_fit_and_are_text(
    browser: Browser, daemon: DaemonProcess, width: int, dark: bool
) -> None:
    with urlopen(f"{daemon.metrics}/live.json") as answer:
        live = json.load(answer)
    evil = "<img src=x onerror=console.error(1)>"
    live["verdict"] = "HEALTH_WARN"
    live["problems"] = [
        {"code": "TIER_DEGRADED", "error": False, "message": evil + "x" * 300, "fix": evil, "anchor": "tier-degraded"}
    ] * 64
    live["tiers"] = [dict(live["tiers"][0], name=f"{number}" + "n" * 31, state=evil) for number in range(100)]
    live["engines"] = {"attached": 100, "incomplete": 3, "ranks": 800, "ranks_attached": 797}
    points = [
        {
            "factor": factor,
            "capacity_bytes": 10**18,
            "percent": 10.0 + factor,
            "full": factor < 8,
            "sampled_requests": 10**9,
        }
        for factor in (0.25, 0.5, 1, 2, 4, 8)
    ]
    curve = {
        "requests": 10**9,
        "requests_min": 200,
        "window_seconds": 3600.0,
        "measured_percent": 42.0,
        "upper_bound": True,
    }
    live["tiers"][0]["what_if"] = curve | {"points": points}
    few = [point | {"percent": None, "sampled_requests": 7} for point in points]
    live["tiers"][1]["what_if"] = curve | {"upper_bound": False, "measured_percent": None, "points": few}
    live["tiers"][2:] = [tier | {"what_if": None} for tier in live["tiers"][2:]]
    live["last_hour"]["misses"] = {f"reason-{evil}-{number}": 1e15 for number in range(40)}
    request = {
        "seconds_ago": 1e6, "outcome": "HIT", "prompt_tokens": 10**9, "local_tokens": 0, "loaded_tokens": 10**9,
        "source": "n" * 32, "reason": evil, "answer": evil + "x" * 300, "fix": evil + "y" * 300,
    }  # fmt: skip
    live["requests"] = [request] * 10
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=(
        f"window.fetch = async () => new Response(JSON.stringify({json.dumps(live)}));"
    ))  # fmt: skip
    browser.open(f"{daemon.metrics}/", width=width, dark=dark)
    browser.wait_for(SHOWN)
    assert browser.value(OVERFLOW) == 0
    assert browser.value("getComputedStyle(document.body).backgroundColor") == BACKGROUNDS[dark]
    assert browser.value("document.images.length") == 0
    assert browser.value("document.querySelectorAll('#tiers .row').length") == 100
    assert browser.value("document.querySelectorAll('#what-if .row').length") == 6
    curves = browser.value("document.getElementById('what-if').innerText")
    assert "1000000000 requests in 1 h; measured, all tiers: 42 %" in curves
    assert "not enough sampled requests yet (7 of 200)" in curves
    assert curves.count("(at most)") == 1
    assert curves.count("or more") == 1
    browser.value("document.querySelectorAll('#requests button').forEach((one) => one.click())")
    assert browser.value("document.querySelectorAll('#requests .told:not([hidden])').length") == 10
    assert browser.value(OVERFLOW) == 0
    assert browser.value("document.images.length") == 0
    assert "3 without all ranks" in browser.value("document.body.innerText")
    assert browser.complaints == []


@NEEDS_CHROMIUM
@pytest.mark.requirement("O5")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_request_that_is_selected_says_why_it_missed_and_what_to_do(
    browser: Browser, daemon: DaemonProcess, width: int
) -> None:
    with RawEngine(daemon.socket, "<b>engine</b>") as engine:
        engine.locate(keys_of("never stored", 2), request="<b>request</b>")
        engine.end_request("<b>request</b>")
        browser.open(f"{daemon.metrics}/", width=width)
        browser.wait_for(f"{SHOWN} && document.querySelector('#requests button') !== null")
        why = "document.querySelector('#requests .told')"
        assert browser.value(f"{why}.hidden") is True
        with urlopen(f"{daemon.metrics}/live.json") as answer:
            told = json.load(answer)["requests"][0]
        browser.value("document.querySelector('#requests button').click()")
        assert browser.value("document.querySelector('#requests button').getAttribute('aria-expanded')") == "true"
        assert told["answer"]
        assert browser.value(f"{why}.innerText").startswith(told["answer"])
        assert browser.value("document.getElementById('paused').checkVisibility()") is True
        assert browser.value(OVERFLOW) == 0
        renewed = browser.value("document.getElementById('daemon').textContent")
        browser.wait_for(f"document.getElementById('daemon').textContent !== {json.dumps(renewed)}")
        assert browser.value(f"{why}.hidden") is False, "a page that renews itself leaves it open"
        browser.value("document.querySelector('#requests button').click()")
        assert browser.value(f"{why}.hidden") is True
        assert browser.value("document.getElementById('paused').checkVisibility()") is False
    assert "request</b>" not in browser.value("document.documentElement.innerHTML")
    assert browser.complaints == []


@NEEDS_CHROMIUM
@pytest.mark.requirement("O5")
def test_the_pictures_of_docs_are_of_chats_that_hit(browser: Browser, daemon: DaemonProcess, tmp_path: Path) -> None:
    with RawEngine(daemon.socket) as engine:
        chats = Chats(engine)
        for _ in range(60):
            chats.turn()
        shoot(browser, f"{daemon.metrics}/", tmp_path / "page.png", width=390, dark=True)
    assert int(browser.value("document.getElementById('rate').textContent").removesuffix(" %")) > 20
    picture = (tmp_path / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack_from(">II", picture, 16)
    assert width == 390 < height, "the whole page"


@NEEDS_CHROMIUM
@pytest.mark.requirement("O5")
def test_a_daemon_that_has_gone_is_said_first(browser: Browser, new_daemon: DaemonProcess) -> None:
    browser.open(f"{new_daemon.metrics}/", width=1280)
    browser.wait_for(SHOWN)
    new_daemon.stop()
    browser.wait_for("!document.getElementById('silent').hidden")
    assert browser.value("document.body.innerText").startswith("No answer from kvdepotd since ")


@pytest.mark.requirement("O5")
def test_a_setting_switches_the_page_off() -> None:
    with DaemonProcess(config="[daemon]\npage = false\n") as daemon:
        with urlopen(f"{daemon.metrics}/healthz") as answer:
            assert answer.status == 200
        with pytest.raises(OSError, match="404"):
            urlopen(f"{daemon.metrics}/")
