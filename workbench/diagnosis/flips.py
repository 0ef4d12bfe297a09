"""Routing flips: tokens that went to other experts than the reference's because two were equally good within rounding,
and queries for which an indexer chose other keys.

Everything that is computed from such a token's row differs by far more than rounding, and nothing is wrong. What
follows from a flip is not judged against the reference; on its own inputs it is, as everything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from lockstep.engine.graph import instead_of
from lockstep.engine.graph.operation import CHOICES
from lockstep.engine.taps.flow import near
from lockstep.engine.taps.names import layer_of, local_name, operation_at
from lockstep.workbench.diagnosis.flip_figures import flips_in_figures
from lockstep.workbench.diagnosis.judgement import TapVerdict
from lockstep.workbench.diagnosis.operations.own_inputs import OwnInputs
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.upstream import Upstream
from lockstep.workbench.judgements.golden_event import RoutingFlip, TokenMismatch


def is_choice(tap: str) -> bool:
    """Whether it holds the numbers of chosen experts or keys: equal or not, never off by a little."""
    operation = operation_at(tap)
    return operation is not None and operation.kind in CHOICES


#: How the reason of what follows from one ends.
_AFTER = ", after a routing flip"


@dataclass(slots=True)
class Flips:
    """The flips of a run so far, taps being judged in the order of execution."""

    own: OwnInputs
    following: Upstream
    found: list[TapVerdict] = field(default_factory=list)
    #: (step, sequence) of logits that follow from one.
    logits: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def of(cls, own: OwnInputs, layers: int) -> Flips:
        """None yet."""
        return cls(own, Upstream(layers))

    def excused(self, verdict: TapVerdict, inherited: bool) -> TapVerdict:
        """The verdict, no failure where the tap follows from a flip or is one. `inherited`: what it was computed from
        has failed."""
        follows = self.following.has_failed(verdict.seq, verdict.tap)
        flip = (
            is_choice(verdict.tap)
            and not (follows or inherited)
            and verdict.max_abs > 0  # the floor is no measure: the reference at this dtype flips itself
            and self.own.is_right(verdict.tap, verdict.step, verdict.seq) is True
        )
        if flip:
            what = "experts" if local_name(verdict.tap).startswith("mlp.") else "keys"
            why = f"other {what} than the reference's, by a margin within rounding"
            verdict = replace(verdict, verdict="suspect", reason=why)
            self.found.append(verdict)
        elif follows and verdict.verdict == "fail":
            verdict = replace(verdict, verdict="suspect", reason=f"{verdict.reason}{_AFTER}")
        if follows and verdict.tap == "logits":
            self.logits.add((verdict.step, verdict.seq))
        # What fails for another reason hands on no flip.
        self.following.note(replace(verdict, verdict="pass"), follows or flip)
        return verdict

    def of_sparse_scores(self, verdict: TapVerdict, dtype: str) -> TapVerdict:
        """The verdict, of scores of chosen keys no overflow where the reference at `dtype` chooses others itself."""
        if not (math.isinf(verdict.floor) and self._is_sparse(verdict.tap)):
            return verdict
        reason = f"the reference chooses other keys itself in {dtype}"
        return replace(verdict, floor=math.nan, reason=reason)

    def hides_others(self, verdict: TapVerdict) -> bool:
        """Whether scores are infinite where the reference's are not as other keys were chosen, by a margin within
        rounding."""
        return self._is_sparse(verdict.tap) and self.following.has_failed(verdict.seq, verdict.tap)

    def _is_sparse(self, tap: str) -> bool:
        """Whether these are scores of the keys that an indexer chose."""
        operation, layer = operation_at(tap), layer_of(tap)
        if operation is None or operation.kind != "scores":
            return False
        return any(self.own.taps.has(near(one, layer, 0)) for one in instead_of(operation.inputs["chosen"]))

    def in_figures(
        self, engine: Recording, golden: Recording, verdicts: Sequence[TapVerdict]
    ) -> tuple[RoutingFlip, ...]:
        """Each token of them; `verdicts` are of all taps."""
        if not self.found:
            return ()
        after = Counter((one.step, one.seq) for one in verdicts if one.reason.endswith(_AFTER))
        reported = flips_in_figures(self.found, engine, golden, self.own.facts)
        return tuple(structs.replace(one, follows=after[one.step, one.seq]) for one in reported)

    def settled(self, miss: TokenMismatch) -> TokenMismatch:
        """Another token that follows from a flip is as good."""
        return structs.replace(miss, tie=miss.tie or (miss.step, miss.seq) in self.logits)

    def in_words(self) -> str:
        """The first one, and what it means; "" where there is none."""
        if not self.found:
            return ""
        first, more = self.found[0], f" (and {len(self.found) - 1} more)" if len(self.found) > 1 else ""
        return (
            f"{first.tap} of sequence {first.seq}, step {first.step}{more}: {first.reason}; what follows from that is "
            "judged on its own inputs alone"
        )
