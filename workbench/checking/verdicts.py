"""What a judgement leaves in a session: a verdict a tap and step, and the event that sums it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sessions import Verdict
from workbench.diagnosis.evidence import Signature
from workbench.diagnosis.judgement import Divergence, Judgement, TapVerdict
from workbench.diagnosis.ledger import in_words as ledger_in_words

_WORST = ("fail", "suspect", "pass", "absent")


def verdict_rows(taps: Sequence[TapVerdict], branch: int = 0) -> list[Verdict]:
    """One verdict a tap and step: of several sequences the worst (an inherited failure is less than one of the
    operation's own), of equals the first."""
    worst: dict[tuple[int, str], TapVerdict] = {}
    for one in taps:
        known = worst.setdefault((one.step, one.tap), one)
        if _badness(one) < _badness(known):
            worst[one.step, one.tap] = one
    return [Verdict(branch, step, tap, one.verdict, _detail(one)) for (step, tap), one in worst.items()]


def _badness(one: TapVerdict) -> tuple[int, bool]:
    return _WORST.index(one.verdict), one.inherited


def in_words(first: Divergence | None) -> str:
    """ "layers.0.attn.q_proj at step 0, rank 1: 12 times the noise floor"; "" for none."""
    if first is None:
        return ""
    rank = "" if first.rank is None else f", rank {first.rank}"
    return f"{first.tap} at step {first.step}{rank}: {first.reason}"


def summary(judgement: Judgement, causes: Sequence[Signature], steps: int) -> dict[str, Any]:
    """The data of a "golden" event: the verdict over `steps` forward passes, its first divergence, the causes
    that explain it, best first. What each tap came to are the session's verdicts."""
    told = {key: value for key, value in judgement.to_json().items() if key != "taps"}
    return told | {
        "steps": steps,
        "words": in_words(judgement.first_divergence),
        "ledger": ledger_in_words(judgement),
        "causes": [
            {"name": one.name, "text": one.text, "fitted": one.fitted, "residual": one.residual}
            for one in causes
        ],
    }


def _detail(one: TapVerdict) -> dict[str, Any]:
    """The metrics, to six digits; what the verdict's own columns say, and what is not there, is left out."""
    said = {key: value for key, value in one.to_json().items() if key not in ("tap", "step", "verdict")}
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in said.items()
        if value is not None and value is not False and value != ""
    }
