"""Validation of prompts. Torch-free: the host validates before it starts a rank."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.engine.errors import RequestError


def check_prompt(ids: Sequence[int], *, vocab_size: int, context: int) -> None:
    """RequestError for a prompt that is empty, longer than `context` tokens, or has ids out of range."""
    if not ids:
        raise RequestError("the prompt is empty: give at least one token")
    if len(ids) > context:
        raise RequestError(f"the prompt has {len(ids)} tokens, the context holds {context}: shorten it")
    check_ids(ids, vocab_size)


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """RequestError for token ids outside the vocabulary."""
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise RequestError(
            f"token id {wrong[0]} is out of range: the vocabulary has ids 0 to {vocab_size - 1}"
        )
