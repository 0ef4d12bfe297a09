"""The documents and the code agree on how many ranks there may be."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.engine.config.engine import MOST_RANKS
from lockstep.sessions.format.read_rows import MAX_RANKS

ROOT = Path(__file__).resolve().parents[3]


def test_every_document_names_the_same_number_of_ranks() -> None:
    reported = {
        file.name: re.findall(r"(?:at most|more than) ([\d,]+) ranks", file.read_text(encoding="utf-8"))
        for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    }
    assert {"import.md", "security.md"} <= {name for name, found in reported.items() if found}
    assert {number for found in reported.values() for number in found} == {f"{MOST_RANKS:,}"}
    assert MAX_RANKS == MOST_RANKS
