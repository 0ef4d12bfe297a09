"""Where two generated texts part, as text."""

from __future__ import annotations

from lockstep.sessions.text import clean
from lockstep.workbench.checking.texts import Parting, TextComparison
from lockstep.workbench.inferior.generation import Top
from lockstep.workbench.models.tokenizer import Tokenizer

#: Of the likeliest tokens so many are shown.
SHOWN = 5


def comparison_text(compared: TextComparison, tokenizer: Tokenizer | None) -> str:
    """The comparison in lines."""
    if not compared.partings:
        return f"{compared.reference}: the same {compared.tokens} tokens"
    return "\n".join(
        line for parting in compared.partings for line in _lines(parting, compared.reference, tokenizer)
    )


def _lines(parting: Parting, reference: str, tokenizer: Tokenizer | None) -> list[str]:
    ours, theirs = (_token(token, tokenizer) for token in (parting.engine_token, parting.reference_token))
    width = max(len("lockstep"), len(reference))
    return [
        f"sequence {parting.seq} parts from {reference} at new token {parting.step + 1} (position {parting.position}): "
        f"{ours} here, {theirs} there",
        f"  {'lockstep':{width}}  {_top(parting.engine_top, tokenizer)}",
        f"  {reference:{width}}  {_top(parting.reference_top, tokenizer)}",
    ]


def _top(top: Top, tokenizer: Tokenizer | None) -> str:
    return "   ".join(f"{_token(token, tokenizer)} {logit:.4f}" for token, logit in top[:SHOWN])


def _token(token: int, tokenizer: Tokenizer | None) -> str:
    text = None if tokenizer is None else tokenizer.token(token)
    return str(token) if text is None else f"{token} {clean(repr(text), limit=24)}"
