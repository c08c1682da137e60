"""What the rules of the project's English find in one Markdown text.

The parser tells prose from code: fences, indented code and code spans are quoted, and not checked for words. A code
span counts as one word of its sentence.
"""

from __future__ import annotations

import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

SENTENCE_WORDS_MAX: Final = 25
LINE_CHARACTERS_MAX: Final = 120
CELL_CHARACTERS_MAX: Final = 100
WORDS: Final = {
    re.compile(rf"(?<![\w-])(?:{words})(?![\w-])".replace(" ", r"\s+"), re.IGNORECASE): instead
    for words, instead in tomllib.loads((Path(__file__).parent / "words.toml").read_text())["words"].items()
}
_CODE: Final = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for a code span in a sentence."""
_QUOTED: Final = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}")
_SENTENCE_END: Final = re.compile(rf"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[)\"”*_]*\s+(?=[\"“(*_]*[\w{_CODE}])")
_WORD: Final = re.compile(rf"[\w{_CODE}][^\s{_CODE}]*")
_NO_SUBJECT: Final = re.compile(r"\W*(Who|What)\b")
_INLINE_TEXT: Final = {"text", "text_special"}
_LINE_BREAK: Final = {"softbreak", "hardbreak"}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    line: int
    rule: str
    text: str


def findings(markdown: str) -> list[Finding]:
    """Return all findings in a text, by line. An HTML comment is not checked."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    return sorted({*_long_lines(markdown, tokens), *_prose(tokens)})


def findings_of_code(source: str) -> list[Finding]:
    """Return the words in comments and texts of a module. Code spans and fields of f-strings are not checked."""
    return [
        _word(token.start[0] + text.count("\n", 0, match.start()), match[0], instead)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string)
        for text in [_QUOTED.sub("", token.string)]
        for words, instead in WORDS.items()
        for match in words.finditer(text)
    ]


def _word(line: int, found: str, instead: str) -> Finding:
    return Finding(line, "word", f'"{" ".join(found.split())}": use {instead}')


def _long_lines(markdown: str, tokens: list[Token]) -> Iterator[Finding]:
    """Rows of a table cannot be wrapped: their cells are measured instead."""
    tables = {
        line
        for token in tokens
        if token.type == "table_open" and token.map
        for line in range(token.map[0], token.map[1])
    }
    for index, line in enumerate(markdown.splitlines()):
        if len(line) > LINE_CHARACTERS_MAX and index not in tables and " " in line.strip():
            yield Finding(index + 1, "line", f"{len(line)} characters, at most {LINE_CHARACTERS_MAX}")


def _prose(tokens: list[Token]) -> Iterator[Finding]:
    line, block = 0, ""
    for token in tokens:
        if token.map:
            line = token.map[0] + 1
        if token.type.endswith("_open"):
            block = token.type
        if token.type != "inline":
            continue
        if block in ("td_open", "th_open") and len(token.content) > CELL_CHARACTERS_MAX:
            yield Finding(line, "cell", f"{len(token.content)} characters, at most {CELL_CHARACTERS_MAX}")
        text = _text(token)
        for match, instead in ((match, WORDS[words]) for words in WORDS for match in words.finditer(text)):
            at = line + text.count("\n", 0, match.start())
            yield _word(at, match[0], instead)
        if block != "heading_open":
            yield from _sentences(text, line)


def _sentences(text: str, line: int) -> Iterator[Finding]:
    start = 0
    for end in (*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)):
        sentence, at = text[start:end].strip(), line + text.count("\n", 0, start)
        beginning = " ".join(sentence.replace(_CODE, "`...`").split()[:6])
        words = len(_WORD.findall(sentence))
        if words > SENTENCE_WORDS_MAX:
            yield Finding(at, "sentence", f"{words} words, at most {SENTENCE_WORDS_MAX}: {beginning} ...")
        if _NO_SUBJECT.match(sentence) and sentence.endswith("."):
            yield Finding(at, "subject", f"name the subject: {beginning} ...")
        start = end


def _text(inline: Token) -> str:
    """Return what a reader sees, line breaks kept, code replaced."""
    parts = []
    for token in inline.children or ():
        if token.type in _INLINE_TEXT:
            parts.append(token.content)
        elif token.type == "code_inline":
            parts.append(_CODE)
        elif token.type in _LINE_BREAK:
            parts.append("\n")
    return "".join(parts)
