"""The numbers and titles of the panes, which the keys and the tabs know before a pane is imported."""

from __future__ import annotations

OPERATIONS, ATTENTION, CACHE, WEIGHTS, LOGITS, SENTINELS, GOLDEN, JOURNAL, TENSOR = range(1, 10)

#: In the order of their numbers; then as they are where it is narrow.
TITLES = (
    "Operations", "Attention", "KV cache", "Weights", "Logits", "Sentinels", "Golden", "Journal", "Tensor",
)  # fmt: skip
SHORT_TITLES = ("Ops", "Attn", "KV", *TITLES[3:])


def titled(number: int) -> tuple[int, str, str]:
    """A pane's number, its title and its short title."""
    return number, TITLES[number - 1], SHORT_TITLES[number - 1]
