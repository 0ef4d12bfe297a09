"""What a judgement leaves in a session: a verdict a tap and step, and the event that sums it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.sessions import SessionWriter, VerdictRecord
from lockstep.sessions.records import JSON
from lockstep.workbench.diagnosis.judgement import Judgement, TapVerdict
from lockstep.workbench.diagnosis.ledger import in_words
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.golden_event import KIND, GoldenEvent, QuantisationLoss, UntappedRun, plain

_WORST = ("fail", "suspect", "pass", "absent")


def verdict_rows(taps: Sequence[TapVerdict], branch: int = 0) -> list[VerdictRecord]:
    """One verdict a tap and step: of several sequences the worst (an inherited failure is less than one of the
    operation's own), of equals the first."""
    worst: dict[tuple[int, str], TapVerdict] = {}
    for one in taps:
        known = worst.setdefault((one.step, one.tap), one)
        if _badness(one) < _badness(known):
            worst[one.step, one.tap] = one
    return [VerdictRecord(branch, step, tap, one.verdict, _detail(one)) for (step, tap), one in worst.items()]


def store_judgement(path: Path, branch: int, verdicts: Sequence[VerdictRecord], event: GoldenEvent) -> None:
    """Keep what was found of a branch in the session at `path`. SessionWriteError where it cannot be written."""
    with SessionWriter.reopen(path) as writer:
        writer.verdicts(verdicts)
        writer.event(branch, event.steps - 1, KIND, event.words or event.verdict, plain(event))


def _badness(one: TapVerdict) -> tuple[int, bool]:
    return _WORST.index(one.verdict), one.inherited


def _detail(one: TapVerdict) -> JSON:
    """The metrics, to six digits; what the verdict's own columns state, and what is not there, is left out."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in plain(one).items()
        if key not in ("tap", "step", "verdict") and value is not None and value is not False and value != ""
    }


def _reaches_logits(judgement: Judgement) -> bool:
    """Whether what is wrong shows in what both runs have, with taps and without."""
    failed = any(one.tap == "logits" and one.verdict == "fail" for one in judgement.taps)
    return failed or bool(judgement.mismatches)


def summary(
    judgement: Judgement,
    untapped: UntappedRun | None,
    causes: Sequence[Cause],
    steps: int,
    rules: Mapping[str, str],
    golden_session: str,
    quantisation: QuantisationLoss | None = None,
    prefill: int = 1,
) -> GoldenEvent:
    """The verdict over `steps` forward passes (the first `prefill` read prompts) under `rules`, its first divergence,
    the causes that explain it, best first. What each tap came to are the session's verdicts."""
    verdict, first, notes = judgement.verdict, judgement.first_divergence, judgement.notes
    if judgement.overflow is not None:
        notes += (f"this dtype does not carry the model: {judgement.overflow.in_words()}",)
    if untapped is None:
        pass
    elif verdict == "diverged" and untapped.verdict == "match" and _reaches_logits(judgement):
        notes += ("without taps the same passes match: what is wrong is in the attention that taps take",)
    elif untapped.verdict == "diverged" and verdict != "diverged":
        verdict, first = "diverged", untapped.first
    return GoldenEvent(
        verdict=verdict,
        max_abs_logits=judgement.max_abs_logits,
        tokens_identical=judgement.tokens_identical,
        first_divergence=first,
        tp=judgement.tp,
        tolerance=judgement.tolerance,
        token_mismatches=judgement.mismatches,
        flips=judgement.flips,
        notes=notes,
        untapped=untapped,
        overflow=judgement.overflow,
        faulty=judgement.faulty,
        steps=steps,
        prefill=prefill,
        words="" if first is None else first.in_words(),
        ledger=in_words(judgement),
        causes=tuple(causes),
        rules=dict(rules),
        golden_session=golden_session,
        reference=judgement.reference,
        quantisation=quantisation,
    )
