"""One verdict from two: each tap against the golden reference, and each operation on its own recorded inputs.

The reference shows what came out wrong. Operations judged on their own inputs show more: one that is wrong by less than
the noise that has gathered before it is wrong all the same, and what differs without an effect is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from lockstep.engine.taps.flow import inputs_of
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.diagnosis.diagnose import Explanation
from lockstep.workbench.diagnosis.findings import WrongOperation
from lockstep.workbench.diagnosis.judgement import Judgement, TapVerdict
from lockstep.workbench.diagnosis.verdict import AMPLIFIED
from lockstep.workbench.judgements.golden_event import Divergence, Faulty

#: Taps of a softmax, alone or in one kernel with its product.
_EXPONENTIAL = ("attn.probs", "attn.context")

#: (tap, step, sequence) -> what is wrong there by itself.
_Wrong = Mapping[tuple[str, int, int], WrongOperation]


def agreed(judgement: Judgement, found: Explanation) -> tuple[Judgement, Explanation]:
    """The judgement against the reference, corrected by what was found operation by operation, and that: where the run
    leaves the reference and nothing is wrong but what should be lost in rounding, it was not lost."""
    judged = reconciled(judgement, found)
    first = judged.first_divergence
    if judged.verdict != "diverged" or first is None or found.causes or found.otherwise is None:
        return judged, found
    if first.tap in {one.tap for one in found.unjudged}:
        return judged, found
    otherwise = found.otherwise()
    return reconciled(judgement, otherwise), otherwise


def reconciled(judgement: Judgement, found: Explanation) -> Judgement:
    """The judgement against the reference, corrected by what was found operation by operation."""
    wrong = {(one.tap, step, seq): one for one in found.wrong for step in one.steps for seq in one.seqs}
    spared = (set(found.harmless) | _equal_scores(judgement, found)) - {one.tap for one in found.wrong}
    grown = _only_grown(judgement, found)
    taps = tuple(_verdict(one, wrong, spared, grown) for one in judgement.taps)
    if found.overflown and not wrong:
        taps = tuple(_out_of_range(one) for one in taps)
    first = next((one for one in taps if one.verdict == "fail"), None)
    notes = (*judgement.notes, *found.notes)
    if grown:
        notes += ("every operation is right on its own inputs: what is off has grown out of rounding",)
    faulty = judgement.faulty
    if faulty is not None:
        faulty = (*(one for one in faulty if one.tap not in spared), *_unheard(found, faulty))
    judged = replace(judgement, taps=taps, notes=notes, faulty=faulty)
    if first is not None:
        return replace(judged, verdict="diverged", first_divergence=_divergence(judgement, first, wrong))
    if found.choices is not None:
        return replace(judged, verdict="diverged", first_divergence=found.choices.first)
    known = judgement.first_divergence
    if known is None or any(not miss.tie for miss in judgement.mismatches):
        return judged
    verdict: Literal["match", "inconclusive"] = "inconclusive" if judgement.overflow else "match"
    return replace(judged, verdict=verdict, first_divergence=None)


def _only_grown(judgement: Judgement, found: Explanation) -> bool:
    """Whether all of what failed is rounding that later operations have amplified: every operation could be judged by
    itself, and none is wrong, on its own inputs nor, where that was tried, on golden ones.

    Where it was not, what begins to fail may be off by as much as operations amplify, lest a reference of other weights
    matches: in a softmax by anything, as the error of large scores becomes one of the probabilities' own size."""
    failed = [one for one in judgement.taps if one.verdict == "fail"]
    first = [one for one in failed if not one.inherited]  # by the ledger: what fails on golden inputs
    fixed = judgement.tolerance == "fixed"
    known = all(fixed or one.ratio <= AMPLIFIED or local_name(one.tap) in _EXPONENTIAL for one in first)
    return bool(failed) and not found.wrong and not found.unjudged and known


def _equal_scores(judgement: Judgement, found: Explanation) -> set[str]:
    """Taps of scores that differ from the golden ones in what masks them alone: -1e9 is as good as -inf. Whatever they
    do to the probabilities is judged there."""
    unjudged = {one.tap for one in found.unjudged}
    failed = {one.tap for one in judgement.taps if one.verdict == "fail"}
    scores = {tap for tap in failed if local_name(tap) == "attn.scores"}
    inherited = {tap for tap in scores if not failed.isdisjoint(inputs_of(tap))}
    return scores - inherited - unjudged if found.judged else set()


def _verdict(one: TapVerdict, wrong: _Wrong, spared: set[str], grown: bool) -> TapVerdict:
    finding = wrong.get((one.tap, one.step, one.seq))
    if finding is not None and one.verdict != "fail":
        return replace(one, verdict="fail", inherited=False, reason=reason_of(finding))
    if one.verdict == "fail" and (grown or one.tap in spared):
        why = "of rounding that has grown" if grown else "without effect"
        return replace(one, verdict="suspect", inherited=False, reason=f"{one.reason}, {why}")
    return one


def _out_of_range(one: TapVerdict) -> TapVerdict:
    """What is not finite where the dtype does not carry the model, though the reference was spared just there."""
    if one.verdict != "fail" or math.isfinite(one.rel_l2):
        return one
    return replace(one, verdict="suspect", reason=f"{one.reason}, beyond the range of the dtype".lstrip(", "))


def reason_of(finding: WrongOperation) -> str:
    """How wrong an operation is, in words."""
    if finding.shape:
        return finding.shape
    return f"{finding.ratio:.3g} times the rounding of this operation on its own inputs"


def _unheard(found: Explanation, faulty: tuple[Faulty, ...]) -> tuple[Faulty, ...]:
    """Operations that are wrong by themselves, which golden inputs did not show. What has another shape because
    its input has is none."""
    known = {one.tap for one in faulty} | found.misshapen
    first = {one.tap: one for one in reversed(found.wrong) if one.tap not in known}
    return tuple(
        Faulty(one.tap, min(one.steps, default=0), min(one.seqs, default=0), one.rel_l2, one.ratio)
        for one in sorted(first.values(), key=lambda one: one.order)
    )


def _divergence(judgement: Judgement, first: TapVerdict, wrong: _Wrong) -> Divergence:
    known, place = judgement.first_divergence, (first.tap, first.step, first.seq)
    if known is not None and (known.tap, known.step, known.seq) == place:
        return known
    finding = wrong.get(place)
    everyone = tuple(range(judgement.tp))
    ranks = everyone if finding is None else finding.ranks
    max_abs = first.max_abs if math.isfinite(first.max_abs) or finding is None else finding.max_abs
    return Divergence(
        first.tap, layer_of(first.tap), first.step, first.seq, None if ranks == everyone else ranks[0], ranks,
        max_abs, first.rel_l2, first.cosine, first.reason,
    )  # fmt: skip
