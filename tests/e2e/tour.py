"""The tour of the screens (docs/screens.md): what to press, and what is then to be seen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "screens.md"

#: The page's names of keys that are no characters, as tmux has them.
NAMED = {"enter": "Enter", "esc": "Escape", "↓": "Down"}


@dataclass(frozen=True, slots=True)
class TourStep:
    """A row of the tour: the keys, whether the last is repeated until everything is there, and what is to be seen."""

    keys: tuple[str, ...]
    repeated: bool
    seen: tuple[str, ...]


def tour() -> list[TourStep]:
    """The rows of the table that the page marks with `<!-- screens -->`."""
    table = re.search(r"<!-- screens -->\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"))
    assert table is not None, "the page has no table marked <!-- screens -->"
    steps = []
    for row in table[1].splitlines()[2:]:
        keys, reported = (cell.strip() for cell in row.strip("| ").split(" | "))
        seen = tuple(text.replace("\\*", "*") for text in re.findall(r"\*\*(.+?)\*\*", reported))
        steps.append(TourStep(tuple(re.findall(r"`([^`]+)`", keys)), keys.endswith("…"), seen))
    return steps
