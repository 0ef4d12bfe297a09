"""The terminal: whether screens can be shown on it, and lines on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from lockstep.engine.text import printable


def no_screens() -> str:
    """Why no screens can be shown; "" when they can. All three streams count: keys come from the first, the
    screens are drawn on the last, and what is printed after them belongs on the second."""
    if os.environ.get("TEXTUAL_DRIVER"):
        return ""  # `lockstep web` speaks to the screens through pipes
    names = [name for name, stream in _streams() if stream is None or not stream.isatty()]
    if names:
        return f"not a terminal ({', '.join(names)}), so no screens"
    if os.environ.get("TERM") in ("dumb", "unknown"):
        return f"TERM={os.environ['TERM']}: this terminal cannot be drawn on, so no screens"
    return ""


@contextmanager
def shown_meanwhile(text: str) -> Iterator[None]:
    """A line that stands on the terminal while the screens are imported, and is gone before they are drawn."""
    out = sys.stdout
    if not out.isatty():
        yield
        return
    with suppress(OSError):
        print(printable(text, 60), end="", file=out, flush=True)
    try:
        yield
    finally:
        with suppress(OSError):
            print("\r\x1b[K", end="", file=out, flush=True)


def report_line(text: str) -> None:
    """A line on stderr under the program's name. It may quote a stranger, or a path: nothing that a terminal obeys."""
    # Imported here: numpy comes along, which help and usage errors need not wait for.
    from lockstep.sessions.text import clean

    with suppress(OSError):  # a terminal that is gone
        print(clean(f"lockstep: {text}", newlines=True), file=sys.stderr, flush=True)


def _streams() -> tuple[tuple[str, TextIO | None], ...]:
    return ("stdin", sys.stdin), ("stdout", sys.stdout), ("stderr", sys.stderr)
