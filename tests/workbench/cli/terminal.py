"""A stream that somebody sits before."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """What is printed, as by somebody who sits before it."""

    def isatty(self) -> bool:
        return True
