"""`kvdepotctl bench engine`: what it sends, what it counts, and what it says of the times."""

from __future__ import annotations

from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.ctl.engine_bench.measuring import COLD, DEPOT, OWN, Asked, Found, Measuring, Way, fillers
from kvdepot.client.ctl.engine_bench.page import page
from kvdepot.client.ctl.engine_bench.server import EngineBenchError, EngineServer
from kvdepot.client.ctl.engine_bench.workloads import WORKLOADS, Item, items
from kvdepot.core.errors import InvalidArgument

from tests.fakes.openai_server import BLOCK_TOKENS, FakeServer

TOKENS_MAX = 2000


def prompts(count: int = 6, seed: int = 1) -> list[Item]:
    return list(items(WORKLOADS["chat"], count, tokens_max=TOKENS_MAX, times=3, seed=seed))


def measured(fake: FakeServer, fill: list[list[int]] | None = None, found: list[Item] | None = None) -> Found:
    server = EngineServer(fake.url)
    return Measuring(server, "toy", lambda: None, lambda text: None, fill or []).run(found or prompts())


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_have_lengths_from_the_shortest_to_the_longest_and_fit_the_engine(name: str) -> None:
    found = list(items(WORKLOADS[name], 10, tokens_max=1 << 20, times=3, seed=7))
    known = sorted(len(one.known) for one in found)
    assert (known[0], known[-1]) == (WORKLOADS[name].known_min, WORKLOADS[name].known_max)
    small = list(items(WORKLOADS[name], 10, tokens_max=900, times=3, seed=7))
    assert max(one.tokens for one in small) <= 900
    assert all(50 <= token < 250 for one in small for token in one.prompt(2))
    assert len({tuple(one.prompt(time)) for one in small for time in range(3)}) == 30


def test_each_way_computes_what_it_has_to_and_no_more() -> None:
    with FakeServer() as fake:
        found = measured(fake)
    cold, own, depot = found.ways
    assert (cold.name, own.name, depot.name) == (COLD, OWN, DEPOT)
    assert cold.saved == 0
    known = sum(len(one.known) // BLOCK_TOKENS * BLOCK_TOKENS for one in prompts())
    share = known / sum(one.tokens for one in prompts())
    assert own.saved == depot.saved == found.loaded == pytest.approx(share)


def test_what_the_first_request_of_a_server_takes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = EngineServer.ask, []

    def slow_at_first(server: EngineServer, model: str, tokens: list[int]) -> float:
        asked.append(tokens)
        return ask(server, model, tokens) + (1000.0 if len(asked) == 1 else 0.0)

    monkeypatch.setattr(EngineServer, "ask", slow_at_first)
    with FakeServer() as fake:
        found = measured(fake)
    assert max(seconds for one in found.asked for seconds in one.seconds.values()) < 1000
    assert len(asked) == 1 + 3 * len(found.asked) and len(asked[0]) == max(one.tokens for one in found.asked)
    assert found.ways[0].saved == 0


def test_a_connector_that_stores_nothing_is_no_verdict() -> None:
    with FakeServer(outside=False) as fake:
        found = measured(fake)
    assert found.loaded == 0
    assert found.verdict.worth is None and "NOTHING TO JUDGE" in found.verdict.text


def test_other_prompts_push_the_own_cache_out_where_it_cannot_be_reset() -> None:
    with FakeServer(offers_reset=False) as fake:
        with pytest.raises(EngineBenchError, match="reset_prefix_cache"):
            measured(fake)
        server = EngineServer(fake.url)
        fill = fillers(server, TOKENS_MAX, 5)
        assert sum(map(len, fill)) > fake.cache_blocks * BLOCK_TOKENS
        found = measured(fake, fill, prompts(seed=2))
    assert found.loaded == found.ways[2].saved > 0.5


def test_what_the_own_cache_still_had_is_no_gain_of_kvdepot() -> None:
    found = prompts()
    with FakeServer(offers_reset=False) as fake:
        fake.cache_blocks = 100_000
        half = EngineServer(fake.url)
        measuring = Measuring(half, "toy", lambda: _forget_half(fake), lambda text: None, [[60] * BLOCK_TOKENS])
        result = measuring.run(found)
    assert result.loaded > 0.2 and result.ways[2].saved - result.loaded > 0.2
    assert result.verdict.worth is None and "own cache still had" in result.verdict.text


def _forget_half(fake: FakeServer) -> None:
    longest = max(map(len, fake.own))
    fake.own = {one: None for one in fake.own if len(one) < longest // 4}


def test_an_engine_that_serves_others_is_not_measured() -> None:
    with FakeServer() as fake:
        fake.idle = False
        with pytest.raises(EngineBenchError, match="it serves others"):
            measured(fake)


def test_what_the_server_says_of_itself_is_read() -> None:
    with FakeServer() as fake:
        server = EngineServer(f"{fake.url}/v1", api_key="secret")
        assert server.model() == ("toy", 2048)
        assert server.own_cache_tokens() == 16_000
        assert fake.authorizations == {"Bearer secret"}


def test_a_server_that_is_not_there_or_refuses_is_one_error() -> None:
    with pytest.raises(InvalidArgument):
        EngineServer("ftp://host")
    with FakeServer() as fake:
        url = fake.url
        with pytest.raises(EngineBenchError, match="answers 404"):
            EngineServer(f"{url}/elsewhere").model()
    with pytest.raises(EngineBenchError, match="does not answer"):
        EngineServer(url).model()


class _Answering(EngineServer):
    """A server that gives one answer."""

    def __init__(self, status: int, content: bytes, port: int = 8000) -> None:
        super().__init__(f"http://user:hunter2@localhost:{port}")
        self._answer = status, content

    def _connection(self) -> Any:
        answer = SimpleNamespace(status=self._answer[0], read=lambda _: self._answer[1])
        return SimpleNamespace(request=lambda *_: None, getresponse=lambda: answer, close=lambda: None)


def test_an_answer_of_something_else_is_an_error_without_the_password_of_the_url() -> None:
    for content in (b"<html>", b"[]", b"{}", b'{"data": []}', b'{"data": [1]}'):
        with pytest.raises(EngineBenchError, match="names no model") as raised:
            _Answering(200, content).model()
        assert "hunter2" not in str(raised.value)
    with pytest.raises(EngineBenchError, match="answers 500"):
        _Answering(500, b"", port=8404).reset_own_cache()
    assert not _Answering(404, b"").reset_own_cache()
    assert _Answering(200, b"").reset_own_cache()


def timed(pairs: list[tuple[int, float, float]], loaded: float = 0.9) -> Found:
    """Return prompts by (tokens, seconds cold, seconds with kvdepot)."""
    asked = [Asked(tokens, {COLD: cold, OWN: 0.1, DEPOT: depot}) for tokens, cold, depot in pairs]
    ways = [
        Way(way, sorted(one.seconds[way] for one in asked)[len(asked) // 2], 0.0, 0.0) for way in (COLD, OWN, DEPOT)
    ]
    return Found(asked, ways, loaded)


def test_the_verdict_needs_a_gain_on_which_prompts_agree() -> None:
    good = timed([(tokens, 0.001 * tokens, 0.25 + 0.0001 * tokens) for tokens in range(1000, 9000, 1000)])
    assert good.verdict.worth is True and "every length gains" in good.verdict.text
    later = timed([(tokens, 0.001 * tokens, 0.9 + 0.0001 * tokens) for tokens in range(500, 20000, 500)])
    assert later.verdict.worth is True and later.break_even_tokens == pytest.approx(1000)
    assert "break-even at 1000 tokens" in later.verdict.text
    bad = timed([(tokens, 0.001 * tokens, 0.002 * tokens) for tokens in range(1000, 9000, 1000)])
    assert bad.verdict.worth is False and "no length of a prompt gains" in bad.verdict.text
    flat = timed([(tokens, 1 + 0.0001 * tokens, 0.1 + 0.00011 * tokens) for tokens in range(1000, 9000, 1000)])
    assert flat.verdict.worth is True and "every length gains" in flat.verdict.text
    noisy = timed([(tokens, 1.0, 0.5 if tokens % 2000 else 1.5) for tokens in range(1000, 9000, 1000)])
    assert noisy.verdict.worth is None and "too noisy" in noisy.verdict.text


def test_the_report_is_one_file_without_requests_and_repeats_no_markup() -> None:
    found = timed([(1000, 1.0, 0.2), (2000, 2.0, 0.3)])
    text = page(found, title="<b>model</b>", facts={"model": "<script>x</script>"})
    assert "<script>" not in text and "<b>" not in text
    assert "http" not in text.replace('xmlns="http', "")
    assert text.count("<svg") == 2 and text.count("<polyline") == 3 and found.verdict.text in text
    HTMLParser().feed(text)
