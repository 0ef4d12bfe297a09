"""What a screen may offer in the palette."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from textual.app import SystemCommand


@runtime_checkable
class HasPalette(Protocol):
    """A screen with entries of its own."""

    def palette(self) -> Iterable[SystemCommand]:
        """The entries, the most useful first."""
