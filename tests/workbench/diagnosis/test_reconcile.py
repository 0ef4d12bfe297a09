"""What a run is judged by its reference, corrected by what its operations are judged by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.workbench.diagnosis.diagnose import Explanation
from lockstep.workbench.diagnosis.judgement import Judgement, TapVerdict
from lockstep.workbench.diagnosis.operations.site import Unjudged
from lockstep.workbench.diagnosis.reconcile import reconciled
from lockstep.workbench.judgements.golden_event import Divergence, Faulty
from tests.workbench.diagnosis.test_merging import wrong

RIGHT = Explanation((), (), (), (), 40, ())


def diverged(tap: str, ratio: float) -> Judgement:
    """A run of which a tap fails by that many noise floors, and the logits inherit it."""
    taps = (
        TapVerdict("embed", 0, 0, "pass", ratio=1.0),
        TapVerdict(tap, 0, 0, "fail", ratio=ratio),
        TapVerdict("logits", 0, 0, "fail", ratio=5 * ratio, inherited=True),
    )
    return Judgement("diverged", 0.1, True, Divergence(tap), taps, 1, "floor")


@pytest.mark.parametrize(
    ("tap", "ratio", "verdict"),
    [
        ("layers.2.attn.probs", 44.0, "match"),  # a correct engine on scores of several hundred
        ("layers.2.attn.context", 44.0, "match"),
        ("layers.2.mlp.act", 5.0, "match"),
        ("layers.2.mlp.act", 44.0, "diverged"),
        ("embed", 44.0, "diverged"),
    ],
)
def test_rounding_grows_in_a_softmax_without_bound_and_elsewhere_by_little(
    tap: str, ratio: float, verdict: str
) -> None:
    found = reconciled(diverged(tap, ratio), RIGHT)
    assert found.verdict == verdict
    assert (found.first_divergence is None) == (verdict == "match")
    assert {one.verdict for one in found.taps} == (
        {"pass", "suspect"} if verdict == "match" else {"pass", "fail"}
    )


def test_what_no_operation_does_on_golden_inputs_has_grown() -> None:
    known = diverged("layers.2.mlp.act", 44.0)
    taps = tuple(replace(one, inherited=one.verdict == "fail") for one in known.taps)
    assert reconciled(replace(known, taps=taps, faulty=()), RIGHT).verdict == "match"


def test_what_could_not_be_judged_by_itself_is_not_excused() -> None:
    unjudged = replace(RIGHT, unjudged=(Unjudged("layers.2.attn.scores", 0, "not recorded"),))
    assert reconciled(diverged("layers.2.attn.probs", 44.0), unjudged).verdict == "diverged"


def test_what_is_not_finite_where_the_dtype_does_not_carry_the_model_is_no_divergence() -> None:
    """The reference overflows too, but at other tokens."""
    known = diverged("layers.2.attn.scores", float("inf"))
    taps = tuple(replace(one, rel_l2=float("inf")) if one.verdict == "fail" else one for one in known.taps)
    known = replace(known, taps=taps, overflow=Divergence("layers.1.attn.scores"))
    assert reconciled(known, replace(RIGHT, overflown=True)).verdict == "inconclusive"
    finite = tuple(replace(one, rel_l2=1.0) for one in taps)
    assert reconciled(replace(known, taps=finite), replace(RIGHT, overflown=True)).verdict == "diverged"


def test_what_has_another_shape_because_its_input_has_is_not_wrong_by_itself() -> None:
    """A projection of another shape cannot be replaced by the golden one: the rotation after it is misshapen too."""
    shape = "shape [13, 4, 8] instead of [13, 8, 8]"
    taps = [f"layers.0.attn.{name}" for name in ("q_proj", "q_rope", "v_proj", "v_cache", "scores")]
    wrong_ones = tuple(replace(wrong(tap, order=i), shape=shape) for i, tap in enumerate(taps))
    known = replace(diverged(taps[0], 44.0), faulty=(Faulty(taps[0], 0, 0, 1.0, 44.0),))
    found = replace(RIGHT, wrong=wrong_ones, misshapen=frozenset((taps[1], taps[3])))
    judged = reconciled(known, found)
    assert judged.faulty is not None
    assert [one.tap for one in judged.faulty] == [taps[0], taps[2], taps[4]]
