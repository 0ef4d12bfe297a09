"""Queries that are scaled by their position, so that attention stays sharp in long contexts: Llama 4's temperature
tuning (arXiv:2501.19399), and what Ministral-3 and Mistral 4 have of it. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """A query at position p is multiplied by 1 + beta · ln(1 + ⌊(p + offset) / length⌋). `unrotated_alone`: in layers
    that do not rotate, and in no others."""

    beta: float
    length: int
    offset: int = 0
    unrotated_alone: bool = False

    @property
    def begins(self) -> int:
        """The first position at which the factor is not 1."""
        return self.length - self.offset
