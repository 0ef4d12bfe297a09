"""Which rows of a cache an edit of attention is made to (`tensors.of_rows`), in words."""

from __future__ import annotations

#: Rows of a cache that an edit is made to, and those with a number, in words.
_ROWS = {
    "all": "",
    "earlier": ", those of earlier steps alone",
    "new": ", those of the step itself alone",
    "newest": ", that of the newest token alone: it is not there yet",
    "decoded": ", those written in decode alone",
    "prompt": ", those of the prompt alone",
    "prompt_alone": ", those of the prompt by themselves",
}
#: Rows that are read before they are written, in words.
MISSING = {"new": "the step itself", "newest": "the newest token"}
_RANGES = {"row": "row {}", "rows": "rows {}", "from": "rows from {} on", "before": "the rows before {}"}


def of_rows_in_words(which: object) -> str:
    """Which rows, in words; they are a name, or a name and a number."""
    name, _, number = str(which).partition(" ")
    return f", {_RANGES[name].format(number)} alone" if number else _ROWS[name]


def is_rows(which: object) -> bool:
    """Whether that is the name of some rows."""
    return str(which).partition(" ")[0] in (*_ROWS, *_RANGES)
