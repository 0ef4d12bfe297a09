"""The numbers and titles of the panes, which the keys and the tabs know before a pane is imported."""

from __future__ import annotations

OPERATIONS, ATTENTION, CACHE, WEIGHTS, LOGITS, SENTINELS, GOLDEN, JOURNAL, TENSOR, EXPERTS = range(1, 11)

#: In the order of their numbers; then as they are where it is narrow.
TITLES = (
    "Operations", "Attention", "KV cache", "Weights", "Logits", "Sentinels", "Golden", "Journal", "Tensor",
    "Experts",
)  # fmt: skip
SHORT_TITLES = ("Ops", "Attn", "KV", "Wts", *TITLES[4:9], "MoE")


def titled(number: int) -> tuple[int, str, str]:
    """A pane's number, its title and its short title."""
    return number, TITLES[number - 1], SHORT_TITLES[number - 1]


def digit(number: int) -> str:
    """The key of a pane, and the number that it goes by: 1 to 9, then 0."""
    return str(number % 10)
