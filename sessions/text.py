"""Foreign strings made safe for a terminal: token texts, names, notes, paths."""

from __future__ import annotations

import re
import unicodedata

# ECMA-48 §5.4, §8.3: CSI to its final byte; OSC, DCS, SOS, PM and APC with their string up to BEL or ST (left
# standing where it is not terminated, so that nothing is hidden); any other escape. C1 introducers count too.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]?"
)
# What changes the reading order of the text around it (UAX #9 §2).
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(s: str, *, limit: int | None = None, newlines: bool = False) -> str:
    """`s` without anything that a terminal would act on.

    An escape sequence becomes ␛, a control character its picture (␀ … ␡), a bidi control, line separator or
    surrogate �. Other Unicode stays, combining and wide characters too. A newline is shown as ⏎ and a tab as
    ⇥ unless `newlines` keeps them. `limit` cuts to that many characters, the … included.
    """
    if limit is not None:
        s = s[: 8 * limit + 64]  # nobody sees more, and a hostile string may be huge
    if not (s.replace("\n", "").replace("\t", "") if newlines else s).isprintable():
        s = _made_safe(s, newlines)
    return s if limit is None or len(s) <= limit else s[: max(0, limit - 1)] + "…"[:limit]


def _made_safe(s: str, newlines: bool) -> str:
    return "".join(_shown(c, newlines) for c in _ESCAPES.sub("␛", s))


def _shown(c: str, newlines: bool) -> str:
    if c in "\n\t":
        return c if newlines else "⏎" if c == "\n" else "⇥"
    if c < " ":
        return chr(0x2400 + ord(c))
    if c == "\x7f":
        return "␡"
    if c in _BIDI or c in "\u2028\u2029" or unicodedata.category(c) in ("Cc", "Cs"):
        return "�"
    return c
