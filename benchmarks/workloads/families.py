"""The families. Each docstring names its source; what no study gives is marked as assumed.

* WildChat: Zhao et al., ICLR 2024, arXiv 2405.01470 (a million conversations)
* Mooncake: Qin et al., FAST 2025, arXiv 2407.00079 (prompts of a chat service)
* SWE-agent: Yang et al., NeurIPS 2024, arXiv 2405.15793 (agents that repair software)
* RAGCache: Jin et al., arXiv 2404.12457 (retrieval)
* LongBench: Bai et al., ACL 2024, arXiv 2308.14508 (tasks over one long document)
* Preble: Srivatsa et al., arXiv 2407.00023 (prompts that share their beginning)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice
from random import Random
from typing import Final

from benchmarks.workloads.trace import Prompt, Segment, Session, Turn, lognormal, poisson, tokens

CHAT_TURNS: Final = 2.54
AGENT_STEPS: Final = 15.0
DOCUMENTS: Final = 1000
DOCUMENT_EXPONENT: Final = 1.05
TENANTS: Final = (
    (1835, 0.85),  # ToolBench
    (2285, 0.97),  # an embodied agent
    (3871, 0.97),  # programming
    (9865, 0.88),  # questions on a video
    (23474, 0.91),  # LooGLE: questions on a long document
)
"""Tokens of a prompt, and the share of them that other prompts have, too (Preble, table 1)."""
TENANT_PROMPTS: Final = 8
"""System prompts of each kind (assumed)."""


def _conversation(random: Random, number: int) -> Iterator[Turn]:
    system = Segment("chat system", 512)
    pasted = Segment(("paste", number), tokens(random, 9000, 1.2, 60_000))
    segments: tuple[Segment, ...] = (system, pasted) if random.random() < 0.5 else (system,)
    for turn in count():
        segments += (Segment(("user", number, turn), tokens(random, 295.58, 1.2)),)
        answer = tokens(random, 441.34, 0.8)
        yield Turn(lognormal(random, 60, 1.0) if turn else 0.0, segments, answer)
        segments += (Segment(("answer", number, turn), answer),)
        if random.random() < 1 / CHAT_TURNS:
            return


def chat(random: Random) -> Iterator[Prompt]:
    """Conversations of several turns.

    WildChat: 2.54 turns (here geometric), 295.58 tokens of a user's message and 441.34 of an answer. Half of the
    conversations begin with pasted text, so that prompts come near Mooncake's 12,035 tokens (its share is assumed).
    Assumed: one system prompt of 512 tokens, a conversation every 2.5 s, a minute between turns (log-normal, sigma 1).
    """
    return poisson(random, _conversation, gap_seconds=2.5)


def _agent(random: Random, number: int) -> Iterator[Turn]:
    task = Segment(("task", number), tokens(random, 1200, 0.8))
    segments: tuple[Segment, ...] = (Segment("agent system", 3000), task)
    for step in count():
        action = tokens(random, 150, 0.7)
        yield Turn(lognormal(random, 12, 1.2) if step else 0.0, segments, action)
        segments += (
            Segment(("action", number, step), action),
            Segment(("observation", number, step), tokens(random, 900, 1.2, 8000)),
        )
        if random.random() < 1 / AGENT_STEPS:
            return


def agents(random: Random) -> Iterator[Prompt]:
    """Agent loops: each tool call adds its result to the context of the next request.

    SWE-agent: runs that succeed have a median of 12 steps, others a mean of 21; here geometric with a mean of 15.
    Assumed: 3,000 tokens of system prompt and tools, 1,200 of a task, 150 of an action, 900 of a result, 12 s a step,
    an agent every 12 s.
    """
    return poisson(random, _agent, gap_seconds=12)


def _zipf(items: int, exponent: float) -> list[float]:
    return list(accumulate((rank + 1) ** -exponent for rank in range(items)))


def _retriever(random: Random) -> Session:
    sizes = [tokens(random, 3718, 0.8, 20_000) for _ in range(DOCUMENTS)]
    weights = _zipf(DOCUMENTS, DOCUMENT_EXPONENT)

    def question(random: Random, number: int) -> Iterator[Turn]:
        chosen = random.choices(range(DOCUMENTS), cum_weights=weights, k=2)
        documents = tuple(Segment(("document", document), sizes[document]) for document in dict.fromkeys(chosen))
        asked = Segment(("question", number), tokens(random, 60, 0.6))
        yield Turn(0.0, (Segment("retrieval system", 512), *documents, asked), tokens(random, 150, 0.6))

    return question


def retrieval(random: Random) -> Iterator[Prompt]:
    """Questions with two retrieved documents in front.

    RAGCache: 3 % of the documents get 60 % of the requests (Zipf with exponent 1.05 over 1,000); a document has 3,718
    tokens on average; two are retrieved. Assumed: 60 tokens of a question, one a second, a system prompt of 512.
    """
    return poisson(random, _retriever(random), gap_seconds=1)


def _job(random: Random, number: int) -> Iterator[Turn]:
    document = Segment(("one-shot", number), tokens(random, 9000, 0.6, 30_000))
    yield Turn(0.0, (document, Segment("summarise", 60)), tokens(random, 300, 0.5))


def batch_jobs(random: Random) -> Iterator[Prompt]:
    """One-shot prompts of a batch job: nothing in them comes twice.

    LongBench: most tasks have 5,000 to 15,000 tokens (here log-normal with a mean of 9,000). Assumed: four a second.
    """
    return poisson(random, _job, gap_seconds=0.25)


BATCH_GAP_SECONDS: Final = 120.0
BATCH_JOBS: Final = 60


def scans(random: Random) -> Iterator[Prompt]:
    """`chat`, with a batch of 60 one-shot prompts every two minutes (assumed)."""
    return heapq.merge(chat(Random(random.random())), _batches(random), key=lambda prompt: prompt.at_seconds)


def _batches(random: Random) -> Iterator[Prompt]:
    jobs = batch_jobs(random)
    offset = 0.0
    for batch in count(1):
        for prompt in islice(jobs, BATCH_JOBS):
            at = max(batch * BATCH_GAP_SECONDS, prompt.at_seconds + offset)
            offset = at - prompt.at_seconds
            yield Prompt(at, prompt.segments, prompt.output_tokens)


def _tenant(random: Random, number: int) -> Iterator[Turn]:
    ranks = _zipf(len(TENANTS) * TENANT_PROMPTS, 1.0)
    chosen = random.choices(range(len(ranks)), cum_weights=ranks)[0]
    size, share = TENANTS[chosen % len(TENANTS)]
    own = Segment(("request", number), tokens(random, size * (1 - share), 0.5))
    yield Turn(0.0, (Segment(("tenant", chosen), round(size * share)), own), tokens(random, 100, 0.6))


def tenants(random: Random) -> Iterator[Prompt]:
    """Requests of several tenants, each with a system prompt that all its requests share.

    Preble: the lengths and shares of `TENANTS`. Assumed: eight such prompts of each kind, whose popularity is Zipf
    with exponent 1; two requests a second.
    """
    return poisson(random, _tenant, gap_seconds=0.5)


def shift(random: Random, requests: int) -> Iterator[Prompt]:
    """A mixture that changes twice: `chat` with `tenants`, then `retrieval`, then `agents` with one-shot batches.

    The parts have a half, a quarter and a quarter of the requests (assumed). Nothing of a part comes again later.
    """
    parts = (
        heapq.merge(chat(Random(random.random())), tenants(random), key=lambda prompt: prompt.at_seconds),
        retrieval(Random(random.random())),
        heapq.merge(agents(Random(random.random())), _batches(random), key=lambda prompt: prompt.at_seconds),
    )
    start = 0.0
    for part, share in zip(parts, (requests - 2 * (requests // 4), requests // 4, requests // 4), strict=True):
        at = start
        for prompt in islice(part, share):
            at = start + prompt.at_seconds
            yield Prompt(at, prompt.segments, prompt.output_tokens)
        start = at


_FAMILIES: Final[dict[str, Callable[[Random], Iterator[Prompt]]]] = {
    "agents": agents,
    "chat": chat,
    "retrieval": retrieval,
    "scans": scans,
    "tenants": tenants,
}


def family_names() -> tuple[str, ...]:
    """Return the names that `prompts_of` knows."""
    return (*_FAMILIES, "shift")


def prompts_of(family: str, seed: int, requests: int) -> Iterator[Prompt]:
    """Yield so many prompts of the family, in the order of their times."""
    random = Random(f"{family} {seed}")
    return shift(random, requests) if family == "shift" else islice(_FAMILIES[family](random), requests)
