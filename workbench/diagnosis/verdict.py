"""The verdict on a run: the engine's session against the golden one (DESIGN §3).

Three ways: *golden* is transformers in float64, the truth; *floor* is transformers at the engine's dtype, whose
own error against the truth shows how much noise each operation has; the *engine* may have PASS times that
noise, is suspect up to FAIL times, and has failed above. A suspect alone is no divergence.

Where *golden* is llama.cpp in float32, *floor* is how far transformers at the engine's dtype is from it: the noise
between two right implementations. Where the two disagree beyond noise, they give no floor, and fixed tolerances serve.

A softmax amplifies noise: where the reference was lucky and the engine was not, its error may exceed the
limit though nothing is wrong. So a tap that fails while its inputs have passed is judged once more, on the
inputs that the engine itself recorded, as `operations` does. That takes the checkpoint, but for MODEL_FREE ones.

Calibration (correct engines, tiny models of all families, the demo model, stories260K; float32, bfloat16 and
float16; TP 1 to 8; prefill and up to 32 decode steps): almost all ratios stay below 1.7 and the largest of most runs
below 2.5. In two of some 100 runs the probabilities of a decode step reached 3.3 and 3.9; both were excused, being
right on their own inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lockstep.engine.taps.names import count_layers, layer_of
from lockstep.sessions.records import SequenceStep
from lockstep.workbench.diagnosis.compare import compare, wrong_ranks
from lockstep.workbench.diagnosis.flips import Flips
from lockstep.workbench.diagnosis.floors import Floors
from lockstep.workbench.diagnosis.judgement import DiagnosisError, Judgement, TapResult, TapVerdict
from lockstep.workbench.diagnosis.measure import (
    MeasuredTap,
    NoiseLimits,
    Recordings,
    limits_of,
    measure,
    references_apart,
    relative,
)
from lockstep.workbench.diagnosis.nearness import nearer
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.own_inputs import OwnInputs
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.tokens import TokenComparison, compare_tokens
from lockstep.workbench.diagnosis.upstream import Upstream
from lockstep.workbench.judgements.golden_event import Divergence, TokenMismatch
from lockstep.workbench.views.moved import ROUNDING
from lockstep.workbench.views.verdicts import WRONG_ABOVE
from lockstep.workbench.words.numbers import times

#: Error over floor up to which a tap passes, and above which it has failed.
PASS, FAIL = 1.5, WRONG_ABOVE

#: The same for the worst element of a tensor, so that a few wrong ones do not drown among many right.
#: Extremes scatter more than means do: correct engines stay below 2.5.
FAIL_SINGLE = 8.0

#: Error over floor above which no noise of the inputs is an excuse, however an operation amplifies it.
AMPLIFIED = 4 * FAIL


def judge(sides: Recordings, facts: Facts | None = None) -> Judgement:
    """Judge every tap of every step of the engine's branch.

    The golden session must cover those steps with the same ids; without a reference at the engine's dtype fixed
    tolerances serve. `facts` are of the checkpoint, where it is at hand. IdsMismatch where the ids differ;
    DiagnosisError where the golden session does not stand up to itself or there is nothing to compare.
    """
    measured = list(measure(sides))
    if all(place.engine.metrics is None for place in measured):
        raise DiagnosisError(
            f"{sides.engine.session.path.name} has no tensor of any tap to compare; record it with `--capture full`"
        )
    apart = references_apart(sides, measured)
    limits = limits_of(sides.engine.dtype, measured if apart is None else [])
    layers = count_layers(tap.name for tap in sides.golden.session.taps)
    own = OwnInputs(
        RecordedTaps(sides.engine, sides.golden),
        facts or Facts.without_checkpoint(layers, sides.engine.dtype),
    )
    flips = Flips.of(own, layers)
    verdicts = tuple(_judge_taps(measured, limits, flips, layers))
    first = next((verdict for verdict in verdicts if verdict.verdict == "fail"), None)
    tolerance = 0.0 if sides.floor else ROUNDING[sides.engine.dtype]
    tokens = compare_tokens(sides.engine, *_references(sides), tolerance)
    tokens = replace(tokens, mismatches=tuple(map(flips.settled, tokens.mismatches)))
    odd = next((miss for miss in tokens.mismatches if not miss.tie), None)
    divergence = _divergence(sides, first) if first else _wrong_choice(sides, odd) if odd else None
    overflow = next((_overflow(verdict) for verdict in verdicts if math.isinf(verdict.floor)), None)
    return Judgement(
        "diverged" if divergence else "inconclusive" if overflow else "match",
        tokens.max_abs_logits,
        tokens.identical,
        divergence,
        verdicts,
        sides.engine.ranks,
        limits.whole.tolerance,
        tokens.mismatches,
        flips.in_figures(sides.engine, sides.golden, verdicts),
        (
            *_notes(sides, limits.whole),
            *([] if apart is None else [apart]),
            *filter(None, [flips.in_words()]),
            *_nearer(sides, measured, verdicts, tokens),
        ),
        reference=sides.golden.session.meta.source or "transformers",
        overflow=overflow,
    )


def _nearer(
    sides: Recordings,
    measured: Sequence[MeasuredTap],
    verdicts: Sequence[TapVerdict],
    tokens: TokenComparison,
) -> list[str]:
    """Who is nearer to the truth, where engine and reference differ by more than is usual."""
    differ = tokens.mismatches or any(one.verdict in ("fail", "suspect") for one in verdicts)
    if not differ or sides.floor is None or sides.two_libraries:
        return []
    source = sides.floor.session.meta.source or "the reference"
    return list(filter(None, [nearer(measured, source, sides.floor.dtype)]))


def _references(sides: Recordings) -> tuple[Recording, Recording]:
    """Whose choice of tokens counts, and what is further off in precision or, of two libraries, the other one."""
    if sides.floor is None:
        return sides.golden, sides.golden
    return (sides.golden, sides.floor) if sides.two_libraries else (sides.floor, sides.golden)


def _judge_taps(
    measured: Sequence[MeasuredTap], limits: NoiseLimits, flips: Flips, layers: int
) -> Iterator[TapVerdict]:
    upstream = Upstream(layers)
    for place in measured:
        upstream.enter(place.step)
        flips.following.enter(place.step)
        inherited = upstream.has_failed(place.seq, place.tap)
        verdict = flips.of_sparse_scores(verdict_of(place, limits), limits.whole.dtype)
        if not place.engine.broken or flips.hides_others(verdict):
            verdict = flips.excused(verdict, inherited)
        if verdict.verdict == "fail" and not inherited and not place.engine.broken:
            verdict = _reconsidered(flips.own, verdict, upstream.ratio(place.seq, place.tap))
        if inherited and verdict.verdict == "fail":
            verdict = replace(verdict, inherited=True)
        upstream.note(verdict, inherited)
        yield verdict


def verdict_of(place: MeasuredTap, limits: NoiseLimits) -> TapVerdict:
    """A tap's error against its noise, whatever its inputs were."""
    found = place.engine.metrics
    if found is None:
        return TapVerdict(place.tap, place.step, place.seq, "absent", reason=place.engine.reason)
    floor = limits.whole.of(place.step, place.seq, place.tap)

    def judged(verdict: TapResult, ratio: float = math.nan, reason: str = "") -> TapVerdict:
        off = (found.max_abs, found.rel_l2, found.cosine)
        return TapVerdict(place.tap, place.step, place.seq, verdict, *off, floor, ratio, reason)

    ratio = found.rel_l2 / floor
    if math.isinf(floor):
        if place.noise is None or place.largest or not math.isfinite(place.noise.max_abs):
            return judged("suspect", reason=f"the reference overflows in {limits.whole.dtype}")
        # The truth is all zeros, as where each token goes to expert 0: no error is relative to that.
        floor, ratio = math.nan, found.max_abs / place.noise.max_abs
    if place.engine.broken:
        return judged("fail", ratio, place.engine.broken)
    if ratio > FAIL:
        return judged("fail", ratio, f"{times(ratio)} times the noise floor")
    single = relative(found.max_abs, place.largest) / limits.single.of(place.step, place.seq, place.tap)
    if single > FAIL_SINGLE:
        where = list(found.where)
        return judged(
            "fail", ratio, f"element {where} is off by {times(single)} times the noise of single elements"
        )
    return judged("suspect" if ratio > PASS else "pass", ratio)


def _reconsidered(own: OwnInputs, failed: TapVerdict, strain: float) -> TapVerdict:
    """A failure whose inputs have passed: is it the operation's, or the inputs' own noise, amplified?

    The operation is judged on the inputs that the engine itself recorded. One that cannot be (most take the
    checkpoint) is excused if its error is hardly larger than it came: `strain` times the floor.
    """
    if failed.ratio > AMPLIFIED:
        return failed
    right = own.is_right(failed.tap, failed.step, failed.seq)
    if not (failed.ratio <= PASS * strain if right is None else right):
        return failed
    reason = f"{failed.reason}, but right on its inputs, whose noise it amplifies"
    return replace(failed, verdict="suspect", reason=reason)


def _divergence(sides: Recordings, first: TapVerdict) -> Divergence:
    place = (first.tap, first.step, first.seq)
    ranks = wrong_ranks(sides.engine, sides.golden, *place, FAIL * first.floor)
    if not ranks:  # each is right within noise: then it is the replicas that disagree
        right = sides.golden.session.rebuilt(first.tap, step=first.step, seq=first.seq)
        assert right.array is not None, "what was judged has a golden tensor"
        ranks = compare(sides.engine, *place, right.array, sides.golden.dtype, right.slice).odd_ranks
    everyone = len(ranks) in (0, sides.engine.ranks)
    return Divergence(
        first.tap,
        layer_of(first.tap),
        first.step,
        first.seq,
        None if everyone else ranks[0],
        ranks or tuple(range(sides.engine.ranks)),
        first.max_abs,
        first.rel_l2,
        first.cosine,
        first.reason,
    )


def _wrong_choice(sides: Recordings, miss: TokenMismatch) -> Divergence:
    """All tensors are right and another token came out: what chose it is wrong."""
    reason = f"token {miss.engine} was chosen, the reference's is {miss.reference}; all taps are within noise"
    ranks = tuple(range(sides.engine.ranks))
    return Divergence("logits", None, miss.step, miss.seq, None, ranks, math.nan, math.nan, math.nan, reason)


def _overflow(verdict: TapVerdict) -> Divergence:
    """Where the reference at the engine's dtype first holds NaN or infinities that the truth does not."""
    place = (verdict.tap, layer_of(verdict.tap), verdict.step, verdict.seq)
    return Divergence(*place, max_abs=verdict.max_abs, rel_l2=verdict.rel_l2, reason=verdict.reason)


def _notes(sides: Recordings, floors: Floors) -> tuple[str, ...]:
    notes = [f"positions differ from step {step}" for step in _moved(sides.engine, sides.golden)][:1]
    if floors.tolerance == "fixed":
        notes.append(f"no reference at {floors.dtype}: judged by fixed tolerances")
    return tuple(notes)


def _moved(engine: Recording, golden: Recording) -> Iterator[int]:
    """The steps at which the engine put tokens at other positions."""
    for step in engine.steps:
        ours, theirs = engine.sequences(step), golden.sequences(step)
        if any(_positions(ours[seq]) != _positions(theirs[seq]) for seq in ours):
            yield step


def _positions(sequence: SequenceStep) -> tuple[int, ...]:
    return tuple(sequence.positions)
