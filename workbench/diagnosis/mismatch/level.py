"""What was found at one level, and the levels in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

LevelName = Literal["tokens", "weights", "logprob", "routing", "operation", "shape"]
LEVELS: tuple[LevelName, ...] = get_args(LevelName)
#: The names of the two sides.
ROLLOUT, TRAINER = "rollout", "trainer"
Result = Literal["equal", "differs", "unknown"]


@dataclass(frozen=True, slots=True)
class Level:
    """`text` is one sentence: what is the same, what differs where, or what is missing to know; `details` go on."""

    name: LevelName
    result: Result
    text: str
    details: tuple[str, ...] = ()
