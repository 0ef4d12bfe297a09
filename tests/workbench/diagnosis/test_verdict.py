"""The verdict on synthetic engines: noise is no fault, every fault is found where it is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.sessions import IdsMismatch, SequenceStep, Session, SessionWriter
from lockstep.sessions.metrics import metrics
from lockstep.workbench.diagnosis.compare import TapComparison
from lockstep.workbench.diagnosis.judgement import DiagnosisError, Judgement
from lockstep.workbench.diagnosis.ledger import ledger
from lockstep.workbench.diagnosis.measure import MeasuredTap, Recordings, limits_of
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.verdict import FAIL, judge, verdict_of
from lockstep.workbench.judgements.golden_event import plain
from tests.workbench.diagnosis.synthetic import Case, Place, Spoil, halves, synthetic

pytestmark = pytest.mark.sampled_file(2)

Q = "layers.1.attn.q_proj"


def judged(case: Case, path: Path, **options: Any) -> Judgement:
    with synthetic(path / "engine.session", case.floor, **options) as engine:
        return judge(Recordings.of(engine, case.golden, case.floor))


def first(judgement: Judgement) -> tuple[str, int, int | None]:
    """(tap, step, rank) of the first divergence."""
    assert judgement.verdict == "diverged"
    assert judgement.first_divergence is not None
    return judgement.first_divergence.tap, judgement.first_divergence.step, judgement.first_divergence.rank


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_reference_itself_matches(case: Case, tmp_path: Path, tp: int) -> None:
    found = judged(case, tmp_path, tp=tp, kv_replicas=max(1, tp // 2))
    assert (found.verdict, found.first_divergence, found.tokens_identical) == ("match", None, True)
    assert (found.max_abs_logits, found.tp, found.tolerance) == (0.0, tp, "floor")
    kinds = {"absent" if tap.tap.endswith(".partial") else "pass" for tap in found.taps}
    assert {tap.verdict for tap in found.taps if tap.tap.endswith(".partial")} == {"absent"}
    assert {tap.verdict for tap in found.taps} == kinds
    assert len(found.taps) == len(case.golden.taps) * 3 * 2  # every tap of every step and sequence


@pytest.mark.parametrize(("chosen", "verdict"), [(0.0, "pass"), (2.0, "pass"), (9.0, "fail")])
def test_a_truth_of_zeros_that_the_reference_leaves_is_no_overflow(chosen: float, verdict: str) -> None:
    """Each token goes to expert 0, of the reference at the engine's dtype to expert 2."""
    tap, truth = "layers.1.mlp.topk_ids", np.zeros((1, 1))
    noise = metrics(truth + 2, truth)
    place = MeasuredTap(3, 0, tap, TapComparison(metrics(truth + chosen, truth)), noise, 0.0)
    found = verdict_of(place, limits_of("float16", [place]))
    assert found.verdict == verdict
    assert not math.isinf(found.floor)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), tp=st.sampled_from([1, 2]))
@pytest.mark.slow
def test_other_rounding_of_the_same_size_is_no_divergence(
    case: Case, tmp_path: Path, seed: int, tp: int
) -> None:
    """An engine that is as far from the truth as the reference is, in another direction, at every tap."""
    rng = np.random.default_rng(seed)

    def noisy(tap: str) -> Callable[[np.ndarray, Place], np.ndarray]:
        def spoil(whole: np.ndarray, at: Place) -> np.ndarray:
            truth = case.golden.rebuilt(tap, step=at.step, seq=at.seq).array
            assert truth is not None
            seen = np.isfinite(truth)
            size = np.sqrt(np.mean((whole[seen] - truth[seen]) ** 2)) if seen.any() else 0.0
            return np.where(seen, truth + rng.normal(0, size, truth.shape), truth)

        return spoil

    names = [tap.name for tap in case.golden.taps]
    replicated = {tap.name: tap.layout == "replicate" for tap in case.golden.taps}
    found = judged(
        case, tmp_path, tp=tp, spoil={name: noisy(name) for name in names if tp == 1 or not replicated[name]}
    )
    assert found.verdict == "match"
    assert found.max_abs_logits > 0


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_fault_well_above_the_noise_is_found_where_it_is(
    case: Case, tmp_path: Path, data: st.DataObject
) -> None:
    taps = [tap.name for tap in case.golden.taps if not tap.name.endswith((".partial", ".scores"))]
    tap, step, seq = (
        data.draw(st.sampled_from(taps)),
        data.draw(st.integers(0, 2)),
        data.draw(st.integers(0, 1)),
    )

    def spoil(whole: np.ndarray, at: Place) -> np.ndarray:
        return whole * (1 + 1e-4) if at == Place(step, seq) else whole

    found = judged(case, tmp_path, spoil={tap: spoil})
    assert first(found) == (tap, step, None)
    assert [(t.tap, t.step, t.seq) for t in found.taps if t.verdict == "fail"] == [(tap, step, seq)]


def test_a_dropped_bias_is_named_with_how_wrong_it_is(case: Case, tmp_path: Path) -> None:
    found = judged(case, tmp_path, tp=2, spoil={Q: lambda x, at: x - 0.25})
    assert first(found) == (Q, 0, None)
    divergence = found.first_divergence
    assert divergence is not None
    assert divergence.layer == 1
    assert divergence.ranks == (0, 1)
    assert divergence.max_abs == pytest.approx(0.25, rel=1e-4)
    whole = case.golden.rebuilt(Q, step=0).array
    assert whole is not None
    assert divergence.rel_l2 == pytest.approx(0.25 * math.sqrt(whole.size) / np.linalg.norm(whole), rel=1e-4)
    assert 0 < divergence.cosine < 1
    assert "times the noise floor" in divergence.reason


def test_the_wrong_rank_is_named(case: Case, tmp_path: Path) -> None:
    found = judged(case, tmp_path, tp=2, spoil={Q: lambda x, at: halves(x, 1, lambda part: part[:, ::-1])})
    assert first(found) == (Q, 0, 1)
    assert found.first_divergence is not None
    assert found.first_divergence.ranks == (1,)


def test_of_several_wrong_ranks_the_first_is_named_and_all_are_listed(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Place) -> dict[int, np.ndarray]:
        parts = np.split(x, 4, axis=1)
        return {rank: part + (rank >= 2) for rank, part in enumerate(parts)}

    found = judged(case, tmp_path, tp=4, kv_replicas=2, spoil={Q: spoil})
    assert first(found) == (Q, 0, 2)
    assert found.first_divergence is not None
    assert found.first_divergence.ranks == (2, 3)


def test_replicas_must_agree_to_the_last_bit(case: Case, tmp_path: Path) -> None:
    """A last-bit difference is within noise everywhere, and still no two ranks may differ."""

    def spoil(x: np.ndarray, at: Place) -> Any:
        other = x.astype(np.float32)
        other[0, 0] = np.nextafter(other[0, 0], np.float32(np.inf))
        return {0: x, 1: other, 2: x, 3: x} if at.step == 1 else x

    found = judged(case, tmp_path, tp=4, kv_replicas=2, spoil={"layers.0.attn.o_proj": spoil})
    assert first(found) == ("layers.0.attn.o_proj", 1, 1)
    assert found.first_divergence is not None
    assert "rank 1 differs from the other replicas" in found.first_divergence.reason


def test_nan_is_named_at_its_origin_and_inherited_below(case: Case, tmp_path: Path) -> None:
    """From the scores of layer 1 on everything is NaN; only the first is its own fault."""
    names = [tap.name for tap in case.golden.taps]
    origin = names.index("layers.1.attn.scores")
    spoil = {name: lambda x, at: np.full_like(x, np.nan) for name in names[origin:]}
    found = judged(case, tmp_path, spoil=spoil)
    assert first(found) == ("layers.1.attn.scores", 0, None)
    assert found.first_divergence is not None
    assert "NaN" in found.first_divergence.reason
    failed = [tap for tap in found.taps if tap.verdict == "fail"]
    assert {tap.tap for tap in failed if not tap.inherited} >= {"layers.1.attn.scores"}
    assert all(tap.inherited for tap in failed if tap.step == 0 and tap.tap.startswith("layers.2.mlp"))
    assert found.max_abs_logits == math.inf
    assert not found.tokens_identical


def test_inherited_means_downstream_and_not_merely_later(case: Case, tmp_path: Path) -> None:
    """k_proj does not read q_proj, so both are at fault by themselves; what reads them inherits."""
    taps = (Q, "layers.1.attn.k_proj", "layers.1.attn.q_rope", "layers.1.attn.scores", "layers.2.attn_norm")
    found = judged(case, tmp_path, spoil=dict.fromkeys(taps, lambda x, at: x * 1.5))
    inherited = {tap.tap: tap.inherited for tap in found.taps if tap.verdict == "fail" and tap.step == 0}
    assert inherited == dict(zip(taps, (False, False, True, True, True), strict=True))


def test_a_fault_reaches_later_steps_through_the_cache(case: Case, tmp_path: Path) -> None:
    tap, cache = "layers.0.attn.k_rope", "layers.0.attn.k_cache"
    spoil = {tap: lambda x, at: x * 2 if at.step == 0 else x, cache: lambda x, at: x * 2}
    found = judged(case, tmp_path, spoil=spoil)
    assert first(found) == (tap, 0, None)
    failed = {(t.tap, t.step): t.inherited for t in found.taps if t.verdict == "fail"}
    assert failed == {(tap, 0): False, (cache, 0): True, (cache, 1): True, (cache, 2): True}


def test_a_decode_fault_is_reported_at_its_step(case: Case, tmp_path: Path) -> None:
    spoil = {"layers.2.attn.q_rope": lambda x, at: x[..., ::-1] if at.step >= 1 else x}
    assert first(judged(case, tmp_path, spoil=spoil)) == ("layers.2.attn.q_rope", 1, None)


def test_a_wrong_shape_is_a_failure_with_both_shapes(case: Case, tmp_path: Path) -> None:
    spoil = {"layers.0.attn.k_cache": lambda x, at: x[-1:] if at.step == 1 else x}
    found = judged(case, tmp_path, spoil=spoil)
    assert first(found) == ("layers.0.attn.k_cache", 1, None)
    assert found.first_divergence is not None
    assert found.first_divergence.reason == "shape [1, 2, 8] instead of [13, 2, 8]"


def test_parts_that_do_not_fit_together_are_a_failure(case: Case, tmp_path: Path) -> None:
    spoil = {Q: lambda x, at: halves(x, 1, lambda part: part[:-1])}
    assert first(judged(case, tmp_path, tp=2, spoil=spoil))[0] == Q


def test_one_wrong_element_among_many_does_not_drown(case: Case, tmp_path: Path) -> None:
    """One that the noise of the whole tensor would cover."""
    tap = "layers.1.attn.v_cache"

    def spoil(x: np.ndarray, at: Place) -> np.ndarray:
        spoilt = x.copy()
        spoilt[0, 0, 3] += 6e-6 * np.abs(x).max()
        return spoilt if at == Place(0, 0) else x

    found = judged(case, tmp_path, spoil={tap: spoil})
    assert first(found)[:2] == (tap, 0)
    assert found.first_divergence is not None
    assert "element [0, 0, 3] is off by" in found.first_divergence.reason
    (verdict,) = (t for t in found.taps if t.verdict == "fail")
    assert verdict.ratio < FAIL


def test_noise_that_a_softmax_amplifies_is_no_divergence(case: Case, tmp_path: Path) -> None:
    """Scores within their limit, probabilities beyond theirs: the softmax is right on the scores it was given.

    The same probabilities from scores that do not explain them are a fault.
    """
    scores, probs, at = "layers.1.attn.scores", "layers.1.attn.probs", Place(1, 0)
    whole = case.floor.rebuilt(scores, step=1, seq=0).array
    assert whole is not None
    row = whole.astype(np.float64)
    likeliest = row == row.max(-1, keepdims=True)
    floor = next(t.floor for t in judged(case, tmp_path).taps if (t.tap, t.step, t.seq) == (scores, 1, 0))
    push = np.where(likeliest, 1.0, -1.0)  # all the error in the direction that moves the softmax most
    row += push * 2.8 * floor * np.linalg.norm(row) / np.linalg.norm(push)
    weights = np.exp(row - row.max(-1, keepdims=True))
    moved = weights / weights.sum(-1, keepdims=True)
    spoil = {
        scores: lambda x, here: row if here == at else x,
        probs: lambda x, here: moved if here == at else x,
    }
    found = judged(case, tmp_path, spoil=spoil)
    (verdict,) = (t for t in found.taps if (t.tap, t.step, t.seq) == (probs, 1, 0))
    assert verdict.ratio > FAIL
    assert (verdict.verdict, found.verdict) == ("suspect", "match")
    assert "right on its inputs, whose noise it amplifies" in verdict.reason
    assert first(judged(case, tmp_path, spoil={probs: spoil[probs]})) == (probs, 1, None)


def test_a_product_that_is_right_on_its_inputs_is_no_divergence_where_the_checkpoint_is_at_hand(
    case: Case, tmp_path: Path
) -> None:
    """The inputs are off within their limit, in the direction that moves the product most: that takes the weight to
    tell. The same product of inputs that do not explain it is a fault."""
    norm, tap, at = "layers.1.mlp_norm", "layers.1.mlp.gate", Place(1, 0)
    facts = Facts.of(case.model_dir, "float32")
    weight = facts.weight("model.layers.1.mlp.gate_proj.weight")
    x, right = (case.floor.rebuilt(name, step=1, seq=0).array for name in (norm, tap))
    assert weight is not None
    assert x is not None
    assert right is not None
    floors = {t.tap: t.floor for t in judged(case, tmp_path).taps if (t.step, t.seq) == (1, 0)}
    _, _, directions = np.linalg.svd(weight.astype(np.float64))
    push = directions[0] * 2.8 * floors[norm] * np.linalg.norm(x)
    moved = (x.astype(np.float64) + push).astype(np.float32)
    product = moved.astype(np.float64) @ weight.astype(np.float64).T
    if np.linalg.norm(product - right) <= FAIL * floors[tap] * np.linalg.norm(right):
        pytest.fail("the product is within its limit: nothing is tried")
    spoil: dict[str, Spoil] = {
        norm: lambda y, here: moved if here == at else y,
        tap: lambda y, here: product if here == at else y,
    }
    engine = synthetic(tmp_path / "a.session", case.floor, spoil=spoil)
    found = judge(Recordings.of(engine, case.golden, case.floor), facts)
    (verdict,) = (t for t in found.taps if (t.tap, t.step, t.seq) == (tap, 1, 0))
    assert verdict.verdict == "suspect"
    assert "right on its inputs" in verdict.reason
    wrong = synthetic(tmp_path / "b.session", case.floor, spoil={tap: spoil[tap]})
    assert first(judge(Recordings.of(wrong, case.golden, case.floor), facts)) == (tap, 1, None)


def test_a_fault_of_one_sequence_of_the_batch_is_reported_with_it(case: Case, tmp_path: Path) -> None:
    found = judged(case, tmp_path, spoil={"embed": lambda x, at: x + at.seq})
    assert first(found) == ("embed", 0, None)
    assert found.first_divergence is not None
    assert found.first_divergence.seq == 1


def test_other_ids_are_an_error_and_no_verdict(case: Case, tmp_path: Path) -> None:
    def other(sequence: SequenceStep) -> SequenceStep:
        return replace(sequence, ids=[int(sequence.ids[0]) + 1, *sequence.ids[1:]])

    with pytest.raises(IdsMismatch, match=r"step 0, sequence 0: engine\.session read ids"):
        judged(case, tmp_path, change=other)


def test_other_positions_are_reported_and_judged(case: Case, tmp_path: Path) -> None:
    """Positions are the engine's own doing: a fault in them has to be found, not refused."""
    found = judged(case, tmp_path, change=lambda s: replace(s, positions=[0] * len(s.ids)))
    assert found.notes == ("positions differ from step 0",)


def test_another_token_without_a_wrong_tensor_is_a_divergence(case: Case, tmp_path: Path) -> None:
    found = judged(case, tmp_path, change=lambda s: replace(s, emitted=7, forced=False))
    assert first(found) == ("logits", 0, None)
    assert found.first_divergence is not None
    assert "token 7 was chosen" in found.first_divergence.reason
    assert not found.tokens_identical


def test_without_a_reference_at_the_dtype_tolerances_are_fixed_and_labelled(
    case: Case, tmp_path: Path
) -> None:
    engine = synthetic(tmp_path / "engine.session", case.floor)
    found = judge(Recordings.of(engine, case.golden))
    assert (found.verdict, found.tolerance) == ("match", "fixed")
    assert found.notes == ("no reference at float32: judged by fixed tolerances",)
    spoilt = synthetic(tmp_path / "spoilt.session", case.floor, spoil={Q: lambda x, at: x * 1.01})
    assert first(judge(Recordings.of(spoilt, case.golden))) == (Q, 0, None)


def near_tie(first: int, second: int) -> dict[str, Spoil]:
    """Logits whose two largest, at these two tokens, are apart by less than float32's fixed tolerance."""

    def spoil(logits: np.ndarray, at: Place) -> np.ndarray:
        changed = logits.copy()
        changed[:, first] = np.abs(logits).max() * 1.5
        changed[:, second] = changed[:, first] * (1 - 1e-6)
        return changed

    return {"logits": spoil}


def test_a_near_tie_is_no_wrong_token_under_fixed_tolerances(case: Case, tmp_path: Path) -> None:
    with (
        synthetic(tmp_path / "golden.session", case.floor, spoil=near_tie(7, 9)) as golden,
        synthetic(
            tmp_path / "engine.session",
            case.floor,
            spoil=near_tie(9, 7),
            change=lambda s: replace(s, emitted=None),
        ) as engine,
    ):
        found = judge(Recordings.of(engine, golden))
        assert found.first_divergence is None
        assert {(miss.engine, miss.reference, miss.tie) for miss in found.mismatches} == {(9, 7, True)}


def overflown(tap: str) -> dict[str, Spoil]:
    """What comes of an overflow at a tap: NaN in the logits."""
    return {tap: lambda x, at: np.full_like(x, np.inf), "logits": lambda x, at: np.full_like(x, np.nan)}


def test_an_overflow_that_the_reference_has_as_well_is_inconclusive(case: Case, tmp_path: Path) -> None:
    act = "layers.1.mlp.act"
    with (
        synthetic(tmp_path / "floor.session", case.floor, spoil=overflown(act)) as floor,
        synthetic(tmp_path / "engine.session", case.floor, spoil=overflown(act)) as engine,
        synthetic(
            tmp_path / "wrong.session", case.floor, spoil={**overflown(act), Q: lambda x, at: x * 1.01}
        ) as wrong,
    ):
        found = judge(Recordings.of(engine, case.golden, floor))
        assert (found.verdict, found.first_divergence, found.mismatches) == ("inconclusive", None, ())
        assert found.overflow is not None
        assert found.overflow.in_words() == f"{act} at step 0: the reference overflows in float32"
        assert first(judge(Recordings.of(wrong, case.golden, floor))) == (Q, 0, None)


def test_noise_that_has_grown_beyond_a_fixed_tolerance_is_no_divergence(case: Case, tmp_path: Path) -> None:
    grown = {"final_norm": lambda x, at: x * (1 + 4e-5), "logits": lambda x, at: x * (1 + 4e-5)}
    with (
        synthetic(tmp_path / "engine.session", case.floor, spoil=grown) as engine,
        synthetic(tmp_path / "corrected.session", case.floor) as corrected,
    ):
        sides = Recordings.of(engine, case.golden)
        plain_run = judge(sides)
        assert plain_run.verdict == "diverged"
        found = ledger(plain_run, sides.held(corrected))
        assert (found.verdict, found.first_divergence, found.faulty) == ("match", None, ())
        assert "noise has grown on its way" in found.notes[-1]


def test_taps_that_were_not_captured_are_absent_and_all_absent_is_an_error(
    case: Case, tmp_path: Path
) -> None:
    found = judged(case, tmp_path, skip=lambda tap: ".mlp." in tap)
    absent = {
        tap.tap.partition(".mlp.")[1] or tap.tap.rpartition(".")[2]
        for tap in found.taps
        if tap.verdict == "absent"
    }
    assert absent == {".mlp.", "partial"}
    with pytest.raises(DiagnosisError, match="no tensor of any tap"):
        judged(case, tmp_path, skip=lambda tap: True)


def test_taps_that_the_engine_cannot_have_are_absent_for_its_reason(case: Case, tmp_path: Path) -> None:
    """Nothing that an engine's own recorder says it cannot have is judged, nor taken for the first to differ."""
    cache = "layers.0.attn.k_cache"
    with synthetic(tmp_path / "engine.session", case.floor, spoil={cache: lambda x, at: -x}) as engine:
        sides = Recordings.of(engine, case.golden, case.floor)
        assert judge(sides).first_divergence is not None
        engine.meta.absent[cache] = "it is inside of the attention kernel"
        found = judge(sides)
    assert found.verdict == "match"
    reasons = {(one.verdict, one.reason) for one in found.taps if one.tap == cache}
    assert reasons == {("absent", "it is inside of the attention kernel")}


@pytest.mark.parametrize("lost", [True, False])
def test_a_golden_that_does_not_stand_up_to_itself_is_refused(case: Case, tmp_path: Path, lost: bool) -> None:
    """One that lacks a tap, or holds NaN, judges nobody."""
    options: dict[str, Any] = {"skip": lambda tap: tap == "final_norm"} if lost else {
        "spoil": {"final_norm": lambda x, at: x * np.nan}
    }  # fmt: skip
    golden = synthetic(tmp_path / "golden.session", case.golden, **options)
    with SessionWriter.reopen(golden.path) as writer:
        writer.set_meta(absent=case.golden.meta.absent)
    golden = Session.open(golden.path)
    with pytest.raises(DiagnosisError, match=r"the golden final_norm (is missing|holds NaN) at step 0"):
        judge(Recordings.of(synthetic(tmp_path / "engine.session", case.floor), golden, case.floor))


def test_a_golden_that_ends_too_early_is_refused(case: Case, tmp_path: Path) -> None:
    class Short:
        """The golden session without its last step."""

        def __getattr__(self, name: str) -> Any:
            return getattr(case.golden, name)

        def steps(self, branch: int = 0) -> range:
            return range(2)

    with pytest.raises(IdsMismatch, match="golden session lacks step 2"):
        judge(Recordings.of(synthetic(tmp_path / "engine.session", case.floor), Short()))  # type: ignore[arg-type]


def test_the_judgement_is_json(case: Case, tmp_path: Path) -> None:
    found = judged(case, tmp_path, tp=2, spoil={"layers.0.attn.scores": lambda x, at: x * np.nan})
    data = json.loads(json.dumps(plain(found), allow_nan=False))
    assert data["verdict"] == "diverged"
    assert data["first_divergence"]["tap"] == "layers.0.attn.scores"
    assert data["first_divergence"]["layer"] == 0
    assert data["first_divergence"]["rank"] is None
    assert data["first_divergence"]["max_abs"] is None  # infinite
    assert data["tp"] == 2
    assert {"tap", "step", "max_abs", "rel_l2", "cosine", "verdict"} <= data["taps"][0].keys()
