"""Two engines of one depot take random turns of conversations, which begin where others ended or parted."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.fakes.direct_session import DirectDepot
from tests.fakes.late_words import LateWords
from tests.fakes.scripted_engine import BLOCK, VOCABULARY, ScriptedEngine
from tests.rigs.connector_histories import Watch, act, check_answers, prompt_of_few
from tests.rigs.seeds import steps_until

STEPS = 120
GENERATED_MAX = 60
PROMPT_MAX = 14 * BLOCK


class Conversations:
    """Prompts that share beginnings with others, up to a boundary or a token before or after one."""

    def __init__(self) -> None:
        self.turns: list[list[int]] = []

    def prompt(self, random: Random) -> list[int]:
        if not self.turns or random.random() < 0.3:
            return prompt_of_few(random)
        turn = random.choice(self.turns)
        cut = random.randrange(1, min(len(turn), PROMPT_MAX) + 1)
        if random.random() < 0.6:
            cut = min(cut // BLOCK * BLOCK + random.randrange(3), len(turn))
        added = [random.randrange(VOCABULARY) for _ in range(random.choice((0, 0, 1, 1, 5, 20)))]
        return [*turn[:cut], *added] or prompt_of_few(random)

    def note(self, engine: ScriptedEngine) -> None:
        self.turns += [list(request.all_token_ids) for request in engine.requests.values()]


def run_turns(
    begin: Callable[[], Watch],
    depot: DirectDepot,
    random: Random,
    *,
    acts: Callable[..., None] = act,
    steps: int = STEPS,
    generated_max: int = GENERATED_MAX,
    enough: Callable[[Any], object] = lambda watch: watch.stored and watch.allocated.total(),
) -> list[Any]:
    """Step two engines by turns until both have met `enough`, and start one of them again. Return their watches."""
    conversations = Conversations()

    def started() -> tuple[Any, LateWords]:
        watch = begin()
        watch.engine.deliver = words = LateWords(random)
        return watch, words

    def end(watch: Any, words: LateWords) -> None:
        depot.held, depot.lost, depot.present = set(), set(), True
        watch.engine.session.let_go()
        words.calm()
        watch.finish()
        check_answers(watch.engine)
        conversations.note(watch.engine)

    fleet = [started(), started()]
    live: list[list[str]] = [[], []]
    for number in steps_until(lambda: all(enough(watch) for watch, _ in fleet), steps):
        at = random.randrange(2)
        watch, _ = fleet[at]
        acts(watch.engine, depot, random, live[at], conversations.prompt, generated_max)
        watch.check(watch.engine.step())
        live[at] = [name for name in live[at] if name in watch.engine.scheduler.requests]
        if number == steps // 2:
            end(*fleet[0])
            fleet[0][0].engine.close()
            fleet[0], live[0] = started(), []
        if number % 20 == 0:
            conversations.note(watch.engine)
    for of_engine in fleet:
        end(*of_engine)
    assert not depot.lent()
    for watch, _ in fleet:
        watch.engine.close()
    return [watch for watch, _ in fleet]
