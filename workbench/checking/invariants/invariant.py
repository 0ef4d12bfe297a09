"""`Invariant`: one thing that is true of every right engine, whatever the model, and what it means where it is not."""

from __future__ import annotations

from typing import Literal

import msgspec


class Invariant(msgspec.Struct, frozen=True, kw_only=True):
    """`summary` is what was seen, or why it could not be tried; `means` where a bug that breaks it is to be sought."""

    name: str
    result: Literal["holds", "broken", "not tried"]
    summary: str
    means: str = ""
    tap: str = ""

    @classmethod
    def of(cls, name: str, means: str, summary: str, broken: str = "", tap: str = "") -> Invariant:
        """It holds, which `summary` states, or what is `broken`."""
        if broken:
            return cls(name=name, result="broken", summary=broken, means=means, tap=tap)
        return cls(name=name, result="holds", summary=summary)
