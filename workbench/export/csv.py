"""CSV (RFC 4180) for spreadsheets and for programs: a cell of text can never become a formula."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from lockstep.sessions.text import clean

#: What a spreadsheet takes for the beginning of a formula (their full-width forms too).
_FORMULA = tuple("=+-@|%＝＋－＠")


class Writable(Protocol):
    """Anything that text can be written to."""

    def write(self, text: str, /) -> object: ...


def write(out: Writable, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> int:
    """A header and the rows; the number of rows. NaN and the infinities are `nan`, `inf`, `-inf`; None is empty."""
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([cell(name) for name in columns])
    count = 0
    for row in rows:
        writer.writerow([cell(value) for value in row])
        count += 1
    return count


def cell(value: object) -> str:
    """One value as a spreadsheet may read it. Text that looks like a formula gets an apostrophe in front
    (OWASP, "CSV Injection"); numbers are left alone, whatever their sign."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.9g}" if math.isfinite(value) else str(value)
    text = clean(str(value))
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text
