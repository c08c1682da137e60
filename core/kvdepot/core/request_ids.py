"""Ids of requests: how engines build theirs from the ids that users and gateways know.

vLLM 0.32 and 0.33 put the name of the endpoint before the id that a user sends (X-Request-Id). After it they put the
number of a prompt or of a beam, and 8 digits. For more than one answer (n), the answer's number comes before
everything: `1_cmpl-my-id-0-1a2b3c4d`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

_VERBS: Final = (
    "cmpl", "chatcmpl", "generate-tokens", "generative-scoring", "decision", "embd", "pooling", "classify", "score",
    "transcribe", "translate", "tokenize", "rt",
)  # fmt: skip
BEFORE: Final = rf"(?:[0-9]+_)?(?:(?:{'|'.join(_VERBS)})-)?"
BEHIND: Final = r"(?:[-_](?:beam-)?[0-9]+)*(?:-[0-9a-f]{8}(?:-beam-[0-9]+)?)?"
ADVICE: Final = (
    "give the id that the engine logs, its beginning, or the user's id in it: vLLM puts `cmpl-` or `chatcmpl-` before"
    " an X-Request-Id, `0_` before that where n is above 1, and `-0` after it"
)


def meant(asked: str, ids: Sequence[str]) -> list[int]:
    """Return the places of the ids that are meant by one that may be a user's, in their order.

    The id itself, else those that an engine has made of it, else those that begin with it, else those that have it
    after a sign.
    """
    name = re.escape(asked)
    tests: tuple[Callable[[str], object], ...] = (
        lambda one: one == asked,
        re.compile(f"{BEFORE}{name}{BEHIND}").fullmatch,
        lambda one: one.startswith(asked),
        re.compile(f"[^0-9A-Za-z]{name}").search,
    )
    for test in tests:
        if found := [place for place, one in enumerate(ids) if test(one)]:
            return found
    return []
