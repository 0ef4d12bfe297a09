"""Reports that a command writes beside what it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO


def write_report(file: Path | None, write: Callable[[TextIO], object]) -> list[str]:
    """Write a report where one is asked for; what is to be reported where that is not possible."""
    if file is None:
        return []
    try:
        with file.open("w", encoding="utf-8", newline="") as out:
            write(out)
    except OSError as error:
        return [f"{file} is not written: {error.strerror}"]
    return []
