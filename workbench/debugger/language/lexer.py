"""The words of an expression."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.workbench.debugger.errors import CommandError

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)"
    r'|(?P<string>"(?:[^"\\]|\\.)*")'
    r"|(?P<op><=|>=|==|!=|[-+*/<>()\[\],:]))"
)
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


@dataclass(frozen=True, slots=True)
class Token:
    """One word of an expression: what it is, its text, the column where it starts."""

    kind: str  # "number" | "name" | "string" | "op" | "end"
    text: str
    at: int


def tokenize(line: str) -> list[Token]:
    """The words of a line, with an "end" after the last. CommandError at what is no word."""
    tokens, at = [], 0
    while line[at:].strip():
        match = _TOKEN.match(line, at)
        if match is None:
            start = at + len(line[at:]) - len(line[at:].lstrip())
            raise CommandError(f"unexpected {line[start]!r}", line, start)
        kind = str(match.lastgroup)
        tokens.append(Token(kind, match[kind], match.start(kind)))
        at = match.end()
    return [*tokens, Token("end", "", len(line.rstrip()))]


def reference_words(line: str) -> list[Token]:
    """A reference's own words; what follows it is another's to read (`= golden`, `rank 1`)."""
    match = re.match(r"\s*[A-Za-z_][\w.]*\s*(\[[^\]]*\])?", line)
    head = line[: match.end()] if match else line
    tokens = tokenize(head)
    return [*tokens[:-1], Token("end", "", len(head))]


def unescape(text: str) -> str:
    """The text of a string as it was written, quotes included."""
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text[1:-1])
