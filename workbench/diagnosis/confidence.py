"""How often an answer like this one is right, from quantities that mean something.

`docs/reliability_of_causes.py` draws what it states against how often that was so.
"""

from __future__ import annotations

import math

from lockstep.workbench.diagnosis.findings import Hypothesis
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER
from lockstep.workbench.diagnosis.merging import FindingGroup
from lockstep.workbench.diagnosis.operations.deviation import WRONG
from lockstep.workbench.judgements.reproduction import Outcome

#: Error over noise from which on a fit means something: a hypothesis that explains less than that may be one of many.
MEANINGFUL = 30.0
#: How often the first of several hypotheses that explain as much is right: it was in every such answer of the
#: catalogue, about 130; the others have what is left.
FIRST = 0.9

#: What is left of the doubt about a cause that gives the run's tensors and tokens in the reference; and of the
#: confidence in one that does not.
_DOUBT_LEFT, _SURE_LEFT = 0.5, 0.5


def confidence_after(sure: float, outcome: Outcome, rivals: int) -> float:
    """The confidence in a cause that was put into the reference. `rivals`: how many explain the same numbers as well,
    which that cannot distinguish."""
    if outcome == "reproduced":
        most = FIRST if rivals else 1.0
        return most - _DOUBT_LEFT * (most - min(sure, most))
    return _SURE_LEFT * sure if outcome == "not reproduced" else sure


def confidences(group: FindingGroup) -> tuple[float, ...]:
    """The share of answers of this kind that are right, between 0 and 1: of the hypothesis that is reported first, then
    of each that explains as much. A product of

    - by how much the error stands out of the noise (what is near it, much explains),
    - how many numbers each fitted figure had to reproduce,
    - how near the prediction comes to what the noise alone leaves,
    - the share that each has where several explain as much.
    """
    shares = [
        _of(finding.ratio, hypothesis)
        for finding, hypothesis in zip(group.findings, group.chosen, strict=True)
    ]
    best = max(shares, default=0.0)
    # Several places agree on the same figures: each is a test of its own, but for fits of as many numbers as may be.
    tests = len(shares) if any(map(_reproduces, group.chosen)) else 1
    together = 1 - (1 - best) / math.sqrt(tests) if shares else 0.0
    others = len(group.others)
    return (FIRST * together, *[(1 - FIRST) * together / others] * others) if others else (together,)


def _reproduces(hypothesis: Hypothesis) -> bool:
    """Whether more was given than the numbers that were fitted could take up."""
    return hypothesis.elements >= ELEMENTS_A_PARAMETER * (hypothesis.parameters + 1)


def _of(ratio: float, hypothesis: Hypothesis) -> float:
    contrast = 1.0 if not math.isfinite(ratio) else 1 - math.exp(-max(ratio - WRONG, 0.0) / MEANINGFUL)
    data = 1 - 1 / (1 + hypothesis.elements / (8.0 * (1 + hypothesis.parameters)))
    left = 1 - 0.2 * min(hypothesis.ratio / WRONG, 1.0)
    return 0.99 * contrast * data * left
