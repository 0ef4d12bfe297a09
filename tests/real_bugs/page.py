"""docs/real-bugs.md, from bugs.toml, results.json and readings.toml."""

from __future__ import annotations

from tests.real_bugs.results import Results


def write(results: Results) -> None:
    """Write the page."""
