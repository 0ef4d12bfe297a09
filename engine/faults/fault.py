"""`Fault`: the declaration of one known bug. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.engine.config import ModelConfig

Level = Literal["step", "build", "load"]
Group = Literal[
    "mask", "attention", "rope", "cache", "gqa", "sharding", "bias", "loading", "quantisation", "norm", "mlp"
]

#: `needs(model, tp)`: None where a fault can act, otherwise why it cannot.
Needs = Callable[[ModelConfig, int], str | None]


def _anywhere(model: ModelConfig, tp: int) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One known bug, switched on as `seam=value`; `correct` names what the seam holds by default.

    `level` is what a toggle costs: "step" acts from the next forward pass, "build" empties the cache, "load"
    reads weights again. `first_tap` is where the fault shows first (`*` for the layer), `step` in which
    step. `patch` maps fields of `Rules` to their replacements; `seam` is always among them.
    `source` is the issue of a public engine that had it, "" where none is known. `id` names it in the tests.
    """

    id: str
    seam: str
    value: str
    correct: str
    title: str
    group: Group
    level: Level
    first_tap: str
    step: int = 0
    symptom: str
    source: str = ""
    patch: Mapping[str, Callable[..., Any]] = field(repr=False, compare=False)
    needs: Needs = field(default=_anywhere, repr=False, compare=False)


def one_seam(
    seam: str,
    value: str,
    correct: str,
    patch: Callable[..., Any],
    first_tap: str,
    title: str,
    symptom: str,
    needs: Needs,
    *,
    group: Group,
    level: Level = "step",
    step: int = 0,
    source: str = "",
) -> Fault:
    """A fault that replaces its own seam and no other; `id` is made of both names."""
    return Fault(
        id=f"{seam}-{value}".replace("_", "-"),
        seam=seam,
        value=value,
        correct=correct,
        title=title,
        group=group,
        level=level,
        first_tap=first_tap,
        step=step,
        symptom=symptom,
        source=source,
        patch={seam: patch},
        needs=needs,
    )
