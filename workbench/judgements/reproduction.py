"""What became of the reference when a cause was put into it."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from lockstep.workbench.words.numbers import number

#: "partly": it takes away at least half of the difference; "not tried": it could not be put in.
Outcome = Literal["reproduced", "partly", "not reproduced", "not tried"]


class Reproduction(msgspec.Struct, frozen=True):
    """The reference, with this cause and all others of the run in it, held against the run.

    `end` is the last tap that was compared, the logits as a rule: by how much the run is off the reference there,
    relative L2, `before` and `after`, and how far roundings of the run's dtype take the changed reference (`floor`).
    `within` of `taps` taps behind the first change are within that, `first_off` is the first that is not. The likeliest
    token is the run's in `tokens` of `of_tokens` passes, without the change in `tokens_before`. `why` it was not tried.
    At `on_run_inputs` taps what the cause predicts of the recorded inputs was put in, as it could not be reported again
    from the reference's. `held`: the graph that stands for the reference was held against a golden session, and has
    its logits.
    """

    outcome: Outcome
    why: str = ""
    end: str = ""
    before: float | None = None
    after: float | None = None
    floor: float | None = None
    within: int = 0
    taps: int = 0
    first_off: str = ""
    tokens: int = 0
    tokens_before: int = 0
    of_tokens: int = 0
    held: bool = True
    on_run_inputs: int = 0

    def in_words(self) -> str:
        """ "reproduced: put into the reference, it gives the run's logits within rounding (rel 3e-07; without it 0.21),
        12 of 12 tokens"."""
        if self.outcome == "not tried":
            return f"not tried: {self.why}"
        tokens = f", {self.tokens} of {self.of_tokens} tokens" if self.of_tokens else ""
        into = "put into the reference" + ("" if self.held else " (the graph in float64: none was recorded)")
        if self.on_run_inputs:
            into += f" (at {self.on_run_inputs} taps as predicted of the run's own inputs)"
        left = f"rel {number(self.after)}; without it {number(self.before)}"
        if self.outcome == "reproduced":
            return f"reproduced: {into}, it gives the run's {self.end} within rounding ({left}){tokens}"
        off = f"; first off at {self.first_off}" if self.first_off else ""
        if self.outcome == "partly":
            share = 1 - (self.after or 0.0) / self.before if self.before else math.nan
            return (
                f"reproduced in part: {into}, it takes away {100 * share:.0f} % of what the run's "
                f"{self.end} are off by ({left}){tokens}{off}"
            )
        return f"not reproduced: {into}, it does not give the run's {self.end} ({left}){tokens}{off}"
