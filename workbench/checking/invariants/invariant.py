"""`Invariant`: one thing that is true of every right engine, whatever the model, and what it means where it is not."""

from __future__ import annotations

from typing import Literal

import msgspec


class Invariant(msgspec.Struct, frozen=True, kw_only=True):
    """`told` is what was seen, or why it could not be tried; `means` where a bug that breaks it is to be sought."""

    name: str
    result: Literal["holds", "broken", "not tried"]
    told: str
    means: str = ""
    tap: str = ""

    @classmethod
    def of(cls, name: str, means: str, told: str, broken: str = "", tap: str = "") -> Invariant:
        """It holds, which `told` says, or what is `broken`."""
        if broken:
            return cls(name=name, result="broken", told=broken, means=means, tap=tap)
        return cls(name=name, result="holds", told=told)
