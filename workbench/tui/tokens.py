"""Token texts as a person can read them: nothing invisible, nothing that the terminal would obey.

Every token comes from a foreign file. What it shows here is text only: control and format characters get
a visible form, a lone combining mark gets a circle to stand on, special tokens get angle quotes.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from rich.cells import cell_len, set_cell_size

_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡", "\u00a0": "⍽", "\ufeff": "‹bom›"}


def _visible_character(character: str) -> str:
    """One character, or what stands for it."""
    if character in _NAMED:
        return _NAMED[character]
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the "symbol for" block: ␛ for escape
    category = unicodedata.category(character)
    if category in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"‹{code:x}›"
    return "·" if category == "Zs" and character != " " else character


@lru_cache(maxsize=65536)
def visible(text: str, limit: int = 24) -> str:
    """`text` of one token in at most `limit` cells, free of control characters.

    A leading space stays a space (it is how words begin); other blanks are dots, so that they are seen.
    """
    if not text:
        return "∅"
    if len(text) > 2 and text[0] == "<" and text[-1] == ">":
        text = f"‹{text[1:-1]}›"
    shown = "".join(map(_visible_character, text[: 4 * limit]))
    if not shown.strip(" "):
        shown = "·" * len(shown)
    elif shown[-1] == " ":
        body = shown.rstrip(" ")
        shown = body + "·" * (len(shown) - len(body))
    if unicodedata.combining(shown[0]):
        shown = "◌" + shown
    if cell_len(shown) > limit:
        shown = set_cell_size(shown, limit - 1).rstrip(" ") + "…"
    return shown if cell_len(shown) else "◌" + shown


def fit(text: str, width: int, *, right: bool = False) -> str:
    """`text` in exactly `width` cells: cut with an ellipsis or padded. Counts wide characters as two."""
    if width <= 0:
        return ""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    padding = " " * (width - length)
    return padding + text if right else text + padding
